"""Pages, figures and commands that compare two models show the numbers of the comparison and distinct model names."""

from __future__ import annotations

import base64
import copy
import json
import re
import shutil
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from browser import Opened
from conftest import toy_reviews, write_tiny_bert
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from page_run import without_umap
from transformers import AutoModel, AutoTokenizer

import attnmix
from attnmix.core.errors import InputError
from attnmix.core.model_names import display_name, distinct_names
from attnmix.figures.labels import CURVE_LOOKS
from attnmix.page.arrays import MAX_CODE
from attnmix.results.page import models_subject
from attnmix.runs.text_results import load_measurer
from attnmix.serve import Pages, tokenized

command = import_module("attnmix.__main__")
TEXTS = toy_reviews(24, seed=3)["text"].tolist()
RATIO = "attnresln_n"


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    """Draw without a screen, and close every figure."""
    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


@pytest.fixture(autouse=True)
def quick_maps() -> Iterator[None]:
    with without_umap():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two checkpoints with the same folder name, the second with larger attention outputs."""
    root = tmp_path_factory.mktemp("private") / "runs"
    first = write_tiny_bert(root / "seed-0" / "model")
    network = AutoModel.from_pretrained(first)
    with torch.no_grad():
        for layer in network.encoder.layer:
            layer.attention.output.dense.weight.mul_(1.5)
    second = root / "seed-1" / "model"
    network.save_pretrained(second)
    AutoTokenizer.from_pretrained(first).save_pretrained(second)
    return first, second


@pytest.fixture(scope="module")
def compared(folders: tuple[Path, Path]) -> attnmix.Comparison:
    return attnmix.compare(*folders, TEXTS, controls="text_mean_value")


@pytest.fixture(scope="module")
def page(compared: attnmix.Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of the comparison."""
    with without_umap():
        return compared.to_html(tmp_path_factory.mktemp("page") / "page.html")


def data_of(page: Path) -> Any:
    """Return the data of a page."""
    packed = re.search(r'id="data">([^<]*)<', page.read_text("utf-8"))
    assert packed
    return json.loads(zlib.decompress(base64.b64decode(packed[1])))


def words_of(page: Path) -> str:
    """Return the HTML of a page without its scripts and styles."""
    return re.sub(r"<script.*?</script>|<style.*?</style>", "", page.read_text("utf-8"), flags=re.DOTALL)


def by_layer(compared: attnmix.Comparison, measure: str) -> pd.DataFrame:
    return compared.by_layer(measure).set_index("layer")


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["/home/me/runs/seed-0", "owner/bert"], ["seed-0", "bert"]),
        (["/home/me/a/model", "/home/me/b/model"], ["a/model", "b/model"]),
        (["a/x/model", "b/x/model", "b/y/model"], ["a/x/model", "b/x/model", "b/y/model"]),
        (["model", "/a/model"], ["model", "a/model"]),
        (["/a/model", "/a/model"], ["a/model (1)", "a/model (2)"]),
        (["package://one/model", "package://two/model"], ["one", "two"]),
    ],
)
def test_models_with_same_folder_name_are_distinguished(sources: list[str], names: list[str]) -> None:
    shown = distinct_names(range(len(sources)), [display_name(source) for source in sources], sources)
    if sources[0] == sources[-1]:  # parent folders are identical, too
        names = [f"model ({number})" for number in (1, 2)]
    assert shown == names
    assert distinct_names([0] * len(sources), [display_name(sources[0])] * len(sources), sources)[0] == display_name(
        sources[0]
    ), "one model has one name"


def test_chosen_model_name_is_shown_and_validated(folders: tuple[Path, Path]) -> None:
    models = [attnmix.load(str(folder), name=name) for folder, name in zip(folders, ("run 1", "run 2"), strict=True)]
    compared = attnmix.compare(*models, TEXTS[:2], methods=RATIO)
    assert "`before` is run 1, `after` is run 2." in repr(compared)
    assert repr(models[0]).startswith("Model(run 1, BertModel of 3 layers)")
    same = [attnmix.load(model.network, model.tokenizer, name="mine") for model in models]
    assert "`before` is mine (1), `after` is mine (2)." in repr(attnmix.compare(*same, TEXTS[:2], methods=RATIO))
    for name in ("", "two\nlines", 3, "x" * 81):
        with pytest.raises(InputError, match=r"^name: .*; allowed: one line of 1 to 80 characters"):
            attnmix.load(str(folders[0]), name=name)  # type: ignore[arg-type]  # deliberately wrong


