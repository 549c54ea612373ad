"""State dicts of classifiers become folders that `model.name` takes; what is none is one error, and no code is run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, write_parameters, write_tiny_roberta
from stage_process import run_to_its_end
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel

from stages.errors import InputError
from stages.models.convert import convert, main
from stages.models.trained import load_trained
from stages.parameters import ModelParameters

IDS = torch.tensor([[2, 9, 14, 31, 3]])
NAMES = {0: "negative", 1: "positive"}


class OfOnesOwn(torch.nn.Module):
    """BERT and a Linear on its pooled vector, under names that the library does not know."""

    def __init__(self, config: BertConfig, classes: int = 2) -> None:
        super().__init__()
        self.bert = BertModel(config)
        self.register_buffer("position_ids", torch.arange(4))
        self.out = torch.nn.Linear(config.hidden_size, classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.bert(input_ids=ids)[1])  # type: ignore[no-any-return]  # a module gives Any


def own(like: Path, classes: int = 2) -> OfOnesOwn:
    torch.manual_seed(5)
    return OfOnesOwn(BertConfig.from_pretrained(like), classes).eval()


def of_several_gpus(module: torch.nn.Module) -> torch.nn.Module:
    """With the names that DataParallel gives."""
    return torch.nn.ModuleDict({"module": module})


@pytest.mark.parametrize("wrap", [lambda module: module, of_several_gpus], ids=["alone", "on several GPUs"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_module_of_ones_own_classifies_as_it_did(
    tiny_bert: Path, tmp_path: Path, wrap: Callable[[torch.nn.Module], torch.nn.Module], zipped: bool
) -> None:
    module = own(tiny_bert)
    torch.save(wrap(module).state_dict(), tmp_path / "trained.pth", _use_new_zipfile_serialization=zipped)
    folder = tmp_path / "made"
    main([str(tmp_path / "trained.pth"), "--like", str(tiny_bert), "--to", str(folder), "--classes", *NAMES.values()])
    made = load_trained(folder, NAMES)
    with torch.no_grad():
        torch.testing.assert_close(made(IDS).logits, module(IDS), rtol=0, atol=1e-6)
    assert made.config.id2label == NAMES
    assert (folder / "tokenizer.json").read_bytes() == (tiny_bert / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("write", [None, write_tiny_roberta], ids=["bert", "roberta"])
def test_the_librarys_own_classifier_is_taken_by_its_names(
    tiny_bert: Path, tmp_path: Path, write: Callable[[Path], Path] | None
) -> None:
    like = write(tmp_path / "like") if write else tiny_bert
    model = AutoModelForSequenceClassification.from_pretrained(like).eval()
    state = model.state_dict() | {f"{model.base_model_prefix}.embeddings.position_ids": torch.arange(4)}
    torch.save(state, tmp_path / "trained.pt")
    convert(tmp_path / "trained.pt", ModelParameters(name=str(like)), tmp_path / "made")
    made = AutoModelForSequenceClassification.from_pretrained(tmp_path / "made").eval()
    with torch.no_grad():
        torch.testing.assert_close(made(IDS).logits, model(IDS).logits, rtol=0, atol=0)


def test_a_head_of_three_classes_keeps_them(tiny_bert: Path, tmp_path: Path) -> None:
    torch.save(own(tiny_bert, classes=3).state_dict(), tmp_path / "trained.pt")
    like = ModelParameters(name=str(tiny_bert))
    convert(tmp_path / "trained.pt", like, tmp_path / "made")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "made").config.num_labels == 3
    with pytest.raises(InputError, match=r"^--classes: 2 names, and .*trained\.pt tells 3 classes; one name for each"):
        convert(tmp_path / "trained.pt", like, tmp_path / "other", ["negative", "positive"])


def without(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if name not in key}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda state: without(state, "pooler"),
            r"it lacks 2 of its tensors \(bert\.pooler\.dense\.bias, bert\.pooler",
        ),
        (lambda state: without(state, "out."), r"it lacks 2 of its tensors \(classifier\.bias, classifier\.weight\)"),
        (
            lambda state: state | {"lstm.weight": torch.ones(2, 2)},
            r"it lacks 2 .*classifier\.bias",
        ),
        (
            lambda state: state | {"bert.extra": torch.ones(2)},
            r"it has, and the model has not, 1 of its tensors \(bert\.extra\)",
        ),
        (
            lambda state: {key: value[:5] if "word_embeddings" in key else value for key, value in state.items()},
            r"it has in another shape 1 of its tensors \(bert\.embeddings\.word_embeddings\.weight\)",
        ),
        (lambda state: {"epoch": 3, "model": state}, r"holds no state dict, tensors by name, but epoch, model; save"),
        (lambda _state: [torch.ones(2)], r"holds no state dict, tensors by name, but list; save"),
    ],
)
def test_what_is_not_the_state_of_such_a_classifier_is_one_error(
    tiny_bert: Path, tmp_path: Path, change: Callable[[Any], Any], expected: str
) -> None:
    torch.save(change(dict(own(tiny_bert).state_dict())), tmp_path / "trained.pt")
    with pytest.raises(InputError, match=expected) as raised:
        convert(tmp_path / "trained.pt", ModelParameters(name=str(tiny_bert)), tmp_path / "made")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "made").exists()


class Code:
    """A pickle of it makes a folder when it is loaded as pickles are."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("code-ran",)


def test_code_in_a_file_is_not_run_and_is_one_line(tiny_bert: Path, tmp_path: Path) -> None:
    write_parameters(tmp_path)
    torch.save({"bert.embeddings.word_embeddings.weight": Code()}, tmp_path / "trained.pth")
    command = [sys.executable, "-m", "stages.models.convert", "trained.pth", "--like", str(tiny_bert), "--to", "made"]
    run = run_to_its_end(command, tmp_path, {"PYTHONPATH": str(REPOSITORY)})
    assert run.returncode == 1
    assert run.stderr.startswith("error: trained.pth: it holds code (posix.mkdir), which is not run; allowed: what")
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "code-ran").exists()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, r"trained\.pt cannot be read: .*No such file"),
        (b"", r"trained\.pt cannot be read: "),
        (b"garbage" * 10, r"trained\.pt: torch\.save did not write it; allowed: what torch\.save wrote"),
        (b"PK\x03\x04", r"trained\.pt cannot be read: "),
    ],
)
def test_a_file_that_is_none_of_torch_is_one_error(
    tiny_bert: Path, tmp_path: Path, content: bytes | None, expected: str
) -> None:
    if content is not None:
        (tmp_path / "trained.pt").write_bytes(content)
    with pytest.raises(InputError, match=expected):
        convert(tmp_path / "trained.pt", ModelParameters(name=str(tiny_bert)), tmp_path / "made")


def test_a_folder_that_is_there_and_a_model_that_is_not_are_one_error(tiny_bert: Path, tmp_path: Path) -> None:
    torch.save(own(tiny_bert).state_dict(), tmp_path / "trained.pt")
    with pytest.raises(InputError, match=r"^--to: .* is there already; name another folder"):
        convert(tmp_path / "trained.pt", ModelParameters(name=str(tiny_bert)), tmp_path)
    with pytest.raises(InputError, match=r"^--like: there is no folder \./nowhere"):
        convert(tmp_path / "trained.pt", ModelParameters(name="./nowhere"), tmp_path / "made")
