"""Read reviews from a hub dataset, a local dataset folder, or one file, and split them."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from attnmix.core.errors import InputError, first_line, innermost
from attnmix.core.options import DatasetParameters
from attnmix.data.checks import checked, shown, with_classes
from attnmix.data.draw import Rows, stratified_draw, stratified_split
from attnmix.data.files import SUFFIXES, TEXT_FILES, read_file
from attnmix.hub.dataset import dataset_folder

HUB_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# How `datasets` lists configurations where none, or an unknown one, is chosen.
CONFIGURATIONS = re.compile(r"(?:available configs|Available): \[(.*)\]")
SPLITS = ("train", "validation", "test")


def read_splits(dataset: DatasetParameters, seed: int, work: Path | None = None) -> dict[str, pd.DataFrame]:
    """Return `train`, `validation` and `test`, columns `text`, `label` (from 0 on) and `label_name`.

    Validation is a stratified part of train. A source without a test split gives up a part
    of the same size for it first. Limits are drawn before validation is split off. Rows of equal texts, and those of
    one group, are never on two sides of a split that is made here. `work` is for temporary files, else the system's.
    """
    source = _read_source(dataset, work)
    names = {"train": dataset.train_split, "test": dataset.test_split}
    tables = {split: checked(frame, dataset, f"{dataset.name} ({names[split]})") for split, frame in source.items()}
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
    """Raise `InputError` for a class that cannot be learned, and for a split of one class; warn of what may mislead."""
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
    for key in ("text", "group"):
        shared = int(frames["test"][key].isin(learned[key]).sum()) if key in learned else 0
        if shared:
            tests = len(frames["test"])
            logging.warning("%d of the %d test reviews have a %s of the training split", shared, tests, key)


def _split(frame: pd.DataFrame, fraction: float, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    rest, part = stratified_split(frame["label"].to_numpy(), fraction, seed, _groups(frame))
    return frame.iloc[rest], frame.iloc[part]


def _groups(frame: pd.DataFrame) -> Rows:
    """Return each row's group number: rows are linked by an equal text, by their group, and by way of others."""
    texts, groups = (pd.factorize(frame[key])[0] for key in ("text", "group" if "group" in frame else "text"))
    size = len(frame)
    links = coo_array((np.ones(size), (texts, size + groups)), shape=(2 * size, 2 * size))
    return np.unique(connected_components(links, directed=False)[1][texts], return_inverse=True)[1]


def is_on_hub(dataset: DatasetParameters) -> bool:
    """Return True where `read_splits` asks the hub for the data set."""
    path = Path(dataset.source)
    return not path.exists() and path.suffix.lower() not in SUFFIXES and bool(HUB_IDENTIFIER.fullmatch(dataset.source))


def _read_source(dataset: DatasetParameters, work: Path | None) -> dict[str, pd.DataFrame]:
    """Return `train`, and `test` where the source has one."""
    path = Path(dataset.source)
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"dataset.name: {path} is no {', '.join(SUFFIXES)} file")
        return {"train": read_file(path)}
    with tempfile.TemporaryDirectory(dir=work) as cache:  # the library would keep a copy of every folder for ever
        if path.is_dir():
            return _load_dataset(dataset, path, cache)
        if not is_on_hub(dataset):
            raise InputError(f"dataset.name: there is no file or folder {path}, and it is no hub identifier")
        with dataset_folder(dataset.source, dataset.revision, dataset.configuration, work) as folder:
            return _load_dataset(dataset, folder, cache)


def _load_dataset(dataset: DatasetParameters, folder: Path, cache_dir: str) -> dict[str, pd.DataFrame]:
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are reported below
    frames = {}
    try:
        builder = datasets.load_dataset_builder(str(folder), name=dataset.configuration, cache_dir=cache_dir)
        chosen = _chosen_splits(dataset, builder.config.data_files)
        builder.download_and_prepare()
        for split, name in chosen.items():
            table = builder.as_dataset(split=name)
            frames[split] = _with_label_names(table.to_pandas(), dataset.label_column, table.features)
    except InputError:
        raise
    except Exception as error:  # the library raises dozens of types for an unusable source
        configurations = CONFIGURATIONS.search(str(error))
        if configurations:
            raise InputError(
                f"dataset.name: {dataset.name} needs one of the configurations {configurations[1]} behind a colon"
            ) from error
        reason = first_line(innermost(error)).replace(str(folder), dataset.name)
        raise InputError(f"dataset.name: {dataset.name} cannot be loaded: {reason}") from error
    return frames


def _chosen_splits(dataset: DatasetParameters, files: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the source's names of `train` and `test`; no `test` where it has one split alone.

    Raises `InputError` for a split that it lacks, and for a text file of a chosen one that is not as it should be.
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
            allowed = ", ".join(map(str, files)) + "; or empty, for a part of train" * (split == "test")
            raise InputError(f"dataset.{split}_split: {dataset.name} has no split {name}; allowed: {allowed}")
    for name in chosen.values():
        for file in map(Path, files[name]):
            if file.suffix.lower() in TEXT_FILES and file.is_file():
                read_file(file)  # its error names the file; the library's does not
    return chosen


def _with_label_names(frame: pd.DataFrame, column: str, features: Mapping[str, Any]) -> pd.DataFrame:
    """Return the table with labels by name, in the source's order of classes; a label without a name is missing."""
    names = getattr(features.get(column), "names", None)
    if names is None:
        return frame
    codes = frame[column].where(frame[column].between(0, len(names) - 1), -1).astype(int)
    return frame.assign(**{column: pd.Categorical.from_codes(codes, names)})
