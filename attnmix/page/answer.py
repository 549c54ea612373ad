"""Summary of a run for the page: a headline, at most three short sentences, notes, and a chart.

Fixed rules select the content from the tables of the run. In the sentences, terms in braces become links to the page's
glossary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from attnmix.core.names import ALL_DONORS, OWN_SHARE, SAME_MINUS_OTHER
from attnmix.core.statistics import MIN_INTERVAL_DOCUMENTS, Verdict, verdict
from attnmix.core.store.results import Results, TextResults
from attnmix.figures.labels import RATIO_MARKS
from attnmix.page.arrays import curve
from attnmix.page.sentences import most_and_least, percent, preferred
from attnmix.page.verdicts import counted, points, points_alike, too_few
from attnmix.page.wording import model_wording_of, wording_of

SHARE, RATIO = "Own share", "Mixing ratio of one layer"
SHARE_LINK = f"{{{SHARE}}}"  # braces mark terms that the page links to its glossary
RATIO_LINK = f"{{{RATIO}}}"
INTERVAL_LINK = "{interval}"
DONORS_LINK = "{donors}"
OWN_SHARE_DEFINITION = (
    "the displacement of the vector if its own token is replaced by one of another text, divided by the sum of this "
    "displacement and the displacement if all other tokens are replaced"
)
"""The definition of the own share that is used in the glossary, in the chart and in docs/measures/exchange.md."""
TOKEN_MEANS = "Lines show means over tokens."


def answer(run: Results, *, finetuned: bool = True, synthetic: bool = False) -> dict[str, Any]:
    """Return the summary of a run: its `headline`, `sentences`, `notes` and `chart`.

    The headline reports the own share of a token's vector after the last layer (`OWN_SHARE_DEFINITION`), or the mixing
    ratio if own shares were not measured. `notes` contains a sentence on the sample size of each measure, by the
    measure's term in the page's glossary.

    Args:
        run: The results of the run.
        finetuned: False for a pipeline run without fine-tuning (`finetune.epochs: 0`).
        synthetic: True if the texts of a pipeline run are machine-generated, according to the dataset card.
    """
    shares = own_shares(run)
    chart = _create_ratio_chart(run) if shares.empty else _create_own_share_chart(shares, model_wording_of(run).labels)
    scope = _write_headline_scope(run, finetuned, synthetic)
    return {
        "headline": _write_headline(run, shares) + scope + _write_headline_verdict(shares),
        "sentences": _write_sentences(run, shares),
        "notes": _write_notes(run, shares),
        "chart": chart,
    }


def own_shares(run: Results, donor: str = ALL_DONORS) -> pd.DataFrame:
    """Return the rows of `exchange.csv` with the own share after each layer, for one kind of donor text.

    The own share compares two displacements of a token's vector: one when tokens of a donor text replace the token
    itself, and one when they replace all other tokens (see `OWN_SHARE_DEFINITION`). For the donor `SAME_MINUS_OTHER`,
    the values are differences between two kinds of donors. Rows of layer 0 (the embeddings) are omitted.
    """
    table: Any = run.table("measure/exchange")
    is_own_share = table["quantity"] == OWN_SHARE
    has_donor = table["donor"] == donor
    is_after_layer = table["layer"] > 0
    return pd.DataFrame(table[is_own_share & has_donor & is_after_layer])


def _count_measured_texts(run: Results) -> int:
    """Return the number of texts over which the mixing ratios are averaged."""
    curves, _ = run.mixing
    return int(curves["documents"].max())


def _write_headline(run: Results, shares: pd.DataFrame) -> str:
    """Return the headline: the own share after the last layer or, if there are no own shares, the mixing ratio.

    For two models, the headline contains the values of both models (`pretrained` and `finetuned`). `shares` is a result
    of `own_shares`, with rows by checkpoint and layer.
    """
    curves, differences = run.mixing
    has_one_model = differences.empty
    if shares.empty and has_one_model:
        return headline(curves)
    if shares.empty:
        means = preferred_means(curves)
        before = percent(means["pretrained"], 1)
        after = percent(means["finetuned"], 1)
        states = model_wording_of(run).headline_states.format(before=before, after=after)
        return f"Tokens mix at a ratio of {states}"
    last = _select_last_layer(shares)
    mean_shares = last["mean"]
    if has_one_model:
        share = percent(float(mean_shares.iloc[0]))
        return f"{SHARE} of a token's last vector: {share}"
    before = percent(mean_shares["pretrained"])
    after = percent(mean_shares["finetuned"])
    states = model_wording_of(run).headline_states.format(before=before, after=after)
    return f"{SHARE} of a token's last vector: {states}"


def _write_headline_scope(run: Results, finetuned: bool, synthetic: bool) -> str:
    """Return a clause that limits the headline to one training run, to synthetic texts, or to both.

    The clause is empty for texts measured with the API (`TextResults`). It mentions the training run only if the run
    fine-tuned a model (`finetuned`) and measured both checkpoints.
    """
    if isinstance(run, TextResults):
        return ""
    _, differences = run.mixing
    is_training_run = finetuned and len(differences) > 0
    scope = ""
    if is_training_run:
        scope = " in this one training run"
    if synthetic:
        scope += f" on synthetic {wording_of(run).texts}"
    return f",{scope}" if scope else ""


def _write_headline_verdict(shares: pd.DataFrame) -> str:
    """Return a clause stating that the change in the last layer's own share is inconclusive.

    The clause is empty for any other verdict, and if the change was not measured.
    """
    last = _select_last_change(shares)
    if last is None:
        return ""
    if verdict(last["ci_low"], last["ci_high"], last["documents"]) is Verdict.INCONCLUSIVE:
        return ": the change is inconclusive"
    return ""


def _select_last_change(shares: pd.DataFrame) -> Any:
    """Return the row of `shares` with the difference between the models in the last layer; None if it is missing."""
    changes = shares[shares["checkpoint"] == "difference"]
    if changes.empty:
        return None
    last_row = int(changes["layer"].argmax())
    return changes.iloc[last_row]


def _select_last_layer(shares: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `shares` for the last layer, indexed by checkpoint."""
    is_last = shares["layer"] == shares["layer"].max()
    last: pd.DataFrame = shares[is_last]
    return last.set_index("checkpoint")


