"""What a table of reviews must be like before work starts: columns, texts, classes and groups, each by one error."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from attnmix.core.errors import InputError
from attnmix.core.options import DatasetParameters, is_whole, says_something
from attnmix.data.files import LINE

PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text_a", "text_b"),
)
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
SHOWN = 5  # classes in one message


def checked(frame: pd.DataFrame, dataset: DatasetParameters, where: str) -> pd.DataFrame:
    """Columns `text`, `label` and, with `dataset.group_column`, `group`; `InputError` for rows that cannot be used."""
    columns = {"text": dataset.text_column, "label": dataset.label_column, "group": dataset.group_column}
    chosen = {key: name for key, name in columns.items() if name is not None}
    for key, name in chosen.items():
        if name not in frame.columns:
            there = ", ".join(map(repr, frame.columns))
            pair = _pair(frame) if key == "text" else ""
            raise InputError(f"dataset.{key}_column: {where} has no column {name!r}; it has {there}{pair}")
    table = pd.DataFrame({key: frame[name] for key, name in chosen.items()})
    for key, what, usable in (
        ("text", "texts that are values of another kind", lambda each: isinstance(each, str) or _is_missing(each)),
        ("text", "rows without a text", lambda each: isinstance(each, str) and says_something(each)),
        ("text", "texts with a NUL character", lambda each: "\0" not in each),
        ("text", "texts with half a character (a lone surrogate)", is_whole),
        ("label", "missing labels", lambda each: not _is_missing(each)),
        ("label", "labels that are no word, number or truth value", _is_name),
        ("group", "missing groups", lambda each: not _is_missing(each)),
        ("group", "groups that are no word, number or truth value", _is_name),
    ):
        unusable = [number for number, each in enumerate(table.get(key, ())) if not usable(each)]
        if unusable:
            first = f"{'line' if frame.index.name == LINE else 'row'} {frame.index[unusable[0]]}"
            raise InputError(f"{where}: {len(unusable)} {what} in {chosen[key]!r}, the first in {first}")
    return table


def _pair(frame: pd.DataFrame) -> str:
    for first, second in PAIRS:
        if {first, second} <= set(frame.columns):
            return f"; pairs of texts ({first}, {second}) are out of scope: put what shall be read into one column"
    return ""


def _is_missing(value: Any) -> bool:
    return (isinstance(value, str) and not value.strip()) or (pd.api.types.is_scalar(value) and bool(pd.isna(value)))


def _is_name(value: Any) -> bool:
    return isinstance(value, (str, Real, np.bool_))


def with_classes(tables: Mapping[str, pd.DataFrame], dataset: DatasetParameters) -> dict[str, pd.DataFrame]:
    """`checked` tables with classes numbered from 0 as `label`, and called what they are in the data as `label_name`.

    Whole numbers and words are put in order; what a data set numbers itself stays in its order. `InputError` where
    there are fewer than two classes, or values that are none.
    """
    where = f"dataset.label_column: {dataset.label_column!r} of {dataset.name}"
    labels = pd.concat([table["label"] for table in tables.values()])
    if isinstance(labels.dtype, pd.CategoricalDtype) and all(isinstance(each, str) for each in labels.cat.categories):
        present = set(labels)
        classes = {name: name for name in labels.cat.categories if name in present}
    else:
        classes = _classes(labels, where)
    order = list(dict.fromkeys(classes.values()))
    if len(order) < 2:
        raise InputError(f"{where} holds {len(order)} class ({shown(order)}); two or more are needed")
    folded = Counter(str(name).casefold() for name in order)
    alike = [name for name in order if folded[str(name).casefold()] > 1]
    if alike:
        logging.warning("%s: classes that differ only in case: %s", where, shown(alike))
    places = {name: number for number, name in enumerate(order)}
    return {
        split: table.assign(
            text=table["text"].astype("str"),
            label=np.array([places[classes[value]] for value in table["label"]], dtype=np.int64),
            label_name=[str(classes[value]) for value in table["label"]],
        )
        for split, table in tables.items()
    }


def _classes(labels: pd.Series, where: str) -> dict[Any, Any]:
    """Each value that occurs, and the class that it stands for, in the order of the classes."""
    kinds = {_kind(label) for label in labels}
    values = labels.unique().tolist()
    if len(kinds) > 1:
        raise InputError(f"{where} holds {' and '.join(sorted(kinds))} ({shown(values)}); write all in one way")
    if kinds == {"words"} and not all(NUMBER.fullmatch(value.strip()) for value in values):
        return dict(sorted(((value, value.strip()) for value in values), key=lambda each: each[1]))
    if kinds == {"truth values"}:
        return {value: bool(value) for value in sorted(values)}
    broken = [value for value in values if not float(value).is_integer()]
    if broken:
        raise InputError(
            f"{where} holds {len(broken)} numbers that are not whole ({shown(broken)}); "
            "a class is a word, a whole number or a truth value"
        )
    return dict(sorted(((value, int(float(value))) for value in values), key=lambda each: each[1]))


def _kind(label: Any) -> str:
    return "words" if isinstance(label, str) else "truth values" if isinstance(label, (bool, np.bool_)) else "numbers"


def shown(values: Sequence[Any]) -> str:
    """The first of them, as they are written."""
    said = [repr(value) if isinstance(value, str) else str(value) for value in values[:SHOWN]]
    return ", ".join([*said, "..."] if len(values) > SHOWN else said)
