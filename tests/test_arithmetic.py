"""Portable kernels agree with torch's own, and results do not depend on processor cores, threads or batches."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Barrier, get_ident

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from threadpoolctl import threadpool_info

from attnmix.core.arithmetic import environment, kernels
from attnmix.core.device import CPU

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
LIMIT_SECONDS = 60  # maximum time that threads wait for each other
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}


@pytest.fixture
def by_torch() -> Iterator[None]:
    """Use torch's own arithmetic in a test, and restore the portable arithmetic afterwards."""
    kernels.set_arithmetic(environment.FASTEST)
    yield
    kernels.set_arithmetic(environment.PORTABLE)
    torch.set_num_threads(1)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers between 0 and 1."""
    return torch.from_numpy(np.random.default_rng(seed).random(shape)).to(dtype)


def products(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the results of all matrix products with a portable kernel, for inputs of different layouts."""
    a, b, c = numbers(800, 200, dtype=dtype), numbers(200, 70, seed=1, dtype=dtype), numbers(5, 40, 16, dtype=dtype)
    row, square = numbers(70, seed=2, dtype=dtype), numbers(5, 40, 40, seed=3, dtype=dtype)
    out = torch.empty(800, 70, dtype=dtype)
    return {
        "mm": a @ b,
        "mm of few rows": a[:9] @ b,
        "mm of a transposed": b.T @ a.T,
        "mm with out": torch.mm(a, b, out=out),
        "addmm": torch.addmm(row, a, b, beta=0.5, alpha=2),
        "addmm in place": numbers(800, 70, seed=4, dtype=dtype).addmm_(a, b),
        "linear": torch.nn.functional.linear(a, b.T.contiguous(), row),
        "mv": a @ b[:, 0],
        "addmv": torch.addmv(a[:, 0], a, b[:, 1]),
        "dot": a[0] @ b[:, 1],
        "bmm": c @ c.mT,
        "bmm of an expanded matrix": c[:1].expand(5, 40, 16) @ c.mT,
        "baddbmm": torch.baddbmm(square, c, c.mT, beta=0),
        "einsum": torch.einsum("bij,bkj,k->bi", c, c, c[0, :, 0]),
    }


