"""Spearman's rank correlation, for the measures and the maps alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata


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
