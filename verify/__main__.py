"""Run the pipeline in clones with other surroundings, and compare `dvc.lock` and every output.

    python -m verify                                   # the default pipeline, three clones
    python -m verify --profile profiles/tiny.txt
    python -m verify --profile profiles/tiny.txt --cpus Haswell EPYC-Milan

Exit status 1 names the first difference of each output.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verify.clone import clone_at, git
from verify.difference import differences
from verify.surroundings import CLONES, Surroundings, check_emulator, emulated, run


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    clones = [emulated(name) for name in options.cpus]
    clones = [CLONES[0], *clones] if clones else list(CLONES[: options.clones])
    if options.cpus:
        check_emulator()
    repository = options.repository.resolve()
    if git(repository, "status", "--porcelain", "--untracked-files=no"):
        print("changes that are not committed are in no clone: the last commit is verified")
    commit = git(repository, "rev-parse", "HEAD")
    work = Path(tempfile.mkdtemp(prefix="verify-", dir=options.folder))
    try:
        # An emulated processor is one core, and keeps one busy.
        with ThreadPoolExecutor(os.cpu_count() if options.cpus else 1) as side_by_side:
            folders = list(side_by_side.map(lambda clone: _run(clone, repository, commit, work, options), clones))
        found = _compared(clones, folders)
        if not (found or options.profile or options.set or options.until):
            found = _committed(repository, folders[0])
    finally:
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)
    print("\n".join(found) if found else f"{len(clones)} clones, the same bytes in dvc.lock and every output")
    return bool(found)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verify", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--profile", type=Path, help="key=value lines, as under profiles/")
    parser.add_argument("--set", action="append", default=[], help="key=value, as in `dvc exp run -S`")
    parser.add_argument("--cpus", nargs="+", default=[], help="processors that qemu emulates, beside this one")
    parser.add_argument("--until", nargs="*", default=[], help="the stages to run up to, by name; else all")
    parser.add_argument("--clones", type=int, choices=(2, 3), default=3)
    parser.add_argument("--folder", type=Path, help="where the clones lie; else the system's temporary folder")
    parser.add_argument("--keep", action="store_true", help="leave the clones there")
    parser.add_argument("--repository", type=Path, default=Path(__file__).parents[1])
    return parser.parse_args(arguments)


def _run(clone: Surroundings, repository: Path, commit: str, work: Path, options: argparse.Namespace) -> Path:
    folder = work / clone.name / "clone"
    folder.parent.mkdir(parents=True)
    clone_at(commit, repository, folder, options.profile, options.set)
    start = time.monotonic()
    run(clone, folder, [sys.executable, "-m", "dvc", "repro", "--force", *options.until], work / f"{clone.name}.log")
    print(f"{clone.name}: {time.monotonic() - start:.0f} s", flush=True)
    return folder


def _compared(clones: list[Surroundings], folders: list[Path]) -> list[str]:
    found = []
    for clone, folder in zip(clones[1:], folders[1:], strict=True):
        found += [f"{clones[0].name} and {clone.name}: {line}" for line in differences(folders[0], folder)]
    return found


def _committed(repository: Path, folder: Path) -> list[str]:
    """What of the committed results the run does not give."""
    changed = git(folder, "status", "--porcelain").split("\n")
    return [f"not as committed: {line[3:]}" for line in changed if line]


if __name__ == "__main__":
    sys.exit(main())
