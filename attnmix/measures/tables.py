"""The csv files of `measure`: means over documents with their bootstrap intervals.

Every mean is declared once, as a `Mean`: the rows that it gives to a table, and how a block of documents becomes sums
and counts. One loop resamples them all.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.points import STEP_MEASURES, STEP_POINTS, Site
from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Draws, Interval, Resampled, spearman_with_depth
from attnmix.measures.controls import CONTROLS, RANDOM, SAME_PASS
from attnmix.measures.documents import CLASSES
from attnmix.measures.geometry import GEOMETRY_MEASURES
from attnmix.measures.gradients import FORMS, REFERENCES
from attnmix.measures.identities import IDENTITIES
from attnmix.measures.matrices import ROLLOUTS, with_rollouts
from attnmix.measures.ratios import RATIOS, preferred_ratio
from attnmix.measures.sums import GROUPS, LENGTHS, length_class

Doubles = npt.NDArray[np.float64]
Block = Callable[[str], npt.NDArray[Any]]
"""A block of D documents in the statistics: returns an array `[D, ...]` by its name.

The names are those of `document_sums`, the controls that take a pass of their own, `document`, `label` and `tokens`.
"""
Blocks = Callable[[], Iterable[Block]]
Totals = tuple[Doubles, Doubles]
"""Sums `[D, ...]` of D documents, and counts that broadcast to them."""
Labels = dict[str, Any]
"""The values of columns."""

DIFFERENCE = "difference"  # fine-tuned minus pretrained, of the same documents
ACROSS = "mean_cosine_across"  # of tokens of different documents (Ethayarajh, EMNLP 2019), beside `GEOMETRY_MEASURES`
TOKENS_OF: dict[str, tuple[str, Any]] = {
    "words": ("token_class", [CLASSES.index("word"), CLASSES.index("subword")]),
    "all": ("token_class", slice(None)),
    "without_first": ("position", slice(1, None)),
}
"""The tokens that a mean of `mixing_weighted` is over: one of `GROUPS`, and which groups of it."""

_INTERVAL = ("mean", "ci_low", "ci_high")
_SIMULTANEOUS = ("simultaneous_low", "simultaneous_high")
_DEPTH = ("depth_spearman", "depth_ci_low", "depth_ci_high")
_BELOW = ("below", "below_low", "below_high")
_BELOW_SIMULTANEOUS = ("below_simultaneous_low", "below_simultaneous_high")
_COUNTS = ("tokens", "documents")
_KEYS = ("layer", "method")
COLUMNS: dict[str, tuple[str, ...]] = {
    "mixing": ("checkpoint", *_KEYS, *_INTERVAL, *_SIMULTANEOUS, *_COUNTS),
    "mixing_weighted": ("checkpoint", "weight", "tokens_of", *_KEYS, *_INTERVAL, *_DEPTH, "documents"),
    "mixing_controls": ("checkpoint", "control", *_KEYS, *_INTERVAL, *_BELOW, *_BELOW_SIMULTANEOUS, *_COUNTS),
    "mixing_by_group": ("checkpoint", "grouping", "group", *_KEYS, *_INTERVAL, *_COUNTS),
    "mixing_by_review": ("checkpoint", "document", "label", *_KEYS, "mean", "tokens"),
    "geometry": ("checkpoint", "layer", "point", "measure", *_INTERVAL, "documents"),
    "derivatives": ("checkpoint", "quantity", "reference", *_KEYS, *_INTERVAL, *_SIMULTANEOUS, *_COUNTS),
    "derivatives_by_review": ("checkpoint", "document", "quantity", "reference", *_KEYS, "mean", "tokens"),
    "identities": ("checkpoint", "layer", "identity", "largest_error_ppm"),
}
"""The columns of every csv file."""


class CheckpointSums(NamedTuple):
    """One checkpoint's sums of the documents in the statistics, of which a block is in memory at a time."""

    blocks: Blocks
    identities: Doubles  # [levels, identities]: the largest errors; NaN for an identity that a level does not have
    gains: Doubles  # [layers], `attention_gain`
    across: Interval  # [sites], `ACROSS`

    @property
    def layers(self) -> range:
        """The layers' numbers, from 1 on."""
        return range(1, len(self.gains) + 1)


