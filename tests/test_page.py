"""The page: its numbers are the files', its views work in a browser and are linked, and no captured text runs."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import Opened, browser, violations
from conftest import COMMIT
from page_run import HOSTILE, LAYOUTS, choose, open_changed, open_values, tokens
from PIL import Image

from attnmix.page.arrays import visible
from attnmix.page.assembly import HERE, page_script
from attnmix.page.payload import SHAPE
from attnmix.page.sentences import headline
from attnmix.store.runs import Run
from stages import render
from stages.common.parameters import read_parameters


@pytest.mark.long
def test_views_are_drawn_and_linked_in_firefox(run: Path) -> None:
    with browser("firefox") as firefox:
        # Firefox does not know what Playwright asks of a browser's media by default.
        shown = Opened(firefox, Run(run).page, viewport={"width": 1400, "height": 900})
        for token in (*range(2, 2 + len(HOSTILE)), 3):
            shown.page.locator(f"#token-{token}").click()
        assert shown.page.evaluate("window.hacked") is None
        assert shown.page.locator("#sources li").count() > 0
        shown.page.keyboard.press("ArrowRight")
        assert visible(tokens()["token"][4]) in shown.page.locator("#selected").inner_text()
        assert all(shown.traces(chart) for chart in ("map-chart", "mixing-chart", "steps-chart"))
        shown.close()


def test_first_picture_has_every_measured_review_and_the_chosen_text(opened: Opened) -> None:
    page, table = opened.page, Run(Path()).table("measure/mixing_by_review")
    reviews = table.query("checkpoint == 'finetuned' and method == 'attnresln_n'").sort_values("layer", kind="stable")
    mixing = Run(Path()).mixing[0].query("method == 'attnresln_n' and checkpoint == 'finetuned'")
    means = mixing.set_index("layer")["mean"]
    layer = means.idxmax()
    assert page.locator("h1").inner_text().replace("\xa0", " ") == (
        f"Layer {layer} mixes tokens most, at a ratio of {100 * means.max():.0f} %; layer "
        f"{means.idxmin()} least, {100 * means.min():.0f} %"
    )
    assert page.locator("#layer").input_value() == str(layer)
    page.wait_for_selector("#overview-chart circle", state="attached")  # drawn once it is seen
    dots = page.locator("#overview-chart circle").evaluate_all(
        "all => all.map(each => [each.textContent, Number(each.getAttribute('cy'))])"
    )
    assert [name for name, _ in dots] == [f"{row.document}: {100 * row.mean:.0f} %" for row in reviews.itertuples()]
    heights = [height for _, height in dots]
    slope, start = np.polyfit(reviews["mean"], heights, 1)
    assert slope < 0
    assert heights == pytest.approx((slope * reviews["mean"] + start).tolist(), abs=0.1)  # pixels
    captured = Run(Path()).captured_ratios(["test/0"]).query("checkpoint == 'finetuned'")
    shares = captured.groupby("layer")["attnresln_n"].mean()
    path = page.locator("#overview-chart path.own").get_attribute("d")
    drawn = [float(part.split(" ")[1]) for part in re.split("[ML]", path)[1:]]
    assert drawn == pytest.approx((slope * shares + start).tolist(), abs=0.2)
    among = reviews.loc[reviews["layer"] == layer, "mean"]
    assert page.locator("#typical").inner_text() == (
        f"The mean ratio of its tokens in layer {layer} is {100 * shares[layer]:.0f} %, higher than in "
        f"{100 * (among < shares[layer]).mean():.0f} % of the {len(among)} measured reviews."
    )


def follow(page: Any, link: str) -> None:
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector("html[data-ready]")


def test_a_link_shows_what_its_sender_saw_and_ignores_foreign_names(opened: Opened) -> None:
    page = opened.page
    choices = {"document": "1", "checkpoint": "pretrained", "matrix": "attention", "head": "1", "shade": "ratio"}
    choices |= {"ratio-method": "attn_n", "beside-choice": "2", "layout": "aligned", "step-measure": "norm"}
    for control, option in choices.items():
        choose(page, control, option)
    page.locator("#words span").nth(2).click()
    page.locator("#point").fill("5")
    assert page.locator("#layer").input_value() == "1"
    choose(page, "layer", "2")
    choices["layer"] = "2"
    point = page.locator("#point").input_value()
    selected = page.locator("#selected").inner_text()
    page.wait_for_function("() => location.hash.includes('point=2.ffn_output') && location.hash.includes('token=')")
    follow(page, page.url)
    assert {name: page.locator(f"#{name}").input_value() for name in choices} == choices
    assert page.locator("#point").input_value() == point
    assert page.locator("#selected").inner_text() == selected
    choose(page, "checkpoint", "difference")
    page.wait_for_function("() => location.hash.includes('difference=true')")
    follow(page, f"{page.url.partition('#')[0]}#difference=true&document=99&method=<b>")
    choices = {"checkpoint": "difference", "document": "0", "ratio-method": "attnresln_n"}
    assert {name: page.locator(f"#{name}").input_value() for name in choices} == choices


def test_what_is_said_of_the_run_is_what_its_files_say(opened: Opened) -> None:
    page, run = opened.page, Run(Path())
    test = run.metrics("finetune")["test"]
    assert f"{100 * test['accuracy']:.1f} % test accuracy" in page.locator(".facts").inner_text().replace("\n", " ")
    mixing = run.table("measure/mixing").query("method == 'attnresln_n'")
    most = mixing[mixing["checkpoint"] == "finetuned"].nlargest(1, "mean").iloc[0]
    controls = run.table("measure/mixing_controls").query("method == 'attnresln_n'")
    control = controls[controls["checkpoint"].isin(["finetuned", "random"])].groupby("control")["mean"].mean()
    text = " ".join(page.locator(".lead, #findings").all_inner_texts()).replace("\xa0", " ")
    for sentence in (
        f"LayerNorm of layer {most['layer']}, the length ratio of other tokens in a token's vector is "
        f"{100 * most['mean']:.0f} %",
        f"accuracy is {100 * test['accuracy_ci_low']:.0f} % to {100 * test['accuracy_ci_high']:.0f} %",
        f"With random weights the ratio would be {100 * control['random_weights']:.0f} %",
        f"would be {100 * control['text_mean_value']:.0f} %",
    ):
        assert sentence in text
    choose(page, "layer", "2")
    difference = mixing.query("layer == 2 and checkpoint == 'difference'")["mean"].item()
    shown = page.locator("#difference").inner_text().replace("\N{MINUS SIGN}", "-")
    assert f"{100 * difference:+.1f} percentage points" in shown
    assert page.locator("#text-note").inner_text() == (
        "Labelled negative, classified as positive with a probability of 75 %. Only 9 of its 12 tokens were read "
        "(capture.max_length). 2 of its 9 tokens are unknown to the model."
    )
    parameters = page.locator("#run tbody tr").all_inner_texts()
    assert any(row.startswith("capture.max_length") and "40" in row for row in parameters)
    origins = page.locator("#run").inner_text()
    assert f"The model comes from owner/{HOSTILE[0]} of the hub, commit {COMMIT} (v1.0)." in origins
    assert "The reviews come from data/sample." in origins


def test_hostile_text_is_shown_and_runs_nothing(opened: Opened) -> None:
    page = opened.page
    shown = page.locator("#words").inner_text()
    assert all(visible(text) in shown for text in HOSTILE)
    choose(page, "shape", "words")
    for token, text in enumerate(HOSTILE, start=2):
        page.locator(f"#token-{token}").click()  # the selected word is always drawn
        words = opened.trace("map-chart", "words")
        assert visible(text) == words["text"][words["tokens"].index(token)]
    for pane in ("heads-lines", "neuron-scores"):
        open_values(page, pane)
    page.wait_for_selector("#neuron:not([data-stale])")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.locator("#map-chart a[href*='example.org'], #words a, details a").count() == 0
    policy = page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy.split("script-src")[1].split(";")[0]


def test_foreign_scripts_are_stopped_and_broken_data_is_an_error(run: Path, chromium: Any, tmp_path: Path) -> None:
    text, changed = Run(run).page.read_text(encoding="utf-8"), tmp_path / "changed.html"
    changed.write_text(text.replace("</main>", "<script>window.hacked=1</script></main>"), encoding="utf-8")
    shown = Opened(chromium, changed)
    assert shown.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in error for error in shown.errors)
    changed.write_text(text.replace('id="data">', 'id="data">!'), encoding="utf-8")
    shown.page.reload()
    shown.page.wait_for_selector(".missing:text('The views cannot be shown')")
    shown.context.close()


def test_no_two_modules_define_one_name_as_they_share_a_scope() -> None:
    defined = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)
    names = [name for path in (HERE / "script").glob("*.js") for name in defined.findall(path.read_text("utf-8"))]
    assert len(names) > 50
    assert sorted(names) == sorted(set(names))


def test_data_of_the_page_have_the_declared_shape(run: Path) -> None:
    _, packed = (Run(run).page).read_text(encoding="utf-8").split('id="data">')
    data = json.loads(zlib.decompress(base64.b64decode(packed.partition("<")[0])))
    check_shape(data, SHAPE)
    assert set(re.findall(r"(?<![\w./])data\.(\w+)", page_script())) == set(data)  # the script reads each part


def check_shape(value: Any, shape: Any) -> None:
    """Raise an error where a value of JSON is not of the shape that is declared for it."""
    assert isinstance(value, type(shape) if isinstance(shape, dict | list) else shape), (value, shape)
    if isinstance(shape, dict):
        assert ... in shape or set(value) == set(shape), shape
        for name, each in value.items():
            check_shape(each, shape.get(name, shape.get(...)))
    elif isinstance(shape, list):
        for each in value:
            check_shape(each, shape[0])


def test_light_and_dark_follow_the_system(opened: Opened) -> None:
    inks = []
    for scheme in ("light", "dark"):
        opened.page.emulate_media(color_scheme=scheme)
        opened.traces("mixing-chart")
        inks.append(opened.page.locator("#mixing-chart .chosen").first.get_attribute("fill"))
    assert inks[0] != inks[1]


@pytest.mark.long
def test_print_names_the_choice_and_fits_the_paper(opened: Opened) -> None:
    page = opened.page
    page.locator("#token-1").click()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert all(page.locator(f"#{name}").is_visible() for name in ("layer", "checkpoint", "matrix", "shade", "selected"))
    assert not any(page.locator(f"#{name}").is_visible() for name in ("play", "point", "clear", "map", "steps"))
    drawing = page.locator("#mixing-chart svg").first.bounding_box()
    assert drawing["width"] <= page.locator("#mixing-chart").bounding_box()["width"] <= 700  # A4 between usual margins


@pytest.mark.parametrize(
    ("means", "sentence"),
    [
        ((0.21, 0.34, 0.28), "Layer 2 mixes tokens most, at a ratio of 34 %; layer 1 least, 21 %"),
        ((0.012, 0.004, 0.006), "Layer 1 mixes tokens most, at a ratio of 1.2 %; layer 2 least, 0.4 %"),
        ((0.3321, 0.3324, 0.3319), "Layer 2 mixes tokens most, at a ratio of 33.24 %; layer 3 least, 33.19 %"),
        ((0.25,), "The one layer mixes tokens at a ratio of 25 %"),
    ],
)
def test_headline_tells_the_layers_apart(run: Path, means: tuple[float, ...], sentence: str) -> None:
    curves = Run(run).mixing[0].query(f"layer <= {len(means)}")
    assert headline(curves.assign(mean=[means[layer - 1] for layer in curves["layer"]])) == sentence


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_and_figures_of_any_single_layout(copied: Path, chromium: Any, layout: str) -> None:
    others = [name for name in LAYOUTS if name != layout]
    for other in others:
        (Run(Path()).maps / f"{other}.parquet").unlink()
    parameters = read_parameters()
    figures = parameters.render.model_copy(update={"dpi": 40, "formats": ["png"]})
    render.main(parameters.model_copy(update={"render": figures}))
    assert Path("reports/figures/atlas.png").is_file()
    assert Path("reports/figures/joint.gif").is_file() == (layout == "joint")
    shown = open_changed(chromium)
    text = shown.page.locator("#map").inner_text()
    assert all(f"The {name} layout was not made: put {name} into umap.layouts" in text for name in others)
    assert shown.page.locator("#layout option").all_inner_texts() == [layout]
    assert shown.traces("map-chart")
    shown.close()


def test_documents_that_do_not_fit_are_counted(copied: Path, chromium: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = tokens().groupby("document", sort=False).size()
    monkeypatch.setattr("attnmix.page.payload.MAX_TOKENS", int(lengths.iloc[:2].sum()))
    monkeypatch.setattr("attnmix.page.payload.CONTRIBUTION_BYTES", 1)
    shown = open_changed(chromium)
    assert "1 more captured documents are not on this page" in shown.page.locator("body").inner_text()
    choose(shown.page, "document", "1")
    shown.page.locator("#words span").first.click()
    assert "features/measure/contributions" in shown.page.locator("#kept").inner_text()
    shown.close()
    shutil.rmtree(Run(Path()).measured / "contributions")
    shown = open_changed(chromium)
    assert "contribution matrices in measure.matrices" in shown.page.locator("#text").inner_text()
    shown.close()


def test_signs_that_a_page_drops_are_spelt_out() -> None:
    assert visible("a\x00b\u202ec\n") == "a\u2400b⟨U+202E⟩c\n"


@pytest.fixture
def page(opened: Opened) -> Any:
    """The page at layer 2 with a selected token."""
    choose(opened.page, "layer", "2")
    opened.page.locator("#token-3").click()
    opened.page.mouse.move(0, 0)
    return opened.page


def save(page: Any, pane: str, kind: str) -> tuple[str, bytes]:
    """Return name and content of a pane's file."""
    with page.expect_download() as download:
        page.get_by_role("button", name=f"{kind} of {pane}", exact=True).click()
    return download.value.suggested_filename, download.value.path().read_bytes()


