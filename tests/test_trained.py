"""A trained classifier is used without fine-tuning, with its head matched to the class names of the data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import SHORT, STAGES, Workspace, digest, run_stages, toy_reviews, write_reviews, write_tiny_bert
from families import EACH_FAMILY, tiny_folder
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from attnmix.core.errors import InputError
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.loading import load_classifier, load_trained
from stages import download, finetune
from stages.common.parameters import read_parameters

CAPTURE = {"documents": [0], "texts": ["time flies like an arrow"], "max_length": 40}
NAMES = {0: "negative", 1: "positive"}


def run_in(folder: Path, *stages: str, **changes: dict[str, Any]) -> Path:
    """Run stages on reviews with named classes in a new folder, and return the folder."""
    folder.mkdir()
    toy_reviews(60, 0).drop(columns="label").rename(columns={"label_name": "label"}).to_csv(folder / "reviews.csv")
    return run_stages(folder, *stages, **{"capture": CAPTURE} | changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with fine-tuning, up to the stage `measure`."""
    root = tmp_path_factory.mktemp("trained")
    write_tiny_bert(root / "bert", layers=2)
    recipe = {"epochs": 2, "learning_rate": 5e-3, "max_length": 40}
    return run_in(root / "run", *STAGES[:6], model={"name": "../bert"}, finetune=recipe)


def test_finetuned_folder_without_epochs_reproduces_its_run(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "models/finetuned", tmp_path / "copied")
    model = {"name": "../copied", "base": str(trained.parent / "bert")}
    again = run_in(tmp_path / "again", *STAGES[:6], model=model, finetune={"epochs": 0, "max_length": 40})
    outputs = ("models/finetuned", "features/capture", "features/inspect", "features/measure", "data/reviews")
    assert {name: digest(again / name) for name in outputs} == {name: digest(trained / name) for name in outputs}
    metrics = "reports/metrics/finetune.json"
    expected = json.loads((trained / metrics).read_text()) | {"best_epoch": 0}
    assert json.loads((again / metrics).read_text()) == expected
    for name in ("mixing", "mixing_controls", "derivatives", "geometry"):
        csv = f"reports/plots/measure/{name}.csv"
        assert (again / csv).read_bytes() == (trained / csv).read_bytes(), name


@pytest.mark.long  # all stages
def test_run_without_base_has_single_checkpoint(trained: Path, tmp_path: Path) -> None:
    changes = {
        "model": {"name": str(trained / "models/finetuned")},
        "finetune": {"epochs": 0, "max_length": 40},
        "capture": CAPTURE | {"points": ["embedding_output", "attention_norm", "layer_output"]},
        "measure": {"matrices": ["attention"]},
    }
    folder = run_in(tmp_path / "alone", *STAGES, **changes)
    assert digest(folder / "models/finetuned") == digest(trained / "models/finetuned")
    assert set(pd.read_csv(folder / "reports/plots/measure/mixing.csv")["checkpoint"]) == {"finetuned"}
    (row,) = pd.read_csv(folder / "reports/plots/finetune/finetune.csv").itertuples(index=False)
    assert (row.step, row.epoch, row.split) == (0, 0, "validation")
    words = " ".join((folder / "reports/index.html").read_text(encoding="utf-8").split())
    assert "without fine-tuning, tested on" in words
    assert "No model was fine-tuned (finetune.epochs: 0)" in words
    assert "fine-tuned on" not in words


@pytest.fixture
def prepared(workspace: Workspace, tiny_bert: Path) -> Path:
    """Return the checkpoint folder of a run that uses the tiny BERT classifier without training."""
    folder = workspace(finetune={"epochs": 0, "max_length": 40}, **SHORT)
    write_reviews(folder / "data/reviews")
    return shutil.copytree(tiny_bert, folder / "models/pretrained")


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_head_is_reordered_by_class_names(name: str) -> None:
    folder = tiny_folder(name)
    plain, turned = load_trained(folder, NAMES), load_trained(folder, {0: "POSITIVE", 1: "negative"})
    ids = load_tokenizer(folder)("time flies", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = plain(ids).logits
        torch.testing.assert_close(turned(ids).logits, logits[:, [1, 0]], rtol=0, atol=1e-6)
    assert abs(float(logits[0, 0] - logits[0, 1])) > 1e-4


def test_unknown_class_names_keep_their_order_with_warning(prepared: Path, caplog: pytest.LogCaptureFixture) -> None:
    finetune.main(read_parameters())
    warning = "their names differ from those of the data: LABEL_0 for negative, LABEL_1 for positive"
    assert [message for message in caplog.messages if message.endswith(warning)]
    kept = Path("models/finetuned")
    assert (kept / "model.safetensors").read_bytes() == (prepared / "model.safetensors").read_bytes()
    assert load_classifier(kept).config.id2label == NAMES


def write_classifier(folder: Path, **changes: Any) -> None:
    """Replace a checkpoint by a random classifier with a changed configuration."""
    BertForSequenceClassification(BertConfig.from_pretrained(folder, **changes)).save_pretrained(folder)


def write_headless(folder: Path) -> None:
    """Remove the classification head of a checkpoint."""
    AutoModelForSequenceClassification.from_pretrained(folder).base_model.save_pretrained(folder)


THREE = {"id2label": {0: "bad", 1: "so so", 2: "good"}}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            write_headless,
            r"has no trained classification head \(its weights lack classifier\.bias, classifier\.weight\)",
        ),
        (
            lambda folder: write_classifier(folder, **THREE),
            r"with 3 classes \(bad, so so, good\); .*: 2 classes \(negative, positive\)",
        ),
        (
            lambda folder: write_classifier(folder, problem_type="multi_label_classification"),
            "is trained for multi_label_classification with 2 classes",
        ),
        (
            lambda folder: write_classifier(folder, num_labels=1),
            r"is trained for regression with 1 classes \(LABEL_0\); .*: 2 classes",
        ),
    ],
)
def test_unusable_classifier_is_one_error(prepared: Path, change: Any, expected: str) -> None:
    change(prepared)
    with pytest.raises(InputError, match=rf"^model\.name: models/pretrained .*{expected}"):
        finetune.main(read_parameters())
    assert not Path("models/finetuned").exists()


def test_head_with_other_classes_is_replaced_in_training(prepared: Path, workspace: Workspace) -> None:
    workspace(finetune={"epochs": 1, "max_length": 40}, **SHORT)
    write_classifier(prepared, **THREE)
    finetune.main(read_parameters())
    assert load_classifier(Path("models/finetuned")).config.id2label == NAMES


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("./layers", r"^model\.base: its num_hidden_layers is 3, but that of model\.name is 2; choose models"),
        ("./tokenizer", r"^model\.base: its tokenizer encodes 'the .*' differently from that of model\.name"),
        ("./nowhere", r"^model\.base: \./nowhere is neither an existing folder nor a hub identifier"),
        ("./cut", r"^model\.base: \./cut: the model cannot be loaded \("),
    ],
)
def test_incomparable_base_is_one_error(workspace: Workspace, base: str, expected: str) -> None:
    folder = workspace(dataset={"name": "reviews.csv"}, model={"name": "own", "base": base}, **SHORT)
    toy_reviews(40, 0).to_csv("reviews.csv")
    for name, layers in (("own", 2), ("layers", 3), ("tokenizer", 2), ("cut", 2)):
        write_tiny_bert(folder / name, layers=layers)
    tokenizer = folder / "tokenizer/tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"film"', '"movie"'))
    (folder / "cut/model.safetensors").write_bytes(b"cut")
    with pytest.raises(InputError, match=expected):
        download.main(read_parameters())
