"""The csv files of `measure`: means over documents with their bootstrap intervals.

Every mean is declared once, as a `Mean`: the rows that it gives to a table, and how documents become sums and counts.
One loop resamples them all.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import STEP_MEASURES, STEP_POINTS, Site
from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Doubles, Draws, Resampled, jackknife, spearman_with_depth
from attnmix.measures.batches import GROUPS, LENGTHS, length_class
from attnmix.measures.controls import CONTROLS, RANDOM
from attnmix.measures.derivatives import FORMS, REFERENCES
from attnmix.measures.documents import CLASSES
from attnmix.measures.geometry import GEOMETRY_MEASURES
from attnmix.measures.identities import IDENTITIES
from attnmix.measures.input_parts import QUANTITIES, RULES
from attnmix.measures.matrices import ROLLOUTS, with_rollouts
from attnmix.measures.ratios import RATIOS, preferred_ratio
from attnmix.measures.sinks import SINK_MEASURES
from attnmix.measures.swaps import DONORS, SWAPS
from attnmix.measures.variance_shares import MAX_TEXTS, PARTS, Moments, class_share_null, products, usable

Totals = tuple[Doubles, Doubles]
"""Sums `[D, ...]` of D documents, and counts that broadcast to them."""
Labels = dict[str, Any]
"""The values of columns."""

DIFFERENCE = "difference"  # fine-tuned minus pretrained, of the same documents
MEAN_COSINE_ACROSS_TEXTS = "mean_cosine_across"  # mean over pairs of texts (Ethayarajh, EMNLP 2019)
MEAN_COSINES_BY_CLASS = (
    "mean_cosine_same_class",
    "mean_cosine_other_class",
)  # the same of texts by their predicted class
LENGTH_MEASURES = ("others_length", "own_length")
SHARES = tuple(f"share_{part}" for part in PARTS)
PERMUTED = "share_class_permuted"
TOKEN_SUBSETS: dict[str, tuple[str, Any]] = {
    "words": ("token_class", [CLASSES.index("word"), CLASSES.index("subword")]),
    "all": ("token_class", slice(None)),
    "without_first": ("position", slice(1, None)),
}
"""The tokens that a mean of `mixing_weighted` is over: one of `GROUPS`, and which groups of it."""

_INTERVAL = ("mean", "ci_low", "ci_high")
_SIMULTANEOUS = ("simultaneous_low", "simultaneous_high")
_DEPTH = ("depth_spearman", "depth_ci_low", "depth_ci_high")
_BELOW = ("below", "below_low", "below_high", "below_simultaneous_low", "below_simultaneous_high")
_COUNTS = ("tokens", "documents")
_KEYS = ("layer", "method")
COLUMNS: dict[str, tuple[str, ...]] = {
    "mixing": ("checkpoint", *_KEYS, *_INTERVAL, *_SIMULTANEOUS, *_COUNTS),
    "mixing_weighted": ("checkpoint", "weight", "tokens_of", *_KEYS, *_INTERVAL, *_DEPTH, "documents"),
    "mixing_controls": ("checkpoint", "control", *_KEYS, *_INTERVAL, *_BELOW, *_COUNTS),
    "mixing_by_group": ("checkpoint", "grouping", "group", *_KEYS, *_INTERVAL, *_COUNTS),
    "mixing_by_review": ("checkpoint", "document", "label", *_KEYS, "mean", "tokens"),
    "geometry": ("checkpoint", "layer", "point", "measure", *_INTERVAL, "documents"),
    "derivatives": ("checkpoint", "quantity", "reference", *_KEYS, *_INTERVAL, *_SIMULTANEOUS, *_COUNTS),
    "derivatives_by_review": ("checkpoint", "document", "quantity", "reference", *_KEYS, "mean", "tokens"),
    "parts": ("checkpoint", "rule", "quantity", "layer", *_INTERVAL, *_SIMULTANEOUS, *_COUNTS),
    "identities": ("checkpoint", "layer", "identity", "largest_error_ppm", "documents"),
}
"""The columns of every csv file."""


Rows = Mapping[str, npt.NDArray[Any]]
"""D documents in the statistics: arrays `[D, ...]` by name, as in `DocumentMeasures.sums`; `document` names them."""
PART_DOCUMENTS = 256  # in memory at a time


class Mean(NamedTuple):
    """A mean over documents in every checkpoint: some rows of one table."""

    table: str
    labels: Labels  # by column; those with several values are the axes of the mean, in this order
    totals: Callable[[Rows], Totals]
    checkpoints: Sequence[str] = ()  # those that have it; empty: all, and their `DIFFERENCE`
    more: Callable[[str, Resampled], dict[str, Any]] | None = None
    """Further columns, and those that replace others, of a checkpoint."""
    complete: bool = True  # True if cells without any token are rows too


def mean_tables(means: Iterable[Mean], rows: Mapping[str, Rows], draws: Draws) -> dict[str, pd.DataFrame]:
    """Return the tables of the declared `means` by name, from the `rows` of each checkpoint's documents."""
    frames: dict[str, list[pd.DataFrame]] = defaultdict(list)
    for mean in means:
        for checkpoint, resampled in resample_checkpoints(mean, rows, draws).items():
            columns: dict[str, Any] = dict(zip(_INTERVAL, resampled.interval(), strict=True))
            columns["tokens"] = resampled.counts
            columns["documents"] = resampled.documents
            if _SIMULTANEOUS[0] in COLUMNS[mean.table]:
                _, low, high = resampled.simultaneous()
                columns.update(zip(_SIMULTANEOUS, (low, high), strict=True))
            if mean.more is not None:
                columns.update(mean.more(checkpoint, resampled))
            cells = _rows(mean.table, checkpoint, mean.labels, columns)
            if not mean.complete:
                cells = cells.dropna(subset="mean")
            frames[mean.table].append(cells)
    return {name: pd.concat(parts) for name, parts in frames.items()}


