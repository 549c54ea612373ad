"""Random numbers in the form of the parts that `measure` keeps of every head."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from attnmix.store.heads import scores


def random_parts(
    generator: np.random.Generator, shape: tuple[int, int, int, int], *, key_heads: int = 0, causal: bool = False
) -> dict[str, npt.NDArray[Any]]:
    """Every part but the vectors of short texts; `shape` is layers, heads, tokens, width."""
    layers, heads, tokens, width = shape
    query = generator.normal(size=shape).astype(np.float32)
    key = generator.normal(size=(layers, key_heads or heads, tokens, width)).astype(np.float32)
    last = np.arange(tokens) if causal else np.full(tokens, tokens - 1)
    reach = np.stack([np.zeros(tokens), last], -1).astype(np.int32)
    parts = {
        "query": query,
        "key": key,
        "log_sums": np.zeros((layers, heads, tokens), np.float32),
        "reach": np.tile(reach, (layers, 1, 1)),
        "scores": np.tile(np.array([width**-0.5, 0], np.float32), (layers, 1)),
        "source_norms": generator.uniform(0.5, 2, size=(layers, heads, tokens)).astype(np.float32),
        "given_norms": generator.uniform(0.5, 2, size=(layers, heads, tokens)).astype(np.float32),
    }
    for layer in range(layers):
        for head in range(heads):
            parts["log_sums"][layer, head] = np.log(np.exp(scores(parts, layer, head)).sum(-1))
    return parts
