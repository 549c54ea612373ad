"""What all figures share: sizes, style, limits, keys, and files that are the same every time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stages.names import Mark
from stages.pictures.fonts import IN_ITS_PLACE, can_draw, fallbacks, know_own_font

ONE_COLUMN = 3.3  # inches
TWO_COLUMNS = 7.0
PAGE_HEIGHT = 9.5  # at most
ROOM = 1.08  # of a map's points' larger extent
CONTRAST, TEXT_CONTRAST = 3.0, 4.5  # at least, on white: of lines and marks, of words (WCAG 2.2)
SHADES = 256
# No date and no version of the program in the file.
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None},
    "svg": {"Date": None, "Creator": None},
}


@contextmanager
def paper_style(texts: Iterable[str] = ()) -> Iterator[None]:
    """Matplotlib's settings for the time of drawing and saving, with fonts for the letters of `texts`."""
    know_own_font()
    with mpl.rc_context(fname=Path(__file__).with_name("paper.mplstyle")):
        own = mpl.rcParams["font.family"]
        mpl.rcParams["font.family"] = [*own, *fallbacks(texts, own)]
        yield


def save_figure(figure: Figure, path: Path, formats: Sequence[str], dpi: int) -> None:
    """Save as `path` with each format's suffix; draw under `paper_style`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in formats:
        saved = path.with_suffix(f".{suffix}")
        figure.savefig(saved, dpi=dpi, metadata=METADATA[suffix])
        if suffix == "svg":
            text = saved.read_text(encoding="utf-8")
            saved.write_text(text.replace("font-family: 'Arimo'", f"font-family: {IN_ITS_PLACE}"), encoding="utf-8")


def luminance(color: Any) -> float:
    """Relative luminance, 0 to 1 (WCAG 2.2); white's contrast to it is 1.05 / (luminance + 0.05)."""
    return float(np.dot(_linear(color), (0.2126, 0.7152, 0.0722)))


def _linear(color: Any) -> list[float]:
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]


def on_white(color: Any, contrast: float = CONTRAST) -> str:
    """The colour, or where it is too light for white paper, its darker shade of the same hue with that `contrast`."""
    # A step of the 8 bits darker, as rounding may go up.
    factor = min(1.0, (1.05 / (1.01 * contrast) - 0.05) / max(luminance(color), 1e-6))
    if factor == 1:
        return to_hex(color)
    darker = [factor * part for part in _linear(color)]
    red, green, blue = (12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055 for part in darker)
    return to_hex((red, green, blue))


@cache
def dark_part(name: str) -> LinearSegmentedColormap:
    """The part of a colour map from dark to light, or from light to dark, whose colours all have enough contrast."""
    colors = mpl.colormaps[name](np.linspace(0, 1, SHADES))
    dark = [color for color in colors if 1.05 / (luminance(color) + 0.05) >= CONTRAST]
    return LinearSegmentedColormap.from_list(f"dark part of {name}", dark, N=SHADES)


def printable(text: str) -> str:
    """Text that the figures' fonts can draw: other characters become their code points, `<U+1F600>`."""
    families = mpl.rcParams["font.family"]
    return "".join(char if can_draw(char, families) else f"<U+{ord(char):04X}>" for char in text)


def key_of(marks: Iterable[Mark], size: float) -> list[Line2D]:
    """What stands for `marks` in a legend."""
    return [
        Line2D(
            [], [], linestyle="none", marker=mark.marker, color=on_white(mark.color), markersize=size, label=mark.label
        )
        for mark in marks
    ]


def square_limits(xy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Limits of x and of y `[2, 2]`, equally long, around the points `[vectors, 2]`; NaN has no place."""
    points = xy[np.isfinite(xy).all(axis=1)]
    low, high = (points.min(axis=0), points.max(axis=0)) if len(points) else (np.zeros(2), np.ones(2))
    half = max(float((high - low).max()), 1e-3) * ROOM / 2
    middle = (low + high) / 2
    return np.stack([middle - half, middle + half], axis=1)


def set_limits(axes: Axes, middle: npt.NDArray[np.float64], extent: npt.NDArray[np.float64]) -> None:
    """Limits that hold `extent` of x and y around `middle`, widened to the axes' shape: both have one scale."""
    figure: Any = axes.figure
    shape = np.array(axes.get_position().size) * figure.get_size_inches()
    half = shape * (extent / shape).max() / 2
    (left, bottom), (right, top) = middle - half, middle + half
    axes.set(xlim=(left, right), ylim=(bottom, top))
