"""Reader of JSON files: one object per line (jsonl, ndjson), or objects in a list or one after the other (json)."""

import io
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import pandas as pd

from attnmix.core.terminal import shorten
from attnmix.data.columns import Columns, check_names, check_table_size

JSON_SPACE = re.compile(r"[ \t\r\n]*")
LIST_SEPARATOR = re.compile(r"[ \t\r\n]*(,|\])[ \t\r\n]*")
"""A comma, or the closing bracket of a list."""


def read_json(content: BinaryIO, in_lines: bool, columns: Columns | None, shown: str) -> pd.DataFrame:
    """Return the objects of a file as rows, with only the `columns` (None: all).

    With `in_lines`, each line is an object (jsonl); otherwise, the file is a list or a sequence of objects (json).
    Raise `ValueError`, with the line number, for an invalid object. `shown` is the name of the file in messages.
    """
    names: dict[str, None] = {}  # the names of all columns, as an ordered set
    rows: list[dict[str, Any]] = []
    size = 0
    with io.TextIOWrapper(content, encoding="utf-8-sig") as file:
        records = _read_lines(file) if in_lines else _read_values(file.read())
        for number, record in records:
            if not isinstance(record, dict):
                raise ValueError(f"line {number} is not a JSON object; {_describe_allowed_records(in_lines)}")
            names.update(dict.fromkeys(record))
            row = _select_columns(record, columns)
            rows.append(row)
            size += sum(len(value) for value in row.values() if isinstance(value, str))
            check_table_size(size)
    if rows:
        check_names(list(names), columns, shown)
    return pd.DataFrame(rows, dtype=object)  # the dtype `str` does not support lone surrogates


def _select_columns(record: dict[str, Any], columns: Columns | None) -> dict[str, Any]:
    """Return the values of an object in the `columns` (None: all); columns that it lacks are omitted."""
    if columns is None:
        return record
    return {name: record[name] for name in columns.values() if name in record}


def _read_lines(file: io.TextIOWrapper) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line that is not blank."""
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield number, json.loads(line, object_pairs_hook=_check_unique_keys)
            except (ValueError, RecursionError) as error:
                raise _create_line_error(number, error, in_lines=True) from error


def _skip_space(text: str, position: int) -> int:
    """Return the position of the first character from `position` on that is not white space."""
    return JSON_SPACE.match(text, position).end()  # type: ignore[union-attr]  # the pattern matches any text


def _read_values(text: str) -> Iterator[tuple[int, Any]]:
    """Yield the line number and the value of each element of a JSON list, or of each value in a sequence of values."""
    decoder = json.JSONDecoder(object_pairs_hook=_check_unique_keys)
    position = _skip_space(text, 0)
    is_list = text.startswith("[", position)
    if is_list:
        position = _skip_space(text, position + 1)
    is_empty_list = is_list and text.startswith("]", position)
    if is_empty_list:
        return
    separator = LIST_SEPARATOR if is_list else JSON_SPACE  # the text after each value
    is_closed = False  # True after the closing bracket of a list
    line = 1
    position_of_line = 0  # `line` is the line of this position
    while position < len(text) and not is_closed:
        line += text.count("\n", position_of_line, position)
        position_of_line = position
        try:
            value, end_of_value = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise _create_line_error(line, error, in_lines=False) from error
        yield line, value
        after_value = separator.match(text, end_of_value)
        if after_value is None:  # possible only in a list
            raise ValueError(
                f"the object of line {line} is not followed by a comma; {_describe_allowed_records(in_lines=False)}"
            )
        position = after_value.end()
        is_closed = is_list and after_value[1] == "]"
    is_unfinished_list = is_list and not is_closed
    has_more_text = position < len(text)
    if is_unfinished_list or has_more_text:
        raise ValueError(f"its list must end at the end of the file; {_describe_allowed_records(in_lines=False)}")


def _check_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise `ValueError` for a repeated key, for which `json` would keep only the last value."""
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        # `_create_line_error` completes this message: "the object of line 1 has ...".
        raise _RepeatedKeyError(f"the key {shorten(repeated)!r} more than once; use each key once")
    return record


class _RepeatedKeyError(ValueError):
    """The error for an object with a repeated key."""


def _create_line_error(number: int, error: Exception, in_lines: bool) -> ValueError:
    """Return the error for a line that is not a valid JSON object."""
    if isinstance(error, _RepeatedKeyError):
        return ValueError(f"the object of line {number} has {error}")
    return ValueError(f"line {number} is not a JSON object ({error}); {_describe_allowed_records(in_lines)}")


def _describe_allowed_records(in_lines: bool) -> str:
    """Return advice on the format of jsonl (`in_lines`) or json files."""
    return "write one object per line" if in_lines else "write one object per row, in a list or one after the other"
