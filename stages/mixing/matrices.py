"""Contribution matrices: what each source token j gives to each token i, declared with their formulas.

A formula gives `[J, T]` for a block of J sources and all T tokens. Shapes: H heads, D hidden, M width of the
feed-forward network. The vectors themselves are computed by `stages.mixing.contributions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stages.mixing.declared import LayerMatrix, Matrix
from stages.mixing.ratios import length

if TYPE_CHECKING:  # parameters and figures read the declarations, and need no torch
    from torch import Tensor

    from stages.mixing.contributions import SourceBlock

LAYER_MATRICES: dict[str, LayerMatrix] = {}
ROLLOUTS: dict[str, Matrix] = {}
_ROLLED_OUT = {
    "with identity": ("R_l = (A_l + I)/2 R_{l-1}", "Abnar and Zuidema, ACL 2020"),
    "as it is": ("R_l = C_l R_{l-1}, no identity added", "as its layer's matrix"),
}
_Formula = Callable[["SourceBlock"], "Tensor"]


def matrix(name: str, rollout: Any, **words: Any) -> Callable[[_Formula], _Formula]:
    """Declare the decorated formula as the contribution matrix `name`, and its rollout: `with identity` or `as it is`.

    `words` are the other fields of `Matrix`.
    """

    def declare(formula: _Formula) -> _Formula:
        LAYER_MATRICES[name] = LayerMatrix(name, **words, rollout=rollout, formula=formula)
        if rollout is not None:
            definition, source = _ROLLED_OUT[rollout]
            rolled = f"{name}_rollout"
            ROLLOUTS[rolled] = Matrix(rolled, f"{words['label']} rollout", definition, source, "sum to 1")
        return formula

    return declare


@matrix(
    "attention",
    label="Attention",
    definition="mean of a^h_ij over heads",
    source="weights only",
    rows="sum to 1",
    rollout="with identity",
)
def attention(block: SourceBlock) -> Tensor:
    """The attention weights."""
    return block.attention_JTH.mean(-1)


@matrix(
    "norm",
    label="Norm-based",
    definition="|F_ij|",
    source="Kobayashi et al., EMNLP 2020",
    rows="as they are",
    rollout=None,  # without the second LayerNorm it would say the wrong thing (Modarressi et al. 2022)
)
def norm(block: SourceBlock) -> Tensor:
    """Kobayashi et al. 2020, equation 5."""
    return length(block.F_JTD)


@matrix(
    "value_zeroing",
    label="Value Zeroing",
    definition="1 - cos of the whole layer's output with and without value j",
    source="Mohebbi et al., EACL 2023",
    rows="made to sum to 1",
    rollout="as it is",
)
def value_zeroing(block: SourceBlock) -> Tensor:
    """Mohebbi et al. 2023, equation 7."""
    # Half the squared distance of unit vectors: 1 - cos itself would cancel.
    apart: Tensor = _unit(block.full.output) - _unit(block.output_without())
    return apart.square().sum(-1) / 2


@matrix(
    "alti",
    label="ALTI",
    definition="max(0, |y_i|_1 - |y_i - T_ij|_1), y_i after LayerNorm",
    source="Ferrando et al., EMNLP 2022",
    rows="made to sum to 1",
    rollout="as it is",
)
def alti(block: SourceBlock) -> Tensor:
    """Ferrando et al. 2022, equation 8."""
    y_TD = block.full.attention_norm
    return (y_TD.abs().sum(-1) - (y_TD - block.T_JTD).abs().sum(-1)).clamp_min(0)


@matrix(
    "globenc",
    label="GlobEnc",
    definition="|T_ij through the second LayerNorm|",
    source="Modarressi et al., NAACL 2022",
    rows="made to sum to 1",
    rollout="as it is",
)
def globenc(block: SourceBlock) -> Tensor:
    """Modarressi et al. 2022, N_ENC."""
    return length(block.through_output_norm())


def _unit(vectors: Tensor) -> Tensor:
    return vectors / length(vectors).unsqueeze(-1).clamp_min(1e-12)


MATRICES: dict[str, Matrix] = {**LAYER_MATRICES, **ROLLOUTS}
"""Every contribution matrix by its name: those of one layer, then their rollouts."""


def with_rollouts(names: Any) -> list[str]:
    """Those of `names` and their rollouts, in the order of `MATRICES`."""
    return [name for name in MATRICES if name.removesuffix("_rollout") in names]
