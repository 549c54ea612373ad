"""Conversion of measured arrays to labelled objects: a table of ratios, and xarray objects of matrices and parts."""

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
    """Return a table of the ratio of every token, with the columns `text, position, token, layer, method, ratio`.

    Args:
        measurements: The measurements of all texts.
        methods: The names of the ratios.
        read_tokens: A function that returns the input tokens of a text in a layer.
    """
    columns = ["text", "method", "layer", "position"]
    frames = []
    for number in range(len(measurements.texts)):
        ratios_MLT = measurements.ratios[number]  # [methods, layers, tokens]
        _, layer_count, token_count = ratios_MLT.shape
        layers = range(1, layer_count + 1)
        # The rows have the order of the flattened ratios: by ratio, then by layer, then by position.
        index = pd.MultiIndex.from_product([[number], methods, layers, range(token_count)], names=columns)
        tokens_by_layer = np.concatenate([read_tokens(number, layer) for layer in layers])
        tokens = np.tile(tokens_by_layer, len(methods))  # the same tokens for each ratio
        frame = index.to_frame(index=False).assign(token=tokens, ratio=ratios_MLT.ravel())
        frames.append(frame)
    table = pd.concat(frames, ignore_index=True)
    return table[["text", "position", "token", "layer", "method", "ratio"]]


def label_matrix(name: str, matrix_LTT: Array, tokens: Sequence[str]) -> xarray.DataArray:
    """Return a copy of a contribution matrix `[layers, tokens, tokens]` with the dimensions `layer, token, source`."""
    import xarray

    labels: dict[str, Any] = {"layer": range(1, len(matrix_LTT) + 1), "token": tokens, "source": tokens}
    return xarray.DataArray(matrix_LTT.copy(), labels, ("layer", "token", "source"), name=name)


def label_parts(parts: Mapping[str, Array], tokens: Sequence[str], positions: Sequence[int]) -> xarray.Dataset:
    """Return copies of the variables of `Measures.parts` with the dimensions `layer`, `token` and `source`.

    Args:
        parts: The variables `[layers, positions, sources]` or `[layers, positions]` by name.
        tokens: All tokens of the text, which are the sources.
        positions: The positions of the receiving tokens.
    """
    import xarray

    labels = {
        "layer": range(len(parts["projection"])),
        "token": [tokens[position] for position in positions],
        "source": tokens,
    }
    dimensions = tuple(labels)
    variables = {}
    for name, values in parts.items():
        dimensions_of_variable = dimensions[: values.ndim]  # without `source` for variables with two axes
        variables[name] = (dimensions_of_variable, values.copy())
    return xarray.Dataset(variables, labels)
