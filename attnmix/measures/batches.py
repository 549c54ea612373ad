"""Measures of a batch of documents, computed layer by layer during one padded forward pass.

Each layer is processed in micro-batches. The measures of a micro-batch are computed in several tasks; `submit_task`
runs these tasks in parallel if this is faster. The measures of all layers stay on the model's device and are
transferred to the host together after the forward pass.

Shapes: B documents, L layers, X sites (layer and capture point), H heads, T tokens, M methods (mixing ratios), C
controls, E = heads * head width, D hidden, I identities, S groups of sources, m measures.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from attnmix.core.arithmetic.kernels import submit_task
from attnmix.core.errors import InputError
from attnmix.core.names import POINTS, PREACTIVATION, Site
from attnmix.core.statistics import Sums
from attnmix.measures.controls import SAME_PASS, AttendedValues, ControlValues, CorpusValues, control_ratios
from attnmix.measures.documents import CLASSES, POSITIONS, Document, position_groups
from attnmix.measures.geometry import RANK, Cloud, Words, effective_ranks, geometry_but_rank, step_measures
from attnmix.measures.heads import head_factors, head_ratios
from attnmix.measures.identities import IDENTITIES, embedding_errors, identity_errors, vector_errors
from attnmix.measures.layers import RATIO_POINTS, LayerPass, checkpoint_name, map_layers, run_layers
from attnmix.measures.micro_batches import MicroBatch, micro_batches
from attnmix.measures.ratios import LayerSplits, apply_formulas, mixing_ratios, ratio_points, split_layer
from attnmix.measures.sinks import sink_measures
from attnmix.measures.text_pairs import PAIR_SOURCES, source_ratios
from attnmix.models.capture_points import widths
from attnmix.models.encoding import padded
from attnmix.models.families import PROJECTED, Stack, family_of, optional_modules

WORDS = Site(0, "word_embedding")
# Maximum relative error of an identity. Rounding errors of float32 reach 1e-6 in pretrained models.
IDENTITY_TOLERANCE = 1e-4
GROUPS = {"token_class": CLASSES, "position": POSITIONS}
"""The names of the groups of tokens, for the grouping by token class and for the grouping by position."""
# Upper limits of the length classes of texts, in tokens.
LENGTH_ENDS = tuple(2**power for power in range(5, 21))
LENGTHS = ("1-32", *(f"{end + 1}-{2 * end}" for end in LENGTH_ENDS[:-1]))
STATISTICS = ("steps", "by_head", "sinks", "others", "lengths", *SAME_PASS, *PAIR_SOURCES, "geometry", "unit_sums")
"""Quantities that a forward pass can measure in addition to the ratios.

The quantities in `PAIR_SOURCES` require pairs of texts.
"""
RATIO_SUMS = (*(f"ratios_by_{grouping}" for grouping in GROUPS), "to_first")
"""Names of the sums that are computed for every document, regardless of the requested `STATISTICS`."""
DocumentSums = dict[str, Sums]
"""The sums of each quantity over the tokens of one document; `geometry` and `sinks` are values of the whole text."""


@dataclass(frozen=True)
class DocumentMeasures:
    """The measures of one document with one checkpoint, from one forward pass."""

    document: Document
    ratios: npt.NDArray[np.float32]  # [methods, layers, tokens]
    to_first: npt.NDArray[np.float32]  # [layers, tokens]: attention weight on the first token, mean over heads
    identities: npt.NDArray[np.float64]  # errors [1 + layers, identities], embeddings first; NaN if not checked
    statistics: Mapping[str, npt.NDArray[np.floating]]
    """The requested `STATISTICS`. Except for `geometry` and `sinks`, they are sums over the document's tokens.

    F_ij is the contribution of token j to the attention output of token i, and x_i is the layer's input at token i.

    `geometry`   [sites, measures]
    `sinks`      [layers, measures]
    `unit_sums`  [sites, largest width]: vectors scaled to norm 1, padded with zeros
    `steps`      [layers, steps, measures]
    `by_head`    [heads, layers]: the ratio of each head
    `others`     [layers, D]: the contributions of other tokens, sum_{j!=i} F_ij
    `lengths`    [layers, 3]: |sum_{j!=i} F_ij|^2, |sum_{j!=i} F_ij| and |F_ii + x_i|
    each control of `SAME_PASS` and, for pairs of texts, each of `PAIR_SOURCES`: sums of ratios [layers, methods]
    """

    def sums(self) -> DocumentSums:
        """Return the document's sums by name: ratios by group of tokens, `to_first`, and each of the `statistics`.

        The shapes of the sums do not depend on the text length.
        """
        sums = ratio_sums(self.document, self.ratios)
        # The first token is excluded: all its attention to the first token is attention to itself.
        to_first_L = self.to_first[:, 1:].sum(-1, dtype=np.float64)
        sums["to_first"] = _create_sums(to_first_L, len(self.document) - 1)
        for name, values in self.statistics.items():
            sums[name] = self._create_statistic_sums(name, values)
        return sums

    def _create_statistic_sums(self, name: str, values: npt.NDArray[np.floating]) -> Sums:
        """Return the statistic `name` as `Sums`: its `values` and the counts by which they are divided to obtain means.

        The values are sums over tokens, and the count is the number of these tokens. `geometry` and `sinks` are values
        of the whole text; their count is 1, and an undefined (NaN) value is replaced by a sum and a count of 0. A text
        with an undefined value of the control `corpus_value` is excluded from this control: its sums and count are 0.
        """
        if name in ("geometry", "sinks"):
            is_defined = ~np.isnan(values)
            return _create_sums(np.nan_to_num(values), is_defined)
        if name in PAIR_SOURCES:
            assert self.document.segments is not None
            # These ratios are summed over the tokens of both texts of a pair, without special tokens (segment -1).
            is_in_text = self.document.segments >= 0
            return _create_sums(values, int(is_in_text.sum()))
        if name == "corpus_value" and np.isnan(values).any():
            return _create_sums(np.zeros_like(values), 0)
        return _create_sums(values, len(self.document))


def ratio_sums(document: Document, ratios_MLT: npt.NDArray[np.floating]) -> DocumentSums:
    """Return the sums `[groups, layers, methods]` of a document's ratios over each group of its tokens.

    `ratios_MLT` contains the ratios by method, layer and token. The tokens are grouped in two ways, by token class and
    by position (`GROUPS`). The keys of the result are `ratios_by_token_class` and `ratios_by_position`.
    """
    sums = {}
    group_of_each_token: dict[str, npt.NDArray[Any]] = {
        "token_class": document.classes,
        "position": position_groups(len(document)),
    }
    for grouping, group_T in group_of_each_token.items():
        groups = len(GROUPS[grouping])
        membership_TG = np.eye(groups)[group_T]  # one-hot
        tokens_G11 = membership_TG.sum(0)[:, None, None]
        sums_GLM = np.einsum("mlt,tg->glm", ratios_MLT.astype(np.float64), membership_TG)
        sums[f"ratios_by_{grouping}"] = _create_sums(sums_GLM, tokens_G11)
    return sums


def stack_sums(documents: Sequence[DocumentSums]) -> dict[str, Sums]:
    """Stack the sums of several documents along a new first axis, by name; return {} if there are no documents."""
    if not documents:
        return {}
    stacked = {}
    for name in documents[0]:
        stacked[name] = Sums.stack([sums[name] for sums in documents])
    return stacked


def _create_sums(values: npt.NDArray[Any], counts: npt.ArrayLike) -> Sums:
    """Return the `Sums` of `values` and `counts`. Counts are converted to float64, with as many axes as `values`."""
    counts_as_values = np.array(counts, dtype=np.float64, ndmin=values.ndim)
    return Sums(values, counts_as_values)


def length_class(tokens: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return the index of each text's length class in `LENGTHS`; `tokens` contains the texts' numbers of tokens."""
    return np.searchsorted(LENGTH_ENDS, np.asarray(tokens), side="left")


