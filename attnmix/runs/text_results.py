"""Measurement of texts in memory, for the page of `Measures.to_html`, `attnmix show` and `attnmix serve`.

The formulas are the same as in the stages. Derivatives are omitted because they are slow. For the same reason,
only separate maps are computed, one for each point of the residual stream, with a single seed. No files are written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import softmax
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnmix.core.arithmetic.environment import FASTEST
from attnmix.core.arithmetic.kernels import computed_on
from attnmix.core.device import chosen_device, measuring_device
from attnmix.core.errors import InputError
from attnmix.core.names import CAPTURED_CHECKPOINT, DEFAULT_CONTROL_NAMES, OWN_SHARE, SUBLAYER_POINTS, Site
from attnmix.core.progress import track
from attnmix.core.settings import (
    BATCH_TOKENS,
    MAX_PARTS_TOKENS,
    MIN_TYPED_UMAP_TOKENS,
    CaptureParameters,
    MeasureParameters,
    UmapParameters,
)
from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Draws
from attnmix.core.store.results import PICTURE_MATRICES, Array, Components, TextResults, by_site, components_of
from attnmix.core.store.writers import DIGITS, columns_by_site
from attnmix.core.threads import few_threads
from attnmix.core.torch_state import torch_state
from attnmix.faithfulness.class_use import CLASS_USE_COLUMNS
from attnmix.faithfulness.classifier import Classifier
from attnmix.maps.components import fit_components
from attnmix.maps.neighbours import NEAREST_VECTORS, neighbours
from attnmix.maps.quality import DIGITS as QUALITY_DIGITS
from attnmix.maps.quality import QUALITY_COLUMNS, kept_neighbours
from attnmix.maps.vectors import Coordinates, Maps, Vectors, points_for
from attnmix.measures.documents import Document, Texts, documents_of
from attnmix.measures.engine import MEASURES, SEED, Engine, Measurements, OwnShareSample
from attnmix.measures.geometry_tables import page_geometry
from attnmix.measures.mixing_tables import (
    COUNTS,
    TABLE_COLUMNS,
    CorpusMeasures,
    by_review,
    page_tables,
    weighted_table,
)
from attnmix.measures.ratios import RATIOS
from attnmix.measures.sample_tables import own_share_table
from attnmix.measures.text_pairs import PAIR_SOURCES
from attnmix.measures.token_ratios import ratio_rows
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.families import family_of, layer_counts, present_names
from attnmix.models.loading import check_network, load_base
from attnmix.runs.capture import captured_vectors
from attnmix.runs.tokens import TokenizedTexts

LAYOUT = "separate"
PCA = "pca"
PAGE_QUANTITIES = (MEASURES, "steps", *DEFAULT_CONTROL_NAMES, *PAIR_SOURCES)
"""Quantities that the page shows for each model, by their names in `Engine.add_sums`."""
SLOW_MATRICES = ("value_zeroing", "value_zeroing_without_bias")  # each layer runs once for every token
MAX_DETAILED_CELLS = MAX_PARTS_TOKENS**2
"""Maximum of the sum of the squared lengths of all texts with detailed measures.

The detailed measures are the own share of each token, the contributions of each input token to all vectors (`parts`),
and `SLOW_MATRICES`. Their cost is quadratic in the text length, so without this limit, a page of many texts would take
minutes.
"""
TYPED_DONORS = 1
"""Number of neutral donor texts for typed texts; with more donors, 30 tokens in two models would take over a second.

