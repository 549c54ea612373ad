"""Read labelled reviews from a hub dataset, a dataset folder or one file, check every row, and split them."""

import csv
import json
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from attnmix.core.errors import InputError, first_line, innermost, text_problem
from attnmix.core.settings import DatasetParameters
from attnmix.data.draw import stratified_draw, stratified_split
from attnmix.hub.repository import Repository
from attnmix.store.texts import TEXT_COLUMNS, whole_texts

Tables = dict[str, pd.DataFrame]
SEPARATORS = {".csv": ",", ".tsv": "\t"}
TEXT_FILES = (*SEPARATORS, ".jsonl")
SUFFIXES = (*TEXT_FILES, ".parquet")
MAX_BLOCK_BYTES = 2**30  # of a csv file that is parsed at once; no record may be longer
MAX_SHOWN_CLASSES = 5  # in one message
HUB_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
DESCRIPTIONS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files of a hub dataset that say which other files make which configuration and split."""
# How `datasets` lists configurations where none, or an unknown one, is chosen.
CONFIGURATIONS = re.compile(r"(?:available configs|Available): \[(.*)\]")


def read_splits(dataset: DatasetParameters, seed: int, work: Path | None = None) -> tuple[Tables, str | None]:
    """Return `train`, `validation` and `test`, and the commit of a hub dataset.

    Tables have the columns `text`, `label` (from 0 on) and `label_name`, and `text_pair` where `text_column` names two
    columns, for both texts of a pair. Validation is a stratified part of train. A source without a test split gives up
    a part of the same size for it first. Limits are drawn before validation is split off. Rows of equal texts, and
    those of one group, are never on two sides of a split that is made here. `work` is the folder of temporary files,
    else the system's. Raises `InputError` for a source or a row that cannot be used.
    """
    splits = {"train": dataset.train_split} | ({} if dataset.test_split is None else {"test": dataset.test_split})
    columns = dict(zip(TEXT_COLUMNS, dataset.text_columns, strict=False)) | {"label": dataset.label_column}
    columns |= {"group": dataset.group_column} if dataset.group_column else {}
    source, commit = _read_source(dataset, splits, work)
    tables = {split: _checked(frame, columns, f"{dataset.name} ({splits[split]})") for split, frame in source.items()}
    tables = _with_classes(tables, f"dataset.label_column: {dataset.label_column!r} of {dataset.name}")
    classes = pd.concat(tables.values()).groupby("label")["label_name"].first()
    if "test" not in tables:
        tables["train"], tables["test"] = _split(tables["train"], dataset.validation_fraction, seed)
    for split, limit in (("train", dataset.train_limit), ("test", dataset.test_limit)):
        if limit is not None:
            tables[split] = tables[split].iloc[stratified_draw(tables[split]["label"].to_numpy(), limit, seed)]
    # A different draw than the limit's, from the same seed.
    tables["train"], tables["validation"] = _split(tables["train"], dataset.validation_fraction, seed)
    tables = {split: tables[split] for split in ("train", "validation", "test")}
    _check_splits(tables, classes)
    names = [*TEXT_COLUMNS[: len(dataset.text_columns)], "label", "label_name"]
    return {split: table[names].reset_index(drop=True) for split, table in tables.items()}, commit


def _check_splits(tables: Tables, classes: pd.Series) -> None:
    """Raise `InputError` for a class that cannot be learned, and for a split of one class; warn of what may mislead."""
    for split, table in tables.items():
        lacking = [name for label, name in classes.items() if label not in set(table["label"])]
        if lacking and (split == "train" or table["label"].nunique() < 2):
            problem = f"{len(table)} reviews, none of {len(lacking)} of {len(classes)} classes ({_shown(lacking)})"
            remedy = "have more reviews or smaller groups, or raise the limits or dataset.validation_fraction"
            raise InputError(f"dataset: the {split} split would have {problem}; {remedy}")
        if lacking:
            logging.warning("the %s split has no review of %s", split, _shown(lacking))
    learned, test = pd.concat([tables["train"], tables["validation"]]), tables["test"]
    for key, column in (("text", whole_texts), ("group", itemgetter("group"))):
        if (key == "text" or key in learned) and (shared := int(column(test).isin(column(learned)).sum())):
            logging.warning("%d of the %d test reviews have a %s of the training split", shared, len(test), key)


def _split(table: pd.DataFrame, fraction: float, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split off a part; rows that are linked by an equal text or group, and by way of others, stay together."""
    texts = pd.factorize(whole_texts(table))[0]
    groups = pd.factorize(table["group"])[0] if "group" in table else texts
    size = len(table)
    links = coo_array((np.ones(size), (texts, size + groups)), shape=(2 * size, 2 * size))
    linked = np.unique(connected_components(links, directed=False)[1][texts], return_inverse=True)[1]
    rest, part = stratified_split(table["label"].to_numpy(), linked, fraction, seed)
    return table.iloc[rest], table.iloc[part]


