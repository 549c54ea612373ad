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
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from attnmix.core.options import RenderParameters
from attnmix.figures.labels import CHECKPOINTS, layer_label
from attnmix.figures.style import TWO_COLUMNS, save_figure
from attnmix.figures.text_layers import LABEL_SIZE, TextLayers, label_tokens
from attnmix.figures.tokens import short_part
from attnmix.measures.matrices import MATRICES
from attnmix.store.runs import Run, row_shares

MAX_TOKENS = 20  # so that every row has a readable label
PERCENTILE = 99  # percentile of the cells of a measure at which its colour scale ends
COLORS, STRIP_COLORS, UNKNOWN = "Blues", "Oranges", "0.8"
MATRIX, LEFT, RIGHT, HEAD, FOOT, GAP = 1.42, 0.85, 0.45, 0.5, 0.9, 0.15  # inches: a matrix's height, and around them
STRIP = 0.09  # width of each of the two columns beside a matrix, in widths of the matrix
NOTE = (
    "Row: a token. Column: what it takes from another, as share of the row's sum over the whole text; colours end at\n"
    "a measure's 99th percentile. Strips: what it takes from itself, which the matrix leaves out,{rest} above\n"
    "their means in %. Grey: too little to be shared out."
)


def draw_matrices(
    run: Run,
    checkpoint: str,
    document: str,
    text: TextLayers,
    methods: Sequence[str],
    path: Path,
    figures: RenderParameters,
) -> None:
    """Draw a row for each measure, a column for the first, a middle and the last layer; call under `paper_style`.

    Within a matrix, rows are tokens and columns sources. Every cell is a share of its row's sum over the whole text.
    The diagonal, far larger, is left out and stands beside the matrix, as does what comes from the rest of the text.
    """
    part, depth = short_part(text.tokens, MAX_TOKENS), len(text.layers)
    labels = [text.labels[place] for place in part]
    layers = [text.layers[place] for place in sorted({0, depth // 2, depth - 1})]
    height = HEAD + len(methods) * (MATRIX + GAP) - GAP + FOOT
    figure = Figure(figsize=(TWO_COLUMNS, height))
    sides = {"left": LEFT / TWO_COLUMNS, "right": 1 - RIGHT / TWO_COLUMNS}
    ends = {"top": 1 - HEAD / height, "bottom": FOOT / height, "hspace": GAP / MATRIX, "wspace": 0.06}
    widths = [*[1.0] * len(layers), 0.04]
    grid = figure.add_gridspec(len(methods), len(widths), width_ratios=widths, **sides, **ends)
    for row, method in enumerate(methods):
        shares = row_shares(run.matrix(checkpoint, document, method)[[layer - 1 for layer in layers]])[:, part]
        others = np.where(np.eye(len(part), dtype=bool), np.float32(np.nan), shares[:, :, part])
        known = others[np.isfinite(others)]
        scale = Normalize(0, (float(np.percentile(known, PERCENTILE)) if len(known) else 0) or 1)
        for column, layer in enumerate(layers):
            axes = figure.add_subplot(grid[row, column])
            _draw_matrix(axes, others[column], scale)
            label_tokens(axes, labels if row == len(methods) - 1 else [], "x")
            label_tokens(axes, labels if column == 0 else [], "y")
            _draw_strips(axes, shares[column], part, row == len(methods) - 1)
            if row == 0:
                axes.set_title(layer_label(layer, text.encoder), pad=3)
        name = MATRICES[method].label.replace(" rollout", "\nrollout")
        middle = 1 - (HEAD + row * (MATRIX + GAP) + MATRIX / 2) / height
        figure.text(0.02, middle, name, rotation=90, va="center", multialignment="center")
        _draw_colorbar(figure.add_subplot(grid[row, -1]), scale)
    tokens = "" if len(part) == len(text.tokens) else f", tokens {part[0]} to {part[-1]} of {len(text.tokens)}"
    title = f"{CHECKPOINTS[checkpoint]}, {document}{text.suffix}{tokens}: what each token takes from the others"
    figure.suptitle(title, y=1 - 0.06 / height, fontsize=8)
    rest = " and from the rest of the text," if tokens else ""
    figure.text(0.5, 0.04 / height, NOTE.format(rest=rest), ha="center", va="bottom", fontsize=5.5)
    save_figure(figure, path, figures.formats, figures.dpi)


def _draw_matrix(axes: Axes, cells: npt.NDArray[np.float32], scale: Normalize) -> None:
    number = len(cells)
    axes.imshow(cells, colormaps[COLORS].with_extremes(bad=(0, 0, 0, 0)), scale, aspect="auto")
    for place in np.flatnonzero(np.isnan(cells).sum(axis=1) == number):
        axes.fill_between([-0.5, number - 0.5], place - 0.5, place + 0.5, color=UNKNOWN, linewidth=0)
    axes.plot([-0.5, number - 0.5], [-0.5, number - 0.5], color="0.6", linewidth=0.5)
    frame: Any = {"fill": False, "edgecolor": "0.6", "linewidth": 0.4}
    axes.add_patch(Rectangle((-0.5, -0.5), number, number, **frame))
    axes.spines[:].set_visible(False)


def _draw_strips(axes: Axes, shares: npt.NDArray[np.float32], part: range, named: bool) -> None:
    """Draw two columns beside a matrix, for a token itself and the rest of the text, with their means in % below."""
    number = len(part)
    itself = shares[np.arange(number), list(part)]
    rest = np.delete(shares, part, axis=1)
    columns = {"itself": itself, "rest of text": rest.sum(axis=1)} if rest.shape[1] else {"itself": itself}
    width = STRIP * number
    left = number - 0.5 + width / 3
    extent = (left, left + width * len(columns), number - 0.5, -0.5)
    cells = np.stack([*columns.values()], axis=1)
    axes.imshow(
        cells, colormaps[STRIP_COLORS].with_extremes(bad=UNKNOWN), Normalize(0, 1), aspect="auto", extent=extent
    )
    below: Any = {"ha": "center", "va": "top", "textcoords": "offset points"}
    for place, (name, values) in enumerate(columns.items()):
        bottom = (left + (place + 0.5) * width, number - 0.5)
        known = values[np.isfinite(values)]
        if len(known):
            axes.annotate(f"{100 * known.mean():.0f}", bottom, (0, -1.5), fontsize=4.5, **below)
        if named:
            axes.annotate(name, bottom, (0, -8.5), rotation=90, fontsize=LABEL_SIZE, **below)
    axes.set(xlim=(-0.5, left + 2.3 * width), ylim=(number - 0.5, -0.5))


def _draw_colorbar(axes: Axes, scale: Normalize) -> None:
    figure: Any = axes.figure
    bar = figure.colorbar(ScalarMappable(scale, COLORS), cax=axes, extend="max", extendfrac=0.04)
    axes.tick_params(labelsize=LABEL_SIZE, length=2, pad=1)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5))
    bar.ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.4g} %")
