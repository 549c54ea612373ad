"""Every number of the results in README.md and docs/ is that of a csv file in git, read from both."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import REPOSITORY
from families import FAMILIES
from scipy.stats import t as student
from scipy.stats import ttest_1samp, ttest_ind

from attnmix.measures.input_parts import RULES
from docs import classifiers
from docs.tables import DOCUMENTS, MARKED, results, tables

PLOTS, STUDY = "reports/plots/", "docs/study/"
RATIO, CHANGE = "attnresln_n", "difference"
EVERY_LAYER = "ratio attnresln_n, all layers"
BOTH_LABELS = "true labels minus permuted labels"
CHECKPOINTS = ("pretrained", "finetuned", CHANGE)
ENDS = ["mean", "ci_low", "ci_high"]
MEAN_COSINES = ("mean_cosine", "mean_cosine_same_class", "mean_cosine_other_class")
EDITS = ("text_mean", "corpus_mean", "other_class")
DONOR = "donor of the other class"
TRAINED_ON = ("given", "permuted", "rare word")
OWN_LEVELS = (("given", "pretrained"), ("given", "finetuned"), ("permuted", "finetuned"))


PAIR = ("given", "permuted", "given minus permuted")


@cache
def committed(path: str) -> Any:
    """Return a file as git has it: a run in this folder may have changed it."""
    shown = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=REPOSITORY, capture_output=True, check=False)
    if shown.returncode:
        pytest.skip(f"git has no {path} here")
    text = shown.stdout.decode("utf-8")
    if path.endswith(".csv"):
        return pd.read_csv(io.StringIO(text))
    return json.loads(text) if path.endswith(".json") else text


def rows(path: str, **where: object) -> pd.DataFrame:
    """Return the rows of a csv with these values, by layer where it has layers."""
    table = committed(path)
    for column, value in where.items():
        table = table[table[column] == value]
    return table.set_index("layer", drop=False) if "layer" in table else table


def row(path: str, **where: object) -> pd.Series:
    """Return the only row of a csv with these values."""
    table = rows(path, **where)
    assert len(table) == 1, (path, where, len(table))
    return table.iloc[0]


def study(table: str, setting: str = "true labels", **where: object) -> pd.Series:
    """Return a row of a table of the study."""
    return row(f"{STUDY}answer_{table}.csv", setting=setting, **where)


def edited(
    edit: str, measure: str = "same_class", layer: int = 4, extent: str = "from", setting: str = "true labels"
) -> pd.Series:
    """Return the row of an edit of a setting's models."""
    return study("interventions", setting, checkpoint="after", edit=edit, measure=measure, extent=extent, layer=layer)


def fitted(measure: str, setting: str, layer: float | None = None, checkpoint: str = CHANGE) -> pd.Series:
    """Return a row of the trainings that fit, of a layer or of a measure that has none."""
    table = rows(f"{STUDY}fits_layers.csv", measure=measure, setting=setting, checkpoint=checkpoint)
    table = table[table["layer"].isna()] if layer is None else table[table["layer"] == layer]
    (found,) = (each for _, each in table.iterrows())
    return found


def values_by_seed(measure: str, labels: str) -> pd.Series:
    """Return a measure of the study's trainings by seed."""
    return rows(f"{STUDY}trainings_models.csv", measure=measure, labels=labels).set_index("seed")["value"]


def trained_in_pairs(measure: str) -> pd.Series:
    """Return the change from permuted to true labels in pairs of seeds, with Student's interval."""
    changes = (values_by_seed(measure, "true labels") - values_by_seed(measure, "permuted labels")).dropna()
    ends = ttest_1samp(changes, 0).confidence_interval()
    return pd.Series([changes.mean(), ends.low, ends.high], ENDS)


def percent(*shares: float) -> str:
    return " ".join(f"{100 * share:.0f}" for share in shares)


def points(*changes: float) -> str:
    return " ".join(f"{100 * change:+.1f}" for change in changes)


def decimals(*values: float) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def p_value(p: float) -> str:
    """Return a p value as the study writes it: `below 0.001`, of which this is the number, or three decimals."""
    return "0.001" if p < 0.001 else f"{p:.3f}"


def change(values: Mapping[Any, Any]) -> str:
    """Return a change in percentage points and the ends of its interval."""
    return points(*(values[name] for name in ENDS))


def probed(setting: str, target: str, kind: str, layer: int) -> list[float]:
    """Return what probes or the head say after fine-tuning, in each seed."""
    folder = REPOSITORY / STUDY / "runs/probes" / setting.replace(" ", "_")
    keys = ["checkpoint", "target", "kind", "layer"]
    tables = [pd.read_csv(file).set_index(keys)["mean"] for file in sorted(folder.glob("*/*"))]
    return [table["after", target, kind, layer] for table in tables]


def constant_class(setting: str) -> str:
    """Return how many reviews have the class that most have: all [CLS] that have read nothing are given one class."""
    shares = probed(setting, "lens: predicted", "cls", 0)
    return percent(float(np.mean([max(share, 1 - share) for share in shares])))


def assert_numbers(document: str, start: str, end: str, expected: list[str]) -> None:
    """Assert that the numbers from `start` to `end`, but for those in code and links, are those of each paragraph."""
    text = committed(document)
    text = re.sub(r"`[^`]*`|\([^()]*\.(?:md|png|csv)[^()]*\)", "", text[text.index(start) : text.index(end)])
    paragraphs = re.split(r"\n(?=- |\d\. )", text)
    assert [" ".join(re.findall(r"(?<![\w.-])[-+]?\d+(?:\.\d+)?", part)) for part in paragraphs] == expected


