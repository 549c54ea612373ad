"""Measurement of attention mixing in the sampled test texts.

Batches of documents are measured in float32 with each checkpoint. The stage writes `features/measure/`,
`reports/plots/measure/` and `reports/metrics/measure.json`; `docs/measures.md` defines each number.

The results of each batch or document are written to intermediate files, from which an interrupted run resumes. Batches
and documents are divided among the processes, but neither the batches nor the results depend on the number of
processes.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnmix.core.arithmetic.kernels import computed_on
from attnmix.core.device import measuring_device, process_state
from attnmix.core.disk import publish_output, remove_unfinished
from attnmix.core.draw import stratified_draw
from attnmix.core.limits import compute_limiting_shares, describe_limits
from attnmix.core.names import ALL_DONORS, OTHER_CLASS, SAME_CLASS, Site
from attnmix.core.progress import track
from attnmix.core.settings import MeasureParameters
from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Draws, Sums
from attnmix.core.store import writers
from attnmix.core.store.files import atomic_path
from attnmix.core.store.runs import Run
from attnmix.core.torch_state import torch_state
from attnmix.measures.batches import (
    LENGTHS,
    RATIO_SUMS,
    STATISTICS,
    DocumentMeasures,
    DocumentSums,
    length_class,
    stack_sums,
)
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.controls import (
    RANDOM,
    SAME_PASS,
    classes_without_others,
    left_out_sentence,
    random_base,
    shuffled_words,
)
from attnmix.measures.documents import Corpus, Document
from attnmix.measures.engine import MEASURES, Engine, Task, batch_tasks, corpus_sample, sampled_tasks, text_tasks
from attnmix.measures.exchange import (
    choose_positions,
    draw_exchanged_texts,
    exchange_sums,
    measure_exchange,
)
from attnmix.measures.geometry_tables import geometry_table
from attnmix.measures.identities import largest_errors
from attnmix.measures.input_parts import parts_obstacle
from attnmix.measures.mixing_tables import CorpusMeasures, CorpusSums, by_review, metrics, mixing_tables, weighted_table
from attnmix.measures.ratios import RATIOS
from attnmix.measures.sample_tables import derivative_tables, exchange_table, parts_table
from attnmix.measures.swaps import next_donors
from attnmix.measures.token_ratios import labelled_ratio_rows
from attnmix.models.checkpoint import check_max_length, load_config, load_tokenizer
from attnmix.models.families import family_of, present_names
from attnmix.models.loading import load_base
from attnmix.models.segments import read_segments

GRADIENT_DIRECTIONS = 8  # number of random directions for each derivative
EXCHANGE_DONORS = (SAME_CLASS, OTHER_CLASS)
PRECISION = float(np.finfo(np.float32).eps)
EXCHANGE = "exchange"
GRADIENTS = "gradients"
PARTS = "parts"
"""`EXCHANGE`, `GRADIENTS` and `PARTS` are the kinds of tasks that process single documents."""
IDENTITY_ERRORS = "identity_errors"
PUBLISHED = "published"  # folder that is renamed to `features/measure` at the end


@torch_state()
def measure(
    parameters: MeasureParameters,
    checkpoints: Sequence[str],
    run: Run,
    folder: Path,
    *,
    seed: int,
    batch_tokens: int,
    arithmetic: str,
    device: torch.device,
) -> None:
    """Write the measures of the reviews sampled by `tokenize`, with one row group of reviews in memory at a time.

    Intermediate files are stored in `folder`. If `device` does not support float64, the CPU is used.
    """
    device = measuring_device(device)
    state = process_state(device)
    corpus = Corpus(run.drawn_reviews)
    for name in checkpoints:
        check_max_length("capture.max_length", int(corpus.lengths.max()), run.checkpoints[name])
    first_folder = run.checkpoints[checkpoints[0]]
    family = family_of(load_config(first_folder))
    samples = _draw_samples(corpus, parameters, seed)
    if samples.controls is not None:
        corpus.keep(samples.controls)  # a batch of these documents combines texts of many row groups
    plan = _Plan(
        parameters=parameters,
        run=run,
        folder=folder,
        corpus=corpus,
        tokenizer=load_tokenizer(first_folder),
        methods=present_names("measure.methods", parameters.methods, family, RATIOS),
        matrices=present_names("measure.matrices", parameters.matrices, family),
        samples=samples,
        seed=seed,
        batch_tokens=batch_tokens,
        device=device,
        process=state.process_index,
        processes=state.num_processes,
    )
    measured = {name: _measure_checkpoint(name, plan) for name in checkpoints}
    random = _measure_random_model(first_folder, plan) if "random_weights" in parameters.controls else None
    if plan.times.tokens:
        logging.info("%s", plan.times.describe(device))
    state.wait_for_everyone()
    if state.is_main_process:
        start = time.perf_counter()
        _write_results(measured, random, plan, computed_on(arithmetic, device))
        table_seconds = time.perf_counter() - start
        _log_extent(plan, checkpoints, table_seconds)


def _log_extent(plan: "_Plan", checkpoints: Sequence[str], table_seconds: float) -> None:
    """Log the numbers of measured documents, the checkpoints, and the duration of writing the tables."""
    names = " and ".join(checkpoints)
    message = "measured %d documents with the checkpoints %s; wrote the tables in %.1f s"
    logging.info(message, len(plan.corpus), names, table_seconds)
    if plan.samples.controls is not None:
        message = "measured controls, heads, steps, sinks and geometry in %d of these documents"
        logging.info(message, len(plan.samples.controls))


class _Samples(NamedTuple):
    """Indices of the documents in the samples for slow measures."""

    controls: Sequence[int] | None  # for controls, heads, steps, sinks and geometry; None for all documents
    exchange: Sequence[int]
    derivatives: Sequence[int]
    parts: Sequence[int]


def _draw_samples(corpus: Corpus, parameters: MeasureParameters, seed: int) -> _Samples:
    """Return random samples of documents, stratified by label, with the sample sizes in `parameters`."""
    controls = _draw_control_sample(corpus, parameters.control_documents, seed)
    exchange = stratified_draw(corpus.labels, parameters.exchange_documents, seed).tolist()
    derivatives = stratified_draw(corpus.labels, parameters.gradient_documents, seed).tolist()
    parts = stratified_draw(corpus.labels, parameters.parts_documents, seed).tolist()
    return _Samples(controls, exchange, derivatives, parts)


def _draw_control_sample(corpus: Corpus, size: int | None, seed: int) -> list[int] | None:
    """Return a sample of `size` documents, stratified by label and length; None if all documents are in the sample."""
    if size is None or size >= len(corpus):
        return None
    # Each pair of a label and a length class (an index into `LENGTHS`) has its own number.
    strata = corpus.labels * len(LENGTHS) + length_class(corpus.lengths)
    drawn: list[int] = stratified_draw(strata, size, seed).tolist()
    return drawn


@dataclass
class WorkTimes:
    """Amount and duration of this process's work on the ratios, without the work of an interrupted earlier run."""

    seconds: float = 0.0
    tokens: int = 0
    """Number of tokens with measured ratios, over all checkpoints."""
    written_bytes: int = 0
    writing_seconds: float = 0.0
    device_seconds: float = 0.0

    def describe(self, device: torch.device) -> str:
        """Return a description of the rates in tokens and bytes per second, and of the limiting factors."""
        seconds = self.seconds
        limits = compute_limiting_shares(seconds, self.writing_seconds, self.device_seconds, device, work="arithmetic")
        megabytes = self.written_bytes / 1e6
        stored = f"{megabytes / seconds:,.1f} MB/s stored ({megabytes / self.writing_seconds:,.0f} MB/s while writing)"
        return f"{self.tokens / seconds:,.0f} tokens/s, {stored}; {describe_limits(limits)}"


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Documents, quantities and settings of the stage, shared by all checkpoints."""

    parameters: MeasureParameters
    run: Run
    folder: Path  # folder of the intermediate files
    corpus: Corpus
    tokenizer: PreTrainedTokenizerFast
    methods: list[str]
    matrices: list[str]
    samples: _Samples
    seed: int
    batch_tokens: int
    device: torch.device
    process: int
    processes: int
    times: WorkTimes = field(default_factory=WorkTimes)

    def open_work(self, checkpoint: str) -> "CheckpointWork":
        """Return the storage for the results of one checkpoint, with this process's share of the tasks."""
        return CheckpointWork(self.folder, checkpoint, self.process, self.processes, self.times)

    def create_engine(self, base: Any) -> Engine:
        """Move a model without a task head to the device of this run, and return its engine."""
        base.to(self.device)
        read_segments(base, self.tokenizer, self.run.drawn_reviews.pairs)
        return Engine(base, self.methods, self.tokenizer.pad_token_id, batch_tokens=self.batch_tokens, seed=self.seed)

    @property
    def statistics(self) -> list[str]:
        """The statistics to measure in the same forward pass as the ratios.

        Some of them are the controls `SAME_PASS`, which are only measured if the user selected them.
        """
        selected_controls = self.parameters.controls
        return [name for name in STATISTICS if name not in SAME_PASS or name in selected_controls]

    def list_batch_tasks(self) -> Iterator[Task]:
        """Yield the batches of the documents sampled for controls, then the batches of all other documents."""
        return batch_tasks(self.corpus, self.batch_tokens, self.samples.controls)

    def list_sampled_tasks(self) -> list[Task]:
        """Return the batches of the documents sampled for controls."""
        return sampled_tasks(self.corpus, self.batch_tokens, self.samples.controls)


