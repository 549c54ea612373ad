"""What the weights alone say about how strongly attention's path scales a vector."""

from __future__ import annotations

import torch

from stages.mixing.layers import LayerWeights


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
