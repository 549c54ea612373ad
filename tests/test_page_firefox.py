"""The page in Firefox: its views are drawn, linked, and say nothing wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Opened, browser
from page_run import HOSTILE, choose, open_values, tokens

from attnmix.page.arrays import visible
from attnmix.store.runs import Run

# What Playwright asks of a browser's media by default, Firefox does not know.
DEFAULT = {"viewport": {"width": 1400, "height": 900}}


PANES = """[...document.querySelectorAll(".files")].map(files => files.previousElementSibling.id)"""
CELLS = """id => [...document.querySelectorAll(`#${id} + .files tr`)]
    .map(row => [...row.children].map(c => c.textContent))"""
# Marks of its drawings, and pixels of its canvases.
DRAWN = """id => { const pane = document.getElementById(id);
    const marks = pane.querySelectorAll("path, circle, rect, line").length;
    const canvases = [...(pane.matches("canvas") ? [pane] : pane.querySelectorAll("canvas"))].filter(c => c.width);
    const pixels = c => c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
    const inked = c => pixels(c).some((each, i) => i % 4 == 3 && each);
    return [marks, canvases.filter(inked).length]; }"""
DRAWINGS = ["overview-chart", "heads-lines", "map-chart", "mixing-chart", "steps-chart", "course"]


def looked_at(opened: Opened) -> dict[str, tuple[list[int], list[list[str]]]]:
    """Of every pane, with a token chosen: what it has drawn, and its values."""
    page, found = opened.page, {}
    page.locator("#token-3").click()
    page.mouse.move(0, 0)
    for pane in page.evaluate(PANES):
        page.locator(f"#{pane} + .files").scroll_into_view_if_needed()
        page.locator(f"#{pane}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#{pane}:not([data-stale]):not([data-moving])")
        open_values(page, pane)
        found[pane] = page.evaluate(DRAWN, pane), page.evaluate(CELLS, pane)
    return found


@pytest.fixture(scope="module")
def in_chromium(page_folder: Path) -> dict[str, tuple[list[int], list[list[str]]]]:
    """Before Firefox is started, as Playwright drives one browser at a time."""
    with browser() as started:
        opened = Opened(started, Run(page_folder).page, **DEFAULT)
        found = looked_at(opened)
        opened.close()
    return found


@pytest.fixture(scope="module")
def firefox(in_chromium: Any) -> Iterator[Any]:
    with browser("firefox") as started:
        yield started


@pytest.fixture
def shown(run: Path, firefox: Any) -> Iterator[Opened]:
    opened = Opened(firefox, Run(run).page, **DEFAULT)
    yield opened
    opened.close()


def test_views_are_linked(shown: Opened) -> None:
    page = shown.page
    choose(page, "layer", "2")
    page.locator("#token-3").click()
    assert "By ALTI, in layer 2, fine-tuned: kept" in page.locator("#kept").inner_text()
    assert page.locator("#sources li").count() > 0
    page.keyboard.press("ArrowRight")
    assert page.locator("#words span[aria-selected=true]").get_attribute("id") == "token-4"
    assert visible(tokens()["token"][4]) in page.locator("#selected").inner_text()
    choose(page, "checkpoint", "difference")
    assert "fine-tuned minus pretrained" in page.locator("#text-legend").inner_text()
    choose(page, "beside-choice", "2")
    assert page.locator("#beside-name").inner_text().startswith("text/0")


def test_hostile_text_is_shown_and_runs_nothing(shown: Opened) -> None:
    page = shown.page
    text = page.locator("#words").inner_text()
    assert all(visible(each) in text for each in HOSTILE)
    for token in range(2, 2 + len(HOSTILE)):
        page.locator(f"#token-{token}").click()
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("pane", ["words", "course"])
def test_a_pane_can_be_kept(shown: Opened, tmp_path: Path, pane: str) -> None:
    shown.page.locator("#token-3").click()
    assert open_values(shown.page, pane).locator("tbody tr").count() > 0


def test_every_pane_is_drawn_and_says_what_it_says_in_chromium(shown: Opened, in_chromium: Any) -> None:
    found = looked_at(shown)
    assert list(found) == list(in_chromium)
    assert set(DRAWINGS) <= set(found)
    for pane, (drawn, cells) in found.items():
        expected_drawn, expected = in_chromium[pane]
        assert [bool(each) for each in drawn] == [bool(each) for each in expected_drawn], pane
        assert any(drawn) or pane not in DRAWINGS, pane
        assert len(cells) == len(expected) > 1, pane
        for row, expected_row in zip(cells, expected, strict=True):
            for cell, expected_cell in zip(row, expected_row, strict=True):
                assert cell == expected_cell or float(cell) == pytest.approx(float(expected_cell), abs=1e-6), pane
