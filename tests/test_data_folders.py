"""Exactly the data files of a folder are read, logged, and listed in reports/sources.json."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import logging
import lzma
import os
import random
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from conftest import REPOSITORY, toy_reviews

from attnmix.core.errors import InputError
from attnmix.core.settings import DatasetParameters
from attnmix.data import source
from attnmix.data.folders import source_files
from attnmix.data.source import read_source

COLUMNS = {"text": "text", "label": "label"}
Rows = list[tuple[str, str]]


def zip_of(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("the only one.csv", content)
    return file.getvalue()


def zst_of(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zip": zip_of,
    ".zst": zst_of,
}


def content_of(rows: Rows, suffix: str) -> bytes:
    """Return the content of a file with these rows in the format of `suffix`."""
    if suffix in (".csv", ".tsv"):
        file = io.StringIO()
        csv.writer(file, delimiter="," if suffix == ".csv" else "\t").writerows([("text", "label"), *rows])
        return file.getvalue().encode()
    objects = [{"text": text, "label": label} for text, label in rows]
    if suffix == ".json":
        return json.dumps(objects, indent=1).encode()
    if suffix in (".jsonl", ".ndjson"):
        return "".join(f"{json.dumps(each)}\n" for each in objects).encode()
    table = pa.Table.from_pylist(objects)
    if suffix == ".parquet":
        sink = io.BytesIO()
        table.to_pandas().to_parquet(sink, index=False)
        return sink.getvalue()
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return bytes(stream.getvalue())


def write_rows(path: Path) -> None:
    """Write four rows of two classes as csv."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("text,label\n" + "".join(f"{path} {row},{'ab'[row % 2]}\n" for row in range(4)))


