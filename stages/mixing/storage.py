"""What `measure` keeps in `features/mixing/`: the tokens table and the contribution matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import zarr

from stages.errors import InputError
from stages.mixing.documents import TOKEN_CLASSES, Document

MIXING = Path("features/mixing")
TOKENS = "tokens.parquet"
RAW_SUMS = "value_zeroing_raw_sums"
CHUNK_BYTES = 2**20


def write_tokens(
    folder: Path, methods: Sequence[str], measured: Iterable[tuple[str, Document, list[str], npt.NDArray[np.float32]]]
) -> None:
    """Write `tokens.parquet` a document at a time: checkpoint, document, tokens, ratios `[methods, layers, tokens]`."""
    schema = pa.schema(
        [
            ("checkpoint", pa.string()),
            ("document", pa.string()),
            ("position", pa.int32()),
            ("layer", pa.int32()),
            *((method, pa.float32()) for method in methods),
            ("token", pa.string()),
            ("token_class", pa.string()),
            ("in_statistics", pa.bool_()),
        ]
    )
    folder.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(folder / TOKENS, schema) as writer:
        for checkpoint, document, tokens, ratios_MLT in measured:
            layers, length = ratios_MLT.shape[1:]
            positions = np.arange(length)
            columns: list[Any] = [
                [checkpoint] * (layers * length),
                [document.name] * (layers * length),
                np.tile(positions, layers),
                np.repeat(np.arange(1, layers + 1), length),
                *(ratios_LT.ravel() for ratios_LT in ratios_MLT),
                tokens * layers,
                [TOKEN_CLASSES[number] for number in document.classes] * layers,
                np.tile(positions < document.counted, layers),
            ]
            writer.write_table(pa.table(dict(zip(schema.names, columns, strict=True)), schema=schema))


def read_ratios(
    folder: Path = MIXING, columns: list[str] | None = None, filters: list[tuple[str, str, Any]] | None = None
) -> pd.DataFrame:
    """`tokens.parquet`: checkpoint, document, position, layer (1..L), the ratios, token, token_class, in_statistics.

    `filters` as in `pandas.read_parquet`: what they leave out is not held in memory.
    """
    path = folder / TOKENS
    if not path.is_file():
        raise InputError(f"{path} is missing; `dvc repro measure` makes it")
    return pd.read_parquet(path, columns=columns, filters=filters)


def contributions_folder(root: Path, checkpoint: str, document: str) -> Path:
    """Where the matrices of one document in one checkpoint lie."""
    return root / "contributions" / checkpoint / document.replace("/", "_")


def write_array(
    folder: Path, name: str, array: npt.NDArray[Any], dimensions: Sequence[str], attributes: dict[str, Any]
) -> None:
    """Write one array, a chunk of whole layers of about 1 MB at least, as plain Zarr v3."""
    layers = max(1, CHUNK_BYTES // max(1, array[0].nbytes))
    try:
        created = zarr.create_array(
            store=folder / f"{name}.zarr",
            shape=array.shape,
            chunks=(min(layers, len(array)), *array.shape[1:]),
            dtype=array.dtype,
            compressors=None,
            filters=None,
            fill_value=0,
            dimension_names=tuple(dimensions),
            attributes=attributes,
            overwrite=True,
        )
        created[:] = array
    except OSError as error:
        raise InputError(f"cannot write {folder / name}.zarr: {error.strerror or error}") from error


def read_contributions(checkpoint: str, document: str, method: str, root: Path = MIXING) -> npt.NDArray[Any]:
    """One matrix `[layers, tokens, tokens]` (row i, source j); `attention_heads` has heads after layers.

    Rows of `value_zeroing` that show no structure are NaN.
    """
    path = contributions_folder(root, checkpoint, document) / f"{method}.zarr"
    if not path.is_dir():
        raise InputError(f"{path} is missing; `dvc repro measure` makes it")
    array: npt.NDArray[Any] = np.asarray(zarr.open_array(path, mode="r")[:])
    return array


def row_shares(matrices: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """`[..., tokens, sources]`: every contribution as a share of its row's sum; NaN in a row without any."""
    rows = np.asarray(matrices, dtype=np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(rows / rows.sum(axis=-1, keepdims=True))
