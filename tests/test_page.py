"""The page is a single file without unsafe content; its statements, data, downloads and print layout are complete."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from html import escape
from pathlib import Path
from types import UnionType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from browser import WHOLE, Opened, browser, violations
from conftest import REPOSITORY
from page_run import COMMIT, HOSTILE, LAYOUTS, change_page, choose, payload, render_page, tokens

from attnmix.core.store.files import write_table
from attnmix.core.store.runs import Run
from attnmix.page.answer import headline
from attnmix.page.arrays import as_json, visible
from attnmix.page.assembly import page_text
from attnmix.page.sentences import Subject
from attnmix.page.shape import HEADS_SHAPE, SHAPE, typescript
from stages import reduce, render
from stages.common.parameters import read_parameters
from stages.render import TYPICAL, page_subject

SOURCES = REPOSITORY / "attnmix/page/src"


@pytest.mark.long
def test_views_are_linked_in_firefox(run: Path) -> None:
    with browser("firefox") as firefox:
        shown = Opened(firefox, Run(run).page, viewport={"width": 1400, "height": 900})
        for token in (*range(2, 2 + len(HOSTILE)), 3):
            shown.page.locator(f"#token-{token}").click()
        assert shown.page.evaluate("window.hacked") is None
        assert shown.page.locator("#sources li").count() > 0
        shown.page.keyboard.press("ArrowRight")
        assert visible(tokens()["token"][4]) in shown.page.locator("#selected").inner_text()
        assert len(shown.drawn()["tokens"]) == len(tokens())
        assert shown.page.evaluate("document.getElementById('grid-canvas').drawn().cells.length") > 0
        shown.close()


def test_headline_and_chart_show_own_share(opened: Opened) -> None:
    page = opened.page
    own = Run(Path()).table("measure/exchange").query("donor == 'all' and quantity == 'own_share' and layer > 0")
    means = own.pivot(index="layer", columns="checkpoint", values="mean")
    shares = {name: f"{100 * means[name].iloc[-1]:.0f}%" for name in ("pretrained", "finetuned")}
    headline = page.locator("#headline").inner_text()
    assert f"Own share of a token's last vector: {shares['pretrained']} before fine-tuning" in headline
    assert f"{shares['finetuned']} after" in headline
    rows = opened.values("answer-chart")
    for name, checkpoint in (("Fine-tuned", "finetuned"), ("Pretrained", "pretrained")):
        assert [float(row[name]) for row in rows] == pytest.approx(means[checkpoint].tolist(), rel=1e-3)
        assert {row[f"{name}, 95% from"] for row in rows} == {""}  # four reviews are too few for intervals
    heights = page.locator("#answer-chart circle").evaluate_all("all => all.map(each => +each.getAttribute('cy'))")
    curves = [name for name in rows[0] if name in ("Pretrained", "Fine-tuned")]  # in the order of the dots
    drawn = [float(row[name]) for name in curves for row in rows]
    slope, start = np.polyfit(drawn, heights, 1)
    assert slope < 0
    assert heights == pytest.approx((slope * np.array(drawn) + start).tolist(), abs=0.1)  # pixels
    assert page.locator("#words [aria-selected=true]").count() == 1  # a word is selected initially


def test_opening_text_has_median_ratio(run: Path) -> None:
    files = Run(run)
    curves, _ = files.mixing
    curves = curves.query("method == 'attnresln_n' and checkpoint == 'finetuned'").set_index("layer")["mean"]
    ratios = files.captured_ratios(files.tokens["document"].unique().tolist())
    rows = ratios[(ratios["checkpoint"] == "finetuned") & (ratios["layer"] == curves.idxmax())]
    means = rows.groupby("document", sort=False)["attnresln_n"].mean()
    data = payload(files.page)
    opening = data["documents"][data["opens"]["document"]]
    assert opening["name"] == means.sort_values().index[(len(means) - 1) // 2]
    # The initially selected word of each text has the largest share of a single source.
    for document, position in zip(data["documents"], data["opens"]["positions"], strict=True):
        matrix = np.asarray(files.matrix("finetuned", document["name"], "alti")[curves.idxmax() - 1], dtype=float)
        matrix /= matrix.sum(axis=1, keepdims=True)
        np.fill_diagonal(matrix, 0)
        table = files.tokens.query(f"document == '{document['name']}'").set_index("position")
        own_shares = rows[rows["document"] == document["name"]].set_index("position")["own_share"]
        words = table[table["token_class"].isin(["word", "subword"]) & own_shares.notna()].index.tolist()
        words = [n for n in words if table["token"][n].isalpha() and len(table["token"][n]) >= 5] or words
        assert matrix[position, words].max() == matrix[np.ix_(words, words)].max()


CHOICES = {"document": "1", "checkpoint": "pretrained", "layer": "2", "share": "attention", "threshold": "7"}
CHOICES |= {"effect": "leave_one_out", "layout": "aligned", "colour": "class", "lines": "norm"}


def chosen_now(page: Any) -> dict[str, str]:
    ids = [name for name in CHOICES if page.locator(f"select#{name}, input#{name}").count()]
    return {name: page.locator(f"#{name}").input_value() for name in ids} | {"checkpoint": chosen_model(page)}


def chosen_model(page: Any) -> str:
    return str(page.locator("#checkpoint [aria-pressed=true]").get_attribute("value"))


def test_link_and_history_restore_state(opened: Opened) -> None:
    page = opened.page
    page.locator("#token-4").click()
    page.locator("#words span").nth(1).click()
    choose(page, "checkpoint", "pretrained")
    page.go_back()
    page.wait_for_selector("#checkpoint [value=finetuned][aria-pressed=true]")
    page.go_back()
    page.wait_for_selector("#token-4.chosen")
    for control, option in CHOICES.items():
        choose(page, control, option)
    page.locator("#words span").nth(2).click()
    selected = page.locator("#selected").inner_text()
    page.wait_for_function("() => location.hash.includes('token=') && location.hash.includes('lines=norm')")
    page.reload()
    page.wait_for_selector(WHOLE, state="attached")
    assert chosen_now(page) == CHOICES
    assert page.locator("#selected").inner_text() == selected


def test_statements_match_files_in_complete_sentences(opened: Opened) -> None:
    page, run = opened.page, Run(Path())
    page.locator("#run > summary").click()
    test = run.metrics("finetune")["test"]
    assert f"{100 * test['accuracy']:.1f}% test accuracy" in page.locator(".facts").inner_text().replace("\n", " ")
    controls = run.table("measure/mixing_controls").query("method == 'attnresln_n' and checkpoint == 'finetuned'")
    control = controls.groupby("control")["mean"].mean()
    text = page.locator("#findings").inner_text()
    for sentence in (
        f"accuracy is {100 * test['accuracy_ci_low']:.0f}% to {100 * test['accuracy_ci_high']:.0f}%",
        f"{100 * control['shuffled_words']:.0f}% with the words in random order.",
        f"the mixing ratio is {100 * control['corpus_value']:.0f}%",
    ):
        assert sentence in text
    choose(page, "document", "0")
    note = page.locator("#text-note").inner_text()
    assert note.startswith(
        "The text is labelled negative and classified as positive with a probability of 75%. Only 9 of the text's 12 "
        "tokens were used (capture.max_length). 2 of the text's 9 tokens are unknown to the model."
    ), note
    assert note.endswith("The model before fine-tuning has no classifier.")
    probability = run.predictions.set_index("document")["probability"]["test/0"]
    title = page.locator("#grid h2").inner_text()
    assert title.startswith(f"test/0 label negative, predicted positive ({100 * probability:.1f}%): own share")
    parameters = page.locator("#run tbody tr").all_inner_texts()
    assert any(row.startswith("capture.max_length") and "40" in row for row in parameters)
    origins = page.locator("#run").inner_text()
    assert "The fine-tuning was computed on this device: " in origins
    assert "The measures were computed on this device: " in origins
    assert f"The model comes from owner/{HOSTILE[0]} of the hub, commit {COMMIT} (v1.0)." in origins
    assert "The reviews come from data/sample." in origins
    sentences = page.locator(
        "#findings p, #findings > ul:not(.facts) li, main > .note, .cautions, #map > p"
    ).all_inner_texts()
    assert len(sentences) > 8
    for text in sentences:
        assert text[0].isupper(), text
        assert text.endswith("."), text
        assert TYPICAL not in text
    (measured,) = page.locator("#findings > p").all_inner_texts()
    assert measured.startswith("Ratios and controls are means over the 4 measured test reviews")


def test_selection_rule_of_captured_texts_is_stated(copied: Path) -> None:
    parameters = read_parameters()
    no_choice = parameters.capture.model_copy(update={"documents": [], "texts": [], "drawn": 0})
    typical = parameters.model_copy(update={"capture": no_choice})
    subject = page_subject(typical, Run(Path()).metrics("download"))
    page = page_text(Run(Path()), subject)
    assert f"The maps show the captured texts, which are examples. {escape(TYPICAL)}</p>" in page
    assert f'<p class="note">{escape(TYPICAL)}' not in page
    with pytest.raises(TypeError, match="positional"):
        Subject("a model", "a revision", "a base")  # type: ignore[misc]  # positional fields could be confused


@pytest.mark.parametrize(
    ("creators", "synthetic"), [(None, False), ("found", False), ("found, machine-generated", True)]
)
def test_page_of_machine_generated_texts_calls_them_synthetic(creators: Any, synthetic: bool, copied: Path) -> None:
    download = Run(Path()).metrics("download")
    if creators is not None:
        download["language_creators"] = creators
    page = page_text(Run(Path()), page_subject(read_parameters(), download))
    heading = page.partition("<h1>")[2].partition("</h1>")[0]
    facts = page.partition('<ul class="facts"')[2].partition("</ul>")[0]
    for part in (heading, facts):
        assert ("synthetic" in part) == synthetic


def test_link_to_folded_part_unfolds_it(opened: Opened) -> None:
    page = opened.page
    for name, part in (("This run", "run"), ("More", "more")):
        assert page.locator(f"#{part}").get_attribute("open") is None
        page.get_by_role("link", name=name, exact=True).click()
        page.wait_for_selector(f"#{part}[open]")
        page.locator(f"#{part} > summary").click()
        page.get_by_role("link", name=name, exact=True).click()  # the address already contains this fragment
        page.wait_for_selector(f"#{part}[open]")


def test_hostile_text_is_shown_and_not_executed(opened: Opened) -> None:
    page = opened.page
    choose(page, "document", "0")
    shown = page.locator("#words").inner_text()
    assert all(visible(text) in shown for text in HOSTILE)
    for token, text in enumerate(HOSTILE, start=2):
        page.locator(f"#token-{token}").click()
        assert visible(text) in page.locator("#selected").inner_text()
        assert token in [name["token"] for name in opened.drawn()["names"]]  # the selected word is always drawn
    for pane in ("text", "heads", "map-pane"):
        opened.values(pane)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.locator("main a").count() == 0
    policy = page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy.split("script-src")[1].split(";")[0]


def test_foreign_scripts_are_blocked_and_damaged_data_is_an_error(run: Path, chromium: Any, tmp_path: Path) -> None:
    text, changed = Run(run).page.read_text(encoding="utf-8"), tmp_path / "changed.html"
    changed.write_text(text.replace("</main>", "<script>window.hacked=1</script></main>"), encoding="utf-8")
    shown = Opened(chromium, changed)
    assert shown.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in error for error in shown.errors)
    changed.write_text(text.replace('id="data">', 'id="data">!'), encoding="utf-8")
    shown.page.reload()
    shown.page.wait_for_selector(".missing:text('The views cannot be shown')")
    shown.context.close()


def test_data_match_declared_shape_and_script_types(run: Path) -> None:
    page = Run(run).page.read_text(encoding="utf-8")
    check_shape(payload(Run(run).page), SHAPE)
    check_shape(json.loads(re.search(r'id="head-parts">([^<]*)<', page)[1]), HEADS_SHAPE)
    declared, generated = (
        re.sub(r"[\s;]", "", text) for text in ((SOURCES / "payload.d.ts").read_text("utf-8"), typescript())
    )
    assert declared.endswith(f"exporttypePayload={generated}")
    script = "".join(path.read_text("utf-8") for path in SOURCES.glob("*.ts*"))
    assert {key for key in SHAPE if not re.search(rf"\bdata\.{key}\b", script)} == set()  # the script uses each field


def check_shape(value: Any, shape: Any) -> None:
    """Raise an error if a JSON value does not have the declared shape.

    In a shape, a key that ends with "?" is optional, and the key `...` gives the shape of all others.
    """
    if isinstance(shape, UnionType) or shape is float:
        shape = shape | int
    assert isinstance(value, type(shape) if isinstance(shape, dict | list) else shape), (value, shape)
    if isinstance(shape, dict):
        named = {key.removesuffix("?"): each for key, each in shape.items() if key is not ...}
        assert ... in shape or set(value) <= set(named), set(value) - set(named)
        assert {key for key in shape if key is not ... and not key.endswith("?")} <= set(value), shape
        for name, each in value.items():
            check_shape(each, named.get(name, shape.get(...)))
    elif isinstance(shape, list):
        for each in value:
            check_shape(each, shape[0])


def test_print_hides_controls(opened: Opened) -> None:
    page = opened.page
    page.locator("#token-1").click()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    for hidden in ("#bar", "#play", "#point", ".files", "#threshold", "#text-note"):
        assert not page.locator(hidden).first.is_visible(), hidden
    for printed in ("headline", "grid-canvas", "words", "card", "heads-lines", "map-canvas", "findings"):
        assert page.locator(f"#{printed}").is_visible(), printed
    assert re.search(r"revision v1\.0.*Printed \d{4}-\d\d-\d\d\.", page.locator("footer").inner_text())
    page.emulate_media(media="null")


@pytest.mark.parametrize(
    ("means", "sentence"),
    [
        ((0.21, 0.34, 0.28), "Layer 2 mixes tokens most, at a ratio of 34%; layer 1 least, 21%"),
        ((0.012, 0.004, 0.006), "Layer 1 mixes tokens most, at a ratio of 1.2%; layer 2 least, 0.4%"),
        ((0.3321, 0.3324, 0.3319), "Layer 2 mixes tokens most, at a ratio of 33.24%; layer 3 least, 33.19%"),
        ((0.25,), "The mixing ratio of the only layer is 25%"),
    ],
)
def test_headline_distinguishes_layers(run: Path, means: tuple[float, ...], sentence: str) -> None:
    curves, _ = Run(run).mixing
    curves = curves.query(f"layer <= {len(means)}")
    assert headline(curves.assign(mean=[means[layer - 1] for layer in curves["layer"]])) == sentence


@pytest.mark.long
@pytest.mark.parametrize("layout", ["joint", "separate", *LAYOUTS])
def test_page_and_figures_of_a_single_layout(
    copied: Path, chromium: Any, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    parameters = read_parameters()
    umap = parameters.umap.model_copy(update={"layouts": [layout], "stability_seeds": []})
    figures = parameters.render.model_copy(update={"formats": ["png", "gif"]})
    shutil.rmtree(Run(Path()).maps)
    monkeypatch.setattr(render, "mixing_figures", lambda *_: [])  # these figures do not depend on maps
    for stage in (reduce, render):
        stage.main(parameters.model_copy(update={"umap": umap, "render": figures}))
    assert Path("reports/figures/atlas.png").is_file()
    assert Path("reports/figures/joint.png").is_file() == (layout == "joint")
    assert Path("reports/figures/joint.gif").is_file() == (layout == "joint")
    shown = Opened(chromium, Run(Path()).page)
    options = shown.page.locator("#layout option").evaluate_all("all => all.map(each => each.value)")
    assert options == [layout]
    assert shown.drawn()["tokens"]
    shown.close()


def test_omitted_documents_are_counted(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = tokens().groupby("document", sort=False).size()
    monkeypatch.setattr("attnmix.page.payload.MAX_TOKENS", int(lengths.iloc[:2].sum()))
    monkeypatch.setattr("attnmix.page.payload.CONTRIBUTION_BYTES", 1)
    monkeypatch.setattr("attnmix.page.payload.MAX_PARTS_TOKENS", 5)
    write_table(Run(Path()).predictions_file, Run(Path()).predictions.assign(read_position=[2, -1, 0]))
    render_page()
    page = Run(Path()).page
    assert "1 more captured text is not on this page" in page.read_text("utf-8")
    data = payload(page)
    assert [each["name"] for each in data["documents"]] == lengths.index[:2].tolist()
    assert list(data["contributions"]) == [lengths.index[0]]
    assert data["partsLimit"] == 5
    assert [each["reads"] for each in data["documents"]] == [2, None]
    assert "features/inspect/contributions" in data["wording"]["matrices_elsewhere"]
    assert data["wording"]["no_matrices"].endswith("To measure matrices, list them in measure.matrices.")


def test_omitted_content_is_explained(run: Path, tab: Any, tmp_path: Path) -> None:
    def change(data: Any) -> None:
        del data["contributions"]["test/0"]["parts"]
        del data["contributions"]["test/1"]
        data["partsLimit"] = 5

    shown = tab(change_page(tmp_path, change))
    page = shown.page
    choose(page, "document", "0")
    choose(page, "share", "parts")
    length = (tokens()["document"] == "test/0").sum()
    assert page.locator("#parts-note").inner_text() == (
        f"This text has {length} tokens. Exact parts, the contributions of the input tokens to a vector, are computed "
        "only for texts of at most 5 tokens, because the time "
        "grows with the square of the length. Select another measure under “Share”."
    )
    choose(page, "share", "alti")
    assert "Select another measure" not in page.locator("#parts-note").inner_text()
    choose(page, "document", "1")
    page.locator("#words span").first.click()
    assert "features/inspect/contributions" in page.locator("#card").inner_text()
    tab(change_page(tmp_path, lambda data: data.update(matrices=[], contributions={})))
    assert "To measure matrices, list them in measure.matrices." in page.locator("#card").inner_text()


def test_json_in_page_is_escaped() -> None:
    hostile = {"</script><script>": ["<!--", "\u2028", "\\u003c"]}
    written = as_json(hostile)
    assert "<" not in written
    assert json.loads(written) == hostile


def test_control_characters_are_spelt_out() -> None:
    assert visible("a\x00b\u202ec\n") == "a\u2400b⟨U+202E⟩c\n"


def test_every_pane_has_csv_content(opened: Opened) -> None:
    page = opened.page
    choose(page, "document", "0")
    choose(page, "checkpoint", "pretrained")
    page.locator("#token-3").click()
    for summary in page.locator(".fold > summary").all():
        summary.click()
    panes = page.locator(".pane").evaluate_all("all => all.map(each => each.id)")
    assert {"grid", "answer-chart", "layers-chart", "text", "heads", "weights", "map-pane", "probes"} <= set(panes)
    of_no_model = ("grid", "answer-chart", "layers-chart", "class-shares")
    for pane in panes:
        name, content = opened.file(pane, "csv")
        assert name.endswith(".csv")
        # The map contains vectors of the fine-tuned model, whichever model is selected.
        assert ("fine_tuned" in name) == (pane == "map-pane") or pane in of_no_model
        text = content.decode()
        columns, *rows = csv.reader(text.splitlines())
        assert {len(row) for row in rows} <= {len(columns)}, pane
        assert len(set(columns)) == len(columns), pane
        table = pd.read_csv(io.BytesIO(content))  # a note above the columns would be parsed as column names
        assert (table.columns.tolist(), len(table)) == (columns, len(rows)), pane
        assert isinstance(table.index, pd.RangeIndex), pane
        if pane in ("grid", "text", "heads", "weights", "steps-of-weight", "map-pane"):
            assert "model" in columns, pane
            assert {"layer", "capture point"} & set(columns), pane
        numbers = re.findall(r"(?<![\w.])\d+\.\d+", text)
        digits = 6 if pane in ("heads", "weights", "steps-of-weight") else 4
        assert all(len(number.replace(".", "").strip("0")) <= digits for number in numbers), pane


def test_words_are_saved_as_shown_and_not_executed(opened: Opened, tmp_path: Path) -> None:
    page = opened.page
    choose(page, "document", "0")
    name, content = opened.file("text", "csv")
    rows = list(csv.DictReader(content.decode("utf-8").splitlines()))
    names = tokens().query("document == 'test/0'")["token"]
    assert [row["token"] for row in rows] == [visible(each, kept="") for each in names]
    titles = page.locator("#words span").evaluate_all("all => all.map(each => each.title)")
    column = next(name for name in rows[0] if name.startswith("own share"))
    for title, row in zip(titles, rows, strict=True):
        share = row[column]
        assert not share or float(title.split()[-1].rstrip("%")) == pytest.approx(100 * float(share), abs=0.06)
    name, content = opened.file("text", "SVG")
    # Long tokens are broken into lines.
    text = "".join("".join(ElementTree.fromstring(content).itertext()).split())
    assert all("".join(visible(each, kept="").split()) in text for each in HOSTILE)
    (tmp_path / name).write_bytes(content)
    alone = opened.context.new_page()
    alone.goto((tmp_path / name).as_uri())
    assert alone.evaluate("window.hacked") is None
    alone.close()


SCREENS = [("light", 1400, "none"), ("dark", 400, "none")]
OTHER_SCREENS = [("light", 768, "active"), ("dark", 2560, "none")]


@pytest.mark.parametrize(
    ("scheme", "width", "forced"), [*SCREENS, *(pytest.param(*each, marks=pytest.mark.long) for each in OTHER_SCREENS)]
)
def test_page_is_accessible_on_every_screen(run: Path, tab: Any, scheme: str, width: int, forced: str) -> None:
    page = tab(Run(run).page, width=width, color_scheme=scheme, forced_colors=forced, reduced_motion="reduce").page
    page.locator("#token-3").click()
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    for name in ("Layer", "Capture point"):
        assert page.get_by_role("slider", name=name).count() == 1
    assert page.locator("#bar").bounding_box()["height"] < 95  # two rows
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # no horizontal scrolling
    page.evaluate("scrollTo(0, 0)")  # at the top, the fixed bar does not cover content
    assert violations(page) == []
