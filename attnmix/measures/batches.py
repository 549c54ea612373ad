"""Measures of a batch of documents: one padded forward pass, then everything that its tensors say, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from attnmix.core.errors import InputError
from attnmix.core.points import POINTS, PREACTIVATION, Site
from attnmix.measures.controls import Sources, attended_without_bias, control_ratios
from attnmix.measures.documents import Document
from attnmix.measures.geometry import Cloud, Words, geometry, step_measures, words_of
from attnmix.measures.heads import head_factors, head_ratios
from attnmix.measures.identities import IDENTITIES, identity_errors, vector_errors
from attnmix.measures.layers import RATIO_POINTS, LayerPass, map_layers, run_layers, value_bias
from attnmix.measures.ratios import mixing_ratios, ratio_points
from attnmix.models.capture_points import widths
from attnmix.models.encoding import padded
from attnmix.models.families import PROJECTED, family_of, optional_modules

# Relative error of float32 in the identities: measured at 1e-6 in real models.
IDENTITY_TOLERANCE = 1e-4

Tensor = torch.Tensor
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DocumentMeasures:
    """What one forward pass says about one document in one checkpoint."""

    ratios: Floats  # [methods, layers, tokens]
    to_first: Floats  # [layers, tokens]: attention's weight on the first token, mean over heads
    identities: Doubles  # [levels, identities], from the embedding on; NaN for those that a level does not have
    counted: Mapping[str, npt.NDArray[np.floating]]
    """Of the counted tokens, by name; empty without any.

    `geometry`   [sites, measures]
    `unit_sums`  [sites, largest width]: sums of the vectors of norm 1, then zeros
    `steps`      [layers, steps, measures]: sums
    `controls`   [controls of `SAME_PASS`, methods, layers]: sums of their ratios
    `by_head`    [layers, heads]: sums of each head's ratio
    """


class BatchMeasurer:
    """One checkpoint's model, and what to read from its forward passes."""

    def __init__(self, base: PreTrainedModel, folder: Path, methods: Sequence[str], pad_token_id: int) -> None:
        self.base, self.folder, self.pad_token_id = base, folder, pad_token_id
        self.family = family_of(base.config)
        self.methods = self.family.present(methods)
        self.sites = list(widths(base))
        self.layers = sum(site.point == "layer_output" for site in self.sites)

    def ratios(self, documents: Sequence[Document]) -> Tensor:
        """Return only the mixing ratios `[layers, methods, batch, tokens]` of one padded batch."""
        points = (*RATIO_POINTS, *ratio_points(self.methods))
        return torch.stack(map_layers(self.layer_ratios, self.base, self.folder, self._batch(documents), points))

    def ratio_sums(self, documents: Sequence[Document]) -> Iterator[Doubles]:
        """Yield the sums `[methods, layers]` of the ratios over each document's counted tokens."""
        ratios_LMBT = self.ratios(documents)
        for place, document in enumerate(documents):
            yield ratios_LMBT[:, :, place, : document.counted].double().sum(-1).T.cpu().numpy()

    @cached_property
    def value_biases(self) -> list[Tensor]:
        """b_V of each layer `[E]`."""
        return map_layers(value_bias, self.base, self.folder, padded([[1]], self.pad_token_id, self.base.device))

    def measures(self, documents: Sequence[Document]) -> Iterator[DocumentMeasures]:
        """Yield everything for each document of one padded batch.

        `InputError` where the numbers are not to be trusted.
        """
        with torch.inference_mode():
            batch = self._batch(documents)
            work = _BatchWork(self, documents, batch)
            points = (*POINTS, PROJECTED, PREACTIVATION)
            output = run_layers(self.base, self.folder, batch, work.visit, points, output_hidden_states=True)
            work.compare(output)
            yield from work.results()

    def layer_ratios(self, layer_pass: LayerPass) -> Tensor:
        """Return the ratios `[methods, batch, tokens]` of one layer."""
        return torch.stack(list(mixing_ratios(self.methods, layer_pass).values()))

    def _batch(self, documents: Sequence[Document]) -> dict[str, Tensor]:
        return padded([document.ids.tolist() for document in documents], self.pad_token_id, self.base.device)


