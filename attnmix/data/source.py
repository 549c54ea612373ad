"""Read labelled reviews from a hub dataset, a dataset folder or one file, check every row, and split them."""

import logging
import re
import tempfile
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from attnmix.core.draw import stratified_draw, stratified_split
from attnmix.core.errors import InputError, text_problem
from attnmix.core.settings import DatasetParameters
from attnmix.core.store.texts import TEXT_COLUMNS, whole_texts
from attnmix.data import folders
from attnmix.data.classes import named_classes, shown_classes, with_classes
from attnmix.data.files import Columns, check_names, read_file, stored_class_names
from attnmix.data.formats import SUFFIXES, check_sizes
from attnmix.data.hub.repository import Repository

Tables = dict[str, pd.DataFrame]
HUB_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def read_splits(dataset: DatasetParameters, seed: int, work: Path | None = None) -> tuple[Tables, str | None]:
    """Return `train`, `validation` and `test`, and the commit of a hub dataset.

    Tables have the columns `text`, `label` (from 0 on) and `label_name`, and `text_pair` where `text_column` names two
    columns, for both texts of a pair. Validation is a stratified part of train. A source without a test split gives up
    a part of the same size for it first. Limits are drawn before validation is split off. Rows of equal texts, and
    those of one group, are never on two sides of a split that is made here. `work` is the folder of temporary files,
    else the system's. Raises `InputError` for a source or a row that cannot be used.
    """
    columns = dict(zip(TEXT_COLUMNS, dataset.text_columns, strict=False))
    columns["label"] = dataset.label_column
    if dataset.group_column:
        columns["group"] = dataset.group_column
    source, commit = read_source(dataset, columns, work)
    tables = with_classes(source, f"dataset.label_column: {dataset.label_column!r} of {dataset.name}")
    classes = pd.concat(tables.values()).groupby("label")["label_name"].first()
    if "test" not in tables:
        tables["train"], tables["test"] = _split(tables["train"], dataset.validation_fraction, seed)
    for split, limit in (("train", dataset.train_limit), ("test", dataset.test_limit)):
        if limit is not None:
            labels = tables[split]["label"].to_numpy()
            drawn = stratified_draw(labels, limit, seed)
            tables[split] = tables[split].iloc[drawn]
    # A different draw than the limit's, from the same seed.
    tables["train"], tables["validation"] = _split(tables["train"], dataset.validation_fraction, seed)
    tables = {split: tables[split] for split in ("train", "validation", "test")}
    _check_splits(tables, classes)
    names = [*TEXT_COLUMNS[: len(dataset.text_columns)], "label", "label_name"]
    splits = {split: table[names].reset_index(drop=True) for split, table in tables.items()}
    return splits, commit


def _check_splits(tables: Tables, classes: pd.Series) -> None:
    """Raise `InputError` for a class that cannot be learned, and for a split of one class; warn of what may mislead."""
    for split, table in tables.items():
        present = set(table["label"])
        lacking = [name for label, name in classes.items() if label not in present]
        if lacking and (split == "train" or table["label"].nunique() < 2):
            shown = shown_classes(lacking)
            problem = f"{len(table)} reviews, none of {len(lacking)} of {len(classes)} classes ({shown})"
            remedy = "have more reviews or smaller groups, or raise the limits or dataset.validation_fraction"
            raise InputError(f"dataset: the {split} split would have {problem}; {remedy}")
        if lacking:
            logging.warning("the %s split has no review of %s", split, shown_classes(lacking))
    learned, test = pd.concat([tables["train"], tables["validation"]]), tables["test"]
    _warn_of_shared("text", whole_texts(test), whole_texts(learned))
    if "group" in learned:
        _warn_of_shared("group", test["group"], learned["group"])


def _warn_of_shared(key: str, test: pd.Series, learned: pd.Series) -> None:
    """Warn of test reviews whose text or group is in the training split too."""
    shared = int(test.isin(learned).sum())
    if shared:
        logging.warning("%d of the %d test reviews have a %s of the training split", shared, len(test), key)


