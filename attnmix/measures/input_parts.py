"""Decomposition of all vectors of a model into parts, one for each token of the input and one for the biases.

    y_i = sum_j P_ij + b_i

The part P_ij is the contribution of source token j to the vector y_i of token i, and b_i is the contribution of the
model's biases. An input vector of the first layer consists only of the part of its own token. Each layer is treated as
an affine map: its attention weights, the standard deviations of its norms and the slopes of its activations are fixed
at their values in the forward pass. For attention, skip connections and norms, this decomposition is exact. The output
of an activation is attributed to the parts of its input according to one of two published rules (`RULES`). The parts
sum to the model's vector under both rules, but their sizes depend on the rule (Modarressi et al., ACL 2023: DecompX).

In encoder-decoder models, only the encoder is decomposed. The feed-forward network must be gated or consist of two
Linears around an activation (`parts_obstacle`). It may follow attention or run in parallel with attention.

Shapes: J parts (source tokens, then the biases), T tokens, N or R selected tokens, K levels (the embeddings, then each
layer), L layers, D hidden, H heads, E = H * head width, W width of the feed-forward network, Q quantities.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from attnmix.core.arithmetic.kernels import task_threads
from attnmix.core.errors import InputError
from attnmix.core.lazy import cached_property
from attnmix.core.settings import MAX_PARTS_TOKENS
from attnmix.measures.layers import AfterAttention, Block, LayerPass, checkpoint_name, run_layers, value_map
from attnmix.measures.weights import Linear, Norm
from attnmix.models.encoding import padded
from attnmix.models.families import PROJECTED, Family, family_of, find_layers, layer_counts

BLOCK_NUMBERS = 2**24  # maximum number of elements `[J, T, W]` in the feed-forward network for a block of J sources
CACHED_NUMBERS = 2**19  # maximum number of activations for a block of sources on a CPU, to fit into the cache
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Maximum rounding error of the summed parts, relative to the largest element of the vectors, by dtype."""
QUANTITIES = (
    "own_share",
    "own_projection",
    "others_projection",
    "bias_projection",
    "bias_length",
    "ill_conditioned",
    "coherence",
)
"""Quantities of a text's parts that `by_token` returns."""
OPPOSITE_COSINE = -0.9
"""A decomposition is ill-conditioned if the other tokens' summed parts and the part of the biases have a lower cosine.

Nearly opposite vectors cancel at least in part.
"""
POINTS = ("attention_output", PROJECTED, "layer_output")


class Tangents(AfterAttention):
    """`AfterAttention` for the rule `tangent`: g(p) = g'(p) p + remainder.

    The remainder is assigned to the biases.
    """

    @cached_property
    def slopes(self) -> tuple[Tensor, ...]:
        """The derivative g'(p) `[N, W]` of the activation's output g(p) with respect to its input p.

        A gated network computes g(p) u from two inputs p and u. The derivatives with respect to p and u are u g'(p) and
        g(p).
        """
        if not self.block.stack.gated:
            (p_NW,) = self.inputs
            return (_differentiate(self._activation, p_NW),)
        p_NW, u_NW = self.inputs
        derivative_NW = _differentiate(self._activation, p_NW)
        return u_NW * derivative_NW, self._activation(p_NW)

    @cached_property
    def constant(self) -> Tensor:
        """The remainder `[N, W]` of the linear approximation of g(p), which is assigned to the biases: g(p) - g'(p) p.

        g is the activation, and p is its input. A gated network computes g(p) u from two inputs p and u. The product
        has the linear part u g'(p) p + g(p) u, and thus the remainder -u g'(p) p.
        """
        if not self.block.stack.gated:
            (p_NW,) = self.inputs
            remainder_NW: Tensor = self._activation(p_NW) - _differentiate(self._activation, p_NW) * p_NW
            return remainder_NW
        p_NW, u_NW = self.inputs
        linear_NW = _differentiate(self._activation, p_NW) * p_NW
        return -u_NW * linear_NW


def _differentiate(activation: Module, p_NW: Tensor) -> Tensor:
    """Return g'(p) `[N, W]` of an elementwise activation."""
    with torch.enable_grad():
        input_NW = p_NW.detach().requires_grad_()
        # The activation is elementwise, so the gradient of the sum contains g'(p) of each element.
        total = activation(input_NW).sum()
        derivative_NW: Tensor = torch.autograd.grad(total, input_NW)[0]
    return derivative_NW


