"""Where each capture point lies in a model: module paths by family, as data (`families.yaml`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

from stages.errors import InputError
from stages.sites import Site

FAMILIES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("families.yaml").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Tap:
    """The module whose input or output is the feature of a site."""

    site: Site
    module: str
    side: Literal["input", "output"]


def taps(model_type: str, n_layers: int, points: Sequence[str]) -> list[Tap]:
    """The taps of `points` in forward order; `InputError` for a family or point that is not there."""
    if model_type not in FAMILIES:
        raise InputError(
            f"model.name: no capture points are known for the model family {model_type!r}; "
            f"known: {', '.join(FAMILIES)} (stages/models/families.yaml)"
        )
    family = FAMILIES[model_type]
    known = [*family["embedding_points"], *family["layer_points"]]
    unknown = [point for point in points if point not in known]
    if unknown:
        raise InputError(
            f"capture.points: {', '.join(unknown)} not in the model family {model_type}; allowed: {', '.join(known)}"
        )
    chosen = [Tap(Site(0, name), **place) for name, place in family["embedding_points"].items() if name in points]
    for layer in range(n_layers):
        for name, place in family["layer_points"].items():
            if name in points:
                module = place["module"].format(layer=layer)
                chosen.append(Tap(Site(layer + 1, name), module, place["side"]))
    return chosen


@contextmanager
def recording(model: Module, wanted: Sequence[Tap]) -> Iterator[dict[Site, Tensor]]:
    """A dictionary that each forward pass of the base model fills with `[batch, tokens, hidden]`.

    The tensors are the model's own, not copies; read them before the next forward pass.
    """
    features: dict[Site, Tensor] = {}

    def input_hook(site: Site) -> Any:
        def hook(_module: Any, arguments: tuple[Any, ...]) -> None:
            features[site] = arguments[0]

        return hook

    def output_hook(site: Site) -> Any:
        def hook(_module: Any, _arguments: Any, output: Any) -> None:
            features[site] = output

        return hook

    handles = []
    try:
        for tap in wanted:
            module = model.get_submodule(tap.module)
            if tap.side == "input":
                handles.append(module.register_forward_pre_hook(input_hook(tap.site)))
            else:
                handles.append(module.register_forward_hook(output_hook(tap.site)))
        yield features
    finally:
        for handle in handles:
            handle.remove()
