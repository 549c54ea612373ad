"""Read reviews from a hub dataset, a local dataset folder, or one file."""

from __future__ import annotations

import csv
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stages.errors import InputError
from stages.parameters import DatasetParameters
from stages.reviews.draw import stratified_draw, stratified_split

HUB_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SPLITS = ("train", "validation", "test")

SEPARATORS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*SEPARATORS, ".jsonl", ".parquet")


def read_splits(dataset: DatasetParameters, seed: int) -> dict[str, pd.DataFrame]:
    """`train`, `validation` and `test`, columns `text`, `label` (0 or 1) and `label_name`.

    Validation is a stratified part of train. A source without a test split gives up a part
    of the same size for it first. Limits are drawn before validation is split off.
    """
    source = {
        split: _checked(frame, dataset, f"{dataset.name} ({split})") for split, frame in _read_source(dataset).items()
    }
    names = _label_names(source, dataset)
    frames = {split: _with_numbers(frame, names) for split, frame in source.items()}
    if "test" not in frames:
        frames["train"], frames["test"] = _split(frames["train"], dataset.validation_fraction, seed)
    for split, limit in (("train", dataset.train_limit), ("test", dataset.test_limit)):
        if limit is not None:
            rows = stratified_draw(frames[split]["label"].to_numpy(), limit, seed)
            frames[split] = frames[split].iloc[rows]
    # A different draw than the limit's, from the same seed.
    frames["train"], frames["validation"] = _split(frames["train"], dataset.validation_fraction, seed)
    for split in SPLITS:
        if frames[split]["label"].nunique() < 2:
            raise InputError(
                f"dataset: the {split} split has {len(frames[split])} reviews of one class only; both are needed: "
                "raise dataset.train_limit, dataset.test_limit or dataset.validation_fraction, or mend the data"
            )
    return {split: frames[split].reset_index(drop=True) for split in SPLITS}


def _read_source(dataset: DatasetParameters) -> dict[str, pd.DataFrame]:
    path = Path(dataset.name)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise InputError(f"dataset.name: {path} is no {', '.join(SUFFIXES)} file")
        return {"train": _read_file(path)}
    if path.is_dir():
        with tempfile.TemporaryDirectory() as cache:  # the library would keep a copy of every folder for ever
            try:
                return _load_dataset(dataset, revision=None, cache_dir=cache)
            except InputError:
                for file in sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES):
                    _read_file(file)  # the library does not name the file that it cannot read
                raise
    if path.suffix in SUFFIXES or not HUB_IDENTIFIER.fullmatch(dataset.name):
        raise InputError(f"dataset.name: there is no file or folder {dataset.name}, and it is no hub identifier")
    return _load_dataset(dataset, revision=dataset.revision, cache_dir=None)


def _read_file(path: Path) -> pd.DataFrame:
    """One table; `InputError` names the file, and says what to do where it is not UTF-8 or has another separator."""
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        if path.suffix == ".jsonl":
            return pd.read_json(path, lines=True)
        separator = SEPARATORS[path.suffix]
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file, delimiter=separator), [])
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise InputError(f"dataset.name: {path} has more than one column {', '.join(twice)}; each name once")
        other = next((each for each in (";", "\t", ",", "|") if len(header) == 1 and each in header[0]), None)
        if other:
            raise InputError(
                f"dataset.name: {path} looks separated by {other!r}, and a {path.suffix} file is read as separated by "
                f"{separator!r}; save it so"
                + (f", or name it {path.with_suffix('.tsv').name}" if other == "\t" else "")
            )
        # A review that says "None" or "NA" is a text.
        return pd.read_csv(path, sep=separator, keep_default_na=False, na_values=[""])
    except UnicodeDecodeError as error:
        raise InputError(f"dataset.name: {path} is not UTF-8 ({error.reason}); save it as UTF-8") from error
    except (ValueError, OSError, csv.Error) as error:
        raise InputError(f"dataset.name: {path} cannot be read: {_first_line(error)}") from error


