"""Measure one typed text in memory, for its page: the models are loaded once, and no file is written.

The numbers are those that `Measures.save` draws, but for what takes longer than a reader waits: there is one map,
each point of the residual stream alone with one seed, and no derivative.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy.special import softmax
from threadpoolctl import threadpool_limits

from attnmix.arithmetic.kernels import computed_on
from attnmix.arithmetic.settings import FASTEST
from attnmix.core.device import chosen, exact_products, measuring_device
from attnmix.core.errors import InputError, text_problem
from attnmix.core.names import CAPTURED_CHECKPOINT, SUBLAYER_POINTS, Site
from attnmix.core.settings import MIN_UMAP_VECTORS, CaptureParameters, MeasureParameters, UmapParameters
from attnmix.core.statistics import Draws
from attnmix.faithfulness.class_use import COLUMNS as CLASS_USE_COLUMNS
from attnmix.faithfulness.classifier import Classifier
from attnmix.maps.layouts import fit_layout, neighbours, points_for
from attnmix.maps.parallel import in_parallel
from attnmix.maps.quality import COLUMNS as QUALITY_COLUMNS
from attnmix.maps.quality import score_layout
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.controls import RANDOM, random_base, shuffled_words
from attnmix.measures.documents import Document, documents_of
from attnmix.measures.heads import record_heads
from attnmix.measures.ratios import RATIOS
from attnmix.measures.tables import COLUMNS, by_review, mixing_tables
from attnmix.models.capture_points import widths
from attnmix.models.checkpoint import load_config, load_tokenizer, longest_text
from attnmix.models.encoding import padded
from attnmix.models.families import family_of, present_names
from attnmix.models.loading import check_tokenizer, load_base
from attnmix.runs.capture import fill_rows
from attnmix.runs.measure import ratio_rows
from attnmix.runs.reduce import NEAREST_VECTORS
from attnmix.runs.tokens import TokenizedTexts, tokenize_given
from attnmix.store.runs import Run
from attnmix.store.writers import DIGITS, columns_by_site

LAYOUT = "separate"
TABLES = ("mixing", "mixing_controls", "geometry")  # those that the page reads
MAX_TOKENS = 64  # Value Zeroing takes time by the square of a text's length and more
SEED = 111
KEYS = ["document", "position"]
REMOVAL_COLUMNS = ["method", "share", "drop", "ci_low", "ci_high"]

Array = npt.NDArray[Any]


class _Results(NamedTuple):
    """The measures of one text in one checkpoint."""

    ratios_MLT: Array
    sums: dict[str, Array]
    """Those of `DocumentMeasures.sums`, and of the control with shuffled words."""
    identities: npt.NDArray[np.float64]
    """The largest error and the number of texts `[2, levels, identities]`."""
    matrices: dict[str, Array]
    heads: dict[str, Array]


class TextRun(Run):
    """The results of one text, held in memory: every reader that the page calls, and no file behind them."""

    # In place of properties that read files.
    token_scores = pd.DataFrame(columns=[*KEYS, "method", "score"])
    predictions = map_quality = nearest = pd.DataFrame()

    def __init__(self, documents: pd.DataFrame, tokens: pd.DataFrame, device: torch.device) -> None:
        super().__init__(Path())
        self.device = device
        self.documents, self.tokens = documents, tokens
        self.texts = dict(zip(documents["document"], documents["text"], strict=True))
        self.vectors: dict[Site, Array] = {}
        self.results: dict[str, _Results] = {}
        self.tables_by_name: dict[str, pd.DataFrame] = {}
        self.ratio_table = pd.DataFrame()
        self.maps_by_layout: dict[str, pd.DataFrame] = {}

    @property
    def sites(self) -> list[Site]:
        return list(self.vectors)

    def read(self, site: Site, rows: npt.NDArray[np.int64]) -> Array:
        return np.asarray(self.vectors[site][rows])

    def metrics(self, stage: str) -> dict[str, Any]:
        return {"computed_on": computed_on(FASTEST, self.device)}

    def table(self, name: str, **_options: Any) -> pd.DataFrame:
        return self.tables_by_name[name]

    def captured_ratios(self, *_: Any) -> pd.DataFrame:
        return self.ratio_table

    def matrices(self, checkpoint: str, document: str) -> list[str]:
        return list(self.results[checkpoint].matrices) if checkpoint in self.results else []

    def matrix(self, checkpoint: str, document: str, method: str) -> Array:
        return self.results[checkpoint].matrices[method]

    def heads(self, checkpoint: str, document: str) -> dict[str, Array]:
        return self.results[checkpoint].heads if checkpoint in self.results else {}

    @property
    def layouts(self) -> list[str]:
        return list(self.maps_by_layout)

    def map(self, layout: str) -> pd.DataFrame:
        return self.maps_by_layout[layout]


class _Checkpoint(NamedTuple):
    """One checkpoint's models, loaded."""

    batches: BatchMeasurer
    texts: DocumentMeasurer
    gains: npt.NDArray[np.float64]


