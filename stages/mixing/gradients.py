"""The gradient reference: how strongly a layer's output for token i depends on a token j.

|d layer_output_i / d x_j|, the Frobenius norm of a Jacobian (Brunner et al., ICLR 2020, equation 3), in
forward mode: one pass of tangents gives the derivatives of all tokens in all layers, where
backward mode needs a pass for each token of each layer. The tangents go through each layer's
derivative written out, so that the layer's own values are computed once, not for each of them.

Shapes: R tangents, T tokens, D hidden, H heads, M width of the feed-forward network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from transformers import PreTrainedModel

from stages.mixing.layers import LayerWeights, Norm, norm_of
from stages.models.capture_points import FAMILIES

Tensor = torch.Tensor
Reference = Literal["word_embedding", "layer_input"]

REFERENCES: tuple[Reference, ...] = ("word_embedding", "layer_input")
PASS_TOKENS = 4096


def jacobian_norms(
    weights: list[LayerWeights],
    embedding_norm: Norm,
    embedding_sum_TD: Tensor,
    x_LTD: list[Tensor],
    reference: Reference,
    directions: int,
    seed: int,
) -> Tensor:
    """|d layer_output_i / d x_j| `[layers, T, T]` (i, j) of one document.

    x_j is the token's word embedding, or with `layer_input` what enters each layer, which is `x_LTD`.
    The norm is estimated from `directions` random orthonormal directions r, its square without
    bias: E sum_k |J r_k|^2 = |J|_F^2 K / D. As many as the hidden size give it exactly.
    """
    tokens, hidden = embedding_sum_TD.shape
    basis_KD = _directions(hidden, directions, seed).to(embedding_sum_TD)
    device = embedding_sum_TD.device
    sources = torch.arange(tokens, device=device).repeat_interleave(directions)
    squares = torch.zeros(len(weights), tokens, tokens, dtype=torch.float64, device=device)
    for rows in torch.arange(len(sources), device=device).split(max(1, PASS_TOKENS // tokens)):
        start_RTD = embedding_sum_TD.new_zeros(len(rows), tokens, hidden)
        start_RTD[torch.arange(len(rows), device=device), sources[rows]] = basis_KD[rows % directions]
        moved = start_RTD
        if reference == "word_embedding":
            moved = _norm_tangent(embedding_norm, embedding_sum_TD, start_RTD)
        for layer, (layer_weights, x_TD) in enumerate(zip(weights, x_LTD, strict=True)):
            moved = layer_tangent(layer_weights, x_TD, start_RTD if reference == "layer_input" else moved)
            squares[layer].index_add_(1, sources[rows], moved.square().sum(-1).T.double())
    norms: Tensor = (squares * (hidden / directions)).sqrt()
    return norms


def embedding_norm(base: PreTrainedModel) -> Norm:
    """The LayerNorm between the sum of the embeddings and the first layer."""
    module = base.get_submodule(FAMILIES[base.config.model_type]["embedding_points"]["embedding_sum"]["module"])
    return norm_of(module)


def layer_tangent(weights: LayerWeights, x_TD: Tensor, moved_RTD: Tensor) -> Tensor:
    """The derivative of one layer's output at `x_TD` along each of `moved_RTD`, `[R, T, D]`."""

    def heads(vectors: Tensor) -> Tensor:
        split: Tensor = vectors.unflatten(-1, (weights.heads, -1))
        return split.transpose(-3, -2)

    query, key, value = (heads(x_TD @ linear.W + linear.b) for linear in (weights.query, weights.key, weights.value))
    d_query, d_key, d_value = (heads(moved_RTD @ W) for W in (weights.query.W, weights.key.W, weights.value.W))
    scale = 1 / math.sqrt(query.shape[-1])
    attention_HTT = torch.softmax(query @ key.mT * scale, dim=-1)
    d_scores = (d_query @ key.mT + query @ d_key.mT) * scale
    weighted = attention_HTT * d_scores
    d_attention = weighted - attention_HTT * weighted.sum(-1, keepdim=True)
    context_TE = (attention_HTT @ value).transpose(-3, -2).flatten(-2)
    d_context_RTE = (d_attention @ value + attention_HTT @ d_value).transpose(-3, -2).flatten(-2)

    residual_TD = x_TD + context_TE @ weights.output.W + weights.output.b
    norm = weights.attention_norm
    attended_TD = torch.layer_norm(residual_TD, residual_TD.shape[-1:], norm.gamma, norm.beta, norm.eps)
    d_attended = _norm_tangent(norm, residual_TD, moved_RTD + d_context_RTE @ weights.output.W)
    hidden_TM = attended_TD @ weights.feed_forward_in.W + weights.feed_forward_in.b
    activated_TM, slope_TM = _with_slope(weights.activation, hidden_TM)
    d_second = d_attended + (d_attended @ weights.feed_forward_in.W * slope_TM) @ weights.feed_forward_out.W
    return _norm_tangent(
        weights.output_norm,
        attended_TD + activated_TM @ weights.feed_forward_out.W + weights.feed_forward_out.b,
        d_second,
    )


def _with_slope(activation: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The activation's values, and its derivative at each of them."""
    with torch.enable_grad():
        start = x.detach().requires_grad_()
        values = activation(start)
        (slope,) = torch.autograd.grad(values.sum(), start)
    return values.detach(), slope


def _norm_tangent(norm: Norm, x_TD: Tensor, moved_RTD: Tensor) -> Tensor:
    """LayerNorm's derivative at `x_TD`."""
    variance, mean = torch.var_mean(x_TD, -1, keepdim=True, correction=0)
    deviation = (variance + norm.eps).sqrt()
    unit = (x_TD - mean) / deviation
    centred = moved_RTD - moved_RTD.mean(-1, keepdim=True)
    return (centred - unit * (centred * unit).mean(-1, keepdim=True)) / deviation * norm.gamma


def _directions(hidden: int, directions: int, seed: int) -> Tensor:
    """Orthonormal rows `[directions, hidden]`."""
    generator = torch.Generator().manual_seed(seed)
    basis: Tensor = torch.linalg.qr(torch.randn(hidden, directions, generator=generator, dtype=torch.float64)).Q
    return basis.T
