"""Figures of maps: an atlas, the joint map as a grid and as a multi-page PDF, and an animation of one text.

Call each function within `paper_style`.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from PIL import Image

from attnmix.core.names import DECODER_INPUT, LAYER_POINTS, ONE_PLANE, POINTS, Site
from attnmix.core.store.runs import map_sites
from attnmix.figures import style
from attnmix.figures.labels import (
    OTHER_TEXTS,
    POINT_MARKS,
    POINTS_PER_SECOND,
    SPECIAL_MARKERS,
    TEXT_COLOURS,
    Mark,
    layer_label,
    site_label,
)
from attnmix.figures.tokens import CapturedTexts

# Atlas
PANEL = 1.3  # inches, maximum height of a map including the space below it
HEAD, GAP, FOOT = 0.55, 0.45, 0.1  # inches: above the first row, below it, below the last row
TITLE_CHARACTERS = 19  # per line
LAYOUT_NAMES = {"pca": "PCA"}

# Joint pages
PAGE_SIZE = (style.TWO_COLUMNS, 4.6)  # inches
PAGE_AXES = (0.075, 0.095, 0.61, 0.835)  # left, bottom, width, height, in figure fractions
PAGE_DPI = 200  # matplotlib keeps the raster images of all pages in memory until the file is closed

# Joint grid
TRACKED_WORDS = 5
TRACK_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#7A4B00")  # Okabe and Ito's, and a brown
OTHER_SIZE, TEXT_SIZE, TRACKED_SIZE = 1.5, 3.0, 14.0  # areas of dots, in points squared
AXES_SHARE = 0.998  # share of tokens within the axes of the joint grid, in each direction

LABEL_BOX: dict[str, Any] = {
    "ha": "center",
    "va": "center",
    "bbox": {"boxstyle": "square,pad=0.05", "facecolor": "white", "alpha": 0.7, "linewidth": 0},
}

# Animation
ANIMATION_SIZE, ANIMATION_DPI = (6.4, 4.8), 100  # inches, pixels per inch
MAP, TIMELINE = (0.02, 0.1, 0.96, 0.82), (0.11, 0.05, 0.86, 0.02)  # left, bottom, width, height
WORDS, WORD_SIZE = 12, 8
FRAMES, MOVES = 5, 3  # frames per capture point, and transition frames among them
LAST_POINT_TIME = 4  # display time of the last capture point, relative to the others
MAX_TICKS = 13

Places = npt.NDArray[np.float64]
"""Coordinates `[tokens, 2]` on a map."""


def places_by_site(table: pd.DataFrame) -> dict[Site, Places]:
    """Return the coordinates of a map's tokens at each site, in forward order."""
    groups = table.groupby(["layer", "point"])
    return {site: groups.get_group(tuple(site))[["x", "y"]].to_numpy(np.float64) for site in map_sites(table)}


def first_text(documents: Sequence[str]) -> str:
    """Return the first free text, else the first review."""
    return next((name for name in documents if name.startswith("text/")), documents[0])


def example_text(
    table: pd.DataFrame, captured: CapturedTexts, max_labels: int, points: Collection[str] = POINTS
) -> tuple[str, dict[Site, Places], dict[Site, dict[int, str]]]:
    """Return the name, places by site, and labels by site and token of the example text of a map.

    The example is the first free text, else the first review. Sites with the same input tokens share a dictionary of
    labels.
    """
    document = first_text(table["document"].unique().tolist())
    rows = table[(table["document"] == document) & table["point"].isin(points)]
    places = places_by_site(rows)
    last = next(reversed(places.values()))
    labels = captured.word_labels(document, rows["position"].to_numpy()[: len(last)])
    spread = [style.spread_out(last, each, max_labels) for each in labels]
    return document, places, {site: spread[captured.reading(site)] for site in places}


