"""From every document's measures to the tables under `reports/plots/` and the metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from stages.mixing.batches import DocumentMeasures
from stages.mixing.documents import CLASSES, Document
from stages.mixing.geometry import GEOMETRY_MEASURES
from stages.mixing.identities import IDENTITIES
from stages.mixing.ratios import RATIOS, preferred_ratio
from stages.mixing.statistics import Interval, Resampled, resample, spearman_with_depth
from stages.mixing.steps import STEP_MEASURES
from stages.mixing.tables import grid as _grid
from stages.mixing.tables import interval_table as _table
from stages.parameters import MixingParameters
from stages.sites import STEP_POINTS, Site

Doubles = npt.NDArray[np.float64]

# Positions are split where they double: 0, 1, 2-3, 4-7, ...
POSITION_STARTS = (0, *(2**power for power in range(16)))
POSITIONS = ("0", "1", *(f"{start}-{2 * start - 1}" for start in POSITION_STARTS[2:]))
# How tokens are told apart, by the column of its own csv file.
GROUPS = {"token_class": ("mixing_by_class", CLASSES), "positions": ("mixing_by_position", POSITIONS)}
ACROSS = "mean_cosine_across"  # of tokens of different documents (Ethayarajh, EMNLP 2019), beside `GEOMETRY_MEASURES`
DIFFERENCE = "difference"  # fine-tuned minus pretrained, of the same documents


@dataclass(frozen=True)
class Sums:
    """One checkpoint's measures, summed over each document's counted tokens; N counted documents."""

    groups: dict[str, tuple[Doubles, Doubles]]
    """By column of `GROUPS`: sums of the ratios `[N, layers, methods, groups]`, and numbers of tokens `[N, groups]`."""
    to_first: Doubles  # [N, layers]: attention's weight on the first token, of all tokens but that
    geometry: Doubles  # [N, sites, measures]
    steps: Doubles  # [N, layers, steps, measures]
    identities: Doubles  # [levels, identities]: the largest error of all documents, counted or not
    gains: Doubles  # [layers], `attention_gain`
    across: Interval  # [sites], `mean_cosine_across`
    by_head: Doubles  # [N, layers, heads]; NaN for a head that a layer does not have

    @property
    def tokens(self) -> Doubles:
        """Counted tokens `[N]`."""
        return np.asarray(self.groups["token_class"][1].sum(-1))

    @property
    def layers(self) -> range:
        """From 1 on."""
        return range(1, len(self.gains) + 1)


def add_up(
    documents: Sequence[Document], measured: Iterable[DocumentMeasures], gains: Doubles, across: Interval
) -> Sums:
    """Take in the documents' measures, one document in memory at a time."""
    columns: dict[str, list[Doubles]] = defaultdict(list)
    errors: list[Doubles] = []
    for document, measures in zip(documents, measured, strict=True):
        errors.append(measures.identities)
        if document.counted:
            positions = np.searchsorted(POSITION_STARTS, np.arange(document.counted), side="right") - 1
            ratios_MLT = measures.ratios[..., : document.counted].astype(np.float64)
            for column, numbers in (("token_class", document.classes[: document.counted]), ("positions", positions)):
                membership_TG = np.eye(len(GROUPS[column][1]))[numbers]
                columns[column].append(np.einsum("mlt,tg->lmg", ratios_MLT, membership_TG))
                columns[f"{column} tokens"].append(membership_TG.sum(0))
            columns["to_first"].append(measures.to_first[:, 1 : document.counted].sum(-1, dtype=np.float64))
            columns["geometry"].append(measures.geometry)
            columns["steps"].append(measures.steps)
            columns["by_head"].append(measures.by_head)
    stacked = {name: np.stack(parts) for name, parts in columns.items()}
    groups = {column: (stacked[column], stacked[f"{column} tokens"]) for column in GROUPS}
    to_first, geometry, steps = (stacked[name] for name in ("to_first", "geometry", "steps"))
    return Sums(groups, to_first, geometry, steps, np.stack(errors).max(0), gains, across, stacked["by_head"])


def overall_means(sums: Mapping[str, Sums], mixing: MixingParameters, seed: int) -> dict[str, Resampled]:
    """Mean ratios `[layers, methods]` of each checkpoint, and of their `DIFFERENCE` where there are two."""
    means = {}
    for name, part in sums.items():
        all_tokens = part.groups["token_class"][0].sum(-1)
        means[name] = resample(all_tokens, part.tokens[:, None, None], mixing.bootstrap_samples, seed)
    if len(means) == 2:
        means[DIFFERENCE] = means["finetuned"].minus(means["pretrained"])
    return means


