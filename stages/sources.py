"""Note what the data and the model are by content, so that `download` runs again when a file of theirs has changed.

    python -m stages.sources

Runs at every `dvc repro`, as DVC can watch no path that may as well be a hub's identifier. Writes
`reports/sources.json`: by parameter, the last part of its value, and the sha256 of each file under it; null for what is
not here, unless it was here before, as in a clone that needs no source to go on.
"""

from __future__ import annotations

import hashlib
import json
import time
from glob import glob
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stages.command import run_stage
from stages.errors import InputError
from stages.models.files import CHECKPOINT_FILES, PACKAGE_SCHEME, package_folder
from stages.outputs.sources import SOURCES
from stages.parameters import Parameters

KNOWN = Path(".dvc/tmp/sources.json")
"""Digests of files that were read before, by their state; it may be lost."""
SETTLED = 2  # seconds after which a file that is written again has another time

Digests = dict[str, str] | None


def main(parameters: Parameters) -> None:
    names = {"dataset.name": parameters.dataset.name, "model.name": parameters.model.name}
    if parameters.model.base is not None:
        names["model.base"] = parameters.model.base
    before = _read(SOURCES)
    files = {key: _files(key, name) for key, name in names.items()}
    digests = _digests([file for each in files.values() for file in each.values()])
    found: dict[str, dict[str, Digests]] = {}
    for key, name in names.items():
        last = name.rstrip("/").rpartition("/")[2]
        there = {inside: digests[file] for inside, file in files[key].items()}
        found[key] = {last: there or before.get(key, {}).get(last)}
    SOURCES.parent.mkdir(parents=True, exist_ok=True)
    SOURCES.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _files(key: str, name: str) -> dict[str, Path]:
    """The files that `download` would read, by their names in the source; none for what is not here."""
    try:
        path = package_folder(name) if name.startswith(PACKAGE_SCHEME) else Path(name)
    except InputError:  # `download` says it, if it must run
        return {}
    if path.is_file():
        return {path.name: path}
    patterns = CHECKPOINT_FILES if key.startswith("model.") else ("**",)
    # Path.glob goes through no linked folder, and gives hidden files, which are no reviews.
    inside = {each for pattern in patterns for each in glob(pattern, root_dir=path, recursive=True)}  # noqa: PTH207
    return {Path(each).as_posix(): path / each for each in sorted(inside) if (path / each).is_file()}


def _digests(files: list[Path]) -> dict[Path, str]:
    """sha256 of each; a file that has not been touched since it was last read is not read again."""
    known = _read(KNOWN)
    states = {file: _state(file) for file in files}
    left = [file for file in files if states[file] not in known]
    size = sum(file.stat().st_size for file in left)
    with tqdm(total=size, desc="sources", unit="B", unit_scale=True, delay=2, disable=None) as progress:
        for file in left:
            with file.open("rb") as opened:
                digest = hashlib.sha256()
                while block := opened.read(2**24):
                    digest.update(block)
                    progress.update(len(block))
            known[states[file]] = digest.hexdigest()
    if KNOWN.parent.is_dir():
        now = time.time()
        kept = {states[file]: known[states[file]] for file in files if now - file.stat().st_ctime > SETTLED}
        KNOWN.write_text(json.dumps(kept), encoding="utf-8")
    return {file: known[states[file]] for file in files}


def _state(file: Path) -> str:
    """Which file it is, and when it was last written or put there."""
    found = file.stat()
    return f"{file.resolve()} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: everything is read anew
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    run_stage(main)