def _write_sentences(run: Results, shares: pd.DataFrame) -> list[str]:
    """Return at most three sentences of the summary; the numbers of models and texts determine their content."""
    _, differences = run.mixing
    texts = _count_measured_texts(run)
    if differences.empty:
        sentences = [_describe_mean(run, shares), _describe_one_model(run)]
    elif texts == 1:
        sentences = [
            _describe_ratio_change(run),
            f"One text is too few for an {INTERVAL_LINK}.",
        ]
    elif texts < MIN_INTERVAL_DOCUMENTS:
        caution = f"{too_few(texts, wording_of(run).texts)} for an {INTERVAL_LINK}."
        sentences = [_describe_ratio_change(run), caution]
    else:
        sentences = [_describe_share_change(run, shares), _describe_shares_by_class(run), _describe_ratio_change(run)]
    return [sentence for sentence in sentences if sentence]


def _format_count(run: Results, number: float) -> str:
    """Return `number` followed by the noun for texts, such as “40 reviews” in a pipeline run."""
    return counted(number, wording_of(run).texts)


def _write_notes(run: Results, shares: pd.DataFrame) -> dict[str, str]:
    """Return a sentence on the sample size of each measure, by the measure's term in the page's glossary.

    The result is empty for one model or one text, because the sentences of the summary then contain the sample size.
    """
    _, differences = run.mixing
    measured_texts = _count_measured_texts(run)
    if differences.empty or measured_texts == 1:
        return {}
    ratio_term = RATIO.lower()
    notes = {ratio_term: f"Here it is the mean over {_format_count(run, measured_texts)}, weighted by tokens."}
    if len(shares):
        share_term = SHARE.lower()
        last = shares.iloc[-1]  # the difference between the models after the last layer
        notes[share_term] = f"Here it is the mean over {_describe_sample(run, last)}."
    return notes


def _describe_sample(run: Results, share: pd.Series) -> str:
    """Return the sample size of an own share, such as “320 tokens of 40 reviews”; `share` is a row of `own_shares`."""
    texts = _format_count(run, share["documents"])
    if "tokens" not in share:
        return texts
    return f"{share['tokens']:.0f} tokens of {texts}"


def _describe_mean(run: Results, shares: pd.DataFrame) -> str:
    """Return a sentence on the texts over which the own share is averaged; an empty string if it was not measured."""
    if shares.empty:
        return ""
    texts = _format_count(run, _count_measured_texts(run))
    return f"{SHARE_LINK}: it is the mean over tokens of {texts}."


def _describe_one_model(run: Results) -> str:
    """Return a sentence that names the layer with the largest mixing ratio."""
    curves, _ = run.mixing
    most, _ = most_and_least(curves)
    texts = _count_measured_texts(run)
    here = "this text" if texts == 1 else f"these {_format_count(run, texts)}"
    return f"{RATIO_LINK}: in {here}, it is largest in layer {most['layer']} ({percent(most['mean'])})."


