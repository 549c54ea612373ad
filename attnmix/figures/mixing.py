"""Figures of mixing: curves by layer, single reviews, strips of a text, and contribution matrices.

Each function returns a figure; call it within `paper_style`.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from attnmix.core.names import ALL_DONORS, OTHER_CLASS, SAME_CLASS
from attnmix.core.statistics import MIN_INTERVAL_DOCUMENTS
from attnmix.core.store.runs import Run, row_shares
from attnmix.figures import style
from attnmix.figures.labels import (
    CHECKPOINTS,
    CONTROL_LABELS,
    CURVE_LOOKS,
    MATRIX_LABELS,
    RANDOM_MODEL,
    RATIO_MARKS,
    STEP_MARKS,
    STEP_MEASURES,
    Mark,
    layer_label,
)
from attnmix.figures.tokens import TextLayers, short_part
from attnmix.measures.ratios import preferred_ratio

PERCENTILE = 99  # percentile of cells at the upper end of a colour scale

# Curves
SHOWN_STEP_MEASURES = ("cosine_input", "cosine_previous")
LABEL_CHARACTERS = 22  # per line
PANEL_HEIGHT = 1.95  # inches, as the following sizes
STEP_PANEL_HEIGHT = 1.7
LEFT = 0.57
LABELS = 1.05  # for curve labels, to the right of each panel
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
"""Line style and name of each kind of donors."""
MARKERS = {"pretrained": "o", "finetuned": "s"}
SHOWN_CONTROLS = ("text_mean_value", "corpus_value", "shuffled_words", "random_weights")

# Reviews
REVIEWS_HEIGHT = 3.0  # inches
REVIEW_LOOKS = {"pretrained": ("Greys", "o"), "finetuned": ("Blues", "s")}  # similar to the page's colours
SWARM_WIDTH = 0.42  # half the width of one checkpoint's reviews, in layers; half of it for two checkpoints
SWARM_BINS = 48  # bins of the y axis; reviews in one bin are drawn side by side
DOT = 2.5  # points
PANEL_WIDTH = 6.3  # inches
MAX_VECTOR_DOTS = 5000  # beyond, dots are rasterised in PDFs

# Strips
MIN_TOKENS_PER_LINE = 12
MAX_TOKENS_PER_LINE = 32  # limited for readable token labels
MAX_STRIP_TOKENS = 128
ROW_HEIGHT = 0.075  # inches, height of a layer
STRIP_GAP = 0.06  # inches, space between strips and below labels
STRIPS_HEAD = 0.3  # inches, as the following sizes
STRIPS_FOOT = 0.45
STRIPS_LEFT = 1.0
STRIPS_WIDTH = 5.9

# Matrices
MAX_MATRIX_TOKENS = 20  # limited for readable row labels
MATRIX_COLORS = "Blues"
SIDE_COLORS = "Oranges"
UNKNOWN = "0.8"
MATRIX = 1.42  # inches, height
MATRIX_GAP = 0.15  # inches, below a matrix
MATRIX_LEFT = 0.85  # inches, as the following sizes
MATRIX_RIGHT = 0.45
MATRIX_HEAD = 0.5
MATRIX_FOOT = 0.9
SIDE_COLUMN_WIDTH = 0.09  # width of each column to the right of a matrix, relative to the matrix
MATRIX_NOTE = (
    "Rows are tokens and columns their sources, with shares of the row's sum over the whole text; colours end at\n"
    "a measure's 99th percentile. Strips show the share of the token itself, which the matrix omits,{rest} above\n"
    "their means in %. Grey rows have too small sums."
)


class SwarmSide(NamedTuple):
    """The side of a layer on which the reviews of one checkpoint are drawn."""

    offset: float
    """The distance from the layer's centre, in layers."""
    suffix: str
    """The addition to the checkpoint's name in the legend."""


SWARM_SIDES = {
    1: [SwarmSide(0.0, "")],
    2: [SwarmSide(-0.25, " (left)"), SwarmSide(0.25, " (right)")],
}
"""The sides by number of checkpoints."""


class StripScale(NamedTuple):
    """The colour scale of strips, and the label of its colour bar."""

    label: str
    colors: Any


class Strip(NamedTuple):
    """The values `[layers, tokens]` of one strip."""

    name: str
    cells: pd.DataFrame
    scale: StripScale


