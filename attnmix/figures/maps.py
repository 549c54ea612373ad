"""Figures of maps: an atlas, the joint map as a grid and as a multi-page PDF, and an animation of one text.

Call the functions that draw or write figures within the context manager `paper_style`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.artist import Artist
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
HEAD, GAP, FOOT = 0.55, 0.45, 0.1  # inches: space above the first row, below the first row, below the last row
TITLE_CHARACTERS = 19  # maximum number of characters per line of a title
LEGEND_COLUMNS = 2  # minimum number of columns for the legend, to the right of the embeddings
GRID_SIDES: dict[str, float] = {"left": 0.05, "right": 0.99, "wspace": 0.08}  # `wspace` is in panel widths
SPECIAL_COLOUR = "#535a68"  # colour of special tokens in the legend
LAYOUT_NAMES = {"pca": "PCA"}
OTHER_LABEL, OTHER_COLOUR = OTHER_TEXTS  # label and colour of texts that have no separate colour

# Joint pages
PAGE_SIZE = (style.TWO_COLUMNS, 4.6)  # inches
PAGE_AXES = (0.075, 0.095, 0.61, 0.835)  # left, bottom, width, height, in figure fractions
PAGE_DPI = 200  # resolution of the raster images of earlier capture points

# Joint grid
TRACKED_WORDS = 5
TRACK_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#7A4B00")  # Okabe and Ito's colours, and a brown
OTHER_SIZE, TEXT_SIZE, TRACKED_SIZE = 1.5, 3.0, 14.0  # areas of dots, in square points
MAX_VECTOR_DOTS = 20_000  # if there are more dots, vector formats contain those of other texts as a raster image
AXES_SHARE = 0.998  # share of the vectors within the limits of each axis in the joint grid

LABEL_BOX: dict[str, Any] = {
    "ha": "center",
    "va": "center",
    "bbox": {"boxstyle": "square,pad=0.05", "facecolor": "white", "alpha": 0.7, "linewidth": 0},
}

# Animation
ANIMATION_SIZE, ANIMATION_DPI = (6.4, 4.8), 100  # inches, pixels per inch
MAP, TIMELINE = (0.02, 0.1, 0.96, 0.82), (0.11, 0.05, 0.86, 0.02)  # left, bottom, width, height of the axes
WORDS, WORD_SIZE = 12, 8
FRAMES, MOVES = 5, 3  # number of frames per capture point, and number of transition frames among these
LAST_POINT_TIME = 4  # display time of the last capture point, as a multiple of that of any other point
MAX_TICKS = 13

Places = npt.NDArray[np.float64]
"""Coordinates `[tokens, 2]` on a map."""


class Grid(NamedTuple):
    """A figure with one cell per site (capture point in a layer) and one cell for the legend."""

    figure: Figure
    cells: dict[Site, Any]
    legend_cell: Any


class ExampleText(NamedTuple):
    """The example text of a map, with coordinates and labels."""

    document: str
    places: dict[Site, Places]
    """The coordinates of all tokens at each site."""
    labels: dict[Site, dict[int, str]]
    """The labels of some tokens at each site, by the indices of the tokens."""


class Moment(NamedTuple):
    """The positions of all tokens, and of the labels of some tokens, at one capture point of an animation."""

    xy: Places
    word_xy: Places


class Scene(NamedTuple):
    """The figure of an animation: its background, and the artists that change between frames."""

    canvas: FigureCanvasAgg
    background: Any
    axes: Any
    dots: Any
    leaders: LineCollection
    """Lines from the labelled tokens to their labels."""
    title: Any
    marker: Any
    """The current capture point on the timeline."""


def places_by_site(table: pd.DataFrame) -> dict[Site, Places]:
    """Return the coordinates of a map's tokens at each site, with the sites in the order of the forward pass."""
    groups = table.groupby(["layer", "point"])
    places = {}
    for site in map_sites(table):
        rows = groups.get_group(tuple(site))
        places[site] = rows[["x", "y"]].to_numpy(np.float64)
    return places