def test_findings_of_the_study_are_those_of_its_tables() -> None:
    every, share = EVERY_LAYER, "share class by predicted"

    def by_layers(measure: str, checkpoint: str, layer: int, setting: str = "true labels") -> pd.Series:
        return study("layers", setting, measure=measure, checkpoint=checkpoint, layer=layer)

    def over_layers(checkpoint: str, setting: str = "true labels") -> pd.Series:
        return study("layers", setting, measure=every, checkpoint=checkpoint)

    def at(measure: str, checkpoint: str, setting: str = "true labels") -> float:
        return float(by_layers(measure, checkpoint, 6, setting)["mean"])

    def kept(edit: str, measure: str = "same_class") -> float:
        return float(edited(edit, measure)["mean"])

    def correlation(with_: str, setting: str = "true labels") -> pd.Series:
        return np.tanh(study("reviews", setting, measure=f"z of margin and {with_}")[ENDS].astype(float))

    def scaled(factor: float, measure: str, directions: str = "class") -> float:
        return float(study("scaling", directions=directions, factor=factor, measure=measure, layer=6)["mean"])

    def corpus_value(setting: str) -> pd.Series:
        return study("layers", setting, measure=f"corpus_value {every.removeprefix('ratio ')}", checkpoint=CHANGE)

    def better_constant() -> float:
        """Return the mean share of reviews whose class the better of two constant answers would keep."""
        own = "donor: the review itself"  # whose class is the review's
        return float(edited(own, "donors_class")["mean"] - edited(own, "above_constant")["mean"])

    permuted = "permuted labels"
    both = BOTH_LABELS
    difference, of_cls = (by_layers(f"ratio {RATIO}{tokens}", CHANGE, 6, both) for tokens in ("", " of [CLS]"))
    averages = [over_layers("before"), over_layers("after"), over_layers("after", permuted)]
    of_class = f"{percent(*by_layers(share, 'after', 6)[ENDS])}"
    of_class += f" {percent(abs(at(share, 'before')), at(share, 'after', permuted))}"
    donor = edited(DONOR, "donors_class")
    erased = edited("class erased from words")
    pooled = [
        edited(edit, measure, layer, setting="mean pooling")[ENDS]
        for edit, measure in ((DONOR, "donors_class"), ("no values", "same_class"))
        for layer in (4, 6)
    ]
    donor_last = edited(DONOR, "donors_class", 6)
    above = [edited(DONOR, "above_constant", layer)[ENDS] for layer in (4, 6)]
    of_class_adjusted = [by_layers(share, CHANGE, 6, setting)["p_holm"] for setting in ("true labels", both)]
    adjusted = " ".join(f"{p:.3f}" for p in of_class_adjusted)
    rises = [fitted("ratio, mean of layers", labels) for labels in PAIR]
    rises.append(fitted("ratio, corpus mean, mean of layers", PAIR[2]))
    class_shares = [fitted("share: the class", labels, 6, "finetuned") for labels in PAIR[:2]]
    both_class_shares = " ".join(percent(*each[ENDS]) for each in class_shares)
    sentences = [
        f"1 150 {percent(*(each['mean'] for each in averages[:2]))} {change(over_layers(CHANGE))} "
        f"{change(over_layers(CHANGE, permuted))} {change(over_layers(CHANGE, both))} {change(rises[2])}",
        f"2 {of_class} 4 {adjusted} {both_class_shares}",
        f"3 {percent(*donor[ENDS])} 160 4 {percent(*donor_last[ENDS])} 6 "
        f"{' '.join(percent(*each) for each in above)} {' '.join(percent(*each) for each in pooled)} "
        f"4 {percent(*erased[ENDS])}",
    ]
    assert_numbers("docs/study/README.md", "1. In one small", "![The class", sentences)
    default = {"method": RATIO, "weight": "token", "tokens_of": "all", "layer": "all"}
    before, after, added = (
        row(f"{PLOTS}measure/mixing_weighted.csv", checkpoint=each, **default) for each in CHECKPOINTS
    )
    own = {
        (rule, checkpoint): row(
            f"{PLOTS}measure/parts.csv", quantity="own_share", layer=6, rule=rule, checkpoint=checkpoint
        )
        for rule in RULES
        for checkpoint in CHECKPOINTS
    }
    projected = [
        row(f"{PLOTS}measure/parts.csv", quantity="own_projection", layer=6, rule="chord", checkpoint=each)["mean"]
        for each in CHECKPOINTS[:2]
    ]
    before_and_after = {rule: [own[rule, each]["mean"] for each in CHECKPOINTS[:2]] for rule in RULES}
    own_change = [f"{100 * own['chord', CHANGE][end]:+.0f}" for end in ENDS]
    shuffled, corpus_values = (
        rows(f"{PLOTS}measure/mixing_controls.csv", method=RATIO, control=control, checkpoint=CHANGE)["mean"].mean()
        for control in ("shuffled_words", "corpus_value")
    )
    read = [
        f"1 {percent(*before_and_after['chord'])} {' '.join(own_change)} 95 {own['chord', CHANGE]['documents']} 48 "
        f"{percent(*before_and_after['tangent'])} {percent(*projected)}",
        f"2 {percent(before['mean'], after['mean'])} {change(added)} {after['documents']} "
        f"{points(shuffled, corpus_values)} 95",
        f"3 {' '.join(map(change, rises))}",
        f"4 {both_class_shares}",
    ]
    assert_numbers("README.md", "1. After the last", "![A token's own", read)
    named = [
        study("probes", setting, checkpoint="after", target="lens: predicted", kind=kind, layer=6)[ENDS]
        for setting, kind in (("true labels", "the"), ("true labels", "other"), (permuted, "the"))
    ]
    edges = ("[CLS] cut from others", "no values", "others cut from others", "others cut from [CLS]")
    cut = [edited(edit)[ENDS] for edit in edges]
    cut_in = [edited(edges[0], layer=layer, extent="only")[ENDS] for layer in (4, 5, 6)]
    in_the_middle = [change(by_layers(f"ratio {RATIO}", CHANGE, layer, both)) for layer in (4, 5)]
    task, capitals = "token task", f"ratio {RATIO}"
    of_tokens = [over_layers(CHANGE, task), by_layers(capitals, CHANGE, 6, task), by_layers(capitals, CHANGE, 6)]

    def cancelled(layer: int) -> float:
        logarithms = []
        for measure in ("coherence", "others' length"):
            before, after = (by_layers(measure, checkpoint, layer)["mean"] for checkpoint in ("before", "after"))
            logarithms.append(np.log(after / before))
        return float(logarithms[0] / logarithms[1])

    lengths, coherences = (
        [at(measure, which) for which in ("before", "after")] for measure in ("others' length", "coherence")
    )
    grown = [by_layers(measure, CHANGE, 6)["p_holm"] for measure in ("others' length", "coherence")]
    by_labels = [by_layers("coherence", CHANGE, 6, labels)[ENDS] for labels in (permuted, both)]
    longer = by_layers("others' length", CHANGE, 6, both)
    longer_by = [f"{longer[end]:.1f}" for end in ENDS]
    weights = study("layers", "true labels", measure="ratio attn_w, all layers", checkpoint=CHANGE)[ENDS]
    weights_fall = [f"{-100 * weights[end]:.1f}" for end in (ENDS[0], ENDS[2], ENDS[1])]
    of_five = "five seeds of permuted labels, five of true ones"
    less_corpus = row(f"{STUDY}trainings.csv", comparison=of_five, measure="attnresln_n less corpus_value")
    compared = dict(zip(ENDS, less_corpus[["difference", "trainings_low", "trainings_high"]], strict=True))
    in_pairs = trained_in_pairs(less_corpus["measure"])
    others = ("largest other directions", "random directions")
    elsewhere = " ".join(f"{scaled(0, 'margin', each):.1f} {100 * scaled(0, 'ratio', each):.1f}" for each in others)
    claims = [
        f"{change(over_layers(CHANGE))} {change(over_layers(CHANGE, permuted))} {change(over_layers(CHANGE, both))} 6 "
        f"{change(difference)} {difference['p']:.2f} {difference['p_holm']:.2f} 4 5 {' '.join(in_the_middle)} "
        f"{change(of_cls)} {change(of_tokens[0])} 6 {change(of_tokens[1])} {change(of_tokens[2])}",
        f"{change(corpus_value('true labels'))} {change(corpus_value(permuted))} {change(compared)} 40 "
        f"{points(in_pairs['ci_low'], in_pairs['ci_high'])}",
        f"{percent(*map(cancelled, (4, 5, 6)))} 4 5 6 8 80 6 {lengths[0]:.1f} {lengths[1]:.1f} {p_value(grown[0])} "
        f"{decimals(*coherences)} {p_value(grown[1])} {' '.join(decimals(*each) for each in by_labels)} "
        f"{' '.join(longer_by)} {longer['p_holm']:.2f}",
        f"{100 * at('ratio attn_w', 'before'):.1f} {100 * at('ratio attn_w', 'after'):.1f} {' '.join(weights_fall)}",
        f"{percent(*named[0])} {percent(*named[1])} 5 {constant_class('true labels')} {percent(*named[2])} "
        f"{constant_class(permuted)}",
        f"4 6 {percent(*cut[0], cut[1]['mean'])} 4 {percent(cut_in[0]['mean'])} 5 {percent(cut_in[1]['mean'])} "
        f"6 {percent(*cut_in[2])} {percent(*cut[2], cut[3]['mean'], better_constant())}",
        f"{' '.join(decimals(*correlation('after', labels)) for labels in ('true labels', permuted, 'rare word'))} "
        f"{decimals(*correlation('after given length'))} 40 4 6 "
        f"{scaled(1, 'margin'):.1f} {scaled(0, 'margin'):.1f} 6 "
        f"{100 * scaled(1, 'ratio'):.1f} {100 * scaled(0, 'ratio'):.1f} {elsewhere}",
    ]
    assert_numbers("docs/study/README.md", "- **How much of the rise", "## Settings", claims)
    assert f"each model would keep {percent(better_constant())} %" in committed("docs/study/README.md")


