"""Interventions on attention values that measure how much of the information in these values the classifier uses.

`interventions` replaces the value vectors of all tokens of a text by one vector per head, in one layer (the first
edited layer) and all later layers. This vector is one of these means:

    text_mean     mean over the text's own tokens; removes the differences between tokens
    corpus_mean   mean over all other texts; also removes the content of the text
    other_class   mean over the texts predicted as this text's second most probable class

Shapes: N texts, H heads, T tokens, d head width, C classes, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attnmix.core.statistics import BOOTSTRAP_SAMPLES, resample
from attnmix.faithfulness.classifier import Classifier
from attnmix.interventions import Edit, edited_attention, replaced_values
from attnmix.measures.documents import Document
from attnmix.models.capture_points import layer_hooks, layer_modules
from attnmix.models.encoding import batches_by_tokens, padded

CLASS_USE_COLUMNS = ["checkpoint", "quantity", "group", "layer", "mean", "ci_low", "ci_high", "documents"]


def interventions(classifier: Classifier, documents: Sequence[Document], seed: int) -> pd.DataFrame:
    """Return a table with `CLASS_USE_COLUMNS`, with a row for each quantity, edit (`group`) and first edited layer.

    An edit replaces the value vectors of all tokens of a text by a mean (see `_weigh_texts`), in the first edited layer
    and all later layers. The quantity `class_kept` is the share of texts whose predicted class is unchanged,
    `accuracy` is the share of correct predictions, and `probability` is the mean change in the probability of the
    originally predicted class. Intervals are bootstrapped over texts.
    """
    logits_NC, means = _predict_with_means(classifier, documents)  # `means` are each text's mean values, by layer
    predicted_N, second_N = logits_NC.topk(2).indices.T  # the most and the second most probable class of each text
    labels_N = torch.tensor([document.label for document in documents])
    probability_N = _select_class_probabilities(logits_NC, predicted_N)
    is_right_N = predicted_N == labels_N
    rows = [table_row("finetuned", "accuracy", "none", 0, is_right_N, seed)]  # without an edit
    for edit, weights_NN in _weigh_texts(predicted_N, second_N).items():
        is_defined_N = weights_NN.sum(-1) > 0  # False if this text's second class is predicted for no text
        if not is_defined_N.any() or len(documents) < 2:
            continue
        replacements = _average_over_texts(means, weights_NN)
        logits_by_layer = _compute_edited_logits(classifier, documents, replacements)
        for first_layer, edited_NC in logits_by_layer.items():
            quantities = _compare_predictions(edited_NC, predicted_N, probability_N, labels_N)
            for quantity, values_N in quantities.items():
                row = table_row("finetuned", quantity, edit, first_layer, values_N[is_defined_N], seed)
                rows.append(row)
    return pd.DataFrame(rows, columns=CLASS_USE_COLUMNS)


def _average_over_texts(means: Mapping[int, Tensor], weights_NN: Tensor) -> dict[int, Tensor]:
    """Return, by layer and for each text n, the mean of `means` over all texts with the weights in row n, `[N, H, d]`.

    `means` are vectors `[N, H, d]` by layer (texts, heads, head width). A text without weights gets zeros.
    """
    sums_N = weights_NN.sum(-1)
    shares_NN = weights_NN / sums_N.clamp_min(1)[:, None]
    averages = {}
    for layer, mean_NHd in means.items():
        averages[layer] = torch.einsum("nm,mhd->nhd", shares_NN.to(mean_NHd), mean_NHd)
    return averages


def _weigh_texts(predicted_N: Tensor, second_N: Tensor) -> dict[str, Tensor]:
    """Return, by edit, weights `[N, N]`; row n weights the texts in the mean that replaces the values of text n.

    The means are those of the text itself (`text_mean`), of all other texts (`corpus_mean`), and of the texts whose
    predicted class is the second most probable class of text n (`other_class`). `predicted_N` and `second_N` are the
    most probable and the second most probable class of each text.
    """
    own_NN = torch.eye(len(predicted_N))
    is_second_class_NN = second_N[:, None] == predicted_N
    return {"text_mean": own_NN, "corpus_mean": 1 - own_NN, "other_class": is_second_class_NN.float()}


def _compare_predictions(
    edited_NC: Tensor, predicted_N: Tensor, probability_N: Tensor, labels_N: Tensor
) -> dict[str, Tensor]:
    """Return the quantities `[N]` of `interventions` by name, from the logits `[N, C]` of edited texts.

    `predicted_N` and `probability_N` are the predicted class of each unedited text and the probability of this class.
    """
    edited_predicted_N = edited_NC.argmax(-1)
    edited_probability_N = _select_class_probabilities(edited_NC, predicted_N)
    return {
        "class_kept": edited_predicted_N == predicted_N,
        "accuracy": edited_predicted_N == labels_N,
        "probability": edited_probability_N - probability_N,
    }


def _predict_with_means(classifier: Classifier, documents: Sequence[Document]) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the logits `[N, C]` of unedited texts, and by layer the mean value vectors `[N, H, d]` of each text.

    The means are over the tokens of the text, for each of H heads of width d. Shapes of a batch: B texts, T padded
    tokens.
    """
    ids = [document.ids.tolist() for document in documents]
    means: dict[int, Tensor] = {}

    def create_recorder(batch: list[int], mask_BT: Tensor) -> Edit:
        """Return an edit for the texts with the indices `batch` that changes nothing, but adds their means to `means`.

        `classifier.logits` calls this function for each batch, and the model calls the returned edit in each layer.
        """
        mask_B1T1 = mask_BT.to(classifier.model.dtype)[:, None, :, None]

        def record_means(layer: int, weights: Tensor, value_BHTd: Tensor) -> tuple[Tensor, Tensor]:
            """Store the mean values of the batch's texts in one layer, and return the unchanged arguments."""
            sums_BHd = (value_BHTd * mask_B1T1).sum(-2)
            mean_BHd = sums_BHd / mask_B1T1.sum(-2)
            if layer not in means:
                means[layer] = mean_BHd.new_empty(len(ids), *mean_BHd.shape[1:])
            means[layer][batch] = mean_BHd
            return weights, value_BHTd

        return record_means

    logits_NC = classifier.logits(ids, create_recorder)
    return logits_NC, means


