"""Allow one run of a stage at a time in the working folder, and check the folders that it writes to."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from filelock import FileLock, Timeout

from attnmix.core.errors import InputError
from attnmix.core.options import CaptureParameters
from attnmix.store.layout import ACTIVATIONS
from stages.common.resume import UNFINISHED, declared, remove_empty


@contextmanager
def working_alone(stage: str) -> Iterator[None]:
    """Raise `InputError` where another run of `stage` is at work here, or where its outputs cannot be written.

    The system takes the lock from a run that is killed. Of several processes of one run the first holds it.
    """
    if os.environ.get("RANK", "0") != "0":  # set by torchrun and accelerate
        yield
        return
    outputs = [out for kind in ("outs", "metrics", "plots") for out in declared(stage).get(kind, [])]
    paths = [Path(out if isinstance(out, str) else next(iter(out))) for out in outputs]
    for folder in dict.fromkeys([UNFINISHED, *(path.parent for path in paths)]):
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


def _check_writable(folder: Path) -> None:
    """Raise `InputError` where `folder` cannot be written, or made in its nearest parent that exists."""
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise InputError(f"{existing} is a file; {folder} must be a folder that can be written")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{existing} cannot be written; allow it, as {folder} is where the results belong")


def check_store(capture: CaptureParameters) -> None:
    """Raise `InputError` where `capture.store` is a folder in `ACTIVATIONS`, or one with something else in it."""
    if not capture.elsewhere or "://" in capture.store:
        return
    folder = Path(capture.store)
    if folder.absolute().is_relative_to(ACTIVATIONS.absolute()):
        raise InputError(
            f"capture.store: {capture.store} lies in {ACTIVATIONS}, which each run replaces; "
            f"allowed: {ACTIVATIONS}, or a place outside it"
        )
    check_folder("capture.store", folder, ["layer_[0-9]*"])


def check_folder(key: str, folder: Path, patterns: Collection[str]) -> None:
    """Raise `InputError` where `folder`, set by `key`, is a file or holds a name that fits none of the `patterns`."""
    names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    if foreign or folder.is_file():
        cause = f"holds {foreign[0]}, which is not from an earlier run" if foreign else "is a file"
        allowed = f"a folder that is new, empty or holds only {', '.join(patterns)}"
        raise InputError(f"{key}: {folder} {cause}; allowed: {allowed}")
