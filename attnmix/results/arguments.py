"""Conversion and validation of the arguments of `measure`, `compare` and `capture`, before any computation."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.errors import InputError
from attnmix.core.selections import is_whole_number
from attnmix.core.settings import CaptureParameters, MeasureParameters, checked_section
from attnmix.core.terminal import shorten
from attnmix.measures.documents import Document
from attnmix.measures.engine import OWN_SHARE_WAYS, OwnShareSample
from attnmix.measures.ratios import RATIOS
from attnmix.model import Model
from attnmix.models.checkpoint import check_length, longest_text
from attnmix.models.families import family_of
from attnmix.results.measure_names import CLASS_SHARE, CONTROL_NAMES, SWAP, check_kinds, check_name
from attnmix.runs.tokens import TokenizedTexts, tokenize_given

MIN_CLASS_TEXTS = 3
OWN_SHARE_SAMPLE = OwnShareSample()


def check_model(model: Any, call: str) -> None:
    """Raise `InputError` unless `model` is a `Model`. The error message shows `call` as an example of a valid call."""
    if not isinstance(model, Model):
        raise InputError(f"model: got {type(model).__name__}; allowed: the result of load(...), as in {call}")


def choose_ratios(model: Model, methods: Any) -> list[str]:
    """Return the ratios to measure: the user's `methods` or, if they are None, all ratios of the model's family.

    Raise `InputError` for an unknown ratio, and for a ratio that the family does not have.
    """
    family = family_of(model.network.base_model.config)
    if methods is None:
        return family.present(RATIOS)
    names = read_names(methods)
    check_kinds("methods", names, RATIOS)  # reports names of other quantities, such as matrices
    names = checked_section(MeasureParameters, methods=names).methods  # reports unknown names
    present = family.present(names)
    absent = sorted(set(names) - set(present))
    if absent:
        raise InputError(f"methods: the model family {family.model_type} does not have {', '.join(absent)}; omit them")
    return present


def tokenize_texts(model: Model, texts: Any, max_length: int | None) -> TokenizedTexts:
    """Return the tokenized texts, truncated to `max_length` tokens or the model's limit; warn about truncated texts."""
    base: Any = model.network.base_model
    limit = longest_text(base.config)
    if max_length is not None:
        number = int(max_length) if is_whole_number(max_length) else max_length
        limit = checked_section(CaptureParameters, max_length=number).max_length
        check_length("max_length", limit, base.config)
    vocabulary_size = base.get_input_embeddings().num_embeddings
    tokenized = tokenize_given(texts, model.tokenizer, base.config, vocabulary_size, limit, model.name)
    kept_end = "last" if model.tokenizer.truncation_side == "left" else "first"
    _warn_of_truncation(tokenized.texts, limit, kept_end)
    return tokenized


def _warn_of_truncation(texts: pd.DataFrame, limit: int | None, kept_end: str) -> None:
    """Issue one warning if texts were truncated: the length of the longest text, and the number of other texts.

    `limit` is the number of tokens that are kept; `kept_end` is `first` or `last`, for the first or the last tokens.
    """
    truncated = texts[texts["tokens"] < texts["whole_tokens"]]
    if truncated.empty:
        return
    number = truncated["whole_tokens"].idxmax()  # the index of the longest text
    length = truncated["whole_tokens"].max()
    extent = f"text {number} has {length} tokens, of which the {kept_end} {limit} are measured"
    others = len(truncated) - 1
    if others:
        extent += f"; also truncated: {_format_count(others, 'other text')}"
    warnings.warn(extent, stacklevel=4)


def read_classes(labels: Any, texts: int) -> npt.NDArray[np.int64] | None:
    """Return the class index of each text `[N]`, in the order of the sorted labels; None if `labels` is None.

    `texts` is the number of texts. Raise `InputError` unless there is a label for each text.
    """
    if labels is None:
        return None
    allowed = f"allowed: a class for each of the {texts} texts"
    given = pd.Series(read_labels(labels), dtype=object)
    if len(given) != texts:
        raise InputError(f"labels: {_format_count(len(given), 'label')} for {_format_count(texts, 'text')}; {allowed}")
    missing = int(given.isna().sum())
    if missing:
        raise InputError(f"labels: {missing} of {_format_count(texts, 'label')} missing; {allowed}")
    names = given.map(_name_class)
    indices_N, _ = pd.factorize(names, sort=True)
    return indices_N.astype(np.int64)


