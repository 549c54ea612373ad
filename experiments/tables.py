"""A table and a figure that compare experiments: means over the seeds of each setting, with Student's t intervals.

Each seed has its own trained model and its own sample of texts. The results of different seeds are therefore
independent, and their variation includes that of the model and that of the sample. The interval is mean ± t(n - 1) sd /
sqrt(n). Two settings are compared in pairs of runs with the same seed. Changes due to fine-tuning (the checkpoint
`difference`) are tested against 0 by the two-sided t test; `p_holm` is the p value adjusted for the number of layers by
Holm's step-down method.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import dvc.api
import numpy as np
import pandas as pd
import yaml
from dvc.exceptions import DvcException
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import stats

from attnmix.core.errors import InputError, first_line
from attnmix.core.statistics import LEVEL
from attnmix.core.store.files import read_results
from attnmix.figures.labels import CHECKPOINTS, RATIO_MARKS
from attnmix.figures.style import TWO_COLUMNS, paper_style, printable, save_figure

MIXING = "measure/mixing"
DIGITS = 6
REQUIRED_COLUMNS = ("checkpoint", "mean")  # of each csv file; the columns before `mean` are a row's keys
MIN_STANDARD_ERROR = 1e-12  # smaller values are rounding errors of equal numbers
DRAWN_METHODS = ("attn_n", "attnres_n", "attnresln_n", "layer_n")
LOOKS = {"pretrained": ("#0072B2", "o"), "finetuned": ("#D55E00", "s")}  # colours of Okabe and Ito, and markers
PANEL_HEIGHT = 1.9  # inches


def write_table(names: Sequence[str], csv: str, to: Path) -> None:
    """Compare the experiments `names`, and write the resulting table `<csv>.csv` to the folder `to`.

    For mixing ratios, also write a figure as png and pdf.
    """
    experiments = read_experiments(names, csv)
    table = over_seeds(pd.concat([experiments, paired_differences(experiments)], ignore_index=True))
    to.mkdir(parents=True, exist_ok=True)
    path = to / f"{Path(csv).name}.csv"
    table.round(DIGITS).to_csv(path, index=False, lineterminator="\n")
    if csv == MIXING:
        draw_ratios(over_seeds(experiments), path.with_suffix(""))
    seeds = table.groupby("setting", sort=False)["seeds"].max()
    print(f"{path}:", "; ".join(f"{setting} ({number} seeds)" for setting, number in seeds.items()))


def read_experiments(names: Sequence[str], csv: str) -> pd.DataFrame:
    """Return `reports/plots/<csv>.csv` of all experiments as one table with additional columns `setting` and `seed`.

    A name is a folder with a run, an experiment of DVC, or a commit; without names, all finished experiments of the
    current commit are loaded. `setting` lists the parameters that differ between the experiments, except the seed.
    """
    path = f"reports/plots/{csv}.csv"
    parameters = {}
    tables = {}
    for name in names or experiments_of_commit():
        try:
            parameter_text = read(name, "params.yaml")
            table_text = read(name, path)
            parameters[name] = pd.json_normalize(yaml.safe_load(parameter_text)).iloc[0].map(str)
        except (OSError, DvcException, yaml.YAMLError) as error:
            print(f"omitted: {name}: {first_line(error)}", file=sys.stderr)
            continue
        tables[name] = read_results(io.StringIO(table_text))
        _check_columns(csv, list(tables[name]))
    if not tables:
        advice = "create some with `dvc exp run` or `python -m experiments run`"
        raise InputError(f"no experiment with {path}; {advice}; allowed tables: {_allowed_tables()}")
    by_experiment = pd.DataFrame(parameters).fillna("absent").T  # a column for each parameter
    differing = [key for key in by_experiment if key != "seed" and by_experiment[key].nunique() > 1]
    by_setting = {}  # if several experiments have the same parameters and seed, the last one is kept
    for name, row in by_experiment.iterrows():
        setting = ", ".join(f"{key}={row[key]}" for key in differing) or "all"
        by_setting[setting, int(row["seed"])] = tables[name]
    # The third level of the index contains the row numbers of the csv files.
    return pd.concat(by_setting, names=["setting", "seed"]).droplevel(2).reset_index()


def _check_columns(csv: str, columns: Sequence[str]) -> None:
    """Raise `InputError` for a table without one of `REQUIRED_COLUMNS`."""
    lacking = [name for name in REQUIRED_COLUMNS if name not in columns]
    if lacking:
        problem = f"--csv: {csv} has no column {lacking[0]}; it has {', '.join(columns)}"
        raise InputError(f"{problem}; allowed: {_allowed_tables()}")


def _allowed_tables() -> str:
    """Return, for an error message, the names of the tables with `REQUIRED_COLUMNS` in the current folder's run.

    If there are none, return a description of the required tables.
    """
    folder = Path("reports/plots")
    names = []
    for file in sorted(folder.rglob("*.csv")):
        columns = set(read_results(file, nrows=0))
        if columns.issuperset(REQUIRED_COLUMNS):
            names.append(file.relative_to(folder).with_suffix("").as_posix())
    if not names:
        return f"tables with the columns {' and '.join(REQUIRED_COLUMNS)}, such as {MIXING}"
    return ", ".join(names)


def experiments_of_commit() -> list[str]:
    """Return the names of the current commit's finished DVC experiments; print the names and states of the others."""
    states = {row["Experiment"]: row.get("State") for row in dvc.api.exp_show() if row.get("Experiment")}
    finished = []
    for name, state in states.items():
        if state:  # for example "Running" or "Failed"; empty for a finished experiment
            print(f"omitted: {name}: {state.lower()}", file=sys.stderr)
        else:
            finished.append(name)
    return finished


