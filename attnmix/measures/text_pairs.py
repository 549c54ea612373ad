"""Where the part of other tokens comes from in a pair of texts: the token's own text, the other one, special tokens.

Each is the mixing ratio with only these sources among the others, so that it compares them with what a token keeps:

    |sum_{j in S} F_ij| / (|sum_{j in S} F_ij| + |F_ii|)        and likewise through the steps of the other ratios

Tokens x tokens weights are computed a block of rows at a time.
Shapes: B documents, H heads, T tokens, R rows of T, d head width, E = H * d, D hidden, S = 3 groups of sources.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnmix.core.names import PREACTIVATION
from attnmix.measures.layers import LayerPass
from attnmix.measures.ratios import LayerSplits, Split, formulas, ratio_points, scaled_heads

PAIR_SOURCES = ("own text", "other text", "special tokens")
SEGMENTS = (0, 1, -1)  # of the first text, of the second one, of special tokens


def source_ratios(methods: Sequence[str], layer_pass: LayerPass, splits: LayerSplits, segments_BT: Tensor) -> Tensor:
    """Return the ratios of all tokens by each group of sources, `[sources, methods, B, T]`; those of texts count.

    `segments_BT` has one of `SEGMENTS` for each token, and another number for padding.
    """
    call, W_ED = layer_pass.attention, layer_pass.block.output.W
    members_BTS = torch.stack([segments_BT == segment for segment in SEGMENTS], -1).to(call.value)
    values = [call.value * member_BT[:, None, :, None] for member_BT in members_BTS.unbind(-1)]
    value_BHTx = torch.cat(values, -1)
    contexts, sums = [], []
    for rows in call.blocks():
        weights_BHRT = call.weights(rows)
        contexts.append(weights_BHRT @ value_BHTx)
        sums.append(weights_BHRT.mean(1) @ members_BTS)
    by_source_BHTSd = torch.cat(contexts, -2).unflatten(-1, (len(SEGMENTS), -1))
    first_BTE, second_BTE, special_BTE = by_source_BHTSd.permute(3, 0, 2, 1, 4).flatten(-2)
    first_BT, second_BT, special_BT = torch.cat(sums, -2).unbind(-1)

    diagonal_BTH, in_second_BT = layer_pass.diagonal, segments_BT == 1
    own_BTE = scaled_heads(diagonal_BTH, layer_pass.value)
    from_own_BTE = torch.where(in_second_BT.unsqueeze(-1), second_BTE, first_BTE) - own_BTE
    from_other_BTE = torch.where(in_second_BT.unsqueeze(-1), first_BTE, second_BTE)
    others_SND = torch.stack([from_own_BTE, from_other_BTE, special_BTE]).flatten(1, -2) @ W_ED
    weight_own_BT = torch.where(in_second_BT, second_BT, first_BT) - diagonal_BTH.mean(-1)
    weights_SN = torch.stack([weight_own_BT, torch.where(in_second_BT, first_BT, second_BT), special_BT]).flatten(1)
    by_source = splits.with_others(Split(splits.projected.own, others_SND), weights_SN)
    if PREACTIVATION in ratio_points(methods):
        by_source = replace(by_source, known_layer=by_source.layer_with_own(splits.layer.own))
    ratios_MSN = formulas(methods, by_source)
    ratios_SMBT: Tensor = ratios_MSN.transpose(0, 1).unflatten(-1, segments_BT.shape)
    return ratios_SMBT
