"""Contribution vectors, contribution matrices and rollouts of a text, computed in chunks of source tokens.

Vectors, matrices and rollouts are computed in float64, because 1 - cos of nearly equal vectors would have no
significant digits in float32.

Shapes: L layers, H heads, T tokens, J sources of a chunk, D hidden.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from attnmix.core.lazy import cached_property
from attnmix.core.names import LAYER_POINTS, PREACTIVATION
from attnmix.core.statistics import rank_correlation
from attnmix.measures.derivatives import FORMS, REFERENCES, derivative_norms, document_chains, levels
from attnmix.measures.heads import joined_heads, layer_heads
from attnmix.measures.layers import LayerPass, Result, map_layers, value_map
from attnmix.measures.matrices import (
    LAYER_MATRICES,
    ROLLOUTS,
    LayerMatrix,
    select_layer_matrices,
    sort_matrices,
)
from attnmix.measures.ratios import mixing_ratios, split_layer
from attnmix.measures.swaps import SWAPS, document_swaps
from attnmix.models.copies import copy_model
from attnmix.models.encoding import padded
from attnmix.models.families import PROJECTED, family_of, layer_counts

Doubles = npt.NDArray[np.float64]

CHUNK_NUMBERS = 2**20  # maximum number of float64 elements `[J, T, D]` of a chunk, so that it fits into a CPU's cache
DEVICE_CHUNK_NUMBERS = 2**26  # the maximum on other devices, where larger operations are more efficient


def contributions(
    names: Collection[str], by_layer: Sequence[dict[str, Tensor]], starts: Sequence[int] = (0,)
) -> dict[str, Tensor]:
    """Return the matrices and rollouts `[layers, T, T]` of one text; the keys are the `names`.

    Row i of a matrix contains the contributions of all source tokens to token i in one layer. A rollout is the product
    of the matrices of a layer and of all previous layers of the same stack (encoder or decoder).

    Matrices are normalised if their declaration (`LayerMatrix.rows`) is "made to sum to 1": each row is divided by its
    sum, and rows of zeros are replaced by rows of the identity. Rollouts are computed from these rows. In a returned
    matrix, however, rows are NaN if their sum before normalisation is below the declared `min_raw_sum`.

    Args:
        names: Names of matrices and rollouts.
        by_layer: For each layer, the matrices before normalisation: the result of `layer_contributions` for
            `select_layer_matrices(names)`.
        starts: Index of the first layer of each stack. Rollouts restart there, because the stacks have different
            tokens.
    """
    matrices: dict[str, Tensor] = {}
    for matrix in select_layer_matrices(names):
        raw_LTT = torch.stack([raw[matrix.name] for raw in by_layer])
        rows_LTT = raw_LTT
        if matrix.rows == "made to sum to 1":
            rows_LTT = rows_to_one(raw_LTT)
        rollout_name = matrix.rolled_out().name
        if rollout_name in names:
            matrices[rollout_name] = _roll_out_stacks(matrix, rows_LTT, starts)
        if matrix.name in names:
            is_meaningless_LT1 = raw_LTT.sum(-1, keepdim=True) < matrix.min_raw_sum
            matrices[matrix.name] = rows_LTT.masked_fill(is_meaningless_LT1, torch.nan)
    return matrices


def _roll_out_stacks(matrix: LayerMatrix, rows_LTT: Tensor, starts: Sequence[int]) -> Tensor:
    """Return the rollout `[L, T, T]` of a matrix, separately for each stack of layers.

    The rollout is the product of the matrices of a layer and of all previous layers of its stack (encoder or decoder).
    `starts` contains the index of the first layer of each stack. If `matrix.rollout` is "with identity", the mean of
    the matrix and the identity is rolled out; the identity represents the skip connection.
    """
    steps_LTT = rows_LTT
    if matrix.rollout == "with identity":
        steps_LTT = (rows_LTT + _create_identity(rows_LTT)) / 2
    starts_of_later_stacks = list(starts[1:])
    stacks = steps_LTT.tensor_split(starts_of_later_stacks)
    return torch.cat([rollout(stack) for stack in stacks])


def rows_to_one(matrix_TT: Tensor) -> Tensor:
    """Divide each row by its sum; replace rows of zeros (no contributions) by rows of the identity."""
    sums = matrix_TT.sum(-1, keepdim=True)
    return torch.where(sums > 0, matrix_TT / sums, _create_identity(matrix_TT))


def _create_identity(matrix_TT: Tensor) -> Tensor:
    """Return the identity `[T, T]` in the dtype and on the device of a matrix or of stacked matrices."""
    return torch.eye(matrix_TT.shape[-1], dtype=matrix_TT.dtype, device=matrix_TT.device)


def rollout(matrices_LTT: Tensor) -> Tensor:
    """Return R_l = A_l R_{l-1} for each layer `[L, T, T]` (Abnar and Zuidema, ACL 2020, equation 1)."""
    rolled = [matrices_LTT[0]]
    for matrix in matrices_LTT[1:]:
        rolled.append(matrix @ rolled[-1])
    return torch.stack(rolled)


def layer_contributions(declared: Sequence[LayerMatrix], layer_pass: LayerPass) -> dict[str, Tensor]:
    """Return the matrices `declared` `[T, T]` of one text in one layer before normalisation; the keys are their names.

    Each row belongs to a token, and each column to a source token, which contributes to all tokens. `layer_pass` is in
    float64. Columns are computed in chunks of J sources, because the contribution vectors of a single source already
    have `T * D` elements.
    """
    tokens = len(layer_pass.x)
    layer_sources = LayerSources(layer_pass)
    raw = {matrix.name: layer_pass.x.new_empty(tokens, tokens) for matrix in declared}
    max_numbers = CHUNK_NUMBERS if layer_pass.x.is_cpu else DEVICE_CHUNK_NUMBERS
    sources_per_chunk = max(1, max_numbers // layer_pass.x.numel())
    for start in range(0, tokens, sources_per_chunk):
        sources = slice(start, start + sources_per_chunk)
        chunk = SourceChunk(layer_sources, sources)
        for matrix in declared:
            raw[matrix.name][:, sources] = matrix.formula(chunk).T  # a formula returns [J, T]
    return raw


def coherence(layer_pass: LayerPass) -> Tensor:
    """Return |sum_{j != i} F_ij| / sum_{j != i} |F_ij| in [0, 1] for each token i `[T]` of a text in one layer.

    F_ij is the contribution of token j to the attention output of token i. The result is NaN for a token without
    contributions of other tokens.
    """
    (norms_TT,) = layer_contributions([LAYER_MATRICES["norm"]], layer_pass).values()
    sum_of_norms_T = norms_TT.sum(-1) - norms_TT.diagonal()
    norm_of_sum_T = split_layer(layer_pass).attention.others.norm(dim=-1)
    return torch.where(sum_of_norms_T > 0, norm_of_sum_T / sum_of_norms_T, torch.nan)


@dataclass(frozen=True)
class LayerSources:
    """Tensors of all sources of one text in one layer, computed at first use."""

    layer_pass: LayerPass

    @cached_property
    def weights_JTH(self) -> Tensor:
        """The attention weights a^h_ij by source j, token i and head h."""
        return self.layer_pass.attention.weights().permute(2, 1, 0)

    @cached_property
    def f_JHD(self) -> Tensor:
        """The vectors f_h(x_j): values of source j in head h, multiplied by W_O^h."""
        value_JHd = self.layer_pass.attention.value.transpose(0, 1)
        W_HdD = self.layer_pass.block.output.W.unflatten(0, (value_JHd.shape[1], -1))
        return torch.einsum("jhd,hde->jhe", value_JHd, W_HdD)


@dataclass(frozen=True)
class SourceChunk:
    """The contributions of J sources to each of T tokens in one layer."""

    layer_sources: LayerSources
    sources: slice  # positions of the sources

    @property
    def layer_pass(self) -> LayerPass:
        """The recorded forward pass of the layer."""
        return self.layer_sources.layer_pass

    @property
    def attention_JTH(self) -> Tensor:
        """The attention weights of all tokens on the chunk's sources."""
        return self.layer_sources.weights_JTH[self.sources]

    @property
    def f_JHD(self) -> Tensor:
        """The vectors f_h(x_j) of the chunk's sources."""
        return self.layer_sources.f_JHD[self.sources]

    @cached_property
    def projected_JTD(self) -> Tensor:
        """The contribution of each source to the output of W_O: sum_h a^h_ij f_h(x_j)."""
        return self.attention_JTH @ self.f_JHD

    @cached_property
    def bias_JTD(self) -> Tensor:
        """The part of `projected_JTD` that stems from b_V: sum_h a^h_ij b_V^h W_O^h."""
        heads = self.attention_JTH.shape[-1]
        bias_Hd = self.layer_pass.value_bias.unflatten(0, (heads, -1))
        W_HdD = self.layer_pass.block.output.W.unflatten(0, (heads, -1))
        bias_HD = torch.einsum("hd,hde->he", bias_Hd, W_HdD)
        return self.attention_JTH @ bias_HD

    @cached_property
    def F_JTD(self) -> Tensor:
        """F_ij, the contribution of source j to the attention output of token i, after any norm of W_O's output."""
        return self.layer_pass.block.attention_output_norm.part(self.projected_JTD, self.layer_pass.projected)

    @cached_property
    def T_JTD(self) -> Tensor:
        """T_ij, the contribution of source j to token i after attention's skip connection and the norm that follows.

        R_ij is the contribution before this norm: F_ij, plus the layer's input x_i if i = j. The norm is applied
        without beta, which is not attributed to any source. T_ij equals R_ij in families without this norm.
        """
        R_JTD = self.F_JTD.clone()
        # A view of R_jj for each source j of the chunk: the source at index 0 is the token at index `sources.start`.
        own_DJ = R_JTD.diagonal(offset=self.sources.start, dim1=0, dim2=1)
        own_DJ += self.layer_pass.x[self.sources].T
        return self.layer_pass.block.attention_norm.part(R_JTD, self.layer_pass.residual)

    def through_output_norm(self) -> Tensor:
        """Return T_ij `[J, T, D]` after the linear parts of the remaining LayerNorms on the skip connections.

        T_ij is the contribution of source j to token i after attention's norm. Each later LayerNorm divides T_ij by the
        standard deviation of the whole vector. Cross-attention and the feed-forward network only affect this standard
        deviation. `attended` is the whole vector before cross-attention, and `stream` is the whole vector before the
        feed-forward network.
        """
        block = self.layer_pass.block
        features = self.layer_pass.features
        parts_JTD = self.T_JTD
        if "cross_attention_norm" in features:
            cross_residual_TD = self.layer_pass.attended + features["cross_attention_output"]
            parts_JTD = block.cross_attention_norm.part(parts_JTD, whole=cross_residual_TD)
        network_residual_TD = self.layer_pass.stream + features["ffn_output"]
        return block.output_norm.part(parts_JTD, whole=network_residual_TD)

    def output_without(self, part_JTD: Tensor) -> Tensor:
        """Return the layer's outputs `[J, T, D]`, each without the contributions of one source.

        The contributions `part_JTD` of source j, for example `projected_JTD`, are subtracted from the output of W_O.
        """
        layer_pass = self.layer_pass
        block = layer_pass.block
        attention_output_JTD = block.attention_output_norm(layer_pass.projected - part_JTD)
        return block.rest(layer_pass.call, layer_pass.x, attention_output_JTD)


