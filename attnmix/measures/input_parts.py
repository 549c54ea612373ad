"""Every vector of a model as a sum of parts, one for each token of the input, from the embeddings on.

    y_i = sum_j P_ij + b_i

P_ij is the contribution of source token j to the vector y_i of token i, and b_i the contribution of the model's biases.
Each input vector of the first layer belongs to a single token. Each layer is treated as an affine map: its attention
weights, deviations of norms and slopes of activations are fixed at their values in the forward pass. Attention, skip
connections and norms are exact, and an activation is split by one of two published rules (`RULES`). The parts and the
biases sum to the model's vector under both rules, but their sizes depend on the rule (Modarressi et al., ACL 2023:
DecompX).

Supported families have one stack, or an encoder, which is decomposed, and a decoder. Their feed-forward network has two
Linears around an activation, or is gated, and follows attention or runs parallel to it (`parts_obstacle`).

Shapes: J parts (source tokens, then the biases), T tokens, N or R selected tokens, K levels (the embeddings, then each
layer), L layers, D hidden, H heads, E = H * head width, W width of the feed-forward network, Q quantities.
"""

from collections.abc import Callable, Mapping, Sequence

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

BLOCK_NUMBERS = 2**24  # maximum number of elements of a block's array `[J, T, W]` in the feed-forward network
CACHED_NUMBERS = 2**19  # the same for smaller blocks on a CPU, which fit into its cache
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Maximum rounding error of the sum of the parts by dtype, relative to the largest element of the vectors."""
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
"""A decomposition is ill-conditioned if the cosine of the others' part and the biases' part is below this value."""
POINTS = ("attention_output", PROJECTED, "layer_output")


class Tangents(AfterAttention):
    """A layer after attention, with the activation split by its slope at the input: g(p) = g'(p) p + bias part."""

    @cached_property
    def slopes(self) -> tuple[Tensor, ...]:
        """The derivatives `[N, W]` with respect to each of the `inputs`."""
        p_NW, *gates = self.inputs
        activation = self.block.feed_forward[1]
        derivative_NW = _differentiate(activation, p_NW)
        if not gates:
            return (derivative_NW,)
        return gates[0] * derivative_NW, activation(p_NW)

    @cached_property
    def constant(self) -> Tensor:
        """The remainder of the linear approximation, which belongs to the biases."""
        p_NW, *gates = self.inputs
        activation = self.block.feed_forward[1]
        linear_NW = _differentiate(activation, p_NW) * p_NW
        if gates:
            return -gates[0] * linear_NW
        remainder_NW: Tensor = activation(p_NW) - linear_NW
        return remainder_NW


def _differentiate(activation: Module, p_NW: Tensor) -> Tensor:
    """Return g'(p) `[N, W]` of an elementwise activation."""
    with torch.enable_grad():
        input_NW = p_NW.detach().requires_grad_()
        total = activation(input_NW).sum()
        derivative_NW: Tensor = torch.autograd.grad(total, input_NW)[0]
    return derivative_NW


RULES: Mapping[str, type[AfterAttention]] = {"chord": AfterAttention, "tangent": Tangents}
"""Rules for splitting an activation g over the parts of its input p.

`chord` multiplies each part by (g(p) - g(0)) / p, the slope from 0 to the input (the default of DecompX; integrated
gradients from 0, as in Kobayashi et al., ICLR 2024). `tangent` multiplies each part by g'(p), the slope at the input,
and adds the remainder of g(p) to the biases (the linear approximation of DecompX). Both papers treat an activation
between two Linears. In a gated network, `chord` is the same integral along both factors, and `tangent` uses the
derivative of the product.
"""


def parts_obstacle(family: Family) -> str | None:
    """Return the reason why the vectors of a family cannot be decomposed; None if they can."""
    if family.stacks[0].feed_forward_network:
        return None
    return "its feed-forward network is neither an activation between two Linears nor gated"


