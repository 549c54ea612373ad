"""An installed Chromium or Firefox, driven through Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest

AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
NAMES = {
    "chromium": ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
    "firefox": ("firefox-esr", "firefox"),
}
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def browser(kind: str = "chromium") -> Iterator[Any]:
    """A headless browser; the test skips where none is installed, and fails instead where REQUIRE_BROWSER is set."""
    from playwright.sync_api import sync_playwright

    found = next((path for path in map(shutil.which, NAMES[kind]) if path), None)
    if found is None:
        message = f"no installed browser found (looked for {', '.join(NAMES[kind])})"
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        if kind == "firefox":  # as its makers build it, through WebDriver BiDi
            started = playwright.firefox.launch(executable_path=found, channel="moz-firefox", headless=True)
        else:
            started = playwright.chromium.launch(executable_path=found, headless=True, args=FLAGS)
        yield started
        started.close()


class Opened:
    """A page from disk, and what it said and asked for."""

    def __init__(self, started: Any, path: Path, **context: Any) -> None:
        self.context = started.new_context(**context)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.resolve().as_uri())
        self.page.wait_for_selector("html[data-drawn]", state="attached")

    def _hear(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def traces(self, chart: str) -> list[dict[str, Any]]:
        """What a chart draws, once it is seen: `x` and `y` of each curve or kind of points, and what else it says."""
        self.page.locator(f"#{chart}").scroll_into_view_if_needed()
        self.page.wait_for_selector(f"#{chart}:not([data-stale])")
        found: list[dict[str, Any]] = self.page.evaluate(
            "id => document.getElementById(id).drawn().map(({ points, ...rest }) => "
            "({ ...rest, symbol: null, x: points.map(at => at[0]), y: points.map(at => at[1]) }))",
            chart,
        )
        return found

    def close(self) -> None:
        """No page may have complained, or asked for anything but itself."""
        url = self.page.url.split("#")[0]
        self.context.close()
        assert self.errors == []
        inside = ("data:", "blob:")
        assert [each for each in self.requests if each != url and not each.startswith(inside)] == []


def violations(page: Any) -> list[tuple[str, list[Any]]]:
    """What axe-core holds against a page, opened with `bypass_csp`."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
    return [(each["id"], [node["target"] for node in each["nodes"]]) for each in found]