def no_columns(_checkpoint: str, _means: Resampled) -> dict[str, Any]:
    """Return no further columns."""
    return {}


class Mean(NamedTuple):
    """A mean over documents in every checkpoint: some rows of one table."""

    table: str
    labels: Labels
    """By column; those with several values are the axes of the mean, in this order."""
    totals: Callable[[Block], Totals]
    checkpoints: Sequence[str] = ()
    """Those that have it; empty: all, and their `DIFFERENCE`."""
    more: Callable[[str, Resampled], dict[str, Any]] = no_columns
    """Further columns, and those that replace others, of a checkpoint."""
    complete: bool = True
    """Whether cells without any token are rows too."""


def mean_tables(means: Iterable[Mean], blocks: Mapping[str, Blocks], draws: Draws) -> dict[str, pd.DataFrame]:
    """Return the tables of the declared `means` by name, from each checkpoint's `blocks`."""
    frames: dict[str, list[pd.DataFrame]] = defaultdict(list)
    for each in means:
        for checkpoint, resampled in resample_checkpoints(each, blocks, draws).items():
            columns: dict[str, Any] = dict(zip(_INTERVAL, resampled.interval(), strict=True))
            columns |= {"tokens": resampled.counts, "documents": resampled.documents}
            if _SIMULTANEOUS[0] in COLUMNS[each.table]:
                columns |= zip(_SIMULTANEOUS, resampled.simultaneous()[1:], strict=True)
            rows = _rows(each.table, checkpoint, each.labels, columns | each.more(checkpoint, resampled))
            frames[each.table].append(rows if each.complete else rows.dropna(subset="mean"))
    return {name: pd.concat(parts) for name, parts in frames.items()}


def resample_checkpoints(mean: Mean, blocks: Mapping[str, Blocks], draws: Draws) -> dict[str, Resampled]:
    """Return the mean of each checkpoint that has it, and of the paired difference where two have."""
    names = mean.checkpoints or [name for name in blocks if name != RANDOM]
    means = {name: draws.resample(map(mean.totals, blocks[name]())) for name in names}
    if not mean.checkpoints and len(means) == 2:
        means[DIFFERENCE] = means["finetuned"].minus(means["pretrained"])
    return means


def _rows(table: str, checkpoint: str, labels: Labels, columns: Mapping[str, Any]) -> pd.DataFrame:
    """Return a row for each combination of the labels, the last one running fastest."""
    keys = {"checkpoint": [checkpoint], **labels}
    frame = pd.DataFrame(list(product(*keys.values())), columns=list(keys))
    frame = frame.assign(**{name: np.ravel(values) for name, values in columns.items()})
    if "site" in frame:
        frame = frame.assign(layer=[site.layer for site in frame["site"]], point=[site.point for site in frame["site"]])
    frame = frame.reindex(columns=list(COLUMNS[table]))
    return frame.astype({name: "Int64" for name in _COUNTS if name in frame})


def mixing_tables(
    sums: Mapping[str, CheckpointSums],
    random: Blocks,
    methods: Sequence[str],
    sites: Sequence[Site],
    draws: Draws,
) -> dict[str, pd.DataFrame]:
    """Return the tables of ratios, controls, geometry and identities by name.

    `sums` are by checkpoint, `random` are the blocks of the model with random weights, `sites` those of the geometry.
    """
    layers, checkpoints = next(iter(sums.values())).layers, list(sums)
    heads = next(iter(next(iter(sums.values())).blocks()))("by_head").shape[-1]
    blocks = {name: each.blocks for name, each in sums.items()} | {RANDOM: random}
    ratios = {"layer": layers, "method": methods}
    mixing = Mean("mixing", ratios, partial(_ratios, "all"))
    true_means = resample_checkpoints(mixing, blocks, draws)
    means = [
        mixing,
        *_weighted_means(layers, methods),
        *_control_means(ratios, true_means),
        *_group_means(ratios, heads, checkpoints),
        *_geometry_means(layers, sites, checkpoints),
    ]
    tables = mean_tables(means, blocks, draws)
    frames = [tables["geometry"]]
    for name, each in sums.items():
        frames.append(_rows("geometry", name, {"site": sites, "measure": [ACROSS]}, _across(each)))
        labels = {"layer": layers, "point": ["attention"], "measure": ["attention_gain"]}
        frames.append(_rows("geometry", name, labels, {"mean": each.gains}))
    identities = [
        _rows(
            "identities",
            name,
            {"layer": range(len(each.identities)), "identity": IDENTITIES},
            {"largest_error_ppm": 1e6 * each.identities},
        ).dropna()
        for name, each in sums.items()
    ]
    return tables | {"geometry": pd.concat(frames), "identities": pd.concat(identities)}