def draw_atlas(layout: str, table: pd.DataFrame, captured: CapturedTexts) -> Figure:
    """Return a grid of small maps by layer and capture point of a layout, which may contain a sample of the tokens.

    Tokens are coloured by text; special tokens have separate markers. Maps in a common plane (`joint`, `aligned`) share
    their limits, other maps have individual limits.
    """
    places = places_by_site(table)
    tokens = table[["document", "position"]].drop_duplicates()
    special = captured.special_tokens(tokens)
    colours = text_colours(captured.tokens["document"].unique().tolist())
    grey = OTHER_TEXTS[1]
    colour_T = np.array([colours.get(name, grey) for name in tokens["document"]])
    size = float(np.clip(900 / len(tokens), 1.5, 9))
    figure, cells, legend_cell = _atlas_grid(list(places))
    titled: set[str] = set()  # rows and columns
    for site, cell in cells.items():
        axes = figure.add_subplot(cell, xticks=[], yticks=[])
        xy, plain = places[site], np.ones(len(tokens), dtype=bool)
        for name, masks in special.items():
            mask = masks[captured.reading(site)]
            plain &= ~mask
            looks: Any = {"marker": SPECIAL_MARKERS[name], "edgecolors": "white", "linewidths": 0.3, "zorder": 3}
            axes.scatter(xy[mask, 0], xy[mask, 1], c=colour_T[mask], s=3 * size, **looks)
        axes.scatter(xy[plain, 0], xy[plain, 1], c=colour_T[plain], s=size, linewidths=0)
        axes.spines[:].set(visible=True, color="0.8")
        style.set_limits(axes, table[["x", "y"]].to_numpy(np.float64) if layout in ONE_PLANE else xy)
        _add_titles(axes, site, captured, titled)
    axes = figure.add_subplot(legend_cell)
    axes.axis("off")
    shown = tokens["document"].unique().tolist()
    marks = [Mark(style.printable(name), colour, "o") for name, colour in colours.items() if name in shown]
    if not set(shown) <= set(colours):
        marks.append(Mark(*OTHER_TEXTS, "o"))
    marks += [Mark(style.printable(captured.class_label(name)), "#535a68", SPECIAL_MARKERS[name]) for name in special]
    axes.legend(handles=style.legend_handles(marks, 4), loc="center", ncols=2, handletextpad=0.2)
    texts = style.printable(shown[0]) if len(shown) == 1 else f"{len(shown)} texts"
    planes = "all in one plane" if layout in ONE_PLANE else "each in a plane of its own"
    top = 1 - 0.1 / figure.get_figheight()
    name = LAYOUT_NAMES.get(layout, layout.capitalize())
    figure.suptitle(f"{name} maps of {texts}, {planes}, coloured by text", y=top, va="top", fontsize=8)
    return figure


def text_colours(documents: Sequence[str]) -> dict[str, str]:
    """Return the colours of the captured texts, as on the page; with too many texts, only of the example text."""
    if len(documents) > len(TEXT_COLOURS):
        return {first_text(documents): TEXT_COLOURS[0]}
    return dict(zip(documents, TEXT_COLOURS, strict=False))


def _atlas_grid(sites: list[Site]) -> tuple[Figure, dict[Site, Any], Any]:
    """Return a figure, a cell per site (embeddings in the first row, then a row per layer), and the legend's cell."""
    levels = [site for site in sites if site.point not in LAYER_POINTS]
    layers = sorted({site.layer for site in sites if site.point in LAYER_POINTS})
    points = [point for point in LAYER_POINTS if any(site.point == point for site in sites)]
    columns = max(len(points), len(levels) + 2)  # the legend is to the right of the embedding's maps
    panel = min(PANEL, (style.PAGE_HEIGHT - HEAD - GAP - FOOT) / (len(layers) + 1))
    height = HEAD + panel * (len(layers) + 1) + GAP + FOOT
    figure = Figure(figsize=(style.TWO_COLUMNS, height))
    top, bottom = 1 - HEAD / height, 1 - (HEAD + panel) / height
    sides: Any = {"left": 0.05, "right": 0.99, "wspace": 0.08}
    first_row = figure.add_gridspec(1, columns, **sides, top=top, bottom=bottom)
    rows, below = (max(len(layers), 1), max(len(points), 1)), bottom - GAP / height
    grid = figure.add_gridspec(*rows, **sides, top=below, bottom=FOOT / height, hspace=0.1)
    cells = {site: first_row[0, column] for column, site in enumerate(levels)}
    cells |= {site: grid[layers.index(site.layer), points.index(site.point)] for site in sites if site not in cells}
    return figure, cells, first_row[0, len(levels) :]


