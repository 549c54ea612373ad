"""Quality scores of maps: preservation of neighbours and distances, and stability over seeds, with chance levels."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.draw import RowNumbers, stratified_draw
from attnmix.core.names import OWN_BASIS, Site
from attnmix.core.statistics import rank_correlation
from attnmix.maps.neighbours import METRICS, Indices, neighbours
from attnmix.maps.parallel import in_parallel
from attnmix.maps.vectors import Coordinates, Maps, Vectors, distinct_rows

N_NEIGHBOURS = 15
MAX_SCORED_VECTORS = 2000  # per map; scikit-learn's scores require memory quadratic in this number
QUALITY_COLUMNS = ["layout", "layer", "point", "measure", "value", "chance"]
NEIGHBOUR_SCORES = ("trustworthiness", "continuity", "neighbours_kept")
SCORES = (*NEIGHBOUR_SCORES, "distance_spearman")
WITHIN = {name: f"{name}_within" for name in NEIGHBOUR_SCORES}
"""Names of the scores within single points of the joint map."""
STABILITY = ("procrustes_distance", "neighbour_overlap")
MIN_VECTORS = 3
DIGITS = 6


def scores(vectors: Vectors, xy: Coordinates, metric: str) -> dict[str, float]:
    """Return the values of `SCORES` for one map; NaN if there are fewer than three vectors or all vectors are equal.

    `trustworthiness` and `continuity` (Venna and Kaski 2001) use the 15 nearest neighbours of each vector, but at most
    half of the other vectors, because scikit-learn requires fewer neighbours than half of the vectors. scikit-learn's
    function `trustworthiness` uses Euclidean distance to find neighbours in its second argument. Continuity therefore
    uses Euclidean neighbours in the full space for metrics without a Euclidean form: manhattan, chebyshev, braycurtis
    and canberra. `neighbours_kept` is the share of a vector's nearest neighbours that are also nearest neighbours on
    the map. `distance_spearman` is the rank correlation of pairwise distances in the full space and on the map.
    """
    if _has_too_few(vectors):
        return dict.fromkeys(SCORES, float("nan"))
    from sklearn.manifold import trustworthiness  # slow imports, not needed for pages
    from sklearn.metrics import pairwise_distances

    k = _count_scored_neighbours(vectors)
    full = METRICS[metric].prepared(vectors)
    distances = pairwise_distances(full, metric=METRICS[metric].distance)
    xy_float64 = xy.astype(np.float64)
    map_distances = pairwise_distances(xy_float64)
    near, _ = neighbours(vectors, k, metric, 0)
    near_on_map, _ = neighbours(xy, k, "euclidean", 0)
    pairs = np.triu_indices(len(vectors), 1)
    distance_spearman = rank_correlation(distances[pairs], map_distances[pairs])
    # Continuity is trustworthiness with the roles of the map and the full space exchanged.
    return {
        "trustworthiness": trustworthiness(distances, xy, n_neighbors=k, metric="precomputed"),
        "continuity": trustworthiness(map_distances, full, n_neighbors=k, metric="precomputed"),
        "neighbours_kept": _compute_overlap(near, near_on_map),
        "distance_spearman": float(distance_spearman),
    }


def kept_neighbours(vectors: Vectors, xy: Coordinates, metric: str, seed: int) -> tuple[float, float]:
    """Return the value and the chance level of the score `neighbours_kept` for one map, as `score_map` computes them.

    Both are NaN if there are fewer than three vectors or all vectors are equal.
    """
    rows = _select_scored_rows(vectors, seed)
    vectors = vectors[rows]
    xy = xy[rows]
    if _has_too_few(vectors):
        return float("nan"), float("nan")
    k = _count_scored_neighbours(vectors)
    near, _ = neighbours(vectors, k, metric, 0)
    near_on_map, _ = neighbours(xy, k, "euclidean", 0)
    # For the chance level, the coordinates on the map are permuted.
    order = _draw_order(len(xy), seed)
    near_by_chance = _permute_neighbours(near_on_map, order)
    value = _compute_overlap(near, near_on_map)
    chance = _compute_overlap(near, near_by_chance)
    return value, chance


def _has_too_few(vectors: Vectors) -> bool:
    """Return True if neighbours are undefined, because there are fewer than three vectors or all vectors are equal."""
    if len(vectors) < MIN_VECTORS:
        return True
    is_equal_to_first = vectors == vectors[0]
    return bool(is_equal_to_first.all())


def _count_scored_neighbours(vectors: Vectors) -> int:
    """Return the number of scored neighbours per vector, at most half of the other vectors."""
    others = len(vectors) - 1
    return min(N_NEIGHBOURS, others // 2)


def _select_scored_rows(vectors: Vectors, seed: int) -> RowNumbers:
    """Return the rows of the distinct vectors, or of a random sample of `MAX_SCORED_VECTORS` distinct vectors."""
    first, _ = distinct_rows(vectors)
    one_stratum = np.zeros(len(first), dtype=np.int64)
    drawn = stratified_draw(one_stratum, MAX_SCORED_VECTORS, seed)
    return first[drawn]


def _permute_neighbours(near: npt.NDArray[np.int32], order: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the neighbour indices `[rows, k]` that result if the coordinates are put in the `order`.

    Row i of the permuted coordinates is the old row `order[i]`. `near` `[rows, k]` are the indices of the neighbours
    before the permutation.
    """
    new_index = np.argsort(order)  # new_index[i] is the index of the old row i after the permutation
    permuted_rows = near[order]  # in the new order, with old indices
    return np.asarray(new_index[permuted_rows])


