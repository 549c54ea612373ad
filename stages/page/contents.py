"""What the page shows, collected from the files of the earlier stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from stages import store
from stages.maps.storage import MAPS
from stages.mixing.storage import MIXING, contributions_folder, read_contributions, read_ratios
from stages.models.capture_points import Site
from stages.page.arrays import largest_shares, quantised
from stages.parameters import METHODS
from stages.pictures.mixing_figures import MATRIX_LABELS, RATIO_MARKS, STEP_MARKS
from stages.pictures.style import CHECKPOINT_LABELS, POINT_MARKS, layer_label

ACTIVATIONS = Path("features/activations")
PLOTS = Path("reports/plots")
LAYOUTS = ("joint", "aligned", "separate")
CAPTURED_CHECKPOINT = "finetuned"
PAGE_TOKENS = 4096  # whole documents, in order, up to so many tokens
CONTRIBUTION_BYTES = 9_000_000  # of contribution matrices, before compression; whole documents, in order
SOURCES = 16  # kept for each token
HEAD_SOURCES = 8
STEP_SITES = {
    "heads": "attention_heads",
    "output_linear": "attention_output",
    "attention_skip": "attention_residual",
    "attention_norm": "attention_norm",
    "feed_forward": "ffn_output",
    "ffn_norm": "layer_output",
}
TOKEN_CLASS_LABELS = {
    "word": "word",
    "subword": "word piece",
    "punctuation": "punctuation",
    "cls": "[CLS]",
    "sep": "[SEP]",
}


class Captured(NamedTuple):
    """The tokens on the page, `[tokens]` rows of the tokens table, and how many documents stayed off it."""

    tokens: pd.DataFrame
    left_out: int


def captured_tokens(root: Path = Path()) -> Captured:
    """The captured documents' tokens, whole documents in order."""
    tokens = store.read_tokens(root / ACTIVATIONS)
    lengths = tokens.groupby("document", sort=False).size()
    kept = lengths[(lengths.cumsum() <= PAGE_TOKENS) | (np.arange(len(lengths)) == 0)]
    chosen = tokens[tokens["document"].isin(kept.index)].reset_index(names="row")
    return Captured(chosen, len(lengths) - len(kept))


def page_data(captured: Captured, frames_per_second: int, root: Path = Path()) -> dict[str, Any]:
    """Everything that the page's script reads."""
    tokens = captured.tokens
    ratios = read_ratios(root / MIXING, filters=[("document", "in", tokens["document"].unique().tolist())])
    return {
        "framesPerSecond": frames_per_second,
        "labels": {
            "methods": {name: mark.label for name, mark in RATIO_MARKS.items()},
            "checkpoints": CHECKPOINT_LABELS,
            "matrices": {name: label.replace("\n", " ") for name, label in MATRIX_LABELS.items()},
            "steps": {name: mark.label for name, mark in STEP_MARKS.items()},
        },
        "stepColors": {name: mark.color for name, mark in STEP_MARKS.items()},
        "curves": _records(root / PLOTS / "mixing.csv"),
        "differences": _records(root / PLOTS / "mixing_difference.csv"),
        "steps": _records(root / PLOTS / "steps.csv"),
        "movement": _records(root / PLOTS / "movement.csv"),
        "documents": _documents(tokens),
        "tokens": tokens["token"].tolist(),
        "classNames": list(TOKEN_CLASS_LABELS.values()),
        "classes": _classes(tokens, ratios),
        "ratios": _ratios(tokens, ratios),
        "contributions": _contributions(tokens, root),
        "tokenSteps": _token_steps(tokens, root),
        **_maps(tokens, root),
    }


def _records(path: Path) -> list[dict[str, Any]]:
    table = pd.read_csv(path, keep_default_na=True)
    rows: Any = table.astype(object).where(table.notna(), None).to_dict("records")
    return list(rows)


def _documents(tokens: pd.DataFrame) -> list[dict[str, Any]]:
    found = []
    for name, rows in tokens.groupby("document", sort=False):
        found.append({"name": str(name), "start": int(rows.index[0]), "length": len(rows)})
    return found


def _classes(tokens: pd.DataFrame, ratios: pd.DataFrame) -> list[int]:
    known = ratios.drop_duplicates(["document", "position"])[["document", "position", "token_class"]]
    joined = tokens[["document", "position"]].merge(known, on=["document", "position"], how="left")["token_class"]
    names = list(TOKEN_CLASS_LABELS)
    return [names.index(name) for name in joined]


def _ratios(tokens: pd.DataFrame, ratios: pd.DataFrame) -> dict[str, Any]:
    """`[layers, tokens]` for each checkpoint and method, 0 to 1."""
    methods = [method for method in METHODS if method in ratios]
    layers = int(ratios["layer"].max())
    values: dict[str, Any] = {}
    for checkpoint, of_checkpoint in ratios.groupby("checkpoint", sort=False):
        parts = [
            tokens[["document", "position"]].merge(rows, on=["document", "position"], how="left")[methods]
            for _, rows in of_checkpoint.groupby("layer")
        ]
        values[str(checkpoint)] = {
            method: quantised(np.stack([part[method].to_numpy(np.float64) for part in parts]), 0, 1)
            for method in methods
        }
    return {"methods": methods, "layers": layers, "values": values}