def draw_joint(table: pd.DataFrame, captured: CapturedTexts) -> Figure:
    """Return the joint map as a grid of layers by capture points with common axes.

    The tokens of one text are black, the tokens of other texts grey. A few words of the text have the same colour in
    all panels, to follow them through the layers. Axes contain `AXES_SHARE` of the tokens in each direction; the title
    reports the number of vectors outside.
    """
    document, places, labels = example_text(table, captured, TRACKED_WORDS, [*POINTS, DECODER_INPUT])
    labels = {site: _keep_distinct(words) for site, words in labels.items()}
    everywhere = table[["x", "y"]].to_numpy(np.float64)
    margin = (1 - AXES_SHARE) / 2
    low, high = np.quantile(everywhere, [margin, 1 - margin], axis=0)
    inside = np.all((everywhere >= low) & (everywhere <= high), axis=1)
    others = places_by_site(table[table["document"] != document])
    figure, cells, legend_cell = _atlas_grid(list(places))
    titled: set[str] = set()  # rows and columns
    for site, cell in cells.items():
        axes = figure.add_subplot(cell, xticks=[], yticks=[])
        axes.spines[:].set(visible=True, color="0.8")
        style.set_limits(axes, everywhere[inside])
        if site in others:
            x, y = others[site].T
            axes.scatter(x, y, s=OTHER_SIZE, color=OTHER_TEXTS[1], linewidths=0, rasterized=True)
        x, y = places[site].T
        axes.scatter(x, y, s=TEXT_SIZE, color="0.25", linewidths=0)
        for index, colour in zip(labels[site], TRACK_COLOURS, strict=False):
            x, y = places[site][index]
            axes.scatter(x, y, s=TRACKED_SIZE, color=colour, edgecolors="white", linewidths=0.4, zorder=3)
        _add_titles(axes, site, captured, titled)
    axes = figure.add_subplot(legend_cell)
    axes.axis("off")
    words = labels[next(reversed(labels))].values()
    marks = [Mark(style.printable(word), colour, "o") for word, colour in zip(words, TRACK_COLOURS, strict=False)]
    marks += [
        Mark(f"other tokens of {style.printable(document)}", "#404040", "o"),
        Mark("other texts", OTHER_TEXTS[1], "o"),
    ]
    axes.legend(handles=style.legend_handles(marks, 4), loc="center", ncols=2, handletextpad=0.2)
    title = "Joint UMAP of all layers and capture points, same axes in all panels"
    outside = int(np.count_nonzero(~inside))
    if outside:
        title += f"; {outside} of {len(everywhere)} vectors outside"
    figure.suptitle(title, y=1 - 0.1 / figure.get_figheight(), va="top", fontsize=8)
    return figure


def _keep_distinct(words: Mapping[int, str]) -> dict[int, str]:
    """Return one token of each word, the first."""
    first: dict[str, int] = {}
    for index, word in words.items():
        first.setdefault(word, index)
    return {index: word for word, index in first.items()}


def _add_titles(axes: Any, site: Site, captured: CapturedTexts, titled: set[str]) -> None:
    """Add the capture point as title of the first panel of a column, and the layer as label of the first in a row."""
    row = layer_label(site.layer if site.point in LAYER_POINTS else 0, captured.encoder)
    if site.point not in titled:
        title = fill(POINT_MARKS[site.point].label, TITLE_CHARACTERS, break_on_hyphens=False)
        axes.set_title(title, fontsize=7, pad=3)
    if row not in titled:
        axes.set_ylabel(row, fontsize=7)
    titled |= {site.point, row}


