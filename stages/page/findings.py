"""The run in words: facts, and findings whose figures come from the metrics files."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from ruamel.yaml import YAML

from stages.page.contents import CAPTURED_CHECKPOINT, LAYOUTS, PLOTS
from stages.parameters import METHODS, Parameters
from stages.pictures.mixing_figures import RATIO_MARKS
from stages.pictures.style import CHECKPOINT_LABELS

METRICS = Path("reports/metrics")
DEFAULTS = Path(__file__).with_name("default_parameters.yaml")
PACKAGES = ("torch", "transformers", "umap-learn", "numba", "zarr", "plotly")
# What mixes, of all that the layer does before its feed-forward network; the others where it was not measured.
PREFERRED = ("attnresln_n", "attnres_n", "attn_n", "enc_n", "attnres_w", "attn_w")


# What is said of other tokens' part, by method.
PART = {
    "attn_w": "By its attention weights, layer {layer} takes {share} of what it adds to a token from other tokens",
    "attnres_w": "By attention weights, the skip connection counted as half, other tokens' part of a token's vector "
    "after attention of layer {layer} is {share}",
    "attn_n": "Of what attention adds to a token's vector in layer {layer}, {share} comes from other tokens, by norm",
    "attnres_n": "After attention and skip connection of layer {layer}, other tokens' part of a token's vector is "
    "{share}, by norm",
    "attnresln_n": "After attention, skip connection and LayerNorm of layer {layer}, other tokens' part of a token's "
    "vector is {share}, by norm",
    "enc_n": "After the whole of layer {layer}, other tokens' part of a token's vector is {share}, by norm",
}


class Changed(NamedTuple):
    """A parameter that differs from its default, both in YAML's words."""

    key: str
    value: str
    default: str


def changed_parameters(parameters: Parameters) -> list[Changed]:
    """The parameters that differ from the defaults, in the file's order."""
    defaults: dict[str, Any] = YAML(typ="safe", pure=True).load(DEFAULTS.read_text(encoding="utf-8"))
    found = []
    for section, field in Parameters.model_fields.items():
        keys = getattr(field.annotation, "model_fields", None)
        own = getattr(parameters, section)
        pairs = [(section, own, defaults[section])]
        if keys is not None:
            pairs = [(f"{section}.{key}", getattr(own, key), defaults[section][key]) for key in keys]
        found += [Changed(key, _plain(value), _plain(default)) for key, value, default in pairs if value != default]
    return found


def _plain(value: Any) -> str:
    if value is None:
        return "empty"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def versions() -> dict[str, str]:
    """Python and the packages that the numbers hang on."""
    return {"Python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def read_metrics(root: Path = Path()) -> dict[str, Any]:
    """`finetune`, `mixing` and `maps`."""
    paths = {name: root / METRICS / f"{name}.json" for name in ("finetune", "mixing", "maps")}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}


def percent(share: float, digits: int = 0) -> str:
    """`0.2426` as `24 %`."""
    return f"{100 * share:.{digits}f} %"


def findings(metrics: Mapping[str, Any], root: Path = Path()) -> list[str]:
    """Sentences; each figure stands in a metrics or plots file."""
    test, reviews = metrics["finetune"]["test"], metrics["finetune"]["reviews"]
    accuracy = (
        f"The fine-tuned classifier is right on {percent(test['accuracy'], 1)} of {reviews['test']} test reviews "
        f"(95 % interval {percent(test['accuracy_ci_low'])} to {percent(test['accuracy_ci_high'])}); "
        f"naming the more frequent class every time would be on {percent(test['majority_accuracy'], 1)}."
    )
    mixing, difference = (pd.read_csv(root / PLOTS / f"{name}.csv") for name in ("mixing", "mixing_difference"))
    return [accuracy, *_mixing(mixing), *_difference(difference), *_maps(metrics["maps"])]


def cautions(metrics: Mapping[str, Any], method: str) -> list[str]:
    """What must not be read into the findings, which are about `method`."""
    measured = metrics["mixing"]
    checkpoint = CAPTURED_CHECKPOINT if CAPTURED_CHECKPOINT in measured else next(iter(measured))
    agreement = measured[checkpoint].get("spearman_with_gradient", {}).get(method, {})
    by_layer = {int(name.removeprefix("layer_")): value for name, value in agreement.items() if value is not None}
    causal = "A ratio of norms is no causal effect."
    if by_layer:
        low, high = _extremes(by_layer)
        causal += (
            f" The rank correlation of this one ({_in_text(RATIO_MARKS[method].label)}) with derivatives is lowest "
            f"in layer {low} ({by_layer[low]:.2f}) and highest in layer {high} ({by_layer[high]:.2f})."
        )
    return [
        "A ratio is one layer's, not that of all layers up to it. What came from elsewhere by then is what the "
        "rollouts ask (under Text).",
        causal,
        "Intervals are over reviews, for this one fine-tuning seed; another seed is another model.",
        "A map shows neighbourhoods, and not all of them. How far its clusters lie apart, how large and how dense "
        "they are means little, and another seed gives another map.",
    ]