def read(name: str, path: str) -> str:
    """Return the text of the file `path` at `name`, which is a folder, a DVC experiment or a commit."""
    if Path(name).is_dir():
        return Path(name, path).read_text(encoding="utf-8")
    return str(dvc.api.read(path, rev=name))


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over seeds, its interval and p value, and the number of seeds, for each combination of keys.

    The keys are the columns before `mean`, except `seed`. The interval and p are NaN for a single seed; p is also NaN
    if all seeds have the same mean.
    """
    table = table.dropna(subset="mean")
    keys = [column for column in table.columns[: table.columns.get_loc("mean")] if column != "seed"]
    result = table.groupby(keys, sort=False, dropna=False)["mean"].agg(["mean", "sem", "count"]).reset_index()
    standard_error = result.pop("sem")
    seeds = result.pop("count")
    freedom = seeds - 1
    mean = result["mean"]
    half_width = stats.t.isf((1 - LEVEL) / 2, freedom) * standard_error
    # Only changes due to fine-tuning are tested.
    is_tested = (result["checkpoint"] == "difference") & (standard_error > MIN_STANDARD_ERROR)
    p = 2 * stats.t.sf(mean.abs() / standard_error.where(is_tested), freedom)
    result = result.assign(ci_low=mean - half_width, ci_high=mean + half_width, p=p, seeds=seeds)
    # p values are adjusted for the number of layers.
    keys_without_layer = [key for key in keys if key != "layer"]
    p_holm = result.groupby(keys_without_layer, dropna=False)["p"].transform(holm)
    result.insert(result.columns.get_loc("seeds"), "p_holm", p_holm)
    return result


def paired_differences(table: pd.DataFrame) -> pd.DataFrame:
    """Return the differences between two settings (first minus second) for their common seeds.

    Runs with the same seed are compared in pairs, because the seed determines the sample of texts and the new head of
    both runs. The result is empty unless `table` has exactly two settings.
    """
    settings = list(table["setting"].unique())
    if len(settings) != 2:
        return table.iloc[:0]
    keys = [column for column in table.columns[: table.columns.get_loc("mean")] if column != "setting"]
    by_setting = table.groupby("setting", sort=False)
    first, second = [rows.set_index(keys)["mean"] for _, rows in by_setting]
    difference = (first - second).dropna().reset_index()
    difference.insert(0, "setting", " minus ".join(settings))
    return difference


def holm(p: pd.Series) -> pd.Series:
    """Return the p values adjusted by Holm's step-down method; NaN values are ignored and remain NaN.

    Of n values in ascending order, the first is multiplied by n, the second by n - 1, and so on.
    """
    ordered = p.dropna().sort_values()
    adjusted = (ordered * np.arange(len(ordered), 0, -1)).cummax().clip(upper=1)
    return adjusted.reindex(p.index)


def draw_ratios(table: pd.DataFrame, path: Path) -> None:
    """Save a figure of mixing ratios by layer, with intervals, as `path`.png and .pdf.

    The panels have a row for each method and a column for each setting. `table` is a result of `over_seeds`.
    """
    methods = [method for method in DRAWN_METHODS if method in set(table["method"])] or list(table["method"].unique())
    settings = list(table["setting"].unique())
    with paper_style():
        size = TWO_COLUMNS * max(1.0, len(settings) / 4), PANEL_HEIGHT * len(methods) + 0.5
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(methods), len(settings), sharex=True, sharey="row", squeeze=False)
        for row, method in zip(panels, methods, strict=True):
            row[0].set_ylabel(f"{RATIO_MARKS[method].label}\nmixing ratio", fontsize=7)
            for axes, setting in zip(row, settings, strict=True):
                rows = table[(table["method"] == method) & (table["setting"] == setting)]
                _draw_panel(axes, rows)
        for axes, setting in zip(panels[0], settings, strict=True):
            axes.set_title(printable(setting).replace(", ", "\n"), fontsize=7)
        for axes in panels[-1]:
            axes.set_xlabel("Layer")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        panels[0, 0].legend()
        save_figure(figure, path, ["png", "pdf"], 200)


def _draw_panel(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the mean and the interval by layer, with a curve for each checkpoint."""
    for checkpoint, (color, marker) in LOOKS.items():
        curve = rows[rows["checkpoint"] == checkpoint]
        label = CHECKPOINTS[checkpoint]
        axes.plot("layer", "mean", data=curve, color=color, marker=marker, markersize=3, label=label)
        axes.fill_between("layer", "ci_low", "ci_high", data=curve, color=color, alpha=0.2, lw=0)
