"""The tables and metrics of the measures, from every document's sums."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from stages.mixing.documents import TOKEN_CLASSES, Document
from stages.mixing.statistics import Interval

Doubles = npt.NDArray[np.float64]

DIGITS = 6
# Positions are split where they double: 0, 1, 2-3, 4-7, ...
POSITION_STARTS = (0, *(2**power for power in range(16)))


def class_sums(document: Document, ratios_MLT: npt.NDArray[np.float32]) -> tuple[Doubles, Doubles]:
    """Sums `[layers, methods, classes]` over the counted tokens of each class, and their counts `[classes]`."""
    return _group_sums(ratios_MLT, document.classes[: document.counted], len(TOKEN_CLASSES))


def position_sums(document: Document, ratios_MLT: npt.NDArray[np.float32]) -> tuple[Doubles, Doubles]:
    """Sums `[layers, methods, ranges]` over the counted tokens of each range of positions, and their counts."""
    ranges = np.searchsorted(POSITION_STARTS, np.arange(document.counted), side="right") - 1
    return _group_sums(ratios_MLT, ranges, len(POSITION_STARTS))


def _group_sums(ratios_MLT: npt.NDArray[np.float32], groups: npt.NDArray[Any], size: int) -> tuple[Doubles, Doubles]:
    membership = np.eye(size)[groups]
    return np.einsum("mlt,tg->lmg", ratios_MLT[:, :, : len(groups)].astype(np.float64), membership), membership.sum(0)


def position_range(number: int) -> str:
    """A range of `POSITION_STARTS` as text."""
    first, last = POSITION_STARTS[number], (*POSITION_STARTS[1:], 2 * POSITION_STARTS[-1])[number] - 1
    return str(first) if first == last else f"{first}-{last}"


def grid(labels: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """A row for each combination of the labels, the last one running fastest."""
    return pd.DataFrame(list(product(*labels.values())), columns=list(labels))


def table(labels: Mapping[str, Sequence[Any]], interval: Interval) -> pd.DataFrame:
    """`grid`, with an interval whose axes are the labels in their order."""
    values = zip(("mean", "ci_low", "ci_high"), (part.ravel() for part in interval), strict=True)
    return grid(labels).assign(**dict(values))


def write_table(path: Path, frames: Iterable[pd.DataFrame]) -> None:
    """Write frames one below the other, numbers rounded to six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.concat(list(frames)).round(DIGITS).to_csv(path, index=False, lineterminator="\n")


def write_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Write JSON, numbers rounded to six significant digits, so that small errors stay readable."""
    rounded = json.loads(json.dumps(metrics), parse_float=lambda number: float(f"{float(number):.{DIGITS}g}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")
