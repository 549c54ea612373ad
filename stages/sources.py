"""Note the hashes of the user's own data or model, so that `download` runs again when a file of them has changed.

    python -m stages sources

DVC cannot watch a path that may as well be a hub identifier, so this stage runs at every `dvc repro` while there is
such a source; else dvc.yaml has no such stage. Packages are pinned by the lock files, data/sample by dvc.yaml, and what
a hub serves by its revision. Writes `reports/sources.json`.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attnmix.core.errors import InputError, in_one_line, model_errors
from attnmix.data.folders import source_files, split_name
from attnmix.models.fetching import PACKAGE_SCHEME, local_files
from stages.common.parameters import Parameters

Sources = dict[str, dict[str, dict[str, str]]]
"""By parameter, its value and the sha256 of each file under it."""
SOURCES_FILE = Path("reports/sources.json")
SAMPLE = Path("data/sample")
COPIES = (".dvc", "tmp", "exps")
"""Folder below a repository in which `dvc exp run --temp` and `--queue` run a copy of what git knows."""
REMOTES = "docs/guide.md, Sharing results"
READ_BYTES = 2**20
BAR_DELAY_SECONDS = 1


def main(parameters: Parameters) -> None:
    write_sources(hash_sources(parameters))


def hash_sources(parameters: Parameters) -> Sources:
    """Return the hashes; files that are not here, as in a clone, count as they were when they were last hashed.

    Raises `InputError` for a folder that cannot be read, and in a copy of a repository for a file that it lacks.
    """
    before = read_sources()
    hashes: Sources = {}
    for key, name in source_names(parameters).items():
        if name.startswith(PACKAGE_SCHEME) or Path(name) == SAMPLE:
            continue
        known = before.get(key, {}).get(name, {})
        original = original_of(name)
        if original is not None:
            if _hash_files(key, _files(key, str(original), parameters)) != known:
                raise missing_in_copy(key, name, original)
        elif known and not Path(name).exists():
            advice = "DVC takes what that run made of it from its cache or a remote"
            logging.warning("%s: %s is missing here; it counts as unchanged since its last run: %s", key, name, advice)
        hashed = _hash_files(key, _files(key, name, parameters)) or known
        if hashed:
            hashes[key] = {name: hashed}
    return hashes


def source_names(parameters: Parameters) -> dict[str, str]:
    """Return the names of the data and of each model, by their parameters."""
    names = {"dataset.name": split_name(parameters.dataset.name)[0], "model.name": parameters.model.name}
    base = parameters.model.base_model
    return names | ({"model.base": base.name} if base else {})


def original_of(name: str) -> Path | None:
    """Return the file or folder that a relative path means in the repository of which this folder is DVC's copy.

    None where this folder is no copy, or has the path itself.
    """
    for folder in Path.cwd().parents:
        if folder.parts[-len(COPIES) :] == COPIES and not Path(name).exists():
            original = folder.parents[len(COPIES) - 1] / name
            return original if original.exists() else None
    return None


def missing_in_copy(key: str, name: str, original: Path) -> InputError:
    """Return the error for a file that this copy of a repository lacks."""
    problem = f"{name} is missing in this copy of the repository, as DVC copies what git knows"
    allowed = f"add `--copy-paths {name}` to `dvc exp run`, name the full path {original}, or commit the file"
    return InputError(f"{key}: {problem}; {allowed}")


def missing_in_clone(key: str, name: str) -> InputError:
    """Return the error for a file that is missing, as in a clone, if `download` has to read it."""
    problem = f"{name} is missing here, and so are the outputs of a run with it and these parameters"
    allowed = f"put it there or commit it, or get the outputs from a remote: `dvc repro --pull`, {REMOTES}"
    return InputError(f"{key}: {problem}; {allowed}")


def read_sources() -> Sources:
    """Return the hashes in `reports/sources.json`, none without that file; raise `InputError` for a damaged one."""
    if not SOURCES_FILE.exists():
        return {}
    try:
        files = json.loads(SOURCES_FILE.read_text(encoding="utf-8"))["files"]
        for sources in files.values():
            for hashes in sources.values():
                if not all(isinstance(text, str) for pair in hashes.items() for text in pair):
                    raise TypeError("hashes that are no text")
    except (AttributeError, LookupError, TypeError, ValueError, OSError, RecursionError) as error:
        problem = f"{SOURCES_FILE} does not hold hashes of files by parameter ({in_one_line(error)})"
        remedy = f"restore it: `git checkout HEAD {SOURCES_FILE}`, which also ends a conflict of a merge"
        raise InputError(f"{problem}; {remedy}") from error
    return dict(files)


def write_sources(files: Sources) -> None:
    """Write the hashes, and `watched`, which dvc.yaml reads: empty where there is nothing to watch."""
    part = SOURCES_FILE.with_name(f"{SOURCES_FILE.name}.part")  # DVC reads the file first, and half of it would stop it
    part.parent.mkdir(parents=True, exist_ok=True)
    content = {"files": files, "watched": ["own"] if files else []}
    part.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    part.replace(SOURCES_FILE)


def _files(key: str, name: str, parameters: Parameters) -> dict[str, Path]:
    """Return the files that `download` reads of a source, by their names in it; none of a hub identifier."""
    if key == "dataset.name":
        configuration = parameters.dataset.name.removeprefix(split_name(parameters.dataset.name)[0])
        return source_files(parameters.dataset.model_copy(update={"name": f"{name}{configuration}"}))
    with model_errors(key, name, Path(name)):
        return local_files(name)


def _hash_files(key: str, files: Mapping[str, Path]) -> dict[str, str]:
    """Return the sha256 of each file, with a progress bar on a terminal where it takes more than a second."""
    hashes = {}
    with _missing_files(key):
        total = sum(file.stat().st_size for file in files.values())
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "delay": BAR_DELAY_SECONDS, "disable": None}
    with _missing_files(key), tqdm(total=total, desc=f"hash {key}", **options) as progress:
        for name, file in files.items():
            digest = hashlib.sha256()
            with file.open("rb") as opened:
                for chunk in iter(partial(opened.read, READ_BYTES), b""):
                    digest.update(chunk)
                    progress.update(len(chunk))
            hashes[name] = digest.hexdigest()
    return hashes


@contextmanager
def _missing_files(key: str) -> Iterator[None]:
    """Turn the error of a file that is removed while it is hashed, or that cannot be read, into an `InputError`."""
    try:
        yield
    except OSError as error:
        problem = f"{error.filename} cannot be read ({error.strerror})"
        raise InputError(f"{key}: {problem}; let no program change the files while they are read") from error
