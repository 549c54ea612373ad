"""The headline and sentences of a run report results with the right verdict, and claim no effect without evidence."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import REPOSITORY

from attnmix.core.statistics import MIN_INTERVAL_DOCUMENTS, MIN_SIMULTANEOUS, Interval, Verdict, verdict
from attnmix.core.store.results import TextResults
from attnmix.page.answer import OWN_SHARE_DEFINITION, answer
from attnmix.page.cautions import list_cautions
from attnmix.page.sentences import Subject, _describe_controls, _describe_selection, class_evidence, class_lens
from attnmix.page.verdicts import interval_text, points
from attnmix.results.verdicts import name_directions

GIVEN = "contributions of other tokens in layer 2 are"
GLOSSARY = (REPOSITORY / "attnmix/page/src/ui.tsx").read_text("utf-8").partition("const GLOSSARY")[2].partition("};")[0]
MAX_WORDS = 20  # in a summary sentence


class PlantedRun:
    """Stub of a run with two layers and only the tables that the summary sentences use.

    The mean ratio rises from 0.25 by `change`, and the own share after the last layer rises from 0.5 by `own`. `share`
    is the variance share of the class in layer 2 after fine-tuning, and `chance` is this share with permuted classes.
    """

    def __init__(
        self,
        change: float = 0.1,
        share: float = 0.3,
        chance: float = 0.02,
        own: float = -0.3,
        documents: int = 40,
    ) -> None:
        layers = pd.DataFrame({"layer": [1, 2], "method": "attnresln_n", "tokens": 10})
        after = layers.assign(checkpoint="finetuned", mean=[0.2, 0.3], documents=documents, ci_low=0.1, ci_high=0.4)
        before = after.assign(checkpoint="pretrained", mean=[0.2 - change, 0.3 - change])
        self.curves = pd.concat([after, before])
        self.differences = layers.assign(checkpoint="difference", mean=change, documents=documents)
        self.differences = self.differences.assign(simultaneous_low=change - 0.02, simultaneous_high=change + 0.02)
        controls = [("corpus_value", "finetuned"), ("shuffled_words", "finetuned"), ("random_weights", "random")]
        parts = [after.assign(control=control, checkpoint=name) for control, name in controls]
        parts.append(self.differences.assign(control="shuffled_words", mean=0.07))
        self.tables = {
            "measure/mixing_weighted": create_mean_ratios(change, documents),
            "measure/mixing_controls": pd.concat(parts).assign(ratio_minus_control=np.nan),
            "measure/geometry": create_class_shares(share, chance, documents),
            "measure/exchange": create_own_shares(own, documents),
            "faithfulness/class_use": create_class_use(),
            "faithfulness/margins": pd.DataFrame({"predicted": ["good", "bad", "good", "good"]}),
        }
        self.tokens = pd.DataFrame({"document": ["test/0"] * 10})

    def matrices(self, *_: str) -> list[str]:
        return []

    @property
    def mixing(self) -> Any:
        return self.curves, self.differences

    def table(self, name: str) -> pd.DataFrame:
        return self.tables[name]


def create_mean_ratios(change: float, documents: int) -> pd.DataFrame:
    """Return the rows of `mixing_weighted.csv` for the mean over all layers and tokens."""
    means = {"pretrained": 0.25, "finetuned": 0.25 + change, "difference": change}
    table = pd.Series(means, name="mean").rename_axis("checkpoint").reset_index()
    table = table.assign(ci_low=change - 0.01, ci_high=change + 0.01, method="attnresln_n")
    return table.assign(weight="token", tokens_of="all", layer="all", documents=documents)


def create_class_shares(share: float, chance: float, documents: int) -> pd.DataFrame:
    """Return the class shares in `geometry.csv`; the share in layer 1 is a tenth of the share in layer 2."""
    rows = []
    for layer, size in ((1, 0.1), (2, 1.0)):
        means = (
            ("pretrained", "share_class", 0.0),
            ("finetuned", "share_class", share * size),
            ("difference", "share_class", share * size),
            ("finetuned", "share_class_permuted", chance),
        )
        for checkpoint, measure, mean in means:
            rows.append((checkpoint, layer, measure, mean, mean - 0.01, mean + 0.01))
    table = pd.DataFrame(rows, columns=["checkpoint", "layer", "measure", "mean", "ci_low", "ci_high"])
    return table.assign(documents=documents)


def create_own_shares(own: float, documents: int) -> pd.DataFrame:
    """Return the rows of `exchange.csv` for the own share, which grows linearly with the layer."""
    values = {"pretrained": 0.5, "finetuned": 0.5 + own, "difference": own}
    rows = []
    for donor, size in (("all", 1.0), ("same_minus_other", 0.2)):
        for layer in (0, 1, 2):
            for checkpoint, value in values.items():
                mean = size * value * layer / 2
                rows.append((checkpoint, donor, "own_share", layer, mean, mean - 0.1, mean + 0.1, documents))
    columns = ["checkpoint", "donor", "quantity", "layer", "mean", "ci_low", "ci_high", "documents"]
    return pd.DataFrame(rows, columns=columns)


def create_class_use() -> pd.DataFrame:
    """Return rows of `class_use.csv`: equal effects of all replaced values, and the lens agreement in layer 2."""
    edits = ("text_mean", "corpus_mean", "other_class")
    rows = [("class_kept", name, layer, 0.9) for name in edits for layer in (1, 2)]
    rows.append(("lens_agreement", "others", 2, 0.94))
    return pd.DataFrame(rows, columns=["quantity", "group", "layer", "mean"])


class PlantedTexts(PlantedRun, TextResults):
    """A `PlantedRun` for texts in memory, with one model before and after fine-tuning."""


class PlantedModels(PlantedTexts):
    """`PlantedRun` for texts in memory and two named models."""

    model_names = ("one", "other")


def planted(**values: Any) -> Any:
    return PlantedRun(**values)


@pytest.mark.parametrize(
    ("own", "ending"), [(-0.3, "training run"), (0.3, "training run"), (0.05, ": the change is inconclusive")]
)
def test_headline_reports_own_share_before_and_after(own: float, ending: str) -> None:
    found = answer(planted(own=own))
    states = f"50% before fine-tuning, {50 + 100 * own:.0f}% after"
    assert found["headline"].startswith(f"Own share of a token's last vector: {states}, in this one training run")
    assert found["headline"].endswith(ending)
    before, after = (series["values"] for series in found["chart"]["series"])
    assert before == pytest.approx([0.25, 0.5])
    assert after == pytest.approx([0.25 + own / 2, 0.5 + own])


STATES = "50% before fine-tuning, 20% after"


@pytest.mark.parametrize(
    ("kind", "finetuned", "states"),
    [
        (PlantedRun, True, f"{STATES}, in this one training run"),
        (PlantedRun, False, STATES),
        (PlantedTexts, True, STATES),
        (PlantedModels, True, "50% in one, 20% in other"),
    ],
)
def test_only_headline_of_run_with_training_names_one_training_run(kind: Any, finetuned: bool, states: str) -> None:
    for documents in (1, 2, 40):
        found = answer(kind(documents=documents), finetuned=finetuned)
        assert found["headline"] == f"Own share of a token's last vector: {states}"
        noun = "review" if kind is PlantedRun else "text"
        said = " ".join([*found["sentences"], *found["notes"].values()])
        assert ("training" in said, f" {noun}" in said) == (False, True)
        assert ("too few for an {interval}" in said) == (documents < MIN_INTERVAL_DOCUMENTS)
        assert ("One text is too few" in said) == (documents == 1)
        assert ("95% {interval}" in said) == (documents == 40)


@pytest.mark.parametrize(
    ("kind", "finetuned", "ending"),
    [
        (PlantedRun, True, ", in this one training run on synthetic reviews"),
        (PlantedRun, False, ", on synthetic reviews"),
        (PlantedTexts, True, " after"),
    ],
)
def test_headline_names_synthetic_reviews(kind: Any, finetuned: bool, ending: str) -> None:
    headlines = [answer(kind(), finetuned=finetuned, synthetic=synthetic)["headline"] for synthetic in (True, False)]
    assert headlines[0].endswith(ending)
    assert "synthetic" not in headlines[1]


def test_few_reviews_have_no_interval() -> None:
    run = planted(own=0.05)
    run.tables["measure/exchange"]["documents"] = 7
    found = answer(run)
    assert found["headline"].endswith("training run")
    assert found["sentences"][0].endswith(
        ": it changes by +5.0 points; 7 reviews are too few for an {interval} and a verdict."
    )
    assert len(found["sentences"][0].split()) <= MAX_WORDS


def test_summary_sentences_have_numbers_and_glossary_terms() -> None:
    change, by_class, ratio = answer(planted(change=0.1, own=-0.3))["sentences"]
    assert ": it changes by \u221230.0 points (95% {interval} \u221240.0 to \u221220.0), 40 reviews" in change
    assert by_class == (
        "Its difference between {donors} of the same and of another predicted class: "
        "+10.0 points before and +4.0 points after fine-tuning."
    )
    assert ": it is 15% before and 25% after fine-tuning, mean over layers and tokens, 40 reviews" in ratio
    for sentence in (change, by_class, ratio):
        assert len(sentence.split()) <= MAX_WORDS
    for sentence in (change, by_class, ratio):
        terms = re.findall(r"\{(.*?)\}", sentence)
        assert terms
        assert all(re.search(rf'^  "?{term.lower()}"?:', GLOSSARY, re.MULTILINE) for term in terms), terms


@pytest.mark.parametrize(("low", "expected"), [(1.01, True), (0.99, False)])
@pytest.mark.parametrize(
    ("kind", "model"),
    [(PlantedRun, "the pretrained model"), (PlantedTexts, "the pretrained model"), (PlantedModels, "one")],
)
def test_total_effect_above_1_is_a_caution(
    monkeypatch: pytest.MonkeyPatch, kind: Any, model: str, low: float, expected: bool
) -> None:
    monkeypatch.setattr(kind, "layouts", [], raising=False)
    run = kind()
    excess = {"checkpoint": "pretrained", "donor": "all", "quantity": "total_own", "layer": 2, "mean": 1.07}
    rows = pd.DataFrame([excess | {"simultaneous_low": low}])
    run.tables["measure/exchange"] = pd.concat([run.tables["measure/exchange"], rows])
    columns = ["quantity", "reference", "checkpoint", "method", "layer", "mean", "documents"]
    run.tables["measure/derivatives"] = pd.DataFrame(columns=columns)
    caution = f"In {model}, exchanging single tokens displaces vectors after layer 2 further than"
    assert (caution in list_cautions(Subject("a model"), run).answer) == expected


def test_no_class_sentences_without_classes() -> None:
    run = planted()
    exchange = run.tables["measure/exchange"]
    run.tables["measure/exchange"] = exchange[exchange["donor"] == "all"]
    assert not any("class" in sentence for sentence in answer(run)["sentences"])


def test_own_share_notes_match_definition() -> None:
    run = planted(documents=8)
    run.tables["measure/exchange"]["tokens"] = 8 * 6
    found = answer(run)
    assert found["notes"] == {
        "mixing ratio of one layer": "Here it is the mean over 8 reviews, weighted by tokens.",
        "own share": "Here it is the mean over 48 tokens of 8 reviews.",
    }
    guide = " ".join((REPOSITORY / "docs/measures/exchange.md").read_text("utf-8").split())
    for text in (GLOSSARY, guide, found["chart"]["unit"]):
        assert OWN_SHARE_DEFINITION in text


COMMON = "common to texts of one predicted class, but not to all texts"
INCONCLUSIVE = f"It is inconclusive whether contributions of other tokens are {COMMON}"


@pytest.mark.parametrize(
    ("change", "share", "said_first", "verb"),
    [
        (0.1, 0.6, f"After fine-tuning, {GIVEN} mostly {COMMON}.", "rises"),
        (0.1, 0.3, f"After fine-tuning, {GIVEN} partly {COMMON}.", "rises"),
        (0.1, 0.05, f"After fine-tuning, {GIVEN} to a small extent {COMMON}.", "rises"),
        (-0.1, 0.0, INCONCLUSIVE, "falls"),
        (0.0, 0.0, INCONCLUSIVE, "is inconclusive"),
    ],
)
def test_class_verdict_for_each_outcome(change: float, share: float, said_first: str, verb: str) -> None:
    said, ratio, part, *rest = class_evidence(planted(change=change, share=share))
    assert said.startswith(said_first)
    assert verb in ratio
    assert f"{25 + 100 * change:.1f}% after it" in ratio
    low, high = (points(change + end) for end in (-0.01, 0.01))
    assert f"95% interval {low} to {high}, 40 reviews" in ratio
    assert f"{100 * share:.0f}% of the squared length of the contributions of other" in part
    assert "In layer 2" in part or share == 0
    assert "94% of these tokens" in class_lens(planted(change=change, share=share))[0]
    assert "A constant prediction would keep 75% of the predicted classes." in rest[-1]


def test_ratio_and_control_are_means_over_the_same_texts() -> None:
    run = planted()
    table = run.tables["measure/mixing_controls"]
    is_shuffled = (table["control"] == "shuffled_words") & (table["checkpoint"] == "finetuned")
    table.loc[is_shuffled, ["mean", "ratio_minus_control"]] = (0.2, 0.13)  # a mean ratio of 33 % in these texts
    sentence = next(each for each in _describe_controls(run) if each.startswith("Averaged over layers"))
    assert sentence.startswith(
        "Averaged over layers, the mixing ratio is 33%. It is 20% with the words in random order"
    )


@pytest.mark.parametrize("names", [[], ["shuffled_words"], ["corpus_value", "random_weights"]])
def test_sentences_mention_only_measured_controls(names: list[str]) -> None:
    run = planted()
    controls = run.tables["measure/mixing_controls"]
    run.tables["measure/mixing_controls"] = controls[controls["control"].isin(names)]
    text = " ".join(_describe_controls(run))
    mentioned = {
        "shuffled_words": "the words in random order",
        "random_weights": "random weights",
        "corpus_value": "the mean over tokens of other texts with the same token class and a similar position",
    }
    assert {name for name, words in mentioned.items() if words in text} == set(names)
    assert "Over all layers, fine-tuning changes the ratio by +10.0 percentage points." in text


@pytest.mark.parametrize(("before", "is_open"), [(0.005, True), (0.02, False)])
def test_verdict_before_fine_tuning_follows_interval(before: float, is_open: bool) -> None:
    run = planted()
    geometry = run.tables["measure/geometry"]
    is_before = geometry["checkpoint"] == "pretrained"
    geometry.loc[is_before, ["mean", "ci_low", "ci_high"]] = (before, before - 0.01, before + 0.01)
    class_sentence = class_evidence(run)[2]
    is_inconclusive = (
        "before fine-tuning; it is inconclusive whether it was above 0, because the interval includes 0."
        in class_sentence
    )
    assert is_inconclusive == is_open
    assert f"It was {100 * before:.0f}% before fine-tuning" in class_sentence


def test_interval_text_keeps_nonzero_digits() -> None:
    minus = "\N{MINUS SIGN}"
    assert interval_text(-0.0004, 0.001, 40, "texts") == f"95% interval {minus}0.04 to +0.10, 40 texts"
    assert interval_text(0.0, 0.1, 40, "texts") == "95% interval +0.0 to +10.0, 40 texts"
    assert interval_text(-1e-9, 0.1, 40, "texts") == "95% interval 0.0 to +10.0, 40 texts"


@pytest.mark.parametrize(
    ("documents", "ending"), [(8, ", 8 reviews, which are too few for a verdict."), (20, ", 20 reviews.")]
)
def test_few_reviews_have_no_verdict(documents: int, ending: str) -> None:
    assert answer(planted(documents=documents))["sentences"][0].endswith(ending)


@pytest.mark.parametrize("layouts", [["pca"], ["separate"], ["pca", "aligned"]])
def test_cautions_match_map_kinds(layouts: list[str]) -> None:
    run = planted()
    run.layouts = layouts
    columns = ["quantity", "reference", "checkpoint", "method", "layer", "mean", "documents"]
    rows = [("agreement", "layer_input", "finetuned", "attnresln_n", layer, 0.1 * layer, 4) for layer in (1, 2)]
    run.tables["measure/derivatives"] = pd.DataFrame(rows, columns=columns)
    cautions = list_cautions(Subject("a model"), run)
    assert list(cautions.map) == layouts
    for layout, said in cautions.map.items():
        assert ("Distances between clusters" in said) == (layout != "pca")
        assert ("Only two principal components are shown" in said) == (layout == "pca")
    assert "with derivatives in the fine-tuned model is 0.10 (layer 1) to 0.20 (layer 2)." in cautions.ratio


@pytest.mark.parametrize(
    ("known", "sentences"),
    [
        ({}, ["Results differ for other texts."]),
        ({"dataset": "reviews"}, ["The intervals describe means over reviews, for one fine-tuning seed."]),
        (
            {"dataset": "reviews", "synthetic": True},
            [
                "The intervals describe means over reviews, for one fine-tuning seed.",
                "According to the dataset card, a program wrote the reviews. Results can differ for real reviews.",
            ],
        ),
        (
            {"dataset": "reviews", "finetuned": False, "base": "another model"},
            [
                "No model was fine-tuned (finetune.epochs: 0). Here, “fine-tuned” refers to a model without changes, "
                "and “pretrained” to another model, which may be unrelated to it.",
                "The intervals describe means over reviews, for one fine-tuning seed.",
            ],
        ),
    ],
)
def test_summary_has_the_cautions_that_limit_it(known: Any, sentences: list[str]) -> None:
    run = planted()
    run.layouts = ["pca"]
    columns = ["quantity", "reference", "checkpoint", "method", "layer", "mean", "documents"]
    run.tables["measure/derivatives"] = pd.DataFrame(columns=columns)
    assert list_cautions(Subject("a model", **known), run).answer == " ".join(sentences)


def test_selection_rule_names_longer_texts() -> None:
    run = planted()
    run.documents = pd.DataFrame({"document": ["test/0", "test/1"], "tokens": [64, 69]})
    assert _describe_selection(Subject("a model", selection="A rule."), run).endswith(
        "For test/1 (69 tokens), no text within the length limit met the rule."
    )
    assert _describe_selection(Subject("a model"), run) == ""
    run.documents["tokens"] = 64
    assert _describe_selection(Subject("a model", selection="A rule."), run) == "A rule."


def sentences_of(run: Any) -> str:
    found = answer(run)
    return " ".join([found["headline"], *found["sentences"], *class_evidence(run)])


@pytest.mark.parametrize("documents", [4, 19, 20])
def test_few_texts_have_no_verdict(documents: int) -> None:
    text = sentences_of(planted(change=0.077, documents=documents))
    verdicts = re.findall(r"\b(rises|falls|mostly|partly|inconclusive|hardly depends)\b", text)
    assert bool(verdicts) == (documents >= 20)
    assert (f"{documents} reviews are too few for a verdict, which needs 20 or more" in text) == (documents < 20)
    assert f"{documents} reviews" in text
    assert ("95% interval" in text) == (documents >= 8)


@pytest.mark.parametrize("documents", [4, 40])
def test_interval_including_zero_is_inconclusive(documents: int) -> None:
    text = sentences_of(planted(change=0.0, share=0.0, own=0.05, documents=documents))
    assert not re.search(r"no (measurable )?change|does not change|hardly", text)
    assert ("inconclusive" in text) == (documents == 40)


def test_largest_change_needs_20_texts() -> None:
    sentences = {}
    for documents in (19, 20):
        run = planted(documents=documents)
        controls = run.tables["measure/mixing_controls"]
        value = controls[controls["control"] == "shuffled_words"].assign(
            control="corpus_value", ratio_minus_control=0.03
        )
        value = value.assign(ratio_minus_control_low=0.01, ratio_minus_control_high=0.05)
        run.tables["measure/mixing_controls"] = pd.concat([controls, value[value["checkpoint"] == "difference"]])
        sentences[documents] = " ".join(_describe_controls(run))
    assert "largest change" not in sentences[19]
    assert "It is not known which layer fine-tuning changes most: 19 reviews are too few" in sentences[19]
    interval = "(95% interval +8.0 to +12.0, 20 reviews)"
    assert f"is +10.0 percentage points, in layer 1 {interval}. Because the layer was selected" in sentences[20]
    assert "this interval is simultaneous for all layers and ratios" in sentences[20]
    alone = "(95% interval for this layer alone +1.0 to +5.0, 20 reviews)"
    assert f"with the values of other texts is +3.0 percentage points {alone}." in sentences[20]


def test_page_verdict_agrees_with_comparison() -> None:
    ends = [(0.1, 0.3), (-0.3, -0.1), (-0.1, 0.1), (np.nan, np.nan), (0.0, 0.1)]
    low, high = np.array(ends).T
    compared = name_directions(Interval((low + high) / 2, low, high)).tolist()
    assert [verdict(*each, MIN_SIMULTANEOUS) for each in ends] == compared
    assert {verdict(*each, MIN_SIMULTANEOUS - 1) for each in ends} == {Verdict.TOO_FEW_TEXTS}


def test_missing_tables_omit_sentences() -> None:
    run = planted(change=0.1)
    run.tables["measure/exchange"] = run.tables["measure/exchange"].iloc[:0]
    found = answer(run)
    ratios = "15.0% before fine-tuning, 25.0% after"
    assert found["headline"] == f"Tokens mix at a ratio of {ratios}, in this one training run"
    assert not any("wn share" in sentence for sentence in found["sentences"])
    run.tables["measure/geometry"] = run.tables["measure/geometry"].iloc[:0]
    assert class_evidence(run) == []
    run.differences = run.differences.iloc[:0]
    run.curves = run.curves[run.curves["checkpoint"] == "finetuned"]
    assert answer(run)["headline"].startswith("Layer 2 mixes tokens most")
