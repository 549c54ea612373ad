"""The data of the page, as JSON with the schema `SHAPE`: measures of a run and of its captured texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import ceil

import numpy as np
import pandas as pd

from attnmix.core import names
from attnmix.core.names import OWN_SHARE, Site
from attnmix.core.settings import MAX_PARTS_TOKENS
from attnmix.core.store.heads import Parts
from attnmix.core.store.results import Results
from attnmix.core.store.runs import map_sites
from attnmix.figures import labels
from attnmix.figures.tokens import CapturedTexts, DisplayToken, read_captured
from attnmix.measures.matrices import MATRICES, ROLLOUTS, TOKEN_POSITIONS
from attnmix.measures.ratios import RATIOS
from attnmix.page.answer import answer, own_shares
from attnmix.page.arrays import curves_by, encode_heads, largest_sources, quantise, visible
from attnmix.page.cautions import Cautions
from attnmix.page.documents import describe_documents
from attnmix.page.map_data import encode_map, encode_nearest, list_kept_neighbours
from attnmix.page.opening import choose_opening
from attnmix.page.sentences import class_shares, map_note, most_and_least
from attnmix.page.shape import Data
from attnmix.page.token_arrays import arrange_by_token
from attnmix.page.wording import model_wording_of, wording_of

MAX_TOKENS = 4096  # maximum total length of the texts on a page
CONTRIBUTION_BYTES = 8_000_000  # maximum size of the contribution matrices on a page, before compression
SOURCES = 12
"""The number of sources kept per token for the largest shares in each checkpoint, and for the largest changes."""
MAX_REVIEWS = 1000  # maximum number of reviews with mean ratios on a page
PART_LABELS = {names.INPUT_PARTS: "Exact parts since the input"}
CLASS_SHARE_LABELS = {
    "before": "Before fine-tuning",
    "after": "After fine-tuning",
    "permuted": "Permuted classes: 95th percentile",
}
MATRIX_ORDER = (names.INPUT_PARTS, "alti", *MATRICES)  # the first available matrix of a text is shown initially
DERIVATIVE_LABELS = {
    "norm_of_sum": "Derivative, others changed together",
    "norm_of_block": "Derivative, others changed independently",
    "sum_of_norms": "Derivative, sum over single tokens",
}
PROBE_LABELS = {
    ("probe_class", "read"): "Class, by the token that the head reads",
    ("probe_class", "others"): "Class, by other tokens",
    ("probe_token", "others"): "Identity of the token",
    ("probe_position", "others"): "Position of the token",
    ("lens_agreement", "others"): "The head itself, on other tokens",
}
"""Labels of the curves of probes, by quantity and group in `class_use.csv`."""


def shown_tokens(tokens: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Return the tokens of the texts on the page, and the number of texts that are not on the page.

    The page contains as many of the first texts as `MAX_TOKENS` allows, and at least one. The new column `row` contains
    each token's row number in `tokens`.
    """
    lengths = tokens.groupby("document", sort=False).size()
    is_first = np.arange(len(lengths)) == 0
    is_within_limit = lengths.cumsum() <= MAX_TOKENS
    shown_lengths = lengths[is_within_limit | is_first]
    is_shown = tokens["document"].isin(shown_lengths.index)
    rows = tokens[is_shown].reset_index(names="row")
    return rows, len(lengths) - len(shown_lengths)


