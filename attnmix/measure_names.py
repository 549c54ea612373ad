"""The lookup of every name that the functions take: what the name is, and which call takes it.

A name given to the wrong argument, such as a matrix given to `methods`, is then an error that says where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from attnmix.core.errors import InputError
from attnmix.core.names import POINTS
from attnmix.core.terminal import shorten
from attnmix.measures.controls import CONTROLS
from attnmix.measures.input_parts import RULES
from attnmix.measures.matrices import MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.measures.sinks import SINK_MEASURES

OWN_SHARE, SWAP, CLASS_SHARE = "own_share", "swap", "class_share"
CONTROL_NAMES = (*CONTROLS, SWAP, CLASS_SHARE)
"""The names that `measure(model, texts, controls=[...])` takes."""
PARTS_VARIABLES = ("parts", "length", "projection", "bias_projection", "coherence", "biases")
"""The call `result.parts()` and those of its variables whose names say what they are."""


def _registries() -> Iterator[tuple[str, Iterable[str]]]:
    """Yield each registry of names, after what its names are and the call that takes them."""
    yield "a mixing ratio: measure(model, texts, methods=[{name}])", RATIOS
    yield "a contribution matrix: result.matrix({name})", MATRICES
    yield "a control: measure(model, texts, controls=[{name}])", CONTROL_NAMES
    yield "a share of parts: result.own_share()", (OWN_SHARE,)
    yield "a measure of sinks: result.sinks()", ("attention_to_first", *SINK_MEASURES)
    yield "a variable of result.parts()", PARTS_VARIABLES
    yield "a rule of result.parts(rule={name})", RULES
    yield "a capture point: capture(model, texts, points=[{name}])", POINTS


def check_name(argument: str, name: Any, allowed: Iterable[str]) -> None:
    """Raise `InputError` if `argument` does not take the name."""
    names = list(allowed)
    if isinstance(name, str) and name in names:
        return
    problem = f"{argument}: {shorten(repr(name))}"
    kind = _kind(name)
    if kind is not None:
        problem += f" is {kind}"
    raise InputError(f"{problem}; allowed: {', '.join(names)}")


def check_kinds(argument: str, names: Any, allowed: Iterable[str]) -> None:
    """Raise `InputError` for the first of `names` that is known, but not to `argument`; unknown names pass."""
    for name in names if isinstance(names, list) else [names]:
        if _kind(name) is not None:
            check_name(argument, name, allowed)


def _kind(name: Any) -> str | None:
    """Return what a name is and the call that takes it; None for an unknown name."""
    if not isinstance(name, str):
        return None
    for kind, names in _registries():
        if name in names:
            return kind.format(name=repr(name))
    return None
