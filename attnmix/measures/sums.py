"""What a document gives to the tables: sums over its tokens that count, of one size however long it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnmix.core.statistics import Interval
from attnmix.measures.batches import DocumentMeasures
from attnmix.measures.documents import CLASSES, Document

Doubles = npt.NDArray[np.float64]
Read = Callable[..., Iterator[tuple[Doubles, ...]]]

# Positions are split where they double: 0, 1, 2-3, 4-7, ...
POSITION_STARTS = (0, *(2**power for power in range(16)))
POSITIONS = ("0", "1", *(f"{start}-{2 * start - 1}" for start in POSITION_STARTS[2:]))
# How tokens are told apart, by the column of its own csv file.
GROUPS = {"token_class": ("mixing_by_class", CLASSES), "positions": ("mixing_by_position", POSITIONS)}


def tokens_of(column: str) -> str:
    """The name of a group's numbers of tokens."""
    return f"{column}_tokens"


def document_sums(document: Document, measures: DocumentMeasures) -> dict[str, npt.NDArray[np.floating]]:
    """By name, of a document that counts:

    `token_class` and `positions`   sums of the ratios `[layers, methods, groups]`
    `token_class_tokens` and `positions_tokens`   numbers of tokens `[groups]`
    `to_first`   `[layers]`: attention's weight on the first token, of all tokens but that
    `geometry`, `steps`, `controls`, `by_head`, `unit_sums`   as in `DocumentMeasures`
    """
    ratios_MLT = measures.ratios[..., : document.counted].astype(np.float64)
    positions = np.searchsorted(POSITION_STARTS, np.arange(document.counted), side="right") - 1
    found: dict[str, npt.NDArray[np.floating]] = {
        "to_first": measures.to_first[:, 1 : document.counted].sum(-1, dtype=np.float64),
        "geometry": measures.geometry,
        "steps": measures.steps,
        "controls": measures.controls,
        "by_head": measures.by_head,
        "unit_sums": measures.unit_sums,
    }
    for column, numbers in (("token_class", document.classes[: document.counted]), ("positions", positions)):
        membership_TG = np.eye(len(GROUPS[column][1]))[numbers]
        found[column] = np.einsum("mlt,tg->lmg", ratios_MLT, membership_TG)
        found[tokens_of(column)] = membership_TG.sum(0)
    return found


@dataclass(frozen=True)
class Sums:
    """One checkpoint's sums of N documents that count, of which a block is in memory at a time."""

    read: Read
    """From names of `document_sums` to their arrays `[D, ...]`, block by block of D documents, in their order."""
    counted: npt.NDArray[np.int32]  # [N], tokens
    identities: Doubles  # [levels, identities]: the largest error of all documents, counted or not
    gains: Doubles  # [layers], `attention_gain`
    across: Interval  # [sites], `mean_cosine_across`

    @property
    def layers(self) -> range:
        """From 1 on."""
        return range(1, len(self.gains) + 1)

    def tokens(self, column: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """How many tokens and documents each group of a column has `[groups]`."""
        found = [(tokens_NG.sum(0), (tokens_NG > 0).sum(0)) for (tokens_NG,) in self.read(tokens_of(column))]
        tokens, documents = (np.sum(each, axis=0).astype(np.int64) for each in zip(*found, strict=True))
        return tokens, documents