def _read_source(dataset: DatasetParameters, splits: dict[str, str], work: Path | None) -> tuple[Tables, str | None]:
    """Return `train`, and `test` where the source has one, and the commit of a hub dataset."""
    name, source, repository = dataset.name, dataset.source, None
    path = Path(source)
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"dataset.name: {path} is no {', '.join(SUFFIXES)} file")
        return {"train": read_file(path)}, None
    # A temporary folder, as the library would keep a copy of every dataset for ever.
    with tempfile.TemporaryDirectory(dir=work) as cache:
        if not path.is_dir():
            if path.suffix.lower() in SUFFIXES or not HUB_IDENTIFIER.fullmatch(source):
                raise InputError(f"dataset.name: there is no file or folder {path}, and it is no hub identifier")
            repository = Repository("dataset", source, dataset.revision)
            path = Path(cache).resolve() / "files" / path.name
            for each in repository.paths:
                (path / each).parent.mkdir(parents=True, exist_ok=True)
                (path / each).touch()
            _fill(path, repository, {*DESCRIPTIONS} & {*repository.paths})
        try:
            tables = _load_dataset(name, path, splits, dataset.label_column, cache, repository)
        except InputError:
            raise
        except Exception as error:  # the library raises dozens of types for an unusable source
            problem = f"cannot be loaded: {first_line(innermost(error)).replace(str(path), name)}"
            if configurations := CONFIGURATIONS.search(str(error)):
                problem = f"needs one of the configurations {configurations[1]} behind a colon"
            raise InputError(f"dataset.name: {name} {problem}") from error
        return tables, repository.commit if repository else None


