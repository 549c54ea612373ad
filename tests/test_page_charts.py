"""The page's map, curves and flow of a layer: they draw what the files hold; mouse, fingers and keys work on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import Opened
from page_run import LAYOUTS, choose, next_frames, open_changed, tokens, write_run

from attnmix.core.names import CAPTURED_CHECKPOINT
from attnmix.core.points import STEP_POINTS, Site
from attnmix.page.arrays import visible
from attnmix.store import features as store
from attnmix.store.layout import ACTIVATIONS
from attnmix.store.runs import Run


def shown_tokens(opened: Opened) -> dict[str, Any]:
    """The map's trace of the tokens at the chosen point."""
    return next(trace for trace in opened.traces("map-chart") if trace["name"] == "tokens")


def test_slider_and_keys_walk_through_the_points_in_forward_order(opened: Opened) -> None:
    page = opened.page
    sites = store.stored_sites(ACTIVATIONS)
    page.locator("#point").focus()
    page.keyboard.press("Home")
    assert page.locator("#point-name").inner_text() == f"Word embedding (1 of {len(sites)})"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#point-name").inner_text() == f"Layer 1: Attention heads (3 of {len(sites)})"
    assert page.locator("#point").get_attribute("aria-valuetext") == "Layer 1: Attention heads"
    page.keyboard.press("End")
    assert page.locator("#point-name").inner_text() == f"Layer 3: Layer output ({len(sites)} of {len(sites)})"
    assert page.locator("#layer").input_value() == "3"
    joint = Run(Path()).map("joint").query("layer == 3 and point == 'layer_output'")
    drawn = shown_tokens(opened)
    extent = np.ptp(joint[["x", "y"]].to_numpy())
    assert np.abs(np.array(drawn["x"]) - joint["x"].to_numpy()).max() < 1e-3 * extent
    assert np.abs(np.array(drawn["y"]) - joint["y"].to_numpy()).max() < 1e-3 * extent


def test_play_runs_to_the_last_point_and_stops(opened: Opened) -> None:
    page = opened.page
    page.locator("#point").fill("0")
    started = """() => {
      document.querySelector("#play").click();
      return [document.querySelector("#play").textContent, document.querySelector("#point-name").ariaLive];
    }"""  # in one call: a slow machine would read them when the last point is reached already
    assert page.evaluate(started) == ["Pause", "off"]
    page.wait_for_selector("#play:text-is('Play')")
    assert page.locator("#point-name").get_attribute("aria-live") == "polite"
    assert page.locator("#point").input_value() == page.locator("#point").get_attribute("max")


# Keeps the dots of the map's last picture as they are painted: while points move, nothing else knows where they are.
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
# A dot is painted if its middle on the canvas is not transparent.
LAST_PICTURE = """() => {
  const chart = document.getElementById("map-chart"), canvas = chart.querySelector("canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const alpha = ([x, y]) => data[4 * (Math.round(y) * canvas.width + Math.round(x)) + 3];
  return { moving: "moving" in chart.dataset, dots, painted: dots.map(at => alpha(at) > 0) };
}"""


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
    places = np.array([frame["dots"] for frame in frames[begins - 1 : ends + 1]])
    assert places.shape[1] == len(tokens())
    assert np.isfinite(places).all()
    assert all(all(frame["painted"]) for frame in frames)
    # Each goes straight from its place at one capture point to that at the next, and all arrive together.
    start, way = places[0], places[-1] - places[0]
    shares = ((places - start) * way).sum(axis=(1, 2)) / (way**2).sum()
    assert np.abs(places - start - shares[:, None, None] * way).max() < 0.01
    assert (np.diff(shares[1:-1]) > 0).all()
    assert np.abs(way).max() > 10  # pixels
    shown.close()


