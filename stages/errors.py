"""Errors that are the user's to mend, and the one place where they end a stage."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.parameters import Parameters


class InputError(Exception):
    """Bad input: the text names the key, file or value, and what is allowed."""


def run_stage(stage: Callable[[Parameters], None]) -> None:
    """Read `params.yaml`, run the stage; an `InputError` becomes one line and exit status 1."""
    from stages.parameters import read_parameters

    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    for chatty in ("httpx", "httpx2", "huggingface_hub", "fontTools", "matplotlib", "distributed"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # It reports every head that a checkpoint lacks or has too many, which is how this pipeline uses it.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        stage(read_parameters())
    except InputError as error:
        sys.exit(f"error: {error}")
