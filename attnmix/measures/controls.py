"""Control conditions: each computes the mixing ratios without a property that should affect the ratios.

If a control reproduces a ratio, the ratio does not reflect the removed property. Four controls reuse the forward pass
that computes the ratios: three replace the values v_j = x_j W_V + b_V, and one excludes special tokens (sinks) from the
sources. The skip connection and the norms (including the standard deviations by which they divide) remain unchanged.
The attention weights also remain unchanged, with one exception: for the two ratios of weights (`attn_w` and
`attnres_w`), `without_special_sources` renormalises them over the remaining sources. `shuffled_words` and
`random_weights` require separate forward passes.

Shapes: L layers, B texts, H heads, T tokens, R rows of T, N = B * T, G groups of tokens, C token classes or controls,
S special tokens of a text, d head width, E = H * d, D hidden.
"""

import copy
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from attnmix.core.names import PREACTIVATION
from attnmix.measures.documents import CLASSES, POSITIONS, Document
from attnmix.measures.layers import LayerPass, NetworkPart, map_layers
from attnmix.measures.micro_batches import MicroBatch
from attnmix.measures.ratios import LayerSplits, Split, apply_formulas, ratio_points, scaled_heads
from attnmix.measures.sinks import weights_on_special
from attnmix.models.attention import implementation_of
from attnmix.models.checkpoint import load_config
from attnmix.models.encoding import padded
from attnmix.models.loading import for_reading


class Control(NamedTuple):
    """A control condition with which mixing ratios are compared."""

    definition: str  # as printed in the documentation
    own_pass: bool = False  # True if it requires a separate forward pass


CONTROLS = {
    "random_weights": Control(
        "the same texts in the same architecture with random initial weights of transformers; checkpoint `random`",
        own_pass=True,
    ),
    "shuffled_words": Control(
        "the words of each text in random order, with subwords kept together and special tokens in place",
        own_pass=True,
    ),
    "text_mean_value": Control("v_j = mean_k (x_k W_V + b_V) for every source j, so F_ij = sum_h a^h_ij v^h W_O^h"),
    "corpus_value": Control(
        "v_j = the mean of x_k W_V + b_V over tokens k of other texts with j's token class and range of positions",
    ),
    "without_value_bias": Control("v_j = x_j W_V, so F_ij = sum_h a^h_ij x_j W_V^h W_O^h"),
    "without_special_sources": Control(
        "F_ij = 0 for every special token j other than i; weights renormalised over the remaining sources"
    ),
}
"""All controls by name, in the order of `RATIO_CONTROL_NAMES`."""
SAME_PASS = tuple(name for name, control in CONTROLS.items() if not control.own_pass)
RANDOM = "random"
"""The name of the checkpoint with the random weights of `random_weights`."""


class CorpusValues:
    """Mean value vectors in a sample of texts, by layer and group of tokens (token class and position)."""

    def __init__(self, values_LGE: Tensor, counts_G: Tensor, names: Collection[str]) -> None:
        """Store the sums of the values in float64, the token counts, and the names of the sampled texts."""
        self.values_LGE = values_LGE
        self.counts_G = counts_G
        self.names = names

    @classmethod
    def read(cls, base: PreTrainedModel, batches: Iterable[Sequence[Document]], pad: int) -> Self | None:
        """Sum the value vectors of each layer and group of tokens over all `batches`, with one forward pass per batch.

        A group is a combination of a token class and a range of positions. Return None if `batches` is empty, for
        example because there is only one text. The names of the sampled texts are stored, because `mean_over_others`
        subtracts the values of a text only if the text was sampled. `pad` is the ID of the padding token.
        """
        # Replaced by a tensor `[L, G, E]` when the first batch is added; E is the width of all heads together.
        sums_LGE = torch.zeros(())
        counts_G = torch.zeros(())
        names_of_texts = set[str]()
        for documents in batches:
            batch = MicroBatch(documents, places=slice(None), device=base.device)  # all documents
            members_NG = batch.members_BTG.flatten(0, 1)
            ids = [document.ids.tolist() for document in documents]
            inputs = padded(ids, pad, base.device)
            layer_sums = map_layers(partial(_sum_by_group, members_NG), base, inputs)
            sums_LGE = torch.stack(layer_sums) + sums_LGE
            counts_G = members_NG.sum(0) + counts_G
            names_of_texts.update(batch.names)
        has_batches = len(names_of_texts) > 0  # each batch has at least one text
        if not has_batches:
            return None
        return cls(sums_LGE, counts_G, names_of_texts)

    def mean_over_others(self, layer: int, micro_batch: MicroBatch, value_BTE: Tensor) -> Tensor:
        """Return, for each token of `micro_batch`, a layer's mean value vector over the other texts, `[B, T, E]`.

        The mean of a token covers all tokens of its group (a combination of token class and range of positions) in the
        other sampled texts. If there are none, `_average_groups` returns the mean over the token class, or NaN if no
        other sampled text has this class. To exclude a sampled text from its own means, its values, which `value_BTE`
        contains for the micro-batch, are subtracted from the sums of the sample.
        """
        members_BGT = micro_batch.members_within(self.names).mT  # zeros for texts outside the sample
        sums_of_document_BGE = members_BGT @ value_BTE.double()
        counts_of_document_BG = members_BGT.sum(-1)
        sums_BGE = self.values_LGE[layer - 1] - sums_of_document_BGE  # layers are numbered from 1
        counts_BG = self.counts_G - counts_of_document_BG
        mean_BGE = _average_groups(sums_BGE, counts_BG.unsqueeze(-1))
        # Select the mean of each token's group (G).
        group_BT1 = micro_batch.groups_BT.unsqueeze(-1)
        mean_BTE = torch.take_along_dim(mean_BGE, group_BT1, 1).to(value_BTE)
        # NaN in padding would propagate to tokens, even if the attention weights on padding are 0.
        is_padding_BT = ~micro_batch.mask_BT
        return mean_BTE.masked_fill(is_padding_BT.unsqueeze(-1), 0)