class _MeasuredCheckpoint(NamedTuple):
    """Results of one checkpoint."""

    work: "CheckpointWork"
    sites: Sequence[Site]
    gains_L: npt.NDArray[np.float64]
    """`attention_gain` of each layer."""
    has_parts: bool
    """False if vectors of this model family cannot be decomposed into contributions of the input tokens."""


def _measure_checkpoint(name: str, plan: _Plan) -> _MeasuredCheckpoint:
    """Measure this process's share of the documents with one checkpoint, and write the intermediate files.

    The engine measures the batches and documents in this process's share that an interrupted run has not measured, and
    stores the results in `work`. Ratios are measured in all documents, other quantities possibly only in samples.
    """
    base = load_base(plan.run.checkpoints[name])
    engine = plan.create_engine(base)
    single = DocumentMeasurer(base, plan.methods, plan.matrices)
    work = plan.open_work(name)
    start = time.perf_counter()
    engine.measure_texts(plan.corpus, plan.statistics, work, plan.samples.controls)
    plan.times.seconds += time.perf_counter() - start
    plan.times.device_seconds += engine.batches.waiting_seconds
    # The reported speed is that of the ratios only, so the times of slower quantities are stored separately.
    slow_work = replace(work, times=WorkTimes())
    has_parts = _measure_slow_quantities(base, engine, single, slow_work, plan)
    return _MeasuredCheckpoint(slow_work, engine.batches.sites, single.gains(), has_parts=has_parts)


