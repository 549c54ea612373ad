"""A stage in a process of its own, and killed at a moment that the stage itself reaches, not a clock.

    python -m stage_process capture [--set MODULE:NAME=INTEGER ...] [--kill-at PATTERN [--kill-by SIGNAL]]

The process sends itself SIGKILL, or another signal, when it is about to open, remove or rename a file and `PATTERN` is
found in the event and the path, as in `open .unfinished/capture/4f0c/done/3`. So where it stops depends on what it has
done and not on how fast the machine is.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
LIMIT = 3600  # seconds; it ends what hangs, and decides no test
EVENTS = ("open", "os.mkdir", "os.remove", "os.rename", "shutil.rmtree")


def run_stage(
    folder: Path,
    stage: str,
    *,
    code: Path = TESTS.parent,
    packages: Sequence[Path] = (),
    constants: dict[str, int] | None = None,
    kill_at: str | None = None,
    kill_by: signal.Signals = signal.SIGKILL,
    kill_rank: int = 0,
    processes: int = 1,
) -> str:
    """Run a stage of the repository `code` in `folder`; what it wrote to stderr. It must succeed, or be killed.

    `packages` are folders of installed packages before all others; `constants` are set before the stage starts, by
    `module:name`. Of several processes that of `kill_rank` is killed, and the launcher must fail.
    """
    if stage in ("capture", "measure"):
        from conftest import tokenize_in  # not in the stage's own process, which imports this module too

        tokenize_in(folder)
    launcher = [sys.executable]
    if processes > 1:
        # A port that is free, not the launcher's own default, which a second run of the tests would take as well.
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = stage_command(launcher, stage, constants)
    if kill_at:
        command += ["--kill-at", kill_at, "--kill-by", kill_by.name, "--kill-rank", str(kill_rank)]
    run = run_to_its_end(command, folder, {"PYTHONPATH": os.pathsep.join(map(str, [*packages, code, TESTS]))})
    ends = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 143}
    killed = ends[kill_by] if processes == 1 else 1
    assert run.returncode == (killed if kill_at else 0), run.stderr
    return run.stderr


def stage_command(launcher: Sequence[str], stage: str, constants: dict[str, int] | None = None) -> list[str]:
    """This module as a command of `launcher`, which is Python or torch's."""
    command = [*launcher, "-m", "stage_process", stage]
    for name, value in (constants or {}).items():
        command += ["--set", f"{name}={value}"]
    return command


def run_to_its_end(
    command: Sequence[str], folder: Path, environment: dict[str, str], inherited: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A finished process; one that has not ended after an hour says that the machine, or a hang, is at fault."""
    variables = dict(os.environ if inherited is None else inherited) | {"OMP_NUM_THREADS": "1"} | environment
    try:
        return subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"{' '.join(command)} has not ended after {LIMIT} s: it hangs, or this machine is far too slow")


def kill_at(pattern: str, kill_by: signal.Signals) -> None:
    moment = re.compile(pattern)

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        paths = [os.fspath(each) for each in arguments if isinstance(each, (str, os.PathLike))]
        if event in EVENTS and any(moment.search(f"{event} {path}") for path in paths):
            os.kill(os.getpid(), kill_by)

    sys.addaudithook(look)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--kill-at")
    parser.add_argument("--kill-by", default="SIGKILL")
    parser.add_argument("--kill-rank", default="0")
    arguments = parser.parse_args()
    for setting in arguments.set:
        name, value = setting.split("=")
        module, attribute = name.split(":")
        assert hasattr(import_module(module), attribute), setting
        setattr(import_module(module), attribute, int(value))
    # What is started in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments.kill_at and os.environ.get("RANK", "0") == arguments.kill_rank:
        kill_at(arguments.kill_at, signal.Signals[arguments.kill_by])
    sys.argv = [sys.argv[0], arguments.stage]
    runpy.run_module("stages", run_name="__main__")


if __name__ == "__main__":
    main()
