"""What the page's script reads: the run's numbers and the captured texts, from the files of earlier stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from stages.mixing.matrices import MATRICES
from stages.mixing.ratios import RATIOS, preferred_ratio
from stages.outputs import activations as store
from stages.outputs.maps import made_layouts, map_sites, read_map, read_quality
from stages.outputs.mixing import HEADS, read_matrix, read_ratios, stored_matrices
from stages.outputs.reports import read_plot
from stages.page.arrays import largest_shares, quantised, visible
from stages.pictures.style import square_limits
from stages.sites import STEP_POINTS, Site, layer_input
from stages.vocabulary import (
    CAPTURED_CHECKPOINT,
    CHECKPOINTS,
    MAP_MEASURES,
    ONE_PLANE,
    STEP_MARKS,
    STEP_MEASURES,
    TOKEN_CLASSES,
    site_label,
)

PAGE_TOKENS = 4096  # whole documents, in order, up to so many tokens
CONTRIBUTION_BYTES = 9_000_000  # of contribution matrices, before compression; whole documents, in order
SOURCES = 16  # kept for each token
HEAD_SOURCES = 8


class Captured(NamedTuple):
    """The tokens on the page, `[tokens]` rows of the tokens table, and how many documents stayed off it."""

    tokens: pd.DataFrame
    left_out: int


def captured_tokens() -> Captured:
    """The captured documents' tokens, whole documents in order."""
    tokens = store.read_tokens(store.ACTIVATIONS)
    lengths = tokens.groupby("document", sort=False).size()
    kept = lengths[(lengths.cumsum() <= PAGE_TOKENS) | (np.arange(len(lengths)) == 0)]
    chosen = tokens[tokens["document"].isin(kept.index)].reset_index(names="row")
    return Captured(chosen, len(lengths) - len(kept))


def page_data(tokens: pd.DataFrame, frames_per_second: int) -> dict[str, Any]:
    """Everything that the page's script reads."""
    curves = _records("mixing", "measure")
    ratios = read_ratios(filters=[("document", "in", tokens["document"].unique().tolist())])
    return {
        "framesPerSecond": frames_per_second,
        "labels": {
            "methods": {name: ratio.mark.label for name, ratio in RATIOS.items()},
            "checkpoints": CHECKPOINTS,
            "matrices": {name: matrix.label for name, matrix in MATRICES.items()},
            "steps": {name: mark.label for name, mark in STEP_MARKS.items()},
            "stepMeasures": STEP_MEASURES,
            "mapMeasures": MAP_MEASURES,
        },
        "captured": CAPTURED_CHECKPOINT,
        "onePlane": ONE_PLANE,
        "stepColors": {name: mark.color for name, mark in STEP_MARKS.items()},
        "wholeLayer": [name for name, ratio in RATIOS.items() if ratio.covers == "layer"],
        "method": preferred_ratio([row["method"] for row in curves]),
        "curves": curves,
        "differences": _records("mixing_difference", "measure"),
        "steps": _records("steps", "measure"),
        "movement": _records("movement", "reduce"),
        "documents": _documents(tokens),
        "tokens": [visible(token, kept="") for token in tokens["token"]],
        "classNames": list(TOKEN_CLASSES.values()),
        "classes": _classes(tokens, ratios),
        "ratios": _ratios(tokens, ratios),
        **_contributions(tokens),
        "tokenSteps": _token_steps(tokens),
        **_maps(tokens),
    }


def _records(name: str, stage: str) -> list[dict[str, Any]]:
    table = read_plot(name, stage)
    rows: Any = table.astype(object).where(table.notna(), None).to_dict("records")
    return list(rows)


def _documents(tokens: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {"name": str(name), "start": int(rows.index[0]), "length": len(rows)}
        for name, rows in tokens.groupby("document", sort=False)
    ]


