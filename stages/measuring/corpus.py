"""The measured documents on disk, in blocks: what of them is in memory is one block and a few numbers of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Draws
from attnmix.data.draw import stratified_draw
from attnmix.measures.documents import Document
from attnmix.models.encoding import batches_by_tokens
from stages.measuring.work_files import write_arrays

BLOCK = 256  # documents; batches are formed within a block
INDEX = "index.npz"
TOKENS = ("ids", "classes", "words")


class Corpus:
    """What `write_corpus` wrote; N documents, numbered in their order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with np.load(folder / INDEX) as index:
            self.lengths: npt.NDArray[np.int32] = index["lengths"]  # [N], in tokens
            self.counted: npt.NDArray[np.int32] = index["counted"]  # [N], of these in the statistics
            self.captured: npt.NDArray[np.bool_] = index["captured"]  # [N]
            self.labels: npt.NDArray[np.int64] = index["labels"]  # [N]
        self._last: tuple[int, list[Document]] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def blocks(self) -> range:
        """Their numbers."""
        return range(-(-len(self) // BLOCK))

    def rows(self, block: int) -> slice:
        """The numbers of a block's documents."""
        return slice(block * BLOCK, min((block + 1) * BLOCK, len(self)))

    def block(self, block: int) -> list[Document]:
        """The documents of a block, read anew but for the last one."""
        if self._last is None or self._last[0] != block:
            self._last = (block, _read(self.folder / f"{block}.npz"))
        return self._last[1]

    def document(self, number: int) -> Document:
        return self.block(number // BLOCK)[number % BLOCK]

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


def write_corpus(folder: Path, documents: Iterable[Document]) -> None:
    """Write the documents, a block in memory at a time; nothing where they were written before."""
    if (folder / INDEX).is_file():
        return
    columns: dict[str, list[Any]] = {"lengths": [], "counted": [], "captured": [], "labels": []}
    for number, block in enumerate(_blocks(iter(documents))):
        columns["lengths"] += map(len, block)
        for name, attribute in (("counted", "counted"), ("captured", "captured"), ("labels", "label")):
            columns[name] += [getattr(document, attribute) for document in block]
        arrays = {name: np.concatenate([getattr(document, name) for document in block]) for name in TOKENS}
        rows = {name: columns[name][-len(block) :] for name in columns}
        names = np.array([document.name for document in block])
        write_arrays(folder / f"{number}.npz", {"names": names, **arrays, **rows})
    types = {"lengths": np.int32, "counted": np.int32, "captured": np.bool_, "labels": np.int64}
    write_arrays(folder / INDEX, {name: np.array(values, types[name]) for name, values in columns.items()})


def _blocks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    while block := list(islice(documents, BLOCK)):
        yield block


def _read(path: Path) -> list[Document]:
    with np.load(path) as arrays:
        ends = np.cumsum(arrays["lengths"])[:-1]
        tokens = [np.split(arrays[name], ends) for name in TOKENS]
        each = [arrays[name].tolist() for name in ("names", "counted", "captured", "labels")]
    return [
        Document(name, ids, classes, counted, captured, words, label)
        for ids, classes, words, name, counted, captured, label in zip(*tokens, *each, strict=True)
    ]
