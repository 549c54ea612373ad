"""The state of torch required by the measures: full float32 precision, no autocast, gradients enabled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from attnmix.core.errors import InputError

CPU = torch.device("cpu")
DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")


@contextmanager
def torch_state() -> Iterator[None]:
    """Set the torch state required for correct results, and restore the user's settings afterwards.

    In the current thread, autocast and inference mode are disabled, and gradients are enabled. Matrix products use full
    float32 precision (TensorFloat-32 rounds to 10 bits), and new tensors are float32 tensors on the CPU. Several
    threads may enter the context; the last one to exit restores the process-wide settings. Raise `InputError` inside
    transforms such as `torch.func.vmap`.
    """
    _check_transforms()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in _list_autocast_devices():
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device() != CPU:
            stack.enter_context(CPU)  # as a context, a device is the default device of new tensors
        stack.enter_context(_process_state)  # the default dtype and the precision, shared by all threads
        yield


def set_full_precision() -> None:
    """Select full precision for matrix products, convolutions and RNNs of float32 tensors."""
    torch.set_float32_matmul_precision("highest")
    cudnn: Any = torch.backends.cudnn
    cudnn.allow_tf32 = False
    for backend in (cudnn.conv, cudnn.rnn):
        backend.fp32_precision = "ieee"  # otherwise, torch.backends.fp32_precision would apply


class _Shared:
    """A process-wide context for several threads: it begins when the first enters, and ends when the last exits."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        """Store the function `make`, which creates the context."""
        self._make = make
        self._lock = threading.Lock()
        self._entered = 0  # number of threads in the context
        self._restore = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._entered:
                self._restore.enter_context(self._make())
            self._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                self._restore.close()


@contextmanager
def _set_numeric_settings() -> Iterator[None]:
    """Set float32 as the default dtype, and full precision for products; restore the old settings afterwards."""
    with _set_default_dtype(torch.float32), _set_exact_products():
        yield


@contextmanager
def _disable_compilation() -> Iterator[None]:
    """Disable compilation by `torch.compile`; raise `InputError` inside a compiled function."""
    try:
        stance = torch.compiler.set_stance("force_eager")
    except RuntimeError as error:  # raised by torch inside a compiled function
        problem = "an intervention was started inside a function compiled by torch.compile"
        raise InputError(f"torch: {problem}; start it outside of the function") from error
    with stance:
        yield


@contextmanager
def forward_derivatives() -> Iterator[None]:
    """Restrict forward-mode derivatives to one thread at a time, because torch counts nested levels per process.

    Raise `InputError` if the caller is already computing forward-mode derivatives.
    """
    with _forward_derivatives_lock:
        if forward_ad._current_level >= 0:  # -1 if no derivatives are being computed
            raise InputError("torch: torch.autograd.forward_ad is active; call attnmix outside of it")
        yield


_process_state = _Shared(_set_numeric_settings)
uncompiled = _Shared(_disable_compilation)
"""A context in which functions compiled by `torch.compile` run eagerly."""
_forward_derivatives_lock = threading.Lock()


def _list_autocast_devices() -> list[str]:
    """Return the device types with autocast enabled in this thread."""
    kinds = (*DEVICE_TYPES, torch._C._get_privateuse1_backend_name())
    return [kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]


def _check_transforms() -> None:
    """Raise `InputError` inside torch transforms, because they hide the tensor values from the measures."""
    transforms = {
        "torch.func": torch._C._functorch.peek_interpreter_stack() is not None,
        "FakeTensorMode": torch._guards.detect_fake_mode() is not None,
    }
    for name, is_active in transforms.items():
        if is_active:
            raise InputError(f"torch: {name} is active; call attnmix outside of it")


@contextmanager
def _set_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype of new tensors; restore the previous one afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _OlderSettings(NamedTuple):
    """The precision settings that torch has replaced by `fp32_precision`."""

    matmul_precision: str
    allow_tf32: bool


def _read_older_settings() -> _OlderSettings | None:
    """Return the settings of float32 precision that `fp32_precision` replaces in recent versions of torch.

    Return None if `fp32_precision` is set, because reading the older settings then raises an error.
    """
    cudnn: Any = torch.backends.cudnn
    try:
        return _OlderSettings(torch.get_float32_matmul_precision(), cudnn.allow_tf32)
    except RuntimeError:
        return None


@contextmanager
def _set_exact_products() -> Iterator[None]:
    """Set full precision for float32 products, and restore the previous settings of all backends afterwards."""
    torch_backends: Any = torch.backends  # some attributes exist only at run time
    cudnn = torch_backends.cudnn
    backends = [torch_backends.cuda.matmul, cudnn.conv, cudnn.rnn, torch_backends.mkldnn.matmul]
    precisions = [backend.fp32_precision for backend in backends]
    older_settings = _read_older_settings()
    try:
        set_full_precision()
        yield
    finally:
        # The older settings are restored first, because setting them also changes `fp32_precision`.
        if older_settings is not None:
            torch.set_float32_matmul_precision(older_settings.matmul_precision)
            cudnn.allow_tf32 = older_settings.allow_tf32
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = precision