The standard deviation over donors is 0.05 to 0.07 for a token's own share, and below 0.02 for the mean over a text's
tokens. Typed texts are unsuitable as donors for each other: they often have most tokens in common, and equal tokens
cannot be exchanged.
"""
REMOVAL_COLUMNS = ["method", "share", "drop", "ci_low", "ci_high"]


class TextMeasurer:
    """Measurement of texts in one loaded model, or in two models (`pretrained` and `finetuned`)."""

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
        neutral_donors: int = 0,
    ) -> None:
        """Prepare models without a task head, in float32 and eval mode, with observable attention.

        `padding` is the ID of the padding token. If `pairs` is True, the inputs are pairs of texts. `classifier`
        belongs to the last checkpoint. `neutral_donors` is the number of neutral texts that serve as donors when own
        shares are measured; 0 selects the default donors of `Engine`.
        """
        self.tokenizer = tokenizer
        self.classifier = classifier
        self.padding = padding
        self.captured, self.base = list(bases.items())[-1]
        """The name and the model of the last checkpoint, which provides the vectors of the maps."""
        family = family_of(self.base.config)
        present = present_names("measure.methods", list(methods), family, RATIOS)
        self.matrices = present_names("measure.matrices", list(matrices), family)
        self.points = [point for point in family.present(CaptureParameters().points) if point not in SUBLAYER_POINTS]
        self.engines: dict[str, Engine] = {}
        for name, base in bases.items():
            self.engines[name] = Engine(
                base,
                present,
                padding,
                tokenizer=tokenizer,
                pairs=pairs,
                check_once=True,
                neutral_donors=neutral_donors,
            )

    def results(
        self, tokenized: TokenizedTexts, known: Mapping[str, Measurements] | None = None, with_heads: bool = True
    ) -> TextResults:
        """Return the content of the page.

        `known` contains earlier measurements of the same texts by checkpoint; their values are reused, and new values
        are added to them. If `with_heads` is False, no attention heads are computed, and the matrices are limited
        to those of the page's picture. Slow measures are limited to the texts of `choose_detailed_texts`.
        """
        results = TextResults(tokenized.texts, tokenized.tokens, computed_on(FASTEST, self.base.device))
        measurements = dict(known or {})
        for name in self.engines:
            if name not in measurements:
                documents = documents_of(results.documents, results.tokens)
                measurements[name] = Measurements(Texts(documents))
        texts = measurements[self.captured].texts
        detailed = choose_detailed_texts(texts.lengths.tolist())
        results.predictions = self._measure_and_predict(measurements, detailed, results.tokens, with_heads)
        detailed_names = [document.name for number, document in enumerate(texts.documents) if number in detailed]
        if len(detailed_names) < len(texts):
            results.detailed_documents = detailed_names
        self._fill_measures(results, measurements)
        if not _has_equal_heads(results):
            results.heads_by_text = {}  # The page can only draw models with equal numbers and widths of heads.
        return results

    def _measure_and_predict(
        self,
        measurements: Mapping[str, Measurements],
        detailed: Collection[int],
        tokens: pd.DataFrame,
        with_heads: bool,
    ) -> pd.DataFrame:
        """Add all missing values to `measurements`, and return the predicted classes of the texts.

        The values are sums, matrices, attention heads (if `with_heads` is True) and layouts. A model can run only one
        forward pass at a time, so jobs run in parallel only if they use different models: the sums use each model
        itself, the matrices its float64 copy, and the predictions the classifier. `measurements` has an entry for each
        model, by name. `detailed` are the indices of the texts with slow measures, and `tokens` is the table of all
        tokens.
        """
        captured = measurements[self.captured]
        matrices = self._select_matrices(with_heads)
        matrices_by_text = _select_matrices_by_text(matrices, len(captured.texts), detailed)
        with torch_state(), ThreadPoolExecutor(max(2, len(self.engines))) as pool:
            # Models are copied before the first job starts, because a copy made during a forward pass would include the
            # hooks of this pass.
            copied = self._create_needed_copies(measurements, matrices, with_heads)
            sums_jobs = {}
            for name, engine in self.engines.items():
                sums_jobs[name] = pool.submit(_add_sums, engine, measurements[name], detailed)
            matrix_jobs = []
            for name in copied:
                engine = self.engines[name]
                matrix_jobs.append(pool.submit(_add_matrices, engine, measurements[name], matrices_by_text, with_heads))
            prediction_job = pool.submit(self._predict_classes, captured.texts.documents)
            # The maps need the captured model, which is in use until the job for its sums has finished.
            sums_jobs[self.captured].result()
            layouts_job = pool.submit(self._add_layouts, captured, tokens)
            for job in (*sums_jobs.values(), *matrix_jobs, layouts_job):
                job.result()  # raises the error of a failed job
            return prediction_job.result()

    def _create_needed_copies(
        self, measurements: Mapping[str, Measurements], matrices: Sequence[str], with_heads: bool
    ) -> list[str]:
        """Copy each model whose measurements lack some of the `matrices` or, if `with_heads`, the heads.

        Return the names of these models. A model that already has a copy is not copied again. `_add_matrices` converts
        the copy to float64.
        No forward pass may run while copies are created (see `DocumentMeasurer.create_copy`).
        """
        names = []
        for name, engine in self.engines.items():
            if engine.lacks_matrices(measurements[name], matrices, with_heads):  # also creates the copy
                names.append(name)
        return names

    def _select_matrices(self, with_heads: bool) -> list[str]:
        """Return the names of the matrices to compute.

        If `with_heads` is False, these are only the matrices that the page's picture shows; if the models have none of
        them, all matrices.
        """
        if with_heads:
            return self.matrices
        picture_matrices = [name for name in self.matrices if name in PICTURE_MATRICES]
        return picture_matrices or self.matrices

    def _fill_measures(self, results: TextResults, measurements: Mapping[str, Measurements]) -> None:
        """Add the tables, ratios, matrices, heads and maps in `measurements` to `results`."""
        tables = self._create_tables(results.documents, measurements)
        results.tables = {f"measure/{name}": _round_as_stored(table) for name, table in tables.items()}
        results.tables["faithfulness/faithfulness"] = pd.DataFrame(columns=REMOVAL_COLUMNS)
        results.tables["faithfulness/class_use"] = pd.DataFrame(columns=CLASS_USE_COLUMNS, dtype=str)
        self._fill_text_values(results, measurements)
        layouts = measurements[self.captured].layouts
        results.maps = layouts.maps
        results.map_quality = layouts.map_quality
        results.components = layouts.components
        results.nearest = layouts.nearest

    def _create_tables(
        self, documents: pd.DataFrame, measurements: Mapping[str, Measurements]
    ) -> dict[str, pd.DataFrame]:
        """Return the page's tables of means over `documents` by name; those of derivatives and parts are empty."""
        texts = len(documents)
        samples = BOOTSTRAP_SAMPLES if texts > 1 else 1  # an interval needs at least two texts
        corpus = CorpusMeasures(
            sums={name: measured.sums for name, measured in measurements.items()},
            random=measurements[self.captured].sums,  # includes those of `random_weights` if it was measured
            texts=documents,
            methods=self.engines[self.captured].methods,
            sites=[],
            draws=Draws(texts, samples, SEED),
            seed=SEED,
        )
        tables = page_tables(corpus)
        tables["geometry"] = page_geometry(corpus)
        tables["mixing_by_review"] = pd.concat(by_review(corpus))
        if len(measurements) > 1:  # The page shows the change in the mean over layers.
            tables["mixing_weighted"] = weighted_table(corpus, ["all"], ["token"])
        captured = measurements[self.captured]
        sample = _choose_own_share_sample(self.engines[self.captured], captured.texts)
        own_share_sums = {name: measured.own_share[sample] for name, measured in measurements.items()}
        tables["exchange"] = own_share_table(own_share_sums, corpus.draws)
        for name in ("derivatives", "parts"):
            tables[name] = pd.DataFrame(columns=list(TABLE_COLUMNS[name]))
        return tables

    def _fill_text_values(self, results: TextResults, measurements: Mapping[str, Measurements]) -> None:
        """Add the ratios, matrices and heads of each text to `results`; own shares that were not measured are NaN.

        The ratios of a text are an array `[methods, layers, tokens]`; the own share is appended as the last method.
        """
        texts = measurements[self.captured].texts
        methods = [*self.engines[self.captured].methods, OWN_SHARE]
        ratios = []
        for name, measured in measurements.items():
            for number, document in enumerate(texts.documents):
                ratios_MLT = measured.ratios[number]
                unknown_LT = np.full_like(ratios_MLT[0], np.nan)
                shares_LT = measured.token_shares.get(number, unknown_LT)
                with_shares_MLT = np.concatenate([ratios_MLT, shares_LT[None]])
                ratios.append(ratio_rows(name, document.name, methods, with_shares_MLT))
                matrices = {key: matrix.astype(np.float32) for key, matrix in measured.matrices[number].items()}
                results.matrices_by_text[name, document.name] = matrices
                results.heads_by_text[name, document.name] = measured.heads.get(number, {})
        results.ratios = pd.concat(ratios, ignore_index=True)

    def _add_layouts(self, measurements: Measurements, tokens: pd.DataFrame) -> None:
        """Add the maps of the residual stream if they are missing; vectors are float16, as in the stage `capture`."""
        if measurements.layouts is None:
            ids = [document.ids for document in measurements.texts.documents]
            with few_threads(len(tokens)):
                vectors = captured_vectors(self.base, ids, self.points, "float16", self.padding)
                measurements.layouts = _lay_out(by_site(vectors), tokens)

    def _predict_classes(self, documents: Sequence[Document]) -> pd.DataFrame:
        """Return the predicted class and probability of each text; an empty table if there is no classifier."""
        if self.classifier is None:
            return pd.DataFrame()
        predictions = [self.classifier.prediction(document.ids.tolist()) for document in documents]
        logits_NC = np.stack([prediction.logits_C.numpy() for prediction in predictions])  # [texts, classes]
        probabilities_NC = softmax(logits_NC, axis=-1)
        predicted_N = probabilities_NC.argmax(-1).tolist()
        columns = {
            "document": [document.name for document in documents],
            "predicted": [self.classifier.classes[number] for number in predicted_N],
            "probability": probabilities_NC.max(-1),
            "read_position": [prediction.read_position for prediction in predictions],
        }
        return pd.DataFrame(columns)


