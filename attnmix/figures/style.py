"""Figure style: sizes, fonts, colours with sufficient contrast, limits, label placement, and reproducible files."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from fontpkg_arimo import ROOT
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.ft2font import FaceFlags
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path

from attnmix.figures.labels import LESS_COLOURS, SHARE_COLOURS, Mark

ONE_COLUMN = 3.3  # inches, like the following sizes
TWO_COLUMNS = 7.0
PAGE_HEIGHT = 9.5
AXIS_MARGIN = 1.1  # length of a map's axes, in multiples of the points' extent
CONTRAST = 3.0  # minimum contrast of marks to white according to WCAG 2.2
TEXT_CONTRAST = 4.5  # minimum contrast of text to white according to WCAG 2.2
ARIMO = ROOT / "files" / "Arimo[wght].ttf"  # same widths as Helvetica; embedded in PDFs as Type 42
LABEL_SIZE = 5  # font size of token labels, in points
CURVE_LABEL_SIZE = 6  # font size of curve labels, in points
LABEL_X = 1.06  # left end of curve labels, in panel widths
LINE_HEIGHT = 1.25  # in font sizes
MIN_EXTENT = 1e-3  # minimum extent of the points on a map, in units of the map
DISTANCES = (0.9, 1.7, 2.8, 4.2, 6.0)  # from a point to the centre of its label, in font sizes
ANGLES = np.pi * np.arange(12) / 6
OFFSETS = np.array([(r * np.cos(a), r * np.sin(a)) for r, a in product(DISTANCES, ANGLES)]).round(6)
"""The candidate offsets `[C, 2]` of a label's centre from the labelled point, in font sizes.

Labels to the left or right of the point are shifted further, by half their width.
"""
OFFSET_LENGTHS = np.hypot(OFFSETS[:, 0], OFFSETS[:, 1])  # without this shift
# A label is placed at the position with the lowest cost. The following constants are parts of this cost, relative to
# the cost of a displacement from the labelled point by one font size.
COVERED_POINT_COST = 0.3  # for each point that the label covers
OVERLAP_COST = 100  # for a label that other labels cover completely
OUTSIDE_COST = 1000  # for a label that extends beyond the axes
SVG_FONTS = "'Arimo', Helvetica, Arial, 'Liberation Sans'"  # fallbacks for viewers of an SVG without Arimo
JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"  # invisible, but affect the shape of adjacent letters
# Metadata that are omitted, because dates and program versions would make files irreproducible.
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None},
    "svg": {"Date": None, "Creator": None},
}


class CurveEnd(NamedTuple):
    """The last point of a curve in data coordinates, with the label and colour of the curve."""

    x: float
    y: float
    label: str
    color: str


@contextmanager
def paper_style(fallback_fonts: Iterable[str] = ()) -> Iterator[None]:
    """Configure matplotlib for papers within a context, which must enclose both drawing and saving.

    The `fallback_fonts` are used for characters that the font of the style lacks.
    """
    # matplotlib prefers the first font in the list. The packaged font is moved to the front, before any installed copy.
    if fontManager.ttflist[0].fname != str(ARIMO):
        fontManager.addfont(ARIMO)
        packaged_font = fontManager.ttflist.pop()  # `addfont` has appended it to the list
        fontManager.ttflist.insert(0, packaged_font)
    with mpl.rc_context(fname=Path(__file__).with_name("paper.mplstyle")):
        mpl.rcParams["font.family"] = [*mpl.rcParams["font.family"], *fallback_fonts]
        yield


@cache
def _list_characters(families: tuple[str, ...]) -> frozenset[str]:
    """Return all characters available in at least one of the font families."""
    characters: set[str] = set()
    for family in families:
        file = findfont(FontProperties(family=[family]))
        codes = get_font(file).get_charmap()
        characters.update(map(chr, codes))
    return frozenset(characters)


def _find_available_characters() -> frozenset[str]:
    """Return all characters that the currently configured fonts contain."""
    families = mpl.rcParams["font.family"]
    return _list_characters(tuple(families))


def find_fallback_fonts(texts: Iterable[str]) -> list[str]:
    """Return installed fonts for the characters of `texts` that are missing in the fonts of the style.

    Log a warning if some of these characters are not available in any installed font.
    """
    printable_characters = {character for text in texts for character in text if character.isprintable()}
    with paper_style():
        missing = printable_characters - _find_available_characters()
    if not missing:
        return []
    characters_by_font = {name: _list_characters((name,)) for name in _list_installed_fonts()}
    fonts: list[str] = []
    while missing and characters_by_font:
        font = _choose_font(missing, characters_by_font)
        found = missing & characters_by_font[font]
        if not found:
            break
        fonts.append(font)
        missing -= found
    if missing:
        _warn_about_missing(missing)
    return fonts


def _choose_font(characters: Set[str], characters_by_font: Mapping[str, Set[str]]) -> str:
    """Return the font with most of the `characters`; among equals, a sans-serif font like Arimo is preferred."""

    def rank(font: str) -> tuple[int, bool]:
        available = characters & characters_by_font[font]
        is_sans_serif = "Sans" in font
        return len(available), is_sans_serif

    return max(characters_by_font, key=rank)


def _warn_about_missing(characters: Set[str]) -> None:
    """Log the number of characters that no installed font has, and up to ten of these characters."""
    examples = []
    for character in sorted(characters)[:10]:
        examples.append(f"{character} (U+{ord(character):04X})")
    logging.warning(
        "no installed font has %d of the characters, such as %s; figures show their code points instead",
        len(characters),
        ", ".join(examples),
    )


def _list_installed_fonts() -> list[str]:
    """Return the sorted names of the installed upright fonts that matplotlib can draw."""
    files = {}
    for entry in fontManager.ttflist:
        if entry.style == "normal" and entry.variant == "normal":
            files[entry.name] = entry.fname
    fonts = []
    for name, file in sorted(files.items()):
        # matplotlib cannot draw colour fonts, and Last Resort contains only placeholders.
        has_colours = FaceFlags.COLOR in get_font(file).face_flags
        if not has_colours and not name.startswith("Last Resort"):
            fonts.append(name)
    return fonts


def printable(text: str) -> str:
    """Return a text in which code points such as `<U+1F600>` replace the characters that the figures' fonts lack."""
    available = _find_available_characters()
    shown = []
    for character in text:
        is_drawn = character in available and character.isprintable()
        if is_drawn or character in JOINERS:
            shown.append(character)
        else:
            shown.append(f"<U+{ord(character):04X}>")
    return "".join(shown)