def _measure_slow_quantities(
    base: PreTrainedModel, engine: Engine, single: DocumentMeasurer, work: "CheckpointWork", plan: _Plan
) -> bool:
    """Measure shuffled words, exchanged tokens, derivatives and parts, and store the sums in `work`.

    Each of these quantities has its own sample of documents in `plan.samples`. Return False if the model family has no
    parts (contributions of the input tokens).
    """
    if "shuffled_words" in plan.parameters.controls:
        shuffle = partial(shuffled_words, seed=plan.seed)
        engine.measure_control("shuffled_words", plan.corpus, work, shuffle, plan.samples.controls)
    engine.measure_single_texts(EXCHANGE, plan.samples.exchange, work, partial(_compute_exchange_sums, base, plan))
    engine.measure_single_texts(
        GRADIENTS, plan.samples.derivatives, work, partial(_compute_derivative_sums, single, plan)
    )
    obstacle = parts_obstacle(family_of(base.config))
    if obstacle is not None:
        logging.info("parts: not available in the model family %s (%s)", base.config.model_type, obstacle)
        return False
    engine.measure_single_texts(PARTS, plan.samples.parts, work, partial(_compute_parts_sums, engine, plan))
    return True


def _compute_exchange_sums(base: PreTrainedModel, plan: _Plan, number: int) -> DocumentSums:
    """Return the own shares and displacements of document `number`, summed over the measured tokens.

    The document is truncated. A displacement is the change of a token's vector if tokens of the document are replaced
    by those of donors (randomly drawn other documents). The own share is o / (o + a), where o is the displacement if
    the token itself is replaced, and a is the displacement if all other tokens are replaced.
    `attnmix.measures.exchange.QUANTITIES` lists all quantities.
    """
    parameters = plan.parameters
    corpus = plan.corpus
    document = corpus.document(number).cut(parameters.exchange_max_length)
    exchanged = draw_exchanged_texts(
        document, corpus, number, corpus.predicted, donors=parameters.exchange_donors, seed=plan.seed
    )
    positions = choose_positions(document, parameters.exchange_positions, plan.seed)
    displacements = measure_exchange(base, document, exchanged, positions, plan.batch_tokens)
    return exchange_sums(displacements, PRECISION)


