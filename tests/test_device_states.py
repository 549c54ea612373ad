"""Results on a second device match those on the CPU in every tested setting of torch (`STATES`).

They also match if inputs and model are on different devices, or if the model is moved between calls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_tiny_bert
from second_device import DEVICE, DEVICE_RULES, REAL_GPU
from test_torch_state import default_dtype, deterministic
from transformers import AutoModel

import attnmix
from attnmix.core.device import CPU
from attnmix.models.checkpoint import load_tokenizer

pytestmark = pytest.mark.long  # these situations are rare
TEXTS = ["time flies like an arrow", "the plot was very good"]
TOLERANCE = 1e-3 if REAL_GPU else 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("model"), layers=1)


def model_on(device: torch.device, folder: Path, dtype: torch.dtype = torch.float32) -> attnmix.model.Model:
    """Return a model in memory on `device`."""
    return attnmix.load(AutoModel.from_pretrained(folder, dtype=dtype).to(device), load_tokenizer(folder))


def numbers(model: attnmix.model.Model, texts: Any = TEXTS) -> dict[str, Any]:
    """Return ratios, a matrix, parts and vectors of texts."""
    result = attnmix.measure(model, texts)
    return {
        "ratios": result.ratios["ratio"].to_numpy(),
        "matrix": result.matrix("norm", layer=1).to_numpy(),
        "parts": result.parts()["length"].to_numpy(),
        "vectors": attnmix.capture(model, texts, dtype="float32")["layer_output"].to_numpy(),
    }


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return numbers(model_on(CPU, folder))


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=tolerance, err_msg=name)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "default device": lambda: torch.device(DEVICE),
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "deterministic": deterministic,
}


@pytest.mark.parametrize("name", STATES)
def test_results_on_device_match_cpu_in_any_state(
    name: str, folder: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not REAL_GPU:
        monkeypatch.setattr(DEVICE_RULES, "available", True)
    with STATES[name]():
        model = attnmix.load(folder, device=DEVICE)
        assert_close(numbers(model), expected)
    assert model.network.device == DEVICE


@pytest.mark.parametrize(("model_device", "text_device"), [(DEVICE, CPU), (CPU, DEVICE), (DEVICE, DEVICE)])
def test_inputs_may_be_on_another_device(
    model_device: torch.device, text_device: torch.device, folder: Path, expected: dict[str, Any]
) -> None:
    model = model_on(model_device, folder)
    encoding = model.tokenizer(TEXTS, return_tensors="pt", padding=True).to(text_device)
    assert_close(numbers(model, encoding), expected)
    ids = [torch.tensor(text, device=text_device) for text in model.tokenizer(TEXTS)["input_ids"]]
    assert_close(numbers(model, ids), expected)


def test_models_on_two_devices_are_compared_without_difference(folder: Path) -> None:
    table = attnmix.compare(model_on(CPU, folder), model_on(DEVICE, folder), TEXTS).to_frame(every=True)
    assert table["difference"].notna().any()
    assert np.abs(table["difference"]).max() < TOLERANCE


def test_a_model_moved_between_calls_gives_the_same_numbers(folder: Path, expected: dict[str, Any]) -> None:
    model = model_on(DEVICE, folder)
    result = attnmix.measure(model, TEXTS)
    model.network.to(CPU)
    np.testing.assert_allclose(result.matrix("norm", layer=1).to_numpy(), expected["matrix"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_model_on_device_matches_cpu(dtype: torch.dtype, folder: Path) -> None:
    assert_close(numbers(model_on(DEVICE, folder, dtype)), numbers(model_on(CPU, folder, dtype)))


def test_groups_written_from_device_match_memory(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmix.core.store.features.SHARD_BYTES", 64 * 24 * 4)
    monkeypatch.setattr("attnmix.runs.capture.DEVICE_GROUP_BYTES", 1)  # one shard per group
    texts = [" ".join(TEXTS[0].split()[: 2 + number % 4]) for number in range(40)]
    options: Any = {"points": ["layer_output"], "dtype": "float32"}
    run = attnmix.capture(model_on(DEVICE, folder), texts, tmp_path / "run", **options)
    assert len(list((tmp_path / "run").rglob("layer_01/layer_output.zarr/c/*/0"))) > 2
    in_memory = attnmix.capture(model_on(CPU, folder), texts, **options)["layer_output"]
    np.testing.assert_allclose(run.features("layer_output").numpy(), in_memory, rtol=0, atol=TOLERANCE)
