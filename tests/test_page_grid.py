"""The picture of tokens by layers: its cells, its one scale, its lines, and how it is pointed at and chosen from."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Opened, browser
from colours import distance, lab, linear, shade
from conftest import write_tiny_bert
from page_grid import MATRICES, colour_of, drawn, pixels, share_from_others
from page_run import choose, open_changed, save_page, tokens

import attnmix
from attnmix.core.names import CHECKPOINT_NAMES
from attnmix.core.store.runs import Run
from attnmix.page.arrays import visible

SINCE_INPUT = ("parts", "alti_rollout")
KEPT = 12  # sources of each token
ALIKE = 2.5  # the largest CIEDE2000 distance that the screen's rounding makes


def first_token(document: str) -> int:
    table = tokens()
    return int(table.index[table["document"] == document][0])


def test_shade_against_value_is_one_line_over_all_layers_models_texts_and_measures(opened: Opened) -> None:
    page = opened.page
    by_colour = defaultdict(list)
    methods = (*MATRICES, "attnres_w", "attnresln_n")
    documents = tokens()["document"].unique().tolist()
    for (number, document), method in product(enumerate(documents), methods):
        choose(page, "document", str(number))
        choose(page, "share", method)
        page.locator("#words").press("Escape")
        values = {name: share_from_others(name, document, method) for name in CHECKPOINT_NAMES}
        picture, image, start = drawn(page), pixels(page), first_token(document)
        for cell in picture["cells"]:
            if cell["layer"] > 0:
                value = values[cell["model"]][cell["layer"] - 1, cell["token"] - start]
                by_colour[colour_of(image, cell, (picture["width"], picture["height"]))].append(value)
    assert len(by_colour) > 50
    colours = sorted(by_colour, key=lambda colour: float(np.mean(by_colour[colour])))
    for colour in colours:  # a colour stands for one value
        assert np.ptp(by_colour[colour]) < 1 / 200 + 1e-3
        assert distance(lab(linear(colour)), shade(float(np.mean(by_colour[colour])))) < ALIKE
    lightness = [lab(linear(colour))[0] for colour in colours]
    assert (np.diff(lightness) < 0.2).all()  # and a larger value is never lighter
    assert max(map(max, by_colour.values())) - min(map(min, by_colour.values())) > 0.5


def test_first_screen_has_the_whole_picture_of_the_text(run: Path, chromium: Any) -> None:
    shown = Opened(chromium, Run(run).page, viewport={"width": 1280, "height": 720})
    box = shown.page.locator("#grid-canvas").bounding_box()
    assert box["y"] > 0
    assert box["x"] + box["width"] <= 1280
    assert box["y"] + box["height"] <= 720
    shown.close()


def test_pointing_shows_the_value_and_a_click_chooses_token_layer_and_model(opened: Opened) -> None:
    page = opened.page
    choose(page, "document", "0")
    values = {name: share_from_others(name, "test/0", "parts") for name in CHECKPOINT_NAMES}
    picture = drawn(page)
    for model, layer, token in (("pretrained", 2, 3), ("finetuned", 1, 5)):
        (cell,) = (
            each for each in picture["cells"] if (each["model"], each["layer"], each["token"]) == (model, layer, token)
        )
        place = {"x": cell["x"] + picture["width"] / 2, "y": cell["y"] + picture["height"] / 2}
        page.locator("#grid-canvas").hover(position=place)
        assert f"{100 * values[model][layer - 1, token]:.1f}% share from other" in page.locator(".pointed").inner_text()
        page.locator("#grid-canvas").click(position=place)
        assert page.locator("#words .chosen").get_attribute("id") == f"token-{token}"
        assert page.locator("#layer").input_value() == str(layer)
        assert page.locator("#checkpoint [aria-pressed=true]").get_attribute("value") == model
        text = page.locator("#chosen-text").inner_text()
        for name in CHECKPOINT_NAMES:
            assert f"{100 * values[name][layer - 1, token]:.1f}% {name.replace('finetuned', 'fine-tuned')}" in text
    rows = opened.values("grid")
    column = next(name for name in rows[0] if name.startswith("share"))
    assert len(rows) == 2 * values["finetuned"].size
    expected = np.concatenate([values[name].ravel() for name in CHECKPOINT_NAMES])
    assert [float(row[column]) for row in rows] == pytest.approx(expected.tolist(), abs=2e-4)


def test_arrow_keys_walk_over_tokens_layers_and_models(opened: Opened) -> None:
    page = opened.page
    choose(page, "document", "0")
    choose(page, "layer", "3")
    page.locator("#token-0").click()
    page.locator("#grid-canvas").focus()
    places = []
    for key in ("ArrowRight", "ArrowDown", "End", "ArrowUp", "ArrowUp", "Home", "ArrowDown"):
        page.keyboard.press(key)
        chosen = page.locator("#words .chosen").get_attribute("data-token")
        model = page.locator("#checkpoint [aria-pressed=true]").get_attribute("value")
        places.append((int(chosen), page.locator("#layer").input_value(), model))
    last = first_token("test/1") - 1
    assert places == [
        *((1, "3", "finetuned"), (1, "2", "finetuned"), (last, "2", "finetuned")),
        # Above the last layer of one model are the rows of the other.
        *((last, "3", "finetuned"), (last, "1", "pretrained"), (0, "1", "pretrained"), (0, "3", "finetuned")),
    ]


def expected_lines(
    document: str, checkpoint: str, token: int, layer: int, least: float, method: str
) -> dict[Any, float]:
    """Return the sources of a token, and theirs, down to the input, with their shares of its vector.

    Exact parts and rollouts are of the input alone.
    """
    matrices = np.asarray(Run(Path()).matrix(checkpoint, document, method), dtype=float)
    if method in SINCE_INPUT:
        shares = matrices[layer - 1, token] / matrices[layer - 1, token].sum()
        large = [int(source) for source in np.argsort(-shares, kind="stable")[:KEPT] if shares[source] >= least]
        return {(checkpoint, layer, 0, token, source): shares[source] for source in large}
    flows, reached = {}, {token: 1.0}
    for level in range(layer, 0, -1):
        below: dict[int, float] = defaultdict(float)
        for target, part in reached.items():
            shares = matrices[level - 1, target] / matrices[level - 1, target].sum()
            for source in np.argsort(-shares, kind="stable")[:KEPT]:
                if part * shares[source] >= least:
                    flows[checkpoint, level, level - 1, target, int(source)] = part * shares[source]
                    below[int(source)] += part * shares[source]
        reached = below
    return flows


@pytest.mark.parametrize(("method", "threshold"), [*product((*SINCE_INPUT, "alti", "value_zeroing", "norm"), (4, 20))])
def test_lines_row_and_words_show_the_sources_of_the_chosen_measure(
    opened: Opened, method: str, threshold: int
) -> None:
    page = opened.page
    choose(page, "document", "1")
    choose(page, "share", method)
    choose(page, "layer", "3")
    start = first_token("test/1")
    page.locator(f"#token-{start + 2}").click()
    choose(page, "threshold", str(threshold))
    lines = {
        (each["model"], each["layer"], each["below"], each["to"] - start, each["from"] - start): each["share"]
        for each in drawn(page)["flows"]
    }
    expected = {}
    for name in CHECKPOINT_NAMES:
        expected |= expected_lines("test/1", name, 2, 3, threshold / 100, method)
    near = {key for key, share in expected.items() if abs(share - threshold / 100) < 1e-3}
    assert set(lines) - near == set(expected) - near
    layers = {(layer, below) for _, layer, below, _, _ in lines}
    assert layers <= ({(3, 0)} if method in SINCE_INPUT else {(3, 2), (2, 1), (1, 0)})
    assert threshold > 4 or method == "norm" or len(layers) == (1 if method in SINCE_INPUT else 3)
    for key in set(lines) & set(expected):
        assert lines[key] == pytest.approx(expected[key], abs=1e-3)
    legend = page.locator("#sources-text").inner_text()
    assert ("straight lines" in legend) == (method in SINCE_INPUT)
    assert page.locator("#share option:checked").inner_text().removesuffix(" since the input").lower() in legend.lower()
    matrix = np.asarray(Run(Path()).matrix("finetuned", "test/1", method), dtype=float)[2, 2]
    matrix = np.delete(matrix / matrix.sum(), 2)
    _, text = page.locator("#chosen-text").inner_text().split(", fine-tuned, are ")
    assert float(re.findall(r"([\d.]+)%", text)[0]) == pytest.approx(100 * matrix.max(), abs=0.06)
    assert ("in the input" if method in SINCE_INPUT else "in the layer below") in page.locator(
        "#chosen-text"
    ).inner_text()


def test_names_of_the_strongest_sources_have_room_first(run: Path, chromium: Any) -> None:
    shown = Opened(chromium, Run(run).page, viewport={"width": 390, "height": 844})
    page = shown.page
    choose(page, "document", "0")
    page.locator("#token-14").click()
    matrix = np.asarray(Run(Path()).matrix("finetuned", "test/0", "parts"), dtype=float)
    layer = int(page.locator("#layer").input_value())
    order = np.argsort(-matrix[layer - 1, 14], kind="stable")
    strongest = next(int(source) for source in order if abs(source - 14) > 1)
    canvas = "document.getElementById('grid-canvas')"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    named = page.evaluate(f"[...{canvas}.shapes().querySelectorAll('text')].map(each => each.textContent)")
    names = tokens().query("document == 'test/0'")["token"].map(lambda name: visible(name, kept=""))
    for token in (14, strongest):
        name = names[token]
        assert (name if len(name) <= 13 else f"{name[:12]}…") in [each.removeprefix("◆ ") for each in named]
    shown.close()


def test_ratio_of_one_layer_names_no_sources(opened: Opened) -> None:
    page = opened.page
    page.locator("#token-3").click()
    choose(page, "share", "attnresln_n")
    assert drawn(page)["flows"] == []
    assert "largest sources" not in page.locator("#chosen-text").inner_text()
    assert "names no sources" in page.locator("#sources-text").inner_text()
    explained = page.locator("#grid-legend [role=tooltip]").text_content()
    assert "The ratio describes one layer and not all" in explained
    assert "Here it is the mean over" not in explained  # which is not so of a single text
    assert (
        "Here it is the mean over"
        in page.locator("#layers [role=tooltip]", has_text="The ratio describes one layer").text_content()
    )


def test_what_was_pointed_at_is_gone_with_its_text(opened: Opened) -> None:
    page = opened.page
    choose(page, "document", "0")
    page.locator("#grid-canvas").hover(position={"x": 20, "y": 60})
    assert page.locator(".pointed").count() == 1
    page.evaluate("""() => {
        const select = document.getElementById("document");
        select.value = "1";
        select.dispatchEvent(new Event("change", { bubbles: true }));
    }""")
    page.wait_for_function("() => !document.querySelector('.pointed')")


@pytest.mark.parametrize("width", [400, 1280])
def test_picture_and_heads_fit_or_show_that_there_is_more(run: Path, chromium: Any, width: int) -> None:
    shown = Opened(chromium, Run(run).page, viewport={"width": width, "height": 720})
    page = shown.page
    choose(page, "document", "2")
    for token in (page.locator("#words span").first, page.locator("#words span").last):
        token.click()
        page.wait_for_timeout(100)
        for box in page.locator(".more").all():
            more = box.get_attribute("data-more").split()
            left, right = box.locator(".scroll").evaluate(
                "box => [box.scrollLeft, box.scrollWidth - box.clientWidth - box.scrollLeft]"
            )
            assert ("left" in more, "right" in more) == (left > 1, right > 1)
            for side, pseudo in (("left", "::before"), ("right", "::after")):
                display = box.evaluate(f"box => getComputedStyle(box, '{pseudo}').display")
                assert (display == "block") == (side in more)
        number = int(token.get_attribute("data-token"))
        picture = drawn(page)
        cell = next(each for each in picture["cells"] if each["token"] == number)
        canvas, frame = (page.locator(name).bounding_box() for name in ("#grid-canvas", ".grid-box"))
        assert frame["x"] + 40 <= canvas["x"] + cell["x"]
        assert canvas["x"] + cell["x"] + picture["width"] <= frame["x"] + frame["width"] + 1
    shown.close()


def test_picture_of_24_layers_and_64_heads_is_whole(tmp_path: Path, chromium: Any) -> None:
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


def test_row_of_the_input_says_what_the_chosen_vector_is_made_of(opened: Opened) -> None:
    page = opened.page
    choose(page, "document", "1")
    choose(page, "layer", "2")
    start = first_token("test/1")
    page.locator(f"#token-{start + 2}").click()
    table = Run(Path()).tokens.query("document == 'test/1'")["token"].tolist()
    _, *sentences = page.locator("#chosen-text").inner_text().split("The largest sources")
    assert len(sentences) == len(CHECKPOINT_NAMES)
    for checkpoint, sentence in zip(CHECKPOINT_NAMES, sentences, strict=True):
        shares = np.asarray(Run(Path()).matrix(checkpoint, "test/1", "parts"), dtype=float)[1, 2]
        assert shares.sum() == pytest.approx(1, abs=1e-5)
        largest = [source for source in np.argsort(-shares, kind="stable") if source != 2][:4]
        found = [float(each) for each in re.findall(r"([\d.]+)%", sentence)]
        assert found == pytest.approx((100 * shares[largest]).tolist(), abs=0.06)
        names = [table[source] + (f" ({source})" if table.count(table[source]) > 1 else "") for source in largest]
        assert all(f" {name} " in sentence for name in names)


def test_stretched_colours_are_named_in_the_legend(opened: Opened) -> None:
    page = opened.page
    choose(page, "document", "0")
    assert "one scale for all layers, models and texts" in page.locator("#grid-legend").inner_text()
    page.get_by_label("Stretch colours").check()
    values = np.concatenate([share_from_others(name, "test/0", "parts") for name in CHECKPOINT_NAMES])
    legend = page.locator("#grid-legend").inner_text()
    assert "stretched to what this picture shows" in legend
    assert [float(each) for each in re.findall(r"([\d.]+)%", legend)] == pytest.approx(
        [100 * values.min(), 100 * values.max()], abs=0.06
    )
    assert page.locator("#text-legend").inner_text().startswith(legend.partition("share")[0].strip()[:4])


def test_text_too_long_for_parts_says_so_and_another_share_is_shown(
    copied: Path, chromium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for checkpoint in CHECKPOINT_NAMES:
        shutil.rmtree(Run(Path()).inspected / "contributions" / checkpoint / "test_0" / "parts.zarr")
    monkeypatch.setattr("attnmix.page.payload.MAX_PARTS_TOKENS", 5)
    shown = open_changed(chromium)
    choose(shown.page, "document", "0")
    note = shown.page.locator("#parts-note").inner_text()
    length = (tokens()["document"] == "test/0").sum()
    assert f"{length} tokens" in note
    assert "at most 5" in note
    assert "Choose another share" in note
    choose(shown.page, "share", "alti")
    assert "Choose another share" not in shown.page.locator("#parts-note").inner_text()
    choose(shown.page, "document", "1")
    assert shown.page.locator("#parts-note").count() == 0
    shown.close()


@pytest.mark.long
def test_picture_is_drawn_in_firefox(run: Path) -> None:
    with browser("firefox") as firefox:
        shown = Opened(firefox, Run(run).page, viewport={"width": 1280, "height": 720})
        assert len(drawn(shown.page)["cells"]) > 0
        shown.close()
