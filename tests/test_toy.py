"""All measures of a BERT with manually set weights match values that can be derived by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Workspace, plain_document, run_tokenized, toy_reviews
from families import write_family
from transformers import AutoModel, BertConfig, BertModel

from attnmix.core.store.runs import Run
from attnmix.measures.batches import BatchMeasurer, DocumentMeasures
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.controls import SAME_PASS
from attnmix.measures.derivatives import derivative_norms, document_chains
from attnmix.measures.matrices import MATRICES
from attnmix.measures.mixing_tables import TABLE_COLUMNS
from attnmix.measures.ratios import RATIOS
from attnmix.models.attention import OBSERVED
from stages import measure

HIDDEN = 4
TOY = Path("toy")
ONE_TEXT = [control for control in SAME_PASS if control != "corpus_value"]
"""The controls that need no other text."""
X1, X2, X3 = 1, 2, 3
"""Token IDs."""
VECTORS = {X1: (1.0, -1.0, 0.0, 0.0), X2: (0.0, 0.0, 1.0, -1.0), X3: (1.0, 0.0, -1.0, 0.0)}
"""Inputs of the first layer, centred and of equal length, so that `GAMMA` reverts the norm of the embedding."""
GAMMA = 0.5**0.5


def toy(layers: int = 1) -> Any:
    """Return a model with one head, W_V = W_O = I, uniform attention, no biases or positions, and a zero FFN."""
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": 1, "intermediate_size": HIDDEN}
    config = BertConfig(vocab_size=8, max_position_embeddings=32, layer_norm_eps=1e-12, **sizes)
    config._attn_implementation = OBSERVED
    base = BertModel(config).eval().requires_grad_(False)
    for name, parameter in base.named_parameters():
        parameter.fill_(float(name.endswith("LayerNorm.weight")))
    base.embeddings.LayerNorm.weight.fill_(GAMMA)
    for token, vector in VECTORS.items():
        base.embeddings.word_embeddings.weight[token] = torch.tensor(vector)
    for layer in base.encoder.layer:
        for linear in (layer.attention.self.value, layer.attention.output.dense):
            linear.weight.copy_(torch.eye(HIDDEN))
    return base


def measured(base: Any, *ids: int) -> DocumentMeasures:
    """Return the measures of a text of these tokens."""
    (measures,) = BatchMeasurer(base, list(RATIOS), 0).measures([plain_document(ids)])
    return measures


def ratios(base: Any, *ids: int) -> dict[str, Any]:
    """Return the first layer's ratios `[tokens]` by method."""
    return dict(zip(RATIOS, measured(base, *ids).ratios[:, 0], strict=True))


def controls(base: Any, *ids: int) -> dict[str, dict[str, float]]:
    """Return the first layer's mean ratios by control and method."""
    counted = measured(base, *ids).statistics
    return {control: dict(zip(RATIOS, counted[control][0] / len(ids), strict=True)) for control in ONE_TEXT}


def matrices(base: Any, *ids: int) -> dict[str, Any]:
    """Return the matrices and rollouts `[layers, tokens, tokens]` by name."""
    measurer = DocumentMeasurer(base, list(RATIOS), list(MATRICES))
    actual = measurer.contributions(np.array(ids, np.int32))
    return {name: matrix.numpy() for name, matrix in actual.items()}


def both_rows(own: float, other: float) -> list[list[float]]:
    """Return the matrix of two tokens that both have the contributions `own` and `other`."""
    return [[own, other], [other, own]]


def randomised(seed: int = 0) -> Any:
    """Return a toy model with random weights, except for the position embeddings, which remain 0."""
    base = toy(layers=3)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in base.named_parameters():
        if "position" not in name:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return base


def test_ratios_of_two_orthogonal_tokens() -> None:
    # F_ij = x_j / 2, and F_ii = x_i / 2, or 3/2 x_i with the skip connection. The inputs of both norms are centred.
    expected = {"attn_w": 0.5, "attnres_w": 0.25, "attn_n": 0.5, "attnres_n": 0.25, "attnresln_n": 0.25, "enc_n": 0.25}
    expected["layer_n"] = 0.25  # the feed-forward network is zero
    actual = ratios(toy(), X1, X2)
    assert set(expected) <= set(RATIOS)
    for method, value in expected.items():
        np.testing.assert_allclose(actual[method], value, atol=1e-6, err_msg=method)


