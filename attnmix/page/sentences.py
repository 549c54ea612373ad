"""What the page says in words, for a whole run or for a few texts alone.

A sentence states one thing, with two numbers at most, and none that a chart beside it shows. Every number stands in a
file under `reports/`.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from attnmix.core.names import CAPTURED_CHECKPOINT
from attnmix.core.options import Parameters
from attnmix.figures.labels import CHECKPOINTS, in_text
from attnmix.measures.ratios import RATIOS, preferred_ratio
from attnmix.page.arrays import visible
from attnmix.store.runs import Run

DERIVATIVE_FORMS = {
    "norm_of_sum": "when all other tokens move together",
    "norm_of_block": "when they move independently",
    "sum_of_norms": "when the norms of single tokens are added",
}
REVIEW_PARAMETERS = ("dataset.", "finetune.", "faithfulness.", "capture.documents", "capture.drawn", "measure.")
"""Beginnings of the parameters that say nothing about a page of texts alone."""
PACKAGES = ("torch", "transformers", "umap-learn", "numba", "zarr", "mpld3")


class PageText(NamedTuple):
    """The words of a page; `checkpoints` are the labels of the measured checkpoints, the captured one last."""

    checkpoints: Mapping[str, str]
    dataset: str | None
    facts: Mapping[str, str]
    headline: str
    lead: str
    findings: list[str]
    agreement: str
    changed: list[tuple[str, str, str]]
    origins: list[str]
    computed_on: Mapping[str, str]


def describe_run(run: Run, parameters: Parameters) -> PageText:
    """Return the words for reviews and a classifier that was fine-tuned on them."""
    finetuned, download, measured = run.metrics("finetune"), run.metrics("download"), run.metrics("measure")
    test, curves = finetuned["test"], shown_curves(run)
    return PageText(
        checkpoints=CHECKPOINTS,
        dataset=short_name(parameters.dataset.name),
        facts={
            "test accuracy": percent(test["accuracy"], 1),
            "majority baseline": percent(test["majority_accuracy"], 1),
            "training reviews": str(download["train"]),
            "test reviews": str(download["test"]),
            "reviews measured": str(measured["documents"]),
        },
        headline=headline(curves),
        lead=_lead(curves),
        findings=[
            f"The 95 % interval of the classifier's test accuracy is {percent(test['accuracy_ci_low'])} to "
            f"{percent(test['accuracy_ci_high'])}.",
            *_classes(run),
            *_controls(run),
            *_derivatives(run),
        ],
        agreement=_agreement(run),
        changed=changed_parameters(parameters),
        origins=_origins(run, parameters),
        computed_on={"fine-tuning": finetuned["computed_on"], "measures": measured["computed_on"]},
    )


def describe_texts(run: Run, parameters: Parameters) -> PageText:
    """Return the words for texts in a model as it is: no reviews, no classifier, no derivatives."""
    curves, texts = shown_curves(run), run.tokens["document"].nunique()
    return PageText(
        checkpoints={"pretrained": "The model as it is"},
        dataset=None,
        facts={
            "text" if texts == 1 else "texts": str(texts),
            "tokens": str(len(run.tokens)),
            "layers": str(curves["layer"].max()),
        },
        headline=headline(curves),
        lead=_lead(curves),
        findings=_controls(run),
        agreement="",
        changed=[row for row in changed_parameters(parameters) if not row[0].startswith(REVIEW_PARAMETERS)],
        origins=[f"The model comes from {parameters.model.name}."],
        computed_on={"measures": run.metrics("measure")["computed_on"]},
    )


def changed_parameters(parameters: Parameters) -> list[tuple[str, str, str]]:
    """Return key, value and default of each parameter that differs from its default, as YAML writes them."""
    values, defaults = (
        pd.json_normalize(each.model_dump()).to_dict("records")[0] for each in (parameters, Parameters())
    )
    return [(key, _yaml(values[key]), _yaml(defaults[key])) for key in values if values[key] != defaults[key]]


def _yaml(value: Any) -> str:
    if value is None:
        return "empty"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute, without the name of a build (`2.13.0+cpu`)."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python} | {name: version(name).partition("+")[0] for name in PACKAGES}


def short_name(name: str) -> str:
    """Return a model's or data set's name without a path: of a package its name, of a folder its last part."""
    if "://" in name:
        return name.partition("://")[2].partition("/")[0]
    return Path(name).name if name.startswith(("/", ".", "~")) else name


def percent(share: float, digits: int = 0) -> str:
    """Return `0.2426` as `24 %`."""
    return f"{100 * share:.{digits}f} %"


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "\N{MINUS SIGN}")


def _signed(correlation: float) -> str:
    return f"{correlation:.2f}".replace("-", "\N{MINUS SIGN}")


def shown_curves(run: Run) -> pd.DataFrame:
    """Return the layers' mean ratios in the checkpoint that is shown."""
    table = run.table("measure/mixing")
    return table[table["checkpoint"] == shown_checkpoint(table)]


