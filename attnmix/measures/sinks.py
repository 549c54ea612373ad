"""Measures of attention sinks and massive activations, such as the attention to the last token of a text.

A sink is a token that receives much attention regardless of its meaning, usually the first token (Xiao et al., ICLR
2024). It can contribute almost nothing if it acts as a bias of the keys (Gu et al., ICLR 2025); the norm of its value
vector is then small. Sinks may prevent excessive mixing of tokens (Barbero et al., COLM 2025), but attention to a sink
increases a ratio based on attention weights. Every ratio is therefore also measured without special tokens as sources.
Massive activations are the few components of a sink's vector that are far larger than all others (Sun et al., COLM
2024).

Shapes: B texts, S special tokens of a text, H heads, T tokens, D hidden, d head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmix.measures.layers import LayerPass
from attnmix.models.attention import AttentionCall

SINK_MEASURES = ("attention_to_last", "value_of_first", "value_of_last", "massive_activation")
"""Measures of a text in one layer; `attention_to_first` is measured for each token instead.

`attention_to_last`            attention weight of the other tokens on the last token, mean over tokens and heads
`value_of_first`, `_of_last`   norm of the token's value vector (all heads) / mean norm of the tokens between the two
`massive_activation`           largest absolute activation in the layer's output / median absolute activation
"""


def weights_on(call: AttentionCall, positions_B: Tensor) -> Tensor:
    """Return the weights a_ij `[B, T, H]` of all tokens i on one source j per text; 0 if the source is masked for i.

    `positions_B` contains the position of the source in each text.
    """
    position_B111 = positions_B[:, None, None, None]
    key_BH1d = call.key.take_along_dim(position_B111, -2)
    mask_BHT = None
    if call.mask is not None:
        mask_BHT1 = call.mask.take_along_dim(position_B111, -1)
        mask_BHT = mask_BHT1.squeeze(-1)
    weights_BTH = call.one_key(key_BH1d, mask_BHT)  # weights of all queries on this key, without the causal mask
    if not call.causal:
        return weights_BTH
    tokens = call.key.shape[-2]
    all_positions_T = torch.arange(tokens, device=positions_B.device)
    is_earlier_BT = all_positions_T < positions_B.unsqueeze(-1)  # earlier tokens do not attend to the source
    return weights_BTH.masked_fill(is_earlier_BT.unsqueeze(-1), 0)


def weights_on_special(call: AttentionCall, special_SB: Tensor) -> Tensor:
    """Return the weights a_ij `[S, B, T, H]` of other tokens i on each special token j.

    `special_SB` contains the positions of each text's special tokens, padded with -1. Weights are 0 for this padding,
    and so is the weight of a special token on itself.
    """
    heads, tokens = call.value.shape[-3:-1]
    positions_T = torch.arange(tokens, device=special_SB.device)
    weights_SBTH = call.value.new_zeros(*special_SB.shape, tokens, heads)
    for number, position_B in enumerate(special_SB):
        position_B1 = position_B.unsqueeze(-1)
        is_special_B1 = position_B1 >= 0
        is_other_BT = positions_T != position_B1
        is_counted_BT = is_special_B1 & is_other_BT
        weights_BTH = weights_on(call, position_B.clamp_min(0))  # The weights for the padding -1 are discarded.
        weights_SBTH[number] = weights_BTH * is_counted_BT.unsqueeze(-1)
    return weights_SBTH


def sink_measures(layer_pass: LayerPass, mask_BT: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the `SINK_MEASURES` `[B, measures]` of each text in one layer.

    They are: the mean attention of the other tokens to the last token; the lengths of the first and the last token's
    value vectors, each divided by the mean length of the value vectors between them; and the largest absolute
    activation, divided by the median absolute activation.

    `mask_BT` is False for padding, which follows the tokens, and `lengths` contains the number of tokens of each text.
    The measure of attention is NaN for texts of one token; measures of values are NaN for texts of one or two tokens.
    """
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    last_B = mask_BT.sum(-1) - 1  # position of the last token
    is_before_last_BT = positions_T < last_B.unsqueeze(-1)
    on_last_BTH = weights_on(layer_pass.attention, last_B)
    on_last_BT = on_last_BTH.mean(-1).double()  # the mean over heads
    is_between_BT = is_before_last_BT & (positions_T > 0)
    first_value_B, last_value_B = _compare_value_lengths(layer_pass.value, last_B, is_between_BT)
    output_BTD = layer_pass.features["layer_output"]
    measures = (  # in the order of `SINK_MEASURES`
        _average_tokens(on_last_BT, is_before_last_BT),
        first_value_B,
        last_value_B,
        _measure_massive_activations(output_BTD, mask_BT, lengths),
    )
    return torch.stack(measures, -1)


def _compare_value_lengths(value_BTE: Tensor, last_B: Tensor, is_between_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the relative lengths `[B]` of the value vectors of the first and of the last token.

    They are relative to the mean length of the value vectors between them, which `is_between_BT` selects. `last_B`
    contains the position of the last token.
    """
    length_BT = value_BTE.double().norm(dim=-1)
    first_length_B = length_BT[:, 0]
    last_length_B1 = length_BT.take_along_dim(last_B.unsqueeze(-1), -1)
    last_length_B = last_length_B1.squeeze(-1)
    between_length_B = _average_tokens(length_BT, is_between_BT)
    return first_length_B / between_length_B, last_length_B / between_length_B


def _measure_massive_activations(output_BTD: Tensor, mask_BT: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return each text's largest absolute activation divided by the median absolute activation, `[B]` in float64."""
    size_BTD = output_BTD.abs()
    token_size_BTD = size_BTD.masked_fill(~mask_BT.unsqueeze(-1), 0)
    largest_B = token_size_BTD.flatten(1).amax(-1)
    # The loop over texts avoids torch's median along an axis; this operation is not deterministic on all devices.
    medians = []
    for size_TD, length in zip(size_BTD, lengths, strict=True):
        median = size_TD[:length].median()
        medians.append(median)
    relative_B = largest_B / torch.stack(medians)
    return relative_B.double()


def _average_tokens(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean `[B]` over the tokens that a mask selects; NaN for texts without selected tokens."""
    masked_BT = values_BT.masked_fill(~mask_BT, 0)
    mean_B: Tensor = masked_BT.sum(-1) / mask_BT.sum(-1)
    return mean_B