class LayerConstants(NamedTuple):
    """Tensors of one layer that do not depend on the text."""

    value_bias_E: Tensor  # b_V
    head_factors_HdR: Tensor  # the result of `head_factors`: d head width, R = min(d, D)


class BatchMeasurer:
    """Computes the measures of batches of documents with the model of one checkpoint."""

    def __init__(self, base: PreTrainedModel, methods: Sequence[str], pad_token_id: int) -> None:
        """Select the ratios in `methods` that are defined for the model's family."""
        self.base = base
        self.pad_token_id = pad_token_id
        self.family = family_of(base.config)
        self.methods = self.family.present(methods)
        self.corpus: CorpusValues | None = None
        """The mean values for the control `corpus_value`. If they are None, the ratios of this control are NaN."""
        self.waiting_seconds = 0.0
        """Total time spent in `BatchPass.wait_for_results`, during which a GPU completes its queued kernels."""

    def read_corpus(self, batches: Iterable[Sequence[Document]]) -> None:
        """Compute `corpus` from batches of sampled documents."""
        self.corpus = CorpusValues.read(self.base, batches, self.pad_token_id)

    def ratios(self, documents: Sequence[Document]) -> Tensor:
        """Return the mixing ratios `[layers, methods, batch, tokens]` of one padded batch, and no other measures."""
        points = (*RATIO_POINTS, *ratio_points(self.methods))
        compute_ratios = partial(mixing_ratios, self.methods)
        by_layer = map_layers(compute_ratios, self.base, self.batch(documents), points)
        return torch.stack(by_layer)

    def control_sums(self, name: str, documents: Sequence[Document]) -> list[DocumentSums]:
        """Return the sums of each document's ratios over its tokens, `{name: sums}`, from a separate forward pass.

        `name` is the name of a control, and `documents` are the texts as modified for this control.
        """
        batch = MicroBatch(documents, slice(None), self.base.device)  # all documents, for sums without padding
        ratios_LMBT = self.ratios(documents)
        ratios_BTLM = ratios_LMBT.permute(2, 3, 0, 1)
        sums_BLM = batch.sums(ratios_BTLM).cpu().numpy()
        sums_by_document = []
        for sums_LM, tokens in zip(sums_BLM, batch.lengths, strict=True):
            sums_by_document.append({name: _create_sums(sums_LM, tokens)})
        return sums_by_document

    @cached_property
    def sites(self) -> list[Site]:
        """The sites at which the geometry is measured, determined by a forward pass of one token."""
        return list(widths(self.base))

    @cached_property
    def layer_constants(self) -> list[LayerConstants]:
        """The bias b_V and the `head_factors` of each layer, read in a forward pass of one token.

        `head_factors` are matrices by which `head_ratios` multiplies the output of each head, in place of W_O.
        """

        def read_constants(layer_pass: LayerPass) -> LayerConstants:
            heads = layer_pass.attention.value.shape[-3]
            factors_HdR = head_factors(layer_pass.block, heads)
            return LayerConstants(value_bias_E=layer_pass.value_bias, head_factors_HdR=factors_HdR)

        any_id = 1  # The constants do not depend on the token.
        one_token = padded([[any_id]], self.pad_token_id, self.base.device)
        return map_layers(read_constants, self.base, one_token)

    def measures(
        self,
        documents: Sequence[Document],
        sampled: Sequence[bool] | None = None,
        statistics: Collection[str] = STATISTICS,
    ) -> list[DocumentMeasures]:
        """Return the ratios and `statistics` of each document of one padded batch.

        An identity is an equation that the model's vectors and attention weights must satisfy. The identities in
        `SAMPLED_IDENTITIES` are checked only in documents for which `sampled` is True (default: all). Raise
        `InputError` if an identity fails or a ratio is not finite.
        """
        return self.start(documents, sampled, statistics).wait_for_results()

    @torch.inference_mode()
    def start(
        self,
        documents: Sequence[Document],
        sampled: Sequence[bool] | None = None,
        statistics: Collection[str] = STATISTICS,
    ) -> "BatchPass":
        """Run the forward pass of one padded batch, and start to measure the ratios and `statistics` of each document.

        An identity is an equation that the model's vectors and attention weights must satisfy. All identities are
        checked in documents for which `sampled` is True (default: all), and some of them also in all other documents. A
        GPU may still be computing the measures when this method returns. `BatchPass.wait_for_results` waits for the
        measures and returns them.
        """
        batch_pass = BatchPass(self, documents, sampled, statistics)
        points = (*POINTS, PROJECTED, PREACTIVATION)
        read_layer = batch_pass.read_layer
        batch_pass.output = run_layers(self.base, batch_pass.inputs, read_layer, points, output_hidden_states=True)
        return batch_pass

    def batch(self, documents: Sequence[Document]) -> dict[str, Tensor]:
        """Return the model's padded inputs `[B, T]` by argument name."""
        ids = [document.ids.tolist() for document in documents]
        return padded(ids, self.pad_token_id, self.base.device)


