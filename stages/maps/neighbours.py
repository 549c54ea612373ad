"""Nearest neighbours of dense vectors: exact by blocks, approximate for very many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy.spatial.distance import cdist

from stages.errors import InputError
from stages.models.hardware import device

BLOCK_DISTANCES = 2**26  # entries of one block of the distance matrix: 512 MB in float64
# The most vectors whose neighbours are found exactly: beyond, nearest-neighbour descent is faster, its compilation
# of half a minute counted (README, "Speed").
EXACT_UP_TO = {"products": 32_768, "differences": 8_192}
EXACT_ON_GPU = 8  # times as many there

Vectors = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int32]
Distances = npt.NDArray[np.float32]
Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _minkowski(p: float) -> Metric:
    # The plain subtraction: the matrix-product form of p = 2 loses small distances to cancellation.
    return lambda a_BD, x_ND: torch.cdist(a_BD, x_ND, p=p, compute_mode="donot_use_mm_for_euclid_dist")


def _euclidean(a_BD: torch.Tensor, x_ND: torch.Tensor) -> torch.Tensor:
    return torch.cdist(a_BD, x_ND, compute_mode="use_mm_for_euclid_dist")


def _cosine(a_BD: torch.Tensor, x_ND: torch.Tensor) -> torch.Tensor:
    unit = torch.nn.functional.normalize
    return (1 - unit(a_BD) @ unit(x_ND).T).clamp_(min=0)


def _correlation(a_BD: torch.Tensor, x_ND: torch.Tensor) -> torch.Tensor:
    return _cosine(a_BD - a_BD.mean(1, keepdim=True), x_ND - x_ND.mean(1, keepdim=True))


def _softmax_hellinger(a_BD: torch.Tensor, x_ND: torch.Tensor) -> torch.Tensor:
    return (1 - a_BD.softmax(1).sqrt() @ x_ND.softmax(1).sqrt().T).clamp_(min=0).sqrt()


def _scipy(name: Literal["braycurtis", "canberra"]) -> Metric:
    def distances(a_BD: torch.Tensor, x_ND: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(cdist(a_BD.cpu().numpy(), x_ND.cpu().numpy(), name)).to(a_BD.device)

    return distances


PRODUCTS: dict[str, Metric] = {
    "cosine": _cosine,
    "correlation": _correlation,
    "softmax_hellinger": _softmax_hellinger,
    **dict.fromkeys(("euclidean", "l2", "minkowski"), _euclidean),  # umap-learn's minkowski has p = 2 unless told
}
DIFFERENCES: dict[str, Metric] = {
    **dict.fromkeys(("manhattan", "l1", "taxicab"), _minkowski(1)),
    **dict.fromkeys(("chebyshev", "linfinity", "linfty", "linf"), _minkowski(float("inf"))),
    "braycurtis": _scipy("braycurtis"),
    "canberra": _scipy("canberra"),
}
METRICS: dict[str, Metric] = PRODUCTS | DIFFERENCES
"""Distances `[block, vectors]` from `[block, hidden]` to `[vectors, hidden]`, by umap-learn's names."""

_NOT_FOR_FEATURES = {
    "compares discrete or binary data": "categorical count dice hamming hierarchical_categorical jaccard kulsinski "
    "matching myers ordinal rogerstanimoto russellrao sokalmichener sokalsneath string yule",
    "needs parameters of its own": "mahalanobis seuclidean standardised_euclidean weighted_minkowski wminkowski",
    "is not defined for negative values": "hellinger ll_dirichlet symmetric_kl",
    "is defined within the unit ball only": "poincare",
    "is defined for two dimensions only": "haversine",
}
REASONS = {name: reason for reason, names in _NOT_FOR_FEATURES.items() for name in names.split()}
"""Why each other metric of umap-learn is refused."""


def check_metric(metric: str) -> None:
    """`InputError` for a metric that is none of `METRICS`."""
    if metric in METRICS:
        return
    raise InputError(
        f"umap.metric: {metric!r} is not a metric for dense real vectors, it "
        f"{REASONS.get(metric, 'is not known to umap-learn')}; "
        f"allowed: {', '.join(sorted(METRICS))}"
    )


def neighbours(vectors: Vectors, k: int, metric: str, seed: int) -> tuple[Indices, Distances]:
    """Indices and distances `[vectors, k]` of each vector's `k` nearest, itself first.

    Exact up to a number of vectors (`EXACT_UP_TO`), by nearest-neighbour descent, seeded, above it.
    """
    limit = EXACT_UP_TO["products" if metric in PRODUCTS else "differences"]
    if len(vectors) > limit * (EXACT_ON_GPU if device().type == "cuda" else 1):
        from umap.umap_ import nearest_neighbors  # its import compiles for seconds, and is needed here only

        indices, distances, _ = nearest_neighbors(
            vectors, k, metric, {}, False, np.random.RandomState(seed), n_jobs=1, use_pynndescent=True
        )
        return indices.astype(np.int32), distances.astype(np.float32)
    # float64: equal vectors are at distance 0, and near ones in the order they really have.
    x_ND = torch.from_numpy(vectors).to(device(), torch.float64)
    rows = max(1, BLOCK_DISTANCES // len(vectors))
    found = []
    for start in range(0, len(vectors), rows):
        block = METRICS[metric](x_ND[start : start + rows], x_ND)
        own = torch.arange(len(block), device=block.device)
        block[own, own + start] = -1  # itself first, also among duplicates
        distances, indices = block.topk(k, largest=False, sorted=True)
        found.append((indices.cpu(), distances.clamp_(min=0).cpu()))
    indices, distances = (torch.cat(parts) for parts in zip(*found, strict=True))
    return indices.to(torch.int32).numpy(), distances.to(torch.float32).numpy()
