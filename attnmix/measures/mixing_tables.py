"""The csv files of `measure`: means over documents with their bootstrap intervals.

Every mean is declared once, as a `Mean`: the rows that it gives to a table, and how documents become sums and counts.
`MeanTables` resamples each of them. `CorpusMeasures` is what all tables of ratios are made of.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import STEP_MEASURES, STEP_POINTS, Site
from attnmix.core.statistics import (
    BOOTSTRAP_SAMPLES,
    Doubles,
    Draws,
    Jackknifed,
    Resampled,
    spearman_with_depth,
)
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
from attnmix.measures.text_pairs import PAIR_SOURCES
from attnmix.measures.variance_shares import MAX_TEXTS, PARTS, Moments, class_share_null, products, usable

DocumentRows = dict[str, npt.NDArray[Any]]
"""Arrays by name `[D, ...]`, with a row for each of D documents, as in `DocumentMeasures.sums`."""
Totals = tuple[Doubles, Doubles]
"""Sums `[D, ...]` of D documents, and counts that broadcast to them."""
ReadTotals = Callable[[DocumentRows], Totals]
"""A reader of totals from the rows of documents."""
Labels = dict[str, Any]
"""The values of columns."""

DIFFERENCE = "difference"  # fine-tuned minus pretrained, of the same documents
MEAN_COSINE_ACROSS_TEXTS = "mean_cosine_across"  # mean over pairs of texts (Ethayarajh, EMNLP 2019)
MEAN_COSINES_BY_CLASS = (
    "mean_cosine_same_class",
    "mean_cosine_other_class",
)  # the same of texts by their predicted class
LENGTH_MEASURES = ("others_length", "own_length")
SHARE_MEASURES = tuple(f"share_{part}" for part in PARTS)
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
TABLE_COLUMNS: dict[str, tuple[str, ...]] = {
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

PART_DOCUMENTS = 256  # in memory at a time


@dataclass(frozen=True, kw_only=True)
class CorpusMeasures:
    """What is measured of the documents in the statistics, by checkpoint."""

    rows: Mapping[str, DocumentRows]
    """The documents' sums, and those of the control `shuffled_words`; `document` names the documents."""
    random: DocumentRows
    """The sums of the control `random_weights`, which is a model of its own."""
    identities: Mapping[str, Doubles]
    """The largest error and the number of documents `[2, levels, identities]`, none where a level does not have one."""
    methods: Sequence[str]
    sites: Sequence[Site]
    """The sites of the geometry."""
    draws: Draws
    seed: int
    gains: Mapping[str, Doubles] = field(default_factory=dict)
    """`attention_gain` `[layers]`, of some checkpoints or none."""

    @property
    def first(self) -> DocumentRows:
        """The rows of the first checkpoint, whose documents and layers are those of all."""
        return next(iter(self.rows.values()))

    @property
    def layers(self) -> range:
        """The numbers of the layers, from 1 on."""
        return range(1, self.first["lengths"].shape[1] + 1)

    @property
    def sources(self) -> list[str]:
        """The groups of sources in pairs of texts; none of other texts."""
        return [name for name in PAIR_SOURCES if name in self.first]


class Mean(NamedTuple):
    """A mean over documents in every checkpoint: some rows of one table."""

    table: str
    labels: Labels  # by column; those with several values are the axes of the mean, in this order
    totals: ReadTotals
    checkpoints: Sequence[str] = ()  # those that have it; empty: all, and their `DIFFERENCE`
    more: Callable[[str, Resampled], dict[str, Any]] | None = None
    """Further columns, and those that replace others, of a checkpoint."""
    complete: bool = True  # True if cells without any token are rows too


