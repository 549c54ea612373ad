"""What DVC makes of the project's own dvc.yaml: what a parameter reruns, experiments, differences, remotes."""

from __future__ import annotations

import io
import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from conftest import toy_reviews, write_parameters, write_tiny_bert
from dvc_repository import Repository, new_repository, stages_run
from remote_servers import server

from attnmix.core.options import Parameters

# The stages that read a parameter's value. The page names every parameter, so `render` reads them all.
READ_BY = {
    "arithmetic": "finetune capture measure faithfulness reduce render",
    "seed": "download finetune tokenize measure faithfulness render",
    "dataset: name": "download render",
    "dataset: revision train_split test_split text_column label_column group_column": "download render",
    "dataset: validation_fraction train_limit test_limit": "download render",
    "model: name": "download render",
    "model: base": "download measure render",
    "model: revision": "download render",
    "finetune: epochs": "finetune measure render",
    "finetune: batch_size learning_rate max_length precision": "finetune render",
    "capture: documents drawn texts max_length": "tokenize render",
    "capture: batch_tokens": "capture measure faithfulness render",
    "capture: points dtype precision store": "capture render",
    "measure: documents": "tokenize measure render",
    "measure: methods matrices gradient_documents gradient_max_length": "measure render",
    "faithfulness: documents": "tokenize faithfulness render",
    "faithfulness: max_length": "faithfulness render",
    "umap: metric seed n_neighbors min_dist layouts max_points stability_seeds": "reduce render",
    "render: formats dpi frequent_words points_per_second": "render",
}
# The stages that run again after one whose outputs have changed.
FOLLOWED_BY = {
    "download": "finetune tokenize capture measure faithfulness reduce render",
    "finetune": "tokenize capture measure faithfulness reduce render",
    "tokenize": "capture measure faithfulness reduce render",
    "capture": "reduce render",
    "measure": "faithfulness reduce render",
    "faithfulness": "render",
    "reduce": "render",
    "render": "",
}
MAKE_PAGE = ("make", "--old-file", ".venv/.installed", "page")  # the packages are there
PAGE = ("reports/index.html", "reports/figures")
FEATURES = (
    *("features/tokenize", "features/capture", "features/measure/contributions", "features/measure/heads"),
    *("features/measure/layer_parts.json", "features/measure/tokens.parquet", "features/faithfulness"),
)
OTHERS = ("data/reviews", "models")
S3_KEYS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
PATIENCE = 600  # seconds until a queue whose workers do not come is called broken; it decides nothing else


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A repository whose stages have run, in its second commit; to be copied or cloned, never changed."""
    repository = new_repository(tmp_path_factory.mktemp("dvc") / "run")
    assert stages_run(repository.dvc("repro")) == list(FOLLOWED_BY)
    repository.commit("The run")
    return repository


@pytest.fixture(scope="session")
def pushed(run_once: Repository, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """The same with a folder as its remote, where everything lies."""
    folder = tmp_path_factory.mktemp("pushed")
    repository = run_once.copy(folder / "run")
    share(repository, str(folder / "remote"))
    return repository


def share(repository: Repository, url: str, *setting: str, **environment: str) -> None:
    """README's two commands and the commit, with one more setting of the remote."""
    repository.dvc("remote", "add", "--default", "store", url)
    if setting:
        repository.dvc("remote", "modify", "store", *setting)
    repository.dvc("push", **environment)
    repository.commit("A remote")


def change(repository: Repository, old: str, new: str, file: str = "params.yaml") -> None:
    """A value in params.yaml or in the code, by hand."""
    path = repository.folder / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


def read(repository: Repository, name: str) -> str:
    return (repository.folder / name).read_text(encoding="utf-8")