def test_outputs_contain_no_local_path(compared: attnmix.Comparison, page: Path, tmp_path: Path) -> None:
    result = compared.results[0][0]
    private = str(Path(result.model.source).parent)
    assert private.startswith("/")
    saved = attnmix.load_result(result.save(tmp_path / "result.zip"))
    one = attnmix.measure(result.model, TEXTS[:1]).to_html(tmp_path / "one.html")
    shown = [repr(result), repr(result.model), repr(saved), repr(compared), compared.to_markdown(), compared.to_latex()]
    shown += [
        compared._repr_html_(),
        words_of(page),
        json.dumps(data_of(page)),
        words_of(one),
        json.dumps(data_of(one)),
    ]
    assert [text for text in shown if private in text or "/tmp" in text] == []
    assert private.encode() not in (tmp_path / "result.zip").read_bytes()
    assert "`before` is seed-0/model, `after` is seed-1/model." in compared.caution


def test_page_has_comparison_numbers_and_model_names(compared: attnmix.Comparison, page: Path) -> None:
    data, words = data_of(page), words_of(page)
    names = {"pretrained": "seed-0/model", "finetuned": "seed-1/model"}
    assert data["labels"]["checkpoints"] == names
    methods = compared.results[0][0].methods
    for method in methods:
        rows = by_layer(compared, method)
        curves = data["curves"][method]
        for checkpoint, column in (("pretrained", "before"), ("finetuned", "after"), ("difference", "difference")):
            np.testing.assert_allclose(curves[checkpoint]["values"], rows[column], atol=2e-6)
            assert curves[checkpoint]["texts"] == len(TEXTS)
    less = by_layer(compared, f"{RATIO} less text_mean_value")
    controls = data["controls"]["text_mean_value"][RATIO]
    for checkpoint, column in (("pretrained", "before"), ("finetuned", "after")):
        below = np.array(data["curves"][RATIO][checkpoint]["values"]) - controls[checkpoint]["values"]
        np.testing.assert_allclose(below, less[column], atol=2e-6)
    # The page contains the ratios of a text's tokens [layers, tokens] as 16-bit integers.
    first = compared.results[0][0].ratios_by_text[0][methods.index(RATIO)]
    content = base64.b64decode(data["ratios"]["values"]["pretrained"][RATIO])
    codes = np.frombuffer(content, "<u2").reshape(len(first), -1)
    np.testing.assert_allclose(codes[:, : first.shape[1]] / MAX_CODE, first, atol=1e-4)
    assert [each["name"] for each in data["answer"]["chart"]["series"]] == list(names.values())
    means = compared.rows.set_index("measure").loc[RATIO]
    states = f"{means['before']:.0%} in seed-0/model and {means['after']:.0%} in seed-1/model"
    assert any(states in sentence for sentence in data["answer"]["sentences"])
    spoken = [data["answer"]["headline"], *data["answer"]["sentences"], *data["answer"]["notes"].values(), words]
    assert [text for text in spoken if re.search("fine-tun|pretrain", text, flags=re.IGNORECASE)] == []


def test_headline_own_share_matches_comparison(folders: tuple[Path, Path], tmp_path: Path) -> None:
    compared = attnmix.compare(*folders, TEXTS[:5], methods=RATIO)
    row = compared.rows.set_index("measure").loc["own_share"]
    assert row["texts"] == 5
    headline = data_of(compared.to_html(tmp_path / "page.html"))["answer"]["headline"]
    before, after = (f"{row[column]:.0%}" for column in ("before", "after"))
    assert headline == f"Own share of a token's last vector: {before} in seed-0/model, {after} in seed-1/model"


