"""Caches of numba and matplotlib, redirected to a temporary folder if the home folder is not writable.

If a cache is not writable, numba raises an error ("cannot cache function"), and matplotlib warns at every start.
"""

import atexit
import os
import shutil
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

COMPILED = ("attnmix.maps", "umap", "pynndescent")  # packages whose numba caches are stored next to their code


def use_writable_caches() -> None:
    """Set `NUMBA_CACHE_DIR` and `MPLCONFIGDIR` if they are undefined and the default folders are not writable.

    Call this function before numba or matplotlib is used.
    """
    home = Path("~").expanduser()
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    if "MPLCONFIGDIR" not in os.environ and not _can_matplotlib_write(config_home, cache_home):
        os.environ["MPLCONFIGDIR"] = str(_create_temporary_folder() / "matplotlib")
    if "NUMBA_CACHE_DIR" not in os.environ and not _can_numba_write(cache_home):
        os.environ["NUMBA_CACHE_DIR"] = str(_create_temporary_folder() / "numba")
        if "numba" in sys.modules:  # numba reads the variable only at import
            sys.modules["numba"].config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]


def _can_matplotlib_write(config_home: Path, cache_home: Path) -> bool:
    """Return True if matplotlib can write to both folders that it uses."""
    return _can_write(config_home) and _can_write(cache_home)


def _can_numba_write(cache_home: Path) -> bool:
    """Return True if numba can write its caches in `cache_home`, or next to the code of all packages in `COMPILED`."""
    return _can_write(cache_home) or all(map(_can_write, _list_code_folders()))


def _list_code_folders() -> list[Path]:
    """Return the cache folder next to the code of each package in `COMPILED`; packages that are missing are omitted."""
    specs = [find_spec(name) for name in COMPILED]
    return [Path(spec.origin).parent / "__pycache__" for spec in specs if spec and spec.origin]


def _can_write(folder: Path) -> bool:
    """Return True if a file can be created in `folder`; create `folder` if necessary, as numba and matplotlib do."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


@cache
def _create_temporary_folder() -> Path:
    """Return a temporary folder for this process and its child processes; the folder is removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="attnmix-caches-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