def _draw_order(number: int, seed: int) -> npt.NDArray[np.int64]:
    """Return a random order `[number]` of the points of a map, as a chance baseline."""
    generator = np.random.default_rng(seed)
    return generator.permutation(number)


def stability(maps: Sequence[Coordinates], seed: int) -> dict[str, tuple[float, float]]:
    """Return the values and chance levels of `STABILITY`, averaged over pairs of maps with different seeds.

    `procrustes_distance` is the squared distance between two maps of unit norm that remains after optimal translation,
    rotation, reflection and scaling (0: the same shape, 1: nothing in common). `neighbour_overlap` is the share of a
    vector's nearest neighbours on one map that are also nearest neighbours on the other. For chance levels, the
    coordinates of the second map are permuted.
    """
    from scipy.spatial import procrustes  # slow import, not needed for pages

    order = _draw_order(len(maps[0]), seed)
    near = []  # indices of the neighbours `[vectors, k]` on each map
    for xy in maps:
        indices, _ = neighbours(xy, N_NEIGHBOURS, "euclidean", 0)
        near.append(indices)
    values_of_pairs = []  # four values for each pair of maps
    for one, other in combinations(range(len(maps)), 2):
        _, _, distance = procrustes(maps[one], maps[other])
        overlap = _compute_overlap(near[one], near[other])
        permuted_map = maps[other][order]
        permuted_near = _permute_neighbours(near[other], order)
        _, _, chance_distance = procrustes(maps[one], permuted_map)
        chance_overlap = _compute_overlap(near[one], permuted_near)
        values_of_pairs.append((distance, chance_distance, overlap, chance_overlap))
    mean_distance, mean_chance_distance, mean_overlap, mean_chance_overlap = np.mean(values_of_pairs, axis=0).tolist()
    return {
        "procrustes_distance": (mean_distance, mean_chance_distance),
        "neighbour_overlap": (mean_overlap, mean_chance_overlap),
    }


def score_map(vectors: Vectors, maps: Sequence[Coordinates], metric: str, seed: int) -> pd.DataFrame:
    """Return a table with the columns `value` and `chance` by measure, for maps of the same vectors with other seeds.

    `SCORES` are computed for the first map, and `STABILITY` for all maps (omitted if there is only one map). Equal
    vectors count once. At most `MAX_SCORED_VECTORS` randomly sampled vectors are scored, with neighbours within the
    sample. For chance levels, the coordinates on the map are permuted. All values are NaN if there are fewer than three
    distinct vectors.
    """
    rows = _select_scored_rows(vectors, seed)
    vectors = vectors[rows]
    maps = [xy[rows] for xy in maps]
    first = maps[0]
    order = _draw_order(len(first), seed)
    values = scores(vectors, first, metric)
    chances = scores(vectors, first[order], metric)
    values_and_chances = {name: (values[name], chances[name]) for name in SCORES}
    are_undefined = np.isnan(values["neighbours_kept"])
    if len(maps) > 1 and are_undefined:
        values_and_chances.update(dict.fromkeys(STABILITY, (float("nan"), float("nan"))))
    elif len(maps) > 1:
        values_and_chances.update(stability(maps, seed))
    table = pd.DataFrame(values_and_chances, index=["value", "chance"])
    return table.T.rename_axis("measure").round(DIGITS)


