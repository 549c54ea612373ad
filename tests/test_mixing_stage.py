"""The stage `measure` writes reproducible tables that match independent computations, and resumes interrupted runs."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import chdir
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import run_tokenized, write_parameters, write_reviews, write_tiny_bert
from family_reference import parts_from_input, run_reference

import attnmix
from attnmix.core.errors import InputError
from attnmix.core.names import INPUT_PARTS, STEP_MEASURES
from attnmix.core.settings import MAX_PARTS_TOKENS
from attnmix.core.store.runs import Run, arrays_folder
from attnmix.measures.batches import LENGTHS, BatchMeasurer, length_class
from attnmix.measures.controls import CONTROLS, random_base, shuffled_words
from attnmix.measures.documents import CLASSES, Corpus, Document, read_documents
from attnmix.measures.exchange import choose_donors, exchange_words
from attnmix.measures.input_parts import RULES, PartsReader
from attnmix.measures.matrices import MATRICES
from attnmix.measures.mixing_tables import TABLE_COLUMNS
from attnmix.measures.ratios import RATIOS
from attnmix.measures.variance_shares import PARTS
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.encoding import padded
from attnmix.models.loading import load_base
from attnmix.results.measured_model import SavedModel
from stages import inspect, measure
from stages.common.parameters import read_parameters

OUTPUTS = ("features/measure", "reports")


def prepare(folder: Path, **changes: dict[str, Any]) -> Path:
    """Write parameters, reviews of different lengths and two models into `folder`, and return it."""
    folder.mkdir(exist_ok=True)
    sections: dict[str, dict[str, Any]] = {
        "measure": {
            "documents": 6,
            "controls": list(CONTROLS),
            "gradient_documents": 2,
            "gradient_max_length": 9,
            "parts_rules": list(RULES),
        },
        "capture": {"documents": [3], "texts": ["time flies like an arrow ."], "max_length": 40, "batch_tokens": 80},
        "finetune": {},
    }
    write_parameters(folder, **{section: keys | changes.get(section, {}) for section, keys in sections.items()})
    write_reviews(folder / "data/reviews")
    reviews = pd.read_parquet(folder / "data/reviews/test.parquet")
    reviews["text"] = reviews["text"].mask(reviews.index > 6, reviews["text"] + " it was not so dull ." * 5)
    reviews.to_parquet(folder / "data/reviews/test.parquet", index=False)
    for seed, checkpoint in enumerate(("pretrained", "finetuned")):
        write_tiny_bert(folder / "models" / checkpoint, seed=seed)
    return folder


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return the content of all output files by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for output in OUTPUTS
        for path in sorted((folder / output).rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder of a finished run as the current folder; tests must not change its files."""
    folder = prepare(tmp_path_factory.mktemp("finished"))
    with chdir(folder):
        run_tokenized(inspect, measure)
        yield folder


def test_tokens_table_is_complete(finished: Path) -> None:
    reviews = Run(Path()).ratios()
    table = Run(Path()).captured_ratios(["test/3", "text/0"])
    keys = ["checkpoint", "document", "position", "layer"]
    for each, own_share in ((reviews, []), (table, ["own_share"])):
        assert list(each) == [*keys, *RATIOS, *own_share, "token", "word", "token_class"]
        assert not each.duplicated(keys).any()
        assert (each[list(RATIOS)].dtypes == np.float32).all()
        assert set(each["layer"]) == {1, 2, 3}
        assert set(each["token_class"]) <= set(CLASSES)
        assert not (each["token"] == "[PAD]").any()
    assert set(reviews["document"]) == set(Run(Path()).drawn_reviews.documents.query("measured")["document"])
    text = table[(table["document"] == "text/0") & (table["layer"] == 1) & (table["checkpoint"] == "pretrained")]
    assert text["token"].tolist() == ["[CLS]", "time", "flies", "like", "an", "arrow", ".", "[SEP]"]
    assert text["word"].dtype == "Int32"
    assert text["word"].fillna(-1).tolist() == [-1, 0, 1, 2, 3, 4, 5, -1]


