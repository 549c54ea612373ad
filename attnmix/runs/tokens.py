"""Tokenise the texts of a run, each once, into `features/tokenize/`; `attnmix.store.texts` says what is in it."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from attnmix.data.draw import Rows
from attnmix.models.checkpoint import load_config, load_tokenizer
from attnmix.models.encoding import tokenize_texts
from attnmix.store import texts as store
from attnmix.store.runs import Run

MAX_NAMES = 5  # texts in one warning
Text = dict[str, Any]
"""A row of `texts.parquet`, without its numbers of tokens."""


def free_texts(texts: Iterable[str | Sequence[str]], measured: bool = False) -> Iterator[Text]:
    """Yield rows for texts of one's own; they are in the statistics where they are `measured`."""
    labels = {"label": -1, "label_name": None, "predicted_label": -1}
    flags = {"captured": True, "measured": measured, "removed": False}
    for number, text in enumerate(texts):
        each = text if isinstance(text, str) else tuple(text)
        yield {"document": f"text/{number}", "text": each, **labels, **flags}


def with_texts(rows: Rows, split: str, reviews: pd.DataFrame, folder: Path) -> Iterator[Text]:
    """Yield the sorted `rows` of a split's table of reviews with their texts, of which one block is in memory."""
    start = 0
    for block in store.read_texts(split, folder):
        first, last = np.searchsorted(rows, [start, start + len(block)])
        if first == len(rows):
            return
        yield from ({"text": block[row - start], **reviews.iloc[row]} for row in rows[first:last].tolist())
        start += len(block)


def write_tokens(texts: Iterable[Text], max_length: int, checkpoint: Path, layout: Run) -> None:
    """Write `features/tokenize/` of `layout` with the tokenizer of `checkpoint`, texts truncated to `max_length`.

    Texts are pairs throughout, or none is. A decoder beside an encoder reads the tokens one later, after the token that
    it starts with: `decoder_token`.
    """
    tokenizer, config = load_tokenizer(checkpoint), load_config(checkpoint)

    def blocks() -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
        remaining = iter(texts)
        while block := list(islice(remaining, store.BLOCK)):
            documents, tokens = tokenized_block(block, max_length, tokenizer, config)
            _warn(documents[documents["captured"]])
            yield documents, tokens

    store.write_tokenized(layout.tokens_file.parent, blocks())


def tokenized_block(
    texts: Sequence[Text], max_length: int, tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables of some texts and of their tokens; `attnmix.store.texts` names the columns."""
    documents = pd.DataFrame(texts)
    tokens = tokenize_texts(tokenizer, documents["document"], documents["text"], max_length)
    counts = pd.DataFrame([each.counts for each in tokens])
    table = pd.concat([each.table for each in tokens], ignore_index=True)
    if config.is_encoder_decoder:
        start = tokenizer.convert_ids_to_tokens([config.decoder_start_token_id])[0]
        table["decoder_token"] = table.groupby("document", sort=False)["token"].shift().fillna(start)
    documents["text"] = documents["text"].map(store.whole_text)
    return documents.join(counts), table


def _warn(texts: pd.DataFrame) -> None:
    """Log which captured texts the model does not see whole, or hardly knows a word of."""
    labels = texts["document"] + " (" + texts["whole_tokens"].astype(str) + " tokens)"
    for problem, affected in (
        ("truncated to capture.max_length", texts["tokens"] < texts["whole_tokens"]),
        ("mostly tokens that the model does not know", 2 * texts["unknown_tokens"] >= texts["tokens"]),
    ):
        if affected.any():
            more = ", ..." if affected.sum() > MAX_NAMES else ""
            logging.warning("%s: %s%s", problem, ", ".join(labels[affected][:MAX_NAMES]), more)
