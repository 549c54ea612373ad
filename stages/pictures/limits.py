"""Limits of a map's axes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROOM = 1.08  # of the points' larger extent


def square_limits(xy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Limits of x and of y `[2, 2]`, equally long, around the points `[vectors, 2]`; NaN has no place."""
    points = xy[np.isfinite(xy).all(axis=1)]
    low, high = (points.min(axis=0), points.max(axis=0)) if len(points) else (np.zeros(2), np.ones(2))
    half = max(float((high - low).max()), 1e-3) * ROOM / 2
    middle = (low + high) / 2
    return np.stack([middle - half, middle + half], axis=1)
