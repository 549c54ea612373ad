"""The tables of mixing ratios: means over texts with bootstrap intervals.

Each mean is declared once, as a `Mean`: its rows in a table, and its sums. `MeanTables` resamples the means.
`CorpusMeasures` is the input of all tables, including `geometry_table`; `sample_tables` creates the tables for a sample
of the texts.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, product
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import pandas as pd

from attnmix.core.names import DONOR_KINDS, Site
from attnmix.core.statistics import Doubles, Draws, Resampled, Sums, spearman_with_depth
from attnmix.measures.batches import GROUPS, LENGTHS, length_class
from attnmix.measures.controls import CONTROLS, RANDOM
from attnmix.measures.documents import CLASSES
from attnmix.measures.identities import IDENTITIES
from attnmix.measures.ratios import RATIOS, preferred_ratio
from attnmix.measures.text_pairs import PAIR_SOURCES

CorpusSums = Mapping[str, Sums]
"""Sums of all texts by quantity, as in `DocumentMeasures.sums`."""
SelectSums = Callable[[CorpusSums], Sums]
"""A function that selects or combines the sums of a mean."""
Labels = dict[str, Any]
"""Values of label columns, by column."""
Rows = dict[str, list[Any]]
"""Cells of table rows by column; creating a DataFrame per mean would be slower than computing the means."""

DIFFERENCE = "difference"  # fine-tuned minus pretrained, for the same texts
TOKEN_SUBSETS: dict[str, tuple[str, Any]] = {
    "words": ("token_class", [CLASSES.index("word"), CLASSES.index("subword")]),
    "all": ("token_class", slice(None)),
    "without_first": ("position", slice(1, None)),
}
"""Token subsets of `mixing_weighted`: a grouping of `GROUPS`, and the indices of its groups."""

INTERVAL = ("mean", "ci_low", "ci_high")
SIMULTANEOUS = ("simultaneous_low", "simultaneous_high")
_DEPTH = ("depth_spearman", "depth_ci_low", "depth_ci_high")
_TRUE_MINUS_CONTROL = (
    "ratio_minus_control",
    "ratio_minus_control_low",
    "ratio_minus_control_high",
    "ratio_minus_control_simultaneous_low",
    "ratio_minus_control_simultaneous_high",
)
COUNTS = ("tokens", "documents")
_KEYS = ("layer", "method")
TABLE_COLUMNS: dict[str, tuple[str, ...]] = {
    "mixing": ("checkpoint", *_KEYS, *INTERVAL, *SIMULTANEOUS, *COUNTS),
    "mixing_weighted": ("checkpoint", "weight", "tokens_of", *_KEYS, *INTERVAL, *_DEPTH, "documents"),
    "mixing_controls": ("checkpoint", "control", *_KEYS, *INTERVAL, *_TRUE_MINUS_CONTROL, *COUNTS),
    "mixing_by_group": ("checkpoint", "grouping", "group", *_KEYS, *INTERVAL, *COUNTS),
    "mixing_by_review": ("checkpoint", "document", "label", *_KEYS, "mean", "tokens"),
    "geometry": ("checkpoint", "layer", "point", "measure", *INTERVAL, "documents"),
    "derivatives": ("checkpoint", "quantity", "reference", *_KEYS, *INTERVAL, *SIMULTANEOUS, *COUNTS),
    "derivatives_by_review": ("checkpoint", "document", "quantity", "reference", *_KEYS, "mean", "tokens"),
    "exchange": ("checkpoint", "donor", "quantity", "layer", *INTERVAL, *SIMULTANEOUS, *COUNTS),
    "parts": ("checkpoint", "rule", "quantity", "layer", *INTERVAL, *SIMULTANEOUS, *COUNTS),
    "identities": ("checkpoint", "layer", "identity", "largest_error_ppm", "documents"),
}
"""Columns of each table (csv file)."""

CHUNK_DOCUMENTS = 256  # number of texts in memory at a time


@dataclass(frozen=True, kw_only=True)
class CorpusMeasures:
    """Measures of all texts that enter the statistics, by checkpoint."""

    sums: Mapping[str, CorpusSums]
    """Sums of the texts by quantity, including measured controls."""
    random: CorpusSums
    """Sums of the control `random_weights`, a separate model; empty if it was not measured."""
    texts: pd.DataFrame
    """A table with one row per text: `document, label, predicted_label`."""
    methods: Sequence[str]
    sites: Sequence[Site]
    """The sites (layer and capture point) at which the geometry was measured."""
    draws: Draws
    seed: int
    identities: Mapping[str, Doubles] = field(default_factory=dict)
    """Largest error and number of checked texts `[2, levels, identities]`. The number is 0 for undefined identities."""
    gains: Mapping[str, Doubles] = field(default_factory=dict)
    """The `attention_gain` `[layers]` of each checkpoint, or {}."""
    sample: "CorpusMeasures | None" = None
    """The measures of the texts with controls, heads and geometry, if other texts have only ratios."""

    @property
    def sampled(self) -> "CorpusMeasures":
        """The measures of the texts with controls, heads and geometry: a sample or all texts."""
        return self if self.sample is None else self.sample

    @property
    def first(self) -> CorpusSums:
        """The sums of the first checkpoint. All checkpoints have the same texts and layers."""
        return next(iter(self.sums.values()))

    @property
    def layers(self) -> range:
        """The layer numbers, from 1."""
        ratios_DGLM = self.first["ratios_by_token_class"].values
        return range(1, ratios_DGLM.shape[2] + 1)

    @property
    def sources(self) -> list[str]:
        """The groups of sources in pairs of texts; empty for single texts."""
        return [name for name in PAIR_SOURCES if name in self.first]


class Mean(NamedTuple):
    """A mean over texts for each checkpoint, as rows of one table."""

    table: str
    labels: Labels  # by column; columns with several values are the axes of the mean, in this order
    sums: str | SelectSums
    """Name of the sums, or a function of all sums."""
    checkpoints: Sequence[str] = ()  # checkpoints with this mean; by default, all and their `DIFFERENCE`
    more: Callable[[str, Resampled], dict[str, Any]] | None = None
    """A function that returns additional or replaced columns of a checkpoint."""
    complete: bool = True  # True to include cells without tokens


class MeanTables:
    """Tables of means from the sums of each checkpoint, which are resampled with the same bootstrap samples."""

    def __init__(self, sums: Mapping[str, CorpusSums], draws: Draws) -> None:
        """Start without rows; `parts` contains the rows of each table in blocks."""
        self.sums = sums
        self.draws = draws
        self.parts: dict[str, list[Rows]] = defaultdict(list)

    def create_for_texts(self, sums: Mapping[str, CorpusSums], draws: Draws) -> "MeanTables":
        """Return tables of means over other texts, whose rows are added to the tables of this object."""
        tables = MeanTables(sums, draws)
        tables.parts = self.parts
        return tables

    def add(self, mean: Mean) -> dict[str, Resampled]:
        """Add the rows of a mean to its table, and return the mean by checkpoint."""
        resampled = self.resample(mean)
        for checkpoint, means in resampled.items():
            self.parts[mean.table].append(mean_rows(mean, checkpoint, means))
        return resampled

    def resample(self, mean: Mean) -> dict[str, Resampled]:
        """Return the mean by checkpoint. Unless `mean.checkpoints` is set, include the paired difference."""
        names = mean.checkpoints
        if not names:
            names = [name for name in self.sums if name != RANDOM]
        select = itemgetter(mean.sums) if isinstance(mean.sums, str) else mean.sums
        means = {}
        for name in names:
            chunks = map(select, in_chunks(self.sums[name]))
            means[name] = self.draws.resample(chunks)
        if mean.checkpoints:
            return means
        return with_difference(means)

    def add_difference(self, mean: Mean, means: Mapping[str, Resampled], places: tuple[int, int], label: str) -> None:
        """Add the rows of a difference of `means` between two values of the first column of `mean`.

        `places` are the indices of these values, and `label` is the value of the column in the new rows.
        """
        column = next(iter(mean.labels))
        labels = {**mean.labels, column: [label]}
        difference = mean._replace(labels=labels)
        first_place, second_place = places
        for checkpoint, both in means.items():
            first = _select_value(both, first_place)
            second = _select_value(both, second_place)
            rows = mean_rows(difference, checkpoint, first.minus(second))
            self.parts[mean.table].append(rows)

    def add_table(self, name: str) -> None:
        """Add a table that may remain empty."""
        self.parts[name] = []

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the tables by name."""
        return {name: _join_rows(name, parts) for name, parts in self.parts.items()}


