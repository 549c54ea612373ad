"""The page's views: they draw the files' numbers, and follow mouse, keys and the bar."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import Opened
from page_run import LAYOUTS, choose, open_changed, tokens, write_run

from attnmix.core.names import Site
from attnmix.figures.labels import MATRIX_LABELS
from attnmix.page.arrays import visible
from attnmix.store.features import read_features
from attnmix.store.runs import Run

MAX_OPACITY = 0.68  # of a word's shade


def shares(checkpoint: str, layer: int, document: str = "test/0", method: str = "alti") -> np.ndarray:
    """Return each source's share `[tokens, sources]` by a contribution matrix."""
    matrix = np.asarray(Run(Path()).matrix(checkpoint, document, method)[layer - 1], dtype=float)
    return np.asarray(matrix / matrix.sum(axis=1, keepdims=True))


def assert_shades(page: Any, expected: Any) -> list[str]:
    """Assert how far every word is shaded, from 0 to 1, and return the colours; an unshaded word's is empty."""
    styles = page.locator("#words span").evaluate_all("all => all.map(each => each.style.backgroundColor)")
    parts = [style.removeprefix("rgba(").removesuffix(")").rpartition(", ") for style in styles]
    opacities = [float(opacity or 0) for *_, opacity in parts]
    assert opacities == pytest.approx(list(MAX_OPACITY * np.clip(expected, 0, 1)), abs=0.01)
    return [colour if opacity else "" for (colour, *_), opacity in zip(parts, opacities, strict=True)]


def test_words_are_found_and_walked_with_the_keyboard(opened: Opened) -> None:
    page, names = opened.page, tokens().query("document == 'test/0'")["token"]
    word = names.value_counts().index[0]
    places = names.index[names.str.contains(word, regex=False)].tolist()
    assert len(places) > 1
    page.locator("#find").fill(f" {word.upper()} ")
    matches = page.locator("#words span.found").evaluate_all("all => all.map(each => each.id)")
    assert matches == [f"token-{place}" for place in places]
    for place in (*places, places[0]):
        page.locator("#find").press("Enter")
        assert page.locator("#words span[aria-selected=true]").get_attribute("id") == f"token-{place}"
    page.locator("#words").focus()
    page.keyboard.press("Escape")
    for key, token in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("End", names.index[-1])):
        page.keyboard.press(key)
        assert page.locator("#words").get_attribute("aria-activedescendant") == f"token-{token}"


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
    assert_shades(page, (ratios["test/0"] - low) / (high - low))
    choose(page, "shade", "leave_one_out")
    scores = Run(Path()).token_scores.query("document == 'test/0'")["score"].abs()
    assert_shades(page, (scores / scores.quantile(0.9, interpolation="nearest")).fillna(0))


def test_sources_are_those_of_the_contribution_matrix(opened: Opened) -> None:
    page = opened.page
    choose(page, "layer", "2")
    page.locator("#token-3").click()
    page.mouse.move(0, 0)
    for method in ("alti", "attention", "value_zeroing", "norm"):
        choose(page, "matrix", method)
        row = 100 * shares("finetuned", 2, method=method)[3]
        text = page.locator("#kept").inner_text()
        kept, others = re.search(r"kept (\d+) % itself, (\d+) % from others", text).groups()
        assert [float(kept), float(others)] == pytest.approx([row[3], 100 - row[3]], abs=0.51)
        legend = page.locator("#text-legend").inner_text()
        assert legend.startswith(f"By {MATRIX_LABELS[method]}, fine-tuned:\nshare from others")
        assert page.locator("#token-3").get_attribute("title").endswith(f"share from others {others} %")
        row[3] = 0
        first = page.locator("#sources li").first.inner_text()
        assert float(first.split("\n")[-1].removesuffix(" %")) == pytest.approx(row.max(), abs=1)
        assert visible(tokens()["token"][int(row.argmax())]) in first


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
    colours = assert_shades(page, np.abs(changes["test/0"]) / most)
    assert len({(change > 0, colour) for change, colour in zip(changes["test/0"], colours, strict=True) if colour}) == 2


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


def test_another_model_or_text_is_shown_next_to_it_in_the_same_layer(opened: Opened) -> None:
    page, words = opened.page, opened.page.locator("#beside-words span")
    choose(page, "beside-choice", "pretrained")
    page.locator("#depth").fill("2")
    share = 100 * (1 - shares("pretrained", 2)[0, 0])
    assert words.first.get_attribute("title").endswith(f"share from others {share:.0f} %")
    choose(page, "beside-choice", "2")
    assert page.locator("#beside-name").inner_text() == "text/0, fine-tuned"
    assert words.count() == (tokens()["document"] == "text/0").sum()


