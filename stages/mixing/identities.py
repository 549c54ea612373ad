"""What proves the parts right: they sum to the vectors that the model itself computed."""

from __future__ import annotations

import torch

from stages.mixing.layers import LayerPass, LayerWeights
from stages.mixing.ratios import normalised, scaled_heads

Tensor = torch.Tensor


def identity_errors(weights: LayerWeights, seen: LayerPass, mask_BT: Tensor) -> dict[str, Tensor]:
    """How far sum_j F_ij + b_O is from `attention_output`, and the sum of T from `attention_norm`, in a batch.

    Each `[B]` is the largest error relative to the largest component of the true vectors. F_ii and the sum over the
    other sources are taken from attention weights and values, each through W_O on its own, not from attention_output.
    Tokens outside `mask_BT` do not count.
    """
    # One document at a time, so that its vectors stay in the cache.
    errors = [_of_document(weights, seen.document(place), mask.unsqueeze(-1)) for place, mask in enumerate(mask_BT)]
    names = ("attention_output", "attention_norm")
    return {name: torch.stack(column) for name, column in zip(names, zip(*errors, strict=True), strict=True)}


def _of_document(weights: LayerWeights, seen: LayerPass, mask_T1: Tensor) -> tuple[Tensor, Tensor]:
    value_HTd = seen.value.unflatten(-1, (weights.heads, -1)).transpose(0, 1)
    own_TE = scaled_heads(weights, seen.attention.diagonal(dim1=-2, dim2=-1).T, seen.value)
    others_TE = (seen.attention @ value_HTd).transpose(0, 1).flatten(-2) - own_TE
    summed_TD = others_TE @ weights.output.W + own_TE @ weights.output.W + weights.output.b
    norm = weights.attention_norm
    deviation_T1 = ((seen.x + seen.attention_output).var(-1, keepdim=True, correction=0) + norm.eps).sqrt()
    normalised_TD = normalised(seen.x + summed_TD, norm) / deviation_T1 + norm.beta
    return (
        _relative_error(summed_TD, seen.attention_output, mask_T1),
        _relative_error(normalised_TD, seen.attention_norm, mask_T1),
    )


def _relative_error(found_TD: Tensor, true_TD: Tensor, mask_T1: Tensor) -> Tensor:
    error = ((found_TD - true_TD) * mask_T1).abs().amax()
    relative: Tensor = error / (true_TD * mask_T1).abs().amax().clamp_min(torch.finfo(true_TD.dtype).tiny)
    return relative
