"""Measures of a batch of documents: one padded forward pass, then everything that its tensors say, layer by layer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from attnmix.arithmetic.kernels import in_threads
from attnmix.core.errors import InputError
from attnmix.core.names import POINTS, PREACTIVATION, Site
from attnmix.measures.controls import SAME_PASS, ControlValues, CorpusValues, attended, control_ratios
from attnmix.measures.documents import CLASSES, POSITIONS, Document, position_groups
from attnmix.measures.geometry import Cloud, Words, geometry, step_measures
from attnmix.measures.heads import head_factors, head_ratios
from attnmix.measures.identities import IDENTITIES, embedding_errors, identity_errors, vector_errors
from attnmix.measures.layers import RATIO_POINTS, LayerPass, checkpoint_name, map_layers, run_layers
from attnmix.measures.ratios import all_parts, mixing_ratios, ratio_points
from attnmix.measures.sources import SOURCES, source_sums
from attnmix.models.capture_points import widths
from attnmix.models.encoding import padded
from attnmix.models.families import PROJECTED, Family, family_of, optional_modules

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
    """Arrays by name, for a document in the statistics; all but `geometry` are sums over its tokens.

    `geometry`   [sites, measures]
    `unit_sums`  [sites, largest width]: vectors of norm 1, then zeros
    `steps`      [layers, steps, measures]
    `by_head`    [heads, layers]: each head's ratio
    `others`     [layers, D]: what other tokens give by attention, sum_{j!=i} F_ij
    `lengths`    [layers, 3]: its squared length, its length, and that of the token's own part with the skip connection
    and for each control of `SAME_PASS` [layers, methods]: its ratios; in pairs of texts for each of `SOURCES` too
    """

    def sums(self) -> dict[str, npt.NDArray[Any]]:
        """Return `counted` and further sums over the tokens by name, of one size however long the document is.

        `token_class` and `position`   of the ratios `[groups, layers, methods]`
        `to_first`   of attention's weight on the first token `[layers]`, of all tokens but that
        `<name>_counts` holds the number of tokens of each, in a shape that broadcasts to the sums. `document`,
        `label` and `predicted` are the review's.
        """
        tokens = len(self.document)
        positions_T = position_groups(tokens)
        sums: dict[str, Any] = {**self.counted, "to_first": self.to_first[:, 1:].sum(-1, dtype=np.float64)}
        counts: dict[str, Any] = dict.fromkeys(sums, tokens) | {"to_first": tokens - 1}
        if self.document.segments is not None:
            counts |= dict.fromkeys(SOURCES, int((self.document.segments >= 0).sum()))
        sums["geometry"], counts["geometry"] = np.nan_to_num(sums["geometry"]), ~np.isnan(sums["geometry"])
        for grouping, numbers_T in (("token_class", self.document.classes), ("position", positions_T)):
            membership_TG = np.eye(len(GROUPS[grouping]))[numbers_T]
            sums[grouping] = np.einsum("mlt,tg->glm", self.ratios.astype(np.float64), membership_TG)
            counts[grouping] = membership_TG.sum(0)[:, None, None]
        for name, count in counts.items():
            sums[f"{name}_counts"] = np.array(count, dtype=np.float64, ndmin=sums[name].ndim)
        document = self.document
        names = {"document": document.name, "label": document.label, "predicted": document.predicted}
        return sums | {name: np.array(value) for name, value in names.items()}


def length_class(tokens: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return the positions in `LENGTHS` of texts with these numbers of tokens."""
    return np.searchsorted(LENGTH_ENDS, np.asarray(tokens), side="left")


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
        sums = []
        for document, ratios_LMT in zip(documents, self.ratios(documents).unbind(2), strict=True):
            sums_LM = ratios_LMT[..., : len(document)].double().sum(-1).cpu().numpy()
            sums.append({name: sums_LM, f"{name}_counts": np.full((1, 1), float(len(document)))})
        return sums

    @cached_property
    def value_biases(self) -> list[Tensor]:
        """b_V of each layer `[E]`."""
        one_token = padded([[1]], self.pad_token_id, self.base.device)
        return map_layers(lambda each: each.value_bias, self.base, one_token)

    def measures(self, documents: Sequence[Document], sampled: Sequence[bool] | None = None) -> list[DocumentMeasures]:
        """Return everything for each document of one padded batch; of those `sampled`, all identities are checked.

        `InputError` where the numbers are not to be trusted.
        """
        with torch.inference_mode():
            work = _BatchPass(self, documents, sampled)
            points = (*POINTS, PROJECTED, PREACTIVATION)
            output = run_layers(self.base, work.batch, work.visit, points, output_hidden_states=True)
            return work.results(output)

    def batch(self, documents: Sequence[Document]) -> dict[str, Tensor]:
        """Return the model's input."""
        return padded([document.ids.tolist() for document in documents], self.pad_token_id, self.base.device)


