"""The swap ratio: how far a layer's output moves with other tokens' inputs, compared with its own, by exchanging them.

Weights, lengths and derivatives say what a layer could take from other tokens. An exchange says what differs between
texts: a constant that other tokens give moves nothing, whichever text it comes from. Where the tokens of a text
constrain each other (a sum that is always 0), an exchange breaks the constraint and counts what no text shows.

Shapes: B texts, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor


def swap_ratio(layer: Callable[[Tensor], Tensor], x_BTD: Tensor, donor_BTD: Tensor, others_TT: Tensor) -> Tensor:
    """Return a / (a + o) `[T]` in [0, 1] of every token i of `layer`'s output y; 0 for a token that nothing moves.

        a^2 = E |y_i(x_i, x'_others) - y_i(x)|^2          o^2 = E |y_i(x'_i, x_others) - y_i(x)|^2

    E is the mean over the texts of `x_BTD`; x' is `donor_BTD`, another text's inputs at the same positions, which needs
    the same number of tokens. `layer` gives `[B, T, D]` for such inputs, and may be several layers. `others_TT`
    (bool) says which tokens j are exchanged for each i; its diagonal does not count.
    Source: interchange interventions (Geiger et al., NeurIPS 2021), here of the others and of the token itself.
    """
    y_BTD = layer(x_BTD)
    squares_T2 = y_BTD.new_zeros(len(others_TT), 2)
    for i, others_T in enumerate(others_TT):
        own_T = torch.arange(len(others_T), device=others_T.device) == i
        for place, swapped_T in enumerate((others_T & ~own_T, own_T)):
            moved_BD = layer(torch.where(swapped_T.unsqueeze(-1), donor_BTD, x_BTD))[:, i] - y_BTD[:, i]
            squares_T2[i, place] = moved_BD.square().sum(-1).mean()
    lengths_T2 = squares_T2.sqrt()
    total_T = lengths_T2.sum(-1)
    return (lengths_T2[:, 0] / total_T).masked_fill(total_T == 0, 0)
