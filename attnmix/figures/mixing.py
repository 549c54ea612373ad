"""Figures of mixing over all texts: curves by layer, and the mean ratios of single reviews.

Call the functions that return figures within the context manager `paper_style`.
"""

from collections.abc import Mapping
from math import ceil
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attnmix.core.names import ALL_DONORS, OTHER_CLASS, SAME_CLASS
from attnmix.core.statistics import MIN_INTERVAL_DOCUMENTS
from attnmix.figures import style
from attnmix.figures.labels import (
    CHECKPOINTS,
    CONTROL_LABELS,
    CURVE_LOOKS,
    RANDOM_MODEL,
    RATIO_MARKS,
    STEP_MARKS,
    STEP_MEASURES,
    Mark,
)
from attnmix.measures.ratios import preferred_ratio

# Curves
SHOWN_STEP_MEASURES = ("cosine_input", "cosine_previous")
LABEL_CHARACTERS = 22  # maximum length of a line in the label of a curve
PANEL_HEIGHT = 1.95  # inches, like the following sizes
STEP_PANEL_HEIGHT = 1.7
LEFT = 0.57
LABELS = 1.05  # width of the curve labels to the right of each panel
HEAD = 0.25
FOOT = 0.42
GAP = 0.32
PANEL_DISTANCE = LABELS + 0.1  # inches
MAX_TICKS = 16
TOKEN_MEAN_LABEL = "Mixing ratio, mean over tokens\n(95 % interval)"
OWN_SHARE_LABEL = "Own share of a token's vector,\nmean over tokens (95 % interval)"

DONOR_LINES: dict[str, tuple[Any, str]] = {
    ALL_DONORS: ("-", "both classes"),
    SAME_CLASS: ("--", "the same class"),
    OTHER_CLASS: (":", "another class"),
}
"""Line style and name of each kind of donor texts, which provide the replacements of exchanged words."""
MARKERS = {"pretrained": "o", "finetuned": "s"}
SHOWN_CONTROLS = ("text_mean_value", "corpus_value", "shuffled_words", "random_weights")

# Reviews
REVIEWS_HEIGHT = 3.0  # inches
REVIEW_LOOKS = {"pretrained": ("Greys", "o"), "finetuned": ("Blues", "s")}  # similar to the page's colours
SWARM_WIDTH = 0.42  # maximum offset of a dot, in layers; halved for two checkpoints
SWARM_BINS = 48  # bins of the y axis; reviews in one bin are drawn side by side
DOT = 2.5  # diameter of a dot, in points
PANEL_WIDTH = 6.3  # inches
MAX_VECTOR_DOTS = 5000  # if there are more dots, they are rasterised in PDFs


class LabelledCurve(NamedTuple):
    """The curve of a checkpoint or control."""

    name: str
    label: str
    rows: pd.DataFrame
    """Means and intervals by layer and ratio."""


class SwarmSide(NamedTuple):
    """The horizontal position of a checkpoint's dots (one dot per review) relative to the centre of each layer."""

    offset: float
    """The signed distance from the layer's centre, in layers."""
    suffix: str
    """The text after the checkpoint's name in the legend."""


SWARM_SIDES = {
    1: [SwarmSide(0.0, "")],
    2: [SwarmSide(-0.25, " (left)"), SwarmSide(0.25, " (right)")],
}
"""The horizontal position of each checkpoint's dots, by the number of checkpoints."""


def draw_by_layer(mixing: pd.DataFrame, xlabel: str) -> Figure:
    """Return a figure of the mean ratios in the table `mixing`, with a panel per checkpoint and a curve per ratio."""
    by_checkpoint = mixing.groupby("checkpoint", sort=False)
    figure, panels = _create_curve_panels(1, len(by_checkpoint), PANEL_HEIGHT)
    for axes, (checkpoint, rows) in zip(panels[0], by_checkpoint, strict=True):
        title = CHECKPOINTS[str(checkpoint)]
        axes.set(title=title, xlabel=xlabel, ylim=(0, 1))
        _draw_curves(axes, rows, "method", RATIO_MARKS)
        style.label_curves(axes)
    panels[0, 0].set_ylabel(TOKEN_MEAN_LABEL)
    return figure


