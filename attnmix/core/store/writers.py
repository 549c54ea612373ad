"""Writers of results: tables and metrics in `reports/`, larger arrays and tables in `features/`.

The output folder is an argument of each writer. `runs.py` reads these files, and `features.py` stores vectors.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from attnmix.core.names import Site
from attnmix.core.store.files import CHUNK_BYTES, PARQUET_OPTIONS, atomic_path, create_array, write_table, writing
from attnmix.core.store.heads import DIMENSIONS

DIGITS = 6
MIN_GROUP_ROWS = 2**16
"""Minimum number of rows in a row group of a parquet file: the statistics of all row groups must fit into memory."""


def write_metrics(name: str, metrics: dict[str, Any], folder: Path) -> None:
    """Write `<name>.json` with numbers rounded to six significant digits; NaN becomes null."""
    rounded = _round_numbers(metrics)
    text = json.dumps(rounded, indent=2, allow_nan=False)
    with atomic_path(folder / f"{name}.json") as part:
        part.write_text(f"{text}\n", encoding="utf-8")


def _round_numbers(value: Any) -> Any:
    """Return a value or nested dictionary with rounded floats; NaN and infinity are replaced by None."""
    if isinstance(value, dict):
        return {str(key): _round_numbers(part) for key, part in value.items()}
    if not isinstance(value, float):
        return value
    if not np.isfinite(value):
        return None
    digits = f"{value:.{DIGITS}g}"
    return float(digits)


def write_plot(name: str, table: pd.DataFrame | Iterable[pd.DataFrame], folder: Path) -> None:
    """Write a table, or consecutive chunks of it, to `<folder>/<name>.csv` with numbers rounded to six decimals."""
    chunks = [table] if isinstance(table, pd.DataFrame) else table
    with atomic_path(folder / f"{name}.csv") as part, part.open("w", encoding="utf-8", newline="") as file:
        for number, rows in enumerate(chunks):
            is_first = number == 0
            rounded = rows.round(DIGITS)
            rounded.to_csv(file, index=False, header=is_first, lineterminator="\n")


def write_ratios(folder: Path, methods: Sequence[str], documents: Iterable[pd.DataFrame]) -> None:
    """Write the ratio tables of all texts to `tokens.parquet` in `folder`; one row group at a time is in memory.

    `documents` yields the table of each text, and `methods` are the names of its ratio columns.
    """
    schema = _build_ratio_schema(methods)
    with writing(folder / "tokens.parquet") as path, pq.ParquetWriter(path, schema, **PARQUET_OPTIONS) as writer:
        empty_table = schema.empty_table()
        group = [empty_table]  # the tables of a row group; `concat_tables` requires at least one table
        group_rows = 0
        for rows in documents:
            table = pa.Table.from_pandas(rows, schema, preserve_index=False)
            group.append(table.replace_schema_metadata())  # without the metadata of pandas
            group_rows += len(table)
            if group_rows >= MIN_GROUP_ROWS:
                writer.write_table(pa.concat_tables(group))
                group = [empty_table]
                group_rows = 0
        writer.write_table(pa.concat_tables(group))  # the last row group, which may be smaller


def _build_ratio_schema(methods: Sequence[str]) -> pa.Schema:
    """Return the columns of `tokens.parquet` with their types, with one column per ratio."""
    columns = {"checkpoint": pa.string(), "document": pa.string(), "position": pa.int32(), "layer": pa.int32()}
    for method in methods:
        columns[method] = pa.float32()
    columns["token"] = pa.string()
    columns["word"] = pa.int32()
    columns["token_class"] = pa.string()
    return pa.schema(columns)


def write_matrix(
    folder: Path, name: str, array: npt.NDArray[Any], dimensions: Sequence[str], attributes: dict[str, Any]
) -> None:
    """Write an array `[layers, ...]` as `<name>.zarr`, in chunks of as many layers as fit into 1 MB (at least one)."""
    layer_bytes = max(1, array[0].nbytes)
    chunk_layers = max(1, CHUNK_BYTES // layer_bytes)
    chunk_layers = min(chunk_layers, len(array))
    options = {
        "chunks": (chunk_layers, *array.shape[1:]),
        "dimension_names": dimensions,
        "attributes": attributes,
    }
    create_array(folder / f"{name}.zarr", data=array, **options)


def write_heads(folder: Path, parts: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write the arrays in `parts` (the attention heads of a text); if `parts` is empty, create an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in parts.items():
        write_matrix(folder, name, array, DIMENSIONS[name], {})


def write_by_site(name: str, tokens: pd.DataFrame, columns: Mapping[Site, Mapping[str, Any]], folder: Path) -> None:
    """Write the result of `columns_by_site` to `<name>.parquet` in `folder`."""
    write_table(folder / f"{name}.parquet", columns_by_site(tokens, columns))


def columns_by_site(tokens: pd.DataFrame, columns: Mapping[Site, Mapping[str, Any]]) -> pd.DataFrame:
    """Return a table of `document, position, layer, point` and further columns, with one row per site and token.

    `columns` contains the further columns of each site by name, with one value per token: a list or an array. All sites
    have the same columns. The rows are ordered by site, then by token.
    """
    sites = list(columns)
    layers = np.array([site.layer for site in sites], np.int32)
    points = [site.point for site in sites]
    tokens_of_site = tokens[["document", "position"]]
    table = pd.concat([tokens_of_site] * len(sites), ignore_index=True)
    table["layer"] = np.repeat(layers, len(tokens))
    table["point"] = np.repeat(points, len(tokens))
    for name, first_values in columns[sites[0]].items():
        values_by_site = [columns[site][name] for site in sites]
        if isinstance(first_values, list):
            table[name] = list(chain.from_iterable(values_by_site))
        else:
            table[name] = np.concatenate(values_by_site)
    return table
