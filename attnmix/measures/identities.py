"""Identities that every run checks: the parts of a decomposition must sum to the vectors that the model computes.

Shapes: B texts, T tokens, D hidden, H heads, d head width, E = H * d, I identities, R rows of a block of attention
weights.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnmix.core.names import PREACTIVATION, Site
from attnmix.measures.layers import LayerPass
from attnmix.measures.ratios import scaled_heads
from attnmix.measures.weights import Norm
from attnmix.models.attention import join_blocks
from attnmix.models.families import family_of, optional_modules

IDENTITIES = {
    "word_embedding": "token embedding of transformers",
    "embedding_output": "embedding_sum after the remaining modules of the embedding",
    "attention_rows": "the attention weights of each row sum to 1",
    "attention_output": "sum of the F_ij and the constants",
    "attention_residual": "input of the layer + attention_output",
    "attention_norm": "sum of the T_ij, the normalised constants and beta",
    "cross_attention_norm": "norm of attention_norm + cross_attention_output",
    "feed_forward": "the contributions of the token, the other tokens and the biases sum to ffn_output",
    "layer_output": "input of the feed-forward block + ffn_output, after the norm that follows",
    "hidden_states": "layer_output equals the hidden states of transformers, the last one after the final norm",
}
"""Descriptions of all identities. Identities of capture points that a family lacks are not checked."""
SAMPLED_IDENTITIES = ("attention_rows", "attention_output", "feed_forward")
"""Identities that are checked only in sampled texts; their checks recompute attention or the feed-forward network."""


def identity_errors(layer_pass: LayerPass, mask_BT: Tensor, sampled: Sequence[bool] | None = None) -> Tensor:
    """Return the largest error of each text and identity, `[B, identities]` in the order of `IDENTITIES`.

    An identity is an equation that the vectors of a layer must satisfy. Errors of vectors are relative to the largest
    absolute component of the model's vectors in the text. Tokens outside `mask_BT` are ignored. Errors that are not
    computed here are NaN: those of identities that the layer lacks, of `hidden_states` (see `vector_errors`), and of
    `SAMPLED_IDENTITIES` in texts for which `sampled` is False (default: all texts are sampled).
    """
    texts = len(mask_BT)
    undefined_B = layer_pass.x.new_full((texts,), torch.nan)  # the errors of identities that are not checked
    sampled_places = [place for place in range(texts) if sampled is None or sampled[place]]
    # `_check_steps` is fast and checks all texts. `_check_sources` recomputes attention and checks only sampled texts.
    # Both check `attention_norm`; in sampled texts, the error of `_check_sources` replaces that of `_check_steps`.
    errors = _check_steps(layer_pass, mask_BT)
    if len(sampled_places) == texts:
        errors.update(_check_sources(layer_pass, mask_BT))
        return _stack_errors(errors, undefined_B)
    errors_BI = _stack_errors(errors, undefined_B)
    if sampled_places:
        places_P = torch.tensor(sampled_places, device=mask_BT.device)
        _replace_errors(errors_BI, layer_pass, mask_BT, places_P)
    return errors_BI


def _replace_errors(errors_BI: Tensor, layer_pass: LayerPass, mask_BT: Tensor, places_P: Tensor) -> None:
    """In place, replace the errors of the P texts at `places_P` by those of `_check_sources`.

    The errors of identities that `_check_sources` does not check are left unchanged.
    """
    sampled_errors_PI = errors_BI[places_P]
    undefined_P = torch.full_like(sampled_errors_PI[:, 0], torch.nan)
    source_errors = _check_sources(layer_pass.documents(places_P), mask_BT[places_P])
    source_errors_PI = _stack_errors(source_errors, undefined_P)
    is_not_checked_PI = source_errors_PI.isnan()
    errors_BI[places_P] = torch.where(is_not_checked_PI, sampled_errors_PI, source_errors_PI)


def embedding_errors(base: PreTrainedModel, ids_BT: Tensor, features: Mapping[Site, Tensor], mask_BT: Tensor) -> Tensor:
    """Return the errors `[B, identities]` of the embedding, before the first layer; NaN for identities of layers.

    The error of `word_embedding` is infinite if this feature was not captured.
    """
    embed = base.get_input_embeddings()
    true_words_BTD = embed(ids_BT)
    captured_words_BTD = features.get(Site(0, "word_embedding"))
    if captured_words_BTD is None:
        errors = {"word_embedding": true_words_BTD.new_full((len(true_words_BTD),), torch.inf)}
    else:
        errors = {"word_embedding": vector_errors(captured_words_BTD, true_words_BTD, mask_BT)}
    vectors_BTD = features.get(Site(0, "embedding_sum"))
    output_BTD = features.get(Site(0, "embedding_output"))
    if vectors_BTD is not None and output_BTD is not None:
        remaining_modules = family_of(base.config).stacks[0].embedding
        for module in optional_modules(base, remaining_modules):
            vectors_BTD = module(vectors_BTD)
        errors["embedding_output"] = vector_errors(vectors_BTD, output_BTD, mask_BT)
    undefined_B = true_words_BTD.new_full((len(true_words_BTD),), torch.nan)
    return _stack_errors(errors, undefined_B)


def vector_errors(computed_BTD: Tensor, true_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return, for each text, the largest error `[..., B]` of the computed vectors `[..., B, T, D]`.

    Errors are relative to the largest absolute component of the text's vectors in `true_BTD`. Tokens outside `mask_BT`
    are ignored. Errors are infinite if the shapes differ, and 0 without computation if both arguments share their
    memory.
    """
    if computed_BTD.shape != true_BTD.shape:
        return true_BTD.new_full(true_BTD.shape[:-2], torch.inf)
    is_same_memory = computed_BTD.data_ptr() == true_BTD.data_ptr() and computed_BTD.stride() == true_BTD.stride()
    if is_same_memory:
        return true_BTD.new_zeros(true_BTD.shape[:-2])
    # Errors and true vectors are stacked to save operators, each of which launches a kernel on a GPU.
    error_and_true = torch.stack([computed_BTD - true_BTD, true_BTD])
    largest_2BT = error_and_true.abs().amax(-1)
    largest_2B = (largest_2BT * mask_BT).amax(-1)
    error_B, largest_B = largest_2B.unbind()
    smallest = torch.finfo(true_BTD.dtype).tiny
    relative_B: Tensor = error_B / largest_B.clamp_min(smallest)
    return relative_B