def _average_groups(sums_BGE: Tensor, counts_BG1: Tensor) -> Tensor:
    """Return the mean `[B, G, E]` of each group or, if the group has no tokens, of all tokens of its class.

    A group is a combination of a token class (C) and a range of positions. The mean is NaN if the class has no tokens.
    """
    classes_and_positions = (len(CLASSES), len(POSITIONS))
    sums_BCE = sums_BGE.unflatten(1, classes_and_positions).sum(2)
    counts_BC1 = counts_BG1.unflatten(1, classes_and_positions).sum(2)
    # If the count is 0, the sum is only a rounding error of a difference of sums, and the mean is undefined.
    class_mean_BCE = torch.where(counts_BC1 > 0, sums_BCE / counts_BC1, torch.nan)
    class_mean_BGE = class_mean_BCE.repeat_interleave(len(POSITIONS), 1)  # the same mean for all groups of a class
    return torch.where(counts_BG1 > 0, sums_BGE / counts_BG1, class_mean_BGE)


def _sum_by_group(members_NG: Tensor, layer_pass: LayerPass) -> Tensor:
    """Return the sums `[G, E]` of a layer's values over the tokens of each group.

    `members_NG` is the one-hot encoding of each token's group, with zeros for padding.
    """
    value_NE = layer_pass.value.flatten(0, 1)
    return members_NG.T @ value_NE.double()


def classes_without_others(documents: Sequence[Document], sample: Collection[int]) -> dict[int, str]:
    """Return a token class for each text that `corpus_value` excludes; the keys are the indices of these texts.

    The control `corpus_value` replaces the value of a token by a mean over tokens of the same class in other texts. A
    text is therefore excluded if one of its token classes occurs in no other text of the sample for `CorpusValues`. The
    first such class is returned. `sample` contains the indices of the sampled texts.
    """
    counts = [np.bincount(document.classes, minlength=len(CLASSES)) for document in documents]
    counts_NC = np.stack(counts)  # number of tokens by text and class
    sampled = list(sample)
    sample_NC = np.zeros_like(counts_NC)
    sample_NC[sampled] = counts_NC[sampled]
    in_others_NC = sample_NC.sum(0) - sample_NC
    is_alone_NC = (counts_NC > 0) & (in_others_NC == 0)
    is_excluded_N = is_alone_NC.any(1)
    classes = {}
    for number in np.flatnonzero(is_excluded_N):
        first_class = int(is_alone_NC[number].argmax())
        classes[int(number)] = CLASSES[first_class]
    return classes


def left_out_sentence(text: str, token_class: str, left_out: int, texts: int) -> str:
    """Return a sentence that states how many texts `corpus_value` excludes, and why it excludes the first of them.

    `text` is the name of the first excluded text, and `token_class` is a token class of this text that no other text
    has.
    """
    cause = f"no other text has a token of the class {token_class}, which occurs in {text}"
    return f"corpus_value excludes {left_out} of {texts} texts; for example, {cause}."


