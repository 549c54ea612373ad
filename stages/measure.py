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
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnmix.arithmetic.kernels import computed_on, use
from attnmix.core.errors import InputError
from attnmix.core.options import MeasureParameters, Parameters
from attnmix.core.points import Site
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.by_review import by_review, review_tables
from attnmix.measures.control_passes import random_base
from attnmix.measures.control_tables import control_tables
from attnmix.measures.controls import RANDOM, shuffled_words
from attnmix.measures.documents import CLASSES
from attnmix.measures.levels import derivative_tables
from attnmix.measures.matrices import with_rollouts
from attnmix.measures.ratios import RATIOS
from attnmix.measures.summary import metrics, overall_means, plot_tables
from attnmix.measures.sums import GROUPS
from attnmix.measures.whole_document import DocumentMeasurer
from attnmix.models.capture_points import widths
from attnmix.models.families import Family, family_of
from attnmix.models.loading import check_max_length, load_base, load_tokenizer
from attnmix.store.checkpoints import CHECKPOINT_FOLDERS
from attnmix.store.heads import VECTOR_BYTES
from attnmix.store.mixing import MIXING, TokenRatios, write_ratios
from attnmix.store.reports import write_long_plot, write_metrics, write_plot
from stages.common.resources import check_disk
from stages.common.resume import clear, publish, unfinished_folder
from stages.measuring.corpus import Corpus
from stages.measuring.progress import CheckpointMeasures

FLOAT32_BYTES = 4


def main(parameters: Parameters) -> None:
    """Write what is measured of the texts that `tokenize` left, a block of them in memory at a time."""
    use(parameters.arithmetic)
    mixing, seed = parameters.measure, parameters.seed
    weights = {checkpoint: CHECKPOINT_FOLDERS[checkpoint] for checkpoint in mixing.checkpoints}
    tokenizer = load_tokenizer(weights[mixing.checkpoints[0]])
    state = PartialState(cpu=not torch.cuda.is_available())  # without it, processes on CPUs do not see each other
    folder = unfinished_folder("measure", parameters)
    corpus = Corpus()
    for path in weights.values():
        check_max_length("capture.max_length", int(corpus.lengths.max()), path)
    chosen = corpus.drawn(mixing.gradient_documents, seed)
    measured: dict[str, CheckpointMeasures] = {}
    gains: dict[str, npt.NDArray[np.float64]] = {}
    for checkpoint, path in weights.items():
        base = load_base(path).to(state.device)
        mixing = _present(mixing, base)
        _check_room(base, mixing, corpus, folder)
        of_process = (state.process_index, state.num_processes)
        work = CheckpointMeasures(folder, checkpoint, corpus, mixing.batch_tokens, mixing.tokens, *of_process)
        batches = BatchMeasurer(base, path, mixing.methods, tokenizer.pad_token_id)
        work.measure(batches)
        work.control("shuffled_words", batches, partial(shuffled_words, seed=seed))
        whole = DocumentMeasurer(base, path, mixing.methods, mixing.matrices)
        work.contributions(whole)
        work.heads(whole)
        work.gradients(whole, chosen, mixing, seed)
        measured[checkpoint], gains[checkpoint], sites = work, whole.gains(), batches.sites
    work = replace(work, checkpoint=RANDOM)
    batches = _random_weights(weights[mixing.checkpoints[0]], batches, state.device, seed)
    work.control("random_weights", batches, lambda document: document)
    state.wait_for_everyone()
    if state.is_main_process:
        _write_tables(measured, work, gains, sites, chosen, parameters.model_copy(update={"measure": mixing}))
        write_plot("measure/layer_parts", _layer_parts(batches.family))
        write_ratios(folder / "mixing", mixing.methods, _ratios(measured, tokenizer))
        publish(folder / "mixing", MIXING)
        clear(folder)
        logging.info("measured %d documents in %s", len(corpus), " and ".join(weights))