def first_text(documents: Sequence[str]) -> str:
    """Return the name of the first user text or, if there is none, of the first review."""
    for name in documents:
        if name.startswith("text/"):
            return name
    return documents[0]


def example_text(
    table: pd.DataFrame, captured: CapturedTexts, max_labels: int, points: Collection[str] = POINTS
) -> ExampleText:
    """Return the example text of a map, with its coordinates and labels at the sites of `points`.

    The example is the first user text or, if there is none, the first review. At most `max_labels` words that are far
    from each other in the last map have a label. Sites in the same stack (encoder or decoder) have the same labels.
    """
    document = first_text(table["document"].unique().tolist())
    rows = table[(table["document"] == document) & table["point"].isin(points)]
    places = places_by_site(rows)
    last_site = list(places)[-1]
    last_places = places[last_site]
    positions = rows["position"].drop_duplicates().to_numpy()  # all sites have the same positions
    labels_by_stack = []  # for the inputs of the encoder and, if there is one, of the decoder
    for labels in captured.word_labels(document, positions):
        distant_labels = style.spread_out(last_places, labels, max_labels)
        labels_by_stack.append(distant_labels)
    labels_by_site = {}
    for site in places:
        stack = captured.reading(site)  # 1 for the separate inputs of a decoder, otherwise 0
        labels_by_site[site] = labels_by_stack[stack]
    return ExampleText(document, places, labels_by_site)


def draw_atlas(layout: str, table: pd.DataFrame, captured: CapturedTexts) -> Figure:
    """Return a figure with a grid of small maps by layer and capture point.

    Colours distinguish texts, and special tokens have separate markers. Maps in a common plane (`joint`, `aligned`)
    have the same limits; other maps have individual limits.

    Args:
        layout: The name of the layout.
        table: The coordinates of the tokens, or of a sample of the tokens, at each site.
        captured: The captured texts.
    """
    places = places_by_site(table)
    tokens = table[["document", "position"]].drop_duplicates()
    special_tokens = captured.special_tokens(tokens)
    captured_documents = captured.tokens["document"].unique().tolist()
    colours = text_colours(captured_documents)
    colour_T = _colour_tokens(tokens["document"], colours)
    size = float(np.clip(900 / len(tokens), 1.5, 9))  # smaller dots for more tokens
    all_places = table[["x", "y"]].to_numpy(np.float64)
    grid = _create_grid(list(places))
    titled: set[str] = set()  # rows and columns that have a title
    for site, cell in grid.cells.items():
        axes = _add_panel(grid.figure, cell)
        xy = places[site]
        # Inputs of an encoder and of a decoder have separate masks: their special tokens are at different positions.
        stack = captured.reading(site)
        special_masks = {token_class: masks[stack] for token_class, masks in special_tokens.items()}
        _scatter_tokens(axes, xy, colour_T, special_masks, size)
        limiting_places = all_places if layout in ONE_PLANE else xy
        style.set_limits(axes, limiting_places)
        _add_titles(axes, site, captured, titled)
    documents = tokens["document"].unique().tolist()
    marks = [*_list_text_marks(colours, documents), *_list_special_marks(captured, special_tokens)]
    _add_legend(grid, marks)
    heading = _describe_atlas(layout, documents)
    _add_heading(grid.figure, heading)
    return grid.figure


def _list_special_marks(captured: CapturedTexts, token_classes: Iterable[str]) -> list[Mark]:
    """Return the legend entries of classes of special tokens."""
    marks = []
    for token_class in token_classes:
        label = style.printable(captured.class_label(token_class))
        marker = SPECIAL_MARKERS[token_class]
        marks.append(Mark(label, SPECIAL_COLOUR, marker))
    return marks


def _colour_tokens(documents: Iterable[str], colours: Mapping[str, str]) -> npt.NDArray[np.str_]:
    """Return the colours `[T]` of T tokens by the names of their texts; grey for texts that are not in `colours`."""
    token_colours = []
    for name in documents:
        token_colours.append(colours.get(name, OTHER_COLOUR))
    return np.array(token_colours)


