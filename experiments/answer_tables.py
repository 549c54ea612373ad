"""Tables and figure of the classifiers of `experiments.answer`: means over the seeds of each setting.

Intervals are Student's t over the seeds; `p_holm` tests a change through fine-tuning, adjusted over the layers
(`experiments.tables.over_seeds`). Correlations are averaged by Fisher's z.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import ttest_ind
from sklearn.metrics import roc_auc_score

from attnmix.core.statistics import partial_correlation, rank_correlation
from attnmix.core.store.files import read_results
from attnmix.figures.style import TWO_COLUMNS, paper_style, save_figure
from experiments.tables import holm, over_seeds
from experiments.training import SETTINGS

DIGITS = 4
LEFT_OUT = "cosine .* by (?:sentiment|word)|share (?:corpus|text|token) by (?:sentiment|word)"  # of layers.csv
CHANGE = "difference"
COMPARED = ("true labels", "permuted labels")
AVERAGED = "^(?:ratio|corpus_value|text_mean_value)"  # also as means over the layers
KEYS = {
    "layers": ["setting", "checkpoint", "measure", "layer"],
    "probes": ["setting", "checkpoint", "target", "kind", "layer"],
    "course": ["setting", "checkpoint", "step", "measure", "layer"],
    "scaling": ["setting", "checkpoint", "directions", "factor", "measure", "layer"],
    "interventions": ["setting", "checkpoint", "edit", "extent", "measure", "layer"],
    "reviews": ["setting", "checkpoint", "measure", "layer"],
}
WIDE = {
    "scaling": ["margin", "same_class", "ratio"],
    "interventions": [
        "same_class",
        "accuracy",
        "probability",
        "donors_class",
        "above_constant",
        "largest_logit_change",
    ],
}
COMPARED_EDITS = (
    ("class erased", "random directions erased"),
    ("class erased", "largest other directions erased"),
    ("text's mean, class erased", "text's mean, random directions erased"),
    ("text's mean, class erased", "text's mean, largest other directions erased"),
    ("text's mean, class erased", "no values"),
    ("donor: the review itself", "donor of the same class"),
    ("donor: the review itself", "text's mean"),
    ("heads with most of the class cut", "other heads cut"),
)
"""Edits of the same reviews by the same model, whose difference is tested over the seeds."""
COLOURS = {"before": "#56B4E9", "true labels": "#D55E00", "permuted labels": "#7F7F7F"}  # Okabe and Ito's
MARKERS = {"before": "o", "true labels": "s", "permuted labels": "^"}


def write_tables(runs: Path, to: Path) -> None:
    """Write `answer_<table>.csv` for each table that the finished runs have, and `answer.png` of all in the folder.

    A setting without runs keeps the rows that it has there.
    """
    to.mkdir(parents=True, exist_ok=True)
    for name in KEYS:
        by_seed = read_runs(runs, name)
        if by_seed.empty:
            continue
        table = over_seeds(by_seed)
        if name == "layers":
            table = pd.concat([table, differences_of_settings(by_seed)])
        if name == "interventions":
            table = pd.concat([table, over_seeds(differences_of_edits(by_seed))])
        shown = table.drop(columns=["checkpoint"]) if table["checkpoint"].nunique() == 1 else table
        path = to / f"answer_{name}.csv"
        with_others = _with_other_settings(shown.round(DIGITS), path)
        with_others.to_csv(path, index=False, lineterminator="\n")
    drawn = [read_results(to / f"answer_{name}.csv") for name in ("layers", "probes", "interventions")]
    draw(*drawn, to / "answer")


def _with_other_settings(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Return the table with the rows of the file at `path` whose setting it does not have, each in its place there."""
    if not path.exists():
        return table
    kept = read_results(path, dtype={"layer": "Int64"})
    of_others = kept[~kept["setting"].isin(table["setting"])]
    joined = pd.concat([of_others, table], ignore_index=True)
    name = path.stem.removeprefix("answer_")
    keys = [column for column in kept.columns if column in KEYS[name]]
    places = {row: place for place, row in enumerate(_rows_as_text(kept[keys]))}
    order = [places.get(row, len(places)) for row in _rows_as_text(joined[keys])]
    return joined.iloc[np.argsort(order, kind="stable")]