def _split(table: pd.DataFrame, fraction: float, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split off a part; rows that are linked by an equal text or group, and by way of others, stay together."""
    texts, _ = pd.factorize(whole_texts(table))
    groups = texts
    if "group" in table:
        groups, _ = pd.factorize(table["group"])
    # A graph whose nodes are the texts and, after them, the groups; each row links its text with its group.
    size = len(table)
    links = coo_array((np.ones(size), (texts, size + groups)), shape=(2 * size, 2 * size))
    _, components = connected_components(links, directed=False)
    _, linked = np.unique(components[texts], return_inverse=True)
    rest, part = stratified_split(table["label"].to_numpy(), linked, fraction, seed)
    return table.iloc[rest], table.iloc[part]


def read_source(dataset: DatasetParameters, columns: Columns, work: Path | None = None) -> tuple[Tables, str | None]:
    """Return `train`, and `test` where the source has one, checked, and the commit of a hub dataset."""
    source, configuration = folders.split_name(dataset.name)
    path = Path(source)
    if path.is_file():
        if configuration is not None:
            allowed = f"only a folder or hub dataset has them; name {source} alone"
            raise InputError(f"dataset.name: {source} is a file without configuration {configuration}; {allowed}")
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"dataset.name: {path} is no {', '.join(SUFFIXES)} file")
        check_sizes([path])
        return {"train": _read_files({source: path}, columns, dataset.train_split)}, None
    # A temporary folder, as the library would keep a copy of every dataset for ever.
    with tempfile.TemporaryDirectory(dir=work) as cache:
        if path.is_dir():
            folders.check_around(path)
            return _read_folder(dataset, columns, path, cache, None), None
        if path.suffix.lower() in SUFFIXES or not HUB_IDENTIFIER.fullmatch(source):
            raise InputError(f"dataset.name: there is no file or folder {path}, and it is no hub identifier")
        repository = Repository("dataset", source, dataset.revision)
        folder = Path(cache).resolve() / "files" / path.name
        for name in repository.paths:  # empty files, until it is known which of them are read
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        _fill(folder, repository, set(folders.DESCRIPTIONS) & set(repository.paths))
        tables = _read_folder(dataset, columns, folder, cache, repository)
        return tables, repository.commit


def _read_folder(
    dataset: DatasetParameters, columns: Columns, folder: Path, cache: str, repository: Repository | None
) -> Tables:
    """Read the splits of a folder, whose files a `repository` fills as far as they are read."""
    source, configuration = folders.split_name(dataset.name)
    with folders.errors_in_words(dataset.name, folder):
        layout = folders.find_layout(folder, configuration, cache)
    splits = folders.chosen_splits(layout, dataset)
    read_here = layout.read_here([*splits.values()])
    names: dict[Path, str] = {}
    for split_files in layout.files.values():
        names.update((file, folders.name_in(folder, file)) for file in split_files)
    if repository is not None:
        fetched = [*splits.values()] if read_here else [*layout.files]  # `datasets` prepares all splits
        paths = {names[file] for split in fetched for file in layout.files[split]}
        outside = sorted(paths.difference(repository.paths))
        if outside:
            problem = f"{dataset.name} names {outside[0]}, which is not in it"
            raise InputError(f"dataset.name: {problem}; download it yourself")
        _fill(folder, repository, paths.difference(folders.DESCRIPTIONS))
    files = {name: layout.files[split_name] for name, split_name in splits.items()}
    read = [file for split_files in files.values() for file in split_files]
    check_sizes([file for file in read if file.is_file()])
    all_names = repository.paths if repository else folders.files_in(folder)
    folders.name_unread_files(dataset.name, all_names, [names[file] for file in read])
    tables = {}
    for split, split_files in files.items():
        if read_here:
            shown = {f"{source.rstrip('/')}/{names[file]}": file for file in split_files}
            tables[split] = _read_files(shown, columns, splits[split], layout.separator, layout.class_names)
        else:
            with folders.errors_in_words(dataset.name, folder):
                layout.builder.download_and_prepare()
                table = layout.builder.as_dataset(split=splits[split])
                frame = table.to_pandas()
            frame = frame.set_axis(pd.RangeIndex(1, len(frame) + 1, name="row"))
            class_names = folders.declared_classes(table.features).get(columns["label"])
            tables[split] = _checked(frame, columns, f"{dataset.name} ({splits[split]})", class_names)
    return tables


def _read_files(
    files: Mapping[str, Path],
    columns: Columns,
    split: str,
    separator: str | None = None,
    class_names: Mapping[str, list[str]] | None = None,
) -> pd.DataFrame:
    """Return the checked rows of the files of a split, given by their names in messages."""
    tables = []
    for shown, file in files.items():
        frame = read_file(file, columns, shown, separator)
        declared = class_names.get(columns["label"]) if class_names else None
        names = declared or stored_class_names(file, columns["label"])
        tables.append(_checked(frame, columns, f"{shown} ({split})", names))
    return pd.concat(tables, ignore_index=True) if len(tables) > 1 else tables[0]


def _fill(folder: Path, repository: Repository, paths: set[str]) -> None:
    """Replace the empty files at some paths by links to those of the repository."""
    for path, file in repository.fetch(sorted(paths)).items():
        link = folder / path
        link.unlink()
        link.symlink_to(file.resolve())


def _checked(frame: pd.DataFrame, columns: Columns, where: str, class_names: list[str] | None) -> pd.DataFrame:
    """Return the `columns` under their own names; raise `InputError` with the row for a value that cannot be used."""
    check_names([*map(str, frame.columns)], columns, where)
    if class_names:
        frame = frame.assign(**{columns["label"]: named_classes(frame[columns["label"]], class_names)})
    for key, name in columns.items():
        for row, value in frame[name].items():
            problem = _problem(key, value)
            if problem:
                raise InputError(f"{where}: {problem} in column {name!r}, row {row}")
    return pd.DataFrame({key: frame[name] for key, name in columns.items()})


def _problem(key: str, value: Any) -> str | None:
    """Return why a value cannot be the text, label or group of a review, if so."""
    is_text = key in TEXT_COLUMNS
    unknown = pd.api.types.is_scalar(value) and pd.isna(value)
    blank = not is_text and not str(value).strip()
    if unknown or blank:
        return f"the {key.replace('text_pair', 'second text')} is missing"
    if is_text:
        return text_problem(value) if isinstance(value, str) else "the text is a value of another kind"
    if isinstance(value, (str, Real, np.bool_)):
        return None
    return f"the {key} is no word, number or truth value"
