"""Capture points: the named places in a model where features are taken, and their order in the forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

EMBEDDING_POINTS = ("word_embedding", "embedding_sum", "embedding_output")
LAYER_POINTS = (
    "attention_heads",
    "attention_output",
    "attention_residual",
    "attention_norm",
    "ffn_output",
    "layer_output",
)
POINTS = EMBEDDING_POINTS + LAYER_POINTS
# The steps of a layer, and the capture point after each; no point stands between second skip and second LayerNorm.
STEP_POINTS = {
    "heads": "attention_heads",
    "output_linear": "attention_output",
    "attention_skip": "attention_residual",
    "attention_norm": "attention_norm",
    "feed_forward": "ffn_output",
    "ffn_skip": None,
    "ffn_norm": "layer_output",
}


class Site(NamedTuple):
    """One capture point in one layer; level 0 is the embedding."""

    layer: int
    point: str

    def __str__(self) -> str:
        return f"layer_{self.layer:02d}/{self.point}"


def layer_input(layer: int) -> Site:
    """The site whose vectors enter `layer` (counted from 1)."""
    return Site(layer - 1, "layer_output") if layer > 1 else Site(0, "embedding_output")


def in_forward_order(sites: Iterable[Site]) -> list[Site]:
    """Sites sorted as the forward pass meets them."""
    return sorted(sites, key=lambda site: (site.layer, POINTS.index(site.point)))
