"""The engine `umap-learn`: `umap.UMAP` and `umap.AlignedUMAP` themselves, from our start.

Their own start draws from the system's entropy, and would be another one in every run (`spectral_start`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from attnmix.core.options import UmapParameters
from attnmix.maps.graphs import Graph, Neighbourhood, single_start, spectral_start
from attnmix.maps.neighbours import Coordinates, Vectors
from attnmix.maps.parallel import NUMBA_ALONE

SHARED = {"metric", "min_dist", "n_epochs"}  # parameters that have the same name there


def lay_out(vectors: Vectors, near: Neighbourhood, umap: UmapParameters, seed: int) -> Coordinates:
    """Coordinates `[vectors, 2]`: `umap.UMAP` of our neighbours, with weights of its own."""
    random_state = np.random.RandomState(seed)
    _, start = single_start(vectors, near.graph, umap, random_state)
    with _alone():
        from umap import UMAP

        fitted = UMAP(
            near.indices.shape[1],
            **umap.model_dump(include=SHARED),
            init=start,
            random_state=random_state,  # goes on where the start left it, as within umap-learn
            n_jobs=1,
            precomputed_knn=(near.indices, near.distances),
            disconnection_distance=np.inf,  # or it would change the neighbours, which other seeds share
        ).fit(vectors)
    return np.asarray(fitted.embedding_, dtype=np.float32)


def lay_out_aligned(
    vectors: Sequence[Vectors], near: Sequence[Neighbourhood], umap: UmapParameters, seed: int
) -> list[Coordinates]:
    """Coordinates `[tokens, 2]` at each point: `umap.AlignedUMAP`, which finds neighbours itself and has its own curve.

    It lays out two points or more; a single one is a single map.
    """
    if len(vectors) == 1:
        return [lay_out(vectors[0], near[0], umap, seed)]

    def start(data: Vectors, graph: Graph, components: int, random_state: np.random.RandomState) -> Any:
        return spectral_start(data, graph, umap, random_state)

    itself = {token: token for token in range(len(vectors[0]))}
    with _alone():
        from umap import AlignedUMAP, aligned_umap

        # `init` is for maps that it lays out only to have their graphs; for its own start it calls one function.
        shared = umap.model_dump(include=SHARED) | {"random_state": umap.seed}
        model = AlignedUMAP(near[0].indices.shape[1], init="random", transform_seed=seed, **shared)
        with patch.object(aligned_umap, "spectral_layout", start):
            model.fit(list(vectors), relations=[itself] * (len(vectors) - 1))
    return [np.asarray(xy, dtype=np.float32) for xy in model.embeddings_]


@contextmanager
def _alone() -> Iterator[None]:
    """In one thread of numba's, no other map of this process there; without warnings of what nobody here wants."""
    import numba

    with NUMBA_ALONE, warnings.catch_warnings():
        numba.set_num_threads(1)  # of the calling thread only; AlignedUMAP would start all for a few numbers each time
        warnings.filterwarnings("ignore", ".*(transform|inverse_transform).* will be unavailable")
        warnings.filterwarnings("ignore", "n_jobs value 1 overridden")
        yield
