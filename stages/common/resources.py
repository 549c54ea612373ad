"""Checks of disk, folders and names before a stage's work, and the return of freed memory to the system."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING

from attnmix.core.errors import InputError
from attnmix.core.names import ACTIVATIONS
from stages.common.parameters import CaptureParameters

if TYPE_CHECKING:
    from attnmix.models.families import Family  # loads torch


def check_disk(demand: str, size: int, folder: Path, parameters: str, cached: bool = True) -> None:
    """Raise `InputError` where `folder` cannot grow to `size` bytes, twice that if DVC will copy it to its cache.

    The files that an interrupted run has left in `folder` count. `demand` begins the message, and `parameters` names
    what makes the output smaller. `cached` says whether `folder` becomes an output of DVC.
    """
    existing = check_writable(folder)
    copied, free = cached and _dvc_copies(existing), disk_usage(existing).free
    if (1 + copied) * size - _size(folder) > free:
        copy = " and a copy in DVC's cache" if copied else ""
        need = f"{demand} {size / 1e9:.3g} GB of disk{copy}, and {free / 1e9:.3g} GB are free at {existing}"
        raise InputError(f"{need}; to need less, reduce {parameters}")


def check_writable(folder: Path) -> Path:
    """Return `folder` or its nearest parent that exists; raise `InputError` where that cannot be written."""
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise InputError(f"{existing} cannot be written; it must be a folder with write permission, for the results")
    return existing


def check_store(capture: CaptureParameters) -> None:
    """Raise `InputError` where `capture.store` is a folder in `ACTIVATIONS`, or one that holds anything else."""
    if not capture.elsewhere or "://" in capture.store:
        return
    folder = Path(capture.store)
    if folder.absolute().is_relative_to(ACTIVATIONS.absolute()):
        problem = f"{capture.store} is in {ACTIVATIONS}, which each run replaces"
        raise InputError(f"capture.store: {problem}; allowed: {ACTIVATIONS}, or a place outside it")
    check_folder("capture.store", folder, ["layer_[0-9]*"])


def check_folder(key: str, folder: Path, patterns: Collection[str]) -> None:
    """Raise `InputError` where `folder`, set by `key`, is a file or holds a name that fits none of the `patterns`."""
    names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    if foreign or folder.is_file():
        cause = f"holds {foreign[0]}, which is not from an earlier run" if foreign else "is a file"
        allowed = f"a folder that is new, empty or holds only {', '.join(patterns)}"
        raise InputError(f"{key}: {folder} {cause}; allowed: {allowed}")


def present_names(key: str, names: Sequence[str], family: Family, needed: Iterable[str] = ()) -> list[str]:
    """Return those of `names` that the model's family has, and log why others are absent.

    Raise `InputError` where none is left and the parameter `key` must hold one of those that are `needed`.
    """
    absent, present = family.absent(), family.present(names)
    for name in names:
        if name in absent:
            logging.info("%s: absent in the model family %s: %s", name, family.model_type, absent[name])
    if needed and not present:
        problem = f"the model family {family.model_type} has none of {', '.join(names)}"
        raise InputError(f"{key}: {problem}; allowed: {', '.join(family.present(needed))}")
    return present


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
    from dvc.fs import generic, localfs

    cache = Config(str(Path(os.environ["DVC_ROOT"], ".dvc")))["cache"]
    links, path = cache.get("type", ["reflink", "copy"]), str(folder / "link")
    return "dir" not in cache and generic.test_links(links, localfs, str(folder), localfs, path)[:1] == ["copy"]