def test_findings_of_trainings_that_fit_are_those_of_their_tables() -> None:
    fits = committed(f"{STUDY}fits.csv")
    assert (fits.loc[fits["split"] == "train", "accuracy"] == 1).all()
    assert fits.groupby(["labels", "split"])["seed"].nunique().eq(5).all()
    means = fits.groupby(["split", "labels"])[["accuracy", "margin", "certainty"]].mean()
    margins = [f"{means.loc[('train', labels), 'margin']:.1f}" for labels in TRAINED_ON]
    scores = [means.loc[("test", labels), "accuracy"] for labels in TRAINED_ON]
    certainty = means.loc["test", "certainty"]
    text = " ".join(committed(f"{STUDY}README.md").split())
    assert f"{margins[0]} logits (given), {margins[1]} (permuted) and {margins[2]} (rare word)" in text
    assert f"of 200 test reviews {percent(scores[0])} %, {percent(scores[1])} % and {percent(scores[2])} %" in text
    assert (
        f"less sure ({certainty['permuted']:.1f} logits between the classes, the given ones {certainty['given']:.1f})"
        in text
    )

    own, both, mean_ratio = "own share", "given minus permuted", "ratio, mean of layers"
    given, permuted, word = TRAINED_ON
    averages = [fitted(mean_ratio, labels) for labels in (given, permuted, both)]
    lower, upper = ([fitted("ratio", both, layer) for layer in layers] for layers in ((1, 2, 3), (4, 5, 6)))
    assert all(each["p_holm"] > 0.05 for each in lower)
    upper_layers = [
        f"{change(each)} {layer} {p_value(each['p_holm'])}" for layer, each in zip((4, 5, 6), upper, strict=True)
    ]
    fall = {labels: fitted(own, labels, 6) for labels in (*TRAINED_ON, both)}
    levels = [fitted(own, labels, 6, checkpoint)["mean"] for labels, checkpoint in OWN_LEVELS]
    tangent = fitted("own share by tangent", both, 6)
    class_share = {labels: fitted("share: the class", labels, 6, "finetuned")[ENDS] for labels in TRAINED_ON}
    class_change = fitted("share: the class", both, 6)
    corpus = {labels: fitted("ratio, corpus mean", labels, 6) for labels in (*TRAINED_ON, both)}
    over_layers = fitted("ratio, corpus mean, mean of layers", both)
    excess = [fitted("ratio less that with the corpus mean", both, 6)]
    excess.append(fitted("ratio less that with the corpus mean, mean of layers", both))
    text_mean = fitted("ratio, text mean", both, 6)
    rise_of = [fitted("coherence of others' parts", labels, 6) for labels in (word, given, permuted)]
    coherences = [f"{decimals(*each[ENDS])} {p_value(each['p_holm'])}" for each in rise_of]
    assert all(each["ci_low"] < 0 < each["ci_high"] for each in (corpus[both], over_layers))
    falls = {labels: f"{change(each)} {p_value(each['p_holm'])}" for labels, each in fall.items()}
    settings = {100: "100 reviews", 300: "300 reviews", 600: "true labels"}
    fewer = {
        number: study("layers", name, measure=EVERY_LAYER, checkpoint=CHANGE)["mean"]
        for number, name in settings.items()
    }
    claims = [
        f"{' '.join(map(change, averages))} {p_value(averages[2]['p'])} {' '.join(upper_layers)} 1 3",
        f"6 {percent(*levels[:2])} {falls[given]} {percent(levels[2])} {falls[permuted]} {falls[both]} "
        f"{change(tangent)} {p_value(tangent['p_holm'])}",
        f"6 {percent(*class_share[given])} {percent(*class_share[permuted])} {percent(*class_change[ENDS])} "
        f"{p_value(class_change['p_holm'])}",
        f"6 {points(corpus[given]['mean'], corpus[permuted]['mean'])} {change(corpus[both])} {change(over_layers)} "
        f"{change(excess[0])} 6 {p_value(excess[0]['p_holm'])} {change(excess[1])} {p_value(excess[1]['p'])} 6 "
        f"{change(text_mean)}",
        f"6 {' '.join(coherences)}",
        f"{change(fitted(mean_ratio, word))} 6 {falls[word]} 6 "
        f"{points(corpus[word]['mean'], fitted('ratio', word, 6)['mean'])} 6 {percent(*class_share[word])}",
        f"{points(fewer[100])} 100 {points(fewer[300])} 300 {points(fewer[600])} 600 2017",
    ]
    assert_numbers("docs/study/README.md", "- **A rise needs no true", "### At other lengths", claims)


