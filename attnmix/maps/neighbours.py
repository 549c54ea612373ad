"""Nearest neighbours under umap-learn's metrics, exact and without umap-learn for up to `MAX_EXACT_VECTORS` vectors."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

from attnmix.core.statistics import Doubles
from attnmix.maps.vectors import Vectors

MAX_FEW_VECTORS = 1024  # searched with NumPy on pages, because the import of scikit-learn takes half a second
MAX_EXACT_VECTORS = 32_768  # for more, nearest-neighbour descent is faster, including half a minute of compilation
NEAREST_VECTORS = 5  # stored neighbours in the full space per vector
SMALL_LENGTH = 10 * np.finfo(np.float64).eps  # shorter vectors are not scaled, as in scikit-learn
MIN_RELATIVE_DISTANCE = 1e-6  # in vector lengths; smaller distances are rounding errors of the matrix product

Indices = npt.NDArray[np.int32]


class Metric(NamedTuple):
    """A metric of umap-learn, as a distance between prepared vectors.

    `distance` is its name in scikit-learn, SciPy and pynndescent.
    """

    distance: str
    prepare: Callable[[Doubles], Doubles] = lambda x_ND: x_ND
    finish: Callable[[Doubles], Doubles] = lambda distances: distances
    """A monotonic function from the distance of prepared vectors to the metric's value."""

    def prepared(self, vectors: Vectors) -> Doubles:
        """Return prepared vectors. `distance` between them orders pairs of vectors as the metric does."""
        return self.prepare(vectors.astype(np.float64))


def _unit(x_ND: Doubles) -> Doubles:
    """Scale vectors to length 1, and add a dimension that separates zero vectors from all others."""
    is_zero_N = ~x_ND.any(axis=1)
    extended_NE: Doubles = np.column_stack([x_ND, is_zero_N]).astype(np.float64)
    lengths_N = np.sqrt(np.einsum("ij,ij->i", extended_NE, extended_NE))
    is_small_N = lengths_N < SMALL_LENGTH
    divisors_N = np.where(is_small_N, 1, lengths_N)
    return np.asarray(extended_NE / divisors_N[:, None])


def _unit_centred(x_ND: Doubles) -> Doubles:
    mean_N1 = x_ND.mean(axis=1, keepdims=True)
    return _unit(x_ND - mean_N1)


def _without_zeros(x_ND: Doubles) -> Doubles:
    """Replace zero vectors, to avoid Bray-Curtis distances of 0 / 0."""
    is_nonzero_N1 = x_ND.any(axis=1, keepdims=True)
    return np.asarray(np.where(is_nonzero_N1, x_ND, 1e-12))


def _root_probabilities(x_ND: Doubles) -> Doubles:
    return np.asarray(np.sqrt(softmax(x_ND, axis=1)))


def _one_minus_cosine(distances: Doubles) -> Doubles:
    """Convert distances of unit vectors to 1 - cosine."""
    return distances**2 / 2


def _hellinger(distances: Doubles) -> Doubles:
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
    "braycurtis": Metric("braycurtis", prepare=_without_zeros),
    "canberra": Metric("canberra"),
    "cosine": Metric("euclidean", prepare=_unit, finish=_one_minus_cosine),
    "correlation": Metric("euclidean", prepare=_unit_centred, finish=_one_minus_cosine),
    "softmax_hellinger": Metric("euclidean", prepare=_root_probabilities, finish=_hellinger),
}
"""Metrics by their names in umap-learn."""


def neighbours(vectors: Vectors, k: int, metric: str, seed: int) -> tuple[Indices, Doubles]:
    """Return indices and distances `[vectors, k]` of each vector's `k` nearest other vectors, sorted by distance.

    `k` is reduced if there are fewer other vectors. The search is exact for up to `MAX_EXACT_VECTORS` vectors; for
    more, `seed` initialises an approximate search.
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


def nearest_indices(vectors: Vectors, k: int, metric: str) -> Indices:
    """Return the indices of `neighbours`, for pages: without scikit-learn if there are few vectors.

    Of vectors at the same distance, the first ones are returned.
    """
    known = METRICS[metric]
    k = min(k, len(vectors) - 1)
    if k == 0 or len(vectors) > MAX_FEW_VECTORS or known.distance != "euclidean":
        indices, _ = neighbours(vectors, k, metric, 0)
        return indices
    x_ND = known.prepared(vectors)
    squares_N = np.einsum("ij,ij->i", x_ND, x_ND)
    squares_NN = squares_N[:, None] + squares_N - 2 * (x_ND @ x_ND.T)
    is_rounding = squares_NN < MIN_RELATIVE_DISTANCE**2 * squares_N[:, None]
    squares_NN[is_rounding] = 0
    np.fill_diagonal(squares_NN, np.inf)
    order_NN = np.argsort(squares_NN, axis=1, kind="stable")
    return order_NN[:, :k].astype(np.int32)


def _exact(x_ND: Doubles, k: int, distance: str) -> tuple[Indices, Doubles]:
    """Search with all pairwise distances, in scikit-learn."""
    from sklearn import config_context  # slow import, not needed for pages of few tokens
    from sklearn.neighbors import NearestNeighbors

    search = NearestNeighbors(n_neighbors=k, algorithm="brute", metric=distance)
    # The Bray-Curtis distance of scikit-learn's fast search differs from SciPy and umap-learn.
    is_fast = distance != "braycurtis"
    with config_context(enable_cython_pairwise_dist=is_fast, skip_parameter_validation=True):
        search.fit(x_ND)
        distances, indices = search.kneighbors()
    return indices, distances


def _approximate(x_ND: Doubles, k: int, distance: str, seed: int) -> tuple[Indices, Doubles]:
    """Search with umap-learn, and remove each vector from its own neighbours."""
    from umap.umap_ import nearest_neighbors  # slow import, not needed for the exact search

    random_state = np.random.RandomState(seed)
    indices, distances, _ = nearest_neighbors(x_ND, k + 1, distance, {}, False, random_state, n_jobs=1)
    is_itself = indices == np.arange(len(indices))[:, None]
    lacks_itself_N = ~is_itself.any(axis=1)
    is_itself[lacks_itself_N, -1] = True
    other_indices = indices[~is_itself].reshape(-1, k)
    other_distances = distances[~is_itself].reshape(-1, k)
    return other_indices, other_distances.astype(np.float64)
