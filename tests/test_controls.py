"""Shuffled words, and the tables of controls; `test_families.py` computes what they are of a layer."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import plain_document, tokenized_documents
from families import make_tokenizer

from attnmix.core.statistics import Draws
from attnmix.measures.controls import shuffled_words
from attnmix.measures.documents import CLASSES, Document
from attnmix.measures.tables import COLUMNS, Mean, below, mean_tables, resample_checkpoints
from attnmix.models.loading import load_tokenizer

TEXT = "Unforgettably good, isn't it? A film about forgetfulness and unforgettable endings."


@pytest.fixture
def document(default_weights: Path) -> Document:
    (found,) = tokenized_documents(load_tokenizer(default_weights), {"test/0": TEXT}, 60)
    return found


def test_words_are_numbered_from_the_first(document: Document, default_weights: Path) -> None:
    tokenizer = load_tokenizer(default_weights)
    assert document.words.dtype == np.int32
    special = np.isin(document.classes, [CLASSES.index("cls"), CLASSES.index("sep")])
    np.testing.assert_array_equal(document.words < 0, special)
    found = [
        tokenizer.decode(document.ids[document.words == number].tolist())
        for number in range(int(document.words.max()) + 1)
    ]
    expected = "unforgettably good , isn ' t it ? a film about forgetfulness and unforgettable endings ."
    assert found == expected.split(" ")


@pytest.mark.parametrize("text", [" film was good", "film was good", ". film was"])
def test_the_first_word_is_number_0_whatever_it_begins_with(text: str) -> None:
    (found,) = tokenized_documents(make_tokenizer("gpt2"), {"test/0": text}, 60)
    numbers = found.words[found.words >= 0]
    assert np.unique(numbers).tolist() == [0, 1, 2]
    assert (np.diff(numbers) >= 0).all()


def test_shuffled_words_stay_whole_and_specials_in_place(document: Document) -> None:
    shuffled = shuffled_words(document, 111)
    special = document.words < 0
    for before, after in ((document.ids, shuffled.ids), (document.words, shuffled.words)):
        np.testing.assert_array_equal(after[special], before[special])
        np.testing.assert_array_equal(np.sort(after), np.sort(before))
    assert (shuffled.ids != document.ids).sum() > len(document) / 2
    changes = np.flatnonzero(np.diff(shuffled.words[~special]))
    words = int(document.words.max()) + 1
    assert len(changes) == words - 1  # each word is one stretch
    for number in range(words):
        here, there = document.words == number, shuffled.words == number
        np.testing.assert_array_equal(shuffled.ids[there], document.ids[here])
        np.testing.assert_array_equal(shuffled.classes[there], document.classes[here])
    assert (shuffled.name, shuffled.measured) == (document.name, document.measured)


def test_the_order_follows_from_seed_and_name_in_every_process() -> None:
    plain = plain_document(range(8))
    orders = {
        (name, seed): shuffled_words(replace(plain, name=name), seed).ids.tolist()
        for name, seed in product(("test/0", "test/1"), (0, 1))
    }
    assert len(set(map(tuple, orders.values()))) == 4
    assert orders["test/0", 0] == [7, 0, 4, 6, 3, 2, 1, 5]


def test_tables_of_controls_are_means_over_tokens_and_differences_of_the_same_documents() -> None:
    generator = np.random.default_rng(0)
    cells = np.array([3.0, 9, 5, 4, 12])[:, None, None]
    labels = {"layer": [1, 2], "method": ["attn_w", "attn_n"]}
    sums = {name: generator.uniform(size=(5, 2, 2)) * cells for name in ("pretrained", "finetuned", "random")}
    # A control that is the ratio but for a constant: paired, its excess is that constant in every sample.
    blocks: dict[str, Any] = {
        name: lambda each=each: [{"ratios": each, "control": each - 0.25 * cells}.__getitem__]
        for name, each in sums.items()
    }

    def mean(table: str, name: str, more: Any = None) -> Mean:
        return Mean(table, {"control": [name]} | labels, lambda block: (block(name), cells), more=more)

    with io.BytesIO() as file:
        draws = Draws([5], 300, 7, file)
        true = resample_checkpoints(mean("mixing", "ratios"), blocks, draws)
        means = [mean("mixing_controls", "control", partial(below, true))]
        means.append(means[0]._replace(checkpoints=("random",)))
        table = mean_tables(means, blocks, draws)["mixing_controls"]
    assert tuple(table) == COLUMNS["mixing_controls"]
    assert len(table) == 4 * 4
    assert (set(table["tokens"]), set(table["documents"])) == ({33}, {5})
    table = table.set_index(["checkpoint", "layer", "method"]).sort_index()
    assert table.loc["random", "below"].isna().all()
    expected = {name: each.sum(0).ravel() / 33 - 0.25 for name, each in sums.items()}
    expected["difference"] = expected["finetuned"] - expected["pretrained"]
    for name, means_of_cells in expected.items():
        rows = table.loc[list(product([name], *labels.values()))]
        np.testing.assert_allclose(rows["mean"].to_numpy(float), means_of_cells)
        assert (rows["ci_low"] < rows["mean"]).all()
        assert (rows["mean"] < rows["ci_high"]).all()
        if name != "random":
            constant = 0 if name == "difference" else 0.25
            excess = rows[["below", "below_low", "below_high"]].to_numpy(float)
            np.testing.assert_allclose(excess, constant, atol=1e-12)
