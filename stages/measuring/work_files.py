"""Files of unfinished work: each gets its name only once it is whole, so that what is there by name counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attnmix.store.files import writing


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which gets its own name only once everything is written."""
    with writing(path):
        part = path.with_name(f"{path.name}.part")
        yield part
        part.rename(path)


def write_arrays(path: Path, arrays: Mapping[str, npt.ArrayLike]) -> None:
    """One file of arrays by name."""
    with whole(path) as part, part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # its annotation takes the names for its own option


def read_array(path: Path, name: str) -> npt.NDArray[Any]:
    """One of the arrays of a file, and nothing else of it."""
    with np.load(path) as arrays:
        return np.asarray(arrays[name])
