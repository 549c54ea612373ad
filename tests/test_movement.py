"""Moves on the maps against moves in the full space and the ratios: planted cases, and SciPy's own numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.stats import pearsonr, rankdata, spearmanr

from attnmix.core.options import UmapParameters
from attnmix.core.points import Site
from attnmix.maps.correlations import partial_correlation, permutations, permuted, unit_ranks
from attnmix.maps.movement import measured_moves, transitions
from attnmix.maps.movement_table import COLUMNS, COLUMNS_BY_DOCUMENT
from attnmix.maps.projections import pca, random_projection

BEFORE, MIDDLE, AFTER = Site(0, "embedding_output"), Site(1, "attention_norm"), Site(1, "layer_output")
UMAP = UmapParameters(seed=2, stability_seeds=[3, 4])


def residuals(values: Any, given: Any) -> Any:
    """What is left of the ranks after a linear regression on the ranks of another variable."""
    y, x = rankdata(values), np.column_stack([np.ones(len(given)), rankdata(given)])
    return y - x @ np.linalg.lstsq(x, y, rcond=None)[0]


def table_of(lengths: list[int]) -> pd.DataFrame:
    """`document` and `position` of documents of so many tokens."""
    parts = [pd.DataFrame({"document": f"test/{i}", "position": np.arange(n)}) for i, n in enumerate(lengths)]
    return pd.concat(parts, ignore_index=True)


def moved_by(lengths: Any, start: Any, generator: Any) -> Any:
    """Places `[tokens, 2]` so far from where the tokens were, in any direction."""
    angle = generator.uniform(0, 2 * np.pi, size=len(lengths))
    return (start + np.column_stack([np.cos(angle), np.sin(angle)]) * np.asarray(lengths)[:, None]).astype(np.float32)


def planted(lengths: list[int], moves: Any, full: Any, ratio: Any, seeds: int = 1) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables for one attention step in which `moves` were made on a map, `full` in the full space.

    With more `seeds`, `moves` holds a row for each.
    """
    generator = np.random.default_rng(0)
    tokens = table_of(lengths)
    start = generator.normal(size=(len(tokens), 2)).astype(np.float32)
    maps = {
        seed: {BEFORE: start, MIDDLE: moved_by(of_seed, start, generator)}
        for seed, of_seed in enumerate(np.atleast_2d(moves), 2)
    }
    features = {BEFORE: start, MIDDLE: moved_by(full, start, generator)}
    ratios = pd.DataFrame({"layer": 1, "attn_n": ratio})
    found = measured_moves({"joint": maps}, features, tokens, ratios, UMAP)
    assert len(maps) == seeds
    return found.summary(), found.by_document()


def of(table: pd.DataFrame, measure: str, against: str = "attn_n") -> Any:
    rows = table[(table["measure"] == measure) & (table["against"] == against)]
    assert len(rows) == 1
    return rows.iloc[0]


@pytest.mark.parametrize("ties", [False, True])
def test_partial_correlation_is_that_of_the_residuals_of_ranks(ties: bool) -> None:
    generator = np.random.default_rng(0)
    moved, ratios, given = (generator.normal(size=shape) for shape in ((3, 40), (2, 40), 40))
    ratios += given
    moved[0] += given
    if ties:
        moved, ratios, given = (np.round(each) for each in (moved, ratios, given))
    found = partial_correlation(unit_ranks(moved), unit_ranks(ratios), unit_ranks(given))
    for a in range(3):
        for b in range(2):
            expected = pearsonr(residuals(moved[a], given), residuals(ratios[b], given)).statistic
            assert found[a, b] == pytest.approx(expected, abs=1e-12)
            assert unit_ranks(moved)[a] @ unit_ranks(ratios)[b] == pytest.approx(
                spearmanr(moved[a], ratios[b]).statistic, abs=1e-12
            )


def test_partial_correlation_is_unknown_where_nothing_is_left() -> None:
    values = np.array([[1.0, 5, 2, 7, 3], [1, 1, 1, 1, 1]])
    ranks = unit_ranks(values)
    assert np.isnan(ranks[1]).all()
    assert np.isnan(partial_correlation(ranks, ranks[:1], ranks[0])).all()  # given itself
    assert np.isnan(partial_correlation(ranks, ranks[:1], ranks[1])).all()  # given a constant
    three = unit_ranks(np.array([[1.0, 3, 2], [2.0, 1, 3]]))
    assert np.isnan(partial_correlation(three, three, three[0])).all()
    assert np.isnan(unit_ranks(np.array([1.0, 2.0]))).all()


