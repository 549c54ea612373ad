"""The data that the page's script reads, as JSON of the shape `SHAPE`: numbers of a run and its captured texts."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core import names
from attnmix.core.names import Site, layer_input
from attnmix.figures import labels
from attnmix.figures.tokens import read_captured
from attnmix.measures.matrices import MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.page.arrays import MISSING_CODE, encode, encode_heads, largest_shares, quantise, visible
from attnmix.page.sentences import document_note, most_and_least
from attnmix.store.runs import Run, map_sites

MAX_TOKENS = 4096  # in whole documents, in their order
CONTRIBUTION_BYTES = 8_000_000  # of contribution matrices, before compression; whole documents, in their order
SOURCES = 16  # kept for each token
MAX_REVIEWS = 1000  # dots in the first picture
MAP_MARGIN = 1.08  # length of a map's axes, in multiples of the points' extent
KEYS = ["document", "position"]
NAME_CHARACTERS = 40  # at the beginning of a text, by which it is chosen

Data = dict[Any, Any]
_NAMES = {...: str}
_GRIDS = {...: {...: str}}  # quantised arrays by checkpoint and method
_SCORES = {...: [float | int | None]}  # value and chance by measure
_ROW = {...: object}  # of a table, by column; None where a value is missing
SHAPE: Data = {
    "pointsPerSecond": int,
    "labels": {
        **{"methods": _NAMES, "checkpoints": _NAMES, "matrices": _NAMES, "importance": _NAMES},
        **{"steps": _NAMES, "stepMeasures": _NAMES, "mapMeasures": _NAMES},
        "layers": [str],  # from 0 on, the embedding
    },
    "captured": str,  # the checkpoint of the vectors
    "onePlane": [str],  # layouts whose sites share a plane
    "ownBasis": [str],  # points
    "stream": [str],  # points
    "stepColors": _NAMES,
    "method": str,
    "layer": int,
    "importance": {...: {"limit": float, "values": str}},  # `[tokens]`, quantised between -limit and limit
    "reviews": {"names": [str], "total": int, "values": _GRIDS},  # mean ratios `[layers, reviews]`
    "curves": [_ROW],
    "differences": [_ROW],
    "steps": [_ROW],
    "movement": [_ROW],
    "quality": {...: {"whole": _SCORES, "points": [_SCORES]}},  # of a layout, and of each site
    "layerParts": [[str]],
    # `start` is the number of a document's first token, `direction` is ltr or rtl.
    "documents": [{"name": str, "start": int, "length": int, "begins": str, "direction": str, "note": str}],
    "encoder": int | None,  # layers, where there is a decoder too
    # All tokens as each stack reads them; `apart` is 1 where a word begins, `classes` number `classNames`.
    "readings": [{"names": [str], "words": [str], "apart": [int], "classes": [int]}],
    "classNames": [str],
    "ratios": {"methods": [str], "layers": int, "values": _GRIDS},  # `[layers, tokens]`
    # Largest sources of each token, their shares and its share of itself, by document, checkpoint and method.
    "contributions": {...: {...: {...: {"keep": int, "sources": str, "shares": str, "own": str}}}},
    "matrices": [str],
    "attention": {"number": int, "width": int, "documents": {...: {...: {...: object}}}},  # of heads, as contributions
    "tokenSteps": _NAMES,  # `[layers, tokens]` by step
    "sites": [_ROW],
    # Places `[sites, tokens]`, quantised within `ranges`: one for each site or one for all.
    "maps": {...: {"ranges": [[[float]]], "x": str, "y": str, "absent": [int]}},
    "nearest": {"number": int, "tokens": str},  # `[sites, tokens, number]`
}
"""The page's data: `[x]` is a list of `x`, `...` stands for any key, and `str` also for an encoded array.

The number of a token, layer or site is its place in a list or array.
"""


def shown_tokens(tokens: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Return the rows of the first whole documents, with `row` in the stores; and the number of documents left out."""
    lengths = tokens.groupby("document", sort=False).size()
    first = lengths[(lengths.cumsum() <= MAX_TOKENS) | (np.arange(len(lengths)) == 0)]
    return tokens[tokens["document"].isin(first.index)].reset_index(names="row"), len(lengths) - len(first)


