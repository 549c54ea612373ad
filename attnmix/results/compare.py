"""`compare`: compare two models on the same texts, passed as models, names, results, or lists of these."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnmix.core.errors import InputError
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

Compared = Model | Measures | str | os.PathLike[str]
"""The type of either side of `compare`."""
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

    The printed comparison has the most important rows: the own share (by exchange) after the last layer; the mean over
    layers of the ratio that covers most of the attention block; and, if they were measured, this ratio minus each
    control, `swap` and `class_share`. `Comparison.by_layer` and `all_rows` return the other rows, and `Comparison`
    explains the verdicts.

    A difference between two models is not evidence about how they were trained, because two seeds with the same
    settings also differ. For such evidence, compare lists of three or more models with different seeds. A single model
    that is compared with a list is treated as fixed, such as a pretrained model compared with its fine-tuned versions;
    a list of one model is treated as one training run, assumed to vary like those of the other side.

    Args:
        before: A model that `load` returned, a name or folder that `load` accepts, a result of `measure` or
            `load_result`, or a list of these, one for each training run.
        after: The other side, of the same types. Either both sides are models or names, or both are results.
        texts: The texts to measure, as in `measure`; omitted for results, which contain their texts.
        methods: For models, the ratios to measure, as in `measure`.
        max_length: For models, the number of tokens to which texts are truncated, as in `measure`.
        controls: For models, the controls to measure, as in `measure`.
        labels: For models, a class for each text, as in `measure`.
        batch_tokens: For models, the maximum number of tokens in a batch, as in `measure`.
        own_share_texts: The maximum number of texts for the own share, as in `Measures.own_share`.
        own_share_length: The number of tokens to which these texts are truncated.

    Returns:
        The comparison of the ratios that all models have, and of the own share if it can be computed.

    Raises:
        InputError: For invalid arguments, before a model runs; and if the models differ in tokens, layers or controls.

    Example:
        >>> comparison = attnmix.compare(model, model, ["time flies", "like an arrow"], methods="attnresln_n")
        >>> comparison.rows[["measure", "layer", "difference", "mixing"]].values.tolist()
        [['own_share', 6, 0.0, 'inconclusive'], ['attnresln_n', 'all', 0.0, 'inconclusive']]
        >>> float(attnmix.compare(result, result).all_rows()["difference"].abs().max())
        0.0
    """
    fixed = (not _is_list(before), not _is_list(after))
    first, second = _list_members(before), _list_members(after)
    members = [*first, *second]
    have_results = {isinstance(each, Measures) for each in members}
    if len(have_results) > 1:
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
    if have_results == {True}:
        _check_unused(texts, options)
        return compare_results(first, second, fixed, sample)
    if texts is None:
        raise InputError("texts: missing; call compare(before, after, texts), which measures all models on the texts")
    _check_options(options)
    models = _load_models(members)
    measured = _measure_once(models, texts, options)
    return compare_results(measured[: len(first)], measured[len(first) :], fixed, sample)


def _is_list(side: Any) -> bool:
    return isinstance(side, Sequence) and not isinstance(side, str)


def _list_members(side: Any) -> list[Any]:
    """Return the models, names or results of one side of a comparison; raise `InputError` for anything else."""
    members = list(side) if _is_list(side) else [side]
    if not members:
        raise InputError(f"compare: an empty list; {ALLOWED}")
    for member in members:
        if not isinstance(member, TYPES):
            raise InputError(f"compare: got {type(member).__name__}; {ALLOWED}")
        if isinstance(member, str | os.PathLike) and Path(member).is_file():
            raise InputError(f"compare: {member} is a file; pass load_result(path), which returns the result in it")
    return members


def _check_unused(texts: Any, options: Mapping[str, Any]) -> None:
    """Raise `InputError` for arguments that have no effect on results."""
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
    """Raise `InputError` for invalid options, before a model is loaded."""
    methods, controls = options["methods"], read_names(options["controls"])
    if methods is not None:
        check_kinds("methods", read_names(methods), RATIOS)
        checked_section(MeasureParameters, methods=read_names(methods))
    check_control_names(controls, options["labels"])
    for name in ("max_length", "batch_tokens"):
        if options[name] is not None:
            checked_section(CaptureParameters, **{name: options[name]})


def _load_models(members: Sequence[Any]) -> list[Model]:
    """Return the models; load each name or folder once."""
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
    """Check all models, measure each distinct model once, and return the result of each model."""
    if isinstance(texts, Iterator) and not isinstance(texts, io.IOBase):
        texts = list(texts)
    labels = None if options["labels"] is None else read_labels(options["labels"])
    distinct_models = {id(model): model for model in models}
    ratios, tokenized, ids = {}, {}, {}
    for key, model in distinct_models.items():
        ratios[key] = choose_ratios(model, options["methods"])
        tokenized[key] = tokenize_texts(model, texts, options["max_length"])
        documents = documents_of(tokenized[key].texts, tokenized[key].tokens)
        ids[key] = [document.ids.tolist() for document in documents]
    names = [model.name for model in distinct_models.values()]
    layers = [model.layers for model in distinct_models.values()]
    check_same_input(names, list(ids.values()), layers)
    controls, batch_tokens = options["controls"], options["batch_tokens"]
    results = {}
    for key, model in distinct_models.items():
        results[key] = measure_tokenized(model, tokenized[key], ratios[key], controls, labels, batch_tokens)
    return [results[id(model)] for model in models]
