"""The sentences of the page, for a pipeline run or for texts measured with the API.

Each sentence states one finding that is not visible in a chart. All numbers are in files under `reports/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import pandas as pd

from attnmix.core.draw import TYPICAL_TOKENS
from attnmix.core.names import CAPTURED_CHECKPOINT
from attnmix.core.statistics import MIN_INTERVAL_DOCUMENTS, MIN_SIMULTANEOUS, Verdict, verdict
from attnmix.core.store.results import Results
from attnmix.figures.labels import CHECKPOINTS, RANDOM_MODEL, RATIO_LABELS
from attnmix.measures.matrices import ROLLOUTS
from attnmix.measures.ratios import preferred_ratio
from attnmix.page.arrays import visible
from attnmix.page.verdicts import VERBS, counted, interval_text, points, signed, why_no_verdict
from attnmix.page.wording import RUN_WORDING, model_wording_of, wording_of

DERIVATIVE_FORMS = {
    "norm_of_sum": "when all other tokens move together",
    "norm_of_block": "when they move independently",
    "sum_of_norms": "when the norms of single tokens are added",
}
EDITS = ("text_mean", "corpus_mean", "other_class")
VALUE_CONTROL = "corpus_value"
SHARE_WORDS = ((0.5, "mostly"), (0.1, "partly"), (-1.0, "to a small part"))
"""Words for a class share of the squared length, by lower bound."""


@dataclass(frozen=True)
class Subject:
    """The model and data of a page; without a `dataset`, the page shows a few texts in an unchanged model.

    All fields except the first are keyword-only, because several sentences could be confused.
    """

    model: str
    _: KW_ONLY
    revision: str | None = None
    base: str | None = None
    """The pretrained model, if different from `model`."""
    dataset: str | None = None
    finetuned: bool = True
    synthetic: bool = False
    """True if a program wrote the texts, according to the dataset card."""
    changed: Sequence[tuple[str, str, str]] = ()
    """Key, value and default of each changed parameter."""
    origins: Sequence[str] = ()
    """Sentences on the origin of each model and data set."""
    left_out: str = ""
    """A sentence on data omitted from a small page."""
    selection: str = ""
    """A complete sentence on the selection of the captured texts."""


def describe(subject: Subject, tokens: pd.DataFrame, run: Results) -> dict[str, Any]:
    """Return the page's text by template variable; `checkpoints` has labels, with the captured checkpoint last."""
    (curves, differences), measure = run.mixing, run.metrics("measure")
    if subject.dataset is None:
        texts = tokens["document"].nunique()
        plural = "" if texts == 1 else "s"
        return {
            "checkpoints": dict(model_wording_of(run).labels)
            if len(differences)
            else {"pretrained": "The model as it is"},
            "facts": {f"text{plural}": str(texts), "tokens": str(len(tokens)), "layers": str(curves["layer"].max())},
            "measured": f"All numbers and maps are of the text{plural} below.",
            "findings": _controls(run),
            "cautions": _cautions(subject, "Other texts have other numbers.", run),
            "computed_on": {"measures": measure["computed_on"]},
        }
    finetune, download = run.metrics("finetune"), run.metrics("download")
    evidence = [*class_evidence(run), *_classes(run), *_controls(run), *derivatives(run), *class_lens(run)]
    test = finetune["test"]
    kind = "synthetic " if subject.synthetic else ""
    low, high = percent(test["accuracy_ci_low"]), percent(test["accuracy_ci_high"])
    accuracy = f"The 95% interval of the classifier's test accuracy is {low} to {high}."
    return {
        "checkpoints": CHECKPOINTS,
        "facts": {
            "test accuracy": percent(test["accuracy"], 1),
            "majority baseline": percent(test["majority_accuracy"], 1),
            f"{kind}training reviews": str(download["train"]),
            f"{kind}test reviews": str(download["test"]),
            "reviews measured": str(measure["documents"]),
        },
        "measured": f"{_measured(run, measure['documents'])} {_selection(subject, run)}".strip(),
        "findings": [accuracy, *evidence],
        "cautions": _cautions(subject, "Intervals are over reviews, for one fine-tuning seed.", run),
        "computed_on": {"fine-tuning": finetune["computed_on"], "measures": measure["computed_on"]},
    }


