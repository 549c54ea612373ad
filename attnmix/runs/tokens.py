"""Tokenisation of a user's texts, and of the texts of a run (`features/tokenize/`, see `attnmix.core.store.texts`)."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from attnmix.core.draw import RowNumbers
from attnmix.core.errors import InputError
from attnmix.core.given_texts import Item, TokenIds, read_texts
from attnmix.core.store import texts as store
from attnmix.models.checkpoint import load_config, load_tokenizer
from attnmix.models.encoding import TokenizedText, check_words, tokenize_texts
from attnmix.models.segments import check_types
from attnmix.models.token_ids import check_no_padding, read_ids, tokenized_ids

MAX_SHOWN_TEXTS = 5  # number of texts shown in a warning
TextRow = dict[str, Any]
"""A row of `texts.parquet`, without token counts."""


class TokenizedTexts(NamedTuple):
    """Texts and their tokens, as two tables."""

    texts: pd.DataFrame
    """A table with the rows of `texts.parquet`. `attnmix.core.store.texts` documents the columns."""
    tokens: pd.DataFrame
    """A table with the rows of `tokens.parquet`."""

    @property
    def pairs(self) -> bool:
        """True if the texts are pairs."""
        return store.SEGMENT in self.tokens

    def write(self, files: store.TokenizedFiles) -> None:
        """Write the tables in the format of the stage `tokenize`."""
        store.write_tokenized(files.folder, self._split_into_blocks())

    def _split_into_blocks(self) -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
        """Yield blocks of at most `store.ROW_GROUP_TEXTS` texts: the rows of the texts and the rows of their tokens."""
        token_start = 0
        for start in range(0, len(self.texts), store.ROW_GROUP_TEXTS):
            texts = self.texts.iloc[start : start + store.ROW_GROUP_TEXTS]
            token_stop = token_start + int(texts["tokens"].sum())
            yield texts, self.tokens.iloc[token_start:token_stop]
            token_start = token_stop


def tokenize_given(
    given: Any,
    tokenizer: PreTrainedTokenizerFast,
    config: PreTrainedConfig,
    embeddings: int,
    max_length: int | None,
    name: str = "this model",
) -> TokenizedTexts:
    """Return a user's texts, tokenised with the unmodified `tokenizer`.

    `given` has one of the formats of `attnmix.core.given_texts`: texts, pairs of texts, or token IDs. Padding is
    removed from token IDs. `embeddings` is the number of the model's token embeddings. Texts are truncated to
    `max_length` tokens, on the tokenizer's truncation side. Raise `InputError` for any other format, for tokens without
    an embedding, and if most words are missing from the model's vocabulary. `name` is the name of the model in error
    messages.
    """
    items = read_texts(given)
    token_ids = _select_token_ids(items)
    if token_ids:
        items = list(read_ids(tokenizer, token_ids, embeddings, max_length))
    plain_texts = [store.whole_text(item) for item in items if not isinstance(item, TokenIds)]
    check_words("texts", name, tokenizer, plain_texts)
    texts = pd.DataFrame(list(free_texts(items)))
    decoded_texts, tokenized = _tokenize(tokenizer, texts["document"], items, max_length)
    texts["text"] = decoded_texts
    for number, text in enumerate(tokenized):
        _check_tokens(f"texts: number {number}", text, tokenizer, config, embeddings)
    text_table, token_table = _create_tables(texts, tokenized, tokenizer, config)
    return TokenizedTexts(text_table, token_table)


def _check_tokens(
    key: str, text: TokenizedText, tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig, embeddings: int
) -> None:
    """Raise `InputError` for padding, tokens without an embedding, and token types that the model does not support.

    `key` names the text in messages.
    """
    ids = text.table["token_id"].to_numpy()
    check_no_padding(tokenizer, ids.tolist(), key)
    if ids.max() >= embeddings:
        problem = f"the tokenizer returned the token ID {ids.max()}, but the model has {embeddings} embeddings"
        raise InputError(f"{key}: {problem}; pass the model's own tokenizer")
    check_types(config, tokenizer, ids.tolist(), text.types, store.SEGMENT in text.table, key)


def free_texts(texts: Iterable[Item | Sequence[str]], measured: bool = False) -> Iterator[TextRow]:
    """Yield the rows of user texts, which have no labels. If `measured` is True, the statistics include these texts."""
    labels = {"label": -1, "label_name": None, "predicted_label": -1}
    flags = {"measured": measured, "removed": False}
    for number, text in enumerate(texts):
        item = tuple(text) if isinstance(text, list) else text  # a list is a pair of texts
        yield {"document": f"text/{number}", "text": item, **labels, **flags}


def with_texts(rows: RowNumbers, split: str, reviews: pd.DataFrame, folder: Path) -> Iterator[TextRow]:
    """Yield the rows of `reviews` at the sorted indices `rows`, with their texts; the texts are read in blocks."""
    start = 0  # row index of the first text of the block
    for block in store.read_texts(split, folder):
        stop = start + len(block)
        first, last = np.searchsorted(rows, [start, stop])
        rows_in_block = rows[first:last].tolist()  # the rows from `start` to `stop`, because `rows` is sorted
        if first == len(rows):  # all rows are in earlier blocks
            return
        for row in rows_in_block:
            yield {"text": block[row - start], **reviews.iloc[row]}
        start = stop


def write_tokens(
    texts: Iterable[TextRow], max_length: int, checkpoint: Path, files: store.TokenizedFiles, warn: bool = True
) -> None:
    """Write the tables of `texts`, tokenised with the tokenizer of `checkpoint` and truncated to `max_length`.

    If `warn` is True, log the texts that are truncated or consist mostly of unknown tokens. Either all texts or none
    must be pairs. In encoder-decoder models, the column `decoder_token` contains the decoder inputs: the tokens shifted
    right by one, after the decoder's start token.
    """
    tokenizer = load_tokenizer(checkpoint)
    config = load_config(checkpoint)
    blocks = _tokenize_blocks(texts, max_length, tokenizer, config, warn)
    store.write_tokenized(files.folder, blocks)


def _tokenize_blocks(
    texts: Iterable[TextRow],
    max_length: int,
    tokenizer: PreTrainedTokenizerFast,
    config: PreTrainedConfig,
    warn: bool,
) -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
    """Yield the tables of texts and of their tokens for each block of at most `store.ROW_GROUP_TEXTS` texts.

    If `warn` is True, log the texts that are truncated or consist mostly of unknown tokens.
    """
    remaining = iter(texts)
    block = list(islice(remaining, store.ROW_GROUP_TEXTS))
    while block:
        documents, tokens = tokenized_block(block, max_length, tokenizer, config)
        if warn:
            _warn_of_lost_tokens(documents)
        yield documents, tokens
        block = list(islice(remaining, store.ROW_GROUP_TEXTS))


def tokenized_block(
    texts: Sequence[TextRow], max_length: int, tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a table of the texts and a table of their tokens, with the columns of `attnmix.core.store.texts`."""
    documents = pd.DataFrame(texts)
    tokenized = tokenize_texts(tokenizer, documents["document"], documents["text"], max_length)
    return _create_tables(documents, tokenized, tokenizer, config)


