"""Ask what fine-tuning mixes, run the pipeline for several seeds, and compare experiments.

    python -m experiments answer --dataset stanfordnlp/imdb [--settings "true labels; rare word"] [--only probes]
    python -m experiments trainings --dataset stanfordnlp/imdb
    python -m experiments rare-word --dataset stanfordnlp/imdb --to FOLDER
    python -m experiments run --dataset stanfordnlp/imdb [--seeds "0 1 2 3 4"] [--profile profiles/study.txt]
    python -m experiments table [NAME ...] [--csv measure/mixing] [--to reports/experiments]
    python -m experiments layers FOLDER [--to docs/study/mpnet.csv]
    python -m experiments fits FOLDER ... [--to docs/study]
    python -m experiments lengths FOLDER ... [--to docs/study/lengths.csv]
    python -m experiments few-tokens --dataset stanfordnlp/imdb [--model models/finetuned]

`answer` fine-tunes one model for known tasks and writes docs/study (`experiments.answer`; hours, and it resumes).
`trainings` writes what `attnmix.compare` claims of such models (`experiments.trainings`; an hour, and it resumes).
`rare-word` writes a data set whose class is whether a word is in the review (`experiments.rare_word`).
`run` clones the last commit into experiments/runs/<profile>/seed_<n>/ for each seed, runs `dvc repro` there without
`render`, or until a stage, resumes where it was stopped, and writes the table to reports/experiments/. `table` reads
DVC's experiments of the current commit, or those named: experiments, commits, or folders that hold a run. Experiments
that differ in nothing but the seed are one setting; means are over its seeds. `layers` writes what one run measured by
layer as one table, `fits` how well the classifiers of some runs fit what they were trained on, and what their layers
mix. `lengths` measures the classifiers of some runs on their reviews cut to several lengths (`experiments.lengths`).
`few-tokens` scores maps of short texts, by UMAP and by principal components (`experiments.few_tokens`).
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

from attnmix.core.arithmetic import environment
from attnmix.core.errors import InputError
from experiments.tables import MIXING, write_layers, write_table

RUNS = Path("experiments/runs")
SKIPPED_STAGES = ("sources", "render")  # DVC adds the first where it is needed; figures and page are of one run
RESULTS = ("dvc.lock", "reports")  # the files in git that a run changes


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 where the run of a seed failed."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="the pipeline for each seed, and their table")
    run.add_argument("--dataset", required=True, help="hub identifier, folder or file")
    run.add_argument("--seeds", default="0 1 2 3 4", help="whole numbers, separated by spaces")
    run.add_argument("--profile", type=Path, default=Path("profiles/study.txt"), help="key=value overrides")
    run.add_argument("--until", help="the last stage to run, with those that it needs; default: all but render")
    run.add_argument("--to", type=Path, default=Path("reports/experiments"), help="folder of table and figure")
    rare_word = commands.add_parser("rare-word", help="reviews whose class is whether a rare word is there")
    rare_word.add_argument("--dataset", required=True, help="hub identifier, folder or file; columns text and label")
    rare_word.add_argument("--to", type=Path, required=True, help="new folder of the data set")
    answer = commands.add_parser("answer", help="classifiers of known tasks, before and after fine-tuning")
    answer.add_argument("--dataset", required=True, help="hub identifier, folder or file")
    answer.add_argument("--settings", help="names in experiments/training.py, separated by semicolons; default: all")
    answer.add_argument("--only", choices=["measures", "probes", "interventions"], help="these tables alone")
    answer.add_argument("--to", type=Path, default=Path("docs/study"), help="folder of tables and figure")
    trainings = commands.add_parser("trainings", help="what `attnmix.compare` claims of trainings with known labels")
    trainings.add_argument("--dataset", required=True, help="hub identifier, folder or file")
    trainings.add_argument("--to", type=Path, default=Path("docs/study/trainings.csv"), help="csv")
    study = commands.add_parser("study", help="the runs of docs/study/plan.md, their table, tests and figure")
    study.add_argument("--dataset", required=True, help="hub identifier, folder or file")
    study.add_argument("--seeds", default=" ".join(map(str, range(1, 11))), help="whole numbers, separated by spaces")
    study.add_argument("--to", type=Path, default=Path("docs/study"), help="folder of tables and figure")
    table = commands.add_parser("table", help="experiments side by side")
    table.add_argument("names", nargs="*", help="experiments, commits or folders; default: those of this commit")
    table.add_argument("--csv", default=MIXING, help="of reports/plots; its keys are the columns before `mean`")
    table.add_argument("--to", type=Path, default=Path("reports/experiments"), help="folder of table and figure")
    layers = commands.add_parser("layers", help="what one run measured by layer")
    layers.add_argument("folder", type=Path, help="of the run")
    layers.add_argument("--to", type=Path, default=Path("docs/study/mpnet.csv"), help="csv")
    fits = commands.add_parser("fits", help="trainings on given and permuted labels, and on a rare word")
    fits.add_argument("folders", type=Path, nargs="+", help="of the runs")
    fits.add_argument("--to", type=Path, default=Path("docs/study"), help="folder of fits.csv and fits_layers.csv")
    lengths = commands.add_parser("lengths", help="the same reviews cut to several lengths")
    lengths.add_argument("folders", type=Path, nargs="+", help="of the runs")
    lengths.add_argument("--to", type=Path, default=Path("docs/study/lengths.csv"), help="csv")
    few = commands.add_parser("few-tokens", help="how much maps of short texts keep, by UMAP and principal components")
    few.add_argument("--dataset", required=True, help="hub identifier, folder or file")
    few.add_argument("--model", default="models/finetuned", help="hub identifier or folder")
    few.add_argument("--to", type=Path, default=Path("docs/study/few_tokens.csv"), help="csv")
    options = parser.parse_args(arguments)
    if options.command in ("answer", "trainings") and not environment.in_place():
        # Libraries read it when they are loaded, which has happened.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | environment.SETTINGS)
    if options.command == "trainings":
        from experiments.trainings import write_claims

        write_claims(options.dataset, options.to)
        return 0
    if options.command == "answer":
        from experiments.answer import run_settings  # torch takes seconds

        names = options.settings and [name.strip() for name in options.settings.split(";")]
        run_settings(options.dataset, names, options.to, only=options.only)
        return 0
    if options.command == "rare-word":
        from experiments.rare_word import write_reviews

        write_reviews(options.dataset, options.to)
        return 0
    if options.command == "few-tokens":
        from experiments.few_tokens import write_few_tokens

        write_few_tokens(options.dataset, options.model, options.to)
        return 0
    if options.command == "layers":
        write_layers(options.folder, options.to)
        return 0
    if options.command == "fits":
        from experiments.fits import write_by_layer, write_fits

        write_fits(options.folders, options.to / "fits.csv")
        write_by_layer(options.folders, options.to / "fits_layers.csv")
        return 0
    if options.command == "lengths":
        from experiments.lengths import write_lengths

        write_lengths(options.folders, options.to)
        return 0
    if options.command == "table":
        write_table(options.names, options.csv, options.to)
        return 0
    seeds = list(dict.fromkeys(options.seeds.split()))
    if not seeds or not all(seed.isdecimal() for seed in seeds):
        raise InputError(f"--seeds: {options.seeds!r} is not allowed; allowed: whole numbers from 0 on, as in '0 1 2'")
    if options.command == "study":
        return run_study(options.dataset, seeds, options.to)
    if folders := run_seeds(options.dataset, seeds, options.profile, options.until):
        write_table(folders, MIXING, options.to)
    return int(len(folders) < len(seeds))


def run_seeds(
    dataset: str,
    seeds: Sequence[str],
    profile: Path,
    until: str | None = None,
    setting: str = "",
    changes: Sequence[str] = (),
) -> list[str]:
    """Run the committed pipeline for each seed; stages that are up to date are skipped.

    Args:
        dataset: Hub identifier, folder or file.
        seeds: Seeds as written.
        profile: File of `key=value` overrides.
        until: Last stage, which is run with the stages that it needs; default: all but `SKIPPED_STAGES`.
        setting: Name of a subfolder for these runs.
        changes: Further overrides, which define the setting.

    Returns:
        Folders of the runs that succeeded, `experiments/runs/<profile>/[<setting>/]seed_<n>`.
    """
    declared = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]
    stages = [stage for stage in declared if stage not in SKIPPED_STAGES]
    if until is not None and until not in stages:
        raise InputError(f"--until: there is no stage {until!r}; allowed: {', '.join(stages)}")
    targets = stages if until is None else [until]
    if not profile.is_file():
        raise InputError(f"--profile: there is no file {profile}")
    lines = profile.read_text(encoding="utf-8").splitlines()
    overrides = [line for line in lines if line.strip() and not line.startswith("#")]
    # A local path must be absolute in a clone; DVC's grammar takes any path in single quotes.
    name = str(Path(dataset).resolve()) if Path(dataset).exists() else dataset
    name = name.replace("\\", "\\\\").replace("'", "\\'")
    command = [sys.executable, "-m", "dvc", "repro", *targets]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    folders = []
    for seed in seeds:
        folder = RUNS / profile.stem / setting / f"seed_{seed}"
        _update_clone(folder)
        apply_overrides(folder / "params.yaml", [*overrides, *changes, f"dataset.name='{name}'", f"seed={seed}"])
        print(f"{folder}: dvc repro", file=sys.stderr, flush=True)
        if subprocess.run(command, cwd=folder, env=os.environ | {"PATH": path}, check=False).returncode:
            print(f"left out: {folder}: `dvc repro` failed, see above", file=sys.stderr)
        else:
            folders.append(str(folder))
    return folders


def run_study(dataset: str, seeds: Sequence[str], to: Path) -> int:
    """Run every setting of the study for each seed; write its tables if all runs succeeded, else return 1."""
    from experiments.study import PROFILE, SETTINGS, write_study

    folders = {}
    for seed in seeds:
        for setting, changes in SETTINGS.items():
            name = setting.replace(" ", "_")
            for folder in run_seeds(dataset, [seed], PROFILE, "measure", name, changes):
                folders[setting, int(seed)] = Path(folder)
    if len(folders) < len(seeds) * len(SETTINGS):
        return 1
    write_study(folders, to)
    return 0


def _update_clone(folder: Path) -> None:
    """Clone the repository in the current folder, or bring its clone to the last commit and leave its results."""
    if not (folder / ".git").exists():
        subprocess.run(["git", "clone", "--quiet", ".", folder], check=True)
    subprocess.run(["git", "fetch", "--quiet", Path.cwd(), "HEAD"], cwd=folder, check=True)
    restored = [".", *(f":!{name}" for name in RESULTS)]
    restore = ["git", "restore", "--source", "FETCH_HEAD", "--staged", "--worktree", "--", *restored]
    subprocess.run(restore, cwd=folder, check=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"error: {error}")
