"""The page's map, curves and flow of a layer: they draw the files' numbers and follow mouse, fingers and keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import Opened
from page_run import LAYOUTS, choose, next_frames, open_changed, tokens, write_run

from attnmix.core.names import STEP_POINTS, Site
from attnmix.page.arrays import visible
from attnmix.store.features import read_features
from attnmix.store.runs import Run

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


def pixels(opened: Opened) -> np.ndarray:
    return np.array(settled_tokens(opened)["pixels"])


def tokens_in_sight(opened: Opened) -> np.ndarray:
    """Return the tokens that are within the map at its zoom."""
    box = opened.page.locator("#map-chart canvas").bounding_box()
    inside = (pixels(opened) >= 0) & (pixels(opened) <= [box["width"], box["height"]])
    return np.array(settled_tokens(opened)["tokens"])[inside.all(axis=1)]


def test_slider_and_keys_walk_through_the_points_in_forward_order(opened: Opened) -> None:
    page, number = opened.page, len(Run(Path()).sites)
    page.locator("#point").focus()
    page.keyboard.press("Home")
    assert page.locator("#point-name").inner_text() == f"Word embedding (1 of {number})"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#point-name").inner_text() == f"Layer 1: Attention heads (3 of {number})"
    assert page.locator("#point").get_attribute("aria-valuetext") == "Layer 1: Attention heads"
    page.keyboard.press("End")
    assert page.locator("#point-name").inner_text() == f"Layer 3: Layer output ({number} of {number})"
    assert page.locator("#layer").input_value() == "3"
    trace, expected = settled_tokens(opened), places(3, "layer_output")
    np.testing.assert_allclose(np.array([trace["x"], trace["y"]]).T, expected, atol=1e-3 * np.ptp(expected))


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
    assert page.locator("#point-name").get_attribute("aria-live") == "off"
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
    shown = page.locator('#quality tr[data-measure="trustworthiness"] td').first.inner_text()
    assert float(shown) == pytest.approx(run.metrics("reduce")["aligned"]["trustworthiness"], abs=5.1e-4)


def test_colours_follow_the_choice(opened: Opened) -> None:
    opened.page.locator("#point").fill("8")
    legends = {"position": "first token", "class": "punctuation", "ratio": "length ratio of others"}
    for colour, legend in (legends | {"document": "text/0"}).items():
        choose(opened.page, "colour", colour)
        assert legend in opened.page.locator("#map-legend").inner_text()
        colours = pd.Series(settled_tokens(opened)["colours"])
        assert colours.nunique() > 1
    documents = tokens()["document"]
    assert colours.nunique() == documents.nunique()
    assert colours.groupby(documents.to_numpy()).nunique().max() == 1


@pytest.mark.long
def test_tokens_can_be_words_none_over_another_and_more_after_zooming_in(opened: Opened) -> None:
    page, number = opened.page, len(tokens())
    choose(page, "shape", "words")
    page.locator("#point").fill(page.locator("#point").get_attribute("max"))
    page.locator("#token-1").click()
    words = opened.trace("map-chart", "words")
    assert words["text"][0] == tokens()["token"][1]  # the selected one is always shown
    widths = page.evaluate(
        """texts => { const pen = document.createElement('canvas').getContext('2d');
        pen.font = '11.5px system-ui, DejaVu Sans, sans-serif';
        return texts.map(each => pen.measureText(each).width); }""",
        words["text"],
    )
    assert 3 < len(widths) < number
    x, y = (np.array(words["pixels"]) + np.array(words["moved"])).T
    apart = np.abs(y[:, None] - y) > 8
    apart |= np.abs(x[:, None] - x) >= (np.array(widths)[:, None] + widths) / 2
    assert (apart | np.eye(len(x), dtype=bool)).all()
    page.locator("#map-chart").focus()
    for _ in range(8):
        page.keyboard.press("+")
    zoomed, near = opened.trace("map-chart", "words"), set(tokens_in_sight(opened).tolist())
    assert 1 in near  # the selected one stays where it is
    assert len(near & set(words["tokens"])) < len(zoomed["tokens"])
    assert len(near) < number


def test_a_token_is_named_by_the_pointer_and_marked_in_all_views_by_a_click(opened: Opened) -> None:
    page, charts, run = opened.page, ("map-chart", "mixing-chart", "steps-chart"), Run(Path())
    before = {chart: len(opened.traces(chart)) for chart in charts}
    page.locator("#map-chart").scroll_into_view_if_needed()
    page.locator("#point").fill(page.locator("#point").get_attribute("max"))
    distances = np.linalg.norm(places(3, "layer_output")[:, None] - places(3, "layer_output"), axis=2)
    token = int(np.sort(distances)[:, 1].argmax())  # the farthest from any other
    (x, y), box = pixels(opened)[token], page.locator("#map-chart canvas").bounding_box()
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
    page.locator("#excursions").check()
    assert len(opened.trace("map-chart", "trail")["x"]) == sum(site.point != "attention_heads" for site in run.sites)
    page.locator("#excursions").uncheck()
    methods = page.locator("#ratio-method option").count()
    assert len(opened.traces("mixing-chart")) == before["mixing-chart"] + 2 * methods
    assert len(opened.traces("steps-chart")) > before["steps-chart"]
    page.locator("#clear").click()
    assert {chart: len(opened.traces(chart)) for chart in charts} == before


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
    assert page.locator("#mixing-chart .chosen").count() == 1
    choose(page, "layer", "2")
    opened.traces("steps-chart")
    cells = "all => all.map(each => [each.dataset.step, each.textContent])"
    flow = page.locator("#steps-chart .measured").evaluate_all(cells)
    steps = run.steps.dropna(subset="mean").query("measure == 'cosine_input' and layer == 2")
    rows = steps[steps["checkpoint"] == "finetuned"]
    numbers = {step: number.replace("\N{MINUS SIGN}", "-") for step, number in flow}
    assert numbers == {row.step: f"{row.mean:.3f}" for row in rows.itertuples()}
    assert list(numbers) == [step for step in STEP_POINTS if step in numbers]
    assert page.locator("#steps-chart rect[stroke-dasharray='3 3']").count() == 0  # no norm that was not measured
    choose(page, "step-measure", "norm")
    choose(page, "checkpoint", "pretrained")
    norms = run.steps.query("checkpoint == 'pretrained' and measure == 'norm'")
    expected = [part["mean"].tolist() for _, part in norms.groupby("step", sort=False)]
    assert [trace["y"] for trace in opened.traces("steps-chart") if trace["name"]] == expected


def test_map_is_zoomed_fitted_and_dragged(opened: Opened) -> None:
    page, number = opened.page, len(tokens())
    for layout in LAYOUTS:
        choose(page, "layout", layout)
        page.locator("#map-view [data-act=whole]").click()
        assert len(tokens_in_sight(opened)) == number
        whole = np.ptp(pixels(opened), axis=0)
        for _ in range(3):
            page.locator("#map-view [data-act=in]").click()
        assert np.ptp(pixels(opened), axis=0) == pytest.approx(1.5**3 * whole)
        page.locator("#map-view [data-act=fit]").click()
        assert (np.ptp(pixels(opened), axis=0) >= whole - 1e-6).all()
        assert len(tokens_in_sight(opened)) > 0.8 * number
    before, box = pixels(opened), page.locator("#map-chart canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + 30
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 40, y + 20, steps=4)
    page.mouse.up()
    dragged = pixels(opened)
    assert dragged - before == pytest.approx(np.broadcast_to([40, 20], before.shape), abs=1)
    page.mouse.wheel(0, -300)
    next_frames(page)
    assert np.ptp(pixels(opened), axis=0).min() > 1.05 * np.ptp(dragged, axis=0).min()


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
    if len(lengths) > 1:
        choose(page, "document", "39")
        page.locator("#words span").first.click()
        assert page.locator("#sources").inner_text().strip()
        page.locator("#everyone").uncheck()
        assert len(settled_tokens(shown)["x"]) == lengths[0]
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
    rows = page.locator("#card-nearest li")
    assert rows.evaluate_all("all => all.map(each => Number(each.dataset.token))") == near
    choose(page, "layout", "joint")
    away = np.linalg.norm(places(*site) - places(*site)[3], axis=1)
    notes = rows.evaluate_all("all => all.map(each => each.lastChild.textContent)")
    ranks = [int(each.removeprefix("no. ").removesuffix(" on the map")) for each in notes]
    assert ranks == pytest.approx((away < away[near][:, None]).sum(1).tolist(), abs=1)  # places are rounded


@pytest.fixture
def pair(run: Path, chromium: Any) -> Iterator[Opened]:
    """The maps of test/0 and test/1 next to each other."""
    opened = Opened(chromium, Run(run).page, viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
    opened.page.locator("nav a[href='#map']").click()  # which draws all that is above
    choose(opened.page, "map-beside", "1")
    yield opened
    opened.close()


def numbers_of(text: int) -> list[int]:
    return np.flatnonzero(tokens()["document"] == f"test/{text}").tolist()


def test_two_texts_share_a_plane_and_a_slider(pair: Opened) -> None:
    for slider, layer, point in (("1", 0, "embedding_output"), ("6", 1, "layer_output")):
        pair.page.locator("#point").fill(slider)
        halves = [pair.trace("map-chart", name) for name in ("tokens", "beside")]
        assert [half["tokens"] for half in halves] == [numbers_of(0), numbers_of(1)]
        at = np.concatenate([np.array([half["x"], half["y"]]).T for half in halves])
        expected = places(layer, point)[numbers_of(0) + numbers_of(1)]
        np.testing.assert_allclose(at, expected, atol=1e-3 * np.ptp(expected))
        drawn = np.array(halves[0]["pixels"] + halves[1]["pixels"])
        scales = [np.polyfit(at[:, axis], drawn[:, axis], 1) for axis in (0, 1)]
        for axis in (0, 1):
            np.testing.assert_allclose(np.polyval(scales[axis], at[:, axis]), drawn[:, axis], atol=0.1)
        assert scales[0][0] == pytest.approx(-scales[1][0], rel=1e-3)
    assert pair.page.locator("#map-chart canvas").count() == 2
