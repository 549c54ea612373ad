"""Readers of parquet and arrow files; they read the rows in batches, and limit the size of the table."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from attnmix.data.columns import MAX_TABLE_BYTES, Columns, check_names, check_table_size
from attnmix.data.formats import compression_of, data_suffix
from attnmix.data.opening import expansion_limit, open_bytes

BATCH_ROWS = 2**14


def read_parquet(path: Path, columns: Columns | None, shown: str) -> pd.DataFrame:
    """Return the `columns` of a parquet file (None: all columns).

    Texts are read with dictionary encoding, so that repeated texts occupy memory only once.
    """
    limit = min(MAX_TABLE_BYTES, expansion_limit(path))
    with _open_seekable(path) as content:
        schema = pq.read_schema(content)
        check_names(schema.names, columns, shown)
        names = _select_names(schema, columns)
        text_names = [name for name in names if _is_text(schema.field(name).type)]
        with pq.ParquetFile(content, read_dictionary=text_names) as file:
            # Before reading, only the stored size is known; `_limit_batches` checks the size of the texts in memory.
            check_table_size(_read_stored_bytes(file.metadata, names), limit)
            batches = _limit_batches(file.iter_batches(BATCH_ROWS, columns=names), limit)
            schema_without_rows = None if batches else file.schema_arrow  # required if there are no batches
            table = pa.Table.from_batches(batches, schema_without_rows)
    return _convert_to_frame(_restore_types(table, schema, text_names))


def _restore_types(table: pa.Table, schema: pa.Schema, text_names: Sequence[str]) -> pa.Table:
    """Return the table with its dictionary-encoded columns `text_names` converted to their types in `schema`."""
    for number, name in enumerate(table.column_names):
        if name in text_names:
            declared_type = schema.field(name).type
            column = table.column(number).cast(declared_type)
            table = table.set_column(number, name, column)
    return table


def read_arrow(path: Path, columns: Columns | None, shown: str) -> pd.DataFrame:
    """Return the `columns` (None: all) of an arrow file in the stream format (used by `datasets`) or file format.

    `shown` is the name of the file in messages.
    """
    limit = min(MAX_TABLE_BYTES, expansion_limit(path))
    with _open_seekable(path) as content, _open_batches(content) as (schema, all_batches):
        check_names(schema.names, columns, shown)
        names = _select_names(schema, columns)
        selected_batches = (batch.select(names) for batch in all_batches)
        batches = _limit_batches(selected_batches, limit)
        fields = [schema.field(name) for name in names]
    table = pa.Table.from_batches(batches, pa.schema(fields))
    return _convert_to_frame(table)


def _select_names(schema: pa.Schema, columns: Columns | None) -> list[str]:
    """Return the names of the selected `columns` (None: all) in the order of the file."""
    if columns is None:
        return list(schema.names)
    return [name for name in schema.names if name in columns.values()]


def stored_class_names(path: Path, column: str) -> list[str] | None:
    """Return the class names of `column` that `datasets` stored in a parquet or arrow file, or None."""
    suffix = data_suffix(path.name)
    if suffix not in (".parquet", ".arrow"):
        return None
    with _open_seekable(path) as content:
        if suffix == ".parquet":
            metadata = pq.read_schema(content).metadata
        else:
            with _open_batches(content) as (schema, _):
                metadata = schema.metadata
    try:
        description = (metadata or {}).get(b"huggingface", b"{}")
        features = json.loads(description)["info"]["features"]
        return [str(name) for name in features[column]["names"]]
    except (KeyError, TypeError, ValueError):  # metadata of another program, or a column without classes
        return None


@contextmanager
def _open_seekable(path: Path) -> Iterator[Any]:
    """Yield a seekable file; compressed files are decompressed into memory."""
    with open_bytes(path) as content:
        if compression_of(path.name):
            yield pa.BufferReader(content.read())
        else:
            yield content


@contextmanager
def _open_batches(content: BinaryIO) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Yield the schema and the batches of an arrow file, which is in the file format or the stream format."""
    try:
        with pa.ipc.open_file(content) as file:
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
            yield file.schema, batches
            return
    except pa.ArrowInvalid:
        content.seek(0)
    with pa.ipc.open_stream(content) as stream:
        yield stream.schema, iter(stream)


def _limit_batches(batches: Iterator[pa.RecordBatch], limit: int) -> list[pa.RecordBatch]:
    """Return all batches; raise `ValueError` as soon as they exceed `limit` bytes."""
    kept = []
    size = 0
    for batch in batches:
        size += sum(_count_expanded_bytes(column) for column in batch.columns)
        check_table_size(size, limit)
        kept.append(batch)
    return kept


def _convert_to_frame(table: pa.Table) -> pd.DataFrame:
    """Validate a table, and return it as a data frame without dictionary encoding."""
    table.validate(full=True)  # checks that texts are UTF-8
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            column = table.column(number).cast(field.type.value_type)
            table = table.set_column(number, field.name, column)
    frame: pd.DataFrame = table.replace_schema_metadata().to_pandas()
    return frame


def _is_text(kind: pa.DataType) -> bool:
    """Return True for the types of strings and bytes."""
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind))


def _read_stored_bytes(metadata: pq.FileMetaData, names: Sequence[str]) -> int:
    """Return the uncompressed size of the columns `names` according to the metadata of a parquet file."""
    size = 0
    for group_number in range(metadata.num_row_groups):
        group = metadata.row_group(group_number)
        for column_number in range(group.num_columns):
            column = group.column(column_number)
            path = column.path_in_schema
            name, _, _ = path.partition(".")  # a nested column has several paths
            if path in names or name in names:
                size += column.total_uncompressed_size
    return size


def _count_expanded_bytes(column: pa.Array) -> int:
    """Return the approximate size of a column in bytes, as if its texts were not dictionary-encoded."""
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    if not _is_text(column.type.value_type):
        return int(column.indices.nbytes)  # numbers are about as large as their indices
    lengths_of_values = pc.binary_length(column.dictionary)
    lengths = lengths_of_values.take(column.indices)
    total = pc.sum(lengths).as_py()
    return int(total or 0)
