"""Means over seeds and their 95 % intervals.

Where rows for each review exist, two levels are resampled: the seeds, and within each drawn seed its reviews. Where
an experiment gives one value only, the interval is Student's t over the seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from stages.errors import InputError
from stages.mixing.statistics import LEVEL, Resampled

Doubles = npt.NDArray[np.float64]

REVIEWS_AT_ONCE = 500  # bootstrap samples of one seed's reviews, so that memory stays small
DIFFERENCE = "difference"
SEED_COLUMNS = ("mean", "ci_low", "ci_high", "lowest_seed", "highest_seed", "seeds")


class SeedReviews(NamedTuple):
    """One seed's reviews: weighted sums and weights `[reviews, cells]`; a weight of 0 where a cell has no value."""

    sums: Doubles
    weights: Doubles


def two_level(by_seed: Sequence[SeedReviews], samples: int, seed: int) -> Resampled:
    """Mean over the seeds of each one's weighted mean over its reviews `[cells]`, and its bootstrap samples.

    Each sample draws as many seeds as there are, with replacement, and for every one drawn as many reviews as it has,
    with replacement and anew each time. A cell without a value in a drawn seed is left out of that sample's mean.
    """
    generator = np.random.default_rng(seed)
    seeds, cells = len(by_seed), by_seed[0].sums.shape[1]
    drawn = generator.integers(seeds, size=(samples, seeds))
    total, defined = np.zeros((samples, cells)), np.zeros((samples, cells))
    for number, reviews in enumerate(by_seed):
        sample_of_draw = np.nonzero(drawn == number)[0]
        size = len(reviews.sums)
        for start in range(0, len(sample_of_draw), REVIEWS_AT_ONCE):
            block = sample_of_draw[start : start + REVIEWS_AT_ONCE]
            times = generator.multinomial(size, np.full(size, 1 / size), size=len(block)).astype(np.float64)
            means = _ratio(times @ reviews.sums, times @ reviews.weights)
            np.add.at(total, block, np.nan_to_num(means))
            np.add.at(defined, block, ~np.isnan(means))
    own = np.stack([_ratio(each.sums.sum(0), each.weights.sum(0)) for each in by_seed])
    mean = _ratio(np.nan_to_num(own).sum(0), (~np.isnan(own)).sum(0).astype(np.float64))
    return Resampled(mean, _ratio(total, defined))


def _ratio(sums: Doubles, weights: Doubles) -> Doubles:
    return np.divide(sums, weights, out=np.full_like(sums, np.nan), where=weights > 0)


def reviews_over_seeds(
    name: str,
    tables: Mapping[int, pd.DataFrame],
    keys: Sequence[str],
    value: str,
    weight: str | None,
    samples: int,
    seed: int,
    over: str | None = None,
) -> pd.DataFrame:
    """A table of reviews `[keys, document, value, weight]` of every seed to `[keys, SEED_COLUMNS, reviews]`.

    With the paired rows `difference` (fine-tuned minus pretrained) of the key `checkpoint`; with `over`, the mean
    over that key. `weight` is the column that weighs a review; none: each counts once.
    """
    cells, by_seed = _cells(name, tables, keys, value, weight)
    resampled = two_level(by_seed, samples, seed)
    own = np.stack([_ratio(each.sums.sum(0), each.weights.sum(0)) for each in by_seed])
    # One matrix takes the cells to the rows of the result, for the means, the samples and each seed alike.
    index, rows = _rows(cells, over)
    mean, drawn, of_seeds = (_times(rows, part) for part in (resampled.mean, resampled.samples, own))
    interval = Resampled(mean, drawn).interval()
    table = index.to_frame(index=False)
    columns = (interval.mean, interval.low, interval.high, _lowest(of_seeds), -_lowest(-of_seeds))
    table = table.assign(**dict(zip(SEED_COLUMNS, columns, strict=False)))
    entering = (rows != 0).T.astype(float)
    reviews = sum((((each.weights > 0) @ entering) > 0).sum(0) for each in by_seed)
    return table.assign(seeds=(~np.isnan(of_seeds)).sum(0), reviews=reviews)


def means_of_seeds(
    name: str, tables: Mapping[int, pd.DataFrame], keys: Sequence[str], value: str, weight: str | None
) -> pd.DataFrame:
    """Each seed's own weighted mean over its reviews, `[seed, keys, mean]`, with the rows `difference`."""
    cells, by_seed = _cells(name, tables, keys, value, weight)
    index, rows = _rows(cells, None)
    return pd.concat(
        [
            index.to_frame(index=False).assign(
                seed=number, mean=_times(rows, _ratio(each.sums.sum(0), each.weights.sum(0)))
            )
            for number, each in zip(tables, by_seed, strict=True)
        ]
    )[["seed", *keys, "mean"]]


