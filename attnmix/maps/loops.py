"""The loops of the layouts, compiled by numba: stochastic gradient descent as umap-learn does it.

Number for number what `umap.layouts` computes (tested), without its other branches and without the
interpreter lock, so that maps run side by side in one process. What is compiled is kept on disk.
"""

# numba infers the types inside these functions, and strict checks of them would see none: hence every
# `type: ignore` below.
from __future__ import annotations

import numba
import numpy as np

BITS = 0xFFFFFFFF


@numba.njit(inline="always")
def _clipped(move):  # type: ignore[no-untyped-def]
    return min(max(move, -4.0), 4.0)


@numba.njit(inline="always")
def _random(state):  # type: ignore[no-untyped-def]
    """The next 32 bits, as a signed integer, of L'Ecuyer's combined Tausworthe generator (taus88, 1996)."""
    state[0] = (((state[0] & 0xFFFFFFFE) << 12) & BITS) ^ ((((state[0] << 13) & BITS) ^ state[0]) >> 19)
    state[1] = (((state[1] & 0xFFFFFFF8) << 4) & BITS) ^ ((((state[1] << 2) & BITS) ^ state[1]) >> 25)
    state[2] = (((state[2] & 0xFFFFFFF0) << 17) & BITS) ^ ((((state[2] << 3) & BITS) ^ state[2]) >> 11)
    return np.int32(state[0] ^ state[1] ^ state[2])


@numba.njit(inline="always")
def _squared_distance(a, b):  # type: ignore[no-untyped-def]
    x = a[0] - b[0]
    y = a[1] - b[1]
    return np.float32(x * x + y * y)


@numba.njit(inline="always")
def _attraction(distance, a, b):  # type: ignore[no-untyped-def]
    """Between neighbours, by their squared distance; 0 in one place."""
    gradient = 0.0
    if distance > 0.0:
        gradient = -2.0 * a * b * pow(distance, b - 1.0)
        gradient /= a * pow(distance, b) + 1.0
    return gradient


@numba.njit(inline="always")
def _repulsion(distance, a, b):  # type: ignore[no-untyped-def]
    """From any other vector, by the squared distance; 0 in one place."""
    gradient = 0.0
    if distance > 0.0:
        gradient = 2.0 * b
        gradient /= (0.001 + distance) * (a * pow(distance, b) + 1)
    return gradient


@numba.njit(nogil=True, fastmath=True, cache=True)
def run_epochs(  # type: ignore[no-untyped-def]
    first, last, alphas, embedding, heads, tails, every, a, b, states, negative_every, next_negative, next_sample
):
    """Epochs `first` to `last` (not included) of UMAP's layout, in place.

    `embedding` is `[vectors, 2]` float32; `heads`, `tails`, `every` (epochs between samples) and the three schedules
    (epochs between negative samples, the next of those, the next sample) are `[edges]`; `states` is `[vectors, 3]`
    int64, the random numbers' state; `alphas` holds every epoch's learning rate, a and b are UMAP's curve.
    """
    for n in range(first, last):
        alpha = alphas[n]
        for i in range(len(every)):
            if next_sample[i] > n:
                continue
            j = heads[i]
            current, other = embedding[j], embedding[tails[i]]
            gradient = _attraction(_squared_distance(current, other), a, b)
            for d in range(2):
                move = _clipped(gradient * (current[d] - other[d]))
                current[d] += move * alpha
                other[d] += -move * alpha
            next_sample[i] += every[i]
            negatives = int((n - next_negative[i]) / negative_every[i])
            for _ in range(negatives):
                k = _random(states[j]) % embedding.shape[0]
                other = embedding[k]
                distance = _squared_distance(current, other)
                if distance == 0.0 and j == k:
                    continue
                gradient = _repulsion(distance, a, b)
                for d in range(2):
                    current[d] += _clipped(gradient * (current[d] - other[d])) * alpha
            next_negative[i] += negatives * negative_every[i]


@numba.njit(inline="always")
def _tied(move, embeddings, pull, m, token, d):  # type: ignore[no-untyped-def]
    """A token's move at point `m` along axis `d`, with the pulls to its places at the points around."""
    window = pull.shape[1] // 2
    for offset in range(2 * window):
        near = m + offset - window
        if 0 <= near < embeddings.shape[0] and near != m:
            move -= _clipped(pull[m, offset, token] * (embeddings[m, token, d] - embeddings[near, token, d]))
    return _clipped(move)


@numba.njit(nogil=True, fastmath=True, cache=True)
def run_aligned_epochs(  # type: ignore[no-untyped-def]
    first, last, alphas, embeddings, heads, tails, edges, every, a, b, pull, state, negative_every, next_negative,
    next_sample
):  # fmt: skip
    """Epochs of the aligned layout, in place: the same sums as `umap.AlignedUMAP`, on arrays in place of typed lists.

    `embeddings` is `[points, tokens, 2]` float32; `heads`, `tails` and the four schedules are `[points, most edges]`,
    of which `edges[point]` hold; `pull` is `[points, 2 window, tokens]`, how strongly a token is tied to itself at
    the point `offset - window` further; `state` is `[3]` int64.
    """
    order = np.arange(embeddings.shape[0])
    for n in range(first, last):
        order[:] = np.arange(embeddings.shape[0])
        np.random.seed(abs(state[0]))  # noqa: NPY002  # numba's own, as in umap-learn
        np.random.shuffle(order)  # noqa: NPY002
        for i in range(heads.shape[1]):
            for m in order:
                if i >= edges[m] or next_sample[m, i] > n:
                    continue
                j, k = heads[m, i], tails[m, i]
                current, other = embeddings[m, j], embeddings[m, k]
                gradient = _attraction(_squared_distance(current, other), a, b)
                for d in range(2):
                    move = _clipped(gradient * (current[d] - other[d]))
                    current[d] += _tied(move, embeddings, pull, m, j, d) * alphas[n]
                    move = _clipped(gradient * (other[d] - current[d]))
                    other[d] += _tied(move, embeddings, pull, m, k, d) * alphas[n]
                next_sample[m, i] += every[m, i]
                negatives = 0
                if negative_every[m, i] > 0:
                    negatives = int((n - next_negative[m, i]) / negative_every[m, i])
                for _ in range(negatives):
                    k = _random(state) % embeddings.shape[1]
                    other = embeddings[m, k]
                    distance = _squared_distance(current, other)
                    if distance == 0.0 and j == k:
                        continue
                    gradient = _repulsion(distance, a, b)
                    for d in range(2):
                        move = _clipped(gradient * (current[d] - other[d]))
                        current[d] += _tied(move, embeddings, pull, m, j, d) * alphas[n]
                next_negative[m, i] += negatives * negative_every[m, i]
