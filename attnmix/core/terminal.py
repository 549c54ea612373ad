"""Keep codes that act on a terminal, and messages of libraries that the project's own replace, from the terminal."""

import logging
import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

LIBRARIES = ("datasets", "huggingface_hub", "transformers")
KEPT_CONTROLS = "\n\t"
DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Marks that make a terminal write backwards."""
MAX_VALUE = 80  # characters of a user's value in a message
LONG_WORD = re.compile(rf"([^\s/]{{{MAX_VALUE}}})[^\s/]{{{256 - MAX_VALUE},}}")
"""A run of characters that is too long for a file name, so that it can only be a value of the user's data."""


def printable(text: str, kept: str = KEPT_CONTROLS) -> str:
    r"""Return `text` with its control characters escaped, but for those that are `kept`.

    >>> printable("\x1b[31mgood")
    '\\x1b[31mgood'
    """
    if text.isprintable():
        return text
    return "".join(_escaped(char) if _acts(char) and char not in kept else char for char in text)


def shorten(value: object) -> str:
    """Return a user's value for a message, cut to `MAX_VALUE` characters."""
    text = str(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


def shorten_words(text: str) -> str:
    """Return a message with each word that no file name can have cut to `MAX_VALUE` characters."""
    return LONG_WORD.sub(r"\1...", text)


def _acts(char: str) -> bool:
    """Return True for control characters, marks of direction, and halves of characters, which cannot be encoded."""
    return unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or char in DIRECTIONS


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


class PrintableFormatter(logging.Formatter):
    """A formatter whose lines are `printable`: they may name classes, files and words of the user's data."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return printable(shorten_words(super().format(record)))


def log_to_terminal(level: int) -> None:
    """Log to stderr, from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


@contextmanager
def without_library_messages() -> Iterator[None]:
    """Leave out what `LIBRARIES` log, such as a table of weights that a checkpoint lacks; then restore their levels.

    They must be imported already: an import sets a library's level anew.
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
