"""Neighbours, the weighted graph of them that UMAP lays out, and where its layout starts."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.sparse
import torch
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import ArpackError

from attnmix.core.options import UmapParameters
from attnmix.maps.neighbours import METRICS, Coordinates, Distances, Indices, Vectors, neighbours

SMALLEST_FIT = 4  # vectors; fewer have no neighbourhoods to keep
BISECTIONS = 64  # for a neighbourhood's width at most, and when it is near enough, as in umap-learn
NEAR_ENOUGH = 1e-5
SMALLEST_WIDTH = 1e-3  # of the mean distance
EIGENVALUE_TOLERANCE = 1e-4
EXTENT = 10.0  # of the start, to each side of the middle
NOISE = 1e-4  # added to it
FEW_EPOCHS = 10
ON_THE_AXES = np.eye(2)

Graph = Any  # scipy.sparse.csr_matrix [vectors, vectors], float32


class Neighbourhood(NamedTuple):
    """What every layout of the same vectors shares, whatever its seed: neighbours `[vectors, k]` and their graph."""

    indices: Indices
    distances: Distances
    graph: Graph


def has_neighbourhoods(vectors: Vectors) -> bool:
    """Not so for fewer than four vectors, and for vectors that are all equal: there is nothing to lay out."""
    return len(vectors) >= SMALLEST_FIT and not (vectors == vectors[0]).all()


def neighbourhood(vectors: Vectors, umap: UmapParameters) -> Neighbourhood | None:
    """Neighbours and the weighted graph that `umap.UMAP` keeps as `graph_`; None where there is nothing to lay out.

    Fewer vectors than `n_neighbors` are each other's neighbours all.
    """
    if not has_neighbourhoods(vectors):
        return None
    k = min(umap.n_neighbors, len(vectors) - 1)
    indices, distances = neighbours(vectors, k, umap.metric, umap.seed)
    return Neighbourhood(indices, distances, fuzzy_union(indices, distances))


def fuzzy_union(indices: Indices, distances: Distances) -> Graph:
    """Symmetric weights `[vectors, vectors]` from neighbours `[vectors, k]` (McInnes et al. 2018, section 3.1).

    A neighbour at distance d weighs exp(-(d - rho) / sigma), rho the distance of the nearest that is not in the same
    place, sigma such that a vector's weights sum to log2(k); two vectors weigh w + w' - w w' to each other.
    """
    rho = np.where(distances > 0, distances, np.inf).min(axis=1).astype(np.float32)
    rho[~np.isfinite(rho)] = 0
    sigma = _widths(distances, rho)
    beyond = np.maximum(distances - rho[:, None], 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.where((beyond > 0) & (sigma[:, None] > 0), np.exp(-beyond / sigma[:, None]), np.float32(1))
    weights[indices == np.arange(len(indices))[:, None]] = 0
    rows = np.repeat(np.arange(len(indices)), indices.shape[1])
    shape = (len(indices), len(indices))
    directed = scipy.sparse.csr_matrix((weights.ravel().astype(np.float32), (rows, indices.ravel())), shape=shape)
    directed.eliminate_zeros()
    both = (directed + directed.T - directed.multiply(directed.T)).tocsr()
    both.eliminate_zeros()
    both.sort_indices()
    return both


def _widths(distances: Distances, rho: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Sigma of each vector, by bisection of all at once."""
    target = np.log2(distances.shape[1])
    beyond = (distances[:, 1:] - rho[:, None]).astype(np.float64)
    low, width = np.zeros(len(rho)), np.ones(len(rho))
    high = np.full(len(rho), np.inf)
    searched = np.arange(len(rho))
    for _ in range(BISECTIONS):
        here = beyond[searched]
        total = np.where(here > 0, np.exp(-np.maximum(here, 0) / width[searched, None]), 1.0).sum(axis=1)
        far = np.abs(total - target) >= NEAR_ENOUGH
        searched, total = searched[far], total[far]
        if not len(searched):
            break
        wide = total > target
        high[searched[wide]] = width[searched[wide]]
        low[searched[~wide]] = width[searched[~wide]]
        open_end = np.isinf(high[searched])
        middle = np.where(open_end, 2 * width[searched], (low[searched] + np.where(open_end, 0, high[searched])) / 2)
        width[searched] = middle
    means = np.where(rho > 0, distances.mean(axis=1, dtype=np.float64), distances.mean(dtype=np.float64))
    return np.asarray(np.maximum(width, SMALLEST_WIDTH * means), dtype=np.float32)


