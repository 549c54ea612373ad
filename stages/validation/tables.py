"""From every review's drops, agreements and margins to the tables under `reports/plots/`.

Shapes: N reviews, M methods, S shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from stages.mixing.statistics import Interval, Resampled, resample
from stages.ranks import rank_correlation
from stages.validation.attributions import RANDOM

Doubles = npt.NDArray[np.float64]


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


def margin_correlation(margins: pd.DataFrame, checkpoints: Sequence[str], samples: int, seed: int) -> pd.DataFrame:
    """`margin_correlation.csv`: of each checkpoint's ratio with the margin, over reviews, also given the length."""
    margin, length = (margins[column].to_numpy(np.float64) for column in ("margin", "tokens"))
    generator = np.random.default_rng(seed)
    drawn = generator.integers(len(margins), size=(samples, len(margins)))
    rows = []
    for checkpoint in checkpoints:
        ratio = margins[checkpoint].to_numpy(np.float64)
        row: dict[str, object] = {"checkpoint": checkpoint}
        for name, of in (("spearman", _plain), ("given_length", _given_length)):
            samples_of = of(ratio[drawn], margin[drawn], length[drawn])
            found = Resampled(of(ratio, margin, length), samples_of, np.array(len(margins), dtype=np.float64))
            interval = found.correlations()
            prefix = "ci" if name == "spearman" else name
            row |= _columns(name, f"{prefix}_low", f"{prefix}_high", interval)
        rows.append({key: np.asarray(value).item() for key, value in row.items()} | {"documents": len(margins)})
    return pd.DataFrame(rows)


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
