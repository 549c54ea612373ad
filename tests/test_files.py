"""Files and folders of reviews are read according to their format, or rejected with an error that states the cause.

Reference definitions: RFC 4180 for csv, and one unquoted record per line for tsv.
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
from conftest import toy_reviews
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmix.core.errors import InputError, text_problem
from attnmix.core.settings import DatasetParameters
from attnmix.data.classes import with_classes
from attnmix.data.files import read_file
from attnmix.data.source import read_source, read_splits

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
EXAMPLES = settings(deadline=None, derandomize=True, database=None)  # `conftest` sets the number of examples
# Files in a folder are read like single files. A folder only adds the choice and order of files.
FOLDER_EXAMPLES = settings(EXAMPLES, max_examples=25)

letters = st.one_of(st.sampled_from(MARKS), st.characters(exclude_categories=["Cs"]))
fields = st.one_of(st.text(letters, max_size=12), st.sampled_from(NUMBERS), st.text('",\n\t', max_size=4))
records = st.lists(st.tuples(fields, fields, fields), min_size=1, max_size=8)
generators = st.randoms(use_true_random=False)


def csv_of(rows: Sequence[Sequence[str]], generator: random.Random) -> str:
    """Return a csv text according to RFC 4180, with quotes around fields that need quotes and around random fields."""
    end = generator.choice(["\n", "\r\n"])
    lines = []
    for row in rows:
        cells = []
        for field in row:
            quoted = any(mark in field for mark in '",\r\n') or generator.random() < 0.3
            cells.append('"' + field.replace('"', '""') + '"' if quoted else field)
        lines.append(",".join(cells))
    return end.join(lines) + (end if generator.random() < 0.7 else "")


def write(path: Path, rows: Sequence[tuple[str, ...]], generator: random.Random) -> None:
    """Write records with the columns `NAMES` in a random variant of their format."""
    if path.suffix == ".parquet":
        table = pa.table({name: [row[i] for row in rows] for i, name in enumerate(NAMES)})
        dictionary = generator.choice([True, False])
        compression = generator.choice(["none", "snappy", "zstd"])
        pq.write_table(table, path, row_group_size=3, use_dictionary=dictionary, compression=compression)
        return
    if path.suffix == ".jsonl":
        objects = (dict(zip(NAMES, row, strict=True)) for row in rows)
        text = "\n".join(json.dumps(each, ensure_ascii=generator.choice([True, False])) for each in objects)
    elif path.suffix == ".tsv":
        text = generator.choice(["\n", "\r\n"]).join("\t".join(row) for row in (NAMES, *rows))
    else:
        text = csv_of([NAMES, *rows], generator)
    path.write_bytes(text.encode(generator.choice(["utf-8", "utf-8-sig"])))


def writable(rows: Sequence[tuple[str, ...]], suffix: str) -> list[tuple[str, ...]]:
    """Return the records as the format can represent them: in tsv fields, tabs and line breaks become spaces."""
    if suffix != ".tsv":
        return list(rows)
    return [tuple(field.translate({ord(mark): " " for mark in "\t\r\n"}) for field in row) for row in rows]


@pytest.mark.parametrize("suffix", FORMATS)
@EXAMPLES
@given(rows=records, generator=generators)
def test_file_round_trip(suffix: str, rows: Any, generator: random.Random) -> None:
    rows = writable(rows, suffix)
    with TemporaryDirectory() as folder:
        path = Path(folder, f"reviews{suffix}")
        write(path, rows, generator)
        frame = read_file(path)
    assert list(frame.columns) == list(NAMES)
    assert list(frame.itertuples(index=False, name=None)) == rows
    assert frame.index.tolist() == list(range(1, len(rows) + 1))


@pytest.mark.long  # `datasets` lists the files a hundred times
@pytest.mark.parametrize("suffix", FORMATS)
@FOLDER_EXAMPLES
@given(rows=records, generator=generators, parts=st.integers(1, 3))
def test_folder_round_trip(suffix: str, rows: Any, generator: random.Random, parts: int) -> None:
    rows = writable([row for row in rows if text_problem(row[0]) is None and row[1].strip()], suffix)
    rows = [row for row in rows if row[1].strip()] or [("a text", "01", "")]
    parts = min(parts, len(rows))
    with TemporaryDirectory() as folder:
        for part in range(parts):
            path = Path(folder, f"train-{part:05}-of-{parts:05}{suffix}")
            write(path, rows[part * len(rows) // parts : (part + 1) * len(rows) // parts], generator)
        tables, _ = read_source(DatasetParameters(name=folder), COLUMNS)
    assert list(tables) == ["train"]
    assert list(tables["train"].itertuples(index=False, name=None)) == [row[:2] for row in rows]


def rfc_records(text: str) -> list[list[str]] | None:
    """Parse a csv text character by character and return its records without empty lines.

    Return None if the text has a stray quote.

    The state of a field is `start` (no character yet), `plain`, `quoted`, or `closed` after a second quote. The second
    quote ends the field unless a third quote follows.
    """
    rows: list[list[str]] = []
    row: list[str] = []
    field, state = "", "start"
    for letter in [*text, "\n"]:
        if state == "quoted":
            if letter == '"':
                state = "closed"
            else:
                field += letter
        elif letter == '"' and state == "closed":
            field += letter
            state = "quoted"
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
            field += letter
            state = "plain"
    return None if state == "quoted" else rows


def read_or_refused(content: str, suffix: str) -> list[list[str]] | str:
    """Return the records below the header of a file with this content, or the error."""
    with TemporaryDirectory() as folder:
        path = Path(folder, f"a{suffix}")
        path.write_bytes(content.encode())
        try:
            return [list(row) for row in read_file(path).itertuples(index=False, name=None)]
        except InputError as error:
            return str(error)


@EXAMPLES
@given(body=st.text(st.sampled_from('ab",\n\r '), max_size=30))
def test_any_csv_text_is_parsed_or_refused(body: str) -> None:
    result, expected = read_or_refused(f"text,label\n{body}", ".csv"), rfc_records(body)
    if expected is None or any(len(row) != 2 for row in expected) or not expected:
        assert isinstance(result, str)
    else:
        assert result == expected


@EXAMPLES
@given(body=st.text(st.sampled_from('ab"\t\n\r '), max_size=30))
def test_any_tsv_text_is_parsed_or_refused(body: str) -> None:
    result = read_or_refused(f"text\tlabel\n{body}", ".tsv")
    lines = [line for line in io.StringIO(body, newline=None).read().split("\n") if line]  # universal newlines
    if not lines or any(line.count("\t") != 1 for line in lines):
        assert isinstance(result, str)
        assert not lines or 'tsv files do not use quotes (")' in result
    else:
        assert result == [line.split("\t") for line in lines]


def stray_quotes(separator: str) -> str:
    """Return twenty records, two with an unclosed opening quote."""
    texts = [f"text {number}" for number in range(20)]
    texts[4], texts[7] = '"so warm that I stayed', '"never again, said my aunt'
    lines = [f"{text}{separator}{number % 2}" for number, text in enumerate(texts)]
    return "\n".join([f"text{separator}label", *lines]) + "\n"


def test_stray_quotes_lose_no_row(tmp_path: Path) -> None:
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
        InputError, match=r'a\.csv: row 5 \(lines 6 to 9\): a field begins with a quote \("\) but is not'
    ):
        read_file(path)


def glue(names: str, *rows: str) -> str:
    """Return a tab-separated table; in the arguments, spaces separate names, and vertical bars the cells of a row."""
    return "\n".join(["\t".join(names.split()), *("\t".join(row.split("|")) for row in rows)]) + "\n"


GLUE = {
    # Quotes in the files of GLUE and KorNLI are ordinary characters, in any number and position.
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
def test_glue_tables_are_read_by_line(tmp_path: Path, name: str) -> None:
    content, texts, label = GLUE[name]
    (tmp_path / "train.tsv").write_text(content, encoding="utf-8")
    columns = {"text": texts[0], "text_pair": texts[1], "label": label}
    tables, _ = read_source(DatasetParameters(name=str(tmp_path)), columns)
    header, *lines = (line.split("\t") for line in content.splitlines())
    indices = [header.index(each) for each in (*texts, label)]
    assert tables["train"].to_numpy().tolist() == [[line[index] for index in indices] for line in lines]


def test_korean_tsv_with_open_quotes_is_complete(tmp_path: Path) -> None:
    rows = [
        (f'"그는 {i}' if i % 89 == 0 else f'그녀는 "{i}" 말했다', f"가설 {i}", ("entailment", "neutral")[i % 2])
        for i in range(5010)
    ]
    lines = ["sentence1\tsentence2\tgold_label", *("\t".join(row) for row in rows)]
    (tmp_path / "xnli.test.ko.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert list(read_file(tmp_path / "xnli.test.ko.tsv").itertuples(index=False, name=None)) == rows


def test_doubled_quotes_in_tsv_are_kept_with_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frame = pd.DataFrame({"text": ["plain", 'he said "no"', '"so" it is'], "label": [0, 1, 0]})
    frame.to_csv(tmp_path / "a.tsv", sep="\t", index=False)
    assert read_file(tmp_path / "a.tsv")["text"].tolist() == ["plain", '"he said ""no"""', '"""so"" it is"']
    assert 'quotes are doubled ("") as in csv, first in row 2; in tsv files, quotes are part of the text' in caplog.text
    caplog.clear()
    (tmp_path / "a.tsv").write_text('text\tlabel\n"he said ""no"""\t0\na "b"\t1\n')  # only one field looks like csv
    read_file(tmp_path / "a.tsv")
    assert caplog.text == ""


