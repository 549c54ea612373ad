"""Figures of mixing: curves by layer, single reviews, strips of a text, and contribution matrices.

Each function returns a figure; call it within `paper_style`.
"""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

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
LEFT, LABELS, HEAD, FOOT, GAP = 0.57, 1.05, 0.25, 0.42, 0.32  # inches; labels are to the right of each panel
PANEL_DISTANCE = LABELS + 0.1  # inches
MAX_TICKS = 16
TOKEN_MEAN_LABEL = "Mixing ratio, mean over tokens\n(95 % interval)"

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
SWARM_WIDTH = 0.42  # share of a layer's width for the reviews on one side
SWARM_BINS = 48  # bins of the y axis; reviews in one bin are drawn side by side
DOT = 2.5  # points
PANEL_WIDTH = 6.3  # inches
MAX_VECTOR_DOTS = 5000  # beyond, dots are rasterised in PDFs

# Strips
MIN_TOKENS_PER_LINE, MAX_TOKENS_PER_LINE = 12, 32  # limited for readable token labels
MAX_STRIP_TOKENS = 128
ROW_HEIGHT, STRIP_GAP = 0.075, 0.06  # inches: height of a layer, space between strips and below labels
STRIPS_HEAD, STRIPS_FOOT, STRIPS_LEFT, STRIPS_WIDTH = 0.3, 0.45, 1.0, 5.9  # inches

# Matrices
MAX_MATRIX_TOKENS = 20  # limited for readable row labels
MATRIX_COLORS, SIDE_COLORS, UNKNOWN = "Blues", "Oranges", "0.8"
MATRIX, MATRIX_GAP = 1.42, 0.15  # inches: height, and space below
MATRIX_LEFT, MATRIX_RIGHT, MATRIX_HEAD, MATRIX_FOOT = 0.85, 0.45, 0.5, 0.9  # inches
SIDE_COLUMN_WIDTH = 0.09  # width of each column to the right of a matrix, relative to the matrix
MATRIX_NOTE = (
    "Row: a token. Column: what it takes from another, as share of the row's sum over the whole text; colours end at\n"
    "a measure's 99th percentile. Strips: what it takes from itself, which the matrix leaves out,{rest} above\n"
    "their means in %. Grey: too little to be shared out."
)


def draw_by_layer(mixing: pd.DataFrame, xlabel: str) -> Figure:
    """Return a panel per checkpoint of `mixing.csv`, with a curve per ratio."""
    by_checkpoint = mixing.groupby("checkpoint", sort=False)
    figure, panels = _curve_panels(1, len(by_checkpoint), 1.95)
    for axes, (checkpoint, rows) in zip(panels[0], by_checkpoint, strict=True):
        axes.set(title=CHECKPOINTS[str(checkpoint)], xlabel=xlabel, ylim=(0, 1))
        _draw_curves(axes, rows, "method", RATIO_MARKS)
        style.label_curves(axes)
    panels[0, 0].set_ylabel(TOKEN_MEAN_LABEL)
    return figure


def draw_controls(mixing: pd.DataFrame, controls: pd.DataFrame, xlabel: str) -> Figure:
    """Return a one-column figure of the preferred ratio by layer, for each checkpoint of `mixing.csv` and for controls.

    `controls` is `mixing_controls.csv`; the figure includes controls of the last checkpoint, and random weights if they
    were measured. Bands are 95 % intervals over texts.
    """
    method = preferred_ratio(mixing["method"].unique().tolist())
    names = [name for name in CHECKPOINTS if name in set(mixing["checkpoint"])]
    curves = [(name, CHECKPOINTS[name], mixing[mixing["checkpoint"] == name]) for name in names]
    in_checkpoint = controls[controls["checkpoint"].isin([names[-1], RANDOM_MODEL])]
    curves += [(name, CONTROL_LABELS[name], in_checkpoint[in_checkpoint["control"] == name]) for name in SHOWN_CONTROLS]
    figure, panels = _curve_panels(1, 1, 1.95)
    axes = panels[0, 0]
    axes.set(xlabel=xlabel, ylabel=TOKEN_MEAN_LABEL, ylim=(0, 1), title=RATIO_MARKS[method].label)
    for name, label, rows in curves:
        curve = rows[rows["method"] == method].dropna(subset="mean").sort_values("layer")
        if curve.empty:
            continue
        color, line = CURVE_LOOKS[name]
        looks: Any = {"color": color, "linestyle": line, "marker": MARKERS.get(name), "clip_on": False}
        axes.plot(curve["layer"], curve["mean"], label=fill(label, LABEL_CHARACTERS), **looks)
        _draw_interval(axes, curve, color, 0.2)
    _set_layer_ticks(axes, mixing)
    style.label_curves(axes)
    return figure


