"""What stands against a ratio, in words: its controls, and what derivatives say; figures of `reports/plots/`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from attnmix.measures.ratios import preferred_ratio
from attnmix.store.mixing import read_captured_ratios
from attnmix.store.reports import read_mixing, read_plot

EXAMPLES = 5  # captured texts that are set beside the measured reviews
FORMS = {
    "norm_of_sum": "when all others move together",
    "norm_of_block": "when they move independently",
    "sum_of_norms": "with the norms of single tokens added",
}


def change(differences: pd.DataFrame) -> list[str]:
    """The largest change of the preferred ratio, by an interval that holds for all layers and ratios at once."""
    if differences.empty:  # one checkpoint was measured
        return []
    rows = differences[differences["method"] == preferred_ratio(differences["method"].tolist())]
    row = rows.iloc[int(rows["mean"].abs().argmax())]
    sure = " (an estimate without an interval for all layers and ratios at once, so it may be none)"
    if pd.notna(row["simultaneous_low"]):
        known = row["simultaneous_low"] > 0 or row["simultaneous_high"] < 0
        sure = (
            f" (95 % interval, for all layers and ratios at once, {points(row['simultaneous_low'])} to "
            f"{points(row['simultaneous_high'])}, paired by review){'' if known else ', which may be none'}"
        )
    return [
        f"The largest change of the ratio by fine-tuning, as far as can be told, is in layer {row['layer']:.0f}: "
        f"{points(row['mean'])} percentage points{sure}."
    ]


def controls(name: str) -> list[str]:
    """Return the ratio `name` beside its controls, averaged over the layers."""
    table, (curves, differences) = read_plot("measure/mixing_controls"), read_mixing()
    mean = table[table["method"] == name].groupby(["control", "checkpoint"])["mean"].mean()
    shown = "finetuned" if "finetuned" in mean["text_mean_value"] else str(mean["text_mean_value"].index[0])
    own = curves.loc[(curves["method"] == name) & (curves["checkpoint"] == shown), "mean"].mean()
    sentences = [
        f"The ratio beside its controls, means over the layers: it is {percent(own)}; with random weights "
        f"{percent(mean['random_weights'].iloc[0])}; with the words in random order "
        f"{percent(mean['shuffled_words', shown])}; and with every value replaced by the mean of its own text's "
        f"values, {percent(mean['text_mean_value', shown])}."
    ]
    if "difference" in mean["text_mean_value"]:
        changes = differences.query("method == @name").set_index("layer")["mean"]
        left = table.query("control == 'text_mean_value' and checkpoint == 'difference' and method == @name")
        layer: Any = changes.abs().idxmax()
        row = left.set_index("layer").loc[layer]
        interval = f"{points(row['below_low'])} to {points(row['below_high'])}"
        sure = "" if pd.isna(row["below_low"]) else f" (95 % interval {interval})"
        sentences.append(
            "The text's own mean removes which token gave a value and keeps what the text says as a whole. Fine-tuning "
            f"changes the ratio by {points(changes.mean())} percentage points, and with that mean in place of the "
            f"values by {points(mean['text_mean_value', 'difference'])} (means over the layers). In layer {layer} the "
            f"first change less the second is {points(row['below'])}{sure}."
        )
    return sentences


def typical(name: str, documents: Sequence[str]) -> list[str]:
    """How the captured texts stand among the measured reviews, in the layer where these are mixed most."""
    reviews = read_plot("measure/mixing_by_review")
    of_method = reviews[reviews["method"] == name]
    checkpoint = "finetuned" if (of_method["checkpoint"] == "finetuned").any() else str(of_method["checkpoint"].iloc[0])
    of_checkpoint = of_method[of_method["checkpoint"] == checkpoint]
    layer: Any = of_checkpoint.groupby("layer")["mean"].mean().idxmax()
    among = of_checkpoint.loc[of_checkpoint["layer"] == layer, "mean"]
    rows = read_captured_ratios(documents, filters=[("checkpoint", "==", checkpoint), ("layer", "==", layer)])
    said = [
        f"{document} {percent(value)} (higher than {percent(float((among < value).mean()))} of them)"
        for document, value in rows.groupby("document", sort=False)[name].mean().items()
    ]
    if not said:
        return []
    return [
        f"The captured texts are examples, not the average: in layer {layer} the {len(among)} measured reviews, each "
        f"counted once, have a mean ratio of {percent(among.mean())}, {', '.join(said[:EXAMPLES])}."
    ]


def derivatives(name: str) -> list[str]:
    """Whether the layers' derivatives change as the ratio does; nothing without gradient documents."""
    levels = read_plot("measure/derivatives").query("quantity == 'level' and reference == 'layer_input'")
    changes = read_mixing()[1].query("method == @name").set_index("layer")["mean"]
    if "difference" not in set(levels["checkpoint"]):
        return []
    layer: Any = changes.abs().idxmax()
    own = levels[levels["layer"] == layer].set_index(["method", "checkpoint"])
    said = []
    for form, what in FORMS.items():
        row = own.loc[(form, "difference")]
        verb = {(True, False): "rises", (False, True): "falls"}.get(
            (row["ci_low"] > 0, row["ci_high"] < 0), "shows no change"
        )
        sure = "" if pd.isna(row["ci_low"]) else f", 95 % interval {points(row['ci_low'])} to {points(row['ci_high'])}"
        before, after = (percent(own.loc[(form, each), "mean"]) for each in ("pretrained", "finetuned"))
        said.append(f"{what} it {verb} ({before} to {after}, {points(row['mean'])} percentage points{sure})")
    return [
        f"How strongly a token's output depends on the other tokens' inputs, within layer {layer} (Jacobian norms): "
        f"{'; '.join(said)}; {row['documents']:.0f} reviews, cut short."
    ]


def points(share: float) -> str:
    """`0.094` as `+9.4`."""
    return signed(100 * share, "+.1f")


def signed(number: float, form: str = ".2f") -> str:
    """With a minus as long as a plus, and none before a zero."""
    said = f"{number:{form}}"
    return said.replace("-", "\N{MINUS SIGN}") if float(said) else said.replace("-", "")


def percent(share: float) -> str:
    """`0.2426` as `24 %`."""
    return f"{100 * share:.0f} %"
