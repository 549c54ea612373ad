"""Measures of one document at a time: contribution matrices in float64, and their agreement with derivatives."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from stages.mixing.contributions import Contributions, contributions, layer_contributions
from stages.mixing.gradients import REFERENCES, document_calls, jacobian_norms
from stages.mixing.layers import LayerPass, Visit, attention_gain, attention_map, run_layers
from stages.mixing.matrices import LAYER_MATRICES, with_rollouts
from stages.mixing.ratios import mixing_ratios
from stages.models.families import PROJECTED, family_of
from stages.ranks import rank_correlation
from stages.sites import LAYER_POINTS, Site

Tensor = torch.Tensor
Doubles = npt.NDArray[np.float64]


class DocumentMeasurer:
    """One checkpoint's model, in float64 for the matrices, in float32 for derivatives."""

    def __init__(self, base: PreTrainedModel, folder: Path, methods: Sequence[str], matrices: Sequence[str]) -> None:
        family = family_of(base.config)
        self.base, self.folder, self.base_32 = copy.deepcopy(base).double(), folder, base
        self.methods, self.matrices = family.present(methods), family.present(matrices)
        self.declared = [LAYER_MATRICES[name] for name in self.matrices]

    def contributions(self, ids: npt.NDArray[np.int32]) -> tuple[Contributions, Tensor]:
        """The document's matrices, and its attention weights `[layers, heads, tokens, tokens]`."""
        by_layer: list[dict[str, Tensor]] = []
        weights: list[Tensor] = []

        def visit(seen: LayerPass, _features: Mapping[Site, Tensor]) -> None:
            by_layer.append(layer_contributions(self.declared, seen.document(0)))
            weights.append(seen.attention.weights()[0])

        self._run(ids, visit)
        return contributions(self.declared, by_layer), torch.stack(weights)

    def agreement(self, ids: npt.NDArray[np.int32], directions: int, seed: int) -> Doubles:
        """Spearman `[references, layers, methods]` of every ratio and matrix with the gradient reference.

        A matrix is compared row by row (the sources of each token, then the mean over tokens), a ratio over
        the document's tokens with 1 - |J_ii| / sum_j |J_ij|. Ratios come first, then matrices and their rollouts.
        """
        by_layer: list[dict[str, Tensor]] = []
        ratios: list[dict[str, Tensor]] = []

        def visit(seen: LayerPass, _features: Mapping[Site, Tensor]) -> None:
            by_layer.append(layer_contributions(self.declared, seen.document(0)))
            ratios.append(mixing_ratios(self.methods, seen.document(0)))

        self._run(ids, visit)
        matrices = contributions(self.declared, by_layer).matrices
        names = with_rollouts(self.matrices)
        agreement = np.empty((len(REFERENCES), len(by_layer), len(self.methods) + len(names)))
        calls = document_calls(self.base_32, self._ids(ids))
        with torch.no_grad():
            for place, reference in enumerate(REFERENCES):
                for layer, jacobian in enumerate(jacobian_norms(calls, reference, directions, seed)):
                    others = 1 - jacobian.diagonal() / jacobian.sum(-1)
                    row = [_spearman_of_rows(ratio, others) for ratio in ratios[layer].values()]
                    row += [_spearman_of_rows(matrices[name][layer], jacobian) for name in names]
                    agreement[place, layer] = row
        return agreement

    def gains(self) -> Doubles:
        """`attention_gain` of each layer."""
        maps: list[float] = []

        def visit(seen: LayerPass, _features: Mapping[Site, Tensor]) -> None:
            maps.append(attention_gain(attention_map(seen)))

        self._run(np.ones(1, dtype=np.int32), visit)
        return np.array(maps)

    def _run(self, ids: npt.NDArray[np.int32], visit: Visit) -> None:
        tokens = self._ids(ids)
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        with torch.inference_mode():
            run_layers(self.base, self.folder, batch, visit, (*LAYER_POINTS, PROJECTED))

    def _ids(self, ids: npt.NDArray[np.int32]) -> Tensor:
        return torch.as_tensor(ids[None], dtype=torch.long, device=self.base.device)


def _spearman_of_rows(first: Tensor, second: Tensor) -> float:
    """Mean over rows; those that are constant or not to be trusted (NaN) are left out."""
    of_rows = np.atleast_1d(rank_correlation(first.cpu().numpy(), second.cpu().numpy()))
    defined = ~np.isnan(of_rows)
    return float(of_rows[defined].mean()) if defined.any() else float("nan")
