"""Start `python -m` commands as copies of a process that has loaded their libraries, as loading takes seconds.

    python -m verify.warm

Each line of stdin is a request: `command`, `folder`, and `log` for what it writes. The answer is the number of the
process, which leads a process group of its own, and, when it has ended, its status. The stages that DVC starts are
copies too.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

STAGES = ("download", "finetune", "capture", "measure", "validate", "reduce", "render")
Command = list[str]


def main() -> None:
    """Runs what was asked for, in copies; the process that they are copies of ends with its stdin."""
    for module in (*(f"stages.{stage}" for stage in STAGES), "dvc.cli", "dvc.commands.repro", "dvc.repo.reproduce"):
        import_module(module)
    for name in [name for name in sys.modules if name.partition(".")[0] == "stages"]:
        del sys.modules[name]  # they import each other anew
    gc.freeze()
    answer("ready")
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if not process:
            return run(_beginning(**request))
        os.setpgid(process, process)
        answer(process)
        answer(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        _load(Path(request["log"]).with_name("modules"))
    return None


def _load(names: Path) -> None:
    """What a copy that ended has imported while it worked."""
    if names.exists():
        for name in names.read_text(encoding="utf-8").split():
            with suppress(Exception):  # made by a program, not imported
                import_module(name)
        names.unlink()


def _note_modules(names: Path) -> None:
    ours = ("stages", "verify", "__main__", "__mp_main__")
    names.write_text("\n".join(name for name in [*sys.modules] if name.partition(".")[0] not in ours), encoding="utf-8")


def answer(what: Any) -> None:
    print(what, flush=True)


def run(command: Command) -> None:
    """As `python -m` would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-m", *command[1:]]
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _beginning(command: Command, folder: str, log: str) -> Command:
    """The copy's own files and group; DVC has a process beside it, which copies itself for each stage."""
    os.setpgid(0, 0)
    os.chdir(folder)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(old, new)
    atexit.register(_note_modules, Path(log).with_name("modules"))
    if command[0] != "dvc":
        return command
    (asked, ask), (told, tell) = os.pipe(), os.pipe()
    if not os.fork():
        os.close(ask)
        return _stage(asked, tell)
    os.close(asked)

    def start(_executable: str, line: str, env: dict[str, str], **_others: Any) -> None:
        """In place of a shell that starts Python."""
        os.write(ask, json.dumps([line, env]).encode() + b"\n")
        status = int(os.read(told, 9))
        if status:
            raise run_module.StageCmdFailedError(line, status)

    run_module = import_module("dvc.stage.run")
    run_module._run = start  # type: ignore[attr-defined]  # DVC has no door of its own for it
    return command


def _stage(asked: int, tell: int) -> Command:
    """The next stage's command, in a copy; the process itself ends with DVC."""
    with os.fdopen(asked) as requests:
        for request in requests:
            line, environment = json.loads(request)
            process = os.fork()
            if not process:
                os.environ.update(environment)
                return str(line).removeprefix("python -m ").split()
            os.write(tell, b"%d" % os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    os._exit(0)


if __name__ == "__main__":
    main()
