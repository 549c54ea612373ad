"""Stored arrays of the attention heads of a captured text, and the attention weights computed from them.

Each `.zarr` array is computed in a float64 forward pass, and stored as float32 unless stated otherwise. T is the number
of tokens, a^h_ij is an attention weight of head h, W_O^h are the head's rows of W_O, and f_h(x_j) is v_j W_O^h for the
value v_j of token j. There are fewer key heads than heads if several heads share a key.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Parts = Mapping[str, npt.NDArray[Any]]
HEAD_PARTS = {
    "query": ("layer", "head", "token", "width"),  # after rotary embedding, like the key
    "key": ("layer", "key_head", "token", "width"),
    "log_sums": ("layer", "head", "token"),  # log of the softmax denominator, including attention sinks
    "reach": ("layer", "token", "end"),  # int32: the first and the last visible key under the mask
    "scores": ("layer", "factor"),  # the scaling factor of q.k, and the softcap (0 if unused)
    "source_norms": ("layer", "head", "token"),  # |f_h(x_j)|
    "given_norms": ("layer", "head", "token"),  # |sum_j a^h_ij f_h(x_j)|
}
"""Arrays of every captured text, with their dimensions."""
VECTORS = {
    "value": ("layer", "key_head", "token", "width"),
    "attended": ("layer", "head", "token", "width"),  # sum_j a^h_ij v_j
    "given": ("layer", "head", "token", "hidden"),  # `attended` multiplied by W_O^h
    "output_bias": ("layer", "hidden"),
    "input": ("layer", "token", "hidden"),  # the input of the layer
    "result": ("layer", "token", "hidden"),  # at the last point before the feed-forward network
}
"""Additional arrays of short texts (limited by `VECTOR_BYTES`)."""
NORMS = {
    "attention_output_norm": ("layer", "weight", "hidden"),  # gamma and beta
    "attention_norm": ("layer", "weight", "hidden"),
    "norm_constants": ("layer", "norm", "constant"),  # for both norms: eps, and 1 if the norm subtracts the mean
}
"""Additional arrays of short texts: parameters of the norms between W_O and `result`, for families with such norms."""
VECTOR_BYTES = 2**24  # maximum size of `given` in bytes; texts with a larger array have only `HEAD_PARTS`
DIMENSIONS = {**HEAD_PARTS, **VECTORS, **NORMS}


def softmax_input(parts: Parts, layer: int, products: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the input `[T, T]` of a head's softmax, computed from its `products` q.k `[T, T]`; -inf for masked keys.

    `parts` contains the stored arrays of a text with T tokens. Its array `scores` contains the scaling factor and the
    softcap of the products, and `reach` the first and the last visible key of each token. `layer` is an index from 0.
    """
    scaling, softcap = parts["scores"][layer].astype(np.float64)
    logits = products * scaling
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    keys_T = np.arange(len(logits))
    first_T, last_T = parts["reach"][layer].T
    is_not_before_first_TT = keys_T >= first_T[:, None]
    is_not_after_last_TT = keys_T <= last_T[:, None]
    return np.where(is_not_before_first_TT & is_not_after_last_TT, logits, -np.inf)


def scores(parts: Parts, layer: int, head: int) -> npt.NDArray[np.float64]:
    """Return the softmax input `[T, T]` of one head from the stored queries and keys.

    `layer` and `head` are indices from 0. Array axes: H heads, G key heads, T tokens, d features of a query.
    """
    queries_HTd = parts["query"][layer]
    keys_GTd = parts["key"][layer]
    key_head = head * len(keys_GTd) // len(queries_HTd)  # H / G consecutive heads share a key head
    query_Td = queries_HTd[head].astype(np.float64)
    key_Td = keys_GTd[key_head].astype(np.float64)
    products_TT = query_Td @ key_Td.T
    return softmax_input(parts, layer, products_TT)


def weights(parts: Parts, layer: int, head: int) -> npt.NDArray[np.float64]:
    """Return the attention weights `[T, T]` of one head: the softmax of `scores`, with the stored denominators.

    `layer` and `head` are indices from 0, and T is the number of tokens.
    """
    scores_TT = scores(parts, layer, head)
    log_sums_T = parts["log_sums"][layer, head]
    exponents_TT: npt.NDArray[np.float64] = scores_TT - log_sums_T[:, None]
    return np.exp(exponents_TT)
