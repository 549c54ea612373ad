"""Words and special tokens among the tokens of a text."""

from __future__ import annotations

from collections import Counter

import pandas as pd

SPECIAL = {"[CLS]": "[CLS]", "[SEP]": "[SEP]", "<s>": "[CLS]", "</s>": "[SEP]"}
CONTINUES = "##"  # WordPiece: goes on with the word before
BEGINS = "Ġ"  # byte-level BPE: begins a word


def words(tokens: pd.DataFrame) -> pd.Series:
    """For each token the whole word that it begins, in lower case.

    Empty within a word, and for punctuation, [CLS] and [SEP].
    """
    byte_level = tokens["token"].str.startswith(BEGINS).any()
    found: list[list[str]] = []
    for token, document in zip(tokens["token"], tokens["document"], strict=True):
        special = token in SPECIAL
        goes_on = not token.startswith(BEGINS) if byte_level else token.startswith(CONTINUES)
        piece = token.removeprefix(BEGINS).removeprefix(CONTINUES)
        within = bool(found) and goes_on and not special and found[-1][1] == document and found[-1][2] == "word"
        if within and any(char.isalnum() for char in piece):
            begin = next(entry for entry in reversed(found) if entry[3] == "begins")
            begin[0] += piece
            found.append(["", document, "word", "within"])
        elif special or not any(char.isalnum() for char in piece):
            found.append(["", document, "other", ""])
        else:
            found.append([piece, document, "word", "begins"])
    return pd.Series([entry[0].lower() for entry in found], index=tokens.index)


def frequent_words(tokens: pd.DataFrame, number: int) -> list[str]:
    """The `number` most frequent words that occur more than once; among equals, the one that comes first."""
    counts = Counter(word for word in words(tokens) if word)
    return [word for word, count in counts.most_common(number) if count > 1]
