"""What proves the parts right: they sum to the vectors that the model itself computed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from stages.mixing.layers import LayerWeights
from stages.mixing.ratios import normalised, scaled_heads

Tensor = torch.Tensor


class IdentityErrors(NamedTuple):
    """Largest error of each identity `[B]`, relative to the largest component of the true vectors."""

    attention_output: Tensor
    attention_norm: Tensor


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

    F_ii and the sum over the other sources are taken from attention weights and values, each through
    W_O on its own, not from attention_output. Tokens outside `mask_BT` do not count.
    """
    # One document at a time, so that its vectors stay in the cache.
    documents = zip(
        attention_BHTT, x_BTD, value_BTE, attention_output_BTD, attention_norm_BTD, mask_BT.unsqueeze(-1), strict=True
    )
    errors = [_identity_errors(weights, *parts) for parts in documents]
    return IdentityErrors(*(torch.stack(column) for column in zip(*errors, strict=True)))


def _identity_errors(
    weights: LayerWeights,
    attention_HTT: Tensor,
    x_TD: Tensor,
    value_TE: Tensor,
    attention_output_TD: Tensor,
    attention_norm_TD: Tensor,
    mask_T1: Tensor,
) -> tuple[Tensor, Tensor]:
    value_HTd = value_TE.unflatten(-1, (weights.heads, -1)).transpose(0, 1)
    own_TE = scaled_heads(weights, attention_HTT.diagonal(dim1=-2, dim2=-1).T, value_TE)
    others_TE = (attention_HTT @ value_HTd).transpose(0, 1).flatten(-2) - own_TE
    summed_TD = others_TE @ weights.output.W + own_TE @ weights.output.W + weights.output.b
    norm = weights.attention_norm
    deviation_T1 = ((x_TD + attention_output_TD).var(-1, keepdim=True, correction=0) + norm.eps).sqrt()
    normalised_TD = normalised(x_TD + summed_TD, norm) / deviation_T1 + norm.beta
    return (
        _relative_error(summed_TD, attention_output_TD, mask_T1),
        _relative_error(normalised_TD, attention_norm_TD, mask_T1),
    )


def _relative_error(found_TD: Tensor, true_TD: Tensor, mask_T1: Tensor) -> Tensor:
    error = ((found_TD - true_TD) * mask_T1).abs().amax()
    relative: Tensor = error / (true_TD * mask_T1).abs().amax().clamp_min(torch.finfo(true_TD.dtype).tiny)
    return relative
