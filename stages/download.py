"""Bring the reviews and the pretrained model to where the other stages read them.

    python -m stages.download

Writes `data/reviews/{train,validation,test}.parquet` and `models/pretrained/`.
"""

from __future__ import annotations

import logging

from stages.errors import run_stage
from stages.models.fetching import fetch_model
from stages.models.loading import PRETRAINED
from stages.parameters import Parameters
from stages.reviews.source import read_splits
from stages.reviews.splits import write_split


def main(parameters: Parameters) -> None:
    fetch_model(parameters.model, PRETRAINED)
    for split, reviews in read_splits(parameters.dataset, parameters.seed).items():
        write_split(split, reviews)
        share = reviews["label"].mean()
        positive = reviews.loc[reviews["label"] == 1, "label_name"].iloc[0]
        logging.info("%s: %d reviews, %.0f %% %s", split, len(reviews), 100 * share, positive)


if __name__ == "__main__":
    run_stage(main)
