"""A stage as a command: its parameters, its log, and errors as one line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from stages.errors import InputError
from stages.parameters import Parameters, read_parameters


def run_stage(stage: Callable[[Parameters], None]) -> None:
    """Read `params.yaml`, run the stage; an `InputError` becomes one line and exit status 1."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    for chatty in ("httpx", "httpx2", "huggingface_hub", "fontTools", "matplotlib", "distributed"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # It reports every head that a checkpoint lacks or has too many, which is how this pipeline uses it.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        stage(read_parameters())
    except InputError as error:
        sys.exit(f"error: {error}")
