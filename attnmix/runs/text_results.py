"""Measure texts in memory, for their page: `Measures.to_html`, `attnmix show` and `attnmix serve` all come here.

The formulas are those of the stages. Left out is what takes longer than a reader waits: derivatives, and all maps but
one, each point of the residual stream alone with one seed. No file is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import softmax
from threadpoolctl import ThreadpoolController
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnmix.core.arithmetic.environment import FASTEST
from attnmix.core.arithmetic.kernels import computed_on
from attnmix.core.device import chosen_device, measuring_device
from attnmix.core.errors import InputError
from attnmix.core.names import CAPTURED_CHECKPOINT, SUBLAYER_POINTS, Site
from attnmix.core.settings import (
    BATCH_TOKENS,
    MIN_TYPED_UMAP_TOKENS,
    CaptureParameters,
    MeasureParameters,
    UmapParameters,
)
from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Draws
from attnmix.core.store.results import Array, TextResults, components_of
from attnmix.core.store.writers import DIGITS, columns_by_site
from attnmix.core.torch_state import torch_state
from attnmix.faithfulness.class_use import CLASS_USE_COLUMNS
from attnmix.faithfulness.classifier import Classifier
from attnmix.maps.components import fit_components
from attnmix.maps.neighbours import NEAREST_VECTORS, neighbours
from attnmix.maps.quality import DIGITS as QUALITY_DIGITS
from attnmix.maps.quality import QUALITY_COLUMNS, kept_neighbours
from attnmix.maps.vectors import Maps, Vectors, points_for
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.controls import random_model, shuffled_words
from attnmix.measures.documents import Document, documents_of
from attnmix.measures.geometry_tables import page_geometry
from attnmix.measures.mixing_tables import (
    COUNTS,
    TABLE_COLUMNS,
    CorpusMeasures,
    DocumentRows,
    by_review,
    page_tables,
    stack_rows,
    weighted_table,
)
from attnmix.measures.ratios import RATIOS
from attnmix.measures.token_ratios import ratio_rows
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.encoding import batches_by_tokens
from attnmix.models.families import family_of, layer_counts, present_names
from attnmix.models.loading import check_network, load_base
from attnmix.models.segments import read_segments
from attnmix.runs.capture import captured_vectors
from attnmix.runs.tokens import TokenizedTexts

LAYOUT = "separate"
ONE_THREAD_TOKENS = 64  # the products of fewer are too small to share: threads would wait for each other
SEED = 111
SLOW_MATRICES = ("value_zeroing", "value_zeroing_without_bias")  # most of the time, and the square of the tokens
REMOVAL_COLUMNS = ["method", "share", "drop", "ci_low", "ci_high"]


class _Checkpoint(NamedTuple):
    """One checkpoint's measurers."""

    batches: BatchMeasurer
    texts: DocumentMeasurer


class _Measured(NamedTuple):
    """The measures of the texts in one checkpoint's own model, in float32."""

    sums: DocumentRows
    """Those of `DocumentMeasures.sums` and of the controls."""
    ratios: list[npt.NDArray[np.float32]]
    """The ratios of each text `[methods, layers, tokens]`."""
    input_shares: list[dict[str, Array]]
    """The exact parts since the input of each text, where it has them."""


class _Contributions(NamedTuple):
    """The matrices and the heads of each text, of one checkpoint's copy in float64."""

    matrices: list[dict[str, Array]]
    heads: list[dict[str, Array]]


