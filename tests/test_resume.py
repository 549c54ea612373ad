"""An interrupted stage prints one message. It resumes only with the same code and inputs, on one or more machines."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import (
    FEW_SAMPLES,
    REPOSITORY,
    SHORT,
    SMALL_SHARDS,
    Workspace,
    digest,
    few_samples,
    prepared_for_capture,
    run_capture,
    run_tokenized,
    write_parameters,
    write_reviews,
    write_tiny_bert,
)
from stage_process import LIMIT, PATHS, run_stage, run_to_its_end, stage_command

from attnmix.core.arithmetic import environment
from attnmix.core.names import ACTIVATIONS, Site
from attnmix.core.store import features as store
from stages import capture
from stages.common import resume
from stages.common.parameters import read_parameters
from stages.common.resume import UNFINISHED, lock_stage, unfinished_folder

CAPTURE = {"documents": list(range(12)), "max_length": 40, "chunk_tokens": 2}
MEASURE = {
    "measure": {"documents": 6, "gradient_documents": 2, "gradient_max_length": 9},
    "capture": {"documents": [3], "texts": ["time flies like an arrow ."], "max_length": 20, "batch_tokens": 80},
}
RECIPE = {"epochs": 3, "batch_size": 8, "learning_rate": 5e-3, "max_length": 40}
MARKED = Site(1, "layer_output")
MARK = 77.0
ROWS = slice(0, 16)  # rows of the first shard


FIRST_LINES = f"device: CPU\narithmetic {environment.PORTABLE}: {environment.note(environment.PORTABLE)}"


def test_stopped_stage_computes_unfinished_shards_only(
    workspace: Workspace, tiny_bert: Path, small_shards: None
) -> None:
    expected = run_capture(workspace("undisturbed", capture=CAPTURE), tiny_bert) / ACTIVATIONS
    stopped = prepared_for_capture(workspace("stopped", capture=CAPTURE), tiny_bert)

    stop = {"kill_at": "open .*/done/3.begun$", "kill_by": signal.SIGINT}  # Ctrl-C after three shards
    message = "the completed work of capture is stored in .unfinished/capture; `dvc repro` resumes from it"
    assert run_stage(stopped, "capture", constants=SMALL_SHARDS, **stop) == f"{FIRST_LINES}\n\nstopped; {message}\n"
    assert not (stopped / ACTIVATIONS).exists()
    (work,) = (stopped / UNFINISHED / "capture").iterdir()
    assert {"0", "1", "2"} <= {path.name for path in (work / "done").iterdir()}
    store.write_unit(store.open_to_write(work / "stores", MARKED), ROWS, np.full((16, 24), MARK))

    capture.main(read_parameters())
    marked = store.read_features(stopped / ACTIVATIONS, MARKED)
    assert (marked[ROWS] == MARK).all(), "a finished shard was recomputed"
    store.write_unit(
        store.open_to_write(stopped / ACTIVATIONS, MARKED), ROWS, store.read_features(expected, MARKED, ROWS)
    )
    assert digest(stopped / ACTIVATIONS) == digest(expected)
    assert not (stopped / UNFINISHED).exists()


FILES = ("attnmix/runs/capture.py", "features/tokenize/captured/tokens.parquet", "models/finetuned/config.json")


def test_changed_code_or_inputs_discard_unfinished_work(
    workspace: Workspace, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepared_for_capture(workspace(capture=CAPTURE), tiny_bert)
    for name in ("attnmix", "stages"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "dvc.yaml", folder)
    monkeypatch.setattr(resume, "REPOSITORY", folder)
    package = SimpleNamespace(read_text=lambda _: "Metadata-Version: 2.4\nName: planted\nVersion: 1.0\n\nA package.")
    planted = [*distributions(), package]
    used = unfinished_folder("capture", read_parameters(), folder)

    def is_kept_after(change: Callable[[], object]) -> bool:
        """Make a change, and return True if the unfinished work is kept."""
        nonlocal used
        (used / "work").touch()
        change()
        before = used
        used = unfinished_folder("capture", read_parameters(), folder)
        assert list((folder / UNFINISHED / "capture").iterdir()) == [used]
        assert (before / "work").exists() == (used == before)
        return used == before

    assert is_kept_after(lambda: None)
    assert is_kept_after(lambda: write_parameters(folder, capture=CAPTURE, umap={"seed": 9}, finetune={"epochs": 9}))
    assert not is_kept_after(lambda: write_parameters(folder, capture=CAPTURE | {"dtype": "float32"}))
    assert not is_kept_after(lambda: monkeypatch.setattr(resume, "distributions", lambda: planted))
    for file in FILES:
        assert not is_kept_after(lambda file=file: (folder / file).write_text("# changed", encoding="utf-8")), file


@pytest.mark.parametrize(
    ("rank", "message"),
    [("0", "\nstopped; capture had not completed any work from which it could resume\n"), ("1", "")],
)
def test_signal_during_imports_is_one_line(workspace: Workspace, tmp_path: Path, rank: str, message: str) -> None:
    (tmp_path / "first").mkdir()
    stop = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    (tmp_path / "first/torch.py").write_text(stop, encoding="utf-8")
    variables = {"PYTHONPATH": f"{tmp_path}/first:{REPOSITORY}", "RANK": rank}
    run = run_to_its_end([sys.executable, "-m", "stages", "capture"], workspace(), variables)
    assert (run.returncode, run.stdout, run.stderr) == (143, "", message)


def run_two_nodes(folder: Path, stage: str, constants: dict[str, int]) -> list[int]:
    """Run a stage with two launchers that connect at a local port and start one process each; return both statuses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nodes = []
    for rank in range(2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "nodes"]
        command = stage_command([*launcher, "--local-addr", "127.0.0.1"], stage, constants)
        environment = os.environ | PATHS | {"OMP_NUM_THREADS": "1"}
        nodes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL))
    return [node.wait(LIMIT) for node in nodes]


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "changes", "moment", "outputs", "nodes"),
    [
        ("finetune", {"finetune": RECIPE, **SHORT}, "os.mkdir .*/checkpoint-12$", ["models/finetuned", "reports"], 2),
        ("capture", {"capture": CAPTURE}, "open .*/done/3.begun$", ["features/capture"], 1),
        ("inspect", MEASURE, "os.rename .*heads/finetuned/text_0", ["features/inspect"], 1),
        ("measure", MEASURE, "open .*/finetuned/measures-.*part", ["features/measure", "reports"], 2),
    ],
)
def test_killed_process_resumes_to_identical_bytes(
    tmp_path: Path,
    small_shards: None,
    threads_of_a_stage: None,
    stage: str,
    changes: dict[str, Any],
    moment: str,
    outputs: list[str],
    nodes: int,
) -> None:
    """Kill one of two processes, and resume the stage with two launchers or in one process."""
    undisturbed = tmp_path / "undisturbed"
    killed = tmp_path / "killed"
    for folder in (undisturbed, killed):
        write_reviews(folder / "data/reviews")
        for seed, checkpoint in enumerate(("finetuned", "pretrained")):
            write_tiny_bert(folder / "models" / checkpoint, seed=seed)
        write_parameters(folder, **changes)
    constants = {"capture": SMALL_SHARDS, "measure": FEW_SAMPLES}.get(stage, {})
    errors = run_stage(killed, stage, constants=constants, processes=2, kill_at=moment)
    assert "Signal 9 (SIGKILL)" in errors
    assert any((killed / UNFINISHED / stage).rglob("*"))
    if nodes == 2:
        assert run_two_nodes(killed, stage, constants) == [0, 0]
    else:
        run_here(killed, stage)
    if stage == "finetune":  # a different number of processes changes the order of sums (tests/test_finetune.py)
        run_stage(undisturbed, stage, processes=2)
    else:
        with chdir(undisturbed):
            run_tokenized()
        run_here(undisturbed, stage)
    assert [digest(killed / each) for each in outputs] == [digest(undisturbed / each) for each in outputs]
    assert not (killed / UNFINISHED).exists()


def run_here(folder: Path, stage: str) -> None:
    """Run a stage in this process, to avoid the time for imports."""
    with chdir(folder), few_samples(), lock_stage(stage):
        import_module(f"stages.{stage}").main(read_parameters())
