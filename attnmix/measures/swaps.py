"""Swap ratios: how far a layer's output moves with other tokens' inputs, compared with its own, by exchanging them.

Weights, lengths and derivatives say what a layer could take from other tokens. An exchange says what differs between
texts: a constant that other tokens give moves nothing, whichever text it comes from. Where the tokens of a text
constrain each other (a sum that is always 0), an exchange breaks the constraint and counts what no text shows.

    swap              the exchange itself
    swap_derivative   its derivative, |sum_{j != i} J_ij d_j| beside |J_ii d_i|, with d_j = x'_j - x_j: the norm of the
                      sum of the Jacobians, weighted by the covariance of the inputs of real texts

Shapes: B texts, T tokens, D hidden, M moves, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.func import vmap

from attnmix.measures.derivatives import Chain, differentials
from attnmix.models.attention import attention_by, explicit

Tensor = torch.Tensor

SWAPS = ("swap", "swap_derivative")
DONORS = ("same_class", "other_class")  # of the review whose inputs are exchanged, by the predicted class
ROUNDING = 32  # in multiples of the number format's, relative to the output: a shorter move is rounding error


def swap_ratio(layer: Callable[[Tensor], Tensor], x_BTD: Tensor, donor_BTD: Tensor, others_TT: Tensor) -> Tensor:
    """Return a / (a + o) `[T]` in [0, 1] of every token i of `layer`'s output y; 0 for a token that nothing moves.

        a^2 = E |y_i(x_i, x'_others) - y_i(x)|^2          o^2 = E |y_i(x'_i, x_others) - y_i(x)|^2

    E is the mean over the texts of `x_BTD`; x' is `donor_BTD`, another text's inputs at the same positions, which needs
    the same number of tokens. `layer` gives `[B, T, D]` for such inputs, and may be several layers. `others_TT`
    (bool) says which tokens j are exchanged for each i; its diagonal does not count.
    Source: interchange interventions (Geiger et al., NeurIPS 2021), here of the others and of the token itself.
    """
    y_BTD = layer(x_BTD)
    moved = [layer(x_BTD + move_TD) - y_BTD for move_TD in _moves(donor_BTD - x_BTD, others_TT)]
    return _share_of_others(torch.stack(moved), y_BTD)


def layer_swap_ratios(chains: Sequence[Chain], donors: Sequence[Chain]) -> Tensor:
    """Return both `SWAPS` of one document in all layers, with the layer inputs of another `[L, 2, T]`.

    Both have the same number of tokens. Each layer is taken by itself, at the document's own input.
    """
    ratios = []
    for chain, donor in zip(chains, donors, strict=True):
        for call, other in zip(chain.layers, donor.layers, strict=True):
            x_1TD = call.whole.hidden
            everyone_TT = torch.ones(2 * x_1TD.shape[1:2], dtype=torch.bool, device=x_1TD.device)
            moves_M1TD = _moves(other.whole.hidden - x_1TD, everyone_TT)
            with torch.no_grad(), attention_by(explicit()):
                y_1TD = call.whole(x_1TD)
                ratios.append(_share_of_others(vmap(call.whole)(x_1TD + moves_M1TD) - y_1TD, y_1TD))
                ratios.append(_share_of_others(differentials(call.whole, x_1TD, moves_M1TD), y_1TD))
    stacked: Tensor = torch.stack(ratios).unflatten(0, (-1, len(SWAPS)))
    return stacked


def _moves(difference_BTD: Tensor, others_TT: Tensor) -> Tensor:
    """Return the moves `[2 T, B, T, D]`: of the others of each token, then of each token itself."""
    own_TT = torch.eye(len(others_TT), dtype=torch.bool, device=others_TT.device)
    moved_MT = torch.cat([others_TT & ~own_TT, own_TT])
    return torch.where(moved_MT[:, None, :, None], difference_BTD, 0)


def _share_of_others(moved_MBTD: Tensor, y_BTD: Tensor) -> Tensor:
    """Return a / (a + o) `[T]` from how far the output y goes with each of `_moves`."""
    squares_2TT: Tensor = moved_MBTD.square().sum(-1).mean(1).unflatten(0, (2, -1))
    lengths_2T = squares_2TT.diagonal(dim1=-2, dim2=-1).sqrt()
    least_T = ROUNDING * torch.finfo(y_BTD.dtype).eps * y_BTD.square().sum(-1).mean(0).sqrt()
    others_T, own_T = torch.where(lengths_2T > least_T, lengths_2T, 0)
    share_T: Tensor = (others_T / (others_T + own_T)).masked_fill(others_T + own_T == 0, 0)
    return share_T