def plot_tables(
    sums: Mapping[str, Sums], means: Mapping[str, Resampled], sites: Sequence[Site], mixing: MixingParameters, seed: int
) -> dict[str, pd.DataFrame]:
    """The csv files of `reports/plots/` by name."""
    frames: dict[str, list[pd.DataFrame]] = defaultdict(list)

    def interval(values: Doubles, counts: Doubles) -> Interval:
        counts = np.expand_dims(counts, tuple(range(1, values.ndim - counts.ndim + 1)))
        return resample(values, counts, mixing.bootstrap_samples, seed).interval()

    for name, part in sums.items():
        layers = {"checkpoint": [name], "layer": part.layers}
        methods = layers | {"method": mixing.methods}
        counts = {"tokens": int(part.tokens.sum()), "documents": len(part.tokens)}
        frames["mixing"].append(_table(methods, means[name].interval()).assign(**counts))
        for column, (file, labels) in GROUPS.items():
            ratios, tokens = part.groups[column]
            frames[file].append(_with_counts(_table(methods | {column: labels}, interval(ratios, tokens)), tokens))
        defined = ~np.isnan(part.geometry)
        of_one = interval(np.nan_to_num(part.geometry), defined.astype(np.float64))
        frames["geometry"].append(_geometry(name, part, of_one, defined.sum(0), sites))
        steps = _table(layers | {"step": STEP_POINTS, "measure": STEP_MEASURES}, interval(part.steps, part.tokens))
        frames["steps"].append(steps.dropna(subset="mean"))
        frames["attention_to_first"].append(_table(layers, interval(part.to_first, part.tokens - 1)).assign(**counts))
        ratios, tokens = part.groups["positions"]
        without = interval(ratios[..., 1:].sum(-1), tokens[:, 1:].sum(-1))
        frames["mixing_without_first"].append(_table(methods, without).assign(**counts))
        frames["identities"].append(_identities(name, part))
        heads = layers | {"head": range(1, part.by_head.shape[-1] + 1)}
        of_heads = _table(heads, interval(part.by_head, part.tokens)).dropna(subset="mean")
        frames["mixing_by_head"].append(of_heads.assign(**counts))
        frames["attention_gain"].append(_grid(layers).assign(gain=part.gains))
    tables = {name: pd.concat(parts) for name, parts in frames.items()}
    return tables | {"mixing_overall": _overall(means, mixing), "mixing_difference": _difference(means, mixing)}


def _geometry(
    name: str, part: Sums, of_one: Interval, documents: npt.NDArray[np.int64], sites: Sequence[Site]
) -> pd.DataFrame:
    """The means over documents, each of those in which a measure is defined; then the measure across documents."""
    values = Interval(*(np.column_stack(pair) for pair in zip(of_one, part.across, strict=True)))
    labels = {"checkpoint": [name], "site": sites, "measure": (*GEOMETRY_MEASURES, ACROSS)}
    counts = np.column_stack([documents, np.full(len(sites), len(part.tokens))])
    table = _table(labels, values).assign(documents=counts.ravel())
    table.insert(1, "layer", [site.layer for site in table["site"]])
    return table.assign(site=[site.point for site in table["site"]]).rename(columns={"site": "point"})


def _identities(name: str, part: Sums) -> pd.DataFrame:
    """The largest relative errors by level, from the embedding on, without identities that a level does not have."""
    labels = {"checkpoint": [name], "layer": range(len(part.identities)), "identity": IDENTITIES}
    return _grid(labels).assign(largest_error_ppm=1e6 * part.identities.ravel()).dropna()


def _overall(means: Mapping[str, Resampled], mixing: MixingParameters) -> pd.DataFrame:
    """The mean over the layers, and the rank correlation of the layers' means with depth."""
    frames = []
    for name, by_layer in means.items():
        frame = _table({"checkpoint": [name], "method": mixing.methods}, _of_layers(by_layer))
        depth = spearman_with_depth(by_layer)
        frames.append(frame.assign(depth_spearman=depth.mean, depth_ci_low=depth.low, depth_ci_high=depth.high))
    return pd.concat(frames)


def _of_layers(by_layer: Resampled) -> Interval:
    """The mean over the layers."""
    return Resampled(by_layer.mean.mean(0), by_layer.samples.mean(1), by_layer.documents.min(0)).interval()


def _difference(means: Mapping[str, Resampled], mixing: MixingParameters) -> pd.DataFrame:
    """By layer and method, also with intervals that hold for all of them at once; no rows with one checkpoint only."""
    if DIFFERENCE not in means:
        columns = ["layer", "method", "difference", "ci_low", "ci_high", "simultaneous_low", "simultaneous_high"]
        return pd.DataFrame(columns=columns)
    by_layer, every = means[DIFFERENCE].interval(), means[DIFFERENCE].simultaneous()
    frame = _table({"layer": range(1, len(by_layer.mean) + 1), "method": mixing.methods}, by_layer)
    frame = frame.assign(simultaneous_low=every.low.ravel(), simultaneous_high=every.high.ravel())
    return frame.rename(columns={"mean": "difference"})


def metrics(sums: Mapping[str, Sums], means: Mapping[str, Resampled], mixing: MixingParameters) -> dict[str, Any]:
    """`reports/metrics/mixing.json`: the headline ratios of each checkpoint, and what fine-tuning changed of one."""
    headline = {method: place for place, method in enumerate(mixing.methods) if RATIOS[method].headline}
    written: dict[str, Any] = {
        name: {method: float(means[name].mean.mean(0)[place]) for method, place in headline.items()}
        | {"identity_error": float(np.nanmax(part.identities))}
        for name, part in sums.items()
    }
    if DIFFERENCE in means:
        method = preferred_ratio(mixing.methods)
        place = mixing.methods.index(method)
        mean, low, high = (float(part[place]) for part in _of_layers(means[DIFFERENCE]))
        written[DIFFERENCE] = {method: {"mean": mean, "ci_low": low, "ci_high": high}}
    return written | {"documents": len(next(iter(sums.values())).tokens)}


def _with_counts(frame: pd.DataFrame, counts: Doubles) -> pd.DataFrame:
    """Tokens and documents of each row's group, the last label; groups without tokens are left out."""
    repeats = len(frame) // counts.shape[1]
    tokens, documents = (np.tile(each.sum(0), repeats) for each in (counts.astype(int), counts > 0))
    return frame.assign(tokens=tokens, documents=documents)[tokens > 0]
