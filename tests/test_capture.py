"""Captured features match an independent computation, contain no padding, and do not depend on batches or shards."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Workspace, digest, run_capture, toy_reviews, write_tiny_bert
from family_reference import run_reference
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoTokenizer, BertForSequenceClassification

import attnmix.runs.capture as module
from attnmix.core.errors import InputError
from attnmix.core.names import ACTIVATIONS, POINTS, Site
from attnmix.core.store import features as store
from attnmix.core.store.runs import Run
from attnmix.core.store.texts import read_split
from attnmix.models.capture_points import widths
from attnmix.models.encoding import padded
from attnmix.models.loading import load_base, load_classifier
from stages.common.parameters import Parameters, read_parameters
from stages.common.resume import unfinished_folder
from stages.tokenize import captured_texts

HALF = 2.0**-11  # largest relative rounding error of float16


def captured_rows(parameters: Parameters) -> list[int]:
    """Return the row numbers of the captured test reviews, in order."""
    texts = [text["document"] for text in captured_texts(parameters, Run(Path()))]
    return [int(name.removeprefix("test/")) for name in texts if name.startswith("test/")]


def test_every_point_matches_recomputation(workspace: Workspace, tiny_bert: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "classifier"
    torch.manual_seed(0)
    load_classifier(tiny_bert).save_pretrained(checkpoint)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(checkpoint)
    text = "I can't say a bad word about it, and <br /> I shan't try. The ending? Unforgettable!"
    chosen = {"points": list(POINTS), "documents": [], "texts": [text], "dtype": "float16", "max_length": 60}
    run_capture(workspace(capture=chosen), checkpoint)
    ids = Run(Path()).tokens["token_id"].tolist()
    expected = {Site(*at): array for at, array in run_reference("bert", load_base(checkpoint), ids).features.items()}
    assert set(store.stored_sites(ACTIVATIONS)) == set(expected)
    with torch.no_grad():
        base = AutoModel.from_pretrained(checkpoint).eval()
        hidden = base(torch.tensor([ids]), output_hidden_states=True).hidden_states
    assert len(hidden) == base.config.num_hidden_layers + 1
    for level, states in enumerate(hidden):
        site = Site(level, "layer_output" if level else "embedding_output")
        assert np.abs(expected[site] - states[0].numpy()).max() <= 1e-5
    for site, features in expected.items():
        stored = store.read_features(ACTIVATIONS, site).astype(np.float64)
        assert np.abs(stored - features).max() <= 2 * HALF * np.abs(features).max(), site


def test_tokens_table_lists_every_row_without_padding(workspace: Workspace, tiny_bert: Path) -> None:
    folder = workspace(capture={"documents": [5, 2], "texts": ["time flies like an arrow"], "max_length": 40})
    run_capture(folder, tiny_bert)
    tokens, reviews = pd.read_parquet(ACTIVATIONS / store.TOKENS_FILE), toy_reviews(12, 3)["text"]
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


def test_batches_and_shards_match_single_texts(
    workspace: Workspace, tiny_bert: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = {"documents": list(range(6)), "dtype": "float32", "max_length": 40, "chunk_tokens": 2}
    run_capture(workspace("alone", capture=documents | {"batch_tokens": 1}), tiny_bert)
    alone = {site: store.read_features(ACTIVATIONS, site) for site in store.stored_sites(ACTIVATIONS)}
    request.getfixturevalue("small_shards")  # 8 rows of float32
    groups = []  # rows of each group of shards
    original = module._create_batches

    def record_group(ids: Any, lengths: Any, rows: slice, *options: Any) -> Any:
        groups.append(rows.stop - rows.start)
        return original(ids, lengths, rows, *options)

    monkeypatch.setattr(module, "_create_batches", record_group)
    for shards_at_once in (1, 3):
        monkeypatch.setattr(module, "group_tokens", lambda *_, number=shards_at_once: number * 8)
        run_capture(workspace(f"{shards_at_once} shards at once", capture=documents), tiny_bert)
        assert set(groups[:-1]) == {shards_at_once * 8}
        groups.clear()
        for site, features in alone.items():
            array = store.open_store(ACTIVATIONS, site)
            assert array.shards == (8, 24)
            assert len(features) > 5 * 8
            assert np.abs(features - array[:]).max() <= 1e-5, site


def test_group_reads_one_number_for_all_passes_and_points(tiny_bert: Path) -> None:
    """The CPU waits for a GPU whenever it reads a number, so it reads only one number per group of batches."""
    numbers = []

    class Numbers(TorchDispatchMode):
        """Count the tensors that are converted to Python numbers."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._local_scalar_dense.default:
                numbers.append(function)
            return function(*args, **kwargs or {})

    base, inputs = load_base(tiny_bert), padded([[5, 6, 7], [5, 6, 7, 8]], 0)
    batches = []
    for start in (0, 7):  # first row of each batch, which has 3 + 4 tokens
        texts = [
            module.TextRows(0, slice(0, 3), slice(start, start + 3)),
            module.TextRows(1, slice(0, 4), slice(start + 3, start + 7)),
        ]
        batches.append(module.Batch(inputs, texts))
    buffers = {site: torch.full((14, width), torch.nan, dtype=torch.float16) for site, width in widths(base).items()}
    mode: Any = Numbers
    with torch.inference_mode(), mode():
        base(**inputs)
    read_by_one_pass = len(numbers)
    with mode():
        module.fill_rows(base, batches, buffers)
    read_by_passes = (1 + len(batches)) * read_by_one_pass  # including the pass above
    assert len(numbers) - read_by_passes == 1
    assert all(buffer.isfinite().all() for buffer in buffers.values())


