"""Files of the pipeline's own making: one error where a stage has not run, where the disk refuses, and for damage.

Arrays are plain Zarr v3: not compressed, each chunk with a checksum, no consolidated metadata, nothing that depends on
the clock, so that equal numbers are equal bytes and any Zarr reader opens them, and sees a flipped bit.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import zarr
from pyarrow.lib import ArrowException
from zarr.codecs import Crc32cCodec

from stages.errors import InputError

CHUNK_BYTES = 2**20
CHECKED: Any = {"write_page_checksum": True}
"""How parquet files are written, so that a flipped bit in them is noticed."""
EVERY_CHUNK: Any = {"write_empty_chunks": True}  # zeros too: what is missing then is damage
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
        remedy = "free some space" if error.errno in FULL else "make it a place to write to"
        raise InputError(f"cannot write {path}: {error.strerror or error}; {remedy} and run again") from error


@contextmanager
def undamaged(path: Path, stage: str) -> Iterator[Path]:
    """`path`, which `stage` makes; what its library says of damage becomes an `InputError`."""
    try:
        yield made(path, stage)
    except (ArrowException, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{path} is damaged or cannot be read: {reason}; `dvc repro -f {stage}` makes it anew"
        ) from error


def read_table(path: Path, stage: str, **options: Any) -> pd.DataFrame:
    """A parquet file; `options` as in `pandas.read_parquet`."""
    with undamaged(path, stage):
        return pd.read_parquet(path, page_checksum_verification=True, **options)


def write_table(path: Path, table: pd.DataFrame) -> None:
    """A parquet file without the index."""
    with writing(path):
        table.to_parquet(path, index=False, **CHECKED)


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
            compressors=Crc32cCodec(),
            filters=None,
            fill_value=0,
            dimension_names=tuple(dimensions),
            attributes=attributes,
            overwrite=True,
            config=EVERY_CHUNK,
        )


def open_array(path: Path, stage: str, mode: Literal["r", "r+"] = "r") -> Any:
    """The array at `path`, which `stage` makes; `InputError` where what describes it cannot be right."""
    with undamaged(path, stage):
        array: Any = zarr.open_array(path, mode=mode).with_config(EVERY_CHUNK)
        if array.shape[1:] != (array.shards or array.chunks)[1:]:
            raise ValueError(f"its shape {array.shape} is not that of its chunks")
        return array


def read_array(array: Any, path: Path, stage: str, rows: slice = slice(None)) -> npt.NDArray[Any]:
    """`rows` of what `open_array` opened; `InputError` for a chunk that is missing, cut short or not as it was."""
    with undamaged(path, stage):
        size = (array.shards or array.chunks)[0]
        first, last, _ = rows.indices(array.shape[0])
        others = (0,) * (array.ndim - 1)
        for number in range(first // size, -(-last // size)):
            name = array.metadata.encode_chunk_key((number, *others))
            if not (path / name).is_file() or not (path / name).stat().st_size:  # zarr takes it for zeros
                raise ValueError(f"{name} is missing or empty")
        return np.asarray(array[rows])