def shown_checkpoint(table: pd.DataFrame) -> str:
    """Return the captured checkpoint, or the one that was measured in its place."""
    measured = table["checkpoint"].unique().tolist()
    return CAPTURED_CHECKPOINT if CAPTURED_CHECKPOINT in measured else str(measured[0])


def most_and_least(curves: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the rows of the layers with the highest and the lowest mean of the preferred ratio."""
    rows = curves[curves["method"] == preferred_ratio(curves["method"].unique().tolist())]
    return rows.iloc[int(rows["mean"].argmax())], rows.iloc[int(rows["mean"].argmin())]


def headline(curves: pd.DataFrame) -> str:
    """Return the main result as one line, with as many digits as tell the two ratios apart and from 0."""
    most, least = most_and_least(curves)
    pairs = [(percent(most["mean"], digits), percent(least["mean"], digits)) for digits in (0, 1, 2)]
    high, low = next((pair for pair in pairs if pair[0] != pair[1] and float(pair[1].split()[0])), pairs[0])
    if most["layer"] == least["layer"]:
        return f"The one layer mixes tokens at a ratio of {high}"
    return f"Layer {most['layer']} mixes tokens most, at a ratio of {high}; layer {least['layer']} least, {low}"


def _lead(curves: pd.DataFrame) -> str:
    most, _ = most_and_least(curves)
    sentence = RATIOS[most["method"]].sentence.format(layer=most["layer"], share=percent(most["mean"]))
    return f"{sentence}, the highest of the layers' means."


def document_note(row: Mapping[str, Any]) -> str:
    """Return what the classifier, if any, says of a captured text, and how much of the text the model read.

    `row` has `tokens`, `whole_tokens`, `unknown_tokens` and, of a classified text, `predicted`, `probability` and
    `label_name` (None without a label).
    """
    notes = []
    if "predicted" in row:
        label = f"Labelled {_isolate(row['label_name'])}, classified" if row["label_name"] is not None else "Classified"
        notes.append(f"{label} as {_isolate(row['predicted'])} with a probability of {percent(row['probability'])}.")
    if row["tokens"] < row["whole_tokens"]:
        notes.append(f"Only {row['tokens']} of its {row['whole_tokens']} tokens were read (capture.max_length).")
    if row["unknown_tokens"]:
        notes.append(f"{row['unknown_tokens']} of its {row['tokens']} tokens are unknown to the model.")
    return " ".join(notes)


def _isolate(name: str) -> str:
    """Return a class's name so that letters written from right to left leave the sentence's order alone."""
    shown = visible(name, kept="")
    return shown if shown.isascii() else f"\N{FIRST STRONG ISOLATE}{shown}\N{POP DIRECTIONAL ISOLATE}"


def _classes(run: Run) -> list[str]:
    """Return the best and the worst told of more than two classes, by F1."""
    table = run.table("finetune/finetune_by_class")
    if len(table) == 2:
        return []
    f1 = table.dropna(subset="f1").sort_values("f1", kind="stable").set_index("label_name")["f1"]
    worst, best = (f"{_isolate(str(name))} (F1 {percent(f1[name])})" for name in (f1.index[0], f1.index[-1]))
    return [f"The classifier tells {best} best and {worst} worst."]


def _largest_change(run: Run) -> pd.Series | None:
    """Return the row of the layer whose preferred ratio fine-tuning changes most; None where one checkpoint exists."""
    table = run.table("measure/mixing")
    method = preferred_ratio(table["method"].unique().tolist())
    rows = table[(table["checkpoint"] == "difference") & (table["method"] == method)]
    return rows.loc[rows["mean"].abs().idxmax()] if len(rows) else None


def _controls(run: Run) -> list[str]:
    """Return the preferred ratio beside its controls, as means over the layers."""
    table, curves = run.table("measure/mixing_controls"), run.table("measure/mixing")
    checkpoint, method = shown_checkpoint(table), preferred_ratio(curves["method"].unique().tolist())
    ratio = curves[curves["method"] == method].groupby("checkpoint")["mean"].mean()
    rows = table[table["method"] == method]
    control = rows.groupby(["control", "checkpoint"])["mean"].mean()
    sentences = [
        f"With random weights the ratio would be {percent(control['random_weights'].iloc[0])}, and with the words in "
        f"random order {percent(control['shuffled_words', checkpoint])} (means over the layers).",
        f"With every value replaced by the mean of its own text's values it would be "
        f"{percent(control['text_mean_value', checkpoint])} instead of {percent(ratio[checkpoint])}: that mean removes "
        "which token gave a value and keeps what the text says as a whole.",
    ]
    largest = _largest_change(run)
    if largest is None:
        return sentences
    sentences.append(
        f"Fine-tuning changes the ratio by {_points(ratio['difference'])} percentage points, and with that mean in "
        f"place of the values by {_points(control['text_mean_value', 'difference'])} (means over the layers)."
    )
    of_layer = rows[(rows["control"] == "text_mean_value") & (rows["layer"] == largest["layer"])]
    left = of_layer[of_layer["checkpoint"] == "difference"].iloc[0]
    if pd.notna(left["below_low"]):
        sentences.append(
            f"In layer {left['layer']} the first change less the second has a 95 % interval of "
            f"{_points(left['below_low'])} to {_points(left['below_high'])} percentage points."
        )
    return sentences


def _derivatives(run: Run) -> list[str]:
    """Return whether derivatives change as the ratio does; nothing without gradient documents."""
    table, largest = run.table("measure/derivatives"), _largest_change(run)
    rows = table[(table["quantity"] == "level") & (table["checkpoint"] == "difference")]
    if largest is None or rows.empty:
        return []
    rows = rows[(rows["reference"] == "layer_input") & (rows["layer"] == largest["layer"])].set_index("method")
    changes = []
    for form, condition in DERIVATIVE_FORMS.items():
        row = rows.loc[form]
        verb = "rises" if row["ci_low"] > 0 else "falls" if row["ci_high"] < 0 else "shows no change"
        changes.append(f"{verb} {condition}")
    return [
        f"How strongly a token's output depends on the other tokens' inputs within layer {largest['layer']} (Jacobian "
        f"norms, {row['documents']:.0f} reviews) {', '.join(changes[:-1])}, and {changes[-1]}."
    ]


def _range(rows: pd.DataFrame) -> str:
    """Return the lowest and the highest mean of the layers, as `0.12 (layer 1) to 0.45 (layer 6)`."""
    ends = [rows.loc[rows["mean"].idxmin()], rows.loc[rows["mean"].idxmax()]]
    return " to ".join(dict.fromkeys(f"{_signed(row['mean'])} (layer {row['layer']})" for row in ends))


def _agreement(run: Run) -> str:
    """Return how far the preferred ratio agrees with derivatives; an empty text without gradient documents."""
    table = run.table("measure/derivatives")
    rows = table[(table["quantity"] == "agreement") & (table["reference"] == "layer_input")].dropna(subset="mean")
    if rows.empty:
        return ""
    method = preferred_ratio(rows["method"].unique().tolist())
    rows = rows[(rows["checkpoint"] == shown_checkpoint(rows)) & (rows["method"] == method)]
    label = in_text(RATIOS[method].mark.label)
    return f" The rank correlation of this one ({label}) with derivatives is {_range(rows)}." if len(rows) else ""


def _origins(run: Run, parameters: Parameters) -> list[str]:
    """Return where model and reviews come from; of a repository of the hub, at which commit."""
    commits = run.metrics("download")
    model, dataset = parameters.model, parameters.dataset
    sources = [("The model comes", model.name, model.revision, commits.get("model_commit"))]
    sources += [("The reviews come", dataset.name, dataset.revision, commits.get("dataset_commit"))]
    if model.base:
        sources.insert(1, ("The pretrained model comes", model.base, None, None))
    origins = []
    for what, name, revision, commit in sources:
        asked = f" ({revision})" if revision not in (None, commit) else ""
        origins.append(f"{what} from {name}" + (f" of the hub, commit {commit}{asked}." if commit else "."))
    return origins
