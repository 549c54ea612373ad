"""Validation of paths passed by the user."""

import os
from pathlib import Path
from typing import Any

from attnmix.core.errors import InputError, first_line
from attnmix.core.terminal import shorten


def read_path(key: str, path: Any, call: str) -> Path:
    """Return a path that the operating system accepts; otherwise raise `InputError`, prefixed with `key`."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{key}: {type(path).__name__}; allowed: the name of a file or folder, as in {call}")
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # a missing or protected path is an error only when it is read or written
    except (OSError, ValueError) as error:  # for example, a name that is too long or contains a NUL character
        cause = getattr(error, "strerror", None) or first_line(error)
        problem = f"{shorten(os.fspath(path))!r} is not a path ({cause})"
        raise InputError(f"{key}: {problem}; allowed: the name of a file or folder, as in {call}") from error
    return Path(path)