def _describe_share_change(run: Results, shares: pd.DataFrame) -> str:
    """Return a sentence on the change in the last layer's own share; an empty string if it was not measured."""
    last = _select_last_change(shares)
    if last is None:
        return ""
    change = points(last["mean"])
    texts = _describe_sample(run, last)
    if last["documents"] < MIN_INTERVAL_DOCUMENTS:
        few = too_few(last["documents"], wording_of(run).texts)
        return f"{SHARE_LINK}: it changes by {change} points; {few} for an {INTERVAL_LINK} and a verdict."
    low, high = points_alike(last["ci_low"], last["ci_high"])
    reasons = {
        Verdict.INCONCLUSIVE: ", which is inconclusive",
        Verdict.TOO_FEW_TEXTS: ", which are too few for a verdict",
    }
    share_verdict = verdict(last["ci_low"], last["ci_high"], last["documents"])
    reason = reasons.get(share_verdict, "")
    return f"{SHARE_LINK}: it changes by {change} points (95% {INTERVAL_LINK} {low} to {high}), {texts}{reason}."


def _describe_shares_by_class(run: Results) -> str:
    """Return a sentence on the difference between the own shares with donors of the same and of another class.

    The own share is defined in `OWN_SHARE_DEFINITION`; donors are texts whose words replace those of the measured text.
    The sentence begins with “Its”, because it follows that of `_describe_share_change`. It is empty if there are no
    such donors.
    """
    differences = _select_last_layer(own_shares(run, SAME_MINUS_OTHER))
    if differences.empty:
        return ""
    before = points(differences["mean"]["pretrained"])
    after = points(differences["mean"]["finetuned"])
    states = model_wording_of(run).states.format(before=f"{before} points", after=f"{after} points")
    return f"Its difference between {DONORS_LINK} of the same and of another predicted class: {states}."


def preferred_means(curves: pd.DataFrame) -> dict[str, float]:
    """Return, by checkpoint, the mean over layers of the ratio that the page uses in its sentences."""
    rows = curves[curves["method"] == preferred(curves)]
    means = rows.groupby("checkpoint", sort=False)["mean"].mean()
    return {str(checkpoint): float(mean) for checkpoint, mean in means.items()}


def _describe_ratio_change(run: Results) -> str:
    """Return a sentence with the preferred ratios of both models, averaged over layers."""
    curves, _ = run.mixing
    means = preferred_means(curves)
    before = percent(means["pretrained"])
    after = percent(means["finetuned"])
    texts = _format_count(run, _count_measured_texts(run))
    states = model_wording_of(run).states.format(before=before, after=after)
    return f"{RATIO_LINK}: it is {states}, mean over layers and tokens, {texts}."


def headline(curves: pd.DataFrame) -> str:
    """Return a headline on the layers with the largest and the smallest mixing ratio."""
    most, least = most_and_least(curves)
    high, low = _format_distinct(most["mean"], least["mean"])
    if most["layer"] == least["layer"]:
        return f"The mixing ratio of the only layer is {high}"
    return f"Layer {most['layer']} mixes tokens most, at a ratio of {high}; layer {least['layer']} least, {low}"


def _format_distinct(high: float, low: float) -> tuple[str, str]:
    """Return two ratios in percent, with the fewest decimal places (at most 2) that show their difference.

    There are enough decimal places to distinguish `low` from 0, too. If two are not enough, both ratios are rounded to
    whole percent.
    """
    for digits in (0, 1, 2):
        high_text = percent(high, digits)
        low_text = percent(low, digits)
        is_zero = float(low_text.rstrip("%")) == 0
        if high_text != low_text and not is_zero:
            return high_text, low_text
    return percent(high, 0), percent(low, 0)


def _create_own_share_chart(shares: pd.DataFrame, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the data of a chart of the own share by layer, with a series of means and intervals for each model.

    `shares` is a result of `own_shares`, and `labels` are the names of the models by checkpoint.
    """
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


def _create_ratio_chart(run: Results) -> dict[str, Any]:
    """Return the data of a chart of the preferred ratio by layer."""
    curves, _ = run.mixing
    method = preferred(curves)
    ratio_rows = curves[curves["method"] == method]
    checkpoints = curves["checkpoint"].unique().tolist()
    layers = range(1, int(curves["layer"].max()) + 1)
    labels = model_wording_of(run).labels
    series = []
    for checkpoint in checkpoints:
        rows = ratio_rows[ratio_rows["checkpoint"] == checkpoint]
        name = labels[checkpoint] if len(checkpoints) > 1 else "Mixing ratio"
        series.append({"name": name, **curve(rows, layers)})
    return {
        "title": "Mixing ratio by layer",
        "series": series,
        "unit": f"The ratio is “{RATIO_MARKS[method].label}”",
        "means": TOKEN_MEANS,
    }