class _BatchPass:
    """One forward pass of a batch, read layer by layer; each list has an entry for a layer."""

    def __init__(self, measurer: BatchMeasurer, documents: Sequence[Document], sampled: Sequence[bool] | None) -> None:
        self.measurer, self.documents, self.sampled = measurer, documents, sampled
        self.batch = measurer.batch(documents)
        self.mask_BT = self.batch["attention_mask"].bool()
        self.ratios: list[Tensor] = []
        self.to_first: list[Tensor] = []
        self.errors: list[Tensor] = []  # from the embedding on
        self.outputs: list[Tensor] = []
        self.counted = {place: _Counted(each) for place, each in enumerate(documents) if each.measured}
        # Asked for here, as it takes a forward pass of its own.
        self.value_biases = measurer.value_biases if self.counted else []

    def visit(self, layer_pass: LayerPass, features: Mapping[Site, Tensor]) -> None:
        """Read one layer."""
        number = layer_pass.call.number
        if number == 1:
            base, ids = self.measurer.base, self.batch["input_ids"]
            self.errors.append(self._checked(0, embedding_errors(base, ids, features, self.mask_BT)))
        self.ratios.append(mixing_ratios(self.measurer.methods, layer_pass))
        self.to_first.append(layer_pass.attention.to_first().mean(-1))
        self.outputs.append(layer_pass.features["layer_output"])
        broken_B = (~self.ratios[-1].isfinite() & self.mask_BT).any(0).any(-1)
        if broken_B.any():
            place = f"layer {number} of {self.documents[int(broken_B.nonzero()[0])].name}"
            raise InputError(
                f"{checkpoint_name(self.measurer.base)}: {place} holds NaN or infinite values; the weights are broken"
            )
        self.errors.append(self._checked(number, identity_errors(layer_pass, self.mask_BT, self.sampled)))
        if not self.counted:
            return
        factors_HdR = head_factors(layer_pass.block, layer_pass.attention.value.shape[1])
        bias_E = self.value_biases[number - 1]
        unbiased_BTE, row_sums_BTH = attended(layer_pass.attention, layer_pass.value - bias_E)
        corpus_BTE = self._corpus_values(layer_pass)
        attended_BTE, _ = attended(layer_pass.attention, corpus_BTE)

        def add(place: int) -> None:
            counted, tokens = self.counted[place], np.s_[place, : len(self.documents[place])]
            part = layer_pass.document(place, len(self.documents[place]))
            counted.add_sites(part, {site: features[site][tokens] for site in self.measurer.sites if site in features})
            rows = (row_sums_BTH[tokens], bias_E, unbiased_BTE[tokens], corpus_BTE[tokens], attended_BTE[tokens])
            controls_CMT = control_ratios(self.measurer.methods, part, ControlValues(*rows)).double()
            parts = all_parts(part)
            others_TD = parts.attention.others.double()
            lengths_T = [others_TD.square().sum(-1), others_TD.norm(dim=-1), parts.residual.own.double().norm(dim=-1)]
            segments_T = counted.segments(part, self.measurer.family)
            by_source = {} if segments_T is None else source_sums(self.measurer.methods, part, segments_T)
            counted.layers.append(
                dict(zip(SAME_PASS, controls_CMT.sum(-1), strict=True))
                | {"others": others_TD.sum(0), "lengths": torch.stack(lengths_T).sum(-1)}
                | by_source
                | {"steps": step_measures(part).double().sum(0)}
                | {"by_head": head_ratios(part, factors_HdR).double().sum(0)}
            )

        in_threads(add, list(self.counted))

    def _corpus_values(self, layer_pass: LayerPass) -> Tensor:
        """Return the values of the control `corpus_value`, as the layer's own `[B, T, E]`; NaN without a corpus."""
        value_BTE, corpus = layer_pass.value, self.measurer.corpus
        if corpus is None:
            return torch.full_like(value_BTE, torch.nan)
        corpus_BTE = torch.zeros_like(value_BTE)
        for place in self.counted:
            document = self.documents[place]
            values_TE = value_BTE[place, : len(document)]
            corpus_BTE[place, : len(document)] = corpus.mean_over_others(layer_pass.call.number, document, values_TE)
        return corpus_BTE

    def results(self, output: Any) -> list[DocumentMeasures]:
        """Return the measures of each document; `output` is the model's."""
        self._compare(output)
        ratios_BMLT = torch.stack(self.ratios, dim=2).transpose(0, 1).cpu().numpy()
        to_first_BLT = torch.stack(self.to_first, dim=1).cpu().numpy()
        errors_BLI = torch.stack(self.errors, dim=1).double().cpu().numpy()
        measures = []
        for place, document in enumerate(self.documents):
            tokens = np.s_[place, ..., : len(document)]
            counted = self.counted[place].arrays(self.measurer.sites) if place in self.counted else {}
            arrays = (ratios_BMLT[tokens], to_first_BLT[tokens], errors_BLI[place])
            measures.append(DocumentMeasures(document, *arrays, counted))
        return measures

    def _compare(self, output: Any) -> None:
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
        column = list(IDENTITIES).index("hidden_states")
        for layer, (computed, true) in enumerate(zip(self.outputs, chain(*recorded), strict=True), start=1):
            self.errors[layer][:, column] = vector_errors(computed, true, self.mask_BT)
            self._checked(layer, self.errors[layer])

    def _checked(self, layer: int, errors_BI: Tensor) -> Tensor:
        """Return the errors; `InputError` where one is above the tolerance."""
        for (identity, meaning), errors_B in zip(IDENTITIES.items(), errors_BI.T, strict=True):
            worst = int(errors_B.nan_to_num(nan=-1).argmax())
            if (error := float(errors_B[worst])) > IDENTITY_TOLERANCE:
                raise InputError(
                    f"{checkpoint_name(self.measurer.base)}: the identity {identity} fails in layer {layer} of "
                    f"{self.documents[worst].name} ({meaning}): relative error {error:.3g}, "
                    f"at most {IDENTITY_TOLERANCE:g} is rounding; the entry of {self.measurer.family.model_type} in "
                    "attnmix/models/families.yaml does not hold for this model"
                )
        return errors_BI


