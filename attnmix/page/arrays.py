"""Encoding of arrays and texts for the page; the page's script decodes the arrays.

Every array is encoded as base64 of little-endian bytes. Attention weights would be the largest arrays. The page
therefore contains queries and keys, and the script computes the weights from them.

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

from attnmix.core.statistics import MIN_INTERVAL_DOCUMENTS
from attnmix.core.store.heads import DIMENSIONS, HEAD_PARTS, Parts, weights
from attnmix.core.store.runs import row_shares

Array = npt.NDArray[Any]
Curve = dict[str, list[float | None]]

MAX_CODE = 65_534  # the largest code of a quantised value
MISSING_CODE = 65_535  # the code of a missing value
MAX_INT16 = 32_767
VECTOR_BYTES = 4_000_000  # maximum total size of the head arrays that are encoded completely, before compression
HEAD_BYTES = 1_400_000
"""The maximum total size of the queries and keys in 16 bits; one text of 64 tokens then fits on a page of 4 MB."""
ROUNDING = 1e-4  # tolerance for row sums of attention weights; the sums are 1 without a learned attention sink
_CONTROL_PICTURES = 0x2400  # Unicode block with visible symbols for the control characters
_DELETE_AND_C1 = range(0x7F, 0xA0)  # control characters without a visible symbol in Unicode
# Invisible characters that change the direction of text.
_DIRECTIONS = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SURROGATES = range(0xD800, 0xE000)  # halves of UTF-16 pairs, which UTF-8 cannot encode


def _list_signs() -> dict[int, str]:
    """Return a visible replacement for each control character, by the code point of the character."""
    signs = {}
    for code in range(0x20):
        signs[code] = chr(_CONTROL_PICTURES + code)
    for code in (*_DIRECTIONS, *_DELETE_AND_C1, *_SURROGATES):
        signs[code] = f"⟨U+{code:04X}⟩"
    return signs


_SIGNS = _list_signs()


def encode(array: Array) -> str:
    """Return the array's little-endian bytes as base64."""
    little_endian = array.dtype.newbyteorder("<")
    in_order = np.ascontiguousarray(array.astype(little_endian))
    encoded = base64.b64encode(in_order.tobytes())
    return encoded.decode("ascii")


def quantise(values: Array, low: float, high: float) -> str:
    """Encode each value between `low` and `high` in 16 bits; NaN becomes `MISSING_CODE`."""
    codes_per_unit = MAX_CODE / (high - low)
    rounded = np.round((values - low) * codes_per_unit)
    codes = np.where(np.isfinite(values), rounded, MISSING_CODE)
    return encode(codes.astype(np.uint16))


def largest_sources(matrices: Mapping[str, Array], keep: int) -> dict[str, Any]:
    """Return the main source tokens (columns) of each token (row), with their shares of the row's sum.

    A source is kept if its share is among the `keep` largest of the row in any checkpoint. For two checkpoints, the
    `keep` sources whose shares change most are also kept, except for the token itself.

    Args:
        matrices: The contributions `[..., T, T]` according to one method, by checkpoint.
        keep: The number of largest shares, and of largest changes, that are kept in each row.

    Returns:
        Encoded 16-bit arrays: `counts` `[..., T]`, the number of kept sources of each row, and `sources`, the
        concatenated indices of the kept sources of all rows. `checkpoints` contains two arrays for each checkpoint.
        `shares` contains the square roots of the kept shares, in the order of `sources`; `own` `[..., T]` contains each
        token's own share. Square roots preserve the precision of small shares. Shares are missing in rows with NaN or a
        sum of 0.
    """
    shares = {checkpoint: row_shares(matrix) for checkpoint, matrix in matrices.items()}
    is_kept = _select_sources(list(shares.values()), keep)
    counts = is_kept.sum(axis=-1)
    # The kept cells are listed row by row. The last of their indices is the column, which is the source.
    sources = np.nonzero(is_kept)[-1]
    by_checkpoint = {}
    for checkpoint, checkpoint_shares in shares.items():
        by_checkpoint[checkpoint] = _encode_shares(checkpoint_shares, is_kept)
    return {
        "counts": encode(counts.astype(np.uint16)),
        "sources": encode(sources.astype(np.uint16)),
        "checkpoints": by_checkpoint,
    }


