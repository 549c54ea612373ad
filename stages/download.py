"""Bring the reviews and the pretrained model to where the other stages read them.

    python -m stages.download

Writes `data/reviews/{train,validation,test}.parquet`, `reports/plots/reviews.csv` and `models/pretrained/`.
"""

from __future__ import annotations

import logging

import pandas as pd

from stages.command import run_stage
from stages.models.fetching import fetch_model
from stages.models.proof import prove_model
from stages.outputs.checkpoints import PRETRAINED
from stages.outputs.reports import write_plot
from stages.outputs.reviews import write_split
from stages.parameters import Parameters
from stages.reviews.source import read_splits


def main(parameters: Parameters) -> None:
    fetch_model(parameters.model, PRETRAINED)
    splits = read_splits(parameters.dataset, parameters.seed)
    prove_model(PRETRAINED, splits["test"]["text"].iloc[0])
    tables = []
    for split, reviews in splits.items():
        write_split(split, reviews)
        counts = reviews.groupby(["label", "label_name"]).size().rename("reviews").reset_index()
        tables.append(counts.assign(split=split)[["split", "label", "label_name", "reviews"]])
        logging.info("%s: %s", split, ", ".join(f"{row.reviews} {row.label_name}" for row in counts.itertuples()))
    write_plot("reviews", pd.concat(tables))


if __name__ == "__main__":
    run_stage(main)
