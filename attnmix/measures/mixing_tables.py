"""The tables of mixing ratios: means over texts with bootstrap intervals.

A `Mean` declares the rows of a mean in a table, and the sums from which the mean is computed. `MeanTables` computes the
means and their bootstrap samples. `CorpusMeasures` is the input of all tables, including `geometry_table`. The module
`sample_tables` creates the tables of measures that are computed only in a sample of the texts.

Shapes: D texts, G groups of tokens, L layers, M methods (mixing ratios).
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
"""Sums `[texts, ...]` by quantity: the results of `DocumentMeasures.sums` for all texts, stacked."""
SelectSums = Callable[[CorpusSums], Sums]
"""A function that selects or computes the sums of one mean from the sums of all quantities."""
Labels = dict[str, Any]
"""The values of each label column, by name of the column."""
Rows = dict[str, list[Any]]
"""Cells of table rows by column. Creating a DataFrame for each mean would take longer than computing the means."""

DIFFERENCE = "difference"  # fine-tuned minus pretrained, for the same texts


class TokenSubset(NamedTuple):
    """A subset of the tokens of a text: the tokens in some of the groups of one grouping."""

    grouping: str
    """A key of `GROUPS`."""
    groups: Any
    """The indices of the groups, as a list or a slice."""


TOKEN_SUBSETS = {
    "words": TokenSubset("token_class", [CLASSES.index("word"), CLASSES.index("subword")]),
    "all": TokenSubset("token_class", slice(None)),
    "without_first": TokenSubset("position", slice(1, None)),
}
"""Token subsets of the table `mixing_weighted`."""

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
    """Measures of all texts, or of a sample of the texts, by checkpoint."""

    sums: Mapping[str, CorpusSums]
    """Sums of the texts by checkpoint and quantity; the quantities include the measured controls."""
    random: CorpusSums
    """Sums by quantity, including the control `random_weights` if it was measured (in a separate model)."""
    texts: pd.DataFrame
    """A table with one row per text and the columns `document`, `label` and `predicted_label`."""
    methods: Sequence[str]
    sites: Sequence[Site]
    """The sites (layer and capture point) at which the geometry was measured."""
    draws: Draws
    seed: int
    identities: Mapping[str, Doubles] = field(default_factory=dict)
    """Largest errors and numbers of checked texts, `[2, levels, identities]`; unchecked identities have 0 texts."""
    gains: Mapping[str, Doubles] = field(default_factory=dict)
    """The `attention_gain` `[layers]` of each checkpoint; {} if it was not measured."""
    sample: "CorpusMeasures | None" = None
    """Measures of a sample of the texts, for controls, heads and geometry; None if these were measured in all texts."""

    @property
    def sampled(self) -> "CorpusMeasures":
        """The measures of the texts for which controls, heads and geometry were measured: a sample or all texts."""
        return self if self.sample is None else self.sample

    @property
    def first(self) -> CorpusSums:
        """The sums of the first checkpoint. All checkpoints have the same texts and layers."""
        return next(iter(self.sums.values()))

    @property
    def layers(self) -> range:
        """The layer numbers, from 1."""
        _texts, _groups, number_of_layers, _methods = self.first["ratios_by_token_class"].values.shape
        return range(1, number_of_layers + 1)

    @property
    def sources(self) -> list[str]:
        """The groups of source tokens in pairs of texts; empty for single texts."""
        return [name for name in PAIR_SOURCES if name in self.first]


class Mean(NamedTuple):
    """The declaration of a mean over texts, from which the rows of one table are computed for each checkpoint."""

    table: str
    labels: Labels  # by column; columns with several values are the axes of the mean, in this order
    sums: str | SelectSums
    """The name of the sums, or a function that computes them from all sums of a checkpoint."""
    checkpoints: Sequence[str] = ()  # checkpoints for which to compute the mean; by default, all and their `DIFFERENCE`
    more: Callable[[str, Resampled], dict[str, Any]] | None = None
    """A function from a checkpoint's name and means to columns that are added to the rows or replace others."""
    complete: bool = True  # True to include rows without tokens, in which the mean is NaN