def save_figure(figure: Figure, path: Path, formats: Sequence[str], dpi: int | None = None) -> None:
    """Save a figure in several formats, as `path` with the suffix of each format.

    The files contain no dates or program versions. Call this function within `paper_style`. `dpi` is the resolution of
    PNG files, and of raster images embedded in files of other formats; the default is that of the style.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in formats:
        saved = path.with_suffix(f".{suffix}")
        figure.savefig(saved, dpi=dpi, metadata=METADATA[suffix])
        if suffix == "svg":
            # Viewers without Arimo need the names of other fonts.
            text = saved.read_text(encoding="utf-8")
            text = text.replace("font-family: 'Arimo'", f"font-family: {SVG_FONTS}")
            saved.write_text(text, encoding="utf-8")


def contrast_to_white(color: Any) -> float:
    """Return the contrast ratio of a colour to white as defined in WCAG 2.2, from 1 to 21."""
    linear = []
    for component in to_rgb(color):  # sRGB with gamma correction
        if component <= 0.04045:
            linear.append(component / 12.92)
        else:
            linear.append(((component + 0.055) / 1.055) ** 2.4)
    luminance = float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
    return 1.05 / (luminance + 0.05)


@cache
def darken_for_contrast(color: str, contrast: float = CONTRAST) -> str:
    """Return the colour, or its lightest darker shade with sufficient contrast to white."""
    components = np.array(to_rgb(color))
    shades = (to_hex(factor * components) for factor in np.linspace(1, 0, 256))
    return next(shade for shade in shades if contrast_to_white(shade) >= contrast)


@cache
def high_contrast_cmap(name: str) -> ListedColormap:
    """Return a colour map with the colours of the colour map `name` that have sufficient contrast to white."""
    colors = mpl.colormaps[name](np.linspace(0, 1, 256))
    return ListedColormap([color for color in colors if contrast_to_white(color) >= CONTRAST])


@cache
def share_cmap() -> LinearSegmentedColormap:
    """Return the page's colour scale of shares, from 0 to 1."""
    return LinearSegmentedColormap.from_list("shares", SHARE_COLOURS)


