"""From every review's drops, agreements and margins to the tables under `reports/plots/`.

Shapes: N reviews, M methods, S shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import norm

from attnmix.core.ranks import rank_correlation
from attnmix.core.statistics import LEVEL, Interval, Resampled, resample
from attnmix.faithfulness.attributions import RANDOM

Doubles = npt.NDArray[np.float64]

ALL_CLASSES = "all"
"""In the column `predicted`, the mean over the classes."""


def faithfulness(
    drops_NMS: Doubles, agreement_NM: Doubles, methods: Sequence[str], shares: Sequence[float], samples: int, seed: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`faithfulness.csv` and `faithfulness_overall.csv`; intervals resample reviews, with the same draws for all.

    A review where a method gives nothing counts for no method's difference to random removal. That difference has an
    interval that holds for all methods at once, too.
    """
    random = list(methods).index(RANDOM)
    aopc_NM = drops_NMS.mean(-1)
    by_share = _means(drops_NMS, samples, seed).interval()
    above = _means(aopc_NM - aopc_NM[:, [random]], samples, seed)
    overall = _means(aopc_NM, samples, seed).interval()
    every = above.simultaneous()
    ranks = _means(agreement_NM, samples, seed).correlations()
    counts = (~np.isnan(aopc_NM)).sum(0)
    curves = pd.DataFrame([(name, share) for name in methods for share in shares], columns=["method", "share"])
    curves = curves.assign(**_columns("drop", "ci_low", "ci_high", by_share), documents=np.repeat(counts, len(shares)))
    table = pd.DataFrame({"method": list(methods)}).assign(
        **_columns("aopc", "ci_low", "ci_high", overall),
        **_columns("above_random", "above_random_low", "above_random_high", above.interval()),
        simultaneous_low=every.low,
        simultaneous_high=every.high,
        **_columns("derivative_spearman", "derivative_low", "derivative_high", ranks),
        documents=counts,
    )
    return curves, table


def margin_correlation(margins: pd.DataFrame, checkpoints: Sequence[str]) -> pd.DataFrame:
    """Return `margin_correlation.csv`: of each checkpoint's ratio with the margin, over reviews of one predicted class.

    Two classes may have other levels of the ratio, and reviews of both together would mix that difference with the
    correlation (Simpson's paradox). So there is a row for each class, and one named `all` for their mean. Plain, and
    given the number of tokens, which takes one degree of freedom. A class of too few reviews for a standard error has
    no correlation and is no part of the mean; `documents` counts the reviews that are.
    """
    groups = list(margins.groupby("predicted"))
    sizes = np.array([len(group) for _, group in groups])
    tables = []
    for checkpoint in checkpoints:
        table = pd.DataFrame({"checkpoint": checkpoint, "predicted": [*(name for name, _ in groups), ALL_CLASSES]})
        for name, formula, freedom in (("spearman", _plain, sizes - 3), ("given_length", _given_length, sizes - 4)):
            columns = [
                [group[column].to_numpy(np.float64) for column in (checkpoint, "margin", "tokens")]
                for _, group in groups
            ]
            within = np.array([formula(*each) for each in columns])
            within[freedom < 1] = np.nan
            intervals = [_fisher_mean(within[[each]], freedom[[each]]) for each in range(len(groups))]
            intervals.append(_fisher_mean(within, freedom))
            prefix = "ci" if name == "spearman" else name
            ends = Interval(*np.transpose(intervals))
            table = table.assign(**_columns(name, f"{prefix}_low", f"{prefix}_high", ends))
        counted = sizes[table["spearman"].notna()[:-1]].sum()
        tables.append(table.assign(documents=[*sizes, counted]))
    return pd.concat(tables, ignore_index=True)


def _fisher_mean(correlations: Doubles, freedom: npt.NDArray[np.int64]) -> tuple[float, float, float]:
    """Return the mean of rank correlations by Fisher's z and the ends of its 95 % interval; NaN ones are left out.

    z = artanh r has the variance (1 + r^2 / 2) / (n - 3) for Spearman's r of n reviews (Bonett and Wright,
    Psychometrika 2000), and n - 4 in place of n - 3 for a partial one. `freedom` has these numbers, which are the
    weights. As z of 1 is infinite, r is at most 1 - 6 / (m^3 - m) with m = freedom + 3: half a step below 1 of
    Spearman's r of m reviews.
    """
    known = ~np.isnan(correlations)
    if not known.any():
        return np.nan, np.nan, np.nan
    weights, reviews = freedom[known], freedom[known] + 3
    most = 1 - 6 / (reviews**3 - reviews)
    bounded = np.clip(correlations[known], -most, most)
    mean = np.average(np.arctanh(bounded), weights=weights)
    error = np.sqrt((weights * (1 + bounded**2 / 2)).sum()) / weights.sum()
    half = norm.ppf((1 + LEVEL) / 2) * error
    return float(np.tanh(mean)), float(np.tanh(mean - half)), float(np.tanh(mean + half))


def _plain(ratio: Doubles, margin: Doubles, _length: Doubles) -> Doubles:
    return rank_correlation(ratio, margin)


def _given_length(ratio: Doubles, margin: Doubles, length: Doubles) -> Doubles:
    """The partial rank correlation; NaN where the length's ranks say all of one side."""
    both = rank_correlation(ratio, margin)
    first, second = rank_correlation(ratio, length), rank_correlation(margin, length)
    rest = np.sqrt(np.clip(1 - first**2, 0, None) * np.clip(1 - second**2, 0, None))
    found = np.full(np.shape(both), np.nan)
    np.divide(both - first * second, rest, out=found, where=rest > 1e-9)
    return found


def _means(values: Doubles, samples: int, seed: int) -> Resampled:
    """Over reviews `[N, ...]`, without those that are NaN."""
    known = ~np.isnan(values)
    return resample(np.where(known, values, 0), known.astype(np.float64), samples, seed)


def _columns(mean: str, low: str, high: str, interval: Interval) -> dict[str, Doubles]:
    return {mean: interval.mean.ravel(), low: interval.low.ravel(), high: interval.high.ravel()}
