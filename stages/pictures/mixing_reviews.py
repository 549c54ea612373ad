"""The figure of single reviews: how far their mixing ratios lie apart, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D

from stages.mixing.lengths import LENGTHS, length_class
from stages.mixing.ratios import RATIOS, preferred_ratio
from stages.parameters import FiguresParameters
from stages.pictures.style import PAGE_HEIGHT, TWO_COLUMNS, dark_part, save_figure
from stages.vocabulary import CHECKPOINTS

LAYERS_IN_ROW = 12
ROW_HEIGHT, FOOT = 2.5, 0.55  # inches
SHADES = dict(zip(CHECKPOINTS, ("Blues", "Oranges"), strict=True))
SHAPES = "os^DvPX*"
SPREAD = 0.42  # of a layer's room, from the middle of all reviews to the outermost
BINS = 48  # along the y axis: reviews of one bin stand side by side
DOT = 2.5  # points, a dot's extent and what lies between the middles of two where there is space enough
MARGIN = 0.7  # inches, left of the first layer
MOST_DOTS = 5000  # beyond, they are pixels also in a pdf


def draw_reviews(
    reviews: pd.DataFrame, weighted: pd.DataFrame, axis: str, path: Path, figures: FiguresParameters
) -> None:
    """Each review's mean ratio at every layer, and their mean with its interval; draw under `paper_style`.

    `reviews` is `mixing_by_review.csv`, `weighted` `mixing_weighted.csv`; the ratio is the preferred one.
    """
    method = preferred_ratio(reviews["method"].unique())
    shown = reviews[reviews["method"] == method]
    chosen = {"method": method, "weight": "review", "tokens_of": "all"}
    means = weighted[(weighted[list(chosen)] == pd.Series(chosen)).all(axis=1) & (weighted["layer"] != "all")]
    means = means.assign(layer=means["layer"].astype(int))
    lengths = np.unique(length_class(shown["tokens"]))
    layers = sorted(shown["layer"].unique())
    rows = [layers[start : start + LAYERS_IN_ROW] for start in range(0, len(layers), LAYERS_IN_ROW)]
    height = min(ROW_HEIGHT * len(rows) + FOOT, PAGE_HEIGHT)
    figure = Figure(figsize=(TWO_COLUMNS, height), layout="constrained")
    panels = figure.subplots(len(rows), 1, sharey=True, squeeze=False)[:, 0]
    limits = _limits(shown["mean"])
    for axes, in_row in zip(panels, rows, strict=True):
        axes.set(ylim=limits, xlim=(in_row[0] - 0.55, in_row[0] + len(rows[0]) - 0.45), xticks=in_row)
        axes.tick_params("x", length=0)
        for edge in in_row[1:]:
            axes.axvline(edge - 0.5, color="0.9", linewidth=0.6, zorder=0)
        _draw_row(axes, shown, means, in_row, lengths)
    panels[-1].set_xlabel(axis)
    label = f"Mixing ratio of each review\n({RATIOS[method].mark.label})"
    figure.supylabel(label, fontsize=8, multialignment="center")
    _draw_key(figure, [name for name in CHECKPOINTS if name in set(shown["checkpoint"])], lengths)
    save_figure(figure, path, figures.formats, figures.dpi)


def _limits(values: pd.Series) -> tuple[float, float]:
    """Around all reviews, within what a ratio can be."""
    low, high = float(values.min()), float(values.max())
    room = 0.04 * max(high - low, 0.01)
    return max(low - room, -0.005), min(high + room, 1.005)


def _draw_row(
    axes: Axes, reviews: pd.DataFrame, means: pd.DataFrame, layers: Sequence[int], lengths: npt.NDArray[np.int64]
) -> None:
    """Every checkpoint's reviews at each of the layers, side by side, and over them their mean."""
    names = [name for name in CHECKPOINTS if name in set(reviews["checkpoint"])]
    width = SPREAD / len(names)
    step = DOT / 72 * np.ptp(axes.get_xlim()) / (TWO_COLUMNS - MARGIN)
    for place, name in enumerate(names):
        middle = (2 * place - len(names) + 1) * 0.25 * (len(names) > 1)
        of_name = reviews[reviews["checkpoint"] == name]
        for layer, rows in of_name[of_name["layer"].isin(layers)].groupby("layer"):
            x = float(str(layer)) + middle + _beside(rows["mean"].to_numpy(), axes.get_ylim(), width, step)
            classes = length_class(rows["tokens"])
            for number, length in enumerate(lengths):
                of_length = classes == length
                axes.scatter(
                    x[of_length],
                    rows["mean"].to_numpy()[of_length],
                    s=DOT**2,
                    color=_shade(name, number, len(lengths)),
                    marker=SHAPES[number % len(SHAPES)],
                    linewidths=0,
                    rasterized=len(of_name) > MOST_DOTS,
                )
        of_row = means[(means["checkpoint"] == name) & means["layer"].isin(layers)]
        place_of, mean = of_row["layer"] + middle, of_row["mean"]
        ends = [mean - of_row["ci_low"], of_row["ci_high"] - mean]
        for color, thickness in (("white", 1.6), ("black", 0.9)):  # black lines would be lost among dark dots
            axes.hlines(mean, place_of - width, place_of + width, color=color, linewidth=thickness, zorder=3)
            of_lines: dict[str, Any] = {"ecolor": color, "elinewidth": thickness, "capthick": thickness, "zorder": 3}
            axes.errorbar(place_of, mean, ends, fmt="none", capsize=1.5, **of_lines)


def _beside(
    values: npt.NDArray[np.float64], limits: tuple[float, float], width: float, step: float
) -> npt.NDArray[np.float64]:
    """Offsets along x that set reviews of one height side by side around the middle, at most `width` away from it."""
    bins = np.floor((values - limits[0]) / (limits[1] - limits[0]) * BINS)
    order = np.argsort(bins, kind="stable")
    _, starts, counts = np.unique(bins[order], return_index=True, return_counts=True)
    step = min(step, 2 * width / max(1, counts.max() - 1))
    offsets = np.empty(len(values))
    for start, count in zip(starts, counts, strict=True):
        offsets[order[start : start + count]] = (np.arange(count) - (count - 1) / 2) * step
    return offsets


def _shade(checkpoint: str, number: int, lengths: int) -> tuple[float, float, float, float]:
    return dark_part(SHADES[checkpoint])((number + 0.5) / lengths)


def _draw_key(figure: Figure, names: Sequence[str], lengths: npt.NDArray[np.int64]) -> None:
    """Below: checkpoints by colour, lengths by shape and shade."""
    sides = ("", "") if len(names) == 1 else (" (left)", " (right)")
    handles: list[Any] = [Line2D([], [], color=_shade(name, 0, 1), linewidth=4) for name in names]
    labels = [f"{CHECKPOINTS[name]}{side}" for name, side in zip(names, sides, strict=False)]
    for number, length in enumerate(lengths):
        shape: dict[str, Any] = {"marker": SHAPES[number % len(SHAPES)], "linestyle": "none", "markeredgewidth": 0}
        handles.append(tuple(Line2D([], [], color=_shade(name, number, len(lengths)), **shape) for name in names))
        labels.append(f"{LENGTHS[length]} tokens")
    handles.append(Line2D([], [], color="black", marker="|", markersize=6, linewidth=0.9))
    labels.append("mean of the reviews, 95 % interval")
    columns = min(4, -(-len(handles) // 2))
    pairs = {tuple: HandlerTuple(ndivide=None, pad=0.3)}
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handler_map=pairs)