def test_long_field_is_read_without_changing_csv_limit(tmp_path: Path) -> None:
    limit, text = csv.field_size_limit(), "many words " * 50_000
    (tmp_path / "a.csv").write_text(f"text,label\n{text},1\n")
    assert read_file(tmp_path / "a.csv")["text"].tolist() == [text]
    assert csv.field_size_limit() == limit


def reviews(labels: Sequence[Any] = ("good", "bad"), number: int = 60) -> pd.DataFrame:
    return toy_reviews(number, 0)[["text"]].assign(label=[labels[i % len(labels)] for i in range(number)])


def read(name: Path | str, **changes: Any) -> pd.DataFrame:
    """Return the rows of all splits of a dataset."""
    splits, _ = read_splits(DatasetParameters(name=str(name), **changes), 1)
    return pd.concat(splits.values())


def class_names(frame: pd.DataFrame) -> list[str]:
    return sorted(frame["label_name"].unique())


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
FOREIGN: list[tuple[str, bytes, str]] = [
    ("a.csv", reviews().to_csv(sep=";").encode(), r"separated by semicolons \(;\); save it with commas"),
    ("a.csv", reviews().to_csv(sep="\t").encode(), r"separated by tabs; save it with commas"),
    ("a.tsv", reviews().to_csv().encode(), r"separated by commas \(,\); save it with tabs"),
    (
        "a.csv",
        reviews().to_csv(header=False, index=False).encode(),
        r"ve\.\.\.', 'good'; the first line must be a head",
    ),
    ("a.tsv", b'"text"\t"label"\n"a"\t"x"\n', r"its names are in quotes \(\"\), which tsv files do not use"),
    ("a.csv", b"text,label\na,0\nb,1\nc\n", r"a\.csv: row 3 \(line 4\) has 1 of 2 fields"),
    ("a.csv", b'text,label\n"a\nb",0\n\nb,1,2\n', r"a\.csv: row 2 \(line 5\) has 3 of 2 fields; .* commas \(,\) in"),
    (
        "a.tsv",
        b'text\tlabel\n"a\tb"\t0\n',
        r"a\.tsv: row 1 \(line 2\) has 3 of 2 fields; tsv files do not use quotes \(\"",
    ),
    ("a.csv", b'text,label\n"a,0\n', r'a\.csv: row 1 \(line 2\): a field begins with a quote \("\) but is not closed'),
    *((f"a{suffix}", LFS_POINTER, rf"a\{suffix}: it is a pointer of Git LFS .* `git lfs pull`") for suffix in FORMATS),
    ("a.csv", b"<!DOCTYPE html>\n<html>", r"a\.csv: it is a web page; download the file itself"),
    ("a.csv", b"PK\x03\x04\x14\x00", r"a\.csv: it is a zip archive or an Excel workbook"),
    ("a.jsonl", b'[["text", "a"]]\n', r"a\.jsonl: line 1 is not a JSON object; write one object per line"),
    *(
        (name, "text,label\né,0\n".encode("utf-16"), r"encoded in UTF-16; save it as UTF-8")
        for name in ("a.csv", "a.jsonl")
    ),
    ("a.tsv", "text\tlabel\na\t0\n".encode("utf-16-le"), r"encoded in UTF-16 .*; save it as UTF-8"),
    (
        "a.csv",
        "text,label\na,0\né,1\n".encode("latin-1"),
        r"a\.csv: line 3 is not UTF-8 \(b'\\xe9'\); convert the file to UTF",
    ),
]


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize(("name", "content", "expected"), FOREIGN)
def test_unreadable_file_is_one_error_with_cause(
    tmp_path: Path, name: str, content: bytes, expected: str, in_folder: bool
) -> None:
    path = tmp_path / (f"train{Path(name).suffix}" if in_folder else name)
    path.write_bytes(content)
    with pytest.raises(InputError, match=expected.replace(r"a\.", r"\w+\.")) as raised:
        read(tmp_path if in_folder else path)
    assert path.name in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


