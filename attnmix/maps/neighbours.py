"""Nearest neighbours of dense vectors: exact by blocks, approximate for very many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.spatial.distance import cdist

from attnmix.maps.parallel import NUMBA_ALONE

TILE = 2048  # vectors on each side of a block of the distance matrix: 32 MB in float64
# The most vectors whose neighbours are found exactly: beyond, nearest-neighbour descent is faster, its compilation
# of half a minute counted (README, "Speed").
EXACT_UP_TO = {"products": 32_768, "differences": 8_192}
EXACT_ON_GPU = 8  # times as many there

Vectors = npt.NDArray[np.float32]
Coordinates = npt.NDArray[np.float32]
"""Places on a map, `[vectors, 2]`."""
Indices = npt.NDArray[np.int32]
Distances = npt.NDArray[np.float32]
# What float64 products leave of a difference of 0, relative to what is subtracted.
ROUNDING = 1e-13


def device() -> torch.device:
    """This process's accelerator, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Metric(NamedTuple):
    """A distance in three parts: what belongs to a vector is computed once, and a root is taken of few numbers."""

    prepare: Callable[[torch.Tensor], torch.Tensor]
    """`[vectors, hidden]` to `[vectors, features]`, in float64."""
    compare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Two of those to `[a, b]`, which are in the order of the distances, and symmetric."""
    finish: Callable[[torch.Tensor], torch.Tensor]
    """The distances, from what `compare` gives."""

    def between(self, a_AD: torch.Tensor, b_BD: torch.Tensor) -> torch.Tensor:
        """Distances `[a, b]` of `[a, hidden]` to `[b, hidden]`."""
        return self.finish(self.compare(self.prepare(a_AD), self.prepare(b_BD)))


def _same(x_ND: torch.Tensor) -> torch.Tensor:
    return x_ND


def _half_squares(a_AD: torch.Tensor, b_BD: torch.Tensor) -> torch.Tensor:
    """Half the squared Euclidean distance, from one matrix product; for unit vectors 1 - cosine."""
    a_A, b_B = (x_ND.square().sum(dim=1) / 2 for x_ND in (a_AD, b_BD))
    half_AB = torch.addmm(b_B, a_AD, b_BD.T, alpha=-1).add_(a_A[:, None])
    return half_AB.masked_fill_(half_AB < 2 * ROUNDING * a_A[:, None], 0)


def _unit(x_ND: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1; a vector of zeros gets a direction of its own, so that such are in the same place."""
    return torch.nn.functional.normalize(torch.cat([x_ND, (x_ND == 0).all(dim=1, keepdim=True)], dim=1))


def _minkowski(p: float) -> Metric:
    return Metric(_same, lambda a_AD, b_BD: torch.cdist(a_AD, b_BD, p=p), _same)


def _scipy(name: Literal["braycurtis", "canberra"]) -> Metric:
    def distances(a_AD: torch.Tensor, b_BD: torch.Tensor) -> torch.Tensor:
        apart_AB = torch.from_numpy(cdist(a_AD.cpu().numpy(), b_BD.cpu().numpy(), name))
        # As in umap-learn, 0 where the sum that is divided by is 0.
        return apart_AB.nan_to_num_(nan=0, posinf=0).to(a_AD.device)

    return Metric(_same, distances, _same)


PRODUCTS: dict[str, Metric] = {
    "cosine": Metric(_unit, _half_squares, _same),
    "correlation": Metric(lambda x_ND: _unit(x_ND - x_ND.mean(dim=1, keepdim=True)), _half_squares, _same),
    "softmax_hellinger": Metric(lambda x_ND: x_ND.softmax(dim=1).sqrt(), _half_squares, torch.sqrt),
    **dict.fromkeys(
        ("euclidean", "l2", "minkowski"),  # umap-learn's minkowski has p = 2 unless told
        Metric(_same, _half_squares, lambda half_squares: (2 * half_squares).sqrt()),
    ),
}
DIFFERENCES: dict[str, Metric] = {
    **dict.fromkeys(("manhattan", "l1", "taxicab"), _minkowski(1)),
    **dict.fromkeys(("chebyshev", "linfinity", "linfty", "linf"), _minkowski(float("inf"))),
    "braycurtis": _scipy("braycurtis"),
    "canberra": _scipy("canberra"),
}
METRICS: dict[str, Metric] = PRODUCTS | DIFFERENCES
"""By umap-learn's names."""


def neighbours(vectors: Vectors, k: int, metric: str, seed: int) -> tuple[Indices, Distances]:
    """Indices and distances `[vectors, k]` of each vector's `k` nearest, itself first.

    Exact up to a number of vectors (`EXACT_UP_TO`), by nearest-neighbour descent, seeded, above it.
    """
    kind = "products" if metric in PRODUCTS else "differences"
    if len(vectors) > EXACT_UP_TO[kind] * (EXACT_ON_GPU if device().type == "cuda" else 1):
        return _approximate(vectors, k, metric, seed)
    return _exact(vectors, k, METRICS[metric])


def _exact(vectors: Vectors, k: int, metric: Metric) -> tuple[Indices, Distances]:
    """Each block of the distance matrix serves its rows and, mirrored, its columns."""
    # float64: near vectors come in the order they really have.
    x_ND = metric.prepare(torch.from_numpy(vectors).to(device(), torch.float64))
    nearest = torch.full((len(vectors), k), torch.inf, dtype=torch.float64, device=x_ND.device)
    indices = torch.zeros((len(vectors), k), dtype=torch.int64, device=x_ND.device)

    def keep(first: int, block: torch.Tensor, first_column: int) -> None:
        rows = slice(first, first + len(block))
        best = block.topk(min(k, block.shape[1]), largest=False, sorted=False)
        candidates = torch.cat([nearest[rows], best.values], dim=1)
        whose = torch.cat([indices[rows], best.indices + first_column], dim=1)
        nearest[rows], order = candidates.topk(k, largest=False, sorted=True)
        indices[rows] = whose.gather(1, order)

    starts = range(0, len(vectors), TILE)
    for a in starts:
        for b in starts[a // TILE :]:
            block = metric.compare(x_ND[a : a + TILE], x_ND[b : b + TILE])
            if a == b:
                block.fill_diagonal_(-1)  # itself first, also among duplicates
            else:
                keep(b, block.T.contiguous(), a)
            keep(a, block, b)
    distances = metric.finish(nearest.clamp_(min=0))
    return indices.to("cpu", torch.int32).numpy(), distances.to("cpu", torch.float32).numpy()


def _approximate(vectors: Vectors, k: int, metric: str, seed: int) -> tuple[Indices, Distances]:
    """By nearest-neighbour descent, as in umap-learn; what is a matrix product is Euclidean after its preparation."""
    from umap.umap_ import nearest_neighbors  # its import compiles for seconds, and is needed here only

    by_product, name = metric in PRODUCTS, metric
    if by_product:
        vectors, name = METRICS[metric].prepare(torch.from_numpy(vectors)).numpy(), "euclidean"
    random_state = np.random.RandomState(seed)
    with NUMBA_ALONE:
        indices, distances, _ = nearest_neighbors(vectors, k, name, {}, False, random_state, n_jobs=1)
    if by_product:
        distances = METRICS[metric].finish(torch.from_numpy(distances).to(torch.float64).square() / 2).numpy()
    return indices.astype(np.int32), distances.astype(np.float32)
