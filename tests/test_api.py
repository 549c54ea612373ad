"""The API and commands match transformers, do not change models and report mistakes; docstring examples are right."""

from __future__ import annotations

import doctest
import html
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
import pandas as pd
import pytest
import torch
from browser import WHOLE, Opened
from conftest import REPOSITORY, digest
from families import write_family
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import attnmix
from attnmix import __main__ as command
from attnmix import interventions
from attnmix.core.errors import InputError
from attnmix.figures.labels import RATIO_LABELS, RATIO_MARKS
from attnmix.measures.matrices import LAYER_MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.models import convert

MAX_CELL_BYTES = 500_000  # limit for the output cell of a short text
TEXTS = ["time flies like an arrow", "the film was good ."]
FUNCTIONS = [
    *(attnmix.load, attnmix.Model.intervene, attnmix.measure, attnmix.Measures.own_share, attnmix.Measures.sinks),
    *(attnmix.list_measures, attnmix.Measures.plot, attnmix.Comparison.plot, attnmix.Comparison.to_html),
    *(attnmix.Measures.controls, attnmix.Measures.matrix, attnmix.Measures.parts, attnmix.Measures.to_html),
    *(attnmix.Measures.save, attnmix.load_result),
    *(attnmix.capture, attnmix.compare, attnmix.layout),
]


@pytest.fixture(scope="module")
def model(tiny_bert: Path) -> attnmix.Model:
    return attnmix.load(str(tiny_bert))


def test_docstring_examples_print_their_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"attnmix": attnmix, "np": np, "torch": torch, "interventions": interventions}
    runner = doctest.DocTestRunner()
    for function in FUNCTIONS:
        (example,) = doctest.DocTestFinder(recurse=False).find(function, globs=names)
        example.globs = names  # each example continues the previous one
        assert example.examples
        runner.run(example, clear_globs=False)
    assert runner.summarize().failed == 0
    assert "time" in Path("page.html").read_text(encoding="utf-8")


def test_ratios_and_matrices_match_transformers_attention(model: attnmix.Model, tiny_bert: Path) -> None:
    result = attnmix.measure(model, TEXTS, methods=["attn_w"])
    eager, tokenizer = AutoModel.from_pretrained(tiny_bert, attn_implementation="eager"), model.tokenizer
    for number, text in enumerate(TEXTS):
        with torch.inference_mode():
            layers = eager(**tokenizer(text, return_tensors="pt"), output_attentions=True).attentions
        weights = torch.stack(layers)[:, 0].mean(1).numpy()
        rows = result.ratios.query("text == @number")
        assert rows["layer"].drop_duplicates().tolist() == list(range(1, len(layers) + 1))
        expected = 1 - np.diagonal(weights, axis1=1, axis2=2)
        np.testing.assert_allclose(rows["ratio"], expected.ravel(), atol=1e-5)
        assert rows["token"].tolist()[: expected.shape[1]] == tokenizer.tokenize(text, add_special_tokens=True)
        np.testing.assert_allclose(result.matrix("attention", text=number), weights, atol=1e-5)
        to_end = result.matrix("attention", 2, number).sel(source="[SEP]")
        np.testing.assert_allclose(to_end, weights[1, :, -1], atol=1e-5)


