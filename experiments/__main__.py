"""Run the pipeline for several seeds, compare experiments, and run the study.

    python -m experiments run --dataset stanfordnlp/imdb [--seeds "0 1 2 3 4"] [--profile profiles/laptop.txt]
    python -m experiments table [NAME ...] [--csv measure/mixing] [--to reports/experiments]
    python -m experiments imdb --dataset stanfordnlp/imdb
    python -m experiments study --dataset stanfordnlp/imdb

`run` clones the last commit to experiments/runs/<profile>/seed_<n>/ for each seed, runs `dvc repro` there (all stages
except `render`, or up to the stage `--until`), and writes the table to reports/experiments/. The same command continues
an interrupted run. `table` compares all of DVC's experiments of the current commit, or the named experiments, commits
and folders. Experiments that differ only in the seed form a setting; means are computed over the seeds of each setting.
`imdb` runs profiles/imdb.txt and writes docs/imdb (`experiments.imdb`). `study` runs docs/study/plan.md
(`experiments.study`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from dvc.utils.hydra import apply_overrides

from attnmix.core.errors import InputError
from experiments.tables import MIXING, write_table

RUNS = Path("experiments/runs")
SKIPPED_STAGES = ("sources", "render")  # DVC adds `sources` if necessary; `render` is only useful for a single run
RESULTS = ("dvc.lock", "reports")  # tracked files and folders that a run changes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments`; return 0, or 1 if the run of a seed failed."""
    options = _create_parser().parse_args(arguments)
    if options.command == "table":
        write_table(options.names, options.csv, options.to)
        return 0
    if options.command == "imdb":
        return run_imdb(options.dataset, options.to)
    seeds = list(dict.fromkeys(options.seeds.split()))
    if not seeds or not all(seed.isdecimal() for seed in seeds):
        raise InputError(f"--seeds: {options.seeds!r} is not allowed; allowed: whole numbers from 0 on, as in '0 1 2'")
    if options.command == "study":
        return run_study(options.dataset, seeds, options.to)
    folders = run_seeds(options.dataset, seeds, options.profile, options.until)
    if folders:
        write_table(folders, MIXING, options.to)
    return int(len(folders) < len(seeds))


