"""UMAP layouts in two dimensions, from neighbours that are found once.

What `umap.UMAP` and `umap.AlignedUMAP` do, taken apart: the graph of neighbours depends on the
vectors only, so several seeds share it, and the epochs run without the interpreter lock, so
several maps run side by side in one process.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import scipy.sparse.linalg
from sklearn.manifold import _spectral_embedding
from tqdm import tqdm
from umap.aligned_umap import build_neighborhood_similarities, expand_relations, procrustes_align
from umap.distances import named_distances
from umap.spectral import spectral_layout
from umap.umap_ import find_ab_params, fuzzy_simplicial_set, make_epochs_per_sample, noisy_scale_coords

from stages.maps.compiled import run_aligned_epochs, run_epochs
from stages.maps.neighbours import Vectors, neighbours
from stages.maps.storage import Coordinates
from stages.parameters import UmapParameters

SMALLEST_FIT = 4  # vectors; fewer have no neighbourhoods to keep
NEGATIVE_SAMPLES = 5  # for each edge that is sampled; umap-learn's default
TIE = 1e-2  # of a token to itself at the next point, AlignedUMAP's `alignment_regularisation`
WINDOW = 3  # points before and after that a token is tied to, its `alignment_window_size`
EPOCHS_AT_ONCE = 10  # between two steps of the progress bar
# What scikit-learn, which umap-learn asks to place the parts of an unconnected graph, does not know by these names.
FOR_CENTROIDS: dict[str, Any] = {
    "taxicab": "manhattan",
    **dict.fromkeys(("linf", "linfinity", "linfty"), "chebyshev"),
    "softmax_hellinger": named_distances["softmax_hellinger"],
}

Graph = Any  # scipy.sparse.csr_matrix [vectors, vectors], float32

_NUMBA = Lock()  # numba's parallel loops must not be entered by two threads at once


def neighbour_graph(vectors: Vectors, umap: UmapParameters) -> Graph | None:
    """The weighted graph of neighbours that `umap.UMAP` keeps as `graph_`; None where there is none to lay out.

    Fewer vectors than `n_neighbors` are each other's neighbours all. None for fewer than four
    vectors and for vectors that are all equal.
    """
    if len(vectors) < SMALLEST_FIT or (vectors == vectors[0]).all():
        return None
    k = min(umap.n_neighbors, len(vectors) - 1)
    indices, distances = neighbours(vectors, k, umap.metric, umap.seed)
    with _NUMBA:
        before = numba.get_num_threads()
        numba.set_num_threads(1)  # the mean distance is a sum over threads
        graph, _, _ = fuzzy_simplicial_set(vectors, k, None, umap.metric, knn_indices=indices, knn_dists=distances)
        numba.set_num_threads(before)
    return graph


def lay_out(
    vectors: Vectors, graph: Graph | None, umap: UmapParameters, seed: int, progress: bool = False
) -> Coordinates:
    """Coordinates `[vectors, 2]`: what `umap.UMAP(random_state=seed).fit(vectors).embedding_` gives for the same graph.

    Without a graph the vectors lie on a line, in order.
    """
    if graph is None:
        return _line(len(vectors))
    random_state = np.random.RandomState(seed)
    edges = graph.tocoo()
    edges.sum_duplicates()
    edges.data[edges.data < edges.data.max() / umap.n_epochs] = 0.0
    edges.eliminate_zeros()
    embedding = noisy_scale_coords(_spectral(vectors, edges, umap, random_state), random_state, max_coord=10)
    low, high = embedding.min(axis=0), embedding.max(axis=0)
    embedding = np.asarray(10.0 * (embedding - low) / (high - low), dtype=np.float32, order="C")
    every = make_epochs_per_sample(edges.data, umap.n_epochs)
    states = np.full((len(embedding), 3), _three_integers(random_state), dtype=np.int64)
    states += embedding[:, 0].astype(np.float64).view(np.int64).reshape(-1, 1)
    negative_every = every / NEGATIVE_SAMPLES
    schedule = (negative_every, negative_every.copy(), every.copy())
    curve = find_ab_params(1.0, umap.min_dist)
    alphas = _learning_rates(umap.n_epochs)

    def run(first: int, last: int) -> None:
        run_epochs(first, last, alphas, embedding, (edges.row, edges.col), every, curve, states, schedule)

    _run_all(run, umap.n_epochs, progress)
    return embedding


def fit_map(vectors: Vectors, umap: UmapParameters, seed: int) -> Coordinates:
    """Coordinates `[vectors, 2]` of one map."""
    return lay_out(vectors, neighbour_graph(vectors, umap), umap, seed)


def lay_out_aligned(
    vectors: Sequence[Vectors], graphs: Sequence[Graph | None], umap: UmapParameters, seed: int, progress: bool = False
) -> list[Coordinates]:
    """Coordinates `[tokens, 2]` at each point, the same token tied from point to point.

    What `umap.AlignedUMAP(transform_seed=seed)` gives for the same graphs, with one
    difference: `min_dist` has its effect. A point without a graph is laid on a line and is not tied.
    """
    placed = [number for number, graph in enumerate(graphs) if graph is not None]
    found = [_line(len(each)) for each in vectors]
    if placed:
        chosen = [vectors[number] for number in placed], [graphs[number] for number in placed]
        for number, xy in zip(placed, _aligned(*chosen, umap, seed, progress), strict=True):
            found[number] = xy
    return found


def _aligned(
    vectors: Sequence[Vectors], graphs: Sequence[Graph], umap: UmapParameters, seed: int, progress: bool
) -> list[Coordinates]:
    random_state = np.random.RandomState(seed)
    embeddings = [_scaled(_spectral(vectors[0], graphs[0], umap, random_state))]
    everyone = np.tile(np.arange(len(vectors[0])), (2, 1))
    for each, graph in zip(vectors[1:], graphs[1:], strict=True):
        start = _scaled(_spectral(each, graph, umap, random_state))
        embeddings.append(procrustes_align(embeddings[-1], start, everyone))
    stacked = np.ascontiguousarray(np.stack(embeddings), dtype=np.float32)
    edges = [graph.tocoo() for graph in graphs]
    every = [make_epochs_per_sample(each.data, umap.n_epochs) for each in edges]
    numbers = np.array([len(each) for each in every])
    every_ME = _padded(every, np.float64)
    with np.errstate(over="ignore"):  # an edge too weak for float32 is never sampled
        every32_ME = every_ME.astype(np.float32)
        negative_every = (every32_ME / NEGATIVE_SAMPLES).astype(np.float32)
    arrays = (
        stacked,
        _padded([each.row for each in edges], np.int64),
        _padded([each.col for each in edges], np.int64),
        numbers,
        every_ME,
        *find_ab_params(1.0, umap.min_dist),
        _pull(graphs, len(everyone[0])),
        _three_integers(random_state),
        negative_every,
        negative_every.copy(),
        every32_ME,
    )
    alphas = _learning_rates(umap.n_epochs)
    _run_all(lambda first, last: run_aligned_epochs(first, last, alphas, *arrays), umap.n_epochs, progress)
    return list(stacked)


def _pull(graphs: Sequence[Graph], tokens: int) -> npt.NDArray[np.float64]:
    """How strongly a token is tied to itself `offset - WINDOW` points on, `[points, 2 WINDOW, tokens]`.

    The share of its neighbours that it keeps there, falling off with the distance in points.
    """
    relations = expand_relations([{token: token for token in range(tokens)}] * (len(graphs) - 1), WINDOW)
    lists = [numba.typed.List.empty_list(numba.types.int32[::1]) for _ in range(2)]
    for graph in graphs:
        lists[0].append(graph.indptr.astype(np.int32))
        lists[1].append(graph.indices.astype(np.int32))
    with _NUMBA:
        similarities = build_neighborhood_similarities(*lists, relations)
    offsets = np.arange(-WINDOW, WINDOW)  # as in umap-learn, which leaves the last point of the window out
    fall_off = (
        np.where(relations[:, : 2 * WINDOW] >= 0, 1.0, 0.0) * (TIE * np.exp(1.0 - np.abs(offsets)))[None, :, None]
    )
    return np.asarray(fall_off * similarities[:, : 2 * WINDOW].astype(np.float64))


@contextmanager
def _seeded_eigensolver(seed: int) -> Iterator[None]:
    """SciPy's `eigsh` draws its restarts anew in every call unless it is given a generator; umap-learn gives none."""
    real = scipy.sparse.linalg.eigsh
    seeded = partial(real, rng=np.random.default_rng(seed))
    modules: tuple[Any, ...] = (scipy.sparse.linalg, _spectral_embedding)
    try:
        for module in modules:
            module.eigsh = seeded
        yield
    finally:
        for module in modules:
            module.eigsh = real


