"""Readers and writers of files; missing outputs, failed writes and damaged files raise `InputError`.

Arrays are uncompressed Zarr v3 with a checksum per chunk, without consolidated metadata or time stamps. Arrays with
equal values therefore have equal bytes, and any Zarr reader can open the arrays and detect flipped bits. The location
of an array is a path, or a URL of a file system supported by fsspec.
"""

import errno
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd
from pyarrow.lib import ArrowException

from attnmix.core.errors import InputError, first_line

CHUNK_BYTES = 2**20
PARQUET_OPTIONS: Any = {"write_page_checksum": True}  # detects flipped bits in parquet files
EVERY_CHUNK: Any = {"write_empty_chunks": True}  # also writes chunks of zeros, so that a missing chunk indicates damage
WORD_COLUMNS = ("group", "label_name", "predicted")
"""Columns of result files (csv) that may contain class names."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors raised by other libraries for a damaged local file.
DAMAGE = (ArrowException, AttributeError, LookupError, OSError, TypeError, ValueError)

Place = Path | str  # a path, or a URL such as `s3://bucket/run`
P = TypeVar("P", bound=Place)


def require_output(path: P, stage: str) -> P:
    """Return `path`, an output of `stage`; raise `InputError` if it is a local path that does not exist."""
    if isinstance(path, Path) and not path.exists():
        raise InputError(f"{path} is missing; run the stage {stage}, which writes it")
    return path


@contextmanager
def writing(path: P) -> Iterator[P]:
    """Yield `path` after creating its folder; raise `InputError` if writing fails."""
    try:
        if isinstance(path, Path):
            path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except Exception as error:  # remote file systems raise their own exceptions
        if isinstance(path, Path) and not isinstance(error, OSError):
            raise  # a bug, because writing a local file raises no other exceptions
        remedy = "free some space" if getattr(error, "errno", None) in DISK_FULL else "make sure that it is writable"
        cause = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"cannot write {path} ({cause}); {remedy} and run again") from error


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file to write, and rename this file to `path` afterwards in one step.

    A killed stage therefore leaves no incomplete file at `path`. If `path` is a link to a file in a cache, the link is
    replaced; writing through the link would change the cache.
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
    """Yield `path`, an output of `stage`; raise `InputError` if it is missing or cannot be read."""
    require_output(path, stage)
    try:
        yield path
    except InputError:
        raise
    except Exception as error:  # remote file systems raise their own exceptions
        if isinstance(path, Path) and not isinstance(error, DAMAGE):
            raise  # a bug, because a damaged local file raises no other exceptions
        raise InputError(
            f"{path} is damaged or cannot be read ({first_line(error)}); rerun the stage {stage}, which writes it, "
            "with --force"
        ) from error


def read_table(path: Path, stage: str, **options: Any) -> pd.DataFrame:
    """Return the table in a parquet file written by `stage`; `options` are those of `pandas.read_parquet`."""
    with reading(path, stage):
        return pd.read_parquet(path, page_checksum_verification=True, **options)


def read_results(source: Path | io.StringIO, **options: Any) -> Any:
    """Return the table in a result file (csv); `options` are those of `pandas.read_csv`.

    Columns of class names (`WORD_COLUMNS`, and `label` if there is a column `predicted`) are loaded as strings, which
    preserves the names `None`, `nan`, `True` and `01`. In other columns, only empty cells are missing values.
    """
    header = pd.read_csv(source, nrows=0)
    if isinstance(source, io.StringIO):
        source.seek(0)
    names = [str(name) for name in header]
    class_columns = [name for name in names if name in WORD_COLUMNS]
    if "label" in names and "predicted" in names:
        class_columns.append("label")
    dtypes = dict.fromkeys(class_columns, str)
    dtypes.update(options.pop("dtype", {}))
    missing_values = {name: [""] for name in names if name not in class_columns}
    return pd.read_csv(source, dtype=dtypes, keep_default_na=False, na_values=missing_values, **options)


def read_json(path: Path, stage: str) -> dict[str, Any]:
    """Return the JSON object in a file written by `stage`."""
    with reading(path, stage):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return content


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table without its index as a parquet file."""
    with atomic_path(path) as part:
        table.to_parquet(part, index=False, **PARQUET_OPTIONS)


def create_array(path: Place, **options: Any) -> Any:
    """Create an array with the `options` of `zarr.create_array`; raise `InputError` if writing fails."""
    import zarr  # slow import (0.5 s), not needed for measures in memory
    from zarr.codecs import Crc32cCodec

    encoding: Any = {"compressors": Crc32cCodec(), "filters": None, "fill_value": 0, "config": EVERY_CHUNK}
    with writing(path):
        return zarr.create_array(store=path, overwrite=True, **options, **encoding)


def open_array(path: Place, stage: str, mode: Literal["r", "r+"] = "r") -> Any:
    """Return the array written by `stage`; raise `InputError` if its metadata are invalid."""
    import zarr

    with reading(path, stage):
        array: Any = zarr.open_array(path, mode=mode).with_config(EVERY_CHUNK)
        file_shape = array.shards or array.chunks  # a file contains a shard or, in an array without shards, a chunk
        if array.shape[1:] != file_shape[1:]:  # arrays are split along their first axis only
            raise ValueError(f"its shape {array.shape} does not match its chunks")
        return array


def read_array(array: Any, path: Place, stage: str, rows: slice = slice(None)) -> npt.NDArray[Any]:
    """Return `rows` of an open array; raise `InputError` for a missing, truncated or modified chunk."""
    with reading(path, stage):
        _check_chunk_files(array, path, rows)
        return np.asarray(array[rows])


def _check_chunk_files(array: Any, path: Place, rows: slice) -> None:
    """Raise `ValueError` if a file that contains some of the `rows` is missing or empty; zarr would return zeros."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    file_system: Any
    folder: Place
    if isinstance(path, Path):
        file_system, folder = LocalFileSystem(), path
    else:
        file_system, folder = url_to_fs(path)
    file_shape = array.shards or array.chunks  # a file contains a shard or, in an array without shards, a chunk
    file_rows = file_shape[0]
    start, stop, _ = rows.indices(array.shape[0])
    first_file = start // file_rows
    end_file = ceil(stop / file_rows)
    # The key of a file contains its index along each axis; arrays are split along their first axis only.
    other_indices = [0] * (array.ndim - 1)
    for number in range(first_file, end_file):
        name = array.metadata.encode_chunk_key((number, *other_indices))
        file = f"{folder}/{name}"
        if not file_system.isfile(file) or not file_system.size(file):
            raise ValueError(f"{name} is missing or empty")