def test_every_file_of_every_pane_has_content(page: Any) -> None:
    buttons = page.locator(".files button").evaluate_all("all => all.map(each => each.getAttribute('aria-label'))")
    offered = [tuple(label.split(" of ")) for label in buttons]
    assert {kind for kind, _ in offered} == {"csv", "SVG", "PNG"}
    panes = {pane for _, pane in offered}
    assert {"overview", "words", "course", "heads-lines", "neuron-scores", "map", "mixing", "steps"} <= panes
    for kind, pane in offered:
        place = f"{pane}-chart" if page.locator(f"#{pane}-chart").count() else pane
        page.evaluate("id => document.getElementById(id).scrollIntoView({ block: 'center' })", place)
        page.wait_for_selector(f"#{place}:not([data-stale]):not([data-moving])")
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # it has drawn
        name, content = save(page, pane, kind)
        assert name.endswith(f".{kind.lower()}")
        if kind == "csv":
            columns, *rows = csv.reader(io.StringIO(content.decode()))
            assert {len(row) for row in rows} == {len(columns)}, pane
        elif kind == "SVG":
            assert len(list(ElementTree.fromstring(content).iter())) > 2, pane  # a background and something on it
        else:
            with Image.open(io.BytesIO(content)) as picture:
                assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 2, pane


