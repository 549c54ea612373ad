"""The page's words, for a whole run or for a few texts alone.

A sentence states one thing that no chart next to it shows. Every number is in a file under `reports/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from attnmix.core.names import CAPTURED_CHECKPOINT
from attnmix.core.store.results import Results
from attnmix.figures.labels import CHECKPOINTS, RATIO_LABELS
from attnmix.measures.ratios import preferred_ratio
from attnmix.page.arrays import visible

DERIVATIVE_FORMS = {
    "norm_of_sum": "when all other tokens move together",
    "norm_of_block": "when they move independently",
    "sum_of_norms": "when the norms of single tokens are added",
}
EDITS = ("text_mean", "corpus_mean", "other_class")
SHARE_WORDS = ((0.5, "mostly"), (0.1, "partly"), (-1.0, "to a small part"))
"""How the headline calls a class share of the squared length, from each bound on."""


class Subject(NamedTuple):
    """The model and data of a page; without a `dataset`, the page shows a few texts in an unchanged model."""

    model: str
    revision: str | None = None
    base: str | None = None
    """The pretrained model, where it is another than `model`."""
    dataset: str | None = None
    finetuned: bool = True
    changed: Sequence[tuple[str, str, str]] = ()
    """Key, value and default of each parameter that differs from its default."""
    origins: Sequence[str] = ()
    """A sentence on where each model and data set comes from."""
    left_out: str = ""
    """A sentence on what a small page leaves out."""
    selection: str = ""
    """A sentence on how the captured texts were chosen."""


def describe(subject: Subject, tokens: pd.DataFrame, run: Results) -> dict[str, Any]:
    """Return the page's words by their names in the template; `checkpoints` are labels, the captured one last."""
    (curves, differences), measure = run.mixing, run.metrics("measure")
    if subject.dataset is None:
        texts = tokens["document"].nunique()
        plural = "" if texts == 1 else "s"
        return {
            "checkpoints": dict(CHECKPOINTS) if len(differences) else {"pretrained": "The model as it is"},
            "facts": {f"text{plural}": str(texts), "tokens": str(len(tokens)), "layers": str(curves["layer"].max())},
            "measured": f"All numbers and maps are of the text{plural} below.",
            "intervals": plural and ", with 95% intervals over texts",
            "findings": _controls(run),
            "cautions": _cautions(subject, "Other texts have other numbers.", run),
            "computed_on": {"measures": measure["computed_on"]},
        }
    finetune, download = run.metrics("finetune"), run.metrics("download")
    evidence = [*class_evidence(run), *_classes(run), *_controls(run), *derivatives(run), *class_lens(run)]
    test = finetune["test"]
    low, high = percent(test["accuracy_ci_low"]), percent(test["accuracy_ci_high"])
    accuracy = f"The 95% interval of the classifier's test accuracy is {low} to {high}."
    return {
        "checkpoints": CHECKPOINTS,
        "facts": {
            "test accuracy": percent(test["accuracy"], 1),
            "majority baseline": percent(test["majority_accuracy"], 1),
            "training reviews": str(download["train"]),
            "test reviews": str(download["test"]),
            "reviews measured": str(measure["documents"]),
        },
        "measured": f"Ratios and controls are of the {measure['documents']} measured test reviews, derivatives of a "
        f"few of them, and maps of the captured texts, which are examples. {subject.selection}".strip(),
        "intervals": ", with 95% intervals over reviews",
        "findings": [accuracy, *evidence],
        "cautions": _cautions(subject, "Intervals are over reviews, for one fine-tuning seed.", run),
        "computed_on": {"fine-tuning": finetune["computed_on"], "measures": measure["computed_on"]},
    }


def percent(share: float, digits: int = 0) -> str:
    """Return `0.2426` as `24%`."""
    return f"{100 * share:.{digits}f}%"


def _signed(number: float, form: str = ".2f") -> str:
    """Return a number with a typographic minus, and none before a zero."""
    text = f"{number:{form}}"
    return text.replace("-", "\N{MINUS SIGN}" if float(text) else "")


