"""Figure style: sizes, fonts, colours with sufficient contrast, limits, label placement, and reproducible files."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, product
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

ONE_COLUMN = 3.3  # inches, as the following sizes
TWO_COLUMNS = 7.0
PAGE_HEIGHT = 9.5
AXIS_MARGIN = 1.1  # length of a map's axes, in multiples of the points' extent
CONTRAST = 3.0  # WCAG 2.2's minimum contrast to white for marks
TEXT_CONTRAST = 4.5  # WCAG 2.2's minimum contrast to white for text
ARIMO = ROOT / "files" / "Arimo[wght].ttf"  # same widths as Helvetica; embedded in PDFs as Type 42
LABEL_SIZE = 5  # points, for tokens
CURVE_LABEL_SIZE = 6  # points, for curves
LABEL_X = 1.06  # left end of curve labels, in panel widths
LINE_HEIGHT = 1.25  # in font sizes
MIN_EXTENT = 1e-3  # minimum extent of the points on a map, in units of the map
DISTANCES = (0.9, 1.7, 2.8, 4.2, 6.0)  # from a point to the centre of its label, in font sizes
ANGLES = np.pi * np.arange(12) / 6
OFFSETS = np.array([(r * np.cos(a), r * np.sin(a)) for r, a in product(DISTANCES, ANGLES)]).round(6)
# Costs of a label's position, relative to a displacement from its point by one font size.
COVERED_POINT_COST = 0.3  # for each covered point
OVERLAP_COST = 100  # for a label that other labels cover completely
OUTSIDE_COST = 1000  # for a label that extends beyond the axes
SVG_FONTS = "'Arimo', Helvetica, Arial, 'Liberation Sans'"  # fallbacks for viewers of an SVG without Arimo
JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"  # invisible, but affect the shape of adjacent letters
# Dates and program versions would make files irreproducible.
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
    """Configure matplotlib for papers within the context, for drawing and saving."""
    if fontManager.ttflist[0].fname != str(ARIMO):  # prefer the packaged font to an installed one
        fontManager.addfont(ARIMO)
        fontManager.ttflist.insert(0, fontManager.ttflist.pop())
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
    families = mpl.rcParams["font.family"]
    return _list_characters(tuple(families))


def find_fallback_fonts(texts: Iterable[str]) -> list[str]:
    """Return installed fonts for characters of `texts` missing in the style's fonts; warn of missing glyphs."""
    with paper_style():
        missing = set(filter(str.isprintable, chain.from_iterable(texts)))
        missing -= _find_available_characters()
    if not missing:
        return []
    known = {name: _list_characters((name,)) for name in _list_installed_fonts()}
    fonts: list[str] = []
    while missing and known:
        # Prefer the font with most of the missing characters; among equals, a sans-serif font like Arimo.
        best = max(known, key=lambda name: (len(missing & known[name]), "Sans" in name))
        if missing.isdisjoint(known[best]):
            break
        fonts.append(best)
        missing -= known[best]
    if missing:
        examples = []
        for character in sorted(missing)[:10]:
            examples.append(f"{character} (U+{ord(character):04X})")
        logging.warning(
            "no installed font has %d of the characters, such as %s; figures show their code points instead",
            len(missing),
            ", ".join(examples),
        )
    return fonts


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
    """Replace characters missing in the figures' fonts by their code points, `<U+1F600>`."""
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
    """Save a figure reproducibly as `path` with each format's suffix; call within `paper_style`.

    `dpi` is the resolution of PNG files, and of images in other formats; the default is the style's resolution.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in formats:
        saved = path.with_suffix(f".{suffix}")
        figure.savefig(saved, dpi=dpi, metadata=METADATA[suffix])
        if suffix == "svg":
            text = saved.read_text(encoding="utf-8")
            text = text.replace("font-family: 'Arimo'", f"font-family: {SVG_FONTS}")
            saved.write_text(text, encoding="utf-8")


def contrast_to_white(color: Any) -> float:
    """Return the WCAG 2.2 contrast ratio of a colour to white, from 1 to 21."""
    linear = []
    for part in to_rgb(color):
        if part <= 0.04045:
            linear.append(part / 12.92)
        else:
            linear.append(((part + 0.055) / 1.055) ** 2.4)
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
    """Return the part of a colour map with sufficient contrast to white."""
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
    """Return legend entries for `marks`."""
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
    """Set limits around the points `[vectors, 2]`, with the same scale on both axes."""
    low = xy.min(axis=0)
    high = xy.max(axis=0)
    figure: Any = axes.figure
    inches = np.array(axes.get_position().size) * figure.get_size_inches()
    extent = np.maximum(high - low, MIN_EXTENT)
    units_per_inch = (extent / inches).max()
    half = inches * units_per_inch * AXIS_MARGIN / 2
    middle = (low + high) / 2
    left, bottom = middle - half
    right, top = middle + half
    axes.set(xlim=(left, right), ylim=(bottom, top))


def label_curves(axes: Axes) -> None:
    """Write the label of each labelled curve to the right of the panel, close to its end and without overlap.

    The panel must have its final position and limits.
    """
    ends = _list_curve_ends(axes)
    if not ends:
        return
    figure: Any = axes.figure
    bottom, top = axes.get_ylim()
    panel_height = axes.get_position().height * figure.get_figheight() * 72
    wanted = np.array([(end.y - bottom) / (top - bottom) for end in ends])
    lines = np.array([end.label.count("\n") + 1 for end in ends])
    heights = lines * CURVE_LABEL_SIZE * LINE_HEIGHT / panel_height
    # In fractions of the panel's height, `wanted` contains the ends of the curves, and `stacked` the centres that the
    # labels would have if stacked from the bottom without gaps. Isotonic regression minimises the squared displacement.
    stacked = np.cumsum(heights) - heights / 2
    displacements = fit_increasing(wanted - stacked)
    free_height = max(0.0, 1 - heights.sum())
    bottoms = np.clip(displacements, 0, free_height)
    for end, center in zip(ends, bottoms + stacked, strict=True):
        arrow: Any = {
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
            arrowprops=arrow,
            color=darken_for_contrast(end.color, TEXT_CONTRAST),
            va="center",
            fontsize=CURVE_LABEL_SIZE,
        )


def fit_increasing(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the non-decreasing least-squares fit to `values` (isotonic regression, min-max formula).

    `scipy.optimize` has this function, but its import takes longer than drawing several figures.
    """
    number = len(values)
    fitted = []
    for place in range(number):
        lower_bounds = []
        for start in range(place + 1):
            means = [values[start:end].mean() for end in range(place + 1, number + 1)]
            lower_bounds.append(min(means))
        fitted.append(max(lower_bounds))
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
    """Return the centres `[labels, 2]` of labels for some of the points `xy` `[points, 2]`, in data coordinates.

    `labels` maps a point's index to its label. Labels are placed one by one near their points, within the axes, without
    overlap of earlier labels, and covering as few points as possible.
    """
    figure: Any = axes.figure
    pixels = figure.dpi / 72  # per typographic point
    points = axes.transData.transform(xy)
    bounds = axes.get_window_extent().get_points()
    offsets = OFFSETS * size * pixels
    directions = np.sign(OFFSETS)
    distances = np.hypot(OFFSETS[:, 0], OFFSETS[:, 1])
    sizes = pixels * _measure_labels(labels.values(), size)
    centres = np.empty((len(labels), 2))
    for place, index in enumerate(labels):
        extent = sizes[place]
        half_width = extent[0] / 2
        # Labels to the left or right of a point are shifted by half their width.
        shifts = directions * [half_width, 0]
        candidates = points[index] + offsets + shifts
        covered = _count_covered_points(candidates, extent, points)
        overlap = _measure_overlap(
            candidates,
            extent,
            centres[:place],
            sizes[:place],
        )
        outside = _find_outside(candidates, extent, bounds)
        costs = distances + COVERED_POINT_COST * covered
        costs += OVERLAP_COST * overlap
        costs += OUTSIDE_COST * outside
        best = np.argmin(costs.round(6))
        centres[place] = candidates[best]
    to_data = axes.transData.inverted()
    return to_data.transform(centres)


