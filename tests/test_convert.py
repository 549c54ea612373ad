"""State dicts and adapters are converted to model folders; other files raise an error, and no code is executed."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import peft
import pytest
import torch
from conftest import SHORT, Workspace, plain_logits, write_reviews
from families import write_family
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel

import attnmix
from attnmix.core.errors import InputError
from attnmix.models.convert import convert
from attnmix.models.fetching import fetch_model
from attnmix.models.loading import load_trained
from stages import finetune
from stages.common.parameters import read_parameters

IDS = torch.tensor([[2, 9, 14, 31, 3]])
NAMES = {0: "negative", 1: "positive"}


class CustomClassifier(torch.nn.Module):
    """BERT with a Linear on its pooled vector, under parameter names unknown to transformers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.encoder = BertModel(config)
        self.register_buffer("position_ids", torch.arange(4))
        self.out = torch.nn.Linear(config.hidden_size, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(input_ids=ids)[1])  # type: ignore[no-any-return]  # modules return Any


def custom(like: Path) -> CustomClassifier:
    torch.manual_seed(5)
    return CustomClassifier(BertConfig.from_pretrained(like)).eval()


def test_custom_module_keeps_predictions(tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = custom(tiny_bert)
    torch.save(module.state_dict(), tmp_path / "trained.pt")
    command = ["convert", str(tmp_path / "trained.pt"), "--like", str(tiny_bert), "--to", str(tmp_path / "made")]
    monkeypatch.setattr("sys.argv", [*command, "--classes", *NAMES.values()])
    runpy.run_path(convert.__code__.co_filename, run_name="__main__")
    made = load_trained(tmp_path / "made", NAMES)
    with torch.no_grad():
        torch.testing.assert_close(made(IDS).logits, module(IDS), rtol=0, atol=1e-6)
    assert made.config.id2label == NAMES
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "made", tiny_bert)]
    assert tokenizers[0]("the film was great")["input_ids"] == tokenizers[1]("the film was great")["input_ids"]


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_transformers_classifier_keeps_logits(tmp_path: Path, name: str, parallel: bool) -> None:
    like = write_family(name, tmp_path / name)
    model = AutoModelForSequenceClassification.from_pretrained(like).eval()
    saved = torch.nn.ModuleDict({"module": model}) if parallel else model  # DataParallel adds the prefix `module.`
    torch.save(saved.state_dict(), tmp_path / "trained.pt", _use_new_zipfile_serialization=False)
    convert(tmp_path / "trained.pt", str(like), tmp_path / "made", list(NAMES.values()))
    made = AutoModelForSequenceClassification.from_pretrained(tmp_path / "made").eval()
    with torch.no_grad():
        torch.testing.assert_close(made(IDS).logits, model(IDS).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    "around",
    [
        lambda state: {
            "model_state_dict": state,
            "epoch": 3,
            "optimizer_state_dict": {"state": {}, "param_groups": []},
        },
        lambda state: {"epoch": 3, "model": state, "ema": dict(state)},
        lambda state: {"weights_of_mine": state, "best": 0.9},
        lambda state: {  # a Lightning checkpoint of a module that stores the classifier in an attribute
            "epoch": 1,
            "pytorch-lightning_version": "2.5.0",
            "state_dict": {f"net.{name}": tensor for name, tensor in state.items()},
            "loops": {"fit_loop": {"state_dict": {}}},
            "hyper_parameters": {"lr": 1e-4},
        },
    ],
)
def test_state_dict_in_training_checkpoint_is_read(tiny_bert: Path, tmp_path: Path, around: Any) -> None:
    module = custom(tiny_bert)
    torch.save(around(dict(module.state_dict())), tmp_path / "last.ckpt")
    convert(tmp_path / "last.ckpt", str(tiny_bert), tmp_path / "made", list(NAMES.values()))
    made = load_trained(tmp_path / "made", NAMES)
    with torch.no_grad():
        torch.testing.assert_close(made(IDS).logits, module(IDS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("like", ["empty", "vit"])
def test_invalid_like_model_is_one_error(tiny_bert: Path, tmp_path: Path, like: str) -> None:
    (tmp_path / "empty").mkdir()
    AutoConfig.for_model("vit").save_pretrained(tmp_path / "vit")
    torch.save(custom(tiny_bert).state_dict(), tmp_path / "trained.pt")
    with pytest.raises(InputError, match=rf"^--like: {tmp_path}/{like} cannot be loaded \(\w+: \S"):
        convert(tmp_path / "trained.pt", str(tmp_path / like), tmp_path / "made", list(NAMES.values()))
    assert not (tmp_path / "made").exists()


class Code:
    """An object that creates a folder when pickle loads it, to detect code execution."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("code-ran",)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda state: {name: state[name] for name in state if "pooler" not in name}, r"Missing key\(s\) .*pooler"),
        (lambda state: state | {"lstm.weight": torch.ones(2, 2)}, r"Missing key\(s\) in state_dict: .*classifier"),
        (lambda state: state | {"encoder.extra": torch.ones(2)}, r"Unexpected key\(s\) in state_dict: .*bert\.extra"),
        (lambda state: state | {"out.weight": torch.ones(3, 24)}, "size mismatch for classifier.weight"),
        (
            lambda state: {"student": state, "teacher": state},
            r"it contains 2 state dicts \(student, teacher\); allowed: a",
        ),
        (lambda _state: [torch.ones(2)], r"it contains 0 state dicts \(none\); allowed: a state dict of te"),
        (lambda state: state | {"out.bias": Code()}, "UnpicklingError; allowed: a state dict of te"),
    ],
)
def test_other_files_raise_error_without_executing_code(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(change(dict(custom(tiny_bert).state_dict())), tmp_path / "trained.pt")
    with pytest.raises(InputError, match=expected) as raised:
        convert(tmp_path / "trained.pt", str(tiny_bert), tmp_path / "made", list(NAMES.values()))
    assert "\n" not in str(raised.value)
    assert [each.name for each in tmp_path.iterdir()] == ["trained.pt"]


pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]
TEXT = "the film was very good , time flies ."
CLASSES = {0: "a", 1: "b", 2: "c"}


def write_adapter(base: Path, folder: Path, size: float, **changes: Any) -> tuple[Any, Path]:
    """Write a LoRA adapter with three classes and random B matrices scaled by `size`; return its model and folder."""
    torch.manual_seed(1)
    options = {"num_labels": 3, "ignore_mismatched_sizes": True}
    model = AutoModelForSequenceClassification.from_pretrained(base, **options)
    # The name "classifier" would also match the end of DistilBERT's "pre_classifier".
    targets = ["q_lin", "v_lin"] if "distil" in model.config.model_type else "all-linear"
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=12, target_modules=targets)
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = size * torch.randn(parameter.shape)
    adapted.save_pretrained(folder)
    written = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return adapted.eval(), folder


@pytest.mark.parametrize(
    "name", ["bert", "gpt2", *(pytest.param(name, marks=pytest.mark.families) for name in ("distilbert", "deberta-v2"))]
)
def test_merged_model_matches_adapter(name: str, tmp_path: Path) -> None:
    base = write_family(name, tmp_path / "base")
    adapted, folder = write_adapter(base, tmp_path / "adapter", 0.3)
    fetch_model(str(folder), tmp_path / "merged")
    ids = AutoTokenizer.from_pretrained(base)(TEXT, return_tensors="pt")["input_ids"]
    merged = load_trained(tmp_path / "merged", CLASSES)
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert not [file.name for file in (tmp_path / "merged").iterdir() if "adapter" in file.name]
    # Compare the adapter merged in memory and the adapter loaded by name.
    in_memory = attnmix.load(adapted.merge_and_unload(), attnmix.load(str(folder)).tokenizer)
    merged_ratios, own, without = (
        attnmix.measure(model, [TEXT]).by_layer()["mean"].to_numpy()
        for model in (attnmix.load(str(folder)), in_memory, attnmix.load(str(base)))
    )
    np.testing.assert_allclose(merged_ratios, own, atol=1e-5)
    assert np.abs(merged_ratios - without).max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "remove", "expected"),
    [
        ({"base_model_name_or_path": None}, None, "its adapter_config.json has no base_model_name_or_path"),
        (
            {"base_model_name_or_path": "nowhere/"},
            None,
            "is an adapter of nowhere/: nowhere/ is neither an existing folder",
        ),
        ({"task_type": "CAUSAL_LM"}, None, "is an adapter for CAUSAL_LM; allowed: SEQ_CLS, FEATURE_EXTRACTION"),
        ({"r": 5}, None, "does not fit its base model"),
        ({"target_modules": ["nothing"]}, None, "does not fit its base model"),
        ({}, "adapter_model.safetensors", "has no adapter_model.safetensors; other formats are not loaded"),
    ],
)
def test_unmergeable_adapter_is_one_error(
    changes: dict[str, Any], remove: str | None, expected: str, tmp_path: Path
) -> None:
    base = write_family("bert", tmp_path / "base")
    _, folder = write_adapter(base, tmp_path / "adapter", 0.1, **changes)
    if remove:
        (folder / remove).unlink()
    with pytest.raises(InputError, match=rf"^model\.name: .*{expected}"):
        fetch_model(str(folder), tmp_path / "merged")


@pytest.mark.parametrize("targets", ["all-linear", ["query", "value"]])
def test_fine_tuned_adapter_is_merged_without_other_changes(targets: Any, workspace: Workspace) -> None:
    lora = {"rank": 2, "alpha": 8, "targets": targets}
    folder = workspace(finetune={"epochs": 1, "learning_rate": 1e-2, "max_length": 40, "lora": lora}, **SHORT)
    write_family("bert", folder / "models/pretrained")
    write_reviews(folder / "data/reviews")
    finetune.main(read_parameters())
    before, after = (load_file(folder / f"models/{name}/model.safetensors") for name in ("pretrained", "finetuned"))
    assert set(before) == set(after)
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert {"classifier.weight", "bert.encoder.layer.0.attention.self.query.weight"} <= changed
    assert ("bert.encoder.layer.0.intermediate.dense.weight" in changed) == (targets == "all-linear")
    assert not [name for name in changed if "LayerNorm" in name or "embeddings" in name]
    value = "bert.encoder.layer.1.attention.self.value.weight"
    change = (after[value] - before[value]).double()
    assert torch.linalg.matrix_rank(change, rtol=1e-4) == 2
    logits = plain_logits(folder / "models/finetuned", pd.read_parquet(folder / "data/reviews/test.parquet")["text"])
    predictions = pd.read_parquet(folder / "features/finetune/test.parquet")
    np.testing.assert_allclose(logits.softmax(-1).max(-1).values, predictions["probability"], atol=1e-5)


def test_missing_lora_targets_are_one_error(workspace: Workspace) -> None:
    lora = {"rank": 2, "alpha": 8, "targets": ["q_proj"]}
    folder = workspace(finetune={"epochs": 1, "max_length": 40, "lora": lora}, **SHORT)
    write_family("bert", folder / "models/pretrained")
    write_reviews(folder / "data/reviews")
    with pytest.raises(InputError, match=r"^finetune\.lora\.targets: .*allowed: all-linear, or some of dense, key"):
        finetune.main(read_parameters())
    workspace("other", finetune={"epochs": 0, "lora": lora})
    with pytest.raises(InputError, match="lora requires training; set epochs to 1 or more"):
        read_parameters()
    workspace("third", finetune={"epochs": 1, "frozen_layers": 1, "lora": lora})
    with pytest.raises(InputError, match="set frozen_layers to 0, or remove lora"):
        read_parameters()
