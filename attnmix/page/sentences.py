"""The run in words: facts, findings and cautions, whose figures stand in the files under `reports/`."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from attnmix.core.names import CAPTURED_CHECKPOINT
from attnmix.core.options import ModelParameters, Parameters
from attnmix.figures.labels import CHECKPOINTS, in_text
from attnmix.measures.ratios import RATIOS, preferred_ratio
from attnmix.page import evidence
from attnmix.page.arrays import visible
from attnmix.page.evidence import signed
from attnmix.store.maps import made_layouts, read_quality
from attnmix.store.reports import read_metrics, read_mixing, read_plot

LEFT_OUT_BY_WEIGHTS = {"attnres_w": "the skip connection", "attn_n": "how long the mixed vectors are"}
PROJECTIONS = {"pca": "the two principal components", "random_projection": "random directions"}
COMPUTED = {"fine-tuning": "finetune", "the measures": "measure"}
ONE_SEED = "Intervals are over reviews, for this one fine-tuning seed; another seed is another model."
ORIGINS = {
    "model.base": "The pretrained model comes from",
    "model.name": "The model comes from",
    "dataset.name": "The reviews come from",
}
PACKAGES = ("torch", "transformers", "umap-learn", "numba", "zarr", "mpld3")


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
    """Python and the packages that the numbers hang on, without the name of a build (`2.13.0+cpu`)."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python} | {name: version(name).partition("+")[0] for name in PACKAGES}


def computed_on() -> str:
    """What the last digits of the numbers hang on."""
    machines = {stage: read_metrics(name)["computed_on"] for stage, name in COMPUTED.items()}
    if len(set(machines.values())) == 1:
        return f"All of it on: {machines['fine-tuning']}."
    each = "; ".join(f"{stage} on {machine}" for stage, machine in machines.items())
    return f"Not all on the same kind of machine: {each}."


def origins(parameters: Parameters) -> list[str]:
    """Where model and reviews come from; of a repository of the hub, at which commit."""
    commits, model, data = read_metrics("download"), parameters.model, parameters.dataset
    base = model.base_model
    return [
        *([_origin("model.base", base.name, base.revision, commits["base_commit"])] if base else []),
        _origin("model.name", model.name, model.revision, commits["model_commit"]),
        _origin("dataset.name", data.name, data.revision, commits["dataset_commit"]),
    ]


def _origin(key: str, name: str, revision: str | None, commit: str | None) -> str:
    if commit is None:
        return f"{ORIGINS[key]} {name}."
    asked = f" ({revision})" if revision not in (None, commit) else ""
    return f"{ORIGINS[key]} {name} of the hub, commit {commit}{asked}."


def percent(share: float, digits: int = 0) -> str:
    """`0.2426` as `24 %`."""
    return f"{100 * share:.{digits}f} %"


def facts() -> dict[str, str]:
    """The run in figures, by what they are."""
    test, number = read_metrics("finetune")["test"], read_metrics("download")
    return {
        "test accuracy": percent(test["accuracy"], 1),
        "majority baseline": percent(test["majority_accuracy"], 1),
        "training reviews": str(number["train"]),
        "test reviews": str(number["test"]),
        "reviews measured": str(read_metrics("measure")["documents"]),
    }


def findings(captured: Sequence[str]) -> list[str]:
    """Sentences; each figure stands in a metrics or plots file."""
    test, run = read_metrics("finetune")["test"], facts()
    curves, differences = read_mixing()
    method = preferred_ratio(curves["method"].tolist())
    return [
        f"The fine-tuned classifier is right on {run['test accuracy']} of {run['test reviews']} test reviews "
        f"(95 % interval {percent(test['accuracy_ci_low'])} to {percent(test['accuracy_ci_high'])}); "
        f"naming the most frequent class every time would be on {run['majority baseline']}.",
        *_classes(),
        *mixing(curves),
        *evidence.typical(method, captured),
        *evidence.change(differences),
        *evidence.controls(method),
        *evidence.derivatives(method),
        *map_findings(made_layouts()[0]),
    ]


def cautions(parameters: Parameters) -> list[str]:
    """What must not be read into the findings."""
    return [
        *([] if parameters.finetune.epochs else [_taken(parameters.model)]),
        "A ratio is one layer's, not that of all layers up to it. What came from elsewhere by then is what the "
        "rollouts ask (under Text).",
        "A ratio of norms is no causal effect." + _agreement(read_plot("measure/derivatives")),
        ONE_SEED,
        "A map shows neighbourhoods, and not all of them. How far its clusters lie apart, how large and how dense "
        "they are means little, and another seed gives another map.",
    ]


def _taken(model: ModelParameters) -> str:
    beside = f"{model.base}, which it need not come from" if model.base else "the same model, so no change is one"
    return (
        f"Nothing was fine-tuned here (finetune.epochs: 0): fine-tuned stands for {model.name} as it is, pretrained "
        f"for {beside}."
    )


