"""Strips of a text: each token's mixing ratio at every layer, before and after fine-tuning, and their difference."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from stages.mixing.ratios import RATIOS, preferred_ratio
from stages.parameters import FiguresParameters
from stages.pictures.labels import text_size
from stages.pictures.stack import LABEL_SIZE, Stack, label_tokens
from stages.pictures.style import PAGE_HEIGHT, TWO_COLUMNS, save_figure
from stages.vocabulary import CHECKPOINTS, layer_label

TOKENS_IN_ROW = range(12, 33)  # so that every token has a readable label
TOKENS_IN_STRIPS = 128
PERCENTILE = 99  # of all cells, where the colours end: single tokens do not take them from all others
LEAST = 0.01  # that a scale of ratios or of differences spans, to each side
LAYER, GAP, BELOW = 0.075, 0.06, 0.08  # inches: a cell's height, between strips, below the tokens' labels
HEAD, FOOT, LEFT, RIGHT = 0.3, 0.45, 1.0, 0.1
RATIO_COLORS, DIFFERENCE_COLORS = "viridis", "RdBu_r"
DIFFERENCE = "Difference"


def draw_strips(rows: pd.DataFrame, document: str, stack: Stack, path: Path, figures: FiguresParameters) -> None:
    """A column for each token, wrapped like text, a row for each layer; draw under `paper_style`.

    `rows` are those of `features/mixing/tokens.parquet` of one captured text and the stack's layers. The ratio is the
    preferred one. A strip for each checkpoint, and where there are two, one of fine-tuned minus pretrained.
    """
    method = preferred_ratio(rows.columns)
    grids = {
        str(name): part.pivot_table(index="layer", columns="position", values=method, dropna=False)
        for name, part in rows.groupby("checkpoint", sort=False)
    }
    low, high = np.nanpercentile([*grids.values()], [100 - PERCENTILE, PERCENTILE])
    scales = {"ratio": Normalize(low, max(high, low + LEAST))}
    if len(grids) == len(CHECKPOINTS):
        first, second = CHECKPOINTS
        grids[DIFFERENCE] = grids[second] - grids[first]
        most = max(float(np.nanpercentile(grids[DIFFERENCE].abs(), PERCENTILE)), LEAST)
        scales[DIFFERENCE] = Normalize(-most, most)
    in_row = min(max(len(stack.tokens), TOKENS_IN_ROW[0]), TOKENS_IN_ROW[-1])
    figure, blocks, shown = _panels(stack, len(grids), in_row)
    for (start, panels), (place, (name, grid)) in product(blocks, enumerate(grids.items())):
        cells = grid.reindex(columns=range(start, start + in_row))
        colors = DIFFERENCE_COLORS if name == DIFFERENCE else RATIO_COLORS
        panels[place].imshow(cells, colors, scales.get(name, scales["ratio"]), aspect="auto", origin="lower")
        label_tokens(panels[place], [], "x")
        outer = sorted({0, len(grid) - 1})
        panels[place].set_yticks(outer, [layer_label(stack.layers[row], stack.encoder) for row in outer])
        panels[place].tick_params("y", length=0, pad=2, labelsize=LABEL_SIZE)
        panels[place].set_ylabel(CHECKPOINTS.get(name, name), fontsize=6.5, rotation=0, ha="right", va="center")
        panels[place].spines[:].set_visible(False)
    for start, panels in blocks:
        label_tokens(panels[-1], stack.tokens[start : min(start + in_row, shown)], "x")
    _colour_bars(figure, scales, RATIOS[method].mark.label)
    part = "" if shown == len(stack.tokens) else f", its first {shown} of {len(stack.tokens)} tokens"
    title = f"Mixing ratio by layer{stack.whose} in {document}{part}"
    figure.suptitle(title, y=1 - 0.06 / figure.get_size_inches()[1], fontsize=8)
    save_figure(figure, path, figures.formats, figures.dpi)


def _panels(stack: Stack, strips: int, in_row: int) -> tuple[Figure, list[tuple[int, list[Axes]]], int]:
    """A figure, for each row of tokens the first one's position and its strips, and how many tokens are shown."""
    labels = [text_size(token, LABEL_SIZE)[0] / 72 for token in stack.tokens[:TOKENS_IN_STRIPS]]
    starts, used = range(0, len(labels), in_row), HEAD + FOOT
    heights: list[float] = []
    for start in starts:
        height = strips * (LAYER * len(stack.layers) + GAP) + max(labels[start : start + in_row]) + BELOW
        if heights and used + height > PAGE_HEIGHT:
            break
        heights.append(height)
        used += height
    figure = Figure(figsize=(TWO_COLUMNS, used))
    blocks, top = [], used - HEAD
    for start, height in zip(starts, heights, strict=False):
        bottoms = [top - (place + 1) * LAYER * len(stack.layers) - place * GAP for place in range(strips)]
        width, inches = TWO_COLUMNS - LEFT - RIGHT, LAYER * len(stack.layers)
        boxes = [(LEFT / TWO_COLUMNS, low / used, width / TWO_COLUMNS, inches / used) for low in bottoms]
        blocks.append((start, [figure.add_axes(box) for box in boxes]))
        top -= height
    return figure, blocks, min(len(labels), len(heights) * in_row)


def _colour_bars(figure: Figure, scales: dict[str, Normalize], ratio: str) -> None:
    """Side by side below the strips."""
    height = figure.get_size_inches()[1]
    room = (1 - (LEFT + RIGHT) / TWO_COLUMNS) / 2
    for place, (name, scale) in enumerate(scales.items()):
        differs = name == DIFFERENCE
        box = (LEFT / TWO_COLUMNS + place * room, (FOOT - 0.14) / height, 0.94 * room, 0.07 / height)
        colors = ScalarMappable(scale, DIFFERENCE_COLORS if differs else RATIO_COLORS)
        bar = figure.colorbar(
            colors, cax=figure.add_axes(box), orientation="horizontal", extend="both", extendfrac=0.03
        )
        bar.ax.tick_params(labelsize=LABEL_SIZE, length=2, pad=1)
        means = (
            "fine-tuned \N{MINUS SIGN} pretrained, 99th percentile" if differs else f"{ratio}, 1st to 99th percentile"
        )
        bar.set_label(means, fontsize=6, labelpad=1)