class TextMeasurer:
    """Loaded models by checkpoint, one or `pretrained` and `finetuned`, and what is measured of texts in them."""

    @torch_state()
    def __init__(
        self,
        bases: Mapping[str, PreTrainedModel],
        tokenizer: PreTrainedTokenizerFast,
        padding: int,
        methods: Sequence[str] = tuple(RATIOS),
        matrices: Sequence[str] = tuple(MeasureParameters().matrices),
        pairs: bool = False,
        classifier: Classifier | None = None,
    ) -> None:
        """Take models without a head, in float32 and eval mode, whose attention is observed.

        `padding` is the token that fills a batch up. With `pairs` the models are those of pairs of texts.
        `classifier` is that of the last checkpoint.
        """
        self.tokenizer, self.classifier = tokenizer, classifier
        self.padding, self.pairs = padding, pairs
        self.captured, self.base = list(bases.items())[-1]
        """The model whose vectors are laid out: the last."""
        family = family_of(self.base.config)
        self.methods = present_names("measure.methods", list(methods), family, RATIOS)
        self.points = [point for point in family.present(CaptureParameters().points) if point not in SUBLAYER_POINTS]
        # Weights are drawn in one thread while others copy the models and measure the texts.
        with_one_thread = ThreadPoolExecutor(1)
        self.random = with_one_thread.submit(self._random_measurer)
        with_one_thread.shutdown(wait=False)
        self.unchecked = set(bases)
        """The checkpoints in which no text has been measured: in the first, every identity is checked."""
        self.checkpoints: dict[str, _Checkpoint] = {}
        for name, base in bases.items():
            texts = DocumentMeasurer(base, self.methods, present_names("measure.matrices", list(matrices), family))
            self.checkpoints[name] = _Checkpoint(BatchMeasurer(base, self.methods, padding), texts)

    def _random_measurer(self) -> BatchMeasurer:
        """Return the measurer of the model with random weights."""
        random: Any = random_model(self.base.config, SEED)
        read_segments(random, self.tokenizer, self.pairs)
        return BatchMeasurer(random.to(self.base.device), self.methods, self.padding)

    def results(self, tokenized: TokenizedTexts) -> TextResults:
        """Return all that the page of the texts shows."""
        texts = tokenized.texts.assign(measured=True, captured=True)
        results = TextResults(texts, tokenized.tokens, computed_on(FASTEST, self.base.device))
        documents = documents_of(results.documents, results.tokens)
        with torch_state(), _workers(documents, len(self.checkpoints)) as pool:
            # A model and its copy in float64 are two: each is in one pass at a time.
            measures = {name: pool.submit(self._measures, name, documents) for name in self.checkpoints}
            contributions = {name: pool.submit(self._contributions, name, documents) for name in self.checkpoints}
            random_sums = pool.submit(self._random_sums, documents)
            predictions = pool.submit(self._predictions, documents)
            measured = {name: future.result() for name, future in measures.items()}
            maps = pool.submit(self._fill_maps, results, documents)  # no other pass of this model is under way
            self._fill_measures(results, documents, measured, random_sums.result())
            for name, future in contributions.items():
                self._fill_contributions(results, documents, name, measured[name], future.result())
            results.predictions = predictions.result()
            maps.result()
        sizes = {
            (parts["query"].shape[1], parts["query"].shape[-1]) for parts in results.heads_by_text.values() if parts
        }
        if len(sizes) > 1:
            results.heads_by_text = {}  # a page draws heads of one number and width
        return results

    def _fill_measures(
        self,
        results: TextResults,
        documents: Sequence[Document],
        measured: Mapping[str, _Measured],
        random_sums: DocumentRows,
    ) -> None:
        """Fill in the tables and ratios."""
        names = np.array([document.name for document in documents])
        samples = BOOTSTRAP_SAMPLES if len(documents) > 1 else 1  # one text has no interval
        corpus = CorpusMeasures(
            rows={name: measures.sums | {"document": names} for name, measures in measured.items()},
            random=random_sums,
            methods=self.methods,
            sites=self.checkpoints[self.captured].batches.sites,
            draws=Draws(len(documents), samples, SEED),
            seed=SEED,
        )
        tables = page_tables(corpus)
        tables["geometry"] = page_geometry(corpus)
        tables["mixing_by_review"] = pd.concat(by_review(corpus))
        if len(measured) > 1:  # for the change over all layers
            tables["mixing_weighted"] = weighted_table(corpus, ["all"], ["token"])
        for name in ("derivatives", "parts"):
            tables[name] = pd.DataFrame(columns=list(TABLE_COLUMNS[name]))
        results.tables = {f"measure/{name}": _as_read(table) for name, table in tables.items()}
        results.tables["faithfulness/faithfulness"] = pd.DataFrame(columns=REMOVAL_COLUMNS)
        results.tables["faithfulness/class_use"] = pd.DataFrame(columns=CLASS_USE_COLUMNS, dtype=str)
        ratios = []
        for name, measures in measured.items():
            for number, document in enumerate(documents):
                ratios.append(ratio_rows(name, document.name, self.methods, measures.ratios[number]))
        results.ratios = pd.concat(ratios, ignore_index=True)

    def _fill_contributions(
        self,
        results: TextResults,
        documents: Sequence[Document],
        name: str,
        measured: _Measured,
        contributions: _Contributions,
    ) -> None:
        """Fill in the matrices and heads of one checkpoint."""
        for number, document in enumerate(documents):
            matrices = contributions.matrices[number] | measured.input_shares[number]
            results.matrices_by_text[name, document.name] = matrices
            results.heads_by_text[name, document.name] = contributions.heads[number]

    def _measures(self, name: str, documents: Sequence[Document]) -> _Measured:
        batches, texts = self.checkpoints[name]
        lengths = [len(document) for document in documents]
        numbered_batches = batches_by_tokens(lengths, BATCH_TOKENS)
        batches.corpus = None
        if len(documents) > 1:
            batches.read_corpus([documents[number] for number in batch] for batch in numbered_batches)
        measures: list[Any] = [None] * len(documents)
        for batch in numbered_batches:
            in_full = name in self.unchecked
            in_batch = batches.measures([documents[number] for number in batch], [in_full] * len(batch))
            for number, measured in zip(batch, in_batch, strict=True):
                measures[number] = measured
            self.unchecked.discard(name)
        shuffled = [shuffled_words(document, SEED) for document in documents]
        sums = stack_rows([measured.sums() for measured in measures])
        sums.update(_control_sums(batches, "shuffled_words", shuffled))
        return _Measured(
            sums,
            [measured.ratios for measured in measures],
            [_on_host(texts.input_shares(document.ids)) for document in documents],
        )

    def _contributions(self, name: str, documents: Sequence[Document]) -> _Contributions:
        contributions = _Contributions([], [])
        for document in documents:
            matrices, heads = self.checkpoints[name].texts.matrices_and_heads(document.ids)
            contributions.matrices.append(_on_host(matrices))
            contributions.heads.append(heads)
        return contributions

    def _random_sums(self, documents: Sequence[Document]) -> DocumentRows:
        """Return the sums of the control `random_weights`."""
        return _control_sums(self.random.result(), "random_weights", documents)

    def _fill_maps(self, results: TextResults, documents: Sequence[Document]) -> None:
        """Lay out the vectors of the residual stream, in float16 as in the stage `capture`."""
        ids = [document.ids for document in documents]
        _lay_out(results, captured_vectors(self.base, ids, self.points, "float16", self.padding))

    def _predictions(self, documents: Sequence[Document]) -> pd.DataFrame:
        """Return the class that the classifier gives each text, and its probability; nothing without a classifier."""
        if self.classifier is None:
            return pd.DataFrame()
        predictions = [self.classifier.prediction(document.ids.tolist()) for document in documents]
        probabilities = softmax(np.stack([prediction.logits_C.numpy() for prediction in predictions]), axis=-1)
        classes = [int(number) for number in probabilities.argmax(-1)]
        columns = {
            "document": [document.name for document in documents],
            "predicted": [self.classifier.classes[number] for number in classes],
            "probability": probabilities.max(-1),
            "read_position": [prediction.read_position for prediction in predictions],
        }
        return pd.DataFrame(columns)


