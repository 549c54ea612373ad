"""An installed Chromium or Firefox, controlled through Playwright."""

from __future__ import annotations

import atexit
import base64
import csv
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest

LIMIT_MILLISECONDS = 300_000  # long enough for a busy machine; no test checks this limit
LOOKS = {"media": "null", "color_scheme": "light", "forced_colors": "none", "reduced_motion": "no-preference"}
WHOLE = "html[data-whole]"
"""Selector of a completely drawn page; `data-ready` only means that the first screen is drawn."""
AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
# Chromium without windows needs about a quarter less processor time than `chromium --headless`.
NAMES = {
    "chromium": ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
    "firefox": ("firefox-esr", "firefox"),
}
# Playwright does not report downloads made in unmodified Firefox builds, and Chromium blocks repeated downloads. The
# files that a page saves are therefore collected in a list.
KEEP_SAVED_FILES = """() => {
  window.savedFiles = [];
  HTMLAnchorElement.prototype.click = function () { window.savedFiles.push([this.download, window.lastBlob]); };
  const create = URL.createObjectURL;
  URL.createObjectURL = (blob) => create(window.lastBlob = blob);
}"""
READ_SAVED_FILE = """async () => {
  const [name, blob] = window.savedFiles.pop();
  const reader = new FileReader();
  const whole = new Promise((resolve) => (reader.onload = () => resolve(reader.result)));
  reader.readAsDataURL(blob);
  return [name, (await whole).split(",")[1] ?? ""];
}"""
OPTIONS: dict[str, dict[str, Any]] = {"chromium": {"args": ["--disable-gpu"]}, "firefox": {"channel": "moz-firefox"}}


@contextmanager
def browser(kind: str = "chromium") -> Iterator[Any]:
    """Yield a headless browser. If none is installed, skip the test, or fail it if REQUIRE_BROWSER is set."""
    path = next((path for path in map(shutil.which, NAMES[kind]) if path), None)
    if path is None:
        stop = pytest.fail if os.environ.get("REQUIRE_BROWSER") else pytest.skip
        stop(f"no installed browser found (looked for {', '.join(NAMES[kind])})")
    process = getattr(_playwright(), kind).launch(executable_path=path, **OPTIONS[kind])
    yield process
    process.close()


@cache
def _playwright() -> Any:
    """Return the Playwright driver of this worker; a process can start only one."""
    from playwright.sync_api import sync_playwright

    driver = sync_playwright().start()
    atexit.register(driver.stop)
    return driver


RESET = """() => {
  for (const each of document.querySelectorAll("details")) each.open = false;
  history.replaceState(null, "", location.pathname);
  dispatchEvent(new PopStateEvent("popstate"));
  dispatchEvent(new Event("afterprint"));
  scrollTo(0, 0);
}"""
"""Script that restores the initial state of a page."""


def console_errors(page: Any) -> list[str]:
    """Return a list to which each future console error of a page is appended."""
    errors = list[str]()

    def record(message: Any) -> None:
        if message.type == "error":
            errors.append(message.text)

    page.on("console", record)
    return errors


class Opened:
    """A tab that opens pages from disk, and records their errors and requests."""

    def __init__(self, process: Any, path: Path | None = None, **context: Any) -> None:
        self.context = process.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(LIMIT_MILLISECONDS)
        self.addresses = list[str]()
        self.errors = console_errors(self.page)
        self.requests = list[str]()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url.split("#")[0]))
        if path is not None:
            self.open(path)

    def open(self, path: Path, width: int = 1400, height: int = 900, **looks: str) -> Opened:
        """Open a page in this tab, wait until it is drawn, and return the tab.

        Opening a new tab would take three times as long.
        """
        self.page.goto("about:blank")
        if looks:
            self.page.set_viewport_size({"width": width, "height": height})
            self.page.emulate_media(**looks)
        self.addresses.append(path.resolve().as_uri())
        self.page.goto(self.addresses[-1])
        self.page.wait_for_selector(WHOLE, state="attached")
        return self

    def drawn(self) -> dict[str, Any]:
        """Return the state of the map after its animation: tokens, pixel positions, names and the dot radius."""
        self.page.wait_for_function("() => !document.getElementById('map-canvas').drawn().moving")
        return dict(self.page.evaluate("document.getElementById('map-canvas').drawn()"))

    def values(self, pane: str) -> list[dict[str, str]]:
        """Return the rows of the csv file of a pane."""
        _, content = self.file(pane, "csv")
        return list(csv.DictReader(content.decode("utf-8").splitlines(keepends=True)))

    def file(self, pane: str, kind: str) -> tuple[str, bytes]:
        """Save a pane as a csv, SVG or PNG file, and return the name and content of the file."""
        button = self.page.locator(f"#{pane} > .title").get_by_role("button", name=kind, exact=True)
        self.page.evaluate(f"window.savedFiles || ({KEEP_SAVED_FILES})()")
        button.click()
        self.page.wait_for_function("() => window.savedFiles.length > 0")
        name, content = self.page.evaluate(READ_SAVED_FILE)
        return str(name), base64.b64decode(content)

    def reset(self) -> None:
        """Restore the initial state of the page and move the pointer to the corner of the window."""
        self.page.mouse.move(0, 0)
        self.page.evaluate(RESET)

    def check(self) -> None:
        """Assert that the pages logged no errors and requested no other files."""
        assert self.errors == []
        allowed = ("data:", "blob:", *self.addresses)
        assert [each for each in self.requests if not each.startswith(allowed)] == []

    def close(self) -> None:
        """Close the tab and check its pages."""
        self.context.close()
        self.check()


def violations(page: Any) -> list[tuple[str, list[Any]]]:
    """Return the accessibility violations that axe-core reports for a page opened with `bypass_csp`."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    options = "{ resultTypes: ['violations'], rules: { 'target-size': { enabled: true } } }"
    results = page.evaluate(f"axe.run({options})")["violations"]
    return [(each["id"], [node["target"] for node in each["nodes"]]) for each in results]
