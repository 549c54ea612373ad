"""The sentences of the page, for a pipeline run or for texts measured with the API.

Each sentence states one finding that is not visible in a chart. A pipeline run also writes its numerical results to
files in `reports/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from attnmix.core.draw import TYPICAL_TOKENS
from attnmix.core.names import CAPTURED_CHECKPOINT
from attnmix.core.statistics import MIN_INTERVAL_DOCUMENTS, MIN_SIMULTANEOUS, Verdict, verdict
from attnmix.core.store.results import Results
from attnmix.figures.labels import CHECKPOINTS, RANDOM_MODEL
from attnmix.measures.ratios import preferred_ratio
from attnmix.page.arrays import visible
from attnmix.page.verdicts import VERBS, counted, interval_text, points, too_few, why_no_verdict
from attnmix.page.wording import RUN_WORDING, model_wording_of, wording_of

DERIVATIVE_FORMS = {
    "norm_of_sum": "if all other tokens change together",
    "norm_of_block": "if they change independently",
    "sum_of_norms": "if the norms of single tokens are added",
}
EDITS = ("text_mean", "corpus_mean", "other_class")
VALUE_CONTROL = "corpus_value"
SHARE_WORDS = ((0.5, "mostly"), (0.1, "partly"), (-1.0, "to a small extent"))
"""Lower bounds of the class share, and the adverb for each bound; the first bound that the share reaches applies."""
CLASS_SHARE_QUANTITIES = ("before", "after", "difference", "permuted")


@dataclass(frozen=True)
class Subject:
    """The model and the data of a page. If `dataset` is None, the page shows texts measured with the API.

    All fields except the first are keyword-only, because positional strings would be easy to confuse.
    """

    model: str
    _: KW_ONLY
    revision: str | None = None
    base: str | None = None
    """The pretrained model, if it differs from `model`."""
    dataset: str | None = None
    finetuned: bool = True
    synthetic: bool = False
    """True if a program wrote the texts, according to the dataset card."""
    changed: Sequence[tuple[str, str, str]] = ()
    """The key, the value and the default value of each changed parameter."""
    origins: Sequence[str] = ()
    """Sentences on the origin of each model and dataset."""
    left_out: str = ""
    """A sentence on data that were omitted to reduce the size of the page."""
    selection: str = ""
    """Sentences on the selection of the captured texts."""


def describe(subject: Subject, tokens: pd.DataFrame, run: Results) -> dict[str, Any]:
    """Return the text of the page; the keys are the names of the variables in the page's template.

    `checkpoints` contains the labels of the checkpoints, with the captured checkpoint last. `tokens` are the tokens on
    the page.
    """
    if subject.dataset is None:
        return _describe_texts(tokens, run)
    measure = run.metrics("measure")
    finetune = run.metrics("finetune")
    download = run.metrics("download")
    evidence = [
        *class_evidence(run),
        *_describe_classes(run),
        *_describe_controls(run),
        *derivatives(run),
        *class_lens(run),
    ]
    test = finetune["test"]
    kind = "synthetic " if subject.synthetic else ""
    measured = f"{describe_samples(run, measure['documents'])} {_describe_selection(subject, run)}"
    return {
        "checkpoints": CHECKPOINTS,
        "facts": {
            "test accuracy": percent(test["accuracy"], 1),
            "majority baseline": percent(test["majority_accuracy"], 1),
            f"{kind}training reviews": str(download["train"]),
            f"{kind}test reviews": str(download["test"]),
            "reviews measured": str(measure["documents"]),
        },
        "measured": measured.strip(),
        "findings": [_describe_accuracy(test), *evidence],
        "computed_on": {"fine-tuning": finetune["computed_on"], "measures": measure["computed_on"]},
    }


def _describe_accuracy(test: Mapping[str, Any]) -> str:
    """Return a sentence on the interval of the test accuracy; `test` contains the metrics of the test texts."""
    low = percent(test["accuracy_ci_low"])
    high = percent(test["accuracy_ci_high"])
    return f"The 95% interval of the classifier's test accuracy is {low} to {high}."


def _describe_texts(tokens: pd.DataFrame, run: Results) -> dict[str, Any]:
    """Return the same variables as `describe`, for texts measured with the API in one or two models.

    The findings are sentences on the mixing ratio, on its controls, and on its change between two models.
    """
    curves, differences = run.mixing  # the mean ratios of each model, and the differences between two models
    labels = {"pretrained": "The model as it is"}  # the results of a single model have this key
    if len(differences):
        labels = dict(model_wording_of(run).labels)
    texts = tokens["document"].nunique()
    noun = "text" if texts == 1 else "texts"
    layers = curves["layer"].max()
    return {
        "checkpoints": labels,
        "facts": {noun: str(texts), "tokens": str(len(tokens)), "layers": str(layers)},
        "measured": f"All numbers and maps describe the {noun} below.",
        "findings": _describe_controls(run),
        "computed_on": {"measures": run.metrics("measure")["computed_on"]},
    }


def describe_samples(run: Results, documents: int) -> str:
    """Return sentences on the sample sizes of the measures in a pipeline run with `documents` measured texts.

    Controls are ratios that are measured again after a change, such as random weights or words in random order.
    """
    noun = wording_of(run).texts
    controls = run.table("measure/mixing_controls")
    controlled = controls["documents"].max() if len(controls) else 0  # number of texts with controls
    subject = "Ratios and controls" if controlled == documents else "Ratios"
    clauses = [f"{subject} are means over the {documents} measured test {noun}, weighted by tokens"]
    # Further clauses describe the measures that were computed for a sample of the texts.
    if 0 < controlled < documents:
        clauses.append(f"controls over {controlled:.0f} of them")
    tables_of_samples = {
        "exact parts (the contributions of input tokens to a vector)": "measure/parts",
        "derivatives": "measure/derivatives",
    }
    for name, table in tables_of_samples.items():
        rows = run.table(table)
        if len(rows):
            texts = rows["documents"].max()
            clauses.append(f"{name} over {texts:.0f} of them")
    return f"{_join_clauses(clauses)}. The maps show the captured texts, which are examples."


def _join_clauses(clauses: Sequence[str]) -> str:
    """Return clauses joined by commas, with “and” before the last clause."""
    *before_last, last = clauses
    if not before_last:
        return last
    return f"{', '.join(before_last)}, and {last}"


def _describe_selection(subject: Subject, run: Results) -> str:
    """Return sentences on the selection of the captured texts, and on captured texts above the length limit.

    The rule of the selection, which `subject.selection` describes, prefers texts of at most `TYPICAL_TOKENS` tokens.
    A longer text is selected only if no such text meets the rule. The result is empty if `subject.selection` is empty.
    """
    if not subject.selection:
        return ""
    texts = run.documents
    longer = texts[texts["tokens"] > TYPICAL_TOKENS]
    if longer.empty:
        return subject.selection
    names = []
    for _, row in longer.iterrows():
        names.append(f"{row['document']} ({row['tokens']} tokens)")
    return f"{subject.selection} For {' and '.join(names)}, no text within the length limit met the rule."


def percent(share: float, digits: int = 0) -> str:
    """Return a share as text in percent, such as `24%` for 0.2426."""
    return f"{100 * share:.{digits}f}%"


def shown_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the preferred ratio's rows for the captured checkpoint or, if it is missing, for the first checkpoint.

    The captured checkpoint is the one whose vectors are shown on the maps of a pipeline run.
    """
    names = table["checkpoint"].unique().tolist()
    checkpoint: str = names[0]
    if CAPTURED_CHECKPOINT in names:
        checkpoint = CAPTURED_CHECKPOINT
    is_of_checkpoint = table["checkpoint"] == checkpoint
    is_preferred = table["method"] == preferred(table)
    return pd.DataFrame(table[is_of_checkpoint & is_preferred])


