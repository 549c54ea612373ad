"""Folders of unfinished work, from which killed stages resume, and a lock that prevents concurrent runs of a stage.

DVC deletes a stage's outputs before it reruns the stage. Work in progress is therefore stored in a different folder.
The name of this folder is a digest of everything that affects the result: the parameters, data and code declared in
dvc.yaml, the installed packages and the kind of machine. Work with a different digest is never resumed.
"""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from attnmix.core.disk import check_writable, remove_empty
from attnmix.core.errors import InputError, in_one_line
from stages.common.parameters import Parameters

UNFINISHED = Path(".unfinished")
DIGEST_CHARACTERS = 16
REPOSITORY = Path(__file__).parents[2]
NAME_AND_VERSION = re.compile(r"^(?:Name|Version): *(.*?)\s*$", re.MULTILINE)


def is_first_process() -> bool:
    """Return True in the first process of a run, according to the rank set by torchrun or accelerate."""
    return os.environ.get("RANK", "0") == "0"


def unfinished_folder(stage: str, parameters: Parameters, root: Path) -> Path:
    """Return the folder in `root` that contains the unfinished work of a stage for the current inputs.

    Folders that contain unfinished work of this stage for other inputs are deleted.
    """
    folder = root / UNFINISHED / stage / _digest_inputs(stage, parameters, root)
    folder.mkdir(parents=True, exist_ok=True)
    if is_first_process():
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
    return folder


def _digest_inputs(stage: str, parameters: Parameters, root: Path) -> str:
    """Return a digest of everything that affects the results of a stage of the run in `root`.

    These are the parameters and files that dvc.yaml declares for the stage, the versions of Python and of the installed
    packages, and the kind of machine.
    """
    from attnmix.core.arithmetic.kernels import computed_on  # loads torch
    from attnmix.core.device import chosen_device

    declaration = _read_declaration(stage)
    settings = [
        _select_parameters(parameters, declaration["params"]),
        platform.python_version(),
        _list_packages(),
        computed_on(parameters.arithmetic, chosen_device()),
    ]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for file in _list_input_files(declaration["deps"], root):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
        digest.update(file.name.encode())
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def _select_parameters(parameters: Parameters, keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of the parameters with the given keys: `seed`, whole sections, or keys such as `umap.seed`."""
    sections = parameters.model_dump()
    selected = {}
    for key in keys:
        value: Any = sections
        for name in key.split("."):
            value = value[name]
        selected[key] = value
    return selected


def _list_input_files(names: Iterable[str], root: Path) -> Iterator[Path]:
    """Yield the files in the dependencies `names` of a stage, including the files in folders.

    Code is read from this repository, all other dependencies from the run in `root`.
    """
    for name in names:
        is_code = name.startswith(("attnmix", "stages"))
        path = (REPOSITORY if is_code else root) / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                yield file


def describe_unfinished(stage: str) -> str:
    """Return a sentence on the completed work of a stopped stage."""
    if any(path.is_file() for path in (UNFINISHED / stage).rglob("*")):
        return f"the completed work of {stage} is stored in {UNFINISHED / stage}; `dvc repro` resumes from it"
    return f"{stage} had not completed any work from which it could resume"


@contextmanager
def lock_stage(stage: str) -> Iterator[None]:
    """Hold the lock of `stage` in this folder; raise `InputError` if another run holds it or outputs are not writable.

    The operating system releases the lock of a killed run. In a run with several processes, the first one holds the
    lock.
    """
    if not is_first_process():
        yield
        return
    for path in [UNFINISHED, *_list_outputs(stage)]:
        check_writable(path.parent)
    UNFINISHED.mkdir(exist_ok=True)
    lock = FileLock(UNFINISHED / f"{stage}.lock", blocking=False)
    try:
        lock.acquire()
    except Timeout:
        problem = f"another run of {stage} is in progress in {Path.cwd()}"
        raise InputError(f"{problem}; wait until it finishes, or stop it") from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
        remove_empty(UNFINISHED / stage)


def _list_outputs(stage: str) -> list[Path]:
    """Return the paths of all outputs of a stage, including metrics and plots, as declared in dvc.yaml."""
    declaration = _read_declaration(stage)
    paths = []
    for kind in ("outs", "metrics", "plots"):
        for output in declaration.get(kind, []):
            # An output is declared by its path, or as a mapping from the path to options.
            path = output if isinstance(output, str) else next(iter(output))
            paths.append(Path(path))
    return paths


def _list_packages() -> list[str]:
    """Return the sorted names and versions of the installed distributions.

    `Distribution.version` would take six times as long, because it parses the whole metadata file of a distribution,
    including the long description.
    """
    packages = set()
    for distribution in distributions():
        metadata = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        header, _, _ = metadata.partition("\n\n")
        packages.add(" ".join(NAME_AND_VERSION.findall(header)))
    return sorted(packages)


def _read_declaration(stage: str) -> dict[str, Any]:
    """Return the stage's entry in dvc.yaml, with its command, dependencies, parameters and outputs.

    An entry with `foreach` contains these under the key `do`.
    """
    path = REPOSITORY / "dvc.yaml"
    try:
        stages = yaml.safe_load(path.read_text(encoding="utf-8"))["stages"]
        entry: dict[str, Any] = stages[stage].get("do", stages[stage])
    except (yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        remedy = f"restore it with `git checkout HEAD {path.name}`"
        raise InputError(f"{path} does not declare the stage {stage} ({in_one_line(error)}); {remedy}") from error
    return entry