def draw_by_layer(mixing: pd.DataFrame, xlabel: str) -> Figure:
    """Return a figure with a panel per checkpoint of `mixing.csv` and a curve per ratio."""
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
    """Return a one-column figure of the preferred ratio by layer, for each checkpoint of `mixing.csv` and for controls.

    `controls` is `mixing_controls.csv`. The figure includes the controls of the last checkpoint, and random weights if
    they were measured. Bands are 95 % intervals over texts.
    """
    method = preferred_ratio(mixing["method"].unique().tolist())
    figure, panels = _create_curve_panels(1, 1, PANEL_HEIGHT)
    axes = panels[0, 0]
    title = RATIO_MARKS[method].label
    axes.set(xlabel=xlabel, ylabel=TOKEN_MEAN_LABEL, ylim=(0, 1), title=title)
    for name, label, rows in _list_control_curves(mixing, controls):
        of_method = rows[rows["method"] == method]
        curve = of_method.dropna(subset="mean").sort_values("layer")
        if curve.empty:
            continue
        color, linestyle = CURVE_LOOKS[name]
        axes.plot(
            curve["layer"],
            curve["mean"],
            label=fill(label, LABEL_CHARACTERS),
            color=color,
            linestyle=linestyle,
            marker=MARKERS.get(name),
            clip_on=False,
        )
        _draw_interval(axes, curve, color, 0.2)
    _set_layer_ticks(axes, mixing)
    style.label_curves(axes)
    return figure


