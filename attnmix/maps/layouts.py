"""UMAP layouts in two dimensions, by umap-learn.

`joint` is one map of all points, `separate` one of each, `aligned` one of each with every token tied to itself
(`attnmix.maps.aligned`). umap-learn's functions are called instead of `umap.UMAP`, which would build the neighbour
graph again for every seed; the maps are the same, bit for bit (tested). All maps start from principal components:
umap-learn's own start calls SciPy's `eigsh` without a seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numba
import numpy as np
import umap.layouts
from sklearn.decomposition import PCA
from umap.umap_ import (
    compute_membership_strengths,
    find_ab_params,
    fuzzy_simplicial_set,
    simplicial_set_embedding,
    smooth_knn_dist,
)

from attnmix.core.options import UmapParameters
from attnmix.core.points import Site
from attnmix.maps.aligned import Coordinates, Graph, fit_aligned
from attnmix.maps.movement import Maps
from attnmix.maps.neighbours import METRICS, Vectors, neighbours
from attnmix.maps.parallel import in_parallel
from attnmix.maps.quality import Row, score_joint_map, score_map, whole_layout

MIN_VECTORS = 4  # fewer have no neighbourhoods to keep
START_EXTENT = 10.0  # of the start, to each side of the middle, and the noise on it: umap-learn's own
START_NOISE = 1e-4

# umap-learn compiles these functions anew in every process, for 7 s. Its epochs are compiled to run without the
# interpreter lock, so that threads fit maps at the same time.
umap.layouts._nb_optimize_layout_euclidean_single_epoch = numba.njit(
    umap.layouts._optimize_layout_euclidean_single_epoch, fastmath=True, nogil=True, cache=True
)
smooth_knn_dist.enable_caching()
compute_membership_strengths.enable_caching()
_NUMBA_THREADS = threading.Lock()  # numba's own threads may be used by one of ours at a time

Scored = tuple[list[Row], int]
Blocks = Vectors | Sequence[Vectors]
"""Vectors of each point, `[points, tokens, hidden]` where all are equally wide."""


def has_neighbourhoods(vectors: Vectors) -> bool:
    """Return whether there is anything to lay out: at least four vectors that are not all equal."""
    return len(vectors) >= MIN_VECTORS and not (vectors == vectors[0]).all()


class Neighbourhood(NamedTuple):
    """What maps of the same vectors share, whatever their seed."""

    graph: Graph
    """The weighted neighbour graph `[vectors, vectors]` that `umap.UMAP` keeps as `graph_`."""
    components: Coordinates
    """The two principal components `[vectors, 2]`, from which maps start."""


def neighbourhood(vectors: Vectors, umap: UmapParameters) -> Neighbourhood | None:
    """Return the neighbour graph and the principal components; None if there is nothing to lay out.

    Each of fewer vectors than `n_neighbors` is a neighbour of all others.
    """
    if not has_neighbourhoods(vectors):
        return None
    k = min(umap.n_neighbors, len(vectors) - 1)  # each vector counts among its own
    others, distances = neighbours(vectors, k - 1, umap.metric, umap.seed)
    indices = np.column_stack([np.arange(len(vectors)), others])
    distances = np.pad(distances, ((0, 0), (1, 0)))
    with _NUMBA_THREADS:
        numba.set_num_threads(1)  # several would sum in another order
        graph, _, _ = fuzzy_simplicial_set(vectors, k, None, umap.metric, {}, indices, distances)
    components = PCA(2, svd_solver="covariance_eigh").fit_transform(METRICS[umap.metric].prepared(vectors))
    return Neighbourhood(graph.tocsr(), components * (START_EXTENT / np.abs(components).max()))


def start(near: Neighbourhood, seed: int) -> Coordinates:
    """Return where a map starts, `[vectors, 2]`: the principal components, with a little noise."""
    noise = np.random.RandomState(seed).normal(scale=START_NOISE, size=near.components.shape)
    return np.asarray(near.components + noise, dtype=np.float32)


def fit_map(vectors: Vectors, umap: UmapParameters, seed: int) -> Coordinates:
    """Return coordinates `[vectors, 2]` of one map."""
    return lay_out(vectors, neighbourhood(vectors, umap), umap, seed)


def lay_out(vectors: Vectors, near: Neighbourhood | None, umap: UmapParameters, seed: int) -> Coordinates:
    """Return coordinates `[vectors, 2]` of one map; on a line, in order, without neighbourhoods."""
    if near is None:
        return _line(len(vectors))
    # Of a copy: umap-learn removes weak edges in place.
    xy, _ = simplicial_set_embedding(
        vectors, near.graph.copy(), 2, 1.0, *_curve(umap), 1.0, 5, umap.n_epochs, start(near, seed),
        np.random.RandomState(seed), umap.metric, {}, False, {}, False,
    )  # fmt: skip
    return np.asarray(xy, dtype=np.float32)


def lay_out_aligned(
    vectors: Sequence[Vectors], near: Sequence[Neighbourhood | None], umap: UmapParameters, seed: int
) -> list[Coordinates]:
    """Return coordinates `[tokens, 2]` at each point; one without neighbourhoods is laid on a line and tied to none."""
    maps = [_line(len(each)) for each in vectors]
    connected = [(point, each) for point, each in enumerate(near) if each is not None]
    if connected:
        graphs, starts = zip(*((each.graph, start(each, seed)) for _, each in connected), strict=True)
        fitted = fit_aligned(graphs, starts, _curve(umap), umap.n_epochs, seed)
        for (point, _), xy in zip(connected, fitted, strict=True):
            maps[point] = xy
    return maps


def _curve(umap: UmapParameters) -> tuple[float, float]:
    a, b = find_ab_params(1.0, umap.min_dist)
    return float(a), float(b)


def _line(number: int) -> Coordinates:
    return np.stack([np.arange(number), np.zeros(number)], axis=1).astype(np.float32)


class Fitted(NamedTuple):
    """A layout: every seed's coordinates of every point, rows of the quality table, the number of scored vectors."""

    maps: Maps
    quality: list[Row]
    n_scored: int