def _cells(numbers_D: npt.NDArray[Any], sums: Doubles) -> Doubles:
    """Return a number of each document in a shape that broadcasts to `sums`."""
    return numbers_D.astype(np.float64).reshape(-1, *[1] * (sums.ndim - 1))


def _ratios(tokens_of: str, block: Block) -> Totals:
    """Sums of the ratios over a kind of tokens `[D, layers, methods]`, and their numbers."""
    grouping, groups = TOKENS_OF[tokens_of]
    sums = block(grouping)[..., groups].sum(-1)
    return sums, _cells(block(f"{grouping}_tokens")[:, groups].sum(-1), sums)


def _with_all_layers(tokens_of: str, weight: str, block: Block) -> Totals:
    """Sums and counts with the mean over the layers before the layers `[D, 1 + layers, methods]`."""
    sums, tokens = _ratios(tokens_of, block)
    sums = np.concatenate([sums.mean(1, keepdims=True), sums], axis=1)
    if weight == "token":
        return sums, tokens
    return sums / np.maximum(tokens, 1), (tokens > 0).astype(np.float64)


def _weighted_means(layers: Sequence[int], methods: Sequence[str]) -> Iterator[Mean]:
    def depth(_checkpoint: str, means: Resampled) -> dict[str, Doubles]:
        """The rank correlation with depth, in the rows of all layers."""
        by_layer = Resampled(means.mean[1:], means.samples[:, 1:], means.documents[1:])
        columns = {name: np.full(means.mean.shape, np.nan) for name in _DEPTH}
        for name, correlation in zip(_DEPTH, spearman_with_depth(by_layer), strict=True):
            columns[name][0] = correlation
        return columns

    for tokens_of, weight in product(TOKENS_OF, ("token", "review")):
        labels = {"weight": [weight], "tokens_of": [tokens_of], "layer": ["all", *layers], "method": methods}
        more = depth if (tokens_of, weight) == ("all", "token") else no_columns
        yield Mean("mixing_weighted", labels, partial(_with_all_layers, tokens_of, weight), more=more)


def below(true_means: Mapping[str, Resampled], checkpoint: str, means: Resampled) -> dict[str, Doubles]:
    """Return the columns of the true means less those of a control: of the same documents in every sample."""
    if checkpoint not in true_means:
        return {}
    rest = true_means[checkpoint].minus(means)
    columns = (*rest.interval(), *rest.simultaneous()[1:])
    return dict(zip((*_BELOW, *_BELOW_SIMULTANEOUS), columns, strict=True))


def _control_means(ratios: Labels, true_means: Mapping[str, Resampled]) -> Iterator[Mean]:
    def same_pass(place: int, block: Block) -> Totals:
        return with_tokens(block("controls")[:, place], block)

    def own_pass(name: str, block: Block) -> Totals:
        return with_tokens(block(name), block)

    def with_tokens(sums_DML: Doubles, block: Block) -> Totals:
        return sums_DML.swapaxes(1, 2), _cells(block("tokens"), sums_DML)

    for name in CONTROLS:
        totals = partial(same_pass, SAME_PASS.index(name)) if name in SAME_PASS else partial(own_pass, name)
        checkpoints = (RANDOM,) if name == "random_weights" else ()
        yield Mean("mixing_controls", {"control": [name]} | ratios, totals, checkpoints, partial(below, true_means))


