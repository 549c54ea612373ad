"""Validation of the user's texts, from Python and params.yaml: texts, pairs of texts, or token IDs.

    read_texts("time flies")                              one text
    read_texts(["time flies", "like an arrow"])           several texts: a list, tuple, or column of a table or data set
    read_texts([("time flies", "like an arrow")])         a pair of texts
    read_texts([101, 2051, 10029, 102])                   token IDs of one text; a list of lists for several texts
    read_texts(tokenizer(["time flies"], padding=True))   token IDs with an attention mask

Any other input raises an `InputError` with the index of the text and the correct calls.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Integral, Number
from typing import Any

from attnmix.core.errors import InputError, text_problem

CALLS = (
    'allowed: "one text", ["one", "another"], pairs [("first", "second")], token ids, or what tokenizer(...) returns'
)
IDS, MASK, TYPE_IDS = "input_ids", "attention_mask", "token_type_ids"
OTHER_INPUTS = ("inputs_embeds", "position_ids", "decoder_input_ids", "decoder_inputs_embeds")
"""Keys of a mapping with model inputs that are not supported in addition to the token IDs."""
SHOWN_CHARACTERS = 40
SHOWN_NAMES = 5
SAMPLE_ROWS = 20  # rows per column to identify the text column


@dataclass(frozen=True)
class TokenIds:
    """One text as token IDs, including special tokens."""

    ids: list[int]
    types: list[int] | None = None
    """The `token_type_ids`; None if not specified, which means 0 for all tokens."""
    masked: bool = False
    """True if an attention mask was applied, which removes padding."""


Item = str | tuple[str, str] | TokenIds
"""One text in its input format."""


def read_texts(given: Any, key: str = "texts") -> list[Item]:
    """Return the input as a list of texts, a list of pairs of texts, or a list of token IDs.

    Raise `InputError`, prefixed with `key`, for any other input and for an empty or missing text.
    """
    if isinstance(given, str):
        return [_text(given, key)]
    names = _column_names(given)
    if IDS in names:
        return list(_encodings(given, key))
    if names:
        raise InputError(f"{key}: {_table_problem(given, names)}")
    values = _values(given, key)
    if not values:
        raise InputError(f"{key}: none; {CALLS}")
    if all(map(_is_id, values)):
        if not _may_be_ids(given):
            raise InputError(f"{key}: a {type(given).__name__} of numbers; {CALLS}")
        return [TokenIds(list(map(int, values)))]
    items: list[Item] = []
    for number, value in enumerate(values):
        item = read_item(value, f"{key}: number {number}")
        if items and type(item) is not type(items[0]):
            raise InputError(f"{key}: number {number} is {_kind(item)}, number 0 {_kind(items[0])}; allowed: all alike")
        items.append(item)
    return items


def read_item(value: Any, key: str) -> Item:
    """Return one text, pair or `TokenIds`; raise `InputError`, prefixed with `key`, for any other value."""
    names = _column_names(value)
    if IDS in names:
        encodings = _encodings(value, key)
        if len(encodings) != 1:
            raise InputError(f"{key} holds {len(encodings)} texts; allowed: one, or the whole as `texts`")
        return encodings[0]
    if names:
        raise InputError(f"{key} is {_table_problem(value, names)}")
    value = _as_list(value)
    if isinstance(value, str):
        return _text(value, key)
    if _is_missing(value):
        raise InputError(f"{key} is missing ({value}); {CALLS}")
    if not isinstance(value, list | tuple):
        raise InputError(f"{key} is {_described(value)}; {CALLS}")
    parts = list(map(_as_list, value))
    if len(parts) == 1 and isinstance(parts[0], list):
        parts = parts[0]  # from a tensor of shape [1, tokens]
    if not parts:
        raise InputError(f"{key} is empty; {CALLS}")
    if all(map(_is_id, parts)):
        return TokenIds(list(map(int, parts)))
    if len(parts) == 2 and all(isinstance(part, str) for part in parts):
        first, second = parts
        return (_text(first, f"{key}, the first of the pair"), _text(second, f"{key}, the second of the pair"))
    if all(isinstance(part, str) for part in parts):
        raise InputError(f"{key} is a list of {_counted(parts)}; a pair has two; {CALLS}")
    other = next(part for part in parts if not isinstance(part, str))
    problem = f"a missing value ({other})" if _is_missing(other) else _described(other)
    raise InputError(f"{key} holds {problem}; {CALLS}")


def _text(value: str, key: str) -> str:
    problem = text_problem(value)
    if problem:
        raise InputError(f"{key}: {problem}")
    return str(value)


def _values(given: Any, key: str) -> list[Any]:
    """Return the items of a collection, with tensors and arrays converted to Python lists and numbers."""
    if _is_missing(given):
        raise InputError(f"{key}: missing ({given}); {CALLS}")
    if isinstance(given, bytes | bytearray | memoryview | os.PathLike | io.IOBase | Number):
        raise InputError(f"{key}: {_described(given)}; {CALLS}")
    if isinstance(given, set | frozenset):
        raise InputError(f"{key}: a set has no order; {CALLS}")
    values = _as_list(given)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(f"{key}: {_described(given)}; {CALLS}")
    return [_as_list(value) for value in values]


def _as_list(value: Any) -> Any:
    """Return tensors, arrays, columns and their scalars as Python lists and numbers, and other values unchanged."""
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "detach"):  # a torch tensor on any device
        value = value.detach().cpu()
    for name in ("tolist", "to_pylist", "as_py"):  # numpy, pandas and torch; pyarrow columns; pyarrow scalars
        if hasattr(value, name):
            return getattr(value, name)()
    return value.numpy().tolist() if hasattr(value, "numpy") else value  # a TensorFlow tensor


def _encodings(given: Any, key: str) -> list[TokenIds]:
    """Return the texts of a tokenizer's output, for one text or a batch, without masked tokens."""
    names = [name for name in _column_names(given) if given[name] is not None]
    others = [name for name in names if name in OTHER_INPUTS]
    if others:
        raise InputError(f"{key}: {others[0]} is not read; allowed: {IDS}, {MASK}, {TYPE_IDS}")
    entries = {name: _rows(given[name], f"{key}: {name}") for name in (IDS, MASK, TYPE_IDS) if name in names}
    rows, masks, types = entries[IDS], entries.get(MASK), entries.get(TYPE_IDS)
    if not rows:
        raise InputError(f"{key}: {IDS} is empty; {CALLS}")
    for name, entry in entries.items():
        if list(map(len, entry)) != list(map(len, rows)):
            raise InputError(f"{key}: {name} has another shape than {IDS}")
    encodings = []
    for number, ids in enumerate(rows):
        where = f"{key}: number {number}" if len(rows) > 1 else key
        encoding = TokenIds(ids, None if types is None else types[number])
        encodings.append(_under_mask(encoding, None if masks is None else masks[number], where))
    return encodings


