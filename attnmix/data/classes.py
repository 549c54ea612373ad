"""The classes of labelled texts, from the values of the label column: words, integers or truth values.

Words are kept unchanged, so `01` and `1` are different classes. Numbers are sorted numerically. If a description
defines class names, the column contains either codes (0 for the first name) or names, in all files and splits:
`choose_reading`.
"""

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from attnmix.core.errors import InputError
from attnmix.core.store.texts import TEXT_COLUMNS
from attnmix.core.terminal import DIRECTIONS, shorten

Reading = Literal["codes", "names"]
TRUTH_NAMES = {"true", "false"}
MAX_SHOWN_CLASSES = 5  # maximum number of classes in a message
WHOLE = re.compile(r"-?(?:0|[1-9][0-9]*)")
WHOLE_WITH_ZERO = re.compile(rf"({WHOLE.pattern})\.0")  # format of integers in a column with missing values
CODE = re.compile(rf"({WHOLE.pattern})(?:\.0)?")
DECIMAL = re.compile(r"[-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?")
FORMULA = re.compile(r"[=@]|[-+]+[^-+0-9.,\s]|[-+].*[A-Za-z(|!]")
"""The beginning of a spreadsheet formula in a csv file, such as `=1+1`, `@sum` and `-x`, but not `-1` or `+`."""
INVISIBLE = "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"
"""Invisible letters and marks, in addition to the category Cf and the variation selectors."""
UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")  # Unicode categories: control characters, surrogates, line breaks


class FileLabels(NamedTuple):
    """The label column of one file."""

    shown: str
    values: pd.Series
    has_types: bool  # unlike csv and tsv


def with_classes(tables: Mapping[str, pd.DataFrame], where: str) -> dict[str, pd.DataFrame]:
    """Return the tables with class indices from 0 as `label`, and class names as `label_name`.

    Raise `InputError`, prefixed with `where`, for values that are not classes and for unprintable names.
    """
    classes = _classes(_join([table["label"] for table in tables.values()]), where)
    order = list(dict.fromkeys(classes.values()))
    if len(order) < 2:
        raise InputError(f"{where} holds {len(order)} class ({shown_classes(order)}); two or more are needed")
    for name in order:
        problem = name_problem(str(name))
        if problem:
            raise InputError(f"{where} holds the class {shown_classes([name])}, {problem}")
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


def choose_reading(files: Sequence[FileLabels], names: Sequence[str], where: str) -> Reading:
    """Return whether the label column of all files contains codes or names, ignoring unlabelled (-1) and missing rows.

    Numbers are codes. Words are names, or codes if some words are not names. Words of files without types (csv, tsv)
    are ambiguous if all of these words are both codes and names, with different meanings. Raise `InputError` for
    ambiguous words, for any other value, and for files that contradict each other.
    """
    if len(set(names)) < len(names):
        raise InputError(f"{where}: its classes have the names {shown_classes(names)}; each name once")
    first: dict[Reading, str] = {}  # the first file with this reading as the only possibility
    is_untyped = False
    differing: dict[str, None] = {}
    for file in files:
        present = _present_values(file, names, where)
        readings = _possible_readings(present, names, f"{where} ({file.shown})")
        if len(readings) == 1:
            first.setdefault(readings[0], file.shown)
        else:
            is_untyped = is_untyped or not file.has_types
            differing.update({value: None for value in present if names[_code(value, len(names))] != value})
    if len(first) > 1:
        problem = f"holds codes in {first['codes']} and names in {first['names']}"
        raise InputError(f"{where} {problem}; write all labels as codes or all as names")
    if first:
        return next(iter(first))
    if is_untyped and differing:
        shown = shown_classes(list(differing))
        problem = f"holds {shown}, which are names of classes, and codes of other ones, in a file without types"
        raise InputError(f"{where} {problem}; save the file as jsonl, codes as numbers, or rename the classes")
    return "names"


def _present_values(file: FileLabels, names: Sequence[str], where: str) -> list[Any]:
    """Return the unique labels of a file without missing values; `True` and 1 are equal but different labels."""
    values: dict[tuple[str, Any], None] = {}
    for row, value in file.values.items():
        if not pd.api.types.is_scalar(value):
            raise InputError(f"{where} ({file.shown}): the label is no word, number or truth value, row {row}")
        values[_kind(value), value] = None
    return [value for _, value in values if not _is_gap(value, names)]


def _possible_readings(present: Sequence[Any], names: Sequence[str], where: str) -> list[Reading]:
    """Return the possible readings of the labels of a file; raise `InputError` if there are none."""
    kinds = {_kind(value) for value in present}
    if len(kinds) > 1:
        shown = shown_classes(present)
        raise InputError(f"{where} mixes words and numbers ({shown}); write all labels as codes or all as names")
    if kinds == {"truth value"}:
        if len(names) == 2:  # False is the code 0 and True is 1, unless these are the names
            return ["names" if {name.casefold() for name in names} == TRUTH_NAMES else "codes"]
        problem = f"holds truth values, and its classes have the names {shown_classes(names)}"
        raise InputError(f"{where} {problem}; write all labels as codes or all as names")
    not_names = [value for value in present if not isinstance(value, str) or value not in names]
    not_codes = [value for value in present if _code(value, len(names)) < 0]
    readings: list[Reading] = []
    if not not_codes:
        readings.append("codes")
    if not not_names:
        readings.append("names")
    if not readings:
        unknown = next((value for value in not_codes if value in not_names), not_codes[0])
        allowed = f"the names {shown_classes(names)}, or in all rows the codes 0 to {len(names) - 1}"
        raise InputError(f"{where} holds {shown_classes([unknown])}, which is no class of its description; {allowed}")
    return readings


