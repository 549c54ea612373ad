"""What the page's script computes every head of: queries and keys, as exact as they fit, and vectors of short texts.

Shapes: L layers, H heads, G key heads, T tokens, d head width, D hidden, r kept dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attnmix.core.names import CHECKPOINT_NAMES
from attnmix.page.arrays import encoded
from attnmix.store.heads import DIMENSIONS, OF_HEADS, capped, weights
from attnmix.store.heads import VECTOR_BYTES as STORED_BYTES
from attnmix.store.runs import Run

Array = npt.NDArray[Any]
Parts = Mapping[str, Array]

VECTOR_BYTES = 4_000_000  # of the texts that are there with every vector, before compression; whole texts, in order
HEAD_BYTES = 4_200_000  # of the queries and keys of all others
LEAST_SHARE = 1 / 4  # of the dimensions, below which a text's heads are left out
SINKS = 1e-4  # what a row may lack to 1 by rounding


def heads_data(documents: Sequence[str], run: Run) -> dict[str, Any]:
    """`documents`: by name and checkpoint what is there of it; `number` and `width` of the heads, 0 without any.

    `longest`: how many tokens or so a text may have to be there with every vector.

    A short text has every part in float32 (`bits` 32), another its queries and keys in 16 bits with a scale for each
    token. Where those do not fit, they have 8 bits; where that does not fit either, only those of the captured
    checkpoint are there, in the dimensions that matter most.
    """
    shown: dict[str, dict[str, Any]] = {}
    vectors, left = VECTOR_BYTES, HEAD_BYTES
    number = width = longest = 0
    for document in documents:
        stored = {name: parts for name in CHECKPOINT_NAMES if (parts := run.heads(name, document))}
        if not stored:
            continue
        name, last = list(stored.items())[-1]
        _, number, tokens, width = last["query"].shape
        longest = _longest(last, len(stored))
        whole = sum(array.nbytes for parts in stored.values() for array in parts.values())
        half = sum((parts["query"].nbytes + parts["key"].nbytes) // 2 for parts in stored.values())
        if "given" in last and whole <= vectors:
            vectors -= whole
            shown[document] = {name: _with_vectors(parts) for name, parts in stored.items()}
        elif half <= left:
            left -= half
            shown[document] = {name: _in_16_bits(parts) for name, parts in stored.items()}
        elif left // (2 * tokens) >= LEAST_SHARE * last["query"].size // tokens:
            chosen = stored if half // 2 <= left else {name: last}
            shown[document] = {
                each: reduced(parts, left // (2 * tokens * len(chosen))) for each, parts in chosen.items()
            }
            left -= 2 * tokens * sum(sum(form["ranks"]) for form in shown[document].values())
    return {"number": number, "width": width, "longest": longest, "documents": shown}


def _longest(parts: Parts, checkpoints: int) -> int:
    """Tokens of a text whose vectors just fit; D taken as H d, biases and norms not counted."""
    layers, heads, _, width = parts["query"].shape
    hidden = heads * width
    given = layers * heads * hidden  # numbers of a token
    others = layers * (2 * (heads + parts["key"].shape[1]) * width + 3 * heads + 2 + 2 * hidden)
    return int(min(VECTOR_BYTES // (4 * checkpoints * (given + others)), STORED_BYTES // (4 * given)))


def _common(parts: Parts) -> dict[str, Any]:
    """What every form has; `sums` `[L, H, T]` only where a sink takes part of a row."""
    layers, heads, _ = parts["log_sums"].shape
    kept = np.stack([[weights(parts, layer, head).sum(-1) for head in range(heads)] for layer in range(layers)])
    sums = {"sums": encoded(kept.astype(np.float32))} if (kept < 1 - SINKS).any() else {}
    return {
        "scores": parts["scores"].tolist(),
        "reach": encoded(parts["reach"].astype(np.uint16)),
        "source_norms": encoded(parts["source_norms"]),
        "given_norms": encoded(parts["given_norms"]),
        **sums,
    }


def _with_vectors(parts: Parts) -> dict[str, Any]:
    vectors = {name: encoded(parts[name]) for name in DIMENSIONS if name in parts and name not in OF_HEADS}
    return {
        **_common(parts),
        "bits": 32,
        "query": encoded(parts["query"]),
        "key": encoded(parts["key"]),
        "vectors": vectors,
        "key_heads": parts["key"].shape[1],
    }


def _in_16_bits(parts: Parts) -> dict[str, Any]:
    found = {**_common(parts), "bits": 16, "key_heads": parts["key"].shape[1]}
    for name in ("query", "key"):
        whole, scales = _whole_numbers(parts[name], 32_767, axis=-1)
        found |= {name: encoded(whole.astype(np.int16)), f"{name}_scales": encoded(scales)}
    return found


def _whole_numbers(array: Array, levels: int, axis: int) -> tuple[Array, Array]:
    """Whole numbers up to `levels`, and in float32 what each vector along `axis` is to be multiplied by."""
    scales = (np.abs(array).max(axis=axis, keepdims=True) / levels).astype(np.float32)
    return np.round(array / np.where(scales > 0, scales, 1)).clip(-levels, levels), scales


def reduced(parts: Parts, dimensions: int) -> dict[str, Any]:
    """The strongest `dimensions` of all heads' scores together, in 8 bits, and how far the weights are then off.

    Q K^T is the same in any basis of a head's width; in that of its singular vectors the last ones hardly matter, in
    some heads fewer than in others: `ranks` `[L * H]`. A number that all scores of a row share changes no weight, so
    without a softcap keys are taken from their mean.
    """
    layers, heads = parts["query"].shape[:2]
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    forms = [_strongest(parts, *place) for place in places]
    strengths = np.array([np.prod(np.linalg.norm(form, axis=1), axis=0) for form in forms])
    least = np.sort(strengths, axis=None)[::-1][:dimensions][-1]
    ranks = np.maximum((strengths >= least).sum(-1), 1)
    sides: dict[str, list[Array]] = {"query": [], "key": [], "query_scales": [], "key_scales": []}
    off = []
    for place, form, rank in zip(places, forms, ranks, strict=True):
        numbers = [_whole_numbers(side[:, :rank], 127, axis=0) for side in form]
        for name, (whole, scales) in zip(("query", "key"), numbers, strict=True):
            sides[name].append(whole.astype(np.int8).ravel())
            sides[f"{name}_scales"].append(scales.ravel())
        query, key = (whole * scales for whole, scales in numbers)
        off.append(_off(parts, query @ key.T, *place))
    return {
        **_common(parts),
        **{name: encoded(np.concatenate(each)) for name, each in sides.items()},
        **{"bits": 8, "ranks": ranks.tolist(), "key_heads": heads},
        **{"largest_error": max(map(np.max, off)).item(), "mean_error": np.mean([*map(np.mean, off)]).item()},
    }


def _strongest(parts: Parts, layer: int, head: int) -> Array:
    """Queries and keys `[2, T, r]` whose products are the head's; the first dimensions come nearest to them."""
    query, keys = parts["query"][layer, head].astype(np.float64), parts["key"][layer]
    key = keys[head * len(keys) // parts["query"].shape[1]].astype(np.float64)
    if not parts["scores"][layer, 1]:
        key = key - key.mean(0)
    (q_basis, q_rest), (k_basis, k_rest) = np.linalg.qr(query), np.linalg.qr(key)
    left, strengths, right = np.linalg.svd(q_rest @ k_rest.T)
    signs = np.sign(left[np.abs(left).argmax(0), np.arange(left.shape[1])])[: len(strengths)]
    shared = signs * np.sqrt(strengths)
    return np.stack(
        [basis @ sides[:, : len(shared)] * shared for basis, sides in ((q_basis, left), (k_basis, right.T))]
    )


def _off(parts: Parts, products: Array, layer: int, head: int) -> Array:
    """How far the weights of other q.k `[T, T]` are from the head's own."""
    true, scaled = weights(parts, layer, head), capped(parts, layer, products)
    raised = np.exp(scaled - scaled.max(-1, keepdims=True))
    off: Array = np.abs(raised / raised.sum(-1, keepdims=True) * true.sum(-1, keepdims=True) - true)
    return off
