"""Registries of the names in the public API, with the kind of each name and the call that accepts it.

If a name is passed to the wrong argument, such as a matrix to `methods`, the error message shows the correct call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pandas as pd

from attnmix.core.errors import InputError
from attnmix.core.names import POINTS
from attnmix.core.terminal import shorten
from attnmix.measures.controls import CONTROLS
from attnmix.measures.input_parts import RULES
from attnmix.measures.matrices import RESULT_MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.measures.sinks import SINK_MEASURES

OWN_SHARE = "own_share"
SWAP = "swap"
CLASS_SHARE = "class_share"
SHARES = {
    SWAP: "a / (a + o), where a is the change of a token's output in a layer if the inputs of all other tokens come "
    "from another text, and o the change if its own input does",
    CLASS_SHARE: "the share of the squared length of the contributions of other tokens that is common to the texts of "
    "a class; needs labels",
}
"""Quantities that `measure(controls=...)` accepts in addition to controls of ratios, by name."""
CLASS_SHARE_PERMUTED = f"{CLASS_SHARE}_permuted"
"""The name of the 95 % quantile of `CLASS_SHARE` over random permutations of the classes."""
CONTROL_NAMES = (*CONTROLS, *SHARES)
"""The names that `measure(model, texts, controls=[...])` accepts."""
PARTS_VARIABLES = ("parts", "length", "projection", "bias_projection", "coherence", "biases")
"""The names that refer to `result.parts()`: the name of the method, and variables that only this method returns."""


def is_share(name: str) -> bool:
    """Return True for the name of a quantity in `SHARES`, or of a variant such as `swap_same_class`."""
    return any(name == share or name.startswith(f"{share}_") for share in SHARES)


def list_measures() -> pd.DataFrame:
    """Return the names that `measure(methods=[...])`, `Measures.matrix` and `measure(controls=[...])` accept.

    Returns:
        A row for each name. The columns are `name`, `kind` (`ratio`, `matrix` or `control`), `call`, a call with this
        name, `description`, a formula or text, and `source`, usually a paper, and empty for controls.

    Example:
        >>> table = attnmix.list_measures()
        >>> table.query("kind == 'ratio'").name.tolist()
        ['attn_w', 'attnres_w', 'attn_n', 'attnres_n', 'attnresln_n', 'enc_n', 'layer_n']
        >>> table.query("name == 'alti'").call.item()
        "result.matrix('alti')"
    """
    rows = []
    for name, ratio in RATIOS.items():
        call = f"measure(model, texts, methods=[{name!r}])"
        rows.append((name, "ratio", call, ratio.definition, ratio.source))
    for name, matrix in RESULT_MATRICES.items():
        call = f"result.matrix({name!r})"
        rows.append((name, "matrix", call, matrix.definition, matrix.source))
    control_descriptions = {name: control.definition for name, control in CONTROLS.items()}
    for name, description in (control_descriptions | SHARES).items():
        call = f"measure(model, texts, controls=[{name!r}])"
        rows.append((name, "control", call, description, ""))
    return pd.DataFrame(rows, columns=["name", "kind", "call", "description", "source"])


class Registry(NamedTuple):
    """Names of the same kind in the public API."""

    description: str
    """The kind of the names and the call that accepts them, as a template with the field `name`."""
    names: Iterable[str]


def _list_registries() -> list[Registry]:
    """Return the registries that together list every name in the public API."""
    return [
        Registry("a mixing ratio: measure(model, texts, methods=[{name}])", RATIOS),
        Registry("a contribution matrix: result.matrix({name})", RESULT_MATRICES),
        Registry("a control: measure(model, texts, controls=[{name}])", CONTROL_NAMES),
        Registry("a share of parts: result.own_share()", (OWN_SHARE,)),
        Registry("a measure of sinks: result.sinks()", ("attention_to_first", *SINK_MEASURES)),
        Registry("a variable of result.parts()", PARTS_VARIABLES),
        Registry("a rule of result.parts(rule={name})", RULES),
        Registry("a capture point: capture(model, texts, points=[{name}])", POINTS),
    ]


def check_name(argument: str, name: Any, allowed: Iterable[str]) -> None:
    """Raise `InputError` if `name` is not one of the `allowed` values of `argument`.

    If the name belongs to another argument or method, the message shows the correct call.
    """
    names = list(allowed)
    if isinstance(name, str) and name in names:
        return
    problem = f"{argument}: {shorten(repr(name))}"
    kind = _describe_kind(name)
    if kind is not None:
        problem += f" is {kind}"
    raise InputError(f"{problem}; allowed: {', '.join(names)}")


def check_kinds(argument: str, names: Any, allowed: Iterable[str]) -> None:
    """Raise `InputError` for the first name of another kind than those allowed for `argument`; ignore unknown names.

    For example, the name of a matrix is not allowed where names of ratios are.
    """
    given = names if isinstance(names, list) else [names]
    for name in given:
        if _describe_kind(name) is not None:
            check_name(argument, name, allowed)


def _describe_kind(name: Any) -> str | None:
    """Return the kind of a name and the call that accepts it, as text; return None for an unknown name."""
    if not isinstance(name, str):
        return None
    for registry in _list_registries():
        if name in registry.names:
            return registry.description.format(name=repr(name))
    return None
