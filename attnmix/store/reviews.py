"""The reviews as the stage download writes them: one parquet file for each split."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from attnmix.store.files import read_table, undamaged, write_table

BATCH_TEXTS = 1000
BUFFER_BYTES = 2**20


def split_file(split: str, folder: Path) -> Path:
    """Return the path of the reviews of `train`, `validation` or `test`."""
    return folder / f"{split}.parquet"


def write_split(split: str, reviews: pd.DataFrame, folder: Path) -> None:
    """Write columns `text`, `label` (from 0 on), `label_name`."""
    write_table(split_file(split, folder), reviews)


def read_split(split: str, folder: Path, columns: list[str] | None = None) -> pd.DataFrame:
    """Return `text`, `label` (from 0 on) and `label_name`, or some of these `columns`."""
    return read_table(split_file(split, folder), "download", columns=columns)


def read_texts(split: str, folder: Path) -> Iterator[list[str]]:
    """Yield the texts of a split in batches, so that memory does not grow with their number."""
    with undamaged(split_file(split, folder), "download") as path:
        # With a buffer it reads page by page; pandas writes all rows as one group.
        file = pq.ParquetFile(path, buffer_size=BUFFER_BYTES, page_checksum_verification=True)
        for batch in file.iter_batches(BATCH_TEXTS, columns=["text"]):
            yield batch.column(0).to_pylist()