def _measure_labels(labels: Iterable[str], size: float) -> npt.NDArray[np.float64]:
    """Return the width and height `[labels, 2]` of each label with a margin, in points."""
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
    """Return a mask `[C]` of the candidate centres `[C, 2]` with labels that extend beyond the bounds."""
    low = candidates - extent / 2
    high = candidates + extent / 2
    is_outside = (low < bounds[0]) | (high > bounds[1])
    outside: npt.NDArray[np.bool_] = is_outside.any(axis=1)
    return outside


def _measure_overlap(
    candidates: npt.NDArray[np.float64],
    extent: npt.NDArray[np.float64],
    centres: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return the overlap `[C]` of each candidate with earlier labels, as a fraction of the label's area."""
    distances = np.abs(candidates[:, None] - centres)
    gaps = distances - (sizes + extent) / 2
    overlaps = np.minimum(gaps, 0)
    areas = np.prod(overlaps, axis=-1)
    fractions: npt.NDArray[np.float64] = areas.sum(axis=1) / np.prod(extent)
    return fractions


def _count_covered_points(
    candidates: npt.NDArray[np.float64],
    extent: npt.NDArray[np.float64],
    points: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Return the number of points behind the label at each candidate centre `[C]`."""
    distances = np.abs(candidates[:, None] - points)
    is_covered = (distances < extent / 2).all(axis=-1)
    numbers: npt.NDArray[np.int64] = is_covered.sum(axis=1)
    return numbers


def spread_out(xy: npt.NDArray[np.float64], labels: Mapping[int, str], number: int) -> dict[int, str]:
    """Return at most `number` labels by farthest-point sampling, starting near the centre."""
    indices = list(labels)
    points = xy[indices]
    distances_to_centre = _measure_squared_distances(points, points.mean(axis=0))
    chosen = [int(np.argmin(distances_to_centre))]
    distances_to_chosen = np.full(len(points), np.inf)
    while len(chosen) < min(number, len(points)):
        distances_to_last = _measure_squared_distances(points, points[chosen[-1]])
        distances_to_chosen = np.minimum(distances_to_chosen, distances_to_last)
        distances_to_chosen[chosen] = -1
        chosen.append(int(np.argmax(distances_to_chosen)))
    return {indices[place]: labels[indices[place]] for place in chosen}


def _measure_squared_distances(
    points: npt.NDArray[np.float64],
    centre: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    distances: npt.NDArray[np.float64] = np.square(points - centre).sum(axis=1)
    return distances
