"""`measure`: the mixing ratios of texts in a model, and the controls beside them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from attnmix.core.settings import BATCH_TOKENS, CaptureParameters, checked_section
from attnmix.measures.controls import left_out_sentence
from attnmix.measures.documents import Texts, documents_of
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
    check_model(model, "measure(model, texts)")
    present = choose_ratios(model, methods)
    tokenized = tokenize_texts(model, texts, max_length)
    classes = read_classes(labels, len(tokenized.texts))
    controls = read_names(controls)
    check_controls(controls, classes, len(tokenized.texts))
    tokens = BATCH_TOKENS
    if batch_tokens is not None:
        tokens = checked_section(CaptureParameters, batch_tokens=batch_tokens).batch_tokens
    documents = documents_of(tokenized.texts, tokenized.tokens)
    if classes is not None:
        documents = add_classes(documents, classes)
    if "corpus_value" in controls:
        left_out = texts_without_corpus_value(documents)
        if left_out:
            number, token_class = next(iter(left_out.items()))
            sentence = left_out_sentence(f"text {number}", token_class, len(left_out), len(documents))
            warnings.warn(sentence, stacklevel=2)
    measurements = Measurements(Texts(documents), tokens)
    with observed_engine(model, tokenized.pairs, present, measurements) as engine:
        engine.add_sums(measurements, [MEASURES, *control_quantities(controls)])
        layers = layer_counts(engine.base)
    if CLASS_SHARE in controls:
        add_class_shares(measurements)
    encoder_layers = layers[0] if len(layers) > 1 else None
    return Measures(MeasuredModel.record(model), tokenized, present, measurements, encoder_layers, controls)
