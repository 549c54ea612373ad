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

from attnmix.core.points import STEP_POINTS, Site
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


def tokens_in_sight(opened: Opened) -> list[int]:
    """Return the tokens that are within the map at its zoom."""
    trace, box = settled_tokens(opened), opened.page.locator("#map-chart canvas").bounding_box()
    inside = ((np.array(trace["pixels"]) >= 0) & (trace["pixels"] <= np.array([box["width"], box["height"]]))).all(1)
    return np.array(trace["tokens"])[inside].tolist()


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
        own = rows.loc[(rows["point"] == site.point) & (rows["layer"] == site.layer), "value"]
        for name in ("trustworthiness", "neighbours_kept", "distance_spearman"):
            cells = page.locator(f'#quality tr[data-measure="{name}"] td').all_inner_texts()
            if name not in own:  # among all points of the joint map, only the whole is scored
                assert cells.pop(1) == "\N{EN DASH}"
            expected = [whole.loc[name, "value"], *([own[name]] if name in own else []), whole.loc[name, "chance"]]
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
    zoomed, near = opened.trace("map-chart", "words"), set(tokens_in_sight(opened))
    assert 1 in near  # the selected one stays where it is
    assert len(near & set(words["tokens"])) < len(zoomed["tokens"])
    assert len(near) < number


def lonely_token(opened: Opened) -> tuple[int, tuple[float, float]]:
    """Go to the last point; return the token farthest from any other, and its place on the screen."""
    opened.page.locator("#map-chart").scroll_into_view_if_needed()
    opened.page.locator("#point").fill(opened.page.locator("#point").get_attribute("max"))
    at = places(3, "layer_output")
    distances = np.linalg.norm(at[:, None] - at[None], axis=2) + np.diag(np.full(len(at), np.inf))
    token = int(distances.min(axis=1).argmax())
    trace, box = settled_tokens(opened), opened.page.locator("#map-chart canvas").bounding_box()
    x, y = trace["pixels"][trace["tokens"].index(token)]
    return token, (box["x"] + x, box["y"] + y)


def test_pointing_at_a_token_names_it(opened: Opened) -> None:
    token, place = lonely_token(opened)
    opened.page.mouse.move(*place)
    text = opened.page.locator("#map-tip:visible").inner_text()
    row = tokens().iloc[token]
    assert visible(row["token"]) in text
    assert f"position {row['position']} of {row['document']}" in text
    ratios = Run(Path()).ratios().set_index(["checkpoint", "document", "position", "layer"])["attnresln_n"]
    share = ratios["finetuned", row["document"], row["position"], 3]
    assert f"length ratio of others {round(100 * float(share))} %" in text


def test_a_token_selected_in_one_view_is_marked_in_all(opened: Opened) -> None:
    page, charts, sites = opened.page, ("map-chart", "mixing-chart", "steps-chart"), Run(Path()).sites
    before = {chart: len(opened.traces(chart)) for chart in charts}
    token, place = lonely_token(opened)
    page.mouse.click(*place)
    row = tokens().iloc[token]
    assert visible(row["token"]) in page.locator("#selected").inner_text()
    assert page.locator("#words span[aria-selected=true]").get_attribute("id") == f"token-{token}"
    assert page.locator("#document").input_value() == str(list(tokens()["document"].unique()).index(row["document"]))
    assert opened.trace("map-chart", "selected")
    stream = ("word_embedding", "embedding_output", "attention_norm", "layer_output")
    assert len(opened.trace("map-chart", "trail")["x"]) == sum(site.point in stream for site in sites)
    page.locator("#excursions").check()
    assert len(opened.trace("map-chart", "trail")["x"]) == sum(site.point != "attention_heads" for site in sites)
    page.locator("#excursions").uncheck()
    methods = page.locator("#ratio-method option").count()
    assert len(opened.traces("mixing-chart")) == before["mixing-chart"] + 2 * methods
    assert len(opened.traces("steps-chart")) > before["steps-chart"]
    page.locator("#clear").click()
    assert {chart: len(opened.traces(chart)) for chart in charts} == before


