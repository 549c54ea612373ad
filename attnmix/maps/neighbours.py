"""Nearest neighbours under umap-learn's metrics; the search is exact for up to `MAX_EXACT_VECTORS` vectors."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

from attnmix.core.statistics import Doubles
from attnmix.maps.vectors import Vectors

MAX_EXACT_VECTORS = (
    32_768  # for more vectors, nearest-neighbour descent is faster, even with half a minute of compilation
)
NEAREST_VECTORS = 5  # number of stored neighbours of each vector in the full space
MIN_RELATIVE_DISTANCE = 1e-6  # in vector lengths; smaller distances are rounding errors of the matrix product

Indices = npt.NDArray[np.int32]


class Metric(NamedTuple):
    """A metric of umap-learn, expressed as a distance between transformed vectors."""

    distance: str
    """The name of the distance in scikit-learn, SciPy and pynndescent."""
    prepare: Callable[[Doubles], Doubles] = lambda x_ND: x_ND
    """The transformation of the vectors `[N, D]`."""
    finish: Callable[[Doubles], Doubles] = lambda distances: distances
    """A monotonic function from the distance of prepared vectors to the metric's value."""

    def prepared(self, vectors: Vectors) -> Doubles:
        """Return the prepared vectors; their `distance` sorts pairs of vectors in the same order as the metric."""
        return self.prepare(vectors.astype(np.float64))


def _scale_to_unit(x_ND: Doubles) -> Doubles:
    """Scale vectors to length 1, and add a dimension that separates zero vectors from all others."""
    from sklearn.preprocessing import normalize  # slow import, not needed by all users of the metrics

    is_zero_N = ~x_ND.any(axis=1)
    return np.asarray(normalize(np.column_stack([x_ND, is_zero_N])))


def _centre_and_scale(x_ND: Doubles) -> Doubles:
    """Subtract the mean of each vector's components, and scale the results to length 1 with `_scale_to_unit`."""
    mean_N1 = x_ND.mean(axis=1, keepdims=True)
    return _scale_to_unit(x_ND - mean_N1)


def _replace_zeros(x_ND: Doubles) -> Doubles:
    """Replace zero vectors by tiny vectors, to avoid Bray-Curtis distances of 0 / 0."""
    is_nonzero_N1 = x_ND.any(axis=1, keepdims=True)
    return np.asarray(np.where(is_nonzero_N1, x_ND, 1e-12))


def _take_root_of_probabilities(x_ND: Doubles) -> Doubles:
    """Return the square roots of the softmax of each vector."""
    return np.asarray(np.sqrt(softmax(x_ND, axis=1)))


def _convert_to_cosine(distances: Doubles) -> Doubles:
    """Convert distances of unit vectors to 1 - cosine."""
    return distances**2 / 2


def _convert_to_hellinger(distances: Doubles) -> Doubles:
    """Convert distances between square roots of probabilities to Hellinger distances."""
    return np.asarray(distances / np.sqrt(2))


_EUCLIDEAN = Metric("euclidean")
_MANHATTAN = Metric("manhattan")
_CHEBYSHEV = Metric("chebyshev")
METRICS: dict[str, Metric] = {
    "euclidean": _EUCLIDEAN,
    "l2": _EUCLIDEAN,
    "minkowski": _EUCLIDEAN,  # umap-learn's default is p = 2
    "manhattan": _MANHATTAN,
    "l1": _MANHATTAN,
    "taxicab": _MANHATTAN,
    "chebyshev": _CHEBYSHEV,
    "linfinity": _CHEBYSHEV,
    "linfty": _CHEBYSHEV,
    "linf": _CHEBYSHEV,
    "braycurtis": Metric("braycurtis", prepare=_replace_zeros),
    "canberra": Metric("canberra"),
    "cosine": Metric("euclidean", prepare=_scale_to_unit, finish=_convert_to_cosine),
    "correlation": Metric("euclidean", prepare=_centre_and_scale, finish=_convert_to_cosine),
    "softmax_hellinger": Metric("euclidean", prepare=_take_root_of_probabilities, finish=_convert_to_hellinger),
}
"""The supported metrics, by their names in umap-learn."""


def neighbours(vectors: Vectors, k: int, metric: str, seed: int) -> tuple[Indices, Doubles]:
    """Return indices and distances `[vectors, k]` of each vector's `k` nearest other vectors, sorted by distance.

    `k` is reduced if there are fewer other vectors. The search is exact for up to `MAX_EXACT_VECTORS` vectors; for
    more, `seed` initialises an approximate search.
    """
    definition = METRICS[metric]
    x_ND = definition.prepared(vectors)
    k = min(k, len(vectors) - 1)
    if k == 0:  # a single vector has no neighbours
        return np.empty((1, 0), np.int32), np.empty((1, 0))
    if len(x_ND) > MAX_EXACT_VECTORS:
        indices, distances = _search_approximately(x_ND, k, definition.distance, seed)
    else:
        indices, distances = _search_exactly(x_ND, k, definition.distance)
    # Equal vectors must have the distance 0, without rounding errors.
    lengths_N = np.linalg.norm(x_ND, axis=1)
    is_rounding_error = distances < MIN_RELATIVE_DISTANCE * lengths_N[:, None]
    distances[is_rounding_error] = 0
    return indices.astype(np.int32), definition.finish(distances)


def _search_exactly(x_ND: Doubles, k: int, distance: str) -> tuple[Indices, Doubles]:
    """Return indices and distances `[N, k]` of the nearest other vectors; scikit-learn compares all pairs."""
    from sklearn import config_context  # slow import, not needed by all users of the metrics
    from sklearn.neighbors import NearestNeighbors

    search = NearestNeighbors(n_neighbors=k, algorithm="brute", metric=distance)
    # The Bray-Curtis distance of scikit-learn's fast search differs from that of SciPy and umap-learn.
    is_fast = distance != "braycurtis"
    with config_context(enable_cython_pairwise_dist=is_fast, skip_parameter_validation=True):
        search.fit(x_ND)
        distances, indices = search.kneighbors()
    return indices, distances


def _search_approximately(x_ND: Doubles, k: int, distance: str, seed: int) -> tuple[Indices, Doubles]:
    """Return indices and distances `[N, k]` of the nearest other vectors, found by umap-learn."""
    from umap.umap_ import nearest_neighbors  # slow import, not needed for the exact search

    random_state = np.random.RandomState(seed)
    indices, distances, _ = nearest_neighbors(x_ND, k + 1, distance, {}, False, random_state, n_jobs=1)
    # From the k + 1 results of each vector, remove the vector itself or, if it was not found, the farthest result.
    is_removed = indices == np.arange(len(indices))[:, None]
    lacks_itself_N = ~is_removed.any(axis=1)
    is_removed[lacks_itself_N, -1] = True
    other_indices = indices[~is_removed].reshape(-1, k)
    other_distances = distances[~is_removed].reshape(-1, k)
    return other_indices, other_distances.astype(np.float64)