class MeanTables:
    """Tables of means, resampled with the same draws of documents, from the rows of each checkpoint."""

    def __init__(self, rows: Mapping[str, DocumentRows], draws: Draws) -> None:
        self.rows, self.draws = rows, draws
        self.frames: dict[str, list[pd.DataFrame]] = defaultdict(list)

    def add(self, mean: Mean) -> dict[str, Resampled]:
        """Add the rows of a mean to its table; return it by checkpoint."""
        resampled = self.resample(mean)
        for checkpoint, means in resampled.items():
            self.frames[mean.table].append(_mean_rows(mean, checkpoint, means))
        return resampled

    def resample(self, mean: Mean) -> dict[str, Resampled]:
        """Return the mean of each checkpoint that has it, and of the paired difference where two have."""
        names = mean.checkpoints or [name for name in self.rows if name != RANDOM]
        means = {}
        for name in names:
            totals = map(mean.totals, in_parts(self.rows[name]))  # one part is in memory at a time
            means[name] = self.draws.resample(totals)
        return means if mean.checkpoints else with_difference(means)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the tables by name."""
        return {name: pd.concat(frames) for name, frames in self.frames.items()}


class Paired(Protocol):
    """A statistic of documents, which can be taken from that of the same documents in another checkpoint."""

    def minus(self, other: Self) -> Self:
        """Return the difference, document by document."""
        ...


Statistic = TypeVar("Statistic", bound=Paired)


def with_difference(by_checkpoint: Mapping[str, Statistic]) -> dict[str, Statistic]:
    """Return a statistic by checkpoint, and its `DIFFERENCE` where both checkpoints have it."""
    statistics = dict(by_checkpoint)
    if "finetuned" in statistics and "pretrained" in statistics:
        statistics[DIFFERENCE] = statistics["finetuned"].minus(statistics["pretrained"])
    return statistics


def stack_rows(documents: Sequence[Mapping[str, npt.NDArray[Any]]]) -> DocumentRows:
    """Return the arrays of single documents by name as `[documents, ...]`; none without documents."""
    names = documents[0] if documents else ()
    return {name: np.stack([arrays[name] for arrays in documents]) for name in names}


def in_parts(rows: DocumentRows) -> Iterator[DocumentRows]:
    """Yield `PART_DOCUMENTS` of the documents at a time; arrays on disk are read where they are used."""
    documents = len(next(iter(rows.values())))
    for start in range(0, documents, PART_DOCUMENTS):
        yield {name: array[start : start + PART_DOCUMENTS] for name, array in rows.items()}


def _mean_rows(mean: Mean, checkpoint: str, means: Resampled) -> pd.DataFrame:
    """Return the rows of a mean in one checkpoint."""
    columns: dict[str, Any] = dict(zip(_INTERVAL, means.interval(), strict=True))
    columns["tokens"] = means.counts
    columns["documents"] = means.documents
    if _SIMULTANEOUS[0] in TABLE_COLUMNS[mean.table]:
        _, low, high = means.simultaneous()
        columns.update(zip(_SIMULTANEOUS, (low, high), strict=True))
    if mean.more is not None:
        columns.update(mean.more(checkpoint, means))
    rows = _rows(mean.table, checkpoint, mean.labels, columns)
    return rows if mean.complete else rows.dropna(subset="mean")


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
    frame = pd.DataFrame({name: cells.get(name, np.nan) for name in TABLE_COLUMNS[table]})
    counts = [name for name in _COUNTS if name in frame]
    return frame.astype(dict.fromkeys(counts, "Int64"))


def mixing_tables(measured: CorpusMeasures) -> dict[str, pd.DataFrame]:
    """Return the tables of ratios, controls, groups, geometry and identities by name."""
    tables = _ratio_tables(measured)
    _add_groups(tables, measured)
    _add_geometry(tables, measured)
    finished = tables.tables()
    attention = _attention_labels(measured)
    geometry = [finished["geometry"]]
    for checkpoint, gains_L in measured.gains.items():
        labels = attention | {"measure": ["attention_gain"]}
        geometry.append(_rows("geometry", checkpoint, labels, {"mean": gains_L}))
    geometry.extend(cosine_rows(measured.rows, measured.sites))
    geometry.extend(share_rows(measured.rows, attention, measured.seed))
    finished["geometry"] = pd.concat(geometry)
    finished["identities"] = _identity_table(measured.identities)
    return finished


def page_tables(measured: CorpusMeasures) -> dict[str, pd.DataFrame]:
    """Return those rows of `mixing_tables` that a page draws of its own texts, without the rest, which takes longer.

    Of `mixing_by_group` these are the sources of pairs, of `geometry` the steps of a layer and the share of the class.
    """
    tables = _ratio_tables(measured)
    _add_sources(tables, measured)
    _add_steps(tables, measured)
    finished = tables.tables()
    finished.setdefault("mixing_by_group", pd.DataFrame(columns=list(TABLE_COLUMNS["mixing_by_group"])))
    shares = share_rows(measured.rows, _attention_labels(measured), measured.seed)
    finished["geometry"] = pd.concat([finished["geometry"], *shares])
    return finished


def _ratio_tables(measured: CorpusMeasures) -> MeanTables:
    """Return the tables of ratios and of their controls, to which others can be added."""
    tables = MeanTables({**measured.rows, RANDOM: measured.random}, measured.draws)
    ratios = {"layer": measured.layers, "method": measured.methods}
    true_means = tables.add(Mean("mixing", ratios, ratios_of("all")))
    _add_controls(tables, measured, true_means)
    return tables


def weighted_table(measured: CorpusMeasures) -> pd.DataFrame:
    """Return `mixing_weighted`: the mean of some of the tokens, of which each or each review counts as much."""
    tables = MeanTables(measured.rows, measured.draws)
    for tokens_of, weight in product(TOKEN_SUBSETS, ("token", "review")):
        labels = {
            "weight": [weight],
            "tokens_of": [tokens_of],
            "layer": ["all", *measured.layers],
            "method": measured.methods,
        }
        more = _depth if (tokens_of, weight) == ("all", "token") else None
        tables.add(Mean("mixing_weighted", labels, ratios_with_all_layers(tokens_of, weight), more=more))
    return tables.tables()["mixing_weighted"]


def _add_controls(tables: MeanTables, measured: CorpusMeasures, true_means: Mapping[str, Resampled]) -> None:
    """Add `mixing_controls`: every ratio under each control, and the true ratio less that."""
    for name in CONTROLS:
        labels = {"control": [name], "layer": measured.layers, "method": measured.methods}
        checkpoints = (RANDOM,) if name == "random_weights" else ()
        same_documents = true_means
        if name == "corpus_value" and (np.asarray(measured.first["corpus_value_counts"]) == 0).any():
            # Some documents have no such value: they do not count for the true ratio beside it either.
            beside = Mean("mixing", labels, ratios_where_present(name))
            same_documents = tables.resample(beside)
        tables.add(Mean("mixing_controls", labels, stored(name), checkpoints, below(same_documents)))


def _add_groups(tables: MeanTables, measured: CorpusMeasures) -> None:
    """Add `mixing_by_group`: the ratios by the kind, position and source of tokens, by a text's length, by head."""
    ratios: Labels = {"layer": measured.layers, "method": measured.methods}
    for grouping, groups in GROUPS.items():
        _add_group(tables, measured, grouping, groups, ratios, stored(grouping))
    _add_sources(tables, measured)
    _add_group(tables, measured, "length", LENGTHS, ratios, ratios_by_length)
    heads = range(1, measured.first["by_head"].shape[1] + 1)
    # A ratio is NaN where a stack has fewer heads.
    by_head = {"layer": measured.layers, "method": ["attn_n"]}
    _add_group(tables, measured, "head", heads, by_head, stored("by_head"))


