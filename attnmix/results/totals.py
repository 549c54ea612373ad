"""Sums over the tokens of each text, for comparisons: ratios, ratios minus their controls, and shares.

Shapes: N texts, L layers, M methods.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnmix.core.statistics import Sums
from attnmix.measures.controls import CONTROLS
from attnmix.measures.engine import Measurements
from attnmix.results.controls import select_controls
from attnmix.results.measure_names import CLASS_SHARE_PERMUTED
from attnmix.results.tables import LESS


def sum_ratios(measurements: Measurements, methods: Sequence[str]) -> dict[str, Sums]:
    """Return the sums `[texts, layers]` of each ratio by name, and the numbers of tokens as counts."""
    tokens = []
    sums = []
    for number in range(len(measurements.texts)):
        ratios_MLT = measurements.ratios[number]  # [methods, layers, tokens]
        sums_ML = ratios_MLT.sum(-1, dtype=np.float64)
        sums.append(sums_ML.T)
        tokens.append(ratios_MLT.shape[-1])
    tokens_N1 = np.array(tokens, np.float64)[:, None]
    sums_NLM = np.stack(sums)  # [texts, layers, methods]
    return {method: Sums(sums_NLM[..., index], tokens_N1) for index, method in enumerate(methods)}


def select_method(sums: Sums, place: int) -> Sums:
    """Return the sums `[N, L]` of the ratio with index `place` from the sums `[N, L, M]` of a control."""
    return Sums(sums.values[..., place], sums.counts[..., 0])  # all methods have the same counts


def subtract_control(ratio: Sums, control: Sums) -> Sums:
    """Return the sums `[N, L]` of a ratio minus its control; counts are 0 for texts without a value of the control."""
    has_control = control.counts > 0
    differences = ratio.values - control.values
    return Sums(np.where(has_control, differences, 0), control.counts)


def sum_quantities(
    measurements: Measurements, methods: Sequence[str], control_names: Sequence[str], compared: Sequence[str]
) -> dict[str, Sums]:
    """Return the sums `[texts, layers]` of all compared quantities by name.

    The quantities are the swaps, the class shares, the `compared` ratios, and each of these ratios minus each control.
    The control `random_weights` is not subtracted, because it describes another model.

    Args:
        measurements: The measurements of all texts.
        methods: The names of the measured ratios.
        control_names: The names of the measured controls.
        compared: The names of the ratios to return.
    """
    ratios = sum_ratios(measurements, methods)
    controls = select_controls(control_names, measurements.sums)
    totals: dict[str, Sums] = {}
    for method in compared:
        ratio = ratios[method]
        totals[method] = ratio
        for name, sums in controls.items():
            if name in CONTROLS and name != "random_weights":
                control = select_method(sums, methods.index(method))
                totals[f"{method} {LESS} {name}"] = subtract_control(ratio, control)
    for name, sums in controls.items():
        is_share = name not in CONTROLS
        if is_share and name != CLASS_SHARE_PERMUTED:  # only a reference for the class share
            totals[name] = sums
    return totals
