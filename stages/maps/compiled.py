"""Compiled loops of the layouts: umap-learn's own, run without the interpreter lock and kept compiled on disk.

Compilation costs a fresh process more than a map of a few thousand vectors does. numba can keep
what it compiled, beside the source file or in the user's cache folder; umap-learn asks it to for
a part of its functions, and the others are asked here.
"""

# numba reads these functions, so they hold plain loops and no annotations of their inside.
from __future__ import annotations

import logging
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from umap import aligned_umap, umap_
from umap.layouts import _optimize_layout_euclidean_single_epoch, clip, rdist
from umap.utils import tau_rand_int


def _keep(*functions: Any) -> None:
    for function in functions:
        try:
            function.enable_caching()
        except RuntimeError as error:  # no folder to write to: slower, nothing else
            logging.info("%s will be compiled anew in every process: %s", function.__name__, error)


_keep(
    umap_.smooth_knn_dist,
    umap_.compute_membership_strengths,
    clip,
    aligned_umap.in1d,
    aligned_umap.build_neighborhood_similarities,
    aligned_umap.procrustes_align,
)


# umap-learn's own loop over the edges, compiled as it does but without the interpreter lock.
one_epoch = numba.njit(_optimize_layout_euclidean_single_epoch, fastmath=True, nogil=True, cache=True)


def run_epochs(
    first: int,
    last: int,
    alphas: npt.NDArray[np.float64],
    embedding: npt.NDArray[np.float32],
    edges: tuple[npt.NDArray[Any], npt.NDArray[Any]],
    every: npt.NDArray[np.float64],
    curve: tuple[float, float],
    states: npt.NDArray[np.int64],
    schedule: tuple[npt.NDArray[np.float64], ...],
) -> None:
    """Epochs `first` to `last` (not included), in place, as `umap.layouts.optimize_layout_euclidean` does.

    `embedding` is `[vectors, 2]` float32; `edges` (heads and tails), `every` (epochs between samples) and `schedule`
    (epochs between negative samples, the next of those, the next sample) are `[edges]`; `curve` is UMAP's a and b;
    `states` is `[vectors, 3]`, the random numbers' state; `alphas` holds every epoch's learning rate.
    """
    none = np.zeros(1, dtype=np.float32)
    without_densmap = (False, none, none, 0, 0, 0, 0, none, none, 0)
    moving = (embedding, embedding, *edges, len(embedding), every, *curve, states, 1.0, 2, True)
    for n in range(first, last):
        one_epoch(*moving, alphas[n], *schedule, n, *without_densmap)


@numba.njit(nogil=True, fastmath=True, cache=True)
def run_aligned_epochs(  # type: ignore[no-untyped-def]  # numba infers them
    first,
    last,
    alphas,
    embeddings,
    heads,
    tails,
    edges,
    every,
    a,
    b,
    pull,
    state,
    negative_every,
    next_negative,
    next_sample,
):
    """Epochs of the aligned layout, in place: the same sums as `umap.AlignedUMAP`, on arrays in place of typed lists.

    `embeddings` is `[points, tokens, 2]` float32; `heads`, `tails` and the four schedules are `[points, most edges]`,
    of which `edges[point]` hold; `pull` is `[points, 2 window, tokens]`, how strongly a token is tied to itself at
    the point `offset - window` further; `state` is `[3]` int64.
    """
    points, window = embeddings.shape[0], pull.shape[1] // 2
    order = np.arange(points)
    for n in range(first, last):
        alpha = alphas[n]
        order[:] = np.arange(points)
        np.random.seed(abs(state[0]))  # noqa: NPY002  # numba's own, as in umap-learn
        np.random.shuffle(order)  # noqa: NPY002
        for i in range(heads.shape[1]):
            for m in order:
                if i >= edges[m] or next_sample[m, i] > n:
                    continue
                j = heads[m, i]
                k = tails[m, i]
                current = embeddings[m, j]
                other = embeddings[m, k]
                distance = rdist(current, other)
                gradient = 0.0
                if distance > 0.0:
                    gradient = -2.0 * a * b * pow(distance, b - 1.0)
                    gradient /= a * pow(distance, b) + 1.0
                for d in range(2):
                    step = clip(gradient * (current[d] - other[d]))
                    for offset in range(2 * window):
                        near = m + offset - window
                        if 0 <= near < points and near != m:
                            step -= clip(pull[m, offset, j] * (current[d] - embeddings[near, j, d]))
                    current[d] += clip(step) * alpha
                    step = clip(gradient * (other[d] - current[d]))
                    for offset in range(2 * window):
                        near = m + offset - window
                        if 0 <= near < points and near != m:
                            step -= clip(pull[m, offset, k] * (other[d] - embeddings[near, k, d]))
                    other[d] += clip(step) * alpha
                next_sample[m, i] += every[m, i]
                negatives = 0
                if negative_every[m, i] > 0:
                    negatives = int((n - next_negative[m, i]) / negative_every[m, i])
                for _ in range(negatives):
                    k = tau_rand_int(state) % embeddings.shape[1]
                    other = embeddings[m, k]
                    distance = rdist(current, other)
                    gradient = 0.0
                    if distance > 0.0:
                        gradient = 2.0 * b
                        gradient /= (0.001 + distance) * (a * pow(distance, b) + 1)
                    elif j == k:
                        continue
                    for d in range(2):
                        step = 0.0
                        if gradient > 0.0:
                            step = clip(gradient * (current[d] - other[d]))
                        for offset in range(2 * window):
                            near = m + offset - window
                            if 0 <= near < points and near != m:
                                step -= clip(pull[m, offset, j] * (current[d] - embeddings[near, j, d]))
                        current[d] += clip(step) * alpha
                next_negative[m, i] += negatives * negative_every[m, i]
