"""Draw the pictures in the README and in docs/, from the figures and the page of the last run.

    python -m docs.pictures

`docs/page.gif` shows how a word and then different layers are selected in the picture of tokens by layers. Websites
show `docs/social_card.png` beside links to the repository.

Pictures of figures are reproducible byte by byte. Pictures of the page are screenshots taken by an installed Chromium;
they require the packages of the tests.
"""

from __future__ import annotations

import base64
import io
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from attnmix.core.errors import InputError
from attnmix.core.store.files import require_output
from attnmix.core.store.runs import Run
from attnmix.models.families import FAMILIES

DOCS = Path("docs")
RUN = Run(Path())
WIDTH = 1100  # pixels
COLORS = 256
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCREEN = {"width": 1200, "height": 1500}
SHARPER = 2  # picture pixels per screen pixel
MARGIN = 6  # screen pixels
GALLERY = {
    "answer": ("#headline", "#grid > .title", "#grid .grid", "#chosen-text"),
    "text": ("#text h3", "#text .reader"),
    "heads": ("#heads h3", "#heads .heads"),
    "neuron": ("#weights h3", "#weight-rows"),
    "map": ("#map-pane h3", "#map-canvas"),
}
"""The names of the page's pictures, and the CSS selectors of the elements in each picture."""
# This style hides elements that would cover a pane or be cut off by the edge of the picture.
LEFT_OUT = """#bar { position: static !important; }
.files, #map aside { display: none !important; }
.side { grid-template-columns: minmax(0, 1fr) !important; }"""
MOTION_SCREEN = {"width": 1100, "height": 640}  # in a lower window, the bar is not sticky
BAR_PIXELS = 62  # height of the sticky bar with the slider
MOTION_COLORS = 96
MOTION_LAYERS = 6  # maximum number of equally spaced layers
SHORT_MS, LONG_MS = 800, 1400  # durations of frames: one layer; the first and the last frame
CARD_SCREEN = {"width": 1280, "height": 640}
CARD = """<!DOCTYPE html><meta charset="utf-8"><style>
* {{ margin: 0; box-sizing: border-box }}
body {{ padding: 40px 64px; font-family: Arimo, system-ui, sans-serif; color: #1b1b1b; background: #fff }}
h1 {{ font-size: 50px }} p {{ font-size: 27px; margin: 8px 0 18px; line-height: 1.3 }} img {{ width: 100% }}
</style><h1>attnmix</h1>
<p>How much of the vector of a word comes from other words?<br>
Mixing ratios, ALTI, Value Zeroing, rollouts for {families} families of Transformers</p>
<img alt="" src="data:image/png;base64,{picture}">"""
WORD = re.compile(r"[^\W\d_]{6,}")  # the page's first word with a match is selected, instead of "the" or "."


def main() -> None:
    """Write all pictures."""
    require_output(RUN.figures, "render")
    _stack([RUN.figures / "mixing_by_layer.png"], DOCS / "result.png")
    _stack([RUN.figures / "mixing_steps.png"], DOCS / "steps.png")
    _stack([RUN.figures / "mixing_reviews.png"], DOCS / "reviews.png")
    _stack([RUN.figures / "own_share.png"], DOCS / "own_share.png")
    with _browser() as browser:
        for name, shot in _gallery_shots(browser).items():
            _stack([io.BytesIO(shot)], DOCS / f"gallery_{name}.png")
        _animate(_in_motion(browser), DOCS / "page.gif")
        page = browser.new_page(viewport=CARD_SCREEN)
        picture = base64.b64encode(_card_picture(browser)).decode("ascii")
        page.set_content(CARD.format(families=len(FAMILIES), picture=picture))
        card = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        card.quantize(COLORS, kmeans=4).save(DOCS / "social_card.png", optimize=True)


