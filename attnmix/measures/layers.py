"""Weights and forward-pass tensors of a layer, in the same form for all supported model families.

The layers of all families follow the same equations, with optional norms (`attnmix/models/families.yaml`):

    o = heads W_O + b_O                       attention_output = attention_output_norm(o)
    attention_residual = x + attention_output            z = attention_norm(attention_residual)
    layer_output = output_norm(z + ffn_output)

Shapes: B texts, H heads, T tokens, N tokens of several texts, D hidden, E = heads * head width.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from attnmix.core.errors import InputError
from attnmix.core.lazy import cached_property
from attnmix.core.names import Site
from attnmix.measures.weights import Linear, Norm, linear_weights, no_norm, norm_of
from attnmix.models.attention import AttentionCall, attention_by, explicit, observed
from attnmix.models.capture_points import LayerCall, ModuleCall, first_of, layer_hooks, recording
from attnmix.models.families import PROJECTED, Stack, attention_modules

Result = TypeVar("Result")

STEP = 1e-4  # step of the central difference for the derivative of an activation at 0
QUADRATURE_NODES = 24  # number of nodes for the mean of an activation between 0 and its input
RATIO_POINTS = ("attention_output", PROJECTED)


class Block:
    """The modules and weights of one layer, with the dtype and device of the model."""

    def __init__(self, layer: Module, stack: Stack) -> None:
        """Find the modules of `layer` at the paths in `stack`."""
        self.layer = layer
        self.stack = stack
        self.output = linear_weights(layer.get_submodule(stack.output))
        self.no_norm = no_norm(self.output.W)
        self.input_norm = self._find_norm(stack.input_norm)
        self.attention_output_norm = self._find_norm(stack.attention_output_norm)
        self.attention_norm = self._find_norm(stack.attention_norm)
        self.cross_attention_input_norm = self._find_norm(stack.cross_attention_input_norm)
        self.cross_attention_norm = self._find_norm(stack.cross_attention_norm)
        self.feed_forward_norm = self._find_norm(stack.feed_forward_norm)
        self.feed_forward_output_norm = self._find_norm(stack.feed_forward_output_norm)
        self.output_norm = self._find_norm(stack.output_norm)

    @cached_property
    def feed_forward(self) -> tuple[list[Linear], Module, Linear]:
        """The first Linears (two in some gated networks), activation and last Linear of the feed-forward network."""
        modules = [self.layer.get_submodule(path) for path in self.stack.feed_forward_network]
        first, activation, *more, last = modules
        ups = [linear_weights(module) for module in (first, *more)]
        return ups, activation, linear_weights(last)

    def rest(self, call: LayerCall, x: Tensor, attention_output: Tensor) -> Tensor:
        """Return the layer's output for the layer input `x` `[T, D]` and an `attention_output` `[..., T, D]`."""
        z = self.attention_norm(x + attention_output)
        if "cross_attention" in call.attending:
            read = self.cross_attention_input_norm(z)
            z = self.cross_attention_norm(z + _attend_to_encoder(call, read))
        network_input = x if self.stack.parallel else z
        added = self.feed_forward_norm(network_input)
        for path in self.stack.feed_forward:
            module = self.layer.get_submodule(path)
            added = module(added)
        return self.output_norm(z + self.feed_forward_output_norm(added))

    def after_attention(
        self, residual_ND: Tensor, cross_ND: Tensor | None, preactivation_NW: Tensor
    ) -> "AfterAttention":
        """Return the part of the layer after attention for N tokens, which propagates the parts of single sources."""
        return AfterAttention(self, residual_ND, cross_ND, preactivation_NW)

    def _find_norm(self, path: str | None) -> Norm:
        """Return the norm at `path`, or `no_norm` if the path is None or leads to an `Identity`, as in ModernBERT."""
        if path is None:
            return self.no_norm
        module = self.layer.get_submodule(path)
        if isinstance(module, torch.nn.Identity):
            return self.no_norm
        return norm_of(module, self.output.W)


