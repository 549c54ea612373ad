"""The reviews of `download`, and the texts that all later stages work on, as `tokenize` truncates and tokenises them.

Reviews are one parquet file for each split, with the columns text, label (from 0 on) and label_name; `text_pair` is the
second of a pair of texts.

`features/tokenize/captured/` holds the texts whose vectors are stored, in the order of the stores' rows;
`features/tokenize/reviews/` the test reviews in the statistics, then those in which only tokens are removed. In each,
`texts.parquet` has a row for each text: document (`test/3` is a row of the test reviews, `text/0` a free text), text
(both of a pair, each on a line), label (-1 of a free text), label_name, predicted_label (of the fine-tuned classifier,
-1 of a free text), measured (it is in the statistics) and removed (tokens are removed from it), both false in
`captured`, tokens, whole_tokens (before it was truncated), unknown_tokens.
`tokens.parquet` has a row for each token: document, position, token_id, token, label (as a person reads it), start and
end (character offsets, -1 of special tokens), word (its number, -1 likewise), token_class, and `segment` where there
are pairs (0 in the first text, 1 in the second, -1 of special tokens), `decoder_token` where there is a decoder next to
an encoder. Both files hold `ROW_GROUP_TEXTS` texts in a row group.
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
ROW_GROUP_TEXTS = 256  # texts in a row group
DECODER_TOKEN = "decoder_token"
SEGMENT = "segment"
TEXT_COLUMNS = ("text", "text_pair")
PAIR_SEPARATOR = "\n"  # of a pair that is shown as one text
Text = str | tuple[str, str]
"""A text, or a pair of them."""

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
    """The tables of some texts and of their tokens, as `tokenize` writes them into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.texts_file = folder / "texts.parquet"
        self.tokens_file = folder / "tokens.parquet"

    @cached_property
    def documents(self) -> pd.DataFrame:
        """A row for each text, without the text."""
        columns = [name for name, _ in TEXT_FIELDS if name != "text"]
        return read_table(self.texts_file, "tokenize", columns=columns)

    @cached_property
    def texts(self) -> dict[str, str]:
        """The texts by document."""
        table = read_table(self.texts_file, "tokenize", columns=["document", "text"])
        return dict(table.itertuples(index=False))

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """A row for each token."""
        return read_table(self.tokens_file, "tokenize")

    @cached_property
    def pairs(self) -> bool:
        """True where the texts are pairs."""
        with reading(self.tokens_file, "tokenize") as path:
            return SEGMENT in pq.read_schema(path).names

    def token_row_groups(
        self, columns: Sequence[str] | None = None, numbers: Iterable[int] | None = None
    ) -> Iterator[pd.DataFrame]:
        """Yield the tokens of one row group of texts after another, or of those with these `numbers`."""
        with (
            reading(self.tokens_file, "tokenize") as path,
            pq.ParquetFile(path, page_checksum_verification=True) as file,
        ):
            if numbers is None:
                numbers = range(file.num_row_groups)
            for number in numbers:
                yield file.read_row_group(number, columns=columns).to_pandas()


def split_file(split: str, folder: Path) -> Path:
    """Return the path of the reviews of `train`, `validation` or `test`."""
    return folder / f"{split}.parquet"


def read_split(split: str, folder: Path, columns: list[str] | None = None) -> pd.DataFrame:
    """Return `text`, `label` (from 0 on) and `label_name`, or some of these `columns`."""
    return read_table(split_file(split, folder), "download", columns=columns)


def texts_of(table: pd.DataFrame) -> list[Text]:
    """Return the texts of a table of reviews, or their pairs."""
    if TEXT_COLUMNS[1] not in table:
        return list(table[TEXT_COLUMNS[0]])
    return list(table[list(TEXT_COLUMNS)].itertuples(index=False, name=None))


def whole_text(text: Text) -> str:
    """Return a text, or a pair as one text."""
    return text if isinstance(text, str) else PAIR_SEPARATOR.join(text)


def whole_texts(table: pd.DataFrame) -> pd.Series:
    """Return the text of each row of a table of reviews, both of a pair as one."""
    return pd.Series([whole_text(text) for text in texts_of(table)], index=table.index, dtype="str")


def read_texts(split: str, folder: Path) -> Iterator[list[Text]]:
    """Yield the texts of a split, or their pairs, in batches, so that memory does not grow with their number."""
    with reading(split_file(split, folder), "download") as path:
        # With a buffer it reads page by page; pandas writes all rows as one group.
        file = pq.ParquetFile(path, buffer_size=BUFFER_BYTES, page_checksum_verification=True)
        columns = [name for name in TEXT_COLUMNS if name in file.schema_arrow.names]
        for batch in file.iter_batches(BATCH_TEXTS, columns=columns):
            yield texts_of(batch.to_pandas())


def write_tokenized(folder: Path, row_groups: Iterable[tuple[pd.DataFrame, pd.DataFrame]]) -> None:
    """Write both tables into `folder`, given as row groups of texts with their tokens, one of which is in memory.

    Tokens have the columns of `MORE_TOKEN_FIELDS` that those of the first row group have.
    """
    row_groups = iter(row_groups)
    first = next(row_groups)
    more = [field for field in MORE_TOKEN_FIELDS if field[0] in first[1]]
    text_schema, token_schema = pa.schema(TEXT_FIELDS), pa.schema([*TOKEN_FIELDS, *more])
    with (
        atomic_path(folder / "texts.parquet") as texts_part,
        atomic_path(folder / "tokens.parquet") as tokens_part,
        pq.ParquetWriter(texts_part, text_schema, **PARQUET_OPTIONS) as texts_writer,
        pq.ParquetWriter(tokens_part, token_schema, **PARQUET_OPTIONS) as tokens_writer,
    ):
        for texts, tokens in itertools.chain([first], row_groups):
            texts_writer.write_table(pa.Table.from_pandas(texts, text_schema, preserve_index=False))
            table = pa.Table.from_pandas(tokens, token_schema, preserve_index=False)
            tokens_writer.write_table(table, row_group_size=max(1, len(table)))
