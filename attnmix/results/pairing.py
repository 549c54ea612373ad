"""Comparison of results, paired by text: compatibility checks, and notes on the compared data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnmix.core.errors import InputError
from attnmix.core.model_names import distinct_names
from attnmix.core.names import OWN_SHARE
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
    """Return the comparison that `attnmix.compare` documents, from the results of the models on both sides.

    Args:
        before: The results of the models on the side `before`.
        after: The results of the models on the side `after`.
        fixed: For each side, True if it is a single model that is not treated as a training run.
        sample: The sample of texts for which the own share is computed.
    """
    results = [*before, *after]
    methods = _check_comparable(results)
    ratio = preferred_ratio(methods)
    obstacle = _compute_own_shares(results, sample)
    notes = _write_notes(before, after, methods, obstacle, sample)
    means = []
    for result in results:
        totals = result.quantities(methods)
        if obstacle is None:
            totals = result.own_share_totals(sample) | totals
        cells, cell_totals = pack_cells(totals)  # a cell is a pair of measure and layer, and the same for all results
        means.append(resample_means(cell_totals))
    names = _list_model_names(results)
    number_before = len(before)
    trainings_before = Trainings(names[:number_before], means[:number_before], fixed[0])
    trainings_after = Trainings(names[number_before:], means[number_before:], fixed[1])
    preferred = preferred_cells(cells, ratio)
    return Comparison(trainings_before, trainings_after, cells, preferred, notes, ratio, (before, after))


def _compute_own_shares(results: Sequence[Measures], sample: OwnShareSample) -> str | None:
    """Compute the own shares of all results; return the reason if they cannot be computed or compared, else None.

    `own_share_totals` stores the own shares in the result, so they are not computed again for the comparison.
    """
    obstacles = [result.own_share_obstacle(sample) for result in results]
    for obstacle in obstacles:
        if obstacle is not None:
            return obstacle
    names_of_results = []  # for each result, the names of the own shares with each kind of donor (exchanged text)
    for result in results:
        sums = result.own_share_totals(sample)
        if not sums[OWN_SHARE].counts.any():
            return "every text has fewer than two tokens that can be exchanged"
        names_of_results.append(list(sums))
    if any(names != names_of_results[0] for names in names_of_results):
        return "the kinds of donors differ, because not all classifiers predict several classes"
    return None


def _write_notes(
    before: Sequence[Measures],
    after: Sequence[Measures],
    shared: Sequence[str],
    obstacle: str | None,
    sample: OwnShareSample,
) -> list[str]:
    """Return sentences about the sample, omitted data, and the change of the preferred ratio by length class of texts.

    Args:
        before: The results of the models on the side `before`.
        after: The results of the models on the side `after`.
        shared: The ratios common to all results.
        obstacle: The reason why the own share of tokens cannot be computed; None if it can be computed.
        sample: The sample of texts for which the own share is computed.
    """
    results = [*before, *after]
    first = results[0]
    documents = first.documents
    notes = [_describe_sample(documents), *_describe_missing_ratios(results, shared)]
    if obstacle is None:
        notes.append(_describe_own_share_sample(len(documents), sample))
    else:
        notes.append(f"own_share is omitted, because {obstacle}.")
    if "corpus_value" in first.control_names:
        notes.extend(_describe_excluded_texts(documents))
    lengths = np.array([len(document) for document in documents])
    if len(np.unique(length_class(lengths))) > 1:
        ratio = preferred_ratio(shared)
        change = _average_ratio(after, ratio) - _average_ratio(before, ratio)
        notes.append(_describe_change_by_length(ratio, change, lengths))
    return notes


def _list_model_names(results: Sequence[Measures]) -> list[str]:
    """Return a display name for each result; only results of the same model with the same weights share a name."""
    # The same model may have been trained further between two measurements.
    keys = [(id(result.model), result.measured_model.weights) for result in results]
    names = [result.model.name for result in results]
    sources = [result.model.source for result in results]
    return distinct_names(keys, names, sources)


def _check_comparable(results: Sequence[Measures]) -> list[str]:
    """Return the ratios common to all results.

    Raise `InputError` if the results have different tokens, labels, layers or controls, or no ratio in common.
    """
    names = [result.model.name for result in results]
    layers = [result.layers for result in results]
    ids = []
    for result in results:
        ids_of_texts = [document.ids.tolist() for document in result.documents]
        ids.append(ids_of_texts)
    check_same_input(names, ids, layers)
    first = results[0]
    for other in results[1:]:
        _check_same_data(first, other)
    shared = [method for method in first.methods if all(method in result.methods for result in results)]
    if not shared:
        raise InputError("compare: the results have no ratio in common; measure them with the same `methods`")
    return shared


def _check_same_data(first: Measures, other: Measures) -> None:
    """Raise `InputError` unless two results have the same labels and controls, and both or neither have text pairs."""
    if [document.label for document in other.documents] != [document.label for document in first.documents]:
        raise InputError("compare: the labels of the texts differ; measure the same labels")
    if first.tokenized.pairs != other.tokenized.pairs:
        raise InputError("compare: one result has pairs of texts, another single texts; measure the same texts")
    if list(first.control_totals) != list(other.control_totals):
        first_controls = ", ".join(first.control_totals) or "none"
        other_controls = ", ".join(other.control_totals) or "none"
        problem = f"the controls differ: {first_controls} and {other_controls}"
        raise InputError(f"compare: {problem}; measure the same controls")


def _describe_missing_ratios(results: Sequence[Measures], shared: Sequence[str]) -> list[str]:
    """Return a list with a sentence about ratios that only some models have; an empty list if there are none."""
    in_some = set[str]()
    for result in results:
        in_some.update(result.methods)
    only_in_some = [method for method in RATIOS if method in in_some and method not in shared]
    if not only_in_some:
        return []
    return [f"Not all models have {', '.join(only_in_some)}; the compared ratio is {preferred_ratio(shared)}."]


def check_same_input(names: Sequence[str], ids: Sequence[list[list[int]]], layers: Sequence[int]) -> None:
    """Raise `InputError` unless all models have the same token IDs for each text and the same number of layers.

    Args:
        names: The name of each model.
        ids: For each model, a list of the token IDs of each text.
        layers: The number of layers of each model.
    """
    first_texts = ids[0]
    for name, texts, layer_count in zip(names, ids, layers, strict=True):
        if len(first_texts) != len(texts):
            problem = f"results of {len(first_texts)} and {len(texts)} texts"
            raise InputError(f"compare: {problem}; measure the same texts for both")
        for number, text in enumerate(texts):
            if text != first_texts[number]:
                problem = f"tokens of text {number} differ"
                raise InputError(f"compare: {problem}; measure the same texts, with the same tokenizer for both")
        if layers[0] != layer_count:
            counts = f"{layers[0]} layers in {names[0]}, {layer_count} in {name}"
            raise InputError(f"compare: {counts}; compare models with the same number of layers")


def _average_ratio(side: Sequence[Measures], ratio: str) -> npt.NDArray[np.float64]:
    """Return the mean of a ratio for each text `[N]`, averaged over the text's tokens, all layers and all models."""
    means_of_models = []
    for result in side:
        sums = result.ratio_totals()[ratio]  # sums over tokens `[N, L]`, and numbers of tokens `[N, 1]`
        means_NL = sums.values / sums.counts
        means_of_models.append(means_NL.mean(1))
    means_N: npt.NDArray[np.float64] = np.mean(means_of_models, axis=0)
    return means_N


