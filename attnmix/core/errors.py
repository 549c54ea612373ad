"""`InputError`, for mistakes that the user can fix, and helpers that word its message."""

import unicodedata


class InputError(Exception):
    """Bad input: the text names the key, file or value, and what is allowed."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def text_problem(text: str) -> str | None:
    """Return why no tokenizer reads `text` as it is, or None where one does.

    Tokenizers drop spaces, control characters and combining marks without a letter, so a text of these alone is empty.
    """
    if not any(unicodedata.category(char)[0] in "LNPS" and char != "\N{REPLACEMENT CHARACTER}" for char in text):
        return "the text is empty"
    if "\0" in text:
        return "the text holds a NUL character"
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        return "the text holds half a character (a lone surrogate)"
    return None
