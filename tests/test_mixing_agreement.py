"""Every measure of mixing agrees with an independent float64 computation by explicit per-head sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import tokenized_documents
from family_reference import run_reference

from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.documents import Document
from attnmix.measures.matrices import LAYER_MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.measures.whole_document import DocumentMeasurer
from attnmix.models.loading import load_base, load_tokenizer

SENTENCES = [
    "the film was very good and time flies like an arrow .",
    "it was not so dull , but the plot was awful !",
    "the music is lovely",
]


def documents_of(tokenizer: Any, texts: list[str], max_length: int = 64) -> list[Document]:
    named = {f"text/{number}": text for number, text in enumerate(texts)}
    return tokenized_documents(tokenizer, named, max_length)


def rolled(matrices: list[Any]) -> list[Any]:
    found = [matrices[0]]
    for matrix in matrices[1:]:
        found.append(matrix @ found[-1])
    return found


def agrees(base: Any, folder: Path, documents: list[Document]) -> None:
    measurer = BatchMeasurer(base, folder, list(RATIOS), base.config.pad_token_id)
    measured = list(measurer.measures(documents))
    single = DocumentMeasurer(base, folder, list(RATIOS), list(LAYER_MATRICES))
    for document, measures in zip(documents, measured, strict=True):
        layers = run_reference(base.config.model_type, base, document.ids.tolist()).layers
        found = single.contributions(document.ids)
        expected: dict[str, list[Any]] = {}
        for number, layer in enumerate(layers):
            ratios = layer.ratios()
            expected_ratios = np.stack([ratios[method] for method in RATIOS])
            np.testing.assert_allclose(measures.ratios[:, number], expected_ratios, atol=1e-5, rtol=0)
            for method, matrix in layer.contributions().items():
                expected.setdefault(method, []).append(matrix)
        for method in ("value_zeroing", "alti", "globenc"):
            expected[f"{method}_rollout"] = rolled(expected[method])
        half = [(matrix + np.eye(len(matrix))) / 2 for matrix in expected["attention"]]
        expected["attention_rollout"] = rolled(half)
        assert set(found) == set(expected)
        trusted = np.stack([layer.value_zeroing().sum(-1) for layer in layers]) >= 1e-4
        for method, matrices in expected.items():
            array, wanted = found[method].numpy(), np.stack(matrices)
            if method == "value_zeroing":
                assert np.isnan(array[~trusted]).all()
                array, wanted = array[trusted], wanted[trusted]
            np.testing.assert_allclose(array, wanted, atol=1e-5, rtol=1e-5, err_msg=method)


def test_all_measures_on_a_random_bert_with_biases(tiny_bert: Path) -> None:
    agrees(load_base(tiny_bert), tiny_bert, documents_of(load_tokenizer(tiny_bert), SENTENCES))


def test_all_measures_on_the_default_model_with_real_reviews(default_weights: Path, imdb_folder: Path) -> None:
    files = sorted(imdb_folder.rglob("test*.parquet"))
    texts = pd.read_parquet(files[0])["text"].iloc[[0, -1]].tolist()
    base = load_base(default_weights)
    agrees(base, default_weights, documents_of(load_tokenizer(default_weights), texts, max_length=48))


def test_all_measures_on_the_default_model(default_weights: Path) -> None:
    text = "Time flies like an arrow; fruit flies like bananas, and unforgettably so."
    base = load_base(default_weights)
    agrees(base, default_weights, documents_of(load_tokenizer(default_weights), [text]))


def test_the_data_free_gain_is_the_root_mean_square_scale_of_random_vectors(tiny_bert: Path) -> None:
    base = load_base(tiny_bert)
    attention = base.encoder.layer[1].attention
    z = torch.randn(100_000, 25, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # [x, 1] scaled as a whole: the constant's column is a random number too.
        mapped = attention.output.dense(attention.self.value(z[:, :-1]))
        constant = attention.output.dense(attention.self.value(torch.zeros(1, 24)))
        mapped = mapped + (z[:, -1:] - 1) * constant
    expected = float((mapped.square().sum() / z.square().sum()).sqrt())
    gains = DocumentMeasurer(base, tiny_bert, [], []).gains()
    assert gains[1] == pytest.approx(expected, rel=0.01)
