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
    is_zero_N = ~x_ND.any(axis=1)
    return np.asarray(normalize(np.column_stack([x_ND, is_zero_N])))


def _unit_centred(x_ND: Doubles) -> Doubles:
    mean_N1 = x_ND.mean(axis=1, keepdims=True)
    return _unit(x_ND - mean_N1)


def _without_zeros(x_ND: Doubles) -> Doubles:
    """Replace zero vectors, of which a Bray-Curtis distance would be 0 / 0."""
    is_nonzero_N1 = x_ND.any(axis=1, keepdims=True)
    return np.asarray(np.where(is_nonzero_N1, x_ND, 1e-12))


def _root_probabilities(x_ND: Doubles) -> Doubles:
    return np.asarray(np.sqrt(softmax(x_ND, axis=1)))


def _one_minus_cosine(distances: Doubles) -> Doubles:
    """Return 1 - cosine from the distances of unit vectors."""
    return distances**2 / 2


def _hellinger(distances: Doubles) -> Doubles:
    """Return Hellinger distances from those of the roots of probabilities."""
    return np.asarray(distances / np.sqrt(2))


_EUCLIDEAN = Metric("euclidean")
_MANHATTAN = Metric("manhattan")
_CHEBYSHEV = Metric("chebyshev")
METRICS: dict[str, Metric] = {
    "euclidean": _EUCLIDEAN,
    "l2": _EUCLIDEAN,
    "minkowski": _EUCLIDEAN,  # umap-learn's has p = 2
    "manhattan": _MANHATTAN,
    "l1": _MANHATTAN,
    "taxicab": _MANHATTAN,
    "chebyshev": _CHEBYSHEV,
    "linfinity": _CHEBYSHEV,
    "linfty": _CHEBYSHEV,
    "linf": _CHEBYSHEV,
    "braycurtis": Metric("braycurtis", prepare=_without_zeros),
    "canberra": Metric("canberra"),
    "cosine": Metric("euclidean", prepare=_unit, finish=_one_minus_cosine),
    "correlation": Metric("euclidean", prepare=_unit_centred, finish=_one_minus_cosine),
    "softmax_hellinger": Metric("euclidean", prepare=_root_probabilities, finish=_hellinger),
}
"""By umap-learn's names."""


def neighbours(vectors: Vectors, k: int, metric: str, seed: int) -> tuple[Indices, Doubles]:
    """Return indices and distances `[vectors, k]` of each vector's `k` nearest others, the nearest first.

    All others where there are fewer. Exact up to `MAX_EXACT_VECTORS`; `seed` draws where the approximate search starts.
    """
    known = METRICS[metric]
    x_ND = known.prepared(vectors)
    k = min(k, len(vectors) - 1)
    if k == 0:
        return np.empty((1, 0), np.int32), np.empty((1, 0))
    if len(x_ND) > MAX_EXACT_VECTORS:
        indices, distances = _approximate(x_ND, k, known.distance, seed)
    else:
        indices, distances = _exact(x_ND, k, known.distance)
    lengths_N = np.linalg.norm(x_ND, axis=1)
    is_rounding = distances < MIN_RELATIVE_DISTANCE * lengths_N[:, None]
    distances[is_rounding] = 0
    return indices.astype(np.int32), known.finish(distances)


def _exact(x_ND: Doubles, k: int, distance: str) -> tuple[Indices, Doubles]:
    search = NearestNeighbors(n_neighbors=k, algorithm="brute", metric=distance)
    # scikit-learn's fast search has another Bray-Curtis distance than SciPy and umap-learn.
    is_fast = distance != "braycurtis"
    with config_context(enable_cython_pairwise_dist=is_fast, skip_parameter_validation=True):
        search.fit(x_ND)
        distances, indices = search.kneighbors()
    return indices, distances


def _approximate(x_ND: Doubles, k: int, distance: str, seed: int) -> tuple[Indices, Doubles]:
    """Search as umap-learn does, whose result has each vector among its own neighbours."""
    from umap.umap_ import nearest_neighbors  # seconds, which few vectors need not wait

    random_state = np.random.RandomState(seed)
    indices, distances, _ = nearest_neighbors(x_ND, k + 1, distance, {}, False, random_state, n_jobs=1)
    is_itself = indices == np.arange(len(indices))[:, None]
    lacks_itself_N = ~is_itself.any(axis=1)
    is_itself[lacks_itself_N, -1] = True
    other_indices = indices[~is_itself].reshape(-1, k)
    other_distances = distances[~is_itself].reshape(-1, k)
    return other_indices, other_distances.astype(np.float64)
