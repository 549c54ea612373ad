"""Time and memory of the mixing ratios, against the bare forward passes of the same batches.

    python -m benchmarks.mixing models/pretrained models/finetuned
    python -m benchmarks.mixing models/pretrained --documents 1000 --memory

Prints the time of all five ratios (with and without the identity checks that `measure` adds)
as a multiple of the same model's forward passes, once with the same eager attention, which
gives the attention weights, and once with `sdpa`, which does not. With `--memory` it streams the
documents through everything that the stage measures and prints the peak resident memory.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.mixing.documents import Document
from stages.mixing.layers import VALUE, layer_input, ratio_taps
from stages.mixing.ratios import identity_errors, mixing_ratios
from stages.mixing.streaming import Measurer
from stages.models.capture_points import Site, recording
from stages.models.encoding import batches_by_tokens, padded
from stages.models.hardware import device
from stages.models.loading import load_base

METHODS = ("attn_w", "attnres_w", "attn_n", "attnres_n", "attnresln_n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="checkpoint folders")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="peak memory of a whole pass instead of times")
    arguments = parser.parse_args()
    for folder in arguments.models:
        base = load_base(folder).to(device())
        documents = _documents(arguments.documents, arguments.tokens, base.config.vocab_size)
        measurer = Measurer(base, folder, METHODS, base.config.pad_token_id)
        numbers = batches_by_tokens([len(document) for document in documents], arguments.batch_tokens)
        batches = [[documents[i] for i in batch] for batch in numbers]
        if arguments.memory:
            _print_memory(measurer, batches, len(documents))
        else:
            _print_times(base, measurer, batches, arguments.repeats)


def _documents(number: int, tokens: int, vocabulary: int) -> list[Document]:
    """Random tokens: the time depends on their number only."""
    generator = np.random.default_rng(0)
    return [
        Document(
            f"test/{i}",
            generator.integers(1000 % vocabulary, vocabulary, tokens).astype(np.int32),
            np.zeros(tokens, dtype=np.int8),
            tokens,
            captured=False,
        )
        for i in range(number)
    ]


def _print_times(base: Any, measurer: Measurer, batches: list[list[Document]], repeats: int) -> None:
    def forward(batch: list[Document]) -> None:
        with torch.inference_mode():
            base(**padded([document.ids.tolist() for document in batch], measurer.pad_token_id, base.device))

    def eager(batch: list[Document]) -> None:
        base.set_attn_implementation("eager")
        forward(batch)

    def sdpa(batch: list[Document]) -> None:
        base.set_attn_implementation("sdpa")
        forward(batch)
        base.set_attn_implementation("eager")

    def ratios(batch: list[Document]) -> None:
        base.set_attn_implementation("eager")
        measurer.ratios(batch)

    def attentions(batch: list[Document]) -> None:
        with torch.inference_mode():
            inputs = padded([document.ids.tolist() for document in batch], measurer.pad_token_id, base.device)
            base(**inputs, output_attentions=True)

    runs: dict[str, Callable[[list[Document]], None]] = {
        "forward, eager": eager,
        "forward, sdpa": sdpa,
        "forward, attention kept": attentions,
        "five ratios": ratios,
        "five ratios and identities": lambda batch: _ratios_and_identities(base, measurer, batch),
    }
    for run in runs.values():
        run(batches[0])
    # In turn, batch by batch, so that a busy machine slows all of them alike.
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        spent = dict.fromkeys(runs, 0.0)
        for batch in batches:
            for name, run in runs.items():
                start = time.perf_counter()
                run(batch)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                spent[name] += time.perf_counter() - start
        for name, seconds in spent.items():
            times[name].append(seconds)
    best = {name: min(seconds) for name, seconds in times.items()}
    print(f"{measurer.folder}: {sum(map(len, batches))} documents, best of {repeats}")
    for name, seconds in best.items():
        print(
            f"  {name:28s} {seconds:7.2f} s (median {statistics.median(times[name]):.2f})   "
            f"{seconds / best['forward, eager']:.2f} x eager   {seconds / best['forward, sdpa']:.2f} x sdpa"
        )


def _ratios_and_identities(base: Any, measurer: Measurer, batch: list[Document]) -> None:
    inputs = padded([document.ids.tolist() for document in batch], measurer.pad_token_id, base.device)
    with torch.inference_mode(), recording(base, ratio_taps(base)) as features:
        attentions = base(**inputs, output_attentions=True).attentions
        mask = inputs["attention_mask"].bool()
        for layer, (weights, attention) in enumerate(zip(measurer.weights, attentions, strict=True), start=1):
            parts = (
                attention,
                features[layer_input(layer)],
                features[Site(layer, VALUE)],
                features[Site(layer, "attention_output")],
            )
            mixing_ratios(METHODS, weights, *parts)
            identity_errors(weights, *parts, features[Site(layer, "attention_norm")], mask)


def _print_memory(measurer: Measurer, batches: list[list[Document]], documents: int) -> None:
    for batch in batches:
        for _ in measurer.measures(batch):
            pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{measurer.folder}: {documents} documents, peak resident memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
