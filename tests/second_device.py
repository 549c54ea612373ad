"""A simulated second torch device, which computes on the CPU but has the restrictions of a GPU.

torch reserves the device type PrivateUse1 for external devices. Here, one Python function, `_compute`, runs the CPU
version of every operator. As on CUDA, operators raise an error for tensors on different devices. As on Apple's GPU,
float64 raises an error if `DEVICE_RULES.float64` is False. `counted` yields the numbers of operators (each is at least
one kernel launch on a GPU) and of events that make the CPU wait.

The device exists after the import, but `torch.accelerator` reports it only if `DEVICE_RULES.available` is True.

With `TEST_GPU=1`, the device is the GPU of this machine; its own restrictions apply, and nothing is counted.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

REAL_GPU = os.environ.get("TEST_GPU") == "1"
NAME = torch.accelerator.current_accelerator().type if REAL_GPU else "second"
# Device types of DLPack, https://dmlc.github.io/dlpack/latest/c_api.html: `kDLCPU` and `kDLExtDev`.
DLPACK_CPU, DLPACK_SECOND = 1, 12
DLPACK_TYPE_OFFSET_BYTES = ctypes.sizeof(ctypes.c_void_p)  # offset of the device type, after the data pointer
# As on CUDA, these operators allow indices on the CPU for a tensor on the device, but not the reverse.
INDEXING = ("aten::index", "aten::_index_put_impl_", "aten::index_put", "aten::index_put_", "aten::_unsafe_index")
# On CUDA, the CPU waits for these operators, because the size of their result depends on values, or because they call a
# host library.
WAITING = {
    *("aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim"),
    *("aten::unique_consecutive", "aten::repeat_interleave", "aten::linalg_qr", "aten::_linalg_eigh"),
    *("aten::_linalg_svd", "aten::_linalg_solve_ex"),
}


@dataclass
class DeviceRules:
    """Settings of the device."""

    available: bool = False
    float64: bool = True


@dataclass
class Counts:
    """Counts since the start of `counted`."""

    operators: Counter[str] = field(default_factory=Counter)
    """Calls of each operator, without views and allocations, which launch no kernel."""
    items: int = 0
    """Numbers converted to Python (`.item()`, `float(tensor)`); the CPU waits for each of them."""
    to_device: int = 0
    from_device: int = 0
    """Copies from the CPU to the device, and from the device to the CPU."""
    waits: Counter[str] = field(default_factory=Counter)
    """Calls of operators for which the CPU waits: `WAITING`, and indexing with a mask."""


class _Module:
    """The module `torch.second` with the functions that torch requires of a device."""

    def is_available(self) -> bool:
        return DEVICE_RULES.available

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return int(DEVICE_RULES.available)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, _device: object = None) -> str:
        return "second device of the tests"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, _device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, _device: object = None) -> None:
        torch.set_rng_state(state)

    def manual_seed_all(self, _seed: int) -> None:
        """Do nothing, because this device uses the random generator of the CPU."""

    manual_seed = manual_seed_all

    def _is_in_bad_fork(self) -> bool:
        return False

    def synchronize(self, _device: object = None) -> None:
        """Do nothing, because operators are synchronous."""

    set_device = empty_cache = synchronize


DEVICE_RULES = DeviceRules()
if not REAL_GPU:
    _setup_privateuseone_for_python_backend(NAME, _Module())
DEVICE = torch.device(NAME, 0)
_counts = Counts()
_libraries = [torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


@contextmanager
def counted() -> Iterator[Counts]:
    """Yield counts that are updated until the context ends."""
    global _counts
    before, _counts = _counts, Counts()
    try:
        yield _counts
    finally:
        _counts = before


def _relabelled(tensor: Tensor, device_type: int) -> Tensor:
    """Return a tensor of another device type that shares the memory of `tensor`."""
    capsule = torch._C._to_dlpack(tensor)
    ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + DLPACK_TYPE_OFFSET_BYTES).value = device_type
    return torch._C._from_dlpack(capsule)


def _on_host(value: Any) -> Any:
    """Replace device tensors by CPU tensors that share their memory, also in lists and tuples."""
    if isinstance(value, Tensor):
        return _relabelled(value, DLPACK_CPU) if value.device.type == NAME else value
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == NAME else value
    if isinstance(value, list | tuple):
        return [_on_host(each) for each in value]
    return value


def _on_device(value: Any) -> Any:
    """Replace CPU tensors by device tensors that share their memory, also in lists and tuples."""
    if isinstance(value, Tensor):
        _check_dtype(value.dtype)
        return _relabelled(value, DLPACK_SECOND)
    if isinstance(value, list | tuple):
        return type(value)(_on_device(each) for each in value)
    return value


def _check_dtype(dtype: torch.dtype | None) -> None:
    if not DEVICE_RULES.float64 and dtype == torch.float64:
        raise TypeError("Cannot convert a second Tensor to float64 dtype as this device does not support float64.")


def _check_devices(operator: str, arguments: dict[str, Any]) -> None:
    """Raise an error for tensors on different devices, as CUDA does; scalars on the CPU are allowed."""
    indexing = operator in INDEXING
    on_cpu, on_device = [], []
    for name, value in arguments.items():
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(tensor, Tensor):
                continue
            if tensor.device.type == NAME:
                on_device.append(name)
            elif (tensor.ndim and not (indexing and name == "indices")) or (indexing and name == "self"):
                on_cpu.append(name)
    if on_cpu and on_device:
        problem = f"found at least two devices, {DEVICE} and cpu!"
        where = f"(when checking argument {on_cpu[0]} in method {operator})"
        raise RuntimeError(f"Expected all tensors to be on the same device, but {problem} {where}")


class _Signature(NamedTuple):
    """The schema of an operator."""

    name: str
    arguments: list[str]
    keyword_only: set[str]
    tensors: set[str]
    """Tensor arguments, for which torch may also pass numbers."""
    returns: int
    written: dict[int, str]
    """The arguments that the operator modifies and returns, by the position of the result."""


@cache
def _signature(operator: Any) -> _Signature:
    schema = operator._schema
    written = {}
    for place, result in enumerate(schema.returns):
        if result.alias_info is not None and result.alias_info.is_write:
            alias = result.alias_info.before_set
            aliases = {each.name: each.alias_info.before_set for each in schema.arguments if each.alias_info}
            written[place] = next(name for name, argument_alias in aliases.items() if argument_alias == alias)
    keyword_only = {each.name for each in schema.arguments if each.kwarg_only}
    names = [each.name for each in schema.arguments]
    tensors = {each.name for each in schema.arguments if isinstance(each.type, torch.TensorType)}
    return _Signature(schema.name, names, keyword_only, tensors, len(schema.returns), written)


def _compute(operator: Any, *values: Any, **options: Any) -> Any:
    """Run an operator on the CPU, in the memory of the device."""
    signature = _signature(operator)
    arguments = dict(zip(signature.arguments, values, strict=False)) | options
    _count(signature.name, arguments)
    _check_devices(signature.name, arguments)
    host = {}
    for name, value in arguments.items():
        is_number = name in signature.tensors and isinstance(value, int | float)
        host[name] = torch.tensor(value) if is_number else _on_host(value)
    # The operator may resize an empty output, so it receives a separate tensor, which is copied afterwards.
    resizable = {}
    for name in signature.written.values():
        if isinstance(host[name], Tensor) and not host[name].numel():
            resizable[name] = torch.empty_like(host[name])
    host |= resizable
    positional = [value for name, value in host.items() if name not in signature.keyword_only]
    keywords = {name: value for name, value in host.items() if name in signature.keyword_only}
    results = operator(*positional, **keywords)
    for name, tensor in resizable.items():
        if arguments[name].shape != tensor.shape:
            arguments[name].resize_(tensor.shape).copy_(_on_device(tensor))
    # Operators that modify arguments return these arguments themselves, not copies.
    written = {place: arguments[name] for place, name in signature.written.items()}
    if signature.returns == 1:
        return written[0] if written else _on_device(results)
    if not written:
        return _on_device(results)
    return tuple(written[place] if place in written else _on_device(each) for place, each in enumerate(results))


def _count(name: str, arguments: dict[str, Any]) -> None:
    along_axis = name in ("aten::median", "aten::nanmedian") and "dim" in arguments
    _counts.operators[f"{name}.dim" if along_axis else name] += 1
    indices = arguments["indices"] if name in INDEXING else ()
    has_mask = any(isinstance(each, Tensor) and each.dtype == torch.bool for each in indices)
    if name in WAITING or (has_mask and name != "aten::index"):  # a mask as an index calls `nonzero`
        _counts.waits[name] += 1


def _empty(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, **options: Any) -> Tensor:
    _check_dtype(dtype or torch.get_default_dtype())
    options.pop("pin_memory", None)
    return _relabelled(torch.empty(size, dtype=dtype, device="cpu", **options), DLPACK_SECOND)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    _check_dtype(dtype or torch.get_default_dtype())
    return _relabelled(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), DLPACK_SECOND)


def _zeros(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    """Return zeros with allocated memory; torch's own zero tensors for derivatives have no memory."""
    return _empty(size, dtype=dtype).zero_()


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if source.device.type != NAME:
        _counts.to_device += 1
    elif target.device.type != NAME:
        _counts.from_device += 1
    else:
        _counts.operators["aten::copy_"] += 1
    _on_host(target).copy_(_on_host(source))
    return target


