"""Read one csv, tsv, jsonl or parquet file; a record that breaks the rules of its format is an error with its row.

csv has fields in double quotes (RFC 4180), tsv has none. Both are read by Python's `csv` in its strict mode: pandas and
pyarrow take a stray quote for the start of a field, which ends at the next quote, and lose the rows between
(tests/test_files.py shows it).
"""

import csv
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from attnmix.core.errors import InputError, first_line
from attnmix.data.formats import SEPARATORS, check_start

SEPARATOR_NAMES = {",": "commas (,)", ";": "semicolons (;)", "\t": "tabs", "|": "bars (|)"}
MAX_TABLE_BYTES = 2**32  # of the columns that are read, in memory
MAX_EXPANSION = 100  # largest size of a compressed file once it is read, in multiples of its size, above FREE_BYTES
FREE_BYTES = 2**28
BATCH_ROWS = 2**14
MAX_SHOWN_NAMES, MAX_SHOWN_LETTERS = 12, 40  # of columns in a message
WELL_QUOTED = re.compile(r'"(?:[^"]|"")*"')
Columns = Mapping[str, str]
"""Names of columns in a file, by the parameter that names each: `text`, `text_pair`, `label`, `group`."""


def read_file(
    path: Path, columns: Columns | None = None, shown: str | None = None, separator: str | None = None
) -> pd.DataFrame:
    """Return the `columns` (else all) of a file, rows counted from 1; fields of csv and tsv are text.

    `shown` is the file's name in messages, and `separator` another one than the suffix says. Raises `InputError`, which
    names the file, the row and what is wrong.
    """
    shown, suffix = shown or str(path), path.suffix.lower()
    try:
        check_start(path)
        if suffix == ".parquet":
            frame = _read_parquet(path, columns, shown)
        elif suffix == ".jsonl":
            frame = _read_jsonl(path, columns, shown)
        else:
            frame = _read_separated(path, separator or SEPARATORS[suffix], columns, shown)
        if frame.empty:
            raise ValueError("it holds no reviews")
    except UnicodeDecodeError as error:
        problem = f"line {_undecodable_line(path)} is not UTF-8 ({error.object[error.start : error.start + 1]!r})"
        advice = "save the file as UTF-8, from latin-1, windows-1252 or whatever it is in"
        raise InputError(f"dataset.name: {shown}: {problem}; {advice}") from error
    except (ValueError, OSError, csv.Error, pa.ArrowException) as error:
        raise InputError(f"dataset.name: {shown}: {first_line(error)}") from error
    return frame.set_axis(pd.RangeIndex(1, len(frame) + 1, name="row"))


def stored_class_names(path: Path, column: str) -> list[str] | None:
    """Return the names of the classes that `datasets` stores beside a column of numbers in a parquet file."""
    if path.suffix.lower() != ".parquet":
        return None
    metadata = pq.read_schema(path).metadata or {}
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        return [str(name) for name in features[column]["names"]]
    except (KeyError, TypeError, ValueError):  # another program's, or no classes
        return None


def _read_separated(path: Path, separator: str, columns: Columns | None, shown: str) -> pd.DataFrame:
    """Read csv or tsv; every record must have as many fields as the header."""
    quoted = path.suffix.lower() != ".tsv"
    with _long_fields(), path.open(encoding="utf-8-sig", newline="") as file:
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
        reader = csv.reader(file, delimiter=separator, quoting=quoting, strict=True)
        records = _records(reader)
        _, names = next(records, (0, []))
        check_names(names, columns, shown, separator)
        kept = [number for number, name in enumerate(names) if columns is None or name in columns.values()]
        values: list[list[str]] = [[] for _ in kept]
        size = 0
        for row, record in records:
            if len(record) != len(names):
                count = f"row {row} (line {reader.line_num}) has {len(record)} of {len(names)} fields"
                raise ValueError(f"{count}; {_ragged_advice(separator, quoted)}")
            for column, number in zip(values, kept, strict=True):
                column.append(record[number])
                size += len(record[number])
            _check_table_size(size, MAX_TABLE_BYTES)
    frame = pd.DataFrame(dict(zip([names[number] for number in kept], values, strict=True)), dtype=object)
    if not quoted:
        _warn_of_quotes(frame, shown)
    return frame


