"""The parts of every head of a captured text that `measure` keeps, and the attention weights that follow from them.

A `.zarr` for each part, float32, of the float64 forward pass. T is the number of tokens; there are fewer key heads than
heads where several heads share a key.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Parts = Mapping[str, npt.NDArray[Any]]
HEAD_PARTS = {
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
    "result": ("layer", "token", "hidden"),  # at the last point before the feed-forward network
}
"""Parts of texts that are short enough (`VECTOR_BYTES`)."""
NORMS = {
    "attention_output_norm": ("layer", "weight", "hidden"),  # gamma and beta
    "attention_norm": ("layer", "weight", "hidden"),
    "norm_constants": ("layer", "norm", "constant"),  # of both norms: eps, and 1 where it centres
}
"""Further parts of such texts: the norms on the way from W_O to the result that the family has."""
VECTOR_BYTES = 2**24  # size of `given` past which a text has no vectors
DIMENSIONS = {**HEAD_PARTS, **VECTORS, **NORMS}


def softmax_input(parts: Parts, layer: int, products: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the softmax's input `[T, T]` of a head whose q.k are `products`; -inf where the mask leaves no key."""
    scaling, softcap = parts["scores"][layer].astype(np.float64)
    logits = products * scaling
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    sources = np.arange(len(logits))
    first, last = parts["reach"][layer].T
    return np.where((sources >= first[:, None]) & (sources <= last[:, None]), logits, -np.inf)


def scores(parts: Parts, layer: int, head: int) -> npt.NDArray[np.float64]:
    """Return the softmax's input `[T, T]` of one head; `layer` and `head` count from 0."""
    queries, keys = parts["query"][layer], parts["key"][layer]
    query, key = queries[head], keys[head * len(keys) // len(queries)]
    return softmax_input(parts, layer, query.astype(np.float64) @ key.astype(np.float64).T)


def weights(parts: Parts, layer: int, head: int) -> npt.NDArray[np.float64]:
    """Return a_ij `[T, T]` of one head."""
    exponents: npt.NDArray[np.float64] = scores(parts, layer, head) - parts["log_sums"][layer, head][:, None]
    return np.exp(exponents)
