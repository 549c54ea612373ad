"""The stage `measure`: what it writes, that it is the same every time, and what it refuses."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import zarr
from conftest import Workspace, run_tokenized, tokenized_documents, write_parameters, write_reviews, write_tiny_bert
from transformers import AutoTokenizer

from attnmix.core.errors import InputError
from attnmix.core.points import STEP_MEASURES
from attnmix.measures.batches import LENGTHS, BatchMeasurer, length_class
from attnmix.measures.controls import random_base, shuffled_words
from attnmix.measures.documents import CLASSES, Document
from attnmix.measures.matrices import LAYER_MATRICES, with_rollouts
from attnmix.measures.ratios import RATIOS
from attnmix.measures.tables import COLUMNS
from attnmix.models.loading import load_base, load_tokenizer
from attnmix.store.layout import contributions_folder
from attnmix.store.runs import Run
from stages import measure
from stages.common.parameters import read_parameters

OUTPUTS = ("features/measure", "reports")


def prepare(folder: Path) -> None:
    write_reviews(folder / "data/reviews")
    write_tiny_bert(folder / "models/pretrained", seed=0)
    write_tiny_bert(folder / "models/finetuned", seed=1)


def small(workspace: Workspace, name: str = "workspace", **changes: Any) -> Path:
    mixing = {"documents": 6, "gradient_documents": 2, "gradient_max_length": 9}
    capture = {"documents": [3], "texts": ["time flies like an arrow ."], "max_length": 20, "batch_tokens": 80}
    sections = {"measure": mixing, "capture": capture, "finetune": {}}
    folder = workspace(name, **{section: keys | changes.get(section, {}) for section, keys in sections.items()})
    prepare(folder)
    return folder


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for output in OUTPUTS
        for path in sorted((folder / output).rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to look at."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:

        def workspace(_name: str, **changes: dict[str, Any]) -> Path:
            write_parameters(folder, **changes)
            patch.chdir(folder)
            return folder

        small(workspace)
        run_tokenized(measure)
    return folder


@pytest.fixture
def finished(finished_once: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as the working folder."""
    monkeypatch.chdir(finished_once)
    return finished_once


def test_the_tokens_table_has_a_row_for_each_checkpoint_document_position_and_layer(finished: Path) -> None:
    table = Run(Path()).ratios()
    assert list(table) == [
        *("checkpoint", "document", "position", "layer"),
        *RATIOS,
        *("token", "word", "token_class", "in_statistics"),
    ]
    assert not table.duplicated(["checkpoint", "document", "position", "layer", "in_statistics"]).any()
    assert (table[list(RATIOS)].dtypes == np.float32).all()
    assert set(table["layer"]) == {1, 2, 3}
    assert {"test/3", "text/0"} <= set(table["document"])
    text = table[(table["document"] == "text/0") & (table["layer"] == 1) & (table["checkpoint"] == "pretrained")]
    assert text["token"].tolist() == ["[CLS]", "time", "flies", "like", "an", "arrow", ".", "[SEP]"]
    assert text["word"].dtype == "Int32"
    assert text["word"].fillna(-1).tolist() == [-1, 0, 1, 2, 3, 4, 5, -1]
    assert not text["in_statistics"].any()
    assert set(table["token_class"]) <= set(CLASSES)
    assert not (table["token"] == "[PAD]").any()


