"""The summary of a run on its page: a headline, at most three short sentences, notes, and a chart.

Fixed rules select the content from the tables of the run. Terms in braces are links to the glossary of the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from attnmix.core.names import ALL_DONORS, OTHER_CLASS, OWN_SHARE, SAME_CLASS
from attnmix.core.statistics import MIN_INTERVAL_DOCUMENTS, Verdict, verdict
from attnmix.core.store.results import Results, TextResults
from attnmix.figures.labels import RATIO_MARKS
from attnmix.page.arrays import curve
from attnmix.page.sentences import most_and_least, percent, preferred
from attnmix.page.verdicts import counted, points, points_alike
from attnmix.page.wording import model_wording_of, wording_of

SHARE, RATIO = "Own share", "Mixing ratio of one layer"
OWN_SHARE_DEFINITION = (
    "how far the vector moves if its own token is replaced by one of another text, divided by that plus how far it "
    "moves if all other tokens are replaced"
)
"""The definition of the own share in the glossary, the chart and docs/measures/exchange.md."""
TOKEN_MEANS = "Lines show means over tokens."


def answer(run: Results, *, finetuned: bool = True, synthetic: bool = False) -> dict[str, Any]:
    """Return `headline`, `sentences`, `notes` and `chart`: `title`, `unit` and `series` of `name, values, low, high`.

    `finetuned` is False for a pipeline run without fine-tuning, in which both checkpoints are given models. `synthetic`
    is True if a program wrote the texts of a pipeline run, according to the dataset card. Notes add
    the sample sizes of this run to terms of the glossary. The headline is the own share of a token's last vector; if
    it was not measured, the mixing ratio.
    """
    shares = own_shares(run)
    chart = _ratio_chart(run) if shares.empty else _own_share_chart(shares, model_wording_of(run).labels)
    return {
        "headline": _headline(run, shares) + _headline_scope(run, finetuned, synthetic) + _headline_verdict(shares),
        "sentences": _sentences(run, shares),
        "notes": _notes(run, shares),
        "chart": chart,
    }


def own_shares(run: Results, donor: str = ALL_DONORS) -> pd.DataFrame:
    """Return the rows of `exchange.csv` with the own share after each layer, for one donor kind."""
    table: Any = run.table("measure/exchange")
    is_shown = (table["quantity"] == OWN_SHARE) & (table["donor"] == donor) & (table["layer"] > 0)
    return pd.DataFrame(table[is_shown])


def _count_measured_texts(run: Results) -> int:
    """Return the number of texts with mixing ratios."""
    curves, _ = run.mixing
    return int(curves["documents"].max())


def _headline(run: Results, shares: pd.DataFrame) -> str:
    """Return the headline of one model or of two models, by their own shares or else their ratios."""
    curves, differences = run.mixing
    if shares.empty and differences.empty:
        return headline(curves)
    if shares.empty:
        means = preferred_means(curves)
        before = percent(means["pretrained"], 1)
        after = percent(means["finetuned"], 1)
        states = model_wording_of(run).headline_states.format(before=before, after=after)
        return f"Tokens mix at a ratio of {states}"
    last = _last_layer(shares)
    if differences.empty:
        share = float(last["mean"].iloc[0])
        return f"{SHARE} of a token's last vector: {percent(share)}"
    own_share_means = last["mean"]
    before = percent(own_share_means["pretrained"])
    after = percent(own_share_means["finetuned"])
    states = model_wording_of(run).headline_states.format(before=before, after=after)
    return f"{SHARE} of a token's last vector: {states}"


def _headline_scope(run: Results, finetuned: bool, synthetic: bool) -> str:
    """Return the number of training runs in a pipeline run, and whether its texts are synthetic.

    It does not name a training run without a change, and is empty for texts in given models.
    """
    if isinstance(run, TextResults):
        return ""
    texts = f"on synthetic {wording_of(run).texts}" if synthetic else ""
    if finetuned and len(run.mixing[1]) > 0:
        return f", in this one training run {texts}".rstrip()
    return f", {texts}" if texts else ""


def _headline_verdict(shares: pd.DataFrame) -> str:
    """Return that the change of the own share is inconclusive, if so."""
    changes = shares[shares["checkpoint"] == "difference"]
    if changes.empty:
        return ""
    last: Any = changes.iloc[int(changes["layer"].argmax())]
    found = verdict(last["ci_low"], last["ci_high"], last["documents"])
    return ": the change is inconclusive" if found is Verdict.INCONCLUSIVE else ""


def _last_layer(shares: pd.DataFrame) -> pd.DataFrame:
    """Return the rows after the last layer by checkpoint."""
    last: pd.DataFrame = shares[shares["layer"] == shares["layer"].max()]
    return last.set_index("checkpoint")


def _sentences(run: Results, shares: pd.DataFrame) -> list[str]:
    """Return at most three sentences, by the numbers of models and texts."""
    _, differences = run.mixing
    texts = _count_measured_texts(run)
    if differences.empty:
        sentences = [_describe_mean(run, shares), _describe_one_model(run)]
    elif texts == 1:
        sentences = [
            _ratio_change(run),
            "One text is too few for an {interval}; another text may change in the opposite direction.",
        ]
    elif texts < MIN_INTERVAL_DOCUMENTS:
        few = f"{_counted(run, texts)} are too few for an {{interval}}; others may change in the opposite direction."
        sentences = [_ratio_change(run), few]
    else:
        sentences = [_share_change(run, shares), _shares_by_class(run), _ratio_change(run)]
    return [sentence for sentence in sentences if sentence]


def _counted(run: Results, number: float) -> str:
    """Return a number of texts with its noun; texts of a pipeline run are called reviews."""
    return counted(number, wording_of(run).texts)


def _notes(run: Results, shares: pd.DataFrame) -> dict[str, str]:
    """Return the sample sizes of the two measures, by their terms in the glossary."""
    if run.mixing[1].empty or _count_measured_texts(run) == 1:
        return {}
    notes = {
        RATIO.lower(): f"Here it is the mean over {_counted(run, _count_measured_texts(run))}, weighted by tokens."
    }
    if len(shares):
        last = shares.iloc[-1]
        texts = _counted(run, last["documents"])
        if "tokens" in shares:
            texts = f"{last['tokens']:.0f} tokens of {texts}"
        notes[SHARE.lower()] = f"Here it is the mean over {texts}."
    return notes


def _describe_mean(run: Results, shares: pd.DataFrame) -> str:
    """Return a sentence on the texts of the own share's mean; empty without own shares."""
    if shares.empty:
        return ""
    texts = _counted(run, _count_measured_texts(run))
    return f"{{{SHARE}}}: it is a mean over tokens of {texts}."


