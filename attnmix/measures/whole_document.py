"""Measures of one document at a time: contribution matrices in float64, and their agreement with derivatives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from attnmix.core.points import DECODER_INPUT, LAYER_POINTS, PREACTIVATION
from attnmix.core.statistics import rank_correlation
from attnmix.measures.contributions import contributions, layer_contributions
from attnmix.measures.gradients import FORMS, REFERENCES, derivative_norms, document_calls, levels
from attnmix.measures.layers import LayerPass, Result, attention_gain, attention_map, map_layers
from attnmix.measures.matrices import LAYER_MATRICES, ROLLOUTS, with_rollouts
from attnmix.measures.ratios import mixing_ratios
from attnmix.models.capture_points import widths
from attnmix.models.families import PROJECTED, family_of

Tensor = torch.Tensor
Doubles = npt.NDArray[np.float64]


class DocumentMeasurer:
    """One checkpoint's model, in float64 for the matrices, in float32 for derivatives."""

    def __init__(self, base: PreTrainedModel, folder: Path, methods: Sequence[str], matrices: Sequence[str]) -> None:
        family = family_of(base.config)
        self.base, self.folder, self.base_32 = copy.deepcopy(base).double(), folder, base
        self.methods, self.matrices = family.present(methods), family.present(matrices)
        self.declared = [LAYER_MATRICES[name] for name in self.matrices]
        sites = widths(base)
        self.layers = max(site.layer for site in sites)
        self.starts = [0, *(site.layer for site in sites if site.point == DECODER_INPUT)]  # of each stack

    def contributions(self, ids: npt.NDArray[np.int32]) -> dict[str, Tensor]:
        """Return the document's matrices `[layers, tokens, tokens]` by name."""

        def raw(layer_pass: LayerPass) -> dict[str, Tensor]:
            return layer_contributions(self.declared, layer_pass.document(0))

        return contributions(self.declared, self._map_layers(raw, ids), self.starts)

    def derivatives(self, ids: npt.NDArray[np.int32], directions: int, seed: int) -> dict[str, Doubles]:
        """Return the document's derivatives and what they are compared with, by quantity.

        `level`       [references, layers, forms, tokens]: `levels`; NaN for a token whose output nothing moves
        `ratio`       [layers, methods, tokens]: the mixing ratios of the same tokens
        `from_input`  [layers, rollouts and forms, tokens]: 1 - R_ii of each rollout, then the levels by word embeddings
        `agreement`   [references, layers, methods, 1]: Spearman's correlation with ratios, matrices and rollouts; NaN
                      where it is not defined

        A matrix is compared row by row (the sources of each token, then the mean over tokens), a ratio over the
        document's tokens with `sum_of_norms`. Ratios come first, then matrices and their rollouts.
        """

        def measure(layer_pass: LayerPass) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            document = layer_pass.document(0)
            return layer_contributions(self.declared, document), mixing_ratios(self.methods, document)

        by_layer, ratios = zip(*self._map_layers(measure, ids), strict=True)
        matrices = contributions(self.declared, by_layer, self.starts)
        names = with_rollouts(self.matrices)
        agreement = np.empty((len(REFERENCES), len(by_layer), len(self.methods) + len(names)))
        by_form = np.empty((len(REFERENCES), len(by_layer), len(FORMS), len(ids)))
        calls = document_calls(self.base_32, self._ids(ids))
        with torch.no_grad():
            for place, reference in enumerate(REFERENCES):
                norms = derivative_norms(calls, reference, directions, seed)
                shares = levels(norms)
                by_form[place] = shares.cpu().numpy()
                for layer, jacobian in enumerate(norms.entries_LTT):
                    others = shares[layer, FORMS.index("sum_of_norms")]
                    row = [_spearman_of_rows(ratio, others) for ratio in ratios[layer].values()]
                    row += [_spearman_of_rows(matrices[name][layer], jacobian) for name in names]
                    agreement[place, layer] = row
        rolled = [1 - matrices[name].diagonal(dim1=-2, dim2=-1).cpu().numpy() for name in names if name in ROLLOUTS]
        from_words = by_form[REFERENCES.index("word_embedding")]
        return {
            "level": by_form,
            "ratio": torch.stack([torch.stack(list(each.values())) for each in ratios]).cpu().numpy(),
            "from_input": np.concatenate([each[:, None] for each in rolled] + [from_words], axis=1),
            "agreement": agreement[..., None],
        }

    def gains(self) -> Doubles:
        """Return `attention_gain` of each layer."""
        one_token = np.ones(1, dtype=np.int32)
        return np.array(self._map_layers(lambda each: attention_gain(attention_map(each)), one_token))

    def _map_layers(self, function: Callable[[LayerPass], Result], ids: npt.NDArray[np.int32]) -> list[Result]:
        tokens = self._ids(ids)
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        return map_layers(function, self.base, self.folder, batch, (*LAYER_POINTS, PROJECTED, PREACTIVATION))

    def _ids(self, ids: npt.NDArray[np.int32]) -> Tensor:
        return torch.as_tensor(ids[None], dtype=torch.long, device=self.base.device)


def _spearman_of_rows(first: Tensor, second: Tensor) -> float:
    """Return the mean over rows; those that are constant or not to be trusted (NaN) are left out."""
    correlations = np.atleast_1d(rank_correlation(first.cpu().numpy(), second.cpu().numpy()))
    defined = ~np.isnan(correlations)
    return float(correlations[defined].mean()) if defined.any() else float("nan")