class MeanTables:
    """Tables of means from the sums of each checkpoint. All means are resampled with the same bootstrap samples."""

    def __init__(self, sums: Mapping[str, CorpusSums], draws: Draws) -> None:
        """Create tables without rows. The attribute `parts` contains the blocks of rows of each table."""
        self.sums = sums
        self.draws = draws
        self.parts: dict[str, list[Rows]] = defaultdict(list)

    def create_for_texts(self, sums: Mapping[str, CorpusSums], draws: Draws) -> "MeanTables":
        """Return a `MeanTables` for a different set of texts. It adds its rows to the tables of this object."""
        tables = MeanTables(sums, draws)
        tables.parts = self.parts
        return tables

    def add(self, mean: Mean) -> dict[str, Resampled]:
        """Add the rows of `mean` to the table `mean.table`, and return the resampled means by checkpoint."""
        resampled = self.resample(mean)
        for checkpoint, means in resampled.items():
            self.parts[mean.table].append(mean_rows(mean, checkpoint, means))
        return resampled

    def resample(self, mean: Mean) -> dict[str, Resampled]:
        """Return the resampled means by checkpoint, and their paired difference unless `mean.checkpoints` is set."""
        if mean.checkpoints:
            return {name: self._resample_checkpoint(mean, name) for name in mean.checkpoints}
        # The model with random weights has only the sums of its control.
        names = [name for name in self.sums if name != RANDOM]
        means = {name: self._resample_checkpoint(mean, name) for name in names}
        return with_difference(means)

    def _resample_checkpoint(self, mean: Mean, checkpoint: str) -> Resampled:
        """Return the resampled means of one checkpoint, from sums that are loaded chunk by chunk."""
        select_sums = itemgetter(mean.sums) if isinstance(mean.sums, str) else mean.sums
        chunks = map(select_sums, in_chunks(self.sums[checkpoint]))
        return self.draws.resample(chunks)

    def add_difference(
        self, mean: Mean, means_by_checkpoint: Mapping[str, Resampled], places: tuple[int, int], label: str
    ) -> None:
        """Add rows to the table of `mean`: differences between the means of two labels, such as two kinds of donors.

        `means_by_checkpoint` is the result of `add(mean)`: arrays whose second-to-last axis contains the values of the
        first label column. `places` contains the indices of the minuend and the subtrahend on this axis, and `label` is
        the value of the column in the new rows.
        """
        column = next(iter(mean.labels))
        labels = {**mean.labels, column: [label]}
        difference = mean._replace(labels=labels)
        first_place, second_place = places
        for checkpoint, means in means_by_checkpoint.items():
            first = _select_value(means, first_place)
            second = _select_value(means, second_place)
            rows = mean_rows(difference, checkpoint, first.minus(second))
            self.parts[mean.table].append(rows)

    def add_table(self, name: str) -> None:
        """Add a table that may remain empty."""
        self.parts[name] = []

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the tables by name."""
        return {name: _join_rows(name, parts) for name, parts in self.parts.items()}


def _select_value(means: Resampled, place: int) -> Resampled:
    """Return the means at the index `place` of the second-to-last axis, for example at one kind of donor."""
    return Resampled(
        mean=means.mean[..., place, :],
        samples=means.samples[..., place, :],
        documents=means.documents[..., place, :],
        counts=np.asarray(means.counts)[..., place, :],
    )


class Paired(Protocol):
    """A statistic over texts that supports paired differences between checkpoints."""

    def minus(self, other: Self) -> Self:
        """Return the difference from `other`, paired by text."""
        ...


Statistic = TypeVar("Statistic", bound=Paired)


def with_difference(by_checkpoint: Mapping[str, Statistic]) -> dict[str, Statistic]:
    """Return the statistics by checkpoint, with a paired difference as the additional checkpoint `DIFFERENCE`.

    The difference is the statistic of the fine-tuned checkpoint minus that of the pretrained checkpoint. It is omitted
    if one of these checkpoints is missing.
    """
    statistics = dict(by_checkpoint)
    if "finetuned" in statistics and "pretrained" in statistics:
        statistics[DIFFERENCE] = statistics["finetuned"].minus(statistics["pretrained"])
    return statistics


def in_chunks(sums: CorpusSums) -> Iterator[dict[str, Sums]]:
    """Yield the sums of `CHUNK_DOCUMENTS` texts at a time. Memory-mapped sums are loaded chunk by chunk."""
    documents = len(next(iter(sums.values())).values)
    for start in range(0, documents, CHUNK_DOCUMENTS):
        chunk = slice(start, start + CHUNK_DOCUMENTS)
        yield {name: quantity.take(chunk) for name, quantity in sums.items()}


def mean_rows(mean: Mean, checkpoint: str, means: Resampled) -> Rows:
    """Return the table rows of a mean for one checkpoint, with intervals from the resampled `means`.

    `mean.more` returns further columns. If `mean.complete` is False, rows without tokens (NaN) are omitted.
    """
    columns: dict[str, Any] = dict(zip(INTERVAL, means.interval(), strict=True))
    columns["tokens"] = means.counts
    columns["documents"] = means.documents
    has_simultaneous = SIMULTANEOUS[0] in TABLE_COLUMNS[mean.table]
    if has_simultaneous:
        simultaneous = means.simultaneous()
        columns.update(zip(SIMULTANEOUS, (simultaneous.low, simultaneous.high), strict=True))
    if mean.more is not None:
        columns.update(mean.more(checkpoint, means))
    rows = _create_rows(mean.table, checkpoint, mean.labels, columns)
    if mean.complete:
        return rows
    is_defined = ~np.isnan(rows["mean"])
    return {name: list(compress(cells, is_defined)) for name, cells in rows.items()}


def table_rows(table: str, checkpoint: str, labels: Labels, columns: Mapping[str, Any]) -> pd.DataFrame:
    """Return a table with one row per combination of the labels; the last label varies fastest.

    The arrays in `columns` contain one value per combination, in the same order.
    """
    rows = _create_rows(table, checkpoint, labels, columns)
    return _join_rows(table, [rows])


def _create_rows(table: str, checkpoint: str, labels: Labels, columns: Mapping[str, Any]) -> Rows:
    """Return the cells of each column of a table, with one row per combination of the labels.

    Columns that are not given contain NaN. Raise `KeyError` for a label or a column that the table does not have.
    """
    cells = _create_label_cells(labels)
    number_of_rows = len(next(iter(cells.values())))
    cells["checkpoint"] = [checkpoint] * number_of_rows
    for name, values in columns.items():
        cells[name] = np.ravel(values).tolist()
    table_columns = TABLE_COLUMNS[table]
    # Counts are allowed for every table, and omitted from tables without a column for them.
    unknown = cells.keys() - {*table_columns, *COUNTS}
    if unknown:
        raise KeyError(f"{table} has no columns {sorted(unknown)}")
    not_available = [np.nan] * number_of_rows
    return {name: cells.get(name, not_available) for name in table_columns}


def _create_label_cells(labels: Labels) -> Rows:
    """Return the cells of each label column, with one row per combination of the labels; the last label varies fastest.

    The label `site` is divided into the columns `layer` and `point`.
    """
    combinations = list(product(*labels.values()))
    cells: Rows = {}
    for place, name in enumerate(labels):
        cells[name] = [combination[place] for combination in combinations]
    if "site" in cells:
        sites = cells.pop("site")
        cells["layer"] = [site.layer for site in sites]
        cells["point"] = [site.point for site in sites]
    return cells


def _join_rows(name: str, parts: Sequence[Rows]) -> pd.DataFrame:
    """Return a table with the rows of all blocks. Counts of tokens and texts are nullable integers."""
    columns: dict[str, Any] = {}
    for column in TABLE_COLUMNS[name]:
        cells = list(chain.from_iterable(rows[column] for rows in parts))
        columns[column] = pd.array(cells, dtype="Int64") if column in COUNTS else cells
    return pd.DataFrame(columns)


def mixing_tables(measured: CorpusMeasures) -> dict[str, pd.DataFrame]:
    """Return the tables of ratios, controls, groups and, if they were checked, identities, by name of the table."""
    tables = _create_ratio_tables(measured)
    _add_groups(tables, measured)
    finished = tables.tables()
    if measured.identities:
        finished["identities"] = _create_identity_table(measured.identities)
    return finished


def page_tables(measured: CorpusMeasures) -> dict[str, pd.DataFrame]:
    """Return the tables of `mixing_tables` for a page of user texts, except `identities`.

    `mixing_by_group` contains only the rows by group of source tokens, because other rows are slow to compute. This
    table is empty if the texts are not pairs.
    """
    tables = _create_ratio_tables(measured)
    _add_sources(tables, measured)
    finished = tables.tables()
    if "mixing_by_group" not in finished:
        columns = list(TABLE_COLUMNS["mixing_by_group"])
        finished["mixing_by_group"] = pd.DataFrame(columns=columns)
    return finished


def _create_ratio_tables(measured: CorpusMeasures) -> MeanTables:
    """Return a `MeanTables` with the ratios and their controls, to which further means can be added.

    The table `mixing` contains the ratios of all texts. The table `mixing_controls` contains the controls, which may
    have been measured only in a sample of the texts (`CorpusMeasures.sample`).
    """
    tables = MeanTables(measured.sums, measured.draws)
    labels = {"layer": measured.layers, "method": measured.methods}
    ratios = Mean("mixing", labels, sums=ratios_of("all"))
    true_means = tables.add(ratios)  # means without a control, with which the means under a control are compared

    controlled = measured.sampled  # the texts with controls: `measured` itself, unless there is a sample
    sums_with_random = dict(controlled.sums)
    if "random_weights" in controlled.random:  # True if this control was measured
        sums_with_random[RANDOM] = controlled.random  # an additional checkpoint, used only for this control
    # This object computes means over the texts with controls, and stores the rows of these means in `tables`.
    control_tables = tables.create_for_texts(sums_with_random, controlled.draws)
    if controlled is not measured:
        # The comparison requires the true means of the same sample. Unlike `add`, `resample` stores no rows.
        true_means = control_tables.resample(ratios)
    _add_controls(control_tables, controlled, true_means)
    return tables


def weighted_table(
    measured: CorpusMeasures,
    subsets: Sequence[str] = tuple(TOKEN_SUBSETS),
    weights: Sequence[str] = ("token", "review"),
) -> pd.DataFrame:
    """Return the table `mixing_weighted`: means over token subsets; tokens or texts (`review`) have equal weights."""
    tables = MeanTables(measured.sums, measured.draws)
    for subset, weight in product(subsets, weights):
        labels = {
            "weight": [weight],
            "tokens_of": [subset],
            "layer": ["all", *measured.layers],
            "method": measured.methods,
        }
        # The rank correlation with depth is computed only for the mean over all tokens.
        has_depth = subset == "all" and weight == "token"
        mean = Mean(
            "mixing_weighted",
            labels,
            sums=ratios_with_all_layers(subset, weight),
            more=_correlate_with_depth if has_depth else None,  # creates the columns of the correlation
        )
        tables.add(mean)
    return tables.tables()["mixing_weighted"]


def _add_controls(tables: MeanTables, measured: CorpusMeasures, true_means: Mapping[str, Resampled]) -> None:
    """Add the table `mixing_controls`, with the mean ratios under each measured control.

    Further columns contain the true mean (the mean without a control) minus the mean under the control, paired by text.
    `true_means` contains the true means by checkpoint. If a control is undefined in some texts, both means cover only
    the other texts.
    """
    tables.add_table("mixing_controls")
    for control in CONTROLS:
        sums = measured.first  # the sums of the first checkpoint, which represents all checkpoints
        checkpoints: tuple[str, ...] = ()  # the default of `Mean`: all checkpoints of the ratios, and their difference
        if control == "random_weights":  # measured in a model of its own
            sums = measured.random
            checkpoints = (RANDOM,)
        if control not in sums:  # The control was not measured.
            continue
        labels = {"control": [control], "layer": measured.layers, "method": measured.methods}
        true_means_of_same_texts = true_means
        if _is_undefined_in_some_texts(control, sums):
            true_ratios_of_same_texts = Mean("mixing", labels, sums=ratios_where_present(control))
            true_means_of_same_texts = tables.resample(true_ratios_of_same_texts)
        mean = Mean(
            "mixing_controls",
            labels,
            sums=control,
            checkpoints=checkpoints,
            more=true_minus_control(true_means_of_same_texts),  # creates the columns of the difference
        )
        tables.add(mean)


def _is_undefined_in_some_texts(control: str, sums: CorpusSums) -> bool:
    """Return True if the control is undefined in some texts; the counts of these texts in `sums[control]` are 0.

    Only `corpus_value` can be undefined, because it is a mean over tokens of the same class in other texts.
    """
    return control == "corpus_value" and bool((sums[control].counts == 0).any())


def _add_groups(tables: MeanTables, measured: CorpusMeasures) -> None:
    """Add the table `mixing_by_group`: mean ratios by token class, position, source, text length and head.

    The ratios by source and by head cover only the sampled texts, because they are not measured in other texts.
    """
    ratios: Labels = {"layer": measured.layers, "method": measured.methods}
    for grouping, groups in GROUPS.items():
        _add_group(tables, measured, grouping, groups, ratios, sums=f"ratios_by_{grouping}")
    _add_sources(tables, measured)
    _add_group(tables, measured, "length", LENGTHS, ratios, sums=ratios_by_length)
    sampled = measured.sampled
    sampled_tables = tables.create_for_texts(sampled.sums, sampled.draws)
    sums_by_head = sampled.first["by_head"].values  # [texts, heads, layers]
    heads = range(sums_by_head.shape[1])  # indices from 0, as in `without_heads`
    # If an encoder and its decoder have different numbers of heads, the ratios of the missing heads are NaN.
    head_ratios: Labels = {"layer": measured.layers, "method": ["attn_n"]}  # the only ratio measured by head
    _add_group(sampled_tables, sampled, "head", heads, head_ratios, sums="by_head")


def _add_sources(tables: MeanTables, measured: CorpusMeasures) -> None:
    """Add the ratios by group of source tokens for pairs of texts: own text, other text, special tokens."""
    sampled = measured.sampled
    sampled_tables = tables.create_for_texts(sampled.sums, sampled.draws)
    ratios: Labels = {"layer": measured.layers, "method": measured.methods}
    for source in sampled.sources:  # The sums have the same names as the groups.
        _add_group(sampled_tables, sampled, "source", [source], ratios, sums=source)


def _add_group(
    tables: MeanTables,
    measured: CorpusMeasures,
    grouping: str,
    groups: Sequence[Any],
    labels: Labels,
    sums: str | SelectSums,
) -> None:
    """Add the mean ratios of each group in `groups`, with the columns `labels`. Groups without tokens are omitted.

    `sums` is the name of the sums, or a function that computes them from all sums of a checkpoint.
    """
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

    The function returns sums of shape `[texts, layers, methods]`. The sums from which they are computed are `[D, G, L,
    M]`: D texts, G groups of tokens, L layers, M methods.
    """
    grouping = TOKEN_SUBSETS[subset].grouping
    groups = TOKEN_SUBSETS[subset].groups

    def select_subset(sums: CorpusSums) -> Sums:
        values_DGLM, tokens_DG11 = sums[f"ratios_by_{grouping}"]
        values_DLM = values_DGLM[:, groups].sum(1)
        tokens_D11 = tokens_DG11[:, groups].sum(1)
        return Sums(values_DLM, tokens_D11)

    return select_subset


