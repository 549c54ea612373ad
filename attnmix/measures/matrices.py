"""Definitions and formulas of contribution matrices, whose entries are contributions of source token j to token i.

A formula receives a chunk of J sources, with the contribution vectors that `attnmix.measures.contributions` computes.
It returns contributions `[J, T]` of these sources to all T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from attnmix.core.names import EXCHANGE, ROLLOUT

if TYPE_CHECKING:  # Figures and the page import this module without torch.
    from torch import Tensor

    from attnmix.measures.contributions import SourceChunk


MIN_RAW_SUM = 1e-4  # minimum sum of a row of Value Zeroing before normalisation


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix of contributions of source tokens to tokens, in one layer or rolled out over several layers."""

    name: str
    definition: str  # the formula as printed in the documentation
    source: str  # the publication, or another origin of the definition
    rows: Literal["sum to 1", "made to sum to 1", "as they are"]
    min_raw_sum: float = float("-inf")
    """Minimum sum of a row before normalisation. Rows with smaller sums are not meaningful."""


@dataclass(frozen=True, kw_only=True)
class LayerMatrix(Matrix):
    """A contribution matrix of one layer."""

    formula: Callable[[Any], Any]  # from a `SourceChunk` to `[sources, tokens]`
    rollout: Literal["with identity", "as it is"] | None  # kind of product over the layers; None for no rollout

    def rolled_out(self) -> Matrix:
        """Return the declaration of the matrix that is the rollout of this matrix over the layers.

        The rollout R_l is the product of the matrices C of layers 1 to l. If `rollout` is "with identity", C is the
        mean of the attention matrix A and the identity matrix I, which represents the skip connection.
        """
        definition = "R_l = C_l R_{l-1}"
        source = self.source
        if self.rollout == "with identity":
            definition = "R_l = (A_l + I)/2 R_{l-1}"
            source = "Abnar and Zuidema, ACL 2020"
        return Matrix(
            name=self.name + ROLLOUT,
            definition=definition,
            source=source,
            rows="sum to 1",
        )


def _compute_alti(chunk: SourceChunk) -> Tensor:
    """Return max(0, |y_i|_1 - |y_i - T_ij|_1) `[J, T]`, where T_ij is the contribution of source j to the vector y_i.

    y_i is the vector of token i after attention's skip connection and the norm that follows, if any.
    """
    y_TD = chunk.layer_pass.attended
    length_T = y_TD.abs().sum(-1)
    distance_JT = (y_TD - chunk.T_JTD).abs().sum(-1)
    decrease_JT: Tensor = length_T - distance_JT
    return decrease_JT.clamp_min(0)


def _project_contributions(chunk: SourceChunk) -> Tensor:
    """Return the signed share `[J, T]` of each source in the output o_i of W_O, by projection onto o_i.

    The contributions of the sources include b_V, whereas b_O is not attributed to any source. The shares of all sources
    of the text, not only of the J sources of the chunk, therefore sum to 1 - <b_O, o_i> / |o_i|^2 for each token i.
    """
    output_TD = chunk.layer_pass.projected
    products_JT = (chunk.projected_JTD * output_TD).sum(-1)
    return products_JT / output_TD.square().sum(-1)


def _compute_rotation(chunk: SourceChunk, part_JTD: Tensor) -> Tensor:
    """Return 1 - cos `[J, T]` between the layer's outputs with and without `part_JTD` in the output of W_O."""
    # Half the squared distance of unit vectors equals 1 - cos, but avoids its cancellation errors.
    with_part_TD = _scale_to_unit(chunk.layer_pass.output)
    without_part_JTD = _scale_to_unit(chunk.output_without(part_JTD))
    squared_distance_JT: Tensor = (with_part_TD - without_part_JTD).square().sum(-1)
    return squared_distance_JT / 2


def _scale_to_unit(vectors: Tensor) -> Tensor:
    """Return vectors `[..., D]` scaled to length 1."""
    unit_vectors: Tensor = vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return unit_vectors


