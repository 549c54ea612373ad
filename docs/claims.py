"""The sentences with results in README.md and docs/results.md, made from the tables that hold their numbers.

What a sentence says follows from the interval beside its number: it rises, falls, or no change is claimed. Made anew by
`make docs`; a test holds the committed sentences equal to what the committed tables say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from stages.mixing.matrices import MATRICES
from stages.mixing.ratios import preferred_ratio

Read = Callable[[str], Any]
"""A table or metrics file by its path from the repository's root."""
PLOTS, STUDY = "reports/plots/", "docs/study/"
FORM = "norm_of_block"
ENDS = ("ci_low", "ci_high")
SIMULTANEOUS = ("simultaneous_low", "simultaneous_high")
SCORES = {name: matrix.label for name, matrix in MATRICES.items()} | {
    "attention_rollout": "attention rollout",
    "attention": "attention of the last layer",
    "decompx": "DecompX",
    "gradient_norm": "gradient norm",
    "gradient_x_input": "gradient x input",
    "leave_one_out": "leave-one-out",
}


def default_run(read: Read) -> str:
    """What the default run finds, as a Markdown list."""
    test = read("reports/metrics/finetune.json")["test"]
    reviews = read(f"{PLOTS}reviews.csv").groupby("split")["reviews"].sum()
    overall = read(f"{PLOTS}mixing_overall.csv").set_index(["checkpoint", "method"])
    name = preferred_ratio(overall.index.unique("method"))
    words = read(f"{PLOTS}mixing_weighted.csv").query("tokens_of == 'words' and weight == 'review' and layer == 'all'")
    of_words = words[words["method"] == name].set_index("checkpoint").loc["difference"]
    changes = read(f"{PLOTS}mixing_difference.csv").query("method == @name").set_index("layer")
    largest = changes.loc[changes["difference"].abs().idxmax()]
    levels = read(f"{PLOTS}derivative_levels.csv").query("reference == 'layer_input' and form == @FORM")
    local = levels[levels["checkpoint"] == "difference"].set_index("layer").loc[largest.name]
    return _list(
        [
            f"The classifier is right on {percent(test['accuracy'])} of {reviews['test']} test reviews (95 % interval "
            f"{interval(test, ('accuracy_ci_low', 'accuracy_ci_high'))}); naming the larger class always would be on "
            f"{percent(test['majority_accuracy'])}.",
            f"`{name}`, mean over the layers, {_before_after(overall.xs(name, level='method'))}. In words alone, each "
            f"review counted once: {points(of_words, 'mean')}. The largest change, in layer {largest.name}: "
            f"{points(largest, 'difference', SIMULTANEOUS)}, an interval that holds for all layers and ratios at once.",
            _controls(read(f"{PLOTS}mixing_controls.csv"), name),
            f"How far a token hangs on the others by derivatives, in layer {largest.name} too, {changed(local)}: "
            f"{points(local, 'mean')} ({local['documents']} reviews, cut short).",
            _faithful(read(f"{PLOTS}faithfulness_overall.csv").set_index("method"), "above_random", "above_random_low"),
        ]
    )


def study(read: Read) -> str:
    """What the study of several seeds finds, as a Markdown list."""
    accuracy = read(f"{STUDY}accuracy.csv")
    overall = read(f"{STUDY}ratios_overall.csv").set_index(["checkpoint", "method"])
    name = preferred_ratio(overall.index.unique("method"))
    by_layer = read(f"{STUDY}ratios.csv").query("method == @name and checkpoint == 'difference'").set_index("layer")
    words = read(f"{STUDY}mixing_weighted.csv").query("tokens_of == 'words' and weight == 'review' and layer == 'all'")
    of_words = words[words["method"] == name].set_index("checkpoint").loc["difference"]
    levels = read(f"{STUDY}derivative_levels_two_level.csv").query("form == @FORM and checkpoint == 'difference'")
    last = int(by_layer.index.max())
    local, whole = (
        levels[levels["reference"] == each].set_index("layer") for each in ("layer_input", "word_embedding")
    )
    margin = read(f"{STUDY}margin_correlation.csv").set_index(["checkpoint", "quantity"])
    scores = read(f"{STUDY}faithfulness_overall.csv").query("quantity == 'above_random'").set_index("method")
    return _list(
        [
            f"{len(accuracy)} seeds, each with training and test reviews of its own draw: right on "
            f"{percent(accuracy['accuracy'].mean())} of the test reviews ({percent(accuracy['accuracy'].min())} to "
            f"{percent(accuracy['accuracy'].max())}).",
            f"`{name}`, mean over the layers, {_before_after(overall.xs(name, level='method'))}; in words alone, each "
            f"review counted once, {points(of_words, 'mean')}. By layer: {_signs(by_layer, 'mean')}.",
            _controls(read(f"{STUDY}mixing_controls.csv"), name),
            f"By derivatives of each layer, how far a token hangs on the others: {_signs(local, 'mean')}; from the "
            f"word embeddings to layer {last} it {changed(whole.loc[last])} ({points(whole.loc[last], 'mean')}).",
            _faithful(scores, "mean", "ci_low"),
            f"Over reviews, the last layer's ratio and the classifier's margin have a rank correlation of "
            f"{number(margin.loc[('finetuned', 'spearman')])} when fine-tuned, "
            f"{number(margin.loc[('finetuned', 'given_length')])} given the number of tokens, and "
            f"{number(margin.loc[('pretrained', 'spearman')])} for the pretrained ratio.",
        ]
    )


