"""The pictures in the README and in docs/, from the figures and the page of the last run.

python -m docs.pictures

Those of figures are the same bytes every time; those of the page are what an installed Chromium shows of it, and need
the packages of the tests.
"""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

from attnmix.core.errors import InputError
from attnmix.store.files import require
from attnmix.store.runs import Run

DOCS = Path("docs")
RUN = Run(Path())
WIDTH = 1100  # pixels
COLORS = 256
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCREEN = {"width": 1200, "height": 1500}
SHARPER = 2  # pixels of a picture for each of the screen
MARGIN = 6  # pixels of the screen
GALLERY = {
    "answer": ("#headline", "#answer .first", "#answer .sentence"),
    "text": ("#text h3", "#text .reader"),
    "heads": ("#heads h3", "#heads .heads"),
    "neuron": ("#weights h3", "#weight-rows"),
    "map": ("#map-pane h3", "#map-canvas"),
}
"""Pictures of the page, and what each shows."""
# What would lie over a pane, or be cut by the edge of its picture.
LEFT_OUT = """#bar { position: static !important; }
.files, #map aside { display: none !important; }
.side { grid-template-columns: minmax(0, 1fr) !important; }"""
WORD = re.compile(r"[^\W\d_]{6,}")  # the first of these is chosen: it says more than "the" or "."


def main() -> None:
    require(RUN.figures, "render")
    last_page = max((RUN.figures / "joint").glob("*.png"))
    _stack([RUN.figures / "mixing_by_layer.png", last_page], DOCS / "result.png")
    _stack([RUN.figures / "mixing_steps.png"], DOCS / "steps.png")
    _stack([RUN.figures / "mixing_reviews.png"], DOCS / "reviews.png")
    for name, shot in _of_page().items():
        _stack([io.BytesIO(shot)], DOCS / f"gallery_{name}.png")


def _of_page() -> dict[str, bytes]:
    """The panes of `GALLERY` that the page has, a word chosen, as a reader sees them."""
    from playwright.sync_api import sync_playwright

    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        raise InputError(f"no browser for the pictures of {RUN.page}: install one of {', '.join(BROWSERS)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        looks = {"color_scheme": "light", "reduced_motion": "reduce", "device_scale_factor": SHARPER}
        page = browser.new_page(viewport=SCREEN, **looks)
        page.goto(require(RUN.page, "render").resolve().as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        page.add_style_tag(content=LEFT_OUT)
        if page.locator("#weight").count():
            page.locator("#weight > summary").click()
        words = page.locator("#words span")
        chosen = [n for n, word in enumerate(words.all_inner_texts()) if WORD.fullmatch(word)]
        words.nth(chosen[0] if chosen else 0).click()
        page.mouse.move(0, 0)  # what is under the pointer is shown too
        shots = {name: _shot(page, parts) for name, parts in GALLERY.items() if page.locator(parts[0]).is_visible()}
        browser.close()
    return shots


def _shot(page: Any, parts: tuple[str, ...]) -> bytes:
    """The screen around some elements; what is drawn late has been drawn when the picture stays the same."""
    page.locator(parts[0]).evaluate("part => part.scrollIntoView({ block: 'start', behavior: 'instant' })")
    before, now = b"", page.screenshot()
    while now != before:
        page.wait_for_timeout(500)
        before, now = now, page.screenshot()
    boxes = [page.locator(part).bounding_box() for part in parts]
    left, top = (min(box[side] for box in boxes) - MARGIN for side in ("x", "y"))
    right = max(box["x"] + box["width"] for box in boxes) + MARGIN
    bottom = max(box["y"] + box["height"] for box in boxes) + MARGIN
    left, right = max(left, 0), min(right, SCREEN["width"])
    clip = {"x": left, "y": top, "width": right - left, "height": bottom - top}
    return bytes(page.screenshot(clip=clip))


def _stack(sources: list[Any], output: Path) -> None:
    """One picture above the other, small enough for git."""
    parts = [Image.open(path).convert("RGB") for path in sources]
    scaled = [part.resize((WIDTH, round(part.height * WIDTH / part.width)), Image.Resampling.LANCZOS) for part in parts]
    picture = Image.new("RGB", (WIDTH, sum(part.height for part in scaled)), "white")
    top = 0
    for part in scaled:
        picture.paste(part, (0, top))
        top += part.height
    output.parent.mkdir(exist_ok=True)
    picture.quantize(COLORS, kmeans=4).save(output, optimize=True)


if __name__ == "__main__":
    main()
