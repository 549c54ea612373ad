"""The gradient reference: how strongly a layer's output for token i depends on a token j.

|d layer_output_i / d x_j|, the Frobenius norm of a Jacobian (Brunner et al., ICLR 2020, equation 3), by
forward-mode derivatives (`attnmix/measures/tangents.py`): one pass of tangents gives the derivatives of all tokens in
all layers, where backward mode needs a pass for each token of each layer.

With fewer directions than the width a norm is an estimate. That of its square has no bias; its root is too small by an
eighth of the square's relative variance, to first order (1 / 4K for a Jacobian of rank one). How much the directions
differ gives that variance, entry by entry, and the root is corrected by it (`_root`). Norms over several sources are
estimated from the same directions, the same one at every source: |sum_j J_ij r_k|^2 is that of the matrix sum_j J_ij.

`levels` are the share of a token's derivative that is due to other tokens, others / (others + |J_ii|). Three forms
differ in how the other tokens' Jacobians become one norm:

    form             others
    sum_of_norms     sum_{j != i} |J_ij|            the norms added (Brunner et al., ICLR 2020, equation 3)
    norm_of_block    sqrt(sum_{j != i} |J_ij|^2)    the response to independent moves of the others
    norm_of_sum      |sum_{j != i} J_ij|            the response to a common move of the others

`norm_of_sum` is the counterpart of |sum_{j != i} F_ij| in the mixing ratios: in both, sources that push in opposite
directions cancel. Under uniform attention of n tokens the block falls as 1/sqrt(n); the other two do not.

Shapes: K directions, S source tokens, T tokens, D hidden, W width of what is moved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from transformers import PreTrainedModel

from attnmix.core.points import Site
from attnmix.measures.tangents import LayerTangents, tangents
from attnmix.models.capture_points import DECODER_EMBEDDING_SUM, EMBEDDING_SUM, LayerCall, recording
from attnmix.models.families import family_of, optional_modules

Tensor = torch.Tensor
Reference = Literal["word_embedding", "layer_input"]

REFERENCES: tuple[Reference, ...] = ("word_embedding", "layer_input")
FORMS = ("sum_of_norms", "norm_of_block", "norm_of_sum")
PASS_TOKENS = 4096


class _Start(NamedTuple):
    """The vectors that a stack of layers begins with."""

    summed_TW: Tensor  # the sum of the embeddings
    embed: Callable[[Tensor], Tensor]  # from there to what enters the first layer


class JacobianNorms(NamedTuple):
    """Frobenius norms of one document's derivatives d layer_output_i / d x_j."""

    entries_LTT: Tensor
    """|J_ij| (i, j)."""
    block_LT: Tensor
    """|[J_ij, j != i]|, of all sources but the token itself side by side: its square is sum_{j != i} |J_ij|^2."""
    sum_LT: Tensor
    """|sum_{j != i} J_ij|, of the response to one move that all sources but the token itself make."""


class DocumentCalls(NamedTuple):
    """One document's forward pass, layer by layer, to be taken again with tangents."""

    layers: list[LayerCall]
    starts: dict[int, _Start]  # by the number of the first layer that follows


def document_calls(base: PreTrainedModel, ids_1T: Tensor) -> DocumentCalls:
    """Run one document forward and keep what every layer was called with."""
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
    """Return |d layer_output_i / d x_j| `[layers, T, T]` (i, j) of one document: the entries of `derivative_norms`."""
    return derivative_norms(document, reference, directions, seed).entries_LTT


def derivative_norms(document: DocumentCalls, reference: Reference, directions: int, seed: int) -> JacobianNorms:
    """Return the norms of one document's derivatives, in all layers.

    x_j is the token's word embedding, or with `layer_input` what enters each layer; in a decoder beside an encoder its
    own, the encoder's states as they are. The norm is estimated from random orthonormal directions r:
    E sum_k |J r_k|^2 = |J|_F^2 K / W. As many as the width W give it exactly.
    """
    norms = []
    for start, calls in _runs(document, reference):
        width = start.summed_TW.shape[-1]
        basis_KW = _directions(width, min(directions, width), seed).to(start.summed_TW)
        norms.append(_norms(start, calls, basis_KW))
    return JacobianNorms(*(torch.cat(parts) for parts in zip(*norms, strict=True)))


