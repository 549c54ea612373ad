"""Results do not depend on torch's global state, and calls restore this state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_tiny_bert
from torch._subclasses import FakeTensorMode
from transformers import AutoModel

import attnmix
from attnmix.core.errors import InputError
from attnmix.core.torch_state import torch_state
from attnmix.models.checkpoint import load_tokenizer

TEXTS = ["time flies like an arrow", "the film was good"]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default float64": lambda: default_dtype(torch.float64),
    "default float16": lambda: default_dtype(torch.float16),
    "default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
}


def state() -> dict[str, Any]:
    """Return the global state of torch that a call could leave changed."""
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.backends.cuda.matmul.fp32_precision,
        "threads": torch.get_num_threads(),
    }


def numbers(model: attnmix.Model) -> dict[str, Any]:
    """Return results of all calls that run a model."""
    result = attnmix.measure(model, TEXTS, controls=["corpus_value", "swap", "random_weights", "shuffled_words"])
    vectors = attnmix.capture(model, TEXTS, dtype="float32")
    return {
        "ratios": result.ratios["ratio"].to_numpy(),
        "controls": result.controls()["mean"].to_numpy(),
        "sinks": result.sinks()["mean"].to_numpy(),
        "own share": result.own_share()["mean"].to_numpy(),
        "matrix": result.matrix("value_zeroing").to_numpy(),
        "parts": result.parts()["length"].to_numpy(),
        "parts of rows": result.parts(rows=[1])["projection"].to_numpy(),
        "vectors": vectors["layer_output"].to_numpy(),
    }


@pytest.fixture(scope="module")
def small_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a one-layer model; one layer suffices, because torch's state is the same for all layers."""
    return write_tiny_bert(tmp_path_factory.mktemp("small_bert"), layers=1)


@pytest.fixture(scope="module")
def expected(small_bert: Path) -> dict[str, Any]:
    return numbers(attnmix.load(str(small_bert)))


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("loading", ["inside", "outside"])
def test_results_do_not_depend_on_torch_state(
    name: str, loading: str, small_bert: Path, expected: dict[str, Any]
) -> None:
    outside = attnmix.load(str(small_bert))
    with STATES[name]():
        before = state()
        model = outside if loading == "outside" else attnmix.load(str(small_bert))
        found = numbers(model)
        with pytest.raises(InputError):
            attnmix.measure(model, TEXTS, controls=["class_share"])
        assert state() == before
    for quantity, values in expected.items():
        np.testing.assert_allclose(found[quantity], values, rtol=0, atol=1e-6, err_msg=quantity)


def test_inference_mode_model_is_measured(small_bert: Path, expected: dict[str, Any]) -> None:
    with torch.inference_mode():
        network = AutoModel.from_pretrained(small_bert)
        network.embeddings.word_embeddings.weight = torch.nn.Parameter(
            network.embeddings.word_embeddings.weight.clone()
        )
    assert any(weight.is_inference() for weight in network.parameters())
    found = numbers(attnmix.load(network, load_tokenizer(small_bert)))
    np.testing.assert_allclose(found["parts of rows"], expected["parts of rows"], rtol=0, atol=1e-6)


def test_compiled_network_is_measured_uncompiled(small_bert: Path, expected: dict[str, Any]) -> None:
    network = AutoModel.from_pretrained(small_bert)
    network.compile(backend="eager")
    compiled = network._compiled_call_impl
    found = numbers(attnmix.load(network, load_tokenizer(small_bert)))
    np.testing.assert_allclose(found["ratios"], expected["ratios"], rtol=0, atol=1e-6)
    assert network._compiled_call_impl is compiled


def test_threads_measure_one_network_in_turn(small_bert: Path, expected: dict[str, Any]) -> None:
    network = AutoModel.from_pretrained(small_bert).train()
    model = attnmix.load(network, load_tokenizer(small_bert))
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: numbers(model), range(4)):
            np.testing.assert_allclose(found["matrix"], expected["matrix"], rtol=0, atol=1e-6)
    assert network.config._attn_implementation == "sdpa"
    assert network.training


def test_last_thread_restores_process_state() -> None:
    entered, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with torch_state():
            entered.set()
            may_leave.wait()
            assert torch.get_default_dtype() == torch.float32

    with default_dtype(torch.float64), ThreadPoolExecutor(1) as pool:
        with torch_state():
            waiting = pool.submit(other)
            entered.wait()
        assert torch.get_default_dtype() == torch.float32
        may_leave.set()
        waiting.result()
        assert torch.get_default_dtype() == torch.float64
        with pytest.raises(ZeroDivisionError), torch_state():
            raise ZeroDivisionError
        assert torch.get_default_dtype() == torch.float64


def test_torch_transforms_are_an_error(small_bert: Path) -> None:
    model = attnmix.load(str(small_bert))
    calls = {
        "torch.func": lambda: torch.func.vmap(lambda _: attnmix.measure(model, TEXTS))(torch.zeros(2)),
        "torch.autograd.forward_ad": lambda: inside(torch.autograd.forward_ad.dual_level(), model, controls=["swap"]),
        "FakeTensorMode": lambda: inside(FakeTensorMode(), model),
    }
    for name, call in calls.items():
        with pytest.raises(InputError, match=f"^torch: {name}.* is active; call attnmix outside of it"):
            call()


def inside(context: AbstractContextManager[Any], model: attnmix.Model, **options: Any) -> Any:
    with context:
        return attnmix.measure(model, TEXTS, **options)


def test_threads_measure_several_networks_concurrently(small_bert: Path) -> None:
    models = [attnmix.load(str(small_bert)) for _ in range(3)]

    def swaps(model: attnmix.Model) -> Any:
        return attnmix.measure(model, TEXTS, controls=["swap"]).controls()["mean"].to_numpy()

    expected = swaps(models[0])
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(swaps, models * 2):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
