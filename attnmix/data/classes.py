"""The classes of labelled texts, derived from the values of the label column: strings, integers or booleans.

Strings such as `01` and `1` are different classes. Numbers are sorted numerically. If the dataset's description defines
class names, the labels in all files and splits must be either only codes (0 for the first name) or only names.
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
WHOLE = re.compile(r"-?(?:0|[1-9][0-9]*)")  # an integer without leading zeros
WHOLE_WITH_ZERO = re.compile(rf"({WHOLE.pattern})\.0")  # format of integers in a column with missing values
CODE = re.compile(rf"({WHOLE.pattern})(?:\.0)?")  # a class code in an untyped file (csv, tsv), such as `1` or `1.0`
DECIMAL = re.compile(r"[-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?")  # a number, also in scientific notation
FORMULA = re.compile(r"[=@]|[-+]+[^-+0-9.,\s]|[-+].*[A-Za-z(|!]")
"""The beginning of a spreadsheet formula in a csv file, such as `=1+1`, `@sum` and `-x`, but not `-1` or `+`."""
INVISIBLE = "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"
"""Invisible letters and marks, in addition to the category Cf and the variation selectors."""
UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")  # Unicode categories: control characters, surrogates, line breaks


class FileLabels(NamedTuple):
    """The label column of one file."""

    shown: str
    """The name of the file in messages."""
    values: pd.Series
    has_types: bool
    """False for csv and tsv, in which all values are strings."""


def with_classes(tables: Mapping[str, pd.DataFrame], where: str) -> dict[str, pd.DataFrame]:
    """Return the tables with class indices from 0 as `label`, and class names as `label_name`.

    Raise `InputError`, prefixed with `where`, for fewer than two classes and for values or names that are not allowed.
    """
    all_labels = _join_labels([table["label"] for table in tables.values()])
    class_by_label = _find_classes(all_labels, where)
    classes = list(dict.fromkeys(class_by_label.values()))
    _check_classes(classes, where)
    index_by_class = {name: index for index, name in enumerate(classes)}
    named_tables = {}
    for split, table in tables.items():
        names = [class_by_label[label] for label in table["label"]]
        named_table = table.assign(
            label=np.array([index_by_class[name] for name in names], dtype=np.int64),
            label_name=[str(name) for name in names],
        )
        for column in TEXT_COLUMNS:
            if column in named_table:
                named_table[column] = named_table[column].astype("str")
        named_tables[split] = named_table
    return named_tables


def _check_classes(classes: Sequence[Any], where: str) -> None:
    """Raise `InputError` for fewer than two classes and for invalid names; warn about names that are nearly equal."""
    if len(classes) < 2:
        raise InputError(f"{where} contains {len(classes)} class ({shown_classes(classes)}); two or more are required")
    for name in classes:
        problem = name_problem(str(name))
        if problem:
            raise InputError(f"{where} contains the class {shown_classes([name])}, {problem}")
    _warn_of_alike(classes, where)


def choose_reading(files: Sequence[FileLabels], names: Sequence[str], where: str) -> Reading:
    """Return whether the labels in all files are class codes or class `names`; missing labels and -1 are ignored.

    Numbers are codes. Strings are names if all of them are names of classes; otherwise, they are codes. In untyped
    files (csv, tsv), names such as "1" are ambiguous if all strings are also codes, and if names and codes result in
    different classes. Raise `InputError`, prefixed with `where`, for ambiguous strings, for values that are neither
    codes nor names, and for files that contradict each other.
    """
    if len(set(names)) < len(names):
        raise InputError(f"{where}: the class names {shown_classes(names)} are not unique; rename the classes")
    first_file_by_reading: dict[Reading, str] = {}  # the first file that allows only this interpretation
    ambiguous_labels: list[Any] = []  # labels of files that allow both interpretations
    for file in files:
        labels = _list_labels(file, names, where)
        possible_readings = _find_readings(labels, names, f"{where} ({file.shown})")
        if len(possible_readings) == 1:
            first_file_by_reading.setdefault(possible_readings[0], file.shown)
        else:
            ambiguous_labels.extend(labels)
    if len(first_file_by_reading) > 1:
        problem = f"contains codes in {first_file_by_reading['codes']} and names in {first_file_by_reading['names']}"
        raise InputError(f"{where} {problem}; write all labels as codes or all as names")
    if first_file_by_reading:
        (reading,) = first_file_by_reading
        return reading
    # All files allow both interpretations.
    have_types = all(file.has_types for file in files)
    if not have_types:
        _check_same_class(ambiguous_labels, names, where)
    return "names"


def _check_same_class(labels: Sequence[Any], names: Sequence[str], where: str) -> None:
    """Raise `InputError` if any of the `labels` is the name of one class and the code of another.

    All `labels` are both names and codes.
    """
    conflicting: dict[Any, None] = {}  # used as an ordered set
    for label in labels:
        code = _read_code(label, len(names))
        if names[code] != label:
            conflicting[label] = None
    if conflicting:
        shown = shown_classes(list(conflicting))
        problem = f"contains {shown}, which are names of classes and codes of other classes"
        raise InputError(f"{where} {problem}; save the file as jsonl with numbers as codes, or rename the classes")


def _list_labels(file: FileLabels, names: Sequence[str], where: str) -> list[Any]:
    """Return the unique labels of a file, except missing values; `True` and 1 are different labels."""
    labels: dict[tuple[str, Any], None] = {}  # type and value of each label, because True equals 1
    for row, value in file.values.items():
        if not pd.api.types.is_scalar(value):
            raise InputError(f"{where} ({file.shown}): the label in row {row} is not a string, number or boolean")
        kind = _name_kind(value)
        labels[kind, value] = None
    return [value for _, value in labels if not _is_missing(value, names)]


def _find_readings(present: Sequence[Any], names: Sequence[str], where: str) -> list[Reading]:
    """Return whether the labels `present` in a file can be class codes, class names, or both.

    Raise `InputError`, prefixed with `where`, if there are none.
    """
    kinds = {_name_kind(value) for value in present}
    if len(kinds) > 1:
        shown = shown_classes(present)
        raise InputError(f"{where} mixes strings and numbers ({shown}); write all labels as codes or all as names")
    if kinds == {"boolean"}:
        return [_interpret_booleans(names, where)]
    not_names = [value for value in present if not isinstance(value, str) or value not in names]
    not_codes = [value for value in present if _read_code(value, len(names)) < 0]
    readings: list[Reading] = []
    if not not_codes:
        readings.append("codes")
    if not not_names:
        readings.append("names")
    if not readings:
        raise _create_unknown_label_error(not_codes, not_names, names, where)
    return readings


def _create_unknown_label_error(
    not_codes: Sequence[Any], not_names: Sequence[Any], names: Sequence[str], where: str
) -> InputError:
    """Return the error for a file that contains labels that are not codes, and labels that are not class `names`.

    The first label that is neither a code nor a name is reported. If there is none, the file mixes codes and names, and
    the first name is reported.
    """
    neither = [value for value in not_codes if value in not_names]
    reported = neither[0] if neither else not_codes[0]
    allowed = f"the names {shown_classes(names)}, or only codes, 0 to {len(names) - 1}"
    return InputError(
        f"{where} contains {shown_classes([reported])}, which is not a class in the dataset's description; "
        f"allowed: {allowed}"
    )


def _interpret_booleans(names: Sequence[str], where: str) -> Reading:
    """Return whether the booleans in a label column are class names or class codes.

    If the two class `names` are "true" and "false" (ignoring case), booleans are read as names; otherwise as codes: 0
    for False, and 1 for True. Raise `InputError` unless there are two classes.
    """
    if len(names) != 2:
        problem = f"contains booleans, but its classes have the names {shown_classes(names)}"
        raise InputError(f"{where} {problem}; write all labels as codes or all as names")
    are_names = {name.casefold() for name in names} == TRUTH_NAMES
    return "names" if are_names else "codes"


def named_classes(values: pd.Series, names: Sequence[str], reading: Reading) -> pd.Series:
    """Return the labels `values` (codes or names, as determined by `reading`) as categories with the ordered `names`.

    Labels that belong to no class become missing values.
    """
    find_indices = _find_indices_of_codes if reading == "codes" else _find_indices_of_names
    codes = find_indices(values, names)
    categories = pd.Index(list(names))
    return pd.Series(pd.Categorical.from_codes(codes, categories), index=values.index)


def _find_indices_of_codes(values: pd.Series, names: Sequence[str]) -> list[int]:
    """Return the class index of each value that is a class code, and -1 for any other value."""
    return [_read_code(value, len(names)) for value in values]


def _find_indices_of_names(values: pd.Series, names: Sequence[str]) -> list[int]:
    """Return the class index of each value that is a class name or a boolean, and -1 for any other value."""
    index_by_name: dict[Any, int] = {}
    index_by_boolean: dict[bool, int] = {}  # used only for two classes, false and true (`_interpret_booleans`)
    for index, name in enumerate(names):
        index_by_name[name] = index
        is_true = name.casefold() == "true"
        index_by_boolean[is_true] = index
    indices = []
    for value in values:
        if isinstance(value, (bool, np.bool_)):
            indices.append(index_by_boolean[bool(value)])
        else:
            indices.append(index_by_name.get(value, -1))
    return indices


def name_problem(name: str) -> str | None:
    """Return the problem that a class name would cause in tables or terminals, for a message; None for a valid name."""
    for letter in name:
        if letter in DIRECTIONS or unicodedata.category(letter) in UNPRINTABLE:
            return "with control characters in its name; rename it"
    if FORMULA.match(unicodedata.normalize("NFKC", name)):
        return "which a spreadsheet would execute as a formula; rename it to begin with a letter"
    return None


def shown_classes(values: Sequence[Any]) -> str:
    """Return the first `MAX_SHOWN_CLASSES` classes for a message, with strings in quotes."""
    words = []
    for value in values[:MAX_SHOWN_CLASSES]:
        word = repr(shorten(value)) if isinstance(value, str) else str(value)
        words.append(word)
    if len(values) > MAX_SHOWN_CLASSES:
        words.append("...")
    return ", ".join(words)


def _is_missing(value: Any, names: Sequence[str]) -> bool:
    """Return True for a missing label, and for -1, the hub's code of unlabelled rows, unless it is a class name."""
    if isinstance(value, str):
        return value.strip() in ("", "-1") and value not in names
    if not pd.api.types.is_scalar(value):
        return False
    return bool(pd.isna(value)) or value == -1


