"""`InputError`, for mistakes that the user can fix, and helpers for its message."""

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnmix.core.terminal import printable, shorten_words

MAX_MESSAGE = 300  # maximum length of a quoted message of another library


class InputError(ValueError):
    """An error that the user can fix; the message is one line with the problem, its location and the next step."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(shorten_words(message), kept=""))


OUT_OF_MEMORY = (
    "can't allocate memory",  # torch on a CPU
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cuBLAS allocates its workspace at start
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Substrings of torch's error messages for insufficient memory on a CPU or GPU."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error caused by insufficient CPU or GPU memory."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in OUT_OF_MEMORY)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_one_line(error: BaseException) -> str:
    """Return the type of another library's error and the beginning of its message, in one line."""
    message = " ".join(str(error).split())
    shown = f"{message[:MAX_MESSAGE]}..." if len(message) > MAX_MESSAGE else message
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


@contextmanager
def model_errors(key: str, name: str, folder: Path) -> Iterator[None]:
    """Raise each `InputError` again with the prefix `key`, and with a model's `name` in place of its local `folder`."""
    try:
        yield
    except InputError as error:
        reason = str(error).removeprefix("model.name: ").replace(str(folder), name)
        raise InputError(f"{key}: {reason}") from error


def text_problem(text: str) -> str | None:
    """Return the reason why tokenizers cannot process `text` unchanged, or None for a valid text.

    Tokenizers drop spaces, control characters and isolated combining marks. A text that contains only such characters
    counts as empty.
    """
    if not any(unicodedata.category(char)[0] in "LNPS" and char != "\N{REPLACEMENT CHARACTER}" for char in text):
        return "the text is empty"
    if "\0" in text:
        return "the text contains a NUL character"
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        return "the text contains half a character (a lone surrogate)"
    return None