def _group_means(ratios: Labels, heads: int, checkpoints: Sequence[str]) -> Iterator[Mean]:
    """Means over the tokens of each class, at each position, of reviews of each length, and of each head."""

    def group_totals(grouping: str, block: Block) -> Totals:
        sums = np.moveaxis(block(grouping), -1, 1)
        return sums, block(f"{grouping}_tokens")[..., None, None]

    def length_totals(block: Block) -> Totals:
        sums, tokens = _ratios("all", block)
        membership_DG = np.eye(len(LENGTHS))[length_class(tokens.ravel())]
        return sums[:, None] * membership_DG[..., None, None], tokens[:, None] * membership_DG[..., None, None]

    def head_totals(block: Block) -> Totals:
        sums = block("by_head").swapaxes(1, 2)[..., None]  # NaN where a stack has fewer heads
        return sums, _cells(block("tokens"), sums)

    for grouping, groups in GROUPS.items():
        labels: Labels = {"grouping": [grouping], "group": groups} | ratios
        yield Mean("mixing_by_group", labels, partial(group_totals, grouping), checkpoints, complete=False)
    labels = {"grouping": ["length"], "group": LENGTHS} | ratios
    yield Mean("mixing_by_group", labels, length_totals, checkpoints, complete=False)
    labels = {"grouping": ["head"], "group": range(1, heads + 1), "layer": ratios["layer"], "method": ["attn_n"]}
    yield Mean("mixing_by_group", labels, head_totals, checkpoints, complete=False)


def _geometry_means(layers: Sequence[int], sites: Sequence[Site], checkpoints: Sequence[str]) -> Iterator[Mean]:
    """Means over documents at the capture points, over tokens after each step, and of attention to the first token."""

    def document_totals(block: Block) -> Totals:
        values = block("geometry")
        return np.nan_to_num(values), (~np.isnan(values)).astype(np.float64)

    def step_totals(block: Block) -> Totals:
        sums = block("steps")
        return sums, _cells(block("tokens"), sums)

    def to_first_totals(block: Block) -> Totals:
        sums = block("to_first")
        return sums, _cells(block("tokens") - 1, sums)

    yield Mean("geometry", {"site": sites, "measure": GEOMETRY_MEASURES}, document_totals, checkpoints)
    labels = {"layer": layers, "point": STEP_POINTS, "measure": STEP_MEASURES}
    yield Mean("geometry", labels, step_totals, checkpoints, complete=False)
    labels = {"layer": layers, "point": ["attention"], "measure": ["attention_to_first"]}
    yield Mean("geometry", labels, to_first_totals, checkpoints)


def _across(sums: CheckpointSums) -> dict[str, Any]:
    documents = sum(len(block("tokens")) for block in sums.blocks())
    return dict(zip(_INTERVAL, sums.across, strict=True)) | {"documents": np.full(len(sums.across.mean), documents)}


def by_review(sums: Mapping[str, CheckpointSums], methods: Sequence[str]) -> Iterator[pd.DataFrame]:
    """Yield `mixing_by_review`, block by block: each review's mean over all its tokens, and their number."""
    for name, each in sums.items():
        for block in each.blocks():
            ratios, tokens = _ratios("all", block)
            labels = {"document": block("document").tolist(), "layer": each.layers, "method": methods}
            columns = {"mean": ratios / tokens, "tokens": tokens, "label": _cells(block("label"), ratios).astype(int)}
            columns = {column: np.broadcast_to(values, ratios.shape) for column, values in columns.items()}
            yield _rows("mixing_by_review", name, labels, columns)


def metrics(tables: Mapping[str, pd.DataFrame], methods: Sequence[str]) -> dict[str, Any]:
    """Return `reports/metrics/measure.json`: the headline ratios of each checkpoint, and the change of one."""
    rows = tables["mixing_weighted"].query("weight == 'token' and tokens_of == 'all' and layer == 'all'")
    overall = {
        name: table.set_index("method")[list(_INTERVAL)].to_dict("index") for name, table in rows.groupby("checkpoint")
    }
    written: dict[str, Any] = {
        str(name): {method: overall[name][method]["mean"] for method in methods if RATIOS[method].headline}
        | {"identity_error": table["largest_error_ppm"].max() / 1e6}
        for name, table in tables["identities"].groupby("checkpoint", sort=False)
    }
    if DIFFERENCE in overall:
        method = preferred_ratio(methods)
        written[DIFFERENCE] = {method: overall[DIFFERENCE][method]}
    return written | {"documents": int(rows["documents"].iloc[0])}