class _BatchWork:
    """What one batch has shown so far; each list has an entry for a layer."""

    def __init__(self, measurer: BatchMeasurer, documents: Sequence[Document], batch: dict[str, Tensor]) -> None:
        self.measurer, self.documents, self.batch = measurer, documents, batch
        self.mask_BT = batch["attention_mask"].bool()
        self.ratios: list[Tensor] = []
        self.to_first: list[Tensor] = []
        self.errors: list[Tensor] = []  # from the embedding on
        self.outputs: list[Tensor] = []
        self.counted = {place: _CountedWork(each, measurer) for place, each in enumerate(documents) if each.counted}
        # Asked for here, as it takes a forward pass of its own.
        self.value_biases = measurer.value_biases if self.counted else []

    def visit(self, layer_pass: LayerPass, features: Mapping[Site, Tensor]) -> None:
        """Read one layer."""
        if layer_pass.number == 1:
            self._check_identities(0, self._embedding_errors(features))
        self.ratios.append(self.measurer.layer_ratios(layer_pass))
        self.to_first.append(layer_pass.attention.to_first().mean(-1))
        self._check_finite(layer_pass.number, self.ratios[-1])
        self._check_identities(layer_pass.number, identity_errors(layer_pass, self.mask_BT))
        self.outputs.append(layer_pass.features["layer_output"])
        if not self.counted:
            return
        factors_HdR = head_factors(layer_pass.block, layer_pass.attention.value.shape[1])
        bias_E, diagonal_BTH = self.value_biases[layer_pass.number - 1], layer_pass.attention.diagonal()
        unbiased_BTE, row_sums_BTH = attended_without_bias(layer_pass.attention, bias_E)
        for place, work in self.counted.items():
            document, tokens = self.documents[place], np.s_[place, : self.documents[place].counted]
            part = layer_pass.document(place).cut(document.counted)
            work.add_geometry(part, {site: feature[tokens] for site, feature in features.items()})
            work.steps.append(step_measures(part).double().sum(0))
            work.by_head.append(head_ratios(part, factors_HdR).double().sum(0))
            attention = (diagonal_BTH[tokens], row_sums_BTH[tokens], part.value[: len(document)])
            sources = Sources(part.block.output.W, *attention, bias_E, unbiased_BTE[tokens])
            ratios = control_ratios(self.measurer.methods, part, sources)
            work.controls.append(torch.stack([torch.stack(each) for each in ratios]).double().sum(-1))

    def compare(self, output: Any) -> None:
        """Compare each layer's output with the library's record, in which the last one is after the final norm."""
        if len(self.measurer.family.stacks) > 1:
            recorded = [*output.encoder_hidden_states[1:], *output.decoder_hidden_states[1:]]
        else:
            recorded = list(output.hidden_states[1:])
        outputs = self.outputs
        for norm in optional_modules(self.measurer.base, filter(None, [self.measurer.family.final_norm])):
            outputs = [*outputs[:-1], norm(outputs[-1])]
        column = list(IDENTITIES).index("hidden_states")
        for layer, (computed, true) in enumerate(zip(outputs, recorded, strict=True), start=1):
            self.errors[layer][:, column] = vector_errors(computed, true, self.mask_BT)
            self._check(layer, "hidden_states", self.errors[layer][:, column])

    def results(self) -> Iterator[DocumentMeasures]:
        """Yield the measures document by document."""
        ratios_MBLT = torch.stack(self.ratios, dim=2).cpu().numpy()
        to_first_BLT = torch.stack(self.to_first, dim=1).cpu().numpy()
        errors_BLI = torch.stack(self.errors, dim=1).double().cpu().numpy()
        for place, document in enumerate(self.documents):
            yield DocumentMeasures(
                np.ascontiguousarray(ratios_MBLT[:, place, :, : len(document)]),
                np.ascontiguousarray(to_first_BLT[place, :, : len(document)]),
                errors_BLI[place],
                self.counted[place].results() if place in self.counted else {},
            )

    def _embedding_errors(self, features: Mapping[Site, Tensor]) -> Tensor:
        words: Tensor = self.measurer.base.get_input_embeddings()(self.batch["input_ids"])
        errors = words.new_full((len(words), len(IDENTITIES)), torch.nan)
        names = list(IDENTITIES)
        captured = features.get(Site(0, "word_embedding"), words.new_empty(0))
        errors[:, names.index("word_embedding")] = vector_errors(captured, words, self.mask_BT)
        summed, true = (features.get(Site(0, point)) for point in ("embedding_sum", "embedding_output"))
        if summed is not None and true is not None:
            for module in optional_modules(self.measurer.base, self.measurer.family.stacks[0].embedding):
                summed = module(summed)
            errors[:, names.index("embedding_output")] = vector_errors(summed, true, self.mask_BT)
        return errors

    def _check_identities(self, layer: int, errors_BI: Tensor) -> None:
        self.errors.append(errors_BI)
        for name, errors_B in zip(IDENTITIES, errors_BI.T, strict=True):
            self._check(layer, name, errors_B)

    def _check(self, layer: int, identity: str, errors_B: Tensor) -> None:
        worst = int(errors_B.nan_to_num(nan=-1).argmax())
        if float(errors_B[worst]) > IDENTITY_TOLERANCE:
            raise InputError(
                f"{self.measurer.folder}: {identity} of layer {layer} is not what its name says in "
                f"{self.documents[worst].name} ({IDENTITIES[identity]}): relative error {float(errors_B[worst]):.3g}, "
                f"at most {IDENTITY_TOLERANCE:g} is rounding; the entry of {self.measurer.family.model_type} in "
                "attnmix/models/families.yaml does not hold for this model"
            )

    def _check_finite(self, layer: int, ratio_MBT: Tensor) -> None:
        broken = (~torch.isfinite(ratio_MBT) & self.mask_BT).any(0).any(-1)
        if broken.any():
            name = self.documents[int(broken.nonzero()[0])].name
            raise InputError(
                f"{self.measurer.folder}: layer {layer} of {name} holds NaN or infinite values; the weights are broken"
            )


