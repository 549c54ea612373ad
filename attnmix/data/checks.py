"""Checks of a table of reviews before work starts: columns, texts, classes and groups, each by one error."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from attnmix.core.errors import InputError, text_problem
from attnmix.core.options import DatasetParameters

SHOWN_CLASSES = 5  # in one message


def checked(frame: pd.DataFrame, dataset: DatasetParameters, where: str) -> pd.DataFrame:
    """Return columns `text`, `label` and, with `dataset.group_column`, `group`.

    Raises `InputError` for rows that cannot be used; rows are numbered as in the index of `frame`.
    """
    columns = {"text": dataset.text_column, "label": dataset.label_column, "group": dataset.group_column}
    chosen = {key: name for key, name in columns.items() if name is not None}
    for key, name in chosen.items():
        if name not in frame.columns:
            raise InputError(
                f"dataset.{key}_column: {where} has no column {name!r}; it has {', '.join(map(repr, frame.columns))} "
                "(a review is one column: pairs of texts are out of scope)"
            )
    table = pd.DataFrame({key: frame[name] for key, name in chosen.items()})
    for key, name in chosen.items():
        for row, value in table[key].items():
            if problem := _problem(key, value):
                raise InputError(f"{where}: {problem} in column {name!r}, row {row}")
    return table


def _problem(key: str, value: Any) -> str | None:
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return f"the {key} is missing"
    if key == "text":
        return text_problem(value) if isinstance(value, str) else "the text is a value of another kind"
    if not isinstance(value, (str, Real, np.bool_)):
        return f"the {key} is no word, number or truth value"
    return f"the {key} is missing" if not str(value).strip() else None


def with_classes(tables: Mapping[str, pd.DataFrame], dataset: DatasetParameters) -> dict[str, pd.DataFrame]:
    """Return `checked` tables with classes numbered from 0 as `label`, and their names as `label_name`.

    Whole numbers and words are sorted; a data set's own numbering is kept. Raises `InputError` where there are fewer
    than two classes, or values that are none.
    """
    where = f"dataset.label_column: {dataset.label_column!r} of {dataset.name}"
    labels = pd.concat([table["label"] for table in tables.values()])
    if isinstance(labels.dtype, pd.CategoricalDtype) and all(isinstance(each, str) for each in labels.cat.categories):
        present = set(labels)
        classes: dict[Any, Any] = {name: name for name in labels.cat.categories if name in present}
    else:
        classes = _classes(labels, where)
    order = list(dict.fromkeys(classes.values()))
    if len(order) < 2:
        raise InputError(f"{where} holds {len(order)} class ({shown(order)}); two or more are needed")
    folded = Counter(str(name).casefold() for name in order)
    alike = [name for name in order if folded[str(name).casefold()] > 1]
    if alike:
        logging.warning("%s: classes that differ only in case: %s", where, shown(alike))
    numbers = {name: number for number, name in enumerate(order)}
    return {
        split: table.assign(
            text=table["text"].astype("str"),
            label=np.array([numbers[classes[value]] for value in table["label"]], dtype=np.int64),
            label_name=[str(classes[value]) for value in table["label"]],
        )
        for split, table in tables.items()
    }


def _classes(labels: pd.Series, where: str) -> dict[Any, Any]:
    """Return the class of each value that occurs, in the order of the classes."""
    values = labels.unique().tolist()
    kinds = {isinstance(label, str) + 2 * isinstance(label, (bool, np.bool_)) for label in labels}
    if len(kinds) > 1:
        raise InputError(f"{where} mixes words, numbers or truth values ({shown(values)}); write all in one way")
    if kinds == {2}:
        return {value: bool(value) for value in sorted(values)}
    numbers = pd.to_numeric(pd.Series(values), errors="coerce")
    if numbers.isna().any():
        return dict(sorted(((value, value.strip()) for value in values), key=lambda each: each[1]))
    if not all(float(number).is_integer() for number in numbers):
        raise InputError(f"{where} holds numbers that are not whole ({shown(values)}), which are no classes")
    return dict(sorted(((value, int(float(value))) for value in values), key=lambda each: each[1]))


def shown(values: Sequence[Any]) -> str:
    """Return the first values as a list in words."""
    words = [repr(value) if isinstance(value, str) else str(value) for value in values[:SHOWN_CLASSES]]
    return ", ".join([*words, "..."] if len(values) > SHOWN_CLASSES else words)
