"""Token IDs supplied by the user: validation, removal of padding, and decoding to text."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from attnmix.core.errors import InputError
from attnmix.core.given_texts import MASK, TokenIds
from attnmix.core.store.texts import Text
from attnmix.models.encoding import END_ROLES, TokenizedText, count_unknown, list_special_ids, token_table

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from incomplete UTF-8 sequences
OTHER_ROLES = (*END_ROLES, "unk", "mask")


class IdsEncoding(NamedTuple):
    """The fields of a tokenizer's `Encoding`, derived only from token IDs."""

    ids: list[int]
    special_tokens_mask: list[int]
    sequence_ids: list[int | None]
    offsets: list[tuple[int, int]]


def read_ids(
    tokenizer: PreTrainedTokenizerFast, given: Sequence[TokenIds], rows: int, max_length: int | None, key: str = "texts"
) -> list[TokenIds]:
    """Return texts that are given as token IDs, without the padding at their ends.

    `rows` is the number of rows of the model's embedding. Raise `InputError`, prefixed with `key` and the index of the
    text, for IDs outside the vocabulary, more than `max_length` IDs, padding between tokens, and texts with only
    start and end tokens.
    """
    texts = []
    lengths = {len(text.ids) for text in given}
    has_equal_lengths = len(lengths) == 1 and len(given) > 1
    batch = given if has_equal_lengths else ()  # texts of equal length may be padded rows of one batch
    end_ids = list_special_ids(tokenizer, END_ROLES)
    for number, text in enumerate(given):
        where = f"{key}: number {number}"
        _check_vocabulary(tokenizer, text.ids, rows, where)
        content = _remove_padding(tokenizer, text, batch, where)
        if end_ids.issuperset(content.ids):
            raise InputError(f"{where}: the text is empty")
        if max_length is not None and len(content.ids) > max_length:
            raise InputError(f"{where} has {len(content.ids)} token ids; allowed: at most {max_length}")
        texts.append(content)
    return texts


def _check_vocabulary(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], rows: int, key: str) -> None:
    """Raise `InputError`, prefixed with `key`, for an ID outside the embedding or the tokenizer's vocabulary."""
    for number in ids:
        if not 0 <= number < rows:
            raise InputError(f"{key} contains the token id {number}; allowed: 0 to {rows - 1}")
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    for number, token in zip(ids, tokens, strict=True):
        if token is None:
            raise InputError(f"{key} contains the token id {number}; allowed: ids of the tokenizer's tokens")


def _remove_padding(
    tokenizer: PreTrainedTokenizerFast,
    text: TokenIds,
    batch: Iterable[TokenIds],
    key: str,
) -> TokenIds:
    """Return a text without padding tokens at its ends.

    Only a dedicated padding token is removed. A padding token with a second role, such as the end-of-text token of
    GPT-2, is kept. If no attention mask was applied, `_check_ambiguous_padding` raises an error for tokens that may be
    padding.
    """
    pad = tokenizer.pad_token_id
    if pad is None or pad not in text.ids:
        return text
    if has_own_padding(tokenizer):
        content = _strip_padding(text, pad)
        check_no_padding(tokenizer, content.ids, key)
        return content
    if not text.masked:
        _check_ambiguous_padding(tokenizer, text, batch, key)
    return text


def _strip_padding(text: TokenIds, padding: int) -> TokenIds:
    """Return a text without the `padding` tokens at its ends."""
    padding_before = _count_leading(text.ids, padding)
    padding_after = _count_leading(text.ids[::-1], padding)
    content = slice(padding_before, len(text.ids) - padding_after)
    types = None
    if text.types is not None:
        types = text.types[content]
    return replace(text, ids=text.ids[content], types=types)


def _check_ambiguous_padding(
    tokenizer: PreTrainedTokenizerFast, text: TokenIds, batch: Iterable[TokenIds], key: str
) -> None:
    """Raise `InputError`, prefixed with `key`, if tokens at an end of a text may be padding.

    Precondition: the padding token of the tokenizer has a second role, such as the end of a text.

    Two or more padding tokens at one end of the text are ambiguous. A single one is ambiguous if a text of `batch`
    (texts of equal length) has a different token at this end. It is accepted if all texts of `batch` have it: in a
    padded batch, the longest text has no padding, so the token then has its second role in all texts.
    """
    pad = tokenizer.pad_token_id
    first_index = 0
    last_index = -1
    padding_counts = {
        first_index: _count_leading(text.ids, pad),
        last_index: _count_leading(text.ids[::-1], pad),
    }
    for end_index, count in padding_counts.items():
        others_differ = any(other.ids[end_index] != pad for other in batch)
        if count > 1 or (count == 1 and others_differ):
            problem = f"{tokenizer.pad_token} at one end, which serves as padding and as a token of texts"
            raise InputError(f"{key} has {problem}; pass the complete output of tokenizer(...), with its {MASK}")


