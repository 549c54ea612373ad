"""Values in the texts of the documents that are computed from several rows of the result files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t as student
from scipy.stats import ttest_1samp

STUDY = "docs/study/"


def compute_ratio_changes(read: Any, method: str, layer: int) -> pd.DataFrame:
    """Return the margins of the reviews with the change of their ratio in one layer, in the column `change`."""
    ratios = read("reports/plots/measure/mixing_by_review.csv")
    ratios = ratios[(ratios["method"] == method) & (ratios["layer"] == layer)]
    wide = ratios.pivot(index="document", columns="checkpoint", values="mean")
    margins = read("reports/plots/faithfulness/margins.csv").set_index("document")
    return margins.assign(change=wide["finetuned"] - wide["pretrained"])


def find_largest_spread(read: Any, measure: str, setting: str) -> dict[str, Any]:
    """Return the layer in which a change differs most between the seeds of a setting, with their standard deviation."""
    seeds = read(f"{STUDY}answer_layers.csv").query("checkpoint == 'difference' and measure == @measure")
    seeds = seeds[seeds["setting"] == setting].set_index("layer")
    half_widths = seeds["ci_high"] - seeds["mean"]
    deviations = half_widths * np.sqrt(seeds["seeds"]) / student.ppf(0.975, seeds["seeds"] - 1)
    return {"layer": int(deviations.idxmax()), "deviation": deviations.max()}


def read_seed_values(read: Any, measure: str, labels: str) -> pd.Series:
    """Return a measure of the training runs in docs/study/trainings_models.csv by seed."""
    runs = read(f"{STUDY}trainings_models.csv")
    return runs[(runs["measure"] == measure) & (runs["labels"] == labels)].set_index("seed")["value"]


def compute_paired_effect(read: Any, measure: str) -> dict[str, float]:
    """Return the change from permuted to true labels in pairs of seeds, with Student's interval."""
    changes = (
        read_seed_values(read, measure, "true labels") - read_seed_values(read, measure, "permuted labels")
    ).dropna()
    ends = ttest_1samp(changes, 0).confidence_interval()
    return {"mean": changes.mean(), "ci_low": ends.low, "ci_high": ends.high}