def levels(norms: JacobianNorms) -> Tensor:
    """Return the share of a token's derivative due to other tokens `[layers, forms, T]`, in the order of `FORMS`.

    NaN for a token whose output nothing moves.
    """
    own_LT = norms.entries_LTT.diagonal(dim1=-2, dim2=-1)
    added_LT = (norms.entries_LTT - torch.diag_embed(own_LT)).sum(-1)
    forms = (added_LT, norms.block_LT, norms.sum_LT)
    return torch.stack([_share(others_LT, own_LT) for others_LT in forms], dim=1)


def _share(others: Tensor, own: Tensor) -> Tensor:
    return others / (others + own)  # 0 / 0 is NaN


def _runs(document: DocumentCalls, reference: Reference) -> Iterator[tuple[_Start, list[LayerCall]]]:
    """Yield layers that tangents pass one after another, and where these start."""
    if reference == "layer_input":
        for call in document.layers:
            yield _Start(call.whole.hidden[0], torch.nn.Identity()), [call]
        return
    firsts = [*document.starts, len(document.layers) + 1]
    for first, end in itertools.pairwise(firsts):
        yield document.starts[first], document.layers[first - 1 : end - 1]


def _norms(start: _Start, calls: list[LayerCall], basis_KW: Tensor) -> JacobianNorms:
    """Return the norms in a run of layers, from |J_ij r_k|^2 and |sum_{j != i} J_ij r_k|^2 of every direction."""
    tokens, (directions, width) = len(start.summed_TW), basis_KW.shape
    layers = [LayerTangents(call) for call in calls]
    sums_LTT, squares_LTT = basis_KW.new_zeros(2, len(layers), tokens, tokens, dtype=torch.float64)
    block_LKT, together_LKT = basis_KW.new_zeros(2, len(layers), directions, tokens, dtype=torch.float64)
    for ks in torch.arange(directions).split(max(1, PASS_TOKENS // tokens)):
        block_KW = basis_KW[ks]
        start_KTW = block_KW.unsqueeze(1).expand(-1, tokens, -1)
        moved_KTD = tangents(start.embed, (start.summed_TW,), (start_KTW,))
        projected = layers[0].projected(moved_KTD)
        together = [call.whole.hidden.new_zeros(len(ks), *call.whole.hidden[0].shape) for call in calls]
        sources = torch.arange(tokens, device=basis_KW.device)
        for sources_S in sources.split(max(1, PASS_TOKENS // (tokens * len(ks)))):
            moved = layers[0].move_one_token(moved_KTD, projected, sources_S)
            for place, layer in enumerate(layers):
                moved = layer.move_all_tokens(moved) if place else moved
                moved_SKTD = moved.unflatten(0, (len(sources_S), -1))
                others_ST = (sources_S[:, None] != sources).to(moved)
                together[place] += torch.einsum("sktd,st->ktd", moved_SKTD, others_ST)
                of_each_SKT = moved_SKTD.square().sum(-1).double()
                sums_LTT[place][:, sources_S] += of_each_SKT.sum(1).T
                squares_LTT[place][:, sources_S] += of_each_SKT.square().sum(1).T
                block_LKT[place, ks] += torch.einsum("skt,st->kt", of_each_SKT, others_ST.double())
        together_LKT[:, ks] = torch.stack([each.square().sum(-1) for each in together]).double()
    over_sources = (_root(each.sum(1), each.square().sum(1), directions, width) for each in (block_LKT, together_LKT))
    return JacobianNorms(_root(sums_LTT, squares_LTT, directions, width), *over_sources)


def _root(sums: Tensor, squares: Tensor, directions: int, width: int) -> Tensor:
    """Return the norm, from the sums over K of `width` orthonormal directions of |J r|^2 and of its square.

    sqrt(mean) (1 + v / 8), v the relative variance of the mean: that of K draws without replacement from `width`, so
    that all directions give the norm as it is. A single direction tells nothing of v, and its root stays too small.
    """
    norms = (sums * (width / directions)).sqrt()
    if directions == 1:
        return norms
    mean = sums / directions
    variance = (squares / directions - mean.square()).clamp_min(0) / (directions - 1) * (1 - directions / width)
    relative = torch.where(mean > 0, variance / mean.square(), 0)
    return norms * (1 + relative / 8)


def _directions(width: int, directions: int, seed: int) -> Tensor:
    """Return orthonormal rows `[directions, width]`."""
    generator = torch.Generator().manual_seed(seed)
    basis: Tensor = torch.linalg.qr(torch.randn(width, directions, generator=generator, dtype=torch.float64)).Q
    return basis.T