def draw_controls(mixing: pd.DataFrame, controls: pd.DataFrame, xlabel: str) -> Figure:
    """Return a one-column figure of the preferred ratio by layer, with a curve per checkpoint and per control.

    The controls are those of the last checkpoint and, if it was measured, the control with random weights. Bands are
    95 % intervals over texts.

    Args:
        mixing: The table `mixing.csv`.
        controls: The table `mixing_controls.csv`.
        xlabel: The label of the x axis.
    """
    methods = mixing["method"].unique()
    method = preferred_ratio(methods.tolist())
    figure, panels = _create_curve_panels(1, 1, PANEL_HEIGHT)
    axes = panels[0, 0]
    title = RATIO_MARKS[method].label
    axes.set(xlabel=xlabel, ylabel=TOKEN_MEAN_LABEL, ylim=(0, 1), title=title)
    for curve in _list_control_curves(mixing, controls):
        _draw_control_curve(axes, curve, method)
    _set_layer_ticks(axes, mixing)
    style.label_curves(axes)
    return figure


def _draw_control_curve(axes: Axes, curve: LabelledCurve, method: str) -> None:
    """Draw the mean of one ratio (`method`) by layer, with its interval; nothing is drawn if there are no means."""
    is_of_method = curve.rows["method"] == method
    rows = curve.rows[is_of_method].dropna(subset="mean").sort_values("layer")
    if rows.empty:
        return
    color, linestyle = CURVE_LOOKS[curve.name]
    axes.plot(
        rows["layer"],
        rows["mean"],
        label=fill(curve.label, LABEL_CHARACTERS),
        color=color,
        linestyle=linestyle,
        marker=MARKERS.get(curve.name),  # controls have no marker
        clip_on=False,
    )
    _draw_interval(axes, rows, color, 0.2)


def _list_control_curves(mixing: pd.DataFrame, controls: pd.DataFrame) -> list[LabelledCurve]:
    """Return one curve per measured checkpoint, and then one curve per control.

    The curve of a control shows its values with the last checkpoint or with the random model.
    """
    measured = set(mixing["checkpoint"])
    checkpoints = [name for name in CHECKPOINTS if name in measured]
    curves = []
    for name in checkpoints:
        rows = mixing[mixing["checkpoint"] == name]
        curves.append(LabelledCurve(name, CHECKPOINTS[name], rows))
    is_shown = controls["checkpoint"].isin([checkpoints[-1], RANDOM_MODEL])
    shown_controls = controls[is_shown]
    for name in SHOWN_CONTROLS:
        rows = shown_controls[shown_controls["control"] == name]
        curves.append(LabelledCurve(name, CONTROL_LABELS[name], rows))
    return curves


def _draw_interval(axes: Axes, curve: pd.DataFrame, color: str, alpha: float) -> None:
    """Draw the interval of a curve as a band, except in layers with too few texts for an interval."""
    low = mask_few_texts(curve, "ci_low")
    high = mask_few_texts(curve, "ci_high")
    axes.fill_between(curve["layer"], low, high, color=color, alpha=alpha, linewidth=0)


def mask_few_texts(rows: pd.DataFrame, column: str) -> pd.Series:
    """Return a column of `rows`; the values of rows with too few texts for an interval are replaced by NaN.

    The column `documents` contains the number of texts of each row. If there is no such column, no value is replaced.
    """
    if "documents" not in rows:
        return rows[column]
    has_interval = rows["documents"] >= MIN_INTERVAL_DOCUMENTS
    return rows[column].where(has_interval)


def _set_layer_ticks(axes: Axes, rows: pd.DataFrame) -> None:
    """Label all layers or, in deep models, every n-th layer, so that there are at most `MAX_TICKS` labels."""
    unique_layers = rows["layer"].unique()
    layers = sorted(unique_layers)
    step = ceil(len(layers) / MAX_TICKS)
    axes.set_xticks(layers[::step])


