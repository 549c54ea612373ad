"""Pages of typed texts compute only the values that they show, and state their limits.

Curves match those from a loop over rows.
"""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import torch
from conftest import write_tiny_bert
from families import write_family
from torch import Tensor
from transformers import BartConfig, BartModel

import attnmix
from attnmix.core.errors import InputError
from attnmix.core.names import DEFAULT_CONTROL_NAMES, RATIO_CONTROL_NAMES
from attnmix.core.statistics import MIN_INTERVAL_DOCUMENTS
from attnmix.measures import exchange, identities
from attnmix.measures.batches import STATISTICS
from attnmix.measures.layers import LayerPass
from attnmix.measures.mixing_tables import mixing_tables
from attnmix.models.checkpoint import load_tokenizer
from attnmix.page import arrays, payload
from attnmix.page.arrays import curve, curves_by
from attnmix.page.assembly import page_text
from attnmix.page.sentences import Subject
from attnmix.runs import text_results
from attnmix.serve import tokenized
from stages.common.parameters import Parameters

TEXTS: dict[str, list[Any]] = {
    "one text": ["time flies"],
    "several": ["time flies", "the film was good .", "the film was not good ."],
    "pairs": [("the film", "was good"), ("time", "flies")],
}


def measure_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pages compute all tables and statistics.

    Optional controls are excluded, because pages would otherwise show them.
    """
    optional = set(RATIO_CONTROL_NAMES) - set(DEFAULT_CONTROL_NAMES)
    statistics = [name for name in STATISTICS if name not in optional]
    monkeypatch.setattr(text_results, "PAGE_QUANTITIES", (*text_results.PAGE_QUANTITIES, *statistics))
    monkeypatch.setattr(text_results, "page_tables", mixing_tables)


@pytest.mark.parametrize("texts", TEXTS.values(), ids=TEXTS)
def test_saved_page_needs_no_further_tables(
    texts: list[Any], tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = attnmix.measure(attnmix.load(str(tiny_bert)), texts)
    drawn = result.to_html(tmp_path / "drawn.html").read_bytes()
    measure_all(monkeypatch)
    again = attnmix.measure(attnmix.load(str(tiny_bert)), texts)
    assert again.to_html(tmp_path / "all.html").read_bytes() == drawn


def test_served_page_needs_no_further_tables(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurer = text_results.load_measurer({"pretrained": tiny_bert, "finetuned": tiny_bert})
    texts = tokenized(["time flies", "the film was good ."], measurer)
    drawn = page_text(measurer.results(texts), Subject("a model"))
    measure_all(monkeypatch)
    assert page_text(measurer.results(texts), Subject("a model")) == drawn


@pytest.mark.parametrize(
    "texts",
    [
        ["the film was not good .", "the film was good ."],
        ["film good " * 30, "good " * 30],  # longer than the texts in the default sample of `own_share`
    ],
)
def test_typed_pair_has_own_share_of_every_word(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    measurer = text_results.load_measurer({"pretrained": tiny_bert})
    exchanged: list[str] = []
    right = exchange.measure_exchange

    def counted(base: Any, document: Any, *arguments: Any) -> Any:
        exchanged.append(document.name)
        return right(base, document, *arguments)

    monkeypatch.setattr("attnmix.measures.engine.measure_exchange", counted)
    results = measurer.results(tokenized(texts, measurer))
    assert exchanged == ["text/0", "text/1"]  # once each
    shares = []
    for name, text in zip(("text/0", "text/1"), texts, strict=True):
        found = results.captured_ratios([name])
        is_special = results.tokens.set_index(["document", "position"]).loc[name]["token_class"].isin(["cls", "sep"])
        np.testing.assert_array_equal(found["own_share"].isna(), is_special.loc[found["position"]])
        alone = measurer.results(tokenized([text], measurer)).captured_ratios(["text/0"])
        np.testing.assert_allclose(found["own_share"], alone["own_share"], rtol=1e-5, atol=1e-6)
        shares.append(found[found["layer"] == found["layer"].max()]["own_share"])
    table = results.table("measure/exchange").query("quantity == 'own_share' and layer == layer.max()")
    assert table["mean"].iloc[0] == pytest.approx(pd.concat(shares).mean(), abs=1e-5)


def test_displayed_own_shares_of_long_text_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attnmix.load(write_tiny_bert(tmp_path / "model", max_position_embeddings=256))
    lengths: list[int] = []
    right = exchange.measure_exchange

    def recorded(base: Any, document: Any, *arguments: Any) -> Any:
        lengths.append(len(document))
        return right(base, document, *arguments)

    monkeypatch.setattr("attnmix.measures.engine.measure_exchange", recorded)
    result = attnmix.measure(model, "film good " * 70)
    result.to_html(tmp_path / "page.html")
    assert lengths == [142]  # more tokens than displayed own shares


def words_and_data(page: Path) -> tuple[str, str]:
    """Return the HTML of a page without scripts and styles, and its data as JSON."""
    text = page.read_text("utf-8")
    packed = re.search(r'id="data">([^<]*)<', text)
    assert packed
    words = re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.DOTALL)
    return words, zlib.decompress(base64.b64decode(packed[1])).decode()


def read_page(page: Path) -> tuple[str, Any]:
    """Return the HTML of a page without scripts and styles, and its data."""
    words, data = words_and_data(page)
    return words, json.loads(data)


def own_shares_of_page(data: Any, checkpoint: str) -> npt.NDArray[np.float64]:
    """Return the codes of the own shares by exchange `[layers, tokens]`, with NaN for missing values."""
    packed = data["ratios"]["values"][checkpoint]["own_share"]
    codes = np.frombuffer(base64.b64decode(packed), np.uint16).astype(float)
    codes[codes == arrays.MISSING_CODE] = np.nan
    return codes.reshape(data["ratios"]["layers"], -1)


def test_page_of_many_texts_details_some_and_names_them(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attnmix.load(str(tiny_bert))
    texts = ["the film was not good .", "time flies like", "the film was good .", "a bad film"]
    words, whole = read_page(attnmix.measure(model, texts).to_html(tmp_path / "whole.html"))
    assert "were computed for" not in words
    result = attnmix.measure(model, texts)
    lengths = [len(document) for document in result.documents]
    monkeypatch.setattr(text_results, "MAX_DETAILED_CELLS", lengths[1] ** 2 + lengths[3] ** 2)
    words, data = read_page(result.to_html(tmp_path / "page.html"))
    assert "were computed for 2 of 4 texts: text/1, text/3." in words
    token_texts = np.repeat(np.arange(len(texts)), lengths)
    shown, expected = own_shares_of_page(data, "pretrained"), own_shares_of_page(whole, "pretrained")
    for number, name in enumerate(["text/0", "text/1", "text/2", "text/3"]):
        is_detailed = number in (1, 3)
        in_text = token_texts == number
        assert np.isfinite(expected[:, in_text]).any()
        if is_detailed:
            np.testing.assert_array_equal(shown[:, in_text], expected[:, in_text])
        else:
            assert np.isnan(shown[:, in_text]).all()
        methods = whole["contributions"][name]
        slow = {method for method in methods if method == "parts" or method.startswith("value_zeroing")}
        assert len(slow) > 1
        assert data["contributions"][name].keys() == (methods.keys() if is_detailed else methods.keys() - slow)
        assert ("not computed for this text" in data["documents"][number]["note"]) != is_detailed
    assert data["opens"]["document"] in (1, 3)


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [([3], {0}), ([500], {0}), ([100, 100, 50], {0, 2}), ([500, 300], {1}), ([48] * 24, set(range(7)))],
)
def test_texts_are_detailed_in_order_within_limit(lengths: list[int], chosen: set[int]) -> None:
    assert text_results.choose_detailed_texts(lengths) == chosen


KEYS = [str(key) for key in pd.json_normalize(Parameters().model_dump()) if "." in str(key)]
PIPELINE_NAMES = re.compile("|".join(map(re.escape, ["features/", "reports/", "params.yaml", "dvc ", *KEYS])))


@pytest.mark.parametrize("texts", TEXTS.values(), ids=TEXTS)
def test_text_page_has_no_pipeline_terms(
    texts: list[Any], tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "MAX_TOKENS", 1)  # forces the page to omit texts
    monkeypatch.setattr(arrays, "HEAD_BYTES", 0)
    monkeypatch.setattr(arrays, "VECTOR_BYTES", 0)
    page = attnmix.measure(attnmix.load(str(tiny_bert)), texts).to_html(tmp_path / "page.html")
    words, data = words_and_data(page)
    assert PIPELINE_NAMES.search("measure.matrices")
    assert [match[0] for text in (words, data) for match in PIPELINE_NAMES.finditer(text)] == []
    assert ("not on this page, to limit its size" in words) == (len(texts) > 1)
    assert "Parameters" not in words


def test_script_has_no_pipeline_terms() -> None:
    sources = Path(payload.__file__).with_name("src").glob("*.ts*")
    code = "".join(re.sub(r"/\*[^/]*\*/|//[^\n]*", "", path.read_text("utf-8")) for path in sources)
    assert "data.wording" in code
    assert PIPELINE_NAMES.findall(code) == []


def curve_of_rows(rows: list[dict[str, Any]], layers: range) -> dict[str, list[Any]]:
    """Return the values and intervals of a curve, computed row by row."""
    values: dict[str, list[Any]] = {name: [None] * len(layers) for name in ("values", "low", "high")}
    for row in rows:
        if row["layer"] not in layers:
            continue
        for name, column in zip(values, ("mean", "ci_low", "ci_high"), strict=True):
            is_few = row["documents"] is not pd.NA and row["documents"] < MIN_INTERVAL_DOCUMENTS
            is_left_out = np.isnan(row[column]) or (name != "values" and is_few)
            values[name][layers.index(row["layer"])] = None if is_left_out else row[column]
    return values


def test_curves_match_loop_over_rows() -> None:
    generator = np.random.default_rng(0)
    rows = []
    for method in ("b", "a", None):
        for checkpoint in ("pretrained", "finetuned"):
            for layer in generator.permutation(6)[:4]:  # some layers are missing; 0 and 5 are not in `layers`
                mean = np.nan if layer == 2 else generator.random()
                documents = generator.choice([3, MIN_INTERVAL_DOCUMENTS, pd.NA])
                ends = {"ci_low": mean - 1, "ci_high": np.nan if layer == 3 else mean + 1, "documents": documents}
                rows.append({"method": method, "checkpoint": checkpoint, "layer": int(layer), "mean": mean, **ends})
    table, layers = pd.DataFrame(rows).astype({"documents": "Int64"}), range(1, 5)
    expected: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["method"] is not None:
            expected.setdefault((row["method"], row["checkpoint"]), []).append(row)
    curves = curves_by(table, ["method", "checkpoint"], layers)
    assert list(curves) == list(expected)
    assert curves == {key: curve_of_rows(group, layers) for key, group in expected.items()}
    assert curve(table[:4], layers) == curve_of_rows(rows[:4], layers)
    assert curve(table[:0], layers) == curve_of_rows([], layers)
    assert curves_by(table[:0], ["method"], layers) == {}


def test_identities_are_checked_in_first_text(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurer = text_results.load_measurer({"pretrained": tiny_bert})
    texts = tokenized(["time flies"], measurer)
    right = identities._check_sources

    def wrong(layer_pass: LayerPass, mask_BT: Tensor) -> dict[str, Tensor]:
        return right(layer_pass, mask_BT) | {"attention_output": mask_BT.new_ones(len(mask_BT), dtype=torch.float32)}

    monkeypatch.setattr(identities, "_check_sources", wrong)
    for _ in range(2):  # a failed check must be repeated
        with pytest.raises(InputError, match="the identity attention_output fails in layer 1 of"):
            measurer.results(texts)
    monkeypatch.undo()
    first = page_text(measurer.results(texts), Subject("a model"))
    monkeypatch.setattr(identities, "_check_sources", wrong)
    assert page_text(measurer.results(texts), Subject("a model")) == first


def test_notebook_shows_own_shares_of_first_text(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attnmix.load(str(tiny_bert))
    assert repr(model).count("\n") == 0
    result = attnmix.measure(model, ["the film <b> was good .", "time flies"])
    shown = result._repr_html_()
    assert len(shown) < 20_000
    assert html.escape(repr(result)) in shown
    assert shown.count("<svg") == 1
    assert "<b>" not in shown
    known = np.isfinite(result.measurements.token_shares[0]).sum()
    assert len(re.findall(r"M[\d.]+,[\d.]+h", shown)) == known > 0
    monkeypatch.setattr("attnmix.results.result.MAX_TOKENS", 3)
    long = attnmix.measure(model, "time flies like an arrow")
    assert "<svg" not in long._repr_html_()  # computing its own shares would be slow
    assert long.measurements.token_shares == {}


def test_unequal_numbers_of_heads_are_omitted(tmp_path: Path) -> None:
    config = BartConfig.from_pretrained(write_family("bart", tmp_path / "bart"))
    tokenizer = load_tokenizer(tmp_path / "bart")
    config.decoder_attention_heads = 2 * config.encoder_attention_heads
    model = attnmix.load(BartModel(config).eval(), tokenizer)
    _, data = read_page(attnmix.measure(model, "the film was good").to_html(tmp_path / "page.html"))
    assert "heads" not in data
