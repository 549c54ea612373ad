"""Which files make a checkpoint, and where an installed package keeps them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from attnmix.core.errors import InputError

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
