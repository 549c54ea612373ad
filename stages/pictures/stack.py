"""One text as one model reads it: its layers and its tokens with their labels on an axis."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes

from stages.pictures.style import printable
from stages.pictures.tokens import Captured, Piece, words

LABEL_SIZE = 5
FREE_TEXT = "text/"
LONGEST_LABEL = 16  # characters; a vocabulary may hold a token of a hundred dashes


class Stack(NamedTuple):
    """A model's layers, and the tokens that they read; a decoder beside an encoder reads each text one token later."""

    name: str
    layers: range
    encoder: int | None
    pieces: list[Piece]

    @property
    def tokens(self) -> list[str]:
        """Their labels, printable and short enough for an axis."""
        return [short(piece.label) for piece in self.pieces]

    @property
    def whose(self) -> str:
        """` of the decoder`, where there is another."""
        return self.name and f" of the {self.name}"


def stacks_of(captured: Captured, document: str, layers: int) -> list[Stack]:
    """All layers, or the encoder's and the decoder's."""
    rows = np.flatnonzero(captured.tokens["document"] == document)
    pieces = [[reading[row] for row in rows] for reading in captured.readings]
    encoder = captured.encoder
    if encoder is None:
        return [Stack("", range(1, layers + 1), None, pieces[0])]
    decoder = Stack("decoder", range(encoder + 1, layers + 1), encoder, pieces[1])
    return [Stack("", range(1, encoder + 1), encoder, pieces[0]), decoder]


def short(label: str) -> str:
    """A token's label, printable and of few characters."""
    shown = printable(label)
    return shown if len(shown) <= LONGEST_LABEL else f"{shown[: LONGEST_LABEL - 1]}…"


def shown_text(table: pd.DataFrame) -> str:
    """The text of a map that figures of one text show: the first free one, else the first review."""
    documents: list[str] = table["document"].unique().tolist()
    return next((name for name in documents if name.startswith(FREE_TEXT)), documents[0])


def labels_of(captured: Captured, document: str, positions: npt.NDArray[np.int64]) -> list[list[str]]:
    """For each reading of a text, the short labels of its tokens at `positions`."""
    rows = _rows(captured, document, positions)
    return [[short(reading[row].label) for row in rows] for reading in captured.readings]


def whole_words(captured: Captured, document: str, positions: npt.NDArray[np.int64]) -> list[list[int]]:
    """For each reading, which tokens at `positions` are special or a whole word of several letters; else all."""
    rows = _rows(captured, document, positions)
    found = []
    for reading in captured.readings:
        begun = words(reading)
        of_text = [(reading[row].special, begun[row], reading[row].text.strip().lower()) for row in rows]
        chosen = [n for n, (special, word, text) in enumerate(of_text) if special or (len(word) > 1 and word == text)]
        found.append(chosen or list(range(len(rows))))
    return found


def _rows(captured: Captured, document: str, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    rows = np.flatnonzero(captured.tokens["document"] == document)
    return np.asarray(rows[np.searchsorted(captured.tokens["position"].to_numpy()[rows], positions)])


def label_tokens(axes: Axes, tokens: list[str], side: Any) -> None:
    """Write the tokens along the axis `side`, x or y."""
    axes.tick_params(side, length=0, pad=1, labelsize=LABEL_SIZE, labelrotation=90 if side == "x" else 0)
    axes.set(**{f"{side}ticks": range(len(tokens)), f"{side}ticklabels": tokens})
