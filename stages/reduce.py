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

import numpy as np
import pandas as pd

from attnmix.core.errors import InputError
from attnmix.core.names import CAPTURED_CHECKPOINT, ONE_PLANE
from attnmix.core.options import Parameters, UmapParameters
from attnmix.core.points import Site
from attnmix.data.draw import Rows, stratified_draw
from attnmix.maps.layouts import LAYOUT_FITTERS, Blocks, Fitted
from attnmix.maps.movement import Maps, linear_projections, movement_table
from attnmix.maps.neighbours import Indices, Vectors, neighbours
from attnmix.maps.parallel import check_cluster, in_parallel
from attnmix.maps.quality import quality_table
from attnmix.measures.ratios import RATIOS
from attnmix.store.maps import MAPS, OWN_BASIS, write_map, write_nearest, write_quality
from attnmix.store.mixing import read_captured_ratios
from attnmix.store.reports import write_metrics, write_plot
from attnmix.store.runs import Run, open_run

OTHER_WIDTHS = {"word_embedding", "embedding_sum", "attention_heads"}  # in some families than the residual stream's
Points = tuple[list[Site], Vectors]
NEAREST = 5  # of each vector, in the full space
METRICS = ("trustworthiness", "neighbours_kept", "neighbour_overlap")  # what a person compares runs by


def main(parameters: Parameters) -> None:
    check_cluster()
    reduce(parameters.umap, CAPTURED_CHECKPOINT)


def reduce(umap: UmapParameters, checkpoint: str) -> None:
    """Lay the captured vectors out, and write the maps and their scores; `checkpoint` is whose vectors they are."""
    run = open_run()
    tokens, sites = run.tokens, run.sites
    rows = _drawn_tokens(tokens, len(sites), umap)
    by_width = _read(run, rows)
    in_stream = _residual_stream(by_width)
    everywhere = {site: vectors for part in by_width.values() for site, vectors in zip(*part, strict=True)}
    drawn = tokens.iloc[rows].reset_index(drop=True)
    in_joint = _joint_points(sites, in_stream, umap)
    shutil.rmtree(MAPS, ignore_errors=True)
    layouts: dict[str, Fitted] = {}
    in_layout: dict[str, tuple[list[Site], Blocks]]
    in_layout = {"joint": in_joint, "aligned": in_stream, "separate": (sites, [everywhere[site] for site in sites])}
    for layout in umap.layouts:
        chosen, vectors = in_layout[layout]
        fitted = layouts[layout] = LAYOUT_FITTERS[layout](chosen, vectors, umap)
        write_map(layout, drawn, fitted.maps[umap.seed])
        logging.info("%s: %d vectors at %d points", layout, len(drawn) * len(chosen), len(chosen))
    nearest = in_parallel(_nearest, [(vectors_TD, umap) for vectors_TD in everywhere.values()], "nearest vectors")
    write_nearest(drawn, {site: rows[indices] for site, indices in zip(everywhere, nearest, strict=True)})
    moved = {layout: fitted.maps for layout, fitted in layouts.items() if layout in ONE_PLANE}
    if moved:
        moved |= _projections(*in_joint, umap)
    write_plot("reduce/movement", movement_table(moved, everywhere, drawn, _ratios(drawn, checkpoint), umap))
    _write_quality(layouts, len(drawn))


def _nearest(vectors_TD: Vectors, umap: UmapParameters) -> Indices:
    """Return the nearest others of each vector at its capture point, by `umap.metric`: `[tokens, neighbours]`."""
    if len(vectors_TD) == 1:
        return np.empty((1, 0), dtype=np.int32)
    return neighbours(vectors_TD, min(NEAREST, len(vectors_TD) - 1), umap.metric, umap.seed)[0]


def _joint_points(sites: list[Site], in_stream: Points, umap: UmapParameters) -> Points:
    """Those of the residual stream's points that `umap.joint_points` names, all where it names none."""
    allowed = list(dict.fromkeys(site.point for site in in_stream[0]))
    refused = [point for point in umap.joint_points if point not in allowed]
    if refused:
        captured = {site.point for site in sites}
        reasons = {True: "is not as wide as the residual stream", False: "was not captured"}
        said = "; ".join(f"{point} {reasons[point in captured]}" for point in refused)
        raise InputError(f"umap.joint_points: {said}; allowed: {', '.join(allowed)}")
    if not umap.joint_points:
        return in_stream
    chosen = [number for number, site in enumerate(in_stream[0]) if site.point in umap.joint_points]
    return [in_stream[0][number] for number in chosen], in_stream[1][chosen]


