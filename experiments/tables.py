"""One table of experiments: means over the seeds of each setting, with Student's t interval.

Each seed trains a model and draws reviews of its own, so the seeds' means are independent, and their spread holds the
chance of both: mean ± t(n - 1) sd / sqrt(n). Changes of a checkpoint (`difference`) are tested against 0 by the
two-sided t test; `p_holm` is adjusted by Holm's step-down method over the layers of one row's other keys.
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
from scipy import stats

from attnmix.core.errors import InputError
from attnmix.core.statistics import LEVEL

SMALLEST_ERROR = 1e-12  # standard error below which seeds gave the same number


def read_experiments(names: Sequence[str], csv: str) -> pd.DataFrame:
    """Return `reports/plots/<csv>.csv` of the experiments in one table `[setting, seed, the csv's columns]`.

    A name is a folder with a run, an experiment of DVC, or a commit; without names, all experiments of the current
    commit. `setting` says which parameters differ between the experiments but for the seed: `model.name=gpt2`.
    """
    path = f"reports/plots/{csv}.csv"
    parameters, tables = {}, {}
    for name in names or experiments_of_commit():
        try:
            values, text = read(name, "params.yaml"), read(name, path)
        except (OSError, DvcException) as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
            continue
        parameters[name] = pd.json_normalize(yaml.safe_load(values)).iloc[0].map(str)
        tables[name] = pd.read_csv(io.StringIO(text))
    if not tables:
        raise InputError(f"no experiment with {path}; `dvc exp run` or `python -m experiments run` makes some")
    by_name = pd.DataFrame(parameters).fillna("absent").T
    differing = [key for key in by_name if key != "seed" and by_name[key].nunique() > 1]
    parts = {}  # of experiments with the same parameters and seed, one counts
    for name, row in by_name.iterrows():
        setting = ", ".join(f"{key}={row[key]}" for key in differing) or "all"
        parts[setting, int(row["seed"])] = tables[name]
    return pd.concat(parts, names=["setting", "seed"]).droplevel(2).reset_index()


def experiments_of_commit() -> list[str]:
    """Return the names of DVC's finished experiments that started from the current commit, and print the others."""
    states = {row["Experiment"]: row.get("State") for row in dvc.api.exp_show() if row.get("Experiment")}
    for name, state in states.items():
        if state:
            print(f"left out: {name}: {state.lower()}", file=sys.stderr)
    return [name for name, state in states.items() if not state]


def read(name: str, path: str) -> str:
    """Return the text of a file of an experiment, given by its folder or by what DVC calls it."""
    return Path(name, path).read_text(encoding="utf-8") if Path(name).is_dir() else str(dvc.api.read(path, rev=name))


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Return mean, interval, p and number of seeds for each setting and each combination of the csv's keys.

    The keys are the columns before `mean`. The interval is NaN for a single seed, p also where seeds do not differ.
    """
    table = table.dropna(subset="mean")
    keys = [column for column in table.columns[: table.columns.get_loc("mean")] if column != "seed"]
    result = table.groupby(keys, sort=False, dropna=False)["mean"].agg(["mean", "sem", "count"]).reset_index()
    mean, error, freedom = result["mean"], result.pop("sem"), result["count"] - 1
    half = stats.t.isf((1 - LEVEL) / 2, freedom) * error
    tested = (result["checkpoint"] == "difference") & (error > SMALLEST_ERROR)
    p = 2 * stats.t.sf(mean.abs() / error.where(tested), freedom)
    result = result.assign(ci_low=mean - half, ci_high=mean + half, p=p, seeds=result.pop("count"))
    others = [key for key in keys if key != "layer"]
    result.insert(result.columns.get_loc("seeds"), "p_holm", result.groupby(others, dropna=False)["p"].transform(holm))
    return result


def holm(p: pd.Series) -> pd.Series:
    """Return the p values adjusted by Holm's step-down method; those that are NaN are not members of the family."""
    ordered = p.dropna().sort_values()
    return (ordered * np.arange(len(ordered), 0, -1)).cummax().clip(upper=1).reindex(p.index)
