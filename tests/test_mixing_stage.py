"""The stage `measure`: what it writes, that it is the same every time, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import zarr
from conftest import Workspace, write_parameters, write_reviews, write_tiny_bert
from transformers import AutoTokenizer

from stages import measure
from stages.errors import InputError
from stages.mixing.documents import CLASSES, chosen_documents
from stages.mixing.matrices import LAYER_MATRICES
from stages.mixing.ratios import RATIOS
from stages.models.loading import load_tokenizer
from stages.outputs.mixing import MIXING, contributions_folder, read_matrix, read_ratios, stored_matrices
from stages.outputs.reports import read_metrics, read_plot
from stages.parameters import read_parameters

OUTPUTS = ("features/mixing", "reports")


def prepare(folder: Path) -> None:
    write_reviews(folder / "data/reviews")
    write_tiny_bert(folder / "models/pretrained", seed=0)
    write_tiny_bert(folder / "models/finetuned", seed=1)


def small(workspace: Workspace, name: str = "workspace", **changes: Any) -> Path:
    mixing = {
        "documents": 6,
        "max_length": 20,
        "bootstrap_samples": 400,
        "gradient_documents": 2,
        "gradient_max_length": 9,
        "batch_tokens": 80,
    }
    capture = {"documents": [3], "texts": ["time flies like an arrow ."], "max_length": 30}
    folder = workspace(name, mixing=mixing | changes.get("mixing", {}), capture=capture | changes.get("capture", {}))
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
        measure.main(read_parameters())
    return folder


@pytest.fixture
def finished(finished_once: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as the working folder."""
    monkeypatch.chdir(finished_once)
    return finished_once


def test_the_tokens_table_has_a_row_for_each_checkpoint_document_position_and_layer(finished: Path) -> None:
    table = read_ratios()
    assert list(table) == [
        *("checkpoint", "document", "position", "layer"),
        *RATIOS,
        *("token", "token_class", "in_statistics"),
    ]
    assert not table.duplicated(["checkpoint", "document", "position", "layer"]).any()
    assert (table[list(RATIOS)].dtypes == np.float32).all()
    assert set(table["layer"]) == {1, 2, 3}
    assert {"test/3", "text/0"} <= set(table["document"])
    text = table[(table["document"] == "text/0") & (table["layer"] == 1) & (table["checkpoint"] == "pretrained")]
    assert text["token"].tolist() == ["[CLS]", "time", "flies", "like", "an", "arrow", ".", "[SEP]"]
    assert not text["in_statistics"].any()
    assert set(table["token_class"]) <= set(CLASSES)
    assert not (table["token"] == "[PAD]").any()


def test_mixing_csv_is_the_mean_of_the_rows_in_the_statistics(finished: Path) -> None:
    table = read_ratios().query("in_statistics")
    plots = pd.read_csv(finished / "reports/plots/mixing.csv")
    assert list(plots) == ["checkpoint", "layer", "method", "mean", "ci_low", "ci_high", "tokens", "documents"]
    assert len(plots) == 2 * 3 * len(RATIOS)
    means = table.groupby(["checkpoint", "layer"])[list(RATIOS)].mean()
    for row in plots.itertuples():
        assert row.mean == pytest.approx(means.loc[(row.checkpoint, row.layer), row.method], abs=2e-6)
        assert row.ci_low <= row.mean <= row.ci_high
        assert row.documents == 6
        assert row.tokens == len(table) / 6
    by_class = pd.read_csv(finished / "reports/plots/mixing_by_class.csv")
    classes = table.groupby(["checkpoint", "layer", "token_class"])[list(RATIOS)].mean()
    for row in by_class.itertuples():
        expected = classes.loc[(row.checkpoint, row.layer, row.token_class), row.method]
        assert row.mean == pytest.approx(expected, abs=2e-6)
    by_position = pd.read_csv(finished / "reports/plots/mixing_by_position.csv", dtype={"positions": str})
    early = table[table["position"].between(4, 7)].groupby(["checkpoint", "layer"])[list(RATIOS)].mean()
    for row in by_position[by_position["positions"] == "4-7"].itertuples():
        assert row.mean == pytest.approx(early.loc[(row.checkpoint, row.layer), row.method], abs=2e-6)
    difference = pd.read_csv(finished / "reports/plots/mixing_difference.csv")
    for row in difference.itertuples():
        expected = means.loc[("finetuned", row.layer), row.method] - means.loc[("pretrained", row.layer), row.method]
        assert row.difference == pytest.approx(expected, abs=2e-6)


