"""The tables of the gradient reference: its agreement with the measures, its levels, and mixing from the input on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.options import MeasureParameters
from attnmix.core.statistics import resample
from attnmix.measures.derivatives import FORMS, DocumentDerivatives
from attnmix.measures.gradients import REFERENCES
from attnmix.measures.matrices import ROLLOUTS, with_rollouts

Doubles = npt.NDArray[np.float64]
Labels = Mapping[str, Any]

DIFFERENCE = "difference"  # fine-tuned minus pretrained, of the same documents
COUNTED = ("mean", "ci_low", "ci_high", "simultaneous_low", "simultaneous_high", "tokens", "documents")


class _Measured(NamedTuple):
    """One quantity of a checkpoint's documents, D of them; the other axes are those of the table's labels."""

    sums: Doubles  # [D, ...] over the tokens for which it is defined
    tokens: Doubles  # [D, ...], their number


def derivative_tables(
    derivatives: Mapping[str, Mapping[str, DocumentDerivatives]], mixing: MeasureParameters, seed: int
) -> dict[str, pd.DataFrame]:
    """The csv files by name, from each checkpoint's documents by name; tables without rows where there are none."""
    derivatives = {name: documents for name, documents in derivatives.items() if documents}
    methods = with_rollouts(mixing.matrices)
    layers = range(1, _layers(derivatives) + 1)
    of_levels = {"reference": REFERENCES, "layer": layers, "form": FORMS}
    levels = {name: _measured(each.levels for each in part.values()) for name, part in derivatives.items()}
    rolled = [name for name in methods if name in ROLLOUTS] + [f"derivative_{form}" for form in FORMS]
    from_input = {name: _measured(map(_from_input, part.values())) for name, part in derivatives.items()}
    ratios = {name: _measured(each.ratios for each in part.values()) for name, part in derivatives.items()}
    ranked = {"reference": REFERENCES, "layer": layers, "method": [*mixing.methods, *methods]}
    agreement = {name: np.stack([each.agreement for each in part.values()]) for name, part in derivatives.items()}
    names = {name: list(part) for name, part in derivatives.items()}
    samples = mixing.bootstrap_samples
    return {
        "derivative_levels": _overall(of_levels, levels, samples, seed),
        "derivative_ratios": _overall({"layer": layers, "method": mixing.methods}, ratios, samples, seed),
        "derivative_levels_by_review": _level_by_review(of_levels, levels, names),
        "mixing_from_input": _overall({"layer": layers, "method": rolled}, from_input, samples, seed),
        "mixing_gradient": _agreement(ranked, agreement, samples, seed),
        "mixing_gradient_by_review": _by_review(
            ranked, {name: {"spearman": part} for name, part in agreement.items()}, names, ("spearman",)
        ),
    }


def _layers(derivatives: Mapping[str, Mapping[str, DocumentDerivatives]]) -> int:
    return next((len(each.from_input) for part in derivatives.values() for each in part.values()), 0)


def _measured(of_tokens: Iterable[Doubles]) -> _Measured:
    """From every document's `[..., tokens]`, NaN for a token for which the quantity is undefined."""
    parts = [(np.nansum(array, -1), (~np.isnan(array)).sum(-1)) for array in of_tokens]
    sums, tokens = (np.stack(each).astype(np.float64) for each in zip(*parts, strict=True))
    return _Measured(sums, tokens)


def _from_input(document: DocumentDerivatives) -> Doubles:
    """1 - R_ii of the rollouts, then the derivative by word embeddings in its forms, `[layers, methods, tokens]`."""
    of_words = document.levels[REFERENCES.index("word_embedding")]
    return np.concatenate([document.from_input, of_words], axis=1)


def _overall(labels: Labels, measured: Mapping[str, _Measured], samples: int, seed: int) -> pd.DataFrame:
    """Means over tokens with intervals over documents, of each checkpoint and of their paired difference.

    The simultaneous ones hold for all cells of the checkpoint's table at once.
    """
    means = {name: resample(part.sums, part.tokens, samples, seed) for name, part in measured.items()}
    tokens = {name: part.tokens for name, part in measured.items()}
    if len(means) == 2:
        means[DIFFERENCE] = means["finetuned"].minus(means["pretrained"])
        tokens[DIFFERENCE] = np.minimum(*tokens.values())
    frames = []
    for name, mean in means.items():
        counts = {"tokens": tokens[name].sum(0), "documents": (tokens[name] > 0).sum(0)}
        interval, every = mean.interval(), mean.simultaneous()
        ends = {"ci_low": interval.low, "ci_high": interval.high}
        ends |= {"simultaneous_low": every.low, "simultaneous_high": every.high}
        frames.append(_rows({"checkpoint": [name], **labels}, {"mean": mean.mean, **ends}, counts))
    return _joined(frames, ["checkpoint", *labels, *COUNTED])


def _level_by_review(labels: Labels, measured: Mapping[str, _Measured], names: Mapping[str, list[str]]) -> pd.DataFrame:
    columns = {name: {"mean": _mean(part), "tokens": part.tokens.astype(np.int64)} for name, part in measured.items()}
    return _by_review(labels, columns, names, ("mean", "tokens"))


def _mean(part: _Measured) -> Doubles:
    return np.divide(part.sums, part.tokens, out=np.full_like(part.sums, np.nan), where=part.tokens > 0)


def _agreement(labels: Labels, agreement: Mapping[str, Doubles], samples: int, seed: int) -> pd.DataFrame:
    """Mean rank correlation over the documents for which it is defined, with intervals."""
    frames = []
    for name, of_documents in agreement.items():
        defined = ~np.isnan(of_documents)
        mean = resample(np.nan_to_num(of_documents), defined, samples, seed)
        interval = mean.correlations()
        ends = {"spearman": interval.mean, "ci_low": interval.low, "ci_high": interval.high}
        columns = {**ends, "documents": defined.sum(0)}
        frames.append(_rows({"checkpoint": [name], **labels}, columns))
    return _joined(frames, ["checkpoint", *labels, "spearman", "ci_low", "ci_high", "documents"])


def _by_review(
    labels: Labels, columns: Mapping[str, Labels], names: Mapping[str, list[str]], values: tuple[str, ...]
) -> pd.DataFrame:
    """A row for each checkpoint, document and label."""
    frames = [
        _rows({"checkpoint": [name], "document": names[name], **labels}, of_checkpoint)
        for name, of_checkpoint in columns.items()
    ]
    return _joined(frames, ["checkpoint", "document", *labels, *values])


def _rows(labels: Labels, *columns: Mapping[str, npt.NDArray[Any]]) -> pd.DataFrame:
    """A row for each combination of the labels, the last one running fastest; columns' axes are the labels."""
    frame = pd.DataFrame(list(product(*labels.values())), columns=list(labels))
    flat = {name: array.ravel() for each in columns for name, array in each.items()}
    integers = {name: flat[name].astype(np.int64) for name in ("tokens", "documents") if name in flat}
    return frame.assign(**flat | integers)


def _joined(frames: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    return pd.concat(frames) if frames else pd.DataFrame(columns=columns)