def test_matrices_of_two_orthogonal_tokens() -> None:
    actual = matrices(toy(), X1, X2)
    np.testing.assert_allclose(actual["attention"][0], both_rows(0.5, 0.5), atol=1e-6)
    np.testing.assert_allclose(actual["norm"][0], both_rows(0.5**0.5, 0.5**0.5), atol=1e-6)
    for method in ("alti", "globenc"):
        np.testing.assert_allclose(actual[method][0], both_rows(0.75, 0.25), atol=1e-6, err_msg=method)
    # In units of x_1 / 2 and x_2 / 2, the first output is (3, 1) before the norm, (2, 1) without value 1, and (3, 0)
    # without value 2. The direction changes less without the token's own value, so the other token's share is larger.
    own, other = 1 - 7 / (10 * 5) ** 0.5, 1 - 3 / 10**0.5
    assert own / (own + other) == pytest.approx(0.1638, abs=5e-5)
    expected = both_rows(own / (own + other), other / (own + other))
    np.testing.assert_allclose(actual["value_zeroing"][0], expected, atol=1e-6)


def test_rollouts_over_six_layers() -> None:
    # [[3, 1], [1, 3]] / 4 has the eigenvalues 1 and 1/2.
    actual = matrices(toy(layers=6), X1, X2)
    own = (1 + 0.5**6) / 2
    assert own == pytest.approx(0.5078, abs=5e-5)
    for method in ("attention_rollout", "alti_rollout", "globenc_rollout"):
        np.testing.assert_allclose(actual[method][-1], both_rows(own, 1 - own), atol=1e-5, err_msg=method)


def test_derivatives_of_two_orthogonal_tokens() -> None:
    # The derivatives of both norms remove the mean and the direction of the output. Two of four dimensions of
    # weight * I remain, divided by the standard deviation of 3/2 x_1 + 1/2 x_2, which is sqrt(5)/2.
    base = toy().double()
    chains = document_chains(base, torch.tensor([[X1, X2]]))
    with torch.no_grad():
        actual = derivative_norms(chains, "layer_input", directions=HIDDEN, seed=0).entries_LTT
    own, other = (weight * 2**0.5 / (5**0.5 / 2) for weight in (1.5, 0.5))
    assert (own, other) == pytest.approx((1.8974, 0.6325), abs=5e-5)
    torch.testing.assert_close(actual[0], torch.tensor(both_rows(own, other)).double(), atol=1e-6, rtol=0)


def test_attention_to_oneself_mixes_nothing() -> None:
    base = toy()
    attention = base.encoder.layer[0].attention.self
    for linear in (attention.query, attention.key):
        linear.weight.copy_(40 * torch.eye(HIDDEN))  # q_i k_j is 0 for another token and 3200 for the token itself
    for method, ratio in ratios(base, X1, X2).items():
        assert (ratio == 0).all(), method


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 16])
def test_equal_tokens_under_uniform_attention(tokens: int) -> None:
    actual = ratios(toy(), *[X1] * tokens)
    others = (tokens - 1) / tokens
    for method in ("attn_w", "attn_n"):
        np.testing.assert_allclose(actual[method], others, atol=1e-6)
    for method in ("attnres_w", "attnres_n", "attnresln_n", "enc_n"):
        np.testing.assert_allclose(actual[method], others / 2, atol=1e-6, err_msg=method)


def test_inverse_scaling_of_values_and_output_changes_nothing() -> None:
    base, scaled = randomised(), randomised()
    for layer in scaled.encoder.layer:
        for parameter in layer.attention.self.value.parameters():
            parameter.mul_(8)
        layer.attention.output.dense.weight.div_(8)
    before, after = (measured(model, X1, X2, X3, X1) for model in (base, scaled))
    np.testing.assert_allclose(after.ratios, before.ratios, atol=1e-6)
    for control in ONE_TEXT:
        np.testing.assert_allclose(after.statistics[control], before.statistics[control], atol=1e-5)
    assert not np.allclose(before.ratios, measured(toy(layers=3), X1, X2, X3, X1).ratios, atol=0.01)


