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
from stages.mixing.layers import VALUE, LayerWeights, attentions_of, layer_weights, ratio_taps
from stages.mixing.ratios import mixing_ratios
from stages.mixing.steps import step_measures
from stages.models.capture_points import Tap, recording, taps
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
        self.base, self.folder, self.methods, self.pad_token_id = base, folder, tuple(methods), pad_token_id
        self.weights: list[LayerWeights] = layer_weights(base)
        self.layers = len(self.weights)
        self._points = taps(base.config.model_type, self.layers, POINTS)
        self.sites = [tap.site for tap in self._points]

    def ratios(self, documents: Sequence[Document]) -> torch.Tensor:
        """Only the mixing ratios `[layers, methods, batch, tokens]` of one padded batch."""
        with torch.inference_mode(), recording(self.base, ratio_taps(self.base)) as features:
            attentions = self._forward(documents)
            return torch.stack(
                [
                    torch.stack(list(self._layer_ratios(layer, attention, features).values()))
                    for layer, attention in enumerate(attentions, start=1)
                ]
            )

    def measures(self, documents: Sequence[Document]) -> Iterator[DocumentMeasures]:
        """Everything for each document of one padded batch; `InputError` where the numbers are not to be trusted."""
        wanted: list[Tap] = [*self._points, *(tap for tap in ratio_taps(self.base) if tap.site.point == VALUE)]
        with torch.inference_mode(), recording(self.base, wanted) as features:
            attentions = self._forward(documents)
            mask = _mask(documents, self.base.device)
            ratios, identities = [], []
            for layer, attention in enumerate(attentions, start=1):
                ratio = torch.stack(list(self._layer_ratios(layer, attention, features).values()))
                errors = identity_errors(
                    self.weights[layer - 1],
                    attention,
                    features[layer_input(layer)],
                    features[Site(layer, VALUE)],
                    features[Site(layer, "attention_output")],
                    features[Site(layer, "attention_norm")],
                    mask,
                )
                self._check(layer, documents, ratio, mask, errors._asdict())
                ratios.append(ratio)
                identities.append(torch.stack(list(errors), dim=-1))
            ratios_MBLT = torch.stack(ratios, dim=2).cpu().numpy()
            identities_BL2 = torch.stack(identities, dim=1).double().cpu().numpy()
            for place, document in enumerate(documents):
                yield DocumentMeasures(
                    np.ascontiguousarray(ratios_MBLT[:, place, :, : len(document)]),
                    identities_BL2[place],
                    *self._cloud(document, {site: features[site][place, : document.counted] for site in self.sites}),
                )

    def _forward(self, documents: Sequence[Document]) -> tuple[torch.Tensor, ...]:
        batch = padded([document.ids.tolist() for document in documents], self.pad_token_id, self.base.device)
        return attentions_of(self.base(**batch, output_attentions=True), self.layers, self.folder)

    def _layer_ratios(
        self, layer: int, attention_BHTT: torch.Tensor, features: dict[Site, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return mixing_ratios(
            self.methods,
            self.weights[layer - 1],
            attention_BHTT,
            features[layer_input(layer)],
            features[Site(layer, VALUE)],
            features[Site(layer, "attention_output")],
        )

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
        moves = [step_measures(features, layer).double().sum(0) for layer in range(1, self.layers + 1)]
        return torch.stack(shapes).cpu().numpy(), torch.stack(moves).cpu().numpy()


def _mask(documents: Sequence[Document], device: torch.device) -> torch.Tensor:
    lengths = torch.tensor([len(document) for document in documents], device=device)
    return torch.arange(int(lengths.max()), device=device) < lengths.unsqueeze(-1)