def _compute_derivative_sums(single: DocumentMeasurer, plan: _Plan, number: int) -> DocumentSums:
    """Return derivatives of layer outputs by layer inputs, and other measures for comparison, as sums over tokens.

    Document `number` is truncated. Derivatives are computed along random directions. One of the other measures replaces
    layer inputs by those of two donors: the next document of the same predicted class, and the next one of another
    class.
    """
    document = plan.corpus.document(number)
    # The seed depends only on the document, so that all checkpoints are compared along the same directions.
    name_hash = crc32(document.name.encode())
    (document_seed,) = np.random.SeedSequence([plan.seed, name_hash]).generate_state(1)
    max_length = plan.parameters.gradient_max_length
    ids = document.cut(max_length).ids
    donors = [donor.cut(max_length).ids for donor in _choose_donors(plan.corpus, number)]
    quantities = single.derivatives(ids, donors, GRADIENT_DIRECTIONS, int(document_seed))
    return {name: Sums.over_tokens(values) for name, values in quantities.items()}


def _choose_donors(corpus: Corpus, number: int) -> Iterator[Document]:
    """Yield the next review of the same predicted class as review `number`, then the next one of another class.

    If there is no such review, an empty document is yielded instead.
    """
    for donor in next_donors(number, corpus.predicted):
        if donor is None:
            no_tokens = np.arange(0)
            yield corpus.document(number).take(no_tokens)
        else:
            yield corpus.document(donor)


def _compute_parts_sums(engine: Engine, plan: _Plan, number: int) -> DocumentSums:
    """Return quantities that describe the contributions of input tokens, summed over the tokens of document `number`.

    A contribution is the part of a token's vector that comes from one input token.
    `attnmix.measures.input_parts.QUANTITIES` lists the quantities. The document is truncated. The result has one entry
    for each rule for activation functions in `measure.parts_rules`.
    """
    document = plan.corpus.document(number).cut(plan.parameters.parts_max_length)
    return engine.parts_sums(document, plan.parameters.parts_rules)


def _measure_random_model(folder: Path, plan: _Plan) -> "CheckpointWork":
    """Measure the control `random_weights`, in a model with the architecture of the checkpoint in `folder`."""
    work = plan.open_work(RANDOM)
    engine = plan.create_engine(random_base(folder, plan.seed))
    engine.measure_control("random_weights", plan.corpus, work, sample=plan.samples.controls)
    return work


def _read_corpus_measures(
    measured: Mapping[str, _MeasuredCheckpoint], random: "CheckpointWork | None", plan: _Plan
) -> CorpusMeasures:
    """Return the measures of all documents from the intermediate files of all processes.

    If controls are limited to a sample, only ratios are available for the other documents. `random` contains the
    results of the control `random_weights`; None if it was not measured.
    """
    sampled = _read_sampled_measures(measured, random, plan)
    if plan.samples.controls is None:
        return sampled
    ratio_sums = {}
    for name, checkpoint in measured.items():
        ratio_sums[name] = checkpoint.work.read_ratio_sums(plan.list_batch_tasks())
    return replace(
        sampled,
        sums=ratio_sums,
        texts=plan.corpus.texts,
        draws=Draws(len(plan.corpus), BOOTSTRAP_SAMPLES, plan.seed),
        sample=sampled,
    )