def test_every_parameter_is_read_by_the_stages_of_the_table(
    run_once: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dvc.repo import Repo

    repository = run_once.copy(tmp_path / "run")
    monkeypatch.chdir(repository.folder)
    for name, value in repository.environment().items():
        monkeypatch.setenv(name, value)
    shipped: dict[str, Any] = yaml.safe_load(read(repository, "params.yaml"))
    sections = {name: list(each) if isinstance(each, dict) else [] for name, each in Parameters().model_dump().items()}
    found: dict[str, set[str]] = {}
    for number in range(max(map(len, sections.values()))):
        # One key of each section at once, as DVC names a section at least.
        values = json.loads(json.dumps(shipped))
        changed = {}
        for section, names in sections.items():
            if number < len(names):
                values[section][names[number]] = "another value"
                changed[section] = f"{section}.{names[number]}"
            elif not names:
                values[section] = "another value"
                changed[section] = section
        found |= {key: set() for key in changed.values()}
        (repository.folder / "params.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        with Repo() as repo:
            status = repo.status()
        for stage, entries in status.items():
            for name in [name for entry in entries for name in entry["changed deps"]["params.yaml"]]:
                section = name.split(".")[0]
                assert name in (section, changed[section])
                found[changed[section]].add(stage)
    expected = {}
    for row, stages in READ_BY.items():
        section, _, names = row.partition(": ")
        expected |= {key: set(stages.split()) for key in [f"{section}.{name}" for name in names.split()] or [section]}
    assert found == expected


@pytest.mark.parametrize(
    ("file", "old", "new", "stages"),
    [
        ("attnmix/figures/labels.py", '"Fine-tuned"', '"After fine-tuning"', "render"),
        ("attnmix/page/page.css", "--paper: #ffffff", "--paper: #fffff0", "render"),
        (
            "attnmix/measures/ratios.py",
            "parts.mixed_weight / 2",
            "parts.mixed_weight / 3",
            "measure faithfulness reduce render",
        ),
        ("attnmix/core/options.py", "batch_size: Count = 8", "batch_size: Count = 9", " ".join(FOLLOWED_BY)),
    ],
    ids=["label", "style", "formula", "default"],
)
def test_changed_code_reruns_the_stages_that_import_it(
    run_once: Repository, tmp_path: Path, file: str, old: str, new: str, stages: str
) -> None:
    repository = run_once.copy(tmp_path / "run")
    assert stages_run(repository.dvc("repro", "--dry")) == []
    change(repository, old, new, file)
    assert stages_run(repository.dvc("repro", "--dry")) == stages.split()


def test_stages_follow_each_other_as_in_the_table(run_once: Repository) -> None:
    # DVC's own graph; an arrow leads from a stage to one that reads what it wrote.
    arrows = re.findall(r'"(\w+)" -> "(\w+)"', run_once.dvc("dag", "--dot").replace(";", ""))

    def after(stage: str) -> set[str]:
        following = {end for start, end in arrows if start == stage}
        return following.union(*map(after, following))

    assert {stage: after(stage) for stage in FOLLOWED_BY} == {
        stage: set(stages.split()) for stage, stages in FOLLOWED_BY.items()
    }


@pytest.mark.long
def test_experiments_run_here_apart_and_in_a_queue(run_once: Repository, tmp_path: Path) -> None:
    here = run_once.copy(tmp_path / "run")
    before = read(here, "reports/index.html")
    said = here.dvc("exp", "run", "--name", "here", "--set-param", "umap.metric=cosine")
    assert stages_run(said) == ["reduce", "render"]
    assert read(here, "reports/index.html") != before
    here.git("restore", ".")
    here.dvc("checkout")

    said = here.dvc("exp", "run", "--temp", "--name", "apart", "--set-param", "render.dpi=40")
    assert stages_run(said) == ["render"]
    for seed in (7, 8):
        here.dvc("exp", "run", "--queue", "--name", f"queued-{seed}", "--set-param", f"umap.seed={seed}")
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        meeting.settimeout(PATIENCE)
        here.start("dvc", "queue", "start", "--jobs", "2", MEETING=f"reduce:{meeting.getsockname()[1]}")
        # Each waits within its `reduce` until it is told to go on: the second comes only if two run at once.
        both = [meeting.accept()[0] for _ in range(2)]
        for one in both:
            one.sendall(b".")
            one.close()
    while "Running" in (state := here.dvc("queue", "status")):
        pass
    assert state.count("Success") == 2
    here.dvc("queue", "stop")
    assert here.git("status", "--short") == ""
    assert read(here, "reports/index.html") == before

    table = pd.read_csv(io.StringIO(here.dvc("exp", "show", "--csv")))
    table.index = table["Experiment"].fillna(table["rev"])
    runs = table.loc[["here", "apart", "queued-7", "queued-8"]]
    assert runs["umap.metric"].tolist() == ["cosine", *["euclidean"] * 3]
    assert runs["umap.seed"].tolist() == [2, 2, 7, 8]
    assert runs["render.dpi"].tolist() == [300, 40, 300, 300]
    scores = table["reports/metrics/reduce.json:number"]
    assert scores["apart"] == scores["main"]  # the metrics of the commit: its maps are the same
    assert scores[["main", "here", "queued-7", "queued-8"]].nunique() == 4

    here.dvc("exp", "apply", "queued-8")
    assert yaml.safe_load(read(here, "params.yaml"))["umap"]["seed"] == 8
    assert json.loads(read(here, "reports/metrics/reduce.json")) == {"number": scores["queued-8"]}
    assert stages_run(here.dvc("repro")) == []


def test_differences_need_no_cache_and_no_remote(run_once: Repository, tmp_path: Path) -> None:
    author = run_once.copy(tmp_path / "author")
    change(author, "gradient_documents: 4", "gradient_documents: 3")
    assert stages_run(author.dvc("repro"))[0] == "measure"
    author.commit("Fewer reviews")
    reader = author.clone(tmp_path / "reader")
    commits = ("HEAD~1", "HEAD")
    params = json.loads(reader.dvc("params", "diff", "--json", *commits))
    assert params == {"params.yaml": {"measure.gradient_documents": {"old": 4, "new": 3, "diff": -1}}}
    metrics = json.loads(reader.dvc("metrics", "diff", "--json", *commits))
    assert set(metrics) == {f"reports/metrics/{name}.json" for name in ("measure", "faithfulness", "reduce")}
    for name, each in metrics.items():
        ends = [json.loads(reader.git("show", f"{commit}:{name}"))["number"] for commit in commits]
        assert [each["number"]["old"], each["number"]["new"]] == ends
    # Without targets DVC shows nothing of a commit whose pictures are out of reach.
    reader.dvc("plots", "diff", "--targets", "Loss", "Accuracy", "Mixing", "--", *commits)
    page = read(reader, "dvc_plots/index.html")
    for title, curve in (("Mixing ratio by layer", "measure/mixing"), ("Loss while fine-tuning", "finetune/finetune")):
        assert f'"text": "{title}"' in page
        for commit in commits:
            assert f'"rev": "{commit}", "filename": "reports/plots/{curve}.csv"' in page


def assert_maps_pull_features(author: Repository, reader: Repository) -> None:
    """After a change of umap.* in a clone, which must become what it becomes where everything lies."""
    for each in (author, reader):
        change(each, "metric: euclidean", "metric: cosine")
    assert stages_run(author.dvc("repro")) == ["reduce", "render"]
    assert stages_run(reader.dvc("repro", "--pull", "--allow-missing")) == ["reduce", "render"]
    assert reader.has(*PAGE, *FEATURES, *OTHERS) == [*PAGE, *FEATURES]
    # No stage has taken a part of what it reads for the whole.
    assert read(reader, "dvc.lock") == read(author, "dvc.lock")
    assert_same_files(author, reader, *PAGE, "features/reduce")


def test_a_change_of_the_maps_pulls_features_and_no_more(pushed: Repository, tmp_path: Path) -> None:
    assert_maps_pull_features(pushed.copy(tmp_path / "author"), pushed.clone(tmp_path / "reader"))


@pytest.mark.long
def test_real_stages_pull_what_they_read_and_write_the_same(tmp_path: Path) -> None:
    author = new_repository(tmp_path / "author", stand_ins=False)
    write_tiny_bert(author.folder / "bert", layers=2)
    toy_reviews(40, 0).to_csv(author.folder / "reviews.csv", index=False)
    write_parameters(
        author.folder,
        dataset={"name": "reviews.csv"},
        model={"name": "bert"},
        finetune={"epochs": 1, "max_length": 40},
        capture={"documents": [0], "texts": ["the film was great ."], "max_length": 40},
        measure={"documents": 3, "gradient_documents": 1},
        faithfulness={"documents": 2, "max_length": 20},
        umap={"layouts": ["joint"], "stability_seeds": []},
        render={"dpi": 50, "formats": ["png"]},
    )
    assert stages_run(author.dvc("repro")) == list(FOLLOWED_BY)
    author.commit("The run")
    share(author, str(tmp_path / "remote"))
    reader = author.clone(tmp_path / "reader")
    assert_maps_pull_features(author, reader)
    assert "the film was great ." in read(reader, "reports/index.html")


def assert_same_files(author: Repository, reader: Repository, *outs: str) -> None:
    for out in outs:
        files = [path for path in (author.folder / out, *(author.folder / out).rglob("*")) if path.is_file()]
        assert files
        for path in files:
            assert (reader.folder / path.relative_to(author.folder)).read_bytes() == path.read_bytes(), path


def assert_shared(author: Repository, reader: Repository, **environment: str) -> None:
    assert reader.has(*PAGE, *FEATURES, *OTHERS) == []
    reader.dvc("pull", **environment)
    assert_same_files(author, reader, *PAGE, *FEATURES, *OTHERS)
    assert stages_run(reader.dvc("repro")) == []


def test_a_run_is_shared_through_a_folder(pushed: Repository, tmp_path: Path) -> None:
    assert_shared(pushed, pushed.clone(tmp_path / "reader"))


@pytest.mark.long
def test_a_run_is_shared_through_s3(run_once: Repository, tmp_path: Path) -> None:
    author = run_once.copy(tmp_path / "author")
    with server("moto.server", "--host", "127.0.0.1", "--port", "0") as port:
        address = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")) as answer:
            assert answer.status == 200
        share(author, "s3://bucket/mixing", "endpointurl", address, **S3_KEYS)
        assert_shared(author, author.clone(tmp_path / "reader"), **S3_KEYS)


@pytest.mark.long
def test_a_run_is_shared_through_ssh(run_once: Repository, tmp_path: Path) -> None:
    author = run_once.copy(tmp_path / "author")
    served, key = tmp_path / "served", tmp_path / "key"
    served.mkdir()
    with server("remote_servers", str(served), str(key)) as port:
        share(author, f"ssh://somebody@127.0.0.1:{port}/mixing", "keyfile", str(key))
        assert_shared(author, author.clone(tmp_path / "reader"))
    assert any((served / "mixing").rglob("*.dir"))


def test_make_page_gets_the_page_and_nothing_else(pushed: Repository, tmp_path: Path) -> None:
    reader = pushed.clone(tmp_path / "reader")
    said = reader.run(*MAKE_PAGE)
    assert said.stdout == "open reports/index.html\n"
    assert said.stderr == ""
    assert reader.has(*PAGE, *FEATURES, *OTHERS, "features") == list(PAGE)
    assert_same_files(pushed, reader, *PAGE)
    assert reader.git("status", "--short") == ""


def test_make_page_says_what_is_not_there(run_once: Repository, tmp_path: Path) -> None:
    author = run_once.copy(tmp_path / "author")
    alone = author.clone(tmp_path / "alone")
    said = alone.run(*MAKE_PAGE, succeeds=False)
    assert "error: reports/index.html could not be got: no DVC remote is set" in said.stderr
    assert "'make repro' makes it here" in said.stderr
    assert said.stdout == ""

    author.dvc("remote", "add", "--default", "store", str(tmp_path / "remote"))
    author.commit("A remote")
    early = author.clone(tmp_path / "early")
    said = early.run(*MAKE_PAGE, succeeds=False)
    assert "error: reports/index.html could not be got: the remote did not give it" in said.stderr

    author.dvc("push", "reports/index.html")
    said = early.run(*MAKE_PAGE)
    assert "reports/figures could not be got" in said.stderr
    assert said.stdout == "open reports/index.html\n"
    assert early.has(*PAGE) == ["reports/index.html"]
