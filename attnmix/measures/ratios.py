"""Mixing ratios of every token (Kobayashi et al., EMNLP 2020 and EMNLP 2021).

Shapes: M methods (names of ratios), H heads, T tokens, N tokens of a chunk, d head width, E = H * d, D hidden. i is the
output token, and j a source token. With f_h(x_j) = (x_j W_V^h + b_V^h) W_O^h:

    F_ij = sum_h a^h_ij f_h(x_j)      R_ij = F_ij + [i=j] x_i      T_ij = LayerNorm's linear part of R_ij

Neither T * T * D tensors nor attention matrices are allocated, because sum_{j!=i} F_ij = attention_output_i - b_O -
F_ii needs only the diagonal of attention. A LayerNorm divides by the standard deviation of token i; this division
cancels in a ratio of token i. If a norm follows W_O, F_ij includes the division by the norm's standard deviation; this
division does not cancel in R_ij. In a pre-LN family, f_h is applied to norm(x_j), and x_i is the input of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from attnmix.core.lazy import cached_property
from attnmix.core.names import PREACTIVATION

if TYPE_CHECKING:  # Figures and the page import this module without torch.
    from torch import Tensor

    from attnmix.measures.layers import AfterAttention, Block, LayerPass, NetworkPart
    from attnmix.measures.weights import Norm

CACHE_TOKENS = 256  # tokens per chunk on a CPU; their vectors stay in the cache between operations
DEVICE_TOKENS = 2**16  # tokens per chunk on other devices, where each operation has a constant overhead


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A mixing ratio in [0, 1]: the share of a token's vector that comes from other tokens."""

    formula: Callable[[Any], Any]  # from a layer's `LayerSplits` to the ratio `[N]` of N tokens, or to a `Split`
    definition: str  # the formula as printed in the documentation
    source: str
    covers: Literal["attention", "layer"] = "attention"  # the part of a layer that the ratio describes
    points: tuple[str, ...] = ()  # capture points that this ratio needs in addition to `RATIO_POINTS`
    headline: bool = False  # True if the mean of the ratio is one of the metrics


RATIOS = {
    "attn_w": Ratio(
        formula=lambda splits: splits.mixed_weight,
        definition="1 - mean_h a_ii",
        source="weights only",
        headline=True,
    ),
    "attnres_w": Ratio(
        formula=lambda splits: splits.mixed_weight / 2,
        definition="(1 - mean_h a_ii) / 2",
        source="weights, skip as half",
    ),
    "attn_n": Ratio(
        formula=lambda splits: splits.attention,
        definition="|sum_{j!=i} F_ij| / (|sum_{j!=i} F_ij| + |F_ii|)",
        source="baseline of Kobayashi et al., EMNLP 2021; norms of EMNLP 2020",
    ),
    "attnres_n": Ratio(
        formula=lambda splits: splits.residual,
        definition="|sum_{j!=i} R_ij| / (|sum_{j!=i} R_ij| + |R_ii|)",
        source="Kobayashi et al., EMNLP 2021, equation 9",
    ),
    "attnresln_n": Ratio(
        formula=lambda splits: splits.attention_norm,
        definition="|sum_{j!=i} T_ij| / (|sum_{j!=i} T_ij| + |T_ii|)",
        source="Kobayashi et al., EMNLP 2021, equation 9",
        headline=True,
    ),
    # In GlobEnc, the feed-forward network only affects the standard deviation (section 3.3).
    "enc_n": Ratio(
        formula=lambda splits: splits.layer_norm,
        definition="the same with T through the second skip and LayerNorm",
        source="N_ENC of GlobEnc, Modarressi et al., NAACL 2022",
        covers="layer",
    ),
    "layer_n": Ratio(
        formula=lambda splits: splits.layer,
        definition="the same with R through the rest of the layer, the feed-forward network by integrated gradients",
        source="Kobayashi et al., ICLR 2024",
        covers="layer",
        points=(PREACTIVATION, "cross_attention_output"),
    ),
}
"""All mixing ratios by name, ordered by the part of a layer that they cover.

The order determines which ratio is used in generated sentences and in initial views (`preferred_ratio`).
"""


