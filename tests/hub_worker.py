"""The stage download, many times in one process that `concurrent.futures` spawns: its libraries take seconds to load.

A module of its own, because that process must have its environment before any library is imported.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from stage_process import LIMIT

from attnmix.arithmetic import settings


def start_worker(environment: dict[str, str]) -> ProcessPoolExecutor:
    """Return a process with this environment."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _set_up, (environment,))


def _set_up(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    settings.choose(settings.PORTABLE)


def run_download(folder: Path, token: str | None, limit: float) -> None:
    """Run the stage in a folder with a params.yaml, with a limit in seconds for the retries of a request."""
    from huggingface_hub import close_session

    from attnmix.hub import repository
    from stages import download
    from stages.common.parameters import read_parameters

    repository.TIME_LIMIT_SECONDS, repository.FIRST_WAIT_SECONDS = limit, 0.05
    close_session()  # as a new process, which has met no hub
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    os.chdir(folder)
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    download.main(read_parameters())