def test_steps_of_the_explanation_set_the_same_views(opened: Opened) -> None:
    page = opened.page
    steps = page.locator("#story-steps li")
    assert steps.count() == 5
    choose(page, "layer", "2")
    steps.nth(1).get_by_role("button").dispatch_event("click")
    percents = page.locator("#words span").evaluate_all("all => all.map(each => +each.title.match(/(\\d+) %$/)[1])")
    text = steps.nth(1).locator("p").inner_text()
    assert float(text.split(" % in layer 2")[0].split()[-1]) == pytest.approx(np.mean(percents), abs=1)
    steps.nth(4).get_by_role("button").dispatch_event("click")
    assert page.locator("#checkpoint").input_value() == "difference"


RECORD_DOTS = """() => {
  const { arc, clearRect } = CanvasRenderingContext2D.prototype;
  const canvas = document.querySelector("#map-chart canvas");
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
"""Keeps the dots of the map's last picture as they are painted; no other place knows where moving points are."""
# A dot is painted if its middle on the canvas is not transparent.
LAST_PICTURE = """() => {
  const chart = document.getElementById("map-chart"), canvas = chart.querySelector("canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const alpha = ([x, y]) => data[4 * (Math.round(y) * canvas.width + Math.round(x)) + 3];
  return { moving: "moving" in chart.dataset, dots, painted: dots.map(at => alpha(at) > 0) };
}"""


def places(layer: int, point: str, layout: str = "joint") -> np.ndarray:
    """Return where all tokens are on a map `[tokens, 2]`."""
    return Run(Path()).map(layout).query("layer == @layer and point == @point")[["x", "y"]].to_numpy()


def settled_tokens(opened: Opened) -> dict[str, Any]:
    """Return the map's trace of the tokens, once nothing moves."""
    opened.traces("map-chart")
    opened.page.wait_for_selector("#map-chart:not([data-moving])")
    return opened.trace("map-chart", "tokens")


def test_slider_and_keys_walk_through_the_points_in_forward_order(opened: Opened) -> None:
    page, number = opened.page, len(Run(Path()).sites)
    page.locator("#point").focus()
    page.keyboard.press("Home")
    assert page.locator("#point-name").inner_text() == f"Word embedding (1 of {number})"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#point-name").inner_text() == f"Layer 1: Attention heads (3 of {number})"
    page.keyboard.press("End")
    assert page.locator("#point-name").inner_text() == f"Layer 3: Layer output ({number} of {number})"
    assert page.locator("#layer").input_value() == "3"
    trace, expected = settled_tokens(opened), places(3, "layer_output")
    np.testing.assert_allclose(np.array([trace["x"], trace["y"]]).T, expected, atol=1e-3 * np.ptp(expected))
    choose(page, "map-beside", "1")  # another text, in the same plane
    other = opened.trace("map-chart", "beside")
    np.testing.assert_allclose(other["x"], expected[other["tokens"], 0], atol=1e-3 * np.ptp(expected))
    assert other["tokens"] == np.flatnonzero(tokens()["document"] == "test/1").tolist()


def test_points_are_seen_on_their_way_while_the_map_plays(copied: Path, chromium: Any) -> None:
    shown = open_changed(chromium, points_per_second=2)
    page = shown.page
    page.clock.install()  # the test decides when the next animation frame comes
    page.reload()
    page.wait_for_selector("html[data-drawn]", state="attached")
    page.locator("#map-view [data-act='whole']").click()  # the zoom stays as it is, and only the points move
    page.evaluate(RECORD_DOTS)
    page.clock.pause_at(page.evaluate("Date.now()") + 1000)
    page.locator("#point").fill("0")
    page.clock.run_for(1000)  # until the map stands still there
    page.locator("#play").click()
    frames = []
    for _ in range(64):  # of 16 ms: two capture points
        page.clock.run_for(16)
        frames.append(page.evaluate(LAST_PICTURE))
    assert page.locator("#play").inner_text() == "Pause"
    begins = [frame["moving"] for frame in frames].index(True)
    ends = [frame["moving"] for frame in frames].index(False, begins)
    assert ends - begins > 10
    dots = np.array([frame["dots"] for frame in frames[begins - 1 : ends + 1]])
    assert dots.shape[1] == len(tokens())
    assert np.isfinite(dots).all()
    assert all(all(frame["painted"]) for frame in frames)
    # Each goes straight from its place at one capture point to that at the next, and all arrive together.
    start, way = dots[0], dots[-1] - dots[0]
    shares = ((dots - start) * way).sum(axis=(1, 2)) / (way**2).sum()
    assert np.abs(dots - start - shares[:, None, None] * way).max() < 0.01
    assert (np.diff(shares[1:-1]) > 0).all()
    assert np.abs(way).max() > 10  # pixels
    page.clock.run_for(15_000)  # to the last point
    assert page.locator("#play").inner_text() == "Play"
    assert page.locator("#point").input_value() == page.locator("#point").get_attribute("max")
    shown.close()


