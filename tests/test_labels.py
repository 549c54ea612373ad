"""Label columns contain either codes or class names, and similar names cause a warning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import toy_reviews

from attnmix.core.errors import InputError
from attnmix.core.settings import DatasetParameters, checked_section
from attnmix.data.source import read_source, read_splits

COLUMNS = {"text": "text", "label": "label"}


def write_labels(folder: Path, labels: Sequence[Any], names: Sequence[str] | None, suffix: str = ".csv") -> Path:
    """Write labels to two files of a split, and their class names to README.md."""
    folder.mkdir(exist_ok=True)
    frame = pd.DataFrame({"text": [f"text {number}" for number in range(len(labels))], "label": labels})
    for part, rows in enumerate((frame.iloc[::2], frame.iloc[1::2])):
        path = folder / f"train-{part}{suffix}"
        if suffix == ".csv":
            rows.to_csv(path, index=False)
        else:
            rows.to_json(path, orient="records", lines=True)
    if names is not None:
        label = {"class_label": {"names": {str(number): name for number, name in enumerate(names)}}}
        info = {"features": [{"name": "text", "dtype": "string"}, {"name": "label", "dtype": label}]}
        (folder / "README.md").write_text(f"---\ndataset_info: {json.dumps(info)}\n---\n", encoding="utf-8")
    return folder


def read_labels(folder: Path) -> list[str]:
    """Return the labels in the order of `write_labels`."""
    table = read_source(DatasetParameters(name=str(folder)), COLUMNS)[0]["train"]
    labels: list[str] = (
        table.assign(number=table["text"].str.removeprefix("text ").astype(int)).sort_values("number")["label"].tolist()
    )
    return labels


RATINGS = ("1", "2", "3")


@pytest.mark.parametrize(
    ("suffix", "labels", "names", "expected"),
    [
        (".csv", [0, 1, 2], RATINGS, ["1", "2", "3"]),
        (".csv", [1, 2, 3], RATINGS, ["1", "2", "3"]),
        (".csv", ["0.0", "1.0", "2.0"], RATINGS, ["1", "2", "3"]),
        (".jsonl", [0, 1, 2], RATINGS, ["1", "2", "3"]),
        (".jsonl", [1, 2], RATINGS, ["2", "3"]),
        (".jsonl", ["1", "2"], RATINGS, ["1", "2"]),
        (".jsonl", [True, False], ("no", "yes"), ["yes", "no"]),
        (".csv", [0, 1, 0], ("0", "1"), ["0", "1", "0"]),
        (".csv", [-1, 0, 1], ("-1", "0", "1"), ["-1", "0", "1"]),
        (".csv", ["good", "bad"], ("good", "bad"), ["good", "bad"]),
    ],
)
def test_column_contains_codes_or_names(
    tmp_path: Path, suffix: str, labels: list[Any], names: Sequence[str], expected: list[str]
) -> None:
    assert read_labels(write_labels(tmp_path / "data", labels, names, suffix)) == expected


@pytest.mark.parametrize(
    ("suffix", "labels", "names", "expected"),
    [
        (
            ".csv",
            [1, 2],
            RATINGS,
            r"contains '1', '2', which are names of classes and codes of other classes; save the file",
        ),
        (
            ".csv",
            [0, 3],
            RATINGS,
            r"contains codes in .*train-0.csv and names in .*train-1.csv; write all labels as",
        ),
        (
            ".csv",
            [0, 4],
            RATINGS,
            r"contains '4', which is not a class in the dataset's description; allowed: the names '1', '2', '3', or",
        ),
        (
            ".jsonl",
            [0, 3],
            RATINGS,
            r"contains 3, which is not a class in the dataset's description; .* only codes, 0 to 2",
        ),
        (".jsonl", [0, 0.5], RATINGS, r"contains 0\.5, which is not a class"),
        (".csv", ["01", "1"], ("bad", "good"), r"contains '01', which is not a class"),
        (".jsonl", [0, "good"], ("bad", "good"), r"contains codes in .* and names in .*; write all labels as codes"),
        (
            ".jsonl",
            [0, 1, "good"],
            ("bad", "good"),
            r"mixes strings and numbers \(0, 'good'\); write all labels as codes",
        ),
        (
            ".jsonl",
            [True, False],
            ("bad", "so so", "good"),
            r"contains booleans, but its classes have the names 'bad'",
        ),
        (".jsonl", ["good", "x" * 1000], ("bad", "good"), r"contains 'x{80}\.\.\.', which is not a class"),
        (".csv", [0, -1], ("bad", "good"), r"the label is missing in column 'label', row 1"),
    ],
)
def test_invalid_label_is_an_error(
    tmp_path: Path, suffix: str, labels: list[Any], names: Sequence[str], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        read_labels(write_labels(tmp_path / "data", labels, names, suffix))


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        ("café", "cafe\u0301", r"'cafe\u0301', 'caf\xe9'"),
        ("pos", "pos\u200b", r"'pos', 'pos\u200b'"),
        ("so so", "so\u00a0so", r"'so so', 'so\xa0so'"),
        ("so so", "so  so", "'so  so', 'so so'"),
        ("po\u00ads", "pos", r"'pos', 'po\xads'"),
        ("ok\ufe0f", "ok", r"'ok', 'ok\ufe0f'"),
        ("fi", "\N{LATIN SMALL LIGATURE FI}", r"'fi', '\ufb01'"),
        ("Straße", "STRASSE", "'STRASSE', 'Straße'"),
        ("\N{FULLWIDTH DIGIT ONE}", "1st", None),
        ("Yes", "yes", "'Yes', 'yes'"),
        ("good", "goods", None),
    ],
)
def test_similar_class_names_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, one: str, other: str, shown: str | None
) -> None:
    frame = toy_reviews(60, 0)[["text"]].assign(label=[one, other, "third"] * 20)
    frame.to_csv(tmp_path / "reviews.csv", index=False)
    read_splits(DatasetParameters(name=str(tmp_path / "reviews.csv")), 1)
    if shown is None:
        assert "differ only in spelling" not in caplog.text
    else:
        assert f"classes that differ only in spelling: {shown}" in caplog.text


def test_message_truncates_user_values(tmp_path: Path) -> None:
    long = "letters " * 100_000
    for columns, expected in (
        ({"text": ["a"], long: ["b"]}, "no column 'label'"),
        ({"text": ["a"], "label": [f"={long}"]}, "1 class"),
        ({"text": ["a", "b"], "label": [f"={long}", "b"]}, "a spreadsheet would execute as a formula"),
        ({"text": ["a", "b"], "label": [f"1.5{'0' * 100_000}", "1"]}, "non-integer numbers"),
        ({"text": ["a", "b"], "label": [0, {long: 1}]}, "not a string, number or boolean"),
    ):
        path = tmp_path / "a.jsonl"
        pd.DataFrame(columns).to_json(path, orient="records", lines=True)
        with pytest.raises(InputError, match=expected) as raised:
            read_splits(DatasetParameters(name=str(path)), 1)
        assert len(str(raised.value)) < 600
    for name in ("a/" * 3000, f"{'x' * 300}.csv", f"{'x' * 300}:small"):
        with pytest.raises(InputError, match=r"^dataset\.name: \S{83} cannot be read \(File name too long\)"):
            read_splits(DatasetParameters(name=name), 1)
    with pytest.raises(InputError) as raised:
        checked_section(DatasetParameters, validation_fraction=long)
    assert len(str(raised.value)) < 600
    assert str(InputError(f"the word {'x' * 1_000_000} is unknown")) == f"the word {'x' * 80}... is unknown"
