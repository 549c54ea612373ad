"""Maps side by side: threads of this process, or the workers of a Dask cluster that the environment names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import joblib
import torch
from threadpoolctl import threadpool_limits
from tqdm import tqdm

SCHEDULER = "DASK_SCHEDULER_ADDRESS"  # Dask's own name for it
Result = TypeVar("Result")


def in_parallel(function: Callable[..., Result], calls: Sequence[tuple[Any, ...]], what: str) -> list[Result]:
    """`function(*arguments)` for each of `calls`, in order, with a progress bar.

    As many at once as the processor has cores (or `LOKY_MAX_CPU_COUNT` says), or as the Dask cluster has workers.
    Each call computes in one thread, so that its result does not depend on how many run beside it.
    """
    before = torch.get_num_threads()
    try:
        with _backend() as workers:
            parallel = joblib.Parallel(n_jobs=workers, return_as="generator")
            results = parallel(joblib.delayed(_one_thread)(function, arguments) for arguments in calls)
            return list(tqdm(results, total=len(calls), desc=what, disable=not sys.stderr.isatty()))
    finally:
        torch.set_num_threads(before)


@contextmanager
def _backend() -> Iterator[int]:
    """The number of workers, under joblib's backend for them."""
    if os.environ.get(SCHEDULER):
        from distributed import Client

        client: Any = Client
        with client(), joblib.parallel_config(backend="dask"):
            yield -1
    else:
        # The loops of a layout run without the interpreter lock, so threads are enough and start at once.
        with threadpool_limits(1), joblib.parallel_config(backend="threading"):
            yield joblib.cpu_count()


def _one_thread(function: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
    torch.set_num_threads(1)
    if os.environ.get(SCHEDULER) is None:
        return function(*arguments)
    with threadpool_limits(1):
        return function(*arguments)