def _load_dataset(
    name: str, folder: Path, splits: dict[str, str], label_column: str, cache: str, repository: Repository | None
) -> Tables:
    """Read a folder by `datasets`, which finds the files of a configuration by their names and the descriptions."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are reported by the caller
    builder = datasets.load_dataset_builder(str(folder), name=name.partition(":")[2] or None, cache_dir=cache)
    files: Mapping[str, Sequence[str]] = builder.config.data_files or {}
    if repository:  # the files are still empty: only those of the configuration are downloaded
        paths = [Path(file) for each in files.values() for file in each]
        if outside := [path for path in paths if not path.is_relative_to(folder)]:
            raise InputError(f"dataset.name: {name} names {outside[0]}, which is not in it; download it yourself")
        _fill(folder, repository, {path.relative_to(folder).as_posix() for path in paths}.difference(DESCRIPTIONS))
    if list(files) == [splits["train"]] and "test" in splits:
        logging.info("%s has no split %s: a part of %s becomes it", name, splits["test"], splits["train"])
        splits = {"train": splits["train"]}
    for split, each in splits.items():
        if each not in files:
            allowed = ", ".join(map(str, files)) + "; or empty, for a part of train" * (split == "test")
            raise InputError(f"dataset.{split}_split: {name} has no split {each}; allowed: {allowed}")
        for file in map(Path, files[each]):
            if file.suffix.lower() in TEXT_FILES and file.is_file():
                read_file(file)  # its error names the file; the library's does not
    builder.download_and_prepare()
    tables = {}
    for split, each in splits.items():
        table = builder.as_dataset(split=each)
        tables[split] = table.to_pandas()
        if (names := getattr(table.features.get(label_column), "names", None)) is not None:
            codes = tables[split][label_column]  # in the source's order of classes; one without a name is missing
            codes = codes.where(codes.between(0, len(names) - 1), -1).astype(int)
            tables[split][label_column] = pd.Categorical.from_codes(codes, names)
    return tables


def _fill(folder: Path, repository: Repository, paths: set[str]) -> None:
    for path, file in repository.fetch(sorted(paths)).items():
        (folder / path).unlink()
        (folder / path).symlink_to(file.resolve())


def read_file(path: Path) -> pd.DataFrame:
    """Return the table of a csv, tsv, jsonl or parquet file, rows counted from 1, csv and tsv fields as text.

    Raises `InputError`, which names the file and what is wrong, for a file that is no table of its kind.
    """
    suffix = path.suffix.lower()
    try:
        if suffix == ".jsonl":
            frame = _read_jsonl(path)
        else:
            table = pq.read_table(path) if suffix == ".parquet" else _read_csv(path, SEPARATORS[suffix])
            table.validate(full=True)  # that texts are UTF-8
            if repeated := [name for name, number in Counter(table.column_names).items() if number > 1]:
                raise ValueError(f"it has more than one column {', '.join(repeated)}; each name once")
            frame = table.to_pandas()
        if frame.empty:
            raise ValueError("it holds no reviews")
    except (ValueError, OSError, csv.Error, pa.ArrowException) as error:
        raise InputError(f"dataset.name: {path}: {first_line(error)}") from error
    return frame.set_axis(pd.RangeIndex(1, len(frame) + 1, name="row"))


def _read_csv(path: Path, separator: str) -> pa.Table:
    with path.open(encoding="utf-8-sig", newline="") as file:
        names = next((record for record in csv.reader(file, delimiter=separator) if record), [])
    return pc.read_csv(
        path,
        pc.ReadOptions(block_size=min(path.stat().st_size + 1, MAX_BLOCK_BYTES)),
        pc.ParseOptions(delimiter=separator, newlines_in_values=True),
        pc.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
    )


def _read_jsonl(path: Path) -> pd.DataFrame:
    rows = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                rows += [dict(json.loads(line))] if line.strip() else []
            except (TypeError, ValueError) as error:
                raise ValueError(f"line {number} is no JSON object: {error}; one object on each line") from error
    return pd.DataFrame(rows, dtype=object)  # a string may hold half a character


def _checked(frame: pd.DataFrame, columns: dict[str, str], where: str) -> pd.DataFrame:
    """Return the `columns` under their own names; raise `InputError` with the row for a value that cannot be used."""
    for key, name in columns.items():
        if name not in frame.columns:
            columns_here = ", ".join(map(repr, frame.columns))
            raise InputError(
                f"dataset.{key.removesuffix('_pair')}_column: {where} has no column {name!r}; it has {columns_here}"
            )
        for row, value in frame[name].items():
            if problem := _problem(key, value):
                raise InputError(f"{where}: {problem} in column {name!r}, row {row}")
    return pd.DataFrame({key: frame[name] for key, name in columns.items()})


def _problem(key: str, value: Any) -> str | None:
    if (pd.api.types.is_scalar(value) and pd.isna(value)) or (key not in TEXT_COLUMNS and not str(value).strip()):
        return f"the {key.replace('text_pair', 'second text')} is missing"
    if key in TEXT_COLUMNS:
        return text_problem(value) if isinstance(value, str) else "the text is a value of another kind"
    return None if isinstance(value, (str, Real, np.bool_)) else f"the {key} is no word, number or truth value"


def _with_classes(tables: Tables, where: str) -> Tables:
    """Return the tables with classes numbered from 0 as `label`, and their names as `label_name`."""
    classes = _classes(pd.concat([table["label"] for table in tables.values()]), where)
    order = list(dict.fromkeys(classes.values()))
    if len(order) < 2:
        raise InputError(f"{where} holds {len(order)} class ({_shown(order)}); two or more are needed")
    folded = Counter(str(name).casefold() for name in order)
    if alike := [name for name in order if folded[str(name).casefold()] > 1]:
        logging.warning("%s: classes that differ only in case: %s", where, _shown(alike))
    return {
        split: table.assign(
            **{name: table[name].astype("str") for name in TEXT_COLUMNS if name in table},
            label=np.array([order.index(classes[value]) for value in table["label"]], dtype=np.int64),
            label_name=[str(classes[value]) for value in table["label"]],
        )
        for split, table in tables.items()
    }


def _classes(labels: pd.Series, where: str) -> dict[Any, Any]:
    """Return the class of each value that occurs, in the order of the classes: the source's own, else sorted."""
    values = labels.unique().tolist()
    if isinstance(labels.dtype, pd.CategoricalDtype) and all(isinstance(each, str) for each in labels.cat.categories):
        return {name: name for name in labels.cat.categories if name in values}
    kinds = {isinstance(label, str) + 2 * isinstance(label, (bool, np.bool_)) for label in labels}
    if len(kinds) > 1:
        raise InputError(f"{where} mixes words, numbers or truth values ({_shown(values)}); write all in one way")
    if kinds == {2}:
        return {value: bool(value) for value in sorted(values)}
    numbers = pd.to_numeric(pd.Series(values), errors="coerce")
    if numbers.isna().any():
        return dict(sorted(((value, value.strip()) for value in values), key=itemgetter(1)))
    if (numbers % 1 != 0).any():
        raise InputError(f"{where} holds numbers that are not whole ({_shown(values)}), which are no classes")
    return dict(sorted(((value, int(float(value))) for value in values), key=itemgetter(1)))


def _shown(values: Sequence[Any]) -> str:
    words = [repr(value) if isinstance(value, str) else str(value) for value in values[:MAX_SHOWN_CLASSES]]
    return ", ".join([*words, "..."] if len(values) > MAX_SHOWN_CLASSES else words)
