"""Whether the contribution matrices of the captured texts fit the machine: they grow with the square of a length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from stages.machine import check_disk, check_memory, widest
from stages.mixing.contributions import BLOCK_NUMBERS
from stages.mixing.documents import Document
from stages.mixing.matrices import with_rollouts
from stages.models.capture_points import widths
from stages.parameters import MixingParameters

FLOAT64, FLOAT32, FLOAT16 = 8, 4, 2  # bytes
VECTORS = 6  # of a block of sources that are there at once


def check_room(base: PreTrainedModel, mixing: MixingParameters, documents: Sequence[Document], folder: Path) -> None:
    """`InputError` where the memory has no room for the work on the longest captured text, or the disk for all."""
    lengths = [len(document) for document in documents if document.captured]
    layers, heads, hidden = (
        max(site.layer for site in widths(base)),
        base.config.num_attention_heads,
        base.config.hidden_size,
    )
    raw, longest = len(mixing.matrices), max(lengths)
    names = len(with_rollouts(mixing.matrices))
    smaller = "capture.max_length, capture.documents, capture.texts or mixing.matrices"

    what = f"measure: the contribution matrices of a captured text of {longest} tokens need"
    square = FLOAT64 * longest**2
    block = FLOAT64 * min(max(BLOCK_NUMBERS, longest * hidden), longest**2 * hidden) * bool(raw)
    of_block = VECTORS + 2 * widest(base) / hidden * ("value_zeroing" in mixing.matrices)
    # What a block leaves is seldom given back while matrices are added to it.
    matrices = of_block * block + FLOAT64 * longest * heads * hidden + square * layers * (raw + names + 2 * heads)
    model = FLOAT64 * sum(weight.numel() for weight in base.parameters())
    check_memory(what, model + matrices, smaller, base.device)

    what = f"measure: the contribution matrices of {len(lengths)} captured texts need"
    of_square = layers * (FLOAT32 * names + FLOAT16 * heads * ("attention" in mixing.matrices))
    needed = len(mixing.checkpoints) * of_square * sum(length**2 for length in lengths)
    check_disk(what, needed, folder / "mixing", smaller)
