"""Repositories of git and DVC with the project's own dvc.yaml and params.yaml, apart from a user's settings.

Their stages are `stand_in_stage.py`, under the names and beside the files that dvc.yaml names, so that a run takes
seconds and each output changes with what its stage reads.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from conftest import REPOSITORY
from stage_process import run_to_its_end

FILES = (
    "dvc.yaml",
    "params.yaml",
    ".dvcignore",
    ".gitignore",
    ".dvc/config",
    ".dvc/.gitignore",
    "reports/sources.json",
)
FOLDERS = (".dvc/plots", "data/sample", "attnmix", "stages")
USER = "[user]\n\tname = Somebody\n\temail = somebody@example.org\n[init]\n\tdefaultBranch = main\n"


class Repository(NamedTuple):
    """A working tree, and the home folder of who works in it."""

    folder: Path
    home: Path

    def environment(self) -> dict[str, str]:
        """Programs beside this Python, and no settings but this home folder's."""
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        homes = {"HOME": str(self.home), "XDG_CONFIG_HOME": str(self.home / ".config")}
        return {"PATH": programs, "DVC_SITE_CACHE_DIR": str(self.home / "site"), "NO_PROXY": "127.0.0.1", **homes}

    def run(self, *command: str, succeeds: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """A finished process, which must succeed, or must fail."""
        # Nothing that steers git, DVC, S3 and, under `make test`, make.
        steering = ("AWS_", "DVC_", "GIT_", "MAKE")
        neutral = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
        run = run_to_its_end(command, self.folder, self.environment() | environment, neutral)
        assert (run.returncode == 0) is succeeds, run.stdout + run.stderr
        return run

    def dvc(self, *arguments: str, **environment: str) -> str:
        return self.run("dvc", *arguments, **environment).stdout

    def git(self, *arguments: str) -> str:
        return self.run("git", *arguments).stdout

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)

    def clone(self, folder: Path) -> Repository:
        """A clone, with no cache and no outputs but those in git; its user is another."""
        self.git("clone", "--quiet", str(self.folder), str(folder))
        return Repository(folder, new_home(folder.with_name(f"{folder.name}-home")))

    def copy(self, folder: Path) -> Repository:
        """With its cache and all that it wrote."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Repository(folder, new_home(folder.with_name(f"{folder.name}-home")))

    def has(self, *paths: str) -> list[str]:
        """Those of `paths` that are there."""
        return [path for path in paths if (self.folder / path).exists()]


def stages_run(output: str) -> list[str]:
    """The stages whose command DVC says that it ran; without `sources@own`, which runs always where it is there."""
    return [stage for stage in re.findall(r"Running stage '([\w@]+)'", output) if stage != "sources@own"]


def new_home(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / ".gitconfig").write_text(USER, encoding="utf-8")
    return folder


def new_repository(folder: Path, stand_ins: bool = True) -> Repository:
    """The project's files in a first commit; nothing has run."""
    made = Repository(folder, new_home(folder.with_name(f"{folder.name}-home")))
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    for name in FOLDERS:
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    if stand_ins:
        shutil.copy(REPOSITORY / "tests/stand_in_stage.py", folder / "stages/__main__.py")
    made.git("init", "--quiet")
    made.commit("The project")
    return made
