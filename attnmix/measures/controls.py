"""Controls of the mixing ratios: the same ratios where something that they should depend on has been taken away.

A ratio that a control reproduces says nothing of what the control took away. Three come from the forward pass that is
measured anyway, with other values v_j in place of x_j W_V + b_V: attention weights, skip connection and norms (with
their deviations) stay as they are. `shuffled_words` and `random_weights` are forward passes of their own.

Shapes: L layers, H heads, T tokens of a document, G groups of tokens, E = heads * head width, D hidden.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from attnmix.measures.documents import CLASSES, POSITIONS, Document, position_groups
from attnmix.measures.layers import LayerPass, map_layers
from attnmix.measures.ratios import RATIOS, Parts, Split, rest_of_layer, scaled_heads
from attnmix.models.attention import AttentionCall, attend, implementation_of
from attnmix.models.checkpoint import load_config
from attnmix.models.encoding import padded
from attnmix.models.loading import for_reading


class Control(NamedTuple):
    """A control: what is taken away, and how."""

    definition: str  # as the documents show it
    own_pass: bool = False  # True if it takes a forward pass of its own


CONTROLS = {
    "random_weights": Control(
        "the same documents through the same architecture with weights as the library initialises them; checkpoint "
        "`random`",
        own_pass=True,
    ),
    "shuffled_words": Control(
        "the words of each document in random order, pieces of a word together, special tokens in place",
        own_pass=True,
    ),
    "text_mean_value": Control("v_j = mean_k (x_k W_V + b_V) for every source j, so F_ij = sum_h a^h_ij v^h W_O^h"),
    "corpus_value": Control(
        "v_j = the mean of x_k W_V + b_V over tokens k of other texts with j's token class and group of positions",
    ),
    "without_value_bias": Control("v_j = x_j W_V, so F_ij = sum_h a^h_ij x_j W_V^h W_O^h"),
}
"""Every control by its name."""
SAME_PASS = tuple(name for name, control in CONTROLS.items() if not control.own_pass)
OWN_PASS = tuple(name for name, control in CONTROLS.items() if control.own_pass)
RANDOM = "random"
"""The checkpoint of `random_weights`."""


class CorpusValues:
    """The mean value of each layer in a sample of texts, by group of tokens: token class and position."""

    def __init__(self, values_LGE: Tensor, counts_G: Tensor, names: Collection[str]) -> None:
        """Take sums of the values in float64, numbers of tokens, and the names of the texts that they come from."""
        self.values_LGE, self.counts_G, self.names = values_LGE, counts_G, names

    @classmethod
    def read(cls, base: PreTrainedModel, batches: Iterable[Sequence[Document]], pad: int) -> Self | None:
        """Return them from the forward passes of `batches` of documents; None without any."""
        sums: list[Tensor] = []
        counts_G, names = torch.zeros(len(CLASSES) * len(POSITIONS), dtype=torch.float64), set()
        for documents in batches:
            memberships = [_membership(document).to(base.device) for document in documents]
            inputs = padded([document.ids.tolist() for document in documents], pad, base.device)
            for layer, value_BTE in enumerate(map_layers(lambda layer_pass: layer_pass.value, base, inputs)):
                tokens = zip(memberships, value_BTE, strict=True)
                sum_GE = torch.stack([each.T @ value_TE[: len(each)].double() for each, value_TE in tokens]).sum(0)
                sums[layer:] = [sums[layer] + sum_GE if layer < len(sums) else sum_GE, *sums[layer + 1 :]]
            counts_G += torch.stack([each.sum(0) for each in memberships]).sum(0).cpu()
            names |= {document.name for document in documents}
        return cls(torch.stack(sums), counts_G.to(base.device), names) if sums else None

    def mean_over_others(self, layer: int, document: Document, value_TE: Tensor) -> Tensor:
        """Return the mean over the other texts for each token of a document, whose own values are given `[T, E]`.

        Where no other text has a token of the group, it is the mean of the tokens of its class; NaN without that.
        """
        membership_TG = _membership(document).to(value_TE.device)
        sums_GE, counts_G = self.values_LGE[layer - 1], self.counts_G
        if document.name in self.names:
            sums_GE = sums_GE - membership_TG.T @ value_TE.double()
            counts_G = counts_G - membership_TG.sum(0)
        sums_CE, counts_C = (each.unflatten(0, (len(CLASSES), -1)).sum(1) for each in (sums_GE, counts_G))
        # Without any token a sum is what rounding left of the difference, so it is not divided by 0.
        class_mean_CE = torch.where(counts_C[:, None] > 0, sums_CE / counts_C[:, None], torch.nan)
        class_mean_GE = class_mean_CE.repeat_interleave(len(POSITIONS), 0)
        mean_GE = torch.where(counts_G[:, None] > 0, sums_GE / counts_G[:, None], class_mean_GE)
        return mean_GE[membership_TG.argmax(-1)].to(value_TE)


def _membership(document: Document) -> Tensor:
    """Return the group of each token as rows with a single 1 `[T, G]`."""
    groups_T = document.classes.astype(np.int64) * len(POSITIONS) + position_groups(len(document))
    return torch.nn.functional.one_hot(torch.as_tensor(groups_T), len(CLASSES) * len(POSITIONS)).double()


class ControlValues(NamedTuple):
    """The tensors of one document in one layer from which the values of `SAME_PASS` are computed."""

    row_sums_TH: Tensor  # sum_j a^h_ij: 1, but for a softmax with a sink
    bias_E: Tensor  # b_V
    unbiased_TE: Tensor  # sum_j a^h_ij (v_j - b_V)
    corpus_TE: Tensor  # the corpus values v_j
    corpus_attended_TE: Tensor  # sum_j a^h_ij v_j of them


def control_ratios(methods: Sequence[str], layer_pass: LayerPass, values: ControlValues) -> Tensor:
    """Return the ratios of one document's T tokens by each control of `SAME_PASS`, `[controls, methods, T]`."""
    tokens, block, x_TD, projected_TD = len(layer_pass.x), layer_pass.block, layer_pass.x, layer_pass.projected
    diagonal_TH, value_TE = layer_pass.attention.diagonal()[:tokens], layer_pass.value[:tokens]
    W_HdD = block.output.W.unflatten(0, (diagonal_TH.shape[-1], -1))
    mean_Hd = value_TE.mean(0).view(W_HdD.shape[:2])
    f_HD = (mean_Hd.unsqueeze(-2) @ W_HdD).squeeze(-2)
    # The others are summed without b_V too, not freed of it afterwards: where values are nothing but b_V, rounding
    # would be all that is left, and a ratio of 1 that means nothing.
    own_TD = scaled_heads(diagonal_TH, value_TE - values.bias_E) @ block.output.W
    own_corpus_TD = scaled_heads(diagonal_TH, values.corpus_TE) @ block.output.W
    projected = {
        "text_mean_value": Split(diagonal_TH @ f_HD, (values.row_sums_TH - diagonal_TH) @ f_HD),
        "corpus_value": Split(own_corpus_TD, values.corpus_attended_TE @ block.output.W - own_corpus_TD),
        "without_value_bias": Split(own_TD, values.unbiased_TE @ block.output.W - own_TD),
    }
    weight_T, ratios = 1 - diagonal_TH.mean(-1), []
    rest = rest_of_layer(block, x_TD, projected_TD, layer_pass.features)
    for name in SAME_PASS:
        parts = Parts(block, weight_T, x_TD, projected_TD, projected[name], rest)
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
    for_reading(model)
    return model


def attended(call: AttentionCall, value_BTE: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_j a^h_ij v_j `[B, T, E]` of other values, exactly 0 where they are; and sum_j a^h_ij `[B, T, H]`."""
    value_BHTd = value_BTE.unflatten(-1, (call.value.shape[-3], -1)).transpose(-3, -2)
    options = {"scaling": call.scaling, "is_causal": call.causal, "softcap": call.softcap}
    context_BHTd, without_sink = attend(None, call.query, call.key, value_BHTd, call.mask, **options)
    row_sums_BHT = (without_sink.log_sums - call.log_sums).exp()
    context_BHTd = context_BHTd * row_sums_BHT.unsqueeze(-1)
    return context_BHTd.transpose(-3, -2).flatten(-2), row_sums_BHT.transpose(-1, -2)
