"""Weights and forward-pass tensors of a layer, in the same form for all supported model families.

The layers of all families follow the same equations, with optional norms (`attnmix/models/families.yaml`). x is the
layer's input, and `heads` are the concatenated outputs of the attention heads:

    o = heads W_O + b_O                       attention_output = attention_output_norm(o)
    attention_residual = x + attention_output            z = attention_norm(attention_residual)
    layer_output = output_norm(z + ffn_output)

Shapes: B texts, H heads, T tokens, N tokens of several texts, D hidden, d head width, E = H * d, W width of the
feed-forward network.
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
        """Read the output projection W_O and the norms of `layer` at the paths in `stack`."""
        self.layer = layer
        self.stack = stack
        self.output = linear_weights(layer.get_submodule(stack.output))
        self.no_norm = no_norm(like=self.output.W)  # the identity, which replaces norms that the family does not have
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
        """The first Linears, the activation and the last Linear of the feed-forward network.

        A gated network has two first Linears, W_g and W_u, unless a single Linear contains both.
        """
        modules = [self.layer.get_submodule(path) for path in self.stack.feed_forward_network]
        first, activation, *second, last = modules  # `second` contains W_u, or nothing
        first_linears = [linear_weights(module) for module in (first, *second)]
        return first_linears, activation, linear_weights(last)

    def rest(self, call: LayerCall, x: Tensor, attention_output: Tensor) -> Tensor:
        """Return the layer's output `[..., T, D]` for any `x` and `attention_output` with broadcastable leading axes.

        `call` provides the encoder states for cross-attention. Missing norms are replaced by the identity.
        """
        z = self.attention_norm(x + attention_output)
        if "cross_attention" in call.attending:
            cross_attention_output = _attend_to_encoder(call, self.cross_attention_input_norm(z))
            z = self.cross_attention_norm(z + cross_attention_output)
        before_network = x if self.stack.parallel else z  # A network parallel to attention reads the layer's input.
        vectors = self.feed_forward_norm(before_network)
        for path in self.stack.feed_forward:
            module = self.layer.get_submodule(path)
            vectors = module(vectors)
        return self.output_norm(z + self.feed_forward_output_norm(vectors))

    def after_attention(
        self, residual_ND: Tensor, cross_ND: Tensor | None, preactivation_NW: Tensor
    ) -> "AfterAttention":
        """Return an object that propagates single contributions through the steps after attention, for N tokens."""
        return AfterAttention(self, residual_ND, cross_ND, preactivation_NW)

    def _find_norm(self, path: str | None) -> Norm:
        """Return the norm at `path`; `no_norm` if `path` is None or the module is an `Identity`, as in ModernBERT."""
        if path is None:
            return self.no_norm
        module = self.layer.get_submodule(path)
        if isinstance(module, torch.nn.Identity):
            return self.no_norm
        return norm_of(module, self.output.W)


@dataclass(frozen=True)
class LayerPass:
    """The tensors of one layer in the forward pass of a batch or of one text."""

    block: Block
    call: LayerCall
    attention: AttentionCall
    x: Tensor  # the layer's input, [..., T, D]
    features: Mapping[str, Tensor]  # [..., T, width] by capture point

    def document(self, place: int, tokens: int | None = None) -> Self:
        """Return the tensors of the text at index `place` of a batch, truncated to the first `tokens` tokens.

        `attention` is not truncated and still includes padding.
        """
        features = {point: feature[place, :tokens] for point, feature in self.features.items()}
        return replace(
            self,
            attention=self.attention.document(place),
            x=self.x[place, :tokens],
            features=features,
        )

    def documents(self, places: slice | Tensor, tokens: int | None = None) -> Self:
        """Return the tensors of the texts with the indices `places` in a batch, truncated to the first `tokens` tokens.

        `attention` is also truncated. The truncation must remove nothing but padding.
        """
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
        """The output of W_O `[..., T, D]`, which is captured separately only if a norm follows W_O."""
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
        """The vectors `[..., T, D]` before the feed-forward network and before its input norm, if any.

        In layers with cross-attention, they are the vectors after its skip connection, and after the norm that follows
        this skip connection, if any. In other layers, they are `attended`, the corresponding vectors of self-attention.
        """
        has_cross_attention = "cross_attention_output" in self.features
        if has_cross_attention and not self.block.stack.cross_attention_norm:
            return self.attended + self.features["cross_attention_output"]
        # The norm of cross-attention was captured, or there is no cross-attention.
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
        """The layer's output `[..., T, D]`, recomputed from `attention_output` by `Block.rest`.

        `Block.rest` also computes the layer's output without the contribution of one source. If the contribution is 0,
        the two outputs are equal up to rounding errors, because they are computed in the same way.
        """
        return self.block.rest(self.call, self.x, self.features["attention_output"])

    @cached_property
    def value_bias(self) -> Tensor:
        """The concatenated b_V of all heads `[E]`: the values of a zero vector."""
        attention = self.call.attending["attention"]
        zeros = torch.zeros_like(attention.hidden)
        values_BHTd = _compute_values(attention, zeros)  # the same for all texts and tokens
        return values_BHTd[0, :, 0].flatten()


@dataclass(frozen=True)
class NetworkPart:
    """Contributions of the sources: on the second skip connection, and after the network's first Linears.

    The tensors are linear in the contributions to `AfterAttention.residual_ND`, and thus additive. They are not divided
    by the standard deviations of later norms. `AfterAttention.output` performs the divisions of the norms before and
    after the feed-forward network. The divisions of the LayerNorms on the skip connections are omitted, because they
    cancel in ratios.
    """

    stream: Tensor  # contributions on the second skip connection, [..., D]
    entering: Sequence[Tensor]
    """Contributions `[..., W]` after each first Linear of the feed-forward network; `[..., 2 W]` after a joint Linear.

    A joint Linear contains both W_g and W_u of a gated network.
    """

    @property
    def paths(self) -> list[Tensor]:
        """The tensors of all paths: the skip connection, and each first Linear of the feed-forward network."""
        return [self.stream, *self.entering]

    def minus(self, other: Self) -> Self:
        """Return these contributions minus `other`. The tensors of `other` are overwritten with the result."""
        for first, second in zip(self.paths, other.paths, strict=True):
            torch.sub(first, second, out=second)
        return other

    def copy(self) -> Self:
        """Return a copy whose `entering` may be overwritten by `AfterAttention.output`; `stream` is not copied."""
        return replace(self, entering=[vectors.clone() for vectors in self.entering])

    def weighted(self, weights_BTH: Tensor) -> Self:
        """Return, for each token, the sums of H contributions with the weights `weights_BTH` `[..., B, T, H]`.

        `stream` (the contributions on the skip connection) and each tensor of `entering` (those after a first Linear)
        are summed separately. They contain H contributions `[H, width]`, or H for each of B texts `[B, H, width]`. The
        sums have shape `[..., B * T, width]`, because the axes of texts and tokens are merged.
        """
        stream = (weights_BTH @ self.stream).flatten(-3, -2)
        entering = []
        for vectors in self.entering:
            sums = weights_BTH @ vectors
            entering.append(sums.flatten(-3, -2))
        return replace(self, stream=stream, entering=entering)

    @property
    def others(self) -> Self:
        """The contributions of the other tokens, at index 1 of the first axis; index 0 is the token itself."""
        entering = [vectors[1] for vectors in self.entering]
        return replace(self, stream=self.stream[1], entering=entering)

    def add_own(self, other: Self) -> Self:
        """Add the contributions `other` to those of the token itself in place, and return `self`.

        On the first axis, the tensors of `self` have the contributions of the token itself at index 0, and those of
        other tokens, which remain unchanged, at index 1. The tensors of `other` do not have this axis. `paths` contains
        the tensors of both objects in the same order.
        """
        for own_and_others, own in zip(self.paths, other.paths, strict=True):
            own_and_others[0] += own
        return self


@dataclass(frozen=True)
class AfterAttention:
    """The computation from attention's skip connection to the end of a layer, for contributions to N tokens.

    A vector is a sum of parts; each part is the contribution of one source or of the biases. The output
    W_2 g(W_1 z + b_1) + b_2 of a feed-forward network is attributed to sources by integrated gradients with baseline 0
    (Kobayashi et al., ICLR 2024). For an elementwise activation g and parts p_j of its input p, the closed form is

        p_j * (g(p) - g(0)) / p        elementwise, p_j * g'(0) where p is 0

    A gated network W_2 (g(W_g z + b_g) * (W_u z + b_u)) is not covered by the paper. The network computes g(p) * u from
    two inputs p and u, with parts p_j and u_j. With m = int_0^1 g(t p) dt, the same integral along t (p, u), with t
    from 0 to 1, is

        p_j * u * (g(p) - m) / p + u_j * m

    because int_0^1 t g'(t p) dt = (g(p) - m) / p (integration by parts). m is computed by quadrature; the parts sum to
    u g(p) for any m. The contribution of a source is thus a linear function of the source's part, and this function is
    the same for all sources of token i. A LayerNorm is replaced by its linear part, divided by the standard deviation
    of the whole vector. Biases and the output of cross-attention are not attributed to any source.

    Parts are propagated in two ways. First, `stream` returns the part of the vectors on the second skip connection, and
    `added` the part of the feed-forward network's output. `stream_with_biases` and `added_with_biases` return the parts
    of the biases; together with them, the parts of all sources sum to the model's vectors. Second, `network_part` and
    `output` return the part of the layer's output up to a factor that all parts of a token have in common. This factor
    cancels in ratios, and omitting it saves operations. W is the width of the feed-forward network. The second skip
    connection is the one to which the feed-forward network's output is added.
    """

    block: Block
    residual_ND: Tensor  # the layer's input plus the attention output
    cross_ND: Tensor | None  # the output of cross-attention, in a decoder with an encoder
    preactivation_NW: Tensor  # the output of the feed-forward network's first Linear

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """The input p `[N, W]` of the activation; in a gated network W_2 (g(p) * u), both p and u."""
        if not self.block.stack.gated:
            return (self.preactivation_NW,)
        if len(self._first_linears) == 1:  # The Linear contains W_g and W_u concatenated.
            return self.preactivation_NW.chunk(2, dim=-1)
        _, second_linear = self._first_linears
        network_input_ND = self.block.feed_forward_norm.normalise(self._stream_ND)
        u_NW = network_input_ND @ second_linear.W + second_linear.b
        return self.preactivation_NW, u_NW

    @cached_property
    def slopes(self) -> tuple[Tensor, ...]:
        """The factors `[N, W]` by which the parts of each of the `inputs` are multiplied.

        The parts of p are multiplied by (g(p) - g(0)) / p, for the activation g. For a gated network, see
        `_compute_gated_slopes`.
        """
        if self.block.stack.gated:
            return self._compute_gated_slopes()
        activation = self._activation
        p_NW = self.preactivation_NW
        # The function `slopes` of this module returns (g(p) - g(0)) / p.
        return (slopes(activation, p_NW, activation(p_NW)),)

    def _compute_gated_slopes(self) -> tuple[Tensor, Tensor]:
        """Return two factors `[N, W]`, by which the parts of p and the parts of u are multiplied.

        p and u are the inputs of a gated network W_2 (g(p) * u). The factor for the parts of p is u (g(p) - m) / p. The
        factor for the parts of u is m, the mean of g(t p) over t from 0 to 1.
        """
        activation = self._activation
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
        """The part of W_2's input that belongs to the biases: g(0), or 0 in a gated network."""
        zero = self.preactivation_NW.new_zeros(1)
        if self.block.stack.gated:
            return zero
        value_at_zero: Tensor = self._activation(zero)
        return value_at_zero

    @property
    def _first_linears(self) -> list[Linear]:
        """W_1 of the feed-forward network; in a gated network, W_g and W_u, separately or concatenated."""
        first_linears, _activation, _last_linear = self.block.feed_forward
        return first_linears

    @property
    def _activation(self) -> Module:
        """The activation g of the feed-forward network."""
        _first_linears, activation, _last_linear = self.block.feed_forward
        return activation

    @property
    def _last_linear(self) -> Linear:
        """W_2 and b_2 of the feed-forward network."""
        _first_linears, _activation, last_linear = self.block.feed_forward
        return last_linear

    def _apply_slopes(self, parts: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensor:
        """Return the contributions `[..., N, W]` of sources to W_2's input, given those to the quantities p and u.

        W_2's input is g(p) or, in a gated network, g(p) * u. A slope is the factor by which a contribution to p or u is
        multiplied to obtain its contribution to W_2's input; the products for p and u are added.

        Args:
            parts: The contributions to p and, in a gated network, to u, each `[..., N, W]`. If W_g and W_u are a single
                Linear, a single tensor `[..., N, 2 W]` contains both. The tensors are overwritten, because an
                allocation would cost as much as the product.
            slopes: The slopes of p and, in a gated network, of u: the property `slopes` or `_divided_slopes`.
        """
        are_concatenated = len(parts) < len(slopes)
        if are_concatenated:
            width = slopes[0].shape[-1]
            gate_and_up = parts[0]
            parts = gate_and_up[..., :width], gate_and_up[..., width:]
        inner_NW = parts[0].mul_(slopes[0])
        for part, slope in zip(parts[1:], slopes[1:], strict=True):
            inner_NW += part.mul_(slope)
        return inner_NW

    @cached_property
    def _divided_slopes(self) -> Sequence[Tensor]:
        """The `slopes`, divided by the standard deviation in the LayerNorm before the feed-forward network."""
        if self.block.feed_forward_norm.absent:
            return self.slopes
        return [slope / self._stream_deviation_N1 for slope in self.slopes]

    # For parts that sum to the model's vectors, call `stream`, and then `added`. For the part of the biases, call the
    # methods with the suffix `_with_biases`.

    def stream(self, part_ND: Tensor) -> Tensor:
        """Propagate a part `[..., N, D]` of `residual_ND` to the second skip connection.

        `residual_ND` contains the vectors after attention's skip connection. Each norm is replaced by its linear part,
        divided by the standard deviation of the whole vectors.
        """
        part_ND = self.block.attention_norm.linear(part_ND) / self._attention_deviation_N1
        if self.cross_ND is None:
            return part_ND
        return self.block.cross_attention_norm.part(part_ND, whole=self._cross_residual_ND)

    def added(self, stream_ND: Tensor) -> Tensor:
        """Return the part `[..., N, D]` of the feed-forward network's output for one part `stream_ND` of its input.

        `stream_ND` is a result of `stream`. Biases are not added. The network's norms divide by the standard deviations
        of the whole vectors, which do not depend on the part. `_apply_slopes` replaces the activation by a product.
        """
        network_input_ND = self.block.feed_forward_norm.linear(stream_ND) / self._stream_deviation_N1
        input_parts = [network_input_ND @ linear.W for linear in self._first_linears]
        inner_NW = self._apply_slopes(input_parts, self.slopes)
        return self._propagate_through_output_norm(inner_NW @ self._last_linear.W)

    def stream_with_biases(self, part_ND: Tensor) -> Tensor:
        """Propagate the part of the biases `[..., N, D]` from attention's skip connection to the second one.

        The second skip connection is that of the feed-forward network. Betas of norms and the cross-attention output,
        which are not attributed to any source, are added to the part of the biases. `part` applies a norm without beta
        to a part, and divides by the standard deviation of the whole vectors, so that all parts sum to the norm's
        output.
        """
        norm = self.block.attention_norm
        stream_ND = norm.part(part_ND, whole=self.residual_ND) + norm.beta
        if self.cross_ND is None:
            return stream_ND
        cross_norm = self.block.cross_attention_norm
        return cross_norm.part(stream_ND + self.cross_ND, whole=self._cross_residual_ND) + cross_norm.beta

    def added_with_biases(self, stream_ND: Tensor) -> Tensor:
        """Propagate the part of the biases `[..., N, D]` through the feed-forward network and its norms.

        Each step adds its bias to this part: the norms, the Linears, and the activation, whose output is `slopes` times
        its input plus `constant`. `stream_ND` is a result of `stream_with_biases`.
        """
        input_norm = self.block.feed_forward_norm
        output_norm = self.block.feed_forward_output_norm
        last_linear = self._last_linear
        network_input_ND = input_norm.part(stream_ND, whole=self._stream_ND) + input_norm.beta
        input_parts = [network_input_ND @ linear.W + linear.b for linear in self._first_linears]
        inner_NW = self._apply_slopes(input_parts, self.slopes) + self.constant
        projected_ND = inner_NW @ last_linear.W + last_linear.b
        return self._propagate_through_output_norm(projected_ND) + output_norm.beta

    # For ratios, call `network_part` (or `enter_network`, for parts on the second skip connection), and then `output`.

    def network_part(self, part: Tensor) -> NetworkPart:
        """Propagate parts `[..., D]` of `residual_ND` to the second skip connection and into the feed-forward network.

        `residual_ND` contains the vectors after attention's skip connection. Norms apply only their linear parts,
        without the divisions by standard deviations.
        """
        stream = self.block.attention_norm.linear(part)
        if self.cross_ND is not None:
            stream = self.block.cross_attention_norm.linear(stream)
        return self.enter_network(stream)

    def enter_network(self, stream: Tensor) -> NetworkPart:
        """Propagate parts `[..., D]` from the second skip connection through the network's first Linears.

        The input norm of the network applies only its linear part, without the division by the standard deviation.
        """
        entering = self.block.feed_forward_norm.linear(stream)
        return NetworkPart(stream, [entering @ linear.W for linear in self._first_linears])

    def output(self, part: NetworkPart) -> Tensor:
        """Propagate a part, returned by `network_part`, to the layer's output `[..., N, D]`, without some divisions.

        The LayerNorms on the skip connections apply only their linear parts. Each omitted division would multiply all
        parts of a token by the same factor, which cancels in ratios. The feed-forward network continues from
        `part.entering` (the contributions after its first Linears, which are overwritten). Its output is added to
        `part.stream` (those on the second skip connection), and the output norm is applied to the sum.
        """
        # `_divided_slopes` include the division of the network's input norm, which `network_part` omits.
        inner_NW = self._apply_slopes(part.entering, self._divided_slopes)
        network_output_ND = self._propagate_through_output_norm(inner_NW @ self._last_linear.W)
        return self.block.output_norm.linear(part.stream + network_output_ND)

    # Steps of both ways to propagate parts.

    def _propagate_through_output_norm(self, projected_ND: Tensor) -> Tensor:
        """Propagate a part `[..., N, D]` of the output of W_2, the network's last Linear, through the following norm.

        Without such a norm, return the part. The norm divides by the standard deviation of the whole output of W_2,
        W_2 g(p) + b_2 or, in a gated network, W_2 (g(p) * u) + b_2. This output is recomputed from p and u (`inputs`).
        """
        norm = self.block.feed_forward_output_norm
        if norm.absent:
            return projected_ND
        if self.block.stack.gated:
            p_NW, u_NW = self.inputs
            inner_NW = self._activation(p_NW) * u_NW
        else:
            (p_NW,) = self.inputs
            inner_NW = self._activation(p_NW)
        whole_ND = inner_NW @ self._last_linear.W + self._last_linear.b
        return norm.part(projected_ND, whole=whole_ND)

    @cached_property
    def _attention_deviation_N1(self) -> Tensor:
        """The divisor of the norm after attention's skip connection."""
        return self.block.attention_norm.deviation(self.residual_ND)

    @cached_property
    def _stream_deviation_N1(self) -> Tensor:
        """The divisor of the norm before the feed-forward network."""
        return self.block.feed_forward_norm.deviation(self._stream_ND)

    @cached_property
    def _attended_ND(self) -> Tensor:
        """The vectors after attention's skip connection and its norm."""
        return self.block.attention_norm.normalise(self.residual_ND)

    @property
    def _cross_residual_ND(self) -> Tensor:
        """The vectors after the skip connection of cross-attention, before its norm."""
        assert self.cross_ND is not None
        return self._attended_ND + self.cross_ND

    @cached_property
    def _stream_ND(self) -> Tensor:
        """The input of the feed-forward network, before its input norm."""
        if self.cross_ND is None:
            return self._attended_ND
        return self.block.cross_attention_norm.normalise(self._cross_residual_ND)


def slopes(activation: Callable[[Tensor], Tensor], before: Tensor, after: Tensor) -> Tensor:
    """Return (g(p) - g(0)) / p of an elementwise activation g; g'(0) where p is 0.

    `before` contains p, and `after` contains g(p). g'(0) is a central difference, which is the mean of the two
    one-sided derivatives if g has a kink at 0.
    """
    around_zero = torch.linspace(-STEP, STEP, 3, dtype=before.dtype, device=before.device)
    value_below, value_at_zero, value_above = (activation(number) for number in around_zero.split(1))
    derivative = (value_above - value_below) / (2 * STEP)
    slope = (after - value_at_zero) / before
    slope_with_limit: Tensor = slope.where(before != 0, derivative)
    return slope_with_limit


def mean_on_path(activation: Callable[[Tensor], Tensor], before: Tensor) -> Tensor:
    """Return int_0^1 g(t p) dt for an elementwise activation g, where `before` contains p.

    The integral is computed by Gauss-Legendre quadrature.
    """
    nodes, weights = np.polynomial.legendre.leggauss(QUADRATURE_NODES)  # for an integral from -1 to 1
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
    """Run one forward pass, call `visit` after each layer, and return the model's output.

    `visit` receives the `LayerPass` and the features at `points` recorded so far. After `visit`, all features of the
    layer except its output are deleted. If `model` (`base` with a task head) is not None, it is run instead of `base`.
    Raise `InputError` if a layer does not call the attention function of transformers.
    """
    attentions = attention_modules(base)
    attention_calls: list[AttentionCall] = []  # the call of the current layer

    def record_attention(module: Module, call: AttentionCall) -> None:
        if module in attentions:  # cross-attention is excluded
            attention_calls.append(call)

    with recording(base, points) as features:

        def visit_layer(_module: Module, _arguments: Any, _output: Any) -> None:
            """Forward hook of a layer: call `visit`, and delete the layer's features except its output."""
            call = features.layer  # the call of this layer
            if call is None or features.paused:  # While recording is paused, `visit` itself calls the layer.
                return
            if not attention_calls:
                raise _create_missing_attention_error(base, call)
            with features.pause():  # These statements may call modules of the model; such calls must not be recorded.
                layer_pass = _create_layer_pass(call, attention_calls.pop(), features)
                visit(layer_pass, features)
            _delete_all_but_output(features, call.number)

        with layer_hooks(base, visit_layer), attention_by(observed(record_attention), base):
            return (model or base)(**batch, **options)


def _create_layer_pass(call: LayerCall, attention: AttentionCall, features: Mapping[Site, Tensor]) -> LayerPass:
    """Return the `LayerPass` of the layer called in `call`; `features` contains this and other layers' features."""
    return LayerPass(
        block=Block(call.module, call.stack),
        call=call,
        attention=attention,
        x=call.whole.hidden,
        features={site.point: feature for site, feature in features.items() if site.layer == call.number},
    )


def _delete_all_but_output(features: dict[Site, Tensor], layer: int) -> None:
    """Delete the features of the layer with number `layer`, except its output."""
    for site in list(features):
        if site.layer == layer and site.point != "layer_output":
            del features[site]


def _create_missing_attention_error(base: PreTrainedModel, call: LayerCall) -> InputError:
    """Return the error for a layer that did not call the attention function of transformers."""
    return InputError(
        f"{checkpoint_name(base)}: layer {call.number} did not call the attention function of transformers, "
        "by which attnmix observes queries, keys and values (see the key own_attention of the family in "
        "attnmix/models/families.yaml)"
    )


def checkpoint_name(base: PreTrainedModel) -> str:
    """Return the model's name or path for messages, or the class name of a model created in memory."""
    return str(base.name_or_path or type(base).__name__)


def map_layers(
    function: Callable[[LayerPass], Result],
    base: PreTrainedModel,
    batch: Mapping[str, Tensor],
    points: Collection[str] = RATIO_POINTS,
) -> list[Result]:
    """Return the result of `function` for each layer of one forward pass, computed without autograd."""
    results: list[Result] = []

    def append_result(layer_pass: LayerPass, _features: Mapping[Site, Tensor]) -> None:
        results.append(function(layer_pass))

    with torch.inference_mode():
        run_layers(base, batch, append_result, points)
    return results


def value_map(layer_pass: LayerPass) -> Linear:
    """Return W_V `[D, E]` and b_V `[E]` of all heads, computed by applying the attention module to unit vectors.

    `layer_pass` must have a single token, because each unit vector is processed as a text of one token. Values that
    several heads share are repeated for each of them.
    """
    attention = layer_pass.call.attending["attention"]
    hidden = attention.hidden.shape[-1]
    units_and_zero_VD = torch.cat([torch.eye(hidden), torch.zeros(1, hidden)]).to(attention.hidden)  # V = D + 1
    values_VE = _compute_value_of_each(attention, units_and_zero_VD)
    value_of_units_DE = values_VE[:-1]
    bias_E = values_VE[-1]  # the value of the zero vector
    return Linear(value_of_units_DE - bias_E, bias_E)


def _compute_value_of_each(attention: ModuleCall, vectors_VD: Tensor) -> Tensor:
    """Return the concatenated values of all heads `[V, E]` for V input vectors, each processed as a separate text.

    Raise `InputError` if the attention module contains an operation that `torch.vmap` does not support.
    """

    def compute_value(vector_D: Tensor) -> Tensor:
        return _compute_values(attention, vector_D.expand(1, 1, -1)).flatten()

    with torch.inference_mode():
        try:
            values_VE: Tensor = torch.vmap(compute_value)(vectors_VD)
        except RuntimeError as error:
            if "functorch" not in str(error):
                raise
            # For example, LoHa adapters use an operation that torch cannot vectorise.
            problem = f"the value projection of {type(attention.module).__name__} does not support torch.vmap"
            allowed = "merge its adapters into the weights (peft: merge_and_unload)"
            raise InputError(f"model: {problem}; {allowed}") from error
    return values_VE


def _compute_values(attention: ModuleCall, hidden: Tensor) -> Tensor:
    """Return the values `[B, H, T, d]` of a layer's attention for the input vectors `hidden` `[B, T, D]`.

    The attention module is run on these vectors, and `explicit` passes its queries, keys and values to a callback.
    """
    calls: list[AttentionCall] = []
    with attention_by(explicit(lambda _module, call: calls.append(call))):
        attention(hidden)
    return calls[0].value


def heads_output(attention: ModuleCall, hidden: Tensor) -> Tensor:
    """Run an attention module on `hidden` `[B, T, D]`; return the concatenated head outputs `[B, T, E]`, before W_O.

    The module calls an attention function once to compute the head outputs from queries, keys and values. This function
    is replaced by one that also records the head outputs.
    """
    attend = explicit()  # an attention function with explicitly computed weights
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
    """Return the cross-attention output for the decoder vectors `z` `[..., T, D]`, with the encoder states of one text.

    All elements of the leading axes attend to these encoder states, which were recorded as arguments of `call`.
    """
    cross = call.attending["cross_attention"]
    vectors_BTD = z.reshape(-1, *z.shape[-2:])  # all leading axes as one axis of texts
    options = dict(cross.options)
    for name, value in cross.options.items():
        is_encoder_states = isinstance(value, Tensor) and value.dim() == 3
        if is_encoder_states:  # Repeat the states of the text for each element of the axis B.
            options[name] = value.expand(len(vectors_BTD), *value.shape[1:])
    output = cross.module(vectors_BTD, *cross.arguments, **options)
    return first_of(output).view_as(z)
