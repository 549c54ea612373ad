"""Swap ratios: how far a layer's output moves with other tokens' inputs, compared with its own, by exchanging them.

Weights, lengths and derivatives say what a layer could take from other tokens. An exchange says what differs between
texts: a constant that other tokens give moves nothing, whichever text it comes from. Where the tokens of a text
constrain each other (a sum that is always 0), an exchange breaks the constraint and counts what no text shows.

    swap              the exchange itself
    swap_derivative   its derivative, |sum_{j != i} J_ij d_j| beside |J_ii d_i|, with d_j = x'_j - x_j: the norm of the
                      sum of the Jacobians, weighted by the covariance of the inputs of real texts

Shapes: B texts, T tokens, D hidden, M moves, L layers.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import vmap
from transformers import PreTrainedModel

from attnmix.core.statistics import Doubles
from attnmix.measures.derivatives import Chain, differentials, document_chains
from attnmix.models.attention import attention_by, explicit
from attnmix.models.encoding import padded

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
    y_BTD, own_TT = layer(x_BTD), torch.eye(len(others_TT), dtype=torch.bool, device=others_TT.device)
    moves = _moves(donor_BTD - x_BTD, torch.cat([others_TT & ~own_TT, own_TT]))
    others_TBTD, own_TBTD = torch.stack([layer(x_BTD + move_BTD) - y_BTD for move_BTD in moves]).chunk(2)
    return _share_of_others(others_TBTD, own_TBTD, y_BTD)


def next_donors(number: int, classes: npt.NDArray[np.integer]) -> list[int | None]:
    """Return the next text of the same class as text `number` and of another, by `DONORS`; None where there is none."""
    others = np.roll(np.arange(len(classes)), -number)[1:]
    same = classes[others] == classes[number]
    return [int(chosen[0]) if len(chosen) else None for chosen in (others[same], others[~same])]


def document_swaps(base: PreTrainedModel, ids: npt.NDArray[np.int32], donor_ids: npt.NDArray[np.int32]) -> Doubles:
    """Return `layer_swap_ratios` `[L, swaps, T]` of the tokens that both documents have, NaN of the others."""
    tokens = min(len(ids), len(donor_ids))
    chains, donors = (
        document_chains(base, padded([each[:tokens].tolist()], 0, base.device)["input_ids"])
        for each in (ids, donor_ids)
    )
    ratios_LST = layer_swap_ratios(chains, donors).double()
    return torch.nn.functional.pad(ratios_LST, (0, len(ids) - tokens), value=torch.nan).cpu().numpy()


def layer_swap_ratios(chains: Sequence[Chain], donors: Sequence[Chain]) -> Tensor:
    """Return both `SWAPS` of one document in all layers, with the layer inputs of another `[L, 2, T]`.

    Both have the same number of tokens. Each layer is taken by itself, at the document's own input.
    """
    ratios = []
    for chain, donor in zip(chains, donors, strict=True):
        for call, other in zip(chain.layers, donor.layers, strict=True):
            x_1TD = call.whole.hidden
            own_TT = torch.eye(x_1TD.shape[1], dtype=torch.bool, device=x_1TD.device)
            moves_M1TD = _moves(other.whole.hidden - x_1TD, torch.cat([~own_TT, own_TT]))
            with torch.no_grad(), attention_by(explicit()):
                y_1TD = call.whole(x_1TD)
                others_T1TD, own_T1TD = (vmap(call.whole)(x_1TD + moves_M1TD) - y_1TD).chunk(2)
                alone_T1TD = moves_M1TD[len(own_TT) :]
                along_M1TD = torch.cat([alone_T1TD.sum(0, keepdim=True), alone_T1TD])
                tangents_M1TD = differentials(call.whole, x_1TD, along_M1TD)
            ratios.append(_share_of_others(others_T1TD, own_T1TD, y_1TD))
            # A derivative is linear: what the others move is what all move less what the token itself does.
            all_1TD, own_T1TD = tangents_M1TD[0], tangents_M1TD[1:]
            ratios.append(_share_of_others(all_1TD - own_T1TD, own_T1TD, y_1TD))
    stacked: Tensor = torch.stack(ratios).unflatten(0, (-1, len(SWAPS)))
    return stacked


def _moves(difference_BTD: Tensor, moved_MT: Tensor) -> Tensor:
    """Return moves `[M, B, T, D]`, each of the tokens that a row of `moved_MT` names."""
    return torch.where(moved_MT[:, None, :, None], difference_BTD, 0)


def _share_of_others(others_TBTD: Tensor, own_TBTD: Tensor, y_BTD: Tensor) -> Tensor:
    """Return a / (a + o) `[T]` from how far the output y goes with the moves of each token's others, and of itself."""
    least_T = ROUNDING * torch.finfo(y_BTD.dtype).eps * y_BTD.square().sum(-1).mean(0).sqrt()

    def length(moved_TBTD: Tensor) -> Tensor:
        length_T = moved_TBTD.square().sum(-1).mean(1).diagonal().sqrt()
        return torch.where(length_T > least_T, length_T, 0)

    others_T, own_T = length(others_TBTD), length(own_TBTD)
    share_T: Tensor = (others_T / (others_T + own_T)).masked_fill(others_T + own_T == 0, 0)
    return share_T
