"""A plot of the mean of one measure by layer, for one model or for the two models of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import pandas as pd
from matplotlib import pyplot
from matplotlib.axes import Axes

from attnmix.figures import style
from attnmix.figures.labels import CURVE_LOOKS
from attnmix.figures.mixing import MARKERS, MAX_TICKS

HEIGHT = 2.4  # inches
INTERVAL = "95 % interval over texts"
BAND, FAINT = 0.2, 0.45  # opacity


class LayerMeans(NamedTuple):
    """The curve of one model: the mean of a measure by layer, with intervals."""

    label: str
    checkpoint: str
    """The checkpoint that determines the colour and marker of the curve."""
    means: pd.DataFrame
    """The columns `layer`, `mean`, `ci_low` and `ci_high`; intervals over few texts are NaN."""
    runs: Sequence[pd.DataFrame] = ()
    """The columns `layer` and `mean` of each training run, if the curve is a mean over several runs."""


def draw_layer_means(
    curves: Sequence[LayerMeans],
    title: str,
    ylabel: str,
    ax: Axes | None = None,
    ylim: tuple[float, float] | None = None,
) -> Axes:
    """Draw curves by layer, with their intervals as bands, and return the axes.

    Args:
        curves: One curve per model.
        title: The title, which names the measure.
        ylabel: The label of the y axis, which names the quantity and its unit.
        ax: The axes for the curves; by default, new axes in a one-column figure.
        ylim: The limits of the y axis.
    """
    with style.paper_style():
        if ax is None:
            _, ax = pyplot.subplots(figsize=(style.ONE_COLUMN, HEIGHT), layout="constrained")
        layers: set[int] = set()
        has_intervals = False
        for curve in curves:
            layers.update(curve.means["layer"])
            if curve.means["ci_low"].notna().any():
                has_intervals = True
            _draw_curve(ax, curve)
        ticks = sorted(layers)
        tick_step = ceil(len(ticks) / MAX_TICKS)
        ax.set(
            title=title,
            xlabel="Layer",
            ylabel=f"{ylabel}\n({INTERVAL})" if has_intervals else ylabel,
            xticks=ticks[::tick_step],
        )
        if ylim is not None:
            ax.set_ylim(*ylim)
        ax.legend()
    return ax


def _draw_curve(ax: Axes, curve: LayerMeans) -> None:
    """Draw the curve of one model, the thin curves of its training runs, and its interval as a band."""
    color, line = CURVE_LOOKS[curve.checkpoint]
    looks: Any = {"color": color, "linestyle": line, "clip_on": False}
    means = curve.means
    ax.plot(means["layer"], means["mean"], label=curve.label, marker=MARKERS[curve.checkpoint], **looks)
    for run in curve.runs:
        hidden_label = "_run"  # matplotlib omits labels with an underscore from legends
        ax.plot(run["layer"], run["mean"], label=hidden_label, linewidth=0.5, alpha=FAINT, **looks)
    if means["ci_low"].notna().any():
        ax.fill_between(means["layer"], means["ci_low"], means["ci_high"], color=color, alpha=BAND, linewidth=0)
