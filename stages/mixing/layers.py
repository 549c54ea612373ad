"""A layer as the measures see it: its weights, and what its forward pass shows, by model family.

Which module holds what is data: the `mixing` entry of a family in `stages/models/families.yaml`.
Shapes: H heads, T tokens, D hidden, E = heads * head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from stages.errors import InputError
from stages.models.capture_points import FAMILIES, Tap, recording, taps
from stages.sites import Site, layer_input

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


class LayerPass(NamedTuple):
    """What one layer's forward pass shows, of a batch or of one document."""

    attention: Tensor  # weights, [..., H, T, T]
    x: Tensor  # what enters the layer, [..., T, D]
    value: Tensor  # [..., T, E]
    attention_output: Tensor  # [..., T, D]
    attention_norm: Tensor  # after skip connection and LayerNorm, [..., T, D]

    def document(self, place: int) -> LayerPass:
        """One document of a batch."""
        return LayerPass(*(tensor[place] for tensor in self))


def layer_weights(base: PreTrainedModel) -> list[LayerWeights]:
    """Every layer's weights as the model holds them (its dtype, its device); `InputError` for an unknown family."""
    config, names = base.config, _mixing_entry(base)

    def read(layer: Any) -> LayerWeights:
        def linear(name: str) -> Linear:
            module = layer.get_submodule(names[name])
            return Linear(module.weight.detach().T, module.bias.detach())

        linears = ("query", "key", "value", "output", "feed_forward_in", "feed_forward_out")
        parts: dict[str, Any] = {name: linear(name) for name in linears}
        for name in ("attention_norm", "output_norm"):
            parts[name] = norm_of(layer.get_submodule(names[name]))
        return LayerWeights(config.num_attention_heads, activation=layer.get_submodule(names["activation"]), **parts)

    return [read(base.get_submodule(names["layer"].format(layer=i))) for i in range(config.num_hidden_layers)]


def attention_gain(weights: LayerWeights) -> float:
    """|[W_V, 0; b_V, 1] [W_O; b_O]|_F / sqrt(d + 1) (Kobayashi et al., EMNLP 2021, section 5.2).

    The affine map x -> (x W_V + b_V) W_O + b_O as one matrix on [x, 1]: the root mean square by
    which it scales a random vector. Below 1, a token's own vector on the skip connection outweighs it.
    """
    W_O = weights.output.W.double()
    linear = weights.value.W.double() @ W_O
    constant = weights.value.b.double() @ W_O + weights.output.b.double()
    square = linear.square().sum() + constant.square().sum()
    return float(torch.sqrt(square / (linear.shape[0] + 1)))


def norm_of(module: Any) -> Norm:
    """A LayerNorm module's weights."""
    return Norm(module.weight.detach(), module.bias.detach(), module.eps)


def run_layers(
    base: PreTrainedModel, folder: Path, batch: dict[str, Tensor], points: Sequence[str] = RATIO_POINTS
) -> tuple[list[LayerPass], dict[Site, Tensor]]:
    """One forward pass: every layer's part of it, and the features at `points`, of which the first need a few.

    `InputError` naming the checkpoint's `folder` where the model gives no attention weights.
    """
    names, layers = _mixing_entry(base), range(1, base.config.num_hidden_layers + 1)
    paths = (f"{names['layer'].format(layer=layer - 1)}.{names['value']}" for layer in layers)
    values = [Tap(Site(layer, VALUE), path, "output") for layer, path in zip(layers, paths, strict=True)]
    needed = [*points, *(point for point in RATIO_POINTS if point not in points)]
    with torch.inference_mode(), recording(base, [*taps(base.config.model_type, len(layers), needed), *values]) as seen:
        attentions = base(**batch, output_attentions=True).attentions or ()
    given = sum(weights is not None for weights in attentions)
    if given != len(layers):
        raise InputError(
            f"{folder}: the model gave the attention weights of {given} of its {len(layers)} layers; without them "
            "nothing can be measured (it must support attn_implementation='eager')"
        )
    rest = ("value", "attention_output", "attention_norm")
    return [
        LayerPass(weights, seen[layer_input(layer)], *(seen[Site(layer, point)] for point in rest))
        for layer, weights in zip(layers, attentions, strict=True)
    ], seen


def _mixing_entry(base: PreTrainedModel) -> dict[str, str]:
    known = [name for name, family in FAMILIES.items() if "mixing" in family]
    if base.config.model_type not in known:
        raise InputError(
            f"model.name: mixing cannot be measured in the model family {base.config.model_type!r}; "
            f"known: {', '.join(known)} (stages/models/families.yaml)"
        )
    entry: dict[str, str] = FAMILIES[base.config.model_type]["mixing"]
    return entry