@dataclass(frozen=True)
class LayerPass:
    """The tensors of a batch or of one text in the forward pass of one layer."""

    block: Block
    call: LayerCall
    attention: AttentionCall
    x: Tensor  # the layer's input, [..., T, D]
    features: Mapping[str, Tensor]  # [..., T, width] by capture point

    def document(self, place: int, tokens: int | None = None) -> Self:
        """Return the text at index `place` of a batch, truncated to `tokens`. Attention still includes padding."""
        features = {point: feature[place, :tokens] for point, feature in self.features.items()}
        return replace(
            self,
            attention=self.attention.document(place),
            x=self.x[place, :tokens],
            features=features,
        )

    def documents(self, places: slice | Tensor, tokens: int | None = None) -> Self:
        """Return the texts at `places` of a batch, each truncated to `tokens`, which must only remove padding."""
        first = slice(tokens)
        features = {point: feature[places, first] for point, feature in self.features.items()}
        return replace(
            self,
            attention=self.attention.documents(places, tokens),
            x=self.x[places, first],
            features=features,
        )

    @property
    def projected(self) -> Tensor:
        """The output of W_O `[..., T, D]`."""
        return self.features.get(PROJECTED, self.features["attention_output"])

    @property
    def residual(self) -> Tensor:
        """The vectors after attention's skip connection `[..., T, D]`."""
        return self.x + self.features["attention_output"]

    @property
    def attended(self) -> Tensor:
        """The vectors after attention's skip connection and its norm, if any, `[..., T, D]`."""
        return self.features.get("attention_norm", self.residual)

    @property
    def stream(self) -> Tensor:
        """The vectors before the feed-forward network and its input norm `[..., T, D]`."""
        if "cross_attention_output" in self.features and not self.block.stack.cross_attention_norm:
            return self.attended + self.features["cross_attention_output"]
        return self.features.get("cross_attention_norm", self.attended)

    @property
    def value(self) -> Tensor:
        """The concatenated values of all heads `[..., T, E]`."""
        return self.attention.value.transpose(-3, -2).flatten(-2)

    @cached_property
    def diagonal(self) -> Tensor:
        """The attention weights a_ii `[..., T, H]` of each token on itself."""
        return self.attention.diagonal()

    @cached_property
    def output(self) -> Tensor:
        """The layer's output `[..., T, D]`, recomputed from `attention_output`.

        Removing a part that is 0 from `attention_output` gives bitwise the same result.
        """
        return self.block.rest(self.call, self.x, self.features["attention_output"])

    @cached_property
    def value_bias(self) -> Tensor:
        """The concatenated b_V of all heads `[E]`, which is the value of a zero vector."""
        attention = self.call.attending["attention"]
        zeros = torch.zeros_like(attention.hidden)
        values_BHTd = _compute_values(attention, zeros)
        return values_BHTd[0, :, 0].flatten()


@dataclass(frozen=True)
class NetworkPart:
    """Parts of `AfterAttention.residual_ND`, on the second skip connection and in the feed-forward network.

    They are linear in `residual_ND` and thus additive; `AfterAttention.output` divides by the deviations of norms.
    """

    stream: Tensor  # the part on the second skip connection, [..., D]
    entering: Sequence[Tensor]  # the part after each first Linear of the feed-forward network, [..., W]

    @property
    def paths(self) -> list[Tensor]:
        """The part on the skip connection, and the parts in the feed-forward network."""
        return [self.stream, *self.entering]

    def minus(self, other: Self) -> Self:
        """Return the difference of two parts, and overwrite `other` with it."""
        for first, second in zip(self.paths, other.paths, strict=True):
            torch.sub(first, second, out=second)
        return other

    def copy(self) -> Self:
        """Return a copy for `AfterAttention.output`, which overwrites `entering` but not `stream`."""
        return replace(self, entering=[vectors.clone() for vectors in self.entering])

    def weighted(self, weights_BTH: Tensor) -> Self:
        """Return the weighted sums of H vectors for each token `[..., B * T, ...]`, with weights `[..., B, T, H]`."""
        stream = (weights_BTH @ self.stream).flatten(-3, -2)
        entering = []
        for vectors in self.entering:
            sums = weights_BTH @ vectors
            entering.append(sums.flatten(-3, -2))
        return replace(self, stream=stream, entering=entering)

    @property
    def others(self) -> Self:
        """The second of two parts, which belongs to the other tokens."""
        entering = [vectors[1] for vectors in self.entering]
        return replace(self, stream=self.stream[1], entering=entering)

    def add_own(self, other: Self) -> Self:
        """Add `other` to the first of two parts, in place, and return both parts."""
        for own_and_others, own in zip(self.paths, other.paths, strict=True):
            own_and_others[0] += own
        return self