def derivative_tables(
    derivatives: Mapping[str, Mapping[str, Mapping[str, Doubles]]],
    methods: Sequence[str],
    matrices: Sequence[str],
    seed: int,
) -> dict[str, pd.DataFrame]:
    """Return `derivatives` and `derivatives_by_review`, from each checkpoint's documents by name.

    A document has for each quantity an array `[..., tokens]`, as `DocumentMeasurer.derivatives` returns it; NaN for a
    token for which it is not defined. The simultaneous intervals hold for all cells of a quantity at once. Without
    documents the tables have no rows.
    """
    tables = {name: pd.DataFrame(columns=list(COLUMNS[name])) for name in ("derivatives", "derivatives_by_review")}
    documents = next(iter(derivatives.values()))
    if not documents:
        return tables

    names = with_rollouts(matrices)
    layers = range(1, next(iter(documents.values()))["ratio"].shape[0] + 1)
    from_input = [*(name for name in names if name in ROLLOUTS), *(f"derivative_{form}" for form in FORMS)]
    quantities: dict[str, Labels] = {
        "level": {"reference": REFERENCES, "layer": layers, "method": FORMS},
        "ratio": {"reference": [None], "layer": layers, "method": methods},
        "from_input": {"reference": [None], "layer": layers, "method": from_input},
        "agreement": {"reference": REFERENCES, "layer": layers, "method": [*methods, *names]},
    }
    totals = {
        checkpoint: {name: _token_totals(name, by_name.values()) for name in quantities}
        for checkpoint, by_name in derivatives.items()
    }
    blocks: dict[str, Blocks] = {
        name: partial(iter, [of_checkpoint.__getitem__]) for name, of_checkpoint in totals.items()
    }

    def read(quantity: str, block: Block) -> Totals:
        sums, tokens = block(quantity).reshape(2, len(documents), *map(len, quantities[quantity].values()))
        return sums, tokens

    def correlations(_checkpoint: str, means: Resampled) -> dict[str, Any]:
        unknown = dict.fromkeys(("tokens", *_SIMULTANEOUS), np.full(means.mean.shape, np.nan))
        return dict(zip(_INTERVAL, means.correlations(), strict=True)) | unknown

    more = dict.fromkeys(quantities, no_columns) | {"agreement": correlations}
    checkpoints = dict.fromkeys(quantities, ()) | {"agreement": tuple(derivatives)}
    means = [
        Mean("derivatives", {"quantity": [name], **labels}, partial(read, name), checkpoints[name], more[name])
        for name, labels in quantities.items()
    ]
    with io.BytesIO() as file:
        tables = mean_tables(means, blocks, Draws([len(documents)], BOOTSTRAP_SAMPLES, seed, file))
    rows = []
    for (checkpoint, of_checkpoint), name in product(totals.items(), ("level", "agreement")):
        sums, tokens = of_checkpoint[name]
        mean = np.divide(sums, tokens, out=np.full_like(sums, np.nan), where=tokens > 0)
        labels = {"document": list(documents), "quantity": [name]} | quantities[name]
        rows.append(_rows("derivatives_by_review", checkpoint, labels, {"mean": mean, "tokens": tokens}))
    return tables | {"derivatives_by_review": pd.concat(rows)}


def _token_totals(quantity: str, documents: Iterable[Mapping[str, Doubles]]) -> Doubles:
    """Return the sums over tokens and the numbers of tokens for which a quantity is defined `[2, documents, ...]`."""
    arrays = [document[quantity] for document in documents]
    sums = np.stack([np.nansum(array, -1) for array in arrays])
    return np.stack([sums, np.stack([(~np.isnan(array)).sum(-1) for array in arrays])])