def test_every_layout_shows_its_own_places_and_scores(opened: Opened) -> None:
    page = opened.page
    quality = pd.read_parquet(Run(Path()).maps / "quality.parquet")
    page.locator("#point").fill("4")
    site = store.stored_sites(ACTIVATIONS)[4]
    for layout in LAYOUTS:
        choose(page, "layout", layout)
        rows = quality[quality["layout"] == layout].set_index("measure")
        whole, own = rows[rows["point"].isna()], rows[(rows["point"] == site.point) & (rows["layer"] == site.layer)]
        for name in ("trustworthiness", "neighbours_kept", "distance_spearman"):
            cells = page.locator(f'#quality tr[data-measure="{name}"] td').all_inner_texts()
            expected = [whole.loc[name, "value"], own["value"].get(name), whole.loc[name, "chance"]]
            if expected[1] is None:  # among all points of the joint map, only the whole is scored
                assert cells.pop(1) == "\N{EN DASH}"
                expected.pop(1)
            assert [float(cell.replace("\N{MINUS SIGN}", "-")) for cell in cells] == pytest.approx(expected, abs=5.1e-4)
    metrics = Run(Path()).metrics("reduce")
    shown = page.locator('#quality tr[data-measure="trustworthiness"] td').first.inner_text()
    assert float(shown) == pytest.approx(metrics["aligned"]["trustworthiness"], abs=5.1e-4)


@pytest.mark.parametrize(
    ("colour", "legend"),
    [
        ("position", "first token"),
        ("class", "punctuation"),
        ("ratio", "length ratio of others"),
        ("document", "text/0"),
    ],
)
def test_colours_follow_what_was_chosen(opened: Opened, colour: str, legend: str) -> None:
    page = opened.page
    page.locator("#point").fill("8")
    choose(page, "colour", colour)
    assert legend in page.locator("#map-legend").inner_text()
    colours = shown_tokens(opened)["colours"]
    assert len(set(colours)) > 1
    if colour == "document":
        documents = tokens()["document"]
        assert len(set(colours)) == documents.nunique()
        assert pd.Series(colours).groupby(documents.to_numpy()).nunique().max() == 1


def drawn_words(opened: Opened) -> list[dict[str, float]]:
    """Where the words on the map stand, as wide as a browser draws them."""
    words = next(trace for trace in opened.traces("map-chart") if trace["name"] == "words")
    widths = opened.page.evaluate(
        """texts => { const pen = document.createElement('canvas').getContext('2d');
        pen.font = '11.5px system-ui, DejaVu Sans, sans-serif';
        return texts.map(each => pen.measureText(each).width); }""",
        words["text"],
    )
    middles = np.array(words["pixels"]) + np.array(words["moved"])
    return [
        {"left": x - width / 2, "right": x + width / 2, "middle": y}
        for (x, y), width in zip(middles.tolist(), widths, strict=True)
    ]


def test_tokens_can_be_words_none_over_another_and_more_after_zooming_in(opened: Opened) -> None:
    page = opened.page
    choose(page, "shape", "words")
    page.locator("#point").fill(str(len(store.stored_sites(ACTIVATIONS)) - 1))
    page.locator("#token-1").click()
    boxes, number = drawn_words(opened), len(tokens())
    words = next(trace for trace in opened.traces("map-chart") if trace["name"] == "words")
    assert words["text"][0] == tokens()["token"][1]  # the selected one is always there
    assert 3 < len(boxes) < number
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            apart = abs(one["middle"] - other["middle"]) > 8
            assert apart or one["right"] <= other["left"] or other["right"] <= one["left"]
    page.locator("#map-chart").focus()
    for _ in range(8):
        page.keyboard.press("+")
    seen = next(trace for trace in opened.traces("map-chart") if trace["name"] == "words")
    near = set(in_sight(opened))
    assert 1 in near  # the selected one stays where it is
    assert len(near) < number
    # Of those that are still seen, more have room.
    assert len(seen["tokens"]) > len(near & set(words["tokens"]))


def in_sight(opened: Opened) -> list[int]:
    """The tokens that are seen at the zoom that is chosen."""
    found, box = shown_tokens(opened), opened.page.locator("#map-chart canvas").bounding_box()
    pixels = np.array(found["pixels"])
    inside = ((pixels >= 0) & (pixels <= [box["width"], box["height"]])).all(axis=1)
    return np.array(found["tokens"])[inside].tolist()


def pixel(opened: Opened, token: int) -> tuple[float, float]:
    """Where a token lies on the screen, once nothing moves."""
    settled(opened)
    found = shown_tokens(opened)
    box = opened.page.locator("#map-chart canvas").bounding_box()
    x, y = found["pixels"][found["tokens"].index(token)]
    return box["x"] + x, box["y"] + y


