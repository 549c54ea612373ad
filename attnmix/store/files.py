"""Files of the pipeline's own making: one error where a stage has not run, where the disk refuses, and for damage.

Arrays are plain Zarr v3: not compressed, each chunk with a checksum, no consolidated metadata, nothing that depends on
the clock, so that equal numbers are equal bytes and any Zarr reader opens them, and sees a flipped bit. An array lies
at a path, or at a URL of any file system that fsspec knows.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd
import zarr
from fsspec.core import url_to_fs
from pyarrow.lib import ArrowException
from zarr.codecs import Crc32cCodec

from attnmix.core.errors import InputError

CHUNK_BYTES = 2**20
CHECKED: Any = {"write_page_checksum": True}
"""How parquet files are written, so that a flipped bit in them is noticed."""
EVERY_CHUNK: Any = {"write_empty_chunks": True}  # zeros too: what is missing then is damage
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Place = Path | str
"""A path, or a URL such as `s3://bucket/run`."""
P = TypeVar("P", bound=Place)


def inside(place: Place, name: str) -> Place:
    """What is called `name` in that folder."""
    return place / name if isinstance(place, Path) else f"{place}/{name}"


def made(path: P, stage: str) -> P:
    """`path`; `InputError` naming the `stage` that makes it where there is nothing."""
    if isinstance(path, Path) and not path.exists():
        raise InputError(f"{path} is missing; `dvc repro {stage}` makes it")
    return path


@contextmanager
def writing(path: P) -> Iterator[P]:
    """`path`, in a folder that exists; the system's refusal to write becomes an `InputError`."""
    try:
        if isinstance(path, Path):
            path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        remedy = "free some space" if error.errno in FULL else "make it a place to write to"
        raise InputError(f"cannot write {path}: {error.strerror or error}; {remedy} and run again") from error
    except Exception as error:
        if isinstance(path, Path):
            raise
        # Each remote file system has errors of its own.
        raise InputError(f"cannot write {path}: {_first_line(error)}; make it a place to write to") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write a file to, which becomes `path` in one step once everything is written.

    So a killed stage leaves no part of a file under its name, and a file that DVC links to its cache is replaced there,
    where writing to it would change the cache.
    """
    with writing(path):
        part = path.with_name(f"{path.name}.part")
        try:
            yield part
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def undamaged(path: P, stage: str) -> Iterator[P]:
    """`path`, which `stage` makes; what its library says of damage becomes an `InputError`."""
    try:
        yield made(path, stage)
    except InputError:
        raise
    except Exception as error:
        known = (ArrowException, AttributeError, LookupError, OSError, TypeError, ValueError)
        if isinstance(path, Path) and not isinstance(error, known):
            raise
        # Each remote file system has errors of its own.
        raise InputError(
            f"{path} is damaged or cannot be read: {_first_line(error)}; `dvc repro -f {stage}` makes it anew"
        ) from error


def read_table(path: Path, stage: str, **options: Any) -> pd.DataFrame:
    """A parquet file; `options` as in `pandas.read_parquet`."""
    with undamaged(path, stage):
        return pd.read_parquet(path, page_checksum_verification=True, **options)


def write_table(path: Path, table: pd.DataFrame) -> None:
    """A parquet file without the index."""
    with whole(path) as part:
        table.to_parquet(part, index=False, **CHECKED)


def create_array(
    path: Place,
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


def open_array(path: Place, stage: str, mode: Literal["r", "r+"] = "r") -> Any:
    """The array at `path`, which `stage` makes; `InputError` where what describes it cannot be right."""
    with undamaged(path, stage):
        array: Any = zarr.open_array(path, mode=mode).with_config(EVERY_CHUNK)
        if array.shape[1:] != (array.shards or array.chunks)[1:]:
            raise ValueError(f"its shape {array.shape} is not that of its chunks")
        return array


def read_array(array: Any, path: Place, stage: str, rows: slice = slice(None)) -> npt.NDArray[Any]:
    """`rows` of what `open_array` opened; `InputError` for a chunk that is missing, cut short or not as it was."""
    with undamaged(path, stage):
        size = (array.shards or array.chunks)[0]
        first, last, _ = rows.indices(array.shape[0])
        others = (0,) * (array.ndim - 1)
        for number in range(first // size, -(-last // size)):
            name = array.metadata.encode_chunk_key((number, *others))
            if not _size(inside(path, name)):  # zarr takes it for zeros
                raise ValueError(f"{name} is missing or empty")
        return np.asarray(array[rows])


def _size(path: Place) -> int:
    """Bytes of a file; 0 where there is none."""
    if isinstance(path, Path):
        return path.stat().st_size if path.is_file() else 0
    files, name = url_to_fs(path)
    return int(files.size(name)) if files.isfile(name) else 0
