"""Measures of how self-attention mixes the vectors of tokens, as tensors, tables, figures and an interactive page.

Importing the package loads no dependencies; they are loaded when a public name is used for the first time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from attnmix import interventions
    from attnmix.core.errors import InputError
    from attnmix.core.store.runs import Run, open_run
    from attnmix.model import Model, load
    from attnmix.results.compare import compare
    from attnmix.results.comparison import Comparison
    from attnmix.results.load import load_result
    from attnmix.results.measure import measure
    from attnmix.results.measure_names import list_measures
    from attnmix.results.result import Measures
    from attnmix.vectors import capture, layout

MODULES = {
    **dict.fromkeys(("capture", "layout"), "attnmix.vectors"),
    **dict.fromkeys(("load", "Model"), "attnmix.model"),
    **dict.fromkeys(("open_run", "Run"), "attnmix.core.store.runs"),
    "compare": "attnmix.results.compare",
    "Comparison": "attnmix.results.comparison",
    "load_result": "attnmix.results.load",
    "measure": "attnmix.results.measure",
    "list_measures": "attnmix.results.measure_names",
    "Measures": "attnmix.results.result",
    "InputError": "attnmix.core.errors",
}
"""The module of each public name."""
CLONE_VERSION = "0+clone"  # the version if the package is not installed
__all__ = [
    "Comparison",
    "InputError",
    "Measures",
    "Model",
    "Run",
    "capture",
    "compare",
    "interventions",
    "layout",
    "list_measures",
    "load",
    "load_result",
    "measure",
    "open_run",
]


def __getattr__(name: str) -> Any:
    """Return the version or another public name, whose module is imported when the name is used for the first time."""
    if name == "__version__":
        return _read_version()
    if name == "interventions":
        return import_module("attnmix.interventions")
    if name not in MODULES:
        raise AttributeError(f"module 'attnmix' has no attribute {name!r}")
    module = import_module(MODULES[name])
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__


def _read_version() -> str:
    """Return the version of the installed distribution, or `CLONE_VERSION` if the package is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("attnmix")
    except PackageNotFoundError:
        return CLONE_VERSION
