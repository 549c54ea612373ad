"""Small results, kept in git: metrics as JSON, curves and tables as csv; and the figures and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stages.outputs.files import made, writing

METRICS = Path("reports/metrics")
PLOTS = Path("reports/plots")
FIGURES = Path("reports/figures")
PAGE = Path("reports/index.html")
SHOWN = Path("reports/show")
DIGITS = 6


def write_metrics(name: str, metrics: dict[str, Any]) -> None:
    """Write `reports/metrics/<name>.json`: what somebody would act on, numbers rounded to six significant digits.

    An unknown value (NaN) is null.
    """
    with writing(METRICS / f"{name}.json") as path:
        path.write_text(json.dumps(_rounded(metrics), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(part) for key, part in value.items()}
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
    return value


def read_metrics(name: str) -> dict[str, Any]:
    """`finetune`, `mixing`, `validation` or `maps`."""
    stages = {"finetune": "finetune", "mixing": "measure", "validation": "validate", "maps": "reduce"}
    metrics: dict[str, Any] = json.loads(made(METRICS / f"{name}.json", stages[name]).read_text(encoding="utf-8"))
    return metrics


def write_plot(name: str, table: pd.DataFrame, folder: Path = PLOTS) -> None:
    """Write `reports/plots/<name>.csv`, or that of another folder, numbers rounded to six decimals."""
    with writing(folder / f"{name}.csv") as path:
        table.round(DIGITS).to_csv(path, index=False, lineterminator="\n")


def read_plot(name: str, stage: str, **options: Any) -> pd.DataFrame:
    """What `stage` wrote by `write_plot`; `options` as in `pandas.read_csv`."""
    table: pd.DataFrame = pd.read_csv(made(PLOTS / f"{name}.csv", stage), **options)
    return table
