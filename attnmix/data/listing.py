"""Listing of a data folder, and selection of its data files by name and by the descriptions of `datasets`.

Names are never used as glob patterns, because the folder name `x [1]` would match `x 1`.
"""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from attnmix.core.errors import InputError, first_line
from attnmix.core.terminal import shorten
from attnmix.data.formats import allowed_names, data_suffix, split_suffixes

CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files in the root of a dataset that assign other files to configurations and splits."""
SAVED_STATE = "state.json"
SAVED_SPLITS = "dataset_dict.json"
"""Files written by `save_to_disk`: `SAVED_STATE` lists the arrow files of its folder, `SAVED_SPLITS` the splits."""
NO_DATA = (*CARDS, SAVED_SPLITS, "config.json", "dataset_info.json")
"""Files that describe a dataset or a model, and contain no data."""
CACHE = re.compile(r"cache-.*\.arrow")
"""Cached results of `map` and `filter` in `datasets`, stored in the folder of the data."""
SYSTEM_FOLDERS = ("$recycle.bin", "system volume information", "@eadir", "lost+found", "_temporary")
"""Names of folders with deleted or unfinished files, in lower case. Hidden folders and `__MACOSX` are never listed."""
BACKUP_ENDS = (".bak", ".backup", ".tmp", ".old", ".orig")
CONFLICT = re.compile(r"\.sync-conflict-|\([^()]*conflicted copy[^()]*\)")
"""A pattern that occurs in the names (without suffixes) of copies made by synchronisation programs."""
CHECKPOINT = "-checkpoint"
"""The end of the names (without suffixes) of copies made by Jupyter."""
MAX_SHOWN_NAMES = 3  # maximum number of files in a message
OTHER_TABLES = (".txt", ".xml", ".xls", ".xlsx", ".bz2", ".gz", ".xz", ".zip", ".zst")
"""Suffixes of unsupported files that may contain tables."""


class Contents(NamedTuple):
    """The files of a dataset, as paths relative to its folder, separated by `/`."""

    data: list[str]
    """Files that are loaded if they belong to a selected split."""
    saved_splits: list[str]
    """Folders written by `DatasetDict.save_to_disk`, in the order of the splits."""
    unread_tables: list[str]
    """Files that may contain tables but are not loaded, such as backups and files in unsupported formats."""


class _Folder(NamedTuple):
    """A folder in a dataset, before its files are listed."""

    prefix: str  # its path relative to the dataset, with a trailing slash; empty for the dataset itself
    ancestors: tuple[str, ...]  # the real paths of the folder and its parent folders


def list_files(folder: Path) -> list[str]:
    """Return the names of all files in a folder, its subfolders and linked folders.

    Hidden files and folders (except `CARDS`) are excluded, and so are folders whose names begin with `__`. Raise
    `InputError` for an unreadable folder, a folder duplicated by a link, and a broken link.
    """
    names: list[str] = []
    root = os.path.realpath(folder)
    visited = {root: ""}  # names by real path
    pending = [_Folder(prefix="", ancestors=(root,))]
    while pending:
        current = pending.pop()
        for entry in _list_entries(folder, current.prefix):
            name = f"{current.prefix}{entry.name}"
            if _is_hidden(entry.name) and name not in CARDS:
                continue
            # Unlike the methods of `os.DirEntry`, these functions return False for a link that points to itself.
            if os.path.isdir(entry.path):  # noqa: PTH112
                target = os.path.realpath(entry.path)
                is_link_to_parent = target in current.ancestors
                is_cache = entry.name.startswith("__")
                if is_link_to_parent or is_cache:
                    continue
                if target in visited:
                    problem = f"{shorten(visited[target])} and {shorten(name)} in {folder} are the same folder"
                    raise InputError(f"dataset.name: {problem}, because of a link; remove it, or select one file")
                visited[target] = name
                pending.append(_Folder(prefix=f"{name}/", ancestors=(*current.ancestors, target)))
            elif os.path.isfile(entry.path):  # noqa: PTH113
                names.append(name)
            else:
                _check_link(folder, name, entry)
    return sorted(names)


def _check_link(folder: Path, name: str, entry: os.DirEntry[str]) -> None:
    """Raise `InputError` if an `entry` is a broken link, unless files of this name are discarded.

    The entry is neither a folder nor a file.
    """
    if entry.is_symlink() and not _is_discarded(name, ()):
        problem = f"{folder / name} is a link to {Path(entry.path).readlink()}, which does not exist"
        raise InputError(f"dataset.name: {problem}; restore its target, or remove the link")


def _list_entries(folder: Path, subfolder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a `subfolder`, or of `folder` itself if `subfolder` is empty.

    An unreadable system folder, such as `lost+found`, counts as empty.
    """
    try:
        with os.scandir(folder / subfolder) as entries:
            return list(entries)
    except OSError as error:
        if subfolder and _is_discarded(subfolder, ()):
            return []
        problem = f"the folder {folder / subfolder} cannot be read ({error.strerror or first_line(error)})"
        raise InputError(f"dataset.name: {problem}; change its permissions, or move it to another folder") from error