def load_measurer(checkpoints: Mapping[str, Path], names: Sequence[str] | None = None) -> TextMeasurer:
    """Return a measurer of texts that users type, with the models in the folders `checkpoints` (by name).

    Value Zeroing, the slowest measure, is omitted. To measure own shares, tokens are replaced by those of
    `TYPED_DONORS` neutral texts. If `names` is None, the models are the checkpoints of a run, and its fine-tuned
    classifier, if present, predicts classes. Otherwise, two models are compared, and `names` are used in error
    messages. Raise `InputError` for a folder whose model cannot be measured, and for two models with different
    tokenizers or numbers of layers.
    """
    first_folder = next(iter(checkpoints.values()))
    tokenizer = load_tokenizer(first_folder)
    device = measuring_device(chosen_device())
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
    methods = list(RATIOS)
    for base in bases.values():
        methods = family_of(base.config).present(methods)  # only the ratios that all models have remain
    return TextMeasurer(
        bases,
        tokenizer,
        tokenizer.pad_token_id,
        methods,
        matrices,
        classifier=classifier,
        neutral_donors=TYPED_DONORS,
    )


def _check_comparable(names: Sequence[str], folders: Sequence[Path], bases: Sequence[PreTrainedModel]) -> None:
    """Raise `InputError` unless the two models have the same tokenizer and the same number of layers."""
    first_name, second_name = names
    first_state, second_state = (_read_tokenizer_state(folder) for folder in folders)
    if first_state != second_state:
        raise InputError(
            f"compare: the tokenizers of {first_name} and {second_name} differ; use models with the same tokenizer"
        )
    first_layers, second_layers = (sum(layer_counts(base)) for base in bases)  # summed over encoder and decoder
    if first_layers != second_layers:
        counts = f"{first_layers} layers in {first_name}, {second_layers} in {second_name}"
        raise InputError(f"compare: {counts}; compare models with the same number of layers")


