"""The data of the page, as JSON with the schema `SHAPE`: measures of a run and of its captured texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core import names
from attnmix.core.names import OWN_SHARE, Site
from attnmix.core.settings import MAX_PARTS_TOKENS
from attnmix.core.store.heads import Parts
from attnmix.core.store.results import Components, Results
from attnmix.core.store.runs import map_sites, row_shares
from attnmix.figures import labels
from attnmix.figures.tokens import CapturedTexts, DisplayToken, read_captured
from attnmix.measures.matrices import MATRICES, ROLLOUTS, TOKEN_POSITIONS
from attnmix.measures.ratios import RATIOS
from attnmix.page.answer import answer, own_shares
from attnmix.page.arrays import MISSING_CODE, curves_by, encode, encode_heads, largest_sources, quantise, visible
from attnmix.page.documents import describe_documents
from attnmix.page.sentences import class_shares, map_note, most_and_least
from attnmix.page.shape import Data
from attnmix.page.wording import detailed_documents_of, model_wording_of, wording_of

MAX_TOKENS = 4096  # total length of the complete documents on a page
CONTRIBUTION_BYTES = 8_000_000  # contribution matrices of the first complete documents, before compression
SOURCES = 12  # sources for each token and checkpoint, and additional sources with the largest changes
MAX_REVIEWS = 1000  # dots in the first picture
MAP_MARGIN = 1.08  # length of a map's axes, in multiples of the points' extent
PART_LABELS = {names.INPUT_PARTS: "Exact parts since the input"}
CLASS_SHARE_LABELS = {
    "before": "Before fine-tuning",
    "after": "After fine-tuning",
    "permuted": "Shuffled classes: 95 of 100 draws below",
}
MATRIX_ORDER = (names.INPUT_PARTS, "alti", *MATRICES)  # the first available matrix of a text is shown initially
DERIVATIVE_LABELS = {
    "norm_of_sum": "Derivative, others moved together",
    "norm_of_block": "Derivative, others moved independently",
    "sum_of_norms": "Derivative, sum over single tokens",
}
PROBE_LABELS = {
    ("probe_class", "read"): "Class, by the token that the head reads",
    ("probe_class", "others"): "Class, by other tokens",
    ("probe_token", "others"): "Which token it is",
    ("probe_position", "others"): "Position of the token",
    ("lens_agreement", "others"): "The head itself, on other tokens",
}
"""Quantities of `class_use.csv` and their groups."""
MIN_WORD = 5  # minimum length of the initially selected word, in letters


def shown_tokens(tokens: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Return the rows of the first complete documents, with `row` in the stores, and the number of other documents."""
    lengths = tokens.groupby("document", sort=False).size()
    first = lengths[(lengths.cumsum() <= MAX_TOKENS) | (np.arange(len(lengths)) == 0)]
    return tokens[tokens["document"].isin(first.index)].reset_index(names="row"), len(lengths) - len(first)


