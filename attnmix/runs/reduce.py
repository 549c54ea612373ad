"""Two-dimensional maps of the captured vectors with UMAP and PCA, and their quality scores.

The stage `reduce` writes maps (`<layout>.parquet`, for the layouts of `attnmix.maps.layouts`), scores
(`quality.parquet`) and nearest neighbours (`nearest.parquet`) to `features/reduce/`. The stage also writes
`reports/plots/reduce/` and `reports/metrics/reduce.json`.
"""

import logging
import shutil
from collections.abc import Mapping
from statistics import mode

import numpy as np
import pandas as pd

from attnmix.core.draw import RowNumbers, stratified_draw
from attnmix.core.errors import InputError
from attnmix.core.names import ONE_PLANE, Site
from attnmix.core.settings import MIN_UMAP_VECTORS, UmapParameters
from attnmix.core.store.files import write_table
from attnmix.core.store.runs import Run
from attnmix.core.store.writers import write_by_site, write_metrics, write_plot
from attnmix.maps.layouts import fit_layout
from attnmix.maps.neighbours import NEAREST_VECTORS, neighbours
from attnmix.maps.parallel import in_parallel
from attnmix.maps.quality import QUALITY_COLUMNS, score_layout
from attnmix.maps.vectors import Vectors, points_for

OTHER_WIDTHS = {"word_embedding", "embedding_sum", "attention_heads"}
"""Capture points whose width may differ from that of the residual stream."""
COMPARED_SCORES = ("trustworthiness", "neighbours_kept", "neighbour_overlap")  # scores written as metrics


def reduce(umap: UmapParameters, run: Run) -> None:
    """Compute the maps of the captured vectors, and write them with their scores."""
    run.check_capture()
    rows = _draw_tokens(run.tokens, len(run.sites), umap)
    tokens = run.tokens.iloc[rows].reset_index(drop=True)
    vectors = {}
    for site in run.sites:
        vectors_TD = run.read(site, rows)
        vectors[site] = vectors_TD.astype(np.float32)
    vectors_by_layout = _select_vectors(umap, vectors)
    shutil.rmtree(run.maps, ignore_errors=True)
    _write_nearest(umap, vectors, rows, tokens, run)
    qualities = []
    for layout, layout_vectors in vectors_by_layout.items():
        maps = fit_layout(layout, layout_vectors, umap)
        quality = score_layout(layout, layout_vectors, maps, umap.metric, umap.seed)
        qualities.append(quality)
        coordinates = {}  # only those of the first seed; the maps of other seeds are only scored
        for site, xy in maps[umap.seed].items():
            coordinates[site] = {"x": xy[:, 0], "y": xy[:, 1]}
        write_by_site(layout, tokens, coordinates, run.maps)
        number = len(tokens) * len(layout_vectors)
        logging.info("%s: %d vectors at %d points", layout, number, len(layout_vectors))
    _write_quality(pd.concat(qualities, ignore_index=True), run)


def _write_nearest(
    umap: UmapParameters, vectors: Mapping[Site, Vectors], rows: RowNumbers, tokens: pd.DataFrame, run: Run
) -> None:
    """Write the nearest vectors of each mapped token at each site, as row indices of the captured tokens.

    `rows` are the row indices of the mapped `tokens`.
    """
    searches = [(vectors_TD, NEAREST_VECTORS, umap.metric, umap.seed) for vectors_TD in vectors.values()]
    results = in_parallel(neighbours, searches, "nearest vectors")
    columns = {}
    for site, (near, _distances) in zip(vectors, results, strict=True):
        rows_of_near = rows[near].astype(np.int32)  # `near` are indices of mapped tokens `[tokens, neighbours]`
        columns[site] = {"nearest": list(rows_of_near)}
    write_by_site("nearest", tokens, columns, run.maps)


