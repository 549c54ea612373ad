"""The page: its numbers are the files', its views work in a browser and are linked, and no captured text runs."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from graphlib import CycleError
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pandas as pd
import pytest
from browser import Opened, browser
from conftest import COMMIT, REPOSITORY
from page_run import HOSTILE, LAYOUTS, choose, open_changed, open_values, tokens

from attnmix.measures.ratios import RATIOS
from attnmix.page.arrays import largest_shares, quantise, visible
from attnmix.page.assembly import HERE, page_script
from attnmix.page.sentences import headline, lead
from attnmix.store.runs import Run
from stages import render
from stages.common.parameters import read_parameters

CHARTS = ("map-chart", "mixing-chart", "steps-chart")


def test_every_view_renders_without_an_error_and_requests_nothing(opened: Opened) -> None:
    for chart in CHARTS:
        assert opened.traces(chart)
        assert opened.page.locator(f"#{chart} svg, #{chart} canvas").count() == 1
    documents = tokens()["document"]
    assert opened.page.locator("#words span").count() == (documents == documents[0]).sum()
    assert opened.page.locator("#quality tbody tr").count() == 9
    own_basis = opened.page.locator("#own-basis").inner_text()
    assert own_basis.startswith("Places of attention heads on the joint map cannot be compared")


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
        assert all(shown.traces(chart) for chart in CHARTS)
        shown.close()


def test_first_picture_has_every_measured_review_and_the_chosen_text(opened: Opened) -> None:
    page, table = opened.page, Run(Path()).table("measure/mixing_by_review")
    reviews = table.query("checkpoint == 'finetuned' and method == 'attnresln_n'").sort_values("layer", kind="stable")
    means = Run(Path()).mixing[0].query("method == 'attnresln_n' and checkpoint == 'finetuned'")
    layer = int(means.loc[means["mean"].idxmax(), "layer"])
    assert page.locator("h1").inner_text().replace("\xa0", " ") == (
        f"Layer {layer} mixes tokens most, at a ratio of {100 * means['mean'].max():.0f} %; layer "
        f"{means.loc[means['mean'].idxmin(), 'layer']} least, {100 * means['mean'].min():.0f} %"
    )
    assert page.locator("#layer").input_value() == str(layer)
    page.wait_for_selector("#overview-chart circle", state="attached")  # drawn once it is seen
    dots = page.locator("#overview-chart circle").evaluate_all(
        "all => all.map(each => [each.textContent, Number(each.getAttribute('cy'))])"
    )
    assert [name for name, _ in dots] == [f"{row.document}: {100 * row.mean:.0f} %" for row in reviews.itertuples()]
    heights = np.array([height for _, height in dots])
    slope, start = np.polyfit(reviews["mean"], heights, 1)
    assert slope < 0
    assert np.abs(slope * reviews["mean"] + start - heights).max() < 0.1  # pixels
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


def test_a_text_is_named_by_its_beginning_with_a_note_of_what_was_read(opened: Opened) -> None:
    reviews = pd.read_parquet("data/reviews/test.parquet")["text"]
    options = opened.page.locator("#document option").all_inner_texts()
    lengths = tokens().groupby("document", sort=False).size().tolist()
    assert options[0] == f"test/0: {reviews[0][:40].rstrip()}… ({lengths[0]} tokens)"
    assert options[2].startswith("text/0: the film was great . <script>window.")
    assert opened.page.locator("#text-note").inner_text() == (
        "Labelled negative, classified as positive with a probability of 75 %. Only 9 of its 12 tokens were read "
        "(capture.max_length). 2 of its 9 tokens are unknown to the model."
    )


def test_a_link_shows_what_its_sender_saw(opened: Opened) -> None:
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
    assert str(Run(Path()).sites[int(point)]) == "layer_02/ffn_output"
    views = ("#selected", "#text-legend", "#beside-name")
    texts = [page.locator(view).inner_text() for view in views]
    page.wait_for_function("() => location.hash.includes('point=2.ffn_output') && location.hash.includes('token=')")
    link = page.evaluate("location.href")
    assert parse_qs(link.split("#")[1])["beside"] == ["text/0"]
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector("html[data-ready]")
    assert {name: page.locator(f"#{name}").input_value() for name in choices} == choices
    assert page.locator("#point").input_value() == point
    assert [page.locator(view).inner_text() for view in views] == texts
    page.evaluate("location.hash = 'layer=3&document=99&method=<b>&difference=true'")
    page.wait_for_function("() => document.getElementById('layer').value === '3'")
    values = [page.locator(f"#{name}").input_value() for name in ("checkpoint", "document", "ratio-method")]
    assert values == ["difference", "1", "attn_n"]


def test_numbers_are_those_of_the_metrics_files(opened: Opened) -> None:
    page, run = opened.page, Run(Path())
    test = run.metrics("finetune")["test"]
    assert f"{100 * test['accuracy']:.1f} % test accuracy" in page.locator(".facts").inner_text().replace("\n", " ")
    mixing = run.table("measure/mixing").query("method == 'attnresln_n'")
    drawn = {trace["name"]: trace for trace in opened.traces("mixing-chart") if trace["method"] == "attnresln_n"}
    for checkpoint, name in (("pretrained", "Pretrained"), ("finetuned", "Fine-tuned")):
        assert drawn[name]["y"] == mixing.loc[mixing["checkpoint"] == checkpoint, "mean"].tolist()
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
    steps = run.steps.query("checkpoint == 'finetuned' and measure == 'cosine_input' and step == 'ffn_norm'")
    assert opened.trace("steps-chart", "Last LayerNorm")["y"] == steps["mean"].tolist()


def test_hostile_text_is_shown_and_runs_nothing(opened: Opened) -> None:
    page = opened.page
    shown = page.locator("#words").inner_text()
    assert all(visible(text) in shown for text in HOSTILE)
    raw = page.locator("#text > details").text_content()
    assert all(visible(text) in raw for text in HOSTILE)
    choose(page, "shape", "words")
    for token, text in enumerate(HOSTILE, start=2):
        page.locator(f"#token-{token}").click()  # the selected word is always drawn
        words = opened.trace("map-chart", "words")
        assert visible(text) == words["text"][words["tokens"].index(token)]
        page.mouse.move(0, 0)  # or the word under the mouse is looked at
        assert visible(text) in page.locator("#heads-said").text_content()
    for pane in ("heads-lines", "neuron-scores"):
        open_values(page, pane)
    page.wait_for_selector("#neuron:not([data-stale])")
    assert visible(HOSTILE[-1]) in page.locator("#neuron-name").inner_text()
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


def test_script_reads_the_keys_that_the_page_holds(run: Path) -> None:
    _, packed = (Run(run).page).read_text(encoding="utf-8").split('id="data">')
    data = json.loads(zlib.decompress(base64.b64decode(packed.partition("<")[0])))
    keys = set(re.findall(r"(?<![\w./])data\.(\w+)(?:\.(\w+))?", page_script()))
    taken_apart = re.findall(r"{ ([\w, ]+) } = data\.(\w+);", page_script())  # const { start, length } = data.part;
    keys |= {(part, key) for names, part in taken_apart for key in names.split(", ")}
    parts = {part for part, _ in keys}
    assert parts == set(data)
    # The other parts are lists, or their keys are names of texts, models or points.
    for part in ("labels", "ratios", "reviews", "attention", "nearest"):
        assert {key for each, key in keys if each == part and key} == set(data[part]), part


def test_modules_stand_after_those_that_they_import(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text('import {\n  two,\n} from "./z.js";\nconst one = two;\n')
    (tmp_path / "z.js").write_text("export const two = 2;\n")
    script = page_script(tmp_path)
    assert script.index("\nconst two = 2;") < script.index("\nconst one = two;")
    assert "import" not in script
    (tmp_path / "z.js").write_text('import { one } from "./a.js";\n')
    with pytest.raises(CycleError):
        page_script(tmp_path)


@pytest.mark.long
def test_print_names_the_choice_and_fits_the_paper(opened: Opened) -> None:
    page = opened.page
    page.locator("#token-1").click()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert all(page.locator(f"#{name}").is_visible() for name in ("layer", "checkpoint", "matrix", "shade", "selected"))
    assert not any(page.locator(f"#{name}").is_visible() for name in ("play", "point", "clear", "map", "steps"))
    box = page.locator("#mixing-chart").bounding_box()
    drawing = page.locator("#mixing-chart svg").first.bounding_box()
    assert drawing["width"] <= box["width"] <= 700  # of A4 between usual margins
    assert drawing["height"] <= box["height"]
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    opened.traces("map-chart")
    assert page.locator("#map-chart canvas").bounding_box()["width"] > 640


@pytest.mark.long
def test_another_process_renders_the_same_bytes(copied: Path) -> None:
    """Also where Python hashes words otherwise, on which the order of a set depends."""
    rendered = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)}
        subprocess.run([sys.executable, "-m", "stages", "render"], cwd=copied, env=environment, check=True)
        files = sorted(path for path in (copied / "reports").rglob("*") if path.is_file())
        rendered.append({path.name: path.read_bytes() for path in files})
    assert "index.html" in rendered[0]
    assert [name for name, content in rendered[0].items() if rendered[1][name] != content] == []


def test_page_names_changed_parameters_and_origins(workspace: Any, opened: Opened) -> None:
    rows = opened.page.locator("#run tbody tr").all_inner_texts()
    assert any(row.startswith("capture.max_length") and "40" in row for row in rows)
    text = opened.page.locator("#run").inner_text()
    assert f"The model comes from owner/{HOSTILE[0]} of the hub, commit {COMMIT} (v1.0)." in text
    assert "The reviews come from data/sample." in text
    workspace("unchanged")
    shutil.copy(REPOSITORY / "params.yaml", "params.yaml")
    assert render.changed_parameters(read_parameters()) == []


@pytest.mark.parametrize("checkpoint", ["pretrained", pytest.param("finetuned", marks=pytest.mark.long)])
def test_page_of_one_measured_checkpoint(copied: Path, chromium: Any, checkpoint: str) -> None:
    run = Run(Path())
    for path in run.tables.rglob("*.csv"):
        table = pd.read_csv(path)
        if "checkpoint" in table:
            table[table["checkpoint"].isin([checkpoint, "random"])].to_csv(path, index=False)
    ratios = run.ratios(filters=[("checkpoint", "==", checkpoint)])
    ratios.to_parquet(run.measured / "tokens.parquet", index=False)
    shutil.rmtree(run.measured / "contributions" / ("pretrained" if checkpoint == "finetuned" else "finetuned"))
    if checkpoint == "pretrained":
        path = run.tables / "reduce/movement.csv"
        pd.read_csv(path).query("against == 'full_space'").to_csv(path, index=False)
    shown = open_changed(chromium)
    page = shown.page
    assert "by fine-tuning" not in page.locator("#findings").inner_text().lower()
    assert page.locator("#checkpoint option").count() == 1
    page.locator("#token-1").click()
    choose(page, "colour", "ratio")
    page.locator("#point").fill("4")
    movement = page.locator("#movement").text_content()
    assert "with moves in the full space" in movement
    assert ("With the mixing ratio: " in movement) == (checkpoint == "finetuned")
    unmeasured = "it was not measured" in page.locator("#map-legend").inner_text()
    assert unmeasured == (checkpoint == "pretrained")
    shown.close()


@pytest.mark.parametrize("method", list(RATIOS))
def test_lead_names_what_its_method_measures(run: Path, method: str) -> None:
    curves = Run(run).mixing[0].query("method == @method")
    sentence = lead(curves)
    assert ("LayerNorm" in sentence) == (method in ("attnresln_n", "enc_n"))
    assert ("whole of layer" in sentence) == (method == "layer_n")
    assert ("weights" in sentence) == (method in ("attn_w", "attnres_w"))
    assert f"{100 * curves.loc[curves['checkpoint'] == 'finetuned', 'mean'].max():.0f} %" in sentence


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
    others = [name for name in ("joint", "aligned", "separate") if name != layout]
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


def test_shares_are_the_largest_of_each_row() -> None:
    matrix = np.array([[[0.1, 0.6, 0.3], [2.0, 1.0, 1.0], [np.nan, 1.0, 1.0]]])
    form = largest_shares(matrix, 2)
    sources = np.frombuffer(base64.b64decode(form["sources"]), dtype="<u2").reshape(1, 3, 2)
    shares = (np.frombuffer(base64.b64decode(form["shares"]), dtype="u1").reshape(1, 3, 2) / 255) ** 2
    assert sources[0].tolist() == [[1, 2], [0, 1], [65535, 65535]]
    assert shares[0, :2] == pytest.approx(np.array([[0.6, 0.3], [0.5, 0.25]]), abs=0.005)


def test_quantised_values_keep_four_digits_and_mark_what_is_missing() -> None:
    values = np.array([0.0, 0.12345, 1.0, np.nan])
    codes = np.frombuffer(base64.b64decode(quantise(values, 0, 1)), dtype="<u2")
    assert codes[:3] / 65534 == pytest.approx(values[:3], abs=1e-5)
    assert codes[3] == 65535


def test_signs_that_a_page_drops_are_spelt_out() -> None:
    assert visible("a\x00b\u202ec\n") == "a\u2400b⟨U+202E⟩c\n"
