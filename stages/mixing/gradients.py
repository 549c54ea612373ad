"""The gradient reference: how strongly a layer's output for token i depends on a token j.

|d layer_output_i / d x_j|, the Frobenius norm of a Jacobian (Brunner et al., ICLR 2020, equation 3), by
forward-mode derivatives (`torch.func`) of the library's own layers: one pass of tangents gives the derivatives of all
tokens in all layers, where backward mode needs a pass for each token of each layer.

Shapes: R tangents, T tokens, D hidden, W width of the word embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch.func import jvp, vmap
from transformers import PreTrainedModel

from stages.models.attention import attention_by, explicit
from stages.models.capture_points import DECODER_EMBEDDING_SUM, EMBEDDING_SUM, LayerCall, recording
from stages.models.families import family_of, optional_modules
from stages.sites import Site

Tensor = torch.Tensor
Reference = Literal["word_embedding", "layer_input"]

REFERENCES: tuple[Reference, ...] = ("word_embedding", "layer_input")
PASS_TOKENS = 4096


class _Start(NamedTuple):
    """What a stack of layers begins with."""

    summed_TW: Tensor  # the sum of the embeddings
    embed: Callable[[Tensor], Tensor]  # from there to what enters the first layer


class DocumentCalls(NamedTuple):
    """One document's forward pass, layer by layer, to be taken again with tangents."""

    layers: list[LayerCall]
    starts: dict[int, _Start]  # by the number of the first layer that follows


def document_calls(base: PreTrainedModel, ids_1T: Tensor) -> DocumentCalls:
    """Run one document."""
    calls: list[LayerCall] = []
    stacks = family_of(base.config).stacks
    with torch.no_grad(), recording(base, (EMBEDDING_SUM, DECODER_EMBEDDING_SUM), calls.append) as features:
        base(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T))
        starts = {}
        for stack, point in zip(stacks, (EMBEDDING_SUM, DECODER_EMBEDDING_SUM), strict=False):
            first = next(call for call in calls if call.stack == stack)
            level = Site(0 if stack is stacks[0] else first.number - 1, point)
            modules = torch.nn.Sequential(*optional_modules(base, stack.embedding))
            starts[first.number] = _Start(features.get(level, first.whole.hidden)[0], modules)
    return DocumentCalls(calls, starts)


def jacobian_norms(document: DocumentCalls, reference: Reference, directions: int, seed: int) -> Tensor:
    """|d layer_output_i / d x_j| `[layers, T, T]` (i, j) of one document.

    x_j is the token's word embedding, or with `layer_input` what enters each layer; in a decoder beside an encoder its
    own, the encoder's states as they are. The norm is estimated from random orthonormal directions r, its square
    without bias: E sum_k |J r_k|^2 = |J|_F^2 K / W. As many as the width W give it exactly.
    """
    first = document.starts[1].summed_TW if reference == "word_embedding" else document.layers[0].whole.hidden[0]
    tokens, width = first.shape
    basis_KW = _directions(width, min(directions, width), seed).to(first)
    squares = first.new_zeros(len(document.layers), tokens, tokens, dtype=torch.float64)
    for sources_R, start_RTW in _starts(basis_KW, tokens):
        for layer, moved_RTD in enumerate(_moved(document, reference, start_RTW)):
            squares[layer].index_add_(1, sources_R, moved_RTD.square().sum(-1).T.double())
    norms: Tensor = (squares * (width / len(basis_KW))).sqrt()
    return norms


def _starts(basis_KW: Tensor, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Source tokens `[R]`, and for each of them one direction at that token, `[R, T, W]`."""
    device = basis_KW.device
    sources = torch.arange(tokens, device=device).repeat_interleave(len(basis_KW))
    for rows in torch.arange(len(sources), device=device).split(max(1, PASS_TOKENS // tokens)):
        start_RTW = basis_KW.new_zeros(len(rows), tokens, basis_KW.shape[1])
        start_RTW[torch.arange(len(rows), device=device), sources[rows]] = basis_KW[rows % len(basis_KW)]
        yield sources[rows], start_RTW


def _moved(document: DocumentCalls, reference: Reference, start_RTW: Tensor) -> Iterator[Tensor]:
    """The derivative of each layer's output along each tangent, `[R, T, D]`."""
    moved = start_RTW
    for call in document.layers:
        if reference == "layer_input":
            moved = start_RTW
        elif call.number in document.starts:
            start = document.starts[call.number]
            moved = _tangents(start.embed, start.summed_TW, start_RTW)
        moved = layer_tangents(call, moved)
        yield moved


def layer_tangents(call: LayerCall, moved_RTD: Tensor) -> Tensor:
    """The derivative of one layer's output along each of `moved_RTD`, `[R, T, D]`."""

    def output(x_TD: Tensor) -> Tensor:
        return call.whole(x_TD.unsqueeze(0)).squeeze(0)

    with attention_by(explicit):
        return _tangents(output, call.whole.hidden[0], moved_RTD)


def _tangents(function: Callable[[Tensor], Tensor], at: Tensor, moved: Tensor) -> Tensor:
    tangents: Tensor = vmap(lambda tangent: jvp(function, (at,), (tangent,))[1])(moved)
    return tangents


def _directions(width: int, directions: int, seed: int) -> Tensor:
    """Orthonormal rows `[directions, width]`."""
    generator = torch.Generator().manual_seed(seed)
    basis: Tensor = torch.linalg.qr(torch.randn(width, directions, generator=generator, dtype=torch.float64)).Q
    return basis.T
