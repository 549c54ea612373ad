"""A clone whose stages are stopped at any moment, and what then lies there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from select import select
from typing import NamedTuple

import yaml

from stages.arithmetic import settings
from verify.difference import outputs

NOT_COMPARED = (".git", ".dvc/cache", ".dvc/tmp", "__pycache__")
LIMIT = 3600  # seconds; what takes longer hangs


class Ended(NamedTuple):
    """A command that ended, or was stopped."""

    status: int
    seconds: float
    said: str


class Disturbed:
    """A clone in which stages are started and stopped by a signal; beside it a home and temporary files."""

    def __init__(self, folder: Path, by: signal.Signals = signal.SIGKILL) -> None:
        self.signal = by
        self.folder, self.log = folder / "clone", folder / "log"
        beside = {name: folder / name for name in ("home", "temporary")}
        for each in beside.values():
            each.mkdir()
        self.temporary = beside["temporary"]
        self.warm: subprocess.Popen[str] | None = None
        path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("DVC_")}
        self.environment |= {"HOME": str(beside["home"]), "TMPDIR": str(self.temporary), "PATH": path}
        # A cache of torch's, which some runs make and others do not, and which is a temporary file by default.
        self.environment |= {"TORCHINDUCTOR_CACHE_DIR": str(beside["home"] / "torchinductor")}
        self.environment |= {"DVC_SITE_CACHE_DIR": str(beside["home"] / "dvc"), "DVC_NO_ANALYTICS": "1"}

    def run(self, *command: str, end_after: float = LIMIT) -> Ended:
        """`python -m command`; all of its processes get the signal after so many seconds if they have not ended."""
        start = time.monotonic()
        status = (self._copy if self.warm else self._process)(command, end_after)
        return Ended(status, time.monotonic() - start, self.log.read_text(encoding="utf-8"))

    def _process(self, command: Sequence[str], end_after: float) -> int:
        with self.log.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return process.wait(end_after)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, self.signal)
            return process.wait(LIMIT)

    def _copy(self, command: Sequence[str], end_after: float) -> int:
        """Of the warm process; see `verify.warm`."""
        assert self.warm
        assert self.warm.stdin
        assert self.warm.stdout
        request = {"command": command, "folder": str(self.folder), "log": str(self.log)}
        print(json.dumps(request), file=self.warm.stdin, flush=True)
        group = int(self.warm.stdout.readline())
        if not select([self.warm.stdout], [], [], end_after)[0]:
            os.killpg(group, self.signal)
        return int(self.warm.stdout.readline())

    def warm_up(self) -> None:
        """Commands are copies of one process from now on."""
        self.warm = subprocess.Popen(
            [sys.executable, "-m", "verify.warm"],
            cwd=self.folder,
            env=self.environment | settings.SETTINGS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self.warm.stdout
        self.warm.stdout.readline()

    def start(self, stage: str, way: str, end_after: float = LIMIT) -> Ended:
        """A stage of which nothing is there, and which DVC takes for changed until it has run to its end."""
        for out in outputs(self.folder, stage):
            remove(self.folder / out)
        lock = self.folder / "dvc.lock"
        command = f"cmd: python -m stages.{stage}\n"
        lock.write_text(lock.read_text(encoding="utf-8").replace(command, "cmd: another\n"), encoding="utf-8")
        started = ["dvc", "repro", "--no-run-cache", stage] if way == "dvc" else [f"stages.{stage}"]
        return self.run(*started, end_after=end_after)

    def repro(self) -> Ended:
        """The whole pipeline; what is there of it is not made again."""
        return self.run("dvc", "repro", "--no-run-cache")

    def mend(self) -> Ended:
        """What `make repro` does first; it says nothing where nothing is to mend."""
        return self.run("verify.mend")

    def state(self) -> dict[str, str]:
        """Every file of the working tree by its digest, every folder, and what a command put among temporary files.

        `dvc.lock` is by what it says: stages that DVC ran in another order stand in that order in it.
        """
        found = {f"temporary file {path.name}": "left" for path in self.temporary.iterdir()}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if not any(f"/{each}/" in f"/{name}/" for each in NOT_COMPARED):
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        lock = yaml.safe_load((self.folder / "dvc.lock").read_text(encoding="utf-8"))
        return found | {"dvc.lock": json.dumps(lock, sort_keys=True)}


def remove(path: Path) -> None:
    """A file or a folder, where it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
