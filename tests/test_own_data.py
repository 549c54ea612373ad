"""Data of anyone's own: any number of classes of any type, other splits and configurations, whole groups."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import toy_reviews
from test_download import SEED, dataset, write_file, write_hub_layout

from attnmix.core.errors import InputError
from attnmix.data.draw import stratified_split
from attnmix.data.source import read_splits

SIZES = {"train": 64, "validation": 16, "test": 20}


def of_classes(labels: list[Any], number: int = 100) -> pd.DataFrame:
    """As many reviews, classes in turn."""
    return toy_reviews(number, 0).assign(label=[labels[i % len(labels)] for i in range(number)])


def numbers_by_name(splits: dict[str, pd.DataFrame]) -> dict[str, int]:
    rows = pd.concat(splits.values())
    return dict(sorted({*zip(rows["label_name"], rows["label"].tolist(), strict=True)}, key=lambda each: each[1]))


@pytest.mark.parametrize(
    ("suffix", "labels", "names"),
    [
        (".csv", ["good", "bad", "so-so"], ["bad", "good", "so-so"]),
        (".csv", [10, 9, 2, 1], ["1", "2", "9", "10"]),
        (".csv", ["0.0", "1.0"], ["0", "1"]),
        (".csv", [True, False], ["False", "True"]),
        (".csv", ["1:worst", "NA", "None"], ["1:worst", "NA", "None"]),
        (".jsonl", [0.0, 2.0, 1.0], ["0", "1", "2"]),
        (".jsonl", [True, False], ["False", "True"]),
        (".parquet", [1.0, -1.0], ["-1", "1"]),
        (".parquet", [np.int8(3), np.int8(1), np.int8(2)], ["1", "2", "3"]),
        (".parquet", ["肯定", "否定", "中立"], ["中立", "否定", "肯定"]),
    ],
)
def test_classes_of_any_type_and_number_are_numbered_in_order(
    tmp_path: Path, suffix: str, labels: list[Any], names: list[str]
) -> None:
    frame = of_classes(labels)
    splits = read_splits(dataset(write_file(tmp_path, suffix, frame)), SEED)
    assert numbers_by_name(splits) == {name: number for number, name in enumerate(names)}
    for split, rows in splits.items():
        assert len(rows) == SIZES[split]
        shares = rows["label"].value_counts()
        assert shares.max() - shares.min() <= len(labels) - 1
    # Which review has which class is not lost on the way.
    order = {name: labels.index(name) for name in labels} if suffix == ".csv" and names[0] == "bad" else {}
    truth = dict(zip(frame["text"], frame["label"], strict=True))
    for rows in splits.values():
        for text, name in zip(rows["text"], rows["label_name"], strict=True):
            assert not order or truth[text] == name


def test_the_hubs_classes_keep_their_order_past_ten(tmp_path: Path) -> None:
    folder = write_hub_layout(tmp_path / "hub", toy_reviews(240, 0), toy_reviews(60, 1))
    names = [f"class {12 - number}" for number in range(12)]
    listed = "".join(f"          '{number}': {name}\n" for number, name in enumerate(names))
    readme = (folder / "README.md").read_text().replace("          '0': worse\n          '1': better\n", listed)
    (folder / "README.md").write_text(readme)
    for path in sorted((folder / "plain_text").iterdir()):
        frame = pd.read_parquet(path)
        frame.assign(label=np.arange(len(frame)) % 12).to_parquet(path, index=False)
    assert numbers_by_name(read_splits(dataset(folder), SEED)) == {name: number for number, name in enumerate(names)}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (
            [0.5, 1.5, 1.0],
            r"label_column: 'label' of .* 2 numbers that are not whole \(0\.5, 1\.5\); a class is a word",
        ),
        ([1, "one"], r"label_column: 'label' of .* holds numbers and words \(1, 'one'\); write all in one way"),
        ([True, 7], r"holds numbers and truth values"),
        ([[1], [2]], r"100 labels that are no word, number or truth value in 'label', the first in line 1"),
    ],
)
def test_labels_that_are_no_classes_are_one_error(tmp_path: Path, labels: list[Any], expected: str) -> None:
    rows = of_classes([0]).assign(label=pd.Series(labels * (100 // len(labels) + 1), dtype=object)[:100])
    with pytest.raises(InputError, match=expected) as raised:
        read_splits(dataset(write_file(tmp_path, ".jsonl", rows)), SEED)
    assert "\n" not in str(raised.value)


def test_classes_that_differ_only_in_case_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_splits(dataset(write_file(tmp_path, ".csv", of_classes(["Pos", "neg", "pos "]))), SEED)
    assert "classes that differ only in case: 'Pos', 'pos'" in caplog.text


def test_a_class_that_could_not_be_learned_is_named(tmp_path: Path) -> None:
    frame = of_classes(["x", "y"])
    frame.loc[7, "label"] = "rare"
    with pytest.raises(InputError, match=r"the train split would have \d+ reviews, none of 1 of 3 classes \('rare'\)"):
        read_splits(dataset(write_file(tmp_path, ".csv", frame)), SEED)


@pytest.mark.parametrize("twice", ["text", "label"])
def test_a_parquet_file_with_a_column_twice_is_one_error(tmp_path: Path, twice: str) -> None:
    table = pa.table([pa.array(["a", "b"]), pa.array([0, 1]), pa.array([0, 1])], names=["text", "label", twice])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=rf"a\.parquet: it has more than one column {twice}; each name once"):
        read_splits(dataset(tmp_path / "a.parquet"), SEED)


def test_a_parquet_file_with_broken_utf8_is_one_error(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"caf\xe9", b"b"]).buffers())
    pq.write_table(pa.table({"text": broken, "label": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: .*Invalid UTF8"):
        read_splits(dataset(tmp_path / "a.parquet"), SEED)


def test_a_csv_is_read_as_it_stands(tmp_path: Path) -> None:
    """A byte-order mark, quotes, newlines, NUL and more within fields."""
    texts = [f'{number}: "quoted", and\nover\r\ntwo lines\tand <b>BEL</b> \x07 한' for number in range(100)]
    with (tmp_path / "a.csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([["text", "label"], *([text, i % 3] for i, text in enumerate(texts))])
    found = pd.concat(read_splits(dataset(tmp_path / "a.csv"), SEED).values())
    assert sorted(found["text"]) == sorted(texts)
    assert {int(text.partition(":")[0]) % 3 for text in found.loc[found["label"] == 2, "text"]} == {2}


@pytest.mark.parametrize("columns", [("sentence1", "sentence2"), ("premise", "hypothesis")])
def test_pairs_of_texts_are_out_of_scope_and_told_so(tmp_path: Path, columns: tuple[str, str]) -> None:
    frame = toy_reviews(20, 0).rename(columns={"text": columns[0]}).assign(**{columns[1]: "other"})
    with pytest.raises(InputError, match=rf"pairs of texts \({columns[0]}, {columns[1]}\) are out of scope"):
        read_splits(dataset(write_file(tmp_path, ".csv", frame)), SEED)


def with_configs(folder: Path) -> Path:
    """Configurations `small` and `large`, whose splits are called `learn` and `held_out`."""
    lines = ["---", "configs:"]
    for seed, config in enumerate(("small", "large")):
        (folder / config).mkdir(parents=True)
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, number in (("learn", 60), ("held_out", 20)):
            frame = toy_reviews(number, seed).assign(text=lambda rows, config=config: f"{config} " + rows["text"])
            frame.assign(text=frame["text"] + split).to_csv(folder / config / f"{split}.csv", index=False)
            lines += [f"  - split: {split}", f"    path: {config}/{split}.csv"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder


def test_configurations_and_splits_are_chosen_by_name(tmp_path: Path) -> None:
    folder = with_configs(tmp_path / "data")
    chosen = {"config": "large", "train_split": "learn", "test_split": "held_out"}
    splits = read_splits(dataset(folder, **chosen), SEED)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 48, "validation": 12, "test": 20}
    for split, rows in splits.items():
        assert rows["text"].str.match(r"large .*held_out$" if split == "test" else r"large .*learn$").all()
    # Without a test split a part of train becomes it.
    splits = read_splits(dataset(folder, **chosen | {"test_split": None}), SEED)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 38, "validation": 10, "test": 12}
    assert pd.concat(splits.values())["text"].str.endswith("learn").all()


def test_a_folder_with_one_split_gives_a_part_of_it_for_the_test(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    toy_reviews(100, 0).to_csv(tmp_path / "reviews.csv", index=False)
    assert {split: len(rows) for split, rows in read_splits(dataset(tmp_path), SEED).items()} == SIZES
    assert "has no split test: a part of train becomes it" in caplog.text
    with pytest.raises(InputError, match=r"dataset\.train_split: .* has no split learn; allowed: train$"):
        read_splits(dataset(tmp_path, train_split="learn"), SEED)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, r"dataset\.config: there are several; allowed: 'small', 'large'"),
        ({"config": "huge"}, r"dataset\.config: huge is none of .*; allowed: 'small', 'large'"),
        ({"config": "small"}, r"dataset\.train_split: .* has no split train; allowed: learn, held_out$"),
        (
            {"config": "small", "train_split": "learn"},
            r"dataset\.test_split: .* has no split test; allowed: learn, held_out; or leave it empty, and a part",
        ),
    ],
)
def test_a_configuration_or_split_that_is_not_there_is_one_error(
    tmp_path: Path, chosen: dict[str, str], expected: str
) -> None:
    with pytest.raises(InputError, match=expected) as raised:
        read_splits(dataset(with_configs(tmp_path / "data"), **chosen), SEED)
    assert "\n" not in str(raised.value)


def test_a_file_has_no_configuration(tmp_path: Path) -> None:
    path = write_file(tmp_path, ".csv", toy_reviews(20, 0))
    with pytest.raises(InputError, match=r"dataset\.config: small is no part of .*, a single file; leave it empty"):
        read_splits(dataset(path, config="small"), SEED)


def test_equal_texts_stay_on_one_side_of_a_split_of_our_own(tmp_path: Path) -> None:
    frame = toy_reviews(120, 0)
    again = pd.concat([frame, frame.iloc[::3], frame.iloc[::5]], ignore_index=True)
    splits = read_splits(dataset(write_file(tmp_path, ".csv", again)), SEED)
    places = {}
    for split, rows in splits.items():
        for text in rows["text"]:
            assert places.setdefault(text, split) == split
    assert sum(map(len, splits.values())) == len(again)
    sizes = {split: len(rows) / len(again) for split, rows in splits.items()}
    assert sizes == pytest.approx({"train": 0.64, "validation": 0.16, "test": 0.2}, abs=0.01)


def test_texts_that_the_sources_own_splits_share_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, test = toy_reviews(60, 0), toy_reviews(30, 1)
    test.loc[:3, "text"] = train["text"][:4]
    read_splits(dataset(write_hub_layout(tmp_path / "hub", train, test)), SEED)
    assert "4 of the 30 test reviews have a text of the training split" in caplog.text
    caplog.clear()
    read_splits(dataset(write_hub_layout(tmp_path / "other", train, toy_reviews(30, 1))), SEED)
    assert caplog.text == ""


def test_groups_are_split_off_whole_with_shares_as_near_as_they_allow(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    frame = toy_reviews(600, 0).assign(film=[f"film {number}" for number in generator.zipf(1.6, 600) % 150])
    frame.loc[5, "text"] = frame["text"][6]  # another film's review, so that the two films hang together
    path = write_file(tmp_path, ".csv", frame)
    splits = read_splits(dataset(path, group_column="film"), SEED)
    film = dict(zip(frame["text"], frame["film"], strict=True)) | {frame["text"][6]: "both"}
    joined = {frame["film"][5]: "both", frame["film"][6]: "both"}
    found = {split: {joined.get(film[text], film[text]) for text in rows["text"]} for split, rows in splits.items()}
    for split, others in (("train", ("validation", "test")), ("validation", ("test",))):
        assert all(not found[split] & found[other] for other in others)
    assert sum(map(len, splits.values())) == 600
    for split, share in (("test", 0.2), ("validation", 0.16)):
        assert len(splits[split]) / 600 == pytest.approx(share, abs=0.01)
        assert splits[split]["label"].mean() == pytest.approx(0.5, abs=0.03)
    again = read_splits(dataset(path, group_column="film"), SEED)
    other = read_splits(dataset(path, group_column="film"), SEED + 1)
    assert all(splits[split].equals(again[split]) for split in splits)
    assert not splits["test"].equals(other["test"])


def test_groups_too_large_to_split_off_are_one_error(tmp_path: Path) -> None:
    path = write_file(tmp_path, ".csv", toy_reviews(100, 0).assign(film="the only one"))
    with pytest.raises(InputError, match=r"the validation split would have 0 reviews, .* smaller groups"):
        read_splits(dataset(path, group_column="film"), SEED)
    with pytest.raises(InputError, match=r"dataset\.group_column: .* has no column 'writer'"):
        read_splits(dataset(path, group_column="writer"), SEED)


def test_single_rows_as_groups_are_the_plain_split() -> None:
    labels = np.random.default_rng(0).integers(0, 3, 200)
    plain, grouped = (stratified_split(labels, 0.2, 5, groups) for groups in (None, np.arange(200)[::-1].copy()))
    for ours, theirs in zip(plain, grouped, strict=True):
        np.testing.assert_array_equal(ours, theirs)
