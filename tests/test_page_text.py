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
from attnmix.store.runs import Run, row_shares

MAX_OPACITY = 0.68  # of a word's shade


def shares(checkpoint: str, layer: int, document: str = "test/0", method: str = "alti") -> np.ndarray:
    """Return each source's share `[tokens, sources]` by a contribution matrix."""
    return row_shares(Run(Path()).matrix(checkpoint, document, method)[layer - 1]).astype(float)


def shades(page: Any) -> list[tuple[tuple[float, ...], float]]:
    """Return colour and opacity of every word."""
    colours = page.locator("#words span").evaluate_all("all => all.map(each => each.style.backgroundColor)")
    numbers = [[float(each) for each in re.findall(r"[\d.]+", colour)] for colour in colours]
    return [(tuple(each[:3]), (each[3] if len(each) > 3 else 1.0) if each else 0.0) for each in numbers]


def test_words_are_found_and_enter_goes_to_the_next(opened: Opened) -> None:
    page = opened.page
    names = tokens().query("document == 'test/0'")["token"]
    sought = names.value_counts().index[0]
    places = names.index[names.str.contains(sought, regex=False)].tolist()
    assert len(places) > 1
    page.locator("#find").fill(f" {sought.upper()} ")
    matches = page.locator("#words span.found")
    assert matches.evaluate_all("all => all.map(each => each.id)") == [f"token-{place}" for place in places]
    assert page.locator("#found").inner_text() == f"{len(places)} found"
    for place in (*places, places[0]):
        page.locator("#find").press("Enter")
        assert page.locator("#words span[aria-selected=true]").get_attribute("id") == f"token-{place}"
    page.locator("#find").fill("")
    assert (matches.count(), page.locator("#found").inner_text()) == (0, "")


def test_words_are_walked_with_the_keyboard(opened: Opened) -> None:
    page = opened.page
    page.locator("#words").focus()
    last = tokens().query("document == 'test/0'").index[-1]
    for key, token in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("End", last)):
        page.keyboard.press(key)
        assert page.locator("#words").get_attribute("aria-activedescendant") == f"token-{token}"
    page.keyboard.press("Escape")
    assert page.locator("#words span[aria-selected=true]").count() == 0
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_words_are_shaded_by_ratio_and_by_importance(opened: Opened) -> None:
    page = opened.page
    choose(page, "layer", "2")
    choose(page, "shade", "ratio")
    ratios = Run(Path()).captured_ratios(tokens()["document"].unique().tolist())
    ratios = ratios.query("checkpoint == 'finetuned' and layer == 2").set_index("document")["attnresln_n"]
    low, high = np.quantile(ratios, 0.05, method="lower"), np.quantile(ratios, 0.95, method="higher")
    legend = page.locator("#text-legend").inner_text()
    assert f"{100 * low:.0f} % or less" in legend
    assert f"{100 * high:.0f} % or more" in legend
    expected = MAX_OPACITY * np.clip((ratios["test/0"].to_numpy() - low) / (high - low), 0, 1)
    assert [opacity for _, opacity in shades(page)] == pytest.approx(expected.tolist(), abs=0.01)
    choose(page, "shade", "leave_one_out")
    scores = Run(Path()).token_scores.query("document == 'test/0'")["score"].abs()
    most = scores.quantile(0.9, interpolation="nearest")
    expected = (MAX_OPACITY * (scores / most).clip(0, 1)).fillna(0)
    assert [opacity for _, opacity in shades(page)] == pytest.approx(expected.tolist(), abs=0.01)
    assert "By Leave one out, fine-tuned:\nscore for the predicted class" in page.locator("#text-legend").inner_text()
    page.locator("#token-3").click()
    assert "By ALTI, in layer" in page.locator("#kept").inner_text()


@pytest.mark.parametrize("method", ["alti", "attention", "value_zeroing", "norm"])
def test_sources_are_those_of_the_contribution_matrix(opened: Opened, method: str) -> None:
    page = opened.page
    choose(page, "matrix", method)
    choose(page, "layer", "2")
    page.locator("#token-3").click()
    row = 100 * shares("finetuned", 2, method=method)[3]
    kept, others = re.search(r"kept (\d+) % itself, (\d+) % from others", page.locator("#kept").inner_text()).groups()
    assert [float(kept), float(others)] == pytest.approx([row[3], 100 - row[3]], abs=0.51)
    legend = page.locator("#text-legend").inner_text()
    assert legend.startswith(f"By {MATRIX_LABELS[method]}, fine-tuned:\nshare from others")
    assert page.locator("#token-3").get_attribute("title").endswith(f"share from others {others} %")
    row[3] = 0
    first = page.locator("#sources li").first.inner_text()
    assert float(first.split("\n")[-1].removesuffix(" %")) == pytest.approx(row.max(), abs=1)
    assert visible(tokens()["token"][int(row.argmax())]) in first


