"""From every document's measures to tables, plots and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from stages.mixing.documents import TOKEN_CLASSES, Document
from stages.mixing.geometry import GEOMETRY_MEASURES
from stages.mixing.gradients import REFERENCES
from stages.mixing.single import MATRICES, Doubles
from stages.mixing.statistics import Resampled, resample, spearman_with_depth
from stages.mixing.steps import STEP_MEASURES, STEPS
from stages.mixing.tables import (
    POSITION_STARTS,
    class_sums,
    grid,
    position_range,
    position_sums,
    table,
    write_metrics,
    write_table,
)
from stages.mixing.work import Work
from stages.models.capture_points import Site
from stages.parameters import METHODS, MixingParameters

PLOTS = Path("reports/plots")
METRICS = Path("reports/metrics/mixing.json")


class Sums(NamedTuple):
    """One checkpoint: arrays with an axis of counted documents first."""

    by_class: Doubles  # [documents, layers, methods, classes]
    class_counts: Doubles  # [documents, classes]
    by_position: Doubles  # [documents, layers, methods, ranges]
    position_counts: Doubles  # [documents, ranges]
    geometry: Doubles  # [documents, sites, measures]
    steps: Doubles  # [documents, layers, steps, measures]
    identities: Doubles  # [2], the largest of all documents, counted or not
    agreement: Doubles | None  # [documents, references, layers, methods]


def collect(work: Work, documents: Sequence[Document], mixing: MixingParameters) -> Sums:
    """Add up each document's measures, one document in memory at a time."""
    columns: list[list[Any]] = [[] for _ in range(6)]
    worst = np.zeros(2)
    for i, document in enumerate(documents):
        measures = work.load(i)
        worst = np.maximum(worst, measures.identities.max(0))
        if document.counted:
            row = (
                *class_sums(document, measures.ratios),
                *position_sums(document, measures.ratios),
                measures.geometry,
                measures.steps,
            )
            for column, value in zip(columns, row, strict=True):
                column.append(value)
    agreement = work.load_agreement(documents, mixing) if mixing.gradient_documents else None
    by_class, class_counts, by_position, position_counts, shapes, steps = (np.stack(column) for column in columns)
    return Sums(by_class, class_counts, by_position, position_counts, shapes, steps, worst, agreement)


def write_reports(
    sums: Mapping[str, Sums],
    gains: Mapping[str, Sequence[float]],
    sites: Sequence[Site],
    mixing: MixingParameters,
    seed: int,
) -> None:
    """Write the csv files under `reports/plots/` and `reports/metrics/mixing.json`."""
    samples = mixing.bootstrap_samples

    def resampled(values: Doubles, counts: Doubles) -> Resampled:
        return resample(values, counts, samples, seed)

    overall = {
        name: resampled(found.by_class.sum(-1), found.class_counts.sum(-1)[:, None, None])
        for name, found in sums.items()
    }
    write_table(PLOTS / "mixing.csv", _overall(sums, overall, mixing.methods))
    write_table(PLOTS / "mixing_by_class.csv", _by_class(sums, mixing.methods, resampled))
    write_table(PLOTS / "mixing_by_position.csv", _by_position(sums, mixing.methods, resampled))
    write_table(PLOTS / "mixing_difference.csv", [_difference(overall, mixing.methods)])
    write_table(PLOTS / "mixing_gradient.csv", [_agreement(sums)])
    write_table(PLOTS / "geometry.csv", _geometry(sums, sites, resampled))
    write_table(PLOTS / "steps.csv", _steps(sums, resampled))
    write_metrics(METRICS, _metrics(sums, overall, gains, mixing))


def _layers(found: Sums) -> range:
    return range(1, found.by_class.shape[1] + 1)


def _overall(
    sums: Mapping[str, Sums], overall: Mapping[str, Resampled], methods: Sequence[str]
) -> Iterator[pd.DataFrame]:
    for name, found in sums.items():
        frame = table({"checkpoint": [name], "layer": _layers(found), "method": methods}, overall[name].interval())
        yield frame.assign(tokens=int(found.class_counts.sum()), documents=len(found.class_counts))


def _by_class(sums: Mapping[str, Sums], methods: Sequence[str], resampled: Any) -> Iterator[pd.DataFrame]:
    for name, found in sums.items():
        split = resampled(found.by_class, found.class_counts[:, None, None]).interval()
        labels = {"checkpoint": [name], "layer": _layers(found), "method": methods, "token_class": TOKEN_CLASSES}
        yield _with_counts(table(labels, split), found.class_counts)


def _by_position(sums: Mapping[str, Sums], methods: Sequence[str], resampled: Any) -> Iterator[pd.DataFrame]:
    ranges = [position_range(number) for number in range(len(POSITION_STARTS))]
    for name, found in sums.items():
        split = resampled(found.by_position, found.position_counts[:, None, None]).interval()
        labels = {"checkpoint": [name], "layer": _layers(found), "method": methods, "positions": ranges}
        yield _with_counts(table(labels, split), found.position_counts)


