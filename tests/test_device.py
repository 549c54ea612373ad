"""One module selects the device, logs it and why a GPU is not used, and disables inexact arithmetic."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from transformers import TrainerControl, TrainerState

import attnmix
from attnmix.core import device
from attnmix.core.errors import InputError, is_out_of_memory
from attnmix.core.torch_state import CPU, torch_state
from attnmix.models.families import family_of
from stages.finetune import MAX_OVERFLOWS, OneDeviceArguments, TrainingGuard

OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (user@host)\nGCC version:\n"
OLD_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Feb 22 01:44:30 UTC 2024\n"


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str | None, number: int = 1, **environment: str) -> None:
    """Make torch report `number` accelerators of a kind, and set only the variables `environment`."""
    accelerator = kind and torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: number if kind else 0)
    for name in (device.VARIABLE, "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


CHOICES: list[tuple[str | None, int, dict[str, str], str]] = [
    (None, 0, {}, "cpu"),
    ("cuda", 1, {}, "cuda:0"),
    ("cuda", 4, {}, "cuda:0"),
    ("mps", 1, {}, "cpu"),  # float64 is missing
    ("mps", 1, {"ATTNMIX_DEVICE": "mps"}, "mps:0"),
    ("cuda", 4, {"ATTNMIX_DEVICE": "cpu"}, "cpu"),
    ("cuda", 4, {"ATTNMIX_DEVICE": "cuda"}, "cuda:0"),
    ("cuda", 4, {"ATTNMIX_DEVICE": " cuda:3 "}, "cuda:3"),
    ("cuda", 4, {"ATTNMIX_DEVICE": ""}, "cuda:0"),
    ("cuda", 4, {"WORLD_SIZE": "4", "LOCAL_RANK": "2"}, "cuda:2"),
    ("cuda", 4, {"WORLD_SIZE": "8", "LOCAL_RANK": "3", "ATTNMIX_DEVICE": "cuda"}, "cuda:3"),
    ("cuda", 4, {"WORLD_SIZE": "4", "LOCAL_RANK": "2", "ATTNMIX_DEVICE": "cpu"}, "cpu"),
]


@pytest.mark.parametrize(("kind", "number", "environment", "expected"), CHOICES)
def test_device_selection(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, number: int, environment: dict[str, str], expected: str
) -> None:
    pretend(monkeypatch, kind, number, **environment)
    assert device.chosen_device() == torch.device(expected)


REFUSED: list[tuple[str | None, int, dict[str, str], str]] = [
    (None, 0, {"ATTNMIX_DEVICE": "gpu"}, r"^ATTNMIX_DEVICE: gpu is not a device of this machine; allowed: cpu$"),
    ("cuda", 2, {"ATTNMIX_DEVICE": "cuda:2"}, r"^ATTNMIX_DEVICE: cuda:2 is .*; allowed: cpu, cuda, cuda:0, cuda:1$"),
    ("mps", 1, {"ATTNMIX_DEVICE": "cuda"}, r"^ATTNMIX_DEVICE: cuda is not .*; allowed: cpu, mps, mps:0$"),
    (
        "cuda",
        4,
        {"ATTNMIX_DEVICE": "cuda:1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
        r"^ATTNMIX_DEVICE: cuda:1 is one device, but the launcher started 4 processes; allowed: cpu, cuda$",
    ),
    (
        "cuda",
        2,
        {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"},
        r"^--nproc-per-node: 4 processes on a machine with 2 GPUs; allowed: at most 2, or ATTNMIX_DEVICE=cpu$",
    ),
]


@pytest.mark.parametrize(("kind", "number", "environment", "expected"), REFUSED)
def test_unavailable_device_is_one_error(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, number: int, environment: dict[str, str], expected: str
) -> None:
    pretend(monkeypatch, kind, number, **environment)
    with pytest.raises(InputError, match=expected):
        device.chosen_device()


def test_python_device_is_checked_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    with pytest.raises(InputError, match=r"^device: cuda:7 is not a device of this machine; allowed: cpu$"):
        attnmix.load("no/such-model", device="cuda:7")


NEW_DRIVER = OPEN_DRIVER.format("580.95.05")
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
REASONS = [
    ("13.0", OLD_DRIVER.format("550.54.14"), {}, "is 550.54.14, and torch for CUDA 13.0 needs 580.65.06 or newer"),
    ("12.8", OLD_DRIVER.format("470.82.01"), {}, "is 470.82.01, and torch for CUDA 12.8 needs 525.60.13 or newer"),
    (None, NEW_DRIVER, {}, "is 580.95.05, but the installed torch is a build without CUDA"),
    ("13.0", NEW_DRIVER, HIDDEN, "is 580.95.05, but CUDA_VISIBLE_DEVICES is empty"),
    ("13.0", NEW_DRIVER, {}, "is 580.95.05, but CUDA 13.0 does not start: no card."),
]


@pytest.mark.parametrize(("cuda", "driver", "environment", "reason"), REASONS)
def test_unused_gpu_is_logged_with_reason(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    cuda: str | None,
    driver: str,
    environment: dict[str, str],
    reason: str,
) -> None:
    def init() -> None:
        raise RuntimeError("no card.\nMore lines.")

    pretend(monkeypatch, None, **environment)
    monkeypatch.setattr(device, "NVIDIA_DRIVER", tmp_path / "version")
    device.NVIDIA_DRIVER.write_text(driver, encoding="utf-8")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", init)
    caplog.set_level(logging.INFO)
    device.prepare_device(device.chosen_device())
    warning = f"a GPU of this machine is not used: its driver {reason}"
    assert caplog.messages == ["device: CPU", warning]
    with pytest.raises(InputError) as error:
        device.device_named("cuda", device.VARIABLE)
    problem = "ATTNMIX_DEVICE: cuda is not a device of this machine"
    assert str(error.value) == f"{problem} (its driver {reason}); allowed: cpu"
    monkeypatch.setenv(device.VARIABLE, "cpu")  # an explicit choice of the CPU needs no reason
    caplog.clear()
    device.prepare_device(device.chosen_device())
    assert caplog.messages == ["device: CPU"]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulate a machine with four GPUs, which cannot compute."""
    pretend(monkeypatch, "cuda", 4)
    properties = SimpleNamespace(total_memory=80 * 2**30)
    functions = {
        "is_available": lambda: True,
        "device_count": lambda: 4,
        "get_device_name": lambda _device: "NVIDIA H100",
        "get_device_properties": lambda _device: properties,
        "set_device": lambda _device: None,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "NVIDIA_DRIVER", tmp_path / "version")
    device.NVIDIA_DRIVER.write_text(OPEN_DRIVER.format("580.95.05"), encoding="utf-8")