def _rows(value: Any, key: str) -> list[list[int]]:
    """Return the rows of integers in an entry of a tokenizer's output, for one text or a batch."""
    items = _items(_as_list(value))
    if items and all(map(_is_number, items)):
        items = [items]  # one text
    rows = []
    for number, item in enumerate(items):
        row: list[Any] = _items(item) if isinstance(item, Sequence) else [None]
        if not all(map(_is_number, row)):
            raise InputError(f"{key}, number {number}: no whole numbers; allowed: what tokenizer(...) returns")
        rows.append([int(entry) for entry in row])
    return rows


def _items(value: Any) -> list[Any]:
    """Return the items of a list as Python objects; any other value results in one item that is not a number."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [None]
    return [_as_list(item) for item in value]


def _under_mask(encoding: TokenIds, mask: list[int] | None, key: str) -> TokenIds:
    """Return the token IDs with mask 1, which must be contiguous."""
    if mask is None:
        return encoding
    others = set(mask) - {0, 1}
    if others:
        raise InputError(f"{key}: {MASK} holds {min(others)}; allowed: 0 and 1")
    kept = [place for place, value in enumerate(mask) if value]
    if not kept:
        raise InputError(f"{key}: {MASK} leaves no token")
    if kept != list(range(kept[0], kept[-1] + 1)):
        raise InputError(f"{key}: {MASK} leaves out tokens between others; allowed: padding before and behind a text")
    part = slice(kept[0], kept[-1] + 1)
    return TokenIds(encoding.ids[part], encoding.types and encoding.types[part], masked=True)


def _column_names(given: Any) -> list[str]:
    """Return the keys or column names of a mapping, data frame or data set; empty for other objects."""
    if isinstance(given, Mapping):
        return list(map(str, given)) or [""]
    for attribute in ("column_names", "columns"):  # data sets and pyarrow tables; data frames
        names = getattr(given, attribute, None)
        if names is not None:
            return list(map(str, names)) or [""]
    return []


def _table_problem(given: Any, names: Sequence[str]) -> str:
    if names == [""]:
        return f"an empty {type(given).__name__}; {CALLS}"
    shown = ", ".join(names[:SHOWN_NAMES])
    if len(names) > SHOWN_NAMES:
        shown += ", ..."
    kind = "a mapping with the keys" if isinstance(given, Mapping) else f"a {type(given).__name__} with the columns"
    column = _text_column(given)
    if column is None:
        return f"{kind} {shown}, no single one of which holds texts; {CALLS}"
    variable = {"DataFrame": "df", "Dataset": "dataset"}.get(type(given).__name__, "texts")
    return f"{kind} {shown}; give one of them, such as {variable}{column}"


def _text_column(given: Any) -> str | None:
    """Return the selection of the column with the longest texts, such as `["text"]`, also in a split of a data set."""
    if isinstance(given, Mapping):
        keys = list(given)
    else:
        keys = list(given.column_names if hasattr(given, "column_names") else given.columns)
    if not hasattr(given, "__len__"):  # do not consume a stream for a message
        return f'["{"text" if "text" in keys else keys[0]}"]'
    best, best_size = None, (0.0, 0.0)
    for key in keys:
        selection = f"[{json.dumps(key, ensure_ascii=False)}]" if isinstance(key, str) else f"[{key!r}]"
        values = _column(given, key)
        if _column_names(values):  # a split
            inner = _text_column(values)
            return None if inner is None else selection + inner
        size = _text_size(values)
        if size > best_size:
            best, best_size = selection, size
    return best


def _column(given: Any, key: Any) -> Any:
    """Return a column, or None if its name is not unique or the table does not support selection by name."""
    try:
        column = given[key]
    except Exception:  # each table library raises its own exceptions
        return None
    return None if getattr(column, "ndim", 1) != 1 else column


def _text_size(values: Any) -> tuple[float, float]:
    """Return the mean numbers of words and characters of a column's first strings; 0 if other values are among them.

    Words are compared first, because an identifier or URL may be longer than a text but is a single word.
    """
    if isinstance(values, str):
        values = [values]
    if not isinstance(values, Iterable):
        return 0.0, 0.0
    first = [_as_list(value) for value in islice(values, SAMPLE_ROWS)]
    texts = [value for value in first if not _is_missing(value)]
    if not texts or not all(isinstance(text, str) for text in texts):
        return 0.0, 0.0
    words = sum(len(text.split()) for text in texts)
    return words / len(texts), sum(map(len, texts)) / len(texts)


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Return True for an integer, including bool and integral float values, which occur in masks."""
    return isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())