def _joint(sites: list[Site], vectors_STD: Blocks, umap: UmapParameters) -> Fitted:
    vectors = np.asarray(vectors_STD).reshape(-1, vectors_STD[0].shape[-1])
    (near,) = in_parallel(neighbourhood, [(vectors, umap)], "neighbours of the joint map")
    calls = [(vectors, near, umap, seed) for seed in _seeds(umap)]
    maps = in_parallel(lay_out, calls, "joint map, by seed")
    by_seed = _by_seed(umap, sites, (np.split(each, len(sites)) for each in maps))
    return Fitted(by_seed, *score_joint_map(sites, vectors, maps, umap))


def _separate(sites: list[Site], vectors_STD: Blocks, umap: UmapParameters) -> Fitted:
    calls = [(site, vectors, umap) for site, vectors in zip(sites, vectors_STD, strict=True)]
    by_site, scored = zip(*in_parallel(_fit_separate, calls, "separate maps"), strict=True)
    return _by_point("separate", _by_seed(umap, sites, zip(*by_site, strict=True)), scored)


def _fit_separate(site: Site, vectors: Vectors, umap: UmapParameters) -> tuple[list[Coordinates], Scored]:
    near = neighbourhood(vectors, umap)
    maps = [lay_out(vectors, near, umap, seed) for seed in _seeds(umap)]
    return maps, score_map(("separate", *site), vectors, maps, umap)


def _aligned(sites: list[Site], vectors_STD: Blocks, umap: UmapParameters) -> Fitted:
    near = in_parallel(neighbourhood, [(vectors, umap) for vectors in vectors_STD], "neighbours at each point")
    calls = [(vectors_STD, near, umap, seed) for seed in _seeds(umap)]
    by_seed = in_parallel(lay_out_aligned, calls, "aligned maps, by seed")
    by_site = zip(sites, vectors_STD, zip(*by_seed, strict=True), strict=True)
    to_score = [(("aligned", *site), vectors, maps, umap) for site, vectors, maps in by_site]
    scored = in_parallel(score_map, to_score, "scores of the aligned maps")
    return _by_point("aligned", _by_seed(umap, sites, by_seed), scored)


def _seeds(umap: UmapParameters) -> list[int]:
    return [umap.seed, *umap.stability_seeds]


def _by_seed(umap: UmapParameters, sites: list[Site], maps: Iterable[Sequence[Coordinates]]) -> Maps:
    return {seed: dict(zip(sites, each, strict=True)) for seed, each in zip(_seeds(umap), maps, strict=True)}


def _by_point(layout: str, maps: Maps, scored: Iterable[Scored]) -> Fitted:
    rows, numbers = zip(*scored, strict=True)
    by_site = [row for part in rows for row in part]
    return Fitted(maps, whole_layout(layout, by_site) + by_site, sum(numbers))


LAYOUT_FITTERS: dict[str, Callable[[list[Site], Blocks, UmapParameters], Fitted]] = {
    "joint": _joint,
    "separate": _separate,
    "aligned": _aligned,
}
"""Fit the points' vectors, by the name of the layout; only `separate` takes points of several widths."""
