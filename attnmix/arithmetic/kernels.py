"""Torch's operations on a CPU that would go to MKL, which computes otherwise on processors of another maker.

Products go to NumPy's OpenBLAS, a fixed number of rows at a time, so that neither the processor's maker nor its cores
decide the order of a sum; exponentials and the like to NumPy and SciPy. They are registered below autograd: nothing
that calls torch changes, and derivatives of any order are made of the same operations.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.special
import torch

from attnmix.arithmetic.settings import PORTABLE, TORCH_THREADS, can_be_portable

Tensor = torch.Tensor
Array = npt.NDArray[Any]
ROWS = 192  # of a product, for one thread
ONE_THREAD_MULTIPLICATIONS = 2**21  # in a product that is not worth a second thread
BLOCK_ELEMENTS = 2**21  # attention weights that are computed together
BLOCK_HEADS = 4  # at least, so that several cores have work
HALF_DTYPES = (torch.float16, torch.bfloat16)  # computed in float32, rounded once

UNARY: dict[str, Callable[[Array], Array]] = {
    **{name: getattr(np, name) for name in ("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt")},
    **{name: getattr(np, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{name: getattr(scipy.special, name) for name in ("erf", "erfc", "erfinv")},
    **{name: getattr(np, f"arc{name[1:]}") for name in ("asin", "acos", "atan")},
}
"""Functions of NumPy or SciPy by torch's names; all those that torch hands to MKL."""

_registered: list[torch.library.Library] = []


def use(arithmetic: str) -> None:
    """Choose the arithmetic of this process, `portable` or `fastest`; on a GPU, deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of the module
    if arithmetic == PORTABLE and not _registered:
        torch.set_num_threads(TORCH_THREADS)
        _register()
    elif arithmetic != PORTABLE and _registered:
        torch.set_num_threads(cores())
        _registered.pop()._destroy()


def portable() -> bool:
    """Return True where `use` has chosen the portable arithmetic."""
    return bool(_registered)


def computed_on(arithmetic: str) -> str:
    """Return what decides the last digits of a result, in words that stand beside it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
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
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), thread_name_prefix="product")


