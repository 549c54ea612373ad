"""The derivative reference: how strongly a layer's output for token i depends on a token j.

|d layer_output_i / d x_j|, the Frobenius norm of a Jacobian (Brunner et al., ICLR 2020, equation 3), by forward-mode
derivatives: one pass of tangents gives the derivatives of all tokens in all layers, where backward mode needs a pass
for each token of each layer. `torch.func` takes them of the model's own layers, with attention by its definition.

With fewer directions than the width a norm is an estimate, corrected for its bias (`_root`). Norms over several
sources are estimated from the same direction at every source: |sum_j J_ij r_k|^2 is that of the matrix sum_j J_ij.

`levels` are the share of a token's derivative that is due to other tokens, others / (others + |J_ii|). Three forms
differ in how the other tokens' Jacobians become one norm:

    form             others
    sum_of_norms     sum_{j != i} |J_ij|            the norms added (Brunner et al., ICLR 2020, equation 3)
    norm_of_block    sqrt(sum_{j != i} |J_ij|^2)    the response to independent moves of the others
    norm_of_sum      |sum_{j != i} J_ij|            the response to a common move of the others

`norm_of_sum` is the counterpart of |sum_{j != i} F_ij| in the mixing ratios; `docs/measures.md` compares the forms.

Shapes: L layers, K directions, S source tokens, R = S * K tangents, T tokens, D hidden, W width of what is moved.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.nn.functional import gelu, linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from attnmix.core.names import Site
from attnmix.models.attention import attention_by, explicit
from attnmix.models.capture_points import DECODER_EMBEDDING_SUM, EMBEDDING_SUM, LayerCall, layer_hooks, recording
from attnmix.models.families import family_of, optional_modules

Reference = Literal["word_embedding", "layer_input"]

REFERENCES: tuple[Reference, ...] = ("word_embedding", "layer_input")
FORMS = ("sum_of_norms", "norm_of_block", "norm_of_sum")
PASS_TOKENS = 8192  # tokens of all tangents that pass a layer together
DEVICE_PASS_TOKENS = 2**17  # the same on any device but a CPU, where an operation costs the same for one as for many


class JacobianNorms(NamedTuple):
    """Frobenius norms of one document's derivatives d layer_output_i / d x_j."""

    entries_LTT: Tensor  # |J_ij| (i, j)
    block_LT: Tensor  # |[J_ij, j != i]|, of all other sources side by side: its square is sum_{j != i} |J_ij|^2
    sum_LT: Tensor  # |sum_{j != i} J_ij|, of the response to one move that all other sources make


class Chain(NamedTuple):
    """Layers of one document's forward pass that tangents pass one after another."""

    start_TW: Tensor  # the vectors at which tangents start
    embed: Callable[[Tensor], Tensor]  # from there to the input of the first layer
    layers: list[LayerCall]


def document_chains(base: PreTrainedModel, ids_1T: Tensor) -> list[Chain]:
    """Run one document forward and return the layers of each stack; they start at the sum of the embeddings."""
    calls: list[LayerCall] = []
    chains: list[Chain] = []
    points = (EMBEDDING_SUM, DECODER_EMBEDDING_SUM)

    def append_layer(*_: object) -> None:
        assert features.layer is not None  # torch calls this after a layer
        calls.append(features.layer)

    with torch.no_grad(), recording(base, points) as features, layer_hooks(base, append_layer):
        base(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T))
        for stack, point in zip(family_of(base.config).stacks, points, strict=False):
            layers = [call for call in calls if call.stack == stack]
            start = features.get(Site(layers[0].number - 1, point), layers[0].whole.hidden)[0]
            chains.append(Chain(start, torch.nn.Sequential(*optional_modules(base, stack.embedding)), layers))
    return [chain._replace(layers=list(map(_differentiable, chain.layers))) for chain in chains]


def _differentiable(call: LayerCall) -> LayerCall:
    """Return the layer, with the library's activation of the same name for one that `torch.func` cannot take."""
    if call.stack.activation is None:
        return call
    layer = copy.deepcopy(call.module, {id(each): each for each in call.module.parameters()})  # which both share
    layer.set_submodule(call.stack.feed_forward[1], ACT2FN[call.stack.activation])
    return replace(call, whole=replace(call.whole, module=layer))


def derivative_norms(chains: Sequence[Chain], reference: Reference, directions: int, seed: int) -> JacobianNorms:
    """Return the norms of one document's derivatives, in all layers.

    x_j is the token's word embedding, or with `layer_input` what enters each layer; in a decoder with an encoder the
    decoder's own, the encoder's states as they are. The norm is estimated from random orthonormal directions r:
    E sum_k |J r_k|^2 = |J|_F^2 K / W. As many as the width W give it exactly.
    """
    if reference == "layer_input":
        calls = itertools.chain.from_iterable(chain.layers for chain in chains)
        chains = [Chain(call.whole.hidden[0], torch.nn.Identity(), [call]) for call in calls]
    norms = [_norms(chain, directions, seed) for chain in chains]
    return JacobianNorms(
        torch.cat([chain_norms.entries_LTT for chain_norms in norms]),
        torch.cat([chain_norms.block_LT for chain_norms in norms]),
        torch.cat([chain_norms.sum_LT for chain_norms in norms]),
    )


def levels(norms: JacobianNorms) -> Tensor:
    """Return the share of a token's derivative due to other tokens `[layers, forms, T]`, in the order of `FORMS`.

    NaN for a token whose output nothing moves.
    """
    own_LT = norms.entries_LTT.diagonal(dim1=-2, dim2=-1)
    added_LT = (norms.entries_LTT - torch.diag_embed(own_LT)).sum(-1)
    others_LFT = torch.stack([added_LT, norms.block_LT, norms.sum_LT], dim=1)
    return others_LFT / (others_LFT + own_LT.unsqueeze(1))