def _read_sampled_measures(
    measured: Mapping[str, _MeasuredCheckpoint], random: "CheckpointWork | None", plan: _Plan
) -> CorpusMeasures:
    """Return the measures of the documents sampled for controls, and the errors of the identities in all documents.

    The identities state that own part, other tokens' parts and biases sum to the model's vectors. `random` contains the
    results of the control `random_weights`; None if it was not measured.
    """
    first_checkpoint = next(iter(measured.values()))
    tasks = plan.list_sampled_tasks()
    texts = plan.corpus.texts
    if plan.samples.controls is not None:
        texts = texts.iloc[list(plan.samples.controls)]
    sums: dict[str, dict[str, Sums]] = {}
    identities = {}
    for name, checkpoint in measured.items():
        work = checkpoint.work
        sums[name] = work.read(MEASURES, tasks)
        if "shuffled_words" in plan.parameters.controls:
            sums[name].update(work.read("shuffled_words", tasks))
        identities[name] = work.read_identities(plan.list_batch_tasks())
    return CorpusMeasures(
        sums=sums,
        random={} if random is None else random.read("random_weights", tasks),
        texts=texts,
        identities=identities,
        methods=plan.methods,
        sites=first_checkpoint.sites,
        draws=Draws(len(texts), BOOTSTRAP_SAMPLES, plan.seed),
        seed=plan.seed,
        gains={name: checkpoint.gains_L for name, checkpoint in measured.items()},
    )


def _create_tables(
    corpus_measures: CorpusMeasures, measured: Mapping[str, _MeasuredCheckpoint], plan: _Plan
) -> dict[str, pd.DataFrame]:
    """Return the tables of the csv files by name, except `mixing_by_review`, which is written in blocks.

    `measured` contains the results of each checkpoint; the sums of the sampled documents are read from their files.
    """
    exchange: dict[str, CorpusSums] = {}
    derivatives: dict[str, CorpusSums] = {}
    parts: dict[str, CorpusSums] = {}
    for name, checkpoint in measured.items():
        exchange[name] = checkpoint.work.read(EXCHANGE, text_tasks(plan.samples.exchange))
        derivatives[name] = checkpoint.work.read(GRADIENTS, text_tasks(plan.samples.derivatives))
        parts_tasks = text_tasks(plan.samples.parts if checkpoint.has_parts else [])
        parts[name] = checkpoint.work.read(PARTS, parts_tasks)
    documents = [plan.corpus.document(number).name for number in plan.samples.derivatives]
    tables = mixing_tables(corpus_measures)
    tables["mixing_weighted"] = weighted_table(corpus_measures)
    tables["geometry"] = geometry_table(corpus_measures)
    tables.update(derivative_tables(derivatives, documents, plan.methods, plan.matrices, plan.seed))
    tables["exchange"] = exchange_table(exchange, (ALL_DONORS, *EXCHANGE_DONORS), plan.seed)
    tables["parts"] = parts_table(parts, plan.seed)
    return tables


def _write_results(
    measured: Mapping[str, _MeasuredCheckpoint], random: "CheckpointWork | None", plan: _Plan, machine: str
) -> None:
    """Write the csv files, the metrics and the ratios of every token; then remove the intermediate files.

    `random` contains the results of the control `random_weights`; None if it was not measured. `machine` describes the
    device and its arithmetic.
    """
    corpus_measures = _read_corpus_measures(measured, random, plan)
    sums = corpus_measures.sampled.first  # of the first checkpoint; the same texts are left out in all checkpoints
    if "corpus_value" in sums:
        _log_left_out_texts(plan, sums)
    tables = _create_tables(corpus_measures, measured, plan)
    for name, table in tables.items():
        writers.write_plot(f"measure/{name}", table, plan.run.tables)
    writers.write_plot("measure/mixing_by_review", by_review(corpus_measures), plan.run.tables)
    values = metrics(tables, plan.methods)
    values["computed_on"] = machine
    writers.write_metrics("measure", values, plan.run.metrics_folder)
    published = plan.folder / PUBLISHED
    writers.write_ratios(published, plan.methods, _tabulate_token_ratios(measured, plan))
    publish_output(published, plan.run.measured)
    remove_unfinished(plan.folder)


