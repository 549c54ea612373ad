"""The static picture shows the right cells, means and names, and pages show it if scripts are disabled."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import LIMIT_MILLISECONDS
from colours import distance, lab, linear, shade
from page_run import HOSTILE
from PIL import Image

from attnmix.core.names import OWN_SHARE
from attnmix.core.store.runs import Run
from attnmix.page.static_picture import AFTER, BEFORE, COLOUR_STEPS, ModelShares, draw_own_shares

SVG = "{http://www.w3.org/2000/svg}"
LAYERS, TOKENS = 3, 7
ALIKE = 2.5  # CIEDE2000 difference due to one colour step and the screen's rounding


def draw(tokens: list[str], models: list[ModelShares]) -> Any:
    """Return the root element of the picture."""
    return ElementTree.fromstring(draw_own_shares(tokens, models))


def shares(seed: int) -> Any:
    """Return random own shares `[LAYERS, TOKENS]`."""
    values = np.random.default_rng(seed).random((LAYERS, TOKENS))
    values[:, 0] = np.nan  # as for special tokens
    return values


def cells(root: Any) -> dict[tuple[float, float], float]:
    """Return a dictionary from the position of each cell's corner to the share that the cell's colour encodes.

    Shares below 0.5 are drawn in a mixture of the colours of 0 and 0.5 (`--m`), and larger shares in a mixture of the
    colours of 0.5 and 1 (`--e`). The percentage of `--m` is 200 * share, and that of `--e` is 200 * (share - 0.5).
    """
    found = {}
    for path in root.iter(f"{SVG}path"):
        mixed = re.search(r"var\(--([me])\) (\d+)%", path.get("style", ""))
        if mixed is None:
            continue
        colour, percentage = mixed.groups()
        share = int(percentage) / 200
        if colour == "e":
            share += 0.5
        for x, y in re.findall(r"M([\d.]+),([\d.]+)h", path.get("d")):
            found[float(x), float(y)] = share
    return found


def test_cell_colours_match_shares() -> None:
    models = [ModelShares("Before", shares(1)), ModelShares("After", shares(2))]
    found = cells(draw([f"token{n}" for n in range(TOKENS)], models))
    columns = sorted({x for x, _ in found})
    rows = sorted({y for _, y in found})
    assert (len(columns), len(rows)) == (TOKENS - 1, 2 * LAYERS)
    for number, model in enumerate(models):
        for layer in range(LAYERS):
            row = rows[number * LAYERS + LAYERS - 1 - layer]  # the last layer is on top
            drawn = [found[x, row] for x in columns]
            assert drawn == pytest.approx(model.shares_LT[layer, 1:], abs=0.5 / COLOUR_STEPS + 1e-9)


def test_means_have_colours_without_css() -> None:
    corpus = {"values": [0.9, 0.8, 0.1], "low": [0.85, 0.75, 0.05], "high": [0.95, 0.85, 0.15]}
    models = [ModelShares("Before", shares(1), corpus), ModelShares("After", shares(2), corpus)]
    groups = list(draw(["a"] * TOKENS, models).iter(f"{SVG}g"))
    assert [group.get("fill") for group in groups] == [BEFORE.light, AFTER.light]
    for group in groups:
        _, curve = group.iter(f"{SVG}path")
        assert curve.get("stroke") == group.get("fill")
        assert all(each.get("fill") is None for tag in ("circle", "text") for each in group.iter(f"{SVG}{tag}"))


def test_means_are_next_to_their_layers() -> None:
    values = shares(3)
    corpus = {"values": [0.9, 0.5, 0.25], "low": [0.8, 0.4, 0.2], "high": [1.0, 0.6, 0.3]}
    root = draw(["a"] * TOKENS, [ModelShares("After", values, corpus)])
    circles = [(float(each.get("cx")), float(each.get("cy"))) for each in root.iter(f"{SVG}circle")][:LAYERS]
    (first, _), (second, _), (third, _) = circles  # horizontal positions of 0.9, 0.5 and 0.25
    width = (first - third) / (0.9 - 0.25)
    assert second == pytest.approx(third + width * 0.25, abs=0.1)
    tops = sorted({y for _, y in cells(root)}, reverse=True)
    assert all(top < y < top + 30 for top, (_, y) in zip(tops, circles, strict=True))
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert "25%" in texts  # mean of the last layer
    assert f"{100 * np.nanmean(values[-1]):.0f}%" in texts
    plain = draw(["a"] * TOKENS, [ModelShares("After", values)])
    assert list(plain.iter(f"{SVG}circle")) == []


def test_names_are_escaped_and_long_texts_are_truncated() -> None:
    names = [f"{name}<b>" for name in HOSTILE[:TOKENS]]
    root = draw(names, [ModelShares("<i>", shares(4))])
    assert {each.tag for each in root.iter()} <= {f"{SVG}{tag}" for tag in ("svg", "g", "path", "text", "circle")}
    long = np.full((LAYERS, 200), 0.5)
    root = draw(["word"] * 200, [ModelShares("", long)])
    columns = len({x for x, _ in cells(root)})
    assert columns < 80
    assert root.get("aria-label").endswith(f"the first {columns} of 200 tokens")


def test_page_without_script_shows_headline_and_picture(run: Path, chromium: Any) -> None:
    page_file = Run(run).page
    context = chromium.new_context(java_script_enabled=False, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(LIMIT_MILLISECONDS)
    page.goto(page_file.resolve().as_uri())
    assert "Own share" in page.locator("h1").inner_text()
    assert page.locator(".lead li").count() > 0
    name = page.locator("#answer h2 bdi").inner_text()
    ratios = Run(run).captured_ratios([name]).query("checkpoint == 'finetuned'")
    expected = ratios.pivot(index="layer", columns="position", values=OWN_SHARE).to_numpy(float)
    picture = page.locator("svg.own-shares")
    drawn = picture.evaluate("each => new XMLSerializer().serializeToString(each)")  # includes the namespace
    found = cells(ElementTree.fromstring(drawn))
    with Image.open(io.BytesIO(picture.screenshot(scale="css"))) as image:
        pixels = np.asarray(image.convert("RGB"))
    rows = sorted({y for _, y in found})[-len(expected) :]
    columns = sorted({x for x, _ in found})
    positions = np.flatnonzero(np.isfinite(expected).any(axis=0))  # special tokens have no shares
    for layer, row in enumerate(reversed(rows)):
        for position, column in zip(positions, columns, strict=True):
            red, green, blue = (int(each) for each in pixels[round(row + 6), round(column + 4)])  # inside the cell
            colour = lab(linear(f"#{red:02x}{green:02x}{blue:02x}"))
            assert distance(colour, shade(expected[layer, position])) < ALIKE
    context.close()


def test_script_replaces_static_picture(opened: Any) -> None:
    assert opened.page.locator("svg.own-shares").count() == 0
    assert opened.page.locator("#answer").count() == 1