def test_findings_at_other_lengths_are_those_of_their_table() -> None:
    assert committed(f"{STUDY}lengths.csv")["seeds"].eq(5).all()

    def last_layer(measure: str, length: int) -> pd.Series:
        return row(f"{STUDY}lengths.csv", measure=measure, length=length, layer=6, checkpoint=CHANGE)

    ratios = {length: last_layer("ratio", length) for length in (64, 96, 256)}
    assert all(each["ci_low"] > 0 for each in ratios.values())
    falls = [f"{-100 * last_layer('own share', length)['mean']:.1f}" for length in ratios]
    lengths = " ".join(f"{change(each)} {length}" for length, each in ratios.items())
    claims = [f"6 {lengths} {ratios[256]['tokens']:.0f} {' '.join(falls)}", ""]
    assert_numbers("docs/study/README.md", "- **The rise is there", "## A second model", claims)


def test_compare_claims_of_trainings_what_their_table_and_the_study_say() -> None:
    alike, others, three, five, _ = rows(f"{STUDY}trainings.csv")["comparison"].unique()

    def verdicts(comparison: str) -> list[str]:
        return rows(f"{STUDY}trainings.csv", comparison=comparison)["trainings"].tolist()

    assert verdicts(alike) == ["too few trainings"] * 4
    assert verdicts(others) == ["open"] * 4
    assert verdicts(three) == ["lower", "higher", "open", "open"]
    assert verdicts(five) == ["open", "open", "open", "higher"]

    def claimed(measure: str, seeds: Sequence[int]) -> pd.Series:
        """Return the change from permuted to true labels, with Welch's interval for four rows at once."""
        true, permuted = (values_by_seed(measure, labels)[list(seeds)] for labels in ("true labels", "permuted labels"))
        ends = ttest_ind(true, permuted, equal_var=False).confidence_interval(1 - 0.05 / 4)
        return pd.Series([true.mean() - permuted.mean(), ends.low, ends.high], ENDS)

    own, ratio, _, less_corpus = rows(f"{STUDY}trainings.csv", comparison=five)["measure"]
    for measure in (own, ratio, less_corpus):
        found = row(f"{STUDY}trainings.csv", comparison=five, measure=measure)
        in_table = found[["difference", "trainings_low", "trainings_high"]].astype(float)
        assert in_table.tolist() == pytest.approx(claimed(measure, range(5)).tolist(), abs=1e-5)
    unlike, alike_seeds = 3, [0, 1, 2, 4, 5]
    ratios, shares = (values_by_seed(measure, "permuted labels") for measure in (ratio, own))
    least, most = ratios[alike_seeds].min(), ratios[alike_seeds].max()
    highest, lowest = values_by_seed(ratio, "true labels"), values_by_seed(own, "true labels")
    assert (highest.idxmax(), lowest.idxmin()) == (unlike, unlike)
    without = [change(claimed(measure, [0, 1, 2, 4])) for measure in (own, ratio)]
    control = study("layers", BOTH_LABELS, measure="corpus_value attnresln_n, all layers", checkpoint=CHANGE)
    in_study = study("layers", BOTH_LABELS, measure=EVERY_LAYER, checkpoint=CHANGE)
    given_minus_permuted = "given minus permuted"
    that_fit = [fitted("own share", given_minus_permuted, 6), fitted("ratio, mean of layers", given_minus_permuted)]
    that_fit.append(fitted("ratio less that with the corpus mean, mean of layers", given_minus_permuted))
    claims = [
        f"{100 * least:.1f} {100 * most:.1f} {percent(shares[alike_seeds].min(), shares[alike_seeds].max())} {unlike} "
        f"{100 * ratios[unlike]:.1f} {percent(shares[unlike])} {100 * highest[unlike]:.1f} {percent(lowest[unlike])} "
        f"0 2 {unlike} {' '.join(without)} 80 {change(in_study)} "
        f"{change(trained_in_pairs(less_corpus))} 80 {points(in_study['mean'], control['mean'])} 0 "
        f"{' '.join(map(change, that_fit))}"
    ]
    assert_numbers("docs/measures/statistics.md", "**Three trainings are few", "## What it cannot say", claims)


