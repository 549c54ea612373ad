"""A clone of the repository at one commit, with parameters of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from ruamel.yaml import YAML


def clone_at(commit: str, repository: Path, folder: Path, profile: Path | None, settings: Sequence[str]) -> None:
    """Make the clone `folder`; its params.yaml has the lines of `profile`, then `settings`: `key=value` each."""
    subprocess.run(["git", "clone", "--quiet", repository, folder], check=True)
    git(folder, "checkout", "--quiet", commit)
    lines = profile.read_text(encoding="utf-8").splitlines() if profile else []
    settings = [*(line for line in lines if line and not line.startswith("#")), *settings]
    if settings:
        _set(folder / "params.yaml", settings)


def _set(file: Path, settings: Sequence[str]) -> None:
    yaml = YAML()
    values = yaml.load(file.read_text(encoding="utf-8"))
    for setting in settings:
        name, _, value = setting.partition("=")
        *sections, key = name.split(".")
        section = values
        for each in sections:
            section = section[each]
        section[key] = YAML(typ="safe").load(value)
    with file.open("w", encoding="utf-8") as opened:
        yaml.dump(values, opened)


def git(folder: Path, *arguments: str) -> str:
    """What a command of git that succeeds says."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n")
