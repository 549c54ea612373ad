"""Torch's operations on a CPU that would go to MKL, which computes otherwise on processors of another maker.

Products go to NumPy's OpenBLAS, in blocks that only their shape decides, so that neither the processor's maker nor its
cores decide the order of a sum; exponentials and the like to NumPy and SciPy. They are registered below autograd:
nothing that calls torch changes, and derivatives of any order are made of the same operations.
"""

import logging
import math
import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import scipy.special
import torch
from torch import Tensor

from attnmix.core.arithmetic.environment import PORTABLE, TORCH_THREADS, can_be_portable, note
from attnmix.core.device import chosen_device, device_name, prepare_device

Array = npt.NDArray[Any]
ROWS = 192  # most rows in a block of a product; a product of at most twice as many is halved between its columns
ONE_THREAD_MULTIPLICATIONS = 2**23  # in a product that is not worth a second thread
CACHED_WEIGHTS = 2**21  # attention weights that are computed together
BLOCK_HEADS = 4  # in a block, at least, so that several cores have work
HALF_DTYPES = (torch.float16, torch.bfloat16)  # computed in float32, rounded once

UNARY: dict[str, Callable[[Array], Array]] = {
    **{name: getattr(np, name) for name in ("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt")},
    **{name: getattr(np, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{name: getattr(scipy.special, name) for name in ("erf", "erfc", "erfinv")},
    **{name: getattr(np, f"arc{name[1:]}") for name in ("asin", "acos", "atan")},
}
"""Functions of NumPy or SciPy by torch's names; all those that torch hands to MKL."""

_registered: list[torch.library.Library] = []
_thread = threading.local()


def set_arithmetic(arithmetic: str) -> None:
    """Choose the arithmetic of this process, `portable` or `fastest`, and prepare its device."""
    device = chosen_device()
    prepare_device(device)
    if arithmetic == PORTABLE and not _registered:
        torch.set_num_threads(TORCH_THREADS)
        _register()
    elif arithmetic != PORTABLE and _registered:
        torch.set_num_threads(cores())
        _registered.pop()._destroy()
    if device.type == "cpu":
        logging.info("arithmetic %s: %s", arithmetic, note(arithmetic))


def computed_on(arithmetic: str, device: torch.device) -> str:
    """Return, in words, what decides the last digits of a result."""
    if device.type != "cpu":
        return device_name(device)
    if arithmetic == PORTABLE and can_be_portable():
        return "x86-64 processor, portable arithmetic"
    return f"{platform.machine()} processor, arithmetic of this machine"


def cores() -> int:
    """Return how many cores this process may use: `OMP_NUM_THREADS`, else all that it is allowed."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdigit() and int(limit):
        return int(limit)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _product_threads() -> ThreadPoolExecutor:
    """Return the threads that share the blocks of one product."""
    return ThreadPoolExecutor(cores())


@cache
def _task_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), initializer=setattr, initargs=(_thread, "has_task", True))


def task_threads(device: torch.device) -> ThreadPoolExecutor | None:
    """Return a thread for each core, for tasks of many operations that are each too short for several cores.

    With the kernels of this module each task's products stay in its thread. None where tasks had better come in turn:
    torch's own kernels would start threads in every thread, and a GPU takes the work of one. `device` is that of the
    tensors which the tasks compute with.
    """
    on_own_kernels = device.type == "cpu" and _registered
    if cores() < 2 or not on_own_kernels or hasattr(_thread, "has_task"):
        return None
    return _task_threads()


def _product(first: Tensor, second: Tensor) -> Tensor:
    """Return `[M, K] @ [K, N]`, or the same with one axis before both."""
    if first.dtype in HALF_DTYPES:
        return _product(first.float(), second.float()).to(first.dtype)
    result = first.new_empty((*first.shape[:-1], second.shape[-1]))
    a, b, out = (_for_blas(matrices).detach().numpy() for matrices in (first, second, result))
    jobs: list[tuple[Array, Array, Array]] = []  # two factors, and the place of their product
    if a.ndim == 3:  # several products, each of which is the same wherever it is computed
        size = max(1, math.ceil(len(a) / cores()))
        for start in range(0, len(a), size):
            products = slice(start, start + size)
            jobs.append((a[products], b[products], out[products]))
    else:
        for rows, columns in _blocks(*out.shape):
            jobs.append((a[rows], b[:, columns], out[rows, columns]))
    in_one_thread = out.size * a.shape[-1] < ONE_THREAD_MULTIPLICATIONS or hasattr(_thread, "has_task")
    threads = 1 if in_one_thread else max(1, min(cores(), len(jobs)))

    def compute(thread: int) -> None:
        for one, other, place in jobs[thread::threads]:
            np.matmul(one, other, out=place)

    futures = [_product_threads().submit(compute, thread) for thread in range(1, threads)]
    compute(0)
    for future in futures:
        future.result()
    return result


def _blocks(rows: int, columns: int) -> list[tuple[slice, slice]]:
    """Return rows and columns of the blocks of a product that are computed one by one; only its shape decides."""
    if rows > 2 * ROWS:
        pairs = math.ceil(rows / (2 * ROWS))
        size = math.ceil(rows / (2 * pairs))  # of an even number of blocks
        return [(slice(start, start + size), slice(columns)) for start in range(0, rows, size)]
    half = columns // 2
    return [(slice(rows), slice(half)), (slice(rows), slice(half, columns))]


def _for_blas(matrices: Tensor) -> Tensor:
    """Return matrices that NumPy hands to BLAS: others, such as expanded ones, it multiplies by its own loops."""
    for inner, outer in ((-1, -2), (-2, -1)):
        if matrices.stride(inner) == 1 and matrices.stride(outer) >= max(1, matrices.shape[inner]):
            return matrices
    return matrices.contiguous()


def _addmm(to: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    result = _product(first, second)
    if alpha != 1:
        result.mul_(alpha)
    if not beta:
        return result  # NaN in `to` does not count
    return result.add_(to if beta == 1 else to * beta)


def _addmv(to: Tensor, matrix: Tensor, vector: Tensor, **factors: float) -> Tensor:
    return _addmm(to.unsqueeze(-1), matrix, vector.unsqueeze(-1), **factors).squeeze(-1)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return _product(first.unsqueeze(0), second.unsqueeze(1)).reshape(())


def _elementwise(function: Callable[[Array], Array]) -> Callable[[Tensor], Tensor]:
    def kernel(values: Tensor) -> Tensor:
        is_whole = not (values.is_floating_point() or values.is_complex())
        dtype = torch.get_default_dtype() if is_whole else values.dtype
        computed_in = torch.float32 if dtype in HALF_DTYPES else dtype
        array = values.detach().to(computed_in).numpy()
        with np.errstate(all="ignore"):
            result = np.asarray(function(array))
        return torch.from_numpy(result).to(dtype)

    return kernel


def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return heads `[B, H, T, d]` and the logarithm of each row's sum `[B, H, T]`, as the fused kernel does."""
    outputs = query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
    log_sums = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    for place, _, _, value_GSd, weights_GNS, sums_GN in _weights(query, key, value, dropout_p, is_causal, **options):
        outputs[place] = _product(weights_GNS, value_GSd).view(outputs[place].shape)
        log_sums[place] = sums_GN.view(log_sums[place].shape)
    return outputs, log_sums


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, _sums: Tensor, *others: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the derivatives by query, key and value, in their shapes."""
    all_heads = (*query.shape[:2], *key.shape[2:])
    grad_query = query.new_zeros(query.shape)
    grad_key, grad_value = query.new_zeros(all_heads), query.new_zeros(all_heads)
    factor = _factor(query, **options)
    for place, query_GNd, key_GSd, value_GSd, weights_GNS, _ in _weights(query, key, value, *others, **options):
        heads = place[:2]
        grad_GNd = grad[place].flatten(0, 1).to(weights_GNS.dtype)
        out_GNd = out[place].flatten(0, 1).to(weights_GNS.dtype)
        grad_scores_GNS = _product(grad_GNd, value_GSd.mT).sub_((grad_GNd * out_GNd).sum(-1, keepdim=True))
        grad_scores_GNS.mul_(weights_GNS).mul_(factor)
        grad_query[place] = _product(grad_scores_GNS, key_GSd).view(grad_query[place].shape)
        grad_key[heads] += _product(grad_scores_GNS.mT, query_GNd).view(grad_key[heads].shape)
        grad_value[heads] += _product(weights_GNS.mT, grad_GNd).view(grad_value[heads].shape)
    groups = (key.shape[1], -1)  # query heads that share a key and a value
    return grad_query, grad_key.unflatten(1, groups).sum(2), grad_value.unflatten(1, groups).sum(2)


def _weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    causal: bool,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Iterator[tuple[tuple[slice, slice, slice], Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yield the attention weights, so few at a time that they stay in a processor's cache.

    G heads of one or several texts, N rows, S keys: their place in `query`, query `[G, N, d]`, key and value
    `[G, S, d]`, weights `[G, N, S]` and the logarithm of their denominator `[G, N]`; both are 0 for rows without a key.
    N depends on S alone, so the bytes of a text do not depend on its batch or on the number of cores.
    """
    if dropout_p:
        raise NotImplementedError("the portable attention has no dropout")
    batch, heads, length, _ = query.shape
    keys = key.shape[-2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    if key.shape[1] < heads:  # grouped heads
        sharing = heads // key.shape[1]
        key, value = key.repeat_interleave(sharing, dim=1), value.repeat_interleave(sharing, dim=1)
    rows = min(length, max(1, CACHED_WEIGHTS // (BLOCK_HEADS * keys)))
    together = max(1, CACHED_WEIGHTS // (rows * keys))
    group, texts = min(heads, together), max(1, together // heads)
    for text, head, row in product(range(0, batch, texts), range(0, heads, group), range(0, length, rows)):
        place = (slice(text, text + texts), slice(head, head + group), slice(row, row + rows))
        in_heads = place[:2]
        query_GNd = query[place].flatten(0, 1).to(dtype)
        key_GSd = key[in_heads].flatten(0, 1).to(dtype)
        value_GSd = value[in_heads].flatten(0, 1).to(dtype)
        scores_GNS = _product(query_GNd, key_GSd.mT.contiguous()).mul_(_factor(query, scale=scale))
        if attn_mask is not None:
            mask = attn_mask.expand(batch, heads, length, keys)[place]
            scores_GNS.view(mask.shape).add_(mask)
        if causal:
            tokens = torch.arange(keys)
            scores_GNS.masked_fill_(tokens > tokens[place[2]].unsqueeze(-1), -torch.inf)
        largest_GN = scores_GNS.amax(-1)
        empty_GN = largest_GN == -torch.inf
        weights_GNS = torch.softmax(scores_GNS, -1, out=scores_GNS)
        log_sums_GN = largest_GN - weights_GNS.amax(-1).log()
        if empty_GN.any():
            weights_GNS.masked_fill_(empty_GN.unsqueeze(-1), 0)
        yield place, query_GNd, key_GSd, value_GSd, weights_GNS, log_sums_GN.masked_fill(empty_GN, 0)


def _factor(query: Tensor, scale: float | None = None, **_mask: Tensor | None) -> float:
    """Return what the scores are multiplied by."""
    return query.shape[-1] ** -0.5 if scale is None else scale


def _qr(matrices: Tensor, mode: Literal["reduced", "complete", "r"] = "reduced") -> tuple[Tensor, Tensor]:
    if mode == "r":
        return matrices.new_empty(0), torch.from_numpy(np.linalg.qr(matrices.numpy(), mode="r"))
    q, r = np.linalg.qr(matrices.numpy(), mode=mode)
    return torch.from_numpy(q), torch.from_numpy(r)


def _eigh(matrices: Tensor, UPLO: Literal["L", "U"] = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    if not compute_v:
        return torch.from_numpy(np.linalg.eigvalsh(matrices.numpy(), UPLO=UPLO)), matrices.new_empty(0)
    values, vectors = np.linalg.eigh(matrices.numpy(), UPLO=UPLO)
    return torch.from_numpy(values), torch.from_numpy(vectors)


def _register() -> None:
    library = torch.library.Library("aten", "IMPL")
    fused = "_scaled_dot_product_flash_attention_for_cpu"
    with_in_place: dict[str, Callable[..., Any]] = {name: _elementwise(function) for name, function in UNARY.items()}
    with_in_place.update({"addmm": _addmm, "baddbmm": _addmm, "addmv": _addmv})
    with_out = {**with_in_place, "mm": _product, "bmm": _product}
    kernels: dict[str, Callable[..., Any]] = {
        **with_out,
        "dot": _dot,
        "linalg_qr": _qr,
        "_linalg_eigh": _eigh,
        fused: _attention,
        f"{fused}_backward": _attention_backward,
    }
    for name, kernel in with_in_place.items():
        kernels[f"{name}_"] = _in_place(kernel)
    for name, kernel in with_out.items():
        kernels[f"{name}.out"] = _into(kernel)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that a kernel is replaced
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU", allow_override=True)
    _registered.append(library)


def _in_place(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda values, *others, **options: values.copy_(kernel(values, *others, **options))


def _into(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def write(*arguments: Tensor, out: Tensor, **options: Any) -> Tensor:
        result = kernel(*arguments, **options)
        return out.resize_(result.shape).copy_(result)

    return write
