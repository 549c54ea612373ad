"""Files of reviews, alone and in folders, are read as independent readers read them, or refused with the cause.

The readers here are the formats' definitions: RFC 4180 for csv, one line a record without quotes for tsv.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmix.core.errors import InputError, text_problem
from attnmix.core.settings import DatasetParameters
from attnmix.data.files import read_file
from attnmix.data.source import read_source

NAMES = ("text", "label", "note")
COLUMNS = {"text": "text", "label": "label"}
FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
MARKS = "\",\t\n\r;|\\'= \u00a0\u2028\ufeff\x85\x00"
NUMBERS = (
    "0",
    "01",
    "1",
    "-1",
    "1.0",
    "1e5",
    "NaN",
    "nan",
    "None",
    "null",
    "True",
    "1,000",
    "0x1F",
    "١٢",
    "9007199254740993",
)
EXAMPLES = settings(max_examples=500, deadline=None, derandomize=True, database=None)

letters = st.one_of(st.sampled_from(MARKS), st.characters(exclude_categories=["Cs"]))
fields = st.one_of(st.text(letters, max_size=12), st.sampled_from(NUMBERS), st.text('",\n\t', max_size=4))
records = st.lists(st.tuples(fields, fields, fields), min_size=1, max_size=8)
ways_to_write = st.randoms(use_true_random=False)


def csv_of(rows: Sequence[Sequence[str]], way: random.Random) -> str:
    """Write csv as RFC 4180 allows it: quotes where they are needed, and anywhere else by chance."""
    end = way.choice(["\n", "\r\n"])
    lines = []
    for row in rows:
        cells = []
        for field in row:
            quoted = any(mark in field for mark in '",\r\n') or way.random() < 0.3
            cells.append('"' + field.replace('"', '""') + '"' if quoted else field)
        lines.append(",".join(cells))
    return end.join(lines) + (end if way.random() < 0.7 else "")


def write(path: Path, rows: Sequence[tuple[str, ...]], way: random.Random) -> None:
    """Write records under `NAMES`, in one of the ways that their format allows."""
    if path.suffix == ".parquet":
        table = pa.table({name: [row[i] for row in rows] for i, name in enumerate(NAMES)})
        dictionary, compression = way.choice([True, False]), way.choice(["none", "snappy", "zstd"])
        pq.write_table(table, path, row_group_size=3, use_dictionary=dictionary, compression=compression)
        return
    if path.suffix == ".jsonl":
        objects = (dict(zip(NAMES, row, strict=True)) for row in rows)
        text = "\n".join(json.dumps(each, ensure_ascii=way.choice([True, False])) for each in objects)
    elif path.suffix == ".tsv":
        text = way.choice(["\n", "\r\n"]).join("\t".join(row) for row in (NAMES, *rows))
    else:
        text = csv_of([NAMES, *rows], way)
    path.write_bytes(text.encode(way.choice(["utf-8", "utf-8-sig"])))


def writable(rows: Sequence[tuple[str, ...]], suffix: str) -> list[tuple[str, ...]]:
    """Return the records as far as the format can hold them: a field of tsv has no tab and no line break."""
    if suffix != ".tsv":
        return list(rows)
    return [tuple(field.translate({ord(mark): " " for mark in "\t\r\n"}) for field in row) for row in rows]


@pytest.mark.parametrize("suffix", FORMATS)
@EXAMPLES
@given(rows=records, way=ways_to_write)
def test_a_file_gives_the_records_that_were_written(suffix: str, rows: Any, way: random.Random) -> None:
    rows = writable(rows, suffix)
    with TemporaryDirectory() as folder:
        path = Path(folder, f"reviews{suffix}")
        write(path, rows, way)
        frame = read_file(path)
    assert list(frame.columns) == list(NAMES)
    assert list(frame.itertuples(index=False, name=None)) == rows
    assert frame.index.tolist() == list(range(1, len(rows) + 1))


@pytest.mark.long  # `datasets` looks for the files two thousand times
@pytest.mark.parametrize("suffix", FORMATS)
@EXAMPLES
@given(rows=records, way=ways_to_write, parts=st.integers(1, 3))
def test_a_folder_gives_the_records_that_were_written(suffix: str, rows: Any, way: random.Random, parts: int) -> None:
    rows = writable([row for row in rows if text_problem(row[0]) is None and row[1].strip()], suffix)
    rows = [row for row in rows if row[1].strip()] or [("a text", "01", "")]
    parts = min(parts, len(rows))
    with TemporaryDirectory() as folder:
        for part in range(parts):
            path = Path(folder, f"train-{part:05}-of-{parts:05}{suffix}")
            write(path, rows[part * len(rows) // parts : (part + 1) * len(rows) // parts], way)
        tables, _ = read_source(DatasetParameters(name=folder), COLUMNS)
    assert list(tables) == ["train"]
    assert list(tables["train"].itertuples(index=False, name=None)) == [row[:2] for row in rows]


def rfc_records(text: str) -> list[list[str]] | None:
    """Return the records of a csv text, letter by letter, without empty lines; None where a quote is stray."""
    rows: list[list[str]] = []
    row: list[str] = []
    field, state = "", "start"
    for letter in [*text, "\n"]:
        if state == "quoted":
            field, state = (field, "closed") if letter == '"' else (field + letter, "quoted")
        elif letter == '"' and state == "closed":
            field, state = field + letter, "quoted"
        elif letter == '"' and state == "start":
            state = "quoted"
        elif letter == ",":
            row.append(field)
            field, state = "", "start"
        elif letter in "\r\n":
            if row or state != "start":
                rows.append([*row, field])
            row, field, state = [], "", "start"
        elif state == "closed":
            return None
        else:
            field, state = field + letter, "plain"
    return None if state == "quoted" else rows


def read_or_refused(content: str, suffix: str) -> list[list[str]] | str:
    """Return the records behind the header of a file with this content, or the error."""
    with TemporaryDirectory() as folder:
        path = Path(folder, f"a{suffix}")
        path.write_bytes(content.encode())
        try:
            return [list(row) for row in read_file(path).itertuples(index=False, name=None)]
        except InputError as error:
            return str(error)


@EXAMPLES
@given(body=st.text(st.sampled_from('ab",\n\r '), max_size=30))
def test_any_text_is_csv_of_equal_records_or_refused(body: str) -> None:
    result, expected = read_or_refused(f"text,label\n{body}", ".csv"), rfc_records(body)
    if expected is None or any(len(row) != 2 for row in expected) or not expected:
        assert isinstance(result, str)
    else:
        assert result == expected


@EXAMPLES
@given(body=st.text(st.sampled_from('ab"\t\n\r '), max_size=30))
def test_any_text_is_tsv_of_lines_with_the_headers_tabs_or_refused(body: str) -> None:
    result = read_or_refused(f"text\tlabel\n{body}", ".tsv")
    lines = [
        line for line in io.StringIO(body, newline=None).read().split("\n") if line
    ]  # line ends as Python knows them
    if not lines or any(line.count("\t") != 1 for line in lines):
        assert isinstance(result, str)
        assert not lines or 'tsv is read without quotes (")' in result
    else:
        assert result == [line.split("\t") for line in lines]


def stray_quotes(separator: str) -> str:
    """Return twenty records, of which two begin with a quote that nothing closes."""
    texts = [f"text {number}" for number in range(20)]
    texts[4], texts[7] = '"so warm that I stayed', '"never again, said my aunt'
    lines = [f"{text}{separator}{number % 2}" for number, text in enumerate(texts)]
    return "\n".join([f"text{separator}label", *lines]) + "\n"


def test_stray_quotes_lose_no_row_where_pandas_and_pyarrow_lose_three(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(stray_quotes("\t"))
    options = pa_csv.ParseOptions(delimiter="\t", newlines_in_values=True)
    assert len(pd.read_csv(path, sep="\t")) == 17
    assert pa_csv.read_csv(path, parse_options=options).num_rows == 17
    assert read_file(path)["text"].tolist()[4:8:3] == ['"so warm that I stayed', '"never again, said my aunt']
    assert len(read_file(path)) == 20
    path = tmp_path / "a.csv"
    path.write_text(stray_quotes(",").replace("never again, said", "never again said"))
    assert len(pd.read_csv(path)) == 17
    with pytest.raises(
        InputError, match=r'a\.csv: row 5 \(lines 6 to 9\): a field begins with a quote \("\) that does'
    ):
        read_file(path)


def glue(names: str, *rows: str) -> str:
    return "\n".join(["\t".join(names.split()), *("\t".join(row.split("|")) for row in rows)]) + "\n"


GLUE = {
    # As the files of GLUE and KorNLI are: quotes are letters of the text, in any number and anywhere.
    "MRPC": (
        glue(
            "Quality #1_ID #2_ID #1_String #2_String",
            '1|702876|702977|Amrozi accused his brother , whom he called " the witness " , of it .|He said " no " .',
            '0|2108705|2108831|"I am|Yucaipa bought " Dominick\'s',
        ),
        ["#1_String", "#2_String"],
        "Quality",
    ),
    "QNLI": (
        glue(
            "index question sentence label",
            '0|What "is|"As of that day , "x"|entailment',
            '1|Who?|"He" did|not_entailment',
        ),
        ["question", "sentence"],
        "label",
    ),
    "RTE": (
        glue("index sentence1 sentence2 label", '0|"No" said "she|Yes|not_entailment', '1|A "|"B|entailment'),
        ["sentence1", "sentence2"],
        "label",
    ),
    "STS-B": (
        glue(
            "index genre filename year old_index source1 source2 sentence1 sentence2 score",
            '0|main|MSR|2012|0001|none|none|A "plane|Taking off|5.000',
            '1|main|MSR|2012|0004|none|none|"A man|plays|3.800',
        ),
        ["sentence1", "sentence2"],
        "score",
    ),
}


@pytest.mark.parametrize("name", GLUE)
def test_tables_of_glue_are_read_as_their_lines(tmp_path: Path, name: str) -> None:
    content, texts, label = GLUE[name]
    (tmp_path / "train.tsv").write_text(content, encoding="utf-8")
    columns = {"text": texts[0], "text_pair": texts[1], "label": label}
    tables, _ = read_source(DatasetParameters(name=str(tmp_path)), columns)
    header, *lines = (line.split("\t") for line in content.splitlines())
    places = [header.index(each) for each in (*texts, label)]
    assert tables["train"].to_numpy().tolist() == [[line[place] for place in places] for line in lines]


def test_every_record_of_a_korean_tsv_with_open_quotes_is_read(tmp_path: Path) -> None:
    rows = [
        (f'"그는 {i}' if i % 89 == 0 else f'그녀는 "{i}" 말했다', f"가설 {i}", ("entailment", "neutral")[i % 2])
        for i in range(5010)
    ]
    lines = ["sentence1\tsentence2\tgold_label", *("\t".join(row) for row in rows)]
    (tmp_path / "xnli.test.ko.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert list(read_file(tmp_path / "xnli.test.ko.tsv").itertuples(index=False, name=None)) == rows


def test_doubled_quotes_in_every_quoted_field_of_a_tsv_are_kept_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frame = pd.DataFrame({"text": ["plain", 'he said "no"', '"so" it is'], "label": [0, 1, 0]})
    frame.to_csv(tmp_path / "a.tsv", sep="\t", index=False)
    assert read_file(tmp_path / "a.tsv")["text"].tolist() == ["plain", '"he said ""no"""', '"""so"" it is"']
    assert 'the quotes of row 2 and others are doubled ("") as in csv; tsv has no quotes' in caplog.text
    caplog.clear()
    (tmp_path / "a.tsv").write_text('text\tlabel\n"he said ""no"""\t0\na "b"\t1\n')  # one quote is that of no csv
    read_file(tmp_path / "a.tsv")
    assert caplog.text == ""


def test_a_long_field_is_read_and_the_limit_of_other_readers_stays(tmp_path: Path) -> None:
    limit, text = csv.field_size_limit(), "many words " * 50_000
    (tmp_path / "a.csv").write_text(f"text,label\n{text},1\n")
    assert read_file(tmp_path / "a.csv")["text"].tolist() == [text]
    assert csv.field_size_limit() == limit
