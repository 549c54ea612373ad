"""Where a layer moves and turns a token's vector: attention's steps, then the feed-forward network's."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from stages.sites import STEP_POINTS, Site, layer_input

Tensor = torch.Tensor

STEP_MEASURES = ("cosine_previous", "cosine_input", "distance_previous", "norm")


def step_measures(features: Mapping[Site, Tensor], layer: int) -> Tensor:
    """`[tokens, steps, measures]` of one layer, from one document's features `[tokens, hidden]`.

    `cosine_previous` compares a step's vector with the one before it, `cosine_input` with the token's
    own layer input; `distance_previous` and `norm` are lengths relative to that input's. The basis
    of `heads` (the heads side by side) is not the residual stream's: its cosines say little.
    """
    start = features[layer_input(layer)]
    ffn_residual = features[Site(layer, "attention_norm")] + features[Site(layer, "ffn_output")]
    after = [features[Site(layer, point)] if point else ffn_residual for point in STEP_POINTS.values()]
    vectors = [start, *after]
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
