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
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModel, PreTrainedModel

from attnmix.measures.documents import Document
from attnmix.measures.layers import LayerPass
from attnmix.measures.ratios import RATIOS, Parts, Split, scaled_heads
from attnmix.models.attention import OBSERVED, AttentionCall, attend
from attnmix.models.loading import load_config

Tensor = torch.Tensor


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
OWN_PASS = tuple(each.name for each in _DECLARED if not each.formula)
"""Those that take a forward pass of their own."""
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


def control_ratios(methods: Sequence[str], layer_pass: LayerPass, sources: Sources) -> list[list[Tensor]]:
    """Return the ratio `[N]` by each of `methods` for each control of `SAME_PASS`.

    `layer_pass` is that of one document's first N tokens.
    """
    diagonal_NH, value_TE = sources.diagonal_NH, sources.value_TE
    tokens = (1 - diagonal_NH.mean(-1), diagonal_NH, layer_pass.x, value_TE[: len(diagonal_NH)], layer_pass.projected)
    ratios = []
    for name in SAME_PASS:
        formula = CONTROLS[name].formula
        assert formula is not None
        parts = ControlParts(layer_pass.block, *tokens, layer_pass.features, formula(sources))
        ratios.append([RATIOS[method].formula(parts) for method in methods])
    return ratios


def shuffled_words(document: Document, seed: int) -> Document:
    """Return the document with its words in an order that follows from `seed` and its name, specials in place.

    Of a document that counts in part, its first `counted` tokens in the new order count.
    """
    digest = hashlib.sha256(document.name.encode()).digest()
    generator = np.random.default_rng([seed, int.from_bytes(digest[:8], "big")])
    places = np.flatnonzero(document.words >= 0)
    numbers, word_of_place = np.unique(document.words[places], return_inverse=True)
    new_rank = generator.permutation(len(numbers))
    source = np.arange(len(document))
    source[places] = places[np.argsort(new_rank[word_of_place], kind="stable")]
    return replace(document, ids=document.ids[source], classes=document.classes[source], words=document.words[source])


def random_base(folder: Path, seed: int) -> PreTrainedModel:
    """Return a model of the architecture in `folder`, as the library initialises it after `torch.manual_seed(seed)`.

    As `load_base` gives it: without any head, in float32 and eval mode, its attention to be looked into.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModel.from_config(
            load_config(folder), attn_implementation=OBSERVED, dtype=torch.float32
        )
    model.config.use_cache = False
    model.eval()
    return model


def attended_without_bias(call: AttentionCall, value_bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_j a^h_ij (v_j - b_V) `[B, T, E]`, exactly 0 where all values are b_V; and sum_j a^h_ij `[B, T, H]`."""
    value_BHTd = call.value - value_bias_E.unflatten(-1, (call.value.shape[-3], 1, -1))
    context_BHTd, without_sink = attend(
        None,
        call.query,
        call.key,
        value_BHTd,
        call.mask,
        scaling=call.scaling,
        is_causal=call.causal,
        softcap=call.softcap,
    )
    row_sums_BHT = (without_sink.log_sums - call.log_sums).exp()
    context_BHTd = context_BHTd * row_sums_BHT.unsqueeze(-1)
    return context_BHTd.transpose(-3, -2).flatten(-2), row_sums_BHT.transpose(-1, -2)