def _select_value(means: Resampled, place: int) -> Resampled:
    """Return the means at index `place` of the first of two axes."""
    return Resampled(*(np.asarray(part)[..., place, :] for part in means))


class Paired(Protocol):
    """A statistic over texts that supports paired differences between checkpoints."""

    def minus(self, other: Self) -> Self:
        """Return the difference from `other`, paired by text."""
        ...


Statistic = TypeVar("Statistic", bound=Paired)


def with_difference(by_checkpoint: Mapping[str, Statistic]) -> dict[str, Statistic]:
    """Return statistics by checkpoint, with their `DIFFERENCE` if both checkpoints are available."""
    statistics = dict(by_checkpoint)
    if "finetuned" in statistics and "pretrained" in statistics:
        statistics[DIFFERENCE] = statistics["finetuned"].minus(statistics["pretrained"])
    return statistics


def in_chunks(sums: CorpusSums) -> Iterator[dict[str, Sums]]:
    """Yield the sums of `CHUNK_DOCUMENTS` texts at a time. Memory-mapped sums are loaded on use."""
    documents = len(next(iter(sums.values())).values)
    for start in range(0, documents, CHUNK_DOCUMENTS):
        chunk = slice(start, start + CHUNK_DOCUMENTS)
        yield {name: quantity.take(chunk) for name, quantity in sums.items()}