def test_matrix_computes_no_other_matrix(model: attnmix.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    result = attnmix.measure(model, TEXTS[0], methods="attn_w")
    computed: list[str] = []

    def with_record(name: str, formula: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a formula that also records its name in `computed`."""

        def record(chunk: Any) -> Any:
            computed.append(name)
            return formula(chunk)

        return record

    for name, matrix in LAYER_MATRICES.items():
        monkeypatch.setitem(LAYER_MATRICES, name, replace(matrix, formula=with_record(name, matrix.formula)))
    for name in ("attention", "alti", "alti_rollout", "attention_rollout"):
        result.matrix(name)
    assert computed == ["attention"] * model.layers + ["alti"] * model.layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_model_in_memory_is_unchanged(tiny_bert: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_bert, dtype=dtype).train()
    classifier.bert.embeddings.eval()

    def state() -> list[Any]:
        hooks = [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in classifier.modules()]
        modules = [hooks, *(each.training for each in classifier.modules())]
        config = classifier.bert.config
        return [modules, classifier.dtype, config._attn_implementation, getattr(config, "use_cache", None)]

    # transformers keeps its own hooks after hidden states have been requested once.
    classifier(torch.ones(1, 3, dtype=torch.long), output_hidden_states=True)
    before, weights = state(), {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    model = attnmix.load(classifier, AutoTokenizer.from_pretrained(tiny_bert))
    result = attnmix.measure(model, TEXTS)
    result.matrix("alti")
    attnmix.capture(model, TEXTS, tmp_path / "run")
    assert state() == before
    assert all(torch.equal(weights[name], tensor) for name, tensor in classifier.state_dict().items())
    same = attnmix.measure(attnmix.load(str(tiny_bert)), TEXTS)
    assert np.abs(same.ratios["ratio"] - result.ratios["ratio"]).max() < (1e-6 if dtype == torch.float32 else 0.01)


def test_decoder_tokens_are_shifted_inputs(tmp_path: Path) -> None:
    result = attnmix.measure(attnmix.load(str(write_family("bart", tmp_path / "bart"))), TEXTS)
    tokens = result.tokens.query("text == 1")["token"].tolist()
    start = result.model.tokenizer.convert_ids_to_tokens(result.model.network.config.decoder_start_token_id)
    layers = result.ratios.query("text == 1 and method == 'attn_w'").groupby("layer")["token"].agg(list)
    half = len(layers) // 2
    assert layers.tolist() == half * [tokens] + half * [[start, *tokens[:-1]]]
    assert result.matrix("attention", layer=len(layers), text=1)["source"].values.tolist() == [start, *tokens[:-1]]
    with pytest.raises(InputError, match=r"^layer: None; allowed: 1 to "):
        result.matrix("attention")


def test_token_ids_and_text_sequences_agree(model: attnmix.Model) -> None:
    expected = attnmix.measure(model, TEXTS).ratios["ratio"]
    ids = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    for given in (pd.Series(TEXTS), tuple(TEXTS), ids, [torch.tensor(each) for each in ids]):
        np.testing.assert_array_equal(attnmix.measure(model, given).ratios["ratio"], expected)
    assert len(attnmix.measure(model, ids[0]).documents) == 1


def test_captured_vectors_can_be_reopened(model: attnmix.Model, tiny_bert: Path, tmp_path: Path) -> None:
    (tmp_path / "run/unfinished/done").mkdir(parents=True)  # leftover of an interrupted capture
    attnmix.capture(model, TEXTS, tmp_path / "run", points=["layer_output"], dtype="float32")
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["features"]
    run, own = attnmix.open_run(tmp_path / "run"), AutoModel.from_pretrained(tiny_bert)
    with torch.inference_mode():
        last = [own(**model.tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]
    vectors = run.features("layer_output")
    np.testing.assert_allclose(vectors.numpy()[-1], torch.cat(last), atol=1e-5)
    assert attnmix.layout(vectors, metric="cosine").shape == (*vectors.shape[:2], 2)


def test_intervals_over_texts_and_paired_comparison(model: attnmix.Model, tiny_bert: Path) -> None:
    texts = [f"{text} {words}" for text in TEXTS for words in ("a good", "film an", "time like", "bad film")]
    other = AutoModel.from_pretrained(tiny_bert)
    with torch.no_grad():
        for layer in other.encoder.layer:
            layer.attention.output.dense.weight.mul_(2)
    before, after = attnmix.measure(model, texts), attnmix.measure(attnmix.load(other, model.tokenizer), texts)
    table = attnmix.compare(before, after).all_rows()
    table = table[(table["layer"] != "all") & (table["measure"] != "own_share")]
    mean_before = before.ratios.groupby(["layer", "method"], sort=False)["ratio"].mean()
    mean_after = after.ratios.groupby(["layer", "method"], sort=False)["ratio"].mean()
    keys = pd.MultiIndex.from_frame(table[["layer", "measure"]])
    assert (table.query("measure == 'attnres_n'")["ci_low"] > 0).all(), "doubled attention outputs must mix more"
    np.testing.assert_allclose(table["difference"], (mean_after - mean_before).loc[keys], atol=1e-6)
    rows = before.by_layer()
    assert (rows["ci_low"] <= rows["mean"]).all()
    assert (rows["mean"] <= rows["ci_high"]).all()
    with pytest.raises(InputError, match=r"^compare: results of 8 and 7 texts; measure the same texts for both$"):
        attnmix.compare(before, attnmix.measure(model, texts[:-1]))
    with pytest.raises(InputError, match=r"^compare: tokens of text 7 differ; measure the same texts, with the same "):
        attnmix.compare(before, attnmix.measure(model, [*texts[:-1], "good"]))


def test_long_text_is_truncated_with_warning(model: attnmix.Model) -> None:
    with pytest.warns(UserWarning, match="text 1 has 7 tokens, of which the first 5 are measured"):
        result = attnmix.measure(model, ["good film", "time flies like an arrow"], max_length=5)
    assert result.tokens["text"].value_counts().to_dict() == {0: 4, 1: 5}
    message = "text 1 has 7 tokens, of which the first 3 are measured; also truncated: 2 other texts"
    with pytest.warns(UserWarning, match=message) as caught:
        attnmix.measure(model, ["good film", "time flies like an arrow", "time flies"], max_length=3)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: attnmix.measure(m, "good", methods=["attn"]), r"^methods\[0\]: 'attn' .*; allowed: attn_w, "),
        (lambda m: attnmix.measure(m, "good").matrix("altitude"), r"^matrix: 'altitude'; allowed: attention, "),
        (lambda m: attnmix.measure(m, "good").matrix("alti", layer=0), r"^layer: 0; allowed: 1 to "),
        (lambda m: attnmix.measure(m, "good").matrix("alti", text=1), r"^text: 1; allowed: 0 to 0"),
        (lambda m: attnmix.capture(m, "good", "run", points=["out"]), r"^points\[0\]: 'out' .*: word_embedding, "),
        (lambda m: attnmix.capture(m, "good", REPOSITORY), r"^path: .* contains "),
        (
            lambda _: attnmix.layout([[1.0]], metric="cosinus"),
            r"^metric: 'cosinus' is not allowed: no such name; ",
        ),
        (lambda _: attnmix.layout([1.0, 2.0]), r"^vectors: an array of shape \(2,\)"),
        (lambda m: attnmix.load(m.network), r"^tokenizer: a model in memory needs its fast tokenizer"),
        (lambda m: attnmix.load(m), r"^model: Model is not supported; pass a name, a folder, "),
        (lambda _: attnmix.load("no folder"), r"^model: no folder is neither an existing folder nor a hub identifier"),
    ],
)
def test_mistake_names_the_argument(model: attnmix.Model, call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(model)


def test_public_names_are_exported() -> None:
    from attnmix.core.store.runs import Run
    from attnmix.results.comparison import Comparison

    assert (attnmix.InputError, attnmix.Comparison, attnmix.Run) == (InputError, Comparison, Run)
    assert [name for name in attnmix.__all__ if not hasattr(attnmix, name)] == []


BELONGS = {
    "attn_n": r"a mixing ratio: measure\(model, texts, methods=\['attn_n'\]\)",
    "alti": r"a contribution matrix: result\.matrix\('alti'\)",
    "alti_rollout": r"a contribution matrix: result\.matrix\('alti_rollout'\)",
    "shuffled_words": r"a control: measure\(model, texts, controls=\['shuffled_words'\]\)",
    "own_share": r"a share of parts: result\.own_share\(\)",
    "value_of_first": r"a measure of sinks: result\.sinks\(\)",
    "projection": r"a variable of result\.parts\(\)",
    "tangent": r"a rule of result\.parts\(rule='tangent'\)",
    "ffn_output": r"a capture point: capture\(model, texts, points=\['ffn_output'\]\)",
}
"""Names of several kinds, each with its explanation in the error message for an argument that expects another kind."""


@pytest.mark.parametrize(
    ("argument", "own", "call"),
    [
        ("methods", ["attn_n"], lambda m, name: attnmix.measure(m, "good", methods=name)),
        ("methods", ["attn_n"], lambda m, name: attnmix.compare(m, m, "good", methods=["attn_w", name])),
        ("controls", ["shuffled_words"], lambda m, name: attnmix.measure(m, "good", controls=[name])),
        ("points", ["ffn_output"], lambda m, name: attnmix.capture(m, "good", points=[name])),
        ("matrix", ["alti", "alti_rollout"], lambda m, name: attnmix.measure(m, "good").matrix(name)),
        ("method", ["attn_n"], lambda m, name: attnmix.measure(m, "good").controls(name)),
        ("rule", ["tangent"], lambda m, name: attnmix.measure(m, "good").parts(rule=name)),
    ],
)
def test_name_of_another_kind_is_explained(model: attnmix.Model, argument: str, own: Sequence[str], call: Any) -> None:
    for name, belongs in BELONGS.items():
        if name not in own:
            with pytest.raises(InputError, match=f"^{argument}: '{name}' is {belongs}; allowed: "):
                call(model, name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.matrix("alti", layer=99), r"^layer: 99; allowed: 1 to 3$"),
        (lambda r: r.matrix("alti", layer=-1), r"^layer: -1; "),
        (lambda r: r.matrix("alti", layer="last"), r"^layer: 'last'; "),
        (lambda r: r.matrix("alti", layer=True), r"^layer: True; "),
        (lambda r: r.matrix("alti", text=-1), r"^text: -1; "),
        (lambda r: r.matrix(["alti"] * 40), r"^matrix: \['alti', .{,75}\.\.\.; allowed: "),
        (lambda r: r.parts(text=2), r"^text: 2; allowed: 0 to 0"),
        (lambda r: r.parts(rows=[7]), r"^rows: \[7\]; allowed: token positions, 0 to 6"),
        (lambda r: r.parts(rule="secant"), r"^rule: 'secant'; allowed: chord, tangent"),
    ],
)
def test_invalid_selection_fails_before_forward_pass(
    model: attnmix.Model, monkeypatch: pytest.MonkeyPatch, call: Any, message: str
) -> None:
    result = attnmix.measure(model, TEXTS[0])
    monkeypatch.setattr(model.network, "forward", Anything.__getattr__)
    with pytest.raises(InputError, match=message):
        call(result)


def test_missing_matrix_fails_before_forward_pass(tmp_path: Path) -> None:
    model = attnmix.load(str(write_family("gpt2", tmp_path / "gpt2")))
    result = attnmix.measure(model, TEXTS[0], methods="attn_w")
    for name in ("globenc", "globenc_rollout"):
        with pytest.raises(InputError, match=f"^matrix: {name} is not available for the model family gpt2$"):
            result.matrix(name)


def test_added_ratio_is_measured_compared_and_drawn(
    model: attnmix.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    squared = replace(RATIOS["attn_w"], formula=lambda splits: splits.mixed_weight**2)
    monkeypatch.setitem(RATIOS, "squared", squared)
    monkeypatch.setitem(RATIO_MARKS, "squared", RATIO_MARKS["attn_w"])
    monkeypatch.setitem(RATIO_LABELS, "squared", "Squares")
    result = attnmix.measure(model, TEXTS, controls="text_mean_value")
    assert "squared" in result.methods
    assert len(result.controls("squared")) == len(result.controls())
    assert len(attnmix.compare(result, result).by_layer("squared")) == model.layers
    assert result.to_html(tmp_path / "page.html").is_file()
    # A result that contains only the added ratio is compared by this ratio.
    place = result.methods.index("squared")
    ratios = {number: array[[place]] for number, array in result.measurements.ratios.items()}
    measurements = replace(result.measurements, ratios=ratios)
    alone = replace(result, methods=["squared"], measurements=measurements, control_names=[])
    assert attnmix.compare(alone, alone).ratio == "squared"


def write_page(path: Path) -> None:
    attnmix.Measures(Anything(), Anything(), [], Anything()).to_html(path)  # type: ignore[arg-type]  # not used


def run_show(path: Path) -> None:
    command.main(["show", "a text", "--model", "no model", "--to", str(path)])


def capture_text(path: Path) -> None:
    attnmix.capture(Anything(), "a text", path)


def convert_file(path: Path) -> None:
    convert.convert(path.parent / "no file.pth", "no model", path, ["a", "b"])


class Anything:
    """Stub of a model that fails on any access, to show that arguments are checked first."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used before all arguments were checked")


FOLDER, FULL, BELOW_A_FILE, MISSING = "folder", "full", "file/new", "missing/new"


@pytest.mark.parametrize(
    ("write", "places"),
    [
        (write_page, (FOLDER, FULL, BELOW_A_FILE, MISSING)),
        (run_show, (FOLDER, FULL, BELOW_A_FILE, MISSING)),
        (capture_text, ("file", FULL, BELOW_A_FILE)),
        (convert_file, ("file", FULL, BELOW_A_FILE)),
    ],
)
def test_unwritable_output_fails_before_any_work(
    write: Callable[[Path], None], places: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (FOLDER, FULL):
        (tmp_path / folder).mkdir()
    for file in ("file", "full/file"):
        (tmp_path / file).write_text("mine", encoding="utf-8")
    before = digest(tmp_path)
    for place in places:
        with pytest.raises((InputError, SystemExit), match=f"{tmp_path}.*; "):
            write(tmp_path / place)
    monkeypatch.setattr(os, "access", lambda *_: False)  # as on a read-only mount
    with pytest.raises(
        (InputError, SystemExit), match=f"{tmp_path} is not (writable|a folder with write permission); "
    ):
        write(tmp_path / "new")
    assert digest(tmp_path) == before


def test_show_opens_browser_or_notebook_frame(
    model: attnmix.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chromium: Any
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    result = attnmix.measure(model, TEXTS[0])
    assert result.show() is None
    page = Path(unquote(urlparse(opened[0]).path)).read_text(encoding="utf-8")
    notebook = ModuleType("IPython.display")
    notebook.__dict__["HTML"] = str
    for name, module in (("ipykernel", ModuleType("ipykernel")), ("IPython.display", notebook)):
        monkeypatch.setitem(sys.modules, name, module)

    def source_of(frame: str) -> str:
        (source,) = re.findall(r"^<div><iframe srcdoc='([^']*)' style='[^']*'></iframe></div>$", frame)
        return html.unescape(source).replace('<base href="about:srcdoc">', "")

    assert source_of(result.show(whole=True)) == page
    frame = result.show()
    assert len(frame.encode()) < MAX_CELL_BYTES
    assert "result.show(whole=True)" in source_of(frame)
    (tmp_path / "notebook.html").write_text(f'<meta charset="utf-8">{frame}', encoding="utf-8")
    shown = chromium.new_page()
    shown.goto((tmp_path / "notebook.html").as_uri())
    views = shown.frame_locator("iframe")
    views.locator(WHOLE).wait_for(state="attached")
    assert views.locator("#grid-canvas, #words").count() == 2
    assert views.locator("#heads, #heads-note").count() == 0
    assert set(views.locator("#share option").evaluate_all("all => all.map(each => each.value)")) > {"parts", "alti"}
    views.locator("nav a[href='#map']").click()
    shown.wait_for_url(re.compile("notebook"))
    assert shown.frames[1].url == "about:srcdoc#map"  # a link within the page stays in the frame
    shown.close()


def test_show_command_writes_page_and_reports_mistakes(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command.main(["show", TEXTS[0], "--model", str(tiny_bert), "--to", "own.html"])
    assert capsys.readouterr().out.splitlines()[-1] == "open own.html"
    command.main(["show", *TEXTS, "--model", str(tiny_bert), "--to", "own.html"])
    printed = capsys.readouterr().out
    result = attnmix.measure(attnmix.load(str(tiny_bert)), TEXTS)
    means = result.ratios.groupby(["text", "layer", "method"])["ratio"].mean()
    blocks = re.findall(r'^text (\d), \d+ tokens: "(.*)"\n((?:.+\n)+)', printed, flags=re.MULTILINE)
    assert [text for _, text, _ in blocks] == TEXTS
    for number, _, table in blocks:
        cells = [list(map(float, line.split())) for line in table.splitlines()[2:]]
        shown = pd.DataFrame(cells, columns=["layer", *result.methods]).set_index("layer")
        assert shown.stack().to_numpy() == pytest.approx(
            means[int(number)].unstack()[result.methods].stack().to_numpy(), abs=6e-4
        )
    for method in result.methods:
        assert f"  {method.ljust(11)}  {RATIO_MARKS[method].label}\n" in printed
    assert [each.name for each in tmp_path.iterdir()] == ["own.html"]
    for arguments, error in (
        ([" "], "texts: number 0: the text is empty"),
        (["a", "--to", "no/x"], "--to: the folder no does not exist"),
        (["a", "--model", "broken model"], "model: broken model is neither an existing folder nor a hub identifier"),
    ):
        with pytest.raises(SystemExit, match=f"^error: {error}"):
            command.main(["show", "--model", str(tiny_bert), *arguments])


@pytest.mark.parametrize("subcommand", [[], ["show"], ["serve"]])
def test_help_has_description_defaults_and_example(subcommand: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([*subcommand, "--help"])
    shown = capsys.readouterr().out
    assert re.search(r"^example:\n  attnmix \w+", shown, flags=re.MULTILINE)
    options = re.split(r"\n  (?=--)", shown.partition("options:")[2].partition("example:")[0])[1:]
    with_value = [option for option in options if re.match(r"--\w+(-\w+)? [A-Z]+", option)]
    assert len(with_value) == {"show": 4, "serve": 5}.get("".join(subcommand), 0)
    assert [option for option in with_value if "(default: " not in option] == []


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_page_of_text_matches_measures_without_pipeline_terms(
    tmp_path: Path, tab: Callable[..., Opened], family: str
) -> None:
    result = attnmix.measure(attnmix.load(str(write_family(family, tmp_path / family))), TEXTS[0])
    page = result.to_html(tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    words = re.sub(r"<(script|style)\b.*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL).lower()
    assert re.findall(r"fine-?tun\w*|reviews?|classif\w*|accuracy|nan\b|seed 111", words) == []
    assert "all numbers and maps describe the text below." in words
    opened = tab(page)
    assert "time" in "".join(opened.page.inner_text("#words").split()).lower().replace("▁", "")
    means = result.by_layer()
    assert means["ci_low"].isna().all()
    method = opened.page.locator(".thumb[aria-pressed=true]").get_attribute("data-measure")
    curve = [float(row["The model as it is"]) for row in opened.values("layers-chart")]
    assert curve == pytest.approx(means.loc[means["method"] == method, "mean"].tolist(), rel=1e-3)
    assert opened.page.locator("path.band[d]:not([d=''])").count() == 0  # a single text has no interval


def test_captured_vectors_match_hidden_states(model: attnmix.Model) -> None:
    texts = ["time flies like an arrow", "good"]
    vectors = attnmix.capture(model, texts, dtype="float32", points="layer_output")
    assert list(vectors) == ["layer_output"]
    hidden = []
    for text in texts:
        inputs = model.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            states = model.network.base_model(**inputs, output_hidden_states=True).hidden_states
        hidden.append(torch.cat(states[1:]))
    array = vectors["layer_output"]
    np.testing.assert_allclose(array.to_numpy(), torch.cat(hidden, 1).numpy(), rtol=1e-4, atol=1e-5)
    second = array.isel(token=(array["document"] == "text/1").to_numpy())
    assert second["position"].to_numpy().tolist() == list(range(second.sizes["token"]))
    assert array["layer"].to_numpy().tolist() == list(range(1, model.layers + 1))


def test_vectors_in_memory_match_stores(model: attnmix.Model, tmp_path: Path) -> None:
    texts = ["time flies like an arrow", "good", "a film that is not good"]
    vectors = attnmix.capture(model, texts)
    run = attnmix.capture(model, texts, tmp_path / "run")
    assert set(vectors) == {site.point for site in run.sites}
    for point, array in vectors.items():
        features = run.features(point).xarray()
        np.testing.assert_array_equal(array, features)
        np.testing.assert_array_equal(array["token_id"], features["token_id"])


def test_interrupted_capture_keeps_the_earlier_one(model: attnmix.Model, tmp_path: Path) -> None:
    run = attnmix.capture(model, TEXTS[0], tmp_path, points="layer_output")
    before = run.features("layer_output").numpy()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    base: Any = model.network.base_model
    hook = base.encoder.layer[-1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        attnmix.capture(model, TEXTS[1], tmp_path, points="layer_output")
    hook.remove()
    kept = attnmix.open_run(tmp_path)
    assert list(kept.texts.values()) == TEXTS[:1]
    np.testing.assert_array_equal(kept.features("layer_output").numpy(), before)
    new = attnmix.capture(model, TEXTS[1], tmp_path, points="layer_output")
    assert list(new.texts.values()) == TEXTS[1:]
    expected = attnmix.capture(model, TEXTS[1], points="layer_output")["layer_output"]
    np.testing.assert_array_equal(new.features("layer_output").numpy(), expected.values)
    np.testing.assert_array_equal(new.features("layer_output", layers=1).numpy()[0], expected.sel(layer=1).values)
    for layers in (1.0, True, [0]):
        with pytest.raises(InputError, match=r"^layers: .*; allowed for layer_output: 1, 2"):
            new.features("layer_output", layers=layers)
    assert [path.name for path in tmp_path.iterdir()] == ["features"]


def test_special_tokens_inside_a_text_are_special(tiny_bert: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    model = attnmix.load(AutoModel.from_pretrained(tiny_bert), tokenizer)
    texts = ["the film was good [SEP] a film", "it was bad [SEP] time flies like"]
    from_strings = attnmix.measure(model, texts, controls="without_special_sources")
    from_ids = attnmix.measure(model, tokenizer(texts, padding=True), controls="without_special_sources")
    assert from_strings.tokens["token_class"].tolist().count("sep") == 4
    pd.testing.assert_frame_equal(from_strings.tokens, from_ids.tokens)
    pd.testing.assert_frame_equal(from_strings.controls(), from_ids.controls())
    pd.testing.assert_frame_equal(from_strings.own_share(), from_ids.own_share())


def test_vectors_of_other_texts_are_an_error(model: attnmix.Model, tmp_path: Path) -> None:
    run = attnmix.capture(model, TEXTS, tmp_path / "run", points="layer_output")
    run.check_capture()
    other = attnmix.capture(model, TEXTS[::-1], tmp_path / "other", points="layer_output")
    shutil.copytree(other.activations, run.activations, dirs_exist_ok=True)
    with pytest.raises(InputError, match=r"vectors of other texts than .*captured; rerun the stage capture"):
        attnmix.open_run(run.root).check_capture()
