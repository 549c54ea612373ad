"""Run the pipeline for several seeds, and put experiments side by side in one table and one figure.

    python -m experiments run --dataset stanfordnlp/imdb [--seeds "0 1 2 3 4"] [--profile profiles/study.txt]
    python -m experiments table [NAME ...] [--csv measure/mixing] [--to reports/experiments]

`run` clones the last commit into experiments/runs/<profile>/seed_<n>/ for each seed, runs `dvc repro` there without
`render`, goes on where it was stopped, and writes the table to docs/study/. `table` reads DVC's experiments of the
current commit, or those named: experiments, commits, or folders that hold a run. Experiments that differ in nothing but
the seed are one setting; means are over its seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from attnmix.core.errors import InputError
from experiments.figure import draw_ratios
from experiments.runs import run_seeds
from experiments.tables import over_seeds, read_experiments

MIXING = "measure/mixing"
DIGITS = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 where the run of a seed failed."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="the pipeline for each seed, and their table")
    run.add_argument("--dataset", required=True, help="hub identifier, folder or file")
    run.add_argument("--seeds", default="0 1 2 3 4", help="whole numbers, parted by spaces")
    run.add_argument("--profile", type=Path, default=Path("profiles/study.txt"), help="key=value overrides")
    run.add_argument("--to", type=Path, default=Path("docs/study"), help="folder of table and figure")
    table = commands.add_parser("table", help="experiments side by side")
    table.add_argument("names", nargs="*", help="experiments, commits or folders; default: those of this commit")
    table.add_argument("--csv", default=MIXING, help="of reports/plots; its keys stand before the column mean")
    table.add_argument("--to", type=Path, default=Path("reports/experiments"), help="folder of table and figure")
    options = parser.parse_args(arguments)
    if options.command == "table":
        write_table(options.names, options.csv, options.to)
        return 0
    seeds = list(dict.fromkeys(options.seeds.split()))
    if not seeds or not all(seed.isdecimal() for seed in seeds):
        raise InputError(f"--seeds: {options.seeds!r} is not allowed; allowed: whole numbers from 0 on, as in '0 1 2'")
    folders = run_seeds(options.dataset, seeds, options.profile)
    if folders:
        write_table(folders, MIXING, options.to)
    return int(len(folders) < len(seeds))


def write_table(names: Sequence[str], csv: str, to: Path) -> None:
    """Write `<csv>.csv` to the folder `to` and, of mixing ratios, their figure as png and pdf."""
    table = over_seeds(read_experiments(names, csv))
    to.mkdir(parents=True, exist_ok=True)
    path = to / f"{Path(csv).name}.csv"
    table.round(DIGITS).to_csv(path, index=False, lineterminator="\n")
    if csv == MIXING:
        draw_ratios(table, path.with_suffix(""))
    seeds = table.groupby("setting", sort=False)["seeds"].max()
    print(f"{path}:", "; ".join(f"{setting} ({number} seeds)" for setting, number in seeds.items()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"error: {error}")