def mean_rows(mean: Mean, checkpoint: str, means: Resampled) -> Rows:
    """Return the table rows of a mean for one checkpoint."""
    columns: dict[str, Any] = dict(zip(INTERVAL, means.interval(), strict=True))
    columns["tokens"] = means.counts
    columns["documents"] = means.documents
    has_simultaneous = SIMULTANEOUS[0] in TABLE_COLUMNS[mean.table]
    if has_simultaneous:
        _, low, high = means.simultaneous()
        columns.update(zip(SIMULTANEOUS, (low, high), strict=True))
    if mean.more is not None:
        columns.update(mean.more(checkpoint, means))
    rows = _create_rows(mean.table, checkpoint, mean.labels, columns)
    if mean.complete:
        return rows
    is_known = ~np.isnan(rows["mean"])
    return {name: list(compress(cells, is_known)) for name, cells in rows.items()}


def table_rows(table: str, checkpoint: str, labels: Labels, columns: Mapping[str, Any]) -> pd.DataFrame:
    """Return a table with one row per combination of the labels; the last label varies fastest."""
    rows = _create_rows(table, checkpoint, labels, columns)
    return _join_rows(table, [rows])


def _create_rows(table: str, checkpoint: str, labels: Labels, columns: Mapping[str, Any]) -> Rows:
    """Return the cells of `table_rows` by column."""
    combinations = list(product(*labels.values()))
    cells: dict[str, Any] = {"checkpoint": [checkpoint] * len(combinations)}
    for place, name in enumerate(labels):
        cells[name] = [combination[place] for combination in combinations]
    if "site" in cells:
        sites = cells.pop("site")
        cells["layer"] = [site.layer for site in sites]
        cells["point"] = [site.point for site in sites]
    for name, values in columns.items():
        cells[name] = np.ravel(values).tolist()
    unknown = cells.keys() - {*TABLE_COLUMNS[table], *COUNTS}
    if unknown:
        raise KeyError(f"{table} has no columns {sorted(unknown)}")
    missing = [np.nan] * len(combinations)
    return {name: cells.get(name, missing) for name in TABLE_COLUMNS[table]}


def _join_rows(name: str, parts: Sequence[Rows]) -> pd.DataFrame:
    """Return a table of all rows. Counts of tokens and texts are nullable integers."""
    columns: dict[str, Any] = {}
    for column in TABLE_COLUMNS[name]:
        cells = list(chain.from_iterable(rows[column] for rows in parts))
        columns[column] = pd.array(cells, dtype="Int64") if column in COUNTS else cells
    return pd.DataFrame(columns)


