"""Moves on the maps against moves in the full space and the ratios: planted cases, and SciPy's own numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.stats import pearsonr, rankdata, spearmanr
from sklearn.metrics.pairwise import paired_distances

from attnmix.core.names import Site
from attnmix.maps.quality import linear_projections, movement_table, transitions

BEFORE, MIDDLE, AFTER = Site(0, "embedding_output"), Site(1, "attention_norm"), Site(1, "layer_output")
NOT_MEASURED = pd.DataFrame({"layer": []})


def residuals(values: Any, given: Any) -> Any:
    """Return the residuals of a linear regression of the ranks on the ranks of another variable."""
    y, x = rankdata(values), np.column_stack([np.ones(len(given)), rankdata(given)])
    return y - x @ np.linalg.lstsq(x, y, rcond=None)[0]


def tokens_of(lengths: list[int]) -> pd.DataFrame:
    """Return `document` and `position` of documents of these numbers of tokens."""
    parts = [pd.DataFrame({"document": f"test/{i}", "position": np.arange(n)}) for i, n in enumerate(lengths)]
    return pd.concat(parts, ignore_index=True)


def moved_by(lengths: Any, start: Any, generator: Any) -> Any:
    """Return places `[tokens, 2]` at these distances from where the tokens were, in random directions."""
    angle = generator.uniform(0, 2 * np.pi, size=len(lengths))
    return (start + np.column_stack([np.cos(angle), np.sin(angle)]) * np.asarray(lengths)[:, None]).astype(np.float32)


def planted(lengths: list[int], moves: Any, full: Any, ratio: Any) -> pd.DataFrame:
    """Return the table for one attention step in which `moves` were made on a map, `full` in the full space.

    `moves` holds a row for each seed.
    """
    generator = np.random.default_rng(0)
    tokens = tokens_of(lengths)
    start = generator.normal(size=(len(tokens), 2)).astype(np.float32)
    maps = {
        seed: {BEFORE: start, MIDDLE: moved_by(lengths_of_seed, start, generator)}
        for seed, lengths_of_seed in enumerate(np.atleast_2d(moves), 2)
    }
    features = {BEFORE: start, MIDDLE: moved_by(full, start, generator)}
    ratios = pd.DataFrame({"layer": 1, "attn_n": ratio})
    return movement_table({"joint": maps}, features, tokens, ratios, "euclidean", 2)


def row_of(table: pd.DataFrame, measure: str, against: str = "attn_n") -> Any:
    rows = table[(table["measure"] == measure) & (table["against"] == against)]
    assert len(rows) == 1
    return rows.iloc[0]


@pytest.mark.parametrize("ties", [False, True])
def test_correlations_are_scipys_and_partial_ones_those_of_the_residuals_of_ranks(ties: bool) -> None:
    generator = np.random.default_rng(0)
    full = generator.uniform(1, 2, size=40)
    moves, ratio = full + generator.uniform(size=40), full + generator.uniform(size=40)
    if ties:
        ratio = np.round(ratio, 1)
    summary = planted([40], moves, full, ratio)
    near = pytest.approx  # places are float32, which changes few ranks
    assert row_of(summary, "spearman")["mean"] == near(spearmanr(moves, ratio).statistic, abs=5e-3)
    for measure, given in (("partial_full_space", full), ("partial_position", np.arange(40))):
        expected = pearsonr(residuals(moves, given), residuals(ratio, given)).statistic
        assert row_of(summary, measure)["mean"] == near(expected, abs=5e-3)
    assert np.isnan(row_of(planted([40], moves, full, full), "partial_full_space")["mean"])  # nothing is left of it


def test_an_independent_ratio_lies_within_its_permutations_and_a_dependent_one_outside() -> None:
    generator = np.random.default_rng(3)
    lengths = [20, 35, 50]
    moves, full = generator.uniform(1, 2, size=(2, 105))
    independent = planted(lengths, moves, full, generator.uniform(size=105))
    null = row_of(independent, "permutation_null")
    assert null["ci_low"] < row_of(independent, "spearman")["mean"] < null["ci_high"]
    assert null["mean"] == pytest.approx(0, abs=0.02)
    # Over documents of n tokens, rank correlations of permutations have the variance 1 / (n - 1).
    spread = 1.96 * np.sqrt(sum(1 / (n - 1) for n in lengths)) / len(lengths)
    assert (null["ci_high"] - null["ci_low"]) / 2 == pytest.approx(spread, rel=0.1)
    dependent = planted(lengths, moves, full, moves**3)
    assert row_of(dependent, "spearman")["mean"] == pytest.approx(1, abs=1e-3)
    assert row_of(dependent, "permutation_null")["ci_high"] < 0.3


def test_means_are_over_documents_not_tokens_and_intervals_over_documents() -> None:
    generator = np.random.default_rng(4)
    lengths = [30, 8, 12, 25, 5, 40]
    number = sum(lengths)
    ratio, full = generator.uniform(size=(2, number))
    moves = 1 + np.stack([ratio * scale + generator.uniform(size=number) for scale in (0, 0.5, 1)])
    summary = planted(lengths, moves, full, ratio)
    parts = np.split(np.arange(number), np.cumsum(lengths)[:-1])
    expected_DS = np.array([[spearmanr(each[part], ratio[part]).statistic for each in moves] for part in parts])
    row = row_of(summary, "spearman")
    assert row["mean"] == pytest.approx(expected_DS.mean(), abs=0.01)
    extremes = [expected_DS.mean(0).min(), expected_DS.mean(0).max()]
    assert [row["lowest_seed"], row["highest_seed"]] == pytest.approx(extremes, abs=0.01)
    assert row[["documents", "tokens", "seeds"]].tolist() == [6, number, 3]
    draws = expected_DS.mean(1)[np.random.default_rng(9).integers(6, size=(4000, 6))].mean(1)
    wider = stats.t.ppf(0.975, 5) / stats.norm.ppf(0.975) * (6 / 5) ** 0.5  # than percentiles, for 6 documents
    ends = expected_DS.mean() + (np.quantile(draws, [0.025, 0.975]) - expected_DS.mean()) * wider
    assert [row["ci_low"], row["ci_high"]] == pytest.approx(ends, abs=0.05)


@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_few_tokens_have_the_correlations_that_are_defined(tokens: int) -> None:
    moves, full, ratio = np.random.default_rng(5).uniform(1, 2, size=(3, tokens))
    summary = planted([tokens], moves, full, ratio)
    for measure, least in (("spearman", 3), ("permutation_null", 3), ("partial_position", 4)):
        assert np.isfinite(row_of(summary, measure)["mean"]) == (tokens >= least)
    assert summary.query("measure != 'permutation_null'")[["ci_low", "ci_high"]].isna().all(axis=None)


def test_documents_without_a_value_are_left_out_of_means_and_counts() -> None:
    lengths = [2, 30, 20, 10]
    ratio, full, moves = np.random.default_rng(6).uniform(1, 2, size=(3, 62))
    ratio[32:52] = np.nan  # a document that was not measured
    ratio[3] = np.nan  # and a token
    summary = planted(lengths, moves, full, ratio)
    row = row_of(summary, "spearman")
    assert row[["documents", "tokens"]].tolist() == [2, 39]
    known = [part[np.isfinite(ratio[part])] for part in (np.arange(2, 32), np.arange(52, 62))]
    expected = np.mean([spearmanr(moves[part], ratio[part]).statistic for part in known])
    assert row["mean"] == pytest.approx(expected, abs=0.01)
    assert np.isfinite(row["ci_low"])


def test_steps_are_set_against_the_ratios_of_what_they_cover_and_tokens_that_come_back_have_no_correlation() -> None:
    generator = np.random.default_rng(0)
    start = generator.normal(size=(50, 2)).astype(np.float32)
    length = generator.uniform(size=50)
    middle = moved_by(length, start, generator)
    maps = {BEFORE: start, MIDDLE: middle, AFTER: start}
    ratios = pd.DataFrame({"layer": 1, "attn_n": length**3, "attn_w": -length, "enc_n": length})
    table = movement_table({"joint": {2: maps}}, maps, tokens_of([50]), ratios, "euclidean", 2)
    table = table.query("measure == 'spearman'").set_index(["step", "against"])
    assert table["mean"].to_dict() == {
        ("attention", "full_space"): pytest.approx(1),
        ("attention", "attn_n"): pytest.approx(1, abs=1e-3),
        ("attention", "attn_w"): pytest.approx(-1, abs=1e-3),
        ("ffn", "full_space"): pytest.approx(1),
        ("layer", "full_space"): pytest.approx(np.nan, nan_ok=True),  # back where it was
        ("layer", "enc_n"): pytest.approx(np.nan, nan_ok=True),
    }
    without = movement_table({"joint": {2: maps}}, maps, tokens_of([50]), NOT_MEASURED, "euclidean", 2)
    assert set(without["against"]) == {"full_space"}


@pytest.mark.parametrize("metric", ["cosine", "manhattan"])
def test_moves_in_the_full_space_are_by_the_metric(metric: str) -> None:
    generator = np.random.default_rng(0)
    maps = {site: generator.normal(size=(40, 2)).astype(np.float32) for site in (BEFORE, MIDDLE)}
    features = {site: generator.normal(size=(40, 6)).astype(np.float32) for site in (BEFORE, MIDDLE)}
    table = movement_table({"joint": {2: maps}}, features, tokens_of([40]), NOT_MEASURED, metric, 2)
    full = paired_distances(features[BEFORE], features[MIDDLE], metric=metric)
    expected = spearmanr(np.linalg.norm(maps[MIDDLE] - maps[BEFORE], axis=1), full).statistic
    assert row_of(table, "spearman", "full_space")["mean"] == pytest.approx(expected, abs=1e-6)


def test_projections_are_of_all_points_together_and_random_ones_seeded() -> None:
    generator = np.random.default_rng(0)
    vectors = {site: generator.normal(size=(50, 6)).astype(np.float32) for site in (BEFORE, MIDDLE)}
    projected = linear_projections(vectors, [2, 3])
    assert {name: list(by_seed) for name, by_seed in projected.items()} == {"pca": [2], "random_projection": [2, 3]}
    together = np.concatenate(list(vectors.values())).astype(np.float64)
    centred = together - together.mean(axis=0)
    expected = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    assert np.abs(np.concatenate(list(projected["pca"][2].values()))) == pytest.approx(np.abs(expected), abs=1e-4)
    flat, other = (np.concatenate(list(each.values())) for each in projected["random_projection"].values())
    assert together @ np.linalg.lstsq(together, flat, rcond=None)[0] == pytest.approx(flat, abs=1e-4)
    assert not np.allclose(flat, other)


@pytest.mark.parametrize(
    ("points", "attended", "fed"),
    [
        ("attention_residual attention_norm", "attention_norm", "attention_norm"),  # post-LN
        ("attention_norm", "attention_norm", "attention_norm"),
        ("attention_output attention_residual", "attention_residual", "attention_residual"),  # pre-LN
        ("attention_output ffn_output", None, None),  # parallel
        ("attention_norm cross_attention_norm", "attention_norm", "cross_attention_norm"),  # decoder
    ],
)
def test_attention_ends_where_the_family_ends_it(points: str, attended: str | None, fed: str | None) -> None:
    parts = [(1, "layer", BEFORE, AFTER)]
    if attended and fed:
        parts += [(1, "attention", BEFORE, Site(1, attended)), (1, "ffn", Site(1, fed), AFTER)]
    assert sorted(transitions([BEFORE, *(Site(1, point) for point in points.split()), AFTER])) == sorted(parts)


def test_the_decoders_first_layer_begins_with_its_own_embedding() -> None:
    start, *layers = Site(2, "decoder_embedding_output"), *(Site(layer, "layer_output") for layer in (2, 3, 4))
    assert transitions([layers[0], start, *layers[1:]]) == [
        (3, "layer", start, layers[1]),
        (4, "layer", layers[1], layers[2]),
    ]
