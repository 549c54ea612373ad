"""The run in words: facts, findings and cautions, whose figures stand in the files under `reports/`."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd

from stages.mixing.ratios import RATIOS, preferred_ratio
from stages.outputs.maps import made_layouts, read_quality
from stages.outputs.reports import read_metrics, read_plot
from stages.parameters import Parameters
from stages.vocabulary import CAPTURED_CHECKPOINT, CHECKPOINTS, in_text

LEFT_OUT_BY_WEIGHTS = {"attnres_w": "the skip connection", "attn_n": "how long the mixed vectors are"}
PACKAGES = ("torch", "transformers", "umap-learn", "numba", "zarr", "plotly")


def changed_parameters(parameters: Parameters) -> list[tuple[str, str, str]]:
    """Key, value and default of each parameter that differs from its default, in YAML's words and the file's order."""
    own, defaults = (_flat(each.model_dump()) for each in (parameters, Parameters()))
    return [(key, _plain(own[key]), _plain(defaults[key])) for key in own if own[key] != defaults[key]]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, value in values.items():
        keys = value if isinstance(value, dict) else {None: value}
        flat |= {f"{section}.{key}" if key else section: each for key, each in keys.items()}
    return flat


def _plain(value: Any) -> str:
    if value is None:
        return "empty"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def versions() -> dict[str, str]:
    """Python and the packages that the numbers hang on."""
    return {"Python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def percent(share: float, digits: int = 0) -> str:
    """`0.2426` as `24 %`."""
    return f"{100 * share:.{digits}f} %"


def facts() -> dict[str, str]:
    """The run in figures, by what they are."""
    test, reviews = read_metrics("finetune")["test"], read_plot("reviews", "download")
    number = reviews.groupby("split")["reviews"].sum()
    return {
        "test accuracy": percent(test["accuracy"], 1),
        "majority baseline": percent(test["majority_accuracy"], 1),
        "training reviews": str(number["train"]),
        "test reviews": str(number["test"]),
        "reviews measured": str(read_metrics("mixing")["documents"]),
    }


def findings() -> list[str]:
    """Sentences; each figure stands in a metrics or plots file."""
    test, run = read_metrics("finetune")["test"], facts()
    return [
        f"The fine-tuned classifier is right on {run['test accuracy']} of {run['test reviews']} test reviews "
        f"(95 % interval {percent(test['accuracy_ci_low'])} to {percent(test['accuracy_ci_high'])}); "
        f"naming the more frequent class every time would be on {run['majority baseline']}.",
        *_mixing(read_plot("mixing", "measure")),
        *_difference(read_plot("mixing_difference", "measure")),
        *_map(made_layouts()[0]),
    ]


def cautions() -> list[str]:
    """What must not be read into the findings."""
    return [
        "A ratio is one layer's, not that of all layers up to it. What came from elsewhere by then is what the "
        "rollouts ask (under Text).",
        "A ratio of norms is no causal effect." + _agreement(read_plot("mixing_gradient", "measure")),
        "Intervals are over reviews, for this one fine-tuning seed; another seed is another model.",
        "A map shows neighbourhoods, and not all of them. How far its clusters lie apart, how large and how dense "
        "they are means little, and another seed gives another map.",
    ]


def _mixing(curves: pd.DataFrame) -> list[str]:
    method = preferred_ratio(curves["method"].tolist())
    curves = curves[curves["checkpoint"] == _shown_checkpoint(curves)]
    rows = curves[curves["method"] == method]
    most, least = rows.iloc[int(rows["mean"].argmax())], rows.iloc[int(rows["mean"].argmin())]
    sentences = [
        f"{RATIOS[method].sentence.format(layer=most['layer'], share=percent(most['mean']))} ({_interval(most)}), the "
        f"most of all layers; in layer {least['layer']} it is {percent(least['mean'])} ({_interval(least)}), the "
        f"least. {CHECKPOINTS[most['checkpoint']]} model, {most['tokens']} tokens of {most['documents']} reviews."
    ]
    weights = curves[(curves["method"] == "attn_w") & (curves["layer"] == most["layer"])]
    if len(weights) and method != "attn_w":
        same = weights.iloc[0]
        left_out = LEFT_OUT_BY_WEIGHTS.get(method, "how long the mixed vectors are, and the skip connection")
        sentences.append(
            f"The attention weights alone would say {percent(same['mean'])} for layer {most['layer']} "
            f"({_interval(same)}): they leave out {left_out}."
        )
    return sentences


def _difference(differences: pd.DataFrame) -> list[str]:
    if differences.empty:  # one checkpoint was measured
        return []
    rows = differences[differences["method"] == preferred_ratio(differences["method"].tolist())]
    row = rows.iloc[int(rows["difference"].abs().argmax())]
    return [
        f"Fine-tuning changes mixing most in layer {row['layer']:.0f}, by {100 * row['difference']:+.0f} points (95 % "
        f"interval {100 * row['ci_low']:+.0f} to {100 * row['ci_high']:+.0f}, paired by review)."
    ]


def _agreement(agreement: pd.DataFrame) -> str:
    """How far the preferred ratio agrees with derivatives, as a sentence; none without gradient documents."""
    if agreement.empty:
        return ""
    method = preferred_ratio(agreement["method"].tolist())
    chosen = (agreement["method"] == method) & (agreement["reference"] == "layer_input")
    rows = agreement[chosen & (agreement["checkpoint"] == _shown_checkpoint(agreement))].dropna(subset="spearman")
    if rows.empty:
        return ""
    low, high = rows.iloc[int(rows["spearman"].argmin())], rows.iloc[int(rows["spearman"].argmax())]
    return (
        f" The rank correlation of this one ({in_text(RATIOS[method].mark.label)}) with derivatives is lowest in layer "
        f"{low['layer']} ({low['spearman']:.2f}) and highest in layer {high['layer']} ({high['spearman']:.2f})."
    )


def _map(layout: str) -> list[str]:
    """How far the first layout can be trusted."""
    quality = read_quality()
    whole = quality[(quality["layout"] == layout) & quality["point"].isna()].set_index("measure")
    value, chance = whole["value"], whole["chance"]
    sentences = []
    if value[["trustworthiness", "neighbours_kept", "distance_spearman"]].notna().all():
        sentences.append(
            f"How far to trust the {layout} map: trustworthiness {value['trustworthiness']:.2f} (chance "
            f"{chance['trustworthiness']:.2f}), {percent(value['neighbours_kept'])} of a vector's 15 nearest "
            f"neighbours kept (chance {percent(chance['neighbours_kept'], 1)}). Far distances are less to be trusted: "
            f"their rank correlation with those of the full space is {value['distance_spearman']:.2f}."
        )
    movement = read_plot("movement", "reduce").query("layout == @layout")
    seeds = " and ".join(", ".join(map(str, movement["seed"].unique())).rsplit(", ", 1))
    overlap = value.get("neighbour_overlap")
    if overlap is not None and np.isfinite(overlap):
        sentences.append(
            f"What of the {layout} map is due to its seed: maps with seeds {seeds} share {percent(overlap)} "
            f"of each vector's neighbours (chance {percent(chance['neighbour_overlap'], 1)})."
        )
    return sentences + _movement(layout, movement)


def _movement(layout: str, movement: pd.DataFrame) -> list[str]:
    against = [method for method in movement["against"].unique() if method in RATIOS]
    if not against:  # a layout without moves, or no ratios to set them against
        return []
    chosen = (movement["against"] == preferred_ratio(against)) & (movement["step"] == "attention")
    by_seed = movement[chosen].pivot_table(index="seed", columns="layer", values="spearman", sort=False)
    if by_seed.empty:
        return []
    shown, means = by_seed.iloc[0], by_seed.mean(axis=1)
    range_of_seeds = f" ({means.min():.2f} to {means.max():.2f} with {len(means)} seeds)" if len(means) > 1 else ""
    return [
        f"Does the {layout} map show the mixing? How far a token moves on it in the attention step and how much "
        f"it is mixed there have a rank correlation of {means.iloc[0]:.2f}{range_of_seeds}, the mean over the layers; "
        f"the lowest, {shown.min():.2f}, is that of layer {shown.idxmin()}, the highest, {shown.max():.2f}, that of "
        f"layer {shown.idxmax()}."
    ]


def _shown_checkpoint(table: pd.DataFrame) -> str:
    """The one that the captured features are of; the measured one where that was left out."""
    measured = table["checkpoint"].unique().tolist()
    return CAPTURED_CHECKPOINT if CAPTURED_CHECKPOINT in measured else str(measured[0])


def _interval(row: Mapping[str, Any] | pd.Series) -> str:
    digits = 0 if percent(row["ci_low"]) != percent(row["ci_high"]) else 1
    return f"95 % interval {percent(row['ci_low'], digits)} to {percent(row['ci_high'], digits)}"
