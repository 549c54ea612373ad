"""Choose, truncate and tokenise the texts that all later stages work on, each once.

    python -m stages tokenize

Writes `features/tokenize/`; `attnmix.store.texts` says what is in it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from attnmix.data.draw import Rows, stratified_draw, typical_reviews
from attnmix.models.checkpoint import check_max_length, load_config, load_tokenizer
from attnmix.models.encoding import tokenize_texts
from attnmix.store import texts as store
from attnmix.store.files import read_table
from attnmix.store.runs import Run
from stages.common.parameters import CaptureParameters, Parameters

MAX_NAMES = 5  # texts in one warning
Text = dict[str, Any]
"""A row of `texts.parquet`, without its numbers of tokens."""


def main(parameters: Parameters) -> None:
    run = Run(Path())
    check_max_length("capture.max_length", parameters.capture.max_length, run.finetuned)
    write_tokens(chosen_texts(parameters, run), parameters.capture.max_length, run.finetuned, run)


def chosen_texts(parameters: Parameters, run: Run) -> Iterator[Text]:
    """Yield every text that a stage needs: captured reviews (named, then drawn), free texts, then other reviews.

    Without any choice `typical_reviews` are captured.
    """
    capture, folder = parameters.capture, run.reviews
    reviews = store.read_split("test", folder, ["label", "label_name"])
    capture.check_documents(len(reviews))
    numbers = capture.documents
    if capture.typical:
        numbers = typical_reviews(read_table(run.test_predictions_file, "finetune"))
    named = np.array(numbers, np.int64)
    drawn, measured, removed = (
        stratified_draw(reviews["label"].to_numpy(), size, parameters.seed) if size else named[:0]
        for size in (capture.drawn, parameters.measure.documents, parameters.faithfulness.documents)
    )
    captured = np.union1d(named, drawn)
    chosen = {"captured": captured, "measured": measured, "removed": removed}
    flags = {name: reviews.index.isin(rows) for name, rows in chosen.items()}
    reviews = reviews.assign(document="test/" + reviews.index.astype(str), **flags)

    by_number = dict(zip(sorted(numbers), _with_texts(np.sort(named), reviews, folder), strict=True))
    yield from (by_number[number] for number in numbers)
    yield from _with_texts(np.setdiff1d(drawn, named), reviews, folder)
    yield from free_texts(capture)
    yield from _with_texts(np.setdiff1d(measured, captured), reviews, folder)
    yield from _with_texts(np.setdiff1d(removed, np.union1d(captured, measured)), reviews, folder)


def free_texts(capture: CaptureParameters, measured: bool = False) -> Iterator[Text]:
    """Yield `capture.texts`; they are in the statistics where they are `measured`."""
    flags = {"captured": True, "measured": measured, "removed": False}
    for number, text in enumerate(capture.texts):
        yield {"document": f"text/{number}", "text": text, "label": -1, "label_name": None, **flags}


def _with_texts(rows: Rows, reviews: pd.DataFrame, folder: Path) -> Iterator[Text]:
    """Yield the sorted `rows` of the table of test reviews with their texts, of which one block is in memory."""
    start = 0
    for block in store.read_texts("test", folder):
        first, last = np.searchsorted(rows, [start, start + len(block)])
        if first == len(rows):
            return
        yield from ({"text": block[row - start], **reviews.iloc[row]} for row in rows[first:last].tolist())
        start += len(block)


def write_tokens(texts: Iterable[Text], max_length: int, checkpoint: Path, layout: Run) -> None:
    """Write `features/tokenize/` of `layout` with the tokenizer of `checkpoint`, texts truncated to `max_length`.

    A decoder beside an encoder reads the tokens one later, after the token that it starts with: `decoder_token`.
    """
    tokenizer, config = load_tokenizer(checkpoint), load_config(checkpoint)
    start_id = config.decoder_start_token_id if config.is_encoder_decoder else None

    def blocks() -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
        remaining = iter(texts)
        while block := list(islice(remaining, store.BLOCK)):
            documents = pd.DataFrame(block)
            tokens = tokenize_texts(tokenizer, documents["document"], documents["text"], max_length)
            counts = pd.DataFrame([each.counts for each in tokens])
            _warn(documents["document"][documents["captured"]], counts[documents["captured"]])
            table = pd.concat([each.table for each in tokens], ignore_index=True)
            if start_id is not None:
                start = tokenizer.convert_ids_to_tokens([start_id])[0]
                table["decoder_token"] = table.groupby("document", sort=False)["token"].shift().fillna(start)
            yield documents.join(counts), table

    store.write_tokenized(layout.tokens_file.parent, blocks(), start_id is not None)


def _warn(names: pd.Series, counts: pd.DataFrame) -> None:
    """Log which captured texts the model does not see whole, or hardly knows a word of."""
    labels = names + " (" + counts["whole_tokens"].astype(str) + " tokens)"
    for problem, affected in (
        ("truncated to capture.max_length", counts["tokens"] < counts["whole_tokens"]),
        ("mostly tokens that the model does not know", 2 * counts["unknown_tokens"] >= counts["tokens"]),
    ):
        if affected.any():
            more = ", ..." if affected.sum() > MAX_NAMES else ""
            logging.warning("%s: %s%s", problem, ", ".join(labels[affected][:MAX_NAMES]), more)
