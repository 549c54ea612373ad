"""Mixing ratios by group of source tokens in pairs of texts: the token's own text, the other text, special tokens.

Each ratio compares the contribution of one group S of source tokens with the contribution of the token itself:

    |sum_{j in S} F_ij| / (|sum_{j in S} F_ij| + |F_ii|)        (for `attn_n`; all other ratios are modified likewise)

F_ij is the contribution of source token j to the attention output of token i. Attention weights (tokens x tokens) are
computed in blocks of rows. Shapes: B texts (pairs), H heads, T tokens, N = B * T, R rows of a block, M methods, d head
width, E = H * d, D hidden, S = 3 groups of sources.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnmix.core.names import PREACTIVATION
from attnmix.measures.layers import LayerPass
from attnmix.measures.ratios import LayerSplits, Split, apply_formulas, ratio_points, scaled_heads
from attnmix.models.attention import AttentionCall

PAIR_SOURCES = ("own text", "other text", "special tokens")
SEGMENTS = (0, 1, -1)  # first text, second text, special tokens


def source_ratios(methods: Sequence[str], layer_pass: LayerPass, splits: LayerSplits, segments_BT: Tensor) -> Tensor:
    """Return the M ratios `methods` of all tokens for S groups of sources (`PAIR_SOURCES`), `[S, M, B, T]`.

    The groups of sources are the other tokens of the token's own text, the other text, and the special tokens. A ratio
    compares the contribution of one group with that of the token itself. Ratios are meaningful for tokens of texts, but
    not for special tokens and padding. `splits` contains the vectors of the layer, split into the parts from the token
    itself and from other tokens. `segments_BT` contains one of `SEGMENTS` for each token, another number for padding.
    """
    heads_SBTE, weights_SBT = _sum_by_source(layer_pass, segments_BT)
    # Replace the part from all other tokens by the part from each group of sources: first in W_O's output, from which
    # the splits after later steps are derived. The part from the token itself is the same for all groups.
    heads_SNE = heads_SBTE.flatten(1, -2)  # N = B * T
    group_parts_SND = heads_SNE @ layer_pass.block.output.W
    projected = Split(own=splits.projected.own, others=group_parts_SND)
    by_source = splits.with_others(projected, mixed_weight=weights_SBT.flatten(1))
    if PREACTIVATION in ratio_points(methods):  # Some of the ratios take the feed-forward network into account.
        # The token's own part of the layer's output is known, so only the parts from the groups are propagated.
        layer = by_source.layer_with_own(splits.layer.own)
        by_source = replace(by_source, known_layer=layer)
    ratios_MSN = apply_formulas(methods, by_source)
    ratios_SMBT: Tensor = ratios_MSN.transpose(0, 1).unflatten(-1, segments_BT.shape)
    return ratios_SMBT


def _sum_by_source(layer_pass: LayerPass, segments_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return two sums over each group of sources in `PAIR_SOURCES`, for every token.

    They are the sum of the values weighted by attention (before W_O), `[S, B, T, E]`, and the sum of the attention
    weights, averaged over heads, `[S, B, T]`. The sums over the own text exclude the token itself.
    """
    sums_SBTE, weights_SBT = _sum_by_segment(layer_pass.attention, segments_BT)
    # The axis S of both tensors has the order of `SEGMENTS`: first text, second text, special tokens.
    first_BTE, second_BTE, special_BTE = sums_SBTE
    first_weight_BT, second_weight_BT, special_weight_BT = weights_SBT

    # Convert the sums over the first and the second text to sums over the token's own text and over the other text.
    in_second_BT = segments_BT == 1
    in_second_BT1 = in_second_BT.unsqueeze(-1)
    itself_BTE = scaled_heads(layer_pass.diagonal, layer_pass.value)
    own_text_BTE = torch.where(in_second_BT1, second_BTE, first_BTE) - itself_BTE
    other_text_BTE = torch.where(in_second_BT1, first_BTE, second_BTE)
    own_text_weight_BT = torch.where(in_second_BT, second_weight_BT, first_weight_BT) - layer_pass.diagonal.mean(-1)
    other_text_weight_BT = torch.where(in_second_BT, first_weight_BT, second_weight_BT)
    return (
        torch.stack([own_text_BTE, other_text_BTE, special_BTE]),
        torch.stack([own_text_weight_BT, other_text_weight_BT, special_weight_BT]),
    )


def _sum_by_segment(call: AttentionCall, segments_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return two sums over the source tokens of each segment, for every token.

    They are the sum of the values weighted by attention (before W_O), `[S, B, T, E]`, and the sum of the attention
    weights, averaged over heads, `[S, B, T]`.
    """
    # For each segment, a copy of the values is set to 0 outside the segment. The copies are concatenated to vectors of
    # width x = S * d, so that a single product per block of rows computes the sums over all segments.
    members = []
    values = []
    for segment in SEGMENTS:
        member_BT = (segments_BT == segment).to(call.value)
        members.append(member_BT)
        values.append(call.value * member_BT[:, None, :, None])
    members_BTS = torch.stack(members, -1)
    value_BHTx = torch.cat(values, -1)
    value_sums = []  # by block of rows
    weight_sums = []
    for rows in call.blocks():
        weights_BHRT = call.weights(rows)
        mean_weights_BRT = weights_BHRT.mean(1)
        value_sums.append(weights_BHRT @ value_BHTx)
        weight_sums.append(mean_weights_BRT @ members_BTS)
    # Separate the segments, and concatenate the heads.
    values_BHTx = torch.cat(value_sums, -2)
    values_BHTSd = values_BHTx.unflatten(-1, (len(SEGMENTS), -1))
    values_SBTHd = values_BHTSd.permute(3, 0, 2, 1, 4)
    values_SBTE = values_SBTHd.flatten(-2)
    weights_BTS = torch.cat(weight_sums, -2)
    weights_SBT = weights_BTS.permute(2, 0, 1)
    return values_SBTE, weights_SBT
