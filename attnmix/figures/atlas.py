"""An atlas: one small map for each layer and capture point, on one page."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from attnmix.core.names import ONE_PLANE, Mark
from attnmix.core.options import RenderParameters
from attnmix.core.points import LAYER_POINTS, Site
from attnmix.figures.labels import POINT_MARKS, SPECIAL_LOOKS, WORD_MARKS, layer_label
from attnmix.figures.style import (
    PAGE_HEIGHT,
    TWO_COLUMNS,
    darken_for_contrast,
    high_contrast_cmap,
    legend_handles,
    printable,
    save_figure,
    set_limits,
)
from attnmix.figures.tokens import CapturedTexts, frequent_words, words
from attnmix.store.runs import map_sites

PANEL = 1.3  # inches, a map's height with the space below it; less where a page has no room for it
HEAD, GAP, FOOT = 0.55, 0.45, 0.1  # inches: above the first row, below it, below the last
TITLE_CHARACTERS = 19  # in a line
MAX_FREQUENT_WORDS = 6  # with colours of their own


def draw_atlas(
    layout: str, table: pd.DataFrame, captured: CapturedTexts, path: Path, figures: RenderParameters
) -> None:
    """Draw the maps of one layout, which may hold a part of the captured tokens; call under `paper_style`.

    Maps of one plane (`joint`, `aligned`) have the same limits, each of the `separate` ones has its own.
    """
    sites = map_sites(table)
    groups = table.groupby(["layer", "point"], sort=False)
    tokens = groups.get_group(tuple(sites[0]))[["document", "position"]]
    kinds = _token_kinds(captured, tokens, MAX_FREQUENT_WORDS)
    positions = tokens["position"].to_numpy()
    colors = ScalarMappable(Normalize(0, max(int(positions.max()), 1)), high_contrast_cmap("Greys"))
    figure, cells, legend_cell = _grid(sites)
    titled: set[str] = set()  # rows and columns
    for site, cell in cells.items():
        axes = figure.add_subplot(cell, xticks=[], yticks=[])
        xy = groups.get_group(tuple(site))[["x", "y"]].to_numpy(np.float64)
        reading = captured.reading(site)
        _draw_map(axes, xy, colors.to_rgba(positions), {mark: masks[reading] for mark, masks in kinds.items()})
        set_limits(axes, table[["x", "y"]].to_numpy(np.float64) if layout in ONE_PLANE else xy)
        row = layer_label(site.layer if site.point in LAYER_POINTS else 0, captured.encoder)
        if site.point not in titled:
            title = fill(POINT_MARKS[site.point].label, TITLE_CHARACTERS, break_on_hyphens=False)
            axes.set_title(title, fontsize=7, pad=3)
        if row not in titled:
            axes.set_ylabel(row, fontsize=7)
        titled |= {site.point, row}
    axes = figure.add_subplot(legend_cell)
    axes.axis("off")
    if kinds:
        axes.legend(handles=legend_handles(kinds, 4), loc="upper center", ncols=2, handletextpad=0.2)
    bar = axes.inset_axes((0.12, 0.26, 0.76, 0.09))
    figure.colorbar(colors, cax=bar, orientation="horizontal", label="Position in the text")
    documents = tokens["document"].unique()
    texts = printable(documents[0]) if len(documents) == 1 else f"{len(documents)} texts"
    planes = "all in one plane" if layout in ONE_PLANE else "each in a plane of its own"
    top = 1 - 0.1 / figure.get_figheight()
    figure.suptitle(f"{layout.capitalize()} maps of {texts}, {planes}", y=top, va="top", fontsize=8)
    save_figure(figure, path, figures.formats, figures.dpi)


def _grid(sites: list[Site]) -> tuple[Figure, dict[Site, Any], Any]:
    """Return a figure, a cell for each site (embeddings above a row for each layer), and the rest of the first row."""
    levels = [site for site in sites if site.point not in LAYER_POINTS]
    layers = sorted({site.layer for site in sites if site.point in LAYER_POINTS})
    points = [point for point in LAYER_POINTS if any(site.point == point for site in sites)]
    columns = max(len(points), len(levels) + 2)  # the legend stands beside the embedding's maps
    panel = min(PANEL, (PAGE_HEIGHT - HEAD - GAP - FOOT) / (len(layers) + 1))
    height = HEAD + panel * (len(layers) + 1) + GAP + FOOT
    figure = Figure(figsize=(TWO_COLUMNS, height))
    top, bottom = 1 - HEAD / height, 1 - (HEAD + panel) / height
    sides: Any = {"left": 0.05, "right": 0.99, "wspace": 0.08}
    first_row = figure.add_gridspec(1, columns, **sides, top=top, bottom=bottom)
    rows, below = (max(len(layers), 1), max(len(points), 1)), bottom - GAP / height
    grid = figure.add_gridspec(*rows, **sides, top=below, bottom=FOOT / height, hspace=0.1)
    cells = {site: first_row[0, column] for column, site in enumerate(levels)}
    cells |= {site: grid[layers.index(site.layer), points.index(site.point)] for site in sites if site not in cells}
    return figure, cells, first_row[0, len(levels) :]


def _token_kinds(captured: CapturedTexts, tokens: pd.DataFrame, number: int) -> dict[Mark, list[npt.NDArray[np.bool_]]]:
    """Return a mask of `tokens` for each reading, of the special tokens and the most frequent words."""
    keys = ["document", "position"]
    rows = pd.MultiIndex.from_frame(captured.tokens[keys]).get_indexer(pd.MultiIndex.from_frame(tokens[keys]))
    classes = [np.array([token.token_class for token in reading])[rows] for reading in captured.readings]
    starts = [np.array(words(reading))[rows] for reading in captured.readings]
    kinds = {
        Mark(printable(captured.class_label(name)), *looks): [each == name for each in classes]
        for name, looks in SPECIAL_LOOKS.items()
    }
    for word, looks in zip(frequent_words(starts[0].tolist(), number), WORD_MARKS, strict=False):
        kinds[Mark(printable(word), *looks)] = [each == word for each in starts]
    return {mark: masks for mark, masks in kinds.items() if np.any(masks)}


def _draw_map(axes: Axes, xy: Any, colors: Any, kinds: dict[Mark, npt.NDArray[np.bool_]]) -> None:
    size = float(np.clip(900 / len(xy), 1.5, 9))
    plain = ~np.any([np.zeros(len(xy), dtype=bool), *kinds.values()], axis=0)
    axes.scatter(xy[plain, 0], xy[plain, 1], c=colors[plain], s=size, linewidths=0)
    for mark, mask in kinds.items():
        looks: Any = {"color": darken_for_contrast(mark.color), "marker": mark.marker, "edgecolors": "white"}
        axes.scatter(xy[mask, 0], xy[mask, 1], s=3 * size, linewidths=0.3, zorder=3, **looks)
    axes.spines[:].set(visible=True, color="0.8")