def test_unused_columns_may_be_missing(tmp_path: Path) -> None:
    reviews().to_csv(tmp_path / "train.csv", index=False)
    reviews().assign(film="a").to_csv(tmp_path / "test.csv")
    assert len(read(tmp_path)) == 120
    reviews().rename(columns={"label": "sentiment"}).to_csv(tmp_path / "test.csv")
    with pytest.raises(
        InputError, match=r"label_column: \S+/test\.csv has no column 'label'; it has '', 'text', 'sent"
    ):
        read(tmp_path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["01", "1", "2"], ["01", "1", "2"]),
        (["01", "02", "x"], ["01", "02", "x"]),
        (["01", "02"], ["01", "02"]),
        (["1.0", "1"], ["1", "1.0"]),
        (["1", "10", "9"], ["1", "10", "9"]),
        (["1.0", "0.0"], ["0", "1"]),  # pandas writes integers with missing values in this form
        (["9007199254740993", "9007199254740992"], ["9007199254740992", "9007199254740993"]),
        (["NaN", "1e3", "None"], ["1e3", "NaN", "None"]),
        (["-1", "+1"], ["+1", "-1"]),
        (["\N{ARABIC-INDIC DIGIT ONE}", "1"], ["1", "\N{ARABIC-INDIC DIGIT ONE}"]),
    ],
)
def test_class_names_are_unchanged(
    tmp_path: Path, suffix: str, in_folder: bool, labels: list[str], names: list[str]
) -> None:
    path = tmp_path / f"train{suffix}"
    frame = reviews(labels)
    if suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False, sep="\t" if suffix == ".tsv" else ",")
    rows = read(tmp_path if in_folder else path)
    assert class_names(rows) == names
    given = dict(zip(frame["text"], frame["label"], strict=True))
    if labels == ["1.0", "0.0"]:
        given = {text: label.removesuffix(".0") for text, label in given.items()}
    assert [given[text] for text in rows["text"]] == rows["label_name"].tolist()


