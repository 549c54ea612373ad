"""Controls of the mixing ratios: the same ratios where something that they should depend on has been taken away.

A ratio that a control reproduces says nothing of what the control took away. Four come from the forward pass that is
measured anyway: three with other values v_j in place of x_j W_V + b_V, one without special tokens as sources. Attention
weights, skip connection and norms (with their deviations) stay as they are. `shuffled_words` and `random_weights` are
forward passes of their own.

Shapes: L layers, B documents, H heads, T tokens, R rows of T, N = B * T, G groups of tokens, C token classes or
controls, E = heads * head width, D hidden.
"""

import copy
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from attnmix.core.names import PREACTIVATION
from attnmix.measures.documents import CLASSES, POSITIONS, Document
from attnmix.measures.layers import LayerPass, map_layers
from attnmix.measures.micro_batches import MicroBatch
from attnmix.measures.ratios import LayerSplits, Split, apply_formulas, ratio_points, scaled_heads
from attnmix.measures.sinks import without_special_sources
from attnmix.models.attention import implementation_of
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
    "without_special_sources": Control(
        "F_ij = 0 for every special token j other than i; weights relative to those that are left"
    ),
}
"""Every control by its name."""
SAME_PASS = tuple(name for name, control in CONTROLS.items() if not control.own_pass)
RANDOM = "random"
"""The checkpoint of `random_weights`."""


class CorpusValues:
    """The mean value of each layer in a sample of texts, by group of tokens: token class and position."""

    def __init__(self, values_LGE: Tensor, counts_G: Tensor, names: Collection[str]) -> None:
        """Take sums of the values in float64, numbers of tokens, and the names of the texts that they come from."""
        self.values_LGE = values_LGE
        self.counts_G = counts_G
        self.names = names

    @classmethod
    def read(cls, base: PreTrainedModel, batches: Iterable[Sequence[Document]], pad: int) -> Self | None:
        """Return them from the forward passes of `batches` of documents; None without any."""
        sums_LGE = torch.zeros(())
        counts_G = torch.zeros(())
        names = set[str]()
        for documents in batches:
            batch = MicroBatch(documents, slice(None), base.device)
            members_NG = batch.members_BTG.flatten(0, 1)

            def summed(layer_pass: LayerPass, members_NG: Tensor = members_NG) -> Tensor:
                return members_NG.T @ layer_pass.value.flatten(0, 1).double()

            inputs = padded([document.ids.tolist() for document in documents], pad, base.device)
            layer_sums = map_layers(summed, base, inputs)
            sums_LGE = torch.stack(layer_sums) + sums_LGE
            counts_G = members_NG.sum(0) + counts_G
            names.update(batch.names)
        if not names:
            return None
        return cls(sums_LGE, counts_G, names)

    def mean_over_others(self, layer: int, micro_batch: MicroBatch, value_BTE: Tensor) -> Tensor:
        """Return the mean over the other texts for each token of some documents, whose own values are given.

        Where no other text has a token of the group, it is the mean of the tokens of its class; NaN without that.
        """
        members_BGT = micro_batch.members_within(self.names).mT
        sums_of_document_BGE = members_BGT @ value_BTE.double()
        sums_BGE = self.values_LGE[layer - 1] - sums_of_document_BGE
        counts_BG1 = (self.counts_G - members_BGT.sum(-1)).unsqueeze(-1)
        by_class = (len(CLASSES), len(POSITIONS))
        sums_BCE = sums_BGE.unflatten(1, by_class).sum(2)
        counts_BC1 = counts_BG1.unflatten(1, by_class).sum(2)
        # Without any token a sum is what rounding left of the difference, so it is not divided by 0.
        class_mean_BCE = torch.where(counts_BC1 > 0, sums_BCE / counts_BC1, torch.nan)
        class_mean_BGE = class_mean_BCE.repeat_interleave(len(POSITIONS), 1)
        mean_BGE = torch.where(counts_BG1 > 0, sums_BGE / counts_BG1, class_mean_BGE)
        mean_BTE = torch.take_along_dim(mean_BGE, micro_batch.groups_BT.unsqueeze(-1), 1).to(value_BTE)
        # A NaN of padding would pass on with a weight of 0.
        return mean_BTE.masked_fill(~micro_batch.mask_BT.unsqueeze(-1), 0)


