"""`InputError`, for mistakes that the user can fix, and helpers for error messages."""

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
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0]


def in_one_line(error: BaseException) -> str:
    """Return the type of another library's error and the first `MAX_MESSAGE` characters of its message, in one line."""
    name = type(error).__name__
    message = " ".join(str(error).split())
    if not message:
        return name
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}..."
    return f"{name}: {message}"


@contextmanager
def model_errors(key: str, name: str, folder: Path) -> Iterator[None]:
    """Change the message of each `InputError` about a model, so that it refers to what the user specified.

    The message begins with `key`, the user's argument or parameter, instead of `model.name`. The local `folder` of the
    model is replaced by `name`.
    """
    try:
        yield
    except InputError as error:
        reason = str(error).removeprefix("model.name: ").replace(str(folder), name)
        raise InputError(f"{key}: {reason}") from error


def text_problem(text: str) -> str | None:
    """Return the reason why tokenizers cannot process `text` unchanged, or None for a valid text.

    Tokenizers drop spaces, control characters, isolated combining marks and the replacement character U+FFFD. A text
    that contains only such characters counts as empty.
    """
    if not any(map(_is_kept_by_tokenizers, text)):
        return "the text is empty"
    if "\0" in text:
        return "the text contains a NUL character"
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        return "the text contains half a character (a lone surrogate)"
    return None


def _is_kept_by_tokenizers(char: str) -> bool:
    """Return True for letters, numbers, punctuation and symbols, except the replacement character."""
    category = unicodedata.category(char)
    return category[0] in "LNPS" and char != "\N{REPLACEMENT CHARACTER}"
