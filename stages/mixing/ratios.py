"""Mixing ratios of every token: Kobayashi et al., EMNLP 2020 and EMNLP 2021.

Shapes: B batch, H heads, T tokens, E = heads * head width, D hidden. i is the output token,
j a source token. With f_h(x_j) = (x_j W_V^h + b_V^h) W_O^h:

    F_ij = sum_h a^h_ij f_h(x_j)      R_ij = F_ij + [i=j] x_i      T_ij = LayerNorm's linear part of R_ij

No tensor of T * T * D is made: sum_{j!=i} F_ij = attention_output_i - b_O - F_ii. All maps of
LayerNorm divide by a standard deviation of token i, which cancels in a ratio of token i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from stages.mixing.layers import LayerWeights, Norm

Tensor = torch.Tensor


class IdentityErrors(NamedTuple):
    """Largest error of each identity `[B]`, relative to the largest component of the true vectors."""

    attention_output: Tensor
    attention_norm: Tensor


def mixing_ratios(
    methods: Sequence[str],
    weights: LayerWeights,
    attention_BHTT: Tensor,
    x_BTD: Tensor,
    value_BTE: Tensor,
    attention_output_BTD: Tensor,
) -> dict[str, Tensor]:
    """The ratio `[B, T]` in [0, 1] by each method.

    `attn_w`, `attnres_w`: Kobayashi et al. 2020, section 2; `attn_n`, `attnres_n`, `attnresln_n`:
    Kobayashi et al. 2021, equation 9. `enc_n` carries `attnresln_n` through the second skip and
    LayerNorm, as N_ENC does (Modarressi et al., NAACL 2022, section 3.3): the feed-forward network counts
    only in LayerNorm's standard deviation. A token to which nothing contributes has ratio 0.
    """
    diagonal_BTH = attention_BHTT.diagonal(dim1=-2, dim2=-1).transpose(1, 2)
    mixed_weight = 1 - diagonal_BTH.mean(-1)
    found = {"attn_w": mixed_weight, "attnres_w": mixed_weight / 2}
    if set(methods) - set(found):
        own = own_contribution(weights, diagonal_BTH, value_BTE)
        others = attention_output_BTD - weights.b_O - own
        found["attn_n"] = _share(others, own)
        own = own + x_BTD
        found["attnres_n"] = _share(others, own)
        own, others = (_normalised(part, weights.attention_norm) for part in (own, others))
        found["attnresln_n"] = _share(others, own)
        if "enc_n" in methods:
            own, others = (_normalised(part, weights.output_norm) for part in (own, others))
            found["enc_n"] = _share(others, own)
    return {method: found[method] for method in methods}


def own_contribution(weights: LayerWeights, diagonal_BTH: Tensor, value_BTE: Tensor) -> Tensor:
    """F_ii `[B, T, D]`: the value heads scaled by the diagonal of attention, through W_O."""
    heads_BTHd = value_BTE.unflatten(-1, (weights.heads, -1)) * diagonal_BTH.unsqueeze(-1)
    return heads_BTHd.flatten(-2) @ weights.W_O


def identity_errors(
    weights: LayerWeights,
    attention_BHTT: Tensor,
    x_BTD: Tensor,
    value_BTE: Tensor,
    attention_output_BTD: Tensor,
    attention_norm_BTD: Tensor,
    mask_BT: Tensor,
) -> IdentityErrors:
    """How far sum_j F_ij + b_O is from attention_output, and the sum of T from attention_norm.

    The sum is taken over the sources, from attention weights and values, not from attention_output.
    Tokens outside `mask_BT` do not count.
    """
    value_BHTd = value_BTE.unflatten(-1, (weights.heads, -1)).transpose(1, 2)
    summed_BTE = (attention_BHTT @ value_BHTd).transpose(1, 2).flatten(-2)
    summed_BTD = torch.addmm(weights.b_O, summed_BTE.flatten(0, 1), weights.W_O).view_as(x_BTD)
    norm = weights.attention_norm
    deviation_BT1 = ((x_BTD + attention_output_BTD).var(-1, keepdim=True, correction=0) + norm.eps).sqrt()
    normalised_BTD = _normalised(x_BTD + summed_BTD, norm) / deviation_BT1 + norm.beta
    return IdentityErrors(
        _relative_error(summed_BTD, attention_output_BTD, mask_BT),
        _relative_error(normalised_BTD, attention_norm_BTD, mask_BT),
    )


def _relative_error(found_BTD: Tensor, true_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    outside = ~mask_BT.unsqueeze(-1)
    error = (found_BTD - true_BTD).abs().masked_fill(outside, 0).amax((1, 2))
    largest = true_BTD.abs().masked_fill(outside, 0).amax((1, 2))
    return error / largest.clamp_min(torch.finfo(largest.dtype).tiny)


def _normalised(part: Tensor, norm: Norm) -> Tensor:
    """LayerNorm's linear part, but for the standard deviation: centred and scaled by gamma."""
    return (part - part.mean(-1, keepdim=True)) * norm.gamma


def _share(others: Tensor, own: Tensor) -> Tensor:
    others_norm = torch.linalg.vector_norm(others, dim=-1)
    total = others_norm + torch.linalg.vector_norm(own, dim=-1)
    return torch.where(total == 0, 0, others_norm / total)