class Folder:
    """A random folder in `root`, with the expected rows of its data files."""

    def __init__(self, root: Path, generator: random.Random) -> None:
        self.root, self.generator = root, generator
        self.number = 0  # number of the last written table
        self.folder = root / generator.choice(["x", "x [1]", "a*b", "{x}", "x?", "x y", "ä#%", "[!x]", "a::b"])
        self.folder.mkdir()
        for name in ("x 1", "ab", "xy", "a"):  # siblings that would match the folder's name as a glob pattern
            if name != self.folder.name:
                self.write(root / name / "train.csv", self.rows(), ".csv")
        self.suffix = generator.choice([".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".arrow"])
        self.expected: dict[str, Rows] = {}

    def rows(self) -> Rows:
        """Return one to three rows that occur in no other file; their number is random."""
        self.number += 1
        return [(f"text {self.number} {row}", "ab"[row % 2]) for row in range(self.generator.randint(1, 3))]

    def write(self, path: Path, rows: Rows, suffix: str, compression: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(COMPRESS[compression](content_of(rows, suffix)))

    def add_data(self, stem: str) -> None:
        """Write a data file, plain or compressed, in the folder or as the target of a link."""
        compression = self.generator.choice([*COMPRESS, "", "", ""])
        name = f"{stem}{self.suffix}{compression}"
        self.expected[name] = self.rows()
        path = self.folder / name
        if self.generator.random() < 0.2:
            target = self.root / "elsewhere" / str(self.number) / path.name
            self.write(target, self.expected[name], self.suffix, compression)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)
        else:
            self.write(path, self.expected[name], self.suffix, compression)

    def add_others(self) -> None:
        """Write files that must not be read: backups, partial downloads, hidden files and caches."""
        file = f"train{self.suffix}"
        names = [f"{file}{end}" for end in (".bak", ".dvc", "~", ".crdownload", ".part", ".tmp", ".gz.part", ".orig")]
        names += [
            f".{file}",
            f".#{file}",
            f"#{file}#",
            f".ipynb_checkpoints/{file}",
            f"__MACOSX/{file}",
            f".git/{file}",
            f"~${file}",
            f"#{file}",
            f"$RECYCLE.BIN/{file}",
            f"@eaDir/train/{file}",
            f"_temporary/0/{file}",
            f"train.bak{self.suffix}",
            f"train.sync-conflict-20240101-1{self.suffix}",
            f"train (conflicted copy 2024){self.suffix}.gz",
        ]
        names += ["cache-0123456789abcdef.arrow", "notes.txt", "train.py", "LICENSE", f"train{self.suffix}.swp"]
        for name in self.generator.sample(names, self.generator.randint(0, 5)):
            self.write(self.folder / name, self.rows(), self.suffix)
        if self.generator.random() < 0.2:
            (self.folder / "loop").symlink_to(self.folder, target_is_directory=True)
        if self.generator.random() < 0.2:
            (self.folder / ".gone.md").symlink_to("nowhere")


def flat_folder(folder: Folder) -> None:
    marks = ["", " (1)", "-a[1]", "_{b}", ".c*d", " é", "-e?"]
    for split in ("train", "test")[: folder.generator.randint(1, 2)]:
        for mark in folder.generator.sample(marks, folder.generator.randint(1, 3)):
            folder.add_data(f"{split}{mark}")


def nested_folder(folder: Folder) -> None:
    for split in ("train", "test")[: folder.generator.randint(1, 2)]:
        for name in folder.generator.sample(["a", "b [1]", "deep/c", "deep/er/d*"], folder.generator.randint(1, 3)):
            folder.add_data(f"{split}/{name}")


def folder_of_shards(folder: Folder) -> None:
    for split in ("train", "test")[: folder.generator.randint(1, 2)]:
        total = folder.generator.randint(1, 3)
        for number in range(total):
            folder.add_data(f"data/{split}-{number:05}-of-{total:05}")


def folder_without_splits(folder: Folder) -> None:
    names = ["one", "two [2]", "in/three", "a*", "in {4}/four"]
    for name in folder.generator.sample(names, folder.generator.randint(1, 3)):
        folder.add_data(name)


def saved_folder(folder: Folder) -> None:
    """Write a dataset in the format of `save_to_disk`, with cache files."""
    folder.suffix = ".arrow"
    splits = ("train", "test")[: folder.generator.randint(1, 2)]
    (folder.folder / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    for split in splits:
        file = f"{split}/data-00000-of-00001.arrow"
        folder.expected[file] = folder.rows()
        folder.write(folder.folder / file, folder.expected[file], ".arrow")
        state = {"_data_files": [{"filename": Path(file).name}], "_split": split}
        (folder.folder / split / "state.json").write_text(json.dumps(state))
        (folder.folder / split / "dataset_info.json").write_text("{}")
        folder.write(folder.folder / split / "cache-0123456789abcdef.arrow", folder.rows(), ".arrow")
        folder.write(folder.folder / split / "tmp1a2b.arrow", folder.rows(), ".arrow")


def logged_files(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    """Return the number of rows of each file in messages such as "train: 3 rows of a.csv, 2 rows of b.csv"."""
    numbers = {}
    for message in caplog.messages:
        if re.match(r"(train|test): \d+ rows of ", message):
            for part in message.split(": ", 1)[1].split(", "):
                number, name = part.split(" rows of ", 1)
                numbers[name] = int(number)
    return numbers


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 500), marks=pytest.mark.long)])
def test_random_folders_are_read_logged_and_watched_consistently(
    caplog: pytest.LogCaptureFixture, seeds: range
) -> None:
    caplog.set_level(logging.INFO)
    layouts = (flat_folder, nested_folder, folder_of_shards, folder_without_splits, saved_folder)
    for seed in seeds:
        generator = random.Random(seed)
        caplog.clear()
        with TemporaryDirectory() as root:
            folder = Folder(Path(root), generator)
            layouts[seed % len(layouts)](folder)
            folder.add_others()
            settings = DatasetParameters(name=str(folder.folder))
            tables, _ = read_source(settings, COLUMNS)
            watched = source_files(settings)
            assert all(path.is_relative_to(folder.folder) for path in watched.values())
        expected = folder.expected
        assert logged_files(caplog) == {name: len(rows) for name, rows in expected.items()}, seed
        watched_data = {name for name in watched if Path(name).name not in ("state.json", "dataset_dict.json")}
        assert watched_data == set(expected), seed
        read = [row for table in tables.values() for row in table[["text", "label"]].itertuples(index=False, name=None)]
        assert sorted(read) == sorted(row for rows in expected.values() for row in rows), seed
        assert "a copy" not in caplog.text


