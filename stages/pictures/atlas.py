"""An atlas: one small map for each layer and capture point, on one page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from stages.outputs.maps import map_sites
from stages.parameters import FiguresParameters
from stages.pictures.style import PAGE_HEIGHT, TWO_COLUMNS, key_of, printable, save_figure, set_limits, square_limits
from stages.sites import Site
from stages.vocabulary import ONE_PLANE, POINT_MARKS, TOKEN_MARKS, WORD_MARKS, Mark, layer_label

PANEL = 1.3  # inches, height of a map with its share of the space between; less where a page has not room for it
HEAD, GAP, FOOT = 0.55, 0.45, 0.1  # inches: above the first row, below it, below the last
SIDES = {"left": 0.05, "right": 0.99, "wspace": 0.08}
SEQUENTIAL = "viridis"
SPECIAL = {"[CLS]": "[CLS]", "[SEP]": "[SEP]", "<s>": "[CLS]", "</s>": "[SEP]"}
CONTINUES = "##"  # WordPiece: goes on with the word before
BEGINS = "Ġ"  # byte-level BPE: begins a word

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

    cells = {site: embedding[0, column] for column, site in enumerate(levels)}
    cells |= {Site(layer, point): grid[i, j] for i, layer in enumerate(layers) for j, point in enumerate(points)}
    for site, cell in cells.items():
        axes = figure.add_subplot(cell)
        xy = groups.get_group(tuple(site))[["x", "y"]].to_numpy(np.float64)
        _draw_map(axes, xy, tokens["position"].to_numpy(), colors, selected)
        limits = square_limits(xy if plane is None else plane)
        set_limits(axes, limits.mean(axis=1), np.diff(limits)[:, 0])
        if cell.is_first_row():
            axes.set_title(POINT_MARKS[site.point].label.replace(", ", ",\n"), fontsize=7, pad=3)
        if cell.is_first_col():
            axes.set_ylabel(layer_label(site.layer), fontsize=7)
    _key(figure, embedding[0, len(levels) :], selected, colors)
    documents = tokens["document"].unique()
    whose = printable(documents[0]) if len(documents) == 1 else f"{len(documents)} texts"
    each = "all in one plane" if layout in ONE_PLANE else "each in a plane of its own"
    figure.suptitle(f"{layout.capitalize()} maps of {whose}, {each}", y=1 - 0.1 / height, va="top", fontsize=8)
    save_figure(figure, path, figures.formats, figures.dpi)


def _selected(tokens: pd.DataFrame, number: int) -> Selected:
    """[CLS], [SEP] and the most frequent words, each with its mark and its rows."""
    special = tokens["token"].map(SPECIAL)
    kinds: Selected = [(mark, (special == name).to_numpy()) for name, mark in TOKEN_MARKS.items()]
    of_token = words(tokens)
    for word, (color, marker) in zip(frequent_words(tokens, number), WORD_MARKS, strict=False):
        kinds.append((Mark(printable(word), color, marker), (of_token == word).to_numpy()))
    return [(mark, rows) for mark, rows in kinds if rows.any()]


def _draw_map(axes: Axes, xy: Any, positions: Any, colors: Normalize, selected: Selected) -> None:
    size = float(np.clip(900 / len(xy), 1.5, 9))
    plain = ~np.any([np.zeros(len(xy), dtype=bool), *(rows for _, rows in selected)], axis=0)
    axes.scatter(xy[plain, 0], xy[plain, 1], c=positions[plain], cmap=SEQUENTIAL, norm=colors, s=size, linewidths=0)
    edge: dict[str, Any] = {"linewidths": 0.3, "edgecolors": "white"}
    for mark, rows in selected:
        axes.scatter(xy[rows, 0], xy[rows, 1], s=3 * size, color=mark.color, marker=mark.marker, zorder=3, **edge)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color="0.8")


def _key(figure: Figure, cell: Any, selected: Selected, colors: Normalize) -> None:
    """Legend and colour bar in the cells beside the embedding's maps."""
    axes = figure.add_subplot(cell)
    axes.axis("off")
    if selected:
        handles = key_of([mark for mark, _ in selected], 4)
        axes.legend(handles=handles, loc="upper center", ncols=2, columnspacing=1.2, handletextpad=0.2)
    bar = axes.inset_axes((0.12, 0.26, 0.76, 0.09))
    figure.colorbar(ScalarMappable(colors, SEQUENTIAL), cax=bar, orientation="horizontal", label="Position in the text")


def words(tokens: pd.DataFrame) -> pd.Series:
    """For each token the whole word that it begins, in lower case.

    Empty within a word, and for punctuation, [CLS] and [SEP].
    """
    token, document = tokens["token"], tokens["document"]
    begins = token.str.startswith(BEGINS)
    goes_on = ~begins if begins.any() else token.str.startswith(CONTINUES)
    pieces = token.str.removeprefix(BEGINS).str.removeprefix(CONTINUES).str.lower()
    in_word = ~token.isin(SPECIAL) & pieces.map(lambda piece: any(map(str.isalnum, piece)))
    first = in_word & ~(goes_on & in_word.shift(fill_value=False) & (document == document.shift()))
    return pieces.where(in_word, "").groupby(first.cumsum()).transform("sum").where(first, "")


def frequent_words(tokens: pd.DataFrame, number: int) -> list[str]:
    """The `number` most frequent words that occur more than once; among equals, the one that comes first."""
    counts = Counter(word for word in words(tokens) if word)
    return [word for word, count in counts.most_common(number) if count > 1]
