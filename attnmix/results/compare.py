"""`compare`: compare two models, or two lists of models, on the same texts."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attnmix.core.errors import InputError
from attnmix.core.paths import read_path
from attnmix.core.settings import CaptureParameters, MeasureParameters, checked_section
from attnmix.measures.documents import documents_of
from attnmix.measures.ratios import RATIOS
from attnmix.model import Model, load
from attnmix.results.arguments import (
    OWN_SHARE_SAMPLE,
    check_control_names,
    check_own_share_sample,
    choose_ratios,
    read_labels,
    read_names,
    tokenize_texts,
)
from attnmix.results.comparison import Comparison
from attnmix.results.measure import measure_tokenized
from attnmix.results.measure_names import check_kinds
from attnmix.results.pairing import check_same_input, compare_results
from attnmix.results.result import Measures
from attnmix.runs.tokens import TokenizedTexts

Compared = Model | Measures | str | os.PathLike[str]
"""The type of a single model, name or result on either side of `compare`."""
TYPES = (Model, Measures, str, os.PathLike)
ALLOWED = (
    "allowed: compare(before, after, texts) for models, names or folders; compare(before, after) for results of "
    "measure; or lists of these"
)


def compare(
    before: Compared | Sequence[Compared],
    after: Compared | Sequence[Compared],
    texts: Any = None,
    *,
    methods: str | Sequence[str] | None = None,
    max_length: int | None = None,
    controls: str | Sequence[str] = (),
    labels: Sequence[Any] | None = None,
    batch_tokens: int | None = None,
    own_share_texts: int = OWN_SHARE_SAMPLE.max_texts,
    own_share_length: int = OWN_SHARE_SAMPLE.max_length,
) -> Comparison:
    """Return the differences between two models on the same texts, paired by text: `after` minus `before`.

    The printed comparison contains the most important rows: the own share (by exchange) after the last layer, and the
    mean over layers of the ratio that covers most of the attention block. If controls were measured, it also contains
    the measured shares (`swap`, `class_share`), and this ratio minus each of the remaining controls except
    `random_weights`.
    `Comparison.by_layer` and `Comparison.all_rows` return the other rows. The documentation of `Comparison` explains
    the verdicts.

    A difference between two models is not evidence about how they were trained, because two training runs with the
    same settings and different seeds also differ. For evidence about training, compare lists of three or more models
    with different seeds. If only one side is a list, the single model on the other side is treated as fixed, for
    example a pretrained model that is compared with its fine-tuned versions. A list of one model is treated as one
    training run, and the variance of this run is assumed to be that of the runs on the other side.

    Args:
        before: A model that `load` returned, a name or folder that `load` accepts, a result of `measure` or
            `load_result`, or a list of these with one entry for each training run.
        after: The models or results on the other side, of the same types as `before`. Either both sides are models or
            names, or both are results.
        texts: The texts to measure, in any form that `measure` accepts. Omit this argument if both sides are results,
            because results contain their texts.
        methods: If models are measured, the ratios to measure; by default all ratios of each model's family.
        max_length: If models are measured, the number of tokens to which texts are truncated; by default the
            model's limit.
        controls: If models are measured, the names of the controls to measure; `measure` describes them.
        labels: If models are measured, a class for each text, required by the control `class_share`.
        batch_tokens: If models are measured, the maximum number of tokens in a forward pass, including padding.
        own_share_texts: The maximum number of texts for which the own share is computed.
        own_share_length: The number of tokens to which these texts are truncated.

    Returns:
        The comparison of the ratios available for all models, and of the own share where it can be computed.

    Raises:
        InputError: If an argument is invalid (before a model runs), or if the models differ in tokens, layers or
            controls.

    Example:
        >>> comparison = attnmix.compare(model, model, ["time flies", "like an arrow"], methods="attnresln_n")
        >>> comparison.rows[["measure", "layer", "difference", "mixing"]].values.tolist()
        [['own_share', 6, 0.0, 'inconclusive'], ['attnresln_n', 'all', 0.0, 'inconclusive']]
        >>> float(attnmix.compare(result, result).all_rows()["difference"].abs().max())
        0.0
    """
    # A single model outside a list is treated as fixed; the models in a list are training runs.
    are_fixed = (not _is_list(before), not _is_list(after))
    members_before = _list_members(before)
    members_after = _list_members(after)
    members = [*members_before, *members_after]
    are_results = [isinstance(member, Measures) for member in members]
    if any(are_results) and not all(are_results):
        raise InputError(f"compare: models cannot be compared with results; {ALLOWED}")
    sample = check_own_share_sample(
        "exchange", own_share_texts, own_share_length, "own_share_texts", "own_share_length"
    )
    options = {
        "methods": methods,
        "max_length": max_length,
        "controls": controls,
        "labels": labels,
        "batch_tokens": batch_tokens,
    }
    if all(are_results):
        _check_unused(texts, options)
        return compare_results(members_before, members_after, are_fixed, sample)
    if texts is None:
        raise InputError("texts: missing; call compare(before, after, texts), which measures all models on the texts")
    _check_options(options)
    models = _load_models(members)
    results = _measure_once(models, texts, options)
    number_before = len(members_before)
    return compare_results(results[:number_before], results[number_before:], are_fixed, sample)


def _is_list(side: Any) -> bool:
    """Return True if `side`, the argument `before` or `after`, is a list instead of a single model, name or result."""
    return isinstance(side, Sequence) and not isinstance(side, str)


def _list_members(side: Any) -> list[Any]:
    """Return the models, names or results on one side of a comparison; raise `InputError` for anything else."""
    members = list(side) if _is_list(side) else [side]
    if not members:
        raise InputError(f"compare: an empty list; {ALLOWED}")
    for member in members:
        if not isinstance(member, TYPES):
            raise InputError(f"compare: got {type(member).__name__}; {ALLOWED}")
        is_name = isinstance(member, str | os.PathLike)
        if is_name and read_path("compare", member, 'compare("base", "tuned", texts)').is_file():
            raise InputError(f"compare: {member} is a file; pass load_result(path), which returns the result in it")
    return members


def _check_unused(texts: Any, options: Mapping[str, Any]) -> None:
    """Raise `InputError` if the user passed an argument that has no effect in a comparison of results."""
    given = {"texts": texts, **options}
    unused = []
    for name, value in given.items():
        is_empty = value is None or (isinstance(value, list | tuple) and not value)
        if not is_empty:
            unused.append(name)
    if unused:
        raise InputError(
            f"{unused[0]}: has no effect on results, which contain their texts; omit it, or pass models instead of "
            "results"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise `InputError` for invalid options of `compare`, before a model is loaded."""
    if options["methods"] is not None:
        methods = read_names(options["methods"])
        check_kinds("methods", methods, RATIOS)
        checked_section(MeasureParameters, methods=methods)
    controls = read_names(options["controls"])
    check_control_names(controls, options["labels"])
    for name in ("max_length", "batch_tokens"):
        if options[name] is not None:
            checked_section(CaptureParameters, **{name: options[name]})


