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
MIN_GROUP_ROWS = 2**16  # per row group of a parquet file; the statistics of all groups are in memory


def write_metrics(name: str, metrics: dict[str, Any], folder: Path) -> None:
    """Write `<name>.json` with numbers rounded to six significant digits; NaN becomes null."""
    with atomic_path(folder / f"{name}.json") as part:
        part.write_text(json.dumps(_rounded(metrics), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(part) for key, part in value.items()}
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
    return value


def write_plot(name: str, table: pd.DataFrame | Iterable[pd.DataFrame], folder: Path) -> None:
    """Write `<folder>/<name>.csv` with numbers rounded to six decimals; one chunk at a time is in memory."""
    with atomic_path(folder / f"{name}.csv") as part, part.open("w", encoding="utf-8", newline="") as file:
        chunks = [table] if isinstance(table, pd.DataFrame) else table
        for number, rows in enumerate(chunks):
            rows.round(DIGITS).to_csv(file, index=False, header=number == 0, lineterminator="\n")


def write_ratios(folder: Path, methods: Sequence[str], documents: Iterable[pd.DataFrame]) -> None:
    """Write the rows of all texts to `tokens.parquet` in `folder`; only the rows of one row group are in memory."""
    columns = {"checkpoint": pa.string(), "document": pa.string(), "position": pa.int32(), "layer": pa.int32()}
    for method in methods:
        columns[method] = pa.float32()
    columns.update({"token": pa.string(), "word": pa.int32(), "token_class": pa.string()})
    schema = pa.schema(columns)
    with writing(folder / "tokens.parquet") as path, pq.ParquetWriter(path, schema, **PARQUET_OPTIONS) as writer:
        group = [schema.empty_table()]
        for rows in documents:
            group.append(pa.Table.from_pandas(rows, schema, preserve_index=False).replace_schema_metadata())
            if sum(map(len, group)) >= MIN_GROUP_ROWS:
                writer.write_table(pa.concat_tables(group))
                group = [schema.empty_table()]
        writer.write_table(pa.concat_tables(group))


def write_matrix(
    folder: Path, name: str, array: npt.NDArray[Any], dimensions: Sequence[str], attributes: dict[str, Any]
) -> None:
    """Write an array as `<name>.zarr`, in chunks of whole layers with up to 1 MB (at least one layer)."""
    layers = max(1, CHUNK_BYTES // max(1, array[0].nbytes))
    chunks = (min(layers, len(array)), *array.shape[1:])
    options = {"chunks": chunks, "dimension_names": dimensions, "attributes": attributes}
    create_array(folder / f"{name}.zarr", data=array, **options)


def write_heads(folder: Path, parts: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write each of the `parts` of a text's heads as an array; without parts, create an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in parts.items():
        write_matrix(folder, name, array, DIMENSIONS[name], {})


def write_by_site(name: str, tokens: pd.DataFrame, columns: Mapping[Site, Mapping[str, Any]], folder: Path) -> None:
    """Write the table `columns_by_site` as `<name>.parquet`."""
    write_table(folder / f"{name}.parquet", columns_by_site(tokens, columns))


def columns_by_site(tokens: pd.DataFrame, columns: Mapping[Site, Mapping[str, Any]]) -> pd.DataFrame:
    """Return a table of `document, position, layer, point` and the `columns` of each site, in the order of sites."""
    sites = list(columns)
    table = pd.concat([tokens[["document", "position"]]] * len(sites), ignore_index=True)
    table["layer"] = np.repeat(np.array([site.layer for site in sites], np.int32), len(tokens))
    table["point"] = np.repeat([site.point for site in sites], len(tokens))
    for name in columns[sites[0]]:
        values = [columns[site][name] for site in sites]
        table[name] = list(chain(*values)) if isinstance(values[0], list) else np.concatenate(values)
    return table
