"""What one document's derivatives say: how much of a token's derivative is by other tokens.

In two forms, each for a token i of a layer: with sources apart, as in Brunner et al. (ICLR 2020, equation 3), and with
the other sources as one block, the counterpart of the norm of a sum in the mixing ratios.

    sum_of_norms    1 - |J_ii| / sum_j |J_ij|
    norm_of_block   |J_i,others| / (|J_i,others| + |J_ii|)      |J_i,others|^2 = sum_{j != i} |J_ij|^2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stages.mixing.gradients import JacobianNorms

Tensor = torch.Tensor
Doubles = npt.NDArray[np.float64]

FORMS = ("sum_of_norms", "norm_of_block")


@dataclass(frozen=True)
class DocumentDerivatives:
    """One document of the gradient reference in one checkpoint; references in the order of `REFERENCES`."""

    agreement: (
        Doubles  # [references, layers, methods]: Spearman with ratios, matrices and rollouts, NaN where undefined
    )
    levels: Doubles  # [references, layers, forms, tokens]; NaN for a token whose output nothing moves
    from_input: Doubles  # [layers, rollouts, tokens]: 1 - R_ii of each method's rollout
    ratios: Doubles  # [layers, ratios, tokens]: the mixing ratios of the same tokens


def levels(norms: JacobianNorms) -> Tensor:
    """The share of a token's derivative that is by other tokens `[layers, forms, T]`, in the order of `FORMS`.

    NaN for a token whose output nothing moves.
    """
    own_LT = norms.entries_LTT.diagonal(dim1=-2, dim2=-1)
    apart_LTT = norms.entries_LTT - torch.diag_embed(own_LT)
    return torch.stack([_share(others_LT, own_LT) for others_LT in (apart_LTT.sum(-1), norms.others_LT)], dim=1)


def _share(others: Tensor, own: Tensor) -> Tensor:
    return others / (others + own)  # 0 / 0 is NaN
