"""Controls of the mixing ratios: the same ratios where something that they should depend on has been taken away.

A ratio that a control reproduces says nothing of what the control took away. Two come from the forward pass that is
measured anyway, with other values v_j in place of x_j W_V + b_V: attention weights, skip connection and norms (with
their deviations) stay as they are. `shuffled_words` and `random_weights` are forward passes of their own.

Shapes: H heads, T tokens of a document, N of them that count, E = heads * head width, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnmix.measures.ratios import RATIOS, Parts, Split, scaled_heads

if TYPE_CHECKING:  # tables and documents read the declarations, and need no torch
    from torch import Tensor

    from attnmix.measures.documents import Document
    from attnmix.measures.layers import LayerPass


class Sources(NamedTuple):
    """What the sources of a document's first N tokens give in one layer; T real tokens, padding excluded."""

    W: Tensor  # W_O [E, D]
    diagonal_NH: Tensor  # a^h_ii
    row_sums_NH: Tensor  # sum_j a^h_ij: 1, but for a softmax with a sink
    value_TE: Tensor
    value_bias_E: Tensor  # b_V
    unbiased_NE: Tensor  # sum_j a^h_ij (v_j - b_V)


@dataclass(frozen=True, kw_only=True)
class Control:
    """What is taken away, and how."""

    name: str
    label: str
    definition: str
    """What is measured, as it stands in the documents."""
    formula: Callable[[Sources], Split] | None = None
    """What leaves W_O without b_O `[N, D]`, from the forward pass itself; None: it takes one of its own."""


def _text_mean_value(sources: Sources) -> Split:
    heads = sources.diagonal_NH.shape[-1]
    mean_Hd = sources.value_TE.mean(0).unflatten(-1, (heads, -1))
    f_HD = (mean_Hd.unsqueeze(-2) @ sources.W.unflatten(0, (heads, -1))).squeeze(-2)
    return Split(sources.diagonal_NH @ f_HD, (sources.row_sums_NH - sources.diagonal_NH) @ f_HD)


def _without_value_bias(sources: Sources) -> Split:
    # The others are summed without b_V too, not freed of it afterwards: where values are nothing but b_V, rounding
    # would be all that is left, and a ratio of 1 that means nothing.
    value_NE = sources.value_TE[: len(sources.diagonal_NH)] - sources.value_bias_E
    own_ND = scaled_heads(sources.diagonal_NH, value_NE) @ sources.W
    return Split(own_ND, sources.unbiased_NE @ sources.W - own_ND)


_DECLARED = (
    Control(
        name="random_weights",
        label="Random weights",
        definition="the same documents through the same architecture with weights as the library initialises them; "
        "checkpoint `random`",
    ),
    Control(
        name="shuffled_words",
        label="Shuffled words",
        definition="the words of each document in random order, pieces of a word together, special tokens in place",
    ),
    Control(
        name="text_mean_value",
        label="Text's mean value",
        definition="v_j = mean_k (x_k W_V + b_V) for every source j, so F_ij = sum_h a^h_ij v^h W_O^h",
        formula=_text_mean_value,
    ),
    Control(
        name="without_value_bias",
        label="Without value bias",
        definition="v_j = x_j W_V, so F_ij = sum_h a^h_ij x_j W_V^h W_O^h",
        formula=_without_value_bias,
    ),
)
CONTROLS: dict[str, Control] = {each.name: each for each in _DECLARED}
"""Every control by its name."""
SAME_PASS = tuple(each.name for each in _DECLARED if each.formula)
"""Those that come from the forward pass of what they control."""
RANDOM = "random"
"""The checkpoint of `random_weights`."""


@dataclass(frozen=True)
class ControlParts(Parts):
    """Tokens whose attention gives something else than it does."""

    given: Split

    @cached_property
    def projected(self) -> Split:
        """What the control makes of it."""
        return self.given


def control_ratios(methods: Sequence[str], seen: LayerPass, sources: Sources) -> list[list[Tensor]]:
    """The ratio `[N]` by each of `methods` for each control of `SAME_PASS`; `seen` is one document's first N tokens."""
    mixed_weight_N = 1 - sources.diagonal_NH.mean(-1)
    value_NE = sources.value_TE[: len(mixed_weight_N)]
    found = []
    for control in CONTROLS.values():
        if control.formula is not None:
            given = control.formula(sources)
            parts = ControlParts(
                seen.block,
                mixed_weight_N,
                sources.diagonal_NH,
                seen.x,
                value_NE,
                seen.projected,
                seen.features,
                given,
            )
            found.append([RATIOS[method].formula(parts) for method in methods])
    return found


def shuffled_words(document: Document, seed: int) -> Document:
    """The document with its words in an order that follows from `seed` and its name, specials in place.

    Of a document that counts in part, its first `counted` tokens in the new order count.
    """
    digest = hashlib.sha256(document.name.encode()).digest()
    generator = np.random.default_rng([seed, int.from_bytes(digest[:8], "big")])
    places = np.flatnonzero(document.words >= 0)
    numbers, of_place = np.unique(document.words[places], return_inverse=True)
    new_rank = generator.permutation(len(numbers))
    source = np.arange(len(document))
    source[places] = places[np.argsort(new_rank[of_place], kind="stable")]
    return replace(document, ids=document.ids[source], classes=document.classes[source], words=document.words[source])
