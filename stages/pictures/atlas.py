"""An atlas: one small map for each layer and capture point, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stages.outputs.maps import map_sites
from stages.parameters import FiguresParameters
from stages.pictures.figure_files import save_figure
from stages.pictures.limits import square_limits
from stages.pictures.style import PAGE_HEIGHT, TWO_COLUMNS, printable
from stages.pictures.words import SPECIAL, frequent_words, words
from stages.sites import Site
from stages.vocabulary import ONE_PLANE, POINT_MARKS, TOKEN_MARKS, WORD_MARKS, Mark

PANEL = 1.3  # inches, height of a map with its share of the space between; less where a page has not room for it
HEAD, GAP, FOOT = 0.55, 0.45, 0.1  # inches: above the first row, below it, below the last
SIDES = {"left": 0.05, "right": 0.99, "wspace": 0.08}
SEQUENTIAL = "viridis"

Selected = list[tuple[Mark, npt.NDArray[np.bool_]]]


def draw_atlas(layout: str, table: pd.DataFrame, tokens: pd.DataFrame, path: Path, figures: FiguresParameters) -> None:
    """Write the atlas of one layout; `tokens` is the tokens table, of which the maps may hold a part.

    Maps of one plane (`joint`, `aligned`) have the same limits, `separate` ones each its own. Draw under
    `paper_style`.
    """
    sites = map_sites(table)
    levels = [site for site in sites if site.layer == 0]
    layers = sorted({site.layer for site in sites if site.layer})
    points = list(dict.fromkeys(site.point for site in sites if site.layer))
    columns = max(len(points), len(levels) + 2)  # the legend stands beside the embedding's maps
    panel_height = min(PANEL, (PAGE_HEIGHT - HEAD - GAP - FOOT) / (len(layers) + 1))
    height = HEAD + panel_height * (len(layers) + 1) + GAP + FOOT
    figure = Figure(figsize=(TWO_COLUMNS, height))
    first_row = {"top": 1 - HEAD / height, "bottom": 1 - (HEAD + panel_height) / height}
    other_rows = {"top": 1 - (HEAD + panel_height + GAP) / height, "bottom": FOOT / height}
    embedding = figure.add_gridspec(1, columns, **SIDES, **first_row)
    grid = figure.add_gridspec(max(len(layers), 1), max(len(points), 1), **SIDES, **other_rows, hspace=0.1)
    groups = table.groupby(["layer", "point"], sort=False)
    on_map = groups.get_group(tuple(sites[0]))[["document", "position"]]
    tokens = on_map.merge(tokens, on=["document", "position"], how="left")
    selected = _selected(tokens, figures.frequent_words)
    colors = Normalize(0, max(int(tokens["position"].max()), 1))
    plane = table[["x", "y"]].to_numpy(np.float64) if layout in ONE_PLANE else None

    def panel(axes: Axes, site: Site) -> None:
        xy = groups.get_group((site.layer, site.point))[["x", "y"]].to_numpy(np.float64)
        _draw_map(axes, xy, tokens["position"].to_numpy(), colors, selected)
        _limit(axes, xy if plane is None else plane)

    for column, site in enumerate(levels):
        axes = figure.add_subplot(embedding[0, column])
        panel(axes, site)
        axes.set_title(POINT_MARKS[site.point].label, fontsize=7, pad=3)
        if column == 0:
            axes.set_ylabel("Embedding", fontsize=7)
    for row, layer in enumerate(layers):
        for column, point in enumerate(points):
            axes = figure.add_subplot(grid[row, column])
            panel(axes, Site(layer, point))
            if row == 0:
                axes.set_title(_two_lines(POINT_MARKS[point].label), fontsize=7, pad=3)
            if column == 0:
                axes.set_ylabel(f"Layer {layer}", fontsize=7)
    _key(figure, embedding[0, len(levels) :], selected, colors)
    documents = tokens["document"].unique()
    whose = printable(documents[0]) if len(documents) == 1 else f"{len(documents)} texts"
    each = "all in one plane" if layout in ONE_PLANE else "each in a plane of its own"
    figure.suptitle(f"{layout.capitalize()} maps of {whose}, {each}", y=1 - 0.1 / height, va="top", fontsize=8)
    save_figure(figure, path, figures.formats, figures.dpi)


def _two_lines(label: str) -> str:
    return label.replace(", ", ",\n")


def _selected(tokens: pd.DataFrame, number: int) -> Selected:
    """[CLS], [SEP] and the most frequent words, each with its mark and its rows."""
    special = tokens["token"].map(SPECIAL)
    kinds: Selected = [(mark, (special == name).to_numpy()) for name, mark in TOKEN_MARKS.items()]
    of_token = words(tokens)
    for word, (color, marker) in zip(frequent_words(tokens, number), WORD_MARKS, strict=False):
        kinds.append((Mark(printable(word), color, marker), (of_token == word).to_numpy()))
    return [(mark, rows) for mark, rows in kinds if rows.any()]


def _draw_map(axes: Axes, xy: Any, positions: Any, colors: Normalize, selected: Selected) -> None:
    marked = np.any([rows for _, rows in selected], axis=0) if selected else np.zeros(len(xy), dtype=bool)
    size = float(np.clip(900 / len(xy), 1.5, 9))
    axes.scatter(
        xy[~marked, 0], xy[~marked, 1], c=positions[~marked], cmap=SEQUENTIAL, norm=colors, s=size, linewidths=0
    )
    for mark, rows in selected:
        x, y = xy[rows].T
        edge: dict[str, Any] = {"linewidths": 0.3, "edgecolors": "white"}
        axes.scatter(x, y, s=3 * size, color=mark.color, marker=mark.marker, zorder=3, **edge)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color("0.8")


def _limit(axes: Axes, xy: npt.NDArray[np.float64]) -> None:
    """A square around `xy`, widened to the axes' shape: both directions have one scale."""
    limits = square_limits(xy)
    box = axes.get_window_extent()
    half = (limits[0, 1] - limits[0, 0]) / 2
    wide, tall = half * np.array([box.width, box.height]) / min(box.width, box.height)
    x, y = limits.mean(axis=1)
    axes.set(xlim=(x - wide, x + wide), ylim=(y - tall, y + tall))


def _key(figure: Figure, cell: Any, selected: Selected, colors: Normalize) -> None:
    """Legend and colour bar in the cells beside the embedding's maps."""
    axes = figure.add_subplot(cell)
    axes.axis("off")
    handles = [
        Line2D([], [], linestyle="none", marker=mark.marker, color=mark.color, markersize=4, label=mark.label)
        for mark, _ in selected
    ]
    if handles:
        legend = axes.legend(handles=handles, loc="upper center", ncols=2, columnspacing=1.2, handletextpad=0.2)
        for text in legend.get_texts():
            text.set_parse_math(False)
    bar = axes.inset_axes((0.12, 0.26, 0.76, 0.09))
    figure.colorbar(ScalarMappable(colors, SEQUENTIAL), cax=bar, orientation="horizontal", label="Position in the text")
