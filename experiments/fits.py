"""Trainings on given labels, permuted ones and a rare word that fit equally well, and what they change in the mixing.

A control with permuted labels says something only where it fits them as well as another training fits the given ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from attnmix.core.store.files import read_results
from attnmix.core.store.runs import Run
from attnmix.core.store.texts import Text, read_split, texts_of
from experiments.rare_word import WORD_COLUMN
from experiments.tables import DIGITS, over_seeds, paired_differences
from stages.common.parameters import Parameters, read_parameters
from stages.finetune import permuted_labels

Doubles = npt.NDArray[np.float64]
BATCH_TEXTS = 32
PAIRED = ("given", "permuted")  # a seed draws the same reviews for both; for the rare word it draws others
MEASURES = {
    "own share": ("measure/parts", {"rule": "chord", "quantity": "own_share"}),
    "own share by tangent": ("measure/parts", {"rule": "tangent", "quantity": "own_share"}),
    "coherence of others' parts": ("measure/parts", {"rule": "chord", "quantity": "coherence"}),
    "ratio": ("measure/mixing", {"method": "attnresln_n"}),
    "ratio, text mean": ("measure/mixing_controls", {"method": "attnresln_n", "control": "text_mean_value"}),
    "ratio, corpus mean": ("measure/mixing_controls", {"method": "attnresln_n", "control": "corpus_value"}),
    "share: the class": ("measure/geometry", {"point": "attention", "measure": "share_class"}),
}
"""The csv file of each measure that is compared by layer, and its rows."""
LAYER_KEYS = ["setting", "seed", "checkpoint", "layer"]
EXCESS = "ratio less that with the corpus mean"
"""A measure that is the difference of two others."""


def write_fits(folders: Sequence[Path], to: Path) -> None:
    """Write a row for each run and split.

    `accuracy` and `margin` are of the labels that the split was trained on, `margin` being the mean of that label's
    logit less the largest other one; `certainty` is that of the class that is predicted, `largest_class` the share of
    the class that is predicted most.
    """
    rows = [row for folder in folders for row in _rows(folder)]
    table = pd.DataFrame(rows)
    to.parent.mkdir(parents=True, exist_ok=True)
    table.round(DIGITS).to_csv(to, index=False, lineterminator="\n")
    print(table.to_string(index=False))


def write_by_layer(folders: Sequence[Path], to: Path) -> None:
    """Write the `MEASURES` by labels, checkpoint and layer, over seeds; and of given less permuted labels, in pairs."""
    measured = {}
    for measure, (csv, where) in MEASURES.items():
        measured[measure] = pd.concat([_layers(folder, csv, where) for folder in folders]).set_index(LAYER_KEYS)["mean"]
    measured[EXCESS] = measured["ratio"] - measured["ratio, corpus mean"]
    tables = []
    for measure, means in measured.items():
        layers = means.reset_index()
        layers.insert(3, "measure", measure)
        whole = layers.groupby(["setting", "seed", "checkpoint", "measure"], sort=False)["mean"].mean().reset_index()
        whole = whole.assign(measure=f"{measure}, mean of layers")
        for each in (layers, whole):  # p is adjusted over the layers alone
            in_pairs = paired_differences(each[each["setting"].isin(PAIRED)])
            tables.append(over_seeds(pd.concat([each, in_pairs], ignore_index=True)))
    pd.concat(tables).round(DIGITS).to_csv(to, index=False, lineterminator="\n")


def labels_of(parameters: Parameters) -> str:
    """Return what a classifier was trained on: `given` or `permuted` labels, or the `rare word`."""
    is_word = parameters.dataset.label_column == WORD_COLUMN
    return "rare word" if is_word else parameters.finetune.labels


def _layers(folder: Path, csv: str, where: Mapping[str, str]) -> pd.DataFrame:
    """Return the rows of one run's csv file with these values, of its layers."""
    parameters = read_parameters(folder / "params.yaml")
    table = read_results(folder / "reports" / "plots" / f"{csv}.csv")
    for column, value in where.items():
        table = table[table[column] == value]
    return table[table["layer"] > 0].assign(setting=labels_of(parameters), seed=parameters.seed)


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of one run."""
    run, parameters = Run(folder), read_parameters(folder / "params.yaml")
    model = AutoModelForSequenceClassification.from_pretrained(run.finetuned)
    tokenizer = AutoTokenizer.from_pretrained(run.finetuned)
    permuted = parameters.finetune.labels == "permuted"
    rows = []
    for split in ("train", "test"):
        reviews = read_split(split, run.reviews)
        if permuted and split == "train":
            reviews = permuted_labels(reviews, parameters.seed)
        logits_BC = _logits(model, tokenizer, texts_of(reviews), parameters.finetune.max_length)
        labels_B = reviews["label"].to_numpy()
        predicted_B = logits_BC.argmax(-1)
        row = {
            "labels": labels_of(parameters),
            "epochs": parameters.finetune.epochs,
            "seed": parameters.seed,
            "split": split,
            "reviews": len(reviews),
            "accuracy": float((predicted_B == labels_B).mean()),
            "margin": float(_margins(logits_BC, labels_B).mean()),
            "certainty": float(_margins(logits_BC, predicted_B).mean()),
            "largest_class": float(np.bincount(predicted_B).max() / len(reviews)),
        }
        rows.append(row)
    return rows


def _logits(model: Any, tokenizer: Any, texts: Sequence[Text], max_length: int) -> Doubles:
    logits: list[Doubles] = []
    for start in range(0, len(texts), BATCH_TEXTS):
        batch = list(texts[start : start + BATCH_TEXTS])
        encoded = tokenizer(batch, truncation=True, max_length=max_length, padding=True, return_tensors="pt")
        with torch.inference_mode():
            logits.append(model(**encoded).logits.double().numpy())
    return np.concatenate(logits)


def _margins(logits_BC: Doubles, labels_B: npt.NDArray[np.int64]) -> Doubles:
    """Return each review's logit of its label less the largest of another class."""
    is_label_BC = np.arange(logits_BC.shape[1]) == labels_B[:, None]
    others_B: Doubles = np.where(is_label_BC, -np.inf, logits_BC).max(-1)
    own_B: Doubles = logits_BC[is_label_BC]
    return own_B - others_B
