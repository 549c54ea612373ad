"""Measures of a batch of documents: one padded forward pass, then everything that its tensors say, layer by layer.

Each layer is read in blocks of documents (`document_blocks`). What is read stays on the model's device until the pass
is over, and comes to the host then, of all layers together.

Shapes: B documents, L layers, X sites, H heads, T tokens, M methods, C controls, E = heads * head width, D hidden,
I identities, S groups of sources.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from attnmix.core.arithmetic.kernels import task_threads
from attnmix.core.errors import InputError
from attnmix.core.names import POINTS, PREACTIVATION, Site
from attnmix.measures.controls import SAME_PASS, ControlValues, CorpusValues, control_ratios
from attnmix.measures.document_blocks import DocumentBlock, document_blocks
from attnmix.measures.documents import CLASSES, POSITIONS, Document, position_groups
from attnmix.measures.geometry import RANK, Cloud, Words, effective_ranks, geometry_but_rank, step_measures
from attnmix.measures.heads import head_factors, head_ratios
from attnmix.measures.identities import IDENTITIES, embedding_errors, identity_errors, vector_errors
from attnmix.measures.layers import RATIO_POINTS, LayerPass, checkpoint_name, map_layers, run_layers
from attnmix.measures.ratios import Parts, all_parts, formulas, mixing_ratios, ratio_points
from attnmix.measures.sinks import sink_measures
from attnmix.measures.text_pairs import PAIR_SOURCES, source_ratios
from attnmix.models.capture_points import widths
from attnmix.models.encoding import padded
from attnmix.models.families import PROJECTED, Stack, family_of, optional_modules

WORDS = Site(0, "word_embedding")
# Relative error of float32 in the identities: measured at 1e-6 in real models.
IDENTITY_TOLERANCE = 1e-4
GROUPS = {"token_class": CLASSES, "position": POSITIONS}
"""Groups of tokens by grouping."""
# Lengths in tokens are split where they double.
LENGTH_ENDS = tuple(2**power for power in range(5, 21))
LENGTHS = ("1-32", *(f"{end + 1}-{2 * end}" for end in LENGTH_ENDS[:-1]))


@dataclass(frozen=True)
class DocumentMeasures:
    """The measures of one document in one checkpoint, by one forward pass."""

    document: Document
    ratios: npt.NDArray[np.float32]  # [methods, layers, tokens]
    to_first: npt.NDArray[np.float32]  # [layers, tokens]: attention's weight on the first token, mean over heads
    identities: npt.NDArray[np.float64]  # [levels, identities], from the embedding on; NaN where one was not checked
    counted: Mapping[str, npt.NDArray[np.floating]]
    """Arrays by name, for a document in the statistics; all but `geometry` and `sinks` are sums over its tokens.

    `geometry`   [sites, measures]
    `sinks`      [layers, measures]
    `unit_sums`  [sites, largest width]: vectors of norm 1, then zeros
    `steps`      [layers, steps, measures]
    `by_head`    [heads, layers]: each head's ratio
    `others`     [layers, D]: what other tokens give by attention, sum_{j!=i} F_ij
    `lengths`    [layers, 3]: its squared length, its length, and that of the token's own part with the skip connection
    and for each control of `SAME_PASS` [layers, methods]: its ratios; in pairs of texts for each of `PAIR_SOURCES` too
    """

    def sums(self) -> dict[str, npt.NDArray[Any]]:
        """Return `counted` and further sums over the tokens by name, of one size however long the document is.

        `token_class` and `position`   of the ratios `[groups, layers, methods]`
        `to_first`   of attention's weight on the first token `[layers]`, of all tokens but that
        `<name>_counts` holds the number of tokens of each, in a shape that broadcasts to the sums; 0 of `corpus_value`
        where a token has none. `label` and `predicted` are the review's.
        """
        tokens = len(self.document)
        positions_T = position_groups(tokens)
        sums: dict[str, Any] = {**self.counted, "to_first": self.to_first[:, 1:].sum(-1, dtype=np.float64)}
        counts: dict[str, Any] = dict.fromkeys(sums, tokens) | {"to_first": tokens - 1}
        if self.document.segments is not None:
            counts |= dict.fromkeys(PAIR_SOURCES, int((self.document.segments >= 0).sum()))
        for name in ("geometry", "sinks"):
            sums[name], counts[name] = np.nan_to_num(sums[name]), ~np.isnan(sums[name])
        if np.isnan(sums["corpus_value"]).any():
            sums["corpus_value"], counts["corpus_value"] = np.zeros_like(sums["corpus_value"]), 0
        for grouping, numbers_T in (("token_class", self.document.classes), ("position", positions_T)):
            membership_TG = np.eye(len(GROUPS[grouping]))[numbers_T]
            sums[grouping] = np.einsum("mlt,tg->glm", self.ratios.astype(np.float64), membership_TG)
            counts[grouping] = membership_TG.sum(0)[:, None, None]
        for name, count in counts.items():
            sums[f"{name}_counts"] = np.array(count, dtype=np.float64, ndmin=sums[name].ndim)
        return sums | {"label": np.array(self.document.label), "predicted": np.array(self.document.predicted)}


def length_class(tokens: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return the positions in `LENGTHS` of texts with these numbers of tokens."""
    return np.searchsorted(LENGTH_ENDS, np.asarray(tokens), side="left")


