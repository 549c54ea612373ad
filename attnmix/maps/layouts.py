"""Two-dimensional layouts with umap-learn.

`joint` is one map of all capture points, `separate` one map per point, and `aligned` one map per point with ties
between the coordinates of the same token at different points (`attnmix.maps.aligned`). `pca` contains the first two
principal components of each point, which do not depend on the seed. The code calls functions of umap-learn instead of
`umap.UMAP`, which would rebuild the neighbour graph for every seed; the maps are identical to those of `umap.UMAP`
(tested). All maps are initialised with principal components, because umap-learn's spectral initialisation calls SciPy's
`eigsh` without a seed. Equal vectors have equal coordinates, whereas umap-learn would spread copies over a disc.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numba
import numpy as np
import umap.layouts
from scipy.sparse import csr_matrix, identity
from umap import umap_

from attnmix.core.names import Site
from attnmix.core.settings import UmapParameters
from attnmix.maps.aligned import Graph, fit_aligned, ties
from attnmix.maps.components import fit_components, principal_components
from attnmix.maps.neighbours import neighbours
from attnmix.maps.parallel import in_parallel
from attnmix.maps.vectors import Coordinates, Maps, Numbers, Vectors, distinct_rows

N_EPOCHS = 200
START_NOISE = 1e-4  # standard deviation of the noise in initial coordinates, as in umap-learn's initialisation

# umap-learn compiles these functions in every process (7 s); here they are cached. The function that computes one
# optimisation epoch is compiled with `nogil`, so that threads can fit maps concurrently.
umap.layouts._nb_optimize_layout_euclidean_single_epoch = numba.njit(
    umap.layouts._optimize_layout_euclidean_single_epoch, fastmath=True, nogil=True, cache=True
)
umap_.smooth_knn_dist.enable_caching()
umap_.compute_membership_strengths.enable_caching()
_NUMBA_LOCK = threading.Lock()  # only one thread at a time may use numba's thread pool


class Neighbourhood(NamedTuple):
    """The neighbour graph and initial layout of distinct vectors, shared by maps with different seeds."""

    graph: Graph
    """The weighted neighbour graph `[distinct, distinct]`, equal to `graph_` of a fitted `umap.UMAP`."""
    places: Coordinates
    """The two principal components `[distinct, 2]`, which initialise maps."""
    numbers: Numbers
    """The index `[vectors]` of each vector among the distinct vectors."""

    def start(self, seed: int) -> Coordinates:
        """Return the initial layout `[distinct, 2]`: the principal components plus weak random noise."""
        generator = np.random.RandomState(seed)
        noise = generator.normal(scale=START_NOISE, size=self.places.shape)
        return np.asarray(self.places + noise, dtype=np.float32)

    def between_vectors(self) -> Graph:
        """Return the graph `[vectors, vectors]` of all vectors.

        Equal vectors are neighbours of each other (with weight 1) and have the same other neighbours.
        """
        vectors = len(self.numbers)
        # The one-hot matrix `[vectors, distinct]` maps each vector to its distinct vector.
        member = csr_matrix((np.ones(vectors), (np.arange(vectors), self.numbers)))
        between_different = member @ self.graph @ member.T
        is_equal = member @ member.T
        return csr_matrix(between_different + is_equal - identity(vectors))


def neighbourhood(vectors: Vectors, metric: str, n_neighbors: int, seed: int) -> Neighbourhood:
    """Return the neighbour graph and initial layout of `vectors`, of which at least three must be distinct.

    `n_neighbors` is reduced if there are fewer distinct vectors. `seed` initialises the approximate search.
    """
    first, numbers = distinct_rows(vectors)
    distinct = vectors[first]
    k = min(n_neighbors, len(distinct) - 1)  # includes the vector itself
    others, other_distances = neighbours(distinct, k - 1, metric, seed)
    # umap-learn requires each vector as its own first neighbour, at distance 0.
    itself = np.arange(len(distinct))
    indices = np.column_stack([itself, others])
    distances = np.pad(other_distances, ((0, 0), (1, 0)))
    with _NUMBA_LOCK:
        numba.set_num_threads(1)  # the order of summation depends on the number of threads
        graph, _, _ = umap_.fuzzy_simplicial_set(distinct, k, None, metric, {}, indices, distances)
    places = principal_components(distinct, metric)
    return Neighbourhood(graph.tocsr(), places, numbers)


def fit_map(vectors: Vectors, settings: UmapParameters) -> Coordinates:
    """Return the coordinates `[vectors, 2]` of the UMAP projection of `vectors`."""
    near = neighbourhood(vectors, settings.metric, settings.n_neighbors, settings.seed)
    return lay_out(near, settings.min_dist, settings.seed)


def lay_out(near: Neighbourhood, min_dist: float, seed: int) -> Coordinates:
    """Return the coordinates `[vectors, 2]` of the UMAP of a neighbour graph, whose nodes are the distinct vectors.

    Equal vectors are a single node, and therefore have the same coordinates. `min_dist` is the parameter of umap-learn,
    and `seed` determines the noise in the initial layout and the random numbers of the optimisation.
    """
    a, b = umap_.find_ab_params(1.0, min_dist)  # the curve from distances on the map to edge weights
    # All numbers are the defaults of umap-learn, except for `n_epochs`.
    xy, _ = umap_.simplicial_set_embedding(
        None,  # umap-learn uses the vectors and the metric only for its spectral initialisation
        near.graph.copy(),  # umap-learn removes weak edges in place
        n_components=2,
        initial_alpha=1.0,
        a=a,
        b=b,
        gamma=1.0,
        negative_sample_rate=5,
        n_epochs=N_EPOCHS,
        init=near.start(seed),
        random_state=np.random.RandomState(seed),
        metric=None,
        metric_kwds={},
        densmap=False,
        densmap_kwds={},
        output_dens=False,
    )
    distinct_xy = np.asarray(xy, dtype=np.float32)
    distinct_of_vector = near.numbers  # index of each vector's node
    return distinct_xy[distinct_of_vector]


def lay_out_aligned(near: Sequence[Neighbourhood], min_dist: float, seed: int) -> list[Coordinates]:
    """Return the coordinates `[tokens, 2]` of the aligned map of each capture point; `near` has one item per point.

    Ties pull the coordinates of a token at neighbouring points towards each other. The strength of a tie depends on the
    neighbours that the token has at both points.
    """
    a, b = umap_.find_ab_params(1.0, min_dist)
    strength = ties([point.between_vectors() for point in near])  # graphs with the neighbours of each token
    return fit_aligned(
        graphs=[point.graph for point in near],  # between the distinct vectors of each point
        starts=[point.start(seed) for point in near],
        numbers=[point.numbers for point in near],  # the index of each token's vector among the distinct vectors
        strength=strength,
        curve=(float(a), float(b)),
        n_epochs=N_EPOCHS,
        seed=seed,
    )


def fit_layout(layout: str, vectors: Mapping[Site, Vectors], settings: UmapParameters) -> Maps:
    """Return the maps of all points' vectors by seed, beginning with `settings.seed`; `pca` has only this seed.

    `vectors` is a result of `points_for`. Only `separate` and `pca` support vectors of different widths.
    """
    if layout == "pca":
        return fit_components(vectors, settings)
    blocks = list(vectors.values())  # one neighbour graph is computed per block
    if layout == "joint":
        blocks = [np.concatenate(blocks)]
    searches = [(block, settings.metric, settings.n_neighbors, settings.seed) for block in blocks]
    near = in_parallel(neighbourhood, searches, f"{layout}: neighbours")
    seeds = [settings.seed, *settings.stability_seeds]
    coordinates = _fit_maps_by_seed(layout, near, settings.min_dist, seeds)
    maps = {}
    for seed, xy in zip(seeds, coordinates, strict=True):
        xy_of_sites = np.split(xy, len(vectors))  # all sites have the same number of tokens
        maps[seed] = dict(zip(vectors, xy_of_sites, strict=True))
    return maps


def _fit_maps_by_seed(
    layout: str, near: Sequence[Neighbourhood], min_dist: float, seeds: Sequence[int]
) -> list[Coordinates]:
    """Return the coordinates `[points * tokens, 2]` of all vectors for each seed, concatenated over points.

    `near` has one item for all points of the layout `joint`, and one item per point for other layouts.
    """
    if layout == "aligned":
        aligned_calls = [(near, min_dist, seed) for seed in seeds]
        aligned_maps = in_parallel(lay_out_aligned, aligned_calls, "aligned: maps by seed")
        return [np.concatenate(maps) for maps in aligned_maps]
    calls = []
    for seed in seeds:
        for block in near:
            calls.append((block, min_dist, seed))
    maps = in_parallel(lay_out, calls, f"{layout}: maps")  # in the order of the calls: all maps of a seed together
    return np.split(np.concatenate(maps), len(seeds))
