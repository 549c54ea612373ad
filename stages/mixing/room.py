"""Whether matrices and heads of the captured texts fit the machine: matrices grow with the square of a length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from stages.machine import check_disk, check_memory, widest
from stages.mixing.contributions import BLOCK_NUMBERS
from stages.mixing.controls import SAME_PASS
from stages.mixing.corpus import Corpus
from stages.mixing.geometry import GEOMETRY_MEASURES
from stages.mixing.matrices import with_rollouts
from stages.mixing.steps import STEP_MEASURES
from stages.mixing.sums import GROUPS
from stages.models.capture_points import widths
from stages.outputs.heads import VECTOR_BYTES
from stages.parameters import MixingParameters
from stages.sites import STEP_POINTS

FLOAT64, FLOAT32, FLOAT16 = 8, 4, 2  # bytes
VECTORS = 6  # of a block of sources that are there at once


def check_room(base: PreTrainedModel, mixing: MixingParameters, lengths: Sequence[int], folder: Path) -> None:
    """`InputError` where the memory has no room for the work on the longest captured text, or the disk for all.

    `lengths` are those of the captured texts, in tokens.
    """
    layers, heads, hidden = (
        max(site.layer for site in widths(base)),
        base.config.num_attention_heads,
        base.config.hidden_size,
    )
    raw, longest = len(mixing.matrices), max(lengths)
    names = len(with_rollouts(mixing.matrices))
    smaller = "capture.max_length, capture.documents, capture.drawn, capture.texts or mixing.matrices"

    what = f"measure: the contribution matrices of a captured text of {longest} tokens need"
    square = FLOAT64 * longest**2
    block = FLOAT64 * min(max(BLOCK_NUMBERS, longest * hidden), longest**2 * hidden) * bool(raw)
    of_block = VECTORS + 2 * widest(base) / hidden * ("value_zeroing" in mixing.matrices)
    # What a block leaves is seldom given back while matrices are added to it.
    matrices = of_block * block + FLOAT64 * longest * heads * hidden + square * layers * (raw + names + 2 * heads)
    model = FLOAT64 * sum(weight.numel() for weight in base.parameters())
    check_memory(what, model + matrices, smaller, base.device)

    what = f"measure: contribution matrices and heads of {len(lengths)} captured texts need"
    of_square = layers * (FLOAT32 * names + FLOAT16 * heads * ("attention" in mixing.matrices))
    width = getattr(base.config, "head_dim", None) or hidden // heads
    of_heads = sum(_of_heads(layers * length, heads, width, hidden) for length in lengths)
    needed = len(mixing.checkpoints) * (of_square * sum(length**2 for length in lengths) + of_heads)
    check_disk(what, needed, folder / "mixing", smaller)


def _of_heads(tokens: int, heads: int, width: int, hidden: int) -> int:
    """Bytes of what is kept of every head, `tokens` those of all layers; no head shares its key with another."""
    given = FLOAT32 * tokens * heads * hidden
    vectors = given + FLOAT32 * tokens * 2 * (heads * width + hidden) if given <= VECTOR_BYTES else 0
    return FLOAT32 * tokens * (heads * (2 * width + 3) + 2) + vectors


def check_sums_room(base: PreTrainedModel, mixing: MixingParameters, corpus: Corpus, folder: Path) -> None:
    """`InputError` where the disk has no room for what is kept of every document until all are measured."""
    sites = widths(base)
    layers, methods = max(site.layer for site in sites), len(mixing.methods)
    groups = sum(len(labels) for _, labels in GROUPS.values())
    of_layer = methods * (groups + len(SAME_PASS) + 1) + base.config.num_attention_heads
    of_layer += len(STEP_POINTS) * len(STEP_MEASURES)
    of_document = FLOAT64 * (layers * of_layer + len(sites) * len(GEOMETRY_MEASURES))
    of_document += FLOAT32 * len(sites) * max(sites.values())  # summed vectors, most of it
    kept = {"all": corpus.lengths, "captured": corpus.lengths[corpus.captured], "none": corpus.lengths[:0]}
    of_tokens = FLOAT32 * methods * layers * int(kept[mixing.tokens].sum())
    counted = int((corpus.counted > 0).sum())
    needed = len(mixing.checkpoints) * (counted * of_document + of_tokens)
    what = f"measure: the sums of {counted} documents need"
    check_disk(what, needed, folder, "mixing.documents or mixing.tokens")
