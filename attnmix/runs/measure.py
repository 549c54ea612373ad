"""Measure how much attention mixes the tokens of the drawn test reviews and of the captured texts.

Streams batches of documents through each checkpoint in float32, and the captured documents one by one in float64.
Writes `features/measure/`, `reports/plots/measure/` and `reports/metrics/measure.json`; `docs/measures.md` says what
each number is.

The unfinished work is a file for each batch or document, from which a killed run resumes; each process takes its share
of them. Which documents share a batch does not depend on the number of processes, so the numbers do not either.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnmix.arithmetic.kernels import computed_on
from attnmix.core.device import exact_products, measuring_device, process_state
from attnmix.core.disk import check_disk, clear, publish
from attnmix.core.names import INPUT_PARTS
from attnmix.core.settings import MAX_PARTS_TOKENS, MeasureParameters
from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Draws
from attnmix.data.draw import stratified_draw
from attnmix.measures.batches import GROUPS, BatchMeasurer
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.controls import OWN_PASS, RANDOM, random_base, shuffled_words
from attnmix.measures.documents import CLASSES, Corpus, Document
from attnmix.measures.heads import record_heads
from attnmix.measures.input_parts import RULES, PartsReader, by_token, parts_obstacle, source_shares
from attnmix.measures.matrices import with_rollouts
from attnmix.measures.ratios import RATIOS
from attnmix.measures.shared import MAX_TEXTS
from attnmix.measures.sources import SOURCES
from attnmix.measures.tables import by_review, derivative_tables, metrics, mixing_tables, parts_table
from attnmix.models.capture_points import widths
from attnmix.models.checkpoint import check_max_length, load_tokenizer
from attnmix.models.encoding import batches_by_tokens, padded
from attnmix.models.families import family_of, present_names
from attnmix.models.loading import load_base
from attnmix.models.segments import read_segments
from attnmix.store import writers
from attnmix.store.files import atomic_path
from attnmix.store.heads import VECTOR_BYTES
from attnmix.store.runs import Run, arrays_folder

Unit = TypeVar("Unit")

FLOAT32_BYTES = 4
GRADIENT_DIRECTIONS = 8  # random directions of each derivative
SAMPLED_DOCUMENTS = 16  # in which the identities that take long are checked
SIZE_PARAMETERS = (
    "capture.max_length, capture.documents, capture.drawn, capture.texts, measure.matrices or measure.documents"
)
MEASURES = "measures"  # the kind of batch that is no control
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
    copies: int = 1,
) -> None:
    """Write what is measured of the texts that `tokenize` left, a block of them in memory at a time.

    Unfinished work is in `folder`; `copies` of the results will lie on its disk. A `device` without float64 is replaced
    by the CPU.
    """
    first = run.checkpoints[checkpoints[0]]
    tokenizer = load_tokenizer(first)
    device = measuring_device(device)
    state = process_state(device)
    corpus = Corpus(run)
    for name in checkpoints:
        check_max_length("capture.max_length", int(corpus.lengths.max()), run.checkpoints[name])
    reviews = np.flatnonzero(corpus.measured)
    demand = f"measure: {corpus.captured.sum()} captured texts and {len(reviews)} drawn reviews need"
    gradient_reviews = reviews[stratified_draw(corpus.labels[reviews], parameters.gradient_documents, seed)].tolist()
    parts_reviews = reviews[stratified_draw(corpus.labels[reviews], parameters.parts_documents, seed)].tolist()
    drawn = stratified_draw(corpus.labels, SAMPLED_DOCUMENTS, seed)
    sampled = {*drawn.tolist(), int(corpus.lengths.argmax())}
    share = (corpus, batch_tokens, state.process_index, state.num_processes)
    methods, matrices = parameters.methods, parameters.matrices
    works: dict[str, CheckpointWork] = {}
    gains: dict[str, npt.NDArray[np.float64]] = {}
    for name in checkpoints:
        path = run.checkpoints[name]
        base: Any = load_base(path)
        base.to(device)
        read_segments(base, tokenizer, run.pairs)
        methods = present_names("measure.methods", methods, family_of(base.config), RATIOS)
        matrices = present_names("measure.matrices", matrices, family_of(base.config))
        size = len(checkpoints) * _kept_bytes(base, methods, matrices, corpus)
        check_disk(demand, size, folder, SIZE_PARAMETERS, copies)
        work = works[name] = CheckpointWork(folder, name, *share)
        batches = BatchMeasurer(base, methods, tokenizer.pad_token_id)
        batches.read_corpus(_corpus_batches(corpus, reviews, batch_tokens, seed))
        work.measure(batches, sampled)
        work.control("shuffled_words", batches, partial(shuffled_words, seed=seed))
        documents = DocumentMeasurer(base, methods, matrices)
        work.captured_texts(documents)
        work.gradients(documents, gradient_reviews, parameters.gradient_max_length, seed)
        work.parts(base, parts_reviews, parameters.parts_max_length)
        gains[name] = documents.gains()
    random_model: Any = random_base(first, seed)
    random_model.to(device)
    read_segments(random_model, tokenizer, run.pairs)
    random = CheckpointWork(folder, RANDOM, *share)
    random.control("random_weights", BatchMeasurer(random_model, methods, tokenizer.pad_token_id))
    state.wait_for_everyone()
    if not state.is_main_process:
        return
    blocks = {name: work.blocks() for name, work in works.items()}
    identities = {name: work.identities() for name, work in works.items()}
    derivatives = {name: work.derivatives(gradient_reviews) for name, work in works.items()}
    parts = {name: work.read_parts(parts_reviews) for name, work in works.items()}
    with TemporaryFile(dir=folder) as file:
        draws = Draws(list(corpus.measured_by_block().values()), BOOTSTRAP_SAMPLES, seed, file)
        all_blocks = blocks | {RANDOM: random.blocks()}
        sources = SOURCES if run.pairs else ()
        tables = mixing_tables(all_blocks, identities, gains, methods, batches.sites, draws, seed, sources)
    tables |= derivative_tables(derivatives, methods, matrices, seed)
    tables["parts"] = parts_table(parts, seed)
    for name, table in tables.items():
        writers.write_plot(f"measure/{name}", table, run.tables)
    writers.write_plot("measure/mixing_by_review", by_review(blocks, methods), run.tables)
    machine = {"computed_on": computed_on(arithmetic, device)}
    writers.write_metrics("measure", metrics(tables, methods) | machine, run.metrics_folder)
    writers.write_layer_parts(folder / PUBLISHED, [stack.parts() for stack in batches.family.stacks])
    rows = (row for work in works.values() for row in work.token_ratios(tokenizer, methods))
    writers.write_ratios(folder / PUBLISHED, methods, rows)
    publish(folder / PUBLISHED, run.measured)
    clear(folder)
    logging.info("measured %d documents in %s", len(corpus), " and ".join(works))


def _corpus_batches(
    corpus: Corpus, reviews: npt.NDArray[np.int64], batch_tokens: int, seed: int
) -> Iterator[list[Document]]:
    """Yield batches of at most `MAX_TEXTS` measured reviews, from which the control `corpus_value` takes its values."""
    drawn = np.sort(reviews[stratified_draw(corpus.labels[reviews], min(len(reviews), MAX_TEXTS), seed)])
    if len(drawn) > 1:
        for batch in batches_by_tokens(corpus.lengths[drawn].tolist(), batch_tokens):
            yield [corpus.document(number) for number in drawn[batch].tolist()]


def _kept_bytes(base: PreTrainedModel, methods: list[str], matrices: list[str], corpus: Corpus) -> int:
    """Return the size of the largest arrays that `measure` keeps of a checkpoint."""
    sites, heads, hidden = widths(base), base.config.num_attention_heads, base.config.hidden_size
    layers = max(site.layer for site in sites)
    captured_T, measured = corpus.lengths[corpus.captured].astype(np.int64), int(corpus.measured.sum())
    vectors_T = heads * hidden * captured_T
    vectors_T[layers * vectors_T * FLOAT32_BYTES > VECTOR_BYTES] = 0  # not kept of longer texts
    queries_and_keys_T = 2 * heads * (getattr(base.config, "head_dim", None) or hidden // heads) * captured_T
    matrices_T = (len(with_rollouts(matrices)) + 1) * captured_T**2  # with the parts
    captured_numbers = int((vectors_T + queries_and_keys_T + matrices_T).sum())
    ratio_numbers = len(methods) * int(corpus.lengths.sum(dtype=int))
    groups = 2 * layers * (len(methods) * sum(map(len, GROUPS.values())) + hidden)  # in float64
    geometry = measured * len(sites) * max(sites.values())
    return FLOAT32_BYTES * int(layers * (captured_numbers + ratio_numbers) + measured * groups + geometry)


def parts_matrix(base: PreTrainedModel, document: Document) -> dict[str, torch.Tensor]:
    """Return `source_shares` of a document by their name; nothing of a long one, or in a family without parts."""
    if len(document) > MAX_PARTS_TOKENS or parts_obstacle(family_of(base.config)):
        return {}
    return {INPUT_PARTS: source_shares(PartsReader(base).read(padded([document.ids.tolist()], 0, base.device)))}


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
            measures = measurer.measures(documents, [number in sampled for number in batch])
            arrays = _stacked([each.sums() for each in measures if each.document.measured])
            errors = np.stack([each.identities for each in measures])
            arrays["identities"] = np.stack([np.fmax.reduce(errors), (~np.isnan(errors)).sum(0)])
            arrays |= {f"ratios_{number}": each.ratios for number, each in zip(batch, measures, strict=True)}
            _write_arrays(file, arrays)

    def control(self, name: str, measurer: BatchMeasurer, change: Callable[[Document], Document] | None = None) -> None:
        """Write the ratios of a control with a pass of its own, of the documents in the statistics after a `change`."""
        for batch, file in self._remaining(name, self.batches(name)):
            documents = [self.corpus.document(number) for number in batch]
            documents = [change(document) for document in documents] if change else documents
            _write_arrays(file, _stacked(measurer.control_sums(name, documents)))

    def captured_texts(self, measurer: DocumentMeasurer) -> None:
        """Write contribution matrices of the captured texts and what goes through their heads, as published."""
        names, published = self.corpus.texts.loc[self.corpus.captured, "document"], self.folder / PUBLISHED
        heads = [arrays_folder("heads", self.checkpoint, name, published) for name in names]
        numbers = np.flatnonzero(self.corpus.captured).tolist()
        for number, folder in self._remaining("captured texts", zip(numbers, heads, strict=True)):
            document = self.corpus.document(number)
            contributions = arrays_folder("contributions", self.checkpoint, document.name, published)
            contributions.mkdir(parents=True, exist_ok=True)
            matrices = measurer.contributions(document.ids) | parts_matrix(measurer.base, document)
            for method, matrix in matrices.items():
                attributes = {"method": method, "checkpoint": self.checkpoint, "document": document.name}
                array = matrix.float().cpu().numpy()
                writers.write_matrix(contributions, method, array, ("layer", "token", "source"), attributes)
            part = folder.with_name(f"{folder.name}.part")
            writers.write_heads(part, record_heads(measurer.base, document.ids, measurer.layers))
            part.rename(folder)  # once both are whole

    def gradients(self, measurer: DocumentMeasurer, numbers: Sequence[int], max_length: int, seed: int) -> None:
        """Write the derivatives of some documents, truncated; directions are drawn for each of them.

        Inputs are exchanged with those of the next measured review of the same and of another predicted class.
        """
        for number, file in self._remaining("gradients", [(number, self._gradient(number)) for number in numbers]):
            document = self.corpus.document(number)
            # The same for a review in both checkpoints, so that they are compared along the same directions.
            document_seed = np.random.SeedSequence([seed, crc32(document.name.encode())]).generate_state(1)[0]
            ids, *donors = (each.cut(max_length).ids for each in (document, *self._donors(number)))
            _write_arrays(file, measurer.derivatives(ids, donors, GRADIENT_DIRECTIONS, int(document_seed)))

    def _donors(self, number: int) -> Iterator[Document]:
        """Yield the next measured review of the same and of another predicted class; without one, one of no tokens."""
        others = np.roll(np.arange(len(self.corpus)), -number)[1:]
        others = others[self.corpus.measured[others]]
        same = self.corpus.predicted[others] == self.corpus.predicted[number]
        for chosen in (others[same], others[~same]):
            yield self.corpus.document(chosen[0]) if len(chosen) else self.corpus.document(number).take(chosen)

    def derivatives(self, numbers: Sequence[int]) -> dict[str, dict[str, npt.NDArray[np.float64]]]:
        """Return what `gradients` wrote, by the name of the review."""
        return {self.corpus.document(number).name: dict(np.load(self._gradient(number))) for number in numbers}

    def parts(self, base: PreTrainedModel, numbers: Sequence[int], max_length: int) -> None:
        """Write what of each vector of some documents, truncated, is the token's own since the input, by rule."""
        family = family_of(base.config)
        if obstacle := parts_obstacle(family):
            logging.info("parts: absent in the model family %s: %s", family.model_type, obstacle)
            return
        readers = {rule: PartsReader(base, rule) for rule in RULES}
        for number, file in self._remaining("parts", [(number, self._parts_file(number)) for number in numbers]):
            ids = self.corpus.document(number).cut(max_length).ids.tolist()
            batch = padded([ids], 0, base.device)
            quantities = {rule: by_token(reader.read(batch)) for rule, reader in readers.items()}
            _write_arrays(file, {rule: array_QKT.double().cpu().numpy() for rule, array_QKT in quantities.items()})

    def read_parts(self, numbers: Sequence[int]) -> list[dict[str, npt.NDArray[np.float64]]]:
        """Return what `parts` wrote, review by review; nothing of a family without parts."""
        files = [self._parts_file(number) for number in numbers]
        return [dict(np.load(file)) for file in files if file.exists()]

    def _parts_file(self, number: int) -> Path:
        return self.folder / self.checkpoint / f"parts-{number}.npz"

    def identities(self) -> npt.NDArray[np.float64]:
        """Return the largest error and the number of documents of all batches `[2, levels, identities]`."""
        errors, documents = np.stack([np.load(file)["identities"] for _, file in self.batches(MEASURES)], axis=1)
        return np.stack([np.fmax.reduce(errors), documents.sum(0)])

    def blocks(self) -> "list[StoredBlock]":
        """Return the blocks of documents in the statistics."""
        return [StoredBlock(self, block) for block in self.corpus.measured_by_block()]

    def token_ratios(self, tokenizer: PreTrainedTokenizerFast, methods: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Yield `ratio_rows` of the documents in their order, with what each token is."""
        for block in self.corpus.blocks:
            files = {number: file for batch, file in self.batches(MEASURES, [block]) for number in batch}
            for number in sorted(files):
                document = self.corpus.document(number)
                ratios_MLT = np.load(files[number])[f"ratios_{number}"]
                rows = ratio_rows(self.checkpoint, document.name, methods, ratios_MLT)
                columns = {
                    "token": tokenizer.convert_ids_to_tokens(document.ids.tolist()),
                    "word": [None if word < 0 else word for word in document.words.tolist()],
                    "token_class": [CLASSES[place] for place in document.classes],
                }
                repeated = {name: values * ratios_MLT.shape[1] for name, values in columns.items()}
                yield rows.assign(**repeated, in_statistics=document.measured).astype({"word": "Int32"})

    def _gradient(self, number: int) -> Path:
        return self.folder / self.checkpoint / f"gradient-{number}.npz"

    def batches(self, kind: str, blocks: Iterable[int] | None = None) -> Iterator[tuple[list[int], Path]]:
        """Yield the batches of documents, and the file that exists once each is done; controls are of measured ones."""
        for block in self.corpus.blocks if blocks is None else blocks:
            batches = self.corpus.batches(block, self.batch_tokens, measured=kind != MEASURES)
            for place, batch in enumerate(batches):
                yield batch, self.folder / self.checkpoint / f"{kind}-{block}-{place}.npz"

    def _remaining(self, kind: str, units: Iterable[tuple[Unit, Path]]) -> Iterator[tuple[Unit, Path]]:
        """Yield this process's share of the units whose file does not exist yet."""
        remaining = [unit for unit in islice(units, self.process, None, self.processes) if not unit[1].exists()]
        yield from tqdm(remaining, desc=f"{self.checkpoint}: {kind}", disable=None)


@dataclass(frozen=True)
class StoredBlock:
    """A block of documents in the statistics of one checkpoint, whose arrays are read when they are asked for."""

    work: CheckpointWork
    number: int

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return an array of the documents, in their order."""
        documents, parts, control = [], [], name.removesuffix("_counts")
        for batch, file in self.work.batches(control if control in OWN_PASS else MEASURES, [self.number]):
            if measured := [number for number in batch if self.work.corpus.measured[number]]:
                documents += measured
                parts.append(np.load(file)[name])
        return np.asarray(np.concatenate(parts)[np.argsort(documents)])


def ratio_rows(
    checkpoint: str, document: str, methods: Sequence[str], ratios_MLT: npt.NDArray[np.float32]
) -> pd.DataFrame:
    """Return the ratios of one document, a row for each layer and token: `checkpoint, document, layer, position`."""
    _, layers, tokens = ratios_MLT.shape
    keys = [[checkpoint], [document], range(1, layers + 1), range(tokens)]
    index = pd.MultiIndex.from_product(keys, names=["checkpoint", "document", "layer", "position"])
    return pd.DataFrame(ratios_MLT.reshape(len(methods), -1).T, index, list(methods)).reset_index()


def _stacked(documents: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    return {name: np.stack([each[name] for each in documents]) for name in (documents[0] if documents else ())}


def _write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    with atomic_path(path) as part, part.open("wb") as file:
        np.savez(file, **arrays)
