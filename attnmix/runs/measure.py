"""Measure how much attention mixes the tokens of the drawn test reviews.

Streams batches of documents through each checkpoint in float32. Writes `features/measure/`, `reports/plots/measure/`
and `reports/metrics/measure.json`; `docs/measures.md` says what each number is.

The unfinished work is a file for each batch or document, from which a killed run resumes; each process takes its share
of them. Which documents share a batch does not depend on the number of processes, so the numbers do not either.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnmix.core.arithmetic.kernels import computed_on
from attnmix.core.device import measuring_device, process_state
from attnmix.core.disk import publish_output, remove_unfinished
from attnmix.core.draw import stratified_draw
from attnmix.core.names import Site
from attnmix.core.settings import MeasureParameters
from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Doubles, Draws
from attnmix.core.store import writers
from attnmix.core.store.files import atomic_path
from attnmix.core.store.runs import Run
from attnmix.core.store.texts import ROW_GROUP_TEXTS
from attnmix.core.torch_state import torch_state
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.controls import RANDOM, classes_without_others, left_out_sentence, random_base, shuffled_words
from attnmix.measures.documents import Corpus, Document
from attnmix.measures.exchange import (
    ALL,
    OTHER_CLASS,
    SAME_CLASS,
    Displacements,
    choose_donors,
    choose_positions,
    exchange_sums,
    exchanged_texts,
    measure_exchange,
    with_all_donors,
)
from attnmix.measures.geometry_tables import geometry_table
from attnmix.measures.identities import largest_errors
from attnmix.measures.input_parts import RULES, PartsReader, by_token, parts_obstacle
from attnmix.measures.mixing_tables import (
    CorpusMeasures,
    DocumentRows,
    by_review,
    metrics,
    mixing_tables,
    stack_rows,
    weighted_table,
)
from attnmix.measures.ratios import RATIOS
from attnmix.measures.sample_tables import derivative_tables, exchange_table, parts_table
from attnmix.measures.swaps import next_donors
from attnmix.measures.token_ratios import labelled_ratio_rows
from attnmix.measures.variance_shares import MAX_TEXTS
from attnmix.models.checkpoint import check_max_length, load_config, load_tokenizer
from attnmix.models.encoding import batches_by_tokens, padded
from attnmix.models.families import family_of, present_names
from attnmix.models.loading import load_base
from attnmix.models.segments import read_segments

Task = TypeVar("Task", int, list[int])
"""The number of a document, or those of a batch."""

EXCHANGE_DONORS = (SAME_CLASS, OTHER_CLASS)
PRECISION = float(np.finfo(np.float32).eps)
GRADIENT_DIRECTIONS = 8  # random directions of each derivative
SAMPLED_DOCUMENTS = 16  # in which the identities that take long are checked
MEASURES = "measures"  # the kind of batch that is no control
IDENTITY_ERRORS = "identity_errors"
PUBLISHED = "published"  # the folder that becomes `features/measure`


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
    """Write what is measured of the reviews that `tokenize` drew, a group of them in memory at a time.

    Unfinished work is in `folder`. A `device` without float64 is replaced by the CPU.
    """
    device = measuring_device(device)
    state = process_state(device)
    corpus = Corpus(run.drawn_reviews)
    for name in checkpoints:
        check_max_length("capture.max_length", int(corpus.lengths.max()), run.checkpoints[name])
    first = run.checkpoints[checkpoints[0]]
    family = family_of(load_config(first))
    plan = _Plan(
        parameters=parameters,
        run=run,
        folder=folder,
        corpus=corpus,
        tokenizer=load_tokenizer(first),
        methods=present_names("measure.methods", parameters.methods, family, RATIOS),
        matrices=present_names("measure.matrices", parameters.matrices, family),
        samples=_draw_samples(corpus, parameters, seed),
        seed=seed,
        batch_tokens=batch_tokens,
        device=device,
        process=state.process_index,
        processes=state.num_processes,
    )
    measured = {name: _measure_checkpoint(name, plan) for name in checkpoints}
    random = _measure_random_model(first, plan)
    state.wait_for_everyone()
    if state.is_main_process:
        corpus_measures = _corpus_measures(measured, random, plan)
        _log_left_out(corpus, corpus_measures.first, seed)
        tables = _tables(corpus_measures, measured, plan)
        _write_results(corpus_measures, tables, measured, plan, computed_on(arithmetic, device))
        logging.info("measured %d documents in %s", len(corpus), " and ".join(checkpoints))


class _Samples(NamedTuple):
    """The numbers of the documents in which more is measured, as that takes longer."""

    identities: Collection[int]
    """Every identity is checked."""
    exchange: Sequence[int]
    derivatives: Sequence[int]
    parts: Sequence[int]


def _draw_samples(corpus: Corpus, parameters: MeasureParameters, seed: int) -> _Samples:
    """Return the drawn documents; the longest one's identities are checked too."""
    identities = stratified_draw(corpus.labels, SAMPLED_DOCUMENTS, seed).tolist()
    exchange = stratified_draw(corpus.labels, parameters.exchange_documents, seed).tolist()
    derivatives = stratified_draw(corpus.labels, parameters.gradient_documents, seed).tolist()
    parts = stratified_draw(corpus.labels, parameters.parts_documents, seed).tolist()
    longest = int(corpus.lengths.argmax())
    return _Samples({*identities, longest}, exchange, derivatives, parts)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The documents, quantities and settings of this run of the stage: the same for every checkpoint."""

    parameters: MeasureParameters
    run: Run
    folder: Path  # of the unfinished work
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

    def work(self, checkpoint: str) -> "CheckpointWork":
        """Return the files of one checkpoint's measures."""
        return CheckpointWork(
            self.folder, checkpoint, self.corpus, self.batch_tokens, process=self.process, processes=self.processes
        )

    def prepare(self, base: Any) -> Any:
        """Return a model without a head, which reads the texts or pairs of this run on its device."""
        base.to(self.device)
        read_segments(base, self.tokenizer, self.run.drawn_reviews.pairs)
        return base


