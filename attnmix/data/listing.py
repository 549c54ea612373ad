"""List the files of a data folder, and decide by name, and by the descriptions of `datasets`, which ones hold data.

No name is used as a pattern, so that a folder `x [1]` is never taken for `x 1`.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from attnmix.core.errors import InputError
from attnmix.core.terminal import shorten
from attnmix.data.formats import allowed_names, data_suffix

CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files at the top of a data set that say which other files make which configuration and split."""
SAVED_STATE = "state.json"
SAVED_SPLITS = "dataset_dict.json"
"""Files that `save_to_disk` writes: the arrow files of a folder, and the split that each folder holds."""
NO_DATA = (*CARDS, SAVED_SPLITS, "config.json", "dataset_info.json")
"""Files with a data suffix that describe data, or a model, as on the hub."""
CACHE = re.compile(r"cache-.*\.arrow")
"""Results of `datasets.map` and `filter`, which are stored beside the data."""
OTHER_TABLES = (".txt", ".xml", ".xls", ".xlsx", ".bz2", ".gz", ".xz", ".zip", ".zst")
"""Suffixes of files that may hold tables and are not read."""


class Contents(NamedTuple):
    """The files of a data set, by their names relative to its folder, with `/`."""

    data: list[str]
    saved_splits: list[str]  # folders of `DatasetDict.save_to_disk`, in its order
    unread_tables: list[str]


def list_files(folder: Path) -> list[str]:
    """Return the names of a folder's files that are not hidden, also of folders in it and of linked ones.

    Raises `InputError` for a link to a data file that does not exist.
    """
    names: list[str] = []
    pending: list[tuple[str, tuple[str, ...]]] = [("", (os.path.realpath(folder),))]
    while pending:
        inside, ancestors = pending.pop()
        with os.scandir(folder / inside) as entries:
            for entry in entries:
                name = f"{inside}{entry.name}"
                if entry.name.startswith("."):
                    continue
                # Unlike the methods of an entry, these two are false for a link to itself.
                if os.path.isdir(entry.path):  # noqa: PTH112
                    target = os.path.realpath(entry.path)
                    leads_back = target in ancestors  # a link to a folder above
                    if not leads_back and not entry.name.startswith("__"):
                        pending.append((f"{name}/", (*ancestors, target)))
                elif os.path.isfile(entry.path):  # noqa: PTH113
                    names.append(name)
                elif entry.is_symlink() and data_suffix(name):
                    problem = f"{folder / name} is a link to {Path(entry.path).readlink()}, which does not exist"
                    raise InputError(f"dataset.name: {problem}; restore that file, or remove the link")
    return sorted([*names, *(card for card in CARDS if card.startswith(".") and (folder / card).is_file())])


def is_description(name: str) -> bool:
    """Return True for the name of a file that may say which other files hold data."""
    return name in CARDS or PurePosixPath(name).name in (SAVED_STATE, SAVED_SPLITS)


def find_contents(names: Sequence[str], descriptions: Mapping[str, Path]) -> Contents:
    """Return which of the files `names` hold data; `descriptions` are those among them that describe others."""
    saved_files: dict[str, list[str]] = {}  # by folder
    for name, path in descriptions.items():
        if PurePosixPath(name).name == SAVED_STATE and not _is_hidden_path(name):
            files = _saved_files(name, path)
            if files is not None:
                saved_files[_folder_of(name)] = files
    known = set(names)
    for folder, files in saved_files.items():
        missing = [file for file in files if f"{folder}{file}" not in known]
        if missing:
            problem = f"{folder}{SAVED_STATE} names {shorten(missing[0])}, which is not in that folder"
            raise InputError(f"dataset.name: {problem}; restore it, or save the data set again")
    data = []
    unread = []
    for name in sorted(known):
        folder, file = _folder_of(name), PurePosixPath(name).name
        if folder in saved_files:
            if file in saved_files[folder]:
                data.append(name)
        elif file in NO_DATA or _is_hidden_path(name):
            continue
        elif data_suffix(file) and not CACHE.fullmatch(file):
            data.append(name)
        elif data_suffix(file) or file.lower().endswith(OTHER_TABLES):
            unread.append(name)
    return Contents(data, _saved_splits(descriptions.get(SAVED_SPLITS)), unread)


def no_data_problem(names: Sequence[str]) -> str:
    """Return the message for a data set without data files."""
    shown = ", ".join(shorten(name) for name in names[:3]) or "no file"
    return f"holds no data file (there is {shown}{', ...' if len(names) > 3 else ''}); allowed: {allowed_names()}"


def _is_hidden_path(name: str) -> bool:
    *folders, file = name.split("/")
    return file.startswith(".") or any(folder.startswith((".", "__")) for folder in folders)


def _folder_of(name: str) -> str:
    """Return the part of a name before the file, empty or with a slash at its end."""
    return name[: len(name) - len(PurePosixPath(name).name)]


def _saved_files(name: str, path: Path) -> list[str] | None:
    """Return the files that a `state.json` lists; None for a file of that name that is none of `datasets`."""
    state = _read_json(path)
    if not isinstance(state, dict) or "_data_files" not in state:
        return None
    if state.get("_indices_data_files"):
        problem = f"{name} selects rows by an index file, which is not read"
        raise InputError(f"dataset.name: {problem}; save the data set again, after flatten_indices()")
    try:
        return [str(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError):
        problem = f"{name} does not list its data files by filename"
        raise InputError(f"dataset.name: {problem}; save the data set again with save_to_disk") from None


def _saved_splits(path: Path | None) -> list[str]:
    content = _read_json(path) if path else None
    splits = content.get("splits") if isinstance(content, dict) else None
    return [str(split) for split in splits] if isinstance(splits, list) else []


def _read_json(path: Path) -> Any:
    """Return what a file holds; None for one that is no JSON, as for the user's own file of a description's name."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