def functions(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return results of all elementwise functions that have a portable kernel, also in place and with `out`."""
    x = numbers(33, 7, dtype=dtype) * 0.9
    results = {name: getattr(torch, name)(x) for name in kernels.UNARY}
    results |= {"edges": torch.tensor([-1.0, 0.0, torch.inf, torch.nan], dtype=dtype).log()}
    return results | {"in place": x.clone().exp_().sqrt_(), "with out": torch.exp(x.T, out=torch.empty(0, dtype=dtype))}


def attention(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return outputs and gradients of torch's fused attention."""
    query, key, value = (numbers(2, heads, 33, 16, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    mask = torch.zeros(2, 1, 33, 33, dtype=dtype)
    mask[0, :, :, 20:] = -torch.inf
    mask[1, :, 5] = -torch.inf  # a row without any visible token
    results = {}
    for name, options in {"plain": {}, "causal": {"is_causal": True}, "masked": {"attn_mask": mask}}.items():
        results[f"{name} heads"], results[f"{name} sums"] = FUSED(query, key, value, 0.0, **options)
        if dtype != torch.bfloat16:
            leaves = [each.clone().requires_grad_() for each in (query, key, value)]
            FUSED(*leaves, 0.0, **options)[0].square().sum().backward()
            results |= {f"{name} gradient {i}": leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None}
    return results


def derivatives(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return results of vmap, of a Jacobian-vector product, and of a gradient."""
    square = numbers(3, 4, 4, dtype=dtype)
    leaf = numbers(4, 4, dtype=dtype).requires_grad_()
    (leaf @ leaf).exp().log1p().sqrt().sum().backward()
    assert leaf.grad is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.func uses deprecated functions of torch
        moved = torch.func.jvp(lambda t: (t @ t).exp(), (square,), (square,))[1]
        return {"vmap": torch.vmap(lambda t: (t @ t).exp())(square), "jvp": moved, "gradient": leaf.grad}


def decompositions(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the factors of a QR decomposition, and the eigenvalues and eigenvectors of a symmetric matrix."""
    tall = numbers(40, 12, dtype=dtype)
    q, r = torch.linalg.qr(tall)
    values, vectors = torch.linalg.eigh(tall.T @ tall)
    # The sign of each vector is arbitrary.
    results = {"q": q.abs(), "r": r.abs(), "r alone": torch.linalg.qr(tall, mode="r").R.abs()}
    return results | {"values": values, "values alone": torch.linalg.eigvalsh(tall.T @ tall), "vectors": vectors.abs()}


CASES = [(make, dtype) for make in (products, functions, attention) for dtype in TOLERANCE]
CASES += [(derivatives, torch.float32), (derivatives, torch.float64), (decompositions, torch.float64)]


@pytest.mark.parametrize(("make", "dtype"), CASES)
def test_kernels_match_torch(make, dtype: torch.dtype, by_torch: None) -> None:
    expected = make(dtype)
    kernels.set_arithmetic(environment.PORTABLE)
    results = make(dtype)
    for name, values in expected.items():
        assert results[name].dtype == values.dtype, name
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(results[name], values, rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)
    kernels.set_arithmetic(environment.FASTEST)
    for name, values in make(dtype).items():
        assert torch.equal(values.nan_to_num(), expected[name].nan_to_num()), f"{name}: torch's kernel was not restored"


@pytest.mark.parametrize("weights", [1, 100, 33 * 33 * 3])  # block sizes: one row, three rows, three heads
def test_blockwise_attention_matches_torch(weights: int, by_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = attention(torch.float64)
    kernels.set_arithmetic(environment.PORTABLE)
    monkeypatch.setattr(kernels, "CACHED_WEIGHTS", weights)
    for name, values in attention(torch.float64).items():
        torch.testing.assert_close(values, expected[name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("tokens", [7, 33, 600])  # blocks of many texts, a few texts, and parts of a head
def test_attention_bytes_do_not_depend_on_batch(tokens: int, by_torch: None) -> None:
    kernels.set_arithmetic(environment.PORTABLE)
    query, key, value = (numbers(5, 4, tokens, 16, seed=seed) for seed in range(3))
    heads, sums = FUSED(query, key, value)
    for text in range(5):
        one = slice(text, text + 1)
        heads_of_text, sums_of_text = FUSED(query[one], key[one], value[one])
        assert torch.equal(heads_of_text, heads[one])
        assert torch.equal(sums_of_text, sums[one])


def test_integer_inputs_behave_as_in_torch() -> None:
    assert torch.arange(3).exp().dtype == torch.float32
    assert (torch.arange(6).view(2, 3) @ torch.arange(3)).tolist() == [5, 14]


def test_libraries_use_common_instruction_sets(by_torch: None) -> None:
    kernels.set_arithmetic(environment.PORTABLE)
    blas = [library for library in threadpool_info() if library["internal_api"] == "openblas"]
    assert {library["architecture"] for library in blas} == {"Haswell"}
    assert {library["num_threads"] for library in blas} == {1}
    assert torch.get_num_threads() == environment.TORCH_THREADS
    assert torch.backends.cpu.get_cpu_capability() == "AVX2"
    features = np._core._multiarray_umath.__cpu_features__
    assert features["X86_V3"]
    assert not features["X86_V4"]


TRAINING = """
import hashlib
from attnmix.core.arithmetic import environment
environment.set_variables(environment.PORTABLE)
import torch
from attnmix.core.arithmetic import kernels
kernels.set_arithmetic(environment.PORTABLE)
for order in (slice(None), torch.arange(7, -1, -1)):
    generator = torch.Generator().manual_seed(0)
    layers = torch.nn.LayerNorm(768), torch.nn.Linear(768, 64), torch.nn.GELU(), torch.nn.Linear(64, 2)
    model = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        texts = torch.rand(8, 300, 768, generator=generator)
        labels = torch.arange(8) % 2
        torch.nn.functional.cross_entropy(model(texts[order]).mean(1), labels[order]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest())
"""


@pytest.mark.parametrize(
    ("processor", "cost"),
    [
        ("vendor_id : GenuineIntel\nflags : fpu avx2 avx512f avx512dq \n", "2.0 times"),
        ("vendor_id : AuthenticAMD\nflags : fpu avx2 avx512f avx512dq \n", "1.15 times"),  # MKL ignores AVX-512 on AMD
        ("vendor_id : GenuineIntel\nflags : fpu avx2 fma \n", "1.15 to 2.0 times"),
        ("", "1.15 to 2.0 times"),
    ],
)
def test_log_states_cost_of_arithmetic(processor: str, cost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_describe_processor", lambda: processor)
    monkeypatch.setattr(environment.platform, "machine", lambda: "x86_64")
    for arithmetic in (environment.PORTABLE, environment.FASTEST):
        assert f"forward passes take {cost} as long" in environment.note(arithmetic)
    monkeypatch.setattr(environment, "_describe_processor", lambda: "vendor_id : GenuineIntel\nflags : fpu sse4_2 \n")
    assert "same bytes" not in environment.note(environment.PORTABLE)


def trained(threads: int) -> list[str]:
    """Return the hash of the trained weights for each of two orders of the texts."""
    variables = {name: value for name, value in os.environ.items() if name not in environment.SETTINGS}
    variables["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, "-c", TRAINING]
    run = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=True)
    return run.stdout.split()


@pytest.mark.long  # two processes; `make verify` compares whole runs
def test_training_bytes_do_not_depend_on_threads() -> None:
    given, reversed_order = trained(1)
    assert given != reversed_order  # the hash detects a different order of summation
    assert trained(5) == [given, reversed_order]


def test_results_name_their_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, portable, words in (
        ("x86_64", True, "x86-64 processor, portable arithmetic"),
        ("aarch64", False, "aarch64 processor, arithmetic of this machine"),
    ):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        monkeypatch.setattr(kernels, "can_be_portable", lambda portable=portable: portable)
        assert kernels.computed_on(environment.PORTABLE, CPU) == words
        assert kernels.computed_on(environment.FASTEST, CPU) == f"{machine} processor, arithmetic of this machine"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H200 number {device.index}")
    assert kernels.computed_on(environment.PORTABLE, torch.device("cuda", 1)) == "NVIDIA H200 number 1"


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the number of cores to two, and use new task threads during the test."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    kernels._get_task_threads.cache_clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(environment.TORCH_THREADS)
    yield
    torch.set_num_threads(threads)
    kernels._get_task_threads().shutdown()
    kernels._get_task_threads.cache_clear()


def test_tasks_in_threads_are_not_nested(two_cores: None) -> None:
    threads = kernels.task_threads(CPU)
    assert threads is not None
    first, second = numbers(700, 300), numbers(300, 500, seed=1)
    both_have_begun = Barrier(2, timeout=LIMIT_SECONDS)

    def task(factor: float) -> tuple[int, bool, int, torch.Tensor]:
        both_have_begun.wait()
        return get_ident(), kernels.task_threads(CPU) is None, torch.get_num_threads(), factor * (first @ second)

    used, alone, torch_threads, products = zip(*threads.map(task, [1.0, 5.0]), strict=True)
    assert len({*used, get_ident()}) == 3
    assert alone == (True, True)
    assert torch_threads == (1, 1)
    assert torch.get_num_threads() == environment.TORCH_THREADS
    torch.testing.assert_close(products, (first @ second, 5 * (first @ second)), rtol=0, atol=0)


def test_task_may_wait_for_earlier_task(two_cores: None) -> None:
    caller = get_ident()

    def waits_for(before: Future[int] | None) -> int:
        assert get_ident() != caller
        return 0 if before is None else before.result(LIMIT_SECONDS) + 1

    last = None
    for _ in range(20):
        last = kernels.submit_task(CPU, waits_for, last)
    assert last is not None
    assert last.result(LIMIT_SECONDS) == 19


def test_task_without_threads_runs_immediately(two_cores: None) -> None:
    assert kernels.submit_task(torch.device("meta"), get_ident).result(0) == get_ident()
    with pytest.raises(ZeroDivisionError):
        kernels.submit_task(torch.device("meta"), lambda: 1 // 0)


@pytest.mark.parametrize("default", ["cpu", "cuda"])
@pytest.mark.parametrize(("device", "has_threads"), [("cpu", True), ("cuda", False), ("meta", False)])
def test_task_threads_depend_on_model_device_only(
    two_cores: None, monkeypatch: pytest.MonkeyPatch, default: str, device: str, has_threads: bool
) -> None:
    monkeypatch.setattr(kernels, "chosen_device", lambda: torch.device(default))
    assert (kernels.task_threads(torch.device(device)) is not None) == has_threads


def test_torch_arithmetic_has_no_task_threads(two_cores: None, by_torch: None) -> None:
    assert kernels.task_threads(CPU) is None
    kernels.set_arithmetic(environment.PORTABLE)
    assert kernels.task_threads(CPU) is not None


@pytest.mark.parametrize("cores", ["1", "2"])
def test_task_sums_do_not_depend_on_cores(two_cores: None, monkeypatch: pytest.MonkeyPatch, cores: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", cores)
    threads = kernels.task_threads(CPU)
    assert threads is not None
    assert list(threads.map(lambda _: torch.get_num_threads(), range(4))) == [1, 1, 1, 1]