def _draw_interval(axes: Axes, curve: pd.DataFrame, color: str, alpha: float) -> None:
    """Draw a curve's interval as a band, except for means over few texts (as on the page)."""
    low, high = (mask_few_texts(curve, end) for end in ("ci_low", "ci_high"))
    axes.fill_between(curve["layer"], low, high, color=color, alpha=alpha, linewidth=0)


def mask_few_texts(rows: pd.DataFrame, column: str) -> pd.Series:
    """Return a column, masked with NaN in rows with too few texts for an interval."""
    if "documents" not in rows:
        return rows[column]
    return rows[column].where(rows["documents"] >= MIN_INTERVAL_DOCUMENTS)


def _set_layer_ticks(axes: Axes, rows: pd.DataFrame) -> None:
    layers = sorted(rows["layer"].unique())
    axes.set_xticks(layers[:: -(-len(layers) // MAX_TICKS)])


def draw_own_share(exchange: pd.DataFrame, xlabel: str) -> Figure | None:
    """Return a one-column figure of the own share in `exchange.csv` by layer, checkpoint and kind of donors.

    Return None without exchanged texts. Intervals are drawn for all donors only.
    """
    shares = exchange[(exchange["quantity"] == "own_share") & exchange["donor"].isin(list(DONOR_LINES))]
    if shares.empty:
        return None
    figure, panels = _curve_panels(1, 1, 1.95)
    axes = panels[0, 0]
    axes.set(xlabel=xlabel, ylabel="Own share of a token's vector,\nmean over tokens (95 % interval)", ylim=(0, 1))
    for checkpoint, marker in MARKERS.items():
        color, _ = CURVE_LOOKS[checkpoint]
        by_donor = shares[shares["checkpoint"] == checkpoint].groupby("donor", sort=False)
        for donor, curve in by_donor:
            layers, means = curve["layer"], curve["mean"]
            if donor == ALL_DONORS:
                axes.plot(layers, means, color=color, marker=marker, label=CHECKPOINTS[checkpoint], clip_on=False)
                _draw_interval(axes, curve, color, 0.25)
            else:
                linestyle, _ = DONOR_LINES[str(donor)]
                axes.plot(layers, means, color=color, linestyle=linestyle, label=f"_{donor}")
    _set_layer_ticks(axes, shares)
    style.label_curves(axes)
    handles = []
    for linestyle, label in DONOR_LINES.values():
        handles.append(Line2D([], [], color="black", linestyle=linestyle, label=label))
    axes.legend(handles=handles, loc="lower left", title="Words from")
    axes.set_title(_number_of_texts(shares[shares["donor"] == ALL_DONORS]))
    return figure


def _number_of_texts(shares: pd.DataFrame) -> str:
    """Return the number and mean length of the averaged reviews."""
    documents = shares["documents"].max()
    tokens = shares["tokens"].max() / documents
    return f"{documents:.0f} reviews, {tokens:.0f} tokens of each"


def draw_steps(steps: pd.DataFrame, xlabel: str) -> Figure:
    """Return a figure of the steps in `geometry.csv`, with a row per checkpoint and a panel per cosine."""
    by_checkpoint = steps.groupby("checkpoint", sort=False)
    figure, panels = _curve_panels(len(by_checkpoint), len(SHOWN_STEP_MEASURES), 1.7)
    for row, (checkpoint, rows) in zip(panels, by_checkpoint, strict=True):
        for axes, measure in zip(row, SHOWN_STEP_MEASURES, strict=True):
            _draw_curves(axes, rows[rows["measure"] == measure], "step", STEP_MARKS)
            axes.axhline(0, color="0.7", linewidth=0.5, zorder=0)
            axes.set_title(f"{CHECKPOINTS[str(checkpoint)]}: {STEP_MEASURES[measure]}")
        row[0].set_ylabel("Cosine (95 % interval)")
    for axes in panels[-1]:
        axes.set_xlabel(xlabel)
    for axes in panels.flat:  # label placement needs the final common limits
        style.label_curves(axes)
    return figure


def _curve_panels(rows: int, columns: int, panel_height: float) -> tuple[Figure, Any]:
    width = style.ONE_COLUMN if columns == 1 else style.TWO_COLUMNS
    height = HEAD + rows * panel_height + (rows - 1) * GAP + FOOT
    figure = Figure(figsize=(width, height))
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    sides = {"left": LEFT / width, "right": 1 - LABELS / width, "bottom": FOOT / height, "top": 1 - HEAD / height}
    panel_width = (width - LEFT - LABELS - (columns - 1) * PANEL_DISTANCE) / columns
    figure.subplots_adjust(**sides, wspace=PANEL_DISTANCE / panel_width, hspace=GAP / panel_height)
    return figure, panels


def _draw_curves(axes: Axes, rows: pd.DataFrame, column: str, marks: Mapping[str, Mark]) -> None:
    """Draw a labelled curve with interval for each name in `column`."""
    known = rows.dropna(subset="mean")
    for name, mark in marks.items():
        curve = known[known[column] == name]
        if len(curve):
            color = style.darken_for_contrast(mark.color)
            label = fill(mark.label, LABEL_CHARACTERS, break_on_hyphens=False)
            axes.plot(curve["layer"], curve["mean"], color=color, marker=mark.marker, label=label)
            _draw_interval(axes, curve, color, 0.25)
    _set_layer_ticks(axes, rows)


def draw_reviews(reviews: pd.DataFrame, weighted: pd.DataFrame, xlabel: str) -> Figure:
    """Return a figure of each review's mean ratio by layer, and the mean over reviews with its interval.

    `reviews` is `mixing_by_review.csv`, `weighted` is `mixing_weighted.csv`; the figure shows the preferred ratio.
    """
    method = preferred_ratio(reviews["method"].unique())
    reviews = reviews[reviews["method"] == method]
    means = weighted.query("method == @method and weight == 'review' and tokens_of == 'all' and layer != 'all'")
    means = means.assign(layer=means["layer"].astype(int))
    layers, ratios, tokens = sorted(reviews["layer"].unique()), reviews["mean"], reviews["tokens"]
    figure = Figure(figsize=(style.TWO_COLUMNS, REVIEWS_HEIGHT), layout="constrained")
    axes = figure.add_subplot(xlim=(layers[0] - 0.55, layers[-1] + 0.55), xticks=layers, xlabel=xlabel)
    margin = 0.04 * max(np.ptp(ratios), 0.01)
    axes.set_ylim(max(ratios.min() - margin, -0.005), min(ratios.max() + margin, 1.005))  # ratios are in [0, 1]
    axes.set_ylabel(f"Mixing ratio, mean over a review's tokens\n({RATIO_MARKS[method].label})")
    axes.tick_params("x", length=0)
    for edge in layers[1:]:
        axes.axvline(edge - 0.5, color="0.9", linewidth=0.6, zorder=0)
    handles: list[Any] = []
    checkpoints = [name for name in REVIEW_LOOKS if name in set(reviews["checkpoint"])]
    sides = [(-0.25, " (left)"), (0.25, " (right)")] if len(checkpoints) > 1 else [(0.0, "")]
    width = SWARM_WIDTH / len(checkpoints)
    step = DOT / 72 / PANEL_WIDTH * np.ptp(axes.get_xlim())
    for name, (center, side) in zip(checkpoints, sides, strict=True):
        rows = reviews[reviews["checkpoint"] == name]
        offsets = rows.groupby("layer")["mean"].transform(_swarm, limits=axes.get_ylim(), width=width, step=step)
        cmap, shape = style.high_contrast_cmap(REVIEW_LOOKS[name][0]), REVIEW_LOOKS[name][1]
        shades: Any = {"c": rows["tokens"], "cmap": cmap, "norm": LogNorm(tokens.min(), tokens.max() + 1)}
        dots: Any = {"s": DOT**2, "marker": shape, "linewidths": 0, "rasterized": len(rows) > MAX_VECTOR_DOTS}
        axes.scatter(rows["layer"] + center + offsets, rows["mean"], **shades, **dots)
        label = CHECKPOINTS[name] + side
        handles.append(Line2D([], [], color=cmap(0.5), marker=shape, linestyle="none", label=label))
        checkpoint_means = means[means["checkpoint"] == name]
        x, mean = checkpoint_means["layer"] + center, checkpoint_means["mean"]
        low, high = (mask_few_texts(checkpoint_means, end) for end in ("ci_low", "ci_high"))
        interval = [mean - low, high - mean]
        for color, thickness in (("white", 1.6), ("black", 0.9)):  # a white outline separates lines from dark dots
            axes.hlines(mean, x - width, x + width, color=color, linewidth=thickness, zorder=3)
            lines: Any = {"ecolor": color, "elinewidth": thickness, "capthick": thickness, "zorder": 3}
            axes.errorbar(x, mean, interval, fmt="none", capsize=1.5, **lines)
    mean_label = "mean over reviews, 95 % interval"
    handles.append(Line2D([], [], color="black", marker="|", markersize=6, linewidth=0.9, label=mean_label))
    title = f"The darker a dot, the longer the review, from {tokens.min()} to {tokens.max()} tokens"
    figure.legend(handles=handles, title=title, title_fontsize=7, loc="outside lower center", ncols=3)
    return figure


def _swarm(values: pd.Series, limits: tuple[float, float], width: float, step: float) -> npt.NDArray[np.float64]:
    """Return offsets along x, at most `width`, that place values of similar height side by side."""
    bins = values.groupby(((values - limits[0]) / (limits[1] - limits[0]) * SWARM_BINS).astype(int))
    counts = bins.transform("size")
    offsets = bins.cumcount() - (counts - 1) / 2
    return np.asarray(offsets * min(step, 2 * width / max(1, counts.max() - 1)))


def draw_strips(rows: pd.DataFrame, document: str, text: TextLayers) -> Figure:
    """Return heat-map strips with a column per token, wrapped like text, and a row per layer.

    `rows` are the rows of `features/measure/tokens.parquet` for one text and its layers. Each checkpoint has a strip of
    the preferred ratio; with two checkpoints, a third strip shows fine-tuned minus pretrained.
    """
    method = preferred_ratio(rows.columns)
    ratios = {
        str(name): part.pivot_table(index="layer", columns="position", values=method, dropna=False)
        for name, part in rows.groupby("checkpoint", sort=False)
    }
    colors: Any = ScalarMappable(Normalize(0, 1), style.share_cmap())
    strips = [(CHECKPOINTS[name], cells, colors) for name, cells in ratios.items()]
    bars = {f"{RATIO_MARKS[method].label}, one scale in all texts": colors}
    if len(ratios) == len(CHECKPOINTS):
        difference = ratios["finetuned"] - ratios["pretrained"]
        colors = ScalarMappable(Normalize(-1, 1), style.change_cmap())
        strips.append(("Difference", difference, colors))
        bars["fine-tuned \N{MINUS SIGN} pretrained"] = colors
    labels = text.labels[:MAX_STRIP_TOKENS]
    per_line = min(max(len(labels), MIN_TOKENS_PER_LINE), MAX_TOKENS_PER_LINE)
    lines = [labels[start : start + per_line] for start in range(0, len(labels), per_line)]
    # Distances from the top to the bottoms of lines including labels, for the lines that fit on a page.
    strip_height = ROW_HEIGHT * len(text.layers)
    lengths = [max(style.text_width(label, style.LABEL_SIZE) for label in line) / 72 for line in lines]
    bottoms = np.cumsum(len(strips) * (strip_height + STRIP_GAP) + np.array(lengths) + STRIP_GAP)
    bottoms = bottoms[: max(1, int((bottoms <= style.PAGE_HEIGHT - STRIPS_HEAD - STRIPS_FOOT).sum()))]
    height = STRIPS_HEAD + bottoms[-1] + STRIPS_FOOT
    figure = Figure(figsize=(style.TWO_COLUMNS, height))
    left, width = STRIPS_LEFT / style.TWO_COLUMNS, STRIPS_WIDTH / style.TWO_COLUMNS
    for line, top in enumerate(height - STRIPS_HEAD - np.array([0, *bottoms[:-1]])):
        for number, (name, strip, colors) in enumerate(strips):
            bottom = top - (number + 1) * strip_height - number * STRIP_GAP
            axes = figure.add_axes((left, bottom / height, width, strip_height / height))
            cells = strip.reindex(columns=range(line * per_line, (line + 1) * per_line))
            axes.imshow(cells, colors.cmap, colors.norm, aspect="auto", origin="lower")
            label_tokens(axes, lines[line] if number == len(strips) - 1 else [], "x")
            outer = sorted({0, len(strip) - 1})
            axes.set_yticks(outer, [layer_label(text.layers[row], text.encoder) for row in outer])
            axes.tick_params("y", length=0, pad=2, labelsize=style.LABEL_SIZE)
            axes.set_ylabel(name, fontsize=6.5, rotation=0, ha="right", va="center")
            axes.spines[:].set_visible(False)
    for place, (meaning, colors) in enumerate(bars.items()):
        box = figure.add_axes((left + place * width / 2, (STRIPS_FOOT - 0.14) / height, 0.47 * width, 0.07 / height))
        bar = figure.colorbar(colors, cax=box, orientation="horizontal")
        bar.ax.tick_params(labelsize=style.LABEL_SIZE, length=2, pad=1)
        bar.set_label(meaning, fontsize=6, labelpad=1)
    shown = sum(map(len, lines[: len(bottoms)]))
    part = "" if shown == len(text.tokens) else f", its first {shown} of {len(text.tokens)} tokens"
    title = f"Mixing ratio by layer{text.suffix} in {document}{part}"
    figure.suptitle(title, y=1 - 0.06 / height, fontsize=8)
    return figure


def draw_matrices(run: Run, checkpoint: str, document: str, text: TextLayers, methods: Sequence[str]) -> Figure:
    """Return a figure of matrices, with a row per measure and columns for the first, a middle and the last layer.

    Within a matrix, rows are tokens and columns sources, for a short part of the text. Every cell is a share of its
    row's sum over the whole text. The much larger diagonal is drawn to the right of the matrix instead, next to the
    contribution of the rest of the text.
    """
    part, depth = short_part(text.tokens, MAX_MATRIX_TOKENS), len(text.layers)
    labels = [text.labels[place] for place in part]
    layers = [text.layers[place] for place in sorted({0, depth // 2, depth - 1})]
    height = MATRIX_HEAD + len(methods) * (MATRIX + MATRIX_GAP) - MATRIX_GAP + MATRIX_FOOT
    figure = Figure(figsize=(style.TWO_COLUMNS, height))
    sides: Any = {"left": MATRIX_LEFT / style.TWO_COLUMNS, "right": 1 - MATRIX_RIGHT / style.TWO_COLUMNS}
    sides |= {"top": 1 - MATRIX_HEAD / height, "bottom": MATRIX_FOOT / height}
    spaces = {"hspace": MATRIX_GAP / MATRIX, "wspace": 0.06, "width_ratios": [*[1.0] * len(layers), 0.04]}
    grid = figure.subplots(len(methods), len(layers) + 1, squeeze=False, gridspec_kw=sides | spaces)
    for row, method in enumerate(methods):
        shares = row_shares(run.matrix(checkpoint, document, method)[[layer - 1 for layer in layers]])[:, part]
        others = np.where(np.eye(len(part), dtype=bool), np.float32(np.nan), shares[:, :, part])
        known = others[np.isfinite(others)]
        scale = Normalize(0, (float(np.percentile(known, PERCENTILE)) if len(known) else 0) or 1)
        last = row == len(methods) - 1
        for column, layer in enumerate(layers):
            axes = grid[row, column]
            _draw_matrix(axes, others[column], scale)
            label_tokens(axes, labels if last else [], "x")
            label_tokens(axes, labels if column == 0 else [], "y")
            _draw_sides(axes, shares[column], part, last)
            if row == 0:
                axes.set_title(layer_label(layer, text.encoder), pad=3)
        name = MATRIX_LABELS[method].replace(" rollout", "\nrollout")
        middle = 1 - (MATRIX_HEAD + row * (MATRIX + MATRIX_GAP) + MATRIX / 2) / height
        figure.text(0.02, middle, name, rotation=90, va="center", multialignment="center")
        bar = figure.colorbar(ScalarMappable(scale, MATRIX_COLORS), cax=grid[row, -1], extend="max", extendfrac=0.04)
        bar.ax.tick_params(labelsize=style.LABEL_SIZE, length=2, pad=1)
        bar.ax.yaxis.set_major_locator(MaxNLocator(5))
        bar.ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.4g} %")
    tokens = "" if len(part) == len(text.tokens) else f", tokens {part[0]} to {part[-1]} of {len(text.tokens)}"
    title = f"{CHECKPOINTS[checkpoint]}, {document}{text.suffix}{tokens}: what each token takes from the others"
    figure.suptitle(title, y=1 - 0.06 / height, fontsize=8)
    rest = " and from the rest of the text," if tokens else ""
    figure.text(0.5, 0.04 / height, MATRIX_NOTE.format(rest=rest), ha="center", va="bottom", fontsize=5.5)
    return figure


def _draw_matrix(axes: Axes, cells: npt.NDArray[np.float32], scale: Normalize) -> None:
    number = len(cells)
    ends = [-0.5, number - 0.5]
    axes.imshow(cells, colormaps[MATRIX_COLORS].with_extremes(bad=(0, 0, 0, 0)), scale, aspect="auto")
    for place in np.flatnonzero(np.isnan(cells).all(axis=1)):
        axes.fill_between(ends, place - 0.5, place + 0.5, color=UNKNOWN, linewidth=0)
    axes.plot(ends, ends, color="0.6", linewidth=0.5)
    axes.add_patch(Rectangle((-0.5, -0.5), number, number, fill=False, edgecolor="0.6", linewidth=0.4))
    axes.spines[:].set_visible(False)


def _draw_sides(axes: Axes, shares: npt.NDArray[np.float32], part: range, last: bool) -> None:
    """Draw the contributions of the token itself and of the rest of the text, with means in % below."""
    number = len(part)
    columns = {"itself": shares[np.arange(number), list(part)]}
    if number < shares.shape[1]:
        columns["rest of text"] = np.delete(shares, part, axis=1).sum(axis=1)
    width = SIDE_COLUMN_WIDTH * number
    left = number - 0.5 + width / 3
    extent = (left, left + width * len(columns), number - 0.5, -0.5)
    cmap = colormaps[SIDE_COLORS].with_extremes(bad=UNKNOWN)
    axes.imshow(np.stack([*columns.values()], axis=1), cmap, Normalize(0, 1), aspect="auto", extent=extent)
    below: Any = {"ha": "center", "va": "top", "textcoords": "offset points"}
    for place, (name, values) in enumerate(columns.items()):
        bottom = (left + (place + 0.5) * width, number - 0.5)
        known = values[np.isfinite(values)]
        if len(known):
            axes.annotate(f"{100 * known.mean():.0f}", bottom, (0, -1.5), fontsize=4.5, **below)
        if last:
            axes.annotate(name, bottom, (0, -8.5), rotation=90, fontsize=style.LABEL_SIZE, **below)
    axes.set(xlim=(-0.5, left + 2.3 * width), ylim=(number - 0.5, -0.5))


def label_tokens(axes: Axes, labels: list[str], side: Any) -> None:
    """Write the labels of tokens along the axis `side`, x or y."""
    axes.tick_params(side, length=0, pad=1, labelsize=style.LABEL_SIZE, labelrotation=90 if side == "x" else 0)
    axes.set(**{f"{side}ticks": range(len(labels)), f"{side}ticklabels": labels})