def load_measurer(checkpoints: Mapping[str, Path], names: Sequence[str] | None = None) -> TextMeasurer:
    """Return the measurer of single texts in these checkpoint folders, for a reader who waits.

    Without Value Zeroing, which takes most of the time. `names` are those of two models that are compared, of which
    none is fine-tuned from the other, so that no class is predicted. Raise `InputError` for a folder that cannot be
    measured, and for two models with other tokens or numbers of layers.
    """
    first = next(iter(checkpoints.values()))
    tokenizer, device = load_tokenizer(first), measuring_device(chosen_device())
    bases: dict[str, PreTrainedModel] = {}
    for name, folder in checkpoints.items():
        base: Any = load_base(folder)
        check_network(str(folder), base, tokenizer)
        bases[name] = base.to(device)
    classifier = None
    if names is not None:
        _check_comparable(names, list(checkpoints.values()), list(bases.values()))
    elif CAPTURED_CHECKPOINT in checkpoints:
        classifier = Classifier(checkpoints[CAPTURED_CHECKPOINT], device, BATCH_TOKENS)
    matrices = [name for name in MeasureParameters().matrices if name not in SLOW_MATRICES]
    families = [family_of(base.config) for base in bases.values()]
    methods = [method for method in RATIOS if all(method in family.present(RATIOS) for family in families)]
    return TextMeasurer(bases, tokenizer, tokenizer.pad_token_id, methods, matrices, classifier=classifier)


def _check_comparable(names: Sequence[str], folders: Sequence[Path], bases: Sequence[PreTrainedModel]) -> None:
    """Raise `InputError` unless two models read any text as the same tokens, in as many layers."""
    states = []
    for folder in folders:
        state = json.loads(load_tokenizer(folder).backend_tokenizer.to_str())
        states.append({name: part for name, part in state.items() if name not in ("truncation", "padding")})
    if states[0] != states[1]:
        raise InputError(f"compare: {names[1]} has another tokenizer than {names[0]}; allowed: the same for both")
    layers = [sum(layer_counts(base)) for base in bases]
    if layers[0] != layers[1]:
        counts = f"{layers[0]} layers in {names[0]}, {layers[1]} in {names[1]}"
        raise InputError(f"compare: {counts}; allowed: the same number")


