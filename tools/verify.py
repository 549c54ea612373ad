"""Run the pipeline in clones with different environments, and check that outputs and `dvc.lock` are identical.

    python -m tools.verify                             # the default parameters, about three minutes for each clone
    python -m tools.verify --profile profiles/tiny.txt       # a small input
    python -m tools.verify --profile profiles/emulated.txt --cpus Haswell EPYC-Milan --until capture

Each clone contains the last commit. The clones differ in folder, home folder, date, locale, hash seed, umask and number
of threads. With `--cpus`, the clones differ in folder, home folder and processor; qemu-user emulates the processors. If
an output differs, the exit status is 1, and the first difference in this output is printed (`tools/compare_runs.py`).
With the default parameters, the results must also equal the committed results.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dvc.utils.hydra import apply_overrides

from tools.compare_runs import LOCK, differences, outputs

EMULATOR = "qemu-x86_64"
EMULATOR_WARNING = "TCG doesn't support requested feature"
NOT_EMULATED = ("download", "tokenize")
"""Stages that are not emulated: their outputs need no model computations, and their imports would take minutes."""


class Surroundings(NamedTuple):
    """The environment in which the pipeline of a clone runs; the results must not depend on it."""

    name: str  # also the name of the clone's folder
    threads: int
    umask: int
    variables: dict[str, str]
    cpu: str | None = None  # CPU model in qemu; None for this machine's processor


# The time zones are 25 hours apart, so the dates always differ. Paths may contain spaces and non-ASCII letters.
SINGLE_THREADED = Surroundings("one thread", 1, 0o022, {"TZ": "<-11>11", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"})
SURROUNDINGS = (
    SINGLE_THREADED,
    Surroundings("two threads é", 2, 0o077, {"TZ": "<+14>-14", "LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "4711"}),
    Surroundings("four threads", 4, 0o027, {"TZ": "<+14>-14", "LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "99"}),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pipeline in clones of the repository in the current folder, and compare their outputs.

    Print the differences; return 0 if all outputs are identical, else 1.
    """
    options = parse_options(arguments)
    surroundings = select_surroundings(options.cpus)
    if git(Path.cwd(), "status", "--short", "--untracked-files=no"):
        print("the last commit is cloned, without uncommitted changes")

    with tempfile.TemporaryDirectory(prefix="verify-", ignore_cleanup_errors=True) as temporary:
        root = options.folder or Path(temporary)
        clones = [clone_commit(root / each.name / "clone") for each in surroundings]
        for clone in clones:
            apply_profile(clone, options.profile)
        # A run uses little more than one core, but more than two parallel runs would need too much memory.
        with ThreadPoolExecutor(os.cpu_count() if options.cpus else 2) as executor:
            list(executor.map(lambda each, clone: run_pipeline(each, clone, options.until), surroundings, clones))
        lines = compare_clones(surroundings, clones)
        if not (options.profile or options.until):
            # `git status --short` prints two characters and a space before each path.
            lines += [f"not as committed: {line[3:]}" for line in git(clones[0], "status", "--short").splitlines()]
    print("\n".join(lines or [f"dvc.lock and all outputs of {len(clones)} clones are identical"]))
    return bool(lines)


def select_surroundings(cpus: Sequence[str]) -> list[Surroundings]:
    """Return the environments of the clones: `SURROUNDINGS` or, if `cpus` is not empty, one per processor.

    Results of emulated processors are compared with those of this machine's processor, which is the first environment.
    Raise `SystemExit` if processors cannot be emulated.
    """
    if not cpus:
        return list(SURROUNDINGS)
    if shutil.which(EMULATOR) is None:
        sys.exit(f"error: {EMULATOR} is not installed (Debian: apt install qemu-user)")
    emulated = [SINGLE_THREADED._replace(name=cpu, cpu=cpu) for cpu in cpus]
    return [SINGLE_THREADED, *emulated]