@pytest.mark.parametrize("checkpoint", ["pretrained", "finetuned"])
def test_run_loads_as_result_and_computes_missing_values(finished: Path, checkpoint: str, tmp_path: Path) -> None:
    loaded = attnmix.load_result(finished, checkpoint=checkpoint)
    number = loaded.tokenized.texts["document"].tolist().index("text/0")
    model = attnmix.load(finished / "models" / checkpoint)
    expected = attnmix.measure(model, loaded.texts[number], methods=loaded.methods)
    pd.testing.assert_frame_equal(
        loaded.ratios.query(f"text == {number}").drop(columns="text").reset_index(drop=True),
        expected.ratios.drop(columns="text"),
        atol=1e-4,
    )
    assert isinstance(loaded.model, SavedModel)  # the matrix is stored in the run
    matrix = loaded.matrix("alti", text=number)
    assert isinstance(loaded.model, SavedModel)
    np.testing.assert_allclose(matrix, expected.matrix("alti"), atol=1e-5)
    parts = loaded.parts(text=number)
    assert isinstance(loaded.model, attnmix.Model)
    np.testing.assert_allclose(parts["own_share"], expected.parts()["own_share"], atol=1e-5)
    assert loaded.own_share()["layer"].tolist() == [1, 2, 3]
    saved = attnmix.load_result(loaded.save(tmp_path / "result.zip"))
    for name in ("label", "predicted"):
        expected_values = [getattr(document, name) for document in loaded.documents]
        assert [getattr(document, name) for document in saved.documents] == expected_values


def test_run_has_two_checkpoints_only(finished: Path) -> None:
    with pytest.raises(InputError, match=r"^checkpoint: 'trained'; allowed: pretrained, finetuned"):
        attnmix.load_result(finished, checkpoint="trained")
    with pytest.raises(InputError, match=r"^model: a run contains its models"):
        attnmix.load_result(finished, model=attnmix.load(finished / "models/pretrained"))


def check_means(table: pd.DataFrame, means: pd.DataFrame, keys: list[str]) -> None:
    """Assert that the column `mean` of a table equals `means`, which has one column per ratio."""
    expected = means[list(RATIOS)].rename_axis(columns="method").stack().rename("expected")
    merged = table.merge(expected.reset_index(), on=[*keys, "method"], validate="1:1")
    assert len(merged) == len(table)
    np.testing.assert_allclose(merged["mean"], merged["expected"], atol=2e-6)
    single = merged["documents"] < 2 if "documents" in merged else np.zeros(len(merged), bool)
    if "ci_low" in merged:
        assert (merged["ci_low"] <= merged["mean"])[~single].all()
        assert (merged["mean"] <= merged["ci_high"])[~single].all()
        assert merged.loc[single, ["ci_low", "ci_high"]].isna().all(axis=None)


def with_difference(means: pd.DataFrame) -> pd.DataFrame:
    """Return the means by checkpoint, and append their difference (fine-tuned minus pretrained)."""
    difference = pd.concat({"difference": means.loc["finetuned"] - means.loc["pretrained"]})
    return pd.concat([means, difference]).rename_axis(means.index.names)


def test_tables_are_means_of_token_rows(finished: Path) -> None:
    run, table = Run(Path()), Run(Path()).ratios()
    assert {name: tuple(run.table(f"measure/{name}")) for name in TABLE_COLUMNS} == TABLE_COLUMNS
    mixing, groups = run.table("measure/mixing"), run.table("measure/mixing_by_group")
    by_layer = ["checkpoint", "layer"]
    assert len(mixing) == 3 * 3 * len(RATIOS)
    check_means(mixing, with_difference(table.groupby(by_layer)[list(RATIOS)].mean()), by_layer)
    assert mixing[["simultaneous_low", "simultaneous_high"]].isna().all(axis=None)  # six texts are too few
    assert set(mixing["documents"]) == {6}
    assert set(mixing["tokens"]) == {len(table) / 6}
    by_class = table.rename(columns={"token_class": "group"}).groupby([*by_layer, "group"])[list(RATIOS)].mean()
    check_means(groups.query("grouping == 'token_class'"), by_class, [*by_layer, "group"])
    early = table[table["position"].between(4, 7)].groupby(by_layer)[list(RATIOS)].mean()
    check_means(groups.query("grouping == 'position' and group == '4-7'"), early, by_layer)
    by_review = run.table("measure/mixing_by_review")
    keys = ["checkpoint", "document", "layer"]
    check_means(by_review, table.groupby(keys)[list(RATIOS)].mean(), keys)
    labels = pd.read_parquet("data/reviews/test.parquet")["label"]
    lengths = table.query("layer == 1 and checkpoint == 'finetuned'").groupby("document").size()
    assert (by_review["tokens"] == by_review["document"].map(lengths)).all()
    numbers = by_review["document"].str.removeprefix("test/").astype(int)
    assert (by_review["label"] == numbers.map(labels)).all()


