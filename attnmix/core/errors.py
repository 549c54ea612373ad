"""`InputError`, for mistakes that the user can fix, and helpers that word its message."""

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnmix.core.terminal import printable, shorten_words

MAX_MESSAGE = 300  # characters of another library's message in one of ours


class InputError(ValueError):
    """Bad input: the text, one line, names the key, file or value, and what is allowed."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(shorten_words(message), kept=""))


OUT_OF_MEMORY = (
    "can't allocate memory",  # torch on a CPU
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cuBLAS starts with memory of its own
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Parts of the messages of torch's errors where memory is too small, on a CPU or on a GPU that others may use too."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error that says that the memory of the machine or of its GPU is too small."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in OUT_OF_MEMORY)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_one_line(error: BaseException) -> str:
    """Return the type of another library's error and the beginning of its message."""
    message = " ".join(str(error).split())
    shown = f"{message[:MAX_MESSAGE]}..." if len(message) > MAX_MESSAGE else message
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


@contextmanager
def model_errors(key: str, name: str, folder: Path) -> Iterator[None]:
    """Let errors call a model as the user did, by `key` and `name`, and not by the `folder` to which it is copied."""
    try:
        yield
    except InputError as error:
        reason = str(error).removeprefix("model.name: ").replace(str(folder), name)
        raise InputError(f"{key}: {reason}") from error


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
