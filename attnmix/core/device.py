"""Device selection, and settings for correct and reproducible results on the selected device.

Each process uses one device: the value of the environment variable `ATTNMIX_DEVICE`, otherwise a GPU, otherwise the
CPU. A launcher (torchrun, accelerate) assigns a separate GPU to each of its processes. Apple GPUs are used only if
`ATTNMIX_DEVICE` selects them; the measures are then computed on the CPU, because Apple GPUs lack float64.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attnmix.core.errors import InputError, first_line
from attnmix.core.torch_state import CPU, set_full_precision

if TYPE_CHECKING:
    from accelerate import PartialState

VARIABLE = "ATTNMIX_DEVICE"
APPLE = "mps"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
NEEDED_DRIVERS = {"12": "525.60.13", "13": "580.65.06"}
"""The minimum version of the NVIDIA driver on Linux for each major version of CUDA (source: CUDA release notes)."""
BARRIER_TIMEOUT = timedelta(days=7)
"""Maximum time to wait for other processes: a long text may take hours, and the default of NCCL is 10 minutes."""
WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""An environment variable that cuBLAS reads when CUDA starts.

Without this variable, matrix products on CUDA are not deterministic, and torch raises an error.
"""


def chosen_device() -> torch.device:
    """Return the device of this process: the one in `ATTNMIX_DEVICE`, otherwise a non-Apple GPU, otherwise the CPU.

    Raise `InputError` if the device does not exist, or if several processes would use the same GPU.
    """
    name = os.environ.get(VARIABLE, "").strip()
    if name:
        device = device_named(name, VARIABLE)
        if ":" in name and process_count() > 1:
            problem = f"{name} is one device, but the launcher started {process_count()} processes"
            raise InputError(f"{VARIABLE}: {problem}; allowed: cpu, {device.type}")
        return device
    accelerator = _find_accelerator()
    if accelerator is None or accelerator.type == APPLE:
        return CPU
    return torch.device(accelerator.type, _read_process_index())


def device_named(name: torch.device | str, key: str) -> torch.device:
    """Return the device `name`, such as `cpu`, `cuda` or `cuda:1`.

    Raise `InputError`, prefixed with `key`, if this machine has no such device.
    """
    name = str(name)
    accelerator = _find_accelerator()
    allowed = ["cpu"]
    if accelerator is not None:
        allowed.append(accelerator.type)
        for index in range(torch.accelerator.device_count()):
            allowed.append(f"{accelerator.type}:{index}")
    if name not in allowed:
        problem = f"{name} is not a device of this machine"
        reason = _explain_missing_gpu() if name.startswith("cuda") else None
        if reason:
            problem += f" ({reason})"
        raise InputError(f"{key}: {problem}; allowed: {', '.join(allowed)}")
    device = torch.device(name)
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, _read_process_index())  # a separate GPU for each process of a launcher


def device_name(device: torch.device) -> str:
    """Return the product name of a GPU, or the type of any other device."""
    module = torch.get_device_module(device)
    if not hasattr(module, "get_device_name"):
        return device.type
    return str(module.get_device_name(device))


def prepare_device(device: torch.device) -> None:
    """Configure the process for correct and reproducible results on `device`, and log the device.

    Matrix products, convolutions and RNNs use full float32 precision. Non-deterministic operators raise an error on
    CUDA and cause a warning on other devices. Call this function before CUDA starts.
    """
    for name, value in WORKSPACE.items():
        os.environ.setdefault(name, value)
    # With `warn_only`, torch would compute non-deterministic gradients of attention on CUDA, and only warn.
    torch.use_deterministic_algorithms(True, warn_only=device.type != "cuda")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a module property
    set_full_precision()
    if os.environ.get("RANK", "0") == "0":
        _log_device(device)


def measuring_device(device: torch.device) -> torch.device:
    """Return `device`, or the CPU if the device does not support float64."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except TypeError:
        return CPU
    return device


def process_state(device: torch.device) -> PartialState:
    """Return the `PartialState` of accelerate for the group of the launcher's processes, or for this process alone."""
    from accelerate import PartialState  # slow import (1 s)

    return PartialState(cpu=device.type == "cpu", timeout=BARRIER_TIMEOUT)


