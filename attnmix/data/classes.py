"""The classes of labelled reviews, from the values of their label column: words, whole numbers or truth values.

Words stay as they are written, so `01` and `1` are two classes. Numbers are sorted as numbers.
"""

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from attnmix.core.errors import InputError
from attnmix.core.store.texts import TEXT_COLUMNS
from attnmix.core.terminal import DIRECTIONS

MAX_SHOWN_CLASSES = 5  # in one message
WHOLE = re.compile(r"-?(?:0|[1-9][0-9]*)")
WHOLE_WITH_ZERO = re.compile(rf"({WHOLE.pattern})\.0")  # as a column of numbers with a gap is written
DECIMAL = re.compile(r"[-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?")
FORMULA = re.compile(r"[=@]|[-+]+[^-+0-9.,\s]|[-+].*[A-Za-z(|!]")
"""The start of what a spreadsheet computes when it opens a csv file: `=1+1`, `@sum`, `-x`; but not `-1` and not `+`."""
UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")  # categories of Unicode: control characters, half characters, line breaks


def with_classes(tables: Mapping[str, pd.DataFrame], where: str) -> dict[str, pd.DataFrame]:
    """Return the tables with classes numbered from 0 as `label`, and their names as `label_name`.

    Raises `InputError`, which begins with `where`, for values that are no classes and names that cannot be written out.
    """
    classes = _classes(pd.concat([table["label"] for table in tables.values()]), where)
    order = list(dict.fromkeys(classes.values()))
    if len(order) < 2:
        raise InputError(f"{where} holds {len(order)} class ({shown_classes(order)}); two or more are needed")
    for name in order:
        problem = name_problem(str(name))
        if problem:
            raise InputError(f"{where} holds the class {name!r}, {problem}")
    _warn_of_alike(order, where)
    numbers = {name: number for number, name in enumerate(order)}
    named = {}
    for split, table in tables.items():
        names = [classes[value] for value in table["label"]]
        table = table.assign(
            label=np.array([numbers[name] for name in names], dtype=np.int64),
            label_name=[str(name) for name in names],
        )
        for column in TEXT_COLUMNS:
            if column in table:
                table[column] = table[column].astype("str")
        named[split] = table
    return named


def named_classes(values: pd.Series, names: Sequence[str]) -> pd.Series:
    """Return codes of classes, or names, as names in the source's order; a code without a name is missing."""
    codes = [_code(value, names) for value in values]
    return pd.Series(pd.Categorical.from_codes(codes, pd.Index(list(names))), index=values.index)


def name_problem(name: str) -> str | None:
    """Return why a class may not have this name in tables and on a terminal, or None where it may."""
    if any(unicodedata.category(letter) in UNPRINTABLE or letter in DIRECTIONS for letter in name):
        return "whose name holds control characters; rename it"
    if FORMULA.match(unicodedata.normalize("NFKC", name)):
        return "which a spreadsheet would run as a formula; rename it so that it begins with a letter"
    return None


def shown_classes(values: Sequence[Any]) -> str:
    """Return the first classes for a message, words in quotes."""
    words = [repr(value) if isinstance(value, str) else str(value) for value in values[:MAX_SHOWN_CLASSES]]
    return ", ".join([*words, "..."] if len(values) > MAX_SHOWN_CLASSES else words)


def _code(value: Any, names: Sequence[str]) -> int:
    """Return the number of a class that is given by its number or name, -1 of any other value."""
    if isinstance(value, str) and value in names:
        return list(names).index(value)
    try:
        code = int(value)
    except (OverflowError, TypeError, ValueError):
        return -1
    return code if code == float(value) and 0 <= code < len(names) else -1


def _classes(labels: pd.Series, where: str) -> dict[Any, Any]:
    """Return the class of each value that occurs, in the order of the classes: the source's own, else sorted."""
    values = labels.unique().tolist()
    if isinstance(labels.dtype, pd.CategoricalDtype):
        categories = labels.cat.categories
        if all(isinstance(name, str) for name in categories):
            return {name: name for name in categories if name in values}
    kinds = {_kind(label) for label in labels}
    if len(kinds) > 1:
        shown = shown_classes(values)
        raise InputError(f"{where} mixes words, numbers or truth values ({shown}); write all in one way")
    classes: dict[Any, Any]
    if kinds == {"truth value"}:
        classes = {value: bool(value) for value in values}
    elif kinds == {"word"}:
        classes = _word_classes(values, where)
    else:
        _check_whole(values, values, where)
        classes = {value: int(value) for value in values}
    return dict(sorted(classes.items(), key=lambda item: item[1]))


def _kind(label: Any) -> str:
    if isinstance(label, str):
        return "word"
    return "truth value" if isinstance(label, (bool, np.bool_)) else "number"


def _word_classes(values: Sequence[str], where: str) -> dict[str, str] | dict[str, int]:
    """Return words as they are, and whole numbers that are all written in one way as numbers."""
    words = {value: value.strip() for value in values}
    if all(WHOLE.fullmatch(word) for word in words.values()):
        return {value: int(word) for value, word in words.items()}
    if all(WHOLE_WITH_ZERO.fullmatch(word) for word in words.values()):
        return {value: int(word.removesuffix(".0")) for value, word in words.items()}
    if all(DECIMAL.fullmatch(word) for word in words.values()):
        _check_whole([float(word) for word in words.values()], values, where)
    return words


def _check_whole(numbers: Sequence[Any], values: Sequence[Any], where: str) -> None:
    """Raise `InputError` for numbers, read from `values`, that are measurements and not classes."""
    if any(number % 1 != 0 for number in numbers):  # also of an infinite one
        raise InputError(f"{where} holds numbers that are not whole ({shown_classes(values)}), which are no classes")


def _warn_of_alike(names: Sequence[Any], where: str) -> None:
    """Warn of classes that may be meant as one: `Good` and `good`, `01` and `1`."""
    likenesses = {name: _likeness(str(name)) for name in names}
    counts = Counter(likenesses.values())
    alike = [name for name in names if counts[likenesses[name]] > 1]
    if alike:
        logging.warning("%s: classes that differ only in how they are written: %s", where, shown_classes(alike))


def _likeness(name: str) -> str | float:
    return float(name) if DECIMAL.fullmatch(name) else name.casefold()
