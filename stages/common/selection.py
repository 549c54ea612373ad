"""Which reviews and texts the stages work on, by name: `test/3` is a row of the test reviews, `text/0` a free text.

The test reviews are read from a `folder`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from attnmix.core.options import CaptureParameters
from attnmix.data.draw import Rows, stratified_draw
from attnmix.store.reviews import read_split, read_texts


def chosen_texts(capture: CaptureParameters, seed: int, folder: Path) -> dict[str, str]:
    """Name to text of the captured documents; `InputError` for a number past the end."""
    rows = chosen_rows(capture, seed, folder)
    reviews = dict(review_texts(np.sort(np.array(rows, dtype=np.int64)), folder))
    named = {name: reviews[name] for name in map(review_name, rows)}
    return named | {f"text/{number}": text for number, text in enumerate(capture.texts)}


def chosen_rows(capture: CaptureParameters, seed: int, folder: Path) -> list[int]:
    """Row numbers of the captured test reviews: those that are named, then those that are drawn, each once."""
    capture.check_documents(len(review_labels(folder)))
    drawn = drawn_rows(capture.drawn, seed, folder).tolist() if capture.drawn else []
    return list(dict.fromkeys([*capture.documents, *drawn]))


def drawn_reviews(documents: int, seed: int, folder: Path) -> dict[str, str]:
    """Name to text of that many test reviews, stratified by label; all where there are not more."""
    return dict(review_texts(drawn_rows(documents, seed, folder), folder))


def drawn_rows(documents: int, seed: int, folder: Path) -> Rows:
    """Their row numbers, sorted."""
    return stratified_draw(review_labels(folder), documents, seed)


def review_labels(folder: Path) -> Rows:
    """The class numbers of the test reviews."""
    return read_split("test", folder, ["label"])["label"].to_numpy()


def review_texts(rows: Rows, folder: Path) -> Iterator[tuple[str, str]]:
    """Name and text of the test reviews of the sorted `rows`, some in memory at a time."""
    start = 0
    for block in read_texts("test", folder):
        first, last = np.searchsorted(rows, [start, start + len(block)])
        if first == len(rows):
            return
        for row in rows[first:last].tolist():
            yield review_name(row), block[row - start]
        start += len(block)


def review_name(row: int) -> str:
    return f"test/{row}"
