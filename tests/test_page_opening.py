"""The page is ready when its first screen is drawn; the remaining parts are drawn later or on demand."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import LIMIT_MILLISECONDS, WHOLE, browser
from page_run import choose, tokens
from PIL import Image

from attnmix.core.store.runs import Run

READY = "html[data-ready]"
UNDRAWN = ".undrawn"
STAY_READY = """
const begin = window.setTimeout;
window.setTimeout = (call, wait) => (wait || document.documentElement?.dataset.ready ? 0 : begin(call));
"""
"""Script that stops a page when it is ready, by disabling the timers that draw the remaining parts."""
NO_FRAMES = "window.requestAnimationFrame = () => 0;"
SMOOTHING = 16  # maximum difference, on the scale from 0 to 255, between antialiased dotted lines
WINDOW = {"width": 1280, "height": 720}


@contextmanager
def new_tab(process: Any, script: str = "", **context: Any) -> Iterator[Any]:
    """Yield an empty tab that runs `script` before the scripts of each page."""
    held = process.new_context(**{"viewport": WINDOW} | context)
    held.add_init_script(script)
    page = held.new_page()
    page.set_default_timeout(LIMIT_MILLISECONDS)
    yield page
    held.close()


def open_until(page: Any, address: str, until: str, width: int = WINDOW["width"], **looks: str) -> Any:
    """Open an address with a window width and media features, wait for a selector, and return the page."""
    page.goto("about:blank")
    page.set_viewport_size(WINDOW | {"width": width})
    page.emulate_media(**{"color_scheme": "light", "media": "null"} | looks)
    page.goto(address)
    page.wait_for_selector(until, state="attached")
    return page


@pytest.fixture
def address(run: Path) -> str:
    return Run(run).page.resolve().as_uri()


@pytest.fixture(scope="module")
def held_tab(chromium: Any) -> Iterator[Any]:
    """Yield a tab in which each page stops when it is ready."""
    with new_tab(chromium, STAY_READY) as page:
        yield page


@pytest.fixture(scope="module")
def tab(chromium: Any) -> Iterator[Any]:
    with new_tab(chromium) as page:
        yield page


@pytest.fixture
def ready(address: str, held_tab: Any) -> Any:
    """Return a page that was stopped when it was ready."""
    open_until(held_tab, address, READY)
    assert held_tab.locator(UNDRAWN).count() > 0
    return held_tab


def pixels(page: Any, **options: Any) -> Any:
    with Image.open(io.BytesIO(page.screenshot(**options))) as image:
        return np.asarray(image.convert("RGB"), dtype=np.int16)


def assert_alike(one: Any, other: Any) -> None:
    """Assert that pictures are equal except for antialiasing."""
    assert one.shape == other.shape
    assert np.abs(one - other).max() <= SMOOTHING


def printed(page: Any) -> Any:
    """Return the pixels of the printed page; browsers send `beforeprint` before the print layout."""
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(UNDRAWN).count() == 0
    page.emulate_media(media="print")
    return pixels(page, full_page=True)


def assert_ready_as_whole(ready: Any, whole: Any) -> None:
    """Assert that a page of which only the first screen is rendered looks and prints like the complete page."""
    assert ready.locator(UNDRAWN).count() > 0
    assert whole.locator(UNDRAWN).count() == 0
    assert_alike(pixels(ready), pixels(whole))
    assert_alike(printed(ready), printed(whole))


def test_ready_page_looks_and_prints_like_complete_page(address: str, ready: Any, tab: Any) -> None:
    assert_ready_as_whole(ready, open_until(tab, address, WHOLE))


def test_ready_page_in_narrow_dark_window(address: str, held_tab: Any, tab: Any) -> None:
    ready = open_until(held_tab, address, READY, width=400, color_scheme="dark")
    assert ready.locator(UNDRAWN).count() > 0
    assert_alike(pixels(ready), pixels(open_until(tab, address, WHOLE, width=400, color_scheme="dark")))


LOOKS: dict[str, dict[str, Any]] = {
    "enlarged": {"viewport": {"width": 640, "height": 360}, "device_scale_factor": 2},
    "forced colours": {"forced_colors": "active"},
    "high": {"viewport": {"width": 1280, "height": 2000}},
}


@pytest.mark.long
@pytest.mark.parametrize("look", LOOKS)
def test_ready_page_with_other_display_settings(address: str, chromium: Any, look: str) -> None:
    shown = []
    for script, until in ((STAY_READY, READY), ("", WHOLE)):
        with new_tab(chromium, script, **LOOKS[look]) as page:
            page.goto(address)
            page.wait_for_selector(until, state="attached")
            assert (page.locator(UNDRAWN).count() > 0) == (until == READY)
            shown.append(pixels(page))
    assert_alike(*shown)


def test_first_screen_reacts_before_the_rest_is_drawn(ready: Any) -> None:
    box = ready.locator("#grid-canvas").bounding_box()  # the text's picture fits into the window
    assert box["y"] > 0
    assert box["x"] + box["width"] <= WINDOW["width"]
    assert box["y"] + box["height"] <= WINDOW["height"]
    choose(ready, "document", "0")
    choose(ready, "checkpoint", "pretrained")
    choose(ready, "layer", "2")
    cells = ready.evaluate("document.getElementById('grid-canvas').drawn()")
    cell = next(each for each in cells["cells"] if (each["token"], each["layer"], each["model"]) == (1, 1, "finetuned"))
    ready.locator("#grid-canvas").click(position={"x": cell["x"] + 2, "y": cell["y"] + 2})
    assert ready.locator("#layer").input_value() == "1"
    assert ready.locator("#checkpoint [aria-pressed=true]").get_attribute("value") == "finetuned"
    assert tokens()["label"][1] in ready.locator("#selected b").inner_text()
    assert "after layer 1" in ready.locator("#chosen-text").inner_text()
    with ready.expect_download() as download:
        ready.locator("#grid > .title").get_by_role("button", name="SVG").click()
    assert download.value.path().read_text(encoding="utf-8").count("<rect") > len(cells["cells"]) / 2
    assert ready.locator(UNDRAWN).count() > 0
    choose(ready, "checkpoint", "pretrained")
    ready.locator("nav a[href='#map']").click()  # draws the remaining parts
    assert 0 < ready.locator("#map").bounding_box()["y"] < WINDOW["height"] / 2
    assert ready.evaluate("document.getElementById('map-canvas').drawn().tokens.length") == len(tokens())
    for part in ("text", "heads"):  # parts drawn later have the earlier selection
        assert "pretrained" in ready.locator(f"#{part} .title").inner_text()


@pytest.mark.parametrize("place", ["map", *(pytest.param(each, marks=pytest.mark.long) for each in ("text", "run"))])
def test_link_leads_to_place_before_the_rest_is_drawn(address: str, held_tab: Any, place: str) -> None:
    page = open_until(held_tab, f"{address}#{place}", READY)
    top = page.locator(f"#{place}").bounding_box()["y"]
    bar = page.locator("#bar").bounding_box()
    assert bar["y"] + bar["height"] <= top < WINDOW["height"] / 2


def test_background_page_is_drawn_completely(address: str, chromium: Any) -> None:
    with new_tab(chromium, NO_FRAMES) as page:
        open_until(page, address, WHOLE)
        assert page.locator(UNDRAWN).count() == 0
        assert page.locator("#map-canvas").count() == 1


@pytest.mark.long
def test_page_opens_in_firefox(address: str) -> None:
    with browser("firefox") as firefox, new_tab(firefox, STAY_READY) as held, new_tab(firefox) as tab:
        assert_ready_as_whole(open_until(held, address, READY), open_until(tab, address, WHOLE))
