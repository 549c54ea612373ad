"""Titles and axes of the figures that show a measure by layer."""

from __future__ import annotations

from attnmix.figures.labels import RATIO_LABELS
from attnmix.measures.ratios import RATIOS
from attnmix.results.measure_names import CLASS_SHARE
from attnmix.results.tables import LESS, is_own_share


def describe_axes(measure: str) -> tuple[str, str, tuple[float, float] | None]:
    """Return the title, the label of the y axis and its limits for a measure by layer."""
    ratio, _, control = measure.partition(f" {LESS} ")
    label = RATIO_LABELS.get(ratio, ratio.replace("_", " "))
    if control:
        return f"{label}, minus control", f"Ratio minus ratio with {control.replace('_', ' ')},\nmean over tokens", None
    if is_own_share(ratio):
        return label[0].upper() + label[1:], "Own share of a token's vector,\nmean over tokens", (0, 1)
    if ratio in RATIOS:
        return label, "Mixing ratio, mean over tokens", (0, 1)
    means = "mean over texts" if ratio.startswith(CLASS_SHARE) else "mean over tokens"
    return label, f"{label[0].upper()}{label[1:]}, {means}", None