def _read_tokenizer_state(folder: Path) -> dict[str, Any]:
    """Return the state of the tokenizer in `folder`, including its vocabulary, but without truncation and padding."""
    state: dict[str, Any] = json.loads(load_tokenizer(folder).backend_tokenizer.to_str())
    return {name: part for name, part in state.items() if name not in ("truncation", "padding")}


def _has_equal_heads(results: TextResults) -> bool:
    """Return True if the attention heads of all models in `results` have the same number and width."""
    shapes = set()
    for arrays in results.heads_by_text.values():
        if arrays:  # empty if the heads of the text were not computed
            _, heads, _, width = arrays["query"].shape  # layers, heads, tokens, width of a head
            shapes.add((heads, width))
    return len(shapes) <= 1


def choose_detailed_texts(lengths: Sequence[int]) -> set[int]:
    """Return the indices of the texts with detailed measures, whose cost is quadratic in the text length.

    The squares of the lengths of these texts sum to at most `MAX_DETAILED_CELLS`. Texts are added in order, and a text
    that would exceed this limit is skipped. If even the shortest text exceeds the limit, only this text is chosen.
    """
    chosen = set[int]()
    cells = 0
    for number, length in enumerate(lengths):
        if cells + length**2 <= MAX_DETAILED_CELLS:
            chosen.add(number)
            cells += length**2
    return chosen or {int(np.argmin(lengths))}


