"""The measures of one map: what it kept of the full space's neighbourhoods and distances, and what is its seed's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.spatial import cKDTree, procrustes
from scipy.spatial.distance import pdist

from attnmix.core.ranks import rank_correlation
from attnmix.data.draw import Rows, stratified_draw
from attnmix.maps.neighbours import METRICS, Coordinates, Vectors, device

NEIGHBOURS = 15
SCORED_VECTORS = 4096  # of a map, at most; a seeded draw with all points in their shares, each against all vectors
BLOCK_DISTANCES = 2**22  # of the scored vectors to all, at once: 32 MB in float64
PAIRED_VECTORS = 1024  # whose pairwise distances are compared, at most
SCORES = ("trustworthiness", "continuity", "neighbours_kept")
STABILITY = ("procrustes_distance", "neighbour_overlap")
Scores = npt.NDArray[np.float64]


def scores(vectors: Vectors, layouts: Sequence[Coordinates], metric: str, rows: Rows | None = None) -> list[Scores]:
    """For each of `layouts`, `[rows, 3]`: what each vector of `rows` adds to `SCORES`; their mean is the map's score.

    With k = 15 nearest neighbours, trustworthiness is 1 - 2 / (n k (2n - 3k - 1)) sum_i sum_j (r(i, j) - k) over
    the neighbours j of i on the map that are none in the full space, r their rank there; continuity is the
    same with map and full space exchanged (Venna and Kaski 2001). Both are NaN for up to 2k vectors, where the
    formula has no meaning. Distances of the full space are by `metric`, exact, also where the map was made
    from approximate neighbours. At least two vectors.
    """
    n, k = len(vectors), min(NEIGHBOURS, len(vectors) - 1)
    rows = np.arange(n) if rows is None else rows
    full = _Space(vectors, metric)
    maps = [_Space(xy, "euclidean") for xy in layouts]
    at_once = max(1, BLOCK_DISTANCES // n)
    parts: list[list[torch.Tensor]] = [[] for _ in layouts]
    for start in range(0, len(rows), at_once):
        chosen = torch.from_numpy(rows[start : start + at_once]).to(device())
        far = full.compared(chosen)
        near_full = far.topk(k + 1, largest=False).indices[:, 1:]
        for part, flat in zip(parts, maps, strict=True):
            apart = flat.compared(chosen)
            near_map = apart.topk(k + 1, largest=False).indices[:, 1:]
            kept = (near_full[:, :, None] == near_map[:, None, :]).any(2).double().mean(1)
            excess = (_rank_excess(far, near_map), _rank_excess(apart, near_full))
            part.append(torch.stack([*excess, kept], dim=1).cpu())
    summed = [torch.cat(part).numpy() for part in parts]
    scale = 2 / (k * (2 * n - 3 * k - 1)) if 2 * k < n else np.nan
    return [np.column_stack([1 - scale * each[:, :2], each[:, 2]]) for each in summed]


class _Space:
    """Vectors in float64, and how far some of them are from all."""

    def __init__(self, vectors: Vectors, metric: str) -> None:
        self.metric = METRICS[metric]
        self.x_ND = self.metric.prepare(torch.from_numpy(vectors).to(device(), torch.float64))

    def compared(self, rows: torch.Tensor) -> torch.Tensor:
        """`[rows, vectors]`, ordered as the distances; a vector's own is -1, first also among equal ones."""
        block = self.metric.compare(self.x_ND[rows], self.x_ND)
        block[torch.arange(len(rows), device=block.device), rows] = -1
        return block


def _rank_excess(distances: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """By how much the ranks of the `chosen` vectors `[rows, k]` exceed k, summed: `[rows]`."""
    # The vector itself has rank 0; among equal distances the lowest rank counts.
    wanted = torch.gather(distances, 1, chosen)
    excess = torch.zeros(len(distances), dtype=torch.float64, device=distances.device)
    for column in wanted.T.contiguous():
        ranks = (distances < column[:, None]).sum(1)
        excess += (ranks - chosen.shape[1]).clamp(min=0)
    return excess


def scored_rows(sites: npt.NDArray[np.int64], seed: int, limit: int = SCORED_VECTORS) -> Rows:
    """Which vectors stand for a map of more than `limit`, each capture point with its share; `sites` is `[vectors]`."""
    return stratified_draw(sites, limit, seed)


def distance_correlation(vectors: Vectors, xy: Coordinates, metric: str, seed: int) -> float:
    """Spearman's rank correlation of the distances between pairs, on the map and in the full space.

    Over all pairs of at most `PAIRED_VECTORS` vectors. NaN for fewer than 3 vectors and for vectors that are all
    equally far from one another.
    """
    rows = stratified_draw(np.zeros(len(vectors), dtype=np.int64), PAIRED_VECTORS, seed)
    x_ND = torch.from_numpy(vectors[rows]).to(device(), torch.float64)
    distances = METRICS[metric].between(x_ND, x_ND).cpu().numpy()
    return spearman(distances[np.triu_indices(len(rows), 1)], pdist(xy[rows].astype(np.float64)))


def spearman(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """The rank correlation; NaN where one side is constant or holds fewer than 3 values."""
    return float(rank_correlation(a, b)) if len(a) >= 3 else float("nan")


def stability(layouts: Sequence[Coordinates], seed: int) -> dict[str, tuple[float, float]]:
    """How alike maps of the same vectors with different seeds are, over all pairs of maps: value and chance.

    `procrustes_distance` is what is left of the squared distance between two maps, both scaled to 1, after the best
    translation, rotation, reflection and scaling (0: the same shape, 1: nothing in common); `neighbour_overlap` is the
    share of a vector's 15 nearest on one map that are among its 15 nearest on the other. Chance deals the places
    of the second map out anew. At least three vectors.
    """
    number = len(layouts[0])
    generator = np.random.default_rng(seed)
    rows = stratified_draw(np.zeros(number, dtype=np.int64), SCORED_VECTORS, seed)
    pairs = []
    for one, other in combinations([xy.astype(np.float64) for xy in layouts], 2):
        dealt = other[generator.permutation(number)]
        near = _nearest(one, rows)
        pairs.append([[procrustes(one, xy)[2], _overlap(near, _nearest(xy, rows))] for xy in (other, dealt)])
    value, chance = np.mean(pairs, axis=0).tolist()
    return dict(zip(STABILITY, zip(value, chance, strict=True), strict=True))


def _nearest(xy: npt.NDArray[np.float64], rows: Rows) -> npt.NDArray[np.int64]:
    k = min(NEIGHBOURS, len(xy) - 1)
    indices = np.asarray(cKDTree(xy).query(xy[rows], k + 1)[1])
    # A vector is no neighbour of itself; among several in one place it need not come first.
    own = indices == rows[:, None]
    own[~own.any(1), -1] = True
    return np.asarray(indices[~own].reshape(len(rows), k), dtype=np.int64)


def _overlap(near: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> float:
    return float((near[:, :, None] == others[:, None, :]).any(2).mean())
