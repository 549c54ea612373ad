"""Measures of one document at a time: contribution matrices in float64, and their agreement with derivatives."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from stages.mixing.contributions import Contributions, contributions
from stages.mixing.gradients import REFERENCES, embedding_norm, jacobian_norms
from stages.mixing.layers import LayerPass, layer_weights, run_layers
from stages.mixing.matrices import LAYER_MATRICES, with_rollouts
from stages.mixing.ratios import mixing_ratios
from stages.ranks import rank_correlation
from stages.sites import Site

Tensor = torch.Tensor
Doubles = npt.NDArray[np.float64]


class DocumentMeasurer:
    """One checkpoint's model, in float64 for the matrices, in float32 for derivatives."""

    def __init__(self, base: PreTrainedModel, folder: Path, methods: Sequence[str], matrices: Sequence[str]) -> None:
        self.base, self.folder = copy.deepcopy(base).double(), folder
        self.methods, self.matrices = methods, matrices
        self.declared = [LAYER_MATRICES[name] for name in matrices]
        self.weights, self.weights_32 = layer_weights(self.base), layer_weights(base)
        self.embedding_norm_32 = embedding_norm(base)

    def contributions(self, ids: npt.NDArray[np.int32]) -> tuple[Contributions, Tensor]:
        """The document's matrices, and its attention weights `[layers, heads, tokens, tokens]`."""
        layers, _ = self._run(ids)
        with torch.inference_mode():
            return contributions(self.declared, self.weights, layers), torch.stack([seen.attention for seen in layers])

    def agreement(self, ids: npt.NDArray[np.int32], directions: int, seed: int) -> Doubles:
        """Spearman `[references, layers, methods]` of every ratio and matrix with the gradient reference.

        A matrix is compared row by row (the sources of each token, then the mean over tokens), a ratio over
        the document's tokens with 1 - |J_ii| / sum_j |J_ij|. Ratios come first, then matrices and their rollouts.
        """
        layers, embedding_sum = self._run(ids)
        names = with_rollouts(self.matrices)
        with torch.inference_mode():
            matrices = contributions(self.declared, self.weights, layers).matrices
            ratios = [mixing_ratios(self.methods, *layer) for layer in zip(self.weights, layers, strict=True)]
        agreement = np.empty((len(REFERENCES), len(layers), len(self.methods) + len(names)))
        # Copies, as no derivative is taken of an inference mode's tensors.
        inputs, embedding_sum = [seen.x.float().clone() for seen in layers], embedding_sum.float().clone()
        with torch.no_grad():
            for place, reference in enumerate(REFERENCES):
                jacobian_LTT = jacobian_norms(
                    self.weights_32, self.embedding_norm_32, embedding_sum, inputs, reference, directions, seed
                )
                for layer, jacobian in enumerate(jacobian_LTT):
                    others = 1 - jacobian.diagonal() / jacobian.sum(-1)
                    row = [_spearman_of_rows(ratio, others) for ratio in ratios[layer].values()]
                    row += [_spearman_of_rows(matrices[name][layer], jacobian) for name in names]
                    agreement[place, layer] = row
        return agreement

    def _run(self, ids: npt.NDArray[np.int32]) -> tuple[list[LayerPass], Tensor]:
        """The layers' passes, and the sum of the embeddings `[tokens, hidden]`."""
        tokens = torch.as_tensor(ids[None], dtype=torch.long, device=self.base.device)
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        layers, features = run_layers(self.base, self.folder, batch, ["embedding_sum"])
        return [seen.document(0) for seen in layers], features[Site(0, "embedding_sum")][0]


def _spearman_of_rows(first: Tensor, second: Tensor) -> float:
    """Mean over rows; those that are constant or not to be trusted (NaN) are left out."""
    of_rows = np.atleast_1d(rank_correlation(first.cpu().numpy(), second.cpu().numpy()))
    defined = ~np.isnan(of_rows)
    return float(of_rows[defined].mean()) if defined.any() else float("nan")
