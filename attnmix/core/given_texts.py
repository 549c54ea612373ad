"""Validation of the user's texts, from Python and params.yaml: texts, pairs of texts, or token IDs.

    read_texts("time flies")                              one text
    read_texts(["time flies", "like an arrow"])           several texts: a list, tuple, or column of a table or dataset
    read_texts([("time flies", "like an arrow")])         a pair of texts
    read_texts([101, 2051, 10029, 102])                   token IDs of one text; a list of lists for several texts
    read_texts(tokenizer(["time flies"], padding=True))   token IDs with an attention mask

Any other input raises an `InputError`. Its message states the problem and, in a list of texts, the index of the invalid
text; most messages list the allowed inputs.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Integral, Number
from pathlib import Path
from typing import Any, NamedTuple

from attnmix.core.errors import InputError, text_problem
from attnmix.core.selections import is_whole_number

ALLOWED_TEXTS = (
    'allowed: "one text", ["one", "another"], pairs [("first", "second")], token ids, or the output of tokenizer(...)'
)
IDS, MASK, TYPE_IDS = "input_ids", "attention_mask", "token_type_ids"
OTHER_INPUTS = ("inputs_embeds", "position_ids", "decoder_input_ids", "decoder_inputs_embeds")
"""Names of other model inputs, which are not supported in the output of a tokenizer."""
SHOWN_CHARACTERS = 40  # maximum length of a value in a message
SHOWN_NAMES = 5  # maximum number of column names in a message
SAMPLE_ROWS = 20  # number of rows used to identify the column of the texts


@dataclass(frozen=True)
class TokenIds:
    """One text as token IDs, including special tokens."""

    ids: list[int]
    types: list[int] | None = None
    """The `token_type_ids`; None (the same as 0 for all tokens) if they are not specified."""
    masked: bool = False
    """True if an attention mask was applied to remove the padding."""


Item = str | tuple[str, str] | TokenIds
"""One text or pair of texts, as strings or token IDs."""


def read_texts(given: Any, key: str = "texts") -> list[Item]:
    """Return the input as a list of texts, of pairs of texts, or of `TokenIds`.

    Raise `InputError`, prefixed with `key`, for any other input and for an empty or missing text.
    """
    if isinstance(given, str):
        _check_not_file(given, key)
        return [_check_text(given, key)]
    names = _list_column_names(given)
    if IDS in names:  # the output of a tokenizer
        return list(_read_encodings(given, key))
    if names:  # a table or another mapping
        raise InputError(f"{key}: {_describe_table(given, names)}")
    values = _read_values(given, key)
    if not values:
        raise InputError(f"{key}: none; {ALLOWED_TEXTS}")
    if all(map(is_whole_number, values)):
        if not _may_be_ids(given):  # for example, a column of a table, whose integers are labels
            raise InputError(f"{key}: a {type(given).__name__} of numbers; {ALLOWED_TEXTS}")
        ids = [int(value) for value in values]
        return [TokenIds(ids)]
    return _read_items(values, key)


def _check_not_file(given: str, key: str) -> None:
    """Raise `InputError` if a text is the name of an existing file with a suffix, such as `reviews.csv`."""
    try:
        is_file = Path(given).is_file()
    except (OSError, ValueError):  # a text that is too long for a name, or contains a NUL character
        return
    if is_file and Path(given).suffix:
        raise InputError(f"{key}: {given} is a file; pass its texts, for example pandas.read_csv(path)[column]")


def _read_items(values: Sequence[Any], key: str) -> list[Item]:
    """Return the texts, pairs or `TokenIds` in `values`; raise `InputError` unless all of them are of one kind."""
    items: list[Item] = []
    for number, value in enumerate(values):
        item = read_item(value, f"{key}: number {number}")
        if items and type(item) is not type(items[0]):
            kind = _name_kind(item)
            first_kind = _name_kind(items[0])
            raise InputError(
                f"{key}: number {number} is {kind}, but number 0 is {first_kind}; pass items of the same kind"
            )
        items.append(item)
    return items


def read_item(value: Any, key: str) -> Item:
    """Return `value` as a text, a pair or `TokenIds`; raise `InputError`, prefixed with `key`, for any other value."""
    names = _list_column_names(value)
    if IDS in names:  # the output of a tokenizer
        encodings = _read_encodings(value, key)
        if len(encodings) != 1:
            raise InputError(f"{key} contains {len(encodings)} texts; pass one text, or all of them as `texts`")
        return encodings[0]
    if names:  # a table or another mapping
        raise InputError(f"{key} is {_describe_table(value, names)}")
    value = _convert_to_list(value)
    if isinstance(value, str):
        return _check_text(value, key)
    if _is_missing(value):
        raise InputError(f"{key} is missing ({value}); {ALLOWED_TEXTS}")
    if not isinstance(value, list | tuple):
        raise InputError(f"{key} is {_describe_value(value)}; {ALLOWED_TEXTS}")
    parts = [_convert_to_list(part) for part in value]
    return _read_parts(parts, key)


def _read_parts(parts: list[Any], key: str) -> Item:
    """Return a list as a pair of texts or as `TokenIds`; raise `InputError`, prefixed with `key`, for other lists."""
    if len(parts) == 1 and isinstance(parts[0], list):
        parts = parts[0]  # from a tensor of shape [1, tokens]
    if not parts:
        raise InputError(f"{key} is empty; {ALLOWED_TEXTS}")
    if all(map(is_whole_number, parts)):
        ids = [int(part) for part in parts]
        return TokenIds(ids)
    for part in parts:
        if _is_missing(part):
            raise InputError(f"{key} contains a missing value ({part}); {ALLOWED_TEXTS}")
        if not isinstance(part, str):
            raise InputError(f"{key} contains {_describe_value(part)}; {ALLOWED_TEXTS}")
    if len(parts) != 2:
        number = "1 text" if len(parts) == 1 else f"{len(parts)} texts"
        raise InputError(f"{key} is a list of {number}, but a pair has two; {ALLOWED_TEXTS}")
    first = _check_text(parts[0], f"{key}, the first of the pair")
    second = _check_text(parts[1], f"{key}, the second of the pair")
    return first, second


def _check_text(value: str, key: str) -> str:
    """Return a text; raise `InputError`, prefixed with `key`, for an empty or invalid text."""
    problem = text_problem(value)
    if problem:
        raise InputError(f"{key}: {problem}")
    return str(value)


def _read_values(given: Any, key: str) -> list[Any]:
    """Return the items of an ordered collection, with tensors and arrays converted to Python lists and numbers.

    Raise `InputError` for any other object; the message begins with `key` and ends with the allowed values.
    """
    if _is_missing(given):
        raise InputError(f"{key}: missing ({given}); {ALLOWED_TEXTS}")
    if isinstance(given, bytes | bytearray | memoryview | os.PathLike | io.IOBase | Number):
        raise InputError(f"{key}: {_describe_value(given)}; {ALLOWED_TEXTS}")
    if isinstance(given, set | frozenset):
        raise InputError(f"{key}: a set is not ordered; {ALLOWED_TEXTS}")
    values = _convert_to_list(given)
    is_single_text = isinstance(values, str)  # also if `given` is a NumPy string
    if is_single_text or not isinstance(values, Iterable):
        raise InputError(f"{key}: {_describe_value(given)}; {ALLOWED_TEXTS}")
    return [_convert_to_list(value) for value in values]


def _convert_to_list(value: Any) -> Any:
    """Convert tensors, arrays, columns and their scalars to Python lists and numbers; return other values unchanged."""
    if isinstance(value, str):
        return str(value)  # converts a NumPy string to a Python string
    if hasattr(value, "detach"):  # a torch tensor on any device
        value = value.detach().cpu()
    for name in ("tolist", "to_pylist", "as_py"):  # numpy, pandas and torch; pyarrow columns; pyarrow scalars
        if hasattr(value, name):
            convert = getattr(value, name)
            return convert()
    if hasattr(value, "numpy"):  # a TensorFlow tensor
        return value.numpy().tolist()
    return value


def _read_encodings(given: Any, key: str) -> list[TokenIds]:
    """Return the token IDs of each text in a tokenizer's output (one text or a batch), without masked tokens."""
    entries = _read_entries(given, key)
    rows = entries[IDS]
    masks = entries.get(MASK)
    types = entries.get(TYPE_IDS)
    encodings = []
    for number, ids in enumerate(rows):
        where = f"{key}: number {number}" if len(rows) > 1 else key
        types_of_text = None if types is None else types[number]
        encoding = TokenIds(ids, types_of_text)
        if masks is not None:
            encoding = _apply_mask(encoding, masks[number], where)
        encodings.append(encoding)
    return encodings