@dataclass(frozen=True)
class AfterAttention:
    """The computation from attention's skip connection to the end of a layer, for N tokens.

    The output W_2 g(W_1 z + b_1) + b_2 of a network is attributed to sources by integrated gradients with baseline 0
    (Kobayashi et al., ICLR 2024). For an elementwise activation g and parts p_j of its input p, the closed form is

        p_j * (g(p) - g(0)) / p        elementwise, p_j * g'(0) where p is 0

    A gated network W_2 (g(W_g z + b_g) * (W_u z + b_u)) is not covered by the paper. It multiplies functions of two
    inputs p and u, with parts p_j and u_j. With m = int_0^1 g(t p) dt, the same integral along t (p, u) from 0 is

        p_j * u * (g(p) - m) / p + u_j * m

    because int_0^1 t g'(t p) dt = (g(p) - m) / p (integration by parts). m is computed by quadrature; the parts sum to
    u g(p) for any m. The contribution of each source is thus a linear map of the source, and the map depends on token i
    only. LayerNorms are replaced by their linear parts, divided by the deviations of the whole vectors. Biases and the
    output of cross-attention belong to no source. W is the width of the feed-forward network.
    """

    block: Block
    residual_ND: Tensor  # the layer's input plus the attention output
    cross_ND: Tensor | None  # the output of cross-attention, in a decoder with an encoder
    preactivation_NW: Tensor  # the output of the feed-forward network's first Linear

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """The input p `[N, W]` of the activation; in a gated network, p and u."""
        ups, *_ = self.block.feed_forward
        if not self.block.stack.gated:
            return (self.preactivation_NW,)
        if len(ups) == 1:
            return self.preactivation_NW.chunk(2, dim=-1)
        norm = self.block.feed_forward_norm
        entering_ND = norm.normalise(self._stream_ND)
        return self.preactivation_NW, entering_ND @ ups[1].W + ups[1].b

    @cached_property
    def slopes(self) -> tuple[Tensor, ...]:
        """The factors `[N, W]` that multiply the parts of each of the `inputs`."""
        activation = self.block.feed_forward[1]
        if not self.block.stack.gated:
            p_NW = self.preactivation_NW
            return (slopes(activation, p_NW, activation(p_NW)),)
        p_NW, u_NW = self.inputs
        mean_NW = mean_on_path(activation, p_NW)  # m
        zero = p_NW.new_zeros(1)
        derivative_at_zero = slopes(activation, zero, activation(zero))
        slope_NW = (activation(p_NW) - mean_NW) / p_NW
        # The limit of (g(p) - m) / p at p = 0 is g'(0) / 2.
        slope_NW = slope_NW.where(p_NW != 0, derivative_at_zero / 2)
        return u_NW * slope_NW, mean_NW

    @cached_property
    def constant(self) -> Tensor:
        """The constant part of W_2's input, independent of the `inputs`: g(0), or 0 in a gated network."""
        zero = self.preactivation_NW.new_zeros(1)
        if self.block.stack.gated:
            return zero
        activation = self.block.feed_forward[1]
        value_at_zero: Tensor = activation(zero)
        return value_at_zero

    def _propagate_to_inner(self, parts: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensor:
        """Return the part of W_2's input `[N, W]` from parts of the `inputs`, in separate tensors or concatenated.

        The parts are overwritten, because an allocation would cost as much as the product.
        """
        if len(parts) < len(slopes):
            width = slopes[0].shape[-1]
            gate_and_up = parts[0]
            parts = gate_and_up[..., :width], gate_and_up[..., width:]
        inner_NW = parts[0].mul_(slopes[0])
        for part, slope in zip(parts[1:], slopes[1:], strict=True):
            inner_NW += part.mul_(slope)
        return inner_NW

    @cached_property
    def _divided_slopes(self) -> Sequence[Tensor]:
        """The `slopes`, divided by the deviation of the feed-forward network's input norm."""
        if self.block.feed_forward_norm.absent:
            return self.slopes
        return [slope / self._stream_deviation_N1 for slope in self.slopes]

    def stream(self, part_ND: Tensor) -> Tensor:
        """Propagate a part `[..., N, D]` of `residual_ND` to the second skip connection."""
        part_ND = self.block.attention_norm.linear(part_ND) / self._attention_deviation_N1
        if self.cross_ND is None:
            return part_ND
        whole_ND = self._attended_ND + self.cross_ND
        return self.block.cross_attention_norm.part(part_ND, whole_ND)

    def added(self, stream_ND: Tensor) -> Tensor:
        """Return the feed-forward network's output `[..., N, D]` for a part returned by `stream`, without biases."""
        ups, _, down = self.block.feed_forward
        entering_ND = self.block.feed_forward_norm.linear(stream_ND) / self._stream_deviation_N1
        inputs = [entering_ND @ up.W for up in ups]
        inner_NW = self._propagate_to_inner(inputs, self.slopes)
        return self._propagate_through_output_norm(inner_NW @ down.W)

    def network_part(self, part: Tensor) -> NetworkPart:
        """Return the `NetworkPart` of parts `[..., D]` of `residual_ND`, before any division by deviations."""
        stream = self.block.attention_norm.linear(part)
        if self.cross_ND is not None:
            stream = self.block.cross_attention_norm.linear(stream)
        return self.enter_network(stream)

    def enter_network(self, stream: Tensor) -> NetworkPart:
        """Return the `NetworkPart` of parts `[..., D]` of the second skip connection's input."""
        entering = self.block.feed_forward_norm.linear(stream)
        ups, _, _ = self.block.feed_forward
        return NetworkPart(stream, [entering @ up.W for up in ups])

    def output(self, part: NetworkPart) -> Tensor:
        """Propagate a part of `residual_ND` to the layer's output `[..., N, D]`, up to a scalar factor per token.

        The factor (deviations of the norms along the skip connection) cancels in ratios. `part.entering` is
        overwritten.
        """
        _, _, down = self.block.feed_forward
        inner_NW = self._propagate_to_inner(part.entering, self._divided_slopes)
        added_ND = self._propagate_through_output_norm(inner_NW @ down.W)
        return self.block.output_norm.linear(part.stream + added_ND)

    def stream_with_biases(self, part_ND: Tensor) -> Tensor:
        """Propagate a part of `residual_ND` as in `stream`, and add the norms' betas and the cross-attention output."""
        norm = self.block.attention_norm
        stream_ND = norm.part(part_ND, self.residual_ND) + norm.beta
        if self.cross_ND is None:
            return stream_ND
        cross_norm = self.block.cross_attention_norm
        whole_ND = self._attended_ND + self.cross_ND
        return cross_norm.part(stream_ND + self.cross_ND, whole_ND) + cross_norm.beta

    def added_with_biases(self, stream_ND: Tensor) -> Tensor:
        """Propagate a part as in `added`, and add the biases of the feed-forward network and its norms."""
        block = self.block
        ups, _, down = block.feed_forward
        norm = block.feed_forward_norm
        entering_ND = norm.part(stream_ND, self._stream_ND) + norm.beta
        inputs = [entering_ND @ up.W + up.b for up in ups]
        inner_NW = self._propagate_to_inner(inputs, self.slopes)
        projected_ND = (inner_NW + self.constant) @ down.W + down.b
        return self._propagate_through_output_norm(projected_ND) + block.feed_forward_output_norm.beta

    def _propagate_through_output_norm(self, projected_ND: Tensor) -> Tensor:
        """Propagate a part `[..., N, D]` of W_2's output through the feed-forward network's output norm."""
        norm = self.block.feed_forward_output_norm
        if norm.absent:
            return projected_ND
        _, activation, down = self.block.feed_forward
        inner_NW = activation(self.inputs[0])
        if self.block.stack.gated:
            inner_NW = inner_NW * self.inputs[1]
        whole_ND = inner_NW @ down.W + down.b
        return norm.part(projected_ND, whole_ND)

    @cached_property
    def _attention_deviation_N1(self) -> Tensor:
        return self.block.attention_norm.deviation(self.residual_ND)

    @cached_property
    def _stream_deviation_N1(self) -> Tensor:
        return self.block.feed_forward_norm.deviation(self._stream_ND)

    @cached_property
    def _attended_ND(self) -> Tensor:
        """The vectors after attention's skip connection and its norm."""
        return self.block.attention_norm.normalise(self.residual_ND)

    @cached_property
    def _stream_ND(self) -> Tensor:
        """The input of the feed-forward network, before its input norm."""
        if self.cross_ND is None:
            return self._attended_ND
        return self.block.cross_attention_norm.normalise(self._attended_ND + self.cross_ND)


def slopes(activation: Callable[[Tensor], Tensor], before: Tensor, after: Tensor) -> Tensor:
    """Return (g(p) - g(0)) / p for an elementwise g, or g'(0) where p is 0; p is `before`, and g(p) is `after`.

    g'(0) is a central difference; at a kink of g, this is the mean of both one-sided derivatives.
    """
    around_zero = torch.linspace(-STEP, STEP, 3, dtype=before.dtype, device=before.device)
    below_zero, at_zero, above_zero = (activation(number) for number in around_zero.split(1))
    derivative = (above_zero - below_zero) / (2 * STEP)
    slope = (after - at_zero) / before
    slope_with_limit: Tensor = slope.where(before != 0, derivative)
    return slope_with_limit


def mean_on_path(activation: Callable[[Tensor], Tensor], before: Tensor) -> Tensor:
    """Return int_0^1 g(t p) dt for an elementwise g and p in `before`, by Gauss-Legendre quadrature."""
    nodes, weights = np.polynomial.legendre.leggauss(QUADRATURE_NODES)
    nodes_on_unit = (nodes + 1) / 2
    weights_on_unit = weights / 2
    mean = torch.zeros_like(before)
    for node, weight in zip(nodes_on_unit, weights_on_unit, strict=True):
        value = activation(float(node) * before)
        mean += float(weight) * value
    return mean


def run_layers(
    base: PreTrainedModel,
    batch: Mapping[str, Tensor],
    visit: Callable[[LayerPass, Mapping[Site, Tensor]], None],
    points: Collection[str] = RATIO_POINTS,
    model: PreTrainedModel | None = None,
    **options: Any,
) -> Any:
    """Run one forward pass, and call `visit` after each layer with its `LayerPass` and the features recorded so far.

    If `model` (`base` with a task head) is not None, it is run instead of `base`. Of earlier layers, only the outputs
    are kept. Raise `InputError` if a layer does not call the attention function of transformers.
    """
    attentions = attention_modules(base)
    attention_calls: list[AttentionCall] = []

    def record_attention(module: Module, call: AttentionCall) -> None:
        if module in attentions:
            attention_calls.append(call)

    def read_layer(_module: Module, _arguments: Any, _output: Any) -> None:
        """Forward hook of a layer: call `visit`, and delete the layer's features except its output."""
        call = features.layer
        if call is None or features.paused:
            return
        if not attention_calls:
            raise InputError(
                f"{checkpoint_name(base)}: layer {call.number} did not call the attention function of transformers, "
                "by which attnmix observes queries, keys and values (see the key own_attention of the family in "
                "attnmix/models/families.yaml)"
            )
        layer_sites = [site for site in features if site.layer == call.number]
        layer_features = {site.point: features[site] for site in layer_sites}
        with features.pause():  # These statements may call the model's modules, which must not be recorded.
            block = Block(call.module, call.stack)
            layer_pass = LayerPass(block, call, attention_calls.pop(), call.whole.hidden, layer_features)
            visit(layer_pass, features)
        for site in layer_sites:
            if site.point != "layer_output":
                del features[site]

    with (
        recording(base, points) as features,
        layer_hooks(base, read_layer),
        attention_by(observed(record_attention), base),
    ):
        return (model or base)(**batch, **options)


def checkpoint_name(base: PreTrainedModel) -> str:
    """Return the model's name or path for messages, or the class name of a model created in memory."""
    return str(base.name_or_path or type(base).__name__)


def map_layers(
    function: Callable[[LayerPass], Result],
    base: PreTrainedModel,
    batch: Mapping[str, Tensor],
    points: Collection[str] = RATIO_POINTS,
) -> list[Result]:
    """Return the results of `function` for each layer of one forward pass, without derivatives."""
    results: list[Result] = []

    def append_result(layer_pass: LayerPass, _features: Mapping[Site, Tensor]) -> None:
        results.append(function(layer_pass))

    with torch.inference_mode():
        run_layers(base, batch, append_result, points)
    return results


def value_map(layer_pass: LayerPass) -> Linear:
    """Return the map x -> x W_V + b_V of all heads, computed by applying the layer's modules to unit vectors.

    x is the input of attention. `layer_pass` must have a single token, because each unit vector is processed as a text
    of one token. The values of grouped heads are repeated.
    """
    attention = layer_pass.call.attending["attention"]
    hidden = attention.hidden.shape[-1]
    inputs_VD = torch.cat([torch.eye(hidden), torch.zeros(1, hidden)]).to(attention.hidden)  # unit vectors, zero vector

    def compute_value(vector_D: Tensor) -> Tensor:
        return _compute_values(attention, vector_D.expand(1, 1, -1)).flatten()

    with torch.inference_mode():
        values_VE = torch.vmap(compute_value)(inputs_VD)
    bias_E = values_VE[-1]
    return Linear(values_VE[:-1] - bias_E, bias_E)


def _compute_values(attention: ModuleCall, hidden: Tensor) -> Tensor:
    """Return the values `[B, H, T, d]` of a layer's attention for the input vectors `hidden` `[B, T, D]`."""
    calls: list[AttentionCall] = []
    with attention_by(explicit(lambda _module, call: calls.append(call))):
        attention(hidden)
    return calls[0].value


def heads_output(attention: ModuleCall, hidden: Tensor) -> Tensor:
    """Return the concatenated head outputs `[B, T, E]`, before W_O, for the input vectors `hidden` `[B, T, D]`."""
    attend = explicit()
    outputs: list[Tensor] = []

    def attend_and_record(module: Any, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Compute attention, and keep the head outputs `[B, T, H, d]`."""
        heads_BTHd, weights = attend(module, *arguments, **options)
        outputs.append(heads_BTHd)
        return heads_BTHd, weights

    with attention_by(attend_and_record):
        attention(hidden)
    return outputs[0].flatten(-2)


def _attend_to_encoder(call: LayerCall, z: Tensor) -> Tensor:
    """Return the cross-attention output for `z` `[..., T, D]`; all texts in it attend to the same encoder states."""
    cross = call.attending["cross_attention"]
    texts = z.reshape(-1, *z.shape[-2:])
    options = dict(cross.options)
    for name, value in options.items():
        if isinstance(value, Tensor) and value.dim() == 3:
            options[name] = value.expand(len(texts), *value.shape[1:])
    return first_of(cross.module(texts, *cross.arguments, **options)).view_as(z)