def embedding_parts(x_TD: Tensor, sources: slice = slice(None)) -> Tensor:
    """Return the parts `[J, T, D]` of the first layer's input: each token is its own source, and the biases' part is 0.

    `sources` selects the source tokens.
    """
    tokens = torch.arange(len(x_TD), device=x_TD.device)
    positions = tokens[sources]
    numbers = tokens[: len(positions)]
    parts_JTD = x_TD.new_zeros(len(positions) + 1, *x_TD.shape)
    parts_JTD[numbers, positions] = x_TD[positions]
    return parts_JTD


def through_layer(
    layer_pass: LayerPass, values: Linear, parts_JTD: Tensor, rows: slice = slice(None), rule: str = "chord"
) -> Tensor:
    """Propagate the parts `[J, T, D]` of a layer's input to its output `[J, R, D]` at the tokens `rows`.

    `layer_pass` contains one text, and `values` is the `value_map` of the layer.
    """
    layer = _AffineLayer(layer_pass, values, rows, rule)
    # The biases come first, because their propagation caches quantities of the whole vectors that all blocks need.
    biases_1RD = layer.propagate(parts_JTD[-1:], are_biases=True)
    blocks = _split_sources(parts_JTD[:-1], layer.rest.preactivation_NW)
    sources = _apply_in_threads(layer.propagate, blocks)
    return torch.cat([*sources, biases_1RD])


class _AffineLayer:
    """A layer as an affine map in one forward pass of a text, with outputs at the tokens `rows`."""

    def __init__(self, layer_pass: LayerPass, values: Linear, rows: slice, rule: str) -> None:
        """Store the constant attention weights and deviations of norms; arguments are those of `through_layer`."""
        block = layer_pass.block
        self.block = block
        self.values = values
        self.rows = rows
        self.weights_HRT = layer_pass.attention.weights(rows)
        self.input_deviation_T1 = block.input_norm.deviation(layer_pass.x)
        self.attention_deviation_R1 = block.attention_output_norm.deviation(layer_pass.projected[rows])
        # The input of a feed-forward network parallel to attention is the layer's input.
        read_RD = layer_pass.x[rows] if block.stack.parallel else layer_pass.residual[rows]
        preactivation_RW = _compute_preactivation(block, read_RD)
        self.rest = RULES[rule](block, read_RD, None, preactivation_RW)
        self.output_deviation_R1 = read_RD.new_ones(())
        if not block.output_norm.absent:
            stream_RD = self.rest.stream_with_biases(layer_pass.residual[rows])
            whole_RD = stream_RD + self.rest.added_with_biases(stream_RD)
            self.output_deviation_R1 = block.output_norm.deviation(whole_RD)

    def propagate(self, parts_JTD: Tensor, are_biases: bool = False) -> Tensor:
        """Propagate the parts `[J, T, D]` of the layer's input to its output, `[J, R, D]`.

        Parts of sources pass through the linear part of the layer; its biases are added to the biases' part.
        """
        block = self.block
        stream = self.rest.stream
        added = self.rest.added
        if are_biases:
            stream = self.rest.stream_with_biases
            added = self.rest.added_with_biases
        heads = len(self.weights_HRT)
        normed_JTD = _apply_norm(block.input_norm, parts_JTD, self.input_deviation_T1, are_biases)
        values_JTE = _apply_linear(self.values, normed_JTD, are_biases)
        values_JHTd = values_JTE.unflatten(-1, (heads, -1)).transpose(1, 2)
        mixed_JHRd = self.weights_HRT @ values_JHTd
        mixed_JRE = mixed_JHRd.transpose(1, 2).flatten(-2)
        projected_JRD = _apply_linear(block.output, mixed_JRE, are_biases)
        attention_JRD = _apply_norm(block.attention_output_norm, projected_JRD, self.attention_deviation_R1, are_biases)
        input_JRD = parts_JTD[:, self.rows]
        stream_JRD = attention_JRD + input_JRD
        if not block.stack.parallel:
            stream_JRD = stream(stream_JRD)
            input_JRD = stream_JRD
        output_JRD = stream_JRD + added(input_JRD)
        return _apply_norm(block.output_norm, output_JRD, self.output_deviation_R1, are_biases)


