"""Readers of csv, with fields in double quotes (RFC 4180), and tsv, without quotes.

Both use Python's `csv` in strict mode. pandas and pyarrow interpret a stray quote as the start of a field that extends
to the next quote, and lose the rows in between (shown in tests/test_files.py).
"""

import csv
import io
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal

import pandas as pd

from attnmix.data.columns import SEPARATOR_NAMES, Columns, check_names, check_table_size

WELL_QUOTED = re.compile(r'"(?:[^"]|"")*"')
BYTE_ORDER_MARK = "\ufeff"


def read_separated(
    content: BinaryIO, separator: str, quoted: bool, columns: Columns | None, shown: str
) -> pd.DataFrame:
    """Return the fields of csv (`quoted`) or tsv as strings; every record must have as many fields as the header."""
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    with _allow_long_fields(), io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=separator, quoting=quoting, strict=True)
        records = _read_records(reader)
        _, names = next(records, (0, []))
        if not names:
            raise ValueError("it is empty")
        check_names(names, columns, shown, separator)
        selected = names if columns is None else list(columns.values())
        kept = [number for number, name in enumerate(names) if name in selected]
        values: list[list[str]] = [[] for _ in kept]
        header = _normalise_header(names)
        size = 0
        for row, record in records:
            if len(record) != len(names):
                count = f"row {row} (line {reader.line_num}) has {len(record)} of {len(names)} fields"
                raise ValueError(f"{count}; {_advise_on_ragged_rows(separator, quoted)}")
            if _normalise_field(record[0]) in header and _normalise_header(record) == header:
                problem = f"row {row} (line {reader.line_num}) repeats the header, as in joined files"
                raise ValueError(f"{problem}; remove this line")
            for column, number in zip(values, kept, strict=True):
                column.append(record[number])
                size += len(record[number])
            check_table_size(size)
    kept_names = [names[number] for number in kept]
    table = dict(zip(kept_names, values, strict=True))
    frame = pd.DataFrame(table, dtype=object)
    if not quoted:
        _warn_of_quotes(frame, shown)
    return frame


def _normalise_header(fields: Sequence[str]) -> list[str]:
    """Return the fields of a header in lower case and sorted, to detect repeated headers."""
    return sorted(_normalise_field(field) for field in fields)


def _normalise_field(field: str) -> str:
    """Return a field without surrounding spaces and byte order marks, in lower case."""
    return field.strip(f"{BYTE_ORDER_MARK} ").casefold()


def _read_records(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the index and the fields of each non-empty record; the header has index 0."""
    row, start = 0, 1
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            lines = f"line {start}" if reader.line_num <= start else f"lines {start} to {reader.line_num}"
            problem = f'row {row} ({lines}): a field begins with a quote (") but is not closed correctly ({error})'
            raise ValueError(f"{problem}; write quotes within a quoted field twice") from error
        start = reader.line_num + 1
        if record:
            yield row, record
            row += 1


@contextmanager
def _allow_long_fields() -> Iterator[None]:
    """Remove the field length limit of Python's `csv` (131,072 characters) for all readers of the process."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _advise_on_ragged_rows(separator: str, quoted: bool) -> str:
    """Return advice on a row with too many or too few fields."""
    if quoted:
        mark = SEPARATOR_NAMES.get(separator, repr(separator))
        return f"write as many fields as in the header, and put fields with {mark} in quotes"
    return 'tsv files do not use quotes ("); save a file with tabs or line breaks in its fields as csv or jsonl'


def _warn_of_quotes(frame: pd.DataFrame, shown: str) -> None:
    """Warn if all quotes in a tsv file follow csv's rules and some are doubled, because they remain in the texts."""
    doubled_row = None
    for name in frame:
        for row, value in enumerate(frame[name], 1):
            if '"' not in value:
                continue
            if not WELL_QUOTED.fullmatch(value):
                return
            if '""' in value[1:-1]:
                doubled_row = row if doubled_row is None else min(row, doubled_row)
    if doubled_row is not None:
        problem = f'quotes are doubled ("") as in csv, first in row {doubled_row}'
        logging.warning("%s: %s; in tsv files, quotes are part of the text; save the file as csv", shown, problem)
