"""Token IDs supplied by the user: validation, removal of padding, and decoding to text."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from attnmix.core.errors import InputError
from attnmix.core.given_texts import MASK, TokenIds
from attnmix.core.store.texts import Text
from attnmix.models.encoding import TokenizedText, token_table

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from incomplete UTF-8 sequences
END_ROLES = ("cls", "sep", "bos", "eos")
"""Roles of the special tokens at the start and end of texts."""
OTHER_ROLES = (*END_ROLES, "unk", "mask")


class IdsEncoding(NamedTuple):
    """The fields of a tokenizer's `Encoding`, derived from token IDs only."""

    ids: list[int]
    special_tokens_mask: list[int]
    sequence_ids: list[int | None]
    offsets: list[tuple[int, int]]


def read_ids(
    tokenizer: PreTrainedTokenizerFast, given: Sequence[TokenIds], rows: int, max_length: int | None, key: str = "texts"
) -> list[TokenIds]:
    """Return the texts without padding at their ends.

    `rows` is the number of rows of the model's embedding. Raise `InputError`, prefixed with `key` and the index of the
    text, for IDs outside the vocabulary, more than `max_length` IDs, padding between tokens, and texts without tokens
    other than start and end tokens.
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
    """Raise `InputError`, prefixed with `key`, for an ID outside the embedding or the tokenizer's vocabulary."""
    for number in ids:
        if not 0 <= number < rows:
            raise InputError(f"{key} holds the token id {number}; allowed: 0 to {rows - 1}")
    for number, token in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        if token is None:
            raise InputError(f"{key} holds the token id {number}; allowed: those of the tokenizer's tokens")


def _without_padding(
    tokenizer: PreTrainedTokenizerFast, text: TokenIds, batch: Iterable[TokenIds], key: str
) -> TokenIds:
    """Remove a dedicated padding token from the ends of a text.

    A padding token with a second role, often the end-of-text token for GPT-2, is kept if the text has an attention
    mask. Without a mask, possible padding is an error: two or more such tokens at an end of the text, or one that other
    texts of an equal-length `batch` lack at this end.
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
    """Return True for a dedicated padding token, without a second role."""
    others = {getattr(tokenizer, f"{role}_token_id") for role in OTHER_ROLES}
    return tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in others


def check_no_padding(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], key: str) -> None:
    """Raise `InputError`, prefixed with `key`, for a dedicated padding token among the IDs of a text."""
    if has_own_padding(tokenizer) and tokenizer.pad_token_id in ids:
        place = list(ids).index(tokenizer.pad_token_id)
        raise InputError(f"{key} holds {tokenizer.pad_token}, the padding token, as token {place}; allowed: no padding")


def tokenized_ids(
    tokenizer: PreTrainedTokenizerFast, names: Iterable[str], texts: Iterable[TokenIds], pairs: bool
) -> list[tuple[Text, TokenizedText]]:
    """Return the decoded text and the tokens of each list of token IDs; with `pairs`, also segments."""
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
    """Return the decoded text or pair, and an encoding with the offsets of its tokens."""
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
    """Return the decoded text of token IDs, and each token's start and end offset.

    Each token is decoded together with its predecessor, which determines leading spaces. Tokens that share a character
    have equal offsets.
    """
    text, spans = "", list[tuple[int, int]]()
    anchor = 0  # last decoded token, the context for the next ones
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
