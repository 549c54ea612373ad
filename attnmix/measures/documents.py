"""Documents as the measures see them, read from what `tokenize` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import TOKEN_CLASSES
from attnmix.store import tokens as store
from attnmix.store.runs import Run

CLASSES = TOKEN_CLASSES
COLUMNS = ["document", "token_id", "word", "token_class"]


@dataclass(frozen=True)
class Document:
    """One text as token ids; `counted` of its tokens enter the statistics, all or none."""

    name: str
    ids: npt.NDArray[np.int32]
    classes: npt.NDArray[np.int8]  # positions in CLASSES
    counted: int
    captured: bool
    words: npt.NDArray[np.int32]
    """The number of each token's word, from 0 on; -1 for special tokens."""
    label: int = 0
    """The class of a review."""

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, length: int) -> Document:
        """Return its first `length` tokens as the tokenizer would cut it, special tokens that end it kept."""
        if len(self) <= length:
            return self
        closing = int((self.words[::-1] >= 0).argmax())
        kept = np.r_[: length - closing, len(self) - closing : len(self)]
        ids, classes, words = self.ids[kept], self.classes[kept], self.words[kept]
        return replace(self, ids=ids, classes=classes, words=words, counted=min(self.counted, length))


def documents_of(texts: pd.DataFrame, tokens: pd.DataFrame) -> list[Document]:
    """Return the documents of rows of `texts.parquet` with all their rows of `tokens.parquet`."""
    ends = np.cumsum(texts["tokens"].to_numpy())[:-1]
    classes = pd.Categorical(tokens["token_class"], categories=list(CLASSES)).codes.astype(np.int8)
    columns = (np.array(tokens["token_id"], np.int32), classes, np.array(tokens["word"], np.int32))
    parts = zip(*(np.split(column, ends) for column in columns), strict=True)
    counted = np.where(texts["measured"], texts["tokens"], 0).tolist()
    rows = zip(texts["document"], counted, texts["captured"], texts["label"], parts, strict=True)
    return [
        Document(name, ids, classes, tokens, bool(captured), words, label)
        for name, tokens, captured, label, (ids, classes, words) in rows
    ]


def read_documents(kind: str, run: Run) -> Iterator[Document]:
    """Yield the documents that are `captured`, `measured` or `removed`, in the order of `texts.parquet`."""
    for number, tokens in enumerate(run.token_blocks(COLUMNS)):
        block = run.documents.iloc[number * store.BLOCK : (number + 1) * store.BLOCK]
        chosen = block[kind].to_numpy()
        if chosen.any():
            yield from (each for each, take in zip(documents_of(block, tokens), chosen, strict=True) if take)
