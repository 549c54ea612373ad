"""The sentences with results in README.md and docs/results.md, made from the tables that hold their numbers.

What a sentence says follows from the interval beside its number: it rises, falls, or no change is claimed. Made anew by
`make docs`; a test holds the committed sentences equal to what the committed tables say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from stages.mixing.matrices import MATRICES
from stages.mixing.ratios import RATIOS, preferred_ratio

Read = Callable[[str], Any]
"""A table or metrics file by its path from the repository's root."""
PLOTS, STUDY = "reports/plots/", "docs/study/"
FORMS = {
    "norm_of_sum": "response to a common move of all others",
    "norm_of_block": "response to independent moves of the others",
    "sum_of_norms": "norms of single sources added",
}
KINDS = {
    "cls": "[CLS], the only one that the classifier reads after the last layer,",
    "word": "whole words",
    "subword": "pieces of words",
    "punctuation": "punctuation",
    "sep": "[SEP]",
}
ENDS = ("ci_low", "ci_high")
SIMULTANEOUS = ("simultaneous_low", "simultaneous_high")
SCORES = {name: matrix.label for name, matrix in MATRICES.items()} | {
    "attention_rollout": "attention rollout",
    "attention": "attention of the last layer",
    "decompx": "DecompX (biases apart)",
    "gradient_norm": "gradient norm",
    "gradient_x_input": "gradient x input",
    "leave_one_out": "leave-one-out",
}


def default_run(read: Read) -> str:
    """What the default run finds, as a Markdown list."""
    test = read("reports/metrics/finetune.json")["test"]
    reviews = read(f"{PLOTS}reviews.csv").groupby("split")["reviews"].sum()
    changes = read(f"{PLOTS}mixing_difference.csv").rename(columns={"difference": "mean"})
    overall = read(f"{PLOTS}mixing_overall.csv")
    left = read(f"{PLOTS}mixing_controls_difference.csv").rename(columns={"difference": "mean"})
    levels, same = (read(f"{PLOTS}derivative_{name}.csv") for name in ("levels", "ratios"))
    classes, lengths = read(f"{PLOTS}mixing_by_class.csv"), read(f"{PLOTS}mixing_by_length.csv")
    scores = read(f"{PLOTS}faithfulness_overall.csv").set_index("method")
    name = preferred_ratio(changes["method"].unique())
    by_layer = changes[changes["method"] == name].set_index("layer")
    return _list(
        [
            f"The classifier is right on {percent(test['accuracy'])} of {reviews['test']} test reviews (95 % interval "
            f"{interval(test, ('accuracy_ci_low', 'accuracy_ci_high'))}); naming the larger class always would be on "
            f"{percent(test['majority_accuracy'])}.",
            _change(overall, read(f"{PLOTS}mixing_weighted.csv"), by_layer, name),
            _classes(classes, by_layer, name),
            _lengths(lengths, by_layer, name),
            _controls(read(f"{PLOTS}mixing_controls.csv"), left, name),
            _derivatives(levels, same, name),
            _order(read(f"{PLOTS}mixing_gradient.csv"), "spearman"),
            _faithful(scores, "above_random"),
        ]
    )


def study(read: Read) -> str:
    """What the study of several seeds finds, as a Markdown list."""
    accuracy = read(f"{STUDY}accuracy.csv")
    ratios = read(f"{STUDY}ratios.csv").query("checkpoint == 'difference'")
    left = read(f"{STUDY}mixing_controls_difference.csv")
    name = preferred_ratio(ratios["method"].unique())
    by_layer = ratios[ratios["method"] == name].set_index("layer")
    margin = read(f"{STUDY}margin_correlation.csv").set_index(["checkpoint", "quantity"])
    after = margin.loc[("finetuned", "spearman")]
    scores = read(f"{STUDY}faithfulness_overall.csv").query("quantity == 'above_random'").set_index("method")
    try:
        same = read(f"{STUDY}derivative_ratios.csv")
    except FileNotFoundError:  # experiments of before that table
        same = None
    return _list(
        [
            f"{len(accuracy)} seeds, each with training and test reviews of its own draw: right on "
            f"{percent(accuracy['accuracy'].mean())} of the test reviews ({percent(accuracy['accuracy'].min())} to "
            f"{percent(accuracy['accuracy'].max())}).",
            _change(read(f"{STUDY}ratios_overall.csv"), read(f"{STUDY}mixing_weighted.csv"), by_layer, name),
            _classes(read(f"{STUDY}mixing_by_class.csv"), by_layer, name),
            _controls(read(f"{STUDY}mixing_controls.csv"), left, name),
            _derivatives(read(f"{STUDY}derivative_levels.csv"), same, name),
            _order(read(f"{STUDY}mixing_gradient.csv"), "mean"),
            _faithful(scores, "mean"),
            f"Over reviews, the last layer's ratio and the classifier's margin have a rank correlation of "
            f"{number(after)} when fine-tuned (single seeds: {after['lowest_seed']:.2f} to "
            f"{after['highest_seed']:.2f}), "
            f"{number(margin.loc[('finetuned', 'given_length')])} given the number of tokens that were read, and "
            f"{number(margin.loc[('pretrained', 'spearman')])} for the pretrained ratio.",
        ]
    )