def test_class_type_is_inferred_from_all_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels = ["01", "x"] * 5000 + ["01", "02"] * 500
    frame = pd.DataFrame({"text": [f"text {number}" for number in range(len(labels))], "label": labels})
    frame.to_csv(tmp_path / "train.csv", index=False)
    assert class_names(read(tmp_path)) == ["01", "02", "x"]
    read_splits(DatasetParameters(name=str(tmp_path)), 1)
    assert caplog.text == ""
    frame["label"] = frame["label"].replace("02", "1")
    frame.to_csv(tmp_path / "train.csv", index=False)
    assert class_names(read(tmp_path)) == ["01", "1", "x"]
    assert "classes that differ only in spelling: '01', '1'" in caplog.text


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        *(
            (name, False)
            for name in (
                "=HYPERLINK(1)",
                "=1",
                "@SUM(A1)",
                "-2+3+cmd|' /C calc'!A0",
                "+x",
                "-ve",
                "\N{FULLWIDTH EQUALS SIGN}1",
            )
        ),
        *((name, False) for name in ("a\x1b[31mred", "a\nb", "a\tb", "a\x00", "a\u202eb", "a\u2028b", "a\x9b31m")),
        *((name, True) for name in ("-1", "+1", "-", "++", "1-2", "a=b", "very-good", "می‌خواهم", "👩‍🔬", ":-)")),
    ],
)
def test_class_names_must_be_printable(tmp_path: Path, name: str, allowed: bool) -> None:
    frame = reviews(["plain", name])
    frame.to_json(tmp_path / "train.jsonl", orient="records", lines=True)
    if allowed:
        assert class_names(read(tmp_path / "train.jsonl")) == sorted(["plain", name])
        return
    with pytest.raises(
        InputError, match=r"a spreadsheet would execute as a formula|control characters in its name"
    ) as raised:
        read(tmp_path / "train.jsonl")
    assert str(raised.value).isprintable()