def _copy_from_and_resize(source: Tensor, target: Tensor) -> Tensor:
    return _copy_from(source, target.resize_(source.shape))


def _item(tensor: Tensor) -> Any:
    _counts.items += 1
    return _on_host(tensor).item()


def _resize(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    fresh = torch.empty(size, dtype=tensor.dtype, device=DEVICE)
    if not fresh.numel() or not tensor.numel():
        return tensor.set_(fresh.untyped_storage(), 0, fresh.shape, fresh.stride())
    raise NotImplementedError("resizing a tensor that is not empty")


def _as_cpu_does(name: str) -> Any:
    """Return the CPU version of an operator, for use on both devices; the operator must change nothing but metadata."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *arguments, **options: operator.redispatch(keys, *arguments, **options)


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of a storage; torch's own function needs a C++ allocator, which this device lacks."""
    if storage.device.type != NAME:
        return _torch_clone(storage)
    return torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage).clone().untyped_storage()


_torch_clone = torch.UntypedStorage.clone


def _register() -> None:
    """Register the operators of the device with torch."""
    torch.UntypedStorage.clone = _clone_storage
    fallback, kernels = _libraries
    fallback.fallback(_compute, "PrivateUse1")
    own = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_copy_from": _copy_from,
        "_copy_from_and_resize": _copy_from_and_resize,
        "_efficientzerotensor": _zeros,
        "_local_scalar_dense": _item,
        "resize_": _resize,
    }
    memory = (
        "as_strided",
        "view",
        "_reshape_alias",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "unfold",
    )
    for name, kernel in (own | {each: _as_cpu_does(each) for each in memory}).items():
        kernels.impl(name, kernel, "PrivateUse1")


if not REAL_GPU:
    _register()