def mixing_tables(measured: CorpusMeasures) -> dict[str, pd.DataFrame]:
    """Return the tables of ratios, controls, groups and, if they were checked, identities; the keys are their names."""
    tables = _create_ratio_tables(measured)
    _add_groups(tables, measured)
    finished = tables.tables()
    if measured.identities:
        finished["identities"] = _create_identity_table(measured.identities)
    return finished


def page_tables(measured: CorpusMeasures) -> dict[str, pd.DataFrame]:
    """Return the tables of `mixing_tables` for a page of user texts, without rows that are slow to compute.

    `mixing_by_group` contains only the rows by source in pairs of texts.
    """
    tables = _create_ratio_tables(measured)
    _add_sources(tables, measured)
    finished = tables.tables()
    if "mixing_by_group" not in finished:
        columns = list(TABLE_COLUMNS["mixing_by_group"])
        finished["mixing_by_group"] = pd.DataFrame(columns=columns)
    return finished


def _create_ratio_tables(measured: CorpusMeasures) -> MeanTables:
    """Return the tables of ratios and their controls, to which other means can be added."""
    tables = MeanTables(measured.sums, measured.draws)
    labels = {"layer": measured.layers, "method": measured.methods}
    ratios = Mean("mixing", labels, ratios_of("all"))
    true_means = tables.add(ratios)
    sampled = measured.sampled
    sums = dict(sampled.sums)
    if "random_weights" in sampled.random:
        sums[RANDOM] = sampled.random
    sampled_tables = tables.create_for_texts(sums, sampled.draws)
    if sampled is not measured:  # Controls are compared with the ratios of the same texts.
        true_means = sampled_tables.resample(ratios)
    _add_controls(sampled_tables, sampled, true_means)
    return tables


def weighted_table(
    measured: CorpusMeasures,
    subsets: Sequence[str] = tuple(TOKEN_SUBSETS),
    weights: Sequence[str] = ("token", "review"),
) -> pd.DataFrame:
    """Return `mixing_weighted`: means over token subsets, with equal weights of tokens or of texts (`review`)."""
    tables = MeanTables(measured.sums, measured.draws)
    for subset, weight in product(subsets, weights):
        labels = {
            "weight": [weight],
            "tokens_of": [subset],
            "layer": ["all", *measured.layers],
            "method": measured.methods,
        }
        has_depth = subset == "all" and weight == "token"
        mean = Mean(
            "mixing_weighted",
            labels,
            ratios_with_all_layers(subset, weight),
            more=_correlate_with_depth if has_depth else None,
        )
        tables.add(mean)
    return tables.tables()["mixing_weighted"]


def _add_controls(tables: MeanTables, measured: CorpusMeasures, true_means: Mapping[str, Resampled]) -> None:
    """Add `mixing_controls`: each ratio under each measured control, and the true ratio minus this ratio."""
    tables.add_table("mixing_controls")
    for name in CONTROLS:
        is_random = name == "random_weights"
        sums = measured.random if is_random else measured.first
        if name not in sums:
            continue
        labels = {"control": [name], "layer": measured.layers, "method": measured.methods}
        means_of_same_documents = true_means
        if name == "corpus_value" and (sums[name].counts == 0).any():
            # Texts without a corpus value are also excluded from the true ratio of the comparison.
            present = Mean("mixing", labels, ratios_where_present(name))
            means_of_same_documents = tables.resample(present)
        mean = Mean(
            "mixing_controls",
            labels,
            name,
            checkpoints=(RANDOM,) if is_random else (),
            more=true_minus_control(means_of_same_documents),
        )
        tables.add(mean)


def _add_groups(tables: MeanTables, measured: CorpusMeasures) -> None:
    """Add `mixing_by_group`: ratios by token class, position, source, text length and head."""
    ratios: Labels = {"layer": measured.layers, "method": measured.methods}
    for grouping, groups in GROUPS.items():
        _add_group(tables, measured, grouping, groups, ratios, f"ratios_by_{grouping}")
    _add_sources(tables, measured)
    _add_group(tables, measured, "length", LENGTHS, ratios, ratios_by_length)
    sampled = measured.sampled
    sampled_tables = tables.create_for_texts(sampled.sums, sampled.draws)
    head_sums = sampled.first["by_head"].values
    heads = range(head_sums.shape[1])  # indices from 0, as in `without_heads`
    # If a stack has fewer heads, the ratios of its missing heads are NaN.
    by_head = {"layer": measured.layers, "method": ["attn_n"]}
    _add_group(sampled_tables, sampled, "head", heads, by_head, "by_head")


