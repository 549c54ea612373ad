"""Two plain projections of the joint map's vectors to two dimensions, which the moves on the maps are set against.

They are no maps that somebody looks at: what moves on them say of the mixing ratio, a map need not be thanked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from attnmix.core.points import Site
from attnmix.maps.neighbours import Coordinates, Vectors

Doubles = npt.NDArray[np.float64]


def pca(vectors: Mapping[Site, Vectors]) -> dict[Site, Coordinates]:
    """Coordinates `[tokens, 2]` at each point: the two principal components of all vectors of all points together.

    The directions of the largest variance around the common mean (Pearson 1901), fitted once for all points.
    """
    number = sum(map(len, vectors.values()))
    mean_D = sum(each.sum(axis=0, dtype=np.float64) for each in vectors.values()) / number
    width = len(np.atleast_1d(mean_D))
    scatter_DD = np.zeros((width, width))
    for each in vectors.values():
        centred_TD = each - mean_D
        scatter_DD += centred_TD.T @ centred_TD
    directions_D2 = np.linalg.eigh(scatter_DD)[1][:, :-3:-1]
    return {site: _projected(each - mean_D, directions_D2) for site, each in vectors.items()}


def random_projection(vectors: Mapping[Site, Vectors], seed: int) -> dict[Site, Coordinates]:
    """Coordinates `[tokens, 2]` at each point: one Gaussian matrix for all, entries N(0, 1/2).

    It keeps squared distances in the mean (Johnson and Lindenstrauss 1984; two dimensions keep them badly).
    """
    width = next(iter(vectors.values())).shape[1]
    directions_D2 = np.random.default_rng(seed).normal(scale=np.sqrt(0.5), size=(width, 2))
    return {site: _projected(each, directions_D2) for site, each in vectors.items()}


def _projected(vectors_TD: npt.NDArray[np.floating], directions_D2: Doubles) -> Coordinates:
    flat_T2 = np.zeros((len(vectors_TD), 2))
    flat_T2[:, : directions_D2.shape[1]] = vectors_TD.astype(np.float64) @ directions_D2
    return flat_T2.astype(np.float32)


Projected = dict[int, dict[Site, Coordinates]]
PROJECTIONS: dict[str, Callable[[Mapping[Site, Vectors], list[int]], Projected]] = {
    "pca": lambda vectors, seeds: {seeds[0]: pca(vectors)},  # the same with every seed
    "random_projection": lambda vectors, seeds: {seed: random_projection(vectors, seed) for seed in seeds},
}
"""By the name that stands in the column `layout`: by seed, coordinates of each point."""
