"""Which documents are measured, and what class each of their tokens has."""

from __future__ import annotations

import unicodedata
from collections import Counter
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
    """The number of each token's word: with the space that leads it, no other, and no punctuation; specials have none.

    What a tokenizer itself calls a word differs: for some it is a digit, for some the whole text.
    """
    words: list[int | None] = []
    number, end_before = 0, 0
    for special, (start, end) in zip(encoding.special_tokens_mask, encoding.offsets, strict=True):
        if special:
            words.append(None)
            continue
        seam = text[max(end_before - 1, 0) : end_before].strip(" ") + text[end_before : start + 1]
        number += any(character.isspace() or _is_punctuation(character) for character in seam)
        words.append(number)
        end_before = end
    return words


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS"