def test_every_layout_shows_its_own_scores(opened: Opened) -> None:
    page, run = opened.page, Run(Path())
    page.locator("#point").fill("4")
    site = run.sites[4]
    for layout in LAYOUTS:
        choose(page, "layout", layout)
        rows = run.map_quality.query("layout == @layout").set_index("measure")
        whole = rows[rows["point"].isna()]
        by_site = rows.loc[(rows["point"] == site.point) & (rows["layer"] == site.layer), "value"]
        for name in ("trustworthiness", "neighbours_kept", "distance_spearman"):
            cells = page.locator(f'#quality tr[data-measure="{name}"] td').all_inner_texts()
            expected = [whole.loc[name, "value"], by_site.get(name), whole.loc[name, "chance"]]
            if name not in by_site:  # among all points of the joint map, only the whole is scored
                assert cells.pop(1) == "\N{EN DASH}"
                expected.pop(1)
            assert [float(cell.replace("\N{MINUS SIGN}", "-")) for cell in cells] == pytest.approx(expected, abs=5.1e-4)


def test_colours_follow_the_choice(opened: Opened) -> None:
    opened.page.locator("#point").fill("8")
    legends = {"position": "first token", "class": "punctuation", "ratio": "length ratio of others"}
    for colour, legend in (legends | {"document": "text/0"}).items():
        choose(opened.page, "colour", colour)
        assert legend in opened.page.locator("#map-legend").inner_text()
        colours = pd.Series(settled_tokens(opened)["colours"])
        assert colours.nunique() > 1
    assert colours.groupby(tokens()["document"].to_numpy()).nunique().eq(1).all()


def test_words_are_drawn_where_there_is_room_and_more_after_zooming_in(opened: Opened) -> None:
    page = opened.page
    choose(page, "shape", "words")
    page.locator("#point").fill(page.locator("#point").get_attribute("max"))
    page.locator("#token-1").click()
    words = opened.trace("map-chart", "words")
    assert words["text"][0] == tokens()["token"][1]  # the selected one is always shown
    assert 3 < len(words["text"]) < len(tokens())
    page.locator("#map-chart").focus()
    for _ in range(8):
        page.keyboard.press("+")
    trace, box = settled_tokens(opened), page.locator("#map-chart canvas").bounding_box()
    zoomed, pixels = opened.trace("map-chart", "words"), np.array(trace["pixels"])
    near = set(np.array(trace["tokens"])[((pixels >= 0) & (pixels <= [box["width"], box["height"]])).all(axis=1)])
    assert 1 in near  # the selected one stays where it is
    assert len(near & set(words["tokens"])) < len(zoomed["tokens"])


def test_a_token_is_named_by_the_pointer_and_marked_in_all_views_by_a_click(opened: Opened) -> None:
    page, run = opened.page, Run(Path())
    before = len(opened.traces("mixing-chart"))
    page.locator("#point").fill(page.locator("#point").get_attribute("max"))
    distances = np.linalg.norm(places(3, "layer_output")[:, None] - places(3, "layer_output"), axis=2)
    token = int(np.sort(distances)[:, 1].argmax())  # the farthest from any other
    (x, y), box = settled_tokens(opened)["pixels"][token], page.locator("#map-chart canvas").bounding_box()
    page.mouse.move(box["x"] + x, box["y"] + y)
    row, text = tokens().iloc[token], page.locator("#map-tip:visible").inner_text()
    assert visible(row["token"]) in text
    assert f"position {row['position']} of {row['document']}" in text
    ratios = run.ratios().set_index(["checkpoint", "document", "position", "layer"])["attnresln_n"]
    share = ratios["finetuned", row["document"], row["position"], 3]
    assert f"length ratio of others {round(100 * float(share))} %" in text
    page.mouse.click(box["x"] + x, box["y"] + y)
    assert visible(row["token"]) in page.locator("#selected").inner_text()
    assert page.locator("#words span[aria-selected=true]").get_attribute("id") == f"token-{token}"
    assert page.locator("#document").input_value() == str(list(tokens()["document"].unique()).index(row["document"]))
    assert opened.trace("map-chart", "selected")
    stream = ("word_embedding", "embedding_output", "attention_norm", "layer_output")
    assert len(opened.trace("map-chart", "trail")["x"]) == sum(site.point in stream for site in run.sites)
    methods = page.locator("#ratio-method option").count()
    assert len(opened.traces("mixing-chart")) == before + 2 * methods
    page.locator("#clear").click()
    assert len(opened.traces("mixing-chart")) == before


