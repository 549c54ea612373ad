"""Check, in every run, that the decomposed parts sum to the vectors that the model itself computed."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnmix.arithmetic.kernels import in_threads
from attnmix.core.names import PREACTIVATION, Site
from attnmix.measures.layers import LayerPass
from attnmix.measures.ratios import scaled_heads
from attnmix.models.families import family_of, optional_modules

IDENTITIES = {
    "word_embedding": "the library's own token embedding",
    "embedding_output": "embedding_sum through the modules of the embedding that follow",
    "attention_rows": "the attention weights of each row sum to 1",
    "attention_output": "the F_ij and the constants sum to it",
    "attention_residual": "input of the layer + attention_output",
    "attention_norm": "the T_ij, the normalised constants and beta sum to it",
    "cross_attention_norm": "norm of attention_norm + cross_attention_output",
    "feed_forward": "what a token itself, the others and the biases give through the network sums to ffn_output",
    "layer_output": "what stands before the feed-forward network + ffn_output, through the norm that follows",
    "hidden_states": "layer_output is the library's own, the last one after the model's final norm",
}
"""Each identity, and what it says; those of points that a family does not have are absent."""
SAMPLED_IDENTITIES = ("attention_rows", "attention_output", "feed_forward")
"""Those that compute attention or the feed-forward network anew, for which a sample of the documents is enough."""


def identity_errors(layer_pass: LayerPass, mask_BT: Tensor, sampled: Sequence[bool] | None = None) -> Tensor:
    """Return the largest errors `[B, identities]` in a batch, relative to the largest component of the true vectors.

    F_ii and the sum over the other sources are taken from attention weights and values, each through W_O on its own,
    not from attention_output. Tokens outside `mask_BT` do not count. NaN for an identity that the layer does not have,
    for `hidden_states`, which `vector_errors` compares, and for `SAMPLED_IDENTITIES` of a document that is not
    `sampled`; without that argument all are.
    """

    def document_errors(place: int) -> Tensor:
        full = sampled is None or sampled[place]
        errors = _document_errors(layer_pass.document(place), mask_BT[place].unsqueeze(-1), full)
        return _by_identity(errors, layer_pass.x.new_full((), torch.nan))

    # One document at a time, so that its vectors stay in the cache.
    return torch.stack(in_threads(document_errors, range(len(mask_BT))))


def embedding_errors(base: PreTrainedModel, ids_BT: Tensor, features: Mapping[Site, Tensor], mask_BT: Tensor) -> Tensor:
    """Return the errors `[B, identities]` of the embedding, before the first layer."""
    words_BTD = base.get_input_embeddings()(ids_BT)
    captured = features.get(Site(0, "word_embedding"), words_BTD.new_empty(0))
    errors = {"word_embedding": vector_errors(captured, words_BTD, mask_BT)}
    summed, output = (features.get(Site(0, point)) for point in ("embedding_sum", "embedding_output"))
    if summed is not None and output is not None:
        for module in optional_modules(base, family_of(base.config).stacks[0].embedding):
            summed = module(summed)
        errors["embedding_output"] = vector_errors(summed, output, mask_BT)
    return _by_identity(errors, words_BTD.new_full((len(words_BTD),), torch.nan))


def vector_errors(computed_BTD: Tensor, true_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the same `[B]` for two batches of vectors that are to be equal; infinite where their widths are not."""
    if computed_BTD.shape != true_BTD.shape:
        return true_BTD.new_full((len(true_BTD),), torch.inf)
    return torch.stack(list(map(_relative_error, computed_BTD, true_BTD, mask_BT.unsqueeze(-1))))


def _by_identity(errors: Mapping[str, Tensor], undefined: Tensor) -> Tensor:
    return torch.stack([errors.get(name, undefined) for name in IDENTITIES], dim=-1)


def _document_errors(layer_pass: LayerPass, mask_T1: Tensor, full: bool) -> dict[str, Tensor]:
    features, block, x_TD = layer_pass.features, layer_pass.block, layer_pass.x
    residual_TD, summed_TD = layer_pass.residual, features["attention_output"]
    expected, errors = {"attention_residual": residual_TD}, {}
    if full:
        own_TD, others_TD, row_errors_T = _summed_sources(layer_pass)
        norm = block.attention_output_norm
        summed_TD = norm.part(others_TD + own_TD + block.output.b, layer_pass.projected) + norm.beta
        bias_TD = norm.part(block.output.b.expand_as(own_TD), layer_pass.projected) + norm.beta
        expected["attention_output"] = summed_TD
        errors["attention_rows"] = (row_errors_T * mask_T1.squeeze(-1)).amax()
    if "attention_norm" in features:
        norm = block.attention_norm
        expected["attention_norm"] = norm.part(x_TD + summed_TD, residual_TD) + norm.beta
    if "cross_attention_norm" in features:
        crossed_TD = layer_pass.attended + features["cross_attention_output"]
        expected["cross_attention_norm"] = block.cross_attention_norm(crossed_TD)
    if full and PREACTIVATION in features:
        cross_TD = features.get("cross_attention_output")
        rest = block.after_attention(residual_TD, cross_TD, features[PREACTIVATION])
        added_TD = rest.added(rest.stream(x_TD + (summed_TD - bias_TD)))
        expected["ffn_output"] = added_TD + rest.added_with_biases(rest.stream_with_biases(bias_TD))
    expected["layer_output"] = block.output_norm(layer_pass.stream + features["ffn_output"])
    return errors | {
        "feed_forward" if name == "ffn_output" else name: _relative_error(vectors, features[name], mask_T1)
        for name, vectors in expected.items()
        if name in features
    }


def _summed_sources(layer_pass: LayerPass) -> tuple[Tensor, Tensor, Tensor]:
    """Return F_ii and sum_{j!=i} F_ij before any norm `[T, D]`, and how far from 1 a head's weights of each row sum."""
    own_TE = scaled_heads(layer_pass.attention.diagonal(), layer_pass.value)
    heads, row_errors = [], []
    for rows in layer_pass.attention.blocks():
        weights_HRT = layer_pass.attention.weights(rows)
        heads.append((weights_HRT @ layer_pass.attention.value).transpose(0, 1).flatten(-2))
        row_errors.append((weights_HRT.sum(-1) - 1).abs().amax(0))
    W_ED = layer_pass.block.output.W
    return own_TE @ W_ED, (torch.cat(heads) - own_TE) @ W_ED, torch.cat(row_errors)


def _relative_error(computed_TD: Tensor, true_TD: Tensor, mask_T1: Tensor) -> Tensor:
    error = ((computed_TD - true_TD) * mask_T1).abs().amax()
    relative: Tensor = error / (true_TD * mask_T1).abs().amax().clamp_min(torch.finfo(true_TD.dtype).tiny)
    return relative
