"""Reviews in one csv, tsv, jsonl or parquet file."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from attnmix.core.errors import InputError, first_line

SEPARATORS = {".csv": ",", ".tsv": "\t"}
TEXT_FILES = (*SEPARATORS, ".jsonl")
SUFFIXES = (*TEXT_FILES, ".parquet")
MAX_BLOCK_BYTES = 2**30  # of a csv file that is parsed at once; no record may be longer


def read_file(path: Path) -> pd.DataFrame:
    """Return the file's table, its rows counted from 1, every field of csv and tsv as text.

    Raises `InputError`, which names the file and what is wrong, for a file that is no table of its kind.
    """
    suffix = path.suffix.lower()
    try:
        if suffix == ".jsonl":
            frame = _read_jsonl(path)
        else:
            names = pq.read_schema(path).names if suffix == ".parquet" else _header(path, SEPARATORS[suffix])
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise ValueError(f"it has more than one column {', '.join(repeated)}; each name once")
            table = pq.read_table(path) if suffix == ".parquet" else _read_csv(path, SEPARATORS[suffix], names)
            table.validate(full=True)  # that texts are UTF-8
            frame = table.to_pandas()
        if frame.empty:
            raise ValueError("it holds no reviews")
    except (ValueError, OSError, csv.Error, pa.ArrowException) as error:
        raise InputError(f"dataset.name: {path}: {first_line(error)}") from error
    return frame.set_axis(pd.RangeIndex(1, len(frame) + 1, name="row"))


def _header(path: Path, separator: str) -> list[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return next((record for record in csv.reader(file, delimiter=separator) if record), [])


def _read_csv(path: Path, separator: str, names: list[str]) -> pa.Table:
    block = min(path.stat().st_size + 1, MAX_BLOCK_BYTES)
    return pc.read_csv(
        path,
        pc.ReadOptions(block_size=block),
        pc.ParseOptions(delimiter=separator, newlines_in_values=True),
        pc.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
    )


def _read_jsonl(path: Path) -> pd.DataFrame:
    rows = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number} is no JSON object: {error}; one object on each line") from error
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is no JSON object but a {type(row).__name__}; one on each line")
                rows.append(row)
    return pd.DataFrame(rows, dtype=object)  # a string may hold half a character
