"""Parallel execution of single-threaded jobs, in threads of this process or on a Dask cluster."""

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

SCHEDULER = "DASK_SCHEDULER_ADDRESS"  # defined by Dask
CONNECT_TIMEOUT_SECONDS = 10
Result = TypeVar("Result")


def in_parallel(function: Callable[..., Result], calls: Sequence[tuple[Any, ...]], description: str) -> list[Result]:
    """Return `function(*arguments)` for each of `calls`, in order, with a progress bar.

    The number of concurrent jobs is the number of Dask workers or, without Dask, `LOKY_MAX_CPU_COUNT`, by default the
    number of cores. Each job runs in a single thread, so that sums do not depend on the number of cores. Otherwise,
    scikit-learn could select different neighbours at nearly equal distances; all neighbour searches therefore use this
    function.
    """
    run = _run_on_cluster if SCHEDULER in os.environ else _run_in_threads
    with closing(run(function, calls)) as results:
        return list(tqdm(results, total=len(calls), desc=description, disable=None))


def _run_in_threads(function: Callable[..., Result], calls: Sequence[tuple[Any, ...]]) -> Generator[Result]:
    """Yield the results of a thread pool. Threads suffice because compiled loops and NumPy release the GIL.

    Each job may use only one thread of BLAS and OpenMP. The limit for BLAS applies to the process, but the limit for
    OpenMP only to the thread that sets it. Each thread of the pool therefore sets the limits as well.
    """
    controller = ThreadpoolController()  # created once, because finding the libraries takes milliseconds

    def limit_thread() -> None:
        """Limit BLAS and OpenMP to one thread, at the start of a thread of the pool."""
        controller.limit(limits=1)

    with controller.limit(limits=1):
        pool = ThreadPoolExecutor(joblib.cpu_count(), initializer=limit_thread)
        try:
            yield from pool.map(lambda arguments: function(*arguments), calls)
        finally:
            pool.shutdown(cancel_futures=True)


def _run_on_cluster(function: Callable[..., Result], calls: Sequence[tuple[Any, ...]]) -> Generator[Result]:
    """Yield the results of the Dask cluster; raise `InputError` if the scheduler does not respond."""
    require_extra("dask", SCHEDULER)
    is_portable = environment.in_place()  # True if this process has portable arithmetic
    job = partial(_run_in_one_thread, is_portable, function)
    client = _connect_to_scheduler()
    with client, joblib.parallel_config(backend="dask", client=client):
        workers = joblib.Parallel(n_jobs=-1, return_as="generator")
        yield from workers(joblib.delayed(job)(*arguments) for arguments in calls)


def _connect_to_scheduler() -> Any:
    """Return a client of the Dask scheduler at the address in the variable `SCHEDULER`."""
    from distributed import Client

    address = os.environ[SCHEDULER]
    create_client: Any = Client
    try:
        return create_client(address, timeout=CONNECT_TIMEOUT_SECONDS)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{SCHEDULER}={address}: no Dask scheduler responds at this address; start one (`dask scheduler`) and set "
            "the variable to its tcp://host:port, or unset the variable to compute in this process"
        ) from error


def _run_in_one_thread(portable: bool, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call `function` with one OpenMP and BLAS thread, on a Dask worker.

    Raise `InputError` if the main process has `portable` arithmetic and the worker does not. Environment variables
    select this arithmetic, and the worker does not inherit those of the main process.
    """
    has_portable_arithmetic = environment.in_place()
    if portable and not has_portable_arithmetic:
        raise InputError(
            "arithmetic: is portable, but the Dask workers use different arithmetic; start each worker with "
            "`env $(python -m attnmix.core.arithmetic) dask worker ADDRESS`, or set arithmetic to fastest"
        )
    with threadpool_limits(1):
        return function(*arguments)
