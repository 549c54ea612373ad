"""Measures find planted contributions, do not depend on padding or batches, and match definitions in a real model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import plain_document, tokenized_documents
from family_reference import rolled, run_reference
from torch.nn.functional import gelu, layer_norm, relu

from attnmix.core.errors import InputError
from attnmix.core.names import PREACTIVATION
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.contributions import DocumentMeasurer, contributions, layer_contributions, rows_to_one
from attnmix.measures.identities import IDENTITIES, SAMPLED_IDENTITIES, identity_errors
from attnmix.measures.layers import AfterAttention, Block, LayerPass, slopes
from attnmix.measures.matrices import LAYER_MATRICES, MATRICES
from attnmix.measures.ratios import RATIOS, mixing_ratios
from attnmix.measures.weights import Linear as Affine
from attnmix.measures.weights import Norm, no_norm
from attnmix.models.attention import AttentionCall
from attnmix.models.capture_points import LayerCall, ModuleCall
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.families import family_of
from attnmix.models.loading import load_base

BATCH, HEADS, TOKENS, HIDDEN, WIDTH = 2, 4, 7, 24, 11
NORMS = ["attention_norm", "cross_attention_norm", "feed_forward_norm", "feed_forward_output_norm", "output_norm"]


@pytest.fixture(scope="module")
def block(tiny_bert: Path) -> Block:
    base = load_base(tiny_bert).double().requires_grad_(False)
    return Block(base.encoder.layer[0], family_of(base.config).stacks[0])


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def uniform() -> torch.Tensor:
    return torch.full((BATCH, HEADS, TOKENS, TOKENS), 1 / TOKENS, dtype=torch.float64)


def random_attention() -> torch.Tensor:
    return torch.softmax(torch.randn(BATCH, HEADS, TOKENS, TOKENS, dtype=torch.float64), dim=-1)


def planted_layer(block: Block, attention: torch.Tensor, x: torch.Tensor, value: torch.Tensor) -> LayerPass:
    """Return a layer with planted attention weights: the mask is their logarithm, and queries and keys are 0."""
    heads = value.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    nothing = torch.zeros_like(heads)
    planted = AttentionCall(nothing, nothing, heads, attention.log(), False, 1.0, None, nothing[..., 0])
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
    parts = {"attention": ModuleCall(block.layer.attention, x, (), {})}
    call = LayerCall(1, block.stack, ModuleCall(block.layer, x, (), {}), parts)
    return LayerPass(block, call, planted, x, points)


@pytest.fixture(scope="module")
def value(block: Block, x: torch.Tensor) -> torch.Tensor:
    values: torch.Tensor = block.layer.attention.self.value(x)
    return values


def matrices_of(layer: LayerPass) -> dict[str, torch.Tensor]:
    return layer_contributions(list(LAYER_MATRICES.values()), layer.document(0))


def test_zeroed_values_contribute_nothing(block: Block, x: torch.Tensor, value: torch.Tensor) -> None:
    layer = planted_layer(block, random_attention(), x, torch.zeros_like(value))
    methods = ("attn_n", "attnres_n", "attnresln_n", "enc_n", "layer_n")
    for method, ratio in zip(methods, mixing_ratios(methods, layer), strict=True):
        torch.testing.assert_close(ratio, torch.zeros_like(ratio), atol=1e-9, rtol=0, msg=method)
    raw = matrices_of(layer)
    for method in ("norm", "value_zeroing"):
        assert float(raw[method].abs().max()) < 1e-15
    for method in ("alti", "globenc"):
        torch.testing.assert_close(rows_to_one(raw[method]), torch.eye(TOKENS).double())
    assert contributions(MATRICES, [raw] * 2)["value_zeroing"].isnan().all()


def test_contributions_do_not_depend_on_block_size(
    block: Block, x: torch.Tensor, value: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = planted_layer(block, random_attention(), x, value)
    whole = matrices_of(layer)
    monkeypatch.setattr("attnmix.measures.contributions.CHUNK_NUMBERS", 3 * TOKENS * 40)
    for method, matrix in matrices_of(layer).items():
        torch.testing.assert_close(matrix, whole[method])


def test_wrong_part_violates_identities(block: Block, x: torch.Tensor, value: torch.Tensor) -> None:
    layer = planted_layer(block, uniform(), x, value)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)

    def errors(layer: LayerPass, **wrong: torch.Tensor) -> dict[str, torch.Tensor]:
        layer = replace(layer, features={**layer.features, **wrong})
        return dict(zip(IDENTITIES, identity_errors(layer, mask).T, strict=True))

    checked = ("attention_rows", "attention_output", "attention_residual", "attention_norm")
    for name in (*checked, "feed_forward", "layer_output"):
        assert float(errors(layer)[name].max()) < 1e-12, name
    for name in ("attention_output", "attention_norm", "layer_output", PREACTIVATION):
        wrong = errors(layer, **{name: layer.features[name] * 1.01})
        assert float(wrong["feed_forward" if name == PREACTIVATION else name].min()) > 1e-4, name
    doubled = replace(layer, attention=replace(layer.attention, log_sums=layer.attention.log_sums - 0.1))
    rows = errors(doubled)["attention_rows"]
    torch.testing.assert_close(rows, torch.full_like(rows, float(np.exp(0.1) - 1)))
    whole, sampled = identity_errors(layer, mask), identity_errors(layer, mask, [text == 1 for text in range(BATCH)])
    is_sampled = torch.tensor([name in SAMPLED_IDENTITIES for name in IDENTITIES])
    expected = whole.masked_fill(is_sampled & (torch.arange(BATCH) != 1).unsqueeze(1), torch.nan)
    torch.testing.assert_close(sampled, expected, equal_nan=True)
    # Values outside the mask are ignored.
    layer.features["attention_output"][:, -1] = 100
    mask[:, -1] = False
    assert float(identity_errors(layer, mask).nan_to_num().max()) < 1e-12


def test_padding_and_batch_size_do_not_change_measures(tiny_bert: Path) -> None:
    measurer = BatchMeasurer(load_base(tiny_bert), list(RATIOS), 0)
    generator = np.random.default_rng(0)
    lengths = (3, 9, 20, 33, 40, 41, 50, 64)
    documents = [plain_document(generator.integers(5, 30, length)) for length in lengths]
    for alone, other in zip(documents, measurer.measures(documents), strict=True):
        (single,) = measurer.measures([alone])
        np.testing.assert_allclose(other.ratios, single.ratios, atol=1e-5)
        np.testing.assert_allclose(other.to_first, single.to_first, atol=1e-5)
        for name, array in single.statistics.items():
            np.testing.assert_allclose(other.statistics[name], array, atol=1e-5, rtol=1e-5, err_msg=name)
        only = measurer.ratios([alone])[:, :, 0].transpose(0, 1).numpy()
        np.testing.assert_allclose(only, single.ratios, atol=1e-6)


def with_nan(base: Any) -> None:
    base.encoder.layer[1].attention.output.dense.weight.data[0, 0] = torch.nan


def scaled(base: Any) -> None:
    base.encoder.layer[2].attention.output.dense.register_forward_hook(lambda _module, _inputs, output: output * 1.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_nan, r"the ratios of text/0 in layer 2 contain NaN or infinite values"),
        (scaled, r"the identity attention_output fails in layer 3 of text/0 .*0\.0"),
        (lambda base: base.set_attn_implementation("sdpa"), "layer 1 did not call the attention function"),
    ],
)
def test_incompatible_model_is_one_error(tiny_bert: Path, change: Any, message: str) -> None:
    base = load_base(tiny_bert)
    change(base)
    with pytest.raises(InputError, match=message):
        BatchMeasurer(base, list(RATIOS), 0).measures([plain_document(range(5, 14))])


def test_default_model_measures_match_explicit_sums(default_weights: Path) -> None:
    text = "Time flies, unforgettably so."
    (document,) = tokenized_documents(load_tokenizer(default_weights), {"text/0": text}, 64)
    base = load_base(default_weights)
    (measures,) = BatchMeasurer(base, list(RATIOS), base.config.pad_token_id).measures([document])
    matrices = DocumentMeasurer(base, [], list(MATRICES)).contributions(document.ids)
    layers = run_reference("bert", base, document.ids.tolist()).layers
    expected = [[layer.ratios()[method] for layer in layers] for method in RATIOS]
    np.testing.assert_allclose(measures.ratios, expected, atol=1e-5, rtol=0)
    contributed = [layer.contributions() for layer in layers]
    true = {name: np.stack([layer[name] for layer in contributed]) for name in LAYER_MATRICES}
    true |= {f"{name}_rollout": rolled(true[name]) for name in LAYER_MATRICES if f"{name}_rollout" in MATRICES}
    true["attention_rollout"] = rolled((true["attention"] + np.eye(len(document))) / 2)
    assert set(matrices) == set(true)
    # Rows of Value Zeroing with a sum below 1e-4 before normalisation are NaN.
    baselines = {"value_zeroing": 0, "value_zeroing_without_bias": 1}  # in multiples of b_V
    defined = {}
    for name, multiple in baselines.items():
        sums = np.stack([layer.value_zeroing(multiple * layer.value_bias).sum(-1) for layer in layers])
        defined[name] = sums >= 1e-4
        assert matrices[name][~defined[name]].isnan().all()
    for method, array in true.items():
        rows = defined.get(method, np.ones(array.shape[:2], bool))
        np.testing.assert_allclose(matrices[method].numpy()[rows], array[rows], atol=1e-5, rtol=1e-5, err_msg=method)


@pytest.mark.parametrize(
    ("activation", "at_zero"), [(gelu, 0.5), (relu, 0.5), (torch.tanh, 1.0), (torch.sigmoid, 0.25), (torch.exp, 1.0)]
)
def test_slopes_are_integrated_gradients_from_zero(activation: Any, at_zero: float) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.cat([torch.randn(20, generator=generator), torch.zeros(2)]).double()
    actual = slopes(activation, before, activation(before))
    steps = (torch.arange(4000).double() + 0.5) / 4000
    path = (steps.unsqueeze(-1) * before[:20]).requires_grad_()
    (gradients,) = torch.autograd.grad(activation(path).sum(), path)
    torch.testing.assert_close(actual[:20], gradients.mean(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(actual[20:], torch.full((2,), at_zero).double(), rtol=0, atol=1e-6)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(seed: int) -> Norm:
    gamma, beta = 1 + random(HIDDEN, seed=seed) / 4, random(HIDDEN, seed=seed + 1)
    return Norm(lambda x: layer_norm(x, (HIDDEN,), gamma, beta, 1e-5), gamma, beta, 1e-5, centred=True)


@pytest.mark.parametrize("present", ["none", "post", "cross", "pre", "sandwich", "all"])
def test_parts_of_sources_and_biases_sum_to_module_outputs(present: str) -> None:
    kept = {
        "post": ["attention_norm", "output_norm"],
        "cross": ["attention_norm", "cross_attention_norm", "output_norm"],
        "pre": ["feed_forward_norm"],
        "sandwich": ["feed_forward_norm", "feed_forward_output_norm"],
        "all": NORMS,
    }.get(present, [])
    named = {name: norm(3 * index) if name in kept else no_norm(random(1)) for index, name in enumerate(NORMS)}
    up = Affine(random(HIDDEN, WIDTH, seed=20), random(WIDTH, seed=21))
    down = Affine(random(WIDTH, HIDDEN, seed=22), random(HIDDEN, seed=23))
    block: Any = SimpleNamespace(**named, stack=SimpleNamespace(gated=()), feed_forward=([up], torch.sigmoid, down))
    own, others, constant = (random(TOKENS, HIDDEN, seed=seed) for seed in (30, 31, 32))
    cross = random(TOKENS, HIDDEN, seed=33) if "cross_attention_norm" in kept else None
    z = named["attention_norm"](own + others + constant)
    if cross is not None:
        z = named["cross_attention_norm"](z + cross)
    before = named["feed_forward_norm"](z) @ up.W + up.b
    true = named["feed_forward_output_norm"](torch.sigmoid(before) @ down.W + down.b)
    rest = AfterAttention(block, own + others + constant, cross, before)
    own_part = rest.stream(own)
    others_part = rest.stream(others)
    remaining_part = rest.stream_with_biases(constant)
    torch.testing.assert_close(own_part + others_part + remaining_part, z)
    added = rest.added(own_part) + rest.added(others_part) + rest.added_with_biases(remaining_part)
    torch.testing.assert_close(added, true)