def page_data(
    run: Results,
    tokens: pd.DataFrame,
    checkpoints: Mapping[str, str],
    cautions: Cautions,
    *,
    finetuned: bool = True,
    synthetic: bool = False,
) -> Data:
    """Return the data of the page; the schema `attnmix.page.shape.SHAPE` describes the keys.

    Args:
        run: The results of the run.
        tokens: The tokens on the page.
        checkpoints: The labels of the checkpoints by name, with the captured checkpoint last.
        cautions: The limitations of the findings.
        finetuned: False for a pipeline run without fine-tuning.
        synthetic: True if the texts are machine-generated.
    """
    documents = tokens["document"].unique().tolist()
    steps = run.steps.dropna(subset="mean")
    texts = read_captured(tokens, steps)
    ratios = run.captured_ratios(documents)
    layers = range(1, int(ratios["layer"].max()) + 1)
    mixing_curves, _ = run.mixing
    highest_mean, _ = most_and_least(mixing_curves)  # the row of the layer with the highest mean ratio
    derivatives = _read_derivatives(run)
    contributions = _encode_contributions(documents, run)
    matrices: set[str] = set().union(*contributions.values())  # the names of all matrices
    maps = {layout: run.map(layout) for layout in run.layouts}
    sites = map_sites(pd.concat(maps.values()))
    opening = choose_opening(tokens, ratios, highest_mean, texts, run)
    opening_document = documents[opening["document"]]
    has_classifier = len(run.predictions) > 0
    return {
        # Words and names
        "wording": _describe_wording(run),
        "pointsPerSecond": labels.POINTS_PER_SECOND,
        "labels": _list_labels(checkpoints, set(derivatives["method"]), layers, texts.encoder),
        "captured": list(checkpoints)[-1],
        "ownBasis": sorted(names.OWN_BASIS),
        # The initially selected ratio and layer
        "method": highest_mean["method"],
        "layer": _choose_layer(texts, layers, matrices, highest_mean),
        # Importance of tokens, statistics of reviews, and the summary of the run
        "importance": _encode_importance(tokens, run) if has_classifier else {},
        "reviews": _encode_reviews(run.table("measure/mixing_by_review")),
        "answer": answer(run, finetuned=finetuned, synthetic=synthetic),
        "cautions": {"answer": cautions.answer, "map": cautions.map},
        "opens": opening,  # the initially selected text, and a token in each text
        # Measures by layer
        **_list_all_curves(run, derivatives, layers, has_classifier),
        "neighboursKept": {layout: list_kept_neighbours(run.map_quality, layout, sites) for layout in maps},
        # Texts, and measures of their tokens
        "documents": describe_documents(tokens, run),
        **_describe_tokens(texts),
        "ratios": _encode_ratios(ratios, tokens),
        "contributions": contributions,
        "sourcesKept": SOURCES,
        "matrices": _select_names(MATRIX_ORDER, matrices),
        "sinceInput": _select_names((names.INPUT_PARTS, *ROLLOUTS), matrices),
        "partsLimit": MAX_PARTS_TOKENS,
        "exchangeLimit": TOKEN_POSITIONS,
        "attention": _encode_attention(opening_document, documents, set(steps["step"]), run),
        # Maps
        "sites": [_describe_site(site, texts) for site in sites],
        "mapNote": map_note(run),
        **_encode_maps(maps, sites, tokens, run),
    }


def _list_all_curves(run: Results, derivatives: pd.DataFrame, layers: range, has_classifier: bool) -> Data:
    """Return the curves by layer of measures, controls, groups of sources, class shares and probes.

    Without a classifier, there are no curves of class shares and probes.
    """
    return {
        "curves": _list_curves(run, derivatives, layers),
        "controls": _nest_curves(run.table("measure/mixing_controls"), layers, "control", "method", "checkpoint"),
        "sources": _list_source_curves(run, layers),
        "classShares": _list_class_share_curves(run, layers) if has_classifier else {},
        "probes": _list_probe_curves(run, layers) if has_classifier else {},
    }


def _describe_tokens(texts: CapturedTexts) -> Data:
    """Return the input tokens of the encoder and, if there is one, of the decoder, and the names of token classes.

    `encoder` is the number of encoder layers in an encoder-decoder model; otherwise None. `specialClasses` and
    `wordClasses` contain the indices of the classes for special tokens, and for words and subwords.
    """
    return {
        "encoder": texts.encoder,
        "readings": [_describe_reading(pieces) for pieces in texts.readings],
        "classNames": _list_class_names(texts),
        "specialClasses": [names.TOKEN_CLASSES.index(name) for name in labels.SPECIAL_MARKERS],
        "wordClasses": [names.TOKEN_CLASSES.index(name) for name in ("subword", "word")],
    }


def _encode_maps(maps: Mapping[str, pd.DataFrame], sites: Sequence[Site], tokens: pd.DataFrame, run: Results) -> Data:
    """Return the coordinates by layout, the nearest neighbours, and the explained variances by site.

    For each site, `variances` contains the explained variance ratios of the two principal components on the map, or
    None if these ratios are unknown.
    """
    components = run.components if "pca" in maps else {}
    variances: list[list[float | None]] = []
    for site in sites:
        if site in components:
            variances.append(list(components[site].shares))
        else:
            variances.append([None, None])
    return {
        "maps": {layout: encode_map(layout, table, tokens, sites, components) for layout, table in maps.items()},
        "variances": variances,
        "nearest": encode_nearest(run.nearest, tokens, sites),
    }


