"""Find the files of each split in a folder, by their names and descriptions, with `datasets`, as the hub does.

Files of the formats of `attnmix.data.files` are read by that module, so that a file gives the same classes and errors
in a folder and alone; any other format, and a description that sets options of its reader, is read by `datasets`.
"""

import logging
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from attnmix.core.errors import InputError
from attnmix.core.extras import require_extra
from attnmix.core.settings import DatasetParameters
from attnmix.data.formats import SEPARATORS, SUFFIXES, check_sizes

DESCRIPTIONS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files of a dataset that say which other files make which configuration and split."""
OTHER_SUFFIXES = (
    ".json",
    ".ndjson",
    ".arrow",
    ".txt",
    ".xml",
    ".xls",
    ".xlsx",
    ".bz2",
    ".gz",
    ".xz",
    ".zip",
    ".zst",
)
"""More suffixes of files that may hold tables, besides `SUFFIXES`."""
PART_NUMBER = re.compile(r"(?P<head>.*?)(?P<number>\d+)-of-(?P<total>\d+)")
MAX_SHOWN_FILES = 20
MAX_SHOWN_CAUSE = 400  # letters
# How `datasets` lists configurations where none, or an unknown one, is chosen.
CONFIGURATIONS_LISTED = re.compile(r"(?:available configs|Available): \[(.*)\]")
FILE_OPTIONS = {"name", "version", "data_dir", "data_files", "description", "sep", "delimiter", "features"}
"""Options of a description that choose files, or that are understood here."""


class Layout(NamedTuple):
    """The files of a folder's configuration by split, and what its description says of them."""

    files: dict[str, list[Path]]
    separator: str | None
    class_names: Mapping[str, list[str]]
    builder: Any  # of `datasets`, which reads other formats

    def read_here(self, splits: Sequence[str]) -> bool:
        """Return True where `attnmix.data.files` reads all files of these splits."""
        files = [file for split in splits for file in self.files[split]]
        known = all(file.suffix.lower() in SUFFIXES and file.is_file() for file in files)
        return known and not _has_options(self.builder.config)


def split_name(name: str) -> tuple[str, str | None]:
    """Return the hub identifier, folder or file that a `dataset.name` names, and its configuration behind a colon."""
    path = Path(name)
    if ":" not in name[1:] or path.suffix.lower() in SUFFIXES or path.exists():
        return name, None
    source, _, configuration = name.rpartition(":")
    if not Path(source).is_dir():
        source, _, configuration = name.partition(":")
    return source, configuration or None


def source_files(dataset: DatasetParameters) -> dict[str, Path]:
    """Return the local files that are read for a data set, by their names in it; none of a hub dataset.

    Raises `InputError` for a folder that cannot be read, and for files that are too many or too large.
    """
    source, configuration = split_name(dataset.name)
    path = Path(source)
    if path.is_file():
        check_sizes([path])
        return {path.name: path}
    if not path.is_dir():
        return {}
    check_around(path)
    with tempfile.TemporaryDirectory() as cache, errors_in_words(dataset.name, path):
        layout = find_layout(path, configuration, cache)
        splits = chosen_splits(layout, dataset)
    files = [path / name for name in DESCRIPTIONS if (path / name).is_file()]
    files += [file for split in splits.values() for file in layout.files[split]]
    check_sizes(files)
    return {name_in(path, file): file for file in sorted(files)}


def check_around(folder: Path) -> None:
    """Raise `InputError` for a folder around the working folder, whose own tables would be read as reviews."""
    if Path.cwd().resolve().is_relative_to(folder.resolve()):
        problem = f"{folder} holds the working folder, whose results are no reviews"
        raise InputError(f"dataset.name: {problem}; name the folder or file of the reviews alone")


def find_layout(folder: Path, configuration: str | None, cache: str) -> Layout:
    """Return the files of a folder's configuration; they may be empty."""
    require_extra("pipeline", "a data set in a folder")
    import datasets  # seconds to load

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are reported by `errors_in_words`
    builder = datasets.load_dataset_builder(str(folder), name=configuration, cache_dir=cache)
    files: dict[str, list[Path]] = {}
    suffixes: set[str] = set()
    for split, names in (builder.config.data_files or {}).items():
        files[str(split)] = [Path(name) for name in names]
        suffixes.update(file.suffix.lower() for file in files[str(split)])
    separator = getattr(builder.config, "sep", None)
    usual_separators = [SEPARATORS.get(suffix) for suffix in suffixes]
    if len(separator or "") != 1 or separator in usual_separators:
        separator = None  # that of each file's suffix
    return Layout(files, separator, declared_classes(builder.info.features or {}), builder)


