"""What `measure` keeps of every head of a captured text, in `features/measure/heads/<checkpoint>/<document>/`.

A `.zarr` for each part, float32, of the float64 forward pass. Shapes: L layers, H heads, G key heads (fewer than H
where several heads share a key), T tokens, d head width, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attnmix.store.files import open_array, read_array
from attnmix.store.mixing import MIXING, write_matrix

OF_HEADS = {
    "query": ("layer", "head", "token", "width"),  # after rotary embedding, as the key
    "key": ("layer", "key_head", "token", "width"),
    "log_sums": ("layer", "head", "token"),  # log of the softmax's denominator, a sink's part included
    "reach": ("layer", "token", "end"),  # int32: the first and the last key that the mask leaves
    "scores": ("layer", "factor"),  # what q.k is multiplied by, and the softcap, 0 without one
    "source_norms": ("layer", "head", "token"),  # |f_h(x_j)|
    "given_norms": ("layer", "head", "token"),  # |sum_j a^h_ij f_h(x_j)|
}
"""Parts of every captured text, and their dimensions."""
VECTORS = {
    "value": ("layer", "key_head", "token", "width"),
    "attended": ("layer", "head", "token", "width"),  # sum_j a^h_ij v_j
    "given": ("layer", "head", "token", "hidden"),  # that through W_O^h
    "output_bias": ("layer", "hidden"),
    "input": ("layer", "token", "hidden"),  # what enters the layer
    "result": (
        "layer",
        "token",
        "hidden",
    ),  # attention_norm, without that norm attention_residual, else attention_output
}
"""Parts of texts that are short enough (`VECTOR_BYTES`)."""
NORMS = {
    "attention_output_norm": ("layer", "weight", "hidden"),  # gamma and beta
    "attention_norm": ("layer", "weight", "hidden"),
    "norm_constants": ("layer", "norm", "constant"),  # of both norms: eps, and 1 where it centres
}
"""Beside them, the norms on the way from W_O to the result that the family has."""
VECTOR_BYTES = 2**24
"""Of `given`, past which a text has no vectors."""
DIMENSIONS = {**OF_HEADS, **VECTORS, **NORMS}


def heads_folder(checkpoint: str, document: str, root: Path = MIXING) -> Path:
    """Where the parts of one document in one checkpoint lie."""
    return root / "heads" / checkpoint / document.replace("/", "_")


def write_heads(folder: Path, parts: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write every part by its name."""
    for name, array in parts.items():
        write_matrix(folder, name, array, DIMENSIONS[name], {})


def read_heads(checkpoint: str, document: str) -> dict[str, npt.NDArray[Any]]:
    """The parts of a document that are there, by name; empty where the checkpoint was not measured."""
    folder = heads_folder(checkpoint, document)
    names = [name for name in DIMENSIONS if name in OF_HEADS or (folder / f"{name}.zarr").is_dir()]
    return {name: _read(folder / f"{name}.zarr") for name in names} if folder.is_dir() else {}


def _read(path: Path) -> npt.NDArray[Any]:
    return read_array(open_array(path, "measure"), path, "measure")


def capped(parts: Mapping[str, npt.NDArray[Any]], layer: int, products: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """What the softmax is taken of, `[T, T]`, where the q.k of a head are `products`; -inf beside the reach."""
    scaling, softcap = parts["scores"][layer].astype(np.float64)
    scaled = products * scaling
    found = softcap * np.tanh(scaled / softcap) if softcap else scaled
    sources = np.arange(len(found))
    first, last = parts["reach"][layer].T
    return np.where((sources >= first[:, None]) & (sources <= last[:, None]), found, -np.inf)


def scores(parts: Mapping[str, npt.NDArray[Any]], layer: int, head: int) -> npt.NDArray[np.float64]:
    """What the softmax of one head is taken of, `[T, T]`; both numbers from 0."""
    query, key = parts["query"][layer], parts["key"][layer]
    of_head = key[head * len(key) // len(query)]
    return capped(parts, layer, query[head].astype(np.float64) @ of_head.astype(np.float64).T)


def weights(parts: Mapping[str, npt.NDArray[Any]], layer: int, head: int) -> npt.NDArray[np.float64]:
    """a_ij `[T, T]` of one head."""
    exponents: npt.NDArray[np.float64] = scores(parts, layer, head) - parts["log_sums"][layer, head][:, None]
    return np.exp(exponents)
