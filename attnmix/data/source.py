"""Read reviews from a hub dataset, a local dataset folder, or one file."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from attnmix.core.errors import InputError, first_line, innermost
from attnmix.core.options import DatasetParameters
from attnmix.data.checks import checked, shown, with_classes
from attnmix.data.draw import stratified_draw, stratified_split
from attnmix.data.files import SUFFIXES, TEXT_FILES, read_file
from attnmix.hub.dataset import dataset_folder

HUB_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
CONFIGS = re.compile(r"(?:available configs|Available): \[(.*)\]")  # what the library says of a config that is none
SPLITS = ("train", "validation", "test")


def read_splits(dataset: DatasetParameters, seed: int, work: Path | None = None) -> dict[str, pd.DataFrame]:
    """`train`, `validation` and `test`, columns `text`, `label` (from 0 on) and `label_name`.

    Validation is a stratified part of train. A source without a test split gives up a part
    of the same size for it first. Limits are drawn before validation is split off. Rows of equal texts, and those of
    one group, are never on two sides of a split that is made here. `work` is for temporary files, else the system's.
    """
    called = {"train": dataset.train_split, "test": dataset.test_split}
    source = _read_source(dataset, work)
    tables = {split: checked(frame, dataset, f"{dataset.name} ({called[split]})") for split, frame in source.items()}
    frames = with_classes(tables, dataset)
    classes = pd.concat(frames.values()).groupby("label")["label_name"].first()
    if "test" not in frames:
        frames["train"], frames["test"] = _split(frames["train"], dataset.validation_fraction, seed)
    for split, limit in (("train", dataset.train_limit), ("test", dataset.test_limit)):
        if limit is not None:
            rows = stratified_draw(frames[split]["label"].to_numpy(), limit, seed)
            frames[split] = frames[split].iloc[rows]
    # A different draw than the limit's, from the same seed.
    frames["train"], frames["validation"] = _split(frames["train"], dataset.validation_fraction, seed)
    _check_splits(frames, classes)
    columns = ["text", "label", "label_name"]
    return {split: frames[split][columns].reset_index(drop=True) for split in SPLITS}


def _check_splits(frames: Mapping[str, pd.DataFrame], classes: pd.Series) -> None:
    """`InputError` for a class that cannot be learned, and for a split of one class; what may mislead is said."""
    for split in SPLITS:
        frame = frames[split]
        lacking = [name for label, name in classes.items() if label not in set(frame["label"])]
        if lacking and (split == "train" or frame["label"].nunique() < 2):
            raise InputError(
                f"dataset: the {split} split would have {len(frame)} reviews, none of {len(lacking)} of "
                f"{len(classes)} classes ({shown(lacking)}); have more reviews or smaller groups, or raise "
                "dataset.train_limit, dataset.test_limit or dataset.validation_fraction"
            )
        if lacking:
            logging.warning("the %s split has no review of %s", split, shown(lacking))
    learned = pd.concat([frames["train"], frames["validation"]])
    for key, what in (("text", "a text"), ("group", "a group of dataset.group_column")):
        if key in learned:
            shared = int(frames["test"][key].isin(learned[key]).sum())
            if shared:
                logging.warning(
                    "%d of the %d test reviews have %s of the training split", shared, len(frames["test"]), what
                )


def _split(frame: pd.DataFrame, fraction: float, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    rest, part = stratified_split(frame["label"].to_numpy(), fraction, seed, _groups(frame))
    return frame.iloc[rest], frame.iloc[part]


def _groups(frame: pd.DataFrame) -> npt.NDArray[np.int64]:
    """The number of each row's group: rows hang together by an equal text, by their group, and by way of others."""
    texts, groups = (pd.factorize(frame[key])[0] for key in ("text", "group" if "group" in frame else "text"))
    size = len(frame)
    links = coo_array((np.ones(size), (texts, size + groups)), shape=(2 * size, 2 * size))
    return np.unique(connected_components(links, directed=False)[1][texts], return_inverse=True)[1]


