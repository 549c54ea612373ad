"""The main figure: the own share of one text's tokens after each layer, beside its mean over texts."""

from __future__ import annotations

from typing import Any

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
from attnmix.figures.mixing import MARKERS, MAX_TICKS, label_tokens, mask_few_texts
from attnmix.figures.tokens import TextLayers, short_part

MAX_TOKENS = 48  # limited for readable token labels
CELLS_LEFT, CELLS_WIDTH, CURVE_LEFT, CURVE_WIDTH = 0.85, 4.3, 5.3, 1.5  # inches
ROW_HEIGHT, MIN_HEIGHT, MAX_HEIGHT = 0.17, 0.8, 2.4  # inches, of a layer and of a panel
HEAD, PANEL_GAP, FOOT = 0.42, 0.2, 0.62  # inches; labels of tokens are added to the foot
NOT_EXCHANGED = "0.88"
BAND = 0.25  # opacity


def draw_main(rows: pd.DataFrame, exchange: pd.DataFrame, document: str, text: TextLayers) -> Figure | None:
    """Return a two-column figure of own shares: tokens by layers for one text, and the mean over texts by layer.

    Args:
        rows: The text's rows of `features/measure/tokens.parquet`, with the own share of each token.
        exchange: `exchange.csv`, with the means over texts and their intervals.
        document: The name of the text.
        text: The layers and tokens of the text.

    Returns:
        A figure with one row of panels per checkpoint, all on one scale; None without own shares of the text.
    """
    if OWN_SHARE not in rows or rows[OWN_SHARE].isna().all():
        return None
    is_mean = (exchange["quantity"] == OWN_SHARE) & (exchange["donor"] == ALL_DONORS)
    means = exchange[is_mean & exchange["layer"].isin(text.layers)]
    part = short_part(text.tokens, MAX_TOKENS)
    labels = [text.labels[place] for place in part]
    names = [name for name in CHECKPOINTS if name in set(rows["checkpoint"])]
    longest_label = max(style.text_width(label, style.LABEL_SIZE) for label in labels) / 72
    panel = float(np.clip(ROW_HEIGHT * len(text.layers), MIN_HEIGHT, MAX_HEIGHT))
    foot = FOOT + longest_label
    height = HEAD + len(names) * (panel + PANEL_GAP) - PANEL_GAP + foot
    figure = Figure(figsize=(style.TWO_COLUMNS, height))
    colors: Any = ScalarMappable(Normalize(0, 1), style.share_cmap())
    shown_parts = []
    for number, name in enumerate(names):
        is_last = number == len(names) - 1
        bottom = (height - HEAD - (number + 1) * panel - number * PANEL_GAP) / height
        cells_box = (CELLS_LEFT / style.TWO_COLUMNS, bottom, CELLS_WIDTH / style.TWO_COLUMNS, panel / height)
        curve_box = (CURVE_LEFT / style.TWO_COLUMNS, bottom, CURVE_WIDTH / style.TWO_COLUMNS, panel / height)
        in_checkpoint = rows[rows["checkpoint"] == name]
        table = in_checkpoint.pivot_table(index="layer", columns="position", values=OWN_SHARE, dropna=False)
        shares_LT = table.to_numpy(float)
        shown_parts.append(shares_LT[:, part])
        cells = figure.add_axes(cells_box)
        _draw_cells(cells, shown_parts[-1], text, colors)
        label_tokens(cells, labels if is_last else [], "x")
        cells.set_ylabel(f"{CHECKPOINTS[name]}\nLayer")
        curve = figure.add_axes(curve_box, sharey=cells)
        _draw_means(curve, means[means["checkpoint"] == name], shares_LT, text, name)
        if not is_last:
            curve.tick_params("x", labelbottom=False)
    _add_scale(figure, colors, height)
    _add_legend(figure, means, rows, has_unknown=bool(np.isnan(shown_parts).any()))
    shown = "" if len(part) == len(text.tokens) else f", tokens {part[0]} to {part[-1]} of {len(text.tokens)}"
    title = f"Own share of each token's vector after each layer{text.suffix}, {document}{shown}"
    figure.text(CELLS_LEFT / style.TWO_COLUMNS, 1 - 0.1 / height, title, va="top", fontsize=8)
    figure.text(CURVE_LEFT / style.TWO_COLUMNS, 1 - 0.1 / height, "Mean over tokens", va="top", fontsize=8)
    return figure