class ControlValues(NamedTuple):
    """The tensors of one layer for computing the `SAME_PASS` controls."""

    bias_E: Tensor  # b_V
    corpus_BTE: Tensor | None  # the corpus values v_j; None if they are not needed or there are no other texts
    mean_B1E: Tensor  # mean_k v_k over the tokens of each text
    special_SB: Tensor  # positions of each text's special tokens, padded with -1

    def attended(self, layer_pass: LayerPass, controls: Collection[str] = SAME_PASS) -> "AttendedValues":
        """Return the sums of control values, weighted by the layer's attention, and the sums of the attention weights.

        The control values replace the layer's values under a control: the values without b_V, or the corpus values. The
        weighted sums are multiplied by W_O, and split into the part from the token itself and that from other tokens.
        """
        W_ED = layer_pass.block.output.W
        values_by_control = self._select_values(layer_pass, controls)
        if not values_by_control:  # The other controls need only the sums of the attention weights.
            _no_sums, row_sums_BHT = layer_pass.attention.weighted_sums([])
            return AttendedValues({}, row_sums_BHT.transpose(1, 2))
        values_CBTE = torch.stack(list(values_by_control.values()))
        attended_CBTE, row_sums_BTH = _apply_attention(layer_pass, values_CBTE)  # sums over all sources of each token
        own_CBTE = scaled_heads(layer_pass.diagonal, values_CBTE)
        own_CBTD = own_CBTE @ W_ED
        others_CBTD = attended_CBTE @ W_ED - own_CBTD
        splits = {}
        for number, name in enumerate(values_by_control):
            own_ND = own_CBTD[number].flatten(0, 1)
            others_ND = others_CBTD[number].flatten(0, 1)
            splits[name] = Split(own_ND, others_ND)
        return AttendedValues(splits, row_sums_BTH)

    def _select_values(self, layer_pass: LayerPass, controls: Collection[str]) -> dict[str, Tensor]:
        """Return the values `[B, T, E]` under `without_value_bias` and `corpus_value`, if they are in `controls`.

        `corpus_value` is omitted if there are no corpus values. b_V is subtracted from the values here, because a
        subtraction from the weighted sums would leave rounding errors if the layer's values consist of b_V alone. These
        rounding errors would result in a meaningless ratio of 1.
        """
        values_by_control = {}
        if "without_value_bias" in controls:
            values_by_control["without_value_bias"] = layer_pass.value - self.bias_E
        if "corpus_value" in controls and self.corpus_BTE is not None:
            values_by_control["corpus_value"] = self.corpus_BTE
        return values_by_control


