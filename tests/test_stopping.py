"""Ctrl-C and SIGTERM: one line that says what is kept and how to go on, the shell's exit status, no traceback."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, SMALL_SHARDS, Workspace, digest, prepared_for_capture
from stage_process import run_stage, run_to_its_end

from attnmix.store.layout import ACTIVATIONS
from stages.common.resume import UNFINISHED

CAPTURE = {"documents": list(range(12)), "max_length": 40}
STARTS = "import os, signal\nfrom stages.common.cli import as_command\nwith as_command(lambda: 'something is kept'):\n"
STOPS = "os.kill(os.getpid(), signal.SIGINT)"


def ended(folder: Path, *command: str, before: Path | None = None) -> tuple[int, list[str]]:
    """Exit status and lines of stderr of Python; `before` is where packages are looked for first."""
    found = os.pathsep.join(map(str, [*([before] if before else []), REPOSITORY]))
    # What is started in the background ignores SIGINT, and hands that on.
    listening = ["-c", "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); os.execv(*A)"]
    listening[1] = listening[1].replace("*A", "sys.executable, [sys.executable, *sys.argv[1:]]")
    run = run_to_its_end([sys.executable, *listening, *command], folder, {"PYTHONPATH": found})
    assert run.stdout == ""
    return run.returncode, [line for line in run.stderr.splitlines() if line]


@pytest.mark.parametrize("by", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_stopped_stage_says_what_is_kept_and_goes_on_there(
    workspace: Workspace, tiny_bert: Path, by: signal.Signals
) -> None:
    stopped, whole = (prepared_for_capture(workspace(name, capture=CAPTURE), tiny_bert) for name in ("one", "other"))
    said = run_stage(stopped, "capture", constants=SMALL_SHARDS, kill_at="open .*/done/3.begun$", kill_by=by)
    rest = "what capture has finished is kept in .unfinished/capture: `dvc repro` goes on from there"
    assert [line for line in said.splitlines() if line] == [f"stopped; {rest}"]
    assert not (stopped / ACTIVATIONS).exists()
    run_stage(stopped, "capture", constants=SMALL_SHARDS)
    run_stage(whole, "capture", constants=SMALL_SHARDS)
    assert digest(stopped / ACTIVATIONS) == digest(whole / ACTIVATIONS)
    assert not (stopped / UNFINISHED).exists()


def test_stage_that_has_finished_nothing_leaves_nothing(workspace: Workspace, tiny_bert: Path) -> None:
    folder = prepared_for_capture(workspace(capture=CAPTURE), tiny_bert)
    said = run_stage(folder, "capture", kill_at="open .*/config.json$", kill_by=signal.SIGINT)
    rest = "nothing of capture is kept, the stages before it are: `dvc repro` begins it anew"
    assert [line for line in said.splitlines() if line] == [f"stopped; {rest}"]
    assert not (folder / UNFINISHED).exists()


def test_ctrl_c_while_libraries_are_loaded_is_one_line(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first/torch.py").write_text(f"import os, signal\n{STOPS}\n", encoding="utf-8")
    status, said = ended(workspace(), "-m", "stages", "capture", before=tmp_path / "first")
    assert (status, said) == (130, ["stopped; nothing had begun; `dvc repro` goes on from here"])


def test_whatever_a_library_makes_of_ctrl_c_is_one_line(workspace: Workspace) -> None:
    wrapped = f"    try: {STOPS}\n    except KeyboardInterrupt as error: raise RuntimeError('a worker died') from error"
    assert ended(workspace(), "-c", STARTS + wrapped) == (130, ["stopped; something is kept"])


def test_second_ctrl_c_ends_at_once(workspace: Workspace) -> None:
    slow = f"    try: {STOPS}\n    finally:\n        {STOPS}\n        print('still here')"
    assert ended(workspace(), "-c", STARTS + slow) == (130, [])


def test_of_several_processes_one_says_it(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert ended(workspace(), "-c", f"{STARTS}    {STOPS}") == (130, [])
