"""`validation.published_parts` computes the same parts as attnmix, and distributes biases as in the DecompX paper."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_tiny_bert
from transformers import AutoConfig, AutoModel

from attnmix.core.errors import InputError
from attnmix.measures.input_parts import PartsReader
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.encoding import padded
from attnmix.models.loading import load_base
from validation import published_parts
from validation.published_parts import OWN_RULES, Configuration, library_summary, summary, with_bias

TEXT = "the film was not very good , it was so dull"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("published_parts") / "bert")


@pytest.fixture(scope="module")
def ids(checkpoint: Path) -> torch.Tensor:
    return torch.tensor(load_tokenizer(checkpoint)(TEXT)["input_ids"])


def in_float64(checkpoint: Path, first_value_bias: float = 1) -> Any:
    """Return the model in float64, with its first b_V multiplied by a factor."""
    base: Any = load_base(checkpoint).double()
    with torch.no_grad():
        base.encoder.layer[0].attention.self.value.bias.mul_(first_value_bias)
    return base


@pytest.mark.parametrize("biases", ["token", "none"])
def test_parts_without_divided_biases_match_library(checkpoint: Path, ids: torch.Tensor, biases: str) -> None:
    base = in_float64(checkpoint, first_value_bias=0)  # the published code assigns this bias to the tokens
    published = summary(published_parts.published_parts(base, ids, Configuration("GeLU_ZO", biases)))
    for actual, expected in zip(library_summary(base, ids, "chord"), published, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", OWN_RULES)
def test_bias_token_matches_library_biases(checkpoint: Path, ids: torch.Tensor, activation: str) -> None:
    base = in_float64(checkpoint, first_value_bias=0)
    parts = PartsReader(base, OWN_RULES[activation]).read(padded([ids.tolist()], 0, base.device))
    levels = published_parts.published_parts(base, ids, Configuration(activation, "token"))
    for number, (_, parts_TJD) in enumerate(levels):
        torch.testing.assert_close(parts["biases"][number], parts_TJD[:, -1].norm(dim=-1), rtol=1e-6, atol=1e-6)
        lengths_TT = parts_TJD[:, :-1].norm(dim=-1)
        torch.testing.assert_close(parts["length"][number], lengths_TT, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", OWN_RULES)
def test_published_parts_sum_to_network_vectors(checkpoint: Path, ids: torch.Tensor, activation: str) -> None:
    levels = published_parts.published_parts(in_float64(checkpoint), ids, Configuration(activation))
    network = AutoModel.from_pretrained(checkpoint).double().eval()
    with torch.no_grad():
        states = network(input_ids=ids[None], output_hidden_states=True).hidden_states
    for (whole_TD, parts_TJD), state in zip(levels, states, strict=True):
        torch.testing.assert_close(whole_TD, state[0])
        torch.testing.assert_close(parts_TJD.sum(1), state[0], rtol=1e-6, atol=1e-6)


def test_bias_is_divided_by_absolute_products() -> None:
    generator = np.random.default_rng(0)
    parts, bias = generator.normal(size=(3, 4, 5)), generator.normal(size=5)
    actual = with_bias(torch.tensor(parts), torch.tensor(bias), "absdot").numpy()
    for token in range(3):
        products = [abs(float(part @ bias)) for part in parts[token]]
        for source, product in enumerate(products):
            expected = parts[token, source] + product / sum(products) * bias
            np.testing.assert_allclose(actual[token, source], expected, rtol=1e-9)


def test_command_prints_both_rules_and_library(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("the film was good\ntime flies like an arrow\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["published_parts", str(checkpoint), str(path), "--max-length", "16"])
    published_parts.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("2 texts, 13 tokens, levels 0 to the last")
    names = [line[:20].strip() for line in lines[1:]]
    for activation, rule in OWN_RULES.items():
        assert names.count(f"{activation}, absdot") == 3
        assert names.count(f"library, {rule}") == 2


def test_other_families_are_refused() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2, vocab_size=10)
    with pytest.raises(InputError, match="defined for BERT, not for gpt2"):
        published_parts.published_parts(AutoModel.from_config(config), torch.tensor([1, 2]), Configuration())
