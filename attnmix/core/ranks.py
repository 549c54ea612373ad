"""Spearman's rank correlation, for the measures and the maps alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

MIN_UNEXPLAINED = 1e-9  # share of a variance that the given variable must leave; less is rounding


def rank_correlation(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the correlation over the last axis of two arrays that broadcast to each other.

    NaN where one side is constant or holds a NaN.
    """
    ranks = [np.asarray(rankdata(values, axis=-1, nan_policy="propagate")) for values in (first, second)]
    first_centred, second_centred = (each - each.mean(-1, keepdims=True) for each in ranks)
    products = np.asarray((first_centred * second_centred).sum(-1))
    lengths = np.linalg.norm(first_centred, axis=-1) * np.linalg.norm(second_centred, axis=-1)
    correlations = np.full(products.shape, np.nan)
    np.divide(products, lengths, out=correlations, where=lengths > 0)
    return correlations


def partial_correlation(
    between: npt.NDArray[Any], first_given: npt.NDArray[Any], second_given: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """Return (r_xy - r_xz r_yz) / sqrt((1 - r_xz^2) (1 - r_yz^2)), the correlation of x and y given z.

    Of rank correlations it is Pearson's correlation of the residuals of ranks. NaN where z leaves nothing of x or of y.
    """
    unexplained = np.stack(np.broadcast_arrays(1 - np.square(first_given), 1 - np.square(second_given)))
    defined = (unexplained > MIN_UNEXPLAINED).all(axis=0)
    spread = np.sqrt(np.where(defined, unexplained[0] * unexplained[1], 1.0))
    return np.where(defined, np.clip((between - first_given * second_given) / spread, -1, 1), np.nan)
