"""Nearest neighbours by each of umap-learn's metrics; exact up to `MAX_EXACT_VECTORS`. UMAP is not loaded for them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import softmax
from sklearn import config_context
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize

from attnmix.core.statistics import Doubles
from attnmix.maps.vectors import Vectors

MAX_EXACT_VECTORS = 32_768  # beyond, nearest-neighbour descent is faster, half a minute of compilation included
NEAREST_VECTORS = 5  # neighbours in the full space that are kept for each vector
MIN_RELATIVE_DISTANCE = 1e-6  # of a vector's length; smaller distances are rounding of the matrix product

Indices = npt.NDArray[np.int32]


class Metric(NamedTuple):
    """One of umap-learn's metrics as a distance that scikit-learn, SciPy and pynndescent know, of prepared vectors."""

    distance: str
    prepare: Callable[[Doubles], Doubles] = lambda x_ND: x_ND
    finish: Callable[[Doubles], Doubles] = lambda distances: distances
    """The metric's value from the prepared vectors' distance; it keeps the order."""

    def prepared(self, vectors: Vectors) -> Doubles:
        """Return the vectors among which `distance` has the order of the metric."""
        return self.prepare(vectors.astype(np.float64))


def _unit(x_ND: Doubles) -> Doubles:
    """Scale to length 1. Zero vectors get a dimension of their own, so that they are equal to each other only."""
    return np.asarray(normalize(np.column_stack([x_ND, ~x_ND.any(axis=1)])))


METRICS: dict[str, Metric] = {
    **dict.fromkeys(("euclidean", "l2", "minkowski"), Metric("euclidean")),  # umap-learn's minkowski has p = 2
    **dict.fromkeys(("manhattan", "l1", "taxicab"), Metric("manhattan")),
    **dict.fromkeys(("chebyshev", "linfinity", "linfty", "linf"), Metric("chebyshev")),
    # Of zero vectors it would be 0 / 0.
    "braycurtis": Metric("braycurtis", lambda x_ND: np.where(x_ND.any(axis=1, keepdims=True), x_ND, 1e-12)),
    "canberra": Metric("canberra"),
    # 1 - cosine, from the distance of unit vectors.
    "cosine": Metric("euclidean", _unit, lambda d: d**2 / 2),
    "correlation": Metric("euclidean", lambda x_ND: _unit(x_ND - x_ND.mean(axis=1, keepdims=True)), lambda d: d**2 / 2),
    "softmax_hellinger": Metric("euclidean", lambda x_ND: np.sqrt(softmax(x_ND, axis=1)), lambda d: d / np.sqrt(2)),
}
"""By umap-learn's names."""


def neighbours(vectors: Vectors, k: int, metric: str, seed: int) -> tuple[Indices, Doubles]:
    """Return indices and distances `[vectors, k]` of each vector's `k` nearest others, the nearest first.

    All others where there are fewer. Exact up to `MAX_EXACT_VECTORS`; `seed` draws where the approximate search starts.
    """
    known = METRICS[metric]
    x_ND, k = known.prepared(vectors), min(k, len(vectors) - 1)
    if k == 0:
        return np.empty((1, 0), np.int32), np.empty((1, 0))
    if len(x_ND) > MAX_EXACT_VECTORS:
        indices, distances = _approximate(x_ND, k, known.distance, seed)
    else:
        search = NearestNeighbors(n_neighbors=k, algorithm="brute", metric=known.distance).fit(x_ND)
        # scikit-learn's fast search has another Bray-Curtis distance than SciPy and umap-learn.
        with config_context(enable_cython_pairwise_dist=known.distance != "braycurtis"):
            distances, indices = search.kneighbors()
    distances[distances < MIN_RELATIVE_DISTANCE * np.linalg.norm(x_ND, axis=1)[:, None]] = 0
    return indices.astype(np.int32), known.finish(distances)


def _approximate(x_ND: Doubles, k: int, distance: str, seed: int) -> tuple[Indices, Doubles]:
    """Search as umap-learn does, whose result has each vector among its own neighbours."""
    from umap.umap_ import nearest_neighbors  # seconds, which few vectors need not wait

    random_state = np.random.RandomState(seed)
    indices, distances, _ = nearest_neighbors(x_ND, k + 1, distance, {}, False, random_state, n_jobs=1)
    itself = indices == np.arange(len(indices))[:, None]
    itself[~itself.any(axis=1), -1] = True
    return indices[~itself].reshape(-1, k), distances[~itself].reshape(-1, k).astype(np.float64)