def _product(first: Tensor, second: Tensor) -> Tensor:
    """Return `[M, K] @ [K, N]`, or the same with one axis before both."""
    if first.dtype in HALF_DTYPES:
        return _product(first.float(), second.float()).to(first.dtype)
    made = first.new_empty((*first.shape[:-1], second.shape[-1]))
    a, b, out = (_for_blas(each).detach().numpy() for each in (first, second, made))
    whole = a.ndim == 3  # products, of which each is the same wherever it is computed; else rows of one
    size = max(1, -(-len(a) // cores())) if whole else ROWS
    parts = [slice(start, start + size) for start in range(0, len(a), size)]
    left = iter(parts)

    def compute() -> None:
        for part in left:
            np.matmul(a[part], b[part] if whole else b, out=out[part])

    alone = len(parts) == 1 or out.size * a.shape[-1] < ONE_THREAD_MULTIPLICATIONS
    others = [] if alone else [_threads().submit(compute) for _ in range(min(cores(), len(parts)) - 1)]
    compute()
    for other in others:
        other.result()
    return made


def _for_blas(matrices: Tensor) -> Tensor:
    """Return matrices that NumPy hands to BLAS: others, such as expanded ones, it multiplies by its own loops."""
    for inner, outer in ((-1, -2), (-2, -1)):
        if matrices.stride(inner) == 1 and matrices.stride(outer) >= max(1, matrices.shape[inner]):
            return matrices
    return matrices.contiguous()


def _added(product: Tensor, to: Tensor, beta: float, alpha: float) -> Tensor:
    if alpha != 1:
        product.mul_(alpha)
    return product.add_(to if beta == 1 else to * beta) if beta else product


def _addmm(to: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(_product(first, second), to, beta, alpha)


def _mv(matrix: Tensor, vector: Tensor) -> Tensor:
    return _product(matrix, vector.unsqueeze(-1)).squeeze(-1)


def _addmv(to: Tensor, matrix: Tensor, vector: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(_mv(matrix, vector), to, beta, alpha)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return _product(first.unsqueeze(0), second.unsqueeze(1)).reshape(())


def _elementwise(function: Callable[[Array], Array]) -> Callable[[Tensor], Tensor]:
    def kernel(values: Tensor) -> Tensor:
        kind = values.dtype if values.is_floating_point() or values.is_complex() else torch.get_default_dtype()
        values = values.detach().to(torch.float32 if kind in HALF_DTYPES else kind)
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.asarray(function(values.numpy()))).to(kind)

    return kernel


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return heads `[B, H, T, d]` and the logarithm of each row's sum `[B, H, T]`, as the fused kernel does."""
    heads = query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
    log_sums = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    for block in _attention_blocks(query, key, value, dropout_p, is_causal, attn_mask, scale):
        heads[block.place] = _product(block.weights, block.value).view(heads[block.place].shape)
        log_sums[block.place] = block.log_sums.view(log_sums[block.place].shape)
    return heads, log_sums


def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the derivatives by query, key and value, in their shapes."""
    every_head = (*query.shape[:2], *key.shape[2:])
    grad_query, grad_key, grad_value = (
        query.new_zeros(query.shape),
        key.new_zeros(every_head),
        key.new_zeros(every_head),
    )
    for block in _attention_blocks(query, key, value, dropout_p, is_causal, attn_mask, scale):
        texts_and_heads, shape = block.place[:2], grad_key[block.place[:2]].shape
        grad, attended = (each[block.place].flatten(0, 1).to(block.query.dtype) for each in (grad_out, out))
        grad_scores = _product(grad, block.value.mT).sub_((grad * attended).sum(-1, keepdim=True))
        grad_scores.mul_(block.weights).mul_(_factor(query, scale))
        grad_query[block.place] = _product(grad_scores, block.key).view(grad_query[block.place].shape)
        grad_key[texts_and_heads] += _product(grad_scores.mT, block.query).view(shape)
        grad_value[texts_and_heads] += _product(block.weights.mT, grad).view(shape)
    groups = (each.unflatten(1, (key.shape[1], -1)).sum(2) for each in (grad_key, grad_value))
    return grad_query, *groups


class _AttentionBlock(NamedTuple):
    """The attention of some heads and rows: G heads of one or more texts, N rows, S keys, width d."""

    place: tuple[slice, slice, slice]  # texts, heads, rows
    query: Tensor  # [G, N, d]
    key: Tensor  # [G, S, d]
    value: Tensor  # [G, S, d]
    weights: Tensor  # [G, N, S], 0 in rows that see no key
    log_sums: Tensor  # [G, N], the logarithm of the softmax's denominator; 0 in rows that see no key


def _attention_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> Iterator[_AttentionBlock]:
    """Yield blocks of at most `BLOCK_ELEMENTS` weights, which stay in a processor's cache.

    How a text is divided depends on its length only, not on the batch or the number of cores.
    """
    if dropout_p:
        raise NotImplementedError("the portable attention has no dropout")
    (batch, heads, tokens, _), keys = query.shape, key.shape[-2]
    kind = torch.promote_types(query.dtype, torch.float32)
    if key.shape[1] < heads:  # grouped heads
        key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
    rows = min(tokens, max(1, BLOCK_ELEMENTS // (BLOCK_HEADS * keys)))
    group = min(heads, max(1, BLOCK_ELEMENTS // (rows * keys)))
    texts = max(1, BLOCK_ELEMENTS // (rows * keys * heads))
    starts = product(range(0, batch, texts), range(0, heads, group), range(0, tokens, rows))
    for text, head, row in starts:
        place = np.s_[text : text + texts, head : head + group, row : row + rows]
        q, k, v = (each.flatten(0, 1).to(kind) for each in (query[place], key[place[:2]], value[place[:2]]))
        scores = _product(q, k.mT.contiguous()).mul_(_factor(query, scale))
        if mask is not None:
            scores.view(-1, min(group, heads - head), *scores.shape[1:]).add_(
                mask.expand(batch, heads, tokens, keys)[place]
            )
        if is_causal:
            positions = torch.arange(keys)
            scores.masked_fill_(positions > positions[place[2]].unsqueeze(-1), -torch.inf)
        largest = scores.amax(-1)
        weights = torch.softmax(scores, -1, out=scores)
        log_sums = largest - weights.amax(-1).log()
        empty = largest == -torch.inf
        if empty.any():
            weights.masked_fill_(empty.unsqueeze(-1), 0)
            log_sums.masked_fill_(empty, 0)
        yield _AttentionBlock(place, q, k, v, weights, log_sums)


def _factor(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _qr(matrices: Tensor, mode: Literal["reduced", "complete", "r"] = "reduced") -> tuple[Tensor, Tensor]:
    if mode == "r":
        return matrices.new_empty(0), torch.from_numpy(np.linalg.qr(matrices.numpy(), mode="r"))
    q, r = np.linalg.qr(matrices.numpy(), mode=mode)
    return torch.from_numpy(q), torch.from_numpy(r)


def _eigh(matrices: Tensor, UPLO: Literal["L", "U"] = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    if not compute_v:
        values = np.linalg.eigvalsh(matrices.numpy(), UPLO=UPLO)
        return torch.from_numpy(values), matrices.new_empty(0)
    values, vectors = np.linalg.eigh(matrices.numpy(), UPLO=UPLO)
    return torch.from_numpy(values), torch.from_numpy(vectors)


def _register() -> None:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that a kernel is replaced
        kernels: dict[str, Callable[..., Any]] = {name: _elementwise(function) for name, function in UNARY.items()}
        kernels |= {"addmm": _addmm, "baddbmm": _addmm, "addmv": _addmv}
        for name, kernel in kernels.items():
            library.impl(f"{name}_", _in_place(kernel), "CPU", allow_override=True)
        kernels |= {"mm": _product, "bmm": _product, "mv": _mv, "dot": _dot, "vdot": _dot}
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU", allow_override=True)
            if name not in ("mv", "dot", "vdot"):
                library.impl(f"{name}.out", _into(kernel), "CPU", allow_override=True)
        fused = "_scaled_dot_product_flash_attention_for_cpu"
        several: dict[str, Callable[..., Any]] = {
            fused: _attention,
            f"{fused}_backward": _attention_backward,
            "linalg_qr": _qr,
            "_linalg_eigh": _eigh,
        }
        for name, kernel in several.items():
            library.impl(name, kernel, "CPU", allow_override=True)
    _registered.append(library)


def _in_place(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda values, *others, **options: values.copy_(kernel(values, *others, **options))


def _into(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def write(*arguments: Tensor, out: Tensor, **options: Any) -> Tensor:
        made = kernel(*arguments, **options)
        return out.resize_(made.shape).copy_(made)

    return write