def test_attention_can_be_read_by_head(opened: Opened) -> None:
    page = opened.page
    for control, option in {"matrix": "attention", "layer": "1", "head": "2"}.items():
        choose(page, control, option)
    assert page.locator("#head option").count() == 1 + 4
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


def test_the_difference_of_the_models_has_a_scale_with_two_ends(opened: Opened) -> None:
    page = opened.page
    choose(page, "layer", "2")
    choose(page, "checkpoint", "difference")
    changes = {
        name: np.diagonal(shares("pretrained", 2, name) - shares("finetuned", 2, name))
        for name in tokens()["document"].unique()
    }
    most = np.quantile(np.abs(np.concatenate(list(changes.values()))), 0.9, method="nearest")
    legend = page.locator("#text-legend").inner_text().replace("\u2212", "-")
    assert f"{-100 * most:.0f} points or less" in legend
    assert f"{100 * most:+.0f} points or more" in legend
    drawn, change = shades(page), changes["test/0"]
    expected = MAX_OPACITY * np.clip(np.abs(change) / most, 0, 1)
    assert [opacity for _, opacity in drawn] == pytest.approx(expected.tolist(), abs=0.01)
    assert len({(share > 0, colour) for share, (colour, opacity) in zip(change, drawn, strict=True) if opacity}) == 2
    page.locator("#token-3").click()
    sentence = page.locator("#kept").inner_text().replace("\u2212", "-")
    assert f"{100 * change[3]:+.0f} points from others" in sentence or abs(change[3]) < 0.005


def test_a_card_lists_the_words_that_a_word_gave_to_and_its_course(opened: Opened) -> None:
    page = opened.page
    choose(page, "layer", "2")
    page.locator("#token-3").click()
    matrix = shares("finetuned", 2)
    kept = np.argsort(-matrix, axis=1, kind="stable")[:, :16]
    gave = {token: matrix[token, 3] for token in range(len(matrix)) if token != 3 and 3 in kept[token]}
    texts = page.locator("#gave li").all_inner_texts()
    listed = [float(each.split("\n")[-1].removesuffix(" %").removeprefix("< ")) for each in texts]
    assert listed == pytest.approx([100 * share for share in sorted(gave.values(), reverse=True)[:8]], abs=1)
    marked = page.locator("#words span.gave").evaluate_all("all => all.map(each => Number(each.dataset.token))")
    assert set(marked) == {token for token, share in gave.items() if round(255 * np.sqrt(share)) > 0}
    course = page.locator("#course").get_attribute("aria-label")
    for checkpoint, name in (("pretrained", "Pretrained"), ("finetuned", "Fine-tuned")):
        by_layer = [(layer, 100 * (1 - shares(checkpoint, layer)[3, 3])) for layer in (1, 2, 3)]
        assert f"{name}: " + ", ".join(f"layer {layer} {share:.0f} %" for layer, share in by_layer) in course
    page.locator("#gave li").first.click()
    assert page.locator("#words span[aria-selected=true]").get_attribute("data-token") == str(max(gave, key=gave.get))


def test_another_model_or_text_is_shown_next_to_it_in_the_same_layer(opened: Opened) -> None:
    page, words = opened.page, opened.page.locator("#beside-words span")
    assert page.locator("#beside").is_hidden()
    choose(page, "beside-choice", "pretrained")
    page.locator("#depth").fill("2")
    share = 100 * (1 - shares("pretrained", 2)[0, 0])
    assert words.first.get_attribute("title").endswith(f"share from others {share:.0f} %")
    assert page.locator("#beside-name").inner_text() == "test/0, pretrained"
    page.locator("#token-3").click()
    assert page.locator("#beside-words span.took").count() > 0
    choose(page, "beside-choice", "2")
    assert page.locator("#beside-name").inner_text() == "text/0, fine-tuned"
    assert words.count() == (tokens()["document"] == "text/0").sum()
    choose(page, "document", "2")  # which leaves no other text to show
    assert page.locator("#beside").is_hidden()


def test_steps_of_the_explanation_set_the_same_views(opened: Opened) -> None:
    page = opened.page
    steps = page.locator("#story-steps li")
    assert steps.count() == 5
    choose(page, "layer", "2")
    steps.nth(1).get_by_role("button").dispatch_event("click")
    assert page.locator("#matrix").input_value() == "attention"
    percents = page.locator("#words span").evaluate_all("all => all.map(each => +each.title.match(/(\\d+) %$/)[1])")
    text = steps.nth(1).locator("p").inner_text()
    assert float(text.split(" % in layer 2")[0].split()[-1]) == pytest.approx(np.mean(percents), abs=1)
    steps.nth(4).get_by_role("button").dispatch_event("click")
    assert page.locator("#checkpoint").input_value() == "difference"
    assert page.locator("#words span[aria-selected=true]").count() == 1
