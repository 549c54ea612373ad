"""UMAP layouts in two dimensions, from precomputed neighbours."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn.utils import check_random_state
from umap.umap_ import find_ab_params, fuzzy_simplicial_set, simplicial_set_embedding

from stages.maps.neighbours import Vectors, neighbours
from stages.maps.storage import Coordinates
from stages.parameters import UmapParameters

SMALLEST_FIT = 4  # vectors; fewer have no neighbourhoods to keep


def fit_map(vectors: Vectors, umap: UmapParameters, seed: int) -> Coordinates:
    """Coordinates `[vectors, 2]`: what `umap.UMAP(...).fit(vectors).embedding_` gives for the same neighbours.

    Fewer vectors than neighbours are each other's neighbours all. Fewer than four, and
    vectors that are all equal, lie on a line, in order.
    """
    if len(vectors) < SMALLEST_FIT or (vectors == vectors[0]).all():
        return np.stack([np.arange(len(vectors)), np.zeros(len(vectors))], axis=1).astype(np.float32)
    k = min(umap.n_neighbors, len(vectors) - 1)
    indices, distances = neighbours(vectors, k, umap.metric, seed)
    random_state = check_random_state(seed)
    graph: Any
    graph, _, _ = fuzzy_simplicial_set(vectors, k, random_state, umap.metric, knn_indices=indices, knn_dists=distances)
    a, b = find_ab_params(1.0, umap.min_dist)
    with warnings.catch_warnings():
        # umap-learn places the parts of an unconnected graph by a graph of the parts, which need not be connected.
        warnings.filterwarnings("ignore", message="Graph is not fully connected", category=UserWarning)
        coordinates, _ = simplicial_set_embedding(
            data=vectors,
            graph=graph,
            n_components=2,
            initial_alpha=1.0,
            a=a,
            b=b,
            gamma=1.0,
            negative_sample_rate=5,
            n_epochs=umap.n_epochs,
            init="spectral",
            random_state=random_state,
            metric=umap.metric,
            metric_kwds={},
            densmap=False,
            densmap_kwds={},
            output_dens=False,
            parallel=False,
        )
    return np.asarray(coordinates, dtype=np.float32)
