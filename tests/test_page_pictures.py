"""Saved and printed pictures are complete and look as they do on the screen, even if other programs render them."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pypdfium2
import pytest
from browser import LOOKS, Opened, browser
from colours import distance, lab, linear, shade
from page_pictures import SVG, ZOOM, Label, Picture, as_array, as_colour, difference, in_pixels
from page_run import choose, tokens
from pypdfium2 import raw
from scipy import signal

from attnmix.core.store.runs import Run

TOKEN = 14  # index of a token with a short name in the first text
LAYER = 2
TOOK, GAVE, MARK = (as_colour(colour) for colour in ("#b34a00", "#005b3a", "#be2367"))
# Largest allowed share of squares that differ: in the browser, and in other programs (which smooth edges and small
# images differently).
ALIKE, NEARLY_ALIKE = 0.01, 0.03
WHITE = (255, 255, 255)
POINTS_BY_PIXEL = 0.75  # size of a CSS pixel in print
READABLE = 7  # the smallest readable font size on paper, in points
SHOW_AS_SAVED = "(pane) => { pane.classList.add('paper'); document.getElementById('bar').style.display = 'none'; }"


WITH_PNG = ("text", "heads", "layers-chart")
"""Panes with a checked PNG. All PNGs are generated from SVGs in the same way."""
ARE_DRAWN = """() => document.getAnimations().length === 0 &&
  [...document.querySelectorAll("#heads-all canvas")].every((each) => each.width !== 300)"""
"""JavaScript condition for a page without animations; a canvas has a width of 300 pixels until it is painted."""


class Saved(NamedTuple):
    """The files saved from a view, and the pixels of the view on the screen."""

    picture: Picture
    png: npt.NDArray[np.int16] | None
    shown: npt.NDArray[np.int16]
    rows: list[dict[str, str]]


def unfold(shown: Opened) -> Opened:
    """Expand all sections, and select the text test/0, a layer and a token."""
    page = shown.page
    choose(page, "document", "0")
    choose(page, "layer", str(LAYER))
    page.locator(f"#token-{TOKEN}").click()
    for summary in page.locator(".fold > summary").all():
        summary.click()
    # Wait until the small pictures of heads are drawn and colour transitions have ended.
    page.wait_for_function(ARE_DRAWN)
    return shown


def panes(page: Any) -> list[str]:
    """Return the IDs of the page's parts that can be saved as files."""
    names = page.locator(".pane").evaluate_all("all => all.map(each => each.id)")
    return [str(name) for name in names]


def save_all(opened: Opened) -> dict[str, Saved]:
    """Save all views that have pictures, and return them by the IDs of their panes."""
    unfold(opened)
    page, views = opened.page, {}
    for pane in panes(page):
        _, svg = opened.file(pane, "SVG")
        png = None
        if pane in WITH_PNG:
            _, content = opened.file(pane, "PNG")
            png = as_array(content)
        rows = opened.values(pane)
        locator = page.locator(f"#{pane}")
        locator.evaluate(SHOW_AS_SAVED)
        views[pane] = Saved(Picture(svg), png, as_array(locator.screenshot()), rows)
        locator.evaluate("pane => pane.classList.remove('paper')")
    # Every button that saves a picture was used.
    for kind in ("SVG", "PNG"):
        assert page.get_by_role("button", name=kind, exact=True).count() == len(views)
    return views


@pytest.fixture(scope="module")
def saved(run: Path, other_tab: Opened) -> dict[str, Saved]:
    return save_all(other_tab.open(Run(run).page, **LOOKS))


@pytest.mark.long
def test_firefox_pictures_match_screen(run: Path) -> None:
    with browser("firefox") as firefox:
        opened = Opened(firefox, Run(run).page, viewport={"width": 1400, "height": 900})
        saved = save_all(opened)
        opened.close()
    test_pictures_are_complete_plain_svg(saved)
    test_pictures_match_screen(saved)
    test_texts_do_not_overlap_in_wider_font(saved)
    for chart in CHARTS:
        test_curves_match_data_and_legend_colours(saved, chart)


CHARTS = ("answer-chart", "layers-chart", "probes")


