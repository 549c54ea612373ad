"""The rows of `features/maps/quality.parquet`: every measure of every map, beside chance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from attnmix.core.options import UmapParameters
from attnmix.core.points import Site
from attnmix.maps.graphs import has_neighbourhoods
from attnmix.maps.neighbours import Coordinates, Vectors
from attnmix.maps.parallel import in_parallel
from attnmix.maps.quality import SCORES, STABILITY, distance_correlation, scored_rows, scores, stability
from attnmix.store.maps import OWN_BASIS

COLUMNS = ("layout", "layer", "point", "measure", "value", "chance")
WITHIN = tuple(f"{name}_within" for name in SCORES)
Where = tuple[str, int | None, str | None]
Row = tuple[str, int | None, str | None, str, float, float]


def score_map(
    whole: Where, parts: Sequence[Site], vectors: Vectors, maps: Sequence[Coordinates], umap: UmapParameters
) -> tuple[list[Row], int]:
    """Rows for one map and for each of its `parts`, if it has several points, and how many vectors were scored.

    `parts` lie one after the other in `vectors`; `maps` are `[vectors, 2]`, the first with the seed of the parameters.
    Points in a basis of their own (`OWN_BASIS`) are nobody's neighbours among all points, and have no score there.
    Each part is also scored by itself, among the vectors of its own point (`WITHIN`); the whole map's value is the
    mean over parts. All values are NaN where there are no neighbourhoods.
    """
    if not parts:
        return _score_together(whole, (), vectors, maps, umap)
    size = len(vectors) // len(parts)
    slices = [slice(start, start + size) for start in range(0, len(vectors), size)]
    compared = [(site, part) for site, part in zip(parts, slices, strict=True) if site.point not in OWN_BASIS]
    if len(compared) == len(parts):
        table, scored = _score_together(whole, parts, vectors, maps, umap)
    else:
        rows = np.concatenate([np.arange(len(vectors))[part] for _, part in compared] or [np.arange(0)])
        kept = [xy[rows] for xy in maps]
        table, scored = _score_together(whole, [site for site, _ in compared], vectors[rows], kept, umap)
    calls = [(whole[0], site, vectors[part], maps[0][part], umap) for site, part in zip(parts, slices, strict=True)]
    within = [row for of_part in in_parallel(_score_part, calls, "scores within points") for row in of_part]
    means = [row for row in whole_layout(whole[0], within) if row[3] in WITHIN]
    return table + means + within, scored


def _score_part(layout: str, site: Site, vectors: Vectors, xy: Coordinates, umap: UmapParameters) -> list[Row]:
    """One point's vectors on a map of several points, among themselves; distances where nothing else scores them."""
    own_distances = site.point in OWN_BASIS
    if not has_neighbourhoods(vectors):
        names = (*WITHIN, "distance_spearman") if own_distances else WITHIN
        return [(layout, *site, name, float("nan"), float("nan")) for name in names]
    both = xy, np.random.default_rng(umap.seed).permutation(xy)
    rows = scored_rows(np.zeros(len(vectors), dtype=np.int64), umap.seed)
    pairs = zip(*(each.mean(axis=0).tolist() for each in scores(vectors, both, umap.metric, rows)), strict=True)
    table: list[Row] = [(layout, *site, name, *pair) for name, pair in zip(WITHIN, pairs, strict=True)]
    if own_distances:
        value, chance = (distance_correlation(vectors, each, umap.metric, umap.seed) for each in both)
        table.append((layout, *site, "distance_spearman", value, chance))
    return table


def _score_together(
    whole: Where, parts: Sequence[Site], vectors: Vectors, maps: Sequence[Coordinates], umap: UmapParameters
) -> tuple[list[Row], int]:
    """The same for points that can all be compared."""
    if not has_neighbourhoods(vectors):
        names = (*SCORES, "distance_spearman", *(STABILITY if len(maps) > 1 else ()))
        return [(*whole, name, float("nan"), float("nan")) for name in names], 0
    # By chance the same places are dealt out to the vectors; a part's tokens lie among the places of the whole map.
    both = maps[0], np.random.default_rng(umap.seed).permutation(maps[0])
    size = len(vectors) // max(1, len(parts))
    rows = scored_rows(np.arange(len(vectors)) // size, umap.seed)
    scored = [pd.DataFrame(each, columns=list(SCORES)) for each in scores(vectors, both, umap.metric, rows)]
    by_part = [each.groupby(rows // size).mean() for each in scored]
    table: list[Row] = []
    for name in SCORES:
        value, chance = (float(each[name].mean()) for each in scored)
        table.append((*whole, name, value, chance))
        pairs = zip(*(each[name].tolist() for each in by_part), strict=True)
        table += [(whole[0], *site, name, *pair) for site, pair in zip(parts, pairs, strict=False)]
    places = {whole: slice(None)} | {(whole[0], *site): slice(n * size, (n + 1) * size) for n, site in enumerate(parts)}
    for where, part in places.items():
        value, chance = (distance_correlation(vectors[part], xy[part], umap.metric, umap.seed) for xy in both)
        table.append((*where, "distance_spearman", value, chance))
    if len(maps) > 1:
        table += [(*whole, name, *pair) for name, pair in stability(maps, umap.seed).items()]
    return table, len(rows)


def whole_layout(layout: str, rows: Sequence[Row]) -> list[Row]:
    """The means over the points, for a layout that has a map for each."""
    means = quality_table(rows).groupby("measure", sort=False)[["value", "chance"]].mean()
    return [(layout, None, None, str(name), float(v), float(c)) for name, v, c in means.itertuples()]


def quality_table(rows: Sequence[Row]) -> pd.DataFrame:
    """`layout, layer, point, measure, value, chance`; a row without layer and point is the whole layout's."""
    table = pd.DataFrame(list(rows), columns=list(COLUMNS)).round(6)
    return table.astype({"layer": "Int32", "point": "string", "value": "float64", "chance": "float64"})