def resample_checkpoints(mean: Mean, rows: Mapping[str, Rows], draws: Draws) -> dict[str, Resampled]:
    """Return the mean of each checkpoint that has it, and of the paired difference where two have."""
    names = mean.checkpoints or [name for name in rows if name != RANDOM]
    means = {}
    for name in names:
        totals = map(mean.totals, in_parts(rows[name]))
        means[name] = draws.resample(totals)
    if not mean.checkpoints and len(means) == 2:
        means[DIFFERENCE] = means["finetuned"].minus(means["pretrained"])
    return means


def in_parts(rows: Rows) -> Iterator[Rows]:
    """Yield `PART_DOCUMENTS` of the documents at a time; arrays on disk are read where they are used."""
    documents = len(next(iter(rows.values())))
    for start in range(0, documents, PART_DOCUMENTS):
        yield {name: array[start : start + PART_DOCUMENTS] for name, array in rows.items()}


def _rows(table: str, checkpoint: str, labels: Labels, columns: Mapping[str, Any]) -> pd.DataFrame:
    """Return a row for each combination of the labels, the last one running fastest."""
    combinations = list(product([checkpoint], *labels.values()))
    cells: dict[str, Any] = dict(zip(["checkpoint", *labels], zip(*combinations, strict=True), strict=True))
    if "site" in cells:
        sites = cells.pop("site")
        cells["layer"] = [site.layer for site in sites]
        cells["point"] = [site.point for site in sites]
    for name, values in columns.items():
        cells[name] = np.ravel(values)
    frame = pd.DataFrame({name: cells.get(name, np.nan) for name in COLUMNS[table]})
    counts = [name for name in _COUNTS if name in frame]
    return frame.astype(dict.fromkeys(counts, "Int64"))