class _ComparedMeasures(NamedTuple):
    """The measures of one text that are compared with derivatives."""

    ratios_LMT: Tensor
    matrices: dict[str, Tensor]  # matrices and rollouts [L, T, T] by name, in the order of `sort_matrices`
    coherence_LT: Tensor

    def correlate(self, others_LT: Tensor, entries_LTT: Tensor) -> Doubles:
        """Return the rank correlations `[L, measures]` of derivatives with each ratio, then with each matrix, by layer.

        A ratio is correlated over the tokens with `others_LT`, the share of other tokens in each token's derivatives.
        The rows of a matrix, one for each token i, are correlated with the rows of `entries_LTT`, which contain the
        norms |J_ij| of the derivatives of token i by source j; these correlations are averaged over the rows.
        """
        correlations = []
        others_L1T = others_LT.unsqueeze(1)
        for ratios_LT in self.ratios_LMT.unbind(1):
            ratios_L1T = ratios_LT.unsqueeze(1)  # `_average_spearman` correlates rows: a single row, all tokens
            correlations.append(_average_spearman(ratios_L1T, others_L1T))
        for matrix_LTT in self.matrices.values():
            correlations.append(_average_spearman(matrix_LTT, entries_LTT))
        return np.stack(correlations, axis=1)

    def compute_rollout_mixing(self) -> list[Doubles]:
        """Return 1 - R_ii `[L, 1, T]` for each rollout R: the share of the other input tokens in token i's vector."""
        mixing = []
        for name, matrix_LTT in self.matrices.items():
            if name in ROLLOUTS:
                own_L1T = matrix_LTT.diagonal(dim1=-2, dim2=-1)[:, None]
                mixing.append(1 - own_L1T.cpu().numpy())
        return mixing


