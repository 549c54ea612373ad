"""What must not show in a result: folder, home, clock and date, language, hash seed, umask, threads, processor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

EMULATOR = "qemu-x86_64"
NOISE = "TCG doesn't support requested feature"  # what the emulator lacks of a processor besides arithmetic


@dataclass(frozen=True)
class Surroundings:
    """One clone's."""

    name: str
    threads: int
    variables: Mapping[str, str] = field(default_factory=dict)
    umask: int = 0o022
    processor: str | None = None  # emulated, by the emulator's name for it


# 25 hours apart, so that no two clones have the same date; and one runs after the other.
HERE = {"TZ": "<-11>11", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}
ELSEWHERE = {"TZ": "<+14>-14", "LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "4711"}
CLONES = (
    Surroundings("one thread", 1, HERE),
    Surroundings("zwei Fäden", 2, ELSEWHERE, umask=0o077),
    Surroundings("four threads", 4, ELSEWHERE, umask=0o027),
)


def emulated(processor: str) -> Surroundings:
    """On an emulated processor, otherwise as the first clone."""
    return Surroundings(processor, 1, HERE, processor=processor)


def check_emulator() -> None:
    """`SystemExit` where there is none."""
    if shutil.which(EMULATOR) is None:
        raise SystemExit(f"error: no {EMULATOR} to emulate a processor with (Debian: apt install qemu-user)")


def run(clone: Surroundings, folder: Path, command: list[str], log: Path) -> None:
    """`command` in `folder`, its output into `log`; `SystemExit` with the end of the log where it fails."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    environment = dict(os.environ) | dict(clone.variables)
    environment |= {"HOME": str(home), "OMP_NUM_THREADS": str(clone.threads), "LOKY_MAX_CPU_COUNT": str(clone.threads)}
    environment |= {"DVC_SITE_CACHE_DIR": str(home / "dvc"), "DVC_NO_ANALYTICS": "1"}
    path = [str(_python(clone, folder.parent / "python")), str(Path(sys.prefix) / "bin"), os.environ["PATH"]]
    environment["PATH"] = os.pathsep.join(path)
    with log.open("w", encoding="utf-8") as opened:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            umask=clone.umask,
            stdout=opened,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode != 0:
        lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line and NOISE not in line]
        raise SystemExit("\n".join([f"error: {clone.name}: `{' '.join(command)}` failed:", *lines[-15:]]))


def _python(clone: Surroundings, folder: Path) -> Path:
    """A folder with the command `python` for the stages: this environment's, on the clone's processor.

    DVC itself is not emulated. A process that a stage starts is, as `sys.executable` names the same command.
    """
    environment = Path(sys.prefix)
    if clone.processor is None:
        return environment / "bin"
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(environment / "pyvenv.cfg", folder / "pyvenv.cfg")
    (folder / "lib").unlink(missing_ok=True)
    (folder / "lib").symlink_to(environment / "lib")
    command = folder / "bin/python"
    base = Path(sys.executable).resolve()
    command.write_text(f'#!/bin/sh\nexec {EMULATOR} -cpu {clone.processor} -0 "$0" "{base}" "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return command.parent
