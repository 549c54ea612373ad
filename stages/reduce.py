"""Lay the captured vectors out in two dimensions with UMAP, and say what each map is worth.

    python -m stages.reduce

`joint` fits one map to the vectors of all capture points, `separate` one to each point, `aligned` one
to each with every token tied to itself from point to point. Writes `features/maps/<layout>.parquet`,
`features/maps/quality.parquet`, `reports/plots/movement.csv` and `reports/metrics/maps.json`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from stages.command import run_stage
from stages.errors import InputError
from stages.maps.graphs import neighbour_graph
from stages.maps.layouts import lay_out, lay_out_aligned
from stages.maps.movement import COLUMNS, movement_table
from stages.maps.neighbours import Coordinates, Vectors
from stages.maps.parallel import check_cluster, in_parallel
from stages.maps.scoring import Row, quality_table, score_joint, score_site, whole_layout
from stages.mixing.ratios import RATIOS
from stages.outputs import activations as store
from stages.outputs.maps import MAPS, write_map, write_quality
from stages.outputs.mixing import read_ratios
from stages.outputs.reports import write_metrics, write_plot
from stages.parameters import Parameters, UmapParameters
from stages.reviews.draw import Rows, stratified_draw
from stages.sites import Site
from stages.vocabulary import CAPTURED_CHECKPOINT, ONE_PLANE


class Fitted(NamedTuple):
    """A layout: every seed's coordinates of every point, rows of the quality table, how many vectors were scored."""

    maps: dict[int, dict[Site, Coordinates]]
    quality: list[Row]
    scored: int


def main(parameters: Parameters) -> None:
    umap = parameters.umap
    check_cluster()
    tokens = store.read_tokens(store.ACTIVATIONS)
    sites = store.stored_sites(store.ACTIVATIONS)
    rows = _drawn_tokens(tokens, len(sites), umap)
    vectors_STD = _read(sites, rows)
    drawn = tokens.iloc[rows].reset_index(drop=True)
    ratios = _ratios(drawn)
    shutil.rmtree(MAPS, ignore_errors=True)
    counts = {"captured_tokens": len(tokens), "tokens": len(drawn), "points": len(sites)}
    quality: list[Row] = []
    movement: list[pd.DataFrame] = []
    metrics: dict[str, Any] = {}
    for layout in umap.layouts:
        fitted = LAYOUTS[layout](sites, vectors_STD, umap)
        write_map(layout, _map_table(drawn, fitted.maps[umap.seed]))
        quality += fitted.quality
        if layout in ONE_PLANE:
            features = dict(zip(sites, vectors_STD, strict=True))
            movement += [
                movement_table(layout, seed, features, maps, ratios, umap.metric) for seed, maps in fitted.maps.items()
            ]
        metrics[layout] = counts | {"vectors": len(drawn) * len(sites), "scored_vectors": fitted.scored}
        logging.info("%s: %d vectors at %d points", layout, len(drawn) * len(sites), len(sites))
    write_quality(quality_table(quality))
    moved = pd.concat(movement, ignore_index=True) if movement else pd.DataFrame(columns=list(COLUMNS))
    write_plot("movement", moved)
    _write_metrics(metrics, quality_table(quality), moved, umap)


def _map_table(tokens: pd.DataFrame, coordinates: Mapping[Site, Coordinates]) -> pd.DataFrame:
    """`document, position, layer, point, x, y`, sites in the order of `coordinates`, each with all tokens."""
    parts = []
    for site, xy in coordinates.items():
        part = tokens[["document", "position"]].assign(layer=np.int32(site.layer), point=site.point)
        part[["x", "y"]] = xy
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def _drawn_tokens(tokens: pd.DataFrame, points: int, umap: UmapParameters) -> Rows:
    """Row numbers of the tokens on the maps, stratified by document; the same at every capture point."""
    limit = len(tokens)
    if umap.max_points is not None:
        if umap.max_points < points:
            raise InputError(
                f"umap.max_points: {umap.max_points} is less than one token at each of the {points} capture points"
            )
        limit = umap.max_points // points
    if limit < len(tokens):
        logging.info("umap.max_points: %d of %d tokens are drawn", limit, len(tokens))
    return stratified_draw(tokens["document"].factorize()[0].astype(np.int64), limit, umap.seed)


def _read(sites: list[Site], rows: Rows) -> Vectors:
    """The drawn tokens' vectors `[sites, tokens, hidden]`, read a block of a store at a time."""
    hidden = store.open_store(store.ACTIVATIONS, sites[0]).shape[1]
    vectors_STD = np.empty((len(sites), len(rows), hidden), dtype=np.float32)
    for number, site in enumerate(sites):
        vectors_STD[number] = store.read_rows(store.ACTIVATIONS, site, rows)
        if not np.isfinite(vectors_STD[number]).all():
            raise InputError(f"{store.ACTIVATIONS}: {site} holds a value that is no number; run `dvc repro -f capture`")
    return vectors_STD


