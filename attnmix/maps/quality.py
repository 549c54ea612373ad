"""Scores of the maps beside chance: what a map kept of the full space, and what of it is due to its seed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.spatial import procrustes
from scipy.stats import spearmanr
from sklearn.manifold import trustworthiness
from sklearn.metrics import pairwise_distances

from attnmix.core.options import UmapParameters
from attnmix.core.points import OWN_BASIS, Site
from attnmix.data.draw import Rows, stratified_draw
from attnmix.maps.aligned import Coordinates
from attnmix.maps.neighbours import METRICS, Vectors, neighbours
from attnmix.maps.parallel import in_parallel

N_NEIGHBOURS = 15
MAX_SCORED_VECTORS = 2000  # of a map; scikit-learn's scores take memory by the square of their number
COLUMNS = ("layout", "layer", "point", "measure", "value", "chance")
NEIGHBOUR_SCORES = ("trustworthiness", "continuity", "neighbours_kept")
SCORES = (*NEIGHBOUR_SCORES, "distance_spearman")
WITHIN = tuple(f"{name}_within" for name in NEIGHBOUR_SCORES)
STABILITY = ("procrustes_distance", "neighbour_overlap")
MIN_VECTORS = 3
Where = tuple[str, int | None, str | None]
Row = tuple[str, int | None, str | None, str, float, float]


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
    kept = _overlap(neighbours(vectors, k, metric, 0)[0], neighbours(xy, k, "euclidean", 0)[0])
    pairs = np.triu_indices(len(vectors), 1)
    on_map = pairwise_distances(xy.astype(np.float64))
    return {
        "trustworthiness": trustworthiness(distances, xy, n_neighbors=k, metric="precomputed"),
        "continuity": trustworthiness(on_map, full, n_neighbors=k, metric="precomputed"),
        "neighbours_kept": kept,
        "distance_spearman": _rank_correlation(distances[pairs], on_map[pairs]),
    }


def stability(maps: Sequence[Coordinates], seed: int) -> dict[str, tuple[float, float]]:
    """Return how alike maps of the same vectors with other seeds are, as means over pairs of maps: value and chance.

    `procrustes_distance` is what is left of the squared distance between two maps, both scaled to 1, after the best
    translation, rotation, reflection and scaling (0: the same shape, 1: nothing in common); `neighbour_overlap` is the
    share of a vector's nearest on one map that are among its nearest on the other. Chance permutes the places
    of the second map.
    """
    order = np.random.default_rng(seed).permutation(len(maps[0]))
    k = min(N_NEIGHBOURS, len(order) - 1)
    near = [neighbours(xy, k, "euclidean", 0)[0] for xy in maps]
    place = np.argsort(order)
    pairs = [
        [(procrustes(maps[one], xy)[2], _overlap(near[one], nearest))
         for xy, nearest in ((maps[other], near[other]), (maps[other][order], place[near[other][order]]))]
        for one, other in combinations(range(len(maps)), 2)
    ]  # fmt: skip
    value, chance = np.mean(pairs, axis=0).tolist()
    return dict(zip(STABILITY, zip(value, chance, strict=True), strict=True))


def score_map(
    where: Where, vectors: Vectors, maps: Sequence[Coordinates], umap: UmapParameters, rows: Rows | None = None
) -> tuple[list[Row], int]:
    """Return the rows of one map, the first of `maps`, and how many vectors were scored.

    `maps` has one map for each seed. `rows` are the vectors to score instead of a seeded draw of
    `MAX_SCORED_VECTORS`; neighbours are found among them. Chance permutes the places on the map.
    """
    if rows is None:
        rows = stratified_draw(np.zeros(len(vectors), dtype=np.int64), MAX_SCORED_VECTORS, umap.seed)
    vectors, maps = vectors[rows], [xy[rows] for xy in maps]
    dealt = maps[0][np.random.default_rng(umap.seed).permutation(len(rows))]
    values, chances = (scores(vectors, xy, umap.metric) for xy in (maps[0], dealt))
    table: list[Row] = [(*where, name, values[name], chances[name]) for name in SCORES]
    if len(maps) > 1:
        undefined = dict.fromkeys(STABILITY, (float("nan"), float("nan")))
        alike = undefined if np.isnan(values["neighbours_kept"]) else stability(maps, umap.seed)
        table += [(*where, name, *pair) for name, pair in alike.items()]
    return table, 0 if np.isnan(values["neighbours_kept"]) else len(rows)


def score_joint_map(
    sites: Sequence[Site], vectors: Vectors, maps: Sequence[Coordinates], umap: UmapParameters
) -> tuple[list[Row], int]:
    """Return the rows of a map of several points and of each of them, and how many vectors were scored together.

    The sites lie one after the other in `vectors`. Points in a basis of their own (`OWN_BASIS`) are not scored among
    all points. Each point is scored among its own vectors (`WITHIN`), of which the whole map's value is the mean.
    """
    n_tokens = len(vectors) // len(sites)
    compared = np.repeat([site.point not in OWN_BASIS for site in sites], n_tokens)
    among_all = np.flatnonzero(compared)
    drawn = stratified_draw(among_all // n_tokens, MAX_SCORED_VECTORS, umap.seed)
    # In one thread, as all scores: several find other neighbours among nearly equal ones.
    whole = [(("joint", None, None), vectors, maps, umap, among_all[drawn])]
    ((table, n_scored),) = in_parallel(score_map, whole, "scores of the joint map")
    parts = zip(sites, np.split(vectors, len(sites)), np.split(maps[0], len(sites)), strict=True)
    calls = [(("joint", *site), part, [xy], umap) for site, part, xy in parts]
    by_site = [row for rows, _ in in_parallel(score_map, calls, "scores within points") for row in rows]
    names = dict(zip(NEIGHBOUR_SCORES, WITHIN, strict=True))
    within = [(*row[:3], names.get(row[3], row[3]), *row[4:]) for row in by_site]
    means = [row for row in whole_layout("joint", within) if row[3] in WITHIN]
    return table + means + within, n_scored


def whole_layout(layout: str, rows: Sequence[Row]) -> list[Row]:
    """Return the means over the points, for a layout that has a map for each."""
    means = quality_table(rows).groupby("measure", sort=False)[["value", "chance"]].mean()
    return [(layout, None, None, str(name), float(v), float(c)) for name, v, c in means.itertuples()]


def quality_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Return `layout, layer, point, measure, value, chance`; a row without layer and point is the whole layout's."""
    table = pd.DataFrame(list(rows), columns=list(COLUMNS)).round(6)
    return table.astype({"layer": "Int32", "point": "string", "value": "float64", "chance": "float64"})


def _overlap(near: npt.NDArray[Any], others: npt.NDArray[Any]) -> float:
    """Return the share of each row's indices that are in the other's row."""
    return float((near[:, :, None] == others[:, None, :]).any(axis=2).mean())


def _rank_correlation(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """Return Spearman's correlation; NaN if one side is constant, of which SciPy would warn."""
    constant = any((side == side[0]).all() for side in (first, second))
    return float("nan") if constant else float(spearmanr(first, second).statistic)
