"""What a map is worth: which neighbourhoods of the full space it kept, against a layout by chance."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from stages.maps.neighbours import BLOCK_DISTANCES, EXACT, Vectors, neighbours
from stages.maps.storage import Coordinates
from stages.models.loading import device

NEIGHBOURS = 15
MEASURES = ("trustworthiness", "continuity", "neighbours_kept")

Scores = npt.NDArray[np.float64]


def scores(vectors: Vectors, xy: Coordinates, metric: str, seed: int) -> Scores:
    """`[vectors, 3]`: the contribution of each vector to the measures of `MEASURES`; a map's score is their mean.

    With k = 15 nearest neighbours, trustworthiness is 1 - 2 / (n k (2n - 3k - 1)) sum_i sum_j (r(i, j) - k) over
    the neighbours j of i on the map that are none in the full space, r their rank there; continuity is the
    same with map and full space exchanged (Venna and Kaski 2001). Both are NaN for fewer than 3k / 2 vectors,
    where the formula has no meaning. Distances of the full space are by `metric` where it has an exact form
    (`neighbours.EXACT`), Euclidean otherwise.
    """
    n, k = len(vectors), min(NEIGHBOURS, len(vectors) - 1)
    if k < 1:
        return np.full((n, len(MEASURES)), np.nan)
    exact = metric if metric in EXACT else "euclidean"
    near_full, _ = neighbours(vectors, k + 1, exact, seed)
    near_map, _ = neighbours(xy, k + 1, "euclidean", seed)
    kept = np.array([len(np.intersect1d(a[1:], b[1:])) / k for a, b in zip(near_full, near_map, strict=True)])
    if n < 1.5 * NEIGHBOURS:
        return np.stack([np.full(n, np.nan), np.full(n, np.nan), kept], axis=1)
    scale = 2 / (k * (2 * n - 3 * k - 1))
    trust = 1 - scale * _rank_excess(vectors, near_map[:, 1:], exact)
    continuity = 1 - scale * _rank_excess(xy, near_full[:, 1:], "euclidean")
    return np.stack([trust, continuity, kept], axis=1)


def _rank_excess(vectors: Vectors, chosen: npt.NDArray[np.int32], metric: str) -> Scores:
    """For each vector, by how much its `chosen` vectors' ranks exceed k, summed: `[vectors]`."""
    x_ND = torch.from_numpy(vectors).to(device(), torch.float64)
    indices = torch.from_numpy(chosen).to(device(), torch.long)
    rows = max(1, BLOCK_DISTANCES // (2 * len(vectors)))
    found = []
    for start in range(0, len(vectors), rows):
        block = EXACT[metric](x_ND[start : start + rows], x_ND)
        own = torch.arange(len(block), device=block.device)
        block[own, own + start] = -1
        wanted = torch.gather(block, 1, indices[start : start + rows])
        # The vector itself has rank 0; among equal distances the lowest rank counts.
        ranks = torch.searchsorted(block.sort(dim=1).values, wanted)
        found.append((ranks - chosen.shape[1]).clamp(min=0).sum(1))
    return torch.cat(found).double().cpu().numpy()


def quality_table(layout: str, table: pd.DataFrame, values: Scores, chance: Scores) -> pd.DataFrame:
    """`layout, layer, point, measure, value, chance`; a row without layer and point is the whole layout's mean.

    `values` and `chance` are `[rows of the map, 3]`, for the map and for its places dealt out by chance.
    """
    frame = table[["layer", "point"]].reset_index(drop=True)
    parts = []
    for column, measure in enumerate(MEASURES):
        rows = frame.assign(value=values[:, column], chance=chance[:, column])
        by_site = rows.groupby(["layer", "point"], sort=False)[["value", "chance"]].mean().reset_index()
        whole = rows[["value", "chance"]].mean().to_frame().T.assign(layer=None, point=None)
        for part in (whole, by_site):
            parts.append(part.astype({"layer": "Int32", "point": "string"}).assign(layout=layout, measure=measure))
    columns = ["layout", "layer", "point", "measure", "value", "chance"]
    return pd.concat(parts, ignore_index=True)[columns]