def _count_leading(ids: Sequence[int], padding: int) -> int:
    """Return the number of padding tokens at the start of a text."""
    for place, number in enumerate(ids):
        if number != padding:
            return place
    return len(ids)


def has_own_padding(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return True if the tokenizer has a dedicated padding token, without a second role."""
    if tokenizer.pad_token_id is None:
        return False
    return tokenizer.pad_token_id not in list_special_ids(tokenizer, OTHER_ROLES)


def check_no_padding(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], key: str) -> None:
    """Raise `InputError`, prefixed with `key`, for a dedicated padding token among the IDs of a text."""
    if has_own_padding(tokenizer) and tokenizer.pad_token_id in ids:
        place = list(ids).index(tokenizer.pad_token_id)
        raise InputError(f"{key} contains {tokenizer.pad_token}, the padding token, as token {place}; remove it")


def tokenized_ids(
    tokenizer: PreTrainedTokenizerFast, names: Iterable[str], texts: Iterable[TokenIds], pairs: bool
) -> list[tuple[Text, TokenizedText]]:
    """Return the decoded text and the tokens of each text that is given as token IDs.

    The tokens include the given segments (`types`), 0 if there are none. If `pairs` is True, the table of the tokens
    also has a column of segments.
    """
    tokenized = []
    for name, given in zip(names, texts, strict=True):
        text, encoding = _decode_text(tokenizer, given)
        table = token_table(tokenizer, name, text, encoding, pairs)
        counts = {
            "tokens": len(table),
            "whole_tokens": len(table),  # the number before truncation; token IDs are never truncated
            "unknown_tokens": count_unknown(tokenizer, given.ids),
        }
        types = given.types or [0] * len(given.ids)
        tokenized.append((text, TokenizedText(table, counts, types)))
    return tokenized


def _decode_text(tokenizer: PreTrainedTokenizerFast, given: TokenIds) -> tuple[Text, IdsEncoding]:
    """Decode token IDs to a text or a pair, and return it with an encoding that contains the offsets of the tokens."""
    end_ids = list_special_ids(tokenizer, END_ROLES)
    types = given.types or [0] * len(given.ids)
    is_special = [number in end_ids for number in given.ids]
    segments: list[int | None] = []  # None for special tokens
    for is_special_token, segment in zip(is_special, types, strict=True):
        segments.append(None if is_special_token else segment)
    offsets = [(0, 0)] * len(given.ids)  # special tokens keep these offsets
    texts = []
    for segment_of_text in (0, 1):  # the second text is empty for a single text
        positions = [position for position, segment in enumerate(segments) if segment == segment_of_text]
        ids_of_text = [given.ids[position] for position in positions]
        decoded, offsets_of_text = spell(tokenizer, ids_of_text)
        texts.append(decoded)
        for position, offset in zip(positions, offsets_of_text, strict=True):
            offsets[position] = offset
    encoding = IdsEncoding(given.ids, list(map(int, is_special)), segments, offsets)
    first, second = texts
    text = (first, second) if 1 in types else first
    return text, encoding


def spell(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """Return the decoded text of token IDs, and each token's start and end offset.

    Each token is decoded together with the previous token, on which its leading spaces depend. Tokens that share a
    character have equal offsets.
    """
    text = ""
    offsets: list[tuple[int, int]] = []
    for end in range(1, len(ids) + 1):
        start = len(offsets)  # the tokens before `start` are already in `text`
        new_ids = ids[start:end]  # several tokens if they share a character
        previous = max(start - 1, 0)
        previous_ids = ids[previous:start]  # the last token in `text`; empty for the first token
        together = _decode(tokenizer, ids[previous:end])
        needs_next_token = together.endswith(INCOMPLETE) and end < len(ids)  # to complete a character
        if needs_next_token:
            continue
        previous_text = _decode(tokenizer, previous_ids)
        if together.startswith(previous_text):
            piece = together.removeprefix(previous_text)
        else:
            # The new tokens change the text of the previous token, so they are decoded without it.
            piece = _decode(tokenizer, new_ids)
        offset = (len(text), len(text) + len(piece))  # the same for all `new_ids`
        offsets.extend([offset] * len(new_ids))
        text += piece
    return text, offsets


def _decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """Return the text of token IDs, without changes to spaces."""
    text = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    return str(text)
