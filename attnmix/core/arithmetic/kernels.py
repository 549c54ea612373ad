"""CPU kernels that replace torch operations based on MKL, whose results depend on the vendor of the processor.

Matrix products use NumPy's OpenBLAS in blocks determined by their shape alone, so neither the vendor nor the number of
cores affects the order of summation. Exponentials and similar functions use NumPy and SciPy. The kernels are registered
below autograd, so code that uses torch needs no changes, and derivatives of any order use the same kernels.
"""

import logging
import math
import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import scipy.special
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from attnmix.core.arithmetic.environment import PORTABLE, TORCH_THREADS, can_be_portable, note
from attnmix.core.device import chosen_device, device_name, prepare_device

Array = npt.NDArray[Any]
Job = TypeVar("Job")
Result = TypeVar("Result")
ROWS = 192  # maximum rows per block of a product; products with up to twice as many rows are split by columns instead
ONE_THREAD_MULTIPLICATIONS = 2**23  # products with fewer multiplications do not benefit from a second thread
CACHED_WEIGHTS = 2**17  # maximum number of attention weights computed at once (512 kB in float32)
HALF_DTYPES = (torch.float16, torch.bfloat16)  # computed in float32 and rounded at the end

UNARY: dict[str, Callable[[Array], Array]] = {
    **{name: getattr(np, name) for name in ("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt")},
    **{name: getattr(np, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{name: getattr(scipy.special, name) for name in ("erf", "erfc", "erfinv")},
    **{name: getattr(np, f"arc{name[1:]}") for name in ("asin", "acos", "atan")},
}
"""NumPy and SciPy functions by their torch names, for all functions that torch delegates to MKL."""

_registered: list[torch.library.Library] = []
_thread = threading.local()


def set_arithmetic(arithmetic: str) -> None:
    """Set the arithmetic of this process to `portable` or `fastest`, and prepare its device."""
    device = chosen_device()
    prepare_device(device)
    if arithmetic == PORTABLE and not _registered:
        torch.set_num_threads(TORCH_THREADS)
        _register_kernels()
    elif arithmetic != PORTABLE and _registered:
        torch.set_num_threads(cores())
        _registered.pop()._destroy()
    if device.type == "cpu":
        logging.info("arithmetic %s: %s", arithmetic, note(arithmetic))


def computed_on(arithmetic: str, device: torch.device) -> str:
    """Return a description of the device and arithmetic, which determine the last digits of a result."""
    if device.type != "cpu":
        return device_name(device)
    if arithmetic == PORTABLE and can_be_portable():
        return "x86-64 processor, portable arithmetic"
    return f"{platform.machine()} processor, arithmetic of this machine"


def cores() -> int:
    """Return the number of cores that this process may use, from `OMP_NUM_THREADS` or else the CPU affinity."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdigit() and int(limit):
        return int(limit)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _get_product_threads() -> ThreadPoolExecutor:
    """Return the thread pool for the blocks of a product."""
    return ThreadPoolExecutor(cores())


@cache
def _get_task_threads() -> ThreadPoolExecutor:
    """Return the thread pool of `task_threads`."""
    return ThreadPoolExecutor(cores(), initializer=_prepare_task_thread)


def _prepare_task_thread() -> None:
    """Limit torch to a single thread in this task thread, because the tasks already occupy all cores."""
    _thread.has_task = True
    torch.get_num_threads()  # the first use of torch in a thread sets the number of OpenMP threads
    threadpool_limits(1, user_api="openmp")


def submit_task(device: torch.device, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Call a function in one of the `task_threads`, or immediately if there are none.

    Tasks start in the order of submission, so a task may wait for a previously submitted one.
    """
    threads = task_threads(device)
    if threads is not None:
        return threads.submit(function, *arguments)
    done: Future[Result] = Future()
    done.set_result(function(*arguments))
    return done


def task_threads(device: torch.device) -> ThreadPoolExecutor | None:
    """Return a pool with one thread per core, for tasks that consist of many short operations.

    With the kernels of this module, all operations of a task stay in its thread. A machine with a single core also has
    a pool, because the number of torch threads affects the last digits. Return None within a task, and if sequential
    tasks are faster: torch's own kernels start threads in every task, and one thread keeps a GPU busy. `device` is the
    device of the tasks' tensors.
    """
    on_own_kernels = device.type == "cpu" and _registered
    if not on_own_kernels or hasattr(_thread, "has_task"):
        return None
    return _get_task_threads()


def _multiply(first: Tensor, second: Tensor) -> Tensor:
    """Return `[M, K] @ [K, N]`, or a batch of such products."""
    if first.dtype in HALF_DTYPES:
        exact = _multiply(first.float(), second.float())
        return exact.to(first.dtype)
    result = first.new_empty((*first.shape[:-1], second.shape[-1]))
    a, b, out = (_arrange_for_blas(matrices).detach().numpy() for matrices in (first, second, result))
    multiplications = out.size * a.shape[-1]
    if a.ndim == 3 and len(a) == 1:
        a, b, out = a[0], b[0], out[0]
    jobs: list[tuple[Array, Array, Array]] = []  # two factors and the output of their product
    if a.ndim == 3:  # single products do not depend on their thread, so the number of cores may determine the split
        size = max(1, math.ceil(len(a) / cores()))
        for start in range(0, len(a), size):
            products = slice(start, start + size)
            jobs.append((a[products], b[products], out[products]))
    else:
        for rows, columns in _split_product(*out.shape):
            jobs.append((a[rows], b[:, columns], out[rows, columns]))
    _compute_in_threads(jobs, lambda job: np.matmul(job[0], job[1], out=job[2]), multiplications)
    return result


def _compute_in_threads(jobs: Sequence[Job], compute: Callable[[Job], Any], multiplications: int) -> None:
    """Compute all jobs, in several threads if there is enough work; the number of threads does not affect results."""
    is_small = multiplications < ONE_THREAD_MULTIPLICATIONS
    threads = 1
    if not is_small and not hasattr(_thread, "has_task"):
        threads = max(1, min(cores(), len(jobs)))

    def compute_share(thread: int) -> None:
        with np.errstate(all="ignore"):
            for job in jobs[thread::threads]:
                compute(job)

    futures = []
    for thread in range(1, threads):
        future = _get_product_threads().submit(compute_share, thread)
        futures.append(future)
    compute_share(0)
    for future in futures:
        future.result()


def _split_product(rows: int, columns: int) -> list[tuple[slice, slice]]:
    """Return the rows and columns of each block, determined only by the shape of the product."""
    if rows <= 2 * ROWS:
        half = columns // 2
        return [(slice(rows), slice(half)), (slice(rows), slice(half, columns))]
    pairs = math.ceil(rows / (2 * ROWS))
    size = math.ceil(rows / (2 * pairs))  # the number of blocks is usually even, so that two threads have equal work
    blocks = []
    for start in range(0, rows, size):
        blocks.append((slice(start, start + size), slice(columns)))
    return blocks


def _arrange_for_blas(matrices: Tensor) -> Tensor:
    """Return matrices in a layout supported by BLAS; with other layouts, such as expanded tensors, NumPy is slow."""
    for inner, outer in ((-1, -2), (-2, -1)):
        is_contiguous = matrices.stride(inner) == 1
        has_distinct_rows = matrices.stride(outer) >= max(1, matrices.shape[inner])
        if is_contiguous and has_distinct_rows:
            return matrices
    return matrices.contiguous()


def _addmm(to: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return `beta * to + alpha * first @ second` `[..., M, N]`, for matrices or batches of matrices."""
    result = _multiply(first, second)
    if alpha != 1:
        result.mul_(alpha)
    if not beta:
        return result  # NaN in `to` must not propagate
    addend = to if beta == 1 else to * beta
    return result.add_(addend)


def _addmv(to: Tensor, matrix: Tensor, vector: Tensor, **factors: float) -> Tensor:
    """Return `beta * to + alpha * matrix @ vector` `[M]`."""
    column = _addmm(to.unsqueeze(-1), matrix, vector.unsqueeze(-1), **factors)
    return column.squeeze(-1)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """Return the dot product of two vectors `[K]` as a zero-dimensional tensor."""
    product_11 = _multiply(first.unsqueeze(0), second.unsqueeze(1))
    return product_11.reshape(())


def _create_elementwise_kernel(function: Callable[[Array], Array]) -> Callable[[Tensor], Tensor]:
    """Return a kernel that applies a NumPy function to every element."""

    def compute_elements(values: Tensor) -> Tensor:
        """Return the function's values in the dtype of torch's result: floating point also for integers."""
        is_whole = not (values.is_floating_point() or values.is_complex())
        dtype = torch.get_default_dtype() if is_whole else values.dtype
        computed_in = torch.float32 if dtype in HALF_DTYPES else dtype
        array = values.detach().to(computed_in).numpy()
        with np.errstate(all="ignore"):
            result = np.asarray(function(array))
        return torch.from_numpy(result).to(dtype)

    return compute_elements


def _create_elementwise_in_place_kernel(function: Callable[..., Array]) -> Callable[[Tensor], Tensor]:
    """Return a kernel that applies a NumPy function to every element in place."""
    compute_copy = _create_elementwise_kernel(function)

    def replace_elements(values: Tensor) -> Tensor:
        """Overwrite the elements, without a copy for dtypes that NumPy supports."""
        if values.dtype not in (torch.float32, torch.float64):
            return values.copy_(compute_copy(values))
        array = values.detach().numpy()
        with np.errstate(all="ignore"):
            function(array, out=array)
        return values

    return replace_elements


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return head outputs `[B, H, T, d]` and log-sum-exp of scores per row `[B, H, T]`, like torch's fused kernel."""
    attention = _Attention(query, key, value, dropout_p, is_causal, attn_mask, scale)
    batch, heads, length, width = attention.query.shape
    outputs_BTHd = np.empty((batch, length, heads, width), attention.query.dtype)
    outputs = outputs_BTHd.swapaxes(1, 2)
    log_sums = np.empty((batch, heads, length), outputs.dtype)

    def compute_block(block: tuple[slice, slice]) -> None:
        """Fill the outputs and log-sum-exp of some texts and heads.

        Axes: T texts, G heads, N queries, S sources, d width of a head.
        """
        value_TGSd = attention.value[block]
        for rows, exponentials_TGNS, largest_TGN, sums_TGN in attention.compute_softmax(block):
            place = (*block, rows)
            np.matmul(exponentials_TGNS, value_TGSd, out=outputs[place])
            outputs[place] /= sums_TGN[..., None]
            log_sums[place] = np.log(sums_TGN) + largest_TGN

    multiplications = 2 * outputs.size * key.shape[-2]
    _compute_in_threads(attention.list_blocks(), compute_block, multiplications)
    return torch.from_numpy(outputs).to(query.dtype), torch.from_numpy(log_sums)


def _differentiate_attention(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    _sums: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to query, key and value, like torch's fused kernel.

    The weights are recomputed in blocks: T texts, G heads, N queries, S sources, d width of a head. `out` is the output
    of the forward pass, and torch's operator also passes its log-sum-exp `_sums`, which is not needed.
    """
    attention = _Attention(query, key, value, dropout_p, is_causal, attn_mask, scale)
    grad_BHTd = _to_numpy(_arrange_for_blas(grad))
    out_BHTd = _to_numpy(out)
    grad_query = np.empty_like(attention.query)
    grad_key_by_head = np.zeros_like(attention.key)
    grad_value_by_head = np.zeros_like(attention.value)

    def compute_block(block: tuple[slice, slice]) -> None:
        """Fill the gradients of some texts and heads: dL/ds_ij = a_ij (dL/do_i . v_j - dL/do_i . o_i).

        s_ij are the scores, a_ij the weights, v_j the values, and o_i the outputs.
        """
        key_TGSd = attention.key[block]
        value_TGdS = attention.value[block].swapaxes(-1, -2)
        for rows, weights_TGNS, _, sums_TGN in attention.compute_softmax(block):
            place = (*block, rows)
            query_TGNd = attention.query[place]
            grad_TGNd = grad_BHTd[place]
            weights_TGNS /= sums_TGN[..., None]
            grad_scores_TGNS = np.matmul(grad_TGNd, value_TGdS)
            grad_scores_TGNS -= (grad_TGNd * out_BHTd[place]).sum(-1, keepdims=True)
            grad_scores_TGNS *= weights_TGNS
            grad_scores_TGNS *= attention.factor
            grad_query[place] = np.matmul(grad_scores_TGNS, key_TGSd)
            grad_key_by_head[block] += np.matmul(grad_scores_TGNS.swapaxes(-1, -2), query_TGNd)
            grad_value_by_head[block] += np.matmul(weights_TGNS.swapaxes(-1, -2), grad_TGNd)

    # The five matrix products are the scores, dL/da, and the gradients of query, key and value.
    multiplications = 5 * grad_query.size * key.shape[-2]
    _compute_in_threads(attention.list_blocks(), compute_block, multiplications)
    groups = (key.shape[1], -1)  # key heads, and query heads per key head
    summed_grad_key = torch.from_numpy(grad_key_by_head).unflatten(1, groups).sum(2)
    summed_grad_value = torch.from_numpy(grad_value_by_head).unflatten(1, groups).sum(2)
    return (
        torch.from_numpy(grad_query).to(query.dtype),
        summed_grad_key.to(key.dtype),
        summed_grad_value.to(value.dtype),
    )


class _Attention:
    """Attention of B texts with H heads, in blocks that fit into the cache of one core.

    A block has T texts, G heads, N rows and S keys. N and G depend only on the text length, so the results of a text
    are identical for all batches and numbers of cores.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float,
        causal: bool,
        mask: Tensor | None,
        scale: float | None,
    ) -> None:
        """Convert tensors `[B, H, T, d]` to arrays, with keys and values repeated for grouped queries."""
        if dropout_p:
            raise NotImplementedError("the portable attention does not support dropout")
        self.batch, self.heads, self.length, width = query.shape
        if key.shape[1] < self.heads:  # grouped-query attention
            sharing = self.heads // key.shape[1]
            key = key.repeat_interleave(sharing, dim=1)
            value = value.repeat_interleave(sharing, dim=1)
        self.query = _to_numpy(_arrange_for_blas(query))
        self.key = _to_numpy(_arrange_for_blas(key))
        self.value = _to_numpy(_arrange_for_blas(value))
        self.keys = key.shape[-2]
        factor = width**-0.5 if scale is None else scale
        self.factor = self.query.dtype.type(factor)
        self.mask = None
        if mask is not None:
            mask_BHTS = mask.expand(self.batch, self.heads, self.length, self.keys)
            self.mask = _to_numpy(mask_BHTS)
        self.causal = causal

    def list_blocks(self) -> list[tuple[slice, slice]]:
        """Return the texts and heads of each block."""
        heads_in_cache = max(1, CACHED_WEIGHTS // (self.count_rows() * self.keys))
        heads = min(self.heads, heads_in_cache)
        texts = max(1, heads_in_cache // self.heads)
        blocks = []
        for text, head in product(range(0, self.batch, texts), range(0, self.heads, heads)):
            blocks.append((slice(text, text + texts), slice(head, head + heads)))
        return blocks

    def count_rows(self) -> int:
        """Return the number of rows that are computed together."""
        parts = math.ceil(self.length * self.keys / CACHED_WEIGHTS)
        parts = min(parts, self.length)
        return math.ceil(self.length / parts)

    def compute_softmax(self, block: tuple[slice, slice]) -> Iterator[tuple[slice, Array, Array, Array]]:
        """Yield parts of a block's rows, with `exp(score - largest)`, the largest score per row, and sums over keys.

        For rows without a visible key, these values are 0, 0 and 1.
        """
        key_TGdS = self.key[block].swapaxes(-1, -2)
        tokens = np.arange(self.keys)
        mask_TGNS = None if self.mask is None else self.mask[block]
        if mask_TGNS is not None:
            has_equal_rows = mask_TGNS.strides[-2] == 0
            if has_equal_rows and not mask_TGNS[..., 0, :].any():
                mask_TGNS = None  # no padding in these texts
        size = self.count_rows()
        for start in range(0, self.length, size):
            rows = slice(start, start + size)
            query_TGNd = self.query[(*block, rows)]
            scores_TGNS = np.matmul(query_TGNd, key_TGdS)
            scores_TGNS *= self.factor
            if mask_TGNS is not None:
                scores_TGNS += mask_TGNS[..., rows, :]
            if self.causal:
                is_later = tokens > tokens[rows, None]
                np.copyto(scores_TGNS, -np.inf, where=is_later)
            largest_TGN = scores_TGNS.max(-1)
            largest_TGN[np.isneginf(largest_TGN)] = 0
            scores_TGNS -= largest_TGN[..., None]
            exponentials_TGNS = np.exp(scores_TGNS, out=scores_TGNS)
            sums_TGN = exponentials_TGNS.sum(-1)
            sums_TGN[sums_TGN == 0] = 1
            yield rows, exponentials_TGNS, largest_TGN, sums_TGN


def _to_numpy(tensor: Tensor) -> Array:
    """Return a tensor as an array, with half precision converted to float32."""
    values = tensor.detach()
    if values.dtype in HALF_DTYPES:
        values = values.float()
    return values.numpy()


def _decompose_qr(matrices: Tensor, mode: Literal["reduced", "complete", "r"] = "reduced") -> tuple[Tensor, Tensor]:
    """Return the QR decomposition of matrices `[..., M, N]`, with an empty Q for the mode `r`."""
    if mode == "r":
        only_r = np.linalg.qr(matrices.numpy(), mode="r")
        return matrices.new_empty(0), torch.from_numpy(only_r)
    q, r = np.linalg.qr(matrices.numpy(), mode=mode)
    return torch.from_numpy(q), torch.from_numpy(r)


def _decompose_symmetric(
    matrices: Tensor, UPLO: Literal["L", "U"] = "L", compute_v: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues and, with `compute_v`, the eigenvectors of symmetric matrices `[..., N, N]`."""
    if not compute_v:
        return _compute_eigenvalues(matrices, UPLO), matrices.new_empty(0)
    values, vectors = np.linalg.eigh(matrices.numpy(), UPLO=UPLO)
    return torch.from_numpy(values), torch.from_numpy(vectors)


def _compute_eigenvalues(matrices: Tensor, UPLO: Literal["L", "U"]) -> Tensor:
    """Return the eigenvalues `[..., N]` of symmetric matrices `[..., N, N]`."""
    values = matrices.new_empty(matrices.shape[:-1])
    if not values.numel():
        return values
    size = matrices.shape[-1]
    all_matrices = matrices.reshape(-1, size, size).numpy()
    all_values = values.view(-1, size).numpy()
    matrices_per_part = math.ceil(len(all_matrices) / cores())  # NumPy holds the GIL for a single matrix
    parts = []
    for start in range(0, len(all_matrices), matrices_per_part):
        parts.append(slice(start, start + matrices_per_part))

    def compute_part(part: slice) -> None:
        all_values[part] = np.linalg.eigvalsh(all_matrices[part], UPLO=UPLO)

    _compute_in_threads(parts, compute_part, matrices.numel() * size)
    return values


def _register_kernels() -> None:
    """Register all kernels of this module for tensors on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    fused = "_scaled_dot_product_flash_attention_for_cpu"
    unary: dict[str, Callable[..., Any]] = {}
    for name, function in UNARY.items():
        unary[name] = _create_elementwise_kernel(function)
    with_sum: dict[str, Callable[..., Any]] = {
        "addmm": _addmm,
        "baddbmm": _addmm,
        "addmv": _addmv,
    }
    with_out = {**unary, **with_sum, "mm": _multiply, "bmm": _multiply}
    kernels: dict[str, Callable[..., Any]] = {
        **with_out,
        "dot": _dot,
        "linalg_qr": _decompose_qr,
        "_linalg_eigh": _decompose_symmetric,
        fused: _attend,
        f"{fused}_backward": _differentiate_attention,
    }
    for name, function in UNARY.items():
        kernels[f"{name}_"] = _create_elementwise_in_place_kernel(function)
    for name, kernel in with_sum.items():
        kernels[f"{name}_"] = _create_in_place_kernel(kernel)
    for name, kernel in with_out.items():
        kernels[f"{name}.out"] = _create_out_kernel(kernel)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # about the replaced kernels
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU", allow_override=True)
    _registered.append(library)


def _create_in_place_kernel(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:

    def overwrite(values: Tensor, *others: Any, **options: Any) -> Tensor:
        result = kernel(values, *others, **options)
        return values.copy_(result)

    return overwrite


def _create_out_kernel(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:

    def write(*arguments: Tensor, out: Tensor, **options: Any) -> Tensor:
        result = kernel(*arguments, **options)
        return out.resize_(result.shape).copy_(result)

    return write
