"""Bring the reviews and the pretrained model to where the other stages read them.

    python -m stages.download

Writes `data/reviews/{train,validation,test}.parquet`, `reports/plots/reviews.csv` and `models/pretrained/`.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pandas as pd

from stages.command import run_stage
from stages.errors import InputError
from stages.models.fetching import fetch_model
from stages.models.proof import prove_model
from stages.outputs.checkpoints import CHECKPOINT_FOLDERS, PRETRAINED
from stages.outputs.reports import write_plot
from stages.outputs.reviews import REVIEWS, write_split
from stages.parameters import Parameters
from stages.reviews.source import read_splits


def main(parameters: Parameters) -> None:
    for key, name, folders in (
        ("model.name", parameters.model.name, CHECKPOINT_FOLDERS.values()),
        ("dataset.name", parameters.dataset.name, (REVIEWS,)),
    ):
        for folder in folders:
            if Path(name).resolve().is_relative_to(folder.resolve()):
                raise InputError(f"{key}: {name} is what this pipeline writes itself; copy it to another folder first")
    fetch_model(parameters.model, PRETRAINED)
    splits = read_splits(parameters.dataset, parameters.seed)
    try:
        prove_model(PRETRAINED, splits["test"]["text"].iloc[0])
    except InputError as error:  # in the user's words, who named no such folder
        reason = str(error).removeprefix("model.name: ").replace(str(PRETRAINED), parameters.model.name)
        raise InputError(f"model.name: {reason}") from error
    tables = []
    for split, reviews in splits.items():
        write_split(split, reviews)
        counts = reviews.groupby(["label", "label_name"]).size().rename("reviews").reset_index()
        tables.append(counts.assign(split=split)[["split", "label", "label_name", "reviews"]])
        logging.info(
            "%s: %s", split, ", ".join(f"{row.reviews} of class {row.label_name}" for row in counts.itertuples())
        )
    write_plot("reviews", pd.concat(tables))


if __name__ == "__main__":
    run_stage(main)