def test_unused_files_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("reviews_2023.csv", "reviews_2024.csv", "reviews_train.csv", "LICENSE", "README.md"):
        reviews().to_csv(tmp_path / name, index=False)
    (tmp_path / "README.md").write_text("Reviews.\n")
    assert len(read(tmp_path)) == 60
    assert "2 of 3 files are not used: reviews_2023.csv, reviews_2024.csv" in caplog.text
    caplog.clear()
    (tmp_path / "reviews_train.csv").rename(tmp_path / "reviews_2025.csv")
    assert len(read(tmp_path)) == 180
    assert "not used" not in caplog.text


@pytest.mark.parametrize(
    "pattern", ["train-{:05}-of-00003.csv", "data/train-{:05}-of-00003-0a1b2c3d.csv", "train_{}-of-3.csv"]
)
@pytest.mark.parametrize("first", [0, 1])
def test_missing_part_is_an_error(tmp_path: Path, pattern: str, first: int) -> None:
    paths = [tmp_path / pattern.format(number) for number in range(first, first + 3)]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        reviews().to_csv(path, index=False)
    assert len(read(tmp_path)) == 180
    paths[1].unlink()
    with pytest.raises(InputError, match=rf"1 of the 3 parts train\S+ are missing \({first + 1}\); download them"):
        read(tmp_path)


def test_parquet_class_names_and_separator_settings_apply(tmp_path: Path) -> None:
    table = pa.Table.from_pandas(reviews([1, 0]), preserve_index=False)
    feature = {"names": ["worse", "better"], "_type": "ClassLabel"}
    features = {"label": feature, "text": {"dtype": "string", "_type": "Value"}}
    pq.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}),
        tmp_path / "a.parquet",
    )
    assert class_names(read(tmp_path / "a.parquet")) == ["better", "worse"]
    folder = tmp_path / "folder"
    folder.mkdir()
    reviews(["01", "1"]).to_csv(folder / "a.csv", sep=";", index=False)
    head = "configs:\n- config_name: default\n  sep: ';'\n  data_files: [{split: train, path: a.csv}]\n"
    (folder / "README.md").write_text(f"---\n{head}---\n")
    assert class_names(read(folder)) == ["01", "1"]


