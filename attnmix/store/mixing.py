"""What `measure` keeps in `features/measure/`: the ratios of every token, and the contribution matrices."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from attnmix.store.files import (
    CHECKED,
    CHUNK_BYTES,
    create_array,
    made,
    open_array,
    read_array,
    read_table,
    whole,
    writing,
)

MIXING = Path("features/measure")
TOKENS = "tokens.parquet"
LAYER_PARTS = "layer_parts.json"
GROUP_ROWS = 2**16  # of the table of tokens at least: what a parquet file says of its groups is all in memory


class TokenRatios(NamedTuple):
    """One document in one checkpoint; everything but the first two and the ratios is `[tokens]`."""

    checkpoint: str
    document: str
    tokens: list[str]
    words: list[int | None]
    classes: list[str]
    in_statistics: npt.NDArray[np.bool_]
    ratios_MLT: npt.NDArray[np.float32]  # [methods, layers, tokens]


def write_layer_parts(folder: Path, parts: Sequence[Sequence[str]]) -> None:
    """Write by stack which norms its layers have, and `parallel` where their sublayers stand beside each other."""
    with whole(folder / LAYER_PARTS) as path:
        path.write_text(json.dumps(parts) + "\n", encoding="utf-8")


def read_layer_parts() -> list[list[str]]:
    """Return what `write_layer_parts` wrote."""
    parts: list[list[str]] = json.loads(made(MIXING / LAYER_PARTS, "measure").read_text(encoding="utf-8"))
    return parts


def write_ratios(folder: Path, methods: Sequence[str], measured: Iterable[TokenRatios]) -> None:
    """Write `tokens.parquet` under `folder`, some documents in memory at a time."""
    schema = pa.schema(
        [
            ("checkpoint", pa.string()),
            ("document", pa.string()),
            ("position", pa.int32()),
            ("layer", pa.int32()),
            *((method, pa.float32()) for method in methods),
            ("token", pa.string()),
            ("word", pa.int32()),
            ("token_class", pa.string()),
            ("in_statistics", pa.bool_()),
        ]
    )
    with writing(folder / TOKENS) as path, pq.ParquetWriter(path, schema, **CHECKED) as writer:
        group: list[pa.Table] = []
        for each in measured:
            layers, length = each.ratios_MLT.shape[1:]
            columns: list[Any] = [
                [each.checkpoint] * (layers * length),
                [each.document] * (layers * length),
                np.tile(np.arange(length), layers),
                np.repeat(np.arange(1, layers + 1), length),
                *(ratios_LT.ravel() for ratios_LT in each.ratios_MLT),
                each.tokens * layers,
                each.words * layers,
                each.classes * layers,
                np.tile(each.in_statistics, layers),
            ]
            group.append(pa.table(dict(zip(schema.names, columns, strict=True)), schema=schema))
            if sum(map(len, group)) >= GROUP_ROWS:
                writer.write_table(pa.concat_tables(group))
                group.clear()
        writer.write_table(pa.concat_tables([schema.empty_table(), *group]))


def read_ratios(columns: list[str] | None = None, filters: list[tuple[str, str, Any]] | None = None) -> pd.DataFrame:
    """`tokens.parquet`: checkpoint, document, position, layer (1..L), ratios, token, word, token_class, in_statistics.

    A document may be there in two versions: as it was captured, and, `in_statistics`, as it was drawn. `word` numbers
    the words of a document from 0 on, unknown (`Int32`) for special tokens. `filters` as in `pandas.read_parquet`: what
    they leave out is not held in memory.
    """
    table = read_table(MIXING / TOKENS, "measure", columns=columns, filters=filters)
    return table.astype({"word": "Int32"}) if "word" in table else table


def read_captured_ratios(
    documents: Sequence[str], columns: list[str] | None = None, filters: Sequence[tuple[str, str, Any]] = ()
) -> pd.DataFrame:
    """Rows of `tokens.parquet` of the captured `documents`, each once, as it was captured.

    A document that was drawn and cut to another length is there twice; the version in the statistics is not the
    captured one.
    """
    wanted = columns and [*columns, *({"document", "in_statistics"} - set(columns))]
    table = read_ratios(wanted, [("document", "in", list(documents)), *filters])
    versions = table.groupby("document")["in_statistics"].transform("nunique")
    captured = table[~((versions > 1) & table["in_statistics"])]
    return captured if columns is None else captured[columns]


def contributions_folder(checkpoint: str, document: str, root: Path = MIXING) -> Path:
    """Where the matrices of one document in one checkpoint lie."""
    return root / "contributions" / checkpoint / document.replace("/", "_")


def write_matrix(
    folder: Path, name: str, array: npt.NDArray[Any], dimensions: Sequence[str], attributes: dict[str, Any]
) -> None:
    """Write one array, a chunk of whole layers of about 1 MB at least."""
    layers = max(1, CHUNK_BYTES // max(1, array[0].nbytes))
    chunks = (min(layers, len(array)), *array.shape[1:])
    path = folder / f"{name}.zarr"
    created = create_array(path, array.shape, array.dtype, chunks, dimensions, attributes)
    with writing(path):
        created[:] = array


def read_matrix(checkpoint: str, document: str, method: str) -> npt.NDArray[Any]:
    """Return one method's matrices `[layers, tokens, tokens]` (row i, source j).

    Rows of `value_zeroing` that show no structure are NaN.
    """
    path = contributions_folder(checkpoint, document) / f"{method}.zarr"
    return read_array(open_array(path, "measure"), path, "measure")


def stored_matrices(checkpoint: str, document: str) -> list[str]:
    """The methods whose matrices are there, in no order."""
    return [path.stem for path in contributions_folder(checkpoint, document).glob("*.zarr")]


def row_shares(matrices: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """`[..., tokens, sources]`: every contribution as a share of its row's sum; NaN in a row without any."""
    rows = np.asarray(matrices, dtype=np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(rows / rows.sum(axis=-1, keepdims=True))
