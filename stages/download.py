"""Bring the reviews and the pretrained model to where the other stages read them.

    python -m stages.download

Writes `data/reviews/{train,validation,test}.parquet`, `reports/plots/reviews.csv` and `models/pretrained/`: the files
of `model.name`, or those of `model.base`, and in a folder of their own those of `model.name`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from stages.command import run_stage
from stages.errors import InputError
from stages.models.fetching import fetch_model
from stages.models.proof import prove_model, prove_pair
from stages.outputs.checkpoints import CHECKPOINT_FOLDERS, OWN, PRETRAINED
from stages.outputs.reports import write_plot
from stages.outputs.reviews import REVIEWS, write_split
from stages.parameters import ModelParameters, Parameters
from stages.reviews.source import read_splits


def main(parameters: Parameters) -> None:
    models = _models(parameters.model)
    written = list(CHECKPOINT_FOLDERS.values())
    for key, name, folders in (
        *((key, model.name, written) for key, (model, _) in models.items()),
        ("dataset.name", parameters.dataset.name, [REVIEWS]),
    ):
        for folder in folders:
            if Path(name).resolve().is_relative_to(folder.resolve()):
                raise InputError(f"{key}: {name} is what this pipeline writes itself; copy it to another folder first")
    for key, (model, folder) in models.items():
        with _said_of(key, model.name, folder):
            fetch_model(model, folder)
    splits = read_splits(parameters.dataset, parameters.seed)
    texts = splits["test"]["text"].tolist()
    for key, (model, folder) in models.items():
        with _said_of(key, model.name, folder):
            prove_model(folder, texts)
    if len(models) > 1:
        prove_pair(PRETRAINED, OWN, texts)
    tables = []
    for split, reviews in splits.items():
        write_split(split, reviews)
        counts = reviews.groupby(["label", "label_name"]).size().rename("reviews").reset_index()
        tables.append(counts.assign(split=split)[["split", "label", "label_name", "reviews"]])
        logging.info(
            "%s: %s", split, ", ".join(f"{row.reviews} of class {row.label_name}" for row in counts.itertuples())
        )
    write_plot("reviews", pd.concat(tables))


def _models(model: ModelParameters) -> dict[str, tuple[ModelParameters, Path]]:
    """By the key that names it, each model to bring, and its folder."""
    if model.base is None:
        return {"model.name": (model, PRETRAINED)}
    base = model.model_copy(update={"name": model.base, "revision": model.base_revision})
    return {"model.base": (base, PRETRAINED), "model.name": (model, OWN)}


@contextmanager
def _said_of(key: str, name: str, folder: Path) -> Iterator[None]:
    """What is wrong with a model in the user's words, who named no such folder."""
    try:
        yield
    except InputError as error:
        reason = str(error).removeprefix("model.name: ").replace(str(folder), name)
        raise InputError(f"{key}: {reason}") from error


if __name__ == "__main__":
    run_stage(main)