def mixing_tables(
    rows: Mapping[str, Rows],
    identities: Mapping[str, Doubles],
    gains: Mapping[str, Doubles],
    methods: Sequence[str],
    sites: Sequence[Site],
    draws: Draws,
    seed: int,
    sources: Sequence[str] = (),
    names: Collection[str] = tuple(COLUMNS),
) -> dict[str, pd.DataFrame]:
    """Return the tables of ratios, controls, geometry and identities by name; all arguments are by checkpoint.

    Those of the model with random weights are among the `rows`. `identities` are the largest error and the number of
    documents `[2, levels, identities]`, none where a level does not have one; `gains` `attention_gain` `[layers]`, of
    some checkpoints or none; `sites` those of the geometry. `sources` are `SOURCES` where the documents are pairs of
    texts. Of the tables of means only those among `names` are made, and always `geometry`.
    """
    checkpoints = list(identities)
    numbers = range(1, rows[checkpoints[0]]["lengths"].shape[1] + 1)
    heads = rows[checkpoints[0]]["by_head"].shape[1]
    attention = {"layer": numbers, "point": ["attention"]}
    ratios = {"layer": numbers, "method": methods}
    steps = {"layer": numbers, "point": list(STEP_POINTS), "measure": STEP_MEASURES}
    by_head = {"grouping": ["head"], "group": range(1, heads + 1), "layer": numbers, "method": ["attn_n"]}
    to_first = attention | {"measure": ["attention_to_first"]}
    mixing = Mean("mixing", ratios, partial(_ratios, "all"))
    true_means = resample_checkpoints(mixing, rows, draws)
    means = [mixing]
    for tokens_of, weight in product(TOKEN_SUBSETS, ("token", "review")):
        labels = {"weight": [weight], "tokens_of": [tokens_of], "layer": ["all", *numbers], "method": methods}
        more = _depth if (tokens_of, weight) == ("all", "token") else None
        means.append(Mean("mixing_weighted", labels, partial(_with_all_layers, tokens_of, weight), more=more))
    for name in CONTROLS:
        only = (RANDOM,) if name == "random_weights" else ()
        paired_means = true_means
        if name == "corpus_value" and (np.asarray(rows[checkpoints[0]][f"{name}_counts"]) == 0).any():
            paired = mixing._replace(totals=partial(_ratios_beside, name))
            paired_means = resample_checkpoints(paired, rows, draws)
        more_columns = partial(below, paired_means)
        means.append(Mean("mixing_controls", {"control": [name]} | ratios, partial(_stored, name), only, more_columns))
    group_mean = partial(Mean, "mixing_by_group", checkpoints=checkpoints, complete=False)
    for grouping, groups in GROUPS.items():
        means.append(group_mean({"grouping": [grouping], "group": groups} | ratios, partial(_stored, grouping)))
    for name in sources:
        means.append(group_mean({"grouping": ["source"], "group": [name]} | ratios, partial(_stored, name)))
    means.append(group_mean({"grouping": ["length"], "group": LENGTHS} | ratios, _by_length))
    means.append(group_mean(by_head, partial(_stored, "by_head")))  # NaN where a stack has fewer heads
    geometry_mean = partial(Mean, "geometry", checkpoints=checkpoints)
    means.append(geometry_mean({"site": sites, "measure": GEOMETRY_MEASURES}, partial(_stored, "geometry")))
    means.append(geometry_mean(steps, partial(_stored, "steps"), complete=False))
    means.append(geometry_mean(to_first, partial(_stored, "to_first")))
    means.append(geometry_mean(attention | {"measure": SINK_MEASURES}, partial(_stored, "sinks"), complete=False))
    means.append(Mean("geometry", attention | {"measure": LENGTH_MEASURES}, _lengths))
    wanted = {*names, "geometry"}
    tables = mean_tables([mean for mean in means if mean.table in wanted], rows, draws)
    frames = [tables["geometry"]]
    errors = []
    for name, gains_L in gains.items():
        frames.append(_rows("geometry", name, attention | {"measure": ["attention_gain"]}, {"mean": gains_L}))
    for name, (largest, checked) in identities.items():
        levels = {"layer": range(len(largest)), "identity": list(IDENTITIES)}
        columns = {"largest_error_ppm": 1e6 * largest, "documents": checked}
        errors.append(_rows("identities", name, levels, columns).query("documents > 0"))
    rows_of_checkpoints = {name: rows[name] for name in checkpoints}
    frames.extend(cosine_rows(rows_of_checkpoints, sites))
    frames.extend(share_rows(rows_of_checkpoints, attention, seed))
    tables["geometry"] = pd.concat(frames)
    tables["identities"] = pd.concat(errors)
    return tables


