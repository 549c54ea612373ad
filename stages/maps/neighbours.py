"""Nearest neighbours of dense vectors: exact, from blocked matrix products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from umap.distances import named_distances
from umap.umap_ import nearest_neighbors

from stages.errors import InputError
from stages.models.loading import device

BLOCK_DISTANCES = 2**26  # entries of one block of the distance matrix: 512 MB in float64

Vectors = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int32]
Distances = npt.NDArray[np.float32]


def _minkowski(p: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    # The plain subtraction: the matrix-product form of p = 2 loses small distances to cancellation.
    return lambda a_BD, x_ND: torch.cdist(a_BD, x_ND, p=p, compute_mode="donot_use_mm_for_euclid_dist")


def _euclidean(a_BD: torch.Tensor, x_ND: torch.Tensor) -> torch.Tensor:
    return torch.cdist(a_BD, x_ND, compute_mode="use_mm_for_euclid_dist")


def _cosine(a_BD: torch.Tensor, x_ND: torch.Tensor) -> torch.Tensor:
    unit = torch.nn.functional.normalize
    return (1 - unit(a_BD) @ unit(x_ND).T).clamp_(min=0)


def _correlation(a_BD: torch.Tensor, x_ND: torch.Tensor) -> torch.Tensor:
    return _cosine(a_BD - a_BD.mean(1, keepdim=True), x_ND - x_ND.mean(1, keepdim=True))


EXACT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cosine": _cosine,
    "correlation": _correlation,
    **dict.fromkeys(("euclidean", "l2"), _euclidean),
    **dict.fromkeys(("manhattan", "l1", "taxicab"), _minkowski(1)),
    **dict.fromkeys(("chebyshev", "linfinity", "linfty", "linf"), _minkowski(float("inf"))),
}
"""Distances `[block, vectors]` from `[block, hidden]` to `[vectors, hidden]`, by umap-learn's names."""

# Of discrete or non-numeric data, or with parameters that params.yaml does not hold.
NOT_FOR_FEATURES = frozenset(
    [
        "categorical",
        "ordinal",
        "hierarchical_categorical",
        "count",
        "string",
        "myers",
        "haversine",
        "ll_dirichlet",
        "minkowski",
        "poincare",
        "seuclidean",
        "standardised_euclidean",
        "wminkowski",
        "weighted_minkowski",
        "mahalanobis",
        "hellinger",
        "softmax_hellinger",
        "symmetric_kl",
        "hamming",
        "jaccard",
        "dice",
        "matching",
        "kulsinski",
        "rogerstanimoto",
        "russellrao",
        "sokalsneath",
        "sokalmichener",
        "yule",
    ]
)
METRICS = tuple(sorted(set(named_distances) - NOT_FOR_FEATURES))


def check_metric(metric: str) -> None:
    """`InputError` for a metric that is none of `METRICS`."""
    if metric not in METRICS:
        raise InputError(
            f"umap.metric: {metric!r} is not a metric for dense real vectors; allowed: {', '.join(METRICS)}"
        )


def neighbours(vectors: Vectors, k: int, metric: str, seed: int) -> tuple[Indices, Distances]:
    """Indices and distances `[vectors, k]` of each vector's `k` nearest, itself first.

    Exact for the metrics in `EXACT`; by nearest-neighbour descent, seeded, for the others.
    """
    if metric not in EXACT:
        indices, distances, _ = nearest_neighbors(
            vectors, k, metric, {}, False, np.random.RandomState(seed), n_jobs=1, use_pynndescent=True
        )
        return indices.astype(np.int32), distances.astype(np.float32)
    # float64: equal vectors are at distance 0, and near ones in the order they really have.
    x_ND = torch.from_numpy(vectors).to(device(), torch.float64)
    rows = max(1, BLOCK_DISTANCES // len(vectors))
    found = []
    for start in range(0, len(vectors), rows):
        block = EXACT[metric](x_ND[start : start + rows], x_ND)
        own = torch.arange(len(block), device=block.device)
        block[own, own + start] = -1  # itself first, also among duplicates
        distances, indices = block.topk(k, largest=False, sorted=True)
        found.append((indices.cpu(), distances.clamp_(min=0).cpu()))
    indices, distances = (torch.cat(parts) for parts in zip(*found, strict=True))
    return indices.to(torch.int32).numpy(), distances.to(torch.float32).numpy()
