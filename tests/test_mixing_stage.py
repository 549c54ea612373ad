"""The stage `measure`: what it writes, that it is the same every time, and what it refuses."""

from __future__ import annotations

import json
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
from stages.mixing.documents import TOKEN_CLASSES, chosen_documents
from stages.mixing.storage import read_contributions, read_ratios
from stages.mixing.work import Share
from stages.models.loading import load_tokenizer
from stages.parameters import METHODS, read_parameters

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
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_the_tokens_table_has_a_row_for_each_checkpoint_document_position_and_layer(finished: Path) -> None:
    table = read_ratios(finished / "features/mixing")
    assert list(table) == [
        *("checkpoint", "document", "position", "layer"),
        *METHODS,
        *("token", "token_class", "in_statistics"),
    ]
    assert not table.duplicated(["checkpoint", "document", "position", "layer"]).any()
    assert (table[list(METHODS)].dtypes == np.float32).all()
    assert set(table["layer"]) == {1, 2, 3}
    assert {"test/3", "text/0"} <= set(table["document"])
    text = table[(table["document"] == "text/0") & (table["layer"] == 1) & (table["checkpoint"] == "pretrained")]
    assert text["token"].tolist() == ["[CLS]", "time", "flies", "like", "an", "arrow", ".", "[SEP]"]
    assert not text["in_statistics"].any()
    assert set(table["token_class"]) <= set(TOKEN_CLASSES)
    assert not (table["token"] == "[PAD]").any()


def test_mixing_csv_is_the_mean_of_the_rows_in_the_statistics(finished: Path) -> None:
    table = read_ratios(finished / "features/mixing").query("in_statistics")
    plots = pd.read_csv(finished / "reports/plots/mixing.csv")
    assert list(plots) == ["checkpoint", "layer", "method", "mean", "ci_low", "ci_high", "tokens", "documents"]
    assert len(plots) == 2 * 3 * len(METHODS)
    means = table.groupby(["checkpoint", "layer"])[list(METHODS)].mean()
    for row in plots.itertuples():
        assert row.mean == pytest.approx(means.loc[(row.checkpoint, row.layer), row.method], abs=2e-6)
        assert row.ci_low <= row.mean <= row.ci_high
        assert row.documents == 6
        assert row.tokens == len(table) / 6
    by_class = pd.read_csv(finished / "reports/plots/mixing_by_class.csv")
    classes = table.groupby(["checkpoint", "layer", "token_class"])[list(METHODS)].mean()
    for row in by_class.itertuples():
        expected = classes.loc[(row.checkpoint, row.layer, row.token_class), row.method]
        assert row.mean == pytest.approx(expected, abs=2e-6)
    by_position = pd.read_csv(finished / "reports/plots/mixing_by_position.csv", dtype={"positions": str})
    early = table[table["position"].between(4, 7)].groupby(["checkpoint", "layer"])[list(METHODS)].mean()
    for row in by_position[by_position["positions"] == "4-7"].itertuples():
        assert row.mean == pytest.approx(early.loc[(row.checkpoint, row.layer), row.method], abs=2e-6)
    difference = pd.read_csv(finished / "reports/plots/mixing_difference.csv")
    for row in difference.itertuples():
        expected = means.loc[("finetuned", row.layer), row.method] - means.loc[("pretrained", row.layer), row.method]
        assert row.difference == pytest.approx(expected, abs=2e-6)


def test_contributions_are_plain_zarr_for_every_captured_document(finished: Path) -> None:
    root = finished / "features/mixing"
    for checkpoint in ("pretrained", "finetuned"):
        for document in ("test/3", "text/0"):
            folder = root / "contributions" / checkpoint / document.replace("/", "_")
            tokens = read_contributions(checkpoint, document, "attention", root).shape[1]
            for path in folder.glob("*.zarr"):
                array = zarr.open_array(path, mode="r")
                assert array.metadata.zarr_format == 3
                assert not array.compressors
            for method in ("attention", "alti", "globenc", "attention_rollout", "value_zeroing_rollout"):
                matrix = read_contributions(checkpoint, document, method, root)
                assert matrix.shape == (3, tokens, tokens)
                assert matrix.dtype == np.float32
                np.testing.assert_allclose(matrix.sum(-1), 1, atol=1e-5)
            heads = read_contributions(checkpoint, document, "attention_heads", root)
            assert heads.shape == (3, 4, tokens, tokens)
            mean = read_contributions(checkpoint, document, "attention", root)
            np.testing.assert_allclose(heads.astype(float).mean(1), mean, atol=1e-3)


def test_metrics_and_plots_hold_what_the_design_names(finished: Path) -> None:
    metrics = json.loads((finished / "reports/metrics/mixing.json").read_text())
    for checkpoint in ("pretrained", "finetuned"):
        found = metrics[checkpoint]
        assert set(found["mean"]) == set(METHODS)
        assert 0 < found["identity_error"]["attention_output"] < 1e-5
        assert 0 < found["identity_error"]["attention_norm"] < 1e-5
        assert set(found["attention_gain"]) == {"layer_01", "layer_02", "layer_03"}
        assert {"attn_n", "value_zeroing", "alti_rollout"} <= set(found["spearman_with_gradient"])
    assert set(metrics["difference"]) == set(METHODS)
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
    original = measure.Measurer.measures

    def killed(self: Any, documents: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise KeyboardInterrupt
        return original(self, documents)

    with monkeypatch.context() as patch:
        patch.setattr(measure.Measurer, "measures", killed)
        with pytest.raises(KeyboardInterrupt):
            measure.main(read_parameters())
    assert not (folder / "features/mixing").exists()
    again = 0

    def counted(self: Any, documents: Any) -> Any:
        nonlocal again
        again += 1
        return original(self, documents)

    monkeypatch.setattr(measure.Measurer, "measures", counted)
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
    assert Share(0, 2).own([1, 2, 3]) + Share(1, 2).own([1, 2, 3]) == [1, 3, 2]


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
    metrics = json.loads(Path("reports/metrics/mixing.json").read_text())
    assert set(metrics) == {"finetuned"}
    assert "spearman_with_gradient" not in metrics["finetuned"]
    assert pd.read_csv("reports/plots/mixing_difference.csv").empty
    assert pd.read_csv("reports/plots/mixing_gradient.csv").empty
    assert set(pd.read_csv("reports/plots/mixing.csv")["method"]) == {"attn_w", "attn_n"}


def test_a_text_longer_than_the_model_takes_is_one_clear_error(workspace: Workspace) -> None:
    small(workspace, mixing={"max_length": 65})
    with pytest.raises(InputError, match=r"mixing.max_length: 65 is more than the 64 tokens"):
        measure.main(read_parameters())


def test_token_classes_of_words_pieces_and_punctuation(default_weights: Path) -> None:
    tokenizer = load_tokenizer(default_weights)
    (document,) = chosen_documents(tokenizer, {}, {"text/0": "Unforgettably good, isn't it?"}, 30, 30)
    tokens = tokenizer.convert_ids_to_tokens(document.ids.tolist())
    classes = dict(zip(tokens, (TOKEN_CLASSES[number] for number in document.classes), strict=True))
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