def copy_with_same_weights(base: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `base` with separate parameter objects, which initially share the memory of the originals."""
    copies: dict[int, Parameter] = {}  # memo of `copy.deepcopy`, by id of the original
    for parameter in base.parameters():
        copies[id(parameter)] = Parameter(parameter.detach(), parameter.requires_grad)
    return copy_model(base, copies)


class DocumentMeasurer:
    """Measures single texts with one checkpoint: matrices in float64, and derivatives in float32."""

    def __init__(self, base: PreTrainedModel, methods: Sequence[str], matrices: Sequence[str] = ()) -> None:
        """Store a float32 model, and the names of those ratios and matrices that are defined for the model's family."""
        family = family_of(base.config)
        self.base_32 = base
        self._copy: PreTrainedModel | None = None
        self.methods = family.present(methods)
        self.matrices = family.present(matrices)
        counts = layer_counts(base)
        self.layers = sum(counts)
        self.starts = [0, *counts[:-1]]  # index of the first layer of each stack

    def create_copy(self) -> PreTrainedModel:
        """Return a copy of the model, created by the first call; later calls return the same copy.

        The property `base` converts this copy to float64. No other thread may run a forward pass during the first
        call, because the copy would include that pass's hooks.
        """
        if self._copy is None:
            self._copy = copy_with_same_weights(self.base_32)
        return self._copy

    @cached_property
    def base(self) -> PreTrainedModel:
        """The model in float64, converted on first access."""
        return self.create_copy().double()

    def contributions(
        self,
        ids: npt.NDArray[np.int32],
        names: Sequence[str] | None = None,
        advance: Callable[[], None] = lambda: None,
    ) -> dict[str, Tensor]:
        """Return the matrices and rollouts `[layers, tokens, tokens]` of a text on the CPU; the keys are their names.

        By default, `names` are the matrices given to the constructor. The callback `advance` runs after each layer.
        """
        names = self.matrices if names is None else names
        layer_matrices = select_layer_matrices(names)

        def measure_layer(layer_pass: LayerPass) -> dict[str, Tensor]:
            matrices = _compute_matrices_on_host(layer_matrices, layer_pass)
            advance()
            return matrices

        by_layer = self._map_layers(measure_layer, ids)
        return contributions(names, by_layer, self.starts)

    def matrices_and_heads(
        self, ids: npt.NDArray[np.int32], names: Sequence[str] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, npt.NDArray[Any]]]:
        """Return the matrices and the tensors of the attention heads of a text, each by name, from one forward pass.

        By default, `names` are the matrices given to the constructor.
        """
        names = self.matrices if names is None else names
        layer_matrices = select_layer_matrices(names)

        def measure_layer(layer_pass: LayerPass) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            matrices = _compute_matrices_on_host(layer_matrices, layer_pass)
            return matrices, layer_heads(self.base, layer_pass, self.layers)

        by_layer = self._map_layers(measure_layer, ids)
        raw_matrices = [matrices for matrices, _heads in by_layer]
        heads = [heads for _matrices, heads in by_layer]
        return contributions(names, raw_matrices, self.starts), joined_heads(heads)

    def derivatives(
        self, ids: npt.NDArray[np.int32], donors: Sequence[npt.NDArray[np.int32]], directions: int, seed: int
    ) -> dict[str, Doubles]:
        """Return the measures of a text that are based on derivatives, and measures for comparison, by name.

        J_ij is the derivative of a layer's output at token i with respect to a vector of token j: its word embedding or
        the layer's input at j (`REFERENCES`). The `FORMS` are three ways to combine the J_ij of the other tokens j into
        one number, `others`. The share of other tokens in token i's derivatives is others / (others + |J_ii|). The
        derivatives are estimated with `directions` random directions, drawn with `seed`.

        `level`       [references, layers, forms, tokens]: share of other tokens in a token's derivatives (`levels`)
        `swap`        [layers, donors * swaps, tokens]: for each text in `donors`, the two swap ratios `SWAPS` computed
                      with the layer inputs of this text (`_measure_swaps`)
        `coherence`   [layers, 1, tokens]: 1 if the contributions of all other tokens to the attention output have the
                      same direction (`coherence`)
        `ratio`       [layers, methods, tokens]: the mixing ratios of the text's tokens
        `from_input`  [layers, rollouts and forms, tokens]: share of the other input tokens, first according to each
                      rollout (`_ComparedMeasures.compute_rollout_mixing`), then `level` for word embeddings in each
                      form
        `agreement`   [references, layers, ratios and matrices, 1]: rank correlations of the derivatives with ratios,
                      then with matrices and rollouts (`_ComparedMeasures.correlate`)

        NaN: `level` of a token with zero derivatives, `swap` beyond the end of the shorter text, `coherence` of a token
        without contributions of other tokens, and undefined correlations in `agreement`. In `agreement`, a ratio is
        correlated over the tokens of the text with `level` in the form `sum_of_norms`.
        """
        compared = self._measure_ratios_and_matrices(ids)
        chains = document_chains(self.base_32, self._create_batch(ids)["input_ids"])  # recorded layers of each stack
        levels_by_reference = []
        agreement = []
        for reference in REFERENCES:
            with torch.no_grad():
                norms = derivative_norms(chains, reference, directions, seed)
                level_LFT = levels(norms)  # F forms
            levels_by_reference.append(level_LFT.cpu().numpy())
            sum_of_norms_LT = level_LFT[:, FORMS.index("sum_of_norms")]
            agreement.append(compared.correlate(sum_of_norms_LT, norms.entries_LTT))
        swaps = [self._measure_swaps(ids, donor_ids) for donor_ids in donors]
        word_embedding_level = levels_by_reference[REFERENCES.index("word_embedding")]
        from_input = [*compared.compute_rollout_mixing(), word_embedding_level]
        return {
            "level": np.stack(levels_by_reference),
            "swap": np.concatenate(swaps, axis=1),
            "coherence": compared.coherence_LT[:, None].cpu().numpy(),
            "ratio": compared.ratios_LMT.cpu().numpy(),
            "from_input": np.concatenate(from_input, axis=1),
            "agreement": np.stack(agreement)[..., None],
        }

    def _measure_ratios_and_matrices(self, ids: npt.NDArray[np.int32]) -> _ComparedMeasures:
        """Return the ratios, matrices and coherence of the text `ids` from one forward pass."""
        layer_matrices = select_layer_matrices(self.matrices)
        raw_matrices: list[dict[str, Tensor]] = []
        coherences: list[Tensor] = []

        def measure_layer(layer_pass: LayerPass) -> Tensor:
            """Store the matrices and the coherence of one layer, and return the ratios `[M, T]` of this layer."""
            raw_matrices.append(_compute_matrices_on_host(layer_matrices, layer_pass))
            coherences.append(coherence(layer_pass))
            return mixing_ratios(self.methods, layer_pass)

        ratios_LMT = torch.stack(self._map_layers(measure_layer, ids))
        # Normalise the matrices, and compute rollouts, which restart at the first layer of each stack (`starts`).
        matrices = contributions(self.matrices, raw_matrices, self.starts)
        in_order = {name: matrices[name] for name in sort_matrices(self.matrices)}
        return _ComparedMeasures(ratios_LMT, in_order, torch.stack(coherences))

    def _measure_swaps(self, ids: npt.NDArray[np.int32], donor_ids: npt.NDArray[np.int32]) -> Doubles:
        """Return the swap ratios `[L, swaps, T]` of a text, computed with the layer inputs of a donor text.

        A swap ratio compares the effect of exchanging the layer inputs of the other tokens with the effect of
        exchanging the token's own layer input. The ratios are NaN for positions beyond the end of the donor text. If
        there is no donor text, `donor_ids` is empty, and all ratios are NaN.
        """
        if not len(donor_ids):
            return np.full((self.layers, len(SWAPS), len(ids)), np.nan)
        return document_swaps(self.base_32, ids, donor_ids)

    def gains(self) -> Doubles:
        """Return the `attention_gain` of each layer `[L]`."""
        one_token = np.ones(1, dtype=np.int32)
        return np.array(self._map_layers(attention_gain, one_token))

    def _map_layers(self, function: Callable[[LayerPass], Result], ids: npt.NDArray[np.int32]) -> list[Result]:
        """Apply `function` to the `LayerPass` of each layer (one text, without a batch axis); return the results."""
        points = (*LAYER_POINTS, PROJECTED, PREACTIVATION)

        def call_for_text(layer_pass: LayerPass) -> Result:
            return function(layer_pass.document(0))

        return map_layers(call_for_text, self.base, self._create_batch(ids), points)

    def _create_batch(self, ids: npt.NDArray[np.int32]) -> dict[str, Tensor]:
        """Return the model's inputs `[1, T]` for one text, keyed by argument name."""
        return padded([ids.tolist()], 0, self.base_32.device)


