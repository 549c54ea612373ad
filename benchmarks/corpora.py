"""Time and peak memory of `measure` and `capture` as the number of documents grows: cases of `benchmarks.stages`.

    python -m benchmarks.stages --cases measure-corpora --repeats 1

`measure` with a tiny BERT of random weights, so that what grows with the documents is not hidden behind the model;
`capture` with one layer of the default model's shape, at all points, as what it holds are vectors. Each number of
documents is a process of its own.
"""

from __future__ import annotations

import json
import shutil
from functools import partial

from benchmarks.timing import Case
from stages.common.parameters import read_parameters

DOCUMENTS = (10, 100, 1000, 10_000)
LENGTH = 32  # tokens
BATCH_TOKENS = 1024  # so that 100 documents fill several batches
MODEL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
PARAMETERS = {
    "capture": {"max_length": LENGTH, "batch_tokens": BATCH_TOKENS},
}
LONG = 330  # tokens: 100 texts fill a shard of the default model
CAPTURED = {"capture": {"max_length": LONG}}
WIDE = {"hidden_size": 384, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 1536}


def measure(documents: int) -> None:
    from stages import measure, tokenize

    parameters = read_parameters()
    mixing = parameters.measure.model_copy(update={"documents": documents})
    parameters = parameters.model_copy(update={"measure": mixing})
    tokenize.main(parameters)
    measure.main(parameters)


def capture(documents: int) -> None:
    from stages import capture, tokenize

    parameters = read_parameters()
    chosen = parameters.capture.model_copy(update={"documents": list(range(documents))})
    parameters = parameters.model_copy(update={"capture": chosen})
    tokenize.main(parameters)
    capture.main(parameters)


def captured() -> str:
    from pathlib import Path

    from attnmix.store.runs import Run

    run = Run(Path())
    tokens = run.tokens
    shutil.rmtree(run.activations)
    return (
        f"Reviews, joined and cut to {LONG} tokens each; BERT of {_said(WIDE)}, with random weights; all points; "
        f"{len(tokens):,} tokens in the last."
    )


def sizes() -> str:
    return f"Texts cut to {LENGTH} tokens, {BATCH_TOKENS} in a batch; BERT of {_said(MODEL)}, with random weights."


def _said(shape: dict[str, int]) -> str:
    return json.dumps(shape).strip("{}").replace('"', "").replace("_", " ")


def case(stage: str) -> Case:
    run = {"measure": measure, "capture": capture}[stage]
    ways = {f"{documents:,} documents": partial(run, documents) for documents in DOCUMENTS}
    folder, check = {"measure": ("corpora", sizes), "capture": ("reviews", captured)}[stage]
    return Case(f"Stage {stage}, by number of documents", folder, check, ways, growing=True)