def _records(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the fields of each record that is no empty line; the header has number 0."""
    row, start = 0, 1
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            lines = f"line {start}" if reader.line_num <= start else f"lines {start} to {reader.line_num}"
            problem = f'row {row} ({lines}): a field begins with a quote (") that does not end it ({error})'
            raise ValueError(f"{problem}; within a field in quotes each quote is written twice") from error
        start = reader.line_num + 1
        if record:
            yield row, record
            row += 1


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lift the limit of Python's `csv` on the length of a field, 131,072 letters, which is one for all readers."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _ragged_advice(separator: str, quoted: bool) -> str:
    if quoted:
        mark = SEPARATOR_NAMES.get(separator, repr(separator))
        return f"each row has as many as the header, and a field that holds {mark} is in quotes"
    return 'tsv is read without quotes ("): save a file with tabs or line breaks in its fields as csv or jsonl'


def _warn_of_quotes(frame: pd.DataFrame, shown: str) -> None:
    """Warn where all quotes in a tsv file are those that a writer of csv adds, which stay in the texts."""
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
        problem = f'the quotes of row {doubled_row} and others are doubled ("") as in csv'
        logging.warning("%s: %s; tsv has no quotes, so they stay in the text: save it as csv", shown, problem)


def _read_jsonl(path: Path, columns: Columns | None, shown: str) -> pd.DataFrame:
    names: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    size = 0
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} is no JSON object: {error}; one object on each line") from error
            if not isinstance(record, dict):
                raise ValueError(f"line {number} is no JSON object; one object on each line")
            names.update(dict.fromkeys(record))
            if columns is not None:
                record = {name: record[name] for name in columns.values() if name in record}
            rows.append(record)
            size += sum(len(value) for value in record.values() if isinstance(value, str))
            _check_table_size(size, MAX_TABLE_BYTES)
    if rows:
        check_names(list(names), columns, shown)
    return pd.DataFrame(rows, dtype=object)  # a string may hold half a character


def _read_parquet(path: Path, columns: Columns | None, shown: str) -> pd.DataFrame:
    """Read by batches, each repeated text once, until the table grows beyond what such a file may hold."""
    schema = pq.read_schema(path)
    check_names(schema.names, columns, shown)
    names = [name for name in schema.names if columns is None or name in columns.values()]
    texts = [name for name in names if _is_text(schema.field(name).type)]
    limit = min(MAX_TABLE_BYTES, max(FREE_BYTES, MAX_EXPANSION * path.stat().st_size))
    batches, size = [], 0
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        _check_table_size(_stored_bytes(file.metadata, names), limit)
        for batch in file.iter_batches(BATCH_ROWS, columns=names):
            size += sum(_expanded_bytes(column) for column in batch.columns)
            _check_table_size(size, limit)
            batches.append(batch)
        table = pa.Table.from_batches(batches, None if batches else file.schema_arrow)
    for number, name in enumerate(table.column_names):
        if name in texts:
            table = table.set_column(number, name, table.column(name).cast(schema.field(name).type))
    table.validate(full=True)  # that texts are UTF-8
    frame: pd.DataFrame = table.to_pandas()
    return frame


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind))


def _stored_bytes(metadata: pq.FileMetaData, names: Sequence[str]) -> int:
    """Return the size of these columns without compression, as the file declares it."""
    size = 0
    for group_number in range(metadata.num_row_groups):
        group = metadata.row_group(group_number)
        for column_number in range(group.num_columns):
            column = group.column(column_number)
            if column.path_in_schema in names or column.path_in_schema.split(".")[0] in names:
                size += column.total_uncompressed_size
    return size


def _expanded_bytes(column: pa.Array) -> int:
    """Return the size of a column with each of its texts written out."""
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    if not _is_text(column.type.value_type):
        return int(column.indices.nbytes)
    lengths = pc.binary_length(column.dictionary)
    return int(pc.sum(lengths.take(column.indices)).as_py() or 0)


def _check_table_size(size: int, limit: int) -> None:
    if size > limit:
        allowed = f"{limit / 1e9:.3g} GB are allowed for a file of its size"
        raise ValueError(f"its texts take more memory than a data set's; {allowed}; take a part of it")


def check_names(names: Sequence[str], columns: Columns | None, shown: str, separator: str | None = None) -> None:
    """Raise `InputError` where a column of `columns` is missing, and `ValueError` where it is there twice."""
    wanted = list(names) if columns is None else list(columns.values())
    repeated = list(dict.fromkeys(name for name in wanted if names.count(name) > 1))
    if repeated:
        raise ValueError(f"it has more than one column {shown_names(repeated)}; each name once")
    for key, name in (columns or {}).items():
        if name not in names:
            problem = f"{shown} has no column {name!r}; it has {shown_names(names)}"
            parameter = f"dataset.{key.removesuffix('_pair')}_column"
            raise InputError(f"{parameter}: {problem}{_header_hint(names, wanted, separator)}")


def _header_hint(names: Sequence[str], wanted: Sequence[str], separator: str | None) -> str:
    """Return what is wrong with a header that lacks a wanted name, where that can be seen."""
    if separator is None:
        return ""
    header = separator.join(names)
    for other, description in SEPARATOR_NAMES.items():
        parts = [part.strip(' "') for part in header.split(other)]
        if other != separator and len(parts) > 1 and (len(names) == 1 or {*parts} & {*wanted}):
            expected = SEPARATOR_NAMES.get(separator, repr(separator))
            return f"; its fields are separated by {description}, and {expected} are expected: save it with those"
    if {name.strip('"') for name in names if name.startswith('"')} & {*wanted}:
        return '; its names are in quotes ("), and tsv is read without quotes: save it as csv'
    if any(len(name) > MAX_SHOWN_LETTERS for name in names):
        return "; the first line must be a header with the names of the columns"
    return ""


def shown_names(names: Sequence[Any]) -> str:
    """Return the first names of columns for a message, long ones cut."""
    words = []
    for name in map(str, names):
        words.append(repr(name if len(name) <= MAX_SHOWN_LETTERS else f"{name[:MAX_SHOWN_LETTERS]}..."))
    more = len(words) - MAX_SHOWN_NAMES
    return ", ".join([*words[:MAX_SHOWN_NAMES], f"and {more} more"] if more > 0 else words) or "none"


def _undecodable_line(path: Path) -> int:
    """Return the number of the first line that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    raise ValueError(f"{path} was changed while it was read")
