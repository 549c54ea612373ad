"""The working folder: one run of a stage at a time works in it, and can write where the stage's outputs belong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from stages.errors import InputError
from stages.resume import REPOSITORY, UNFINISHED, remove_empty


@contextmanager
def working_alone(stage: str) -> Iterator[None]:
    """`InputError` where another run of `stage` is at work here, or where its outputs cannot be written.

    The system takes the lock from a run that is killed. Of several processes of one run the first holds it.
    """
    if os.environ.get("RANK", "0") != "0":  # said by torchrun and accelerate
        yield
        return
    for folder in _folders(stage):
        _check_writable(folder)
    UNFINISHED.mkdir(exist_ok=True)
    lock = FileLock(UNFINISHED / f"{stage}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise InputError(f"another run of {stage} is at work in {Path.cwd()}; wait for its end, or stop it") from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
        remove_empty(stage)


def _folders(stage: str) -> Iterator[Path]:
    """Those that its outputs lie in, and that of unfinished work."""
    declared = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))["stages"][stage]
    declared = declared.get("do", declared)
    outs = [out for kind in ("outs", "metrics", "plots") for out in declared.get(kind, [])]
    yield UNFINISHED
    yield from {Path(out if isinstance(out, str) else next(iter(out))).parent: None for out in outs}


def _check_writable(folder: Path) -> None:
    """That it can be written, or made in the nearest folder that is there."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise InputError(f"{there} is a file; {folder} must be a folder that can be written")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{there} cannot be written; allow it, as {folder} is where the results belong")
