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

ROWS_AT_ONCE = 256  # tokens whose vectors stay in a processor's cache from one operation to the next


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
    mixed_weight_BT = 1 - diagonal_BTH.mean(-1)
    found = {"attn_w": mixed_weight_BT, "attnres_w": mixed_weight_BT / 2}
    if set(methods) - set(found):
        rows = (
            part.flatten(0, 1).split(ROWS_AT_ONCE) for part in (diagonal_BTH, x_BTD, value_BTE, attention_output_BTD)
        )
        blocks = [_norm_ratios(weights, "enc_n" in methods, *block) for block in zip(*rows, strict=True)]
        for method, ratio_N in zip(
            ("attn_n", "attnres_n", "attnresln_n", "enc_n"), torch.cat(blocks, dim=1), strict=False
        ):
            found[method] = ratio_N.view_as(mixed_weight_BT)
    return {method: found[method] for method in methods}


def _norm_ratios(
    weights: LayerWeights, whole: bool, diagonal_NH: Tensor, x_ND: Tensor, value_NE: Tensor, attention_output_ND: Tensor
) -> Tensor:
    """attn_n, attnres_n, attnresln_n and, of the `whole` layer, enc_n: `[methods, N]` of N tokens."""
    own = own_contribution(weights, diagonal_NH, value_NE)
    others = attention_output_ND - weights.output.b - own
    found = [_share(others, own)]
    own = own + x_ND
    found.append(_share(others, own))
    for norm in (weights.attention_norm, weights.output_norm)[: 1 + whole]:
        own, others = _normalised(own, norm), _normalised(others, norm)
        found.append(_share(others, own))
    return torch.stack(found)


def own_contribution(weights: LayerWeights, diagonal_NH: Tensor, value_NE: Tensor) -> Tensor:
    """F_ii `[N, D]`: the value heads scaled by the diagonal of attention, through W_O."""
    return _scaled_heads(weights, diagonal_NH, value_NE) @ weights.output.W


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
    own_TE = _scaled_heads(weights, attention_HTT.diagonal(dim1=-2, dim2=-1).T, value_TE)
    others_TE = (attention_HTT @ value_HTd).transpose(0, 1).flatten(-2) - own_TE
    summed_TD = others_TE @ weights.output.W + own_TE @ weights.output.W + weights.output.b
    norm = weights.attention_norm
    deviation_T1 = ((x_TD + attention_output_TD).var(-1, keepdim=True, correction=0) + norm.eps).sqrt()
    normalised_TD = _normalised(x_TD + summed_TD, norm) / deviation_T1 + norm.beta
    return (
        _relative_error(summed_TD, attention_output_TD, mask_T1),
        _relative_error(normalised_TD, attention_norm_TD, mask_T1),
    )


def _scaled_heads(weights: LayerWeights, diagonal_BTH: Tensor, value_BTE: Tensor) -> Tensor:
    heads_BTHd: Tensor = value_BTE.unflatten(-1, (weights.heads, -1)) * diagonal_BTH.unsqueeze(-1)
    return heads_BTHd.flatten(-2)


def _relative_error(found_TD: Tensor, true_TD: Tensor, mask_T1: Tensor) -> Tensor:
    error = ((found_TD - true_TD) * mask_T1).abs().amax()
    relative: Tensor = error / (true_TD * mask_T1).abs().amax().clamp_min(torch.finfo(true_TD.dtype).tiny)
    return relative


def _normalised(part: Tensor, norm: Norm) -> Tensor:
    """LayerNorm's linear part, but for the standard deviation: centred and scaled by gamma."""
    return (part - part.mean(-1, keepdim=True)) * norm.gamma


def _share(others: Tensor, own: Tensor) -> Tensor:
    others_norm = torch.linalg.vector_norm(others, dim=-1)
    total = others_norm + torch.linalg.vector_norm(own, dim=-1)
    return torch.where(total == 0, 0, others_norm / total)