def _of_tokens(tokens: pd.DataFrame, rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """`columns` of the `rows` with each token's document and position; NaN where there is none."""
    keys = ["document", "position"]
    return tokens[keys].merge(rows[[*keys, *columns]], on=keys, how="left")[list(columns)]


def _classes(tokens: pd.DataFrame, ratios: pd.DataFrame) -> list[int]:
    known = ratios.drop_duplicates(["document", "position"])
    return [list(TOKEN_CLASSES).index(name) for name in _of_tokens(tokens, known, ["token_class"])["token_class"]]


def _ratios(tokens: pd.DataFrame, ratios: pd.DataFrame) -> dict[str, Any]:
    """`[layers, tokens]` for each checkpoint and method, 0 to 1."""
    methods = [method for method in RATIOS if method in ratios]
    values: dict[str, Any] = {}
    for checkpoint, of_checkpoint in ratios.groupby("checkpoint", sort=False):
        layers = [_of_tokens(tokens, rows, methods) for _, rows in of_checkpoint.groupby("layer")]
        values[str(checkpoint)] = {
            method: quantised(np.stack([layer[method].to_numpy(np.float64) for layer in layers]), 0, 1)
            for method in methods
        }
    return {"methods": methods, "layers": int(ratios["layer"].max()), "values": values}


def _contributions(tokens: pd.DataFrame) -> dict[str, Any]:
    """`contributions`: the largest sources of every token, by document, checkpoint and method, as far as they fit.

    `matrices` and `heads` are what all documents have: the methods, and the number of heads, 0 without attention's.
    """
    contributions: dict[str, Any] = {}
    matrices: list[str] = []
    heads = spent = 0
    for document in tokens["document"].unique():
        entries: dict[str, Any] = {}
        for checkpoint in CHECKPOINTS:
            stored = stored_matrices(checkpoint, document)
            if not stored:
                continue
            matrices = [method for method in MATRICES if method in stored]
            entry = entries[checkpoint] = {
                method: largest_shares(read_matrix(checkpoint, document, method), SOURCES) for method in matrices
            }
            if HEADS in stored:
                by_head = read_matrix(checkpoint, document, HEADS)
                heads = by_head.shape[1]
                entry["heads"] = largest_shares(by_head, HEAD_SOURCES) | {"number": heads}
        size = sum(len(part["sources"]) + len(part["shares"]) for each in entries.values() for part in each.values())
        if contributions and spent + size > CONTRIBUTION_BYTES:
            break
        spent += size
        contributions[str(document)] = entries
    return {"contributions": contributions, "matrices": matrices, "heads": heads}


def _maps(tokens: pd.DataFrame) -> dict[str, Any]:
    read = {name: read_map(name) for name in made_layouts()}
    sites = map_sites(next(iter(read.values())))
    return {
        "sites": [{"layer": site.layer, "point": site.point, "label": site_label(site)} for site in sites],
        "maps": {name: _coordinates(table, tokens, sites, name in ONE_PLANE) for name, table in read.items()},
        "quality": _quality(sites),
    }


def _coordinates(table: pd.DataFrame, tokens: pd.DataFrame, sites: Sequence[Site], shared: bool) -> dict[str, Any]:
    """`x` and `y` are `[points, tokens]`, quantised within `ranges`, one for each point or one for all."""
    groups = table.groupby(["layer", "point"], sort=False)
    xy = np.stack([_of_tokens(tokens, groups.get_group(tuple(site)), ["x", "y"]).to_numpy(float) for site in sites])
    limits = np.stack([square_limits(xy.reshape(-1, 2))] if shared else [square_limits(each) for each in xy])
    low, high = limits[:, None, :, 0], limits[:, None, :, 1]
    scaled = (xy - low) / (high - low)
    return {"ranges": limits.tolist(), "x": quantised(scaled[..., 0], 0, 1), "y": quantised(scaled[..., 1], 0, 1)}


def _quality(sites: Sequence[Site]) -> dict[str, Any]:
    """For each layout `whole` and, for each point, `points`: measure to value and chance."""
    numbers = {tuple(site): number for number, site in enumerate(sites)}
    layouts: dict[str, Any] = {}
    row: Any
    for row in read_quality().itertuples():
        entry = layouts.setdefault(row.layout, {"whole": {}, "points": [{} for _ in sites]})
        place = entry["whole"] if pd.isna(row.point) else entry["points"][numbers[int(row.layer), row.point]]
        place[row.measure] = [None if pd.isna(value) else round(value, 6) for value in (row.value, row.chance)]
    return layouts


def _token_steps(tokens: pd.DataFrame) -> dict[str, str]:
    """Cosine of each token's vector after a step with its layer input, `[layers, tokens]`, -1 to 1.

    Of the steps after which features were captured, in all layers.
    """
    sites = store.stored_sites(store.ACTIVATIONS)
    layers = range(1, max(site.layer for site in sites) + 1)
    rows = tokens["row"].to_numpy(np.int64)

    def units(wanted: Sequence[Site]) -> list[npt.NDArray[np.float64]]:
        return [_unit(store.read_rows(store.ACTIVATIONS, site, rows)) for site in wanted]

    inputs = [layer_input(layer) for layer in layers]
    if not layers or not set(inputs) <= set(sites):
        return {}
    before = units(inputs)
    cosines = {}
    for step, point in STEP_POINTS.items():
        after = [Site(layer, point) for layer in layers] if point else []
        if after and set(after) <= set(sites):
            each = [(a * b).sum(axis=1) for a, b in zip(before, units(after), strict=True)]
            cosines[step] = quantised(np.stack(each), -1, 1)
    return cosines


def _unit(vectors: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    wide = vectors.astype(np.float64)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12))
