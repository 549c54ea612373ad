"""Zarr v3 arrays as this pipeline writes them: no codec, no consolidated metadata, nothing that depends on the clock.

So equal numbers are equal bytes, and any Zarr reader opens them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import zarr

from stages.outputs.files import writing

CHUNK_BYTES = 2**20


def create_array(
    path: Path,
    shape: Sequence[int],
    dtype: npt.DTypeLike,
    chunks: Sequence[int],
    dimensions: Sequence[str],
    attributes: dict[str, Any],
    shards: Sequence[int] | None = None,
) -> Any:
    """An array of zeros `shape`, to be filled; `InputError` where the disk refuses (full, read-only)."""
    with writing(path):
        return zarr.create_array(
            store=path,
            shape=tuple(shape),
            chunks=tuple(chunks),
            shards=tuple(shards) if shards else None,
            dtype=dtype,
            compressors=None,
            filters=None,
            fill_value=0,
            dimension_names=tuple(dimensions),
            attributes=attributes,
            overwrite=True,
        )
