"""Hashes of the user's own data set and models, by which a change of their files is noticed.

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
from attnmix.models.fetching import CHECKPOINT_FILES, PACKAGE_SCHEME
from attnmix.store.runs import Run
from attnmix.store.writers import Sources

CACHE = Path(".dvc/tmp/sources.json")
"""sha256 of files that were read before, by their `_state`; it may be deleted."""
SAMPLE = Path("data/sample")
SETTLED_SECONDS = 2  # a file that is written again later than this has another time


def hash_sources(parameters: Parameters, run: Run) -> Sources:
    """Return, by parameter and its value, the sha256 of each file.

    Files that are not here count as they were at the last look, as in a clone.
    """
    base = parameters.model.base_model
    names = {"dataset.name": parameters.dataset.source, "model.name": parameters.model.name}
    names |= {"model.base": base.name} if base else {}
    before, cache = run.sources, _read_cache()
    hashes: Sources = {}
    settled: dict[str, str] = {}
    for key, name in names.items():
        if name.startswith(PACKAGE_SCHEME) or Path(name) == SAMPLE:
            continue
        files = _files(key, name)
        present = {inside: _sha256(file, cache) for inside, file in files.items()}
        for inside, file in files.items():
            if time.time() - file.stat().st_ctime > SETTLED_SECONDS:
                settled[_state(file)] = present[inside]
        if known := present or before.get(key, {}).get(name):
            hashes[key] = {name: known}
    if CACHE.parent.is_dir():
        CACHE.write_text(json.dumps(settled), encoding="utf-8")
    return hashes


def _files(key: str, name: str) -> dict[str, Path]:
    """Return the files that `download` would read, by their names in the source; none of a hub identifier."""
    path = Path(name)
    if path.is_file():
        return {path.name: path}
    patterns = CHECKPOINT_FILES if key.startswith("model.") else ("**",)
    # Path.glob follows no linked folder, and gives hidden files, which are no reviews.
    inside = {each for pattern in patterns for each in glob(pattern, root_dir=path, recursive=True)}  # noqa: PTH207
    return {Path(each).as_posix(): path / each for each in sorted(inside) if (path / each).is_file()}


def _sha256(file: Path, cache: dict[str, str]) -> str:
    """Return the file's hash, from the `cache` where the file has not been touched since."""
    if known := cache.get(_state(file)):
        return known
    digest = hashlib.sha256()
    bar = tqdm(total=file.stat().st_size, desc=file.name, unit="B", unit_scale=True, delay=2, disable=None)
    with file.open("rb") as opened, bar:
        while block := opened.read(2**24):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()


def _state(file: Path) -> str:
    """Return which file it is, and when it was last written or put there."""
    stat = file.stat()
    return f"{file.resolve()} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def _read_cache() -> dict[str, str]:
    try:
        cache = json.loads(CACHE.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: every file is read again
        return {}
    return cache if isinstance(cache, dict) else {}