def _describe_wording(run: Results) -> Data:
    """Return the words that depend on the origin of the results: a pipeline run, or texts measured with the API.

    The keys are the fields of `Wording` and two phrases for the cause of a difference between the models. `change` is
    the subject of a sentence, such as “fine-tuning”. `by_change` follows a noun, such as “by fine-tuning”.
    """
    wording: Data = wording_of(run)._asdict()
    model_wording = model_wording_of(run)
    wording["change"] = model_wording.change
    wording["by_change"] = model_wording.by_change
    return wording


def _list_labels(
    checkpoints: Mapping[str, str],
    derivatives: Set[str],
    layers: range,
    encoder: int | None,
) -> Data:
    """Return the labels of all measures and layers.

    `derivatives` contains the names of the measured derivatives, and `encoder` is the number of encoder layers in an
    encoder-decoder model.
    """
    derivative_labels = {}
    for name, label in DERIVATIVE_LABELS.items():
        if name in derivatives:
            derivative_labels[name] = label
    return {
        "methods": {OWN_SHARE: "Own share, by exchange", **labels.RATIO_LABELS},
        "checkpoints": dict(checkpoints),
        "matrices": PART_LABELS | labels.MATRIX_LABELS,
        "importance": labels.IMPORTANCE,
        "controls": labels.CONTROL_LABELS,
        "derivatives": derivative_labels,
        "layers": [labels.layer_label(layer, encoder) for layer in (0, *layers)],
    }


def _describe_reading(pieces: Sequence[DisplayToken]) -> Data:
    """Return the labels, texts and classes of the input tokens of an encoder or decoder.

    `apart` is 1 for tokens that are not directly attached to the previous token.
    """
    return {
        "names": [visible(piece.label, kept="") for piece in pieces],
        "words": [visible(piece.text, kept="") for piece in pieces],
        "apart": [int(piece.begins) for piece in pieces],
        "classes": [names.TOKEN_CLASSES.index(piece.token_class) for piece in pieces],
    }


def _describe_site(site: Site, texts: CapturedTexts) -> Data:
    """Return the layer, capture point and label of a site, and the index of its input tokens in `texts.readings`."""
    return {
        "layer": site.layer if site.point in names.LAYER_POINTS else 0,  # 0 for points outside the layers
        "point": site.point,
        "label": labels.site_label(site, texts.encoder),
        "reading": texts.reading(site),
    }


def _list_class_names(texts: CapturedTexts) -> list[str]:
    """Return the names of the token classes; a class of special tokens has an empty name if it does not occur."""
    class_names = []
    for token_class in labels.SPECIAL_MARKERS:
        label = texts.class_label(token_class)
        class_names.append(visible(label, kept=""))
    class_names.extend(labels.WORD_CLASSES.values())
    return class_names


def _select_names(ordered: Sequence[str], available: Set[str]) -> list[str]:
    """Return the distinct `available` names in the order of `ordered`."""
    return [name for name in dict.fromkeys(ordered) if name in available]


def _choose_layer(texts: CapturedTexts, layers: range, matrices: Set[str], highest_mean: pd.Series) -> int:
    """Return the initially selected layer: the layer in `highest_mean`, the row with the highest mean mixing ratio.

    If the contributions of input embeddings were measured, return the last layer in which they are defined: the last
    encoder layer in an encoder-decoder model, and the last layer in any other model.
    """
    if names.INPUT_PARTS in matrices:
        return texts.encoder or layers[-1]  # `encoder` is None unless the model is an encoder-decoder model
    return int(highest_mean["layer"])


def _read_derivatives(run: Results) -> pd.DataFrame:
    """Return the mean share of other tokens in the derivatives of each layer's outputs with respect to its inputs."""
    rows = run.table("measure/derivatives").dropna(subset="mean")
    # The quantity `level` is the share of other tokens.
    return rows.query("quantity == 'level' and reference == 'layer_input'")


def _list_class_share_curves(run: Results, layers: range) -> Data:
    """Return the curves of the class shares by display label; quantities without a label are omitted."""
    shares = class_shares(run)
    quantity_labels = shares["quantity"].map(CLASS_SHARE_LABELS)
    labelled_shares = shares.assign(quantity=quantity_labels).dropna(subset="quantity")
    return _nest_curves(labelled_shares, layers, "quantity")


