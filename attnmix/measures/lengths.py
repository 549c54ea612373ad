"""Classes of texts by their length in tokens, split where it doubles."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LENGTH_ENDS = tuple(2**power for power in range(5, 21))
LENGTHS = ("1-32", *(f"{end + 1}-{2 * end}" for end in LENGTH_ENDS[:-1]))


def length_class(tokens: npt.ArrayLike) -> npt.NDArray[Any]:
    """Positions in `LENGTHS` of texts of so many tokens."""
    return np.searchsorted(LENGTH_ENDS, np.asarray(tokens), side="left")