def test_pictures_are_complete_plain_svg(saved: dict[str, Saved]) -> None:
    assert {*CHARTS, "text", "heads", "weights", "steps-of-weight", "map-pane"} <= set(saved)
    for pane, view in saved.items():
        picture = view.picture
        names = {element.tag.rpartition("}")[2] for element in picture.root.iter()}
        assert names <= {
            *{"svg", "title", "defs", "g", "clipPath", "linearGradient", "stop"},
            *{"rect", "line", "path", "circle", "text", "tspan", "image"},
        }, pane
        assert not re.search(r"var\(|class=|style=|<style", picture.text), pane
        assert all(label.colour.startswith("#") for label in picture.labels), pane
        for pixels in (picture.pixels,) if view.png is None else (picture.pixels, view.png):
            assert pixels.shape[:2] == pytest.approx((2 * picture.height, 2 * picture.width), abs=2), pane
            edges = [pixels[:8], pixels[-8:], pixels[:, :8], pixels[:, -8:]]
            assert all((edge == WHITE).all() for edge in edges), f"{pane} is cropped"


def test_pictures_match_screen(saved: dict[str, Saved]) -> None:
    for pane, view in saved.items():
        picture = view.picture
        screen = view.shown.repeat(ZOOM, axis=0).repeat(ZOOM, axis=1)
        top, left = round(-ZOOM * picture.top), round(-ZOOM * picture.left)
        pixels = picture.pixels if view.png is None else view.png
        height = min(screen.shape[0], pixels.shape[0] - top)
        width = min(screen.shape[1], pixels.shape[1] - left)
        part = pixels[top : top + height, left : left + width]
        assert difference(part, screen[:height, :width]) < (NEARLY_ALIKE if view.png is None else ALIKE), pane
        if view.png is not None:
            assert difference(view.png, picture.pixels) < NEARLY_ALIKE, pane


def axis(labels: list[Label], values: dict[str, float], coordinate: str) -> tuple[float, float]:
    """Return the slope and offset of an axis, fitted to the positions of labels whose texts are keys of `values`."""
    labels = [label for label in labels if label.text in values]
    known = [values[label.text] for label in labels]
    slope, start = np.polyfit(known, [getattr(label, coordinate) for label in labels], 1)
    return float(slope), float(start)


def as_number(text: str) -> float | None:
    """Return the value of a number or percentage, or None for other texts."""
    plain = re.fullmatch(r"(-?[\d.]+)(%?)", text)
    if plain is None:
        return None
    number, percent = plain.groups()
    return float(number) / 100 if percent else float(number)


WIDER = 1.2  # width of text in a different font, relative to its width in the browser
TOUCHING = 6  # pixels by which two long tokens may overlap
SPACED = 1.13  # width of text with letter spacing, relative to that without


class Extent(NamedTuple):
    """The baseline and the ends of a horizontal text in a wider font."""

    baseline: float
    left: float
    right: float
    text: str


def extents(picture: Picture) -> list[Extent]:
    """Return the extents of all horizontal texts, sorted by baseline and left end."""
    found = []
    for element in picture.elements("text"):
        if "rotate" in element.get("transform", ""):
            continue
        width = float(element.get("textLength", 0)) * WIDER
        if element.get("lengthAdjust") == "spacing":
            width /= SPACED
        x, anchor = in_pixels(element.get("x", "0")), element.get("text-anchor", "start")
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        text = "".join(element.itertext())
        found.append(Extent(in_pixels(element.get("y", "0")), left, left + width, text))
    return sorted(found)


def test_texts_do_not_overlap_in_wider_font(saved: dict[str, Saved]) -> None:
    for pane in ("grid", "text", "weights", "steps-of-weight"):  # other panes have groups with their own coordinates
        picture = saved[pane].picture
        texts = extents(picture)
        assert texts, pane
        for one, after in pairwise(texts):
            assert one.baseline != after.baseline or one.right < after.left + TOUCHING, (pane, one.text, after.text)
        assert all(each.right < picture.left + picture.width for each in texts), pane
        assert all(element.get("lengthAdjust") for element in picture.elements("text")), pane


def test_scale_bars_do_not_cover_texts(saved: dict[str, Saved]) -> None:
    for pane in ("grid", "text"):
        picture = saved[pane].picture
        # The scale bar is the first box that is filled with a gradient; its position is that of the group around it.
        group, bar = next(
            (group, child)
            for group in picture.elements("g")
            for child in group.findall(f"{SVG}rect")
            if child.get("fill", "").startswith("url")
        )
        moved = re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", group.get("transform", ""))
        assert moved
        start, top = float(moved[1]), float(moved[2])
        end = start + in_pixels(bar.get("width", "0"))
        bottom = top + 2 * in_pixels(bar.get("height", "0"))
        beside = [each for each in extents(picture) if top < each.baseline < bottom]
        ends = [each.text for each in beside if abs(each.right - start) < 12 or abs(each.left - start - 112) < 12]
        assert any(text.startswith("0%") for text in ends), pane  # both ends have a number
        assert any(text.startswith("100%") for text in ends), pane
        for each in beside:
            assert each.right < start or each.left > end, (pane, each.text)


