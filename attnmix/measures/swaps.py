"""Swap ratios: displacements of a token's output if the inputs of other tokens, or its own input, are exchanged.

Attention weights, norms of contributions and derivatives describe possible influences of other tokens. An exchange
measures differences between texts: a contribution of other tokens that is the same in all texts causes no displacement.
If the inputs of a text satisfy a constraint (for example, if their sum is 0), an exchange violates the constraint, and
the ratio includes displacements that do not occur in real texts.

    swap              compares the displacements caused by the two exchanges
    swap_derivative   compares their linear approximations |sum_{j != i} J_ij d_j| and |J_ii d_i|, with d_j = x'_j - x_j
                      for the donor's input x'_j: norms of Jacobians, weighted by the covariance of real inputs

Shapes: B texts, T tokens, D hidden, E = heads * head width, L layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import jvp, vmap
from transformers import PreTrainedModel

from attnmix.core.statistics import Doubles
from attnmix.core.torch_state import forward_derivatives
from attnmix.measures.derivatives import Chain, differentials, document_chains
from attnmix.measures.layers import Block, heads_output
from attnmix.models.attention import attention_by, explicit
from attnmix.models.capture_points import LayerCall
from attnmix.models.encoding import padded

SWAPS = ("swap", "swap_derivative")
DONORS = ("same_class", "other_class")  # kinds of donor texts, by predicted class
ROUNDING = 32  # minimum displacement relative to the output, in multiples of machine epsilon


def swap_ratio(layer: Callable[[Tensor], Tensor], x_BTD: Tensor, donor_BTD: Tensor, others_TT: Tensor) -> Tensor:
    """Return a / (a + o) `[T]` for each token i of `layer`'s output y; 0 for a token without displacement.

        a^2 = E |y_i(x_i, x'_others) - y_i(x)|^2          o^2 = E |y_i(x'_i, x_others) - y_i(x)|^2

    E is the mean over the texts in `x_BTD`; x' is `donor_BTD`, the inputs of donor texts with the same numbers of
    tokens. `layer` maps `[B, T, D]` to `[B, T, D]`, and may consist of several layers. Row i of `others_TT` (bool)
    selects the other tokens whose inputs are exchanged to measure token i; the diagonal is ignored. The exchanges are
    interchange interventions (Geiger et al., NeurIPS 2021) on the other tokens and on the token itself.
    """
    y_BTD = layer(x_BTD)
    own_TT = torch.eye(len(others_TT), dtype=torch.bool, device=others_TT.device)

    def measure_displacement(is_exchanged_TT: Tensor) -> Tensor:
        """Return the displacement `[B, T, D]` of the output of each token.

        Row i of `is_exchanged_TT` selects the tokens whose inputs are exchanged to measure token i.
        """
        outputs = []
        for is_exchanged_T in is_exchanged_TT:
            input_BTD = torch.where(is_exchanged_T[:, None], donor_BTD, x_BTD)
            outputs.append(layer(input_BTD))
        outputs_TBTD = torch.stack(outputs)  # outputs of the whole texts for each measured token
        return _select_own_rows(outputs_TBTD) - y_BTD

    others_displacement_BTD = measure_displacement(others_TT & ~own_TT)
    own_displacement_BTD = measure_displacement(own_TT)
    return _compute_share(others_displacement_BTD, own_displacement_BTD, y_BTD)


def next_donors(number: int, classes: npt.NDArray[np.integer]) -> list[int | None]:
    """Return the indices of two donors for text `number`: the next text of its class, and the next of another class.

    `classes` contains the class of each text. After the last text, the search continues with the first one. A donor is
    None if there is no such text.
    """
    all_texts = np.arange(len(classes))
    others = np.roll(all_texts, -number)[1:]  # in order, starting after text `number`
    is_same_class = classes[others] == classes[number]
    donors: list[int | None] = []
    for candidates in (others[is_same_class], others[~is_same_class]):
        donor = None
        if len(candidates):
            donor = int(candidates[0])
        donors.append(donor)
    return donors


def document_swaps(base: PreTrainedModel, ids: npt.NDArray[np.int32], donor_ids: npt.NDArray[np.int32]) -> Doubles:
    """Return the ratios `swap` and `swap_derivative` (`SWAPS`), `[L, 2, T]`, of a text in all layers.

    A token's output is displaced by a if the layer inputs of all other tokens are replaced by those of a donor text,
    and by o if the token's own input is replaced. `swap` is a / (a + o), and `swap_derivative` uses linear
    approximations of a and o. Both texts are truncated to the length of the shorter one; the ratios are NaN for tokens
    beyond this length.
    """
    tokens = min(len(ids), len(donor_ids))
    common_ids = ids[:tokens].tolist()
    common_donor_ids = donor_ids[:tokens].tolist()
    # A batch of one text needs no padding, so the padding ID 0 is not used.
    batch = padded([common_ids], pad_token_id=0, device=base.device)
    donor_batch = padded([common_donor_ids], pad_token_id=0, device=base.device)
    chains = document_chains(base, batch["input_ids"])
    donors = document_chains(base, donor_batch["input_ids"])
    with attention_by(explicit(), base):
        ratios_LST = layer_swap_ratios(chains, donors).double()
    missing_tokens = len(ids) - tokens
    padded_LST = torch.nn.functional.pad(ratios_LST, (0, missing_tokens), value=torch.nan)
    return padded_LST.cpu().numpy()


def layer_swap_ratios(chains: Sequence[Chain], donors: Sequence[Chain]) -> Tensor:
    """Return the ratios `swap` and `swap_derivative` (`SWAPS`), `[L, 2, T]`, of a text in all layers.

    A token's output is displaced by a if the layer inputs of all other tokens are replaced by those of a donor text,
    and by o if the token's own input is replaced. `swap` is a / (a + o), and `swap_derivative` uses linear
    approximations of a and o. `chains` and `donors` contain the recorded layer calls of each stack, for the text and
    for the donor. Both texts must have the same number of tokens.
    """
    ratios = []
    for chain, donor_chain in zip(chains, donors, strict=True):
        for call, donor_call in zip(chain.layers, donor_chain.layers, strict=True):
            donor_1TD = donor_call.whole.hidden  # `whole` is the call of the whole layer, `hidden` its input
            with torch.no_grad(), attention_by(explicit()):
                ratios_2T = _compute_layer_swaps(call, donor_1TD)
            ratios.append(ratios_2T)
    return torch.stack(ratios)


@dataclass(frozen=True)
class _SplitLayer:
    """A layer in two steps: the attention heads, which mix tokens, and the rest, in which tokens are independent."""

    call: LayerCall
    block: Block

    @property
    def x_1TD(self) -> Tensor:
        """The recorded input of the layer."""
        return self.call.whole.hidden

    def compute_heads(self, input_1TD: Tensor) -> Tensor:
        """Return the head outputs `[1, T, E]` for any layer input."""
        normed_1TD = self.block.input_norm(input_1TD)
        return heads_output(self.call.attending["attention"], normed_1TD)

    def compute_output(self, input_BTD: Tensor, heads_BTE: Tensor) -> Tensor:
        """Return the layer's output `[B, T, D]` for any input of the skip connection and any head outputs."""
        projected_BTD = heads_BTE @ self.block.output.W + self.block.output.b
        attention_BTD = self.block.attention_output_norm(projected_BTD)
        return self.block.rest(self.call, input_BTD, attention_BTD)


