"""Note the hashes of the user's own data or model, so that `download` runs again when a file of them has changed.

    python -m stages sources

DVC cannot watch a path that may as well be a hub identifier, so this stage runs at every `dvc repro` while there is
such a source; else dvc.yaml has no such stage. Packages are pinned by the lock files, data/sample by dvc.yaml, and what
a hub serves by its revision. Writes `reports/sources.json`.
"""

import hashlib
import json
from functools import partial
from glob import glob
from pathlib import Path

from tqdm import tqdm

from attnmix.core.errors import model_errors
from attnmix.models.fetching import PACKAGE_SCHEME, local_files
from stages.common.parameters import Parameters

Sources = dict[str, dict[str, dict[str, str]]]
"""By parameter, its value and the sha256 of each file under it."""
SOURCES = Path("reports/sources.json")
SAMPLE = Path("data/sample")
BAR_DELAY_SECONDS, BLOCK_BYTES = 2.0, 2**20
DATASET_FILES = (
    *("csv", "tsv", "txt", "json", "jsonl", "ndjson", "parquet", "arrow"),  # by themselves or compressed
    *("gz", "bz2", "xz", "zst", "lz4", "zip", "tar", "tgz"),
    *("md", "yaml"),  # what says which files make which split
)
"""Ends of the names of files that `datasets` reads as tables; pictures and models are none."""


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
            with model_errors(key, name, Path(name)):
                read = local_files(name) if key.startswith("model.") else _dataset_files(name)
            files = {inside: _sha256(inside, file) for inside, file in sorted(read.items())}
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


def _dataset_files(name: str) -> dict[str, Path]:
    """Return the files that `download` may read, by their names in the source; none of a hub identifier."""
    path = Path(name)
    if path.is_file():
        return {path.name: path}
    # Path.glob follows no linked folder, and gives hidden files, which are no reviews.
    inside = [Path(each) for each in glob("**", root_dir=path, recursive=True)]  # noqa: PTH207
    read = [each for each in inside if each.suffix.lower().removeprefix(".") in DATASET_FILES]
    return {each.as_posix(): path / each for each in read if (path / each).is_file()}


def _sha256(name: str, file: Path) -> str:
    """Return a file's hash, with a bar where that takes long."""
    sha256, size = hashlib.sha256(), file.stat().st_size
    bar = tqdm(total=size, desc=f"hash of {name}", unit="B", unit_scale=True, delay=BAR_DELAY_SECONDS, disable=None)
    with file.open("rb") as opened, bar:
        for block in iter(partial(opened.read, BLOCK_BYTES), b""):
            sha256.update(block)
            bar.update(len(block))
    return sha256.hexdigest()
