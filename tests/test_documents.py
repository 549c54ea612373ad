"""Every number of the results in README.md and docs/ is that of a csv file in git. Tables are parsed, not generated."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from conftest import REPOSITORY, digest

from docs.tables import DOCUMENTS, MARKED, check_default_run, main, tables

PLOTS, STUDY = "reports/plots/", "docs/study/"
RATIO, CHANGE = "attnresln_n", "difference"
CHECKPOINTS = ("pretrained", "finetuned", CHANGE)
ENDS = ["mean", "ci_low", "ci_high"]


@cache
def committed(path: str) -> Any:
    """Return a file as git has it: a run of one's own may have changed the one in the folder."""
    shown = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=REPOSITORY, capture_output=True, check=False)
    if shown.returncode:
        pytest.skip(f"git has no {path} here")
    text = shown.stdout.decode("utf-8")
    if path.endswith(".csv"):
        return pd.read_csv(io.StringIO(text))
    return json.loads(text) if path.endswith(".json") else text


def row(path: str, **where: object) -> pd.Series:
    """Return the only row of a csv with these values."""
    table = committed(path)
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1, (path, where, len(table))
    return table.iloc[0]


def change(values: Mapping[Any, Any]) -> str:
    """Return a change in percentage points with its interval, `+10.3 [+5.1, +15.5]`."""
    mean, low, high = (f"{100 * values[name]:+.1f}" for name in ENDS)
    return f"{mean} [{low}, {high}]"


def section(document: str, start: str, end: str) -> str:
    text = committed(document)
    return " ".join(text[text.index(start) : text.index(end)].split())


def parsed(document: str, name: str) -> list[list[str]]:
    """Return the cells of a document's marked table, without the two lines of its head."""
    lines = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end of table -->", committed(document), re.DOTALL)
    assert lines
    return [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines[1].splitlines()[2:]]


def assert_all_numbers_known(text: str, known: list[str]) -> None:
    """Assert that each phrase of `known` stands in `text`, and that no number is left outside of them."""
    for phrase in sorted(known, key=len, reverse=True):
        assert phrase in text, phrase
        text = text.replace(phrase, "")
    assert re.findall(r"[^.]*(?<![\w-])\d[^.]*", re.sub(r"`[^`]*`|\([^()]*\.(?:md|png|csv)\)", "", text)) == []


def study(csv: str, checkpoint: str = CHANGE, **where: object) -> pd.Series:
    """Return a row of a table of the study, of the change through fine-tuning unless told otherwise."""
    return row(f"{STUDY}{csv}.csv", checkpoint=checkpoint, **where)


def layers(path: str, **where: object) -> pd.DataFrame:
    """Return the changes of a csv with these values, by layer."""
    table = committed(path).query("checkpoint == 'difference'")
    for column, value in where.items():
        table = table[table[column] == value]
    return table.set_index("layer")


def rising(changes: pd.DataFrame) -> list[int]:
    return changes.index[(changes["p_holm"] < 0.05) & (changes["mean"] > 0)].tolist()


