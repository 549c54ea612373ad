"""Run stages in separate processes that are killed at defined events instead of at defined times.

The process sends SIGKILL, or another signal, to itself just before it opens, removes or renames a file if the event
and the path match a pattern such as `open .unfinished/capture/4f0c/done/3`. The position of the interruption therefore
depends on completed work and not on the speed of the machine.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PATHS = {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
LIMIT = 3600  # seconds; ends hanging processes, no test depends on it
EVENTS = ("open", "os.mkdir", "os.remove", "os.rename", "shutil.rmtree")
STATUSES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 143}


def run_stage(
    folder: Path,
    stage: str,
    *,
    constants: dict[str, int] | None = None,
    kill_at: str | None = None,
    kill_by: signal.Signals = signal.SIGKILL,
    processes: int = 1,
) -> str:
    """Run a stage in `folder`, assert that it succeeds or is killed, and return its stderr.

    `constants` (`module:name`) are set before the stage starts. If `kill_at` is given and there are several processes,
    the process with the last rank is killed, and the launcher must fail.
    """
    if stage in ("capture", "inspect", "measure"):
        from conftest import run_tokenized  # imported late because a stage process must set its environment first

        with chdir(folder):
            run_tokenized()
    launcher = [sys.executable]
    if processes > 1:
        # A free port, because concurrent test runs would share the launcher's default port.
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = stage_command(launcher, stage, constants, kill_at, int(kill_by), str(processes - 1))
    run = run_to_its_end(command, folder, PATHS)
    killed = STATUSES[kill_by] if processes == 1 else 1
    assert run.returncode == (killed if kill_at else 0), run.stderr
    return run.stderr


def stage_command(launcher: Sequence[str], stage: str, constants: dict[str, int] | None, *kill: object) -> list[str]:
    """Return the command by which `launcher` runs this module; `kill` are the arguments of `main` after `constants`."""
    return [*launcher, "-m", "stage_process", stage, json.dumps([constants or {}, *kill])]


def run_to_its_end(
    command: Sequence[str], folder: Path, environment: dict[str, str], inherited: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, and return the finished process with its output."""
    variables = dict(os.environ if inherited is None else inherited) | {"OMP_NUM_THREADS": "1"} | environment
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LIMIT}
    return subprocess.run(command, cwd=folder, env=variables, check=False, **pipes)


def main(
    stage: str, constants: dict[str, int], kill_at: str | None = None, kill_by: int = 0, kill_rank: str = "0"
) -> None:
    """Set `constants` (`module:name`) and run the stage in this process.

    The process of rank `kill_rank` sends itself the signal `kill_by` at an event that matches the pattern `kill_at`.
    """

    def kill_at_event(event: str, arguments: tuple[Any, ...]) -> None:
        paths = [os.fspath(each) for each in arguments if isinstance(each, (str, os.PathLike))]
        if event in EVENTS and any(re.search(str(kill_at), f"{event} {path}") for path in paths):
            os.kill(os.getpid(), kill_by)

    for name, value in constants.items():
        module, attribute = name.split(":")
        assert hasattr(import_module(module), attribute), name
        setattr(import_module(module), attribute, value)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore SIGINT
    if kill_at and os.environ.get("RANK", "0") == kill_rank:
        sys.addaudithook(kill_at_event)
    sys.argv = [sys.argv[0], stage]
    runpy.run_module("stages", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], *json.loads(sys.argv[2]))