def _list_control_curves(mixing: pd.DataFrame, controls: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """Return the name, label and rows of each checkpoint and control."""
    measured = set(mixing["checkpoint"])
    checkpoints = [name for name in CHECKPOINTS if name in measured]
    curves = []
    for name in checkpoints:
        rows = mixing[mixing["checkpoint"] == name]
        curves.append((name, CHECKPOINTS[name], rows))
    is_shown = controls["checkpoint"].isin([checkpoints[-1], RANDOM_MODEL])
    shown_controls = controls[is_shown]
    for name in SHOWN_CONTROLS:
        rows = shown_controls[shown_controls["control"] == name]
        curves.append((name, CONTROL_LABELS[name], rows))
    return curves


def _draw_interval(axes: Axes, curve: pd.DataFrame, color: str, alpha: float) -> None:
    """Draw a curve's interval as a band, except for means over few texts."""
    low = mask_few_texts(curve, "ci_low")
    high = mask_few_texts(curve, "ci_high")
    axes.fill_between(curve["layer"], low, high, color=color, alpha=alpha, linewidth=0)


def mask_few_texts(rows: pd.DataFrame, column: str) -> pd.Series:
    """Return a column, masked with NaN in rows with too few texts for an interval."""
    if "documents" not in rows:
        return rows[column]
    has_interval = rows["documents"] >= MIN_INTERVAL_DOCUMENTS
    return rows[column].where(has_interval)


def _set_layer_ticks(axes: Axes, rows: pd.DataFrame) -> None:
    """Label all layers, or every n-th layer of deep models."""
    layers = sorted(rows["layer"].unique())
    step = ceil(len(layers) / MAX_TICKS)
    axes.set_xticks(layers[::step])


def draw_own_share(exchange: pd.DataFrame, xlabel: str) -> Figure | None:
    """Return a one-column figure of the own share in `exchange.csv` by layer, checkpoint and kind of donors.

    Return None if there are no own shares. Intervals are drawn for all donors only.
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
        of_checkpoint = shares[shares["checkpoint"] == checkpoint]
        for donor, curve in of_checkpoint.groupby("donor", sort=False):
            _draw_donor_curve(axes, curve, checkpoint, str(donor))
    _set_layer_ticks(axes, shares)
    style.label_curves(axes)
    handles = []
    for linestyle, label in DONOR_LINES.values():
        handle = Line2D([], [], color="black", linestyle=linestyle, label=label)
        handles.append(handle)
    axes.legend(handles=handles, loc="lower left", title="Words from")
    with_all_donors = shares[shares["donor"] == ALL_DONORS]
    axes.set_title(_describe_texts(with_all_donors))
    return figure


def _draw_donor_curve(axes: Axes, curve: pd.DataFrame, checkpoint: str, donor: str) -> None:
    """Draw the own share of one checkpoint and kind of donors; the curve of all donors has a label and an interval."""
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
        axes.plot(layers, means, color=color, linestyle=linestyle, label=f"_{donor}")


def _describe_texts(shares: pd.DataFrame) -> str:
    """Return a title with the number of averaged reviews and the mean number of averaged tokens of each."""
    documents = shares["documents"].max()
    tokens = shares["tokens"].max() / documents
    return f"{documents:.0f} reviews, {tokens:.0f} tokens of each"


def draw_steps(steps: pd.DataFrame, xlabel: str) -> Figure:
    """Return a figure of the steps in `geometry.csv`, with a row per checkpoint and a panel per cosine."""
    by_checkpoint = steps.groupby("checkpoint", sort=False)
    figure, panels = _create_curve_panels(len(by_checkpoint), len(SHOWN_STEP_MEASURES), STEP_PANEL_HEIGHT)
    for row, (checkpoint, rows) in zip(panels, by_checkpoint, strict=True):
        checkpoint_label = CHECKPOINTS[str(checkpoint)]
        for axes, measure in zip(row, SHOWN_STEP_MEASURES, strict=True):
            of_measure = rows[rows["measure"] == measure]
            _draw_curves(axes, of_measure, "step", STEP_MARKS)
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
    height = HEAD + rows * panel_height + (rows - 1) * GAP + FOOT
    figure = Figure(figsize=(width, height))
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panel_width = (width - LEFT - LABELS - (columns - 1) * PANEL_DISTANCE) / columns
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
    """Draw a labelled curve with interval for each name in `column`."""
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
    """Return a figure of each review's mean ratio by layer, and the mean over reviews with its interval.

    `reviews` is `mixing_by_review.csv`, and `weighted` is `mixing_weighted.csv`. The figure shows the preferred ratio.
    """
    method = preferred_ratio(reviews["method"].unique())
    reviews = reviews[reviews["method"] == method]
    means = weighted.query("method == @method and weight == 'review' and tokens_of == 'all' and layer != 'all'")
    means = means.assign(layer=means["layer"].astype(int))
    figure = Figure(figsize=(style.TWO_COLUMNS, REVIEWS_HEIGHT), layout="constrained")
    axes = _add_review_axes(figure, reviews, xlabel)
    axes.set_ylabel(f"Mixing ratio, mean over a review's tokens\n({RATIO_MARKS[method].label})")
    measured = set(reviews["checkpoint"])
    checkpoints = [name for name in REVIEW_LOOKS if name in measured]
    swarm_width = SWARM_WIDTH / len(checkpoints)
    shortest = reviews["tokens"].min()
    longest = reviews["tokens"].max()
    shading = LogNorm(shortest, longest + 1)
    handles = []
    for name, side in zip(checkpoints, SWARM_SIDES[len(checkpoints)], strict=True):
        rows = reviews[reviews["checkpoint"] == name]
        handle = _draw_swarms(axes, rows, name, side, swarm_width, shading)
        handles.append(handle)
        checkpoint_means = means[means["checkpoint"] == name]
        _draw_review_means(axes, checkpoint_means, side.offset, swarm_width)
    mean_handle = Line2D(
        [],
        [],
        color="black",
        marker="|",
        markersize=6,
        linewidth=0.9,
        label="mean over reviews, 95 % interval",
    )
    handles.append(mean_handle)
    title = f"The darker a dot, the longer the review, from {shortest} to {longest} tokens"
    figure.legend(handles=handles, title=title, title_fontsize=7, loc="outside lower center", ncols=3)
    return figure


def _add_review_axes(figure: Figure, reviews: pd.DataFrame, xlabel: str) -> Axes:
    """Add axes with the limits of the reviews' ratios, and with lines between layers."""
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
    """Draw a checkpoint's reviews as dots side by side, darker for longer reviews, and return the legend entry."""
    step = DOT / 72 / PANEL_WIDTH * np.ptp(axes.get_xlim())
    by_layer = rows.groupby("layer")["mean"]
    offsets = by_layer.transform(_place_in_swarm, limits=axes.get_ylim(), width=width, step=step)
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
    """Draw the means over reviews as horizontal lines with intervals; a white outline separates them from dark dots."""
    x = means["layer"] + offset
    mean = means["mean"]
    low = mask_few_texts(means, "ci_low")
    high = mask_few_texts(means, "ci_high")
    interval = [mean - low, high - mean]
    for color, thickness in (("white", 1.6), ("black", 0.9)):
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
    """Return offsets along x, at most `width`, that place values of similar height side by side."""
    bottom, top = limits
    heights = (values - bottom) / (top - bottom)
    bin_numbers = (heights * SWARM_BINS).astype(int)
    bins = values.groupby(bin_numbers)
    counts = bins.transform("size")
    ranks = bins.cumcount() - (counts - 1) / 2
    largest_step = 2 * width / max(1, counts.max() - 1)
    return np.asarray(ranks * min(step, largest_step))


def draw_strips(rows: pd.DataFrame, document: str, text: TextLayers) -> Figure:
    """Return heat-map strips with a column per token, wrapped like text, and a row per layer.

    `rows` are the rows of `features/measure/tokens.parquet` for one text and its layers. Each checkpoint has a strip of
    the preferred ratio; with two checkpoints, a third strip shows fine-tuned minus pretrained.
    """
    strips = _list_strips(rows)
    labels = text.labels[:MAX_STRIP_TOKENS]
    tokens_per_line = min(max(len(labels), MIN_TOKENS_PER_LINE), MAX_TOKENS_PER_LINE)
    lines = []
    for start in range(0, len(labels), tokens_per_line):
        lines.append(labels[start : start + tokens_per_line])
    strip_height = ROW_HEIGHT * len(text.layers)
    bottoms = _stack_lines(lines, len(strips) * (strip_height + STRIP_GAP))
    height = STRIPS_HEAD + bottoms[-1] + STRIPS_FOOT
    figure = Figure(figsize=(style.TWO_COLUMNS, height))
    left = STRIPS_LEFT / style.TWO_COLUMNS
    width = STRIPS_WIDTH / style.TWO_COLUMNS
    tops = height - STRIPS_HEAD - np.array([0, *bottoms[:-1]])
    for line_number, top in enumerate(tops):
        first_token = line_number * tokens_per_line
        positions = range(first_token, first_token + tokens_per_line)
        for number, strip in enumerate(strips):
            bottom = top - (number + 1) * strip_height - number * STRIP_GAP
            axes = figure.add_axes((left, bottom / height, width, strip_height / height))
            is_last = number == len(strips) - 1
            token_labels = lines[line_number] if is_last else []
            _draw_strip(axes, strip, positions, token_labels, text)
    _add_strip_scales(figure, strips, height)
    shown = sum(len(line) for line in lines[: len(bottoms)])
    part = ""
    if shown < len(text.tokens):
        part = f", its first {shown} of {len(text.tokens)} tokens"
    title = f"Mixing ratio by layer{text.suffix} in {document}{part}"
    figure.suptitle(title, y=1 - 0.06 / height, fontsize=8)
    return figure


def _list_strips(rows: pd.DataFrame) -> list[Strip]:
    """Return a strip of the preferred ratio for each checkpoint, and their difference if there are two."""
    method = preferred_ratio(rows.columns)
    ratio_scale = StripScale(
        f"{RATIO_MARKS[method].label}, one scale in all texts",
        ScalarMappable(Normalize(0, 1), style.share_cmap()),
    )
    ratios = {}
    strips = []
    for name, checkpoint_rows in rows.groupby("checkpoint", sort=False):
        checkpoint = str(name)
        cells = checkpoint_rows.pivot_table(index="layer", columns="position", values=method, dropna=False)
        ratios[checkpoint] = cells
        strips.append(Strip(CHECKPOINTS[checkpoint], cells, ratio_scale))
    if len(ratios) == len(CHECKPOINTS):
        difference = ratios["finetuned"] - ratios["pretrained"]
        difference_scale = StripScale(
            "fine-tuned \N{MINUS SIGN} pretrained",
            ScalarMappable(Normalize(-1, 1), style.change_cmap()),
        )
        strips.append(Strip("Difference", difference, difference_scale))
    return strips


def _stack_lines(lines: Sequence[Sequence[str]], strips_height: float) -> npt.NDArray[np.float64]:
    """Return the distances from the top to the bottoms of lines including token labels, in inches.

    Lines that do not fit on a page are omitted, except the first line.
    """
    label_lengths = []
    for line in lines:
        longest = max(style.text_width(label, style.LABEL_SIZE) for label in line)
        label_lengths.append(longest / 72)
    bottoms = np.cumsum(strips_height + np.array(label_lengths) + STRIP_GAP)
    available = style.PAGE_HEIGHT - STRIPS_HEAD - STRIPS_FOOT
    fitting = int((bottoms <= available).sum())
    return bottoms[: max(1, fitting)]


def _draw_strip(axes: Axes, strip: Strip, positions: range, token_labels: list[str], text: TextLayers) -> None:
    """Draw the tokens at `positions` of a strip, with the numbers of the first and of the last layer."""
    cells = strip.cells.reindex(columns=positions)
    colors = strip.scale.colors
    axes.imshow(cells, colors.cmap, colors.norm, aspect="auto", origin="lower")
    label_tokens(axes, token_labels, "x")
    outer_rows = sorted({0, len(strip.cells) - 1})
    layer_labels = []
    for row in outer_rows:
        layer_labels.append(layer_label(text.layers[row], text.encoder))
    axes.set_yticks(outer_rows, layer_labels)
    axes.tick_params("y", length=0, pad=2, labelsize=style.LABEL_SIZE)
    axes.set_ylabel(strip.name, fontsize=6.5, rotation=0, ha="right", va="center")
    axes.spines[:].set_visible(False)


def _add_strip_scales(figure: Figure, strips: Sequence[Strip], height: float) -> None:
    """Add a colour bar below the strips for each of their scales."""
    left = STRIPS_LEFT / style.TWO_COLUMNS
    width = STRIPS_WIDTH / style.TWO_COLUMNS
    bottom = (STRIPS_FOOT - 0.14) / height
    scales = dict.fromkeys(strip.scale for strip in strips)
    for place, scale in enumerate(scales):
        bar_left = left + place * width / 2
        box = figure.add_axes((bar_left, bottom, 0.47 * width, 0.07 / height))
        bar = figure.colorbar(scale.colors, cax=box, orientation="horizontal")
        bar.ax.tick_params(labelsize=style.LABEL_SIZE, length=2, pad=1)
        bar.set_label(scale.label, fontsize=6, labelpad=1)


def draw_matrices(run: Run, checkpoint: str, document: str, text: TextLayers, methods: Sequence[str]) -> Figure:
    """Return a figure of matrices, with a row per measure and columns for the first, a middle and the last layer.

    Within a matrix, rows are tokens and columns sources, for a short part of the text. Every cell is a share of its
    row's sum over the whole text. The much larger diagonal is drawn to the right of the matrix instead, next to the
    contribution of the rest of the text.
    """
    part = short_part(text.tokens, MAX_MATRIX_TOKENS)
    labels = [text.labels[place] for place in part]
    depth = len(text.layers)
    shown_places = sorted({0, depth // 2, depth - 1})
    layers = [text.layers[place] for place in shown_places]
    height = MATRIX_HEAD + len(methods) * (MATRIX + MATRIX_GAP) - MATRIX_GAP + MATRIX_FOOT
    figure = Figure(figsize=(style.TWO_COLUMNS, height))
    grid = _add_matrix_grid(figure, len(methods), len(layers), height)
    for row, method in enumerate(methods):
        is_last = row == len(methods) - 1
        layer_indices = [layer - 1 for layer in layers]
        matrices = run.matrix(checkpoint, document, method)[layer_indices]
        shares = row_shares(matrices)[:, part]
        is_diagonal = np.eye(len(part), dtype=bool)
        others = np.where(is_diagonal, np.float32(np.nan), shares[:, :, part])
        scale = Normalize(0, _find_scale_end(others))
        for column, layer in enumerate(layers):
            axes = grid[row, column]
            _draw_matrix(axes, others[column], scale)
            label_tokens(axes, labels if is_last else [], "x")
            label_tokens(axes, labels if column == 0 else [], "y")
            _draw_sides(axes, shares[column], part, is_last)
            if row == 0:
                axes.set_title(layer_label(layer, text.encoder), pad=3)
        name = MATRIX_LABELS[method].replace(" rollout", "\nrollout")
        middle = 1 - (MATRIX_HEAD + row * (MATRIX + MATRIX_GAP) + MATRIX / 2) / height
        figure.text(0.02, middle, name, rotation=90, va="center", multialignment="center")
        _add_matrix_scale(figure, grid[row, -1], scale)
    is_whole_text = len(part) == len(text.tokens)
    if is_whole_text:
        tokens = ""
        rest = ""
    else:
        tokens = f", tokens {part[0]} to {part[-1]} of {len(text.tokens)}"
        rest = " and from the rest of the text,"
    title = f"{CHECKPOINTS[checkpoint]}, {document}{text.suffix}{tokens}: contributions of the other tokens"
    figure.suptitle(title, y=1 - 0.06 / height, fontsize=8)
    note = MATRIX_NOTE.format(rest=rest)
    figure.text(0.5, 0.04 / height, note, ha="center", va="bottom", fontsize=5.5)
    return figure


def _add_matrix_grid(figure: Figure, methods: int, layers: int, height: float) -> Any:
    """Add axes `[methods, layers + 1]` for matrices, with a narrow last column for colour bars."""
    spaces: Any = {
        "left": MATRIX_LEFT / style.TWO_COLUMNS,
        "right": 1 - MATRIX_RIGHT / style.TWO_COLUMNS,
        "top": 1 - MATRIX_HEAD / height,
        "bottom": MATRIX_FOOT / height,
        "hspace": MATRIX_GAP / MATRIX,
        "wspace": 0.06,
        "width_ratios": [1.0] * layers + [0.04],
    }
    return figure.subplots(methods, layers + 1, squeeze=False, gridspec_kw=spaces)


def _find_scale_end(cells: npt.NDArray[np.float32]) -> float:
    """Return a high percentile of the finite cells, or 1 if it is 0 or there are no finite cells."""
    known = cells[np.isfinite(cells)]
    if not len(known):
        return 1.0
    end = float(np.percentile(known, PERCENTILE))
    return end or 1.0


def _add_matrix_scale(figure: Figure, box: Axes, scale: Normalize) -> None:
    """Draw the colour bar of a row of matrices, in percent."""
    colors = ScalarMappable(scale, MATRIX_COLORS)
    bar = figure.colorbar(colors, cax=box, extend="max", extendfrac=0.04)
    bar.ax.tick_params(labelsize=style.LABEL_SIZE, length=2, pad=1)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5))
    bar.ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.4g} %")


