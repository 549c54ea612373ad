"""Which reviews and texts the stages work on, by name: `test/3` is a row of the test reviews, `text/0` a free text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stages.outputs.reviews import read_split
from stages.parameters import CaptureParameters
from stages.reviews.draw import stratified_draw


def chosen_texts(capture: CaptureParameters) -> dict[str, str]:
    """Name to text of the captured documents; `InputError` for a number past the end."""
    reviews = read_split("test")["text"]
    capture.check_documents(len(reviews))
    named = {f"test/{number}": str(reviews[number]) for number in capture.documents}
    return named | {f"text/{number}": text for number, text in enumerate(capture.texts)}


def drawn_reviews(documents: int, seed: int) -> dict[str, str]:
    """Name to text of that many test reviews, stratified by label; all where there are not more."""
    reviews = read_split("test")
    rows = stratified_draw(reviews["label"].to_numpy(), documents, seed)
    return {f"test/{row}": str(reviews["text"][row]) for row in rows.tolist()}


def review_labels(names: Sequence[str]) -> list[int]:
    """The class numbers of test reviews by name."""
    labels = read_split("test")["label"].to_numpy()
    return [int(labels[int(name.removeprefix("test/"))]) for name in names]


def stratified_part(names: Sequence[str], size: int, seed: int) -> list[str]:
    """That many of the test reviews `names`, stratified by label, in their order; all where there are not more."""
    rows = np.array([int(name.removeprefix("test/")) for name in names])
    labels = read_split("test")["label"].to_numpy()[rows]
    return [names[place] for place in stratified_draw(labels, size, seed)]