class Split(NamedTuple):
    """Vectors of tokens, split into the parts `[..., N, D]` from the token itself and from all other tokens."""

    own: Tensor
    others: Tensor

    def share(self) -> Tensor:
        """Return |others| / (|others| + |own|) `[..., N]`; 0 if both parts are 0."""
        return _compute_share(self.own.norm(dim=-1), self.others.norm(dim=-1))

    def normalised(self, norm: Norm) -> Split:
        """Apply the linear part of a norm (centring and gamma) to both parts, and return the results.

        The division by the standard deviation is omitted, because it would cancel in `share`.
        """
        return Split(norm.linear(self.own), norm.linear(self.others))


@dataclass(frozen=True)
class LayerSplits:
    """The vectors of N tokens after each step of a layer, split into parts from the token itself and from other tokens.

    Leading axes before the token axis contain alternative splits of the same tokens, such as controls.
    """

    block: Block
    mixed_weight: Tensor  # 1 - mean_h a^h_ii, [..., N]
    x_ND: Tensor  # input of the layer
    projected_ND: Tensor  # the output of W_O
    projected: Split  # the parts of `projected_ND` without b_O
    rest: AfterAttention | None  # the computation of the rest of the layer; None only if no ratio needs it
    known_layer: Split | None = None  # the value of `layer`, if it was derived from other splits

    @cached_property
    def attention(self) -> Split:
        """F_ii and sum_{j!=i} F_ij, where F_ij is the contribution of token j to the attention output of token i.

        They are the parts of W_O's output (`projected`) after the norm that follows W_O, if any.
        """
        norm = self.block.attention_output_norm
        own_ND = norm.part(self.projected.own, whole=self.projected_ND)
        others_ND = norm.part(self.projected.others, whole=self.projected_ND)
        return Split(own_ND, others_ND)

    @cached_property
    def residual(self) -> Split:
        """R_ii = F_ii + x_i and sum_{j!=i} R_ij = sum_{j!=i} F_ij: the parts after attention's skip connection."""
        return Split(self.attention.own + self.x_ND, self.attention.others)

    @cached_property
    def attention_norm(self) -> Split:
        """T_ii and sum_{j!=i} T_ij: the parts of `residual` after the linear part of the norm of a post-LN family."""
        return self.residual.normalised(self.block.attention_norm)

    @cached_property
    def stream(self) -> Split:
        """The parts on the feed-forward network's skip connection.

        They are the parts of `attention_norm` after the linear part of the norm of cross-attention, if there is one.
        The output of cross-attention is not attributed to any source token, and belongs to neither part.
        """
        return self.attention_norm.normalised(self.block.cross_attention_norm)

    @cached_property
    def layer_norm(self) -> Split:
        """The parts of `stream` after the linear part of the layer's output norm, if there is one.

        The output of the feed-forward network, which the layer adds to its skip connection, is not attributed to any
        source token, and belongs to neither part.
        """
        return self.stream.normalised(self.block.output_norm)

    @cached_property
    def network(self) -> NetworkPart:
        """The parts of `stream` (own, others), stacked as `[2, N, ...]`, propagated into the feed-forward network."""
        import torch  # lazy import, because `RATIOS` is also used without torch

        assert self.rest is not None  # None only if no ratio needs the rest of the layer
        return self.rest.enter_network(torch.stack(self.stream))

    @cached_property
    def layer(self) -> Split:
        """The layer's output, split into the parts from the token itself and from other tokens.

        If `known_layer` is set, it is returned. Otherwise, both parts are propagated through the rest of the layer,
        including the feed-forward network. A factor that is common to both parts of a token is omitted, because it
        would cancel in `share`.
        """
        assert self.rest is not None  # None only if no ratio needs the rest of the layer
        if self.known_layer is not None:
            return self.known_layer
        # The two parts are stacked. `output` overwrites its argument, so it receives a copy of the cached `network`.
        own_ND, others_ND = self.rest.output(self.network.copy())
        return Split(own_ND, others_ND)

    def with_others(self, projected: Split, mixed_weight: Tensor, layer: Split | None = None) -> LayerSplits:
        """Return the splits of the same layer for different parts of W_O's output (`projected`), as in a control.

        `mixed_weight` is the attention weight on other tokens. `layer` is the split of the layer's output, if known.
        """
        return replace(self, projected=projected, mixed_weight=mixed_weight, known_layer=layer)

    def layer_with_own(self, own_layer_ND: Tensor) -> Split:
        """Return the split of the layer's output, given its part `own_layer_ND` from the token itself.

        Only the part from other tokens is computed: `residual.others`, propagated through the rest of the layer.
        """
        assert self.rest is not None  # None only if no ratio needs the rest of the layer
        others = self.rest.network_part(self.residual.others)
        return Split(own=own_layer_ND, others=self.rest.output(others))


