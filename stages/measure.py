"""Measure how much attention mixes the tokens of the drawn test reviews and of the captured texts.

    python -m stages measure
    torchrun --nproc-per-node 4 -m stages measure

Streams batches of documents through each checkpoint in float32, and the captured documents
one by one in float64. Writes `features/measure/`, the tables of the measures under `reports/plots/` and
`reports/metrics/measure.json`; `docs/measures.md` says what each number is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import numpy.typing as npt
import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnmix.arithmetic.kernels import computed_on, use
from attnmix.core.errors import InputError
from attnmix.core.names import CAPTURED_CHECKPOINT, CHECKPOINT_NAMES
from attnmix.core.options import MeasureParameters, Parameters
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.controls import RANDOM, random_base, shuffled_words
from attnmix.measures.documents import CLASSES
from attnmix.measures.matrices import with_rollouts
from attnmix.measures.ratios import RATIOS
from attnmix.measures.sums import GROUPS
from attnmix.measures.tables import by_review, derivative_tables, metrics, mixing_tables
from attnmix.measures.whole_document import DocumentMeasurer
from attnmix.models.capture_points import widths
from attnmix.models.families import family_of
from attnmix.models.loading import check_max_length, load_base, load_tokenizer
from attnmix.store.heads import VECTOR_BYTES
from attnmix.store.runs import Run
from attnmix.store.writers import (
    TokenRatios,
    write_layer_parts,
    write_metrics,
    write_plot,
    write_ratios,
)
from stages.common.resources import check_disk
from stages.common.resume import clear, publish, unfinished_folder
from stages.measuring.corpus import Corpus
from stages.measuring.progress import CheckpointMeasures

FLOAT32_BYTES = 4


def main(parameters: Parameters) -> None:
    """Measure both checkpoints; one, where nothing was trained and no base is named: both would be the same weights."""
    use(parameters.arithmetic)
    run = Run(Path())
    trained = parameters.finetune.epochs > 0 or parameters.model.base
    checkpoints = CHECKPOINT_NAMES if trained else (CAPTURED_CHECKPOINT,)
    measure(parameters, checkpoints, run)


def measure(parameters: Parameters, checkpoints: Sequence[str], run: Run) -> None:
    """Write what is measured of the texts that `tokenize` left, a block of them in memory at a time."""
    mixing, seed = parameters.measure, parameters.seed
    weights = {checkpoint: run.checkpoints[checkpoint] for checkpoint in checkpoints}
    tokenizer = load_tokenizer(weights[checkpoints[0]])
    state = PartialState(cpu=not torch.cuda.is_available())  # without it, processes on CPUs do not see each other
    folder = unfinished_folder("measure", parameters, run.root)
    corpus = Corpus(run)
    for path in weights.values():
        check_max_length("capture.max_length", int(corpus.lengths.max()), path)
    chosen = corpus.drawn(mixing.gradient_documents, seed)
    share = (corpus, parameters.capture.batch_tokens, state.process_index, state.num_processes)
    measured: dict[str, CheckpointMeasures] = {}
    gains: dict[str, npt.NDArray[np.float64]] = {}
    for checkpoint, path in weights.items():
        base = load_base(path).to(state.device)
        mixing = _present(mixing, base)
        _check_room(base, mixing, len(weights), corpus, folder)
        work = measured[checkpoint] = CheckpointMeasures(folder, checkpoint, *share)
        batches = BatchMeasurer(base, path, mixing.methods, tokenizer.pad_token_id)
        work.measure(batches)
        work.control("shuffled_words", batches, partial(shuffled_words, seed=seed))
        whole = DocumentMeasurer(base, path, mixing.methods, mixing.matrices)
        work.contributions(whole)
        work.heads(whole)
        work.gradients(whole, chosen, mixing.gradient_max_length, seed)
        gains[checkpoint] = whole.gains()
    path = weights[checkpoints[0]]
    base = random_base(path, seed).to(state.device)
    random = CheckpointMeasures(folder, RANDOM, *share)
    random_batches = BatchMeasurer(base, path, mixing.methods, tokenizer.pad_token_id)
    random.control("random_weights", random_batches, lambda document: document)
    state.wait_for_everyone()
    if state.is_main_process:
        with TemporaryFile(dir=folder) as file:
            sums = {name: each.sums(gains[name]) for name, each in measured.items()}
            tables = mixing_tables(sums, random.blocks, mixing.methods, batches.sites, corpus.draws(seed, file))
        derivatives = {name: each.derivatives(chosen) for name, each in measured.items()}
        tables |= derivative_tables(derivatives, mixing.methods, mixing.matrices, seed)
        for name, table in tables.items():
            write_plot(f"measure/{name}", table, run.tables)
        write_plot("measure/mixing_by_review", by_review(sums, mixing.methods), run.tables)
        machine = {"computed_on": computed_on(parameters.arithmetic)}
        write_metrics("measure", metrics(tables, mixing.methods) | machine, run.metrics_folder)
        write_layer_parts(folder / "mixing", [stack.parts() for stack in batches.family.stacks])
        write_ratios(folder / "mixing", mixing.methods, _ratios(measured, tokenizer))
        publish(folder / "mixing", run.measured)
        clear(folder)
        logging.info("measured %d documents in %s", len(corpus), " and ".join(weights))


def _check_room(
    base: PreTrainedModel, mixing: MeasureParameters, checkpoints: int, corpus: Corpus, folder: Path
) -> None:
    """Raise `InputError` where the disk lacks room for the largest arrays that `measure` keeps."""
    sites, heads, hidden = widths(base), base.config.num_attention_heads, base.config.hidden_size
    layers, methods = max(site.layer for site in sites), len(mixing.methods)
    head_width = getattr(base.config, "head_dim", None) or hidden // heads
    captured = corpus.lengths[corpus.captured].astype(np.int64)
    vectors = layers * heads * hidden * captured
    vectors[vectors * FLOAT32_BYTES > VECTOR_BYTES] = 0  # not kept of longer texts
    matrices = layers * len(with_rollouts(mixing.matrices)) * captured**2
    queries_and_keys = layers * 2 * heads * head_width * captured
    counted = int((corpus.counted > 0).sum())
    groups = 2 * layers * methods * sum(map(len, GROUPS.values()))  # in float64
    numbers = int((vectors + matrices + queries_and_keys).sum() + layers * methods * corpus.lengths.sum(dtype=np.int64))
    numbers += counted * (groups + len(sites) * max(sites.values()))
    check_disk(
        f"measure: {len(captured)} captured texts and {counted} drawn reviews need",
        checkpoints * FLOAT32_BYTES * numbers,
        folder,
        "capture.max_length, capture.documents, capture.drawn, capture.texts, measure.matrices or measure.documents",
    )


def _present(mixing: MeasureParameters, base: PreTrainedModel) -> MeasureParameters:
    """Return the parameters without what the model's family does not have, and log why it is absent."""
    family = family_of(base.config)
    for name in (*mixing.methods, *mixing.matrices):
        if name in family.absent():
            logging.info("%s: absent in the model family %s: %s", name, family.model_type, family.absent()[name])
    methods, matrices = family.present(mixing.methods), family.present(mixing.matrices)
    if not methods:
        raise InputError(
            f"measure.methods: the model family {family.model_type} has none of {', '.join(mixing.methods)}; "
            f"allowed: {', '.join(family.present(RATIOS))}"
        )
    return mixing.model_copy(update={"methods": methods, "matrices": matrices})


def _ratios(measured: Mapping[str, CheckpointMeasures], tokenizer: PreTrainedTokenizerFast) -> Iterator[TokenRatios]:
    for checkpoint, work in measured.items():
        for document, ratios_MLT in work.ratios():
            tokens = list(tokenizer.convert_ids_to_tokens(document.ids.tolist()))
            classes = [CLASSES[number] for number in document.classes]
            counted = np.arange(len(document)) < document.counted
            words = [None if number < 0 else number for number in document.words.tolist()]
            yield TokenRatios(checkpoint, document.name, tokens, words, classes, counted, ratios_MLT)