def _contributions(tokens: pd.DataFrame, root: Path) -> dict[str, Any]:
    """The largest sources of every token, by checkpoint, document and method, as far as the budget goes."""
    found: dict[str, Any] = {}
    spent = 0
    for document in tokens["document"].unique():
        entries: dict[str, Any] = {}
        for checkpoint in CHECKPOINT_LABELS:
            if contributions_folder(root / MIXING, checkpoint, document).is_dir():
                entries[checkpoint] = {
                    method: largest_shares(read_contributions(checkpoint, document, method, root / MIXING), SOURCES)
                    for method in MATRIX_LABELS
                }
                heads = read_contributions(checkpoint, document, "attention_heads", root / MIXING)
                entries[checkpoint]["heads"] = largest_shares(heads, HEAD_SOURCES) | {"number": heads.shape[1]}
        size = sum(len(part["sources"]) + len(part["shares"]) for each in entries.values() for part in each.values())
        if found and spent + size > CONTRIBUTION_BYTES:
            break
        spent += size
        found[str(document)] = entries
    return found


def _maps(tokens: pd.DataFrame, root: Path) -> dict[str, Any]:
    tables = {name: root / MAPS / f"{name}.parquet" for name in LAYOUTS}
    read = {name: pd.read_parquet(path) for name, path in tables.items() if path.is_file()}
    pairs = next(iter(read.values()))[["layer", "point"]].drop_duplicates()
    sites = [Site(int(layer), str(point)) for layer, point in pairs.itertuples(index=False)]
    maps = {name: _coordinates(table, tokens, sites, shared=name != "separate") for name, table in read.items()}
    return {
        "sites": [{"layer": site.layer, "point": site.point, "label": site_label(site)} for site in sites],
        "maps": maps,
        "quality": _quality(pd.read_parquet(root / MAPS / "quality.parquet"), sites),
    }


def site_label(site: Site) -> str:
    """`Layer 3: Attention output`; the points of the embedding have names that say so themselves."""
    label = POINT_MARKS[site.point].label
    return f"{layer_label(site.layer)}: {label}" if site.layer else label


def _coordinates(table: pd.DataFrame, tokens: pd.DataFrame, sites: Sequence[Site], shared: bool) -> dict[str, Any]:
    """`x` and `y` are `[points, tokens]`, quantised within `ranges`, one for each point or one for all."""
    xy = np.full((len(sites), len(tokens), 2), np.nan)
    groups = table.groupby(["layer", "point"], sort=False)
    for number, site in enumerate(sites):
        rows = groups.get_group((site.layer, site.point))
        xy[number] = tokens[["document", "position"]].merge(rows, on=["document", "position"], how="left")[["x", "y"]]
    ranges = [_square(xy)] if shared else [_square(each) for each in xy]
    coded: dict[str, Any] = {"ranges": ranges}
    for axis, name in enumerate("xy"):
        if shared:
            coded[name] = quantised(xy[..., axis], *ranges[0][axis])
        else:
            scaled = [
                (each[:, axis] - part[axis][0]) / (part[axis][1] - part[axis][0])
                for each, part in zip(xy, ranges, strict=True)
            ]
            coded[name] = quantised(np.stack(scaled), 0, 1)
    return coded


def _square(xy: npt.NDArray[np.float64]) -> list[list[float]]:
    """Limits of x and y with the same length and a margin."""
    points = xy.reshape(-1, 2)
    points = points[np.isfinite(points).all(axis=1)]
    if not len(points):
        return [[0.0, 1.0], [0.0, 1.0]]
    low, high = points.min(axis=0), points.max(axis=0)
    half = max(float((high - low).max()), 1e-3) * 0.54
    return [[float(middle - half), float(middle + half)] for middle in (low + high) / 2]


def _quality(table: pd.DataFrame, sites: Sequence[Site]) -> dict[str, Any]:
    """For each layout `whole` and, for each point, `points`: measure to value and chance."""
    numbers = {tuple(site): number for number, site in enumerate(sites)}
    found: dict[str, Any] = {}
    row: Any
    for row in table.itertuples():
        entry = found.setdefault(row.layout, {"whole": {}, "points": [{} for _ in sites]})
        place = entry["whole"] if pd.isna(row.point) else entry["points"][numbers[int(row.layer), row.point]]
        place[row.measure] = [None if pd.isna(value) else round(value, 6) for value in (row.value, row.chance)]
    return found


def _token_steps(tokens: pd.DataFrame, root: Path) -> dict[str, str]:
    """Cosine of each token's vector after a step with its layer input, `[layers, tokens]`, -1 to 1."""
    sites = store.stored_sites(root / ACTIVATIONS)
    layers = max(site.layer for site in sites)
    inputs = [Site(0, "embedding_output")] + [Site(layer, "layer_output") for layer in range(1, layers)]
    if not layers or not set(inputs) <= set(sites):
        return {}
    rows = tokens["row"].to_numpy(np.int64)
    start = [_unit(store.read_rows(root / ACTIVATIONS, site, rows)) for site in inputs]
    found = {}
    for step, point in STEP_SITES.items():
        steps = [Site(layer, point) for layer in range(1, layers + 1)]
        if set(steps) <= set(sites):
            now = (_unit(store.read_rows(root / ACTIVATIONS, site, rows)) for site in steps)
            cosines = [(a * b).sum(axis=1) for a, b in zip(start, now, strict=True)]
            found[step] = quantised(np.stack(cosines), -1, 1)
    return found


def _unit(vectors: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    wide = vectors.astype(np.float64)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12))