def _measured(run: Results, documents: int) -> str:
    """Return a sentence on the sample of each kind of measure in a pipeline run."""
    noun = wording_of(run).texts
    means = f"Ratios and controls are means over the {documents} measured test {noun}, weighted by tokens"
    others = []
    for name, table in (("exact parts", "measure/parts"), ("derivatives", "measure/derivatives")):
        rows = run.table(table)
        if len(rows):
            texts = rows["documents"].max()
            others.append(f"{name} over {texts:.0f} of them")
    if others:
        means = f"{', '.join([means, *others[:-1]])}, and {others[-1]}"
    return f"{means}. The maps show the captured texts, which are examples."


def _selection(subject: Subject, run: Results) -> str:
    """Return the selection rule of the captured texts, with the texts that exceed its length limit."""
    if not subject.selection:
        return ""
    texts = run.documents
    longer = texts[texts["tokens"] > TYPICAL_TOKENS]
    if longer.empty:
        return subject.selection
    names = [f"{row['document']} ({row['tokens']} tokens)" for _, row in longer.iterrows()]
    return f"{subject.selection} No such text was that short in the case of {' and '.join(names)}."


def percent(share: float, digits: int = 0) -> str:
    """Return `0.2426` as `24%`."""
    return f"{100 * share:.{digits}f}%"


def shown_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the preferred ratio in the captured checkpoint, or in the first one if it is missing."""
    names = table["checkpoint"].unique().tolist()
    checkpoint = CAPTURED_CHECKPOINT if CAPTURED_CHECKPOINT in names else names[0]
    is_of_checkpoint = table["checkpoint"] == checkpoint
    is_preferred = table["method"] == preferred(table)
    return table[is_of_checkpoint & is_preferred]


def preferred(table: pd.DataFrame) -> str:
    """Return the preferred ratio of a table."""
    return preferred_ratio(table["method"].unique().tolist())


def most_and_least(curves: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the rows of the layers with the highest and lowest mean of the preferred ratio (see `shown_rows`)."""
    rows = shown_rows(curves)
    highest = int(rows["mean"].argmax())
    lowest = int(rows["mean"].argmin())
    return rows.iloc[highest], rows.iloc[lowest]


def class_shares(run: Results) -> pd.DataFrame:
    """Return the share of the predicted class in other tokens' contributions, by layer; no rows without classes.

    The column `quantity` is `before`, `after`, `difference` or `permuted`, the 95th percentile for randomly permuted
    classes.
    """
    geometry = run.table("measure/geometry")
    chosen = {
        "before": ("pretrained", "share_class"),
        "after": ("finetuned", "share_class"),
        "difference": ("difference", "share_class"),
        "permuted": ("finetuned", "share_class_permuted"),
    }
    tables = []
    for quantity, (checkpoint, measure) in chosen.items():
        is_chosen = (geometry["checkpoint"] == checkpoint) & (geometry["measure"] == measure)
        tables.append(geometry[is_chosen].assign(quantity=quantity))
    return pd.concat(tables)


def class_evidence(run: Results) -> list[str]:
    """Return findings on the change of the ratio, the class share, and how predictions depend on the values.

    Each finding has its value and interval, or is inconclusive; the list is empty without fine-tuning or classes.
    """
    shares = class_shares(run)
    if run.mixing[1].empty or shares.empty:
        return []
    rows = shares.set_index(["quantity", "layer"])
    after_by_layer: Any = rows.loc["after"]
    is_enough = after_by_layer["documents"].max() >= MIN_SIMULTANEOUS
    # The layer with the largest share is only meaningful with enough texts; otherwise, use the last layer.
    layer = int(after_by_layer["mean"].idxmax() if is_enough else after_by_layer.index.max())
    by_quantity = {quantity: rows.loc[(quantity, layer)] for quantity in ("before", "after", "difference", "permuted")}
    return [
        _class_verdict(by_quantity, layer, run),
        _ratio_change(run),
        _class_share(by_quantity, layer, run),
        *_needed_values(run),
    ]


