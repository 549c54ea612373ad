"""The view Text: one measure for shades and sources, in numbers of the files; models, their difference, importance."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Opened
from page_run import choose, open_changed, tokens

from attnmix.figures.labels import MATRIX_LABELS
from attnmix.page.arrays import visible
from attnmix.store.heads import weights
from attnmix.store.runs import Run


def test_words_are_found_and_enter_goes_to_the_next(opened: Opened) -> None:
    page = opened.page
    of_text = tokens().query("document == 'test/0'")["token"]
    sought = of_text.value_counts().index[0]
    places = of_text.index[of_text.str.contains(sought, regex=False)].tolist()
    assert len(places) > 1
    page.locator("#find").fill(f" {sought.upper()} ")
    found = page.locator("#words span.found")
    assert found.evaluate_all("all => all.map(each => each.id)") == [f"token-{place}" for place in places]
    assert page.locator("#found").inner_text() == f"{len(places)} found"
    for place in (*places, places[0]):
        page.locator("#find").press("Enter")
        assert page.locator("#words span[aria-selected=true]").get_attribute("id") == f"token-{place}"
    choose(page, "document", "1")
    others = tokens().query("document == 'test/1'")["token"]
    assert found.count() == others.str.contains(sought, regex=False).sum()
    page.locator("#find").fill("")
    assert (found.count(), page.locator("#found").inner_text()) == (0, "")


def test_words_are_shaded_over_the_usual_ratios_of_the_layer(opened: Opened) -> None:
    page = opened.page
    choose(page, "layer", "2")
    choose(page, "shade", "ratio")
    ratios = Run(Path()).captured_ratios(tokens()["document"].unique().tolist())
    of_layer = ratios.query("checkpoint == 'finetuned' and layer == 2")["attnresln_n"].sort_values().to_numpy()
    low, high = of_layer[int(0.05 * (len(of_layer) - 1))], of_layer[int(np.ceil(0.95 * (len(of_layer) - 1)))]
    legend = page.locator("#text-legend").inner_text()
    assert f"{100 * low:.0f} % or less" in legend
    assert f"{100 * high:.0f} % or more" in legend
    own = ratios.query("checkpoint == 'finetuned' and layer == 2 and document == 'test/0'")["attnresln_n"].to_numpy()
    shades = page.locator("#words span").evaluate_all("all => all.map(each => each.style.backgroundColor)")
    drawn = [float(re.search(r"([\d.]+)\)", shade)[1]) for shade in shades]
    assert drawn == pytest.approx((0.68 * np.clip((own - low) / (high - low), 0, 1)).tolist(), abs=0.01)


def test_words_are_walked_with_the_keyboard(opened: Opened) -> None:
    page = opened.page
    page.locator("#words").focus()
    for key, token in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("End", None)):
        page.keyboard.press(key)
        if token is not None:
            assert page.locator("#words").get_attribute("aria-activedescendant") == f"token-{token}"
    last = tokens().query("document == 'test/0'").index[-1]
    assert page.locator("#words").get_attribute("aria-activedescendant") == f"token-{last}"
    page.keyboard.press("Escape")
    assert page.locator("#words span[aria-selected=true]").count() == 0
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize("method", ["alti", "attention", "value_zeroing", "norm"])
def test_sources_are_those_of_the_contribution_matrix(opened: Opened, method: str) -> None:
    page = opened.page
    choose(page, "matrix", method)
    choose(page, "layer", "2")
    page.locator("#token-3").click()
    row = np.asarray(Run(Path()).matrix("finetuned", "test/0", method)[1, 3], dtype=float)
    row = row / row.sum()
    said = re.search(r"kept (\d+) % itself, (\d+) % from others", page.locator("#kept").inner_text())
    assert [float(each) for each in said.groups()] == pytest.approx([100 * row[3], 100 * (1 - row[3])], abs=0.51)
    legend = page.locator("#text-legend").inner_text()
    assert legend.startswith(f"By {MATRIX_LABELS[method]}, fine-tuned:\nshare from others")
    assert page.locator("#token-3").get_attribute("title").endswith(f"share from others {said[2]} %")
    row[3] = 0
    listed = page.locator("#sources li").all_inner_texts()
    assert float(listed[0].split("\n")[-1].removesuffix(" %")) == pytest.approx(100 * row.max(), abs=1)
    assert visible(tokens()["token"][int(row.argmax())]) in listed[0]


def test_attention_can_be_read_by_head(opened: Opened) -> None:
    page = opened.page
    choose(page, "matrix", "attention")
    choose(page, "layer", "1")
    assert page.locator("#head option").count() == 1 + 4
    choose(page, "head", "2")
    page.locator("#token-1").click()
    row = weights(Run(Path()).heads("finetuned", "test/0"), 0, 2)[1]
    largest = np.delete(row, 1).max() / row.sum()
    first = page.locator("#sources li").first.inner_text()
    assert float(first.split("\n")[-1].removesuffix(" %")) == pytest.approx(100 * largest, abs=1)
    choose(page, "matrix", "alti")
    assert page.locator("#head").is_hidden()


def test_page_without_contribution_matrices_names_the_parameter(copied: Path, chromium: Any) -> None:
    shutil.rmtree(Run(Path()).measured / "contributions")
    shown = open_changed(chromium)
    assert "contribution matrices in measure.matrices" in shown.page.locator("#text").inner_text()
    shown.page.locator("#token-1").click()
    assert "measure.matrices" in shown.page.locator("#kept").inner_text()
    shown.close()


def own_shares(checkpoint: str, document: str, method: str, layer: int) -> np.ndarray[Any, Any]:
    matrix = np.asarray(Run(Path()).matrix(checkpoint, document, method)[layer - 1], dtype=float)
    return np.diagonal(matrix) / matrix.sum(axis=1)


def shades(page: Any) -> list[tuple[tuple[float, ...], float]]:
    """Colour and opacity of every word."""
    found = page.locator("#words span").evaluate_all("all => all.map(each => each.style.backgroundColor)")
    numbers = [[float(each) for each in re.findall(r"[\d.]+", shade)] for shade in found]
    return [(tuple(each[:3]), (each[3] if len(each) > 3 else 1.0) if each else 0.0) for each in numbers]


def test_the_difference_of_the_models_has_a_scale_with_two_ends(opened: Opened) -> None:
    page = opened.page
    choose(page, "layer", "2")
    choose(page, "checkpoint", "difference")
    texts = tokens()["document"].unique()
    changed = [own_shares("pretrained", each, "alti", 2) - own_shares("finetuned", each, "alti", 2) for each in texts]
    sizes = np.sort(np.abs(np.concatenate(changed)))
    most = sizes[round(0.9 * (len(sizes) - 1))]
    legend = page.locator("#text-legend").inner_text().replace("\u2212", "-")
    assert f"{-100 * most:.0f} points or less" in legend
    assert f"{100 * most:+.0f} points or more" in legend
    drawn = shades(page)
    expected = 0.68 * np.clip(np.abs(changed[0]) / most, 0, 1)
    assert [opacity for _, opacity in drawn] == pytest.approx(expected.tolist(), abs=0.01)
    colours = {(share > 0, colour) for share, (colour, opacity) in zip(changed[0], drawn, strict=True) if opacity > 0}
    assert len(colours) == 2
    page.locator("#token-3").click()
    said = page.locator("#kept").inner_text().replace("\u2212", "-")
    assert f"{100 * changed[0][3]:+.0f} points from others" in said or abs(changed[0][3]) < 0.005
    choose(page, "checkpoint", "pretrained")
    assert "By ALTI, pretrained:" in page.locator("#text-legend").inner_text()


def test_a_card_says_to_whom_a_word_gave(opened: Opened) -> None:
    page = opened.page
    choose(page, "layer", "2")
    page.locator("#token-3").click()
    matrix = np.asarray(Run(Path()).matrix("finetuned", "test/0", "alti")[1], dtype=float)
    shares = matrix / matrix.sum(axis=1, keepdims=True)
    kept = np.argsort(-shares, axis=1, kind="stable")[:, :16]
    gave = {token: shares[token, 3] for token in range(len(shares)) if token != 3 and 3 in kept[token]}
    ranked = sorted(gave.values(), reverse=True)[:8]
    listed = page.locator("#gave li").all_inner_texts()
    drawn = [float(each.split("\n")[-1].removesuffix(" %").removeprefix("< ")) for each in listed]
    assert drawn == pytest.approx([100 * share for share in ranked], abs=1)
    marked = page.locator("#words span.gave").evaluate_all("all => all.map(each => Number(each.dataset.token))")
    assert set(marked) == {token for token, share in gave.items() if round(255 * np.sqrt(share)) > 0}
    page.locator("#gave li").first.click()
    assert page.locator("#words span[aria-selected=true]").get_attribute("data-token") == str(max(gave, key=gave.get))


def test_a_card_draws_the_course_through_the_layers(opened: Opened) -> None:
    page = opened.page
    page.locator("#token-3").click()
    said = page.locator("#course").get_attribute("aria-label")
    for checkpoint, name in (("pretrained", "Pretrained"), ("finetuned", "Fine-tuned")):
        own = [own_shares(checkpoint, "test/0", "alti", layer)[3] for layer in (1, 2, 3)]
        line = ", ".join(f"layer {layer} {100 * (1 - share):.0f} %" for layer, share in enumerate(own, start=1))
        assert f"{name}: {line}" in said
    assert page.locator("#course path").count() == 2


def test_words_are_shaded_by_their_importance_for_the_class(opened: Opened) -> None:
    page = opened.page
    choose(page, "shade", "leave_one_out")
    scores = np.random.default_rng(0).normal(size=len(tokens()))
    own = scores[tokens()["document"] == "test/0"]
    sizes = np.sort(np.abs(own[1:]))
    most = sizes[round(0.9 * (len(sizes) - 1))]
    opacities = [opacity for _, opacity in shades(page)]
    assert opacities == pytest.approx([0, *(0.68 * np.clip(np.abs(own[1:]) / most, 0, 1)).tolist()], abs=0.01)
    assert "By Leave one out, fine-tuned:\nscore for the predicted class" in page.locator("#text-legend").inner_text()
    page.locator("#token-3").click()
    assert "By ALTI, in layer" in page.locator("#kept").inner_text()


def test_another_model_or_text_stands_beside_it_in_the_same_layer(opened: Opened) -> None:
    page = opened.page
    assert page.locator("#beside").is_hidden()
    choose(page, "beside-choice", "pretrained")
    page.locator("#depth").fill("2")
    beside = page.locator("#beside-words span")
    first = beside.first.get_attribute("title")
    assert first.endswith(f"share from others {100 * (1 - own_shares('pretrained', 'test/0', 'alti', 2)[0]):.0f} %")
    assert page.locator("#beside-name").inner_text() == "test/0, pretrained"
    page.locator("#token-3").click()
    assert page.locator("#beside-words span.took").count() > 0
    choose(page, "beside-choice", "2")
    assert page.locator("#beside-name").inner_text() == "text/0, fine-tuned"
    assert beside.count() == (tokens()["document"] == "text/0").sum()
    assert page.locator("#words span[aria-selected=true]").get_attribute("id") == "token-3"
    choose(page, "document", "2")  # which leaves nothing to stand beside itself
    assert page.locator("#beside").is_hidden()
    assert page.locator("#beside-choice").input_value() == "none"
