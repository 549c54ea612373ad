"""Token ids as a user gives them: in the vocabulary, without padding, and as the text that they spell."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from attnmix.core.errors import InputError
from attnmix.core.given_texts import MASK, TokenIds
from attnmix.core.store.texts import Text
from attnmix.models.encoding import TokenizedText, token_table

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # for bytes that are part of a character
END_ROLES = ("cls", "sep", "bos", "eos")
"""Roles of the tokens that a tokenizer puts around texts."""
OTHER_ROLES = (*END_ROLES, "unk", "mask")


class IdsEncoding(NamedTuple):
    """The fields of a tokenizer's `Encoding`, made of the token ids alone."""

    ids: list[int]
    special_tokens_mask: list[int]
    sequence_ids: list[int | None]
    offsets: list[tuple[int, int]]


def read_ids(
    tokenizer: PreTrainedTokenizerFast, given: Sequence[TokenIds], rows: int, max_length: int | None, key: str = "texts"
) -> list[TokenIds]:
    """Return the texts without padding at their ends.

    `rows` is the number of rows of the model's embedding. Raise `InputError`, which begins with `key` and the number of
    the text, for ids that are no tokens, more than `max_length` of them, padding between tokens, and a text without any
    but the tokens that stand around a text.
    """
    texts = []
    lengths = {len(text.ids) for text in given}
    for number, text in enumerate(given):
        where = f"{key}: number {number}"
        _check_vocabulary(tokenizer, text.ids, rows, where)
        batch = given if len(lengths) == 1 and len(given) > 1 else ()
        content = _without_padding(tokenizer, text, batch, where)
        ends = {getattr(tokenizer, f"{role}_token_id") for role in END_ROLES}
        if set(content.ids) <= ends:
            raise InputError(f"{where}: the text is empty")
        if max_length is not None and len(content.ids) > max_length:
            raise InputError(f"{where} has {len(content.ids)} token ids; allowed: at most {max_length}")
        texts.append(content)
    return texts


def _check_vocabulary(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], rows: int, key: str) -> None:
    """Raise `InputError`, which begins with `key`, for an id without a row of the embedding or without a token."""
    for number in ids:
        if not 0 <= number < rows:
            raise InputError(f"{key} holds the token id {number}; allowed: 0 to {rows - 1}")
    for number, token in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        if token is None:
            raise InputError(f"{key} holds the token id {number}; allowed: those of the tokenizer's tokens")


def _without_padding(
    tokenizer: PreTrainedTokenizerFast, text: TokenIds, batch: Iterable[TokenIds], key: str
) -> TokenIds:
    """Return a text without the padding token at its ends, where that is a token of its own.

    A padding token that has another role, as GPT-2's often is the one that ends texts, is left alone under an attention
    mask. Without one it is an error where it may be padding: twice or more at an end of the text, or once where the
    other texts of a `batch` of one length have no such token at this end.
    """
    pad = tokenizer.pad_token_id
    if pad is None or pad not in text.ids:
        return text
    others = [place for place, number in enumerate(text.ids) if number != pad]
    first, last = (others[0], others[-1]) if others else (len(text.ids), -1)
    if has_own_padding(tokenizer):
        part = slice(first, last + 1)
        check_no_padding(tokenizer, text.ids[part], key)
        return replace(text, ids=text.ids[part], types=text.types and text.types[part])
    if text.masked:
        return text
    padding_before, padding_behind = first, len(text.ids) - 1 - last
    for end, repeated in ((0, padding_before), (-1, padding_behind)):
        others_lack_it = any(other.ids[end] != pad for other in batch)
        if repeated > 1 or (repeated == 1 and others_lack_it):
            problem = f"{tokenizer.pad_token} at an end, which pads texts and is a token of them"
            raise InputError(f"{key} has {problem}; allowed: the whole of what tokenizer(...) returns, with its {MASK}")
    return text


def has_own_padding(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return True where the padding token has no other role."""
    others = {getattr(tokenizer, f"{role}_token_id") for role in OTHER_ROLES}
    return tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in others


def check_no_padding(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], key: str) -> None:
    """Raise `InputError`, which begins with `key`, for a padding token, of no other role, among the ids of a text."""
    if has_own_padding(tokenizer) and tokenizer.pad_token_id in ids:
        place = list(ids).index(tokenizer.pad_token_id)
        raise InputError(f"{key} holds {tokenizer.pad_token}, the padding token, as token {place}; allowed: no padding")


def tokenized_ids(
    tokenizer: PreTrainedTokenizerFast, names: Iterable[str], texts: Iterable[TokenIds], pairs: bool
) -> list[tuple[Text, TokenizedText]]:
    """Return the text that each list of token ids spells, and its tokens; with `pairs` their segments too."""
    tokenized = []
    for name, given in zip(names, texts, strict=True):
        text, encoding = _spelled(tokenizer, given)
        table = token_table(tokenizer, name, text, encoding, pairs)
        unknown = 0 if tokenizer.unk_token_id is None else given.ids.count(tokenizer.unk_token_id)
        counts = {"tokens": len(table), "whole_tokens": len(table), "unknown_tokens": unknown}
        types = given.types or [0] * len(given.ids)
        tokenized.append((text, TokenizedText(table, counts, types)))
    return tokenized


def _spelled(tokenizer: PreTrainedTokenizerFast, given: TokenIds) -> tuple[Text, IdsEncoding]:
    """Return the text of token ids, or the two of a pair, and where each token is in it."""
    ends = {getattr(tokenizer, f"{role}_token_id") for role in END_ROLES}
    special = [number in ends for number in given.ids]
    types = given.types or [0] * len(given.ids)
    segments = [None if end else segment for end, segment in zip(special, types, strict=True)]
    offsets = np.zeros((len(given.ids), 2), np.int32)
    sides = []
    for side in (0, 1):
        places = [place for place, segment in enumerate(segments) if segment == side]
        side_text, side_spans = spell(tokenizer, [given.ids[place] for place in places])
        sides.append(side_text)
        offsets[places] = np.reshape(side_spans, (-1, 2))
    spans = [(int(start), int(end)) for start, end in offsets]
    encoding = IdsEncoding(given.ids, [int(end) for end in special], segments, spans)
    first, second = sides
    text = (first, second) if 1 in types else first
    return text, encoding


def spell(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of token ids, and the first and last place of each token in it.

    A token is read behind the one before it, by which tokenizers decide on spaces; the tokens that share a character
    have the same places.
    """
    text, spans = "", list[tuple[int, int]]()
    anchor = 0  # the token before the first of those that are not in the text yet
    for end in range(1, len(ids) + 1):
        begun = len(spans)
        before = _decoded(tokenizer, ids[anchor:begun])
        together = _decoded(tokenizer, ids[anchor:end])
        if together.endswith(INCOMPLETE) and end < len(ids):
            continue
        continues = together.startswith(before)
        piece = together[len(before) :] if continues else _decoded(tokenizer, ids[begun:end])
        spans += [(len(text), len(text) + len(piece))] * (end - begun)
        text, anchor = text + piece, end - 1
    return text, spans


def _decoded(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
