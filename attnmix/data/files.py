"""Reviews in one csv, tsv, jsonl or parquet file, whose rows know their line."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from attnmix.core.errors import InputError, first_line

SEPARATORS = {".csv": ",", ".tsv": "\t"}
TEXT_FILES = (*SEPARATORS, ".jsonl")
SUFFIXES = (*TEXT_FILES, ".parquet")
LINE = "line"
"""Name of the index of a table read from a text file: where an editor finds the row."""

csv.field_size_limit(2**31 - 1)  # of characters; a long review has more than the library allows


def read_file(path: Path) -> pd.DataFrame:
    """The file's table; `InputError` names the file and the line, and says what to do."""
    try:
        if path.suffix.lower() == ".parquet":
            return _columns(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".jsonl":
                return _objects(file)
            return _records(file, SEPARATORS[path.suffix.lower()])
    except UnicodeDecodeError as error:
        where = _first_undecodable(path.read_bytes())
        raise InputError(f"dataset.name: {path} is not UTF-8{where} ({error.reason}); save it as UTF-8") from error
    except (ValueError, OSError, csv.Error, pa.ArrowException) as error:
        raise InputError(f"dataset.name: {path}: {first_line(error)}") from error


def _first_undecodable(content: bytes) -> str:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        return f" in line {line}"
    return ""


def _columns(path: Path) -> pd.DataFrame:
    _check_names(pq.read_schema(path).names)
    table = pq.read_table(path)
    table.validate(full=True)  # that strings are UTF-8
    frame: pd.DataFrame = table.to_pandas()
    return frame


def _objects(file: Iterable[str]) -> pd.DataFrame:
    lines, rows = [], []
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                found = json.loads(line, object_pairs_hook=_object)
            except ValueError as error:
                reason = getattr(error, "msg", error)
                raise ValueError(f"line {number} is no JSON object: {reason}; one object on each line") from error
            if not isinstance(found, dict):
                raise ValueError(f"line {number} is no JSON object but a {type(found).__name__}; one on each line")
            lines.append(number)
            rows.append(found)
    if not rows:
        raise ValueError("it is empty; one JSON object on each line")
    return pd.DataFrame(rows, index=pd.Index(lines, name=LINE), dtype=object)  # a string may hold half a character


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"it names {', '.join(_twice([name for name, _ in pairs]))} more than once")
    return found


def _records(file: Iterable[str], separator: str) -> pd.DataFrame:
    """Every field as it stands there, the index the line on which its record begins.

    `ValueError` where the file is no table of its kind.
    """
    records = csv.reader(file, delimiter=separator)
    header: list[str] = []
    lines: list[int] = []
    rows: list[list[str]] = []
    begins = 1
    for record in records:
        if len(record) > 1 or any(map(str.strip, record)):  # an empty line is no record
            if not header:
                header = _checked_header(record, separator)
            elif len(record) != len(header):
                raise ValueError(
                    f"line {begins} has {_fields(record)}, the header {len(header)}; put a text that holds "
                    f"{separator!r} or a line break in double quotes, and close each quote"
                )
            else:
                lines.append(begins)
                rows.append(record)
        begins = records.line_num + 1
    if not lines:
        raise ValueError("it holds no reviews; a header, then a review on each line")
    return pd.DataFrame(rows, index=pd.Index(lines, name=LINE), columns=header)


def _checked_header(header: list[str], separator: str) -> list[str]:
    _check_names(header)
    other = next((each for each in (";", "\t", ",", "|") if each != separator and each in header[0]), None)
    if other and len(header) == 1:
        named = ", or name it .tsv" if other == "\t" else ""
        raise ValueError(
            f"it looks separated by {other!r}, and is read as separated by {separator!r}; save it so{named}"
        )
    return header


def _check_names(columns: list[str]) -> None:
    if _twice(columns):
        raise ValueError(f"it has more than one column {', '.join(_twice(columns))}; each name once")


def _twice(names: list[str]) -> list[str]:
    return sorted(name for name, number in Counter(names).items() if number > 1)


def _fields(record: list[Any]) -> str:
    return f"{len(record)} field{'s' * (len(record) != 1)}"
