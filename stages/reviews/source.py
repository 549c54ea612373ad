"""Read reviews from a hub dataset, a local dataset folder, or one file."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stages.errors import InputError, first_line, innermost
from stages.hub.dataset import dataset_folder
from stages.parameters import DatasetParameters
from stages.reviews.draw import stratified_draw, stratified_split
from stages.reviews.files import LINE, SUFFIXES, TEXT_FILES, read_file

HUB_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SPLITS = ("train", "validation", "test")


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
                f"dataset: the {split} split would have {len(frames[split])} reviews, not of both classes; have more "
                "reviews, or raise dataset.train_limit, dataset.test_limit or dataset.validation_fraction"
            )
    return {split: frames[split].reset_index(drop=True) for split in SPLITS}


def is_on_hub(dataset: DatasetParameters) -> bool:
    """Whether `read_splits` asks the hub for it."""
    path = Path(dataset.name)
    return not path.exists() and path.suffix.lower() not in SUFFIXES and bool(HUB_IDENTIFIER.fullmatch(dataset.name))


def _read_source(dataset: DatasetParameters) -> dict[str, pd.DataFrame]:
    path = Path(dataset.name)
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"dataset.name: {path} is no {', '.join(SUFFIXES)} file")
        return {"train": read_file(path)}
    if path.is_dir():
        for file in sorted(each for each in path.rglob("*") if each.suffix.lower() in TEXT_FILES):
            read_file(file)  # the library does not say which file is not as it should be
        with tempfile.TemporaryDirectory() as cache:  # it would keep a copy of every folder for ever
            return _load_dataset(dataset, path, cache)
    if not is_on_hub(dataset):
        raise InputError(f"dataset.name: there is no file or folder {dataset.name}, and it is no hub identifier")
    with dataset_folder(dataset.name, dataset.revision) as folder, tempfile.TemporaryDirectory() as cache:
        return _load_dataset(dataset, folder, cache)


def _load_dataset(dataset: DatasetParameters, folder: Path, cache_dir: str) -> dict[str, pd.DataFrame]:
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is said below
    try:
        loaded = datasets.load_dataset(str(folder), cache_dir=cache_dir)
    except Exception as error:  # the library raises dozens of types for an unusable source
        reason = first_line(innermost(error)).replace(str(folder), dataset.name)
        raise InputError(f"dataset.name: {dataset.name} cannot be loaded: {reason}") from error
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


def _checked(frame: pd.DataFrame, dataset: DatasetParameters, where: str) -> pd.DataFrame:
    for key, name in (("text_column", dataset.text_column), ("label_column", dataset.label_column)):
        if name not in frame.columns:
            there = ", ".join(map(repr, frame.columns))
            raise InputError(f"dataset.{key}: {where} has no column {name!r}; it has {there}")
    frame = frame[[dataset.text_column, dataset.label_column]].set_axis(["text", "label"], axis=1)
    for what, column, usable in (
        ("rows without a text", dataset.text_column, frame["text"].map(_is_text)),
        ("missing labels", dataset.label_column, frame["label"].map(lambda label: not _is_missing(label))),
        ("labels that are no word, number or truth value", dataset.label_column, frame["label"].map(_is_label)),
    ):
        rows = np.flatnonzero(~usable.to_numpy(bool))
        if len(rows):
            first = f"{'line' if frame.index.name == LINE else 'row'} {frame.index[rows[0]]}"
            raise InputError(f"{where}: {len(rows)} {what} in {column!r}, the first in {first}")
    return frame


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


def _is_label(value: Any) -> bool:
    return isinstance(value, (str, bool, int, float, np.generic))


def _label_names(frames: dict[str, pd.DataFrame], dataset: DatasetParameters) -> list[Any]:
    names = sorted(set().union(*(frame["label"].unique() for frame in frames.values())), key=_sorting_key)
    if len(names) != 2:
        shown = ", ".join(repr(name) if isinstance(name, str) else str(name) for name in names[:10])
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
