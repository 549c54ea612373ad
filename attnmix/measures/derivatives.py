"""Derivatives as a reference for the mixing ratios: sensitivity of a layer's output at token i to the input of token j.

The measure is |d layer_output_i / d x_j|, the Frobenius norm of a Jacobian (Brunner et al., ICLR 2020, equation 3). The
norm is computed with the model's own layers and explicitly computed attention weights. Derivatives with respect to word
embeddings use forward mode: tangents are propagated through all layers once, whereas backward mode would need separate
passes for each layer. Derivatives within a layer use backward mode. The gradients of all tokens are backpropagated
together through the operations after attention, because these are token-wise; attention requires a separate backward
pass for each token.

With fewer random directions than dimensions, the norms are bias-corrected estimates (`_compute_norm`). The norms are
computed from |J r_k| for random directions r_k of the inputs, or from |r_k J| for random directions of the outputs. All
sources have the same directions, so that the norm of the matrix sum_j J_ij can be estimated from |sum_j J_ij r_k|.

`levels` returns the share of other tokens in a token's derivative, others / (others + |J_ii|). Three forms combine the
Jacobians of the other tokens into one norm:

    form             others
    sum_of_norms     sum_{j != i} |J_ij|            sum of norms (Brunner et al., ICLR 2020, equation 3)
    norm_of_block    sqrt(sum_{j != i} |J_ij|^2)    response to independent perturbations of the other tokens
    norm_of_sum      |sum_{j != i} J_ij|            response to a common perturbation of the other tokens

`norm_of_sum` is the counterpart of |sum_{j != i} F_ij| in the mixing ratios.

Shapes: L layers, F forms, K directions, S tokens of a block, R = S * K (pairs of a token of the block and a direction),
T tokens, D hidden, E = heads * head width, W width of the perturbed vectors.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from attnmix.core.torch_state import forward_derivatives
from attnmix.models.attention import attention_by, explicit
from attnmix.models.capture_points import DECODER_EMBEDDING_SUM, EMBEDDING_SUM, LayerCall, layer_hooks, recording
from attnmix.models.families import family_of, optional_modules

Reference = Literal["word_embedding", "layer_input"]

REFERENCES: tuple[Reference, ...] = ("word_embedding", "layer_input")
FORMS = ("sum_of_norms", "norm_of_block", "norm_of_sum")
EMBEDDING_SUMS = (EMBEDDING_SUM, DECODER_EMBEDDING_SUM)  # names of the recorded sums of embeddings, by stack
PASS_TOKENS = 8192  # maximum number of tokens, summed over tangents, in one pass through a layer
DEVICE_PASS_TOKENS = 2**17  # the maximum on devices other than CPUs, where larger operations are more efficient


class JacobianNorms(NamedTuple):
    """Frobenius norms of the derivatives J_ij = d layer_output_i / d x_j of one text."""

    entries_LTT: Tensor  # |J_ij|, token i by token j
    block_LT: Tensor  # `norm_of_block`: sqrt(sum_{j != i} |J_ij|^2), the norm of the other tokens' J_ij, concatenated
    sum_LT: Tensor  # `norm_of_sum`: |sum_{j != i} J_ij|, response to a common perturbation of all other tokens


class Chain(NamedTuple):
    """The layers of one stack, recorded in the forward pass of a text, for the propagation of tangents."""

    start_TW: Tensor  # the vectors of width W with respect to which outputs are differentiated
    embed: Callable[[Tensor], Tensor]  # map from these vectors to the input of the first layer
    layers: list[LayerCall]


def document_chains(base: PreTrainedModel, ids_1T: Tensor) -> list[Chain]:
    """Run one forward pass of a text, and return one chain per stack (encoder, decoder).

    A chain consists of the vectors `[T, W]` at which derivatives start, the modules between these vectors and the first
    layer, and the recorded layer calls. These calls can be repeated with other vectors. A layer whose activation
    `torch.func` does not support is replaced by a copy with an equivalent activation.
    """
    calls, features = _record_layers(base, ids_1T)
    chains = []
    # Only encoder-decoder models have a second stack.
    for stack, embedding_point in zip(family_of(base.config).stacks, EMBEDDING_SUMS, strict=False):
        calls_of_stack = [call for call in calls if call.stack == stack]
        start_TW = _select_start(calls_of_stack[0], features, embedding_point)
        # If the chain starts at the input of the first layer, there are no such modules, and `embed` returns its input.
        embed = torch.nn.Sequential(*optional_modules(base, stack.embedding))
        layers = [_with_supported_activation(call) for call in calls_of_stack]
        chains.append(Chain(start_TW, embed, layers))
    return chains


def _record_layers(base: PreTrainedModel, ids_1T: Tensor) -> tuple[list[LayerCall], Mapping[Site, Tensor]]:
    """Run one forward pass of a text, and return the calls of all layers in order, and the sums of the embeddings."""
    calls: list[LayerCall] = []
    with torch.no_grad(), recording(base, EMBEDDING_SUMS) as features:

        def append_call(*_: object) -> None:
            """Append the call of the layer that has just run (forward hook)."""
            assert features.layer is not None
            calls.append(features.layer)

        with layer_hooks(base, append_call):
            base(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T))
    return calls, features


def _select_start(first_call: LayerCall, features: Mapping[Site, Tensor], embedding_point: str) -> Tensor:
    """Return the vectors `[T, W]` of one text from which a stack's layers are computed: the sums of the embeddings.

    In families in which these sums are not recorded, return the input of the first layer. `first_call` is the recorded
    call of the first layer, and W is the width of the returned vectors.
    """
    # Embeddings are recorded under the number of the layer before the stack, which is 0 for the first stack.
    embedding_sum = Site(layer=first_call.number - 1, point=embedding_point)
    vectors_1TW = features.get(embedding_sum, first_call.whole.hidden)
    return vectors_1TW[0]


def _with_supported_activation(call: LayerCall) -> LayerCall:
    """Return `call` or, if `torch.func` does not support the family's activation, a call of a copied layer.

    The copy has an equivalent activation, and shares the parameters of the layer. It must be created after the end of
    the recording, because it would otherwise include the hooks of the recording. `call.whole` contains the module of
    the layer (also available as `call.module`) and the arguments of its call, which the returned call repeats.
    """
    equivalent_name = call.stack.activation
    if equivalent_name is None:  # The activation of the family is supported.
        return call
    # Parameters in the memo of `deepcopy` are not copied, so that the layer and its copy share them.
    shared_parameters = {id(parameter): parameter for parameter in call.module.parameters()}
    layer = copy.deepcopy(call.module, shared_parameters)
    _first_linear, activation_path, _last_linear = call.stack.feed_forward
    layer.set_submodule(activation_path, ACT2FN[equivalent_name])
    call_of_copy = replace(call.whole, module=layer)  # the same arguments
    return replace(call, whole=call_of_copy)


def derivative_norms(chains: Sequence[Chain], reference: Reference, directions: int, seed: int) -> JacobianNorms:
    """Return the norms of the derivatives J_ij = d layer_output_i / d x_j of one text, in all layers.

    The fields are |J_ij| (`entries_LTT`), sqrt(sum_{j != i} |J_ij|^2) (`block_LT`) and |sum_{j != i} J_ij| (`sum_LT`).
    For the reference `word_embedding`, x_j is the word embedding of token j; for `layer_input`, it is the layer's input
    at token j. In the decoder of an encoder-decoder model, x_j is a vector of the decoder, and encoder states are
    constant. A norm is estimated from K (`directions`) random orthonormal directions r_k in W dimensions: the
    expectation of sum_k |J r_k|^2 is |J|_F^2 K / W. The estimate is exact if K equals W.

    Args:
        chains: The result of `document_chains`: the recorded layers of each stack (encoder, decoder).
    """
    parts: list[JacobianNorms] = []  # consecutive layers
    for chain in chains:
        if reference == "layer_input":
            parts.extend(_compute_layer_norms(call, directions, seed) for call in chain.layers)
        else:
            parts.append(_compute_chain_norms(chain, directions, seed))
    return JacobianNorms(
        entries_LTT=torch.cat([part.entries_LTT for part in parts]),
        block_LT=torch.cat([part.block_LT for part in parts]),
        sum_LT=torch.cat([part.sum_LT for part in parts]),
    )


def levels(norms: JacobianNorms) -> Tensor:
    """Return the share of other tokens in each token's derivative, `[layers, forms, T]` in the order of `FORMS`.

    The share is others / (others + |J_ii|), where the `FORMS` are three ways to combine the derivatives J_ij with
    respect to the other tokens j into one norm. It is NaN if all derivatives of the token are 0.
    """
    own_LT = norms.entries_LTT.diagonal(dim1=-2, dim2=-1)
    others_LTT = norms.entries_LTT - torch.diag_embed(own_LT)
    others_by_form = {
        "sum_of_norms": others_LTT.sum(-1),  # sum_{j != i} |J_ij|
        "norm_of_block": norms.block_LT,  # sqrt(sum_{j != i} |J_ij|^2)
        "norm_of_sum": norms.sum_LT,  # |sum_{j != i} J_ij|
    }
    others_LFT = torch.stack([others_by_form[form] for form in FORMS], dim=1)
    total_LFT = others_LFT + own_LT.unsqueeze(1)
    return others_LFT / total_LFT


def _compute_chain_norms(chain: Chain, directions: int, seed: int) -> JacobianNorms:
    """Return the norms of the derivatives J_ij of all layers' outputs with respect to the start of a chain.

    A chain is a stack of layers with the vectors from which tangents are propagated. J_ij is the derivative of a
    layer's output at token i with respect to the vector of token j. The squares of the norms |J_ij| (`entries_LTT`),
    sqrt(sum_{j != i} |J_ij|^2) (`block_LT`) and |sum_{j != i} J_ij| (`sum_LT`) are estimated from the squared lengths
    of the vectors J_ij r_k, or of their sums over j != i, for K random directions r_k.
    """
    basis_KW = _draw_directions(chain.start_TW, directions, seed)
    width = basis_KW.shape[-1]
    tokens = len(chain.start_TW)
    directions_per_pass = max(1, _get_pass_tokens(basis_KW) // tokens)
    squares = []
    squares_of_sums = []
    for directions_KW in basis_KW.split(directions_per_pass):
        squares_of_pass_KLTT, squares_of_sums_of_pass_KLT = _compute_chain_squares(chain, directions_KW)
        squares.append(squares_of_pass_KLTT)
        squares_of_sums.append(squares_of_sums_of_pass_KLT)
    squares_KLTT = torch.cat(squares)
    square_of_sum_KLT = torch.cat(squares_of_sums)
    sum_of_squares_KLT = squares_KLTT.sum(-1) - squares_KLTT.diagonal(dim1=-2, dim2=-1)  # over j != i
    return JacobianNorms(
        entries_LTT=_compute_norm(squares_KLTT, width),
        block_LT=_compute_norm(sum_of_squares_KLT, width),
        sum_LT=_compute_norm(square_of_sum_KLT, width),
    )


def _compute_chain_squares(chain: Chain, directions_KW: Tensor) -> tuple[Tensor, Tensor]:
    """Return |J_ij r_k|^2 `[K, L, T, T]` and |sum_{j != i} J_ij r_k|^2 `[K, L, T]` for K directions r_k of width W.

    J_ij is the derivative of a layer's output at token i, of width D, with respect to the vector of token j, of width
    W, at the start of the chain. The vectors J_ij r_k of all L layers are computed for one block of S sources j at a
    time. The sum over j != i is therefore accumulated block by block, and squared after the last block.
    """
    tokens = len(chain.start_TW)
    directions = len(directions_KW)
    layers = len(chain.layers)
    squares_KLTT = directions_KW.new_empty(directions, layers, tokens, tokens, dtype=torch.float64)
    sums = []  # by layer, [K, T, D]: sum_{j != i} J_ij r_k over the sources j of all blocks so far
    for call in chain.layers:
        input_TD = call.whole.hidden[0]  # the recorded input of the layer
        sums.append(input_TD.new_zeros(directions, *input_TD.shape))
    # Each block consists of the indices of its sources, and their one-hot encodings.
    for sources_S, source_ST in _split_tokens(tokens, directions, like=directions_KW):
        is_other_ST = 1 - source_ST  # 1 for j != i, 0 for j = i
        for layer, moved_SKTD in enumerate(_propagate_tangents(chain, source_ST, directions_KW)):
            # `moved_SKTD` contains J_ij r_k: source j on the axis S, token i on the axis T.
            sums[layer] += torch.einsum("sktd,st->ktd", moved_SKTD, is_other_ST)
            squares_SKT = moved_SKTD.square().sum(-1).double()
            squares_KTS = squares_SKT.permute(1, 2, 0)
            squares_of_layer_KTT = squares_KLTT[:, layer]  # a view
            squares_of_layer_KTT[:, :, sources_S] = squares_KTS
    squares_of_sums = [sum_KTD.square().sum(-1) for sum_KTD in sums]
    squares_of_sums_KLT = torch.stack(squares_of_sums, dim=1)
    return squares_KLTT, squares_of_sums_KLT.double()


def _propagate_tangents(chain: Chain, source_ST: Tensor, directions_KW: Tensor) -> Iterator[Tensor]:
    """Yield, for each layer, the derivatives `[S, K, T, D]` of its output along K directions at each of S sources.

    `source_ST` contains the one-hot encodings of the sources. For each source and direction, a tangent is propagated
    from the start of the chain through all layers; it equals the direction at the source, and 0 at all other tokens.
    W is the width of the vectors at the start of the chain, and D the width of the layers' inputs and outputs.
    """
    start_SKTW = torch.einsum("st,kw->sktw", source_ST, directions_KW)
    sources_and_directions = start_SKTW.shape[:2]
    start_RTW = start_SKTW.flatten(0, 1)  # R = S * K tangents
    # `differentials` returns the derivatives of a function at a point (second argument) along each of R tangents.
    moved_RTD = differentials(chain.embed, chain.start_TW, start_RTW)
    for call in chain.layers:
        run_layer = call.whole  # the complete layer as a function of its input
        input_1TD = run_layer.hidden  # the recorded input: a batch of one text, hence the axis of length 1
        moved_R1TD = differentials(run_layer, input_1TD, moved_RTD.unsqueeze(1))
        moved_RTD = moved_R1TD.squeeze(1)
        moved_SKTD: Tensor = moved_RTD.unflatten(0, sources_and_directions)
        yield moved_SKTD


def _compute_layer_norms(call: LayerCall, directions: int, seed: int) -> JacobianNorms:
    """Return the norms of the derivatives J_ij of a layer's output at token i with respect to its input at token j.

    The squares of the norms |J_ij| (`entries_LTT`), sqrt(sum_{j != i} |J_ij|^2) (`block_LT`) and |sum_{j != i} J_ij|
    (`sum_LT`) are estimated from the squared lengths of the vectors r_k J_ij, or of their sums over j != i. The K
    random directions r_k of the output are the same for all tokens i, and are drawn in `width` dimensions.
    """
    graph = _build_layer_graph(call)
    tokens, width = graph.output_1TD.shape[1:]
    basis_KD = _draw_directions(graph.output_1TD[0].detach(), directions, seed)
    directions_K1TD = basis_KD[:, None, None].expand(-1, -1, tokens, -1)
    # Backpropagate r_k from the outputs of all tokens i: to the input of each token j, which yields sum_i r_k J_ij, and
    # to the outputs of the attention heads, from which `_compute_layer_squares` separates the tokens i.
    inputs = (graph.x_1TD, graph.heads_1TE)
    input_K1TD, heads_K1TE = _backpropagate(graph.output_1TD, inputs, output_vectors=directions_K1TD)
    squares = _compute_layer_squares(graph, input_K1TD.squeeze(1), heads_K1TE.squeeze(1))
    return JacobianNorms(
        entries_LTT=_compute_norm(squares.squares_KTT, width).unsqueeze(0),
        block_LT=_compute_norm(squares.sum_of_squares_KT, width).unsqueeze(0),
        sum_LT=_compute_norm(squares.square_of_sum_KT, width).unsqueeze(0),
    )


class _LayerGraph(NamedTuple):
    """Tensors of one layer that are connected in an autograd graph."""

    x_1TD: Tensor  # the layer's input
    heads_1TE: Tensor  # the concatenated outputs of the attention heads
    output_1TD: Tensor  # the layer's output


def _build_layer_graph(call: LayerCall) -> _LayerGraph:
    """Run a layer again with its recorded input, and return the tensors of the autograd graph.

    A hook records the concatenated outputs of the attention heads: the input of attention's output projection.
    """
    run_layer = call.whole  # the complete layer as a function of its input
    x_1TD = run_layer.hidden.detach().clone()  # the recorded input
    x_1TD.requires_grad_()
    heads: list[Tensor] = []

    def record_heads(_module: Any, inputs: Any) -> None:
        heads.append(inputs[0])

    output_projection_path, _side = call.stack.places()["attention_heads"]
    output_projection = call.module.get_submodule(output_projection_path)
    hook = output_projection.register_forward_pre_hook(record_heads)
    with torch.enable_grad(), attention_by(explicit()):
        output_1TD = run_layer(x_1TD)
    hook.remove()
    return _LayerGraph(x_1TD, heads[0], output_1TD)


class _LayerSquares(NamedTuple):
    """Squared lengths of vector-Jacobian products r_k J_ij of one layer."""

    squares_KTT: Tensor  # |r_k J_ij|^2, token i by token j
    sum_of_squares_KT: Tensor  # sum_{j != i} |r_k J_ij|^2
    square_of_sum_KT: Tensor  # |sum_{j != i} r_k J_ij|^2


def _compute_layer_squares(graph: _LayerGraph, input_KTD: Tensor, heads_KTE: Tensor) -> _LayerSquares:
    """Return the squared lengths of the products r_k J_ij for each token i of the output and j of the input.

    `heads_KTE` contains r_k, backpropagated from the output of each token i to the head outputs of token i. The output
    of token i depends on other tokens only through these head outputs. Backpropagation from them to the inputs of the
    other tokens j, separately for each token i, therefore yields the complete r_k J_ij for j != i. The product r_k J_jj
    is obtained by subtraction of the r_k J_ij of all i != j from sum_i r_k J_ij, which `input_KTD` contains.
    """
    directions, tokens, _width = input_KTD.shape
    squares_KTT = input_KTD.new_empty(directions, tokens, tokens, dtype=torch.float64)
    square_of_sum_KT = input_KTD.new_empty(directions, tokens, dtype=torch.float64)
    own_KTD = input_KTD.clone()  # sum_i r_k J_ij; after the loop, only r_k J_jj
    # Each block consists of the indices of its tokens i, and their one-hot encodings.
    for targets_S, same_ST in _split_tokens(tokens, directions, like=input_KTD):
        is_other_ST = 1 - same_ST
        head_vectors_SKTE = torch.einsum("st,kte->skte", same_ST, heads_KTE)  # 0 for all tokens except i
        products_SKTD = _backpropagate_from_heads(graph, head_vectors_SKTE)  # the axis T contains the tokens j
        others_SKTD = products_SKTD * is_other_ST[:, None, :, None]  # r_k J_ij; 0 for j = i
        own_KTD -= others_SKTD.sum(0)
        squares_SKT = others_SKTD.square().sum(-1).double()
        squares_KTT[:, targets_S] = squares_SKT.transpose(0, 1)
        sum_SKD = others_SKTD.sum(2)
        square_of_sum_KT[:, targets_S] = sum_SKD.square().sum(-1).double().T
    sum_of_squares_KT = squares_KTT.sum(-1)  # over j != i, because the diagonal of `squares_KTT` is still 0
    own_squares_KT = own_KTD.square().sum(-1)
    squares_KTT.diagonal(dim1=-2, dim2=-1).copy_(own_squares_KT)
    return _LayerSquares(squares_KTT, sum_of_squares_KT, square_of_sum_KT)


def _backpropagate_from_heads(graph: _LayerGraph, head_vectors_SKTE: Tensor) -> Tensor:
    """Return vectors backpropagated from the attention heads' outputs to the layer's input, `[S, K, T, D]`.

    `head_vectors_SKTE` has, for each of S tokens and K directions, the vectors to be backpropagated: one of width E for
    each of the T tokens. E is the width of all heads' outputs together, and D the width of the layer's input.
    """
    head_vectors_R1TE = head_vectors_SKTE.flatten(0, 1).unsqueeze(1)  # R = S * K
    (products_R1TD,) = _backpropagate(graph.heads_1TE, inputs=(graph.x_1TD,), output_vectors=head_vectors_R1TE)
    products_RTD = products_R1TD.squeeze(1)
    products_SKTD: Tensor = products_RTD.unflatten(0, head_vectors_SKTE.shape[:2])
    return products_SKTD


def _backpropagate(output: Tensor, inputs: Sequence[Tensor], output_vectors: Tensor) -> tuple[Tensor, ...]:
    """Return the vector-Jacobian products of each input for the `output_vectors`, batched over the first axis."""
    return torch.autograd.grad(output, inputs, output_vectors, retain_graph=True, is_grads_batched=True)


def _draw_directions(vectors: Tensor, directions: int, seed: int) -> Tensor:
    """Return K random orthonormal directions `[K, width]`; K is `directions`, at most the width of `vectors`."""
    width = vectors.shape[-1]
    number = min(directions, width)
    generator = torch.Generator()
    generator.manual_seed(seed)
    random_WK = torch.randn(width, number, generator=generator, dtype=torch.float64)
    orthonormal_WK: Tensor = torch.linalg.qr(random_WK).Q
    return orthonormal_WK.T.to(vectors)


def _split_tokens(tokens: int, directions: int, like: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of S token indices `[S]`, each with the one-hot encodings `[S, T]` of these indices among T tokens.

    The encodings have the dtype and device of `like`. For each index and direction, a pass through a layer propagates
    T vectors: tangents in forward mode, gradients in backward mode. The size of a block limits their number.
    """
    indices_T = torch.arange(tokens, device=like.device)
    vectors_per_index = directions * tokens
    indices_per_pass = max(1, _get_pass_tokens(like) // vectors_per_index)
    for indices_S in indices_T.split(indices_per_pass):
        is_same_ST = indices_S[:, None] == indices_T
        yield indices_S, is_same_ST.to(like)


def _get_pass_tokens(vectors: Tensor) -> int:
    """Return the maximum number of tokens, summed over tangents, in one pass through a layer on the vectors' device."""
    if vectors.is_cpu:
        return PASS_TOKENS
    return DEVICE_PASS_TOKENS


def _compute_norm(squares_K: Tensor, width: int) -> Tensor:
    """Return the estimate `[...]` of |J| from |J r_k|^2 `[K, ...]` for K orthonormal directions in `width` dimensions.

    |J|^2 is estimated by the mean of |J r_k|^2 times `width`. This estimate is unbiased, but its square root is too
    small on average. If e is the relative error of the estimate, with expectation 0 and variance v, the square root is
    |J| sqrt(1 + e). Because sqrt(1 + e) = 1 + e / 2 - e^2 / 8 + ..., the expectation of the square root is about
    |J| (1 - v / 8). The square root is therefore multiplied by 1 + v / 8.

    The variance of the mean is estimated as that of K draws without replacement from `width` values:
    s^2 / K * (1 - K / width), where s^2 is the sample variance with the divisor K - 1. It is 0 if K equals `width`. For
    a single direction, it is unknown, and the norm is not corrected.
    """
    directions = len(squares_K)
    mean = squares_K.mean(0)
    spread = squares_K.var(0, correction=0)  # the variance with the divisor K; 0 for a single direction
    variance_with_replacement = spread / max(1, directions - 1)  # s^2 / K
    undrawn_share = 1 - directions / width
    variance_of_mean = variance_with_replacement * undrawn_share
    relative_variance = torch.where(mean > 0, variance_of_mean / mean.square(), 0)
    biased_norm = (mean * width).sqrt()
    norm: Tensor = biased_norm * (1 + relative_variance / 8)
    return norm


class _Linear(torch.autograd.Function):
    """torch's `linear` for a constant weight and bias, which have no tangents."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save the weight for `jvp`."""
        weight = inputs[1]
        context.save_for_forward(weight)

    @staticmethod
    def jvp(context: Any, x_tangent: Tensor, *_constants: None) -> Tensor:
        """Return the derivative of the output along the tangent of `x`."""
        (weight,) = context.saved_tensors
        moved: Tensor = x_tangent @ weight.T
        return moved


class _Gelu(torch.autograd.Function):
    """torch's `gelu`, whose slope is computed only once for all tangents."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, approximate: str = "none") -> Tensor:
        return gelu(x, approximate=approximate)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the slope of gelu at `x` for `jvp`."""
        x, *options = inputs
        approximate = options[0] if options else "none"
        slope = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)
        context.save_for_forward(slope)

    @staticmethod
    def jvp(context: Any, x_tangent: Tensor, *_constants: None) -> Tensor:
        """Return the derivative of the output along the tangent of `x`."""
        (slope,) = context.saved_tensors
        moved: Tensor = x_tangent * slope
        return moved


