"""Measures of one document at a time: contribution matrices in float64, and their agreement with derivatives."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from attnmix.core.points import DECODER_INPUT, LAYER_POINTS, PREACTIVATION, Site
from attnmix.core.ranks import rank_correlation
from attnmix.measures.contributions import contributions, layer_contributions
from attnmix.measures.gradients import FORMS, REFERENCES, derivative_norms, document_calls, levels
from attnmix.measures.layers import LayerPass, Visit, attention_gain, attention_map, run_layers
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
        by_layer: list[dict[str, Tensor]] = []

        def visit(seen: LayerPass, _features: Mapping[Site, Tensor]) -> None:
            by_layer.append(layer_contributions(self.declared, seen.document(0)))

        self._run(ids, visit)
        return contributions(self.declared, by_layer, self.starts)

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
        by_layer: list[dict[str, Tensor]] = []
        ratios: list[dict[str, Tensor]] = []

        def visit(seen: LayerPass, _features: Mapping[Site, Tensor]) -> None:
            by_layer.append(layer_contributions(self.declared, seen.document(0)))
            ratios.append(mixing_ratios(self.methods, seen.document(0)))

        self._run(ids, visit)
        matrices = contributions(self.declared, by_layer, self.starts)
        names = with_rollouts(self.matrices)
        agreement = np.empty((len(REFERENCES), len(by_layer), len(self.methods) + len(names)))
        by_form = np.empty((len(REFERENCES), len(by_layer), len(FORMS), len(ids)))
        calls = document_calls(self.base_32, self._ids(ids))
        with torch.no_grad():
            for place, reference in enumerate(REFERENCES):
                norms = derivative_norms(calls, reference, directions, seed)
                of_layers = levels(norms)
                by_form[place] = of_layers.cpu().numpy()
                for layer, jacobian in enumerate(norms.entries_LTT):
                    others = of_layers[layer, FORMS.index("sum_of_norms")]
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
            run_layers(self.base, self.folder, batch, visit, (*LAYER_POINTS, PROJECTED, PREACTIVATION))

    def _ids(self, ids: npt.NDArray[np.int32]) -> Tensor:
        return torch.as_tensor(ids[None], dtype=torch.long, device=self.base.device)


def _spearman_of_rows(first: Tensor, second: Tensor) -> float:
    """Mean over rows; those that are constant or not to be trusted (NaN) are left out."""
    of_rows = np.atleast_1d(rank_correlation(first.cpu().numpy(), second.cpu().numpy()))
    defined = ~np.isnan(of_rows)
    return float(of_rows[defined].mean()) if defined.any() else float("nan")
