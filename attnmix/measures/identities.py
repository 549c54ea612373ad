"""Identities that are checked in every run: decomposed parts must sum to the vectors computed by the model."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnmix.core.names import PREACTIVATION, Site
from attnmix.measures.layers import LayerPass
from attnmix.measures.ratios import scaled_heads
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
"""Descriptions of all identities. Identities of points that a family lacks are not checked."""
SAMPLED_IDENTITIES = ("attention_rows", "attention_output", "feed_forward")
"""Identities that recompute attention or the feed-forward network, and are checked in a sample of the texts."""


def identity_errors(layer_pass: LayerPass, mask_BT: Tensor, sampled: Sequence[bool] | None = None) -> Tensor:
    """Return the largest errors `[B, identities]` in a batch, relative to the largest component of the true vectors.

    Tokens outside `mask_BT` are ignored. The error is NaN for identities that the layer lacks, for `hidden_states`,
    which callers compare by `vector_errors`, and for `SAMPLED_IDENTITIES` of texts that are not `sampled` (by default,
    all texts are sampled).
    """
    documents = len(mask_BT)
    undefined_B = layer_pass.x.new_full((documents,), torch.nan)
    places = [place for place in range(documents) if sampled is None or sampled[place]]
    errors = _check_steps(layer_pass, mask_BT)
    if len(places) == documents:
        errors.update(_check_sources(layer_pass, mask_BT))
        return _stack_errors(errors, undefined_B)
    errors_BI = _stack_errors(errors, undefined_B)
    if places:
        places_P = torch.tensor(places, device=mask_BT.device)
        source_errors = _check_sources(layer_pass.documents(places_P), mask_BT[places_P])
        sampled_PI = _stack_errors(source_errors, undefined_B[places_P])
        errors_BI[places_P] = torch.where(sampled_PI.isnan(), errors_BI[places_P], sampled_PI)
    return errors_BI


def embedding_errors(base: PreTrainedModel, ids_BT: Tensor, features: Mapping[Site, Tensor], mask_BT: Tensor) -> Tensor:
    """Return the errors `[B, identities]` of the embedding, before the first layer."""
    embed = base.get_input_embeddings()
    words_BTD = embed(ids_BT)
    captured = features.get(Site(0, "word_embedding"), words_BTD.new_empty(0))
    errors = {"word_embedding": vector_errors(captured, words_BTD, mask_BT)}
    summed = features.get(Site(0, "embedding_sum"))
    output = features.get(Site(0, "embedding_output"))
    if summed is not None and output is not None:
        remaining_modules = family_of(base.config).stacks[0].embedding
        for module in optional_modules(base, remaining_modules):
            summed = module(summed)
        errors["embedding_output"] = vector_errors(summed, output, mask_BT)
    undefined_B = words_BTD.new_full((len(words_BTD),), torch.nan)
    return _stack_errors(errors, undefined_B)


def vector_errors(computed_BTD: Tensor, true_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the largest error `[..., B]` of the vectors `[..., B, T, D]` of each text.

    Errors are relative to the largest true component. They are infinite if the shapes differ, and 0 without computation
    for vectors at the same address in memory.
    """
    if computed_BTD.shape != true_BTD.shape:
        return true_BTD.new_full(true_BTD.shape[:-2], torch.inf)
    if computed_BTD.data_ptr() == true_BTD.data_ptr() and computed_BTD.stride() == true_BTD.stride():
        return true_BTD.new_zeros(true_BTD.shape[:-2])
    error_and_true = torch.stack([computed_BTD - true_BTD, true_BTD])
    largest_2BT = error_and_true.abs().amax(-1)
    error_B, largest_B = (largest_2BT * mask_BT).amax(-1).unbind()
    smallest = torch.finfo(true_BTD.dtype).tiny
    relative_B: Tensor = error_B / largest_B.clamp_min(smallest)
    return relative_B


def _stack_errors(errors: Mapping[str, Tensor], undefined_B: Tensor) -> Tensor:
    """Return the errors `[B, identities]` in the order of `IDENTITIES`."""
    return torch.stack([errors.get(name, undefined_B) for name in IDENTITIES], dim=-1)


