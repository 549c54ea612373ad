"""A stopped stage says so in one line and resumes its own work, not that of other code or packages."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPOSITORY, SMALL_SHARDS, Workspace, digest, prepared_for_capture, write_parameters
from stage_process import run_stage, run_to_its_end

from attnmix.core.points import Site
from attnmix.store import features as store
from attnmix.store.layout import ACTIVATIONS
from stages.common.parameters import read_parameters
from stages.common.resume import UNFINISHED, unfinished_folder

CAPTURE = {"documents": list(range(12)), "max_length": 40}
MARKED = Site(1, "layer_output")
MARK = 77.0
ROWS = slice(0, 16)  # of the first shard


def run(folder: Path, **options: Any) -> str:
    """Capture by the code in `folder`."""
    return run_stage(folder, "capture", code=folder, packages=[folder / "packages"], constants=SMALL_SHARDS, **options)


def install(folder: Path, version: str) -> None:
    """Put a package of that version among those that the stage finds, in place of any other version."""
    shutil.rmtree(folder / "packages", ignore_errors=True)
    information = folder / "packages" / f"planted-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: planted\nVersion: {version}\n")


def unfinished(folder: Path) -> Path:
    """Return the only folder of unfinished work."""
    (work,) = (folder / UNFINISHED / "capture").iterdir()
    return work


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """A copy of the code in which Ctrl-C ended capture after three shards; the first holds a mark, no features."""
    folder = prepared_for_capture(tmp_path_factory.mktemp("stopped"), tiny_bert)
    for name in ("attnmix", "stages"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "dvc.yaml", folder)
    write_parameters(folder, capture=CAPTURE)
    install(folder, "1.0")
    message = "the work that capture has finished is kept in .unfinished/capture; `dvc repro` resumes from there"
    assert run(folder, kill_at="open .*/done/3.begun$", kill_by=signal.SIGINT) == f"\nstopped; {message}\n"
    assert not (folder / ACTIVATIONS).exists()
    work = unfinished(folder)
    assert {"0", "1", "2"} <= {path.name for path in (work / "done").iterdir()}
    store.write_block(work / "stores", MARKED, ROWS, np.full((16, 24), MARK))
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """The stores of a capture without a break, by the code of this repository."""
    folder = prepared_for_capture(tmp_path_factory.mktemp("undisturbed"), tiny_bert)
    write_parameters(folder, capture=CAPTURE)
    run_stage(folder, "capture", constants=SMALL_SHARDS)
    return folder / ACTIVATIONS


def test_stopped_stage_computes_only_what_it_had_not_finished(stopped: Path, undisturbed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stopped, tmp_path / "resumed")
    run(folder)
    marked = store.read_features(folder / ACTIVATIONS, MARKED)
    assert (marked[ROWS] == MARK).all(), "a finished shard was computed again"
    store.write_block(folder / ACTIVATIONS, MARKED, ROWS, store.read_features(undisturbed, MARKED, ROWS))
    assert digest(folder / ACTIVATIONS) == digest(undisturbed)
    assert not (folder / UNFINISHED).exists()


@pytest.mark.parametrize("changed", ["code", "package"])
def test_unfinished_work_of_other_code_or_packages_is_removed_and_not_used(
    stopped: Path, undisturbed: Path, tmp_path: Path, changed: str
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "changed")
    before = unfinished(folder)
    if changed == "code":
        with (folder / "stages/capture.py").open("a", encoding="utf-8") as file:
            file.write("# changed\n")
    else:
        install(folder, "1.1")
    run(folder, kill_at="os.rename .*/stores$")  # the work is complete then, and still in its own folder
    assert unfinished(folder).name != before.name
    assert digest(unfinished(folder) / "stores") == digest(undisturbed)


@pytest.mark.parametrize("changed", ["data", "model", "parameter", "parameter of another stage"])
def test_unfinished_folder_is_that_of_the_stages_own_inputs(
    workspace: Workspace, tiny_bert: Path, changed: str
) -> None:
    folder, same = prepared_for_capture(workspace(capture=CAPTURE), tiny_bert), changed == "parameter of another stage"
    before = unfinished_folder("capture", read_parameters(), folder)
    (before / "work").touch()
    assert unfinished_folder("capture", read_parameters(), folder) == before
    if changed == "data":
        (folder / "features/tokenize/tokens.parquet").write_bytes(b"changed")
    elif changed == "model":
        (folder / "models/finetuned/config.json").write_text("{}")
    elif changed == "parameter":
        write_parameters(folder, capture=CAPTURE | {"dtype": "float32"})
    else:
        write_parameters(folder, capture=CAPTURE, umap={"seed": 9}, finetune={"epochs": 9})
    after = unfinished_folder("capture", read_parameters(), folder)
    assert (after == before, (before / "work").exists(), unfinished(folder) == after) == (same, same, True)


@pytest.mark.parametrize(
    ("rank", "message"), [("0", "\nstopped; capture had finished nothing that is kept\n"), ("1", "")]
)
def test_signal_while_libraries_are_loaded_is_one_line_of_the_first_process(
    workspace: Workspace, tmp_path: Path, rank: str, message: str
) -> None:
    (tmp_path / "first").mkdir()
    stop = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    (tmp_path / "first/torch.py").write_text(stop, encoding="utf-8")
    variables = {"PYTHONPATH": f"{tmp_path}/first:{REPOSITORY}", "RANK": rank}
    run = run_to_its_end([sys.executable, "-m", "stages", "capture"], workspace(), variables)
    assert (run.returncode, run.stdout, run.stderr) == (143, "", message)
