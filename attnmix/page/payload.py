"""The data that the page's script reads, as JSON of the shape `Payload`: numbers of a run and its captured texts."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import CAPTURED_CHECKPOINT, CHECKPOINT_NAMES, IMPORTANCE_NAMES, ONE_PLANE, TOKEN_CLASSES
from attnmix.core.points import LAYER_POINTS, POINTS, STEP_POINTS, SUBLAYER_POINTS, Site, in_forward_order, layer_input
from attnmix.figures import labels as vocabulary
from attnmix.figures.tokens import CapturedTexts, DisplayToken, read_captured
from attnmix.measures.matrices import MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.page.arrays import MISSING_CODE, Heads, Shares, encode, encode_heads, largest_shares, quantise, visible
from attnmix.page.sentences import document_note, most_and_least, shown_curves
from attnmix.store.runs import Run

MAX_TOKENS = 4096  # whole documents, in order, up to so many tokens
CONTRIBUTION_BYTES = 8_000_000  # of contribution matrices, before compression; whole documents, in order
SOURCES = 16  # kept for each token
MAX_REVIEWS = 1000  # dots in the first picture
MAP_MARGIN = 1.08  # length of a map's axes, in multiples of the points' extent
KEYS = ["document", "position"]
BEGINNING = 40  # characters of a text that name it

Row = dict[str, str | float | None]
"""One row of a table, by column; None where a value is missing."""
Grids = dict[str, dict[str, str]]
"""Quantised arrays by checkpoint and method."""


class Document(TypedDict):
    """One captured text; `start` is the number of its first token, `direction` is `ltr` or `rtl`."""

    name: str
    start: int
    length: int
    beginning: str
    direction: str
    note: str


class Reading(TypedDict):
    """All tokens as one stack reads them; `wordStarts` has 1 where a word begins, `classes` number `classNames`."""

    names: list[str]
    words: list[str]
    wordStarts: list[int]
    classes: list[int]


class Reviews(TypedDict):
    """Mean ratios `[layers, reviews]` of the reviews that are shown, of `total` measured ones."""

    names: list[str]
    total: int
    values: Grids


class Map(TypedDict):
    """Places `[sites, tokens]`, quantised within `ranges`: one for each site or one for all."""

    ranges: list[list[list[float]]]
    x: str
    y: str
    absentSites: list[int]


class Payload(TypedDict):
    """Everything that the script reads; a token's, layer's or site's number is its place in a list or array."""

    labels: dict[str, dict[str, str]]
    capturedCheckpoint: str
    sharedLayouts: list[str]
    ownBasisPoints: list[str]
    streamPoints: list[str]
    stepColors: dict[str, str]
    method: str
    layer: int
    importance: dict[str, list[float | None]]
    reviews: Reviews
    curves: list[Row]
    differences: list[Row]
    steps: list[Row]
    movement: list[Row]
    quality: list[Row]
    layerParts: list[list[str]]
    documents: list[Document]
    encoderLayers: int | None
    readings: list[Reading]
    classNames: list[str]
    layerNames: list[str]  # from 0, the embedding
    ratios: Grids  # [layers, tokens]
    contributions: dict[str, dict[str, dict[str, Shares]]]
    matrices: list[str]
    attention: Heads
    tokenSteps: dict[str, str]  # [layers, tokens]
    sites: list[Row]
    maps: dict[str, Map]
    neighbours: str  # [sites, tokens, number]