def _read_code(value: Any, classes: int) -> int:
    """Return the class index for a code from 0 to `classes` - 1, and -1 for any other value."""
    code = -1.0
    if isinstance(value, str):
        match = CODE.fullmatch(value.strip())
        if match:
            code = float(match[1])
    elif isinstance(value, (Real, np.bool_)):
        code = float(value)
    is_whole = code % 1 == 0
    if is_whole and 0 <= code < classes:
        return int(code)
    return -1


def _join_labels(labels: Sequence[pd.Series]) -> pd.Series:
    """Return all labels in one column, as Python objects unless all given columns are categorical.

    Without the conversion to objects, pandas would lose digits when it joins large numbers of two types.
    """
    are_categories = all(isinstance(values.dtype, pd.CategoricalDtype) for values in labels)
    if not are_categories:
        labels = [values.astype(object) for values in labels]
    joined: pd.Series = pd.concat(labels)
    return joined


def _find_classes(labels: pd.Series, where: str) -> dict[Any, Any]:
    """Return the class (a string, integer or boolean) of each unique label.

    Classes are in the order of the categories if the column has categories that are strings, and sorted otherwise.
    """
    values = labels.unique().tolist()
    if isinstance(labels.dtype, pd.CategoricalDtype):
        categories = labels.cat.categories
        if all(isinstance(name, str) for name in categories):
            return {name: name for name in categories if name in values}
    kinds = {_name_kind(label) for label in labels}
    if len(kinds) > 1:
        shown = shown_classes(values)
        raise InputError(f"{where} mixes strings, numbers or booleans ({shown}); use one type for all labels")
    classes: dict[Any, Any]
    if kinds == {"boolean"}:
        classes = {value: bool(value) for value in values}
    elif kinds == {"string"}:
        classes = _read_strings(values, where)
    else:
        _check_whole(values, values, where)
        classes = {value: int(value) for value in values}
    by_class = sorted(classes.items(), key=lambda item: item[1])
    return dict(by_class)


