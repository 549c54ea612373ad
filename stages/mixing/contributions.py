"""The vectors of which contribution matrices are made, a block of sources at a time, and the rollouts; in float64.

float64, because 1 - cos of nearly equal vectors has no digits left in float32. Shapes: L layers, H heads,
T tokens, J sources of a block, D hidden, E = heads * head width, M width of the feed-forward network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from stages.mixing.declared import LayerMatrix
from stages.mixing.layers import LayerPass, LayerWeights, Norm

Tensor = torch.Tensor

LEAST_RAW_SUM = 1e-4  # a Value Zeroing row that sums to less shows no structure
BLOCK_NUMBERS = 2**24  # float64 numbers of the largest intermediate tensor


class Contributions(NamedTuple):
    """Matrices `[layers, T, T]` by method, and Value Zeroing's raw row sums `[layers, T]` where it was asked for."""

    matrices: dict[str, Tensor]
    value_zeroing_raw_sums: Tensor | None


def contributions(
    declared: Sequence[LayerMatrix], weights: list[LayerWeights], layers: Sequence[LayerPass]
) -> Contributions:
    """The declared matrices of one document, and their rollouts; weights and passes are float64.

    A row of `value_zeroing` whose raw sum is below `LEAST_RAW_SUM` is NaN; in the rollout it counts as it is, and
    where nothing at all comes through attention as the skip connection's identity.
    """
    by_layer = [layer_contributions(declared, *layer) for layer in zip(weights, layers, strict=True)]
    matrices: dict[str, Tensor] = {}
    raw_sums = None
    for each in declared:
        raw = torch.stack([raw[each.name] for raw in by_layer])
        rows = matrices[each.name] = rows_to_one(raw) if each.rows == "made to sum to 1" else raw
        if each.rollout is not None:
            skipped = rows / 2 + _identity(rows) / 2 if each.rollout == "with identity" else rows
            matrices[each.rolled_out().name] = rollout(skipped)
        if each.name == "value_zeroing":
            raw_sums = raw.sum(-1)
            matrices[each.name] = rows.masked_fill((raw_sums < LEAST_RAW_SUM).unsqueeze(-1), torch.nan)
    return Contributions(matrices, raw_sums)


def rows_to_one(matrix_TT: Tensor) -> Tensor:
    """Rows divided by their sums; a row of zeros, to which nothing contributes, keeps the token as it is."""
    sums = matrix_TT.sum(-1, keepdim=True)
    return torch.where(sums > 0, matrix_TT / sums, _identity(matrix_TT))


def _identity(matrix_TT: Tensor) -> Tensor:
    return torch.eye(matrix_TT.shape[-1], dtype=matrix_TT.dtype, device=matrix_TT.device)


def rollout(matrices_LTT: Tensor) -> Tensor:
    """R_l = A_l R_{l-1} for each layer `[L, T, T]` (Abnar and Zuidema, ACL 2020, equation 1)."""
    rolled = [matrices_LTT[0]]
    for matrix in matrices_LTT[1:]:
        rolled.append(matrix @ rolled[-1])
    return torch.stack(rolled)


def layer_contributions(declared: Sequence[LayerMatrix], weights: LayerWeights, seen: LayerPass) -> dict[str, Tensor]:
    """The declared matrices `[T, T]` of one layer by name, none normalised."""
    tokens = len(seen.x)
    value_THd = seen.value.unflatten(-1, (weights.heads, -1))
    W_HdD = weights.output.W.unflatten(0, (weights.heads, -1))
    f_THD = torch.einsum("thd,hde->the", value_THd, W_HdD)
    full = _Layer.run(weights, seen.x, torch.einsum("hij,jhd->id", seen.attention, f_THD))
    # F_ij W_1 is linear in the heads: H products of a number and a vector, not D of them.
    g_THM = (_centred(f_THD) * weights.attention_norm.gamma) @ weights.feed_forward_in.W
    raw = {each.name: seen.x.new_empty(tokens, tokens) for each in declared}
    size = max(1, BLOCK_NUMBERS // (tokens * weights.feed_forward_in.W.shape[1]))
    for start in range(0, tokens, size):
        sources = slice(start, min(start + size, tokens))
        attention_JTH = seen.attention[:, :, sources].permute(2, 1, 0)
        block = SourceBlock(weights, full, seen.x, sources, attention_JTH, f_THD[sources], g_THM[sources])
        for each in declared:
            raw[each.name][:, sources] = each.formula(block).T
    return raw


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


@dataclass(frozen=True)
class SourceBlock:
    """What J sources give to each of T tokens in one layer."""

    weights: LayerWeights
    full: _Layer
    x_TD: Tensor
    sources: slice
    attention_JTH: Tensor
    f_JHD: Tensor
    """f_h(x_j)."""
    g_JHM: Tensor
    """The same, centred, times gamma and W_1 of the feed-forward network."""

    @cached_property
    def F_JTD(self) -> Tensor:
        """The F_ij."""
        return self.attention_JTH @ self.f_JHD

    @cached_property
    def T_JTD(self) -> Tensor:
        """The T_ij: R_ij through LayerNorm's linear part."""
        R_JTD = self.F_JTD.clone()
        rows = torch.arange(R_JTD.shape[0], device=R_JTD.device)
        R_JTD[rows, rows + self.sources.start] += self.x_TD[self.sources]
        return _centred(R_JTD) * self.weights.attention_norm.gamma / self.full.attention_deviation

    def through_output_norm(self) -> Tensor:
        """The T_ij through the second LayerNorm's linear part `[J, T, D]`."""
        return _centred(self.T_JTD) * self.weights.output_norm.gamma / self.full.output_deviation

    def output_without(self) -> Tensor:
        """The layer's output `[J, T, D]` with value j zero in all heads."""
        weights, norm = self.weights, self.weights.attention_norm
        residual_JTD = self.full.residual - self.F_JTD
        deviation_JT1 = _deviation(residual_JTD, norm)
        attention_norm_JTD = _centred(residual_JTD) * norm.gamma / deviation_JT1 + norm.beta
        first, second = weights.feed_forward_in, weights.feed_forward_out
        clean_TM = (_centred(self.full.residual) * norm.gamma) @ first.W
        without_JTM = clean_TM - self.attention_JTH @ self.g_JHM
        hidden_JTM = weights.activation(without_JTM / deviation_JT1 + (norm.beta @ first.W + first.b))
        return _layer_norm(attention_norm_JTD + hidden_JTM @ second.W + second.b, weights.output_norm)


def _centred(vectors: Tensor) -> Tensor:
    return vectors - vectors.mean(-1, keepdim=True)


def _deviation(vectors: Tensor, norm: Norm) -> Tensor:
    return (vectors.var(-1, keepdim=True, correction=0) + norm.eps).sqrt()


def _layer_norm(vectors: Tensor, norm: Norm) -> Tensor:
    return _centred(vectors) * norm.gamma / _deviation(vectors, norm) + norm.beta