def shown_tokens(tokens: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Return the rows of the first whole documents, with `row` in the stores; and the number of documents left out."""
    lengths = tokens.groupby("document", sort=False).size()
    kept = lengths[(lengths.cumsum() <= MAX_TOKENS) | (np.arange(len(lengths)) == 0)]
    return tokens[tokens["document"].isin(kept.index)].reset_index(names="row"), len(lengths) - len(kept)


def page_data(run: Run, tokens: pd.DataFrame, checkpoints: Mapping[str, str]) -> Payload:
    """Return the data of the `tokens` that the page shows; `checkpoints` are labels, the captured checkpoint last."""
    documents = tokens["document"].unique().tolist()
    mixing, geometry = run.table("measure/mixing"), run.table("measure/geometry")
    steps = geometry[geometry["measure"].isin(vocabulary.STEP_MEASURES) & geometry["mean"].notna()]
    steps = steps.rename(columns={"point": "step"})
    captured = read_captured(tokens, steps)
    ratios = run.ratios(filters=[("document", "in", documents)])
    layers = range(1, int(ratios["layer"].max()) + 1)
    most, _ = most_and_least(shown_curves(run))
    contributions = _contributions(run, documents)
    maps = {layout: run.map(layout) for layout in run.layouts}
    sites = in_forward_order(
        {Site(*key) for table in maps.values() for key in table.groupby(["layer", "point"]).groups}
    )
    return {
        "labels": {
            "methods": {name: ratio.mark.label for name, ratio in RATIOS.items()},
            "checkpoints": dict(checkpoints),
            "matrices": {name: matrix.label for name, matrix in MATRICES.items()},
            "importance": vocabulary.IMPORTANCE,
            "steps": {name: mark.label for name, mark in vocabulary.STEP_MARKS.items()},
            "stepMeasures": vocabulary.STEP_MEASURES,
            "mapMeasures": vocabulary.MAP_MEASURES,
        },
        "layerNames": [vocabulary.layer_label(layer, captured.encoder) for layer in (0, *layers)],
        "capturedCheckpoint": list(checkpoints)[-1],
        "sharedLayouts": list(ONE_PLANE),
        "ownBasisPoints": sorted(OWN_BASIS),
        "streamPoints": [point for point in POINTS if point not in SUBLAYER_POINTS],
        "stepColors": {name: mark.color for name, mark in vocabulary.STEP_MARKS.items()},
        "method": most["method"],
        "layer": int(most["layer"]),
        "importance": _importance(run, tokens) if CAPTURED_CHECKPOINT in checkpoints else {},
        "reviews": _reviews(run.table("measure/mixing_by_review")),
        "curves": _records(mixing[mixing["checkpoint"] != "difference"]),
        "differences": _records(mixing[mixing["checkpoint"] == "difference"]),
        "steps": _records(steps),
        "movement": _records(run.table("reduce/movement")),
        "quality": _records(run.map_quality.round(6)),
        "layerParts": run.layer_parts,
        "documents": _documents(run, tokens),
        "encoderLayers": captured.encoder,
        "readings": [_reading(reading) for reading in captured.readings],
        "classNames": _class_names(captured),
        "ratios": {
            str(checkpoint): {
                method: quantise(_by_token(rows, tokens, "layer", method).to_numpy(float), 0, 1)
                for method in RATIOS
                if method in rows
            }
            for checkpoint, rows in ratios.groupby("checkpoint", sort=False)
        },
        "contributions": contributions,
        "matrices": [
            name for name in MATRICES if any(name in each for of in contributions.values() for each in of.values())
        ],
        "attention": encode_heads((name, _stored_heads(run, name)) for name in documents),
        "tokenSteps": _token_steps(run, tokens, steps, layers),
        "sites": [
            {
                "layer": site.layer if site.point in LAYER_POINTS else 0,
                "point": site.point,
                "label": vocabulary.site_label(site, captured.encoder),
                "reading": captured.reading(site),
            }
            for site in sites
        ],
        "maps": {layout: _map(table, tokens, sites, layout in ONE_PLANE) for layout, table in maps.items()},
        "neighbours": _neighbours(run.nearest, tokens, sites),
    }


def _records(table: pd.DataFrame) -> list[Row]:
    rows: Any = table.astype(object).where(table.notna(), None).to_dict("records")
    return list(rows)


def _reviews(table: pd.DataFrame) -> Reviews:
    """Return the mean ratios of all reviews, of more than `MAX_REVIEWS` at equal steps."""
    names = table["document"].unique()
    shown = names[:: -(-len(names) // MAX_REVIEWS)]
    values: Grids = {}
    for (checkpoint, method), rows in table[table["document"].isin(shown)].groupby(["checkpoint", "method"]):
        grid = rows.pivot(index="layer", columns="document", values="mean")[shown]
        values.setdefault(checkpoint, {})[method] = quantise(grid.to_numpy(), 0, 1)
    return {"names": shown.tolist(), "total": len(names), "values": values}


def _reading(pieces: Sequence[DisplayToken]) -> Reading:
    return {
        "names": [visible(piece.label, kept="") for piece in pieces],
        "words": [visible(piece.text, kept="") for piece in pieces],
        "wordStarts": [int(piece.begins) for piece in pieces],
        "classes": [TOKEN_CLASSES.index(piece.token_class) for piece in pieces],
    }


def _class_names(captured: CapturedTexts) -> list[str]:
    """Return the classes' names by number; empty for special tokens that the texts do not have."""
    special = [visible(captured.class_label(name), kept="") for name in vocabulary.SPECIAL_LOOKS]
    return [*special, *vocabulary.WORD_CLASSES.values()]


def _documents(run: Run, tokens: pd.DataFrame) -> list[Document]:
    notes = {row["document"]: document_note(row) for row in _records(captured_texts(run))}
    return [
        {
            "name": str(name),
            "start": int(rows.index[0]),
            "length": len(rows),
            "beginning": _beginning(run.texts[str(name)]),
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
    return line if len(line) <= BEGINNING else f"{line[:BEGINNING].rstrip()}…"


def _by_token(rows: pd.DataFrame, tokens: pd.DataFrame, index: str | list[str], values: str) -> pd.DataFrame:
    """Return `values` of the `rows`, with a column for each of the `tokens`; NaN where there is none."""
    wide = rows.pivot(index=index, columns=KEYS, values=values)
    return wide.reindex(columns=pd.MultiIndex.from_frame(tokens[KEYS]))


def _importance(run: Run, tokens: pd.DataFrame) -> dict[str, list[float | None]]:
    """Return the scores of each token for the predicted class, by name of the score."""
    scores = _by_token(run.token_scores, tokens, "method", "score").dropna(how="all").round(6)
    rows = scores.astype(object).where(scores.notna(), None)
    return {name: rows.loc[name].tolist() for name in IMPORTANCE_NAMES if name in rows.index}


def _contributions(run: Run, documents: Sequence[str]) -> dict[str, dict[str, dict[str, Shares]]]:
    """Return the largest sources of every token, by document, checkpoint and method, of the first texts that fit."""
    contributions: dict[str, dict[str, dict[str, Shares]]] = {}
    size = 0
    for document in documents:
        stored = {name: run.matrices(name, document) for name in CHECKPOINT_NAMES}
        entries = {
            checkpoint: {
                method: largest_shares(run.matrix(checkpoint, document, method), SOURCES)
                for method in MATRICES
                if method in methods
            }
            for checkpoint, methods in stored.items()
            if methods
        }
        size += sum(len(part["sources"]) + len(part["shares"]) for each in entries.values() for part in each.values())
        if contributions and size > CONTRIBUTION_BYTES:
            break
        contributions[document] = entries
    return contributions


def _stored_heads(run: Run, document: str) -> dict[str, dict[str, npt.NDArray[Any]]]:
    return {name: parts for name in CHECKPOINT_NAMES if (parts := run.heads(name, document))}


def square_limits(xy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return limits of x and y `[2, 2]`, equally long, around the points `[vectors, 2]` that are not NaN."""
    points = xy[np.isfinite(xy).all(axis=1)]
    low, high = (points.min(axis=0), points.max(axis=0)) if len(points) else (np.zeros(2), np.ones(2))
    half = MAP_MARGIN * max(float((high - low).max()), 1e-3) / 2
    middle = (low + high) / 2
    return np.stack([middle - half, middle + half], axis=1)


def _map(table: pd.DataFrame, tokens: pd.DataFrame, sites: Sequence[Site], shared: bool) -> Map:
    """Return the places of a layout, within one square that all sites share or one for each."""
    points = pd.MultiIndex.from_tuples(sites)
    wide = [_by_token(table, tokens, ["layer", "point"], axis) for axis in "xy"]
    xy = np.stack([each.reindex(points).to_numpy(float) for each in wide], axis=-1)
    limits = np.stack([square_limits(xy.reshape(-1, 2))] if shared else [square_limits(each) for each in xy])
    low, high = limits[:, None, :, 0], limits[:, None, :, 1]
    scaled = (xy - low) / (high - low)
    absent = np.flatnonzero(~points.isin(wide[0].index))
    x, y = (quantise(scaled[..., axis], 0, 1) for axis in (0, 1))
    return {"ranges": limits.tolist(), "x": x, "y": y, "absentSites": absent.tolist()}


def _neighbours(table: pd.DataFrame, tokens: pd.DataFrame, sites: Sequence[Site]) -> str:
    """Return `[sites, tokens, number]`: the nearest of each token in the full space, as far as the page has them."""
    rows_NK = np.stack(table["nearest"].tolist()).astype(np.int64)
    number_of = np.full(max(rows_NK.max(initial=0), tokens["row"].max()) + 1, MISSING_CODE, np.uint16)
    number_of[tokens["row"]] = np.arange(len(tokens))
    token_N = pd.MultiIndex.from_frame(tokens[KEYS]).get_indexer(pd.MultiIndex.from_frame(table[KEYS]))
    site_N = pd.MultiIndex.from_tuples(sites).get_indexer(pd.MultiIndex.from_frame(table[["layer", "point"]]))
    shown = (token_N >= 0) & (site_N >= 0)
    neighbours = np.full((len(sites), len(tokens), rows_NK.shape[1]), MISSING_CODE, np.uint16)
    neighbours[site_N[shown], token_N[shown]] = number_of[rows_NK[shown]]
    return encode(neighbours)


def _token_steps(run: Run, tokens: pd.DataFrame, steps: pd.DataFrame, layers: range) -> dict[str, str]:
    """Return the cosine of each token's vector after a step with its layer input, `[layers, tokens]`, -1 to 1.

    Of the `steps` that a layer has, as far as their features were captured and are as wide as the layer's input.
    """
    sites, rows = set(run.sites), tokens["row"].to_numpy(np.int64)

    def unit(site: Site) -> npt.NDArray[np.float64]:
        vectors = run.read(site, rows).astype(np.float64)
        return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))

    cosines: dict[str, npt.NDArray[np.float64]] = {}
    for layer in layers:
        before, names = layer_input(layer, sites), steps.loc[steps["layer"] == layer, "step"].tolist()
        points = {step: STEP_POINTS[step] for step in names}
        if "ffn_skip" in names and "ffn_norm" not in names:
            points["ffn_skip"] = "layer_output"  # where no norm follows
        captured = {step: Site(layer, point) for step, point in points.items() if point and Site(layer, point) in sites}
        start = unit(before) if before in sites and captured else None
        for step, site in captured.items():
            if start is not None and (after := unit(site)).shape == start.shape:
                cosines.setdefault(step, np.full((len(layers), len(rows)), np.nan))[layer - 1] = (start * after).sum(1)
    return {step: quantise(each, -1, 1) for step, each in cosines.items()}