def _nest_curves(table: pd.DataFrame, layers: range, *keys: str) -> Data:
    """Return curves (means and intervals by layer) in dictionaries that are nested by the columns `keys`.

    With the keys `method` and `checkpoint`, for example, the result contains the curves by checkpoint for each method.
    """
    is_shown = table["layer"].isin(layers) & table["mean"].notna()
    curves = curves_by(table[is_shown], keys, layers)
    nested: Data = {}
    for path, curve in curves.items():  # a path contains one value for each of the keys
        *outer_keys, last_key = path
        innermost = nested
        for key in outer_keys:
            innermost = innermost.setdefault(key, {})
        innermost[last_key] = curve
    return nested


def _list_curves_with_counts(table: pd.DataFrame, layers: range) -> Data:
    """Return the curves by method and checkpoint, each with the number of averaged texts as `texts`."""
    curves = _nest_curves(table, layers, "method", "checkpoint")
    texts = table.groupby(["method", "checkpoint"])["documents"].max()
    for method, by_checkpoint in curves.items():
        for checkpoint, curve in by_checkpoint.items():
            curve["texts"] = int(texts[method, checkpoint])
    return curves


def _list_curves(run: Results, derivatives: pd.DataFrame, layers: range) -> Data:
    """Return the curves of the ratios, of the derivatives and of the own share, by method and checkpoint."""
    ratios_and_derivatives = pd.concat([run.table("measure/mixing"), derivatives])
    curves = _list_curves_with_counts(ratios_and_derivatives, layers)
    shares = own_shares(run).assign(method=OWN_SHARE)
    curves.update(_list_curves_with_counts(shares, layers))
    return curves


def _list_source_curves(run: Results, layers: range) -> Data:
    """Return, for each group of source tokens, the curves of ratios that count only this group as other tokens.

    The result is nested by ratio, checkpoint and group.
    """
    table = run.table("measure/mixing_by_group")
    by_source = table[table["grouping"] == "source"]
    return _nest_curves(by_source, layers, "method", "checkpoint", "group")


def _list_probe_curves(run: Results, layers: range) -> Data:
    """Return the accuracy curves of probes by checkpoint and display label.

    The curve of each probe is followed by the curve of its control task, a probe trained with permuted labels.
    """
    table = run.table("faithfulness/class_use")
    nested = _nest_curves(table, layers, "checkpoint", "quantity", "group")
    curves: Data = {}
    for checkpoint, quantities in nested.items():  # `quantities` contains curves by quantity and group
        labelled = {}
        for (quantity, group), label in PROBE_LABELS.items():
            accuracies = quantities.get(quantity, {})
            if group in accuracies:
                labelled[label] = accuracies[group]
            controls = quantities.get(f"{quantity}_control", {})
            if group in controls:
                labelled[f"{label}: permuted labels"] = controls[group]
        curves[checkpoint] = labelled
    return curves


def _encode_reviews(table: pd.DataFrame) -> Data:
    """Return the mean ratios `[L, R]` of R reviews in L layers, by checkpoint and method.

    `table` has N rows, each with a mean ratio of one review in one layer. If there are more than `MAX_REVIEWS`
    reviews, every n-th review is included, for the smallest sufficient n. `total` is the number of all reviews.
    """
    documents = table["document"].unique()
    step = ceil(len(documents) / MAX_REVIEWS)
    reviews = documents[::step]
    review_N = pd.Index(reviews).get_indexer(pd.Index(table["document"]))  # the index of each row's review, or -1
    layer_N, layers = pd.factorize(table["layer"], sort=True)  # the index of each row's layer, and the sorted layers
    is_included_N = review_N >= 0
    included = table.assign(review_index=review_N, layer_index=layer_N)[is_included_N]
    values: Data = {}
    for (checkpoint, method), rows in included.groupby(["checkpoint", "method"]):
        mean_LR = np.full((len(layers), len(reviews)), np.nan)
        mean_LR[rows["layer_index"], rows["review_index"]] = rows["mean"]
        by_method = values.setdefault(checkpoint, {})
        by_method[method] = quantise(mean_LR, 0, 1)
    return {
        "names": reviews.tolist(),
        "total": len(documents),
        "values": values,
    }