ratios_of_all = ratios_of("all")


def ratios_where_present(control: str) -> SelectSums:
    """Return a function that sums ratios over the tokens of the texts in which `control` is defined.

    For all other texts, the sums and the number of tokens are 0.
    """

    def select_texts(sums: CorpusSums) -> Sums:
        values, tokens = ratios_of_all(sums)
        is_defined = sums[control].counts > 0
        return Sums(values * is_defined, tokens * is_defined)

    return select_texts


def ratios_with_all_layers(subset: str, weight: str) -> SelectSums:
    """Return a function that sums ratios over the tokens in `subset`, `[texts, 1 + layers, methods]`.

    Index 0 of the second axis is the mean over layers; index l is layer l. If `weight` is "token", all tokens have
    equal weights in a mean of the sums; if it is "review", all texts have equal weights.
    """
    sum_by_layer = ratios_of(subset)

    def prepend_mean(sums: CorpusSums) -> Sums:
        """Return the sums by layer, preceded by their mean over layers; tokens or texts have equal weights."""
        values, tokens = sum_by_layer(sums)
        mean_over_layers = values.mean(1, keepdims=True)
        with_mean = Sums(np.concatenate([mean_over_layers, values], axis=1), tokens)
        return with_mean if weight == "token" else _weight_texts_equally(with_mean)

    return prepend_mean