def test_sentence_with_terms_is_one_text(saved: dict[str, Saved]) -> None:
    lines = ["".join(element.itertext()) for element in saved["grid"].picture.elements("text")]
    assert any("own share, by exchange; one scale for all" in line for line in lines)
    assert all(element.text is None for element in saved["grid"].picture.elements("text") if len(element))


@pytest.mark.parametrize("chart", CHARTS)
def test_curves_match_data_and_legend_colours(saved: dict[str, Saved], chart: str) -> None:
    picture, rows = saved[chart].picture, saved[chart].rows
    place, *columns = rows[0]
    names = [name for name in columns if not re.search(r", 95% (from|to)$", name)]
    # Both axes are fitted to the positions of their numbers.
    ticks = [label for label in picture.labels if not label.bold]
    scale = [label for label in ticks if label.anchor == "end" and as_number(label.text) is not None]
    slope, start = axis(scale, {label.text: as_number(label.text) or 0.0 for label in scale}, "y")
    below = [label for label in ticks if label.anchor == "middle"]
    step, first = axis(below, {row[place]: n for n, row in enumerate(rows)}, "x")
    legend = legend_colours(picture, names)
    # Compute the expected heights of all curves at 40 positions between two layers.
    x = np.linspace(0, len(rows) - 1, 40 * (len(rows) - 1))
    low, high = sorted([min(label.y for label in scale), max(label.y for label in scale)])
    curves = {}
    for name in names:
        values = np.array([float(row[name] or "nan") for row in rows])
        curves[name] = np.clip(slope * np.interp(x, np.arange(len(rows)), values) + start, low, high)
    compared = 0
    for name, y in curves.items():
        others = [other for each, other in curves.items() if each != name]
        is_apart = np.all([np.abs(other - y) > 5 for other in others], axis=0) & np.isfinite(y)
        if is_apart.sum() < 10:
            continue  # covered by another curve
        places = [(step * x[n] + first, y[n]) for n in np.flatnonzero(is_apart)]
        # Smoothing changes each colour component (0 to 255) by less than 60.
        hits = [picture.distance(*each, as_colour(legend[name])) < 60 for each in places]
        assert np.mean(hits) > 0.5, name  # less than 1, because dotted lines have gaps
        # Pixels next to the curve have a different colour.
        beside = [picture.distance(left, y - 4, as_colour(legend[name]), 0.5) < 60 for left, y in places]
        assert np.mean(beside) < 0.2, name
        compared += 1
    assert compared >= 1


def legend_colours(picture: Picture, names: list[str]) -> dict[str, str]:
    """Return the colour of each name in a chart's legend; a name may be divided into several lines."""
    bold = [label for label in picture.labels if label.bold]
    colours = {}
    for name in names:
        for n, label in enumerate(bold):
            text, end = label.text, n + 1
            while end < len(bold) and text != name and bold[end].colour == label.colour:
                separator = " " if name.startswith(f"{text} ") else ""
                text += separator + bold[end].text
                end += 1
            if text == name:
                colours[name] = label.colour
                break
    assert set(colours) == set(names)
    return colours


def test_selected_layer_band_surrounds_its_label(saved: dict[str, Saved]) -> None:
    for chart in CHARTS:
        picture = saved[chart].picture
        ticks = {label.text: label for label in picture.labels if label.anchor == "middle"}
        grey = (np.abs(picture.pixels - np.array((239, 239, 240))).max(axis=-1) <= 1).sum(axis=0)
        columns = np.flatnonzero(grey > 80) / ZOOM + picture.left
        assert (columns.min() + columns.max()) / 2 == pytest.approx(ticks[str(LAYER)].x, abs=2)
        # Pixels at the edges of the band are blended with their neighbours.
        assert columns.max() - columns.min() == pytest.approx(ticks["3"].x - ticks["2"].x, abs=3)


