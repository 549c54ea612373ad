"""The number of floating-point operations of `measure` per token and layer is bounded.

The bound is higher for texts in the sample of `measure`, for which all statistics are computed, than for other texts,
for which only ratios are computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import pytest
import torch
from conftest import plain_document, randomise
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel

from attnmix.core.arithmetic import kernels
from attnmix.measures.batches import STATISTICS, BatchMeasurer
from attnmix.measures.documents import Document
from attnmix.measures.ratios import RATIOS
from attnmix.models.attention import OBSERVED

LAYERS, HEADS, WIDTH = 2, 12, 192
TEXTS, TOKENS = 4, 42  # the same ratio of tokens to width as in BERT-base with texts of 168 tokens
FORWARD_PASS = 24
"""Floating-point operations of BERT's weights per token and layer, in units of WIDTH^2.

Per unit, attention has 4 weights and the feed-forward network has 8 weights. Each weight needs a multiplication and an
addition.
"""


@pytest.fixture(scope="module")
def measurer() -> Iterator[tuple[BatchMeasurer, list[Document]]]:
    """Yield a measurer of a small BERT with cached constants, and texts of equal length.

    Tasks run in the calling thread, because the counter does not include other threads.
    """
    config = BertConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        vocab_size=100,
    )
    base = BertModel._from_config(config, attn_implementation=OBSERVED).eval()
    randomise(base)
    generator = np.random.default_rng(0)
    documents = [plain_document(generator.integers(5, 99, TOKENS), f"text/{number}") for number in range(TEXTS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "task_threads", lambda _device: None)
        measurer = BatchMeasurer(base, list(RATIOS), 0)
        measurer.read_corpus([documents])
        measurer.measures(documents, [False] * TEXTS)
        yield measurer, documents


def count_operations(
    measurer: tuple[BatchMeasurer, list[Document]], statistics: Collection[str], has_all_identities: bool = False
) -> float:
    """Return the number of operations in matrix products per token and layer, in units of WIDTH^2."""
    batches, documents = measurer
    with FlopCounterMode(display=False) as counter:
        batches.measures(documents, [has_all_identities] * TEXTS, statistics)
    return counter.get_total_flops() / (TEXTS * TOKENS * LAYERS * WIDTH**2)


def test_forward_pass_has_known_operations(measurer: tuple[BatchMeasurer, list[Document]]) -> None:
    batches, documents = measurer
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        batches.base(**batches.batch(documents))
    operations = counter.get_total_flops() / (TEXTS * TOKENS * LAYERS * WIDTH**2)
    assert FORWARD_PASS <= operations <= FORWARD_PASS + 1.1  # the difference is attention and the pooler


def test_texts_outside_sample_need_ratios_only(measurer: tuple[BatchMeasurer, list[Document]]) -> None:
    assert FORWARD_PASS < count_operations(measurer, ()) <= 60


def test_texts_inside_sample_have_bounded_operations(measurer: tuple[BatchMeasurer, list[Document]]) -> None:
    without_identities = count_operations(measurer, STATISTICS)
    assert 100 < without_identities <= 165
    assert without_identities < count_operations(measurer, STATISTICS, has_all_identities=True) <= 205