class _CountedWork:
    """What one document in the statistics has shown so far; each list has an entry for a layer."""

    def __init__(self, document: Document, measurer: BatchMeasurer) -> None:
        self.document, self.sites, self.first_stack = document, measurer.sites, measurer.family.stacks[0]
        self.geometry: dict[Site, Tensor] = {}
        self.unit_sums: dict[Site, Tensor] = {}
        self.steps: list[Tensor] = []
        self.controls: list[Tensor] = []
        self.by_head: list[Tensor] = []
        self.words: Words | None = None
        self.layer_input: Cloud | None = None  # what left the layer before

    def add_geometry(self, layer_pass: LayerPass, features: Mapping[Site, Tensor]) -> None:
        """Add this layer's sites, and those before it that no layer has: the embedding's."""
        words_TD = features[Site(0, "word_embedding")]
        if self.words is None:
            ids = self.document.ids[: len(words_TD)]
            positions = (ids, np.unique(ids, return_index=True)[1])
            self.words = words_of(words_TD, *(torch.as_tensor(each, device=words_TD.device) for each in positions))
        embedded = Cloud(words_TD)
        start = self.layer_input
        if start is None or not torch.equal(start.given_TD, layer_pass.x):  # its products are known otherwise
            start = Cloud(layer_pass.x)
        for site in self.sites:
            if site in features and site not in self.geometry:
                comparable = layer_pass.call.stack == self.first_stack and features[site].shape == words_TD.shape
                cloud = embedded if site.point == "word_embedding" else Cloud(features[site])
                enters = start if site.layer == layer_pass.number else embedded
                self.geometry[site] = geometry(cloud, enters, self.words if comparable else None)
                self.unit_sums[site] = cloud.unit_sum_D
                if site == Site(layer_pass.number, "layer_output"):
                    self.layer_input = cloud

    def results(self) -> dict[str, Any]:
        """Return `DocumentMeasures.counted`."""
        unit_sums = [self.unit_sums[site] for site in self.sites]
        arrays = {
            "geometry": torch.stack([self.geometry[site] for site in self.sites]),
            "unit_sums": pad_sequence(unit_sums, batch_first=True).float(),
            "steps": torch.stack(self.steps),
            "controls": torch.stack(self.controls, dim=-1),
            "by_head": pad_sequence(self.by_head, batch_first=True, padding_value=torch.nan),  # fewer in some layers
        }
        return {name: tensor.cpu().numpy() for name, tensor in arrays.items()}
