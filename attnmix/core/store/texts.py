"""Files of labelled texts, written by the stage `download`, and of truncated, tokenized texts, written by `tokenize`.

Labelled texts are in one parquet file per split, with the columns text, label (from 0) and label_name; `text_pair` is
the second text of a pair.

`features/tokenize/captured/` contains the texts with stored vectors, in the row order of the stores.
`features/tokenize/reviews/` contains the test texts for the statistics, followed by the other test texts that are used
for token removal. Both folders contain two tables, with `ROW_GROUP_TEXTS` texts per row group.

`texts.parquet` has one row per text, with the columns

    document            `test/3` for a row of the test split, `text/0` for a free text (a text of the user)
    text                the texts of a pair are on separate lines
    label, label_name   label is -1 for free texts
    predicted_label     by the fine-tuned classifier; -1 for free texts
    measured            True for a text used in the statistics; False in `captured`
    removed             True for a text used for token removal; False in `captured`
    tokens, whole_tokens, unknown_tokens   numbers of tokens; `whole_tokens` is the number before truncation

`tokens.parquet` has one row per token, with the columns

    document, position, token_id, token, token_class
    label               readable form of the token
    start, end          character offsets; -1 for special tokens
    word                index of the word; -1 for special tokens
    segment             only for pairs: 0 in the first text, 1 in the second, -1 for special tokens
    decoder_token       only for encoder-decoder models
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from attnmix.core.store.files import PARQUET_OPTIONS, atomic_path, read_table, reading

BATCH_TEXTS = 1000
BUFFER_BYTES = 2**20
ROW_GROUP_TEXTS = 256
DECODER_TOKEN = "decoder_token"
SEGMENT = "segment"
TEXT_COLUMNS = ("text", "text_pair")
PAIR_SEPARATOR = "\n"  # joins a pair that is displayed as one text
Text = str | tuple[str, str]
"""A text or a pair of texts."""

TEXT_FIELDS = [
    ("document", pa.string()),
    ("text", pa.string()),
    ("label", pa.int64()),
    ("label_name", pa.string()),
    ("predicted_label", pa.int64()),
    ("measured", pa.bool_()),
    ("removed", pa.bool_()),
    ("tokens", pa.int32()),
    ("whole_tokens", pa.int32()),
    ("unknown_tokens", pa.int32()),
]
TOKEN_FIELDS = [
    ("document", pa.string()),
    ("position", pa.int32()),
    ("token_id", pa.int32()),
    ("token", pa.string()),
    ("label", pa.string()),
    ("start", pa.int32()),
    ("end", pa.int32()),
    ("word", pa.int32()),
    ("token_class", pa.string()),
]
MORE_TOKEN_FIELDS = [(SEGMENT, pa.int8()), (DECODER_TOKEN, pa.string())]


class TokenizedFiles:
    """The tables of texts and tokens in a folder written by `tokenize`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.texts_file = folder / "texts.parquet"
        self.tokens_file = folder / "tokens.parquet"

    @cached_property
    def documents(self) -> pd.DataFrame:
        """A table with one row per text, without the column `text`."""
        columns = [name for name, _ in TEXT_FIELDS if name != "text"]
        return read_table(self.texts_file, "tokenize", columns=columns)

    @cached_property
    def texts(self) -> dict[str, str]:
        """The texts by document name."""
        table = read_table(self.texts_file, "tokenize", columns=["document", "text"])
        return dict(table.itertuples(index=False))

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """A table with one row per token."""
        return read_table(self.tokens_file, "tokenize")

    @cached_property
    def pairs(self) -> bool:
        """True if the texts are pairs."""
        with reading(self.tokens_file, "tokenize") as path:
            return SEGMENT in pq.read_schema(path).names

    def token_row_groups(
        self, columns: Sequence[str] | None = None, numbers: Iterable[int] | None = None
    ) -> Iterator[pd.DataFrame]:
        """Yield the tokens of each row group with an index in `numbers` (default: all row groups)."""
        with (
            reading(self.tokens_file, "tokenize") as path,
            pq.ParquetFile(path, page_checksum_verification=True) as file,
        ):
            if numbers is None:
                numbers = range(file.num_row_groups)
            for number in numbers:
                yield file.read_row_group(number, columns=columns).to_pandas()


def split_file(split: str, folder: Path) -> Path:
    """Return the path of the labelled texts of `train`, `validation` or `test`."""
    return folder / f"{split}.parquet"


def read_split(split: str, folder: Path, columns: list[str] | None = None) -> pd.DataFrame:
    """Return the labelled texts of a split, with all columns or only `columns`."""
    return read_table(split_file(split, folder), "download", columns=columns)


def texts_of(table: pd.DataFrame) -> list[Text]:
    """Return the texts or pairs of texts in the table of a split."""
    first_column, second_column = TEXT_COLUMNS
    if second_column not in table:
        return list(table[first_column])
    pairs = table[[first_column, second_column]]
    return list(pairs.itertuples(index=False, name=None))


def whole_text(text: Text) -> str:
    """Return a text unchanged, or a pair joined into one text."""
    if isinstance(text, str):
        return text
    return PAIR_SEPARATOR.join(text)


def whole_texts(table: pd.DataFrame) -> pd.Series:
    """Return the text of each row in the table of a split, with pairs joined into one text."""
    texts = [whole_text(text) for text in texts_of(table)]
    return pd.Series(texts, index=table.index, dtype="str")


def read_texts(split: str, folder: Path) -> Iterator[list[Text]]:
    """Yield the texts or pairs of a split in batches, to limit memory usage."""
    with reading(split_file(split, folder), "download") as path:
        # Pandas may write all rows as one row group; with a buffer, only single pages are read into memory.
        file = pq.ParquetFile(path, buffer_size=BUFFER_BYTES, page_checksum_verification=True)
        columns = [name for name in TEXT_COLUMNS if name in file.schema_arrow.names]
        for batch in file.iter_batches(BATCH_TEXTS, columns=columns):
            yield texts_of(batch.to_pandas())


def write_tokenized(folder: Path, row_groups: Iterable[tuple[pd.DataFrame, pd.DataFrame]]) -> None:
    """Write `texts.parquet` and `tokens.parquet` into `folder`.

    Each item of `row_groups` contains the rows of both tables for some texts; one item at a time is in memory. Columns
    in `MORE_TOKEN_FIELDS` are written if they are present in the first item.
    """
    remaining = iter(row_groups)
    first = next(remaining)
    _, first_tokens = first
    more_fields = [(name, kind) for name, kind in MORE_TOKEN_FIELDS if name in first_tokens]
    text_schema = pa.schema(TEXT_FIELDS)
    token_schema = pa.schema([*TOKEN_FIELDS, *more_fields])
    with (
        atomic_path(folder / "texts.parquet") as texts_part,
        atomic_path(folder / "tokens.parquet") as tokens_part,
        pq.ParquetWriter(texts_part, text_schema, **PARQUET_OPTIONS) as texts_writer,
        pq.ParquetWriter(tokens_part, token_schema, **PARQUET_OPTIONS) as tokens_writer,
    ):
        for texts, tokens in itertools.chain([first], remaining):
            text_table = pa.Table.from_pandas(texts, text_schema, preserve_index=False)
            texts_writer.write_table(text_table)
            token_table = pa.Table.from_pandas(tokens, token_schema, preserve_index=False)
            row_group_size = max(1, len(token_table))  # all tokens of an item are in one row group
            tokens_writer.write_table(token_table, row_group_size=row_group_size)