def preferred(table: pd.DataFrame) -> str:
    """Return the mixing ratio that the generated sentences describe, selected from the column `method` of a table."""
    return preferred_ratio(table["method"].unique().tolist())


def most_and_least(curves: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the row of the layer with the highest mean of the preferred ratio, and the row with the lowest mean.

    `shown_rows` selects the checkpoint.
    """
    rows = shown_rows(curves)
    highest = int(rows["mean"].argmax())
    lowest = int(rows["mean"].argmin())
    return rows.iloc[highest], rows.iloc[lowest]


def class_shares(run: Results) -> pd.DataFrame:
    """Return the class share by layer: the share of the predicted class in the contributions of other tokens.

    The class share is the part of the contributions' squared length that is common to the texts of a class. Without
    classes, the table is empty. The column `quantity` contains `CLASS_SHARE_QUANTITIES`: the share `before` and `after`
    fine-tuning, their `difference`, and `permuted`. For `permuted`, the column `mean` contains the 95th percentile of
    the share over random permutations of the classes.
    """
    geometry = run.table("measure/geometry")
    checkpoint_and_measure = {
        "before": ("pretrained", "share_class"),
        "after": ("finetuned", "share_class"),
        "difference": ("difference", "share_class"),
        "permuted": ("finetuned", "share_class_permuted"),
    }
    tables = []
    for quantity, (checkpoint, measure) in checkpoint_and_measure.items():
        is_of_checkpoint = geometry["checkpoint"] == checkpoint
        is_of_measure = geometry["measure"] == measure
        rows = geometry[is_of_checkpoint & is_of_measure]
        tables.append(rows.assign(quantity=quantity))
    return pd.concat(tables)


def class_evidence(run: Results) -> list[str]:
    """Return sentences on the class share, the change of the ratio, and the dependence of predictions on value vectors.

    The class share is reported for the layer in which it is largest after fine-tuning, or for the last layer if there
    are too few texts for this choice. The list is empty if there is a single checkpoint or there are no classes.
    """
    shares = class_shares(run)
    _, ratio_differences = run.mixing
    if ratio_differences.empty or shares.empty:
        return []
    rows = shares.set_index(["quantity", "layer"])
    layer = _choose_class_layer(rows.loc["after"])
    by_quantity = {quantity: rows.loc[(quantity, layer)] for quantity in CLASS_SHARE_QUANTITIES}
    return [
        _describe_class_evidence(by_quantity, layer, run),
        _describe_ratio_change(run),
        _describe_class_share(by_quantity, layer, run),
        *_describe_edited_values(run),
    ]


def _choose_class_layer(shares: Any) -> int:
    """Return the layer with the largest class share; the last layer if there are too few texts for this choice.

    `shares` is a table of the class share after fine-tuning, with one row per layer; its index contains the layers.
    """
    if shares["documents"].max() >= MIN_SIMULTANEOUS:  # with fewer texts, chance determines the largest share
        return int(shares["mean"].idxmax())
    return int(shares.index.max())


def _describe_class_evidence(by_quantity: Mapping[str, Any], layer: int, run: Results) -> str:
    """Return a sentence on whether the contributions of other tokens have a component common to texts of one class.

    `by_quantity` contains the rows of the class share in `layer`, by quantity (see `class_shares`). There is evidence
    if the share rises with fine-tuning and afterwards exceeds the share with randomly permuted classes.
    """
    common = "contributions of other tokens are common to texts of one predicted class, but not to all texts"
    after = by_quantity["after"]
    difference = by_quantity["difference"]
    permuted = by_quantity["permuted"]
    chance_share = permuted["mean"]  # the 95th percentile over random permutations
    noun = wording_of(run).texts
    documents = after["documents"]
    change = verdict(difference["ci_low"], difference["ci_high"], documents)
    if change is Verdict.TOO_FEW_TEXTS:
        reason = why_no_verdict(difference["ci_low"], difference["ci_high"], documents, noun)
        return f"It is not known whether {common}: {reason}."
    if change is Verdict.HIGHER and after["ci_low"] > chance_share:
        extent = _describe_extent(after["mean"])
        where = f"contributions of other tokens in layer {layer}"
        return f"After fine-tuning, {where} are {extent} common to texts of one predicted class, but not to all texts."
    return (
        f"It is inconclusive whether {common}: the interval of the class's share, or of the share's change, does not "
        "exclude chance."
    )


def _describe_extent(class_share: float) -> str:
    """Return the adverb for a class share: that of the first bound in `SHARE_WORDS` that the share reaches."""
    adverbs = [adverb for bound, adverb in SHARE_WORDS if class_share >= bound]
    return adverbs[0]


def _describe_ratio_change(run: Results) -> str:
    """Return sentences on the change of the preferred ratio, averaged over layers, with its interval."""
    change = overall_change(run)
    noun = wording_of(run).texts
    ratio_verdict = verdict(change["ci_low"], change["ci_high"], change["documents"])
    between = f"{percent(change['before'], 1)} before fine-tuning and {percent(change['after'], 1)} after it"
    interval = interval_text(change["ci_low"], change["ci_high"], change["documents"], noun)
    means = f"over all layers, it is {between}, a change of {points(change['mean'])} percentage points ({interval})"
    definition = "The ratio is others / (others + own), where others and own are the lengths of the contributions."
    if ratio_verdict in (Verdict.HIGHER, Verdict.LOWER):
        return f"The mixing ratio {VERBS[ratio_verdict]} with fine-tuning: {means}. {definition}"
    reason = why_no_verdict(change["ci_low"], change["ci_high"], change["documents"], noun)
    change_verdict = f"The change of the mixing ratio with fine-tuning {VERBS[ratio_verdict]}"
    return f"{change_verdict}: {means}, and {reason}. {definition}"


def _describe_class_share(by_quantity: Mapping[str, Any], layer: int, run: Results) -> str:
    """Return sentences on the share of the predicted class in the contributions of other tokens in a layer.

    `by_quantity` contains the rows of the share `before` and `after` fine-tuning, and the row `permuted`, whose `mean`
    is the 95th percentile of the share over random permutations of the classes.
    """
    before = by_quantity["before"]
    after = by_quantity["after"]
    permuted = by_quantity["permuted"]
    sample = counted(after["documents"], wording_of(run).texts)
    if after["documents"] >= MIN_INTERVAL_DOCUMENTS:
        low = _format_positive_percent(after["ci_low"])
        high = _format_positive_percent(after["ci_high"])
        sample = f"95% interval {low} to {high}, {sample}"
    earlier_share = f"{_format_positive_percent(before['mean'])} before fine-tuning"
    verdict_before = verdict(before["ci_low"], before["ci_high"], before["documents"])
    if verdict_before is Verdict.INCONCLUSIVE:
        earlier_share = f"{earlier_share}; it is inconclusive whether it was above 0, because the interval includes 0"
    share = _format_positive_percent(after["mean"])
    permuted_percentile = _format_positive_percent(permuted["mean"])
    return (
        f"In layer {layer}, {share} of the squared length of the contributions of other "
        f"tokens is common to the texts of a predicted class ({sample}). It was {earlier_share}. If "
        f"classes are permuted over the texts, it is less than {permuted_percentile} in 95 of 100 draws."
    )


def _format_positive_percent(share: float) -> str:
    """Return a share in percent; an estimate below 0 becomes 0%."""
    return percent(max(share, 0))


def overall_change(run: Results) -> pd.Series:
    """Return the change in the preferred mixing ratio due to fine-tuning, averaged over layers and tokens.

    The preferred ratio is the one that the sentences of the page describe. The entries are the change (`mean`), its
    interval (`ci_low`, `ci_high`), the number of texts (`documents`), and the ratios `before` and `after` fine-tuning.
    """
    table = run.table("measure/mixing_weighted")
    is_weighted_by_token = table["weight"] == "token"
    is_over_tokens = table["tokens_of"] == "all"
    is_over_layers = table["layer"] == "all"
    rows = table[is_weighted_by_token & is_over_tokens & is_over_layers]
    is_preferred = rows["method"] == preferred(rows)
    rows = rows[is_preferred].set_index("checkpoint")
    means = rows["mean"]
    change = {name: rows[name]["difference"] for name in ("mean", "ci_low", "ci_high", "documents")}
    change["before"] = means["pretrained"]
    change["after"] = means["finetuned"]
    return pd.Series(change)


def _describe_edited_values(run: Results) -> list[str]:
    """Return sentences on the share of predicted classes that do not change if value vectors are replaced.

    The list is empty unless all three replacements (`EDITS`) were measured.
    """
    table = run.table("faithfulness/class_use")
    rows = table[table["quantity"] == "class_kept"]
    kept_by_layer = rows.pivot(index="layer", columns="group", values="mean")
    if not set(EDITS) <= set(kept_by_layer):
        return []
    # Each row is for values that are replaced in a layer and in all later layers. The sentence reports the row for the
    # upper half of the layers.
    first_layer = len(kept_by_layer) // 2 + 1
    kept = {}
    for edit in EDITS:
        share = float(kept_by_layer[edit][first_layer])
        kept[edit] = percent(share)
    # The constant prediction with the largest share is the most frequent class.
    predicted_classes = run.table("faithfulness/margins")["predicted"]
    shares_of_classes = predicted_classes.value_counts(normalize=True)
    kept_by_constant = percent(shares_of_classes.max())
    return [
        "Replacing value vectors tests whether the prediction depends on the tokens that they come from. A constant "
        f"prediction would keep {kept_by_constant} of the predicted classes. If every value vector from layer "
        f"{first_layer} on is replaced by the mean over its own text, {kept['text_mean']} are kept. With the mean over "
        f"other texts, {kept['corpus_mean']} are kept, and with the mean over texts of the other class, "
        f"{kept['other_class']}."
    ]


def class_lens(run: Results) -> list[str]:
    """Return sentences on the predictions of the classifier's head for tokens that it does not read.

    The list is empty if these predictions were not measured.
    """
    table = run.table("faithfulness/class_use")
    is_agreement = table["quantity"] == "lens_agreement"
    is_of_others = table["group"] == "others"
    lens = table[is_agreement & is_of_others]
    if lens.empty:
        return []
    last_layer = lens.sort_values("layer").iloc[-1]
    return [
        "The classifier's head, applied to the last vectors of tokens that it does not read, predicts the class of the "
        f"text for {percent(last_layer['mean'])} of these tokens. This shows that their vectors are similar to the "
        "vectors that the head reads, not that the classifier uses them."
    ]


def document_note(row: Mapping[str, Any], truncation: str = RUN_WORDING.truncation, lacks_details: bool = False) -> str:
    """Return sentences on the prediction, truncation, unknown tokens and missing measures of a captured text.

    Args:
        row: `label_name` (None if there is no label), `tokens`, `whole_tokens`, `unknown_tokens` and, for a classified
            text, `predicted` and `probability`.
        truncation: The parameter or limit that truncates texts; by default, the pipeline's parameter.
        lacks_details: True for a text that has neither token-level own shares nor exact parts.
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
        notes.append(f"Only {row['tokens']} of the text's {row['whole_tokens']} tokens were used ({truncation}).")
    if row["unknown_tokens"]:
        notes.append(f"{row['unknown_tokens']} of the text's {row['tokens']} tokens are unknown to the model.")
    if lacks_details:
        notes.append(
            "Own shares by exchange and exact parts (the contributions of input tokens to a vector) were not computed "
            "for this text; their cells are empty."
        )
    return " ".join(notes)


def details_note(detailed: Sequence[str], documents: int) -> str:
    """Return a note that lists the texts with token-level own shares; an empty string if `detailed` lists no text."""
    if not detailed:
        return ""
    names = ", ".join(visible(name, kept="") for name in detailed)
    return (
        "Own shares by exchange of single tokens and exact parts (the contributions of input tokens to a vector) were "
        f"computed for {len(detailed)} of {documents} texts: {names}. In other texts, these cells are empty, because "
        "each token needs a forward pass. In Python, attnmix.measure and attnmix.compare compute them."
    )


def _isolate(name: str) -> str:
    """Return a class name between Unicode isolate characters, so that right-to-left letters do not reorder the text."""
    text = visible(name, kept="")
    if text.isascii():
        return text
    return f"\N{FIRST STRONG ISOLATE}{text}\N{POP DIRECTIONAL ISOLATE}"


def _describe_classes(run: Results) -> list[str]:
    """Return a sentence on the classes with the highest and the lowest F1 score.

    The list is empty for two classes or too few test texts.
    """
    table = run.table("finetune/finetune_by_class")
    if len(table) == 2 or run.metrics("download")["test"] < MIN_SIMULTANEOUS:
        return []
    noun = wording_of(run).texts
    ranked = table.dropna(subset="f1").sort_values("f1", kind="stable")
    named = []
    for _, row in ranked.iterrows():
        class_name = _isolate(row["label_name"])
        named.append(f"{class_name} (F1 {percent(row['f1'])})")
    return [f"Of the classes, the classifier recognises {named[-1]} best and {named[0]} worst in the test {noun}."]


class _DifferenceInterval(NamedTuple):
    """The interval of a mean difference."""

    low: float
    high: float
    documents: float  # number of averaged texts
    noun: str  # the noun for the texts, in the plural

    def describe(self, kind: str = "95% interval") -> str:
        """Return the interval and the number of texts, or only the number if there is no interval."""
        return interval_text(self.low, self.high, self.documents, self.noun, kind)

    def explain_missing_verdict(self) -> str:
        """Return the reason why the direction of the difference is not known; an empty string if it is known."""
        return why_no_verdict(self.low, self.high, self.documents, self.noun)


def _select_changes(run: Results) -> pd.DataFrame:
    """Return the changes of the preferred ratio by layer; there are no rows if there is a single checkpoint."""
    _, differences = run.mixing
    if differences.empty:
        return differences
    return differences[differences["method"] == preferred(differences)]


def _find_largest_change(run: Results) -> pd.Series | None:
    """Return the row with the largest change of the preferred ratio; None if there are no changes or too few texts."""
    rows = _select_changes(run)
    if rows.empty or rows["documents"].max() < MIN_SIMULTANEOUS:
        return None
    largest = int(rows["mean"].abs().argmax())
    return rows.iloc[largest]


def _describe_controls(run: Results) -> list[str]:
    """Return sentences on the preferred ratio and its controls, averaged over layers, and on the ratio's change.

    Controls are ratios that are measured again after a change, such as random weights or words in random order.
    """
    curves, _ = run.mixing
    ratios = shown_rows(curves)
    method = ratios["method"].iloc[0]
    table = run.table("measure/mixing_controls")
    controls = table[table["method"] == method].dropna(subset="mean")
    means = controls.groupby(["control", "checkpoint"])["mean"].mean()
    control_means: dict[Any, float] = means.to_dict()
    sentences = _describe_control_means(ratios, controls, control_means)
    changes = _select_changes(run)
    if len(changes):
        sentences.append(_describe_layer_change(run))
        sentences.append(_describe_mean_change(run, changes, controls, control_means))
        sentences.extend(_compare_change_with_control(run, controls))
    return sentences


def _describe_control_means(
    ratios: pd.DataFrame, controls: pd.DataFrame, control_means: Mapping[Any, float]
) -> list[str]:
    """Return sentences that compare the preferred ratio with its controls, averaged over layers.

    Args:
        ratios: One row per layer, with the preferred ratio in one checkpoint.
        controls: The means of the ratio's controls, with one row per control, checkpoint and layer.
        control_means: The means of the controls over layers, by control and checkpoint.
    """
    checkpoint = ratios["checkpoint"].iloc[0]
    changed_inputs = {
        ("shuffled_words", checkpoint): "the words in random order",
        ("random_weights", RANDOM_MODEL): "random weights",
    }
    clauses = []
    for key, changed_input in changed_inputs.items():
        if key in control_means:
            clauses.append(f"{percent(control_means[key])} with {changed_input}")
    sentences = []
    if clauses:
        # Controls may be limited to a sample of the texts. The ratio is then averaged over the same sample. This
        # requires the rows of `shuffled_words`, because rows of the model with random weights, which is measured only
        # as a control, have no `ratio_minus_control`. Without rows of `shuffled_words`, the ratio is averaged over all
        # texts.
        mean_of_all_texts = ratios["mean"].mean()
        same_texts_ratio = _find_ratio_of_same_texts(controls, "shuffled_words", checkpoint, default=mean_of_all_texts)
        ratio = percent(same_texts_ratio)
        sentences.append(f"Averaged over layers, the mixing ratio is {ratio}. It is {' and '.join(clauses)}.")
    if (VALUE_CONTROL, checkpoint) in control_means:
        sentences.append(_describe_replaced_values(control_means[VALUE_CONTROL, checkpoint]))
    return sentences


def _describe_replaced_values(ratio: float) -> str:
    """Return sentences on the mixing `ratio` that is measured with the values of other texts (`VALUE_CONTROL`)."""
    return (
        f"If every value is replaced by the mean over tokens of other texts with the same token class and a similar "
        f"position, the mixing ratio is {percent(ratio)}. This removes the content of the text from the values and "
        "keeps its attention weights."
    )


def _describe_mean_change(
    run: Results, changes: pd.DataFrame, controls: pd.DataFrame, control_means: Mapping[Any, float]
) -> str:
    """Return sentences on the changes in the preferred ratio and in its control with the values of other texts.

    Both changes are averaged over layers and, if the control was measured, over the same texts. `changes` contains the
    change of the ratio by layer, `controls` the rows of its controls, and `control_means` the means of the controls
    over layers, by control and checkpoint. The changes of controls have the checkpoint `difference`.
    """
    change = model_wording_of(run).change
    mean_of_all_texts = changes["mean"].mean()
    ratio_change = _find_ratio_of_same_texts(controls, VALUE_CONTROL, "difference", default=mean_of_all_texts)
    sentence = f"Over all layers, {change} changes the ratio by {points(ratio_change)} percentage points."
    if (VALUE_CONTROL, "difference") not in control_means:
        return sentence
    control_change = points(control_means[VALUE_CONTROL, "difference"])
    return f"{sentence} With the replaced values, {change} changes it by {control_change}."


def _find_ratio_of_same_texts(controls: pd.DataFrame, control: str, checkpoint: str, default: float) -> float:
    """Return the mean ratio over the texts in which a control was measured; `default` if there are none.

    The table `controls` contains the mean of each control, and the ratio minus the control in the same texts; the ratio
    is the sum of both.
    """
    rows = controls[(controls["control"] == control) & (controls["checkpoint"] == checkpoint)]
    ratios = rows["mean"] + rows["ratio_minus_control"]
    mean = ratios.mean()
    if np.isnan(mean):
        return default
    return float(mean)


def _describe_layer_change(run: Results) -> str:
    """Return sentences on the layer with the largest change of the preferred ratio.

    If there are too few texts to determine this layer, return a sentence that states this reason.
    """
    noun = wording_of(run).texts
    largest = _find_largest_change(run)
    if largest is None:
        few = too_few(_select_changes(run)["documents"].max(), noun)
        change = model_wording_of(run).change
        return (
            f"It is not known which layer {change} changes most: {few} for a conclusion, which needs "
            f"{MIN_SIMULTANEOUS} or more."
        )
    difference = _DifferenceInterval(
        low=largest["simultaneous_low"], high=largest["simultaneous_high"], documents=largest["documents"], noun=noun
    )
    by_change = model_wording_of(run).by_change
    sentence = (
        f"The largest change of the ratio {by_change} is {points(largest['mean'])} percentage points, in layer "
        f"{largest['layer']} ({difference.describe()})"
    )
    reason = difference.explain_missing_verdict()
    if reason:
        sentence = f"{sentence}; it is inconclusive because {reason}"
    if np.isnan(difference.low):  # there is no interval to explain
        return f"{sentence}."
    return (
        f"{sentence}. Because the layer was selected, this interval is simultaneous for all layers and ratios. It is "
        "wider than the interval for this layer alone under “Layers”."
    )


def _compare_change_with_control(run: Results, controls: pd.DataFrame) -> list[str]:
    """Return a sentence on the change of the ratio minus the change of its control (values of other texts).

    Both changes refer to the layer with the largest change of the ratio. The list is empty if this layer is not known,
    or if the control was not measured in it.
    """
    largest = _find_largest_change(run)
    if largest is None:
        return []
    contrast = _select_contrast(controls, largest["layer"])
    if contrast is None:
        return []
    difference = _DifferenceInterval(
        low=contrast["ratio_minus_control_low"],
        high=contrast["ratio_minus_control_high"],
        documents=contrast["documents"],
        noun=wording_of(run).texts,
    )
    sentence = (
        f"In layer {contrast['layer']}, the change of the ratio minus its change with the values of other texts is "
        f"{points(contrast['ratio_minus_control'])} percentage points "
        f"({difference.describe(kind='95% interval for this layer alone')})"
    )
    reason = difference.explain_missing_verdict()
    if reason:
        sentence = f"{sentence}; it is inconclusive because {reason}"
    return [f"{sentence}."]


def _select_contrast(controls: pd.DataFrame, layer: int) -> pd.Series | None:
    """Return the row with the changes of a layer's ratio and of its control (values of other texts).

    Return None if the control was not measured in this layer or has no interval.
    """
    is_value_control = controls["control"] == VALUE_CONTROL
    is_difference = controls["checkpoint"] == "difference"
    is_of_layer = controls["layer"] == layer
    rows = controls[is_value_control & is_difference & is_of_layer]
    if rows.empty or rows["ratio_minus_control_low"].isna().any():
        return None
    return rows.iloc[0]


def derivatives(run: Results) -> list[str]:
    """Return sentences on how fine-tuning changes the Jacobian norms in a layer.

    The layer is the one with the largest change of the mixing ratio or, if this change is not known, the last layer.
    For fewer than `MIN_SIMULTANEOUS` texts, the sentences state changes without verdicts such as “rises”. The list is
    empty if there is a single checkpoint or there are no derivatives.
    """
    table = run.table("measure/derivatives")
    changes = _select_changes(run)
    is_share_of_others = table["quantity"] == "level"
    is_difference = table["checkpoint"] == "difference"
    differences = table[is_share_of_others & is_difference]
    if changes.empty or differences.empty:
        return []
    largest = _find_largest_change(run)
    layer = changes["layer"].max() if largest is None else largest["layer"]
    is_within_layer = (differences["reference"] == "layer_input") & (differences["layer"] == layer)
    rows = differences[is_within_layer].set_index("method")
    noun = wording_of(run).texts
    documents = rows["documents"].max()
    has_verdicts = documents >= MIN_SIMULTANEOUS
    clauses = []
    # Each form combines the Jacobians of all other tokens into one norm, and has one row. `condition` is a clause that
    # describes the form, such as “if all other tokens change together”.
    for form, condition in DERIVATIVE_FORMS.items():
        row = rows.loc[form]
        clauses.append(_write_derivative_clause(row, condition, noun, has_verdicts))
    joined = f"{_join_clauses(clauses)}."
    dependence = f"the dependence of a token's output on the other tokens' inputs within layer {layer} (Jacobian norms)"
    if has_verdicts:
        return [f"With fine-tuning, {dependence} {joined}"]
    # The reason is the number of texts, so the interval is not needed.
    reason = why_no_verdict(low=np.nan, high=np.nan, documents=documents, noun=noun)
    return [f"Fine-tuning changes {dependence} {joined} {_make_sentence(reason)}"]


def _write_derivative_clause(row: pd.Series, condition: str, noun: str, has_verdict: bool) -> str:
    """Return a clause on the change of a kind of derivative, such as “rises if ... (+1.0 percentage points, ...)”.

    Without a verdict, the clause contains only the change and the condition.
    """
    change = f"{points(row['mean'])} percentage points"
    if not has_verdict:
        return f"by {change} {condition}"
    difference = _DifferenceInterval(row["ci_low"], row["ci_high"], row["documents"], noun)
    direction = verdict(difference.low, difference.high, difference.documents)
    return f"{VERBS[direction]} {condition} ({change}, {difference.describe()})"


def _make_sentence(text: str) -> str:
    """Return a text with an upper-case first letter and a full stop."""
    first = text[0].upper()
    return f"{first}{text[1:]}."


def map_note(run: Results) -> str:
    """Return a note that explains why the captured texts have no UMAP map; an empty string if they have a UMAP map."""
    layout = run.layouts[0]
    table = run.map(layout)
    tokens = len(table[["document", "position"]].drop_duplicates())
    if tokens >= run.min_umap_tokens:
        return ""
    number = "1 token is" if tokens == 1 else f"{tokens} tokens are"
    return (
        f"UMAP was not computed, because it needs at least {run.min_umap_tokens} tokens and {number} on this map. "
        "The map shows the two principal components of their vectors (PCA)."
    )
