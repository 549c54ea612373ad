"""The gradient reference, geometry, steps and statistics against independent computations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from stages.mixing.geometry import GEOMETRY_MEASURES, geometry
from stages.mixing.gradients import REFERENCES, document_calls, jacobian_norms
from stages.mixing.layers import Block, LayerPass
from stages.mixing.matrices import LAYER_MATRICES, MATRICES
from stages.mixing.ratios import RATIOS
from stages.mixing.statistics import Resampled, resample, spearman_with_depth
from stages.mixing.steps import STEP_MEASURES, step_measures
from stages.mixing.whole_document import DocumentMeasurer
from stages.models.families import family_of
from stages.models.loading import load_base
from stages.ranks import rank_correlation
from stages.sites import STEP_POINTS

IDS = torch.tensor([2, 7, 9, 11, 3])


def autograd_norms(base: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Exact Frobenius norms, row by row with backward passes."""
    words = base.get_input_embeddings()(IDS[None]).detach()

    def outputs(embedded: torch.Tensor) -> torch.Tensor:
        return torch.stack(base(inputs_embeds=embedded, output_hidden_states=True).hidden_states[1:])[:, 0]

    jacobian = torch.autograd.functional.jacobian(outputs, words)[:, :, :, 0]
    found = {"word_embedding": jacobian.square().sum((2, 4)).sqrt()}
    states = base(inputs_embeds=words, output_hidden_states=True).hidden_states
    local = []
    for layer, x in zip(base.encoder.layer, states, strict=False):

        def output(x: torch.Tensor, layer: torch.nn.Module = layer) -> torch.Tensor:
            return layer(x)[0]

        jacobian = torch.autograd.functional.jacobian(output, x.detach())[:, :, 0]
        local.append(jacobian.square().sum((1, 3)).sqrt())
    return found | {"layer_input": torch.stack(local)}


@pytest.mark.parametrize("reference", REFERENCES)
def test_gradient_reference_is_the_jacobians_frobenius_norm(tiny_bert: Path, reference: Any) -> None:
    base = load_base(tiny_bert).double().requires_grad_(False)
    exact = autograd_norms(base)[reference]
    calls = document_calls(base, IDS[None])
    with torch.no_grad():
        torch.testing.assert_close(jacobian_norms(calls, reference, directions=24, seed=0), exact, rtol=1e-6, atol=1e-9)
        # With fewer directions the square is right on average over seeds.
        squares = torch.stack([jacobian_norms(calls, reference, 3, seed).square() for seed in range(100)])
    standard_error = squares.std(0) / 100**0.5
    assert ((squares.mean(0) - exact.square()).abs() < 5 * standard_error + 1e-12).all()


def test_agreement_is_scipys_rank_correlation_with_autograds_derivatives(tiny_bert: Path) -> None:
    base = load_base(tiny_bert)
    measurer = DocumentMeasurer(base, tiny_bert, list(RATIOS), list(LAYER_MATRICES))
    ids = IDS.numpy().astype(np.int32)
    agreement = measurer.agreement(ids, directions=24, seed=0)
    exact = autograd_norms(load_base(tiny_bert).double().requires_grad_(False))
    matrices = measurer.contributions(ids)[0].matrices
    names = [*RATIOS, *MATRICES]
    for place, reference in enumerate(REFERENCES):
        for layer in range(3):
            jacobian = exact[reference][layer].numpy()
            for method in ("attention", "alti", "globenc_rollout"):
                matrix = matrices[method][layer].numpy()
                expected = np.mean([spearmanr(*rows).statistic for rows in zip(matrix, jacobian, strict=True)])
                assert agreement[place, layer, names.index(method)] == pytest.approx(expected)
            mixed = 1 - np.diag(matrices["attention"][layer].numpy())
            expected = spearmanr(mixed, 1 - np.diag(jacobian) / jacobian.sum(1)).statistic
            assert agreement[place, layer, names.index("attn_w")] == pytest.approx(expected)


def test_rank_correlation_agrees_with_scipy_and_is_unknown_without_order() -> None:
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(2, 5, 9))
    first[1], first[3] = 1.0, np.nan
    second[0, :4] = 0.5
    correlations = rank_correlation(first, second)
    for row in (0, 2, 4):
        assert correlations[row] == pytest.approx(spearmanr(first[row], second[row]).statistic)
    assert np.isnan(correlations[[1, 3]]).all()


def test_geometry_agrees_with_explicit_formulas() -> None:
    generator = np.random.default_rng(0)
    x, start, words = generator.normal(size=(3, 6, 9)) + 0.5
    words[4] = words[1]
    ids = np.array([5, 6, 7, 8, 6, 9])
    found = geometry(*(torch.tensor(array) for array in (x, start, words, ids))).numpy()
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    singular = np.linalg.svd(x, compute_uv=False)
    shares = singular / singular.sum()
    near = [
        ids[np.argmax([x[i] @ words[j] / np.linalg.norm(x[i]) / np.linalg.norm(words[j]) for j in range(6)])]
        for i in range(6)
    ]
    centred, other = x - x.mean(0), start - start.mean(0)
    expected = {
        "mean_cosine": np.mean([unit[i] @ unit[j] for i in range(6) for j in range(6) if i != j]),
        "effective_rank": np.exp(-(shares * np.log(shares)).sum()),
        "residual_share": np.linalg.norm(centred) / np.linalg.norm(x),
        "own_nearest": np.mean(near == ids),
        "cka_input": np.linalg.norm(other.T @ centred) ** 2
        / (np.linalg.norm(centred.T @ centred) * np.linalg.norm(other.T @ other)),
    }
    np.testing.assert_allclose(found, [expected[name] for name in GEOMETRY_MEASURES], rtol=1e-9)


