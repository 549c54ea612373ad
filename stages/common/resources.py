"""Check that the disk has room for a stage's output, and return freed memory to the system."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory

from attnmix.core.errors import InputError


def check_disk(what: str, needed: int, folder: Path, smaller: str, cached: bool = True) -> None:
    """Raise `InputError` where `folder` cannot grow to `needed` bytes, twice that if DVC will copy it to its cache.

    What an interrupted run has left in `folder` counts. `cached`: whether `folder` becomes an output that DVC caches.
    """
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    copied = cached and _dvc_copies(existing)
    free = disk_usage(existing).free
    if (1 + copied) * needed - _size(folder) > free:
        copy = " and a copy in DVC's cache" if copied else ""
        said = f"{what} {needed / 1e9:.3g} GB of disk{copy}, and {free / 1e9:.3g} GB are free at {existing}"
        raise InputError(f"{said}; to need less, reduce {smaller}")


def trim_heap() -> None:
    """Return free pages inside the heap to the system; without it, tensors of varying size fragment a growing heap."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _size(folder: Path) -> int:
    size = 0
    for root, _, files in os.walk(folder):  # skips a folder that another process renames in the meantime
        for name in files:
            with suppress(FileNotFoundError):
                size += Path(root, name).stat().st_size
    return size


def _dvc_copies(folder: Path) -> bool:
    """Return whether DVC, if it runs this stage, will copy the output to a cache on this disk rather than link it."""
    if "DVC_ROOT" not in os.environ:
        return False
    from dvc.config import Config  # slow to import, and a stage also runs without DVC
    from dvc.fs import system

    cache = Config(str(Path(os.environ["DVC_ROOT"], ".dvc")))["cache"]
    link = "other disk" if "dir" in cache else cache.get("type", ["reflink"])[0]
    with TemporaryDirectory(dir=folder) as trial, suppress(OSError):
        source = Path(trial, "source")
        source.write_bytes(b"x")
        system.reflink(source, Path(trial, "clone"))
        return link == "copy"
    return link in ("copy", "reflink")  # this file system cannot clone files
