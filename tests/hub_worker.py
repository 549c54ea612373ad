"""The stage download, or `attnmix.load`, many times in one process that `concurrent.futures` spawns.

Its libraries take seconds to load. A module of its own, because that process must have its environment before any
library is imported.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from stage_process import LIMIT

from attnmix.core.arithmetic import environment

LIMIT_SECONDS = 5.0  # for a request without progress, by the clock below
TICK_SECONDS = 0.01
ANSWER_SECONDS = 0.5  # for an answer of the hub, by the real clock; its variables of the environment are whole seconds


class Clock:
    """Stands in for the module `time`: sleeping moves the clock on at once, and so does each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the time in seconds."""
        self.now += TICK_SECONDS
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let the time pass."""
        self.now += seconds


def start_worker(variables: dict[str, str]) -> ProcessPoolExecutor:
    """Return a process with these variables in its environment."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _set_up, (variables,))


def _set_up(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    environment.set_variables(environment.PORTABLE)


def run_download(folder: Path, token: str | None) -> None:
    """Run the stage in a folder with a params.yaml."""
    from stages import download
    from stages.common.parameters import read_parameters

    _begin()
    os.chdir(folder)
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    download.main(read_parameters())


def run_load(name: str) -> dict[str, bytes]:
    """Return the weights of a model of the hub, as `attnmix.load` reads them."""
    import attnmix

    _begin()
    state = attnmix.load(name).network.state_dict()
    return {key: tensor.numpy().tobytes() for key, tensor in state.items()}


def _begin() -> None:
    """Behave as a new process, which has met no hub, with a clock that does not wait."""
    from huggingface_hub import close_session, constants

    from attnmix.data.hub import retries

    constants.HF_HUB_DOWNLOAD_TIMEOUT = constants.HF_HUB_ETAG_TIMEOUT = ANSWER_SECONDS  # type: ignore[assignment]  # shorter than a second
    retries.TIME_LIMIT_SECONDS = LIMIT_SECONDS
    retries.time = Clock()  # type: ignore[assignment]  # for the module
    close_session()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
