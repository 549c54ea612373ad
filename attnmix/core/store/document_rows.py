"""Arrays `[documents, ...]` by name, filled from batches in any order, and read as they are asked for."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = dict[str, npt.NDArray[Any]]


def gather_rows(batches: Iterable[tuple[Sequence[int], Path]], documents: int, folder: Path) -> Rows:
    """Return the arrays of all batches, a row for each of the `documents`, as memory-mapped files in `folder`.

    A batch is the numbers of its documents, and the npz file of their arrays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: Rows = {}
    for numbers, file in batches:
        with np.load(file) as arrays:
            for name, array in arrays.items():
                if name not in rows:
                    shape = (documents, *array.shape[1:])
                    rows[name] = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", array.dtype, shape)
                rows[name][list(numbers)] = array
    return rows
