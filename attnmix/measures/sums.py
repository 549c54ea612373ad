"""Sums of one document over its tokens in the statistics: arrays of one size however long it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from attnmix.measures.batches import DocumentMeasures
from attnmix.measures.documents import CLASSES, Document

# Positions are split where they double: 0, 1, 2-3, 4-7, ...
POSITION_STARTS = (0, *(2**power for power in range(16)))
POSITIONS = ("0", "1", *(f"{start}-{2 * start - 1}" for start in POSITION_STARTS[2:]))
GROUPS: dict[str, tuple[str, ...]] = {"token_class": CLASSES, "position": POSITIONS}
"""Groups of tokens by grouping."""
# Lengths in tokens are split where they double.
LENGTH_ENDS = tuple(2**power for power in range(5, 21))
LENGTHS = ("1-32", *(f"{end + 1}-{2 * end}" for end in LENGTH_ENDS[:-1]))


def length_class(tokens: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return the positions in `LENGTHS` of texts with so many tokens."""
    return np.searchsorted(LENGTH_ENDS, np.asarray(tokens), side="left")


def document_sums(document: Document, measures: DocumentMeasures) -> dict[str, npt.NDArray[np.floating]]:
    """Return the sums of a document in the statistics by name.

    `token_class` and `position`   sums of the ratios `[layers, methods, groups]`
    `token_class_tokens` and `position_tokens`   numbers of tokens `[groups]`
    `to_first`   `[layers]`: attention's weight on the first token, of all tokens but that
    and those of `DocumentMeasures.counted`
    """
    ratios_MLT = measures.ratios[..., : document.counted].astype(np.float64)
    positions = np.searchsorted(POSITION_STARTS, np.arange(document.counted), side="right") - 1
    sums: dict[str, npt.NDArray[np.floating]] = {
        "to_first": measures.to_first[:, 1 : document.counted].sum(-1, dtype=np.float64),
        **measures.counted,
    }
    for grouping, numbers in (("token_class", document.classes[: document.counted]), ("position", positions)):
        membership_TG = np.eye(len(GROUPS[grouping]))[numbers]
        sums[grouping] = np.einsum("mlt,tg->lmg", ratios_MLT, membership_TG)
        sums[f"{grouping}_tokens"] = membership_TG.sum(0)
    return sums
