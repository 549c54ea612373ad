"""Record the hashes of local datasets and models, so that changed files cause a new run of `download`.

    python -m stages sources

DVC cannot watch a path that may also be a hub identifier. If a source is local, this stage therefore runs on every `dvc
repro`; otherwise, dvc.yaml omits the stage. Packages are pinned by the lock files, data/sample by dvc.yaml, and hub
repositories by their revision. Writes `reports/sources.json`.
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
"""SHA-256 hashes of files, by parameter, then by value of the parameter, then by file name."""
SOURCES_FILE = Path("reports/sources.json")
SAMPLE = Path("data/sample")
COPIES = (".dvc", "tmp", "exps")
"""The last components of the folder in which DVC runs copies of a repository (`dvc exp run --temp` and `--queue`)."""
REMOTES = "docs/guide.md, Sharing results"
READ_BYTES = 2**20
BAR_DELAY_SECONDS = 1


def main(parameters: Parameters) -> None:
    """Write the hashes of the local sources."""
    write_sources(hash_sources(parameters))


def hash_sources(parameters: Parameters) -> Sources:
    """Return the hashes of all local sources; sources missing on this machine keep their last recorded hashes.

    Raise `InputError` for an unreadable folder, and if DVC's copy of a repository lacks a source that has changed in
    the original repository since its hashes were recorded.
    """
    recorded = read_sources()
    hashes: Sources = {}
    for key, name in source_names(parameters).items():
        if name.startswith(PACKAGE_SCHEME) or Path(name) == SAMPLE:
            continue  # files of packages and of the sample are pinned by other means
        recorded_hashes = recorded.get(key, {}).get(name, {})
        _check_missing_source(key, name, recorded_hashes, parameters)
        # There are no files to hash if the source is on the hub, or missing on this machine.
        source_hashes = _hash_files(key, _list_files(key, name, parameters)) or recorded_hashes
        if source_hashes:
            hashes[key] = {name: source_hashes}
    return hashes


def _check_missing_source(key: str, name: str, recorded_hashes: Mapping[str, str], parameters: Parameters) -> None:
    """Raise `InputError` if DVC's copy of a repository lacks a source that has changed in the original repository.

    The source has changed if the hashes of its files in the original repository differ from `recorded_hashes`.
    Log a warning for any other missing source with recorded hashes, which is treated as unchanged.
    """
    original = original_of(name)  # not None only for a source that is missing in DVC's copy of a repository
    if original is not None:
        if _hash_files(key, _list_files(key, str(original), parameters)) != recorded_hashes:
            raise missing_in_copy(key, name, original)
    elif recorded_hashes and not Path(name).exists():
        reason = "DVC can take the outputs from its cache or a remote"
        message = "%s: %s does not exist on this machine and is treated as unchanged since the last run, because %s"
        logging.warning(message, key, name, reason)


def source_names(parameters: Parameters) -> dict[str, str]:
    """Return the name of the dataset, without the configuration, and the name of each model, by parameter."""
    dataset, _ = split_name(parameters.dataset.name)
    names = {"dataset.name": dataset, "model.name": parameters.model.name}
    base = parameters.model.base_model
    if base:
        names["model.base"] = base.name
    return names


def original_of(name: str) -> Path | None:
    """Return the path in the original repository for a relative path that is missing in DVC's copy of the repository.

    Return None outside such a copy, if the path exists in the copy, and if it does not exist in the original
    repository.
    """
    repository = _find_original_repository()
    if repository is None or Path(name).exists():
        return None
    original = repository / name
    return original if original.exists() else None


def _find_original_repository() -> Path | None:
    """Return the repository that DVC has copied to the current folder; None if the folder is not such a copy."""
    for folder in Path.cwd().parents:
        # DVC makes its copies in the folder `<repository>/.dvc/tmp/exps`.
        if folder.parts[-len(COPIES) :] == COPIES:
            return folder.parents[len(COPIES) - 1]
    return None


def missing_in_copy(key: str, name: str, original: Path) -> InputError:
    """Return the error for a file that is missing in DVC's copy of a repository."""
    problem = f"{name} is missing in this copy of the repository, because DVC copies only tracked files"
    advice = f"add `--copy-paths {name}` to `dvc exp run`, use the full path {original}, or commit the file"
    return InputError(f"{key}: {problem}; {advice}")