def page_data(run: Results, tokens: pd.DataFrame, checkpoints: Mapping[str, str], *, finetuned: bool = True) -> Data:
    """Return the page's data for `tokens`; `checkpoints` has labels, with the captured checkpoint last.

    `finetuned` is False for a pipeline run without fine-tuning.
    """
    documents = tokens["document"].unique().tolist()
    curves = run.table("measure/mixing")
    steps = run.steps.dropna(subset="mean")
    sources = run.table("measure/mixing_by_group")
    derivatives = run.table("measure/derivatives").dropna(subset="mean")
    derivatives = derivatives.query("quantity == 'level' and reference == 'layer_input'")
    moved = set(derivatives["method"])
    texts = read_captured(tokens, steps)
    ratios = run.captured_ratios(documents)
    layers = range(1, int(ratios["layer"].max()) + 1)
    most, _ = most_and_least(run.mixing[0])
    contributions = _contributions(documents, run)
    matrices = {name for by_method in contributions.values() for name in by_method}
    maps = {layout: run.map(layout) for layout in run.layouts}
    sites = map_sites(pd.concat(maps.values()))
    components = run.components if "pca" in maps else {}
    has_classifier = len(run.predictions) > 0
    opening = _opening(tokens, ratios, most, texts, run)
    words = model_wording_of(run)
    return {
        "wording": wording_of(run)._asdict() | {"change": words.change, "by_change": words.by_change},
        "pointsPerSecond": labels.POINTS_PER_SECOND,
        "labels": {
            "methods": {OWN_SHARE: "Own share, by exchange", **labels.RATIO_LABELS},
            "checkpoints": dict(checkpoints),
            "matrices": PART_LABELS | labels.MATRIX_LABELS,
            "importance": labels.IMPORTANCE,
            "controls": labels.CONTROL_LABELS,
            "derivatives": {name: each for name, each in DERIVATIVE_LABELS.items() if name in moved},
            "layers": [labels.layer_label(layer, texts.encoder) for layer in (0, *layers)],
        },
        "captured": list(checkpoints)[-1],
        "ownBasis": sorted(names.OWN_BASIS),
        "method": most["method"],
        "layer": _first_stack_layers(texts, layers) if names.INPUT_PARTS in matrices else int(most["layer"]),
        "importance": _importance(tokens, run) if has_classifier else {},
        "reviews": _reviews(run.table("measure/mixing_by_review")),
        "answer": answer(run, finetuned=finetuned),
        "opens": opening,
        "curves": _counted_series(pd.concat([curves, derivatives]), layers)
        | _counted_series(own_shares(run).assign(method=OWN_SHARE), layers),
        "controls": _series(run.table("measure/mixing_controls"), layers, "control", "method", "checkpoint"),
        "sources": _series(sources[sources["grouping"] == "source"], layers, "method", "checkpoint", "group"),
        "classShares": _series(_class_share_rows(run), layers, "quantity") if has_classifier else {},
        "probes": _probes(run, layers) if has_classifier else {},
        "neighboursKept": {layout: _neighbours_kept(run.map_quality, layout, sites) for layout in maps},
        "documents": describe_documents(tokens, run),
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
            *(visible(texts.class_label(name), kept="") for name in labels.SPECIAL_MARKERS),
            *labels.WORD_CLASSES.values(),
        ],
        "specialClasses": [names.TOKEN_CLASSES.index(name) for name in labels.SPECIAL_MARKERS],
        "wordClasses": [names.TOKEN_CLASSES.index(name) for name in ("subword", "word")],
        "ratios": _ratios(ratios, tokens),
        "contributions": contributions,
        "sourcesKept": SOURCES,
        "matrices": [name for name in dict.fromkeys(MATRIX_ORDER) if name in matrices],
        "sinceInput": [name for name in (names.INPUT_PARTS, *ROLLOUTS) if name in matrices],
        "partsLimit": MAX_PARTS_TOKENS,
        "exchangeLimit": TOKEN_POSITIONS,
        "attention": encode_heads(
            (name, _heads(name, run)) for name in _first(documents[opening["document"]], documents)
        )
        | {"skip": bool({"attention_skip", "attention_norm"} & set(steps["step"]))},
        "sites": [
            {
                "layer": site.layer if site.point in names.LAYER_POINTS else 0,
                "point": site.point,
                "label": labels.site_label(site, texts.encoder),
                "reading": texts.reading(site),
            }
            for site in sites
        ],
        "mapNote": map_note(run),
        "maps": {layout: _map(layout, table, tokens, sites, components) for layout, table in maps.items()},
        "variances": [list(components[site].shares) if site in components else [None, None] for site in sites],
        "nearest": _nearest(run.nearest, tokens, sites),
    }


def _first_stack_layers(texts: CapturedTexts, layers: range) -> int:
    """Return the last layer with a decomposition of vectors: the last encoder layer in encoder-decoder models."""
    return texts.encoder or layers[-1]


def _class_share_rows(run: Results) -> pd.DataFrame:
    shares = class_shares(run)
    return shares.assign(quantity=shares["quantity"].map(CLASS_SHARE_LABELS)).dropna(subset="quantity")


def _numbers(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(each) else float(each) for each in values]


def _series(table: pd.DataFrame, layers: range, *keys: str) -> Data:
    """Return means and intervals by layer, in dictionaries nested by the columns `keys`."""
    series: Data = {}
    shown = table[table["layer"].isin(layers) & table["mean"].notna()]
    for path, values in curves_by(shown, keys, layers).items():
        place = series
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = values
    return series


def _counted_series(table: pd.DataFrame, layers: range) -> Data:
    """Return `_series` by method and checkpoint, with the number of texts of each series."""
    series = _series(table, layers, "method", "checkpoint")
    texts = table.groupby(["method", "checkpoint"])["documents"].max()
    for method, by_checkpoint in series.items():
        for checkpoint, curve in by_checkpoint.items():
            curve["texts"] = int(texts[method, checkpoint])
    return series


