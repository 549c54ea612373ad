"""The one place that chooses the device, and sets what correct and repeatable numbers need on it.

A process computes on one device: the one that the environment variable `ATTNMIX_DEVICE` names, else a GPU, else the
CPU. A launcher (torchrun, accelerate) gives each of its processes a GPU of its own. Apple's GPU must be named, since it
has no float64, which the measures need: they are then computed on the CPU.
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
"""The oldest NVIDIA driver for Linux by the first number of CUDA's version, from the release notes of CUDA."""
BARRIER_TIMEOUT = timedelta(days=7)
"""How long a process waits for others: one of them may work for hours on a long text, and NCCL would give up after 10
minutes."""
WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""The setting that cuBLAS reads when CUDA starts; without it torch refuses products, whose sums would vary by run."""


def chosen_device() -> torch.device:
    """Return the device of this process; raise `InputError` where `ATTNMIX_DEVICE` names one that is not here."""
    name = os.environ.get(VARIABLE, "").strip()
    if name:
        device = device_named(name, VARIABLE)
        if ":" in name and process_count() > 1:
            problem = f"{name} is one device, and the launcher started {process_count()} processes"
            raise InputError(f"{VARIABLE}: {problem}; allowed: cpu, {device.type}")
        return device
    accelerator = _accelerator()
    if accelerator is None or accelerator.type == APPLE:
        return CPU
    return torch.device(accelerator.type, _launched_index())


def device_named(name: torch.device | str, key: str) -> torch.device:
    """Return the device `name`, such as `cpu`, `cuda` or `cuda:1`; raise `InputError`, which begins with `key`."""
    name, accelerator = str(name), _accelerator()
    allowed, indexed = ["cpu"], list[str]()
    if accelerator is not None:
        indexed = [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
        allowed += [accelerator.type, *indexed]
    if name not in allowed:
        reason = _reason_without_gpu() if name.startswith("cuda") else None
        problem = f"{name} is not a device of this machine{f', as {reason}' if reason else ''}"
        raise InputError(f"{key}: {problem}; allowed: {', '.join(allowed)}")
    device = torch.device(name)
    return device if device.type == "cpu" or name in indexed else torch.device(device.type, _launched_index())


def device_name(device: torch.device) -> str:
    """Return the name that the maker gives to a GPU, or the type of another device."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def prepare_device(device: torch.device) -> None:
    """Set the process up for correct and repeatable numbers on `device`, and log which one it is.

    Products are in full float32 precision, algorithms deterministic. To be called before CUDA starts.
    """
    for name, value in WORKSPACE.items():
        os.environ.setdefault(name, value)
    # With `warn_only`, attention's derivatives on CUDA are not deterministic, which torch only warns of.
    torch.use_deterministic_algorithms(True, warn_only=device.type != "cuda")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of the module
    set_full_precision()
    if os.environ.get("RANK", "0") == "0":
        _log(device)


def measuring_device(device: torch.device) -> torch.device:
    """Return `device`, or the CPU where it has no float64."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except TypeError:
        return CPU
    return device


def process_state(device: torch.device) -> PartialState:
    """Return which of the launcher's processes this is; it is the only one without a launcher."""
    from accelerate import PartialState  # takes a second

    return PartialState(cpu=device.type == "cpu", timeout=BARRIER_TIMEOUT)


def end_process_group() -> None:
    """Leave the launcher's other processes, if this one joined them: torch warns where a process ends without."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def check_precision(key: str, precision: str, device: torch.device) -> None:
    """Raise `InputError`, which begins with `key`, where `device` does not compute in `precision`."""
    if device.type == "cpu" and precision == "fp16":
        raise InputError(f"{key}: fp16 needs a GPU; allowed on this machine: fp32, bf16")
    if device.type == "cuda" and precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        problem = f"bf16 needs a GPU of NVIDIA's Ampere generation or newer, and this one is a {device_name(device)}"
        raise InputError(f"{key}: {problem}; allowed: fp32, fp16")


def _accelerator() -> torch.device | None:
    """Return the kind of accelerator that torch can use, if there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that is too old, which `_reason_without_gpu` says in one line
        return torch.accelerator.current_accelerator(check_available=True)


def process_count() -> int:
    """Return how many processes the launcher (torchrun or accelerate) started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _launched_index() -> int:
    """Return the number of this process's GPU; raise `InputError` where the launcher started more than there are."""
    if process_count() == 1:
        return 0
    index, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
    if index >= devices:
        started = os.environ.get("LOCAL_WORLD_SIZE", str(process_count()))
        problem = f"{started} processes on a machine with {devices} GPU{'s' * (devices != 1)}"
        raise InputError(f"--nproc-per-node: {problem}; allowed: at most {devices}, or {VARIABLE}=cpu")
    return index


def _log(device: torch.device) -> None:
    """Log the device, and a warning where a GPU stays idle."""
    if device.type == "cpu":
        logging.info("device: CPU")
        reason = None if os.environ.get(VARIABLE) else _reason_without_gpu()
        if reason is not None:
            logging.warning("a GPU of this machine is not used: %s", reason)
        return
    logging.info("device: %s", ", ".join([device_name(device), *_details(device)]))
    if (devices := torch.accelerator.device_count()) > 1 and process_count() == 1:
        command = f"`torchrun --nproc-per-node {devices} -m stages STAGE`"
        logging.warning("%d of %d GPUs stay idle; %s uses all of them", devices - 1, devices, command)


def _details(device: torch.device) -> list[str]:
    """Return memory and driver of an NVIDIA GPU in words."""
    if device.type != "cuda":
        return []
    details = [f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"]
    if (driver := _driver()) is not None:
        details.append(f"driver {driver}")
    return [*details, f"CUDA {torch.version.cuda}"]


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, if there is one."""
    if not NVIDIA_DRIVER.exists():
        return None
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", NVIDIA_DRIVER.read_text(encoding="utf-8", errors="replace"))
    return match[0] if match else "of an unknown version"


def _reason_without_gpu() -> str | None:
    """Return why CUDA does not start although an NVIDIA driver is here; None without a driver, or where it starts."""
    driver, cuda = _driver(), torch.version.cuda
    accelerator = _accelerator()
    if driver is None or (accelerator is not None and accelerator.type == "cuda"):
        return None
    if cuda is None:
        return f"its driver is {driver}, but the installed torch is a build without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return f"its driver is {driver}, but CUDA_VISIBLE_DEVICES is empty"
    needed = NEEDED_DRIVERS.get(cuda.partition(".")[0])
    if needed and _numbers(driver) < _numbers(needed):
        return f"its driver is {driver}, and torch for CUDA {cuda} needs {needed} or newer"
    return f"its driver is {driver}, but CUDA {cuda} does not start: {_start_error()}"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _start_error() -> str:
    """Return the first line of CUDA's error."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "no device is visible"
