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
    "NPY_DISABLE_CPU_FEATURES": "X86_V3,X86_V4,AVX512_ICL,AVX512_SPR",
    "NUMBA_CPU_NAME": "x86-64-v3",
    "NUMBA_CPU_FEATURES": "",  # besides those of that name
    "OMP_WAIT_POLICY": "PASSIVE",  # torch's threads sleep without work: the threads of the products need the cores
}

ARITHMETIC_NOTES = {
    PORTABLE: "the same bytes on every x86-64 processor with AVX2; `arithmetic: fastest` takes up to a quarter "
    "less time",
    FASTEST: "results differ from machine to machine in the last digits, and maps in the third; `arithmetic: portable` "
    "gives the same bytes on every x86-64 processor with AVX2, and takes up to a third more time",
}
"""Notes for the log: the guarantee of each arithmetic, and the price of the other, measured on an AMD EPYC."""


def choose(arithmetic: str) -> None:
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
    processor = Path("/proc/cpuinfo")
    return not processor.exists() or " avx2 " in processor.read_text(encoding="utf-8", errors="replace")
