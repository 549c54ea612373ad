"""Verdicts on differences, from intervals over texts and over training runs: a direction, or the reason for none."""

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

HIGHER, LOWER = "higher", "lower"
MORE_MIXING, LESS_MIXING, INCONCLUSIVE, NO_MIXING_MEASURE = "more", "less", "inconclusive", ""
TOO_FEW_TEXTS, TOO_FEW_RUNS, NO_INTERVAL = "too few texts", "too few runs", "no interval"
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
        means = np.mean([each.mean for each in self.means], axis=0)
        samples = np.mean([each.samples for each in self.means], axis=0)
        return Resampled(means, samples, self.means[0].documents, self.means[0].counts)


def select_cells(resampled: Resampled, cells: Sequence[int]) -> Resampled:
    """Return the means of the cells with indices `cells`."""
    counts = np.asarray(resampled.counts)[cells]
    return Resampled(resampled.mean[cells], resampled.samples[:, cells], resampled.documents[cells], counts)


def have_enough_trainings(before: Trainings, after: Trainings) -> bool:
    """Return True if at least one side has several training runs, and each such side has `MIN_TRAININGS`."""
    several = [len(side.means) for side in (before, after) if len(side.means) > 1]
    return bool(several) and min(several) >= MIN_TRAININGS


def interval_over_trainings(before: Trainings, after: Trainings, cells: Sequence[int]) -> Interval:
    """Return the interval of the difference over training runs, with Bonferroni correction for the number of cells.

    This is Welch's interval, for unequal variances and numbers of runs; NaN if there are too few training runs. A
    `fixed` model, such as the pretrained model, has zero variance, and the interval is Student's for the mean of the
    other side. A single training run is assumed to have the variance of the other side; treated as fixed, it would
    often seem different from other runs with the same settings.
    """
    sides = [np.stack([each.mean[cells] for each in side.means]) for side in (before, after)]
    difference = sides[1].mean(0) - sides[0].mean(0)
    several = [side for side in sides if len(side) > 1]
    if not have_enough_trainings(before, after):
        unknown = np.full_like(difference, np.nan)
        return Interval(difference, unknown, unknown)
    variances = [side.var(0, ddof=1) / len(side) for side in several]
    degrees = [len(side) - 1 for side in several]
    if len(several) == 1:
        fixed = before.fixed or after.fixed
        variance = variances[0] if fixed else variances[0] * (len(several[0]) + 1)
        freedom = np.full_like(difference, degrees[0])
    else:
        variance = variances[0] + variances[1]
        weights = variances[0] ** 2 / degrees[0] + variances[1] ** 2 / degrees[1]
        freedom = np.divide(variance**2, weights, out=np.full_like(variance, np.nan), where=weights > 0)
    error = np.sqrt(variance)
    quantile = stdtrit(freedom, 1 - (1 - LEVEL) / (2 * len(cells)))
    half = np.where(error > MIN_STANDARD_ERROR, quantile * error, np.nan)
    return Interval(difference, difference - half, difference + half)


def name_directions(interval: Interval) -> npt.NDArray[Any]:
    """Return `HIGHER`, `LOWER`, `INCONCLUSIVE` or `NO_INTERVAL` for each cell of a difference."""
    cases = [np.isnan(interval.low), interval.low > 0, interval.high < 0]
    return np.select(cases, [NO_INTERVAL, HIGHER, LOWER], INCONCLUSIVE)


def direction_of_mixing(measure: str) -> str | None:
    """Return the direction of a measure that means more mixing; None if it does not measure mixing."""
    if is_own_share(measure):
        return LOWER
    return HIGHER if measure in RATIOS or measure.startswith(SWAP) else None


def name_mixing(rows: pd.DataFrame) -> list[str]:
    """Return `more`, `less` or `inconclusive` mixing for each row, or '' if the measure does not measure mixing."""
    meanings = []
    for measure, verdict in zip(rows["measure"], rows["between_models"], strict=True):
        direction = direction_of_mixing(measure)
        if direction is None:
            meanings.append(NO_MIXING_MEASURE)
        elif verdict in (HIGHER, LOWER):
            meanings.append(MORE_MIXING if verdict == direction else LESS_MIXING)
        else:
            meanings.append(INCONCLUSIVE)
    return meanings


def combine_verdicts(between_models: pd.Series, trainings: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the common verdict of the intervals over texts and over training runs, or the verdict of a missing one."""
    missing_texts = between_models.isin([TOO_FEW_TEXTS, NO_INTERVAL])
    missing_trainings = trainings == NO_INTERVAL
    agree = between_models == trainings
    return np.select(
        [missing_texts, missing_trainings, agree], [between_models, NO_INTERVAL, between_models], INCONCLUSIVE
    )


def describe_assumption(side: Trainings) -> str:
    """Return text that describes a side of a comparison and the assumption about its variance."""
    if len(side.means) > 1:
        return f"{len(side.means)} training runs"
    if side.fixed:
        return "one fixed model (pass it in a list to treat it as a training run that varies like the others)"
    return "one training run, assumed to vary like the others,"


def name_models(side: Trainings) -> str:
    """Return text with the names of the models of a side."""
    names = list(dict.fromkeys(side.names))
    if len(side.names) == 1:
        return names[0]
    return f"{len(side.names)} training runs, of {', '.join(names)}"
