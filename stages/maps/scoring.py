"""The rows of `features/maps/quality.parquet`: every measure of every map, beside chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from stages.maps.graphs import has_neighbourhoods
from stages.maps.neighbours import Coordinates, Vectors
from stages.maps.quality import DISTANCES, MEASURES, STABILITY, distance_correlation, scored_rows, scores, stability
from stages.parameters import UmapParameters
from stages.sites import Site

QUALITY_COLUMNS = ("layout", "layer", "point", "measure", "value", "chance")
Row = tuple[str, int | None, str | None, str, float, float]


def score_site(
    layout: str, site: Site, vectors: Vectors, maps: Sequence[Coordinates], umap: UmapParameters
) -> list[Row]:
    """Rows for one point's own map; `maps` are `[tokens, 2]`, the first with the seed of the parameters."""
    where = (layout, site.layer, site.point)
    if not has_neighbourhoods(vectors):
        return _unknown(where, len(maps))
    xy, dealt = maps[0], _dealt(maps[0], umap.seed)
    rows = scored_rows(np.zeros(len(xy), dtype=np.int64), umap.seed)
    value, chance = (part.mean(axis=0) for part in scores(vectors, (xy, dealt), umap.metric, rows))
    found: list[Row] = [(*where, name, float(v), float(c)) for name, v, c in zip(MEASURES, value, chance, strict=True)]
    found.append((*where, DISTANCES, *_distances(vectors, (xy, dealt), umap)))
    if len(maps) > 1:
        found += [(*where, name, *pair) for name, pair in stability(maps, umap.seed).items()]
    return found


def whole_layout(layout: str, rows: Sequence[Row]) -> list[Row]:
    """The means over the points, for a layout that has a map for each."""
    table = quality_table(rows)
    means = table.groupby("measure", sort=False)[["value", "chance"]].mean()
    return [(layout, None, None, str(name), float(v), float(c)) for name, v, c in means.itertuples()]


def score_joint(
    features: Mapping[Site, Vectors], vectors: Vectors, maps: Sequence[Coordinates], umap: UmapParameters
) -> tuple[list[Row], int]:
    """Rows for the one map of all points and for each point's part in it, and how many vectors were scored."""
    if not has_neighbourhoods(vectors):
        return _unknown(("joint", None, None), len(maps)), 0
    tokens = len(next(iter(features.values())))
    xy, dealt = maps[0], _dealt(maps[0], umap.seed)
    numbers = np.repeat(np.arange(len(features)), tokens)
    rows = scored_rows(numbers, umap.seed)
    both = scores(vectors, (xy, dealt), umap.metric, rows)
    found: list[Row] = []
    for column, name in enumerate(MEASURES):
        value, chance = (pd.Series(part[:, column]) for part in both)
        found.append(("joint", None, None, name, float(value.mean()), float(chance.mean())))
        by_site = zip(value.groupby(numbers[rows]).mean(), chance.groupby(numbers[rows]).mean(), strict=True)
        found += [
            ("joint", site.layer, site.point, name, float(v), float(c))
            for site, (v, c) in zip(features, by_site, strict=True)
        ]
    found.append(("joint", None, None, DISTANCES, *_distances(vectors, (xy, dealt), umap)))
    for number, (site, own) in enumerate(features.items()):
        part = slice(number * tokens, (number + 1) * tokens)
        # The point's tokens dealt out among the places of the whole map.
        found.append(("joint", site.layer, site.point, DISTANCES, *_distances(own, (xy[part], dealt[part]), umap)))
    if len(maps) > 1:
        found += [("joint", None, None, name, *pair) for name, pair in stability(maps, umap.seed).items()]
    return found, len(rows)


def quality_table(rows: Sequence[Row]) -> pd.DataFrame:
    """`layout, layer, point, measure, value, chance`; a row without layer and point is the whole layout's."""
    table = pd.DataFrame(list(rows), columns=list(QUALITY_COLUMNS)).round(6)
    return table.astype({"layer": "Int32", "point": "string", "value": "float64", "chance": "float64"})


def _unknown(where: tuple[str, int | None, str | None], maps: int) -> list[Row]:
    """A map without neighbourhoods has no quality."""
    names = (*MEASURES, DISTANCES, *(STABILITY if maps > 1 else ()))
    return [(*where, name, float("nan"), float("nan")) for name in names]


def _dealt(xy: Coordinates, seed: int) -> Coordinates:
    """The same places, dealt out to the vectors by chance."""
    return np.asarray(np.random.default_rng(seed).permutation(xy), dtype=np.float32)


def _distances(vectors: Vectors, maps: tuple[Coordinates, Coordinates], umap: UmapParameters) -> Any:
    return (distance_correlation(vectors, xy, umap.metric, umap.seed) for xy in maps)