def test_cause_of_loading_error_is_shown(tmp_path: Path) -> None:
    reviews().to_csv(tmp_path / "train.csv", index=False)
    (tmp_path / "README.md").write_text("---\nconfigs: {config_name: all}\n---\n")
    with pytest.raises(InputError, match=r"cannot be loaded \(Expected configs to be a list, but got .*config_name"):
        read(tmp_path)


def test_only_folders_have_configurations(tmp_path: Path) -> None:
    for name in ("mine.csv", "a:b.csv"):
        reviews().to_csv(tmp_path / name, index=False)
    (tmp_path / "a:c").mkdir()
    reviews().to_csv(tmp_path / "a:c/train.csv", index=False)
    assert len(read(tmp_path / "a:b.csv")) == len(read(tmp_path / "a:c")) == 60
    with pytest.raises(InputError, match=r"mine\.csv is a file, which has no configuration large"):
        read(f"{tmp_path}/mine.csv:large")


@pytest.mark.parametrize("name", [".", "..", "../.."])
def test_folder_around_working_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a/b")
    with pytest.raises(InputError, match="contains the working folder, whose files are not texts"):
        read(name)


def test_oversized_files_are_refused_before_reading(tmp_path: Path) -> None:
    with (tmp_path / "train.csv").open("wb") as file:
        file.truncate(20_000_000_000)  # sparse, without disk blocks
    for name in (tmp_path, tmp_path / "train.csv"):
        with pytest.raises(InputError, match=r"the data files have 20 GB, of which \S+train\.csv has .*17\.2 GB are"):
            read(name)


BOMBS = {
    "one text in many rows": {
        "text": pa.array(["so warm and good " * 6_000] * 700).dictionary_encode(),
        "label": [0, 1] * 350,
    },
    "one long text": {"text": ["a" * 20_000_000], "label": [0]},
}


@pytest.mark.parametrize("name", BOMBS)
def test_expanding_parquet_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("attnmix.data.opening.FREE_BYTES", 2**24)
    pq.write_table(
        pa.table(BOMBS[name]), tmp_path / "a.parquet", compression="zstd", use_dictionary=name != "one long text"
    )
    assert (tmp_path / "a.parquet").stat().st_size < 1e5
    before, pool = pa.total_allocated_bytes(), pa.default_memory_pool()
    with pytest.raises(InputError, match=r"its selected columns exceed the limit of 0\.0168 GB for a file"):
        read(tmp_path / "a.parquet")
    assert pool.bytes_allocated() - before < 1e7


def write_labels(path: Path, labels: Sequence[Any]) -> None:
    """Write texts and labels in the format given by the suffix; `.dictionary.parquet` stores labels as categories."""
    frame = pd.DataFrame({"text": [f"{path.name} {row}" for row in range(len(labels))], "label": labels}, dtype=object)
    if path.suffix == ".parquet":
        column = pd.Series(labels)
        is_dictionary = path.name.endswith(".dictionary.parquet")
        frame.assign(label=column.astype("category") if is_dictionary else column).to_parquet(path, index=False)
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in frame.to_dict("records")))
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")


def write_class_names(folder: Path, names: Sequence[str]) -> None:
    declared = {str(number): name for number, name in enumerate(names)}
    features = [{"name": "label", "dtype": {"class_label": {"names": declared}}}]
    (folder / "README.md").write_text(f"---\n{json.dumps({'dataset_info': {'features': features}})}\n---\n")


def read_names(path: Path) -> dict[str, list[str]]:
    """Return the class names of all rows, by split."""
    tables = with_classes(read_source(DatasetParameters(name=str(path)), COLUMNS)[0], "label")
    return {split: table["label_name"].tolist() for split, table in tables.items()}