class _MeasuredCheckpoint(NamedTuple):
    """One checkpoint, measured."""

    work: "CheckpointWork"
    sites: Sequence[Site]
    gains_L: npt.NDArray[np.float64]
    """`attention_gain` of each layer."""


def _measure_checkpoint(name: str, plan: _Plan) -> _MeasuredCheckpoint:
    """Measure this process's share of the documents in one checkpoint."""
    base = plan.prepare(load_base(plan.run.checkpoints[name]))
    batches = BatchMeasurer(base, plan.methods, plan.tokenizer.pad_token_id)
    batches.read_corpus(_corpus_batches(plan.corpus, plan.batch_tokens, plan.seed))
    documents = DocumentMeasurer(base, plan.methods, plan.matrices)
    work = plan.work(name)
    work.measure_documents(batches, plan.samples.identities)
    work.measure_control("shuffled_words", batches, partial(shuffled_words, seed=plan.seed))
    work.measure_exchange(base, plan)
    work.measure_derivatives(documents, plan.samples.derivatives, plan.parameters.gradient_max_length, plan.seed)
    work.measure_parts(base, plan.samples.parts, plan.parameters.parts_max_length)
    return _MeasuredCheckpoint(work, batches.sites, documents.gains())


def _measure_random_model(folder: Path, plan: _Plan) -> "CheckpointWork":
    """Measure the control `random_weights`: a model of the architecture in `folder`."""
    base = plan.prepare(random_base(folder, plan.seed))
    work = plan.work(RANDOM)
    work.measure_control("random_weights", BatchMeasurer(base, plan.methods, plan.tokenizer.pad_token_id))
    return work


def _corpus_measures(
    measured: Mapping[str, _MeasuredCheckpoint], random: "CheckpointWork", plan: _Plan
) -> CorpusMeasures:
    """Return what was measured of all documents, once every process has done its share."""
    first = next(iter(measured.values()))
    return CorpusMeasures(
        rows={name: checkpoint.work.read_rows() for name, checkpoint in measured.items()},
        random=random.read_sums("random_weights"),
        identities={name: checkpoint.work.read_identities() for name, checkpoint in measured.items()},
        methods=plan.methods,
        sites=first.sites,
        draws=Draws(len(plan.corpus), BOOTSTRAP_SAMPLES, plan.seed),
        seed=plan.seed,
        gains={name: checkpoint.gains_L for name, checkpoint in measured.items()},
    )


