"""Files of unfinished work: each gets its name only once it is whole, so a file that exists is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnmix.store.files import whole, writing


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to write to, which becomes `path` once everything is written."""
    with writing(path):
        part = path.with_name(f"{path.name}.part")
        part.mkdir(exist_ok=True)
        yield part
        part.rename(path)


def write_arrays(path: Path, arrays: Mapping[str, npt.ArrayLike]) -> None:
    """Write one file of arrays by name."""
    with whole(path) as part, part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # its annotation takes the names for its own option