def _add_sources(tables: MeanTables, measured: CorpusMeasures) -> None:
    """Add the ratios by group of sources, for pairs of texts."""
    sampled = measured.sampled
    sampled_tables = tables.create_for_texts(sampled.sums, sampled.draws)
    ratios: Labels = {"layer": measured.layers, "method": measured.methods}
    for source in sampled.sources:
        _add_group(sampled_tables, sampled, "source", [source], ratios, source)


def _add_group(
    tables: MeanTables,
    measured: CorpusMeasures,
    grouping: str,
    groups: Sequence[Any],
    labels: Labels,
    sums: str | SelectSums,
) -> None:
    """Add the ratios of each group; empty groups are omitted."""
    mean = Mean(
        "mixing_by_group",
        labels={"grouping": [grouping], "group": groups} | labels,
        sums=sums,
        checkpoints=tuple(measured.sums),
        complete=False,
    )
    tables.add(mean)


def _create_identity_table(identities: Mapping[str, Doubles]) -> pd.DataFrame:
    """Return the table `identities`, with the largest error of each checked identity."""
    frames = []
    for checkpoint, (largest, checked) in identities.items():
        labels = {"layer": range(len(largest)), "identity": list(IDENTITIES)}
        columns = {"largest_error_ppm": 1e6 * largest, "documents": checked}
        rows = table_rows("identities", checkpoint, labels, columns)
        frames.append(rows.query("documents > 0"))
    return pd.concat(frames)


def ratios_of(subset: str) -> SelectSums:
    """Return a function that sums ratios over the tokens in `subset`, a key of `TOKEN_SUBSETS`.

    Its sums are `[texts, layers, methods]`.
    """
    grouping, groups = TOKEN_SUBSETS[subset]

    def select_subset(sums: CorpusSums) -> Sums:
        values_DGLM, tokens_DG11 = sums[f"ratios_by_{grouping}"]
        values_DLM = values_DGLM[:, groups].sum(1)
        tokens_D11 = tokens_DG11[:, groups].sum(1)
        return Sums(values_DLM, tokens_D11)

    return select_subset


ratios_of_all = ratios_of("all")


def ratios_where_present(control: str) -> SelectSums:
    """Return a function that sums ratios over all tokens of the texts that have a value of `control`."""

    def select_texts(sums: CorpusSums) -> Sums:
        values, tokens = ratios_of_all(sums)
        present = sums[control].counts > 0
        return Sums(values * present, tokens * present)  # texts without a value count 0 tokens

    return select_texts


def ratios_with_all_layers(subset: str, weight: str) -> SelectSums:
    """Return a function that sums ratios, `[texts, 1 + layers, methods]`: the mean over layers, then each layer."""
    select_layers = ratios_of(subset)

    def append_mean(sums: CorpusSums) -> Sums:
        """Return the sums with equal weights of tokens; for the weight `review`, the mean of each text counts once."""
        values, tokens = select_layers(sums)
        mean_over_layers = values.mean(1, keepdims=True)
        values = np.concatenate([mean_over_layers, values], axis=1)
        if weight == "token":
            return Sums(values, tokens)
        means = values / np.maximum(tokens, 1)
        has_tokens = (tokens > 0).astype(np.float64)
        return Sums(means, has_tokens)

    return append_mean


def ratios_by_length(sums: CorpusSums) -> Sums:
    """Return the sums of the ratios by length class of the text, `[texts, lengths, layers, methods]`."""
    values_DLM, tokens_D11 = ratios_of_all(sums)
    length_D = length_class(tokens_D11.ravel())
    membership_DG = np.eye(len(LENGTHS))[length_D]  # one-hot
    membership_DG11 = membership_DG[..., None, None]
    values_DGLM = values_DLM[:, None] * membership_DG11
    tokens_DG11 = tokens_D11[:, None] * membership_DG11
    return Sums(values_DGLM, tokens_DG11)