def _read_entries(given: Any, key: str) -> dict[str, list[list[int]]]:
    """Return the entries of a tokenizer's output by name, each with one row of integers per text.

    Raise `InputError` for unsupported entries and for entries of different shapes.
    """
    names = [name for name in _list_column_names(given) if given[name] is not None]
    unsupported = [name for name in names if name in OTHER_INPUTS]
    if unsupported:
        raise InputError(f"{key}: {unsupported[0]} is not supported; allowed: {IDS}, {MASK}, {TYPE_IDS}")
    entries = {}
    for name in (IDS, MASK, TYPE_IDS):
        if name in names:
            entries[name] = _read_rows(given[name], f"{key}: {name}")
    if not entries[IDS]:
        raise InputError(f"{key}: {IDS} is empty; {ALLOWED_TEXTS}")
    lengths = [len(row) for row in entries[IDS]]
    for name, rows in entries.items():
        if [len(row) for row in rows] != lengths:
            raise InputError(f"{key}: {name} and {IDS} have different shapes; pass the output of tokenizer(...)")
    return entries


def _read_rows(value: Any, key: str) -> list[list[int]]:
    """Return the integers of one entry in a tokenizer's output (one text or a batch), with one row per text."""
    items = _list_items(_convert_to_list(value))
    is_one_text = bool(items) and all(map(_is_number, items))
    if is_one_text:
        items = [items]
    rows = []
    for number, item in enumerate(items):
        row = _list_items(item)
        has_numbers_only = all(map(_is_number, row))
        if not isinstance(item, Sequence) or not has_numbers_only:
            raise InputError(f"{key}, number {number}: not whole numbers; pass the output of tokenizer(...)")
        rows.append([int(entry) for entry in row])
    return rows


