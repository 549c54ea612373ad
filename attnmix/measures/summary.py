"""From every document's measures to the tables under `reports/plots/` and the metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.points import STEP_POINTS, Site
from attnmix.core.statistics import Draws, Interval, Resampled, spearman_with_depth
from attnmix.measures.geometry import GEOMETRY_MEASURES
from attnmix.measures.identities import IDENTITIES
from attnmix.measures.ratios import RATIOS, preferred_ratio
from attnmix.measures.steps import STEP_MEASURES
from attnmix.measures.sums import GROUPS, Sums, tokens_of
from attnmix.measures.tables import grid as _grid
from attnmix.measures.tables import interval_table as _table

Doubles = npt.NDArray[np.float64]
OfBlock = Callable[..., tuple[Doubles, Doubles]]

TOKENS = tokens_of("token_class")
ACROSS = "mean_cosine_across"  # of tokens of different documents (Ethayarajh, EMNLP 2019), beside `GEOMETRY_MEASURES`
DIFFERENCE = "difference"  # fine-tuned minus pretrained, of the same documents


def overall_means(sums: Mapping[str, Sums], draws: Draws) -> dict[str, Resampled]:
    """Mean ratios `[layers, methods]` of each checkpoint, and of their `DIFFERENCE` where there are two."""

    def of_all(ratios_DLMG: Doubles, tokens_DG: Doubles) -> tuple[Doubles, Doubles]:
        return ratios_DLMG.sum(-1), tokens_DG.sum(-1)[:, None, None]

    read = {name: part.read("token_class", tokens_of("token_class")) for name, part in sums.items()}
    means = {name: draws.resample(starmap(of_all, blocks)) for name, blocks in read.items()}
    if len(means) == 2:
        means[DIFFERENCE] = means["finetuned"].minus(means["pretrained"])
    return means


def plot_tables(
    sums: Mapping[str, Sums],
    means: Mapping[str, Resampled],
    sites: Sequence[Site],
    methods: Sequence[str],
    draws: Draws,
) -> dict[str, pd.DataFrame]:
    """The csv files of `reports/plots/` by name."""
    frames: dict[str, list[pd.DataFrame]] = defaultdict(list)
    for name, part in sums.items():
        layers = {"checkpoint": [name], "layer": part.layers}
        ratios = layers | {"method": methods}
        counts = {"tokens": int(part.counted.sum()), "documents": len(part.counted)}

        def resampled(of_block: OfBlock, *read: str, part: Sums = part) -> Resampled:
            return draws.resample(starmap(of_block, part.read(*read)))

        frames["mixing"].append(_table(ratios, means[name].interval()).assign(**counts))
        for column, (file, labels) in GROUPS.items():
            groups = resampled(_of_groups, column, tokens_of(column)).interval()
            frames[file].append(_with_counts(_table(ratios | {column: labels}, groups), *part.tokens(column)))
        frames["geometry"].append(_geometry(name, part, resampled(_of_documents, "geometry"), sites))
        steps = resampled(_of_tokens, "steps", TOKENS).interval()
        of_steps = _table(layers | {"step": STEP_POINTS, "measure": STEP_MEASURES}, steps)
        frames["steps"].append(of_steps.dropna(subset="mean"))
        to_first = resampled(_of_later_tokens, "to_first", TOKENS).interval()
        frames["attention_to_first"].append(_table(layers, to_first).assign(**counts))
        without = resampled(_without_first, "positions", tokens_of("positions")).interval()
        frames["mixing_without_first"].append(_table(ratios, without).assign(**counts))
        frames["identities"].append(_identities(name, part))
        by_head = resampled(_of_tokens, "by_head", TOKENS).interval()
        heads = layers | {"head": range(1, by_head.mean.shape[-1] + 1)}
        frames["mixing_by_head"].append(_table(heads, by_head).dropna(subset="mean").assign(**counts))
        frames["attention_gain"].append(_grid(layers).assign(gain=part.gains))
    tables = {name: pd.concat(parts) for name, parts in frames.items()}
    return tables | {"mixing_overall": _overall(means, methods), "mixing_difference": _difference(means, methods)}


def _of_groups(ratios_DLMG: Doubles, tokens_DG: Doubles) -> tuple[Doubles, Doubles]:
    return ratios_DLMG, tokens_DG[:, None, None]


def _of_documents(values: Doubles) -> tuple[Doubles, Doubles]:
    """Each document of the same weight where its value is defined."""
    return np.nan_to_num(values), (~np.isnan(values)).astype(np.float64)


def _of_tokens(sums: Doubles, tokens_DG: Doubles) -> tuple[Doubles, Doubles]:
    return sums, tokens_DG.sum(-1).reshape(-1, *[1] * (sums.ndim - 1))


def _of_later_tokens(sums_DL: Doubles, tokens_DG: Doubles) -> tuple[Doubles, Doubles]:
    return sums_DL, tokens_DG.sum(-1)[:, None] - 1


def _without_first(ratios_DLMG: Doubles, tokens_DG: Doubles) -> tuple[Doubles, Doubles]:
    return ratios_DLMG[..., 1:].sum(-1), tokens_DG[:, 1:].sum(-1)[:, None, None]


def _geometry(name: str, part: Sums, resampled: Resampled, sites: Sequence[Site]) -> pd.DataFrame:
    """The means over documents, each of those in which a measure is defined; then the measure across documents."""
    values = Interval(*(np.column_stack(pair) for pair in zip(resampled.interval(), part.across, strict=True)))
    labels = {"checkpoint": [name], "site": sites, "measure": (*GEOMETRY_MEASURES, ACROSS)}
    counts = np.column_stack([resampled.documents, np.full(len(sites), len(part.counted))]).astype(np.int64)
    table = _table(labels, values).assign(documents=counts.ravel())
    table.insert(1, "layer", [site.layer for site in table["site"]])
    return table.assign(site=[site.point for site in table["site"]]).rename(columns={"site": "point"})


def _identities(name: str, part: Sums) -> pd.DataFrame:
    """The largest relative errors by level, from the embedding on, without identities that a level does not have."""
    labels = {"checkpoint": [name], "layer": range(len(part.identities)), "identity": IDENTITIES}
    return _grid(labels).assign(largest_error_ppm=1e6 * part.identities.ravel()).dropna()


def _overall(means: Mapping[str, Resampled], methods: Sequence[str]) -> pd.DataFrame:
    """The mean over the layers, and the rank correlation of the layers' means with depth."""
    frames = []
    for name, by_layer in means.items():
        frame = _table({"checkpoint": [name], "method": methods}, _of_layers(by_layer))
        depth = spearman_with_depth(by_layer)
        frames.append(frame.assign(depth_spearman=depth.mean, depth_ci_low=depth.low, depth_ci_high=depth.high))
    return pd.concat(frames)


