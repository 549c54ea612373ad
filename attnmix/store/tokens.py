"""The texts that all stages work on, cut and tokenised once by `tokenize`, under `features/tokenize/`.

`texts.parquet` has a row for each text: document (`test/3` is a row of the test reviews, `text/0` a free text), text,
label (-1 of a free text), label_name, captured (its vectors are stored), measured (it is in the statistics), removed
(tokens are removed from it), tokens, whole_tokens (before it was cut), unknown_tokens. `tokens.parquet` has a row for
each token: document, position, token_id, token, label (as a person reads it), start and end (character offsets, -1 of
special tokens), word (its number, -1 likewise), token_class, and `decoder_token` beside an encoder.

Captured texts come first, in the order of the stores' rows. Both files hold `BLOCK` texts in a row group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from attnmix.store.files import CHECKED, read_table, undamaged, whole

TOKENIZED = Path("features/tokenize")
BLOCK = 256  # texts in a row group
DECODER_TOKEN = "decoder_token"
# Signs in labels.
SPACE = "␣"  # a token without one continues right where the token before it ended
NEWLINE = "⏎"
SAME_CHARACTER = "…"  # a further part of the character before
WORDPIECE_PREFIX = "##"

TEXT_FIELDS = [
    *(("document", pa.string()), ("text", pa.string()), ("label", pa.int64()), ("label_name", pa.string())),
    *((name, pa.bool_()) for name in ("captured", "measured", "removed")),
    *((name, pa.int32()) for name in ("tokens", "whole_tokens", "unknown_tokens")),
]
TOKEN_FIELDS = [
    *(("document", pa.string()), ("position", pa.int32()), ("token_id", pa.int32())),
    *(("token", pa.string()), ("label", pa.string())),
    *(("start", pa.int32()), ("end", pa.int32()), ("word", pa.int32()), ("token_class", pa.string())),
]


def texts_file(root: Path) -> Path:
    """Return the path of the table of texts."""
    return root / "texts.parquet"


def tokens_file(root: Path) -> Path:
    """Return the path of the table of tokens."""
    return root / "tokens.parquet"


def write_tokenized(root: Path, blocks: Iterable[tuple[pd.DataFrame, pd.DataFrame]], decoder: bool = False) -> None:
    """Write both tables, given as blocks of texts with their tokens; one block is in memory at a time."""
    text_schema = pa.schema(TEXT_FIELDS)
    token_schema = pa.schema([*TOKEN_FIELDS, (DECODER_TOKEN, pa.string())] if decoder else TOKEN_FIELDS)
    with (
        whole(texts_file(root)) as texts_part,
        whole(tokens_file(root)) as tokens_part,
        pq.ParquetWriter(texts_part, text_schema, **CHECKED) as texts_writer,
        pq.ParquetWriter(tokens_part, token_schema, **CHECKED) as tokens_writer,
    ):
        for texts, tokens in blocks:
            texts_writer.write_table(pa.Table.from_pandas(texts, text_schema, preserve_index=False))
            table = pa.Table.from_pandas(tokens, token_schema, preserve_index=False)
            tokens_writer.write_table(table, row_group_size=max(1, len(table)))


def read_documents(root: Path = TOKENIZED) -> pd.DataFrame:
    """Return `texts.parquet` without the texts themselves."""
    columns = [name for name, _ in TEXT_FIELDS if name != "text"]
    return read_table(texts_file(root), "tokenize", columns=columns)


def read_captured_texts(root: Path = TOKENIZED) -> dict[str, str]:
    """Return the captured texts by document."""
    table = read_table(texts_file(root), "tokenize", columns=["document", "text"], filters=[("captured", "==", True)])
    return dict(table.itertuples(index=False))


def read_captured_tokens(root: Path = TOKENIZED) -> pd.DataFrame:
    """Return the captured texts' rows of `tokens.parquet`, in the order of the stores' rows."""
    documents = read_documents(root)
    names = documents.loc[documents["captured"], "document"].tolist()
    return read_table(tokens_file(root), "tokenize", filters=[("document", "in", names)])


def token_blocks(
    root: Path = TOKENIZED, columns: Sequence[str] | None = None, blocks: Iterable[int] | None = None
) -> Iterator[pd.DataFrame]:
    """Yield the tokens of one block of texts after another, or of the chosen `blocks`."""
    with undamaged(tokens_file(root), "tokenize") as path:
        # The buffer reads page by page.
        options: dict[str, Any] = {"page_checksum_verification": True}
        with pq.ParquetFile(path, **options) as file:
            for number in range(file.num_row_groups) if blocks is None else blocks:
                yield file.read_row_group(number, columns=columns).to_pandas()