def test_weighted_means_cover_tokens_reviews_and_layers(finished: Path) -> None:
    table = Run(Path()).ratios()
    weighted = Run(Path()).table("measure/mixing_weighted", dtype={"layer": str})
    assert len(weighted) == 3 * 2 * 3 * 4 * len(RATIOS)
    words = table[table["token_class"].isin(["word", "subword"])]
    kinds = {"words": words, "all": table, "without_first": table[table["position"] > 0]}
    for tokens_of, rows in kinds.items():
        by_token = rows.groupby(["checkpoint", "layer"])[list(RATIOS)].mean()
        each = rows.groupby(["checkpoint", "document", "layer"])[list(RATIOS)].mean()
        for weight, means in (("token", by_token), ("review", each.groupby(["checkpoint", "layer"]).mean())):
            overall = pd.concat({"all": means.groupby("checkpoint").mean()}, names=["layer"]).swaplevel()
            means = with_difference(pd.concat([means.rename(index=str, level="layer"), overall]))
            rows_of_kind = weighted.query(f"tokens_of == '{tokens_of}' and weight == '{weight}'")
            check_means(rows_of_kind, means, ["checkpoint", "layer"])


def test_controls_use_the_same_documents(finished: Path) -> None:
    table = Run(Path()).table("measure/mixing_controls")
    controls = ["shuffled_words", "text_mean_value", "corpus_value", "without_value_bias", "without_special_sources"]
    pairs = {("random", "random_weights"), *product(("pretrained", "finetuned", "difference"), controls)}
    assert set(zip(table["checkpoint"], table["control"], strict=True)) == pairs
    assert len(table) == len(pairs) * 3 * len(RATIOS)
    mixing = Run(Path()).table("measure/mixing")
    assert set(table["tokens"]) == set(mixing["tokens"])
    assert set(table["documents"]) == {6}
    both = table.merge(mixing, on=["checkpoint", "layer", "method"], suffixes=("_control", ""))
    assert len(both) == 3 * 5 * 3 * len(RATIOS)
    np.testing.assert_allclose(both["ratio_minus_control"], both["mean"] - both["mean_control"], atol=3e-6)
    # Attention weights do not depend on values, but on the order of words.
    weights = both[both["method"] == "attn_w"].set_index("control")["ratio_minus_control"]
    assert (weights.drop(["shuffled_words", "without_special_sources"]) == 0).all()
    assert (weights["shuffled_words"] != 0).all()
    assert both.query("method == 'attn_n' and checkpoint != 'difference'")["ratio_minus_control"].abs().min() > 1e-5


def test_review_without_corpus_value_is_excluded_from_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    few = {"documents": 12, "methods": ["attn_w", "attn_n"], "matrices": ["alti"], "gradient_documents": 1}
    few["controls"] = ["text_mean_value", "corpus_value"]
    monkeypatch.chdir(prepare(tmp_path, measure=few, finetune={"epochs": 0}))
    shutil.rmtree("models/pretrained")
    reviews = pd.read_parquet("data/reviews/test.parquet")
    reviews["text"] = reviews["text"].str.replace(" .", "", regex=False)
    reviews.loc[4, "text"] += " ."
    reviews.to_parquet("data/reviews/test.parquet", index=False)
    with caplog.at_level("INFO"):
        run_tokenized(inspect, measure)
    reason = "no other text has a token of the class punctuation, which occurs in test/4."
    assert f"corpus_value excludes 1 of 12 texts; for example, {reason}" in caplog.text
    run = Run(Path())
    controls = run.table("measure/mixing_controls").query("checkpoint == 'finetuned'").set_index(["layer", "method"])
    table = run.ratios()
    for control, documents in (("corpus_value", 11), ("text_mean_value", 12)):
        rows = controls[controls["control"] == control]
        kept = table if documents == 12 else table[table["document"] != "test/4"]
        assert kept["document"].nunique() == documents
        assert set(rows["documents"]) == {documents}
        assert rows["mean"].notna().all()
        true_means = kept.groupby("layer")[["attn_w", "attn_n"]].mean().stack()
        np.testing.assert_allclose(rows["ratio_minus_control"], (true_means - rows["mean"]).loc[rows.index], atol=3e-6)


