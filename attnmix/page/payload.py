"""What the page's script reads: the run's numbers and the captured texts, from the files of earlier stages."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import CAPTURED_CHECKPOINT, CHECKPOINT_NAMES, ONE_PLANE, TOKEN_CLASSES
from attnmix.core.points import LAYER_POINTS, POINTS, STEP_POINTS, SUBLAYER_POINTS, Site, in_forward_order, layer_input
from attnmix.figures import labels as vocabulary
from attnmix.figures.tokens import CapturedTexts, DisplayToken, read_captured
from attnmix.measures.matrices import MATRICES
from attnmix.measures.ratios import RATIOS, preferred_ratio
from attnmix.page.arrays import largest_shares, quantised, visible
from attnmix.page.heads import heads_data
from attnmix.page.importance import importance
from attnmix.page.nearest import nearest
from attnmix.page.sentences import captured_text, strongest_layer
from attnmix.store.files import read_table
from attnmix.store.maps import OWN_BASIS, made_layouts, map_sites, read_map, read_quality
from attnmix.store.mixing import read_captured_ratios, read_layer_parts, read_matrix, stored_matrices
from attnmix.store.reports import read_mixing, read_plot, read_steps
from attnmix.store.runs import Run
from attnmix.store.tokens import read_documents
from attnmix.store.validation import PREDICTIONS

PAGE_TOKENS = 4096  # whole documents, in order, up to so many tokens
CONTRIBUTION_BYTES = 8_000_000  # of contribution matrices, before compression; whole documents, in order
SOURCES = 16  # kept for each token
REVIEWS = 1000  # that the first picture shows at most
MAP_MARGIN = 1.08  # length of a map's axes, in multiples of the points' extent
BEGINNING = 40  # characters of a text that name it


def shown_tokens(tokens: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The rows of whole documents, in order, as far as a page holds them; the number of documents left out."""
    lengths = tokens.groupby("document", sort=False).size()
    kept = lengths[(lengths.cumsum() <= PAGE_TOKENS) | (np.arange(len(lengths)) == 0)]
    return tokens[tokens["document"].isin(kept.index)].reset_index(names="row"), len(lengths) - len(kept)


def page_data(run: Run, tokens: pd.DataFrame, points_per_second: int, checkpoints: Mapping[str, str]) -> dict[str, Any]:
    """Everything that the page's script reads of `tokens`, those of `run` that are shown.

    `checkpoints` are the labels of those that may be measured, the one whose vectors are captured last.
    """
    ratios = read_captured_ratios(tokens["document"].unique().tolist())
    steps = read_steps().dropna(subset="mean")
    simultaneous = ["simultaneous_low", "simultaneous_high"]
    curves, differences = read_mixing()
    captured = read_captured(tokens, steps)
    layers = int(ratios["layer"].max())
    return {
        "pointsPerSecond": points_per_second,
        "labels": {
            "methods": {name: ratio.mark.label for name, ratio in RATIOS.items()},
            "checkpoints": checkpoints,
            "matrices": {name: matrix.label for name, matrix in MATRICES.items()},
            "importance": vocabulary.IMPORTANCE,
            "steps": {name: mark.label for name, mark in vocabulary.STEP_MARKS.items()},
            "stepMeasures": vocabulary.STEP_MEASURES,
            "mapMeasures": vocabulary.MAP_MEASURES,
            "layers": [vocabulary.layer_label(layer, captured.encoder) for layer in range(layers + 1)],
        },
        "captured": list(checkpoints)[-1],
        "onePlane": ONE_PLANE,
        "ownBasis": sorted(OWN_BASIS),
        "stream": [point for point in POINTS if point not in SUBLAYER_POINTS],
        "stepColors": {name: mark.color for name, mark in vocabulary.STEP_MARKS.items()},
        "method": (method := preferred_ratio(ratios.columns)),
        "layer": strongest_layer(method),
        "importance": importance(tokens) if CAPTURED_CHECKPOINT in checkpoints else {},
        "reviews": _reviews(),
        "curves": _records(curves.drop(columns=simultaneous)),
        "differences": _records(differences.drop(columns="checkpoint").rename(columns={"mean": "difference"})),
        "steps": _records(steps),
        "layerParts": read_layer_parts(),
        "movement": _records(read_plot("reduce/movement")),
        "documents": _documents(tokens, run.texts, CAPTURED_CHECKPOINT in checkpoints),
        "encoder": captured.encoder,
        "readings": [_reading(reading) for reading in captured.readings],
        "classNames": _class_names(captured),
        "ratios": _ratios(tokens, ratios),
        **_contributions(tokens),
        "attention": heads_data(tokens["document"].unique().tolist()),
        "tokenSteps": _token_steps(run, tokens, steps, layers),
        **_maps(captured),
    }


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    rows: Any = table.astype(object).where(table.notna(), None).to_dict("records")
    return list(rows)


