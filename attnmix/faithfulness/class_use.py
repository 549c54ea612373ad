"""Interventions on attention values, to measure how much of their information the classifier uses.

In each text, `interventions` replaces the values of all tokens by one vector, from a first edited layer to the last:

    text_mean     mean over the text's own tokens; removes the differences between tokens
    corpus_mean   mean over all other texts; also removes the content of the text
    other_class   mean over the texts predicted as this text's second most probable class

Shapes: N texts, H heads, T tokens, d head width, C classes, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attnmix.core.statistics import BOOTSTRAP_SAMPLES, resample
from attnmix.faithfulness.classifier import Classifier
from attnmix.interventions import Edit, edited_attention, replaced_values
from attnmix.measures.documents import Document
from attnmix.models.encoding import batches_by_tokens, padded

CLASS_USE_COLUMNS = ["checkpoint", "quantity", "group", "layer", "mean", "ci_low", "ci_high", "documents"]


def interventions(classifier: Classifier, documents: Sequence[Document], seed: int) -> pd.DataFrame:
    """Return `CLASS_USE_COLUMNS` for each edit (`group`) and first edited layer.

    `class_kept` is the share of texts with an unchanged predicted class, `accuracy` the share of correct predictions,
    `probability` the mean change of the predicted class's probability. Intervals are bootstrapped over texts.
    """
    ids = [document.ids.tolist() for document in documents]
    means: dict[int, Tensor] = {}

    def keep_means(batch: list[int], mask_BT: Tensor) -> Edit:
        """Return an edit that only stores each text's mean values in `means`."""
        mask = mask_BT.to(classifier.model.dtype)[:, None, :, None]

        def edit(layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            mean_BHd = (value * mask).sum(-2) / mask.sum(-2)
            if layer not in means:
                means[layer] = mean_BHd.new_empty(len(ids), *mean_BHd.shape[1:])
            means[layer][batch] = mean_BHd
            return weights, value

        return edit

    logits_NC = classifier.logits(ids, keep_means)
    predicted_N, second_N = logits_NC.topk(2).indices.T
    own_NN = torch.eye(len(documents))
    weights = {  # Row: edited text; column: text that contributes its mean values.
        "text_mean": own_NN,
        "corpus_mean": 1 - own_NN,
        "other_class": (second_N[:, None] == predicted_N).float(),
    }
    labels_N = torch.tensor([document.label for document in documents])
    chosen_N = logits_NC.softmax(-1).gather(1, predicted_N[:, None])[:, 0]
    rows = [table_row("finetuned", "accuracy", "none", 0, (predicted_N == labels_N).double(), seed)]
    for name, weights_NN in weights.items():
        known = weights_NN.sum(-1) > 0  # False if no text contributes values to a text
        if not known.any() or len(documents) < 2:
            continue
        shares_NN = weights_NN / weights_NN.sum(-1, keepdim=True).clamp_min(1)
        values = {}
        for layer, mean_NHd in means.items():
            values[layer] = torch.einsum("nm,mhd->nhd", shares_NN.to(mean_NHd), mean_NHd)
        for first, logits_by_text in _edited_logits(classifier, documents, values).items():
            edited_NC = logits_by_text[known]
            named_N = edited_NC.argmax(-1)
            probability_N = edited_NC.softmax(-1).gather(1, predicted_N[known][:, None])[:, 0]
            quantities = {
                "class_kept": (named_N == predicted_N[known]).double(),
                "accuracy": (named_N == labels_N[known]).double(),
                "probability": probability_N - chosen_N[known],
            }
            for quantity, values_N in quantities.items():
                rows.append(table_row("finetuned", quantity, name, first, values_N, seed))
    return pd.DataFrame(rows, columns=CLASS_USE_COLUMNS)


def table_row(checkpoint: str, quantity: str, group: str, layer: int, values_N: Tensor, seed: int) -> list[Any]:
    """Return a row of `CLASS_USE_COLUMNS`. Intervals of shares are clipped to [0, 1]."""
    values = values_N.double().numpy()
    interval = resample(values, np.ones(len(values)), BOOTSTRAP_SAMPLES, seed).interval()
    lowest = -1 if quantity == "probability" else 0
    mean_and_ends = [float(np.clip(number, lowest, 1)) for number in interval]
    return [checkpoint, quantity, group, layer, *mean_and_ends, len(values)]


def padded_batches(
    classifier: Classifier, documents: Sequence[Document]
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Yield the text indices and model inputs of each padded batch."""
    for batch in batches_by_tokens([len(document) for document in documents], classifier.batch_tokens):
        ids = [documents[number].ids.tolist() for number in batch]
        yield batch, padded(ids, classifier.tokenizer.pad_token_id, classifier.model.device)


def _edited_logits(
    classifier: Classifier, documents: Sequence[Document], values: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Return logits `[N, C]` by first edited layer; `values` has one vector per text and head, `[N, H, d]` by layer.

    Earlier, unedited layers are computed once per batch for all edits.
    """
    logits: dict[int, dict[int, Tensor]] = {first: {} for first in sorted(values)}
    stacks, modules = classifier.family.stacks, list(classifier.base.named_modules())
    layers = [module for stack in stacks for path, module in modules if stack.is_layer(path)]
    for batch, inputs in padded_batches(classifier, documents):
        unedited = _layer_outputs(classifier, layers, inputs)
        for first, rows in logits.items():
            replaced = {layer: values[layer][batch][:, :, None] for layer in values if layer >= first}
            with (
                torch.inference_mode(),
                edited_attention(classifier.base, replaced_values(replaced)),
                _given(layers, unedited[: first - 1]),
            ):
                logits_BK = classifier.model(**inputs).logits.cpu().double()
                rows.update(zip(batch, logits_BK, strict=True))
    in_order = {}
    for first, rows in logits.items():
        in_order[first] = torch.stack([rows[number] for number in range(len(documents))])
    return in_order


def _layer_outputs(
    classifier: Classifier, layers: Sequence[torch.nn.Module], inputs: Mapping[str, Tensor]
) -> list[Any]:
    """Return the output of each call of `layers`, computed by the attention implementation that edits use."""
    outputs: list[Any] = []
    with torch.inference_mode(), edited_attention(classifier.base, _unchanged), ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(lambda _layer, _inputs, output: outputs.append(output)))
        classifier.model(**inputs)
    return outputs


def _unchanged(_layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return weights, value


@contextmanager
def _given(layers: Sequence[torch.nn.Module], outputs: Sequence[Any]) -> Iterator[None]:
    """Replace the first calls of `layers` in one forward pass by their stored `outputs`."""
    remaining = list(outputs)

    def instead_of(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: remaining.pop(0) if remaining else forward(*arguments, **options)

    for layer in layers:
        layer.forward = instead_of(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