def _describe_one_model(run: Results) -> str:
    """Return a sentence on the layer with the largest ratio."""
    curves, _ = run.mixing
    most, _ = most_and_least(curves)
    texts = _count_measured_texts(run)
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
        return f"{{{SHARE}}}: it changes by {change} points; {texts} are too few for an {{interval}} and a verdict."
    low, high = points_alike(last["ci_low"], last["ci_high"])
    found = verdict(last["ci_low"], last["ci_high"], last["documents"])
    reasons = {
        Verdict.INCONCLUSIVE: ", which is inconclusive",
        Verdict.TOO_FEW_TEXTS: ", which are too few for a verdict",
    }
    reason = reasons.get(found, "")
    return f"{{{SHARE}}}: it changes by {change} points (95% {{interval}} {low} to {high}), {texts}{reason}."


def _shares_by_class(run: Results) -> str:
    """Return a sentence on the own share by the predicted class of the donor texts."""
    same = _last_layer(own_shares(run, SAME_CLASS))
    other = _last_layer(own_shares(run, OTHER_CLASS))
    if same.empty or other.empty:
        return ""
    states = model_wording_of(run).states.format(
        before=percent(same["mean"]["pretrained"]),
        after=percent(same["mean"]["finetuned"]),
    )
    other_before = percent(other["mean"]["pretrained"])
    other_after = percent(other["mean"]["finetuned"])
    return f"With words of the same predicted class it is {states}; of another, {other_before} and {other_after}."


def preferred_means(curves: pd.DataFrame) -> dict[str, float]:
    """Return the preferred ratio by checkpoint, averaged over layers."""
    rows = curves[curves["method"] == preferred(curves)]
    means = rows.groupby("checkpoint", sort=False)["mean"].mean()
    return {str(checkpoint): float(mean) for checkpoint, mean in means.items()}


def _ratio_change(run: Results) -> str:
    """Return a sentence on the preferred ratio of both models, averaged over layers."""
    curves, _ = run.mixing
    means = preferred_means(curves)
    before = percent(means["pretrained"])
    after = percent(means["finetuned"])
    texts = _counted(run, _count_measured_texts(run))
    states = model_wording_of(run).states.format(before=before, after=after)
    return f"{{{RATIO}}}: it is {states}, averaged over layers, {texts}."


def headline(curves: pd.DataFrame) -> str:
    """Return a headline with the layers of largest and smallest ratio, with enough digits to differ from 0."""
    most, least = most_and_least(curves)
    high, low = _distinguish(most["mean"], least["mean"])
    if most["layer"] == least["layer"]:
        return f"The mixing ratio of the only layer is {high}"
    return f"Layer {most['layer']} mixes tokens most, at a ratio of {high}; layer {least['layer']} least, {low}"


def _distinguish(high: float, low: float) -> tuple[str, str]:
    """Return two ratios in percent, with the fewest digits for which they differ and the lower is above 0."""
    for digits in (0, 1, 2):
        high_text = percent(high, digits)
        low_text = percent(low, digits)
        is_zero = float(low_text.rstrip("%")) == 0
        if high_text != low_text and not is_zero:
            return high_text, low_text
    return percent(high, 0), percent(low, 0)


def _own_share_chart(shares: pd.DataFrame, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the chart of the own share by layer."""
    layers = range(1, int(shares["layer"].max()) + 1)
    is_model = shares["checkpoint"] != "difference"
    by_checkpoint = shares[is_model].groupby("checkpoint", sort=False)
    series = []
    for checkpoint, rows in by_checkpoint:
        name = labels[str(checkpoint)] if len(by_checkpoint) > 1 else SHARE
        series.append({"name": name, **curve(rows, layers)})
    return {
        "title": "Own share of a token's vector, by layer",
        "series": series,
        "unit": f"The own share is {OWN_SHARE_DEFINITION}",
        "means": TOKEN_MEANS,
    }


def _ratio_chart(run: Results) -> dict[str, Any]:
    """Return the chart of the preferred ratio by layer."""
    curves, _ = run.mixing
    method = preferred(curves)
    of_method = curves[curves["method"] == method]
    checkpoints = curves["checkpoint"].unique().tolist()
    layers = range(1, int(curves["layer"].max()) + 1)
    labels = model_wording_of(run).labels
    series = []
    for checkpoint in checkpoints:
        rows = of_method[of_method["checkpoint"] == checkpoint]
        name = labels[checkpoint] if len(checkpoints) > 1 else "Mixing ratio"
        series.append({"name": name, **curve(rows, layers)})
    return {
        "title": "Mixing ratio by layer",
        "series": series,
        "unit": f"The ratio is “{RATIO_MARKS[method].label}”",
        "means": TOKEN_MEANS,
    }