def test_permutations_are_of_all_values_and_seeded() -> None:
    orders = permutations(200, 6, [1, 2])
    assert (np.sort(orders, axis=1) == np.arange(6)).all()
    assert len(np.unique(orders, axis=0)) > 100
    assert np.array_equal(orders, permutations(200, 6, [1, 2]))
    moved, ratio = np.random.default_rng(0).normal(size=(2, 6))
    found = permuted(unit_ranks(moved[None]), unit_ranks(ratio), orders)
    assert found[0, :5] == pytest.approx([spearmanr(moved, ratio[order]).statistic for order in orders[:5]])


def test_a_ratio_that_is_the_full_spaces_move_adds_nothing_given_it() -> None:
    generator = np.random.default_rng(1)
    full = generator.uniform(1, 2, size=400)
    moves = full + 0.3 * generator.normal(size=400)
    summary, _ = planted([400], moves, full, full + 0.05 * generator.normal(size=400))
    assert of(summary, "spearman")["mean"] > 0.6
    assert abs(of(summary, "partial_full_space")["mean"]) < 0.1
    assert of(summary, "partial_position")["mean"] == pytest.approx(of(summary, "spearman")["mean"], abs=0.05)
    assert np.isnan(of(planted([400], moves, full, full)[0], "partial_full_space")["mean"])  # nothing is left of it
    assert not len(summary.query("against == 'full_space' and measure == 'partial_full_space'"))


def test_a_ratio_that_follows_the_position_adds_nothing_given_it() -> None:
    generator = np.random.default_rng(1)
    position = np.arange(300) / 100
    moves, ratio = (1 + position + 0.5 * generator.normal(size=300) for _ in range(2))
    summary, _ = planted([300], moves, generator.uniform(size=300), ratio)
    assert of(summary, "spearman")["mean"] > 0.5
    assert abs(of(summary, "partial_position")["mean"]) < 0.12


def test_an_independent_ratio_lies_within_its_permutations_and_a_dependent_one_outside() -> None:
    generator = np.random.default_rng(3)
    lengths = [20, 35, 50]
    moves, full = generator.uniform(1, 2, size=(2, 105))
    independent, _ = planted(lengths, moves, full, generator.uniform(size=105))
    null = of(independent, "permutation_null")
    assert null["ci_low"] < of(independent, "spearman")["mean"] < null["ci_high"]
    assert null["mean"] == pytest.approx(0, abs=0.02)
    # Over documents of n tokens, rank correlations of permutations have the variance 1 / (n - 1).
    spread = 1.96 * np.sqrt(sum(1 / (n - 1) for n in lengths)) / len(lengths)
    assert (null["ci_high"] - null["ci_low"]) / 2 == pytest.approx(spread, rel=0.1)
    dependent, _ = planted(lengths, moves, full, moves**3)
    assert of(dependent, "spearman")["mean"] == pytest.approx(1, abs=1e-3)
    assert of(dependent, "permutation_null")["ci_high"] < 0.3