def _class_verdict(by_quantity: Mapping[str, Any], layer: int, run: Results) -> str:
    """Return whether contributions between tokens in a layer are common to texts of one predicted class."""
    common = "is common to texts of one predicted class, but not to all texts,"
    after, difference = by_quantity["after"], by_quantity["difference"]
    noun = wording_of(run).texts
    documents = after["documents"]
    change = verdict(difference["ci_low"], difference["ci_high"], documents)
    if change is Verdict.TOO_FEW_TEXTS:
        reason = why_no_verdict(difference["ci_low"], difference["ci_high"], documents, noun)
        return f"Whether what tokens give each other {common} is not known: {reason}."
    if change is Verdict.HIGHER and after["ci_low"] > by_quantity["permuted"]["mean"]:
        much = next(word for bound, word in SHARE_WORDS if after["mean"] >= bound)
        where = f"what tokens give each other in layer {layer}"
        return f"After fine-tuning, {where} is {much} common to texts of one predicted class, but not to all texts."
    return (
        f"Whether what tokens give each other {common} is inconclusive: the interval of the class's share, or of the "
        "share's change, does not exclude chance."
    )


def _ratio_change(run: Results) -> str:
    """Return the change of the preferred ratio over all layers, with its interval."""
    change = overall_change(run)
    noun = wording_of(run).texts
    found = verdict(change["ci_low"], change["ci_high"], change["documents"])
    between = f"{percent(change['before'], 1)} before fine-tuning and {percent(change['after'], 1)} after it"
    interval = interval_text(change["ci_low"], change["ci_high"], change["documents"], noun)
    means = f"over all layers it is {between}, a change of {points(change['mean'])} percentage points ({interval})"
    definition = "The ratio is others / (others + own), with the lengths of the other tokens' and the own contribution."
    if found in (Verdict.HIGHER, Verdict.LOWER):
        return f"The mixing ratio {VERBS[found]} by fine-tuning: {means}. {definition}"
    reason = why_no_verdict(change["ci_low"], change["ci_high"], change["documents"], noun)
    return f"The change of the mixing ratio by fine-tuning {VERBS[found]}: {means}, and {reason}. {definition}"


def _class_share(by_quantity: Mapping[str, Any], layer: int, run: Results) -> str:
    """Return the share of the predicted class in other tokens' contributions to a layer: before, after, by chance."""
    before, after, chance = (by_quantity[name] for name in ("before", "after", "permuted"))
    number = counted(after["documents"], wording_of(run).texts)
    interval = f"95% interval {percent(max(after['ci_low'], 0))} to {percent(max(after['ci_high'], 0))}, {number}"
    extent = number if after["documents"] < MIN_INTERVAL_DOCUMENTS else interval
    was = f"{percent(max(before['mean'], 0))} before fine-tuning"
    if verdict(before["ci_low"], before["ci_high"], before["documents"]) is Verdict.INCONCLUSIVE:
        was = f"{was}; whether it was above 0 is inconclusive, as the interval includes 0"
    return (
        f"In layer {layer}, {percent(max(after['mean'], 0))} of the squared length of the contributions of other "
        f"tokens is common to the texts of a predicted class ({extent}). It was {was}. If "
        f"classes are shuffled over the texts, it is less than {percent(max(chance['mean'], 0))} in 95 of 100 draws."
    )


def overall_change(run: Results) -> pd.Series:
    """Return the change of the preferred ratio over all layers.

    It has `mean`, `ci_low`, `ci_high` and `documents`, and the ratios `before` and `after`.
    """
    table = run.table("measure/mixing_weighted")
    is_by_token = (table["weight"] == "token") & (table["tokens_of"] == "all")
    rows = table[is_by_token & (table["layer"] == "all")]
    rows = rows[rows["method"] == preferred(rows)].set_index("checkpoint")
    change = {name: rows[name]["difference"] for name in ("mean", "ci_low", "ci_high", "documents")}
    change["before"] = rows["mean"]["pretrained"]
    change["after"] = rows["mean"]["finetuned"]
    return pd.Series(change)


def _needed_values(run: Results) -> list[str]:
    """Return how predictions depend on the values; an empty list if swaps between classes were not possible."""
    table = run.table("faithfulness/class_use")
    kept = table[table["quantity"] == "class_kept"].pivot(index="layer", columns="group", values="mean")
    if not set(EDITS) <= set(kept):
        return []
    first, predicted = len(kept) // 2 + 1, run.table("faithfulness/margins")["predicted"]
    constant = percent(predicted.value_counts(normalize=True).max())
    text, corpus, other = (percent(float(kept[name][first])) for name in EDITS)
    return [
        "Replacing value vectors tests whether the prediction depends on which token gives them. One and the same "
        f"answer for every text would keep {constant} of their predicted classes. If every value vector from layer "
        f"{first} on is replaced by the mean of its own text's values, {text} are kept. If it is replaced by that of "
        f"other texts' values, {corpus} are kept, and if by that of texts of the other class, {other}."
    ]