@pytest.mark.parametrize("shards_at_once", [1, 3])
def test_shard_file_is_opened_once(
    workspace: Workspace, tiny_bert: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch, shards_at_once: int
) -> None:
    opened = []
    original = os.open

    def count_shards(path: Any, *arguments: Any, **options: Any) -> int:
        if "/c/" in str(path):
            opened.append(path)
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "open", count_shards)
    monkeypatch.setattr(module, "group_tokens", lambda *_: shards_at_once * 16)
    run_capture(workspace(capture={"documents": list(range(6)), "max_length": 40, "chunk_tokens": 2}), tiny_bert)
    sites = store.stored_sites(ACTIVATIONS)
    shards = math.ceil(len(Run(Path()).tokens) / 16)
    assert shards > 5
    assert len(opened) == len(set(opened)) == len(sites) * shards


@pytest.mark.parametrize(
    ("disk", "device_seconds", "device", "expected"),
    [
        (6.0, 0.0, "cpu", {"disk": 0.6, "forward pass": 0.4}),
        (1.0, 0.0, "cpu", {"forward pass": 0.9, "disk": 0.1}),
        (1.0, 7.0, "cuda", {"forward pass": 0.7, "host": 0.2, "disk": 0.1}),
        (1.0, 2.0, "cuda", {"host": 0.7, "forward pass": 0.2, "disk": 0.1}),
    ],
)
def test_limiting_factor_has_largest_share(
    disk: float, device_seconds: float, device: str, expected: dict[str, float]
) -> None:
    shares = module.compute_limiting_shares(10.0, disk, device_seconds, torch.device(device))
    assert list(shares) == list(expected)
    assert shares == pytest.approx(expected)


