"""The reviews of `download`, and the texts that all later stages work on, as `tokenize` truncates and tokenises them.

Reviews are one parquet file for each split, with the columns text, label (from 0 on) and label_name.

`features/tokenize/texts.parquet` has a row for each text: document (`test/3` is a row of the test reviews, `text/0` a
free text), text, label (-1 of a free text), label_name, predicted_label (of the fine-tuned classifier, -1 of a free
text), captured (its vectors are stored), measured (it is in the statistics), removed (tokens are removed from it),
tokens, whole_tokens (before it was truncated), unknown_tokens.
`features/tokenize/tokens.parquet` has a row for each token: document, position, token_id, token, label (as a person
reads it), start and end (character offsets, -1 of special tokens), word (its number, -1 likewise), token_class, and
`decoder_token` where there is a decoder next to an encoder. Captured texts come first, in the order of the stores'
rows. Both files hold `BLOCK` texts in a row group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from attnmix.store.files import CHECKED, read_table, undamaged, whole, write_table

BATCH_TEXTS = 1000
BUFFER_BYTES = 2**20
BLOCK = 256  # texts in a row group
DECODER_TOKEN = "decoder_token"

TEXT_FIELDS = [
    *(("document", pa.string()), ("text", pa.string()), ("label", pa.int64()), ("label_name", pa.string())),
    ("predicted_label", pa.int64()),
    *((name, pa.bool_()) for name in ("captured", "measured", "removed")),
    *((name, pa.int32()) for name in ("tokens", "whole_tokens", "unknown_tokens")),
]
TOKEN_FIELDS = [
    *(("document", pa.string()), ("position", pa.int32()), ("token_id", pa.int32())),
    *(("token", pa.string()), ("label", pa.string())),
    *(("start", pa.int32()), ("end", pa.int32()), ("word", pa.int32()), ("token_class", pa.string())),
]


def split_file(split: str, folder: Path) -> Path:
    """Return the path of the reviews of `train`, `validation` or `test`."""
    return folder / f"{split}.parquet"


def write_split(split: str, reviews: pd.DataFrame, folder: Path) -> None:
    """Write columns `text`, `label` (from 0 on), `label_name`."""
    write_table(split_file(split, folder), reviews)


def read_split(split: str, folder: Path, columns: list[str] | None = None) -> pd.DataFrame:
    """Return `text`, `label` (from 0 on) and `label_name`, or some of these `columns`."""
    return read_table(split_file(split, folder), "download", columns=columns)


def read_texts(split: str, folder: Path) -> Iterator[list[str]]:
    """Yield the texts of a split in batches, so that memory does not grow with their number."""
    with undamaged(split_file(split, folder), "download") as path:
        # With a buffer it reads page by page; pandas writes all rows as one group.
        file = pq.ParquetFile(path, buffer_size=BUFFER_BYTES, page_checksum_verification=True)
        for batch in file.iter_batches(BATCH_TEXTS, columns=["text"]):
            yield batch.column(0).to_pylist()


def write_tokenized(folder: Path, blocks: Iterable[tuple[pd.DataFrame, pd.DataFrame]], decoder: bool = False) -> None:
    """Write both tables into `folder`, given as blocks of texts with their tokens; one block is in memory at a time."""
    text_schema = pa.schema(TEXT_FIELDS)
    token_schema = pa.schema([*TOKEN_FIELDS, (DECODER_TOKEN, pa.string())] if decoder else TOKEN_FIELDS)
    with (
        whole(folder / "texts.parquet") as texts_part,
        whole(folder / "tokens.parquet") as tokens_part,
        pq.ParquetWriter(texts_part, text_schema, **CHECKED) as texts_writer,
        pq.ParquetWriter(tokens_part, token_schema, **CHECKED) as tokens_writer,
    ):
        for texts, tokens in blocks:
            texts_writer.write_table(pa.Table.from_pandas(texts, text_schema, preserve_index=False))
            table = pa.Table.from_pandas(tokens, token_schema, preserve_index=False)
            tokens_writer.write_table(table, row_group_size=max(1, len(table)))