def captured_text(row: pd.Series) -> str:
    """What the classifier, if any, says of a captured text, and what of it the model saw.

    `row` is of `texts.parquet`, with the columns of `predictions.parquet` where there is a classifier.
    """
    said = []
    if "predicted" in row:
        name = row["label_name"]
        label = f"Labelled {_class(name)}, classified" if isinstance(name, str) else "Classified"
        said.append(f"{label} as {_class(row['predicted'])} with a probability of {percent(row['probability'])}.")
    if row["tokens"] < row["whole_tokens"]:
        said.append(f"Only {row['tokens']} of its {row['whole_tokens']} tokens were read (capture.max_length).")
    if row["unknown_tokens"]:
        said.append(f"{row['unknown_tokens']} of its {row['tokens']} tokens are unknown to the model.")
    return " ".join(said)


def _classes() -> list[str]:
    """Which of more than two classes are told best and worst, by F1."""
    table = read_plot("finetune/finetune_by_class", dtype={"label_name": str}, keep_default_na=False, na_values=[""])
    if len(table) == 2:
        return []
    f1 = table.dropna(subset="f1").sort_values("f1", kind="stable").set_index("label_name")["f1"]
    worst, best = (f"{_class(name)} (F1 {percent(f1[name])})" for name in (f1.index[0], f1.index[-1]))
    return [f"Of the {len(table)} classes, {best} is told best and {worst} worst."]


def _class(name: str) -> str:
    """A class's name within a sentence, whose order of words a name that is written from right to left leaves alone."""
    shown = visible(name, kept="")
    return shown if shown.isascii() else f"\N{FIRST STRONG ISOLATE}{shown}\N{POP DIRECTIONAL ISOLATE}"


def called(name: str) -> str:
    """A model or data set by a name that is no path: of a package its name, of a folder far away its last part."""
    if "://" in name:
        return name.partition("://")[2].partition("/")[0]
    return Path(name).name if name.startswith(("/", ".", "~")) else name


def strongest_layer(method: str) -> int:
    """The layer with the highest mean of a ratio, in the checkpoint that is shown."""
    return int(most_and_least(read_mixing()[0], method)[0]["layer"])


def headline() -> str:
    """What is found, in one line that holds for any run."""
    curves = read_mixing()[0]
    most, least = most_and_least(curves, preferred_ratio(curves["method"].tolist()))
    # As many digits as tell them apart, and from nothing.
    pairs = [(percent(most["mean"], digits), percent(least["mean"], digits)) for digits in (0, 1, 2)]
    high, low = next((pair for pair in pairs if pair[0] != pair[1] and float(pair[1].split()[0])), pairs[0])
    if most["layer"] == least["layer"]:
        return f"The one layer mixes tokens at a ratio of {high}"
    return f"Layer {most['layer']} mixes tokens most, at a ratio of {high}; layer {least['layer']} least, {low}"


def most_and_least(curves: pd.DataFrame, method: str) -> tuple[pd.Series, pd.Series]:
    """The rows of the layers with the highest and the lowest mean of a ratio, in the checkpoint that is shown."""
    rows = curves[(curves["checkpoint"] == _shown_checkpoint(curves)) & (curves["method"] == method)]
    return rows.iloc[int(rows["mean"].argmax())], rows.iloc[int(rows["mean"].argmin())]


def mixing(curves: pd.DataFrame) -> list[str]:
    """The layers with the highest and the lowest mean, and what attention weights alone would say of the highest."""
    method = preferred_ratio(curves["method"].tolist())
    most, least = most_and_least(curves, method)
    curves = curves[curves["checkpoint"] == _shown_checkpoint(curves)]
    sentences = [
        f"{RATIOS[method].sentence.format(layer=most['layer'], share=percent(most['mean']))} ({_interval(most)}), the "
        f"highest of the layers' means; in layer {least['layer']} it is {percent(least['mean'])} ({_interval(least)}), "
        f"the lowest. {CHECKPOINTS[most['checkpoint']]} model, {most['tokens']} tokens of {most['documents']} reviews."
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


def _agreement(derivatives: pd.DataFrame) -> str:
    """How far the preferred ratio agrees with derivatives, as a sentence; none without gradient documents."""
    agreement = derivatives[derivatives["quantity"] == "agreement"]
    if agreement.empty:
        return ""
    method = preferred_ratio(agreement["method"].tolist())
    chosen = (agreement["method"] == method) & (agreement["reference"] == "layer_input")
    rows = agreement[chosen & (agreement["checkpoint"] == _shown_checkpoint(agreement))].dropna(subset="mean")
    if rows.empty:
        return ""
    low, high = rows.iloc[int(rows["mean"].argmin())], rows.iloc[int(rows["mean"].argmax())]
    return (
        f" The rank correlation of this one ({in_text(RATIOS[method].mark.label)}) with derivatives, of "
        f"{low['documents']} reviews, is lowest in layer {low['layer']} ({_correlation(low)}) and highest in layer "
        f"{high['layer']} ({_correlation(high)})."
    )


def _correlation(row: pd.Series) -> str:
    sure = "" if pd.isna(row["ci_low"]) else f", 95 % interval {signed(row['ci_low'])} to {signed(row['ci_high'])}"
    return f"{signed(row['mean'])}{sure}"


def map_findings(layout: str) -> list[str]:
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
            f"their rank correlation with those of the full space is {signed(value['distance_spearman'])}."
        )
    within = value.get("neighbours_kept_within")
    if within is not None and np.isfinite(within) and chance["neighbours_kept_within"] < 1:
        sentences.append(
            f"Among the vectors of its own capture point alone, the {layout} map keeps {percent(within)} of a vector's "
            f"15 nearest (chance {percent(chance['neighbours_kept_within'], 1)})."
        )
    overlap = value.get("neighbour_overlap")
    if overlap is not None and np.isfinite(overlap):
        sentences.append(
            f"What of the {layout} map is due to its seed: maps with other seeds share {percent(overlap)} "
            f"of each vector's neighbours (chance {percent(chance['neighbour_overlap'], 1)})."
        )
    return sentences + _movement(layout, read_plot("reduce/movement"))


