"""Environment variables that numerical libraries read when they are loaded, so they must be set before.

Without them each library takes the widest instructions of the processor, and sums in another order. MKL is not named:
on an AMD processor it computes otherwise whatever it is told, so `kernels` leaves it out.
"""

import os
import platform
import sys
from pathlib import Path

PORTABLE, FASTEST = "portable", "fastest"
TORCH_THREADS = 4
"""Threads of torch, on however many cores: they decide how long sums are divided."""

SETTINGS = {
    "ATEN_CPU_CAPABILITY": "avx2",  # torch's own loops
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",  # of NumPy and of SciPy; the kernels for AVX2, also on AMD
    "OPENBLAS_NUM_THREADS": "1",  # a product that several threads share is summed in another order
    "NPY_DISABLE_CPU_FEATURES": "X86_V4,AVX512_ICL,AVX512_SPR",  # which leaves X86_V3: AVX2
    "NUMBA_CPU_NAME": "x86-64-v3",
    "NUMBA_CPU_FEATURES": "",  # besides those of that name
    "OMP_WAIT_POLICY": "PASSIVE",  # torch's threads sleep without work: the threads of the products need the cores
}

EPYC_COST, XEON_COST = 1.15, 2.0
"""Forward passes in portable arithmetic beside the fastest one, on an AMD EPYC and on an Intel Xeon with AVX-512.

In the fastest one MKL takes AVX-512 on Intel's processors alone. 200 reviews of IMDb, 2 cores: benchmarks/RESULTS.md.
"""


def set_variables(arithmetic: str) -> None:
    """Put `SETTINGS` into the environment for `portable`; for `fastest` leave it as it is."""
    if arithmetic == PORTABLE and not in_place():
        if "numpy" in sys.modules:
            raise AssertionError("NumPy is loaded already, and has read another environment")
        os.environ.update(SETTINGS)


def in_place() -> bool:
    """Return True where this process has the `SETTINGS`."""
    return all(os.environ.get(name) == value for name, value in SETTINGS.items())


def can_be_portable() -> bool:
    """Return True where this machine has AVX2; on others results differ from the committed ones."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    description = _processor()
    return not description or " avx2 " in description


def note(arithmetic: str) -> str:
    """Return, for the log, what an arithmetic guarantees and what it costs or gains on this machine."""
    if not can_be_portable():
        return "results differ in the last digits from those of x86-64 processors with AVX2, and maps in the third"
    times, machine = _cost_here()
    if arithmetic == PORTABLE:
        return (
            f"the same bytes on every x86-64 processor with AVX2; forward passes take {times} times as long as with "
            f"`arithmetic: fastest` (measured on {machine})"
        )
    return (
        "results differ from machine to machine in the last digits, and maps in the third; with `arithmetic: portable` "
        f"they are the same bytes, and forward passes take {times} times as long (measured on {machine})"
    )


def _cost_here() -> tuple[str, str]:
    """Return how many times as long portable arithmetic takes, and the processor of which that is known."""
    description = _processor()
    if "GenuineIntel" in description and " avx512f " in description:
        return str(XEON_COST), "an Intel Xeon with AVX-512"
    if "AuthenticAMD" in description:
        return str(EPYC_COST), "an AMD EPYC"
    return f"{EPYC_COST} to {XEON_COST}", "an AMD EPYC and an Intel Xeon with AVX-512"


def _processor() -> str:
    """Return Linux's description of the processor; elsewhere nothing."""
    description = Path("/proc/cpuinfo")
    return description.read_text(encoding="utf-8", errors="replace") if description.exists() else ""
