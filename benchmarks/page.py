"""The interactive page in a browser: bytes besides its data, time until it is ready, processor time of a choice.

    python -m benchmarks.page before=../before/reports/index.html after=reports/index.html

Each is a page that some commit made, under a name. In headless Chromium without a GPU: `ready` is from navigation until
the page says that its views are there; a selection and a step of the slider are the processor time of the main thread's
tasks (`TaskDuration` of the DevTools protocol) from a click on a word, or an input of the slider, until nothing more is
painted, animation included, with the map on the screen; a hover is that of the mouse coming to a token of the map.
Medians over the repeats, the ways in turn. The section in benchmarks/RESULTS.md is replaced.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from benchmarks.stages import PAGE_TITLE, TITLE, keep
from benchmarks.timing import processor

VIEWPORT = {"width": 1400, "height": 900}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
DATA = re.compile(rb'<script type="text/plain" id="data">.*?</script>', re.DOTALL)
QUIET = 900  # milliseconds after which what was set off has ended, animations included
COLUMNS = ["page", "besides data", "whole", "ready", "a selection", "a step of the slider", "a hover"]
READY = """new MutationObserver((_, all) => {
  if (document.documentElement?.dataset.ready) { window.readyAt = performance.now(); all.disconnect(); }
}).observe(document, { subtree: true, attributes: true, childList: true })"""
CHOOSE = "number => document.querySelectorAll('#words [data-token]')[number].click()"
STEP = """() => { const slider = document.getElementById('point'); slider.value = 1 + Number(slider.value) % slider.max;
  slider.dispatchEvent(new Event('input')); }"""

# Tokens that are seen on the map, as places on the screen, and the mouse on one of them.
FIND = """() => { const map = document.getElementById('map-canvas');
  const box = map.getBoundingClientRect();
  const seen = ([x, y]) => x > 0 && y > 0 && x < box.width && y < box.height;
  window.spots = map.drawn().pixels.filter(seen)
    .map(([x, y]) => ({ clientX: box.left + x, clientY: box.top + y })); }"""
HOVER = """share => document.getElementById('map-canvas').dispatchEvent(
  new PointerEvent('pointermove', window.spots[Math.floor(share * window.spots.length)]))"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", metavar="name=path")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    pages = {name: Path(path) for name, _, path in (each.partition("=") for each in arguments.pages)}
    found = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        measured = [{name: measure(browser, path) for name, path in pages.items()} for _ in range(arguments.repeats)]
        version = browser.version
        browser.close()
    rows = [row(name, path, [each[name] for each in measured]) for name, path in pages.items()]
    lines = [COLUMNS, ["---", *["---:"] * (len(COLUMNS) - 1)], *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    command = " ".join(f"{name}=…/{path.name}" for name, path in pages.items())
    keep(
        f"{TITLE}{PAGE_TITLE}\n\n`python -m benchmarks.page {command} --repeats {arguments.repeats}`: medians.\n"
        f"{processor()}, {os.cpu_count()} cores; load before {os.getloadavg()[0]:.1f}. Chromium {version}, headless, "
        f"without a GPU, {VIEWPORT['width']} x {VIEWPORT['height']}.\n\n{table}\n"
    )
    sys.stdout.write(f"{table}\n")


def measure(browser: Any, path: Path) -> dict[str, float]:
    """Milliseconds of one opening: until ready, and of the main thread for a selection, a step and a hover."""
    context = browser.new_context(viewport=VIEWPORT)
    page = context.new_page()
    page.add_init_script(READY)
    page.goto(path.resolve().as_uri())
    page.wait_for_function("() => window.readyAt")
    ready = page.evaluate("readyAt")
    page.locator("#map-canvas").scroll_into_view_if_needed()
    page.wait_for_timeout(2 * QUIET)
    devtools = context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})  # not the wall's

    def busy(act: str, argument: Any = None) -> float:
        """Return the milliseconds of tasks, and those of an equally long rest."""
        spent = []
        for each in ("() => 0", act):
            before = tasks(devtools)
            page.evaluate(each, argument)
            page.wait_for_timeout(QUIET)
            spent.append(tasks(devtools) - before)
        return max(spent[1] - spent[0], 0)

    number = page.locator("#words [data-token]").count()
    selections = [busy(CHOOSE, number * share // 10) for share in (2, 5, 8)]
    steps = [busy(STEP) for _ in range(3)]
    page.evaluate(FIND)
    hovers = [busy(HOVER, share / 10) for share in (2, 5, 8)]
    busiest = {"selection": selections, "step": steps, "hover": hovers}
    context.close()
    return {"ready": ready} | {name: statistics.median(each) for name, each in busiest.items()}


def tasks(devtools: Any) -> float:
    metrics = devtools.send("Performance.getMetrics")["metrics"]
    return 1000 * next(each["value"] for each in metrics if each["name"] == "TaskDuration")


def row(name: str, path: Path, measured: list[dict[str, float]]) -> list[str]:
    content = path.read_bytes()
    sizes = [f"{len(each) / 1e6:.2f} MB" for each in (DATA.sub(b"", content), content)]
    medians = {key: statistics.median(each[key] for each in measured) for key in measured[0]}
    return [
        name,
        *sizes,
        f"{medians['ready'] / 1000:.2f} s",
        *(f"{medians[key]:.0f} ms" if key in medians else "" for key in ("selection", "step", "hover")),
    ]


if __name__ == "__main__":
    main()
