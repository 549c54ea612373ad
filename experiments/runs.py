"""Runs the pipeline once for each seed, each in a clone of its own that DVC keeps up to date."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from dvc.utils.hydra import apply_overrides

RUNS = Path("experiments/runs")
NOT_RUN = ("sources", "render")  # DVC adds the first where it is needed; figures and page are of one run
RESULTS = ("dvc.lock", "reports")  # what a run writes into files of git


def run_seeds(dataset: str, seeds: Sequence[str], profile: Path) -> list[str]:
    """Run the committed pipeline for each seed with the profile's overrides; what is finished is not run again.

    Returns the folders of the runs that succeeded, `experiments/runs/<profile>/seed_<n>`.
    """
    lines = profile.read_text(encoding="utf-8").splitlines()
    overrides = [line for line in lines if line.strip() and not line.startswith("#")]
    # The clones lie elsewhere, so a local path must be absolute; DVC's grammar takes any path in single quotes.
    name = str(Path(dataset).resolve()) if Path(dataset).exists() else dataset
    name = name.replace("\\", "\\\\").replace("'", "\\'")
    stages = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]
    command = [sys.executable, "-m", "dvc", "repro", *(stage for stage in stages if stage not in NOT_RUN)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    folders = []
    for seed in seeds:
        folder = RUNS / profile.stem / f"seed_{seed}"
        update_clone(folder)
        apply_overrides(folder / "params.yaml", [*overrides, f"dataset.name='{name}'", f"seed={seed}"])
        print(f"{folder}: dvc repro", file=sys.stderr, flush=True)
        run = subprocess.run(command, cwd=folder, env=os.environ | {"PATH": path}, check=False)
        if run.returncode:
            print(f"left out: {folder}: `dvc repro` failed, see above", file=sys.stderr)
        else:
            folders.append(str(folder))
    return folders


def update_clone(folder: Path) -> None:
    """Clone the repository in the current folder, or bring its clone to the last commit and leave its results."""
    if not (folder / ".git").exists():
        subprocess.run(["git", "clone", "--quiet", ".", folder], check=True)
    subprocess.run(["git", "fetch", "--quiet", Path.cwd(), "HEAD"], cwd=folder, check=True)
    changed = [".", *(f":!{name}" for name in RESULTS)]
    restore = ["git", "restore", "--source", "FETCH_HEAD", "--staged", "--worktree", "--", *changed]
    subprocess.run(restore, cwd=folder, check=True)