def missing_in_clone(key: str, name: str) -> InputError:
    """Return the error for a file that `download` needs but that is missing on this machine, for example in a clone."""
    problem = f"{name} does not exist on this machine, nor do outputs of a run with it and these parameters"
    advice = f"copy or commit the file, or get the outputs from a remote with `dvc repro --pull` ({REMOTES})"
    return InputError(f"{key}: {problem}; {advice}")


def read_sources() -> Sources:
    """Return the hashes in `reports/sources.json`, or {} if it is missing; raise `InputError` for a damaged file."""
    if not SOURCES_FILE.exists():
        return {}
    try:
        files = json.loads(SOURCES_FILE.read_text(encoding="utf-8"))["files"]
        for sources in files.values():
            for hashes in sources.values():
                if not all(isinstance(file_hash, str) for file_hash in hashes.values()):
                    raise TypeError("a hash is not a string")
    except (AttributeError, LookupError, TypeError, ValueError, OSError, RecursionError) as error:
        problem = f"{SOURCES_FILE} does not contain hashes of files by parameter ({in_one_line(error)})"
        remedy = f"restore it with `git checkout HEAD {SOURCES_FILE}`, which also resolves a merge conflict"
        raise InputError(f"{problem}; {remedy}") from error
    return dict(files)


def write_sources(files: Sources) -> None:
    """Write the hashes, and the list `watched`; dvc.yaml declares the stage `sources` once for each entry of this list.

    The list has one entry if there are local sources; otherwise, it is empty.
    """
    part = SOURCES_FILE.with_name(f"{SOURCES_FILE.name}.part")  # an incomplete file would make DVC fail at start
    part.parent.mkdir(parents=True, exist_ok=True)
    content = {"files": files, "watched": ["own"] if files else []}
    part.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    part.replace(SOURCES_FILE)


def _list_files(key: str, name: str, parameters: Parameters) -> dict[str, Path]:
    """Return the files that `download` loads from a local source, by name; empty for a hub identifier.

    `name` is the path of the source; for a dataset, the configuration in `dataset.name` is appended to this path.
    """
    if key == "dataset.name":
        path, _ = split_name(parameters.dataset.name)
        configuration = parameters.dataset.name.removeprefix(path)
        return source_files(parameters.dataset.model_copy(update={"name": f"{name}{configuration}"}))
    with model_errors(key, name, Path(name)):
        return local_files(name)


def _hash_files(key: str, files: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 hash of each file; show a progress bar on a terminal after `BAR_DELAY_SECONDS`."""
    hashes = {}
    with _convert_missing_files(key):
        total = sum(file.stat().st_size for file in files.values())
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "delay": BAR_DELAY_SECONDS, "disable": None}
    with _convert_missing_files(key), tqdm(total=total, desc=f"hash {key}", **options) as progress:
        for name, file in files.items():
            digest = hashlib.sha256()
            with file.open("rb") as opened:
                for chunk in iter(partial(opened.read, READ_BYTES), b""):
                    digest.update(chunk)
                    progress.update(len(chunk))
            hashes[name] = digest.hexdigest()
    return hashes


@contextmanager
def _convert_missing_files(key: str) -> Iterator[None]:
    """Convert the errors for unreadable files, and for files removed during hashing, to `InputError`."""
    try:
        yield
    except OSError as error:
        problem = f"{error.filename} cannot be read ({error.strerror})"
        raise InputError(f"{key}: {problem}; check its permissions, and that no program changes it now") from error