def _stack_errors(errors: Mapping[str, Tensor], undefined_B: Tensor) -> Tensor:
    """Return the errors `[B, identities]` in the order of `IDENTITIES`; `undefined_B` for those not in `errors`."""
    return torch.stack([errors.get(name, undefined_B) for name in IDENTITIES], dim=-1)


def _check_steps(layer_pass: LayerPass, mask_BT: Tensor) -> dict[str, Tensor]:
    """Return the errors `[B]`, by name, of the identities that compare a vector with the vectors that precede it.

    For example, `attention_residual` must equal the layer's input plus `attention_output`. Identities of vectors that
    the layer does not have are skipped.
    """
    features = layer_pass.features
    block = layer_pass.block
    residual_BTD = layer_pass.residual  # the layer's input + attention_output
    expected = {"attention_residual": residual_BTD}
    if "attention_norm" in features:
        # `normalise` computes the norm from gamma, beta and eps, which measures also use. This checks their values.
        expected["attention_norm"] = block.attention_norm.normalise(residual_BTD)
    # All other norms are called as modules of the model, so that only their inputs are checked.
    if "cross_attention_norm" in features:
        # `attended` contains the vectors before cross-attention, to which the output of cross-attention is added.
        cross_residual_BTD = layer_pass.attended + features["cross_attention_output"]
        expected["cross_attention_norm"] = block.cross_attention_norm(cross_residual_BTD)
    # `stream` contains the vectors before the feed-forward network, to which the output of the network is added.
    network_residual_BTD = layer_pass.stream + features["ffn_output"]
    # In families in which no norm follows, `output_norm` returns its input.
    expected["layer_output"] = block.output_norm(network_residual_BTD)
    return _compare_vectors(expected, features, mask_BT)


def _check_sources(layer_pass: LayerPass, mask_BT: Tensor) -> dict[str, Tensor]:
    """Return the errors `[B]`, by name, of the identities that contain a sum over source tokens.

    The contributions of token i itself and of all other tokens to the output of W_O at token i are computed from
    attention weights and values, independently of the model's attention output. Norms are applied to their sum with the
    standard deviations of the model's own vectors `whole_BTD`. The attention weights of each token must sum to 1.
    """
    features = layer_pass.features
    block = layer_pass.block
    sums = _sum_sources(layer_pass)
    projected_BTD = sums.others_BTD + sums.own_BTD + block.output.b
    attention_output_BTD = _apply_norm(block.attention_output_norm, projected_BTD, whole_BTD=layer_pass.projected)
    expected = {"attention_output": attention_output_BTD}
    if "attention_norm" in features:
        residual_BTD = layer_pass.x + attention_output_BTD
        expected["attention_norm"] = _apply_norm(block.attention_norm, residual_BTD, whole_BTD=layer_pass.residual)
    if PREACTIVATION in features:
        expected["ffn_output"] = _sum_network_output(layer_pass, attention_output_BTD)
    errors = _compare_vectors(expected, features, mask_BT)
    if "ffn_output" in errors:  # `ffn_output` is the name of the capture point, `feed_forward` that of the identity.
        errors["feed_forward"] = errors.pop("ffn_output")
    errors["attention_rows"] = (sums.row_errors_BT * mask_BT).amax(-1)  # the largest error over the tokens of each text
    return errors