def _add_sources(tables: MeanTables, measured: CorpusMeasures) -> None:
    """Add the ratios of pairs of texts by the text that gives."""
    ratios: Labels = {"layer": measured.layers, "method": measured.methods}
    for source in measured.sources:
        _add_group(tables, measured, "source", [source], ratios, stored(source))


def _add_group(
    tables: MeanTables,
    measured: CorpusMeasures,
    grouping: str,
    groups: Sequence[Any],
    labels: Labels,
    totals: ReadTotals,
) -> None:
    labels = {"grouping": [grouping], "group": groups} | labels
    tables.add(Mean("mixing_by_group", labels, totals, checkpoints=tuple(measured.rows), complete=False))


def _add_geometry(tables: MeanTables, measured: CorpusMeasures) -> None:
    """Add the means in `geometry`: of vectors at each site, of steps, of sinks, and of the lengths of what is mixed."""
    checkpoints = tuple(measured.rows)
    attention = _attention_labels(measured)
    sites = {"site": measured.sites, "measure": GEOMETRY_MEASURES}
    to_first = attention | {"measure": ["attention_to_first"]}
    sinks = attention | {"measure": SINK_MEASURES}
    tables.add(Mean("geometry", sites, stored("geometry"), checkpoints))
    _add_steps(tables, measured)
    tables.add(Mean("geometry", to_first, stored("to_first"), checkpoints))
    tables.add(Mean("geometry", sinks, stored("sinks"), checkpoints, complete=False))
    tables.add(Mean("geometry", attention | {"measure": LENGTH_MEASURES}, part_lengths))