def draw_own_share(exchange: pd.DataFrame, xlabel: str) -> Figure | None:
    """Return a one-column figure of the own share by layer, with a curve per checkpoint and kind of donor texts.

    Return None if `exchange`, the table `exchange.csv`, contains no values of the own share. The colour of a curve
    indicates the checkpoint. The line style indicates the kind of donor texts, which provide the replacement words.
    Only the curves for all donors have intervals.
    """
    is_own_share = exchange["quantity"] == "own_share"
    has_shown_donors = exchange["donor"].isin(list(DONOR_LINES))
    shares = exchange[is_own_share & has_shown_donors]
    if shares.empty:
        return None
    figure, panels = _create_curve_panels(1, 1, PANEL_HEIGHT)
    axes = panels[0, 0]
    axes.set(xlabel=xlabel, ylabel=OWN_SHARE_LABEL, ylim=(0, 1))
    for checkpoint in MARKERS:
        checkpoint_shares = shares[shares["checkpoint"] == checkpoint]
        for donor, curve in checkpoint_shares.groupby("donor", sort=False):
            _draw_donor_curve(axes, curve, checkpoint, str(donor))
    _set_layer_ticks(axes, shares)
    style.label_curves(axes)
    axes.legend(handles=_list_donor_handles(), loc="lower left", title="Words from")
    with_all_donors = shares[shares["donor"] == ALL_DONORS]
    axes.set_title(_describe_texts(with_all_donors))
    return figure


def _list_donor_handles() -> list[Line2D]:
    """Return a legend entry with the line style of each kind of donor texts."""
    handles = []
    for linestyle, label in DONOR_LINES.values():
        handle = Line2D([], [], color="black", linestyle=linestyle, label=label)
        handles.append(handle)
    return handles


def _draw_donor_curve(axes: Axes, curve: pd.DataFrame, checkpoint: str, donor: str) -> None:
    """Draw the own share for one checkpoint and one kind of donor; only the curve for all donors has an interval."""
    color, _ = CURVE_LOOKS[checkpoint]
    layers = curve["layer"]
    means = curve["mean"]
    if donor == ALL_DONORS:
        marker = MARKERS[checkpoint]
        label = CHECKPOINTS[checkpoint]
        axes.plot(layers, means, color=color, marker=marker, label=label, clip_on=False)
        _draw_interval(axes, curve, color, 0.25)
    else:
        linestyle, _ = DONOR_LINES[donor]
        hidden_label = f"_{donor}"  # labels with an underscore are not shown
        axes.plot(layers, means, color=color, linestyle=linestyle, label=hidden_label)


def _describe_texts(shares: pd.DataFrame) -> str:
    """Return a title with the number of averaged reviews and the mean number of averaged tokens per review."""
    documents = shares["documents"].max()
    tokens = shares["tokens"].max() / documents
    return f"{documents:.0f} reviews, {tokens:.0f} tokens of each"


def draw_steps(steps: pd.DataFrame, xlabel: str) -> Figure:
    """Return a figure of cosines at the steps within layers, with a row per checkpoint and a column per kind of cosine.

    `steps` contains the rows of the table `geometry.csv` that describe the steps within layers. Each panel has a curve
    per step.
    """
    by_checkpoint = steps.groupby("checkpoint", sort=False)
    figure, panels = _create_curve_panels(len(by_checkpoint), len(SHOWN_STEP_MEASURES), STEP_PANEL_HEIGHT)
    for row, (checkpoint, rows) in zip(panels, by_checkpoint, strict=True):
        checkpoint_label = CHECKPOINTS[str(checkpoint)]
        for axes, measure in zip(row, SHOWN_STEP_MEASURES, strict=True):
            measure_rows = rows[rows["measure"] == measure]
            _draw_curves(axes, measure_rows, "step", STEP_MARKS)
            axes.axhline(0, color="0.7", linewidth=0.5, zorder=0)
            axes.set_title(f"{checkpoint_label}: {STEP_MEASURES[measure]}")
        row[0].set_ylabel("Cosine (95 % interval)")
    for axes in panels[-1]:
        axes.set_xlabel(xlabel)
    for axes in panels.flat:  # label placement needs the final common limits
        style.label_curves(axes)
    return figure


