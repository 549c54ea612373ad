"""Texts in all forms are tokenised identically for measures, vectors and the page; other values raise `InputError`."""

from __future__ import annotations

import base64
import json
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict
from families import each_family, one_of_each_tokenizer, write_family
from page_run import without_umap
from transformers import AutoModel, AutoTokenizer

import attnmix
from attnmix.core.errors import InputError
from attnmix.core.given_texts import read_texts
from attnmix.models.token_ids import spell
from attnmix.runs.text_results import load_measurer
from attnmix.serve import tokenized

TEXTS = ["time flies like an arrow", "the film was good ."]
PAIRS = [("time flies", "like an arrow"), ("the film was not good .", "it was")]
MASKED = "time [MASK] like an arrow"
PAD, CLS, SEP, TIME = 0, 2, 3, 5
"""Token IDs of the tiny BERT; all IDs in its vocabulary are below 42."""


@pytest.fixture(scope="module")
def tokenizer(tiny_bert: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_bert)


@pytest.fixture(scope="module")
def model(tiny_bert: Path, tokenizer: Any) -> attnmix.Model:
    """Return a model in memory."""
    return attnmix.load(AutoModel.from_pretrained(tiny_bert), tokenizer)


def attention_ratios(folder: Path, inputs: dict[str, Any]) -> list[float]:
    """Return 1 - mean_h a_ii of every token and layer of one unpadded text, computed with transformers."""
    eager = AutoModel.from_pretrained(folder, attn_implementation="eager")
    tensors = {name: torch.tensor([values]) for name, values in inputs.items()}
    with torch.inference_mode():
        layers = eager(**tensors, output_attentions=True).attentions
    kept = torch.stack(layers)[:, 0].mean(1).diagonal(dim1=-2, dim2=-1)
    return (1 - kept).flatten().tolist()


def measured_ids(result: attnmix.Measures) -> list[list[int]]:
    return [each.ids.tolist() for each in result.documents]