def _draw_cells(axes: Axes, shares_LT: npt.NDArray[np.float64], text: TextLayers, colors: ScalarMappable) -> None:
    """Draw a cell per layer and token; cells of tokens that were not exchanged are grey."""
    first, last = text.layers[0], text.layers[-1]
    extent = (-0.5, shares_LT.shape[1] - 0.5, first - 0.5, last + 0.5)
    shades: Any = {"cmap": colors.cmap, "norm": colors.norm}
    axes.imshow(shares_LT, aspect="auto", origin="lower", extent=extent, interpolation="none", **shades)
    axes.set_facecolor(NOT_EXCHANGED)
    axes.set_yticks(list(text.layers)[:: -(-len(text.layers) // MAX_TICKS)])
    axes.tick_params("y", length=0, pad=2)
    axes.spines[:].set_visible(False)


def _draw_means(
    axes: Axes, means: pd.DataFrame, shares_LT: npt.NDArray[np.float64], text: TextLayers, checkpoint: str
) -> None:
    """Draw the means over texts with their interval, and over the shown text's tokens, on the rows of the layers."""
    color, _ = CURVE_LOOKS[checkpoint]
    low, high = (mask_few_texts(means, end) for end in ("ci_low", "ci_high"))
    axes.fill_betweenx(means["layer"], low, high, color=color, alpha=BAND, linewidth=0)
    axes.plot(means["mean"], means["layer"], color=color, marker=MARKERS[checkpoint], clip_on=False)
    is_known_L = np.isfinite(shares_LT).any(axis=1)
    layers_L = np.array(text.layers)[is_known_L]
    axes.plot(np.nanmean(shares_LT[is_known_L], axis=1), layers_L, color="black", marker="|", linestyle="none")
    if len(means):
        last = means.iloc[-1]
        place = (last["mean"], last["layer"])
        axes.annotate(f"{last['mean']:.0%}", place, (5, 0), textcoords="offset points", color=color, va="center")
    axes.set(xlim=(0, 1), xticks=[0, 0.5, 1], xticklabels=["0 %", "50 %", "100 %"])
    axes.tick_params("y", length=0, labelleft=False)
    axes.spines["left"].set_color("0.8")


def _add_scale(figure: Figure, colors: ScalarMappable, height: float) -> None:
    """Add the colour scale of all cells, at the bottom left."""
    box = figure.add_axes((CELLS_LEFT / style.TWO_COLUMNS, 0.34 / height, 1.3 / style.TWO_COLUMNS, 0.08 / height))
    bar = figure.colorbar(colors, cax=box, orientation="horizontal", ticks=[0, 1])
    bar.ax.set_xticklabels(["0 %", "100 %"])
    bar.ax.tick_params(labelsize=6, length=0, pad=2)
    bar.set_label("own share", fontsize=7, labelpad=-6)


def _add_legend(figure: Figure, means: pd.DataFrame, rows: pd.DataFrame, *, has_unknown: bool) -> None:
    """Explain lines, bands, ticks and, with `has_unknown`, grey cells, with the sample sizes."""
    last = rows[rows["layer"] == rows["layer"].max()]
    exchanged = last.groupby("checkpoint")[OWN_SHARE].count().max()
    handles: list[Any] = []
    if len(means):
        documents = means["documents"].max()
        tokens = means["tokens"].max()
        label = f"mean over {tokens:.0f} tokens of {documents:.0f} reviews"
        handles.append(Line2D([], [], color="0.3", marker="o", label=label))
    if mask_few_texts(means, "ci_low").notna().any():
        handles.append(Patch(color="0.3", alpha=BAND, linewidth=0, label="95 % interval over reviews"))
    text_label = f"mean over {exchanged} tokens of this text"
    handles.append(Line2D([], [], color="black", marker="|", linestyle="none", label=text_label))
    if has_unknown:
        handles.append(Patch(color=NOT_EXCHANGED, label="not exchanged (special tokens)"))
    anchor = (1 - 0.05 / style.TWO_COLUMNS, 0.02)
    figure.legend(handles=handles, loc="lower right", bbox_to_anchor=anchor, ncols=2, columnspacing=1.2)
