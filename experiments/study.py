"""Run the study in docs/study/plan.md, which compares classifiers fine-tuned with three kinds of labels.

The labels are the true labels, the permuted labels, or labels for the presence of a rare word. All three settings have
the same seeds.

    python -m experiments study --dataset stanfordnlp/imdb

The command writes `docs/study/runs.csv` (all runs), `tests.csv` (the planned tests) and `study.png`. The same command
continues an interrupted study.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from attnmix.core.errors import InputError
from attnmix.core.store.files import read_results
from attnmix.figures.style import TWO_COLUMNS, paper_style, save_figure
from experiments.tables import DIGITS, holm

Doubles = npt.NDArray[np.float64]
TRUE, PERMUTED, RARE_WORD = "true labels", "permuted labels", "rare word"
SETTINGS = {TRUE: (), PERMUTED: ("finetune.labels=permuted",), RARE_WORD: ("dataset.rare_word=zebra",)}
"""The overrides of params.yaml in each setting."""
PROFILE = Path("profiles/study.txt")
LAST_LAYER = 6  # the default model has six layers
METHOD = "attnresln_n"
MIN_TRAIN_ACCURACY = 0.98
EQUIVALENCE_BOUND = 0.05  # a difference is negligible if its 90 % interval is within ± this bound
LEVEL = 0.95
SAME, OTHER, CLASS_EFFECT = "own share, same class", "own share, other class", "class effect"
RATIO, RATIO_MINUS_CONTROL, CLASS_SHARE = "ratio", "ratio minus control", "class share minus null"
DONORS = {SAME: "same_class", OTHER: "other_class", CLASS_EFFECT: "same_minus_other"}
COLOURS = {"before": "#666666", TRUE: "#D55E00", PERMUTED: "#0072B2", RARE_WORD: "#009E73"}
KEYS = ["checkpoint", "layer"]


class PlannedRow(NamedTuple):
    """A planned difference of a metric between two settings (`first` minus `second`).

    `expected_sign` is the sign that the plan predicts (1 or -1), or 0 if the plan predicts none.
    """

    metric: str
    first: str
    second: str
    expected_sign: int


TESTS = (
    PlannedRow(OTHER, TRUE, PERMUTED, -1),
    PlannedRow(CLASS_EFFECT, TRUE, PERMUTED, 1),
    PlannedRow(RATIO, TRUE, PERMUTED, 1),
    PlannedRow(RATIO_MINUS_CONTROL, TRUE, PERMUTED, 1),
    PlannedRow(CLASS_SHARE, TRUE, PERMUTED, 1),
    PlannedRow(CLASS_EFFECT, TRUE, RARE_WORD, 0),
)
EQUIVALENCES = (PlannedRow(SAME, TRUE, PERMUTED, 0),)


def write_study(folders: Mapping[tuple[str, int], Path], to: Path) -> None:
    """Write the tables and the figure of finished runs.

    Args:
        folders: Folders of the runs by setting and seed.
        to: Folder of `runs.csv`, `tests.csv` and `study.png`.
    """
    runs = pd.concat([read_run(folder, setting, seed) for (setting, seed), folder in folders.items()])
    to.mkdir(parents=True, exist_ok=True)
    runs.round(DIGITS).to_csv(to / "runs.csv", index=False, lineterminator="\n")
    table = evaluate_plan(runs)
    table.round(DIGITS).to_csv(to / "tests.csv", index=False, lineterminator="\n")
    draw_study(runs, to / "study")
    print(table.to_string(index=False))


def read_run(folder: Path, setting: str, seed: int) -> pd.DataFrame:
    """Return a table with a row for each quantity, checkpoint and layer of a run, and its `value`.

    The classifier's `train accuracy`, `train margin`, `test accuracy` and `test margin` are quantities without a layer.
    """
    tables = folder / "reports/plots"
    quantities = [*_read_own_shares(tables), *_read_ratios(tables), _read_class_share(tables)]
    table = pd.concat(quantities)[["quantity", *KEYS, "mean"]].dropna()
    table = table[table["checkpoint"].isin(["pretrained", "finetuned"])].rename(columns={"mean": "value"})
    fit = read_results(tables / "finetune/finetune_fit.csv").set_index("split")
    fit_rows = [
        (f"{split} {score}", "finetuned", np.nan, fit.loc[split, score])
        for split, score in product(("train", "test"), ("accuracy", "margin"))
    ]
    table = pd.concat([table, pd.DataFrame(fit_rows, columns=list(table))], ignore_index=True)
    table.insert(0, "seed", seed)
    table.insert(0, "setting", setting)
    return table


def _read_own_shares(tables: Path) -> list[pd.DataFrame]:
    """Return a list with a table of own shares for each kind of donor in `DONORS`."""
    exchange = read_results(tables / "measure/exchange.csv").query("quantity == 'own_share'")
    return [exchange[exchange["donor"] == donor].assign(quantity=name) for name, donor in DONORS.items()]


def _read_ratios(tables: Path) -> list[pd.DataFrame]:
    """Return tables of the mixing ratio `METHOD`, and of the ratio minus its control `corpus_value`."""
    ratios = read_results(tables / "measure/mixing.csv").query("method == @METHOD")
    controls = read_results(tables / "measure/mixing_controls.csv").query(
        "method == @METHOD and control == 'corpus_value'"
    )
    differences = ratios.set_index(KEYS)["mean"] - controls.set_index(KEYS)["mean"]
    return [ratios.assign(quantity=RATIO), differences.reset_index().assign(quantity=RATIO_MINUS_CONTROL)]


def _read_class_share(tables: Path) -> pd.DataFrame:
    """Return a table of the predicted class's share in the contributions of other tokens, minus the null of this share.

    The null is the 95 % quantile of the share after the classes are permuted.
    """
    geometry = read_results(tables / "measure/geometry.csv").query("point == 'attention'")
    by_measure = geometry.set_index([*KEYS, "measure"])["mean"].unstack("measure")
    difference = by_measure["share_class"] - by_measure["share_class_permuted"]
    return difference.rename("mean").reset_index().assign(quantity=CLASS_SHARE)


def evaluate_plan(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the outcome of each planned test and equivalence test.

    `runs` contains the tables of `read_run` for all runs.
    """
    planned = [_compute_row(row, runs, is_test=True) for row in TESTS]
    planned += [_compute_row(row, runs, is_test=False) for row in EQUIVALENCES]
    table = pd.DataFrame(planned)
    table.insert(table.columns.get_loc("p") + 1, "p_holm", holm(table["p"]))
    table["outcome"] = [_find_outcome(row) for _, row in table.iterrows()]
    return table


