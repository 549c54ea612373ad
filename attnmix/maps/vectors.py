"""Input vectors of maps: conversion to finite arrays, distinct vectors, and the capture points of each layout."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attnmix.core.errors import InputError, first_line
from attnmix.core.names import Site
from attnmix.core.settings import MIN_UMAP_VECTORS, UmapParameters

Vectors = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
Coordinates = npt.NDArray[np.float32]
Maps = Mapping[int, Mapping[Site, Coordinates]]
"""Coordinates `[tokens, 2]` by seed, then by layer and capture point."""


def read_vectors(given: Any) -> Vectors:
    """Return vectors `[..., hidden]` in float32, from an array, a tensor on any device, a table, or a list of these.

    Raise `InputError` for non-numeric input, for fewer than two dimensions, and for NaN and infinite numbers.
    """
    allowed = "allowed: numbers [points, hidden], or more dimensions"
    try:
        with np.errstate(over="ignore"):  # overflow of float32 is reported below
            array = _convert_to_array(given).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"vectors: {type(given).__name__} is not an array of numbers ({first_line(error)})") from None
    if array.ndim < 2 or not array.size:
        raise InputError(f"vectors: an array of shape {array.shape}; {allowed}")
    is_finite = np.isfinite(array).all(axis=-1)
    broken_rows = np.argwhere(~is_finite)
    if len(broken_rows):
        row = ", ".join(map(str, broken_rows[0]))
        raise InputError(f"vectors: row {row} contains NaN or a number too large for float32; allowed: finite numbers")
    return array


def _convert_to_array(given: Any) -> npt.NDArray[Any]:
    """Return `given` as an array; raise `TypeError` unless it contains real numbers.

    Tensors are recognised by their attribute `detach`.
    """
    if isinstance(given, Sequence) and any(hasattr(vector, "detach") for vector in given):
        return np.stack([_convert_to_array(vector) for vector in given])
    if hasattr(given, "detach"):
        tensor = given.detach().cpu()
        if tensor.is_floating_point():
            tensor = tensor.float()  # NumPy does not support bfloat16
        given = tensor
    if hasattr(given, "numpy"):
        given = given.numpy()
    array = np.asarray(given)
    if array.dtype == object:
        array = array.astype(np.float64)  # a table with float and integer columns
    if array.dtype.kind not in "fiu":
        raise TypeError(f"its dtype is {array.dtype}")
    return array


def distinct_rows(vectors: Vectors) -> tuple[Numbers, Numbers]:
    """Return the sorted row numbers of the first copies of distinct vectors, and each vector's index among these.

    For the vectors a, b, a, the results are 0, 1 and 0, 1, 0.
    """
    _, first, numbers = np.unique(_view_rows_as_bytes(vectors), return_index=True, return_inverse=True)
    # `np.unique` sorts by value; the distinct vectors are reordered by their first rows.
    order = np.argsort(first)
    new_number = np.empty_like(order)  # by old number
    new_number[order] = np.arange(len(order))
    return first[order], new_number[numbers]


def _view_rows_as_bytes(vectors: Vectors) -> npt.NDArray[np.void]:
    """Return an array `[vectors]` with the bytes of each vector as a single entry, to compare whole vectors."""
    zeros_alike = np.ascontiguousarray(vectors + np.float32(0))  # -0 becomes 0
    row_bytes = zeros_alike.shape[1] * zeros_alike.itemsize
    whole_row = np.dtype((np.void, row_bytes))
    return zeros_alike.view(whole_row)[:, 0]


def points_for(layout: str, vectors: Mapping[Site, Vectors], settings: UmapParameters) -> dict[Site, Vectors]:
    """Return the vectors `[tokens, width]` of the points with enough distinct vectors for a layout.

    UMAP layouts require `MIN_UMAP_VECTORS` tokens. The vectors of each point, or of all points together for `joint`,
    must also include at least `MIN_UMAP_VECTORS` and more than `n_neighbors` distinct vectors. The layout `pca` has no
    such requirements.
    """
    if layout == "pca" or not vectors:
        return dict(vectors)
    fewest_tokens = min(len(vectors_TD) for vectors_TD in vectors.values())
    if fewest_tokens < MIN_UMAP_VECTORS:
        return {}
    needed = max(MIN_UMAP_VECTORS, settings.n_neighbors + 1)
    if layout == "joint":
        together = np.concatenate(list(vectors.values()))
        return dict(vectors) if _count_distinct(together) >= needed else {}
    shown = {}
    for site, vectors_TD in vectors.items():
        if _count_distinct(vectors_TD) >= needed:
            shown[site] = vectors_TD
    return shown


def _count_distinct(vectors: Vectors) -> int:
    """Return the number of distinct vectors."""
    first, _ = distinct_rows(vectors)
    return len(first)
