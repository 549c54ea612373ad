"""Runs a stage as a command: sets up the process, reads params.yaml, and turns errors and signals into one line."""

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
"""Libraries that log what they do as information."""
SYSTEM_REFUSALS = (errno.EACCES, errno.EDQUOT, errno.ELOOP, errno.ENOSPC, errno.EPERM, errno.EROFS, errno.EXDEV)
"""Errors that the user can fix: permissions, full and read-only disks, links."""
MEMORY_PARAMETERS = {
    "finetune": "finetune.batch_size or finetune.max_length",
    "capture": "capture.batch_tokens or capture.max_length",
    "inspect": "capture.max_length or measure.matrices",
    "measure": "capture.batch_tokens, capture.max_length, measure.gradient_max_length or measure.parts_max_length",
    "faithfulness": "capture.batch_tokens or faithfulness.max_length",
    "reduce": "umap.max_points",
}
"""Parameters that decide how much memory a stage takes."""
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
    # Their messages, of each retry and each missing head: the pipeline reports errors itself. A level that is set by
    # `logging` would be set anew by the import.
    **dict.fromkeys(("DATASETS_VERBOSITY", "HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY"), "critical"),
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables that libraries read when they are imported."""
WITHOUT_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def main(arguments: Sequence[str]) -> None:
    """Run the stage that the command line names."""
    name = arguments[0] if arguments else "nothing"
    if len(arguments) != 1 or name not in STAGES:
        sys.exit(f"error: {' '.join(arguments) or 'no argument'}: not a stage; allowed: one of {', '.join(STAGES)}")
    with as_command(name):
        parameters = read_parameters()
        for variable, value in (ENVIRONMENT | ({} if sys.stderr.isatty() else WITHOUT_BARS)).items():
            os.environ.setdefault(variable, value)
        environment.set_variables(parameters.arithmetic)
        with frozen_imports():
            stage = import_module(f"stages.{name}")
            gc.collect()  # imports leave 6 MB of copies of `sys.modules` behind, which would be kept as well
        with lock_stage(name):
            stage.main(parameters)
        if "torch" in sys.modules:  # which not every stage loads
            from attnmix.core.device import end_process_group

            end_process_group()


@contextmanager
def as_command(stage: str) -> Iterator[None]:
    """Log to stderr; end after an error or a stop signal with one line.

    The exit status is 1 after an error; after a signal it is the shell's, 130 after Ctrl-C and 143 after SIGTERM.
    """
    log_to_terminal(logging.INFO)
    for name in QUIETED_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with stop_signals_raised():
            yield
    except BaseException as error:
        number = received_signal()
        if number is not None:  # whatever exception a library turns the signal into
            if is_first_process():
                print(f"\nstopped; {describe_unfinished(stage)}", file=sys.stderr)
            sys.exit(128 + number)
        message = _explain(error, stage)
        if message is None:
            raise
        sys.exit(f"error: {printable(message)}")


def _explain(error: BaseException, stage: str) -> str | None:
    """Return the line for an error that the user can do something about, and None for any other."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, OSError) and error.errno in SYSTEM_REFUSALS:
        # The second name is the destination of a copy or move; a failed write has no name.
        return f"the system refuses {error.filename2 or error.filename or 'to write'}: {error.strerror}"
    if stage in MEMORY_PARAMETERS and is_out_of_memory(error):
        return f"{stage}: out of memory ({first_line(error)}); reduce {MEMORY_PARAMETERS[stage]}"
    return None