def test_findings_of_the_default_run_are_those_of_its_tables() -> None:
    test = committed("reports/metrics/finetune.json")["test"]
    mixing = rows(f"{PLOTS}measure/mixing.csv", method=RATIO, checkpoint=CHANGE)
    assert mixing.index[mixing["simultaneous_low"] > 0].tolist() == [2, 3, 4, 5, 6]
    assert mixing["mean"].idxmax() == 6
    groups = rows(f"{PLOTS}measure/mixing_by_group.csv", method=RATIO, layer=6)
    groups = groups.pivot(index=["grouping", "group"], columns="checkpoint", values=["mean", "documents"])
    rise = groups["mean", "finetuned"] - groups["mean", "pretrained"]
    assert (rise["token_class"] > 0).all()
    long, *shorter = (
        f"{points(rise['length', group])} {groups.loc[('length', group), ('documents', 'finetuned')]:.0f}"
        for group in ("129-256", "33-64", "65-128")
    )
    reviewed = rows(f"{PLOTS}measure/mixing_by_review.csv", method=RATIO, layer=6)
    rises = reviewed.pivot(index="document", columns="checkpoint", values="mean").eval("finetuned - pretrained")
    margins = committed(f"{PLOTS}faithfulness/margins.csv").set_index("document").assign(rise=rises)
    assert margins.loc[margins["tokens"] > 128, "margin"].max() < 3.3
    short = margins[margins["tokens"] <= 128]
    less_sure, sure = (short.loc[each, "rise"] for each in (short["margin"] <= 4.2, short["margin"] > 4.2))

    def geometry(checkpoint: str, measure: str, point: str = "attention_output") -> str:
        where = {"checkpoint": checkpoint, "layer": 6, "point": point, "measure": measure}
        return decimals(row(f"{PLOTS}measure/geometry.csv", **where)["mean"])

    def control(name: str, *checkpoints: str) -> str:
        table = rows(f"{PLOTS}measure/mixing_controls.csv", method=RATIO, control=name)
        return percent(*table.groupby("checkpoint")["mean"].mean()[list(checkpoints)])

    def rise_of(name: str) -> float:
        where = {"method": RATIO, "control": name, "checkpoint": CHANGE}
        return float(rows(f"{PLOTS}measure/mixing_controls.csv", **where)["mean"].mean())

    right = row(f"{PLOTS}faithfulness/class_use.csv", quantity="accuracy", group="none")
    text_mean = {"method": RATIO, "control": "text_mean_value", "checkpoint": CHANGE}
    left = rows(f"{PLOTS}measure/mixing_controls.csv", **text_mean)["below"]
    correlations = committed(f"{PLOTS}faithfulness/class_use.csv").query("checkpoint == 'finetuned'")

    def in_attention(checkpoint: str, measure: str) -> pd.Series:
        where = {"checkpoint": checkpoint, "layer": 6, "point": "attention", "measure": measure}
        return row(f"{PLOTS}measure/geometry.csv", **where)

    def kept(edit: str) -> float:
        return float(row(f"{PLOTS}faithfulness/class_use.csv", quantity="class_kept", group=edit, layer=4)["mean"])

    def correlation(predicted: str, quantity: str = "margin_spearman") -> str:
        where = (correlations["group"] == predicted) & (correlations["quantity"] == quantity)
        return decimals(*correlations.loc[where, ENDS].iloc[0])

    def given_length(predicted: str) -> str:
        return correlation(predicted, "margin_given_length")

    derivatives, levels = f"{PLOTS}measure/derivatives.csv", {"quantity": "level", "method": "norm_of_sum"}
    within = rows(derivatives, reference="layer_input", checkpoint=CHANGE, **levels)
    levels |= {"reference": "word_embedding"}
    first, last, moved = (row(derivatives, layer=6, checkpoint=each, **levels) for each in CHECKPOINTS)
    same_tokens = row(derivatives, quantity="ratio", checkpoint=CHANGE, layer=6, method=RATIO)
    trained, reviews = CHECKPOINTS[:2], margins["predicted"].value_counts()
    exchanged = [
        row(derivatives, quantity="swap", layer=6, checkpoint=checkpoint, method=f"swap_{donor}")
        for donor in ("other_class", "derivative_other_class", "same_class", "derivative_same_class")
        for checkpoint in CHECKPOINTS
    ]
    cosines = [geometry(each, measure) for measure in MEAN_COSINES for each in trained]
    places = (("norm", "output_linear"), ("cosine_input", "attention_skip"))
    steps = [geometry(each, *place) for each in trained for place in places]
    expected = [
        f"{percent(test['accuracy'])} {committed('reports/metrics/download.json')['test']} 95 "
        f"{percent(test['accuracy_ci_low'], test['accuracy_ci_high'], test['majority_accuracy'])}",
        f"2 6 6 {points(mixing['mean'][6])} 6",
        f"6 {shorter[0]} 33 64 {shorter[1]} 65 128 {long} 129 256 {len(short)} {len(less_sure)} 4.2 "
        f"{points(less_sure.mean())} {len(sure)} {points(sure.mean())} {long.split()[1]} 3.3",
        f"6 {' '.join(cosines)}",
        f"{percent(*in_attention('finetuned', 'share_class')[ENDS])} 6 "
        f"{percent(in_attention('pretrained', 'share_class')['mean'])} 4 {percent(*map(kept, EDITS))} 40 "
        f"{percent(right['mean'])}",
        f"{control('random_weights', 'random')} {control('shuffled_words', *trained)} "
        f"{control('text_mean_value', *trained)} {control('corpus_value', *trained)} "
        f"{' '.join(points(rise_of(name)) for name in ('text_mean_value', 'corpus_value'))} "
        f"{100 * left[3]:.1f} 3 {-100 * left[6]:.1f} 6",
        f"{reviews['negative']} {correlation('negative')} {reviews['positive']} {correlation('positive')} "
        f"{given_length('positive')} {correlation('all')} {given_length('all')}",
        f"4 16 {percent(first['mean'], last['mean'])} {change(moved)} 6 {change(within.loc[6])} "
        f"{change(same_tokens)} 4",
        f"6 {percent(exchanged[0]['mean'], exchanged[1]['mean'])} {change(exchanged[2])} {change(exchanged[5])} "
        f"{percent(exchanged[6]['mean'], exchanged[7]['mean'])} {change(exchanged[8])} {change(exchanged[11])}",
        f"8 6 {' '.join(steps)} {geometry('finetuned', 'cosine_input', 'ffn_norm')}",
    ]
    assert_numbers("docs/results.md", "- The classifier is right on", "What these numbers do not show:", expected)


