"""Runs a stage as a command: sets up the process, reads params.yaml, and turns errors and signals into one line."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import FrameType, TracebackType

from attnmix.arithmetic import settings
from attnmix.core.errors import InputError, first_line
from stages.common.parameters import read_parameters
from stages.common.resume import kept
from stages.common.stage_lock import working_alone

# They tell each retry, and each head that a checkpoint lacks; the pipeline says itself what went wrong.
QUIET = ("datasets", "huggingface_hub", "transformers")
FULL = (errno.EDQUOT, errno.ENOSPC)
REFUSED = (errno.EACCES, errno.ELOOP, errno.EPERM, errno.EROFS, errno.EXDEV, *FULL)
MEMORY_PARAMETERS = {
    "finetune": "finetune.batch_size or finetune.max_length",
    "capture": "capture.batch_tokens or capture.max_length",
    "measure": "capture.batch_tokens, capture.max_length or measure.gradient_max_length",
    "faithfulness": "capture.batch_tokens or faithfulness.max_length",
    "reduce": "umap.max_points",
}  # what decides how much memory a stage takes
CHATTY = ("httpx", "httpx2", "fontTools", "matplotlib", "distributed")


STOPS = (signal.SIGINT, signal.SIGTERM)
"""Of Ctrl-C; and of a batch system before it takes the machine away, and of torchrun when another process fails."""


STAGES = ("sources", "download", "finetune", "tokenize", "capture", "measure", "faithfulness", "reduce", "render")
ENVIRONMENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_XET": "1",  # its transfers bypass `attnmix.hub.retries`
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # required by torch's deterministic algorithms on a GPU
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables that libraries read when they are imported."""


def main(arguments: Sequence[str]) -> None:
    """Run the stage that the command line names, or `show`; an `InputError` becomes one line and exit status 1."""
    if arguments[:1] == ["show"]:
        prepare_process()
        import_module("stages.show").run(arguments[1:])
        return
    if len(arguments) != 1 or arguments[0] not in STAGES:
        sys.exit(f"error: {' '.join(arguments) or 'nothing'} is no stage; allowed: one of {', '.join(STAGES)}")
    (name,) = arguments
    prepare_process()
    stage = import_module(f"stages.{name}")
    with as_command(partial(kept, name)):
        parameters = read_parameters()
        with working_alone(name), memory_errors_explained(name):
            stage.main(parameters)


def prepare_process() -> None:
    """Set up the process before libraries that take seconds to load: environment, arithmetic, signals, parameters."""
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    _listen()
    sys.excepthook = _explain
    try:
        settings.choose(read_parameters().arithmetic)
    except InputError as error:
        sys.exit(f"error: {error}")


@contextmanager
def memory_errors_explained(stage: str) -> Iterator[None]:
    """Raise `InputError` where Python, NumPy or torch runs out of memory, and name what would need less of it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        of_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)  # GPU or CPU
        if stage in MEMORY_PARAMETERS and (isinstance(error, MemoryError) or of_torch):
            smaller = MEMORY_PARAMETERS[stage]
            raise InputError(f"{stage}: out of memory ({first_line(error)}); reduce {smaller}") from error
        raise


@contextmanager
def as_command(rest: Callable[[], str]) -> Iterator[None]:
    """The log of what runs here; its errors as one line and exit status 1, a stop as one that ends with `rest`.

    The exit status of what a signal stops is the shell's for that signal: 130 after Ctrl-C, 143 after SIGTERM.
    """
    _listen()
    sys.excepthook = _explain
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    for names, level in ((CHATTY, logging.WARNING), (QUIET, logging.CRITICAL)):
        for name in names:
            logging.getLogger(name).setLevel(level)
    try:
        yield
    except BaseException as error:
        if _Stopped.by is not None:  # whatever a library makes of it
            _say_stopped(rest())
            sys.exit(128 + _Stopped.by)
        if isinstance(error, InputError):
            sys.exit(f"error: {error}")
        if isinstance(error, OSError) and error.errno in REFUSED:
            # The second name of a failed copy is the file on the full disk; a failed write has no name.
            path = (error.filename2 if error.errno in FULL else None) or error.filename or "to write"
            sys.exit(f"error: the system refuses {path}: {error.strerror}")
        raise


class _Stopped:
    """By which signal, once there was one."""

    by: int | None = None


def _listen() -> None:
    for each in STOPS:
        if signal.getsignal(each) is not signal.SIG_IGN:  # as in the background of a shell
            signal.signal(each, _stop)


def _stop(number: int, _frame: FrameType | None) -> None:
    """What is open is closed and its locks are given up; at the second time it ends at once, as by SIGKILL."""
    if _Stopped.by is not None:
        os._exit(128 + number)
    _Stopped.by = number
    raise KeyboardInterrupt


def _say_stopped(rest: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # one of all processes
        print(f"\nstopped; {rest}", file=sys.stderr, flush=True)


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):  # while libraries are loaded
        _say_stopped("nothing had begun; `dvc repro` goes on from here")
        os._exit(128 + (_Stopped.by or signal.SIGINT))
    sys.__excepthook__(kind, error, trace)
