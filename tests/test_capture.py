"""Captured features equal those of an independent path; no padding; the same bytes however the work is cut."""

from __future__ import annotations

import os
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import SMALL_SHARDS, Workspace, digest, prepared_for_capture, run_tokenized, toy_reviews, write_tiny_bert
from family_reference import run_reference
from stage_process import run_stage
from transformers import AutoModel, AutoTokenizer, BertForSequenceClassification

from attnmix.core.errors import InputError
from attnmix.core.names import ACTIVATIONS, POINTS, Site
from attnmix.models.loading import load_base, load_classifier
from attnmix.store import features as store
from attnmix.store.runs import Run
from attnmix.store.texts import read_split
from stages import capture
from stages.common.parameters import Parameters, read_parameters
from stages.common.resume import unfinished_folder
from stages.tokenize import chosen_texts

HALF = 2.0**-11  # relative rounding of float16


def captured_rows(parameters: Parameters) -> list[int]:
    """Return the rows of the captured test reviews in their order."""
    texts = [text["document"] for text in chosen_texts(parameters, Run(Path())) if text["captured"]]
    return [int(name.removeprefix("test/")) for name in texts if name.startswith("test/")]


def run_capture(folder: Path, checkpoint: Path) -> None:
    with chdir(prepared_for_capture(folder, checkpoint)):
        capture.main(read_parameters())


def assert_stores_equal(expected: dict[Site, Any], tolerance: float) -> None:
    assert set(store.stored_sites(ACTIVATIONS)) == set(expected)
    for site, features in expected.items():
        stored = store.read_features(ACTIVATIONS, site).astype(np.float64)
        assert np.abs(stored - features).max() <= tolerance * np.abs(features).max(), site


def recomputed(checkpoint: Path) -> dict[Site, Any]:
    """Compute every capture point of the one captured text from the weights alone, in float64."""
    ids = Run(Path()).tokens["token_id"].tolist()
    return {Site(*at): array for at, array in run_reference("bert", load_base(checkpoint), ids).features.items()}


def test_every_point_equals_a_recomputation_from_the_weights(workspace: Workspace, tiny_bert: Path) -> None:
    run_capture(workspace(capture={"points": list(POINTS), "documents": [3], "max_length": 40}), tiny_bert)
    assert_stores_equal(recomputed(tiny_bert), tolerance=2 * HALF)


