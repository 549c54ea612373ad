"""An atlas: one small map for each layer and capture point, on one page."""

from __future__ import annotations

from collections.abc import Sequence
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

from stages.names import ONE_PLANE, Mark
from stages.outputs.maps import map_sites
from stages.parameters import FiguresParameters
from stages.pictures.style import (
    PAGE_HEIGHT,
    TWO_COLUMNS,
    dark_part,
    key_of,
    on_white,
    printable,
    save_figure,
    set_limits,
    square_limits,
)
from stages.pictures.tokens import Captured, frequent_words, words
from stages.sites import LAYER_POINTS, Site
from stages.vocabulary import POINT_MARKS, SPECIAL_LOOKS, WORD_MARKS, layer_label

PANEL = 1.3  # inches, height of a map with its share of the space between; less where a page has not room for it
HEAD, GAP, FOOT = 0.55, 0.45, 0.1  # inches: above the first row, below it, below the last
SIDES = {"left": 0.05, "right": 0.99, "wspace": 0.08}
TITLE = 19  # characters in a line
SEQUENTIAL = "Greys"

Selected = list[tuple[Mark, list[npt.NDArray[np.bool_]]]]
"""Kinds of tokens with their marks, and for each reading of the text which tokens are of that kind."""


def draw_atlas(layout: str, table: pd.DataFrame, captured: Captured, path: Path, figures: FiguresParameters) -> None:
    """Write the atlas of one layout; the maps may hold a part of the captured tokens.

    Maps of one plane (`joint`, `aligned`) have the same limits, `separate` ones each its own. Draw under
    `paper_style`.
    """
    sites = map_sites(table)
    groups = table.groupby(["layer", "point"], sort=False)
    on_map = groups.get_group(tuple(sites[0]))[["document", "position"]]
    selected = _selected(captured, on_map, figures.frequent_words)
    positions = on_map["position"].to_numpy()
    colors = Normalize(0, max(int(positions.max()), 1))
    plane = table[["x", "y"]].to_numpy(np.float64) if layout in ONE_PLANE else None

    figure, cells, rest = _grid(sites)
    height = figure.get_size_inches()[1]
    named: set[Any] = set()  # rows and columns that have their name
    for site, cell in cells.items():
        axes = figure.add_subplot(cell)
        xy = groups.get_group(tuple(site))[["x", "y"]].to_numpy(np.float64)
        reading = captured.reading(site)
        _draw_map(axes, xy, positions, colors, [(mark, rows[reading]) for mark, rows in selected])
        limits = square_limits(xy if plane is None else plane)
        set_limits(axes, limits.mean(axis=1), np.diff(limits)[:, 0])
        column, row = site.point, layer_label(site.layer if site.point in LAYER_POINTS else 0, captured.encoder)
        if column not in named:
            axes.set_title(fill(POINT_MARKS[site.point].label, TITLE, break_on_hyphens=False), fontsize=7, pad=3)
        if row not in named:
            axes.set_ylabel(row, fontsize=7)
        named |= {column, row}
    _key(figure, rest, [mark for mark, _ in selected], colors)
    documents = on_map["document"].unique()
    whose = printable(documents[0]) if len(documents) == 1 else f"{len(documents)} texts"
    each = "all in one plane" if layout in ONE_PLANE else "each in a plane of its own"
    figure.suptitle(f"{layout.capitalize()} maps of {whose}, {each}", y=1 - 0.1 / height, va="top", fontsize=8)
    save_figure(figure, path, figures.formats, figures.dpi)


def _grid(sites: list[Site]) -> tuple[Figure, dict[Site, Any], Any]:
    """A figure, a cell for each site (embeddings in the first row, a row for each layer), and the rest of that row."""
    levels = [site for site in sites if site.point not in LAYER_POINTS]
    in_layers = [site for site in sites if site.point in LAYER_POINTS]
    layers = sorted({site.layer for site in in_layers})
    points = [point for point in LAYER_POINTS if any(site.point == point for site in in_layers)]
    columns = max(len(points), len(levels) + 2)  # the legend stands beside the embedding's maps
    panel_height = min(PANEL, (PAGE_HEIGHT - HEAD - GAP - FOOT) / (len(layers) + 1))
    height = HEAD + panel_height * (len(layers) + 1) + GAP + FOOT
    figure = Figure(figsize=(TWO_COLUMNS, height))
    first_row = {"top": 1 - HEAD / height, "bottom": 1 - (HEAD + panel_height) / height}
    other_rows = {"top": 1 - (HEAD + panel_height + GAP) / height, "bottom": FOOT / height}
    embedding = figure.add_gridspec(1, columns, **SIDES, **first_row)
    grid = figure.add_gridspec(max(len(layers), 1), max(len(points), 1), **SIDES, **other_rows, hspace=0.1)
    cells = {site: embedding[0, column] for column, site in enumerate(levels)}
    cells |= {site: grid[layers.index(site.layer), points.index(site.point)] for site in in_layers}
    return figure, cells, embedding[0, len(levels) :]


def _selected(captured: Captured, on_map: pd.DataFrame, number: int) -> Selected:
    """The special tokens and the most frequent words, as far as they are on the map."""
    keys = ["document", "position"]
    place = pd.MultiIndex.from_frame(captured.tokens[keys]).get_indexer(pd.MultiIndex.from_frame(on_map[keys]))

    kinds: Selected = []
    classes = [np.array([piece.token_class for piece in reading])[place] for reading in captured.readings]
    for name, looks in SPECIAL_LOOKS.items():
        kinds.append((Mark(printable(captured.called(name)), *looks), [each == name for each in classes]))
    begun = [np.array(words(reading))[place] for reading in captured.readings]
    for word, looks in zip(frequent_words(begun[0].tolist(), number), WORD_MARKS, strict=False):
        kinds.append((Mark(printable(word), *looks), [each == word for each in begun]))
    return [(mark, rows) for mark, rows in kinds if np.any(rows)]


def _draw_map(axes: Axes, xy: Any, positions: Any, colors: Normalize, selected: Sequence[tuple[Mark, Any]]) -> None:
    size = float(np.clip(900 / len(xy), 1.5, 9))
    plain = ~np.any([np.zeros(len(xy), dtype=bool), *(rows for _, rows in selected)], axis=0)
    axes.scatter(
        xy[plain, 0], xy[plain, 1], c=positions[plain], cmap=dark_part(SEQUENTIAL), norm=colors, s=size, linewidths=0
    )
    edge: dict[str, Any] = {"linewidths": 0.3, "edgecolors": "white"}
    for mark, rows in selected:
        axes.scatter(
            xy[rows, 0], xy[rows, 1], s=3 * size, color=on_white(mark.color), marker=mark.marker, zorder=3, **edge
        )
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color="0.8")


def _key(figure: Figure, cell: Any, marks: list[Mark], colors: Normalize) -> None:
    """Legend and colour bar in the cells beside the embedding's maps."""
    axes = figure.add_subplot(cell)
    axes.axis("off")
    if marks:
        handles = key_of(marks, 4)
        axes.legend(handles=handles, loc="upper center", ncols=2, columnspacing=1.2, handletextpad=0.2)
    bar = axes.inset_axes((0.12, 0.26, 0.76, 0.09))
    figure.colorbar(
        ScalarMappable(colors, dark_part(SEQUENTIAL)), cax=bar, orientation="horizontal", label="Position in the text"
    )