_DECLARED = (
    LayerMatrix(
        name="attention",
        formula=lambda chunk: chunk.attention_JTH.mean(-1),
        definition="mean of a^h_ij over heads",
        source="weights only",
        rows="sum to 1",
        rollout="with identity",
    ),
    LayerMatrix(
        name="norm",
        formula=lambda chunk: chunk.F_JTD.norm(dim=-1),
        definition="|F_ij|",
        source="Kobayashi et al., EMNLP 2020, equation 5",
        rows="as they are",
        rollout=None,  # A rollout without the second LayerNorm would be misleading (Modarressi et al., 2022).
    ),
    LayerMatrix(
        name="contribution_weights",
        formula=_project_contributions,
        definition="<c_ij, o_i> / |o_i|^2, c_ij = sum_h a^h_ij f_h(x_j), o_i the output of W_O",
        source="Cunningham and Cirone, ICML 2026, summed over heads",
        rows="as they are",
        rollout=None,
    ),
    LayerMatrix(
        name="value_zeroing",
        formula=lambda chunk: _compute_rotation(chunk, chunk.projected_JTD),
        definition="1 - cos of the whole layer's output with and without value j",
        source="Mohebbi et al., EACL 2023, equation 7",
        rows="made to sum to 1",
        rollout="as it is",
        min_raw_sum=MIN_RAW_SUM,
    ),
    LayerMatrix(
        name="value_zeroing_without_bias",
        formula=lambda chunk: _compute_rotation(chunk, chunk.projected_JTD - chunk.bias_JTD),
        definition="1 - cos of the whole layer's output with value j and with b_V in its place",
        source="Mohebbi et al., EACL 2023, with b_V for 0",
        rows="made to sum to 1",
        rollout="as it is",
        min_raw_sum=MIN_RAW_SUM,
    ),
    LayerMatrix(
        name="alti",
        formula=_compute_alti,
        definition="max(0, |y_i|_1 - |y_i - T_ij|_1), y_i after LayerNorm; pre-LN: after the skip, with R_ij",
        source="Ferrando et al., EMNLP 2022, equation 8",
        rows="made to sum to 1",
        rollout="as it is",
    ),
    LayerMatrix(
        name="globenc",
        formula=lambda chunk: chunk.through_output_norm().norm(dim=-1),
        definition="|T_ij through the second LayerNorm|",
        source="Modarressi et al., NAACL 2022, N_ENC",
        rows="made to sum to 1",
        rollout="as it is",
    ),
)
LAYER_MATRICES: dict[str, LayerMatrix] = {matrix.name: matrix for matrix in _DECLARED}
ROLLOUTS: dict[str, Matrix] = {matrix.rolled_out().name: matrix.rolled_out() for matrix in _DECLARED if matrix.rollout}
MATRICES: dict[str, Matrix] = {**LAYER_MATRICES, **ROLLOUTS}
"""All contribution matrices by name, in the order of `MATRIX_NAMES`: single layers, then rollouts."""

_EXCHANGE = Matrix(
    name=EXCHANGE,
    definition="|y_i(x'_j, x_{-j}) - y_i(x)| / |y_i(x)|, from the input: only token j is replaced by a donor's",
    source="docs/measures/exchange.md",
    rows="as they are",
)
RESULT_MATRICES: dict[str, Matrix] = {**MATRICES, EXCHANGE: _EXCHANGE}
"""Matrices that `Measures.matrix` returns: `MATRICES` and `exchange`, which also needs donor texts."""
TOKEN_POSITIONS = 128
"""Maximum number of a text's tokens whose own shares are measured by exchange; in longer texts, these are sampled."""


def sort_matrices(names: Collection[str]) -> list[str]:
    """Return the matrix names in `names`, in the order of `MATRICES`."""
    return [name for name in MATRICES if name in names]


def with_rollout(name: str) -> list[str]:
    """Return the names of a matrix and of its rollout, if any; `name` may be either of the two names."""
    layer_name = name.removesuffix(ROLLOUT)
    return [other for other in RESULT_MATRICES if other.removesuffix(ROLLOUT) == layer_name]


def select_layer_matrices(names: Collection[str]) -> list[LayerMatrix]:
    """Return the layer matrices from which the matrices and rollouts in `names` are computed."""
    needed = {name.removesuffix(ROLLOUT) for name in names}
    return [matrix for name, matrix in LAYER_MATRICES.items() if name in needed]
