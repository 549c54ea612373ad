"""Scores of maps: how much they keep of the full space, what is due to the seed, and what tokens' moves on them show.

Scores are given together with those of chance. Moves on a map are correlated by rank with moves in the full space and
with mixing ratios; moves on two linear projections of the same vectors are baselines: a correlation that they show too
is no merit of UMAP.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy.spatial.distance
from scipy.spatial import procrustes
from scipy.stats import rankdata
from sklearn.manifold import trustworthiness
from sklearn.metrics import pairwise_distances
from sklearn.random_projection import GaussianRandomProjection

from attnmix.core.names import OWN_BASIS, Site, layer_input
from attnmix.core.statistics import BOOTSTRAP_SAMPLES, LEVEL, partial_correlation, rank_correlation, resample
from attnmix.data.draw import stratified_draw
from attnmix.maps.aligned import Coordinates
from attnmix.maps.layouts import METRICS, Doubles, Indices, Maps, neighbours, two_components
from attnmix.maps.parallel import in_parallel
from attnmix.maps.vectors import Vectors, distinct_rows
from attnmix.measures.ratios import RATIOS

N_NEIGHBOURS = 15
MAX_SCORED_VECTORS = 2000  # of a map; scikit-learn's scores take memory by the square of their number
COLUMNS = ["layout", "layer", "point", "measure", "value", "chance"]
COUNTS = ["tokens", "points", "scored_vectors"]
"""Numbers of a layout, the same in all its rows: tokens at each point, points, and how many vectors were scored."""
NEIGHBOUR_SCORES = ("trustworthiness", "continuity", "neighbours_kept")
SCORES = (*NEIGHBOUR_SCORES, "distance_spearman")
WITHIN = {name: f"{name}_within" for name in NEIGHBOUR_SCORES}
"""Names on the joint map of the scores of each point among its own vectors."""
STABILITY = ("procrustes_distance", "neighbour_overlap")
MIN_VECTORS = 3
DIGITS = 6

FULL_SPACE = "full_space"
GIVEN_FULL_SPACE = "partial_full_space"
MEASURES = ("spearman", GIVEN_FULL_SPACE, "partial_position")
NULL = "permutation_null"  # `null` alone is a missing value to readers of csv
MOVEMENT_COLUMNS = (
    *("layout", "layer", "step", "against", "measure", "mean", "ci_low", "ci_high"),
    *("documents", "tokens", "seeds", "lowest_seed", "highest_seed"),
)
MIN_TOKENS = 3  # of a rank correlation; a partial one needs one more, as of three values it is always 1 or -1
PERMUTATIONS = 1000


def scores(vectors: Vectors, xy: Coordinates, metric: str) -> dict[str, float]:
    """Return the values of `SCORES` for one map; NaN for fewer than three vectors and for vectors that are all equal.

    Trustworthiness and continuity (Venna and Kaski 2001) of the 15 nearest neighbours, or of all that scikit-learn
    takes: fewer than half of the vectors. It finds the neighbours of its second argument by Euclidean distance, so
    those of the full space in continuity are Euclidean where `metric` cannot be prepared to be: for manhattan,
    chebyshev, braycurtis and canberra. `neighbours_kept` is the share of a vector's nearest that are among its nearest
    on the map, `distance_spearman` the rank correlation of the distances of all pairs.
    """
    if len(vectors) < MIN_VECTORS or (vectors == vectors[0]).all():
        return dict.fromkeys(SCORES, float("nan"))
    k = min(N_NEIGHBOURS, (len(vectors) - 1) // 2)
    full = METRICS[metric].prepared(vectors)
    distances = pairwise_distances(full, metric=METRICS[metric].distance)
    on_map = pairwise_distances(xy.astype(np.float64))
    pairs = np.triu_indices(len(vectors), 1)
    return {
        "trustworthiness": trustworthiness(distances, xy, n_neighbors=k, metric="precomputed"),
        "continuity": trustworthiness(on_map, full, n_neighbors=k, metric="precomputed"),
        "neighbours_kept": _overlap(neighbours(vectors, k, metric, 0)[0], neighbours(xy, k, "euclidean", 0)[0]),
        "distance_spearman": float(rank_correlation(distances[pairs], on_map[pairs])),
    }


def stability(maps: Sequence[Coordinates], seed: int) -> dict[str, tuple[float, float]]:
    """Return how alike maps of the same vectors with other seeds are, as means over pairs of maps: value and chance.

    `procrustes_distance` is what is left of the squared distance between two maps, both scaled to 1, after the best
    translation, rotation, reflection and scaling (0: the same shape, 1: nothing in common); `neighbour_overlap` is the
    share of a vector's nearest on one map that are among its nearest on the other. Chance permutes the places
    of the second map.
    """
    order = np.random.default_rng(seed).permutation(len(maps[0]))
    place = np.argsort(order)
    near = [neighbours(xy, N_NEIGHBOURS, "euclidean", 0)[0] for xy in maps]
    pairs = []
    for one, other in combinations(range(len(maps)), 2):
        permuted = maps[other][order], place[near[other][order]]
        for xy, nearest in ((maps[other], near[other]), permuted):
            pairs.append((procrustes(maps[one], xy)[2], _overlap(near[one], nearest)))
    value, chance = np.mean(np.reshape(pairs, (-1, 2, 2)), axis=0).tolist()
    return dict(zip(STABILITY, zip(value, chance, strict=True), strict=True))


def score_map(vectors: Vectors, maps: Sequence[Coordinates], metric: str, seed: int) -> pd.DataFrame:
    """Return `value` and `chance` by `measure`, of the first of `maps`, which are one for each seed.

    Equal vectors count once. Of very many a seeded draw of `MAX_SCORED_VECTORS` is scored, and neighbours are found
    within it. Chance permutes the places on the map.
    """
    first, _ = distinct_rows(vectors)
    rows = first[stratified_draw(np.zeros(len(first), dtype=np.int64), MAX_SCORED_VECTORS, seed)]
    vectors, maps = vectors[rows], [xy[rows] for xy in maps]
    permuted = maps[0][np.random.default_rng(seed).permutation(len(rows))]
    values, chances = (scores(vectors, xy, metric) for xy in (maps[0], permuted))
    pairs = {name: (values[name], chances[name]) for name in SCORES}
    if len(maps) > 1:
        undefined = dict.fromkeys(STABILITY, (float("nan"), float("nan")))
        pairs |= undefined if np.isnan(values["neighbours_kept"]) else stability(maps, seed)
    return pd.DataFrame(pairs, index=COLUMNS[-2:]).T.rename_axis("measure").round(DIGITS)


def score_layout(layout: str, vectors: Mapping[Site, Vectors], maps: Maps, metric: str, seed: int) -> pd.DataFrame:
    """Return `COLUMNS`, a layout's rows before those of its points, and the numbers of `COUNTS`.

    A row without layer and point is the whole layout's: the mean over the points that have a value. The joint map is
    scored among the vectors of all points together, but for those in a basis of their own (`OWN_BASIS`), and each point
    among its own vectors under the names of `WITHIN`.
    """
    by_seed = list(maps.values())
    within = by_seed[:1] if layout == "joint" else by_seed
    calls = [(each, [places[site] for places in within], metric, seed) for site, each in vectors.items()]
    frames = in_parallel(score_map, calls, f"{layout}: scores by point")
    by_site = pd.concat(dict(zip(vectors, frames, strict=True)), names=["layer", "point"])
    whole = by_site.groupby("measure", sort=False).mean()
    tokens = len(next(iter(vectors.values())))
    n_scored = len(vectors) * min(tokens, MAX_SCORED_VECTORS)
    if layout == "joint":
        by_site, whole = by_site.rename(index=WITHIN, level="measure"), whole.rename(index=WITHIN)
        compared = [site for site in vectors if site.point not in OWN_BASIS]
        rows = stratified_draw(np.repeat(np.arange(len(compared)), tokens), MAX_SCORED_VECTORS, seed)
        blocks = [[each[site] for site in compared] or [each[next(iter(each))][:0]] for each in (vectors, *by_seed)]
        drawn = [np.concatenate(block)[rows] for block in blocks]
        (among_all,) = in_parallel(score_map, [(drawn[0], drawn[1:], metric, seed)], "joint: scores")
        whole, n_scored = pd.concat([among_all, whole.loc[list(WITHIN.values())]]), len(rows)
    table = pd.concat([whole.reset_index(), by_site.reset_index()]).assign(layout=layout)[COLUMNS].round(DIGITS)
    counts = dict(zip(COUNTS, (tokens, len(vectors), n_scored), strict=True))
    return table.astype({"layer": "Int32", "point": "string"}).assign(**counts)


def _overlap(near: Indices | npt.NDArray[np.int64], others: Indices | npt.NDArray[np.int64]) -> float:
    """Return the share of each row's indices that are in the other's row."""
    return float((near[:, :, None] == others[:, None, :]).any(axis=2).mean())


def transitions(sites: Sequence[Site]) -> list[tuple[int, str, Site, Site]]:
    """Return layer, `attention`, `ffn` or `layer` (both), and the points before and after it, of the captured layers.

    Attention ends with its skip connection, and the norm where one follows. Where both are added at once, there is no
    point between them; before the `ffn` of a decoder that follows an encoder comes the attention to that encoder.
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
    projections = {"pca": {seeds[0]: two_components(together)}, "random_projection": {}}
    for seed in seeds:
        projections["random_projection"][seed] = GaussianRandomProjection(2, random_state=seed).fit_transform(together)
    return {
        name: {seed: dict(zip(vectors, np.split(xy, len(vectors)), strict=True)) for seed, xy in by_seed.items()}
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
    """Return `MOVEMENT_COLUMNS`: for every layout and step, rank correlations within documents, means over those.

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
    distance = getattr(scipy.spatial.distance, METRICS[metric].distance.replace("manhattan", "cityblock"))
    rows: list[tuple[object, ...]] = []
    for layout, maps in layouts.items():
        for layer, step, before, after in transitions(list(next(iter(maps.values())))):
            moves = [xy[after].astype(np.float64) - xy[before] for xy in maps.values()]
            moved_ST = np.linalg.norm(np.stack(moves), axis=-1)
            ends = zip(*(METRICS[metric].prepared(features[site]) for site in (before, after)), strict=True)
            full_T = np.array([distance(*pair) for pair in ends])
            layer_ratios = by_layer.get(layer, pd.DataFrame())
            covering = [name for name, ratio in RATIOS.items() if name in layer_ratios and ratio.covers == step]
            against = {FULL_SPACE: full_T} | {name: layer_ratios[name].to_numpy(np.float64) for name in covering}
            for name, values_T in against.items():
                parts = [
                    _correlate(moved_ST[:, part], values_T[part], full_T[part], position_T[part], (seed, number))
                    for number, part in enumerate(documents)
                ]
                rows += [(layout, layer, step, name, *row) for row in _summary(parts, seed, name != FULL_SPACE)]
    return pd.DataFrame(rows, columns=list(MOVEMENT_COLUMNS))


def _correlate(
    moved_ST: Doubles, values_T: Doubles, full_T: Doubles, position_T: Doubles, seed: tuple[int, int]
) -> tuple[Doubles, Doubles, int]:
    """Return a document's correlations `[measures, seeds]`, the permutations' means over seeds, and its tokens."""
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
    """Return centred ranks of length 1, whose scalar product is Spearman's correlation; NaN of equal values."""
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
    """Yield `MOVEMENT_COLUMNS` from `measure` on; `parts` are what `_correlate` returns of each document."""
    measures_DMS, null_DP, tokens_D = (np.array(each) for each in zip(*parts, strict=True))
    means_DM, by_seed_MS, null_P = _known_mean(measures_DMS, 2), _known_mean(measures_DMS, 0), _known_mean(null_DP, 0)
    defined_DM = ~np.isnan(means_DM)
    resampled = resample(np.nan_to_num(means_DM), defined_DM.astype(np.float64), BOOTSTRAP_SAMPLES, seed)
    _, low_M, high_M = resampled.correlations()
    for number, measure in enumerate(MEASURES):
        if measure == GIVEN_FULL_SPACE and not given_full_space:  # nothing is left of the full space given itself
            continue
        defined, seed_means = defined_DM[:, number], by_seed_MS[number]
        counts = (int(defined.sum()), int(tokens_D[defined].sum()), len(seed_means))
        extremes = np.fmin.reduce(seed_means), np.fmax.reduce(seed_means)
        yield measure, _known_mean(seed_means, 0).item(), low_M[number], high_M[number], *counts, *extremes
        if measure == "spearman":
            ends = np.quantile(null_P, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
            yield NULL, null_P.mean(), *ends, *counts, np.nan, np.nan


def _known_mean(values: Doubles, axis: int) -> Doubles:
    """Return the mean of the values that are known; NaN where there are none."""
    return np.asarray(np.ma.filled(np.ma.masked_invalid(values).mean(axis=axis), np.nan))
