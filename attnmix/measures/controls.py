"""Controls of the mixing ratios: the same ratios where something that they should depend on has been taken away.

A ratio that a control reproduces says nothing of what the control took away. Two come from the forward pass that is
measured anyway, with other values v_j in place of x_j W_V + b_V: attention weights, skip connection and norms (with
their deviations) stay as they are. `shuffled_words` and `random_weights` are forward passes of their own.

Shapes: H heads, T tokens of a document, E = heads * head width, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, PreTrainedModel

from attnmix.core.lazy import cached_property
from attnmix.measures.documents import Document
from attnmix.measures.layers import LayerPass
from attnmix.measures.ratios import RATIOS, Parts, Split, scaled_heads
from attnmix.models.attention import OBSERVED, AttentionCall, attend
from attnmix.models.checkpoint import load_config

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Control:
    """A control: what is taken away, and how."""

    name: str
    label: str
    definition: str
    """The definition in the documents."""
    formula: Callable[[ControlParts], Split] | None = None
    """The output of W_O without b_O `[T, D]`, from the same forward pass; None: the control has a pass of its own."""


@dataclass(frozen=True)
class ControlParts(Parts):
    """All tokens of a document in one layer whose attention gives something else than it does."""

    formula: Callable[[ControlParts], Split]
    row_sums_TH: Tensor
    """sum_j a^h_ij: 1, but for a softmax with a sink."""
    value_bias_E: Tensor
    """b_V."""
    unbiased_TE: Tensor
    """sum_j a^h_ij (v_j - b_V)."""

    @cached_property
    def projected(self) -> Split:
        """The result of the control."""
        return self.formula(self)


def _text_mean_value(parts: ControlParts) -> Split:
    heads = parts.diagonal_NH.shape[-1]
    mean_Hd = parts.value_NE.mean(0).unflatten(-1, (heads, -1))
    f_HD = (mean_Hd.unsqueeze(-2) @ parts.block.output.W.unflatten(0, (heads, -1))).squeeze(-2)
    return Split(parts.diagonal_NH @ f_HD, (parts.row_sums_TH - parts.diagonal_NH) @ f_HD)


def _without_value_bias(parts: ControlParts) -> Split:
    # The others are summed without b_V too, not freed of it afterwards: where values are nothing but b_V, rounding
    # would be all that is left, and a ratio of 1 that means nothing.
    W, value_TE = parts.block.output.W, parts.value_NE - parts.value_bias_E
    own_TD = scaled_heads(parts.diagonal_NH, value_TE) @ W
    return Split(own_TD, parts.unbiased_TE @ W - own_TD)


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


def control_ratios(
    methods: Sequence[str], layer_pass: LayerPass, row_sums_TH: Tensor, value_bias_E: Tensor, unbiased_TE: Tensor
) -> Tensor:
    """Return the ratios of one document's T tokens by each control of `SAME_PASS`, `[controls, methods, T]`."""
    tokens = len(layer_pass.x)
    diagonal_TH, value_TE = layer_pass.attention.diagonal()[:tokens], layer_pass.value[:tokens]
    true = (1 - diagonal_TH.mean(-1), diagonal_TH, layer_pass.x, value_TE, layer_pass.projected, layer_pass.features)
    ratios = []
    for formula in filter(None, (control.formula for control in CONTROLS.values())):
        parts = ControlParts(layer_pass.block, *true, formula, row_sums_TH, value_bias_E, unbiased_TE)
        ratios.append(torch.stack([RATIOS[method].formula(parts) for method in methods]))
    return torch.stack(ratios)


def shuffled_words(document: Document, seed: int) -> Document:
    """Return the document with its words in an order that follows from `seed` and its name, specials in place."""
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

    As `load_base` gives it: without any head, in float32 and eval mode, its attention observed.
    """
    options = {"attn_implementation": OBSERVED, "dtype": torch.float32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModel.from_config(load_config(folder), **options)
    model.config.use_cache = False
    model.eval()
    return model


def attended_without_bias(call: AttentionCall, value_bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_j a^h_ij (v_j - b_V) `[B, T, E]`, exactly 0 where all values are b_V; and sum_j a^h_ij `[B, T, H]`."""
    value_BHTd = call.value - value_bias_E.unflatten(-1, (call.value.shape[-3], 1, -1))
    options = {"scaling": call.scaling, "is_causal": call.causal, "softcap": call.softcap}
    context_BHTd, without_sink = attend(None, call.query, call.key, value_BHTd, call.mask, **options)
    row_sums_BHT = (without_sink.log_sums - call.log_sums).exp()
    context_BHTd = context_BHTd * row_sums_BHT.unsqueeze(-1)
    return context_BHTd.transpose(-3, -2).flatten(-2), row_sums_BHT.transpose(-1, -2)
