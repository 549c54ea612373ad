"""Validation of paths passed by the user."""

import os
from pathlib import Path
from typing import Any

from attnmix.core.errors import InputError, first_line
from attnmix.core.terminal import shorten


def read_path(key: str, path: Any, call: str) -> Path:
    """Return `path` as a `Path`; raise `InputError`, prefixed with `key`, if the operating system does not accept it.

    `call` is an example of a correct call, which the error message contains.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{key}: {type(path).__name__} is not a path; pass the name of a file or folder, as in {call}")
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # a missing or protected path is an error only when it is read or written
    except (OSError, ValueError) as error:  # for example, a name that is too long or contains a NUL character
        cause = getattr(error, "strerror", None) or first_line(error)
        problem = f"{shorten(os.fspath(path))!r} is not a path ({cause})"
        raise InputError(f"{key}: {problem}; pass the name of a file or folder, as in {call}") from error
    return Path(path)