def _scatter_tokens(
    axes: Any,
    xy: Places,
    colour_T: npt.NDArray[np.str_],
    special_masks: Mapping[str, npt.NDArray[np.bool_]],
    size: float,
) -> None:
    """Draw the tokens of a map: special tokens as large markers, and all other tokens as dots.

    `special_masks` contains a mask of the tokens for each class of special tokens; `size` is the area of a dot.
    """
    is_plain = np.ones(len(xy), dtype=bool)
    for token_class, mask in special_masks.items():
        is_plain &= ~mask
        axes.scatter(
            xy[mask, 0],
            xy[mask, 1],
            c=colour_T[mask],
            s=3 * size,
            marker=SPECIAL_MARKERS[token_class],
            edgecolors="white",
            linewidths=0.3,
            zorder=3,
        )
    axes.scatter(
        xy[is_plain, 0],
        xy[is_plain, 1],
        c=colour_T[is_plain],
        s=size,
        linewidths=0,
    )


def _list_text_marks(colours: Mapping[str, str], documents: Sequence[str]) -> list[Mark]:
    """Return the legend entries of the texts on a map; texts without a colour have one common entry."""
    marks = []
    for name, colour in colours.items():
        if name in documents:
            marks.append(Mark(style.printable(name), colour, "o"))
    has_other_texts = not set(documents) <= set(colours)
    if has_other_texts:
        marks.append(Mark(OTHER_LABEL, OTHER_COLOUR, "o"))
    return marks


def _describe_atlas(layout: str, documents: Sequence[str]) -> str:
    """Return the heading of an atlas with the maps of one layout."""
    texts = f"{len(documents)} texts"
    if len(documents) == 1:
        texts = style.printable(documents[0])
    planes = "all in one plane" if layout in ONE_PLANE else "each in a plane of its own"
    name = LAYOUT_NAMES.get(layout, layout.capitalize())
    return f"{name} maps of {texts}, {planes}, coloured by text"


def text_colours(documents: Sequence[str]) -> dict[str, str]:
    """Return the page's colour of each captured text; if there are too many texts, only the colour of the first text.

    The first text is the result of `first_text`.
    """
    if len(documents) > len(TEXT_COLOURS):
        return {first_text(documents): TEXT_COLOURS[0]}
    return dict(zip(documents, TEXT_COLOURS, strict=False))


def _create_grid(sites: list[Site]) -> Grid:
    """Return a figure with a cell for each site (capture point in a layer) and for the legend.

    The first row contains the cells of embeddings and the cell of the legend. Every further row contains the capture
    points of one layer.
    """
    embedding_sites = [site for site in sites if site.point not in LAYER_POINTS]
    layer_sites = [site for site in sites if site.point in LAYER_POINTS]
    layers = sorted({site.layer for site in layer_sites})
    site_points = {site.point for site in layer_sites}
    points = [point for point in LAYER_POINTS if point in site_points]
    first_columns = max(len(points), len(embedding_sites) + LEGEND_COLUMNS)
    figure, first_row, layer_rows = _create_grid_rows(first_columns, len(layers), len(points))
    cells = {}
    for column, site in enumerate(embedding_sites):
        cells[site] = first_row[0, column]
    for site in layer_sites:
        row = layers.index(site.layer)
        column = points.index(site.point)
        cells[site] = layer_rows[row, column]
    legend_cell = first_row[0, len(embedding_sites) :]
    return Grid(figure, cells, legend_cell)


