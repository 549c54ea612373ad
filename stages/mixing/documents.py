"""Which documents are measured, and what class each of their tokens has."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from stages.vocabulary import TOKEN_CLASSES

CLASSES = tuple(TOKEN_CLASSES)
TEXTS_AT_ONCE = 1000


@dataclass(frozen=True)
class Document:
    """One text as token ids; its first `counted` tokens enter the statistics."""

    name: str
    ids: npt.NDArray[np.int32]
    classes: npt.NDArray[np.int8]  # positions in CLASSES
    counted: int
    captured: bool

    def __len__(self) -> int:
        return len(self.ids)


def chosen_documents(
    tokenizer: PreTrainedTokenizerFast,
    drawn: Mapping[str, str],
    captured: Mapping[str, str],
    max_length: int,
    captured_max_length: int,
) -> list[Document]:
    """Captured documents first, then the drawn ones that are not captured too.

    A drawn document is cut to `max_length`; one that is captured too is measured once, as it was
    captured, and its first `max_length` tokens count.
    """
    only_drawn = {name: text for name, text in drawn.items() if name not in captured}
    chosen = []
    for named, cut, is_captured in ((captured, captured_max_length, True), (only_drawn, max_length, False)):
        names = list(named)
        for start in range(0, len(names), TEXTS_AT_ONCE):
            block = names[start : start + TEXTS_AT_ONCE]
            encoded = tokenizer([named[name] for name in block], truncation=True, max_length=cut)
            for name, encoding in zip(block, encoded.encodings, strict=True):
                ids = np.asarray(encoding.ids, dtype=np.int32)
                counted = min(len(ids), max_length) if name in drawn else 0
                classes = token_classes(tokenizer, named[name], encoding)
                chosen.append(Document(name, ids, classes, counted, is_captured))
    return chosen


def token_classes(tokenizer: PreTrainedTokenizerFast, text: str, encoding: Any) -> npt.NDArray[np.int8]:
    """Positions in `CLASSES`: a word of several tokens is `subword` in each of them."""
    words = encoding.word_ids
    pieces = {word: words.count(word) for word in set(words)}
    special = {tokenizer.cls_token_id: "cls", tokenizer.sep_token_id: "sep"}
    classes = []
    for token, word, (start, end) in zip(encoding.ids, words, encoding.offsets, strict=True):
        if word is None:
            name = special.get(token, "word")
        elif _is_punctuation(text[start:end].strip()):
            name = "punctuation"
        else:
            name = "subword" if pieces[word] > 1 else "word"
        classes.append(CLASSES.index(name))
    return np.asarray(classes, dtype=np.int8)


def _is_punctuation(piece: str) -> bool:
    return bool(piece) and all(unicodedata.category(character)[0] in "PS" for character in piece)
