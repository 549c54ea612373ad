"""Maps of principal components, which are defined for any number of vectors and also initialise all other layouts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from attnmix.core.names import Site
from attnmix.core.settings import UmapParameters
from attnmix.core.statistics import Doubles
from attnmix.maps.neighbours import METRICS
from attnmix.maps.parallel import in_parallel
from attnmix.maps.vectors import Coordinates, Maps, Vectors, distinct_rows

MIN_STRENGTH = 1e-12  # smallest eigenvalue relative to the largest one; smaller eigenvalues are rounding errors
EXTENT = 10.0  # largest absolute coordinate of a map, as in umap-learn's initialisation


def two_components(x_ND: Doubles) -> Doubles:
    """Return the first two principal components `[N, 2]` of vectors `[N, D]`.

    The sign of a component is chosen so that the entry of its direction with the largest absolute value is positive.
    Components are computed from the covariance `[D, D]` or the Gram matrix `[N, N]`, whichever is smaller.
    """
    vectors, width = x_ND.shape
    if vectors >= width > 1:  # scikit-learn requires at least two dimensions for two components
        from sklearn.decomposition import PCA  # slow import, not needed for fewer vectors

        return np.asarray(PCA(2, svd_solver="covariance_eigh").fit_transform(x_ND))
    return _find_components_by_gram(x_ND)


def _find_components_by_gram(x_ND: Doubles) -> Doubles:
    """Return the components `[N, 2]` from the Gram matrix `[N, N]`; 0 for a component without variance.

    If U are the eigenvectors and S^2 the eigenvalues of the Gram matrix X X' = U S^2 U', the components are U S.
    """
    vectors = len(x_ND)
    centred_ND = x_ND - x_ND.mean(axis=0)
    strengths_N, left_NN = np.linalg.eigh(centred_ND @ centred_ND.T)  # in ascending order
    largest_strength = strengths_N[-1]
    components = np.zeros((vectors, 2))
    for axis in range(min(vectors, 2)):
        strength = strengths_N[-1 - axis]
        left_N = left_NN[:, -1 - axis]
        if strength <= MIN_STRENGTH * largest_strength:
            continue
        direction_D = left_N @ centred_ND
        largest = np.argmax(np.abs(direction_D))
        sign = np.sign(direction_D[largest])
        components[:, axis] = left_N * (sign * np.sqrt(strength))
    return components


def principal_components(vectors: Vectors, metric: str) -> Coordinates:
    """Return the first two principal components `[vectors, 2]` of the vectors after preparation for `metric`.

    The largest absolute coordinate is `EXTENT`. Equal vectors have equal coordinates; if all vectors are equal, all
    coordinates are 0.
    """
    first, numbers = distinct_rows(vectors)
    if len(first) == 1:
        return np.zeros((len(vectors), 2), np.float32)
    components = two_components(METRICS[metric].prepared(vectors))
    extent = np.abs(components).max()  # 0 if all distances are 0 under the metric, although vectors differ
    factor = EXTENT / extent if extent > 0 else 0
    places = np.asarray(components * factor)
    # Rounding errors may differ between equal vectors, so each vector has the coordinates of its first copy.
    return places[first][numbers]


def fit_components(vectors: Mapping[Site, Vectors], settings: UmapParameters) -> Maps:
    """Return maps of the principal components of each point's vectors `[tokens, width]`, under the key `settings.seed`.

    The components do not depend on the seed.
    """
    calls: list[tuple[Any, ...]] = [(vectors_ND, settings.metric) for vectors_ND in vectors.values()]
    components = in_parallel(principal_components, calls, "pca")
    map_by_site = {}
    for site, xy in zip(vectors, components, strict=True):
        map_by_site[site] = xy.astype(np.float32)
    return {settings.seed: map_by_site}
