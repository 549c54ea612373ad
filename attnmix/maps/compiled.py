"""The engine `compiled`: what `umap.UMAP` and `umap.AlignedUMAP` compute, taken apart.

Bit for bit the same for the same connected graph (tested). The epochs run without the interpreter lock, so that maps
run side by side in one process; and nobody waits while what a layout does not use is imported and compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import curve_fit
from tqdm import tqdm

from attnmix.core.options import UmapParameters
from attnmix.maps.graphs import EXTENT, Graph, Neighbourhood, scaled, single_start, spectral_start
from attnmix.maps.neighbours import Coordinates, Vectors

NEGATIVE_SAMPLES = 5  # for each edge that is sampled; umap-learn's default
TIE = 1e-2  # of a token to itself at the next point, AlignedUMAP's `alignment_regularisation`
WINDOW = 3  # points before and after that a token is tied to, its `alignment_window_size`
EPOCHS_AT_ONCE = 10  # between two looks at the progress bar
SHORT = 10  # seconds; a map that takes no longer shows no progress bar of its own


def lay_out(vectors: Vectors, near: Neighbourhood, umap: UmapParameters, seed: int) -> Coordinates:
    """Coordinates `[vectors, 2]`: what `umap.UMAP(random_state=seed).fit(vectors).embedding_` gives for the same graph.

    The parts of an unconnected graph start in other places (`spectral_start`).
    """
    from attnmix.maps.loops import run_epochs  # numba, which no other engine need have

    random_state = np.random.RandomState(seed)
    edges, start = single_start(vectors, near.graph, umap, random_state)
    low, high = start.min(axis=0), start.max(axis=0)
    embedding = np.asarray(EXTENT * (start - low) / (high - low), dtype=np.float32, order="C")
    every = epochs_between_samples(edges.data, umap.n_epochs)
    states = np.full((len(embedding), 3), _three_integers(random_state), dtype=np.int64)
    states += embedding[:, 0].astype(np.float64).view(np.int64).reshape(-1, 1)
    negative_every = every / NEGATIVE_SAMPLES
    schedules = negative_every, negative_every.copy(), every.copy()
    arrays = embedding, edges.row, edges.col, every, *curve(umap.min_dist), states, *schedules
    _run_all(run_epochs, arrays, umap.n_epochs)
    return embedding


def lay_out_aligned(
    vectors: Sequence[Vectors], near: Sequence[Neighbourhood], umap: UmapParameters, seed: int
) -> list[Coordinates]:
    """Coordinates `[tokens, 2]` at each point, the same token tied from point to point.

    What `umap.AlignedUMAP(transform_seed=seed)` computes for the same graphs; but here `min_dist` has its effect, and
    the last point is tied too.
    """
    from attnmix.maps.loops import run_aligned_epochs

    random_state = np.random.RandomState(seed)
    graphs = [each.graph for each in near]
    starts: list[Coordinates] = []
    for each, graph in zip(vectors, graphs, strict=True):
        start = scaled(spectral_start(each, graph, umap, random_state))
        starts.append(_turned(start, starts[-1]) if starts else start)
    embeddings = np.ascontiguousarray(np.stack(starts), dtype=np.float32)
    edges = [graph.tocoo() for graph in graphs]
    every = [epochs_between_samples(each.data, umap.n_epochs) for each in edges]
    every_ME = _padded(every, np.float64)
    with np.errstate(over="ignore"):  # an edge too weak for float32 is never sampled
        every32_ME = every_ME.astype(np.float32)
        negative_every = (every32_ME / NEGATIVE_SAMPLES).astype(np.float32)
    ends = (_padded(part, np.int64) for part in ([each.row for each in edges], [each.col for each in edges]))
    schedules = negative_every, negative_every.copy(), every32_ME
    edges_of_points = *ends, np.array([len(each) for each in every]), every_ME
    pull, state = ties(graphs), _three_integers(random_state)
    arrays = embeddings, *edges_of_points, *curve(umap.min_dist), pull, state, *schedules
    _run_all(run_aligned_epochs, arrays, umap.n_epochs)
    return list(embeddings)


def curve(min_dist: float) -> tuple[float, float]:
    """a and b of 1 / (1 + a x^2b), nearest to what is 1 up to `min_dist` and falls off as exp(min_dist - x) beyond."""
    x = np.linspace(0, 3, 300)
    wanted = np.where(x < min_dist, 1.0, np.exp(min_dist - x))
    (a, b), _ = curve_fit(lambda at, a, b: 1.0 / (1.0 + a * at ** (2 * b)), x, wanted)
    return float(a), float(b)


def epochs_between_samples(weights: npt.NDArray[np.float32], epochs: int) -> npt.NDArray[np.float64]:
    """`[edges]`: the strongest edge is sampled in every epoch, one half as strong in every second.

    Infinite for an edge so weak that its share of the strongest is 0 in float32.
    """
    with np.errstate(divide="ignore"):
        return np.asarray(epochs / (epochs * (weights / weights.max())).astype(np.float64))


def ties(graphs: Sequence[Graph]) -> npt.NDArray[np.float64]:
    """How strongly a token is tied to itself `offset - WINDOW` points on, `[points, 2 WINDOW, tokens]`.

    The share of its neighbours that it keeps there (Jaccard), falling off with the distance in points. As in
    umap-learn, the last point of the window is left out.
    """
    near = [(graph > 0).astype(np.float64) for graph in graphs]
    numbers = [np.asarray(each.sum(axis=1)).ravel() for each in near]
    pull = np.zeros((len(graphs), 2 * WINDOW, near[0].shape[0]))
    for point in range(len(graphs)):
        for place, offset in enumerate(range(-WINDOW, WINDOW)):
            if offset and 0 <= (other := point + offset) < len(graphs):
                shared = np.asarray(near[point].multiply(near[other]).sum(axis=1)).ravel()
                either = numbers[point] + numbers[other] - shared
                similar = np.divide(shared, either, out=np.ones_like(shared), where=either > 0).astype(np.float32)
                pull[point, place] = TIE * np.exp(1.0 - abs(offset)) * similar
    return pull


def _turned(start: Coordinates, onto: Coordinates) -> Coordinates:
    """`start`, turned and mirrored to lie as near to `onto` as it can (orthogonal Procrustes)."""
    left, _, right = np.linalg.svd(start.T @ onto)
    return np.asarray(start @ (left @ right), dtype=np.float32)


def _padded(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    rows = np.zeros((len(parts), max(map(len, parts))), dtype=dtype)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return rows


def _three_integers(random_state: np.random.RandomState) -> npt.NDArray[np.int64]:
    limits = np.iinfo(np.int32)
    return random_state.randint(limits.min + 1, limits.max - 1, 3).astype(np.int64)


def _run_all(run: Callable[..., None], arrays: tuple[Any, ...], epochs: int) -> None:
    # The learning rate falls from 1 towards 0; the first is used twice, as in umap-learn.
    alphas = 1.0 - np.maximum(np.arange(epochs) - 1, 0) / epochs
    with tqdm(total=epochs, desc="epochs of a map", disable=None, delay=SHORT, leave=False) as bar:
        for first in range(0, epochs, EPOCHS_AT_ONCE):
            last = min(first + EPOCHS_AT_ONCE, epochs)
            run(first, last, alphas, *arrays)
            bar.update(last - first)
