"""Reviews in one csv, tsv, jsonl or parquet file, whose rows know their line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from stages.errors import InputError, first_line

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
            return pd.read_parquet(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".jsonl":
                return _objects(file)
            separator = SEPARATORS[path.suffix.lower()]
            lines = _lines_of_records(file, separator)
        # A review that says "None" or "NA" is a text.
        table = pd.read_csv(path, sep=separator, keep_default_na=False, na_values=[""], index_col=False)
        return table.set_axis(pd.Index(lines, name=LINE)) if len(lines) == len(table) else table
    except UnicodeDecodeError as error:
        raise InputError(f"dataset.name: {path} is not UTF-8 ({error.reason}); save it as UTF-8") from error
    except (ValueError, OSError, csv.Error) as error:
        raise InputError(f"dataset.name: {path}: {first_line(error)}") from error


def _objects(file: Iterable[str]) -> pd.DataFrame:
    lines, rows = [], []
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                found = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is no JSON object: {error.msg}; one object on each line") from error
            if not isinstance(found, dict):
                raise ValueError(f"line {number} is no JSON object but a {type(found).__name__}; one on each line")
            lines.append(number)
            rows.append(found)
    if not rows:
        raise ValueError("it is empty; one JSON object on each line")
    return pd.DataFrame(rows, index=pd.Index(lines, name=LINE))


def _lines_of_records(file: Iterable[str], separator: str) -> list[int]:
    """The line on which each record after the header begins; `ValueError` where the file is no table of its kind."""
    records = csv.reader(file, delimiter=separator)
    header: list[str] = []
    lines: list[int] = []
    begins = 1
    for record in records:
        if len(record) > 1 or any(map(str.strip, record)):  # pandas skips empty lines too
            if not header:
                header = _checked_header(record, separator)
            elif len(record) != len(header):
                raise ValueError(
                    f"line {begins} has {_fields(record)}, the header {len(header)}; put a text that holds "
                    f"{separator!r} or a line break in double quotes, and close each quote"
                )
            else:
                lines.append(begins)
        begins = records.line_num + 1
    if not lines:
        raise ValueError("it holds no reviews; a header, then a review on each line")
    return lines


def _checked_header(header: list[str], separator: str) -> list[str]:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise ValueError(f"it has more than one column {', '.join(twice)}; each name once")
    other = next((each for each in (";", "\t", ",", "|") if each != separator and each in header[0]), None)
    if other and len(header) == 1:
        named = ", or name it .tsv" if other == "\t" else ""
        raise ValueError(
            f"it looks separated by {other!r}, and is read as separated by {separator!r}; save it so{named}"
        )
    return header


def _fields(record: list[Any]) -> str:
    return f"{len(record)} field{'s' * (len(record) != 1)}"
