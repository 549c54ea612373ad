"""Comparison of results, paired by text: checks of compatibility, and notes on the samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnmix.core.errors import InputError
from attnmix.core.model_names import distinct_names
from attnmix.measures.batches import LENGTHS, length_class
from attnmix.measures.controls import left_out_sentence
from attnmix.measures.documents import Document
from attnmix.measures.engine import OwnShareSample
from attnmix.measures.ratios import RATIOS, preferred_ratio
from attnmix.results.arguments import OWN_SHARE_SAMPLE
from attnmix.results.comparison import Comparison
from attnmix.results.controls import texts_without_corpus_value
from attnmix.results.result import Measures
from attnmix.results.tables import pack_cells, preferred_cells, resample_means
from attnmix.results.verdicts import Trainings


def compare_results(
    before: Sequence[Measures],
    after: Sequence[Measures],
    fixed: tuple[bool, bool] = (True, True),
    sample: OwnShareSample = OWN_SHARE_SAMPLE,
) -> Comparison:
    """Return the comparison of results before and after, as documented in `attnmix.compare`.

    `fixed` has an entry for each side: True for one model that is not a training run. `sample` defines the texts of the
    own share.
    """
    results = [*before, *after]
    methods, differences = _check_comparable(results)
    ratio, documents = preferred_ratio(methods), results[0].documents
    notes = [_sample_note(documents), *differences]
    quantities = [result.quantities(methods) for result in results]
    obstacles = [result.own_share_obstacle(sample) for result in results]
    obstacle = next(filter(None, obstacles), None)
    if obstacle is not None:
        notes.append(f"own_share is omitted, because {obstacle}.")
    else:
        quantities = [
            result.own_share_totals(sample) | totals for result, totals in zip(results, quantities, strict=True)
        ]
        notes.append(_own_share_note(len(documents), sample))
    if "corpus_value" in results[0].control_names:
        left_out = texts_without_corpus_value(documents)
        if left_out:
            text, token_class = next(iter(left_out.items()))
            notes.append(left_out_sentence(f"text {text}", token_class, len(left_out), len(documents)))
    lengths = np.array([len(document) for document in documents])
    if len(np.unique(length_class(lengths))) > 1:
        notes.append(_length_note(ratio, _mean_change((before, after), ratio), lengths))
    cells = pack_cells(quantities[0])[0]
    means = [resample_means(pack_cells(totals)[1]) for totals in quantities]
    names = _model_names(results)
    number = len(before)
    first = Trainings(names[:number], means[:number], fixed[0])
    second = Trainings(names[number:], means[number:], fixed[1])
    return Comparison(first, second, cells, preferred_cells(cells, ratio), notes, ratio, (before, after))


def _model_names(results: Sequence[Measures]) -> list[str]:
    """Return unique display names of the models."""
    models = [result.model for result in results]
    # The same model may have been trained further between two results.
    keys = [(id(result.model), result.measured_model.weights) for result in results]
    return distinct_names(keys, [model.name for model in models], [model.source for model in models])


def _check_comparable(results: Sequence[Measures]) -> tuple[list[str], list[str]]:
    """Return the ratios common to all results, and notes; raise `InputError` if the results cannot be compared."""
    names = [result.model.name for result in results]
    ids = [[document.ids.tolist() for document in result.documents] for result in results]
    check_same_input(names, ids, [result.layers for result in results])
    first = results[0]
    for each in results[1:]:
        if first.tokenized.pairs != each.tokenized.pairs:
            raise InputError("compare: one result has pairs of texts, another single texts; measure the same texts")
        if list(first.control_totals) != list(each.control_totals):
            asked = [", ".join(result.control_totals) or "none" for result in (first, each)]
            raise InputError(f"compare: the controls differ: {asked[0]} and {asked[1]}; measure the same controls")
    shared = [method for method in first.methods if all(method in result.methods for result in results)]
    if not shared:
        raise InputError("compare: the results have no ratio in common; measure them with the same `methods`")
    everything = {method for result in results for method in result.methods}
    only_some = [method for method in RATIOS if method in everything - set(shared)]
    if not only_some:
        return shared, []
    return shared, [f"Not all models have {', '.join(only_some)}; {preferred_ratio(shared)} is compared instead."]


def check_same_input(names: Sequence[str], ids: Sequence[list[list[int]]], layers: Sequence[int]) -> None:
    """Raise `InputError` unless all models have the same token IDs for each text and the same number of layers."""
    for other in range(1, len(names)):
        numbers = (len(ids[0]), len(ids[other]))
        if numbers[0] != numbers[1]:
            raise InputError(
                f"compare: results of {numbers[0]} and {numbers[1]} texts; measure the same texts for both"
            )
        pairs = enumerate(zip(ids[0], ids[other], strict=True))
        different = next((number for number, (one, another) in pairs if one != another), None)
        if different is not None:
            raise InputError(
                f"compare: tokens of text {different} differ; measure the same texts, with the same tokenizer for both"
            )
        if layers[0] != layers[other]:
            counts = f"{layers[0]} layers in {names[0]}, {layers[other]} in {names[other]}"
            raise InputError(f"compare: {counts}; compare models with the same number of layers")


def _mean_change(sides: Sequence[Sequence[Measures]], ratio: str) -> npt.NDArray[np.float64]:
    """Return the change of a ratio in each text, averaged over layers and models."""
    means = []
    for side in sides:
        totals = [result.ratio_totals()[ratio] for result in side]
        means.append(np.mean([(each.values / each.counts).mean(1) for each in totals], axis=0))
    change: npt.NDArray[np.float64] = means[1] - means[0]
    return change


def _length_note(measure: str, change_N: npt.NDArray[np.float64], lengths_N: npt.NDArray[np.int64]) -> str:
    """Return a sentence on the mean change of a measure for each length class of the texts."""
    classes_N = length_class(lengths_N)
    parts = []
    for place in np.unique(classes_N):
        inside_N = classes_N == place
        texts = _count_texts(int(inside_N.sum()))
        parts.append(f"{100 * change_N[inside_N].mean():+.1f} at {LENGTHS[place]} tokens ({texts})")
    return f"The change of {measure} by text length, in percentage points: {', '.join(parts)}."


def _sample_note(documents: Sequence[Document]) -> str:
    """Return a sentence on the numbers of texts and tokens."""
    tokens = sum(len(document) for document in documents)
    texts = _count_texts(len(documents))
    return f"The sample has {texts} with {tokens:,} tokens; the column `tokens` is the mean number per text."


def _own_share_note(texts: int, sample: OwnShareSample) -> str:
    """Return a sentence on the sample of the own share."""
    number = min(texts, sample.max_texts)
    return f"own_share is measured on {_count_texts(number)}, truncated to at most {sample.max_length} tokens."


def _count_texts(texts: int) -> str:
    return f"{texts} text{'s' * (texts != 1)}"
