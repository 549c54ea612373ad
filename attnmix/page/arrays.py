"""Arrays and texts as the page can hold them; the page's script undoes the arrays."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from attnmix.store.runs import row_shares

LARGEST = 65_534  # of a quantised value
MISSING = 65_535
SHARE_LEVELS = 255


def encoded(array: npt.NDArray[Any]) -> str:
    """Little-endian bytes as base64."""
    little = array.astype(array.dtype.newbyteorder("<"))
    return base64.b64encode(np.ascontiguousarray(little).tobytes()).decode("ascii")


def quantised(values: npt.NDArray[Any], low: float, high: float) -> str:
    """16 bits for each value between `low` and `high`; NaN has a number of its own."""
    scale = LARGEST / (high - low) if high > low else 0.0
    levels = np.where(np.isfinite(values), np.round((values - low) * scale), MISSING)
    return encoded(levels.astype(np.uint16))


def largest_shares(matrices: npt.NDArray[Any], keep: int) -> dict[str, Any]:
    """The `keep` largest sources of each row of `[..., tokens, tokens]`, as shares of the row's sum.

    `sources` (16 bits) and `shares` (8 bits, of the square root, so that small ones keep their digits)
    are `[..., tokens, keep]`, and `own` (16 bits) each token's own share `[..., tokens]`; a row that is not to be
    shown, NaN or without any contribution, has no source.
    """
    shares = row_shares(matrices)
    keep = min(keep, shares.shape[-1])
    shown = np.isfinite(shares).all(axis=-1, keepdims=True)
    own = quantised(np.diagonal(shares, axis1=-2, axis2=-1), 0, 1)
    shares = np.where(shown, shares, 0)
    order = np.argsort(-shares, axis=-1, kind="stable")[..., :keep]
    top = np.take_along_axis(shares, order, axis=-1)
    sources = np.where(shown, order, MISSING).astype(np.uint16)
    levels = np.round(SHARE_LEVELS * np.sqrt(np.clip(top, 0, 1))).astype(np.uint8)
    return {"keep": keep, "sources": encoded(sources), "shares": encoded(levels), "own": own}


def packed(data: Any) -> str:
    """JSON, deflated, as base64: text of any kind inside cannot end the element that holds it."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("ascii"), 9)).decode("ascii")


def visible(text: str, kept: str = "\n\t") -> str:
    """Text whose control characters, but for those `kept`, are spelt by signs: a page drops or obeys them."""
    return text.translate(SIGNS | {ord(char): char for char in kept})


DIRECTIONS = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
SIGNS = {code: chr(0x2400 + code) for code in range(0x20)} | {
    code: f"⟨U+{code:04X}⟩" for code in (*DIRECTIONS, *range(0x7F, 0xA0), *range(0xD800, 0xE000))
}
