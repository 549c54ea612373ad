"""Measures of a batch of documents: one padded forward pass, then everything that its tensors say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from stages.errors import InputError
from stages.mixing.documents import Document
from stages.mixing.geometry import geometry
from stages.mixing.identities import identity_errors
from stages.mixing.layers import LayerPass, LayerWeights, layer_weights, run_layers
from stages.mixing.ratios import mixing_ratios
from stages.mixing.steps import step_measures
from stages.models.capture_points import taps
from stages.models.encoding import padded
from stages.sites import POINTS, Site, layer_input

# Relative error of float32 in the identities: measured at 1e-6 in real models.
IDENTITY_TOLERANCE = 1e-4

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DocumentMeasures:
    """What one forward pass says about one document in one checkpoint."""

    ratios: Floats  # [methods, layers, tokens]
    identities: Doubles  # [layers, 2]: attention_output, attention_norm
    geometry: Doubles  # [sites, measures], over the counted tokens; empty for a document that does not count
    steps: Doubles  # [layers, steps, measures]: sums over the counted tokens; empty likewise


class BatchMeasurer:
    """One checkpoint's model, and what to read from its forward passes."""

    def __init__(self, base: PreTrainedModel, folder: Path, methods: Sequence[str], pad_token_id: int) -> None:
        self.base, self.folder, self.methods, self.pad_token_id = base, folder, methods, pad_token_id
        self.weights = layer_weights(base)
        self.sites = [tap.site for tap in taps(base.config.model_type, len(self.weights), POINTS)]

    def ratios(self, documents: Sequence[Document]) -> torch.Tensor:
        """Only the mixing ratios `[layers, methods, batch, tokens]` of one padded batch."""
        with torch.inference_mode():
            layers, _ = run_layers(self.base, self.folder, self._batch(documents))
            return torch.stack([self._ratios(*layer) for layer in zip(self.weights, layers, strict=True)])

    def measures(self, documents: Sequence[Document]) -> Iterator[DocumentMeasures]:
        """Everything for each document of one padded batch; `InputError` where the numbers are not to be trusted."""
        with torch.inference_mode():
            batch = self._batch(documents)
            layers, features = run_layers(self.base, self.folder, batch, POINTS)
            mask = batch["attention_mask"].bool()
            ratios, identities = [], []
            for layer, (weights, seen) in enumerate(zip(self.weights, layers, strict=True), start=1):
                ratios.append(self._ratios(weights, seen))
                errors = identity_errors(weights, seen, mask)
                self._check(layer, documents, ratios[-1], mask, errors)
                identities.append(torch.stack(list(errors.values()), dim=-1))
            ratios_MBLT = torch.stack(ratios, dim=2).cpu().numpy()
            identities_BL2 = torch.stack(identities, dim=1).double().cpu().numpy()
            for place, document in enumerate(documents):
                yield DocumentMeasures(
                    np.ascontiguousarray(ratios_MBLT[:, place, :, : len(document)]),
                    identities_BL2[place],
                    *self._cloud(document, {site: features[site][place, : document.counted] for site in self.sites}),
                )

    def _batch(self, documents: Sequence[Document]) -> dict[str, torch.Tensor]:
        return padded([document.ids.tolist() for document in documents], self.pad_token_id, self.base.device)

    def _ratios(self, weights: LayerWeights, seen: LayerPass) -> torch.Tensor:
        return torch.stack(list(mixing_ratios(self.methods, weights, seen).values()))

    def _check(
        self,
        layer: int,
        documents: Sequence[Document],
        ratio_MBT: torch.Tensor,
        mask_BT: torch.Tensor,
        errors: dict[str, torch.Tensor],
    ) -> None:
        broken = (~torch.isfinite(ratio_MBT) & mask_BT).any(0).any(-1)
        if broken.any():
            name = documents[int(broken.nonzero()[0])].name
            raise InputError(
                f"{self.folder}: layer {layer} of {name} holds NaN or infinite values; the weights are broken"
            )
        for identity, error_B in errors.items():
            worst = int(error_B.argmax())
            if not float(error_B[worst]) <= IDENTITY_TOLERANCE:
                raise InputError(
                    f"{self.folder}: the parts of {identity} do not sum to it in layer {layer} of "
                    f"{documents[worst].name}: relative error {float(error_B[worst]):.3g}, at most "
                    f"{IDENTITY_TOLERANCE:g} is rounding; this model computes attention in another way than BERT"
                )

    def _cloud(self, document: Document, features: dict[Site, torch.Tensor]) -> tuple[Doubles, Doubles]:
        if document.counted == 0:
            return np.zeros((0, 0)), np.zeros((0, 0, 0))
        words = features[Site(0, "word_embedding")]
        ids = torch.as_tensor(document.ids[: document.counted], device=words.device)
        shapes = [
            geometry(features[site], features[layer_input(site.layer)] if site.layer else words, words, ids)
            for site in self.sites
        ]
        moves = [step_measures(features, layer).double().sum(0) for layer in range(1, len(self.weights) + 1)]
        return torch.stack(shapes).cpu().numpy(), torch.stack(moves).cpu().numpy()
