"""Read reviews from a hub dataset, a local dataset folder, or one file."""

from __future__ import annotations

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

READERS: dict[str, Any] = {
    ".csv": pd.read_csv,
    ".tsv": lambda path: pd.read_csv(path, sep="\t"),
    ".jsonl": lambda path: pd.read_json(path, lines=True),
    ".parquet": pd.read_parquet,
}


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
        if path.suffix not in READERS:
            raise InputError(f"dataset.name: {path} is no {', '.join(READERS)} file")
        try:
            return {"train": READERS[path.suffix](path)}
        except (ValueError, OSError) as error:
            raise InputError(f"dataset.name: {path} cannot be read: {error}") from error
    if path.is_dir():
        with tempfile.TemporaryDirectory() as cache:  # the library would keep a copy of every folder for ever
            return _load_dataset(dataset, revision=None, cache_dir=cache)
    if path.suffix in READERS or not HUB_IDENTIFIER.fullmatch(dataset.name):
        raise InputError(f"dataset.name: there is no file or folder {dataset.name}, and it is no hub identifier")
    return _load_dataset(dataset, revision=dataset.revision, cache_dir=None)


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
    not_text = ~frame["text"].map(lambda text: isinstance(text, str) and bool(text.strip()))
    if not_text.any():
        rows = np.flatnonzero(not_text)
        raise InputError(f"{where}: {len(rows)} empty texts in {dataset.text_column!r}, the first in row {rows[0]}")
    if frame["label"].isna().any():
        rows = np.flatnonzero(frame["label"].isna())
        raise InputError(f"{where}: {len(rows)} missing labels in {dataset.label_column!r}, the first in row {rows[0]}")
    return frame


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
