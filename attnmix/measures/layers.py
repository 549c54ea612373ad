"""A layer as the measures see it: its weights, and what its forward pass shows, in any family of the table.

Every family's layer is one algebra, whose norms are there or not (`attnmix/models/families.yaml`):

    o = heads W_O + b_O                       attention_output = attention_output_norm(o)
    attention_residual = x + attention_output            z = attention_norm(attention_residual)
    layer_output = output_norm(z + ffn_output)

Shapes: B texts, H heads, T tokens, D hidden, E = heads * head width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch.nn import LayerNorm, Module
from transformers import PreTrainedModel

from attnmix.core.errors import InputError
from attnmix.core.points import Site
from attnmix.models.attention import AttentionCall, attention_by, observed
from attnmix.models.capture_points import LayerCall, first_of, recording
from attnmix.models.families import PROJECTED, Stack

Tensor = torch.Tensor
Result = TypeVar("Result")

Visit = Callable[["LayerPass", Mapping[Site, Tensor]], None]
"""A function that `run_layers` calls with each layer and the features of the forward pass so far."""
RATIO_POINTS = ("attention_output", PROJECTED)


class Linear(NamedTuple):
    """An affine map `x @ W + b`: W `[in, out]`, b `[out]`."""

    W: Tensor
    b: Tensor


@dataclass(frozen=True)
class Norm:
    """A LayerNorm, or an RMSNorm, which does not centre: gamma and beta `[hidden]`."""

    gamma: Tensor
    beta: Tensor
    eps: float
    centred: bool
    absent: ClassVar[bool] = False

    def linear(self, part: Tensor) -> Tensor:
        """Return the norm's linear part of a part of a vector, but for the deviation of the whole."""
        return (part - part.mean(-1, keepdim=True)).mul_(self.gamma) if self.centred else part * self.gamma

    def deviation(self, whole: Tensor) -> Tensor:
        """Return what the norm divides a whole vector by, `[..., 1]`."""
        centre = whole.mean(-1, keepdim=True) if self.centred else 0
        return ((whole - centre).square().mean(-1, keepdim=True) + self.eps).sqrt()

    def part(self, part: Tensor, whole: Tensor) -> Tensor:
        """Return what the norm makes of a part of the vectors `whole`; the parts and beta sum to the norm's output."""
        return self.linear(part) / self.deviation(whole)


class NoNorm(Norm):
    """In the place of a norm that a family does not have: it changes nothing."""

    absent = True

    def linear(self, part: Tensor) -> Tensor:
        return part

    def deviation(self, whole: Tensor) -> Tensor:
        return self.gamma

    def part(self, part: Tensor, whole: Tensor) -> Tensor:
        return part


class Block:
    """One layer's modules and weights, as the model holds them (its dtype, its device)."""

    def __init__(self, layer: Module, stack: Stack) -> None:
        self.layer, self.stack = layer, stack
        self.output = _linear(layer.get_submodule(stack.output))
        self.attention_output_norm = self._norm(stack.attention_output_norm)
        self.attention_norm = self._norm(stack.attention_norm)
        self.cross_attention_norm = self._norm(stack.cross_attention_norm)
        self.feed_forward_norm = self._norm(stack.feed_forward_norm)
        self.feed_forward_output_norm = self._norm(stack.feed_forward_output_norm)
        self.output_norm = self._norm(stack.output_norm)

    @cached_property
    def feed_forward(self) -> tuple[Linear, Linear]:
        """W_1 and W_2 of a plain feed-forward network."""
        assert self.stack.plain
        up, _, down = (self.layer.get_submodule(path) for path in self.stack.feed_forward)
        return _linear(up), _linear(down)

    @cached_property
    def activation(self) -> Module:
        """The activation between them."""
        assert self.stack.plain
        return self.layer.get_submodule(self.stack.feed_forward[1])

    def attention_input(self, x: Tensor) -> Tensor:
        """Return what attention sees of `x` `[..., T, D]`."""
        return self._apply([self.stack.input_norm], x)

    def attention_output(self, heads: Tensor) -> Tensor:
        """Return what attention adds to `x` where its heads' outputs are `heads` `[..., T, E]`."""
        return self._apply([self.stack.output, self.stack.attention_output_norm], heads)

    def rest(self, call: LayerCall, x: Tensor, attention_output: Tensor) -> Tensor:
        """Return what leaves the layer where attention adds `attention_output` `[..., T, D]` to `x` `[T, D]`."""
        stack, apply = self.stack, self._apply
        z = apply([stack.attention_norm], x + attention_output)
        if "cross_attention" in call.parts:
            z = apply([stack.cross_attention_norm], z + _of_each(call, z))
        entering = x if stack.parallel else z
        added = apply([stack.feed_forward_norm, *stack.feed_forward, stack.feed_forward_output_norm], entering)
        return apply([stack.output_norm], z + added)

    def _apply(self, paths: list[str | None], vectors: Tensor) -> Tensor:
        for path in paths:
            if path is not None:
                vectors = self.layer.get_submodule(path)(vectors)
        return vectors

    def _norm(self, path: str | None) -> Norm:
        return no_norm(self.output.W) if path is None else norm_of(self.layer.get_submodule(path), self.output.W)