def _norms(chain: Chain, directions: int, seed: int) -> JacobianNorms:
    """Return the norms in a chain of layers, from |J_ij r_k|^2 and |sum_{j != i} J_ij r_k|^2 of every direction."""
    tokens, width = chain.start_TW.shape
    layers = len(chain.layers)
    directions = min(directions, width)
    generator = torch.Generator().manual_seed(seed)
    random_WK = torch.randn(width, directions, generator=generator, dtype=torch.float64)
    basis_KW = torch.linalg.qr(random_WK).Q.T.to(chain.start_TW)  # orthonormal
    sums_LTT, squares_LTT = basis_KW.new_zeros(2, layers, tokens, tokens, dtype=torch.float64)
    block_LKT, together_LKT = basis_KW.new_zeros(2, layers, directions, tokens, dtype=torch.float64)
    sources = torch.arange(tokens, device=basis_KW.device)
    pass_tokens = PASS_TOKENS if chain.start_TW.is_cpu else DEVICE_PASS_TOKENS
    for ks in torch.arange(directions).split(max(1, pass_tokens // tokens)):
        together = []  # by layer, the response to one move that all other sources make
        for call in chain.layers:
            hidden = call.whole.hidden
            together.append(hidden.new_zeros(len(ks), *hidden[0].shape))
        for sources_S in sources.split(max(1, pass_tokens // (tokens * len(ks)))):
            same_ST = (sources_S[:, None] == sources).to(basis_KW)
            start_RTW = torch.einsum("st,kw->sktw", same_ST, basis_KW[ks]).flatten(0, 1)
            moved_RTD = differentials(chain.embed, chain.start_TW, start_RTW)
            for place, call in enumerate(chain.layers):
                moved_RTD = differentials(call.whole, call.whole.hidden, moved_RTD.unsqueeze(1)).squeeze(1)
                moved_SKTD = moved_RTD.unflatten(0, (len(sources_S), -1))
                together[place] += torch.einsum("sktd,st->ktd", moved_SKTD, 1 - same_ST)
                squares_SKT = moved_SKTD.square().sum(-1).double()
                sums_LTT[place][:, sources_S] += squares_SKT.sum(1).T
                squares_LTT[place][:, sources_S] += squares_SKT.square().sum(1).T
                block_LKT[place, ks] += torch.einsum("skt,st->kt", squares_SKT, 1 - same_ST.double())
        lengths_LKT = [moved_KTD.square().sum(-1) for moved_KTD in together]
        together_LKT[:, ks] = torch.stack(lengths_LKT).double()
    entries_LTT = _root(sums_LTT, squares_LTT, directions, width)
    block_LT = _root(block_LKT.sum(1), block_LKT.square().sum(1), directions, width)
    together_LT = _root(together_LKT.sum(1), together_LKT.square().sum(1), directions, width)
    return JacobianNorms(entries_LTT, block_LT, together_LT)


def _root(sums: Tensor, squares: Tensor, directions: int, width: int) -> Tensor:
    """Return the norm, from the sums over K of `width` orthonormal directions of |J r|^2 and of its square.

    The root of the mean is too small by an eighth of its relative variance v, to first order, so it is multiplied by
    1 + v / 8. v is that of K draws without replacement: 0 for all directions, and unknown, left out, for a single one.
    """
    mean = sums / directions
    degrees_of_freedom = max(1, directions - 1)
    spread = (squares / directions - mean.square()).clamp_min(0)
    variance = spread / degrees_of_freedom * (1 - directions / width)
    relative = torch.where(mean > 0, variance / mean.square(), 0)
    return (sums * (width / directions)).sqrt() * (1 + relative / 8)


class _Linear(torch.autograd.Function):
    """torch's `linear`, without the zeros that its own derivative adds for a weight and a bias that do not move."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        context.save_for_forward(inputs[1])

    @staticmethod
    def jvp(context: Any, x_tangent: Tensor, *_constants: None) -> Tensor:
        (weight,) = context.saved_tensors
        moved: Tensor = x_tangent @ weight.T
        return moved


class _Gelu(torch.autograd.Function):
    """torch's `gelu`, whose slope is computed once for all tangents."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, approximate: str = "none") -> Tensor:
        return gelu(x, approximate=approximate)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *options = inputs
        slope = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=options[0] if options else "none")
        context.save_for_forward(slope)

    @staticmethod
    def jvp(context: Any, x_tangent: Tensor, *_constants: None) -> Tensor:
        (slope,) = context.saved_tensors
        moved: Tensor = x_tangent * slope
        return moved


class _LeanDerivatives(TorchFunctionMode):
    """Lets modules call functions of the same values whose derivatives along many tangents cost less."""

    LEAN: ClassVar[Mapping[Any, Callable[..., Tensor]]] = {linear: _Linear.apply, gelu: _Gelu.apply}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        lean = self.LEAN.get(function)
        if lean is None:
            return function(*args, **kwargs or {})
        # An autograd function takes no keywords; those of both come behind, in this order.
        return lean(*args, *(kwargs or {}).values())


def differentials(function: Callable[[Tensor], Tensor], at: Tensor, along: Tensor) -> Tensor:
    """Return the derivative of `function` at a point along each tangent, which the first dimension counts."""
    with attention_by(explicit()), _LeanDerivatives():
        moved: Tensor = vmap(lambda tangent: jvp(function, (at,), (tangent,))[1])(along)
    return moved
