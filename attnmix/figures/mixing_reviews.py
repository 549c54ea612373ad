"""Single reviews: how far their mixing ratios lie apart, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attnmix.core.options import RenderParameters
from attnmix.figures.labels import CHECKPOINTS, RATIO_MARKS
from attnmix.figures.style import TWO_COLUMNS, high_contrast_cmap, save_figure
from attnmix.measures.ratios import preferred_ratio

HEIGHT = 3.0  # inches
SHADES = dict(zip(CHECKPOINTS, ("Blues", "Oranges"), strict=True))
SHAPES = dict(zip(CHECKPOINTS, "os", strict=True))
SWARM_WIDTH = 0.42  # share of a layer's width for the reviews on one side
BINS = 48  # bins of the y axis; reviews in one bin are drawn side by side
DOT = 2.5  # points
PANEL_WIDTH = 6.3  # inches
MAX_VECTOR_DOTS = 5000  # more are pixels in a PDF too


def draw_reviews(
    reviews: pd.DataFrame, weighted: pd.DataFrame, xlabel: str, path: Path, figures: RenderParameters
) -> None:
    """Draw each review's mean ratio at every layer, and the mean of all with its interval; call under `paper_style`.

    `reviews` is `mixing_by_review.csv`, `weighted` is `mixing_weighted.csv`; the ratio is the preferred one.
    """
    method = preferred_ratio(reviews["method"].unique())
    reviews = reviews[reviews["method"] == method]
    means = weighted.query("method == @method and weight == 'review' and tokens_of == 'all' and layer != 'all'")
    means = means.assign(layer=means["layer"].astype(int))
    checkpoints = [name for name in CHECKPOINTS if name in set(reviews["checkpoint"])]
    layers, ratios, tokens = sorted(reviews["layer"].unique()), reviews["mean"], reviews["tokens"]
    figure = Figure(figsize=(TWO_COLUMNS, HEIGHT), layout="constrained")
    axes = figure.add_subplot(xlim=(layers[0] - 0.55, layers[-1] + 0.55), xticks=layers, xlabel=xlabel)
    margin = 0.04 * max(np.ptp(ratios), 0.01)
    axes.set_ylim(max(ratios.min() - margin, -0.005), min(ratios.max() + margin, 1.005))  # within what a ratio can be
    axes.set_ylabel(f"Mixing ratio of each review\n({RATIO_MARKS[method].label})")
    axes.tick_params("x", length=0)
    for edge in layers[1:]:
        axes.axvline(edge - 0.5, color="0.9", linewidth=0.6, zorder=0)
    handles: list[Any] = []
    sides = {
        name: f" ({side})" if len(checkpoints) > 1 else ""
        for name, side in zip(CHECKPOINTS, ("left", "right"), strict=True)
    }
    width = SWARM_WIDTH / len(checkpoints)
    step = DOT / 72 / PANEL_WIDTH * np.ptp(axes.get_xlim())
    for name, center in zip(checkpoints, (-0.25, 0.25) if len(checkpoints) > 1 else (0,), strict=True):
        rows = reviews[reviews["checkpoint"] == name]
        offsets = rows.groupby("layer")["mean"].transform(_swarm, limits=axes.get_ylim(), width=width, step=step)
        cmap, shape = high_contrast_cmap(SHADES[name]), SHAPES[name]
        shades: Any = {"c": rows["tokens"], "cmap": cmap, "norm": LogNorm(tokens.min(), tokens.max() + 1)}
        dots: Any = {"s": DOT**2, "marker": shape, "linewidths": 0, "rasterized": len(rows) > MAX_VECTOR_DOTS}
        axes.scatter(rows["layer"] + center + offsets, rows["mean"], **shades, **dots)
        label = CHECKPOINTS[name] + sides[name]
        handles.append(Line2D([], [], color=cmap(0.5), marker=shape, linestyle="none", label=label))
        own = means[means["checkpoint"] == name]
        x, mean = own["layer"] + center, own["mean"]
        interval = [mean - own["ci_low"], own["ci_high"] - mean]
        for color, thickness in (("white", 1.6), ("black", 0.9)):  # black alone would be lost among dark dots
            axes.hlines(mean, x - width, x + width, color=color, linewidth=thickness, zorder=3)
            lines: Any = {"ecolor": color, "elinewidth": thickness, "capthick": thickness, "zorder": 3}
            axes.errorbar(x, mean, interval, fmt="none", capsize=1.5, **lines)
    mean_label = "mean of the reviews, 95 % interval"
    handles.append(Line2D([], [], color="black", marker="|", markersize=6, linewidth=0.9, label=mean_label))
    title = f"The darker a dot, the longer the review, from {tokens.min()} to {tokens.max()} tokens"
    figure.legend(handles=handles, title=title, title_fontsize=7, loc="outside lower center", ncols=3)
    save_figure(figure, path, figures.formats, figures.dpi)


def _swarm(values: pd.Series, limits: tuple[float, float], width: float, step: float) -> npt.NDArray[np.float64]:
    """Return offsets along x, at most `width`, that set values of about the same height side by side."""
    bins = values.groupby(((values - limits[0]) / (limits[1] - limits[0]) * BINS).astype(int))
    counts = bins.transform("size")
    offsets = bins.cumcount() - (counts - 1) / 2
    return np.asarray(offsets * min(step, 2 * width / max(1, counts.max() - 1)))
