"""Run one-thread jobs in parallel: in threads of this process, or on the Dask cluster that the environment names."""

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import joblib
from threadpoolctl import ThreadpoolController, threadpool_limits
from tqdm import tqdm

from attnmix.core.arithmetic import environment
from attnmix.core.errors import InputError
from attnmix.core.extras import require_extra

SCHEDULER = "DASK_SCHEDULER_ADDRESS"  # Dask's own name for it
CONNECT_TIMEOUT_SECONDS = 10
Result = TypeVar("Result")


def in_parallel(function: Callable[..., Result], calls: Sequence[tuple[Any, ...]], description: str) -> list[Result]:
    """Return `function(*arguments)` for each of `calls`, in order, with a progress bar.

    As many run at once as there are cores (or `LOKY_MAX_CPU_COUNT` says), or workers of the Dask cluster. Each runs in
    one thread, so that its sums do not depend on how many run at once: with several threads scikit-learn finds other
    neighbours among nearly equal ones, so every neighbour search runs through here.
    """
    run = _on_cluster if SCHEDULER in os.environ else _in_threads
    with closing(run(function, calls)) as results:
        return list(tqdm(results, total=len(calls), desc=description, disable=None))


def _in_threads(function: Callable[..., Result], calls: Sequence[tuple[Any, ...]]) -> Generator[Result]:
    """Yield the results of a pool of threads: the compiled loops and NumPy run without the interpreter lock.

    The number of BLAS's threads is the process's, that of OpenMP's the calling thread's.
    """
    controller = ThreadpoolController()  # it takes milliseconds to find the libraries, so not in every call
    with controller.limit(limits=1):
        pool = ThreadPoolExecutor(joblib.cpu_count(), initializer=lambda: controller.limit(limits=1))
        try:
            yield from pool.map(lambda arguments: function(*arguments), calls)
        finally:
            pool.shutdown(cancel_futures=True)


def _on_cluster(function: Callable[..., Result], calls: Sequence[tuple[Any, ...]]) -> Generator[Result]:
    """Yield the results of the Dask cluster; raise `InputError` for a scheduler that does not answer."""
    require_extra("dask", SCHEDULER)
    from distributed import Client

    job = partial(_in_one_thread, environment.in_place(), function)
    address = os.environ[SCHEDULER]
    client: Any = Client
    try:
        client = client(address, timeout=CONNECT_TIMEOUT_SECONDS)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{SCHEDULER}={address}: no Dask scheduler answers there; start one (`dask scheduler`) and name it as "
            "tcp://host:port, or unset the variable to work in this process"
        ) from error
    with client, joblib.parallel_config(backend="dask", client=client):
        workers = joblib.Parallel(n_jobs=-1, return_as="generator")
        yield from workers(joblib.delayed(job)(*arguments) for arguments in calls)


def _in_one_thread(portable: bool, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call `function` with one thread of OpenMP and BLAS; OpenMP's number is that of the calling thread only."""
    if portable and not environment.in_place():
        raise InputError(
            "arithmetic: portable, and Dask's workers compute otherwise; start each of them by "
            "`env $(python -m attnmix.core.arithmetic) dask worker ADDRESS`, or set it to fastest"
        )
    with threadpool_limits(1):
        return function(*arguments)
