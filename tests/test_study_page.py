"""Every number in the text of docs/study/README.md is that of a csv file in git."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import REPOSITORY

from docs.derived_values import compute_paired_effect

STUDY = "docs/study/"
RATIO, CHANGE = "attnresln_n", "difference"
EVERY_LAYER = "ratio attnresln_n, all layers"
BOTH_LABELS = "true labels minus permuted labels"
ENDS = ["mean", "ci_low", "ci_high"]
DONOR = "donor of the other class"
TRAINED_ON = ("given", "permuted", "rare word")
OWN_LEVELS = (("given", "pretrained"), ("given", "finetuned"), ("permuted", "finetuned"))
PAIR = ("given", "permuted", "given minus permuted")


@cache
def content(path: str) -> Any:
    """Return a csv as a table, another file as text."""
    file = REPOSITORY / path
    return pd.read_csv(file) if path.endswith(".csv") else file.read_text("utf-8")


def rows(path: str, **where: object) -> pd.DataFrame:
    """Return the rows of a csv with these values, by layer where it has layers."""
    table = content(path)
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
    text = content(document)
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
    rise = fitted("ratio, mean of layers", PAIR[2])
    class_shares = [fitted("share: the class", labels, 6, "finetuned") for labels in PAIR[:2]]
    both_class_shares = " ".join(percent(*each[ENDS]) for each in class_shares)
    sentences = [
        f"1 150 {percent(*(each['mean'] for each in averages[:2]))} {change(over_layers(CHANGE))} "
        f"{change(over_layers(CHANGE, permuted))} {change(over_layers(CHANGE, both))} {change(rise)}",
        f"2 {of_class} 4 {adjusted} {both_class_shares}",
        f"3 {percent(*donor[ENDS])} 160 4 {percent(*donor_last[ENDS])} 6 "
        f"{' '.join(percent(*each) for each in above)} {' '.join(percent(*each) for each in pooled)} "
        f"4 {percent(*erased[ENDS])}",
    ]
    assert_numbers("docs/study/README.md", "1. In one small", "![The class", sentences)
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
    compared = dict(zip(ENDS, less_corpus[["difference", "between_seeds_low", "between_seeds_high"]], strict=True))
    in_pairs = compute_paired_effect(content, less_corpus["measure"])
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
    assert f"each model would keep {percent(better_constant())} %" in content("docs/study/README.md")


def test_findings_of_trainings_that_fit_are_those_of_their_tables() -> None:
    fits = content(f"{STUDY}fits.csv")
    assert (fits.loc[fits["split"] == "train", "accuracy"] == 1).all()
    assert fits.groupby(["labels", "split"])["seed"].nunique().eq(5).all()
    means = fits.groupby(["split", "labels"])[["accuracy", "margin", "certainty"]].mean()
    margins = [f"{means.loc[('train', labels), 'margin']:.1f}" for labels in TRAINED_ON]
    scores = [means.loc[("test", labels), "accuracy"] for labels in TRAINED_ON]
    certainty = means.loc["test", "certainty"]
    text = " ".join(content(f"{STUDY}README.md").split())
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
    assert content(f"{STUDY}lengths.csv")["seeds"].eq(5).all()

    def last_layer(measure: str, length: int) -> pd.Series:
        return row(f"{STUDY}lengths.csv", measure=measure, length=length, layer=6, checkpoint=CHANGE)

    ratios = {length: last_layer("ratio", length) for length in (64, 96, 256)}
    assert all(each["ci_low"] > 0 for each in ratios.values())
    falls = [f"{-100 * last_layer('own share', length)['mean']:.1f}" for length in ratios]
    lengths = " ".join(f"{change(each)} {length}" for length, each in ratios.items())
    claims = [f"6 {lengths} {ratios[256]['tokens']:.0f} {' '.join(falls)}", ""]
    assert_numbers("docs/study/README.md", "- **The rise is there", "## A second model", claims)


def test_probes_and_edits_of_other_settings_are_those_of_their_tables() -> None:
    probes = content(f"{STUDY}answer_probes.csv")
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
    text = " ".join(content(f"{STUDY}README.md").split())
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
