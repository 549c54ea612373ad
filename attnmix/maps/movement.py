"""Rank correlations of tokens' moves on a map with their moves in the full space and with their mixing ratios.

The moves on two linear projections of the same vectors are baselines: a correlation that they show too is no merit of
UMAP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy.spatial.distance
from scipy.stats import rankdata
from sklearn.decomposition import PCA
from sklearn.random_projection import GaussianRandomProjection

from attnmix.core.points import Site, layer_input
from attnmix.core.statistics import BOOTSTRAP_SAMPLES, LEVEL, partial_correlation, resample
from attnmix.maps.neighbours import METRICS, Vectors
from attnmix.maps.quality import Maps
from attnmix.measures.ratios import RATIOS

FULL_SPACE = "full_space"
GIVEN_FULL_SPACE = "partial_full_space"
MEASURES = ("spearman", GIVEN_FULL_SPACE, "partial_position")
NULL = "permutation_null"  # `null` alone is a missing value to readers of csv
COLUMNS = (
    *("layout", "layer", "step", "against", "measure", "mean", "ci_low", "ci_high"),
    *("documents", "tokens", "seeds", "lowest_seed", "highest_seed"),
)
MIN_TOKENS = 3  # of a rank correlation; a partial one needs one more, as of three values it is always 1 or -1
PERMUTATIONS = 1000

Doubles = npt.NDArray[np.float64]
Transition = tuple[int, str, Site, Site]


def transitions(sites: Sequence[Site]) -> list[Transition]:
    """Return layer, `attention`, `ffn` or `layer` (both), and the points before and after it, of the captured layers.

    Attention ends with its skip connection, and the norm where one follows. No point stands between the two where both
    are added at once; before the `ffn` of a decoder beside an encoder stands the attention to that encoder.
    """
    parts = []
    for layer in sorted({site.layer for site in sites} - {0}):
        before, after = layer_input(layer, sites), Site(layer, "layer_output")
        attended = [Site(layer, point) for point in ("attention_residual", "attention_norm")]
        entered = [*attended, Site(layer, "cross_attention_norm")]
        parts += [(layer, "attention", before, middle) for middle in attended if middle in sites][-1:]
        parts += [(layer, "ffn", middle, after) for middle in entered if middle in sites][-1:]
        parts.append((layer, "layer", before, after))
    return [part for part in parts if part[2] in sites and part[3] in sites]


def linear_projections(vectors: Mapping[Site, Vectors], seeds: Sequence[int]) -> dict[str, Maps]:
    """Return the baselines by name and seed: one fit of all points together, coordinates `[tokens, 2]` of each.

    `pca` are the two principal components, the same with every seed; `random_projection` is one Gaussian matrix, which
    keeps squared distances in the mean (Johnson and Lindenstrauss 1984).
    """
    together = np.concatenate([each.astype(np.float64) for each in vectors.values()])
    random = {seed: GaussianRandomProjection(2, random_state=seed) for seed in seeds}
    projections = {"pca": {seeds[0]: PCA(2, svd_solver="covariance_eigh")}, "random_projection": random}
    return {
        name: {
            seed: dict(zip(vectors, np.split(each.fit_transform(together), len(vectors)), strict=True))
            for seed, each in by_seed.items()
        }
        for name, by_seed in projections.items()
    }


def movement_table(
    layouts: Mapping[str, Maps],
    features: Mapping[Site, Vectors],
    tokens: pd.DataFrame,
    ratios: pd.DataFrame,
    metric: str,
    seed: int,
) -> pd.DataFrame:
    """Return `COLUMNS`: for every layout and step, rank correlations within documents, means over documents and seeds.

    `layouts` has the coordinates `[tokens, 2]` by name, seed and point; `tokens` the columns `document` and `position`.
    A token's move on the map is compared with its move in the full space (by `metric`), and in the attention step, or
    in the whole layer, with each mixing ratio of that. `ratios` has the columns `layer` and one for each method, for
    each layer one row for each token in the order of the maps; no row where none were measured.

    `ci_low` and `ci_high` are the 95 % interval of a bootstrap over documents, NaN for a single one; `lowest_seed`
    and `highest_seed` the extremes of the seeds' means. For the measure `permutation_null` they are the range of 95 %
    of the permutations. `documents` and `tokens` count those for which the correlation is defined.
    """
    documents = list(tokens.groupby("document", sort=False).indices.values())
    position_T = tokens["position"].to_numpy(np.float64)
    by_layer = dict(iter(ratios.groupby("layer")))
    rows: list[tuple[object, ...]] = []
    for layout, maps in layouts.items():
        for layer, step, before, after in transitions(list(next(iter(maps.values())))):
            moves = [xy[after].astype(np.float64) - xy[before] for xy in maps.values()]
            moved_ST = np.linalg.norm(np.stack(moves), axis=-1)
            full_T = _distances(features[before], features[after], metric)
            layer_ratios = by_layer.get(layer, pd.DataFrame())
            covering = [name for name, ratio in RATIOS.items() if name in layer_ratios and ratio.covers == step]
            against = {FULL_SPACE: full_T} | {name: layer_ratios[name].to_numpy(np.float64) for name in covering}
            for name, values_T in against.items():
                parts = [
                    _correlate(moved_ST[:, part], values_T[part], full_T[part], position_T[part], (seed, number))
                    for number, part in enumerate(documents)
                ]
                rows += [(layout, layer, step, name, *row) for row in _summary(parts, seed, name != FULL_SPACE)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _correlate(
    moved_ST: Doubles, values_T: Doubles, full_T: Doubles, position_T: Doubles, seed: tuple[int, int]
) -> tuple[Doubles, Doubles, int]:
    """Correlate the moves of a document's tokens on each map with `values_T`; tokens without a value are left out.

    Return the correlations `[measures, seeds]`, the permutations' means over seeds, and the number of tokens.
    """
    known = np.isfinite(values_T)
    n_tokens = int(known.sum())
    if n_tokens < MIN_TOKENS:
        return np.full((len(MEASURES), len(moved_ST)), np.nan), np.full(PERMUTATIONS, np.nan), 0
    moved, values, full, position = (_unit_ranks(each[..., known]) for each in (moved_ST, values_T, full_T, position_T))
    null_P = values[_orders(n_tokens, *seed)] @ moved.mean(axis=0)
    plain = moved @ values
    partial = [partial_correlation(plain, moved @ given, values @ given) for given in (full, position)]
    if n_tokens == MIN_TOKENS:
        partial = [np.full_like(plain, np.nan)] * 2
    return np.stack([plain, *partial]), null_P, n_tokens


def _unit_ranks(values: Doubles) -> Doubles:
    """Return ranks along the last axis, centred and of length 1: Spearman's correlation is their scalar product.

    NaN where all values are equal.
    """
    ranks = np.asarray(rankdata(values, axis=-1), dtype=np.float64)
    ranks -= ranks.mean(axis=-1, keepdims=True)
    lengths = np.linalg.norm(ranks, axis=-1, keepdims=True)
    return ranks / np.where(lengths > 0, lengths, np.nan)


@lru_cache(maxsize=64)
def _orders(size: int, *seed: int) -> npt.NDArray[np.int64]:
    """Return random orders of `size` values, `[permutations, size]`."""
    return np.random.default_rng(seed).permuted(np.tile(np.arange(size), (PERMUTATIONS, 1)), axis=1)


def _summary(
    parts: Sequence[tuple[Doubles, Doubles, int]], seed: int, given_full_space: bool
) -> Iterator[tuple[object, ...]]:
    """Yield `COLUMNS` from `measure` on, for every measure and, after `spearman`, for the permutations.

    `parts` are what `_correlate` returns of each document. Nothing is left of the full space given itself.
    """
    measures_DMS, null_DP, tokens_D = (np.array(each) for each in zip(*parts, strict=True))
    known_DMS = np.ma.masked_invalid(measures_DMS)
    means_DM, by_seed_MS = known_DMS.mean(axis=2), known_DMS.mean(axis=0)
    defined_DM = ~np.ma.getmaskarray(means_DM)
    resampled = resample(means_DM.filled(0), defined_DM.astype(np.float64), BOOTSTRAP_SAMPLES, seed)
    _, low_M, high_M = resampled.correlations()
    for number, measure in enumerate(MEASURES):
        if measure == GIVEN_FULL_SPACE and not given_full_space:
            continue
        defined, seed_means = defined_DM[:, number], by_seed_MS[number].filled(np.nan)
        counts = (int(defined.sum()), int(tokens_D[defined].sum()), len(seed_means))
        mean = np.ma.filled(by_seed_MS[number].mean(), np.nan)
        extremes = np.fmin.reduce(seed_means), np.fmax.reduce(seed_means)
        yield measure, mean, low_M[number], high_M[number], *counts, *extremes
        if measure == "spearman":
            null_P = np.ma.masked_invalid(null_DP).mean(axis=0).filled(np.nan)
            ends = np.quantile(null_P, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
            yield NULL, null_P.mean(), *ends, *counts, np.nan, np.nan


def _distances(before: Vectors, after: Vectors, metric: str) -> Doubles:
    """Return how far each vector moves, `[tokens]`, in the order of `metric`."""
    known = METRICS[metric]
    distance = getattr(scipy.spatial.distance, {"manhattan": "cityblock"}.get(known.distance, known.distance))
    return np.array([distance(*pair) for pair in zip(known.prepared(before), known.prepared(after), strict=True)])