@contextmanager
def determinism() -> Iterator[None]:
    """Restore the setting `warn_only` of torch's deterministic algorithms at the end."""
    before = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=before)


def test_used_and_idle_gpus_are_logged(four_gpus: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with determinism():
        device.prepare_device(device.chosen_device())
        # With warn_only, torch would use attention derivatives that are not deterministic.
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert caplog.messages == [
        "device: NVIDIA H100, 80 GiB, driver 580.95.05, CUDA 13.0",
        "3 of 4 GPUs are unused; `torchrun --nproc-per-node 4 -m stages STAGE` uses all of them",
    ]


def test_training_uses_one_gpu_and_keeps_batch_size(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    for name, expected in (("", "cuda:0"), ("cuda:2", "cuda:2")):
        monkeypatch.setenv(device.VARIABLE, name)
        arguments = OneDeviceArguments(output_dir=str(tmp_path), per_device_train_batch_size=8)
        assert arguments.device == torch.device(expected)
        assert (arguments.n_gpu, arguments.train_batch_size) == (1, 8)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_measuring_is_exact_and_restores_precision(precision: str) -> None:
    backends = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul]
    try:
        torch.set_float32_matmul_precision(precision)
        before = [backend.fp32_precision for backend in backends]
        with torch_state():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cuda.matmul.allow_tf32
            assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == precision
        assert [backend.fp32_precision for backend in backends] == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_newer_precision_setting_is_restored() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with torch_state():
            assert not matmul.allow_tf32
        assert matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before


def test_measure_ignores_fast_precision_setting(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, precisions = attnmix.load(tiny_bert), set[str]()
    model.network.register_forward_hook(lambda *_: precisions.add(torch.get_float32_matmul_precision()))
    try:
        torch.set_float32_matmul_precision("high")
        attnmix.measure(model, "the film was good").matrix("norm", layer=1)
        assert precisions == {"highest"}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_only_device_module_queries_gpus() -> None:
    folders = ("attnmix", "stages", "experiments/*.py", "benchmarks", "examples", "docs")
    names = subprocess.run(["git", "ls-files", *folders], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    modules = [REPOSITORY / name for name in names.stdout.splitlines() if name.endswith(".py")]
    asking = [path for path in modules if re.search(r"is_available\(|current_accelerator\(", path.read_text("utf-8"))]
    assert [path.relative_to(REPOSITORY).as_posix() for path in asking] == ["attnmix/core/device.py"]


def test_unsupported_precision_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    with pytest.raises(InputError, match=r"^a\.key: fp16 needs a GPU; allowed on this machine: fp32, bf16$"):
        device.check_precision("a.key", "fp16", CPU)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    with pytest.raises(InputError, match=r"^a\.key: bf16 needs .* but this one is a Tesla T4; allowed: fp32, fp16$"):
        device.check_precision("a.key", "bf16", torch.device("cuda", 0))
    for precision in ("fp32", "fp16"):
        device.check_precision("a.key", precision, torch.device("cuda", 0))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_float32_only_family_is_refused(precision: str) -> None:
    configs = {name: SimpleNamespace(model_type=name, talking_head=False) for name in ("deberta", "bert")}
    family_of(configs["bert"]).check_precision("capture.precision", precision)
    family_of(configs["deberta"]).check_precision("capture.precision", "fp32")
    with pytest.raises(InputError, match=rf"^capture\.precision: {precision} does not work with .* deberta, .*: fp32$"):
        family_of(configs["deberta"]).check_precision("capture.precision", precision)


MEMORY_ERRORS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9 GB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
]


@pytest.mark.parametrize("error", MEMORY_ERRORS, ids=repr)
def test_out_of_memory_errors_are_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


OTHER_ERRORS = [
    RuntimeError("CUDA error: device-side assert triggered"),
    ValueError("out of memory"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", OTHER_ERRORS, ids=repr)
def test_other_errors_are_not_out_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def logged(guard: TrainingGuard, fp16: bool, **logs: float) -> None:
    """Pass values logged during training to `guard`, as the Trainer does."""
    arguments: Any = SimpleNamespace(fp16=fp16, learning_rate=1e-4)
    guard.on_log(arguments, TrainerState(), TrainerControl(), logs=logs)


def test_skipped_fp16_steps_do_not_end_training() -> None:
    guard = TrainingGuard()
    for _ in range(3):
        for _ in range(MAX_OVERFLOWS):
            logged(guard, True, loss=0.7, grad_norm=float("inf"))
        logged(guard, True, loss=0.6, grad_norm=1.0)
    for _ in range(MAX_OVERFLOWS):
        logged(guard, True, loss=0.7, grad_norm=float("nan"))
    with pytest.raises(InputError, match=r"learning_rate: 0\.0001 makes training diverge \(grad_norm is inf"):
        logged(guard, True, loss=0.7, grad_norm=float("inf"))
    with pytest.raises(InputError, match="loss is nan"):
        logged(TrainingGuard(), True, loss=float("nan"), grad_norm=1.0)
    with pytest.raises(InputError, match="grad_norm is inf"):
        logged(TrainingGuard(), False, loss=0.7, grad_norm=float("inf"))