def _rows_as_text(table: pd.DataFrame) -> list[str]:
    """Return the rows as text, in which missing values are equal."""
    return [str(row) for row in table.itertuples(index=False, name=None)]


def read_runs(runs: Path, name: str) -> pd.DataFrame:
    """Return a table of all finished runs in long form, with the columns `KEYS`, `mean` and `seed`."""
    parts = []
    for setting in SETTINGS:
        for folder in sorted((runs / setting.replace(" ", "_")).glob("seed_?")):
            path = folder / f"{name}.csv"
            if path.exists():
                table = _long(read_results(path), name)
                parts.append(table.assign(setting=setting, seed=int(folder.name.removeprefix("seed_"))))
    if not parts:
        return pd.DataFrame()
    table = pd.concat(parts, ignore_index=True)
    for column in set(KEYS[name]) - set(table.columns):
        table[column] = "after"
    if {"before", "after"} <= set(table["checkpoint"]):
        index = [key for key in (*KEYS[name], "seed") if key != "checkpoint"]
        before, after = (table[table["checkpoint"] == each].set_index(index)["mean"] for each in ("before", "after"))
        change = (after - before).dropna().reset_index()
        table = pd.concat([table, change.assign(checkpoint=CHANGE)], ignore_index=True)
    table["layer"] = table["layer"].astype("Int64")
    return table[[*KEYS[name], "seed", "mean"]]


