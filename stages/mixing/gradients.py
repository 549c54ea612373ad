"""The gradient reference: how strongly a layer's output for token i depends on a token j.

|d layer_output_i / d x_j|, the Frobenius norm of a Jacobian (Brunner et al., ICLR 2020, equation 3), by
forward-mode derivatives (`stages/mixing/tangents.py`): one pass of tangents gives the derivatives of all tokens in all
layers, where backward mode needs a pass for each token of each layer.

Shapes: K directions, S source tokens, T tokens, D hidden, W width of what is moved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from transformers import PreTrainedModel

from stages.mixing.tangents import LayerTangents, tangents
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
    squares: list[Tensor] = []
    for start, calls in _runs(document, reference):
        width = start.summed_TW.shape[-1]
        basis_KW = _directions(width, min(directions, width), seed).to(start.summed_TW)
        squares += _squares(start, calls, basis_KW) * (width / len(basis_KW))
    return torch.stack(squares).sqrt()


def _runs(document: DocumentCalls, reference: Reference) -> Iterator[tuple[_Start, list[LayerCall]]]:
    """Layers that tangents pass one after another, and where these start."""
    if reference == "layer_input":
        for call in document.layers:
            yield _Start(call.whole.hidden[0], torch.nn.Identity()), [call]
        return
    firsts = [*document.starts, len(document.layers) + 1]
    for first, end in itertools.pairwise(firsts):
        yield document.starts[first], document.layers[first - 1 : end - 1]


def _squares(start: _Start, calls: list[LayerCall], basis_KW: Tensor) -> Tensor:
    """sum_k |J_ij r_k|^2 `[layers, T, T]` (i, j)."""
    tokens = len(start.summed_TW)
    layers = [LayerTangents(call) for call in calls]
    squares = basis_KW.new_zeros(len(layers), tokens, tokens, dtype=torch.float64)
    for block_KW in basis_KW.split(max(1, PASS_TOKENS // tokens)):
        start_KTW = block_KW.unsqueeze(1).expand(-1, tokens, -1)
        moved_KTD = tangents(start.embed, (start.summed_TW,), (start_KTW,))
        projected = layers[0].projected(moved_KTD)
        sources = torch.arange(tokens, device=basis_KW.device)
        for sources_S in sources.split(max(1, PASS_TOKENS // (tokens * len(block_KW)))):
            moved = layers[0].of_one_token(moved_KTD, projected, sources_S)
            for place, layer in enumerate(layers):
                moved = layer.of_all_tokens(moved) if place else moved
                of_sources_ST = moved.square().sum(-1).unflatten(0, (len(sources_S), -1)).sum(1)
                squares[place][:, sources_S] += of_sources_ST.T.double()
    return squares


def _directions(width: int, directions: int, seed: int) -> Tensor:
    """Orthonormal rows `[directions, width]`."""
    generator = torch.Generator().manual_seed(seed)
    basis: Tensor = torch.linalg.qr(torch.randn(width, directions, generator=generator, dtype=torch.float64)).Q
    return basis.T
