"""The real hub code, against a stand-in for the hub on loopback that fails in every way that a hub can."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
from conftest import REPOSITORY, toy_reviews, write_parameters, write_tiny_bert
from hub_stand_in import GOOD, STRANGER, Repository, Trouble, hub
from hub_worker import Worker
from stage_process import TESTS, run_to_its_end
from test_download import write_hub_layout

OLD, NEW = "a" * 40, "b" * 40
# Temporary troubles, which the stage must not mind; the file of a data set is in the storage too.
TEMPORARY = [
    *(Trouble("info", kind) for kind in ("503", "reset")),
    *(Trouble("tree", kind) for kind in ("429", "500", "cut", "hang", "reset")),
    *(Trouble("file", kind) for kind in ("503", "reset", "corrupt", "short")),
    *(Trouble("storage", kind) for kind in ("503", "cut", "stall", "reset", "corrupt", "short", "portal")),
]
OVER = "for more than 2 s; try again later"
RESET = f"the connection breaks ([Errno 104] Connection reset by peer), {OVER}"
SPOILT = "came twice with other bytes than the hub's listing says"
# Troubles without end, and what the one error must say.
LASTING = [
    (Trouble("info", "503", None), f"it answers 503 Service Unavailable, {OVER}"),
    (Trouble("info", "429", None), f"it answers 429 Too Many Requests, {OVER}"),
    (Trouble("tree", "hang", None), f"it sends nothing, {OVER}"),
    (Trouble("tree", "reset", None), RESET),
    (Trouble("tree", "portal", None), "is no hub; log in to the network, where that shows a page"),
    (Trouble("file", "portal", None), "is no hub; log in"),
    (Trouble("file", "corrupt", None), f"config.json {SPOILT}"),
    (Trouble("storage", "503", None), f"it answers 503 Service Unavailable, {OVER}"),
    (Trouble("storage", "reset", None), RESET),
    (Trouble("storage", "corrupt", None), f"model.safetensors {SPOILT}"),
    (Trouble("storage", "short", None), f"model.safetensors {SPOILT}"),
]


def named(trouble: Trouble) -> str:
    """Return the name of the repository that has it."""
    return f"owner/{trouble.place}-{trouble.kind}-{trouble.times}".replace(" ", "-")


class Served(NamedTuple):
    """A hub, the stage download beside it, and what is served."""

    address: str
    worker: Worker
    repositories: dict[str, Repository]
    data: dict[str, Path]
    model: dict[str, Path]
    home: Path

    def download(self, folder: Path, token: str | None = None, limit: float = 60, **changes: Any) -> str | None:
        """Return the stage's error, in `folder`; by default of a model and a data set without any trouble."""
        folder.mkdir(exist_ok=True)
        defaults = {"dataset": {"name": "owner/reviews"}, "model": {"name": "owner/bert"}}
        write_parameters(folder, **(defaults | changes))
        return self.worker.download(folder, token, limit)

    def failure(self, folder: Path, token: str | None = None, limit: float = 60, **changes: Any) -> str:
        """Return the one line of the stage's error."""
        error = self.download(folder, token, limit, **changes)
        assert error is not None
        assert "\n" not in error
        return error


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A data set and a model, each at two commits, and others that are the same but for their access or trouble."""
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
        "datasets/owner/cut": Repository(data, trouble=Trouble("storage", "cut")),
        "models/owner/bert": Repository(model, refs),
        **{f"models/owner/{access}": Repository(model, access=access) for access in ("private", "gated", "forbidden")},
        **{f"models/owner/{name}": Repository({NEW: folder}) for name, folder in changed.items()},
    }
    for trouble in (*TEMPORARY, *(each[0] for each in LASTING)):
        repositories[f"models/{named(trouble)}"] = Repository(model, trouble=trouble)
    home = root / "home"
    with hub(repositories) as address:
        worker = Worker(environment(address, home, HF_HUB_DOWNLOAD_TIMEOUT="1", HF_HUB_ETAG_TIMEOUT="1"))
        yield Served(address, worker, repositories, data, model, home)
        worker.process.kill()
        worker.process.communicate()


def environment(address: str, home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process that shall see no other hub, token or cache."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    own = {"HF_ENDPOINT": address, "HF_HOME": str(home), "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{TESTS}"}
    # A file comes by the client's own transfers otherwise, which no client of httpx sees.
    return inherited | own | {"OMP_NUM_THREADS": "1", "no_proxy": "127.0.0.1", "HF_HUB_DISABLE_XET": "1"} | more


def assert_nothing_made(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["params.yaml"]


def digests(folder: Path) -> set[str]:
    """Return those of all files under it, as they are and behind links."""
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def assert_as_served(folder: Path, served: Served, commit: str) -> None:
    """Compare the reviews, and the model's files byte by byte without the pickled one."""
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


