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

# These libraries log each retry and each missing head, and others chatter; the pipeline reports errors itself.
LOG_LEVELS = {
    logging.CRITICAL: ("datasets", "huggingface_hub", "transformers"),
    logging.WARNING: ("httpx", "httpx2", "fontTools", "matplotlib", "distributed"),
}
DISK_FULL = (errno.EDQUOT, errno.ENOSPC)
REFUSED = (errno.EACCES, errno.ELOOP, errno.EPERM, errno.EROFS, errno.EXDEV, *DISK_FULL)
MEMORY_PARAMETERS = {
    "finetune": "finetune.batch_size or finetune.max_length",
    "capture": "capture.batch_tokens or capture.max_length",
    "measure": "capture.batch_tokens, capture.max_length or measure.gradient_max_length",
    "faithfulness": "capture.batch_tokens or faithfulness.max_length",
    "reduce": "umap.max_points",
}  # what decides how much memory a stage takes
# Ctrl-C; and what a batch system sends before it takes the machine away, and torchrun when another process fails.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STAGES = ("sources", "download", "finetune", "tokenize", "capture", "measure", "faithfulness", "reduce", "render")
ENVIRONMENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_XET": "1",  # its transfers bypass the client of `attnmix.hub`
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # required by torch's deterministic algorithms on a GPU
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables that libraries read when they are imported."""


def main(arguments: Sequence[str]) -> None:
    """Run the stage that the command line names, or `show`; an `InputError` becomes one line and exit status 1."""
    name = arguments[0] if arguments else "nothing"
    if name != "show" and (len(arguments) != 1 or name not in STAGES):
        sys.exit(f"error: {' '.join(arguments) or name} is no stage; allowed: one of {', '.join(STAGES)}")
    prepare_process()
    stage = import_module(f"stages.{name}")
    if name == "show":
        stage.run(arguments[1:])
        return
    with as_command(partial(kept, name)):
        parameters = read_parameters()
        with working_alone(name), memory_errors_explained(name):
            stage.main(parameters)


def prepare_process() -> None:
    """Set environment, arithmetic and signals before libraries are imported that take seconds to load."""
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    _listen()
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
def as_command(remainder: Callable[[], str]) -> Iterator[None]:
    """Log to stderr; end with one line and exit status 1 after an error, and with `remainder` after a stop signal.

    The exit status after a signal is the shell's: 130 after Ctrl-C, 143 after SIGTERM.
    """
    _listen()
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    for level, names in LOG_LEVELS.items():
        for name in names:
            logging.getLogger(name).setLevel(level)
    try:
        yield
    except BaseException as error:
        if _received:  # whatever exception a library turns the signal into
            _print_stopped(remainder())
            sys.exit(128 + _received[0])
        if isinstance(error, InputError):
            sys.exit(f"error: {error}")
        if isinstance(error, OSError) and error.errno in REFUSED:
            # The second name of a failed copy is the file on the full disk; a failed write has no name.
            path = (error.filename2 if error.errno in DISK_FULL else None) or error.filename or "to write"
            sys.exit(f"error: the system refuses {path}: {error.strerror}")
        raise


_received: list[int] = []  # the stop signal, once there was one


def _listen() -> None:
    for each in STOP_SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:  # as in the background of a shell
            signal.signal(each, _stop)
    sys.excepthook = _excepthook


def _stop(number: int, _frame: FrameType | None) -> None:
    """Close files and release locks by an exception; the second signal ends the process at once, like SIGKILL."""
    if _received:
        os._exit(128 + number)
    _received.append(number)
    raise KeyboardInterrupt


def _print_stopped(remainder: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # one of all processes
        print(f"\nstopped; {remainder}", file=sys.stderr, flush=True)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):  # while libraries are loaded
        _print_stopped("nothing had begun; `dvc repro` goes on from here")
        os._exit(128 + (_received or [signal.SIGINT])[0])
    sys.__excepthook__(kind, error, trace)
