"""Strips of a text: each token's mixing ratio at every layer, before and after fine-tuning, and their difference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from attnmix.core.options import RenderParameters
from attnmix.figures.label_placement import text_width
from attnmix.figures.labels import CHECKPOINTS, RATIO_MARKS, layer_label
from attnmix.figures.style import PAGE_HEIGHT, TWO_COLUMNS, save_figure
from attnmix.figures.text_layers import LABEL_SIZE, TextLayers, label_tokens
from attnmix.measures.ratios import preferred_ratio

MIN_TOKENS_PER_LINE, MAX_TOKENS_PER_LINE = 12, 32  # so that every token has a readable label
MAX_TOKENS = 128
PERCENTILE = 99  # percentile of all cells at which the colour scale ends
MIN_RANGE = 0.01  # of a colour scale
ROW_HEIGHT, GAP = 0.075, 0.06  # inches: of a layer, between strips and below labels
HEAD, FOOT, LEFT, WIDTH = 0.3, 0.45, 1.0, 5.9  # inches
DIFFERENCE = "Difference"
COLORS = {"ratio": "viridis", DIFFERENCE: "RdBu_r"}


def draw_strips(rows: pd.DataFrame, document: str, text: TextLayers, path: Path, figures: RenderParameters) -> None:
    """Draw a column for each token, wrapped like text, and a row for each layer; call under `paper_style`.

    `rows` are those of `features/measure/tokens.parquet` of one text and its layers. There is a strip of the preferred
    ratio for each checkpoint, and where there are two, one of fine-tuned minus pretrained.
    """
    method = preferred_ratio(rows.columns)
    strips = {
        str(name): part.pivot_table(index="layer", columns="position", values=method, dropna=False)
        for name, part in rows.groupby("checkpoint", sort=False)
    }
    low, high = np.nanpercentile([*strips.values()], [100 - PERCENTILE, PERCENTILE])
    scales = {"ratio": Normalize(low, max(high, low + MIN_RANGE))}
    if len(strips) == len(CHECKPOINTS):
        strips[DIFFERENCE] = strips["finetuned"] - strips["pretrained"]
        largest = max(float(np.nanpercentile(strips[DIFFERENCE].abs(), PERCENTILE)), MIN_RANGE)
        scales[DIFFERENCE] = Normalize(-largest, largest)
    labels = text.labels[:MAX_TOKENS]
    per_line = min(max(len(labels), MIN_TOKENS_PER_LINE), MAX_TOKENS_PER_LINE)
    lines = [labels[start : start + per_line] for start in range(0, len(labels), per_line)]
    figure, panels = _panels(lines, len(strips), ROW_HEIGHT * len(text.layers))
    for line, line_panels in enumerate(panels):
        for axes, (name, strip) in zip(line_panels, strips.items(), strict=True):
            cells = strip.reindex(columns=range(line * per_line, (line + 1) * per_line))
            kind = DIFFERENCE if name == DIFFERENCE else "ratio"
            axes.imshow(cells, COLORS[kind], scales[kind], aspect="auto", origin="lower")
            label_tokens(axes, lines[line] if axes is line_panels[-1] else [], "x")
            outer = sorted({0, len(strip) - 1})
            axes.set_yticks(outer, [layer_label(text.layers[row], text.encoder) for row in outer])
            axes.tick_params("y", length=0, pad=2, labelsize=LABEL_SIZE)
            axes.set_ylabel(CHECKPOINTS.get(name, name), fontsize=6.5, rotation=0, ha="right", va="center")
            axes.spines[:].set_visible(False)
    _draw_colorbars(figure, scales, RATIO_MARKS[method].label)
    shown = sum(map(len, lines[: len(panels)]))
    part = "" if shown == len(text.tokens) else f", its first {shown} of {len(text.tokens)} tokens"
    title = f"Mixing ratio by layer{text.suffix} in {document}{part}"
    figure.suptitle(title, y=1 - 0.06 / figure.get_figheight(), fontsize=8)
    save_figure(figure, path, figures.formats, figures.dpi)


def _panels(lines: list[list[str]], strips: int, strip_height: float) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure of at most `PAGE_HEIGHT`, and the strips of each line of tokens that has room on it."""
    labels = [max(text_width(label, LABEL_SIZE) for label in line) / 72 for line in lines]
    bottoms = np.cumsum(strips * (strip_height + GAP) + np.array(labels) + GAP)  # below the labels, from the top
    bottoms = bottoms[: max(1, int((bottoms <= PAGE_HEIGHT - HEAD - FOOT).sum()))]
    height = HEAD + bottoms[-1] + FOOT
    figure = Figure(figsize=(TWO_COLUMNS, height))
    panels = []
    for top in height - HEAD - np.array([0, *bottoms[:-1]]):
        boxes = [(top - (strip + 1) * strip_height - strip * GAP, strip_height) for strip in range(strips)]
        panels.append(
            [figure.add_axes((LEFT / TWO_COLUMNS, y / height, WIDTH / TWO_COLUMNS, h / height)) for y, h in boxes]
        )
    return figure, panels


def _draw_colorbars(figure: Figure, scales: dict[str, Normalize], ratio: str) -> None:
    """Draw the colour bars side by side below the strips."""
    meanings = {
        "ratio": f"{ratio}, 1st to 99th percentile",
        DIFFERENCE: "fine-tuned \N{MINUS SIGN} pretrained, 99th percentile",
    }
    width, height = WIDTH / TWO_COLUMNS, figure.get_figheight()
    for place, (kind, scale) in enumerate(scales.items()):
        box = (LEFT / TWO_COLUMNS + place * width / 2, (FOOT - 0.14) / height, 0.47 * width, 0.07 / height)
        colors = ScalarMappable(scale, COLORS[kind])
        bar = figure.colorbar(
            colors, cax=figure.add_axes(box), orientation="horizontal", extend="both", extendfrac=0.03
        )
        bar.ax.tick_params(labelsize=LABEL_SIZE, length=2, pad=1)
        bar.set_label(meanings[kind], fontsize=6, labelpad=1)