def is_description(name: str) -> bool:
    """Return True for the name of a file that may describe other files of the dataset."""
    return name in CARDS or PurePosixPath(name).name in (SAVED_STATE, SAVED_SPLITS)


def find_contents(names: Sequence[str], descriptions: Mapping[str, Path]) -> Contents:
    """Return the `Contents` of a dataset with the files `names`; `descriptions` are the paths of its descriptions.

    In a folder written by `save_to_disk`, only the files listed in `state.json` are data. Elsewhere, `NO_DATA` and
    hidden files are ignored, and files with a supported suffix are data. If these are caches or discarded files, such
    as backups, they belong to `unread_tables`, and so do files with the unsupported suffixes `OTHER_TABLES`.
    """
    known = set(names)
    saved_files = _find_saved_files(names, descriptions)  # by folder, for folders written by `save_to_disk`
    _check_saved_files(saved_files, known)
    data = []
    unread_tables = []
    for name in sorted(known):
        folder = _read_folder_name(name)
        file = PurePosixPath(name).name
        if folder in saved_files:
            is_saved_data = file in saved_files[folder]
            if is_saved_data:
                data.append(name)
        elif file in NO_DATA or _is_hidden_path(name):
            continue
        elif data_suffix(file) and not CACHE.fullmatch(file) and not _is_discarded(name, known):
            data.append(name)
        elif data_suffix(file) or file.lower().endswith(OTHER_TABLES):
            unread_tables.append(name)
    saved_splits: list[str] = []
    if SAVED_SPLITS in descriptions:
        saved_splits = _read_saved_splits(descriptions[SAVED_SPLITS], is_needed=bool(saved_files))
    return Contents(data, saved_splits, unread_tables)


def _check_saved_files(saved_files: Mapping[str, Sequence[str]], known: Collection[str]) -> None:
    """Raise `InputError` if a file in `saved_files` (by folder) is not among the `known` files of the dataset."""
    for folder, files in saved_files.items():
        missing = [file for file in files if f"{folder}{file}" not in known]
        if missing:
            problem = f"{folder}{SAVED_STATE} lists {shorten(missing[0])}, which is not in this folder"
            raise InputError(f"dataset.name: {problem}; restore it, or save the dataset again")