@dataclass(frozen=True)
class LayerPass:
    """What one layer's forward pass shows, of a batch or of one document."""

    block: Block
    call: LayerCall
    attention: AttentionCall
    x: Tensor  # what enters the layer, [..., T, D]
    features: Mapping[str, Tensor]  # [..., T, width] by capture point

    def document(self, place: int) -> LayerPass:
        """Return one document of a batch."""
        features = {point: feature[place] for point, feature in self.features.items()}
        return replace(self, attention=self.attention.document(place), x=self.x[place], features=features)

    def cut(self, tokens: int) -> LayerPass:
        """Return the features of a document's first tokens; attention, of which the rest is a part, stays whole."""
        features = {point: feature[:tokens] for point, feature in self.features.items()}
        return replace(self, x=self.x[:tokens], features=features)

    @property
    def number(self) -> int:
        """The layer's number, from 1 on."""
        return self.call.number

    @property
    def projected(self) -> Tensor:
        """What leaves W_O `[..., T, D]`."""
        return self.features.get(PROJECTED, self.features["attention_output"])

    @property
    def residual(self) -> Tensor:
        """After attention's skip connection `[..., T, D]`."""
        return self.x + self.features["attention_output"]

    @property
    def value(self) -> Tensor:
        """Values of all heads side by side `[..., T, E]`."""
        return self.attention.value.transpose(-3, -2).flatten(-2)


def run_layers(
    base: PreTrainedModel,
    folder: Path,
    batch: Mapping[str, Tensor],
    visit: Visit,
    points: Collection[str] = RATIO_POINTS,
    model: PreTrainedModel | None = None,
    **options: Any,
) -> Any:
    """Run one forward pass, which shows each layer to `visit` as soon as it is through, with the features so far.

    It is that of `model`, where one around the base is given.

    Of the layers before, only what left them is kept, so memory does not grow with their number but for that.
    `InputError` naming the checkpoint's `folder` where a layer does not attend by the library's function.
    """
    attention_calls: dict[int, AttentionCall] = {}
    blocks: dict[Module, Block] = {}
    running: list[LayerCall] = []

    def finished(call: LayerCall) -> None:
        if call.number not in attention_calls:
            raise InputError(
                f"{folder}: layer {call.number} did not call the library's attention function; without its query, "
                "key and value nothing can be measured"
            )
        block = blocks.setdefault(call.module, Block(call.module, call.stack))
        here = {site.point: feature for site, feature in features.items() if site.layer == call.number}
        visit(LayerPass(block, call, attention_calls.pop(call.number), call.whole.hidden, here), features)
        for site in [site for site in features if 0 < site.layer == call.number and site.point != "layer_output"]:
            del features[site]

    def listen(module: Module, call: AttentionCall) -> None:
        layer = running[-1]
        if module is layer.module.get_submodule(layer.stack.attention):
            attention_calls[layer.number] = call

    with recording(base, points, finished, running.append) as features, attention_by(observed(listen)):
        return (model or base)(**batch, **options)


def map_layers(
    function: Callable[[LayerPass], Result],
    base: PreTrainedModel,
    folder: Path,
    batch: Mapping[str, Tensor],
    points: Collection[str] = RATIO_POINTS,
) -> list[Result]:
    """Return what `function` makes of each layer of one forward pass, without derivatives."""
    results: list[Result] = []
    with torch.inference_mode():
        run_layers(base, folder, batch, lambda layer_pass, _features: results.append(function(layer_pass)), points)
    return results