def commits(folder: Path) -> tuple[str, str]:
    metrics = json.loads((folder / "reports/metrics/download.json").read_text(encoding="utf-8"))
    return metrics["model_commit"], metrics["dataset_commit"]


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), ("v1.0", OLD), ("a/branch", OLD), (OLD, OLD)])
def test_model_and_data_set_are_those_of_the_revision_whose_commit_is_recorded(
    tmp_path: Path, served: Served, revision: str | None, commit: str
) -> None:
    model, data = ({"name": f"owner/{name}", "revision": revision} for name in ("bert", "reviews"))
    assert served.download(tmp_path, model=model, dataset=data) is None
    assert_as_served(tmp_path, served, commit)
    assert commits(tmp_path) == (commit, commit)


def test_base_is_a_name_at_a_revision(tmp_path: Path, served: Served) -> None:
    assert served.download(tmp_path, model={"name": "owner/bert", "base": "owner/bert@v1.0"}) is None
    for folder, commit in (("pretrained", OLD), ("pretrained/own", NEW)):
        weights = (tmp_path / "models" / folder / "model.safetensors").read_bytes()
        assert weights == (served.model[commit] / "model.safetensors").read_bytes()
    metrics = json.loads((tmp_path / "reports/metrics/download.json").read_text(encoding="utf-8"))
    assert (metrics["base_commit"], metrics["model_commit"]) == (OLD, NEW)


@pytest.mark.parametrize("trouble", TEMPORARY, ids=named)
def test_temporary_failures_are_retried(tmp_path: Path, served: Served, trouble: Trouble) -> None:
    assert served.download(tmp_path, model={"name": named(trouble)}) is None
    assert served.repositories[f"models/{named(trouble)}"].troubled == trouble.times
    assert_as_served(tmp_path, served, NEW)


def test_files_of_a_data_set_are_retried_too(tmp_path: Path, served: Served) -> None:
    assert served.download(tmp_path, dataset={"name": "owner/cut"}) is None
    assert served.repositories["datasets/owner/cut"].troubled == 1
    assert_as_served(tmp_path, served, NEW)


@pytest.mark.parametrize(("trouble", "expected"), LASTING, ids=[named(each[0]) for each in LASTING])
def test_lasting_failures_are_one_error_and_nothing_made(
    tmp_path: Path, served: Served, trouble: Trouble, expected: str
) -> None:
    error = served.failure(tmp_path, limit=2, model={"name": named(trouble)})
    assert error.startswith(f"model.name: {named(trouble)} is no folder here, and cannot be had from the hub")
    assert expected in error
    assert "secret" not in error  # of a signed address
    assert_nothing_made(tmp_path)
    # What came with other bytes than it should is not left in the cache, where others would take it.
    if SPOILT in expected:
        cached = served.home / "hub" / f"models--{named(trouble).replace('/', '--')}"
        assert digests(cached / "snapshots") <= digests(served.model[NEW])
        assert digests(cached / "blobs") <= digests(served.model[NEW])


REFUSALS: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("model", {"name": "owner/nothing"}, None, "it shows no model of that name; correct the name, or"),
    ("dataset", {"name": "owner/private"}, None, "for a private one, log in (`hf auth login`, or a token in HF"),
    ("model", {"name": "owner/bert"}, "hf_old", "the hub refuses the token of HF_TOKEN or of the login; log in"),
    ("model", {"name": "owner/gated"}, STRANGER, "it is gated; accept its terms at {address}/owner/gated and log"),
    ("model", {"name": "owner/forbidden"}, STRANGER, "the hub forbids it; log in"),
    ("model", {"name": "owner/bert", "revision": "v2"}, None, "at revision v2: it has no such branch, tag or com"),
    ("dataset", {"name": "owner/reviews", "revision": "c" * 40}, None, "no such branch, tag or commit; {address}/d"),
    ("model", {"name": "owner/pickled"}, None, "holds no model.safetensors; other formats, which may hold code"),
    ("model", {"name": "owner/foreign"}, None, "is of the type 'nothing_of_the_kind', which needs code of its re"),
]


@pytest.mark.parametrize(("section", "values", "token", "expected"), REFUSALS)
def test_what_the_hub_does_not_give_is_one_error_that_says_what_to_do(
    tmp_path: Path, served: Served, section: str, values: dict[str, Any], token: str | None, expected: str
) -> None:
    error = served.failure(tmp_path, token, **{section: values})
    assert error.startswith(f"{section}.name: {values['name']} ")
    assert expected.format(address=served.address) in error
    assert not token or token not in error
    assert_nothing_made(tmp_path)