def _tabulate_token_ratios(measured: Mapping[str, _MeasuredCheckpoint], plan: _Plan) -> Iterator[pd.DataFrame]:
    """Yield a table for each checkpoint and document, with the ratios and descriptive columns of every token.

    Each ratio array in the files is `[methods, layers, tokens]`; its name is the index of the document.
    """
    for name, checkpoint in measured.items():
        file_by_document: dict[int, Path] = {}
        for task in plan.list_batch_tasks():
            file = checkpoint.work.token_file(task)
            for number in task.numbers:
                file_by_document[number] = file
        for number in range(len(plan.corpus)):
            ratios_MLT = np.load(file_by_document[number])[str(number)]
            document = plan.corpus.document(number)
            yield labelled_ratio_rows(name, document, plan.methods, ratios_MLT, plan.tokenizer)


def _log_left_out_texts(plan: _Plan, sums: CorpusSums) -> None:
    """Log how many documents have an undefined control `corpus_value`, and the reason for the first of them.

    `corpus_value` averages values over tokens of the same class in other documents; `corpus_sample` draws these
    documents. The control is undefined if the document has a class of tokens that occurs in none of them. `sums` are
    the sums of the documents in which controls are measured; a count of 0 marks an undefined control.
    """
    is_left_out = np.ravel(sums["corpus_value"].counts) == 0
    left_out = np.flatnonzero(is_left_out)
    if not len(left_out):
        return
    controlled = range(len(plan.corpus)) if plan.samples.controls is None else plan.samples.controls
    number = controlled[int(left_out[0])]
    name = plan.corpus.document(number).name
    token_class = _find_class_without_others(plan.corpus, number, plan.seed)
    logging.info(left_out_sentence(name, token_class, len(left_out), len(controlled)))


def _find_class_without_others(corpus: Corpus, number: int, seed: int) -> str:
    """Return the token class because of which document `number` has no control `corpus_value`.

    It is the first token class in this document that occurs in no other document of the `corpus_sample`.
    """
    sampled = corpus_sample(corpus, seed)
    numbers = list(sampled)
    if number not in sampled:
        numbers.append(number)
    documents = [corpus.document(index) for index in numbers]
    sample = range(len(sampled))  # indices in `documents`
    classes = classes_without_others(documents, sample)
    return classes[numbers.index(number)]


