"""From every document's measures to the tables under `reports/plots/` and the metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from stages.mixing.batches import DocumentMeasures
from stages.mixing.documents import CLASSES, Document
from stages.mixing.geometry import GEOMETRY_MEASURES
from stages.mixing.gradients import REFERENCES
from stages.mixing.identities import IDENTITIES
from stages.mixing.matrices import with_rollouts
from stages.mixing.ratios import RATIOS, preferred_ratio
from stages.mixing.statistics import Interval, Resampled, resample, spearman_with_depth
from stages.mixing.steps import STEP_MEASURES
from stages.parameters import MixingParameters
from stages.sites import STEP_POINTS, Site

Doubles = npt.NDArray[np.float64]

# Positions are split where they double: 0, 1, 2-3, 4-7, ...
POSITION_STARTS = (0, *(2**power for power in range(16)))
POSITIONS = ("0", "1", *(f"{start}-{2 * start - 1}" for start in POSITION_STARTS[2:]))
# How tokens are told apart, by the column of its own csv file.
GROUPS = {"token_class": ("mixing_by_class", CLASSES), "positions": ("mixing_by_position", POSITIONS)}
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
    agreement: Doubles | None  # [documents, references, layers, methods]

    @property
    def tokens(self) -> Doubles:
        """Counted tokens `[N]`."""
        return np.asarray(self.groups["token_class"][1].sum(-1))

    @property
    def layers(self) -> range:
        """From 1 on."""
        return range(1, len(self.gains) + 1)


def add_up(
    documents: Sequence[Document], measured: Iterable[DocumentMeasures], gains: Doubles, agreement: Doubles | None
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
    stacked = {name: np.stack(parts) for name, parts in columns.items()}
    groups = {column: (stacked[column], stacked[f"{column} tokens"]) for column in GROUPS}
    to_first, geometry, steps = (stacked[name] for name in ("to_first", "geometry", "steps"))
    return Sums(groups, to_first, geometry, steps, np.stack(errors).max(0), gains, agreement)


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
        places = {"checkpoint": [name], "site": sites, "measure": GEOMETRY_MEASURES}
        geometry = _table(places, interval(part.geometry, np.ones(len(part.tokens))))
        geometry.insert(1, "layer", [site.layer for site in geometry["site"]])
        geometry["site"] = [site.point for site in geometry["site"]]
        frames["geometry"].append(geometry.rename(columns={"site": "point"}).assign(documents=len(part.tokens)))
        steps = _table(layers | {"step": STEP_POINTS, "measure": STEP_MEASURES}, interval(part.steps, part.tokens))
        frames["steps"].append(steps.dropna(subset="mean"))
        frames["attention_to_first"].append(_table(layers, interval(part.to_first, part.tokens - 1)).assign(**counts))
        ratios, tokens = part.groups["positions"]
        without = interval(ratios[..., 1:].sum(-1), tokens[:, 1:].sum(-1))
        frames["mixing_without_first"].append(_table(methods, without).assign(**counts))
        frames["identities"].append(_identities(name, part))
        frames["mixing_gradient"].append(_agreement(name, part, mixing))
        frames["attention_gain"].append(_grid(layers).assign(gain=part.gains))
    tables = {name: pd.concat(parts) for name, parts in frames.items()}
    return tables | {"mixing_overall": _overall(means, mixing), "mixing_difference": _difference(means, mixing)}


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
    return Resampled(by_layer.mean.mean(0), by_layer.samples.mean(1)).interval()


def _difference(means: Mapping[str, Resampled], mixing: MixingParameters) -> pd.DataFrame:
    """By layer and method; no rows with one checkpoint only."""
    if DIFFERENCE not in means:
        return pd.DataFrame(columns=["layer", "method", "difference", "ci_low", "ci_high"])
    by_layer = means[DIFFERENCE].interval()
    frame = _table({"layer": range(1, len(by_layer.mean) + 1), "method": mixing.methods}, by_layer)
    return frame.rename(columns={"mean": "difference"})


def _agreement(name: str, part: Sums, mixing: MixingParameters) -> pd.DataFrame:
    """Rank correlation with the gradient reference, mean over documents; no rows without gradient documents."""
    methods = [*mixing.methods, *with_rollouts(mixing.matrices)]
    labels = {"checkpoint": [name], "reference": REFERENCES, "layer": part.layers, "method": methods}
    if part.agreement is None:
        return pd.DataFrame(columns=[*labels, "spearman", "documents"])
    return _grid(labels).assign(spearman=part.agreement.mean(0).ravel(), documents=len(part.agreement))


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


def _grid(labels: Mapping[str, Any]) -> pd.DataFrame:
    """A row for each combination of the labels, the last one running fastest."""
    return pd.DataFrame(list(product(*labels.values())), columns=list(labels))


def _table(labels: Mapping[str, Any], interval: Interval) -> pd.DataFrame:
    """`_grid`, with an interval whose axes are the labels in their order."""
    return _grid(labels).assign(mean=interval.mean.ravel(), ci_low=interval.low.ravel(), ci_high=interval.high.ravel())


def _with_counts(frame: pd.DataFrame, counts: Doubles) -> pd.DataFrame:
    """Tokens and documents of each row's group, the last label; groups without tokens are left out."""
    repeats = len(frame) // counts.shape[1]
    tokens, documents = (np.tile(each.sum(0), repeats) for each in (counts.astype(int), counts > 0))
    return frame.assign(tokens=tokens, documents=documents)[tokens > 0]