def test_findings_in_the_readme_are_those_of_the_study() -> None:
    attention = {"point": "attention_output"}
    before, after, difference = (study("ratios_overall", each, method=RATIO) for each in CHECKPOINTS)
    upper = layers(f"{STUDY}ratios.csv", method=RATIO)["mean"]
    alike = layers(f"{STUDY}geometry.csv", measure="mean_cosine", **attention)
    assert rising(layers(f"{STUDY}ratios.csv", method=RATIO)) == rising(alike) == [2, 3, 4, 5, 6]
    assert upper.loc[4:].sum() > 0.9 * upper.sum()
    assert alike["mean"].idxmax() == 5

    def level(layer: int) -> str:
        return change(study("derivative_levels", reference="layer_input", layer=layer, form="norm_of_block"))

    def of_class(layer: int, token_class: str, checkpoint: str = CHANGE) -> pd.Series:
        return study("mixing_by_class", checkpoint, layer=layer, method=RATIO, token_class=token_class)

    more = [each for each in range(1, 7) if of_class(each, "word")["mean"] > of_class(each, "cls")["mean"]]
    assert more[:3] == [2, 3, 4]

    def early(measure: str) -> float:
        return float(study("geometry", layer=2, measure=measure, **attention)["mean"])

    def cosines(measure: str) -> tuple[str, str, str]:
        rows = [study("geometry", each, layer=6, measure=measure, **attention) for each in CHECKPOINTS]
        ends = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*rows[2][ENDS])
        return f"{rows[0]['mean']:.2f}", f"{rows[1]['mean']:.2f}", ends

    def from_input(method: str) -> str:
        return change(study("mixing_from_input", layer=6, method=method))

    globenc = study("mixing_from_input", "pretrained", layer=6, method="globenc_rollout")["mean"]
    controls = committed(f"{STUDY}mixing_controls.csv").query("checkpoint == 'difference'")
    control = 100 * controls.groupby(["control", "method"])["mean"].mean()
    left = layers(f"{STUDY}mixing_controls_difference.csv", control="text_mean_value", method=RATIO)
    assert (left["p_holm"] > 0.05).all()
    above, below = (100 * left.loc[layer, ENDS].to_numpy(float) for layer in (4, 6))
    scores = committed(f"{STUDY}faithfulness_overall.csv").query("quantity == 'above_random' and method != 'random'")
    assert len(scores) == ((scores["mean"] > 0) & (scores["p_holm"] < 0.05)).sum() == 9
    points = change(difference).replace(" [", " percentage points [")
    lowest, highest = (f"{100 * difference[f'{which}_seed']:+.1f}" for which in ("lowest", "highest"))
    accuracy = committed(f"{STUDY}accuracy.csv")["accuracy"].mean()
    within, across = cosines("mean_cosine"), cosines("mean_cosine_across")
    words, cls = of_class(2, "word", "pretrained")["mean"], of_class(2, "cls", "pretrained")["mean"]
    text = section("README.md", "`make experiments DATASET=...` fine-tunes", "**[docs/results.md](docs/results.md)**")
    assert_all_numbers_known(
        text,
        [
            "per seed 850 to train, 150 to choose the epoch and 200 to test, cut to 128 tokens",
            f"right on {100 * accuracy:.0f} % of their test reviews, where chance is 50 %",
            "Ratios are of 100 test reviews per seed. Brackets are 95 % intervals",
            f"from {100 * before['mean']:.0f} % to {100 * after['mean']:.0f} % "
            f"({points}; single seeds: {lowest} to {highest})",
            "By Holm it rises in layers 2 to 6",
            f"in layers 4 ({100 * upper[4]:+.1f}), 5 ({100 * upper[5]:+.1f}) and 6 ({100 * upper[6]:+.1f})",
            f"(`attn_w`) does not: {change(study('ratios_overall', method='attn_w'))}",
            "8 reviews of up to 40 per seed",
            f"{level(5)} in layer 5, {level(6)} in layer 6",
            "In layers 2 to 4 words rise by more points than [CLS]",
            f"In layer 2 the ratio of words rises by {change(of_class(2, 'word'))} from {100 * words:.0f} %, that of "
            f"[CLS] by {change(of_class(2, 'cls'))} from {100 * cls:.0f} %",
            f"in layer 3 by {change(of_class(3, 'word'))} and not at all ({change(of_class(3, 'cls'))})",
            f"In layer 6 both rise, by {100 * of_class(6, 'word')['mean']:+.1f} and "
            f"{100 * of_class(6, 'cls')['mean']:+.1f}",
            "In layer 6 the mean cosine",
            f"rises from {within[0]} to {within[1]} ({within[2]}); by Holm it rises in layers 2 to 6, most in layer 5 "
            f"({alike.loc[5, 'mean']:+.2f})",
            f"it goes from {across[0]} to {across[1]}",
            f"({across[2]})",
            "In layer 2 it rises between texts nearly as much as within one "
            f"({early('mean_cosine_across'):+.2f} beside {early('mean_cosine'):+.2f})",
            f"then rises by {control['text_mean_value', RATIO]:+.1f}, and by "
            f"{control['shuffled_words', RATIO]:+.1f} with",
            f"the ratio rises by {above[0]:.1f} [{above[1]:+.1f}, {above[2]:+.1f}] more in layer 4, "
            f"by {-below[0]:.1f} [{-below[2]:+.1f}, {-below[1]:+.1f}] less in layer 6",
            f"the control reproduces {control['text_mean_value', 'attn_n']:+.1f} of "
            f"{100 * study('ratios_overall', method='attn_n')['mean']:+.1f}",
            "(8 reviews of up to 40 tokens per seed)",
            f"ALTI rollout rises by {from_input('alti_rollout')}",
            f"derivatives by {from_input('derivative_norm_of_block')} (`norm_of_block`) and "
            f"{from_input('derivative_sum_of_norms')} (`sum_of_norms`)",
            f"rollout by {from_input('globenc_rollout')} from {100 * globenc:.0f} %",
            f"does not ({from_input('attention_rollout')})",
            "16 reviews of up to 48 tokens per seed",
        ],
    )