def _correlate_with_depth(_checkpoint: str, means: Resampled) -> dict[str, Doubles]:
    """Return columns with the rank correlation of ratio and depth. Only rows of the mean over layers have a value."""
    by_layer = Resampled(
        mean=means.mean[1:],
        samples=means.samples[:, 1:],
        documents=means.documents[1:],
    )
    columns = {}
    for name, correlation in zip(_DEPTH, spearman_with_depth(by_layer), strict=True):
        column = np.full(means.mean.shape, np.nan)
        column[0] = correlation
        columns[name] = column
    return columns


def true_minus_control(true_means: Mapping[str, Resampled]) -> Callable[[str, Resampled], dict[str, Doubles]]:
    """Return a function that creates the columns of true means minus control means, paired by text."""

    def create_columns(checkpoint: str, means: Resampled) -> dict[str, Doubles]:
        """Return the columns for the means of a control; {} if the checkpoint has no true means."""
        if checkpoint not in true_means:
            return {}
        difference = true_means[checkpoint].minus(means)
        interval = difference.interval()
        simultaneous = difference.simultaneous()
        return {
            "ratio_minus_control": interval.mean,
            "ratio_minus_control_low": interval.low,
            "ratio_minus_control_high": interval.high,
            "ratio_minus_control_simultaneous_low": simultaneous.low,
            "ratio_minus_control_simultaneous_high": simultaneous.high,
        }

    return create_columns


def by_review(measured: CorpusMeasures) -> Iterator[pd.DataFrame]:
    """Yield `mixing_by_review` in blocks of texts: the mean ratio over all tokens of a text, and their number."""
    for checkpoint, sums in measured.sums.items():
        start = 0
        for chunk in in_chunks(sums):
            values, tokens = ratios_of_all(chunk)
            stop = start + len(values)
            texts = measured.texts.iloc[start:stop]
            start = stop
            labels = {"document": texts["document"], "layer": measured.layers, "method": measured.methods}
            label_D11 = texts["label"].to_numpy()[:, None, None]
            columns = {
                "mean": values / tokens,
                "tokens": np.broadcast_to(tokens, values.shape),
                "label": np.broadcast_to(label_D11, values.shape),
            }
            yield table_rows("mixing_by_review", checkpoint, labels, columns)


def metrics(tables: Mapping[str, pd.DataFrame], methods: Sequence[str]) -> dict[str, Any]:
    """Return the content of `reports/metrics/measure.json`: headline ratios and own shares after the last layer."""
    rows = tables["mixing_weighted"].query("weight == 'token' and tokens_of == 'all' and layer == 'all'")
    means = rows.set_index(["checkpoint", "method"])["mean"].to_dict()
    headlines = [method for method in methods if RATIOS[method].headline]
    written: dict[str, Any] = {}
    for name, errors in tables["identities"].groupby("checkpoint", sort=False):
        checkpoint = str(name)
        values = {method: means[checkpoint, method] for method in headlines}
        values["identity_error"] = errors["largest_error_ppm"].max() / 1e6
        own_shares = _read_last_own_shares(tables["exchange"], checkpoint)
        if own_shares:
            values["own_share"] = own_shares
        written[checkpoint] = values
    if len(written) == 2:
        method = preferred_ratio(methods)
        is_change = (rows["checkpoint"] == DIFFERENCE) & (rows["method"] == method)
        change = rows.loc[is_change, list(INTERVAL)].iloc[0]
        written[DIFFERENCE] = {method: change.to_dict()}
    written["documents"] = int(rows["documents"].iloc[0])
    return written


def _read_last_own_shares(exchange: pd.DataFrame, checkpoint: str) -> dict[str, float]:
    """Return the own shares after the last layer by kind of donor; {} if they were not measured."""
    rows = exchange.query("checkpoint == @checkpoint and quantity == 'own_share'")
    rows = rows[rows["donor"].isin(DONOR_KINDS)]
    if rows.empty:
        return {}
    last = rows[rows["layer"] == rows["layer"].max()].astype({"mean": float})
    means: dict[str, float] = last.set_index("donor")["mean"].to_dict()
    return means
