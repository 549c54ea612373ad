"""Names beside what they name: at the ends of curves, and beside points of a map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.textpath import TextPath
from scipy.optimize import isotonic_regression

from stages.pictures.style import TEXT_CONTRAST, on_white

BESIDE = 1.06  # of a panel's width, where the names of its curves begin
LINE = 1.15  # of a name's height, to the next name
STEPS = (0.9, 1.7, 2.8, 4.2, 6.0)  # from a point to the middle of its name, in heights of a name
DIRECTIONS = 12
COVERED = 0.3  # what a covered point costs, against a step further away


class End(NamedTuple):
    """The last point of a curve."""

    x: float
    y: float
    label: str
    color: str


def label_ends(figure: Figure, ends: Mapping[Axes, Sequence[End]], size: float) -> None:
    """Write each curve's name right of its panel, at the height of its end, or as near as the other names let it."""
    names: dict[Axes, list[Any]] = {}
    for axes, of_panel in ends.items():
        names[axes] = [_name(axes, end, size) for end in sorted(of_panel, key=lambda end: end.y)]
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the panels stay where the names were measured
    for axes, of_axes in names.items():
        box = axes.get_window_extent()
        # Of the words alone: an annotation's own extent holds its line too.
        heights = np.array([Text.get_window_extent(name).height for name in of_axes]) * LINE / box.height
        wanted = np.array([axes.transData.transform(name.xy)[1] for name in of_axes])
        for name, height in zip(of_axes, _apart((wanted - box.y0) / box.height, heights), strict=True):
            name.set_position((BESIDE, height))


def _name(axes: Axes, end: End, size: float) -> Any:
    return axes.annotate(
        end.label,
        (end.x, end.y),
        (BESIDE, 0.5),
        textcoords="axes fraction",
        fontsize=size,
        color=on_white(end.color, TEXT_CONTRAST),
        va="center",
        arrowprops={"arrowstyle": "-", "color": end.color, "linewidth": 0.5, "relpos": (0, 0.5), "shrinkA": 1},
    )


def _apart(wanted: npt.NDArray[np.float64], heights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The heights nearest to those `wanted`, in their order, at which names do not overlap."""
    if not len(wanted):
        return wanted
    below = np.concatenate([[0], np.cumsum((heights[1:] + heights[:-1]) / 2)])
    placed = isotonic_regression(wanted - below).x
    low = heights[0] / 2
    return np.asarray(np.clip(placed, low, max(low, 1 - heights[-1] / 2 - below[-1])) + below)


def text_size(text: str, size: float) -> tuple[float, float]:
    """Width and height, in points."""
    return float(TextPath((0, 0), text, size=size).get_extents().width), size


def place_names(
    points: npt.NDArray[np.float64],
    named: Sequence[int],
    sizes: npt.NDArray[np.float64],
    box: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """The middles `[names, 2]` of the names of some of the `points` `[points, 2]`.

    `sizes` `[names, 2]` are the names' widths and heights, `box` `[[left, bottom], [right, top]]` is where they may be,
    all in one unit. Each is put where it covers no name before it and the fewest points, near its own.
    """
    angles = 2 * np.pi * np.arange(DIRECTIONS) / DIRECTIONS
    around = np.array([(step * np.cos(a), step * np.sin(a), step) for step, a in product(STEPS, angles)])
    middles = np.empty((len(named), 2))
    for place, (point, size) in enumerate(zip(named, sizes, strict=True)):
        # A wide name stands further away to the side than above.
        candidates = points[point] + around[:, :2] * size[1] + np.sign(around[:, :2].round(6)) * [size[0] / 2, 0]
        outside = ((candidates - size / 2 < box[0]) | (candidates + size / 2 > box[1])).any(axis=1)
        apart = np.abs(candidates[:, None] - middles[:place]) - (sizes[:place] + size) / 2
        overlap = np.prod(np.minimum(apart, 0), axis=-1).sum(axis=1) / np.prod(size)
        covered = (np.abs(candidates[:, None] - points) < size / 2).all(axis=-1).sum(axis=1)
        cost = around[:, 2] + COVERED * covered + 100 * overlap + 1000 * outside
        middles[place] = candidates[np.argmin(cost.round(6))]
    return middles


def spread_out(xy: npt.NDArray[np.float64], number: int, among: Sequence[int]) -> list[int]:
    """`number` of the points `[points, 2]` named in `among`: always the one farthest from those before it."""
    points = xy[list(among)]
    chosen = [int(np.argmin(np.square(points - points.mean(axis=0)).sum(axis=1)))]
    nearest = np.full(len(points), np.inf)
    while len(chosen) < min(number, len(points)):
        nearest = np.minimum(nearest, np.square(points - points[chosen[-1]]).sum(axis=1))
        nearest[chosen] = -1
        chosen.append(int(np.argmax(nearest)))
    return [among[place] for place in chosen]