FORMS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda _: tuple(TEXTS),
    "generator": lambda _: (text for text in TEXTS),
    "array": lambda _: np.array(TEXTS),
    "array of objects": lambda _: np.array(TEXTS, dtype=object),
    "series": lambda _: pd.Series(TEXTS, index=[7, 3]),
    "series of strings": lambda _: pd.Series(TEXTS, dtype="string"),
    "column of a dataset": lambda _: Dataset.from_dict({"text": TEXTS})["text"],
    "column of arrow": lambda _: pa.table({"text": TEXTS})["text"],
    "token ids": lambda t: t(TEXTS)["input_ids"],
    "arrays of token ids": lambda t: [np.array(ids, np.int16) for ids in t(TEXTS)["input_ids"]],
    "tensors of token ids": lambda t: [torch.tensor(ids) for ids in t(TEXTS)["input_ids"]],
    "tensors of one row": lambda t: [t(text, return_tensors="pt")["input_ids"] for text in TEXTS],
    "padded token ids": lambda t: t(TEXTS, padding=True)["input_ids"],
    "padded tensor": lambda t: t(TEXTS, padding=True, return_tensors="pt")["input_ids"],
    "ids padded on the left": lambda t: t(TEXTS, padding=True, padding_side="left")["input_ids"],
    "encoding": lambda t: t(TEXTS),
    "padded encoding": lambda t: t(TEXTS, padding=True),
    "encoding in tensors": lambda t: t(TEXTS, padding=True, return_tensors="pt"),
    "encoding in arrays": lambda t: t(TEXTS, padding="max_length", max_length=20, return_tensors="np"),
    "encoding padded on the left": lambda t: t(TEXTS, padding=True, padding_side="left", return_tensors="pt"),
    "encodings": lambda t: list(map(t, TEXTS)),
    "encodings in tensors": lambda t: [t(text, return_tensors="pt") for text in TEXTS],
    "mapping": lambda t: dict(t(TEXTS, padding=True)),
    "mapping without a mask": lambda t: {"input_ids": t(TEXTS, padding=True)["input_ids"], "attention_mask": None},
    "tokenized dataset": lambda t: Dataset.from_dict({"text": TEXTS} | t(TEXTS, padding=True)),
    "rows of a dataset": lambda t: list(Dataset.from_dict(dict(t(TEXTS, padding=True)))),
    "tokenized data frame": lambda t: pd.DataFrame(dict(t(TEXTS, padding=True))),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_texts_are_measured_alike(
    model: attnmix.Model, tokenizer: Any, tiny_bert: Path, form: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by numpy in `datasets`
        given = FORMS[form](tokenizer)
    result = attnmix.measure(model, given, methods="attn_w")
    own = [dict(tokenizer(text)) for text in TEXTS]
    assert measured_ids(result) == [each["input_ids"] for each in own]
    for ratios, inputs in zip(result.ratios_by_text, own, strict=True):
        np.testing.assert_allclose(ratios.ravel(), attention_ratios(tiny_bert, inputs), atol=1e-5)
    columns = ["text", "position", "token_id", "token", "word", "token_class"]
    pd.testing.assert_frame_equal(result.tokens, attnmix.measure(model, TEXTS).tokens[columns])
    assert result.texts[0] == TEXTS[0]


def test_single_text_is_one_document(model: attnmix.Model, tokenizer: Any) -> None:
    encoding = tokenizer(TEXTS[0])
    ids = encoding["input_ids"]
    for given in (TEXTS[0], np.str_(TEXTS[0]), encoding, ids, tuple(ids), np.array(ids), torch.tensor(ids)):
        assert measured_ids(attnmix.measure(model, given)) == [ids]


@pytest.mark.parametrize("form", ["pairs", "lists", "encoding", "padded", "in tensors"])
def test_pairs_have_tokenizer_segments(model: attnmix.Model, tokenizer: Any, tiny_bert: Path, form: str) -> None:
    sides = tuple(map(list, zip(*PAIRS, strict=True)))
    given = {
        "pairs": PAIRS,
        "lists": list(map(list, PAIRS)),
        "encoding": tokenizer(*sides),
        "padded": tokenizer(*sides, padding=True),
        "in tensors": tokenizer(*sides, padding=True, return_tensors="pt"),
    }[form]
    result = attnmix.measure(model, given, methods=["attn_w"])
    for ratios, pair in zip(result.ratios_by_text, PAIRS, strict=True):
        np.testing.assert_allclose(ratios.ravel(), attention_ratios(tiny_bert, dict(tokenizer(*pair))), atol=1e-5)
    segments = tokenizer(*PAIRS[0])["token_type_ids"]
    assert [max(each, 0) for each in result.documents[0].segments[1:-1].tolist()] == [0, 0, 0, 1, 1, 1]
    assert segments == [0, 0, 0, 0, 1, 1, 1, 1]
    assert result.texts[0] == "\n".join(PAIRS[0])
    eager = AutoModel.from_pretrained(tiny_bert, attn_implementation="eager")
    with torch.inference_mode():
        attention = eager(**tokenizer(*PAIRS[0], return_tensors="pt"), output_attentions=True).attentions
    np.testing.assert_allclose(result.matrix("attention"), torch.stack(attention)[:, 0].mean(1), atol=1e-5)
    assert not model.network._forward_pre_hooks  # the model in memory is unchanged


def test_token_ids_of_a_pair_are_one_segment(model: attnmix.Model, tokenizer: Any, tiny_bert: Path) -> None:
    ids = tokenizer(*PAIRS[0])["input_ids"]
    one_segment = attention_ratios(tiny_bert, {"input_ids": ids})
    two_segments = attention_ratios(tiny_bert, dict(tokenizer(*PAIRS[0])))
    np.testing.assert_allclose(
        attnmix.measure(model, ids, methods=["attn_w"]).ratios_by_text[0].ravel(), one_segment, atol=1e-5
    )
    assert not np.allclose(one_segment, two_segments, atol=1e-3)


def encoded(**inputs: Any) -> dict[str, Any]:
    """Return `inputs` as a dictionary, which is the format of a tokenizer's output."""
    return inputs


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": ([], r"none; allowed: "),
    "missing": (None, r"missing \(None\); allowed: "),
    "not a number": (float("nan"), r"missing \(nan\); allowed: "),
    "number": (3, r"int 3; allowed: "),
    "boolean": (True, r"bool True; allowed: "),
    "bytes": (b"good film", r"bytes b'good film' \(convert them with decode\(\)\); allowed: "),
    "path": (Path("review.txt"), r"the path 'review\.txt' \(load the file with Path\(.*; allowed: "),
    "function": (len, r"builtin_function_or_method .*; allowed: "),
    "set": ({"good film"}, r"a set is not ordered; allowed: "),
    "data frame": (
        pd.DataFrame({"text": TEXTS, "label": [0, 1]}),
        r"a DataFrame .* text, label; select one, .* df\[\"text\"\]$",
    ),
    "empty data frame": (pd.DataFrame(), r"an empty DataFrame; allowed: "),
    "table of arrow": (pa.table({"review": TEXTS}), r"a Table with the columns review; select one, such as "),
    "dataset": (Dataset.from_dict({"text": TEXTS}), r"a Dataset with the columns text; .* dataset\[\"text\"\]$"),
    "mapping": ({"review": TEXTS}, r"a mapping with the keys review; select one, such as texts\[\"review\"\]$"),
    "empty mapping": ({}, r"an empty dict; allowed: "),
    "table with an id": (
        pd.DataFrame({"ticket": ["https://tickets.example/8c1f", "b"], "topic": [1, 2], "message": TEXTS}),
        r"a DataFrame with the columns ticket, topic, message; select one, such as df\[\"message\"\]$",
    ),
    "table with numbers as names": (pd.DataFrame({0: [1, 2], 1: TEXTS}), r".* such as df\[1\]$"),
    "splits": (DatasetDict(train=Dataset.from_dict({"id": ["a", "b"], "t": TEXTS})), r".*texts\[\"train\"\]\[\"t\"\]$"),
    "table without texts": (pd.DataFrame({"label": [0, 1]}), r".* label; pass only the texts; allowed: "),
    "rows": ([{"text": "good film"}], r"number 0 is a mapping with the keys text; select one"),
    "labels": (pd.Series([0, 1]), r"a Series of numbers; allowed: "),
    "labels of a dataset": (Dataset.from_dict({"label": [0, 1]})["label"], r"a Column of numbers; allowed: "),
    "missing text": (pd.Series(["good film", np.nan, "bad film"]), r"number 1 is missing \(nan\); allowed: "),
    "missing string": (pd.Series(["good", None], dtype="string"), r"number 1 is missing \(<NA>\); allowed: "),
    "missing in a list": (["good", "bad", None], r"number 2 is missing \(None\); allowed: "),
    "number among texts": (["good", 3.5], r"number 1 is float 3\.5; allowed: "),
    "bytes among texts": (["good", b"bad"], r"number 1 is bytes b'bad' "),
    "empty text": (["good", " "], r"number 1: the text is empty"),
    "words": ([["the", "film", "was"]], r"number 0 is a list of 3 texts, but a pair has two; allowed: "),
    "text and pair": (["good", ("good", "bad")], r"number 1 is a pair of texts, but number 0 is one text; pass items "),
    "text and ids": (["good", [CLS, TIME, SEP]], r"number 1 is token ids, but number 0 is one text; pass items "),
    "half a pair": ([("good", None)], r"number 0 contains a missing value \(None\); allowed: "),
    "pair with a number": ([("good", 3)], r"number 0 contains int 3; allowed: "),
    "empty half of a pair": ([("good", " ")], r"number 0, the second of the pair: the text is empty"),
    "fractions": ([[2.5, 3.0]], r"number 0 contains float 2\.5; allowed: "),
    "batch in a list": ([np.array([[2, 5, 3], [2, 6, 3]])], r"number 0 contains list \[2, 5, 3\]; allowed: "),
    "no ids": ([[]], r"number 0 is empty; allowed: "),
    "special tokens alone": ([[CLS, SEP]], r"number 0: the text is empty"),
    "padding alone": ([[CLS, TIME, SEP], [PAD, PAD, PAD]], r"number 1: the text is empty"),
    "padding between tokens": ([[CLS, PAD, TIME, SEP]], r"number 0 contains \[PAD\], the padding token, as token 1; "),
    "id above the vocabulary": (
        [[CLS, TIME, SEP], [CLS, 10**6, SEP]],
        r"number 1 contains the token id 1000000; allowed: 0 ",
    ),
    "id below 0": ([CLS, -100, SEP], r"number 0 contains the token id -100; allowed: 0 to "),
    "ids longer than the model": ([CLS, *[TIME] * 70, SEP], r"number 0 has 72 token ids; allowed: at most 64"),
    "mask of another shape": (encoded(input_ids=[2, 5, 3], attention_mask=[1, 1]), "attention_mask and input_ids "),
    "mask of nothing": (encoded(input_ids=[2, 5, 3], attention_mask=[0, 0, 0]), r"attention_mask is 0 for all "),
    "mask with a hole": (encoded(input_ids=[2, 5, 3], attention_mask=[1, 0, 1]), r"attention_mask is 0 within the "),
    "mask with weights": (encoded(input_ids=[2, 5, 3], attention_mask=[1, 2, 1]), r"attention_mask contains 2; "),
    "mask of a square": (
        encoded(input_ids=[[2, 5, 3]], attention_mask=np.ones((1, 3, 3))),
        r"attention_mask, number 0",
    ),
    "ids that are no numbers": (encoded(input_ids=["time"]), r"input_ids, number 0: not whole numbers; pass "),
    "encoding of nothing": (encoded(input_ids=[]), r"input_ids is empty; allowed: "),
    "other inputs": (encoded(input_ids=[2, 5, 3], position_ids=[4, 5, 6]), r"position_ids is not supported; "),
    "batch among encodings": ([encoded(input_ids=[[2, 5, 3], [2, 6, 3]])], r"number 0 contains 2 texts; pass one"),
    "other segments": (
        encoded(input_ids=[2, 5, 3, 6, 3], token_type_ids=[0, 1, 1, 1, 1]),
        r"number 0: its token_type_",
    ),
    "third segment": (encoded(input_ids=[2, 5, 3], token_type_ids=[0, 0, 2]), r"number 0: token_type_ids contains 2; "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_texts_are_one_error(model: attnmix.Model, name: str, tmp_path: Path) -> None:
    given, message = REFUSED[name]
    for call in (lambda: attnmix.measure(model, given), lambda: attnmix.capture(model, given, tmp_path / "run")):
        with pytest.raises(InputError, match=rf"^texts: {message}") as raised:
            call()
        assert len(str(raised.value)) < 300
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_token_id_outside_tokenizer_is_one_error(tmp_path: Path) -> None:
    model = attnmix.load(write_family("bert", tmp_path))
    first = len(model.tokenizer)  # the family's embedding has further rows
    with pytest.raises(
        InputError, match=rf"^texts: number 0 contains the token id {first}; allowed: ids of the tokeni"
    ):
        attnmix.measure(model, [CLS, first, SEP])
    model.tokenizer.add_tokens(["covid19", "covid20", "covid21", "covid22"])
    with pytest.raises(InputError, match=rf"^texts: number 1: the tokenizer returned the token ID {first + 3}, but"):
        attnmix.measure(model, ["time flies", "time covid22"])


def test_files_and_models_are_not_texts(model: attnmix.Model, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+") as file, pytest.raises(InputError, match=r"^texts: an open file \(load"):
        attnmix.measure(model, file)
    with pytest.raises(InputError, match=r"^texts: Model Model\(.*; allowed: "):
        attnmix.measure(model, model)
    (tmp_path / "reviews.csv").write_text("text\na film\n")
    with pytest.raises(InputError, match=r"^texts: .*reviews\.csv is a file; pass its texts, "):
        attnmix.measure(model, str(tmp_path / "reviews.csv"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: attnmix.measure("good film", m), r"^model: got str; allowed: .* as in measure\(model, texts\)$"),
        (
            lambda m: attnmix.measure(m.network, "good film"),
            r"^model: got BertModel; allowed: the result of load\(\.\.\.\)",
        ),
        (
            lambda m: attnmix.capture("good film", m, "run"),
            r"^model: got str; allowed: .* capture\(model, texts, path\)$",
        ),
        (lambda m: attnmix.capture(m, "run", TEXTS), r"^path: list is not .* as in capture\(model, texts, path\)$"),
        (
            lambda m: attnmix.measure(m, "good film").to_html(None),
            r"^path: NoneType is not a path; .* as in to_html\(path\)$",
        ),
        (lambda m: attnmix.compare(m, m), r"^texts: missing; call compare\(before, after, texts\), "),
        (lambda m: attnmix.compare(m, ["good film"]), r"^texts: missing; call compare\(before, after, texts\), "),
        (
            lambda m: attnmix.compare(m, ["good film " * 50]),
            r"^compare: 'good film .* is not a path \(File name too long",
        ),
        *(
            (lambda m, n=n: attnmix.measure(m, "good film", max_length=n), rf"^max_length: {n}")
            for n in (0, 1, 2, 3.0, 65)
        ),
        (lambda m: attnmix.measure(m, "good film", max_length="5"), r"^max_length: '5' is not allowed: "),
        (
            lambda m: attnmix.capture(m, "good film", "run", max_length=2),
            r"^max_length: 2 is not allowed: .* equal to 3$",
        ),
        (
            lambda m: attnmix.measure(m, "good film", methods="attn"),
            r"^methods\[0\]: 'attn' is not allowed: .*: attn_w",
        ),
        (lambda m: attnmix.measure(m, "good film", methods=[]), r"^methods: \[\] is not allowed: "),
        (lambda m: attnmix.measure(m, "good film", methods=["attn_w"] * 2), r"^methods: .* more than once$"),
        (lambda m: attnmix.measure(m, "good film", methods=3), r"^methods: 3 is not allowed: "),
        (lambda m: attnmix.capture(m, "good film", "run", points="output"), r"^points\[0\]: 'output' is not allowed: "),
        (lambda m: attnmix.capture(m, "good film", "run", points=[]), r"^points: \[\] is not allowed: "),
        (
            lambda m: attnmix.capture(m, "good film", "run", dtype="float64"),
            r"^dtype: 'float64' .*'float16' or 'float32'$",
        ),
        (
            lambda m: attnmix.capture(m, "good film", "run", dtype=torch.float16),
            r"^dtype: torch\.float16 is not allowed: ",
        ),
        *(
            (
                lambda m, layer=layer: attnmix.measure(m, "good film").matrix("alti", layer),
                r"^layer: .*; allowed: 1 to 3$",
            )
            for layer in (0, 4, -1, 1.5, "1", True)
        ),
        *(
            (
                lambda m, text=text: attnmix.measure(m, "good film").matrix("alti", 1, text),
                r"^text: .*; allowed: 0 to 0$",
            )
            for text in (1, -1, "0", None, 0.5)
        ),
        (lambda m: attnmix.measure(m, "good film").matrix(["alti"]), r"^matrix: \['alti'\]; allowed: attention, "),
    ],
)
def test_arguments_are_validated_like_parameters(
    model: attnmix.Model, call: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        call(model)
    assert list(tmp_path.iterdir()) == []


def test_single_name_equals_list_of_one(model: attnmix.Model, tmp_path: Path) -> None:
    result = attnmix.measure(model, TEXTS, methods="attn_n", max_length=np.int64(64))
    assert list(result.methods) == ["attn_n"]
    run = attnmix.capture(model, TEXTS, tmp_path / "run", points="layer_output")
    assert {site.point for site in run.sites} == {"layer_output"}
    assert result.matrix("alti", np.int64(2), np.int64(1)).sizes["token"] == len(result.documents[1])


def test_padding_with_end_token_needs_mask(tmp_path: Path) -> None:
    folder = write_family("gpt2", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    model = attnmix.load(AutoModel.from_pretrained(folder), tokenizer)
    end, (long, short) = tokenizer.eos_token_id, tokenizer(["the film was", "the"])["input_ids"]
    alone = r"^texts: number 1 has <\|endoftext\|> at one end, .*; pass .* with its attention_mask$"
    for side in ("left", "right"):
        encoding = tokenizer(["the film was", "the"], padding=True, padding_side=side)
        assert measured_ids(attnmix.measure(model, encoding)) == [long, short]
        with pytest.raises(InputError, match=alone):
            attnmix.measure(model, encoding["input_ids"])
    with pytest.raises(InputError, match=alone):
        attnmix.measure(model, [long, [*long[:-1], end]])  # equal lengths, but only one ends with this token
    # Texts with one end token, and texts joined by an end token, are valid.
    for given in ([[*long, end]], [[*long, end], [*short, end]], [[end, *long]], [[*long, end, *short]]):
        assert measured_ids(attnmix.measure(model, given)) == given
    masked = {"input_ids": [*short, end, end, end], "attention_mask": [1] * (len(short) + 1) + [0, 0]}
    assert measured_ids(attnmix.measure(model, masked)) == [[*short, end]]


def page_of(path: Path) -> dict[str, Any]:
    """Return the data of a page."""
    (packed,) = re.findall(r'<script[^>]*id="data"[^>]*>([^<]*)<', path.read_text(encoding="utf-8"))
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return data


def page_tokens(path: Path) -> list[list[str]]:
    """Return the names of the tokens of each text on a page."""
    data = page_of(path)
    names = data["readings"][0]["names"]
    return [names[each["start"] : each["start"] + each["length"]] for each in data["documents"]]


@pytest.fixture
def quick_maps() -> Iterator[None]:
    with without_umap():
        yield


def check_token_ids(
    model: attnmix.Model, given: Any, ids: list[list[int]], folder: Path, has_page: bool = True, **options: Any
) -> Any:
    """Assert that measures, vectors and the page use these token IDs, and return the measures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # warnings of truncated texts
        result = attnmix.measure(model, given, **options)
        run = attnmix.capture(
            model, given, folder / "run", points=["word_embedding", "layer_output"], dtype="float32", **options
        )
    assert measured_ids(result) == ids
    whole = [number for text in ids for number in text]
    assert run.tokens["token_id"].tolist() == whole
    rows = model.network.get_input_embeddings()(torch.tensor(whole)).detach()
    np.testing.assert_allclose(run.features("word_embedding").numpy()[0], rows, rtol=1e-6)
    if has_page:
        by_document = result.tokenized.tokens.groupby("document", sort=False)["label"]
        labels = [labels_of_text.tolist() for _, labels_of_text in by_document]
        assert page_tokens(result.to_html(folder / "page.html")) == labels
    return result


@pytest.mark.usefixtures("quick_maps")
def test_special_names_are_tokens_for_models_in_memory(model: attnmix.Model, tokenizer: Any, tmp_path: Path) -> None:
    ids = tokenizer(MASKED)["input_ids"]
    result = check_token_ids(model, MASKED, [ids], tmp_path)
    assert result.tokens["token"].tolist() == ["[CLS]", "time", "[MASK]", "like", "an", "arrow", "[SEP]"]
    with pytest.raises(InputError, match=r"^texts: number 1 contains \[PAD\], the padding token, as token 2; "):
        attnmix.measure(model, ["time", "time [PAD] like"])


def test_special_names_are_text_for_named_models(tiny_bert: Path, tmp_path: Path) -> None:
    result = attnmix.measure(attnmix.load(tiny_bert), MASKED)
    assert "[MASK]" not in result.tokens["token"].tolist()
    run = attnmix.capture(result.model, MASKED, tmp_path / "run")
    served = tokenized([MASKED], load_measurer({"pretrained": tiny_bert}))
    for tokens in (run.tokens, served.tokens):
        assert tokens["token_id"].tolist() == result.tokens["token_id"].tolist()
    np.testing.assert_array_equal(served.tokens["word"], result.tokens["word"])


@pytest.mark.usefixtures("quick_maps")
@pytest.mark.parametrize("given", ["ids", "encoding", "pair"])
def test_token_ids_are_decoded_for_vectors_and_page(
    model: attnmix.Model, tokenizer: Any, tmp_path: Path, given: str
) -> None:
    encoding = tokenizer(*PAIRS[0]) if given == "pair" else tokenizer(TEXTS[0])
    ids = encoding["input_ids"]
    result = check_token_ids(model, ids if given == "ids" else encoding, [ids], tmp_path)
    text = "\n".join(PAIRS[0]) if given == "pair" else TEXTS[0]
    assert attnmix.open_run(tmp_path / "run").texts == {"text/0": text}
    assert result.texts == [text]
    # The page recomputes its numbers from the saved text.
    values = page_of(tmp_path / "page.html")["curves"]["attn_n"]["pretrained"]["values"]
    assert values == pytest.approx(result.by_layer().query("method == 'attn_n'")["mean"].tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "xlm-roberta"])
def test_token_ids_are_decoded_for_every_tokenizer(name: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_family(name, tmp_path))
    for text in ("the film was very good , the plot", "caf\u00e9 \u6771\u4eac \U0001f600 the", "a", "the  film\nwas"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        spelled, spans = spell(tokenizer, ids)
        assert len(spans) == len(ids)
        assert all(0 <= start <= end <= len(spelled) for start, end in spans)
        assert spelled == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        for span in dict.fromkeys(spans):
            first, count = spans.index(span), spans.count(span)
            alone = tokenizer.decode(ids[first : first + count], clean_up_tokenization_spaces=False)
            assert spelled[slice(*span)].strip() == alone.removeprefix("##").strip()


def test_texts_are_validated_without_model() -> None:
    assert read_texts("time") == ["time"]
    assert read_texts([("time", "flies"), ["like", "an arrow"]]) == [("time", "flies"), ("like", "an arrow")]
    with pytest.raises(InputError, match=r"^reviews: number 1 is missing \(None\)"):
        read_texts(["time", None], "reviews")


@pytest.fixture(scope="module", params=each_family("gpt2"))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> attnmix.Model:
    """Return a model of each family; its tokenizer has a padding token and truncates on the left."""
    folder = write_family(request.param, tmp_path_factory.mktemp(request.param))
    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return attnmix.load(AutoModel.from_pretrained(folder), tokenizer)


@pytest.fixture(scope="module")
def has_page(family: attnmix.Model) -> bool:
    """Return True for one family per kind of tokenizer; pages depend on no other property of a family."""
    return family.network.config.model_type in one_of_each_tokenizer()


@pytest.mark.usefixtures("quick_maps")
def test_families_tokenise_special_and_truncated_texts_consistently(
    family: attnmix.Model, has_page: bool, tmp_path: Path
) -> None:
    tokenizer = family.tokenizer
    shared = {tokenizer.cls_token, tokenizer.sep_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token}
    padding = {tokenizer.pad_token} - shared
    texts = [f"time {name} like" for name in tokenizer.all_special_tokens if name not in padding]
    texts += ["the film was very good , the plot was not so dull"]
    ids = tokenizer(texts, truncation=True, max_length=12)["input_ids"]
    assert ids[-1][-3:] == tokenizer(texts[-1])["input_ids"][-3:]
    check_token_ids(family, texts, ids, tmp_path, has_page, max_length=12)


@pytest.mark.usefixtures("quick_maps")
def test_families_tokenise_pairs_consistently(family: attnmix.Model, has_page: bool, tmp_path: Path) -> None:
    tokenizer = family.tokenizer
    ids = [tokenizer(*pair)["input_ids"] for pair in PAIRS]
    result = check_token_ids(family, PAIRS, ids, tmp_path, has_page)
    sides = tuple(map(list, zip(*PAIRS, strict=True)))
    padded = attnmix.measure(family, tokenizer(*sides, padding=True, return_tensors="pt"))
    assert measured_ids(padded) == ids
    for one, other in zip(result.ratios_by_text, padded.ratios_by_text, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    # The vectors after the first layer depend on all inputs from the tokenizer.
    vectors = attnmix.open_run(tmp_path / "run").features("layer_output", layers=[1]).numpy()[0]
    starts = np.cumsum([0, *map(len, ids)])
    for start, end, pair in zip(starts, starts[1:], PAIRS, strict=False):
        with family.observed() as base, torch.inference_mode():
            states = base(**tokenizer(*pair, return_tensors="pt"), output_hidden_states=True)
        hidden = states.encoder_hidden_states if base.config.is_encoder_decoder else states.hidden_states
        np.testing.assert_allclose(vectors[start:end], hidden[1][0], rtol=1e-4, atol=1e-4)


def test_families_ignore_padding(family: attnmix.Model) -> None:
    tokenizer = family.tokenizer
    texts = ["the film was good , time flies like an arrow", "time"]
    ids = tokenizer(texts)["input_ids"]
    expected = attnmix.measure(family, texts)
    for side in ("left", "right"):
        encoding = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
        result = attnmix.measure(family, encoding)
        assert measured_ids(result) == ids
        for one, other in zip(result.ratios_by_text, expected.ratios_by_text, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
        roles = ("eos", "bos", "sep", "cls", "unk")
        if tokenizer.pad_token_id in {getattr(tokenizer, f"{role}_token_id") for role in roles}:
            with pytest.raises(InputError, match=r"^texts: number 1 has .* with its attention_mask$"):
                attnmix.measure(family, encoding["input_ids"])
        else:
            assert measured_ids(attnmix.measure(family, encoding["input_ids"])) == ids