RULES: Mapping[str, type[AfterAttention]] = {"chord": AfterAttention, "tangent": Tangents}
"""Rules for attributing the output of an activation g to the parts of its input p.

`chord` multiplies each part by (g(p) - g(0)) / p, the slope of g between 0 and p. This is the default of DecompX, and
equals integrated gradients with baseline 0 (Kobayashi et al., ICLR 2024). `tangent` multiplies each part by g'(p), the
slope at p, and adds the remainder of g(p) to the biases (the linear approximation of DecompX). Both papers treat an
activation between two Linears. In a gated network, `chord` computes integrated gradients of the product of both
factors, and `tangent` uses the derivative of this product.
"""


def parts_obstacle(family: Family) -> str | None:
    """Return the reason why the vectors of a family cannot be decomposed; None if they can."""
    if family.stacks[0].feed_forward_network:
        return None
    return "its feed-forward network is neither an activation between two Linears nor gated"


def embedding_parts(x_TD: Tensor, sources: slice = slice(None)) -> Tensor:
    """Return the parts `[J, T, D]` of the first layer's input `x_TD`, for the tokens `sources` and for the biases.

    The part of a source equals `x_TD` at the position of this source, and is 0 at all other positions. The last part,
    that of the biases, is 0.
    """
    all_positions = torch.arange(len(x_TD), device=x_TD.device)
    positions = all_positions[sources]
    parts_JTD = x_TD.new_zeros(len(positions) + 1, *x_TD.shape)
    part_indices = all_positions[: len(positions)]
    parts_JTD[part_indices, positions] = x_TD[positions]
    return parts_JTD


def through_layer(
    layer_pass: LayerPass, values: Linear, parts_JTD: Tensor, rows: slice = slice(None), rule: str = "chord"
) -> Tensor:
    """Propagate the parts `[J, T, D]` of a layer's input to its output `[J, R, D]` at the R tokens that `rows` selects.

    The last part is that of the biases. `layer_pass` contains one text, and `values` is the `value_map` of the layer.
    `rule` is one of `RULES`.
    """
    layer = _AffineLayer(layer_pass, values, rows, rule)
    source_parts_JTD = parts_JTD[:-1]
    bias_part_1TD = parts_JTD[-1:]
    # The biases are propagated first, because this step caches quantities that the propagation of all sources needs.
    bias_part_1RD = layer.propagate(bias_part_1TD, are_biases=True)
    blocks = _split_sources(source_parts_JTD, layer.rest.preactivation_NW)
    source_parts_by_block = _apply_in_threads(layer.propagate, blocks)
    return torch.cat([*source_parts_by_block, bias_part_1RD])