def test_separate_pass_controls_match_their_pass(finished: Path) -> None:
    tokens = Run(Path()).ratios().query("checkpoint == 'pretrained' and layer == 1")
    tokenizer = load_tokenizer(Path("models/pretrained"))
    table = Run(Path()).table("measure/mixing_controls").set_index(["checkpoint", "control", "method", "layer"])["mean"]
    seed = read_parameters().seed
    random = random_base(Path("models/pretrained"), seed)
    models = {"pretrained": load_base(Path("models/pretrained")), "random": random}
    for checkpoint, control in (("pretrained", "shuffled_words"), ("random", "random_weights")):
        measurer = BatchMeasurer(models[checkpoint], list(RATIOS), 0)
        actual = []
        for name, rows in tokens.groupby("document", sort=False):
            ids = np.array(tokenizer.convert_tokens_to_ids(rows["token"].tolist()), np.int32)
            words = rows["word"].fillna(-1).to_numpy(np.int32)
            document = Document(str(name), ids, np.zeros(len(ids), np.int8), words)
            if control == "shuffled_words":
                document = shuffled_words(document, seed)
            actual.append(measurer.ratios([document])[:, :, 0])  # [layers, methods, tokens]
        means = torch.cat(actual, dim=-1).mean(-1)
        for layer, of_methods in enumerate(means.tolist(), start=1):
            for method, mean in zip(RATIOS, of_methods, strict=True):
                assert table[checkpoint, control, method, layer] == pytest.approx(mean, abs=3e-6)


def test_damaged_matrix_is_one_error_that_names_it(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(Run(finished).inspected, Run(tmp_path).inspected)
    shard = arrays_folder("contributions", "pretrained", "test/3", Run(tmp_path).inspected) / "alti.zarr" / "c/0/0/0"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match=r"test_3/alti\.zarr is damaged .*rerun the stage inspect"):
        Run(tmp_path).matrix("pretrained", "test/3", "alti")


def test_metrics_summarise_tables(finished: Path) -> None:
    metrics, curves = Run(Path()).metrics("measure"), Run(Path()).table("measure/mixing")
    exchange = Run(Path()).table("measure/exchange").query("quantity == 'own_share' and layer == 3")
    own_shares = exchange.set_index(["checkpoint", "donor"])["mean"]
    for checkpoint in ("pretrained", "finetuned"):
        assert set(metrics[checkpoint]) == {"attn_w", "attnresln_n", "own_share", "identity_error"}
        assert 0 < metrics[checkpoint]["identity_error"] < 1e-5
        by_layer = curves.query(f"checkpoint == '{checkpoint}' and method == 'attn_w'")["mean"]
        assert metrics[checkpoint]["attn_w"] == pytest.approx(by_layer.mean(), abs=2e-6)
        expected = own_shares[checkpoint].drop("same_minus_other").to_dict()
        assert metrics[checkpoint]["own_share"] == pytest.approx(expected, abs=2e-6)
    where = "weight == 'token' and tokens_of == 'all' and layer == 'all'"
    overall = Run(Path()).table("measure/mixing_weighted").query(where).set_index(["checkpoint", "method"])
    assert set(overall.index) == set(product(("pretrained", "finetuned", "difference"), RATIOS))
    assert overall["depth_spearman"].between(-1, 1).all()
    difference = metrics["difference"]["attnresln_n"]
    assert difference["mean"] == pytest.approx(overall.loc[("difference", "attnresln_n"), "mean"], abs=2e-6)
    assert difference["ci_low"] < difference["mean"] < difference["ci_high"]
    assert metrics["documents"] == 6