def _create_grid_rows(first_columns: int, layers: int, points: int) -> tuple[Figure, Any, Any]:
    """Return a figure, its first row of `first_columns` cells, and the cells `[layers, points]` below this row."""
    # The heights are in inches.
    rows = layers + 1
    max_panel = (style.PAGE_HEIGHT - HEAD - GAP - FOOT) / rows
    panel = min(PANEL, max_panel)
    height = HEAD + panel * rows + GAP + FOOT

    figure = Figure(figsize=(style.TWO_COLUMNS, height))
    first_row_bottom = 1 - (HEAD + panel) / height  # in fractions of the figure's height
    first_row = figure.add_gridspec(
        1,
        first_columns,
        **GRID_SIDES,
        top=1 - HEAD / height,
        bottom=first_row_bottom,
    )
    layer_rows = figure.add_gridspec(
        max(layers, 1),  # matplotlib requires at least one row and column
        max(points, 1),
        **GRID_SIDES,
        top=first_row_bottom - GAP / height,
        bottom=FOOT / height,
        hspace=0.1,
    )
    return figure, first_row, layer_rows


def _add_panel(figure: Figure, cell: Any) -> Any:
    """Add the axes of a map to a cell, with a frame and without ticks."""
    axes = figure.add_subplot(cell, xticks=[], yticks=[])
    frame = axes.spines[:]
    frame.set(visible=True, color="0.8")
    return axes


def _add_legend(grid: Grid, marks: Sequence[Mark]) -> None:
    """Draw a legend of `marks` in the legend cell of the grid."""
    axes = grid.figure.add_subplot(grid.legend_cell)
    axes.axis("off")
    axes.legend(
        handles=style.legend_handles(marks, size=4),
        loc="center",
        ncols=2,
        handletextpad=0.2,
    )


def _add_heading(figure: Figure, heading: str) -> None:
    """Add a heading at the top of a figure."""
    margin = 0.1 / figure.get_figheight()
    figure.suptitle(heading, y=1 - margin, va="top", fontsize=8)


def draw_joint(table: pd.DataFrame, captured: CapturedTexts) -> Figure:
    """Return a figure of the joint map: a grid of panels, layers by capture points, with common axes.

    The tokens of one text are dark grey, and those of other texts light grey. A few words of the text have the same
    colour in all panels of a stack (encoder or decoder), so that readers can follow them through the layers; the legend
    contains the words of the last panel. Each axis is limited to the central `AXES_SHARE` of the vectors; the title
    contains the number of vectors outside the axes.
    """
    example = example_text(
        table,
        captured,
        max_labels=TRACKED_WORDS,
        points=[*POINTS, DECODER_INPUT],
    )
    # By site, the tracked words by the indices of their tokens.
    words_by_site = {site: _omit_repeated_words(words) for site, words in example.labels.items()}
    all_places = table[["x", "y"]].to_numpy(np.float64)
    is_inside = _find_central_places(all_places)
    is_other_text = table["document"] != example.document
    other_places = places_by_site(table[is_other_text])
    has_many_dots = len(table) > MAX_VECTOR_DOTS
    grid = _create_grid(list(example.places))
    titled: set[str] = set()  # rows and columns that have a title
    for site, cell in grid.cells.items():
        axes = _add_panel(grid.figure, cell)
        style.set_limits(axes, all_places[is_inside])
        if site in other_places:
            _scatter_other_texts(axes, other_places[site], as_image=has_many_dots)
        _scatter_example_text(axes, example.places[site])
        _scatter_tracked_words(axes, example.places[site], words_by_site[site])
        _add_titles(axes, site, captured, titled)
    last_site = list(words_by_site)[-1]
    last_words = words_by_site[last_site].values()
    marks = _list_tracked_marks(last_words, example.document)
    _add_legend(grid, marks)
    heading = _describe_joint(is_inside)
    _add_heading(grid.figure, heading)
    return grid.figure


def _describe_joint(is_inside: npt.NDArray[np.bool_]) -> str:
    """Return the heading of the joint map, with the number of vectors outside its axes."""
    heading = "Joint UMAP of all layers and capture points, same axes in all panels"
    outside = int(np.count_nonzero(~is_inside))
    if outside:
        heading += f"; {outside} of {len(is_inside)} vectors outside"
    return heading


