"""The answer of a run, chosen by rule from its tables: a headline, at most three short sentences, notes, and a chart.

A term in braces is in the page's glossary, where a reader looks it up at the word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from attnmix.core.names import INPUT_PARTS
from attnmix.core.statistics import MIN_INTERVAL_DOCUMENTS, Verdict, verdict
from attnmix.core.store.results import Results
from attnmix.figures.labels import RATIO_MARKS
from attnmix.page.arrays import curve
from attnmix.page.sentences import most_and_least, overall_change, percent, preferred
from attnmix.page.verdicts import VERBS, counted, points, points_alike
from attnmix.page.wording import ModelWording, model_wording_of, wording_of

SHARE, RATIO = "Share from others since the input", "Mixing ratio of one layer"
OTHERS_SHARE = (
    "the length of the sum of all other tokens' parts, divided by that plus the length of the token's own part"
)
"""The one definition of the share from others, in the glossary, the chart and docs/measures/parts.md."""
TOKEN_MEANS = "Lines show means over tokens."
MIN_RATIO_CHANGE = 0.01
"""The smallest change of the mixing ratio of which the page says that it hardly depends on word order."""
MAX_ORDER_SHARE = 0.1
"""The largest share of that change by which it differs with words shuffled, if it hardly depends on word order."""


def answer(run: Results) -> dict[str, Any]:
    """Return `headline`, `sentences`, `notes` and `chart`: `title`, `unit` and `series` of `name, values, low, high`.

    A note says of a term of the glossary how much this run measured of it.

    The headline says what a token's last vector is made of, by parts; where the model cannot be taken apart, how much
    its layers mix.
    """
    shares = others_shares(run)
    chart = _ratio_chart(run) if shares.empty else _others_chart(shares, model_wording_of(run).labels)
    return {
        "headline": _headline(run, shares),
        "sentences": _sentences(run, shares),
        "notes": _notes(run, shares),
        "chart": chart,
    }


def others_shares(run: Results) -> pd.DataFrame:
    """Return the share from other tokens by layer and checkpoint: of the drawn reviews, or else of the captured texts.

    It is the rest beside a token's own share, and the direction of the picture's colours. Columns are `checkpoint,
    layer, mean, ci_low, ci_high, documents`; of captured texts there is no interval.
    """
    own = _own_shares(run)
    is_difference = own["checkpoint"] == "difference"
    total = (~is_difference).astype(float)  # shares add up to 1, differences of shares to 0
    mean = total - own["mean"]
    low = total - own["ci_high"]
    high = total - own["ci_low"]
    return own.assign(mean=mean, ci_low=low, ci_high=high)


def _own_shares(run: Results) -> pd.DataFrame:
    if _texts(run) == 1:
        return _captured_own_shares(run)
    table = run.table("measure/parts")
    is_own_share = (table["rule"] == "chord") & (table["quantity"] == "own_share")
    own = table[is_own_share & (table["layer"] > 0)]
    return own if len(own) else _captured_own_shares(run)


def _captured_own_shares(run: Results) -> pd.DataFrame:
    rows = []
    documents = run.tokens["document"].unique()
    for checkpoint in run.mixing[0]["checkpoint"].unique():
        own_shares = []  # of each text with the matrix, `[layers, tokens]`
        for document in documents:
            if INPUT_PARTS in run.matrices(checkpoint, document):
                matrix = run.matrix(checkpoint, document, INPUT_PARTS)
                own_shares.append(np.diagonal(matrix, axis1=-2, axis2=-1))
        if not own_shares:
            continue
        own_LT = np.concatenate(own_shares, axis=-1)
        means_L = own_LT.mean(axis=-1, dtype=np.float64)
        for layer, mean in enumerate(means_L, start=1):
            rows.append((checkpoint, layer, mean, np.nan, np.nan, len(own_shares)))
    return pd.DataFrame(rows, columns=["checkpoint", "layer", "mean", "ci_low", "ci_high", "documents"])


def _texts(run: Results) -> int:
    return int(run.mixing[0]["documents"].max())


def _headline(run: Results, shares: pd.DataFrame) -> str:
    curves, differences = run.mixing
    if shares.empty and differences.empty:
        return headline(curves)
    if shares.empty:
        means = preferred_means(curves)
        before = percent(means["pretrained"], 1)
        after = percent(means["finetuned"], 1)
        return f"Tokens mix at a ratio of {model_wording_of(run).headline_states.format(before=before, after=after)}"
    is_last = shares["layer"] == shares["layer"].max()
    last = shares[is_last].set_index("checkpoint")
    if differences.empty:
        return _one_model_headline(float(last["mean"].iloc[0]))
    return _change_headline(last, model_wording_of(run))


def _one_model_headline(others_share: float) -> str:
    others = percent(others_share)
    own = percent(1 - others_share)
    return f"A token's last vector: {others} from other tokens, {own} its own"


def _change_headline(last: pd.DataFrame, words: ModelWording) -> str:
    """Return the headline of two checkpoints, from the shares after the last layer by checkpoint."""
    means = last["mean"]
    before = f"{percent(means['pretrained'])} from others"
    states = words.headline_states.format(before=before, after=percent(means["finetuned"]))
    text = f"A token's last vector: {states}"
    if "difference" not in last.index:
        return text
    difference: Any = last.loc["difference"]
    found = verdict(difference["ci_low"], difference["ci_high"], difference["documents"])
    return f"{text}: the change is inconclusive" if found is Verdict.INCONCLUSIVE else text


def _sentences(run: Results, shares: pd.DataFrame) -> list[str]:
    _, differences = run.mixing
    if differences.empty:
        sentences = [_counted_tokens(run, shares), _one_model(run)]
    elif _texts(run) == 1:
        sentences = [
            _ratio_change(run),
            "One text gives no {interval}; another text may change in the other direction.",
        ]
    elif _texts(run) < MIN_INTERVAL_DOCUMENTS:
        few = f"{_counted(run, _texts(run))} give no {{interval}}; others may change in the other direction."
        sentences = [_ratio_change(run), few]
    else:
        sentences = [_share_change(run, shares), _ratio_change(run), _shuffled_change(run)]
    return [sentence for sentence in sentences if sentence]


def _counted(run: Results, number: float) -> str:
    """Return a number of texts in words: those of a run of the pipeline are reviews."""
    return counted(number, wording_of(run).texts)


def _notes(run: Results, shares: pd.DataFrame) -> dict[str, str]:
    """Return how many reviews each of the two measures is a mean over, by its term in the glossary."""
    if run.mixing[1].empty or _texts(run) == 1:
        return {}
    notes = {RATIO.lower(): f"Here it is the mean over {_counted(run, _texts(run))}, weighted by tokens."}
    if len(shares):
        last = shares.iloc[-1]
        texts = _counted(run, last["documents"])
        if "tokens" in shares:
            tokens = last["tokens"] / last["documents"]
            texts = f"the first tokens of {texts}, {tokens:.0f} on average"
        notes[SHARE.lower()] = f"Here it is the mean over {texts}."
    return notes


def _counted_tokens(run: Results, shares: pd.DataFrame) -> str:
    return "" if shares.empty else f"{{{SHARE}}}: it is a mean over the {len(run.tokens)} tokens here."


def _one_model(run: Results) -> str:
    most, _ = most_and_least(run.mixing[0])
    texts = _texts(run)
    here = "this text" if texts == 1 else f"these {_counted(run, texts)}"
    return f"{{{RATIO}}}: in {here}, layer {most['layer']} adds most from others, {percent(most['mean'])}."


def _share_change(run: Results, shares: pd.DataFrame) -> str:
    rows = shares[shares["checkpoint"] == "difference"]
    if rows.empty:
        return ""
    last = rows.iloc[int(rows["layer"].argmax())]
    change = points(last["mean"])
    texts = _counted(run, last["documents"])
    if last["documents"] < MIN_INTERVAL_DOCUMENTS:
        return f"{{{SHARE}}}: it changes by {change} points; {texts} give no {{interval}} and no verdict."
    low, high = points_alike(last["ci_low"], last["ci_high"])
    found = verdict(last["ci_low"], last["ci_high"], last["documents"])
    reasons = {
        Verdict.INCONCLUSIVE: ", which is inconclusive",
        Verdict.TOO_FEW_TEXTS: ", which are too few for a verdict",
    }
    reason = reasons.get(found, "")
    return f"{{{SHARE}}}: it changes by {change} points (95% {{interval}} {low} to {high}), {texts}{reason}."


def preferred_means(curves: pd.DataFrame) -> dict[str, float]:
    """Return the mean over the layers of the preferred ratio by checkpoint."""
    rows = curves[curves["method"] == preferred(curves)]
    means = rows.groupby("checkpoint", sort=False)["mean"].mean()
    return {str(checkpoint): float(mean) for checkpoint, mean in means.items()}


def _ratio_change(run: Results) -> str:
    means = preferred_means(run.mixing[0])
    before, after = percent(means["pretrained"]), percent(means["finetuned"])
    texts = _counted(run, _texts(run))
    states = model_wording_of(run).states.format(before=before, after=after)
    return f"{{{RATIO}}}: it is {states}, averaged over layers, {texts}."


def _shuffled_change(run: Results) -> str:
    """Return how much of the ratio's change stays with every text's words in random order."""
    controls = run.table("measure/mixing_controls")
    rows = controls[(controls["control"] == "shuffled_words") & (controls["method"] == preferred(controls))]
    changes_by_layer = rows[rows["checkpoint"] == "difference"]["mean"]
    if changes_by_layer.empty:
        return ""
    means = preferred_means(run.mixing[0])
    change = means["finetuned"] - means["pretrained"]
    shuffled_change = float(changes_by_layer.mean())
    numbers = f"{points(change)} points, and {points(shuffled_change)} with {{words shuffled}}"
    ratio_change = f"The ratio's change {model_wording_of(run).by_change}"
    overall = overall_change(run)
    found = verdict(overall["ci_low"], overall["ci_high"], overall["documents"])
    if found is Verdict.INCONCLUSIVE:
        return f"{ratio_change}, averaged over layers, {VERBS[found]}: {numbers}."
    is_known = found in (Verdict.HIGHER, Verdict.LOWER) and abs(change) >= MIN_RATIO_CHANGE
    if is_known and abs(change - shuffled_change) <= MAX_ORDER_SHARE * abs(change):
        return f"{ratio_change} hardly depends on word order, averaged over layers: {numbers}."
    return f"{ratio_change}, averaged over layers, is {numbers}."


def headline(curves: pd.DataFrame) -> str:
    """Return the layers with the largest and the smallest ratio, with digits that tell the two apart and from 0."""
    most, least = most_and_least(curves)
    high, low = _told_apart(most["mean"], least["mean"])
    if most["layer"] == least["layer"]:
        return f"The one layer mixes tokens at a ratio of {high}"
    return f"Layer {most['layer']} mixes tokens most, at a ratio of {high}; layer {least['layer']} least, {low}"


def _told_apart(high: float, low: float) -> tuple[str, str]:
    """Return two ratios in percent, with the fewest digits that show a difference, and the lower above 0."""
    for digits in (0, 1, 2):
        high_text = percent(high, digits)
        low_text = percent(low, digits)
        is_zero = float(low_text.rstrip("%")) == 0
        if high_text != low_text and not is_zero:
            return high_text, low_text
    return percent(high, 0), percent(low, 0)


def _others_chart(shares: pd.DataFrame, labels: Mapping[str, str]) -> dict[str, Any]:
    layers = range(1, int(shares["layer"].max()) + 1)
    by_checkpoint = shares[shares["checkpoint"] != "difference"].groupby("checkpoint", sort=False)
    series = []
    for checkpoint, rows in by_checkpoint:
        name = labels[str(checkpoint)] if len(by_checkpoint) > 1 else "Share from others"
        series.append({"name": name, **curve(rows, layers)})
    return {
        "title": "Share of a token's vector from other tokens since the input, by layer",
        "series": series,
        "unit": f"The share is {OTHERS_SHARE}",
        "means": TOKEN_MEANS,
    }


def _ratio_chart(run: Results) -> dict[str, Any]:
    """Return the chart of the preferred ratio by layer, and of its control with the text's mean value."""
    curves = run.mixing[0]
    controls = run.table("measure/mixing_controls")
    shared_value = controls[controls["control"] == "text_mean_value"]
    method = preferred(curves)
    checkpoints = curves["checkpoint"].unique().tolist()
    layers = range(1, int(curves["layer"].max()) + 1)
    tables = {"": curves, ", one value shared by all tokens": shared_value}
    series = []
    for suffix, table in tables.items():
        for checkpoint in checkpoints:
            rows = table[(table["method"] == method) & (table["checkpoint"] == checkpoint)]
            name = model_wording_of(run).labels[checkpoint] if len(checkpoints) > 1 else "Mixing ratio"
            series.append({"name": name + suffix, **curve(rows, layers)})
    return {
        "title": "Mixing ratio by layer",
        "series": series,
        "unit": f"The ratio is “{RATIO_MARKS[method].label}”",
        "means": TOKEN_MEANS,
    }
