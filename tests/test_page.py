"""The page: its numbers are the files', its views work in a browser and are linked, and no text of anyone's runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from graphlib import CycleError
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import Opened, browser
from conftest import (
    COMMIT,
    REPOSITORY,
    toy_reviews,
    write_captured_texts,
    write_commits,
    write_parameters,
    write_tiny_bert,
)

from stages import capture, measure, reduce, render
from stages.mixing.matrices import MATRICES
from stages.mixing.ratios import RATIOS
from stages.outputs import activations as store
from stages.outputs.activations import ACTIVATIONS
from stages.outputs.maps import MAPS, read_map, write_map, write_quality
from stages.outputs.mixing import (
    HEADS,
    MIXING,
    contributions_folder,
    read_captured_ratios,
    read_matrix,
    read_ratios,
    write_matrix,
)
from stages.outputs.reports import PAGE, read_metrics
from stages.page.arrays import largest_shares, quantised, visible
from stages.page.assembly import HERE, page_script, write_page
from stages.page.sentences import changed_parameters, findings, headline
from stages.parameters import Parameters, read_parameters
from stages.sites import Site
from stages.vocabulary import CAPTURED_CHECKPOINT, MAP_MEASURES

HOSTILE = [
    "<script>window.hacked=1</script>",
    "</script><script>window.hacked=1</script>",
    '<img src=x onerror="window.hacked=1">',
    "\"'><b>bold</b>",
    "\u202egnol\u202c",
    "\U0001f600",
    "a\x00b",
    "javascript:window.hacked=1//%{x}${x}{{ 7*7 }}",
    "&lt;i&gt;<a href='https://example.org/'>x</a>",
]
LAYOUTS = ["joint", "separate", "aligned"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which every stage but the first two ran, on a tiny model; its tokens are made hostile."""
    folder = tmp_path_factory.mktemp("page")
    write_parameters(
        folder,
        capture={"documents": [0, 1], "texts": ["the film was great . " + " ".join(HOSTILE)], "max_length": 40},
        mixing={"documents": 4, "max_length": 40, "bootstrap_samples": 100, "gradient_documents": 0},
        umap={"n_epochs": 20, "layouts": LAYOUTS},
        figures={"frames_per_second": 20},
    )
    write_tiny_bert(folder / "models/finetuned", seed=1)
    write_tiny_bert(folder / "models/pretrained", seed=2)
    (folder / "data/reviews").mkdir(parents=True)
    toy_reviews(12, 3).to_parquet(folder / "data/reviews/test.parquet", index=False)
    for name in ("metrics/finetune.json", "plots/reviews.csv"):
        (folder / "reports" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "reports" / name, folder / "reports" / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for stage in (capture, measure, reduce):
            stage.main(read_parameters())
        write_captured_texts(["test/0", "test/1", "text/0"])
        write_commits(f"owner/{HOSTILE[0]}")
        tokens = store.read_tokens(ACTIVATIONS)
        tokens.loc[2 : 1 + len(HOSTILE), "token"] = HOSTILE
        tokens.to_parquet(store.tokens_file(ACTIVATIONS), index=False)
        write_page(read_parameters())
        yield folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture
def opened(run: Path, chromium: Any) -> Iterator[Opened]:
    shown = Opened(chromium, run / PAGE, viewport={"width": 1400, "height": 900})
    yield shown
    shown.close()


@pytest.fixture
def copied(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run to take parts away from."""
    folder = tmp_path / "copy"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("models"))
    monkeypatch.chdir(folder)
    return folder


def tokens() -> pd.DataFrame:
    return store.read_tokens(ACTIVATIONS)


def shown_tokens(opened: Opened) -> dict[str, Any]:
    """The map's trace of the tokens at the chosen point."""
    return next(trace for trace in opened.traces("map-chart") if trace["name"] == "tokens")


def choose(page: Any, label: str, option: str) -> None:
    page.locator(f"#{label}").select_option(option)


def test_every_view_renders_says_nothing_wrong_and_asks_for_nothing(opened: Opened) -> None:
    for chart in ("map-chart", "mixing-chart", "steps-chart"):
        assert opened.page.locator(f"#{chart} .main-svg").count() > 0
        assert opened.traces(chart)
    documents = tokens()["document"]
    assert opened.page.locator("#words span").count() == (documents == documents[0]).sum()
    assert opened.page.locator("#quality tbody tr").count() == 9
    own_basis = opened.page.locator("#own-basis").inner_text()
    assert own_basis.startswith("Places of attention heads on the joint map cannot be compared")


def reviews_at(layer: int, method: str = "attnresln_n") -> pd.DataFrame:
    table = pd.read_csv("reports/plots/mixing_by_review.csv").query("checkpoint == 'finetuned' and method == @method")
    return table[table["layer"] == layer]


def test_first_picture_has_every_measured_review_and_the_chosen_text(opened: Opened) -> None:
    page = opened.page
    means = pd.read_csv("reports/plots/mixing.csv").query("method == 'attnresln_n' and checkpoint == 'finetuned'")
    most, least = means.loc[means["mean"].idxmax()], means.loc[means["mean"].idxmin()]
    assert page.locator("h1").inner_text() == (
        f"Layer {most['layer']} mixes tokens most, at a ratio of {100 * most['mean']:.0f} %; layer {least['layer']} "
        f"least, {100 * least['mean']:.0f} %"
    )
    assert page.locator("#layer").input_value() == str(most["layer"])
    dots = page.locator("#overview-chart circle").evaluate_all(
        "all => all.map(each => [each.textContent, Number(each.getAttribute('cy'))])"
    )
    expected = pd.concat([reviews_at(layer) for layer in (1, 2, 3)])
    assert [said for said, _ in dots] == [f"{row.document}: {100 * row.mean:.0f} %" for row in expected.itertuples()]
    heights = np.array([height for _, height in dots])
    slope, start = np.polyfit(expected["mean"], heights, 1)
    assert slope < 0
    assert np.abs(slope * expected["mean"] + start - heights).max() < 0.1  # pixels
    own = page.locator("#overview-chart path.own").get_attribute("d")
    shares = read_captured_ratios(["test/0"]).query("checkpoint == 'finetuned'").groupby("layer")["attnresln_n"].mean()
    drawn = [float(part.split(" ")[1]) for part in re.split("[ML]", own)[1:]]
    assert drawn == pytest.approx((slope * shares + start).tolist(), abs=0.2)
    among = reviews_at(int(most["layer"]))["mean"]
    value = shares[int(most["layer"])]
    assert page.locator("#typical").inner_text() == (
        f"The mean ratio of its tokens in layer {most['layer']} is {100 * value:.0f} %, higher than in "
        f"{100 * (among < value).mean():.0f} % of the {len(among)} measured reviews."
    )


def test_first_picture_chooses_layers_and_texts_and_follows_the_choice(opened: Opened) -> None:
    page = opened.page
    page.locator("#overview-chart rect[data-layer='2']").dispatch_event("click")
    assert page.locator("#layer").input_value() == "2"
    assert "in layer 2 is" in page.locator("#typical").inner_text()
    choose(page, "ratio-method", "attn_w")
    said = page.locator("#overview-chart circle").all_text_contents()
    rows = pd.concat([reviews_at(layer, "attn_w") for layer in (1, 2, 3)])
    assert said == [f"{row.document}: {100 * row.mean:.0f} %" for row in rows.itertuples()]
    captured = page.locator("#overview-chart [data-document]")
    measured = {"test/0", "test/1"} & set(rows["document"])
    assert captured.count() == 3 * len(measured)
    choose(page, "document", "2")
    assert page.locator("#text-name").inner_text() == "text/0"
    captured.first.dispatch_event("click")
    chosen = page.locator("#document").input_value()
    assert page.locator("#text-name").inner_text() == f"test/{chosen}"
    assert {said.split(":")[0] for said in captured.all_text_contents()} == measured


def test_first_picture_shows_a_part_of_very_many_reviews(
    copied: Path, chromium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.page.payload.REVIEWS", 3)
    shown = shown_again(chromium)
    names = reviews_at(1)["document"].tolist()
    said = shown.page.locator("#overview-chart circle").all_text_contents()
    assert list(dict.fromkeys(each.split(":")[0] for each in said)) == names[::2]
    assert f"of {len(names[::2])} of the {len(names)} measured reviews." in shown.page.locator("#typical").inner_text()
    shown.close()


def test_a_text_is_chosen_by_its_beginning_and_what_became_of_it_is_said(opened: Opened) -> None:
    reviews = pd.read_parquet("data/reviews/test.parquet")["text"]
    options = opened.page.locator("#document option").all_inner_texts()
    lengths = tokens().groupby("document", sort=False).size().tolist()
    assert options[0] == f"test/0: {reviews[0][:40].rstrip()}… ({lengths[0]} tokens)"
    assert options[2].startswith("text/0: the film was great . <script>window.")
    assert opened.page.locator("#text-note").inner_text() == (
        "Labelled negative, classified as positive with a probability of 75 %. Only 9 of its 12 tokens were read "
        "(capture.max_length). 2 of its 9 tokens are unknown to the model."
    )


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
    joint = read_map("joint").query("layer == 3 and point == 'layer_output'")
    drawn = shown_tokens(opened)
    extent = np.ptp(joint[["x", "y"]].to_numpy())
    assert np.abs(np.array(drawn["x"]) - joint["x"].to_numpy()).max() < 1e-3 * extent
    assert np.abs(np.array(drawn["y"]) - joint["y"].to_numpy()).max() < 1e-3 * extent


def test_map_opens_where_most_tokens_can_be_told_apart(opened: Opened) -> None:
    page = opened.page
    joint = read_map("joint")
    low, high = joint[["x", "y"]].min().to_numpy(), joint[["x", "y"]].max().to_numpy()
    own = joint[joint["document"] == "test/0"]
    spread = {
        Site(layer, point): len(
            np.unique(((rows[["x", "y"]].to_numpy() - low) / (high - low) * 32).astype(int), axis=0)
        )
        for (layer, point), rows in own.groupby(["layer", "point"])
    }
    opened_at = store.stored_sites(ACTIVATIONS)[int(page.locator("#point").input_value())]
    assert spread[opened_at] >= max(spread.values()) - 1  # the page's limits are those of a square
    assert spread[opened_at] > min(spread.values())
    assert page.locator("#shape").input_value() == "words"


def test_play_runs_to_the_last_point_and_stops(opened: Opened) -> None:
    page = opened.page
    page.locator("#play").click()
    assert page.locator("#play").inner_text() == "Pause"
    assert page.locator("#point-name").get_attribute("aria-live") == "off"
    page.wait_for_selector("#play:text-is('Play')")
    assert page.locator("#point-name").get_attribute("aria-live") == "polite"
    assert page.locator("#point").input_value() == page.locator("#point").get_attribute("max")


def test_every_layout_shows_its_own_places_and_scores(opened: Opened) -> None:
    page = opened.page
    quality = pd.read_parquet(MAPS / "quality.parquet")
    page.locator("#point").fill("4")
    site = store.stored_sites(ACTIVATIONS)[4]
    for layout in LAYOUTS:
        choose(page, "layout", layout)
        rows = quality[quality["layout"] == layout].set_index("measure")
        whole, own = rows[rows["point"].isna()], rows[(rows["point"] == site.point) & (rows["layer"] == site.layer)]
        for name in ("trustworthiness", "neighbours_kept", "distance_spearman"):
            cells = page.locator(f'#quality tr[data-measure="{name}"] td').all_inner_texts()
            expected = [whole.loc[name, "value"], own.loc[name, "value"], whole.loc[name, "chance"]]
            assert [float(cell) for cell in cells] == pytest.approx(expected, abs=5.1e-4)
    metrics = read_metrics("maps")
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
    colours = shown_tokens(opened)["color"]
    assert len(set(colours)) > 1
    if colour == "document":
        documents = tokens()["document"]
        assert len(set(colours)) == documents.nunique()
        assert pd.Series(colours).groupby(documents.to_numpy()).nunique().max() == 1


def drawn_words(page: Any) -> list[dict[str, float]]:
    """The boxes of the words on the map."""
    found = page.evaluate(
        """[...document.querySelectorAll('#map-chart .textpoint text')].filter(each => each.textContent.trim())
        .map(each => each.getBoundingClientRect())
        .map(box => ({left: box.left, right: box.right, middle: (box.top + box.bottom) / 2}))"""
    )
    return list(found)


def test_tokens_can_be_words_none_over_another_and_more_after_zooming_in(opened: Opened) -> None:
    page = opened.page
    choose(page, "shape", "words")
    page.locator("#point").fill(str(len(store.stored_sites(ACTIVATIONS)) - 1))
    page.locator("#token-1").click()
    shown, number = shown_tokens(opened), len(tokens())
    words = [word for word in shown["text"] if word.strip()]
    assert shown["text"][1] == tokens()["token"][1]  # the selected one is always there
    boxes = drawn_words(page)
    assert 3 < len(boxes) == len(words) < number
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            apart = abs(one["middle"] - other["middle"]) > 8
            assert apart or one["right"] <= other["left"] or other["right"] <= one["left"]
    x, y = shown["x"][1], shown["y"][1]
    page.evaluate(
        "([x, y]) => Plotly.relayout('map-chart', "
        "{'xaxis.range': [x - 0.01, x + 0.01], 'yaxis.range': [y - 0.01, y + 0.01]})",
        [x, y],
    )
    assert len([word for word in shown_tokens(opened)["text"] if word.strip()]) > len(words)


def pixel(page: Any, token: int) -> tuple[float, float]:
    """Where a token lies on the screen."""
    x, y = page.evaluate(
        """token => { const gd = document.getElementById('map-chart'), l = gd._fullLayout;
        const box = gd.getBoundingClientRect();
        const t = gd.data.find(each => each.customdata && Array.isArray(each.customdata[0]));
        const i = t.customdata.findIndex(each => each[0] === token);
        return [box.x + l._size.l + l.xaxis.l2p(t.x[i]) + (l.xaxis._offset - l._size.l),
                box.y + l.yaxis._offset + l.yaxis.l2p(t.y[i])]; }""",
        token,
    )
    return float(x), float(y)


def lonely_token() -> int:
    """The token of the last point that lies farthest from any other, so that a pointer meets no other."""
    joint = read_map("joint").query("layer == 3 and point == 'layer_output'")[["x", "y"]].to_numpy()
    distances = np.linalg.norm(joint[:, None] - joint[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    return int(distances.min(axis=1).argmax())


def test_pointing_at_a_token_says_what_it_is(opened: Opened) -> None:
    page, token = opened.page, lonely_token()
    page.locator("#map-chart").scroll_into_view_if_needed()
    page.locator("#point").fill(page.locator("#point").get_attribute("max"))
    page.mouse.move(*pixel(page, token))
    page.wait_for_selector("#map-chart .hoverlayer .hovertext")
    said = page.locator("#map-chart .hoverlayer").text_content()
    row = tokens().iloc[token]
    assert visible(row["token"]) in said
    assert f"position {row['position']} of {row['document']}" in said
    ratios = read_ratios().set_index(["checkpoint", "document", "position", "layer"])["attnresln_n"]
    share = ratios[CAPTURED_CHECKPOINT, row["document"], row["position"], 3]
    assert f"length ratio of others {round(100 * float(share))} %" in said


def test_a_token_selected_in_one_view_is_marked_in_all(opened: Opened) -> None:
    page, token = opened.page, lonely_token()
    page.locator("#map-chart").scroll_into_view_if_needed()
    page.locator("#point").fill(page.locator("#point").get_attribute("max"))
    before = {chart: len(opened.traces(chart)) for chart in ("map-chart", "mixing-chart", "steps-chart")}
    page.mouse.click(*pixel(page, token))
    row = tokens().iloc[token]
    assert visible(row["token"]) in page.locator("#selected").inner_text()
    assert page.locator("#words span[aria-selected=true]").get_attribute("id") == f"token-{token}"
    assert page.locator("#document").input_value() == str(list(tokens()["document"].unique()).index(row["document"]))
    names = [trace["name"] for trace in opened.traces("map-chart")]
    assert "trail" in names
    assert "selected" in names
    trail = opened.traces("map-chart")[names.index("trail")]
    compared = [site for site in store.stored_sites(ACTIVATIONS) if site.point != "attention_heads"]
    assert len(trail["x"]) == len(compared)
    assert len(opened.traces("mixing-chart")) == before["mixing-chart"] + 2
    assert len(opened.traces("steps-chart")) > before["steps-chart"]
    page.locator("#clear").click()
    assert {chart: len(opened.traces(chart)) for chart in before} == before


def test_a_click_selects_after_the_layout_was_changed(opened: Opened) -> None:
    page, token = opened.page, lonely_token()
    page.locator("#point").fill(page.locator("#point").get_attribute("max"))
    for layout in ("aligned", "joint"):
        choose(page, "layout", layout)
    page.locator("#map-chart").scroll_into_view_if_needed()
    page.mouse.click(*pixel(page, token))
    assert page.locator("#words span[aria-selected=true]").get_attribute("id") == f"token-{token}"


def test_another_text_is_shaded_while_nothing_is_selected(opened: Opened) -> None:
    page = opened.page
    choose(page, "document", "1")
    choose(page, "layer", "1")
    ratios = read_ratios().query("checkpoint == 'finetuned' and document == 'test/1' and layer == 1")["attnresln_n"]
    titles = page.locator("#words span").evaluate_all("all => all.map(each => each.title)")
    assert [title.split(", ")[-1] for title in titles] == [
        f"length ratio of others {100 * share:.0f} %" for share in ratios
    ]
    shades = page.locator("#words span").evaluate_all("all => all.map(each => each.style.backgroundColor)")
    assert all(shade.startswith("rgba(") for shade in shades)


def test_selected_tokens_own_curves_are_its_values(opened: Opened) -> None:
    page = opened.page
    page.locator("#words").focus()
    page.keyboard.press("ArrowRight")
    own = opened.traces("mixing-chart")[-1]
    rows = read_ratios().query("checkpoint == 'finetuned' and document == 'test/0' and position == 0")
    assert own["y"] == pytest.approx(rows["attnresln_n"].tolist(), abs=1e-4)
    steps = opened.traces("steps-chart")
    layer_in = store.read_features(ACTIVATIONS, Site(0, "embedding_output"))[0].astype(float)
    layer_out = store.read_features(ACTIVATIONS, Site(1, "layer_output"))[0].astype(float)
    cosine = layer_in @ layer_out / np.linalg.norm(layer_in) / np.linalg.norm(layer_out)
    assert steps[-1]["y"][0] == pytest.approx(cosine, abs=1e-3)


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
    ratios = read_captured_ratios(tokens()["document"].unique().tolist())
    of_layer = ratios.query("checkpoint == 'finetuned' and layer == 2")["attnresln_n"].sort_values().to_numpy()
    low, high = of_layer[int(0.05 * (len(of_layer) - 1))], of_layer[int(np.ceil(0.95 * (len(of_layer) - 1)))]
    legend = page.locator("#text-legend").inner_text()
    assert f"{100 * low:.0f} % or less" in legend
    assert f"{100 * high:.0f} % or more" in legend
    own = ratios.query("checkpoint == 'finetuned' and layer == 2 and document == 'test/0'")["attnresln_n"].to_numpy()
    shades = page.locator("#words span").evaluate_all("all => all.map(each => each.style.backgroundColor)")
    drawn = [float(re.search(r"([\d.]+)\)", shade)[1]) for shade in shades]
    assert drawn == pytest.approx((0.68 * np.clip((own - low) / (high - low), 0, 1)).tolist(), abs=0.01)


def test_a_link_shows_what_its_sender_saw(opened: Opened, run: Path) -> None:
    page = opened.page
    chosen = {
        "document": "1",
        "layer": "2",
        "ratio-method": "attn_n",
        "checkpoint": "pretrained",
        "matrix": "attention",
    }
    for control, option in {**chosen, "head": "1", "layout": "aligned", "step-measure": "norm"}.items():
        choose(page, control, option)
    page.locator("#words span").nth(2).click()
    page.locator("#point").fill("5")
    choose(page, "layer", "2")
    selected = page.locator("#selected").inner_text()
    page.wait_for_function("() => location.hash.includes('point=5') && location.hash.includes('token=')")
    link = page.evaluate("location.href")
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector("html[data-ready]")
    shown = {
        name: page.locator(f"#{name}").input_value() for name in (*chosen, "head", "layout", "step-measure", "point")
    }
    assert shown == {**chosen, "head": "1", "layout": "aligned", "step-measure": "norm", "point": "5"}
    assert page.locator("#selected").inner_text() == selected
    page.evaluate("location.hash = 'layer=3&document=99&method=<b>&checkpoint=finetuned'")
    page.wait_for_function("() => document.getElementById('layer').value === '3'")
    assert page.locator("#checkpoint").input_value() == "finetuned"
    assert (page.locator("#document").input_value(), page.locator("#ratio-method").input_value()) == ("1", "attn_n")


def test_a_page_that_nobody_changed_has_a_plain_address_and_views_can_be_gone_to(opened: Opened) -> None:
    page = opened.page
    page.locator("nav a[href='#map']").click()
    page.wait_for_timeout(400)  # longer than the page waits before it writes its address
    assert page.evaluate("location.hash") == "#map"
    first = page.locator("#layer").input_value()
    other = "2" if first != "2" else "3"
    choose(page, "layer", other)
    page.wait_for_function("layer => location.hash === `#layer=${layer}`", arg=other)
    choose(page, "layer", first)
    page.wait_for_function("() => location.hash === ''")


def test_the_link_can_be_copied(run: Path, chromium: Any) -> None:
    shown = Opened(chromium, run / PAGE, permissions=["clipboard-read", "clipboard-write"])
    choose(shown.page, "matrix", "norm")
    shown.page.locator("#copy-link").click()
    shown.page.wait_for_selector("#copy-link:text-is('Copied')")
    assert shown.page.evaluate("navigator.clipboard.readText()") == f"{(run / PAGE).as_uri()}#matrix=norm"
    shown.page.wait_for_selector("#copy-link:text-is('Copy link')")
    shown.close()


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
    row = np.asarray(read_matrix("finetuned", "test/0", method)[1, 3], dtype=float)
    row = row / row.sum()
    most, own = re.search(
        r", (at most )?(\d+) % of it is its own; from", page.locator("#sources").inner_text()
    ).groups()
    # One that is not among the sources that a page keeps is less than the least of these.
    assert float(own) == pytest.approx(100 * row[3], abs=1) or (most and 100 * row[3] < float(own) + 0.5)
    row[3] = 0
    listed = page.locator("#sources li").all_inner_texts()
    assert float(listed[0].split("\n")[-1].removesuffix(" %")) == pytest.approx(100 * row.max(), abs=1)
    assert visible(tokens()["token"][int(row.argmax())]) in listed[0]


def test_pointing_at_a_word_shows_its_sources_and_selects_nothing(opened: Opened) -> None:
    page = opened.page
    page.locator("#token-1").click()
    page.locator("#token-3").hover()
    assert page.locator("#sources-title").inner_text() == f"\u201c{visible(tokens()['token'][3])}\u201d took from"
    assert page.locator("#words span[aria-selected=true]").get_attribute("id") == "token-1"
    page.mouse.move(0, 0)
    assert page.locator("#sources-title").inner_text() == f"\u201c{visible(tokens()['token'][1])}\u201d took from"


def test_attention_can_be_read_by_head(opened: Opened) -> None:
    page = opened.page
    choose(page, "matrix", "attention")
    choose(page, "layer", "1")
    assert page.locator("#head option").count() == 1 + 4
    choose(page, "head", "2")
    page.locator("#token-1").click()
    row = np.asarray(read_matrix("finetuned", "test/0", HEADS)[0, 2, 1], dtype=float)
    largest = np.delete(row, 1).max() / row.sum()
    first = page.locator("#sources li").first.inner_text()
    assert float(first.split("\n")[-1].removesuffix(" %")) == pytest.approx(100 * largest, abs=1)
    choose(page, "matrix", "alti")
    assert page.locator("#head").is_disabled()


def test_numbers_are_those_of_the_metrics_files(opened: Opened) -> None:
    page = opened.page
    tested = read_metrics("finetune")["test"]
    assert f"{100 * tested['accuracy']:.1f} % test accuracy" in page.locator(".facts").inner_text().replace("\n", " ")
    mixing = pd.read_csv("reports/plots/mixing.csv").query("method == 'attnresln_n'")
    drawn = {trace["name"]: trace for trace in opened.traces("mixing-chart") if trace["name"]}
    for checkpoint, name in (("pretrained", "Pretrained"), ("finetuned", "Fine-tuned")):
        assert drawn[name]["y"] == mixing.loc[mixing["checkpoint"] == checkpoint, "mean"].tolist()
    best = mixing[mixing["checkpoint"] == "finetuned"].nlargest(1, "mean").iloc[0]
    said = page.locator("#findings").inner_text()
    whose = f"LayerNorm of layer {best['layer']}, the length ratio of other tokens in a token's vector"
    assert f"{whose} is {100 * best['mean']:.0f} %" in said
    assert f"interval {100 * best['ci_low']:.0f} % to {100 * best['ci_high']:.0f} %" in said
    assert f"interval {100 * tested['accuracy_ci_low']:.0f} % to {100 * tested['accuracy_ci_high']:.0f} %" in said
    moved = pd.read_csv("reports/plots/movement.csv").query("layout == 'joint' and against == 'attnresln_n'")
    for which in ("spearman", "partial_full_space"):
        of_layers = moved[moved["measure"] == which].set_index("layer")["mean"]
        low, high = of_layers.idxmin(), of_layers.idxmax()
        assert f"{of_layers[low]:.2f} (layer {low}) to {of_layers[high]:.2f} (layer {high})" in said
    assert "with an interval over 3 texts and the seeds" in said
    choose(page, "layer", "2")
    difference = pd.read_csv("reports/plots/mixing_difference.csv").query("layer == 2 and method == 'attnresln_n'")
    shown = page.locator("#difference").inner_text().replace("\u2212", "-")
    assert f"{100 * difference['difference'].item():+.1f} percentage points" in shown
    steps = pd.read_csv("reports/plots/steps.csv").query(
        "checkpoint == 'finetuned' and measure == 'cosine_input' and step == 'ffn_norm'"
    )
    found = next(trace for trace in opened.traces("steps-chart") if trace["name"] == "Last LayerNorm")
    assert found["y"] == steps["mean"].tolist()


def test_curves_and_steps_can_be_chosen(opened: Opened) -> None:
    page = opened.page
    choose(page, "ratio-method", "attn_w")
    rows = pd.read_csv("reports/plots/mixing.csv").query("method == 'attn_w'")
    curves = [part["mean"].tolist() for _, part in rows.groupby("checkpoint", sort=False)]
    assert [trace["y"] for trace in opened.traces("mixing-chart") if trace["name"]] == curves
    choose(page, "step-measure", "norm")
    choose(page, "checkpoint", "pretrained")
    norms = pd.read_csv("reports/plots/steps.csv").query("checkpoint == 'pretrained' and measure == 'norm'")
    drawn = [trace["y"] for trace in opened.traces("steps-chart") if trace["name"]]
    assert drawn == [part["mean"].tolist() for _, part in norms.groupby("step", sort=False)]


def test_a_choice_draws_only_the_charts_that_show_it(opened: Opened) -> None:
    page = opened.page
    page.evaluate(
        """() => { window.drawn = new Set(); for (const chart of document.querySelectorAll('.chart'))
        chart.on('plotly_afterplot', () => drawn.add(chart.id)); }"""
    )
    for control, option, charts in (
        ("colour", "class", ["map-chart"]),
        ("step-measure", "norm", ["steps-chart"]),
        ("layer", "1", ["mixing-chart", "steps-chart"]),
        ("layer", "2", ["mixing-chart", "steps-chart"]),
        ("ratio-method", "attn_w", ["map-chart", "mixing-chart"]),
        ("matrix", "attention", []),
    ):
        page.evaluate("drawn.clear()")
        choose(page, control, option)
        page.wait_for_function("charts => charts.every(each => drawn.has(each))", arg=charts)
        next_frames(page)
        assert sorted(page.evaluate("[...drawn]")) == charts


def next_frames(page: Any) -> None:
    """Wait until the browser has drawn twice, and so has done what it was told before."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_hostile_text_is_shown_and_runs_nothing(opened: Opened) -> None:
    page = opened.page
    shown = page.locator("#words").inner_text()
    for text in HOSTILE:
        assert visible(text) in shown
    raw = page.locator("details").text_content()
    assert all(visible(text) in raw for text in HOSTILE)
    choose(page, "shape", "words")
    for token, text in enumerate(HOSTILE, start=2):
        page.locator(f"#token-{token}").click()  # the selected word is always drawn
        assert visible(text) in page.locator("#map-chart").text_content()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.locator("#map-chart a[href*='example.org'], #words a, details a").count() == 0
    policy = page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    scripts = policy.split("script-src")[1].split(";")[0]
    assert "unsafe-inline" not in scripts


def test_policy_stops_a_script_that_is_not_the_pages_own(run: Path, chromium: Any, tmp_path: Path) -> None:
    changed = tmp_path / "changed.html"
    text = (run / PAGE).read_text(encoding="utf-8")
    changed.write_text(text.replace("</main>", "<script>window.hacked=1</script></main>"), encoding="utf-8")
    shown = Opened(chromium, changed)
    assert shown.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in error for error in shown.errors)
    shown.context.close()


def test_a_page_that_cannot_be_read_says_so(run: Path, chromium: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    text = (run / PAGE).read_text(encoding="utf-8")
    broken.write_text(text.replace('id="data">', 'id="data">!'), encoding="utf-8")
    page = chromium.new_page()
    page.goto(broken.as_uri())
    page.wait_for_selector(".missing:text('The views cannot be shown')")
    page.close()


def test_no_two_modules_define_one_name_as_they_share_a_scope() -> None:
    defined = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)
    names = [name for path in (HERE / "script").glob("*.js") for name in defined.findall(path.read_text("utf-8"))]
    assert len(names) > 50
    assert sorted(names) == sorted(set(names))


def test_modules_stand_after_those_that_they_import(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text('import {\n  two,\n} from "./z.js";\nconst one = two;\n')
    (tmp_path / "z.js").write_text("export const two = 2;\n")
    script = page_script(tmp_path)
    assert script.index("\nconst two = 2;") < script.index("\nconst one = two;")
    assert "import" not in script
    (tmp_path / "z.js").write_text('import { one } from "./a.js";\n')
    with pytest.raises(CycleError):
        page_script(tmp_path)


def test_no_button_sends_a_chart_away(opened: Opened) -> None:
    page = opened.page
    for chart in ("map-chart", "mixing-chart", "steps-chart"):
        page.locator(f"#{chart}").hover()
        names = page.locator(f"#{chart} .modebar-btn").evaluate_all(
            "all => all.map(each => each.getAttribute('data-title') || each.getAttribute('aria-label') || '')"
        )
        assert len(names) == 6
        assert not [name for name in names if re.search("share|cloud|edit|send", name, re.IGNORECASE)]


def test_reset_shows_the_whole_of_the_layout_that_is_chosen(opened: Opened) -> None:
    page = opened.page
    look = "(() => { const a = document.getElementById('map-chart')._fullLayout.xaxis; return [...a.range]; })()"
    for layout in ("joint", "separate", "aligned"):
        choose(page, "layout", layout)
        whole = page.evaluate(look)
        page.locator("#map-chart").hover()
        page.locator("#map-chart .modebar-btn[data-attr=zoom][data-val=in]").click()
        page.wait_for_function(f"low => {look}[0] > low", arg=whole[0])
        page.locator("#map-chart .modebar-btn[data-attr=zoom][data-val=reset]").click()
        page.wait_for_function(f"low => {look}[0] <= low + 1e-9", arg=whole[0])
        assert page.evaluate(look) == pytest.approx(whole)


def test_coming_back_to_the_page_shows_what_the_controls_say(run: Path, chromium: Any, tmp_path: Path) -> None:
    other = tmp_path / "other.html"
    other.write_text("<title>elsewhere</title>", encoding="utf-8")
    shown = Opened(chromium, run / PAGE)
    page = shown.page
    for control, option in (("colour", "class"), ("step-measure", "norm"), ("shape", "words")):
        choose(page, control, option)
    url = page.url
    page.goto(other.as_uri())
    page.go_back()
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.url == url
    chosen = {name: page.locator(f"#{name}").input_value() for name in ("colour", "step-measure", "shape")}
    words = "text" in shown_tokens(shown)["mode"]
    assert words == (chosen["shape"] == "words")
    assert ("first token" in page.locator("#map-legend").inner_text()) == (chosen["colour"] == "position")
    label = page.evaluate("document.getElementById('steps-chart').layout.yaxis.title.text")
    assert label == page.locator(f"#step-measure option[value={chosen['step-measure']}]").inner_text()
    shown.context.close()


def test_a_finger_scrolls_the_page_over_the_charts(run: Path, chromium: Any) -> None:
    shown = Opened(chromium, run / PAGE, viewport={"width": 400, "height": 800}, has_touch=True, is_mobile=True)
    page = shown.page
    finger = shown.context.new_cdp_session(page)
    for chart in ("map-chart", "mixing-chart", "steps-chart"):
        page.evaluate(f"document.getElementById('{chart}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
        next_frames(page)
        box, before = page.locator(f"#{chart}").bounding_box(), page.evaluate("scrollY")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        ranges = f"['xaxis', 'yaxis'].map(name => [...document.getElementById('{chart}')._fullLayout[name].range])"
        whole = page.evaluate(ranges)
        for kind, moved in [("Start", 0), *(("Move", 15 * i) for i in range(1, 11)), ("End", None)]:
            points = [] if moved is None else [{"x": x, "y": y - moved}]
            finger.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})
            next_frames(page)
        page.wait_for_function("before => scrollY > before + 60", arg=before)
        assert page.evaluate(ranges) == whole
    assert page.locator(".modebar-btn").count() == 0
    shown.close()


def test_print_says_what_is_shown_and_fits_the_paper(run: Path, chromium: Any) -> None:
    shown = Opened(chromium, run / PAGE, viewport={"width": 1400, "height": 900}, color_scheme="dark")
    page = shown.page
    page.locator("#token-1").click()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    for name in ("layout", "point-name", "layer", "checkpoint", "matrix", "step-measure", "selected"):
        assert page.locator(f"#{name}").is_visible()
    for name in ("play", "point", "clear"):
        assert not page.locator(f"#{name}").is_visible()
    for chart in ("map-chart", "mixing-chart", "steps-chart"):
        box = page.locator(f"#{chart}").bounding_box()
        drawing = page.locator(f"#{chart} .main-svg").first.bounding_box()
        assert box["width"] <= 700  # of A4 between usual margins
        assert drawing["width"] <= box["width"]
        assert drawing["height"] <= box["height"]
    ink = page.evaluate("document.getElementById('mixing-chart').layout.font.color")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    page.wait_for_function("ink => document.getElementById('mixing-chart').layout.font.color !== ink", arg=ink)
    page.wait_for_function("() => document.querySelector('#map-chart .main-svg').getBoundingClientRect().width > 700")
    shown.close()


def test_sources_name_positions_and_pointing_at_one_marks_the_word(opened: Opened) -> None:
    page = opened.page
    page.locator("#token-3").click()
    row = page.locator("#sources li:has(small)").first
    token = int(row.get_attribute("data-token"))
    assert row.locator("small").inner_text().strip() == str(tokens()["position"][token])
    row.hover()
    assert page.locator("#words span.pointed").get_attribute("id") == f"token-{token}"
    choose(page, "layer", "1")
    choose(page, "matrix", "alti_rollout")
    assert "from the embedding to layer 1" in page.locator("#sources").inner_text()
    choose(page, "matrix", "alti")
    assert "By ALTI, in layer 1" in page.locator("#sources").inner_text()


def test_a_head_stays_chosen_when_the_model_changes(opened: Opened) -> None:
    page = opened.page
    choose(page, "matrix", "attention")
    choose(page, "head", "1")
    choose(page, "checkpoint", "pretrained")
    assert page.locator("#head").input_value() == "1"


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """WCAG's, of two colours in 0 to 255."""
    luminances = []
    for colour in (one, other):
        parts = [c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        luminances.append(0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2])
    dark, light = sorted(luminances)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_on_every_shade_and_controls_be_seen(run: Path, chromium: Any, scheme: str) -> None:
    shown = Opened(chromium, run / PAGE, color_scheme=scheme)
    looks = shown.page.evaluate(
        """(() => { const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
        const body = getComputedStyle(document.body);
        return {paper: numbers(body.backgroundColor), ink: numbers(body.color),
                edge: numbers(getComputedStyle(document.getElementById('layout')).borderTopColor),
                shades: [...document.querySelectorAll('#words span')].map(
                    each => numbers(getComputedStyle(each).backgroundColor)),
                strongest: numbers(getComputedStyle(document.querySelector('#text-legend .ramp')).backgroundImage
                    .match(/rgba[(].*?[)]/g).at(-1))}; })()"""
    )
    assert contrast(looks["edge"][:3], looks["paper"][:3]) >= 3
    *colour, strongest = looks["strongest"]
    assert strongest >= max(shade[3] for shade in looks["shades"]) > 0
    mixed = [strongest * c + (1 - strongest) * p for c, p in zip(colour, looks["paper"], strict=False)]
    assert contrast(looks["ink"][:3], mixed) >= 4.5
    shown.close()


def test_dark_mode_changes_page_and_charts(opened: Opened) -> None:
    page = opened.page
    look = (
        "[getComputedStyle(document.body).backgroundColor, document.getElementById('mixing-chart').layout.font.color]"
    )
    light = page.evaluate(look)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"light => {look}.every((colour, i) => colour !== light[i])", arg=light)


def test_narrow_window_needs_no_sideways_scrolling(run: Path, chromium: Any) -> None:
    shown = Opened(chromium, run / PAGE, viewport={"width": 400, "height": 800})
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 400
    assert shown.page.locator("#map-chart").bounding_box()["width"] > 300
    shown.close()


def test_controls_have_names(opened: Opened) -> None:
    unnamed = opened.page.evaluate(
        "[...document.querySelectorAll('select, input, button:not(.modebar-btn)')].filter(each => !each.labels?.length"
        " && !each.getAttribute('aria-label') && !each.textContent.trim()).map(each => each.id)"
    )
    assert unnamed == []


@pytest.mark.long
def test_another_process_renders_the_same_bytes(copied: Path) -> None:
    """Also where Python hashes words otherwise, on which the order of a set depends."""
    first = {path: path.read_bytes() for path in sorted((copied / "reports").rglob("*")) if path.is_file()}
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-m", "stages.render"], cwd=copied, env=environment, check=True)
    changed = [path.name for path, before in first.items() if path.read_bytes() != before]
    assert PAGE.name in {path.name for path in first}
    assert changed == []


def test_page_names_what_differs_from_the_defaults(workspace: Any, opened: Opened) -> None:
    rows = opened.page.locator("#run tbody tr").all_inner_texts()
    assert any(row.startswith("umap.n_epochs") and "20" in row and "200" in row for row in rows)
    workspace("unchanged")
    shutil.copy(REPOSITORY / "params.yaml", "params.yaml")
    assert changed_parameters(read_parameters()) == []


def test_page_names_where_model_and_reviews_come_from(opened: Opened) -> None:
    said = opened.page.locator("#run").inner_text()
    assert f"The model comes from owner/{HOSTILE[0]} of the hub, commit {COMMIT} (v1.0)." in said
    assert "The reviews come from data/sample." in said


def shown_again(chromium: Any, parameters: Parameters | None = None) -> Opened:
    write_page(parameters or read_parameters())
    return Opened(chromium, PAGE)


@pytest.mark.parametrize("checkpoint", ["pretrained", "finetuned"])
def test_page_of_one_measured_checkpoint(copied: Path, chromium: Any, checkpoint: str) -> None:
    for path in Path("reports/plots").glob("*.csv"):
        table = pd.read_csv(path)
        if "checkpoint" in table:
            table[table["checkpoint"].isin([checkpoint, "random"])].to_csv(path, index=False)
    path = Path("reports/plots/mixing_difference.csv")
    pd.read_csv(path).iloc[:0].to_csv(path, index=False)
    ratios = pd.read_parquet(MIXING / "tokens.parquet")
    ratios[ratios["checkpoint"] == checkpoint].to_parquet(MIXING / "tokens.parquet", index=False)
    shutil.rmtree(MIXING / "contributions" / ("pretrained" if checkpoint == "finetuned" else "finetuned"))
    if checkpoint == "pretrained":
        path = Path("reports/plots/movement.csv")
        pd.read_csv(path).query("against == 'full_space'").to_csv(path, index=False)
    shown = shown_again(chromium)
    page = shown.page
    assert "by fine-tuning" not in page.locator("#findings").inner_text().lower()
    assert page.locator("#checkpoint option").count() == 1
    page.locator("#token-1").click()
    choose(page, "colour", "ratio")
    page.locator("#point").fill("4")
    moved = page.locator("#movement").inner_text()
    assert "with moves in the full space" in moved
    assert ("With the mixing ratio: " in moved) == (checkpoint == "finetuned")
    says = "mixing.checkpoints leaves it out" in page.locator("#map-legend").inner_text()
    assert says == (checkpoint == "pretrained")
    shown.close()


@pytest.mark.parametrize("method", list(RATIOS))
def test_findings_name_what_their_method_measures(copied: Path, method: str) -> None:
    for name in ("mixing", "mixing_difference"):
        path = Path(f"reports/plots/{name}.csv")
        table = pd.read_csv(path)
        table[table["method"] == method].to_csv(path, index=False)
    first = findings(["test/0"])[1]
    assert ("LayerNorm" in first) == (method in ("attnresln_n", "enc_n"))
    assert ("whole of layer" in first) == (method == "layer_n")
    assert ("weights" in first) == (method in ("attn_w", "attnres_w"))
    rows = pd.read_csv("reports/plots/mixing.csv").query("checkpoint == 'finetuned'")
    assert f"{100 * rows['mean'].max():.0f} %" in first


@pytest.mark.parametrize(
    ("means", "said"),
    [
        ((0.21, 0.34, 0.28), "Layer 2 mixes tokens most, at a ratio of 34 %; layer 1 least, 21 %"),
        ((0.012, 0.004, 0.006), "Layer 1 mixes tokens most, at a ratio of 1.2 %; layer 2 least, 0.4 %"),
        ((0.3321, 0.3324, 0.3319), "Layer 2 mixes tokens most, at a ratio of 33.24 %; layer 3 least, 33.19 %"),
        ((0.25,), "The one layer mixes tokens at a ratio of 25 %"),
    ],
)
def test_headline_tells_the_layers_apart(copied: Path, means: tuple[float, ...], said: str) -> None:
    path = Path("reports/plots/mixing.csv")
    table = pd.read_csv(path)
    table = table[table["layer"] <= len(means)]
    table.assign(mean=[means[layer - 1] for layer in table["layer"]]).to_csv(path, index=False)
    assert headline() == said


def test_tokens_that_are_not_on_the_map_are_counted(copied: Path, chromium: Any) -> None:
    for layout in LAYOUTS:
        path = MAPS / f"{layout}.parquet"
        table = pd.read_parquet(path)
        table[(table["document"] != "test/0") | (table["position"] != 1)].to_parquet(path, index=False)
    shown = shown_again(chromium)
    number = len(tokens())
    note = shown.page.locator("#map-note")
    assert note.inner_text() == f"{number - 1} of {number} tokens are on this map (umap.max_points)."
    shown.page.locator("#token-1").click()
    assert "The selected token is not among them." in note.inner_text()
    shown.close()


def test_page_without_contribution_matrices_names_the_parameter(copied: Path, chromium: Any) -> None:
    shutil.rmtree(MIXING / "contributions")
    shown = shown_again(chromium)
    assert "contribution matrices in mixing.matrices" in shown.page.locator("#text").inner_text()
    shown.page.locator("#token-1").click()
    assert "mixing.matrices" in shown.page.locator("#sources").inner_text()
    shown.close()


def test_a_layout_that_is_switched_off_is_named(copied: Path, chromium: Any) -> None:
    (MAPS / "joint.parquet").unlink()
    shown = shown_again(chromium)
    assert "The joint layout was not made: put joint into umap.layouts" in shown.page.locator("#map").inner_text()
    assert shown.page.locator("#layout option").all_inner_texts() == ["aligned", "separate"]
    assert shown.traces("map-chart")
    shown.close()


@pytest.mark.parametrize("layout", ["joint", *(pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS[1:])])
def test_figures_are_drawn_of_any_single_layout(copied: Path, layout: str) -> None:
    for other in set(LAYOUTS) - {layout}:
        (MAPS / f"{other}.parquet").unlink()
    parameters = read_parameters()
    figures = parameters.figures.model_copy(update={"dpi": 40, "formats": ["png"]})
    render.main(parameters.model_copy(update={"figures": figures}))
    assert Path("reports/figures/atlas.png").is_file()
    assert Path("reports/figures/joint.gif").is_file() == (layout == "joint")


def write_run(folder: Path, run: Path, lengths: list[int], layers: int, heads: int = 4) -> None:
    """Features, maps, ratios and contributions as the stages write them, of random numbers; the reports of `run`."""
    shutil.copytree(run / "reports", folder / "reports")
    write_captured_texts([f"test/{number}" for number in range(len(lengths))])
    generator = np.random.default_rng(0)
    documents = [f"test/{number}" for number, length in enumerate(lengths) for _ in range(length)]
    table = pd.DataFrame({"document": documents, "position": np.concatenate([np.arange(n) for n in lengths])})
    table["token_id"], table["token"] = 1, [f"word{number}" for number in range(len(table))]
    points = ("attention_heads", "attention_output", "attention_norm", "ffn_output", "layer_output")
    sites = [Site(0, "word_embedding"), Site(0, "embedding_output")]
    sites += [Site(n, point) for n in range(1, layers + 1) for point in points]
    root = folder / "features/activations"
    plan = store.plan_store(len(table), 8, "float16")
    store.create_stores(root, sites, plan)
    for site in sites:
        for unit in range(plan.units):
            rows = plan.rows_of(unit)
            store.write_block(root, site, rows, generator.normal(size=(rows.stop - rows.start, 8)).astype(np.float16))
    table.to_parquet(store.tokens_file(root), index=False)
    store.write_texts(root, dict.fromkeys(table["document"].unique(), "the film was dull ."))
    places = {site: generator.normal(size=(len(table), 2)).astype(np.float32) for site in sites}
    for layout in LAYOUTS:
        write_map(layout, table, places)
    quality = pd.DataFrame([(layout, None, None, measure, 0.9, 0.5) for layout in LAYOUTS for measure in MAP_MEASURES])
    quality.columns = ["layout", "layer", "point", "measure", "value", "chance"]
    write_quality(quality)
    draw = generator.uniform
    rows = [
        table.assign(checkpoint=checkpoint, layer=layer, **{name: draw(size=len(table)) for name in RATIOS})
        for checkpoint in ("pretrained", "finetuned")
        for layer in range(1, layers + 1)
    ]
    ratios = pd.concat(rows).assign(token_class="word", in_statistics=True)
    MIXING.mkdir(parents=True)
    ratios.to_parquet(MIXING / "tokens.parquet", index=False)
    for number, length in enumerate(lengths):
        for checkpoint in ("pretrained", "finetuned"):
            place = contributions_folder(checkpoint, f"test/{number}")
            for method in MATRICES:
                matrix = generator.gamma(0.1, size=(layers, length, length)).astype(np.float32)
                write_matrix(place, method, matrix, ("layer", "token", "source"), {})
            by_head = generator.gamma(0.1, size=(layers, heads, length, length)).astype(np.float16)
            write_matrix(place, HEADS, by_head, ("layer", "head", "token", "source"), {})


@pytest.mark.parametrize(
    ("lengths", "layers", "heads"), [([1], 3, 2), ([512], 12, 12), ([60] * 40, 4, 4)], ids=["one", "long", "many"]
)
def test_page_of_one_token_of_512_and_of_40_documents(
    workspace: Any, run: Path, chromium: Any, lengths: list[int], layers: int, heads: int
) -> None:
    write_run(workspace(capture={"documents": list(range(len(lengths)))}), run, lengths, layers, heads)
    shown = shown_again(chromium)
    assert PAGE.stat().st_size < 15e6
    page = shown.page
    assert page.locator("#document option").count() == len(lengths)
    assert page.locator("#words span").count() == lengths[0]
    page.locator(f"#token-{lengths[0] - 1}").click()
    assert page.locator("#sources li").count() == min(lengths[0] - 1, 12)
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


def test_documents_that_do_not_fit_are_counted(
    workspace: Any, run: Path, chromium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(workspace(capture={"documents": [0, 1, 2]}), run, [30, 30, 30], 3)
    monkeypatch.setattr("stages.page.payload.PAGE_TOKENS", 70)
    monkeypatch.setattr("stages.page.payload.CONTRIBUTION_BYTES", 1)
    shown = shown_again(chromium)
    assert "1 more captured documents are not on this page" in shown.page.locator("body").inner_text()
    choose(shown.page, "document", "1")
    shown.page.locator("#words span").first.click()
    assert "features/mixing/contributions" in shown.page.locator("#sources").inner_text()
    shown.close()


def test_shares_are_the_largest_of_each_row() -> None:
    matrix = np.array([[[0.1, 0.6, 0.3], [2.0, 1.0, 1.0], [np.nan, 1.0, 1.0]]])
    found = largest_shares(matrix, 2)
    import base64

    sources = np.frombuffer(base64.b64decode(found["sources"]), dtype="<u2").reshape(1, 3, 2)
    shares = (np.frombuffer(base64.b64decode(found["shares"]), dtype="u1").reshape(1, 3, 2) / 255) ** 2
    assert sources[0].tolist() == [[1, 2], [0, 1], [65535, 65535]]
    assert shares[0, :2] == pytest.approx(np.array([[0.6, 0.3], [0.5, 0.25]]), abs=0.005)


def test_quantised_values_keep_four_digits_and_mark_what_is_missing() -> None:
    import base64

    values = np.array([0.0, 0.12345, 1.0, np.nan])
    codes = np.frombuffer(base64.b64decode(quantised(values, 0, 1)), dtype="<u2")
    assert codes[:3] / 65534 == pytest.approx(values[:3], abs=1e-5)
    assert codes[3] == 65535


def test_signs_that_a_page_drops_are_spelt_out() -> None:
    assert visible("a\x00b\u202ec\n") == "a\u2400b⟨U+202E⟩c\n"