@contextmanager
def _workers(documents: Sequence[Document], checkpoints: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads, one for each checkpoint; where texts are short, each computes in one thread.

    Short texts of one checkpoint have a second one, for the model with random weights.
    """
    if sum(len(document) for document in documents) > ONE_THREAD_TOKENS:
        with ThreadPoolExecutor(checkpoints) as pool:
            yield pool
        return
    workers = max(2, checkpoints)
    # The number of BLAS's threads is the process's, that of OpenMP's each thread's own.
    controller = ThreadpoolController()  # it takes milliseconds to find the libraries, so not in every thread
    in_one_thread = partial(controller.limit, limits=1)
    with in_one_thread(), ThreadPoolExecutor(workers, initializer=in_one_thread) as pool:
        yield pool


def _on_host(matrices: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return matrices as they are kept, in float32."""
    return {name: matrix.float().cpu().numpy() for name, matrix in matrices.items()}


def _control_sums(measurer: BatchMeasurer, name: str, documents: Sequence[Document]) -> DocumentRows:
    """Return the sums of a control with a forward pass of its own, of all documents in their order."""
    sums: list[Any] = [None] * len(documents)
    for batch in batches_by_tokens([len(document) for document in documents], BATCH_TOKENS):
        in_batch = measurer.control_sums(name, [documents[number] for number in batch])
        for number, document_sums in zip(batch, in_batch, strict=True):
            sums[number] = document_sums
    return stack_rows(sums)


def _as_read(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table as its csv file would be read: rounded, counts of the type that their values have."""
    read = table.reset_index(drop=True)
    for name in COUNTS:
        if name in read:
            read[name] = read[name].astype("float64" if read[name].hasnans else "int64")
    return read.round(DIGITS)


def compile_maps() -> None:
    """Lay random vectors out, so that the first text that is long enough for UMAP does not wait for its compilation."""
    random = np.random.default_rng(0).normal(size=(MIN_TYPED_UMAP_TOKENS, 4)).astype(np.float32)
    _fit(LAYOUT, {Site(0, "word_embedding"): random}, UmapParameters(stability_seeds=[]))


def _lay_out(results: TextResults, stream: Mapping[Site, Array]) -> None:
    """Lay each point of the residual stream out alone; with nearest vectors in the full space, and scores.

    By UMAP where there are enough tokens for that, and by their principal components.
    """
    umap = UmapParameters(stability_seeds=[])
    vectors = {site: array.astype(np.float32) for site, array in stream.items()}
    nearest = {}
    for site, vectors_TD in vectors.items():
        near, _ = neighbours(vectors_TD, NEAREST_VECTORS, umap.metric, umap.seed)
        nearest[site] = {"nearest": list(near)}
    results.nearest = columns_by_site(results.tokens, nearest)
    layouts = {"pca": vectors}
    if len(results.tokens) >= MIN_TYPED_UMAP_TOKENS:
        layouts = {LAYOUT: points_for(LAYOUT, vectors, umap), **layouts}
    scores = []
    for layout, mapped in layouts.items():
        if not mapped:  # too few vectors for UMAP
            continue
        places = _fit(layout, mapped, umap)[umap.seed]
        columns = {}
        for site, xy in places.items():
            columns[site] = {"x": xy[:, 0], "y": xy[:, 1]}
            value, chance = kept_neighbours(mapped[site], xy, umap.metric, umap.seed)
            scores.append((layout, site.layer, site.point, "neighbours_kept", value, chance))
            components = components_of(vectors[site], xy) if layout == "pca" else None
            if components is not None:
                results.components[site] = components
        results.maps[layout] = columns_by_site(results.tokens, columns)
    results.map_quality = pd.DataFrame(scores, columns=QUALITY_COLUMNS).round(QUALITY_DIGITS)


def _fit(layout: str, vectors: Mapping[Site, Vectors], umap: UmapParameters) -> Maps:
    """Return `fit_layout`; umap-learn takes seconds to load, for which principal components need not wait."""
    if layout == "pca":
        return fit_components(vectors, umap)
    from attnmix.maps.layouts import fit_layout

    return fit_layout(layout, vectors, umap)
