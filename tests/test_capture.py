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
from stage_process import run_stage
from transformers import AutoModel, AutoTokenizer, BertForSequenceClassification

from attnmix.core.errors import InputError
from attnmix.core.options import Parameters
from attnmix.core.points import LAYER_POINTS, POINTS, Site
from attnmix.models.loading import load_classifier
from attnmix.store import features as store
from attnmix.store.layout import ACTIVATIONS
from attnmix.store.reviews import read_split
from attnmix.store.runs import Run
from stages import capture
from stages.common.parameters import read_parameters
from stages.common.resume import unfinished_folder
from stages.tokenize import chosen_texts

ALL_POINTS = list(POINTS)
OF_BERT = [point for point in LAYER_POINTS if not point.startswith("cross_attention")]
HALF = 2.0**-11  # relative rounding of float16


def captured_rows(parameters: Parameters) -> list[int]:
    """Return the rows of the captured test reviews in their order."""
    texts = [text["document"] for text in chosen_texts(parameters, Run(Path()).reviews) if text["captured"]]
    return [int(name.removeprefix("test/")) for name in texts if name.startswith("test/")]


def run_capture(folder: Path, checkpoint: Path) -> None:
    with chdir(prepared_for_capture(folder, checkpoint)):
        capture.main(read_parameters())


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def erf(x: Any) -> Any:
    return torch.erf(torch.from_numpy(x)).numpy()


def recompute(checkpoint: Path, ids: list[int], heads: int, eps: float) -> dict[Site, Any]:
    """Every capture point of one text from the weights alone, in float64."""
    weights = {name: w.double().numpy() for name, w in load_classifier(checkpoint).state_dict().items()}
    prefix = "bert."

    def linear(x: Any, name: str) -> Any:
        return x @ weights[f"{prefix}{name}.weight"].T + weights[f"{prefix}{name}.bias"]

    def normed(x: Any, name: str) -> Any:
        return layer_norm(x, weights[f"{prefix}{name}.weight"], weights[f"{prefix}{name}.bias"], eps)

    found: dict[Site, Any] = {}
    word = weights[prefix + "embeddings.word_embeddings.weight"][ids]
    position = weights[prefix + "embeddings.position_embeddings.weight"][: len(ids)]
    segment = weights[prefix + "embeddings.token_type_embeddings.weight"][0]
    found[Site(0, "word_embedding")] = word
    found[Site(0, "embedding_sum")] = word + position + segment
    x = found[Site(0, "embedding_output")] = normed(word + position + segment, "embeddings.LayerNorm")
    for number in range(sum(name.endswith("attention.self.query.weight") for name in weights)):
        at = f"encoder.layer.{number}."
        query, key, value = (
            linear(x, at + f"attention.self.{part}").reshape(len(ids), heads, -1).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        scores = query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1])
        exponents = np.exp(scores - scores.max(-1, keepdims=True))
        attention = exponents / exponents.sum(-1, keepdims=True)
        concatenated = (attention @ value).transpose(1, 0, 2).reshape(len(ids), -1)
        output = linear(concatenated, at + "attention.output.dense")
        residual = output + x
        norm = normed(residual, at + "attention.output.LayerNorm")
        inner = linear(norm, at + "intermediate.dense")
        ffn = linear(inner * 0.5 * (1 + erf(inner / np.sqrt(2))), at + "output.dense")
        x = normed(ffn + norm, at + "output.LayerNorm")
        values = (concatenated, output, residual, norm, ffn, x)
        found |= {Site(number + 1, point): v for point, v in zip(OF_BERT, values, strict=True)}
    return found


def assert_stores_equal(expected: dict[Site, Any], rows: slice, tolerance: float) -> None:
    assert set(store.stored_sites(ACTIVATIONS)) == set(expected)
    for site, feature in expected.items():
        stored = store.read_features(ACTIVATIONS, site, rows).astype(np.float64)
        scale = np.abs(feature).max()
        assert np.abs(stored - feature).max() <= tolerance * scale, site


def test_every_point_equals_a_recomputation_from_the_weights(workspace: Workspace, tiny_bert: Path) -> None:
    folder = workspace(capture={"points": ALL_POINTS, "documents": [3], "max_length": 40})
    run_capture(folder, tiny_bert)
    ids = Run(Path()).tokens["token_id"].tolist()
    assert_stores_equal(recompute(tiny_bert, ids, heads=4, eps=1e-12), slice(None), tolerance=2 * HALF)


