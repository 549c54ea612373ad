"""Conversion of texts to token IDs, and of token IDs to batches of bounded size."""

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from tokenizers.models import WordPiece
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from attnmix.core.errors import InputError
from attnmix.core.names import NEWLINE, SAME_CHARACTER, SPACE
from attnmix.core.store.texts import PAIR_SEPARATOR, SEGMENT, Text, whole_text

IntArray = npt.NDArray[np.integer[Any]]
SPACE_MARKS = "Ġ▁"  # the characters for a space in the token names of byte-level BPE and SentencePiece
# The characters for white space in token names: `SPACE_MARKS`, the characters of byte-level BPE for a line break and a
# tab, and the space, the line break and the tab themselves.
WHITESPACE = "Ġ▁Ċĉ \n\t"
WHITESPACE_MARKS = str.maketrans(WHITESPACE, f"{SPACE}{SPACE}{NEWLINE}\t{SPACE}{NEWLINE}\t")
END_ROLES = ("cls", "sep", "bos", "eos")
"""Roles of the special tokens at the start and end of texts."""
MAX_UNKNOWN_SHARE = 0.5
"""Maximum share of unknown words; above it, most vectors would belong to the unknown token."""
MAX_SHOWN_WORDS = 3  # maximum number of unknown words in a message
PASS_COST_TOKENS = 128  # cost of an additional batch, in tokens that take the same time


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[Text], max_length: int) -> list[list[int]]:
    """Return the token IDs of each text or pair, with special tokens and without padding, truncated to `max_length`.

    In pairs, tokens are removed from the end of the longer text first, then from both texts.
    """
    first, second = _split_pairs(texts)
    encoding = tokenizer(first, second, truncation=True, max_length=max_length)
    ids: list[list[int]] = encoding["input_ids"]
    return ids


def _split_pairs(texts: Sequence[Text]) -> tuple[list[str], list[str] | None]:
    """Return the first and the second texts of pairs; for single texts, return the texts and None.

    Single texts and pairs cannot be mixed.
    """
    if not any(isinstance(text, tuple) for text in texts):
        return list(map(str, texts)), None
    first, second = zip(*texts, strict=True)
    return list(first), list(second)


class TokenizedText(NamedTuple):
    """The tokens of one text, including special tokens."""

    table: pd.DataFrame
    """A table with the columns of `features/tokenize/tokens.parquet` and one row per token after truncation."""
    counts: dict[str, int]
    """Numbers of tokens: `tokens` and `unknown_tokens` after truncation, and `whole_tokens` before truncation."""
    types: list[int]
    """The tokenizer's `token_type_ids`; 0 for all tokens if it returns none."""


def tokenize_texts(
    tokenizer: PreTrainedTokenizerFast, names: Iterable[str], texts: Iterable[Text], max_length: int | None
) -> list[TokenizedText]:
    """Return the tokens of each named text or pair, truncated to `max_length` if it is set.

    In a pair, offsets refer to the joined text (`whole_text`), and word indices continue in the second text.
    """
    texts = list(texts)
    first, second = _split_pairs(texts)
    is_truncated = max_length is not None
    encodings = tokenizer(first, second, truncation=is_truncated, max_length=max_length).encodings or []
    has_types = "token_type_ids" in tokenizer.model_input_names
    tokenized = []
    for name, text, encoding in zip(names, texts, encodings, strict=True):
        table = token_table(tokenizer, name, text, encoding, pairs=isinstance(text, tuple))
        truncated = _count_truncated(tokenizer, text, encoding)
        # Tokens of the first and the second text of a pair have the segments 0 and 1.
        if truncated and isinstance(text, tuple) and not {0, 1}.issubset(table[SEGMENT]):
            raise InputError(f"{name}: with {max_length} tokens, a text of the pair is empty; use a larger max_length")
        counts = {
            "tokens": len(table),
            "whole_tokens": len(table) + truncated,
            "unknown_tokens": count_unknown(tokenizer, encoding.ids),
        }
        types = encoding.type_ids if has_types else [0] * len(table)
        tokenized.append(TokenizedText(table, counts, types))
    return tokenized


