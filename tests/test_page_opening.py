"""How the page opens: it is ready with its first screen; the rest follows, or is drawn at once where asked for."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import LIMIT_MILLISECONDS, WHOLE, Opened, browser
from page_run import choose, tokens
from PIL import Image

from attnmix.core.store.runs import Run

READY = "html[data-ready]"
UNDRAWN = ".undrawn"
STAY_READY = """
const begin = window.setTimeout;
window.setTimeout = (call, wait) => (wait || document.documentElement?.dataset.ready ? 0 : begin(call));
"""
"""Holds a page in the moment when it is ready: all that is drawn later is drawn by timers."""
NO_FRAMES = "window.requestAnimationFrame = () => 0;"
SMOOTHING = 16  # of 255: how much the browser's smoothing of a dotted line may differ
WINDOW = {"width": 1280, "height": 720}


@contextmanager
def page_at(process: Any, address: str, until: str, script: str = "", **context: Any) -> Iterator[Any]:
    """Yield the page of an address once it is so far; a script runs before its own."""
    held = process.new_context(**{"viewport": WINDOW} | context)
    held.add_init_script(script)
    page = held.new_page()
    page.set_default_timeout(LIMIT_MILLISECONDS)
    page.goto(address)
    page.wait_for_selector(until, state="attached")
    yield page
    held.close()


@pytest.fixture
def address(run: Path) -> str:
    return Run(run).page.resolve().as_uri()


@pytest.fixture
def ready(address: str, chromium: Any) -> Iterator[Any]:
    """A page that stays as it is in the moment when it is ready."""
    with page_at(chromium, address, READY, STAY_READY) as page:
        assert page.locator(UNDRAWN).count() > 0
        yield page


def pixels(page: Any, **options: Any) -> Any:
    with Image.open(io.BytesIO(page.screenshot(**options))) as image:
        return np.asarray(image.convert("RGB"), dtype=int)


def assert_alike(one: Any, other: Any) -> None:
    assert one.shape == other.shape
    assert np.abs(one - other).max() <= SMOOTHING


LOOKS = {
    "wide": {},
    "narrow": {"viewport": {"width": 400, "height": 720}},
    "dark": {"color_scheme": "dark"},
    "enlarged": {"viewport": {"width": 640, "height": 360}, "device_scale_factor": 2},
    "forced colours": {"forced_colors": "active"},
    "high": {"viewport": {"width": 1280, "height": 2000}},
}


@pytest.mark.parametrize("look", LOOKS)
def test_window_of_a_ready_page_shows_what_that_of_the_whole_page_does(address: str, chromium: Any, look: str) -> None:
    with page_at(chromium, address, READY, STAY_READY, **LOOKS[look]) as page:
        assert page.locator(UNDRAWN).count() > 0
        first = pixels(page)
    with page_at(chromium, address, WHOLE, **LOOKS[look]) as page:
        assert page.locator(UNDRAWN).count() == 0
        assert_alike(first, pixels(page))


def test_first_screen_reacts_before_the_rest_is_drawn(ready: Any) -> None:
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


def test_choice_before_the_rest_is_drawn_is_what_the_rest_shows(address: str, chromium: Any) -> None:
    with page_at(chromium, address, READY, STAY_READY) as page:
        choose(page, "checkpoint", "pretrained")
        page.locator("nav a[href='#layers']").click()  # which draws the rest
        assert "pretrained" in page.locator("#text .title").inner_text()
        assert "pretrained" in page.locator("#heads .title").inner_text()


def printed(page: Any) -> Any:
    """Return the pixels of the page on paper; browsers tell a page of it before they lay it out for paper."""
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(UNDRAWN).count() == 0
    page.emulate_media(media="print")
    return pixels(page, full_page=True)


def test_page_that_is_printed_before_it_is_whole_is_printed_whole(address: str, chromium: Any) -> None:
    with page_at(chromium, address, READY, STAY_READY) as page:
        early = printed(page)
    with page_at(chromium, address, WHOLE) as page:
        assert_alike(early, printed(page))


@pytest.mark.parametrize("place", ["text", "map", "run"])
def test_link_to_a_place_leads_there_before_the_rest_is_drawn(address: str, chromium: Any, place: str) -> None:
    with page_at(chromium, f"{address}#{place}", READY, STAY_READY) as page:
        top = page.locator(f"#{place}").bounding_box()["y"]
        bar = page.locator("#bar").bounding_box()
        assert bar["y"] + bar["height"] <= top < WINDOW["height"] / 2


def test_link_that_is_clicked_before_the_rest_is_drawn_leads_to_its_place(ready: Any) -> None:
    ready.locator("nav a[href='#map']").click()
    assert 0 < ready.locator("#map").bounding_box()["y"] < WINDOW["height"] / 2
    assert ready.evaluate("document.getElementById('map-canvas').drawn().tokens.length") == len(tokens())


def test_page_without_frames_as_in_the_background_is_drawn_whole(address: str, chromium: Any) -> None:
    with page_at(chromium, address, WHOLE, NO_FRAMES) as page:
        assert page.locator(UNDRAWN).count() == 0
        assert page.locator("#map-canvas").count() == 1


@pytest.mark.long
def test_page_opens_in_firefox_as_in_chromium(address: str) -> None:
    with browser("firefox") as firefox:
        with page_at(firefox, address, READY, STAY_READY) as page:
            first = pixels(page)
            early = printed(page)
        with page_at(firefox, address, WHOLE) as page:
            assert_alike(first, pixels(page))
            assert_alike(early, printed(page))
        shown = Opened(firefox, Run(Path()).page, viewport=WINDOW)
        assert len(shown.drawn()["tokens"]) == len(tokens())
        shown.close()
