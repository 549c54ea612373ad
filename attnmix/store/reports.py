"""Small results, kept in git: metrics as JSON, curves and tables as csv; and the figures and the page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from attnmix.core.points import STEP_MEASURES
from attnmix.store.files import made, whole

METRICS = Path("reports/metrics")
PLOTS = Path("reports/plots")
FIGURES = Path("reports/figures")
PAGE = Path("reports/index.html")
SHOWN = Path("reports/show")
DIGITS = 6
ROWS_AT_ONCE = 100_000


def write_metrics(name: str, metrics: dict[str, Any]) -> None:
    """Write `reports/metrics/<name>.json`: what somebody would act on, numbers rounded to six significant digits.

    An unknown value (NaN) is null.
    """
    with whole(METRICS / f"{name}.json") as part:
        part.write_text(json.dumps(_rounded(metrics), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(part) for key, part in value.items()}
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
    return value


def read_metrics(name: str) -> dict[str, Any]:
    """Return the metrics of the stage `name`."""
    made_file = made(METRICS / f"{name}.json", name)
    metrics: dict[str, Any] = json.loads(made_file.read_text(encoding="utf-8"))
    return metrics


def write_plot(name: str, table: pd.DataFrame, folder: Path = PLOTS) -> None:
    """Write `<stage>/<table>`, the `name`, to `<folder>/<stage>/<table>.csv`, numbers rounded to six decimals."""
    write_long_plot(name, [table], folder)


def write_long_plot(name: str, tables: Iterable[pd.DataFrame], folder: Path = PLOTS) -> None:
    """`write_plot` of a table in parts, one of which is in memory at a time."""
    with whole(folder / f"{name}.csv") as part, part.open("w", encoding="utf-8", newline="") as file:
        for number, table in enumerate(tables):
            table.round(DIGITS).to_csv(file, index=False, header=number == 0, lineterminator="\n")


def read_plot(name: str, **options: Any) -> pd.DataFrame:
    """Return what `write_plot` wrote under `name`, `<stage>/<table>`; `options` as in `pandas.read_csv`."""
    table: pd.DataFrame = pd.read_csv(made(PLOTS / f"{name}.csv", name.partition("/")[0]), **options)
    return table


def read_mixing() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the mean ratios of the checkpoints, and the rows of their difference."""
    table = read_plot("measure/mixing")
    return table[table["checkpoint"] != "difference"], table[table["checkpoint"] == "difference"]


def read_steps() -> pd.DataFrame:
    """Return the rows of `geometry.csv` that are of a layer's steps, named in the column `step`."""
    table = read_plot("measure/geometry")
    return table[table["measure"].isin(STEP_MEASURES)].rename(columns={"point": "step"})


def read_plot_rows(name: str, values: Mapping[str, object]) -> pd.DataFrame:
    """The rows of `read_plot` with these values by column, a part of the file in memory at a time."""
    parts: Any = read_plot(name, chunksize=ROWS_AT_ONCE)
    kept: pd.DataFrame = pd.concat(part[(part[list(values)] == pd.Series(values)).all(axis=1)] for part in parts)
    return kept