def _find_central_places(xy: Places) -> npt.NDArray[np.bool_]:
    """Return a mask `[N]` of the N points `xy` `[N, 2]` within the central `AXES_SHARE` of the values on both axes."""
    margin = (1 - AXES_SHARE) / 2
    low, high = np.quantile(xy, [margin, 1 - margin], axis=0)
    is_between = (xy >= low) & (xy <= high)
    is_central: npt.NDArray[np.bool_] = np.all(is_between, axis=1)
    return is_central


def _scatter_other_texts(axes: Any, xy: Places, *, as_image: bool) -> None:
    """Draw the tokens of other texts in grey; if `as_image` is True, vector formats contain them as a raster image."""
    axes.scatter(
        xy[:, 0],
        xy[:, 1],
        s=OTHER_SIZE,
        color=OTHER_COLOUR,
        linewidths=0,
        rasterized=as_image,
    )


def _scatter_example_text(axes: Any, xy: Places) -> None:
    """Draw the tokens of the example text in dark grey."""
    axes.scatter(
        xy[:, 0],
        xy[:, 1],
        s=TEXT_SIZE,
        color="0.25",
        linewidths=0,
    )


def _scatter_tracked_words(axes: Any, xy: Places, words: Mapping[int, str]) -> None:
    """Draw a dot in a separate colour for each of the `words`, whose keys are indices into the coordinates `xy`."""
    tracked_xy = xy[list(words)]
    axes.scatter(
        tracked_xy[:, 0],
        tracked_xy[:, 1],
        s=TRACKED_SIZE,
        color=TRACK_COLOURS[: len(words)],
        edgecolors="white",
        linewidths=0.4,
        zorder=3,
    )


def _list_tracked_marks(words: Iterable[str], document: str) -> list[Mark]:
    """Return the legend entries of the coloured words, of the other tokens of the text, and of the other texts."""
    marks = []
    for word, colour in zip(words, TRACK_COLOURS, strict=False):
        marks.append(Mark(style.printable(word), colour, "o"))
    document_label = f"other tokens of {style.printable(document)}"
    marks.append(Mark(document_label, "#404040", "o"))
    marks.append(Mark("other texts", OTHER_COLOUR, "o"))
    return marks


def _omit_repeated_words(words: Mapping[int, str]) -> dict[int, str]:
    """Return `words`, a dictionary from token index to word, with only the first of several equal words."""
    distinct_words: dict[int, str] = {}
    for index, word in words.items():
        if word not in distinct_words.values():
            distinct_words[index] = word
    return distinct_words


def _add_titles(axes: Any, site: Site, captured: CapturedTexts, titled: set[str]) -> None:
    """Add the capture point above the first panel of a column, and the layer beside the first panel of a row.

    `titled` contains the columns and rows that have a title already; those of this panel are added.
    """
    layer = site.layer if site.point in LAYER_POINTS else 0  # embeddings are in the row of layer 0
    row = layer_label(layer, captured.encoder)
    if site.point not in titled:
        title = fill(POINT_MARKS[site.point].label, TITLE_CHARACTERS, break_on_hyphens=False)
        axes.set_title(title, fontsize=7, pad=3)
    if row not in titled:
        axes.set_ylabel(row, fontsize=7)
    titled.update([site.point, row])