def _projections(sites: list[Site], vectors_STD: Vectors, umap: UmapParameters) -> dict[str, Maps]:
    """Return linear projections of the joint map's vectors, without those in a basis of their own."""
    pairs = zip(sites, vectors_STD, strict=True)
    compared = {site: vectors for site, vectors in pairs if site.point not in OWN_BASIS}
    return linear_projections(compared, [umap.seed, *umap.stability_seeds])


def _drawn_tokens(tokens: pd.DataFrame, points: int, umap: UmapParameters) -> Rows:
    """Row numbers of the tokens on the maps, stratified by document; the same at every capture point."""
    limit = len(tokens) if umap.max_points is None else umap.max_points // points
    if not limit:
        raise InputError(
            f"umap.max_points: {umap.max_points} is less than one token at each of the {points} capture points"
        )
    if limit < len(tokens):
        logging.info("umap.max_points: %d of %d tokens are drawn", limit, len(tokens))
    return stratified_draw(tokens["document"].factorize()[0].astype(np.int64), limit, umap.seed)


def _read(run: Run, rows: Rows) -> dict[int, Points]:
    """The sites of each width, and the drawn tokens' vectors `[sites, tokens, width]`, a block of a store at a time."""
    widths = {site: run.width(site) for site in run.sites}
    read: dict[int, Points] = {}
    for width in dict.fromkeys(widths.values()):
        chosen = [site for site in run.sites if widths[site] == width]
        vectors_STD = np.empty((len(chosen), len(rows), width), dtype=np.float32)
        for vectors_TD, site in zip(vectors_STD, chosen, strict=True):
            vectors_TD[:] = run.read(site, rows)
            if not np.isfinite(vectors_TD).all():
                raise InputError(f"{run.root}: {site} holds a value that is no number; run `dvc repro -f capture`")
        read[width] = chosen, vectors_STD
    return read


def _residual_stream(by_width: Mapping[int, Points]) -> Points:
    """The sites as wide as the residual stream, the only ones that one plane can hold, and their vectors."""
    points = {width: dict.fromkeys(site.point for site in sites) for width, (sites, _) in by_width.items()}
    stream = max(points, key=lambda width: len(points[width].keys() - OTHER_WIDTHS))
    left_out = [f"{point} ({width})" for width in points if width != stream for point in points[width]]
    if left_out:
        layouts, names = " and ".join(ONE_PLANE), ", ".join(left_out)
        logging.info("%s: without %s, which are not as wide as the residual stream (%d)", layouts, names, stream)
    return by_width[stream]


def _ratios(drawn: pd.DataFrame, checkpoint: str) -> pd.DataFrame:
    """`layer` and the ratios of the drawn tokens in `checkpoint`, in the maps' order; empty without any."""
    documents = drawn["document"].unique().tolist()
    ratios = read_captured_ratios(documents, filters=[("checkpoint", "==", checkpoint)])
    if ratios.empty:
        logging.info("no ratios of the checkpoint %s for the maps", checkpoint)
        return pd.DataFrame()
    methods = [method for method in RATIOS if method in ratios]
    by_layer = [
        drawn[["document", "position"]].merge(of_layer, on=["document", "position"], how="left").assign(layer=layer)
        for layer, of_layer in ratios[["document", "position", *methods]].groupby(ratios["layer"])
    ]
    return pd.concat(by_layer, ignore_index=True)[["layer", *methods]]


def _write_quality(layouts: Mapping[str, Fitted], tokens: int) -> None:
    """Every map's scores, the whole layouts' where a person reads them, and the three that say most."""
    quality = quality_table([row for fitted in layouts.values() for row in fitted.quality])
    write_quality(quality)
    scored = pd.Series({layout: fitted.n_scored for layout, fitted in layouts.items()})
    points = {layout: len(next(iter(fitted.maps.values()))) for layout, fitted in layouts.items()}
    whole = quality.loc[quality["point"].isna(), ["layout", "measure", "value", "chance"]]
    of_layout = {"points": whole["layout"].map(points), "scored_vectors": whole["layout"].map(scored)}
    counted = whole.assign(tokens=tokens, **of_layout)
    write_plot("reduce/map_quality", counted)
    values = whole.set_index(["layout", "measure"])["value"].to_dict()
    shown = {layout: [name for name in METRICS if (layout, name) in values] for layout in layouts}
    write_metrics("reduce", {layout: {name: values[layout, name] for name in names} for layout, names in shown.items()})
