"""Files of the pipeline's own making: one error where a stage has not run, or where the disk refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from stages.errors import InputError


def made(path: Path, stage: str) -> Path:
    """`path`; `InputError` naming the `stage` that makes it where there is nothing."""
    if not path.exists():
        raise InputError(f"{path} is missing; `dvc repro {stage}` makes it")
    return path


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """`path`, in a folder that exists; the system's refusal to write becomes an `InputError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; free some space and run again") from error


def read_table(path: Path, stage: str, **options: Any) -> pd.DataFrame:
    """A parquet file; `options` as in `pandas.read_parquet`."""
    return pd.read_parquet(made(path, stage), **options)


def write_table(path: Path, table: pd.DataFrame) -> None:
    """A parquet file without the index."""
    with writing(path):
        table.to_parquet(path, index=False)
