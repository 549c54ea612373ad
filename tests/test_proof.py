"""What `download` refuses of a model that cannot read the reviews, before anything long begins."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import WORDS, Workspace, toy_reviews
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from attnmix.core.errors import InputError
from attnmix.models.loading import load_base, load_tokenizer
from stages import download
from stages.common.parameters import read_parameters


@pytest.fixture
def own(workspace: Workspace, tiny_bert: Path) -> Path:
    """A model's folder that can be changed, in a working folder whose parameters name it and some reviews."""
    folder = workspace(dataset={"name": "reviews.csv"}, model={"name": "own"})
    toy_reviews(40, 0).to_csv("reviews.csv", index=False)
    shutil.copytree(tiny_bert, folder / "own")
    return folder / "own"


def add_token(folder: Path, special: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<image>"], special_tokens=special)
    tokenizer.save_pretrained(folder)


def break_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["bert.encoder.layer.1.output.dense.bias"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def know_other_words(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    for number, word in enumerate(WORDS):
        text = text.replace(f'"{word}":', f'"strange{number}":')
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda folder: add_token(folder, special=False),
            rf"the tokenizer of own knows 1 tokens that the embedding of {len(WORDS) + 5} rows does not have, the "
            rf"first '<image>' with the number {len(WORDS) + 5}; take the tokenizer of these weights",
        ),
        (break_weights, r"own gives NaN or infinite values for a review; its weights are broken"),
        (
            know_other_words,
            r"the vocabulary of own has no token for 100\.0 % of the words of 6 reviews, such as 'the', '\w+', '\w+'; "
            r"allowed: half",
        ),
    ],
)
def test_a_model_that_cannot_read_the_reviews_is_one_error(
    own: Path, change: Callable[[Path], None], expected: str
) -> None:
    change(own)
    with pytest.raises(InputError, match=rf"^model\.name: {expected}"):
        download.main(read_parameters())


def test_a_special_token_without_a_row_is_none_that_a_text_gives(own: Path) -> None:
    add_token(own, special=True)
    download.main(read_parameters())
    ids = load_tokenizer(own)("the film was <image> good .", return_tensors="pt")["input_ids"]
    rows = load_base(own).get_input_embeddings().num_embeddings
    assert len(load_tokenizer(own)) == rows + 1
    assert int(ids.max()) < rows


@pytest.mark.usefixtures("own")
def test_how_many_words_are_unknown_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    download.main(read_parameters())
    words = " ".join(pd.read_parquet("data/reviews/test.parquet")["text"]).replace(".", "").split()
    unknown = [word for word in words if word not in WORDS]
    said = f"unknown to the model's tokenizer: {100 * len(unknown) / len(words):.1f} % of the words of 6"
    assert [record for record in caplog.records if record.getMessage().startswith(said)]