def cosine_rows(rows: Mapping[str, Rows], sites: Sequence[Site]) -> Iterator[pd.DataFrame]:
    """Yield the rows of `geometry` on mean cosines of tokens of different texts: of all, and by predicted class."""
    for checkpoint, document_rows in rows.items():
        sums_NXD, tokens_N, classes_N = _first_texts(document_rows, "unit_sums")
        one_class_N = np.zeros(len(tokens_N))
        kept = usable(classes_N, tokens_N)
        intervals = []  # by site: the mean and its ends, of all texts, of the same class and of another one
        for place in range(len(sites)):
            units = Moments.from_sums(sums_NXD[:, [place]], tokens_N[:, None], tokens_N)
            whole, without = products(units, one_class_N)
            all_texts = jackknife(whole.same, without.same)
            whole, without = products(_texts_of(units, kept), classes_N[kept])
            same_class = jackknife(whole.same, without.same)
            other_class = jackknife(whole.other, without.other)
            of_site = [np.ravel(interval) for interval in (all_texts, same_class, other_class)]
            intervals.append(np.stack(of_site, -1))
        columns = dict(zip(_INTERVAL, np.stack(intervals, 1), strict=True))
        columns["documents"] = np.broadcast_to([len(kept), kept.sum(), kept.sum()], (len(sites), 3))
        labels = {"site": sites, "measure": [MEAN_COSINE_ACROSS_TEXTS, *MEAN_COSINES_BY_CLASS]}
        table = _rows("geometry", checkpoint, labels, columns)
        yield table[table["mean"].notna() | (table["measure"] == MEAN_COSINE_ACROSS_TEXTS)]


def share_rows(rows: Mapping[str, Rows], attention: Labels, seed: int) -> Iterator[pd.DataFrame]:
    """Yield the rows of `geometry` on what other tokens give: its shares by corpus, predicted class, text and token.

    And their difference between the checkpoints; nothing where there are no two classes of three texts or more.
    """
    shares: dict[str, tuple[Doubles, Doubles]] = {}
    texts_kept: dict[str, int] = {}
    for checkpoint, document_rows in rows.items():
        sums_NLD, tokens_N, classes_N = _first_texts(document_rows, "others")
        kept = usable(classes_N, tokens_N)
        if len(np.unique(classes_N[kept])) < 2:
            return
        squares_NL = document_rows["lengths"][: len(kept), :, 0]
        texts = _texts_of(Moments.from_sums(sums_NLD, squares_NL, tokens_N), kept)
        whole, without = products(texts, classes_N[kept])
        shares[checkpoint] = whole.shares(), without.shares()
        texts_kept[checkpoint] = int(kept.sum())
        null_L = class_share_null(texts, classes_N[kept], seed)
        columns: dict[str, Any] = {"mean": null_L, "documents": np.full(len(null_L), texts_kept[checkpoint])}
        yield _rows("geometry", checkpoint, attention | {"measure": [PERMUTED]}, columns)
    if len(shares) == 2:
        after, before = shares["finetuned"], shares["pretrained"]
        shares[DIFFERENCE] = after[0] - before[0], after[1] - before[1]
        texts_kept[DIFFERENCE] = texts_kept["finetuned"]  # both checkpoints have the same texts and classes
    for checkpoint, statistics in shares.items():
        columns = dict(zip(_INTERVAL, jackknife(*statistics), strict=True))
        columns["documents"] = np.full(statistics[0].shape, texts_kept[checkpoint])
        yield _rows("geometry", checkpoint, attention | {"measure": SHARES}, columns)


def _first_texts(rows: Rows, name: str) -> tuple[Doubles, Doubles, npt.NDArray[np.int64]]:
    """Return sums over tokens `[N, ..., D]` of the first `MAX_TEXTS` texts, their numbers of tokens and classes."""
    sums = np.asarray(rows[name][:MAX_TEXTS])
    counts = np.asarray(rows[f"{name}_counts"][:MAX_TEXTS])
    classes = np.asarray(rows["predicted"][:MAX_TEXTS])
    return sums, counts.ravel(), classes


def _texts_of(moments: Moments, kept: npt.NDArray[np.bool_]) -> Moments:
    """Return the moments of the texts that are `kept`."""
    return Moments(*(part[kept] for part in moments))


def _stored(name: str, rows: Rows) -> Totals:
    """Return sums and counts as the rows have them."""
    return np.asarray(rows[name]), np.asarray(rows[f"{name}_counts"])


def _lengths(rows: Rows) -> Totals:
    """Return sums over tokens of the lengths of what others give and of the token's own part `[D, layers, 2]`."""
    return rows["lengths"][:, :, 1:], rows["lengths_counts"]


def _ratios(tokens_of: str, rows: Rows) -> Totals:
    """Return sums of the ratios over a kind of tokens `[D, layers, methods]`, and their numbers."""
    grouping, groups = TOKEN_SUBSETS[tokens_of]
    return rows[grouping][:, groups].sum(1), rows[f"{grouping}_counts"][:, groups].sum(1)