def test_tables_are_the_means_of_the_rows_in_the_statistics(finished: Path) -> None:
    table = Run(Path()).ratios().query("in_statistics")
    mixing, groups = Run(Path()).table("measure/mixing"), Run(Path()).table("measure/mixing_by_group")
    assert {name: tuple(Run(Path()).table(f"measure/{name}")) for name in COLUMNS} == COLUMNS
    assert len(mixing) == 3 * 3 * len(RATIOS)
    means = table.groupby(["checkpoint", "layer"])[list(RATIOS)].mean()
    by_class = table.groupby(["checkpoint", "layer", "token_class"])[list(RATIOS)].mean()
    early = table[table["position"].between(4, 7)].groupby(["checkpoint", "layer"])[list(RATIOS)].mean()
    for row in mixing.itertuples():
        if row.checkpoint == "difference":
            pair = [means.loc[(name, row.layer), row.method] for name in ("finetuned", "pretrained")]
            assert row.mean == pytest.approx(pair[0] - pair[1], abs=2e-6)
        else:
            assert row.mean == pytest.approx(means.loc[(row.checkpoint, row.layer), row.method], abs=2e-6)
        assert row.ci_low <= row.mean <= row.ci_high
        assert np.isnan([row.simultaneous_low, row.simultaneous_high]).all()  # six documents
        assert row.documents == 6
        assert row.tokens == len(table) / 6
    for row in groups.query("grouping == 'token_class'").itertuples():
        expected = by_class.loc[(row.checkpoint, row.layer, row.group), row.method]
        assert row.mean == pytest.approx(expected, abs=2e-6)
    for row in groups.query("grouping == 'position' and group == '4-7'").itertuples():
        assert row.mean == pytest.approx(early.loc[(row.checkpoint, row.layer), row.method], abs=2e-6)


def test_every_control_is_of_the_same_documents(finished: Path) -> None:
    table = Run(Path()).table("measure/mixing_controls")
    controls = ["shuffled_words", "text_mean_value", "without_value_bias"]
    pairs = {("random", "random_weights"), *product(("pretrained", "finetuned", "difference"), controls)}
    assert set(zip(table["checkpoint"], table["control"], strict=True)) == pairs
    assert len(table) == len(pairs) * 3 * len(RATIOS)
    mixing = Run(Path()).table("measure/mixing")
    assert set(table["tokens"]) == set(mixing["tokens"])
    assert set(table["documents"]) == {6}
    both = table.merge(mixing, on=["checkpoint", "layer", "method"], suffixes=("_control", ""))
    assert len(both) == 3 * 3 * 3 * len(RATIOS)
    np.testing.assert_allclose(both["below"], both["mean"] - both["mean_control"], atol=3e-6)
    # Weights do not depend on values; those of shuffled words do depend on their order.
    weights = both[both["method"] == "attn_w"].set_index("control")["below"]
    assert (weights.drop("shuffled_words") == 0).all()
    assert (weights["shuffled_words"] != 0).all()
    assert both.query("method == 'attn_n' and checkpoint != 'difference'")["below"].abs().min() > 1e-5


def test_controls_with_a_pass_of_their_own_are_the_ratios_of_that_pass(workspace: Workspace) -> None:
    small(workspace, measure={"matrices": [], "gradient_documents": 0}, capture={"documents": []})
    run_tokenized(measure)
    tokens = Run(Path()).ratios().query("in_statistics and checkpoint == 'pretrained' and layer == 1")
    tokenizer = load_tokenizer(Path("models/pretrained"))
    table = Run(Path()).table("measure/mixing_controls").set_index(["checkpoint", "control", "method", "layer"])["mean"]
    seed = read_parameters().seed
    random = random_base(Path("models/pretrained"), seed)
    models = {"pretrained": load_base(Path("models/pretrained")), "random": random}
    for checkpoint, control in (("pretrained", "shuffled_words"), ("random", "random_weights")):
        measurer = BatchMeasurer(models[checkpoint], Path("models/pretrained"), list(RATIOS), 0)
        found = []
        for name, rows in tokens.groupby("document", sort=False):
            ids = np.array(tokenizer.convert_tokens_to_ids(rows["token"].tolist()), np.int32)
            words = rows["word"].fillna(-1).to_numpy(np.int32)
            document = Document(str(name), ids, np.zeros(len(ids), np.int8), words)
            if control == "shuffled_words":
                document = shuffled_words(document, seed)
            found.append(measurer.ratios([document])[:, :, 0])  # [layers, methods, tokens]
        means = torch.cat(found, dim=-1).mean(-1)
        for layer, of_methods in enumerate(means.tolist(), start=1):
            for method, mean in zip(RATIOS, of_methods, strict=True):
                assert table[checkpoint, control, method, layer] == pytest.approx(mean, abs=3e-6)


