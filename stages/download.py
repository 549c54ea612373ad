"""Bring the reviews and the pretrained model to where the other stages read them.

    python -m stages.download

Writes `data/reviews/{train,validation,test}.parquet`, `reports/plots/reviews.csv` and `models/pretrained/`.
"""

from __future__ import annotations

import logging

import pandas as pd

from stages.command import run_stage
from stages.models.fetching import fetch_model
from stages.outputs.checkpoints import PRETRAINED
from stages.outputs.reports import write_plot
from stages.outputs.reviews import write_split
from stages.parameters import Parameters
from stages.reviews.source import read_splits


def main(parameters: Parameters) -> None:
    fetch_model(parameters.model, PRETRAINED)
    splits = read_splits(parameters.dataset, parameters.seed)
    for split, reviews in splits.items():
        write_split(split, reviews)
    counts = pd.concat(splits, names=["split"]).groupby(["split", "label", "label_name"], sort=False).size()
    table = counts.rename("reviews").reset_index().sort_values(["split", "label"], key=_in_order)
    write_plot("reviews", table)
    for row in table.itertuples():
        logging.info("%s: %d reviews are %s", row.split, row.reviews, row.label_name)


def _in_order(column: pd.Series) -> pd.Series:
    """Splits as they are used, labels by number."""
    return column.map({"train": 0, "validation": 1, "test": 2}) if column.name == "split" else column


if __name__ == "__main__":
    run_stage(main)
