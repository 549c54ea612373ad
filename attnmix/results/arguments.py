"""Conversion and validation of the arguments of `measure`, `compare` and `capture`, before any computation."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.errors import InputError
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
    """Raise `InputError` unless `model` is a `Model` from `load`. `call` is an example for the message."""
    if not isinstance(model, Model):
        raise InputError(f"model: got {type(model).__name__}; allowed: the result of load(...), as in {call}")


def choose_ratios(model: Model, methods: Any) -> list[str]:
    """Return the ratios to measure, by default all ratios of the model's family; raise `InputError` for others."""
    family = family_of(model.network.base_model.config)
    if methods is None:
        return family.present(RATIOS)
    names = read_names(methods)
    check_kinds("methods", names, RATIOS)
    names = checked_section(MeasureParameters, methods=names).methods
    present = family.present(names)
    absent = sorted(set(names) - set(present))
    if absent:
        raise InputError(f"methods: the model family {family.model_type} does not have {', '.join(absent)}; omit them")
    return present


def tokenize_texts(model: Model, texts: Any, max_length: int | None) -> TokenizedTexts:
    """Return the tokenized texts, and warn of truncated texts."""
    base: Any = model.network.base_model
    longest = longest_text(base.config)
    if max_length is not None:
        number = int(max_length) if is_whole_number(max_length) else max_length
        longest = checked_section(CaptureParameters, max_length=number).max_length
        check_length("max_length", longest, base.config)
    rows = base.get_input_embeddings().num_embeddings
    tokenized = tokenize_given(texts, model.tokenizer, base.config, rows, longest, model.name)
    side = "last" if model.tokenizer.truncation_side == "left" else "first"
    counts = tokenized.texts[["tokens", "whole_tokens"]]
    for number, (tokens, whole_tokens) in enumerate(counts.itertuples(index=False)):
        if tokens < whole_tokens:
            extent = f"{whole_tokens} tokens, of which the {side} {longest} are measured"
            warnings.warn(f"text {number} has {extent}", stacklevel=3)
    return tokenized


def read_classes(labels: Any, texts: int) -> npt.NDArray[np.int64] | None:
    """Return the class index of each text `[N]`, or None; raise `InputError` unless each text has one label."""
    if labels is None:
        return None
    allowed = f"allowed: a class for each of the {texts} texts"
    given = pd.Series(read_labels(labels), dtype=object)
    if len(given) != texts:
        raise InputError(f"labels: {_format_count(len(given), 'label')} for {_format_count(texts, 'text')}; {allowed}")
    missing = int(given.isna().sum())
    if missing:
        raise InputError(f"labels: {missing} of {_format_count(texts, 'label')} missing; {allowed}")
    return pd.factorize(given.map(str), sort=True)[0].astype(np.int64)


def add_classes(documents: Sequence[Document], classes: npt.NDArray[np.int64]) -> list[Document]:
    """Return the texts with `classes` as labels and predictions."""
    pairs = zip(documents, classes.tolist(), strict=True)
    return [replace(document, label=number, predicted=number) for document, number in pairs]


def read_labels(labels: Any) -> list[Any]:
    """Return the labels as a list; raise `InputError` for a single value."""
    if isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
        raise InputError(f"labels: {shorten(repr(labels))}; pass a list with a class for each text")
    return list(labels)


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def check_own_share_sample(by: Any, max_texts: Any, max_length: Any, *arguments: str) -> OwnShareSample:
    """Return the sample of the own share; raise `InputError` for invalid values.

    `arguments` are the names of `max_texts` and `max_length` in the user's call, for messages.
    """
    check_name("by", by, OWN_SHARE_WAYS)
    names = arguments or ("max_texts", "max_length")
    for argument, number in zip(names, (max_texts, max_length), strict=True):
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
    """Raise `InputError` for an unknown control, or if there are too few texts or classes for a control."""
    check_control_names(controls, classes)
    for name in controls:
        if name in ("corpus_value", SWAP) and texts < 2:
            raise InputError(f"controls: {name} needs other texts; pass two texts or more")
    if classes is None or CLASS_SHARE not in controls:
        return
    sizes = np.unique(classes, return_counts=True)[1]
    if len(sizes) < 2 or sizes.min() < MIN_CLASS_TEXTS:
        raise InputError(
            f"labels: {len(sizes)} classes, of which the smallest has {sizes.min()} texts; class_share needs two or "
            f"more classes of {MIN_CLASS_TEXTS} or more texts each"
        )


def read_names(names: Any) -> Any:
    """Return one or several names as a list; return invalid values unchanged, for the error message."""
    if isinstance(names, str | bytes):
        return [names]
    return list(names) if hasattr(names, "__iter__") else names


def is_whole_number(value: Any) -> bool:
    """Return True for an integer that is not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def read_positions(rows: Any, tokens: int) -> list[int]:
    """Return the token positions in `rows`, by default all; raise `InputError` for invalid positions."""
    if rows is None:
        return list(range(tokens))
    positions = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, str) else [rows]
    if not positions or not all(is_whole_number(position) and 0 <= position < tokens for position in positions):
        raise InputError(f"rows: {shorten(repr(rows))}; allowed: token positions, 0 to {tokens - 1}")
    return positions