def test_means_are_over_documents_not_tokens_and_intervals_over_documents_and_seeds() -> None:
    generator = np.random.default_rng(4)
    lengths = [30, 8, 12, 25, 5, 40]
    number = sum(lengths)
    ratio, full = generator.uniform(size=(2, number))
    moves = 1 + np.stack([ratio * scale + generator.uniform(size=number) for scale in (0, 0.5, 1)])
    summary, by_document = planted(lengths, moves, full, ratio, seeds=3)
    assert list(summary.columns) == list(COLUMNS)
    assert list(by_document.columns) == list(COLUMNS_BY_DOCUMENT)
    rows = by_document.query("measure == 'spearman' and against == 'attn_n'")
    ends = np.cumsum(lengths)
    for row in rows.itertuples():
        document = int(str(row.document).removeprefix("test/"))
        part = slice(ends[document] - lengths[document], ends[document])
        expected = spearmanr(moves[int(str(row.seed)) - 2, part], ratio[part]).statistic
        assert row.value == pytest.approx(expected, abs=0.03)  # places are float32 and change few ranks
        assert row.tokens == lengths[document]
    wide = rows.pivot(index="document", columns="seed", values="value").to_numpy()
    found = of(summary, "spearman")
    assert found["mean"] == pytest.approx(wide.mean())
    assert [found["lowest_seed"], found["highest_seed"]] == pytest.approx([wide.mean(0).min(), wide.mean(0).max()])
    assert found[["documents", "tokens", "seeds"]].tolist() == [6, number, 3]
    again = np.random.default_rng(9)
    draws = [wide[again.integers(6, size=6)][:, again.integers(3, size=3)].mean() for _ in range(4000)]
    wider = stats.t.ppf(0.975, 5) / stats.norm.ppf(0.975) * (6 / 5) ** 0.5  # than percentiles, for 6 documents
    ends = wide.mean() + (np.quantile(draws, [0.025, 0.975]) - wide.mean()) * wider
    assert [found["ci_low"], found["ci_high"]] == pytest.approx(ends, abs=0.05)
    only = [wide.mean(1)[again.integers(6, size=6)].mean() for _ in range(4000)]  # which knows nothing of seeds
    assert found["ci_high"] - found["ci_low"] > 1.3 * np.ptp(np.quantile(only, [0.025, 0.975]))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5])
def test_few_tokens_have_the_values_that_are_defined_and_no_others(tokens: int) -> None:
    generator = np.random.default_rng(5)
    moves, full, ratio = generator.uniform(1, 2, size=(3, tokens))
    summary, by_document = planted([tokens], moves, full, ratio)
    assert np.isfinite(of(summary, "spearman")["mean"]) == (tokens >= 3)
    assert np.isfinite(of(summary, "permutation_null")["mean"]) == (tokens >= 3)
    assert np.isfinite(of(summary, "partial_position")["mean"]) == (tokens >= 4)
    assert (by_document["tokens"] == tokens).all()
    assert summary.query("measure != 'permutation_null'")[["ci_low", "ci_high"]].isna().all(axis=None)


def test_documents_without_a_value_are_left_out_of_means_and_counts() -> None:
    generator = np.random.default_rng(6)
    lengths = [2, 30, 20, 10]
    ratio, full, moves = generator.uniform(1, 2, size=(3, 62))
    ratio[32:52] = np.nan  # a document that was not measured
    ratio[3] = np.nan  # and a token
    summary, by_document = planted(lengths, moves, full, ratio)
    found = of(summary, "spearman")
    assert found[["documents", "tokens"]].tolist() == [2, 39]
    there = by_document.query("measure == 'spearman' and against == 'attn_n'").set_index("document")
    assert there["tokens"].tolist() == [2, 29, 0, 10]
    assert there["value"].isna().tolist() == [True, False, True, False]
    assert found["mean"] == pytest.approx(there["value"].mean())
    assert np.isfinite(found["ci_low"])
    assert of(summary, "spearman", "full_space")["documents"] == 3
    known = np.isfinite(ratio[2:32])
    expected = pearsonr(*(residuals(each[2:32][known], full[2:32][known]) for each in (moves, ratio))).statistic
    partly = by_document.query("measure == 'partial_full_space' and document == 'test/1'")["value"].item()
    assert partly == pytest.approx(expected, abs=0.05)


def test_steps_are_set_against_the_ratios_of_what_they_cover_and_tokens_that_come_back_have_no_correlation() -> None:
    generator = np.random.default_rng(0)
    start = generator.normal(size=(50, 2)).astype(np.float32)
    length = generator.uniform(size=50)
    middle = moved_by(length, start, generator)
    maps = {BEFORE: start, MIDDLE: middle, AFTER: start}
    ratios = pd.DataFrame({"layer": 1, "attn_n": length**3, "attn_w": -length, "enc_n": length})
    moves = measured_moves({"joint": {2: maps}}, maps, table_of([50]), ratios, UMAP)
    table = moves.by_document().query("measure == 'spearman'").set_index(["step", "against"])
    assert table["value"].to_dict() == {
        ("attention", "full_space"): pytest.approx(1),
        ("attention", "attn_n"): pytest.approx(1, abs=1e-3),
        ("attention", "attn_w"): pytest.approx(-1, abs=1e-3),
        ("ffn", "full_space"): pytest.approx(1),
        ("layer", "full_space"): pytest.approx(np.nan, nan_ok=True),  # back where it was
        ("layer", "enc_n"): pytest.approx(np.nan, nan_ok=True),
    }
    assert (table["tokens"] == 50).all()
    alone = measured_moves({"joint": {2: {MIDDLE: middle}}}, {MIDDLE: middle}, table_of([50]), ratios, UMAP)
    assert alone.summary().empty
    assert alone.by_document().empty
    without = measured_moves({"joint": {2: maps}}, maps, table_of([50]), pd.DataFrame(), UMAP)
    assert set(without.summary()["against"]) == {"full_space"}