def chosen_splits(layout: Layout, dataset: DatasetParameters) -> dict[str, str]:
    """Return the folder's names of `train`, and of `test` where it has one; raise `InputError` where it lacks one."""
    splits = {"train": dataset.train_split}
    alone = list(layout.files) == [dataset.train_split]
    if dataset.test_split is not None and alone:
        message = "%s has no split %s: a part of %s becomes it"
        logging.info(message, dataset.name, dataset.test_split, dataset.train_split)
    elif dataset.test_split is not None:
        splits["test"] = dataset.test_split
    for split, name in splits.items():
        if name not in layout.files:
            allowed = ", ".join(layout.files)
            if split == "test":
                allowed += "; or empty, for a part of train"
            raise InputError(f"dataset.{split}_split: {dataset.name} has no split {name}; allowed: {allowed}")
        _check_parts(layout.files[name], dataset.name)
    return splits


def name_unread_files(name: str, paths: Sequence[str], read: Sequence[str]) -> None:
    """Warn of the files with tables among `paths` that no chosen split reads."""
    known = set(read)
    unread = [path for path in sorted(paths) if _is_table(path) and path not in known]
    if unread:
        shown = unread[:MAX_SHOWN_FILES]
        if len(unread) > MAX_SHOWN_FILES:
            shown.append(f"and {len(unread) - MAX_SHOWN_FILES} more")
        message = "%s: %d of %d files are not read: %s"
        logging.warning(message, name, len(unread), len(unread) + len(read), ", ".join(shown))


def files_in(folder: Path) -> list[str]:
    """Return the names of a folder's files that are not hidden, also of folders in it and of linked ones."""
    # Path.glob follows no linked folder, and gives hidden files.
    names = glob("**", root_dir=folder, recursive=True)  # noqa: PTH207 (see above)
    return [Path(name).as_posix() for name in names if (folder / name).is_file()]


def name_in(folder: Path, file: Path) -> str:
    """Return a file's name in a folder, or its whole path where a description names a file elsewhere."""
    for parent in (folder.absolute(), folder.resolve()):
        if file.is_relative_to(parent):
            return file.relative_to(parent).as_posix()
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else str(file)


@contextmanager
def errors_in_words(name: str, folder: Path) -> Iterator[None]:
    """Turn every error of `datasets` into an `InputError` that says its cause, and `name` in place of the `folder`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the library raises dozens of types for an unusable source
        problem = f"cannot be loaded: {_cause(error).replace(str(folder.resolve()), name)}"
        configurations = CONFIGURATIONS_LISTED.search(str(error))
        if configurations:
            problem = f"needs one of the configurations {configurations[1]} behind a colon"
        raise InputError(f"dataset.name: {name} {problem}") from error


def declared_classes(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the classes by column, of those columns that `datasets` knows as classes."""
    return {name: list(feature.names) for name, feature in features.items() if hasattr(feature, "names")}


def _cause(error: BaseException) -> str:
    """Return the message at the start of a chain of errors, on one line, with its type where it has no message."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split()).removeprefix("An error occurred while generating the dataset").strip()
    return message[:MAX_SHOWN_CAUSE] or type(error).__name__


def _check_parts(files: Sequence[Path], name: str) -> None:
    """Raise `InputError` where one of the parts `...-00000-of-00003` is missing."""
    numbers = defaultdict(set)
    for file in files:
        match = PART_NUMBER.match(file.name)
        if match:
            whole = (file.parent / match["head"], int(match["total"]), file.suffix)
            numbers[whole].add(int(match["number"]))
    for (head, total, suffix), present in numbers.items():
        first = 1 if total in present else 0  # some count from 1
        missing = sorted(set(range(first, first + total)) - present)
        if missing:
            parts = ", ".join(map(str, missing[:MAX_SHOWN_FILES]))
            problem = f"of the {total} parts {head.name}*-of-{total:05}{suffix} {len(missing)} are missing: {parts}"
            raise InputError(f"dataset.name: {name}: {problem}; download them, or name the files anew")


def _has_options(config: Any) -> bool:
    """Return True where a description sets an option of the library's reader beside the separator."""
    default = vars(type(config)())
    values = vars(config)
    options = [key for key in values if key not in FILE_OPTIONS and values[key] != default.get(key)]
    return bool(options) or len(values.get("sep") or ",") != 1


def _is_table(path: str) -> bool:
    inside = Path(path)
    hidden = any(part.startswith(".") for part in inside.parts)
    return not hidden and inside.name not in DESCRIPTIONS and inside.suffix.lower() in (*SUFFIXES, *OTHER_SUFFIXES)