def _select_vectors(umap: UmapParameters, vectors: Mapping[Site, Vectors]) -> dict[str, dict[Site, Vectors]]:
    """Return the vectors that each layout in `umap.layouts` maps, by layout and site (layer and capture point).

    The layouts `ONE_PLANE` map all sites to a common plane. This requires vectors of equal width, so these layouts
    contain only the sites with the width of the residual stream. Sites with too few distinct vectors are omitted from
    UMAP layouts and logged. If any site is omitted, the layout `pca`, which maps any number of vectors, is added for
    all sites, unless `umap.layouts` contains it. Raise `InputError` if `umap.n_neighbors` is too large for the number
    of vectors on a map.
    """
    tokens = len(next(iter(vectors.values())))
    stream_vectors = _select_residual_stream(vectors)
    vectors_by_layout: dict[str, dict[Site, Vectors]] = {}
    omitted_sites: list[str] = []
    for layout in umap.layouts:
        candidates = stream_vectors if layout in ONE_PLANE else vectors
        if layout != "pca" and tokens >= MIN_UMAP_VECTORS:  # With fewer tokens, `points_for` omits all sites.
            sites_per_map = len(candidates) if layout == "joint" else 1
            umap.check_neighbours(tokens * sites_per_map)  # the number of vectors on a map
        layout_vectors = points_for(layout, candidates, umap)  # without sites that have too few distinct vectors
        if layout_vectors:
            vectors_by_layout[layout] = layout_vectors
        for site in candidates:
            if site not in layout_vectors:
                omitted_sites.append(f"{site} ({layout})")
    if omitted_sites:
        message = "too few distinct vectors for UMAP (at least %d, and more than umap.n_neighbors, are needed) at %s"
        logging.info(message, MIN_UMAP_VECTORS, ", ".join(omitted_sites))
        vectors_by_layout.setdefault("pca", dict(vectors))
    return vectors_by_layout


def _draw_tokens(tokens: pd.DataFrame, points: int, umap: UmapParameters) -> RowNumbers:
    """Return the row indices of the tokens to map: at most `umap.max_points / points`, stratified by text.

    `points` is the number of vectors of each token, one per site (layer and capture point).
    """
    limit = len(tokens)
    if umap.max_points is not None:
        limit = umap.max_points // points
    if not limit:
        problem = f"is less than one token at each of the {points} capture points; use a larger number"
        raise InputError(f"umap.max_points: {umap.max_points} {problem}")
    if limit < len(tokens):
        logging.info("umap.max_points: %d of %d tokens are drawn", limit, len(tokens))
    documents, _ = tokens["document"].factorize()
    return stratified_draw(documents.astype(np.int64), limit, umap.seed)


def _select_residual_stream(vectors: Mapping[Site, Vectors]) -> dict[Site, Vectors]:
    """Return the vectors of the sites that are as wide as the residual stream, and log the names of the other sites."""
    widths = {site: vectors_TD.shape[1] for site, vectors_TD in vectors.items()}
    stream_width = _find_stream_width(widths)
    stream = {}
    others = []
    for site, vectors_TD in vectors.items():
        if widths[site] == stream_width:
            stream[site] = vectors_TD
        else:
            others.append(f"{site.point} ({widths[site]})")
    if others:
        layouts = " and ".join(ONE_PLANE)
        distinct_others = ", ".join(dict.fromkeys(others))
        message = "maps %s omit %s, whose widths differ from that of the residual stream (%d)"
        logging.info(message, layouts, distinct_others, stream_width)
    return stream


def _find_stream_width(widths: Mapping[Site, int]) -> int:
    """Return the width of the residual stream, from the width of each captured site.

    It is the most frequent width among the sites whose vectors are always as wide as the residual stream (all points
    except `OTHER_WIDTHS`). If the run captured no such sites, it is the most frequent width among all sites.
    """
    stream_widths = [width for site, width in widths.items() if site.point not in OTHER_WIDTHS]
    if stream_widths:
        return mode(stream_widths)
    return mode(widths.values())


def _write_quality(quality: pd.DataFrame, run: Run) -> None:
    """Write all scores to `quality.parquet`, and the scores of whole layouts to `map_quality.csv`.

    The `COMPARED_SCORES` of whole layouts are also written as metrics.
    """
    write_table(run.maps / "quality.parquet", quality[QUALITY_COLUMNS])
    is_whole_layout = quality["point"].isna()
    whole = quality[is_whole_layout].drop(columns=["layer", "point"])
    write_plot("reduce/map_quality", whole, run.tables)
    is_compared = whole["measure"].isin(COMPARED_SCORES)
    compared = whole[is_compared].set_index("measure")
    by_layout = compared.groupby("layout", sort=False)
    metrics = {}
    for layout, values in by_layout["value"]:
        metrics[str(layout)] = values.to_dict()
    write_metrics("reduce", metrics, run.metrics_folder)
