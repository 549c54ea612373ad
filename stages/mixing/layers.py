"""The weights of each layer that the measures need, by model family.

Which module holds what is data: the `mixing` entry of a family in `stages/models/families.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from stages.errors import InputError
from stages.models.capture_points import FAMILIES, Tap, taps
from stages.sites import Site

Tensor = torch.Tensor

VALUE = "value"  # what leaves the value projection, heads side by side; no capture point, but hooked like one
RATIO_POINTS = ("embedding_output", "attention_output", "attention_norm", "layer_output")


class Linear(NamedTuple):
    """An affine map `x @ W + b`: W `[in, out]`, b `[out]`."""

    W: Tensor
    b: Tensor


class Norm(NamedTuple):
    """A LayerNorm: gamma and beta `[hidden]`."""

    gamma: Tensor
    beta: Tensor
    eps: float


@dataclass(frozen=True)
class LayerWeights:
    """One post-LN layer."""

    heads: int
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    attention_norm: Norm
    feed_forward_in: Linear
    activation: Callable[[Tensor], Tensor]
    feed_forward_out: Linear
    output_norm: Norm


def layer_weights(base: PreTrainedModel) -> list[LayerWeights]:
    """Every layer's weights as the model holds them (its dtype, its device); `InputError` for an unknown family."""
    config = base.config
    names = _mixing_entry(config.model_type)
    return [
        _read(base.get_submodule(names["layer"].format(layer=layer)), names, config.num_attention_heads)
        for layer in range(config.num_hidden_layers)
    ]


def value_taps(base: PreTrainedModel) -> list[Tap]:
    """Taps of the value vectors `[batch, tokens, heads * head width]`, as `Site(layer, VALUE)`."""
    names = _mixing_entry(base.config.model_type)
    return [
        Tap(Site(layer + 1, VALUE), f"{names['layer'].format(layer=layer)}.{names['value']}", "output")
        for layer in range(base.config.num_hidden_layers)
    ]


def ratio_taps(base: PreTrainedModel) -> list[Tap]:
    """Taps of everything that the mixing ratios need besides the attention weights."""
    return taps(base.config.model_type, base.config.num_hidden_layers, RATIO_POINTS) + value_taps(base)


def attentions_of(output: Any, layers: int, folder: Path) -> tuple[Tensor, ...]:
    """The attention weights `[batch, heads, tokens, tokens]` of every layer; `InputError` where they cannot be had."""
    attentions = output.attentions or ()
    if len(attentions) != layers or any(weights is None for weights in attentions):
        raise InputError(
            f"{folder}: the model gave the attention weights of {sum(w is not None for w in attentions)} of its "
            f"{layers} layers; without them nothing can be measured (it must support attn_implementation='eager')"
        )
    return tuple(attentions)


def _mixing_entry(model_type: str) -> dict[str, str]:
    known = [name for name, family in FAMILIES.items() if "mixing" in family]
    if model_type not in known:
        raise InputError(
            f"model.name: mixing cannot be measured in the model family {model_type!r}; "
            f"known: {', '.join(known)} (stages/models/families.yaml)"
        )
    entry: dict[str, str] = FAMILIES[model_type]["mixing"]
    return entry


def _read(layer: Any, names: dict[str, str], heads: int) -> LayerWeights:
    def linear(name: str) -> Linear:
        module = layer.get_submodule(names[name])
        return Linear(module.weight.detach().T, module.bias.detach())

    return LayerWeights(
        heads=heads,
        query=linear("query"),
        key=linear("key"),
        value=linear("value"),
        output=linear("output"),
        attention_norm=norm_of(layer.get_submodule(names["attention_norm"])),
        feed_forward_in=linear("feed_forward_in"),
        activation=layer.get_submodule(names["activation"]),
        feed_forward_out=linear("feed_forward_out"),
        output_norm=norm_of(layer.get_submodule(names["output_norm"])),
    )


def norm_of(module: Any) -> Norm:
    """A LayerNorm module's weights."""
    return Norm(module.weight.detach(), module.bias.detach(), module.eps)