@cache
def change_cmap() -> LinearSegmentedColormap:
    """Return the page's colour scale of differences of shares, from -1 to 1."""
    return LinearSegmentedColormap.from_list("changes", [*LESS_COLOURS[::-1], *SHARE_COLOURS])


def legend_handles(marks: Iterable[Mark], size: float) -> list[Line2D]:
    """Return a legend entry with a marker of `size` points for each mark."""
    handles = []
    for mark in marks:
        handle = Line2D(
            [],
            [],
            marker=mark.marker,
            markersize=size,
            color=darken_for_contrast(mark.color),
            label=mark.label,
            linestyle="none",
        )
        handles.append(handle)
    return handles


def set_limits(axes: Axes, xy: npt.NDArray[np.float64]) -> None:
    """Set the limits of the axes around the points `[vectors, 2]`, with the same scale along x and y."""
    low = xy.min(axis=0)
    high = xy.max(axis=0)
    figure: Any = axes.figure
    inches = np.array(axes.get_position().size) * figure.get_size_inches()
    extent = np.maximum(high - low, MIN_EXTENT)
    units_per_inch = (extent / inches).max()  # the fewest units per inch with which all points fit
    half_length = inches * units_per_inch * AXIS_MARGIN / 2
    middle = (low + high) / 2
    left, bottom = middle - half_length
    right, top = middle + half_length
    axes.set(xlim=(left, right), ylim=(bottom, top))


def label_curves(axes: Axes) -> None:
    """Write the label of each curve to the right of the panel, close to the end of the curve and without overlap.

    Curves whose label starts with an underscore are not labelled. The panel must have its final position and limits.
    """
    ends = _list_curve_ends(axes)
    if not ends:
        return
    # All positions and heights are fractions of the panel's height.
    bottom, top = axes.get_ylim()
    curve_ends = np.array([(end.y - bottom) / (top - bottom) for end in ends])
    heights = _measure_curve_labels(axes, ends)
    centers = _separate_labels(curve_ends, heights)
    for end, center in zip(ends, centers, strict=True):
        _write_curve_label(axes, end, center)


def _measure_curve_labels(axes: Axes, ends: Sequence[CurveEnd]) -> npt.NDArray[np.float64]:
    """Return the height of each curve's label, as a fraction of the panel's height."""
    figure: Any = axes.figure
    panel_height = axes.get_position().height * figure.get_figheight() * 72  # in points, 1 / 72 inch
    line_counts = np.array([end.label.count("\n") + 1 for end in ends])
    heights: npt.NDArray[np.float64] = line_counts * CURVE_LABEL_SIZE * LINE_HEIGHT / panel_height
    return heights


