"""Registries of the names in the public API, with the kind of each name and the call that accepts it.

If a name is passed to the wrong argument, such as a matrix to `methods`, the error message shows the correct call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from attnmix.core.errors import InputError
from attnmix.core.names import POINTS
from attnmix.core.terminal import shorten
from attnmix.measures.controls import CONTROLS
from attnmix.measures.input_parts import RULES
from attnmix.measures.matrices import RESULT_MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.measures.sinks import SINK_MEASURES

OWN_SHARE, SWAP, CLASS_SHARE = "own_share", "swap", "class_share"
SHARES = {
    SWAP: "a / (a + o), where a is the change of a token's output in a layer if the inputs of all other tokens come "
    "from another text, and o the change if its own input does",
    CLASS_SHARE: "the share of the squared length of the contributions of other tokens that is common to the texts of "
    "a class; needs labels",
}
"""Quantities that `measure(controls=...)` accepts in addition to controls of ratios, by name."""
CONTROL_NAMES = (*CONTROLS, *SHARES)
"""The names that `measure(model, texts, controls=[...])` accepts."""
PARTS_VARIABLES = ("parts", "length", "projection", "bias_projection", "coherence", "biases")
"""The names that refer to `result.parts()`: the method and its variables with distinctive names."""


def list_measures() -> pd.DataFrame:
    """Return the names that `measure(methods=[...])`, `Measures.matrix` and `measure(controls=[...])` accept.

    Returns:
        A row for each name: `name`; `kind` (`ratio`, `matrix` or `control`); `call`, a call with this name;
        `description`, a formula or text; and `source`, the paper, if any.

    Example:
        >>> table = attnmix.list_measures()
        >>> table.query("kind == 'ratio'").name.tolist()
        ['attn_w', 'attnres_w', 'attn_n', 'attnres_n', 'attnresln_n', 'enc_n', 'layer_n']
        >>> table.query("name == 'alti'").call.item()
        "result.matrix('alti')"
    """
    rows = []
    for name, ratio in RATIOS.items():
        rows.append((name, "ratio", f"measure(model, texts, methods=[{name!r}])", ratio.definition, ratio.source))
    for name, matrix in RESULT_MATRICES.items():
        rows.append((name, "matrix", f"result.matrix({name!r})", matrix.definition, matrix.source))
    descriptions = {name: control.definition for name, control in CONTROLS.items()} | SHARES
    for name, description in descriptions.items():
        rows.append((name, "control", f"measure(model, texts, controls=[{name!r}])", description, ""))
    return pd.DataFrame(rows, columns=["name", "kind", "call", "description", "source"])


def _list_registries() -> Iterator[tuple[str, Iterable[str]]]:
    """Yield a description (kind of name and call) and the names of each registry."""
    yield "a mixing ratio: measure(model, texts, methods=[{name}])", RATIOS
    yield "a contribution matrix: result.matrix({name})", RESULT_MATRICES
    yield "a control: measure(model, texts, controls=[{name}])", CONTROL_NAMES
    yield "a share of parts: result.own_share()", (OWN_SHARE,)
    yield "a measure of sinks: result.sinks()", ("attention_to_first", *SINK_MEASURES)
    yield "a variable of result.parts()", PARTS_VARIABLES
    yield "a rule of result.parts(rule={name})", RULES
    yield "a capture point: capture(model, texts, points=[{name}])", POINTS


def check_name(argument: str, name: Any, allowed: Iterable[str]) -> None:
    """Raise `InputError` if the name is not allowed for `argument`."""
    names = list(allowed)
    if isinstance(name, str) and name in names:
        return
    problem = f"{argument}: {shorten(repr(name))}"
    kind = _describe_kind(name)
    if kind is not None:
        problem += f" is {kind}"
    raise InputError(f"{problem}; allowed: {', '.join(names)}")


def check_kinds(argument: str, names: Any, allowed: Iterable[str]) -> None:
    """Raise `InputError` for the first known name that is not allowed for `argument`; ignore unknown names."""
    for name in names if isinstance(names, list) else [names]:
        if _describe_kind(name) is not None:
            check_name(argument, name, allowed)


def _describe_kind(name: Any) -> str | None:
    """Return a description of the kind of a name and the call that accepts it; None for an unknown name."""
    if not isinstance(name, str):
        return None
    for kind, names in _list_registries():
        if name in names:
            return kind.format(name=repr(name))
    return None