def _load_models(members: Sequence[Any]) -> list[Model]:
    """Return the model of each member (a model, a name or a folder); load each name or folder only once."""
    by_name: dict[str, Model] = {}
    models = []
    for member in members:
        if isinstance(member, Model):
            models.append(member)
            continue
        name = os.fspath(member)
        if name not in by_name:
            by_name[name] = load(name)
        models.append(by_name[name])
    return models


def _measure_once(models: Sequence[Model], texts: Any, options: Mapping[str, Any]) -> list[Measures]:
    """Return the result of each model; check all models first, and measure each distinct model only once.

    `options` are the arguments of `compare` for models, by name.
    """
    if isinstance(texts, Iterator) and not isinstance(texts, io.IOBase):
        texts = list(texts)  # every model reads the texts, but an iterator can be read only once
    labels = None
    if options["labels"] is not None:
        labels = read_labels(options["labels"])
    distinct_models = {id(model): model for model in models}  # the same object can occur several times
    ratios = {}
    tokenized = {}
    for key, model in distinct_models.items():
        ratios[key] = choose_ratios(model, options["methods"])
        tokenized[key] = tokenize_texts(model, texts, options["max_length"])
    names = [model.name for model in distinct_models.values()]
    layers = [model.layers for model in distinct_models.values()]
    check_same_input(names, [_list_ids(texts_of_model) for texts_of_model in tokenized.values()], layers)
    controls = options["controls"]
    batch_tokens = options["batch_tokens"]
    results = {}
    for key, model in distinct_models.items():
        results[key] = measure_tokenized(model, tokenized[key], ratios[key], controls, labels, batch_tokens)
    return [results[id(model)] for model in models]


def _list_ids(tokenized: TokenizedTexts) -> list[list[int]]:
    """Return the token IDs of each text."""
    documents = documents_of(tokenized.texts, tokenized.tokens)
    return [document.ids.tolist() for document in documents]
