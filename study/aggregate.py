"""Means over seeds and their 95 % intervals.

Every seed trains a model of its own and measures reviews of its own draw, so the seeds' means are independent, and how
far they lie apart holds the chance of both. The interval is Student's t over them, mean +- t(n - 1) sd / sqrt(n); a
bootstrap of a handful of seeds would be too narrow. Where no effect would be 0, `p` is that of the two-sided t test,
and `p_holm` is adjusted for all layers, or methods, that a verdict picks from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from attnmix.core.errors import InputError
from attnmix.core.statistics import LEVEL, SAME

Doubles = npt.NDArray[np.float64]

DIFFERENCE = "difference"
SEED_COLUMNS = (
    "mean",
    "ci_low",
    "ci_high",
    "p",
    "p_holm",
    "lowest_seed",
    "highest_seed",
    "seeds",
)
CORRELATIONS = ("spearman", "given_length", "derivative_spearman", "partial_position", "partial_full_space")
NO_EFFECT_IS_ZERO = (DIFFERENCE, "above_random", *CORRELATIONS)
"""Checkpoints, quantities and measures that are tested against 0."""
MAX_CORRELATION = 1 - 5e-7  # what six decimals tell from 1, of which Fisher's z is infinite


class SeedReviews(NamedTuple):
    """One seed's reviews: weighted sums and weights `[reviews, cells]`; a weight of 0 where a cell has no value."""

    sums: Doubles
    weights: Doubles


def _ratio(sums: Doubles, weights: Doubles) -> Doubles:
    return np.divide(sums, weights, out=np.full_like(sums, np.nan), where=weights > 0)


def reviews_over_seeds(
    name: str,
    tables: Mapping[int, pd.DataFrame],
    keys: Sequence[str],
    value: str,
    weight: str | None,
    over: str | None = None,
) -> pd.DataFrame:
    """A table of reviews `[keys, document, value, weight]` of every seed to `[keys, SEED_COLUMNS, reviews]`.

    With the paired rows `difference` (fine-tuned minus pretrained) of the key `checkpoint`; with `over`, the mean
    over that key. `weight` is the column that weighs a review; none: each counts once.
    """
    cells, by_seed = _cells(name, tables, keys, value, weight)
    # One matrix takes the cells to the rows of the result.
    index, rows = _rows(cells, over)
    of_seeds = _times(rows, np.stack([_ratio(each.sums.sum(0), each.weights.sum(0)) for each in by_seed]))
    labels = index.to_frame(index=False)
    table = _with_intervals(labels, of_seeds, _tested(labels) | (value in NO_EFFECT_IS_ZERO))
    entering = (rows != 0).T.astype(float)
    reviews = sum((((each.weights > 0) @ entering) > 0).sum(0) for each in by_seed)
    return table.assign(reviews=reviews)


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


def over_seeds(
    name: str, tables: Mapping[int, pd.DataFrame], keys: Sequence[str], values: Sequence[str]
) -> pd.DataFrame:
    """The columns `values` of one csv of every seed to `[keys, quantity, SEED_COLUMNS]`; `quantity` is the column.

    With the rows `difference` of the key `checkpoint` where the csv has none. `InputError` where keys are not unique.
    """
    long = with_difference(_long(name, tables, keys, values), "value")
    labels, of_seeds = _by_seed(long, [*keys, "quantity"], list(tables))
    return _with_intervals(labels, of_seeds, _tested(labels))


def correlations_over_seeds(
    name: str, tables: Mapping[int, pd.DataFrame], keys: Sequence[str], values: Sequence[str]
) -> pd.DataFrame:
    """Return `over_seeds` of Fisher's z, transformed back, so that no interval passes 1; without rows `difference`."""
    long = _long(name, tables, keys, values)
    labels, of_seeds = _by_seed(long, [*keys, "quantity"], list(tables))
    table = _with_intervals(labels, np.arctanh(np.clip(of_seeds, -MAX_CORRELATION, MAX_CORRELATION)), _tested(labels))
    columns = ["mean", "ci_low", "ci_high", "lowest_seed", "highest_seed"]
    return table.assign(**np.tanh(table[columns]))