def class_lens(run: Results) -> list[str]:
    """Return the agreement of the classifier's head on tokens that it was not trained to read."""
    table = run.table("faithfulness/class_use")
    lens = table[(table["quantity"] == "lens_agreement") & (table["group"] == "others")]
    if lens.empty:
        return []
    last_layer = lens.sort_values("layer").iloc[-1]
    return [
        "Applied to the last vectors of tokens that it does not read, the classifier's head names the predicted class "
        f"on {percent(last_layer['mean'])} of them. This shows the similarity of tokens, not learning."
    ]


def document_note(row: Mapping[str, Any], truncation: str = RUN_WORDING.truncation, lacks_details: bool = False) -> str:
    """Return the prediction for a captured text, if any, and the number of tokens that the model read.

    Args:
        row: `label_name` (None without one), `tokens`, `whole_tokens`, `unknown_tokens` and, of a classified text,
            `predicted` and `probability`.
        truncation: The maximum length of a text; by default the parameter of a run.
        lacks_details: True for a text without token-level own shares and exact parts.
    """
    notes = []
    if "predicted" in row:
        name = row["label_name"]
        label = f"is labelled {_isolate(name)} and" if name is not None else "is"
        probability = percent(row["probability"])
        notes.append(
            f"The text {label} classified as {_isolate(row['predicted'])} with a probability of {probability}."
        )
    if row["tokens"] < row["whole_tokens"]:
        notes.append(f"Only {row['tokens']} of its {row['whole_tokens']} tokens were read ({truncation}).")
    if row["unknown_tokens"]:
        notes.append(f"{row['unknown_tokens']} of its {row['tokens']} tokens are unknown to the model.")
    if lacks_details:
        notes.append("Own shares by exchange and exact parts were not computed for this text; their cells are empty.")
    return " ".join(notes)


def details_note(detailed: Sequence[str], documents: int) -> str:
    """Return which of the page's `documents` have token-level own shares; an empty string if all have them."""
    if not detailed:
        return ""
    names = ", ".join(visible(name, kept="") for name in detailed)
    return (
        f"Own shares by exchange of single tokens and exact parts were computed for {len(detailed)} of {documents} "
        f"texts: {names}. In other texts these cells are empty, because each token needs a forward pass. In Python, "
        "attnmix.measure or compare computes them."
    )


def _isolate(name: str) -> str:
    """Return a class name in Unicode isolates, because right-to-left letters would reorder the sentence."""
    text = visible(name, kept="")
    if text.isascii():
        return text
    return f"\N{FIRST STRONG ISOLATE}{text}\N{POP DIRECTIONAL ISOLATE}"


def _classes(run: Results) -> list[str]:
    """Return the classes with the best and the worst F1, for more than two classes and enough test texts."""
    table = run.table("finetune/finetune_by_class")
    if len(table) == 2 or run.metrics("download")["test"] < MIN_SIMULTANEOUS:
        return []
    noun = wording_of(run).texts
    ranked = table.dropna(subset="f1").sort_values("f1", kind="stable")
    named = [f"{_isolate(row['label_name'])} (F1 {percent(row['f1'])})" for _, row in ranked.iterrows()]
    return [f"Of the classes, the classifier recognises {named[-1]} best and {named[0]} worst in the test {noun}."]


def _changes(run: Results) -> pd.DataFrame:
    """Return the changes of the preferred ratio by layer; no rows for a single checkpoint."""
    _, differences = run.mixing
    if differences.empty:
        return differences
    return differences[differences["method"] == preferred(differences)]


def _largest_change(run: Results) -> pd.Series | None:
    """Return the row with the largest change of the preferred ratio; None without changes or with too few texts."""
    rows = _changes(run)
    if rows.empty or rows["documents"].max() < MIN_SIMULTANEOUS:
        return None
    largest = int(rows["mean"].abs().argmax())
    return rows.iloc[largest]


