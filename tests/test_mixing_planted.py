"""Planted cases with answers known beforehand, and what must not change an answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attnmix.core.errors import InputError
from attnmix.core.points import PREACTIVATION
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.contributions import contributions, layer_contributions, rows_to_one
from attnmix.measures.documents import Document
from attnmix.measures.identities import IDENTITIES, identity_errors
from attnmix.measures.layers import Block, LayerPass
from attnmix.measures.matrices import LAYER_MATRICES
from attnmix.measures.ratios import RATIOS, mixing_ratios
from attnmix.models.attention import AttentionCall
from attnmix.models.capture_points import LayerCall, ModuleCall
from attnmix.models.families import family_of
from attnmix.models.loading import load_base

BATCH, HEADS, TOKENS, HIDDEN = 2, 4, 7, 24


@pytest.fixture(scope="module")
def block(tiny_bert: Path) -> Block:
    base = load_base(tiny_bert).double().requires_grad_(False)
    return Block(base.encoder.layer[0], family_of(base.config).stacks[0])


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def attention_of(kind: str, tokens: int = TOKENS) -> torch.Tensor:
    uniform = torch.full((tokens, tokens), 1 / tokens, dtype=torch.float64)
    matrix = {"identity": torch.eye(tokens, dtype=torch.float64), "uniform": uniform}[kind]
    return matrix.expand(BATCH, HEADS, tokens, tokens)


def ratios_of(block: Block, attention: torch.Tensor, x: torch.Tensor, value: torch.Tensor) -> dict[str, torch.Tensor]:
    return mixing_ratios(list(RATIOS), seen(block, attention, x, value))


def seen(block: Block, attention: torch.Tensor, x: torch.Tensor, value: torch.Tensor) -> LayerPass:
    """A layer that attends as planted: scores of nothing but a mask, the logarithm of the weights."""
    heads = value.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    nothing = torch.zeros_like(heads)
    planted = AttentionCall(
        query=nothing,
        key=nothing,
        value=heads,
        mask=attention.log(),
        causal=False,
        scaling=1.0,
        softcap=None,
        log_sums=nothing[..., 0],
    )
    output = (attention @ heads).transpose(1, 2).flatten(-2) @ block.output.W + block.output.b
    with torch.no_grad():
        normed = block.layer.attention.output.LayerNorm(x + output)
        before = block.layer.intermediate.dense(normed)
        added = block.layer.output.dense(block.layer.intermediate.intermediate_act_fn(before))
        points = {
            PREACTIVATION: before,
            "attention_output": output,
            "attention_residual": x + output,
            "attention_norm": normed,
            "ffn_output": added,
            "layer_output": block.layer.output.LayerNorm(normed + added),
        }
    call = LayerCall(1, block.stack, ModuleCall(block.layer, x, (), {}), {})
    return LayerPass(block, call, planted, x, points)


@pytest.fixture(scope="module")
def value(block: Block, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = block.layer.attention.self.value(x)
    return found


def test_zeroed_values_contribute_nothing(block: Block, x: torch.Tensor, value: torch.Tensor) -> None:
    attention = torch.softmax(torch.randn(BATCH, HEADS, TOKENS, TOKENS, dtype=torch.float64), dim=-1)
    nothing = torch.zeros_like(value)
    ratio = ratios_of(block, attention, x, nothing)
    for method in ("attn_n", "attnres_n", "attnresln_n", "enc_n", "layer_n"):
        torch.testing.assert_close(ratio[method], torch.zeros_like(ratio[method]), atol=1e-9, rtol=0)
    layer = seen(block, attention, x, nothing).document(0)
    raw = layer_contributions(list(LAYER_MATRICES.values()), layer)
    for method in ("norm", "value_zeroing"):
        assert float(raw[method].abs().max()) < 1e-15
    for method in ("alti", "globenc"):
        torch.testing.assert_close(rows_to_one(raw[method]), torch.eye(TOKENS).double())
    all_layers = contributions(list(LAYER_MATRICES.values()), [raw] * 2)
    assert all_layers["value_zeroing"].isnan().all()


def test_one_zeroed_value_empties_its_column_only(block: Block, x: torch.Tensor, value: torch.Tensor) -> None:
    changed = value.clone()
    changed[:, 2] = 0
    layer = seen(block, attention_of("uniform"), x, changed).document(0)
    raw = layer_contributions(list(LAYER_MATRICES.values()), layer)
    for method in ("norm", "value_zeroing"):
        empty = raw[method].amax(0) < 1e-15
        assert empty.tolist() == [column == 2 for column in range(TOKENS)]


def test_contributions_do_not_depend_on_the_block_size(
    block: Block, x: torch.Tensor, value: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = torch.softmax(torch.randn(BATCH, HEADS, TOKENS, TOKENS, dtype=torch.float64), dim=-1)
    layer = seen(block, attention, x, value).document(0)
    whole = layer_contributions(list(LAYER_MATRICES.values()), layer)
    monkeypatch.setattr("attnmix.measures.contributions.BLOCK_NUMBERS", 3 * TOKENS * 40)
    for method, matrix in layer_contributions(list(LAYER_MATRICES.values()), layer).items():
        torch.testing.assert_close(matrix, whole[method])


def test_a_wrong_part_breaks_the_identities(block: Block, x: torch.Tensor, value: torch.Tensor) -> None:
    layer = seen(block, attention_of("uniform"), x, value)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    named = dict(zip(IDENTITIES, identity_errors(layer, mask).T, strict=True))
    checked = ("attention_rows", "attention_output", "attention_residual", "attention_norm")
    for name in (*checked, "feed_forward", "layer_output"):
        assert float(named[name].max()) < 1e-12, name
    for name in ("attention_output", "attention_norm", "layer_output"):
        features = {**layer.features, name: layer.features[name] * 1.01}
        wrong = dict(zip(IDENTITIES, identity_errors(replace(layer, features=features), mask).T, strict=True))
        assert float(wrong[name].min()) > 1e-4, name
    features = {**layer.features, PREACTIVATION: layer.features[PREACTIVATION] * 1.01}
    wrong = dict(zip(IDENTITIES, identity_errors(replace(layer, features=features), mask).T, strict=True))
    assert float(wrong["feed_forward"].min()) > 1e-4
    doubled = replace(layer, attention=replace(layer.attention, log_sums=layer.attention.log_sums - 0.1))
    rows = dict(zip(IDENTITIES, identity_errors(doubled, mask).T, strict=True))["attention_rows"]
    torch.testing.assert_close(rows, torch.full_like(rows, float(np.exp(0.1) - 1)))
    # What lies outside the mask does not count.
    layer.features["attention_output"][:, -1] = 100
    mask[:, -1] = False
    assert float(identity_errors(layer, mask).nan_to_num().max()) < 1e-12


def document(length: int, seed: int, vocabulary: int) -> Document:
    ids = np.random.default_rng(seed).integers(5, vocabulary, length).astype(np.int32)
    numbers = np.arange(length, dtype=np.int32)
    return Document(f"text/{seed}", ids, np.zeros(length, dtype=np.int8), length, captured=False, words=numbers)


def test_padding_and_batch_size_change_nothing(tiny_bert: Path) -> None:
    base = load_base(tiny_bert)
    measurer = BatchMeasurer(base, tiny_bert, list(RATIOS), 0)
    documents = [document(length, length, 30) for length in (3, 9, 20, 33, 40, 41, 50, 64)]
    together = list(measurer.measures(documents))
    for place, alone in enumerate(documents):
        (single,) = measurer.measures([alone])
        other = together[place]
        np.testing.assert_allclose(other.ratios, single.ratios, atol=1e-5)
        np.testing.assert_allclose(other.to_first, single.to_first, atol=1e-5)
        for name, array in single.counted.items():
            np.testing.assert_allclose(other.counted[name], array, atol=1e-5, rtol=1e-5, err_msg=name)
        only = measurer.ratios([alone])[:, :, 0].transpose(0, 1).numpy()
        np.testing.assert_allclose(only, single.ratios, atol=1e-6)


def test_weights_with_nan_are_one_clear_error(tiny_bert: Path) -> None:
    base = load_base(tiny_bert)
    with torch.no_grad():
        base.encoder.layer[1].attention.output.dense.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"layer 2 of text/3 holds NaN or infinite values"):
        list(BatchMeasurer(base, tiny_bert, list(RATIOS), 0).measures([document(9, 3, 30)]))


def test_a_model_that_mixes_in_another_way_stops_at_the_identity(tiny_bert: Path) -> None:
    base = load_base(tiny_bert)
    base.encoder.layer[2].attention.output.dense.register_forward_hook(lambda _module, _inputs, output: output * 1.01)
    with pytest.raises(InputError, match=r"attention_output of layer 3 is not what its name says in text/3 .*0\.0"):
        list(BatchMeasurer(base, tiny_bert, list(RATIOS), 0).measures([document(9, 3, 30)]))


def test_a_model_whose_attention_cannot_be_had_is_one_clear_error(tiny_bert: Path) -> None:
    base = load_base(tiny_bert)
    base.set_attn_implementation("sdpa")
    with pytest.raises(InputError, match="layer 1 did not call the library's attention function"):
        list(BatchMeasurer(base, tiny_bert, list(RATIOS), 0).measures([document(9, 3, 30)]))
