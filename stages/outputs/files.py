"""Files of the pipeline's own making: one error where a stage has not run, or where the disk refuses.

Arrays are plain Zarr v3: no codec, no consolidated metadata, nothing that depends on the clock, so that equal numbers
are equal bytes and any Zarr reader opens them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pandas as pd
import zarr

from stages.errors import InputError

CHUNK_BYTES = 2**20


def made(path: Path, stage: str) -> Path:
    """`path`; `InputError` naming the `stage` that makes it where there is nothing."""
    if not path.exists():
        raise InputError(f"{path} is missing; `dvc repro {stage}` makes it")
    return path


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """`path`, in a folder that exists; the system's refusal to write becomes an `InputError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; free some space and run again") from error


def read_table(path: Path, stage: str, **options: Any) -> pd.DataFrame:
    """A parquet file; `options` as in `pandas.read_parquet`."""
    return pd.read_parquet(made(path, stage), **options)


def write_table(path: Path, table: pd.DataFrame) -> None:
    """A parquet file without the index."""
    with writing(path):
        table.to_parquet(path, index=False)


def create_array(
    path: Path,
    shape: Sequence[int],
    dtype: npt.DTypeLike,
    chunks: Sequence[int],
    dimensions: Sequence[str],
    attributes: dict[str, Any],
    shards: Sequence[int] | None = None,
) -> Any:
    """An array of zeros `shape`, to be filled; `InputError` where the disk refuses (full, read-only)."""
    with writing(path):
        return zarr.create_array(
            store=path,
            shape=tuple(shape),
            chunks=tuple(chunks),
            shards=tuple(shards) if shards else None,
            dtype=dtype,
            compressors=None,
            filters=None,
            fill_value=0,
            dimension_names=tuple(dimensions),
            attributes=attributes,
            overwrite=True,
        )