class SiteMeasures(NamedTuple):
    """The geometry of a micro-batch at sites with vectors of equal width."""

    sites: list[Site]
    measures_BXm: Tensor  # `GEOMETRY_MEASURES`, with NaN in place of the effective rank
    ranks_BX: Future[Tensor]  # the effective ranks
    unit_sums_BXD: Tensor  # the sum of each text's vectors, each scaled to norm 1


class RatioMeasures(NamedTuple):
    """The ratios of a micro-batch in one layer, and sums computed from the same `LayerSplits`."""

    ratios_BMT: Tensor
    to_first_BT: Tensor  # attention weight of each token on the first token, mean over heads
    sums: dict[str, Tensor]  # by statistic, [B, ...]: controls, `PAIR_SOURCES`, `others` and `lengths`


class VectorMeasures(NamedTuple):
    """Measures of a micro-batch in one layer that are not computed from the `LayerSplits` of this layer."""

    statistics: dict[str, Tensor]  # keys "steps", "by_head" and "sinks"; values [B, ...]
    sites: list[SiteMeasures]  # the geometry, by group of sites


class MicroBatchMeasures(NamedTuple):
    """Measures of a micro-batch in one layer."""

    ratios: RatioMeasures
    vectors: VectorMeasures
    errors_BI: Tensor

    @property
    def statistics(self) -> dict[str, Tensor]:
        """The layer's entries of `DocumentMeasures.statistics` by name, `[B, ...]`."""
        return {**self.vectors.statistics, **self.ratios.sums}


class MicroBatchTasks(NamedTuple):
    """Running tasks that compute the measures of a micro-batch in one layer."""

    control_values: Future[tuple[ControlValues, AttendedValues]] | None  # prerequisite of the ratios
    ratios: Future[RatioMeasures]
    vectors: Future[VectorMeasures]
    errors_BI: Future[Tensor]

    def measures(self) -> MicroBatchMeasures:
        """Wait for the measures and return them."""
        return MicroBatchMeasures(
            ratios=self.ratios.result(),
            vectors=self.vectors.result(),
            errors_BI=self.errors_BI.result(),
        )

    def cancel(self) -> None:
        """Cancel the tasks that have not started."""
        for task in self:
            if task is not None:
                task.cancel()