def test_log_states_throughput_and_limiting_factor(
    workspace: Workspace, tiny_bert: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        run_capture(workspace(capture={"documents": [1], "max_length": 40}), tiny_bert)
    number = r"[\d,]+"
    rates = rf"{number} tokens/s, {number}\.\d MB/s stored \({number} MB/s in each of 4 writing threads\)"
    limits = r"limited by: (disk|forward pass) \((disk|forward pass) \d+%, (disk|forward pass) \d+% of the time\)"
    assert any(re.fullmatch(f"{rates}; {limits}", record.getMessage()) for record in caplog.records)


def test_failed_write_ends_stage_and_leaves_shard_unmarked(
    workspace: Workspace, tiny_bert: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def refuse_third_shard(path: Any, *arguments: Any, **options: Any) -> int:
        if "layer_02/layer_output.zarr/c/2/" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_third_shard)
        with pytest.raises(InputError, match=r"cannot write .*/c/2/0 \(No space left on device\); free some space"):
            run_capture(
                workspace(capture={"documents": list(range(6)), "max_length": 40, "chunk_tokens": 2}), tiny_bert
            )
    unfinished = unfinished_folder("capture", read_parameters(), Path())
    assert {"0", "1"} <= {path.name for path in (unfinished / "done").iterdir()}
    assert not (unfinished / "done/2").exists()


def test_killed_after_publishing_restarts_from_beginning(workspace: Workspace, tiny_bert: Path) -> None:
    folder = workspace(capture={"documents": [1], "max_length": 40})
    run_capture(folder, tiny_bert)
    first = digest(ACTIVATIONS)
    # Recreate the state after a kill between publication and clean-up. DVC removes the outputs before the next run.
    unfinished = unfinished_folder("capture", read_parameters(), Path())
    (unfinished / "done").mkdir()
    (unfinished / "done" / "0").touch()
    shutil.rmtree(ACTIVATIONS)
    run_capture(folder, tiny_bert)
    assert digest(ACTIVATIONS) == first
    assert not unfinished.exists()


def test_bf16_forward_pass_is_close_to_fp32(workspace: Workspace, tiny_bert: Path) -> None:
    features = []
    for precision in ("fp32", "bf16"):
        chosen = {"documents": [3], "max_length": 40, "precision": precision}
        run_capture(workspace(precision, capture=chosen), tiny_bert)
        features.append(store.read_features(ACTIVATIONS, Site(1, "layer_output")).astype(float))
    exact, half = features
    assert 0 < np.abs(half - exact).max() < 0.1


def test_unknown_documents_and_truncated_texts_are_reported(
    workspace: Workspace, tiny_bert: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["film " * 30, "\u4e2d \u6587 \u5b57", "the film was great ."]
    run_capture(workspace(capture={"documents": [], "texts": texts, "max_length": 20}), tiny_bert)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [
        "truncated to capture.max_length: text/0 (32 tokens)",
        "mostly tokens unknown to the model: text/1 (5 tokens)",
    ]
    shutil.rmtree(ACTIVATIONS)
    for impossible, expected in (
        ({"documents": [12]}, r"capture\.documents: the test split has no row 12; allowed: 0 to 11"),
        ({"max_length": 65}, r"capture\.max_length: 65 exceeds the 64 tokens"),
    ):
        with pytest.raises(InputError, match=expected):
            run_capture(workspace(capture={"max_length": 40} | impossible), tiny_bert)
        assert not ACTIVATIONS.exists()


def test_drawn_reviews_are_stratified_and_follow_listed_ones(workspace: Workspace, tiny_bert: Path) -> None:
    run_capture(workspace(capture={"documents": [7], "drawn": 4, "max_length": 40}), tiny_bert)
    run, parameters = Run(Path()), read_parameters()
    reviews, rows = read_split("test", run.reviews), captured_rows(parameters)
    assert run.texts == {f"test/{row}": reviews["text"][row] for row in rows}
    assert rows == [7, *sorted(set(rows) - {7})]
    only_drawn = parameters.capture.model_copy(update={"documents": []})
    drawn = captured_rows(parameters.model_copy(update={"capture": only_drawn}))
    assert set(rows) == {7, *drawn}
    assert reviews["label"][drawn].value_counts().tolist() == [2, 2]
    assert len({tuple(captured_rows(parameters.model_copy(update={"seed": seed}))) for seed in range(5)}) > 1


def write_loud_bert(folder: Path, parameter: str, value: float, row: Any = ...) -> Path:
    """Write a tiny BERT in which all entries of a parameter, or of one of its rows, have the same value."""
    model = BertForSequenceClassification.from_pretrained(write_tiny_bert(folder))
    with torch.no_grad():
        model.get_parameter(parameter)[row] = value
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("value", "dtype", "problem"),
    [
        (1e5, "float16", r"a feature of \d+ exceeds the range of float16 .*; set capture\.dtype"),
        (np.nan, "float32", "the model's features contain NaN"),
        (np.inf, "float32", "the model's features contain NaN or infinite"),
    ],
)
def test_unstorable_feature_stops_stage_without_store(
    workspace: Workspace, tmp_path: Path, value: float, dtype: str, problem: str
) -> None:
    checkpoint = write_loud_bert(tmp_path / "loud", "bert.encoder.layer.1.output.dense.bias", value)
    with pytest.raises(InputError, match=f"layer_02/ffn_output: {problem}"):
        run_capture(workspace(capture={"documents": [3], "max_length": 40, "dtype": dtype}), checkpoint)
    assert not ACTIVATIONS.exists()


def test_unstorable_padding_is_no_error(workspace: Workspace, tmp_path: Path) -> None:
    checkpoint = write_loud_bert(tmp_path / "loud", "bert.embeddings.word_embeddings.weight", 1e5, row=0)
    run_capture(workspace(capture={"documents": list(range(12)), "max_length": 40}), checkpoint)
    assert np.abs(store.read_features(ACTIVATIONS, Site(0, "word_embedding"))).max() < 10
