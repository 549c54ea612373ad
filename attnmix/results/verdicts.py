"""Verdicts on differences, from intervals over texts and training runs: a direction, or the reason why there is none.

A cell is a measure in one layer, or its mean over layers. Shapes: R models on one side of a comparison, C cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtrit

from attnmix.core.statistics import LEVEL, MIN_SIMULTANEOUS, MIN_STANDARD_ERROR, Doubles, Interval, Resampled, Verdict
from attnmix.measures.ratios import RATIOS
from attnmix.results.measure_names import SWAP
from attnmix.results.tables import is_own_share

MORE_MIXING = "more"
LESS_MIXING = "less"
NO_MIXING_MEASURE = ""
MIN_TRAININGS = 3  # per side with several runs; two runs that are similar by chance would underestimate the variance
VERDICTS = {
    Verdict.INCONCLUSIVE: "an interval includes 0, over texts or, for `between_seeds`, over training runs",
    Verdict.TOO_FEW_TEXTS: f"a simultaneous interval needs {MIN_SIMULTANEOUS} texts or more",
    Verdict.TOO_FEW_RUNS: (
        f"an interval over training runs needs at least {MIN_TRAININGS} runs on each side that has several"
    ),
    Verdict.NO_INTERVAL: "all texts, or all training runs, have the same difference, such as 0",
}
"""The meaning of each verdict that is not a direction."""


class Trainings(NamedTuple):
    """The training runs (models) on one side of a comparison, with the mean of each cell over the texts."""

    names: Sequence[str]
    means: Sequence[Resampled]  # [cells] for each model, with the same texts in every sample
    fixed: bool = False  # True for a single model that is not one of several training runs

    def mean(self) -> Resampled:
        """Return the mean over the models for each pair of measure and layer, over all texts and in each sample."""
        means = np.mean([model.mean for model in self.means], axis=0)
        samples = np.mean([model.samples for model in self.means], axis=0)
        first = self.means[0]
        return Resampled(means, samples, first.documents, first.counts)


def select_cells(resampled: Resampled, cells: Sequence[int]) -> Resampled:
    """Return the means and bootstrap samples of the cells (pairs of measure and layer) with the indices `cells`."""
    means = resampled.mean[cells]
    samples = resampled.samples[:, cells]
    documents = resampled.documents[cells]
    counts = np.asarray(resampled.counts)[cells]
    return Resampled(means, samples, documents, counts)


def have_enough_trainings(before: Trainings, after: Trainings) -> bool:
    """Return True if an interval over training runs can be computed.

    At least one side must have several training runs, and each such side at least `MIN_TRAININGS` runs.
    """
    runs_by_side = [len(before.means), len(after.means)]
    several = [runs for runs in runs_by_side if runs > 1]
    if not several:
        return False
    return min(several) >= MIN_TRAININGS


def interval_over_trainings(before: Trainings, after: Trainings, cells: Sequence[int]) -> Interval:
    """Return the interval of the difference over training runs, with Bonferroni correction for the number of `cells`.

    If both sides have several runs, this is Welch's interval, for unequal variances and numbers of runs. If one side is
    a `fixed` model, such as the pretrained model, it is Student's interval for the mean of the other side. If one side
    is a single training run, the variance of this run is assumed to be that of the other side. A run that is treated as
    fixed would often seem different from other runs with the same settings. The interval is NaN if there are too few
    training runs, or if they do not vary. `cells` are the indices of C cells (pairs of measure and layer); R is the
    number of runs of a side.
    """
    before_RC = _stack_means(before, cells)
    after_RC = _stack_means(after, cells)
    difference_C = after_RC.mean(0) - before_RC.mean(0)
    if not have_enough_trainings(before, after):
        unknown_C = np.full_like(difference_C, np.nan)
        return Interval(difference_C, unknown_C, unknown_C)
    if len(before_RC) > 1 and len(after_RC) > 1:
        variance_C, freedom_C = _combine_variances(before_RC, after_RC)
    else:
        runs_RC = before_RC if len(before_RC) > 1 else after_RC  # the side with several runs
        is_single_model_fixed = before.fixed or after.fixed
        variance_C, freedom_C = _compare_with_single_model(runs_RC, is_single_model_fixed)
    error_C = np.sqrt(variance_C)
    # 1 - LEVEL is divided by 2, for both tails, and by the number of cells (Bonferroni's correction).
    probability = 1 - (1 - LEVEL) / (2 * len(cells))
    quantile_C = stdtrit(freedom_C, probability)
    half_width_C = np.where(error_C > MIN_STANDARD_ERROR, quantile_C * error_C, np.nan)
    return Interval(difference_C, difference_C - half_width_C, difference_C + half_width_C)


def _compare_with_single_model(runs_RC: Doubles, is_single_model_fixed: bool) -> tuple[Doubles, Doubles]:
    """Return the variance `[C]` of the difference between the mean of R runs and a single model, in C cells.

    The second result contains the degrees of freedom of Student's t, `[C]`. If the single model is fixed, its variance
    is 0; otherwise, its variance is assumed to be that of one of the R runs.
    """
    runs = len(runs_RC)
    variance_C = _estimate_variance_of_mean(runs_RC)
    freedom_C = np.full_like(variance_C, runs - 1)
    if not is_single_model_fixed:
        # The variance of one run is `runs` times the variance of the runs' mean.
        variance_C = variance_C * (runs + 1)
    return variance_C, freedom_C


def _combine_variances(before_RC: Doubles, after_RC: Doubles) -> tuple[Doubles, Doubles]:
    """Return the variance `[C]` of the difference between the means of two sides, and Welch's degrees of freedom `[C]`.

    The arguments contain C values for each of R training runs. The degrees of freedom are NaN if neither side varies.
    """
    before_C = _estimate_variance_of_mean(before_RC)
    after_C = _estimate_variance_of_mean(after_RC)
    variance_C = before_C + after_C
    # The degrees of freedom according to the Welch-Satterthwaite equation.
    weights_C = before_C**2 / (len(before_RC) - 1) + after_C**2 / (len(after_RC) - 1)
    undefined_C = np.full_like(variance_C, np.nan)
    freedom_C = np.divide(variance_C**2, weights_C, out=undefined_C, where=weights_C > 0)
    return variance_C, freedom_C


def _estimate_variance_of_mean(runs_RC: Doubles) -> Doubles:
    """Return the estimated variance `[C]` of the mean over training runs."""
    variance_C: Doubles = runs_RC.var(0, ddof=1) / len(runs_RC)
    return variance_C


def _stack_means(side: Trainings, cells: Sequence[int]) -> Doubles:
    """Return the means `[R, C]` of selected cells for each model of a side; `cells` are indices."""
    means = [model.mean[cells] for model in side.means]
    return np.stack(means)


def name_directions(interval: Interval) -> npt.NDArray[Any]:
    """Return the `Verdict` on each difference: higher or lower if its interval excludes 0, otherwise inconclusive.

    The verdict is `NO_INTERVAL` if the bounds of the interval are NaN.
    """
    cases = [np.isnan(interval.low), interval.low > 0, interval.high < 0]
    return np.select(cases, [Verdict.NO_INTERVAL, Verdict.HIGHER, Verdict.LOWER], Verdict.INCONCLUSIVE)


def direction_of_mixing(measure: str) -> Verdict | None:
    """Return the direction, higher or lower, in which a measure indicates more mixing; None for other measures."""
    if is_own_share(measure):
        return Verdict.LOWER
    if measure in RATIOS or measure.startswith(SWAP):
        return Verdict.HIGHER
    return None


def name_mixing(rows: pd.DataFrame) -> list[str]:
    """Return `more`, `less` or `inconclusive` for each row: how much `after` mixes, compared with `before`.

    The entry is an empty string if the measure of the row does not measure mixing.
    """
    meanings = []
    for measure, verdict in zip(rows["measure"], rows["between_models"], strict=True):
        direction = direction_of_mixing(measure)  # the verdict that means more mixing
        if direction is None:
            meaning = NO_MIXING_MEASURE
        elif verdict == direction:
            meaning = MORE_MIXING
        elif verdict in (Verdict.HIGHER, Verdict.LOWER):
            meaning = LESS_MIXING
        else:
            meaning = Verdict.INCONCLUSIVE.value
        meanings.append(meaning)
    return meanings


def combine_verdicts(between_models: pd.Series, trainings: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the verdict `between_seeds` of each row.

    It combines the verdict for the interval over texts with that for the interval over training runs.

    Args:
        between_models: The verdicts on the intervals over texts.
        trainings: The verdicts on the intervals over training runs.

    Returns:
        The common verdict if both are equal, otherwise `INCONCLUSIVE`. If an interval is missing, the verdict is the
        reason, such as `NO_INTERVAL`.
    """
    verdicts = []
    for over_texts, over_trainings in zip(between_models, trainings, strict=True):
        has_text_interval = over_texts not in (Verdict.TOO_FEW_TEXTS, Verdict.NO_INTERVAL)
        if not has_text_interval:
            verdict = over_texts
        elif over_trainings == Verdict.NO_INTERVAL:
            verdict = Verdict.NO_INTERVAL.value
        elif over_texts == over_trainings:
            verdict = over_texts
        else:
            verdict = Verdict.INCONCLUSIVE.value
        verdicts.append(verdict)
    return np.array(verdicts, dtype=object)


def describe_assumption(side: Trainings) -> str:
    """Return a phrase on the training runs of one side, with the assumption about the variance of a single model."""
    runs = len(side.means)
    if runs > 1:
        return f"{runs} training runs"
    if side.fixed:
        return "one fixed model (pass it in a list to treat it as a training run that varies like the others)"
    return "one training run, assumed to vary like the others,"


def name_models(side: Trainings) -> str:
    """Return a label with the name of the model, or the names of the models, on one side of a comparison."""
    names = list(dict.fromkeys(side.names))
    if len(side.names) == 1:
        return names[0]
    return f"{len(side.names)} training runs, of {', '.join(names)}"
