"""Titles and axes of the figures that show a measure by layer."""

from __future__ import annotations

from typing import NamedTuple

from attnmix.figures.labels import RATIO_LABELS
from attnmix.measures.ratios import RATIOS
from attnmix.results.measure_names import CLASS_SHARE
from attnmix.results.tables import LESS, is_own_share


class AxesDescription(NamedTuple):
    """The title of a figure, and its y axis."""

    title: str
    ylabel: str
    ylim: tuple[float, float] | None = None
    """The limits of the y axis; None for automatic limits."""


def describe_axes(measure: str) -> AxesDescription:
    """Return the title and the y axis for a measure; a ratio minus a control is named "<ratio> less <control>"."""
    ratio, _, control = measure.partition(f" {LESS} ")
    title = RATIO_LABELS.get(ratio, ratio.replace("_", " "))
    capitalised = title[0].upper() + title[1:]
    if control:
        control_label = control.replace("_", " ")
        return AxesDescription(f"{title}, minus control", f"Ratio minus ratio with {control_label},\nmean over tokens")
    if is_own_share(ratio):
        return AxesDescription(capitalised, "Own share of a token's vector,\nmean over tokens", (0, 1))
    if ratio in RATIOS:
        return AxesDescription(title, "Mixing ratio, mean over tokens", (0, 1))
    if ratio.startswith(CLASS_SHARE):
        return AxesDescription(title, f"{capitalised}, mean over texts")
    return AxesDescription(title, f"{capitalised}, mean over tokens")