class TextMeasurer:
    """The loaded checkpoints by name, one or `pretrained` and `finetuned`, and what is measured of each text."""

    @exact_products()
    def __init__(self, checkpoints: Mapping[str, Path]) -> None:
        """Load the checkpoint folders; raise `InputError` for one that cannot be measured."""
        first = next(iter(checkpoints.values()))
        self.tokenizer, self.config = load_tokenizer(first), load_config(first)
        self.captured = list(checkpoints)[-1]
        self.max_tokens = min(MAX_TOKENS, longest_text(self.config) or MAX_TOKENS)
        settings, family = MeasureParameters(), family_of(self.config)
        self.methods = present_names("measure.methods", settings.methods, family, RATIOS)
        matrices = present_names("measure.matrices", settings.matrices, family)
        self.device = device = measuring_device(chosen())
        self.checkpoints: dict[str, _Checkpoint] = {}
        for name, folder in checkpoints.items():
            base: Any = load_base(folder)
            check_tokenizer(str(folder), self.tokenizer, base.get_input_embeddings().num_embeddings)
            batches = BatchMeasurer(base.to(device), self.methods, self.tokenizer.pad_token_id)
            texts = DocumentMeasurer(batches.base, self.methods, matrices)
            self.checkpoints[name] = _Checkpoint(batches, texts, texts.gains())
        self.rows: int = base.get_input_embeddings().num_embeddings
        random: Any = random_base(first, SEED)
        self.random = BatchMeasurer(random.to(device), self.methods, self.tokenizer.pad_token_id)
        self.classifier: Classifier | None = None
        if CAPTURED_CHECKPOINT in checkpoints:
            self.classifier = Classifier(checkpoints[CAPTURED_CHECKPOINT], device, MAX_TOKENS)
        points = family.present(CaptureParameters().points)
        self.widths = widths(self.checkpoints[self.captured].batches.base, points)

    def tokenized(self, text: str) -> TokenizedTexts:
        """Return the tokens of a text; raise `InputError` for one that is empty, or too long while a reader waits."""
        if problem := text_problem(text):
            raise InputError(f"{problem}; allowed: 1 to {self.max_tokens} tokens")
        tokenized = tokenize_given(text, self.tokenizer, self.config, self.rows, self.max_tokens)
        (tokens,) = tokenized.texts["whole_tokens"]
        if tokens > self.max_tokens:
            allowed = f"allowed: at most {self.max_tokens}; `attnmix show` takes more"
            raise InputError(f"the text has {tokens:,} tokens; {allowed}")
        return tokenized

    def run(self, text: str) -> TextRun:
        """Return the results of `text`; raise `InputError` as `tokenized` does."""
        tokenized = self.tokenized(text)
        run = TextRun(tokenized.texts.assign(measured=True), tokenized.tokens, self.device)
        (document,) = documents_of(run.documents, run.tokens)
        # The products of a sentence are too small to share; threads would wait for each other, and for the browser.
        with threadpool_limits(1), exact_products():
            self._measure(run, document)
            self._capture(run, document)
            _lay_out(run)
        return run

    def _measure(self, run: TextRun, document: Document) -> None:
        calls = [(name, document) for name in self.checkpoints]
        results = dict(zip(self.checkpoints, in_parallel(self._measured, calls, "checkpoints"), strict=True))
        (random,) = self.random.control_sums("random_weights", [document])
        blocks = {name: [_one_document(each.sums)] for name, each in results.items()}
        identities = {name: each.identities for name, each in results.items()}
        gains = {name: each.gains for name, each in self.checkpoints.items()}
        sites = next(iter(self.checkpoints.values())).batches.sites
        with io.BytesIO() as file:  # one text has no interval, so one sample of it is enough
            draws, all_blocks = Draws([1], 1, SEED, file), blocks | {RANDOM: [_one_document(random)]}
            tables = mixing_tables(all_blocks, identities, gains, self.methods, sites, draws, SEED, names=TABLES)
        tables["mixing_by_review"] = pd.concat(by_review(blocks, self.methods))
        run.tables_by_name = {f"measure/{name}": _as_read(table) for name, table in tables.items()}
        for name in ("derivatives", "mixing_by_group"):
            run.tables_by_name[f"measure/{name}"] = pd.DataFrame(columns=list(COLUMNS[name]))
        run.tables_by_name["faithfulness/faithfulness"] = pd.DataFrame(columns=REMOVAL_COLUMNS)
        run.tables_by_name["faithfulness/class_use"] = pd.DataFrame(columns=CLASS_USE_COLUMNS, dtype=str)
        run.results = results
        rows = [ratio_rows(name, document.name, self.methods, each.ratios_MLT) for name, each in results.items()]
        run.ratio_table = pd.concat(rows, ignore_index=True)

    def _measured(self, name: str, document: Document) -> _Results:
        batches, texts, _ = self.checkpoints[name]
        (measures,) = batches.measures([document])
        (control,) = batches.control_sums("shuffled_words", [shuffled_words(document, SEED)])
        errors = measures.identities
        return _Results(
            measures.ratios,
            measures.sums() | control,
            np.stack([errors, (~np.isnan(errors)).astype(np.float64)]),
            {method: each.float().cpu().numpy() for method, each in texts.contributions(document.ids).items()},
            record_heads(texts.base, document.ids, texts.layers),
        )

    def _capture(self, run: TextRun, document: Document) -> None:
        base = self.checkpoints[self.captured].batches.base
        run.vectors = {site: np.empty((len(document), width), np.float16) for site, width in self.widths.items()}
        inputs = padded([document.ids.tolist()], self.tokenizer.pad_token_id)
        rows = slice(0, len(document))
        fill_rows(base, [(inputs, [(0, rows, rows)])], [(rows, run.vectors)])
        if self.classifier is not None:
            probabilities = softmax(self.classifier.logits([document.ids.tolist()]).numpy()[0])
            predicted = self.classifier.classes[int(probabilities.argmax())]
            columns = {"document": [document.name], "predicted": [predicted], "probability": [probabilities.max()]}
            run.predictions = pd.DataFrame(columns)