def _name_kind(label: Any) -> str:
    """Return the kind of a label: `string`, `boolean` or `number`."""
    if isinstance(label, str):
        return "string"
    if isinstance(label, (bool, np.bool_)):
        return "boolean"
    return "number"


def _read_strings(values: Sequence[str], where: str) -> dict[str, str] | dict[str, int]:
    """Return the class of each label in `values`: integers if all labels have the same integer format, else strings.

    Surrounding spaces are removed. Raise `InputError` for numbers that are not whole.
    """
    words = {value: value.strip() for value in values}
    counts = Counter(words.values())
    merged = [value for value, word in words.items() if counts[word] > 1]
    if merged:
        message = "%s: labels that differ only in surrounding spaces are the same class: %s"
        logging.warning(message, where, shown_classes(sorted(merged)))
    if all(WHOLE.fullmatch(word) for word in words.values()):
        return {value: int(word) for value, word in words.items()}
    if all(WHOLE_WITH_ZERO.fullmatch(word) for word in words.values()):
        return {value: int(word.removesuffix(".0")) for value, word in words.items()}
    if all(DECIMAL.fullmatch(word) for word in words.values()):
        numbers = [float(word) for word in words.values()]
        _check_whole(numbers, values, where)
    return words  # names, or whole numbers in other formats, such as `01`


