"""Views of the page show the values of the result files, and respond to pointer, keyboard and controls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import LOOKS, WHOLE, Opened
from colours import as_lab, distance, shade
from conftest import write_tiny_bert
from families import write_family
from page_run import change_page, choose, payload, render_page, save_page, tokens

import attnmix
from attnmix.core.names import Site
from attnmix.core.store.features import read_features
from attnmix.core.store.runs import Run
from attnmix.page.arrays import visible


@pytest.fixture
def first(opened: Opened) -> Opened:
    """Return the page with the text test/0 in layer 2, without a selected word."""
    choose(opened.page, "document", "0")
    choose(opened.page, "layer", "2")
    opened.page.locator("#words").press("Escape")
    return opened


def shares(checkpoint: str, layer: int, document: str = "test/0", method: str = "alti") -> np.ndarray:
    """Return the share of each source `[tokens, sources]` according to a contribution matrix."""
    matrix = np.asarray(Run(Path()).matrix(checkpoint, document, method)[layer - 1], dtype=float)
    return np.asarray(matrix / matrix.sum(axis=1, keepdims=True))


def number(text: str) -> float:
    """Return the last number of a string."""
    return float(re.findall(r"[-+]?\d+(?:\.\d+)?", text.replace("\N{MINUS SIGN}", "-"))[-1])


def assert_shades(page: Any, places: Any) -> None:
    """Assert that the colours of all words encode values from 0 to 1, or signed values from -1 to 1."""
    colours = page.locator("#words span").evaluate_all("all => all.map(each => each.style.backgroundColor)")
    for colour, place in zip(colours, places, strict=True):
        if np.isnan(place):
            assert colour == ""
        else:
            assert distance(as_lab(colour), shade(place)) < 2, (colour, place)


def test_words_and_phrases_are_found_by_keyboard(first: Opened) -> None:
    page, table = first.page, tokens().query("document == 'test/0'")
    word = table["token"].value_counts().index[0]
    places = table.index[table["token"].str.contains(word, regex=False)].tolist()
    assert len(places) > 1
    page.locator("#find").fill(f" {word.upper()} ")
    matches = page.locator("#words span.found").evaluate_all("all => all.map(each => each.id)")
    assert matches == [f"token-{place}" for place in places]
    for place in (*places, places[0]):
        page.locator("#find").press("Enter")
        assert page.locator("#words span[aria-selected=true]").get_attribute("id") == f"token-{place}"
    page.locator("#words").press("Escape")
    for key, token in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("End", table.index[-1])):
        page.keyboard.press(key)
        assert page.locator("#words").get_attribute("aria-activedescendant") == f"token-{token}"
    phrase = page.locator("#words").inner_text().split()[-3:-1]
    page.locator("#find").fill(" ".join(phrase))
    assert page.locator("#words span.found").count() >= 2


def test_layer_change_updates_shades_immediately(first: Opened) -> None:
    page = first.page
    change = """() => {
        const [slider, words] = ["layer", "words"].map((id) => document.getElementById(id));
        slider.value = slider.value === "1" ? "3" : "1";
        slider.dispatchEvent(new Event("input", { bubbles: true }));
        const animated = () => words.getAnimations({ subtree: true }).length;
        return new Promise((resolve) => requestAnimationFrame(() => resolve(animated())));
    }"""
    shades = "() => [...document.querySelectorAll('#words span')].map(each => getComputedStyle(each).backgroundColor)"
    before = page.evaluate(shades)
    assert page.evaluate(change) == 0  # a transition would still run in the next frame
    assert page.evaluate(shades) != before


def test_words_are_shaded_by_share_and_importance(first: Opened) -> None:
    page = first.page
    choose(page, "layer", "3")
    ratios = Run(Path()).captured_ratios(["test/0"]).query("checkpoint == 'finetuned' and layer == 3")
    assert_shades(page, ratios["own_share"])
    choose(page, "share", "parts")
    assert_shades(page, np.diagonal(shares("finetuned", 3, method="parts")))
    choose(page, "share", "attnresln_n")
    assert_shades(page, ratios["attnresln_n"])
    legend = page.locator("#text-legend").inner_text()
    assert re.search(r"0%\s+100%\s+mixing ratio", legend), legend
    choose(page, "effect", "leave_one_out")
    scores = Run(Path()).token_scores.set_index("document")["score"]
    assert_shades(page, scores["test/0"] / scores.abs().max())


def test_selected_token_shares_match_matrix_and_model(first: Opened) -> None:
    page = first.page
    choose(page, "checkpoint", "pretrained")
    page.locator("#token-3").click()
    page.locator("#token-5").hover()  # hovering does not change the card
    for method in ("parts", "attention"):
        choose(page, "share", method)
        matrix = 100 * shares("pretrained", 2, method=method)
        card = page.locator("#card").inner_text()
        own = re.search(r": own share ([\d.]+)% \(", card)[1]
        assert float(own) == pytest.approx(matrix[3, 3], abs=0.051)
        taken = np.delete(matrix[3], 3)
        listed = [number(text) for text in page.locator("#sources li").all_inner_texts()]
        assert listed == pytest.approx(sorted(taken, reverse=True)[:8], abs=0.051)
        labels = re.findall(r"([\d.]+)%", page.locator("#bar-parts").inner_text())
        main = sorted(taken, reverse=True)[:4]
        parts = [matrix[3, 3], *main, taken.sum() - sum(main)]
        assert [float(label) for label in labels] == pytest.approx(parts, abs=0.061)
        kept = np.argsort(-matrix, axis=1, kind="stable")[:, :12]
        gave = [matrix[token, 3] for token in range(len(matrix)) if token != 3 and 3 in kept[token]]
        listed = [number(text) for text in page.locator("#gave li").all_inner_texts()]
        assert listed == pytest.approx(sorted(gave, reverse=True)[:8], abs=0.051)
        rows = first.values("text")
        column = next(name for name in rows[0] if name.startswith("contributed"))
        for row, share in zip(rows, matrix[3] / 100, strict=True):
            assert not row[column] or float(row[column]) == pytest.approx(share, rel=2e-3, abs=1e-5)
        assert sum(bool(row[column]) for row in rows) >= 8


def test_model_difference_has_signed_scale_and_list(first: Opened) -> None:
    page = first.page
    choose(page, "share", "alti")
    page.get_by_label("Change by fine-tuning").check()
    changes = np.diagonal(shares("finetuned", 2) - shares("pretrained", 2))
    legend = page.locator("#text-legend").inner_text().replace("\u2212", "-")
    assert re.findall(r"[-+][\d.]+", legend)[:2] == ["-100.0", "+100.0"]
    assert "points: change of the own share" in legend
    assert_shades(page, changes)
    assert changes.min() < 0 < changes.max()
    page.locator("#token-3").click()
    change = 100 * (shares("finetuned", 2) - shares("pretrained", 2))[3]
    change[3] = 0
    largest = np.argsort(-np.abs(change), kind="stable")[:12]
    listed = [number(text) for text in page.locator("#sources .number").all_inner_texts()]
    assert listed == pytest.approx(change[largest[:8]].tolist(), abs=0.051)
    underlined = page.locator("#words .took").evaluate_all("all => all.map(each => +each.dataset.token)")
    assert set(underlined) == set(largest.tolist())
    card = page.locator("#card").inner_text()
    assert "12 largest changes" in card
    assert "+0.0" not in card
    assert "\N{MINUS SIGN}0.0 " not in card


def test_shares_are_grouped_by_question(opened: Opened) -> None:
    groups = opened.page.locator("#share optgroup").evaluate_all(
        "all => all.map(group => [group.label, [...group.children].map(each => each.value)])"
    )
    assert groups[0] == ["All layers since the input", ["own_share", "parts", "alti_rollout"]]
    assert groups[1] == ["One layer", ["attnresln_n", "alti"]]
    title, others = groups[2]
    assert title == "More"
    assert len(others) == len(set(others)) > 6
    assert not {"own_share", "parts", "alti_rollout", "attnresln_n", "alti"} & set(others)
    names = opened.page.locator("#share option").all_inner_texts()
    assert len(set(names)) == len(names)
    assert not {"Attention", "Attention weights"} <= set(names)


def test_classifier_token_is_marked(opened: Opened) -> None:
    data = payload(Run(Path()).page)
    assert [each["reads"] for each in data["documents"]] == [0, 0, 0]  # from the predictions of the run
    choose(opened.page, "document", "1")
    marked = opened.page.locator('#words span[title*="read by the classifier"]')
    assert marked.evaluate_all("all => all.map(each => each.id)") == [f"token-{data['documents'][1]['start']}"]
    assert "the classifier reads" in opened.page.locator("#grid").inner_text()


def places(layer: int, point: str, layout: str) -> np.ndarray:
    """Return the positions of all tokens on a map `[tokens, 2]`."""
    return Run(Path()).map(layout).query("layer == @layer and point == @point")[["x", "y"]].to_numpy()


RECORD_DOTS = """() => {
  const { arc, clearRect } = CanvasRenderingContext2D.prototype;
  const canvas = document.getElementById("map-canvas");
  window.dots = [];
  CanvasRenderingContext2D.prototype.clearRect = function (...box) {
    if (this.canvas === canvas) window.dots = [];
    clearRect.apply(this, box);
  };
  CanvasRenderingContext2D.prototype.arc = function (...circle) {
    if (this.canvas === canvas) window.dots.push(circle.slice(0, 2));
    arc.apply(this, circle);
  };
}"""
"""Script that records the painted dots of the map, because the page does not store positions of moving dots."""
# A dot is painted if its centre on the canvas is not transparent.
LAST_PICTURE = """() => {
  const canvas = document.getElementById("map-canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const alpha = ([x, y]) => data[4 * (Math.round(y) * canvas.width + Math.round(x)) + 3];
  return { moving: canvas.drawn().moving, dots, painted: dots.map(at => alpha(at) > 0) };
}"""


def test_slider_shows_map_positions_of_files(opened: Opened) -> None:
    page = opened.page
    choose(page, "layout", "aligned")
    page.locator("#point").focus()
    for key, name in (("Home", "Word embedding"), ("End", "Layer 3: Layer output")):
        page.keyboard.press(key)
        assert page.locator("#point").get_attribute("aria-valuetext") == name
    assert page.locator("#layer").input_value() == "3"
    rows, expected = opened.values("map-pane"), places(3, "layer_output", "aligned")
    shown = np.array([[float(row["x"]), float(row["y"])] for row in rows])
    pixels = np.array(opened.drawn()["pixels"])
    # The listed numbers and the pixels are linear in the positions. The vertical axis of a canvas points down.
    for axis, canvas_direction in ((0, 1), (1, -1)):
        for drawn, direction, error in ((shown[:, axis], 1, 1e-3), (pixels[:, axis], canvas_direction, 0.5)):
            slope, start = np.polyfit(expected[:, axis], drawn, 1)
            assert slope * direction > 0
            np.testing.assert_allclose(drawn, slope * expected[:, axis] + start, atol=error)


def test_playing_map_draws_intermediate_positions(run: Path, chromium: Any, tmp_path: Path) -> None:
    shown = Opened(chromium, change_page(tmp_path, lambda data: data.update(pointsPerSecond=4)))
    page = shown.page
    page.clock.install()  # the test controls animation frames
    page.reload()
    page.wait_for_selector("#grid-canvas", state="attached")
    page.clock.run_for(1000)
    page.wait_for_selector(WHOLE, state="attached")
    choose(page, "layout", "aligned")
    page.locator("#words").press("Escape")
    page.evaluate(RECORD_DOTS)
    page.clock.pause_at(page.evaluate("Date.now()") + 1000)
    at_points = [places(site.layer, site.point, "aligned") for site in Run(Path()).sites]
    moves = [np.abs(after - before).max() for before, after in pairwise(at_points)]
    choose(page, "point", str(int(np.argmax(moves))))  # before the largest movement
    page.clock.run_for(1000)  # until the map does not move
    page.locator("#play").click()
    frames = []
    for _ in range(34):  # frames of 16 ms, for two capture points
        page.clock.run_for(16)
        frames.append(page.evaluate(LAST_PICTURE))
    assert page.locator("#play").inner_text() == "Stop"
    begins = [frame["moving"] for frame in frames].index(True)
    ends = [frame["moving"] for frame in frames].index(False, begins)
    assert ends - begins > 6
    dots = np.array([frame["dots"] for frame in frames[begins - 1 : ends + 1]])
    assert dots.shape[1] == len(tokens())
    assert np.isfinite(dots).all()
    assert all(all(frame["painted"]) for frame in frames)
    # Each dot moves in a straight line to its position at the next capture point, and all dots arrive together.
    start = dots[0]
    path = dots[-1] - start
    progress = ((dots - start) * path).sum(axis=(1, 2)) / (path**2).sum()
    assert np.abs(dots - start - progress[:, None, None] * path).max() < 0.01
    assert (np.diff(progress[1:-1]) > 0).all()
    assert np.abs(path).max() > 10  # pixels
    page.clock.run_for(15_000)  # until the last point
    assert page.locator("#play").inner_text() == "Play"
    assert page.locator("#point").input_value() == page.locator("#point").get_attribute("max")
    shown.close()


def test_pca_is_default_and_layouts_state_kept_neighbours(opened: Opened) -> None:
    page, run = opened.page, Run(Path())
    choose(page, "point", "4")
    site = run.sites[4]
    assert page.locator("#layout").input_value() == "pca"
    for layout in ("pca", "aligned"):
        choose(page, "layout", layout)
        rows = run.map_quality.set_index(["layout", "measure"]).loc[(layout, "neighbours_kept")]
        here = rows[(rows["point"] == site.point) & (rows["layer"] == site.layer)].iloc[0]
        kept, chance = re.findall(r"\d+", page.locator("#badge").inner_text())
        assert [float(kept), float(chance)] == pytest.approx([100 * here["value"], 100 * here["chance"]], abs=0.51)


def test_components_share_scale_and_state_variance(opened: Opened) -> None:
    page, run = opened.page, Run(Path())
    pixels, vectors = {}, {}
    for site in (Site(1, "layer_output"), Site(3, "layer_output")):
        choose(page, "point", str(run.sites.index(site)))
        pixels[site] = np.array(opened.drawn()["pixels"])
        vectors[site] = read_features(run.activations, site).astype(float)
        centred = vectors[site] - vectors[site].mean(axis=0)
        strengths = np.linalg.svd(centred, compute_uv=False) ** 2
        shares = [f"{100 * share:.1f}%" for share in strengths[:2] / strengths.sum()]
        _, content = opened.file("map-pane", "SVG")
        svg = content.decode("utf-8")
        assert f"component 1: {shares[0]} of the variance" in svg
        assert f"component 2: {shares[1]}" in svg
    scales = []  # pixels for each unit of the first component
    for site, places_T2 in pixels.items():
        centred = vectors[site] - vectors[site].mean(axis=0)
        _, _, directions = np.linalg.svd(centred, full_matrices=False)
        scales.append(np.ptp(places_T2[:, 0]) / np.ptp(centred @ directions[0]))
    first_layer, last_layer = scales
    assert first_layer == pytest.approx(last_layer, rel=2e-3)
    box = page.locator("#map-canvas").bounding_box()
    for places_T2 in pixels.values():  # all texts are visible initially
        assert (places_T2 > 0).all()
        assert (places_T2 < [box["width"], box["height"]]).all()


def test_map_names_its_model(opened: Opened) -> None:
    page = opened.page
    before = opened.drawn()["pixels"]
    choose(page, "checkpoint", "pretrained")
    assert "fine-tuned model" in page.locator("#map-title").inner_text()
    assert "not the pretrained one" in page.locator("#map-model").inner_text()
    assert opened.drawn()["pixels"] == before
    choose(page, "colour", "ratio")
    assert "(fine-tuned model" in page.locator("#map-legend").inner_text()


def test_map_colours_words_and_keys(opened: Opened) -> None:
    page = opened.page
    choose(page, "point", "8")
    legends = {
        "position": "token of the text",
        "class": "punctuation",
        "ratio": "mixing ratio (fine-tuned model",
        "document": "text/0",
        "predicted": "positive",
    }
    pictures = set()
    for colour, legend in legends.items():
        choose(page, "colour", colour)
        assert legend in page.locator("#map-legend").inner_text()
        page.evaluate("() => new Promise(requestAnimationFrame)")
        pictures.add(page.locator("#map-canvas").screenshot())
    assert len(pictures) == len(legends)
    few = len(opened.drawn()["names"])
    assert 0 < few < len(tokens())
    page.locator("#map-canvas").focus()
    for _ in range(5):
        page.keyboard.press("+")
    assert np.ptp(opened.drawn()["pixels"], axis=0).max() > 2 * page.locator("#map-canvas").bounding_box()["width"]
    page.keyboard.press("0")  # shows all texts again
    assert np.ptp(opened.drawn()["pixels"], axis=0).max() < page.locator("#map-canvas").bounding_box()["width"]


def test_names_on_map_cover_neither_dots_nor_names(opened: Opened) -> None:
    page = opened.page
    page.locator("#words").press("Escape")
    for layout, point in (("aligned", "2"), ("aligned", "8"), ("pca", "2"), ("pca", "8")):
        choose(page, "layout", layout)
        choose(page, "point", point)
        drawn = opened.drawn()
        boxes = pd.DataFrame([name["box"] for name in drawn["names"]])
        assert len(boxes) > 3
        low_N2, high_N2 = boxes[["left", "top"]].to_numpy(), boxes[["right", "bottom"]].to_numpy()
        dots_T2 = np.array(drawn["pixels"])
        overlaps_NT2 = np.minimum(high_N2[:, None], dots_T2 + drawn["radius"])
        overlaps_NT2 = overlaps_NT2 - np.maximum(low_N2[:, None], dots_T2 - drawn["radius"])
        assert not (overlaps_NT2 > 1e-3).all(axis=-1).any()
        overlaps_NN2 = np.minimum(high_N2[:, None], high_N2) - np.maximum(low_N2[:, None], low_N2)
        assert (overlaps_NN2 > 1e-3).all(axis=-1).sum() == len(boxes)  # each name overlaps only itself
        own_N2 = dots_T2[[drawn["tokens"].index(name["token"]) for name in drawn["names"]]]
        distances_N2 = np.abs(own_N2 - np.clip(own_N2, low_N2, high_N2))
        assert distances_N2.max() < 10  # pixels between a dot and its name
    page.locator("#token-3").click()
    names = [name["token"] for name in opened.drawn()["names"]]
    assert 3 in names
    assert not any(re.fullmatch(r"[^\w\s]", tokens()["label"][token]) for token in names if token != 3)


def test_click_on_map_selects_word_everywhere(opened: Opened) -> None:
    page = opened.page
    page.locator("#words").press("Escape")
    choose(page, "layout", "aligned")
    drawn = opened.drawn()
    page.locator("#map-canvas").scroll_into_view_if_needed()
    box = page.locator("#map-canvas").bounding_box()
    pixels = np.array(drawn["pixels"])
    distances = np.linalg.norm(pixels[:, None] - pixels, axis=2)
    outside = ((pixels < 0) | (pixels > [box["width"], box["height"]])).any(axis=1)
    token = int(np.where(outside, 0, np.sort(distances)[:, 1]).argmax())  # the most isolated token
    assert np.sort(distances[token])[1] > 2  # pixels
    page.mouse.move(box["x"] + pixels[token][0], box["y"] + pixels[token][1])
    row = tokens().iloc[token]
    title = f"{visible(row['token'])}, position {row['position']} in {row['document']}"
    assert page.locator("#map-canvas").get_attribute("title") == title
    page.mouse.click(box["x"] + pixels[token][0], box["y"] + pixels[token][1])
    assert visible(row["token"]) in page.locator("#selected").inner_text()
    assert page.locator("#words span[aria-selected=true]").get_attribute("id") == f"token-{token}"
    assert page.locator("#document").input_value() == str(list(tokens()["document"].unique()).index(row["document"]))


def test_nearest_tokens_use_full_space(first: Opened) -> None:
    page, run, site = first.page, Run(Path()), Site(2, "layer_output")
    page.locator("#token-3").click()
    choose(page, "point", str(run.sites.index(site)))
    vectors = read_features(run.activations, site).astype(float)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit[3]
    cosines[3] = -np.inf
    near = page.locator("#nearest button").evaluate_all("all => all.map(each => Number(each.dataset.token))")
    # Tokens with equal cosines up to rounding may be in a different order.
    assert cosines[near] == pytest.approx(np.sort(cosines)[::-1][:5], abs=1e-6)


def test_layers_chart_has_measures_controls_and_token(first: Opened) -> None:
    page = first.page
    run = Run(Path())
    mixing, differences = run.mixing
    page.locator("#token-3").click()
    for checkpoint in ("pretrained", "finetuned"):
        choose(page, "checkpoint", checkpoint)
        for method in ("attnresln_n", "attn_w"):
            page.locator(f"[data-measure={method}]").click()
            rows = first.values("layers-chart")
            means = mixing.query("method == @method").pivot(index="layer", columns="checkpoint", values="mean")
            controls = run.table("measure/mixing_controls").query("method == @method")
            control = {name: part.set_index("checkpoint") for name, part in controls.groupby("control")}
            word = run.ratios().query("checkpoint == @checkpoint and document == 'test/0' and position == 3")[method]
            expected = {
                "Pretrained": means["pretrained"],
                "Fine-tuned": means["finetuned"],
                "Values of other texts": control["corpus_value"].loc[checkpoint, "mean"],
                "Words in random order": control["shuffled_words"].loc[checkpoint, "mean"],
                next(name for name in rows[0] if name.startswith("“")): word,
            }
            for name, values in expected.items():
                assert [float(row[name]) for row in rows] == pytest.approx(values.tolist(), rel=1e-3, abs=1e-4), name
            assert not {"One value shared by all tokens", "Random weights"} & set(rows[0])
    controls_named = "with its controls: values of other texts, words in random order."
    assert controls_named in " ".join(page.locator("#layers").inner_text().split())
    difference = differences.query("method == 'attn_w' and layer == 2")["mean"].item()
    change = page.locator("#difference").inner_text().replace("\N{MINUS SIGN}", "-")
    assert f"by {100 * difference:+.1f} percentage points" in change
    assert "By default, this chart shows “Norm-based + skip + LayerNorm”" in page.locator("#layers").inner_text()
    assert not re.search(r"[.:][A-Z]", page.locator("#layers").inner_text())


CLASS_SHARES = {"Before fine-tuning": 0.01, "After fine-tuning": 0.2, "Permuted classes: 95th percentile": 0.02}
"""Class shares of the first layer in tests; the shares of later layers are multiples of these shares."""


@pytest.fixture(scope="module")
def changed_page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page with a small difference, intervals beyond the axis, class shares, and probes of the classifier."""

    def change(data: Any) -> None:
        series = data["curves"][data["method"]]
        difference = series.pop("difference")
        for each in series.values():
            each["low"], each["high"] = [-0.065] * 3, [1.37] * 3
        for name, end in (("values", 0.0003), ("low", -0.0004), ("high", 0.001)):
            difference[name] = [end] * len(difference[name])
        difference["texts"] = 8
        series["difference"] = difference
        empty: dict[str, list[Any]] = {"low": [None] * 3, "high": [None] * 3}
        shares = {name: {"values": [size, 2 * size, 3 * size]} | empty for name, size in CLASS_SHARES.items()}
        data["classShares"] = shares
        data["probes"]["finetuned"]["The head itself, on other tokens"] = {"values": [0.5, 0.5, 0.5]} | empty

    return change_page(tmp_path_factory.mktemp("changed"), change)


@pytest.fixture
def changed(changed_page: Path, other_tab: Opened) -> Iterator[Opened]:
    """Yield the changed page in the shared tab; consecutive tests open it once."""
    if other_tab.page.url != changed_page.resolve().as_uri():
        other_tab.open(changed_page, **LOOKS)
    yield other_tab
    other_tab.check()


def test_layer_change_keeps_nonzero_digits(changed: Opened) -> None:
    text = changed.page.locator("#difference").inner_text().replace("\N{MINUS SIGN}", "-")
    assert "by +0.03 percentage points (95% interval for this layer alone -0.04 to +0.10, 8 reviews)" in text


def test_bands_stay_within_plot(changed: Opened) -> None:
    chart = changed.page.locator("#layers-chart svg.chart").bounding_box()
    bands = [path.bounding_box() for path in changed.page.locator("#layers-chart .band path").all()]
    drawn = [box for box in bands if box and box["width"] > 0]
    assert drawn
    for box in drawn:
        assert box["y"] >= chart["y"] - 1
        assert box["y"] + box["height"] <= chart["y"] + chart["height"]


def test_class_and_probe_charts_match_data(changed: Opened, run: Path) -> None:
    page, files = changed.page, Run(run)
    page.locator("#more > summary").click()
    values = changed.values("class-shares")
    for name, size in CLASS_SHARES.items():
        assert [float(row[name]) for row in values] == pytest.approx([size, 2 * size, 3 * size])
    dashed = page.locator("#probes .names line[stroke-dasharray='6 4']")
    for checkpoint, lines in (("finetuned", 1), ("pretrained", 0)):
        choose(page, "checkpoint", checkpoint)
        assert dashed.count() == lines
        assert page.locator("#probes", has_text="The dashed line shows").count() == lines
    probed = files.table("faithfulness/class_use").query("checkpoint == 'pretrained' and group == 'others'")
    rows = changed.values("probes")
    for name, quantity in (("Position of the token", "probe_position"), ("Identity of the token", "probe_token")):
        for suffix, end in (("", ""), (": permuted labels", "_control")):
            expected = probed[probed["quantity"] == quantity + end]["mean"].tolist()
            assert [float(row[name + suffix]) for row in rows] == pytest.approx(expected, rel=1e-3)


def test_click_on_chart_selects_layer(opened: Opened) -> None:
    page = opened.page
    mixing, _ = Run(Path()).mixing
    curves = mixing.query("method == 'attnresln_n' and checkpoint == 'pretrained'")
    means = curves.set_index("layer")["mean"]
    page.locator("#layers-chart").scroll_into_view_if_needed()
    for layer in means.index:
        box = page.locator("#layers-chart .plot").bounding_box()
        page.mouse.click(box["x"] + 46 + (box["width"] - 54) * (layer - 0.5) / len(means), box["y"] + 100)
        assert page.locator("#layer").input_value() == str(layer)
        shade = page.locator("#layers-chart .now").bounding_box()
        dots = page.locator("#layers-chart svg.chart circle").evaluate_all(
            "all => all.map(each => { const { x, width } = each.getBoundingClientRect(); return x + width / 2 })"
        )
        # The shaded band is centred on the dots of the layer.
        assert min(abs(x - shade["x"] - shade["width"] / 2) for x in dots) < 1
        name = page.locator("#layers-chart .names li", has_text="Pretrained").inner_text()
        assert number(name) == pytest.approx(100 * means[layer], abs=0.51)


def test_class_shares_match_files(copied: Path) -> None:
    file = Run(Path()).tables / "measure/geometry.csv"
    keys = (("pretrained", ""), ("finetuned", ""), ("finetuned", "_permuted"))
    rows = []
    for (checkpoint, control), size in zip(keys, CLASS_SHARES.values(), strict=True):
        for layer in (1, 2, 3):
            row = {"checkpoint": checkpoint, "measure": f"share_class{control}", "layer": layer, "mean": layer * size}
            rows.append(row)
            if (checkpoint, control) == ("finetuned", ""):
                rows.append({**row, "checkpoint": "difference"})
    pd.concat([pd.read_csv(file), pd.DataFrame(rows)]).to_csv(file, index=False)
    render_page()
    shown = payload(Run(Path()).page)["classShares"]
    assert list(shown) == list(CLASS_SHARES)
    for name, size in CLASS_SHARES.items():
        assert shown[name]["values"] == pytest.approx([size, 2 * size, 3 * size])


@pytest.mark.parametrize(
    "texts",
    [
        ["a"],
        pytest.param(["film " * 510], marks=pytest.mark.long),
        pytest.param([f"the film was good . {'time ' * number}" for number in range(40)], marks=pytest.mark.long),
    ],
    ids=["one", "long", "many"],
)
def test_page_of_one_token_512_tokens_or_40_texts(tmp_path: Path, tab: Any, texts: list[str]) -> None:
    model = tmp_path / "model"
    if len(texts[0]) == 1:
        write_family("gpt2", model)  # its tokenizer adds no special tokens
    else:
        write_tiny_bert(model, layers=2, max_position_embeddings=512, hidden_size=16, num_attention_heads=2)
    result = attnmix.measure(attnmix.load(str(model)), texts)
    path, lengths = save_page(result, tmp_path), [len(document) for document in result.documents]
    assert path.stat().st_size < 4e6  # complete matrices of 512 tokens would add 1 MB for each measure in two layers
    shown = tab(path)
    page = shown.page
    assert page.locator("#document option").count() == (len(lengths) if len(lengths) > 1 else 0)
    length = page.locator("#words span").count()
    assert length in lengths
    page.locator("#words span").last.click()
    assert page.locator("#sources li").count() == min(length - 1, 8)
    choose(page, "point", "2")
    choose(page, "colour", "ratio")
    assert len(shown.drawn()["tokens"]) == sum(lengths)


def test_curves_of_few_documents_have_no_band(opened: Opened) -> None:
    boxes = [path.bounding_box() for path in opened.page.locator("#layers-chart .band path").all()]
    assert not any(box and box["width"] for box in boxes)


def test_explanations_follow_pointer_not_scrolling(opened: Opened) -> None:
    page = opened.page
    term = page.locator("#layers .term").first
    term.scroll_into_view_if_needed()
    box = term.bounding_box()
    place = {"x": box["x"] + 5, "y": box["y"] + 5}
    page.evaluate("scrollBy(0, 300)")
    page.mouse.move(place["x"], place["y"])
    page.evaluate("scrollBy(0, -300)")
    page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    assert not term.locator("[role=tooltip]").is_visible()
    page.mouse.move(place["x"] + 3, place["y"])
    assert term.locator("[role=tooltip]").is_visible()


def test_explanations_open_and_close_by_tap(run: Path, chromium: Any) -> None:
    touched = Opened(chromium, Run(run).page, viewport={"width": 390, "height": 844}, has_touch=True)
    term = touched.page.locator(".lead .term").first
    for is_open in (True, False, True):
        term.locator("button").tap()
        touched.page.wait_for_function("() => new Promise((resolve) => setTimeout(resolve, 100, true))")
        assert term.locator("[role=tooltip]").is_visible() == is_open
    touched.page.locator("h1").tap()
    term.locator("[role=tooltip]").wait_for(state="hidden")
    touched.close()


def test_link_to_folded_charts_scrolls_to_their_heading(opened: Opened) -> None:
    page = opened.page
    page.locator("nav a[href='#more']").click()
    page.locator("#more svg.chart").first.wait_for()
    assert page.locator("#bar").bounding_box()["height"] < page.locator("#more").bounding_box()["y"] < 120


@pytest.mark.parametrize("width", [400, *(pytest.param(each, marks=pytest.mark.long) for each in (640, 768, 1280))])
def test_explanations_and_bar_stay_in_window(run: Path, tab: Any, width: int) -> None:
    page = tab(Run(run).page, width=width, height=720).page
    page.locator("#token-3").click()
    bar = re.sub(r"\s+", " ", page.locator("#bar").inner_text())
    assert "Layer 3 " in bar
    assert re.search(rf"“ ?{re.escape(tokens()['label'][3])} ?” (position )?3 Clear", bar), bar
    assert "test/0" in page.locator("#document option:checked").inner_text()
    assert page.locator("#document").bounding_box()["width"] > 100
    clear = page.locator("#clear")
    assert clear.evaluate("button => button.scrollWidth <= button.clientWidth")
    button, bar = clear.bounding_box(), page.locator("#bar").bounding_box()
    assert button["x"] + button["width"] <= bar["x"] + bar["width"]
    for term in page.locator(".term").all():
        if not term.is_visible():
            continue
        term.locator("button").focus()
        box = term.locator("[role=tooltip]").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_frame_of_selected_head_is_complete(opened: Opened) -> None:
    page = opened.page
    heads = page.locator("#heads-all button")
    for n in (0, heads.count() - 1):
        heads.nth(n).click()
        frame = heads.nth(n).evaluate(
            "button => { const reach = parseFloat(getComputedStyle(button).outlineWidth);"
            " const [inner, outer] = [button, button.closest('.scroll')].map(each => each.getBoundingClientRect());"
            " return [inner.left - outer.left, inner.top - outer.top, outer.right - inner.right,"
            " outer.bottom - inner.bottom].map(room => room - reach) }"
        )
        assert min(frame) >= 0