def _sum_network_output(layer_pass: LayerPass, attention_output_BTD: Tensor) -> Tensor:
    """Return the feed-forward network's output `[B, T, D]` as the sum of the parts of the sources and of the biases.

    The vectors after attention's skip connection are split into two parts. The part of the biases consists of b_O,
    after the norm that follows W_O, and the beta of this norm; the part of the sources is the remainder. `stream`
    propagates a part to the second skip connection, and `added` propagates its result through the feed-forward network.
    The methods with the suffix `_with_biases` propagate the part of the biases, and add the biases of later steps.
    """
    block = layer_pass.block
    cross_BTD = layer_pass.features.get("cross_attention_output")
    after_attention = block.after_attention(layer_pass.residual, cross_BTD, layer_pass.features[PREACTIVATION])
    output_bias_BTD = block.output.b.expand_as(attention_output_BTD)
    bias_BTD = _apply_norm(block.attention_output_norm, output_bias_BTD, whole_BTD=layer_pass.projected)
    sources_BTD = layer_pass.x + (attention_output_BTD - bias_BTD)
    by_sources_BTD = after_attention.added(after_attention.stream(sources_BTD))
    by_biases_BTD = after_attention.added_with_biases(after_attention.stream_with_biases(bias_BTD))
    return by_sources_BTD + by_biases_BTD


def _apply_norm(norm: Norm, part_BTD: Tensor, whole_BTD: Tensor) -> Tensor:
    """Apply a norm to a part of the vectors `whole_BTD`, and add the norm's beta.

    The norm's divisor is computed from `whole_BTD`.
    """
    return norm.part(part_BTD, whole_BTD) + norm.beta


def _compare_vectors(
    expected: Mapping[str, Tensor], features: Mapping[str, Tensor], mask_BT: Tensor
) -> dict[str, Tensor]:
    """Return the errors `[B]` of the `expected` vectors, by capture point; points not in `features` are omitted.

    The vectors of the P points at which they have the same shape as the feature are stacked and compared together,
    which saves kernel launches on a GPU.
    """
    errors = {}
    equal_shapes = []
    for name, vectors_BTD in expected.items():
        if name in features and vectors_BTD.shape == features[name].shape:
            equal_shapes.append(name)
        elif name in features:
            errors[name] = vector_errors(vectors_BTD, features[name], mask_BT)
    if equal_shapes:
        computed_PBTD = torch.stack([expected[name] for name in equal_shapes])
        true_PBTD = torch.stack([features[name] for name in equal_shapes])
        errors_PB = vector_errors(computed_PBTD, true_PBTD, mask_BT)
        errors.update(zip(equal_shapes, errors_PB.unbind(), strict=True))
    return errors


class _SourceSums(NamedTuple):
    """Sums over the sources of each token."""

    own_BTD: Tensor  # F_ii before any norm
    others_BTD: Tensor  # sum_{j != i} F_ij before any norm
    row_errors_BT: Tensor  # |sum of a token's attention weights - 1|, the largest value over all heads


def _sum_sources(layer_pass: LayerPass) -> _SourceSums:
    """Return the sums over the sources of each token, computed from attention weights in blocks of R tokens.

    The values are weighted and summed before the output projection W_O `[E, D]`; E is the width of all heads together.
    The field `row_errors_BT` contains |sum of a token's attention weights - 1|, the largest value over all H heads.
    """
    attention = layer_pass.attention
    value_BHTd = attention.value
    own_BTE = scaled_heads(attention.diagonal(), layer_pass.value)  # the values, concatenated over heads
    heads = []
    row_errors = []
    for rows in attention.blocks():
        weights_BHRT = attention.weights(rows)
        heads_BHRd = weights_BHRT @ value_BHTd
        heads_BRE = heads_BHRd.transpose(-3, -2).flatten(-2)
        heads.append(heads_BRE)
        errors_BHR = (weights_BHRT.sum(-1) - 1).abs()
        row_errors.append(errors_BHR.amax(-2))
    others_BTE = join_blocks(heads, -2) - own_BTE
    W_ED = layer_pass.block.output.W
    return _SourceSums(
        own_BTD=own_BTE @ W_ED,
        others_BTD=others_BTE @ W_ED,
        row_errors_BT=join_blocks(row_errors, -1),
    )


def largest_errors(documents: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Return the largest error over all texts, and the number of checked texts, stacked as `[2, levels, identities]`.

    A level is the embeddings or a layer, and an identity is an equation that its vectors must satisfy (`IDENTITIES`).
    `documents` contains the errors `[levels, identities]` of each text; NaN for unchecked identities.
    """
    errors = np.stack(documents)
    largest = np.fmax.reduce(errors)  # ignores NaN
    is_checked = ~np.isnan(errors)
    checked_texts = is_checked.sum(0)
    return np.stack([largest, checked_texts])
