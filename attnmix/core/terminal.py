"""Terminal output: escaped control characters, truncated user values, and suppressed messages of other libraries."""

import logging
import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

LIBRARIES = ("datasets", "huggingface_hub", "transformers")
KEPT_CONTROLS = "\n\t"
DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Unicode bidirectional control characters."""
MAX_VALUE = 80  # maximum length of a user's value in a message
LONG_WORD = re.compile(rf"([^\s/]{{{MAX_VALUE}}})[^\s/]{{{256 - MAX_VALUE},}}")
"""A string of at least 256 characters without spaces and slashes. Such a string is longer than any file name, and
therefore comes from the user's data."""


def printable(text: str, kept: str = KEPT_CONTROLS) -> str:
    r"""Return `text` with its control characters escaped, except the characters in `kept`.

    >>> printable("\x1b[31mgood")
    '\\x1b[31mgood'
    """
    if text.isprintable():
        return text
    characters = []
    for char in text:
        if _is_active_character(char) and char not in kept:
            char = char.encode("unicode_escape").decode("ascii")
        characters.append(char)
    return "".join(characters)


def shorten(value: object) -> str:
    """Return a user's value as a string for a message, truncated to `MAX_VALUE` characters."""
    text = str(value)
    if len(text) <= MAX_VALUE:
        return text
    return f"{text[:MAX_VALUE]}..."


def shorten_words(text: str) -> str:
    """Truncate each match of `LONG_WORD` in a message to `MAX_VALUE` characters."""
    return LONG_WORD.sub(r"\1...", text)


def _is_active_character(char: str) -> bool:
    """Return True for control characters, line separators, bidirectional controls and lone surrogates."""
    return unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or char in DIRECTIONS


class PrintableFormatter(logging.Formatter):
    """A log formatter that escapes control characters, because messages may quote class names and texts of the user."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted line of a record."""
        return printable(shorten_words(super().format(record)))


def log_to_terminal(level: int) -> None:
    """Log to stderr, with `level` as the minimum level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


@contextmanager
def without_library_messages() -> Iterator[None]:
    """Suppress log messages of `LIBRARIES`, such as a table of missing weights, and restore their levels afterwards.

    The libraries must already be imported, because an import resets the level of its library.
    """
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