def _weight_texts_equally(sums: Sums) -> Sums:
    """Return the mean of each text, with a count of 1; for texts without tokens, the mean and the count are 0."""
    values, tokens = sums
    means = values / np.maximum(tokens, 1)
    has_tokens = (tokens > 0).astype(np.float64)
    return Sums(means, has_tokens)


def ratios_by_length(sums: CorpusSums) -> Sums:
    """Return the sums of ratios `[texts, lengths, layers, methods]` by class of text lengths.

    The sums and the number of tokens of a text are 0 for all length classes except its own. Axes: D texts, G classes of
    text lengths, L layers, M methods.
    """
    values_DLM, tokens_D11 = ratios_of_all(sums)
    length_D = length_class(tokens_D11.ravel())
    membership_DG = np.eye(len(LENGTHS))[length_D]  # one-hot
    membership_DG11 = membership_DG[..., None, None]
    values_DGLM = values_DLM[:, None] * membership_DG11
    tokens_DG11 = tokens_D11[:, None] * membership_DG11
    return Sums(values_DGLM, tokens_DG11)


def _correlate_with_depth(_checkpoint: str, means: Resampled) -> dict[str, Doubles]:
    """Return columns with the rank correlation between the layer means and the layer numbers, and with its interval.

    Index 0 of the first axis of `means` is the mean over layers, and the layers follow. The columns are NaN except at
    index 0.
    """
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
    """Return a function, for `Mean.more`, that creates the columns of the differences from the means under a control.

    A difference is the mean without a control (`true_means`, by checkpoint) minus the mean under the control. The
    differences are paired by text.
    """

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
    """Yield the table `mixing_by_review` in blocks of texts: the mean ratios and the number of tokens of each text.

    Axes: D texts of a block, L layers, M methods (ratios).
    """
    for checkpoint, sums in measured.sums.items():
        start = 0
        for chunk in in_chunks(sums):
            values_DLM, tokens_D11 = ratios_of_all(chunk)
            stop = start + len(values_DLM)
            texts = measured.texts.iloc[start:stop]
            start = stop
            labels = {"document": texts["document"], "layer": measured.layers, "method": measured.methods}
            label_D11 = texts["label"].to_numpy()[:, None, None]
            columns = {
                "mean": values_DLM / tokens_D11,
                "tokens": np.broadcast_to(tokens_D11, values_DLM.shape),
                "label": np.broadcast_to(label_D11, values_DLM.shape),
            }
            yield table_rows("mixing_by_review", checkpoint, labels, columns)


