"""Note the hashes of the user's own data or model, so that `download` runs again when a file of them has changed.

    python -m stages sources

DVC cannot watch a path that may as well be a hub identifier, so this stage runs at every `dvc repro` while there is
such a source; else dvc.yaml has no such stage. Packages are pinned by the lock files, data/sample by dvc.yaml, and what
a hub serves by its revision. Writes `reports/sources.json`.
"""

import hashlib
import json
from glob import glob
from pathlib import Path

from attnmix.models.fetching import CHECKPOINT_FILES, PACKAGE_SCHEME
from stages.common.parameters import Parameters

Sources = dict[str, dict[str, dict[str, str]]]
"""By parameter, its value and the sha256 of each file under it."""
SOURCES = Path("reports/sources.json")
SAMPLE = Path("data/sample")


def main(parameters: Parameters) -> None:
    write_sources(hash_sources(parameters))


def hash_sources(parameters: Parameters) -> Sources:
    """Return the hashes; files that are not here, as in a clone, count as they were when they were last hashed."""
    base = parameters.model.base_model
    names = {"dataset.name": parameters.dataset.source, "model.name": parameters.model.name}
    names |= {"model.base": base.name} if base else {}
    before: Sources = json.loads(SOURCES.read_text(encoding="utf-8"))["files"] if SOURCES.exists() else {}
    hashes: Sources = {}
    for key, name in names.items():
        if not name.startswith(PACKAGE_SCHEME) and Path(name) != SAMPLE:
            files = {inside: _sha256(file) for inside, file in _files(key, name).items()}
            if files := files or before.get(key, {}).get(name, {}):
                hashes[key] = {name: files}
    return hashes


def write_sources(files: Sources) -> None:
    """Write the hashes, and `watched`, which dvc.yaml reads: empty where there is nothing to watch."""
    part = SOURCES.with_name(f"{SOURCES.name}.part")  # DVC reads the file first, and half of it would stop it
    part.parent.mkdir(parents=True, exist_ok=True)
    content = {"files": files, "watched": ["own"] if files else []}
    part.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    part.replace(SOURCES)


def _files(key: str, name: str) -> dict[str, Path]:
    """Return the files that `download` would read, by their names in the source; none of a hub identifier."""
    path = Path(name)
    if path.is_file():
        return {path.name: path}
    patterns = CHECKPOINT_FILES if key.startswith("model.") else ("**",)
    # Path.glob follows no linked folder, and gives hidden files, which are no reviews.
    inside = {each for pattern in patterns for each in glob(pattern, root_dir=path, recursive=True)}  # noqa: PTH207
    return {Path(each).as_posix(): path / each for each in sorted(inside) if (path / each).is_file()}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