def test_without_positions_ratios_follow_their_tokens() -> None:
    base = randomised()
    ids = np.array([X1, X2, X3, X2, 4])
    order = np.array([3, 0, 4, 2, 1])
    before, after = measured(base, *ids), measured(base, *ids[order])
    np.testing.assert_allclose(after.ratios, before.ratios[..., order], atol=1e-6)
    for control in ONE_TEXT:
        np.testing.assert_allclose(after.statistics[control], before.statistics[control], atol=1e-5)
    assert not np.allclose(after.ratios, before.ratios, atol=0.01)


def test_value_bias_alone_mixes_until_subtracted() -> None:
    base = toy()
    value = base.encoder.layer[0].attention.self.value
    value.weight.zero_()
    value.bias.copy_(torch.tensor([0.3, 0.1, -0.7, 0.9]))
    base.encoder.layer[0].attention.output.dense.bias.copy_(torch.tensor([7.0, 0.1, 0.3, -2.0]))
    # No token depends on another, but half of the attention output is attributed to another token.
    np.testing.assert_allclose(ratios(base, X1, X2)["attn_n"], 0.5, atol=1e-6)
    actual = controls(base, X1, X2)
    assert actual["text_mean_value"]["attn_n"] == pytest.approx(0.5, abs=1e-6)
    for method in ("attn_n", "attnres_n", "attnresln_n", "enc_n"):
        assert actual["without_value_bias"][method] == 0, method
    assert actual["without_value_bias"]["attn_w"] == 0.5


def test_equal_values_are_their_own_control() -> None:
    of_control = controls(randomised(), X2, X2, X2)["text_mean_value"]
    for method, expected in ratios(randomised(), X2, X2, X2).items():
        assert of_control[method] == pytest.approx(expected.mean(), abs=1e-6)


def test_text_mean_value_of_opposite_tokens_is_zero() -> None:
    base = toy()
    base.embeddings.word_embeddings.weight[4] = -torch.tensor(VECTORS[X1])
    actual = controls(base, X1, 4)
    np.testing.assert_allclose(ratios(base, X1, 4)["attn_n"], 0.5, atol=1e-6)
    assert actual["text_mean_value"]["attnres_n"] == 0
    assert actual["without_value_bias"]["attn_n"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("tokens", [1, 2])
def test_short_texts_have_nan_only_where_undefined(workspace: Workspace, tokens: int) -> None:
    mixing = {"documents": 4, "gradient_documents": 2, "gradient_max_length": 9}
    workspace(measure=mixing, capture={"documents": [], "texts": [" film" * tokens], "max_length": 30})
    Path("data/reviews").mkdir(parents=True)
    toy_reviews(8, 0).assign(text=" film" * tokens).to_parquet("data/reviews/test.parquet", index=False)
    for seed, checkpoint in enumerate(("pretrained", "finetuned")):
        folder = write_family("gpt2", Path("models") / checkpoint, seed)
        base = AutoModel.from_pretrained(folder)
        with torch.no_grad():
            base.wpe.weight.zero_()
        base.save_pretrained(folder)
    run_tokenized(measure)
    run = Run(Path())
    ratios_of_tokens = run.ratios()
    assert ratios_of_tokens["position"].max() == tokens - 1
    assert ratios_of_tokens["token"].nunique() == 1
    assert {path.stem for path in run.tables.rglob("*.csv")} == set(TABLE_COLUMNS)
    for name in TABLE_COLUMNS.keys() - {"geometry"}:  # in `geometry`, each measure has different missing values
        table = run.table(f"measure/{name}")
        values = table[[column for column in ("mean", "ci_low", "ci_high", "ratio_minus_control") if column in table]]
        is_undefined = pd.Series(False, index=table.index)
        if "tokens_of" in table:
            is_undefined = (table["tokens_of"] == "without_first") & (tokens == 1)
            assert values[is_undefined].isna().any(axis=1).all()
        if "quantity" in table:
            is_undefined = table["quantity"] == "agreement"  # a correlation over equal tokens
            if tokens == 1:
                is_undefined |= table["quantity"] == "coherence"
        if "control" in table:
            is_undefined = table["checkpoint"] == "random"
        assert not values[~is_undefined].isna().any(axis=None), name
