"""From every document's measures to the tables under `reports/plots/` and the metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from stages.mixing.batches import DocumentMeasures
from stages.mixing.documents import CLASSES, Document
from stages.mixing.geometry import GEOMETRY_MEASURES
from stages.mixing.gradients import REFERENCES
from stages.mixing.matrices import with_rollouts
from stages.mixing.ratios import RATIOS, preferred_ratio
from stages.mixing.statistics import Interval, Resampled, resample, spearman_with_depth
from stages.mixing.steps import STEP_MEASURES
from stages.parameters import MixingParameters
from stages.sites import STEP_POINTS, Site

Doubles = npt.NDArray[np.float64]

# Positions are split where they double: 0, 1, 2-3, 4-7, ...
POSITION_STARTS = (0, *(2**power for power in range(16)))
DIFFERENCE = "difference"  # fine-tuned minus pretrained, of the same documents


class Sums(NamedTuple):
    """One checkpoint: arrays with an axis of counted documents first, but for the last three."""

    by_class: Doubles  # [documents, layers, methods, classes]
    class_counts: Doubles  # [documents, classes]
    by_position: Doubles  # [documents, layers, methods, ranges]
    position_counts: Doubles  # [documents, ranges]
    geometry: Doubles  # [documents, sites, measures]
    steps: Doubles  # [documents, layers, steps, measures]
    identities: Doubles  # [layers, 2], the largest of all documents, counted or not
    gains: Doubles  # [layers], `attention_gain`
    agreement: Doubles | None  # [documents, references, layers, methods]

    @property
    def layers(self) -> range:
        """From 1 on."""
        return range(1, len(self.identities) + 1)

    @property
    def tokens(self) -> Doubles:
        """Counted tokens of each document `[documents]`."""
        return np.asarray(self.class_counts.sum(-1))


class SumsOfDocuments:
    """Adds up one checkpoint's measures, one document in memory at a time."""

    def __init__(self) -> None:
        self.rows: list[tuple[Doubles, ...]] = []
        self.identities: list[Doubles] = []

    def add(self, document: Document, measures: DocumentMeasures) -> None:
        """Take one document in; one that does not count adds to the identities only."""
        self.identities.append(measures.identities)
        if document.counted:
            positions = np.searchsorted(POSITION_STARTS, np.arange(document.counted), side="right") - 1
            self.rows.append(
                (
                    *_group_sums(measures.ratios, document.classes[: document.counted], len(CLASSES)),
                    *_group_sums(measures.ratios, positions, len(POSITION_STARTS)),
                    measures.geometry,
                    measures.steps,
                )
            )

    def sums(self, gains: Doubles, agreement: Doubles | None) -> Sums:
        """Everything that was added."""
        stacked = [np.stack(column) for column in zip(*self.rows, strict=True)]
        return Sums(*stacked, np.max(self.identities, axis=0), gains, agreement)  # type: ignore[call-arg]  # six arrays


def _group_sums(ratios_MLT: npt.NDArray[np.float32], groups: npt.NDArray[Any], size: int) -> tuple[Doubles, Doubles]:
    """Sums `[layers, methods, groups]` over the tokens of each group, and their counts `[groups]`."""
    membership = np.eye(size)[groups]
    return np.einsum("mlt,tg->lmg", ratios_MLT[:, :, : len(groups)].astype(np.float64), membership), membership.sum(0)


def overall_means(sums: Mapping[str, Sums], mixing: MixingParameters, seed: int) -> dict[str, Resampled]:
    """Mean ratios `[layers, methods]` of each checkpoint, and of their `DIFFERENCE` where there are two."""
    means = {
        name: resample(part.by_class.sum(-1), part.tokens[:, None, None], mixing.bootstrap_samples, seed)
        for name, part in sums.items()
    }
    if len(means) == 2:
        means[DIFFERENCE] = means["finetuned"].minus(means["pretrained"])
    return means