def _with_counts(frame: pd.DataFrame, counts: Doubles) -> pd.DataFrame:
    """Tokens and documents of each row's group, the last label; groups without tokens are left out."""
    repeats = len(frame) // counts.shape[1]
    frame = frame.assign(
        tokens=np.tile(counts.sum(0).astype(int), repeats), documents=np.tile((counts > 0).sum(0), repeats)
    )
    return frame[frame["tokens"] > 0]


def _difference(overall: Mapping[str, Resampled], methods: Sequence[str]) -> pd.DataFrame:
    """Fine-tuned minus pretrained of the same documents; no rows with one checkpoint only."""
    columns = ["layer", "method", "difference", "ci_low", "ci_high"]
    if len(overall) < 2:
        return pd.DataFrame(columns=columns)
    interval = overall["finetuned"].minus(overall["pretrained"]).interval()
    frame = table({"layer": range(1, len(interval.mean) + 1), "method": methods}, interval)
    return frame.rename(columns={"mean": "difference"})


def _agreement(sums: Mapping[str, Sums]) -> pd.DataFrame:
    """Spearman with the gradient reference, mean over documents; no rows without gradient documents."""
    frames = [pd.DataFrame(columns=["checkpoint", "reference", "layer", "method", "spearman", "documents"])]
    for name, found in sums.items():
        if found.agreement is not None:
            labels = {"checkpoint": [name], "reference": REFERENCES, "layer": _layers(found)}
            frame = grid(labels | {"method": [*METHODS, *MATRICES]})
            frames.append(frame.assign(spearman=found.agreement.mean(0).ravel(), documents=len(found.agreement)))
    return pd.concat(frames[1:] or frames)


def _geometry(sums: Mapping[str, Sums], sites: Sequence[Site], resampled: Any) -> Iterator[pd.DataFrame]:
    for name, found in sums.items():
        frame = table(
            {"checkpoint": [name], "site": range(len(sites)), "measure": GEOMETRY_MEASURES},
            resampled(found.geometry, np.ones((len(found.geometry), 1, 1))).interval(),
        )
        frame.insert(1, "layer", [sites[site].layer for site in frame["site"]])
        frame.insert(2, "point", [sites[site].point for site in frame["site"]])
        yield frame.drop(columns="site").assign(documents=len(found.geometry))


def _steps(sums: Mapping[str, Sums], resampled: Any) -> Iterator[pd.DataFrame]:
    for name, found in sums.items():
        labels = {"checkpoint": [name], "layer": _layers(found), "step": STEPS, "measure": STEP_MEASURES}
        yield table(labels, resampled(found.steps, found.class_counts.sum(-1)[:, None, None, None]).interval())


def _metrics(
    sums: Mapping[str, Sums],
    overall: Mapping[str, Resampled],
    gains: Mapping[str, Sequence[float]],
    mixing: MixingParameters,
) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for name, found in sums.items():
        depth = spearman_with_depth(overall[name])
        metrics[name] = {
            "mean": dict(zip(mixing.methods, overall[name].mean.mean(0).tolist(), strict=True)),
            "spearman_with_depth": dict(zip(mixing.methods, depth.mean.tolist(), strict=True)),
            "identity_error": dict(zip(("attention_output", "attention_norm"), found.identities.tolist(), strict=True)),
            "attention_gain": _per_layer(np.asarray(gains[name])),
            "documents": len(found.class_counts),
            "tokens": int(found.class_counts.sum()),
        }
        if found.agreement is not None:
            # Each layer on its own for what describes one layer, from the word embeddings on for what is rolled out.
            mean = found.agreement.mean(0)
            rolled = {method for method in MATRICES if method.endswith("_rollout")}
            metrics[name]["spearman_with_gradient"] = {
                method: _per_layer(
                    mean[REFERENCES.index("word_embedding" if method in rolled else "layer_input"), :, k]
                )
                for k, method in enumerate([*METHODS, *MATRICES])
            }
    if len(overall) == 2:
        difference = overall["finetuned"].minus(overall["pretrained"])
        layers = Resampled(difference.mean.mean(0), difference.samples.mean(1)).interval()
        metrics["difference"] = {
            method: {"mean": mean, "ci_low": low, "ci_high": high}
            for method, mean, low, high in zip(mixing.methods, *(part.tolist() for part in layers), strict=True)
        }
    return metrics


def _per_layer(values: Doubles) -> dict[str, float | None]:
    """By layer; None where nothing could be compared."""
    return {
        f"layer_{layer:02d}": None if np.isnan(value) else value for layer, value in enumerate(values.tolist(), start=1)
    }
