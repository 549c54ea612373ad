"""Checks, in every run, that decomposed parts sum to the vectors computed by the model."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnmix.core.names import PREACTIVATION, Site
from attnmix.measures.layers import LayerPass
from attnmix.measures.ratios import scaled_heads
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
"""Description of each identity; identities of points that a family lacks are absent."""
SAMPLED_IDENTITIES = ("attention_rows", "attention_output", "feed_forward")
"""Identities that recompute attention or the feed-forward network, checked in a sample of the documents."""


def identity_errors(layer_pass: LayerPass, mask_BT: Tensor, sampled: Sequence[bool] | None = None) -> Tensor:
    """Return the largest errors `[B, identities]` in a batch, relative to the largest component of the true vectors.

    Tokens outside `mask_BT` are ignored. The error is NaN for identities that the layer lacks, for `hidden_states`,
    which `vector_errors` compares, and for `SAMPLED_IDENTITIES` of documents that are not `sampled` (default: all are).
    """
    undefined_B = layer_pass.x.new_full((len(mask_BT),), torch.nan)
    places = [place for place in range(len(mask_BT)) if sampled is None or sampled[place]]
    if len(places) == len(mask_BT):
        errors = _step_errors(layer_pass, mask_BT)
        errors.update(_source_errors(layer_pass, mask_BT))
        return _by_identity(errors, undefined_B)
    errors_BI = _by_identity(_step_errors(layer_pass, mask_BT), undefined_B)
    if places:
        places_P = torch.tensor(places, device=mask_BT.device)
        sampled_errors = _source_errors(layer_pass.documents(places_P), mask_BT[places_P])
        sampled_PI = _by_identity(sampled_errors, undefined_B[places_P])
        errors_BI[places_P] = torch.where(sampled_PI.isnan(), errors_BI[places_P], sampled_PI)
    return errors_BI


def embedding_errors(base: PreTrainedModel, ids_BT: Tensor, features: Mapping[Site, Tensor], mask_BT: Tensor) -> Tensor:
    """Return the errors `[B, identities]` of the embedding, before the first layer."""
    words_BTD = base.get_input_embeddings()(ids_BT)
    captured = features.get(Site(0, "word_embedding"), words_BTD.new_empty(0))
    errors = {"word_embedding": vector_errors(captured, words_BTD, mask_BT)}
    summed = features.get(Site(0, "embedding_sum"))
    output = features.get(Site(0, "embedding_output"))
    if summed is not None and output is not None:
        for module in optional_modules(base, family_of(base.config).stacks[0].embedding):
            summed = module(summed)
        errors["embedding_output"] = vector_errors(summed, output, mask_BT)
    return _by_identity(errors, words_BTD.new_full((len(words_BTD),), torch.nan))


def vector_errors(computed_BTD: Tensor, true_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the errors `[B]` between batches of vectors that should be equal; infinite if their shapes differ."""
    if computed_BTD.shape != true_BTD.shape:
        return true_BTD.new_full((len(true_BTD),), torch.inf)
    largest_2BT = torch.stack([computed_BTD - true_BTD, true_BTD]).abs().amax(-1)
    error_B, largest_B = (largest_2BT * mask_BT).amax(-1)
    relative_B: Tensor = error_B / largest_B.clamp_min(torch.finfo(true_BTD.dtype).tiny)
    return relative_B


def _by_identity(errors: Mapping[str, Tensor], undefined: Tensor) -> Tensor:
    return torch.stack([errors.get(name, undefined) for name in IDENTITIES], dim=-1)


def _step_errors(layer_pass: LayerPass, mask_BT: Tensor) -> dict[str, Tensor]:
    """Return the errors `[B]` of identities between the steps of the layer, as computed by the model."""
    features = layer_pass.features
    block = layer_pass.block
    expected = {"attention_residual": layer_pass.residual}
    if "attention_norm" in features:
        norm, whole_BTD = block.attention_norm, layer_pass.residual
        expected["attention_norm"] = norm.part(whole_BTD, whole_BTD) + norm.beta
    if "cross_attention_norm" in features:
        crossed_BTD = layer_pass.attended + features["cross_attention_output"]
        expected["cross_attention_norm"] = block.cross_attention_norm(crossed_BTD)
    expected["layer_output"] = block.output_norm(layer_pass.stream + features["ffn_output"])
    return _errors(expected, features, mask_BT)


def _source_errors(layer_pass: LayerPass, mask_BT: Tensor) -> dict[str, Tensor]:
    """Return the errors `[B]` of sums over sources.

    F_ii and the sum over other sources are computed from attention weights and values, separately multiplied by W_O,
    instead of from attention_output.
    """
    features = layer_pass.features
    block = layer_pass.block
    x_BTD = layer_pass.x
    own_BTD, others_BTD, row_errors_BT = _summed_sources(layer_pass)
    norm = block.attention_output_norm
    summed_BTD = norm.part(others_BTD + own_BTD + block.output.b, layer_pass.projected) + norm.beta
    bias_BTD = norm.part(block.output.b.expand_as(own_BTD), layer_pass.projected) + norm.beta
    expected = {"attention_output": summed_BTD}
    if "attention_norm" in features:
        norm = block.attention_norm
        expected["attention_norm"] = norm.part(x_BTD + summed_BTD, layer_pass.residual) + norm.beta
    if PREACTIVATION in features:
        cross_BTD = features.get("cross_attention_output")
        rest = block.after_attention(layer_pass.residual, cross_BTD, features[PREACTIVATION])
        by_sources_BTD = rest.added(rest.stream(x_BTD + (summed_BTD - bias_BTD)))
        by_biases_BTD = rest.added_with_biases(rest.stream_with_biases(bias_BTD))
        expected["ffn_output"] = by_sources_BTD + by_biases_BTD
    errors = _errors(expected, features, mask_BT)
    if "ffn_output" in errors:
        errors["feed_forward"] = errors.pop("ffn_output")
    errors["attention_rows"] = (row_errors_BT * mask_BT).amax(-1)
    return errors


def _errors(expected: Mapping[str, Tensor], features: Mapping[str, Tensor], mask_BT: Tensor) -> dict[str, Tensor]:
    errors = {}
    for name, vectors_BTD in expected.items():
        if name in features:
            errors[name] = vector_errors(vectors_BTD, features[name], mask_BT)
    return errors


def _summed_sources(layer_pass: LayerPass) -> tuple[Tensor, Tensor, Tensor]:
    """Return F_ii and sum_{j!=i} F_ij before any norm `[B, T, D]`, and how far a head's weights of a row are from 1."""
    own_BTE = scaled_heads(layer_pass.attention.diagonal(), layer_pass.value)
    heads, row_errors = [], []
    for rows in layer_pass.attention.blocks():
        weights_BHRT = layer_pass.attention.weights(rows)
        heads_BHRd = weights_BHRT @ layer_pass.attention.value
        heads.append(heads_BHRd.transpose(-3, -2).flatten(-2))
        row_errors.append((weights_BHRT.sum(-1) - 1).abs().amax(-2))
    others_BTE = torch.cat(heads, -2) - own_BTE
    W_ED = layer_pass.block.output.W
    return own_BTE @ W_ED, others_BTE @ W_ED, torch.cat(row_errors, -1)


def largest_errors(documents: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Return the largest error and the number of checked documents `[2, levels, identities]`.

    `documents` contains the errors `[levels, identities]` of each document, NaN for unchecked identities.
    """
    errors = np.stack(documents)
    return np.stack([np.fmax.reduce(errors), (~np.isnan(errors)).sum(0)])