class _LeanDerivatives(TorchFunctionMode):
    """A context in which the functions in `EQUIVALENTS` are replaced by equivalents that are differentiated faster."""

    EQUIVALENTS: ClassVar[Mapping[Any, Callable[..., Tensor]]] = {linear: _Linear.apply, gelu: _Gelu.apply}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the faster equivalent of `function`, if any, otherwise `function` itself.

        torch calls this method instead of `function`.
        """
        options = kwargs or {}
        equivalent = self.EQUIVALENTS.get(function)
        if equivalent is None:
            return function(*args, **options)
        # The equivalents accept only positional arguments. Keyword arguments are assumed to be in the order of the
        # parameters that follow the positional ones.
        return equivalent(*args, *options.values())


def differentials(function: Callable[[Tensor], Tensor], at: Tensor, along: Tensor) -> Tensor:
    """Return the derivatives of `function` at the point `at` along each tangent `along[k]`, stacked over k."""

    def differentiate(tangent: Tensor) -> Tensor:
        derivative: Tensor = jvp(function, (at,), (tangent,))[1]
        return derivative

    # Attention weights are computed explicitly, some functions are replaced by equivalents that are faster to
    # differentiate, and only one thread at a time uses forward mode.
    with attention_by(explicit()), _LeanDerivatives(), forward_derivatives():
        derivatives: Tensor = vmap(differentiate)(along)
    return derivatives