def test_findings_of_the_default_run_are_those_of_its_tables() -> None:
    test = committed("reports/metrics/finetune.json")["test"]
    reviews = committed("reports/metrics/download.json")
    changes = layers(f"{PLOTS}measure/mixing.csv", method=RATIO)
    assert changes.index[changes["simultaneous_low"] > 0].tolist() == [2, 3, 4, 5, 6]
    assert changes["mean"].idxmax() == 6
    groups = committed(f"{PLOTS}measure/mixing_by_group.csv").query("method == @RATIO and layer == 6")
    groups = groups.set_index(["grouping", "group", "checkpoint"])
    means = groups["mean"].unstack("checkpoint")
    assert (means.loc["token_class", "finetuned"] > means.loc["token_class", "pretrained"]).all()

    def of_length(length: str) -> tuple[str, int]:
        rise = 100 * (means.loc[("length", length), "finetuned"] - means.loc[("length", length), "pretrained"])
        return f"{rise:+.1f}", int(groups.loc[("length", length, "finetuned"), "documents"])

    reviewed = committed(f"{PLOTS}measure/mixing_by_review.csv").query("method == @RATIO and layer == 6")
    rises = reviewed.pivot(index="document", columns="checkpoint", values="mean").eval("finetuned - pretrained")
    margins = committed(f"{PLOTS}faithfulness/margins.csv")
    margins = margins.assign(rise=lambda table: 100 * table["document"].map(rises))
    assert margins.loc[margins["tokens"] > 128, "margin"].max() < 4.6
    shorter = margins[margins["tokens"] <= 128]
    less_sure, sure = shorter[shorter["margin"] <= 4.6], shorter[shorter["margin"] > 4.6]

    def geometry(checkpoint: str, measure: str, point: str = "attention_output") -> str:
        where = {"checkpoint": checkpoint, "layer": 6, "point": point, "measure": measure}
        return f"{row(f'{PLOTS}measure/geometry.csv', **where)['mean']:.2f}"

    control = committed(f"{PLOTS}measure/mixing_controls.csv").query("method == @RATIO")
    level = control.groupby(["control", "checkpoint"])["mean"].mean().map("{:.0%}".format).str.replace("%", " %")

    left = 100 * layers(f"{PLOTS}measure/mixing_controls.csv", method=RATIO, control="text_mean_value")["below"]
    margin = (
        committed(f"{PLOTS}faithfulness/margin_correlation.csv")
        .query("checkpoint == 'finetuned'")
        .set_index("predicted")
    )
    documents = margin["documents"]

    def rho(predicted: str, name: str = "spearman") -> str:
        prefix = "ci" if name == "spearman" else name
        return "{:.2f} [{:.2f}, {:.2f}]".format(*margin.loc[predicted, [name, f"{prefix}_low", f"{prefix}_high"]])

    derivatives = f"{PLOTS}measure/derivatives.csv"
    of_sum = layers(derivatives, quantity="level", reference="layer_input", method="norm_of_sum")
    within = of_sum["mean"].abs().max()

    def ends(layer: int) -> str:
        low, high = 100 * of_sum.loc[layer, ENDS[1:]]
        return f"[{low:+.1f}, {high:+.1f}]"

    of_words = {"quantity": "level", "reference": "word_embedding", "method": "norm_of_sum", "layer": 6}
    from_words = {each: row(derivatives, **of_words, checkpoint=each)["mean"] for each in CHECKPOINTS}
    same_tokens = row(derivatives, quantity="ratio", checkpoint=CHANGE, layer=6, method=RATIO)
    short, middle, long = map(of_length, ("33-64", "65-128", "129-256"))
    text = section("docs/results.md", "- The classifier is right on", "What must not be read into this:")
    assert_all_numbers_known(
        text,
        [
            f"right on {100 * test['accuracy']:.0f} % of {reviews['test']} test reviews (95 % interval "
            f"{100 * test['accuracy_ci_low']:.0f} % to {100 * test['accuracy_ci_high']:.0f} %)",
            f"be right on {100 * test['majority_accuracy']:.0f} %",
            f"in every layer from 2 to 6 by its simultaneous interval, most on average in layer 6 "
            f"({100 * changes.loc[6, 'mean']:+.1f} percentage points). In layer 6 it is higher",
            f"In layer 6 it rises by {short[0]} points in the {short[1]} reviews of 33 to 64 tokens",
            f"by {middle[0]} in the {middle[1]} of 65 to 128",
            f"by {long[0]} in the {long[1]} of 129 to 256",
            f"Of the {len(shorter)} shorter ones, the {len(less_sure)} that the classifier is less sure of "
            f"(a margin of at most 4.6) rise as little as these, by {less_sure['rise'].mean():+.1f} on average, "
            f"the other {len(sure)} by {sure['rise'].mean():+.1f}",
            f"in layer 6 the mean cosine between two of its vectors rises from "
            f"{geometry('pretrained', 'mean_cosine')} to {geometry('finetuned', 'mean_cosine')}",
            f"it is {geometry('pretrained', 'mean_cosine_across')} before and "
            f"{geometry('finetuned', 'mean_cosine_across')} after",
            f"{level['random_weights', 'random']} with random weights",
            f"random order {level['shuffled_words', 'pretrained']} before and "
            f"{level['shuffled_words', 'finetuned']} after",
            f"values {level['text_mean_value', 'pretrained']} and {level['text_mean_value', 'finetuned']}.",
            f"it leaves {left[3]:+.1f} points in layer 3 and takes {-left[6]:.1f} too many in layer 6",
            f"Among the {documents['negative']} reviews called negative",
            f"a rank correlation of {rho('negative')}, among the {documents['positive']} called positive "
            f"{rho('positive')}",
            f"the latter is {rho('positive', 'given_length')}: it rests on the {long[1]} longest",
            f"Together they are {rho('all')}, given the number of tokens {rho('all', 'given_length')}",
            "(4 reviews of 24 tokens)",
            f"by at most {100 * within:.1f} points",
            f"it goes from {100 * from_words['pretrained']:.0f} % to {100 * from_words['finetuned']:.0f} % "
            f"({change(row(derivatives, **of_words, checkpoint=CHANGE))})",
            f"rises by {change(same_tokens)} in layer 6",
            f"in layer 5 the interval of its change is {ends(5)}, in layer 6 {ends(6)}",
            "8 reviews allow no verdict",
            f"in layer 6 what attention adds is {geometry('pretrained', 'norm', 'output_linear')} times as long",
            f"to the input is {geometry('pretrained', 'cosine_input', 'attention_skip')}",
            f"it is {geometry('finetuned', 'norm', 'output_linear')} times as long",
            f"the cosine is {geometry('finetuned', 'cosine_input', 'attention_skip')}",
            f"of the layer it is {geometry('finetuned', 'cosine_input', 'ffn_norm')}",
        ],
    )


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ("docs/results.md", f"{PLOTS}measure/mixing_weighted.csv"),
        ("docs/study/README.md", f"{STUDY}ratios_overall.csv"),
    ],
)
def test_table_of_ratios_holds_the_numbers_of_its_own_csv(document: str, path: str) -> None:
    rows = parsed(document, "overall")
    where = {"weight": "token", "tokens_of": "all", "layer": "all"} if "weighted" in path else {}
    assert len(rows) == committed(path)["method"].nunique()
    for method, _, *cells in rows:
        for checkpoint, cell in zip(CHECKPOINTS, cells, strict=True):
            found = [float(number) for number in re.findall(r"[-+]?\d+\.\d", cell)]
            true = row(path, method=method, checkpoint=checkpoint, **where)
            assert found == [pytest.approx(100 * true[name], abs=0.051) for name in ENDS[: len(found)]]