def _encode_ratios(table: pd.DataFrame, tokens: pd.DataFrame) -> Data:
    """Return the mixing ratios and, if measured, the own shares of the tokens.

    `values` contains the arrays `[layers, tokens]` by checkpoint and method. `methods` lists the ratios, and `layers`
    is the number of layers.
    """
    methods = [method for method in RATIOS if method in table]
    columns = list(methods)
    if OWN_SHARE in table:
        columns.append(OWN_SHARE)
    values: Data = {}
    for checkpoint, rows in table.groupby("checkpoint", sort=False):
        layer_N, sorted_layers = pd.factorize(rows["layer"], sort=True)  # `layer_N`: the index of each row's layer
        ratios = arrange_by_token(rows, tokens, layer_N, len(sorted_layers), columns)  # [columns, layers, tokens]
        by_method = {}
        for column, ratio_LT in zip(columns, ratios, strict=True):
            by_method[column] = quantise(ratio_LT, 0, 1)
        values[checkpoint] = by_method
    return {
        "methods": methods,
        "layers": int(table["layer"].max()),  # layers are numbered from 1
        "values": values,
    }


def _encode_importance(tokens: pd.DataFrame, run: Results) -> Data:
    """Return the importance scores of the tokens by method, encoded between `-limit` and `limit`.

    Methods without scores are omitted.
    """
    table = run.token_scores
    methods = list(names.IMPORTANCE_NAMES)
    method_N = pd.Index(methods).get_indexer(pd.Index(table["method"]))  # the index of each row's method, or -1
    columns = arrange_by_token(table, tokens, method_N, len(methods), ["score"])  # [columns, methods, tokens]
    score_MT = columns[0]
    importance = {}
    for method, score_T in zip(methods, score_MT, strict=True):
        if np.isnan(score_T).all():
            continue
        largest = float(np.nanmax(np.abs(score_T)))
        limit = max(largest, 1e-9)  # avoids a division by 0 if all scores are 0
        importance[method] = {"limit": limit, "values": quantise(score_T, -limit, limit)}
    return importance


def _encode_contributions(documents: Sequence[str], run: Results) -> Data:
    """Return the main sources of every token by document and method.

    The result contains as many of the first texts as `CONTRIBUTION_BYTES` allows, and at least one.
    """
    contributions: Data = {}
    size = 0
    for document in documents:
        by_method = _encode_matrices(document, run)
        size += _measure_sources(by_method)
        if contributions and size > CONTRIBUTION_BYTES:
            break
        contributions[document] = by_method
    return contributions


def _measure_sources(by_method: Data) -> int:
    """Return the size in bytes of a text's sources and their shares by method, as encoded by `largest_sources`."""
    size = 0
    for encoded in by_method.values():
        size += len(encoded["sources"])
        for arrays in encoded["checkpoints"].values():
            size += len(arrays["shares"])
    return size


def _encode_matrices(document: str, run: Results) -> Data:
    """Return the main sources of every token of a text, for each contribution matrix with stored values."""
    stored = {checkpoint: run.matrices(checkpoint, document) for checkpoint in names.CHECKPOINT_NAMES}
    distinct_methods = dict.fromkeys(MATRIX_ORDER)
    sources = {}
    for method in distinct_methods:
        matrices = {}  # the matrices of this method by checkpoint
        for checkpoint, methods in stored.items():
            if method in methods:
                matrices[checkpoint] = run.matrix(checkpoint, document, method)
        if matrices:
            sources[method] = largest_sources(matrices, SOURCES)
    return sources


def _encode_attention(opening_document: str, documents: Sequence[str], steps: Set[str], run: Results) -> Data:
    """Return the attention heads of texts within the size limit, starting with the initially shown text.

    `steps` contains the names of the measured steps within layers. The entry `skip` is True if they show that a skip
    connection follows attention.
    """
    ordered_documents = dict.fromkeys([opening_document, *documents])  # without repetition
    encoded = encode_heads((document, _read_heads(document, run)) for document in ordered_documents)
    encoded["skip"] = not steps.isdisjoint({"attention_skip", "attention_norm"})
    return encoded


def _read_heads(document: str, run: Results) -> dict[str, Parts]:
    """Return the stored head arrays of a text by checkpoint; checkpoints without stored arrays are omitted."""
    heads: dict[str, Parts] = {}
    for checkpoint in names.CHECKPOINT_NAMES:
        arrays = run.heads(checkpoint, document)
        if arrays:
            heads[checkpoint] = arrays
    return heads
