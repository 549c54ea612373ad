"""What DVC makes of the project's own dvc.yaml: what a parameter reruns, experiments, differences, remotes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc_repository import Repository, new_repository, stages_run

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
    "render: formats dpi": "render",
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
PAGE = ("reports/index.html", "reports/figures")
FEATURES = (
    *("features/tokenize", "features/capture", "features/measure/contributions", "features/measure/heads"),
    *("features/measure/layer_parts.json", "features/measure/tokens.parquet", "features/faithfulness"),
)
OTHERS = ("data/reviews", "models")


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A repository whose stages have run, in its second commit; to be copied or cloned, never changed."""
    repository = new_repository(tmp_path_factory.mktemp("dvc") / "run")
    assert stages_run(repository.dvc("repro")) == list(FOLLOWED_BY)
    repository.commit("The run")
    return repository


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


def test_stages_follow_each_other_as_in_the_table(run_once: Repository) -> None:
    # DVC's own graph; an arrow leads from a stage to one that reads what it wrote.
    arrows = re.findall(r'"(\w+)" -> "(\w+)"', run_once.dvc("dag", "--dot").replace(";", ""))

    def after(stage: str) -> set[str]:
        following = {end for start, end in arrows if start == stage}
        return following.union(*map(after, following))

    assert {stage: after(stage) for stage in FOLLOWED_BY} == {
        stage: set(stages.split()) for stage, stages in FOLLOWED_BY.items()
    }


def test_a_clone_pulls_what_it_needs_and_no_more(run_once: Repository, tmp_path: Path) -> None:
    author = run_once.copy(tmp_path / "author")
    author.dvc("remote", "add", "--default", "store", str(tmp_path / "remote"))
    author.dvc("push")
    author.commit("A remote")
    reader = author.clone(tmp_path / "reader")
    reader.dvc("pull", *PAGE)
    assert reader.has(*PAGE, *FEATURES, *OTHERS, "features") == list(PAGE)
    assert_same_files(author, reader, *PAGE)
    assert reader.git("status", "--short") == ""

    for each in (author, reader):
        change(each, "metric: euclidean", "metric: cosine")
    assert stages_run(author.dvc("repro")) == ["reduce", "render"]
    assert stages_run(reader.dvc("repro", "--pull", "--allow-missing")) == ["reduce", "render"]
    assert reader.has(*PAGE, *FEATURES, *OTHERS) == [*PAGE, *FEATURES]
    # No stage has taken a part of what it reads for the whole.
    assert read(reader, "dvc.lock") == read(author, "dvc.lock")
    assert_same_files(author, reader, *PAGE, "features/reduce")


def assert_same_files(author: Repository, reader: Repository, *outs: str) -> None:
    for out in outs:
        files = [path for path in (author.folder / out, *(author.folder / out).rglob("*")) if path.is_file()]
        assert files
        for path in files:
            assert (reader.folder / path.relative_to(author.folder)).read_bytes() == path.read_bytes(), path
