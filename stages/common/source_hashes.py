"""What a data set or model of one's own is by content, so that a change of it is seen.

Packages are pinned by the lock files, data/sample by dvc.yaml, and what a hub serves by its revision.
"""

from __future__ import annotations

import hashlib
import json
import time
from glob import glob
from pathlib import Path

from tqdm import tqdm

from attnmix.core.options import Parameters
from attnmix.models.files import CHECKPOINT_FILES, PACKAGE_SCHEME
from attnmix.store.runs import Run
from attnmix.store.writers import Sources

KNOWN = Path(".dvc/tmp/sources.json")
"""Digests of files that were read before, by their state; it may be lost."""
SAMPLE = Path("data/sample")
SETTLED = 2  # seconds after which a file that is written again has another time


def look_at_sources(parameters: Parameters, run: Run) -> Sources:
    """By parameter, its value and the sha256 of each file; what is not here counts as it was, as in a clone."""
    before = run.sources
    names = {
        "dataset.name": parameters.dataset.name,
        "model.name": parameters.model.name,
        "model.base": parameters.model.base,
    }
    own = {key: name for key, name in names.items() if name and _is_own(name)}
    files = {key: _files(key, name) for key, name in own.items()}
    digests = _digests([file for each in files.values() for file in each.values()])
    found: Sources = {}
    for key, name in own.items():
        here = {inside: digests[file] for inside, file in files[key].items()}
        if there := here or before.get(key, {}).get(name):
            found[key] = {name: there}
    return found


def _is_own(name: str) -> bool:
    """Whether nothing else pins it; a hub's identifier has no files here."""
    return not name.startswith(PACKAGE_SCHEME) and Path(name) != SAMPLE


def _files(key: str, name: str) -> dict[str, Path]:
    """The files that `download` would read, by their names in the source; none for what is not here."""
    path = Path(name)
    if path.is_file():
        return {path.name: path}
    patterns = CHECKPOINT_FILES if key.startswith("model.") else ("**",)
    # Path.glob goes through no linked folder, and gives hidden files, which are no reviews.
    inside = {each for pattern in patterns for each in glob(pattern, root_dir=path, recursive=True)}  # noqa: PTH207
    return {Path(each).as_posix(): path / each for each in sorted(inside) if (path / each).is_file()}


def _digests(files: list[Path]) -> dict[Path, str]:
    """sha256 of each; a file that has not been touched since it was last read is not read again."""
    known = _known()
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


def _known() -> dict[str, str]:
    try:
        found = json.loads(KNOWN.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: everything is read anew
        return {}
    return found if isinstance(found, dict) else {}
