"""UMAP layouts in two dimensions, from neighbours that are found once, by the engine that `umap.engine` names.

`joint` is one map of all points, `separate` one of each, `aligned` one of each with every token tied to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from attnmix.core.options import UmapParameters
from attnmix.core.points import Site
from attnmix.maps import compiled, umap_learn
from attnmix.maps.graphs import Neighbourhood, neighbourhood
from attnmix.maps.neighbours import Coordinates, Vectors
from attnmix.maps.parallel import in_parallel
from attnmix.maps.quality_table import Row, score_map, whole_layout

Maps = dict[int, dict[Site, Coordinates]]
Scored = tuple[list[Row], int]
Blocks = Vectors | Sequence[Vectors]
"""Vectors of each point, `[points, tokens, hidden]` where all are equally wide."""


class Engine(NamedTuple):
    """Lays out vectors that have neighbourhoods, with a seed: on one map, or those of each point with tokens tied.

    It imports its libraries when it is called, so that nobody waits for those of another.
    """

    lay_out: Callable[[Vectors, Neighbourhood, UmapParameters, int], Coordinates]
    lay_out_aligned: Callable[[Sequence[Vectors], Sequence[Neighbourhood], UmapParameters, int], list[Coordinates]]


ENGINES = {
    "compiled": Engine(compiled.lay_out, compiled.lay_out_aligned),
    "umap-learn": Engine(umap_learn.lay_out, umap_learn.lay_out_aligned),
}
"""By the values of `umap.engine`."""


def fit_map(vectors: Vectors, umap: UmapParameters, seed: int) -> Coordinates:
    """Coordinates `[vectors, 2]` of one map."""
    return lay_out(vectors, neighbourhood(vectors, umap), umap, seed)


def lay_out(vectors: Vectors, near: Neighbourhood | None, umap: UmapParameters, seed: int) -> Coordinates:
    """Coordinates `[vectors, 2]` of one map; on a line, in order, without neighbourhoods."""
    return _line(len(vectors)) if near is None else ENGINES[umap.engine].lay_out(vectors, near, umap, seed)


def lay_out_aligned(
    vectors: Sequence[Vectors], near: Sequence[Neighbourhood | None], umap: UmapParameters, seed: int
) -> list[Coordinates]:
    """Coordinates `[tokens, 2]` at each point, the same token tied from point to point.

    A point without neighbourhoods is laid on a line and is not tied.
    """
    there = [(number, part) for number, part in enumerate(near) if part is not None]
    maps = [_line(len(each)) for each in vectors]
    if there:
        chosen = [vectors[number] for number, _ in there], [part for _, part in there]
        laid_out = ENGINES[umap.engine].lay_out_aligned(*chosen, umap, seed)
        for (number, _), xy in zip(there, laid_out, strict=True):
            maps[number] = xy
    return maps


def _line(number: int) -> Coordinates:
    return np.stack([np.arange(number), np.zeros(number)], axis=1).astype(np.float32)


class Fitted(NamedTuple):
    """A layout: every seed's coordinates of every point, rows of the quality table, how many vectors were scored."""

    maps: Maps
    quality: list[Row]
    scored: int


def _joint(sites: list[Site], vectors_STD: Blocks, umap: UmapParameters) -> Fitted:
    vectors = np.asarray(vectors_STD).reshape(-1, vectors_STD[0].shape[-1])
    near = neighbourhood(vectors, umap)
    calls = [(vectors, near, umap, seed) for seed in _seeds(umap)]
    maps = in_parallel(lay_out, calls, "joint map, by seed")
    scored = score_map(("joint", None, None), sites, vectors, maps, umap)
    return Fitted(_by_seed(umap, sites, (np.split(each, len(sites)) for each in maps)), *scored)


def _separate(sites: list[Site], vectors_STD: Blocks, umap: UmapParameters) -> Fitted:
    calls = [(site, vectors, umap) for site, vectors in zip(sites, vectors_STD, strict=True)]
    of_site, scored = zip(*in_parallel(_fit_alone, calls, "separate maps"), strict=True)
    return _of_points("separate", _by_seed(umap, sites, zip(*of_site, strict=True)), scored)


def _fit_alone(site: Site, vectors: Vectors, umap: UmapParameters) -> tuple[list[Coordinates], Scored]:
    near = neighbourhood(vectors, umap)
    maps = [lay_out(vectors, near, umap, seed) for seed in _seeds(umap)]
    return maps, score_map(("separate", *site), (), vectors, maps, umap)


def _aligned(sites: list[Site], vectors_STD: Blocks, umap: UmapParameters) -> Fitted:
    near = in_parallel(neighbourhood, [(vectors, umap) for vectors in vectors_STD], "neighbours at each point")
    calls = [(vectors_STD, near, umap, seed) for seed in _seeds(umap)]
    by_seed = in_parallel(lay_out_aligned, calls, "aligned maps, by seed")
    of_site = zip(sites, vectors_STD, zip(*by_seed, strict=True), strict=True)
    to_score = [(("aligned", *site), (), vectors, maps, umap) for site, vectors, maps in of_site]
    scored = in_parallel(score_map, to_score, "scores of the aligned maps")
    return _of_points("aligned", _by_seed(umap, sites, by_seed), scored)


def _seeds(umap: UmapParameters) -> list[int]:
    return [umap.seed, *umap.stability_seeds]


def _by_seed(umap: UmapParameters, sites: list[Site], maps: Iterable[Sequence[Coordinates]]) -> Maps:
    return {seed: dict(zip(sites, each, strict=True)) for seed, each in zip(_seeds(umap), maps, strict=True)}


def _of_points(layout: str, maps: Maps, scored: Iterable[Scored]) -> Fitted:
    rows, numbers = zip(*scored, strict=True)
    by_site = [row for part in rows for row in part]
    return Fitted(maps, whole_layout(layout, by_site) + by_site, sum(numbers))


Fit = Callable[[list[Site], Blocks, UmapParameters], Fitted]
FITS: dict[str, Fit] = {"joint": _joint, "separate": _separate, "aligned": _aligned}
"""From the points and their vectors, by the name of the layout; only `separate` takes points of several widths."""