def test_study_shows_its_own_controls_and_moves() -> None:
    keys = ["control", "method", "checkpoint"]
    controls = committed(f"{STUDY}mixing_controls.csv")
    rows = parsed("docs/study/README.md", "controls")
    assert len(rows) == len(controls[keys].drop_duplicates())
    for *key, first in (cells[:4] for cells in rows):
        true = row(f"{STUDY}mixing_controls.csv", **dict(zip(keys, key, strict=True)), layer=1)["mean"]
        assert float(first.split(" ")[0]) == pytest.approx(100 * true, abs=0.051)
    moves = committed(f"{STUDY}movement.csv")
    for step, against, measure, *cells in parsed("docs/study/README.md", "movement"):
        chosen = moves[(moves["step"] == step) & (moves["against"] == against) & (moves["measure"] == measure)]
        for layout, cell in zip(moves["layout"].unique(), cells, strict=True):
            of_layout = chosen.loc[chosen["layout"] == layout, "mean"].dropna()
            ends = [float(number) for number in cell.replace(" to ", " ").split()]
            true = [of_layout.min(), of_layout.max()] if len(of_layout) else []
            assert ends == [pytest.approx(end, abs=0.006) for end in true]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_of_declarations_are_up_to_date(document: str) -> None:
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    found = {name: content for _, name, content, _ in MARKED.findall(text)}
    declared = tables()
    assert found
    assert {name: found[name] for name in found if name in declared} == {
        name: declared[name] for name in found if name in declared
    }


def test_tables_of_a_run_with_other_parameters_are_refused_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("docs", "reports/metrics", "reports/plots"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder)
    shutil.copy(REPOSITORY / "README.md", tmp_path)
    lock = yaml.safe_load((REPOSITORY / "dvc.lock").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    Path("dvc.lock").write_text(yaml.safe_dump(lock), encoding="utf-8")
    check_default_run()

    means = pd.read_csv("reports/plots/measure/mixing.csv")
    means.assign(mean=means["mean"] / 2).to_csv("reports/plots/measure/mixing.csv", index=False)
    lock["stages"]["measure"]["params"]["params.yaml"]["measure"]["documents"] = 39
    Path("dvc.lock").write_text(yaml.safe_dump(lock), encoding="utf-8")
    before = digest(tmp_path)
    with pytest.raises(SystemExit, match=r"^error: measure ran with another mixing than the default; [^\n]*$"):
        main()
    assert digest(tmp_path) == before
