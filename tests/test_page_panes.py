"""What can be done in each pane and taken from it: clicks, sliders, tables, files; and all of it for everyone."""

from __future__ import annotations

import base64
import csv
import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import Opened, violations
from page_run import HOSTILE, choose, next_frames, open_values, tokens
from PIL import Image

from attnmix.page.arrays import visible
from attnmix.store.runs import Run

# The name and content that a pane gives to be saved: Playwright hears of no download in Firefox.
CATCH = """() => { window.files = []; const create = URL.createObjectURL, click = HTMLAnchorElement.prototype.click;
    let last = null; URL.createObjectURL = blob => create.call(URL, last = blob);
    HTMLAnchorElement.prototype.click = function () { window.files.push([this.download, last]); click.call(this); };
}"""
CAUGHT = """async () => { const [name, blob] = window.files.pop();
    const bytes = new Uint8Array(await blob.arrayBuffer());
    return [name, btoa(Array.from(bytes, each => String.fromCharCode(each)).join(""))]; }"""
MAX_ENDS = 24  # on each side of a head's lines, of a longer text
MIN_TARGET = 24  # CSS pixels, WCAG 2.5.8
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def page(opened: Opened) -> Any:
    """The page at layer 2 with a selected token; it keeps the files that panes give."""
    opened.page.evaluate(CATCH)
    choose(opened.page, "layer", "2")
    opened.page.locator("#token-3").click()
    opened.page.mouse.move(0, 0)
    return opened.page


def show_pane(page: Any, pane: str) -> Any:
    """Return the pane, drawn in the middle of the screen."""
    page.evaluate("id => document.getElementById(id).scrollIntoView({ block: 'center' })", pane)
    page.wait_for_selector(f"#{pane}:not([data-stale]):not([data-moving])")
    next_frames(page)
    return page.locator(f"#{pane}")


def save(page: Any, pane: str, kind: str) -> tuple[str, bytes]:
    """Return name and content of a pane's file."""
    page.get_by_role("button", name=f"{kind} of {pane.removesuffix('-chart')}", exact=True).click()
    page.wait_for_function("() => window.files.length > 0")
    name, content = page.evaluate(CAUGHT)
    return name, base64.b64decode(content)


def test_clicks_and_the_slider_choose_layer_and_ratio(page: Any) -> None:
    show_pane(page, "overview")
    page.locator("#overview-chart [data-layer='1']").first.click()
    assert page.locator("#layer").input_value() == "1"
    words = page.locator("#words span")
    shades = "all => all.map(each => getComputedStyle(each).backgroundColor)"
    before = words.evaluate_all(shades)
    page.locator("#depth").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#layer").input_value() == "2"
    assert words.evaluate_all(shades) != before
    show_pane(page, "mixing-chart")
    page.locator("#mixing-chart [data-method=attn_n][data-layer='3']").click()
    assert page.locator("#ratio-method").input_value() == "attn_n"
    assert page.locator("#layer").input_value() == "3"


def test_strongest_ends_of_a_tokens_lines_stand_together_in_a_long_text(page: Any) -> None:
    longest = tokens()["document"].value_counts().idxmax()
    rows = tokens().query("document == @longest")
    choose(page, "document", str(list(tokens()["document"].unique()).index(longest)))
    show_pane(page, "heads-lines").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    last = len(rows) - 2
    page.wait_for_selector(f"#token-{rows.index[last]}[aria-selected=true]")
    show_pane(page, "heads-lines")
    note = f"Of {len(rows)} tokens the strongest stand on each side, {MAX_ENDS} at most."
    assert note in page.locator("#heads-said").inner_text()
    _, *lines = csv.reader(io.StringIO(save(page, "heads-lines", "csv")[1].decode()))
    weights = {int(source): float(weight) for i, _, source, _, weight in lines if int(i) == last}
    ends = sorted(sorted(weights, key=lambda source: (source != last, -weights[source]))[:MAX_ENDS])
    canvas = page.locator("#heads-canvas")
    canvas.click(position={"x": canvas.bounding_box()["width"] - 20, "y": 22 * 5 + 11})
    assert page.locator("#words span[aria-selected=true]").get_attribute("id") == f"token-{rows.index[ends[5]]}"