def _apply_linear(affine: Linear, parts: Tensor, are_biases: bool) -> Tensor:
    """Return parts `[..., D]` after an affine map. Its bias is added if `are_biases` is True."""
    products = parts @ affine.W
    if not are_biases:
        return products
    return products + affine.b


def _apply_norm(norm: Norm, parts: Tensor, deviation: Tensor, are_biases: bool) -> Tensor:
    """Return parts `[..., D]` after a norm with the divisor `deviation`. Its beta is added if `are_biases` is True."""
    if norm.absent:
        return parts
    divided = norm.linear(parts) / deviation
    if not are_biases:
        return divided
    return divided + norm.beta


def _apply_in_threads(function: Callable[[Tensor], Tensor], blocks: Sequence[Tensor]) -> list[Tensor]:
    """Apply `function` to each block, in one thread per core if that is faster."""
    threads = None
    if not torch.is_grad_enabled():
        threads = task_threads(blocks[0].device)
    if threads is None or len(blocks) < 2:
        return [function(block) for block in blocks]
    without_derivatives = torch.no_grad()(function)  # Gradient mode is local to a thread.
    return list(threads.map(without_derivatives, blocks))


def _split_sources(parts_JRD: Tensor, preactivation_RW: Tensor) -> tuple[Tensor, ...]:
    """Split parts `[J, R, D]` into blocks of sources with feed-forward activations that fit into a CPU's cache."""
    if not parts_JRD.is_cpu:
        return (parts_JRD,)
    sources_per_block = max(1, CACHED_NUMBERS // preactivation_RW.numel())
    blocks: tuple[Tensor, ...] = parts_JRD.split(sources_per_block)
    return blocks


def _compute_preactivation(block: Block, residual_RD: Tensor) -> Tensor:
    """Return the output `[R, W]` of the feed-forward network's first Linear, from vectors after the skip connection."""
    linear = block.feed_forward[0][0]
    stream_RD = block.attention_norm.normalise(residual_RD)
    read_RD = block.feed_forward_norm.normalise(stream_RD)
    return read_RD @ linear.W + linear.b


class _Level:
    """The vectors of one level, and measures of their parts that are accumulated over blocks of sources."""

    def __init__(self, whole_TD: Tensor, bias_TD: Tensor) -> None:
        """Start with no parts of sources; `bias_TD` is the biases' part of the vectors `whole_TD`."""
        tokens = len(whole_TD)
        self.whole_TD = whole_TD
        self.bias_TD = bias_TD
        self.length_TT = whole_TD.new_zeros(tokens, tokens)
        self.projection_TT = whole_TD.new_zeros(tokens, tokens)
        self.own_TD = torch.zeros_like(whole_TD)
        self.sources_TD = torch.zeros_like(whole_TD)

    def add(self, parts_JTD: Tensor, sources: slice) -> None:
        """Add the parts of the source tokens `sources`."""
        self.length_TT[:, sources] = parts_JTD.norm(dim=-1).T
        self.projection_TT[:, sources] = projection(parts_JTD, self.whole_TD).T
        self.sources_TD += parts_JTD.sum(0)
        positions = torch.arange(sources.start, sources.stop, device=parts_JTD.device)
        self.own_TD[positions] = parts_JTD[positions - sources.start, positions]  # P_ii

    def compute_bias_cosine(self) -> Tensor:
        """Return the cosine `[T]` between the others' part and the biases' part; NaN if either part is 0."""
        others_TD = self.others_TD
        products_T = (others_TD * self.bias_TD).sum(-1)
        lengths_T = others_TD.norm(dim=-1) * self.bias_TD.norm(dim=-1)
        cosine_T: Tensor = products_T / lengths_T
        return cosine_T

    @property
    def others_TD(self) -> Tensor:
        """The sum of the parts of all other tokens."""
        return self.sources_TD - self.own_TD


class PartsReader:
    """Decomposition of a model's vectors into parts, one text at a time."""

    def __init__(self, base: PreTrainedModel, rule: str = "chord") -> None:
        """Raise `InputError` for an unknown rule or an unsupported family."""
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
        first_linear = Block(first_layer, self.stack).feed_forward[0][0]
        self.width = first_linear.W.shape[1]
        self.values: list[Linear] = []

    def read(self, batch: Mapping[str, Tensor], advance: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
        """Return measures of the parts of one text, by name; `batch` contains this text without padding.

        The callback `advance` runs after each of the `steps`.

        `length`           |P_ij| `[K, T, T]`, token by source
        `projection`       P_ij . y_i / |y_i|^2 `[K, T, T]`
        `own`, `others`    |P_ii| and |sum_{j != i} P_ij| `[K, T]`
        `own_share`        own / (own + others); 1 for a token without contributions of others
        `coherence`        others / sum_{j != i} |P_ij|; below 1 if the others' parts cancel, NaN if there are none
        `biases`           |b_i|; `bias_projection` is its projection, and all projections of a vector sum to 1
        `bias_cosine`      cosine between the others' part and the biases' part
        `whole`            |y_i|

        Raise `InputError` if parts and biases do not sum to the model's vectors.
        """
        levels: list[_Level] = []
        tokens = batch["input_ids"].shape[-1]
        for sources in self._split_into_blocks(tokens):
            for number, (whole_TD, parts_JTD) in enumerate(self._propagate_parts(batch, sources, advance)):
                if sources.start == 0:
                    levels.append(_Level(whole_TD, bias_TD=parts_JTD[-1]))
                levels[number].add(parts_JTD[:-1], sources)
        for number, level in enumerate(levels):
            self._check_sum(number, level.sources_TD + level.bias_TD, level.whole_TD)
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
        """Return `projection` `[K, R, T]` and `bias_projection` `[K, R]` of the R tokens at `positions`.

        Each token and level requires a backward pass through the fixed affine layers. Memory grows linearly with
        the number of tokens, because no array of parts `[T, T, D]` is allocated.
        """
        levels = self._propagate_parts(batch, None)
        _, input_JTD = levels[0]
        shares = []
        biases = []
        for whole_TD, parts_JTD in levels:
            rows = [self._compute_row(input_JTD, whole_TD, parts_JTD, position) for position in positions]
            shares.append(torch.stack(rows))
            bias_T = projection(parts_JTD[-1], whole_TD)
            biases.append(bias_T.detach())
        biases_KT = torch.stack(biases)
        return {
            "projection": torch.stack(shares),
            "bias_projection": biases_KT[:, list(positions)],
        }

    def _compute_row(self, input_JTD: Tensor, whole_TD: Tensor, parts_JTD: Tensor, position: int) -> Tensor:
        """Return the signed share `[T]` of each source in the vector at `position`, which is linear in the input."""
        share_T = projection(parts_JTD[0], whole_TD)
        (gradient_JTD,) = torch.autograd.grad(share_T[position], input_JTD, retain_graph=True)
        products_TD = gradient_JTD[0] * input_JTD[0]
        return products_TD.sum(-1).detach()

    def _propagate_parts(
        self, batch: Mapping[str, Tensor], sources: slice | None, advance: Callable[[], None] = lambda: None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return each level's vectors `[T, D]` and the parts `[J, T, D]` of the `sources` and of the biases.

        If `sources` is None, all sources form a single part, and the parts have autograd graphs. The callback
        `advance` runs after each layer.
        """
        if not self.values:
            self.values = self._read_value_maps(batch)
        levels: list[tuple[Tensor, Tensor]] = []

        def append_level(layer_pass: LayerPass, _features: object) -> None:
            """Propagate the parts of the previous level through a layer."""
            if layer_pass.call.number > len(self.values):
                return  # a layer of the decoder
            document = layer_pass.document(0)
            with torch.set_grad_enabled(sources is None):
                if not levels:
                    levels.append((document.x, _create_first_parts(document.x, sources)))
                _, input_JTD = levels[-1]
                values = self.values[layer_pass.call.number - 1]
                output_JTD = through_layer(document, values, input_JTD, rule=self.rule)
            levels.append((document.features["layer_output"], output_JTD))
            advance()

        with torch.no_grad():
            run_layers(self.base, batch, append_level, POINTS)
        return levels

    def _read_value_maps(self, batch: Mapping[str, Tensor]) -> list[Linear]:
        """Return the `value_map` of each layer of the first stack, from a forward pass of one token."""
        maps: list[Linear] = []

        def append_map(layer_pass: LayerPass, _features: object) -> None:
            if layer_pass.call.stack == self.stack:
                maps.append(value_map(layer_pass))

        first_token = {name: tensor[:, :1] for name, tensor in batch.items()}
        with torch.inference_mode():
            run_layers(self.base, first_token, append_map, POINTS)
        return [Linear(value.W.clone(), value.b.clone()) for value in maps]

    def _check_sum(self, level: int, sum_TD: Tensor, whole_TD: Tensor) -> None:
        """Raise `InputError` if the parts of a level do not sum to the model's vectors."""
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
    """Return the parts `[J, T, D]` of the first layer's input.

    If `sources` is None, these are a single differentiable part of all sources, and the part of the biases.
    """
    if sources is not None:
        return embedding_parts(x_TD, sources)
    biases_TD = torch.zeros_like(x_TD)
    return torch.stack([x_TD, biases_TD]).requires_grad_()


def by_token(parts: dict[str, Tensor]) -> Tensor:
    """Return the `QUANTITIES` `[Q, K, T]` from the result of `PartsReader.read`. Undefined values are NaN."""
    projection_KT = parts["projection"].sum(-1)
    own_projection_KT = parts["projection"].diagonal(dim1=-2, dim2=-1)
    is_ill_conditioned_KT = parts["bias_cosine"] < OPPOSITE_COSINE
    quantities = parts | {
        "own_projection": own_projection_KT,
        "others_projection": projection_KT - own_projection_KT,
        "bias_length": parts["biases"] / parts["whole"],
        "ill_conditioned": is_ill_conditioned_KT.to(own_projection_KT),
    }
    return torch.stack([quantities[name] for name in QUANTITIES])


def source_shares(parts: dict[str, Tensor]) -> Tensor:
    """Return the share `[L, T, T]` of each source in each token's vector after each layer, from `PartsReader.read`.

    Each row sums to 1. A token's share in its own vector is `own_share`; the remainder is divided among the other
    sources in proportion to the lengths of their parts.
    """
    own_LT = parts["own_share"][1:]
    length_LTT = parts["length"][1:].clone()
    length_LTT.diagonal(dim1=-2, dim2=-1).zero_()
    lengths_LT1 = length_LTT.sum(-1, keepdim=True)
    portion_LTT = torch.where(lengths_LT1 > 0, length_LTT / lengths_LT1, 0)
    others_LT1 = (1 - own_LT)[..., None]
    return others_LT1 * portion_LTT + torch.diag_embed(own_LT)


def document_shares(reader: PartsReader, ids: npt.NDArray[np.int32]) -> Tensor | None:
    """Return `source_shares` of a text; None if it has more than `MAX_PARTS_TOKENS` tokens."""
    if len(ids) > MAX_PARTS_TOKENS:
        return None
    batch = padded([ids.tolist()], 0, reader.base.device)
    parts = reader.read(batch)
    return source_shares(parts)


def projection(parts: Tensor, whole_TD: Tensor) -> Tensor:
    """Return the signed share `[..., T]` of parts `[..., T, D]` in the vectors `whole_TD`, by projection onto them."""
    products = (parts * whole_TD).sum(-1)
    squares_T = whole_TD.square().sum(-1)
    return products / squares_T
