"""Arrays of single documents, a file for each batch: unfinished work from which a killed run resumes.

`write_arrays` writes a file in one step, so that one that exists is whole. `gather_rows` reads those of all batches as
one array `[documents, ...]` by name, in the documents' own order.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attnmix.core.store.files import atomic_path

DocumentRows = dict[str, npt.NDArray[Any]]
"""Arrays by name, with a row for each document."""


def stack_rows(documents: Sequence[Mapping[str, npt.NDArray[Any]]]) -> DocumentRows:
    """Return the arrays of single documents by name as `[documents, ...]`; none without documents."""
    names = documents[0] if documents else ()
    return {name: np.stack([arrays[name] for arrays in documents]) for name in names}


def write_arrays(file: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name to an npz file."""
    with atomic_path(file) as part, part.open("wb") as opened:
        np.savez(opened, **arrays)


def gather_rows(batches: Iterable[tuple[Sequence[int], Path]], documents: int, folder: Path) -> DocumentRows:
    """Return the arrays of all batches, a row for each of the `documents`, as memory-mapped files in `folder`.

    A batch is the numbers of its documents, and the file of their `stack_rows`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: DocumentRows = {}
    for numbers, file in batches:
        with np.load(file) as arrays:
            for name, array in arrays.items():
                if name not in rows:
                    shape = (documents, *array.shape[1:])
                    rows[name] = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", array.dtype, shape)
                rows[name][list(numbers)] = array
    return rows