def _movement(layout: str, movement: pd.DataFrame) -> list[str]:
    """What moves on the layout have to do with the mixing; true of any outcome."""
    measured = movement.loc[movement["layout"] == layout, "against"].unique()
    against = [method for method in measured if method in RATIOS]
    if not against:  # a layout without moves, or no ratios to set them against
        return []
    method = preferred_ratio(against)
    chosen = movement[(movement["against"] == method) & (movement["step"] == RATIOS[method].covers)]
    by_layer = {names: rows.dropna(subset="mean") for names, rows in chosen.groupby(["layout", "measure"])}
    if not len(by_layer[layout, "spearman"]):
        return []
    said = {names: _range(rows) for names, rows in by_layer.items() if len(rows)}
    step = "the attention step" if RATIOS[method].covers == "attention" else "a layer"
    sentences = [
        f"Does the {layout} map show the mixing? How far a token moves on it in {step} and how much it is mixed there "
        f"({in_text(RATIOS[method].mark.label)}) have a rank correlation of {said[layout, 'spearman']}."
    ]
    if (layout, "partial_full_space") in said:
        sentences.append(
            f"Given how far the token moves in the full space, the correlation of the {layout} map is "
            f"{said[layout, 'partial_full_space']}: what a map shows of the mixing beyond the length of the move."
        )
    plain = [
        f"{said[name, 'spearman']} on {label}" for name, label in PROJECTIONS.items() if (name, "spearman") in said
    ]
    if plain:
        sentences.append(f"Plain projections of the same vectors to two dimensions have {' and '.join(plain)}.")
    return [*sentences, _how_sure(by_layer[layout, "spearman"], by_layer[layout, "permutation_null"])]


def _range(rows: pd.DataFrame) -> str:
    """`0.12 (layer 1) to 0.45 (layer 6)`."""
    low, high = rows.iloc[int(rows["mean"].argmin())], rows.iloc[int(rows["mean"].argmax())]
    if low["layer"] == high["layer"]:
        return f"{signed(low['mean'])} (layer {low['layer']})"
    return f"{signed(low['mean'])} (layer {low['layer']}) to {signed(high['mean'])} (layer {high['layer']})"


def _how_sure(rows: pd.DataFrame, null: pd.DataFrame) -> str:
    """What stands against chance, and against other texts."""
    by_chance = (
        f"By chance, with the ratios dealt out anew within a text, 95 % of such correlations lie between "
        f"{signed(null['ci_low'].min())} and {signed(null['ci_high'].max())} in the layer where they spread most."
    )
    known = rows.dropna(subset="ci_low")
    if known.empty:
        return f"{by_chance} These are numbers of one text; there is no interval over texts."
    above, below = int((known["ci_low"] > 0).sum()), int((known["ci_high"] < 0).sum())
    least, most = known["documents"].min(), known["documents"].max()
    texts = f"{most}" if least == most else f"{least} to {most}"
    return (
        f"{by_chance} Of the map's {len(known)} layers with an interval over {texts} texts, it lies "
        f"above 0 in {above} and below 0 in {below}."
    )


def _shown_checkpoint(table: pd.DataFrame) -> str:
    """The one that the captured features are of; the measured one where that was left out."""
    measured = table["checkpoint"].unique().tolist()
    return CAPTURED_CHECKPOINT if CAPTURED_CHECKPOINT in measured else str(measured[0])


def _interval(row: Mapping[str, Any] | pd.Series) -> str:
    digits = 0 if percent(row["ci_low"]) != percent(row["ci_high"]) else 1
    return f"95 % interval {percent(row['ci_low'], digits)} to {percent(row['ci_high'], digits)}"
