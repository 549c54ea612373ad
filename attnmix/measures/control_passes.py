"""What the controls take of a model: attention without b_V, and the architecture with random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModel, PreTrainedModel

from attnmix.models.attention import OBSERVED, AttentionCall, attend
from attnmix.models.loading import load_config

Tensor = torch.Tensor


def random_base(folder: Path, seed: int) -> PreTrainedModel:
    """A model of the architecture in `folder`, as the library initialises it after `torch.manual_seed(seed)`.

    As `load_base` gives it: without any head, in float32 and eval mode, its attention to be looked into.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModel.from_config(
            load_config(folder), attn_implementation=OBSERVED, dtype=torch.float32
        )
    model.config.use_cache = False
    model.eval()
    return model


def attended_without_bias(call: AttentionCall, value_bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """sum_j a^h_ij (v_j - b_V) `[B, T, E]`, exactly 0 where all values are b_V; and sum_j a^h_ij `[B, T, H]`."""
    value_BHTd = call.value - value_bias_E.unflatten(-1, (call.value.shape[-3], 1, -1))
    context_BHTd, without_sink = attend(
        None,
        call.query,
        call.key,
        value_BHTd,
        call.mask,
        scaling=call.scaling,
        is_causal=call.causal,
        softcap=call.softcap,
    )
    row_sums_BHT = (without_sink.log_sums - call.log_sums).exp()
    context_BHTd = context_BHTd * row_sums_BHT.unsqueeze(-1)
    return context_BHTd.transpose(-3, -2).flatten(-2), row_sums_BHT.transpose(-1, -2)
