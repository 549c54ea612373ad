"""The picture of tokens by layers shows the values in the files, and supports selection by pointer and keyboard."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Opened
from colours import distance, lab, linear, shade
from conftest import write_tiny_bert
from page_grid import colour_of, displayed_values, drawn, pixels
from page_run import choose, save_page, tokens

import attnmix
from attnmix.core.names import CHECKPOINT_NAMES
from attnmix.core.store.runs import Run

ALIKE = 2.5  # the largest CIEDE2000 distance due to rounding on the screen


def first_token(document: str) -> int:
    table = tokens()
    return int(table.index[table["document"] == document][0])


@pytest.mark.parametrize("method", ["parts", "attnresln_n"])
def test_cell_colours_match_file_values(opened: Opened, method: str) -> None:
    page = opened.page
    choose(page, "document", "1")
    choose(page, "share", method)
    page.locator("#words").press("Escape")
    values = {name: displayed_values(name, "test/1", method) for name in CHECKPOINT_NAMES}
    picture, image, start = drawn(page), pixels(page), first_token("test/1")
    cells = [cell for cell in picture["cells"] if cell["layer"] > 0]
    assert len(cells) == 2 * values["finetuned"].size
    for cell in cells:
        value = values[cell["model"]][cell["layer"] - 1, cell["token"] - start]
        colour = colour_of(image, cell, (picture["width"], picture["height"]))
        assert distance(lab(linear(colour)), shade(value)) < ALIKE


def test_pointer_shows_values_and_click_selects(opened: Opened) -> None:
    page = opened.page
    choose(page, "document", "0")
    choose(page, "share", "parts")
    values = {name: displayed_values(name, "test/0", "parts") for name in CHECKPOINT_NAMES}
    picture = drawn(page)
    for model, layer, token in (("pretrained", 2, 3), ("finetuned", 1, 5)):
        (cell,) = (
            each for each in picture["cells"] if (each["model"], each["layer"], each["token"]) == (model, layer, token)
        )
        centre = {"x": cell["x"] + picture["width"] / 2, "y": cell["y"] + picture["height"] / 2}
        page.locator("#grid-canvas").hover(position=centre)
        assert f": own share {100 * values[model][layer - 1, token]:.1f}%" in page.locator(".pointed").inner_text()
        page.locator("#grid-canvas").click(position=centre)
        assert page.locator("#words .chosen").get_attribute("id") == f"token-{token}"
        assert page.locator("#layer").input_value() == str(layer)
        assert page.locator("#checkpoint [aria-pressed=true]").get_attribute("value") == model
        text = page.locator("#chosen-text").inner_text()
        for name in CHECKPOINT_NAMES:
            assert f"{100 * values[name][layer - 1, token]:.1f}% {name.replace('finetuned', 'fine-tuned')}" in text
    rows = opened.values("grid")
    column = next(name for name in rows[0] if name.startswith("own share"))
    assert len(rows) == 2 * values["finetuned"].size
    expected = np.concatenate([values[name].ravel() for name in CHECKPOINT_NAMES])
    assert [float(row[column]) for row in rows] == pytest.approx(expected.tolist(), abs=2e-4)
    page.locator("#grid-canvas").hover(position=centre)
    page.evaluate("""() => {
        const select = document.getElementById("document");
        select.value = "1";
        select.dispatchEvent(new Event("change", { bubbles: true }));
    }""")
    page.wait_for_function("() => !document.querySelector('.pointed')")  # the previous text's values disappear


def test_arrow_keys_move_over_tokens_layers_and_models(opened: Opened) -> None:
    page = opened.page
    choose(page, "document", "0")
    choose(page, "layer", "3")
    page.locator("#token-0").click()
    page.locator("#grid-canvas").focus()
    selections = []
    for key in ("ArrowRight", "ArrowDown", "End", "ArrowUp", "ArrowUp", "Home", "ArrowDown"):
        page.keyboard.press(key)
        chosen = page.locator("#words .chosen").get_attribute("data-token")
        model = page.locator("#checkpoint [aria-pressed=true]").get_attribute("value")
        selections.append((int(chosen), page.locator("#layer").input_value(), model))
    last = first_token("test/1") - 1
    assert selections == [
        *((1, "3", "finetuned"), (1, "2", "finetuned"), (last, "2", "finetuned")),
        # The rows of the second model follow the last layer of the first model.
        *((last, "3", "finetuned"), (last, "1", "pretrained"), (0, "1", "pretrained"), (0, "3", "finetuned")),
    ]


@pytest.mark.parametrize("action", ["key", "click"])
def test_tooltip_of_a_cell_disappears_after_a_selection(opened: Opened, action: str) -> None:
    page = opened.page
    page.locator("#grid-canvas").click()
    place = [page.locator("#grid-canvas").bounding_box()[side] + 60 for side in "xy"]
    page.mouse.move(*place)
    page.locator(".pointed").wait_for()
    if action == "key":
        page.keyboard.press("ArrowRight")
    else:
        page.mouse.click(*place)
    page.wait_for_function("() => !document.querySelector('.pointed')")


def test_explanations_follow_the_measure(opened: Opened) -> None:
    page = opened.page
    choose(page, "document", "0")
    page.locator("#token-3").click()
    sources = page.locator("#sources-text")
    choose(page, "share", "alti_rollout")
    assert "by ALTI rollout" in sources.inner_text()
    assert "the strength of the orange is the square root of a source's share" in sources.inner_text()
    assert "straight lines lead to the sources with 2% or more" in sources.inner_text()
    choose(page, "share", "alti")
    assert "Lines lead to its sources in the layer below" in sources.inner_text()
    choose(page, "share", "attnresln_n")
    assert "has no sources" in sources.inner_text()
    explained = page.locator("#grid-legend [role=tooltip]").text_content()
    assert "describes one layer, not all layers since the input" in explained
    assert "Here it is the mean over" not in explained  # the picture shows a single text
    chart = page.locator("#layers [role=tooltip]", has_text="describes one layer, not all")
    assert "Here it is the mean over" in chart.text_content()
    choose(page, "share", "own_share")
    for place in ("#sources-text", "#chosen-text", "#text-legend", "#bar-measure"):
        assert "exact parts since the input" in page.locator(place).inner_text().lower(), place
        explained = page.locator(f"{place} [role=tooltip]").all_text_contents()
        assert explained
        assert all(each.startswith("Exact parts decompose a vector into a sum") for each in explained), place
    choose(page, "share", "parts")
    legend = page.locator("#grid-legend")
    assert "one scale for all" in legend.inner_text()
    page.get_by_label("Stretch colours").check()
    values = np.concatenate([displayed_values(name, "test/0", "parts") for name in CHECKPOINT_NAMES])
    assert "stretched to the values in this picture" in legend.inner_text()
    ends = [float(each) for each in re.findall(r"([\d.]+)%", legend.inner_text())]
    assert ends == pytest.approx([100 * values.min(), 100 * values.max()], abs=0.06)
    lowest = legend.inner_text().partition("own share")[0].strip()[:4]  # the first characters of the lower end
    assert page.locator("#text-legend").inner_text().startswith(lowest)


MORE = """box => {
  const scroll = box.querySelector(".scroll");
  const [left, right] = [scroll.scrollLeft, scroll.scrollWidth - scroll.clientWidth - scroll.scrollLeft];
  const isShown = (pseudo) => getComputedStyle(box, pseudo).display === "block";
  return [[left > 1, right > 1], [isShown("::before"), isShown("::after")]];
}"""
"""Function that returns whether a box hides content on the left and right, and whether the box indicates this."""


def test_picture_and_heads_indicate_overflow(run: Path, tab: Any) -> None:
    page = tab(Run(run).page, width=400, height=720).page
    choose(page, "document", "2")
    for width, token in product((400, 1280), (page.locator("#words span").first, page.locator("#words span").last)):
        page.set_viewport_size({"width": width, "height": 720})
        token.click()
        page.wait_for_function(
            f"() => [...document.querySelectorAll('.more')].map({MORE}).every(([a, b]) => `${{a}}` === `${{b}}`)"
        )
        overflows = [hidden for hidden, _ in page.locator(".more").evaluate_all(f"all => all.map({MORE})")]
        assert any(is_left or is_right for is_left, is_right in overflows) == (width == 400)
        number = int(token.get_attribute("data-token"))
        picture = drawn(page)
        cell = next(each for each in picture["cells"] if each["token"] == number)
        canvas, frame = (page.locator(name).bounding_box() for name in ("#grid-canvas", ".grid-box"))
        assert frame["x"] + 40 <= canvas["x"] + cell["x"]
        assert canvas["x"] + cell["x"] + picture["width"] <= frame["x"] + frame["width"] + 1


@pytest.mark.long
def test_picture_of_24_layers_and_64_heads_is_complete(tmp_path: Path, chromium: Any) -> None:
    write_tiny_bert(tmp_path / "model", layers=24, hidden_size=128, num_attention_heads=64)
    result = attnmix.measure(attnmix.load(str(tmp_path / "model")), "the film was good .")
    shown = Opened(chromium, save_page(result, tmp_path), viewport={"width": 1280, "height": 1600})
    page = shown.page
    choose(page, "layer", "12")
    picture = drawn(page)
    assert {cell["layer"] for cell in picture["cells"]} == set(range(25))
    frame = page.locator(".grid-box").bounding_box()
    canvas = page.locator("#grid-canvas").bounding_box()
    assert canvas["y"] + canvas["height"] <= frame["y"] + frame["height"] + 1
    assert page.locator("#heads-all button").count() == 24 * 64
    shown.close()