def test_words_are_saved_as_shown_and_run_nothing(page: Any, opened: Opened, tmp_path: Path) -> None:
    page.locator("#clear").click()  # or the table has columns of the selected word
    name, content = save(page, "words", "csv")
    assert name == "words_test-0_finetuned_layer-2.csv"
    columns, *rows = csv.reader(io.StringIO(content.decode("utf-8"), newline=""))
    assert columns == ["position", "token", "share from others (ALTI, fine-tuned)"]
    names = tokens().query("document == 'test/0'")["token"]
    assert [row[1] for row in rows] == [visible(each, kept="") for each in names]
    titles = page.locator("#words span").evaluate_all("all => all.map(each => each.title)")
    for title, (*_, share) in zip(titles, rows, strict=True):
        assert not share or title.endswith(f"{100 * float(share):.0f} %")
    name, content = save(page, "words", "SVG")
    text = "".join(ElementTree.fromstring(content).itertext())
    assert all(visible(each, kept="") in text for each in HOSTILE)
    (tmp_path / name).write_bytes(content)
    alone = opened.context.browser.new_page()
    alone.goto((tmp_path / name).as_uri())
    assert alone.evaluate("window.hacked") is None
    alone.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 400)])
def test_page_is_accessible_on_wide_and_narrow_screens(run: Path, chromium: Any, scheme: str, width: int) -> None:
    size = {"width": width, "height": 900}
    shown = Opened(chromium, Run(run).page, viewport=size, color_scheme=scheme, bypass_csp=True)
    page = shown.page
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # no sideways scrolling
    page.locator("#token-3").click()
    choose(page, "beside-choice", "pretrained")
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.wait_for_function("() => document.querySelectorAll('.files details[open] table').length > 2")
    assert violations(page) == []
    shown.close()