@pytest.mark.parametrize("access", ["private", "gated", "forbidden"])
def test_a_token_opens_what_is_closed_and_is_written_nowhere(tmp_path: Path, served: Served, access: str) -> None:
    assert served.download(tmp_path, GOOD, model={"name": f"owner/{access}"}) is None
    assert_as_served(tmp_path, served, NEW)
    files = [path for folder in (tmp_path, served.home) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if GOOD.encode() in path.read_bytes()] == []


def test_a_stored_login_opens_a_closed_data_set(tmp_path: Path, served: Served) -> None:
    served.home.mkdir(exist_ok=True)
    (served.home / "token").write_text(GOOD, encoding="utf-8")  # as `hf auth login` does
    try:
        assert served.download(tmp_path, dataset={"name": "owner/private"}) is None
    finally:
        (served.home / "token").unlink()
    assert_as_served(tmp_path, served, NEW)


def test_code_of_a_repository_is_neither_run_nor_named_in_what_is_kept(tmp_path: Path, served: Served) -> None:
    assert served.download(tmp_path, model={"name": "owner/known"}) is None
    for file in ("config.json", "tokenizer_config.json"):
        values = json.loads((tmp_path / "models/pretrained" / file).read_text(encoding="utf-8"))
        assert values == json.loads((served.model[NEW] / file).read_text(encoding="utf-8"))
    assert not (tmp_path / "models/pretrained/own.py").exists()


def test_a_file_of_the_cache_counts_only_with_the_right_bytes(tmp_path: Path, served: Served) -> None:
    assert served.download(tmp_path / "first") is None
    asked = served.repositories["models/owner/bert"].asked
    asked.clear()
    assert served.download(tmp_path / "second") is None
    assert asked == ["info"]  # which commit `main` is
    snapshot = served.home / "hub/models--owner--bert/snapshots" / NEW
    content = bytearray((snapshot / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (snapshot / "model.safetensors").write_bytes(content)
    assert served.download(tmp_path / "third") is None
    assert asked[-1] == "storage"
    for each in ("second", "third"):
        assert_as_served(tmp_path / each, served, NEW)


def test_offline_takes_what_the_cache_holds_and_says_what_it_lacks(tmp_path: Path, served: Served) -> None:
    assert served.download(tmp_path / "online") is None
    for repository in served.repositories.values():
        repository.asked.clear()
    worker = Worker(environment(served.address, served.home, HF_HUB_OFFLINE="1"))
    offline = served._replace(worker=worker)
    assert offline.download(tmp_path / "offline") is None
    assert_as_served(tmp_path / "offline", served, NEW)
    assert commits(tmp_path / "offline") == commits(tmp_path / "online")
    error = offline.failure(tmp_path / "lacking", model={"name": "owner/nothing"})
    assert "HF_HUB_OFFLINE is set, and the cache in HF_HOME lacks some of it; unset it" in error
    assert_nothing_made(tmp_path / "lacking")
    worker.process.kill()
    worker.process.communicate()
    assert not any(repository.asked for repository in served.repositories.values())


def test_a_data_set_that_cannot_be_read_says_why_and_leaves_what_was_there(tmp_path: Path, served: Served) -> None:
    folder = shutil.copytree(served.data[NEW], tmp_path / "unreadable")
    (folder / "plain_text/train-00000-of-00001.parquet").write_bytes(b"no parquet")
    served.repositories["datasets/owner/unreadable"] = Repository({OLD: folder})
    assert served.download(tmp_path / "run") is None
    error = served.failure(tmp_path / "run", dataset={"name": "owner/unreadable"})
    assert error.startswith("dataset.name: owner/unreadable cannot be loaded: Could not open Parquet input source")
    assert_as_served(tmp_path / "run", served, NEW)


def test_only_the_files_of_the_configuration_are_downloaded(tmp_path: Path, served: Served) -> None:
    folder = shutil.copytree(served.data[NEW], tmp_path / "files")
    shutil.copytree(folder / "plain_text", folder / "other")
    served.repositories["datasets/owner/several"] = several = Repository({OLD: folder})
    assert served.download(tmp_path / "run", dataset={"name": "owner/several:plain_text"}) is None
    assert several.asked.count("storage") == 2
    assert_as_served(tmp_path / "run", served, NEW)


def test_hub_out_of_reach_is_one_error(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        write_parameters(tmp_path, dataset={"name": "owner/reviews"}, model={"name": "owner/bert"})
        command = [sys.executable, "-m", "stages", "download"]
        run = run_to_its_end(command, tmp_path, {}, environment(address, tmp_path / "home"))
    start = "error: model.name: owner/bert is no folder here, and cannot be had from the hub: "
    assert run.stderr.startswith(f"{start}{address} cannot be reached: [Errno 111] Connection refused")
    assert (run.returncode, len(run.stderr.splitlines())) == (1, 1)