def test_geometry_of_planted_clouds() -> None:
    same = torch.ones(4, 6).double()
    apart = torch.eye(6).double()
    ids = torch.arange(6)
    of_same = dict(zip(GEOMETRY_MEASURES, geometry(same, same, same, ids[:4]).tolist(), strict=True))
    of_apart = dict(zip(GEOMETRY_MEASURES, geometry(apart, apart, apart, ids).tolist(), strict=True))
    assert of_same["mean_cosine"] == pytest.approx(1)
    assert of_same["effective_rank"] == pytest.approx(1, abs=1e-5)
    assert of_same["residual_share"] == pytest.approx(0, abs=1e-7)
    assert of_apart["mean_cosine"] == pytest.approx(0)
    assert of_apart["effective_rank"] == pytest.approx(6)
    assert of_apart["own_nearest"] == 1
    assert of_apart["cka_input"] == pytest.approx(1)


def test_steps_follow_the_vector_through_the_layer(tiny_bert: Path) -> None:
    e = torch.eye(3).double()
    points = {
        "attention_heads": e[1:2],
        "attention_output": 2 * e[1:2],
        "attention_residual": e[:1] + 2 * e[1:2],
        "attention_norm": e[:1] + e[1:2],
        "ffn_output": 3 * e[2:],
        "layer_output": e[:1],
    }
    base = load_base(tiny_bert)
    block = Block(base.encoder.layer[0], family_of(base.config).stacks[0])
    nothing: Any = None
    found = step_measures(LayerPass(block, nothing, nothing, e[:1], points))[0].numpy()
    absent = [step for step, row in zip(STEP_POINTS, found, strict=True) if np.isnan(row).any()]
    assert absent == ["cross_attention", "cross_attention_norm"]
    rows = [dict(zip(STEP_MEASURES, row, strict=True)) for row in found]
    steps = dict(zip(STEP_POINTS, rows, strict=True))
    assert steps["output_linear"] == {"cosine_previous": 1, "cosine_input": 0, "distance_previous": 1, "norm": 2}
    assert steps["attention_skip"]["cosine_input"] == pytest.approx(1 / 5**0.5)
    assert steps["attention_norm"]["distance_previous"] == pytest.approx(1)
    assert steps["feed_forward"]["norm"] == pytest.approx(3)
    assert steps["feed_forward"]["cosine_previous"] == 0
    assert steps["ffn_skip"]["cosine_previous"] == pytest.approx(3 / 11**0.5)
    assert steps["ffn_norm"]["cosine_input"] == pytest.approx(1)


def test_bootstrap_resamples_documents_not_tokens() -> None:
    # 10 documents of 1,000 equal tokens each: the interval is as wide as that of 10 numbers.
    generator = np.random.default_rng(0)
    values = generator.normal(size=10)
    counts = np.full((10, 1), 1000.0)
    interval = resample(values[:, None] * 1000, counts, samples=4000, seed=1).interval()
    assert interval.mean[0] == pytest.approx(values.mean())
    standard_error = values.std() / 10**0.5
    assert interval.high[0] - interval.low[0] == pytest.approx(2 * 1.96 * standard_error, rel=0.1)


def test_longer_documents_weigh_more() -> None:
    interval = resample(np.array([[0.0], [90.0]]), np.array([[10.0], [90.0]]), samples=200, seed=0).interval()
    assert interval.mean[0] == pytest.approx(0.9)


def test_the_paired_difference_is_narrower_than_its_parts() -> None:
    generator = np.random.default_rng(3)
    before = generator.normal(size=(30, 1))
    after = before + 0.1 + 0.01 * generator.normal(size=(30, 1))
    one = np.ones((30, 1))
    first, second = (resample(values, one, 1000, 7) for values in (before, after))
    difference = second.minus(first).interval()
    assert difference.low[0] > 0.09
    assert difference.high[0] < 0.11
    assert first.interval().high[0] - first.interval().low[0] > 0.3


def test_spearman_with_depth_counts_ranks_of_layers() -> None:
    samples = np.tile(np.array([[0.1, 0.9], [0.2, 0.5], [0.9, 0.4]]), (50, 1, 1))
    found = spearman_with_depth(Resampled(samples[0], samples))
    np.testing.assert_allclose(found.mean, [1, -1])
    constant = np.full((50, 3, 1), 0.4)
    assert np.isnan(spearman_with_depth(Resampled(constant[0], constant)).mean[0])
