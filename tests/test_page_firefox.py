"""The page in Firefox: its views are drawn, linked, and say nothing wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Opened, browser
from page_run import HOSTILE, choose, tokens

from attnmix.page.arrays import visible
from attnmix.store.runs import Run

pytestmark = pytest.mark.long


def test_views_are_drawn_and_linked_in_firefox(run: Path) -> None:
    with browser("firefox") as started:
        # Firefox does not know what Playwright asks of a browser's media by default.
        shown = Opened(started, Run(run).page, viewport={"width": 1400, "height": 900})
        page = shown.page
        choose(page, "layer", "2")
        for token in range(2, 2 + len(HOSTILE)):
            page.locator(f"#token-{token}").click()
        assert page.evaluate("window.hacked") is None
        page.locator("#token-3").click()
        assert page.locator("#sources li").count() > 0
        page.keyboard.press("ArrowRight")
        assert visible(tokens()["token"][4]) in page.locator("#selected").inner_text()
        for chart in ("map-chart", "mixing-chart", "steps-chart"):
            assert shown.traces(chart)
        shown.close()