def classes_without_others(documents: Sequence[Document], sample: Collection[int]) -> dict[int, str]:
    """Return a token class that no other text has, by the number of each document that `corpus_value` leaves out.

    `sample` has the numbers of the documents that `CorpusValues` are read from.
    """
    counts = [np.bincount(document.classes, minlength=len(CLASSES)) for document in documents]
    counts_NC = np.stack(counts)
    sampled = list(sample)
    sample_NC = np.zeros_like(counts_NC)
    sample_NC[sampled] = counts_NC[sampled]
    in_others_NC = sample_NC.sum(0) - sample_NC
    alone_NC = (counts_NC > 0) & (in_others_NC == 0)
    classes = {}
    for number in np.flatnonzero(alone_NC.any(1)):
        first_class = int(alone_NC[number].argmax())
        classes[int(number)] = CLASSES[first_class]
    return classes


def left_out_sentence(text: str, token_class: str, left_out: int, texts: int) -> str:
    """Return which of the `texts` are `left_out` of `corpus_value`, the first of them by its name, and why."""
    cause = f"no other text has a token of its class {token_class}"
    return f"corpus_value leaves out {left_out} of {texts} texts, first {text}: {cause}."


class ControlValues(NamedTuple):
    """The tensors of documents in one layer from which the values of `SAME_PASS` are computed."""

    bias_E: Tensor  # b_V
    corpus_BTE: Tensor  # the corpus values v_j
    mean_B1E: Tensor  # mean_k v_k over the document's tokens
    special_SB: Tensor  # positions of each document's special tokens, then -1


def control_ratios(methods: Sequence[str], layer_pass: LayerPass, splits: LayerSplits, values: ControlValues) -> Tensor:
    """Return the ratios of documents' tokens by each control of `SAME_PASS`, `[controls, methods, B, T]`.

    `splits` are those of all their tokens, as they are.
    """
    diagonal_BTH = layer_pass.diagonal
    without_bias, corpus, row_sums_BTH = _splits_of_other_values(layer_pass, values)
    weights_2BTH = torch.stack([diagonal_BTH, row_sums_BTH - diagonal_BTH])
    mean_BHD = _projected_heads(layer_pass, values.mean_B1E.squeeze(1))
    own_ND, others_ND = (weights_2BTH @ mean_BHD).flatten(1, 2)
    without_special = without_special_sources(layer_pass, splits, values.special_SB)
    attention_splits = {
        "text_mean_value": Split(own_ND, others_ND),
        "corpus_value": corpus,
        "without_value_bias": without_bias,
        "without_special_sources": without_special.projected,
    }

    mixed_weights = dict.fromkeys(SAME_PASS, splits.mixed_weight)
    mixed_weights["without_special_sources"] = without_special.mixed_weight
    mixed_weight_CN = torch.stack([mixed_weights[name] for name in SAME_PASS])

    layer = None
    if PREACTIVATION in ratio_points(methods):
        bias_HD = _projected_heads(layer_pass, values.bias_E)
        mean_layer, without_bias_layer = _layers_of_constants(splits, weights_2BTH, mean_BHD, bias_HD)
        layer_splits = {
            "text_mean_value": mean_layer,
            "corpus_value": splits.with_others(corpus, splits.mixed_weight).layer,
            "without_value_bias": without_bias_layer,
            "without_special_sources": without_special.layer_with_own(splits.layer.own),
        }
        layer = _stacked(layer_splits)

    controls = splits.with_others(_stacked(attention_splits), mixed_weight_CN, layer)
    ratios_MCN = apply_formulas(methods, controls)
    ratios_CMBT: Tensor = ratios_MCN.transpose(0, 1).unflatten(-1, diagonal_BTH.shape[:2])
    return ratios_CMBT


