"""Formats of measured numbers in the documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def decimal(value: float, digits: int = 2) -> str:
    """Return a number with a fixed number of decimals."""
    return f"{_defined(value):.{digits}f}"


def rounded(value: float, figures: int = 2) -> str:
    """Return a large number rounded to some significant figures."""
    return f"{float(f'{_defined(value):.{figures - 1}e}'):,.0f}"


def percent(share: float, digits: int = 0) -> str:
    """Return a share in per cent, without the sign."""
    return f"{round(100 * _defined(share), digits) + 0.0:.{digits}f}"  # no -0


def points(change: float, digits: int = 1) -> str:
    """Return a change in a share, in percentage points with its sign."""
    return f"{100 * _defined(change):+.{digits}f}"


def interval(row: Mapping[str, Any], number: Callable[..., str] = points, *digits: int) -> str:
    """Return the limits of a row's interval in brackets, formatted by `number`."""
    return f"[{number(row['ci_low'], *digits)}, {number(row['ci_high'], *digits)}]"


def change(row: Mapping[str, Any]) -> str:
    """Return the mean of a row as a change in percentage points, with its interval."""
    return f"{points(row['mean'])} {interval(row)}"


def share(row: Mapping[str, Any]) -> str:
    """Return the mean of a row as a share in per cent, with its interval."""
    return f"{percent(row['mean'])} % {interval(row, percent)}"


def _defined(value: float) -> float:
    if math.isnan(value):
        raise ValueError("the number is not defined (NaN)")
    return value