def _compute_layer_swaps(call: LayerCall, donor_1TD: Tensor) -> Tensor:
    """Return the ratios `swap` and `swap_derivative` `[2, T]` of one layer; `donor_1TD` are the donor's layer inputs.

    A token's output is displaced by a if the inputs of all other tokens are replaced by those of the donor, and by o if
    the token's own input is replaced. `swap` is a / (a + o). `swap_derivative` uses linear approximations of a and o:
    derivatives of the output along the changes of the replaced inputs.
    """
    layer = _SplitLayer(call, Block(call.module, call.stack))
    heads_1TE = layer.compute_heads(layer.x_1TD)
    y_1TD, others_exchanged_1TD, own_exchanged_1TD = _compute_exchanged_outputs(layer, heads_1TE, donor_1TD)
    swap_T = _compute_share(others_exchanged_1TD - y_1TD, own_exchanged_1TD - y_1TD, y_1TD)
    change_1TD = donor_1TD - layer.x_1TD
    others_derivative_1TD, own_derivative_1TD = _differentiate_outputs(layer, heads_1TE, change_1TD)
    swap_derivative_T = _compute_share(others_derivative_1TD, own_derivative_1TD, y_1TD)
    return torch.stack([swap_T, swap_derivative_T])


def _compute_exchanged_outputs(
    layer: _SplitLayer, heads_1TE: Tensor, donor_1TD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three outputs of each token, `[1, T, D]`: for the text, with others exchanged, and with itself exchanged.

    An exchange replaces the layer inputs of the other tokens, or of the token itself, by those of the donor. Because
    only attention mixes tokens, the heads are computed for all 2 T exchanges, and the rest of the layer only
    for the token of each exchange.
    """
    others_heads_1TE, own_heads_1TE = _compute_exchanged_heads(layer, donor_1TD)
    inputs_3TD = torch.cat([layer.x_1TD, layer.x_1TD, donor_1TD])
    heads_3TE = torch.cat([heads_1TE, others_heads_1TE, own_heads_1TE])
    y_1TD, others_exchanged_1TD, own_exchanged_1TD = layer.compute_output(inputs_3TD, heads_3TE).split(1)
    return y_1TD, others_exchanged_1TD, own_exchanged_1TD


def _compute_exchanged_heads(layer: _SplitLayer, donor_1TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return two head outputs `[1, T, E]` of each token: with the other tokens exchanged, and with itself exchanged.

    An exchange replaces layer inputs of the text by those of the donor. In arrays `[T, 1, T, ...]`, the first axis
    contains one exchange for each token, and the other axis T contains the vectors of all tokens in this exchange.
    """
    own_T1T1 = _mark_own_tokens(donor_1TD)  # True for the vector of the token to which the exchange belongs
    others_exchanged_T1TD = torch.where(own_T1T1, layer.x_1TD, donor_1TD)
    own_exchanged_T1TD = torch.where(own_T1T1, donor_1TD, layer.x_1TD)
    exchanged_X1TD = torch.cat([others_exchanged_T1TD, own_exchanged_T1TD])  # X = 2 T exchanges, [X, 1, T, D]
    heads_X1TE = vmap(layer.compute_heads)(exchanged_X1TD)
    others_heads_T1TE, own_heads_T1TE = heads_X1TE.chunk(2)
    return _select_own_rows(others_heads_T1TE), _select_own_rows(own_heads_T1TE)


def _differentiate_outputs(layer: _SplitLayer, heads_1TE: Tensor, change_1TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return two derivatives `[1, T, D]` of each token's output.

    They are the derivatives along the changes of the other tokens' inputs, and along the change of the token's own
    input; `change_1TD` contains these changes. `heads_1TE` contains the head outputs for the unchanged inputs.
    """
    others_derivative_1TE, own_derivative_1TE = _differentiate_heads(layer, change_1TD)
    # Both derivatives are computed together, as a batch of two texts with the same inputs but different changes.
    inputs_2TD = torch.cat([layer.x_1TD, layer.x_1TD])
    heads_2TE = torch.cat([heads_1TE, heads_1TE])
    # A change of other tokens' inputs reaches a token only through its heads; its own skip connection does not change.
    input_changes_2TD = torch.cat([torch.zeros_like(change_1TD), change_1TD])
    head_changes_2TE = torch.cat([others_derivative_1TE, own_derivative_1TE])
    with forward_derivatives():
        inputs = (inputs_2TD, heads_2TE)
        changes = (input_changes_2TD, head_changes_2TE)
        derivatives_2TD: Tensor = jvp(layer.compute_output, inputs, changes)[1]  # item 0 is the output
    others_derivative_1TD, own_derivative_1TD = derivatives_2TD.split(1)
    return others_derivative_1TD, own_derivative_1TD


def _differentiate_heads(layer: _SplitLayer, change_1TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return two derivatives `[1, T, E]` of each token's head outputs.

    They are the derivatives along the changes of the other tokens' inputs, and along the change of the token's own
    input. Derivatives are linear in the direction, so the derivative along the other tokens' changes is the derivative
    along all changes minus the derivative along the token's own change.
    """
    own_T1T1 = _mark_own_tokens(change_1TD)
    own_changes_T1TD = torch.where(own_T1T1, change_1TD, 0)
    changes_M1TD = torch.cat([change_1TD[None], own_changes_T1TD])  # M = 1 + T: all tokens, then each token alone
    derivatives_M1TE = differentials(layer.compute_heads, layer.x_1TD, changes_M1TD)
    own_derivative_1TE = _select_own_rows(derivatives_M1TE[1:])
    others_derivative_1TE = derivatives_M1TE[0] - own_derivative_1TE
    return others_derivative_1TE, own_derivative_1TE


def _mark_own_tokens(vectors_1TD: Tensor) -> Tensor:
    """Return a mask `[T, 1, T, 1]`: True if exchange i (first axis) belongs to token t (third axis), that is, i = t."""
    tokens = vectors_1TD.shape[1]
    own_TT = torch.eye(tokens, dtype=torch.bool, device=vectors_1TD.device)
    return own_TT[:, None, :, None]


def _select_own_rows(exchanged_TBTx: Tensor) -> Tensor:
    """Return, for each token, its vector `[B, T, x]` in the exchange in which this token is measured.

    The first axis of `exchanged_TBTx` contains one exchange per token, and the third axis contains the tokens.
    """
    vectors_BxT = exchanged_TBTx.diagonal(dim1=0, dim2=2)  # `diagonal` puts the joint axis last
    return vectors_BxT.mT


def _compute_share(others_BTD: Tensor, own_BTD: Tensor, y_BTD: Tensor) -> Tensor:
    """Return a / (a + o) `[T]` for the lengths a of the displacements `others_BTD`, and o of `own_BTD`.

    These are displacements of each token's output `y_BTD`, caused by the other tokens and by the token itself. a and o
    are root mean squares over the B texts; they count as 0 if they do not exceed the rounding error of the output. If
    both are 0, the share is 0.
    """
    precision = torch.finfo(y_BTD.dtype).eps
    rounding_error_T = ROUNDING * precision * _measure_length(y_BTD)
    others_length_T = _measure_length(others_BTD)
    own_length_T = _measure_length(own_BTD)
    others_T = torch.where(others_length_T > rounding_error_T, others_length_T, 0)
    own_T = torch.where(own_length_T > rounding_error_T, own_length_T, 0)
    total_T = others_T + own_T
    share_T = others_T / total_T
    return share_T.masked_fill(total_T == 0, 0)


def _measure_length(vectors_BTD: Tensor) -> Tensor:
    """Return the root mean square `[T]` of the lengths of each token's vectors over the batch."""
    squares_BT = vectors_BTD.square().sum(-1)
    mean_square_T: Tensor = squares_BT.mean(0)
    return mean_square_T.sqrt()
