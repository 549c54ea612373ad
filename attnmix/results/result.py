"""`Measures`, the result of `measure`: mixing ratios of texts in one model, and values that are computed on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.disk import check_new_file
from attnmix.core.errors import InputError
from attnmix.core.extras import require_extra
from attnmix.core.names import ALL_DONORS, CAPTURED_CHECKPOINT
from attnmix.core.paths import read_path
from attnmix.core.progress import show_progress
from attnmix.core.selections import is_whole_number
from attnmix.core.statistics import Sums
from attnmix.core.store.texts import DECODER_TOKEN
from attnmix.core.terminal import shorten
from attnmix.core.threads import few_threads
from attnmix.measures.controls import CONTROLS
from attnmix.measures.documents import Document
from attnmix.measures.engine import Engine, Measurements, OwnShareSample
from attnmix.measures.input_parts import RULES
from attnmix.measures.matrices import RESULT_MATRICES, with_rollout
from attnmix.measures.ratios import preferred_ratio
from attnmix.model import Model
from attnmix.models.families import family_of
from attnmix.results.archive import SavedResult, shareable_source, write_result
from attnmix.results.arguments import OWN_SHARE_SAMPLE, check_own_share_sample, read_positions
from attnmix.results.arrays import label_matrix, label_parts, tabulate_ratios
from attnmix.results.controls import select_controls, sink_totals, warn_of_total_effects
from attnmix.results.measure_names import CONTROL_NAMES, OWN_SHARE, check_name, is_share
from attnmix.results.measured_model import MeasuredModel, SavedModel
from attnmix.results.notebook import MAX_TOKENS, draw_notebook_view
from attnmix.results.tables import control_table, mean_table
from attnmix.results.totals import select_method, subtract_control, sum_quantities, sum_ratios
from attnmix.runs.tokens import TokenizedTexts

if TYPE_CHECKING:
    import xarray
    from matplotlib.axes import Axes

TOKEN_COLUMNS = ["text", "position", "token_id", "token", "word", "token_class"]

IDENTITY_TEXTS = 3  # number of texts in which the expensive identities are checked, in addition to the longest text


@contextmanager
def observed_engine(model: Model, pairs: bool, methods: Sequence[str], measured: Measurements) -> Iterator[Engine]:
    """Yield an engine that measures the ratios `methods` in a model in memory, with the batch size of `measured`.

    `pairs` is True for texts that are pairs. If the texts of `measured` have few tokens in total, one thread is used.
    """
    with model.observed(pairs) as base, few_threads(int(measured.texts.lengths.sum())):
        yield Engine(
            base,
            methods,
            model.pad_token_id,
            tokenizer=model.tokenizer,
            pairs=pairs,
            batch_tokens=measured.batch_tokens,
            identity_texts=IDENTITY_TEXTS,
        )


@dataclass(frozen=True, repr=False, eq=False)
class Measures:
    """The measures of texts in one model, returned by `measure` and `load_result`. Layers are numbered from 1."""

    measured_model: MeasuredModel
    tokenized: TokenizedTexts
    methods: Sequence[str]
    """The names of the measured ratios."""
    measurements: Measurements
    """The cache of all values computed so far."""
    encoder_layers: int | None = None
    """The number of encoder layers of an encoder-decoder model; None for other models."""
    control_names: Sequence[str] = ()
    """The measured controls."""

    @property
    def model(self) -> Model | SavedModel:
        """The measured model; a loaded result contains only the model's name and source until the model is needed."""
        return self.measured_model.model

    @property
    def documents(self) -> Sequence[Document]:
        """The texts as token IDs."""
        return self.measurements.texts.documents

    @property
    def ratios_by_text(self) -> list[npt.NDArray[np.float32]]:
        """The ratios of each text `[methods, layers, tokens]`."""
        return [self.measurements.ratios[number].copy() for number in range(len(self.measurements.texts))]

    @property
    def layers(self) -> int:
        """The number of layers."""
        return int(self.measurements.ratios[0].shape[1])

    @property
    def control_totals(self) -> dict[str, Sums]:
        """The sums of the measured controls over the tokens of each text, by name."""
        return select_controls(self.control_names, self.measurements.sums)

    def __repr__(self) -> str:
        number = len(self.documents)
        texts = "1 text" if number == 1 else f"{number} texts"
        extent = f"{texts}, {len(self._token_table)} tokens, {self.layers} layers of {self.model.name}"
        return f"Measures({extent}; {', '.join(self.methods)})"

    def _repr_html_(self) -> str:
        """Return the HTML view for notebooks, with a picture of the own shares of the first text.

        Own shares that are not in the cache are computed only if the first text is short.
        """
        shares_by_text = self.measurements.token_shares  # the keys are text indices
        is_short = len(self.documents[0]) <= MAX_TOKENS
        if 0 not in shares_by_text and is_short and self.own_share_obstacle() is None:
            with self._open_engine() as engine:
                engine.add_token_shares(self.measurements, 0)
        is_first_text = self._token_table["text"] == 0
        tokens = self._token_table.loc[is_first_text, "token"].tolist()
        return draw_notebook_view(repr(self), self.model.name, tokens, shares_by_text.get(0))

    @property
    def texts(self) -> list[str]:
        """The texts. The two texts of a pair are joined, and token IDs are decoded."""
        return self.tokenized.texts["text"].tolist()

    @property
    def tokens(self) -> pd.DataFrame:
        """A table of all tokens with the columns `text, position, token_id, token, word, token_class`."""
        return self._token_table.copy()

    @cached_property
    def _token_table(self) -> pd.DataFrame:
        lengths = [len(document) for document in self.documents]
        numbers = np.repeat(np.arange(len(lengths)), lengths)
        return self.tokenized.tokens.assign(text=numbers)[TOKEN_COLUMNS]

    @property
    def ratios(self) -> pd.DataFrame:
        """A table of the mixing ratio of every token, with the columns `text, position, token, layer, method, ratio`.

        A ratio is in [0, 1]: the length of the contribution of other tokens, divided by the sum of this length and the
        length of the contribution of the token itself.
        """
        return tabulate_ratios(self.measurements, self.methods, self._label_tokens)

    def _label_tokens(self, text: int, layer: int) -> list[str]:
        """Return the input tokens of a text in a layer. In decoder layers, inputs are shifted right by one token."""
        is_decoder = self.encoder_layers is not None and layer > self.encoder_layers
        column = DECODER_TOKEN if is_decoder else "token"
        is_in_text = self._token_table["text"] == text
        labels: list[str] = self.tokenized.tokens.loc[is_in_text, column].tolist()
        return labels

    def by_layer(self) -> pd.DataFrame:
        """Return a table of means over all tokens: `layer, method, mean, ci_low, ci_high, texts, tokens`.

        `ci_low` and `ci_high` are the bounds of the 95 % bootstrap interval over texts (not tokens). They are NaN if
        there are fewer than 8 texts. `tokens` is the mean number of tokens per text; ratios depend on this number.
        """
        return mean_table(self.ratio_totals()).rename(columns={"measure": "method"})

    def own_share(
        self,
        by: str = "exchange",
        *,
        max_texts: int = OWN_SHARE_SAMPLE.max_texts,
        max_length: int = OWN_SHARE_SAMPLE.max_length,
    ) -> pd.DataFrame:
        """Return the own share of token vectors after each layer, averaged over tokens and texts.

        By exchange, the own share is o / (o + a). Here, o is the displacement of a vector if its own token is replaced
        by a token of another text, and a its displacement if all other tokens are replaced. Attention weights are
        recomputed for the exchanged tokens. Computed from parts, the own share is
        |P_ii| / (|P_ii| + |sum_{j != i} P_ij|), where P_ij are the contributions of `parts`. Attention weights are
        fixed, and biases are ignored.

        Args:
            by: `exchange` or `parts`.
            max_texts: The maximum number of texts. If there are more texts, a stratified sample is drawn.
            max_length: The number of tokens to which texts are truncated. The run time is quadratic in this number.

        Returns:
            A table with the columns `donors, layer, mean, ci_low, ci_high, texts, tokens`. For `exchange`, there is
            a row for each layer and kind of donor. If there are `labels`, the kinds are texts of the same class, texts
            of another class, and `all` texts. Otherwise, donors are other texts or, for a single text, neutral English
            sentences. If there are several texts, at most four positions of each text are measured by exchange. If the
            share is computed from parts, there is one row per layer, and the column `donors` is missing.

        Raises:
            InputError: For `parts` if the layers of the model's family cannot be decomposed.

        Example:
            >>> result.own_share()["mean"].round(2).tolist()
            [0.81, 0.71, 0.67, 0.64, 0.65, 0.58]
            >>> result.own_share("parts")["mean"].round(2).tolist()
            [0.79, 0.68, 0.65, 0.61, 0.64, 0.52]

        References:
            docs/measures/exchange.md; Geiger et al., NeurIPS 2021; Modarressi et al., ACL 2023 (`parts`).
        """
        sample = check_own_share_sample(by, max_texts, max_length)
        table = mean_table(self.own_share_totals(sample))
        names = table.pop("measure")  # `own_share` for all donors, `own_share_<kind>` for a kind of donor
        if by == "exchange":
            donors = names.str.removeprefix(f"{OWN_SHARE}_")
            donors = donors.replace(OWN_SHARE, self._name_all_donors())
            table.insert(0, "donors", donors)
        return table

    def _name_all_donors(self) -> str:
        """Return the name for the mean over all donors: `ALL_DONORS`, or the kind of donor if there is only one."""
        kinds = Engine.donor_kinds(self.measurements.texts)
        if len(kinds) > 1:
            return ALL_DONORS
        return kinds[0]

    def plot(self, measure: str | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw the mean of a measure by layer with its 95 % interval over texts; return the matplotlib axes.

        Args:
            measure: A ratio of the result, `own_share`, or a measured share such as `swap`; by default the ratio that
                covers most of the attention block.
            ax: The axes to draw in; by default a new figure with the width of one column of a paper.

        Raises:
            InputError: For any other measure.

        Example:
            >>> ax = result.plot("attnresln_n")
            >>> ax.lines[0].get_ydata().round(3).tolist()
            [0.254, 0.196, 0.174, 0.182, 0.153, 0.294]
        """
        require_extra("page", "result.plot()")
        if measure is None:
            measure = preferred_ratio(self.methods)
        shares = {name: sums for name, sums in self.control_totals.items() if is_share(name)}
        check_name("measure", measure, [*self.methods, OWN_SHARE, *shares])
        totals = self.own_share_totals() if measure == OWN_SHARE else self.ratio_totals() | shares
        from attnmix.figures.layer_means import LayerMeans, draw_layer_means
        from attnmix.results.plots import describe_axes

        title, ylabel, ylim = describe_axes(measure)
        means = mean_table({measure: totals[measure]})
        curve = LayerMeans(self.model.name, CAPTURED_CHECKPOINT, means)
        return draw_layer_means([curve], title, ylabel, ax, ylim)

    def sinks(self) -> pd.DataFrame:
        """Return a table of measures of attention sinks: `layer, measure, mean, ci_low, ci_high, texts, tokens`.

        `attention_to_first` is the mean attention weight of the other tokens on the first token, and
        `attention_to_last` that on the last token. `value_of_first` and `value_of_last` are the norms of the value
        vectors of these two tokens, divided by the mean norm for the tokens between them. `massive_activation` is the
        largest absolute activation of the layer's output, relative to the median. A sink receives much attention
        although its value vector has a small norm, so attention weights overestimate mixing. The control
        `without_special_sources` measures the ratios without the contributions of special tokens.

        >>> sinks = result.sinks().pivot(index="layer", columns="measure", values="mean").round(2)
        >>> sinks["attention_to_first"].tolist(), sinks["value_of_first"].tolist()
        ([0.35, 0.6, 0.66, 0.58, 0.62, 0.48], [0.4, 0.05, 0.04, 0.22, 0.04, 0.09])
        """
        self.measured_model.check_unedited()
        if "sinks" not in self.measurements.sums:
            with self._open_engine() as engine:
                engine.add_sums(self.measurements, ["sinks"])
        return mean_table(sink_totals(self.measurements))

    def controls(self, method: str | None = None) -> pd.DataFrame:
        """Return the measured `controls` of one ratio, with the differences between the ratio and its controls.

        Args:
            method: The ratio; by default the ratio that covers most of the attention block.

        Returns:
            A row for each `control` and `layer`. The layer is a number, or `all` for the mean over layers. `mean` is
            the ratio measured with the control, and `ratio_minus_control` is the original ratio minus this ratio.
            `swap` and `class_share` are not ratios, so they only have a mean. `class_share_permuted` is the share that
            5 % of all permutations of the classes exceed. Intervals are over texts. The intervals from
            `ratio_minus_control_simultaneous_low` to `ratio_minus_control_simultaneous_high` are simultaneous for all
            rows; they need at least 20 texts. `texts` is the number of texts, and `tokens` their mean length.

        Raises:
            InputError: For a ratio that was not measured, or if no controls were measured.

        Example:
            >>> controls = ["text_mean_value", "without_value_bias"]
            >>> table = attnmix.measure(model, ["time flies", "like an arrow"], controls=controls).controls()
            >>> columns = ["control", "mean", "ratio_minus_control"]
            >>> print(table.query("layer == 'all'")[columns].round(2).to_string(index=False))
                       control  mean  ratio_minus_control
               text_mean_value  0.25                -0.06
            without_value_bias  0.18                 0.00
        """
        if method is None:
            method = preferred_ratio(self.methods)
        check_name("method", method, self.methods)
        if not self.control_totals:
            advice = f"pass some to measure(model, texts, controls=[...]), from {', '.join(CONTROL_NAMES)}"
            raise InputError(f"controls: none were measured; {advice}")
        ratio_index = self.methods.index(method)
        ratio = self.ratio_totals()[method]
        totals = {}
        differences = {}  # the ratio minus each control that is a ratio
        for name, sums in self.control_totals.items():
            if name in CONTROLS:  # a control of ratios, with sums for every ratio
                control = select_method(sums, ratio_index)
                totals[name] = control
                differences[name] = subtract_control(ratio, control)
            else:  # a swap or class share
                totals[name] = sums
        return control_table(totals, differences)

    def ratio_totals(self) -> dict[str, Sums]:
        """Return the sums of each ratio over the tokens of each text, with the numbers of tokens as counts, by name."""
        return sum_ratios(self.measurements, self.methods)

    def own_share_totals(self, sample: OwnShareSample = OWN_SHARE_SAMPLE) -> dict[str, Sums]:
        """Return the sums of own shares `[texts, layers]` in a sample: for all donors, then for each kind of donor.

        Values that are not in the cache are computed.
        """
        self.measured_model.check_unedited()
        if sample not in self.measurements.own_share:
            with self._open_engine() as engine:
                added = engine.add_own_share(self.measurements, sample)
            warn_of_total_effects(added)
        sums_by_name = self.measurements.own_share[sample]  # also contains total effects
        return {name: sums for name, sums in sums_by_name.items() if name.startswith(OWN_SHARE)}

    def own_share_obstacle(self, sample: OwnShareSample = OWN_SHARE_SAMPLE) -> str | None:
        """Return why the own share of a sample is not in the cache and cannot be computed; None if it is available."""
        if sample in self.measurements.own_share:
            return None
        return self.measured_model.obstacle()

    def quantities(self, methods: Sequence[str]) -> dict[str, Sums]:
        """Return the sums for `compare`: swaps, class shares, the ratios `methods`, and these ratios minus controls."""
        return sum_quantities(self.measurements, self.methods, self.control_names, methods)

    @contextmanager
    def _open_engine(self) -> Iterator[Engine]:
        """Yield an engine for the model, which is loaded if necessary; raise `InputError` if the model has changed."""
        model = self.measured_model.read()
        with observed_engine(model, self.tokenized.pairs, self.methods, self.measurements) as engine:
            yield engine

    def matrix(self, name: str, layer: int | None = None, text: int = 0) -> xarray.DataArray:
        """Return a contribution matrix of one text.

        Args:
            name: A name of `attnmix.measures.matrices.RESULT_MATRICES`: a matrix (`attention`, `norm`,
                `contribution_weights`, `value_zeroing`, `value_zeroing_without_bias`, `alti` or `globenc`), a rollout
                from the embeddings to the layer (such as `alti_rollout`), or `exchange`. `norm` contains the lengths of
                the contributions F_ij, `contribution_weights` are signed, and `exchange` is the displacement of a
                token's vector if one input token is replaced.
            layer: The layer; by default all layers. Required for encoder-decoder models, because encoder and decoder
                have different input tokens.
            text: The index of the text.

        Returns:
            The matrix with the dimensions `token` (receiving) and `source`. If `layer` is None, the first dimension is
            `layer`.

        Raises:
            InputError: For an unknown matrix, layer or text.

        Example:
            >>> matrix = result.matrix("alti", layer=6)
            >>> matrix.dims, matrix.shape, float(matrix.sum("source").mean().round(6))
            (('token', 'source'), (7, 7), 1.0)
        """
        check_name("matrix", name, RESULT_MATRICES)
        self._check_text(text)
        self._check_layer(layer)
        self.measured_model.check_unedited()
        if name not in self.measurements.matrices.get(text, {}):
            self._add_matrix(text, name)
        matrix_LTT = self.measurements.matrices[text][name]
        layer_of_labels = 1 if layer is None else layer  # without `layer`, all layers have the same input tokens
        labels = self._label_tokens(text, layer_of_labels)
        array = label_matrix(name, matrix_LTT, labels)
        if layer is None:
            return array
        return array.sel(layer=layer)

    def _add_matrix(self, text: int, name: str) -> None:
        """Compute a matrix of one text and the rollout of this matrix, and add both to the cache.

        Raise `InputError` if the matrix is not available for the model's family.
        """
        with self._open_engine() as engine:
            family = family_of(engine.base.config)
            if not family.present([name]):
                raise InputError(f"matrix: {name} is not available for the model family {family.model_type}")
            with show_progress(name, self.layers) as progress:
                engine.add_matrices(self.measurements, text, with_rollout(name), advance=progress.advance)

    def parts(self, text: int = 0, *, rows: int | Sequence[int] | None = None, rule: str = "chord") -> xarray.Dataset:
        """Return the contributions of each token of one text to the embeddings and to the output of each layer.

        A vector y_i is the sum of one part P_ij for each source token j and a part of the biases. This sum is verified.
        Attention weights and standard deviations in norms are fixed at their values in this text. Layer 0 is the input
        of the first layer. In encoder-decoder models, only the encoder is decomposed.

        `length`            |P_ij| by `layer`, `token` and `source`
        `projection`        P_ij . y_i / |y_i|^2, a signed share; these shares and `bias_projection` sum to 1
        `own`, `others`     |P_ii| and |sum_{j != i} P_ij| by `layer` and `token`
        `own_share`         own / (own + others)
        `coherence`         others / sum_{j != i} |P_ij|: the fraction of the parts of other tokens that does not cancel
        `biases`, `whole`   the length of the part of the biases, and the length of the vector y_i
        `bias_cosine`       the cosine between sum_{j != i} P_ij and the part of the biases; if it is below -0.9, these
                            two vectors are nearly opposite and cancel in part, so that their lengths do not describe
                            y_i

        Args:
            text: The index of the text.
            rows: Positions of receiving tokens i. If given, the result contains only `projection` and
                `bias_projection` of the tokens at these positions, computed by one backward pass for each position and
                layer. Use `rows` for long texts, because the cost of the other variables is quadratic in the number of
                tokens.
            rule: The decomposition of activation functions, `chord` or `tangent`
                (`attnmix.measures.input_parts.RULES`; Modarressi et al., ACL 2023).

        Raises:
            InputError: For an unknown text, position or rule, or if the family's layers cannot be decomposed.

        Example:
            >>> result.parts()["own_share"].mean("token").round(2).values.tolist()
            [1.0, 0.79, 0.68, 0.65, 0.61, 0.64, 0.52]
        """
        self._check_text(text)
        check_name("rule", rule, RULES)
        tokens = self._label_tokens(text, layer=1)
        positions = read_positions(rows, len(tokens))
        self.measured_model.check_unedited()
        cache = self.measurements.parts
        # Without `rows`, additional variables are computed, so this case has its own key, which contains no positions.
        key: tuple[Any, ...] = (text, rule) if rows is None else (text, rule, *positions)
        if key not in cache:
            document = self.measurements.texts.document(text)
            with self._open_engine() as engine:
                cache[key] = engine.parts(document, rule, None if rows is None else positions)
        return label_parts(cache[key], tokens, positions)

    def _check_text(self, text: Any) -> None:
        """Raise `InputError` unless `text` is the index of a text."""
        if not is_whole_number(text) or not 0 <= text < len(self.documents):
            raise InputError(f"text: {shorten(repr(text))}; allowed: 0 to {len(self.documents) - 1}")

    def _check_layer(self, layer: Any) -> None:
        """Raise `InputError` for an unknown layer, and if `layer` is None in an encoder-decoder model."""
        is_optional = self.encoder_layers is None
        if layer is None and is_optional:
            return
        if not is_whole_number(layer) or not 1 <= layer <= self.layers:
            raise InputError(f"layer: {shorten(repr(layer))}; allowed: 1 to {self.layers}")

    def to_html(self, path: Path | str) -> Path:
        """Write an interactive page of the texts, as one file that works offline, and return its path.

        The page contains all attention heads and controls and, if there are at least 48 tokens, UMAP maps. For these
        maps, umap-learn is loaded, which is slow. Texts passed as token IDs are shown as decoded text.

        >>> result.to_html("page.html").name
        'page.html'
        """
        from attnmix.page.viewer import write_text

        path = read_path("path", path, "to_html(path)")
        write_text(check_new_file("path", path), self._render_page())
        return path

    def save(self, path: Path | str) -> Path:
        """Write all values computed so far to a zip file for `load_result`, and return its path.

        The file contains the texts, tokens, ratios and controls, and whichever of the own shares, sinks, matrices,
        parts and attention heads were computed, but not the model. The documentation of `attnmix.results.archive`
        describes the file format.

        >>> result.save("result.zip").name
        'result.zip'
        """
        path = read_path("path", path, "save(path)")
        if path.suffix.lower() in (".html", ".htm"):
            raise InputError(
                f"path: {path} is the name of a page; pass the name of a zip file, or call result.to_html(path)"
            )
        target = check_new_file("path", path)
        facts = {
            "model": self.model.name,
            "source": shareable_source(self.measured_model.find_source()),
            "methods": list(self.methods),
            "encoder_layers": self.encoder_layers,
            "controls": list(self.control_names),
            "weights": self.measured_model.weights.hex(),
            "output": self.measured_model.describe_output(),
        }
        write_result(target, SavedResult(facts, self.tokenized.texts, self.tokenized.tokens, self.measurements))
        return path

    def show(self, whole: bool = False) -> Any:
        """Show the interactive page of the texts: in a notebook below the cell, otherwise in a web browser.

        Notebooks store the page with their other outputs. Attention heads and, usually, most matrices are
        therefore omitted in a notebook unless `whole` is True.
        """
        from attnmix.page.viewer import is_in_notebook, show

        return show(self._render_page(whole or not is_in_notebook()))

    def _render_page(self, whole: bool = True) -> str:
        """Return the HTML of the page; if `whole` is False, attention heads and, usually, most matrices are omitted."""
        from attnmix.results.page import models_page

        self.measured_model.check_unedited()
        is_cached = whole in self.measurements.pages
        models = [] if is_cached else [self.measured_model.read()]  # a cached page needs no model
        return models_page(
            models, (self.model.name,), self.tokenized, self.methods, "result", whole=whole, known=[self.measurements]
        )