def _change(overall: pd.DataFrame, weighted: pd.DataFrame, by_layer: pd.DataFrame, name: str) -> str:
    rows = overall[overall["method"] == name].set_index("checkpoint")
    before, after, change = (rows.loc[each] for each in ("pretrained", "finetuned", "difference"))
    words = weighted.query("tokens_of == 'words' and weight == 'review' and method == @name")
    of_words = words[words["layer"].astype(str) == "all"].set_index("checkpoint").loc["difference"]
    return (
        f"{_ratio(name)}, mean over the layers, is {percent(before['mean'])} {interval(before)} before fine-tuning and "
        f"{percent(after['mean'])} {interval(after)} after: it {changed(change)} ({points(change, 'mean')}). In words "
        f"alone, each review counted once: {points(of_words, 'mean')}. By layer, {_signs(by_layer)}."
    )


def _classes(table: pd.DataFrame, by_layer: pd.DataFrame, name: str) -> str:
    """Before and after, by kind of token, in the layer of the largest change."""
    layer = by_layer["mean"].abs().idxmax()
    rows = table[(table["method"] == name) & (table["layer"] == layer)].set_index(["token_class", "checkpoint"])
    said = [
        f"{label} {percent(before['mean'])} {interval(before)} and {percent(after['mean'])} {interval(after)}"
        for kind, label in KINDS.items()
        if (kind, "finetuned") in rows.index
        for before, after in ((rows.loc[(kind, "pretrained")], rows.loc[(kind, "finetuned")]),)
    ]
    return f"In layer {layer} by kind of token, before and after: {', '.join(said)}."


def _lengths(table: pd.DataFrame, by_layer: pd.DataFrame, name: str) -> str:
    """The change by the reviews' length, in the same layer."""
    layer = by_layer["mean"].abs().idxmax()
    rows = table[(table["method"] == name) & (table["layer"] == layer) & (table["checkpoint"] == "difference")]
    said = [
        f"{points(row, 'mean')} in {row['documents']} review{'s' * (row['documents'] > 1)} of "
        f"{row['length'].replace('-', ' to ')} tokens"
        for _, row in rows.iterrows()
    ]
    return f"In layer {layer} by length: {', '.join(said)}."


def _controls(table: pd.DataFrame, left: pd.DataFrame, name: str) -> str:
    """Levels as means over the layers; what is left of the ratio's change beside a common value, by layer."""
    mean = table[table["method"] == name].groupby(["control", "checkpoint"])["mean"].mean()
    of_common = "control == 'common_value' and checkpoint == 'difference' and method == @name"
    remainder = left.query(of_common).set_index("layer")
    return (
        f"Its controls, mean over the layers: {percent(mean['random_weights', 'random'])} with random weights, "
        f"{percent(mean['shuffled_words', 'finetuned'])} with the words in random order, and where every source of a "
        f"text gives one value, their mean, {percent(mean['common_value', 'pretrained'])} before and "
        f"{percent(mean['common_value', 'finetuned'])} after fine-tuning. Such a value, the same for all tokens of a "
        f"text, changes by {100 * mean['common_value', 'difference']:+.1f} percentage points on its own; of what the "
        f"ratio changes beyond that, by layer, {_signs(remainder)}."
    )


def _derivatives(levels: pd.DataFrame, same: pd.DataFrame | None, name: str) -> str:
    """The forms of the layers' own derivatives, and the ratios of the same tokens."""
    changes = levels[levels["checkpoint"] == "difference"]
    forms = [form for form in FORMS if form in set(changes["form"])]  # older experiments lack norm_of_sum
    own = changes[changes["reference"] == "layer_input"].set_index(["form", "layer"])
    parts = [f"{FORMS[form]} (`{form}`): {_signs(own.loc[form])}" for form in forms]
    from_words = changes[changes["reference"] == "word_embedding"].set_index(["form", "layer"])
    last = from_words.loc[(forms[0], changes["layer"].max())]
    said = (
        "How strongly a token's output depends on the other tokens' inputs, within one layer (Jacobian norms), "
        f"{'; '.join(parts)}. From the word embeddings to the last layer `{forms[0]}` {changed(last)} "
        f"({points(last, 'mean')})."
    )
    if same is None:
        return said
    rows = same[same["checkpoint"] == "difference"].set_index(["method", "layer"])["mean"]
    of_both = [
        f"{_ratio(each)} by {100 * rows[each].loc[rows[each].abs().idxmax()]:+.1f} (layer {rows[each].abs().idxmax()})"
        for each in (name, "layer_n")
        if each in rows.index.unique("method")
    ]
    return f"{said} In the very same tokens ratios change, in percentage points, at most: {_and(of_both)}."


