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

    `fixed` has an entry for each side: True for a model that is not one of several training runs. `sample` defines the
    texts of the own share.
    """
    results = [*before, *after]
    methods, differences = _check_comparable(results)
    ratio = preferred_ratio(methods)
    documents = results[0].documents
    notes = [_describe_sample(documents), *differences]
    obstacles = [result.own_share_obstacle(sample) for result in results]
    obstacle = next(filter(None, obstacles), None)
    has_own_share = obstacle is None
    if has_own_share:
        notes.append(_describe_own_share_sample(len(documents), sample))
    else:
        notes.append(f"own_share is omitted, because {obstacle}.")
    if "corpus_value" in results[0].control_names:
        notes.extend(_describe_left_out_texts(documents))
    lengths = np.array([len(document) for document in documents])
    length_classes = np.unique(length_class(lengths))
    if len(length_classes) > 1:
        change = _average_change((before, after), ratio)
        notes.append(_describe_change_by_length(ratio, change, lengths))
    means = []
    for result in results:
        totals = result.quantities(methods)
        if has_own_share:
            totals = result.own_share_totals(sample) | totals
        cells, cell_totals = pack_cells(totals)  # all results have the same cells
        means.append(resample_means(cell_totals))
    names = _list_model_names(results)
    number = len(before)
    first = Trainings(names[:number], means[:number], fixed[0])
    second = Trainings(names[number:], means[number:], fixed[1])
    preferred = preferred_cells(cells, ratio)
    return Comparison(first, second, cells, preferred, notes, ratio, (before, after))


def _list_model_names(results: Sequence[Measures]) -> list[str]:
    """Return unique display names of the models."""
    # The same model may have been trained further between two results.
    keys = [(id(result.model), result.measured_model.weights) for result in results]
    names = [result.model.name for result in results]
    sources = [result.model.source for result in results]
    return distinct_names(keys, names, sources)


def _check_comparable(results: Sequence[Measures]) -> tuple[list[str], list[str]]:
    """Return the ratios common to all results, and notes; raise `InputError` if the results cannot be compared."""
    names = [result.model.name for result in results]
    layers = [result.layers for result in results]
    ids = []
    for result in results:
        ids_of_result = [document.ids.tolist() for document in result.documents]
        ids.append(ids_of_result)
    check_same_input(names, ids, layers)
    first = results[0]
    for other in results[1:]:
        if first.tokenized.pairs != other.tokenized.pairs:
            raise InputError("compare: one result has pairs of texts, another single texts; measure the same texts")
        if list(first.control_totals) != list(other.control_totals):
            first_controls = ", ".join(first.control_totals) or "none"
            other_controls = ", ".join(other.control_totals) or "none"
            problem = f"the controls differ: {first_controls} and {other_controls}"
            raise InputError(f"compare: {problem}; measure the same controls")
    methods_by_result = [set(result.methods) for result in results]
    in_all = set.intersection(*methods_by_result)
    in_some = set.union(*methods_by_result)
    shared = [method for method in first.methods if method in in_all]
    if not shared:
        raise InputError("compare: the results have no ratio in common; measure them with the same `methods`")
    only_in_some = [method for method in RATIOS if method in in_some - in_all]
    if not only_in_some:
        return shared, []
    note = f"Not all models have {', '.join(only_in_some)}; the compared ratio is {preferred_ratio(shared)}."
    return shared, [note]


def check_same_input(names: Sequence[str], ids: Sequence[list[list[int]]], layers: Sequence[int]) -> None:
    """Raise `InputError` unless all models have the same token IDs for each text and the same number of layers."""
    first_texts = ids[0]
    for other in range(1, len(names)):
        texts = ids[other]
        if len(first_texts) != len(texts):
            problem = f"results of {len(first_texts)} and {len(texts)} texts"
            raise InputError(f"compare: {problem}; measure the same texts for both")
        for number, text in enumerate(texts):
            if text != first_texts[number]:
                problem = f"tokens of text {number} differ"
                raise InputError(f"compare: {problem}; measure the same texts, with the same tokenizer for both")
        if layers[0] != layers[other]:
            counts = f"{layers[0]} layers in {names[0]}, {layers[other]} in {names[other]}"
            raise InputError(f"compare: {counts}; compare models with the same number of layers")


def _average_change(sides: Sequence[Sequence[Measures]], ratio: str) -> npt.NDArray[np.float64]:
    """Return the change of a ratio in each text `[N]`, averaged over layers and models."""
    means_by_side = []
    for side in sides:
        means_of_models = []
        for result in side:
            sums = result.ratio_totals()[ratio]
            means_NL = sums.values / sums.counts
            means_of_models.append(means_NL.mean(1))
        means_by_side.append(np.mean(means_of_models, axis=0))
    before_N, after_N = means_by_side
    change_N: npt.NDArray[np.float64] = after_N - before_N
    return change_N


def _describe_change_by_length(
    measure: str, change_N: npt.NDArray[np.float64], lengths_N: npt.NDArray[np.int64]
) -> str:
    """Return a sentence on the mean change of a measure for each length class of the texts."""
    classes_N = length_class(lengths_N)
    parts = []
    for place in np.unique(classes_N):
        is_in_class_N = classes_N == place
        number = int(is_in_class_N.sum())
        points = 100 * change_N[is_in_class_N].mean()
        parts.append(f"{points:+.1f} at {LENGTHS[place]} tokens ({_count_texts(number)})")
    return f"The change of {measure} by text length, in percentage points: {', '.join(parts)}."


def _describe_left_out_texts(documents: Sequence[Document]) -> list[str]:
    """Return a sentence on the texts without a value of the control `corpus_value`, if there are any."""
    left_out = texts_without_corpus_value(documents)
    if not left_out:
        return []
    text, token_class = next(iter(left_out.items()))
    note = left_out_sentence(f"text {text}", token_class, len(left_out), len(documents))
    return [note]


def _describe_sample(documents: Sequence[Document]) -> str:
    tokens = sum(len(document) for document in documents)
    texts = _count_texts(len(documents))
    return f"The sample has {texts} with {tokens:,} tokens; the column `tokens` is the mean number per text."


def _describe_own_share_sample(texts: int, sample: OwnShareSample) -> str:
    number = min(texts, sample.max_texts)
    return f"own_share is measured on {_count_texts(number)}, truncated to at most {sample.max_length} tokens."


def _count_texts(texts: int) -> str:
    if texts == 1:
        return "1 text"
    return f"{texts} texts"
