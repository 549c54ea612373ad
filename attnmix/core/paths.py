"""The paths that a user names."""

import os
from pathlib import Path
from typing import Any

from attnmix.core.errors import InputError, first_line
from attnmix.core.terminal import shorten


def read_path(key: str, path: Any, call: str) -> Path:
    """Return a path that the operating system takes; raise `InputError`, which begins with `key`, for another one."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{key}: {type(path).__name__}; allowed: the name of a file or folder, as in {call}")
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # what is to be written or read at the path decides
    except (OSError, ValueError) as error:  # such as a name that is too long, or with a NUL character
        cause = getattr(error, "strerror", None) or first_line(error)
        problem = f"{shorten(os.fspath(path))!r} is no path ({cause})"
        raise InputError(f"{key}: {problem}; allowed: the name of a file or folder, as in {call}") from error
    return Path(path)
