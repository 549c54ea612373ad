"""From every document's controls to the tables that stand beside those of the ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.statistics import Resampled
from attnmix.measures.summary import DIFFERENCE


def control_tables(
    controls: Mapping[str, Mapping[str, Resampled]],
    means: Mapping[str, Resampled],
    methods: Sequence[str],
    counted: npt.NDArray[np.int32],
) -> dict[str, pd.DataFrame]:
    """`mixing_controls` and `mixing_controls_difference` by name.

    `controls` has by checkpoint and control the mean ratios `[layers, methods]` of the documents whose numbers of
    tokens are `counted`, `means` the true ones as `overall_means` gives them: every difference is of the same documents
    in each sample.
    """
    resampled = {
        (checkpoint, control): each
        for checkpoint, by_control in controls.items()
        for control, each in by_control.items()
    }
    if DIFFERENCE in means:
        shared = [control for control in controls["pretrained"] if control in controls["finetuned"]]
        for control in shared:
            before, after = (resampled[checkpoint, control] for checkpoint in ("pretrained", "finetuned"))
            resampled[DIFFERENCE, control] = after.minus(before)
    counts = {"tokens": int(counted.sum()), "documents": len(counted)}
    of_controls = [_rows(*names, each, methods, "mean").assign(**counts) for names, each in resampled.items()]
    excess = [
        _rows(checkpoint, control, means[checkpoint].minus(each), methods, "difference")
        for (checkpoint, control), each in resampled.items()
        if checkpoint in means
    ]
    return {"mixing_controls": pd.concat(of_controls), "mixing_controls_difference": pd.concat(excess)}


def _rows(checkpoint: str, control: str, by_layer: Resampled, methods: Sequence[str], value: str) -> pd.DataFrame:
    """By layer and method, from `[layers, methods]`."""
    interval, every = by_layer.interval(), by_layer.simultaneous()
    labels = product([checkpoint], [control], range(1, len(interval.mean) + 1), methods)
    frame = pd.DataFrame(list(labels), columns=["checkpoint", "control", "layer", "method"])
    ends = {value: interval.mean, "ci_low": interval.low, "ci_high": interval.high}
    if value == "difference":
        ends |= {"simultaneous_low": every.low, "simultaneous_high": every.high}
    return frame.assign(**{name: values.ravel() for name, values in ends.items()})
