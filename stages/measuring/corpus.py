"""The measured documents, in blocks: one block and a few numbers of each document are in memory."""

from __future__ import annotations

from functools import cached_property
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Draws
from attnmix.data.draw import stratified_draw
from attnmix.measures.documents import COLUMNS, Document, documents_of
from attnmix.models.encoding import batches_by_tokens
from attnmix.store import tokens as store
from attnmix.store.runs import Run


class Corpus:
    """The captured and the measured texts that `tokenize` left; N documents, numbered in their order."""

    def __init__(self, run: Run) -> None:
        self.run, texts = run, run.documents
        self.texts = texts[texts["captured"] | texts["measured"]]  # the first rows
        self.lengths: npt.NDArray[np.int32] = self.texts["tokens"].to_numpy()  # [N], in tokens
        self.captured: npt.NDArray[np.bool_] = self.texts["captured"].to_numpy()  # [N]
        self.counted = np.where(self.texts["measured"], self.lengths, 0)  # [N], of the tokens in the statistics
        self.labels: npt.NDArray[np.int64] = self.texts["label"].to_numpy()  # [N]
        self._last: tuple[int, list[Document]] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def blocks(self) -> range:
        """Their numbers."""
        return range(-(-len(self) // store.BLOCK))

    def rows(self, block: int) -> slice:
        """The numbers of a block's documents."""
        return slice(block * store.BLOCK, min((block + 1) * store.BLOCK, len(self)))

    def block(self, block: int) -> list[Document]:
        """The documents of a block, read anew but for the last one; batches are formed within a block."""
        if self._last is None or self._last[0] != block:
            (tokens,) = self.run.token_blocks(COLUMNS, [block])
            texts = self.texts.iloc[self.rows(block)]
            self._last = (block, documents_of(texts, tokens.iloc[: texts["tokens"].sum()]))
        return self._last[1]

    def document(self, number: int) -> Document:
        return self.block(number // store.BLOCK)[number % store.BLOCK]

    def batches(self, block: int, batch_tokens: int, counted: bool = False) -> list[list[int]]:
        """The numbers of documents of similar length in one padded batch; of those only that are `counted`."""
        rows = self.rows(block)
        numbers = np.arange(rows.start, rows.stop)[self.counted[rows] > 0 if counted else slice(None)]
        lengths: list[int] = self.lengths[numbers].tolist()
        return [numbers[batch].tolist() for batch in batches_by_tokens(lengths, batch_tokens)]

    @cached_property
    def counted_blocks(self) -> list[int]:
        """The blocks with documents in the statistics."""
        return [block for block in self.blocks if self.counted[self.rows(block)].any()]

    def array(self, name: str, block: int) -> npt.NDArray[Any]:
        """Return the `document` names, `label` numbers or numbers of `tokens` of a block's documents that count."""
        counted = [document for document in self.block(block) if document.counted]
        attribute = {"document": "name", "label": "label", "tokens": "counted"}[name]
        return np.array([getattr(document, attribute) for document in counted])

    def drawn(self, size: int, seed: int) -> list[int]:
        """The numbers of so many documents in the statistics, stratified by label; of all where there are not more."""
        counted = np.flatnonzero(self.counted)
        chosen: list[int] = counted[stratified_draw(self.labels[counted], size, seed)].tolist()
        return chosen

    def draws(self, seed: int, file: IO[bytes]) -> Draws:
        """Bootstrap samples of the documents in the statistics."""
        documents = [int((self.counted[self.rows(block)] > 0).sum()) for block in self.counted_blocks]
        return Draws(documents, BOOTSTRAP_SAMPLES, seed, file)