def preferred_method(methods: Any) -> str:
    """The method that the sentences and the page's first view are about."""
    return next(method for method in PREFERRED if method in set(methods))


def _mixing(table: pd.DataFrame) -> list[str]:
    method = preferred_method(table["method"])
    checkpoint = CAPTURED_CHECKPOINT if CAPTURED_CHECKPOINT in set(table["checkpoint"]) else table["checkpoint"].iloc[0]
    rows = table[(table["checkpoint"] == checkpoint) & (table["method"] == method)]
    most, least = rows.iloc[int(rows["mean"].argmax())], rows.iloc[int(rows["mean"].argmin())]
    sentences = [
        f"{PART[method].format(layer=most['layer'], share=percent(most['mean']))} ({_interval(most)}), the most of all "
        f"layers; in layer {least['layer']} it is {percent(least['mean'])} ({_interval(least)}), the least. "
        f"{CHECKPOINT_LABELS[checkpoint]} model, {most['tokens']} tokens of {most['documents']} reviews."
    ]
    weights = table[(table["checkpoint"] == checkpoint) & (table["method"] == "attn_w")]
    if len(weights) and method != "attn_w":
        same = weights[weights["layer"] == most["layer"]].iloc[0]
        sentences.append(
            f"The attention weights alone would say {percent(same['mean'])} for layer {most['layer']} "
            f"({_interval(same)}): they leave out how long the mixed vectors are, and the skip connection."
        )
    return sentences


def _difference(table: pd.DataFrame) -> list[str]:
    if table.empty:  # one checkpoint was measured
        return []
    method = preferred_method(table["method"])
    rows = table[table["method"] == method]
    row = rows.iloc[int(rows["difference"].abs().argmax())]
    return [
        f"Fine-tuning changes mixing most in layer {row['layer']:.0f}, by {100 * row['difference']:+.0f} points (95 % "
        f"interval {100 * row['ci_low']:+.0f} to {100 * row['ci_high']:+.0f}, paired by review)."
    ]


def _maps(metrics: Mapping[str, Any]) -> list[str]:
    sentences = []
    layout = next(name for name in LAYOUTS if name in metrics)
    whole = metrics[layout]
    trust, kept, distances = (whole[name] for name in ("trustworthiness", "neighbours_kept", "distance_spearman"))
    if None not in (trust["value"], kept["value"], distances["value"]):
        sentences.append(
            f"How far to trust the {layout} map: trustworthiness {trust['value']:.2f} (chance {trust['chance']:.2f}), "
            f"{percent(kept['value'])} of a vector's 15 nearest neighbours kept (chance {percent(kept['chance'], 1)}). "
            f"Far distances are less to be trusted: their rank correlation with those of the full space is "
            f"{distances['value']:.2f}."
        )
    if "neighbour_overlap" in whole and whole["neighbour_overlap"]["value"] is not None:
        overlap = whole["neighbour_overlap"]
        sentences.append(
            f"What of the {layout} map is due to its seed: maps with seeds {_listed(whole['seeds'])} share "
            f"{percent(overlap['value'])} of each vector's neighbours (chance {percent(overlap['chance'], 1)})."
        )
    attention = whole.get("movement", {}).get("attention", {})
    measured = [method for method in PREFERRED if method in METHODS and method in attention]
    if measured and attention[measured[0]]["mean"] is not None:
        against = attention[measured[0]]
        by_layer = {int(k.removeprefix("layer_")): v for k, v in against.items() if k[:6] == "layer_" and v is not None}
        low, high = _extremes(by_layer)
        seeds = (
            ""
            if len(whole["seeds"]) < 2
            else (f" ({against['lowest_seed']:.2f} to {against['highest_seed']:.2f} with {len(whole['seeds'])} seeds)")
        )
        sentences.append(
            f"Does the {layout} map show the mixing? How far a token moves on it in the attention step and how much "
            f"it is mixed there have a rank correlation of {against['mean']:.2f}{seeds}, the mean over the layers; "
            f"the lowest, {by_layer[low]:.2f}, is that of layer {low}, the highest, {by_layer[high]:.2f}, that of "
            f"layer {high}."
        )
    return sentences


def _in_text(label: str) -> str:
    return label[0].lower() + label[1:]


def _extremes(by_layer: Mapping[int, float]) -> tuple[int, int]:
    """The layers with the lowest and the highest value."""
    ordered = sorted(by_layer, key=lambda layer: by_layer[layer])
    return ordered[0], ordered[-1]


def _interval(row: Any) -> str:
    digits = 0 if percent(row["ci_low"]) != percent(row["ci_high"]) else 1
    return f"95 % interval {percent(row['ci_low'], digits)} to {percent(row['ci_high'], digits)}"


def _listed(values: list[Any]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}" if first else last