def _spectral(vectors: Vectors, graph: Graph, umap: UmapParameters, random_state: np.random.RandomState) -> Any:
    with _NUMBA, _seeded_eigensolver(umap.seed), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metric = FOR_CENTROIDS.get(umap.metric, umap.metric)
        start = spectral_layout(vectors, graph, 2, random_state, metric=metric, metric_kwds={})
    for warning in caught:
        # umap-learn places the parts of an unconnected graph by a graph of the parts, which need not be connected.
        if "Graph is not fully connected" not in str(warning.message):
            logging.info("a map of %d vectors: %s", len(vectors), " ".join(str(warning.message).split()))
    return start


def _scaled(coordinates: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return np.asarray(coordinates * (10.0 / np.abs(coordinates).max()), dtype=np.float32, order="C")


def _padded(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    rows = np.zeros((len(parts), max(map(len, parts))), dtype=dtype)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return rows


def _learning_rates(epochs: int) -> npt.NDArray[np.float64]:
    """Falling from 1 towards 0; the first is used twice, as in umap-learn."""
    return 1.0 - np.maximum(np.arange(epochs) - 1, 0) / epochs


def _three_integers(random_state: np.random.RandomState) -> npt.NDArray[np.int64]:
    limits = np.iinfo(np.int32)
    return random_state.randint(limits.min + 1, limits.max - 1, 3).astype(np.int64)


def _line(number: int) -> Coordinates:
    return np.stack([np.arange(number), np.zeros(number)], axis=1).astype(np.float32)


def _run_all(run: Callable[[int, int], None], epochs: int, progress: bool) -> None:
    with tqdm(total=epochs, desc="epochs of the layout", disable=not (progress and sys.stderr.isatty())) as bar:
        for first in range(0, epochs, EPOCHS_AT_ONCE):
            last = min(first + EPOCHS_AT_ONCE, epochs)
            run(first, last)
            bar.update(last - first)