def _reviews() -> dict[str, Any]:
    """Each measured review's mean ratios `[layers, reviews]`; of very many, so many at equal steps."""
    table = read_plot("measure/mixing_by_review")
    names = table["document"].unique()
    shown = names[:: -(-len(names) // REVIEWS)]
    of_shown = table[table["document"].isin(shown)]
    values: dict[str, dict[str, str]] = {}
    for keys, rows in of_shown.groupby(["checkpoint", "method"]):
        checkpoint, method = map(str, keys)
        by_review = rows.pivot_table(index="layer", columns="document", values="mean", aggfunc="first")
        values.setdefault(checkpoint, {})[method] = quantised(by_review[shown].to_numpy(), 0, 1)
    return {"names": shown.tolist(), "total": len(names), "values": values}


def _reading(pieces: Sequence[DisplayToken]) -> dict[str, Any]:
    """Of each token its name, what stands for it within the text, whether it stands apart there, and its class."""
    return {
        "names": [visible(piece.label, kept="") for piece in pieces],
        "words": [visible(piece.text, kept="") for piece in pieces],
        "apart": [int(piece.begins) for piece in pieces],
        "classes": [TOKEN_CLASSES.index(piece.token_class) for piece in pieces],
    }


def _class_names(captured: CapturedTexts) -> list[str]:
    """By number of the class; empty for special tokens that the texts do not have."""
    special = [visible(captured.class_label(name), kept="") for name in vocabulary.SPECIAL_LOOKS]
    return [*special, *vocabulary.WORD_CLASSES.values()]


def _documents(tokens: pd.DataFrame, texts: Mapping[str, str], classified: bool) -> list[dict[str, Any]]:
    table = read_documents()  # the label of a text of one's own is missing
    if classified:
        table = table.merge(read_table(PREDICTIONS, "faithfulness"), on="document")
    captured = {str(row["document"]): row for _, row in table.iterrows()}
    return [
        {
            "name": str(name),
            "start": int(rows.index[0]),
            "length": len(rows),
            "begins": _beginning(texts[str(name)]),
            "direction": _direction(texts[str(name)]),
            "note": captured_text(captured[str(name)]),
        }
        for name, rows in tokens.groupby("document", sort=False)
    ]


def _direction(text: str) -> str:
    """`rtl` where the first letter of a text that has a direction is written from right to left."""
    first = next((char for char in text if unicodedata.bidirectional(char) in ("L", "R", "AL")), "")
    return "ltr" if first == "" or unicodedata.bidirectional(first) == "L" else "rtl"


def _beginning(text: str) -> str:
    line = visible(" ".join(text.split()), kept="")
    return line if len(line) <= BEGINNING else f"{line[:BEGINNING].rstrip()}…"


def _of_tokens(rows: pd.DataFrame, tokens: pd.DataFrame, index: str | list[str], values: str) -> pd.DataFrame:
    """`values` of the `rows`, with a column for each of the `tokens`; NaN where there is none."""
    columns = ["document", "position"]
    wide = rows.pivot(index=index, columns=columns, values=values)
    return wide.reindex(columns=pd.MultiIndex.from_frame(tokens[columns]))


def _ratios(tokens: pd.DataFrame, ratios: pd.DataFrame) -> dict[str, Any]:
    """`[layers, tokens]` for each checkpoint and method, 0 to 1."""
    methods = [method for method in RATIOS if method in ratios]
    values = {
        str(name): {each: quantised(_of_tokens(rows, tokens, "layer", each).to_numpy(float), 0, 1) for each in methods}
        for name, rows in ratios.groupby("checkpoint", sort=False)
    }
    return {"methods": methods, "layers": int(ratios["layer"].max()), "values": values}


def _contributions(tokens: pd.DataFrame) -> dict[str, Any]:
    """`contributions`: the largest sources of every token, by document, checkpoint and method, as far as they fit.

    `matrices` are the methods that all documents have.
    """
    contributions: dict[str, Any] = {}
    matrices: list[str] = []
    spent = 0
    for document in tokens["document"].unique():
        entries: dict[str, Any] = {}
        for checkpoint in CHECKPOINT_NAMES:
            stored = stored_matrices(checkpoint, document)
            if not stored:
                continue
            matrices = [method for method in MATRICES if method in stored]
            entries[checkpoint] = {
                method: largest_shares(read_matrix(checkpoint, document, method), SOURCES) for method in matrices
            }
        size = sum(len(part["sources"]) + len(part["shares"]) for each in entries.values() for part in each.values())
        if contributions and spent + size > CONTRIBUTION_BYTES:
            break
        spent += size
        contributions[str(document)] = entries
    return {"contributions": contributions, "matrices": matrices}


def _maps(captured: CapturedTexts) -> dict[str, Any]:
    read = {name: read_map(name) for name in made_layouts()}
    of_layout = {name: map_sites(table) for name, table in read.items()}
    sites = in_forward_order(set[Site]().union(*of_layout.values()))
    coordinates = {name: _coordinates(table, captured.tokens, sites, name in ONE_PLANE) for name, table in read.items()}
    absent = {
        name: [number for number, site in enumerate(sites) if site not in there] for name, there in of_layout.items()
    }
    return {
        "sites": [
            {
                "layer": site.layer if site.point in LAYER_POINTS else 0,
                "point": site.point,
                "label": vocabulary.site_label(site, captured.encoder),
                "reading": captured.reading(site),
            }
            for site in sites
        ],
        "maps": {name: map_ | {"absent": absent[name]} for name, map_ in coordinates.items()},
        "nearest": nearest(captured.tokens, sites),
        "quality": _quality(sites),
    }


def square_limits(xy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return limits of x and y `[2, 2]`, equally long, around the points `[vectors, 2]` that are not NaN."""
    points = xy[np.isfinite(xy).all(axis=1)]
    low, high = (points.min(axis=0), points.max(axis=0)) if len(points) else (np.zeros(2), np.ones(2))
    half = MAP_MARGIN * max(float((high - low).max()), 1e-3) / 2
    middle = (low + high) / 2
    return np.stack([middle - half, middle + half], axis=1)


def _coordinates(table: pd.DataFrame, tokens: pd.DataFrame, sites: Sequence[Site], shared: bool) -> dict[str, Any]:
    """`x` and `y` are `[points, tokens]`, quantised within `ranges`, one for each point or one for all."""
    points = pd.MultiIndex.from_tuples(sites)
    wide = [_of_tokens(table, tokens, ["layer", "point"], axis).reindex(points) for axis in "xy"]
    xy = np.stack([each.to_numpy(float) for each in wide], axis=-1)
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


def _token_steps(run: Run, tokens: pd.DataFrame, steps: pd.DataFrame, layers: int) -> dict[str, str]:
    """Cosine of each token's vector after a step with its layer input, `[layers, tokens]`, -1 to 1.

    Of the `steps` that a layer has, as far as their features were captured and are as wide as the layer's input.
    """
    sites = set(run.sites)
    rows = tokens["row"].to_numpy(np.int64)

    def unit(site: Site) -> npt.NDArray[np.float64]:
        vectors = run.read(site, rows).astype(np.float64)
        return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))

    cosines: dict[str, npt.NDArray[np.float64]] = {}
    for layer in range(1, layers + 1):
        before, names = layer_input(layer, sites), steps.loc[steps["layer"] == layer, "step"].tolist()
        points = {step: STEP_POINTS[step] for step in names}
        if "ffn_skip" in names and "ffn_norm" not in names:
            points["ffn_skip"] = "layer_output"  # where no norm follows
        there = {step: Site(layer, point) for step, point in points.items() if point and Site(layer, point) in sites}
        start = unit(before) if before in sites and there else None
        for step, site in there.items():
            if start is not None and (after := unit(site)).shape == start.shape:
                cosines.setdefault(step, np.full((layers, len(rows)), np.nan))[layer - 1] = (start * after).sum(axis=1)
    return {step: quantised(each, -1, 1) for step, each in cosines.items()}
