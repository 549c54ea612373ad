"""Reader of csv files, with fields in double quotes (RFC 4180), and tsv files, without quotes.

Both formats are read by Python's `csv` in strict mode. pandas and pyarrow interpret a stray quote as the start of a
field that extends to the next quote, and lose the rows in between (shown in tests/test_files.py).
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
    """Return the fields of a csv file (`quoted`) or tsv file as strings, with only the `columns` (None: all).

    Raise `ValueError` for a record that repeats the header or has a different number of fields. `shown` is the name of
    the file in messages.
    """
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    with _allow_long_fields(), io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=separator, quoting=quoting, strict=True)
        records = _read_records(reader)
        _, names = next(records, (0, []))  # the fields of the header, which is the first record
        if not names:
            raise ValueError("it is empty")
        check_names(names, columns, shown, separator)
        selected = names if columns is None else list(columns.values())
        index_by_name = {name: index for index, name in enumerate(names) if name in selected}
        table: dict[str, list[str]] = {name: [] for name in index_by_name}  # the fields of each selected column
        header = _normalise_header(names)
        size = 0
        for row, record in records:
            problem = _find_problem(record, header, separator, quoted)
            if problem is not None:
                raise ValueError(f"row {row} (line {reader.line_num}) {problem}")
            for name, index in index_by_name.items():
                table[name].append(record[index])
                size += len(record[index])
            check_table_size(size)
    frame = pd.DataFrame(table, dtype=object)
    if not quoted:
        _warn_of_quotes(frame, shown)
    return frame


def _find_problem(record: Sequence[str], header: Sequence[str], separator: str, quoted: bool) -> str | None:
    """Return the problem of a record that repeats the normalised `header`, or has a different number of fields.

    Return None for a valid record.
    """
    if len(record) != len(header):
        return f"has {len(record)} of {len(header)} fields; {_advise_on_ragged_rows(separator, quoted)}"
    if _normalise_field(record[0]) in header and _normalise_header(record) == header:
        return "repeats the header, as in joined files; remove this line"
    return None


def _normalise_header(fields: Sequence[str]) -> list[str]:
    """Return the fields of a header in lower case and sorted, to detect repeated headers."""
    return sorted(_normalise_field(field) for field in fields)


def _normalise_field(field: str) -> str:
    """Return a field without surrounding spaces and byte order marks, in lower case."""
    return field.strip(f"{BYTE_ORDER_MARK} ").casefold()


def _read_records(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the index and the fields of each non-empty record; the header has index 0.

    Raise `ValueError`, with the lines of the record, for a quoted field that is not closed correctly.
    """
    row = 0
    first_line = 1
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            last_line = reader.line_num
            lines = f"line {first_line}" if last_line <= first_line else f"lines {first_line} to {last_line}"
            problem = f'row {row} ({lines}): a field begins with a quote (") but is not closed correctly ({error})'
            raise ValueError(f"{problem}; write quotes within a quoted field twice") from error
        first_line = reader.line_num + 1
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
    """Warn about a tsv file that was probably written with csv quoting, because the quotes remain in the texts.

    In such a file, every field that contains quotes is enclosed in quotes as in csv files, and some inner quotes are
    doubled.
    """
    rows_with_doubled_quotes = []
    for name in frame:
        for row, value in enumerate(frame[name], 1):
            if '"' not in value:
                continue
            if not WELL_QUOTED.fullmatch(value):
                return  # the file does not use csv quoting
            content = value[1:-1]
            if '""' in content:
                rows_with_doubled_quotes.append(row)
    if rows_with_doubled_quotes:
        problem = f'quotes are doubled ("") as in csv, first in row {min(rows_with_doubled_quotes)}'
        logging.warning("%s: %s; in tsv files, quotes are part of the text; save the file as csv", shown, problem)
