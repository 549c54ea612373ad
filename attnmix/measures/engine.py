"""Measurement of texts in one model, in batches or one by one, for the Python API, the stages and the page.

There are three kinds of quantities:

    `STATISTICS`    measured together with the ratios, in one forward pass of a padded batch
    `OWN_PASSES`    ratios of modified documents, or of a model with random weights, in separate forward passes
    `SAMPLED`       measured in a sample of single texts, because the cost is quadratic in the text length

A `Sink` stores the results and lists the remaining tasks. A sink is either a `Measurements` object in memory or a set
of files of a stage, from which an interrupted run can resume. A new quantity requires an entry in `STATISTICS`,
`OWN_PASSES` or `SAMPLED`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from attnmix.core.draw import stratified_draw
from attnmix.core.lazy import cached_property
from attnmix.core.names import (
    ALL_DONORS,
    EXCHANGE,
    INPUT_PARTS,
    NEUTRAL,
    OTHER_CLASS,
    OTHER_TEXTS,
    OWN_SHARE,
    SAME_CLASS,
    TOTAL_EFFECTS,
)
from attnmix.core.progress import look_ahead, show_progress, track
from attnmix.core.settings import BATCH_TOKENS
from attnmix.core.statistics import Sums
from attnmix.core.threads import few_threads
from attnmix.measures.batches import STATISTICS, BatchMeasurer, BatchPass, DocumentMeasures, DocumentSums, stack_sums
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.controls import random_model, shuffled_words
from attnmix.measures.documents import Corpus, Document, Texts
from attnmix.measures.exchange import (
    Displacements,
    choose_positions,
    draw_exchanged_texts,
    exchange_matrix,
    exchange_sums,
    exchanged_texts,
    measure_exchange,
    own_shares,
)
from attnmix.measures.input_parts import QUANTITIES, RULES, PartsReader, by_token, document_shares, parts_obstacle
from attnmix.measures.matrices import TOKEN_POSITIONS
from attnmix.measures.neutral_texts import NEUTRAL_TEXTS
from attnmix.measures.swaps import SWAPS, document_swaps, next_donors
from attnmix.measures.variance_shares import draw_texts
from attnmix.models.encoding import batches_by_tokens
from attnmix.models.families import family_of, layer_counts
from attnmix.models.segments import read_segments

Array = npt.NDArray[Any]

SEED = 111
"""The seed of all random draws in the Python API and on pages; stages use `seed` of params.yaml."""
EXCHANGE_POSITIONS = 4  # maximum number of measured positions per text if donors are other texts
PRECISION = float(np.finfo(np.float32).eps)
IDENTITY_TEXTS = 16  # number of texts of a stage in which all identities are checked
DEVICE_PASSES_AHEAD = 1  # number of passes started on a GPU while the host computes eigenvalues of the previous batch
MEASURES = "measures"
"""The kind of task that measures the ratios and the `STATISTICS`."""


class Task(NamedTuple):
    """Texts that are measured together: a padded batch, or one text."""

    name: str
    numbers: Sequence[int]
    """Indices of the texts."""
    is_sampled: bool = True
    """False for texts outside the sample; only the ratios of these texts are measured."""


def batch_tasks(texts: Texts | Corpus, batch_tokens: int, sample: Sequence[int] | None = None) -> Iterator[Task]:
    """Yield tasks for batches of texts with similar lengths. The tasks do not depend on the number of processes.

    Args:
        texts: The texts.
        batch_tokens: The maximum number of tokens per batch, including padding.
        sample: Indices of the texts whose statistics are measured; None for all texts. The batches of the sample come
            first and combine texts of all row groups; each batch of other texts has texts of a single row group. A row
            group is a part of the file that is loaded as a whole.
    """
    if sample is not None:
        yield from sampled_tasks(texts, batch_tokens, sample)
    all_numbers = np.arange(len(texts))
    for row_group in texts.row_groups:
        numbers = all_numbers[texts.rows(row_group)]
        if sample is not None:
            numbers = np.setdiff1d(numbers, sample)  # without the texts of the sample
        for place, batch in enumerate(_group_by_length(texts, numbers, batch_tokens)):
            yield Task(f"{row_group}-{place}", batch, is_sampled=sample is None)


def _group_by_length(texts: Texts | Corpus, numbers: npt.NDArray[np.integer], batch_tokens: int) -> list[list[int]]:
    """Return batches of the texts whose indices are in `numbers`, each batch as a list of indices."""
    batches = batches_by_tokens(texts.lengths[numbers].tolist(), batch_tokens)
    return [numbers[batch].tolist() for batch in batches]


def sampled_tasks(texts: Texts | Corpus, batch_tokens: int, sample: Sequence[int] | None = None) -> list[Task]:
    """Return the tasks of `batch_tasks` for the texts with indices in `sample`, or all tasks if `sample` is None."""
    if sample is None:
        return list(batch_tasks(texts, batch_tokens))
    batches = _group_by_length(texts, np.asarray(sample), batch_tokens)
    return [Task(f"sample-{place}", batch) for place, batch in enumerate(batches)]


def text_tasks(numbers: Iterable[int]) -> list[Task]:
    """Return one task for each text whose index is in `numbers`."""
    return [Task(str(number), [number]) for number in numbers]


class Sink(Protocol):
    """Storage for the results of tasks, by kind of task."""

    def remaining(self, kind: str, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield the tasks without a stored result, and show their progress."""

    def write(self, kind: str, task: Task, sums: Sequence[DocumentSums]) -> None:
        """Store the sums of a task's texts."""

    def write_token_measures(self, task: Task, measures: Sequence[DocumentMeasures]) -> None:
        """Store the measures of single tokens from a task of the kind `MEASURES`; called before `write`."""

    def read(self, kind: str, tasks: Iterable[Task]) -> dict[str, Sums]:
        """Return the sums of all texts of `tasks`, in the order of the text indices."""


