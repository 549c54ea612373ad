"""The number of threads of small computations.

A thread of OpenMP waits for the others actively. On busy cores, where one of them may itself have to wait for a core, a
short operation then takes many times as long as in one thread. `OMP_WAIT_POLICY=passive` avoids that, but must be set
before torch is loaded, as the commands and stages do.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from threadpoolctl import ThreadpoolController

ONE_THREAD_TOKENS = 256  # per pass; for fewer tokens, waking a thread takes as long as the operation


@contextmanager
def few_threads(tokens: int = 0) -> Iterator[None]:
    """Compute in one thread where a pass has few tokens and threads wait actively; other threads are not affected."""
    if tokens > ONE_THREAD_TOKENS or wait_passively():
        yield
        return
    torch.get_num_threads()  # on its first use in a thread, torch sets the number of OpenMP's threads
    with _openmp().limit(limits=1):
        yield


def wait_passively() -> bool:
    """Return True if the environment lets OpenMP's threads sleep while they wait."""
    return os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"


@cache
def _openmp() -> Any:
    """Return the OpenMP libraries; their number of threads is set for each thread."""
    return ThreadpoolController().select(user_api="openmp")
