"""Lay the captured vectors out in two dimensions with UMAP.

    python -m stages.reduce

`joint` fits one map to the vectors of all capture points, `separate` one to each point.
Writes `features/maps/<layout>.parquet` and `reports/metrics/maps.json`.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from stages import store
from stages.errors import run_stage
from stages.maps.layouts import fit_map
from stages.maps.neighbours import Vectors, check_metric
from stages.maps.storage import MAPS, Coordinates, map_table, write_map
from stages.models.capture_points import Site
from stages.parameters import Parameters, UmapParameters
from stages.reviews.draw import Rows, stratified_draw

ACTIVATIONS = Path("features/activations")
METRICS = Path("reports/metrics/maps.json")

Features = dict[Site, Vectors]


def main(parameters: Parameters) -> None:
    umap = parameters.umap
    check_metric(umap.metric)
    tokens = store.read_tokens(ACTIVATIONS)
    sites = store.stored_sites(ACTIVATIONS)
    rows = _drawn_tokens(tokens, len(sites), umap)
    features = {site: store.read_features(ACTIVATIONS, site, rows).astype(np.float32) for site in sites}
    shutil.rmtree(MAPS, ignore_errors=True)
    for layout in umap.layouts:
        write_map(layout, map_table(tokens.iloc[rows], LAYOUTS[layout](features, umap)))
        logging.info("%s map of %d vectors at %d points", layout, len(rows) * len(features), len(features))
    _write_metrics(tokens, features, umap)


def _drawn_tokens(tokens: pd.DataFrame, points: int, umap: UmapParameters) -> Rows:
    """Row numbers of the tokens on the maps, stratified by document; the same at every capture point."""
    limit = len(tokens) if umap.max_points is None else max(umap.max_points // points, 1)
    return stratified_draw(tokens["document"].factorize()[0].astype(np.int64), limit, umap.seed)


def _joint(features: Features, umap: UmapParameters) -> dict[Site, Coordinates]:
    fitted = fit_map(np.concatenate(list(features.values())), umap, umap.seed)
    ends = np.cumsum([len(vectors) for vectors in features.values()])[:-1]
    return dict(zip(features, np.split(fitted, ends), strict=True))


def _separate(features: Features, umap: UmapParameters) -> dict[Site, Coordinates]:
    progress = tqdm(features.items(), desc="separate maps", disable=not sys.stderr.isatty())
    return {site: fit_map(vectors, umap, umap.seed) for site, vectors in progress}


LAYOUTS: dict[str, Callable[[Features, UmapParameters], dict[Site, Coordinates]]] = {
    "joint": _joint,
    "separate": _separate,
}


def _write_metrics(tokens: pd.DataFrame, features: Features, umap: UmapParameters) -> None:
    drawn = len(next(iter(features.values())))
    counts = {
        "captured_tokens": len(tokens),
        "tokens": drawn,
        "points": len(features),
        "vectors": drawn * len(features),
    }
    METRICS.parent.mkdir(parents=True, exist_ok=True)
    METRICS.write_text(json.dumps(dict.fromkeys(umap.layouts, counts), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_stage(main)
