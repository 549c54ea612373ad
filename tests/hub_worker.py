"""A spawned process that runs the stage `download` and `attnmix.load` several times, but imports libraries only once.

This is a separate module because the process must set its environment before it imports any library.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from stage_process import LIMIT

from attnmix.core.arithmetic import environment

LIMIT_SECONDS = 5.0  # limit of a request without progress, measured by `Clock`
TICK_SECONDS = 0.01
CHECKS = ("check_model", "check_classifier")
"""Functions with which the stage `download` loads and checks a downloaded model."""
ANSWER_SECONDS = 0.5  # limit of a response in real time; the hub's environment variables accept only whole seconds


class Clock:
    """Replacement for the module `time` that advances in each call without waiting."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += TICK_SECONDS
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def start_worker(variables: dict[str, str]) -> ProcessPoolExecutor:
    """Return a pool of one process with the environment `variables`."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _set_up, (variables,))


def _set_up(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    environment.set_variables(environment.PORTABLE)


def run_download(folder: Path, token: str | None, checks_model: bool) -> None:
    """Run the stage `download` in a folder with params.yaml; the downloaded model is loaded only if `checks_model`."""
    from attnmix.models import loading
    from stages import download
    from stages.common.parameters import read_parameters

    _begin()
    for name in CHECKS:
        setattr(download, name, getattr(loading, name) if checks_model else _ignore)
    os.chdir(folder)
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    download.main(read_parameters())


def _ignore(*_: object, **_options: object) -> None:
    """Replace a check of a downloaded model."""


def run_load(name: str) -> dict[str, bytes]:
    """Return the weights of a hub model as loaded by `attnmix.load`."""
    import attnmix

    _begin()
    state = attnmix.load(name).network.state_dict()
    return {key: tensor.numpy().tobytes() for key, tensor in state.items()}


def _begin() -> None:
    """Restore the initial state of the hub client, and replace the clock of the retries by one that does not wait."""
    from huggingface_hub import close_session, constants

    from attnmix.data.hub import retries

    # The client declares these limits as int.
    constants.HF_HUB_DOWNLOAD_TIMEOUT = constants.HF_HUB_ETAG_TIMEOUT = ANSWER_SECONDS  # type: ignore[assignment]
    retries.TIME_LIMIT_SECONDS = LIMIT_SECONDS
    retries.time = Clock()  # type: ignore[assignment]  # replaces a module
    close_session()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