def _find_saved_files(names: Sequence[str], descriptions: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return the data files of each folder written by `save_to_disk`."""
    saved_files = {}
    for name, path in descriptions.items():
        is_state = PurePosixPath(name).name == SAVED_STATE
        if is_state and not _is_hidden_path(name) and not _is_discarded(name, ()):
            files = _read_saved_files(name, path, names)
            if files is not None:
                saved_files[_read_folder_name(name)] = files
    return saved_files


def no_data_problem(names: Sequence[str]) -> str:
    """Return the error message for a dataset without data files."""
    shown = ", ".join(shorten(name) for name in names[:MAX_SHOWN_NAMES]) or "no file"
    if len(names) > MAX_SHOWN_NAMES:
        shown += ", ..."
    return f"contains no data file (it has {shown}); allowed: {allowed_names()}"


def _is_hidden(part: str) -> bool:
    return part.startswith(".")


def _is_hidden_path(name: str) -> bool:
    """Return True for a hidden file, and for a file in a hidden folder or a cache (`__...`)."""
    *folders, file = name.split("/")
    if _is_hidden(file):
        return True
    return any(folder.startswith((".", "__")) for folder in folders)


def _is_discarded(name: str, known: Collection[str]) -> bool:
    """Return True for temporary, backup and deleted files.

    A copy made by Jupyter is recognised only if its original is in `known`, the names of all files.
    """
    for part in name.split("/"):
        if part.startswith(("~", "#")) or part.lower() in SYSTEM_FOLDERS:
            return True
    file = PurePosixPath(name).name
    stem, suffixes = split_suffixes(file)
    if stem.endswith(CHECKPOINT):
        original = stem.removesuffix(CHECKPOINT)
        if f"{_read_folder_name(name)}{original}{suffixes}" in known:
            return True
    stem = stem.lower()
    return stem.endswith(BACKUP_ENDS) or CONFLICT.search(stem) is not None


def _read_folder_name(name: str) -> str:
    """Return the folder in a file name, with a trailing slash, or an empty string."""
    file = PurePosixPath(name).name
    return name[: len(name) - len(file)]


def _read_saved_files(name: str, path: Path, names: Sequence[str]) -> list[str] | None:
    """Return the files listed in a `state.json`; None if `datasets` did not write this `state.json`.

    `name` is the name of this file in the dataset, `path` its local path, and `names` are the names of all files. Raise
    `InputError` if the file is damaged.
    """
    arrow_files = _list_arrow_files(_read_folder_name(name), names)
    # Other programs may also write a `state.json`, so an invalid file is an error only beside arrow files.
    state = _read_json(name, path, is_needed=bool(arrow_files))
    is_from_datasets = isinstance(state, dict) and "_data_files" in state
    if not is_from_datasets:
        has_saved_files = any(file.startswith("data-") for file in arrow_files)  # as named by `save_to_disk`
        if has_saved_files:
            problem = f"{name} does not list {arrow_files[0]} and other arrow files in its folder"
            raise InputError(f"dataset.name: {problem}; restore it, or save the dataset again with save_to_disk")
        return None
    if state.get("_indices_data_files"):
        problem = f"{name} selects rows by an index file, which is not supported"
        raise InputError(f"dataset.name: {problem}; call flatten_indices(), and save the dataset again")
    try:
        return [str(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError):
        problem = f"{name} does not list its data files by filename"
        raise InputError(f"dataset.name: {problem}; save the dataset again with save_to_disk") from None


def _list_arrow_files(folder: str, names: Sequence[str]) -> list[str]:
    """Return the names (without the folder) of the arrow files in `folder`, except files cached by `datasets`.

    `names` are paths relative to the dataset, and `folder` is such a path that ends with a slash, or empty.
    """
    files = []
    for name in names:
        file = name.removeprefix(folder)
        is_in_folder = _read_folder_name(name) == folder
        if is_in_folder and file.endswith(".arrow") and not CACHE.fullmatch(file):
            files.append(file)
    return files


def _read_saved_splits(path: Path, is_needed: bool) -> list[str]:
    """Return the splits listed in a `dataset_dict.json`.

    If there is no valid list, return an empty list; raise `InputError` instead if `is_needed` is True.
    """
    content = _read_json(SAVED_SPLITS, path, is_needed)
    splits = None
    if isinstance(content, dict):
        splits = content.get("splits")
    if isinstance(splits, list):
        return [str(split) for split in splits]
    if is_needed:
        problem = f"{SAVED_SPLITS} does not list the splits in its folder"
        raise InputError(f"dataset.name: {problem}; restore it, or save the dataset again with save_to_disk")
    return []


def _read_json(name: str, path: Path, is_needed: bool) -> Any:
    """Return the JSON content of a file; None for invalid JSON unless `is_needed`."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror or first_line(error)})"
        raise InputError(f"dataset.name: {problem}; change its permissions, or move it to another folder") from error
    except (ValueError, RecursionError) as error:
        if not is_needed:
            return None
        problem = f"{name} is damaged ({first_line(error)})"
        remedy = "restore it, or save the dataset again with save_to_disk"
        raise InputError(f"dataset.name: {problem}; {remedy}") from error