def named_classes(values: pd.Series, names: Sequence[str], reading: Reading) -> pd.Series:
    """Return codes or names of classes as names, in the order of the source; missing values are kept."""
    numbers: dict[Any, int] = {name: number for number, name in enumerate(names)}
    truths = {name.casefold() == "true": number for name, number in numbers.items()}
    codes = []
    for value in values:
        if reading == "names" and isinstance(value, (bool, np.bool_)):
            codes.append(truths[bool(value)])
        elif reading == "names":
            codes.append(numbers.get(value, -1))
        else:
            codes.append(_code(value, len(names)))
    return pd.Series(pd.Categorical.from_codes(codes, pd.Index(list(names))), index=values.index)


def name_problem(name: str) -> str | None:
    """Return why a class name is unsuitable for tables and terminals, or None for a valid name."""
    if any(unicodedata.category(letter) in UNPRINTABLE or letter in DIRECTIONS for letter in name):
        return "whose name holds control characters; rename it"
    if FORMULA.match(unicodedata.normalize("NFKC", name)):
        return "which a spreadsheet would run as a formula; rename it so that it begins with a letter"
    return None


def shown_classes(values: Sequence[Any]) -> str:
    """Return the first classes for a message, with words in quotes."""
    words = [repr(shorten(value)) if isinstance(value, str) else str(value) for value in values[:MAX_SHOWN_CLASSES]]
    return ", ".join([*words, "..."] if len(values) > MAX_SHOWN_CLASSES else words)


def _is_gap(value: Any, names: Sequence[str]) -> bool:
    """Return True for a missing label, and for -1, the hub's code of unlabelled rows, unless it is a class name."""
    if isinstance(value, str):
        return value.strip() in ("", "-1") and value not in names
    if not pd.api.types.is_scalar(value):
        return False
    return bool(pd.isna(value)) or value == -1


def _code(value: Any, number: int) -> int:
    """Return the class index for a code from 0 to `number` - 1, and -1 for any other value."""
    if isinstance(value, str):
        match = CODE.fullmatch(value.strip())
        code = float(match[1]) if match else -1.0
    elif isinstance(value, (Real, np.bool_)):
        code = float(value)
    else:
        code = -1.0
    return int(code) if code % 1 == 0 and 0 <= code < number else -1


def _join(labels: Sequence[pd.Series]) -> pd.Series:
    """Return all labels as Python numbers, because pandas loses digits when joining large numbers of two types."""
    if not all(isinstance(values.dtype, pd.CategoricalDtype) for values in labels):
        labels = [values.astype(object) for values in labels]
    joined: pd.Series = pd.concat(labels)
    return joined


def _classes(labels: pd.Series, where: str) -> dict[Any, Any]:
    """Return the class of each unique value, in the class order of the source, otherwise in sorted order."""
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
    """Return words without surrounding spaces, or integers if all words have the same integer format."""
    words = {value: value.strip() for value in values}
    counts = Counter(words.values())
    merged = [value for value, word in words.items() if counts[word] > 1]
    if merged:
        message = "%s: labels that differ only in spaces around them are one class: %s"
        logging.warning(message, where, shown_classes(sorted(merged)))
    if all(WHOLE.fullmatch(word) for word in words.values()):
        return {value: int(word) for value, word in words.items()}
    if all(WHOLE_WITH_ZERO.fullmatch(word) for word in words.values()):
        return {value: int(word.removesuffix(".0")) for value, word in words.items()}
    if all(DECIMAL.fullmatch(word) for word in words.values()):
        _check_whole([float(word) for word in words.values()], values, where)
    return words


def _check_whole(numbers: Sequence[Any], values: Sequence[Any], where: str) -> None:
    """Raise `InputError` for numbers, parsed from `values`, that are not integers and therefore not classes."""
    if any(number % 1 != 0 for number in numbers):  # also true for infinite numbers
        raise InputError(f"{where} holds numbers that are not whole ({shown_classes(values)}), which are no classes")


def _warn_of_alike(names: Sequence[Any], where: str) -> None:
    """Warn of possible duplicate classes: `Good` and `good`, `01` and `1`, or names with the same appearance."""
    words = [str(name) for name in names]
    likenesses = [_likeness(word) for word in words]
    counts = Counter(likenesses)
    alike = [word for word, likeness in zip(words, likenesses, strict=True) if counts[likeness] > 1]
    if alike:
        looks = Counter(_visible(word) for word in alike)
        shown = [ascii(shorten(word)) if looks[_visible(word)] > 1 else repr(shorten(word)) for word in alike]
        listed = ", ".join([*shown[:MAX_SHOWN_CLASSES], "..."] if len(shown) > MAX_SHOWN_CLASSES else shown)
        logging.warning("%s: classes that differ only in how they are written: %s", where, listed)


def _visible(name: str) -> str:
    """Return the visible form of a name: composed, without invisible characters, with single spaces."""
    shown = [letter for letter in unicodedata.normalize("NFKC", name) if not _is_invisible(letter)]
    return " ".join(unicodedata.normalize("NFKC", "".join(shown)).split())


def _is_invisible(letter: str) -> bool:
    return unicodedata.category(letter) == "Cf" or letter in INVISIBLE or "\ufe00" <= letter <= "\ufe0f"


def _likeness(name: str) -> str | Decimal:
    visible = _visible(name)
    return Decimal(visible) if DECIMAL.fullmatch(visible) else unicodedata.normalize("NFKC", visible.casefold())