@dataclass
class Measurements:
    """Measurements of texts in one model, in memory."""

    texts: Texts
    batch_tokens: int = BATCH_TOKENS
    """The maximum number of tokens per batch, including padding."""
    ratios: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    """The ratios of each text `[methods, layers, tokens]`."""
    sums: dict[str, Sums] = field(default_factory=dict)
    """The sums of all texts by quantity."""
    measured: set[str] = field(default_factory=set)
    """The names of the quantities passed to `Engine.add_sums`. A quantity has one, several or no entries in `sums`."""
    matrices: dict[int, dict[str, Array]] = field(default_factory=dict)
    """Contribution matrices `[layers, tokens, sources]` by text index and name.

    The matrices include rollouts, `EXCHANGE` and `INPUT_PARTS`.
    """
    heads: dict[int, dict[str, Array]] = field(default_factory=dict)
    """The tensors of the attention heads from `DocumentMeasurer.matrices_and_heads`, by text index and name."""
    own_share: dict[tuple[int, int, str], dict[str, Sums]] = field(default_factory=dict)
    """The sums of own shares and of total effects `[texts, layers]`, by `OwnShareSample` and name."""
    exchanges: dict[int, tuple[list[str], Displacements]] = field(default_factory=dict)
    """The results of `Engine.token_exchange`, by text index."""
    token_shares: dict[int, Array] = field(default_factory=dict)
    """The own share of each token `[layers, tokens]` for the page, by text index."""
    parts: dict[tuple[Any, ...], dict[str, Array]] = field(default_factory=dict)
    """The results of `Engine.parts`, by text index, rule and positions."""
    pages: dict[bool, Any] = field(default_factory=dict)
    """The cached content of the page. The key is True if the page contains attention heads."""
    layouts: Any = None
    """The cached maps of the page."""
    rows: dict[tuple[str, int], DocumentSums] = field(default_factory=dict)
    """The sums of single texts by kind of task and text index, until `read` stacks them."""

    def remaining(self, kind: str, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield all tasks, and show their progress."""
        yield from track(list(tasks), kind)

    def write(self, kind: str, task: Task, sums: Sequence[DocumentSums]) -> None:
        """Store the sums of a task's texts."""
        for number, row in zip(task.numbers, sums, strict=True):
            self.rows[kind, number] = row

    def write_token_measures(self, task: Task, measures: Sequence[DocumentMeasures]) -> None:
        """Store the ratios of a task's texts."""
        for number, document_measures in zip(task.numbers, measures, strict=True):
            self.ratios[number] = document_measures.ratios

    def read(self, kind: str, tasks: Iterable[Task]) -> dict[str, Sums]:
        """Return the sums of all texts of `tasks`, in the order of the text indices, and remove them from `rows`."""
        numbers: list[int] = []
        for task in tasks:
            numbers.extend(task.numbers)
        rows = [self.rows.pop((kind, number)) for number in sorted(numbers)]
        return stack_sums(rows)


def pass_tokens(documents: Sequence[Document]) -> int:
    """Return the number of tokens, including padding, in one forward pass of `documents`."""
    return len(documents) * max(map(len, documents))


def corpus_sample(texts: Texts | Corpus, seed: int) -> list[int]:
    """Return the indices of the texts that the control `corpus_value` averages over."""
    drawn: list[int] = draw_texts(texts.labels, seed).tolist()
    return drawn


class Engine:
    """Measures texts in one model. The engine creates further models (such as a float64 copy) when it needs them."""

    def __init__(
        self,
        base: PreTrainedModel,
        methods: Sequence[str],
        padding: int,
        *,
        tokenizer: Any = None,
        pairs: bool = False,
        batch_tokens: int = BATCH_TOKENS,
        seed: int = SEED,
        check_once: bool = False,
        identity_texts: int | None = None,
        neutral_donors: int = 0,
    ) -> None:
        """Store a model and the settings of its measurement.

        An identity is an equation that the model's vectors must satisfy. A donor is a text whose words replace those of
        a measured text.

        Args:
            base: A model without a task head, in float32 and eval mode, with observable attention.
            methods: Names of the mixing ratios. Ratios that the model's family lacks are ignored.
            padding: ID of the padding token.
            tokenizer: The tokenizer for neutral donor texts. If `pairs` is True, the tokenizer also determines the
                segments of the inputs of the model with random weights (see `random`).
            pairs: True for pairs of texts.
            batch_tokens: Maximum number of tokens per batch, including padding.
            seed: Seed of all random draws.
            check_once: True to check `SAMPLED_IDENTITIES` (the identities with slow checks) only in the first call of
                `measure_texts`.
            identity_texts: Number of sampled texts in which `SAMPLED_IDENTITIES` are checked, by default
                `IDENTITY_TEXTS`. The longest text is always checked, too.
            neutral_donors: Number of neutral texts (everyday statements) that serve as donors. If it is 0, the donors
                are other texts or, for a single text, all available neutral texts.
        """
        self.base = base
        self.tokenizer = tokenizer
        self.pairs = pairs
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.batches = BatchMeasurer(base, methods, padding)
        self.methods = self.batches.methods
        self.check_once = check_once
        self.identity_texts = IDENTITY_TEXTS if identity_texts is None else identity_texts
        self.neutral_donors = neutral_donors
        self.is_checked = False  # True after the first call of `measure_texts`

    @cached_property
    def single(self) -> DocumentMeasurer:
        """The measurer of single texts."""
        return DocumentMeasurer(self.base, self.methods)

    @cached_property
    def random(self) -> Engine:
        """An engine for a model with the same architecture and random weights."""
        model: Any = random_model(self.base.config, self.seed)
        model.to(self.base.device)
        read_segments(model, self.tokenizer, self.pairs)  # registers a hook for the segments of pairs
        return Engine(model, self.methods, self.batches.pad_token_id, batch_tokens=self.batch_tokens, seed=self.seed)

    @cached_property
    def readers(self) -> dict[str, PartsReader]:
        """Objects that decompose the model's vectors into parts from each input token, by name of the rule."""
        return {rule: PartsReader(self.base, rule) for rule in RULES}

    def measure_texts(
        self,
        texts: Texts | Corpus,
        statistics: Collection[str],
        sink: Sink,
        sample: Sequence[int] | None = None,
    ) -> None:
        """Measure the ratios of all texts and the `statistics` of a sample, batch by batch, and store them in `sink`.

        `sample` contains the indices of the sampled texts; None for all texts. Batches of sampled texts combine several
        row groups, because each row group contains only a few sampled texts. An identity is an equation that the
        model's vectors must satisfy. Some identities are checked only in a few texts; if `check_once` is True, these
        identities are checked only in the first call of this method.
        """
        if "corpus_value" in statistics:
            self.batches.read_corpus(self._batch_corpus(texts))
        skips_identities = self.check_once and self.is_checked
        checked = set[int]() if skips_identities else self._choose_identity_sample(texts, sample)
        tasks = sink.remaining(MEASURES, batch_tasks(texts, self.batch_tokens, sample=sample))
        passes = self._start_passes(tasks, texts, statistics, checked)
        # `passes_ahead` further passes are started before this loop waits for the results of a pass.
        passes_ahead = 0 if self.base.device.type == "cpu" else DEVICE_PASSES_AHEAD
        for task, batch_pass in look_ahead(passes, passes_ahead):
            measures = batch_pass.wait_for_results()
            sink.write_token_measures(task, measures)
            sink.write(MEASURES, task, [document_measures.sums() for document_measures in measures])
        self.is_checked = True

    def _start_passes(
        self, tasks: Iterable[Task], texts: Texts | Corpus, statistics: Collection[str], checked: Collection[int]
    ) -> Iterator[tuple[Task, BatchPass]]:
        """Yield each task with the forward pass of its texts; `BatchPass.wait_for_results` returns the measures.

        On a GPU, the pass may still be running. The `statistics` are quantities that are measured in addition to the
        ratios, except in tasks outside the sample. All identities (equations that the model's vectors must satisfy) are
        checked in the texts whose indices are in `checked`.
        """
        for task in tasks:
            documents = [texts.document(number) for number in task.numbers]
            has_all_identities = [number in checked for number in task.numbers]
            task_statistics = statistics if task.is_sampled else ()
            with few_threads(pass_tokens(documents)):
                batch_pass = self.batches.start(documents, has_all_identities, task_statistics)
            yield task, batch_pass

    def measure_control(
        self,
        name: str,
        texts: Texts | Corpus,
        sink: Sink,
        change: Callable[[Document], Document] | None = None,
        sample: Sequence[int] | None = None,
    ) -> None:
        """Measure the ratios of texts modified by `change`, batch by batch, and store the sums of the ratios in `sink`.

        `name` is the name of the control, and `sample` contains the indices of the measured texts; None for all texts.
        If `change` is None, the texts are not modified.
        """
        for task in sink.remaining(name, sampled_tasks(texts, self.batch_tokens, sample)):
            documents = [texts.document(number) for number in task.numbers]
            if change is not None:
                documents = [change(document) for document in documents]
            with few_threads(pass_tokens(documents)):
                sums = self.batches.control_sums(name, documents)
            sink.write(name, task, sums)

    def measure_single_texts(
        self, kind: str, numbers: Iterable[int], sink: Sink, measure: Callable[[int], DocumentSums]
    ) -> None:
        """Measure single texts, each in a separate task, and store their sums in `sink` under the name `kind`.

        `numbers` contains the indices of the texts, and `measure` returns the sums of the text with an index. The sink
        omits texts whose sums it has already stored.
        """
        for task in sink.remaining(kind, text_tasks(numbers)):
            (number,) = task.numbers
            sink.write(kind, task, [measure(number)])

    def add_sums(self, measurements: Measurements, names: Collection[str]) -> None:
        """Measure the quantities in `names` that `measurements` lacks, and add their sums.

        A name is `MEASURES` (the ratios) or a member of `STATISTICS` (measured in the same forward passes as the
        ratios), `OWN_PASSES` (in separate passes) or `SAMPLED` (in a sample of the texts). The ratios are measured
        together with any of the `STATISTICS`. Each pass stores the sums of single texts in `measurements`, whose method
        `read` returns them for all measured texts.
        """
        texts = measurements.texts
        missing = [name for name in names if name not in measurements.measured]
        statistics = [name for name in STATISTICS if name in missing]
        if statistics or MEASURES in missing:
            self.measure_texts(texts, statistics, measurements)
            measurements.sums.update(measurements.read(MEASURES, batch_tasks(texts, self.batch_tokens)))
            measurements.measured.add(MEASURES)
        for name in missing:
            if name in OWN_PASSES:
                OWN_PASSES[name](self, texts, measurements)
                measurements.sums.update(measurements.read(name, batch_tasks(texts, self.batch_tokens)))
            elif name in SAMPLED:
                measurements.sums.update(self.sampled_sums(measurements, name))
        measurements.measured.update(missing)

    def sampled_sums(
        self, measurements: Measurements, name: str, max_texts: int | None = None, max_length: int | None = None
    ) -> dict[str, Sums]:
        """Measure the quantity `name` of `SAMPLED` in a sample of the texts; return its sums by name.

        The sums have a row for every text; the counts are 0 for texts outside the sample. The sample has at most
        `max_texts` texts, stratified by class, and at most `max_length` tokens per text. If there are several kinds of
        donor texts, the names of the sums for one kind end with this kind. Sums under names other than `name` are
        omitted if all their counts are 0, for example because the texts have no donors of the kind.
        """
        texts = measurements.texts
        quantity = SAMPLED[name]
        numbers: list[int] = stratified_draw(texts.labels, max_texts or quantity.max_texts, self.seed).tolist()
        measure = partial(quantity.measure, self, measurements, max_length or quantity.max_length)
        self.measure_single_texts(name, numbers, measurements, measure)
        sums_of_sample = measurements.read(name, text_tasks(numbers))
        sums_of_all_texts = {}
        for key, sums in sums_of_sample.items():
            has_counts = bool(sums.counts.any())
            if key == name or has_counts:
                sums_of_all_texts[key] = sums.scatter(numbers, len(texts))
        return sums_of_all_texts

    def add_matrices(
        self,
        measurements: Measurements,
        number: int,
        names: Collection[str],
        with_heads: bool = False,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute the matrices and rollouts in `names` that `measurements` lacks for the text with index `number`.

        If `with_heads` is True, also add the tensors of the text's attention heads. `advance` is a callback that shows
        progress: it runs after each layer, but not if attention heads are computed.
        """
        stored = measurements.matrices.setdefault(number, {})  # the text's matrices by name
        # `EXCHANGE` requires donor texts. The other matrices are computed by `single`, the measurer of single texts.
        if EXCHANGE in names and EXCHANGE not in stored:
            stored[EXCHANGE] = self._exchange_matrix(measurements.texts, number)
        missing = [name for name in self._select_defined(names) if name not in stored]
        needs_heads = with_heads and number not in measurements.heads
        if not missing and not needs_heads:
            return
        ids = measurements.texts.document(number).ids
        with few_threads(len(ids)):
            if needs_heads:
                matrices, heads = self.single.matrices_and_heads(ids, missing)
                measurements.heads[number] = heads
            else:
                matrices = self.single.contributions(ids, missing, advance)
        stored.update({name: matrix.cpu().numpy() for name, matrix in matrices.items()})

    def _select_defined(self, matrices: Collection[str]) -> list[str]:
        """Return the names in `matrices` that are defined for the model's family."""
        return family_of(self.base.config).present(matrices)

    def lacks_matrices(self, measurements: Measurements, names: Collection[str], with_heads: bool = False) -> bool:
        """Return True if `add_matrices` has to compute a result for any of the texts.

        If the result is True, also create the copy of the model that `add_matrices` needs. The copy must not be created
        later, when forward passes may run in other threads.
        """
        required = set(self._select_defined(names))
        for number in range(len(measurements.texts)):
            stored = measurements.matrices.get(number, {})  # the text's matrices by name
            lacks_heads = with_heads and number not in measurements.heads
            missing = required - stored.keys()
            if lacks_heads or missing:
                self.single.create_copy()
                return True
        return False

    def add_input_parts(self, measurements: Measurements, number: int) -> None:
        """Add the share of each input token in each vector of the text with index `number`.

        Shares that are already in `measurements` are not computed again. Nothing is added if `input_parts` returns {}.
        """
        stored = measurements.matrices.setdefault(number, {})  # the text's matrices by name
        if INPUT_PARTS not in stored:
            stored.update(self.input_parts(measurements.texts.document(number)))

    def input_parts(self, document: Document) -> dict[str, Array]:
        """Return the share of each input token in each vector of a text `[layers, tokens, sources]`.

        The key of the result is `INPUT_PARTS`. The result is {} if the model's family is not supported or the text is
        too long. Shares are computed in the model's dtype, because float32 takes half the time of float64.
        """
        if parts_obstacle(family_of(self.base.config)) is not None:
            return {}
        with few_threads(len(document)):
            shares_LTT = document_shares(self.readers["chord"], document.ids)
        if shares_LTT is None:
            return {}
        return {INPUT_PARTS: shares_LTT.float().cpu().numpy()}

    def parts(self, document: Document, rule: str, positions: Sequence[int] | None) -> dict[str, Array]:
        """Return measures, by name, of the parts from each input token in a text's vectors, computed in float64.

        `rule`, one of `RULES`, determines how the output of an activation function is attributed to the parts of its
        input. If `positions` is None, the result is that of `PartsReader.read`: measures of all tokens, such as the
        lengths of the parts. Otherwise, it is that of `PartsReader.read_rows`: only projections of the parts, for the
        tokens at `positions`.
        """
        reader = PartsReader(self.single.base, rule)
        batch = self.batches.batch([document])
        if positions is not None:
            parts = reader.read_rows(batch, positions)
        else:
            with show_progress("parts", reader.steps(len(document))) as progress:
                parts = reader.read(batch, progress.advance)
        return {name: values.cpu().numpy() for name, values in parts.items()}

    def parts_sums(self, document: Document, rules: Iterable[str]) -> DocumentSums:
        """Return the sums of the `QUANTITIES` over the tokens of a text, `[quantities, levels]`, by rule.

        The quantities describe the decomposition of the text's vectors into parts from each input token. The levels are
        the input of the first layer and the output of each layer. A rule determines how the output of an activation
        function is attributed to the parts of its input.
        """
        batch = self.batches.batch([document])
        sums = {}
        for rule in rules:
            parts = self.readers[rule].read(batch)
            quantities_QKT = by_token(parts)
            sums[rule] = Sums.over_tokens(quantities_QKT.double().cpu().numpy())
        return sums

    def exchange(
        self, texts: Texts, number: int, document: Document, positions: npt.NDArray[np.int32]
    ) -> tuple[list[str], Displacements]:
        """Return the kinds of donors, and the displacements of vectors if tokens are exchanged with each kind of donor.

        A donor is a text whose tokens replace those of the document. If there are several kinds of donors, the list
        starts with `all`; the displacements have no entry for `all`.

        Args:
            texts: All texts, including the candidate donors.
            number: Index of the text.
            document: The text, or its first tokens.
            positions: Positions of the measured tokens.
        """
        donors = self._draw_exchanged_texts(texts, number, document)
        displacements = measure_exchange(self.base, document, donors, positions, self.batch_tokens)
        kinds = list(donors)
        if len(kinds) > 1:
            kinds = [ALL_DONORS, *kinds]
        return kinds, displacements

    def _draw_exchanged_texts(
        self, texts: Texts, number: int, document: Document
    ) -> dict[str, list[npt.NDArray[np.int32]]]:
        """Return, for each kind of donor, one array of token IDs `[T]` per donor: the document with the donor's words.

        A donor is a text whose words replace those of the document. `document` is the text with index `number` in
        `texts`, or the first tokens of this text. Donors are neutral texts (everyday statements) if `neutral_donors` is
        not 0 or if there are no other texts.
        """
        kinds = self.donor_kinds(texts)
        has_neutral_donors = self.neutral_donors > 0 or NEUTRAL in kinds
        if has_neutral_donors:
            return {NEUTRAL: self._exchange_with_neutral_texts(document)}
        has_classes = SAME_CLASS in kinds
        classes = texts.predicted if has_classes else None
        return draw_exchanged_texts(document, texts.documents, number, classes, donors=1, seed=self.seed)

    def _exchange_with_neutral_texts(self, document: Document) -> list[npt.NDArray[np.int32]]:
        """Return the document's token IDs `[T]` with its words replaced by those of a neutral text, for each donor.

        The donors are the `neutral_donors` neutral texts (0 means all) for which the fewest tokens of the document
        remain equal, because an exchange of equal tokens has no effect.
        """
        neutral = [self._tokenize_neutral_text(text) for text in NEUTRAL_TEXTS]
        exchanged = exchanged_texts(document, neutral, candidates=range(len(neutral)), number=len(neutral))
        exchanged.sort(key=lambda ids_T: np.count_nonzero(ids_T == document.ids))  # number of equal tokens
        donors = self.neutral_donors or len(neutral)
        return exchanged[:donors]

    def _exchange_matrix(self, texts: Texts, number: int) -> Array:
        """Return the matrix `EXCHANGE` of the text with index `number`, `[layers, tokens, sources]`.

        It contains the displacement of each token's vector, relative to the vector's length, if only the source token
        is replaced by the token of a donor text.
        """
        document = texts.document(number)
        donors = self._draw_exchanged_texts(texts, number, document)
        with_embeddings = exchange_matrix(self.base, document, donors, self.batch_tokens)
        return with_embeddings[1:]  # without the input of the first layer

    @staticmethod
    def donor_kinds(texts: Texts) -> tuple[str, ...]:
        """Return the available kinds of donors for these texts.

        The donors of a single text are neutral texts. Donors are distinguished by class if the classifier predicted a
        class for every text, and more than one class in total.
        """
        if len(texts) == 1:
            return (NEUTRAL,)
        has_classes = bool((texts.predicted >= 0).all()) and len(np.unique(texts.predicted)) > 1
        return (SAME_CLASS, OTHER_CLASS) if has_classes else (OTHER_TEXTS,)

    def _tokenize_neutral_text(self, text: str) -> Document:
        """Return a neutral text (an everyday statement that serves as a donor) as a document without special tokens.

        An exchange uses only the IDs of the donor's tokens and the information which of them are special. The classes
        are therefore arbitrary, and each token counts as a word.
        """
        encoded = self.tokenizer(text, add_special_tokens=False)
        ids = np.array(encoded["input_ids"], np.int32)
        any_class_T = np.zeros(len(ids), np.int8)
        word_of_token_T = np.arange(len(ids), dtype=np.int32)
        return Document("neutral", ids, classes=any_class_T, words=word_of_token_T)

    def add_own_share(self, measurements: Measurements, sample: OwnShareSample) -> dict[str, Sums]:
        """Return the sums of own shares in a sample of the texts, by name; compute them unless `measurements` has them.

        The own share is the share of a token's vector that comes from the token's own input. It is computed from
        displacements of the vector by an exchange of words (`sample.by` is `exchange`), or from a decomposition of the
        vector (`parts`). With an exchange, the result also contains the sums of the `TOTAL_EFFECTS`: squared
        displacements relative to that by an exchange of all words.
        """
        if sample not in measurements.own_share:
            quantity = OWN_SHARE_WAYS[sample.by]  # the name in `SAMPLED`
            sums = self.sampled_sums(measurements, quantity, sample.max_texts, sample.max_length)
            measurements.own_share[sample] = sums
        return measurements.own_share[sample]

    def add_token_shares(self, measurements: Measurements, number: int) -> None:
        """Add the own shares of the text with index `number` for each token and layer, unless `measurements` has them.

        The own share is o / (o + a), where o and a are displacements of the token's vector: o if only the token itself
        is exchanged with that of a donor text, and a if all other tokens are. In long texts, the own share is NaN
        except at sampled positions.
        """
        if number in measurements.token_shares:
            return
        _kinds, displacements = self.token_exchange(measurements, number)
        shares_KT = own_shares(displacements, PRECISION)  # K levels, the input of the first layer first
        measurements.token_shares[number] = shares_KT[1:].astype(np.float32)

    def token_exchange(self, measurements: Measurements, number: int) -> tuple[list[str], Displacements]:
        """Return the result of `exchange` for a complete text at up to `TOKEN_POSITIONS` positions.

        The result is computed in the first call and stored in `measurements`.
        """
        if number not in measurements.exchanges:
            document = measurements.texts.document(number)
            positions = choose_positions(document, TOKEN_POSITIONS, self.seed)
            measurements.exchanges[number] = self.exchange(measurements.texts, number, document, positions)
        return measurements.exchanges[number]

    def _choose_identity_sample(self, texts: Texts | Corpus, sample: Sequence[int] | None) -> set[int]:
        """Return the indices of the texts in which all identities are checked: a few sampled texts, and the longest.

        `sample` contains the indices of the candidates for the draw; None for all texts.
        """
        numbers = np.arange(len(texts)) if sample is None else np.asarray(sample)
        drawn = stratified_draw(texts.labels[numbers], self.identity_texts, self.seed)
        return {*numbers[drawn].tolist(), int(texts.lengths.argmax())}

    def _batch_corpus(self, texts: Texts | Corpus) -> Iterator[list[Document]]:
        """Yield batches of the texts that the control `corpus_value` averages over; no batch for a single text."""
        drawn = corpus_sample(texts, self.seed)
        if len(drawn) < 2:
            return
        for batch in batches_by_tokens(texts.lengths[drawn].tolist(), self.batch_tokens):
            yield [texts.document(drawn[place]) for place in batch]


def _measure_shuffled_words(engine: Engine, texts: Texts | Corpus, sink: Sink) -> None:
    engine.measure_control("shuffled_words", texts, sink, partial(shuffled_words, seed=engine.seed))


def _measure_random_weights(engine: Engine, texts: Texts | Corpus, sink: Sink) -> None:
    engine.random.measure_control("random_weights", texts, sink)


OWN_PASSES: dict[str, Callable[[Engine, Texts | Corpus, Sink], None]] = {
    "random_weights": _measure_random_weights,
    "shuffled_words": _measure_shuffled_words,
}
"""The controls that require a separate forward pass."""


class Sampled(NamedTuple):
    """A quantity that is measured in a sample of single texts, because its cost is quadratic in the text length."""

    max_texts: int
    max_length: int
    """The maximum number of tokens per text; longer texts are truncated."""
    measure: Callable[[Engine, Measurements, int, int], DocumentSums]
    """A function that measures one text. Its last arguments are the maximum length and the index of the text."""


class OwnShareSample(NamedTuple):
    """The sample of texts in which the tokens' own shares are measured, and the method of computing them."""

    max_texts: int = 24
    max_length: int = 48
    """The maximum number of tokens per text; longer texts are truncated."""
    by: str = "exchange"
    """One of `OWN_SHARE_WAYS`."""


OWN_SHARE_WAYS = {"exchange": OWN_SHARE, "parts": "own_share_by_parts"}
"""Methods of computing own shares, each with the name of the computed quantity in `SAMPLED`."""


def _measure_own_share(engine: Engine, measurements: Measurements, max_length: int, number: int) -> DocumentSums:
    """Return the sums of the own share and of the total effects of one text after each layer `[layers]`, by name.

    If words of the text are replaced by those of a donor text, the vector of a token is displaced: by o if only the
    token itself is replaced, by a if all other tokens are, and by j if all tokens are. The own share is o / (o + a),
    and the `TOTAL_EFFECTS` are o^2 / j^2 and a^2 / j^2. All sums cover all donors, except that own shares are also
    returned for each kind of donor if there are several kinds.
    """
    kinds, displacements = _exchange_tokens(engine, measurements, max_length, number)
    sums_by_quantity = exchange_sums(displacements, PRECISION)  # each [kinds, levels], in the order of `kinds`
    all_donors = 0  # The first of the kinds covers all donors: it is `ALL_DONORS`, or the only kind.
    names = [OWN_SHARE, *(f"{OWN_SHARE}_{kind}" for kind in kinds[1:])]
    sums = {}
    for place, name in enumerate(names):
        sums[name] = _select_layers(sums_by_quantity[OWN_SHARE], place)
    for name in TOTAL_EFFECTS:
        sums[name] = _select_layers(sums_by_quantity[name], all_donors)
    return sums


def _exchange_tokens(
    engine: Engine, measurements: Measurements, max_length: int, number: int
) -> tuple[list[str], Displacements]:
    """Return the result of `Engine.exchange` for the text with index `number`, truncated to `max_length` tokens.

    The tokens of the text are exchanged with those of donors: either neutral texts (everyday statements) or other
    texts. At most `TOKEN_POSITIONS` tokens are measured with neutral donors, and `EXCHANGE_POSITIONS` with other texts.
    """
    texts = measurements.texts
    document = texts.document(number)
    truncated = document.cut(max_length)
    is_complete = len(truncated) == len(document)
    # The donors of a single text are neutral texts, because there is no other text.
    has_neutral_donors = len(texts) == 1 or engine.neutral_donors > 0
    if has_neutral_donors and is_complete:
        # The result is the same as below, but is also stored in `measurements` for `Engine.add_token_shares`.
        return engine.token_exchange(measurements, number)
    max_positions = TOKEN_POSITIONS if has_neutral_donors else EXCHANGE_POSITIONS
    positions = choose_positions(truncated, max_positions, engine.seed)
    return engine.exchange(texts, number, truncated, positions)


def _select_layers(sums: Sums, place: int) -> Sums:
    """Return the sums `[layers]` of the kind of donors with the index `place`, selected from `sums` `[kinds, levels]`.

    The first level, which is the input of the first layer, is omitted.
    """
    return Sums(sums.values[place, 1:], sums.counts[place, 1:])


def _measure_own_share_by_parts(
    engine: Engine, measurements: Measurements, max_length: int, number: int
) -> DocumentSums:
    """Return the sums of the own share after each layer `[layers]`, computed by decomposing the vectors into parts.

    The own share is the share of a token's vector that comes from the token's own input. The shares of all input
    tokens are stored in `measurements` if the text has at most `max_length` and `MAX_PARTS_TOKENS` tokens, because the
    page also displays these shares.
    """
    document = measurements.texts.document(number)
    truncated = document.cut(max_length)
    shares_LTT = None  # the share of each source (last axis) in the vector of each token
    if len(truncated) == len(document):
        engine.add_input_parts(measurements, number)
        shares_LTT = measurements.matrices[number].get(INPUT_PARTS)
    own_LT = _read_own_shares(engine, truncated) if shares_LTT is None else shares_LTT.diagonal(axis1=1, axis2=2)
    return {OWN_SHARE: Sums.over_tokens(own_LT.astype(np.float64))}


def _read_own_shares(engine: Engine, document: Document) -> Array:
    """Return the share of each token's own input in the token's vector after each layer, `[layers, T]`.

    The vectors are decomposed into parts from each input token. `chord` is the rule by which the output of an
    activation function is attributed to the parts of its input. K is the number of levels: the input of the first layer
    and the output of each layer.
    """
    batch = engine.batches.batch([document])
    parts = engine.readers["chord"].read(batch)
    quantities_QKT = by_token(parts)  # in the order of `QUANTITIES`
    own_KT = quantities_QKT[QUANTITIES.index(OWN_SHARE)]
    own_LT: Array = own_KT[1:].double().cpu().numpy()  # without the input of the first layer
    return own_LT


def _measure_swaps(engine: Engine, measurements: Measurements, max_length: int, number: int) -> DocumentSums:
    """Return the sums of the swap ratio `[layers]` by kind of donor; sums and counts are 0 if there is no such donor.

    The swap ratio compares two displacements of the layer's output at a token: one if the layer inputs of the other
    tokens are replaced by those of a donor text, and one if the token's own layer input is replaced. The donors are the
    next text of the same class and the next text of another class. Without predicted classes, the only donor is the
    next text.
    """
    texts = measurements.texts
    next_of_class, next_of_other_class = next_donors(number, texts.predicted)
    has_classes = bool((texts.predicted >= 0).all())
    if has_classes:
        donors = {f"swap_{SAME_CLASS}": next_of_class, f"swap_{OTHER_CLASS}": next_of_other_class}
    else:
        donors = {"swap": next_of_class}  # All texts have the class -1.
    ids = texts.document(number).cut(max_length).ids
    zeros_L = np.zeros(sum(layer_counts(engine.base)))
    sums = {}
    for name, donor in donors.items():
        sums[name] = Sums(zeros_L, zeros_L)
        if donor is not None:
            donor_ids = texts.document(donor).cut(max_length).ids
            ratios_LST = document_swaps(engine.base, ids, donor_ids)  # S: the two ratios in `SWAPS`
            swap_LT = ratios_LST[:, SWAPS.index("swap")]
            sums[name] = Sums.over_tokens(swap_LT)
    return sums


_DEFAULT_SAMPLE = OwnShareSample()
SAMPLED = {
    OWN_SHARE: Sampled(_DEFAULT_SAMPLE.max_texts, _DEFAULT_SAMPLE.max_length, measure=_measure_own_share),
    "own_share_by_parts": Sampled(
        _DEFAULT_SAMPLE.max_texts, _DEFAULT_SAMPLE.max_length, measure=_measure_own_share_by_parts
    ),
    "swap": Sampled(max_texts=20, max_length=24, measure=_measure_swaps),
}
"""Quantities of single texts, with their default samples."""