def _cells(
    name: str, tables: Mapping[int, pd.DataFrame], keys: Sequence[str], value: str, weight: str | None
) -> tuple[pd.MultiIndex, list[SeedReviews]]:
    """Every combination of keys that some seed has, and each seed's reviews in that order."""
    columns = [*keys, "document", value, *([weight] if weight else [])]
    frames = []
    for number, table in tables.items():
        _check(f"{name}.csv of seed {number}", table, columns)
        frame = table[columns].dropna(subset=value)
        frame = frame.assign(weight=frame[weight] if weight else 1.0)
        frame["sum"] = frame[value] * frame["weight"]
        # A review may have several rows of one key (seeds of a map): each counts.
        frames.append(frame.groupby(["document", *keys], sort=False)[["sum", "weight"]].sum())
    order = pd.concat([frame.reset_index()[list(keys)] for frame in frames]).drop_duplicates()
    cells = pd.MultiIndex.from_frame(order)
    by_seed = []
    for frame in frames:
        wide = frame.unstack("document")
        parts = (wide[column].reindex(cells).fillna(0.0).to_numpy(np.float64).T for column in ("sum", "weight"))
        by_seed.append(SeedReviews(*parts))
    return cells, by_seed


def _rows(cells: pd.MultiIndex, over: str | None) -> tuple[pd.MultiIndex, Doubles]:
    """The index of the result, and the matrix `[rows, cells]` that makes its values from those of the cells."""
    frame = cells.to_frame(index=False).assign(cell=np.arange(len(cells)), factor=1.0)
    if over is not None:
        rest = [key for key in cells.names if key != over]
        frame["factor"] = 1.0 / frame.groupby(rest, sort=False)["cell"].transform("size")
        frame = frame.drop(columns=over)
    keys = [column for column in frame if column not in ("cell", "factor")]
    if "checkpoint" in keys and DIFFERENCE not in set(frame["checkpoint"]):
        after = frame[frame["checkpoint"] == "finetuned"]
        before = frame[frame["checkpoint"] == "pretrained"]
        both = pd.concat([after, before.assign(factor=-before["factor"])]).assign(checkpoint=DIFFERENCE)
        rest = [key for key in keys if key != "checkpoint"]
        known = set(map(tuple, after[rest].to_numpy())) & set(map(tuple, before[rest].to_numpy()))
        frame = pd.concat([frame, both[[tuple(row) in known for row in both[rest].to_numpy()]]])
    index = pd.MultiIndex.from_frame(frame[keys].drop_duplicates())
    matrix = np.zeros((len(index), len(cells)))
    places = index.get_indexer(pd.MultiIndex.from_frame(frame[keys]))
    np.add.at(matrix, (places, frame["cell"].to_numpy()), frame["factor"].to_numpy())
    return index, matrix


def _times(rows: Doubles, values: Doubles) -> Doubles:
    """`values` `[..., cells]` to `[..., rows]`; NaN where a cell that enters a row is NaN."""
    product = np.nan_to_num(values) @ rows.T
    product[(np.isnan(values).astype(float) @ (rows != 0).T.astype(float)) > 0] = np.nan
    return np.asarray(product)


def _lowest(of_seeds: Doubles) -> Doubles:
    lowest = np.where(np.isnan(of_seeds), np.inf, of_seeds).min(0)
    return np.where(np.isinf(lowest), np.nan, lowest)


def over_seeds(
    name: str, tables: Mapping[int, pd.DataFrame], keys: Sequence[str], values: Sequence[str]
) -> pd.DataFrame:
    """The columns `values` of one csv of every seed to `[keys, quantity, SEED_COLUMNS]`; `quantity` is the column.

    The interval is mean +- t(n - 1) sd / sqrt(n) over the n seeds that have a value; NaN with fewer than two. With
    the rows `difference` of the key `checkpoint` where the csv has none. `InputError` where keys are not unique.
    """
    frames = []
    for number, table in tables.items():
        where = f"{name}.csv of seed {number}"
        _check(where, table, [*keys, *values])
        if table.duplicated(list(keys)).any():
            raise InputError(f"{where} has several rows with the same {', '.join(keys)}")
        long = table.melt(list(keys), list(values), var_name="quantity", value_name="value").assign(seed=number)
        frames.append(with_difference(long, "value"))
    rows = []
    grouped = pd.concat(frames).groupby([*keys, "quantity"], sort=False, dropna=False)["value"]
    for key, group in grouped:
        rows.append((*key, *_t_interval(group.dropna().to_numpy(np.float64))))
    return pd.DataFrame(rows, columns=[*keys, "quantity", *SEED_COLUMNS])


def with_difference(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """With rows of the checkpoint `difference`, fine-tuned minus pretrained, where the table has none."""
    if "checkpoint" not in table or DIFFERENCE in set(table["checkpoint"]):
        return table
    keys = [column for column in table if column not in ("checkpoint", value)]
    after, before = (table[table["checkpoint"] == each] for each in ("finetuned", "pretrained"))
    both = after.merge(before, on=keys, suffixes=("", "_before"))
    both = both.assign(checkpoint=DIFFERENCE, **{value: both[value] - both[f"{value}_before"]})
    return pd.concat([table, both[list(table)]]) if len(both) else table


def _t_interval(values: Doubles) -> tuple[float, float, float, float, float, int]:
    number = len(values)
    if not number:
        return (*[float("nan")] * 5, 0)
    mean = float(values.mean())
    half = float("nan")
    if number > 1:
        half = float(stats.t.ppf((1 + LEVEL) / 2, number - 1) * values.std(ddof=1) / np.sqrt(number))
    return mean, mean - half, mean + half, float(values.min()), float(values.max()), number


def _check(where: str, table: pd.DataFrame, columns: Sequence[str]) -> None:
    missing = [column for column in columns if column not in table]
    if missing:
        raise InputError(f"{where} has no column {', '.join(missing)}; it has {', '.join(map(str, table))}")
