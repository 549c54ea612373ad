"""The command that runs a stage: process setup, loading of params.yaml, one-line messages for errors and signals."""

import errno
import gc
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from attnmix.core.arithmetic import environment
from attnmix.core.errors import InputError, first_line, is_out_of_memory
from attnmix.core.imports import frozen_imports
from attnmix.core.signals import received_signal, stop_signals_raised
from attnmix.core.terminal import log_to_terminal, printable
from stages.common.parameters import read_parameters
from stages.common.resume import describe_unfinished, is_first_process, lock_stage

QUIETED_LIBRARIES = ("distributed", "fontTools", "httpx", "httpx2", "matplotlib", "torch")
"""Libraries with verbose logging at level INFO."""
SYSTEM_REFUSALS = (
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.ELOOP,
    errno.ENOSPC,
    errno.EPERM,
    errno.EROFS,
    errno.EXDEV,
)
"""Errors of the operating system that the user can fix: permissions, full and read-only disks, circular links."""
DISK_FULL_SIGNS = ("No space left on device", "inline_container")
"""Parts of the error messages of safetensors and torch about a full disk; these errors are no `OSError` objects."""
MEMORY_PARAMETERS = {
    "finetune": "finetune.batch_size or finetune.max_length",
    "capture": "capture.batch_tokens or capture.max_length",
    "inspect": "capture.max_length or measure.matrices",
    "measure": "capture.batch_tokens, capture.max_length, measure.gradient_max_length or measure.parts_max_length",
    "faithfulness": "capture.batch_tokens or faithfulness.max_length",
    "reduce": "umap.max_points",
}
"""Parameters that determine the memory use of each stage."""
STAGES = (
    "sources",
    "download",
    "finetune",
    "tokenize",
    "capture",
    "inspect",
    "measure",
    "faithfulness",
    "reduce",
    "render",
)
ENVIRONMENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # The pipeline reports errors itself, whereas these libraries log every retry and every missing head. At import,
    # these libraries reset log levels that were set with `logging`.
    **dict.fromkeys(("DATASETS_VERBOSITY", "HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY"), "critical"),
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables that libraries read at import."""
WITHOUT_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def main(arguments: Sequence[str]) -> None:
    """Run the stage with the name in `arguments`."""
    name = arguments[0] if arguments else "nothing"
    if len(arguments) != 1 or name not in STAGES:
        sys.exit(f"error: {' '.join(arguments) or 'no argument'}: not a stage; allowed: {', '.join(STAGES)}")
    with as_command(name):
        parameters = read_parameters()
        _set_environment()
        environment.set_variables(parameters.arithmetic)
        with frozen_imports():  # excludes the imported objects from garbage collection
            stage = import_module(f"stages.{name}")
            gc.collect()  # removes 6 MB of copies of `sys.modules`, which would otherwise be frozen too
        with lock_stage(name):
            stage.main(parameters)
        if "torch" in sys.modules:  # not every stage imports torch
            from attnmix.core.device import end_process_group

            end_process_group()


def _set_environment() -> None:
    """Set the variables in `ENVIRONMENT` that the user has not set; without a terminal, disable progress bars too."""
    variables = ENVIRONMENT if sys.stderr.isatty() else ENVIRONMENT | WITHOUT_BARS
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextmanager
def as_command(stage: str) -> Iterator[None]:
    """Log to stderr, and exit with a one-line message after an error or a stop signal.

    The exit status is 1 after an error, and 128 plus the signal number after a signal, as in shells (130 for Ctrl-C,
    143 for SIGTERM).
    """
    log_to_terminal(logging.INFO)
    for name in QUIETED_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with stop_signals_raised():
            yield
    except BaseException as error:
        number = received_signal()
        if number is not None:  # libraries may convert the signal to another exception
            if is_first_process():
                print(f"\nstopped; {describe_unfinished(stage)}", file=sys.stderr)
            sys.exit(128 + number)
        message = _explain_error(error, stage)
        if message is None:
            raise
        sys.exit(f"error: {printable(message)}")


def _explain_error(error: BaseException, stage: str) -> str | None:
    """Return the message for an error that the user can fix; None for any other error."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, OSError) and error.errno in SYSTEM_REFUSALS:
        # `filename2` is the destination of a copy or move; after a failed write, both names are missing.
        return f"the system refuses to access {error.filename2 or error.filename or 'a file'} ({error.strerror})"
    if any(sign in str(error) for sign in DISK_FULL_SIGNS):
        return f"{stage}: cannot write a file ({first_line(error)}); free some space and run again"
    if stage in MEMORY_PARAMETERS and is_out_of_memory(error):
        return f"{stage}: out of memory ({first_line(error)}); reduce {MEMORY_PARAMETERS[stage]}"
    return None