def _list_items(value: Any) -> list[Any]:
    """Return the items of an iterable as Python objects.

    For a string or any other value, return `[None]`, which callers reject.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [None]
    return [_convert_to_list(item) for item in value]


def _apply_mask(encoding: TokenIds, mask: list[int], key: str) -> TokenIds:
    """Return the tokens whose mask is 1; raise `InputError` if there are none, or if they are not contiguous."""
    others = set(mask) - {0, 1}
    if others:
        raise InputError(f"{key}: {MASK} contains {min(others)}; allowed: 0 and 1")
    kept_positions = [position for position, value in enumerate(mask) if value]
    if not kept_positions:
        raise InputError(f"{key}: {MASK} is 0 for all tokens; pass a mask that is 1 for the tokens of the text")
    first = kept_positions[0]
    end = kept_positions[-1] + 1
    has_gap = len(kept_positions) < end - first
    if has_gap:
        raise InputError(f"{key}: {MASK} is 0 within the text; mask only padding before or after the text")
    types = encoding.types
    if types:
        types = types[first:end]
    return TokenIds(encoding.ids[first:end], types, masked=True)


def _list_column_names(given: Any) -> list[str]:
    """Return the keys or column names of a mapping, data frame or dataset, and an empty list for other objects.

    The list is `[""]` for a mapping or table without columns, to distinguish it from other objects.
    """
    names: Any = None
    if isinstance(given, Mapping):
        names = given
    elif getattr(given, "column_names", None) is not None:  # datasets and pyarrow tables
        names = given.column_names
    elif getattr(given, "columns", None) is not None:  # data frames
        names = given.columns
    if names is None:
        return []
    return [str(name) for name in names] or [""]


def _describe_table(given: Any, names: Sequence[str]) -> str:
    """Return a description of a mapping or table with the columns `names`, with advice on what to pass instead."""
    type_name = type(given).__name__
    if names == [""]:  # the result of `_list_column_names` for a mapping or table without columns
        return f"an empty {type_name}; {ALLOWED_TEXTS}"
    shown = ", ".join(names[:SHOWN_NAMES])
    if len(names) > SHOWN_NAMES:
        shown += ", ..."
    kind = "a mapping with the keys" if isinstance(given, Mapping) else f"a {type_name} with the columns"
    column = _find_text_column(given)
    if column is None:
        return f"{kind} {shown}; pass only the texts; {ALLOWED_TEXTS}"
    variables = {"DataFrame": "df", "Dataset": "dataset"}
    variable = variables.get(type_name, "texts")
    return f"{kind} {shown}; select one, such as {variable}{column}"


class MeanLength(NamedTuple):
    """The mean length of the texts in a column.

    Words are compared before characters, because a column of identifiers or URLs may have more characters than the
    texts, but each of them is a single word.
    """

    words: float
    characters: float


NO_TEXTS = MeanLength(words=0.0, characters=0.0)


def _find_text_column(given: Any) -> str | None:
    """Return the code that selects a column of texts, such as `["text"]` or `["train"]["text"]`.

    It is the column with the longest texts, or None if no column contains only texts. In a mapping of splits, the first
    split is searched. The column of a stream is chosen by its name, because reading the texts would consume the stream.
    """
    keys = _list_keys(given)
    is_stream = not hasattr(given, "__len__")
    if is_stream:
        key = "text" if "text" in keys else keys[0]
        return f'["{key}"]'
    best_selection = None
    best_length = NO_TEXTS
    for key in keys:
        name = json.dumps(key, ensure_ascii=False) if isinstance(key, str) else repr(key)
        selection = f"[{name}]"
        values = _select_column(given, key)
        is_split = bool(_list_column_names(values))  # the value is a table itself
        if is_split:
            selection_in_split = _find_text_column(values)
            return None if selection_in_split is None else selection + selection_in_split
        length = _measure_texts(values)
        if length > best_length:
            best_selection = selection
            best_length = length
    return best_selection


def _list_keys(given: Any) -> list[Any]:
    """Return the keys of a mapping, or the column names of a data frame or dataset."""
    if isinstance(given, Mapping):
        return list(given)
    if hasattr(given, "column_names"):
        return list(given.column_names)
    return list(given.columns)


def _select_column(given: Any, key: Any) -> Any:
    """Return a column, or None if its name is not unique or the table does not support selection by name."""
    try:
        column = given[key]
    except Exception:  # each table library raises its own exceptions
        return None
    dimensions = getattr(column, "ndim", 1)
    if dimensions != 1:
        return None
    return column


def _measure_texts(values: Any) -> MeanLength:
    """Return the mean length of the texts in the first rows of a column; missing values are ignored.

    Return `NO_TEXTS` if one of these rows contains a value that is neither a text nor missing, or if none of them
    contains a text.
    """
    if isinstance(values, str):
        values = [values]
    if not isinstance(values, Iterable):
        return NO_TEXTS
    first = [_convert_to_list(value) for value in islice(values, SAMPLE_ROWS)]
    texts = [value for value in first if not _is_missing(value)]
    if not texts or not all(isinstance(text, str) for text in texts):
        return NO_TEXTS
    words = sum(len(text.split()) for text in texts)
    characters = sum(len(text) for text in texts)
    return MeanLength(words / len(texts), characters / len(texts))


def _is_number(value: Any) -> bool:
    """Return True for an integer, a bool, or a float without a fractional part; masks may contain all of these."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, Integral)