def differences_of_settings(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the change through fine-tuning with true labels less that with permuted ones, as rows of `over_seeds`.

    Interval and p are Welch's, for seeds of unequal spread and number; `seeds` is the smaller number.
    """
    changes = runs[(runs["checkpoint"] == CHANGE) & runs["setting"].isin(COMPARED)].dropna(subset="mean")
    rows = []
    for (measure, layer), group in changes.groupby(["measure", "layer"], sort=False, dropna=False):
        true, permuted = (group.loc[group["setting"] == each, "mean"] for each in COMPARED)
        if min(len(true), len(permuted)) > 1:
            test = ttest_ind(true, permuted, equal_var=False)
            low, high = test.confidence_interval()
            mean, seeds = true.mean() - permuted.mean(), min(len(true), len(permuted))
            rows.append((" minus ".join(COMPARED), CHANGE, measure, layer, mean, low, high, test.pvalue, seeds))
    numbers = ["mean", "ci_low", "ci_high", "p"]
    table = pd.DataFrame(rows, columns=[*KEYS["layers"], *numbers, "seeds"])
    table = table.astype({"layer": "Int64", "seeds": int} | dict.fromkeys(numbers, float))  # of no rows too
    table.insert(table.columns.get_loc("seeds"), "p_holm", table.groupby("measure")["p"].transform(holm))
    return table


def differences_of_edits(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the first of two `COMPARED_EDITS` less the second, in each seed, as rows of `read_runs`."""
    shares = runs[runs["measure"].isin(["same_class", "accuracy", "probability"])]
    by_edit = dict(list(shares.groupby("edit")))
    index = [key for key in (*KEYS["interventions"], "seed") if key != "edit"]
    differences = []
    for first, second in COMPARED_EDITS:
        if first in by_edit and second in by_edit:
            pair = [by_edit[edit].set_index(index)["mean"] for edit in (first, second)]
            difference = (pair[0] - pair[1]).dropna().reset_index()
            differences.append(difference.assign(edit=f"{first} minus {second}", checkpoint=CHANGE))
    columns = [*KEYS["interventions"], "seed", "mean"]
    return pd.concat(differences)[columns] if differences else runs.iloc[:0]


def _long(table: pd.DataFrame, name: str) -> pd.DataFrame:
    if name == "reviews":
        return pd.DataFrame(_correlations(table))
    if name == "layers":
        table = table[~table["measure"].str.contains(LEFT_OUT)]
        by_layer = table[table["layer"].notna() & table["measure"].str.contains(AVERAGED)]
        means = by_layer.groupby(["checkpoint", "measure"], sort=False)["mean"].mean().reset_index()
        return pd.concat([table, means.assign(measure=means["measure"] + ", all layers")], ignore_index=True)
    if name in WIDE:
        others = [column for column in table.columns if column not in WIDE[name]]
        return table.melt(others, WIDE[name], var_name="measure", value_name="mean")
    return table


def _correlations(reviews: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield a run's rank correlations of the margin with the last layer's ratio, within each predicted class.

    As Fisher's z, weighted by n - 3; plain, and given the length of what the review's tokens share. And the area under
    the curve by which the ratio tells right answers from wrong ones.
    """
    for measure in ("before", "after", "after given length", "shared_length"):
        scores, weights = [], []
        for _, group in reviews.groupby("predicted"):
            if len(group) < 6:
                continue
            margin, length = group["margin"].to_numpy(), group["shared_length"].to_numpy()
            ratio = group[measure.removesuffix(" given length")].to_numpy()
            correlation = rank_correlation(ratio, margin)
            if measure == "after given length":
                given = (rank_correlation(each, length) for each in (ratio, margin))
                correlation = partial_correlation(correlation, *given)
            scores.append(np.arctanh(np.clip(correlation, -0.999, 0.999)))
            weights.append(len(group) - 3)
        if scores:
            mean = float(np.average(scores, weights=weights))
            yield {"measure": f"z of margin and {measure}", "layer": 6, "mean": mean}
    right = (reviews["predicted"] == reviews["sentiment"]).to_numpy()
    if 0 < right.sum() < len(right):
        area = float(roc_auc_score(right, reviews["after"]))
        yield {"measure": "area under the curve, right answers", "layer": 6, "mean": area}


def draw(layers: pd.DataFrame, probes: pd.DataFrame, interventions: pd.DataFrame, path: Path) -> None:
    """Save `path`.png: the class in what others give, what a "the" tells of it, and what the class needs."""
    curves = [("before", "true labels"), ("after", "true labels"), ("after", "permuted labels")]
    with paper_style():
        figure = Figure(figsize=(TWO_COLUMNS, 2.6), layout="constrained")
        panels = figure.subplots(1, 3)
        for checkpoint, setting in curves:
            name = "before" if checkpoint == "before" else setting
            rows = [
                layers.query("measure == 'share class by predicted'"),
                probes.query("target == 'sentiment' and kind == 'the'"),
            ]
            for axes, table in zip(panels, rows, strict=False):
                curve = table[(table["checkpoint"] == checkpoint) & (table["setting"] == setting)]
                style = {"color": COLOURS[name], "marker": MARKERS[name], "markersize": 3, "label": name}
                axes.plot(curve["layer"], 100 * curve["mean"], **style)
                low, high = 100 * curve["ci_low"], 100 * curve["ci_high"]
                axes.fill_between(curve["layer"].astype(int), low, high, color=COLOURS[name], alpha=0.2, lw=0)
        panels[0].set_title("The review's class in what\nother tokens give", fontsize=7)
        panels[0].set_ylabel("% of its squared length")
        panels[1].set_title('What the vector of a "the" tells\nof the review\'s sentiment', fontsize=7)
        panels[1].set_ylabel("% right, linear probe on new reviews")
        panels[1].axhline(50, color="0.6", lw=0.6, ls=":")
        edits = ["text's mean", "text's mean, random directions erased", "text's mean, class erased"]
        edits += ["donor of the same class", "donor of the other class", "no values"]
        chosen = interventions.query("setting == 'true labels' and extent == 'from' and layer == 4")
        kept = chosen[chosen["measure"] == "same_class"].set_index("edit").reindex(edits)
        places = np.arange(len(edits))[::-1]
        error = [100 * (kept["mean"] - kept["ci_low"]), 100 * (kept["ci_high"] - kept["mean"])]
        panels[2].barh(places, 100 * kept["mean"], xerr=np.nan_to_num(error), color=COLOURS["true labels"], height=0.6)
        panels[2].set_yticks(
            places, [edit.replace(", ", ",\n").replace(" of the ", "\nof the ") for edit in edits], fontsize=6
        )
        panels[2].set_xlim(0, 108)
        panels[2].set_title(
            "Reviews that keep their class when all\nvalues of layers 4 to 6 are replaced by", fontsize=7
        )
        panels[2].set_xlabel("%")
        for axes in panels[:2]:
            axes.set_xlabel("Layer")
        panels[0].legend(fontsize=6)
        save_figure(figure, path, ["png"], 200)
