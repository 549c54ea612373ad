"""The shipped sample is what its README says."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from conftest import REPOSITORY

SAMPLE = REPOSITORY / "data/sample"
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|<br /><br />")


def read(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SAMPLE / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def reviews() -> list[dict[str, Any]]:
    return read("train") + read("test")


def test_at_least_400_reviews_are_balanced_and_of_40_to_250_words(reviews: list[dict[str, Any]]) -> None:
    assert len(reviews) >= 400
    labels = Counter(review["label"] for review in reviews)
    assert set(labels) == {"positive", "negative"}
    assert abs(labels["positive"] - labels["negative"]) <= 0.02 * len(reviews)
    assert all(40 <= len(review["text"].split()) <= 250 for review in reviews)


def test_no_sentence_occurs_twice(reviews: list[dict[str, Any]]) -> None:
    sentences = Counter(
        sentence.strip().lower() for review in reviews for sentence in SENTENCE_END.split(review["text"])
    )
    assert [sentence for sentence, number in sentences.items() if sentence and number > 1] == []


def test_no_two_reviews_share_a_skeleton(reviews: list[dict[str, Any]]) -> None:
    # Reviews made from one template share many runs of words; chance shares a few.
    runs = [set() for _ in reviews]
    for found, review in zip(runs, reviews, strict=True):
        words = re.findall(r"[\w']+", review["text"].lower())
        found.update(zip(words, words[1:], words[2:], words[3:], strict=False))
    for i, one in enumerate(runs):
        for j in range(i):
            assert len(one & runs[j]) <= 0.1 * len(one), (reviews[i]["film"], reviews[j]["film"])


def test_openings_differ(reviews: list[dict[str, Any]]) -> None:
    openings = Counter(tuple(review["text"].lower().split()[:3]) for review in reviews)
    assert openings.most_common(1)[0][1] <= 4


def test_no_film_of_the_test_split_was_seen_in_training() -> None:
    assert not {review["film"] for review in read("train")} & {review["film"] for review in read("test")}


def test_verdicts_are_not_in_the_order_of_the_file() -> None:
    labels = [review["label"] for review in read("test")]
    assert sum(a != b for a, b in pairwise(labels)) > len(labels) / 4
