"""Time of the mixing ratios compared with bare forward passes of the same batches: cases of `benchmarks.stages`.

    python -m benchmarks.stages --cases mixing mixing-bert

One process times all ways in turn, batch by batch, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnmix.measures.ratios import RATIOS
from attnmix.store.runs import Run
from benchmarks.timing import Case, synchronize
from stages.common.parameters import read_parameters

FINETUNED = Run(Path()).finetuned

SDPA, EAGER = "forward, sdpa", "forward, eager"
IN_TURN = "in turn"
SIX = ("attn_w", "attnres_w", "attn_n", "attnres_n", "attnresln_n", "enc_n")
ROUNDING = 1e-6  # of a ratio in float32, whose tokens are computed in other blocks
Batch = list[Any]  # of attnmix.measures.documents.Document


class _Ready(NamedTuple):
    """Model and batches; `counted` are the same documents, with their tokens in the statistics."""

    measurer: Any
    six: Any
    batches: list[Batch]
    counted: list[Batch]

    def forward(self, batch: Batch, attention: str) -> Any:
        """The last hidden states."""
        import torch

        from attnmix.models.encoding import padded

        base = self.measurer.base
        base.set_attn_implementation(attention)
        with torch.inference_mode():
            ids = [document.ids.tolist() for document in batch]
            return base(**padded(ids, self.measurer.pad_token_id, base.device))

    def measured(self, batch: Batch) -> list[Any]:
        """All identities are checked in one document of the batch, about as many as in the sample of a run."""
        self.look()
        sampled = [place == 0 for place in range(len(batch))]
        return list(self.measurer.measures(batch, sampled))

    def ratios(self, batch: Batch) -> Any:
        self.look()
        return self.measurer.ratios(batch)

    def six_ratios(self, batch: Batch) -> Any:
        self.look()
        return self.six.ratios(batch)

    def look(self) -> None:
        from attnmix.models.attention import OBSERVED

        self.measurer.base.set_attn_implementation(OBSERVED)


def _ready() -> _Ready:
    import pandas as pd

    from attnmix.measures.batches import BatchMeasurer
    from attnmix.measures.documents import documents_of
    from attnmix.models.checkpoint import load_tokenizer
    from attnmix.models.encoding import batches_by_tokens, tokenize_texts
    from attnmix.models.loading import load_base
    from benchmarks.timing import device

    parameters = read_parameters()
    tokenizer, base = load_tokenizer(FINETUNED), load_base(FINETUNED).to(device())
    texts = {f"text/{number}": text for number, text in enumerate(parameters.capture.texts)}
    tokenized = tokenize_texts(tokenizer, texts, texts.values(), parameters.capture.max_length)
    tokens = pd.concat([each.table for each in tokenized])
    table = pd.DataFrame([each.counts for each in tokenized]).assign(document=list(texts), label=0, predicted_label=0)
    kinds = [documents_of(table.assign(measured=measured), tokens) for measured in (False, True)]
    batches = batches_by_tokens([len(document) for document in kinds[0]], parameters.capture.batch_tokens)
    every, six = (BatchMeasurer(base, methods, tokenizer.pad_token_id) for methods in (list(RATIOS), SIX))
    return _Ready(every, six, *([[kind[i] for i in batch] for batch in batches] for kind in kinds))


def in_turn() -> dict[str, float]:
    """Seconds of each way over all batches."""
    ready = _ready()
    ways: dict[str, tuple[Callable[[Batch], Any], list[Batch]]] = {
        SDPA: (lambda batch: ready.forward(batch, "sdpa"), ready.batches),
        EAGER: (lambda batch: ready.forward(batch, "eager"), ready.batches),
        "mixing ratios": (ready.six_ratios, ready.batches),
        "seven ratios": (ready.ratios, ready.batches),
        "seven ratios, identities as in a run": (ready.measured, ready.batches),
        "all that `measure` reads from a batch": (ready.measured, ready.counted),
    }
    for way, batches in ways.values():
        way(batches[0])
    seconds = dict.fromkeys(ways, 0.0)
    for number in range(len(ready.batches)):
        for name, (way, batches) in ways.items():
            start = time.perf_counter()
            way(batches[number])
            synchronize()
            seconds[name] += time.perf_counter() - start
    return seconds


def same() -> str:
    """Return how far both ways to the ratios agree, how exact the parts are, and what eager attention changes."""
    ready = _ready()
    batch = ready.batches[0]
    sdpa, eager = (ready.forward(batch, name).last_hidden_state for name in ("sdpa", "eager"))
    ratios, measures = ready.ratios(batch).cpu().numpy(), ready.measurer.measures(batch)
    for place, (document, each) in enumerate(zip(batch, measures, strict=True)):
        only = ratios[:, :, place, : len(document)].swapaxes(0, 1)
        np.testing.assert_allclose(only, each.ratios, rtol=0, atol=ROUNDING)
    wrong = max(float(np.nanmax(each.identities)) for each in measures)
    lengths = [len(document) for every in ready.batches for document in every]
    real = [np.s_[place, : len(document)] for place, document in enumerate(batch)]
    apart = max(float((sdpa[where] - eager[where]).abs().max()) for where in real)
    return (
        f"{len(lengths)} texts, {sum(lengths)} tokens, {len(ready.batches)} batches, {len(RATIOS)} ratios. In the "
        f"first batch the parts sum to the model's own vectors with a relative error of at most {wrong:.1e}, and "
        f"hidden states of `sdpa` and eager attention are at most {apart:.1e} apart."
    )


def case(model: str, folder: str) -> Case:
    return Case(f"Mixing ratios, {model}", folder, same, {IN_TURN: in_turn}, references=(SDPA, EAGER))