class _AffineLayer:
    """The affine map that replaces a layer in the forward pass of one text, with the outputs of the tokens `rows`."""

    def __init__(self, layer_pass: LayerPass, values: Linear, rows: slice, rule: str) -> None:
        """Store the attention weights `[H, R, T]` and the norms' standard deviations, which the map treats as fixed.

        `layer_pass` contains the forward pass of a text of T tokens. `rows` selects R of them, `values` contains W_V
        and b_V, and `rule` is one of `RULES`. The attribute `rest` propagates parts through the steps after attention:
        skip connections, norms and the feed-forward network.
        """
        block = layer_pass.block
        self.block = block
        self.values = values
        self.rows = rows
        self.weights_HRT = layer_pass.attention.weights(rows)
        self.input_deviation_T1 = block.input_norm.deviation(layer_pass.x)
        self.attention_deviation_R1 = block.attention_output_norm.deviation(layer_pass.projected[rows])
        # The input of a feed-forward network parallel to attention is the layer's input. `rest` is for N tokens; here,
        # these are the R tokens.
        before_network_RD = layer_pass.x[rows] if block.stack.parallel else layer_pass.residual[rows]
        preactivation_RW = _compute_preactivation(block, before_network_RD)
        after_attention_class = RULES[rule]
        self.rest = after_attention_class(
            block, residual_ND=before_network_RD, cross_ND=None, preactivation_NW=preactivation_RW
        )
        if block.output_norm.absent:
            self.output_deviation_R1 = before_network_RD.new_ones(())  # A missing norm does not divide.
        else:
            output_norm_input_RD = self._compute_output_norm_input(layer_pass.residual[rows])
            self.output_deviation_R1 = block.output_norm.deviation(output_norm_input_RD)

    def _compute_output_norm_input(self, residual_RD: Tensor) -> Tensor:
        """Return the sum `[R, D]` of the vectors before the feed-forward network and of the network's output.

        This sum is the input of the layer's output norm. `residual_RD` contains the vectors after attention's skip
        connection. The methods with the suffix `_with_biases` add all biases. They usually receive the part of the
        biases, but here whole vectors, for which they return the vectors of the model.
        """
        stream_RD = self.rest.stream_with_biases(residual_RD)
        network_output_RD = self.rest.added_with_biases(stream_RD)
        return stream_RD + network_output_RD

    def propagate(self, parts_JTD: Tensor, are_biases: bool = False) -> Tensor:
        """Propagate J parts `[J, T, D]` of the layer's input to its output `[J, R, D]` at the R tokens `rows`.

        A part is a contribution of source tokens or, if `are_biases` is True, that of the biases. The biases of this
        layer are only added to the part of the biases. `rest.stream` propagates parts to the skip connection of the
        feed-forward network, and `rest.added` through this network.
        """
        propagate_to_stream = self.rest.stream
        propagate_through_network = self.rest.added
        if are_biases:
            propagate_to_stream = self.rest.stream_with_biases
            propagate_through_network = self.rest.added_with_biases
        # The order of these operations determines the order in which gradients are added, and thus rounding errors.
        attention_JRD = self._propagate_through_attention(parts_JTD, are_biases)
        input_JRD = parts_JTD[:, self.rows]
        residual_JRD = attention_JRD + input_JRD
        if self.block.stack.parallel:  # The feed-forward network reads the same input as attention.
            output_JRD = residual_JRD + propagate_through_network(input_JRD)
        else:
            stream_JRD = propagate_to_stream(residual_JRD)
            output_JRD = stream_JRD + propagate_through_network(stream_JRD)
        return _apply_norm(self.block.output_norm, output_JRD, self.output_deviation_R1, are_biases)

    def _propagate_through_attention(self, parts_JTD: Tensor, are_biases: bool) -> Tensor:
        """Propagate J parts `[J, T, D]` of the layer's input to the attention output `[J, R, D]` at R tokens, `rows`.

        A part is a contribution of source tokens or, if `are_biases` is True, that of the biases. The biases of linear
        maps and norms are only added to the part of the biases. E = H * d is the width of all H heads together.
        """
        block = self.block
        heads = len(self.weights_HRT)
        normed_JTD = _apply_norm(block.input_norm, parts_JTD, self.input_deviation_T1, are_biases)
        values_JTE = _apply_linear(self.values, normed_JTD, are_biases)
        values_JHTd = values_JTE.unflatten(-1, (heads, -1)).transpose(1, 2)
        mixed_JHRd = self.weights_HRT @ values_JHTd
        mixed_JRE = mixed_JHRd.transpose(1, 2).flatten(-2)
        projected_JRD = _apply_linear(block.output, mixed_JRE, are_biases)
        return _apply_norm(block.attention_output_norm, projected_JRD, self.attention_deviation_R1, are_biases)


def _apply_linear(affine: Linear, parts: Tensor, are_biases: bool) -> Tensor:
    """Return parts of vectors, `[..., D]`, after an affine map.

    A vector is the sum of the parts of source tokens and of the biases. The map's bias is only added to the part of the
    biases (`are_biases`), so that the results sum to the output of the map.
    """
    products = parts @ affine.W
    if not are_biases:
        return products
    return products + affine.b


def _apply_norm(norm: Norm, parts: Tensor, deviation: Tensor, are_biases: bool) -> Tensor:
    """Return parts of vectors, `[..., D]`, after a norm; `deviation` is the norm's divisor for the whole vectors.

    A vector is the sum of the parts of source tokens and of the biases. The norm's beta is only added to the part of
    the biases (`are_biases`), so that the results sum to the output of the norm.
    """
    if norm.absent:
        return parts
    divided = norm.linear(parts) / deviation  # `linear` applies centring, if any, and gamma
    if not are_biases:
        return divided
    return divided + norm.beta


