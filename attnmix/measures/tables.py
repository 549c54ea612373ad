"""Tables of measures: a row for each combination of labels, in their order."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pandas as pd

from attnmix.core.statistics import Interval


def grid(labels: Mapping[str, Any]) -> pd.DataFrame:
    """A row for each combination of the labels, the last one running fastest."""
    return pd.DataFrame(list(product(*labels.values())), columns=list(labels))


def interval_table(labels: Mapping[str, Any], interval: Interval) -> pd.DataFrame:
    """`grid`, with an interval whose axes are the labels in their order."""
    return grid(labels).assign(mean=interval.mean.ravel(), ci_low=interval.low.ravel(), ci_high=interval.high.ravel())