def test_own_share_of_the_default_run_is_that_of_its_table() -> None:
    shares = rows(f"{PLOTS}measure/parts.csv", quantity="own_share")
    wide = shares.pivot(index=["checkpoint", "layer"], columns="rule", values="mean").drop(CHANGE)
    assert 5 < 100 * (wide["chord"] - wide["tangent"]).abs().max() < 6
    projected = [
        row(f"{PLOTS}measure/parts.csv", quantity="own_projection", layer=6, rule="chord", checkpoint=each)["mean"]
        for each in CHECKPOINTS[:2]
    ]
    start, end = "Before fine-tuning about half", "This is one training"
    after = [wide.loc[("finetuned", 6), rule] for rule in RULES]
    assert_numbers("docs/results.md", start, end, [f"{percent(*after)} 6 {percent(*projected)}"])
    assert shares["documents"].eq(8).all()


def parsed(document: str, name: str) -> list[list[str]]:
    """Return the cells of a document's marked table, without the two lines of its head."""
    lines = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end of table -->", committed(document), re.DOTALL)
    assert lines
    return [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines[1].splitlines()[2:]]


def test_table_of_ratios_holds_the_numbers_of_its_own_csv() -> None:
    path, table = f"{PLOTS}measure/mixing_weighted.csv", parsed("docs/results.md", "overall")
    where = {"weight": "token", "tokens_of": "all", "layer": "all"}
    assert len(table) == committed(path)["method"].nunique()
    for method, _, *cells in table:
        for checkpoint, cell in zip(CHECKPOINTS, cells, strict=True):
            numbers = [float(number) for number in re.findall(r"[-+]?\d+\.\d", cell)]
            true = row(path, method=method, checkpoint=checkpoint, **where)
            assert numbers == [pytest.approx(100 * true[name], abs=0.051) for name in ENDS[: len(numbers)]]


@pytest.mark.parametrize(
    "name", ["settings", "by_layer", "fits", "lengths", "trainings", "second_model", "edits", "planted"]
)
def test_tables_of_the_study_are_those_of_the_committed_csv(name: str) -> None:
    elsewhere = {"planted": "docs/measures/planted.md", "trainings": "docs/measures/statistics.md"}
    document = elsewhere.get(name, "docs/study/README.md")
    contents = {found: content for _, found, content, _ in MARKED.findall(committed(document))}
    assert contents[name] == results(committed)[name]


def test_each_architecture_of_the_hub_works_or_is_refused_with_the_sentence_in_the_table() -> None:
    outcomes = pd.read_csv(REPOSITORY / "docs/classifiers.csv").set_index("architecture")["outcome"].to_dict()
    assert list(outcomes) == list(classifiers.CLASSIFIERS)
    for name, outcome in outcomes.items():
        if outcome == classifiers.WORKS:
            assert name in FAMILIES  # tests/test_families.py compares each of them with a reference
        else:
            assert classifiers.outcome(name)["outcome"] == outcome


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_of_declarations_are_up_to_date(document: str) -> None:
    text, declared = (REPOSITORY / document).read_text(encoding="utf-8"), tables()
    contents = {name: content for _, name, content, _ in MARKED.findall(text)}
    assert contents
    assert [name for name in contents.keys() & declared.keys() if contents[name] != declared[name]] == []


