"""Downloads survive all temporary failures of a hub, and permanent failures raise an error and leave no files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
from conftest import toy_reviews, write_parameters, write_tiny_bert
from filelock import FileLock
from hub_stand_in import CUT, GOOD, STRANGER, Repository, Trouble, hub
from hub_worker import LIMIT_SECONDS, run_download, run_load, start_worker
from stage_process import PATHS
from test_download import write_hub_layout

import attnmix
from attnmix.core.errors import InputError
from attnmix.core.store.runs import Run

OLD, NEW = "a" * 40, "b" * 40
# Temporary failures that downloads must survive. The place `storage` serves the large files.
TEMPORARY = [
    *(Trouble("info", kind) for kind in ("503", "reset", "cut")),
    *(Trouble("tree", kind) for kind in ("429", "500", "cut", "hang", "reset")),
    *(Trouble("file", kind) for kind in ("503", "reset", "cut", "corrupt", "short", "endless")),
    *(Trouble("storage", kind) for kind in ("503", "cut", "stall", "reset", "corrupt", "short", "portal", "endless")),
]
OVER = f"even after {LIMIT_SECONDS:g} s; try again later"
RESET = f"the connection broke ([Errno 104] Connection reset by peer), {OVER}"
SPOILT = "did not match the hub's listing in two downloads"
# Permanent failures, each with a substring of the expected error message.
LASTING = [
    (Trouble("info", "503", None), f"the server answers 503 Service Unavailable, {OVER}"),
    (Trouble("info", "429", None), f"the server answers 429 Too Many Requests, {OVER}"),
    (Trouble("tree", "hang", None), f"the server does not respond, {OVER}"),
    (Trouble("tree", "drip", None), f"the response is incomplete, {OVER}"),
    (Trouble("tree", "reset", None), RESET),
    (Trouble("tree", "portal", None), "is not a hub; log in to the network if it has a login page"),
    (Trouble("file", "portal", None), "is not a hub; log in"),
    (Trouble("file", "corrupt", None), SPOILT),
    (Trouble("storage", "503", None), f"the server answers 503 Service Unavailable, {OVER}"),
    (Trouble("storage", "stall", None), f"the server does not respond, {OVER}"),
    (Trouble("storage", "cut", None), "the connection broke (peer closed connection without sending complete "),
    (Trouble("storage", "reset", None), RESET),
    (Trouble("storage", "corrupt", None), SPOILT),
    (Trouble("storage", "short", None), SPOILT),
    (Trouble("storage", "endless", None), SPOILT),
]
KINDS = ("model", "dataset")
# One failure per place suffices for datasets and `attnmix.load`, because all downloads share the same code.
TEMPORARY_BY_PLACE = list({trouble.place: trouble for trouble in TEMPORARY}.values())
LASTING_BY_PLACE = list({trouble.place: (trouble, expected) for trouble, expected in LASTING}.values())


def named(trouble: Trouble) -> str:
    """Return the name of the repository with this failure."""
    return f"owner/{trouble.place}-{trouble.kind}-{trouble.times}".replace(" ", "-")


class Served(NamedTuple):
    """A hub, a process that runs the stage `download`, and the served files."""

    address: str
    worker: ProcessPoolExecutor
    repositories: dict[str, Repository]
    data: dict[str, Path]
    model: dict[str, Path]
    home: Path
    stop: Callable[[], None]

    def download(self, folder: Path, token: str | None = None, *, checks_model: bool = True, **changes: Any) -> Path:
        """Run the stage in `folder`, by default with a model and a dataset for which it succeeds.

        Return the folder.

        Tests that compare all bytes of a model can omit the checks of the model; these take a third of the time.
        """
        folder.mkdir(exist_ok=True)
        defaults = {"dataset": {"name": "owner/reviews"}, "model": {"name": "owner/bert"}}
        write_parameters(folder, **(defaults | changes))
        self.worker.submit(run_download, folder, token, checks_model).result()
        return folder

    def failure(self, folder: Path, token: str | None = None, **changes: Any) -> str:
        """Return the error message of the stage.

        Assert that it is one line and that the stage writes no outputs to a folder without files.
        """
        new = not folder.exists() or not any(folder.iterdir())
        with pytest.raises(InputError) as raised:
            self.download(folder, token, **changes)
        assert "\n" not in str(raised.value)
        assert not new or [path.name for path in folder.iterdir()] == ["params.yaml"]
        self.assert_nothing_is_left()
        return str(raised.value)

    def assert_nothing_is_left(self) -> None:
        """Assert that the hub cache contains no partial files, and that no locks are held."""
        files = [path for path in self.home.rglob("*") if path.is_file()]
        assert [path for path in files if path.suffix in (".incomplete", ".tmp")] == []
        for path in files:
            if path.suffix == ".lock":
                FileLock(path, blocking=False).acquire().lock.release()

    def cache(self, kind: str, name: str) -> Path:
        """Return the folder of a repository in the hub cache."""
        return self.home / "hub" / f"{kind}s--{name.replace('/', '--')}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a hub with a dataset and a model of two commits each, and copies with other access rights or failures."""
    root = tmp_path_factory.mktemp("hub")
    data, model = {}, {}
    for seed, commit in enumerate((OLD, NEW)):
        reviews = toy_reviews(40, seed), toy_reviews(20, 10 + seed)
        data[commit] = write_hub_layout(root / commit / "data", *reviews)
        model[commit] = write_tiny_bert(root / commit / "model", seed=seed)
        (model[commit] / "pytorch_model.bin").write_bytes(b"pickle")
    changed = {name: shutil.copytree(model[NEW], root / name) for name in ("pickled", "known", "foreign")}
    (changed["pickled"] / "model.safetensors").unlink()
    for name, kind in (("known", "bert"), ("foreign", "nothing_of_the_kind")):
        for file, more in (("config.json", {"model_type": kind}), ("tokenizer_config.json", {})):
            values = json.loads((changed[name] / file).read_text(encoding="utf-8")) | more
            values["auto_map"] = {"AutoConfig": "own.Config"}
            (changed[name] / file).write_text(json.dumps(values), encoding="utf-8")
        (changed[name] / "own.py").write_text("raise SystemExit('code of a repository was run')\n", encoding="utf-8")
    refs = {"v1.0": OLD, "a/branch": OLD}
    repositories = {
        "datasets/owner/reviews": Repository(data, refs),
        "datasets/owner/private": Repository(data, access="private"),
        "models/owner/bert": Repository(model, refs),
        **{f"models/owner/{access}": Repository(model, access=access) for access in ("private", "gated", "forbidden")},
        **{f"models/owner/{name}": Repository({NEW: folder}) for name, folder in changed.items()},
    }
    for trouble in (*TEMPORARY, *(trouble for trouble, _ in LASTING)):
        repositories[f"models/{named(trouble)}"] = Repository(model, trouble=trouble)
        repositories[f"datasets/{named(trouble)}"] = Repository(data, trouble=trouble)
    for kind, commits in (("model", model), ("dataset", data)):
        repositories[f"{kind}s/owner/further"] = Repository(commits, trouble=Trouble("storage", "further", None))
        repositories[f"{kind}s/owner/whole"] = Repository(commits, trouble=Trouble("storage", "cut"), ranges=False)
    home = root / "home"
    with ExitStack() as running:
        address = running.enter_context(hub(repositories))
        with start_worker(environment(address, home)) as worker:
            yield Served(address, worker, repositories, data, model, home, running.close)