def _compute_row(row: PlannedRow, runs: pd.DataFrame, *, is_test: bool) -> dict[str, object]:
    """Return a row with the mean difference of a metric between two settings, its intervals and its p value.

    Runs with the same seed form a pair; pairs with an insufficient training accuracy are excluded. The compared values
    are those of `change_by_seed`. The p value is NaN unless `is_test` is True.
    """
    fitted = fitted_seeds(runs)
    changes = change_by_seed(runs, row.metric)
    seeds_of_first = fitted.get(row.first, [])
    seeds_of_second = fitted.get(row.second, [])
    seeds = [seed for seed in seeds_of_first if seed in seeds_of_second]
    if len(seeds) < 2:
        raise InputError(
            f"{row.metric}: {len(seeds)} fitted pairs of seeds, but 2 are needed; run the study with more --seeds"
        )
    differences = (changes[row.first][seeds] - changes[row.second][seeds]).to_numpy()
    student = stats.ttest_1samp(differences, 0)
    interval = student.confidence_interval(LEVEL)
    narrow_interval = student.confidence_interval(2 * LEVEL - 1)  # 90 %, for two one-sided tests of equivalence
    return {
        "metric": row.metric,
        "difference": f"{row.first} minus {row.second}",
        "mean": differences.mean(),
        "ci_low": interval.low,
        "ci_high": interval.high,
        "ci90_low": narrow_interval.low,
        "ci90_high": narrow_interval.high,
        "p": sign_flip_p(differences) if is_test else np.nan,
        "expected_sign": row.expected_sign,
        "pairs": len(differences),
    }


