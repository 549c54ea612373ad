"""Shared code of the benchmarks: fresh processes with one thread count for all libraries, their times, and tables.

Imports nothing that computes, so that a process pays for what its own way imports and for no more.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from attnmix.arithmetic import settings

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "numpy", "numba", "umap-learn", "scikit-learn", "joblib", "matplotlib", "zarr")
# torch takes the first; joblib's number of workers, and with it the number of maps at once, is the last.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "LOKY_MAX_CPU_COUNT",
)
MEASURED = "measured.json"


def device() -> Any:
    """Return the device of this process."""
    from attnmix.core.device import chosen  # loads torch

    return chosen()


def synchronize() -> None:
    """Wait for what the device has still to compute."""
    import torch

    if device().type != "cpu":
        torch.accelerator.synchronize()


class Timing(NamedTuple):
    """One run of one way; no peak where several ways shared the process."""

    seconds: float
    peak_mb: float | None


class Case(NamedTuple):
    """Ways to the same thing, by name; the first is what `ratio` sets the others against."""

    title: str
    folder: str
    """The name of one of the folders that `benchmarks.stages` creates."""
    check: Callable[[], str]
    """Runs after every way ran once: what was compared, in sentences; an exception where it should be the same."""
    ways: Mapping[str, Callable[[], dict[str, float] | None]]
    """Each a process of its own; one that times several ways itself, in turn, gives the seconds of each."""
    states: Sequence[str] = ("",)
    """`COLD`, `WARM`: with nothing that numba compiled before, and with what earlier runs left on disk."""
    references: Sequence[str] = ()
    """Ways that the others are set against, where it is not the first."""
    growing: bool = False
    """The same work, more of it in each way: the first alone warms up, and the check is of the last."""


COLD, WARM = "nothing compiled", "compiled before"


def numbers_of_threads(threads: int) -> dict[str, str]:
    """The one place that says how many threads a library takes."""
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


def fresh_process(
    arguments: Sequence[str], folder: Path, threads: int, compiled: Path, environment: Mapping[str, str] | None = None
) -> tuple[float, str]:
    """Wall time of `python <arguments>` in `folder`, imports included, and what it printed.

    `compiled` is where numba keeps what it compiles; `environment` has further variables.
    """
    environment = os.environ | numbers_of_threads(threads) | (environment or {})
    environment |= {"PYTHONPATH": str(REPOSITORY), "NUMBA_CACHE_DIR": str(compiled)}
    if settings.in_place():  # the portable arithmetic: BLAS has one thread, the pipeline's kernels start theirs
        environment |= settings.SETTINGS
    command = [sys.executable, "-W", "ignore", *arguments]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return seconds, done.stdout.strip()


def timed(
    case: str,
    way: str,
    folder: Path,
    threads: int,
    compiled: Path,
    cold: bool = False,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Timing]:
    """One run of a way, or of several that share a process."""
    if cold:
        compiled = compiled.with_name("cold")
        shutil.rmtree(compiled, ignore_errors=True)
    seconds, _ = fresh_process(["-m", "benchmarks.cases", case, way], folder, threads, compiled, environment)
    measured = json.loads((folder / MEASURED).read_text(encoding="ascii"))
    inside = {name: Timing(each, None) for name, each in measured["seconds"].items()}
    if list(inside) == [way]:
        return {way: Timing(inside[way].seconds, measured["peak_mb"])}
    return inside or {way: Timing(seconds, measured["peak_mb"])}


def keep_measured(seconds: Mapping[str, float] | None) -> None:
    """Called by the process that ran a way, at its end."""
    text = json.dumps({"seconds": seconds or {}, "peak_mb": peak_memory()})
    Path(MEASURED).write_text(text, encoding="ascii")


def peak_memory() -> float:
    """Peak resident memory of this process and of its workers, summed, in MB."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    statuses = [Path(f"/proc/{each.pid}/status").read_text(encoding="ascii") for each in processes]
    return sum(int(text.partition("VmHWM:")[2].split()[0]) for text in statuses if "VmHWM:" in text) / 1024


def table(found: Mapping[str, Mapping[str, Sequence[Timing]]], references: Sequence[str]) -> str:
    """Markdown: a row for each way in each state; `references` are ways that the medians are set against."""
    ways = list(dict.fromkeys(way for runs in found.values() for way in runs))
    references = references or ways[:1]
    ratios = [f"ratio to *{name}*" for name in references] if len(ways) > 1 else []
    states = ["numba"] if any(found) else []
    head = ["way", *states, "minimum", "median", "maximum", *ratios, "peak memory"]
    lines = [head, ["---"] * (1 + len(states)) + ["---:"] * (4 + len(ratios))]
    for state, runs in found.items():
        middle = {way: statistics.median(run.seconds for run in each) for way, each in runs.items()}
        for way, each in runs.items():
            seconds = [run.seconds for run in each]
            spread = [f"{value:.2f} s" for value in (min(seconds), middle[way], max(seconds))]
            compared = [f"{middle[way] / middle[name]:.2f}" for name in references] if ratios else []
            peaks = [run.peak_mb for run in each if run.peak_mb is not None]
            peak = f"{statistics.median(peaks):,.0f} MB" if peaks else ""
            lines.append([way, *([state] if states else []), *spread, *compared, peak])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine(threads: int) -> str:
    """Processor, cores, threads, GPU, load and versions, as lines for the head of a table."""
    asked = (
        "import torch, joblib, numba; from attnmix.core.device import chosen, device_name; device = chosen(); "
        "gpu = 'no GPU' if device.type == 'cpu' else device_name(device); "
        "print(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, joblib.cpu_count(), gpu, sep='; ')"
    )
    load = os.getloadavg()[0]
    torch, numba, joblib, gpu = fresh_process(["-c", asked], REPOSITORY, threads, REPOSITORY)[1].split("; ")
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"{processor()}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {gpu}; load before "
        f"{load:.1f}.\n{threads} threads ({', '.join(THREAD_VARIABLES)}): torch says {torch}, numba {numba}, joblib "
        f"{joblib}.\nPython {platform.python_version()}, {packages}."
    )


def processor() -> str:
    """Return the name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