def _tokenize(
    tokenizer: PreTrainedTokenizerFast, names: Iterable[str], items: Sequence[Item], max_length: int | None
) -> tuple[list[store.Text], list[TokenizedText]]:
    """Return the texts and their tokens, as two lists. If `items` are token IDs, the texts are decoded from them.

    `names` are the names of the texts.
    """
    token_ids = _select_token_ids(items)
    if token_ids:
        # A token type other than 0 marks the second text of a pair.
        pairs = any(any(item.types or ()) for item in token_ids)
        decoded = tokenized_ids(tokenizer, names, token_ids, pairs)
        decoded_texts = [text for text, _ in decoded]
        tokenized = [tokens for _, tokens in decoded]
        return decoded_texts, tokenized
    texts = [item for item in items if not isinstance(item, TokenIds)]
    return texts, tokenize_texts(tokenizer, names, texts, max_length)


def _select_token_ids(items: Sequence[Item]) -> list[TokenIds]:
    """Return the items that are token IDs: all items, or none."""
    return [item for item in items if isinstance(item, TokenIds)]


def _create_tables(
    documents: pd.DataFrame,
    tokenized: Sequence[TokenizedText],
    tokenizer: PreTrainedTokenizerFast,
    config: PreTrainedConfig,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return two tables: the texts (`documents`, with the numbers of tokens), and all tokens.

    `documents` is modified: each pair of texts is joined into one text.
    """
    counts = pd.DataFrame([text.counts for text in tokenized])
    table = pd.concat([text.table for text in tokenized], ignore_index=True)
    if config.is_encoder_decoder:
        # The inputs of the decoder are the tokens of each text shifted right by one, after a start token.
        start = tokenizer.convert_ids_to_tokens([config.decoder_start_token_id])[0]
        table["decoder_token"] = table.groupby("document", sort=False)["token"].shift().fillna(start)
    documents["text"] = documents["text"].map(store.whole_text)
    return documents.join(counts), table


def _warn_of_lost_tokens(texts: pd.DataFrame) -> None:
    """Log the names of the first truncated texts, and of the first texts in which at least half the tokens are unknown.

    `texts` is a table with a row for each text, with its name (`document`) and its numbers of tokens.
    """
    labels = texts["document"] + " (" + texts["whole_tokens"].astype(str) + " tokens)"
    problems = {
        "truncated to capture.max_length": texts["tokens"] < texts["whole_tokens"],
        "mostly tokens unknown to the model": 2 * texts["unknown_tokens"] >= texts["tokens"],
    }
    for problem, is_affected in problems.items():  # `is_affected` is a column with a value for each text
        if is_affected.any():
            shown = ", ".join(labels[is_affected][:MAX_SHOWN_TEXTS])
            more = ", ..." if is_affected.sum() > MAX_SHOWN_TEXTS else ""
            logging.warning("%s: %s%s", problem, shown, more)