def test_default_model_equals_a_recomputation_and_its_own_hidden_states(
    workspace: Workspace, default_weights: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "classifier"
    torch.manual_seed(0)
    load_classifier(default_weights).save_pretrained(checkpoint)
    AutoTokenizer.from_pretrained(default_weights).save_pretrained(checkpoint)
    text = "I can't say a bad word about it, and <br /> I shan't try. The ending? Unforgettable!"
    chosen = {"points": list(POINTS), "documents": [], "texts": [text], "dtype": "float32"}
    run_capture(workspace(capture=chosen), checkpoint)
    assert_stores_equal(recomputed(checkpoint), tolerance=1e-5)
    ids = torch.tensor([Run(Path()).tokens["token_id"].tolist()])
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(checkpoint).eval()(ids, output_hidden_states=True).hidden_states
    assert len(hidden) == 7
    for level, states in enumerate(hidden):
        site = Site(level, "layer_output" if level else "embedding_output")
        assert np.abs(store.read_features(ACTIVATIONS, site) - states[0].numpy()).max() <= 1e-5


def test_tokens_table_names_every_row_and_padding_is_nowhere(workspace: Workspace, tiny_bert: Path) -> None:
    folder = workspace(capture={"documents": [5, 2], "texts": ["time flies like an arrow"], "max_length": 40})
    run_capture(folder, tiny_bert)
    tokens, reviews = pd.read_parquet(store.tokens_file(ACTIVATIONS)), toy_reviews(12, 3)["text"]
    assert list(tokens.columns) == ["document", "position", "token_id", "token"]
    assert "[PAD]" not in tokens["token"].tolist()
    free = tokens[tokens["document"] == "text/0"]
    assert free["token"].tolist() == ["[CLS]", "time", "flies", "like", "an", "arrow", "[SEP]"]
    assert free["position"].tolist() == list(range(7))
    expected = AutoTokenizer.from_pretrained(tiny_bert)(reviews[5])["input_ids"]
    assert tokens[tokens["document"] == "test/5"]["token_id"].tolist() == expected
    assert store.open_store(ACTIVATIONS, Site(1, "ffn_output")).shape[0] == len(tokens)
    texts = {"test/5": reviews[5], "test/2": reviews[2], "text/0": "time flies like an arrow"}
    assert list(Run(Path()).texts.items()) == list(texts.items())
    assert tokens["document"].drop_duplicates().tolist() == list(texts)


def test_texts_in_one_batch_equal_texts_one_by_one(workspace: Workspace, tiny_bert: Path) -> None:
    documents = {"documents": list(range(12)), "dtype": "float32", "max_length": 40}
    run_capture(workspace("together", capture=documents | {"batch_tokens": 8192}), tiny_bert)
    together = {s: store.read_features(ACTIVATIONS, s) for s in store.stored_sites(ACTIVATIONS)}
    run_capture(workspace("alone", capture=documents | {"batch_tokens": 1}), tiny_bert)
    for site, features in together.items():
        assert np.abs(features - store.read_features(ACTIVATIONS, site)).max() <= 1e-5, site


def test_capture_killed_after_it_published_starts_from_the_beginning(workspace: Workspace, tiny_bert: Path) -> None:
    folder = workspace(capture={"documents": [1], "max_length": 40})
    run_capture(folder, tiny_bert)
    first = digest(ACTIVATIONS)
    # What a process killed between publishing its stores and clearing up leaves behind; DVC removes the outputs.
    unfinished = unfinished_folder("capture", read_parameters(), Path())
    (unfinished / "done").mkdir()
    (unfinished / "done" / "0").touch()
    shutil.rmtree(ACTIVATIONS)
    run_capture(folder, tiny_bert)
    assert digest(ACTIVATIONS) == first
    assert not unfinished.exists()


def test_store_of_many_shards_holds_the_same_features(
    workspace: Workspace, tiny_bert: Path, request: pytest.FixtureRequest
) -> None:
    documents = {"documents": list(range(12)), "max_length": 40}
    run_capture(workspace("one", capture=documents), tiny_bert)
    whole = {site: store.read_features(ACTIVATIONS, site) for site in store.stored_sites(ACTIVATIONS)}
    request.getfixturevalue("small_shards")
    run_capture(workspace("many", capture=documents), tiny_bert)
    for site, features in whole.items():
        array = store.open_store(ACTIVATIONS, site)
        assert array.shards == (16, 24)
        assert len(features) > 5 * 16
        assert np.abs(array[:].astype(float) - features.astype(float)).max() <= 0.004, site


def test_bf16_forward_pass_stays_near_the_exact_one(workspace: Workspace, tiny_bert: Path) -> None:
    run_capture(workspace("exact", capture={"documents": [3], "max_length": 40}), tiny_bert)
    exact = store.read_features(ACTIVATIONS, Site(1, "layer_output")).astype(float)
    run_capture(workspace("half", capture={"documents": [3], "max_length": 40, "precision": "bf16"}), tiny_bert)
    half = store.read_features(ACTIVATIONS, Site(1, "layer_output")).astype(float)
    assert 0 < np.abs(half - exact).max() < 0.1


def test_texts_that_are_cut_or_unknown_are_named(
    workspace: Workspace, tiny_bert: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["film " * 30, "\u4e2d \u6587 \u5b57", "the film was great ."]
    run_capture(workspace(capture={"documents": [], "texts": texts, "max_length": 20}), tiny_bert)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [
        "truncated to capture.max_length: text/0 (32 tokens)",
        "mostly tokens that the model does not know: text/1 (5 tokens)",
    ]


def test_drawn_reviews_follow_the_named_ones_with_each_class_in_its_share(
    workspace: Workspace, tiny_bert: Path
) -> None:
    run_capture(workspace(capture={"documents": [7], "drawn": 4, "max_length": 40}), tiny_bert)
    run, parameters = Run(Path()), read_parameters()
    reviews, rows = read_split("test", run.reviews), captured_rows(parameters)
    assert run.texts == {f"test/{row}": reviews["text"][row] for row in rows}
    assert rows == [7, *sorted(set(rows) - {7})]
    unnamed = parameters.capture.model_copy(update={"documents": []})
    drawn = captured_rows(parameters.model_copy(update={"capture": unnamed}))
    assert set(rows) == {7, *drawn}
    assert reviews["label"][drawn].value_counts().tolist() == [2, 2]
    assert len({tuple(captured_rows(parameters.model_copy(update={"seed": seed}))) for seed in range(5)}) > 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"documents": [12]}, r"capture\.documents: there is no test review 12; rows 0 to 11"),
        ({"max_length": 65}, r"capture\.max_length: 65 is more than the 64 tokens"),
    ],
)
def test_impossible_choice_is_one_error(
    workspace: Workspace, tiny_bert: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        run_capture(workspace(capture={"max_length": 40} | changes), tiny_bert)
    assert not ACTIVATIONS.exists()


def test_feature_beyond_float16_stops_the_stage_and_leaves_no_store(workspace: Workspace, tmp_path: Path) -> None:
    checkpoint = write_tiny_bert(tmp_path / "loud")
    model = BertForSequenceClassification.from_pretrained(checkpoint)
    with torch.no_grad():
        model.bert.encoder.layer[1].output.dense.bias.fill_(1e5)
    model.save_pretrained(checkpoint)
    with pytest.raises(InputError, match=r"layer_02/ffn_output.*float16"):
        run_capture(workspace(capture={"documents": [3], "max_length": 40}), checkpoint)
    assert not ACTIVATIONS.exists()


def test_two_processes_write_the_same_bytes_as_one(
    workspace: Workspace, tiny_bert: Path, small_shards: None, one_thread: None
) -> None:
    changes = {"documents": list(range(12)), "max_length": 40}
    one, two = (prepared_for_capture(workspace(name, capture=changes), tiny_bert) for name in ("one", "two"))
    run_stage(two, "capture", constants=SMALL_SHARDS, processes=2)
    os.chdir(one)
    run_tokenized(capture)
    assert len(list(Path(ACTIVATIONS, "layer_01/layer_output.zarr/c").iterdir())) > 5
    assert digest(one / ACTIVATIONS) == digest(two / ACTIVATIONS)