def _ratios_beside(control: str, rows: Rows) -> Totals:
    """Return the sums of the ratios over all tokens, and their numbers, of the documents that have the control."""
    sums, tokens = _ratios("all", rows)
    present = rows[f"{control}_counts"] > 0
    return sums * present, tokens * present


def _with_all_layers(tokens_of: str, weight: str, rows: Rows) -> Totals:
    """Return sums and counts with the mean over the layers before the layers `[D, 1 + layers, methods]`."""
    sums, tokens = _ratios(tokens_of, rows)
    sums = np.concatenate([sums.mean(1, keepdims=True), sums], axis=1)
    if weight == "token":
        return sums, tokens
    return sums / np.maximum(tokens, 1), (tokens > 0).astype(np.float64)


def _by_length(rows: Rows) -> Totals:
    """Return the same of documents by their length `[D, lengths, layers, methods]`."""
    sums, tokens = _ratios("all", rows)
    membership_DG11 = np.eye(len(LENGTHS))[length_class(tokens.ravel())][..., None, None]
    return sums[:, None] * membership_DG11, tokens[:, None] * membership_DG11


def _depth(_checkpoint: str, means: Resampled) -> dict[str, Doubles]:
    """Return the rank correlation with depth, in the rows of all layers."""
    by_layer = Resampled(means.mean[1:], means.samples[:, 1:], means.documents[1:])
    columns = {name: np.full(means.mean.shape, np.nan) for name in _DEPTH}
    for name, correlation in zip(_DEPTH, spearman_with_depth(by_layer), strict=True):
        columns[name][0] = correlation
    return columns


def below(true_means: Mapping[str, Resampled], checkpoint: str, means: Resampled) -> dict[str, Doubles]:
    """Return the columns of the true means less those of a control: of the same documents in every sample."""
    if checkpoint not in true_means:
        return {}
    rest = true_means[checkpoint].minus(means)
    return dict(zip(_BELOW, (*rest.interval(), *rest.simultaneous()[1:]), strict=True))


def by_review(rows: Mapping[str, Rows], methods: Sequence[str]) -> Iterator[pd.DataFrame]:
    """Yield `mixing_by_review`, some documents at a time: each one's mean over all its tokens, and their number."""
    for name, documents in rows.items():
        for part in in_parts(documents):
            ratios, tokens = _ratios("all", part)
            labels = {"document": part["document"], "layer": range(1, ratios.shape[1] + 1), "method": methods}
            columns = {"mean": ratios / tokens, "tokens": tokens, "label": part["label"][:, None, None]}
            columns = {column: np.broadcast_to(values, ratios.shape) for column, values in columns.items()}
            yield _rows("mixing_by_review", name, labels, columns)


def metrics(tables: Mapping[str, pd.DataFrame], methods: Sequence[str]) -> dict[str, Any]:
    """Return `reports/metrics/measure.json`: each checkpoint's headline ratios and own share after the last layer."""
    rows = tables["mixing_weighted"].query("weight == 'token' and tokens_of == 'all' and layer == 'all'")
    means = rows.set_index(["checkpoint", "method"])["mean"].to_dict()
    written: dict[str, Any] = {}
    for name, table in tables["identities"].groupby("checkpoint", sort=False):
        written[str(name)] = {method: means[name, method] for method in methods if RATIOS[method].headline}
        written[str(name)]["identity_error"] = table["largest_error_ppm"].max() / 1e6
        own = tables["parts"].query("checkpoint == @name and rule == 'chord' and quantity == 'own_share'")
        if len(own):
            written[str(name)]["own_share"] = float(own["mean"].iloc[-1])
    if len(written) == 2:
        method = preferred_ratio(methods)
        change = rows[(rows["checkpoint"] == DIFFERENCE) & (rows["method"] == method)]
        written[DIFFERENCE] = {method: change[list(_INTERVAL)].iloc[0].to_dict()}
    return written | {"documents": int(rows["documents"].iloc[0])}


def _correlations(_checkpoint: str, means: Resampled) -> dict[str, Any]:
    """Return the columns of correlations, which are no means over tokens."""
    unknown = dict.fromkeys(("tokens", *_SIMULTANEOUS), np.full(means.mean.shape, np.nan))
    return dict(zip(_INTERVAL, means.correlations(), strict=True)) | unknown


