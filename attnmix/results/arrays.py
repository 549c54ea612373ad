"""Measured arrays with labels: a table of ratios, and xarrays of matrices and parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.measures.engine import Measurements

if TYPE_CHECKING:
    import xarray

Array = npt.NDArray[Any]


def tabulate_ratios(
    measurements: Measurements, methods: Sequence[str], read_tokens: Callable[[int, int], Sequence[str]]
) -> pd.DataFrame:
    """Return the ratio of every token: `text, position, token, layer, method, ratio`.

    Args:
        measurements: The measurements of all texts.
        methods: The names of the ratios.
        read_tokens: A function that returns the input tokens of a text in a layer.
    """
    frames = []
    for number in range(len(measurements.texts)):
        ratios_MLT = measurements.ratios[number]
        _, layers, tokens = ratios_MLT.shape
        numbers = range(1, layers + 1)
        names = ["text", "method", "layer", "position"]
        index = pd.MultiIndex.from_product([[number], methods, numbers, range(tokens)], names=names)
        labels = np.concatenate([read_tokens(number, layer) for layer in numbers])
        token = np.tile(labels, len(methods))
        frame = index.to_frame(index=False).assign(token=token, ratio=ratios_MLT.ravel())
        frames.append(frame)
    table = pd.concat(frames, ignore_index=True)
    return table[["text", "position", "token", "layer", "method", "ratio"]]


def label_matrix(name: str, matrix_LTT: Array, tokens: Sequence[str]) -> xarray.DataArray:
    """Return a contribution matrix with the dimensions `layer`, `token` and `source`."""
    import xarray

    labels: dict[str, Any] = {"layer": range(1, len(matrix_LTT) + 1), "token": tokens, "source": tokens}
    return xarray.DataArray(matrix_LTT, labels, ("layer", "token", "source"), name=name)


def label_parts(parts: Mapping[str, Array], tokens: Sequence[str], positions: Sequence[int]) -> xarray.Dataset:
    """Return the parts of the tokens at `positions`, with the dimensions `layer`, `token` and `source`."""
    import xarray

    labels = {
        "layer": range(len(parts["projection"])),
        "token": [tokens[position] for position in positions],
        "source": tokens,
    }
    dimensions = tuple(labels)
    variables = {name: (dimensions[: values.ndim], values) for name, values in parts.items()}
    return xarray.Dataset(variables, labels)
