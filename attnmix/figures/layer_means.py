"""A plot of the mean of one measure by layer, for one model or both sides of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
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
    """The curve of one model."""

    label: str
    checkpoint: str
    """The checkpoint that determines the colour and marker of the curve."""
    means: pd.DataFrame
    """`layer`, `mean`, `ci_low` and `ci_high`; intervals over few texts are NaN."""
    runs: Sequence[pd.DataFrame] = ()
    """`layer` and `mean` of each training run, if the curve is a mean over several runs."""


def draw_layer_means(
    curves: Sequence[LayerMeans],
    title: str,
    ylabel: str,
    ax: Axes | None = None,
    ylim: tuple[float, float] | None = None,
) -> Axes:
    """Draw curves by layer with intervals as bands, and return the axes.

    Args:
        curves: One curve per model.
        title: The measure.
        ylabel: The quantity and its unit.
        ax: The axes to draw in; by default, new axes in a one-column figure.
        ylim: The limits of the y axis.
    """
    with style.paper_style():
        if ax is None:
            _, ax = pyplot.subplots(figsize=(style.ONE_COLUMN, HEIGHT), layout="constrained")
        layers: set[int] = set()
        has_interval = False
        for curve in curves:
            color, line = CURVE_LOOKS[curve.checkpoint]
            looks: Any = {"color": color, "linestyle": line, "clip_on": False}
            means = curve.means
            ax.plot(means["layer"], means["mean"], label=curve.label, marker=MARKERS[curve.checkpoint], **looks)
            for run in curve.runs:
                ax.plot(run["layer"], run["mean"], label="_run", linewidth=0.5, alpha=FAINT, **looks)
            if means["ci_low"].notna().any():
                has_interval = True
                ax.fill_between(means["layer"], means["ci_low"], means["ci_high"], color=color, alpha=BAND, linewidth=0)
            layers |= set(means["layer"])
        ticks = sorted(layers)
        ax.set(
            title=title,
            xlabel="Layer",
            ylabel=f"{ylabel}\n({INTERVAL})" if has_interval else ylabel,
            xticks=ticks[:: -(-len(ticks) // MAX_TICKS)],
        )
        if ylim is not None:
            ax.set_ylim(*ylim)
        ax.legend()
    return ax
