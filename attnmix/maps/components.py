"""Maps by principal components, of any number of vectors; every other map starts from them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.decomposition import PCA

from attnmix.core.names import Site
from attnmix.core.settings import UmapParameters
from attnmix.core.statistics import Doubles
from attnmix.maps.neighbours import METRICS
from attnmix.maps.parallel import in_parallel
from attnmix.maps.vectors import Coordinates, Maps, Vectors, distinct_rows

MIN_STRENGTH = 1e-12  # of the largest eigenvalue; smaller ones are rounding
EXTENT = 10.0  # a map reaches as far to each side of its middle, as umap-learn's own start does


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
        strength = strengths_N[-1 - axis]  # the largest is the last
        left_N = left_NN[:, -1 - axis]
        if strength <= MIN_STRENGTH * strengths_N[-1]:
            continue
        direction_D = left_N @ centred_ND
        largest = np.argmax(np.abs(direction_D))
        sign = np.sign(direction_D[largest])
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
    factor = EXTENT / extent if extent > 0 else 0
    places = np.asarray(components * factor)
    return places[first][numbers]


def fit_components(vectors: Mapping[Site, Vectors], settings: UmapParameters) -> Maps:
    """Return the principal components of each point's vectors `[tokens, width]`, which are the same with any seed."""
    calls: list[tuple[Any, ...]] = [(vectors_ND, settings.metric) for vectors_ND in vectors.values()]
    components = in_parallel(principal_components, calls, "pca")
    map_by_site = {}
    for site, xy in zip(vectors, components, strict=True):
        map_by_site[site] = xy.astype(np.float32)
    return {settings.seed: map_by_site}