def _of_layers(by_layer: Resampled) -> Interval:
    """The mean over the layers."""
    return Resampled(by_layer.mean.mean(0), by_layer.samples.mean(1), by_layer.documents.min(0)).interval()


def _difference(means: Mapping[str, Resampled], methods: Sequence[str]) -> pd.DataFrame:
    """By layer and method, also with intervals that hold for all of them at once; no rows with one checkpoint only."""
    if DIFFERENCE not in means:
        columns = ["layer", "method", "difference", "ci_low", "ci_high", "simultaneous_low", "simultaneous_high"]
        return pd.DataFrame(columns=columns)
    by_layer, every = means[DIFFERENCE].interval(), means[DIFFERENCE].simultaneous()
    frame = _table({"layer": range(1, len(by_layer.mean) + 1), "method": methods}, by_layer)
    frame = frame.assign(simultaneous_low=every.low.ravel(), simultaneous_high=every.high.ravel())
    return frame.rename(columns={"mean": "difference"})


def metrics(sums: Mapping[str, Sums], means: Mapping[str, Resampled], methods: Sequence[str]) -> dict[str, Any]:
    """`reports/metrics/measure.json`: the headline ratios of each checkpoint, and what fine-tuning changed of one."""
    headline = {method: place for place, method in enumerate(methods) if RATIOS[method].headline}
    written: dict[str, Any] = {
        name: {method: float(means[name].mean.mean(0)[place]) for method, place in headline.items()}
        | {"identity_error": float(np.nanmax(part.identities))}
        for name, part in sums.items()
    }
    if DIFFERENCE in means:
        method = preferred_ratio(methods)
        place = list(methods).index(method)
        mean, low, high = (float(part[place]) for part in _of_layers(means[DIFFERENCE]))
        written[DIFFERENCE] = {method: {"mean": mean, "ci_low": low, "ci_high": high}}
    return written | {"documents": len(next(iter(sums.values())).counted)}


def _with_counts(
    frame: pd.DataFrame, tokens_G: npt.NDArray[np.int64], documents_G: npt.NDArray[np.int64]
) -> pd.DataFrame:
    """Tokens and documents of each row's group, the last label; groups without tokens are left out."""
    tokens, documents = (np.tile(each, len(frame) // len(each)) for each in (tokens_G, documents_G))
    return frame.assign(tokens=tokens, documents=documents)[tokens > 0]