@pytest.mark.parametrize(
    ("names", "train", "test", "expected"),
    [
        (["neg", "pos", "1"], ("csv", [0, 1, 2]), ("jsonl", ["1", "1"]), ["pos", "pos"]),
        (["neg", "pos", "1"], ("csv", ["neg", "pos", "1"]), ("jsonl", ["1", "1"]), ["1", "1"]),
        (["neg", "pos"], ("jsonl", [0, 1]), ("csv", [1, 0]), ["pos", "neg"]),
        (["neg", "pos"], ("jsonl", [0, 1]), ("csv", ["pos", "neg"]), None),
        (["neg", "pos"], ("parquet", ["neg", "pos"]), ("jsonl", [1, 0]), None),
        (["True", "False"], ("jsonl", [True, False]), ("csv", ["True", "False"]), ["True", "False"]),
        (["false", "true"], ("csv", ["true", "false"]), ("jsonl", [True, False]), ["true", "false"]),
    ],
)
def test_files_contain_either_codes_or_names(
    tmp_path: Path, names: list[str], train: tuple[str, Any], test: tuple[str, Any], expected: list[str] | None
) -> None:
    write_class_names(tmp_path, names)
    for split, (suffix, labels) in (("train", train), ("test", test)):
        write_labels(tmp_path / f"{split}.{suffix}", labels)
    if expected is None:
        with pytest.raises(InputError, match=r"codes in .*\.jsonl and names in .*; write all labels as") as raised:
            read_names(tmp_path)
        assert all(
            f"{split}.{suffix}" in str(raised.value) for split, (suffix, _) in (("train", train), ("test", test))
        )
    else:
        assert read_names(tmp_path)["test"] == expected


def test_booleans_are_not_codes_of_other_names(tmp_path: Path) -> None:
    write_class_names(tmp_path, ["pos", "neg", "neutral"])
    write_labels(tmp_path / "train.jsonl", [True, False])
    with pytest.raises(InputError, match=r"contains booleans, but its classes have the names 'pos', 'neg', 'neutral'"):
        read_names(tmp_path)
    write_class_names(tmp_path, ["pos", "neg"])
    write_labels(tmp_path / "train.jsonl", [0, [1]])
    with pytest.raises(InputError, match=r"the label in row 2 is not a string, number or boolean"):
        read_names(tmp_path)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet", ".dictionary.parquet"])
@pytest.mark.parametrize(
    ("labels", "order"),
    [
        (["good", "good ", "bad"], ["bad", "good"]),
        ([" 1", "1", "2"], ["1", "2"]),
        (["-0", "0", "1"], ["0", "1"]),
        (["1.0", "2.0"], ["1", "2"]),
        (["10", "9", "1"], ["1", "9", "10"]),
    ],
)
def test_labels_agree_in_every_format(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, labels: list[str], order: list[str]
) -> None:
    path = tmp_path / f"train{suffix}"
    write_labels(path, labels)
    tables = with_classes(read_source(DatasetParameters(name=str(path)), COLUMNS)[0], "label")
    assert tables["train"].sort_values("label")["label_name"].unique().tolist() == order
    assert ("labels that differ only in surrounding spaces" in caplog.text) == any(" " in label for label in labels)


@pytest.mark.parametrize("types", [("int64", "float64"), ("uint64", "int64")])
def test_large_codes_of_mixed_types_stay_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, types: tuple[str, str]
) -> None:
    labels = ([2**53, 2**53 + 1], [2**53, 1])
    for split, values, kind in zip(("train", "test"), labels, types, strict=True):
        table = pa.table({"text": ["a", "b"], "label": pa.array(values).cast(kind)})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    expected = {"train": ["9007199254740992", "9007199254740993"], "test": ["9007199254740992", "1"]}
    assert read_names(tmp_path) == expected
    assert "differ only in spelling" not in caplog.text
