"""Labels beside what they name: at the ends of curves, and near points of a map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from scipy.optimize import isotonic_regression

from attnmix.figures.style import TEXT_CONTRAST, darken_for_contrast

LABEL_X = 1.06  # where the labels of curves begin, in panel widths
LINE_HEIGHT = 1.25  # in font sizes
# Offsets from a point to the centre of its label, in font sizes.
DISTANCES, ANGLES = (0.9, 1.7, 2.8, 4.2, 6.0), np.pi * np.arange(12) / 6
OFFSETS = np.array([(r * np.cos(a), r * np.sin(a)) for r, a in product(DISTANCES, ANGLES)]).round(6)


class CurveEnd(NamedTuple):
    """The last point of a curve, and the curve's label."""

    x: float
    y: float
    label: str
    color: str


def label_curves(axes: Axes, ends: Sequence[CurveEnd], size: float) -> None:
    """Write each curve's label to the right of the panel, as near to the height of its end as the others allow.

    The panel must have its final place and limits.
    """
    if not ends:
        return
    figure: Any = axes.figure
    ends = sorted(ends, key=lambda end: end.y)
    bottom, top = axes.get_ylim()
    wanted = np.array([(end.y - bottom) / (top - bottom) for end in ends])
    panel_height = axes.get_position().height * figure.get_figheight() * 72
    heights = np.array([(end.label.count("\n") + 1) * size * LINE_HEIGHT / panel_height for end in ends])
    # Centres of adjacent labels, stacked without gaps. Least squares moves them as little as possible.
    stacked = np.cumsum(heights) - heights / 2
    bottoms = np.clip(isotonic_regression(wanted - stacked).x, 0, max(0.0, 1 - heights.sum()))
    for end, y in zip(ends, bottoms + stacked, strict=True):
        axes.annotate(
            end.label,
            (end.x, end.y),
            (LABEL_X, y),
            textcoords="axes fraction",
            fontsize=size,
            color=darken_for_contrast(end.color, TEXT_CONTRAST),
            va="center",
            arrowprops={"arrowstyle": "-", "color": end.color, "linewidth": 0.5, "relpos": (0, 0.5), "shrinkA": 1},
        )


def text_width(text: str, size: float) -> float:
    """Return the width of a text in points."""
    return float(text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)[0])


def place_labels(
    axes: Axes, xy: npt.NDArray[np.float64], labels: Mapping[int, str], size: float
) -> npt.NDArray[np.float64]:
    """Return the centres `[labels, 2]` of labels for some of the points `xy` `[points, 2]`, in data coordinates.

    `labels` maps a point's index to its label. Each is placed near its point, within the axes, where it overlaps no
    label before it and covers the fewest points.
    """
    figure: Any = axes.figure
    pixels = figure.dpi / 72  # of a point of print
    points, box = axes.transData.transform(xy), axes.get_window_extent().get_points()
    sizes = pixels * np.array([(text_width(label, size) + 2, size + 2) for label in labels.values()])
    centres = np.empty((len(labels), 2))
    for place, (index, extent) in enumerate(zip(labels, sizes, strict=True)):
        # Left and right of a point, a label is moved by half its width.
        candidates = points[index] + OFFSETS * size * pixels + np.sign(OFFSETS) * [extent[0] / 2, 0]
        outside = ((candidates - extent / 2 < box[0]) | (candidates + extent / 2 > box[1])).any(axis=1)
        gaps = np.abs(candidates[:, None] - centres[:place]) - (sizes[:place] + extent) / 2
        overlap = np.prod(np.minimum(gaps, 0), axis=-1).sum(axis=1) / np.prod(extent)
        covered = (np.abs(candidates[:, None] - points) < extent / 2).all(axis=-1).sum(axis=1)
        cost = np.hypot(*OFFSETS.T) + 0.3 * covered + 100 * overlap + 1000 * outside
        centres[place] = candidates[np.argmin(cost.round(6))]
    return axes.transData.inverted().transform(centres)


def spread_out(xy: npt.NDArray[np.float64], labels: Mapping[int, str], number: int) -> dict[int, str]:
    """Return at most `number` of the labels: starting near the centre, always that of the farthest point."""
    indices = list(labels)
    points = xy[indices]
    chosen = [int(np.argmin(np.square(points - points.mean(axis=0)).sum(axis=1)))]
    distance = np.full(len(points), np.inf)
    while len(chosen) < min(number, len(points)):
        distance = np.minimum(distance, np.square(points - points[chosen[-1]]).sum(axis=1))
        distance[chosen] = -1
        chosen.append(int(np.argmax(distance)))
    return {indices[place]: labels[indices[place]] for place in chosen}