def _encode_shares(shares: Array, is_kept: npt.NDArray[np.bool_]) -> dict[str, str]:
    """Return the encoded square roots of the kept shares, row by row, and the encoded share of each token itself.

    `shares` `[..., T, T]` are the shares of T source tokens (columns) in T tokens (rows), and `is_kept` is a mask of
    the same shape. Square roots preserve the precision of small shares. Shares in rows with NaN are encoded as missing.
    """
    is_known = _is_known_row(shares)
    clipped = np.clip(shares, 0, 1)
    roots = np.where(is_known, np.sqrt(clipped), np.nan)
    kept_roots = roots[is_kept]
    own = np.diagonal(shares, axis1=-2, axis2=-1)
    return {"shares": quantise(kept_roots, 0, 1), "own": quantise(own, 0, 1)}


def _select_sources(shares: Sequence[Array], keep: int) -> npt.NDArray[np.bool_]:
    """Return a mask `[..., T, T]` of the main sources (columns) of each token (row).

    A main source has one of the `keep` largest shares of the row in at least one checkpoint. For two checkpoints, the
    `keep` other tokens whose shares change most are also main sources. Rows with NaN are ignored.

    Args:
        shares: The shares `[..., T, T]` in each of one or two checkpoints.
        keep: The number of largest shares, and of largest changes, that are kept in each row.
    """
    is_kept = np.zeros(shares[0].shape, dtype=bool)
    for checkpoint_shares in shares:
        known_shares = np.where(_is_known_row(checkpoint_shares), checkpoint_shares, 0)
        is_kept |= _is_among_largest(known_shares, keep)
    if len(shares) == 2:
        before, after = shares
        is_known_in_both = _is_known_row(before) & _is_known_row(after)
        change = np.where(is_known_in_both, np.abs(after - before), 0)
        is_other_token = ~np.eye(change.shape[-1], dtype=bool)
        is_kept |= _is_among_largest(change * is_other_token, keep)
    return is_kept


def _is_known_row(shares: Array) -> npt.NDArray[np.bool_]:
    """Return a mask `[..., T, 1]` of the rows without NaN."""
    is_known = np.isfinite(shares).all(axis=-1, keepdims=True)
    return np.asarray(is_known)