def parts_table(parts: Mapping[str, Sequence[Mapping[str, Doubles]]], seed: int) -> pd.DataFrame:
    """Return `parts` from each checkpoint's documents, whose arrays `by_token` `[quantities, levels, T]` go by rule.

    Without documents it has no rows. The simultaneous intervals hold for all quantities and levels of a rule at once.
    """
    documents = next(iter(parts.values()))
    if not documents:
        return pd.DataFrame(columns=COLUMNS["parts"])
    totals: dict[str, dict[str, Doubles]] = {}
    for checkpoint, measured in parts.items():
        totals[checkpoint] = {}
        for rule in RULES:
            sums, tokens = _token_totals([document[rule] for document in measured])
            totals[checkpoint][rule] = sums
            totals[checkpoint][f"{rule}_counts"] = tokens
    levels = range(documents[0][next(iter(RULES))].shape[1])
    means = []
    for rule in RULES:
        labels = {"rule": [rule], "quantity": QUANTITIES, "layer": levels}
        means.append(Mean("parts", labels, partial(_stored, rule), complete=False))
    return mean_tables(means, totals, Draws(len(documents), BOOTSTRAP_SAMPLES, seed))["parts"]


def derivative_tables(
    derivatives: Mapping[str, Mapping[str, Mapping[str, Doubles]]],
    methods: Sequence[str],
    matrices: Sequence[str],
    seed: int,
) -> dict[str, pd.DataFrame]:
    """Return `derivatives` and `derivatives_by_review`, from what `DocumentMeasurer.derivatives` returns.

    `derivatives` has it by checkpoint and document; without documents the tables have no rows. The simultaneous
    intervals hold for all cells of a quantity at once.
    """
    documents = next(iter(derivatives.values()))
    if not documents:
        return {name: pd.DataFrame(columns=COLUMNS[name]) for name in ("derivatives", "derivatives_by_review")}
    names = with_rollouts(matrices)
    layers = range(1, len(next(iter(documents.values()))["ratio"]) + 1)
    rollouts = [name for name in names if name in ROLLOUTS]
    from_input = rollouts + [f"derivative_{form}" for form in FORMS]
    swaps = [f"{swap}_{donor}" for donor, swap in product(DONORS, SWAPS)]
    quantities: dict[str, Labels] = {
        "level": {"reference": REFERENCES, "layer": layers, "method": FORMS},
        "swap": {"reference": ["layer_input"], "layer": layers, "method": swaps},
        "coherence": {"reference": [None], "layer": layers, "method": ["attn_n"]},
        "ratio": {"reference": [None], "layer": layers, "method": methods},
        "from_input": {"reference": [None], "layer": layers, "method": from_input},
        "agreement": {"reference": REFERENCES, "layer": layers, "method": [*methods, *names]},
    }
    totals: dict[str, dict[str, Doubles]] = {checkpoint: {} for checkpoint in derivatives}
    rows = []
    for (checkpoint, by_name), (name, labels) in product(derivatives.items(), quantities.items()):
        sums, tokens = _token_totals([document[name] for document in by_name.values()])
        totals[checkpoint][name] = sums
        totals[checkpoint][f"{name}_counts"] = tokens
        if name in ("level", "swap", "agreement"):
            mean = np.divide(sums, tokens, out=np.full_like(sums, np.nan), where=tokens > 0)
            labels = {"document": list(documents), "quantity": [name]} | labels
            rows.append(_rows("derivatives_by_review", checkpoint, labels, {"mean": mean, "tokens": tokens}))
    means = []
    for name, axes in quantities.items():
        mean_of_quantity = Mean("derivatives", {"quantity": [name]} | axes, partial(_stored, name))
        if name == "agreement":
            mean_of_quantity = mean_of_quantity._replace(checkpoints=tuple(derivatives), more=_correlations)
        means.append(mean_of_quantity)
    tables = mean_tables(means, totals, Draws(len(documents), BOOTSTRAP_SAMPLES, seed))
    tables["derivatives_by_review"] = pd.concat(rows)
    return tables


def _token_totals(documents: Sequence[Doubles]) -> Totals:
    """Return sums over the tokens `[D, ...]` of arrays `[..., T]`, and numbers of those that are not NaN."""
    sums = [np.nansum(array, -1) for array in documents]
    tokens = [(~np.isnan(array)).sum(-1, dtype=np.float64) for array in documents]
    return np.stack(sums), np.stack(tokens)
