"""The reviews as the pipeline keeps them: one parquet file for each split."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from stages.outputs.files import read_table, write_table

REVIEWS = Path("data/reviews")


def split_file(split: str, folder: Path = REVIEWS) -> Path:
    """Where the reviews of `train`, `validation` or `test` lie."""
    return folder / f"{split}.parquet"


def write_split(split: str, reviews: pd.DataFrame, folder: Path = REVIEWS) -> None:
    """Write columns `text`, `label` (from 0 on), `label_name`."""
    write_table(split_file(split, folder), reviews)


def read_split(split: str) -> pd.DataFrame:
    """Columns `text`, `label` (from 0 on), `label_name`."""
    return read_table(split_file(split), "download")