def _apply_attention(layer_pass: LayerPass, values_CBTE: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_j a^h_ij v_j `[C, B, T, E]` under C controls, and the sums of the weights a^h_ij `[B, T, H]`.

    For each of B texts, T tokens i and H heads h, both sums run over all tokens j of the text. a^h_ij are the layer's
    attention weights, and `values_CBTE` contains the values v_j under each control. The axis E contains the vectors of
    all heads, concatenated.
    """
    heads = layer_pass.attention.value.shape[-3]
    values_CBTHd = values_CBTE.unflatten(-1, (heads, -1))
    values_CBHTd = values_CBTHd.transpose(-2, -3)
    sums_by_control, row_sums_BHT = layer_pass.attention.weighted_sums(values_CBHTd.unbind())
    attended = []
    for sums_BHTd in sums_by_control:
        sums_BTHd = sums_BHTd.transpose(1, 2)
        attended.append(sums_BTHd.flatten(-2))
    return torch.stack(attended), row_sums_BHT.transpose(1, 2)


class AttendedValues(NamedTuple):
    """Sums of control values, weighted by the layer's attention."""

    splits: Mapping[str, Split]  # by control: `without_value_bias` and `corpus_value`, if requested
    row_sums_BTH: Tensor  # sum_j a^h_ij


class HeadSums(NamedTuple):
    """Attention outputs that are weighted sums of a few vectors, for example one per head.

    For efficiency, the first Linear of the feed-forward network is applied to the H vectors instead of to the more
    numerous sums.
    """

    weights_BTH: Tensor  # the weight of each vector in each token's sum, `[..., B, T, H]`
    vectors_HD: Tensor  # the vectors after W_O, `[H, D]` or `[B, H, D]`

    def projected(self) -> Tensor:
        """Return the weighted sums of the vectors, `[..., N, D]`."""
        return (self.weights_BTH @ self.vectors_HD).flatten(-3, -2)

    def network(self, splits: LayerSplits) -> NetworkPart:
        """Propagate the sums of `projected` to the second skip connection and into the feed-forward network.

        The result is a `NetworkPart` of sums `[..., N, width]`, where N = B * T, with the leading axes of
        `weights_BTH`. The H vectors are propagated first, and then summed with each token's weights, because this is
        faster than propagating N sums. `splits` provides the computation of the rest of the layer, and the whole output
        of W_O, which determines the divisor of a norm.
        """
        rest = splits.rest
        assert rest is not None
        norm = splits.block.attention_output_norm
        weights_BTH = self.weights_BTH
        if not norm.absent:
            # A norm of the attention output divides each token's sum by the standard deviation of the whole output. The
            # token's weights are divided instead, because the vectors are the same for many tokens.
            weights_NH = weights_BTH.flatten(-3, -2)
            divided_NH = weights_NH / norm.deviation(splits.projected_ND)
            weights_BTH = divided_NH.view_as(weights_BTH)
        normed_HD = norm.linear(self.vectors_HD)
        return rest.network_part(normed_HD).weighted(weights_BTH)


def control_ratios(
    methods: Sequence[str],
    layer_pass: LayerPass,
    splits: LayerSplits,
    values: ControlValues,
    attended: AttendedValues,
    names: Collection[str] = SAME_PASS,
) -> dict[str, Tensor]:
    """Return the ratios `[methods, B, T]` of all tokens under each control in `names`, by name of the control.

    The default of `names` is all controls that reuse the forward pass of the ratios; `corpus_value` is omitted if there
    are no corpus values. A split consists of the parts of a token's vector from the token itself and from other tokens;
    `splits` contains the splits without any control. `attended`, the result of `values.attended`, contains sums,
    weighted by attention, of the values that replace the layer's values under a control.
    """
    head_sums = _compute_head_sums(layer_pass, values, attended, names)
    controls = _split_attention(layer_pass, splits, attended, head_sums)
    if not controls:
        return {}
    # All controls are computed together, stacked on a leading axis C in the order of `controls`.
    layer = None  # the splits of the layer's output under each control, if a ratio needs them
    if PREACTIVATION in ratio_points(methods):  # A ratio covers the whole layer, including the feed-forward network.
        layer = _stack_layer_splits(splits, controls, head_sums)  # first, because it needs most memory
    projected = _stack_splits([control.projected for control in controls.values()])
    mixed_weight_CN = torch.stack([control.mixed_weight_N for control in controls.values()])  # on other tokens
    splits_of_controls = splits.with_others(projected, mixed_weight=mixed_weight_CN, layer=layer)
    ratios_MCN = apply_formulas(methods, splits_of_controls)
    ratios_CMN = ratios_MCN.transpose(0, 1)
    texts_and_tokens = layer_pass.diagonal.shape[:2]
    ratios_CMBT = ratios_CMN.unflatten(-1, texts_and_tokens)
    return dict(zip(controls, ratios_CMBT, strict=True))


class _AttentionSplit(NamedTuple):
    """The output of attention under one control, split into parts from the token itself and from other tokens."""

    projected: Split  # the parts of W_O's output without b_O
    mixed_weight_N: Tensor  # the attention weight on other tokens, mean over heads


def _split_attention(
    layer_pass: LayerPass, splits: LayerSplits, attended: AttendedValues, head_sums: Mapping[str, HeadSums]
) -> dict[str, _AttentionSplit]:
    """Return the split of attention's output under each control, and the attention weight on other tokens.

    A split consists of the parts of each token's vector from the token itself and from other tokens. `splits` contains
    the splits without any control, `attended.splits` those under `without_value_bias` and `corpus_value`, and
    `head_sums` the sums of vectors from which the others are computed (see `_compute_head_sums`).
    """
    # Only `without_special_sources` changes the attention weights.
    original_weight_N = splits.mixed_weight
    controls = {}
    for name, projected in attended.splits.items():
        controls[name] = _AttentionSplit(projected, original_weight_N)
    if "text_mean_value" in head_sums:
        own_ND, others_ND = head_sums["text_mean_value"].projected()
        controls["text_mean_value"] = _AttentionSplit(Split(own_ND, others_ND), original_weight_N)
    if "without_special_sources" in head_sums:
        heads = layer_pass.diagonal.shape[-1]
        special = head_sums["without_special_sources"]
        controls["without_special_sources"] = _subtract_special_sources(splits, special, heads)
    return controls


def _subtract_special_sources(splits: LayerSplits, special: HeadSums, heads: int) -> _AttentionSplit:
    """Return the split of attention's output after removing the contributions of special tokens to other tokens.

    A split consists of the parts of each token's vector from the token itself and from other tokens. `splits` contains
    the original splits, and `special` the contributions of special tokens to other tokens. The contributions of the
    remaining sources do not change; only the returned attention weight on other tokens is divided by the total weight
    on the remaining sources.
    """
    others_ND = splits.projected.others - special.projected()
    projected = Split(splits.projected.own, others_ND)
    special_weight_N = special.weights_BTH.sum(-1).flatten() / heads  # the mean over heads
    others_weight_N = _renormalise_weight(splits.mixed_weight, removed_weight_N=special_weight_N)
    return _AttentionSplit(projected, mixed_weight_N=others_weight_N)


def _compute_head_sums(
    layer_pass: LayerPass, values: ControlValues, attended: AttendedValues, names: Collection[str]
) -> dict[str, HeadSums]:
    """Return, by control, sums of vectors that replace parts of the attention output or are subtracted from them.

    A token's attention output has two parts: from the token itself and from other tokens. `text_mean_value` replaces
    both parts by sums of the text's mean values, and `without_value_bias` subtracts sums of b_V from both; the two
    parts are on the first axis of the weights. `without_special_sources` subtracts the contributions of special tokens
    from the part from other tokens.
    """
    own_weights_BTH = layer_pass.diagonal
    others_weights_BTH = attended.row_sums_BTH - own_weights_BTH
    weights_2BTH = torch.stack([own_weights_BTH, others_weights_BTH])
    sums = {}
    if "without_value_bias" in attended.splits:
        sums["without_value_bias"] = HeadSums(weights_2BTH, _project_heads(layer_pass, values.bias_E))
    if "text_mean_value" in names:
        mean_BE = values.mean_B1E.squeeze(1)
        sums["text_mean_value"] = HeadSums(weights_2BTH, _project_heads(layer_pass, mean_BE))
    if "without_special_sources" in names:
        sums["without_special_sources"] = _compute_special_sources(layer_pass, values.special_SB)
    return sums


def _stack_layer_splits(
    splits: LayerSplits, controls: Mapping[str, _AttentionSplit], head_sums: Mapping[str, HeadSums]
) -> Split:
    """Return the `Split` of the layer's output under each of the `controls`, stacked in this order as `[C, N, D]`.

    A split consists of the parts of each token's vector from the token itself and from other tokens. All controls
    except `corpus_value` have `head_sums`: sums of a few vectors, which are propagated through the layer in less time
    than the vectors of all tokens. `splits` contains the splits without any control.
    """
    layers = {name: _compute_layer_split(name, splits, sums) for name, sums in head_sums.items()}
    if "corpus_value" in controls:
        projected, others_weight_N = controls["corpus_value"]
        # `layer` propagates `projected` through the rest of the layer; the other cached tensors are freed immediately.
        layers["corpus_value"] = splits.with_others(projected, mixed_weight=others_weight_N).layer
    return _stack_splits([layers[name] for name in controls])


def _compute_layer_split(name: str, splits: LayerSplits, sums: HeadSums) -> Split:
    """Return the `Split` of the layer's output under the control `name`: parts from the token itself and from others.

    `splits` contains the original splits, and `sums` is the result of `_compute_head_sums` for this control. The
    returned split equals the property `layer` of the control's `LayerSplits`, but is faster to compute (see
    `HeadSums`).
    """
    rest = splits.rest
    assert rest is not None
    propagated_sums = sums.network(splits)  # into the feed-forward network
    if name == "without_special_sources":
        # The sums are the contributions of special tokens, which are subtracted from the part from other tokens.
        own_ND = splits.layer.own
        return Split(own_ND, rest.output(splits.network.others.minus(propagated_sums)))
    if name == "text_mean_value":
        # The sums are both parts of the attention output. The skip connection adds the layer's input to the part from
        # the token itself.
        both_parts = propagated_sums.add_own(rest.network_part(splits.x_ND))
    else:
        # `without_value_bias`: the sums are the contributions of b_V, which are subtracted from both original parts.
        both_parts = splits.network.minus(propagated_sums)
    own_ND, others_ND = rest.output(both_parts)
    return Split(own_ND, others_ND)


def _compute_special_sources(layer_pass: LayerPass, special_SB: Tensor) -> HeadSums:
    """Return the contributions of special tokens to other tokens, as sums of vectors weighted by attention.

    For each token, the sum covers V = S * H vectors `[D]`: the values of the S special tokens of the text in each of H
    heads, multiplied by W_O. `special_SB` contains the positions of these tokens in each of B texts, padded with -1.
    """
    weights_SBTH = weights_on_special(layer_pass.attention, special_SB)
    weights_BTV = weights_SBTH.permute(1, 2, 0, 3).flatten(-2)
    # `weights_on_special` returns the weight 0 for the padding -1, so any vector may be selected for it.
    positions_BS1 = special_SB.T.clamp_min(0).unsqueeze(-1)
    value_BSE = layer_pass.value.take_along_dim(positions_BS1, 1)  # E is the width of all heads together
    heads_BSHD = _project_heads(layer_pass, value_BSE)
    return HeadSums(weights_BTV, heads_BSHD.flatten(1, 2))


def _renormalise_weight(mixed_weight_N: Tensor, removed_weight_N: Tensor) -> Tensor:
    """Return each token's weight on other tokens minus `removed_weight_N`, divided by the total weight that remains.

    Before the subtraction, the weight on other tokens is `mixed_weight_N`, and the total weight of a token is 1. The
    result `[N]` is 0 if no weight remains.
    """
    others_weight_N = (mixed_weight_N - removed_weight_N).clamp_min(0)
    total_N = others_weight_N + 1 - mixed_weight_N
    return (others_weight_N / total_N).masked_fill(total_N == 0, 0)


def _project_heads(layer_pass: LayerPass, vectors: Tensor) -> Tensor:
    """Multiply each head's part of `vectors` `[..., E]` by the head's part of W_O; return products `[..., H, D]`."""
    W_ED = layer_pass.block.output.W
    heads = layer_pass.diagonal.shape[-1]
    W_HdD = W_ED.unflatten(0, (heads, -1))
    by_head = vectors.unflatten(-1, W_HdD.shape[:2])
    return torch.einsum("...hd,hde->...he", by_head, W_HdD)


def _stack_splits(splits: Sequence[Split]) -> Split:
    """Stack the splits `[N, D]` of several controls into one split `[C, N, D]`."""
    own_CND = torch.stack([split.own for split in splits])
    others_CND = torch.stack([split.others for split in splits])
    return Split(own_CND, others_CND)


def shuffled_words(document: Document, seed: int) -> Document:
    """Return a text in which the words are in random order and special tokens stay in place.

    The order is determined by `seed` and the name of the text. Words are not exchanged between the two texts of a pair.
    """
    digest = hashlib.sha256(document.name.encode()).digest()
    generator = np.random.default_rng([seed, int.from_bytes(digest[:8], "big")])
    source = np.arange(len(document))  # the previous position of each token
    # The text of a pair to which each token belongs, 0 or 1; in a single text, all tokens belong to text 0.
    text_of_token = np.zeros(len(document)) if document.segments is None else document.segments
    for text in (0, 1):
        positions = np.flatnonzero((document.words >= 0) & (text_of_token == text))  # without special tokens
        order = _draw_word_order(document.words[positions], generator)
        source[positions] = positions[order]
    return document.take(source)


def _draw_word_order(word_of_token: npt.NDArray[np.integer], generator: np.random.Generator) -> npt.NDArray[np.integer]:
    """Return token indices in which the words are in random order and the tokens of each word keep their order.

    `word_of_token` contains the index of each token's word in the text.
    """
    distinct_words, distinct_of_token = np.unique(word_of_token, return_inverse=True)
    new_rank_of_word = generator.permutation(len(distinct_words))
    return np.argsort(new_rank_of_word[distinct_of_token], kind="stable")


def random_base(folder: Path, seed: int) -> PreTrainedModel:
    """Return a model with the architecture of the checkpoint in `folder` and random weights."""
    return random_model(load_config(folder), seed)


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Return a model with the architecture of `config`, initialised by transformers after `torch.manual_seed(seed)`.

    The model has no task head, is in float32 and eval mode, and has observable attention.
    """
    config = copy.deepcopy(config)  # The model modifies its configuration.
    options = {"attn_implementation": implementation_of(config), "dtype": torch.float32}
    with torch.random.fork_rng(devices=[]):  # restores the state of torch's global generator afterwards
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModel.from_config(config, **options)
    for_reading(model)
    return model
