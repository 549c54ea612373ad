"""One captured text as one model reads it: its layers, and labels for its tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes

from attnmix.figures.style import printable
from attnmix.figures.tokens import CapturedTexts, DisplayToken, words

LABEL_SIZE = 5  # points
MAX_LABEL = 16  # characters; a vocabulary may hold a token of a hundred dashes


class TextLayers(NamedTuple):
    """A model's layers and the tokens that they read; a decoder reads each text shifted by one token."""

    name: str
    layers: range
    encoder: int | None
    tokens: list[DisplayToken]

    @property
    def labels(self) -> list[str]:
        """Labels of the tokens, short enough for an axis."""
        return [short_label(token) for token in self.tokens]

    @property
    def suffix(self) -> str:
        """` of the decoder`, where there is an encoder too."""
        return self.name and f" of the {self.name}"


def text_layers(captured: CapturedTexts, document: str, layers: int) -> list[TextLayers]:
    """Return all layers of a model, or first the encoder's and then the decoder's."""
    rows = np.flatnonzero(captured.tokens["document"] == document)
    tokens = [[reading[row] for row in rows] for reading in captured.readings]
    encoder = captured.encoder
    if encoder is None:
        return [TextLayers("", range(1, layers + 1), None, tokens[0])]
    decoder = TextLayers("decoder", range(encoder + 1, layers + 1), encoder, tokens[1])
    return [TextLayers("", range(1, encoder + 1), encoder, tokens[0]), decoder]


def short_label(token: DisplayToken) -> str:
    """Return a token's label, printable and of at most `MAX_LABEL` characters."""
    label = printable(token.label)
    return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"


def example_text(table: pd.DataFrame) -> str:
    """Return the text of a map that figures of one text show: the first free one, else the first review."""
    documents: list[str] = table["document"].unique().tolist()
    return next((name for name in documents if name.startswith("text/")), documents[0])


def word_labels(captured: CapturedTexts, document: str, positions: npt.NDArray[Any]) -> list[dict[int, str]]:
    """Return for each reading of a text the labels of its special tokens and whole words, else of all tokens.

    The keys are indices into `positions`.
    """
    rows = np.flatnonzero(captured.tokens["document"] == document)
    rows = rows[np.searchsorted(captured.tokens["position"].to_numpy()[rows], positions)]
    labels = []
    for reading in captured.readings:
        starts = words(reading)
        whole = {
            index: short_label(reading[row])
            for index, row in enumerate(rows)
            if reading[row].special or (len(starts[row]) > 1 and starts[row] == reading[row].text.strip().lower())
        }
        labels.append(whole or {index: short_label(reading[row]) for index, row in enumerate(rows)})
    return labels


def label_tokens(axes: Axes, labels: list[str], side: Any) -> None:
    """Write the tokens' labels along the axis `side`, x or y."""
    axes.tick_params(side, length=0, pad=1, labelsize=LABEL_SIZE, labelrotation=90 if side == "x" else 0)
    axes.set(**{f"{side}ticks": range(len(labels)), f"{side}ticklabels": labels})