def _controls(run: Results) -> list[str]:
    """Return sentences on the preferred ratio and its controls, averaged over layers, and on its largest change."""
    table, curves = run.table("measure/mixing_controls"), run.mixing[0]
    ratios = shown_rows(curves)
    checkpoint, method = ratios[["checkpoint", "method"]].iloc[0]
    rows = table[table["method"] == method].dropna(subset="mean")
    control = rows.groupby(["control", "checkpoint"])["mean"].mean().to_dict()
    changed_inputs = {
        ("shuffled_words", checkpoint): "the words in random order",
        ("random_weights", RANDOM_MODEL): "random weights",
    }
    clauses = [f"with {what} {percent(control[key])}" for key, what in changed_inputs.items() if key in control]
    sentences = []
    if clauses:
        ratio = percent(ratios["mean"].mean())
        sentences.append(f"Averaged over layers, the mixing ratio is {ratio}, {' and '.join(clauses)}.")
    if (VALUE_CONTROL, checkpoint) in control:
        sentences.append(
            f"With every value replaced by the mean value of such tokens in other texts it would be "
            f"{percent(control[VALUE_CONTROL, checkpoint])}. This removes the content of the text from the values and "
            "keeps its attention weights."
        )
    changes = _changes(run)
    if changes.empty:
        return sentences
    change = model_wording_of(run).change
    over_layers = f"Over all layers {change} changes the ratio by {points(changes['mean'].mean())} percentage points."
    if (VALUE_CONTROL, "difference") in control:
        over_layers += (
            f" With the values replaced, {change} changes it by {points(control[VALUE_CONTROL, 'difference'])}."
        )
    return [*sentences, _layer_change(run), over_layers, *_change_beside_control(run, rows)]


def _layer_change(run: Results) -> str:
    """Return the largest change of the preferred ratio in a layer, or the reason for its absence."""
    noun = wording_of(run).texts
    largest = _largest_change(run)
    if largest is None:
        number = counted(_changes(run)["documents"].max(), noun)
        change = model_wording_of(run).change
        return (
            f"Which layer {change} changes most is not known: {number} are too few for a conclusion, which needs "
            f"{MIN_SIMULTANEOUS} or more."
        )
    ends = (largest["simultaneous_low"], largest["simultaneous_high"], largest["documents"], noun)
    interval = interval_text(*ends, kind="95% interval for all layers at once")
    sentence = (
        f"The largest change of the ratio {model_wording_of(run).by_change} is {points(largest['mean'])} percentage "
        "points, in layer "
        f"{largest['layer']} ({interval})"
    )
    reason = why_no_verdict(*ends)
    return f"{sentence}; it is inconclusive, as {reason}." if reason else f"{sentence}."


def _change_beside_control(run: Results, controls: pd.DataFrame) -> list[str]:
    """Return the change of the ratio minus the change of its control, in the layer of the largest change."""
    largest = _largest_change(run)
    if largest is None:
        return []
    is_contrast = (controls["control"] == VALUE_CONTROL) & (controls["checkpoint"] == "difference")
    contrasts = controls[is_contrast & (controls["layer"] == largest["layer"])]
    if contrasts.empty or contrasts["ratio_minus_control_low"].isna().any():
        return []
    contrast = contrasts.iloc[0]
    ends = (
        contrast["ratio_minus_control_low"],
        contrast["ratio_minus_control_high"],
        contrast["documents"],
        wording_of(run).texts,
    )
    reason = why_no_verdict(*ends)
    return [
        f"In layer {contrast['layer']}, the change of the ratio minus its change with the values of other texts is "
        f"{points(contrast['ratio_minus_control'])} percentage points ({interval_text(*ends)})"
        f"{f'; it is inconclusive, as {reason}' if reason else ''}."
    ]


