"""Maps on disk: `features/maps/<layout>.parquet`, one row for each token at each capture point."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from stages.outputs.files import read_table, write_table
from stages.sites import Site, in_forward_order
from stages.vocabulary import LAYOUTS

MAPS = Path("features/maps")
QUALITY = MAPS / "quality.parquet"


def write_map(layout: str, table: pd.DataFrame) -> None:
    """Write one layout's table: `document, position, layer, point, x, y`."""
    write_table(MAPS / f"{layout}.parquet", table)


def write_quality(table: pd.DataFrame) -> None:
    """Write the scores of all layouts: `layout, layer, point, measure, value, chance`."""
    write_table(QUALITY, table)


def read_map(layout: str) -> pd.DataFrame:
    """What `write_map` wrote; `InputError` where the layout was not made."""
    return read_table(MAPS / f"{layout}.parquet", "reduce")


def read_quality() -> pd.DataFrame:
    """What `write_quality` wrote; a row without layer and point is the whole layout's."""
    return read_table(QUALITY, "reduce")


def made_layouts() -> list[str]:
    """The layouts that `reduce` made, in the vocabulary's order."""
    return [layout for layout in LAYOUTS if (MAPS / f"{layout}.parquet").is_file()]


def map_sites(table: pd.DataFrame) -> list[Site]:
    """The sites of a map, in forward order."""
    pairs = table[["layer", "point"]].drop_duplicates()
    return in_forward_order(Site(int(layer), str(point)) for layer, point in pairs.itertuples(index=False))
