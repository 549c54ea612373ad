"""One action in each pane, and every file that a pane offers."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import Opened, browser
from page_run import choose, next_frames, tokens
from PIL import Image

from attnmix.store.runs import Run

# What a pane gives to be saved, by its name: Playwright hears of no download in Firefox.
CATCH = """() => { window.given = []; const made = URL.createObjectURL, clicked = HTMLAnchorElement.prototype.click;
    let last = null; URL.createObjectURL = blob => made.call(URL, last = blob);
    HTMLAnchorElement.prototype.click = function () { window.given.push([this.download, last]); clicked.call(this); };
}"""
GIVEN = """async () => { const [name, blob] = window.given.pop();
    const bytes = new Uint8Array(await blob.arrayBuffer());
    return [name, btoa(Array.from(bytes, each => String.fromCharCode(each)).join(""))]; }"""
ENDS = 24  # on each side of a head's lines, of a text that is longer


@pytest.fixture(scope="module")
def page_open(page_folder: Path) -> Iterator[Opened]:
    """One page for all; each test chooses what it needs."""
    with browser() as started:
        shown = Opened(started, Run(page_folder).page, viewport={"width": 1400, "height": 900})
        shown.page.evaluate(CATCH)
        yield shown
        shown.close()


@pytest.fixture
def page(page_open: Opened, run: Path) -> Any:
    found = page_open.page
    choose(found, "document", "0")
    choose(found, "layer", "2")
    found.locator("#token-3").click()
    found.mouse.move(0, 0)
    return found


def seen(page: Any, pane: str) -> Any:
    """The pane in the middle of the screen, drawn."""
    page.evaluate("id => document.getElementById(id).scrollIntoView({ block: 'center' })", pane)
    page.wait_for_selector(f"#{pane}:not([data-stale]):not([data-moving])")
    next_frames(page)
    return page.locator(f"#{pane}")


def of_file(page: Any, pane: str, kind: str) -> tuple[str, bytes]:
    page.get_by_role("button", name=f"{kind} of {pane.removesuffix('-chart')}", exact=True).click()
    page.wait_for_function("() => window.given.length > 0")
    name, content = page.evaluate(GIVEN)
    return name, base64.b64decode(content)


def test_a_click_into_the_overview_chooses_the_layer(page: Any) -> None:
    seen(page, "overview")
    page.locator("#overview-chart [data-layer='1']").first.click()
    assert page.locator("#layer").input_value() == "1"


def test_the_slider_of_layers_shades_the_words_anew(page: Any) -> None:
    shades = "all => all.map(each => getComputedStyle(each).backgroundColor)"
    before = page.locator("#words span").evaluate_all(shades)
    page.locator("#depth").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#layer").input_value() == "3"
    assert page.locator("#words span").evaluate_all(shades) != before


def test_a_ratio_is_chosen_by_a_click_into_its_panel(page: Any) -> None:
    seen(page, "mixing-chart")
    page.locator("#mixing-chart [data-method=attn_n][data-layer='3']").click()
    assert page.locator("#ratio-method").input_value() == "attn_n"
    assert page.locator("#layer").input_value() == "3"
    choose(page, "ratio-method", "attnresln_n")


def test_of_a_long_text_the_strongest_ends_of_a_tokens_lines_stand_together(page: Any) -> None:
    longest = tokens()["document"].value_counts().idxmax()
    rows = tokens().query("document == @longest")
    choose(page, "document", str(list(tokens()["document"].unique()).index(longest)))
    chosen = len(rows) - 2
    seen(page, "heads-lines").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    page.wait_for_selector(f"#token-{rows.index[chosen]}[aria-selected=true]")
    seen(page, "heads-lines")
    assert len(rows) > ENDS
    assert (
        f"Of {len(rows)} tokens the strongest stand on each side, {ENDS} at most."
        in page.locator("#heads-said").inner_text()
    )
    _, *lines = csv.reader(io.StringIO(of_file(page, "heads-lines", "csv")[1].decode()))
    taken = {int(source): float(weight) for i, _, source, _, weight in lines if int(i) == chosen}
    order = sorted(taken, key=lambda source: (source != chosen, -taken[source]))
    ends = sorted(order[:ENDS])
    canvas = page.locator("#heads-canvas")
    box = canvas.bounding_box()
    scrolled = page.locator("#heads-lines").evaluate("box => box.scrollHeight - box.clientHeight")
    assert box["height"] >= ENDS * 22
    assert scrolled == 0
    canvas.click(position={"x": box["width"] - 20, "y": 22 * 5 + 11})
    assert page.locator("#words span[aria-selected=true]").get_attribute("id") == f"token-{rows.index[ends[5]]}"


def places(page_open: Opened) -> np.ndarray[Any, Any]:
    seen(page_open.page, "map-chart")
    found = next(each for each in page_open.traces("map-chart") if each["name"] == "tokens")
    return np.array(found["pixels"])


def test_the_map_is_dragged_and_zoomed_by_the_wheel(page: Any, page_open: Opened) -> None:
    before = places(page_open)
    box = page.locator("#map-chart canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + 30
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 40, y + 20, steps=4)
    page.mouse.up()
    moved = places(page_open)
    assert moved - before == pytest.approx(np.broadcast_to([40, 20], before.shape), abs=1)
    page.mouse.wheel(0, -300)
    next_frames(page)
    assert np.ptp(places(page_open), axis=0).min() > 1.05 * np.ptp(moved, axis=0).min()


def test_every_file_of_every_pane_holds_something(page: Any) -> None:
    buttons = page.locator(".files button").evaluate_all("all => all.map(each => each.getAttribute('aria-label'))")
    offered = [tuple(label.split(" of ")) for label in buttons]
    assert {kind for kind, _ in offered} == {"csv", "SVG", "PNG"}
    assert {"overview", "words", "course", "heads-lines", "neuron-scores", "map", "mixing", "steps"} <= {
        pane for _, pane in offered
    }
    for kind, pane in offered:
        whole = f"{pane}-chart" if page.locator(f"#{pane}-chart").count() else pane
        seen(page, whole)
        name, content = of_file(page, pane, kind)
        assert name.endswith(f".{kind.lower()}")
        if kind == "csv":
            columns, *rows = csv.reader(io.StringIO(content.decode()))
            assert len(rows) > 0, pane
            assert {len(row) for row in rows} == {len(columns)}, pane
        elif kind == "SVG":
            assert len(list(ElementTree.fromstring(content).iter())) > 2, pane  # a ground and what stands on it
        else:
            with Image.open(io.BytesIO(content)) as picture:
                assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 2, pane