def _load_dataset(dataset: DatasetParameters, revision: str | None, cache_dir: str | None) -> dict[str, pd.DataFrame]:
    import datasets

    try:
        loaded = datasets.load_dataset(dataset.name, revision=revision, cache_dir=cache_dir)
    except Exception as error:  # the library raises dozens of types for an unreachable or unusable source
        raise InputError(f"dataset.name: {dataset.name} cannot be loaded: {_first_line(error)}") from error
    if "train" not in loaded:
        raise InputError(f"dataset.name: {dataset.name} has no train split; it has {', '.join(loaded)}")
    frames = {}
    for split in ("train", "test"):
        if split in loaded:
            table = loaded[split]
            frame = table.to_pandas()
            label = table.features.get(dataset.label_column)
            if isinstance(label, datasets.ClassLabel):
                named = dict(enumerate(label.names))
                frame[dataset.label_column] = frame[dataset.label_column].map(
                    # The position keeps the source's order of classes where the names' would differ.
                    lambda number, named=named: f"{number}:{named[number]}" if number in named else None
                )
            frames[split] = frame
    return frames


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _checked(frame: pd.DataFrame, dataset: DatasetParameters, where: str) -> pd.DataFrame:
    for key, column in (("text_column", dataset.text_column), ("label_column", dataset.label_column)):
        if column not in frame.columns:
            raise InputError(
                f"dataset.{key}: {where} has no column {column!r}; it has {', '.join(map(str, frame.columns))}"
            )
    frame = frame[[dataset.text_column, dataset.label_column]].set_axis(["text", "label"], axis=1)
    no_text = ~frame["text"].map(lambda text: isinstance(text, str) and bool(text.strip()))
    for what, column, bad in (
        ("empty texts", dataset.text_column, no_text),
        ("missing labels", dataset.label_column, frame["label"].isna()),
    ):
        rows = np.flatnonzero(bad)
        if len(rows):
            first = _place(Path(dataset.name), int(rows[0]))
            raise InputError(f"{where}: {len(rows)} {what} in {column!r}, the first in {first}")
    return frame


def _place(path: Path, row: int) -> str:
    """Where an editor finds a row, counted from 0, of one text file; else the row."""
    if not path.is_file() or path.suffix == ".parquet":
        return f"row {row}"
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".jsonl":
            lines = [number for number, line in enumerate(file, 1) if line.strip()]
            return f"line {lines[row]}"
        starts: list[int] = []
        line, records = 1, csv.reader(file, delimiter=SEPARATORS[path.suffix])
        for record in records:
            if len(record) > 1 or any(map(str.strip, record)):  # pandas skips empty lines too
                starts.append(line)
            line = records.line_num + 1
    return f"line {starts[row + 1]}"  # after the header


def _label_names(frames: dict[str, pd.DataFrame], dataset: DatasetParameters) -> list[Any]:
    names = sorted(set().union(*(frame["label"].unique() for frame in frames.values())), key=_sorting_key)
    if len(names) != 2:
        shown = ", ".join(map(str, names[:10]))
        raise InputError(
            f"dataset.label_column: {dataset.label_column!r} of {dataset.name} holds {len(names)} "
            f"{'class' if len(names) == 1 else 'classes'} ({shown}); two are needed"
        )
    return names


def _sorting_key(label: Any) -> tuple[bool, Any]:
    return (isinstance(label, str), label)


def _with_numbers(frame: pd.DataFrame, names: list[Any]) -> pd.DataFrame:
    numbers = frame["label"].map({name: number for number, name in enumerate(names)}).astype("int64")
    shown = frame["label"].map(lambda label: re.sub(r"^\d+:", "", str(label)))
    return pd.DataFrame({"text": frame["text"], "label": numbers, "label_name": shown})


def _split(frame: pd.DataFrame, fraction: float, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    rest, part = stratified_split(frame["label"].to_numpy(), fraction, seed)
    return frame.iloc[rest], frame.iloc[part]