def page_data(run: Run, tokens: pd.DataFrame, checkpoints: Mapping[str, str]) -> Data:
    """Return the data of the `tokens` that the page shows; `checkpoints` are labels, the captured checkpoint last."""
    documents = tokens["document"].unique().tolist()
    curves, differences = run.mixing
    steps = run.steps.dropna(subset="mean")
    texts = read_captured(tokens, steps)
    ratios = run.captured_ratios(documents)
    layers = range(1, int(ratios["layer"].max()) + 1)
    most, _ = most_and_least(curves)
    contributions = _contributions(documents, run)
    matrices = {name for by_checkpoint in contributions.values() for each in by_checkpoint.values() for name in each}
    maps = {layout: run.map(layout) for layout in run.layouts}
    sites = map_sites(pd.concat(maps.values()))
    has_classifier = names.CAPTURED_CHECKPOINT in checkpoints
    return {
        "pointsPerSecond": labels.POINTS_PER_SECOND,
        "labels": {
            "methods": {name: mark.label for name, mark in labels.RATIO_MARKS.items()},
            "checkpoints": dict(checkpoints),
            "matrices": labels.MATRIX_LABELS,
            "importance": labels.IMPORTANCE,
            "steps": {name: mark.label for name, mark in labels.STEP_MARKS.items()},
            "stepMeasures": labels.STEP_MEASURES,
            "mapMeasures": labels.MAP_MEASURES,
            "layers": [labels.layer_label(layer, texts.encoder) for layer in (0, *layers)],
        },
        "captured": list(checkpoints)[-1],
        "onePlane": list(names.ONE_PLANE),
        "ownBasis": sorted(names.OWN_BASIS),
        "stream": [point for point in names.POINTS if point not in names.SUBLAYER_POINTS],
        "stepColors": {name: mark.color for name, mark in labels.STEP_MARKS.items()},
        "method": most["method"],
        "layer": int(most["layer"]),
        "importance": _importance(tokens, run) if has_classifier else {},
        "reviews": _reviews(run.table("measure/mixing_by_review")),
        "curves": _records(curves.drop(columns=["simultaneous_low", "simultaneous_high"])),
        "differences": _records(differences.drop(columns="checkpoint").rename(columns={"mean": "difference"})),
        "steps": _records(steps),
        "movement": _records(run.table("reduce/movement")),
        "quality": _quality(run.map_quality.round(6), sites),
        "layerParts": run.layer_parts,
        "documents": _documents(tokens, run, has_classifier),
        "encoder": texts.encoder,
        "readings": [
            {
                "names": [visible(piece.label, kept="") for piece in pieces],
                "words": [visible(piece.text, kept="") for piece in pieces],
                "apart": [int(piece.begins) for piece in pieces],
                "classes": [names.TOKEN_CLASSES.index(piece.token_class) for piece in pieces],
            }
            for pieces in texts.readings
        ],
        # The name of a special token that the texts do not have is empty.
        "classNames": [
            *(visible(texts.class_label(name), kept="") for name in labels.SPECIAL_LOOKS),
            *labels.WORD_CLASSES.values(),
        ],
        "ratios": _ratios(ratios, tokens),
        "contributions": contributions,
        "matrices": [name for name in MATRICES if name in matrices],
        "attention": encode_heads(
            (document, {each: parts for each in names.CHECKPOINT_NAMES if (parts := run.heads(each, document))})
            for document in documents
        ),
        "tokenSteps": _token_steps(run, tokens, steps, layers),
        "sites": [
            {
                "layer": site.layer if site.point in names.LAYER_POINTS else 0,
                "point": site.point,
                "label": labels.site_label(site, texts.encoder),
                "reading": texts.reading(site),
            }
            for site in sites
        ],
        "maps": {layout: _map(table, tokens, sites, layout in names.ONE_PLANE) for layout, table in maps.items()},
        "nearest": _nearest(run.nearest, tokens, sites),
    }


def _records(table: pd.DataFrame) -> list[Data]:
    return list(table.astype(object).where(table.notna(), None).to_dict("records"))


