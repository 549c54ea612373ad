"""A control task with a known decisive word: classification of texts by the presence of a rare word."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

RARE_WORD_CLASSES = {0: "absent", 1: "present"}
MAX_POSITION = 30
"""Maximum position of the inserted word. Later words of a text may be missing, because texts may be truncated."""


def insert_rare_word(splits: Mapping[str, pd.DataFrame], word: str, seed: int) -> dict[str, pd.DataFrame]:
    """Insert a word so that half of each split's texts contain it, and label each text by the presence of the word.

    Args:
        splits: Tables by split, with the columns `text`, `label` and `label_name`.
        word: A word without spaces. Texts that already contain it count towards the half.
        seed: Seed for the selection of texts and the position of the word.

    Returns:
        Tables with the same rows. `label` is 1 and `label_name` is `present` if the text contains the word.
    """
    planted = {}
    for number, (split, table) in enumerate(splits.items()):
        generator = np.random.default_rng([seed, number])
        planted[split] = _insert_into_half(table, word, generator)
    return planted


def _insert_into_half(table: pd.DataFrame, word: str, generator: np.random.Generator) -> pd.DataFrame:
    """Insert the word so that half of the texts in `table` contain it, and return the table with new labels."""
    lower_texts = table["text"].str.lower()
    contains_word = lower_texts.str.contains(word.lower(), regex=False).to_numpy(dtype=bool)
    candidates = np.flatnonzero(~contains_word)
    half = len(table) // 2
    missing = max(half - int(contains_word.sum()), 0)
    chosen = generator.permutation(candidates)[:missing]
    texts = table["text"].tolist()
    for row in chosen:
        texts[row] = _insert_word(texts[row], word, generator)
    labels = contains_word.astype(int)
    labels[chosen] = 1
    names = [RARE_WORD_CLASSES[label] for label in labels]
    return table.assign(text=texts, label=labels, label_name=names)


def _insert_word(text: str, word: str, generator: np.random.Generator) -> str:
    """Return the text after insertion of the word at a random position among the first words."""
    words = text.split(" ")
    last_position = min(len(words), MAX_POSITION)
    position = int(generator.integers(last_position + 1))
    words.insert(position, word)
    return " ".join(words)