class LayerConstants(NamedTuple):
    """Arrays that are the same for every text in one layer."""

    value_bias_E: Tensor  # b_V
    head_factors_HdR: Tensor  # of `head_factors`


class BatchMeasurer:
    """One checkpoint's model, and what to read from its forward passes."""

    def __init__(self, base: PreTrainedModel, methods: Sequence[str], pad_token_id: int) -> None:
        self.base, self.pad_token_id = base, pad_token_id
        self.family = family_of(base.config)
        self.methods = self.family.present(methods)
        self.sites = list(widths(base))
        self.corpus: CorpusValues | None = None
        """The values of the control `corpus_value`, which is NaN without them."""

    def read_corpus(self, batches: Iterable[Sequence[Document]]) -> None:
        """Read `corpus` from documents, of which no more than a sample is needed."""
        self.corpus = CorpusValues.read(self.base, batches, self.pad_token_id)

    def ratios(self, documents: Sequence[Document]) -> Tensor:
        """Return only the mixing ratios `[layers, methods, batch, tokens]` of one padded batch."""
        ratios, points = partial(mixing_ratios, self.methods), (*RATIO_POINTS, *ratio_points(self.methods))
        return torch.stack(map_layers(ratios, self.base, self.batch(documents), points))

    def control_sums(self, name: str, documents: Sequence[Document]) -> list[dict[str, npt.NDArray[Any]]]:
        """Return what `DocumentMeasures.sums` would hold of a control that is a forward pass of other `documents`."""
        batch = DocumentBlock(documents, slice(None), self.base.device)
        sums_BLM = batch.sums(self.ratios(documents).permute(2, 3, 0, 1)).cpu().numpy()
        counts = [np.full((1, 1), float(length)) for length in batch.lengths]
        return [{name: sums, f"{name}_counts": count} for sums, count in zip(sums_BLM, counts, strict=True)]

    @cached_property
    def layer_constants(self) -> list[LayerConstants]:
        """The constants of each layer, from a forward pass of one token."""

        def constants(layer_pass: LayerPass) -> LayerConstants:
            factors = head_factors(layer_pass.block, layer_pass.attention.value.shape[-3])
            return LayerConstants(layer_pass.value_bias, factors)

        return map_layers(constants, self.base, padded([[1]], self.pad_token_id, self.base.device))

    def measures(self, documents: Sequence[Document], sampled: Sequence[bool] | None = None) -> list[DocumentMeasures]:
        """Return everything for each document of one padded batch; of those `sampled`, all identities are checked.

        `InputError` where the numbers are not to be trusted.
        """
        with torch.inference_mode():
            work = _BatchPass(self, documents, sampled)
            points = (*POINTS, PROJECTED, PREACTIVATION)
            output = run_layers(self.base, work.inputs, work.visit, points, output_hidden_states=True)
            return work.results(output)

    def batch(self, documents: Sequence[Document]) -> dict[str, Tensor]:
        """Return the model's input."""
        return padded([document.ids.tolist() for document in documents], self.pad_token_id, self.base.device)


class SiteMeasures(NamedTuple):
    """The geometry of a block of documents at some sites."""

    sites: list[Site]
    measures_BXm: Tensor  # `GEOMETRY_MEASURES`, NaN for effective ranks
    ranks_BX: Future[Tensor]
    unit_sums_BXD: Tensor  # sums of vectors of norm 1