def _reviews(table: pd.DataFrame) -> Data:
    """Return the mean ratios of all reviews, of more than `MAX_REVIEWS` at equal steps."""
    documents = table["document"].unique()
    reviews = documents[:: -(-len(documents) // MAX_REVIEWS)]
    values: Data = {}
    for (checkpoint, method), rows in table[table["document"].isin(reviews)].groupby(["checkpoint", "method"]):
        grid = rows.pivot(index="layer", columns="document", values="mean")[reviews]
        values.setdefault(checkpoint, {})[method] = quantise(grid.to_numpy(), 0, 1)
    return {"names": reviews.tolist(), "total": len(documents), "values": values}


def _documents(tokens: pd.DataFrame, run: Run, has_classifier: bool) -> list[Data]:
    table = run.documents.merge(run.predictions, on="document") if has_classifier else run.documents
    notes = {row["document"]: document_note(row) for row in _records(table[table["captured"]])}
    return [
        {
            "name": name,
            "start": int(rows.index[0]),
            "length": len(rows),
            "begins": _beginning(run.texts[str(name)]),
            "direction": _direction(run.texts[str(name)]),
            "note": notes[name],
        }
        for name, rows in tokens.groupby("document", sort=False)
    ]


def _direction(text: str) -> str:
    """Return `rtl` where the first letter of a text that has a direction is written from right to left."""
    directions = map(unicodedata.bidirectional, text)
    return "rtl" if next((each for each in directions if each in ("L", "R", "AL")), "L") != "L" else "ltr"


def _beginning(text: str) -> str:
    line = visible(" ".join(text.split()), kept="")
    return line if len(line) <= NAME_CHARACTERS else f"{line[:NAME_CHARACTERS].rstrip()}…"


def _by_token(rows: pd.DataFrame, tokens: pd.DataFrame, index: str | list[str], values: str) -> pd.DataFrame:
    """Return `values` of the `rows`, with a column for each of the `tokens`; NaN where there is none."""
    wide = rows.pivot(index=index, columns=KEYS, values=values)
    return wide.reindex(columns=pd.MultiIndex.from_frame(tokens[KEYS]))


def _ratios(table: pd.DataFrame, tokens: pd.DataFrame) -> Data:
    methods = [method for method in RATIOS if method in table]
    values: Data = {}
    for checkpoint, rows in table.groupby("checkpoint", sort=False):
        wide = {method: _by_token(rows, tokens, "layer", method).to_numpy(float) for method in methods}
        values[checkpoint] = {method: quantise(ratios, 0, 1) for method, ratios in wide.items()}
    return {"methods": methods, "layers": int(table["layer"].max()), "values": values}


def _importance(tokens: pd.DataFrame, run: Run) -> Data:
    """Return by name of the score the scores of the tokens that have any."""
    scores = _by_token(run.token_scores, tokens, "method", "score").reindex(names.IMPORTANCE_NAMES).dropna(how="all")
    importance = {}
    for name, values in zip(scores.index, scores.to_numpy(float), strict=True):
        limit = max(float(np.nanmax(np.abs(values))), 1e-9)
        importance[name] = {"limit": limit, "values": quantise(values, -limit, limit)}
    return importance


def _quality(table: pd.DataFrame, sites: Sequence[Site]) -> Data:
    layouts: Data = {}
    for row in _records(table):
        quality = layouts.setdefault(row["layout"], {"whole": {}, "points": [{} for _ in sites]})
        whole = row["point"] is None
        scores = quality["whole"] if whole else quality["points"][sites.index(Site(int(row["layer"]), row["point"]))]
        scores[row["measure"]] = [row["value"], row["chance"]]
    return layouts


def _contributions(documents: Sequence[str], run: Run) -> Data:
    """Return the largest sources of every token, by document, checkpoint and method, of the first texts that fit."""
    contributions: Data = {}
    size = 0
    for document in documents:
        entries = {}
        for checkpoint in names.CHECKPOINT_NAMES:
            if stored := run.matrices(checkpoint, document):
                methods = [method for method in MATRICES if method in stored]
                shares = [largest_shares(run.matrix(checkpoint, document, method), SOURCES) for method in methods]
                entries[checkpoint] = dict(zip(methods, shares, strict=True))
                size += sum(len(each["sources"]) + len(each["shares"]) for each in shares)
        if contributions and size > CONTRIBUTION_BYTES:
            break
        contributions[document] = entries
    return contributions


def square_limits(xy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return limits of x and y `[2, 2]`, equally long, around the points `[vectors, 2]` that are not NaN."""
    points = xy[np.isfinite(xy).all(axis=1)]
    low, high = (points.min(axis=0), points.max(axis=0)) if len(points) else (np.zeros(2), np.ones(2))
    half = MAP_MARGIN * max(float((high - low).max()), 1e-3) / 2
    middle = (low + high) / 2
    return np.stack([middle - half, middle + half], axis=1)


def _map(table: pd.DataFrame, tokens: pd.DataFrame, sites: Sequence[Site], shared: bool) -> Data:
    """Return the places of a layout, within one square that all sites share or one for each."""
    points = pd.MultiIndex.from_tuples(sites)
    wide = [_by_token(table, tokens, ["layer", "point"], axis) for axis in "xy"]
    xy = np.stack([each.reindex(points).to_numpy(float) for each in wide], axis=-1)
    limits = np.stack([square_limits(xy.reshape(-1, 2))] if shared else [square_limits(each) for each in xy])
    low, high = limits[:, None, :, 0], limits[:, None, :, 1]
    fractions = (xy - low) / (high - low)
    absent = np.flatnonzero(~points.isin(wide[0].index))
    x, y = (quantise(fractions[..., axis], 0, 1) for axis in (0, 1))
    return {"ranges": limits.tolist(), "x": x, "y": y, "absent": absent.tolist()}


def _nearest(table: pd.DataFrame, tokens: pd.DataFrame, sites: Sequence[Site]) -> Data:
    """Return `[sites, tokens, number]`: the tokens of the page among the nearest of each in the full space."""
    rows_NK = np.stack(table["nearest"].tolist()).astype(np.int64)
    number_of = np.full(max(rows_NK.max(initial=0), tokens["row"].max()) + 1, MISSING_CODE, np.uint16)
    number_of[tokens["row"]] = np.arange(len(tokens))
    token_N = pd.MultiIndex.from_frame(tokens[KEYS]).get_indexer(pd.MultiIndex.from_frame(table[KEYS]))
    site_N = pd.MultiIndex.from_tuples(sites).get_indexer(pd.MultiIndex.from_frame(table[["layer", "point"]]))
    on_page = (token_N >= 0) & (site_N >= 0)
    nearest = np.full((len(sites), len(tokens), rows_NK.shape[1]), MISSING_CODE, np.uint16)
    nearest[site_N[on_page], token_N[on_page]] = number_of[rows_NK[on_page]]
    return {"number": rows_NK.shape[1], "tokens": encode(nearest)}


def _token_steps(run: Run, tokens: pd.DataFrame, steps: pd.DataFrame, layers: range) -> dict[str, str]:
    """Return the cosine of each vector after a step with its layer's input, where both are captured and as wide."""
    sites, rows = set(run.sites), tokens["row"].to_numpy(np.int64)

    def unit(site: Site) -> npt.NDArray[np.float64]:
        vectors = run.read(site, rows).astype(np.float64)
        return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))

    cosines: dict[str, npt.NDArray[np.float64]] = {}
    for layer in layers:
        if (before := layer_input(layer, sites)) not in sites:
            continue
        start, layer_steps = unit(before), steps.loc[steps["layer"] == layer, "step"].unique().tolist()
        for step in layer_steps:
            no_norm_follows = step == "ffn_skip" and "ffn_norm" not in layer_steps
            site = Site(layer, "layer_output" if no_norm_follows else names.STEP_POINTS[step] or "")
            if site in sites and (end := unit(site)).shape == start.shape:
                cosines.setdefault(step, np.full((len(layers), len(rows)), np.nan))[layer - 1] = (start * end).sum(1)
    return {step: quantise(each, -1, 1) for step, each in cosines.items()}
