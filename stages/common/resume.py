"""Folders for unfinished work, from which a killed stage resumes.

DVC deletes a stage's outputs before it runs the stage again, so work in progress lies outside them, in a folder
named after the digest of everything that the result depends on: what dvc.yaml declares for the stage (parameters,
data, code), the installed packages and the kind of machine. Work done for anything else is never picked up.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

from attnmix.core.options import Parameters

UNFINISHED = Path(".unfinished")
REPOSITORY = Path(__file__).parents[2]


def declared(stage: str) -> dict[str, Any]:
    """Return the stage's entry in dvc.yaml."""
    pipeline = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))
    entry: dict[str, Any] = pipeline["stages"][stage].get("do", pipeline["stages"][stage])
    return entry


def unfinished_folder(stage: str, parameters: Parameters, root: Path) -> Path:
    """Return the folder, below `root`, of the stage's unfinished work for its current inputs; remove all others."""
    from attnmix.arithmetic.kernels import computed_on  # loads torch

    packages = sorted({f"{each.name} {each.version}" for each in distributions()})
    values = parameters.model_dump()
    chosen: dict[str, Any] = {}
    for key in declared(stage)["params"]:
        section, _, name = key.partition(".")
        chosen[key] = values[section][name] if name else values[section]
    settings = [chosen, platform.python_version(), packages, computed_on(parameters.arithmetic)]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in declared(stage)["deps"]:
        # Code is this program's own; data lies in the run's folder.
        path = REPOSITORY / name if name.startswith(("attnmix", "stages")) else root / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                with file.open("rb") as opened:
                    digest.update(hashlib.file_digest(opened, "sha256").digest())
                digest.update(file.name.encode())
    folder = root / UNFINISHED / stage / digest.hexdigest()[:16]
    if os.environ.get("RANK", "0") == "0" and folder.parent.is_dir():  # the first of several processes clears up
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def publish(unfinished: Path, output: Path) -> None:
    """Move finished work to where the stage's output belongs, in one step."""
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished.rename(output)


def clear(folder: Path) -> None:
    """Remove a stage's unfinished folder once its outputs are published."""
    shutil.rmtree(folder)
    remove_empty(folder.parent.name, folder.parents[1])


def remove_empty(stage: str, unfinished: Path = UNFINISHED) -> None:
    """Remove the stage's empty unfinished folders, and the folder of all stages where it is empty."""
    for folder, _, _ in os.walk(unfinished / stage, topdown=False):
        with suppress(OSError):  # not empty
            Path(folder).rmdir()
    with suppress(OSError):
        unfinished.rmdir()


def kept(stage: str) -> str:
    """Return a sentence on what a stopped stage has finished, and how to resume."""
    if any(path.is_file() for path in (UNFINISHED / stage).rglob("*")):
        return f"what {stage} has finished is kept in {UNFINISHED / stage}: `dvc repro` goes on from there"
    return f"nothing of {stage} is kept, the stages before it are: `dvc repro` begins it anew"