def _select_matrices_by_text(matrices: Sequence[str], texts: int, detailed: Collection[int]) -> list[Sequence[str]]:
    """Return the names of each text's matrices; only texts with indices in `detailed` have the `SLOW_MATRICES`."""
    fast_matrices = [name for name in matrices if name not in SLOW_MATRICES]
    return [matrices if number in detailed else fast_matrices for number in range(texts)]


def _add_sums(engine: Engine, measurements: Measurements, detailed: Collection[int]) -> None:
    """Add the sums for the page's tables, and the detailed measures of single tokens, to `measurements`.

    The detailed measures are the contributions of the input tokens and the own share of each token. They are computed
    only for the texts with indices in `detailed`.
    """
    engine.add_sums(measurements, PAGE_QUANTITIES)
    engine.add_own_share(measurements, _choose_own_share_sample(engine, measurements.texts))
    for number in track(sorted(detailed), "parts and exchange from the input"):
        engine.add_input_parts(measurements, number)
        engine.add_token_shares(measurements, number)


def _choose_own_share_sample(engine: Engine, texts: Texts) -> OwnShareSample:
    """Return the sample for the page's mean own share.

    If the page displays own shares of tokens for all texts, and tokens are exchanged with those of neutral texts, the
    mean is over these tokens, and no further own shares are computed. Otherwise, the sample is that of
    `Measures.own_share`.
    """
    lengths = texts.lengths.tolist()
    has_neutral_donors = len(texts) == 1 or engine.neutral_donors > 0  # a single text has no other texts as donors
    if has_neutral_donors and len(choose_detailed_texts(lengths)) == len(texts):
        return OwnShareSample(max_length=max(lengths))
    return OwnShareSample()


def _add_matrices(
    engine: Engine, measurements: Measurements, names_by_text: Sequence[Sequence[str]], with_heads: bool
) -> None:
    """Add the matrices that `names_by_text` lists for each text to `measurements`, and the heads if `with_heads`."""
    for number, names in enumerate(track(names_by_text, "matrices")):
        engine.add_matrices(measurements, number, names, with_heads)


