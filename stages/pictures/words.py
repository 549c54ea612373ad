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
    whole = [""] * len(tokens)
    begin: int | None = None  # of the word that the next token may go on with
    previous = None
    for place, (token, document) in enumerate(zip(tokens["token"], tokens["document"], strict=True)):
        goes_on = not token.startswith(BEGINS) if byte_level else token.startswith(CONTINUES)
        piece = token.removeprefix(BEGINS).removeprefix(CONTINUES).lower()
        if token in SPECIAL or not any(char.isalnum() for char in piece):
            begin = None
        elif begin is not None and goes_on and document == previous:
            whole[begin] += piece
        else:
            begin, whole[place] = place, piece
        previous = document
    return pd.Series(whole, index=tokens.index)


def frequent_words(tokens: pd.DataFrame, number: int) -> list[str]:
    """The `number` most frequent words that occur more than once; among equals, the one that comes first."""
    counts = Counter(word for word in words(tokens) if word)
    return [word for word, count in counts.most_common(number) if count > 1]