def _create_curve_panels(rows: int, columns: int, panel_height: float) -> tuple[Figure, Any]:
    """Return a figure and its panels `[rows, columns]`, with space for labels to the right of each panel."""
    width = style.ONE_COLUMN if columns == 1 else style.TWO_COLUMNS
    row_gaps = (rows - 1) * GAP
    height = HEAD + rows * panel_height + row_gaps + FOOT
    figure = Figure(figsize=(width, height))
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    column_gaps = (columns - 1) * PANEL_DISTANCE
    panel_width = (width - LEFT - LABELS - column_gaps) / columns
    figure.subplots_adjust(
        left=LEFT / width,
        right=1 - LABELS / width,
        bottom=FOOT / height,
        top=1 - HEAD / height,
        wspace=PANEL_DISTANCE / panel_width,
        hspace=GAP / panel_height,
    )
    return figure, panels


def _draw_curves(axes: Axes, rows: pd.DataFrame, column: str, marks: Mapping[str, Mark]) -> None:
    """Draw a curve with its interval for each name in `column`; `marks` contains the labels and colours by name."""
    known = rows.dropna(subset="mean")
    for name, mark in marks.items():
        curve = known[known[column] == name]
        if curve.empty:
            continue
        color = style.darken_for_contrast(mark.color)
        label = fill(mark.label, LABEL_CHARACTERS, break_on_hyphens=False)
        axes.plot(curve["layer"], curve["mean"], color=color, marker=mark.marker, label=label)
        _draw_interval(axes, curve, color, 0.25)
    _set_layer_ticks(axes, rows)


def draw_reviews(reviews: pd.DataFrame, weighted: pd.DataFrame, xlabel: str) -> Figure:
    """Return a figure of the mean ratio of each review by layer, with the mean over reviews and its interval.

    The figure shows the preferred ratio.

    Args:
        reviews: The table `mixing_by_review.csv`.
        weighted: The table `mixing_weighted.csv`.
        xlabel: The label of the x axis.
    """
    methods = reviews["method"].unique()
    method = preferred_ratio(methods)
    reviews = reviews[reviews["method"] == method]
    means = _select_review_means(weighted, method)
    figure = Figure(figsize=(style.TWO_COLUMNS, REVIEWS_HEIGHT), layout="constrained")
    axes = _add_review_axes(figure, reviews, xlabel)
    axes.set_ylabel(f"Mixing ratio, mean over a review's tokens\n({RATIO_MARKS[method].label})")
    measured = set(reviews["checkpoint"])
    checkpoints = [name for name in REVIEW_LOOKS if name in measured]
    swarm_width = SWARM_WIDTH / len(checkpoints)
    shortest = reviews["tokens"].min()
    longest = reviews["tokens"].max()
    shading = LogNorm(shortest, longest + 1)  # the limits must differ
    # With two checkpoints, the dots of the first are to the left of a layer's centre, those of the second to the right.
    sides = SWARM_SIDES[len(checkpoints)]
    handles = []
    for name, side in zip(checkpoints, sides, strict=True):
        rows = reviews[reviews["checkpoint"] == name]
        handle = _draw_swarms(axes, rows, name, side, swarm_width, shading)
        handles.append(handle)
        checkpoint_means = means[means["checkpoint"] == name]
        _draw_review_means(axes, checkpoint_means, side.offset, swarm_width)
    handles.append(_create_mean_handle())
    title = f"The darker a dot, the longer the review, from {shortest} to {longest} tokens"
    figure.legend(handles=handles, title=title, title_fontsize=7, loc="outside lower center", ncols=3)
    return figure


def _create_mean_handle() -> Line2D:
    """Return the legend entry of the means over reviews."""
    return Line2D(
        [],
        [],
        color="black",
        marker="|",
        markersize=6,
        linewidth=0.9,
        label="mean over reviews, 95 % interval",
    )


def _select_review_means(weighted: pd.DataFrame, method: str) -> pd.DataFrame:
    """Return the means of one ratio over all tokens, with equal weights for reviews, by checkpoint and layer.

    `weighted` is the table `mixing_weighted.csv`; its rows with means over all layers are omitted.
    """
    is_of_method = weighted["method"] == method
    is_over_reviews = weighted["weight"] == "review"
    is_over_all_tokens = weighted["tokens_of"] == "all"
    is_of_one_layer = weighted["layer"] != "all"
    means = weighted[is_of_method & is_over_reviews & is_over_all_tokens & is_of_one_layer]
    return means.astype({"layer": int})