def _probes(run: Results, layers: range) -> Data:
    """Return the accuracies of probes by checkpoint and label, each followed by the control with random labels."""
    table = run.table("faithfulness/class_use")
    series = _series(table, layers, "checkpoint", "quantity", "group")
    return {
        checkpoint: {
            label + suffix: quantities[quantity + control][group]
            for (quantity, group), label in PROBE_LABELS.items()
            for control, suffix in (("", ""), ("_control", ": labels at random"))
            if group in quantities.get(quantity + control, {})
        }
        for checkpoint, quantities in series.items()
    }


def _opening(tokens: pd.DataFrame, ratios: pd.DataFrame, most: pd.Series, texts: CapturedTexts, run: Results) -> Data:
    """Return the initially shown text, with the median mean ratio in the layer of `most`, and a word for each text.

    If only some texts have token-level own shares, the median is computed over these texts.
    """
    rows = ratios[(ratios["checkpoint"] == most["checkpoint"]) & (ratios["layer"] == most["layer"])]
    value_T = _by_token(rows, tokens, np.zeros(len(rows), int), 1, [most["method"]])[0, 0]
    names_D = tokens["document"].unique()
    means = tokens.assign(value=value_T).groupby("document")["value"].mean().reindex(names_D).fillna(0)
    detailed = detailed_documents_of(run)
    candidates_D = np.flatnonzero(np.isin(names_D, detailed)) if detailed else np.arange(len(names_D))
    order = np.argsort(means.to_numpy()[candidates_D], kind="stable")
    document = int(candidates_D[order[(len(order) - 1) // 2]])
    is_measured_T = np.ones(len(tokens), bool)
    if OWN_SHARE in rows:
        own_share_T = _by_token(rows, tokens, np.zeros(len(rows), int), 1, [OWN_SHARE])[0, 0]
        is_measured_T = np.isfinite(own_share_T)
    words = []
    for name in names_D:
        own = np.flatnonzero(tokens["document"] == name)
        candidates = _opening_candidates([texts.readings[0][number] for number in own], is_measured_T[own])
        words.append(_opening_word(name, own, candidates, value_T, most, run))
    return {"document": document, "positions": words}


def _opening_candidates(pieces: Sequence[DisplayToken], is_measured: npt.NDArray[np.bool_]) -> list[int]:
    """Return the positions among which the chosen word is looked for, as the page opens.

    They are the long words whose own share was measured; without any, words of any length, words without an own share,
    or all tokens.
    """
    words = [place for place, piece in enumerate(pieces) if piece.token_class in ("word", "subword")]
    long_words = [place for place in words if pieces[place].text.isalpha() and len(pieces[place].text) >= MIN_WORD]
    for places in (long_words, words):
        measured = [place for place in places if is_measured[place]]
        if measured:
            return measured
    return long_words or words or list(range(len(pieces)))


def _opening_word(
    document: str,
    own: npt.NDArray[np.int64],
    words: Sequence[int],
    value_T: npt.NDArray[np.float64],
    most: pd.Series,
    run: Results,
) -> int:
    """Return the position of the word in a text with the largest single source.

    The source is another word, by the preferred contribution matrix in the layer of `most`. Without a matrix, the word
    with the largest ratio in `value_T` is returned. `own` has the token numbers of the text.
    """
    strength = np.nan_to_num(value_T[own])
    stored = run.matrices(most["checkpoint"], document)
    methods = [method for method in ("alti", *MATRICES) if method in stored]
    if methods:
        shares = row_shares(run.matrix(most["checkpoint"], document, methods[0])[most["layer"] - 1])
        others = np.nan_to_num(shares) * ~np.eye(len(own), dtype=bool)
        strength = others[:, words].max(axis=1)
    return max(words, key=lambda number: strength[number])


def _reviews(table: pd.DataFrame) -> Data:
    """Return the mean ratios of all reviews, or of at most `MAX_REVIEWS` equally spaced reviews."""
    documents = table["document"].unique()
    reviews = documents[:: -(-len(documents) // MAX_REVIEWS)]
    values: Data = {}
    place_N = pd.Index(reviews).get_indexer(pd.Index(table["document"]))
    layer_N, layers = pd.factorize(table["layer"], sort=True)
    rows_of_reviews = table.assign(place=place_N, layer_place=layer_N)[place_N >= 0]
    for (checkpoint, method), rows in rows_of_reviews.groupby(["checkpoint", "method"]):
        grid_LR = np.full((len(layers), len(reviews)), np.nan)
        grid_LR[rows["layer_place"], rows["place"]] = rows["mean"]
        values.setdefault(checkpoint, {})[method] = quantise(grid_LR, 0, 1)
    return {"names": reviews.tolist(), "total": len(documents), "values": values}


def _token_numbers(rows: pd.DataFrame, tokens: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return the index into `tokens` (complete documents) for each of the `rows`; -1 if it is missing."""
    first_tokens = tokens[tokens["position"] == 0]
    document_N = pd.Index(first_tokens["document"]).get_indexer(pd.Index(rows["document"]))
    token_N = first_tokens.index.to_numpy()[document_N] + rows["position"].to_numpy(np.int64)
    return np.where(document_N >= 0, token_N, -1)


def _by_token(
    rows: pd.DataFrame, tokens: pd.DataFrame, place_N: npt.NDArray[np.int64], places: int, columns: Sequence[str]
) -> npt.NDArray[np.float64]:
    """Return the `columns` of the N `rows` as `[columns, places, tokens]`; NaN for missing rows.

    `place_N` is the index of each row along `places`, or -1.
    """
    token_N = _token_numbers(rows, tokens)
    shown_N = (token_N >= 0) & (place_N >= 0)
    values = np.full((len(columns), places, len(tokens)), np.nan)
    values[:, place_N[shown_N], token_N[shown_N]] = rows[list(columns)].to_numpy(float)[shown_N].T
    return values


def _ratios(table: pd.DataFrame, tokens: pd.DataFrame) -> Data:
    methods = [method for method in RATIOS if method in table]
    shown = [*methods, *(name for name in [OWN_SHARE] if name in table)]
    values: Data = {}
    for checkpoint, rows in table.groupby("checkpoint", sort=False):
        layer_N, layers = pd.factorize(rows["layer"], sort=True)
        ratios_MLT = _by_token(rows, tokens, layer_N, len(layers), shown)
        values[checkpoint] = {method: quantise(each, 0, 1) for method, each in zip(shown, ratios_MLT, strict=True)}
    return {"methods": methods, "layers": int(table["layer"].max()), "values": values}


def _importance(tokens: pd.DataFrame, run: Results) -> Data:
    """Return the importance scores of tokens by name of the score."""
    scores, known = run.token_scores, list(names.IMPORTANCE_NAMES)
    name_N = pd.Index(known).get_indexer(pd.Index(scores["method"]))
    (scores_XT,) = _by_token(scores, tokens, name_N, len(known), ["score"])
    importance = {}
    for name, values in zip(known, scores_XT, strict=True):
        if np.isnan(values).all():
            continue
        limit = max(float(np.nanmax(np.abs(values))), 1e-9)
        importance[name] = {"limit": limit, "values": quantise(values, -limit, limit)}
    return importance


def _neighbours_kept(quality: pd.DataFrame, layout: str, sites: Sequence[Site]) -> list[list[float | None]]:
    """Return by site the shares of neighbours kept by a map and by chance; neighbours within the site if available."""
    rows = quality[(quality["layout"] == layout) & quality["point"].notna()]
    within = rows["measure"] == "neighbours_kept_within"
    rows = rows[within if within.any() else rows["measure"] == "neighbours_kept"].round(6)
    pairs = rows.set_index(["layer", "point"])[["value", "chance"]].reindex(pd.MultiIndex.from_tuples(sites))
    return [_numbers(pair) for pair in pairs.to_numpy(float)]


def _contributions(documents: Sequence[str], run: Results) -> Data:
    """Return the main sources of every token by document and method, for the first texts within the size limit."""
    contributions: Data = {}
    size = 0
    for document in documents:
        entries = _contributions_of(document, run)
        for entry in entries.values():
            size += len(entry["sources"]) + sum(len(each["shares"]) for each in entry["checkpoints"].values())
        if contributions and size > CONTRIBUTION_BYTES:
            break
        contributions[document] = entries
    return contributions


def _contributions_of(document: str, run: Results) -> Data:
    """Return the main sources of every token of a text, by method."""
    stored = {checkpoint: run.matrices(checkpoint, document) for checkpoint in names.CHECKPOINT_NAMES}
    entries = {}
    for method in dict.fromkeys(MATRIX_ORDER):
        checkpoints = [checkpoint for checkpoint, methods in stored.items() if method in methods]
        if checkpoints:
            matrices = {checkpoint: run.matrix(checkpoint, document, method) for checkpoint in checkpoints}
            entries[method] = largest_sources(matrices, SOURCES)
    return entries


def square_limits(xy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the limits of x and y `[2, 2]` of a square around the non-NaN points `[vectors, 2]`."""
    points = xy[np.isfinite(xy).all(axis=1)]
    low, high = (points.min(axis=0), points.max(axis=0)) if len(points) else (np.zeros(2), np.ones(2))
    half = MAP_MARGIN * max(float((high - low).max()), 1e-3) / 2
    middle = (low + high) / 2
    return np.stack([middle - half, middle + half], axis=1)


def _map(
    layout: str,
    table: pd.DataFrame,
    tokens: pd.DataFrame,
    sites: Sequence[Site],
    components: Mapping[Site, Components],
) -> Data:
    """Return the coordinates of tokens in a layout, as fractions of a square.

    Layouts in a single plane have one square for all sites. For principal components, each site has a separate centre,
    and all layers with the same point have a common scale.
    """
    points = pd.MultiIndex.from_tuples(sites)
    site_N = points.get_indexer(pd.MultiIndex.from_frame(table[["layer", "point"]]))
    xy = np.moveaxis(_by_token(table, tokens, site_N, len(sites), "xy"), 0, -1)
    if layout == "pca":
        xy *= np.array([components[site].scale if site in components else 1.0 for site in sites])[:, None, None]
    in_one_plane = layout in names.ONE_PLANE
    limits = np.stack([square_limits(xy.reshape(-1, 2))] if in_one_plane else [square_limits(each) for each in xy])
    if layout == "pca":
        limits = _limits_by_point(limits, [site.point if site in components else str(site) for site in sites])
    low, high = limits[:, None, :, 0], limits[:, None, :, 1]
    fractions = (xy - low) / (high - low)
    absent = np.setdiff1d(np.arange(len(sites)), site_N)
    x, y = (quantise(fractions[..., axis], 0, 1) for axis in (0, 1))
    return {"x": x, "y": y, "absent": absent.tolist()}


def _limits_by_point(limits: npt.NDArray[np.float64], points: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return squares `[sites, 2, 2]` with the same centres, enlarged to the largest square of the same point."""
    halves = pd.Series((limits[:, 0, 1] - limits[:, 0, 0]) / 2)
    largest = halves.groupby(list(points)).transform("max").to_numpy()[:, None]
    middles = limits.mean(axis=-1)
    return np.stack([middles - largest, middles + largest], axis=-1)


def _first(name: str, documents: Sequence[str]) -> list[str]:
    """Return the documents, starting with `name`."""
    return [name, *(each for each in documents if each != name)]


def _heads(document: str, run: Results) -> dict[str, Parts]:
    """Return the stored parts of a text's heads by checkpoint."""
    stored = {checkpoint: run.heads(checkpoint, document) for checkpoint in names.CHECKPOINT_NAMES}
    return {checkpoint: parts for checkpoint, parts in stored.items() if parts}


def _nearest(table: pd.DataFrame, tokens: pd.DataFrame, sites: Sequence[Site]) -> Data:
    """Return the nearest neighbours of each token in the full space, `[sites, tokens, number]`, if on the page."""
    rows_NK = np.stack(table["nearest"].tolist()).astype(np.int64)
    number_of = np.full(max(rows_NK.max(initial=0), tokens["row"].max()) + 1, MISSING_CODE, np.uint16)
    number_of[tokens["row"]] = np.arange(len(tokens))
    token_N = _token_numbers(table, tokens)
    site_N = pd.MultiIndex.from_tuples(sites).get_indexer(pd.MultiIndex.from_frame(table[["layer", "point"]]))
    on_page = (token_N >= 0) & (site_N >= 0)
    nearest = np.full((len(sites), len(tokens), rows_NK.shape[1]), MISSING_CODE, np.uint16)
    nearest[site_N[on_page], token_N[on_page]] = number_of[rows_NK[on_page]]
    return {"number": rows_NK.shape[1], "tokens": encode(nearest)}
