"""Which documents are measured, and what class each of their tokens has."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from attnmix.core.names import TOKEN_CLASSES

CLASSES = TOKEN_CLASSES
TEXTS_AT_ONCE = 100


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


def chosen_documents(
    tokenizer: PreTrainedTokenizerFast,
    drawn: Mapping[str, str],
    captured: Mapping[str, str],
    max_length: int,
    captured_max_length: int,
) -> list[Document]:
    """All of `each_chosen_document`."""
    names = set(drawn)
    return list(each_chosen_document(tokenizer, names, drawn.items(), captured, max_length, captured_max_length))


def each_chosen_document(
    tokenizer: PreTrainedTokenizerFast,
    drawn: Set[str],
    texts: Iterable[tuple[str, str]],
    captured: Mapping[str, str],
    max_length: int,
    captured_max_length: int,
) -> Iterator[Document]:
    """Captured documents first, cut to `captured_max_length`; then the drawn ones, cut to `max_length`, which count.

    A document that is both is there twice, under one name: as it was captured, and as it counts. Where the two cuts
    leave the same tokens it is there once. `texts` are the names and texts of the `drawn`.
    """
    there_already = set()
    both = ((name, text) for name, text in captured.items() if name in drawn)
    cut_as_drawn = _encoded(tokenizer, both, max_length)
    for each in _encoded(tokenizer, captured.items(), captured_max_length):
        same = each.name in drawn and np.array_equal(each.ids, next(cut_as_drawn).ids)
        if same:
            there_already.add(each.name)
        yield replace(each, counted=len(each) if same else 0, captured=True)
    left = ((name, text) for name, text in texts if name not in there_already)
    yield from (replace(each, counted=len(each)) for each in _encoded(tokenizer, left, max_length))


def _encoded(
    tokenizer: PreTrainedTokenizerFast, texts: Iterable[tuple[str, str]], max_length: int
) -> Iterator[Document]:
    """Each text by name, a block of texts at a time; none of them counts or is captured yet."""
    left = iter(texts)
    while block := list(islice(left, TEXTS_AT_ONCE)):
        encoded = tokenizer([text for _, text in block], truncation=True, max_length=max_length)
        for (name, text), encoding in zip(block, encoded.encodings, strict=True):
            ids = np.asarray(encoding.ids, dtype=np.int32)
            classes = token_classes(tokenizer, text, encoding)
            words = [-1 if word is None else word for word in _words(text, encoding)]
            yield Document(name, ids, classes, 0, captured=False, words=np.array(words, dtype=np.int32))


def token_classes(tokenizer: PreTrainedTokenizerFast, text: str, encoding: Any) -> npt.NDArray[np.int8]:
    """Positions in `CLASSES`: a word of several tokens is `subword` in each of them.

    A special token is `cls` where it starts the text (its cls or bos), else `sep`; one of nothing but spaces that
    leads no word is `punctuation`.
    """
    words = _words(text, encoding)
    pieces = Counter(words)
    start_id = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    end_id = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
    classes = []
    for position, (token, word, (start, end)) in enumerate(zip(encoding.ids, words, encoding.offsets, strict=True)):
        piece = text[start:end].strip()
        if word is None:
            name = "cls" if token == start_id and (position == 0 or start_id != end_id) else "sep"
        elif all(map(_is_punctuation, piece)) and (piece or pieces[word] == 1):
            name = "punctuation"
        else:
            name = "subword" if pieces[word] > 1 else "word"
        classes.append(CLASSES.index(name))
    return np.asarray(classes, dtype=np.int8)


def _words(text: str, encoding: Any) -> list[int | None]:
    """The number of each token's word, from 0 on; specials have none.

    A word has the space that leads it, no other, and no punctuation.

    What a tokenizer itself calls a word differs: for some it is a digit, for some the whole text.
    """
    words: list[int | None] = []
    number, end_before = -1, 0
    for special, (start, end) in zip(encoding.special_tokens_mask, encoding.offsets, strict=True):
        if special:
            words.append(None)
            continue
        seam = text[max(end_before - 1, 0) : end_before].strip(" ") + text[end_before : start + 1]
        number += number < 0 or any(character.isspace() or _is_punctuation(character) for character in seam)
        words.append(number)
        end_before = end
    return words


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"