def _add_review_axes(figure: Figure, reviews: pd.DataFrame, xlabel: str) -> Axes:
    """Add axes whose limits contain the ratios of all reviews, with vertical lines between layers."""
    layers = sorted(reviews["layer"].unique())
    left = layers[0] - 0.55
    right = layers[-1] + 0.55
    axes = figure.add_subplot(xlim=(left, right), xticks=layers, xlabel=xlabel)
    ratios = reviews["mean"]
    margin = 0.04 * max(np.ptp(ratios), 0.01)
    bottom = max(ratios.min() - margin, -0.005)  # ratios are in [0, 1]
    top = min(ratios.max() + margin, 1.005)
    axes.set_ylim(bottom, top)
    axes.tick_params("x", length=0)
    for layer in layers[1:]:
        axes.axvline(layer - 0.5, color="0.9", linewidth=0.6, zorder=0)
    return axes


def _draw_swarms(
    axes: Axes,
    rows: pd.DataFrame,
    checkpoint: str,
    side: SwarmSide,
    width: float,
    shading: Normalize,
) -> Line2D:
    """Draw the reviews of a checkpoint as dots, and return their legend entry.

    `rows` contains the mean ratio of each review by layer. In each layer, dots of similar height are side by side, at
    most `width` from the centre of `side`. Dots of longer reviews are darker, according to `shading`.
    """
    # The diameter of a dot is converted from points (1 / 72 inch) to units of the x axis, which are layers.
    dot_width = DOT / 72 / PANEL_WIDTH * np.ptp(axes.get_xlim())
    by_layer = rows.groupby("layer")["mean"]
    offsets = by_layer.transform(_place_in_swarm, limits=axes.get_ylim(), width=width, step=dot_width)
    cmap_name, marker = REVIEW_LOOKS[checkpoint]
    cmap = style.high_contrast_cmap(cmap_name)
    axes.scatter(
        rows["layer"] + side.offset + offsets,
        rows["mean"],
        c=rows["tokens"],
        cmap=cmap,
        norm=shading,
        s=DOT**2,
        marker=marker,
        linewidths=0,
        rasterized=len(rows) > MAX_VECTOR_DOTS,
    )
    label = CHECKPOINTS[checkpoint] + side.suffix
    return Line2D([], [], color=cmap(0.5), marker=marker, linestyle="none", label=label)


def _draw_review_means(axes: Axes, means: pd.DataFrame, offset: float, width: float) -> None:
    """Draw the means over reviews as horizontal lines with intervals.

    `offset` is the distance of a line's centre from its layer, and `width` is half the length of a line.
    """
    x = means["layer"] + offset
    mean = means["mean"]
    low = mask_few_texts(means, "ci_low")
    high = mask_few_texts(means, "ci_high")
    interval = [mean - low, high - mean]
    for color, thickness in (("white", 1.6), ("black", 0.9)):  # the white outline separates lines from dark dots
        axes.hlines(mean, x - width, x + width, color=color, linewidth=thickness, zorder=3)
        axes.errorbar(
            x,
            mean,
            interval,
            fmt="none",
            capsize=1.5,
            ecolor=color,
            elinewidth=thickness,
            capthick=thickness,
            zorder=3,
        )


def _place_in_swarm(
    values: pd.Series,
    limits: tuple[float, float],
    width: float,
    step: float,
) -> npt.NDArray[np.float64]:
    """Return the offset along x of each of N values `[N]`, so that values of similar height are side by side.

    Args:
        values: The positions along y.
        limits: The limits of the y axis.
        width: The maximum offset.
        step: The distance between neighbouring values, unless many values require a smaller one.
    """
    bottom, top = limits
    heights = (values - bottom) / (top - bottom)
    bin_numbers = (heights * SWARM_BINS).astype(int)
    bins = values.groupby(bin_numbers)  # values of similar height
    counts = bins.transform("size")
    centred_ranks = bins.cumcount() - (counts - 1) / 2  # consecutive numbers within a bin, with a mean of 0
    largest_step = 2 * width / max(1, counts.max() - 1)  # the fullest bin then extends from -width to width
    return np.asarray(centred_ranks * min(step, largest_step))
