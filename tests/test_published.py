"""The protocol of the published table is reproduced with a tiny model: pairs, masks, token counts and both gains."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_tiny_bert
from family_reference import NAMES, ReferenceLayer, read
from transformers import AutoModel

from attnmix.core.errors import InputError
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.loading import load_base
from validation import published

TEXTS = (
    "[CLS] the film was very good . [SEP] the plot was so dull , it and the music [SEP]",
    "[CLS] time flies [SEP] like an arrow [SEP]",
    "[CLS] fine [SEP] cold [SEP]",
)
TOKENS = [text.split() for text in TEXTS]
METHODS = ("attn_w", "attn_n", "attnres_n")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("published") / "bert", layers=2)


def records(folder: Path) -> Path:
    """Write the tokens of the texts into a file that `published.read_pairs` can read, and return its path."""
    path = folder / "texts.json"
    path.write_text(json.dumps([{"tokens": tokens} for tokens in TOKENS]), encoding="utf-8")
    return path


def test_segments_and_masks_match_published_script(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    texts = published.read_pairs(records(tmp_path), tokenizer, 992, 128)
    random.seed(0)  # the published script uses the global generator, in the order of the texts
    for text, masked, tokens in zip(texts, published.masked(texts, tokenizer), TOKENS, strict=True):
        assert text.ids == tokenizer.convert_tokens_to_ids(tokens)
        first = tokens.index("[SEP]")
        assert text.segments == [0] * (first + 1) + [1] * (len(tokens) - first - 1)
        candidates = [i for i, token in enumerate(tokens) if token not in ("[CLS]", "[SEP]")]
        drawn = random.sample(candidates, max(1, int(0.12 * len(candidates))))
        expected = [tokenizer.mask_token_id if i in drawn else token for i, token in enumerate(text.ids)]
        assert masked.ids == expected
        assert masked.segments == text.segments


def test_ratios_match_explicit_sums_with_segments(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer, base = load_tokenizer(checkpoint), load_base(checkpoint)
    texts = published.masked(published.read_pairs(records(tmp_path), tokenizer, 992, 128), tokenizer)
    actual = published.measure(base, checkpoint, 0, METHODS, texts, batch_tokens=4096)
    assert actual.shape == (3, 2, sum(map(len, TOKENS)))
    model = AutoModel.from_pretrained(checkpoint).double().eval()
    by_length = sorted(texts, key=lambda text: len(text.ids))
    for layer in (0, 1):
        expected = np.concatenate([explicit(model, text, layer) for text in by_length], axis=-1)
        np.testing.assert_allclose(actual[:, layer], expected, atol=2e-5)
    one_segment = [text._replace(segments=[0] * len(text.ids)) for text in texts]
    without = published.measure(base, checkpoint, 0, ("attn_w",), one_segment, 4096)
    assert np.abs(without - actual[:1]).max() > 1e-3


def explicit(model: torch.nn.Module, text: published.Text, layer: int) -> np.ndarray:
    """Return attn_w, attn_n and attnres_n `[3, T]` of a text of T tokens, computed by sums over sources."""
    ids, segments = torch.tensor([text.ids]), torch.tensor([text.segments])
    with torch.no_grad():
        states = model(input_ids=ids, token_type_ids=segments, output_hidden_states=True).hidden_states
    parameters = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    weights = read("bert", model.config, parameters, NAMES["bert"]["layer"].format(number=layer), NAMES["bert"])
    visible = np.ones((len(text.ids), len(text.ids)), dtype=bool)
    ratios = ReferenceLayer(weights, states[layer][0].numpy(), visible, None).ratios()
    return np.stack([ratios[method] for method in METHODS])


def test_gains_are_matrix_norms(checkpoint: Path) -> None:
    actual = published.gains(load_base(checkpoint), checkpoint)
    model = AutoModel.from_pretrained(checkpoint).double()
    for number, layer in enumerate(model.encoder.layer):
        W_V, b_V = (each.detach().numpy() for each in layer.attention.self.value.parameters())
        W_O, b_O = (each.detach().numpy() for each in layer.attention.output.dense.parameters())
        size = len(b_V)
        first = np.block([[W_V.T, np.zeros((size, 1))], [b_V, np.ones(1)]])
        second = np.block([[W_O.T, b_O[:, None]], [np.zeros(size), np.ones(1)]])  # the published script places b_O here
        affine = np.concatenate([W_V.T @ W_O.T, (b_V @ W_O.T + b_O)[None]])
        for name, matrix in (("expansion_rate", first @ second), ("attention_gain", affine)):
            expected = np.linalg.norm(matrix) / np.sqrt(size + 1)
            assert actual[name][number] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("protocol", "tokens"), [("published", 15), ("plain", 13)])
def test_command_splits_texts_into_segments_and_prints_all_rows(
    checkpoint: Path, tmp_path: Path, protocol: str, tokens: int, monkeypatch: Any, capsys: Any
) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("the film was good and so fine\ngood music\n", encoding="utf-8")
    options = ["--protocol", protocol, "--max-length", "32"]
    monkeypatch.setattr(sys, "argv", ["published", str(checkpoint), str(path), *options])
    published.main()
    output = capsys.readouterr().out
    assert f"2 texts, {tokens} tokens, 2 layers, {protocol}" in output
    assert all(name in output for name in (*published.PUBLISHED, "attention_gain", "expansion_rate"))


def test_invalid_records_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    with pytest.raises(InputError, match="a record has 19 tokens, more than --max-length 16"):
        published.read_pairs(records(tmp_path), tokenizer, 992, 16)
    path = tmp_path / "none.json"
    path.write_text(json.dumps([{"tokens": ["[CLS]", "fine"]}]), encoding="utf-8")
    with pytest.raises(InputError, match=r"no \[SEP\]"):
        published.read_pairs(path, tokenizer, 992, 128)
