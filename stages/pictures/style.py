"""One style for every figure: palette, markers, names for people, sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

ONE_COLUMN = 3.3  # inches
TWO_COLUMNS = 7.0
PAGE_HEIGHT = 9.5  # at most
STYLE_SHEET = Path(__file__).with_name("paper.mplstyle")


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