class DotImages(Artist):
    """Images of dots on the pages of a PDF. The PDF stores each image once, even if several pages show it."""

    def __init__(self, axes: Any, dpi: int) -> None:
        """Create transparent axes with the position and limits of `axes`; `dpi` is the resolution of the images."""
        super().__init__()
        figure = Figure(figsize=axes.figure.get_size_inches(), dpi=dpi, facecolor="none")
        self.canvas = FigureCanvasAgg(figure)
        self.transparent_axes = figure.add_axes(axes.get_position(), xlim=axes.get_xlim(), ylim=axes.get_ylim())
        self.transparent_axes.axis("off")
        self.images: list[tuple[float, float, npt.NDArray[np.uint8]]] = []
        """The left edge and the bottom edge of each image, both in points, and the pixels of the image."""

    def append(self, xy: Places, **options: Any) -> None:
        """Add an image of dots at `xy`, drawn with the `options` of `Axes.scatter` and without empty margins."""
        dots = self.transparent_axes.scatter(xy[:, 0], xy[:, 1], **options)
        self.canvas.draw()
        dots.remove()
        pixels = np.array(self.canvas.buffer_rgba())  # [rows, columns, RGBA], with the top row first
        opacity = pixels[:, :, 3]
        is_drawn = opacity > 0
        drawn_rows = np.flatnonzero(is_drawn.any(axis=1))
        drawn_columns = np.flatnonzero(is_drawn.any(axis=0))
        top = drawn_rows[0]
        bottom = drawn_rows[-1] + 1
        left = drawn_columns[0]
        right = drawn_columns[-1] + 1
        points_per_pixel = 72 / self.canvas.figure.dpi  # a point is 1 / 72 inch
        x = left * points_per_pixel
        rows_below = len(pixels) - bottom
        y = rows_below * points_per_pixel
        upward_pixels = pixels[top:bottom, left:right][::-1]  # the renderer expects the bottom row first
        self.images.append((x, y, upward_pixels))

    def draw(self, renderer: Any) -> None:
        """Draw all images on the current page."""
        context = renderer.new_gc()
        for x, y, pixels in self.images:
            renderer.draw_image(context, x, y, pixels)
        context.restore()