def test_probes_and_edits_of_other_settings_are_those_of_their_tables() -> None:
    probes = committed(f"{STUDY}answer_probes.csv")
    true, permuted, rare, mean = "true labels", "permuted labels", "rare word", "mean pooling"
    by_key = probes.set_index(["checkpoint", "setting", "target", "kind", "layer"]).sort_index()
    before, lens = {"checkpoint": "before"}, "lens: predicted"

    def told(target: str, kind: str = "the", layer: int = 6, setting: str = true, checkpoint: str = "after") -> str:
        return percent(by_key.loc[(checkpoint, setting, target, kind, layer), "mean"])

    def with_interval(target: str, kind: str = "the", setting: str = true) -> str:
        row = by_key.loc[("after", setting, target, kind, 6)]
        return f"{percent(row['mean'])} % {ends(row)}"

    def ends(row: pd.Series) -> str:
        return f"[{percent(row['ci_low'])}, {percent(row['ci_high'])}]"

    def by_layer(kind: str, checkpoint: str = "after") -> str:
        third, fourth, fifth = (told("sentiment", kind, layer, checkpoint=checkpoint) for layer in (3, 4, 5))
        return f"{third}, {fourth} and {fifth} %"

    single = [share for setting in (true, permuted, mean) for share in probed(setting, "word", "the", 6)]
    random = probes[probes["target"] == "random by review"]
    changes = random.loc[random["checkpoint"] == CHANGE, "mean"].abs()
    accuracies = random.loc[random["checkpoint"] != CHANGE, "mean"]
    noise = by_key.loc[(CHANGE, true, "random by review", "the", 6)]
    embedded = probes.query("layer == 0 and kind == 'the' and target == 'sentiment' and checkpoint != @CHANGE")["mean"]
    (seeds,) = {int(by_key.loc[("after", setting, "sentiment", "the", 6), "seeds"]) for setting in (true, permuted)}
    assert (by_key.loc[[("after", rare, "word", "the", layer) for layer in (4, 5, 6)], "mean"] > 0.99).all()
    text = " ".join(committed(f"{STUDY}README.md").split())
    for sentence in (
        f"they read the sentiment in {told('sentiment', **before)} % and the rare word in {told('word', **before)} %",
        f"has a part, the sentiment in {percent(embedded.min())} to {percent(embedded.max())} %.",
        f"they read it in {told('word')} (true labels), {told('word', setting=permuted)} (permuted) and "
        f"{told('word', setting=mean)} % (mean pooling), in single models in {percent(min(single))} to "
        f"{percent(max(single))} %.",
        f"lie between {percent(accuracies.min())} and {percent(accuracies.max())} % over all layers",
        f"differ by up to {percent(changes.max())} points before and after.",
        f"such a difference is {percent(noise['mean'])} points {ends(noise)} with true labels, adjusted p "
        f"{noise['p_holm']:.2f}.",
        f"the rare word in {told('word', setting=rare)} % of cases where the model was trained for it "
        f"({told('word', **before)} % before; chance is about 50 %), and the sentiment in "
        f"{with_interval('sentiment', setting=rare)} ({told('sentiment', **before)} % before).",
        f"the probe tells the sentiment in {with_interval('sentiment')} and the word in {with_interval('word')}; with "
        f"permuted labels the sentiment in {with_interval('sentiment', setting=permuted)}. Layer 4 of the base model "
        f"gives the sentiment in {told('sentiment', layer=4, **before)} %",
        f"predicted class in {with_interval(lens)} of cases, and of other tokens in {with_interval(lens, 'other')} "
        f"({seeds} seeds); the better constant answer would in {constant_class(true)} % of reviews. With permuted "
        f"labels it does so in {with_interval(lens, setting=permuted)}, where a constant would in "
        f"{constant_class(permuted)} %",
        f"{told(lens, 'other')} % of other tokens: confirmed in kind; with permuted labels "
        f"{with_interval(lens, 'other', permuted)} |",
        f"holds the word in {told('word', 'the', 3, rare)} % of cases after layer 3 and in nearly all from layer 4 on.",
        f'off [CLS] in {by_layer("cls")} of cases after layers 3, 4 and 5, off a "the" in {by_layer("the")}, off '
        f"other tokens in {by_layer('other')}; before training off [CLS] in {by_layer('cls', 'before')} |",
    ):
        assert sentence in text, sentence
    own = "donor: the review itself"  # whose class is the review's
    constant = edited(own, "donors_class", setting=permuted)["mean"]
    constant -= edited(own, "above_constant", setting=permuted)["mean"]
    class_mean, no_values = (edited(edit, setting=permuted) for edit in ("class mean", "no values"))
    assert no_values["mean"] == pytest.approx(constant, abs=2e-4)  # both are rounded to four digits
    donor = -edited(DONOR, "above_constant", setting=permuted)[ENDS]
    of_rare_word = [edited(edit, setting=rare)["mean"] for edit in ("class mean", "no values", "class erased")]
    without_others = edited("largest other directions erased", setting=rare)["mean"]
    assert of_rare_word[0] == of_rare_word[1] == without_others
    for sentence in (
        f"alone would keep {percent(constant)} %",
        f"the class's mean keeps {percent(class_mean['mean'])} % [{percent(class_mean['ci_low'])}, "
        f"{percent(class_mean['ci_high'])}], and a donor of the other class brings its class out "
        f"{percent(donor.iloc[0])} points [{percent(donor.iloc[2])}, {percent(donor.iloc[1])}] less often "
        f"than a constant would ({class_mean['seeds']} models)",
        f"brings it out: {percent(of_rare_word[0])} % keep their class with the class's mean, as many as without",
        f"({percent(of_rare_word[2])} % keep it without the class, {percent(without_others)} % without as much in the",
    ):
        assert sentence in text, sentence


def words(document: str) -> str:
    """Return a document as one line."""
    return " ".join(committed(document).split())


