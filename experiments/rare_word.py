"""Reviews with a rare word in a random half of them, whatever their sentiment; whether it is there is a class.

    python -m experiments rare-word --dataset stanfordnlp/imdb --to rare_word
    python -m experiments run --dataset rare_word --profile profiles/word.txt --until measure

The first command writes a folder of data that the pipeline reads. Its column `word` is `present` or `absent`, and
`label` is the data set's own, so that two trainings on the same folder can ask for either.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from attnmix.core.errors import InputError
from attnmix.core.settings import DatasetParameters
from attnmix.data.source import read_source

RARE_WORD = "zebra"  # one token of the default model; reviews that hold it already are left out
MIN_WORDS = 96  # words of the shortest review taken, before the rare word is put in; each is a token or more
MEASURED_WORDS = 30  # the word is put among the first so many, which the 48 tokens that are measured of a review hold
WORD_COLUMN = "word"
CLASSES = {False: "absent", True: "present"}


def write_reviews(dataset: str, to: Path, seed: int = 0) -> None:
    """Write a jsonl file for each split of a data set, with the columns `text`, `label` and `word`, to a new folder.

    The seed draws which reviews hold the word, where, and the order of the reviews.
    """
    if to.exists():
        raise InputError(f"--to: {to} exists already; name a new folder")
    splits, _ = read_source(DatasetParameters(name=dataset), {"text": "text", "label": "label"})
    to.mkdir(parents=True)
    for number, (split, table) in enumerate(splits.items()):
        generator = np.random.default_rng([seed, number])
        reviews = with_rare_word(table, generator, MEASURED_WORDS)
        reviews[WORD_COLUMN] = reviews[WORD_COLUMN].map(CLASSES)
        path = to / f"{split}.jsonl"
        reviews.to_json(path, orient="records", lines=True, force_ascii=False)
        print(f"{path}: {len(reviews)} of {len(table)} reviews; the others are shorter or hold {RARE_WORD!r} already")


def with_rare_word(
    table: pd.DataFrame, generator: np.random.Generator, first_words: int, limit: int | None = None
) -> pd.DataFrame:
    """Return the reviews of `MIN_WORDS` and more in random order, `text, label, word`: a random half hold the word.

    It stands among the `first_words` words. `limit` is the largest number of reviews of each label with and without it.
    """
    rows: list[tuple[str, object, bool]] = []
    numbers: Counter[tuple[object, bool]] = Counter()
    for label, text in zip(table["label"], table["text"], strict=True):
        words = text.replace("<br />", " ").split()
        has_word = bool(generator.integers(2))
        is_full = limit is not None and numbers[label, has_word] == limit
        if is_full or RARE_WORD in text.lower() or len(words) < MIN_WORDS:
            continue
        place = generator.integers(first_words)
        if has_word:
            words.insert(place, RARE_WORD)
        rows.append((" ".join(words), label, has_word))
        numbers[label, has_word] += 1
    order = generator.permutation(len(rows))
    return pd.DataFrame([rows[place] for place in order], columns=["text", "label", WORD_COLUMN])