def _separate_labels(
    curve_ends: npt.NDArray[np.float64],
    heights: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return the centres of labels that do not overlap and are close to the ends of their curves.

    Positions and heights are fractions of the panel's height. `curve_ends` are sorted from bottom to top, and `heights`
    are those of the labels.
    """
    # The centres of the labels if they are stacked without gaps from the bottom of the panel.
    stacked = np.cumsum(heights) - heights / 2
    # Labels do not overlap if their displacements from these centres do not decrease from bottom to top. Isotonic
    # regression minimises the squared distances between labels and curve ends under this condition.
    displacements = fit_increasing(curve_ends - stacked)
    free_height = max(0.0, 1 - heights.sum())
    limited_displacements = np.clip(displacements, 0, free_height)  # labels stay within the panel
    centers: npt.NDArray[np.float64] = limited_displacements + stacked
    return centers


def _write_curve_label(axes: Axes, end: CurveEnd, center: float) -> None:
    """Write a curve's label to the right of the panel, with a line from the label to the end of the curve."""
    line: Any = {
        "arrowstyle": "-",
        "color": end.color,
        "linewidth": 0.5,
        "relpos": (0, 0.5),
        "shrinkA": 1,
    }
    axes.annotate(
        end.label,
        (end.x, end.y),
        (LABEL_X, center),
        textcoords="axes fraction",
        arrowprops=line,
        color=darken_for_contrast(end.color, TEXT_CONTRAST),
        va="center",
        fontsize=CURVE_LABEL_SIZE,
    )


def fit_increasing(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the non-decreasing least-squares fit to `values` (isotonic regression).

    By the min-max formula, the fit at i is the maximum over a <= i of the minimum over b >= i of the mean of the values
    from a to b. `scipy.optimize` has this function, but importing it takes longer than drawing several figures.
    """
    number = len(values)
    fitted = []
    for place in range(number):
        smallest_means = []
        for start in range(place + 1):
            means = [values[start:end].mean() for end in range(place + 1, number + 1)]
            smallest_means.append(min(means))
        fitted.append(max(smallest_means))
    return np.array(fitted)


def _list_curve_ends(axes: Axes) -> list[CurveEnd]:
    """Return the ends of the labelled curves, from bottom to top."""
    ends = []
    for line in axes.lines:
        label = str(line.get_label())
        if label.startswith("_"):
            continue
        x, y = np.asarray(line.get_xydata())[-1]
        ends.append(CurveEnd(x, y, label, str(line.get_color())))
    ends.sort(key=lambda end: end.y)
    return ends


def text_width(text: str, size: float) -> float:
    """Return the width of a text in points."""
    font = FontProperties(size=size)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width)


def place_labels(
    axes: Axes, xy: npt.NDArray[np.float64], labels: Mapping[int, str], size: float
) -> npt.NDArray[np.float64]:
    """Return the centres of labels for some of the points of a map, in data coordinates.

    Labels are placed one after the other, at the candidate position with the lowest cost (see `_rate_candidates`).

    Args:
        axes: The axes of the map, with their final position and limits.
        xy: The coordinates of all points `[points, 2]`.
        labels: The labels by the indices of their points.
        size: The font size in points (1 / 72 inch).

    Returns:
        The centres `[labels, 2]`.
    """
    figure: Any = axes.figure
    pixels_per_point = figure.dpi / 72
    # The following positions and sizes are in pixels.
    points = axes.transData.transform(xy)
    bounds = axes.get_window_extent().get_points()
    offsets = OFFSETS * size * pixels_per_point
    sizes = pixels_per_point * _measure_labels(labels.values(), size)
    directions = np.sign(OFFSETS)
    centres = np.empty((len(labels), 2))
    for place, index in enumerate(labels):
        extent = sizes[place]
        half_width = extent[0] / 2
        # Labels to the left or right of a point are shifted by half their width.
        shifts = directions * [half_width, 0]
        candidates = points[index] + offsets + shifts
        costs = _rate_candidates(
            candidates,
            extent,
            points,
            bounds,
            earlier_centres=centres[:place],
            earlier_sizes=sizes[:place],
        )
        best = np.argmin(costs.round(6))
        centres[place] = candidates[best]
    to_data = axes.transData.inverted()
    return to_data.transform(centres)


def _rate_candidates(
    candidates: npt.NDArray[np.float64],
    extent: npt.NDArray[np.float64],
    points: npt.NDArray[np.float64],
    bounds: npt.NDArray[np.float64],
    earlier_centres: npt.NDArray[np.float64],
    earlier_sizes: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return the cost `[C]` of each of the C candidates for the centre of a label.

    The cost increases with the distance from the labelled point. It is higher for positions that cover points or
    earlier labels, or that extend beyond the axes.

    Args:
        candidates: The candidate centres `[C, 2]`, in the order of `OFFSETS`.
        extent: The width and the height of the label.
        points: All points of the map `[points, 2]`.
        bounds: The lower left and the upper right corner of the axes `[2, 2]`.
        earlier_centres: The centres of the labels that have been placed `[labels, 2]`.
        earlier_sizes: The widths and heights of these labels `[labels, 2]`.
    """
    covered = _count_covered_points(candidates, extent, points)
    overlap = _measure_overlap(candidates, extent, earlier_centres, earlier_sizes)
    outside = _find_outside(candidates, extent, bounds)
    costs: npt.NDArray[np.float64] = OFFSET_LENGTHS + COVERED_POINT_COST * covered
    costs += OVERLAP_COST * overlap
    costs += OUTSIDE_COST * outside
    return costs


def _measure_labels(labels: Iterable[str], size: float) -> npt.NDArray[np.float64]:
    """Return the width and height `[labels, 2]` of each label with a margin, in points (1 / 72 inch)."""
    extents = []
    for label in labels:
        width = text_width(label, size) + 2
        height = size + 2
        extents.append((width, height))
    return np.array(extents)


def _find_outside(
    candidates: npt.NDArray[np.float64],
    extent: npt.NDArray[np.float64],
    bounds: npt.NDArray[np.float64],
) -> npt.NDArray[np.bool_]:
    """Return a mask `[C]` of the candidate centres `[C, 2]` for which a label would extend beyond the bounds.

    `extent` `[2]` is the width and height of the label; `bounds` `[2, 2]` are the lower left and upper right corner.
    """
    low = candidates - extent / 2
    high = candidates + extent / 2
    lower_left, upper_right = bounds
    is_outside = (low < lower_left) | (high > upper_right)
    outside: npt.NDArray[np.bool_] = is_outside.any(axis=1)
    return outside


def _measure_overlap(
    candidates: npt.NDArray[np.float64],
    extent: npt.NDArray[np.float64],
    earlier_centres: npt.NDArray[np.float64],
    earlier_sizes: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return a label's total overlap with earlier labels, relative to the label's area, for C candidate centres `[C]`.

    `candidates` `[C, 2]` and `earlier_centres` `[labels, 2]` are positions; `extent` `[2]` and `earlier_sizes`
    `[labels, 2]` are widths and heights.
    """
    distances = np.abs(candidates[:, None] - earlier_centres)  # [C, labels, 2]
    gaps = distances - (earlier_sizes + extent) / 2  # negative along an axis on which the labels overlap
    overlaps = np.minimum(gaps, 0)
    areas = np.prod(overlaps, axis=-1)  # positive if both factors are negative; 0 for labels that do not overlap
    fractions: npt.NDArray[np.float64] = areas.sum(axis=1) / np.prod(extent)
    return fractions


def _count_covered_points(
    candidates: npt.NDArray[np.float64],
    extent: npt.NDArray[np.float64],
    points: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Return the number of points that a label would cover, for C candidate centres `[C]`.

    `candidates` `[C, 2]` and `points` `[points, 2]` are positions; `extent` `[2]` is the width and height of the label.
    """
    distances = np.abs(candidates[:, None] - points)  # [C, points, 2]
    is_covered = (distances < extent / 2).all(axis=-1)
    numbers: npt.NDArray[np.int64] = is_covered.sum(axis=1)
    return numbers


def spread_out(xy: npt.NDArray[np.float64], labels: Mapping[int, str], number: int) -> dict[int, str]:
    """Return at most `number` labels of points that are far from each other, by farthest-point sampling.

    The first chosen point is the one nearest to the centre. Each further point is the one whose distance to the nearest
    chosen point is largest. `labels` contains the labels by the indices of their points in `xy` `[points, 2]`.
    """
    indices = list(labels)
    points = xy[indices]
    distances_to_centre = _measure_squared_distances(points, points.mean(axis=0))
    chosen = [int(np.argmin(distances_to_centre))]
    distances_to_chosen = np.full(len(points), np.inf)
    while len(chosen) < min(number, len(points)):
        distances_to_last = _measure_squared_distances(points, points[chosen[-1]])
        distances_to_chosen = np.minimum(distances_to_chosen, distances_to_last)
        distances_to_chosen[chosen] = -1  # excludes the chosen points
        chosen.append(int(np.argmax(distances_to_chosen)))
    chosen_indices = [indices[place] for place in chosen]
    return {index: labels[index] for index in chosen_indices}


def _measure_squared_distances(
    points: npt.NDArray[np.float64],
    centre: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return the squared distance of each of the `points` `[points, 2]` from `centre` `[2]`."""
    distances: npt.NDArray[np.float64] = np.square(points - centre).sum(axis=1)
    return distances