def _select_class_probabilities(logits_NC: Tensor, classes_N: Tensor) -> Tensor:
    """Return, for each text `[N]`, the probability of the class that `classes_N` contains for this text."""
    probabilities_NC = logits_NC.softmax(-1)
    probabilities_N1 = probabilities_NC.gather(1, classes_N[:, None])
    return probabilities_N1[:, 0]


def table_row(checkpoint: str, quantity: str, group: str, layer: int, values_N: Tensor, seed: int) -> list[Any]:
    """Return a row of `CLASS_USE_COLUMNS` with the mean of a quantity over texts and its bootstrap interval.

    The interval is clipped to the range of the quantity: -1 to 1 for a change in probability, otherwise 0 to 1.
    """
    values = values_N.double().numpy()
    texts = len(values)
    resampled = resample(values, np.ones(texts), BOOTSTRAP_SAMPLES, seed)
    lowest = -1 if quantity == "probability" else 0
    mean, low, high = (float(np.clip(number, lowest, 1)) for number in resampled.interval())
    return [checkpoint, quantity, group, layer, mean, low, high, texts]


def padded_batches(
    classifier: Classifier, documents: Sequence[Document]
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Yield the text indices and model inputs of each padded batch."""
    lengths = [len(document) for document in documents]
    for batch in batches_by_tokens(lengths, classifier.batch_tokens):
        ids = [documents[number].ids.tolist() for number in batch]
        inputs = padded(ids, classifier.tokenizer.pad_token_id, classifier.model.device)
        yield batch, inputs


def _compute_edited_logits(
    classifier: Classifier, documents: Sequence[Document], replacements: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Return the logits `[N, C]` by layer, after the values in this layer and in all later layers are replaced.

    `replacements` contains, by layer, the vectors `[N, H, d]` (texts, heads, head width) that replace the values of
    each text's tokens. The unedited layers before the first edited layer are computed only once per batch.
    """
    layers = [layer for _, layer in layer_modules(classifier.base)]
    classes = int(classifier.model.config.num_labels or 0)
    logits = {}
    for first in sorted(replacements):
        logits[first] = torch.empty(len(documents), classes, dtype=torch.float64)
    for batch, inputs in padded_batches(classifier, documents):
        unedited = _record_layer_outputs(classifier, inputs)
        for first, logits_NC in logits.items():
            values_of_batch = {}
            for layer, values_NHd in replacements.items():
                if layer >= first:
                    values_of_batch[layer] = values_NHd[batch][:, :, None]  # [B, H, 1, d], the same for all tokens
            outputs_before = unedited[: first - 1]  # layers are numbered from 1
            edit = replaced_values(values_of_batch)
            with (
                torch.inference_mode(),
                edited_attention(classifier.base, edit),
                _replace_outputs(layers, outputs_before),
            ):
                output = classifier.model(**inputs)
            logits_NC[batch] = output.logits.cpu().double()
    return logits


def _record_layer_outputs(classifier: Classifier, inputs: Mapping[str, Tensor]) -> list[Any]:
    """Return the output of each layer call, computed without edits but with the attention implementation of edits."""
    outputs: list[Any] = []

    def record_output(_layer: Any, _inputs: Any, output: Any) -> None:
        outputs.append(output)

    base = classifier.base
    with torch.inference_mode(), edited_attention(base, _keep_attention), layer_hooks(base, record_output):
        classifier.model(**inputs)
    return outputs


def _keep_attention(_layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """An edit of attention that changes nothing."""
    return weights, value


@contextmanager
def _replace_outputs(layers: Sequence[torch.nn.Module], outputs: Sequence[Any]) -> Iterator[None]:
    """Within the context, the first calls of `layers` return the stored `outputs`, in order, without computing them."""
    remaining = list(outputs)
    for layer in layers:
        layer.forward = partial(_take_output_or_run, remaining, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # restores the method of the class


def _take_output_or_run(remaining: list[Any], forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Remove and return the first of the `remaining` outputs; if there are none, return the result of `forward`."""
    if remaining:
        return remaining.pop(0)
    return forward(*arguments, **options)