def _before_after(rows: pd.DataFrame) -> str:
    before, after, change = (rows.loc[each] for each in ("pretrained", "finetuned", "difference"))
    return (
        f"is {percent(before['mean'])} {interval(before)} before fine-tuning and {percent(after['mean'])} "
        f"{interval(after)} after: it {changed(change)} ({points(change, 'mean')})"
    )


def _controls(table: pd.DataFrame, name: str) -> str:
    mean = table[table["method"] == name].groupby(["control", "checkpoint"])["mean"].mean()
    return (
        f"Its controls: {percent(mean['random_weights', 'random'])} with random weights, "
        f"{percent(mean['shuffled_words', 'finetuned'])} with the words in random order, and where every source of a "
        f"text gives one value, their mean, {percent(mean['common_value', 'pretrained'])} before and "
        f"{percent(mean['common_value', 'finetuned'])} after fine-tuning: of its change, a vector that all tokens "
        f"share makes {100 * mean['common_value', 'difference']:+.1f} percentage points."
    )


def _faithful(scores: pd.DataFrame, value: str, low: str) -> str:
    """Methods whose removal of tokens lowers the class's probability more than random removal, by their intervals."""
    ranked = scores[value].drop("random", errors="ignore").dropna().sort_values(ascending=False)
    better = [f"{SCORES.get(name, name)} {ranked[name]:.2f}" for name in ranked.index if scores.loc[name, low] > 0]
    others = [SCORES.get(name, str(name)) for name in ranked.index if not scores.loc[name, low] > 0]
    said = (
        "Taking away the tokens that a method ranks first lowers the class's probability by more than taking random "
        f"ones, with {_and(better)}"
    )
    return said + (f"; not beyond its interval with {_and(others)}." if others else ".")


def _signs(rows: pd.DataFrame, value: str) -> str:
    """`rises in layers 4, 5 and 6, falls in none`, by the intervals."""
    layers = {"rises": rows.index[rows[ENDS[0]] > 0], "falls": rows.index[rows[ENDS[1]] < 0]}
    parts = [
        f"it {verb} in " + (f"layer{'s' * (len(found) > 1)} {_and(list(map(str, found)))}" if len(found) else "none")
        for verb, found in layers.items()
    ]
    largest = rows.loc[rows[value].abs().idxmax()]
    return f"{', '.join(parts)} (the most in layer {largest.name}: {points(largest, value)})"


def percent(value: float) -> str:
    """`0.2426` as `24 %`."""
    return f"{100 * value:.0f} %"


def interval(row: Any, ends: tuple[str, str] = ENDS) -> str:
    """In per cent."""
    return f"[{100 * row[ends[0]]:.0f}, {100 * row[ends[1]]:.0f}]"


def points(row: Any, value: str, ends: tuple[str, str] = ENDS) -> str:
    """A difference with its interval."""
    return f"{100 * row[value]:+.1f} percentage points [{100 * row[ends[0]]:+.1f}, {100 * row[ends[1]]:+.1f}]"


def number(row: Any) -> str:
    """A correlation with its interval."""
    return f"{row['mean']:.2f} [{row[ENDS[0]]:.2f}, {row[ENDS[1]]:.2f}]"


def changed(row: Any, ends: tuple[str, str] = ENDS) -> str:
    """No more than the interval says."""
    if row[ends[0]] > 0:
        return "rises"
    return "falls" if row[ends[1]] < 0 else "shows no change"


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "none"


def _list(sentences: Sequence[str]) -> str:
    return "".join(f"- {sentence}\n" for sentence in sentences)