def test_selected_tokens_own_curves_are_its_values(opened: Opened) -> None:
    opened.page.locator("#words").focus()
    opened.page.keyboard.press("ArrowRight")
    curve = [trace for trace in opened.traces("mixing-chart") if trace["method"] == "attnresln_n"][-1]
    rows = Run(Path()).ratios().query("checkpoint == 'finetuned' and document == 'test/0' and position == 0")
    assert curve["y"] == pytest.approx(rows["attnresln_n"].tolist(), abs=1e-4)
    sites = (Site(0, "embedding_output"), Site(1, "layer_output"))
    before, after = (read_features(Run(Path()).activations, site)[0].astype(float) for site in sites)
    cosine = before @ after / np.linalg.norm(before) / np.linalg.norm(after)
    assert opened.traces("steps-chart")[-1]["y"][0] == pytest.approx(cosine, abs=1e-3)


def test_curves_steps_and_flow_are_those_of_the_choice(opened: Opened) -> None:
    page, run = opened.page, Run(Path())
    choose(page, "ratio-method", "attn_w")
    rows = run.mixing[0].query("method == 'attn_w'")
    curves = [part["mean"].tolist() for _, part in rows.groupby("checkpoint", sort=False)]
    assert [trace["y"] for trace in opened.traces("mixing-chart") if trace["method"] == "attn_w"] == curves
    choose(page, "layer", "2")
    opened.traces("steps-chart")
    cells = "all => all.map(each => [each.dataset.step, each.textContent])"
    flow = page.locator("#steps-chart .measured").evaluate_all(cells)
    steps = run.steps.dropna(subset="mean").query("measure == 'cosine_input' and layer == 2")
    rows = steps[steps["checkpoint"] == "finetuned"]
    numbers = {step: number.replace("\N{MINUS SIGN}", "-") for step, number in flow}
    assert numbers == {row.step: f"{row.mean:.3f}" for row in rows.itertuples()}
    choose(page, "step-measure", "norm")
    choose(page, "checkpoint", "pretrained")
    norms = run.steps.query("checkpoint == 'pretrained' and measure == 'norm'")
    expected = [part["mean"].tolist() for _, part in norms.groupby("step", sort=False)]
    assert [trace["y"] for trace in opened.traces("steps-chart") if trace["name"]] == expected


LONG = pytest.mark.long
SIZES = [([1], 3, 2), pytest.param([512], 12, 12, marks=LONG), pytest.param([60] * 40, 4, 4, marks=LONG)]


@pytest.mark.parametrize(("lengths", "layers", "heads"), SIZES, ids=["one", "long", "many"])
def test_page_of_one_token_of_512_and_of_40_documents(
    workspace: Any, run: Path, chromium: Any, lengths: list[int], layers: int, heads: int
) -> None:
    write_run(workspace(capture={"documents": list(range(len(lengths)))}), run, lengths, layers, heads)
    shown = open_changed(chromium)
    assert Run(Path()).page.stat().st_size < 15e6
    page = shown.page
    assert page.locator("#document option").count() == len(lengths)
    assert page.locator("#words span").count() == lengths[0]
    page.locator(f"#token-{lengths[0] - 1}").click()
    assert page.locator("#sources li").count() == min(lengths[0] - 1, 8)
    page.locator("#point").fill("2")
    choose(page, "colour", "ratio")
    assert len(settled_tokens(shown)["x"]) == sum(lengths)
    shown.close()


def test_lines_lead_to_the_nearest_in_the_full_space(opened: Opened) -> None:
    page, run, site = opened.page, Run(Path()), Site(2, "layer_output")
    page.locator("#token-3").click()
    page.mouse.move(0, 0)  # or the card would be that of the word under the mouse
    page.locator("#point").fill(str(run.sites.index(site)))
    vectors = read_features(run.activations, site).astype(float)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit[3]
    cosines[3] = -np.inf
    near = opened.trace("map-chart", "near")["tokens"]
    assert len(near) == 5
    # Tokens that are the same to rounding may stand in another order.
    assert cosines[near] == pytest.approx(np.sort(cosines)[::-1][:5], abs=1e-6)