def test_a_rotation_of_all_points_changes_no_move_of_the_principal_components() -> None:
    generator = np.random.default_rng(0)
    vectors = {site: generator.normal(size=(60, 12)).astype(np.float32) for site in (BEFORE, MIDDLE)}
    turn = np.linalg.qr(generator.normal(size=(12, 12)))[0]
    turned = {site: (each @ turn + 3).astype(np.float32) for site, each in vectors.items()}
    moves = [np.linalg.norm(each[MIDDLE] - each[BEFORE], axis=1) for each in (pca(vectors), pca(turned))]
    assert moves[0] == pytest.approx(moves[1], abs=1e-4)


def test_projections_are_scikit_learns_components_and_one_seeded_matrix() -> None:
    from sklearn.decomposition import PCA

    generator = np.random.default_rng(0)
    vectors = {site: generator.normal(size=(50, 6)).astype(np.float32) * np.arange(1, 7) for site in (BEFORE, MIDDLE)}
    vectors = {site: each.astype(np.float32) for site, each in vectors.items()}
    together = np.concatenate(list(vectors.values()))
    expected = PCA(2, svd_solver="full").fit_transform(together.astype(np.float64))
    found = np.concatenate(list(pca(vectors).values()))
    assert np.abs(found) == pytest.approx(np.abs(expected), abs=1e-4)
    flat = np.concatenate(list(random_projection(vectors, 3).values()))
    matrix = np.linalg.lstsq(together.astype(np.float64), flat, rcond=None)[0]
    assert together @ matrix == pytest.approx(flat, abs=1e-4)
    assert np.array_equal(flat, np.concatenate(list(random_projection(vectors, 3).values())))
    assert not np.allclose(flat, np.concatenate(list(random_projection(vectors, 4).values())))
    narrow = {BEFORE: np.arange(3, dtype=np.float32)[:, None]}
    assert pca(narrow)[BEFORE].shape == (3, 2)


ENTERED, LEFT = Site(0, "embedding_output"), Site(1, "layer_output")


@pytest.mark.parametrize(
    ("points", "attended", "fed"),
    [
        (("attention_residual", "attention_norm"), "attention_norm", "attention_norm"),
        (("attention_norm",), "attention_norm", "attention_norm"),
        (("attention_output", "attention_residual"), "attention_residual", "attention_residual"),
        (("attention_output", "ffn_output"), None, None),
        (("attention_norm", "cross_attention_norm"), "attention_norm", "cross_attention_norm"),
    ],
    ids=["post_ln", "without_skip", "pre_ln", "parallel", "decoder"],
)
def test_attention_ends_where_the_family_ends_it(
    points: tuple[str, ...], attended: str | None, fed: str | None
) -> None:
    found = transitions([ENTERED, *(Site(1, point) for point in points), LEFT])
    parts = [(1, "layer", ENTERED, LEFT)]
    if attended and fed:
        parts += [(1, "attention", ENTERED, Site(1, attended)), (1, "ffn", Site(1, fed), LEFT)]
    assert sorted(found) == sorted(parts)


def test_the_decoders_first_layer_begins_with_its_own_embedding() -> None:
    own = Site(2, "decoder_embedding_output")
    found = transitions([Site(2, "layer_output"), own, Site(3, "layer_output"), Site(4, "layer_output")])
    assert found == [
        (3, "layer", own, Site(3, "layer_output")),
        (4, "layer", Site(3, "layer_output"), Site(4, "layer_output")),
    ]