def environment(address: str, home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process without access to any other hub, token or cache."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    own = {"HF_ENDPOINT": address, "HF_HOME": str(home)} | PATHS
    return inherited | own | {"OMP_NUM_THREADS": "1", "no_proxy": "127.0.0.1"} | more


def digests(folder: Path) -> set[str]:
    """Return the digests of all files in a folder, following links."""
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def assert_as_served(folder: Path, served: Served, commit: str) -> None:
    """Assert that the reviews and the model's files were downloaded unchanged, without the pickled weights."""
    reviews = toy_reviews(20, 10 + (OLD, NEW).index(commit))
    test = pd.read_parquet(folder / "data/reviews/test.parquet")
    assert test["text"].tolist() == reviews["text"].tolist()
    assert test["label"].tolist() == reviews["label"].tolist()
    assert set(test["label_name"]) == {"worse", "better"}
    written = {path.name: path.read_bytes() for path in (folder / "models/pretrained").iterdir()}
    assert written == {name: (served.model[commit] / name).read_bytes() for name in written}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(written)
    assert "pytorch_model.bin" not in written
    assert not (folder / ".unfinished").exists()


def commits(folder: Path) -> dict[str, Any]:
    metrics = json.loads((Run(folder).metrics_folder / "download.json").read_text(encoding="utf-8"))
    return {name: value for name, value in metrics.items() if name.endswith("_commit")}


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), ("v1.0", OLD), ("a/branch", OLD), (OLD, OLD)])
def test_revision_is_downloaded_and_its_commit_recorded(
    tmp_path: Path, served: Served, revision: str | None, commit: str
) -> None:
    model, data = ({"name": f"owner/{name}", "revision": revision} for name in ("bert", "reviews"))
    assert_as_served(served.download(tmp_path, model=model, dataset=data), served, commit)
    assert commits(tmp_path) == {"model_commit": commit, "dataset_commit": commit}


