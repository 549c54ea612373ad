"""`measure`: measure the mixing ratios of texts in a model, and the controls of these ratios."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from attnmix.core.settings import BATCH_TOKENS, CaptureParameters, checked_section
from attnmix.measures.controls import left_out_sentence
from attnmix.measures.documents import Document, Texts, documents_of
from attnmix.measures.engine import MEASURES, Measurements
from attnmix.model import Model
from attnmix.models.families import layer_counts
from attnmix.results.arguments import (
    add_classes,
    check_controls,
    check_model,
    choose_ratios,
    read_classes,
    read_names,
    tokenize_texts,
)
from attnmix.results.controls import add_class_shares, control_quantities, texts_without_corpus_value
from attnmix.results.measure_names import CLASS_SHARE
from attnmix.results.measured_model import MeasuredModel
from attnmix.results.result import Measures, observed_engine
from attnmix.runs.tokens import TokenizedTexts


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
    """Return the mixing ratios of every token of `texts`; other measures of the result are computed on demand.

    The following list contains six questions, the measure that answers each question, and a limitation of this measure
    (docs/measures/which.md):

    - How much of a vector comes from its own input token? Use `Measures.own_share`. Texts with exchanged tokens are
      unlike real texts.
    - How much does one layer mix in from other tokens? Use the control `swap`. This measure is wrong if the tokens of a
      text constrain each other, for example if they sum to a constant.
    - From which tokens does a vector come? Use `Measures.parts()["projection"]`. A sink can contribute a constant.
    - Would a ratio be as high with other words or another word order? Use `controls`. The control `corpus_value` does
      not detect information that only the attention weights transmit.
    - Does one model mix more than another? Use `compare`. The difference also depends on the seed and on text length.
    - Which information does the class depend on? Use `Model.intervene`. Edited inputs are unlike real texts.

    Args:
        model: A model that `load` returned.
        texts: One text; several texts (a list, a column of a table or of a dataset); pairs, `[("first", "second")]`;
            or the output of `model.tokenizer(...)` (padding is ignored). Token IDs without an attention mask are
            treated as one segment. No special tokens are added to the IDs, and padding at their ends is removed.
        methods: One or more names of `attnmix.measures.ratios.RATIOS`; by default all ratios of the model's family.
        max_length: The number of tokens to which texts are truncated, with a warning; by default the model's limit.
            Longer sequences of token IDs raise an error.
        controls: Names of controls, which `Measures.controls` and `compare` show. Each ratio can be measured under
            these conditions: words in random order (`shuffled_words`); value vectors replaced by their mean over other
            texts (`corpus_value`) or over the same text (`text_mean_value`); values without biases
            (`without_value_bias`); no special tokens as sources (`without_special_sources`); `random_weights`. `swap`
            exchanges inputs between texts. `class_share` is the share of the contributions of other tokens that is
            common to the texts of a class. Texts with a token class that no other text has are excluded from
            `corpus_value`, with a warning.
        labels: A class for each text, required by `class_share`.
        batch_tokens: The maximum number of tokens in a forward pass, including padding. A longer text is measured in a
            batch by itself. A smaller maximum needs less memory.

    Raises:
        InputError: For invalid arguments or an empty or missing text, and if the parts into which a layer is decomposed
            do not sum to the layer's output.

    Example:
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
    check_model(model, "measure(model, texts)")
    present = choose_ratios(model, methods)
    tokenized = tokenize_texts(model, texts, max_length)
    return measure_tokenized(model, tokenized, present, controls, labels, batch_tokens)


def measure_tokenized(
    model: Model,
    tokenized: TokenizedTexts,
    present: Sequence[str],
    controls: str | Sequence[str],
    labels: Sequence[Any] | None,
    batch_tokens: int | None,
) -> Measures:
    """Return the result of `measure` for tokenized texts; the other arguments are those of `measure`.

    `present` contains the names of the requested ratios that are defined for the model's family.
    """
    classes = read_classes(labels, len(tokenized.texts))
    control_names = read_names(controls)
    check_controls(control_names, classes, len(tokenized.texts))
    max_batch_tokens = BATCH_TOKENS
    if batch_tokens is not None:
        max_batch_tokens = checked_section(CaptureParameters, batch_tokens=batch_tokens).batch_tokens
    documents = documents_of(tokenized.texts, tokenized.tokens)
    if classes is not None:
        documents = add_classes(documents, classes)
    if "corpus_value" in control_names:
        _warn_of_excluded_texts(documents)
    measurements = Measurements(Texts(documents), max_batch_tokens)
    with observed_engine(model, tokenized.pairs, present, measurements) as engine:
        engine.add_sums(measurements, [MEASURES, *control_quantities(control_names)])
        layers_by_stack = layer_counts(engine.base)
    if CLASS_SHARE in control_names:
        add_class_shares(measurements)
    encoder_layers = None
    if len(layers_by_stack) > 1:  # an encoder and a decoder
        encoder_layers = layers_by_stack[0]
    recorded_model = MeasuredModel.record(model)
    return Measures(recorded_model, tokenized, present, measurements, encoder_layers, control_names)


def _warn_of_excluded_texts(documents: Sequence[Document]) -> None:
    """Warn of texts with a token class that no other text has; they are excluded from the control `corpus_value`."""
    excluded = texts_without_corpus_value(documents)  # such a token class by the index of the text
    if excluded:
        number, token_class = next(iter(excluded.items()))
        sentence = left_out_sentence(f"text {number}", token_class, len(excluded), len(documents))
        warnings.warn(sentence, stacklevel=4)  # the caller of `measure`