def test_selected_tokens_own_curves_are_its_values(opened: Opened) -> None:
    opened.page.locator("#words").focus()
    opened.page.keyboard.press("ArrowRight")
    own = [trace for trace in opened.traces("mixing-chart") if trace["method"] == "attnresln_n"][-1]
    rows = Run(Path()).ratios().query("checkpoint == 'finetuned' and document == 'test/0' and position == 0")
    assert own["y"] == pytest.approx(rows["attnresln_n"].tolist(), abs=1e-4)
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


def test_panels_are_drawn_to_one_scale(opened: Opened) -> None:
    curves, slopes = opened.traces("mixing-chart"), []
    drawn = opened.page.locator("#mixing-chart path.curve")
    paths = drawn.evaluate_all("all => all.map(each => each.getAttribute('d'))")
    for path, curve in zip(paths, curves, strict=True):
        heights = [float(part.split(",")[1]) for part in path.removeprefix("M").split("L")]
        slope, start = np.polyfit(curve["y"], heights, 1)
        assert np.abs(slope * np.array(curve["y"]) + start - heights).max() < 0.1  # pixels
        slopes.append(slope)
    assert slopes == pytest.approx([slopes[0]] * len(slopes), rel=1e-2)


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


@pytest.mark.long
def test_a_finger_scrolls_the_page_over_the_charts_and_two_zoom(run: Path, chromium: Any) -> None:
    shown = Opened(chromium, Run(run).page, viewport={"width": 400, "height": 800}, has_touch=True, is_mobile=True)
    page, finger = shown.page, shown.context.new_cdp_session(shown.page)

    def touch(kind: str, *points: tuple[float, float]) -> None:
        fingers = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        finger.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": fingers})
        next_frames(page)

    def centre(chart: str) -> tuple[float, float]:
        page.evaluate(f"document.getElementById('{chart}').scrollIntoView({{block: 'center'}})")
        shown.traces(chart)
        next_frames(page)
        box = page.locator(f"#{chart}").bounding_box()
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    for chart in ("map-chart", "mixing-chart", "steps-chart"):
        x, y = centre(chart)
        before = page.evaluate("scrollY")
        touch("Start", (x, y))
        for i in range(1, 11):
            touch("Move", (x, y - 15 * i))
        touch("End")
        page.wait_for_function("before => scrollY > before + 60", arg=before)
    x, y = centre("map-chart")
    extent = np.ptp(pixels(shown), axis=0)
    touch("Start", (x - 20, y))
    touch("Start", (x - 20, y), (x + 20, y))
    for i in range(1, 7):
        touch("Move", (x - 20 - 5 * i, y), (x + 20 + 5 * i, y))
    touch("End")
    assert np.ptp(pixels(shown), axis=0) == pytest.approx(extent * 100 / 40, rel=0.02)
    shown.close()


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
    page.mouse.move(0, 0)  # or the card would be that of a word that comes to lie under the mouse
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


@pytest.mark.long
def test_either_half_is_dragged_and_a_token_of_the_other_text_is_selected(pair: Opened) -> None:
    page = pair.page
    for half in (0, 1):
        canvas = page.locator("#map-chart canvas").nth(half)
        canvas.evaluate("each => each.scrollIntoView({ block: 'center' })")
        box, before = canvas.bounding_box(), pair.trace("map-chart", "beside")["pixels"]
        start = box["x"] + 20, box["y"] + box["height"] / 3
        page.mouse.move(*start)
        page.mouse.down()
        page.mouse.move(start[0] + 30, start[1] + 40, steps=3)
        page.mouse.up()
        after = pair.trace("map-chart", "beside")["pixels"]
        np.testing.assert_allclose(np.subtract(after, before), np.broadcast_to([30, 40], np.shape(after)), atol=0.01)
    page.mouse.click(box["x"] + after[0][0], box["y"] + after[0][1])
    assert "of test/1" in page.locator("#selected").inner_text()
    assert page.locator("#document").input_value() == "1"
    assert page.locator("#map-beside").input_value() == "0"
    assert pair.trace("map-chart", "beside")["tokens"] == numbers_of(0)
