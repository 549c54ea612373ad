"""Pointing game: how often a token score ranks the decisive word of a text first, in a trained classifier.

    python -m validation.planted_words [--seed 0] [--to docs/measures]

A tiny BERT is trained to predict the class of texts. A text consists of filler words and, at a random position, one
decisive word, which determines the class. The pointing game (Zhang et al., IJCV 2018) counts the texts in which the
decisive word has the highest score of all words. Random scores succeed for about one in nine texts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from attnmix.core.errors import InputError
from attnmix.core.names import TOKEN_CLASSES
from attnmix.faithfulness.attributions import Review, present_attributions
from attnmix.faithfulness.classifier import Classifier
from attnmix.measures.documents import Document

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, CLS, SEP = (SPECIAL.index(token) for token in ("[PAD]", "[CLS]", "[SEP]"))
FILLERS = 40
DECISIVE = ("awful", "lovely")
VOCABULARY = (*SPECIAL, *DECISIVE, *(f"w{number}" for number in range(FILLERS)))
FIRST_DECISIVE, FIRST_FILLER = VOCABULARY.index(DECISIVE[0]), VOCABULARY.index("w0")
MIN_WORDS, MAX_WORDS = 6, 12
BATCH_TEXTS, MAX_STEPS, LEARNING_RATE = 64, 300, 2e-3
MAX_LOSS = 0.01
TEXTS = 100
DIGITS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the classifier, and write `planted_words.csv`."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.planted_words", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the texts")
    parser.add_argument("--to", type=Path, default=Path("docs/measures"), help="folder of planted_words.csv")
    options = parser.parse_args(arguments)
    options.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        table = pointing_table(write_classifier(Path(folder), options.seed), options.seed)
    table.to_csv(options.to / "planted_words.csv", index=False, lineterminator="\n")
    print(table.to_string(index=False))
    return 0


def write_classifier(folder: Path, seed: int) -> Path:
    """Train a classifier, and write it with its tokenizer to `folder`; return the folder.

    Raise `InputError` if the classifier does not learn the task.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config: Any = BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=32, **sizes, **without_dropout)
        model: Any = BertForSequenceClassification(config)
        _train(model, np.random.default_rng(seed))
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _train(model: Any, generator: np.random.Generator) -> None:
    """Train until the loss is below `MAX_LOSS`; raise `InputError` after `MAX_STEPS` steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(MAX_STEPS):
        texts = [draw_text(generator) for _ in range(BATCH_TEXTS)]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids, _ in texts], batch_first=True)
        # The class is the index of the decisive word in `DECISIVE`.
        labels = torch.tensor([ids[place] - FIRST_DECISIVE for ids, place in texts])
        loss = model(ids, attention_mask=(ids != PAD).long(), labels=labels).loss
        if loss < MAX_LOSS:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise InputError(
        f"seed: the loss is {loss.item():.3g} after {MAX_STEPS} steps, not below {MAX_LOSS}; try a different seed"
    )


def draw_text(generator: np.random.Generator) -> tuple[list[int], int]:
    """Return the token IDs of a random text, and the position of its decisive word."""
    number = generator.integers(MIN_WORDS, MAX_WORDS + 1)
    words = generator.integers(FIRST_FILLER, len(VOCABULARY), number)
    place = int(generator.integers(len(words)))
    words[place] = FIRST_DECISIVE + generator.integers(len(DECISIVE))
    return [CLS, *words.tolist(), SEP], 1 + place  # [CLS] shifts the position by one


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer that encodes texts as `[CLS] ... [SEP]`."""
    vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", CLS), ("[SEP]", SEP)])
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", **roles)


def pointing_table(folder: Path, seed: int) -> pd.DataFrame:
    """Return a table `[score, texts, hits]` with a row for each token score.

    `texts` is the number of correctly classified texts, and `hits` the share of these texts in which the decisive word
    has the highest score.
    """
    classifier = Classifier(folder, torch.device("cpu"), batch_tokens=1024)
    generator = np.random.default_rng([seed, 1])  # texts that were not used for training
    methods = present_attributions(classifier.family)
    hits: dict[str, list[bool]] = {name: [] for name in methods}
    for number in range(TEXTS):
        ids, place = draw_text(generator)
        review = Review(classifier, _document(f"text/{number}", ids), generator)
        label = ids[place] - FIRST_DECISIVE
        if review.predicted != label:
            continue
        for name, method in methods.items():
            scores_T = method.scores(review)[0]
            word_scores = scores_T[review.word_positions]
            highest = review.word_positions[word_scores.argmax()]
            hits[name].append(bool(highest == place))
    rows = [(name, len(values), round(float(np.mean(values)), DIGITS)) for name, values in hits.items()]
    return pd.DataFrame(rows, columns=["score", "texts", "hits"])


def _document(name: str, ids: list[int]) -> Document:
    """Return the text with the token IDs `[CLS] ... [SEP]`; all tokens between the first and the last one are words."""
    names = ["cls", *["word"] * (len(ids) - 2), "sep"]
    classes = np.array([TOKEN_CLASSES.index(each) for each in names], np.int8)
    words = np.array([-1, *range(len(ids) - 2), -1], np.int32)
    return Document(name, np.array(ids, np.int32), classes, words)


if __name__ == "__main__":
    sys.exit(main())