def _check_steps(layer_pass: LayerPass, mask_BT: Tensor) -> dict[str, Tensor]:
    """Return the errors `[B]` of identities between the vectors that the model computes in the layer."""
    features = layer_pass.features
    block = layer_pass.block
    residual_BTD = layer_pass.residual
    expected = {"attention_residual": residual_BTD}
    if "attention_norm" in features:
        expected["attention_norm"] = block.attention_norm.normalise(residual_BTD)
    if "cross_attention_norm" in features:
        crossed_BTD = layer_pass.attended + features["cross_attention_output"]
        expected["cross_attention_norm"] = block.cross_attention_norm(crossed_BTD)
    output_BTD = layer_pass.stream + features["ffn_output"]
    expected["layer_output"] = block.output_norm(output_BTD)
    return _compare_vectors(expected, features, mask_BT)


def _check_sources(layer_pass: LayerPass, mask_BT: Tensor) -> dict[str, Tensor]:
    """Return the errors `[B]` of identities that sum over sources.

    F_ii and the sum over other sources are computed independently of attention_output: from attention weights and
    values, which are multiplied by W_O separately.
    """
    features = layer_pass.features
    block = layer_pass.block
    x_BTD = layer_pass.x
    own_BTD, others_BTD, row_errors_BT = _sum_sources(layer_pass)
    norm = block.attention_output_norm
    projected_BTD = others_BTD + own_BTD + block.output.b
    projected_bias_BTD = block.output.b.expand_as(own_BTD)
    summed_BTD = norm.part(projected_BTD, layer_pass.projected) + norm.beta
    bias_BTD = norm.part(projected_bias_BTD, layer_pass.projected) + norm.beta
    expected = {"attention_output": summed_BTD}
    if "attention_norm" in features:
        norm = block.attention_norm
        expected["attention_norm"] = norm.part(x_BTD + summed_BTD, layer_pass.residual) + norm.beta
    if PREACTIVATION in features:
        cross_BTD = features.get("cross_attention_output")
        rest = block.after_attention(layer_pass.residual, cross_BTD, features[PREACTIVATION])
        sources_BTD = x_BTD + (summed_BTD - bias_BTD)
        by_sources_BTD = rest.added(rest.stream(sources_BTD))
        by_biases_BTD = rest.added_with_biases(rest.stream_with_biases(bias_BTD))
        expected["ffn_output"] = by_sources_BTD + by_biases_BTD
    errors = _compare_vectors(expected, features, mask_BT)
    if "ffn_output" in errors:
        errors["feed_forward"] = errors.pop("ffn_output")
    errors["attention_rows"] = (row_errors_BT * mask_BT).amax(-1)
    return errors


def _compare_vectors(
    expected: Mapping[str, Tensor], features: Mapping[str, Tensor], mask_BT: Tensor
) -> dict[str, Tensor]:
    """Return the errors `[B]` of the `expected` vectors at the points that were captured.

    Points are compared together, because each operator on a GPU is a kernel launch.
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


def _sum_sources(layer_pass: LayerPass) -> tuple[Tensor, Tensor, Tensor]:
    """Return F_ii and sum_{j!=i} F_ij `[B, T, D]` before any norm, and the errors `[B, T]` of the weights' row sums.

    Each row of attention weights should sum to 1.
    """
    attention = layer_pass.attention
    own_BTE = scaled_heads(attention.diagonal(), layer_pass.value)
    heads = []
    row_errors = []
    for rows in attention.blocks():
        weights_BHRT = attention.weights(rows)
        heads_BHRd = weights_BHRT @ attention.value
        heads.append(heads_BHRd.transpose(-3, -2).flatten(-2))
        errors_BHR = (weights_BHRT.sum(-1) - 1).abs()
        row_errors.append(errors_BHR.amax(-2))
    others_BTE = join_blocks(heads, -2) - own_BTE
    W_ED = layer_pass.block.output.W
    return own_BTE @ W_ED, others_BTE @ W_ED, join_blocks(row_errors, -1)


def largest_errors(documents: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Return the largest error and the number of checked texts, `[2, levels, identities]`.

    `documents` contains the errors `[levels, identities]` of each text; NaN for unchecked identities.
    """
    errors = np.stack(documents)
    largest = np.fmax.reduce(errors)
    is_checked = ~np.isnan(errors)
    return np.stack([largest, is_checked.sum(0)])