class _Counted:
    """One document in the statistics, layer by layer."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.layers: list[dict[str, Tensor]] = []
        self.sites: dict[Site, tuple[Tensor, Tensor]] = {}  # `GEOMETRY_MEASURES`, and the sum of the unit vectors

    def segments(self, layer_pass: LayerPass, family: Family) -> npt.NDArray[np.int8] | None:
        """Return the segments of a pair's tokens, as the layer reads them: a decoder one later, behind its first."""
        segments_T = self.document.segments
        if segments_T is None or layer_pass.call.stack == family.stacks[0]:
            return segments_T
        return np.insert(segments_T[:-1], 0, -1)

    def add_sites(self, layer_pass: LayerPass, features: Mapping[Site, Tensor]) -> None:
        """Add this layer's sites, and those before it that no layer has: the embedding's."""
        words_TD = features[Site(0, "word_embedding")]
        if not self.sites:
            self.words = Words(words_TD, self.document.ids)
            self.embedded = self.entering = Cloud(words_TD)
            self.stack = layer_pass.call.stack
        if not torch.equal(self.entering.x_TD, layer_pass.x.double()):  # otherwise its products are known
            self.entering = Cloud(layer_pass.x)
        entering = self.entering
        for site in [site for site in features if site not in self.sites]:
            comparable = layer_pass.call.stack == self.stack and features[site].shape == words_TD.shape
            cloud, start = Cloud(features[site]), entering if site.layer == layer_pass.call.number else self.embedded
            self.sites[site] = (geometry(cloud, start, self.words if comparable else None), cloud.unit_sum_D)
            if site == Site(layer_pass.call.number, "layer_output"):
                self.entering = cloud

    def arrays(self, sites: Sequence[Site]) -> dict[str, npt.NDArray[np.floating]]:
        """Return `DocumentMeasures.counted`."""
        tensors: dict[str, Any] = {name: [layer[name] for layer in self.layers] for name in self.layers[0]}
        tensors["geometry"], tensors["unit_sums"] = zip(*(self.sites[site] for site in sites), strict=True)
        missing_heads = {"by_head": torch.nan}  # some stacks have fewer; narrower vectors end in zeros
        arrays = {
            name: pad_sequence(each, batch_first=True, padding_value=missing_heads.get(name, 0)).cpu().numpy()
            for name, each in tensors.items()
        }
        return arrays | {"unit_sums": arrays["unit_sums"].astype(np.float32), "by_head": arrays["by_head"].T}
