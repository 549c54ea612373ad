"""How a measure is declared, once, beside its formula: everything that is said of it anywhere else follows from that.

Columns of the tables, figures, page and documents read `RATIOS` of `attnmix.measures.ratios` and `MATRICES` of
`attnmix.measures.matrices`; the names that parameters allow stand in `attnmix.core.names`. Nothing heavy is imported
here or there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from attnmix.core.names import Mark


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A mixing ratio: how much of a token's vector comes from other tokens, in [0, 1]."""

    name: str
    mark: Mark
    formula: Callable[[Any], Any]
    """From a layer's `Parts` to the ratio `[N]` of N tokens."""
    definition: str
    """The formula as it stands in the documents."""
    source: str
    sentence: str
    """What one value says; `{layer}` and `{share}` are filled in."""
    covers: Literal["attention", "layer"] = "attention"
    """The part of a layer after which it is taken."""
    points: tuple[str, ...] = ()
    """What it reads of a forward pass beyond what all of them do."""
    headline: bool = False
    """Whether its mean is among the metrics."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A contribution matrix: what each source token gives to each token, in one layer or rolled out over several."""

    name: str
    label: str
    definition: str
    source: str
    rows: Literal["sum to 1", "made to sum to 1", "as they are"]


@dataclass(frozen=True, kw_only=True)
class LayerMatrix(Matrix):
    """One that describes a layer."""

    formula: Callable[[Any], Any]
    """From a `SourceBlock` to `[sources, tokens]`."""
    rollout: Literal["with identity", "as it is"] | None
    """How its product over the layers is taken, if it is."""

    def rolled_out(self) -> Matrix:
        """The rollout's own declaration."""
        return Matrix(
            name=f"{self.name}_rollout",
            label=f"{self.label} rollout",
            definition="R_l = (A_l + I)/2 R_{l-1}" if self.rollout == "with identity" else "R_l = C_l R_{l-1}",
            source="Abnar and Zuidema, ACL 2020" if self.rollout == "with identity" else self.source,
            rows="sum to 1",
        )