def _write_tables(
    measured: Mapping[str, CheckpointMeasures],
    random: CheckpointMeasures,
    gains: Mapping[str, npt.NDArray[np.float64]],
    sites: Sequence[Site],
    chosen: Sequence[int],
    parameters: Parameters,
) -> None:
    """Everything under `reports/`, from what all processes have left."""
    mixing, seed, corpus = parameters.measure, parameters.seed, random.corpus
    methods = mixing.methods
    sums = {name: each.sums(gains[name]) for name, each in measured.items()}
    with TemporaryFile(dir=random.folder) as file:
        draws = corpus.draws(mixing.bootstrap_samples, seed, file)
        means = overall_means(sums, draws)
        tables = plot_tables(sums, means, sites, methods, draws) | review_tables(sums, methods, draws)
        controls = {
            name: each.own_pass_control("shuffled_words", draws) | each.same_pass_controls(draws)
            for name, each in measured.items()
        }
        controls[RANDOM] = random.own_pass_control("random_weights", draws)
    tables |= control_tables(controls, means, methods, corpus.counted[corpus.counted > 0])
    tables |= derivative_tables({name: each.derivatives(chosen) for name, each in measured.items()}, mixing, seed)
    for name, table in tables.items():
        write_plot(f"measure/{name}", table)
    write_long_plot("measure/mixing_by_review", by_review(sums, corpus.reviews, methods))
    numbers = metrics(sums, means, methods)
    write_metrics("measure", numbers | {"computed_on": computed_on(parameters.arithmetic)})


def _check_room(base: PreTrainedModel, mixing: MeasureParameters, corpus: Corpus, folder: Path) -> None:
    """Raise `InputError` where the disk lacks room for the largest arrays that `measure` keeps."""
    sites, heads, hidden = widths(base), base.config.num_attention_heads, base.config.hidden_size
    layers = max(site.layer for site in sites)
    head_width = getattr(base.config, "head_dim", None) or hidden // heads
    captured = corpus.lengths[corpus.captured].astype(np.int64)
    matrices = layers * len(with_rollouts(mixing.matrices)) * captured**2
    queries_and_keys = layers * 2 * heads * head_width * captured
    given = layers * heads * hidden * captured
    given[given * FLOAT32_BYTES > VECTOR_BYTES] = 0  # not kept of longer texts
    counted = int((corpus.counted > 0).sum())
    groups = 2 * layers * len(mixing.methods) * sum(len(labels) for _, labels in GROUPS.values())  # in float64
    sums = counted * (groups + len(sites) * max(sites.values()))
    ratios = layers * len(mixing.methods) * (corpus.lengths if mixing.tokens == "all" else captured)
    numbers = sum(int(each.sum()) for each in (matrices, queries_and_keys, given, ratios)) + sums
    check_disk(
        f"measure: {len(captured)} captured texts and {counted} drawn reviews need",
        len(mixing.checkpoints) * FLOAT32_BYTES * numbers,
        folder,
        "capture.max_length, capture.documents, capture.drawn, capture.texts, measure.matrices or measure.documents",
    )


def _layer_parts(family: Family) -> pd.DataFrame:
    """Which norms the layers of each stack have, and `parallel` where their sublayers stand beside each other."""
    parts = [(number, part) for number, stack in enumerate(family.stacks) for part in stack.parts()]
    return pd.DataFrame(parts, columns=["stack", "part"])


def _random_weights(path: Path, trained: BatchMeasurer, device: torch.device, seed: int) -> BatchMeasurer:
    """The same of the architecture at `path` with random weights."""
    base: PreTrainedModel = random_base(path, seed)
    base.to(device)  # type: ignore[arg-type]  # its annotation knows no device
    return BatchMeasurer(base, path, trained.methods, trained.pad_token_id)


def _present(mixing: MeasureParameters, base: PreTrainedModel) -> MeasureParameters:
    """Without the methods and matrices that the model's family does not have, and why is said."""
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