def plot_tables(
    sums: Mapping[str, Sums], means: Mapping[str, Resampled], sites: Sequence[Site], mixing: MixingParameters, seed: int
) -> dict[str, pd.DataFrame]:
    """The csv files of `reports/plots/` by name."""
    frames: dict[str, list[pd.DataFrame]] = defaultdict(list)
    ranges = [_position_range(number) for number in range(len(POSITION_STARTS))]

    def interval(values: Doubles, counts: Doubles) -> Interval:
        return resample(values, counts, mixing.bootstrap_samples, seed).interval()

    for name, part in sums.items():
        layers = {"checkpoint": [name], "layer": part.layers}
        methods = layers | {"method": mixing.methods}
        documents = len(part.tokens)
        frames["mixing"].append(
            _table(methods, means[name].interval()).assign(tokens=int(part.tokens.sum()), documents=documents)
        )
        by_class = interval(part.by_class, part.class_counts[:, None, None])
        frames["mixing_by_class"].append(
            _with_counts(_table(methods | {"token_class": CLASSES}, by_class), part.class_counts)
        )
        by_position = interval(part.by_position, part.position_counts[:, None, None])
        frames["mixing_by_position"].append(
            _with_counts(_table(methods | {"positions": ranges}, by_position), part.position_counts)
        )
        labels = {"checkpoint": [name], "site": sites, "measure": GEOMETRY_MEASURES}
        geometry = _table(labels, interval(part.geometry, np.ones((documents, 1, 1)))).assign(documents=documents)
        frames["geometry"].append(_with_layer_and_point(geometry))
        steps = interval(part.steps, part.tokens[:, None, None, None])
        frames["steps"].append(_table(layers | {"step": STEP_POINTS, "measure": STEP_MEASURES}, steps))
        frames["mixing_gradient"].append(_agreement(name, part, mixing))
        frames["attention_gain"].append(_grid(layers).assign(gain=part.gains))
    tables = {name: pd.concat(parts) for name, parts in frames.items()}
    return tables | {"mixing_overall": _overall(means, mixing), "mixing_difference": _difference(means, mixing)}


def _overall(means: Mapping[str, Resampled], mixing: MixingParameters) -> pd.DataFrame:
    """The mean over the layers, and the rank correlation of the layers' means with depth."""
    frames = []
    for name, by_layer in means.items():
        labels = {"checkpoint": [name], "method": mixing.methods}
        of_layers = Resampled(by_layer.mean.mean(0), by_layer.samples.mean(1)).interval()
        depth = spearman_with_depth(by_layer)
        frames.append(
            _table(labels, of_layers).assign(
                depth_spearman=depth.mean, depth_ci_low=depth.low, depth_ci_high=depth.high
            )
        )
    return pd.concat(frames)


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
        | {"identity_error": float(part.identities.max())}
        for name, part in sums.items()
    }
    if DIFFERENCE in means:
        method = preferred_ratio(mixing.methods)
        difference = _overall({DIFFERENCE: means[DIFFERENCE]}, mixing).set_index("method").loc[method]
        written[DIFFERENCE] = {method: difference[["mean", "ci_low", "ci_high"]].astype(float).to_dict()}
    return written | {"documents": len(next(iter(sums.values())).tokens)}


def _position_range(number: int) -> str:
    """A range of `POSITION_STARTS` as text."""
    first, last = POSITION_STARTS[number], (*POSITION_STARTS[1:], 2 * POSITION_STARTS[-1])[number] - 1
    return str(first) if first == last else f"{first}-{last}"


def _grid(labels: Mapping[str, Any]) -> pd.DataFrame:
    """A row for each combination of the labels, the last one running fastest."""
    return pd.DataFrame(list(product(*labels.values())), columns=list(labels))


def _table(labels: Mapping[str, Any], interval: Interval) -> pd.DataFrame:
    """`_grid`, with an interval whose axes are the labels in their order."""
    return _grid(labels).assign(mean=interval.mean.ravel(), ci_low=interval.low.ravel(), ci_high=interval.high.ravel())


def _with_counts(frame: pd.DataFrame, counts: Doubles) -> pd.DataFrame:
    """Tokens and documents of each row's group, the last label; groups without tokens are left out."""
    repeats = len(frame) // counts.shape[1]
    frame = frame.assign(
        tokens=np.tile(counts.sum(0).astype(int), repeats), documents=np.tile((counts > 0).sum(0), repeats)
    )
    return frame[frame["tokens"] > 0]


def _with_layer_and_point(frame: pd.DataFrame) -> pd.DataFrame:
    """The column `site` as two."""
    frame.insert(1, "layer", [site.layer for site in frame["site"]])
    frame.insert(2, "point", [site.point for site in frame["site"]])
    return frame.drop(columns="site")
