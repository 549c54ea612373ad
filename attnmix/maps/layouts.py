"""Nearest neighbours and layouts in two dimensions, by scikit-learn and umap-learn.

`joint` is one map of all points, `separate` one of each, `aligned` one of each with every token tied to itself
(`attnmix.maps.aligned`); `pca` has the two principal components of each, the same with any seed. umap-learn's functions
are called instead of `umap.UMAP`, which would build the neighbour graph again for every seed; the maps are the same,
bit for bit (tested). All maps start from principal components: umap-learn's own start calls SciPy's `eigsh` without a
seed. Equal vectors are laid out once, and have one place: umap-learn would spread copies over a disc.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import umap.layouts
from scipy.sparse import csr_matrix, identity
from scipy.special import softmax
from sklearn import config_context
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize
from umap import umap_

from attnmix.core.names import Site
from attnmix.core.settings import MIN_UMAP_VECTORS, UmapParameters
from attnmix.maps.aligned import Coordinates, Graph, fit_aligned, ties
from attnmix.maps.parallel import in_parallel
from attnmix.maps.vectors import Numbers, Vectors, distinct_rows

MAX_EXACT_VECTORS = 32_768  # beyond, nearest-neighbour descent is faster, half a minute of compilation included
MIN_RELATIVE_DISTANCE = 1e-6  # of a vector's length; smaller distances are rounding of the matrix product
MIN_STRENGTH = 1e-12  # of the largest eigenvalue; smaller ones are rounding
N_EPOCHS = 200
START_EXTENT, START_NOISE = 10.0, 1e-4  # umap-learn's own: the start's size to each side of the middle, noise on it

# umap-learn compiles these functions in every process, for 7 s; here they are cached. Its epochs are compiled to run
# without the interpreter lock, so that threads fit maps at the same time.
umap.layouts._nb_optimize_layout_euclidean_single_epoch = numba.njit(
    umap.layouts._optimize_layout_euclidean_single_epoch, fastmath=True, nogil=True, cache=True
)
umap_.smooth_knn_dist.enable_caching()
umap_.compute_membership_strengths.enable_caching()
_NUMBA_LOCK = threading.Lock()  # only one of our threads at a time may use numba's own threads

Doubles = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int32]
Maps = Mapping[int, Mapping[Site, Coordinates]]
"""Coordinates `[tokens, 2]` by seed and point."""


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
    random_state = np.random.RandomState(seed)
    indices, distances, _ = umap_.nearest_neighbors(x_ND, k + 1, distance, {}, False, random_state, n_jobs=1)
    itself = indices == np.arange(len(indices))[:, None]
    itself[~itself.any(axis=1), -1] = True
    return indices[~itself].reshape(-1, k), distances[~itself].reshape(-1, k).astype(np.float64)


def two_components(x_ND: Doubles) -> Doubles:
    """Return the two principal components `[vectors, 2]`; in each direction the number of the largest size is positive.

    Of the covariance `[hidden, hidden]` or of the products of the vectors `[vectors, vectors]`, whichever is smaller.
    """
    vectors, width = x_ND.shape
    if vectors >= width > 1:
        return np.asarray(PCA(2, svd_solver="covariance_eigh").fit_transform(x_ND))
    centred_ND = x_ND - x_ND.mean(axis=0)
    strengths_N, left_NN = np.linalg.eigh(centred_ND @ centred_ND.T)
    components = np.zeros((vectors, 2))
    for axis in range(min(vectors, 2)):
        strength, left_N = strengths_N[-1 - axis], left_NN[:, -1 - axis]
        if strength > MIN_STRENGTH * strengths_N[-1]:
            direction_D = left_N @ centred_ND
            sign = np.sign(direction_D[np.argmax(np.abs(direction_D))])
            components[:, axis] = left_N * (sign * np.sqrt(strength))
    return components


def principal_components(vectors: Vectors, metric: str) -> Coordinates:
    """Return the two principal components `[vectors, 2]` of what `metric` compares, scaled to one extent.

    Equal vectors have one place; where all are equal, it is the origin.
    """
    first, numbers = distinct_rows(vectors)
    if len(first) == 1:
        return np.zeros((len(vectors), 2), np.float32)
    components = two_components(METRICS[metric].prepared(vectors))
    extent = np.abs(components).max()  # 0 for vectors that differ, but not by the metric
    return np.asarray(components * (START_EXTENT / extent if extent > 0 else 0))[first][numbers]


class Neighbourhood(NamedTuple):
    """The neighbours and the start that maps of the same vectors share, whatever their seed; equal vectors are one."""

    graph: Graph
    """The weighted neighbour graph `[distinct, distinct]` that `umap.UMAP` keeps as `graph_`."""
    places: Coordinates
    """The two principal components `[distinct, 2]`, from which maps start."""
    numbers: Numbers
    """For each vector the number of its equal among those that differ."""

    def start(self, seed: int) -> Coordinates:
        """Return where a map starts, `[distinct, 2]`: the principal components, with a little noise."""
        noise = np.random.RandomState(seed).normal(scale=START_NOISE, size=self.places.shape)
        return np.asarray(self.places + noise, dtype=np.float32)

    def between_vectors(self) -> Graph:
        """Return the graph `[vectors, vectors]`, in which equal vectors are neighbours and have the same others."""
        vectors = len(self.numbers)
        member = csr_matrix((np.ones(vectors), (np.arange(vectors), self.numbers)))
        return csr_matrix(member @ self.graph @ member.T + member @ member.T - identity(vectors))


def neighbourhood(vectors: Vectors, metric: str, n_neighbors: int, seed: int) -> Neighbourhood:
    """Return the neighbour graph and the start of maps of `vectors`, of which more than two differ.

    Each of fewer vectors than `n_neighbors` is a neighbour of all others. `seed` is that of an approximate search.
    """
    first, numbers = distinct_rows(vectors)
    distinct = vectors[first]
    k = min(n_neighbors, len(distinct) - 1)  # each vector counts among its own
    others, distances = neighbours(distinct, k - 1, metric, seed)
    indices = np.column_stack([np.arange(len(distinct)), others])
    distances = np.pad(distances, ((0, 0), (1, 0)))
    with _NUMBA_LOCK:
        numba.set_num_threads(1)  # several would sum in another order
        graph, _, _ = umap_.fuzzy_simplicial_set(distinct, k, None, metric, {}, indices, distances)
    return Neighbourhood(graph.tocsr(), principal_components(distinct, metric), numbers)


def fit_map(
    vectors: Vectors, metric: str = "euclidean", n_neighbors: int = 15, min_dist: float = 0.1, seed: int = 2
) -> Coordinates:
    """Return coordinates `[vectors, 2]` of one map."""
    return lay_out(neighbourhood(vectors, metric, n_neighbors, seed), min_dist, seed)


def lay_out(near: Neighbourhood, min_dist: float, seed: int) -> Coordinates:
    """Return coordinates `[vectors, 2]` of one map."""
    # Of a copy, as umap-learn removes weak edges in place. It looks at vectors and metric for starts of its own only.
    xy, _ = umap_.simplicial_set_embedding(
        None, near.graph.copy(), 2, 1.0, *umap_.find_ab_params(1.0, min_dist), 1.0, 5, N_EPOCHS, near.start(seed),
        np.random.RandomState(seed), None, {}, False, {}, False,
    )  # fmt: skip
    return np.asarray(xy, dtype=np.float32)[near.numbers]


def lay_out_aligned(near: Sequence[Neighbourhood], min_dist: float, seed: int) -> list[Coordinates]:
    """Return coordinates `[tokens, 2]` at each point."""
    a, b = map(float, umap_.find_ab_params(1.0, min_dist))
    strength = ties([each.between_vectors() for each in near])
    starts, numbers = [each.start(seed) for each in near], [each.numbers for each in near]
    return fit_aligned([each.graph for each in near], starts, numbers, strength, (a, b), N_EPOCHS, seed)


def points_for(layout: str, vectors: Mapping[Site, Vectors], settings: UmapParameters) -> dict[Site, Vectors]:
    """Return the points whose vectors `[tokens, width]` a layout can show: all, but for what is too little for UMAP.

    UMAP needs `MIN_UMAP_VECTORS` tokens, and at a point that it lays out alone as many vectors that differ, and more
    than `n_neighbors`.
    """
    if layout == "pca" or not vectors:
        return dict(vectors)
    if min(map(len, vectors.values())) < MIN_UMAP_VECTORS:
        return {}
    needed = max(MIN_UMAP_VECTORS, settings.n_neighbors + 1)
    if layout == "joint":
        return dict(vectors) if len(distinct_rows(np.concatenate(list(vectors.values())))[0]) >= needed else {}
    return {site: each for site, each in vectors.items() if len(distinct_rows(each)[0]) >= needed}


def fit_layout(layout: str, vectors: Mapping[Site, Vectors], settings: UmapParameters) -> Maps:
    """Return a map for each seed, `seed` first, of each point's vectors `[tokens, width]`; `pca` is one for all seeds.

    `vectors` are what `points_for` returns. Only `separate` and `pca` take vectors of several widths.
    """
    if layout == "pca":
        components = in_parallel(principal_components, [(each, settings.metric) for each in vectors.values()], "pca")
        return {settings.seed: {site: xy.astype(np.float32) for site, xy in zip(vectors, components, strict=True)}}
    blocks = [np.concatenate(list(vectors.values()))] if layout == "joint" else list(vectors.values())
    seeds = [settings.seed, *settings.stability_seeds]
    searches = [(block, settings.metric, settings.n_neighbors, settings.seed) for block in blocks]
    near = in_parallel(neighbourhood, searches, f"{layout}: neighbours")
    if layout == "aligned":
        runs = in_parallel(
            lay_out_aligned, [(near, settings.min_dist, seed) for seed in seeds], "aligned: maps by seed"
        )
        blocks = [xy for run in runs for xy in run]
    else:
        calls = [(each, settings.min_dist, seed) for seed in seeds for each in near]
        blocks = in_parallel(lay_out, calls, f"{layout}: maps")
    places = iter(np.split(np.concatenate(blocks), len(seeds) * len(vectors)))
    return {seed: {site: next(places) for site in vectors} for seed in seeds}