def score_layout(layout: str, vectors: Mapping[Site, Vectors], maps: Maps, metric: str, seed: int) -> pd.DataFrame:
    """Return a table with `QUALITY_COLUMNS` and counts; rows of the whole layout precede rows of single points.

    The counts `tokens` (per point), `points` and `scored_vectors` are equal in all rows.

    - Rows with a layer and a point contain the scores of the vectors of this point. In the joint map, these scores have
      the names in `WITHIN`.
    - Rows without a layer and a point contain the mean over the points for which the score is defined. For the joint
      map, they also contain scores of the vectors of all points together, except points with a separate basis
      (`OWN_BASIS`).
    """
    maps_by_seed = list(maps.values())
    tokens = len(next(iter(vectors.values())))
    if layout == "joint":
        layout_scores, point_scores, scored_vectors = _score_joint(vectors, maps_by_seed, metric, seed)
    else:
        point_scores = _score_points(layout, vectors, maps_by_seed, metric, seed)
        layout_scores = _average_over_points(point_scores)
        scored_per_point = min(tokens, MAX_SCORED_VECTORS)
        scored_vectors = len(vectors) * scored_per_point
    # The scores of the layout have no layer and no point, so these columns are missing in their rows.
    table = pd.concat([layout_scores.reset_index(), point_scores.reset_index()])
    table = table.assign(layout=layout)[QUALITY_COLUMNS].round(DIGITS)
    table = table.astype({"layer": "Int32", "point": "string"})
    return table.assign(tokens=tokens, points=len(vectors), scored_vectors=scored_vectors)


def _score_joint(
    vectors: Mapping[Site, Vectors], maps: Sequence[Mapping[Site, Coordinates]], metric: str, seed: int
) -> tuple[pd.DataFrame, pd.DataFrame, int]:
    """Return the scores of the joint map, the scores of its points, and the number of vectors scored together.

    The scores of the map are those of the vectors of all points together, followed by the means of the scores `WITHIN`
    single points.
    """
    first_map = maps[:1]  # with a single map, stability is not scored
    point_scores = _score_points("joint", vectors, first_map, metric, seed).rename(index=WITHIN, level="measure")
    means_within_points = _average_over_points(point_scores).loc[list(WITHIN.values())]
    scores_among_all, scored_vectors = _score_among_all(vectors, maps, metric, seed)
    return pd.concat([scores_among_all, means_within_points]), point_scores, scored_vectors


def _average_over_points(point_scores: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of each measure over the points for which it is defined."""
    return point_scores.groupby("measure", sort=False).mean()


def _score_points(
    layout: str,
    vectors: Mapping[Site, Vectors],
    maps: Sequence[Mapping[Site, Coordinates]],
    metric: str,
    seed: int,
) -> pd.DataFrame:
    """Return the results of `score_map` for the vectors of each point, indexed by layer, point and measure."""
    calls = []
    for site, vectors_TD in vectors.items():
        maps_of_site = [by_site[site] for by_site in maps]
        calls.append((vectors_TD, maps_of_site, metric, seed))
    tables = in_parallel(score_map, calls, f"{layout}: scores by point")
    table_by_site = dict(zip(vectors, tables, strict=True))
    return pd.concat(table_by_site, names=["layer", "point"])


def _score_among_all(
    vectors: Mapping[Site, Vectors], maps: Sequence[Mapping[Site, Coordinates]], metric: str, seed: int
) -> tuple[pd.DataFrame, int]:
    """Return the result of `score_map` for a sample of the vectors of all points together, and the sample size.

    The sample is stratified by point. Points with a separate basis are excluded.
    """
    sites = [site for site in vectors if site.point not in OWN_BASIS]
    tokens = len(next(iter(vectors.values())))
    site_of_row = np.repeat(np.arange(len(sites)), tokens)
    rows = stratified_draw(site_of_row, MAX_SCORED_VECTORS, seed)
    drawn = _concatenate_sites(vectors, sites)[rows]
    drawn_maps = []
    for by_site in maps:
        xy = _concatenate_sites(by_site, sites)
        drawn_maps.append(xy[rows])
    call = (drawn, drawn_maps, metric, seed)
    # `in_parallel` also limits a single call to one thread, so that scores do not depend on the number of cores.
    (scores_of_map,) = in_parallel(score_map, [call], "joint: scores")
    return scores_of_map, len(rows)


def _concatenate_sites(arrays: Mapping[Site, Vectors], sites: Sequence[Site]) -> Vectors:
    """Return the rows `[sites * tokens, width]` of all `sites`; an empty array if there are no sites."""
    if not sites:
        first = next(iter(arrays.values()))
        return first[:0]
    return np.concatenate([arrays[site] for site in sites])


def _compute_overlap(near: Indices | npt.NDArray[np.int64], others: Indices | npt.NDArray[np.int64]) -> float:
    """Return the share of the indices in a row of `near` that also occur in the same row of `others`.

    `near` and `others` are neighbour indices `[rows, k]`; the share is averaged over the rows.
    """
    is_same = near[:, :, None] == others[:, None, :]  # [rows, k of near, k of others]
    is_shared = is_same.any(axis=2)
    return float(is_shared.mean())
