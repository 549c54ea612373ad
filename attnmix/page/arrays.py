"""Arrays and texts in the form in which the page holds them; the page's script decodes the arrays.

Every array is base64 of little-endian bytes. Attention heads are the largest: the script computes every weight from
queries and keys.

Shapes: L layers, H heads, T tokens.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.store.heads import DIMENSIONS, HEAD_PARTS, Parts, weights
from attnmix.core.store.runs import row_shares

Array = npt.NDArray[Any]
Curve = dict[str, list[float | None]]

MIN_INTERVAL_DOCUMENTS = 8  # with fewer, a bootstrap interval is too uncertain to draw
MAX_CODE = 65_534  # of a quantised value
MISSING_CODE = 65_535
VECTOR_BYTES = 4_000_000  # of texts that have every vector on the page, before compression
HEAD_BYTES = 1_400_000
"""The largest size of the queries and keys on a page: those of one text of 64 tokens, so that a page has 4 MB."""
ROUNDING = 1e-4  # the weights of a row without an attention sink add up to 1 within this
_DIRECTIONS = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SIGNS = {code: chr(0x2400 + code) for code in range(0x20)} | {
    code: f"⟨U+{code:04X}⟩" for code in (*_DIRECTIONS, *range(0x7F, 0xA0), *range(0xD800, 0xE000))
}


def encode(array: Array) -> str:
    """Return the array's little-endian bytes as base64."""
    little = array.astype(array.dtype.newbyteorder("<"))
    return base64.b64encode(np.ascontiguousarray(little).tobytes()).decode("ascii")


def quantise(values: Array, low: float, high: float) -> str:
    """Encode each value between `low` and `high` in 16 bits; NaN becomes `MISSING_CODE`."""
    levels = np.where(np.isfinite(values), np.round((values - low) * (MAX_CODE / (high - low))), MISSING_CODE)
    return encode(levels.astype(np.uint16))


def largest_shares(matrices: Array, keep: int) -> dict[str, Any]:
    """Return the `keep` largest sources of each row of `[..., T, T]`, as shares of the row's sum.

    `sources` and `shares` (of the square root, so that small ones keep their digits) are `[..., T, keep]`, `own` each
    token's share of itself `[..., T]`; all have 16 bits. A row with NaN or without any
    contribution has no source.
    """
    shares = row_shares(matrices)
    keep = min(keep, shares.shape[-1])
    has_shares = np.isfinite(shares).all(axis=-1, keepdims=True)
    own_shares = quantise(np.diagonal(shares, axis1=-2, axis2=-1), 0, 1)
    shares = np.where(has_shares, shares, 0)
    order = np.argsort(-shares, axis=-1, kind="stable")[..., :keep]
    largest = np.take_along_axis(shares, order, axis=-1)
    sources = np.where(has_shares, order, MISSING_CODE).astype(np.uint16)
    roots = quantise(np.sqrt(np.clip(largest, 0, 1)), 0, 1)
    return {"keep": keep, "sources": encode(sources), "shares": roots, "own": own_shares}


def curve(rows: pd.DataFrame, layers: range) -> Curve:
    """Return `values, low, high` by layer: means and their intervals, unless of few documents."""
    (only,) = _curves(rows, np.zeros(len(rows), int), 1, layers)
    return only


def curves_by(table: pd.DataFrame, keys: Sequence[str], layers: range) -> dict[tuple[Any, ...], Curve]:
    """Return `curve` of each combination of the columns `keys`, in the order of their first rows."""
    known = table.dropna(subset=list(keys))
    groups = known.groupby(list(keys), sort=False)
    combinations = known.drop_duplicates(list(keys))[list(keys)].itertuples(index=False, name=None)
    curves = _curves(known, groups.ngroup().to_numpy(), groups.ngroups, layers)
    return dict(zip(combinations, curves, strict=True))