def _draw_matrix(axes: Axes, cells: npt.NDArray[np.float32], scale: Normalize) -> None:
    """Draw the contributions of other tokens; rows with unknown contributions are grey."""
    number = len(cells)
    ends = [-0.5, number - 0.5]
    cmap = colormaps[MATRIX_COLORS].with_extremes(bad=(0, 0, 0, 0))
    axes.imshow(cells, cmap, scale, aspect="auto")
    is_unknown = np.isnan(cells).all(axis=1)
    for row in np.flatnonzero(is_unknown):
        axes.fill_between(ends, row - 0.5, row + 0.5, color=UNKNOWN, linewidth=0)
    axes.plot(ends, ends, color="0.6", linewidth=0.5)
    frame = Rectangle((-0.5, -0.5), number, number, fill=False, edgecolor="0.6", linewidth=0.4)
    axes.add_patch(frame)
    axes.spines[:].set_visible(False)


def _draw_sides(axes: Axes, shares: npt.NDArray[np.float32], part: range, is_last: bool) -> None:
    """Draw the contributions of the token itself and of the rest of the text, with means in % below."""
    number = len(part)
    rows = np.arange(number)
    columns = {"itself": shares[rows, list(part)]}
    if number < shares.shape[1]:
        outside = np.delete(shares, part, axis=1)
        columns["rest of text"] = outside.sum(axis=1)
    width = SIDE_COLUMN_WIDTH * number
    left = number - 0.5 + width / 3
    bottom = number - 0.5
    right = left + width * len(columns)
    cells = np.stack(list(columns.values()), axis=1)
    cmap = colormaps[SIDE_COLORS].with_extremes(bad=UNKNOWN)
    axes.imshow(cells, cmap, Normalize(0, 1), aspect="auto", extent=(left, right, bottom, -0.5))
    below: Any = {"ha": "center", "va": "top", "textcoords": "offset points"}
    for place, (name, values) in enumerate(columns.items()):
        middle = left + (place + 0.5) * width
        known = values[np.isfinite(values)]
        if len(known):
            percent = 100 * known.mean()
            axes.annotate(f"{percent:.0f}", (middle, bottom), (0, -1.5), fontsize=4.5, **below)
        if is_last:
            axes.annotate(name, (middle, bottom), (0, -8.5), rotation=90, fontsize=style.LABEL_SIZE, **below)
    axes.set(xlim=(-0.5, left + 2.3 * width), ylim=(bottom, -0.5))


def label_tokens(axes: Axes, labels: list[str], side: Any) -> None:
    """Write the labels of tokens along the axis `side`, x or y."""
    rotation = 90 if side == "x" else 0
    axes.tick_params(side, length=0, pad=1, labelsize=style.LABEL_SIZE, labelrotation=rotation)
    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_ticks(range(len(labels)), labels)
