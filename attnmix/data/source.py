"""Labelled texts from a hub dataset, a dataset folder or a single file: reading, validation and splitting."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from attnmix.core.draw import stratified_draw, stratified_split
from attnmix.core.errors import InputError, text_problem
from attnmix.core.settings import DatasetParameters
from attnmix.core.store.texts import TEXT_COLUMNS, whole_texts
from attnmix.core.terminal import shorten
from attnmix.data import folders
from attnmix.data.arrow_tables import stored_class_names
from attnmix.data.classes import FileLabels, Reading, choose_reading, named_classes, shown_classes, with_classes
from attnmix.data.columns import Columns
from attnmix.data.files import read_errors, read_file
from attnmix.data.formats import SEPARATORS, allowed_names, check_sizes, data_suffix
from attnmix.data.hub.repository import Repository
from attnmix.data.listing import is_description
from attnmix.data.rare_word import RARE_WORD_CLASSES, insert_rare_word

Tables = dict[str, pd.DataFrame]
MAX_SHOWN_PAIRS = 5  # maximum number of warnings of equal rows in two files
HUB_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class Origin(NamedTuple):
    """The origin of the texts."""

    commit: str | None = None
    """The commit of a hub dataset."""
    creators: Sequence[str] = ()
    """The sources of the texts according to the dataset card, such as `machine-generated`."""


def read_splits(dataset: DatasetParameters, seed: int) -> tuple[Tables, Origin]:
    """Return the tables `train`, `validation` and `test`, and the origin of the texts.

    Tables have the columns `text`, `label` (from 0) and `label_name`, and for pairs of texts (two columns in
    `text_column`) also `text_pair`. The validation split is a stratified sample of train. If the source lacks a test
    split, another sample of train with the same fraction is drawn first, and becomes the test split. `train_limit` and
    `test_limit` are applied before the validation sample is drawn. Samples never separate rows with equal texts or
    equal groups. `rare_word` is inserted after sampling, and therefore does not change the selection of texts. Raise
    `InputError` for invalid sources and rows.
    """
    source, origin = read_source(dataset, _select_columns(dataset))
    tables = with_classes(source, f"dataset.label_column: {shorten(dataset.label_column)!r} of {dataset.name}")
    all_rows = pd.concat(tables.values())
    classes = all_rows.groupby("label")["label_name"].first()
    splits = _draw_splits(tables, dataset, seed)
    if dataset.rare_word is not None:
        splits = insert_rare_word(splits, dataset.rare_word, seed)
        classes = pd.Series(RARE_WORD_CLASSES)
    _check_splits(splits, classes)
    text_columns = TEXT_COLUMNS[: len(dataset.text_columns)]
    names = [*text_columns, "label", "label_name"]
    selected = {split: table[names].reset_index(drop=True) for split, table in splits.items()}
    return selected, origin


def _draw_splits(tables: Tables, dataset: DatasetParameters, seed: int) -> Tables:
    """Return the splits `train`, `validation` and `test`, drawn from the tables `train` and, if present, `test`."""
    train = tables["train"]
    if "test" in tables:
        test = tables["test"]
    else:
        train, test = _split_rows(train, dataset.validation_fraction, seed)
    train = _draw_at_most(train, dataset.train_limit, seed)
    test = _draw_at_most(test, dataset.test_limit, seed)
    # The splits are disjoint, because each sample is removed from train before the next one is drawn. However, all
    # samples are drawn with the same seed, so they are not independent: rows of the validation and test splits are
    # neighbours in the table slightly more often than by chance, if both are samples of train without limits. This
    # matters only if neighbouring rows are related, such as reviews of the same product.
    train, validation = _split_rows(train, dataset.validation_fraction, seed)
    return {"train": train, "validation": validation, "test": test}


def _select_columns(dataset: DatasetParameters) -> Columns:
    """Return the names of the columns of texts, labels and, if specified, groups."""
    columns = dict(zip(TEXT_COLUMNS, dataset.text_columns, strict=False))
    columns["label"] = dataset.label_column
    if dataset.group_column:
        columns["group"] = dataset.group_column
    return columns


def _draw_at_most(table: pd.DataFrame, limit: int | None, seed: int) -> pd.DataFrame:
    """Return a stratified sample of at most `limit` rows, or all rows if `limit` is None."""
    if limit is None:
        return table
    rows = stratified_draw(table["label"].to_numpy(), limit, seed)
    return table.iloc[rows]


def _check_splits(tables: Tables, classes: pd.Series) -> None:
    """Raise `InputError` if a class is missing from train, or if a split has only one class.

    Warn about other missing classes, and about test rows whose text or group also occurs in train or validation.
    `classes` contains the class names by label.
    """
    for split, table in tables.items():
        _check_classes_of_split(split, table["label"], classes)
    learned = pd.concat([tables["train"], tables["validation"]])
    test = tables["test"]
    _warn_of_shared("text", whole_texts(test), whole_texts(learned))
    if "group" in learned:
        _warn_of_shared("group", test["group"], learned["group"])


def _check_classes_of_split(split: str, labels: pd.Series, classes: pd.Series) -> None:
    """Raise `InputError` if train lacks a class or another split has only one class; warn about other missing classes.

    `classes` contains the class names by label.
    """
    present = set(labels)
    missing = [name for label, name in classes.items() if label not in present]
    if not missing:
        return
    shown = shown_classes(missing)
    if split == "train" or len(present) < 2:
        problem = f"{len(labels)} texts, without {len(missing)} of the {len(classes)} classes ({shown})"
        # A smaller validation sample, which is drawn from train, leaves more texts in train.
        direction = "lower" if split == "train" else "raise"
        remedy = f"use more texts or smaller groups, raise the limits, or {direction} dataset.validation_fraction"
        raise InputError(f"dataset: the {split} split would have {problem}; {remedy}")
    logging.warning("the %s split contains no text of the classes %s", split, shown)


def _warn_of_shared(key: str, test: pd.Series, learned: pd.Series) -> None:
    """Warn about test rows whose text or group (`key`) also occurs in the training or validation split."""
    shared = int(test.isin(learned).sum())
    if shared:
        logging.warning(
            "%d of the %d test texts share their %s with the training or validation split", shared, len(test), key
        )


def _split_rows(table: pd.DataFrame, fraction: float, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the remaining rows, and a sample of about `fraction` of the rows; equal texts and groups stay together.

    More precisely, rows stay together if they are connected by a chain of rows with equal texts or equal groups.
    """
    labels = table["label"].to_numpy()
    rest, part = stratified_split(labels, _number_connected_rows(table), fraction, seed)
    return table.iloc[rest], table.iloc[part]