def _check_whole(numbers: Sequence[Any], values: Sequence[Any], where: str) -> None:
    """Raise `InputError` if any of the `numbers`, which were parsed from the labels `values`, is not an integer."""
    has_fractions = any(number % 1 != 0 for number in numbers)  # also true for infinite numbers
    if has_fractions:
        raise InputError(
            f"{where} contains non-integer numbers ({shown_classes(values)}); use integers or strings as labels"
        )


def _warn_of_alike(names: Sequence[Any], where: str) -> None:
    """Warn about possible duplicate classes: `Good` and `good`, `01` and `1`, or names with the same appearance."""
    words = [str(name) for name in names]
    counts = Counter(_normalise(word) for word in words)
    alike = [word for word in words if counts[_normalise(word)] > 1]
    if not alike:
        return
    # Different names that look the same are escaped, so that they differ in the message.
    appearances = Counter(_remove_invisible(word) for word in alike)
    shown = []
    for word in alike[:MAX_SHOWN_CLASSES]:
        looks_like_another = appearances[_remove_invisible(word)] > 1
        text = shorten(word)
        shown.append(ascii(text) if looks_like_another else repr(text))
    if len(alike) > MAX_SHOWN_CLASSES:
        shown.append("...")
    logging.warning("%s: classes that differ only in spelling: %s", where, ", ".join(shown))


def _remove_invisible(name: str) -> str:
    """Return the visible form of a name: composed (NFKC), without invisible characters, with single spaces."""
    composed = unicodedata.normalize("NFKC", name)
    letters = [letter for letter in composed if not _is_invisible(letter)]
    # Letters and marks that were separated by an invisible character may now form a composed letter.
    visible = unicodedata.normalize("NFKC", "".join(letters))
    return " ".join(visible.split())


def _is_invisible(letter: str) -> bool:
    is_variation_selector = "\ufe00" <= letter <= "\ufe0f"
    return is_variation_selector or letter in INVISIBLE or unicodedata.category(letter) == "Cf"


def _normalise(name: str) -> str | Decimal:
    """Return a form that is equal for names that differ only in spelling: a number, or lower-case letters."""
    visible = _remove_invisible(name)
    if DECIMAL.fullmatch(visible):
        return Decimal(visible)
    return unicodedata.normalize("NFKC", visible.casefold())