def metrics(tables: Mapping[str, pd.DataFrame], methods: Sequence[str]) -> dict[str, Any]:
    """Return the content of `reports/metrics/measure.json`.

    For each checkpoint, the file contains the headline ratios (means over tokens and layers), the largest identity
    error, and the mean own share of tokens after the last layer, by kind of donor. The own share is the share of a
    token's own input in its vector, measured by exchange with donor texts. If there are two checkpoints, the file also
    contains the difference of the preferred ratio between them.
    """
    rows = tables["mixing_weighted"].query("weight == 'token' and tokens_of == 'all' and layer == 'all'")
    means = rows.set_index(["checkpoint", "method"])["mean"].to_dict()
    headlines = [method for method in methods if RATIOS[method].headline]
    content: dict[str, Any] = {}
    for name, errors in tables["identities"].groupby("checkpoint", sort=False):
        checkpoint = str(name)
        values = {method: means[checkpoint, method] for method in headlines}
        values["identity_error"] = errors["largest_error_ppm"].max() / 1e6
        own_shares = _read_last_own_shares(tables["exchange"], checkpoint)
        if own_shares:
            values["own_share"] = own_shares
        content[checkpoint] = values
    if len(content) == 2:
        content[DIFFERENCE] = _read_difference(rows, preferred_ratio(methods))
    content["documents"] = int(rows["documents"].iloc[0])
    return content


def _read_difference(rows: pd.DataFrame, method: str) -> dict[str, Any]:
    """Return the difference of one ratio between the checkpoints, with its interval, by name of the ratio."""
    is_difference = (rows["checkpoint"] == DIFFERENCE) & (rows["method"] == method)
    difference = rows.loc[is_difference, list(INTERVAL)].iloc[0]
    return {method: difference.to_dict()}


def _read_last_own_shares(exchange: pd.DataFrame, checkpoint: str) -> dict[str, float]:
    """Return the mean own share of tokens after the last layer, by kind of donor; {} if it was not measured.

    The own share is the share of a token's own input in its vector, measured by exchange with donor texts.
    """
    rows = exchange.query("checkpoint == @checkpoint and quantity == 'own_share'")
    rows = rows[rows["donor"].isin(DONOR_KINDS)]
    if rows.empty:
        return {}
    last = rows[rows["layer"] == rows["layer"].max()].astype({"mean": float})
    means: dict[str, float] = last.set_index("donor")["mean"].to_dict()
    return means