def test_numbers_in_explanations_are_those_of_their_tables() -> None:
    before = {"checkpoint": "pretrained", "point": "attention"}

    def by_layer(measure: str) -> pd.Series:
        return rows(f"{PLOTS}measure/geometry.csv", measure=measure, **before)["mean"]

    def without_sink(method: str) -> pd.Series:
        where = {"control": "without_special_sources", "checkpoint": "pretrained", "method": method}
        return rows(f"{PLOTS}measure/mixing_controls.csv", **where)["below"]

    first, value = by_layer("attention_to_first")[1:], by_layer("value_of_first")[1:]
    last, largest = by_layer("attention_to_last"), by_layer("massive_activation")
    weights, norms = without_sink("attn_w"), without_sink(RATIO)
    kept = committed(f"{STUDY}few_tokens.csv").pivot(index="tokens", columns="layout", values="neighbours_kept")
    longer = [
        row(f"{STUDY}lengths.csv", measure="ratio", length=each, layer=6, checkpoint=CHANGE) for each in (64, 256)
    ]
    rise, remains = (
        study("layers", measure=f"{name} {RATIO}, all layers", checkpoint=CHANGE)["mean"]
        for name in ("ratio", "text_mean_value")
    )
    spreads = {setting: largest_spread_of_seeds(setting) for setting in ("true labels", "permuted labels")}

    def listed(layout: str) -> str:
        *some, end = percent(*kept[layout]).split()
        return f"{', '.join(some)} and {end} %"

    expected = {
        "docs/measures/geometry.md": (
            f"[CLS] gets {percent(first.min())} to {percent(first.max())} % of the attention in layers 2 to 6, with a "
            f"value {value.min():.2f} to {value.max():.2f} times as long as those between; [SEP] gets at most "
            f"{percent(last.max())} %.",
            f"`attn_w` falls by {100 * weights.mean():.1f} points on average, `{RATIO}` by {100 * norms.mean():.1f} "
            f"(at most {100 * norms.max():.1f} in a layer).",
            f"The largest number is {largest.min():.0f} to {largest.max():.0f} times the median",
        ),
        "docs/measures/maps.md": (
            f"cut to {', '.join(map(str, kept.index[:-1]))} and {kept.index[-1]} tokens",
            f"UMAP keeps {listed('separate')} of the 15 nearest (at 20 tokens 9), two principal components "
            f"{listed('pca')}".removesuffix(" %"),
        ),
        "docs/measures/which.md": (
            f"change by {percent(longer[0]['mean'])} points if they are cut to 64 tokens and by "
            f"{percent(longer[1]['mean'])} if to 256".replace("by ", "by +"),
        ),
        "docs/explanation.md": (f"{points(rise)} points, is {points(remains)} with the text's own mean value",),
        "docs/guide.md": (
            "five seeds of one setting of [the study](study/README.md) had a standard deviation of "
            f"{spreads['true labels'][1]} points in layer {spreads['true labels'][0]} with true labels and of "
            f"{spreads['permuted labels'][1]} in layer {spreads['permuted labels'][0]} with permuted ones",
        ),
    }
    for document, sentences in expected.items():
        assert [sentence for sentence in sentences if sentence not in words(document)] == [], document


def largest_spread_of_seeds(setting: str) -> tuple[int, float]:
    """Return the layer in which the seeds of a setting differ most, and the standard deviation there, in points."""
    where = {"checkpoint": CHANGE, "measure": f"ratio {RATIO}", "setting": setting}
    seeds = rows(f"{STUDY}answer_layers.csv", **where)
    half = seeds["ci_high"] - seeds["mean"]
    deviations = 100 * half * np.sqrt(seeds["seeds"]) / student.ppf(0.975, seeds["seeds"] - 1)
    return int(deviations.idxmax()), round(float(deviations.max()), 1)


def test_facts_that_several_documents_state_are_the_same_and_true() -> None:
    documents = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "llms.txt", "docs/guide.md", "docs/reference.md")
    texts = {name: words(name) for name in documents}
    everything = " ".join(texts.values())
    for pattern, expected in {
        r"make repro[^.]*?(\w+ to \w+ minutes) on 2 cores": {"four to eight minutes"},
        r"(\d+) families": {str(len(FAMILIES))},
        r"Python (3\.\d+ to 3\.\d+)": {"3.11 to 3.13"},
        r"(\d+) (?:short )?film reviews": {str(committed("reports/metrics/download.json")["train"])},
        r"torch for GPUs \(([\d.]+) GB\)": {"2.7"},
        r"CPU build has ([\d.]+) GB|builds for CPUs \(([\d.]+) GB\)": {"0.2"},
        r"([\d.]+) \(AMD\) to [\d.]+ times|take ([\d.]+) times as long as with": {"1.15"},
    }.items():
        stated = {next(filter(None, match.groups())) for match in re.finditer(pattern, everything)}
        assert stated == expected, pattern
    downloads = re.search(r"torch for GPUs: ([\d.]+) GB, and ([\d.]+) GB of CUDA", texts["docs/guide.md"])
    assert downloads
    assert sum(map(float, downloads.groups())) == pytest.approx(2.7)
    profiles = {name for text in texts.values() for name in re.findall(r"profiles/(\w+\.txt)", text)}
    assert "paper.txt" in re.findall(r"profiles/(\w+\.txt)", texts["README.md"])
    assert [name for name in profiles if not (REPOSITORY / "profiles" / name).is_file()] == []
    assert len(committed("README.md").encode()) <= 8000


def test_metrics_in_documents_are_the_committed_ones() -> None:
    metrics = json.dumps([committed(f"reports/metrics/{name}.json") for name in ("finetune", "measure", "reduce")])
    for document in ("README.md", "docs/guide.md", "docs/measures/maps.md"):
        shown = re.findall(r"^reports/metrics/\S+\s+\S+\s+([\d.]+)", committed(document), flags=re.MULTILINE)
        assert [number for number in shown if number not in metrics] == [], document