class BlockMeasures(NamedTuple):
    """Measures of a block of documents in one layer."""

    ratios_BMT: Tensor
    to_first_BT: Tensor
    errors_BI: Tensor
    broken_B: Tensor  # True where a ratio is no number
    counted: dict[str, Tensor]  # a layer's part of `DocumentMeasures.counted` by name, [B, ...]
    sites: list[SiteMeasures]


class _BatchPass:
    """One forward pass of a batch, read layer by layer."""

    def __init__(self, measurer: BatchMeasurer, documents: Sequence[Document], sampled: Sequence[bool] | None) -> None:
        self.measurer, self.documents = measurer, documents
        self.sampled = [True] * len(documents) if sampled is None else list(sampled)
        self.inputs = measurer.batch(documents)
        self.mask_BT = self.inputs["attention_mask"].bool()
        self.blocks = document_blocks(documents, measurer.base.device)
        self.layers: list[list[BlockMeasures]] = []  # by layer and block
        self.outputs: list[Tensor] = []  # by layer
        self.unread_sites = measurer.sites
        self.words: list[Words] = []  # by block
        self.in_statistics = any(document.measured for document in documents)
        # Asked for here, as they take a forward pass of their own.
        self.constants = measurer.layer_constants if self.in_statistics else []

    def visit(self, layer_pass: LayerPass, features: Mapping[Site, Tensor]) -> None:
        """Read one layer."""
        if not self.layers:
            self._begin(layer_pass.call.stack, features)
        self.outputs.append(layer_pass.features["layer_output"])
        new_sites = [site for site in self.unread_sites if site in features]
        self.unread_sites = [site for site in self.unread_sites if site not in features]

        def measure(number: int) -> BlockMeasures:
            return self._block_measures(number, layer_pass, features, new_sites)

        numbers = range(len(self.blocks))
        threads = task_threads(self.measurer.base.device)
        if threads is None or len(numbers) < 2:  # a single one's products take all cores in this thread
            self.layers.append([measure(number) for number in numbers])
        else:
            self.layers.append(list(threads.map(measure, numbers)))

    @torch.inference_mode()  # which each thread chooses for itself
    def _block_measures(
        self, number: int, layer_pass: LayerPass, features: Mapping[Site, Tensor], new_sites: Sequence[Site]
    ) -> BlockMeasures:
        """Return the measures of the block with this number in one layer, and the geometry of `new_sites`."""
        block = self.blocks[number]
        without_padding = layer_pass.documents(block.places, block.tokens)
        parts = all_parts(without_padding)
        ratios_MBT = formulas(self.measurer.methods, parts).unflatten(-1, block.mask_BT.shape)
        broken_B = (~ratios_MBT.isfinite() & block.mask_BT).any(0).any(-1)
        to_first_BT = without_padding.attention.to_first().mean(-1)
        # Scores are rounded as in the forward pass only where the padding is the same.
        with_padding = layer_pass.documents(block.places)
        errors_BI = identity_errors(with_padding, self.mask_BT[block.places], self.sampled[block.places])
        counted: dict[str, Tensor] = {}
        sites: list[SiteMeasures] = []
        if self.in_statistics:
            counted = self._counted(block, without_padding, parts)
            vectors = {site: block.part(features[site]) for site in new_sites}
            words_BTD = block.part(features[WORDS])
            sites = self._sites(block, without_padding, vectors, words_BTD, self.words[number])
        return BlockMeasures(ratios_MBT.transpose(0, 1), to_first_BT, errors_BI, broken_B, counted, sites)

    def _begin(self, stack: Stack, features: Mapping[Site, Tensor]) -> None:
        """Read what there is before the first layer."""
        base, ids_BT = self.measurer.base, self.inputs["input_ids"]
        self.embedding_errors_BI = embedding_errors(base, ids_BT, features, self.mask_BT)
        if WORDS not in features:  # the entry of the family names a module that runs later
            self._check_errors(0, self.embedding_errors_BI.double().cpu().numpy())
        self.first_stack = stack
        if self.in_statistics:
            self.words = [Words(block.part(features[WORDS]), block.ids_BT) for block in self.blocks]

    def _counted(self, block: DocumentBlock, part: LayerPass, parts: Parts) -> dict[str, Tensor]:
        """Return what the statistics take of a block of documents in one layer: sums over its tokens, by name."""
        methods, constants = self.measurer.methods, self.constants[part.call.number - 1]
        shape = block.mask_BT.shape
        shifted = part.call.stack != self.measurer.family.stacks[0]
        means_B1E, special_SB = block.means(part.value), block.special_positions(shifted)
        values = ControlValues(constants.value_bias_E, self._corpus_values(block, part), means_B1E, special_SB)
        controls_CMBT = control_ratios(methods, part, parts, values)
        others_BTD = parts.attention.others.double().unflatten(0, shape)
        own_BTD = parts.residual.own.double().unflatten(0, shape)
        lengths = [others_BTD.square().sum(-1), others_BTD.norm(dim=-1), own_BTD.norm(dim=-1)]
        by_name = {
            "others": block.sums(others_BTD),
            "lengths": block.sums(torch.stack(lengths, -1)),
            "steps": block.sums(step_measures(part)),
            "by_head": block.sums(head_ratios(part, constants.head_factors_HdR)),
            "sinks": sink_measures(part, block.mask_BT),
        }
        by_name |= zip(SAME_PASS, block.sums(controls_CMBT.permute(2, 3, 0, 1)).unbind(1), strict=True)
        segments_BT = block.segments(shifted)
        if segments_BT is not None:
            sources_SMBT = source_ratios(methods, part, parts, segments_BT)
            in_text_BT = (segments_BT == 0) | (segments_BT == 1)
            sums_BSM = block.sums(sources_SMBT.masked_fill(~in_text_BT, 0).permute(2, 3, 0, 1))
            by_name |= zip(PAIR_SOURCES, sums_BSM.unbind(1), strict=True)
        return by_name

    def _corpus_values(self, block: DocumentBlock, part: LayerPass) -> Tensor:
        """Return the values of the control `corpus_value`, as the layer's own `[B, T, E]`; NaN without a corpus."""
        if self.measurer.corpus is None:
            return torch.full_like(part.value, torch.nan)
        return self.measurer.corpus.mean_over_others(part.call.number, block, part.value)

    def _sites(
        self, block: DocumentBlock, part: LayerPass, vectors: Mapping[Site, Tensor], words_BTD: Tensor, words: Words
    ) -> list[SiteMeasures]:
        """Return the geometry of some sites' `vectors`, of those alike in one computation."""
        alike: dict[tuple[bool, torch.Size], list[Site]] = {}
        for site, vectors_BTD in vectors.items():
            alike.setdefault((site.layer == part.call.number, vectors_BTD.shape), []).append(site)
        mask_B1T, read = block.mask_BT.unsqueeze(1), []
        for (in_layer, shape), sites in alike.items():
            comparable = part.call.stack == self.first_stack and shape == words_BTD.shape
            cloud = Cloud(torch.stack([vectors[site] for site in sites], 1), mask_B1T)
            start = Cloud((part.x if in_layer else words_BTD).unsqueeze(1), mask_B1T)
            measures = geometry_but_rank(cloud, start, words if comparable else None)
            read.append(SiteMeasures(sites, measures, effective_ranks(cloud, block.lengths), cloud.unit_sum_D))
        return read

    def results(self, output: Any) -> list[DocumentMeasures]:
        """Return the measures of each document; `output` is the model's."""
        errors_BLI = self._errors(output)
        ratios_BMLT = self._joined(lambda block: self._padded(block.ratios_BMT), 2)
        to_first_BLT = self._joined(lambda block: self._padded(block.to_first_BT), 1)
        counted = self._counted_arrays() | self._site_arrays() if self.in_statistics else {}
        measures = []
        for place, document in enumerate(self.documents):
            tokens = np.s_[place, ..., : len(document)]
            own_counted = {name: array[place] for name, array in counted.items()} if document.measured else {}
            arrays = (ratios_BMLT[tokens], to_first_BLT[tokens], errors_BLI[place])
            measures.append(DocumentMeasures(document, *arrays, own_counted))
        return measures

    def _counted_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return what the statistics take of all layers, but for their sites: `[B, ...]` by name."""
        by_head = [torch.cat([block.counted["by_head"] for block in layer]).T for layer in self.layers]
        by_head_LHB = pad_sequence(by_head, batch_first=True, padding_value=torch.nan)  # some stacks have fewer heads
        names = [name for name in self.layers[0][0].counted if name != "by_head"]
        arrays = {name: self._joined(lambda block, name=name: block.counted[name], 1) for name in names}  # type: ignore[misc]
        return arrays | {"by_head": by_head_LHB.permute(2, 1, 0).cpu().numpy()}

    def _site_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the geometry of all sites, and sums of unit vectors, to whose width zeros are added."""
        groups = [group for layer in self.layers for group in zip(*(block.sites for block in layer), strict=True)]
        sites = [site for blocks in groups for site in blocks[0].sites]
        order = [sites.index(site) for site in self.measurer.sites]
        measures_BXm = torch.cat([torch.cat([each.measures_BXm for each in blocks]) for blocks in groups], 1).cpu()
        ranks_BX = torch.cat([torch.cat([each.ranks_BX.result() for each in blocks]) for blocks in groups], 1)
        measures_BXm[..., RANK] = ranks_BX
        sums = [torch.cat([each.unit_sums_BXD for each in blocks]) for blocks in groups]
        width = max(each.shape[-1] for each in sums)
        sums_BXD = torch.cat([pad(each, (0, width - each.shape[-1])) for each in sums], 1).float().cpu()
        return {"geometry": measures_BXm[:, order].numpy(), "unit_sums": sums_BXD[:, order].numpy()}

    def _errors(self, output: Any) -> npt.NDArray[np.float64]:
        """Return the errors of all levels `[B, levels, I]`; `InputError` where a number is not to be trusted."""
        hidden_states = list(IDENTITIES).index("hidden_states")
        levels = [self.embedding_errors_BI]
        for layer, error_B in zip(self.layers, self._state_errors(output), strict=True):
            levels.append(torch.cat([block.errors_BI for block in layer]))
            levels[-1][:, hidden_states] = error_B
        errors_BLI = torch.stack(levels, 1).double().cpu().numpy()
        broken_BL = self._joined(lambda block: block.broken_B, 1)
        self._check_errors(0, errors_BLI[:, 0])
        for number in range(1, len(levels)):
            broken_B = broken_BL[:, number - 1]
            if broken_B.any():
                place = f"layer {number} of {self.documents[int(broken_B.argmax())].name}"
                name = checkpoint_name(self.measurer.base)
                raise InputError(f"{name}: {place} holds NaN or infinite values; the weights are broken")
            self._check_errors(number, errors_BLI[:, number])
        return errors_BLI

    def _state_errors(self, output: Any) -> list[Tensor]:
        """Compare each layer's output with the library's record, in which the last one is after the final norm."""
        if len(self.measurer.family.stacks) > 1:
            recorded = [output.encoder_hidden_states[1:], output.decoder_hidden_states[1:]]
        else:
            recorded = [output.hidden_states[1:]]
        last = -1
        for stack, states in zip(self.measurer.family.stacks, recorded, strict=True):
            last += len(states)
            for norm in optional_modules(self.measurer.base, filter(None, [stack.final_norm])):
                self.outputs[last] = norm(self.outputs[last])
        compared = zip(self.outputs, chain(*recorded), strict=True)
        return [vector_errors(computed, true, self.mask_BT) for computed, true in compared]

    def _check_errors(self, layer: int, errors_BI: npt.NDArray[np.float64]) -> None:
        """Raise `InputError` where an error is above the tolerance."""
        for (identity, meaning), errors_B in zip(IDENTITIES.items(), errors_BI.T, strict=True):
            worst = int(np.nan_to_num(errors_B, nan=-1, posinf=np.inf).argmax())
            error = errors_B[worst]
            if error > IDENTITY_TOLERANCE:
                raise InputError(
                    f"{checkpoint_name(self.measurer.base)}: the identity {identity} fails in layer {layer} of "
                    f"{self.documents[worst].name} ({meaning}): relative error {error:.3g}, "
                    f"at most {IDENTITY_TOLERANCE:g} is rounding; the entry of {self.measurer.family.model_type} in "
                    "attnmix/models/families.yaml does not hold for this model"
                )

    def _padded(self, values: Tensor) -> Tensor:
        """Return values of a block's tokens, the last axis, with zeros up to the longest document of the batch."""
        return pad(values, (0, self.mask_BT.shape[-1] - values.shape[-1]))

    def _joined(self, part: Callable[[BlockMeasures], Tensor], axis: int) -> npt.NDArray[Any]:
        """Return a part of what was read, on the host: the documents of all blocks, with the layers at an axis."""
        by_layer = [torch.cat([part(block) for block in layer]) for layer in self.layers]
        return np.asarray(torch.stack(by_layer, axis).cpu().numpy())
