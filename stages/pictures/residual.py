"""The residual stream of one text on a map in one plane: a panel for each of six levels, the darker the later."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stages.outputs.maps import map_sites
from stages.parameters import FiguresParameters
from stages.pictures.labels import place_names, spread_out, text_size
from stages.pictures.stack import LABEL_SIZE, labels_of, shown_text, whole_words
from stages.pictures.style import ONE_COLUMN, dark_part, printable, save_figure, set_limits, square_limits
from stages.pictures.tokens import Captured
from stages.sites import DECODER_INPUT
from stages.vocabulary import layer_label, site_label

RESIDUAL = ("embedding_output", "layer_output", DECODER_INPUT)
PANELS, COLUMNS = 6, 2
WORDS = 9  # named in every panel
HEAD, TITLE, EDGE = 0.36, 0.17, 0.05  # inches: above all, above a panel, around it
COLORS = "Blues"
OLD, NEW = 1.0, 3.5  # points: a dot of a level before, and of the panel's own


def draw_residual(layout: str, table: pd.DataFrame, captured: Captured, path: Path, figures: FiguresParameters) -> None:
    """Write the page of one captured text, from a `layout` of one plane; draw under `paper_style`.

    Every panel shows the levels up to its own. The same tokens are named in all.
    """
    document = shown_text(table)
    of_text = table[table["document"] == document]
    levels = [site for site in map_sites(of_text) if site.point in RESIDUAL]
    if not levels:
        logging.info("no page of the residual stream: the map holds none of %s", ", ".join(RESIDUAL))
        return
    groups = {tuple(site): rows for site, rows in of_text.groupby(["layer", "point"])}
    places = {site: groups[tuple(site)][["x", "y"]].to_numpy(np.float64) for site in levels}
    shades = dict(zip(levels, dark_part(COLORS)(np.linspace(0, 1, len(levels))), strict=True))
    chosen = [levels[place] for place in np.unique(np.linspace(0, len(levels) - 1, PANELS).round().astype(int))]
    positions = groups[tuple(levels[0])]["position"].to_numpy()
    labels = labels_of(captured, document, positions)
    named = [spread_out(places[levels[-1]], WORDS, each) for each in whole_words(captured, document, positions)]
    limits = square_limits(np.concatenate([*places.values()]))
    figure, panels = _panels(len(chosen))
    for axes, site in zip(panels, chosen, strict=True):
        for level in levels[: levels.index(site) + 1]:
            looks = {"s": NEW if level == site else OLD, "color": shades[level], "linewidths": 0}
            axes.scatter(places[level][:, 0], places[level][:, 1], label=str(level), **looks)
        title = layer_label(site.layer, captured.encoder) if site.point == "layer_output" else site_label(site)
        axes.set_title(title, fontsize=7, pad=2, color=shades[site])
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(visible=True, color="0.8")
        set_limits(axes, limits.mean(axis=1), np.diff(limits)[:, 0])
        reading = captured.reading(site)
        _name_points(axes, places[site], {place: labels[reading][place] for place in named[reading]})
    height = figure.get_size_inches()[1]
    where = f"The residual stream of {printable(document)} on the {layout} map"
    how = "each panel with the levels before it, the darker the later"
    figure.suptitle(f"{where},\n{how}", y=1 - 0.04 / height, fontsize=7, linespacing=1.3)
    save_figure(figure, path, figures.formats, figures.dpi)


def _panels(number: int) -> tuple[Figure, list[Axes]]:
    side = ONE_COLUMN / COLUMNS - 2 * EDGE
    rows = -(-number // COLUMNS)
    height = HEAD + rows * (side + TITLE + 2 * EDGE)
    figure = Figure(figsize=(ONE_COLUMN, height))
    boxes = []
    for place in range(number):
        row, column = divmod(place, COLUMNS)
        bottom = height - HEAD - (row + 1) * (side + TITLE + 2 * EDGE) + 2 * EDGE
        left = column * ONE_COLUMN / COLUMNS + EDGE
        boxes.append((left / ONE_COLUMN, bottom / height, side / ONE_COLUMN, side / height))
    return figure, [figure.add_axes(box) for box in boxes]


def _name_points(axes: Axes, points: npt.NDArray[np.float64], names: dict[int, str]) -> None:
    pixel: Any = 72 / axes.figure.dpi  # in points of print
    box = axes.get_window_extent().get_points() * pixel
    sizes = np.array([text_size(name, LABEL_SIZE) for name in names.values()]) + 1
    middles = place_names(axes.transData.transform(points) * pixel, list(names), sizes, box)
    for (place, name), middle in zip(names.items(), middles, strict=True):
        axes.annotate(
            name,
            points[place],
            (middle - box[0]) / (box[1] - box[0]),
            textcoords="axes fraction",
            ha="center",
            va="center",
            fontsize=LABEL_SIZE,
            bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "alpha": 0.7, "linewidth": 0},
            arrowprops={"arrowstyle": "-", "linewidth": 0.3, "color": "0.3", "shrinkA": 0, "shrinkB": 1},
        )
