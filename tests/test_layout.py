"""`attnmix.layout` accepts arrays of many types, and rejects invalid arguments with an `InputError` of one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import attnmix
from attnmix.core.errors import InputError
from attnmix.core.names import METRIC_NAMES
from attnmix.core.settings import UmapParameters
from attnmix.maps.vectors import distinct_rows, read_vectors

NUMBERS = np.random.default_rng(0).integers(-8, 8, size=(24, 4)).astype(np.float32)  # exact in all dtypes below
TENSOR = torch.from_numpy(NUMBERS)


@pytest.mark.parametrize(
    "given",
    [
        NUMBERS.tolist(),
        NUMBERS.astype(np.float64),
        NUMBERS.astype(np.int64),
        pd.DataFrame(NUMBERS).astype({0: int}),
        TENSOR.clone().requires_grad_(),
        TENSOR.to(torch.bfloat16),
        TENSOR.to(torch.float16).requires_grad_(),
        TENSOR.to(torch.int8),
        TENSOR.T.contiguous().T,
        list(TENSOR.clone().requires_grad_()),
        tuple(NUMBERS),
        pd.DataFrame(NUMBERS).astype(object),
    ],
)
def test_vectors_are_accepted_in_every_form(given: Any) -> None:
    array = read_vectors(given)
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, NUMBERS)


def with_number(number: float) -> Any:
    """Return an array of two sets of vectors in which one component is `number`."""
    changed = np.stack([NUMBERS, NUMBERS]).astype(np.float64)
    changed[1, 3, 2] = number
    return changed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((with_number(each), "^vectors: row 1, 3 contains NaN or a number") for each in (np.nan, -np.inf, 1e300)),
        (TENSOR * torch.nan, "^vectors: row 0 contains NaN"),
        ([1.0, 2.0], r"^vectors: an array of shape \(2,\); allowed: numbers \[points, hidden\]"),
        (np.empty((0, 3)), r"^vectors: an array of shape \(0, 3\)"),
        (None, r"^vectors: an array of shape \(\)"),
        ("vectors", "^vectors: str is not an array of numbers"),
        ([[1, 2], [3]], "^vectors: list is not an array of numbers"),
        (pd.DataFrame({"a": ["x"] * 30, "b": 1.0}), "^vectors: DataFrame is not an array of numbers"),
        (NUMBERS * 1j, "^vectors: ndarray is not an array of numbers"),
        (NUMBERS[:19], "^vectors: 19, of which 19 are distinct; allowed: 20 or more distinct vectors; .*PCA"),
        (np.repeat(NUMBERS[:3], 100, axis=0), "^vectors: 300, of which 3 are distinct; allowed: 20 or more"),
    ],
)
def test_invalid_vectors_are_one_error(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        attnmix.layout(given)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("n_neighbors", each) for each in (1, 0, -3, 2.5, "15", None, True, 24, 10**9)),
        *(("min_dist", each) for each in (1.1, -0.1, float("nan"), "0.1", None)),
        *(("metric", each) for each in ("cosinus", "", None, 2)),
        *(("seed", each) for each in (-1, 2**32, 1.0, "2", True, None, [2])),
    ],
)
def test_arguments_are_validated_like_parameters(key: str, value: Any) -> None:
    options: dict[str, Any] = {key: value}
    with pytest.raises(InputError, match=f"^{key}: .*"):
        attnmix.layout(NUMBERS, **options)


def test_defaults_and_metrics_match_parameters() -> None:
    assert attnmix.layout.__kwdefaults__.items() <= UmapParameters().model_dump().items()
    assert {"euclidean", "cosine"} < set(METRIC_NAMES)


def test_equal_vectors_share_a_position() -> None:
    copies = np.concatenate([NUMBERS, NUMBERS[::-1], NUMBERS[:5]])
    xy = attnmix.layout(copies, seed=np.int64(3), n_neighbors=np.int32(6), min_dist=np.float64(0.2))
    np.testing.assert_array_equal(xy[24:48], xy[:24][::-1])
    np.testing.assert_array_equal(xy[48:], xy[:5])
    assert len(np.unique(xy, axis=0)) == 24
    np.testing.assert_array_equal(attnmix.layout(NUMBERS, seed=3, n_neighbors=6, min_dist=0.2), xy[:24])


def test_distinct_rows_are_numbered_by_first_occurrence() -> None:
    rows = np.array([[1, 2], [0.0, 3], [1, 2], [-0.0, 3], [5, 5]], np.float32)
    first, numbers = distinct_rows(rows)
    assert first.tolist() == [0, 1, 4]
    assert numbers.tolist() == [0, 1, 0, 1, 2]
