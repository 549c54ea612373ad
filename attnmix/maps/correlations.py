"""Rank correlations of many pairs at once: plain, partial, and under permutation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

Doubles = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

FEWEST = 3  # values that a rank correlation needs
FEWEST_PARTIAL = 4  # with three, what is left after one other variable is always 1 or -1
LEAST_LEFT = 1e-9  # share of a variance that the other variable must leave, or nothing is left but rounding


def unit_ranks(values: Doubles) -> Doubles:
    """Ranks along the last axis, centred, of length 1, so that Spearman's correlation is a scalar product.

    NaN where all values are equal, and for fewer than three.
    """
    if values.shape[-1] < FEWEST:
        return np.full(values.shape, np.nan)
    ranks = np.asarray(rankdata(values, axis=-1), dtype=np.float64)
    ranks -= ranks.mean(axis=-1, keepdims=True)
    lengths = np.broadcast_to(np.linalg.norm(ranks, axis=-1, keepdims=True), ranks.shape)
    return np.asarray(np.divide(ranks, lengths, out=np.full_like(ranks, np.nan), where=lengths > 0))


def partial_correlation(first: Doubles, second: Doubles, given: Doubles) -> Doubles:
    """Partial rank correlations `[a, b]` of the rows of `first` and `second`, given one variable; all `unit_ranks`.

    (r_xy - r_xz r_yz) / sqrt((1 - r_xz^2) (1 - r_yz^2)): Pearson's correlation of what is left of the ranks of
    x and y after a linear regression on the ranks of z. NaN where z leaves nothing of one of them, and for fewer
    than four values.
    """
    plain = first @ second.T
    if len(given) < FEWEST_PARTIAL:
        return np.full_like(plain, np.nan)
    first_given, second_given = (first @ given)[:, None], (second @ given)[None, :]
    left = [1 - each**2 for each in (first_given, second_given)]
    defined = (left[0] > LEAST_LEFT) & (left[1] > LEAST_LEFT)  # not so where one is NaN
    spread = np.sqrt(np.where(defined, left[0] * left[1], 1.0))
    return np.asarray(np.where(defined, np.clip((plain - first_given * second_given) / spread, -1, 1), np.nan))


def permutations(number: int, size: int, seed: list[int]) -> Indices:
    """`number` random orders of `size` values, `[number, size]`."""
    orders = np.tile(np.arange(size), (number, 1))
    return np.random.default_rng(seed).permuted(orders, axis=1)


def permuted(first: Doubles, second: Doubles, orders: Indices) -> Doubles:
    """Rank correlations `[a, orders]` of the rows of `first` with `second` in each order; all `unit_ranks`."""
    return np.asarray(first @ second[orders].T)