def _round_as_stored(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table as if loaded from its csv file: rounded, with counts as integers unless values are missing."""
    stored = table.reset_index(drop=True)
    for name in COUNTS:
        if name in stored:
            stored[name] = stored[name].astype("float64" if stored[name].hasnans else "int64")
    return stored.round(DIGITS)


def compile_maps() -> None:
    """Compute a map of random vectors, to compile UMAP before the first text that is long enough for it."""
    random = np.random.default_rng(0).normal(size=(MIN_TYPED_UMAP_TOKENS, 4)).astype(np.float32)
    _fit_maps(LAYOUT, {Site(0, "word_embedding"): random}, UmapParameters(stability_seeds=[]))


class Layouts(NamedTuple):
    """The maps of a page. `TextResults` documents the fields."""

    maps: dict[str, pd.DataFrame]
    map_quality: pd.DataFrame
    components: dict[Site, Components]
    nearest: pd.DataFrame


def _lay_out(stream: Mapping[Site, Array], tokens: pd.DataFrame) -> Layouts:
    """Return maps of the residual stream, their scores and principal components, and the nearest vectors.

    `stream` contains the vectors `[tokens, width]` of each site (a layer and a capture point). Each site has a separate
    map in each of the layouts of `_select_layouts`. A score is the share of neighbours that a map preserves; the share
    expected by chance is added. Neighbours are searched among the vectors themselves, not on a map.
    """
    umap = UmapParameters(stability_seeds=[])  # without maps of further seeds
    vectors = {site: array.astype(np.float32) for site, array in stream.items()}
    nearest = {}
    for site, vectors_TD in vectors.items():
        near, _ = neighbours(vectors_TD, NEAREST_VECTORS, umap.metric, umap.seed)
        nearest[site] = {"nearest": list(near)}
    maps = {}
    scores = []
    components: dict[Site, Components] = {}
    for layout, layout_vectors in _select_layouts(vectors, len(tokens), umap).items():
        coordinates = _fit_maps(layout, layout_vectors, umap)[umap.seed]  # `[tokens, 2]` by site
        columns = {}
        for site, xy in coordinates.items():
            columns[site] = {"x": xy[:, 0], "y": xy[:, 1]}
            value, chance = kept_neighbours(layout_vectors[site], xy, umap.metric, umap.seed)
            scores.append((layout, site.layer, site.point, "neighbours_kept", value, chance))
        maps[layout] = columns_by_site(tokens, columns)
        if layout == PCA:
            components = _describe_components(vectors, coordinates)
    map_quality = pd.DataFrame(scores, columns=QUALITY_COLUMNS).round(QUALITY_DIGITS)
    return Layouts(maps, map_quality, components, columns_by_site(tokens, nearest))


def _select_layouts(
    vectors: Mapping[Site, Vectors], tokens: int, umap: UmapParameters
) -> dict[str, Mapping[Site, Vectors]]:
    """Return the vectors `[tokens, width]` to map, by layout (`LAYOUT`, which is computed by UMAP, and `PCA`) and site.

    UMAP is omitted if there are too few `tokens`; `points_for` omits sites with too few distinct vectors for UMAP.
    """
    vectors_by_layout: dict[str, Mapping[Site, Vectors]] = {}
    if tokens >= MIN_TYPED_UMAP_TOKENS:
        umap_vectors = points_for(LAYOUT, vectors, umap)
        if umap_vectors:
            vectors_by_layout[LAYOUT] = umap_vectors
    vectors_by_layout[PCA] = vectors
    return vectors_by_layout


def _describe_components(vectors: Mapping[Site, Vectors], maps: Mapping[Site, Coordinates]) -> dict[Site, Components]:
    """Return the scale and the shares of variance of the principal components on each site's map, where defined."""
    components = {}
    for site, xy in maps.items():
        site_components = components_of(vectors[site], xy)
        if site_components is not None:
            components[site] = site_components
    return components


def _fit_maps(layout: str, vectors: Mapping[Site, Vectors], umap: UmapParameters) -> Maps:
    """Return the result of `fit_layout` (maps by seed and site), without the slow import of umap-learn for `pca`."""
    if layout == PCA:
        return fit_components(vectors, umap)
    from attnmix.maps.layouts import fit_layout

    return fit_layout(layout, vectors, umap)
