"""Lay the captured vectors out in two dimensions with UMAP, and score the maps.

    python -m stages reduce

Writes to `features/reduce/` the maps, `<layout>.parquet` (`attnmix.maps.layouts` says which there are), their scores,
`quality.parquet`, and nearest neighbours, `nearest.parquet`; to `reports/plots/reduce/` `map_quality.csv` and
`movement.csv`; and `reports/metrics/reduce.json`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from attnmix.core.errors import InputError
from attnmix.core.names import CAPTURED_CHECKPOINT, ONE_PLANE
from attnmix.core.options import Parameters, UmapParameters
from attnmix.core.points import OWN_BASIS, Site
from attnmix.data.draw import Rows, stratified_draw
from attnmix.maps.layouts import Fitted, fit_layout
from attnmix.maps.movement import linear_projections, movement_table
from attnmix.maps.neighbours import Vectors, neighbours
from attnmix.maps.parallel import check_cluster, in_parallel
from attnmix.measures.ratios import RATIOS
from attnmix.store.runs import Run
from attnmix.store.writers import write_map, write_metrics, write_nearest, write_plot, write_quality

OTHER_WIDTHS = {"word_embedding", "embedding_sum", "attention_heads"}  # in some families than the residual stream's
NEAREST_VECTORS = 5  # of each vector, in the full space
METRICS = ("trustworthiness", "neighbours_kept", "neighbour_overlap")  # what a person compares runs by


def main(parameters: Parameters) -> None:
    check_cluster()
    reduce(parameters.umap, CAPTURED_CHECKPOINT, Run(Path()))


def reduce(umap: UmapParameters, checkpoint: str, run: Run) -> None:
    """Lay the captured vectors out, and write the maps and their scores; `checkpoint` is whose vectors they are."""
    rows = _drawn_tokens(run.tokens, len(run.sites), umap)
    tokens, vectors = run.tokens.iloc[rows].reset_index(drop=True), _read(run, rows)
    stream = _residual_stream(vectors)
    shutil.rmtree(run.maps, ignore_errors=True)
    layouts = {}
    for layout in umap.layouts:
        layouts[layout] = fit_layout(layout, vectors if layout == "separate" else stream, umap)
        places = layouts[layout].maps[umap.seed]
        write_map(layout, tokens, places, run.maps)
        logging.info("%s: %d vectors at %d points", layout, len(tokens) * len(places), len(places))
    searches = [(vectors_TD, NEAREST_VECTORS, umap.metric, umap.seed) for vectors_TD in vectors.values()]
    nearest = in_parallel(neighbours, searches, "nearest vectors")
    by_site = {site: rows[indices] for site, (indices, _) in zip(vectors, nearest, strict=True)}
    write_nearest(tokens, by_site, run.maps)
    moved = {layout: fitted.maps for layout, fitted in layouts.items() if layout in ONE_PLANE}
    if moved:
        compared = {site: vectors_TD for site, vectors_TD in stream.items() if site.point not in OWN_BASIS}
        moved |= linear_projections(compared, [umap.seed, *umap.stability_seeds])
    movement = movement_table(moved, vectors, tokens, _ratios(tokens, checkpoint, run), umap)
    write_plot("reduce/movement", movement, run.tables)
    _write_quality(layouts, len(tokens), run)


def _drawn_tokens(tokens: pd.DataFrame, points: int, umap: UmapParameters) -> Rows:
    """Return row numbers of the tokens on the maps, stratified by document; the same at every capture point."""
    limit = len(tokens) if umap.max_points is None else umap.max_points // points
    if not limit:
        raise InputError(
            f"umap.max_points: {umap.max_points} is less than one token at each of the {points} capture points"
        )
    if limit < len(tokens):
        logging.info("umap.max_points: %d of %d tokens are drawn", limit, len(tokens))
    return stratified_draw(tokens["document"].factorize()[0].astype(np.int64), limit, umap.seed)


def _read(run: Run, rows: Rows) -> dict[Site, Vectors]:
    """Return the vectors `[tokens, width]` of the drawn tokens at each capture point."""
    vectors = {}
    for site in run.sites:
        vectors[site] = run.read(site, rows).astype(np.float32)
        if not np.isfinite(vectors[site]).all():
            raise InputError(f"{run.activations}: {site} holds a value that is no number; run `dvc repro -f capture`")
    return vectors


def _residual_stream(vectors: Mapping[Site, Vectors]) -> dict[Site, Vectors]:
    """Return those that are as wide as the residual stream, the only ones that one plane can hold."""
    points: dict[int, dict[str, None]] = {}  # by width, in forward order
    for site, vectors_TD in vectors.items():
        points.setdefault(vectors_TD.shape[1], {})[site.point] = None
    stream = max(points, key=lambda width: len(points[width].keys() - OTHER_WIDTHS))
    left_out = [f"{point} ({width})" for width in points if width != stream for point in points[width]]
    if left_out:
        layouts, names = " and ".join(ONE_PLANE), ", ".join(left_out)
        logging.info("%s: without %s, which are not as wide as the residual stream (%d)", layouts, names, stream)
    return {site: vectors_TD for site, vectors_TD in vectors.items() if vectors_TD.shape[1] == stream}


def _ratios(tokens: pd.DataFrame, checkpoint: str, run: Run) -> pd.DataFrame:
    """Return `layer` and the ratios of the `tokens` in `checkpoint`, in the maps' order; empty without any."""
    documents = tokens["document"].unique().tolist()
    ratios = run.captured_ratios(documents, filters=[("checkpoint", "==", checkpoint)])
    if ratios.empty:
        logging.info("no ratios of the checkpoint %s for the maps", checkpoint)
        return pd.DataFrame()
    methods = [method for method in RATIOS if method in ratios]
    keys = ["document", "position"]
    parts = [
        tokens[keys].merge(of_layer[[*keys, *methods]], on=keys, how="left").assign(layer=layer)
        for layer, of_layer in ratios.groupby("layer")
    ]
    return pd.concat(parts, ignore_index=True)[["layer", *methods]] if parts else pd.DataFrame()


def _write_quality(layouts: Mapping[str, Fitted], tokens: int, run: Run) -> None:
    """Write every map's scores, the whole layouts' where a person reads them, and the three that say most."""
    quality = pd.concat([fitted.quality for fitted in layouts.values()], ignore_index=True)
    write_quality(quality, run.maps)
    whole = quality.loc[quality["point"].isna(), ["layout", "measure", "value", "chance"]].assign(tokens=tokens)
    points = {layout: len(next(iter(fitted.maps.values()))) for layout, fitted in layouts.items()}
    scored = {layout: fitted.n_scored for layout, fitted in layouts.items()}
    whole = whole.assign(points=whole["layout"].map(points), scored_vectors=whole["layout"].map(scored))
    write_plot("reduce/map_quality", whole, run.tables)
    metrics: dict[str, dict[str, float]] = {layout: {} for layout in layouts}
    for row in whole[whole["measure"].isin(METRICS)].to_dict("records"):
        metrics[row["layout"]][row["measure"]] = row["value"]
    write_metrics("reduce", metrics, run.metrics_folder)