def write_joint_pages(table: pd.DataFrame, encoder: int | None, path: Path, dpi: int = PAGE_DPI) -> None:
    """Write the joint map as the PDF `path`: page k shows the first k capture points, the newest with a dark edge.

    `encoder` is the number of encoder layers in an encoder-decoder model.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    places = places_by_site(table)
    figure = Figure(figsize=PAGE_SIZE)
    axes = figure.add_axes(PAGE_AXES, xlabel="UMAP 1", ylabel="UMAP 2")
    style.set_limits(axes, table[["x", "y"]].to_numpy(np.float64))
    newest = style.legend_handles([Mark("this page's point", "black", "o")], 4)
    newest[0].set_markerfacecolor("none")
    points = {site.point for site in places}
    handles = style.legend_handles([mark for point, mark in POINT_MARKS.items() if point in points], 5) + newest
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0)
    size = float(np.clip(2600 / len(table) ** 0.5, 4, 24))
    with PdfPages(path, metadata=style.METADATA["pdf"]) as pdf:
        for number, (site, xy) in enumerate(places.items(), 1):
            mark = POINT_MARKS[site.point]
            dots = axes.scatter(xy[:, 0], xy[:, 1], s=size, c=style.darken_for_contrast(mark.color), marker=mark.marker)
            dots.set(alpha=0.9, edgecolors="black", linewidths=0.5)
            axes.set_title(f"{site_label(site, encoder)} ({number} of {len(places)})", loc="left")
            pdf.savefig(figure, dpi=dpi)
            # Points of earlier pages are rasterised into one image.
            dots.set(alpha=0.55, edgecolors="none", linewidths=0, rasterized=True)


def write_animation(table: pd.DataFrame, captured: CapturedTexts, path: Path) -> None:
    """Write an animated GIF of one captured text on a map in a common plane.

    The background is drawn once, moving artists in every frame. There is no transition from the encoder to the decoder,
    because their input tokens differ.
    """
    document, places, labels = example_text(table, captured, WORDS)
    sites, everywhere = list(places), np.concatenate([*places.values()])
    figure = Figure(figsize=ANIMATION_SIZE, dpi=ANIMATION_DPI)
    figure.text(0.98, 0.985, style.printable(document), va="top", ha="right", fontsize=9, color="0.35")
    axes = figure.add_axes(MAP, frame_on=False, xticks=[], yticks=[])
    style.set_limits(axes, everywhere)
    axes.scatter(everywhere[:, 0], everywhere[:, 1], s=3, color="0.88", linewidths=0)
    timeline: Any = figure.add_axes(TIMELINE, frame_on=False, xlim=(0, max(len(sites) - 1, 1)), ylim=(-1, 1), yticks=[])
    timeline.plot(range(len(sites)), np.zeros(len(sites)), "|-", color="0.6", linewidth=1, markersize=5)
    starts = [number for number, site in enumerate(sites) if site.layer != sites[number - 1].layer or not number]
    starts = starts[:: -(-len(starts) // MAX_TICKS)]
    names = [layer_label(sites[number].layer, captured.encoder) for number in starts]
    timeline.set_xticks(starts, names, fontsize=7, ha="left")
    timeline.get_xticklabels()[0].set_ha("right")  # there is more room to its left
    timeline.tick_params("x", length=0, pad=1)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    background = canvas.copy_from_bbox(figure.bbox)
    dots = axes.scatter([], [], s=12, linewidths=0, alpha=0.85)
    leaders = LineCollection([], colors="0.3", linewidths=0.3)  # four times faster than annotations with arrows
    axes.add_collection(leaders, autolim=False)
    title = figure.text(0.02, 0.985, "", va="top", fontsize=11)
    (marker,) = timeline.plot([], [], "o", markersize=7, color="black", clip_on=False)
    centres = {site: style.place_labels(axes, xy, labels[site], WORD_SIZE) for site, xy in places.items()}
    frames: list[Image.Image] = []
    for number, site in enumerate(sites):
        before = sites[max(number - 1, 0)]
        before = before if labels[before] is labels[site] else site
        color = POINT_MARKS[site.point].color
        title.set(text=site_label(site, captured.encoder))
        title.set_color(style.darken_for_contrast(color, style.TEXT_CONTRAST))
        dots.set_color(style.darken_for_contrast(color))
        marker.set_data([number], [0])
        words = [axes.text(0, 0, label, fontsize=WORD_SIZE, **LABEL_BOX) for label in labels[site].values()]
        for share in np.arange(1, MOVES + 2) / (MOVES + 1):
            done = share * share * (3 - 2 * share)  # slow at both ends
            xy, word_xy = ((1 - done) * each[before] + done * each[site] for each in (places, centres))
            dots.set_offsets(xy)
            leaders.set_segments(list(np.stack([xy[list(labels[site])], word_xy], axis=1)))
            for word, centre in zip(words, word_xy, strict=True):
                word.set_position(centre)
            canvas.restore_region(background)
            for artist in (dots, leaders, *words, title, marker):
                figure.draw_artist(artist)
            frames.append(Image.fromarray(np.array(canvas.buffer_rgba())).convert("RGB"))
        for word in words:
            word.remove()
        frames += frames[-1:] * (FRAMES * (LAST_POINT_TIME if site == sites[-1] else 1) - MOVES - 1)
    palette = Image.fromarray(np.concatenate([np.asarray(frame) for frame in frames[FRAMES - 1 :: FRAMES]]))
    palette = palette.quantize(128, Image.Quantize.MAXCOVERAGE)
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    duration = 1000 // (FRAMES * POINTS_PER_SECOND)
    images[0].save(path, save_all=True, append_images=images[1:], duration=duration, loop=0)
