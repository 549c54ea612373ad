"""Scores that `faithfulness` gives each token of the captured texts, in `features/faithfulness/captured.parquet`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from attnmix.store.files import read_table, write_table

PREDICTIONS = Path("features/faithfulness/predictions.parquet")
CAPTURED = Path("features/faithfulness/captured.parquet")


def write_captured_scores(scores: pd.DataFrame) -> None:
    """Write `document, position, method, score`; a score is NaN for a token that the method does not score."""
    write_table(CAPTURED, scores)


def read_captured_scores() -> pd.DataFrame:
    """Return what `write_captured_scores` wrote."""
    return read_table(CAPTURED, "faithfulness")
