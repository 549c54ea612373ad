"""Time and memory of the six ratios of one long text and of the bare forward pass: a case of `benchmarks.stages`.

    python -m benchmarks.stages --cases long

The default model's shape with random weights and positions enough. Each way and length is a process of its own, so that
its peak memory is its own: what more tokens add to it says how it grows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.mixing import SIX
from benchmarks.timing import Case

LENGTHS = (512, 2048, 8192)


def _base() -> Any:
    import torch
    from transformers import BertConfig, BertModel

    from attnmix.models.attention import OBSERVED

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=max(LENGTHS),
    )
    return BertModel._from_config(config, attn_implementation=OBSERVED).eval()


def _ids(length: int) -> Any:
    return np.random.default_rng(0).integers(1000, 30_000, length).astype(np.int32)


def forward(length: int, attention: str) -> None:
    """Nothing but the forward pass."""
    import torch

    base = _base()
    base.set_attn_implementation(attention)
    with torch.inference_mode():
        base(torch.as_tensor(_ids(length)[None], dtype=torch.long))


def ratios(length: int, identities: bool) -> None:
    """The six ratios, or with the identities all that `measure` reads from a document that is in no statistics."""
    from attnmix.measures.batches import BatchMeasurer
    from attnmix.measures.documents import Document

    measurer = BatchMeasurer(_base(), SIX, 0)
    words = np.arange(length, dtype=np.int32)
    document = Document("text/0", _ids(length), np.zeros(length, dtype=np.int8), words, measured=False)
    if identities:
        (measured,) = measurer.measures([document])
        found = measured.ratios
    else:
        found = measurer.ratios([document]).numpy()
    if not ((found >= 0) & (found <= 1)).all():
        raise AssertionError("a ratio is not between 0 and 1")


def check() -> str:
    """Run the work that is timed."""
    return "One text, six ratios; imports and making the model included in time and memory."


CASE = Case(
    "Six ratios of one long text",
    "default",
    check,
    {
        f"{name}, {length:,} tokens": way
        for length in LENGTHS
        for name, way in (
            ("forward, sdpa", partial(forward, length, "sdpa")),
            ("six ratios", partial(ratios, length, identities=False)),
            ("six ratios, identities", partial(ratios, length, identities=True)),
        )
    },
    references=tuple(f"forward, sdpa, {length:,} tokens" for length in LENGTHS),
)
