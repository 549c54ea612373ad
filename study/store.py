"""Finished experiments in DVC's store: commits under `refs/exps/`, whose files git shows without a checkout."""

from __future__ import annotations

import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from ruamel.yaml import YAML

from attnmix.core.errors import InputError

# What decides an experiment's results, but for its parameters.
CODE = ("stages", "dvc.yaml", "data/sample")


class Experiment(NamedTuple):
    """One seed's finished experiment."""

    seed: int
    name: str
    commit: str


def name_of(seed: int) -> str:
    return f"study-{seed}"


def find(seed: int, folder: Path) -> Experiment | None:
    """The newest experiment of this seed on any commit of the repository `folder`; None where there is none."""
    commits = (commit for _, name, commit in finished(folder) if name == name_of(seed))
    return next((Experiment(seed, name_of(seed), commit) for commit in commits), None)


def finished(folder: Path) -> list[tuple[str, str, str]]:
    """Of every experiment in `folder` the commit that it started from, its name and its own commit; newest first."""
    listed = git(folder, "for-each-ref", "--sort=-committerdate", "--format=%(objectname) %(refname)", "refs/exps")
    # refs/exps/<two digits>/<the rest of the commit that it started from>/<name>; the queue's own refs are others.
    pattern = re.compile(r"(\w+) refs/exps/([0-9a-f]{2})/([0-9a-f]{38})/(.+)")
    matches = filter(None, map(pattern.fullmatch, listed.splitlines()))
    return [(match[2] + match[3], match[4], match[1]) for match in matches]


def is_by_this_code(experiment: Experiment, folder: Path) -> bool:
    """Whether the code of the working tree is the one that the experiment ran."""
    there = [path for path in CODE if (folder / path).exists()]
    command = ["git", "diff", "--quiet", experiment.commit, "--", *there]
    return subprocess.run(command, cwd=folder, check=False).returncode == 0


def parameters(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """The experiment's whole params.yaml."""
    values: dict[str, Any] = read_yaml(_shown(experiment, "params.yaml", folder))
    return values


def read_yaml(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)  # YAML 1.2, as DVC writes it


def plot(experiment: Experiment, name: str, folder: Path) -> pd.DataFrame | None:
    """Return the csv `name` under `reports/plots/` of the experiment; None where it has no such file."""
    listed = git(folder, "ls-tree", "-r", "--name-only", experiment.commit, "reports/plots").splitlines()
    path = next((path for path in listed if Path(path).stem == name), None)
    return None if path is None else pd.read_csv(io.StringIO(_shown(experiment, path, folder)))


def metrics(experiment: Experiment, name: str, folder: Path) -> dict[str, Any]:
    """`reports/metrics/<name>.json` of the experiment."""
    values: dict[str, Any] = json.loads(_shown(experiment, f"reports/metrics/{name}.json", folder))
    return values


def _shown(experiment: Experiment, path: str, folder: Path) -> str:
    try:
        return git(folder, "show", f"{experiment.commit}:{path}")
    except InputError as error:
        raise InputError(f"experiment {experiment.name} has no {path}: {error}") from None


def git(folder: Path, *arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if run.returncode:
        raise InputError(f"git {arguments[0]} in {folder}: {run.stderr.strip() or f'exited with {run.returncode}'}")
    return run.stdout
