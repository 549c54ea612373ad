"""Contribution matrices of a short part of a text: what each of its tokens takes from each other, by every measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stages.mixing.matrices import MATRICES
from stages.outputs.mixing import read_matrix, row_shares
from stages.parameters import FiguresParameters
from stages.pictures.stack import LABEL_SIZE, Stack, label_tokens
from stages.pictures.style import TWO_COLUMNS, save_figure
from stages.pictures.tokens import short_part
from stages.vocabulary import CHECKPOINTS, layer_label

MOST_TOKENS = 20  # so that every row has a readable label
PERCENTILE = 99  # of the cells of a measure, where its colours end
COLORS, STRIP_COLORS, UNKNOWN = "Blues", "Oranges", "0.8"
PANEL, STRIP, BETWEEN = 1.42, 0.12, 0.12  # inches: a matrix, a column of the strip beside it, between panels
LEFT, HEAD, FOOT, ROW = 0.85, 0.5, 0.85, 1.57
NOTE = (
    "Row: a token. Column: what it takes from another, as share of the row's sum over the whole text; colours end at\n"
    "a measure's 99th percentile. Strips: what it takes from itself, which the matrix leaves out,{rest} above\n"
    "their means in %. Grey: too little to be shared out."
)
REST = " and from the rest of the text,"


def draw_matrices(
    checkpoint: str, document: str, stack: Stack, methods: Sequence[str], path: Path, figures: FiguresParameters
) -> None:
    """A row for each measure, a column for the first, a middle and the last layer; draw under `paper_style`.

    Within a matrix, rows are tokens and columns sources. Every cell is a share of its row's sum over the whole text.
    The diagonal, far larger, is left out and stands beside the matrix, as does what comes from the rest of the text.
    """
    part, depth = short_part(stack.pieces, MOST_TOKENS), len(stack.layers)
    labels = [stack.tokens[place] for place in part]
    layers = [stack.layers[place] for place in sorted({0, depth // 2, depth - 1})]
    height = HEAD + ROW * len(methods) + FOOT
    figure = Figure(figsize=(TWO_COLUMNS, height))
    for row, method in enumerate(methods):
        shares = row_shares(read_matrix(checkpoint, document, method)[[layer - 1 for layer in layers]])[:, part]
        within = [_others(of_layer[:, part]) for of_layer in shares]
        scale = _scale(within)
        bottom, last = height - HEAD - ROW * row - PANEL, row == len(methods) - 1
        for column, layer in enumerate(layers):
            left = LEFT + column * (PANEL + 2 * STRIP + 1.5 * BETWEEN)
            axes = _axes(figure, left, bottom, PANEL)
            _draw_matrix(axes, within[column], scale)
            label_tokens(axes, labels if last else [], "x")
            label_tokens(axes, labels if column == 0 else [], "y")
            if row == 0:
                axes.set_title(layer_label(layer, stack.encoder), pad=3)
            _draw_strip(_axes(figure, left + PANEL + BETWEEN / 3, bottom, 2 * STRIP), shares[column], part, last)
        name = MATRICES[method].label.replace(" rollout", "\nrollout")
        middle = (0.02, (bottom + PANEL / 2) / height)
        figure.text(*middle, name, rotation=90, va="center", multialignment="center")
        _colour_bar(_axes(figure, left + PANEL + 2 * STRIP + 2 * BETWEEN, bottom, 0.07), scale)
    _draw_head(figure, f"{CHECKPOINTS[checkpoint]}, {document}{stack.whose}", part, len(stack.pieces))
    save_figure(figure, path, figures.formats, figures.dpi)


def _axes(figure: Figure, left: float, bottom: float, width: float) -> Axes:
    """As high as a matrix; in inches."""
    height = figure.get_size_inches()[1]
    return figure.add_axes((left / TWO_COLUMNS, bottom / height, width / TWO_COLUMNS, PANEL / height))


def _draw_head(figure: Figure, whose: str, part: range, tokens: int) -> None:
    height = figure.get_size_inches()[1]
    all_of = "" if len(part) == tokens else f", tokens {part[0]} to {part[-1]} of {tokens}"
    figure.suptitle(f"{whose}{all_of}: what each token takes from the others", y=1 - 0.06 / height, fontsize=8)
    rest = REST if len(part) < tokens else ""
    figure.text(0.5, 0.04 / height, NOTE.format(rest=rest), ha="center", va="bottom", fontsize=5.5)


def _others(cells: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The cells without the diagonal: NaN."""
    return np.where(np.eye(len(cells), dtype=bool), np.float32(np.nan), cells)


def _scale(matrices: Any) -> Normalize:
    known = np.concatenate([cells[np.isfinite(cells)] for cells in matrices])
    most = float(np.percentile(known, PERCENTILE)) if len(known) else 0.0
    return Normalize(0, most or 1.0)


def _draw_matrix(axes: Axes, cells: npt.NDArray[np.float32], scale: Normalize) -> None:
    axes.imshow(cells, colormaps[COLORS].with_extremes(bad=(0, 0, 0, 0)), scale, aspect="auto")
    number = len(cells)
    unknown = np.isnan(cells).sum(axis=1) == number
    for place in np.flatnonzero(unknown & (number > 1)):
        axes.axhspan(place - 0.5, place + 0.5, color=UNKNOWN, linewidth=0)
    axes.plot([-0.5, number - 0.5], [-0.5, number - 0.5], color="0.6", linewidth=0.5)
    axes.set(xlim=(-0.5, number - 0.5), ylim=(number - 0.5, -0.5))
    axes.spines[:].set(visible=True, color="0.6", linewidth=0.4)


def _draw_strip(axes: Axes, shares: npt.NDArray[np.float32], part: range, named: bool) -> None:
    """Two columns, each with its mean in per cent below: the token itself, and the rest of the text."""
    itself = shares[np.arange(len(part)), list(part)]
    rest = np.delete(shares, part, axis=1)
    beside = np.stack([itself, rest.sum(axis=1)], axis=1)[:, : 1 + (rest.shape[1] > 0)]
    colors = colormaps[STRIP_COLORS].with_extremes(bad=UNKNOWN)
    axes.imshow(beside, colors, Normalize(0, 1), aspect="auto")
    axes.set(xticks=[], yticks=[], xlim=(-0.5, 1.5))
    axes.spines[:].set_visible(False)
    for place, (name, values) in enumerate(zip(("itself", "rest of text"), beside.T, strict=False)):
        known = values[np.isfinite(values)]
        if len(known):
            axes.text(place, len(part) - 0.3, f"{known.mean():.0%}".rstrip("%"), ha="center", va="top", fontsize=4.5)
        if named:
            axes.text(place, len(part) + 0.9, name, rotation=90, ha="center", va="top", fontsize=LABEL_SIZE)


def _colour_bar(axes: Axes, scale: Normalize) -> None:
    bar = axes.figure.colorbar(ScalarMappable(scale, COLORS), cax=axes, extend="max", extendfrac=0.04)
    bar.ax.tick_params(labelsize=LABEL_SIZE, length=2, pad=1)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5))
    bar.ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.4g} %")
