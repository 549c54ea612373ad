"""The number of threads of small computations.

OpenMP threads wait for each other actively. On busy cores, a thread may itself have to wait for a core, which makes a
short operation many times slower than in a single thread. `OMP_WAIT_POLICY=passive` avoids this but must be set before
torch is loaded, as in the commands and stages.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from threadpoolctl import ThreadpoolController

ONE_THREAD_TOKENS = 256  # per forward pass; with fewer tokens, waking a thread is as slow as the operation


@contextmanager
def few_threads(tokens: int = 0) -> Iterator[None]:
    """Use a single OpenMP thread if the pass has few tokens and threads wait actively; other threads are unaffected."""
    if tokens > ONE_THREAD_TOKENS or wait_passively():
        yield
        return
    torch.get_num_threads()  # the first use of torch in a thread sets the number of OpenMP threads
    with _openmp().limit(limits=1):
        yield


def wait_passively() -> bool:
    """Return True if the environment makes waiting OpenMP threads sleep."""
    return os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"


@cache
def _openmp() -> Any:
    """Return the OpenMP libraries; their thread limit applies to the calling thread only."""
    return ThreadpoolController().select(user_api="openmp")