def _long(name: str, tables: Mapping[int, pd.DataFrame], keys: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """Return `[keys, quantity, value, seed]` of every seed."""
    frames = []
    for number, table in tables.items():
        where = f"{name}.csv of seed {number}"
        _check(where, table, [*keys, *values])
        if table.duplicated(list(keys)).any():
            raise InputError(f"{where} has several rows with the same {', '.join(keys)}")
        frames.append(table.melt(list(keys), list(values), var_name="quantity", value_name="value").assign(seed=number))
    return pd.concat(frames, ignore_index=True)


def _by_seed(long: pd.DataFrame, keys: Sequence[str], seeds: Sequence[int]) -> tuple[pd.DataFrame, Doubles]:
    """Return the combinations of keys, and the values `[seeds, combinations]`."""
    row = long.groupby(keys, sort=False, dropna=False).ngroup()
    of_seeds = np.full((len(seeds), row.max() + 1), np.nan)
    of_seeds[pd.Index(seeds).get_indexer(pd.Index(long["seed"])), row] = long["value"]
    return long[keys].drop_duplicates(ignore_index=True), of_seeds


def _tested(labels: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Return for which rows no effect would be 0."""
    return labels.isin(NO_EFFECT_IS_ZERO).any(axis=1).to_numpy()


def with_difference(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """With rows of the checkpoint `difference`, fine-tuned minus pretrained, where the table has none."""
    if "checkpoint" not in table or DIFFERENCE in set(table["checkpoint"]):
        return table
    keys = [column for column in table if column not in ("checkpoint", value)]
    after, before = (table[table["checkpoint"] == each] for each in ("finetuned", "pretrained"))
    both = after.merge(before, on=keys, suffixes=("", "_before"))
    both = both.assign(checkpoint=DIFFERENCE, **{value: both[value] - both[f"{value}_before"]})
    return pd.concat([table, both[list(table)]]) if len(both) else table


def _with_intervals(labels: pd.DataFrame, of_seeds: Doubles, tested: npt.NDArray[np.bool_]) -> pd.DataFrame:
    """`labels` with `SEED_COLUMNS` of `[seeds, rows]`, over the seeds that have a value; no ends with fewer than two.

    `p` is given for the rows `tested`, unless the seeds do not vary: such a value, as that of random removal above
    itself, follows from how it is made. `p_holm` is Holm's, over all layers of the rest of the labels at once, in a
    table without layers over all methods: verdicts by it are false in 5 % of such families at most.
    """
    seeds = (~np.isnan(of_seeds)).sum(0)
    some, several = np.maximum(seeds, 1), np.where(seeds > 1, seeds, np.nan)
    mean = np.where(seeds > 0, np.nansum(of_seeds, 0) / some, np.nan)
    error = np.sqrt(np.nansum((of_seeds - mean) ** 2, 0) / (several - 1) / several)
    half = stats.t.isf((1 - LEVEL) / 2, several - 1) * error
    statistic = np.divide(np.abs(mean), error, out=np.full_like(mean, np.nan), where=tested & (error > SAME))
    p = pd.Series(2 * stats.t.sf(statistic, several - 1), labels.index)
    together = next((each for each in ("layer", "method") if each in labels), None)
    rest = [column for column in labels if column != together]
    families = labels.groupby(rest, sort=False, dropna=False).ngroup()
    p_holm = p.groupby(families).transform(holm) if together else p
    known = np.where(seeds > 0, of_seeds, 0.0)  # so that no column is without any value
    ends = {"lowest_seed": np.nanmin(known, 0), "highest_seed": np.nanmax(known, 0)}
    ends = {name: np.where(seeds > 0, values, np.nan) for name, values in ends.items()}
    columns = {"mean": mean, "ci_low": mean - half, "ci_high": mean + half, "p": p, "p_holm": p_holm}
    return labels.assign(**columns, **ends, seeds=seeds)


def holm(p: pd.Series) -> pd.Series:
    """Return the p values adjusted by Holm's step-down method; those that are NaN are not members of the family."""
    ordered = p.dropna().sort_values()
    adjusted = (ordered * np.arange(len(ordered), 0, -1)).cummax().clip(upper=1)
    return adjusted.reindex(p.index)


def _check(where: str, table: pd.DataFrame, columns: Sequence[str]) -> None:
    missing = [column for column in columns if column not in table]
    if missing:
        raise InputError(f"{where} has no column {', '.join(missing)}; it has {', '.join(map(str, table))}")
