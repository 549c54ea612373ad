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
from attnmix.measures.geometry import Cloud, Words, geometry, words_of
from attnmix.measures.heads import head_factors, head_ratios
from attnmix.measures.identities import IDENTITIES, identity_errors, vector_errors
from attnmix.measures.layers import RATIO_POINTS, LayerPass, run_layers, value_bias
from attnmix.measures.ratios import mixing_ratios, ratio_points
from attnmix.measures.steps import step_measures
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
    geometry: Doubles  # [sites, measures], over the counted tokens; empty for a document that does not count
    unit_sums: Floats  # [sites, largest width]: the counted tokens' vectors of norm 1 added up, then zeros; or empty
    steps: Doubles  # [layers, steps, measures]: sums over the counted tokens; empty likewise
    controls: Doubles  # [controls of `SAME_PASS`, methods, layers]: sums of their ratios likewise
    by_head: Doubles  # [layers, heads]: sums of each head's ratio over the counted tokens; empty likewise


class BatchMeasurer:
    """One checkpoint's model, and what to read from its forward passes."""

    def __init__(self, base: PreTrainedModel, folder: Path, methods: Sequence[str], pad_token_id: int) -> None:
        self.base, self.folder, self.pad_token_id = base, folder, pad_token_id
        self.family = family_of(base.config)
        self.methods = self.family.present(methods)
        self.sites = list(widths(base))
        self.layers = sum(site.point == "layer_output" for site in self.sites)

    def ratios(self, documents: Sequence[Document]) -> Tensor:
        """Only the mixing ratios `[layers, methods, batch, tokens]` of one padded batch."""
        ratios: list[Tensor] = []

        def visit(seen: LayerPass, _features: Mapping[Site, Tensor]) -> None:
            ratios.append(self.of_layer(seen))

        with torch.inference_mode():
            points = (*RATIO_POINTS, *ratio_points(self.methods))
            run_layers(self.base, self.folder, self._batch(documents), visit, points)
            return torch.stack(ratios)

    def ratio_sums(self, documents: Sequence[Document]) -> Iterator[Doubles]:
        """The sums `[methods, layers]` of the ratios over each document's counted tokens."""
        ratios_LMBT = self.ratios(documents)
        for place, document in enumerate(documents):
            yield ratios_LMBT[:, :, place, : document.counted].double().sum(-1).T.cpu().numpy()

    @cached_property
    def value_biases(self) -> list[Tensor]:
        """b_V of each layer `[E]`."""
        biases: list[Tensor] = []

        def visit(seen: LayerPass, _features: Mapping[Site, Tensor]) -> None:
            biases.append(value_bias(seen))

        ids = torch.ones(1, 1, dtype=torch.long, device=self.base.device)
        with torch.inference_mode():
            run_layers(self.base, self.folder, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, visit)
        return biases

    def measures(self, documents: Sequence[Document]) -> Iterator[DocumentMeasures]:
        """Everything for each document of one padded batch; `InputError` where the numbers are not to be trusted."""
        with torch.inference_mode():
            batch = self._batch(documents)
            work = _BatchWork(self, documents, batch)
            points = (*POINTS, PROJECTED, PREACTIVATION)
            output = run_layers(self.base, self.folder, batch, work.visit, points, output_hidden_states=True)
            work.compare(output)
            yield from work.results()

    def _batch(self, documents: Sequence[Document]) -> dict[str, Tensor]:
        return padded([document.ids.tolist() for document in documents], self.pad_token_id, self.base.device)

    def of_layer(self, seen: LayerPass) -> Tensor:
        """The ratios `[methods, batch, tokens]` of one layer."""
        return torch.stack(list(mixing_ratios(self.methods, seen).values()))


