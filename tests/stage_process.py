"""A stage in a process of its own, killed at a moment that the stage itself reaches, not by a clock.

The process sends itself SIGKILL, or another signal, when it is about to open, remove or rename a file and a pattern is
found in the event and the path, as in `open .unfinished/capture/4f0c/done/3`. So where it stops depends on what it has
done and not on how fast the machine is.
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
LIMIT = 3600  # seconds; it ends what hangs, and decides no test
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
    """Run a stage in `folder`, which must succeed, or be killed; return its stderr.

    `constants` are set before the stage starts, by `module:name`. Of several processes the last is killed, and the
    launcher must fail.
    """
    if stage in ("capture", "inspect", "measure"):
        from conftest import run_tokenized  # not in the stage's own process, which must set itself up first

        with chdir(folder):
            run_tokenized()
    launcher = [sys.executable]
    if processes > 1:
        # A port that is free, not the launcher's own default, which a second run of the tests would take as well.
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = stage_command(launcher, stage, constants, kill_at, int(kill_by), str(processes - 1))
    run = run_to_its_end(command, folder, PATHS)
    killed = STATUSES[kill_by] if processes == 1 else 1
    assert run.returncode == (killed if kill_at else 0), run.stderr
    return run.stderr


def stage_command(launcher: Sequence[str], stage: str, constants: dict[str, int] | None, *kill: object) -> list[str]:
    """Return this module as a command of `launcher`, which is Python or torch's; `kill` as in `main`."""
    return [*launcher, "-m", "stage_process", stage, json.dumps([constants or {}, *kill])]


def run_to_its_end(
    command: Sequence[str], folder: Path, environment: dict[str, str], inherited: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Return a finished process with its output."""
    variables = dict(os.environ if inherited is None else inherited) | {"OMP_NUM_THREADS": "1"} | environment
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LIMIT}
    return subprocess.run(command, cwd=folder, env=variables, check=False, **pipes)


def main(
    stage: str, constants: dict[str, int], kill_at: str | None = None, kill_by: int = 0, kill_rank: str = "0"
) -> None:
    """Run the stage in this process."""

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        paths = [os.fspath(each) for each in arguments if isinstance(each, (str, os.PathLike))]
        if event in EVENTS and any(re.search(str(kill_at), f"{event} {path}") for path in paths):
            os.kill(os.getpid(), kill_by)

    for name, value in constants.items():
        module, attribute = name.split(":")
        assert hasattr(import_module(module), attribute), name
        setattr(import_module(module), attribute, value)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    if kill_at and os.environ.get("RANK", "0") == kill_rank:
        sys.addaudithook(look)
    sys.argv = [sys.argv[0], stage]
    runpy.run_module("stages", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], *json.loads(sys.argv[2]))