def derivatives(run: Results) -> list[str]:
    """Return the changes of derivatives in the layer of the largest change of the ratio; empty without derivatives."""
    table, changes = run.table("measure/derivatives"), _changes(run)
    rows = table[(table["quantity"] == "level") & (table["checkpoint"] == "difference")]
    if changes.empty or rows.empty:
        return []
    largest = _largest_change(run)
    layer = changes["layer"].max() if largest is None else largest["layer"]
    rows = rows[(rows["reference"] == "layer_input") & (rows["layer"] == layer)].set_index("method")
    levels = [(condition, rows.loc[form]) for form, condition in DERIVATIVE_FORMS.items()]
    noun = wording_of(run).texts
    dependence = f"the dependence of a token's output on the other tokens' inputs within layer {layer} (Jacobian norms)"
    documents = rows["documents"].max()
    if documents < MIN_SIMULTANEOUS:
        clauses = [f"by {points(row['mean'])} percentage points {condition}" for condition, row in levels]
        sentence = f"By fine-tuning, {dependence} changes {', '.join(clauses[:-1])}, and {clauses[-1]}."
        return [f"{sentence} {_sentence(why_no_verdict(np.nan, np.nan, documents, noun))}"]
    clauses = []
    for condition, row in levels:
        ends = (row["ci_low"], row["ci_high"], row["documents"])
        numbers = f"{points(row['mean'])} percentage points, {interval_text(*ends, noun)}"
        clauses.append(f"{VERBS[verdict(*ends)]} {condition} ({numbers})")
    return [f"By fine-tuning, {dependence} {', '.join(clauses[:-1])}, and {clauses[-1]}."]


def _sentence(text: str) -> str:
    """Return a text with an upper-case first letter and a full stop."""
    first = text[0].upper()
    return f"{first}{text[1:]}."


def map_note(run: Results) -> str:
    """Return why UMAP was not computed for the captured texts; an empty string if it could be computed."""
    layout = run.layouts[0]
    table = run.map(layout)
    tokens = len(table[["document", "position"]].drop_duplicates())
    if tokens >= run.min_umap_tokens:
        return ""
    counted = "1 token is" if tokens == 1 else f"{tokens} tokens are"
    return (
        f"There is no UMAP here: it is made of {run.min_umap_tokens} tokens or more, and {counted} on this map. The "
        "map shows the two principal components of their vectors (PCA)."
    )


def _cautions(subject: Subject, intervals: str, run: Results) -> list[str]:
    """Return limitations of the findings; `intervals` is a sentence on the scope of their intervals."""
    cautions = []
    if not subject.finetuned:
        base = f"{subject.base}, which it need not come from" if subject.base else "the same model, so no change is one"
        cautions.append(
            f"No model was fine-tuned (finetune.epochs: 0): fine-tuned denotes {subject.model} without changes, "
            f"pretrained denotes {base}."
        )
    one_layer = "A mixing ratio describes one layer, not the accumulated mixing since the input."
    if _has_rollouts(run):
        one_layer += " A rollout, which can be chosen under Share, describes all layers up to the chosen layer."
    cautions.append(one_layer)
    cautions.append("A ratio of norms is not a causal effect." + _agreement(run))
    cautions.append(intervals)
    if subject.synthetic:
        noun = wording_of(run).texts
        cautions.append(f"According to the dataset card, a program wrote the {noun}. Real ones can have other results.")
    if run.layouts != ["pca"]:
        cautions.append(
            "A map shows some of the neighbourhoods. On a UMAP map, distances between clusters, their sizes and "
            "densities are not meaningful, and another seed yields another map."
        )
    if "pca" in run.layouts:
        cautions.append(
            "A PCA map shows two principal components: vectors that are near on it can be far apart in the others."
        )
    return cautions


def _has_rollouts(run: Results) -> bool:
    for document in run.tokens["document"].unique():
        for checkpoint in run.mixing[0]["checkpoint"].unique():
            if any(name in ROLLOUTS for name in run.matrices(checkpoint, document)):
                return True
    return False


def _agreement(run: Results) -> str:
    """Return the rank correlation of the preferred ratio with derivatives; an empty string without derivatives."""
    table = run.table("measure/derivatives")
    is_agreement = (table["quantity"] == "agreement") & (table["reference"] == "layer_input")
    rows = table[is_agreement].dropna(subset="mean")
    if rows.empty:
        return ""
    most, least = most_and_least(rows)
    correlations = []
    for row in (least, most):
        text = f"{signed(row['mean'])} (layer {row['layer']})"
        if text not in correlations:
            correlations.append(text)
    means = " to ".join(correlations)
    number = counted(rows["documents"].max(), wording_of(run).texts)
    ratio = RATIO_LABELS[least["method"]]
    model = CHECKPOINTS[least["checkpoint"]].lower()
    return f" In {number}, the rank correlation of “{ratio}” with derivatives in the {model} model is {means}."