def _add_steps(tables: MeanTables, measured: CorpusMeasures) -> None:
    """Add the geometry of each step of a layer."""
    steps = {"layer": measured.layers, "point": list(STEP_POINTS), "measure": STEP_MEASURES}
    tables.add(Mean("geometry", steps, stored("steps"), tuple(measured.rows), complete=False))


def _attention_labels(measured: CorpusMeasures) -> Labels:
    """Return the labels of `geometry` that say that a measure is of attention itself, in each layer."""
    return {"layer": measured.layers, "point": ["attention"]}


def _identity_table(identities: Mapping[str, Doubles]) -> pd.DataFrame:
    """Return `identities`: the largest error of each that was checked."""
    frames = []
    for checkpoint, (largest, checked) in identities.items():
        labels = {"layer": range(len(largest)), "identity": list(IDENTITIES)}
        columns = {"largest_error_ppm": 1e6 * largest, "documents": checked}
        frames.append(_rows("identities", checkpoint, labels, columns).query("documents > 0"))
    return pd.concat(frames)


def cosine_rows(rows: Mapping[str, DocumentRows], sites: Sequence[Site]) -> Iterator[pd.DataFrame]:
    """Yield the rows of `geometry` on mean cosines of tokens of different texts: of all, and by predicted class."""
    for checkpoint, document_rows in rows.items():
        sums_NXD, tokens_N, classes_N = _first_texts(document_rows, "unit_sums")
        one_class_N = np.zeros(len(tokens_N))
        kept = usable(classes_N, tokens_N)
        intervals = []  # by site: the mean and its ends, of all texts, of the same class and of another one
        for place in range(len(sites)):
            units = Moments.from_sums(sums_NXD[:, [place]], tokens_N[:, None], tokens_N)
            whole, without = products(units, one_class_N)
            all_texts = Jackknifed(whole.same, without.same)
            whole, without = products(_texts_of(units, kept), classes_N[kept])
            same_class = Jackknifed(whole.same, without.same)
            other_class = Jackknifed(whole.other, without.other)
            cosines = [np.ravel(cosine.interval()) for cosine in (all_texts, same_class, other_class)]
            intervals.append(np.stack(cosines, -1))
        columns = dict(zip(_INTERVAL, np.stack(intervals, 1), strict=True))
        columns["documents"] = np.broadcast_to([len(kept), kept.sum(), kept.sum()], (len(sites), 3))
        labels = {"site": sites, "measure": [MEAN_COSINE_ACROSS_TEXTS, *MEAN_COSINES_BY_CLASS]}
        table = _rows("geometry", checkpoint, labels, columns)
        yield table[table["mean"].notna() | (table["measure"] == MEAN_COSINE_ACROSS_TEXTS)]


def share_rows(rows: Mapping[str, DocumentRows], attention: Labels, seed: int) -> Iterator[pd.DataFrame]:
    """Yield the rows of `geometry` on what other tokens give: its shares by corpus, predicted class, text and token.

    And their difference between the checkpoints; nothing where there are no two classes of three texts or more.
    """
    shares: dict[str, Jackknifed] = {}
    for checkpoint, document_rows in rows.items():
        sums_NLD, tokens_N, classes_N = _first_texts(document_rows, "others")
        kept = usable(classes_N, tokens_N)
        if len(np.unique(classes_N[kept])) < 2:
            return
        squares_NL = document_rows["lengths"][: len(kept), :, 0]
        texts = _texts_of(Moments.from_sums(sums_NLD, squares_NL, tokens_N), kept)
        whole, without = products(texts, classes_N[kept])
        shares[checkpoint] = Jackknifed(whole.shares(), without.shares())
        null_L = class_share_null(texts, classes_N[kept], seed)
        columns: dict[str, Any] = {"mean": null_L, "documents": np.full(len(null_L), kept.sum())}
        yield _rows("geometry", checkpoint, attention | {"measure": [PERMUTED]}, columns)
    for checkpoint, share in with_difference(shares).items():
        columns = dict(zip(_INTERVAL, share.interval(), strict=True))
        columns["documents"] = np.full(share.whole.shape, share.documents)
        yield _rows("geometry", checkpoint, attention | {"measure": SHARE_MEASURES}, columns)


