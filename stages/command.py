"""A stage as a command: its parameters, its log, and errors as one line."""

from __future__ import annotations

import errno
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from stages.arithmetic import settings
from stages.errors import InputError
from stages.parameters import Parameters, read_parameters
from stages.workplace import working_alone

# They tell each retry, and each head that a checkpoint lacks; the pipeline says itself what went wrong.
QUIET = ("datasets", "huggingface_hub", "transformers")
REFUSED = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS, errno.EXDEV)
CHATTY = ("httpx", "httpx2", "fontTools", "matplotlib", "distributed")


def prepare() -> None:
    """Before a stage's libraries are loaded: wrong parameters, and Ctrl-C from now on, in one line; its arithmetic."""
    sys.excepthook = _explain
    try:
        settings.choose(read_parameters().arithmetic)
    except InputError as error:
        sys.exit(f"error: {error}")


def run_stage(stage: Callable[[Parameters], None]) -> None:
    """Read `params.yaml`, run the stage; an `InputError` becomes one line and exit status 1."""
    with as_command():
        parameters = read_parameters()
        with working_alone(Path(inspect.getfile(stage)).stem):
            stage(parameters)


@contextmanager
def as_command() -> Iterator[None]:
    """The log of what runs here, and its errors as one line and exit status 1."""
    sys.excepthook = _explain
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    for names, level in ((CHATTY, logging.WARNING), (QUIET, logging.CRITICAL)):
        for name in names:
            logging.getLogger(name).setLevel(level)
    try:
        yield
    except InputError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        sys.exit(f"error: the system refuses {error.filename}: {error.strerror}")


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("\nstopped; `dvc repro` goes on from here", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
