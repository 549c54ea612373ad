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
# Firefox as its makers build it is driven through WebDriver BiDi.
OPTIONS: dict[str, dict[str, Any]] = {"chromium": {"args": ["--disable-gpu"]}, "firefox": {"channel": "moz-firefox"}}


@contextmanager
def browser(kind: str = "chromium") -> Iterator[Any]:
    """Yield a headless browser; skip the test where none is installed, or fail it where REQUIRE_BROWSER is set."""
    from playwright.sync_api import sync_playwright

    path = next((path for path in map(shutil.which, NAMES[kind]) if path), None)
    if path is None:
        stop = pytest.fail if os.environ.get("REQUIRE_BROWSER") else pytest.skip
        stop(f"no installed browser found (looked for {', '.join(NAMES[kind])})")
    with sync_playwright() as playwright:
        process = getattr(playwright, kind).launch(executable_path=path, **OPTIONS[kind])
        yield process
        process.close()


class Opened:
    """A page from disk, its errors and its requests."""

    def __init__(self, process: Any, path: Path, **context: Any) -> None:
        self.context = process.new_context(**context)
        self.page = self.context.new_page()
        self.errors, self.requests = list[str](), list[str]()
        self.page.on("console", lambda message: self.errors.extend([message.text] * (message.type == "error")))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.resolve().as_uri())
        self.page.wait_for_selector("html[data-drawn]", state="attached")

    def traces(self, chart: str) -> list[dict[str, Any]]:
        """Scroll to a chart and return what it draws: `x` and `y` of each curve or kind of points, and its texts."""
        self.page.locator(f"#{chart}").scroll_into_view_if_needed()
        self.page.wait_for_selector(f"#{chart}:not([data-stale])")
        traces: list[dict[str, Any]] = self.page.evaluate(
            "id => document.getElementById(id).drawn().map(({ points, ...rest }) => "
            "({ ...rest, symbol: null, x: points.map(at => at[0]), y: points.map(at => at[1]) }))",
            chart,
        )
        return traces

    def trace(self, chart: str, name: str) -> dict[str, Any]:
        """Return the trace of a chart with this name."""
        return next(trace for trace in self.traces(chart) if trace["name"] == name)

    def close(self) -> None:
        """Close the page; it must not have complained, or asked for anything but itself."""
        url = self.page.url.split("#")[0]
        self.context.close()
        assert self.errors == []
        assert [each for each in self.requests if each != url and not each.startswith(("data:", "blob:"))] == []


def violations(page: Any) -> list[tuple[str, list[Any]]]:
    """Return the violations that axe-core finds on a page, opened with `bypass_csp`."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    options = "{ resultTypes: ['violations'], rules: { 'target-size': { enabled: true } } }"
    results = page.evaluate(f"axe.run({options})")["violations"]
    return [(each["id"], [node["target"] for node in each["nodes"]]) for each in results]