def _number_connected_rows(table: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return a number for each row, counted from 0; rows connected by equal texts or groups have the same number.

    Such rows form a connected component of a graph: its nodes are the texts and the groups, and its edges are the rows.
    """
    texts, _ = pd.factorize(whole_texts(table))
    groups = texts
    if "group" in table:
        groups, _ = pd.factorize(table["group"])
    size = len(table)
    edges = (texts, size + groups)  # the nodes are numbered: first the texts, then the groups
    graph = coo_array((np.ones(size), edges), shape=(2 * size, 2 * size))
    _, components = connected_components(graph, directed=False)
    # The text and the group of a row are connected by the row's edge, so the component of its text is that of the row.
    _, component_of_row = np.unique(components[texts], return_inverse=True)
    return component_of_row


class FileRows(NamedTuple):
    """The rows of one file."""

    shown: str
    """The name of the file in messages."""
    frame: pd.DataFrame
    class_names: list[str] | None
    """The class names from the description of the dataset or from the file; None if there are none."""
    has_types: bool
    """False for csv and tsv, in which all values are strings."""


def read_source(dataset: DatasetParameters, columns: Columns) -> tuple[Tables, Origin]:
    """Return the validated tables `train` and, if present, `test`, and the origin of the texts."""
    source, _ = folders.split_name(dataset.name)
    path = Path(source)
    if dataset.revision is not None and path.exists():
        problem = f"{source} is a local dataset, which has no revision {shorten(dataset.revision)!r}"
        raise InputError(f"dataset.revision: {problem}; leave it empty")
    if path.is_file():
        return _read_single_file(dataset, columns), Origin()
    if path.is_dir():

        def locate_files(names: Sequence[str]) -> dict[str, Path]:
            return {name: path / name for name in names}

        tables, creators = _read_folder(dataset, columns, folders.list_folder(path), locate_files)
        return tables, Origin(creators=creators)
    if data_suffix(path.name) or not HUB_IDENTIFIER.fullmatch(source):
        raise InputError(f"dataset.name: {path} is neither an existing file or folder nor a hub identifier")
    repository = Repository("dataset", source, dataset.revision)
    tables, creators = _read_folder(dataset, columns, repository.paths, repository.fetch)
    return tables, Origin(repository.commit, creators)


def _read_single_file(dataset: DatasetParameters, columns: Columns) -> Tables:
    """Return the validated table `train` of a dataset in one file."""
    source, configuration = folders.split_name(dataset.name)
    path = Path(source)
    if configuration is not None:
        allowed = "remove the configuration"
        raise InputError(f"dataset.name: {source} is a file, which has no configuration {configuration}; {allowed}")
    if not data_suffix(path.name):
        raise InputError(f"dataset.name: {path} is not a data file; allowed: {allowed_names()}")
    check_sizes([path])
    rows = _read_rows(path, shown=source, columns=columns, separator=None, class_names={})
    _log_files(dataset.train_split, [path.name], [rows])
    return _check_tables({"train": [rows]}, {"train": dataset.train_split}, columns, dataset.name)


def _read_folder(
    dataset: DatasetParameters,
    columns: Columns,
    names: Sequence[str],
    fetch: Callable[[Sequence[str]], Mapping[str, Path]],
) -> tuple[Tables, Sequence[str]]:
    """Return the splits of a dataset with the files `names`, and the creators of its texts (`Layout.creators`).

    `fetch` returns the local paths of selected files.
    """
    _, configuration = folders.split_name(dataset.name)
    descriptions = fetch([name for name in names if is_description(name)])
    layout = folders.find_layout(dataset.name, names, descriptions, configuration)
    splits = folders.chosen_splits(layout, dataset)
    required = []
    for split_name in splits.values():
        required.extend(layout.files[split_name])
    files = fetch(required)
    check_sizes(list(files.values()))
    folders.warn_of_unread_files(dataset.name, layout.contents, required)
    rows = {}
    for split, split_name in splits.items():
        rows[split] = _read_split(dataset, columns, layout, split_name, files)
    return _check_tables(rows, splits, columns, dataset.name), layout.creators


def _read_split(
    dataset: DatasetParameters, columns: Columns, layout: folders.Layout, split: str, files: Mapping[str, Path]
) -> list[FileRows]:
    """Return the rows of each file of a split; log the files, and warn about rows that occur in several files.

    `files` contains the local paths of the files by name.
    """
    source, _ = folders.split_name(dataset.name)
    folder = source.rstrip("/")
    names = layout.files[split]
    rows = []
    for name in names:
        shown = f"{folder}/{name}"
        file_rows = _read_rows(files[name], shown, columns, layout.separator, layout.class_names)
        rows.append(file_rows)
    _log_files(split, names, rows)
    _warn_of_equal_rows(split, names, rows, columns)
    return rows


def _read_rows(
    file: Path, shown: str, columns: Columns, separator: str | None, class_names: Mapping[str, list[str]]
) -> FileRows:
    """Return the rows of a file, with class names from the description (`class_names`, by column) or from the file.

    `shown` is the name of the file in messages, and `separator` overrides the separator of its format.
    """
    frame = read_file(file, columns, shown, separator)
    names = class_names.get(columns["label"])
    if not names:
        with read_errors(file, shown):
            names = stored_class_names(file, columns["label"])
    has_types = data_suffix(file.name) not in SEPARATORS
    return FileRows(shown, frame, names, has_types)


def _log_files(split: str, names: Sequence[str], rows: Sequence[FileRows]) -> None:
    """Log the files of a split and their numbers of rows."""
    limit = folders.MAX_SHOWN_FILES
    counts = []
    for name, file_rows in zip(names[:limit], rows[:limit], strict=True):
        counts.append(f"{len(file_rows.frame)} rows of {folders.shown_file(name)}")
    other_files = rows[limit:]
    if other_files:
        total = sum(len(file_rows.frame) for file_rows in other_files)
        counts.append(f"{total} rows of {len(other_files)} more files")
    logging.info("%s: %s", split, ", ".join(counts))


class _FilePair(NamedTuple):
    """The indices of two files of a split."""

    earlier: int
    later: int


def _warn_of_equal_rows(split: str, names: Sequence[str], rows: Sequence[FileRows], columns: Columns) -> None:
    """Warn about rows that occur in several files of a split; such rows indicate a copied file."""
    if len(rows) < 2:
        return
    for pair, count in _count_shared_rows(rows, columns).most_common(MAX_SHOWN_PAIRS):
        message = "%s: %d rows of %s are also in %s; remove one of the files if it is a copy"
        file = folders.shown_file(names[pair.later])
        earlier_file = folders.shown_file(names[pair.earlier])
        logging.warning(message, split, count, file, earlier_file)


def _count_shared_rows(rows: Sequence[FileRows], columns: Columns) -> Counter[_FilePair]:
    """Return the number of different rows that a file has in common with an earlier file, for each pair of files.

    A row is counted for each later file together with the first file that contains the row. `rows` has one entry per
    file.
    """
    first_file: dict[tuple[str, ...], int] = {}  # index of the first file with each row
    shared_rows: Counter[_FilePair] = Counter()
    for number, file_rows in enumerate(rows):
        frame = file_rows.frame
        values = [map(str, frame[name]) for name in columns.values() if name in frame]
        for row in set(zip(*values, strict=True)):  # each different row of the file once
            first = first_file.setdefault(row, number)
            if first != number:
                shared_rows[_FilePair(first, number)] += 1
    return shared_rows


def _check_tables(
    rows: Mapping[str, Sequence[FileRows]], splits: Mapping[str, str], columns: Columns, shown: str
) -> Tables:
    """Return one validated table per split, with class names as labels if the classes have names.

    `rows` contains the rows of each file by split, and `splits` the names of the splits in the source. `shown` is the
    name of the dataset in messages.
    """
    label = columns["label"]
    readings = _choose_readings(rows, label, f"dataset.label_column: {shorten(label)!r} of {shown}")
    tables = {}
    for split, split_rows in rows.items():
        checked = []
        for file_rows in split_rows:
            frame = file_rows.frame
            if file_rows.class_names:
                reading = readings[tuple(file_rows.class_names)]  # whether the labels in this file are codes or names
                labels = named_classes(frame[label], file_rows.class_names, reading)
                frame = frame.assign(**{label: labels})
            checked.append(_check_values(frame, columns, f"{file_rows.shown} ({splits[split]})"))
        tables[split] = checked[0]
        if len(checked) > 1:
            tables[split] = pd.concat(checked, ignore_index=True)
    return tables


def _choose_readings(rows: Mapping[str, Sequence[FileRows]], label: str, where: str) -> dict[tuple[str, ...], Reading]:
    """Return the reading of the column `label` (as class codes or as class names) for each list of class names.

    Files with the same stored class names are read in the same way; files without class names are ignored. `where`
    begins error messages.
    """
    labels_by_names: dict[tuple[str, ...], list[FileLabels]] = {}
    for split_rows in rows.values():
        for file_rows in split_rows:
            if file_rows.class_names:
                labels = FileLabels(file_rows.shown, file_rows.frame[label], file_rows.has_types)
                labels_of_files = labels_by_names.setdefault(tuple(file_rows.class_names), [])
                labels_of_files.append(labels)
    return {names: choose_reading(labels, names, where) for names, labels in labels_by_names.items()}


def _check_values(frame: pd.DataFrame, columns: Columns, where: str) -> pd.DataFrame:
    """Return the `columns`, renamed to their keys in this mapping, such as `text` and `label`.

    Raise `InputError` with the row of an invalid value.
    """
    for key, name in columns.items():
        for row, value in frame[name].items():
            problem = _find_problem(key, value)
            if problem:
                raise InputError(f"{where}: {problem} in column {shorten(name)!r}, row {row}")
    renamed = {}  # the columns by key
    for key, name in columns.items():
        column = frame[name]
        if not isinstance(column.dtype, pd.CategoricalDtype):
            column = column.astype(object)  # otherwise pandas loses digits when joining large numbers of two types
        renamed[key] = column
    return pd.DataFrame(renamed)


def _find_problem(key: str, value: Any) -> str | None:
    """Return a description of the problem with a text, label or group; None for a valid value."""
    is_text = key in TEXT_COLUMNS
    is_unknown = pd.api.types.is_scalar(value) and pd.isna(value)
    is_blank = not is_text and not str(value).strip()
    if is_unknown or is_blank:
        name = key.replace("text_pair", "second text")
        return f"the {name} is missing"
    if is_text:
        return text_problem(value) if isinstance(value, str) else "the text is not a string"
    if isinstance(value, (str, Real, np.bool_)):
        return None
    return f"the {key} is not a string, number or boolean"