def _splits_of_other_values(layer_pass: LayerPass, values: ControlValues) -> tuple[Split, Split, Tensor]:
    """Return the splits of `without_value_bias` and `corpus_value`, and sum_j a^h_ij `[B, T, H]`.

    The others are summed without b_V too, not freed of it afterwards: where values are nothing but b_V, rounding would
    be all that is left, and a ratio of 1 that means nothing.
    """
    W_ED = layer_pass.block.output.W
    unbiased_BTE = layer_pass.value - values.bias_E
    values_2BTE = torch.stack([unbiased_BTE, values.corpus_BTE])
    heads = layer_pass.diagonal.shape[-1]
    values_2BHTd = values_2BTE.unflatten(-1, (heads, -1)).transpose(-2, -3)
    contexts, row_sums_BHT = layer_pass.attention.weighted_sums(values_2BHTd.unbind())
    attended_2BTE = torch.stack([context.transpose(1, 2).flatten(-2) for context in contexts])
    own_2BTD = scaled_heads(layer_pass.diagonal, values_2BTE) @ W_ED
    others_2BTD = attended_2BTE @ W_ED - own_2BTD
    unbiased_own_ND, corpus_own_ND = own_2BTD.flatten(1, 2)
    unbiased_others_ND, corpus_others_ND = others_2BTD.flatten(1, 2)
    without_bias = Split(unbiased_own_ND, unbiased_others_ND)
    corpus = Split(corpus_own_ND, corpus_others_ND)
    return without_bias, corpus, row_sums_BHT.transpose(1, 2)


def _projected_heads(layer_pass: LayerPass, vectors: Tensor) -> Tensor:
    """Return what each head makes of vectors `[..., E]` by its part of W_O, `[..., H, D]`."""
    W_ED = layer_pass.block.output.W
    heads = layer_pass.diagonal.shape[-1]
    W_HdD = W_ED.unflatten(0, (heads, -1))
    by_head = vectors.unflatten(-1, W_HdD.shape[:2])
    return torch.einsum("...hd,hde->...he", by_head, W_HdD)


def _stacked(splits: Mapping[str, Split]) -> Split:
    """Return the vectors `[N, D]` of the controls `SAME_PASS` as one split `[C, N, D]`."""
    in_order = [splits[name] for name in SAME_PASS]
    own_CND = torch.stack([split.own for split in in_order])
    others_CND = torch.stack([split.others for split in in_order])
    return Split(own_CND, others_CND)


def _layers_of_constants(
    splits: LayerSplits, weights_2BTH: Tensor, mean_BHD: Tensor, bias_HD: Tensor
) -> tuple[Split, Split]:
    """Return `LayerSplits.layer` of `text_mean_value` and of `without_value_bias`.

    Heads add multiples of one vector in both: `mean_BHD` is the vector of each head of a text that is every value's,
    `bias_HD` that of b_V. The network's first Linear takes the vectors of the heads, not the many sums of them.
    """
    rest = splits.rest
    norm = splits.block.attention_output_norm
    assert rest is not None
    divided_2NH = weights_2BTH.flatten(1, 2) / norm.deviation(splits.projected_ND)
    divided_2BTH = divided_2NH.view_as(weights_2BTH)
    means = rest.network_part(norm.linear(mean_BHD)).weighted(divided_2BTH)
    biases = rest.network_part(norm.linear(bias_HD)).weighted(divided_2BTH)
    mean_network = means.add_own(rest.network_part(splits.x_ND))
    without_bias_network = splits.network.minus(biases)
    return Split(*rest.output(mean_network)), Split(*rest.output(without_bias_network))


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
        order = np.argsort(new_rank[word_of_place], kind="stable")
        source[places] = places[order]
    return document.take(source)


def random_base(folder: Path, seed: int) -> PreTrainedModel:
    """Return `random_model` of the architecture in `folder`."""
    return random_model(load_config(folder), seed)


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Return a model of this architecture, as transformers initialises it after `torch.manual_seed(seed)`.

    As `load_base` gives it: without any head, in float32 and eval mode, its attention observed.
    """
    config = copy.deepcopy(config)  # a model writes into its own
    options = {"attn_implementation": implementation_of(config), "dtype": torch.float32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModel.from_config(config, **options)
    for_reading(model)
    return model