@contextmanager
def _browser() -> Iterator[Any]:
    """Start a Chromium that is installed on this machine, and yield it."""
    from playwright.sync_api import sync_playwright

    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        raise InputError(f"no browser for the pictures of {RUN.page}: install one of {', '.join(BROWSERS)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def _open(browser: Any, screen: dict[str, int], sharper: float) -> Any:
    """Return the completely drawn page of the last run, in a browser window of the size `screen`."""
    looks = {"color_scheme": "light", "reduced_motion": "reduce", "device_scale_factor": sharper}
    page = browser.new_page(viewport=screen, **looks)
    page.goto(require_output(RUN.page, "render").resolve().as_uri())
    page.wait_for_selector("html[data-whole]", state="attached")
    return page


def _card_picture(browser: Any) -> bytes:
    """Return a screenshot of the picture of tokens by layers before anything is selected."""
    page = _open(browser, CARD_SCREEN | {"width": SCREEN["width"]}, SHARPER)
    page.add_style_tag(content="#grid { visibility: hidden } #grid .grid { visibility: visible }")
    picture = _shot(page, ("#grid .grid",))
    page.close()
    return picture


def _in_motion(browser: Any) -> list[bytes]:
    """Return screenshots of the page while a word and then up to `MOTION_LAYERS` layers are selected."""
    page = _open(browser, MOTION_SCREEN, 1)
    slider = page.locator("label").filter(has_text=re.compile(r"^\s*Layer")).get_by_role("slider").first
    words = page.get_by_role("listbox", name="Tokens of the text").get_by_role("option")
    layers = _choose_layers(last=int(slider.get_attribute("max")))
    # The first screenshot shows the first layer without a selected word.
    slider.fill(str(layers[0]))
    word = _find_first_word(words.all_inner_texts())
    page.keyboard.press("Escape")  # deselects the word that is selected initially
    _scroll_below_bar(page)
    pictures = [_still(page)]
    # The other screenshots show the selected word in each layer.
    words.nth(word).click()
    page.mouse.move(0, 0)  # avoids hover effects
    for layer in layers:
        slider.fill(str(layer))
        _scroll_below_bar(page)
        pictures.append(_still(page))
    page.close()
    return pictures


def _choose_layers(last: int) -> list[int]:
    """Return at most `MOTION_LAYERS` equally spaced layers from 1 to `last`."""
    layers = set()
    for place in range(MOTION_LAYERS):
        layer = 1 + place * (last - 1) / (MOTION_LAYERS - 1)
        layers.add(round(layer))
    return sorted(layers)  # without duplicates, if there are fewer layers


def _find_first_word(texts: list[str]) -> int:
    """Return the index of the first text that matches `WORD`; 0 if there is none."""
    for index, text in enumerate(texts):
        if WORD.fullmatch(text):
            return index
    return 0


def _scroll_below_bar(page: Any) -> None:
    """Scroll the picture of tokens by layers to a position directly below the sticky bar."""
    distance = f"picture.getBoundingClientRect().top - {BAR_PIXELS}"
    page.locator("#grid").evaluate(f"picture => window.scrollBy({{ top: {distance}, behavior: 'instant' }})")


def _animate(pictures: list[bytes], output: Path) -> None:
    """Write the pictures as a GIF with the palette of the last picture, to avoid flicker."""
    frames = [Image.open(io.BytesIO(each)).convert("RGB") for each in pictures]
    palette = frames[-1].quantize(MOTION_COLORS, kmeans=4)
    first, *others = (each.quantize(palette=palette, dither=Image.Dither.NONE) for each in frames)
    durations = [LONG_MS, *[SHORT_MS] * (len(others) - 1), LONG_MS]
    first.save(output, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)


def _still(page: Any) -> bytes:
    """Return a screenshot of the page after the page has stopped changing, so that delayed drawing is included."""
    before, now = b"", page.screenshot()
    while now != before:
        page.wait_for_timeout(500)
        before, now = now, page.screenshot()
    return bytes(now)


def _gallery_shots(browser: Any) -> dict[str, bytes]:
    """Return screenshots of the panes in `GALLERY` that exist on the page, with a selected word."""
    page = _open(browser, SCREEN, SHARPER)
    page.add_style_tag(content=LEFT_OUT)
    if page.locator("#weight").count():
        page.locator("#weight > summary").click()
    words = page.locator("#words span")
    word = _find_first_word(words.all_inner_texts())
    words.nth(word).click()
    page.mouse.move(0, 0)  # avoids hover effects
    shots = {}
    for name, parts in GALLERY.items():
        if page.locator(parts[0]).is_visible():
            shots[name] = _shot(page, parts)
    page.close()
    return shots


def _shot(page: Any, parts: tuple[str, ...]) -> bytes:
    """Return a screenshot of the area that contains the elements with the selectors `parts`."""
    page.locator(parts[0]).evaluate("part => part.scrollIntoView({ block: 'start', behavior: 'instant' })")
    _still(page)
    boxes = [page.locator(part).bounding_box() for part in parts]
    top = min(box["y"] for box in boxes) - MARGIN
    bottom = max(box["y"] + box["height"] for box in boxes) + MARGIN
    left = min(box["x"] for box in boxes) - MARGIN
    right = max(box["x"] + box["width"] for box in boxes) + MARGIN
    # The margins must not extend beyond the screen.
    left = max(left, 0)
    right = min(right, SCREEN["width"])
    clip = {"x": left, "y": top, "width": right - left, "height": bottom - top}
    return bytes(page.screenshot(clip=clip))


def _stack(sources: list[Any], output: Path) -> None:
    """Stack pictures vertically, and write the result with a file size that is suitable for git."""
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