def _is_among_largest(values: Array, keep: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the `keep` largest positive values of each row; among equal values, the first are preferred."""
    order = np.argsort(-values, axis=-1, kind="stable")[..., :keep]
    is_largest = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(is_largest, order, True, axis=-1)
    return is_largest & (values > 0)


def curve(rows: pd.DataFrame, layers: range) -> Curve:
    """Return a curve: the lists `values` (means), `low` and `high` (interval bounds), with one entry per layer.

    Missing entries are None. Bounds are also None if there are too few texts for an interval.
    """
    one_group_N = np.zeros(len(rows), int)
    curves = _create_curves(rows, one_group_N, 1, layers)
    return curves[0]


def curves_by(table: pd.DataFrame, keys: Sequence[str], layers: range) -> dict[tuple[Any, ...], Curve]:
    """Return a curve for each combination of values in the columns `keys`, in the order of first occurrence."""
    known = table.dropna(subset=list(keys))
    columns = [known[key] for key in keys]
    combinations = list(zip(*columns, strict=True))  # one combination per row
    groups: dict[tuple[Any, ...], int] = {}  # the number of each distinct combination
    for combination in combinations:
        if combination not in groups:
            groups[combination] = len(groups)
    group_N = np.array([groups[combination] for combination in combinations], dtype=int)
    curves = _create_curves(known, group_N, len(groups), layers)
    return dict(zip(groups, curves, strict=True))


def _create_curves(table: pd.DataFrame, group_N: npt.NDArray[Any], groups: int, layers: range) -> list[Curve]:
    """Return one curve for each of G groups of rows; `groups` is the number G.

    `group_N` contains the group index of each of the N rows of `table`. A group has at most one row per layer. Rows of
    other layers than `layers` are ignored.
    """
    in_layers = table["layer"].isin(layers).to_numpy()
    rows = table[in_layers]
    group_N = group_N[in_layers]
    layer_N = rows["layer"].to_numpy(int) - layers.start  # the index of each row's layer in `layers`
    values_3GL = np.full((3, groups, len(layers)), np.nan)  # means, lower and upper bounds, by group and layer
    for number, column in enumerate(("mean", "ci_low", "ci_high")):
        values_3GL[number, group_N, layer_N] = rows[column].to_numpy(float)
    if "documents" in rows:
        # An interval over few texts is too uncertain to draw.
        documents_N = rows["documents"].to_numpy(float, na_value=np.nan)
        is_few_N = documents_N < MIN_INTERVAL_DOCUMENTS
        bounds_2GL = values_3GL[1:]  # a view
        bounds_2GL[:, group_N[is_few_N], layer_N[is_few_N]] = np.nan
    numbers_3GL = values_3GL.astype(object)
    numbers_3GL[np.isnan(values_3GL)] = None  # JSON does not support NaN
    curves = []
    for value_L, low_L, high_L in zip(*numbers_3GL.tolist(), strict=True):
        curves.append({"values": value_L, "low": low_L, "high": high_L})
    return curves


def as_json(data: Any) -> str:
    """Return JSON in ASCII with escaped "<", because a closing tag in a text would end the enclosing element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c")


def pack(data: Any) -> str:
    """Return data as deflated JSON in base64."""
    text = as_json(data).encode("ascii")
    deflated = zlib.compress(text)
    return base64.b64encode(deflated).decode("ascii")


def visible(text: str, kept: str = "\n\t") -> str:
    """Return a text with visible replacements for control characters, except the characters in `kept`."""
    kept_as_they_are = {ord(character): character for character in kept}
    return text.translate(_SIGNS | kept_as_they_are)


def encode_heads(texts: Iterable[tuple[str, Mapping[str, Parts]]]) -> dict[str, Any]:
    """Encode arrays of attention heads, such as queries and keys, for several texts within the size limits of a page.

    Args:
        texts: Pairs of a text's name and the text's stored arrays by checkpoint.

    Returns:
        The `number` of heads per layer and their `width` (both 0 if no text has stored arrays), and `documents`, the
        encoded arrays by text and checkpoint. All vectors of short texts are encoded in float32. Of the vectors of
        other texts, only queries and keys are encoded, in 16 bits and with a scale for each vector. Texts that exceed
        the size limits are omitted.
    """
    documents: dict[str, dict[str, Any]] = {}
    vector_bytes_left = VECTOR_BYTES
    head_bytes_left = HEAD_BYTES
    number = 0
    width = 0
    for document, arrays_by_checkpoint in texts:
        if not arrays_by_checkpoint:
            continue
        arrays_of_checkpoints = list(arrays_by_checkpoint.values())
        last = arrays_of_checkpoints[-1]
        _, number, _, width = last["query"].shape  # [layers, heads, tokens, width]
        has_all_vectors = "given" in last  # only short texts were stored with all vectors
        vector_bytes = sum(_count_bytes(arrays) for arrays in arrays_of_checkpoints)
        head_bytes = sum(_count_bytes_in_16_bits(arrays) for arrays in arrays_of_checkpoints)
        if has_all_vectors and vector_bytes <= vector_bytes_left:
            encode_arrays = _encode_vectors
            vector_bytes_left -= vector_bytes
        elif head_bytes <= head_bytes_left:
            encode_arrays = _encode_16_bits
            head_bytes_left -= head_bytes
        else:
            continue
        documents[document] = {checkpoint: encode_arrays(arrays) for checkpoint, arrays in arrays_by_checkpoint.items()}
    return {"number": number, "width": width, "documents": documents}


def _count_bytes(arrays: Parts) -> int:
    """Return the total size of all arrays in bytes."""
    return sum(array.nbytes for array in arrays.values())


def _count_bytes_in_16_bits(arrays: Parts) -> int:
    """Return the size in bytes of the queries and keys after conversion from float32 to 16 bits."""
    return (arrays["query"].nbytes + arrays["key"].nbytes) // 2


def _encode_common(arrays: Parts) -> dict[str, Any]:
    """Return the head arrays that are encoded in the same way for short and for long texts.

    `scores` contains the scaling factor and the softcap of the products q.k in each layer. `reach` contains the first
    and the last visible key of each token. `source_norms` contains the length of each token's value after the output
    projection, by layer and head. `sums` contains the row sums `[L, H, T]` (layers, heads, tokens) of the attention
    weights; it is present only if a learned attention sink reduces them below 1.
    """
    reach = arrays["reach"].astype(np.uint16)
    encoded = {
        "scores": arrays["scores"].tolist(),
        "reach": encode(reach),
        "source_norms": encode(arrays["source_norms"]),
        "key_heads": arrays["key"].shape[1],  # [layers, key heads, tokens, width]
    }
    sums_LHT = _sum_rows(arrays)
    has_sink_LHT = sums_LHT < 1 - ROUNDING
    if has_sink_LHT.any():
        encoded["sums"] = encode(sums_LHT.astype(np.float32))
    return encoded


def _sum_rows(arrays: Parts) -> Array:
    """Return the sum of each row of attention weights `[L, H, T]` (layers, heads, tokens)."""
    sums_LHT = np.zeros_like(arrays["log_sums"], dtype=np.float64)  # only the shape is used
    layers, heads, _ = sums_LHT.shape
    for layer in range(layers):
        for head in range(heads):
            weights_TT = weights(arrays, layer, head)
            sums_LHT[layer, head] = weights_TT.sum(-1)
    return sums_LHT


def _encode_vectors(arrays: Parts) -> dict[str, Any]:
    """Return the head arrays of a short text, with queries, keys and other vectors in float32.

    `vectors` contains the arrays that are not encoded for long texts.
    """
    encoded = _encode_common(arrays)
    encoded["query"] = encode(arrays["query"])
    encoded["key"] = encode(arrays["key"])
    encoded["bits"] = 32
    vectors = {}
    # `DIMENSIONS` names all stored arrays. The arrays in `HEAD_PARTS` are stored for texts of any length; those that
    # the page needs have already been encoded above.
    for name in DIMENSIONS:
        if name in arrays and name not in HEAD_PARTS:
            vectors[name] = encode(arrays[name])
    encoded["vectors"] = vectors
    return encoded


def _encode_16_bits(arrays: Parts) -> dict[str, Any]:
    """Return the head arrays of a text with queries and keys in 16 bits, and without the other vectors."""
    encoded = _encode_common(arrays)
    encoded["bits"] = 16
    for name in ("query", "key"):
        integers, scales = _quantise_to_int16(arrays[name])
        encoded[name] = encode(integers)
        encoded[f"{name}_scales"] = encode(scales)
    return encoded


def _quantise_to_int16(vectors: Array) -> tuple[Array, Array]:
    """Return vectors `[..., width]` as 16-bit integers, and the scale of each vector in float32."""
    largest = np.abs(vectors).max(axis=-1, keepdims=True)
    scales = (largest / MAX_INT16).astype(np.float32)
    divisors = np.where(scales > 0, scales, 1)
    integers = np.round(vectors / divisors).clip(-MAX_INT16, MAX_INT16)
    return integers.astype(np.int16), scales
