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

from torch import Tensor

if TYPE_CHECKING:  # no code of models is among what maps and figures depend on
    from attnmix.measures.layers import Block

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
        """Return a part of `residual_ND` as the part of what the second skip connection carries."""
        part_ND = self.block.attention_norm.part(part_ND, self.residual_ND)
        if self.cross_ND is None:
            return part_ND
        return self.block.cross_attention_norm.part(part_ND, self._attended_ND + self.cross_ND)

    def added(self, stream_ND: Tensor) -> Tensor:
        """Return what the feed-forward network adds by a part of the stream, biases left out."""
        up, down = self.block.feed_forward
        entering_ND = self.block.feed_forward_norm.part(stream_ND, self._stream_ND)
        return self._leaving((entering_ND @ up.W).mul_(self.slopes_NW) @ down.W)

    def output(self, part_ND: Tensor) -> Tensor:
        """Return a part of `residual_ND` in the layer's output, but for the last norm's deviation.

        A ratio cancels that deviation.
        """
        stream_ND = self.stream(part_ND)
        return self.block.output_norm.linear(stream_ND + self.added(stream_ND))

    def biases(self, constant_ND: Tensor) -> Tensor:
        """Return what the network adds by its own biases, by a constant part of `residual_ND` and by what joins it.

        With `added` of every source it is the whole.
        """
        return self.added_with_biases(self.stream_with_biases(constant_ND))

    def stream_with_biases(self, constant_ND: Tensor) -> Tensor:
        """Return a constant part of `residual_ND` as `stream`, with the norms' betas and what cross-attention adds."""
        norm, cross_norm = self.block.attention_norm, self.block.cross_attention_norm
        stream_ND = norm.part(constant_ND, self.residual_ND) + norm.beta
        if self.cross_ND is None:
            return stream_ND
        return cross_norm.part(stream_ND + self.cross_ND, self._attended_ND + self.cross_ND) + cross_norm.beta

    def added_with_biases(self, stream_ND: Tensor) -> Tensor:
        """Return a constant part of the stream as `added`, with the network's and its norms' biases."""
        block, (up, down) = self.block, self.block.feed_forward
        entering_ND = block.feed_forward_norm.part(stream_ND, self._stream_ND) + block.feed_forward_norm.beta
        at_zero = block.activation(self.preactivation_NW.new_zeros(1))
        projected_ND = ((entering_ND @ up.W + up.b) * self.slopes_NW + at_zero) @ down.W + down.b
        return self._leaving(projected_ND) + block.feed_forward_output_norm.beta

    def _leaving(self, projected_ND: Tensor) -> Tensor:
        """Return a part of what leaves W_2 as the part of what leaves the network."""
        norm, down = self.block.feed_forward_output_norm, self.block.feed_forward[1]
        if norm.absent:
            return projected_ND
        return norm.part(projected_ND, self.block.activation(self.preactivation_NW) @ down.W + down.b)

    @cached_property
    def _attended_ND(self) -> Tensor:
        """After attention's skip connection and its norm."""
        norm = self.block.attention_norm
        return norm.part(self.residual_ND, self.residual_ND) + norm.beta

    @cached_property
    def _stream_ND(self) -> Tensor:
        """What enters the feed-forward network, before a norm of its own."""
        return self.stream_with_biases(self.residual_ND)


def slopes(activation: Callable[[Tensor], Tensor], before: Tensor, after: Tensor) -> Tensor:
    """Return (g(p) - g(0)) / p of an elementwise g, with p `before` and g(p) `after` it; g'(0) where p is 0.

    g'(0) is a central difference: the mean of both sides' where g has a corner.
    """
    at_zero = activation(before.new_zeros(1))
    derivative = (activation(before.new_full((1,), STEP)) - activation(before.new_full((1,), -STEP))) / (2 * STEP)
    slope: Tensor = ((after - at_zero) / before).where(before != 0, derivative)
    return slope