def _first_texts(rows: DocumentRows, name: str) -> tuple[Doubles, Doubles, npt.NDArray[np.int64]]:
    """Return sums over tokens `[N, ..., D]` of the first `MAX_TEXTS` texts, their numbers of tokens and classes."""
    sums = np.asarray(rows[name][:MAX_TEXTS])
    counts = np.asarray(rows[f"{name}_counts"][:MAX_TEXTS])
    classes = np.asarray(rows["predicted"][:MAX_TEXTS])
    return sums, counts.ravel(), classes


def _texts_of(moments: Moments, kept: npt.NDArray[np.bool_]) -> Moments:
    """Return the moments of the texts that are `kept`."""
    return Moments(*(part[kept] for part in moments))


def stored(name: str) -> ReadTotals:
    """Return the reader of the sums and counts that the rows have under a name."""

    def totals(rows: DocumentRows) -> Totals:
        return np.asarray(rows[name]), np.asarray(rows[f"{name}_counts"])

    return totals


def part_lengths(rows: DocumentRows) -> Totals:
    """Return sums over tokens of the lengths of what others give and of the token's own part `[D, layers, 2]`."""
    return rows["lengths"][:, :, 1:], rows["lengths_counts"]


def ratios_of(tokens_of: str) -> ReadTotals:
    """Return the reader of sums of the ratios over a kind of tokens `[D, layers, methods]`, and of their numbers."""
    grouping, groups = TOKEN_SUBSETS[tokens_of]

    def totals(rows: DocumentRows) -> Totals:
        return rows[grouping][:, groups].sum(1), rows[f"{grouping}_counts"][:, groups].sum(1)

    return totals


ratios_of_all = ratios_of("all")


def ratios_where_present(control: str) -> ReadTotals:
    """Return the reader of the ratios over all tokens, of the documents that have the control."""

    def totals(rows: DocumentRows) -> Totals:
        sums, tokens = ratios_of_all(rows)
        present = rows[f"{control}_counts"] > 0
        return sums * present, tokens * present

    return totals


def ratios_with_all_layers(tokens_of: str, weight: str) -> ReadTotals:
    """Return the reader of ratios `[D, 1 + layers, methods]` with the mean over the layers before the layers."""
    read_layers = ratios_of(tokens_of)

    def totals(rows: DocumentRows) -> Totals:
        sums, tokens = read_layers(rows)
        sums = np.concatenate([sums.mean(1, keepdims=True), sums], axis=1)
        if weight == "token":
            return sums, tokens
        return sums / np.maximum(tokens, 1), (tokens > 0).astype(np.float64)

    return totals


def ratios_by_length(rows: DocumentRows) -> Totals:
    """Return the sums of the ratios of documents by their length `[D, lengths, layers, methods]`, and their numbers."""
    sums, tokens = ratios_of_all(rows)
    membership_DG11 = np.eye(len(LENGTHS))[length_class(tokens.ravel())][..., None, None]
    return sums[:, None] * membership_DG11, tokens[:, None] * membership_DG11


def _depth(_checkpoint: str, means: Resampled) -> dict[str, Doubles]:
    """Return the rank correlation with depth, in the rows of all layers."""
    by_layer = Resampled(means.mean[1:], means.samples[:, 1:], means.documents[1:])
    columns = {name: np.full(means.mean.shape, np.nan) for name in _DEPTH}
    for name, correlation in zip(_DEPTH, spearman_with_depth(by_layer), strict=True):
        columns[name][0] = correlation
    return columns


def below(true_means: Mapping[str, Resampled]) -> Callable[[str, Resampled], dict[str, Doubles]]:
    """Return the maker of the columns of true means less those of a control, of the same documents in every sample."""

    def columns(checkpoint: str, means: Resampled) -> dict[str, Doubles]:
        if checkpoint not in true_means:
            return {}
        rest = true_means[checkpoint].minus(means)
        mean, low, high = rest.interval()
        _, simultaneous_low, simultaneous_high = rest.simultaneous()
        return dict(zip(_BELOW, (mean, low, high, simultaneous_low, simultaneous_high), strict=True))

    return columns