def _create_parser() -> argparse.ArgumentParser:
    """Return the command-line parser, with the commands `run`, `imdb`, `study` and `table`."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the pipeline for each seed, and write a table of all seeds")
    run.add_argument("--dataset", required=True, help="hub identifier, folder or file")
    run.add_argument("--seeds", default="0 1 2 3 4", help="whole numbers, separated by spaces")
    run.add_argument("--profile", type=Path, default=Path("profiles/laptop.txt"), help="file of key=value overrides")
    run.add_argument("--until", help="last stage to run, with the stages that it needs; default: all except render")
    run.add_argument("--to", type=Path, default=Path("reports/experiments"), help="folder of table and figure")
    imdb = commands.add_parser("imdb", help="run the pipeline on IMDb with two seeds, and write docs/imdb")
    imdb.add_argument("--dataset", required=True, help="hub identifier, folder or file")
    imdb.add_argument("--to", type=Path, default=Path("docs/imdb"), help="folder of tables and figures")
    study = commands.add_parser("study", help="run docs/study/plan.md, and write its table, tests and figure")
    study.add_argument("--dataset", required=True, help="hub identifier, folder or file")
    study.add_argument("--seeds", default=" ".join(map(str, range(1, 11))), help="whole numbers, separated by spaces")
    study.add_argument("--to", type=Path, default=Path("docs/study"), help="folder of tables and figure")
    table = commands.add_parser("table", help="write a table that compares experiments")
    table.add_argument("names", nargs="*", help="experiments, commits or folders; default: experiments of this commit")
    table.add_argument("--csv", default=MIXING, help="table in reports/plots; columns before `mean` are its keys")
    table.add_argument("--to", type=Path, default=Path("reports/experiments"), help="folder of table and figure")
    return parser


def run_seeds(
    dataset: str,
    seeds: Sequence[str],
    profile: Path,
    until: str | None = None,
    setting: str = "",
    changes: Sequence[str] = (),
) -> list[str]:
    """Run the pipeline of the last commit for each seed; stages that are up to date are skipped.

    Args:
        dataset: Hub identifier, folder or file.
        seeds: Seeds, as strings.
        profile: File of `key=value` overrides.
        until: Last stage to run, after the stages that it needs; by default, all stages except `SKIPPED_STAGES` run.
        setting: Name of a subfolder for these runs.
        changes: Further `key=value` overrides, which define the setting.

    Returns:
        Folders of the runs that succeeded, `experiments/runs/<profile>/[<setting>/]seed_<n>`.
    """
    command = [sys.executable, "-m", "dvc", "repro", *_select_stages(until)]
    overrides = [*_read_profile(profile), *changes, f"dataset.name={_quote_dataset(dataset)}"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    folders = []
    for seed in seeds:
        folder = RUNS / profile.stem / setting / f"seed_{seed}"
        _update_clone(folder)
        apply_overrides(folder / "params.yaml", [*overrides, f"seed={seed}"])
        print(f"{folder}: dvc repro", file=sys.stderr, flush=True)
        run = subprocess.run(command, cwd=folder, env=os.environ | {"PATH": path}, check=False)
        if run.returncode:
            print(f"omitted: {folder}: `dvc repro` failed, see above", file=sys.stderr)
        else:
            folders.append(str(folder))
    return folders


def _select_stages(until: str | None) -> list[str]:
    """Return the stages to pass to `dvc repro`: `until`, or all stages except `SKIPPED_STAGES` if `until` is None."""
    stages = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]
    if until is None:
        return [stage for stage in stages if stage not in SKIPPED_STAGES]
    if until not in stages:
        raise InputError(f"--until: there is no stage {until!r}; allowed: {', '.join(stages)}")
    return [until]


def _read_profile(profile: Path) -> list[str]:
    """Return the `key=value` overrides in a file, without empty lines and comments."""
    if not profile.is_file():
        raise InputError(f"--profile: there is no file {profile}; pass one, such as profiles/laptop.txt")
    lines = profile.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def _quote_dataset(dataset: str) -> str:
    """Return the name of a dataset in quotes, as the value of an override; local paths are made absolute.

    Relative paths would be wrong, because the pipeline runs in a clone. DVC accepts any path in single quotes.
    """
    name = str(Path(dataset).resolve()) if Path(dataset).exists() else dataset
    escaped = name.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def run_imdb(dataset: str, to: Path) -> int:
    """Run the pipeline on IMDb with each of the `SEEDS`, and write the results to the folder `to`.

    Return 0; if a run failed, return 1 and write no results. Only the first run includes the stages after `measure`.
    """
    from experiments.imdb import PROFILE, SEEDS, publish

    first_seed, *other_seeds = SEEDS
    folders = run_seeds(dataset, [first_seed], PROFILE, "render")
    folders += run_seeds(dataset, other_seeds, PROFILE, "measure")
    if len(folders) < len(SEEDS):
        return 1
    publish([Path(folder) for folder in folders], to)
    return 0


def run_study(dataset: str, seeds: Sequence[str], to: Path) -> int:
    """Run every setting of the study for each seed, and write the tables to the folder `to`.

    Return 0; if a run failed, return 1 and write no tables.
    """
    from experiments.study import PROFILE, SETTINGS, write_study

    folders = {}
    for seed in seeds:
        for setting, changes in SETTINGS.items():
            name = setting.replace(" ", "_")
            for folder in run_seeds(dataset, [seed], PROFILE, "measure", name, changes):  # one folder, or none
                folders[setting, int(seed)] = Path(folder)
    if len(folders) < len(seeds) * len(SETTINGS):
        return 1
    write_study(folders, to)
    return 0


def _update_clone(folder: Path) -> None:
    """Clone the repository to `folder`, or update an existing clone to the last commit, except `RESULTS`."""
    if not (folder / ".git").exists():
        subprocess.run(["git", "clone", "--quiet", ".", folder], check=True)
    subprocess.run(["git", "fetch", "--quiet", Path.cwd(), "HEAD"], cwd=folder, check=True)
    restored = [".", *(f":!{name}" for name in RESULTS)]  # in git's syntax, :! excludes a path
    restore = ["git", "restore", "--source", "FETCH_HEAD", "--staged", "--worktree", "--", *restored]
    subprocess.run(restore, cwd=folder, check=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"error: {error}")