def mixing_ratios(methods: Sequence[str], layer_pass: LayerPass) -> Tensor:
    """Return the ratios `methods` of all tokens in one layer, `[methods, ..., T]`, computed in chunks of tokens."""
    tokens = layer_pass.x[..., 0].numel()
    ratios_MN = layer_pass.x.new_empty(len(methods), tokens)
    max_tokens = chunk_tokens(layer_pass.x.device)
    for chunk in _split_by_chunk(layer_pass, ratio_points(methods), max_tokens):
        ratios_MN[:, chunk.rows] = apply_formulas(methods, chunk.splits)
    return ratios_MN.view(-1, *layer_pass.x.shape[:-1])


def apply_formulas(methods: Sequence[str], splits: LayerSplits) -> Tensor:
    """Return the ratios `methods` of N tokens, `[methods, ..., N]`.

    A formula returns either the ratio or a `Split`, whose share of other tokens is the ratio.
    """
    import torch  # lazy import, because `RATIOS` is also used without torch

    values = {method: RATIOS[method].formula(splits) for method in methods}
    methods_with_split = [method for method, value in values.items() if isinstance(value, Split)]
    if methods_with_split:
        shares = _compute_shares([values[method] for method in methods_with_split])
        values.update(zip(methods_with_split, shares, strict=True))  # replaces the splits
    return torch.stack(list(values.values()))


def _compute_shares(splits: Sequence[Split]) -> Tensor:
    """Return the share of other tokens in each split, `[splits, ..., N]`.

    The lengths of all splits are stacked, so that a single division computes all shares.
    """
    import torch  # lazy import, because `RATIOS` is also used without torch

    own_lengths = []
    others_lengths = []
    for split in splits:
        others_length = split.others.norm(dim=-1)
        others_lengths.append(others_length)
        own_length = split.own.norm(dim=-1)
        # Alternative splits `[..., N]` with the same own part can have a single length `[N]` of this part.
        own_lengths.append(own_length.expand_as(others_length))
    return _compute_share(torch.stack(own_lengths), torch.stack(others_lengths))


def _compute_share(own_length: Tensor, others_length: Tensor) -> Tensor:
    """Return the share of the other tokens, given the lengths of both parts; 0 if both are 0."""
    total = others_length + own_length
    share: Tensor = (others_length / total).masked_fill(total == 0, 0)
    return share


def chunk_tokens(device: Any) -> int:
    """Return the number of tokens per chunk on `device`."""
    return CACHE_TOKENS if device.type == "cpu" else DEVICE_TOKENS


def split_layer(layer_pass: LayerPass) -> LayerSplits:
    """Return the `LayerSplits` of all tokens of a text or of a batch, including padding."""
    tokens = layer_pass.x[..., 0].numel()
    (chunk,) = _split_by_chunk(layer_pass, layer_pass.features, tokens)
    return chunk.splits


class _Chunk(NamedTuple):
    """A chunk of the tokens of a batch, with their splits into own parts and parts from other tokens."""

    rows: slice  # indices of the tokens, counted over all texts
    splits: LayerSplits