def by_review(measured: CorpusMeasures) -> Iterator[pd.DataFrame]:
    """Yield `mixing_by_review`, some documents at a time: each one's mean over all its tokens, and their number."""
    for checkpoint, rows in measured.rows.items():
        for part in in_parts(rows):
            sums, tokens = ratios_of_all(part)
            labels = {"document": part["document"], "layer": measured.layers, "method": measured.methods}
            label_D11 = part["label"][:, None, None]
            columns = {
                "mean": sums / tokens,
                "tokens": np.broadcast_to(tokens, sums.shape),
                "label": np.broadcast_to(label_D11, sums.shape),
            }
            yield _rows("mixing_by_review", checkpoint, labels, columns)


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
        return pd.DataFrame(columns=TABLE_COLUMNS["parts"])
    rows = {checkpoint: _total_rows(measured, RULES) for checkpoint, measured in parts.items()}
    levels = range(documents[0][next(iter(RULES))].shape[1])
    tables = MeanTables(rows, Draws(len(documents), BOOTSTRAP_SAMPLES, seed))
    for rule in RULES:
        labels = {"rule": [rule], "quantity": QUANTITIES, "layer": levels}
        tables.add(Mean("parts", labels, stored(rule), complete=False))
    return tables.tables()["parts"]


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
        return {name: pd.DataFrame(columns=TABLE_COLUMNS[name]) for name in ("derivatives", "derivatives_by_review")}
    layers = range(1, len(next(iter(documents.values()))["ratio"]) + 1)
    axes = _derivative_axes(layers, methods, with_rollouts(matrices))
    rows: dict[str, DocumentRows] = {}
    for checkpoint, by_name in derivatives.items():
        rows[checkpoint] = _total_rows(list(by_name.values()), axes)
    tables = MeanTables(rows, Draws(len(documents), BOOTSTRAP_SAMPLES, seed))
    for quantity, labels in axes.items():
        mean = Mean("derivatives", {"quantity": [quantity]} | labels, stored(quantity))
        if quantity == "agreement":
            mean = mean._replace(checkpoints=tuple(derivatives), more=_correlations)
        tables.add(mean)
    by_document = []
    for checkpoint, quantity in product(derivatives, ("level", "swap", "agreement")):
        sums, tokens = stored(quantity)(rows[checkpoint])
        means = np.divide(sums, tokens, out=np.full_like(sums, np.nan), where=tokens > 0)
        labels = {"document": list(documents), "quantity": [quantity]} | axes[quantity]
        by_document.append(_rows("derivatives_by_review", checkpoint, labels, {"mean": means, "tokens": tokens}))
    return tables.tables() | {"derivatives_by_review": pd.concat(by_document)}


def _derivative_axes(layers: range, methods: Sequence[str], matrices: Sequence[str]) -> dict[str, Labels]:
    """Return the labels along the axes of each quantity of `derivatives`."""
    rollouts = [name for name in matrices if name in ROLLOUTS]
    from_input = [*rollouts, *(f"derivative_{form}" for form in FORMS)]
    swaps = [f"{swap}_{donor}" for donor, swap in product(DONORS, SWAPS)]
    return {
        "level": {"reference": REFERENCES, "layer": layers, "method": FORMS},
        "swap": {"reference": ["layer_input"], "layer": layers, "method": swaps},
        "coherence": {"reference": [None], "layer": layers, "method": ["attn_n"]},
        "ratio": {"reference": [None], "layer": layers, "method": methods},
        "from_input": {"reference": [None], "layer": layers, "method": from_input},
        "agreement": {"reference": REFERENCES, "layer": layers, "method": [*methods, *matrices]},
    }


def _total_rows(documents: Sequence[Mapping[str, Doubles]], names: Iterable[str]) -> DocumentRows:
    """Return sums over the tokens and counts, as `stored` reads them, of the named arrays `[..., T]` of documents."""
    rows: DocumentRows = {}
    for name in names:
        rows[name], rows[f"{name}_counts"] = _token_totals([document[name] for document in documents])
    return rows


def _token_totals(documents: Sequence[Doubles]) -> Totals:
    """Return sums over the tokens `[D, ...]` of arrays `[..., T]`, and numbers of those that are not NaN."""
    sums = [np.nansum(array, -1) for array in documents]
    tokens = [(~np.isnan(array)).sum(-1, dtype=np.float64) for array in documents]
    return np.stack(sums), np.stack(tokens)
