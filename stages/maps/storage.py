"""Maps on disk: `features/maps/<layout>.parquet`, one row for each token at each capture point."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from stages.errors import InputError
from stages.models.capture_points import Site

MAPS = Path("features/maps")
Coordinates = npt.NDArray[np.float32]
MAP_COLUMNS = ("document", "position", "layer", "point", "x", "y")


def map_table(tokens: pd.DataFrame, coordinates: Mapping[Site, Coordinates]) -> pd.DataFrame:
    """`document, position, layer, point, x, y`, sites in the order of `coordinates`, each with all tokens."""
    parts = []
    for site, xy in coordinates.items():
        part = tokens[["document", "position"]].assign(layer=np.int32(site.layer), point=site.point)
        part[["x", "y"]] = xy
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def write_map(layout: str, table: pd.DataFrame, folder: Path = MAPS) -> None:
    """Write one layout's table."""
    folder.mkdir(parents=True, exist_ok=True)
    table.to_parquet(folder / f"{layout}.parquet", index=False)


def write_quality(table: pd.DataFrame, folder: Path = MAPS) -> None:
    """Write the scores of all layouts."""
    table.to_parquet(folder / "quality.parquet", index=False)


def read_map(layout: str, folder: Path = MAPS) -> pd.DataFrame:
    """Columns `document, position, layer, point, x, y`; `InputError` where the layout was not made."""
    path = folder / f"{layout}.parquet"
    if not path.is_file():
        raise InputError(f"{path} is missing; put {layout!r} into umap.layouts and run `dvc repro reduce`")
    return pd.read_parquet(path)
