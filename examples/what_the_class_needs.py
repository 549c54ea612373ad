"""Measure how often the predicted class is kept if values or attention edges are removed in all layers.

    python examples/what_the_class_needs.py

The program reads the outputs of `make repro` in the current folder. For each edit, it prints the test accuracy and the
share of texts with an unchanged predicted class. With the default parameters, it prints for 101 texts:

                                             accuracy  class kept
    none                                        0.881       1.000
    every value is the mean of its text         0.832       0.891
    [CLS] takes nothing from the others         0.535       0.574
    the others take nothing from each other     0.851       0.891
"""

from pathlib import Path

import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import attnmix
from attnmix.interventions import text_mean_values, without_edges

FOLDER = Path("models/finetuned")
MAX_LENGTH, BATCH = 256, 16

network = AutoModelForSequenceClassification.from_pretrained(FOLDER)
model = attnmix.load(network, AutoTokenizer.from_pretrained(FOLDER))
reviews = pd.read_parquet("data/reviews/test.parquet")
first, others = slice(0, 1), slice(1, None)


def edits(inputs):
    return {
        "none": lambda _layer, weights, value: (weights, value),
        "every value is the mean of its text": text_mean_values(inputs["attention_mask"]),
        "[CLS] takes nothing from the others": without_edges(first, others),
        "the others take nothing from each other": lambda layer, weights, value: (
            torch.where(others_from_each_other(weights), 0, weights),
            value,
        ),
    }


def others_from_each_other(weights):
    tokens = torch.arange(weights.shape[-1])
    return (tokens[:, None] > 0) & (tokens > 0) & (tokens[:, None] != tokens)


predicted = {}
for start in range(0, len(reviews), BATCH):
    texts = reviews["text"].iloc[start : start + BATCH].tolist()
    inputs = model.tokenizer(texts, truncation=True, max_length=MAX_LENGTH, padding=True, return_tensors="pt")
    for name, edit in edits(inputs).items():
        with torch.no_grad(), model.intervene(edit):
            predicted.setdefault(name, []).extend(network(**inputs).logits.argmax(-1).tolist())

classes = pd.DataFrame(predicted)
print(f"{len(reviews)} reviews, {FOLDER}")
print(
    pd.DataFrame(
        {
            "accuracy": classes.eq(reviews["label"], axis=0).mean(),
            "class kept": classes.eq(classes["none"], axis=0).mean(),
        }
    ).round(3)
)