def single_start(
    vectors: Vectors, graph: Graph, umap: UmapParameters, random_state: np.random.RandomState
) -> tuple[Graph, Coordinates]:
    """The edges of a single map, in coordinate format, and where it starts: a `spectral_start` with a little noise.

    An edge that the epochs would not sample once is left out; as in umap-learn, not judged by ten epochs or fewer.
    """
    epochs = umap.n_epochs if umap.n_epochs > FEW_EPOCHS else 500 if len(vectors) <= 10_000 else 200
    edges = graph.tocoo()
    edges.data[edges.data < edges.data.max() / epochs] = 0.0
    edges.eliminate_zeros()
    start = scaled(spectral_start(vectors, edges, umap, random_state))
    return edges, start + random_state.normal(scale=NOISE, size=start.shape).astype(np.float32)


def scaled(coordinates: npt.NDArray[np.float64]) -> Coordinates:
    """Coordinates stretched to `EXTENT`."""
    return np.asarray(coordinates * (EXTENT / np.abs(coordinates).max()), dtype=np.float32, order="C")


def spectral_start(
    vectors: Vectors, graph: Graph, umap: UmapParameters, random_state: np.random.RandomState
) -> npt.NDArray[np.float64]:
    """Coordinates `[vectors, 2]` from the eigenvectors of the graph's Laplacian, as in `umap.spectral.spectral_layout`.

    The parts of an unconnected graph start each for itself, around places that up to four parts have on the axes,
    and more parts by classical scaling of the distances of their centres.
    """
    number, labels = connected_components(graph)
    if number == 1:
        return _eigenvectors(graph, umap, random_state)
    places = _places(vectors, labels, number, umap.metric)
    rows = graph.tocsr()
    start = np.empty((len(vectors), 2))
    for part, place in enumerate(places):
        within = labels == part
        apart = np.linalg.norm(places - place, axis=1)
        room = apart[apart > 0].min() / 2
        size = int(within.sum())
        if size < SMALLEST_FIT:
            own = random_state.uniform(low=-room, high=room, size=(size, 2))
        else:
            own = _eigenvectors(rows[within][:, within], umap, random_state)
            own = own * (room / np.abs(own).max())
        start[within] = own + place
    return start


def _eigenvectors(graph: Graph, umap: UmapParameters, random_state: np.random.RandomState) -> npt.NDArray[np.float64]:
    """The two of the normalised Laplacian with the smallest eigenvalues above 0, `[vectors, 2]`.

    Seeded: SciPy's `eigsh` draws its restarts from the system's entropy unless it is given a generator, and
    umap-learn gives it none.
    """
    size = graph.shape[0]
    random_state.normal(size=(size, 3))  # umap-learn draws them for a solver that it does not use
    root = np.sqrt(np.asarray(graph.sum(axis=0)).squeeze())
    inverse = scipy.sparse.spdiags(1.0 / root, 0, size, size)
    laplacian = scipy.sparse.identity(size, dtype=np.float64) - inverse * graph * inverse
    try:
        values, eigenvectors = scipy.sparse.linalg.eigsh(
            laplacian,
            3,
            which="SM",
            ncv=min(size, max(7, int(np.sqrt(size)))),
            tol=EIGENVALUE_TOLERANCE,
            v0=np.ones(size),
            maxiter=5 * size,
            rng=np.random.default_rng(umap.seed),
        )
    except ArpackError as error:
        logging.info("%d vectors start from random places: %s", size, error)
        return random_state.uniform(low=-10.0, high=10.0, size=(size, 2))
    return np.asarray(eigenvectors[:, np.argsort(values)[1:3]])


def _places(vectors: Vectors, labels: npt.NDArray[np.int32], number: int, metric: str) -> npt.NDArray[np.float64]:
    """A place for each part of the graph, `[parts, 2]`, within 1 of the middle."""
    if number <= 2 * len(ON_THE_AXES):
        half = -(-number // 2)
        return np.concatenate([ON_THE_AXES[:half], -ON_THE_AXES[:half]])[:number]
    order = np.argsort(labels, kind="stable")
    sums = np.add.reduceat(vectors[order].astype(np.float64), np.searchsorted(labels[order], np.arange(number)))
    centres = torch.from_numpy(sums / np.bincount(labels)[:, None])
    squares = METRICS[metric].between(centres, centres).numpy() ** 2
    centred = squares - squares.mean(axis=0) - squares.mean(axis=1, keepdims=True) + squares.mean()
    values, directions = np.linalg.eigh(-centred / 2)
    places = directions[:, :-3:-1] * np.sqrt(np.maximum(values[:-3:-1], 0))
    # Parts in one place, which scaling cannot tell apart, go onto a small circle around it.
    angle = 2 * np.pi * np.arange(number) / number
    extent = max(float(np.abs(places).max()), 1e-12)
    return np.asarray(places / extent + 1e-3 * np.column_stack([np.cos(angle), np.sin(angle)]))
