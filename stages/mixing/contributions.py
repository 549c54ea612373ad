"""Contribution matrices: what each source token j gives to each token i, layer by layer, in float64.

    attention     mean of the attention weights over heads
    norm          |F_ij|                                      Kobayashi et al., EMNLP 2020, equation 5
    alti          max(0, |y_i|_1 - |y_i - T_ij|_1)            Ferrando et al., EMNLP 2022, equation 8
    globenc       |T_ij through the second LayerNorm|         Modarressi et al., NAACL 2022, N_ENC
    value_zeroing 1 - cos of layer outputs without value j    Mohebbi et al., EACL 2023, equation 7

float64, because 1 - cos of nearly equal vectors has no digits left in float32. Shapes: H heads,
T tokens, J sources of a block, D hidden, M width of the feed-forward network.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from stages.mixing.layers import LayerWeights, Norm

Tensor = torch.Tensor

LEAST_RAW_SUM = 1e-4  # a Value Zeroing row that sums to less shows no structure
BLOCK_NUMBERS = 2**24  # float64 numbers of the largest intermediate tensor


class Contributions(NamedTuple):
    """Matrices `[layers, T, T]` by method, and Value Zeroing's raw row sums `[layers, T]`."""

    matrices: dict[str, Tensor]
    value_zeroing_raw_sums: Tensor


def contributions(
    weights: list[LayerWeights], x_LTD: list[Tensor], attention_LHTT: list[Tensor], value_LTE: list[Tensor]
) -> Contributions:
    """All matrices of one document and their rollouts; the tensors are float64 and each layer's own.

    Rows of `attention`, `value_zeroing`, `alti`, `globenc` and of every rollout sum to 1; those of
    `norm` do not. A row of `value_zeroing` whose raw sum is below `LEAST_RAW_SUM` is NaN; in the
    rollout it counts as it is, and where nothing at all comes through attention as the skip
    connection's identity.
    """
    layers = [
        layer_contributions(layer, x, attention, value)
        for layer, x, attention, value in zip(weights, x_LTD, attention_LHTT, value_LTE, strict=True)
    ]
    stacked = {method: torch.stack([layer[method] for layer in layers]) for method in layers[0]}
    attention = stacked["attention"]
    raw = stacked["value_zeroing"]
    raw_sums = raw.sum(-1)
    zeroing, alti, globenc = (rows_to_one(stacked[method]) for method in ("value_zeroing", "alti", "globenc"))
    half_identity = torch.eye(attention.shape[-1], dtype=attention.dtype, device=attention.device) / 2
    return Contributions(
        {
            "attention": attention,
            "norm": stacked["norm"],
            "value_zeroing": zeroing.masked_fill((raw_sums < LEAST_RAW_SUM).unsqueeze(-1), torch.nan),
            "alti": alti,
            "globenc": globenc,
            "attention_rollout": rollout(attention / 2 + half_identity),
            "value_zeroing_rollout": rollout(zeroing),
            "alti_rollout": rollout(alti),
            "globenc_rollout": rollout(globenc),
        },
        raw_sums,
    )


def rows_to_one(matrix_TT: Tensor) -> Tensor:
    """Rows divided by their sums; a row of zeros, to which nothing contributes, keeps the token as it is."""
    sums = matrix_TT.sum(-1, keepdim=True)
    identity = torch.eye(matrix_TT.shape[-1], dtype=matrix_TT.dtype, device=matrix_TT.device)
    return torch.where(sums > 0, matrix_TT / sums, identity)


def rollout(matrices_LTT: Tensor) -> Tensor:
    """R_l = A_l R_{l-1} for each layer `[L, T, T]` (Abnar and Zuidema, ACL 2020, equation 1)."""
    rolled = [matrices_LTT[0]]
    for matrix in matrices_LTT[1:]:
        rolled.append(matrix @ rolled[-1])
    return torch.stack(rolled)