def lonely_token() -> int:
    """The token of the last point that lies farthest from any other, so that a pointer meets no other."""
    joint = Run(Path()).map("joint").query("layer == 3 and point == 'layer_output'")[["x", "y"]].to_numpy()
    distances = np.linalg.norm(joint[:, None] - joint[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    return int(distances.min(axis=1).argmax())


def test_pointing_at_a_token_says_what_it_is(opened: Opened) -> None:
    page, token = opened.page, lonely_token()
    page.locator("#map-chart").scroll_into_view_if_needed()
    page.locator("#point").fill(page.locator("#point").get_attribute("max"))
    page.mouse.move(*pixel(opened, token))
    said = page.locator("#map-tip:visible").inner_text()
    row = tokens().iloc[token]
    assert visible(row["token"]) in said
    assert f"position {row['position']} of {row['document']}" in said
    ratios = Run(Path()).ratios().set_index(["checkpoint", "document", "position", "layer"])["attnresln_n"]
    share = ratios[CAPTURED_CHECKPOINT, row["document"], row["position"], 3]
    assert f"length ratio of others {round(100 * float(share))} %" in said


def test_a_token_selected_in_one_view_is_marked_in_all(opened: Opened) -> None:
    page, token = opened.page, lonely_token()
    page.locator("#map-chart").scroll_into_view_if_needed()
    page.locator("#point").fill(page.locator("#point").get_attribute("max"))
    before = {chart: len(opened.traces(chart)) for chart in ("map-chart", "mixing-chart", "steps-chart")}
    page.mouse.click(*pixel(opened, token))
    row = tokens().iloc[token]
    assert visible(row["token"]) in page.locator("#selected").inner_text()
    assert page.locator("#words span[aria-selected=true]").get_attribute("id") == f"token-{token}"
    assert page.locator("#document").input_value() == str(list(tokens()["document"].unique()).index(row["document"]))
    names = [trace["name"] for trace in opened.traces("map-chart")]
    assert "trail" in names
    assert "selected" in names
    trail = opened.traces("map-chart")[names.index("trail")]
    sites = store.stored_sites(ACTIVATIONS)
    stream = ("word_embedding", "embedding_output", "attention_norm", "layer_output")
    assert len(trail["x"]) == len([site for site in sites if site.point in stream])
    page.locator("#excursions").check()
    by_all = opened.traces("map-chart")[names.index("trail")]
    assert len(by_all["x"]) == len([site for site in sites if site.point != "attention_heads"])
    page.locator("#excursions").uncheck()
    methods = page.locator("#ratio-method option").count()
    assert len(opened.traces("mixing-chart")) == before["mixing-chart"] + 2 * methods
    assert len(opened.traces("steps-chart")) > before["steps-chart"]
    page.locator("#clear").click()
    assert {chart: len(opened.traces(chart)) for chart in before} == before


def test_selected_tokens_own_curves_are_its_values(opened: Opened) -> None:
    page = opened.page
    page.locator("#words").focus()
    page.keyboard.press("ArrowRight")
    own = [trace for trace in opened.traces("mixing-chart") if trace["method"] == "attnresln_n"][-1]
    rows = Run(Path()).ratios().query("checkpoint == 'finetuned' and document == 'test/0' and position == 0")
    assert own["y"] == pytest.approx(rows["attnresln_n"].tolist(), abs=1e-4)
    steps = opened.traces("steps-chart")
    layer_in = store.read_features(ACTIVATIONS, Site(0, "embedding_output"))[0].astype(float)
    layer_out = store.read_features(ACTIVATIONS, Site(1, "layer_output"))[0].astype(float)
    cosine = layer_in @ layer_out / np.linalg.norm(layer_in) / np.linalg.norm(layer_out)
    assert steps[-1]["y"][0] == pytest.approx(cosine, abs=1e-3)


def test_curves_and_steps_can_be_chosen(opened: Opened) -> None:
    page = opened.page
    choose(page, "ratio-method", "attn_w")
    rows = pd.read_csv("reports/plots/measure/mixing.csv").query("method == 'attn_w' and checkpoint != 'difference'")
    curves = [part["mean"].tolist() for _, part in rows.groupby("checkpoint", sort=False)]
    assert [trace["y"] for trace in opened.traces("mixing-chart") if trace["method"] == "attn_w"] == curves
    assert page.locator("#mixing-chart .chosen").count() == 1
    choose(page, "step-measure", "norm")
    choose(page, "checkpoint", "pretrained")
    norms = pd.read_csv("reports/plots/measure/geometry.csv").query("checkpoint == 'pretrained' and measure == 'norm'")
    drawn = [trace["y"] for trace in opened.traces("steps-chart") if trace["name"]]
    assert drawn == [
        part["mean"].tolist() for _, part in norms[norms["point"].isin(STEP_POINTS)].groupby("point", sort=False)
    ]


def test_whole_plane_and_these_tokens_can_be_looked_at(opened: Opened) -> None:
    page, number = opened.page, len(tokens())
    for layout in LAYOUTS:
        choose(page, "layout", layout)
        page.locator("#map-view [data-act=whole]").click()
        settled(opened)
        assert len(in_sight(opened)) == number
        whole = np.ptp(np.array(shown_tokens(opened)["pixels"]), axis=0)
        for _ in range(3):
            page.locator("#map-view [data-act=in]").click()
        settled(opened)
        assert np.ptp(np.array(shown_tokens(opened)["pixels"]), axis=0) == pytest.approx(1.5**3 * whole)
        page.locator("#map-view [data-act=fit]").click()
        settled(opened)
        fitted = np.ptp(np.array(shown_tokens(opened)["pixels"]), axis=0)
        assert (fitted >= whole - 1e-6).all()
        assert len(in_sight(opened)) > 0.8 * number


def settled(opened: Opened) -> None:
    """Wait for the end of what moves."""
    opened.traces("map-chart")
    opened.page.wait_for_selector("#map-chart:not([data-moving])")


def test_a_finger_scrolls_the_page_over_the_charts_and_two_zoom(run: Path, chromium: Any) -> None:
    shown = Opened(chromium, Run(run).page, viewport={"width": 400, "height": 800}, has_touch=True, is_mobile=True)
    page = shown.page
    finger = shown.context.new_cdp_session(page)

    def touch(kind: str, *points: tuple[float, float]) -> None:
        found = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        finger.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": found})
        next_frames(page)

    for chart in ("map-chart", "mixing-chart", "steps-chart"):
        page.evaluate(f"document.getElementById('{chart}').scrollIntoView({{block: 'center'}})")
        shown.traces(chart)
        next_frames(page)
        box, before = page.locator(f"#{chart}").bounding_box(), page.evaluate("scrollY")
        x, y = box["x"] + box["width"] / 2, min(max(box["y"], 0) + 200, 600)
        seen = shown_tokens(shown)["pixels"] if chart == "map-chart" else None
        touch("Start", (x, y))
        for i in range(1, 11):
            touch("Move", (x, y - 15 * i))
        touch("End")
        page.wait_for_function("before => scrollY > before + 60", arg=before)
        assert seen is None or shown_tokens(shown)["pixels"] == seen
    page.evaluate("document.getElementById('map-chart').scrollIntoView({block: 'center'})")
    next_frames(page)
    box, before = page.locator("#map-chart").bounding_box(), np.ptp(shown_tokens(shown)["pixels"], axis=0)
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    touch("Start", (x - 20, y))
    touch("Start", (x - 20, y), (x + 20, y))
    for i in range(1, 7):
        touch("Move", (x - 20 - 5 * i, y), (x + 20 + 5 * i, y))
    touch("End")
    assert np.ptp(shown_tokens(shown)["pixels"], axis=0) == pytest.approx(before * 100 / 40, rel=0.02)
    shown.close()


def test_tokens_that_are_not_on_the_map_are_counted(copied: Path, chromium: Any) -> None:
    for layout in LAYOUTS:
        path = Run(Path()).maps / f"{layout}.parquet"
        table = pd.read_parquet(path)
        table[(table["document"] != "test/0") | (table["position"] != 1)].to_parquet(path, index=False)
    shown = open_changed(chromium)
    number = len(tokens())
    note = shown.page.locator("#map-note")
    assert note.inner_text() == f"{number - 1} of {number} tokens are on this map (umap.max_points)."
    shown.page.locator("#token-1").click()
    assert "The selected token is not among them." in note.inner_text()
    shown.close()


@pytest.mark.parametrize(
    ("lengths", "layers", "heads"), [([1], 3, 2), ([512], 12, 12), ([60] * 40, 4, 4)], ids=["one", "long", "many"]
)
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
    assert len(shown_tokens(shown)["x"]) == sum(lengths)
    if len(lengths) > 1:
        choose(page, "document", "39")
        page.locator("#words span").first.click()
        assert page.locator("#sources").inner_text().strip()
        page.locator("#everyone").uncheck()
        assert len(shown_tokens(shown)["x"]) == lengths[0]
    shown.close()


def test_lines_lead_to_the_nearest_in_the_full_space(opened: Opened) -> None:
    page = opened.page
    at = store.stored_sites(ACTIVATIONS).index(Site(2, "layer_output"))
    page.locator("#token-3").click()
    page.mouse.move(0, 0)  # or the card would be that of a word that comes to lie under the mouse
    page.locator("#point").fill(str(at))
    vectors = store.read_features(ACTIVATIONS, Site(2, "layer_output"))[:].astype(float)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit[3]
    cosines[3] = -np.inf
    near = next(trace for trace in opened.traces("map-chart") if trace["name"] == "near")
    assert len(near["tokens"]) == 5
    # Tokens that are the same to rounding may stand in another order.
    assert cosines[near["tokens"]] == pytest.approx(np.sort(cosines)[::-1][:5], abs=1e-6)
    listed = page.locator("#card-nearest li").evaluate_all("all => all.map(each => Number(each.dataset.token))")
    assert listed == near["tokens"]
    choose(page, "layout", "joint")
    places = Run(Path()).map("joint").query("layer == 2 and point == 'layer_output'")[["x", "y"]].to_numpy(float)
    away = np.linalg.norm(places - places[3], axis=1)
    ranks = [int((away < away[other]).sum()) for other in listed]  # itself is nearer than any
    said = page.locator("#card-nearest li").evaluate_all("all => all.map(each => each.lastChild.textContent)")
    told = [int(each.removeprefix("no. ").removesuffix(" on the map")) for each in said]
    assert told == pytest.approx(ranks, abs=1)  # places are rounded


def test_flow_has_the_numbers_of_its_layer(opened: Opened) -> None:
    page = opened.page
    choose(page, "layer", "2")
    opened.traces("steps-chart")
    found = page.locator("#steps-chart .measured").evaluate_all(
        "all => all.map(each => [each.dataset.step, each.textContent])"
    )
    rows = pd.read_csv("reports/plots/measure/geometry.csv").query(
        "checkpoint == 'finetuned' and measure == 'cosine_input' and layer == 2 and mean == mean"
    )
    assert {step: number.replace("\N{MINUS SIGN}", "-") for step, number in found} == {
        row.point: f"{row.mean:.3f}" for row in rows.itertuples()
    }
    assert page.locator("#steps-chart rect[stroke-dasharray='3 3']").count() == 0  # no norm that was not measured
    order = [step for step, _ in found]
    assert order == [step for step in STEP_POINTS if step in order]


def test_panels_are_drawn_to_one_scale(opened: Opened) -> None:
    curves = opened.traces("mixing-chart")
    paths = opened.page.locator("#mixing-chart path.curve")
    drawn = paths.evaluate_all("all => all.map(each => each.getAttribute('d'))")
    assert len(drawn) == len(curves)
    slopes = []
    for path, curve in zip(drawn, curves, strict=True):
        heights = [float(part.split(",")[1]) for part in path.removeprefix("M").split("L")]
        slope, start = np.polyfit(curve["y"], heights, 1)
        assert np.abs(slope * np.array(curve["y"]) + start - heights).max() < 0.1  # pixels
        slopes.append(slope)
    assert slopes == pytest.approx([slopes[0]] * len(slopes), rel=1e-2)