def _curves(table: pd.DataFrame, group_N: npt.NDArray[Any], groups: int, layers: range) -> list[Curve]:
    """Return the curve of each group of rows; `group_N` has the group of each of the N rows."""
    in_layers = table["layer"].isin(layers).to_numpy()
    rows, group_N = table[in_layers], group_N[in_layers]
    place_N = rows["layer"].to_numpy(int) - layers.start
    values_3GL = np.full((3, groups, len(layers)), np.nan)
    for values_GL, column in zip(values_3GL, ("mean", "ci_low", "ci_high"), strict=True):
        values_GL[group_N, place_N] = rows[column].to_numpy(float)
    if "documents" in rows:
        is_few = rows["documents"].to_numpy(float, na_value=np.nan) < MIN_INTERVAL_DOCUMENTS
        values_3GL[1:, group_N[is_few], place_N[is_few]] = np.nan
    numbers_3GL = values_3GL.astype(object)
    numbers_3GL[np.isnan(values_3GL)] = None  # JSON knows no NaN
    values, lows, highs = numbers_3GL.tolist()
    curves = zip(values, lows, highs, strict=True)
    return [{"values": value_L, "low": low_L, "high": high_L} for value_L, low_L, high_L in curves]


def as_json(data: Any) -> str:
    """Return JSON in ASCII without a "<", so that no text in it can end the element that holds it."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c")


def pack(data: Any) -> str:
    """Return JSON, deflated, as base64."""
    return base64.b64encode(zlib.compress(as_json(data).encode("ascii"), 9)).decode("ascii")


def visible(text: str, kept: str = "\n\t") -> str:
    """Return text with control characters, except those in `kept`, replaced by signs; a page drops or obeys them."""
    return text.translate(_SIGNS | {ord(char): char for char in kept})


def encode_heads(texts: Iterable[tuple[str, Mapping[str, Parts]]]) -> dict[str, Any]:
    """Encode the heads of each text, given by name with the parts that `measure` keeps by checkpoint.

    Return `number` and `width` of the heads (0 without any), and `documents`: by name and checkpoint the encoded parts.
    A short text has every part in float32 (`bits` 32), others have queries and keys in 16 bits with a scale for each
    token. A text whose queries and keys do not fit has no heads on the page.
    """
    documents: dict[str, dict[str, Any]] = {}
    vector_bytes, head_bytes = VECTOR_BYTES, HEAD_BYTES
    number = width = 0
    for document, stored in texts:
        if not stored:
            continue
        last = list(stored.values())[-1]
        _, number, _, width = last["query"].shape
        all_bytes = sum(array.nbytes for parts in stored.values() for array in parts.values())
        half_bytes = sum((parts["query"].nbytes + parts["key"].nbytes) // 2 for parts in stored.values())
        if "given" in last and all_bytes <= vector_bytes:
            vector_bytes -= all_bytes
            documents[document] = {each: _encode_vectors(parts) for each, parts in stored.items()}
        elif half_bytes <= head_bytes:
            head_bytes -= half_bytes
            documents[document] = {each: _encode_16_bits(parts) for each, parts in stored.items()}
    return {"number": number, "width": width, "documents": documents}


def _encode_common(parts: Parts) -> dict[str, Any]:
    """Return what every form has; `sums` `[L, H, T]` only where an attention sink takes a part of a row."""
    layers, heads, _ = parts["log_sums"].shape
    totals = np.stack([[weights(parts, layer, head).sum(-1) for head in range(heads)] for layer in range(layers)])
    sums = {"sums": encode(totals.astype(np.float32))} if (totals < 1 - ROUNDING).any() else {}
    return {
        "scores": parts["scores"].tolist(),
        "reach": encode(parts["reach"].astype(np.uint16)),
        "source_norms": encode(parts["source_norms"]),
        "key_heads": parts["key"].shape[1],
        **sums,
    }


def _encode_vectors(parts: Parts) -> dict[str, Any]:
    vectors = {name: encode(parts[name]) for name in DIMENSIONS if name in parts and name not in HEAD_PARTS}
    queries_and_keys = {name: encode(parts[name]) for name in ("query", "key")}
    return {**_encode_common(parts), **queries_and_keys, "bits": 32, "vectors": vectors}


def _encode_16_bits(parts: Parts) -> dict[str, Any]:
    form = {**_encode_common(parts), "bits": 16}
    for name in ("query", "key"):
        integers, scales = _to_integers(parts[name], 32_767, axis=-1)
        form |= {name: encode(integers.astype(np.int16)), f"{name}_scales": encode(scales)}
    return form


def _to_integers(array: Array, levels: int, axis: int) -> tuple[Array, Array]:
    """Return integers up to `levels`, and in float32 the factor of each vector along `axis`."""
    scales = (np.abs(array).max(axis=axis, keepdims=True) / levels).astype(np.float32)
    return np.round(array / np.where(scales > 0, scales, 1)).clip(-levels, levels), scales
