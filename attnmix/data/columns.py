"""The columns of a data file: selection, and errors for missing and repeated columns."""

from collections.abc import Mapping, Sequence
from typing import Any

from attnmix.core.errors import InputError

SEPARATOR_NAMES = {",": "commas (,)", ";": "semicolons (;)", "\t": "tabs", "|": "bars (|)"}
MAX_TABLE_BYTES = 2**32  # maximum size of the selected columns in memory
MAX_SHOWN_NAMES = 12  # maximum number of columns in a message
MAX_SHOWN_LETTERS = 40  # maximum length of a column name in a message
Columns = Mapping[str, str]
"""Column names of a file by parameter: `text`, `text_pair`, `label`, `group`."""


def check_names(names: Sequence[str], columns: Columns | None, shown: str, separator: str | None = None) -> None:
    """Raise `InputError` if a column in `columns` is missing in a file, and `ValueError` if a column is repeated.

    `names` are the columns of the file, and `shown` is its name in messages. Without `columns`, all columns are checked
    for repetition. `separator` is the separator of a csv or tsv file; the message about a missing column names it.
    """
    wanted = list(names) if columns is None else list(columns.values())
    _check_not_repeated(names, wanted)
    if columns is None:
        return
    # The usual cause of a missing column is a wrong parameter. The message therefore names this parameter.
    for key, name in columns.items():
        if name not in names:
            problem = f"{shown} has no column {shown_names([name])}; it has {shown_names(names)}"
            hint = _explain_header(names, wanted, separator)
            # Both columns of a pair of texts, `text` and `text_pair`, are set by `dataset.text_column`.
            parameter = f"dataset.{key.removesuffix('_pair')}_column"
            raise InputError(f"{parameter}: {problem}{hint}")


def _check_not_repeated(names: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise `ValueError` if a `wanted` column occurs more than once among the column `names` of a file.

    The caller converts this error into a message that begins with the name of the file; "it" refers to this file.
    """
    repeated = []
    for name in wanted:
        if names.count(name) > 1 and name not in repeated:
            repeated.append(name)
    if repeated:
        raise ValueError(f"it has more than one column {shown_names(repeated)}; rename or remove them")


def check_table_size(size: int, limit: int = MAX_TABLE_BYTES) -> None:
    """Raise `ValueError` if the selected columns exceed `limit` bytes."""
    if size > limit:
        reason = " for a file of its size" if limit < MAX_TABLE_BYTES else ""
        allowed = f"{limit / 1e9:.3g} GB{reason}"
        raise ValueError(f"its selected columns exceed the limit of {allowed}; use a part of the file")


def shown_names(names: Sequence[Any]) -> str:
    """Return the first column names for a message, with long names truncated."""
    if not names:
        return "none"
    words = []
    for name in names[:MAX_SHOWN_NAMES]:
        text = str(name)
        if len(text) > MAX_SHOWN_LETTERS:
            text = f"{text[:MAX_SHOWN_LETTERS]}..."
        words.append(repr(text))
    more = len(names) - len(words)
    if more:
        words.append(f"and {more} more")
    return ", ".join(words)


def _explain_header(names: Sequence[str], wanted: Sequence[str], separator: str | None) -> str:
    """Return the likely reason why a csv or tsv header lacks a name in `wanted`, for a message; empty if unknown.

    `names` are the names in the header. `separator` is the expected separator, or None for other file formats.
    """
    if separator is None:
        return ""
    actual_separator = _find_other_separator(names, wanted, separator)
    if actual_separator is not None:
        expected = SEPARATOR_NAMES.get(separator, repr(separator))
        return f"; its fields are separated by {SEPARATOR_NAMES[actual_separator]}; save it with {expected}"
    unquoted = {name.strip('"') for name in names if name.startswith('"')}
    if not unquoted.isdisjoint(wanted):
        return '; its names are in quotes ("), which tsv files do not use; save it as csv'
    if any(len(name) > MAX_SHOWN_LETTERS for name in names):  # a text instead of a header
        return "; the first line must be a header with the names of the columns"
    return ""


def _find_other_separator(names: Sequence[str], wanted: Sequence[str], separator: str) -> str | None:
    """Return the separator that a header probably uses instead of the expected `separator`, or None.

    `names` are the parts of the header between expected separators. Another separator in the header is likely if there
    is only one such part, or if the other separator yields a `wanted` name.
    """
    header = separator.join(names)
    for other in SEPARATOR_NAMES:
        if other == separator or other not in header:
            continue
        parts = [part.strip(' "') for part in header.split(other)]
        has_wanted_name = not set(parts).isdisjoint(wanted)
        if len(names) == 1 or has_wanted_name:
            return other
    return None