class BatchPass:
    """One forward pass of a batch.

    `run_layers` calls `read_layer` after each layer, and `wait_for_results` joins the measures of all layers.
    """

    output: Any
    """The output of the model."""

    def __init__(
        self,
        measurer: BatchMeasurer,
        documents: Sequence[Document],
        sampled: Sequence[bool] | None,
        statistics: Collection[str],
    ) -> None:
        """Prepare the inputs and micro-batches. The arguments are those of `BatchMeasurer.measures`."""
        self.measurer = measurer
        self.documents = documents
        self.statistics = statistics
        # Controls are conditions under which the ratios are computed for comparison. Those in `SAME_PASS` reuse this
        # forward pass.
        self.controls = [name for name in SAME_PASS if name in statistics]
        self.sampled = [True] * len(documents) if sampled is None else list(sampled)
        self.inputs = measurer.batch(documents)
        self.mask_BT = self.inputs["attention_mask"].bool()
        self.micro_batches = micro_batches(documents, measurer.base.device)
        self.layers: list[list[MicroBatchMeasures]] = []  # by layer and micro-batch
        self.outputs: list[Tensor] = []  # by layer
        self.words: list[Words] = []  # by micro-batch
        # `unit_sums`, the sums of vectors scaled to norm 1, are computed together with the geometry.
        self.has_geometry = "geometry" in statistics or "unit_sums" in statistics
        # The sites (layers and capture points) and the constants of the layers are determined before this forward pass,
        # because they require separate forward passes.
        self.unread_sites = measurer.sites if self.has_geometry else []  # sites not measured yet
        # Controls and the ratios of single heads (`by_head`) are computed with constants such as b_V.
        needs_constants = bool(self.controls) or "by_head" in statistics
        self.constants = measurer.layer_constants if needs_constants else []

    def read_layer(self, layer_pass: LayerPass, features: Mapping[Site, Tensor]) -> None:
        """Measure one layer after its forward pass, in micro-batches (groups of texts of the batch).

        `features` contains the vectors captured so far, by site (layer and capture point). Sites captured since the
        previous layer are measured with this layer.
        """
        if not self.layers:
            self._store_embedding(layer_pass.call.stack, features)
        self.outputs.append(layer_pass.features["layer_output"])
        new_sites = [site for site in self.unread_sites if site in features]
        self.unread_sites = [site for site in self.unread_sites if site not in features]

        # If tasks run in threads, several tasks per micro-batch let even a single text use several cores.
        all_tasks = []
        for number in range(len(self.micro_batches)):
            tasks = self._submit_tasks(number, layer_pass, features, new_sites)
            all_tasks.append(tasks)
        try:
            measures = [tasks.measures() for tasks in all_tasks]
            self.layers.append(measures)
        finally:  # Stop background tasks after an error or Ctrl-C.
            for tasks in all_tasks:
                tasks.cancel()

    def _submit_tasks(
        self, number: int, layer_pass: LayerPass, features: Mapping[Site, Tensor], new_sites: Sequence[Site]
    ) -> MicroBatchTasks:
        """Start the tasks that measure the micro-batch with index `number` in one layer.

        A task runs in a thread or, if this is faster, immediately. `features` contains the vectors of the whole batch
        by site (layer and capture point). The task `vectors` measures the steps, heads and sinks of the layer, and the
        geometry at `new_sites`, the sites captured since the previous layer, each only if requested. The task
        `errors_BI` returns the errors of the I identities in each of B texts.
        """
        submit = partial(submit_task, self.measurer.base.device)
        micro_batch = self.micro_batches[number]
        # The layer's tensors of the texts in the micro-batch, truncated to the length of the longest of these texts.
        pass_of_texts = layer_pass.documents(micro_batch.places, micro_batch.tokens)
        control_values = None
        if self.controls:  # The task `ratios` waits for the result of this task.
            control_values = submit(self._compute_control_values, micro_batch, pass_of_texts)
        return MicroBatchTasks(
            control_values,
            ratios=submit(self._measure_ratios, micro_batch, pass_of_texts, control_values),
            vectors=submit(self._measure_vectors, number, pass_of_texts, features, new_sites),
            errors_BI=submit(self._measure_identity_errors, micro_batch, layer_pass),  # with the batch's padding
        )

    def _store_embedding(self, stack: Stack, features: Mapping[Site, Tensor]) -> None:
        """Store the errors of the embeddings' identities and, if the geometry is measured, the word embeddings.

        An identity is an equation that the captured vectors must satisfy. Raise an `InputError` if the word embeddings
        were not captured. `stack` is the stack (encoder or decoder) that contains the first layer.
        """
        self.first_stack = stack
        ids_BT = self.inputs["input_ids"]
        self.embedding_errors_BI = embedding_errors(self.measurer.base, ids_BT, features, self.mask_BT)
        lacks_words = WORDS not in features
        if lacks_words:
            # This call raises an `InputError`, because the error of missing word embeddings is infinite. All other
            # errors are checked after the forward pass. Layer 0 is the embeddings.
            self._check_errors(layer=0, errors_BI=self.embedding_errors_BI.double().cpu().numpy())
        if self.has_geometry:
            for micro_batch in self.micro_batches:
                words_BTD = micro_batch.part(features[WORDS])
                self.words.append(Words(words_BTD, micro_batch.ids_BT))

    @torch.inference_mode()  # Inference mode is local to a thread.
    def _compute_control_values(
        self, micro_batch: MicroBatch, layer_pass: LayerPass
    ) -> tuple[ControlValues, AttendedValues]:
        """Return the tensors of one layer for computing controls, and sums of control values weighted by attention.

        A control is a condition under which the ratios are computed for comparison, such as other value vectors. Four
        controls need tensors of the layer; `_measure_ratios` computes the ratios from these tensors:

        `without_value_bias`        `bias_E`, the bias b_V, which is subtracted from the values
        `corpus_value`              `corpus_BTE`, means over other texts, which replace the values; None if not needed
        `text_mean_value`           `mean_B1E`, the mean over the tokens of the text, which replaces the values
        `without_special_sources`   `special_SB`, the positions of the S special tokens of each text
        """
        layer_index = layer_pass.call.number - 1
        is_shifted = self._has_shifted_tokens(layer_pass)  # one position further right, after a start token
        values = ControlValues(
            bias_E=self.constants[layer_index].value_bias_E,
            corpus_BTE=self._average_corpus(micro_batch, layer_pass),
            mean_B1E=micro_batch.means(layer_pass.value),
            special_SB=micro_batch.special_positions(shifted=is_shifted),
        )
        attended = values.attended(layer_pass, self.controls)
        return values, attended

    def _average_corpus(self, micro_batch: MicroBatch, layer_pass: LayerPass) -> Tensor | None:
        """Return the values `[B, T, E]` for the control `corpus_value`: means over tokens of other texts.

        Return None if the control is not requested, or if there are no corpus values.
        """
        corpus = self.measurer.corpus
        if corpus is None or "corpus_value" not in self.controls:
            return None
        return corpus.mean_over_others(layer_pass.call.number, micro_batch, layer_pass.value)

    @torch.inference_mode()
    def _measure_ratios(
        self,
        micro_batch: MicroBatch,
        layer_pass: LayerPass,
        control_values: Future[tuple[ControlValues, AttendedValues]] | None,
    ) -> RatioMeasures:
        """Return the ratios, the attention to the first token, and the requested statistics based on `LayerSplits`.

        The splits divide each vector into the parts from the token itself and from other tokens. If no controls are
        requested, `control_values` is None.
        """
        splits = split_layer(layer_pass)
        ratios_MN = apply_formulas(self.measurer.methods, splits)  # N = B * T
        ratios_MBT = ratios_MN.unflatten(-1, micro_batch.mask_BT.shape)
        weight_on_first_BTH = layer_pass.attention.to_first()
        return RatioMeasures(
            ratios_BMT=ratios_MBT.transpose(0, 1),
            to_first_BT=weight_on_first_BTH.mean(-1),
            sums=self._sum_statistics(micro_batch, layer_pass, splits, control_values),
        )

    def _sum_statistics(
        self,
        micro_batch: MicroBatch,
        layer_pass: LayerPass,
        splits: LayerSplits,
        control_values: Future[tuple[ControlValues, AttendedValues]] | None,
    ) -> dict[str, Tensor]:
        """Return the requested statistics based on `splits`, as sums over the tokens of each text `[B, ...]`, by name.

        They are the contributions of other tokens (`others`); the lengths of contributions (`lengths`); the ratios
        under controls; and, in pairs of texts, the ratios by group of source tokens (`PAIR_SOURCES`).
        """
        sums: dict[str, Tensor] = {}
        if "others" in self.statistics or "lengths" in self.statistics:
            sums.update(_sum_contributions(micro_batch, splits))
        if control_values is not None:
            values, attended = control_values.result()  # waits for the task
            sums.update(self._sum_controls(micro_batch, layer_pass, splits, values, attended))
        if any(name in self.statistics for name in PAIR_SOURCES):
            sums.update(self._sum_sources(micro_batch, layer_pass, splits))
        return sums

    @torch.inference_mode()
    def _measure_vectors(
        self, number: int, layer_pass: LayerPass, features: Mapping[Site, Tensor], new_sites: Sequence[Site]
    ) -> VectorMeasures:
        """Return the requested statistics of a layer, and the geometry of the vectors at `new_sites`.

        The statistics are those of the individual steps of the layer (`steps`), of its heads (`by_head`) and of its
        attention sinks (`sinks`). `number` is the index of the micro-batch, and `features` contains the vectors of the
        whole batch by site (layer and capture point).
        """
        micro_batch = self.micro_batches[number]
        statistics = {}
        if "steps" in self.statistics:
            steps_BTSm = step_measures(layer_pass)
            statistics["steps"] = micro_batch.sums(steps_BTSm)
        if "by_head" in self.statistics:
            constants = self.constants[layer_pass.call.number - 1]
            ratios_BTH = head_ratios(layer_pass, constants.head_factors_HdR)
            statistics["by_head"] = micro_batch.sums(ratios_BTH)
        if "sinks" in self.statistics:
            statistics["sinks"] = sink_measures(layer_pass, micro_batch.mask_BT, micro_batch.lengths)
        if not self.has_geometry:
            return VectorMeasures(statistics, sites=[])
        vectors = {site: micro_batch.part(features[site]) for site in new_sites}
        words_BTD = micro_batch.part(features[WORDS])
        sites = self._measure_sites(micro_batch, layer_pass, vectors, words_BTD, self.words[number])
        return VectorMeasures(statistics, sites)

    @torch.inference_mode()
    def _measure_identity_errors(self, micro_batch: MicroBatch, layer_pass: LayerPass) -> Tensor:
        """Return the errors `[B, I]` of the identities: equations that the tensors of a layer must satisfy.

        The computation includes padding, so that attention scores have the same rounding errors as in the forward pass.
        """
        places = micro_batch.places
        with_padding = layer_pass.documents(places)
        return identity_errors(with_padding, self.mask_BT[places], self.sampled[places])

    def _sum_controls(
        self,
        micro_batch: MicroBatch,
        layer_pass: LayerPass,
        splits: LayerSplits,
        values: ControlValues,
        attended: AttendedValues,
    ) -> dict[str, Tensor]:
        """Return the sums of the M ratios over the tokens of each text `[B, M]`, by control.

        A control is a condition under which the ratios are computed for comparison. The sums are NaN for `corpus_value`
        if there are no corpus values.
        """
        methods = self.measurer.methods
        ratios_by_control = control_ratios(methods, layer_pass, splits, values, attended, self.controls)
        sums: dict[str, Tensor] = {}
        if ratios_by_control:  # All C controls are summed together.
            ratios_CMBT = torch.stack(list(ratios_by_control.values()))
            ratios_BTCM = ratios_CMBT.permute(2, 3, 0, 1)
            sums_BCM = micro_batch.sums(ratios_BTCM)
            sums.update(zip(ratios_by_control, sums_BCM.unbind(1), strict=True))
        if "corpus_value" in self.controls and self.measurer.corpus is None:
            shape = (len(micro_batch.documents), len(methods))
            sums["corpus_value"] = micro_batch.mask_BT.new_full(shape, torch.nan, dtype=torch.float64)
        return {name: sums[name] for name in self.controls}  # in the order of `self.controls`

    def _sum_sources(self, micro_batch: MicroBatch, layer_pass: LayerPass, splits: LayerSplits) -> dict[str, Tensor]:
        """Return the sums of the ratios over tokens `[B, M]` for each of `PAIR_SOURCES`; {} if a text is not a pair.

        `PAIR_SOURCES` are three groups S of source tokens: the token's own text, the other text, and special tokens.
        """
        # The segments (the text of the pair to which each token belongs) are shifted together with a decoder's tokens.
        segments_BT = micro_batch.segments(shifted=self._has_shifted_tokens(layer_pass))
        if segments_BT is None:
            return {}
        ratios_SMBT = source_ratios(self.measurer.methods, layer_pass, splits, segments_BT)
        is_in_text_BT = (segments_BT == 0) | (segments_BT == 1)  # neither a special token nor padding
        text_ratios_SMBT = ratios_SMBT.masked_fill(~is_in_text_BT, 0)
        sums_BSM = micro_batch.sums(text_ratios_SMBT.permute(2, 3, 0, 1))
        return dict(zip(PAIR_SOURCES, sums_BSM.unbind(1), strict=True))

    def _has_shifted_tokens(self, layer_pass: LayerPass) -> bool:
        """Return True for the decoder layers of an encoder-decoder model; their input tokens are shifted right by one.

        The decoder is the second stack of such a model; other models have a single stack.
        """
        return layer_pass.call.stack != self.measurer.family.stacks[0]

    def _measure_sites(
        self,
        micro_batch: MicroBatch,
        layer_pass: LayerPass,
        vectors: Mapping[Site, Tensor],
        words_BTD: Tensor,
        words: Words,
    ) -> list[SiteMeasures]:
        """Return the geometry of the vectors `[B, T, D]` at each site (layer and capture point) in `vectors`.

        The geometry consists of measures such as the mean cosine. Sites with vectors of equal shape and the same
        reference vectors, with which the vectors are compared, form a group: they are measured together, stacked on an
        axis X. `words_BTD` contains the word embeddings of all tokens, and `words` the distinct ones of each text.
        """
        layer = layer_pass.call.number
        is_first_stack = layer_pass.call.stack == self.first_stack  # the encoder, or the only stack
        mask_B1T = micro_batch.mask_BT.unsqueeze(1) if micro_batch.is_padded else None
        measured = []
        for sites in _group_sites(vectors, layer):
            # The reference vectors are the layer's input or, before the first layer of an encoder or decoder, the word
            # embeddings. The first site represents its group, because all sites of a group agree in their reference
            # vectors and shapes.
            is_group_in_layer = sites[0].layer == layer
            reference_BTD = layer_pass.x if is_group_in_layer else words_BTD
            # The nearest word embedding can be found only if the vectors have the width of the word embeddings and
            # belong to the same tokens. The tokens of the second stack, a decoder, are shifted.
            has_shape_of_words = vectors[sites[0]].shape == words_BTD.shape
            compared_words = words if is_first_stack and has_shape_of_words else None
            vectors_BXTD = torch.stack([vectors[site] for site in sites], 1)
            cloud = Cloud(vectors_BXTD, mask_B1T)
            reference = Cloud(reference_BTD.unsqueeze(1), mask_B1T)
            site_measures = SiteMeasures(
                sites=sites,
                # All measures, but NaN in place of the effective rank. `_join_sites` inserts the effective ranks
                # (`ranks_BX`), which may still be being computed in another thread.
                measures_BXm=geometry_but_rank(cloud, reference, compared_words),
                ranks_BX=effective_ranks(cloud, micro_batch.lengths),
                unit_sums_BXD=cloud.unit_sum_D,
            )
            measured.append(site_measures)
        return measured

    @torch.inference_mode()
    def wait_for_results(self) -> list[DocumentMeasures]:
        """Wait for the measures of each document, and return them.

        An identity is an equation that the model's vectors must satisfy. Raise `InputError` if the error of one of the
        I identities is too large or a ratio is not finite.
        """
        start = time.perf_counter()
        # `_join` concatenates the micro-batches of each layer along the axis B, and inserts an axis of layers (L) with
        # the index `axis`.
        ratios_BMLT = self._join(lambda measures: self._pad(measures.ratios.ratios_BMT), axis=2)
        errors_BLI = self._join_errors()
        self._check_layers(errors_BLI, ratios_BMLT)
        to_first_BLT = self._join(lambda measures: self._pad(measures.ratios.to_first_BT), axis=1)
        statistics = self._join_statistics()
        results = []
        for place, document in enumerate(self.documents):
            tokens = len(document)
            measures = DocumentMeasures(
                document,
                ratios=ratios_BMLT[place, ..., :tokens],
                to_first=to_first_BLT[place, ..., :tokens],
                identities=errors_BLI[place],
                statistics={name: array[place] for name, array in statistics.items()},
            )
            results.append(measures)
        self.measurer.waiting_seconds += time.perf_counter() - start
        return results

    def _join_statistics(self) -> dict[str, npt.NDArray[Any]]:
        """Return the requested statistics `[B, ...]` of all layers and sites by name, as arrays on the host."""
        statistics = {}
        first_micro_batch = self.layers[0][0]  # All layers and micro-batches have the same statistics.
        for name in first_micro_batch.statistics:
            if name == "by_head":  # Layers can differ in their number of heads.
                statistics[name] = self._join_heads()
            elif name in self.statistics:  # Others were only computed together with a requested one.
                statistics[name] = self._join_statistic(name)
        if self.has_geometry:
            statistics["geometry"], statistics["unit_sums"] = self._join_sites()
        return statistics

    def _join_statistic(self, name: str) -> npt.NDArray[Any]:
        """Return one statistic of all layers `[B, L, ...]`."""
        return self._join(lambda measures: measures.statistics[name], axis=1)

    def _join_heads(self) -> npt.NDArray[Any]:
        """Return the sums of each head's ratio `[B, heads, layers]`. Layers with fewer heads are padded with NaN."""
        by_layer = []
        for layer in self.layers:
            sums_BH = torch.cat([measures.statistics["by_head"] for measures in layer])
            by_layer.append(sums_BH.T)  # `pad_sequence` pads the first axis
        sums_LHB = pad_sequence(by_layer, batch_first=True, padding_value=torch.nan)
        sums_BHL = sums_LHB.permute(2, 1, 0)
        return np.asarray(sums_BHL.cpu().numpy())

    def _join_sites(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the geometry `[B, X, m]` and the sums of unit vectors `[B, X, largest width]` of all sites.

        The geometry consists of m measures of a text's vectors. A site (axis X) is a layer and a capture point. Sums of
        vectors that are narrower than the largest width are padded with zeros.
        """
        computed_sites: list[Site] = []
        # The results of each group of sites that were measured together, for the texts of all micro-batches:
        measures = []  # [B, X, m]
        ranks = []  # [B, X]
        unit_sums = []  # [B, X, D]
        for micro_batches_of_group in self._list_site_groups():
            computed_sites.extend(micro_batches_of_group[0].sites)
            measures.append(torch.cat([part.measures_BXm for part in micro_batches_of_group]))
            # `result` waits if the effective ranks (one of the m measures) are still being computed in another thread.
            ranks.append(torch.cat([part.ranks_BX.result() for part in micro_batches_of_group]))
            unit_sums.append(torch.cat([part.unit_sums_BXD for part in micro_batches_of_group]))
        measures_BXm = torch.cat(measures, 1).cpu()
        measures_BXm[..., RANK] = torch.cat(ranks, 1)  # replaces NaN
        unit_sums_BXD = _concatenate_sites(unit_sums).float().cpu()
        # On the axis X, the sites are in order of computation; the result has the order of `measurer.sites`.
        computed_places = [computed_sites.index(site) for site in self.measurer.sites]
        return measures_BXm[:, computed_places].numpy(), unit_sums_BXD[:, computed_places].numpy()

    def _list_site_groups(self) -> list[list[SiteMeasures]]:
        """Return a list for each layer and group of sites: the `SiteMeasures` of the group in each micro-batch.

        A group consists of the sites (layers and capture points) whose vectors were measured together.
        """
        site_groups: list[list[SiteMeasures]] = []
        for micro_batches_of_layer in self.layers:
            groups_by_micro_batch = [measures.vectors.sites for measures in micro_batches_of_layer]
            # All micro-batches of a layer have the same groups. `zip` combines the measures of the same group.
            for micro_batches_of_group in zip(*groups_by_micro_batch, strict=True):
                site_groups.append(list(micro_batches_of_group))
        return site_groups

    def _join_errors(self) -> npt.NDArray[np.float64]:
        """Return the errors of the identities in the embeddings (index 0) and in each layer, `[B, 1 + L, I]`.

        An identity is an equation that the model's vectors must satisfy.
        """
        layer_errors_BLI = self._stack_layers(lambda measures: measures.errors_BI, axis=1)
        # The identity `hidden_states` (each layer's output equals the hidden states of transformers) is checked here,
        # because the model returned its hidden states only after the last layer.
        hidden_states_index = list(IDENTITIES).index("hidden_states")
        hidden_states_errors_BL = torch.stack(self._compare_hidden_states(), 1)
        layer_errors_BLI[..., hidden_states_index] = hidden_states_errors_BL
        embedding_errors_B1I = self.embedding_errors_BI.unsqueeze(1)
        errors_BLI = torch.cat([embedding_errors_B1I, layer_errors_BLI], 1)
        return np.asarray(errors_BLI.double().cpu().numpy())

    def _check_layers(self, errors_BLI: npt.NDArray[np.float64], ratios_BMLT: npt.NDArray[np.float32]) -> None:
        """Check the layers in order; raise `InputError` if an identity's error is too large or a ratio is not finite.

        `errors_BLI` is the result of `_join_errors`: index 0 of its axis L is the embeddings, which have no ratios.
        """
        has_broken_ratio_BL = self._find_broken_ratios(ratios_BMLT)
        self._check_errors(layer=0, errors_BI=errors_BLI[:, 0])
        for layer in range(1, errors_BLI.shape[1]):
            self._check_finite(layer, has_broken_ratio_BL[:, layer - 1])
            self._check_errors(layer, errors_BLI[:, layer])

    def _find_broken_ratios(self, ratios_BMLT: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        """Return a mask `[B, L]` of the documents and layers with a non-finite ratio; padding is ignored."""
        lengths_B = np.array([len(document) for document in self.documents])
        positions_T = np.arange(ratios_BMLT.shape[-1])
        is_token_BT = positions_T < lengths_B[:, None]
        is_broken_BMLT = ~np.isfinite(ratios_BMLT) & is_token_BT[:, None, None]
        return np.asarray(is_broken_BMLT.any((1, 3)))

    def _compare_hidden_states(self) -> list[Tensor]:
        """Return, for each layer, the errors `[B]` of its output relative to the `hidden_states` of transformers.

        In `hidden_states`, the output of the final norm, if there is one, replaces the last layer's output. The final
        norm is therefore applied to the last layer's output before the comparison.
        """
        stacks = self.measurer.family.stacks
        # The first of the hidden states is the output of the embeddings.
        if len(stacks) > 1:
            hidden_states = [self.output.encoder_hidden_states[1:], self.output.decoder_hidden_states[1:]]
        else:
            hidden_states = [self.output.hidden_states[1:]]
        errors = []
        first = 0  # index of the stack's first layer among the layers of all stacks
        for stack, states_of_stack in zip(stacks, hidden_states, strict=True):
            outputs = self.outputs[first : first + len(states_of_stack)]
            norm_paths = [stack.final_norm] if stack.final_norm else []
            for norm in optional_modules(self.measurer.base, norm_paths):  # at most one
                outputs[-1] = norm(outputs[-1])
            for output_BTD, state_BTD in zip(outputs, states_of_stack, strict=True):
                errors.append(vector_errors(output_BTD, state_BTD, self.mask_BT))
            first += len(states_of_stack)
        return errors

    def _check_finite(self, layer: int, broken_B: npt.NDArray[np.bool_]) -> None:
        """Raise an `InputError` if a document has a non-finite ratio in `layer`; `broken_B` marks these documents."""
        if broken_B.any():
            place = int(broken_B.argmax())
            document = self.documents[place].name
            raise InputError(
                f"{checkpoint_name(self.measurer.base)}: the ratios of {document} in layer {layer} contain NaN or "
                "infinite values; check the weights of the model"
            )

    def _check_errors(self, layer: int, errors_BI: npt.NDArray[np.float64]) -> None:
        """Raise an `InputError` that names the document with the largest error if this error exceeds the tolerance.

        `errors_BI` contains the errors of the identities `IDENTITIES` in `layer`; layer 0 is the embeddings.
        """
        for (identity, meaning), errors_B in zip(IDENTITIES.items(), errors_BI.T, strict=True):
            known_errors_B = np.nan_to_num(errors_B, nan=-1, posinf=np.inf)  # NaN: not checked
            worst = int(known_errors_B.argmax())
            error = errors_B[worst]
            if error > IDENTITY_TOLERANCE:
                raise InputError(
                    f"{checkpoint_name(self.measurer.base)}: the identity {identity} fails in layer {layer} of "
                    f"{self.documents[worst].name} ({meaning}): relative error {error:.3g} "
                    f"(rounding: at most {IDENTITY_TOLERANCE:g}); the entry of {self.measurer.family.model_type} in "
                    "attnmix/models/families.yaml is wrong for this model"
                )

    def _pad(self, values: Tensor) -> Tensor:
        """Pad the last axis (the tokens of a micro-batch) with zeros to the length of the batch's longest document."""
        missing = self.mask_BT.shape[-1] - values.shape[-1]
        return pad(values, (0, missing)) if missing else values

    def _join(self, select: Callable[[MicroBatchMeasures], Tensor], axis: int) -> npt.NDArray[Any]:
        """Return the result of `_stack_layers` as an array on the host."""
        return np.asarray(self._stack_layers(select, axis).cpu().numpy())

    def _stack_layers(self, select: Callable[[MicroBatchMeasures], Tensor], axis: int) -> Tensor:
        """Return the selected tensors, concatenated over micro-batches and stacked over layers along a new `axis`."""
        by_layer = []
        for layer in self.layers:
            parts = [select(measures) for measures in layer]
            by_layer.append(torch.cat(parts) if len(parts) > 1 else parts[0])
        return torch.stack(by_layer, axis)


def _group_sites(vectors: Mapping[Site, Tensor], layer: int) -> list[list[Site]]:
    """Group the sites by the shape of their vectors, and by whether they are in `layer` or before it."""
    groups: dict[tuple[bool, torch.Size], list[Site]] = {}
    for site, vectors_BTD in vectors.items():
        is_in_layer = site.layer == layer
        group = groups.setdefault((is_in_layer, vectors_BTD.shape), [])
        group.append(site)
    return list(groups.values())


def _concatenate_sites(vectors: Sequence[Tensor]) -> Tensor:
    """Concatenate vectors `[B, X, D]` along the axis of sites, padded with zeros to the largest width D."""
    width = max(vectors_BXD.shape[-1] for vectors_BXD in vectors)
    padded_vectors = []
    for vectors_BXD in vectors:
        missing = width - vectors_BXD.shape[-1]
        padded_vectors.append(pad(vectors_BXD, (0, missing)))
    return torch.cat(padded_vectors, 1)


def _sum_contributions(micro_batch: MicroBatch, splits: LayerSplits) -> dict[str, Tensor]:
    """Return the sums `others` `[B, D]` and `lengths` `[B, 3]` of one layer over the tokens of each text.

    `others` is the sum over tokens i of c_i = sum_{j != i} F_ij, the contribution of all other tokens to token i.
    `lengths` contains the sums of |c_i|^2, of |c_i| and of |F_ii + x_i|, where x_i is the layer's input at token i.
    """
    shape = micro_batch.mask_BT.shape  # The splits have a single axis for the tokens of all texts.
    others_BTD = splits.attention.others.double().unflatten(0, shape)
    own_BTD = splits.residual.own.double().unflatten(0, shape)
    lengths = [
        others_BTD.square().sum(-1),
        others_BTD.norm(dim=-1),
        own_BTD.norm(dim=-1),
    ]
    lengths_BT3 = torch.stack(lengths, -1)
    return {
        "others": micro_batch.sums(others_BTD),
        "lengths": micro_batch.sums(lengths_BT3),
    }
