"""Controls of the mixing ratios: the same ratios where something that they should depend on has been taken away.

A ratio that a control reproduces says nothing of what the control took away. Two come from the forward pass that is
measured anyway, with other values v_j in place of x_j W_V + b_V: attention weights, skip connection and norms (with
their deviations) stay as they are. `shuffled_words` and `random_weights` are forward passes of their own.

Shapes: H heads, T tokens of a document, E = heads * head width, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModel, PreTrainedModel

from attnmix.measures.documents import Document
from attnmix.measures.layers import LayerPass
from attnmix.measures.ratios import RATIOS, Parts, Split, scaled_heads
from attnmix.models.attention import AttentionCall, attend, implementation_of
from attnmix.models.checkpoint import load_config

Tensor = torch.Tensor


class Control(NamedTuple):
    """A control: what is taken away, and how."""

    name: str
    label: str
    definition: str  # as the documents show it
    own_pass: bool  # True if it takes a forward pass of its own


CONTROLS = {
    each.name: each
    for each in (
        Control(
            "random_weights",
            "Random weights",
            "the same documents through the same architecture with weights as the library initialises them; "
            "checkpoint `random`",
            own_pass=True,
        ),
        Control(
            "shuffled_words",
            "Shuffled words",
            "the words of each document in random order, pieces of a word together, special tokens in place",
            own_pass=True,
        ),
        Control(
            "text_mean_value",
            "Text's mean value",
            "v_j = mean_k (x_k W_V + b_V) for every source j, so F_ij = sum_h a^h_ij v^h W_O^h",
            own_pass=False,
        ),
        Control(
            "without_value_bias",
            "Without value bias",
            "v_j = x_j W_V, so F_ij = sum_h a^h_ij x_j W_V^h W_O^h",
            own_pass=False,
        ),
    )
}
"""Every control by its name."""
SAME_PASS = tuple(name for name, control in CONTROLS.items() if not control.own_pass)
OWN_PASS = tuple(name for name, control in CONTROLS.items() if control.own_pass)
RANDOM = "random"
"""The checkpoint of `random_weights`."""


def control_ratios(
    methods: Sequence[str], layer_pass: LayerPass, row_sums_TH: Tensor, value_bias_E: Tensor, unbiased_TE: Tensor
) -> Tensor:
    """Return the ratios of one document's T tokens by each control of `SAME_PASS`, `[controls, methods, T]`.

    The sums over a row, sum_j a^h_ij (1, but for a softmax with a sink) and sum_j a^h_ij (v_j - b_V), are those of
    `attended_without_bias`; `value_bias_E` is b_V.
    """
    tokens, block, x_TD, projected_TD = len(layer_pass.x), layer_pass.block, layer_pass.x, layer_pass.projected
    diagonal_TH, value_TE = layer_pass.attention.diagonal()[:tokens], layer_pass.value[:tokens]
    W_HdD = block.output.W.unflatten(0, (diagonal_TH.shape[-1], -1))
    mean_Hd = value_TE.mean(0).view(W_HdD.shape[:2])
    f_HD = (mean_Hd.unsqueeze(-2) @ W_HdD).squeeze(-2)
    # The others are summed without b_V too, not freed of it afterwards: where values are nothing but b_V, rounding
    # would be all that is left, and a ratio of 1 that means nothing.
    own_TD = scaled_heads(diagonal_TH, value_TE - value_bias_E) @ block.output.W
    projected = {
        "text_mean_value": Split(diagonal_TH @ f_HD, (row_sums_TH - diagonal_TH) @ f_HD),
        "without_value_bias": Split(own_TD, unbiased_TE @ block.output.W - own_TD),
    }
    weight_T, ratios = 1 - diagonal_TH.mean(-1), []
    for name in SAME_PASS:
        parts = Parts(block, weight_T, x_TD, projected_TD, projected[name], layer_pass.features)
        ratios.append(torch.stack([RATIOS[method].formula(parts) for method in methods]))
    return torch.stack(ratios)


def shuffled_words(document: Document, seed: int) -> Document:
    """Return the document with its words in an order that follows from `seed` and its name, specials in place.

    Each text of a pair keeps its words.
    """
    digest = hashlib.sha256(document.name.encode()).digest()
    generator = np.random.default_rng([seed, int.from_bytes(digest[:8], "big")])
    source = np.arange(len(document))
    texts = np.zeros(len(document)) if document.segments is None else document.segments
    for text in (0, 1):
        places = np.flatnonzero((document.words >= 0) & (texts == text))
        numbers, word_of_place = np.unique(document.words[places], return_inverse=True)
        new_rank = generator.permutation(len(numbers))
        source[places] = places[np.argsort(new_rank[word_of_place], kind="stable")]
    return document.take(source)


def random_base(folder: Path, seed: int) -> PreTrainedModel:
    """Return a model of the architecture in `folder`, as the library initialises it after `torch.manual_seed(seed)`.

    As `load_base` gives it: without any head, in float32 and eval mode, its attention observed.
    """
    config = load_config(folder)
    options = {"attn_implementation": implementation_of(config), "dtype": torch.float32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModel.from_config(config, **options)
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