def test_contributions_are_plain_zarr_for_every_captured_document(finished: Path) -> None:
    for checkpoint in ("pretrained", "finetuned"):
        for document in ("test/3", "text/0"):
            tokens = read_matrix(checkpoint, document, "attention").shape[1]
            for path in contributions_folder(checkpoint, document).glob("*.zarr"):
                array = zarr.open_array(path, mode="r")
                assert array.metadata.zarr_format == 3
                assert not array.compressors
            for method in ("attention", "alti", "globenc", "attention_rollout", "value_zeroing_rollout"):
                matrix = read_matrix(checkpoint, document, method)
                assert matrix.shape == (3, tokens, tokens)
                assert matrix.dtype == np.float32
                np.testing.assert_allclose(matrix.sum(-1), 1, atol=1e-5)
            heads = read_matrix(checkpoint, document, "attention_heads")
            assert heads.shape == (3, 4, tokens, tokens)
            mean = read_matrix(checkpoint, document, "attention")
            np.testing.assert_allclose(heads.astype(float).mean(1), mean, atol=1e-3)


def test_metrics_and_plots_hold_what_the_design_names(finished: Path) -> None:
    metrics = read_metrics("mixing")
    curves = read_plot("mixing", "measure")
    for checkpoint in ("pretrained", "finetuned"):
        assert set(metrics[checkpoint]) == {"attn_w", "attn_n", "attnresln_n", "identity_error"}
        assert 0 < metrics[checkpoint]["identity_error"] < 1e-5
        of_layers = curves[(curves["checkpoint"] == checkpoint) & (curves["method"] == "attn_n")]["mean"]
        assert metrics[checkpoint]["attn_n"] == pytest.approx(of_layers.mean(), abs=2e-6)
    overall = read_plot("mixing_overall", "measure").set_index(["checkpoint", "method"])
    assert set(overall.index) == {(c, m) for c in ("pretrained", "finetuned", "difference") for m in RATIOS}
    difference = metrics["difference"]["attnresln_n"]
    assert difference["mean"] == pytest.approx(overall.loc[("difference", "attnresln_n"), "mean"], abs=2e-6)
    assert difference["ci_low"] < difference["mean"] < difference["ci_high"]
    assert metrics["documents"] == 6
    gain = read_plot("attention_gain", "measure")
    assert gain.groupby("checkpoint")["layer"].apply(list).tolist() == [[1, 2, 3], [1, 2, 3]]
    geometry = pd.read_csv(finished / "reports/plots/geometry.csv")
    assert list(geometry) == ["checkpoint", "layer", "point", "measure", "mean", "ci_low", "ci_high", "documents"]
    assert len(geometry) == 2 * (3 + 6 * 3) * 5
    identity = geometry.query("point == 'word_embedding' and measure in ['own_nearest', 'cka_input']")
    np.testing.assert_allclose(identity["mean"], 1)
    steps = pd.read_csv(finished / "reports/plots/steps.csv")
    assert list(steps) == ["checkpoint", "layer", "step", "measure", "mean", "ci_low", "ci_high"]
    assert len(steps) == 2 * 3 * 7 * 4


