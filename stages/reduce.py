"""Lay the captured vectors out in two dimensions with UMAP.

    python -m stages.reduce

`joint` fits one map to the vectors of all capture points, `separate` one to each point.
Every map is scored by the neighbourhoods that it kept. Writes `features/maps/<layout>.parquet`,
`features/maps/quality.parquet` and `reports/metrics/maps.json`.
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
from stages.maps.quality import Scores, quality_table, scores
from stages.maps.storage import MAPS, Coordinates, map_table, write_map, write_quality
from stages.models.capture_points import Site
from stages.parameters import Parameters, UmapParameters
from stages.reviews.draw import Rows, stratified_draw

ACTIVATIONS = Path("features/activations")
METRICS = Path("reports/metrics/maps.json")
DIGITS = 6

Features = dict[Site, Vectors]
Maps = dict[Site, Coordinates]


def main(parameters: Parameters) -> None:
    umap = parameters.umap
    check_metric(umap.metric)
    tokens = store.read_tokens(ACTIVATIONS)
    sites = store.stored_sites(ACTIVATIONS)
    rows = _drawn_tokens(tokens, len(sites), umap)
    features = {site: store.read_features(ACTIVATIONS, site, rows).astype(np.float32) for site in sites}
    shutil.rmtree(MAPS, ignore_errors=True)
    qualities = []
    for layout in umap.layouts:
        fitted = LAYOUTS[layout](features, umap)
        table = map_table(tokens.iloc[rows], fitted)
        write_map(layout, table)
        qualities.append(quality_table(layout, table, *SCORED[layout](features, fitted, umap)))
        logging.info("%s map of %d vectors at %d points", layout, len(table), len(features))
    write_quality(pd.concat(qualities, ignore_index=True))
    _write_metrics(tokens, features, qualities)


def _drawn_tokens(tokens: pd.DataFrame, points: int, umap: UmapParameters) -> Rows:
    """Row numbers of the tokens on the maps, stratified by document; the same at every capture point."""
    limit = len(tokens) if umap.max_points is None else max(umap.max_points // points, 1)
    return stratified_draw(tokens["document"].factorize()[0].astype(np.int64), limit, umap.seed)


def _joint(features: Features, umap: UmapParameters) -> Maps:
    fitted = fit_map(np.concatenate(list(features.values())), umap, umap.seed)
    ends = np.cumsum([len(vectors) for vectors in features.values()])[:-1]
    return dict(zip(features, np.split(fitted, ends), strict=True))


def _separate(features: Features, umap: UmapParameters) -> Maps:
    progress = tqdm(features.items(), desc="separate maps", disable=not sys.stderr.isatty())
    return {site: fit_map(vectors, umap, umap.seed) for site, vectors in progress}


LAYOUTS: dict[str, Callable[[Features, UmapParameters], Maps]] = {
    "joint": _joint,
    "separate": _separate,
}


def _score_joint(features: Features, fitted: Maps, umap: UmapParameters) -> tuple[Scores, Scores]:
    """Scores of one map of all vectors, and of the same places dealt out by chance."""
    vectors, xy = np.concatenate(list(features.values())), np.concatenate(list(fitted.values()))
    dealt = np.random.default_rng(umap.seed).permutation(xy)
    return scores(vectors, xy, umap.metric, umap.seed), scores(vectors, dealt, umap.metric, umap.seed)


def _score_separate(features: Features, fitted: Maps, umap: UmapParameters) -> tuple[Scores, Scores]:
    pairs = [_score_joint({site: features[site]}, {site: xy}, umap) for site, xy in fitted.items()]
    kept, chance = zip(*pairs, strict=True)
    return np.concatenate(kept), np.concatenate(chance)


SCORED: dict[str, Callable[[Features, Maps, UmapParameters], tuple[Scores, Scores]]] = {
    "joint": _score_joint,
    "separate": _score_separate,
}


def _write_metrics(tokens: pd.DataFrame, features: Features, qualities: list[pd.DataFrame]) -> None:
    drawn = len(next(iter(features.values())))
    counts = {
        "captured_tokens": len(tokens),
        "tokens": drawn,
        "points": len(features),
        "vectors": drawn * len(features),
    }
    metrics = {}
    for quality in qualities:
        whole = quality[quality["point"].isna()].set_index("measure")
        found = {
            measure: {
                key: None if np.isnan(row[key]) else round(float(row[key]), DIGITS) for key in ("value", "chance")
            }
            for measure, row in whole.iterrows()
        }
        metrics[quality["layout"].iloc[0]] = counts | found
    METRICS.parent.mkdir(parents=True, exist_ok=True)
    METRICS.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_stage(main)