def _compute_matrices_on_host(layer_matrices: Sequence[LayerMatrix], layer_pass: LayerPass) -> dict[str, Tensor]:
    """Return the matrices `[T, T]` of a layer before normalisation, by name, moved to the CPU to free GPU memory."""
    raw = layer_contributions(layer_matrices, layer_pass)
    if not raw:
        return {}
    host_MTT = torch.stack(list(raw.values())).cpu()
    return dict(zip(raw, host_MTT.unbind(0), strict=True))


def attention_gain(layer_pass: LayerPass) -> float:
    """Return |[W_V, 0; b_V, 1] [W_O; b_O]|_F / sqrt(d + 1) (Kobayashi et al., EMNLP 2021, section 5.2).

    This is the root mean square of the factors by which the map [x, 1] -> (x W_V + b_V) W_O + b_O scales the lengths of
    random vectors [x, 1]. If it is below 1, the skip connection dominates. `layer_pass` must have a single token.
    """
    value = value_map(layer_pass)
    output = layer_pass.block.output
    W = value.W @ output.W
    b = value.b @ output.W + output.b
    squared_norm = W.double().square().sum() + b.double().square().sum()
    return float(torch.sqrt(squared_norm / (len(W) + 1)))


def _average_spearman(first_LRT: Tensor, second_LRT: Tensor) -> Doubles:
    """Return the rank correlation of corresponding rows, averaged over the R rows of each layer, `[L]`.

    Rows that are constant or contain NaN are ignored. The average is NaN if no row remains.
    """
    correlations_LR = rank_correlation(first_LRT.cpu().numpy(), second_LRT.cpu().numpy())
    is_defined_LR = ~np.isnan(correlations_LR)
    sums_L = np.nansum(correlations_LR, -1)
    means_L: Doubles = np.full(len(sums_L), np.nan)
    np.divide(sums_L, is_defined_LR.sum(-1), out=means_L, where=is_defined_LR.any(-1))
    return means_L
