"""Maps on disk: `features/reduce/<layout>.parquet`, one row for each token at each capture point."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import LAYOUTS
from attnmix.core.points import Site, in_forward_order
from attnmix.store.files import read_table, write_table

MAPS = Path("features/reduce")
QUALITY = MAPS / "quality.parquet"
NEAREST = MAPS / "nearest.parquet"
OWN_BASIS = frozenset({"attention_heads"})
"""Points whose coordinates are not those of the residual stream, before attention's last Linear.

How far their vectors lie from other points' says nothing, so no score and no move compares them.
"""


def write_map(layout: str, tokens: pd.DataFrame, places: Mapping[Site, npt.NDArray[np.float32]]) -> None:
    """Write `document, position, layer, point, x, y`, sites in the order of `places` `[tokens, 2]`."""
    kept = tokens[["document", "position"]]
    parts = (
        kept.assign(layer=np.int32(site.layer), point=site.point, x=xy[:, 0], y=xy[:, 1]) for site, xy in places.items()
    )
    write_table(MAPS / f"{layout}.parquet", pd.concat(parts, ignore_index=True))


def write_quality(table: pd.DataFrame) -> None:
    """Write the scores of all layouts: `layout, layer, point, measure, value, chance`."""
    write_table(QUALITY, table)


def write_nearest(tokens: pd.DataFrame, nearest: Mapping[Site, npt.NDArray[np.int64]]) -> None:
    """Write `document, position, layer, point, nearest`, lists `[neighbours]` of row numbers of `tokens.parquet`."""
    kept = tokens[["document", "position"]]
    parts = (
        kept.assign(layer=np.int32(site.layer), point=site.point, nearest=list(rows_TK.astype(np.int32)))
        for site, rows_TK in nearest.items()
    )
    write_table(NEAREST, pd.concat(parts, ignore_index=True))


def read_nearest() -> pd.DataFrame:
    """What `write_nearest` wrote."""
    return read_table(NEAREST, "reduce")


def read_map(layout: str) -> pd.DataFrame:
    """What `write_map` wrote; `InputError` where the layout was not made."""
    return read_table(MAPS / f"{layout}.parquet", "reduce")


def read_quality() -> pd.DataFrame:
    """What `write_quality` wrote; a row without layer and point is the whole layout's."""
    return read_table(QUALITY, "reduce")


def made_layouts() -> list[str]:
    """The layouts that `reduce` made, in the order of `LAYOUTS`."""
    return [layout for layout in LAYOUTS if (MAPS / f"{layout}.parquet").is_file()]


def map_sites(table: pd.DataFrame) -> list[Site]:
    """The sites of a map, in forward order."""
    pairs = table[["layer", "point"]].drop_duplicates()
    return in_forward_order(Site(int(layer), str(point)) for layer, point in pairs.itertuples(index=False))