def test_special_characters_in_names_are_escaped(folders: tuple[Path, Path], tmp_path: Path) -> None:
    models = [attnmix.load(str(folders[0]), name="<b>{x}</b>"), attnmix.load(str(folders[1]), name="b\\_%")]
    compared = attnmix.compare(*models, TEXTS[:2], methods=RATIO)
    page = compared.to_html(tmp_path / "page.html")
    assert "<b>{x}" not in page.read_text("utf-8")
    assert data_of(page)["labels"]["checkpoints"]["pretrained"] == "<b>(x)</b>"
    assert compared.to_latex().count("\n") == len(compared.to_latex().splitlines()) - 1


def test_model_compared_with_itself_has_page(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model = attnmix.load(str(folders[0]))
    data = data_of(attnmix.compare(model, model, TEXTS[:1], methods=RATIO).to_html(tmp_path / "page.html"))
    values = data["ratios"]["values"]
    assert values["pretrained"] == values["finetuned"]


def test_page_shows_first_of_several_training_runs(folders: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = (attnmix.measure(attnmix.load(str(folder)), TEXTS[:2], methods=RATIO) for folder in folders)
    compared = attnmix.compare(first, [second, first])
    page = compared.to_html(tmp_path / "page.html")
    assert data_of(page)["labels"]["checkpoints"]["finetuned"] == "seed-1/model"
    note = "The compared sides have 1 and 2 training runs; this page shows the first run of each side."
    assert note in words_of(page)


def test_loaded_result_without_model_has_no_page(compared: attnmix.Comparison, tmp_path: Path) -> None:
    loaded = attnmix.load_result(compared.results[0][0].save(tmp_path / "result.zip"))
    again = attnmix.compare(loaded, loaded)
    with pytest.raises(InputError, match=r"^model: model was not saved with the result; call load_result"):
        again.to_html(tmp_path / "page.html")
    with pytest.raises(InputError, match=r"^path: the folder .* does not exist"):
        again.to_html(tmp_path / "missing" / "page.html")
    assert not (tmp_path / "page.html").exists()


def curves_of(axes: Axes) -> dict[str, Any]:
    return {str(line.get_label()): line for line in axes.lines}


@pytest.mark.parametrize("measure", [None, RATIO, f"{RATIO} less text_mean_value"])
def test_comparison_figure_matches_table(compared: attnmix.Comparison, measure: str | None) -> None:
    axes = compared.plot(measure)
    shown = measure or "own_share"
    rows = by_layer(compared, shown)
    curves = curves_of(axes)
    labels = {"before": "seed-0/model (before)", "after": "seed-1/model (after)"}
    assert list(curves) == list(labels.values())
    for (column, label), checkpoint in zip(labels.items(), ("pretrained", "finetuned"), strict=True):
        line = curves[label]
        assert line.get_xdata().tolist() == rows.index.tolist()
        np.testing.assert_allclose(line.get_ydata(), rows[column], atol=1e-12)
        assert to_hex(line.get_color()) == CURVE_LOOKS[checkpoint][0]
    assert axes.get_xlabel() == "Layer"
    assert "95 % interval over texts" in axes.get_ylabel()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(labels.values())
    result = compared.results[0][0]
    if measure == RATIO:
        # At each layer, the band of the first model extends from the lower to the upper end of the interval.
        intervals = result.by_layer().query("method == @RATIO")
        heights: dict[int, set[float]] = {}
        for x, y in axes.collections[0].get_paths()[0].vertices:
            heights.setdefault(round(float(x)), set()).add(round(float(y), 9))
        for layer, low, high in intervals[["layer", "ci_low", "ci_high"]].itertuples(index=False):
            assert heights[layer] == {round(low, 9), round(high, 9)}


def test_result_figure_shows_means_in_given_axes(compared: attnmix.Comparison) -> None:
    result = compared.results[1][0]
    _, given = pyplot.subplots()
    assert result.plot(ax=given) is given
    means = result.by_layer().query("method == @RATIO")["mean"]
    np.testing.assert_allclose(curves_of(given)["model"].get_ydata(), means, atol=1e-12)
    np.testing.assert_allclose(result.plot("own_share").lines[0].get_ydata(), result.own_share()["mean"])
    assert len(pyplot.get_fignums()) == 2


def test_figure_draws_runs_without_band_for_few_texts(folders: tuple[Path, Path]) -> None:
    first, second = (attnmix.measure(attnmix.load(str(folder)), TEXTS[:3], methods=RATIO) for folder in folders)
    axes = attnmix.compare(first, [first, second]).plot(RATIO)
    assert len(axes.collections) == 0
    assert "interval" not in axes.get_ylabel()
    runs = [line.get_ydata() for line in axes.lines if line.get_label() == "_run"]
    np.testing.assert_allclose(runs, [each.by_layer()["mean"] for each in (first, second)], atol=1e-12)
    with pytest.raises(InputError, match=r"^measure: 'own'; allowed: own_share, attnresln_n"):
        attnmix.compare(first, second).plot("own")


def test_comparison_tables_are_data_frames(compared: attnmix.Comparison) -> None:
    pd.testing.assert_frame_equal(compared.to_frame(), compared.rows)
    pd.testing.assert_frame_equal(compared.to_frame(every=True), compared.all_rows())
    every = compared.all_rows().set_index("measure")["mixing"]
    assert set(every[f"{RATIO} less text_mean_value"]) == {""}
    assert set(every[RATIO]) == {"more"}
    assert set(every["own_share"]) <= {"more", "less", "inconclusive"}


def test_show_command_writes_page_and_prints_comparison(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    models = ["--model", str(folders[0]), "--against", str(folders[1])]
    command.main(["show", *TEXTS[:2], *models, "--to", str(page)])
    printed = capsys.readouterr().out
    compared = attnmix.compare(*folders, TEXTS[:2])
    assert printed == f"{compared!r}\nopen {page}\n"
    np.testing.assert_allclose(
        data_of(page)["curves"][RATIO]["difference"]["values"], by_layer(compared, RATIO)["difference"], atol=2e-6
    )


def test_typed_texts_are_measured_in_both_models(folders: tuple[Path, Path], tmp_path: Path) -> None:
    names = ["first", "second"]
    measurer = load_measurer(dict(zip(("pretrained", "finetuned"), folders, strict=True)), names)
    pages = Pages(measurer, models_subject(names), names)
    page = tmp_path / "page.html"
    page.write_text(pages.write(["the film was good ."]), encoding="utf-8")
    data = data_of(page)
    assert list(data["labels"]["checkpoints"].values()) == names
    assert [each["predicted"] for each in data["documents"]] == [None]
    ratios = measurer.results(tokenized(["the film was good ."], measurer)).ratios.groupby("checkpoint")[RATIO].mean()
    expected = [
        attnmix.measure(attnmix.load(str(folder)), "the film was good .")
        .by_layer()
        .query("method == @RATIO")["mean"]
        .mean()
        for folder in folders
    ]
    np.testing.assert_allclose(ratios[["pretrained", "finetuned"]], expected, atol=1e-5)


def test_incompatible_served_models_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shallow = write_tiny_bert(tmp_path / "shallow", layers=2)
    other = shutil.copytree(folders[1], tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["goood"])
    tokenizer.save_pretrained(other)
    for folder, message in (
        (shallow, r"^compare: 3 layers in first, 2 in second; compare models with the same number of layers$"),
        (other, r"^compare: the tokenizers of first and second differ; use models with the same tokenizer$"),
    ):
        with pytest.raises(InputError, match=message):
            load_measurer({"pretrained": folders[0], "finetuned": folder}, ["first", "second"])


def test_different_head_numbers_omit_heads(folders: tuple[Path, Path], tmp_path: Path) -> None:
    network = copy.deepcopy(AutoModel.from_pretrained(folders[1]))
    network.config.num_attention_heads //= 2
    network.save_pretrained(tmp_path / "fewer")
    AutoTokenizer.from_pretrained(folders[1]).save_pretrained(tmp_path / "fewer")
    compared = attnmix.compare(folders[0], tmp_path / "fewer", TEXTS[:2], methods=RATIO)
    assert data_of(compared.to_html(tmp_path / "page.html"))["attention"]["number"] == 0


def test_comparison_page_opens_without_errors(page: Path, chromium: Any) -> None:
    opened = Opened(chromium, page)
    shown = opened.page.locator("body").inner_text()
    assert "seed-0/model" in shown
    assert "seed-1/model" in shown
    opened.page.get_by_label("Change from seed-0").check()
    opened.close()
