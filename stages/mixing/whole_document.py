"""Measures of one document at a time: contribution matrices in float64, and their agreement with derivatives."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from stages.mixing.contributions import Contributions, contributions
from stages.mixing.gradients import REFERENCES, embedding_norm, jacobian_norms
from stages.mixing.layers import VALUE, attentions_of, layer_weights, ratio_taps
from stages.mixing.matrices import with_rollouts
from stages.mixing.ratios import mixing_ratios
from stages.models.capture_points import recording, taps
from stages.ranks import rank_correlation
from stages.sites import Site, layer_input

Tensor = torch.Tensor
Doubles = npt.NDArray[np.float64]


class _Pass(NamedTuple):
    """One document's forward pass, a tensor for each layer and no batch."""

    attention: list[Tensor]  # [heads, tokens, tokens]
    inputs: list[Tensor]  # [tokens, hidden]
    values: list[Tensor]
    outputs: list[Tensor]  # of attention
    embedding_sum: Tensor


class DocumentMeasurer:
    """One checkpoint's model, in float64 for the matrices, in float32 for derivatives."""

    def __init__(self, base: PreTrainedModel, folder: Path, methods: Sequence[str], matrices: Sequence[str]) -> None:
        self.base, self.folder = copy.deepcopy(base).double(), folder
        self.methods, self.matrices = methods, matrices
        self.weights, self.weights_32 = layer_weights(self.base), layer_weights(base)
        self.embedding_norm_32 = embedding_norm(base)

    def contributions(self, ids: npt.NDArray[np.int32]) -> tuple[Contributions, Tensor]:
        """The document's matrices, and its attention weights `[layers, heads, tokens, tokens]`."""
        seen = self._forward(ids)
        with torch.inference_mode():
            return self._matrices(seen), torch.stack(seen.attention)

    def agreement(self, ids: npt.NDArray[np.int32], directions: int, seed: int) -> Doubles:
        """Spearman `[references, layers, methods]` of every ratio and matrix with the gradient reference.

        A matrix is compared row by row (the sources of each token, then the mean over tokens), a ratio over
        the document's tokens with 1 - |J_ii| / sum_j |J_ij|. Ratios come first, then matrices and their rollouts.
        """
        seen = self._forward(ids)
        names = with_rollouts(self.matrices)
        agreement = np.empty((len(REFERENCES), len(self.weights), len(self.methods) + len(names)))
        with torch.inference_mode():
            matrices = self._matrices(seen).matrices
            layers = zip(self.weights, seen.attention, seen.inputs, seen.values, seen.outputs, strict=True)
            ratios = [
                mixing_ratios(self.methods, weights, *(part.unsqueeze(0) for part in parts))
                for weights, *parts in layers
            ]
        # Not in inference mode, whose tensors no derivative is taken of.
        inputs = [x.float().clone() for x in seen.inputs]
        embedding_sum = seen.embedding_sum.float().clone()
        with torch.no_grad():
            for place, reference in enumerate(REFERENCES):
                jacobian_LTT = jacobian_norms(
                    self.weights_32, self.embedding_norm_32, embedding_sum, inputs, reference, directions, seed
                )
                for layer, jacobian in enumerate(jacobian_LTT):
                    others = 1 - jacobian.diagonal() / jacobian.sum(-1)
                    row = [_spearman_of_rows(ratio, others.unsqueeze(0)) for ratio in ratios[layer].values()]
                    row += [_spearman_of_rows(matrices[name][layer], jacobian) for name in names]
                    agreement[place, layer] = row
        return agreement

    def _matrices(self, seen: _Pass) -> Contributions:
        return contributions(self.matrices, self.weights, seen.inputs, seen.attention, seen.values)

    def _forward(self, ids: npt.NDArray[np.int32]) -> _Pass:
        config = self.base.config
        wanted = [*ratio_taps(self.base), *taps(config.model_type, config.num_hidden_layers, ["embedding_sum"])]
        batch = torch.as_tensor(ids[None], dtype=torch.long, device=self.base.device)
        with torch.inference_mode(), recording(self.base, wanted) as features:
            output = self.base(input_ids=batch, attention_mask=torch.ones_like(batch), output_attentions=True)
        layers = range(1, len(self.weights) + 1)
        return _Pass(
            [weights[0] for weights in attentions_of(output, len(self.weights), self.folder)],
            [features[layer_input(layer)][0] for layer in layers],
            [features[Site(layer, VALUE)][0] for layer in layers],
            [features[Site(layer, "attention_output")][0] for layer in layers],
            features[Site(0, "embedding_sum")][0],
        )


def _spearman_of_rows(first: Tensor, second: Tensor) -> float:
    """Mean over rows; those that are constant or not to be trusted (NaN) are left out."""
    of_rows = rank_correlation(first.cpu().numpy(), second.cpu().numpy())
    defined = ~np.isnan(of_rows)
    return float(of_rows[defined].mean()) if defined.any() else float("nan")