def _tables(
    corpus_measures: CorpusMeasures, measured: Mapping[str, _MeasuredCheckpoint], plan: _Plan
) -> dict[str, pd.DataFrame]:
    """Return the csv files by name, but `mixing_by_review`, whose rows are written as they come."""
    exchange, derivatives, parts = {}, {}, {}
    for name, checkpoint in measured.items():
        exchange[name] = checkpoint.work.read_exchange(plan.samples.exchange)
        derivatives[name] = checkpoint.work.read_derivatives(plan.samples.derivatives)
        parts[name] = checkpoint.work.read_parts(plan.samples.parts)
    tables = mixing_tables(corpus_measures)
    tables["mixing_weighted"] = weighted_table(corpus_measures)
    tables["geometry"] = geometry_table(corpus_measures)
    tables.update(derivative_tables(derivatives, plan.methods, plan.matrices, plan.seed))
    tables["exchange"] = exchange_table(exchange, (ALL, *EXCHANGE_DONORS), plan.seed)
    tables["parts"] = parts_table(parts, plan.seed)
    return tables


def _write_results(
    corpus_measures: CorpusMeasures,
    tables: Mapping[str, pd.DataFrame],
    measured: Mapping[str, _MeasuredCheckpoint],
    plan: _Plan,
    machine: str,
) -> None:
    """Write the csv files, the metrics and the ratios of every token; then remove the unfinished work."""
    for name, table in tables.items():
        writers.write_plot(f"measure/{name}", table, plan.run.tables)
    writers.write_plot("measure/mixing_by_review", by_review(corpus_measures), plan.run.tables)
    values = metrics(tables, plan.methods)
    values["computed_on"] = machine
    writers.write_metrics("measure", values, plan.run.metrics_folder)
    published = plan.folder / PUBLISHED
    writers.write_ratios(published, plan.methods, _token_ratios(measured, plan))
    publish_output(published, plan.run.measured)
    remove_unfinished(plan.folder)


def _token_ratios(measured: Mapping[str, _MeasuredCheckpoint], plan: _Plan) -> Iterator[pd.DataFrame]:
    """Yield the ratios of every document in every checkpoint."""
    for checkpoint in measured.values():
        yield from checkpoint.work.token_ratios(plan.tokenizer, plan.methods)


def _corpus_batches(corpus: Corpus, batch_tokens: int, seed: int) -> Iterator[list[Document]]:
    """Yield batches of at most `MAX_TEXTS` reviews, from which the control `corpus_value` takes its values."""
    drawn = _corpus_sample(corpus, seed)
    if len(drawn) < 2:
        return
    for batch in batches_by_tokens(corpus.lengths[drawn].tolist(), batch_tokens):
        yield [corpus.document(number) for number in drawn[batch].tolist()]


def _corpus_sample(corpus: Corpus, seed: int) -> npt.NDArray[np.int64]:
    return np.sort(stratified_draw(corpus.labels, min(len(corpus), MAX_TEXTS), seed))


def _log_left_out(corpus: Corpus, rows: DocumentRows, seed: int) -> None:
    """Log how many reviews have no `corpus_value`, and why the first of them has none."""
    left_out = np.flatnonzero(np.ravel(rows["corpus_value_counts"]) == 0)
    if not len(left_out):
        return
    sample = _corpus_sample(corpus, seed)
    documents = [corpus.document(int(number)) for number in sample]
    first = corpus.document(int(left_out[0]))
    places = np.flatnonzero(sample == left_out[0])
    place = int(places[0]) if len(places) else len(documents)
    token_class = classes_without_others([*documents, first], range(len(documents)))[place]
    logging.info(left_out_sentence(first.name, token_class, len(left_out), len(corpus)))