def is_on_hub(dataset: DatasetParameters) -> bool:
    """Whether `read_splits` asks the hub for it."""
    path = Path(dataset.name)
    return not path.exists() and path.suffix.lower() not in SUFFIXES and bool(HUB_IDENTIFIER.fullmatch(dataset.name))


def _read_source(dataset: DatasetParameters, work: Path | None) -> dict[str, pd.DataFrame]:
    """`train`, and `test` where the source has one."""
    path = Path(dataset.name)
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"dataset.name: {path} is no {', '.join(SUFFIXES)} file")
        if dataset.config is not None:
            raise InputError(f"dataset.config: {dataset.config} is no part of {path}, a single file; leave it empty")
        return {"train": read_file(path)}
    if path.is_dir():
        with tempfile.TemporaryDirectory(dir=work) as cache:  # it would keep a copy of every folder for ever
            return _load_dataset(dataset, path, cache)
    if not is_on_hub(dataset):
        raise InputError(f"dataset.name: there is no file or folder {dataset.name}, and it is no hub identifier")
    files = dataset_folder(dataset.name, dataset.revision, dataset.config, work)
    with files as folder, tempfile.TemporaryDirectory(dir=work) as cache:
        return _load_dataset(dataset, folder, cache)


def _load_dataset(dataset: DatasetParameters, folder: Path, cache_dir: str) -> dict[str, pd.DataFrame]:
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is said below
    frames = {}
    try:
        builder = datasets.load_dataset_builder(str(folder), name=dataset.config, cache_dir=cache_dir)
        chosen = _chosen_splits(dataset, builder.config.data_files)
        builder.download_and_prepare()
        for split, name in chosen.items():
            table = builder.as_dataset(split=name)
            frames[split] = _named(table.to_pandas(), dataset.label_column, table.features)
    except InputError:
        raise
    except Exception as error:  # the library raises dozens of types for an unusable source
        configs = CONFIGS.search(str(error))
        if configs:
            named = "there are several" if dataset.config is None else f"{dataset.config} is none of {dataset.name}"
            raise InputError(f"dataset.config: {named}; allowed: {configs[1]}") from error
        reason = first_line(innermost(error)).replace(str(folder), dataset.name)
        raise InputError(f"dataset.name: {dataset.name} cannot be loaded: {reason}") from error
    return frames


def _chosen_splits(dataset: DatasetParameters, files: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """What the source calls `train` and `test`, from the files of its splits; no `test` where it has one split alone.

    `InputError` for a split that there is not, and for a text file of a chosen one that is not as it should be.
    """
    chosen = {"train": dataset.train_split}
    if dataset.test_split is not None:
        chosen["test"] = dataset.test_split
    if list(files) == [dataset.train_split] and "test" in chosen:
        del chosen["test"]
        logging.info(
            "%s has no split %s: a part of %s becomes it", dataset.name, dataset.test_split, dataset.train_split
        )
    for split, name in chosen.items():
        if name not in files:
            part = "; or leave it empty, and a part of the training split becomes it" if split == "test" else ""
            there = ", ".join(map(str, files))
            raise InputError(f"dataset.{split}_split: {dataset.name} has no split {name}; allowed: {there}{part}")
    for name in chosen.values():
        for file in map(Path, files[name]):
            if file.suffix.lower() in TEXT_FILES and file.is_file():
                read_file(file)  # the library does not say which file it is
    return chosen


def _named(frame: pd.DataFrame, column: str, features: Mapping[str, Any]) -> pd.DataFrame:
    """The labels by their names, in the source's order of classes; one without a name is missing."""
    names = getattr(features.get(column), "names", None)
    if names is None:
        return frame
    numbers = frame[column]
    codes = numbers.where(numbers.between(0, len(names) - 1), -1).astype(int)
    return frame.assign(**{column: pd.Categorical.from_codes(codes, names)})
