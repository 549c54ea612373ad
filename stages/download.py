"""Download the dataset and the pretrained model, and validate both.

    python -m stages download

Writes `data/reviews/{train,validation,test}.parquet`, `reports/metrics/download.json` and `models/pretrained/` with the
files of `model.name`. If `model.base` is set, `models/pretrained/` contains the model `model.base`, and the model
`model.name` is written to a separate folder. Outputs are published at the end, after validation. Also writes
`reports/sources.json` with the hashes of local sources, as the stage `sources` does.
"""

import errno
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from attnmix.core.disk import publish_output, remove_unfinished
from attnmix.core.errors import InputError, model_errors
from attnmix.core.settings import ModelParameters
from attnmix.core.store.files import write_table
from attnmix.core.store.runs import Run
from attnmix.core.store.texts import split_file, texts_of
from attnmix.core.store.writers import write_metrics
from attnmix.core.terminal import shorten
from attnmix.data.source import read_splits
from attnmix.models.fetching import fetch_model
from attnmix.models.loading import check_classifier, check_comparable, check_model
from stages.common.parameters import Parameters
from stages.common.resume import UNFINISHED
from stages.sources import (
    Sources,
    hash_sources,
    missing_in_clone,
    missing_in_copy,
    original_of,
    source_names,
    write_sources,
)

COMMITS = {"model.base": "base_commit", "model.name": "model_commit"}
"""Names of the metrics that contain the commits of the models, by parameter."""


class _ModelDownload(NamedTuple):
    """A model to download."""

    key: str  # parameter that contains the name
    model: ModelParameters
    folder: Path  # output folder


def main(parameters: Parameters) -> None:
    """Download everything to a temporary folder, and publish it after validation."""
    run = Run(Path())
    _check_source_paths(parameters, run)
    source_hashes = _hash_existing_sources(parameters)
    work = UNFINISHED / "download" / "work"  # the temporary folder
    shutil.rmtree(work.parent, ignore_errors=True)  # left by a killed run
    work.mkdir(parents=True)
    try:
        unpublished = Run(work)
        metrics = _download(parameters, unpublished)
        publish_output(unpublished.pretrained, run.pretrained)
        publish_output(unpublished.reviews, run.reviews)
        write_metrics("download", metrics, run.metrics_folder)
        write_sources(source_hashes)
    finally:
        remove_unfinished(work)


def _check_source_paths(parameters: Parameters, run: Run) -> None:
    """Raise `InputError` if a source is an output of the pipeline, or is missing in DVC's copy of a repository."""
    for download in _list_models(parameters, run):
        _check_path(download.key, download.model.name, list(run.checkpoints.values()))
    names = source_names(parameters)
    _check_path("dataset.name", names["dataset.name"], [run.reviews])
    for key, name in names.items():
        original = original_of(name)
        if original:
            raise missing_in_copy(key, name, original)


def _hash_existing_sources(parameters: Parameters) -> Sources:
    """Return the hashes of all local sources; raise `InputError` for a source that is missing on this machine.

    `hash_sources` accepts a missing source if its hashes are recorded, but a download needs the source's files.
    """
    hashes = hash_sources(parameters)
    for key, name in source_names(parameters).items():
        if name in hashes.get(key, {}) and not Path(name).exists():
            raise missing_in_clone(key, name)
    return hashes


def _check_path(key: str, name: str, outputs: list[Path]) -> None:
    """Raise `InputError` if `name` is a path inside one of the pipeline's `outputs`, or a circular link."""
    try:
        Path(name).stat()
    except OSError as error:  # `name` is usually a hub identifier
        if error.errno == errno.ELOOP:
            raise InputError(f"{key}: {name} is a circular link; use the path of the folder or file itself") from None
    if any(Path(name).resolve().is_relative_to(folder.resolve()) for folder in outputs):
        raise InputError(f"{key}: {name} is an output of this pipeline; copy it to another folder first")


def _download(parameters: Parameters, run: Run) -> dict[str, Any]:
    """Write the validated dataset and models to the folder of `run`, and return the metrics.

    The metrics are the commits of hub repositories, the creators of the texts, and the number of texts in each split.
    """
    downloads = _list_models(parameters, run)
    metrics: dict[str, Any] = {"dataset_commit": None}  # the first metric in the file
    for key, model, folder in downloads:
        with model_errors(key, model.name, folder):
            metrics[COMMITS[key]] = fetch_model(model.name, folder, model.revision)
    splits, origin = read_splits(parameters.dataset, parameters.seed)
    metrics["dataset_commit"] = origin.commit
    if origin.creators:
        metrics["language_creators"] = ", ".join(origin.creators)
    _check_models(downloads, splits, parameters, run)
    for split, reviews in splits.items():
        write_table(split_file(split, run.reviews), reviews)
        counts = reviews.groupby("label_name")["label"].count()
        by_class = [f"{number} of class {shorten(name)}" for name, number in counts.items()]
        logging.info("%s: %s", split, ", ".join(by_class))
        metrics[split] = len(reviews)
    return metrics


def _check_models(
    downloads: Sequence[_ModelDownload], splits: Mapping[str, pd.DataFrame], parameters: Parameters, run: Run
) -> None:
    """Raise `InputError` if a downloaded model cannot be used with the test texts or with the classes of the dataset.

    `splits` contains the table of labelled texts of each split.
    """
    texts = texts_of(splits["test"])
    for key, model, folder in downloads:
        with model_errors(key, model.name, folder):
            check_model(folder, texts)
    # Problems with the classifier are reported now, because `finetune` may run much later.
    names = splits["train"].groupby("label")["label_name"].first().to_dict()
    with model_errors("model.name", parameters.model.name, run.initial):
        check_classifier(run.initial, names, texts, trained=not parameters.finetune.epochs)
    if len(downloads) > 1:
        check_comparable(run.pretrained, run.named_model, texts)


def _list_models(parameters: Parameters, run: Run) -> list[_ModelDownload]:
    """Return the models to download: `model.name` and, if it is set, `model.base`."""
    model = parameters.model
    base = model.base_model
    if base is None:
        return [_ModelDownload("model.name", model, run.pretrained)]
    return [
        _ModelDownload("model.base", base, run.pretrained),
        _ModelDownload("model.name", model, run.named_model),
    ]
