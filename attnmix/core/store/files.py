"""Files that stages write: one error for a stage that has not run, for a disk that refuses, and for damage.

Arrays are plain Zarr v3: not compressed, each chunk with a checksum, no consolidated metadata, nothing that depends on
the clock, so that equal numbers are equal bytes and any Zarr reader opens them, and sees a flipped bit. An array is at
a path, or at a URL of any file system that fsspec knows.
"""

import errno
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd
from pyarrow.lib import ArrowException

from attnmix.core.errors import InputError, first_line

CHUNK_BYTES = 2**20
PARQUET_OPTIONS: Any = {"write_page_checksum": True}  # so that a flipped bit in a parquet file is noticed
EVERY_CHUNK: Any = {"write_empty_chunks": True}  # zeros too, so that a missing chunk is damage
WORD_COLUMNS = ("group", "label_name", "predicted")
"""Columns of csv files of results that may hold names of classes."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors that libraries raise for a damaged local file.
DAMAGE = (ArrowException, AttributeError, LookupError, OSError, TypeError, ValueError)

Place = Path | str  # a path, or a URL such as `s3://bucket/run`
P = TypeVar("P", bound=Place)


def require_output(path: P, stage: str) -> P:
    """Return `path`; raise `InputError` naming the `stage` that writes it where nothing is there."""
    if isinstance(path, Path) and not path.exists():
        raise InputError(f"{path} is missing; the stage {stage} writes it")
    return path


@contextmanager
def writing(path: P) -> Iterator[P]:
    """Yield `path`, in a folder that exists; raise `InputError` where the system refuses to write there."""
    try:
        if isinstance(path, Path):
            path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except Exception as error:  # remote file systems raise their own types
        if isinstance(path, Path) and not isinstance(error, OSError):
            raise  # a bug: only remote file systems have other errors
        remedy = "free some space" if getattr(error, "errno", None) in DISK_FULL else "make it a place to write to"
        cause = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"cannot write {path}: {cause}; {remedy} and run again") from error


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path to write a file to, which becomes `path` in one step once everything is written.

    So a killed stage leaves no part of a file under its name, and a file that is a link to a cache is replaced,
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
def reading(path: P, stage: str) -> Iterator[P]:
    """Yield `path`, which `stage` writes; raise `InputError` where it is missing or its reader fails."""
    require_output(path, stage)
    try:
        yield path
    except InputError:
        raise
    except Exception as error:  # remote file systems raise their own types
        if isinstance(path, Path) and not isinstance(error, DAMAGE):
            raise  # a bug: only remote file systems have other errors
        raise InputError(
            f"{path} is damaged or cannot be read: {first_line(error)}; force the stage {stage}, which writes it, "
            "to run again"
        ) from error


def read_table(path: Path, stage: str, **options: Any) -> pd.DataFrame:
    """Return a parquet file that `stage` writes; `options` are those of `pandas.read_parquet`."""
    with reading(path, stage):
        return pd.read_parquet(path, page_checksum_verification=True, **options)


def read_results(source: Path | io.StringIO, **options: Any) -> Any:
    """Return a csv of results; an empty cell is missing, and every other word stays as it is written.

    The names of classes (`WORD_COLUMNS`, and `label` beside `predicted`) are words, whatever they look like: `None`,
    `nan`, `True` and `01` are names like any other. `options` are those of `pandas.read_csv`.
    """
    names = [str(name) for name in pd.read_csv(source, nrows=0)]
    if isinstance(source, io.StringIO):
        source.seek(0)
    words = {name for name in names if name in WORD_COLUMNS or (name == "label" and "predicted" in names)}
    dtypes = dict.fromkeys(words, str) | options.pop("dtype", {})
    missing = {name: [""] for name in names if name not in words}
    return pd.read_csv(source, dtype=dtypes, keep_default_na=False, na_values=missing, **options)


def read_json(path: Path, stage: str) -> dict[str, Any]:
    """Return the JSON object that `stage` writes."""
    with reading(path, stage):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        return content


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a parquet file without the index."""
    with atomic_path(path) as part:
        table.to_parquet(part, index=False, **PARQUET_OPTIONS)


def create_array(path: Place, **options: Any) -> Any:
    """Create an array with `options` of `zarr.create_array`; raise `InputError` where the place refuses."""
    import zarr  # half a second, which measures in memory need not take
    from zarr.codecs import Crc32cCodec

    options |= {"compressors": Crc32cCodec(), "filters": None, "fill_value": 0, "config": EVERY_CHUNK}
    with writing(path):
        return zarr.create_array(store=path, overwrite=True, **options)


def open_array(path: Place, stage: str, mode: Literal["r", "r+"] = "r") -> Any:
    """Return the array that `stage` writes; raise `InputError` where what describes it cannot be right."""
    import zarr

    with reading(path, stage):
        array: Any = zarr.open_array(path, mode=mode).with_config(EVERY_CHUNK)
        if array.shape[1:] != (array.shards or array.chunks)[1:]:
            raise ValueError(f"its shape {array.shape} is not that of its chunks")
        return array


def read_array(array: Any, path: Place, stage: str, rows: slice = slice(None)) -> npt.NDArray[Any]:
    """Return `rows` of an open array; raise `InputError` for a chunk that is missing, truncated or changed."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    with reading(path, stage):
        size = (array.shards or array.chunks)[0]
        first, last, _ = rows.indices(array.shape[0])
        files, folder = (LocalFileSystem(), path) if isinstance(path, Path) else url_to_fs(path)
        for number in range(first // size, -(-last // size)):
            name = array.metadata.encode_chunk_key((number, *(0,) * (array.ndim - 1)))
            chunk = f"{folder}/{name}"
            if not files.isfile(chunk) or not files.size(chunk):  # zarr would read zeros
                raise ValueError(f"{name} is missing or empty")
        return np.asarray(array[rows])