def write_joint_pages(table: pd.DataFrame, encoder: int | None, path: Path, dpi: int = PAGE_DPI) -> None:
    """Write the joint map as a PDF in which page k shows the first k capture points, in the order of the forward pass.

    The dots of the newest point have a dark edge; those of earlier points are drawn as raster images with the
    resolution `dpi`. `encoder` is the number of encoder layers in an encoder-decoder model.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    places = places_by_site(table)
    figure = Figure(figsize=PAGE_SIZE)
    axes = figure.add_axes(PAGE_AXES, xlabel="UMAP 1", ylabel="UMAP 2", xticks=[], yticks=[])  # scales are arbitrary
    style.set_limits(axes, table[["x", "y"]].to_numpy(np.float64))
    _add_point_legend(axes, {site.point for site in places})
    size = float(np.clip(2600 / len(table) ** 0.5, 4, 24))  # smaller dots for more vectors
    earlier = DotImages(axes, dpi)
    axes.add_artist(earlier)
    with PdfPages(path, metadata=style.METADATA["pdf"]) as pdf:
        for number, (site, xy) in enumerate(places.items(), 1):
            mark = POINT_MARKS[site.point]
            looks: dict[str, Any] = {
                "s": size,
                "color": style.darken_for_contrast(mark.color),
                "marker": mark.marker,
            }
            dots = axes.scatter(xy[:, 0], xy[:, 1], **looks, alpha=0.9, edgecolors="black", linewidths=0.5)
            axes.set_title(f"{site_label(site, encoder)} ({number} of {len(places)})", loc="left")
            pdf.savefig(figure, dpi=dpi)
            # On the following pages, this capture point counts as an earlier one.
            dots.remove()
            earlier.append(xy, **looks, alpha=0.55, linewidths=0)


def _add_point_legend(axes: Any, points: Set[str]) -> None:
    """Add a legend of the markers of the capture points, and of the dark edge that marks the newest point of a page."""
    newest_mark = Mark("this page's point", "black", "o")
    (newest_handle,) = style.legend_handles([newest_mark], size=4)
    newest_handle.set_markerfacecolor("none")
    point_marks = [mark for point, mark in POINT_MARKS.items() if point in points]
    handles = [*style.legend_handles(point_marks, size=5), newest_handle]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0)


def write_animation(table: pd.DataFrame, captured: CapturedTexts, path: Path) -> None:
    """Write an animated GIF that moves the tokens of one text from capture point to capture point of a map.

    The map must have a common plane for all points. The background is drawn once, and the moving artists are drawn in
    every frame. There is no transition from the encoder to the decoder, because their input tokens differ.
    """
    document, places, labels = example_text(table, captured, WORDS)
    scene = _create_scene(document, places, captured.encoder)
    moments = {}
    for site, xy in places.items():
        word_xy = style.place_labels(scene.axes, xy, labels[site], WORD_SIZE)
        moments[site] = Moment(xy, word_xy)
    frames: list[Image.Image] = []
    sites = list(places)
    for number, site in enumerate(sites):
        previous = sites[max(number - 1, 0)]  # the first site has no previous site; its tokens do not move
        has_same_tokens = captured.reading(previous) == captured.reading(site)
        origin = previous if has_same_tokens else site
        _mark_site(scene, site, number, captured.encoder)
        transition = _draw_transition(scene, labels[site], moments[origin], moments[site])
        frames.extend(transition)
        # Repeat the last frame for the rest of the display time.
        is_last = number == len(sites) - 1
        display_time = LAST_POINT_TIME if is_last else 1
        repetitions = FRAMES * display_time - len(transition)
        frames.extend([transition[-1]] * repetitions)
    _save_gif(frames, path)


def _create_scene(document: str, places: Mapping[Site, Places], encoder: int | None) -> Scene:
    """Return the scene of an animation: the drawn background, and the moving artists, which have no data yet.

    The background contains the name of the text (`document`), all places in grey, and the timeline. `encoder` is the
    number of encoder layers in an encoder-decoder model.
    """
    all_places = np.concatenate(list(places.values()))
    figure = Figure(figsize=ANIMATION_SIZE, dpi=ANIMATION_DPI)
    figure.text(
        0.98,
        0.985,
        style.printable(document),
        va="top",
        ha="right",
        fontsize=9,
        color="0.35",
    )
    axes = figure.add_axes(MAP, frame_on=False, xticks=[], yticks=[])
    style.set_limits(axes, all_places)
    axes.scatter(all_places[:, 0], all_places[:, 1], s=3, color="0.88", linewidths=0)
    timeline = _add_timeline(figure, list(places), encoder)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    background = canvas.copy_from_bbox(figure.bbox)
    dots = axes.scatter([], [], s=12, linewidths=0, alpha=0.85)
    # A line collection is four times faster than annotations with arrows.
    leaders = LineCollection([], colors="0.3", linewidths=0.3)
    axes.add_collection(leaders, autolim=False)
    title = figure.text(0.02, 0.985, "", va="top", fontsize=11)
    (marker,) = timeline.plot(
        [],
        [],
        "o",
        markersize=7,
        color="black",
        clip_on=False,
    )
    return Scene(canvas, background, axes, dots, leaders, title, marker)


def _add_timeline(figure: Figure, sites: Sequence[Site], encoder: int | None) -> Any:
    """Add the timeline of an animation, with ticks at capture points and labels at layers, and return its axes.

    The position of a capture point on the timeline is its index in `sites`. `encoder` is the number of encoder layers
    in an encoder-decoder model.
    """
    length = max(len(sites) - 1, 1)  # an axis must have a length
    timeline: Any = figure.add_axes(
        TIMELINE,
        frame_on=False,
        xlim=(0, length),
        ylim=(-1, 1),
        yticks=[],
    )
    timeline.plot(
        range(len(sites)),
        np.zeros(len(sites)),
        "|-",
        color="0.6",
        linewidth=1,
        markersize=5,
    )
    starts = _find_layer_starts(sites)
    step = ceil(len(starts) / MAX_TICKS)
    labelled = starts[::step]  # at most `MAX_TICKS`
    names = [layer_label(sites[number].layer, encoder) for number in labelled]
    timeline.set_xticks(labelled, names, fontsize=7, ha="left")
    first_label = timeline.get_xticklabels()[0]
    first_label.set_ha("right")  # extends into the free space on the left
    timeline.tick_params("x", length=0, pad=1)
    return timeline


def _find_layer_starts(sites: Sequence[Site]) -> list[int]:
    """Return the index of the first site of each layer."""
    starts = []
    previous_layer = None
    for number, site in enumerate(sites):
        if site.layer != previous_layer:
            starts.append(number)
        previous_layer = site.layer
    return starts


def _mark_site(scene: Scene, site: Site, number: int, encoder: int | None) -> None:
    """Set the title, the colours of the title and the dots, and the marker's position on the timeline for a site.

    `number` is the index of the site, and `encoder` the number of encoder layers in an encoder-decoder model.
    """
    colour = POINT_MARKS[site.point].color
    text_colour = style.darken_for_contrast(colour, style.TEXT_CONTRAST)
    scene.title.set_text(site_label(site, encoder))
    scene.title.set_color(text_colour)
    scene.dots.set_color(style.darken_for_contrast(colour))
    scene.marker.set_data([number], [0])


def _draw_transition(scene: Scene, labels: Mapping[int, str], start: Moment, end: Moment) -> list[Image.Image]:
    """Return the frames in which the tokens and their labels move from `start` to `end`; the last frame shows `end`."""
    words = _add_words(scene.axes, labels)
    frames = []
    for progress in _list_transition_steps():
        xy = _interpolate(start.xy, end.xy, progress)
        word_xy = _interpolate(start.word_xy, end.word_xy, progress)
        scene.dots.set_offsets(xy)
        _move_words(scene, words, xy, word_xy)
        frame = _draw_frame(scene, words.values())
        frames.append(frame)
    for word in words.values():
        word.remove()
    return frames


def _add_words(axes: Any, labels: Mapping[int, str]) -> dict[int, Any]:
    """Create the labels of the tokens, initially at the origin, and return their artists by token index."""
    words = {}
    for index, label in labels.items():
        words[index] = axes.text(
            0,
            0,
            label,
            fontsize=WORD_SIZE,
            **LABEL_BOX,
        )
    return words


def _move_words(scene: Scene, words: Mapping[int, Any], xy: Places, word_xy: Places) -> None:
    """Move the labels of tokens to `word_xy`, and draw lines from the tokens to their labels.

    `words` contains the artists of the labels by token index, and `xy` the positions of all tokens.
    """
    labelled_xy = xy[list(words)]
    segments = np.stack([labelled_xy, word_xy], axis=1)
    scene.leaders.set_segments(list(segments))
    for word, centre in zip(words.values(), word_xy, strict=True):
        word.set_position(centre)


def _list_transition_steps() -> npt.NDArray[np.float64]:
    """Return the progress of a transition in each frame `[MOVES + 1]`, up to 1; the start and the end are slow."""
    times = np.arange(1, MOVES + 2) / (MOVES + 1)
    return times * times * (3 - 2 * times)  # the smoothstep function


def _interpolate(start: Places, end: Places, progress: float) -> Places:
    """Return positions between `start` and `end`; `progress` is the fraction of the way, from 0 to 1."""
    return (1 - progress) * start + progress * end


def _draw_frame(scene: Scene, words: Iterable[Any]) -> Image.Image:
    """Return the picture of the current artists on the background."""
    canvas = scene.canvas
    canvas.restore_region(scene.background)
    artists = [scene.dots, scene.leaders, *words, scene.title, scene.marker]
    for artist in artists:
        canvas.figure.draw_artist(artist)
    pixels = np.array(canvas.buffer_rgba())
    return Image.fromarray(pixels).convert("RGB")


def _save_gif(frames: Sequence[Image.Image], path: Path) -> None:
    """Write frames as an animated GIF with one palette, derived from the last frame of each capture point."""
    # Each capture point has `FRAMES` frames, except the last, which has a multiple of this number.
    final_frames = frames[FRAMES - 1 :: FRAMES]
    pixels = np.concatenate([np.asarray(frame) for frame in final_frames])
    palette = Image.fromarray(pixels).quantize(128, Image.Quantize.MAXCOVERAGE)
    images = []
    for frame in frames:
        image = frame.quantize(palette=palette, dither=Image.Dither.NONE)
        images.append(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    images[0].save(
        path,
        save_all=True,
        append_images=images[1:],
        duration=1000 // (FRAMES * POINTS_PER_SECOND),
        loop=0,
    )
