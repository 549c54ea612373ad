"""Reader of a single data file; for an invalid record, it raises an error with the row of the record.

The same readers load plain and compressed files, single files and files in folders.
"""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pyarrow as pa

from attnmix.core.errors import InputError, first_line
from attnmix.data.arrow_tables import read_arrow, read_parquet
from attnmix.data.columns import Columns
from attnmix.data.formats import SEPARATORS, data_suffix
from attnmix.data.json_records import read_json
from attnmix.data.opening import DECOMPRESSION_ERRORS, open_bytes
from attnmix.data.separated import read_separated

READ_ERRORS = (ValueError, OSError, csv.Error, pa.ArrowException, *DECOMPRESSION_ERRORS)


def read_file(
    path: Path, columns: Columns | None = None, shown: str | None = None, separator: str | None = None
) -> pd.DataFrame:
    """Return the `columns` (default: all) of a file, with rows counted from 1; fields of csv and tsv are strings.

    `shown` is the name of the file in messages, and `separator` replaces the suffix's default separator. Raise
    `InputError` with the file, the row and the problem.
    """
    shown = shown or str(path)
    with read_errors(path, shown):
        if path.stat().st_size == 0:
            raise ValueError("it is empty")
        frame = _read_format(path, columns, shown, separator)
        if frame.empty:
            raise ValueError("it contains no rows")
    return frame.set_axis(pd.RangeIndex(1, len(frame) + 1, name="row"))


@contextmanager
def read_errors(path: Path, shown: str) -> Iterator[None]:
    """Convert read errors of a file into an `InputError` with the file name `shown`."""
    try:
        yield
    except UnicodeDecodeError as error:
        line = _locate_undecodable_line(path)
        problem = f"{line} is not UTF-8 ({error.object[error.start : error.start + 1]!r})"
        advice = "convert the file to UTF-8 from its encoding, such as latin-1 or windows-1252"
        raise InputError(f"dataset.name: {shown}: {problem}; {advice}") from error
    except InputError:
        raise
    except READ_ERRORS as error:
        raise InputError(f"dataset.name: {shown}: {first_line(error)}") from error


def _read_format(path: Path, columns: Columns | None, shown: str, separator: str | None) -> pd.DataFrame:
    """Return the content of a file, loaded by the reader for its suffix."""
    suffix = data_suffix(path.name)
    if suffix == ".parquet":
        return read_parquet(path, columns, shown)
    if suffix == ".arrow":
        return read_arrow(path, columns, shown)
    with open_bytes(path) as content:
        if suffix in SEPARATORS:
            is_quoted = suffix != ".tsv"
            return read_separated(content, separator or SEPARATORS[suffix], is_quoted, columns, shown)
        has_object_per_line = suffix != ".json"
        return read_json(content, has_object_per_line, columns, shown)


def _locate_undecodable_line(path: Path) -> str:
    """Return a description of the first line that is not UTF-8, such as `line 3`.

    If this line is not found, because the file has changed, the description contains no number.
    """
    try:
        with open_bytes(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError:
                    return f"line {number}"
    except READ_ERRORS:
        pass
    return "a line, before the file was changed,"
