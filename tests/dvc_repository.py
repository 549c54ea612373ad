"""Git repositories that use DVC, with the project's dvc.yaml and default parameters, isolated from the user's settings.

The stages have the names and files of dvc.yaml, but run `stand_in_stage.py`. A run takes seconds, and each output
changes with the inputs of its stage.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import REPOSITORY, write_parameters
from stage_process import run_to_its_end

FILES = (
    *("dvc.yaml", ".dvcignore", ".gitignore", ".dvc/config", ".dvc/.gitignore", "reports/sources.json"),
    *(".dvc/plots", "data/sample", "attnmix", "stages", "models/README.md", "features/README.md"),
)
USER = "[user]\n\tname = Somebody\n\temail = somebody@example.org\n[init]\n\tdefaultBranch = main\n"
STEERING = ("AWS_", "DVC_", "GIT_", "MAKE")
"""Prefixes of environment variables that affect git, DVC, S3 or make (which sets them in `make test`)."""


class Repository(NamedTuple):
    """A working tree and the home folder of its user."""

    folder: Path
    home: Path

    def environment(self) -> dict[str, str]:
        """Return environment variables that select the programs in this Python's folder and the settings in `home`."""
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        homes = {"HOME": str(self.home), "XDG_CONFIG_HOME": str(self.home / ".config")}
        return {"PATH": programs, "DVC_SITE_CACHE_DIR": str(self.home / "site"), "NO_PROXY": "127.0.0.1", **homes}

    def run(self, *command: str, succeeds: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command, assert that it succeeds (or fails, with `succeeds=False`), and return the finished process."""
        neutral = {name: value for name, value in os.environ.items() if not name.startswith(STEERING)}
        run = run_to_its_end(command, self.folder, self.environment() | environment, neutral)
        assert (run.returncode == 0) is succeeds, run.stdout + run.stderr
        return run

    def dvc(self, *arguments: str) -> str:
        return self.run("dvc", *arguments).stdout

    def git(self, *arguments: str) -> str:
        return self.run("git", *arguments).stdout

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)

    def clone(self, folder: Path) -> Repository:
        """Return a clone with a different user, an empty cache, and no outputs except those in git."""
        self.git("clone", "--quiet", str(self.folder), str(folder))
        return with_home(folder)

    def copy(self, folder: Path) -> Repository:
        """Return a copy including its cache and all outputs."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return with_home(folder)

    def enter(self, patch: pytest.MonkeyPatch) -> Repository:
        """Change to this folder, set the environment variables, and return the repository."""
        patch.chdir(self.folder)
        for name, value in self.environment().items():
            patch.setenv(name, value)
        return self

    def existing(self, *paths: str) -> list[str]:
        return [path for path in paths if (self.folder / path).exists()]


def stages_run(output: str) -> list[str]:
    """Return the stages that DVC ran according to `output`, except `sources@own`, which always runs if it exists."""
    return [stage for stage in re.findall(r"Running stage '([\w@]+)'", output) if stage != "sources@own"]


def with_home(folder: Path) -> Repository:
    """Create a home folder with git settings, and return the repository."""
    home = folder.with_name(f"{folder.name}-home")
    home.mkdir(parents=True)
    (home / ".gitconfig").write_text(USER, encoding="utf-8")
    return Repository(folder, home)


def repository_of(folder: Path, files: Mapping[str, str]) -> Repository:
    """Return a repository of git and DVC with uncommitted `files`."""
    repository = with_home(folder)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    repository.git("init", "--quiet")
    repository.dvc("init", "--quiet")
    return repository


def new_repository(folder: Path) -> Repository:
    """Return a repository with the project's files in its first commit, before any stage has run."""
    repository = with_home(folder)
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, folder / name)
    shutil.copy(REPOSITORY / "tests/stand_in_stage.py", folder / "stages/__main__.py")
    write_parameters(folder)
    repository.git("init", "--quiet")
    repository.commit("The project")
    return repository