def test_base_model_has_its_own_revision(tmp_path: Path, served: Served) -> None:
    served.download(tmp_path, model={"name": "owner/bert", "base": "owner/bert@v1.0"})
    for folder, commit in (("pretrained", OLD), ("pretrained/own", NEW)):
        weights = (tmp_path / "models" / folder / "model.safetensors").read_bytes()
        assert weights == (served.model[commit] / "model.safetensors").read_bytes()
    assert commits(tmp_path) == {"base_commit": OLD, "model_commit": NEW, "dataset_commit": NEW}


@pytest.mark.parametrize("trouble", TEMPORARY, ids=named)
def test_temporary_failures_are_retried(tmp_path: Path, served: Served, trouble: Trouble) -> None:
    served.download(tmp_path, checks_model=False, **{kind: {"name": named(trouble)} for kind in KINDS})
    for kind in KINDS:
        assert served.repositories[f"{kind}s/{named(trouble)}"].troubled == trouble.times
    assert_as_served(tmp_path, served, NEW)


def describe_parameter(value: Any) -> str:
    """Return the part of a test's name for a kind or a failure."""
    if isinstance(value, Trouble):
        return named(value)
    return value if value in KINDS else ""


@pytest.mark.parametrize(
    ("kind", "trouble", "expected"),
    [*(("model", *each) for each in LASTING), *(("dataset", *each) for each in LASTING_BY_PLACE)],
    ids=describe_parameter,
)
def test_lasting_failure_is_one_error_without_files(
    tmp_path: Path, served: Served, trouble: Trouble, expected: str, kind: str
) -> None:
    error = served.failure(tmp_path, **{kind: {"name": named(trouble)}})
    assert error.startswith(
        f"{kind}.name: {named(trouble)} is not a local folder and cannot be downloaded from the hub"
    )
    assert expected in error
    assert "secret" not in error  # part of a signed address
    # Files with wrong bytes must not remain in the cache, where other programs would use them.
    contents = digests((served.model if kind == "model" else served.data)[NEW])
    for part in ("snapshots", "blobs"):
        assert digests(served.cache(kind, named(trouble)) / part) <= contents


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_file_is_resumed_until_complete(tmp_path: Path, served: Served, kind: str) -> None:
    assert_as_served(served.download(tmp_path, checks_model=False, **{kind: {"name": "owner/further"}}), served, NEW)
    starts = served.repositories[f"{kind}s/owner/further"].starts
    assert max(starts) >= CUT  # for a model, the sum of all waits exceeds the time limit
    # The requests for a file begin with byte 0, and each later request resumes after the last received byte.
    first_requests = [number for number, start in enumerate(starts) if start == 0]
    for begin, end in zip(first_requests, [*first_requests[1:], len(starts)], strict=True):
        assert starts[begin:end] == [CUT * number for number in range(end - begin)]