def _ratios(drawn: pd.DataFrame) -> pd.DataFrame:
    """`layer` and the ratios of the drawn tokens in the captured checkpoint, in the maps' order; empty without any."""
    wanted = [
        ("checkpoint", "==", CAPTURED_CHECKPOINT),
        ("document", "in", drawn["document"].unique().tolist()),
    ]
    ratios = read_ratios(filters=wanted)
    if ratios.empty:
        logging.info("no ratios of the fine-tuned model to set the maps against: mixing.checkpoints leaves it out")
        return pd.DataFrame()
    methods = [method for method in RATIOS if method in ratios]
    found = [
        drawn[["document", "position"]].merge(of_layer, on=["document", "position"], how="left").assign(layer=layer)
        for layer, of_layer in ratios[["document", "position", *methods]].groupby(ratios["layer"])
    ]
    return pd.concat(found, ignore_index=True)[["layer", *methods]]


def _joint(sites: list[Site], vectors_STD: Vectors, umap: UmapParameters) -> Fitted:
    vectors = vectors_STD.reshape(-1, vectors_STD.shape[-1])
    graph = neighbour_graph(vectors, umap)
    calls = [(vectors, graph, umap, seed, seed == umap.seed) for seed in (umap.seed, *umap.stability_seeds)]
    maps = in_parallel(lay_out, calls, "joint map, by seed")
    rows, scored = score_joint(dict(zip(sites, vectors_STD, strict=True)), vectors, maps, umap)
    return Fitted(_by_seed(umap, sites, [np.split(each, len(sites)) for each in maps]), rows, scored)


def _separate(sites: list[Site], vectors_STD: Vectors, umap: UmapParameters) -> Fitted:
    calls = [(site, vectors, umap) for site, vectors in zip(sites, vectors_STD, strict=True)]
    of_site, rows = zip(*in_parallel(_fit_alone, calls, "separate maps"), strict=True)
    return _of_points("separate", _by_seed(umap, sites, zip(*of_site, strict=True)), rows)


def _fit_alone(site: Site, vectors: Vectors, umap: UmapParameters) -> tuple[list[Coordinates], list[Row]]:
    graph = neighbour_graph(vectors, umap)
    maps = [lay_out(vectors, graph, umap, seed) for seed in (umap.seed, *umap.stability_seeds)]
    return maps, score_site("separate", site, vectors, maps, umap)


def _aligned(sites: list[Site], vectors_STD: Vectors, umap: UmapParameters) -> Fitted:
    graphs = in_parallel(neighbour_graph, [(vectors, umap) for vectors in vectors_STD], "neighbours at each point")
    calls = [(vectors_STD, graphs, umap, seed, seed == umap.seed) for seed in (umap.seed, *umap.stability_seeds)]
    by_seed = in_parallel(lay_out_aligned, calls, "aligned maps, by seed")
    of_site = list(zip(*by_seed, strict=True))
    scored = [("aligned", *each, umap) for each in zip(sites, vectors_STD, of_site, strict=True)]
    rows = in_parallel(score_site, scored, "scores of the aligned maps")
    return _of_points("aligned", _by_seed(umap, sites, by_seed), rows)


def _by_seed(umap: UmapParameters, sites: list[Site], maps: Any) -> dict[int, dict[Site, Coordinates]]:
    seeds = (umap.seed, *umap.stability_seeds)
    return {seed: dict(zip(sites, each, strict=True)) for seed, each in zip(seeds, maps, strict=True)}


def _of_points(layout: str, maps: dict[int, dict[Site, Coordinates]], rows: Any) -> Fitted:
    by_site = [row for part in rows for row in part]
    scored = sum(map(len, next(iter(maps.values())).values()))
    return Fitted(maps, whole_layout(layout, by_site) + by_site, scored)


LAYOUTS: dict[str, Callable[[list[Site], Vectors, UmapParameters], Fitted]] = {
    "joint": _joint,
    "separate": _separate,
    "aligned": _aligned,
}


def _write_metrics(counts: dict[str, Any], quality: pd.DataFrame, movement: pd.DataFrame, umap: UmapParameters) -> None:
    metrics: dict[str, Any] = {}
    for layout, found in counts.items():
        whole = quality[(quality["layout"] == layout) & quality["point"].isna()]
        measures = {
            row.measure: {"value": _number(row.value), "chance": _number(row.chance)} for row in whole.itertuples()
        }
        metrics[layout] = found | measures | {"seeds": [umap.seed, *umap.stability_seeds]}
        moved = movement[movement["layout"] == layout]
        if len(moved):
            metrics[layout]["movement"] = _movement_metrics(moved)
    write_metrics("maps", metrics)


def _movement_metrics(moved: pd.DataFrame) -> dict[str, Any]:
    """Step, what it is set against, then the mean over the layers, its range over the seeds, and every layer's."""
    found: dict[str, Any] = {}
    for (step, against), rows in moved.groupby(["step", "against"], sort=False):
        means = rows.groupby("seed", sort=False)["spearman"].mean()
        shown = rows[rows["seed"] == means.index[0]]
        found.setdefault(str(step), {})[str(against)] = {
            "mean": _number(means.iloc[0]),
            "lowest_seed": _number(means.min()),
            "highest_seed": _number(means.max()),
        } | {f"layer_{row.layer:02d}": _number(row.spearman) for row in shown.itertuples()}
    return found


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


if __name__ == "__main__":
    run_stage(main)