@dataclass(frozen=True)
class CheckpointWork:
    """A `Sink` that stores one checkpoint's measures of the corpus in files of `folder`, written atomically.

    This process handles every `processes`-th task, starting at index `process`.
    """

    folder: Path
    checkpoint: str
    process: int
    processes: int
    times: WorkTimes = field(default_factory=WorkTimes)

    def remaining(self, kind: str, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield the unfinished tasks in this process's share, with a progress bar."""
        share = islice(tasks, self.process, None, self.processes)
        remaining = [task for task in share if not self._locate_file(kind, task).exists()]
        yield from track(remaining, f"{self.checkpoint}: {kind}")

    def write_token_measures(self, task: Task, measures: Sequence[DocumentMeasures]) -> None:
        """Write the ratios of each token in a batch, and the largest errors of the identities in the batch.

        The identities state that the parts of a decomposition sum to the model's vectors. The number of tokens is added
        to `times`, from which the log computes the tokens per second.
        """
        errors = largest_errors([document_measures.identities for document_measures in measures])
        arrays: dict[str, Any] = {IDENTITY_ERRORS: errors}
        for number, document_measures in zip(task.numbers, measures, strict=True):
            arrays[str(number)] = document_measures.ratios
            self.times.tokens += len(document_measures.document)
        self._write_arrays(self.token_file(task), arrays)

    def write(self, kind: str, task: Task, sums: Sequence[DocumentSums]) -> None:
        """Write the sums of a task's documents to a file; the task counts as done if this file exists."""
        arrays = {}
        for name, (values, counts) in stack_sums(sums).items():
            arrays[f"{name}/values"] = values
            arrays[f"{name}/counts"] = counts
        self._write_arrays(self._locate_file(kind, task), arrays)

    def _write_arrays(self, file: Path, arrays: Mapping[str, Any]) -> None:
        """Write arrays to a file, and add its size and the writing time to `times`."""
        start = time.perf_counter()
        with atomic_path(file) as part, part.open("wb") as opened:
            np.savez(opened, **arrays)
            self.times.written_bytes += opened.tell()
        self.times.writing_seconds += time.perf_counter() - start

    def read(self, kind: str, tasks: Iterable[Task]) -> dict[str, Sums]:
        """Return the sums of all documents of the tasks, ordered by document index, as memory-mapped arrays.

        `kind` names the measured quantities in file names. Sums consist of the arrays `<name>/values` and
        `<name>/counts`.
        """
        tasks = list(tasks)
        if not tasks:
            return {}
        with np.load(self._locate_file(kind, tasks[0])) as stored:  # all tasks of a kind have the same names
            names = [name.removesuffix("/values") for name in stored.files if name.endswith("/values")]
        return self._read_sums(kind, tasks, names, self.folder / self.checkpoint / kind)

    def read_ratio_sums(self, tasks: Iterable[Task]) -> dict[str, Sums]:
        """Return the `RATIO_SUMS` of all documents, including those without statistics, in the format of `read`."""
        return self._read_sums(MEASURES, list(tasks), RATIO_SUMS, self.folder / self.checkpoint / "ratios")

    def _read_sums(self, kind: str, tasks: Sequence[Task], names: Sequence[str], folder: Path) -> dict[str, Sums]:
        """Return the sums with these `names`, of all documents of the tasks, as memory-mapped arrays in `folder`.

        Each array has one row per document, ordered by document index. The file of a task contains the rows of its
        documents, as written by `write`.
        """
        numbers = sorted(number for task in tasks for number in task.numbers)
        row_of_number = {number: row for row, number in enumerate(numbers)}
        array_names = []
        for name in names:
            array_names.append(f"{name}/values")
            array_names.append(f"{name}/counts")
        arrays: dict[str, npt.NDArray[Any]] = {}
        for task in tasks:
            rows = [row_of_number[number] for number in task.numbers]
            with np.load(self._locate_file(kind, task)) as stored:
                for name in array_names:
                    if name not in arrays:
                        arrays[name] = _create_memory_map(folder / f"{name}.npy", stored[name], len(numbers))
                    arrays[name][rows] = stored[name]
        return {name: Sums(arrays[f"{name}/values"], arrays[f"{name}/counts"]) for name in names}

    def read_identities(self, tasks: Iterable[Task]) -> npt.NDArray[np.float64]:
        """Return the errors of the identities over all batches, `[2, levels, identities]`.

        The first array contains the largest error, and the second the number of checked documents. The levels are the
        embeddings and the layers; an identity states that certain parts sum to a vector of the model. The arrays of
        each batch have the same form (see `largest_errors`).
        """
        by_batch = [np.load(self.token_file(task))[IDENTITY_ERRORS] for task in tasks]
        errors_BLI, documents_BLI = np.stack(by_batch, axis=1)  # B batches, L levels, I identities
        largest_LI = np.fmax.reduce(errors_BLI)  # ignores NaN, the error of unchecked identities
        return np.stack([largest_LI, documents_BLI.sum(0)])

    def token_file(self, task: Task) -> Path:
        """Return the file of the ratios and identity errors of a batch."""
        return self._locate_file(f"tokens-{MEASURES}", task)

    def _locate_file(self, kind: str, task: Task) -> Path:
        """Return the file of a task's results; the kind names the measured quantities."""
        return self.folder / self.checkpoint / f"{kind}-{task.name}.npz"


def _create_memory_map(file: Path, array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Return a new memory-mapped array with `rows` rows and the remaining dimensions of `array`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    return np.lib.format.open_memmap(file, "w+", array.dtype, (rows, *array.shape[1:]))
