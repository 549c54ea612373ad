"""Checks of disk space and folders before long computations, and publication of finished outputs."""

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from attnmix.core.errors import InputError


def check_disk(demand: str, size: int, folder: Path, parameters: str) -> None:
    """Raise `InputError` if `folder` cannot grow to `size` bytes.

    Existing files in `folder`, from an interrupted run, count towards `size`. The message begins with `demand`, and
    advises the user to change the settings in `parameters`.
    """
    existing_folder = check_writable(folder)  # `folder` itself or, if it does not exist, its nearest existing parent
    free_bytes = shutil.disk_usage(existing_folder).free
    missing_bytes = size - _measure_size(folder)
    if missing_bytes > free_bytes:
        need = f"{demand} {size / 1e9:.3g} GB of disk space, but {existing_folder} has only {free_bytes / 1e9:.3g} GB"
        raise InputError(f"{need}; free some space, or reduce {parameters}")


def check_writable(folder: Path) -> Path:
    """Return `folder` or its nearest existing parent; raise `InputError` if this folder is not writable."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{existing} is not a folder with write permission; choose another folder for the results")
    return existing


def check_new_file(key: str, path: Path) -> Path:
    """Return the path of the file to write: `path` with its links resolved.

    Raise `InputError`, prefixed with `key`, if no file can be written at `path` or if its folder does not exist.
    """
    if path.is_dir():
        raise InputError(f"{key}: {path} is a folder; pass the path of a file")
    if path.exists() and not path.is_file():
        raise InputError(f"{key}: {path} is not a regular file; pass the path of a file")
    if not path.parent.is_dir():
        raise InputError(f"{key}: the folder {path.parent} does not exist; create it, or choose another one")
    place = path if path.exists() else path.parent  # a new file requires a writable folder
    if not os.access(place, os.W_OK):
        raise InputError(f"{key}: {place} is not writable; choose a path with write permission")
    return path.resolve()


def check_new_folder(key: str, folder: Path) -> None:
    """Raise `InputError` if `folder`, set by `key`, is a file, is not empty, or cannot be created."""
    has_content = folder.is_dir() and any(folder.iterdir())
    if folder.is_file() or has_content:
        raise InputError(f"{key}: {folder} already exists; choose a new or empty folder")
    _check_writable_by_key(key, folder)


def check_folder(key: str, folder: Path, patterns: Collection[str]) -> None:
    """Raise `InputError` if `folder`, set by `key`, is a file or contains a name that matches none of `patterns`."""
    allowed = f"a folder that is new, empty, or contains only {', '.join(patterns)}"
    if folder.is_file():
        raise InputError(f"{key}: {folder} is a file; choose {allowed}")
    if folder.is_dir():
        names = sorted(path.name for path in folder.iterdir())
        for name in names:
            is_known = any(fnmatchcase(name, pattern) for pattern in patterns)
            if not is_known:
                cause = f"contains {name}, which is not from an earlier run"
                raise InputError(f"{key}: {folder} {cause}; choose {allowed}")
    _check_writable_by_key(key, folder)


def _check_writable_by_key(key: str, folder: Path) -> None:
    """Raise `InputError`, prefixed with `key`, if a folder or its nearest existing parent is not writable."""
    try:
        check_writable(folder)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None


def _measure_size(folder: Path) -> int:
    size = 0
    for root, _, names in os.walk(folder):  # os.walk skips folders renamed by another process
        for name in names:
            file = Path(root, name)
            with suppress(FileNotFoundError):
                size += file.stat().st_size
    return size


def publish_output(unfinished: Path, output: Path) -> None:
    """Replace the old `output` by the folder `unfinished`; `output` never contains only some of the new files."""
    output.parent.mkdir(parents=True, exist_ok=True)
    new = output.with_name(f"{output.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.move(unfinished, new)  # copies the folder if `output` is on another file system
    shutil.rmtree(output, ignore_errors=True)
    new.rename(output)


def remove_unfinished(folder: Path) -> None:
    """Remove the folder of a stage's unfinished outputs after their publication."""
    shutil.rmtree(folder)
    remove_empty(folder.parent)


def remove_empty(folder: Path) -> None:
    """Remove all empty folders in `folder`, then `folder` and its parent if they are empty."""
    folders = [Path(path) for path, _, _ in os.walk(folder, topdown=False)]
    for path in [*folders, folder.parent]:
        with suppress(OSError):  # the folder is not empty
            path.rmdir()
