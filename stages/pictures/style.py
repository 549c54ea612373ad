"""One style for every figure: palette, markers, names for people, sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

ONE_COLUMN = 3.3  # inches
TWO_COLUMNS = 7.0
PAGE_HEIGHT = 9.5  # at most
STYLE_SHEET = Path(__file__).with_name("paper.mplstyle")


class Mark(NamedTuple):
    """How one kind of thing is drawn; colour and shape both tell it apart."""

    label: str
    color: str
    marker: str


# Okabe and Ito's colours, which people with any common colour blindness tell apart.
POINT_MARKS = {
    "word_embedding": Mark("Word embedding", "#000000", "o"),
    "embedding_sum": Mark("Embedding sum", "#999999", "P"),
    "embedding_output": Mark("Embedding output", "#CC79A7", "D"),
    "attention_heads": Mark("Attention heads", "#56B4E9", "v"),
    "attention_output": Mark("Attention output", "#0072B2", "s"),
    "attention_residual": Mark("Attention + skip", "#B8A600", "p"),
    "attention_norm": Mark("Attention + skip, normalised", "#E69F00", "^"),
    "ffn_output": Mark("Feed-forward output", "#D55E00", "X"),
    "layer_output": Mark("Layer output", "#009E73", "h"),
}

METHOD_MARKS = {
    "attn_w": Mark("Attention weights", "#56B4E9", "v"),
    "attnres_w": Mark("Weights + skip", "#0072B2", "s"),
    "attn_n": Mark("Norm-based", "#E69F00", "^"),
    "attnres_n": Mark("Norm-based + skip", "#D55E00", "X"),
    "attnresln_n": Mark("Norm-based + skip + LayerNorm", "#009E73", "h"),
}

CHECKPOINT_LABELS = {"pretrained": "Pretrained", "finetuned": "Fine-tuned"}

TOKEN_MARKS = {"[CLS]": Mark("[CLS]", "#D55E00", "^"), "[SEP]": Mark("[SEP]", "#000000", "s")}
WORD_MARKS = (
    ("#E69F00", "D"),
    ("#56B4E9", "v"),
    ("#CC79A7", "P"),
    ("#009E73", "X"),
    ("#0072B2", "p"),
    ("#999999", "*"),
)


def layer_label(layer: int) -> str:
    """`Layer 3`, or `Embedding` for level 0."""
    return f"Layer {layer}" if layer else "Embedding"


@contextmanager
def paper_style() -> Iterator[None]:
    """Matplotlib's settings for the time of drawing and saving."""
    with mpl.rc_context(fname=STYLE_SHEET):
        yield


def new_figure(width: float, height: float) -> Figure:
    """A figure of `width` x `height` inches outside pyplot's global state; use it under `paper_style`."""
    return Figure(figsize=(width, height), layout="constrained")


def printable(text: str) -> str:
    """Text that the figures' font can draw: other characters become their code points, `<U+1F600>`."""
    known = get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap()
    return "".join(char if ord(char) in known and char.isprintable() else f"<U+{ord(char):04X}>" for char in text)