def _split_by_chunk(layer_pass: LayerPass, points: Iterable[str], max_tokens: int) -> Iterator[_Chunk]:
    """Yield the `LayerSplits` of a layer in chunks of at most `max_tokens` tokens.

    Each `_Chunk` consists of the splits and of the rows of its tokens. The splits contain the parts of each token's
    vectors from the token itself and from other tokens. `points` are the capture points whose features the ratios need,
    in addition to attention's output. Axes: T tokens of a text, N tokens of all
    texts, H heads, E width of all heads together, D hidden.
    """
    block = layer_pass.block
    tokens = layer_pass.x.shape[-2]
    # The attention tensors may include padding, which `LayerPass.document` removes only from the other tensors.
    diagonal_TH = layer_pass.diagonal[..., :tokens, :]  # attention weight of each token on itself
    value_TE = layer_pass.value[..., :tokens, :]
    mixed_weight_T = 1 - diagonal_TH.mean(-1)  # attention weight on other tokens

    # The tensors of all N tokens. A chunk contains rows of these tensors.
    mixed_weight_N = mixed_weight_T.flatten()
    diagonal_NH = _merge_texts(diagonal_TH)
    value_NE = _merge_texts(value_TE)
    x_ND = _merge_texts(layer_pass.x)
    projected_ND = _merge_texts(layer_pass.projected)  # output of W_O
    captured = [point for point in points if point in layer_pass.features]
    features = {point: _merge_texts(layer_pass.features[point]) for point in captured}
    for start in range(0, len(mixed_weight_N), max_tokens):
        rows = slice(start, start + max_tokens)
        # The contribution of a token to its own W_O output: its values, multiplied by its attention weights on itself.
        own_ND = scaled_heads(diagonal_NH[rows], value_NE[rows]) @ block.output.W
        splits = _split_tokens(
            block,
            mixed_weight_N[rows],
            own_ND,
            x_ND[rows],
            projected_ND[rows],
            features={point: vectors[rows] for point, vectors in features.items()},
        )
        yield _Chunk(rows, splits)


def _merge_texts(vectors: Tensor) -> Tensor:
    """Merge all axes before the last one, such as the axes of texts and tokens, into one axis of tokens."""
    return vectors.flatten(0, -2)


def _split_tokens(
    block: Block,
    mixed_weight_N: Tensor,
    own_ND: Tensor,
    x_ND: Tensor,
    projected_ND: Tensor,
    features: Mapping[str, Tensor],
) -> LayerSplits:
    """Return the splits of N tokens. `own_ND` is the part of `projected_ND`, W_O's output, from the token itself."""
    # W_O's output without b_O is the sum of the contributions of all tokens.
    others_ND = (projected_ND - block.output.b).sub_(own_ND)
    return LayerSplits(
        block=block,
        mixed_weight=mixed_weight_N,
        x_ND=x_ND,
        projected_ND=projected_ND,
        projected=Split(own_ND, others_ND),
        rest=rest_of_layer(block, x_ND, projected_ND, features),
    )


def rest_of_layer(
    block: Block, x_ND: Tensor, projected_ND: Tensor, features: Mapping[str, Tensor]
) -> AfterAttention | None:
    """Return the computation of the layer after attention's skip connection, for N tokens.

    Return None if the feed-forward network's preactivation was not captured.
    """
    if PREACTIVATION not in features:
        return None
    residual_ND = x_ND + block.attention_output_norm.normalise(projected_ND)
    return block.after_attention(residual_ND, features.get("cross_attention_output"), features[PREACTIVATION])


def ratio_points(methods: Iterable[str]) -> list[str]:
    """Return the capture points that `methods` need in addition to attention's output, without duplicates."""
    points = [point for method in methods for point in RATIOS[method].points]
    return list(dict.fromkeys(points))


def preferred_ratio(methods: Iterable[str]) -> str:
    """Return the ratio in `methods` that is used in generated sentences and in initial views.

    It is the last ratio in `RATIOS` that covers the attention block or, if there is none, the whole layer.
    """
    present = set(methods)
    declared = [name for name in RATIOS if name in present]
    if not declared:
        raise ValueError(f"RATIOS declares none of {', '.join(sorted(present))}")
    of_attention = [name for name in declared if RATIOS[name].covers == "attention"]
    if of_attention:
        return of_attention[-1]
    return declared[-1]


def scaled_heads(diagonal_NH: Tensor, value_NE: Tensor) -> Tensor:
    """Return the values of all heads `[N, E]`, each multiplied by the weight of the head in `diagonal_NH`.

    N is any number of leading axes. E is the width of all H heads together.
    """
    heads = diagonal_NH.shape[-1]
    value_NHd = value_NE.unflatten(-1, (heads, -1))
    scaled_NHd: Tensor = value_NHd * diagonal_NH.unsqueeze(-1)
    return scaled_NHd.flatten(-2)