def _is_missing(value: Any) -> bool:
    """Return True for None, NaN, and pandas' missing values."""
    is_nan = isinstance(value, float) and value != value
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")


def _may_be_ids(given: Any) -> bool:
    """Return True for a list, tuple, array or tensor; integers in a column are labels, not token IDs."""
    is_array = hasattr(given, "shape") and not hasattr(given, "iloc")
    return is_array or isinstance(given, list | tuple)


def _kind(item: Item) -> str:
    return {str: "one text", tuple: "a pair of texts", TokenIds: "token ids"}[type(item)]


def _counted(texts: Sequence[str]) -> str:
    return "1 text" if len(texts) == 1 else f"{len(texts)} texts"


def _described(value: Any) -> str:
    """Return the type of a value and its first characters."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"bytes, which may be text.decode(): {bytes(value[:SHOWN_CHARACTERS])!r}"
    if isinstance(value, os.PathLike):
        return f"the path {os.fspath(value)!r}, which may be Path(...).read_text()"
    if isinstance(value, io.IOBase):
        return "an open file, which may be file.read()"
    shown = " ".join(repr(value).split())
    if len(shown) > SHOWN_CHARACTERS:
        shown = f"{shown[:SHOWN_CHARACTERS]}..."
    return f"{type(value).__name__} {shown}"
