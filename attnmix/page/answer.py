"""The answer of a run, chosen by rule from its tables: a headline, at most three short sentences, notes, and a chart.

A term in braces is in the page's glossary, where a reader looks it up at the word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from attnmix.core.names import INPUT_PARTS
from attnmix.core.store.results import Results, TextResults
from attnmix.figures.labels import CHECKPOINTS, RATIO_MARKS
from attnmix.page.arrays import MIN_INTERVAL_DOCUMENTS, curve
from attnmix.page.sentences import most_and_least, percent, points, preferred

SHARE, RATIO = "Share from others since the input", "Mixing ratio of one layer"
OTHERS_SHARE = (
    "the length of the sum of all other tokens' parts, divided by that plus the length of the token's own part"
)
"""The one definition of the share from others, in the glossary, the chart and docs/measures/parts.md."""
MIN_RATIO_CHANGE = 0.01
"""The smallest change of the mixing ratio of which the page says whether it needs word order."""
ORDER_FREE_SHARE = 0.9
"""The share of that change that stays, at least, when words are shuffled, where it needs no word order."""


def answer(run: Results) -> dict[str, Any]:
    """Return `headline`, `sentences`, `notes` and `chart`: `title`, `unit` and `series` of `name, values, low, high`.

    A note says of a term of the glossary how much this run measured of it.

    The headline says what a word's last vector is made of, by parts; where the model cannot be taken apart, how much
    its layers mix.
    """
    shares = others_shares(run)
    chart = _ratio_chart(run) if shares.empty else _others_chart(shares)
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
    total = (own["checkpoint"] != "difference").astype(float)
    rest = {"mean": total - own["mean"], "ci_low": total - own["ci_high"], "ci_high": total - own["ci_low"]}
    return own.assign(**rest)


def _own_shares(run: Results) -> pd.DataFrame:
    if _texts(run) > 1:
        table = run.table("measure/parts")
        own = table[(table["rule"] == "chord") & (table["quantity"] == "own_share") & (table["layer"] > 0)]
        if len(own):
            return own
    return _captured_own_shares(run)


def _captured_own_shares(run: Results) -> pd.DataFrame:
    rows = []
    for checkpoint in run.mixing[0]["checkpoint"].unique():
        documents = [name for name in run.tokens["document"].unique() if INPUT_PARTS in run.matrices(checkpoint, name)]
        matrices = [run.matrix(checkpoint, name, INPUT_PARTS) for name in documents]
        if matrices:
            own_LT = np.concatenate([np.diagonal(matrix, axis1=-2, axis2=-1) for matrix in matrices], axis=-1)
            means = enumerate(own_LT.mean(axis=-1, dtype=np.float64), start=1)
            rows += [(checkpoint, layer, mean, np.nan, np.nan, len(documents)) for layer, mean in means]
    return pd.DataFrame(rows, columns=["checkpoint", "layer", "mean", "ci_low", "ci_high", "documents"])


def _texts(run: Results) -> int:
    return int(run.mixing[0]["documents"].max())


def _headline(run: Results, shares: pd.DataFrame) -> str:
    curves, differences = run.mixing
    if shares.empty and differences.empty:
        return headline(curves)
    if shares.empty:
        means = preferred_means(curves)
        before, after = percent(means["pretrained"], 1), percent(means["finetuned"], 1)
        return f"Tokens mix at a ratio of {before} before fine-tuning, {after} after, in this one training"
    last = shares[shares["layer"] == shares["layer"].max()].set_index("checkpoint")
    texts = {name: percent(mean) for name, mean in last["mean"].items()}
    if differences.empty:
        (text,) = texts.values()
        own = percent(1 - float(last["mean"].iloc[0]))
        return f"A word's last vector: {text} from other words, {own} its own"
    text = (
        f"A word's last vector: {texts['pretrained']} from others before fine-tuning, {texts['finetuned']} after, "
        "in this one training"
    )
    interval = last.loc["difference"] if "difference" in last.index else None
    if interval is None or interval["documents"] < MIN_INTERVAL_DOCUMENTS:
        return text
    changes = interval["ci_low"] > 0 or interval["ci_high"] < 0
    return text if changes else f"{text}: no measurable change"


def _sentences(run: Results, shares: pd.DataFrame) -> list[str]:
    _, differences = run.mixing
    if differences.empty:
        return [*_counted_tokens(run, shares), _one_model(run)]
    sentences = [_share_change(run, shares), _ratio_change(run), _shuffled_change(run)]
    if _texts(run) < MIN_INTERVAL_DOCUMENTS:
        few = "One text has no {interval}: another" if _texts(run) == 1 else "So few texts have no {interval}: others"
        sentences = [_ratio_change(run), f"{few} can change the other way."]
    return [sentence for sentence in sentences if sentence]


def _counted(run: Results, number: float) -> str:
    """Return a number of texts in words: those of a run of the pipeline are reviews."""
    if number == 1:
        return "1 text"
    return f"{number:.0f} {'texts' if isinstance(run, TextResults) else 'reviews'}"


def _notes(run: Results, shares: pd.DataFrame) -> dict[str, str]:
    """Return how many reviews each of the two measures is a mean over, by its term in the glossary."""
    if run.mixing[1].empty or _texts(run) == 1:
        return {}
    notes = {RATIO.lower(): f"Here: the mean over {_counted(run, _texts(run))}."}
    if len(shares):
        last = shares.iloc[-1]
        cut = f", cut to {last['tokens'] / last['documents']:.0f} tokens on average" if "tokens" in shares else ""
        notes[SHARE.lower()] = f"Here: the mean over {_counted(run, last['documents'])}{cut}."
    return notes


def _counted_tokens(run: Results, shares: pd.DataFrame) -> list[str]:
    return [] if shares.empty else [f"{{{SHARE}}}: a mean over the {len(run.tokens)} tokens here."]


def _one_model(run: Results) -> str:
    most, _ = most_and_least(run.mixing[0])
    return f"{{{RATIO}}}: layer {most['layer']} adds most from others, {percent(most['mean'])}."


def _share_change(run: Results, shares: pd.DataFrame) -> str:
    rows = shares[shares["checkpoint"] == "difference"]
    if rows.empty:
        return ""
    last = rows.iloc[int(rows["layer"].argmax())]
    if last["documents"] < MIN_INTERVAL_DOCUMENTS:
        return f"{{{SHARE}}}: {points(last['mean'])} points; {_counted(run, last['documents'])} give no {{interval}}."
    low, high = points(last["ci_low"]), points(last["ci_high"])
    return (
        f"{{{SHARE}}}: {points(last['mean'])} points (95% {{interval}} {low} to {high}), "
        f"{_counted(run, last['documents'])}."
    )


def preferred_means(curves: pd.DataFrame) -> dict[str, float]:
    """Return the mean over the layers of the preferred ratio by checkpoint."""
    rows = curves[curves["method"] == preferred(curves)]
    return {str(name): float(mean) for name, mean in rows.groupby("checkpoint", sort=False)["mean"].mean().items()}


def _ratio_change(run: Results) -> str:
    means = preferred_means(run.mixing[0])
    before, after = percent(means["pretrained"]), percent(means["finetuned"])
    return f"{{{RATIO}}}: {before} before, {after} after, averaged over layers, {_counted(run, _texts(run))}."


def _shuffled_change(run: Results) -> str:
    """Return how much of the ratio's change stays with every text's words in random order."""
    controls, means = run.table("measure/mixing_controls"), preferred_means(run.mixing[0])
    rows = controls[(controls["control"] == "shuffled_words") & (controls["method"] == preferred(controls))]
    changes = rows[rows["checkpoint"] == "difference"]["mean"]
    if changes.empty:
        return ""
    change, shuffled = means["finetuned"] - means["pretrained"], float(changes.mean())
    stays = abs(change) >= MIN_RATIO_CHANGE and shuffled / change >= ORDER_FREE_SHARE
    verdict = "needs no word order:" if stays else "is"
    numbers = f"{points(change)} points, {points(shuffled)} with {{words shuffled}}"
    return f"The ratio's change by fine-tuning {verdict} {numbers}."


def headline(curves: pd.DataFrame) -> str:
    """Return the layers with the largest and the smallest ratio, with digits that tell the two apart and from 0."""
    most, least = most_and_least(curves)
    pairs = [(percent(most["mean"], digits), percent(least["mean"], digits)) for digits in (0, 1, 2)]
    high, low = next((pair for pair in pairs if pair[0] != pair[1] and float(pair[1].rstrip("%"))), pairs[0])
    if most["layer"] == least["layer"]:
        return f"The one layer mixes tokens at a ratio of {high}"
    return f"Layer {most['layer']} mixes tokens most, at a ratio of {high}; layer {least['layer']} least, {low}"


def _others_chart(shares: pd.DataFrame) -> dict[str, Any]:
    layers = range(1, int(shares["layer"].max()) + 1)
    grouped = shares.groupby("checkpoint", sort=False)
    by_checkpoint = {str(name): rows for name, rows in grouped if name != "difference"}
    labels = {name: CHECKPOINTS[name] if len(by_checkpoint) > 1 else "Share from others" for name in by_checkpoint}
    series = [{"name": labels[name], **curve(rows, layers)} for name, rows in by_checkpoint.items()]
    return {
        "title": "Share of a token's vector from other tokens since the input, by layer",
        "series": series,
        "unit": OTHERS_SHARE.capitalize(),
    }


def _ratio_chart(run: Results) -> dict[str, Any]:
    """Return the chart of the preferred ratio by layer, and of its control with the text's mean value."""
    curves = run.mixing[0]
    method, checkpoints = preferred(curves), curves["checkpoint"].unique().tolist()
    controls, layers = run.table("measure/mixing_controls"), range(1, int(curves["layer"].max()) + 1)
    tables = {"": curves, ", one value shared by all tokens": controls[controls["control"] == "text_mean_value"]}
    series = []
    for suffix, table in tables.items():
        for checkpoint in checkpoints:
            rows = table[(table["method"] == method) & (table["checkpoint"] == checkpoint)]
            name = CHECKPOINTS[checkpoint] if len(checkpoints) > 1 else "Mixing ratio"
            series.append({"name": name + suffix, **curve(rows, layers)})
    return {"title": "Mixing ratio by layer", "series": series, "unit": RATIO_MARKS[method].label}