def test_tokens_are_underlined_and_overlined(saved: dict[str, Saved]) -> None:
    picture, rows = saved["text"].picture, saved["text"].rows
    for column, colour in (("contributed to the selected token", TOOK), ("received from it", GAVE)):
        linked = [row for row in rows if row[column]]
        assert len(linked) >= 2
        lines = [each for each in picture.elements("line") if as_colour(each.get("stroke")) == colour]
        assert len(lines) > len(linked)  # the legend also has one
        for line in lines:
            x, y = (float(line.get("x1")) + float(line.get("x2"))) / 2, float(line.get("y1"))
            assert picture.distance(x, y, colour, 0.5) < 60
    words = "".join(label.text for label in picture.labels).replace(" ", "")
    assert all(re.sub(r"\s", "", row["token"]).lstrip("#") in words for row in rows)
    (chosen,) = (each for each in picture.elements("rect") if each.get("stroke") == "#be2367")
    assert picture.distance(float(chosen.get("x")), float(chosen.get("y")) + 10, MARK, 0.5) < 60


def test_layer_picture_has_one_box_per_cell(saved: dict[str, Saved]) -> None:
    picture, rows = saved["grid"].picture, saved["grid"].rows
    fills = {box: group.get("fill") for group in picture.elements("g") for box in group if box.tag == f"{SVG}rect"}
    boxes = [box for box, fill in fills.items() if fill and not {"fill", "rx"} & set(box.keys())]
    assert len(boxes) > len(rows)  # the input also has boxes
    assert picture.elements("image") == []
    # Each model has a block of rows, with the last layer at the top and the input at the bottom.
    heights = sorted({float(each.get("y")) for each in boxes if float(each.get("height")) > 2})
    models = list(dict.fromkeys(row["model"] for row in rows))
    layers = max(int(row["layer"]) for row in rows)
    assert len(heights) == len(models) * (layers + 1)
    share = next(name for name in rows[0] if name.startswith("own share"))
    for block, model in enumerate(models):
        for layer in range(1, layers + 1):
            rows_of_layer = [row for row in rows if row["model"] == model and int(row["layer"]) == layer and row[share]]
            height = heights[block * (layers + 1) + layers - layer]
            row_boxes = [box for box in boxes if box.get("y") == f"{height:g}"]
            row_boxes = sorted(row_boxes, key=lambda box: float(box.get("x")))
            assert len(row_boxes) == len(rows_of_layer)
            for box, row in zip(row_boxes, rows_of_layer, strict=True):
                colour = lab(linear(fills[box]))
                assert distance(colour, shade(float(row[share]))) < 2


def test_head_lines_match_weights(saved: dict[str, Saved]) -> None:
    picture, rows = saved["heads"].picture, saved["heads"].rows
    paths = picture.elements("path")
    assert len(paths) >= 10
    largest = max(rows, key=lambda row: float(row["attention weight"]))
    i, j = int(largest["position"]), int(largest["attends to position"])

    def find_label(heading: str, anchor: str, position: int) -> Label:
        """Return the label of a token in the column below a heading."""
        title = next(label for label in picture.labels if label.text == heading)
        column = [label for label in picture.labels if label.anchor == anchor and label.x == title.x]
        return next(label for label in column if label.text.endswith(f" {position}"))

    start = find_label("this token", "end", i)
    end = find_label("attends to", "start", j)
    x = (start.x + end.x) / 2
    y = (start.y + end.y) / 2
    colour = TOOK if i == TOKEN else as_colour("#0060a0")
    assert picture.distance(x, y, colour, 2) < 60
    left, right = (round(ZOOM * (label.x - picture.left)) for label in (start, end))
    between = picture.pixels[round(ZOOM * (20 - picture.top)) :, left + 20 : right - 20]
    assert (between.min(axis=-1) < 128).mean() < 0.3  # lines are thin
    assert len(picture.elements("image")) == 1 + 3 * 4  # the matrix, and the small matrices of all heads


