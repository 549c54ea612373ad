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
from attnmix.core.device import exact_products, measuring_device, process_state
from attnmix.core.disk import publish_output, remove_unfinished
from attnmix.core.draw import stratified_draw
from attnmix.core.settings import MeasureParameters
from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Draws
from attnmix.core.store import writers
from attnmix.core.store.files import atomic_path
from attnmix.core.store.runs import Run
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.controls import RANDOM, classes_without_others, left_out_sentence, random_base, shuffled_words
from attnmix.measures.documents import Corpus, Document
from attnmix.measures.identities import largest_errors
from attnmix.measures.input_parts import RULES, PartsReader, by_token, parts_obstacle
from attnmix.measures.mixing_tables import (
    CorpusMeasures,
    DocumentRows,
    by_review,
    derivative_tables,
    metrics,
    mixing_tables,
    parts_table,
    stack_rows,
    weighted_table,
)
from attnmix.measures.ratios import RATIOS
from attnmix.measures.swaps import next_donors
from attnmix.measures.token_ratios import labelled_ratio_rows
from attnmix.measures.variance_shares import MAX_TEXTS
from attnmix.models.checkpoint import check_max_length, load_tokenizer
from attnmix.models.encoding import batches_by_tokens, padded
from attnmix.models.families import family_of, present_names
from attnmix.models.loading import load_base
from attnmix.models.segments import read_segments

Task = TypeVar("Task", int, list[int])
"""The number of a document, or those of a batch."""

GRADIENT_DIRECTIONS = 8  # random directions of each derivative
SAMPLED_DOCUMENTS = 16  # in which the identities that take long are checked
MEASURES = "measures"  # the kind of batch that is no control
IDENTITY_ERRORS = "identity_errors"
PUBLISHED = "published"  # the folder that becomes `features/measure`


@exact_products()
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
    """Write what is measured of the reviews that `tokenize` drew, a block of them in memory at a time.

    Unfinished work is in `folder`. A `device` without float64 is replaced by the CPU.
    """
    first = run.checkpoints[checkpoints[0]]
    tokenizer = load_tokenizer(first)
    device = measuring_device(device)
    state = process_state(device)
    pairs = run.drawn_reviews.pairs
    corpus = Corpus(run.drawn_reviews)
    for name in checkpoints:
        check_max_length("capture.max_length", int(corpus.lengths.max()), run.checkpoints[name])
    samples = _draw_samples(corpus, parameters, seed)
    new_work = partial(
        CheckpointWork,
        folder=folder,
        corpus=corpus,
        batch_tokens=batch_tokens,
        process=state.process_index,
        processes=state.num_processes,
    )
    methods, matrices = parameters.methods, parameters.matrices
    works: dict[str, CheckpointWork] = {}
    gains: dict[str, npt.NDArray[np.float64]] = {}
    for name in checkpoints:
        base: Any = load_base(run.checkpoints[name])
        base.to(device)
        read_segments(base, tokenizer, pairs)
        methods = present_names("measure.methods", methods, family_of(base.config), RATIOS)
        matrices = present_names("measure.matrices", matrices, family_of(base.config))
        batches = BatchMeasurer(base, methods, tokenizer.pad_token_id)
        batches.read_corpus(_corpus_batches(corpus, batch_tokens, seed))
        documents = DocumentMeasurer(base, methods, matrices)
        work = new_work(checkpoint=name)
        work.measure(batches, samples.identities)
        work.control("shuffled_words", batches, partial(shuffled_words, seed=seed))
        work.gradients(documents, samples.gradients, parameters.gradient_max_length, seed)
        work.parts(base, samples.parts, parameters.parts_max_length)
        works[name] = work
        gains[name] = documents.gains()
    random_model: Any = random_base(first, seed)
    random_model.to(device)
    read_segments(random_model, tokenizer, pairs)
    random = new_work(checkpoint=RANDOM)
    random.control("random_weights", BatchMeasurer(random_model, methods, tokenizer.pad_token_id))
    state.wait_for_everyone()
    if not state.is_main_process:
        return
    measured = CorpusMeasures(
        rows={name: work.rows() for name, work in works.items()},
        random=random.gathered("random_weights"),
        identities={name: work.identities() for name, work in works.items()},
        methods=methods,
        sites=batches.sites,
        draws=Draws(len(corpus), BOOTSTRAP_SAMPLES, seed),
        seed=seed,
        gains=gains,
    )
    _log_left_out(corpus, measured.first, seed)
    derivatives = {name: work.derivatives(samples.gradients) for name, work in works.items()}
    parts = {name: work.read_parts(samples.parts) for name, work in works.items()}
    tables = mixing_tables(measured)
    tables["mixing_weighted"] = weighted_table(measured)
    tables.update(derivative_tables(derivatives, methods, matrices, seed))
    tables["parts"] = parts_table(parts, seed)
    for name, table in tables.items():
        writers.write_plot(f"measure/{name}", table, run.tables)
    writers.write_plot("measure/mixing_by_review", by_review(measured), run.tables)
    machine = {"computed_on": computed_on(arithmetic, device)}
    writers.write_metrics("measure", metrics(tables, methods) | machine, run.metrics_folder)
    writers.write_ratios(folder / PUBLISHED, methods, _token_ratios(works.values(), tokenizer, methods))
    publish_output(folder / PUBLISHED, run.measured)
    remove_unfinished(folder)
    logging.info("measured %d documents in %s", len(corpus), " and ".join(works))


class _Samples(NamedTuple):
    """The numbers of the documents in which more is measured, as that takes longer."""

    identities: Collection[int]
    """Every identity is checked."""
    gradients: Sequence[int]
    parts: Sequence[int]


