"""The rest of a layer after attention, source by source: Kobayashi et al., ICLR 2024, for plain feed-forward networks.

A network W_2 g(W_1 z + b_1) + b_2 takes its sources apart by integrated gradients from the baseline 0 on. For an
elementwise activation g and parts p_j of what enters it, that is in closed form

    p_j * (g(p) - g(0)) / p        elementwise, p_j * g'(0) where p is 0

so every source passes a linear map of token i's own. LayerNorms are taken by their linear parts, divided by the
deviation of the whole vector. The biases belong to no source, and neither does what cross-attention adds.
Shapes: N tokens, D hidden, W width of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `ratios` needs this module and no torch
    from torch import Tensor

    from attnmix.measures.layers import Block, Norm

STEP = 1e-4  # of the difference that gives g'(0)


@dataclass(frozen=True)
class AfterAttention:
    """N tokens from attention's skip connection to the end of a layer whose feed-forward network is plain."""

    block: Block
    residual_ND: Tensor
    """Layer's input and what attention adds."""
    cross_ND: Tensor | None
    """What cross-attention adds, in a decoder beside an encoder."""
    preactivation_NW: Tensor
    """What enters the activation."""

    @cached_property
    def slopes_NW(self) -> Tensor:
        """(g(p) - g(0)) / p."""
        activation = self.block.activation
        return slopes(activation, self.preactivation_NW, activation(self.preactivation_NW))

    def stream(self, part_ND: Tensor) -> Tensor:
        """A part of `residual_ND` as the part of what the second skip connection carries."""
        part_ND = _through(self.block.attention_norm, part_ND, self.residual_ND)
        if self.cross_ND is not None:
            part_ND = _through(self.block.cross_attention_norm, part_ND, self._attended_ND + self.cross_ND)
        return part_ND

    def added(self, stream_ND: Tensor) -> Tensor:
        """What the feed-forward network adds by a part of the stream, biases left out."""
        up, down = self.block.feed_forward
        entering_ND = _through(self.block.feed_forward_norm, stream_ND, self._stream_ND)
        projected_ND = (entering_ND @ up.W).mul_(self.slopes_NW) @ down.W
        norm = self.block.feed_forward_output_norm
        return projected_ND if norm is None else _through(norm, projected_ND, self._projected_ND)

    def output(self, part_ND: Tensor) -> Tensor:
        """A part of `residual_ND` in the layer's output, but for the last norm's deviation, which a ratio cancels."""
        stream_ND = self.stream(part_ND)
        summed_ND = stream_ND + self.added(stream_ND)
        norm = self.block.output_norm
        return summed_ND if norm is None else norm.linear(summed_ND)

    def biases(self, constant_ND: Tensor) -> Tensor:
        """What the network adds by its own biases, by a constant part of `residual_ND` and by what comes to it on the
        way: with `added` of every source it is the whole."""
        return self.added_with_biases(self.stream_with_biases(constant_ND))

    def stream_with_biases(self, constant_ND: Tensor) -> Tensor:
        """A constant part of `residual_ND` as `stream`, with the norms' betas and what cross-attention adds."""
        stream_ND = _plus_beta(
            self.block.attention_norm, _through(self.block.attention_norm, constant_ND, self.residual_ND)
        )
        if self.cross_ND is None:
            return stream_ND
        norm = self.block.cross_attention_norm
        return _plus_beta(norm, _through(norm, stream_ND + self.cross_ND, self._attended_ND + self.cross_ND))

    def added_with_biases(self, stream_ND: Tensor) -> Tensor:
        """A constant part of the stream as `added`, with the network's and its norms' biases."""
        block, (up, down) = self.block, self.block.feed_forward
        entering_ND = _through(block.feed_forward_norm, stream_ND, self._stream_ND)
        entering_ND = _plus_beta(block.feed_forward_norm, entering_ND)
        at_zero = block.activation(self.preactivation_NW.new_zeros(1))
        projected_ND = ((entering_ND @ up.W + up.b) * self.slopes_NW + at_zero) @ down.W + down.b
        norm = block.feed_forward_output_norm
        return projected_ND if norm is None else _plus_beta(norm, _through(norm, projected_ND, self._projected_ND))

    @cached_property
    def _attended_ND(self) -> Tensor:
        """After attention's skip connection and its norm."""
        return _plus_beta(
            self.block.attention_norm, _through(self.block.attention_norm, self.residual_ND, self.residual_ND)
        )

    @cached_property
    def _stream_ND(self) -> Tensor:
        """What enters the feed-forward network, before a norm of its own."""
        if self.cross_ND is None:
            return self._attended_ND
        whole_ND, norm = self._attended_ND + self.cross_ND, self.block.cross_attention_norm
        return _plus_beta(norm, _through(norm, whole_ND, whole_ND))

    @cached_property
    def _projected_ND(self) -> Tensor:
        """What leaves W_2; only a norm that follows asks for it."""
        down = self.block.feed_forward[1]
        projected_ND: Tensor = self.block.activation(self.preactivation_NW) @ down.W + down.b
        return projected_ND


def slopes(activation: Callable[[Tensor], Tensor], before: Tensor, after: Tensor) -> Tensor:
    """(g(p) - g(0)) / p of an elementwise g, with p `before` and g(p) `after` it; g'(0) where p is 0.

    g'(0) is a central difference: the mean of both sides' where g has a corner.
    """
    at_zero = activation(before.new_zeros(1))
    derivative = (activation(before.new_full((1,), STEP)) - activation(before.new_full((1,), -STEP))) / (2 * STEP)
    found: Tensor = ((after - at_zero) / before).where(before != 0, derivative)
    return found


def _through(norm: Norm | None, part_ND: Tensor, whole_ND: Tensor) -> Tensor:
    """The linear part of a norm whose deviation is that of `whole_ND`."""
    return part_ND if norm is None else norm.linear(part_ND) / norm.deviation(whole_ND)


def _plus_beta(norm: Norm | None, part_ND: Tensor) -> Tensor:
    return part_ND if norm is None else part_ND + norm.beta