def test_a_second_run_and_an_interrupted_one_give_the_same_bytes(
    finished: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small(workspace)
    calls = 0
    original = measure.BatchMeasurer.measures

    def killed(self: Any, documents: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise KeyboardInterrupt
        return original(self, documents)

    with monkeypatch.context() as patch:
        patch.setattr(measure.BatchMeasurer, "measures", killed)
        with pytest.raises(KeyboardInterrupt):
            measure.main(read_parameters())
    assert not (folder / "features/mixing").exists()
    again = 0

    def counted(self: Any, documents: Any) -> Any:
        nonlocal again
        again += 1
        return original(self, documents)

    monkeypatch.setattr(measure.BatchMeasurer, "measures", counted)
    measure.main(read_parameters())
    assert bytes_of(folder) == bytes_of(finished)
    fresh = small(workspace, "fresh")
    calls_so_far, again = again, 0
    measure.main(read_parameters())
    assert calls_so_far == again - 2
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
        measure.main(read_parameters())
    assert bytes_of(folder) == bytes_of(finished)


def test_a_document_drawn_and_captured_is_measured_once(workspace: Workspace) -> None:
    small(workspace, mixing={"documents": 100, "max_length": 6, "gradient_max_length": 6}, capture={"max_length": 30})
    measure.main(read_parameters())
    table = read_ratios().query("document == 'test/3' and checkpoint == 'finetuned' and layer == 1")
    assert len(table) > 6
    assert table["position"].tolist() == list(range(len(table)))
    assert table["in_statistics"].tolist() == [position < 6 for position in table["position"]]


def test_one_checkpoint_and_no_gradient_documents(workspace: Workspace) -> None:
    small(workspace, mixing={"checkpoints": ["finetuned"], "gradient_documents": 0, "methods": ["attn_w", "attn_n"]})
    shutil.rmtree("models/pretrained")
    measure.main(read_parameters())
    assert set(read_metrics("mixing")) == {"finetuned", "documents"}
    assert set(read_metrics("mixing")["finetuned"]) == {"attn_w", "attn_n", "identity_error"}
    assert pd.read_csv("reports/plots/mixing_difference.csv").empty
    assert pd.read_csv("reports/plots/mixing_gradient.csv").empty
    assert set(pd.read_csv("reports/plots/mixing.csv")["method"]) == {"attn_w", "attn_n"}


def test_matrices_are_switched_off_by_parameter(finished: Path, workspace: Workspace) -> None:
    assert set(stored_matrices("finetuned", "test/3")) > {*LAYER_MATRICES, "attention_heads", "value_zeroing_raw_sums"}
    alti = read_matrix("finetuned", "test/3", "alti_rollout")
    small(workspace, mixing={"matrices": ["norm", "alti"], "gradient_documents": 1})
    measure.main(read_parameters())
    assert set(stored_matrices("finetuned", "test/3")) == {"norm", "alti", "alti_rollout"}
    np.testing.assert_array_equal(read_matrix("finetuned", "test/3", "alti_rollout"), alti)
    assert set(read_plot("mixing_gradient", "measure")["method"]) == {*RATIOS, "norm", "alti", "alti_rollout"}
    small(workspace, "none", mixing={"matrices": [], "gradient_documents": 0})
    measure.main(read_parameters())
    assert not (MIXING / "contributions").is_dir() or stored_matrices("finetuned", "test/3") == []


def test_a_text_longer_than_the_model_takes_is_one_clear_error(workspace: Workspace) -> None:
    small(workspace, mixing={"max_length": 65})
    with pytest.raises(InputError, match=r"mixing.max_length: 65 is more than the 64 tokens"):
        measure.main(read_parameters())


def test_token_classes_of_words_pieces_and_punctuation(default_weights: Path) -> None:
    tokenizer = load_tokenizer(default_weights)
    (document,) = chosen_documents(tokenizer, {}, {"text/0": "Unforgettably good, isn't it?"}, 30, 30)
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
    (document,) = chosen_documents(load_tokenizer(default_weights), {"test/0": text}, {}, 16, 99)
    expected = AutoTokenizer.from_pretrained(default_weights)(text, truncation=True, max_length=16)["input_ids"]
    assert document.ids.tolist() == expected
    assert document.counted == 16
    assert not document.captured