def attention_map(layer_pass: LayerPass) -> Linear:
    """Return x -> (x W_V + b_V) W_O + b_O, of the pass of a text of one token."""
    value, output = value_map(layer_pass), layer_pass.block.output
    return Linear(value.W @ output.W, value.b @ output.W + output.b)


def value_map(layer_pass: LayerPass) -> Linear:
    """Return x -> x W_V + b_V, all heads side by side, by sending unit vectors through the layer's own modules.

    The pass is that of a text of one token: each unit vector is then a text of its own. x is what attention sees.
    """
    attention = layer_pass.call.parts["attention"]
    hidden = attention.hidden.shape[-1]
    value = _values_of(layer_pass, torch.cat([torch.eye(hidden), torch.zeros(1, hidden)]))
    constant = value[-1]
    return Linear(value[:-1] - constant, constant)


def value_bias(layer_pass: LayerPass) -> Tensor:
    """Return b_V of all heads side by side `[E]`, grouped heads repeated; the pass is that of a text of one token."""
    return _values_of(layer_pass, torch.zeros(1, layer_pass.call.parts["attention"].hidden.shape[-1]))[0]


def _values_of(layer_pass: LayerPass, vectors_ND: Tensor) -> Tensor:
    """Return the values `[N, E]` that the layer's attention makes of vectors, each as a text of its own."""
    attention = layer_pass.call.parts["attention"]
    values: list[Tensor] = []

    def listen(_module: Module, heads: AttentionCall) -> None:
        values.append(heads.value)

    with torch.inference_mode(), attention_by(observed(listen)):
        attention(vectors_ND.to(attention.hidden).unsqueeze(1))
    return values[0].squeeze(-2).flatten(-2)


def attention_gain(map_: Linear) -> float:
    """Return |[W_V, 0; b_V, 1] [W_O; b_O]|_F / sqrt(d + 1) (Kobayashi et al., EMNLP 2021, section 5.2).

    The affine map x -> (x W_V + b_V) W_O + b_O as one matrix on [x, 1]: the root mean square by
    which it scales a random vector. Below 1, a token's own vector on the skip connection outweighs it.
    """
    square = map_.W.double().square().sum() + map_.b.double().square().sum()
    return float(torch.sqrt(square / (len(map_.W) + 1)))


def norm_of(module: Module, like: Tensor) -> Norm:
    """Return the weights of a LayerNorm or an RMSNorm, in the dtype and on the device of `like`.

    An RMSNorm's are read off its effect on a vector of ones, as some families add 1 to their weight.
    """
    parameters: Any = module
    eps = float(next(getattr(module, name) for name in ("eps", "variance_epsilon") if hasattr(module, name)))
    if isinstance(module, LayerNorm):
        gamma = torch.ones(module.normalized_shape).to(like) if module.weight is None else module.weight.detach()
        beta = torch.zeros_like(gamma) if module.bias is None else module.bias.detach()
        return Norm(gamma, beta, eps, centred=True)
    with torch.inference_mode():
        gamma = parameters(torch.ones_like(parameters.weight)).to(like) * (1 + eps) ** 0.5
    return Norm(gamma, torch.zeros_like(gamma), eps, centred=False)


def no_norm(like: Tensor) -> NoNorm:
    """Return a norm that changes nothing, in the dtype and on the device of `like`."""
    return NoNorm(like.new_ones(()), like.new_zeros(()), 0.0, centred=False)


def _linear(module: Module) -> Linear:
    """Return the weights of a Linear, or of GPT-2's `Conv1D`, whose weight is not transposed."""
    parameters: Any = module
    weight = parameters.weight.detach()
    W = weight.T if isinstance(module, torch.nn.Linear) else weight
    return Linear(W, W.new_zeros(W.shape[1]) if parameters.bias is None else parameters.bias.detach())


def _of_each(call: LayerCall, z: Tensor) -> Tensor:
    """Return cross-attention of `z` `[..., T, D]`, each of its texts with the same encoder's states."""
    cross = call.parts["cross_attention"]
    texts = z.reshape(-1, *z.shape[-2:])
    options = {
        name: value.expand(len(texts), *value.shape[1:]) if isinstance(value, Tensor) and value.dim() == 3 else value
        for name, value in cross.options.items()
    }
    return first_of(cross.module(texts, *cross.arguments, **options)).view_as(z)