def _draw_samples(corpus: Corpus, parameters: MeasureParameters, seed: int) -> _Samples:
    """Return the drawn documents; the longest one's identities are checked too."""
    identities = stratified_draw(corpus.labels, SAMPLED_DOCUMENTS, seed).tolist()
    gradients = stratified_draw(corpus.labels, parameters.gradient_documents, seed).tolist()
    parts = stratified_draw(corpus.labels, parameters.parts_documents, seed).tolist()
    longest = int(corpus.lengths.argmax())
    return _Samples({*identities, longest}, gradients, parts)


def _token_ratios(
    works: Iterable["CheckpointWork"], tokenizer: PreTrainedTokenizerFast, methods: Sequence[str]
) -> Iterator[pd.DataFrame]:
    """Yield the ratios of every document in every checkpoint."""
    for work in works:
        yield from work.token_ratios(tokenizer, methods)


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
    """One checkpoint's measures of the corpus under `folder`; `PUBLISHED` in it holds what is published as it is.

    This process takes every `processes`-th batch or document, from its own number on.
    """

    folder: Path
    checkpoint: str
    corpus: Corpus
    batch_tokens: int
    process: int
    processes: int

    def measure(self, measurer: BatchMeasurer, sampled: Collection[int]) -> None:
        """Write the measures of all documents, batch by batch; in those `sampled` every identity is checked."""
        for batch, file in self._remaining(MEASURES, self.batches(MEASURES)):
            documents = [self.corpus.document(number) for number in batch]
            all_measures = measurer.measures(documents, [number in sampled for number in batch])
            errors = largest_errors([measures.identities for measures in all_measures])
            token_arrays: dict[str, Any] = {IDENTITY_ERRORS: errors}
            for number, measures in zip(batch, all_measures, strict=True):
                token_arrays[str(number)] = measures.ratios
            _write_arrays(_token_file(file), token_arrays)
            _write_arrays(file, stack_rows([measures.sums() for measures in all_measures]))

    def control(self, name: str, measurer: BatchMeasurer, change: Callable[[Document], Document] | None = None) -> None:
        """Write the ratios of a control with a pass of its own, of the documents after a `change`."""
        for batch, file in self._remaining(name, self.batches(name)):
            documents = [self.corpus.document(number) for number in batch]
            if change is not None:
                documents = [change(document) for document in documents]
            _write_arrays(file, stack_rows(measurer.control_sums(name, documents)))

    def gradients(self, measurer: DocumentMeasurer, numbers: Sequence[int], max_length: int, seed: int) -> None:
        """Write the derivatives of some documents, truncated; directions are drawn for each of them.

        Inputs are exchanged with those of the next measured review of the same and of another predicted class.
        """
        tasks = [(number, self._gradient(number)) for number in numbers]
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
            own = self.corpus.document(number)
            yield own.take(np.arange(0)) if donor is None else self.corpus.document(donor)

    def derivatives(self, numbers: Sequence[int]) -> dict[str, dict[str, npt.NDArray[np.float64]]]:
        """Return what `gradients` wrote, by the name of the review."""
        return {self.corpus.document(number).name: dict(np.load(self._gradient(number))) for number in numbers}

    def parts(self, base: PreTrainedModel, numbers: Sequence[int], max_length: int) -> None:
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

    def read_parts(self, numbers: Sequence[int]) -> list[dict[str, npt.NDArray[np.float64]]]:
        """Return what `parts` wrote, review by review; nothing of a family without parts."""
        files = [self._parts_file(number) for number in numbers]
        return [dict(np.load(file)) for file in files if file.exists()]

    def _parts_file(self, number: int) -> Path:
        return self.folder / self.checkpoint / f"parts-{number}.npz"

    def identities(self) -> npt.NDArray[np.float64]:
        """Return the largest error and the number of documents of all batches `[2, levels, identities]`."""
        files = [_token_file(file) for _, file in self.batches(MEASURES)]
        errors, documents = np.stack([np.load(file)[IDENTITY_ERRORS] for file in files], axis=1)
        return np.stack([np.fmax.reduce(errors), documents.sum(0)])

    def rows(self) -> DocumentRows:
        """Return the sums of all documents, and of the control with shuffled words, with a row for each document."""
        rows = self.gathered(MEASURES) | self.gathered("shuffled_words")
        rows["document"] = self.corpus.texts["document"].to_numpy()
        return rows

    def gathered(self, kind: str) -> DocumentRows:
        """Return the sums of the documents, or of a control with a pass of its own, with a row for each document."""
        return _gather_rows(self.batches(kind), len(self.corpus), self.folder / self.checkpoint / kind)

    def token_ratios(self, tokenizer: PreTrainedTokenizerFast, methods: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Yield the ratios of the documents in their order, with what each token is."""
        for block in self.corpus.blocks:
            batches = self.batches(MEASURES, [block])
            files: dict[int, Path] = {}
            for batch, file in batches:
                files.update(dict.fromkeys(batch, _token_file(file)))
            for number in sorted(files):
                document = self.corpus.document(number)
                ratios_MLT = np.load(files[number])[str(number)]
                yield labelled_ratio_rows(self.checkpoint, document, methods, ratios_MLT, tokenizer)

    def _gradient(self, number: int) -> Path:
        return self.folder / self.checkpoint / f"gradient-{number}.npz"

    def batches(self, kind: str, blocks: Iterable[int] | None = None) -> Iterator[tuple[list[int], Path]]:
        """Yield the batches of documents, and the file that exists once each is done."""
        if blocks is None:
            blocks = self.corpus.blocks
        for block in blocks:
            for place, batch in enumerate(self.corpus.batches(block, self.batch_tokens)):
                yield batch, self.folder / self.checkpoint / f"{kind}-{block}-{place}.npz"

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