def end_process_group() -> None:
    """Leave the launcher's process group if this process joined it, because torch would otherwise warn at exit."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def check_precision(key: str, precision: str, device: torch.device) -> None:
    """Raise `InputError`, prefixed with `key`, if `device` does not support `precision`."""
    if device.type == "cpu" and precision == "fp16":
        raise InputError(f"{key}: fp16 needs a GPU; allowed on this machine: fp32, bf16")
    if device.type == "cuda" and precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        problem = f"bf16 needs a GPU of NVIDIA's Ampere generation or newer, but this one is a {device_name(device)}"
        raise InputError(f"{key}: {problem}; allowed: fp32, fp16")


def _find_accelerator() -> torch.device | None:
    """Return the type of the available accelerator, or None."""
    with warnings.catch_warnings():
        # torch warns about an outdated driver; `_explain_missing_gpu` reports this problem in one line instead.
        warnings.simplefilter("ignore")
        return torch.accelerator.current_accelerator(check_available=True)


def process_count() -> int:
    """Return the number of processes started by the launcher (torchrun or accelerate)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _read_process_index() -> int:
    """Return the index of the GPU for this process; raise `InputError` if there are more processes than GPUs."""
    if process_count() == 1:
        return 0
    index = int(os.environ.get("LOCAL_RANK", "0"))
    devices = torch.accelerator.device_count()
    if index >= devices:
        started = os.environ.get("LOCAL_WORLD_SIZE", str(process_count()))
        noun = "GPU" if devices == 1 else "GPUs"
        problem = f"{started} processes on a machine with {devices} {noun}"
        raise InputError(f"--nproc-per-node: {problem}; allowed: at most {devices}, or {VARIABLE}=cpu")
    return index


def _log_device(device: torch.device) -> None:
    """Log the device, and warn if a GPU of this machine is not used."""
    if device.type == "cpu":
        logging.info("device: CPU")
        is_chosen_by_user = bool(os.environ.get(VARIABLE))
        reason = None if is_chosen_by_user else _explain_missing_gpu()
        if reason is not None:
            logging.warning("a GPU of this machine is not used: %s", reason)
        return
    logging.info("device: %s", ", ".join([device_name(device), *_describe_gpu(device)]))
    devices = torch.accelerator.device_count()
    if devices > 1 and process_count() == 1:  # each process uses only one GPU
        command = f"`torchrun --nproc-per-node {devices} -m stages STAGE`"
        logging.warning("%d of %d GPUs are unused; %s uses all of them", devices - 1, devices, command)


def _describe_gpu(device: torch.device) -> list[str]:
    """Return the memory, driver and CUDA version of an NVIDIA GPU for a log message; [] for other devices."""
    if device.type != "cuda":
        return []
    memory_bytes = torch.cuda.get_device_properties(device).total_memory
    details = [f"{memory_bytes / 2**30:.0f} GiB"]
    driver = _read_driver_version()
    if driver is not None:
        details.append(f"driver {driver}")
    details.append(f"CUDA {torch.version.cuda}")
    return details


def _read_driver_version() -> str | None:
    """Return the version of the NVIDIA driver as a phrase of a message, or None if there is no driver.

    The phrase is "of an unknown version" if the driver does not report its version.
    """
    if not NVIDIA_DRIVER.exists():
        return None
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", NVIDIA_DRIVER.read_text(encoding="utf-8", errors="replace"))
    return match[0] if match else "of an unknown version"


def _explain_missing_gpu() -> str | None:
    """Return the reason why CUDA does not start despite an NVIDIA driver; None if there is no driver or CUDA starts."""
    driver = _read_driver_version()
    if driver is None:
        return None
    accelerator = _find_accelerator()
    if accelerator is not None and accelerator.type == "cuda":
        return None
    cuda = torch.version.cuda
    if cuda is None:
        return f"its driver is {driver}, but the installed torch is a build without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return f"its driver is {driver}, but CUDA_VISIBLE_DEVICES is empty"
    major_version, _, _ = cuda.partition(".")
    needed = NEEDED_DRIVERS.get(major_version)
    if needed and _parse_version(driver) < _parse_version(needed):
        return f"its driver is {driver}, and torch for CUDA {cuda} needs {needed} or newer"
    return f"its driver is {driver}, but CUDA {cuda} does not start: {_read_start_error()}"


def _parse_version(version: str) -> list[int]:
    """Return the numbers in a version string, for comparisons between versions."""
    return [int(number) for number in re.findall(r"\d+", version)]


def _read_start_error() -> str:
    """Start CUDA; return the first line of its error, or "no device is visible" if it raises no error."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "no device is visible"
