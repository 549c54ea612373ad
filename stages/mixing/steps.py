"""Where a layer moves and turns a token's vector: attention's steps, then the feed-forward network's."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from stages.mixing.layers import layer_input
from stages.models.capture_points import Site

Tensor = torch.Tensor

STEPS = ("heads", "output_linear", "attention_skip", "attention_norm", "feed_forward", "ffn_skip", "ffn_norm")
STEP_POINTS = (
    "embedding_output",
    "attention_heads",
    "attention_output",
    "attention_residual",
    "attention_norm",
    "ffn_output",
    "layer_output",
)
STEP_MEASURES = ("cosine_previous", "cosine_input", "distance_previous", "norm")


def step_measures(features: Mapping[Site, Tensor], layer: int) -> Tensor:
    """`[tokens, steps, measures]` of one layer, from one document's features `[tokens, hidden]`.

    `cosine_previous` compares a step's vector with the one before it, `cosine_input` with the token's
    own layer input; `distance_previous` and `norm` are lengths relative to that input's. The basis
    of `heads` (the heads side by side) is not the residual stream's: its cosines say little.
    """
    start = features[layer_input(layer)]
    points = [features[Site(layer, point)] for point in STEP_POINTS[1:]]
    ffn_residual = features[Site(layer, "attention_norm")] + features[Site(layer, "ffn_output")]
    vectors = [start, *points[:-1], ffn_residual, points[-1]]
    length = start.norm(dim=-1)
    rows = [
        torch.stack(
            [
                torch.cosine_similarity(now, before, dim=-1),
                torch.cosine_similarity(now, start, dim=-1),
                (now - before).norm(dim=-1) / length,
                now.norm(dim=-1) / length,
            ],
            dim=-1,
        )
        for before, now in pairwise(vectors)
    ]
    return torch.stack(rows, dim=1)