@pytest.mark.parametrize("kind", KINDS)
def test_storage_without_ranges_is_read_from_start(tmp_path: Path, served: Served, kind: str) -> None:
    assert_as_served(served.download(tmp_path, checks_model=False, **{kind: {"name": "owner/whole"}}), served, NEW)
    # Duplicate bytes would change the hash, and the first file would be downloaded again.
    starts = [0, CUT] if kind == "model" else [0, CUT, 0]  # a dataset has a second file
    assert served.repositories[f"{kind}s/owner/whole"].starts == starts


@pytest.mark.parametrize("name", [*map(named, TEMPORARY_BY_PLACE), "owner/further", "owner/whole", "owner/bert"])
def test_load_survives_temporary_failures(served: Served, name: str) -> None:
    shutil.rmtree(served.cache("model", name), ignore_errors=True)
    repository = served.repositories[f"models/{name}"]
    repository.troubled = 0
    repository.starts.clear()
    local = attnmix.load(served.model[NEW]).network.state_dict()
    loaded = served.worker.submit(run_load, name).result()
    assert loaded == {key: tensor.numpy().tobytes() for key, tensor in local.items()}
    assert repository.starts  # by httpx; the client's own transfers would bypass the server


@pytest.mark.parametrize(("trouble", "expected"), LASTING_BY_PLACE, ids=lambda each: getattr(each, "place", ""))
def test_load_reports_lasting_failure(served: Served, trouble: Trouble, expected: str) -> None:
    shutil.rmtree(served.cache("model", named(trouble)), ignore_errors=True)
    with pytest.raises(InputError) as raised:
        served.worker.submit(run_load, named(trouble)).result()
    assert expected in str(raised.value)
    served.assert_nothing_is_left()


REFUSALS: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("model", {"name": "owner/nothing"}, None, "the hub has no public model of this name; correct the name, or"),
    ("dataset", {"name": "owner/private"}, None, "for a private one, log in (`hf auth login`, or a token in HF"),
    ("model", {"name": "owner/bert"}, "hf_old", "the hub rejects the token from HF_TOKEN or the last login; log in"),
    ("model", {"name": "owner/gated"}, STRANGER, "it is gated; accept its terms at {address}/owner/gated and log"),
    ("model", {"name": "owner/forbidden"}, STRANGER, "the hub denies access; log in"),
    ("model", {"name": "owner/bert", "revision": "v2"}, None, "at revision v2: this branch, tag or commit does not ex"),
    (
        "dataset",
        {"name": "owner/reviews", "revision": "c" * 40},
        None,
        "this branch, tag or commit does not exist; {address}/d",
    ),
    ("model", {"name": "owner/pickled"}, None, "has no model.safetensors; other formats are not loaded"),
    ("model", {"name": "owner/foreign"}, None, "has the type 'nothing_of_the_kind', which requires code from its re"),
]


@pytest.mark.parametrize(("section", "values", "token", "expected"), REFUSALS)
def test_refusal_by_hub_is_explained(
    tmp_path: Path, served: Served, section: str, values: dict[str, Any], token: str | None, expected: str
) -> None:
    error = served.failure(tmp_path, token, **{section: values})
    assert error.startswith(f"{section}.name: {values['name']} ")
    assert expected.format(address=served.address) in error
    assert not token or token not in error


@pytest.mark.parametrize("access", ["private", "gated", "forbidden"])
def test_token_grants_access_and_is_not_stored(tmp_path: Path, served: Served, access: str) -> None:
    assert_as_served(served.download(tmp_path, GOOD, model={"name": f"owner/{access}"}), served, NEW)
    files = [path for folder in (tmp_path, served.home) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if GOOD.encode() in path.read_bytes()] == []


