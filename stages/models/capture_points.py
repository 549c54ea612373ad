"""Capture points: the named places in a model where features are taken.

The module paths are data (`families.yaml`); a new family is a new entry there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from stages.errors import InputError

FAMILIES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("families.yaml").read_text(encoding="utf-8")
)
EMBEDDING_POINTS: tuple[str, ...] = tuple(
    dict.fromkeys(point for family in FAMILIES.values() for point in family["embedding_points"])
)
LAYER_POINTS: tuple[str, ...] = tuple(
    dict.fromkeys(point for family in FAMILIES.values() for point in family["layer_points"])
)
POINT_NAMES: tuple[str, ...] = EMBEDDING_POINTS + LAYER_POINTS


class Site(NamedTuple):
    """One capture point in one layer; level 0 is the embedding."""

    layer: int
    point: str

    def __str__(self) -> str:
        return f"layer_{self.layer:02d}/{self.point}"


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
    found = [Tap(Site(0, name), **place) for name, place in family["embedding_points"].items() if name in points]
    for layer in range(n_layers):
        for name, place in family["layer_points"].items():
            if name in points:
                module = place["module"].format(layer=layer)
                found.append(Tap(Site(layer + 1, name), module, place["side"]))
    return found


def sites_in_forward_order(sites: Sequence[Site]) -> list[Site]:
    """Sites sorted as the forward pass meets them."""
    return sorted(sites, key=lambda site: (site.layer, POINT_NAMES.index(site.point)))


@contextmanager
def recording(model: Any, wanted: Sequence[Tap]) -> Iterator[dict[Site, Any]]:
    """A dictionary that each forward pass of the base model fills with `[batch, tokens, hidden]`.

    The tensors are the model's own, not copies; read them before the next forward pass.
    """
    features: dict[Site, Any] = {}

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