@pytest.mark.parametrize(
    ("head", "creators"),
    [
        ("language_creators: [machine-generated, found]", ["machine-generated", "found"]),
        ("language_creators: found", ["found"]),
        ("license: mit", []),
        ("language_creators: true", []),
        ("language_creators: {a: b}", []),
    ],
)
def test_dataset_card_states_sources_of_texts(head: str, creators: list[str], tmp_path: Path) -> None:
    reviews().to_csv(tmp_path / "train.csv", index=False)
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\n")
    _, origin = read_source(DatasetParameters(name=str(tmp_path)), COLUMNS)
    assert origin.creators == creators


def test_sample_declares_its_texts_as_machine_generated() -> None:
    _, origin = read_source(DatasetParameters(name=str(REPOSITORY / "data/sample")), COLUMNS)
    assert origin.creators == ["machine-generated"]


def reviews(number: int = 60) -> pd.DataFrame:
    return toy_reviews(number, 0)[["text"]].assign(label=["good", "bad"] * (number // 2))


def read(name: Path, **settings: Any) -> dict[str, pd.DataFrame]:
    return read_source(DatasetParameters(name=str(name), **settings), COLUMNS)[0]


def test_saved_datasets_are_read_without_caches(tmp_path: Path) -> None:
    frame = reviews().assign(label=[0, 1] * 30)
    names = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    splits = {split: datasets.Dataset.from_pandas(frame, features=names) for split in ("learn", "held_out")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved", num_shards={"learn": 2, "held_out": 1})
    saved = datasets.load_from_disk(str(tmp_path / "saved"))
    saved.map(lambda row: {"text": row["text"].upper()})
    assert list((tmp_path / "saved").rglob("cache-*.arrow"))
    tables = read(tmp_path / "saved", train_split="learn", test_split="held_out")
    for split, own in (("learn", "train"), ("held_out", "test")):
        assert tables[own]["text"].tolist() == saved[split]["text"]
        assert tables[own]["label"].tolist() == [("bad", "good")[code] for code in saved[split]["label"]]
    splits["learn"].save_to_disk(tmp_path / "alone")
    assert len(read(tmp_path / "alone")["train"]) == 60
    (tmp_path / "alone/data-00000-of-00001.arrow").unlink()
    with pytest.raises(InputError, match=r"state\.json lists data-00000-of-00001\.arrow, which is not in this folder"):
        read(tmp_path / "alone")


@pytest.mark.parametrize("names", [("train.csv", "train.csv.gz"), ("a/train.tsv.xz", "a/train.csv")])
def test_duplicate_tables_are_an_error(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        reviews().to_csv(path, index=False)
    expected = rf"{names[0]} and {names[1]}|{names[1]} and {names[0]}"
    with pytest.raises(InputError, match=rf"({expected}) differ only in the suffix .*; remove one, or rename it"):
        read(tmp_path)


def test_equal_rows_of_two_files_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reviews().to_csv(tmp_path / "train.csv", index=False)
    reviews().iloc[:40].to_csv(tmp_path / "train (copy).csv", index=False)
    assert len(read(tmp_path)["train"]) == 100
    assert "train: 40 rows of train.csv are also in train (copy).csv; remove one of the files" in caplog.text


@pytest.mark.parametrize("target", ["/nowhere/a.csv.gz", "train-2.csv.gz"])
def test_broken_link_to_data_file_is_an_error(tmp_path: Path, target: str) -> None:
    reviews().to_csv(tmp_path / "train.csv", index=False)
    (tmp_path / "train-2.csv.gz").symlink_to(target)
    with pytest.raises(InputError, match=rf"train-2\.csv\.gz is a link to {target}, which does not exist"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("data_files: ../other.csv", r"refers to \.\./other\.csv, which is outside the dataset; copy this file"),
        ("data_files: /etc/other.csv", r"refers to /etc/other\.csv, which is outside the"),
        ("data_files: hf://datasets/a/b.csv", r"refers to hf://datasets/a/b\.csv, which is outside"),
        (
            "data_files: train.csv.bak",
            r"refers to 'train\.csv\.bak', but the dataset has no such data file; allowed: names that end",
        ),
        ("data_dir: none", r"refers to the folder none, which contains no data file; allowed: names that end"),
        ("data_dir: ..", r"refers to the folder \.\., which contains no data file"),
        ("data_files: none/*", r"refers to 'none/\*', but the dataset has no such data file"),
        ('quotechar: "\'"', r"sets quotechar=', unsupported for \.csv files; allowed: sep, data_files"),
        ("skiprows: 3", r"sets skiprows=3, unsupported for"),
        ("encoding: latin-1", r"sets encoding=latin-1, unsupported for"),
        ("names: [label, text]", r"sets names=\['label', 'text'\], unsupported for"),
        ("sep: '\\s+'", r"sets sep='.+'; allowed: one character"),
    ],
)
def test_description_of_missing_files_is_an_error(tmp_path: Path, head: str, expected: str) -> None:
    for name in ("train.csv", "train.csv.bak"):
        reviews().to_csv(tmp_path / name, index=False)
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {head}\n---\n")
    with pytest.raises(InputError, match=expected):
        read(tmp_path)


def test_description_patterns_select_data_files(tmp_path: Path) -> None:
    for name in ("part [1].csv", "part 1.csv", "part 2.csv.bak", "in/part 3.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        reviews().to_csv(tmp_path / name, index=False)
    for pattern, names in (
        ("part [1].csv", {"part [1].csv"}),
        ("./part*", {"part [1].csv", "part 1.csv"}),
        ("**/part ?.*", {"part 1.csv", "in/part 3.csv"}),
    ):
        values = json.dumps([{"split": "train", "path": pattern}])
        (tmp_path / "README.md").write_text(
            f"---\nconfigs:\n- config_name: default\n  data_files: {values}\n  encoding: utf-8\n---\n"
        )
        assert set(source_files(DatasetParameters(name=str(tmp_path)))) == {"README.md", *names}


@pytest.mark.parametrize("compression", COMPRESS)
def test_compressed_file_equals_plain_file(tmp_path: Path, compression: str) -> None:
    def write(name: str, content: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"train{Path(name).suffix}{compression}").write_bytes(COMPRESS[compression](content.encode()))
        return folder

    rows = [("a", "01"), ("b", "1"), ('so "warm"', "01")]
    table = read(write("words.csv", content_of(rows, ".csv").decode()))["train"]
    assert list(table.itertuples(index=False, name=None)) == rows
    for name, content, expected in (
        ("open.csv", 'text,label\n"so warm,a\nb,b\n', r"row 1 \(lines 2 to 3\): a field begins with a quote"),
        ("joined.csv", "text,label\na,b\nText ,LABEL\nb,a\n", r"row 2 \(line 3\) repeats the header"),
        ("bom.tsv", "label\ttext\nb\ta\n\ufefftext\tlabel\n", r"row 2 \(line 3\) repeats the header"),
        ("twice.jsonl", '{"text": "a", "label": 1}\n{"text": "a", "label": 1, "label": 0}\n', r"line 2 has the key 'l"),
        ("twice.json", '[{"text": "a",\n"label": 1},\n{"text": "a",\n"text": "b"}]', r"line 3 has the key 'text' more"),
        ("empty.csv", "", r": it is empty$"),
    ):
        with pytest.raises(InputError, match=expected) as raised:
            read(write(name, content))
        assert f"train{Path(name).suffix}{compression}" in str(raised.value)


def test_json_lists_and_sequences_are_read(tmp_path: Path) -> None:
    rows = [{"text": "a [1], {b}", "label": 0}, {"text": "c", "label": 1}]
    path = tmp_path / "train.json"
    for content in (json.dumps(rows), json.dumps(rows, indent=2), "\n".join(map(json.dumps, rows))):
        path.write_text(f"\ufeff {content}\n")
        assert read(path)["train"].to_dict("records") == rows
    for content, expected in (
        ("[]", "it contains no rows"),
        ('[{"text": "a"}, ', "its list must end at the end of the file"),
        ('[{"text": "a"} {}]', "the object of line 1 is not followed by a comma"),
        ('{"text": ["a", "b"]} 3', "line 1 is not a JSON object; write one object per row"),
        ('["a"]', "line 1 is not a JSON object"),
        ('[{"text": }]', r"line 1 is not a JSON object \(Expecting value"),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=expected):
            read(path)


@pytest.mark.parametrize("compression", [each for each in COMPRESS if each])
def test_damaged_or_expanding_compressed_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    path = tmp_path / f"train.csv{compression}"
    whole = COMPRESS[compression](reviews(200).to_csv(index=False).encode())
    for content in (whole[: len(whole) // 2], b"text,label\na,b\n", b"<html>"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"train\.csv\{compression}: \S+"):
            read(tmp_path)
    monkeypatch.setattr("attnmix.data.opening.FREE_BYTES", 2**20)
    path.write_bytes(COMPRESS[compression](b"text,label\n" + b" " * 2_000_000))
    with pytest.raises(InputError, match=r"its decompressed size exceeds the limit of 0\.00105 GB for a file"):
        read(tmp_path)


def test_archive_of_several_files_is_an_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "train.csv.zip", "w") as archive:
        for name in ("a.csv", "b.csv", "__MACOSX/a.csv"):
            archive.writestr(name, "text,label\na,b\n")
    with pytest.raises(InputError, match="it is an archive of 2 files; unpack it"):
        read(tmp_path)


def test_folder_without_data_files_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.csv.bak").write_text("text,label\n")
    with pytest.raises(InputError, match=r"contains no data file \(it has train\.csv\.bak\); allowed: names that end"):
        read(tmp_path)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with pytest.raises(InputError, match=r"contains no data file \(it has no file\)"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["test", "train/more", "README.md", ".huggingface.yaml", "LICENSE"])
def test_broken_link_is_an_error_for_any_name(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path / "train/a.csv")
    (tmp_path / name).symlink_to("/nowhere")
    with pytest.raises(InputError, match=rf"{re.escape(name)} is a link to /nowhere, which does not exist"):
        read(tmp_path)
    (tmp_path / name).unlink()
    for hidden in (".#a.csv", "~a.csv", "a.bak.csv"):
        (tmp_path / hidden).symlink_to("/nowhere")
    assert len(read(tmp_path)["train"]) == 4


def test_editor_copies_and_trash_are_reported_as_unread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copies = ["reviews-checkpoint.csv", "reviews.old.csv", "~$reviews.csv", "lost+found/reviews.csv"]
    for name in ("reviews.csv", "other-checkpoint.csv", *copies):
        write_rows(tmp_path / name)
    assert len(read(tmp_path)["train"]) == 8
    assert all(name in caplog.text.split("4 of 6 files are not used:")[1] for name in copies)


def save_set(folder: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a b", "c d"], "label": ["x", "y"]}).save_to_disk(folder)


@pytest.mark.parametrize("content", ["", '{"_data_files": [', "[" * 100_000, "{}", "[1]"])
def test_damaged_description_of_saved_set_is_an_error(tmp_path: Path, content: str) -> None:
    for split in ("train", "test"):
        save_set(tmp_path / split)
    description = tmp_path / "train/state.json"
    description.write_text("\ufeff" + description.read_text(), encoding="utf-8")
    splits = tmp_path / "dataset_dict.json"
    splits.write_text('\ufeff{"splits": ["train", "test"]}', encoding="utf-8")
    assert {split: len(table) for split, table in read(tmp_path).items()} == {"train": 2, "test": 2}
    for file in (splits, description):
        file.write_text(content)
        with pytest.raises(
            InputError, match=rf"dataset\.name: {file.relative_to(tmp_path)} (is damaged|does not list)"
        ):
            read(tmp_path)
    shutil.rmtree(tmp_path / "train")
    splits.unlink()
    for name in "ab":
        write_rows(tmp_path / f"train/{name}.csv")
    description.write_text(content)
    assert len(read(tmp_path)["train"]) == 8  # this `state.json` is unrelated to saved datasets


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    for name in "abc":
        write_rows(tmp_path / name / "train.csv")
    (tmp_path / "a/up").symlink_to(tmp_path)
    assert len(read(tmp_path)["train"]) == 12
    (tmp_path / "a/to b").symlink_to(tmp_path / "b")
    with pytest.raises(InputError, match=r"are the same folder, because of a link; remove it"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["", "train", "lost+found"])
def test_unreadable_folder_is_an_error_except_system_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for folder in ("train", "lost+found"):
        write_rows(tmp_path / folder / "train.csv")
    scan = os.scandir

    def scan_allowed(folder: Path) -> Any:
        if folder == tmp_path / name:
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scan_allowed)
    if name == "lost+found":
        assert len(read(tmp_path)["train"]) == 4
    else:
        for read_names in (read, lambda folder: source_files(DatasetParameters(name=str(folder)))):
            with pytest.raises(InputError, match=r"the folder .* cannot be read \(Permission denied\)"):
                read_names(tmp_path)


def test_capitalised_splits_are_found_with_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("Train.csv", "TEST.csv"):
        write_rows(tmp_path / name)
    assert {split: len(table) for split, table in read(tmp_path).items()} == {"train": 4, "test": 4}
    assert "by names with capitals (train: Train.csv, test: TEST.csv)" in caplog.text


def test_class_names_apply_to_their_configuration_only(tmp_path: Path) -> None:
    features = [{"name": "label", "dtype": {"class_label": {"names": {"0": "neg", "1": "pos"}}}}]
    head = {
        "configs": [{"config_name": "a", "data_files": "a.csv"}, {"config_name": "b", "data_files": "b.csv"}],
        "dataset_info": {"config_name": "a", "features": features},
    }
    (tmp_path / "README.md").write_text(f"---\n{json.dumps(head)}\n---\n")
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("text,label\nx,0\ny,1\n")
    assert read(Path(f"{tmp_path}:a"))["train"]["label"].tolist() == ["neg", "pos"]
    assert read(Path(f"{tmp_path}:b"))["train"]["label"].tolist() == ["0", "1"]


@pytest.mark.parametrize("name", [".huggingface.yaml", "dataset_infos.json"])
def test_description_with_list_is_an_error(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path / "train.csv")
    (tmp_path / name).write_text("[1]")
    with pytest.raises(InputError, match=rf"{re.escape(name)} contains a list; allowed: a mapping"):
        read(tmp_path)


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zip", ".zst"])
def test_trailing_bytes_after_compressed_content_are_an_error(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"train.csv{compression}"
    compress = COMPRESS[compression]
    first = compress(b"text,label\na,x\nb,y\n")
    path.write_bytes(first + b"other bytes")
    with pytest.raises(InputError, match=rf"train\.csv\{compression}: \S+"):
        read(tmp_path)
    path.write_bytes(compress(gzip.compress(b"text,label\n")))
    with pytest.raises(InputError, match=r"its content is compressed twice \(\.gz\); unpack it"):
        read(tmp_path)
    if compression != ".zip":
        path.write_bytes(first + compress(b"c,x\n"))
        assert read(tmp_path)["train"]["text"].tolist() == ["a", "b", "c"]
    if compression in (".gz", ".bz2", ".xz"):
        path.write_bytes(first + compress(b"\xef\xbb\xbfc,x\n"))
        with pytest.raises(InputError, match=r"parts begin with byte order marks"):
            read(tmp_path)
    if compression in (".gz", ".xz"):
        path.write_bytes(first + bytes(64))  # padding is allowed
        assert len(read(tmp_path)["train"]) == 2


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("# xet version 0\nfilesize = 1\n", "git-xet"),
        ("/annex/objects/SHA256E-s12--aa.csv\n", "git-annex"),
        ("outs:\n- md5: aa\n  path: train.csv\n", "DVC"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl.gz"])
def test_pointer_file_is_not_data(tmp_path: Path, content: str, kind: str, suffix: str) -> None:
    (tmp_path / f"train{suffix}").write_text(content)
    with pytest.raises(InputError, match=rf"it is a pointer of {kind} and not the file itself; run"):
        read(tmp_path)


@pytest.mark.parametrize("step", ["check_sizes", "read_file", "stored_class_names"])
@pytest.mark.parametrize("content", [None, b"xx"])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_file_changed_during_reading_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, content: bytes | None, suffix: str
) -> None:
    path = tmp_path / f"train{suffix}"
    path.write_bytes(content_of([("a", "x"), ("b", "y")], suffix))
    original = getattr(source, step)

    def change(*given: Any) -> Any:
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        return original(*given)

    monkeypatch.setattr(source, step, change)
    if step == "stored_class_names" and suffix == ".csv":
        assert len(read(tmp_path)["train"]) == 2  # the file is not read again
        return
    with pytest.raises(InputError, match=rf"{re.escape(str(path))}\b.*"):
        read(tmp_path)


def test_file_names_are_quoted_in_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for name in ("train\ntest: 9 rows of a.csv", "train, 4 rows of b.csv"):
        (tmp_path / name).write_text("text,label\n" + "".join(f"{len(name)} {row},{row % 2}\n" for row in range(4)))
    read(tmp_path)
    assert caplog.messages[1:] == [
        r"train: 4 rows of 'train\ntest: 9 rows of a.csv', 4 rows of 'train, 4 rows of b.csv'",
    ]
