"""The share of a token's derivative that is due to other tokens, others / (others + |J_ii|), for a token i of a layer.

Three forms differ in how the other tokens' Jacobians J_ij become one norm:

    form             others
    sum_of_norms     sum_{j != i} |J_ij|            the norms added (Brunner et al., ICLR 2020, equation 3)
    norm_of_block    sqrt(sum_{j != i} |J_ij|^2)    the response to independent moves of the others
    norm_of_sum      |sum_{j != i} J_ij|            the response to a common move of the others

`norm_of_sum` is the counterpart of |sum_{j != i} F_ij| in the mixing ratios: in both, sources that push in opposite
directions cancel. Under uniform attention of n tokens the block falls as 1/sqrt(n); the other two do not.
"""

from __future__ import annotations

import torch

from attnmix.measures.gradients import JacobianNorms

Tensor = torch.Tensor

FORMS = ("sum_of_norms", "norm_of_block", "norm_of_sum")


def levels(norms: JacobianNorms) -> Tensor:
    """Return the share of a token's derivative due to other tokens `[layers, forms, T]`, in the order of `FORMS`.

    NaN for a token whose output nothing moves.
    """
    own_LT = norms.entries_LTT.diagonal(dim1=-2, dim2=-1)
    added_LT = (norms.entries_LTT - torch.diag_embed(own_LT)).sum(-1)
    forms = (added_LT, norms.block_LT, norms.sum_LT)
    return torch.stack([_share(others_LT, own_LT) for others_LT in forms], dim=1)


def _share(others: Tensor, own: Tensor) -> Tensor:
    return others / (others + own)  # 0 / 0 is NaN