def _apply_in_threads(function: Callable[[Tensor], Tensor], blocks: Sequence[Tensor]) -> list[Tensor]:
    """Return the result of `function` for each block, computed in parallel threads if that is faster.

    Results with autograd graphs are computed without threads.
    """
    executor = None
    if not torch.is_grad_enabled():
        executor = task_threads(blocks[0].device)
    if executor is None or len(blocks) < 2:
        return [function(block) for block in blocks]
    without_derivatives = torch.no_grad()(function)  # Gradient mode is local to a thread.
    return list(executor.map(without_derivatives, blocks))


def _split_sources(parts_JTD: Tensor, preactivation_RW: Tensor) -> tuple[Tensor, ...]:
    """Split the parts of J sources in the vectors of T tokens into blocks of sources that fit into the cache of a CPU.

    For each source, the feed-forward network computes activations of the shape of `preactivation_RW`: R tokens by its
    width W. On other devices, return a single block.
    """
    if not parts_JTD.is_cpu:
        return (parts_JTD,)
    activations_per_source = preactivation_RW.numel()
    sources_per_block = max(1, CACHED_NUMBERS // activations_per_source)
    blocks: tuple[Tensor, ...] = parts_JTD.split(sources_per_block)
    return blocks


def _compute_preactivation(block: Block, residual_RD: Tensor) -> Tensor:
    """Return the output `[R, W]` of the feed-forward network's first Linear for the vectors `residual_RD`.

    The norm after attention and the input norm of the network, if any, are applied to the vectors first.
    """
    first_linears, _activation, _last_linear = block.feed_forward
    linear = first_linears[0]
    stream_RD = block.attention_norm.normalise(residual_RD)
    network_input_RD = block.feed_forward_norm.normalise(stream_RD)
    return network_input_RD @ linear.W + linear.b


class _DecomposedVectors(NamedTuple):
    """The vectors of one level (the embeddings or a layer) and their parts."""

    whole_TD: Tensor
    parts_JTD: Tensor  # the parts of sources, then the part of the biases

    @property
    def sources_JTD(self) -> Tensor:
        """The parts of the sources."""
        return self.parts_JTD[:-1]

    @property
    def bias_TD(self) -> Tensor:
        """The part of the biases."""
        return self.parts_JTD[-1]


class _Level:
    """Measures of the parts of one level (the embeddings or a layer), accumulated over blocks of sources."""

    def __init__(self, whole_TD: Tensor, bias_TD: Tensor) -> None:
        """Store the vectors `whole_TD` and the part of the biases `bias_TD`, and allocate tensors for the measures."""
        tokens = len(whole_TD)
        self.whole_TD = whole_TD
        self.bias_TD = bias_TD
        self.length_TT = whole_TD.new_zeros(tokens, tokens)  # |P_ij|, token by source
        self.projection_TT = whole_TD.new_zeros(tokens, tokens)  # signed shares, token by source
        self.own_TD = torch.zeros_like(whole_TD)  # P_ii
        self.sources_sum_TD = torch.zeros_like(whole_TD)  # sum of the parts of all sources added so far

    def add(self, parts_JTD: Tensor, sources: slice) -> None:
        """Add the parts of the J source tokens `sources` to the measures: lengths, signed shares, sum and own parts.

        `parts_JTD` contains the part of each of these sources (first axis) in the vector of each token (second axis).
        """
        length_JT = parts_JTD.norm(dim=-1)
        self.length_TT[:, sources] = length_JT.T
        projection_JT = projection(parts_JTD, self.whole_TD)
        self.projection_TT[:, sources] = projection_JT.T
        self.sources_sum_TD += parts_JTD.sum(0)
        positions = torch.arange(sources.start, sources.stop, device=parts_JTD.device)
        indices = positions - sources.start  # of the sources on the axis J
        self.own_TD[positions] = parts_JTD[indices, positions]  # the part of each source token in its own vector

    def compute_bias_cosine(self) -> Tensor:
        """Return the cosine `[T]` between the other tokens' summed parts and the part of the biases.

        The cosine is NaN if either of these vectors is 0.
        """
        others_TD = self.others_TD
        products_T = (others_TD * self.bias_TD).sum(-1)
        lengths_T = others_TD.norm(dim=-1) * self.bias_TD.norm(dim=-1)
        cosine_T: Tensor = products_T / lengths_T
        return cosine_T

    @property
    def others_TD(self) -> Tensor:
        """The sum of the parts of all other tokens."""
        return self.sources_sum_TD - self.own_TD


class PartsReader:
    """Decomposition of a model's vectors into parts, one text at a time."""

    def __init__(self, base: PreTrainedModel, rule: str = "chord") -> None:
        """Store the model and the rule; raise `InputError` for an unknown rule or an unsupported family.

        `rule` is one of `RULES`, and determines how an activation's output is attributed to the parts of its input.
        """
        if rule not in RULES:
            raise InputError(f"rule: {rule!r}; allowed: {', '.join(RULES)}")
        family = family_of(base.config)
        obstacle = parts_obstacle(family)
        if obstacle:
            raise InputError(f"parts: the model family {family.model_type} cannot be decomposed, because {obstacle}")
        self.base = base
        self.rule = rule
        self.stack = family.stacks[0]
        first_layer = find_layers(base, self.stack)[0]
        first_linears, _activation, _last_linear = Block(first_layer, self.stack).feed_forward
        # The width of the feed-forward network limits the number of sources that are propagated together.
        self.width = first_linears[0].W.shape[1]
        self.values: list[Linear] = []  # W_V and b_V of each layer (`value_map`), read at first use

    def read(self, batch: Mapping[str, Tensor], advance: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
        """Return measures of the parts of one text, by name; `batch` contains this text without padding.

        At each of K levels (the embeddings, then each layer), the vector y_i of token i is the sum of the part P_ij of
        each source token j and the part b_i of the biases. The callback `advance` is called `steps` times, once per
        layer and block of sources.

        `length`           |P_ij| `[K, T, T]`, token by source
        `projection`       P_ij . y_i / |y_i|^2 `[K, T, T]`
        `own`, `others`    |P_ii| and |sum_{j != i} P_ij| `[K, T]`
        `own_share`        own / (own + others); 1 for a token without contributions of other tokens
        `coherence`        others / sum_{j != i} |P_ij|; below 1 if parts of other tokens cancel, NaN if all are 0
        `biases`           |b_i|
        `bias_projection`  b_i . y_i / |y_i|^2; all projections of a vector sum to 1
        `bias_cosine`      cosine between sum_{j != i} P_ij and b_i
        `whole`            |y_i|

        Raise `InputError` if parts and biases do not sum to the model's vectors.
        """
        levels = self._measure_levels(batch, advance)
        for number, level in enumerate(levels):
            self._check_sum(number, level.sources_sum_TD + level.bias_TD, level.whole_TD)
        length_KTT = torch.stack([level.length_TT for level in levels])
        own_KT = torch.stack([level.own_TD.norm(dim=-1) for level in levels])
        others_KT = torch.stack([level.others_TD.norm(dim=-1) for level in levels])
        others_lengths_KT = length_KTT.sum(-1) - own_KT
        return {
            "length": length_KTT,
            "projection": torch.stack([level.projection_TT for level in levels]),
            "own": own_KT,
            "others": others_KT,
            "own_share": own_KT / (own_KT + others_KT),
            "coherence": others_KT / others_lengths_KT,
            "biases": torch.stack([level.bias_TD.norm(dim=-1) for level in levels]),
            "bias_projection": torch.stack([projection(level.bias_TD, level.whole_TD) for level in levels]),
            "bias_cosine": torch.stack([level.compute_bias_cosine() for level in levels]),
            "whole": torch.stack([level.whole_TD.norm(dim=-1) for level in levels]),
        }

    def _measure_levels(self, batch: Mapping[str, Tensor], advance: Callable[[], None]) -> list[_Level]:
        """Return the measures of all levels (the embeddings, then each layer), accumulated over blocks of sources.

        The parts of each block of source tokens are propagated in a separate forward pass, which calls `advance` after
        each layer.
        """
        levels: list[_Level] = []
        tokens = batch["input_ids"].shape[-1]
        for sources in self._split_into_blocks(tokens):
            for number, vectors in enumerate(self._propagate_parts(batch, sources, advance)):
                if sources.start == 0:  # The whole vectors and the part of the biases are the same in all blocks.
                    levels.append(_Level(vectors.whole_TD, vectors.bias_TD))
                levels[number].add(vectors.sources_JTD, sources)
        return levels

    def steps(self, tokens: int) -> int:
        """Return the number of calls of `advance` in `read` for a text of `tokens` tokens."""
        layers = layer_counts(self.base)[0]
        return len(self._split_into_blocks(tokens)) * layers

    def _split_into_blocks(self, tokens: int) -> list[slice]:
        """Return the blocks of sources that are propagated through the layers together."""
        size = max(1, BLOCK_NUMBERS // (tokens * self.width))
        blocks = []
        for start in range(0, tokens, size):
            stop = min(start + size, tokens)
            blocks.append(slice(start, stop))
        return blocks

    def read_rows(self, batch: Mapping[str, Tensor], positions: Sequence[int]) -> dict[str, Tensor]:
        """Return the measures `projection` `[K, R, T]` and `bias_projection` `[K, R]` of the R tokens at `positions`.

        They are the signed shares of each source token and of the biases in a token's vector (see `read`), at each of
        K levels: the embeddings, then each layer. Each row of each level requires a backward pass (`_compute_row`).
        Memory grows linearly with the number of tokens T, because no array of parts `[T, T, D]` is allocated.
        """
        levels = self._propagate_parts(batch, sources=None)
        input_JTD = levels[0].parts_JTD  # J = 2 parts: all sources together, and the biases
        shares = []
        biases = []
        for level in levels:
            rows = [self._compute_row(input_JTD, level, position) for position in positions]
            shares.append(torch.stack(rows))
            bias_T = projection(level.bias_TD, level.whole_TD)
            biases.append(bias_T.detach())
        biases_KT = torch.stack(biases)
        return {
            "projection": torch.stack(shares),
            "bias_projection": biases_KT[:, list(positions)],
        }

    def _compute_row(self, input_JTD: Tensor, level: _DecomposedVectors, position: int) -> Tensor:
        """Return the signed share `[T]` of each source token in the vector of a level at `position`.

        `input_JTD` contains J = 2 parts of the first layer's input: the vectors x_t of all source tokens t, and the
        biases. `level` contains the vectors of the level (the embeddings or the output of a layer) and their two parts,
        propagated from `input_JTD`. The share of all sources is linear in the vectors x_t. It thus equals the sum over
        t of x_t . gradient_t, and the term for t is the share of source t.
        """
        all_sources_TD = level.parts_JTD[0]
        share_T = projection(all_sources_TD, level.whole_TD)
        (gradient_JTD,) = torch.autograd.grad(share_T[position], input_JTD, retain_graph=True)
        gradient_TD = gradient_JTD[0]
        x_TD = input_JTD[0]
        products_TD = gradient_TD * x_TD
        return products_TD.sum(-1).detach()

    def _propagate_parts(
        self, batch: Mapping[str, Tensor], sources: slice | None, advance: Callable[[], None] = lambda: None
    ) -> list[_DecomposedVectors]:
        """Return the vectors of each level, and the parts of the tokens `sources` and of the biases in these vectors.

        If `sources` is None, all sources form a single part, and the parts have autograd graphs. The callback
        `advance` runs after each layer.
        """
        if not self.values:
            self.values = self._read_value_maps(batch)
        levels: list[_DecomposedVectors] = []

        def append_level(layer_pass: LayerPass, _features: object) -> None:
            """Propagate the parts of the layer's input to its output, and append the output and its parts to `levels`.

            Call `advance` after this layer. In the first layer, also append the layer's input (the embeddings).
            """
            if layer_pass.call.number > len(self.values):
                return  # Layers of the decoder are not decomposed, and have no entry in `self.values`.
            document = layer_pass.document(0)  # the only text of the batch
            with torch.set_grad_enabled(sources is None):  # `_compute_row` differentiates the sum of all sources.
                if not levels:  # The first layer's input is the level of the embeddings.
                    embeddings = _DecomposedVectors(document.x, _create_first_parts(document.x, sources))
                    levels.append(embeddings)
                input_JTD = levels[-1].parts_JTD
                values = self.values[layer_pass.call.number - 1]
                output_JTD = through_layer(document, values, input_JTD, rule=self.rule)
            levels.append(_DecomposedVectors(document.features["layer_output"], output_JTD))
            advance()

        with torch.no_grad():
            run_layers(self.base, batch, append_level, POINTS)
        return levels

    def _read_value_maps(self, batch: Mapping[str, Tensor]) -> list[Linear]:
        """Return the `value_map` of each layer of the first stack, from a forward pass of one token."""
        maps: list[Linear] = []

        def append_map(layer_pass: LayerPass, _features: object) -> None:
            """Append the `value_map` of a layer, unless it is a layer of the decoder."""
            if layer_pass.call.stack == self.stack:
                maps.append(value_map(layer_pass))

        first_token = {name: tensor[:, :1] for name, tensor in batch.items()}  # `value_map` requires a single token
        with torch.inference_mode():
            run_layers(self.base, first_token, append_map, POINTS)
        # Autograd cannot use inference tensors, but it can use copies of them.
        return [Linear(value.W.clone(), value.b.clone()) for value in maps]

    def _check_sum(self, level: int, sum_TD: Tensor, whole_TD: Tensor) -> None:
        """Raise `InputError` if the sum of the parts of a level differs from the model's vectors `whole_TD`."""
        largest = whole_TD.abs().max().clamp_min(1e-30)
        largest_error = (sum_TD - whole_TD).abs().max()
        error = float(largest_error / largest)
        tolerance = TOLERANCES[whole_TD.dtype]
        if not error <= tolerance:
            raise InputError(
                f"{checkpoint_name(self.base)}: the parts of the vectors of level {level} do not sum to the vectors "
                f"(relative error {error:.3g}; rounding explains at most {tolerance:g}); the entry of "
                f"{self.base.config.model_type} in attnmix/models/families.yaml is wrong for this model"
            )


def _create_first_parts(x_TD: Tensor, sources: slice | None) -> Tensor:
    """Return the parts `[J, T, D]` of the first layer's input, for the tokens `sources` and for the biases.

    If `sources` is None, all sources form a single part, and the result requires gradients.
    """
    if sources is not None:
        return embedding_parts(x_TD, sources)
    biases_TD = torch.zeros_like(x_TD)
    return torch.stack([x_TD, biases_TD]).requires_grad_()


def by_token(parts: dict[str, Tensor]) -> Tensor:
    """Return the Q `QUANTITIES` of each token at K levels (the embeddings, then each layer), `[Q, K, T]`.

    `parts` is the result of `PartsReader.read`, whose docstring defines its entries. `coherence` is NaN if the parts of
    all other tokens are 0, `own_share` is NaN if the parts of all tokens are 0, and the projections are NaN for a
    vector of length 0.
    """
    projection_KTT = parts["projection"]  # signed share of each source in each token's vector, by level
    projection_KT = projection_KTT.sum(-1)
    own_projection_KT = projection_KTT.diagonal(dim1=-2, dim2=-1)
    # True if the sum of the other tokens' parts is nearly opposite to the part of the biases; False if one of these two
    # vectors is 0, because the cosine is then NaN.
    is_ill_conditioned_KT = parts["bias_cosine"] < OPPOSITE_COSINE
    quantities = parts | {
        "own_projection": own_projection_KT,
        "others_projection": projection_KT - own_projection_KT,
        "bias_length": parts["biases"] / parts["whole"],
        "ill_conditioned": is_ill_conditioned_KT.to(own_projection_KT),
    }
    return torch.stack([quantities[name] for name in QUANTITIES])


def source_shares(parts: dict[str, Tensor]) -> Tensor:
    """Return the share `[L, T, T]` of each source in each token's vector after each layer.

    `parts` is the result of `PartsReader.read`. Each row sums to 1. The share of a token in its own vector is
    `own_share`; the remainder is divided among the other tokens in proportion to the lengths of their parts.
    """
    own_LT = parts["own_share"][1:]  # without the embeddings
    length_LTT = parts["length"][1:].clone()
    length_LTT.diagonal(dim1=-2, dim2=-1).zero_()
    total_LT1 = length_LTT.sum(-1, keepdim=True)
    proportion_LTT = torch.where(total_LT1 > 0, length_LTT / total_LT1, 0)
    others_share_LT1 = (1 - own_LT)[..., None]
    return others_share_LT1 * proportion_LTT + torch.diag_embed(own_LT)


def document_shares(reader: PartsReader, ids: npt.NDArray[np.int32]) -> Tensor | None:
    """Return `source_shares` of a text; None if it has more than `MAX_PARTS_TOKENS` tokens."""
    if len(ids) > MAX_PARTS_TOKENS:
        return None
    batch = padded([ids.tolist()], 0, reader.base.device)
    parts = reader.read(batch)
    return source_shares(parts)


def projection(parts: Tensor, whole_TD: Tensor) -> Tensor:
    """Return the signed shares `[..., T]` of parts `[..., T, D]` in `whole_TD`, by projecting them onto `whole_TD`."""
    products = (parts * whole_TD).sum(-1)
    squares_T = whole_TD.square().sum(-1)
    return products / squares_T
