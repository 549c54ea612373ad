"""Environment variables of numerical libraries, which must be set before the libraries are loaded.

Without them, each library uses the widest vector instructions of the processor, which determine the order of
summation. `kernels` bypasses MKL, whose results on AMD processors differ from those on Intel under all settings.
"""

import os
import platform
import sys
from pathlib import Path

PORTABLE, FASTEST = "portable", "fastest"
TORCH_THREADS = 4
"""Number of torch threads; it determines the partition of long sums, so it is independent of the number of cores."""

SETTINGS = {
    "ATEN_CPU_CAPABILITY": "avx2",  # for loops of torch itself
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",  # AVX2 kernels for NumPy and SciPy, also on AMD
    "OPENBLAS_NUM_THREADS": "1",  # several threads change the order of summation in a product
    "NPY_DISABLE_CPU_FEATURES": "X86_V4,AVX512_ICL,AVX512_SPR",  # X86_V3 (AVX2) remains enabled
    "NUMBA_CPU_NAME": "x86-64-v3",
    "NUMBA_CPU_FEATURES": "",  # no features in addition to those of NUMBA_CPU_NAME
    "OMP_WAIT_POLICY": "PASSIVE",  # idle torch threads sleep, because the product threads need the cores
}

EPYC_COST, XEON_COST = 1.15, 2.0
"""Relative duration of forward passes in portable arithmetic, on an AMD EPYC and on an Intel Xeon with AVX-512.

The reference is the fastest arithmetic, in which MKL uses AVX-512 only on Intel processors. Measured on 200 texts of
IMDb with 2 cores: benchmarks/RESULTS.md.
"""


def set_variables(arithmetic: str) -> None:
    """Export `SETTINGS` to the environment for `portable`; do not change the environment for `fastest`."""
    if arithmetic == PORTABLE and not in_place():
        if "numpy" in sys.modules:
            raise AssertionError("NumPy was loaded before these variables were set")
        os.environ.update(SETTINGS)


def in_place() -> bool:
    """Return True if the environment of this process contains the `SETTINGS`."""
    return all(os.environ.get(name) == value for name, value in SETTINGS.items())


def can_be_portable() -> bool:
    """Return False if this machine is known to lack AVX2; its results then differ from those with AVX2."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    description = _describe_processor()
    return not description or " avx2 " in description


def note(arithmetic: str) -> str:
    """Return a log message on the guarantees of an arithmetic and its relative speed on this machine."""
    if not can_be_portable():
        return (
            "results differ from those of x86-64 processors with AVX2 in the last digits, and maps in the third digit"
        )
    times, machine = _find_cost()
    if arithmetic == PORTABLE:
        return (
            f"results are byte-identical on x86-64 processors with AVX2; forward passes take {times} times as long as "
            f"with `arithmetic: fastest` (measured on {machine})"
        )
    return (
        "results differ between machines in the last digits, and maps in the third digit; with `arithmetic: portable`, "
        f"they are byte-identical, and forward passes take {times} times as long (measured on {machine})"
    )


def _find_cost() -> tuple[str, str]:
    """Return the relative duration of portable arithmetic, and the processor type of the measurement."""
    description = _describe_processor()
    if "GenuineIntel" in description and " avx512f " in description:
        return str(XEON_COST), "an Intel Xeon with AVX-512"
    if "AuthenticAMD" in description:
        return str(EPYC_COST), "an AMD EPYC"
    return f"{EPYC_COST} to {XEON_COST}", "an AMD EPYC and an Intel Xeon with AVX-512"


def _describe_processor() -> str:
    """Return Linux's description of the processor, or an empty string on other systems."""
    description = Path("/proc/cpuinfo")
    return description.read_text(encoding="utf-8", errors="replace") if description.exists() else ""