def compare_clones(surroundings: Sequence[Surroundings], clones: Sequence[Path]) -> list[str]:
    """Return a line for each output that differs between the first clone and another clone; `dvc.lock` is included."""
    first = clones[0]
    lines = []
    for each, clone in zip(surroundings[1:], clones[1:], strict=True):
        for difference in differences(first, clone, [*outputs(first, clone), LOCK]):
            lines.append(f"{surroundings[0].name} and {each.name}: {difference}")
    return lines


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.verify", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--profile", type=Path, help="file of key=value overrides of params.yaml")
    parser.add_argument("--cpus", nargs="+", default=[], help="processors to emulate, by their names in qemu")
    parser.add_argument("--until", nargs="+", default=[], metavar="STAGE", help="the last stages to run; default: all")
    parser.add_argument("--folder", type=Path, help="folder in which the clones are kept; default: a temporary folder")
    return parser.parse_args(arguments)


def clone_commit(folder: Path) -> Path:
    """Clone the last commit of the repository in the current folder to `folder`."""
    subprocess.run(["git", "clone", "--quiet", Path.cwd(), folder], check=True)
    return folder.resolve()


def apply_profile(clone: Path, profile: Path | None) -> None:
    """Set the overrides of `profile` in the `params.yaml` of a clone."""
    if profile:
        lines = profile.read_text(encoding="utf-8").splitlines()
        apply_overrides(clone / "params.yaml", [line for line in lines if line and not line.startswith("#")])


def run_pipeline(surroundings: Surroundings, clone: Path, until: Sequence[str]) -> None:
    """Run the stages of a clone up to the stages `until`, or all stages; print the duration.

    The home folder and the log are beside the clone. If a stage fails, raise `SystemExit` with the end of the log.
    """
    home = clone.parent / "home"
    home.mkdir()
    log = clone.parent / "log"
    threads = str(surroundings.threads)
    # DVC runs the first `python` in these folders.
    program_folders = [str(Path(sys.prefix, "bin")), os.environ["PATH"]]
    if surroundings.cpu:
        program_folders.insert(0, str(emulated_python(surroundings.cpu, clone.parent / "emulated")))
    environment = {
        **os.environ,
        **surroundings.variables,
        "HOME": str(home),
        "OMP_NUM_THREADS": threads,
        "LOKY_MAX_CPU_COUNT": threads,
        "DVC_SITE_CACHE_DIR": str(home / "dvc"),
        "DVC_NO_ANALYTICS": "1",
        "PATH": os.pathsep.join(program_folders),
    }
    command = [sys.executable, "-m", "dvc", "repro", "--force", *until]
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        run = subprocess.run(
            command, cwd=clone, env=environment, umask=surroundings.umask, stdout=file, stderr=file, check=False
        )
    if run.returncode:
        lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line and EMULATOR_WARNING not in line]
        sys.exit("\n".join([f"error: {surroundings.name}: `dvc repro` failed:", *lines[-15:]]))
    print(f"{surroundings.name}: {time.monotonic() - start:.0f} s", flush=True)


def emulated_python(cpu: str, folder: Path) -> Path:
    """Write a command `python` that runs this environment's Python on an emulated processor, and return its folder.

    DVC and the stages `NOT_EMULATED` are not emulated. The other stages and the processes that they start by
    `sys.executable` are emulated.
    """
    command = folder / "bin/python"
    command.parent.mkdir(parents=True)
    # The copied configuration and the linked library folder make the new folder a virtual environment with the same
    # packages.
    shutil.copy(Path(sys.prefix, "pyvenv.cfg"), folder)
    (folder / "lib").symlink_to(Path(sys.prefix, "lib"))
    python = Path(sys.executable).resolve()
    lines = ["#!/bin/sh"]
    for stage in NOT_EMULATED:
        lines.append(f'[ "$*" = "-m stages {stage}" ] && exec "{sys.executable}" "$@"')
    lines.append(f'exec {EMULATOR} -cpu {cpu} -0 "$0" "{python}" "$@"')
    command.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command.chmod(0o755)
    return command.parent


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
