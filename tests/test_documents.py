"""Every number of the results in README.md and docs/ is that of a csv file in git, read from both."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import Any

import pandas as pd
import pytest
from conftest import REPOSITORY

from docs.tables import DOCUMENTS, MARKED, tables

PLOTS, STUDY = "reports/plots/", "docs/study/"
RATIO, CHANGE = "attnresln_n", "difference"
CHECKPOINTS = ("pretrained", "finetuned", CHANGE)
ENDS = ["mean", "ci_low", "ci_high"]


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


def study(csv: str, checkpoint: str = CHANGE, **where: object) -> pd.Series:
    """Return a row of a table of the study, of the change through fine-tuning by default."""
    return row(f"{STUDY}{csv}.csv", checkpoint=checkpoint, **where)


def percent(*shares: float) -> str:
    return " ".join(f"{100 * share:.0f}" for share in shares)


def points(*changes: float) -> str:
    return " ".join(f"{100 * change:+.1f}" for change in changes)


def decimals(*values: float) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def change(values: Mapping[Any, Any]) -> str:
    """Return a change in percentage points and the ends of its interval."""
    return points(*(values[name] for name in ENDS))


def significant_layers(changes: pd.DataFrame) -> list[int]:
    return changes.index[(changes["p_holm"] < 0.05) & (changes["mean"] > 0)].tolist()


def assert_numbers(document: str, start: str, end: str, expected: list[str]) -> None:
    """Assert that the numbers from `start` to `end`, but for those in code and links, are those of each paragraph."""
    text = committed(document)
    text = re.sub(r"`[^`]*`|\([^()]*\.(?:md|png|csv)[^()]*\)", "", text[text.index(start) : text.index(end)])
    paragraphs = re.split(r"\n(?=- |\d\. )", text)
    assert [" ".join(re.findall(r"(?<![\w.-])[-+]?\d+(?:\.\d+)?", part)) for part in paragraphs] == expected


def test_findings_of_the_study_are_those_of_its_tables() -> None:
    before, after, difference = (study("ratios_overall", each, method=RATIO) for each in CHECKPOINTS)
    ratios = rows(f"{STUDY}ratios.csv", method=RATIO, checkpoint=CHANGE)
    alike = rows(f"{STUDY}geometry.csv", measure="mean_cosine", checkpoint=CHANGE, point="attention_output")
    assert significant_layers(ratios) == significant_layers(alike) == [2, 3, 4, 5, 6]
    assert ratios["mean"].loc[4:].sum() > 0.9 * ratios["mean"].sum()
    assert alike["mean"].idxmax() == 5
    left = rows(f"{STUDY}mixing_controls_difference.csv", control="text_mean_value", method=RATIO, checkpoint=CHANGE)
    assert (left["p_holm"] > 0.05).all()
    scores = committed(f"{STUDY}faithfulness_overall.csv").query("quantity == 'above_random' and method != 'random'")
    assert len(scores) == ((scores["mean"] > 0) & (scores["p_holm"] < 0.05)).sum() == 9
    control = rows(f"{STUDY}mixing_controls.csv", checkpoint=CHANGE).groupby(["control", "method"])["mean"].mean()

    def level(layer: int) -> str:
        return change(study("derivative_levels", reference="layer_input", layer=layer, form="norm_of_block"))

    def of_class(layer: int, token_class: str, checkpoint: str = CHANGE) -> pd.Series:
        return study("mixing_by_class", checkpoint, layer=layer, method=RATIO, token_class=token_class)

    def cosines(measure: str) -> list[str]:
        where = {"layer": 6, "point": "attention_output", "measure": measure}
        first, last, difference = (study("geometry", each, **where) for each in CHECKPOINTS)
        ends = " ".join(f"{difference[name]:+.2f}" for name in ENDS)
        return [decimals(first["mean"], last["mean"]), ends]

    def from_input(method: str) -> str:
        return change(study("mixing_from_input", layer=6, method=method))

    words, cls = ([of_class(each, name)["mean"] for each in range(1, 7)] for name in ("word", "cls"))
    assert [word > other for word, other in zip(words, cls, strict=True)][:4] == [False, True, True, True]
    across = study("geometry", layer=2, measure="mean_cosine_across", point="attention_output")["mean"]
    globenc = study("mixing_from_input", "pretrained", layer=6, method="globenc_rollout")["mean"]
    above, below = left.loc[4, ENDS], -left.loc[6, ENDS]
    accuracy = percent(committed(f"{STUDY}accuracy.csv")["accuracy"].mean())
    attn_w, attn_n = (study("ratios_overall", method=method) for method in ("attn_w", "attn_n"))
    within, between = cosines("mean_cosine"), cosines("mean_cosine_across")
    rise = f"{percent(before['mean'], after['mean'])} {change(difference)}"
    expected = [
        f"850 150 200 128 {accuracy} 50 100 95",
        f"{rise} {points(difference['lowest_seed'], difference['highest_seed'])} 2 6 "
        f"4 {points(ratios['mean'][4])} 5 {points(ratios['mean'][5])} 6 {points(ratios['mean'][6])}",
        f"{change(attn_w)} 8 40 {level(5)} 5 {level(6)} 6",
        f"2 4 2 {change(of_class(2, 'word'))} {percent(of_class(2, 'word', 'pretrained')['mean'])} "
        f"{change(of_class(2, 'cls'))} {percent(of_class(2, 'cls', 'pretrained')['mean'])} "
        f"3 {change(of_class(3, 'word'))} {change(of_class(3, 'cls'))} 6 {points(words[5], cls[5])}",
        f"6 {' '.join(within)} 2 6 5 {alike['mean'][5]:+.2f} {' '.join(between)} "
        f"2 {across:+.2f} {alike['mean'][2]:+.2f}",
        f"{points(control['text_mean_value', RATIO], control['shuffled_words', RATIO])} "
        f"{100 * above['mean']:.1f} {points(above['ci_low'], above['ci_high'])} 4 "
        f"{100 * below['mean']:.1f} {points(below['ci_high'], below['ci_low'])} 6 "
        f"{points(control['text_mean_value', 'attn_n'], attn_n['mean'])}",
        f"8 40 {from_input('alti_rollout')} {from_input('derivative_norm_of_block')} "
        f"{from_input('derivative_sum_of_norms')} {from_input('globenc_rollout')} {percent(globenc)} "
        f"{from_input('attention_rollout')}",
        "16 48",
    ]
    assert_numbers("docs/study/README.md", "`make experiments DATASET=...` fine-tunes", "![Five seeds", expected)
    findings = ["100 95", f"1 {rise}", f"2 {within[0]} 6", f"3 {points(control['text_mean_value', RATIO])}"]
    assert_numbers("README.md", "Five fine-tuning runs", "This is one model", findings)


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
    assert margins.loc[margins["tokens"] > 128, "margin"].max() < 4.2
    short = margins[margins["tokens"] <= 128]
    less_sure, sure = (short.loc[each, "rise"] for each in (short["margin"] <= 4.2, short["margin"] > 4.2))

    def geometry(checkpoint: str, measure: str, point: str = "attention_output") -> str:
        where = {"checkpoint": checkpoint, "layer": 6, "point": point, "measure": measure}
        return decimals(row(f"{PLOTS}measure/geometry.csv", **where)["mean"])

    def control(name: str, *checkpoints: str) -> str:
        table = rows(f"{PLOTS}measure/mixing_controls.csv", method=RATIO, control=name)
        return percent(*table.groupby("checkpoint")["mean"].mean()[list(checkpoints)])

    text_mean = {"method": RATIO, "control": "text_mean_value", "checkpoint": CHANGE}
    left = rows(f"{PLOTS}measure/mixing_controls.csv", **text_mean)["below"]
    correlations = rows(f"{PLOTS}faithfulness/margin_correlation.csv", checkpoint="finetuned").set_index("predicted")

    def correlation(predicted: str, of: str = "spearman", ends: str = "ci") -> str:
        return decimals(*correlations.loc[predicted, [of, f"{ends}_low", f"{ends}_high"]])

    def given_length(predicted: str) -> str:
        return correlation(predicted, "given_length", "given_length")

    derivatives, levels = f"{PLOTS}measure/derivatives.csv", {"quantity": "level", "method": "norm_of_sum"}
    within = rows(derivatives, reference="layer_input", checkpoint=CHANGE, **levels)
    levels |= {"reference": "word_embedding"}
    first, last, moved = (row(derivatives, layer=6, checkpoint=each, **levels) for each in CHECKPOINTS)
    same_tokens = row(derivatives, quantity="ratio", checkpoint=CHANGE, layer=6, method=RATIO)
    trained, reviews = CHECKPOINTS[:2], margins["predicted"].value_counts()
    cosines = [geometry(each, measure) for measure in ("mean_cosine", "mean_cosine_across") for each in trained]
    places = (("norm", "output_linear"), ("cosine_input", "attention_skip"))
    steps = [geometry(each, *place) for each in trained for place in places]
    expected = [
        f"{percent(test['accuracy'])} {committed('reports/metrics/download.json')['test']} 95 "
        f"{percent(test['accuracy_ci_low'], test['accuracy_ci_high'], test['majority_accuracy'])}",
        f"2 6 6 {points(mixing['mean'][6])} 6",
        f"6 {shorter[0]} 33 64 {shorter[1]} 65 128 {long} 129 256 {len(short)} {len(less_sure)} 4.2 "
        f"{points(less_sure.mean())} {len(sure)} {points(sure.mean())}",
        f"6 {' '.join(cosines)}",
        f"{control('random_weights', 'random')} {control('shuffled_words', *trained)} "
        f"{control('text_mean_value', *trained)} {100 * left[3]:.1f} 3 {-100 * left[6]:.1f} 6",
        f"{reviews['negative']} {correlation('negative')} {reviews['positive']} {correlation('positive')} "
        f"{given_length('positive')} {long.split()[1]} {correlation('all')} {given_length('all')}",
        f"4 24 {100 * within['mean'].abs().max():.1f} {percent(first['mean'], last['mean'])} {change(moved)} "
        f"{change(same_tokens)} 6 5 {points(*within.loc[5, ENDS[1:]])} 6 {points(*within.loc[6, ENDS[1:]])}",
        f"8 6 {' '.join(steps)} {geometry('finetuned', 'cosine_input', 'ffn_norm')}",
    ]
    assert_numbers("docs/results.md", "- The classifier is right on", "What these numbers do not show:", expected)


def parsed(document: str, name: str) -> list[list[str]]:
    """Return the cells of a document's marked table, without the two lines of its head."""
    lines = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end of table -->", committed(document), re.DOTALL)
    assert lines
    return [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines[1].splitlines()[2:]]


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ("docs/results.md", f"{PLOTS}measure/mixing_weighted.csv"),
        ("docs/study/README.md", f"{STUDY}ratios_overall.csv"),
    ],
)
def test_table_of_ratios_holds_the_numbers_of_its_own_csv(document: str, path: str) -> None:
    table, where = parsed(document, "overall"), {}
    if "weighted" in path:
        where = {"weight": "token", "tokens_of": "all", "layer": "all"}
    assert len(table) == committed(path)["method"].nunique()
    for method, _, *cells in table:
        for checkpoint, cell in zip(CHECKPOINTS, cells, strict=True):
            numbers = [float(number) for number in re.findall(r"[-+]?\d+\.\d", cell)]
            true = row(path, method=method, checkpoint=checkpoint, **where)
            assert numbers == [pytest.approx(100 * true[name], abs=0.051) for name in ENDS[: len(numbers)]]


