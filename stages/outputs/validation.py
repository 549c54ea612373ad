"""What `validate` keeps in `features/validation/`: every token's scores, and what each removal leaves of the class."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from stages.outputs.files import read_table, write_table

VALIDATION = Path("features/validation")


def write_scores(scores: pd.DataFrame) -> None:
    """Write `document, position, token, method, score`: the mean of the draws of a score that is drawn."""
    write_table(VALIDATION / "scores.parquet", scores)


def write_removals(removals: pd.DataFrame) -> None:
    """Write `document, method, draw, share, probability, logit` of the predicted class; share 0 is the whole text."""
    write_table(VALIDATION / "removals.parquet", removals)


def write_captured_scores(scores: pd.DataFrame) -> None:
    """Write `document, position, method, score` of the captured texts; NaN for a token that a method does not score."""
    write_table(VALIDATION / "captured.parquet", scores)


def read_captured_scores() -> pd.DataFrame:
    """What `write_captured_scores` wrote."""
    return read_table(VALIDATION / "captured.parquet", "validate")


def read_scores() -> pd.DataFrame:
    """What `write_scores` wrote."""
    return read_table(VALIDATION / "scores.parquet", "validate")


def read_removals() -> pd.DataFrame:
    """What `write_removals` wrote."""
    return read_table(VALIDATION / "removals.parquet", "validate")
