"""Texts have distinct names, unknown tokens are reported, and a measured word is selected first."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from attnmix.figures.tokens import DisplayToken
from attnmix.page.documents import find_cautions, name_documents
from attnmix.page.opening import list_candidates


def test_own_texts_are_named_by_distinct_first_words() -> None:
    trophy = "the trophy did not fit into the suitcase because it was too"
    texts = {
        "test/3": "A film that everybody should see at once, today",
        "text/0": f"{trophy} big",
        "text/1": f"{trophy} small",
        "text/2": "good",
        "text/3": "supercalifragilisticexpialidocious" * 2,
    }
    named = name_documents(texts)
    assert [each["title"] for each in named.values()] == [
        "test/3",
        "“the trophy did not fit… (1)”",
        "“the trophy did not fit… (2)”",
        "“good”",
        "“supercalifragilisticexpi…”",
    ]
    assert [each["heading"] for each in named.values()][:4] == [
        "test/3: A film that everybody should see at…",
        "the trophy did not fit into the suitcase… (1)",
        "the trophy did not fit into the suitcase… (2)",
        "good",
    ]


@pytest.mark.parametrize(
    ("tokens", "unknown", "expected"),
    [
        ({"[CLS]": "cls", "good": "word", "film": "word"}, 0, ""),
        ({"i": "word"}, 0, ""),  # a word with one letter
        ({"un": "subword", "##s": "subword", "##e": "subword", "film": "word", "was": "word"}, 0, ""),
        ({"[CLS]": "cls", "[UNK]": "word", "film": "word"}, 1, "1 of the text's 3 tokens is unknown to the model."),
        ({"[UNK]": "word", "x": "word", "y": "word"}, 2, "2 of the text's 3 tokens are unknown to the model."),
        (
            {"ש": "subword", "##ל": "subword", "##ם": "subword"},
            0,
            "The vocabulary has few words of this text: 3 of 3 tokens are single letters.",
        ),
        ({"東": "subword", "##京": "subword"}, 0, ""),  # a single character can be a word
    ],
)
def test_unknown_tokens_and_single_letters_are_reported(tokens: dict[str, str], unknown: int, expected: str) -> None:
    table = pd.DataFrame({"token": list(tokens), "token_class": list(tokens.values())})
    assert find_cautions(table, unknown) == expected


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([False, True, True, True, True, False], [2, 3]),  # measured long words
        ([False, True, False, False, True, False], [1]),  # a short word, but no punctuation
        ([False] * 6, [2, 3]),
    ],
)
def test_page_opens_with_a_measured_word(measured: list[bool], expected: list[int]) -> None:
    texts = {"[CLS]": "cls", "a": "word", "great": "word", "movie": "word", ".": "punctuation", "[SEP]": "sep"}
    pieces = [DisplayToken(text, True, name) for text, name in texts.items()]
    assert list_candidates(pieces, np.array(measured)) == expected
    marks = [pieces[0], pieces[5]]
    assert list_candidates(marks, np.array([False, False])) == [0, 1]
