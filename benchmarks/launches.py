"""Count the GPU operators, copies and waits of `measure` and `capture` on a simulated device in host memory.

    python -m benchmarks.launches

The batch has 16 texts of 256 tokens; the model is a BERT with 12 layers and 12 heads. Each operator launches at least
one kernel. The counts do not depend on the width of the vectors, so the model is narrow and has random weights.
The table is in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertModel

from attnmix.core.settings import CaptureParameters
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.documents import CLASSES, Document
from attnmix.measures.matrices import MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.models.attention import OBSERVED
from attnmix.models.capture_points import widths
from attnmix.models.encoding import padded
from attnmix.runs.capture import Batch, TextRows, fill_rows

TEXTS, TOKENS, HEADS, LAYERS, HEAD_WIDTH = 16, 256, 12, 12, 2
COUNTS = ("operators", ".item()", "copies to the host", "copies from it", "operators that wait")
"""The names of the counts of a task."""


def main() -> None:
    """Print the counts of each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=TEXTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    arguments = parser.parse_args()
    print(" | ".join(["work", *COUNTS]))
    for name, counts in counted_works(arguments.texts, arguments.tokens):
        print(" | ".join([name, *(f"{number:,}" for number in counts.values())]), flush=True)


def counted_works(texts: int = TEXTS, tokens: int = TOKENS) -> Iterator[tuple[str, dict[str, int]]]:
    """Run each task twice, and yield the task's name and the counts of the second run; the keys are `COUNTS`.

    The first run fills caches.
    """
    from tests import second_device

    for name, work in works(second_device.DEVICE, texts, tokens):
        work()
        with second_device.counted() as counts:
            work()
        numbers = (
            counts.operators.total(),
            counts.items,
            counts.from_device,
            counts.to_device,
            counts.waits.total(),
        )
        yield name, dict(zip(COUNTS, numbers, strict=True))


def works(device: Any, texts: int, tokens: int, layers: int = LAYERS) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name and the function of each task on `texts` texts of up to `tokens` tokens.

    The tasks are parts of the stages `capture` and `measure`; the model is a BERT with `layers` layers on `device`.
    """
    base, matrices = _create_models(device, layers)
    documents = list(_documents(texts, tokens))
    measurer = BatchMeasurer(base, list(RATIOS), 0)
    measurer.read_corpus([documents])
    inputs = measurer.batch(documents)
    sites = widths(base, CaptureParameters().points)
    buffer_type = {"dtype": torch.float16, "device": device}
    buffers = {site: torch.empty(texts * tokens, width, **buffer_type) for site, width in sites.items()}
    captured = _create_batch(documents)

    def forward() -> None:
        with torch.inference_mode():
            base(**inputs)

    yield "forward pass", forward
    yield f"`capture`, {len(buffers)} points", lambda: fill_rows(base, [captured], buffers)
    yield "seven ratios", lambda: measurer.ratios(documents)
    is_sampled = [text == 0 for text in range(texts)]
    yield "all that `measure` reads", lambda: measurer.measures(documents, is_sampled)
    outside = [False] * texts
    yield "`measure` outside a sample", lambda: measurer.measures(documents, outside, statistics=())
    yield "matrices of one text", lambda: matrices.contributions(documents[0].ids)


def _create_models(device: Any, layers: int) -> tuple[Any, DocumentMeasurer]:
    """Return a BERT with random weights, and the measurer of its contribution matrices, both on `device`."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "hidden_size": HEADS * HEAD_WIDTH,
    }
    config = BertConfig(**shape, intermediate_size=4 * HEADS * HEAD_WIDTH)
    base: Any = BertModel._from_config(config, attn_implementation=OBSERVED).eval()
    matrices = DocumentMeasurer(base, list(RATIOS), list(MATRICES))
    matrices.base.to(device)
    base.to(device)
    return base, matrices


def _create_batch(documents: list[Document]) -> Batch:
    """Return all texts as one batch of `capture`; the vectors of the texts are written to consecutive rows."""
    text_rows = []
    start = 0
    for text, document in enumerate(documents):
        end = start + len(document)
        text_rows.append(TextRows(text, slice(0, len(document)), slice(start, end)))
        start = end
    return Batch(padded([document.ids.tolist() for document in documents], 0), text_rows)


def _documents(texts: int, tokens: int) -> Iterator[Document]:
    """Yield texts of random tokens and token classes, with up to `tokens` tokens."""
    generator = np.random.default_rng(0)
    for number in range(texts):
        length = tokens - number % 4  # different lengths require padding
        ids = generator.integers(1000, 30_000, length).astype(np.int32)
        classes = generator.integers(0, len(CLASSES), length).astype(np.int8)
        yield Document(f"test/{number}", ids, classes, np.arange(length, dtype=np.int32))


if __name__ == "__main__":
    main()
