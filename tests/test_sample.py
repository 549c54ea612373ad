"""The shipped sample is what its README says."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import combinations, pairwise
from typing import Any

import pytest
from conftest import REPOSITORY

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|<br /><br />")


def read(split: str) -> list[dict[str, Any]]:
    path = REPOSITORY / f"data/sample/{split}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def reviews() -> list[dict[str, Any]]:
    return read("train") + read("test")


def test_at_least_400_reviews_are_balanced_and_of_40_to_250_words(reviews: list[dict[str, Any]]) -> None:
    assert len(reviews) >= 400
    labels = Counter(review["label"] for review in reviews)
    assert set(labels) == {"positive", "negative"}
    assert abs(labels["positive"] - labels["negative"]) <= 0.02 * len(reviews)
    assert all(40 <= len(review["text"].split()) <= 250 for review in reviews)


def test_no_review_was_made_from_another_or_from_a_template(reviews: list[dict[str, Any]]) -> None:
    texts = [review["text"].lower() for review in reviews]
    sentences = Counter(sentence.strip() for text in texts for sentence in SENTENCE_END.split(text))
    assert [sentence for sentence, number in sentences.items() if sentence and number > 1] == []
    openings = Counter(tuple(text.split()[:3]) for text in texts)
    assert openings.most_common(1)[0][1] <= 4
    # Reviews made from one template share many runs of words; chance shares a few.
    words = [re.findall(r"[\w']+", text) for text in texts]
    runs = [set(zip(each, each[1:], each[2:], each[3:], strict=False)) for each in words]
    assert all(len(one & other) <= 0.1 * len(one) for other, one in combinations(runs, 2))


def test_splits_share_no_film_and_verdicts_are_not_in_the_order_of_the_file() -> None:
    assert not {review["film"] for review in read("train")} & {review["film"] for review in read("test")}
    labels = [review["label"] for review in read("test")]
    assert sum(a != b for a, b in pairwise(labels)) > len(labels) / 4
