"""Conversion of texts to token IDs, and of token IDs to batches of bounded size."""

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from tokenizers.models import WordPiece
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from attnmix.core.errors import InputError
from attnmix.core.names import NEWLINE, SAME_CHARACTER, SPACE
from attnmix.core.store.texts import PAIR_SEPARATOR, SEGMENT, Text, whole_text

SPACE_MARKS = "Ġ▁"  # space characters in the token names of byte-level BPE and SentencePiece
WHITESPACE = "Ġ▁Ċĉ \n\t"
WHITESPACE_MARKS = str.maketrans(WHITESPACE, f"{SPACE}{SPACE}{NEWLINE}\t{SPACE}{NEWLINE}\t")
MAX_UNKNOWN_SHARE = 0.5
"""Maximum share of unknown words; beyond it, most vectors belong to the unknown token."""
PASS_COST_TOKENS = 128  # duration of an additional forward pass, in units of the time per token


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[Text], max_length: int) -> list[list[int]]:
    """Return unpadded token IDs with special tokens, truncated to `max_length` (in pairs, the longer text first)."""
    first, second = _split_pairs(texts)
    encoding = tokenizer(first, second, truncation=True, max_length=max_length)
    ids: list[list[int]] = encoding["input_ids"]
    return ids


def _split_pairs(texts: Sequence[Text]) -> tuple[list[str], list[str] | None]:
    """Return the first and second texts of pairs, or the texts and None; either all texts or none must be pairs."""
    if not any(isinstance(text, tuple) for text in texts):
        return list(map(str, texts)), None
    first, second = zip(*texts, strict=True)
    return list(first), list(second)


class TokenizedText(NamedTuple):
    """The tokens of one text, including special tokens."""

    table: pd.DataFrame
    """Columns of `features/tokenize/tokens.parquet`, one row per token after truncation."""
    counts: dict[str, int]
    """`tokens` and `unknown_tokens` after truncation, `whole_tokens` before truncation."""
    types: list[int]
    """The tokenizer's `token_type_ids`; 0 for all tokens if it returns none."""


def tokenize_texts(
    tokenizer: PreTrainedTokenizerFast, names: Iterable[str], texts: Iterable[Text], max_length: int | None
) -> list[TokenizedText]:
    """Return the tokens of each named text or pair, truncated to `max_length` if it is set.

    Offsets in a pair refer to the joined text, `whole_text`; word indices continue in the second text.
    """
    texts = list(texts)
    first, second = _split_pairs(texts)
    is_truncated = max_length is not None
    encodings = tokenizer(first, second, truncation=is_truncated, max_length=max_length).encodings or []
    has_types = "token_type_ids" in tokenizer.model_input_names
    tokenized = []
    for name, text, encoding in zip(names, texts, encodings, strict=True):
        table = token_table(tokenizer, name, text, encoding, pairs=isinstance(text, tuple))
        if isinstance(text, str):
            truncated = sum(part.special_tokens_mask.count(0) for part in encoding.overflowing)
        else:
            truncated = len(tokenizer(*text)["input_ids"]) - len(table)
        counts = {
            "tokens": len(table),
            "whole_tokens": len(table) + truncated,
            "unknown_tokens": count_unknown(tokenizer, encoding.ids),
        }
        types = encoding.type_ids if has_types else [0] * len(table)
        tokenized.append(TokenizedText(table, counts, types))
    return tokenized


