"""Geometry, steps and statistics match independent computations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from scipy.stats import spearmanr

from attnmix.core.names import STEP_MEASURES, STEP_POINTS
from attnmix.core.statistics import Draws, Resampled, Sums, rank_correlation, resample, spearman_with_depth
from attnmix.measures.controls import CorpusValues
from attnmix.measures.documents import CLASSES, POSITIONS, Document, position_groups
from attnmix.measures.geometry import GEOMETRY_MEASURES, Cloud, Words, geometry, step_measures
from attnmix.measures.layers import Block, LayerPass
from attnmix.measures.micro_batches import MicroBatch
from attnmix.measures.mixing_tables import TABLE_COLUMNS, Mean, MeanTables, true_minus_control
from attnmix.models.families import family_of
from attnmix.models.loading import load_base


def test_rank_correlation_matches_scipy() -> None:
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(2, 5, 9))
    first[1], first[3] = 1.0, np.nan
    second[0, :4] = 0.5
    correlations = rank_correlation(first, second)
    for row in (0, 2, 4):
        assert correlations[row] == pytest.approx(spearmanr(first[row], second[row]).statistic)
    assert np.isnan(correlations[[1, 3]]).all()


def measured(x: Any, start: Any, words: Any, ids: Any) -> dict[str, float]:
    """Return the values of `GEOMETRY_MEASURES` by name."""
    x, start, words = (torch.as_tensor(array) for array in (x, start, words))
    values = geometry(Cloud(x), Cloud(start), Words(words, np.asarray(ids, np.int32)))
    return dict(zip(GEOMETRY_MEASURES, values.tolist(), strict=True))


def unbiased_hsic(x: Any, y: Any) -> float:
    """Return HSIC_1 of Song et al. (2012), computed by loops over pairs of tokens."""

    def products(vectors: Any) -> Any:
        """Return the inner products of different vectors, with 0 on the diagonal."""
        return np.array([[a @ b if i != j else 0.0 for j, b in enumerate(vectors)] for i, a in enumerate(vectors)])

    n = len(x)
    k = products(x)
    m = products(y)
    pairs = sum(k[i, j] * m[j, i] for i in range(n) for j in range(n))
    ones = np.ones(n)
    rest = k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (ones @ k @ m @ ones)
    return float((pairs + rest) / (n * (n - 3)))


@pytest.mark.parametrize("tokens", [4, 6, 9, 10, 25])
def test_geometry_matches_explicit_formulas(tokens: int) -> None:
    generator = np.random.default_rng(tokens)
    x, start, words = generator.normal(size=(3, tokens, 9)) + 0.5
    start += 0.5 * x
    ids = np.arange(tokens) + 5
    words[3], ids[3] = words[1], ids[1]
    x[2] = words[2] + 0.01 * x[2]
    actual = measured(x, start, words, ids)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    everyone = range(tokens)
    centred = x - x.mean(0)
    singular = np.linalg.svd(centred, compute_uv=False)[: min(tokens - 1, 9)]
    shares = singular / singular.sum()
    nearest = []  # ID of the nearest word embedding of each vector
    for i in everyone:
        cosines = [x[i] @ words[j] / np.linalg.norm(x[i]) / np.linalg.norm(words[j]) for j in everyone]
        nearest.append(ids[np.argmax(cosines)])
    expected = {
        "mean_cosine": np.mean([unit[i] @ unit[j] for i in everyone for j in everyone if i != j]),
        "effective_rank": np.exp(-(shares * np.log(shares)).sum()),
        "effective_rank_bound": min(tokens - 1, 9),
        "residual_share": np.linalg.norm(centred) / np.linalg.norm(x),
        "own_nearest": np.mean(nearest == ids),
        "cka_input": unbiased_hsic(x, start) / np.sqrt(unbiased_hsic(x, x) * unbiased_hsic(start, start)),
    }
    assert expected["own_nearest"] > 0
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize("widths", [(7, 12), (12, 7), (30, 40), (40, 7)])
def test_cka_of_clouds_with_different_widths(widths: tuple[int, int]) -> None:
    generator = np.random.default_rng(1)
    hidden = generator.normal(size=(20, 5))
    x, start = (hidden @ generator.normal(size=(5, width)) + generator.normal(size=(20, width)) for width in widths)
    expected = unbiased_hsic(x, start) / np.sqrt(unbiased_hsic(x, x) * unbiased_hsic(start, start))
    actual = geometry(Cloud(torch.tensor(x)), Cloud(torch.tensor(start)), None)[GEOMETRY_MEASURES.index("cka_input")]
    assert float(actual) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_undefined_geometry_of_equal_tokens_is_nan(tokens: int) -> None:
    same = torch.full((tokens, 6), 0.1)
    other = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(0))
    actual = measured(same, other, same, torch.zeros(tokens, dtype=torch.long))
    assert actual["residual_share"] == pytest.approx(0, abs=1e-12)
    assert actual["own_nearest"] == 1
    assert actual["effective_rank_bound"] == tokens - 1
    assert np.isnan(actual["effective_rank"])
    assert np.isnan(actual["cka_input"])
    assert np.isnan(actual["mean_cosine"]) if tokens == 1 else actual["mean_cosine"] == pytest.approx(1)
    assert np.isnan(measured(other[:3], other[:3], other[:3], torch.arange(len(other[:3])))["cka_input"])


def test_cka_with_itself_is_one_and_line_has_rank_one() -> None:
    cloud = torch.randn(30, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert measured(cloud, cloud, cloud, torch.arange(30))["cka_input"] == 1
    line = torch.tensor([[5.0, 1, 0], [5, 2, 0], [5, 4, 0], [5, 4, 0]])  # the last point is repeated
    for part in (line, line[:2]):
        rank = measured(part, part, part, torch.arange(len(part)))["effective_rank"]
        assert rank == pytest.approx(1, abs=1e-12)


def test_steps_follow_vector_through_layer(tiny_bert: Path) -> None:
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
    unused: Any = (None, None)
    block = Block(base.encoder.layer[0], family_of(base.config).stacks[0])
    rows = step_measures(LayerPass(block, *unused, e[:1], points))[0].numpy()
    steps = pd.DataFrame(rows, index=list(STEP_POINTS), columns=list(STEP_MEASURES))
    assert steps.index[steps.isna().any(axis=1)].tolist() == ["cross_attention", "cross_attention_norm"]
    expected = {
        ("output_linear", "cosine_previous"): 1,
        ("output_linear", "cosine_input"): 0,
        ("output_linear", "distance_previous"): 1,
        ("output_linear", "norm"): 2,
        ("attention_skip", "cosine_input"): 1 / 5**0.5,
        ("attention_norm", "distance_previous"): 1,
        ("feed_forward", "norm"): 3,
        ("feed_forward", "cosine_previous"): 0,
        ("ffn_skip", "cosine_previous"): 3 / 11**0.5,
        ("ffn_norm", "cosine_input"): 1,
    }
    for cell, value in expected.items():
        assert steps.loc[cell] == pytest.approx(value), cell


@pytest.mark.parametrize("documents", [4, 8, 40])
def test_intervals_of_few_documents_have_nominal_coverage(documents: int) -> None:
    values = np.random.default_rng(0).normal(size=(documents, 3000))  # 3,000 trials
    actual = resample(values, np.ones((documents, 1)), 500, 0)
    interval = actual.interval()
    assert ((interval.low <= 0) & (interval.high >= 0)).mean() == pytest.approx(0.95, abs=0.02)


def test_interval_counts_documents_not_tokens() -> None:
    values = np.random.default_rng(0).normal(size=(10, 3))
    short = resample(values, np.ones((10, 1)), 200, 0)
    long = resample(64 * values, np.full((10, 1), 64.0), 200, 0)
    np.testing.assert_allclose(long.interval(), short.interval())


def test_one_document_has_no_interval() -> None:
    # The first cell has twenty texts, and the second a single text.
    sums, counts = np.tile([[3.0, 0.0], [5.0, 0.0]], (10, 1)), np.tile([1.0, 0.0], (20, 1))
    sums[0, 1] = 4.0
    counts[0, 1] = 1.0
    actual = resample(sums, counts, 100, 0)
    for each in (actual.interval(), actual.simultaneous()):
        assert np.isfinite([each.low[0], each.high[0]]).all()
        assert np.isnan([each.low[1], each.high[1]]).all()
    assert actual.mean.tolist() == [4.0, 4.0]


def test_spearman_with_depth_uses_layer_ranks() -> None:
    samples = np.tile(np.array([[0.1, 0.9], [0.2, 0.5], [0.9, 0.4]]), (50, 1, 1))
    actual = spearman_with_depth(Resampled(samples[0], samples, np.full((3, 2), 9.0)))
    np.testing.assert_allclose(actual.mean, [1, -1])
    constant = np.full((50, 3, 1), 0.4)
    assert np.isnan(spearman_with_depth(Resampled(constant[0], constant, np.full((3, 1), 9.0))).mean[0])


@pytest.mark.parametrize("documents", [8, 20, 40])
def test_simultaneous_intervals_keep_family_error_rate(documents: int) -> None:
    # A family consists of 42 independent or correlated cells without any effect. No intervals are computed for fewer
    # than 20 texts.
    generator = np.random.default_rng(0)
    for shared in (0.0, 0.5):
        alarms = 0
        for trial in range(400):
            own, common = generator.normal(size=(documents, 42)), generator.normal(size=(documents, 1))
            values = np.sqrt(1 - shared) * own + np.sqrt(shared) * common
            values *= 10.0 ** (np.arange(42) % 6)  # the scale of a cell must not matter
            actual = resample(values, np.ones((documents, 1)), 300, trial).simultaneous()
            assert np.isnan(actual.low).all() == np.isnan(actual.high).all() == (documents < 20)
            alarms += bool(((actual.low > 0) | (actual.high < 0)).any())
        assert 0.02 * (documents >= 20) <= alarms / 400 < 0.09


def test_simultaneous_intervals_use_documents_per_cell() -> None:
    # The first cell has 40 texts, and the second 20. Both intervals have the same confidence level. An interval uses a
    # quantile of Student's t distribution, with the degrees of freedom of its cell.
    values, counts = np.random.default_rng(1).normal(size=(40, 2)), np.ones((40, 2))
    counts[20:, 1] = values[20:, 1] = 0
    actual = resample(values, counts, 4000, 0)
    every, number = actual.simultaneous(), np.array([40, 20])
    level = stats.t.cdf((every.high - every.mean) / actual.samples.std(0) / np.sqrt(number / (number - 1)), number - 1)
    assert level[0] == pytest.approx(level[1])
    assert level[0] == pytest.approx((1 + 0.95**0.5) / 2, abs=0.003)  # two independent cells


def test_simultaneous_intervals_of_constant_cells() -> None:
    generator = np.random.default_rng(0)
    values = np.stack([generator.normal(size=50), np.full(50, 0.3)], axis=1)
    actual = resample(values, np.ones((50, 1)), 4000, 0)
    every, each = actual.simultaneous(), actual.interval()
    assert every.high[0] - every.low[0] == pytest.approx(each.high[0] - each.low[0], rel=0.05)
    assert np.isnan([every.low[1], every.high[1]]).all()
    constant = resample(values[:, 1:], np.ones((50, 1)), 100, 0).simultaneous()
    assert constant.mean == pytest.approx(0.3)
    assert np.isnan([constant.low, constant.high]).all()


def test_block_draws_match_all_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    sums, counts = generator.uniform(size=(9, 2, 3)), generator.integers(0, 4, (9, 1, 3)).astype(float)
    together = resample(sums, counts, 50, 7)
    weights = np.random.default_rng(7).multinomial(9, np.full(9, 1 / 9), size=50)
    expected = np.einsum("sd,dab->sab", weights, sums) / np.einsum("sd,dab->sab", weights, counts)
    np.testing.assert_allclose(together.samples, expected)
    monkeypatch.setattr("attnmix.core.statistics.BLOCK_DRAWS", 20)  # two samples
    draws = Draws(9, 50, 7)
    for _ in range(2):
        actual = draws.resample(map(Sums, np.split(sums, [4, 6]), np.split(counts, [4, 6])))
        for one, other in zip(actual, together, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


def test_control_is_paired_with_ratio_of_same_documents() -> None:
    generator, cells = np.random.default_rng(0), np.array([3.0, 9, 5, 4, 12])[:, None, None]
    labels = {"control": ["control"], "layer": [1, 2], "method": ["attn_w", "attn_n"]}
    sums = {name: generator.uniform(size=(5, 2, 2)) * cells for name in ("pretrained", "finetuned", "random")}
    # The control is the ratio minus a constant, so the paired difference is this constant in every sample.
    corpora = {
        name: {"true": Sums(each, cells), "control": Sums(each - cells / 4, cells)} for name, each in sums.items()
    }

    def mean(name: str, **options: Any) -> Mean:
        return Mean("mixing_controls", labels, name, **options)

    tables = MeanTables(corpora, Draws(5, 300, 7))
    difference = true_minus_control(tables.resample(mean("true")))
    tables.add(mean("control", more=difference))
    tables.add(mean("control", more=difference, checkpoints=("random",)))
    table = tables.tables()["mixing_controls"]
    assert tuple(table) == TABLE_COLUMNS["mixing_controls"]
    assert (set(table["tokens"]), set(table["documents"])) == ({33}, {5})
    expected = {name: each.sum(0).ravel() / 33 - 0.25 for name, each in sums.items()}
    expected["difference"] = expected["finetuned"] - expected["pretrained"]
    assert set(table["checkpoint"]) == set(expected)
    for name, rows in table.groupby("checkpoint"):
        np.testing.assert_allclose(rows["mean"], expected[name])
        assert ((rows["ci_low"] < rows["mean"]) & (rows["mean"] < rows["ci_high"])).all()
        constant = {"random": np.nan, "difference": 0}.get(name, 0.25)
        np.testing.assert_allclose(
            rows[["ratio_minus_control", "ratio_minus_control_low", "ratio_minus_control_high"]].astype(float),
            constant,
            atol=1e-12,
        )


def test_unique_token_class_has_no_corpus_value() -> None:
    generator, word, comma = torch.Generator().manual_seed(0), CLASSES.index("word"), CLASSES.index("punctuation")
    texts = [
        Document(name, np.arange(len(kinds), dtype=np.int32), np.array(kinds, np.int8), np.arange(len(kinds)))
        for name, kinds in (("test/0", [word, word]), ("test/1", [word, comma, comma]))
    ]
    values = [torch.randn(len(text), 8, generator=generator) for text in texts]
    groups = len(CLASSES) * len(POSITIONS)
    sums_GE, counts_G = torch.zeros(groups, 8, dtype=torch.float64), torch.zeros(groups, dtype=torch.float64)
    for text, value_TE in zip(texts, values, strict=True):
        for position, kind in enumerate(text.classes.tolist()):
            group = kind * len(POSITIONS) + position_groups(len(text))[position]
            sums_GE[group] += value_TE[position].double()
            counts_G[group] += 1
    corpus = CorpusValues(sums_GE[None], counts_G, {"test/0", "test/1"})
    own_TE = values[1] * (1 + 1e-6)  # different padding changes the last digits
    block = MicroBatch(texts, slice(1, 2), own_TE.device)
    (corpus_TE,) = corpus.mean_over_others(1, block, own_TE[None])
    torch.testing.assert_close(corpus_TE[0], values[0][0], rtol=1e-4, atol=1e-4)
    assert corpus_TE[1:].isnan().all()