def _is_missing(value: Any) -> bool:
    """Return True for None, NaN, and the missing values of pandas (NA and NaT)."""
    if isinstance(value, float):
        return value != value  # NaN
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _may_be_ids(given: Any) -> bool:
    """Return True for a list, tuple, array or tensor. The integers in a column of a table are labels, not token IDs."""
    is_array = hasattr(given, "shape") and not hasattr(given, "iloc")
    return is_array or isinstance(given, list | tuple)


def _name_kind(item: Item) -> str:
    if isinstance(item, str):
        return "one text"
    if isinstance(item, tuple):
        return "a pair of texts"
    return "token ids"


def _describe_value(value: Any) -> str:
    """Return a description of an unsuitable value for a message: its type and first characters.

    For bytes, paths and open files, the description also contains the call that converts them to text.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        beginning = bytes(value[:SHOWN_CHARACTERS])
        return f"bytes {beginning!r} (convert them with decode())"
    if isinstance(value, os.PathLike):
        return f"the path {os.fspath(value)!r} (load the file with Path(...).read_text())"
    if isinstance(value, io.IOBase):
        return "an open file (load it with file.read())"
    shown = " ".join(repr(value).split())
    if len(shown) > SHOWN_CHARACTERS:
        shown = f"{shown[:SHOWN_CHARACTERS]}..."
    return f"{type(value).__name__} {shown}"