def points(difference: float) -> str:
    """Return a difference of shares in percentage points, with its sign."""
    return _signed(100 * difference, "+.1f")


def shown_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the preferred ratio in the captured checkpoint, or in the one measured in its place."""
    names = table["checkpoint"].unique().tolist()
    checkpoint = CAPTURED_CHECKPOINT if CAPTURED_CHECKPOINT in names else names[0]
    return table[(table["checkpoint"] == checkpoint) & (table["method"] == preferred(table))]


def preferred(table: pd.DataFrame) -> str:
    """Return the preferred one of a table's ratios."""
    return preferred_ratio(table["method"].unique().tolist())


def most_and_least(curves: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the layers' rows with the highest and the lowest mean of the preferred ratio, in the shown checkpoint."""
    rows = shown_rows(curves)
    return rows.iloc[int(rows["mean"].argmax())], rows.iloc[int(rows["mean"].argmin())]


def class_shares(run: Results) -> pd.DataFrame:
    """Return the share of the predicted class in what other tokens give, by layer; no rows without classes.

    The column `quantity` is `before`, `after`, `difference` or `permuted`: below it are 95 of 100 draws after which
    classes are shuffled over the texts.
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
    """Return whether the ratio changed, whether the class is in what tokens give each other, and whether it needs it.

    Each is said with its number, or that this run does not show it; nothing without fine-tuning or classes.
    """
    shares = class_shares(run)
    if run.mixing[1].empty or shares.empty:
        return []
    change = _overall_change(run)
    verb = "rises" if change["ci_low"] > 0 else "falls" if change["ci_high"] < 0 else "does not change measurably"
    ratio = (
        f"The mixing ratio {verb}: from {percent(change['before'], 1)} to {percent(change['after'], 1)} over all "
        f"layers (95% interval of the change {points(change['ci_low'])} to {points(change['ci_high'])} percentage "
        "points). It is others / (others + own), the lengths of what other tokens give a token and of its own part."
    )
    rows = shares.set_index(["quantity", "layer"])
    top: Any = rows.loc["after"]["mean"].idxmax()
    before, after, difference, chance = (
        rows.loc[(quantity, top)] for quantity in ("before", "after", "difference", "permuted")
    )
    shared = after["ci_low"] > chance["mean"] and difference["ci_low"] > 0
    much = next(word for bound, word in SHARE_WORDS if after["mean"] >= bound)
    verdict = (
        f"After fine-tuning, what tokens give each other in layer {top} is {much} the predicted class."
        if shared
        else "What tokens give each other hardly tells the predicted class."
    )
    part = (
        f"In layer {top}, {percent(max(after['mean'], 0))} of what other tokens give, by squared length, is common to "
        f"the texts of a predicted class; it was {percent(max(before['mean'], 0))} before fine-tuning, and where "
        f"classes are shuffled over the texts it stays below {percent(max(chance['mean'], 0))} in 95 of 100 draws."
    )
    return [verdict, ratio, part, *_needed_values(run), _shared_value(run, int(top))]


def _overall_change(run: Results) -> pd.Series:
    """Return `mean`, `ci_low`, `ci_high` of the change of the preferred ratio over all layers, `before` and `after`."""
    table = run.table("measure/mixing_weighted")
    rows = table[(table["weight"] == "token") & (table["tokens_of"] == "all") & (table["layer"] == "all")]
    rows = rows[rows["method"] == preferred(rows)].set_index("checkpoint")
    means = {"before": rows["mean"]["pretrained"], "after": rows["mean"]["finetuned"]}
    change = {name: rows[name]["difference"] for name in ("mean", "ci_low", "ci_high")}
    return pd.Series(change | means)


def _needed_values(run: Results) -> list[str]:
    """Return what the class needs of the values; nothing where no text could be given those of another class."""
    table = run.table("faithfulness/class_use")
    kept = table[table["quantity"] == "class_kept"].pivot(index="layer", columns="group", values="mean")
    if not set(EDITS) <= set(kept):
        return []
    first, predicted = len(kept) // 2 + 1, run.table("faithfulness/margins")["predicted"]
    constant = percent(predicted.value_counts(normalize=True).max())
    text, corpus, other = (percent(float(kept[name][first])) for name in EDITS)
    return [
        f"Does it matter which token gives? One and the same answer for every text would keep {constant} of their "
        f"predicted classes. With every value vector from layer {first} on replaced by its text's mean, {text} are "
        f"kept; by the mean of other texts, {corpus}; by that of texts of the other class, {other}."
    ]


def class_lens(run: Results) -> list[str]:
    """Return what the classifier's head reads off tokens that it was not trained to read."""
    table = run.table("faithfulness/class_use")
    lens = table[(table["quantity"] == "lens_agreement") & (table["group"] == "others")]
    if lens.empty:
        return []
    return [
        "Put on the last vectors of tokens that it does not read, the classifier's head names the text's class on "
        f"{percent(lens.set_index('layer')['mean'].sort_index().iloc[-1])} of them. That says how alike tokens are, "
        "not what they have learned: models trained on permuted labels, in the project's study, do so too."
    ]


def _shared_value(run: Results, layer: int) -> str:
    """Return what the ratio cannot say, by its control of a layer: which token informs which."""
    controls = run.table("measure/mixing_controls")
    rows = controls[(controls["control"] == "text_mean_value") & (controls["layer"] == layer)]
    control = shown_rows(rows)["mean"].iloc[0]
    ratio = shown_rows(run.mixing[0]).set_index("layer")["mean"][layer]
    return (
        f"The ratio does not say which token informs which: in layer {layer} it is {percent(ratio)}, and "
        f"{percent(control)} with one value shared by all tokens of a text."
    )


def document_note(row: Mapping[str, Any]) -> str:
    """Return what the classifier, if any, says of a captured text, and how much of the text the model read.

    `row` has `label_name` (None without one), `tokens`, `whole_tokens`, `unknown_tokens` and, of a classified text,
    `predicted` and `probability`.
    """
    notes = []
    if "predicted" in row:
        name = row["label_name"]
        label = f"Labelled {_isolate(name)}, classified" if name is not None else "Classified"
        notes.append(f"{label} as {_isolate(row['predicted'])} with a probability of {percent(row['probability'])}.")
    if row["tokens"] < row["whole_tokens"]:
        notes.append(f"Only {row['tokens']} of its {row['whole_tokens']} tokens were read (capture.max_length).")
    if row["unknown_tokens"]:
        notes.append(f"{row['unknown_tokens']} of its {row['tokens']} tokens are unknown to the model.")
    return " ".join(notes)


def _isolate(name: str) -> str:
    """Return a class's name so that letters written from right to left leave the sentence's order alone."""
    text = visible(name, kept="")
    return text if text.isascii() else f"\N{FIRST STRONG ISOLATE}{text}\N{POP DIRECTIONAL ISOLATE}"


def _classes(run: Results) -> list[str]:
    """Return the best and the worst told of more than two classes, by F1."""
    table = run.table("finetune/finetune_by_class")
    if len(table) == 2:
        return []
    f1 = table.dropna(subset="f1").sort_values("f1", kind="stable").set_index("label_name")["f1"]
    worst, best = (f"{_isolate(name)} (F1 {percent(f1[name])})" for name in (f1.index[0], f1.index[-1]))
    return [f"The classifier tells {best} best and {worst} worst."]


def _largest_change(run: Results) -> pd.Series | None:
    """Return the row of the layer whose preferred ratio fine-tuning changes most; None where one checkpoint exists."""
    differences = run.mixing[1]
    rows = differences[differences["method"] == preferred(differences)] if len(differences) else differences
    return rows.iloc[int(rows["mean"].abs().argmax())] if len(rows) else None


def _controls(run: Results) -> list[str]:
    """Return the preferred ratio and its controls, as means over the layers, and its largest change."""
    table, (curves, differences) = run.table("measure/mixing_controls"), run.mixing
    ratios = shown_rows(curves)
    checkpoint, method = ratios[["checkpoint", "method"]].iloc[0]
    rows = table[table["method"] == method]
    control = rows.groupby(["control", "checkpoint"])["mean"].mean()
    sentences = [
        f"With random weights the ratio would be {percent(control['random_weights'].iloc[0])}, and with the words in "
        f"random order {percent(control['shuffled_words', checkpoint])} (means over the layers).",
        f"With every value replaced by the mean of its own text's values it would be "
        f"{percent(control['text_mean_value', checkpoint])} instead of {percent(ratios['mean'].mean())}. That mean "
        "removes which token gave a value and keeps what the text says as a whole.",
    ]
    largest = _largest_change(run)
    if largest is None:
        return sentences
    interval = f"{points(largest['simultaneous_low'])} to {points(largest['simultaneous_high'])}"
    bounds = "" if pd.isna(largest["simultaneous_low"]) else f" (95% interval for all layers at once: {interval})"
    change = differences.loc[differences["method"] == method, "mean"].mean()
    sentences += [
        f"The largest change of the ratio by fine-tuning is {points(largest['mean'])} percentage points, in layer "
        f"{largest['layer']}{bounds}.",
        f"Over all layers fine-tuning changes the ratio by {points(change)} percentage points, and with that mean in "
        f"place of the values by {points(control['text_mean_value', 'difference'])}.",
    ]
    in_layer = rows[(rows["control"] == "text_mean_value") & (rows["layer"] == largest["layer"])]
    contrast = in_layer[in_layer["checkpoint"] == "difference"].iloc[0]
    if pd.notna(contrast["below_low"]):
        sentences.append(
            f"In layer {contrast['layer']} the first change less the second has a 95% interval of "
            f"{points(contrast['below_low'])} to {points(contrast['below_high'])} percentage points."
        )
    return sentences


def derivatives(run: Results) -> list[str]:
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
        changes.append(f"{verb} {condition} ({points(row['mean'])} percentage points)")
    return [
        f"How strongly a token's output depends on the other tokens' inputs within layer {largest['layer']} (Jacobian "
        f"norms, {row['documents']:.0f} reviews) {', '.join(changes[:-1])}, and {changes[-1]}."
    ]


def map_note(run: Results) -> str:
    """Return why there is no UMAP of the captured texts; an empty text where there could be one."""
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
    """Return what must not be read into the findings; `intervals` says what their intervals are over."""
    base = f"{subject.base}, which it need not come from" if subject.base else "the same model, so no change is one"
    no_training = (
        f"Nothing was fine-tuned here (finetune.epochs: 0): fine-tuned stands for {subject.model} as it is, pretrained "
        f"for {base}."
    )
    neighbourhoods = (
        "A map shows neighbourhoods, and not all of them. Distances between clusters, their sizes and densities mean "
        "little, and another seed gives another map."
    )
    components = "The map shows two principal components: vectors that are near on it can be far apart in the others."
    return [
        *([] if subject.finetuned else [no_training]),
        "A ratio is one layer's, not that of all layers up to it, which the rollouts show (under Text).",
        "A ratio of norms is no causal effect." + _agreement(run),
        intervals,
        components if run.layouts == ["pca"] else neighbourhoods,
    ]


def _agreement(run: Results) -> str:
    """Return how far the preferred ratio agrees with derivatives; an empty text without gradient documents."""
    table = run.table("measure/derivatives")
    rows = table[(table["quantity"] == "agreement") & (table["reference"] == "layer_input")].dropna(subset="mean")
    if rows.empty:
        return ""
    ends = most_and_least(rows)[::-1]
    means = " to ".join(dict.fromkeys(f"{_signed(row['mean'])} (layer {row['layer']})" for row in ends))
    return f" The rank correlation of “{RATIO_LABELS[ends[0]['method']]}” with derivatives is {means}."
