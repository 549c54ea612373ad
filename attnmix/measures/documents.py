"""Tokenized texts (documents), and functions that read them from the files of the stage `tokenize` by row group."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import TOKEN_CLASSES
from attnmix.core.store import texts as store

CLASSES = TOKEN_CLASSES
# The groups of positions double in size: 0, 1, 2-3, 4-7, ...
POSITION_STARTS = (0, *(2**power for power in range(16)))
POSITIONS = ("0", "1", *(f"{start}-{2 * start - 1}" for start in POSITION_STARTS[2:]))
READ_COLUMNS = ["document", "token_id", "word", "token_class", store.SEGMENT]  # the last column exists only for pairs


@dataclass(frozen=True)
class Document:
    """One text as token IDs."""

    name: str
    ids: npt.NDArray[np.int32]
    classes: npt.NDArray[np.int8]  # indices in CLASSES
    words: npt.NDArray[np.int32]  # index of the word of each token, from 0; -1 for special tokens
    label: int = 0
    predicted: int = -1  # the class predicted by the classifier; -1 if unknown
    segments: npt.NDArray[np.int8] | None = None  # in a pair, the index of each token's text; -1 for special tokens

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, length: int) -> Self:
        """Return the text truncated to `length` tokens, in the same way as the tokenizer truncates texts.

        Special tokens are kept. In a pair, the longer text is truncated first.
        """
        if len(self) <= length:
            return self
        if self.segments is not None:
            return self._cut_pair(self.segments, length)
        is_word_from_end = self.words[::-1] >= 0
        # `argmax` is the first index of True, and thus the number of special tokens at the end.
        special_at_end = int(is_word_from_end.argmax())
        beginning = np.arange(length - special_at_end)
        end = np.arange(len(self) - special_at_end, len(self))
        return self.take(np.concatenate([beginning, end]))

    def _cut_pair(self, segments: npt.NDArray[np.int8], length: int) -> Self:
        """Return a pair truncated to `length` tokens.

        Special tokens are kept. The shorter text receives at most half of the remaining length, and the longer text
        receives the length that then remains.
        """
        special = np.flatnonzero(segments < 0)
        first_text = np.flatnonzero(segments == 0)
        second_text = np.flatnonzero(segments == 1)
        shorter, longer = sorted([first_text, second_text], key=len)
        max_text_tokens = max(0, length - len(special))
        shorter = shorter[: max_text_tokens // 2]
        longer = longer[: max_text_tokens - len(shorter)]
        kept = np.concatenate([special, shorter, longer])
        return self.take(np.sort(kept))

    def take(self, places: npt.NDArray[np.integer]) -> Self:
        """Return a text that consists of the tokens at the positions `places`, in this order."""
        selected = {}
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):  # All arrays have one element for each token.
                selected[name] = value[places]
        return replace(self, **selected)


def position_groups(tokens: int) -> npt.NDArray[np.int64]:
    """Return, for each token of a text with `tokens` tokens, the index `[T]` of its position group in `POSITIONS`."""
    positions = np.arange(tokens)
    return np.searchsorted(POSITION_STARTS, positions, side="right") - 1


def documents_of(texts: pd.DataFrame, tokens: pd.DataFrame) -> list[Document]:
    """Return one document for each row of `texts`.

    `texts` contains rows of `texts.parquet`, and `tokens` all rows of `tokens.parquet` for these texts, in text order.
    """
    ends = np.cumsum(texts["tokens"].to_numpy())  # the column `tokens` contains the number of tokens of each text
    splits = ends[:-1]  # the rows of `tokens` at which all texts but the first begin
    class_indices = pd.Categorical(tokens["token_class"], categories=list(CLASSES)).codes
    ids = np.split(np.array(tokens["token_id"], np.int32), splits)
    classes = np.split(class_indices.astype(np.int8), splits)
    words = np.split(np.array(tokens["word"], np.int32), splits)
    segments: list[Any] = [None] * len(texts)
    if store.SEGMENT in tokens:
        segments = np.split(np.array(tokens[store.SEGMENT]), splits)
    documents = []
    columns = ["document", "label", "predicted_label"]
    for place, (name, label, predicted) in enumerate(texts[columns].itertuples(index=False)):
        document = Document(
            name,
            ids=ids[place],
            classes=classes[place],
            words=words[place],
            label=label,
            predicted=predicted,
            segments=segments[place],
        )
        documents.append(document)
    return documents


def read_documents(files: store.TokenizedFiles) -> Iterator[Document]:
    """Yield all texts in the order of the files, with one row group in memory at a time."""
    for number, tokens in enumerate(files.token_row_groups(READ_COLUMNS)):
        first = number * store.ROW_GROUP_TEXTS
        texts = files.documents.iloc[first : first + store.ROW_GROUP_TEXTS]
        yield from documents_of(texts, tokens)


def read_reviews(kind: str, files: store.TokenizedFiles) -> list[Document]:
    """Return the texts whose column `kind` (`measured` or `removed`) is True, in the order of the test split."""
    documents = itertools.compress(read_documents(files), files.documents[kind])
    return sorted(documents, key=_parse_number_in_test_split)


def _parse_number_in_test_split(document: Document) -> int:
    """Return the row index of a text in the test split. The name of the text is `test/ROW`."""
    number = document.name.removeprefix("test/")
    return int(number)


class Texts:
    """Texts in memory, with those methods and attributes of `Corpus` that `Engine` uses."""

    row_groups = range(1)

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents
        self.lengths = np.array([len(document) for document in documents])
        self.labels = np.array([document.label for document in documents])
        self.predicted = np.array([document.predicted for document in documents])

    def __len__(self) -> int:
        return len(self.documents)

    def document(self, number: int) -> Document:
        """Return the text with index `number`."""
        return self.documents[number]

    def rows(self, _row_group: int) -> slice:
        """Return the indices of the texts in the only row group, which contains all texts."""
        return slice(0, len(self))


class Corpus:
    """The measured texts of a run, indexed in file order. One row group is in memory at a time."""

    def __init__(self, files: store.TokenizedFiles) -> None:
        """Select the measured texts. The tokens of a text are read when the text is accessed."""
        self.files = files
        self.texts = files.documents[files.documents["measured"]]  # the first rows of the table
        self.lengths = self.texts["tokens"].to_numpy()
        self.labels = self.texts["label"].to_numpy()
        self.predicted = self.texts["predicted_label"].to_numpy()
        self.row_groups = range(ceil(len(self.texts) / store.ROW_GROUP_TEXTS))
        # The number (-1: none) and the texts of the most recently read row group.
        self._cached_row_group: tuple[int, list[Document]] = (-1, [])
        self._kept_texts: dict[int, Document] = {}  # by index; see `keep`

    def keep(self, numbers: Sequence[int]) -> None:
        """Keep the texts with the indices `numbers` in memory, for batches that combine texts of many row groups."""
        for number in sorted(numbers):
            document = self.document(number)
            # The text's arrays are views of the arrays of the whole row group, so they are copied.
            self._kept_texts[number] = document.take(np.arange(len(document)))

    def __len__(self) -> int:
        return len(self.texts)

    def rows(self, row_group: int) -> slice:
        """Return the indices of the texts in a row group of the file."""
        first = row_group * store.ROW_GROUP_TEXTS
        return slice(first, first + store.ROW_GROUP_TEXTS)

    def document(self, number: int) -> Document:
        """Return the text with index `number`.

        Texts that `keep` keeps in memory, and texts of the most recently read row group, are not read again.
        """
        if number in self._kept_texts:
            return self._kept_texts[number]
        row_group, place = divmod(number, store.ROW_GROUP_TEXTS)
        cached_row_group, documents = self._cached_row_group
        if cached_row_group != row_group:
            (tokens,) = self.files.token_row_groups(READ_COLUMNS, [row_group])
            texts = self.texts.iloc[self.rows(row_group)]
            # The last row group may end with texts that are not measured. Their tokens are removed.
            tokens_of_texts = tokens.iloc[: texts["tokens"].sum()]
            documents = documents_of(texts, tokens_of_texts)
            self._cached_row_group = (row_group, documents)
        return documents[place]

    def __getitem__(self, number: int) -> Document:
        return self.document(number)