def count_unknown(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> int:
    """Return the number of unknown tokens; 0 if the tokenizer has no such token."""
    if tokenizer.unk_token_id is None:
        return 0
    return ids.count(tokenizer.unk_token_id)


def token_table(tokenizer: PreTrainedTokenizerFast, name: str, text: Text, encoding: Any, pairs: bool) -> pd.DataFrame:
    """Return the table of a text's tokens from its `encoding` (IDs, segments and offsets).

    With `pairs`, the table includes the segment column, also for a single text among pairs.
    """
    is_special = np.array(encoding.special_tokens_mask, bool)
    segments = np.array([-1 if number is None else number for number in encoding.sequence_ids], np.int8)
    start, end = np.array(encoding.offsets, np.int32).reshape(-1, 2).T
    if isinstance(text, tuple):
        second_start = len(text[0]) + len(PAIR_SEPARATOR)
        shift = (segments == 1) * second_start
        start = start + shift
        end = end + shift
    offsets = list(zip(start.tolist(), end.tolist(), strict=True))
    whole = whole_text(text)
    words, labels = _label_tokens(tokenizer, whole, encoding, offsets)
    columns = {
        "document": name,
        "position": np.arange(len(words), dtype=np.int32),
        "token_id": np.array(encoding.ids, np.int32),
        "token": tokenizer.convert_ids_to_tokens(encoding.ids),
        "label": labels,
        "start": np.where(is_special, -1, start),
        "end": np.where(is_special, -1, end),
        "word": words,
        "token_class": _classify_tokens(tokenizer, whole, encoding, offsets, words),
    }
    if pairs:
        columns[SEGMENT] = np.where(is_special, -1, segments).astype(np.int8)
    return pd.DataFrame(columns)


def _label_tokens(
    tokenizer: PreTrainedTokenizerFast,
    text: str,
    encoding: Any,
    offsets: Sequence[tuple[int, int]],
) -> tuple[list[int], list[str]]:
    """Return each token's word index (from 0; -1 for special tokens) and readable label.

    A word includes its leading space, but no other spaces and no punctuation. Word indices of the tokenizer are not
    used, because words of some tokenizers span a whole text.

    A label is the token's part of the text, with `SPACE` for leading spaces. WordPiece tokens (`##ing`), special and
    unknown tokens keep their names. If byte-level BPE splits a character, its first token is labelled with the
    character, and the others with `SAME_CHARACTER`.
    """
    names = tokenizer.convert_ids_to_tokens(encoding.ids)
    special_tokens_mask = encoding.special_tokens_mask  # each access copies the mask
    unknown_name = tokenizer.unk_token
    is_word_piece = isinstance(tokenizer.backend_tokenizer.model, WordPiece)
    words = [-1] * len(names)
    labels = list(names)
    number = -1  # index of the current word
    word_end = 0
    label_end = 0
    for i, (name, (start, end)) in enumerate(zip(names, offsets, strict=True)):
        if special_tokens_mask[i]:
            continue
        # A new word begins if there is a space or punctuation from the end of the last token to this token's start.
        last_character = text[max(word_end - 1, 0) : word_end].strip(" ")
        seam = last_character + text[word_end : start + 1]
        is_parted = any(character.isspace() or _is_punctuation(character) for character in seam)
        if number < 0 or is_parted:
            number += 1
        words[i] = number
        word_end = end
        if is_word_piece or name == unknown_name:
            continue
        if not name.strip(WHITESPACE):
            labels[i] = name.translate(WHITESPACE_MARKS)
            continue
        leading_spaces = len(name) - len(name.lstrip(SPACE_MARKS))
        piece = text[max(start, label_end) : end].lstrip(" ") or SAME_CHARACTER
        labels[i] = SPACE * leading_spaces + piece.translate(WHITESPACE_MARKS)
        label_end = end
    return words, labels


def _classify_tokens(
    tokenizer: PreTrainedTokenizerFast,
    text: str,
    encoding: Any,
    offsets: Sequence[tuple[int, int]],
    words: Sequence[int],
) -> list[str]:
    """Return the class of each token, one of `TOKEN_CLASSES`; spaces without a following word are `punctuation`."""
    pieces_of_word = Counter(words)
    start_id = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    end_id = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
    classes = []
    for position, (token, word, (start, end)) in enumerate(zip(encoding.ids, words, offsets, strict=True)):
        is_special = word < 0
        is_start = token == start_id and (position == 0 or start_id != end_id)
        is_single_token = pieces_of_word[word] == 1
        piece = text[start:end].strip()
        is_punctuation = all(map(_is_punctuation, piece)) and (piece or is_single_token)
        if is_special:
            name = "cls" if is_start else "sep"
        elif is_punctuation:
            name = "punctuation"
        elif is_single_token:
            name = "word"
        else:
            name = "subword"
        classes.append(name)
    return classes


def _is_punctuation(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] in "PS"


def check_words(key: str, name: str, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
    """Raise `InputError`, prefixed with `key`, if the vocabulary lacks most words of the texts.

    Each occurrence of a word counts as the share of its characters that no known token covers.
    """
    words: Counter[str] = Counter()
    for text in texts:
        words.update(re.findall(r"\w+", text))
    if not words:
        return
    encodings = tokenizer(list(words), add_special_tokens=False).encodings or []
    unknown_shares: dict[str, float] = {}
    for word, encoding in zip(words, encodings, strict=True):
        known = _count_known_characters(encoding, tokenizer.unk_token_id)
        if known < len(word):
            unknown_shares[word] = 1 - known / len(word)
    unknown_words = sum(words[word] * share for word, share in unknown_shares.items())
    share = unknown_words / words.total()
    noun = "text" if len(texts) == 1 else "texts"
    extent = f"{100 * share:.1f} % of the words of {len(texts)} {noun}"
    if share > MAX_UNKNOWN_SHARE:
        examples = ", ".join(repr(word) for word in list(unknown_shares)[:3])
        problem = f"does not include {extent}, such as {examples}"
        raise InputError(f"{key}: the vocabulary of {name} {problem}; choose a model for the language of the texts")
    if unknown_shares:
        logging.info("unknown to the model's tokenizer: %s", extent)


def _count_known_characters(encoding: Any, unknown_id: int | None) -> int:
    """Return the number of characters of a word that are covered only by known tokens."""
    known: set[int] = set()
    unknown: set[int] = set()
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        characters = unknown if token == unknown_id else known
        characters.update(range(start, end))
    # The offsets of a leading-space token include the word's first character, even if the word is unknown.
    return len(known - unknown)


def batches_by_tokens(lengths: Sequence[int], batch_tokens: int, pass_cost: int = PASS_COST_TOKENS) -> list[list[int]]:
    """Return indices of texts grouped by length into batches of at most `batch_tokens` tokens including padding.

    A longer text forms a batch by itself. Among all partitions of the texts sorted by length, the result minimises the
    number of tokens including padding, plus `pass_cost` per batch.
    """
    order = np.argsort(lengths, kind="stable")
    ordered = np.asarray(lengths)[order]
    texts = len(ordered)
    lowest_costs = np.zeros(texts + 1)  # of the first n texts, for each n
    last_batch_starts = np.zeros(texts + 1, dtype=int)
    for end in range(1, texts + 1):
        # Costs of the first `end` texts without the last `pass_cost`, for each start of the last batch from `first` on.
        longest = int(ordered[end - 1])
        max_texts = max(1, batch_tokens // longest)
        first = max(0, end - max_texts)
        batch_sizes = np.arange(end - first, 0, -1)
        costs = lowest_costs[first:end] + longest * batch_sizes
        last_batch_starts[end] = first + int(costs.argmin())
        lowest_costs[end] = costs.min() + pass_cost
    batches = []
    end = texts
    while end:
        start = last_batch_starts[end]
        batches.append(order[start:end].tolist())
        end = start
    return batches[::-1]


def padded(
    encoded: Sequence[Sequence[int]], pad_token_id: int, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask`, `[batch, tokens]`, padded on the right."""
    texts = [torch.tensor(text, dtype=torch.long) for text in encoded]
    ones = [torch.ones_like(text) for text in texts]
    ids = pad_sequence(texts, batch_first=True, padding_value=pad_token_id)
    mask = pad_sequence(ones, batch_first=True)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
