"""The residual stream of one text on a map of one plane: six panels, the later a level, the darker its points."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attnmix.core.options import RenderParameters
from attnmix.core.points import DECODER_INPUT
from attnmix.figures.label_placement import place_labels, spread_out
from attnmix.figures.labels import layer_label, site_label
from attnmix.figures.style import ONE_COLUMN, high_contrast_cmap, printable, save_figure, set_limits
from attnmix.figures.text_layers import LABEL_SIZE, example_text, word_labels
from attnmix.figures.tokens import CapturedTexts
from attnmix.store.runs import map_sites

STREAM_POINTS = ("embedding_output", "layer_output", DECODER_INPUT)
PANELS, COLUMNS = 6, 2
WORDS = 9  # labelled in every panel
HEAD, PANEL_HEIGHT = 0.36, 1.72  # inches
EARLIER_SIZE, NEWEST_SIZE = 1.0, 3.5  # areas of dots, in points squared
LABEL_LOOKS: dict[str, Any] = {
    "ha": "center",
    "va": "center",
    "fontsize": LABEL_SIZE,
    "bbox": {"boxstyle": "square,pad=0.05", "facecolor": "white", "alpha": 0.7, "linewidth": 0},
    "arrowprops": {"arrowstyle": "-", "linewidth": 0.3, "color": "0.3", "shrinkA": 0, "shrinkB": 1},
}


def draw_residual(
    layout: str, table: pd.DataFrame, captured: CapturedTexts, path: Path, figures: RenderParameters
) -> None:
    """Draw every level up to a panel's own, with the same words labelled in all panels; call under `paper_style`."""
    document = example_text(table)
    document_rows = table[table["document"] == document]
    levels = [site for site in map_sites(document_rows) if site.point in STREAM_POINTS]
    if not levels:
        logging.info("no figure of the residual stream: the map holds none of %s", ", ".join(STREAM_POINTS))
        return
    groups = document_rows.groupby(["layer", "point"])
    xy = {site: groups.get_group(tuple(site))[["x", "y"]].to_numpy(np.float64) for site in levels}
    shades = dict(zip(levels, high_contrast_cmap("Blues")(np.linspace(0, 1, len(levels))), strict=True))
    positions = groups.get_group(tuple(levels[0]))["position"].to_numpy()
    labels = [spread_out(xy[levels[-1]], each, WORDS) for each in word_labels(captured, document, positions)]
    shown = [levels[place] for place in np.unique(np.linspace(0, len(levels) - 1, PANELS).round().astype(int))]
    rows = -(-len(shown) // COLUMNS)
    height = HEAD + PANEL_HEIGHT * rows
    figure = Figure(figsize=(ONE_COLUMN, height))
    top, bottom = 1 - (HEAD + 0.12) / height, 0.05 / height
    sides: Any = {"left": 0.015, "right": 0.985, "top": top, "bottom": bottom, "wspace": 0.06, "hspace": 0.12}
    grid = figure.add_gridspec(rows, COLUMNS, **sides)
    for cell, site in zip(np.ndindex(rows, COLUMNS), shown, strict=False):
        title = layer_label(site.layer, captured.encoder) if site.point == "layer_output" else site_label(site)
        axes = figure.add_subplot(grid[cell], xticks=[], yticks=[])
        axes.set_title(title, fontsize=7, pad=2, color=shades[site])
        axes.spines[:].set(visible=True, color="0.8")
        set_limits(axes, np.concatenate([*xy.values()]))
        for level in levels[: levels.index(site) + 1]:
            size = NEWEST_SIZE if level == site else EARLIER_SIZE
            axes.scatter(xy[level][:, 0], xy[level][:, 1], s=size, color=shades[level], linewidths=0)
        words = labels[captured.reading(site)]
        centres = place_labels(axes, xy[site], words, LABEL_SIZE)
        for (index, word), centre in zip(words.items(), centres, strict=True):
            axes.annotate(word, xy[site][index], centre, **LABEL_LOOKS)
    title = f"The residual stream of {printable(document)} on the {layout} map,"
    subtitle = "each panel with the levels before it, the darker the later"
    figure.suptitle(f"{title}\n{subtitle}", y=1 - 0.04 / height, fontsize=7, linespacing=1.3)
    save_figure(figure, path, figures.formats, figures.dpi)