def _describe_change_by_length(
    measure: str, change_N: npt.NDArray[np.float64], lengths_N: npt.NDArray[np.int64]
) -> str:
    """Return a sentence on the mean change of a measure in each length class of the texts.

    Args:
        measure: The name of the measure.
        change_N: The change of the measure in each text `[N]`.
        lengths_N: The number of tokens of each text `[N]`.
    """
    classes_N = length_class(lengths_N)  # indices in `LENGTHS`
    changes = []
    for length_index in np.unique(classes_N):
        is_in_class_N = classes_N == length_index
        number = int(is_in_class_N.sum())
        points = 100 * change_N[is_in_class_N].mean()
        changes.append(f"{points:+.1f} at {LENGTHS[length_index]} tokens ({_count_texts(number)})")
    return f"The change of {measure} by text length, in percentage points: {', '.join(changes)}."


def _describe_excluded_texts(documents: Sequence[Document]) -> list[str]:
    """Return a list with a sentence about texts that `corpus_value` excludes; an empty list if there are none."""
    excluded = texts_without_corpus_value(documents)
    if not excluded:
        return []
    number, token_class = next(iter(excluded.items()))
    sentence = left_out_sentence(f"text {number}", token_class, len(excluded), len(documents))
    return [sentence]


def _describe_sample(documents: Sequence[Document]) -> str:
    """Return a sentence on the numbers of texts and tokens."""
    tokens = sum(len(document) for document in documents)
    texts = _count_texts(len(documents))
    return f"The sample has {texts} with {tokens:,} tokens; the column `tokens` is the mean number per text."


def _describe_own_share_sample(texts: int, sample: OwnShareSample) -> str:
    """Return a sentence about the sample of texts for which the own share is computed."""
    number = min(texts, sample.max_texts)
    return f"own_share is measured on {_count_texts(number)}, truncated to at most {sample.max_length} tokens."


def _count_texts(texts: int) -> str:
    """Return a number of texts with the noun in the singular or plural."""
    if texts == 1:
        return "1 text"
    return f"{texts} texts"
