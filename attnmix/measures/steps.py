"""Where a layer moves and turns a token's vector: attention's steps, then the feed-forward network's."""

from __future__ import annotations

import torch

from attnmix.core.points import STEP_MEASURES, STEP_POINTS
from attnmix.measures.layers import LayerPass

Tensor = torch.Tensor


def step_measures(seen: LayerPass) -> Tensor:
    """`[tokens, steps, measures]` of one document in one layer; NaN for the steps that the family does not have.

    `cosine_previous` compares a step's vector with the one before it, `cosine_input` with the token's
    own layer input; `distance_previous` and `norm` are lengths relative to that input's. The basis
    of `heads` (the heads side by side) is not the residual stream's: its cosines say little, and where its width
    differs too there are none.
    """
    start, before = seen.x, seen.x
    length = start.norm(dim=-1)
    rows = []
    for now in _vectors(seen).values():
        row = start.new_full((len(start), len(STEP_MEASURES)), torch.nan)
        if now is not None:
            row[:, 3] = now.norm(dim=-1) / length
            if now.shape == start.shape:
                row[:, 1] = torch.cosine_similarity(now, start, dim=-1)
            if now.shape == before.shape:
                row[:, 0] = torch.cosine_similarity(now, before, dim=-1)
                row[:, 2] = (now - before).norm(dim=-1) / length
            before = now
        rows.append(row)
    return torch.stack(rows, dim=1)


def _vectors(seen: LayerPass) -> dict[str, Tensor | None]:
    """After each step; a post-LN layer's second skip connection has no capture point, a pre-LN layer's is its end."""
    vectors = {step: seen.features.get(point) if point else None for step, point in STEP_POINTS.items()}
    stack = seen.block.stack
    if stack.output_norm is None:
        vectors |= {"ffn_skip": seen.features["layer_output"], "ffn_norm": None}
    else:
        last_norm = "cross_attention_norm" if stack.cross_attention_norm else "attention_norm"
        vectors["ffn_skip"] = seen.features[last_norm] + seen.features["ffn_output"]
    return vectors
