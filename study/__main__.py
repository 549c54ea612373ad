"""Run the study and write what it says to `docs/study/`.

    python -m study [--dataset stanfordnlp/imdb] [--seeds "0 1 2 3 4"] [--jobs 1] [--collect-only]

One experiment `study-<seed>` for each seed, in DVC's queue, with the values of profiles/study.txt; finished ones of
the same parameters and the same code are kept. Then the csv files of all, from DVC's store, become tables over seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from attnmix.core.errors import InputError
from docs.tables import with_tables
from study.figure import draw_mixing
from study.runs import Plan, missing_reason, read_plan, run_missing
from study.store import Experiment, find, metrics, name_of, plot
from study.tables import accuracy, make_tables, markdown

PROFILE = Path("profiles/study.txt")
OUTPUT = Path("docs/study")
README = "README.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="stanfordnlp/imdb", help="hub identifier, folder or file")
    parser.add_argument("--seeds", default="0 1 2 3 4", help="whole numbers, parted by spaces")
    parser.add_argument("--jobs", type=int, default=1, help="experiments at a time")
    parser.add_argument("--collect-only", action="store_true", help="run nothing, take what is finished")
    arguments = parser.parse_args()
    folder, seeds = Path(), seeds_of(arguments.seeds)
    plan = read_plan(folder, PROFILE, arguments.dataset)
    failed = {} if arguments.collect_only else run_missing(plan, seeds, folder, arguments.jobs)
    experiments, problems = usable(plan, seeds, folder, failed)
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    if not experiments:
        raise InputError(
            "no experiment of the study is finished, so there is nothing to take together; run `make study`"
        )
    write(experiments, folder, OUTPUT)
    return int(bool(problems))


def seeds_of(text: str) -> list[int]:
    """The seeds, each once; `InputError` for what is no whole number from 0 on."""
    parts = text.split()
    if not parts or not all(part.isdecimal() for part in parts):
        raise InputError(f"--seeds: {text!r} is not allowed; whole numbers from 0 on, parted by spaces")
    return list(dict.fromkeys(map(int, parts)))


def usable(
    plan: Plan, seeds: Sequence[int], folder: Path, failed: Mapping[str, str]
) -> tuple[list[Experiment], list[str]]:
    """The finished experiments of these parameters and this code, and what is wrong with each other one."""
    experiments, problems = [], []
    for seed in seeds:
        experiment, name = find(seed, folder), name_of(seed)
        reason = missing_reason(experiment, plan, seed, folder)
        if name in failed:
            problems.append(f"{name} failed: {failed[name]}")
        elif reason is not None:
            problems.append(reason)
        elif experiment is not None:
            experiments.append(experiment)
    return experiments, problems


def write(experiments: Sequence[Experiment], folder: Path, output: Path) -> None:
    """Tables as csv, the figure, and the tables in `README.md` between their marks."""

    def read(name: str) -> dict[int, pd.DataFrame]:
        found = {each.seed: plot(each, name, folder) for each in experiments}
        return {seed: table for seed, table in found.items() if table is not None}

    tables, left_out = make_tables(read)
    tables["accuracy"] = accuracy({each.seed: metrics(each, "finetune", folder) for each in experiments})
    output.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_csv(output / f"{name}.csv", index=False, lineterminator="\n")
    draw_mixing(tables, output / "mixing")
    text = (output / README).read_text(encoding="utf-8")
    (output / README).write_text(with_tables(text, markdown(tables)), encoding="utf-8")
    print(f"{output}: {len(tables)} tables of seeds {', '.join(str(each.seed) for each in experiments)}")
    for reason in left_out:
        print(f"no table: {reason}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"error: {error}")