def test_matrix_squares_match_weights(saved: dict[str, Saved], run: Path) -> None:
    picture, rows = saved["heads"].picture, saved["heads"].rows
    matrix = picture.elements("image")[0]
    x, y, width, height = (float(matrix.get(name)) for name in ("x", "y", "width", "height"))
    length = len(tokens().query("document == 'test/0'"))
    assert width == pytest.approx(height, rel=0.01)
    largest = max(rows, key=lambda row: float(row["attention weight"]))
    for row in (largest, rows[len(rows) // 2], rows[-1]):
        i, j = int(row["position"]), int(row["attends to position"])
        shade = np.sqrt(float(row["attention weight"]))  # every head has the full colour at a weight of 1
        expected = 255 + shade * (np.array((0, 0x60, 0xA0)) - 255)
        middle = x + width * (j + 0.5) / length, y + height * (i + 0.5) / length
        red, green, blue = expected.round().astype(int).tolist()
        assert picture.distance(*middle, (red, green, blue), 0.5) < 8


def test_map_dots_and_names_are_shapes(saved: dict[str, Saved]) -> None:
    picture, rows = saved["map-pane"].picture, saved["map-pane"].rows
    assert picture.elements("image") == []
    dots = [each for each in picture.elements("circle") if each.get("fill") != "none"]
    assert 20 < len(dots) <= len(rows)
    rings = [each for each in picture.elements("circle") if each.get("stroke") == "#be2367"]
    assert len(rings) == 1
    assert sum(label.colour == "#be2367" for label in picture.labels) == 1


def test_saved_pictures_do_not_depend_on_theme_and_scrolling(run: Path, tab: Any, saved: dict[str, Saved]) -> None:
    dark = unfold(tab(Run(run).page, color_scheme="dark"))
    background = dark.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background != "rgb(255, 255, 255)"
    words = dark.page.locator("#words")
    for pane, each in saved.items():
        words.evaluate("words => { words.style.maxHeight = '4rem'; words.scrollTop = 40 }")
        place = dark.page.evaluate("[scrollY, document.getElementById('words').scrollTop]")
        assert place[1] == 40
        words.evaluate("words => { words.style.maxHeight = '' }")
        _, content = dark.file(pane, "SVG")
        assert content.decode("utf-8") == each.picture.text, pane
    assert dark.page.evaluate("getComputedStyle(document.body).backgroundColor") == background
    assert dark.page.locator(".paper").count() == 0


WIDE_FONT = "*, svg, svg * { font-family: 'DejaVu Serif', serif !important; }"
FIND_CLIPPED = """() => [...document.querySelectorAll("#answer :is(h1, h3, li, p, b, span, label, button, bdi)")]
  .filter((each) => each.checkVisibility() && each.closest(".unseen, [role=tooltip]") === null)
  .filter((each) => each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0)
  .map((each) => each.outerHTML.slice(0, 120))"""
"""Script that returns the elements of `#answer` whose text is wider than their box."""
FIND_OVERLAPS = """() => {
  const texts = [...document.querySelectorAll("#grid .levels :is(b, span), #margin text")]
    .filter((each) => each.textContent.trim() && each.checkVisibility());
  const boxes = texts.map((each) => {
    const range = document.createRange();
    range.selectNodeContents(each);
    return range.getBoundingClientRect();
  });
  const overlap = (one, other) => Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1 &&
    Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 3;
  const found = [];
  for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++)
    if (overlap(boxes[i], boxes[j])) found.push(`${texts[i].textContent} | ${texts[j].textContent}`);
  return { found, texts: texts.length };
}"""
"""Script that returns pairs of overlapping texts next to the cells; heights include space around letters."""


@pytest.mark.parametrize("width", [1280, 390])
def test_wide_font_fits_headline_picture(run: Path, tab: Any, width: int) -> None:
    shown = tab(Run(run).page, width=width)
    shown.page.add_style_tag(content=WIDE_FONT)
    shown.page.wait_for_function(ARE_DRAWN)
    assert shown.page.evaluate(FIND_CLIPPED) == []
    overlaps = shown.page.evaluate(FIND_OVERLAPS)
    assert overlaps["texts"] > 6
    assert overlaps["found"] == []


class PrintedText(NamedTuple):
    """A text on a PDF page, its bounds (left, bottom, right, top) and its font size, in points."""

    text: str
    bounds: tuple[float, float, float, float]
    size: float


class Printed:
    """A page of a PDF file, with its texts and their font sizes."""

    ZOOM = 200 / 72  # pixels per point

    def __init__(self, page: Any) -> None:
        self.page = page
        self.height = page.get_height()
        textpage = page.get_textpage()
        self.texts = []
        for each in page.get_objects(filter=[raw.FPDF_PAGEOBJ_TEXT], textpage=textpage):
            size = each.get_font_size() * np.hypot(each.get_matrix().c, each.get_matrix().d)
            self.texts.append(PrintedText(each.extract().strip(), each.get_bounds(), size))
        self.text = textpage.get_text_range()

    def pixels(self, zoom: float = ZOOM) -> npt.NDArray[np.int16]:
        return np.asarray(self.page.render(scale=zoom).to_pil().convert("RGB"), dtype=np.int16)


@pytest.mark.parametrize(("scheme", "width"), [pytest.param("light", 1400, marks=pytest.mark.long), ("dark", 400)])
def test_printed_charts_and_map_match_screen(run: Path, tab: Any, scheme: str, width: int) -> None:
    shown = unfold(tab(Run(run).page, color_scheme=scheme, width=width))
    screen = shown.page.locator("#layers-chart svg.chart").evaluate("chart => chart.outerHTML")
    places = shown.drawn()["pixels"]
    content = shown.page.pdf(format="A4", prefer_css_page_size=True)
    assert shown.page.locator("#layers-chart svg.chart").evaluate("chart => chart.outerHTML") == screen
    assert shown.drawn()["pixels"] == places
    pages = [Printed(page) for page in pypdfium2.PdfDocument(content)]
    assert [each.text for page in pages for each in page.texts if each.text and each.size < READABLE] == []
    charts = [page for page in pages if "Own share of a token's vector, by layer" in page.text]
    assert_band_surrounds_label(charts[0])
    assert all((np.median(page.pixels(0.5), axis=(0, 1)) == 255).all() for page in pages)  # on white paper
    assert_ring_is_round(next(page for page in pages if "Nearest to" in page.text))


# The map is taller in a narrow window, and needs one more page in print.
@pytest.mark.parametrize(("width", "most_pages"), [(1400, 5), pytest.param(400, 6, marks=pytest.mark.long)])
def test_page_prints_on_few_pages(opened: Opened, run: Path, tab: Any, width: int, most_pages: int) -> None:
    shown = opened if width == 1400 else tab(Run(run).page, width=width)
    shown.page.locator(f"#token-{TOKEN}").click()
    content = shown.page.pdf(format="A4", prefer_css_page_size=True)
    pages = [Printed(page) for page in pypdfium2.PdfDocument(content)]
    assert len(pages) <= most_pages
    text = "".join(page.text for page in pages)
    for title in ("Text and heads", "Heads: Layer", "Layers", "Map", "Evidence", "Versions"):
        assert title in text, title
    words = " ".join(text.split())
    for caution in ("one fine-tuning seed", "is not a causal effect", "Only two principal components are shown"):
        assert caution in words, caution
    # The overview of heads and the matrix are not printed, because they repeat the lines of a head.
    assert "All heads" not in text
    assert "its rows attend" not in text


def assert_band_surrounds_label(page: Printed) -> None:
    """Assert that the band in the first chart of a page is centred on the label of the chosen layer."""
    grey = np.abs(page.pixels() - np.array((239, 239, 240))).max(axis=-1) <= 1
    columns = np.flatnonzero(grey.sum(axis=0) > 100)
    rows = np.flatnonzero(grey.sum(axis=1) > 100)
    bottom = page.height - rows.max() / page.ZOOM
    left, right = columns.min() / page.ZOOM, columns.max() / page.ZOOM
    labels = {}  # horizontal positions of the numbers of layers, less than 30 points below the band
    for each in page.texts:
        text_left, text_bottom, text_right, _ = each.bounds
        if each.text in ("1", "2", "3") and 0 < bottom - text_bottom < 30:
            labels[each.text] = (text_left + text_right) / 2
    assert (left + right) / 2 == pytest.approx(labels[str(LAYER)], abs=2)
    assert right - left == pytest.approx(labels["3"] - labels["2"], abs=2)


def assert_ring_is_round(page: Printed) -> None:
    """Assert that the ring around the selected token is a circle, even if the name in the same colour touches it."""
    marked = (np.abs(page.pixels() - np.array(MARK)).max(axis=-1) < 40).astype(float)
    radius = 8.5 * POINTS_BY_PIXEL * page.ZOOM
    fits = {}
    for across, along in ((1, 1), (1.2, 1), (1, 1.2)):  # factors of both radii
        angles = np.linspace(0, 2 * np.pi, 120, endpoint=False)
        width, height = int(across * radius) + 2, int(along * radius) + 2
        outline = np.zeros((2 * height + 1, 2 * width + 1))
        columns = width + np.rint(across * radius * np.cos(angles)).astype(int)
        outline[height + np.rint(along * radius * np.sin(angles)).astype(int), columns] = 1
        fits[across, along] = signal.fftconvolve(marked, outline / outline.sum(), mode="valid").max()
    assert fits.pop((1, 1)) > 0.95
    assert max(fits.values()) < 0.8