def test_geometry_table_has_all_points_steps_and_layers(finished: Path) -> None:
    table = Run(Path()).table("measure/geometry")
    for name in ("attention_gain", "attention_to_first"):
        layers = table[table["measure"] == name].groupby("checkpoint")["layer"].apply(list)
        assert layers.tolist() == [[1, 2, 3], [1, 2, 3]]
    assert len(Run(Path()).steps) == 2 * 3 * 7 * 4
    clouds = table[~table["measure"].isin(STEP_MEASURES) & (table["point"] != "attention")]
    assert len(clouds) == 2 * (3 + 6 * 3) * 9
    identity = clouds.query("point == 'word_embedding' and measure in ['own_nearest', 'cka_input']")
    np.testing.assert_allclose(identity["mean"], 1)
    assert (clouds.query("measure != 'own_nearest'")["documents"] == 6).all()
    ranks = clouds.pivot(index=["checkpoint", "layer", "point"], columns="measure", values="mean")
    assert (ranks["effective_rank"] <= ranks["effective_rank_bound"]).all()


def test_interrupted_run_resumes_without_repeated_measures(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = BatchMeasurer.start
    batches: list[tuple[Any, ...]] = []
    resumed = False

    def start(self: Any, documents: Any, *options: Any) -> Any:
        if len(batches) == 2 and not resumed:
            raise KeyboardInterrupt
        batches.append((self.base.name_or_path, *(document.name for document in documents)))
        return original(self, documents, *options)

    monkeypatch.setattr(BatchMeasurer, "start", start)
    folder = prepare(tmp_path)
    monkeypatch.chdir(folder)
    with pytest.raises(KeyboardInterrupt):
        run_tokenized(measure)
    assert not (folder / "features/measure").exists()
    resumed = True
    run_tokenized(measure)
    assert len(batches) == len(set(batches)) > 2  # no batch was measured twice
    assert bytes_of(folder) == bytes_of(finished)


def test_length_groups_double(finished: Path) -> None:
    names = {1: "1-32", 32: "1-32", 33: "33-64", 64: "33-64", 65: "65-128", 512: "257-512", 513: "513-1024"}
    assert [LENGTHS[number] for number in length_class(list(names))] == list(names.values())
    table = Run(finished).ratios()
    sizes = table.query("layer == 1 and checkpoint == 'finetuned'").groupby("document").size()
    by_length = Run(finished).table("measure/mixing_by_group").query("grouping == 'length'")
    assert 0 < (sizes > 32).sum() < 6
    assert len(by_length) == 2 * 3 * 2 * len(RATIOS)
    groups = table.assign(group=np.where(table["document"].map(sizes) > 32, "33-64", "1-32"))
    keys = ["group", "checkpoint", "layer"]
    check_means(by_length, groups.groupby(keys)[list(RATIOS)].mean(), keys)
    for name, lengths in (("1-32", sizes[sizes <= 32]), ("33-64", sizes[sizes > 32])):
        rows = by_length[by_length["group"] == name]
        assert (set(rows["tokens"]), set(rows["documents"])) == ({lengths.sum()}, {len(lengths)})


def test_mean_cosine_across_compares_different_reviews(finished: Path) -> None:
    base, tokenizer = load_base(finished / "models/finetuned"), load_tokenizer(finished / "models/finetuned")
    texts = pd.read_parquet(finished / "data/reviews/test.parquet")["text"]
    names = Run(Path()).table("measure/mixing_by_review")["document"].unique()
    clouds = []
    for name in names:
        batch = tokenizer(texts[int(name.removeprefix("test/"))], truncation=True, max_length=40, return_tensors="pt")
        with torch.no_grad():
            states = base(**batch, output_hidden_states=True).hidden_states
        clouds.append([torch.nn.functional.normalize(state[0].double(), dim=-1).numpy() for state in states])
    table = Run(Path()).table("measure/geometry").query("measure == 'mean_cosine_across' and checkpoint == 'finetuned'")
    for layer, point in enumerate(["embedding_output", *["layer_output"] * 3]):
        pairs = [(a[layer] @ b[layer].T).mean() for a in clouds for b in clouds if a is not b]
        (row,) = table.query(f"layer == {layer} and point == '{point}'").itertuples()
        assert row.mean == pytest.approx(np.mean(pairs), abs=3e-6)
        assert row.ci_low < row.mean < row.ci_high
        assert row.documents == 6


def test_shares_of_other_tokens_sum_to_one_and_match_reference(finished: Path) -> None:
    rows = Run(finished).table("measure/geometry").query("point == 'attention'")
    rows = rows.pivot(index=["checkpoint", "layer"], columns="measure", values="mean")
    shares = rows[[f"share_{part}" for part in PARTS]]
    np.testing.assert_allclose(shares.loc[["pretrained", "finetuned"]].sum(axis=1), 1, atol=4e-6)
    np.testing.assert_allclose(shares.loc["difference"].sum(axis=1), 0, atol=4e-6)
    base, tokenizer = load_base(finished / "models/finetuned"), load_tokenizer(finished / "models/finetuned")
    reviews = pd.read_parquet(finished / "data/reviews/test.parquet")
    names = Run(Path()).table("measure/mixing_by_review")["document"].unique()
    numbers = [int(name.removeprefix("test/")) for name in names]
    means = []  # `means`, `squares` and `within` are moments of the contributions of other tokens in each text
    squares = []
    within = []
    for number in numbers:
        ids = tokenizer(reviews["text"][number], truncation=True, max_length=40)["input_ids"]
        F_ijD = run_reference("bert", base, ids).layers[1].F
        others = F_ijD.sum(1) - F_ijD[np.arange(len(ids)), np.arange(len(ids))]
        means.append(others.mean(0))
        squares.append((others**2).sum(-1).mean())
        products = others @ others.T
        within.append((products.sum() - np.trace(products)) / (len(ids) * (len(ids) - 1)))
    labels = reviews["label"].to_numpy()[numbers]
    same_class = []  # for each text, the mean product with the means of other texts of its class
    for number, mean in enumerate(means):
        others_of_class = [other for other in range(len(means)) if labels[other] == labels[number] and other != number]
        same_class.append(np.mean([mean @ means[other] for other in others_of_class]))
    share_token = 1 - np.mean(within) / np.mean(squares)
    share_text = (np.mean(within) - np.mean(same_class)) / np.mean(squares)
    expected = [share_token, share_text]
    assert shares.loc[("finetuned", 2), ["share_token", "share_text"]].tolist() == pytest.approx(expected, abs=1e-5)


def test_disabled_outputs_are_not_written(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = read_parameters().measure.matrices
    run = Run(finished)
    made = set(run.matrices("finetuned", "test/3")) - {INPUT_PARTS}  # stored for every short text
    assert made == set(chosen) < set(MATRICES)
    for checkpoint, document in product(("pretrained", "finetuned"), ("test/3", "text/0")):
        tokens = len(run.captured_ratios([document]).query(f"checkpoint == '{checkpoint}'")) // 3
        for method in ("attention", "alti", "globenc", "attention_rollout", "alti_rollout"):
            matrix = run.matrix(checkpoint, document, method)
            assert (matrix.shape, matrix.dtype) == ((3, tokens, tokens), np.float32)
            np.testing.assert_allclose(matrix.sum(-1), 1, atol=1e-5)
    few = {"methods": ["attn_w", "attn_n"], "matrices": ["norm", "alti_rollout"], "gradient_documents": 1}
    few["controls"] = ["without_value_bias"]
    few["parts_rules"] = ["chord"]
    monkeypatch.chdir(prepare(tmp_path, measure=few, finetune={"epochs": 0}))
    shutil.rmtree("models/pretrained")
    run_tokenized(inspect, measure)
    other = Run(tmp_path)
    assert set(other.metrics("measure")) == {"finetuned", "documents", "computed_on"}
    assert set(other.metrics("measure")["finetuned"]) == {"attn_w", "own_share", "identity_error"}
    assert set(other.table("measure/mixing")["method"]) == {"attn_w", "attn_n"}
    assert set(other.table("measure/mixing")["checkpoint"]) == {"finetuned"}
    assert set(other.matrices("finetuned", "test/3")) == {INPUT_PARTS, "norm", "alti_rollout"}
    assert set(other.table("measure/mixing_controls")["control"]) == {"without_value_bias"}
    by_chord = run.table("measure/parts").query("rule == 'chord' and checkpoint == 'finetuned'").reset_index(drop=True)
    pd.testing.assert_frame_equal(other.table("measure/parts"), by_chord, check_exact=True)
    alti = run.matrix("finetuned", "test/3", "alti_rollout")
    np.testing.assert_array_equal(other.matrix("finetuned", "test/3", "alti_rollout"), alti)
    agreement = other.table("measure/derivatives").query("quantity == 'agreement'")
    assert set(agreement["method"]) == {"attn_w", "attn_n", "norm", "alti_rollout"}


@pytest.mark.parametrize("rule", RULES)
def test_parts_match_reference(finished: Path, rule: str) -> None:
    run = Run(Path())
    table = (
        run.table("measure/parts").query("rule == @rule").set_index(["quantity", "checkpoint", "layer"]).sort_index()
    )
    corpus = Corpus(run.drawn_reviews)
    texts = [corpus.document(number).ids.tolist() for number in range(len(corpus))]
    assert len(texts) == 6  # fewer than measure.parts_documents, so all are used
    for checkpoint in ("pretrained", "finetuned"):
        base = load_base(run.checkpoints[checkpoint])
        by_text: dict[str, list[Any]] = defaultdict(list)
        for ids in texts:
            layers = run_reference("bert", base, ids).layers
            levels = np.array(parts_from_input(layers, rule))
            tokens = range(len(ids))
            own = levels[:, tokens, tokens]
            others = levels[:, :-1].sum(1) - own
            biases = levels[:, -1]
            vectors = levels.sum(1)
            own_length, others_length, bias_length, length = (
                np.linalg.norm(part, axis=-1) for part in (own, others, biases, vectors)
            )
            by_text["own_share"].append(own_length / (own_length + others_length))
            for name, part in (("own", own), ("others", others), ("bias", biases)):
                by_text[f"{name}_projection"].append((part * vectors).sum(-1) / length**2)
            by_text["bias_length"].append(bias_length / length)
            products = (others * biases).sum(-1)
            parts = PartsReader(base, rule).read(padded([ids], 0))
            cosines = products[1:] / (others_length * bias_length)[1:]  # the input has no parts of other tokens
            np.testing.assert_allclose(parts["bias_cosine"][1:], cosines, atol=1e-3)
            by_text["ill_conditioned"].append(products < -0.9 * others_length * bias_length)
        for quantity, expected in by_text.items():
            means = np.concatenate(expected, axis=1).mean(1)
            np.testing.assert_allclose(table["mean"][quantity, checkpoint], means, atol=1e-5)
    assert table["documents"].eq(6).all()
    change = table["mean"]["own_share", "finetuned"] - table["mean"]["own_share", "pretrained"]
    np.testing.assert_allclose(table["mean"]["own_share", "difference"], change, atol=2e-6)
    assert ("coherence", "pretrained", 0) not in table.index  # no parts of other tokens before the first layer


def test_captured_texts_have_own_share_by_exchange(finished: Path) -> None:
    run = Run(Path())
    table = run.captured_ratios(list(run.documents["document"]))
    drawn = list(read_documents(run.drawn_reviews))
    document = next(text for text in read_documents(run.captured) if text.name == "test/3")
    texts = [document, *(text for text in drawn if text.name != document.name)]
    seed = read_parameters().seed
    donors = choose_donors(texts, 0, np.array([text.predicted for text in texts]), seed)
    exchanged = [exchange_words(document, [texts[number] for number in numbers]) for numbers in donors.values()]
    for checkpoint in ("pretrained", "finetuned"):
        base = load_base(run.checkpoints[checkpoint])
        shares = table[(table["checkpoint"] == checkpoint) & (table["document"] == document.name)]
        found = shares.pivot(index="layer", columns="position", values="own_share").to_numpy()
        assert np.isnan(found[:, document.words < 0]).all()
        for position in np.flatnonzero(document.words >= 0):
            moves = []
            for donor in exchanged:
                if donor[position] != document.ids[position]:
                    moves.append(squared_moves(base, document.ids, donor, position))
            if not moves:
                assert np.isnan(found[:, position]).all()
                continue
            shares = [own / (own + others) for own, others in np.sqrt(moves)]
            np.testing.assert_allclose(found[:, position], np.mean(shares, axis=0), atol=1e-4)


def squared_moves(base: Any, ids: Any, donor: Any, position: int) -> tuple[Any, Any]:
    """Return squared relative displacements `[layers]` of a vector if its own token or all others are exchanged."""

    def compute_vectors(text: Any) -> Any:
        with torch.no_grad():
            output = base(input_ids=torch.as_tensor(text, dtype=torch.long)[None], output_hidden_states=True)
        return torch.stack(output.hidden_states[1:])[:, 0, position].double().numpy()

    own = ids.copy()
    others = donor.copy()
    own[position] = donor[position]
    others[position] = ids[position]
    y = compute_vectors(ids)
    by_own = np.square(compute_vectors(own) - y).sum(-1) / np.square(y).sum(-1)
    by_others = np.square(compute_vectors(others) - y).sum(-1) / np.square(y).sum(-1)
    return by_own, by_others


def test_captured_texts_have_source_shares_of_vectors(finished: Path) -> None:
    run = Run(Path())
    for checkpoint, document in product(("pretrained", "finetuned"), list(read_documents(run.captured))):
        layers = run_reference("bert", load_base(run.checkpoints[checkpoint]), document.ids.tolist()).layers
        levels = np.array(parts_from_input(layers, "chord"))[1:, :-1]  # [layers, sources, tokens, width]
        stored = run.matrix(checkpoint, document.name, INPUT_PARTS)
        assert stored.shape == (3, len(document), len(document))
        for layer, token in product(range(3), range(len(document))):
            parts = levels[layer, :, token]
            own = np.linalg.norm(parts[token])
            others = np.linalg.norm(parts.sum(0) - parts[token])
            lengths = np.linalg.norm(parts, axis=-1)
            expected = others / (own + others) * lengths / (lengths.sum() - own)
            expected[token] = own / (own + others)
            np.testing.assert_allclose(stored[layer, token], expected, atol=1e-5)


def test_longer_texts_have_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmix.measures.input_parts.MAX_PARTS_TOKENS", 8)
    monkeypatch.chdir(prepare(tmp_path, measure={"gradient_documents": 0, "parts_documents": 0}))
    run_tokenized(inspect)
    run = Run(Path())
    lengths = run.tokens.groupby("document").size()
    assert lengths.min() <= 8 < lengths.max() <= MAX_PARTS_TOKENS
    for document, length in lengths.items():
        assert (INPUT_PARTS in run.matrices("pretrained", document)) == (length <= 8), document


def test_derivative_tables_use_same_reviews_for_both_checkpoints(finished: Path) -> None:
    table, by_review = (Run(Path()).table(f"measure/{name}") for name in ("derivatives", "derivatives_by_review"))
    reviews = by_review.groupby("checkpoint")["document"].agg(set)
    assert reviews["pretrained"] == reviews["finetuned"]
    labels = pd.read_parquet("data/reviews/test.parquet")["label"]
    assert sorted(labels[[int(name.removeprefix("test/")) for name in reviews["finetuned"]]]) == [0, 1]
    sizes = {"level": 3 * 2 * 3 * 3, "ratio": 3 * 3 * len(RATIOS), "from_input": 3 * 3 * 5, "agreement": 2 * 2 * 3 * 14}
    sizes |= {"swap": 3 * 3 * 4, "coherence": 3 * 3}
    assert table["quantity"].value_counts().to_dict() == sizes
    assert table["mean"].between(-1, 1).all()
    keys = ["checkpoint", "reference", "layer", "method"]
    means = by_review.query("quantity == 'agreement'").groupby(keys)["mean"].mean()
    agreement = table.query("quantity == 'agreement'").set_index(keys)["mean"]
    np.testing.assert_allclose(agreement, means.loc[agreement.index], atol=2e-6)
    by_head = Run(Path()).table("measure/mixing_by_group").query("grouping == 'head'")
    assert len(by_head) == 2 * 3 * 4
    assert set(by_head["group"].astype(int)) == set(range(4))  # as numbered by `without_heads`
    assert (by_head["documents"] == 6).all()