def _order(agreement: pd.DataFrame, value: str) -> str:
    """How far raw attention ranks a token's sources as the layer's own derivative does."""
    rows = agreement.query("method == 'attention' and reference == 'layer_input' and checkpoint != 'difference'")
    return (
        f"In the order of a token's sources raw attention agrees with the layer's own derivative at "
        f"{rows[value].min():.2f} to {rows[value].max():.2f} (mean rank correlation of the rows, both models, all "
        "layers): an order, not an amount."
    )


def _ratio(name: str) -> str:
    return f"`{name}` ({RATIOS[name].mark.label})"


def _faithful(scores: pd.DataFrame, value: str) -> str:
    """How much further the class's probability falls without the tokens that a method ranks first than without others.

    Sorted by intervals that hold for all methods at once, where the table has them.
    """
    low, high = SIMULTANEOUS
    ranked = scores.drop(index="random", errors="ignore").dropna(subset=value).sort_values(value, ascending=False)
    groups: dict[str, list[str]] = {"more": [], "less": [], "undecided": []}
    for method, row in ranked.iterrows():
        group = "more" if row[low] > 0 else "less" if row[high] < 0 else "undecided"
        ends = f"[{100 * row[low]:+.0f}, {100 * row[high]:+.0f}]"
        groups[group].append(f"{SCORES.get(str(method), str(method))} {100 * row[value]:+.0f} {ends}")
    said = {
        "more": "further than without random ones, in percentage points, with",
        "less": "less far than without random ones with",
        "undecided": "not told from random ones by its interval with",
    }
    parts = [f"{said[group]} {_and(names)}" for group, names in groups.items() if names]
    return (
        "Without the tokens that a method ranks first, the class's probability falls "
        f"{'; '.join(parts)} (intervals that hold for all methods at once)."
    )


def _signs(rows: pd.DataFrame) -> str:
    """`it rises in layers 4, 5 and 6, falls in none`, by the intervals that hold for all layers at once."""
    low, high = SIMULTANEOUS
    layers = {"rises": rows.index[rows[low] > 0], "falls": rows.index[rows[high] < 0]}
    parts = [
        f"{verb} in " + (f"layer{'s' * (len(found) > 1)} {_and(list(map(str, found)))}" if len(found) else "none")
        for verb, found in layers.items()
    ]
    largest = rows.loc[rows["mean"].abs().idxmax()]
    return (
        f"it {', '.join(parts)} (the largest estimate, layer {largest.name}: {points(largest, 'mean', SIMULTANEOUS)})"
    )


def percent(value: float) -> str:
    """`0.2426` as `24 %`."""
    return f"{100 * value:.0f} %"


def interval(row: Any, ends: tuple[str, str] = ENDS) -> str:
    """In per cent; nothing where there is none."""
    return "" if pd.isna(row[ends[0]]) else f"[{100 * row[ends[0]]:.0f}, {100 * row[ends[1]]:.0f}]"


def points(row: Any, value: str, ends: tuple[str, str] = ENDS) -> str:
    """A difference with its interval, where it has one."""
    said = f"{100 * row[value]:+.1f} percentage points"
    return said if pd.isna(row[ends[0]]) else f"{said} [{100 * row[ends[0]]:+.1f}, {100 * row[ends[1]]:+.1f}]"


def number(row: Any) -> str:
    """A correlation with its interval, which has no room beyond -1 and 1."""
    return f"{row['mean']:.2f} [{max(row[ENDS[0]], -1):.2f}, {min(row[ENDS[1]], 1):.2f}]"


def changed(row: Any) -> str:
    """No more than the interval says."""
    low, high = (row[end] for end in ENDS)
    if pd.isna(low):
        return "has no interval"
    if low > 0:
        return "rises"
    return "falls" if high < 0 else "shows no change"


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "none"


def _list(sentences: Sequence[str]) -> str:
    return "".join(f"- {sentence}\n" for sentence in sentences)
