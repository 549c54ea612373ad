"""State dicts of classifiers become folders that `model.name` takes; anything else is one error, and no code is run."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_family
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel

from attnmix.core.errors import InputError
from attnmix.models.convert import convert
from attnmix.models.loading import load_trained

IDS = torch.tensor([[2, 9, 14, 31, 3]])
NAMES = {0: "negative", 1: "positive"}


class CustomClassifier(torch.nn.Module):
    """BERT and a Linear on its pooled vector, under names that the library does not know."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.encoder = BertModel(config)
        self.register_buffer("position_ids", torch.arange(4))
        self.out = torch.nn.Linear(config.hidden_size, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(input_ids=ids)[1])  # type: ignore[no-any-return]  # a module gives Any


def custom(like: Path) -> CustomClassifier:
    torch.manual_seed(5)
    return CustomClassifier(BertConfig.from_pretrained(like)).eval()


def test_a_custom_module_classifies_as_it_did(tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_librarys_own_classifier_keeps_its_logits(tmp_path: Path, name: str, parallel: bool) -> None:
    like = write_family(name, tmp_path / name)
    model = AutoModelForSequenceClassification.from_pretrained(like).eval()
    saved = torch.nn.ModuleDict({"module": model}) if parallel else model  # as DataParallel names its parts
    torch.save(saved.state_dict(), tmp_path / "trained.pt", _use_new_zipfile_serialization=False)
    convert(tmp_path / "trained.pt", str(like), tmp_path / "made", list(NAMES.values()))
    made = AutoModelForSequenceClassification.from_pretrained(tmp_path / "made").eval()
    with torch.no_grad():
        torch.testing.assert_close(made(IDS).logits, model(IDS).logits, rtol=0, atol=0)


class Code:
    """A pickle of it makes a folder when it is loaded as pickles are."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("code-ran",)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda state: {name: state[name] for name in state if "pooler" not in name}, r"Missing key\(s\) .*pooler"),
        (lambda state: state | {"lstm.weight": torch.ones(2, 2)}, r"Missing key\(s\) in state_dict: .*classifier"),
        (lambda state: state | {"encoder.extra": torch.ones(2)}, r"Unexpected key\(s\) in state_dict: .*bert\.extra"),
        (lambda state: state | {"out.weight": torch.ones(3, 24)}, "size mismatch for classifier.weight"),
        (lambda state: {"epoch": 3, "model": state}, "Missing key"),
        (lambda _state: [torch.ones(2)], "AttributeError; allowed: a state dict"),
        (
            lambda state: state | {"out.bias": Code()},
            "UnpicklingError; allowed: a state dict, which holds te",
        ),
    ],
)
def test_any_other_file_is_one_error_and_no_code_in_it_is_run(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(change(dict(custom(tiny_bert).state_dict())), tmp_path / "trained.pt")
    with pytest.raises(InputError, match=expected) as raised:
        convert(tmp_path / "trained.pt", str(tiny_bert), tmp_path / "made", list(NAMES.values()))
    assert "\n" not in str(raised.value)
    assert [each.name for each in tmp_path.iterdir()] == ["trained.pt"]
