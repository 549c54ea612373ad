"""A stopped stage says so in one line and resumes its own work, not that of other code, packages or inputs."""

from __future__ import annotations

import shutil
import signal
import sys
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import REPOSITORY, SMALL_SHARDS, Workspace, digest, prepared_for_capture, write_parameters
from stage_process import run_stage, run_to_its_end

from attnmix.core.names import ACTIVATIONS, Site
from attnmix.store import features as store
from stages.common import resume
from stages.common.parameters import read_parameters
from stages.common.resume import UNFINISHED, unfinished_folder

CAPTURE = {"documents": list(range(12)), "max_length": 40}
MARKED = Site(1, "layer_output")
MARK = 77.0
ROWS = slice(0, 16)  # of the first shard


def test_stopped_stage_computes_only_what_it_had_not_finished(tmp_path: Path, tiny_bert: Path) -> None:
    for folder in (tmp_path / "stopped", tmp_path / "undisturbed"):
        write_parameters(prepared_for_capture(folder, tiny_bert), capture=CAPTURE)
    run_stage(folder, "capture", constants=SMALL_SHARDS)
    expected, stopped = folder / ACTIVATIONS, tmp_path / "stopped"

    stop = {"kill_at": "open .*/done/3.begun$", "kill_by": signal.SIGINT}  # Ctrl-C after three shards
    message = "the work that capture has finished is kept in .unfinished/capture; `dvc repro` resumes from there"
    assert run_stage(stopped, "capture", constants=SMALL_SHARDS, **stop) == f"\nstopped; {message}\n"
    assert not (stopped / ACTIVATIONS).exists()
    (work,) = (stopped / UNFINISHED / "capture").iterdir()
    assert {"0", "1", "2"} <= {path.name for path in (work / "done").iterdir()}
    store.write_block(work / "stores", MARKED, ROWS, np.full((16, 24), MARK))

    run_stage(stopped, "capture", constants=SMALL_SHARDS)
    marked = store.read_features(stopped / ACTIVATIONS, MARKED)
    assert (marked[ROWS] == MARK).all(), "a finished shard was computed again"
    store.write_block(stopped / ACTIVATIONS, MARKED, ROWS, store.read_features(expected, MARKED, ROWS))
    assert digest(stopped / ACTIVATIONS) == digest(expected)
    assert not (stopped / UNFINISHED).exists()


@pytest.mark.parametrize("changed", ["code", "package", "data", "model", "parameter", "parameter of another stage"])
def test_unfinished_work_is_used_for_the_same_code_packages_and_inputs_and_else_removed(
    workspace: Workspace, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    folder, same = prepared_for_capture(workspace(capture=CAPTURE), tiny_bert), changed == "parameter of another stage"
    for name in ("attnmix", "stages"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "dvc.yaml", folder)
    monkeypatch.setattr(resume, "REPOSITORY", folder)
    before = unfinished_folder("capture", read_parameters(), folder)
    (before / "work").touch()
    assert unfinished_folder("capture", read_parameters(), folder) == before
    if changed == "code":
        (folder / "stages/capture.py").write_text("# changed", encoding="utf-8")
    elif changed == "package":
        packages = [*distributions(), SimpleNamespace(name="planted", version="1.0")]
        monkeypatch.setattr(resume, "distributions", lambda: packages)
    elif changed == "data":
        (folder / "features/tokenize/tokens.parquet").write_bytes(b"changed")
    elif changed == "model":
        (folder / "models/finetuned/config.json").write_text("{}")
    elif changed == "parameter":
        write_parameters(folder, capture=CAPTURE | {"dtype": "float32"})
    else:
        write_parameters(folder, capture=CAPTURE, umap={"seed": 9}, finetune={"epochs": 9})
    after = unfinished_folder("capture", read_parameters(), folder)
    assert (after == before, (before / "work").exists()) == (same, same)
    assert list((folder / UNFINISHED / "capture").iterdir()) == [after]


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
