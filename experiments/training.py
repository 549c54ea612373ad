"""Classifiers whose task is known, for the question what fine-tuning mixes: one base model and text, other labels.

A rare word is put into a random half of all reviews, whatever their sentiment, so that there are two messages that a
review can carry and each setting needs one of them, both, or none. Every text is cut to the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.bert.modeling_bert import BertPooler

from attnmix.core.errors import InputError
from attnmix.core.settings import DatasetParameters
from attnmix.data.source import read_splits
from attnmix.models.attention import OBSERVED
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.loading import load_classifier
from experiments.rare_word import MIN_WORDS, RARE_WORD, with_rare_word

TOKENS = MIN_WORDS
FIRST_WORDS = 60  # words at the start of a review, among which the rare word is put
REVIEWS = 600
TEST_REVIEWS = 160
HELD_OUT_REVIEWS = 1000  # test reviews that erasers are fitted to
BATCH, STEPS, LEARNING_RATE, WARMUP, WEIGHT_DECAY = 8, 150, 1e-4, 30, 0.01
CAPITALISED = "capitalised"


class Setting(NamedTuple):
    """The tasks that a model is fine-tuned for; all take the same number of steps."""

    task: str  # the labels: `sentiment`, `permuted` sentiment, `word`, `both` (four classes), or `capitalised` tokens
    seeds: int = 3
    reviews: int = REVIEWS
    frozen: int = 0  # lower layers whose weights stay, with the embeddings
    pooling: str = "cls"  # or `mean`: what the head reads
    courses: tuple[int, ...] = ()  # steps after which it is measured


SETTINGS = {
    "true labels": Setting("sentiment", seeds=5, courses=(10, 20, 30, 45, 60, 90, 120, 150)),
    "permuted labels": Setting("permuted", seeds=5),
    "rare word": Setting("word"),
    "four classes": Setting("both"),
    "token task": Setting(CAPITALISED),
    "mean pooling": Setting("sentiment", pooling="mean"),
    "layers 1-3 frozen": Setting("sentiment", frozen=3),
    "layers 1-5 frozen": Setting("sentiment", frozen=5),
    "100 reviews": Setting("sentiment", reviews=100),
    "300 reviews": Setting("sentiment", reviews=300),
}


@dataclass(frozen=True)
class Reviews:
    """Reviews of one length as token ids, with every label."""

    texts: list[str]
    ids_NT: torch.Tensor
    labels: dict[str, npt.NDArray[np.int64]]
    """`sentiment`, `word` and `both` `[N]`, and `capitalised` `[N, T]`, -100 for special tokens."""


def read_reviews(dataset: str, checkpoint: Path, seed: int, limit: int) -> tuple[Reviews, Reviews, Reviews]:
    """Return `limit` training reviews, drawn with the seed, test reviews and held-out ones, the same for all seeds."""
    tokenizer = load_tokenizer(checkpoint)
    if len(tokenizer.tokenize(RARE_WORD)) != 1:
        raise InputError(f"model: its tokenizer has no single token for {RARE_WORD!r}")
    chosen, used = [], pd.Series(dtype=str)
    draws = (("train", limit, seed), ("test", TEST_REVIEWS, 0), ("test", HELD_OUT_REVIEWS, 1))
    for split, number, draw in draws:
        drawn = 3 * (TEST_REVIEWS if split == "train" else number)
        settings = DatasetParameters(name=dataset, train_limit=4 * limit + 400, test_limit=drawn)
        table = read_splits(settings, draw)[0][split]
        table = table[~table["text"].isin(used)]
        chosen.append(_reviews(table, tokenizer, np.random.default_rng([draw, split == "test"]), number))
        used = table["text"] if split == "test" else used
    return chosen[0], chosen[1], chosen[2]


def _reviews(table: pd.DataFrame, tokenizer: Any, generator: np.random.Generator, number: int) -> Reviews:
    """Return as many reviews of each sentiment, each with and without the rare word, that are long enough."""
    chosen = with_rare_word(table, generator, FIRST_WORDS, limit=number // 4)
    if len(chosen) < number:
        raise InputError(f"the data set has {len(chosen)} reviews that are long enough; {number} are needed")
    texts = chosen["text"].tolist()
    sentiments, has_word = (chosen[column].to_numpy(np.int64) for column in ("label", "word"))
    encoded = tokenizer(texts, truncation=True, max_length=TOKENS, return_offsets_mapping=True)
    capitals = np.array(
        [
            [-100 if start == end else int(text[start].isupper()) for start, end in offsets]
            for text, offsets in zip(texts, encoded["offset_mapping"], strict=True)
        ]
    )
    labels = {"sentiment": sentiments, "word": has_word, "both": 2 * sentiments + has_word}
    return Reviews(texts, torch.tensor(encoded["input_ids"]), labels | {CAPITALISED: capitals})


class MeanPooler(BertPooler):
    """The pooler of the mean of all tokens, of texts without padding."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = super().forward(hidden_states.mean(1, keepdim=True))
        return pooled


def new_model(setting: Setting, checkpoint: Path) -> PreTrainedModel:
    """Return the base model with a new head, which torch's seed draws."""
    if setting.task == CAPITALISED:
        kind = transformers.AutoModelForTokenClassification
        model: Any = kind.from_pretrained(checkpoint, num_labels=2, attn_implementation=OBSERVED)
        return model  # type: ignore[no-any-return]  # the library gives Any
    classes = 4 if setting.task == "both" else 2
    model = load_classifier(checkpoint, {k: f"class {k}" for k in range(classes)}, attn_implementation=OBSERVED)
    if setting.pooling == "mean":
        pooler = MeanPooler(model.config)
        pooler.load_state_dict(model.base_model.pooler.state_dict())
        model.base_model.pooler = pooler
    return model  # type: ignore[no-any-return]  # the library gives Any


def train(
    setting: Setting, model: PreTrainedModel, reviews: Reviews, seed: int, visit: Callable[[int], None] | None = None
) -> None:
    """Fine-tune by AdamW, with a constant rate after the warm-up; `visit` is called after the steps of `courses`."""
    generator = np.random.default_rng(seed)
    labels = reviews.labels["sentiment" if setting.task == "permuted" else setting.task]
    labels = torch.tensor(generator.permutation(labels) if setting.task == "permuted" else labels)
    base: Any = model.base_model
    for module in [base.embeddings, *base.encoder.layer[: setting.frozen]] if setting.frozen else ():
        module.requires_grad_(False)
    weights = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights, LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    for step, rows in enumerate(_batches(setting.reviews, generator), start=1):
        model.train()
        loss = model(input_ids=reviews.ids_NT[rows], labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        model.eval()
        if visit is not None and step in setting.courses:
            visit(step)


def _batches(reviews: int, generator: np.random.Generator) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the rows of each step: all reviews in random order, again and again."""
    rows = np.concatenate([generator.permutation(reviews) for _ in range(-(-STEPS * BATCH // reviews))])
    yield from rows[: STEPS * BATCH].reshape(STEPS, BATCH)