class _BatchWork:
    """What has been read from one batch so far, layer by layer; each list has an entry for a layer."""

    def __init__(self, measurer: BatchMeasurer, documents: Sequence[Document], batch: dict[str, Tensor]) -> None:
        self.measurer, self.documents, self.batch = measurer, documents, batch
        self.mask_BT = batch["attention_mask"].bool()
        self.ratios: list[Tensor] = []
        self.to_first: list[Tensor] = []
        self.errors: list[Tensor] = []  # from the embedding on
        self.outputs: list[Tensor] = []
        self.geometry: list[dict[Site, tuple[Tensor, Tensor]]] = [{} for _ in documents]
        self.words: list[Words | None] = [None for _ in documents]
        self.before: list[Cloud | None] = [None for _ in documents]  # what left the layer before
        self.steps: list[list[Tensor]] = [[] for _ in documents]
        self.controls: list[list[Tensor]] = [[] for _ in documents]
        # Asked for here, as it takes a forward pass of its own.
        self.value_biases = measurer.value_biases if any(document.counted for document in documents) else []
        self.by_head: list[list[Tensor]] = [[] for _ in documents]

    def visit(self, seen: LayerPass, features: Mapping[Site, Tensor]) -> None:
        if seen.number == 1:
            self._prove(0, self._embedding_errors(features))
        self.ratios.append(self.measurer.of_layer(seen))
        self.to_first.append(seen.attention.to_first().mean(-1))
        self._check_finite(seen.number, self.ratios[-1])
        self._prove(seen.number, identity_errors(seen, self.mask_BT))
        self.outputs.append(seen.features["layer_output"])
        factors_HdR = head_factors(seen.block, seen.attention.value.shape[1])
        for place, document in enumerate(self.documents):
            if document.counted:
                counted = np.s_[place, : document.counted]
                own = seen.document(place).cut(document.counted)
                self._add_geometry(place, own, {site: feature[counted] for site, feature in features.items()})
                self.steps[place].append(step_measures(own).double().sum(0))
                self.by_head[place].append(head_ratios(own, factors_HdR).double().sum(0))
        if self.value_biases:
            self._add_controls(seen, self.value_biases[seen.number - 1])

    def compare(self, output: Any) -> None:
        """What left each layer with the library's own record; the last one is there after the model's final norm."""
        if len(self.measurer.family.stacks) > 1:
            recorded = [*output.encoder_hidden_states[1:], *output.decoder_hidden_states[1:]]
        else:
            recorded = list(output.hidden_states[1:])
        outputs = self.outputs
        for norm in optional_modules(self.measurer.base, filter(None, [self.measurer.family.final_norm])):
            outputs = [*outputs[:-1], norm(outputs[-1])]
        place = list(IDENTITIES).index("hidden_states")
        for layer, (found, true) in enumerate(zip(outputs, recorded, strict=True), start=1):
            errors_B = vector_errors(found, true, self.mask_BT)
            self.errors[layer][:, place] = errors_B
            self._check(layer, "hidden_states", errors_B)

    def results(self) -> Iterator[DocumentMeasures]:
        """Document by document."""
        ratios_MBLT = torch.stack(self.ratios, dim=2).cpu().numpy()
        to_first_BLT = torch.stack(self.to_first, dim=1).cpu().numpy()
        errors_BLI = torch.stack(self.errors, dim=1).double().cpu().numpy()
        for place, document in enumerate(self.documents):
            tokens = len(document)
            yield DocumentMeasures(
                np.ascontiguousarray(ratios_MBLT[:, place, :, :tokens]),
                np.ascontiguousarray(to_first_BLT[place, :, :tokens]),
                errors_BLI[place],
                **self._of_counted(place),
            )

    def _embedding_errors(self, features: Mapping[Site, Tensor]) -> Tensor:
        words: Tensor = self.measurer.base.get_input_embeddings()(self.batch["input_ids"])
        errors = words.new_full((len(words), len(IDENTITIES)), torch.nan)
        names = list(IDENTITIES)
        found = features.get(Site(0, "word_embedding"), words.new_empty(0))
        errors[:, names.index("word_embedding")] = vector_errors(found, words, self.mask_BT)
        summed, true = (features.get(Site(0, point)) for point in ("embedding_sum", "embedding_output"))
        if summed is not None and true is not None:
            for module in optional_modules(self.measurer.base, self.measurer.family.stacks[0].embedding):
                summed = module(summed)
            errors[:, names.index("embedding_output")] = vector_errors(summed, true, self.mask_BT)
        return errors

    def _prove(self, layer: int, errors_BI: Tensor) -> None:
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

    def _add_geometry(self, place: int, seen: LayerPass, features: Mapping[Site, Tensor]) -> None:
        """Of this layer's sites, and of those before it that no layer has: the embedding's."""
        words = features[Site(0, "word_embedding")]
        own_words = seen.call.stack == self.measurer.family.stacks[0]  # a decoder's tokens are shifted
        embedded = Cloud(words) if seen.number == 1 else None
        start, last = self._cloud_of_input(place, seen.x), Site(seen.number, "layer_output")
        for site in self.measurer.sites:
            if site in features and site not in self.geometry[place]:
                near = self._words(place, words) if own_words and features[site].shape == words.shape else None
                cloud = embedded if site.point == "word_embedding" and embedded else Cloud(features[site])
                enters = start if site.layer == seen.number else embedded or Cloud(words)
                self.geometry[place][site] = geometry(cloud, enters, near), cloud.unit_sum_D
                if site == last:
                    self.before[place] = cloud

    def _add_controls(self, seen: LayerPass, bias_E: Tensor) -> None:
        diagonal_BTH = seen.attention.diagonal()
        unbiased_BTE, row_sums_BTH = attended_without_bias(seen.attention, bias_E)
        for place, document in enumerate(self.documents):
            if document.counted:
                own = seen.document(place).cut(document.counted)
                diagonal_NH, row_sums_NH, unbiased_NE = (
                    tensor[place, : document.counted] for tensor in (diagonal_BTH, row_sums_BTH, unbiased_BTE)
                )
                value_TE = own.value[: len(document)]
                sources = Sources(own.block.output.W, diagonal_NH, row_sums_NH, value_TE, bias_E, unbiased_NE)
                ratios = control_ratios(self.measurer.methods, own, sources)
                self.controls[place].append(torch.stack([torch.stack(each) for each in ratios]).double().sum(-1))

    def _cloud_of_input(self, place: int, x_TD: Tensor) -> Cloud:
        """With the products that were made where the same vectors left the layer before."""
        before = self.before[place]
        return before if before is not None and torch.equal(before.given_TD, x_TD) else Cloud(x_TD)

    def _words(self, place: int, words_TD: Tensor) -> Words:
        known = self.words[place]
        if known is None:
            ids = self.documents[place].ids[: len(words_TD)]
            positions = (ids, np.unique(ids, return_index=True)[1])
            known = words_of(words_TD, *(torch.as_tensor(each, device=words_TD.device) for each in positions))
            self.words[place] = known
        return known

    def _of_counted(self, place: int) -> dict[str, Any]:
        """The measures of counted tokens, by their field of `DocumentMeasures`."""
        if not self.steps[place]:
            axes = {"geometry": 2, "unit_sums": 2, "steps": 3, "controls": 3, "by_head": 2}
            return {name: np.zeros((0,) * number) for name, number in axes.items()}
        shapes, sums = zip(*(self.geometry[place][site] for site in self.measurer.sites), strict=True)
        found = {
            "geometry": torch.stack(shapes),
            "unit_sums": pad_sequence(list(sums), batch_first=True).float(),
            "steps": torch.stack(self.steps[place]),
            "controls": torch.stack(self.controls[place], dim=-1),
            "by_head": pad_sequence(self.by_head[place], batch_first=True, padding_value=torch.nan),  # fewer in some
        }
        return {name: tensor.cpu().numpy() for name, tensor in found.items()}