def test_contributions_are_plain_zarr_for_every_captured_document(finished: Path) -> None:
    for checkpoint in ("pretrained", "finetuned"):
        for document in ("test/3", "text/0"):
            tokens = Run(Path()).matrix(checkpoint, document, "attention").shape[1]
            for path in contributions_folder(checkpoint, document, Run(Path()).measured).glob("*.zarr"):
                array = zarr.open_array(path, mode="r")
                assert array.metadata.zarr_format == 3
                assert [codec.to_dict() for codec in array.compressors] == [{"name": "crc32c"}]
            for method in ("attention", "alti", "globenc", "attention_rollout", "value_zeroing_rollout"):
                matrix = Run(Path()).matrix(checkpoint, document, method)
                assert matrix.shape == (3, tokens, tokens)
                assert matrix.dtype == np.float32
                np.testing.assert_allclose(matrix.sum(-1), 1, atol=1e-5)


def test_damaged_matrix_is_one_error_that_names_it(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(Run(finished).measured, Run(tmp_path).measured)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        shard = contributions_folder("pretrained", "test/3", Run(Path()).measured) / "alti.zarr" / "c/0/0/0"
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
        with pytest.raises(
            InputError, match=r"test_3/alti\.zarr is damaged .*; force the stage measure, which writes it, to run again"
        ):
            Run(Path()).matrix("pretrained", "test/3", "alti")


def test_metrics_and_plots_hold_what_the_design_names(finished: Path) -> None:
    metrics = Run(Path()).metrics("measure")
    curves = Run(Path()).table("measure/mixing")
    for checkpoint in ("pretrained", "finetuned"):
        assert set(metrics[checkpoint]) == {"attn_w", "attn_n", "attnresln_n", "identity_error"}
        assert 0 < metrics[checkpoint]["identity_error"] < 1e-5
        of_layers = curves[(curves["checkpoint"] == checkpoint) & (curves["method"] == "attn_n")]["mean"]
        assert metrics[checkpoint]["attn_n"] == pytest.approx(of_layers.mean(), abs=2e-6)
    where = "weight == 'token' and tokens_of == 'all' and layer == 'all'"
    overall = Run(Path()).table("measure/mixing_weighted").query(where).set_index(["checkpoint", "method"])
    assert set(overall.index) == set(product(("pretrained", "finetuned", "difference"), RATIOS))
    assert overall["depth_spearman"].between(-1, 1).all()
    difference = metrics["difference"]["attnresln_n"]
    assert difference["mean"] == pytest.approx(overall.loc[("difference", "attnresln_n"), "mean"], abs=2e-6)
    assert difference["ci_low"] < difference["mean"] < difference["ci_high"]
    assert metrics["documents"] == 6
    geometry = Run(Path()).table("measure/geometry")
    for measure_name in ("attention_gain", "attention_to_first"):
        layers = geometry[geometry["measure"] == measure_name].groupby("checkpoint")["layer"].apply(list)
        assert layers.tolist() == [[1, 2, 3], [1, 2, 3]]
    assert len(Run(Path()).steps) == 2 * 3 * 7 * 4
    geometry = geometry[~geometry["measure"].isin(STEP_MEASURES) & (geometry["point"] != "attention")]
    assert len(geometry) == 2 * (3 + 6 * 3) * 7
    identity = geometry.query("point == 'word_embedding' and measure in ['own_nearest', 'cka_input']")
    np.testing.assert_allclose(identity["mean"], 1)
    assert (geometry.query("measure != 'own_nearest'")["documents"] == 6).all()
    bound = geometry.query("measure == 'effective_rank_bound'")["mean"].to_numpy()
    assert (geometry.query("measure == 'effective_rank'")["mean"].to_numpy() <= bound).all()


def test_a_second_run_and_an_interrupted_one_give_the_same_bytes(
    finished: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = measure.BatchMeasurer.measures
    calls: list[int] = []

    def measures(self: Any, documents: Any) -> Any:
        calls.append(len(documents))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, documents)

    monkeypatch.setattr(measure.BatchMeasurer, "measures", measures)
    folder = small(workspace)
    with pytest.raises(KeyboardInterrupt):
        run_tokenized(measure)
    assert not (folder / "features/measure").exists()
    run_tokenized(measure)
    assert bytes_of(folder) == bytes_of(finished)
    resumed = len(calls) - 1  # without the one that was killed
    fresh = small(workspace, "fresh")
    run_tokenized(measure)
    assert len(calls) - 1 == 2 * resumed  # no batch was measured twice
    assert bytes_of(fresh) == bytes_of(finished)


def test_two_processes_divide_the_work_and_give_the_same_bytes(
    finished: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small(workspace)

    class Process:
        """What `torchrun` makes of PartialState, one process after the other."""

        num_processes, device = 2, torch.device("cpu")

        def __init__(self, index: int) -> None:
            self.process_index, self.is_main_process = index, index == 0

        def wait_for_everyone(self) -> None:
            pass

    for index in (1, 0):
        monkeypatch.setattr(measure, "PartialState", lambda cpu, index=index: Process(index))
        run_tokenized(measure)
    assert bytes_of(folder) == bytes_of(finished)


def test_review_csvs_are_the_means_of_the_rows_in_the_statistics(finished: Path) -> None:
    table = Run(Path()).ratios().query("in_statistics")
    reviews = pd.read_parquet(finished / "data/reviews/test.parquet")
    by_review = Run(Path()).table("measure/mixing_by_review")
    assert len(by_review) == 2 * 6 * 3 * len(RATIOS)
    own = table.groupby(["checkpoint", "document", "layer"])[list(RATIOS)].mean()
    lengths = table.query("layer == 1 and checkpoint == 'finetuned'").groupby("document").size()
    for row in by_review.itertuples():
        assert row.mean == pytest.approx(own.loc[(row.checkpoint, row.document, row.layer), row.method], abs=2e-6)
        assert row.label == reviews["label"][int(row.document.removeprefix("test/"))]
        assert row.tokens == lengths[row.document]
    words = table[table["token_class"].isin(["word", "subword"])]
    weighted = Run(Path()).table("measure/mixing_weighted", dtype={"layer": str})
    assert len(weighted) == 3 * 2 * 3 * 4 * len(RATIOS)
    indexed = weighted.set_index(["checkpoint", "weight", "tokens_of", "layer", "method"]).sort_index()
    for tokens_of, rows in (("words", words), ("all", table), ("without_first", table[table["position"] > 0])):
        by_token = rows.groupby(["checkpoint", "layer"])[list(RATIOS)].mean()
        each = rows.groupby(["checkpoint", "document", "layer"])[list(RATIOS)].mean()
        for weight, means in (("token", by_token), ("review", each.groupby(["checkpoint", "layer"]).mean())):
            for checkpoint in ("pretrained", "finetuned", "difference"):
                of_one = (
                    means.loc["finetuned"] - means.loc["pretrained"]
                    if checkpoint == "difference"
                    else means.loc[checkpoint]
                )
                for layer, expected in (("all", of_one.mean()), ("2", of_one.loc[2])):
                    found = indexed.loc[(checkpoint, weight, tokens_of, layer)]
                    np.testing.assert_allclose(found.loc[list(RATIOS), "mean"], expected, atol=2e-6)
                    assert (found["ci_low"] <= found["mean"]).all()
                    assert (found["mean"] <= found["ci_high"]).all()


def test_lengths_are_split_where_they_double(workspace: Workspace) -> None:
    names = {1: "1-32", 32: "1-32", 33: "33-64", 64: "33-64", 65: "65-128", 512: "257-512", 513: "513-1024"}
    assert [LENGTHS[number] for number in length_class(list(names))] == list(names.values())
    few = {"documents": 12, "matrices": [], "gradient_documents": 0}
    folder = small(workspace, measure=few, capture={"max_length": 40})
    reviews = pd.read_parquet(folder / "data/reviews/test.parquet")
    reviews["text"] = reviews["text"].mask(reviews.index < 5, reviews["text"] + " it was not so dull ." * 5)
    reviews.to_parquet(folder / "data/reviews/test.parquet", index=False)
    run_tokenized(measure)
    table = Run(Path()).ratios().query("in_statistics")
    sizes = table.query("layer == 1 and checkpoint == 'finetuned'").groupby("document").size()
    long = table["document"].map(sizes) > 32
    by_length = Run(Path()).table("measure/mixing_by_group").query("grouping == 'length'")
    assert 0 < (sizes > 32).sum() < 12
    assert len(by_length) == 2 * 3 * 2 * len(RATIOS)
    means = table.groupby([np.where(long, "33-64", "1-32"), "checkpoint", "layer"])[list(RATIOS)].mean()
    for row in by_length.itertuples():
        assert row.mean == pytest.approx(means.loc[(row.group, row.checkpoint, row.layer), row.method], abs=2e-6)
        chosen = sizes[(sizes > 32) == (row.group == "33-64")]
        assert (row.tokens, row.documents) == (chosen.sum(), len(chosen))
        if len(chosen) == 1:
            assert np.isnan([row.ci_low, row.ci_high]).all()
        else:
            assert row.ci_low <= row.mean <= row.ci_high


def test_mean_cosine_across_is_that_of_tokens_of_different_reviews(finished: Path) -> None:
    base, tokenizer = load_base(finished / "models/finetuned"), load_tokenizer(finished / "models/finetuned")
    texts = pd.read_parquet(finished / "data/reviews/test.parquet")["text"]
    names = Run(Path()).table("measure/mixing_by_review")["document"].unique()
    clouds = []
    for name in names:
        batch = tokenizer(texts[int(name.removeprefix("test/"))], truncation=True, max_length=20, return_tensors="pt")
        with torch.no_grad():
            states = base(**batch, output_hidden_states=True).hidden_states
        clouds.append([torch.nn.functional.normalize(state[0].double(), dim=-1).numpy() for state in states])
    found = Run(Path()).table("measure/geometry").query("measure == 'mean_cosine_across' and checkpoint == 'finetuned'")
    for layer in range(4):
        pairs = [a[layer] @ b[layer].T for a in clouds for b in clouds if a is not b]
        expected = np.concatenate([pair.ravel() for pair in pairs]).mean()
        point = "layer_output" if layer else "embedding_output"
        (row,) = found.query(f"layer == {layer} and point == '{point}'").itertuples()
        assert row.mean == pytest.approx(expected, abs=3e-6)
        assert row.ci_low < row.mean < row.ci_high
        assert row.documents == 6


def test_one_checkpoint_and_no_gradient_documents(workspace: Workspace) -> None:
    small(workspace, measure={"gradient_documents": 0, "methods": ["attn_w", "attn_n"]}, finetune={"epochs": 0})
    shutil.rmtree("models/pretrained")
    run_tokenized(measure)
    assert set(Run(Path()).metrics("measure")) == {"finetuned", "documents", "computed_on"}
    assert set(Run(Path()).metrics("measure")["finetuned"]) == {"attn_w", "attn_n", "identity_error"}
    assert Run(Path()).table("measure/derivatives").empty
    assert set(Run(Path()).table("measure/mixing")["method"]) == {"attn_w", "attn_n"}
    assert set(Run(Path()).table("measure/mixing")["checkpoint"]) == {"finetuned"}


def test_matrices_are_switched_off_by_parameter(finished: Path, workspace: Workspace) -> None:
    assert set(Run(Path()).matrices("finetuned", "test/3")) == set(with_rollouts(LAYER_MATRICES))
    alti = Run(Path()).matrix("finetuned", "test/3", "alti_rollout")
    small(workspace, measure={"matrices": ["norm", "alti"], "gradient_documents": 1})
    run_tokenized(measure)
    assert set(Run(Path()).matrices("finetuned", "test/3")) == {"norm", "alti", "alti_rollout"}
    np.testing.assert_array_equal(Run(Path()).matrix("finetuned", "test/3", "alti_rollout"), alti)
    agreement = Run(Path()).table("measure/derivatives").query("quantity == 'agreement'")
    assert set(agreement["method"]) == {*RATIOS, "norm", "alti", "alti_rollout"}
    small(workspace, "none", measure={"matrices": [], "gradient_documents": 0})
    run_tokenized(measure)
    assert not (Run(Path()).measured / "contributions").is_dir() or Run(Path()).matrices("finetuned", "test/3") == []


def test_a_text_longer_than_the_model_takes_is_one_clear_error(workspace: Workspace) -> None:
    small(workspace, capture={"max_length": 65})
    with pytest.raises(InputError, match=r"capture.max_length: 65 is more than the 64 tokens"):
        run_tokenized(measure)


def test_token_classes_of_words_pieces_and_punctuation(default_weights: Path) -> None:
    tokenizer = load_tokenizer(default_weights)
    (document,) = tokenized_documents(tokenizer, {"text/0": "Unforgettably good, isn't it?"}, 30)
    tokens = tokenizer.convert_ids_to_tokens(document.ids.tolist())
    classes = dict(zip(tokens, (CLASSES[number] for number in document.classes), strict=True))
    assert classes["[CLS]"] == "cls"
    assert classes["[SEP]"] == "sep"
    assert classes["good"] == classes["isn"] == classes["it"] == "word"
    assert classes[","] == classes["?"] == classes["'"] == "punctuation"
    pieces = tokens[1 : tokens.index("good")]
    assert len(pieces) > 1
    assert {classes[piece] for piece in pieces} == {"subword"}


def test_drawn_documents_are_cut_like_the_tokenizer_cuts(default_weights: Path) -> None:
    text = "a long review " * 30
    (document,) = tokenized_documents(load_tokenizer(default_weights), {"test/0": text}, 16)
    expected = AutoTokenizer.from_pretrained(default_weights)(text, truncation=True, max_length=16)["input_ids"]
    assert document.ids.tolist() == expected
    assert document.measured


def test_derivative_tables_are_of_the_same_reviews_in_both_checkpoints(finished: Path) -> None:
    table, by_review = (Run(Path()).table(f"measure/{name}") for name in ("derivatives", "derivatives_by_review"))
    reviews = by_review.groupby("checkpoint")["document"].agg(set)
    assert reviews["pretrained"] == reviews["finetuned"]
    labels = pd.read_parquet("data/reviews/test.parquet")["label"]
    assert sorted(labels[[int(name.removeprefix("test/")) for name in reviews["finetuned"]]]) == [0, 1]
    sizes = {"level": 3 * 2 * 3 * 3, "ratio": 3 * 3 * len(RATIOS), "from_input": 3 * 3 * 7, "agreement": 2 * 2 * 3 * 16}
    assert table["quantity"].value_counts().to_dict() == sizes
    assert table["mean"].between(-1, 1).all()
    keys = ["checkpoint", "reference", "layer", "method"]
    means = by_review.query("quantity == 'agreement'").groupby(keys)["mean"].mean()
    agreement = table.query("quantity == 'agreement'").set_index(keys)["mean"]
    np.testing.assert_allclose(agreement, means.loc[agreement.index], atol=2e-6)
    by_head = Run(Path()).table("measure/mixing_by_group").query("grouping == 'head'")
    assert len(by_head) == 2 * 3 * 4
    assert (by_head["documents"] == 6).all()
