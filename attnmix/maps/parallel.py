"""Maps side by side: threads of this process, or the workers of a Dask cluster that the environment names."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import joblib
import torch
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from attnmix.arithmetic import kernels, settings
from attnmix.core.errors import InputError

SCHEDULER = "DASK_SCHEDULER_ADDRESS"  # Dask's own name for it
SECONDS_TO_ANSWER = 10
NUMBA_ALONE = threading.Lock()  # code that numba itself runs in threads may be entered by one at a time
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
            results = parallel(
                joblib.delayed(_in_one_thread)(on_cluster(), kernels.portable(), function, *each) for each in calls
            )
            return list(tqdm(results, total=len(calls), desc=what, disable=None))
    finally:
        torch.set_num_threads(before)


def on_cluster() -> bool:
    """Whether the environment names a Dask scheduler."""
    return bool(os.environ.get(SCHEDULER))


def check_cluster() -> None:
    """`InputError` where the environment names a scheduler that does not answer."""
    if on_cluster():
        _client().close()


def _client() -> Any:
    from distributed import Client

    address = os.environ[SCHEDULER]
    client: Any = Client
    try:
        return client(address, timeout=SECONDS_TO_ANSWER)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{SCHEDULER}={address}: no Dask scheduler answers there; start one (`dask scheduler`) and name it as "
            "tcp://host:port, or unset the variable to work in this process"
        ) from error


@contextmanager
def _backend() -> Iterator[int]:
    """The number of workers, under joblib's backend for them."""
    if on_cluster():
        with _client() as client, joblib.parallel_config(backend="dask", client=client):
            yield -1
    else:
        # Our loops and torch's run without the interpreter lock, so threads are enough and start at once.
        with threadpool_limits(1), joblib.parallel_config(backend="threading"):
            yield joblib.cpu_count()


def _in_one_thread(on_worker: bool, portable: bool, function: Callable[..., Result], *arguments: Any) -> Result:
    """Torch is told in each thread; a worker's other libraries nobody else has told."""
    if on_worker and portable:
        if not settings.in_place():
            raise InputError(
                "arithmetic: portable, and Dask's workers compute otherwise; start each of them by "
                "`env $(python -m attnmix.arithmetic) dask worker ADDRESS`, or set it to fastest"
            )
        kernels.use(settings.PORTABLE)
    torch.set_num_threads(1)
    with threadpool_limits(1 if on_worker else None):
        return function(*arguments)