def test_stored_login_grants_access(tmp_path: Path, served: Served) -> None:
    served.home.mkdir(exist_ok=True)
    (served.home / "token").write_text(GOOD, encoding="utf-8")  # as `hf auth login` does
    try:
        assert_as_served(served.download(tmp_path, dataset={"name": "owner/private"}), served, NEW)
    finally:
        (served.home / "token").unlink()


def test_repository_code_is_neither_run_nor_kept(tmp_path: Path, served: Served) -> None:
    pretrained = Run(served.download(tmp_path, model={"name": "owner/known"})).pretrained
    for file in ("config.json", "tokenizer_config.json"):
        kept, own = (
            json.loads((folder / file).read_text(encoding="utf-8")) for folder in (pretrained, served.model[NEW])
        )
        assert kept == own
    assert not (pretrained / "own.py").exists()


def test_cached_file_is_verified_by_hash(tmp_path: Path, served: Served) -> None:
    served.download(tmp_path / "first")
    asked = served.repositories["models/owner/bert"].asked
    asked.clear()
    assert_as_served(served.download(tmp_path / "second"), served, NEW)
    assert asked == ["info"]  # resolves `main` to a commit
    weights = served.home / "hub/models--owner--bert/snapshots" / NEW / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert_as_served(served.download(tmp_path / "third"), served, NEW)
    assert asked[-1] == "storage"


@pytest.mark.long  # two more processes
def test_offline_mode_uses_cache_and_names_missing_files(tmp_path: Path, served: Served) -> None:
    # The shared process would use its own listings, although other tests have removed the listed files.
    with start_worker(environment(served.address, served.home)) as worker:
        online = served._replace(worker=worker).download(tmp_path / "online")
    for repository in served.repositories.values():
        repository.asked.clear()
    with start_worker(environment(served.address, served.home, HF_HUB_OFFLINE="1")) as worker:
        offline = served._replace(worker=worker)
        assert_as_served(offline.download(tmp_path / "offline"), served, NEW)
        assert commits(tmp_path / "offline") == commits(online)
        error = offline.failure(tmp_path / "lacking", model={"name": "owner/nothing"})
    assert "HF_HUB_OFFLINE is set, and the cache in HF_HOME is incomplete; unset it" in error
    assert not any(repository.asked for repository in served.repositories.values())


def test_unreadable_data_set_leaves_previous_files(tmp_path: Path, served: Served) -> None:
    folder = shutil.copytree(served.data[NEW], tmp_path / "unreadable")
    (folder / "plain_text/train-00000-of-00001.parquet").write_bytes(b"no parquet")
    served.repositories["datasets/owner/unreadable"] = Repository({OLD: folder})
    run = served.download(tmp_path / "run")
    error = served.failure(run, dataset={"name": "owner/unreadable"})
    file = "owner/unreadable/plain_text/train-00000-of-00001.parquet"
    assert error.startswith(f"dataset.name: {file}: Parquet magic bytes not found")
    assert_as_served(run, served, NEW)


def test_only_requested_configuration_is_downloaded(tmp_path: Path, served: Served) -> None:
    folder = shutil.copytree(served.data[NEW], tmp_path / "files")
    shutil.copytree(folder / "plain_text", folder / "other")
    served.repositories["datasets/owner/several"] = several = Repository({OLD: folder})
    run = served.download(tmp_path / "run", dataset={"name": "owner/several:plain_text"})
    assert several.asked.count("storage") == 2
    assert_as_served(run, served, NEW)


def test_unreachable_hub_is_one_error(tmp_path: Path, served: Served) -> None:
    served.stop()
    error = served.failure(tmp_path)
    start = "model.name: owner/bert is not a local folder and cannot be downloaded from the hub: "
    assert error.startswith(f"{start}{served.address} cannot be reached ([Errno 111] Connection refused)")
