"""The vectors of which contribution matrices are made, a block of sources at a time, and the rollouts; in float64.

float64, because 1 - cos of nearly equal vectors has no digits left in float32. Shapes: L layers, H heads,
T tokens, J sources of a block, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from attnmix.measures.layers import Block, LayerPass
from attnmix.measures.matrices import LayerMatrix

Tensor = torch.Tensor

MIN_RAW_SUM = 1e-4  # a Value Zeroing row with a smaller sum, before normalisation, shows no structure
BLOCK_NUMBERS = 2**22  # float64 numbers `[J, T, D]` of a block of sources


def contributions(
    declared: Sequence[LayerMatrix], by_layer: Sequence[dict[str, Tensor]], starts: Sequence[int] = (0,)
) -> dict[str, Tensor]:
    """Return the declared matrices of one document `[layers, T, T]`, normalised, and their rollouts, by name.

    `by_layer` comes from `layer_contributions`. A row of `value_zeroing` whose sum before normalisation is below
    `MIN_RAW_SUM` is NaN. In the rollout it counts as it is, and as the identity where nothing at all comes through
    attention. A rollout starts again at each of `starts`, since a decoder beside an encoder has its own tokens.
    """
    matrices: dict[str, Tensor] = {}
    for each in declared:
        raw = torch.stack([raw[each.name] for raw in by_layer])
        rows = matrices[each.name] = rows_to_one(raw) if each.rows == "made to sum to 1" else raw
        if each.rollout is not None:
            skipped = rows / 2 + _identity(rows) / 2 if each.rollout == "with identity" else rows
            stacks = skipped.tensor_split(list(starts[1:]))
            matrices[each.rolled_out().name] = torch.cat([rollout(stack) for stack in stacks])
        if each.name == "value_zeroing":
            matrices[each.name] = rows.masked_fill(raw.sum(-1, keepdim=True) < MIN_RAW_SUM, torch.nan)
    return matrices


def rows_to_one(matrix_TT: Tensor) -> Tensor:
    """Return rows divided by their sums; a row of zeros, to which nothing contributes, keeps the token as it is."""
    sums = matrix_TT.sum(-1, keepdim=True)
    return torch.where(sums > 0, matrix_TT / sums, _identity(matrix_TT))


def _identity(matrix_TT: Tensor) -> Tensor:
    return torch.eye(matrix_TT.shape[-1], dtype=matrix_TT.dtype, device=matrix_TT.device)


def rollout(matrices_LTT: Tensor) -> Tensor:
    """Return R_l = A_l R_{l-1} for each layer `[L, T, T]` (Abnar and Zuidema, ACL 2020, equation 1)."""
    rolled = [matrices_LTT[0]]
    for matrix in matrices_LTT[1:]:
        rolled.append(matrix @ rolled[-1])
    return torch.stack(rolled)


def layer_contributions(declared: Sequence[LayerMatrix], layer_pass: LayerPass) -> dict[str, Tensor]:
    """Return the declared matrices `[T, T]` of one document in one layer by name; the pass is float64."""
    tokens, block = len(layer_pass.x), layer_pass.block
    value_THd = layer_pass.attention.value.transpose(0, 1)
    W_HdD = block.output.W.unflatten(0, (value_THd.shape[1], -1))
    f_THD = torch.einsum("thd,hde->the", value_THd, W_HdD)
    full = _Full.of(layer_pass)
    raw = {each.name: layer_pass.x.new_empty(tokens, tokens) for each in declared}
    size = max(1, BLOCK_NUMBERS // (tokens * layer_pass.x.shape[-1]))
    for start in range(0, tokens, size):
        sources = slice(start, min(start + size, tokens))
        attention_JTH = full.weights_HTT[:, :, sources].permute(2, 1, 0)
        given = SourceBlock(layer_pass, full, sources, attention_JTH, f_THD[sources])
        for each in declared:
            raw[each.name][:, sources] = each.formula(given).T
    return raw


class _Full(NamedTuple):
    """One layer's vectors `[T, D]` with every source in place."""

    weights_HTT: Tensor
    projected: Tensor
    attended: Tensor  # attention_norm, or where there is none attention_residual
    output: Tensor

    @classmethod
    def of(cls, layer_pass: LayerPass) -> _Full:
        attention_output = layer_pass.features["attention_output"]
        attended = layer_pass.features.get("attention_norm", layer_pass.x + attention_output)
        output = layer_pass.block.rest(layer_pass.call, layer_pass.x, attention_output)
        return cls(layer_pass.attention.weights(), layer_pass.projected, attended, output)


@dataclass(frozen=True)
class SourceBlock:
    """The contributions of J sources to each of T tokens in one layer."""

    layer_pass: LayerPass
    full: _Full
    sources: slice
    attention_JTH: Tensor
    f_JHD: Tensor
    """f_h(x_j)."""

    @property
    def _block(self) -> Block:
        return self.layer_pass.block

    @cached_property
    def projected_JTD(self) -> Tensor:
        """What leaves W_O by each source."""
        return self.attention_JTH @ self.f_JHD

    @cached_property
    def F_JTD(self) -> Tensor:
        """The F_ij: where a norm stands on attention's output, through its linear part."""
        return self._block.attention_output_norm.part(self.projected_JTD, self.full.projected)

    @cached_property
    def T_JTD(self) -> Tensor:
        """The T_ij: R_ij through the linear part of the norm after the skip connection, where there is one."""
        R_JTD = self.F_JTD.clone()
        rows = torch.arange(R_JTD.shape[0], device=R_JTD.device)
        R_JTD[rows, rows + self.sources.start] += self.layer_pass.x[self.sources]
        whole = self.layer_pass.x + self.layer_pass.features["attention_output"]
        return self._block.attention_norm.part(R_JTD, whole)

    def through_output_norm(self) -> Tensor:
        """Return the T_ij through the linear parts of the LayerNorms that follow `[J, T, D]`."""
        features, attended, parts = self.layer_pass.features, self.full.attended, self.T_JTD
        if "cross_attention_norm" in features:
            parts = self._block.cross_attention_norm.part(parts, attended + features["cross_attention_output"])
            attended = features["cross_attention_norm"]
        return self._block.output_norm.part(parts, attended + features["ffn_output"])

    def output_without(self) -> Tensor:
        """Return the layer's output `[J, T, D]` with value j zero in all heads."""
        projected_JTD = self.full.projected - self.projected_JTD
        if path := self._block.stack.attention_output_norm:
            projected_JTD = self._block.layer.get_submodule(path)(projected_JTD)
        return self._block.rest(self.layer_pass.call, self.layer_pass.x, projected_JTD)
