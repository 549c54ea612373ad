"""Verdicts on differences, from intervals over texts and training runs: a direction, or the reason why there is none.

Shapes: R models of a side, C cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtrit

from attnmix.core.statistics import LEVEL, MIN_SIMULTANEOUS, MIN_STANDARD_ERROR, Interval, Resampled
from attnmix.measures.ratios import RATIOS
from attnmix.results.measure_names import SWAP
from attnmix.results.tables import is_own_share

HIGHER = "higher"
LOWER = "lower"
MORE_MIXING = "more"
LESS_MIXING = "less"
INCONCLUSIVE = "inconclusive"
NO_MIXING_MEASURE = ""
TOO_FEW_TEXTS = "too few texts"
TOO_FEW_RUNS = "too few runs"
NO_INTERVAL = "no interval"
MIN_TRAININGS = 3  # per side with several runs, because two similar runs would underestimate the variance
VERDICTS = {
    INCONCLUSIVE: "an interval includes 0, over texts or, for `between_seeds`, over training runs",
    TOO_FEW_TEXTS: f"a simultaneous interval needs {MIN_SIMULTANEOUS} texts or more",
    TOO_FEW_RUNS: f"an interval over training runs needs at least {MIN_TRAININGS} runs on each side that has several",
    NO_INTERVAL: "all texts, or all training runs, have the same difference, such as 0",
}
"""The meaning of each verdict that is not a direction."""


class Trainings(NamedTuple):
    """The training runs (models) on one side of a comparison, with their means over texts."""

    names: Sequence[str]
    means: Sequence[Resampled]  # [cells] for each model, with the same texts in every sample
    fixed: bool = False  # True for a single model that is not one of several training runs

    def mean(self) -> Resampled:
        """Return the mean over the models."""
        means = np.mean([model.mean for model in self.means], axis=0)
        samples = np.mean([model.samples for model in self.means], axis=0)
        first = self.means[0]
        return Resampled(means, samples, first.documents, first.counts)


def select_cells(resampled: Resampled, cells: Sequence[int]) -> Resampled:
    """Return the means of the cells with indices `cells`."""
    means = resampled.mean[cells]
    samples = resampled.samples[:, cells]
    documents = resampled.documents[cells]
    counts = np.asarray(resampled.counts)[cells]
    return Resampled(means, samples, documents, counts)


def have_enough_trainings(before: Trainings, after: Trainings) -> bool:
    """Return True if at least one side has several training runs, and each such side has `MIN_TRAININGS`."""
    runs_by_side = [len(before.means), len(after.means)]
    several = [runs for runs in runs_by_side if runs > 1]
    if not several:
        return False
    return min(several) >= MIN_TRAININGS


def interval_over_trainings(before: Trainings, after: Trainings, cells: Sequence[int]) -> Interval:
    """Return the interval of the difference over training runs, with Bonferroni correction for the number of cells.

    This is Welch's interval, for unequal variances and numbers of runs; NaN if there are too few training runs. A
    `fixed` model, such as the pretrained model, has zero variance, and the interval is Student's for the mean of the
    other side. A single training run is assumed to have the variance of the other side; treated as fixed, it would
    often seem different from other runs with the same settings.
    """
    before_RC = _stack_means(before, cells)
    after_RC = _stack_means(after, cells)
    difference_C = after_RC.mean(0) - before_RC.mean(0)
    if not have_enough_trainings(before, after):
        unknown_C = np.full_like(difference_C, np.nan)
        return Interval(difference_C, unknown_C, unknown_C)
    several = [side_RC for side_RC in (before_RC, after_RC) if len(side_RC) > 1]
    variances = [side_RC.var(0, ddof=1) / len(side_RC) for side_RC in several]
    degrees = [len(side_RC) - 1 for side_RC in several]
    if len(several) == 2:
        variance_C = variances[0] + variances[1]
        weights_C = variances[0] ** 2 / degrees[0] + variances[1] ** 2 / degrees[1]
        undefined_C = np.full_like(variance_C, np.nan)
        freedom_C = np.divide(variance_C**2, weights_C, out=undefined_C, where=weights_C > 0)
    else:
        variance_C = variances[0]
        freedom_C = np.full_like(difference_C, degrees[0])
        is_fixed = before.fixed or after.fixed
        if not is_fixed:  # adds the variance of a single run
            variance_C = variance_C * (len(several[0]) + 1)
    error_C = np.sqrt(variance_C)
    probability = 1 - (1 - LEVEL) / (2 * len(cells))
    quantile_C = stdtrit(freedom_C, probability)
    half_width_C = np.where(error_C > MIN_STANDARD_ERROR, quantile_C * error_C, np.nan)
    return Interval(difference_C, difference_C - half_width_C, difference_C + half_width_C)


def _stack_means(side: Trainings, cells: Sequence[int]) -> npt.NDArray[np.float64]:
    means = [model.mean[cells] for model in side.means]
    return np.stack(means)


def name_directions(interval: Interval) -> npt.NDArray[Any]:
    """Return `HIGHER`, `LOWER`, `INCONCLUSIVE` or `NO_INTERVAL` for each cell of a difference."""
    cases = [np.isnan(interval.low), interval.low > 0, interval.high < 0]
    return np.select(cases, [NO_INTERVAL, HIGHER, LOWER], INCONCLUSIVE)


def direction_of_mixing(measure: str) -> str | None:
    """Return the direction of a measure that means more mixing; None if it does not measure mixing."""
    if is_own_share(measure):
        return LOWER
    if measure in RATIOS or measure.startswith(SWAP):
        return HIGHER
    return None


def name_mixing(rows: pd.DataFrame) -> list[str]:
    """Return `more`, `less` or `inconclusive` mixing for each row, or '' if the measure does not measure mixing."""
    meanings = []
    for measure, verdict in zip(rows["measure"], rows["between_models"], strict=True):
        direction = direction_of_mixing(measure)
        if direction is None:
            meaning = NO_MIXING_MEASURE
        elif verdict == direction:
            meaning = MORE_MIXING
        elif verdict in (HIGHER, LOWER):
            meaning = LESS_MIXING
        else:
            meaning = INCONCLUSIVE
        meanings.append(meaning)
    return meanings


def combine_verdicts(between_models: pd.Series, trainings: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the common verdict of the intervals over texts and over training runs, or the verdict of a missing one."""
    missing_texts = between_models.isin([TOO_FEW_TEXTS, NO_INTERVAL])
    missing_trainings = trainings == NO_INTERVAL
    agree = between_models == trainings
    cases: list[Any] = [missing_texts, missing_trainings, agree]
    verdicts: list[Any] = [between_models, NO_INTERVAL, between_models]
    return np.select(cases, verdicts, INCONCLUSIVE)


def describe_assumption(side: Trainings) -> str:
    """Return text that describes a side of a comparison and the assumption about its variance."""
    runs = len(side.means)
    if runs > 1:
        return f"{runs} training runs"
    if side.fixed:
        return "one fixed model (pass it in a list to treat it as a training run that varies like the others)"
    return "one training run, assumed to vary like the others,"


def name_models(side: Trainings) -> str:
    """Return text with the names of the models of a side."""
    names = list(dict.fromkeys(side.names))
    if len(side.names) == 1:
        return names[0]
    return f"{len(side.names)} training runs, of {', '.join(names)}"
