"""The number of threads for small computations.

By default, OpenMP threads wait for each other in busy loops. If other processes occupy the cores, a thread may have to
wait for a core, and a short operation is many times slower than in a single thread. `OMP_WAIT_POLICY=passive` avoids
this. The commands and stages set this variable before torch is loaded.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from threadpoolctl import ThreadpoolController

ONE_THREAD_TOKENS = 256  # per forward pass; with fewer tokens, waking a thread takes as long as the operation


@contextmanager
def few_threads(tokens: int = 0) -> Iterator[None]:
    """Limit this thread to one OpenMP thread if a forward pass has at most `ONE_THREAD_TOKENS` tokens.

    Threads that wait for each other in busy loops can make short operations many times slower if other processes occupy
    the cores. If `OMP_WAIT_POLICY=passive`, waiting threads sleep, and there is no limit.
    """
    if tokens > ONE_THREAD_TOKENS or wait_passively():
        yield
        return
    # The first use of torch in a thread sets the number of OpenMP threads, and must therefore precede the limit.
    torch.get_num_threads()
    with _find_openmp().limit(limits=1):
        yield


def wait_passively() -> bool:
    """Return True if `OMP_WAIT_POLICY` is set to `passive`, so that waiting OpenMP threads sleep."""
    return os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"


@cache
def _find_openmp() -> Any:
    """Return a controller of the OpenMP libraries, whose limit applies only to the calling thread."""
    return ThreadpoolController().select(user_api="openmp")