def test_study_shows_its_own_controls_and_moves() -> None:
    keys = ["control", "method", "checkpoint"]
    controls = parsed("docs/study/README.md", "controls")
    assert len(controls) == len(committed(f"{STUDY}mixing_controls.csv")[keys].drop_duplicates())
    for *key, first in (cells[:4] for cells in controls):
        true = row(f"{STUDY}mixing_controls.csv", **dict(zip(keys, key, strict=True)), layer=1)["mean"]
        assert float(first.split(" ")[0]) == pytest.approx(100 * true, abs=0.051)
    layouts = committed(f"{STUDY}movement.csv")["layout"].unique()
    for step, against, measure, *cells in parsed("docs/study/README.md", "movement"):
        for layout, cell in zip(layouts, cells, strict=True):
            where = {"step": step, "against": against, "measure": measure, "layout": layout}
            means = rows(f"{STUDY}movement.csv", **where)["mean"].dropna()
            true = [means.min(), means.max()] if len(means) else []
            assert [float(end) for end in cell.replace(" to ", " ").split()] == pytest.approx(true, abs=0.006)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_of_declarations_are_up_to_date(document: str) -> None:
    text, declared = (REPOSITORY / document).read_text(encoding="utf-8"), tables()
    contents = {name: content for _, name, content, _ in MARKED.findall(text)}
    assert contents
    assert [name for name in contents.keys() & declared.keys() if contents[name] != declared[name]] == []