def fitted_seeds(runs: pd.DataFrame) -> dict[str, list[int]]:
    """Return, for each setting, the seeds whose run has a training accuracy of at least `MIN_TRAIN_ACCURACY`."""
    accuracies = runs[runs["quantity"] == "train accuracy"]
    fitted = accuracies[accuracies["value"] >= MIN_TRAIN_ACCURACY]
    return {setting: sorted(rows["seed"]) for setting, rows in fitted.groupby("setting")}


def change_by_seed(runs: pd.DataFrame, metric: str) -> dict[str, pd.Series]:
    """Return the change of a metric during fine-tuning (after minus before) by setting, as a series indexed by seed.

    Ratios are averaged over layers; other metrics are those of the last layer. For `CLASS_SHARE`, the plan compares the
    values after fine-tuning, so these are returned instead of changes.
    """
    rows = runs[runs["quantity"] == metric]
    is_ratio = metric in (RATIO, RATIO_MINUS_CONTROL)
    if not is_ratio:
        rows = rows[rows["layer"] == LAST_LAYER]
    means = rows.groupby(["setting", "seed", "checkpoint"])["value"].mean()
    by_checkpoint = means.unstack("checkpoint")  # a column for each checkpoint
    compared = by_checkpoint["finetuned"]
    if metric != CLASS_SHARE:  # for the class share, the plan uses the values after fine-tuning
        compared = compared - by_checkpoint["pretrained"]
    compared_by_setting = {}
    for setting in compared.index.unique("setting"):
        compared_by_setting[str(setting)] = compared[setting]
    return compared_by_setting


def sign_flip_p(differences: Doubles) -> float:
    """Return the exact two-sided p value of the mean of paired differences, by a permutation test over all signs."""
    every_pattern = {"permutation_type": "samples", "n_resamples": np.inf}
    return float(stats.permutation_test((differences,), np.mean, **every_pattern).pvalue)


def _find_outcome(row: pd.Series) -> str:
    """Return the outcome of a planned test or equivalence test as text; a row without a p value is an equivalence test.

    A test with an expected sign is confirmed, refuted or undecided; a test without an expected sign is significant or
    not significant.
    """
    if np.isnan(row["p"]):
        is_equivalent = row["ci90_low"] > -EQUIVALENCE_BOUND and row["ci90_high"] < EQUIVALENCE_BOUND
        return "equivalent" if is_equivalent else "undecided"
    is_significant = row["p_holm"] < 1 - LEVEL
    if row["expected_sign"] == 0:
        return "significant" if is_significant else "not significant"
    has_expected_sign = np.sign(row["mean"]) == row["expected_sign"]
    if is_significant and has_expected_sign:
        return "confirmed"
    # A test is refuted if the whole interval has the opposite sign.
    is_positive = row["ci_low"] > 0
    is_negative = row["ci_high"] < 0
    is_opposite = is_positive if row["expected_sign"] < 0 else is_negative
    return "refuted" if is_opposite else "undecided"


def draw_study(runs: pd.DataFrame, path: Path) -> None:
    """Save a figure of the own share by layer as `path`.png, with a panel for each kind of donor.

    Thin lines are single runs; thick lines are means over seeds. `runs` contains the tables of `read_run`.
    """
    with paper_style():
        figure = Figure(figsize=(TWO_COLUMNS, 2.6), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, quantity, title in zip(panels, (SAME, OTHER), ("same class", "other class"), strict=True):
            rows = runs[runs["quantity"] == quantity]
            # Before fine-tuning, the model is the same in all settings.
            before = rows[rows["checkpoint"] == "pretrained"].groupby("layer")["value"].mean()
            axes.plot(before.index, 100 * before, color=COLOURS["before"], linestyle="--", label="before fine-tuning")
            for setting in SETTINGS:
                values = rows[(rows["checkpoint"] == "finetuned") & (rows["setting"] == setting)]
                by_seed = 100 * values.pivot_table(index="layer", columns="seed", values="value")
                axes.plot(by_seed.index, by_seed, color=COLOURS[setting], linewidth=0.5, alpha=0.35)
                axes.plot(by_seed.index, by_seed.mean(axis=1), color=COLOURS[setting], label=setting)
            axes.set_title(f"donors of the {title}")
            axes.set_xlabel("Layer")
        panels[0].set_ylabel("own share (%)")
        panels[0].legend()
        save_figure(figure, path, ["png"], 200)