def _name_class(label: Any) -> str:
    """Return the name of a class. Equal numbers, such as 1 and 1.0, have the same name."""
    is_whole = isinstance(label, Real) and float(label).is_integer()
    return str(int(label)) if is_whole else str(label)


def add_classes(documents: Sequence[Document], classes: npt.NDArray[np.int64]) -> list[Document]:
    """Return copies of the texts with `classes` as labels and as predicted classes."""
    pairs = zip(documents, classes.tolist(), strict=True)
    return [replace(document, label=number, predicted=number) for document, number in pairs]


def read_labels(labels: Any) -> list[Any]:
    """Return the labels as a list; raise `InputError` for a single value and for collections without order."""
    is_unordered = isinstance(labels, Mapping | Set)
    if isinstance(labels, str | bytes) or is_unordered or not isinstance(labels, Iterable):
        raise InputError(f"labels: {shorten(repr(labels))}; pass a list with a class for each text")
    return list(labels)


def _format_count(number: int, noun: str) -> str:
    """Return a number with a noun, in the plural if necessary."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def check_own_share_sample(by: Any, max_texts: Any, max_length: Any, *arguments: str) -> OwnShareSample:
    """Return the sample of texts and the checked argument `by` of `own_share`; raise `InputError` for invalid values.

    `max_texts` is the maximum number of texts, and `max_length` the maximum number of tokens of a text. `arguments` are
    the two names of these arguments in the user's call, for error messages; by default `max_texts` and `max_length`.
    """
    check_name("by", by, OWN_SHARE_WAYS)
    argument_names = arguments or ("max_texts", "max_length")
    for argument, number in zip(argument_names, (max_texts, max_length), strict=True):
        if not is_whole_number(number) or number < 1:
            raise InputError(f"{argument}: {shorten(repr(number))}; allowed: a whole number, 1 or more")
    return OwnShareSample(int(max_texts), int(max_length), by)


def check_control_names(controls: Any, labels: Any) -> None:
    """Raise `InputError` for an unknown control, or if a control needs labels and there are none."""
    if not isinstance(controls, list):
        raise InputError(f"controls: {shorten(repr(controls))}; allowed: a list of {', '.join(CONTROL_NAMES)}")
    for name in controls:
        check_name("controls", name, CONTROL_NAMES)
    if CLASS_SHARE in controls and labels is None:
        raise InputError("controls: class_share needs classes; pass `labels` with a class for each text")


def check_controls(controls: Any, classes: npt.NDArray[np.int64] | None, texts: int) -> None:
    """Raise `InputError` for an unknown control, or if there are too few texts or classes for a control.

    `classes` contains the class of each text, and `texts` is the number of texts.
    """
    check_control_names(controls, classes)
    for name in controls:
        if name in ("corpus_value", SWAP) and texts < 2:
            raise InputError(f"controls: {name} needs other texts; pass two texts or more")
    if classes is None or CLASS_SHARE not in controls:
        return
    _, class_sizes = np.unique(classes, return_counts=True)
    smallest = class_sizes.min()
    if len(class_sizes) < 2 or smallest < MIN_CLASS_TEXTS:
        raise InputError(
            f"labels: {len(class_sizes)} classes, of which the smallest has {smallest} texts; class_share needs two or "
            f"more classes of {MIN_CLASS_TEXTS} or more texts each"
        )


def read_names(names: Any) -> Any:
    """Return one or several names as a list. Return invalid values unchanged, because later checks report them."""
    if isinstance(names, str | bytes):
        return [names]
    return list(names) if hasattr(names, "__iter__") else names


def read_positions(rows: Any, tokens: int) -> list[int]:
    """Return the token positions in the user's argument `rows`, or all positions if `rows` is None.

    Raise `InputError` for invalid positions. `tokens` is the number of tokens of the text.
    """
    if rows is None:
        return list(range(tokens))
    positions = [rows]
    is_scalar = np.ndim(rows) == 0  # also True for a tensor without dimensions
    if isinstance(rows, Iterable) and not isinstance(rows, str) and not is_scalar:
        positions = list(rows)
    are_valid = all(is_whole_number(position) and 0 <= position < tokens for position in positions)
    if not positions or not are_valid:
        raise InputError(f"rows: {shorten(repr(rows))}; allowed: token positions, 0 to {tokens - 1}")
    return positions