def _count_truncated(tokenizer: PreTrainedTokenizerFast, text: Text, encoding: Any) -> int:
    """Return the number of tokens of a text or pair that are not in its `encoding` because of truncation."""
    if isinstance(text, str):
        # The overflowing parts contain the removed tokens, and special tokens, which are not counted.
        return sum(part.special_tokens_mask.count(0) for part in encoding.overflowing)
    # The overflowing parts of a pair repeat tokens, so the pair is encoded again without truncation.
    return len(tokenizer(*text)["input_ids"]) - len(encoding.ids)


def count_unknown(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> int:
    """Return the number of unknown tokens among `ids`; 0 if the tokenizer has no unknown token."""
    if tokenizer.unk_token_id is None:
        return 0
    return ids.count(tokenizer.unk_token_id)


def token_table(tokenizer: PreTrainedTokenizerFast, name: str, text: Text, encoding: Any, pairs: bool) -> pd.DataFrame:
    """Return a table with a row for each token of a text, from its `encoding` (IDs, segments and offsets).

    If `pairs` is True, the table includes the segment column, even if `text` is a single text.
    """
    is_special = _find_special_tokens(tokenizer, encoding)
    segments = np.array([-1 if number is None else number for number in encoding.sequence_ids], np.int8)
    start, end = _find_offsets(text, encoding, segments)
    offsets = list(zip(start.tolist(), end.tolist(), strict=True))
    whole = whole_text(text)
    words = _find_words(whole, is_special, offsets)
    columns = {
        "document": name,
        "position": np.arange(len(words), dtype=np.int32),
        "token_id": np.array(encoding.ids, np.int32),
        "token": tokenizer.convert_ids_to_tokens(encoding.ids),
        "label": _label_tokens(tokenizer, whole, encoding, is_special, offsets),
        "start": np.where(is_special, -1, start),
        "end": np.where(is_special, -1, end),
        "word": words,
        "token_class": _classify_tokens(tokenizer, whole, encoding, offsets, words),
    }
    if pairs:
        columns[SEGMENT] = np.where(is_special, -1, segments).astype(np.int8)
    return pd.DataFrame(columns)


def _find_offsets(text: Text, encoding: Any, segments: npt.NDArray[np.int8]) -> tuple[IntArray, IntArray]:
    """Return the start `[T]` and the end `[T]` of each token in a text or in the joined text of a pair.

    `segments` is 1 for tokens of the second text of a pair, whose offsets in `encoding` refer to this text alone.
    """
    start, end = np.array(encoding.offsets, np.int32).reshape(-1, 2).T
    if isinstance(text, str):
        return start, end
    second_start = len(text[0]) + len(PAIR_SEPARATOR)
    shift = (segments == 1) * second_start
    return start + shift, end + shift


def list_special_ids(tokenizer: PreTrainedTokenizerFast, roles: Iterable[str]) -> set[int]:
    """Return the IDs of the special tokens with the given roles."""
    ids = {getattr(tokenizer, f"{role}_token_id") for role in roles}
    return {number for number in ids if number is not None}


def _find_special_tokens(tokenizer: PreTrainedTokenizerFast, encoding: Any) -> npt.NDArray[np.bool_]:
    """Return True for each token that the tokenizer added to a text, and for start and end tokens inside the text.

    A tokenizer that the user passes as an object may encode a name such as `[SEP]` in a text as a special token.
    """
    added = np.array(encoding.special_tokens_mask, bool)
    end_ids = list_special_ids(tokenizer, END_ROLES)
    return added | np.isin(encoding.ids, list(end_ids))


def _find_words(text: str, is_special: Iterable[bool], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return the word index of each token, from 0; -1 for special tokens.

    A token begins a new word if white space or punctuation, which can be part of the tokens, separates it from the
    previous token. A word includes its leading space, but no other spaces; punctuation tokens have their own indices.
    Word indices of the tokenizer are not used, because some tokenizers treat a whole text as one word.
    """
    words = []
    number = -1  # index of the current word
    previous_end = 0  # end of the previous token
    for is_special_token, (start, end) in zip(is_special, offsets, strict=True):
        if is_special_token:
            words.append(-1)
            continue
        is_first_word = number < 0
        if is_first_word or _is_separated(text, previous_end, start):
            number += 1
        words.append(number)
        previous_end = end
    return words


def _is_separated(text: str, previous_end: int, start: int) -> bool:
    """Return True if white space or punctuation separates a token that ends at `previous_end` from one at `start`.

    The separator can be between the tokens, the first character of the second token, or the last character of the first
    token.
    """
    last_character = text[max(previous_end - 1, 0) : previous_end]
    if last_character == " ":
        last_character = ""  # a plain space does not end a word, because it can be the leading space of the same word
    characters = last_character + text[previous_end : start + 1]
    return any(character.isspace() or _is_punctuation(character) for character in characters)


def _label_tokens(
    tokenizer: PreTrainedTokenizerFast,
    text: str,
    encoding: Any,
    is_special: npt.NDArray[np.bool_],
    offsets: Sequence[tuple[int, int]],
) -> list[str]:
    """Return a readable label for each token.

    A label is the token's part of the text, with `SPACE` for leading spaces. WordPiece tokens (`##ing`), special and
    unknown tokens keep their names. If byte-level BPE splits a character, its first token is labelled with the
    character, and its other tokens with `SAME_CHARACTER`.
    """
    labels = list(tokenizer.convert_ids_to_tokens(encoding.ids))
    if isinstance(tokenizer.backend_tokenizer.model, WordPiece):
        return labels
    unknown_name = tokenizer.unk_token
    labelled_end = 0  # end of the text that is already part of a label
    for i, (start, end) in enumerate(offsets):
        name = labels[i]
        if is_special[i] or name == unknown_name:
            continue
        is_whitespace = not name.strip(WHITESPACE)
        if is_whitespace:
            labels[i] = name.translate(WHITESPACE_MARKS)
            continue
        new_text = text[max(start, labelled_end) : end]  # empty if an earlier label contains the token's character
        labels[i] = _label_piece(name, new_text)
        labelled_end = end
    return labels


def _label_piece(name: str, piece: str) -> str:
    """Return the label of a token with this `name` and this part of the text.

    The label begins with `SPACE` for each leading space of the name, because the offsets of a token, and therefore its
    `piece`, may omit its leading spaces. If the rest of `piece` is empty, because an earlier label contains the token's
    character, the label ends with `SAME_CHARACTER`.
    """
    leading_spaces = len(name) - len(name.lstrip(SPACE_MARKS))
    content = piece.lstrip(" ") or SAME_CHARACTER
    return SPACE * leading_spaces + content.translate(WHITESPACE_MARKS)


def _classify_tokens(
    tokenizer: PreTrainedTokenizerFast,
    text: str,
    encoding: Any,
    offsets: Sequence[tuple[int, int]],
    words: Sequence[int],
) -> list[str]:
    """Return the class of each token: `cls`, `sep`, `punctuation`, `word`, or `subword` for a part of a word.

    Spaces that do not belong to a word are `punctuation`. `words` contains the word index of each token, or -1.
    """
    tokens_per_word = Counter(words)
    start_id = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    end_id = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
    classes = []
    for position, (token, word, (start, end)) in enumerate(zip(encoding.ids, words, offsets, strict=True)):
        is_special = word < 0
        if is_special:
            # Some tokenizers have a single special token for the start and the end of texts.
            is_start = token == start_id and (position == 0 or start_id != end_id)
            classes.append("cls" if is_start else "sep")
        else:
            piece = text[start:end].strip()
            classes.append(_classify_piece(piece, is_whole_word=tokens_per_word[word] == 1))
    return classes


def _classify_piece(piece: str, is_whole_word: bool) -> str:
    """Return the class of a token that is not special; `piece` is its part of the text, empty for white space.

    `is_whole_word` is True if no other token has the same word index. White space is `punctuation` in this case;
    otherwise, it belongs to a word, and is a `subword`.
    """
    is_whitespace = not piece
    if is_whitespace:
        return "punctuation" if is_whole_word else "subword"
    if all(map(_is_punctuation, piece)):
        return "punctuation"
    return "word" if is_whole_word else "subword"


def _is_punctuation(character: str) -> bool:
    """Return True for punctuation and symbols, whose Unicode categories begin with P and S."""
    category = unicodedata.category(character)
    return category[0] in "PS"


def check_words(key: str, name: str, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
    """Raise `InputError`, prefixed with `key`, if most words of the texts are unknown to the model `name`.

    Each occurrence of a word is weighted by the share of its characters that no known token covers.
    """
    occurrences: Counter[str] = Counter()
    for text in texts:
        occurrences.update(re.findall(r"\w+", text))
    if not occurrences:
        return
    unknown_shares = _compute_unknown_shares(tokenizer, list(occurrences))
    unknown_words = sum(occurrences[word] * share for word, share in unknown_shares.items())
    share = unknown_words / occurrences.total()
    noun = "text" if len(texts) == 1 else "texts"
    extent = f"{100 * share:.1f} % of the words of {len(texts)} {noun}"
    if share > MAX_UNKNOWN_SHARE:
        examples = ", ".join(repr(word) for word in list(unknown_shares)[:MAX_SHOWN_WORDS])
        problem = f"does not include {extent}, such as {examples}"
        raise InputError(f"{key}: the vocabulary of {name} {problem}; choose a model for the language of the texts")
    if unknown_shares:
        logging.info("unknown to the model's tokenizer: %s", extent)


def _compute_unknown_shares(tokenizer: PreTrainedTokenizerFast, words: list[str]) -> dict[str, float]:
    """Return the share of the characters of each word that no known token covers; fully known words are omitted."""
    encodings = tokenizer(words, add_special_tokens=False).encodings or []
    unknown_shares = {}
    for word, encoding in zip(words, encodings, strict=True):
        known_characters = _count_known_characters(encoding, tokenizer.unk_token_id)
        if known_characters < len(word):
            unknown_shares[word] = 1 - known_characters / len(word)
    return unknown_shares


def _count_known_characters(encoding: Any, unknown_id: int | None) -> int:
    """Return the number of characters of a word that are covered only by known tokens, from the word's `encoding`."""
    known: set[int] = set()  # positions of characters
    unknown: set[int] = set()
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        characters = unknown if token == unknown_id else known
        characters.update(range(start, end))
    # The offsets of a leading-space token include the word's first character, even if the word is unknown. Characters
    # that are also covered by an unknown token are therefore not counted.
    return len(known - unknown)


def batches_by_tokens(lengths: Sequence[int], batch_tokens: int, pass_cost: int = PASS_COST_TOKENS) -> list[list[int]]:
    """Return batches of texts with similar lengths, as lists of text indices.

    A batch has at most `batch_tokens` tokens including padding, or a single longer text. Among all partitions of the
    texts sorted by length, the result minimises the number of tokens including padding, plus `pass_cost` per batch.
    """
    order = np.argsort(lengths, kind="stable")
    last_batch_starts = _find_last_batch_starts(np.asarray(lengths)[order], batch_tokens, pass_cost)
    # Read off the batches of the best partition, from the last to the first.
    batches = []
    end = len(order)
    while end:
        start = last_batch_starts[end]
        batches.append(order[start:end].tolist())
        end = start
    return batches[::-1]


def _find_last_batch_starts(lengths: IntArray, batch_tokens: int, pass_cost: int) -> npt.NDArray[np.int64]:
    """Return, for each number n of texts, the start of the last batch in the best partition of the first n texts.

    `lengths` `[texts]` are sorted, and the result has `texts` + 1 entries. The best partition is found by dynamic
    programming: the lowest cost of a partition with a given last batch is the lowest cost of all texts before this
    batch, plus the cost of the batch.
    """
    texts = len(lengths)
    lowest_costs = np.zeros(texts + 1)  # for each n, the cost of the best partition of the first n texts
    last_batch_starts = np.zeros(texts + 1, dtype=int)
    for end in range(1, texts + 1):
        longest = int(lengths[end - 1])
        max_texts = max(1, batch_tokens // longest)
        first = max(0, end - max_texts)
        # For each possible start of the last batch (`first` to `end - 1`), `costs` contains the total cost of the first
        # `end` texts without the `pass_cost` of this batch.
        batch_sizes = np.arange(end - first, 0, -1)
        costs = lowest_costs[first:end] + longest * batch_sizes
        last_batch_starts[end] = first + int(costs.argmin())
        lowest_costs[end] = costs.min() + pass_cost
    return last_batch_starts


def padded(
    encoded: Sequence[Sequence[int]], pad_token_id: int, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask`, `[batch, tokens]`, padded on the right."""
    texts = [torch.tensor(text, dtype=torch.long) for text in encoded]
    ones = [torch.ones_like(text) for text in texts]
    ids = pad_sequence(texts, batch_first=True, padding_value=pad_token_id)
    mask = pad_sequence(ones, batch_first=True)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
