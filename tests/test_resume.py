"""A killed stage goes on with its own unfinished work, and with no work done for other code, data or packages."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    REPOSITORY,
    SMALL_SHARDS,
    digest,
    prepared_for_capture,
    run_tokenized,
    tokenize_in,
    write_parameters,
)
from stage_process import run_stage

from attnmix.core.points import Site
from attnmix.store import features as store
from attnmix.store.features import ACTIVATIONS
from stages import capture
from stages.common.parameters import read_parameters
from stages.common.resume import UNFINISHED, unfinished_folder

CAPTURE = {"documents": list(range(12)), "max_length": 40}
MARKED = Site(1, "layer_output")
MARK = 77.0
ROWS = slice(0, 16)  # of the first shard


def run(folder: Path, **options: Any) -> None:
    """Capture by the code that lies in `folder`."""
    run_stage(folder, "capture", code=folder, packages=[folder / "packages"], constants=SMALL_SHARDS, **options)


def install(folder: Path, version: str) -> None:
    """A package of that version among those that the stage finds, in place of any other version."""
    shutil.rmtree(folder / "packages", ignore_errors=True)
    information = folder / "packages" / f"planted-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: planted\nVersion: {version}\n")


def unfinished(folder: Path) -> list[Path]:
    return sorted((folder / UNFINISHED / "capture").iterdir())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """A copy of the code in which capture was killed after three shards; the first holds a mark instead of features."""
    folder = prepared_for_capture(tmp_path_factory.mktemp("killed"), tiny_bert)
    for name in ("attnmix", "stages"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "dvc.yaml", folder)
    write_parameters(folder, capture=CAPTURE)
    install(folder, "1.0")
    run(folder, kill_at="open .*/done/3.begun$")
    assert not (folder / ACTIVATIONS).exists()
    (work,) = unfinished(folder)
    assert sorted(path.name for path in (work / "done").iterdir()) == ["0", "1", "2"]
    store.write_block(work / "stores", MARKED, ROWS, np.full((16, 24), MARK))
    return folder


@pytest.fixture
def undisturbed(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch, small_shards: None, one_thread: None
) -> Path:
    """A folder in which capture ran without a break, by the code of this repository."""
    folder = prepared_for_capture(tmp_path / "undisturbed", tiny_bert)
    write_parameters(folder, capture=CAPTURE)
    monkeypatch.chdir(folder)
    run_tokenized(capture)
    assert not (folder / UNFINISHED).exists()
    return folder


def test_killed_stage_computes_only_what_it_had_not_finished(killed: Path, undisturbed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(killed, tmp_path / "resumed")
    run(folder)
    marked = store.read_features(folder / ACTIVATIONS, MARKED)
    assert (marked[ROWS] == MARK).all(), "a finished shard was computed anew"
    store.write_block(folder / ACTIVATIONS, MARKED, ROWS, store.read_features(undisturbed / ACTIVATIONS, MARKED, ROWS))
    assert digest(folder / ACTIVATIONS) == digest(undisturbed / ACTIVATIONS)
    assert not (folder / UNFINISHED).exists()


@pytest.mark.parametrize("changed", ["code", "package"])
def test_unfinished_work_of_other_code_or_packages_is_removed_and_not_used(
    killed: Path, undisturbed: Path, tmp_path: Path, changed: str
) -> None:
    folder = shutil.copytree(killed, tmp_path / "changed")
    (before,) = unfinished(folder)
    if changed == "code":
        with (folder / "stages/capture.py").open("a", encoding="utf-8") as file:
            file.write("# changed\n")
    else:
        install(folder, "1.1")
    # Its work is whole then, and still lies in its own folder.
    run(folder, kill_at="os.rename .*/stores$")
    (after,) = unfinished(folder)
    assert after.name != before.name
    assert digest(after / "stores") == digest(undisturbed / ACTIVATIONS)


@pytest.mark.parametrize(
    ("changed", "same"), [("data", False), ("model", False), ("own parameter", False), ("parameter of another", True)]
)
def test_unfinished_folder_is_that_of_the_stages_own_inputs(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch, changed: str, same: bool
) -> None:
    folder = prepared_for_capture(tmp_path, tiny_bert)
    monkeypatch.chdir(folder)
    write_parameters(folder, capture=CAPTURE)
    tokenize_in(folder)
    before = unfinished_folder("capture", read_parameters())
    (before / "work").touch()
    assert unfinished_folder("capture", read_parameters()) == before
    if changed == "data":
        write_parameters(folder, capture=CAPTURE | {"documents": [1]})
        tokenize_in(folder)
    elif changed == "model":
        Path("models/finetuned/config.json").write_text("{}")
    elif changed == "own parameter":
        write_parameters(folder, capture=CAPTURE | {"dtype": "float32"})
    else:
        write_parameters(folder, capture=CAPTURE, umap={"seed": 9}, finetune={"epochs": 9})
    after = unfinished_folder("capture", read_parameters())
    assert (after == before) is same
    assert (before / "work").exists() is same
    assert unfinished(folder) == [folder / after]
