"""The main figure: the own share of the tokens of one text after each layer, next to the mean over texts."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from attnmix.core.names import ALL_DONORS, OWN_SHARE
from attnmix.figures import style
from attnmix.figures.labels import CHECKPOINTS, CURVE_LOOKS
from attnmix.figures.mixing import MARKERS, MAX_TICKS, mask_few_texts
from attnmix.figures.text_mixing import label_tokens
from attnmix.figures.tokens import TextLayers, short_part

MAX_TOKENS = 48  # limited for readable token labels
CELLS_LEFT = 0.85  # inches, like all lengths below
CELLS_WIDTH = 4.3
CURVE_LEFT = 5.3
CURVE_WIDTH = 1.5
ROW_HEIGHT = 0.17  # height of a layer's row
MIN_HEIGHT = 0.8  # minimum height of a panel
MAX_HEIGHT = 2.4
HEAD = 0.42
PANEL_GAP = 0.2
FOOT = 0.62  # below the labels of tokens
NOT_EXCHANGED = "0.88"  # grey of cells whose own share is unknown
BAND = 0.25  # opacity of intervals


class Panels(NamedTuple):
    """The axes of one checkpoint, side by side; they have a common y axis, the layers."""

    cells: Axes
    """The axes of the own shares by layer and token."""
    curve: Axes
    """The axes of the means over tokens by layer."""


def draw_main(rows: pd.DataFrame, exchange: pd.DataFrame, document: str, text: TextLayers) -> Figure | None:
    """Return a two-column figure of own shares: tokens by layers for one text, and the mean over texts by layer.

    Args:
        rows: The text's rows of `features/measure/tokens.parquet`, with the own share of each token.
        exchange: `exchange.csv`, with the means over texts and their intervals.
        document: The name of the text.
        text: The layers and tokens of the text.

    Returns:
        A figure with one row of panels per checkpoint, all on the same scale; None if own shares were not measured for
        the text.
    """
    if OWN_SHARE not in rows or rows[OWN_SHARE].isna().all():
        return None
    means = _select_means(exchange, text)
    part = short_part(text.tokens, MAX_TOKENS)  # the indices of the tokens in the figure
    labels = [text.labels[place] for place in part]
    measured = set(rows["checkpoint"])
    checkpoints = [checkpoint for checkpoint in CHECKPOINTS if checkpoint in measured]
    figure, panels = _create_panels(len(checkpoints), len(text.layers), labels)
    colors: Any = ScalarMappable(Normalize(0, 1), style.share_cmap())
    has_unknown = False
    for checkpoint, (cells, curve) in zip(checkpoints, panels, strict=True):
        is_last = checkpoint == checkpoints[-1]
        shares_LT = _tabulate_shares(rows, checkpoint)
        shown_LT = shares_LT[:, part]
        if np.isnan(shown_LT).any():
            has_unknown = True
        _draw_cells(cells, shown_LT, text, colors)
        labels_below = labels if is_last else []
        label_tokens(cells, labels_below, "x")
        cells.set_ylabel(f"{CHECKPOINTS[checkpoint]}\nLayer")
        checkpoint_means = means[means["checkpoint"] == checkpoint]
        _draw_means(curve, checkpoint_means, shares_LT, text, checkpoint)
        if not is_last:
            curve.tick_params("x", labelbottom=False)
    _add_scale(figure, colors)
    _add_legend(figure, means, rows, has_unknown=has_unknown)
    _add_titles(figure, document, text, part)
    return figure


def _create_panels(rows: int, layers: int, labels: Sequence[str]) -> tuple[Figure, list[Panels]]:
    """Return a figure with `rows` rows of panels; there is space for the token `labels` below the last row.

    The height of a panel depends on the number of `layers`. All heights and positions are in inches.
    """
    rows_height = ROW_HEIGHT * layers
    panel_height = float(np.clip(rows_height, MIN_HEIGHT, MAX_HEIGHT))
    panels_height = rows * (panel_height + PANEL_GAP) - PANEL_GAP
    height = HEAD + panels_height + (FOOT + _measure_longest(labels))
    figure = Figure(figsize=(style.TWO_COLUMNS, height))
    panels = []
    for row in range(rows):
        bottom = height - HEAD - (row + 1) * panel_height - row * PANEL_GAP
        cells = _add_axes(figure, CELLS_LEFT, bottom, CELLS_WIDTH, panel_height)
        curve = _add_axes(figure, CURVE_LEFT, bottom, CURVE_WIDTH, panel_height, sharey=cells)
        panels.append(Panels(cells, curve))
    return figure, panels


def _select_means(exchange: pd.DataFrame, text: TextLayers) -> pd.DataFrame:
    """Return the rows of `exchange.csv` with the mean own share over all kinds of donors, in the layers of `text`."""
    is_own_share = exchange["quantity"] == OWN_SHARE
    has_all_donors = exchange["donor"] == ALL_DONORS
    is_shown_layer = exchange["layer"].isin(text.layers)
    return exchange[is_own_share & has_all_donors & is_shown_layer]


def _measure_longest(labels: Sequence[str]) -> float:
    """Return the width of the longest label in inches."""
    widths = [style.text_width(label, style.LABEL_SIZE) for label in labels]  # in points, 1 / 72 inch
    return max(widths) / 72


def _add_titles(figure: Figure, document: str, text: TextLayers, part: range) -> None:
    """Add titles above the cells and the curves of a figure.

    If only a part of the text is shown, the title contains the first and the last token index of this `part`.
    """
    shown = ""
    if len(part) < len(text.tokens):
        shown = f", tokens {part[0]} to {part[-1]} of {len(text.tokens)}"
    title = f"Own share of each token's vector after each layer{text.suffix}, {document}{shown}"
    top = 1 - 0.1 / figure.get_figheight()  # 0.1 inches below the upper edge
    figure.text(CELLS_LEFT / style.TWO_COLUMNS, top, title, va="top", fontsize=8)
    figure.text(CURVE_LEFT / style.TWO_COLUMNS, top, "Mean over tokens", va="top", fontsize=8)


def _tabulate_shares(rows: pd.DataFrame, checkpoint: str) -> npt.NDArray[np.float64]:
    """Return the own shares `[layers, tokens]` of a checkpoint; NaN for tokens that were not exchanged."""
    checkpoint_rows = rows[rows["checkpoint"] == checkpoint]
    table = checkpoint_rows.pivot_table(index="layer", columns="position", values=OWN_SHARE, dropna=False)
    return table.to_numpy(float)


def _add_axes(figure: Figure, left: float, bottom: float, width: float, height: float, **options: Any) -> Axes:
    """Add axes to a two-column figure; positions and sizes are in inches."""
    figure_width = style.TWO_COLUMNS
    figure_height = figure.get_figheight()
    box = (left / figure_width, bottom / figure_height, width / figure_width, height / figure_height)
    return figure.add_axes(box, **options)


def _draw_cells(axes: Axes, shares_LT: npt.NDArray[np.float64], text: TextLayers, colors: ScalarMappable) -> None:
    """Draw own shares `[L, T]` as cells, with a row per layer and a column per token.

    The cells of tokens that were not exchanged are grey.
    """
    layers = list(text.layers)
    tokens = shares_LT.shape[1]
    extent = (-0.5, tokens - 0.5, layers[0] - 0.5, layers[-1] + 0.5)
    shades: Any = {"cmap": colors.cmap, "norm": colors.norm}
    axes.imshow(shares_LT, aspect="auto", origin="lower", extent=extent, interpolation="none", **shades)
    axes.set_facecolor(NOT_EXCHANGED)  # visible where shares are NaN
    step = ceil(len(layers) / MAX_TICKS)
    axes.set_yticks(layers[::step])
    axes.tick_params("y", length=0, pad=2)
    axes.spines[:].set_visible(False)


def _draw_means(
    axes: Axes, means: pd.DataFrame, shares_LT: npt.NDArray[np.float64], text: TextLayers, checkpoint: str
) -> None:
    """Draw the means over texts with their intervals, and the means over the tokens of one text, by layer (y axis).

    `means` contains the means over texts by layer, and `shares_LT` the own shares of the text by layer and token.
    """
    color, _ = CURVE_LOOKS[checkpoint]
    low = mask_few_texts(means, "ci_low")
    high = mask_few_texts(means, "ci_high")
    axes.fill_betweenx(means["layer"], low, high, color=color, alpha=BAND, linewidth=0)
    axes.plot(means["mean"], means["layer"], color=color, marker=MARKERS[checkpoint], clip_on=False)
    is_known_L = np.isfinite(shares_LT).any(axis=1)
    known_layers = np.array(text.layers)[is_known_L]
    text_means = np.nanmean(shares_LT[is_known_L], axis=1)
    axes.plot(text_means, known_layers, color="black", marker="|", linestyle="none")
    if len(means):
        _label_mean(axes, means.iloc[-1], color)
    axes.set(xlim=(0, 1), xticks=[0, 0.5, 1], xticklabels=["0 %", "50 %", "100 %"])
    axes.tick_params("y", length=0, labelleft=False)
    axes.spines["left"].set_color("0.8")


def _label_mean(axes: Axes, row: pd.Series, color: str) -> None:
    """Write the mean of a layer in percent, to the right of its point on the curve."""
    share = f"{row['mean']:.0%}"
    point = (row["mean"], row["layer"])
    axes.annotate(share, point, (5, 0), textcoords="offset points", color=color, va="center")


def _add_scale(figure: Figure, colors: ScalarMappable) -> None:
    """Add the colour scale of all cells at the bottom left of a figure."""
    axes = _add_axes(figure, CELLS_LEFT, 0.34, 1.3, 0.08)
    bar = figure.colorbar(colors, cax=axes, orientation="horizontal", ticks=[0, 1])
    bar.ax.set_xticklabels(["0 %", "100 %"])
    bar.ax.tick_params(labelsize=6, length=0, pad=2)
    bar.set_label("own share", fontsize=7, labelpad=-6)


def _add_legend(figure: Figure, means: pd.DataFrame, rows: pd.DataFrame, *, has_unknown: bool) -> None:
    """Add a legend of the lines, bands and ticks and, if `has_unknown` is True, of the grey cells.

    The legend contains the sample sizes of `means` (the means over texts) and of `rows` (the own shares of the text's
    tokens).
    """
    handles: list[Any] = []
    if len(means):
        documents = means["documents"].max()
        tokens = means["tokens"].max()
        label = f"mean over {tokens:.0f} tokens of {documents:.0f} reviews"
        line = Line2D([], [], color="0.3", marker="o", label=label)
        handles.append(line)
    has_interval = mask_few_texts(means, "ci_low").notna()
    if has_interval.any():
        band = Patch(color="0.3", alpha=BAND, linewidth=0, label="95 % interval over reviews")
        handles.append(band)
    text_label = f"mean over {_count_exchanged_tokens(rows)} tokens of this text"
    tick = Line2D([], [], color="black", marker="|", linestyle="none", label=text_label)
    handles.append(tick)
    if has_unknown:
        grey = Patch(color=NOT_EXCHANGED, label="not exchanged (special tokens)")
        handles.append(grey)
    anchor = (1 - 0.05 / style.TWO_COLUMNS, 0.02)
    figure.legend(handles=handles, loc="lower right", bbox_to_anchor=anchor, ncols=2, columnspacing=1.2)


def _count_exchanged_tokens(rows: pd.DataFrame) -> int:
    """Return the number of tokens whose own share is known in the last layer.

    If there are several checkpoints, return the largest of their numbers.
    """
    last_layer = rows["layer"].max()
    rows_of_last = rows[rows["layer"] == last_layer]
    # Tokens that were not exchanged have NaN, which `count` ignores.
    counts = rows_of_last.groupby("checkpoint")[OWN_SHARE].count()
    return int(counts.max())