def test_default_model_equals_a_recomputation_and_its_own_hidden_states(
    workspace: Workspace, default_weights: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "classifier"
    torch.manual_seed(0)
    load_classifier(default_weights).save_pretrained(checkpoint)
    AutoTokenizer.from_pretrained(default_weights).save_pretrained(checkpoint)
    text = "I can't say a bad word about it, and <br /> I shan't try. The ending? Unforgettable!"
    folder = workspace(capture={"points": ALL_POINTS, "documents": [], "texts": [text], "dtype": "float32"})
    run_capture(folder, checkpoint)
    ids = Run(Path()).tokens["token_id"].tolist()
    assert_stores_equal(recompute(checkpoint, ids, heads=12, eps=1e-12), slice(None), tolerance=1e-5)

    model = AutoModel.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    assert len(hidden) == 7
    for level, states in enumerate(hidden):
        site = Site(level, "layer_output" if level else "embedding_output")
        assert np.abs(store.read_features(ACTIVATIONS, site) - states[0].numpy()).max() <= 1e-5


def test_roberta_equals_its_own_hidden_states(workspace: Workspace, tiny_roberta: Path) -> None:
    folder = workspace(capture={"documents": [0, 1], "max_length": 30, "dtype": "float32"})
    run_capture(folder, tiny_roberta)
    tokens = Run(Path()).tokens
    model = AutoModel.from_pretrained(tiny_roberta).eval()
    for document, rows in tokens.groupby("document", sort=False):
        ids = torch.tensor([rows["token_id"].tolist()])
        with torch.no_grad():
            hidden = model(ids, output_hidden_states=True).hidden_states
        for level, states in enumerate(hidden):
            site = Site(level, "layer_output" if level else "embedding_output")
            stored = store.read_features(ACTIVATIONS, site, slice(rows.index[0], rows.index[-1] + 1))
            assert np.abs(stored - states[0].numpy()).max() <= 1e-4, (document, level)


def test_tokens_table_names_every_row_and_padding_is_nowhere(workspace: Workspace, tiny_bert: Path) -> None:
    folder = workspace(capture={"documents": [5, 2], "texts": ["time flies like an arrow"], "max_length": 40})
    run_capture(folder, tiny_bert)
    tokens = pd.read_parquet(store.tokens_file(ACTIVATIONS))
    assert list(tokens.columns) == ["document", "position", "token_id", "token"]
    assert tokens["document"].drop_duplicates().tolist() == ["test/5", "test/2", "text/0"]
    assert "[PAD]" not in tokens["token"].tolist()
    free = tokens[tokens["document"] == "text/0"]
    assert free["token"].tolist() == ["[CLS]", "time", "flies", "like", "an", "arrow", "[SEP]"]
    assert free["position"].tolist() == list(range(7))
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    expected = tokenizer(toy_reviews(12, 3)["text"][5])["input_ids"]
    assert tokens[tokens["document"] == "test/5"]["token_id"].tolist() == expected
    assert store.open_store(ACTIVATIONS, Site(1, "ffn_output")).shape[0] == len(tokens)
    reviews = toy_reviews(12, 3)["text"]
    texts = {"test/5": reviews[5], "test/2": reviews[2], "text/0": "time flies like an arrow"}
    assert list(Run(Path()).texts.items()) == list(texts.items())


def test_texts_in_one_batch_equal_texts_one_by_one(workspace: Workspace, tiny_bert: Path) -> None:
    documents = {"documents": list(range(12)), "dtype": "float32", "max_length": 40}
    run_capture(workspace("together", capture=documents | {"batch_tokens": 8192}), tiny_bert)
    together = {s: store.read_features(ACTIVATIONS, s) for s in store.stored_sites(ACTIVATIONS)}
    run_capture(workspace("alone", capture=documents | {"batch_tokens": 1}), tiny_bert)
    for site, features in together.items():
        assert np.abs(features - store.read_features(ACTIVATIONS, site)).max() <= 1e-5, site


def test_capture_killed_after_it_published_starts_anew(workspace: Workspace, tiny_bert: Path) -> None:
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
    whole = {s: store.read_features(ACTIVATIONS, s) for s in store.stored_sites(ACTIVATIONS)}
    request.getfixturevalue("small_shards")
    run_capture(workspace("many", capture=documents), tiny_bert)
    for site, features in whole.items():
        array = store.open_store(ACTIVATIONS, site)
        assert array.shards == (16, 24)
        assert len(features) > 5 * 16
        assert np.abs(array[:].astype(float) - features.astype(float)).max() <= 0.004, site


def test_bf16_forward_pass_stays_near_the_exact_one(workspace: Workspace, tiny_bert: Path) -> None:
    run_capture(workspace("exact", capture={"max_length": 40}), tiny_bert)
    exact = store.read_features(ACTIVATIONS, Site(1, "layer_output")).astype(float)
    run_capture(workspace("half", capture={"max_length": 40, "precision": "bf16"}), tiny_bert)
    half = store.read_features(ACTIVATIONS, Site(1, "layer_output")).astype(float)
    assert 0 < np.abs(half - exact).max() < 0.1


def test_texts_that_are_cut_or_unknown_are_named(
    workspace: Workspace, tiny_bert: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["film " * 30, "\u4e2d \u6587 \u5b57", "the film was great ."]
    run_capture(workspace(capture={"documents": [], "texts": texts, "max_length": 20}), tiny_bert)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [
        "cut to capture.max_length: text/0 (32 tokens)",
        "mostly tokens that the model does not know: text/1",
    ]


def test_drawn_reviews_follow_the_named_ones_with_each_class_in_its_share(
    workspace: Workspace, tiny_bert: Path
) -> None:
    run_capture(workspace(capture={"documents": [7], "drawn": 4, "max_length": 40}), tiny_bert)
    run, parameters = Run(Path()), read_parameters()
    stored, reviews = run.texts, read_split("test", run.reviews)
    rows = captured_rows(parameters)
    assert list(stored) == [f"test/{row}" for row in rows]
    assert list(stored.values()) == reviews["text"][rows].tolist()
    assert rows[0] == 7
    assert rows[1:] == sorted(set(rows) - {7})
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
        run_capture(workspace(capture={"max_length": 40}), checkpoint)
    assert not ACTIVATIONS.exists()


def test_unknown_model_family_names_the_known_ones(workspace: Workspace, tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import MPNetConfig, MPNetForSequenceClassification

    checkpoint = tmp_path / "other"
    shutil.copytree(tiny_bert, checkpoint)
    config = MPNetConfig(vocab_size=60, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    MPNetForSequenceClassification(config).save_pretrained(checkpoint)
    with pytest.raises(InputError, match=r"model family 'mpnet' cannot be looked into: .* known: bert, roberta"):
        run_capture(workspace(capture={"max_length": 40}), checkpoint)


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