@dataclass(frozen=True)
class CheckpointWork:
    """One checkpoint's measures of the corpus, in files of `folder`; each is whole once it is there.

    This process takes every `processes`-th batch or document, from its own number on.
    """

    folder: Path
    checkpoint: str
    corpus: Corpus
    batch_tokens: int
    process: int
    processes: int

    def measure_documents(self, measurer: BatchMeasurer, sampled: Collection[int]) -> None:
        """Write the measures of all documents, batch by batch; in those `sampled` every identity is checked."""
        for batch, file in self._remaining(MEASURES, self._batches(MEASURES)):
            documents = [self.corpus.document(number) for number in batch]
            all_measures = measurer.measures(documents, [number in sampled for number in batch])
            errors = largest_errors([measures.identities for measures in all_measures])
            token_arrays: dict[str, Any] = {IDENTITY_ERRORS: errors}
            for number, measures in zip(batch, all_measures, strict=True):
                token_arrays[str(number)] = measures.ratios
            _write_arrays(_token_file(file), token_arrays)
            # Last: once this file exists, the batch is not measured again.
            _write_arrays(file, stack_rows([measures.sums() for measures in all_measures]))

    def measure_control(
        self, name: str, measurer: BatchMeasurer, change: Callable[[Document], Document] | None = None
    ) -> None:
        """Write the ratios of a control with a pass of its own, of the documents after a `change`."""
        for batch, file in self._remaining(name, self._batches(name)):
            documents = [self.corpus.document(number) for number in batch]
            if change is not None:
                documents = [change(document) for document in documents]
            _write_arrays(file, stack_rows(measurer.control_sums(name, documents)))

    def measure_exchange(self, base: PreTrainedModel, plan: _Plan) -> None:
        """Write how far vectors of some documents move if tokens are exchanged for those of other documents."""
        parameters = plan.parameters
        tasks = [(number, self._exchange_file(number)) for number in plan.samples.exchange]
        for number, file in self._remaining("exchange", tasks):
            document = self.corpus.document(number).cut(parameters.exchange_max_length)
            donors = self._exchange_donors(number, document, parameters.exchange_donors, plan.seed)
            positions = choose_positions(document, parameters.exchange_positions, plan.seed)
            moves = measure_exchange(base, document, donors, positions, self.batch_tokens)
            _write_arrays(file, moves._asdict())

    def _exchange_donors(
        self, number: int, document: Document, donors: int, seed: int
    ) -> dict[str, list[npt.NDArray[np.int32]]]:
        """Return the exchanged texts of a document by kind of donor; none of a kind that does not occur.

        Donors are of the same row group of the file, which is in memory.
        """
        row_group = number // ROW_GROUP_TEXTS
        candidates = np.arange(len(self.corpus))[self.corpus.rows(row_group)]
        texts = [self.corpus.document(int(candidate)) for candidate in candidates]
        place = number - int(candidates[0])
        by_kind = choose_donors(texts, place, self.corpus.predicted[candidates], seed)
        return {kind: exchanged_texts(document, texts, by_kind.get(kind, []), donors) for kind in EXCHANGE_DONORS}

    def measure_derivatives(
        self, measurer: DocumentMeasurer, numbers: Sequence[int], max_length: int, seed: int
    ) -> None:
        """Write the derivatives of some documents, truncated; directions are drawn for each of them.

        Inputs are exchanged with those of the next measured review of the same and of another predicted class.
        """
        tasks = [(number, self._derivatives_file(number)) for number in numbers]
        for number, file in self._remaining("gradients", tasks):
            document = self.corpus.document(number)
            # The same for a review in both checkpoints, so that they are compared along the same directions.
            name_hash = crc32(document.name.encode())
            (document_seed,) = np.random.SeedSequence([seed, name_hash]).generate_state(1)
            ids = document.cut(max_length).ids
            donors = [donor.cut(max_length).ids for donor in self._donors(number)]
            _write_arrays(file, measurer.derivatives(ids, donors, GRADIENT_DIRECTIONS, int(document_seed)))

    def _donors(self, number: int) -> Iterator[Document]:
        """Yield the next measured review of the same and of another predicted class; without one, one of no tokens."""
        for donor in next_donors(number, self.corpus.predicted):
            if donor is None:
                yield self.corpus.document(number).take(np.arange(0))
            else:
                yield self.corpus.document(donor)

    def measure_parts(self, base: PreTrainedModel, numbers: Sequence[int], max_length: int) -> None:
        """Write what of each vector of some documents, truncated, is the token's own since the input, by rule."""
        family = family_of(base.config)
        obstacle = parts_obstacle(family)
        if obstacle:
            logging.info("parts: absent in the model family %s: %s", family.model_type, obstacle)
            return
        readers = {rule: PartsReader(base, rule) for rule in RULES}
        tasks = [(number, self._parts_file(number)) for number in numbers]
        for number, file in self._remaining("parts", tasks):
            ids = self.corpus.document(number).cut(max_length).ids.tolist()
            batch = padded([ids], 0, base.device)
            quantities = {}
            for rule, reader in readers.items():
                quantities_QKT = by_token(reader.read(batch))
                quantities[rule] = quantities_QKT.double().cpu().numpy()
            _write_arrays(file, quantities)

    def read_rows(self) -> DocumentRows:
        """Return the sums of all documents, and of the control with shuffled words, with a row for each document."""
        rows = self.read_sums(MEASURES)
        rows.update(self.read_sums("shuffled_words"))
        rows["document"] = self.corpus.texts["document"].to_numpy()
        return rows

    def read_sums(self, kind: str) -> DocumentRows:
        """Return the sums of the documents, or of a control with a pass of its own, with a row for each document."""
        return _gather_rows(self._batches(kind), len(self.corpus), self._folder / kind)

    def read_identities(self) -> npt.NDArray[np.float64]:
        """Return the largest error and the number of documents of all batches `[2, levels, identities]`."""
        by_batch = []
        for _, file in self._batches(MEASURES):
            by_batch.append(np.load(_token_file(file))[IDENTITY_ERRORS])
        errors, documents = np.stack(by_batch, axis=1)
        return np.stack([np.fmax.reduce(errors), documents.sum(0)])

    def read_derivatives(self, numbers: Sequence[int]) -> dict[str, dict[str, npt.NDArray[np.float64]]]:
        """Return what `measure_derivatives` wrote, by the name of the review."""
        return {self.corpus.document(number).name: dict(np.load(self._derivatives_file(number))) for number in numbers}

    def read_exchange(self, numbers: Sequence[int]) -> list[dict[str, tuple[Doubles, Doubles]]]:
        """Return the sums of what `measure_exchange` wrote, review by review."""
        sums = []
        for number in numbers:
            with np.load(self._exchange_file(number)) as arrays:
                sums.append(exchange_sums(with_all_donors(Displacements(**arrays)), PRECISION))
        return sums

    def read_parts(self, numbers: Sequence[int]) -> list[dict[str, npt.NDArray[np.float64]]]:
        """Return what `measure_parts` wrote, review by review; nothing of a family without parts."""
        files = [self._parts_file(number) for number in numbers]
        return [dict(np.load(file)) for file in files if file.exists()]

    def token_ratios(self, tokenizer: PreTrainedTokenizerFast, methods: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Yield the ratios of the documents in their order, with what each token is."""
        for row_group in self.corpus.row_groups:
            files: dict[int, Path] = {}
            for batch, file in self._batches_in(row_group, MEASURES):
                files.update(dict.fromkeys(batch, _token_file(file)))
            for number in sorted(files):
                document = self.corpus.document(number)
                ratios_MLT = np.load(files[number])[str(number)]
                yield labelled_ratio_rows(self.checkpoint, document, methods, ratios_MLT, tokenizer)

    @property
    def _folder(self) -> Path:
        return self.folder / self.checkpoint

    def _derivatives_file(self, number: int) -> Path:
        return self._folder / f"gradient-{number}.npz"

    def _exchange_file(self, number: int) -> Path:
        return self._folder / f"exchange-{number}.npz"

    def _parts_file(self, number: int) -> Path:
        return self._folder / f"parts-{number}.npz"

    def _batches(self, kind: str) -> Iterator[tuple[list[int], Path]]:
        """Yield the batches of documents, and the file that exists once each is done."""
        for row_group in self.corpus.row_groups:
            yield from self._batches_in(row_group, kind)

    def _batches_in(self, row_group: int, kind: str) -> Iterator[tuple[list[int], Path]]:
        for place, batch in enumerate(self.corpus.batches(row_group, self.batch_tokens)):
            yield batch, self._folder / f"{kind}-{row_group}-{place}.npz"

    def _remaining(self, kind: str, tasks: Iterable[tuple[Task, Path]]) -> Iterator[tuple[Task, Path]]:
        """Yield this process's share of the tasks whose file does not exist yet."""
        share = islice(tasks, self.process, None, self.processes)
        remaining = [(task, file) for task, file in share if not file.exists()]
        yield from tqdm(remaining, desc=f"{self.checkpoint}: {kind}", disable=None)


def _token_file(file: Path) -> Path:
    """Return the file of the ratios and identities of a batch, which is whole once the batch's own `file` exists."""
    return file.with_name(f"tokens-{file.name}")


def _write_arrays(file: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name to an npz file in one step, so that a file that exists is whole."""
    with atomic_path(file) as part, part.open("wb") as opened:
        np.savez(opened, **arrays)


def _gather_rows(batches: Iterable[tuple[Sequence[int], Path]], documents: int, folder: Path) -> DocumentRows:
    """Return the arrays of all batches, a row for each of the `documents`, as memory-mapped files in `folder`.

    A batch is the numbers of its documents, and the file of their `stack_rows`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: DocumentRows = {}
    for numbers, file in batches:
        with np.load(file) as arrays:
            for name, array in arrays.items():
                if name not in rows:
                    shape = (documents, *array.shape[1:])
                    rows[name] = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", array.dtype, shape)
                rows[name][list(numbers)] = array
    return rows
