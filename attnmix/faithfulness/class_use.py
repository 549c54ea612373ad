"""Interventions on attention's values, which show what the class needs.

`interventions` replace the values of all layers from one on, in every text at once, by a vector that all sources share:

    text_mean     the mean of the text's own values: which token gave what is lost
    corpus_mean   the mean over the other texts: what the text says is lost too
    other_class   the mean over the texts that have this text's second most probable class

Shapes: N texts, H heads, T tokens, d head width, C classes, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attnmix.core.statistics import BOOTSTRAP_SAMPLES, resample
from attnmix.faithfulness.classifier import Classifier
from attnmix.interventions import Edit, replaced_values
from attnmix.measures.documents import Document
from attnmix.models.encoding import batches_by_tokens, padded

COLUMNS = ["checkpoint", "quantity", "group", "layer", "mean", "ci_low", "ci_high", "documents"]


def interventions(classifier: Classifier, documents: Sequence[Document], seed: int) -> pd.DataFrame:
    """Return `COLUMNS` for each edit (`group`) from each layer on.

    `class_kept` is the share of texts whose class stays, `accuracy` that of right answers, `probability` the mean
    change of the predicted class's probability; intervals resample texts.
    """
    ids = [document.ids.tolist() for document in documents]
    means: dict[int, Tensor] = {}

    def keep_means(batch: list[int], mask_BT: Tensor) -> Edit:
        mask = mask_BT.to(classifier.model.dtype)[:, None, :, None]

        def edit(layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            mean_BHd = (value * mask).sum(-2) / mask.sum(-2)
            means.setdefault(layer, mean_BHd.new_empty(len(ids), *mean_BHd.shape[1:]))[batch] = mean_BHd
            return weights, value

        return edit

    def put_values(values: Mapping[int, Tensor], batch: list[int], _mask_BT: Tensor) -> Edit:
        return replaced_values({layer: each[batch][:, :, None] for layer, each in values.items()})

    logits_NC = classifier.logits(ids, keep_means)
    predicted_N, second_N = logits_NC.topk(2).indices.T
    weights = {"text_mean": torch.eye(len(documents)), "corpus_mean": 1 - torch.eye(len(documents))}
    weights["other_class"] = (second_N[:, None] == predicted_N).float()
    labels_N = torch.tensor([document.label for document in documents])
    chosen_N = logits_NC.softmax(-1).gather(1, predicted_N[:, None])[:, 0]
    rows = [table_row("finetuned", "accuracy", "none", 0, (predicted_N == labels_N).double(), seed)]
    for name, weights_NN in weights.items():
        known = weights_NN.sum(-1) > 0  # no other text has the second class of some
        if not known.any() or len(documents) < 2:
            continue
        shares_NN = weights_NN / weights_NN.sum(-1, keepdim=True).clamp_min(1)
        values = {layer: torch.einsum("nm,mhd->nhd", shares_NN, each) for layer, each in means.items()}
        for first in sorted(values):
            from_first = {layer: each for layer, each in values.items() if layer >= first}
            edited_NC = classifier.logits(ids, partial(put_values, from_first))[known]
            named_N = edited_NC.argmax(-1)
            probability_N = edited_NC.softmax(-1).gather(1, predicted_N[known][:, None])[:, 0]
            rows += [
                table_row("finetuned", "class_kept", name, first, (named_N == predicted_N[known]).double(), seed),
                table_row("finetuned", "accuracy", name, first, (named_N == labels_N[known]).double(), seed),
                table_row("finetuned", "probability", name, first, probability_N - chosen_N[known], seed),
            ]
    return pd.DataFrame(rows, columns=COLUMNS)


def table_row(checkpoint: str, quantity: str, group: str, layer: int, values_N: Tensor, seed: int) -> list[Any]:
    """Return a row of `COLUMNS`; the interval of a share ends at 0 and 1."""
    values = values_N.double().numpy()
    interval = resample(values, np.ones(len(values)), BOOTSTRAP_SAMPLES, seed).interval()
    lowest = -1 if quantity == "probability" else 0
    return [checkpoint, quantity, group, layer, *(float(np.clip(each, lowest, 1)) for each in interval), len(values)]


def padded_batches(
    classifier: Classifier, documents: Sequence[Document]
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Yield the numbers of documents in each padded batch, and the model's input."""
    for batch in batches_by_tokens([len(document) for document in documents], classifier.batch_tokens):
        ids = [documents[number].ids.tolist() for number in batch]
        yield batch, padded(ids, classifier.tokenizer.pad_token_id, classifier.model.device)