def _one_document(sums: Mapping[str, Array]) -> dict[str, Array]:
    """Return the sums of one document as a block of documents."""
    return {name: array[None] for name, array in sums.items()}


def _as_read(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table as its csv file would be read: rounded, each column of the type that its values have."""
    return pd.read_csv(io.StringIO(table.round(DIGITS).to_csv(index=False)))


def compile_maps() -> None:
    """Lay random vectors out, so that the first text that is long enough for UMAP does not wait for its compilation."""
    random = np.random.default_rng(0).normal(size=(MIN_UMAP_VECTORS, 4)).astype(np.float32)
    fit_layout(LAYOUT, {Site(0, "word_embedding"): random}, UmapParameters(stability_seeds=[]))


def _lay_out(run: TextRun) -> None:
    """Lay each point of the residual stream out alone; with nearest vectors in the full space, and scores.

    By UMAP, and where a point has too few vectors for that, all by their principal components too.
    """
    umap = UmapParameters(stability_seeds=[])
    stream = {site: array for site, array in run.vectors.items() if site.point not in SUBLAYER_POINTS}
    vectors = {site: array.astype(np.float32) for site, array in stream.items()}
    near = {site: neighbours(each, NEAREST_VECTORS, umap.metric, umap.seed)[0] for site, each in vectors.items()}
    run.nearest = columns_by_site(run.tokens, {site: {"nearest": list(each)} for site, each in near.items()})
    layouts = {LAYOUT: points_for(LAYOUT, vectors, umap)}
    if len(layouts[LAYOUT]) < len(vectors):
        layouts["pca"] = vectors
    qualities = []
    for layout, mapped in layouts.items():
        if mapped:
            maps = fit_layout(layout, mapped, umap)
            places = {site: {"x": xy[:, 0], "y": xy[:, 1]} for site, xy in maps[umap.seed].items()}
            run.maps_by_layout[layout] = columns_by_site(run.tokens, places)
            qualities.append(score_layout(layout, mapped, maps, umap.metric, umap.seed)[QUALITY_COLUMNS])
    run.map_quality = pd.concat(qualities, ignore_index=True)