def test_every_file_of_every_pane_has_content(page: Any) -> None:
    buttons = page.locator(".files button").evaluate_all("all => all.map(each => each.getAttribute('aria-label'))")
    offered = [tuple(label.split(" of ")) for label in buttons]
    assert {kind for kind, _ in offered} == {"csv", "SVG", "PNG"}
    panes = {pane for _, pane in offered}
    assert {"overview", "words", "course", "heads-lines", "neuron-scores", "map", "mixing", "steps"} <= panes
    for kind, pane in offered:
        place = f"{pane}-chart" if page.locator(f"#{pane}-chart").count() else pane
        show_pane(page, place)
        name, content = save(page, pane, kind)
        assert name.endswith(f".{kind.lower()}")
        if kind == "csv":
            columns, *rows = csv.reader(io.StringIO(content.decode()))
            assert {len(row) for row in rows} == {len(columns)}, pane
        elif kind == "SVG":
            assert len(list(ElementTree.fromstring(content).iter())) > 2, pane  # a background and something on it
        else:
            with Image.open(io.BytesIO(content)) as picture:
                assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 2, pane


def test_words_are_saved_as_shown_and_run_nothing(page: Any, opened: Opened, tmp_path: Path) -> None:
    page.locator("#clear").click()  # or the table has columns of the selected word
    name, content = save(page, "words", "csv")
    assert name == "words_test-0_finetuned_layer-2.csv"
    columns, *rows = csv.reader(io.StringIO(content.decode("utf-8"), newline=""))
    assert columns == ["position", "token", "share from others (ALTI, fine-tuned)"]
    names = tokens().query("document == 'test/0'")["token"]
    assert [row[1] for row in rows] == [visible(each, kept="") for each in names]
    titles = page.locator("#words span").evaluate_all("all => all.map(each => each.title)")
    for title, (*_, share) in zip(titles, rows, strict=True):
        assert not share or title.endswith(f"{100 * float(share):.0f} %")
    name, content = save(page, "words", "SVG")
    drawing = ElementTree.fromstring(content)
    text = "".join(drawing.itertext())
    assert all(visible(each, kept="") in text for each in HOSTILE)
    assert len(list(drawing.iter(f"{SVG}text"))) == len(names)
    (tmp_path / name).write_bytes(content)
    alone = opened.context.browser.new_page()
    alone.goto((tmp_path / name).as_uri())
    assert alone.evaluate("window.hacked") is None
    alone.close()
    with Image.open(io.BytesIO(save(page, "words", "PNG")[1])) as picture:
        assert picture.size == (2 * float(drawing.get("width", 0)), 2 * float(drawing.get("height", 0)))


def test_table_of_values_follows_the_choice(page: Any) -> None:
    assert page.locator("#course ~ .files table").count() == 0  # made when it is opened
    values = open_values(page, "course")
    first = values.locator("tbody tr").all_inner_texts()
    page.locator("#token-4").click()
    assert values.locator("tbody tr").all_inner_texts() != first
    columns = [f"share from others, {checkpoint}" for checkpoint in ("pretrained", "finetuned")]
    assert values.locator("th").all_inner_texts() == ["layer", *columns]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 400)])
def test_page_is_accessible_on_wide_and_narrow_screens(run: Path, chromium: Any, scheme: str, width: int) -> None:
    size = {"width": width, "height": 900}
    shown = Opened(chromium, Run(run).page, viewport=size, color_scheme=scheme, bypass_csp=True)
    page = shown.page
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # no sideways scrolling
    page.locator("#token-3").click()
    small = page.evaluate(
        """smallest => [...document.querySelectorAll('button, select, input, nav a, summary, [role=option], .lists li')]
        .filter(each => each.checkVisibility() && !each.closest('.modebar'))
        .map(each => [each.id || each.textContent, each.getBoundingClientRect()])
        .filter(([, box]) => Math.min(box.width, box.height) < smallest && box.width > 1)
        .map(([name, box]) => `${name}: ${box.width} x ${box.height}`)""",
        MIN_TARGET - 0.01,
    )
    assert small == []
    choose(page, "beside-choice", "pretrained")
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.wait_for_function("() => document.querySelectorAll('.files details[open] table').length > 2")
    assert violations(page) == []
    shown.close()


def test_forced_colours_keep_lines_and_reduced_motion_keeps_points_still(run: Path, chromium: Any) -> None:
    shown = Opened(chromium, Run(run).page, forced_colors="active", reduced_motion="reduce")
    shown.page.locator("#token-3").click()
    lines = shown.page.locator("#words span").evaluate_all(
        "all => all.map(each => [each.classList.contains('took'), getComputedStyle(each).borderBottomWidth])"
    )
    assert {took for took, _ in lines} == {True, False}
    assert all((width != "0px") == took for took, width in lines)
    shown.traces("map-chart")
    last = shown.page.locator("#point").get_attribute("max")
    moves = """value => { const slider = document.getElementById("point"), chart = document.getElementById("map-chart");
        slider.value = value; slider.dispatchEvent(new Event("input", { bubbles: true }));
        return "moving" in chart.dataset; }"""
    assert not shown.page.evaluate(moves, last)
    shown.page.emulate_media(reduced_motion="no-preference")
    assert shown.page.evaluate(moves, "0")
    shown.close()