def layer_contributions(
    weights: LayerWeights, x_TD: Tensor, attention_HTT: Tensor, value_TE: Tensor
) -> dict[str, Tensor]:
    """Raw matrices `[T, T]` of one layer: attention, norm, alti, globenc, value_zeroing, none normalised."""
    tokens = x_TD.shape[0]
    heads = value_TE.unflatten(-1, (weights.heads, -1))
    W_HdD = weights.output.W.unflatten(0, (weights.heads, -1))
    f_THD = torch.einsum("thd,hde->the", heads, W_HdD)
    full = _Layer.run(weights, x_TD, torch.einsum("hij,jhd->id", attention_HTT, f_THD))
    found = {method: x_TD.new_empty(tokens, tokens) for method in ("norm", "alti", "globenc", "value_zeroing")}
    block = max(1, BLOCK_NUMBERS // (tokens * weights.feed_forward_in.W.shape[1]))
    # F_ij W_1 is linear in the heads: H products of a number and a vector, not D of them.
    g_THM = (_centred(f_THD) * weights.attention_norm.gamma) @ weights.feed_forward_in.W
    for start in range(0, tokens, block):
        sources = slice(start, min(start + block, tokens))
        a_JTH = attention_HTT[:, :, sources].permute(2, 1, 0)
        F_JTD = a_JTH @ f_THD[sources]
        found["norm"][:, sources] = F_JTD.norm(dim=-1).T
        T_JTD = _transformed(F_JTD, x_TD, sources, weights.attention_norm, full.attention_deviation)
        reach = full.attention_norm.abs().sum(-1) - (full.attention_norm - T_JTD).abs().sum(-1)
        found["alti"][:, sources] = reach.clamp_min(0).T
        enc_JTD = _centred(T_JTD) * weights.output_norm.gamma / full.output_deviation
        found["globenc"][:, sources] = enc_JTD.norm(dim=-1).T
        zeroed_JTD = _output_without(weights, full, F_JTD, a_JTH @ g_THM[sources])
        found["value_zeroing"][:, sources] = _one_minus_cosine(full.output, zeroed_JTD).T
    return {"attention": attention_HTT.mean(0), **found}


class _Layer(NamedTuple):
    """One layer's vectors `[T, D]` with every source in place; deviations `[T, 1]`."""

    residual: Tensor
    attention_deviation: Tensor
    attention_norm: Tensor
    output_deviation: Tensor
    output: Tensor

    @classmethod
    def run(cls, weights: LayerWeights, x_TD: Tensor, summed_TD: Tensor) -> _Layer:
        residual = x_TD + summed_TD + weights.output.b
        attention_norm = _layer_norm(residual, weights.attention_norm)
        hidden = weights.activation(attention_norm @ weights.feed_forward_in.W + weights.feed_forward_in.b)
        second = attention_norm + hidden @ weights.feed_forward_out.W + weights.feed_forward_out.b
        return cls(
            residual,
            _deviation(residual, weights.attention_norm),
            attention_norm,
            _deviation(second, weights.output_norm),
            _layer_norm(second, weights.output_norm),
        )


def _transformed(F_JTD: Tensor, x_TD: Tensor, sources: slice, norm: Norm, deviation_T1: Tensor) -> Tensor:
    """T_ij for a block of sources: R_ij through LayerNorm's linear part."""
    R_JTD = F_JTD.clone()
    rows = torch.arange(R_JTD.shape[0], device=R_JTD.device)
    R_JTD[rows, rows + sources.start] += x_TD[sources]
    return _centred(R_JTD) * norm.gamma / deviation_T1


def _output_without(weights: LayerWeights, full: _Layer, F_JTD: Tensor, FW_JTM: Tensor) -> Tensor:
    """The layer's output `[J, T, D]` with value j zero; `FW_JTM` is centred F_ij times gamma times W_1."""
    norm = weights.attention_norm
    residual_JTD = full.residual - F_JTD
    deviation_JT1 = _deviation(residual_JTD, norm)
    attention_norm_JTD = _centred(residual_JTD) * norm.gamma / deviation_JT1 + norm.beta
    first = weights.feed_forward_in
    clean_TM = (_centred(full.residual) * norm.gamma) @ first.W
    hidden_JTM = weights.activation((clean_TM - FW_JTM) / deviation_JT1 + (norm.beta @ first.W + first.b))
    second = weights.feed_forward_out
    return _layer_norm(attention_norm_JTD + hidden_JTM @ second.W + second.b, weights.output_norm)


def _one_minus_cosine(clean_TD: Tensor, zeroed_JTD: Tensor) -> Tensor:
    # Half the squared distance of unit vectors: 1 - cos itself would cancel.
    unit = torch.nn.functional.normalize
    return (unit(clean_TD, dim=-1) - unit(zeroed_JTD, dim=-1)).square().sum(-1) / 2


def _centred(vectors: Tensor) -> Tensor:
    return vectors - vectors.mean(-1, keepdim=True)


def _deviation(vectors: Tensor, norm: Norm) -> Tensor:
    return (vectors.var(-1, keepdim=True, correction=0) + norm.eps).sqrt()


def _layer_norm(vectors: Tensor, norm: Norm) -> Tensor:
    return _centred(vectors) * norm.gamma / _deviation(vectors, norm) + norm.beta
