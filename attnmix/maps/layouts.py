"""UMAP layouts in two dimensions, by umap-learn.

`joint` is one map of all points, `separate` one of each, `aligned` one of each with every token tied to itself
(`attnmix.maps.aligned`). umap-learn's functions are called instead of `umap.UMAP`, which would build the neighbour
graph again for every seed; the maps are the same, bit for bit (tested). All maps start from principal components:
umap-learn's own start calls SciPy's `eigsh` without a seed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numba
import numpy as np
import pandas as pd
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
from attnmix.maps.neighbours import METRICS, Vectors, neighbours
from attnmix.maps.parallel import in_parallel
from attnmix.maps.quality import Maps, score_layout

MIN_VECTORS = 4  # fewer have no neighbourhoods to keep
N_EPOCHS = 200
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


class Neighbourhood(NamedTuple):
    """What maps of the same vectors share, whatever their seed."""

    graph: Graph
    """The weighted neighbour graph `[vectors, vectors]` that `umap.UMAP` keeps as `graph_`."""
    components: Coordinates
    """The two principal components `[vectors, 2]`, from which maps start."""


def neighbourhood(vectors: Vectors, umap: UmapParameters) -> Neighbourhood | None:
    """Return the neighbour graph and the principal components; None for fewer than four vectors and for equal ones.

    Each of fewer vectors than `n_neighbors` is a neighbour of all others.
    """
    if len(vectors) < MIN_VECTORS or (vectors == vectors[0]).all():
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
        vectors, near.graph.copy(), 2, 1.0, *_curve(umap), 1.0, 5, N_EPOCHS, start(near, seed),
        np.random.RandomState(seed), umap.metric, {}, False, {}, False,
    )  # fmt: skip
    return np.asarray(xy, dtype=np.float32)


def lay_out_aligned(
    vectors: Sequence[Vectors], near: Sequence[Neighbourhood | None], umap: UmapParameters, seed: int
) -> list[Coordinates]:
    """Return coordinates `[tokens, 2]` at each point; one without neighbourhoods is laid on a line and tied to none."""
    connected = [each for each in near if each is not None]
    if not connected:
        return [_line(len(each)) for each in vectors]
    starts = [start(each, seed) for each in connected]
    fitted = iter(fit_aligned([each.graph for each in connected], starts, _curve(umap), N_EPOCHS, seed))
    return [_line(len(x)) if each is None else next(fitted) for x, each in zip(vectors, near, strict=True)]


def _curve(umap: UmapParameters) -> tuple[float, float]:
    a, b = find_ab_params(1.0, umap.min_dist)
    return float(a), float(b)


def _line(number: int) -> Coordinates:
    return np.stack([np.arange(number), np.zeros(number)], axis=1).astype(np.float32)


class Fitted(NamedTuple):
    """A layout: every seed's coordinates of every point, the quality table, the number of scored vectors."""

    maps: Maps
    quality: pd.DataFrame
    n_scored: int


def fit_layout(layout: str, vectors: Mapping[Site, Vectors], umap: UmapParameters) -> Fitted:
    """Return a layout of each point's vectors `[tokens, width]`; only `separate` takes several widths."""
    blocks = [np.concatenate(list(vectors.values()))] if layout == "joint" else list(vectors.values())
    near = in_parallel(neighbourhood, [(block, umap) for block in blocks], f"{layout}: neighbours")
    seeds = [umap.seed, *umap.stability_seeds]
    if layout == "aligned":
        maps = in_parallel(lay_out_aligned, [(blocks, near, umap, seed) for seed in seeds], "aligned: maps by seed")
        places = [xy for of_seed in maps for xy in of_seed]
    else:
        pairs = list(zip(blocks, near, strict=True))
        wholes = in_parallel(lay_out, [(*pair, umap, seed) for seed in seeds for pair in pairs], f"{layout}: maps")
        places = [xy for whole in wholes for xy in np.split(whole, len(vectors) // len(blocks))]
    left = iter(places)
    by_seed = {seed: dict(zip(vectors, islice(left, len(vectors)), strict=True)) for seed in seeds}
    return Fitted(by_seed, *score_layout(layout, vectors, by_seed, umap))
