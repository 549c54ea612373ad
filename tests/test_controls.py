"""What the controls change of a document, and their tables; what they are of a layer stands in `test_families.py`."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import tokenized_documents
from families import make_tokenizer

from attnmix.core.statistics import Draws
from attnmix.measures.controls import shuffled_words
from attnmix.measures.documents import CLASSES, Document
from attnmix.measures.tables import COLUMNS, Blocks, Mean, below, mean_tables, no_columns, resample_checkpoints
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
    assert (shuffled.name, shuffled.counted, shuffled.captured) == (document.name, document.counted, document.captured)


def test_the_order_follows_from_seed_and_name_in_every_process() -> None:
    ids = np.arange(8, dtype=np.int32)
    plain = Document("test/0", ids, np.zeros(8, np.int8), 8, captured=False, words=np.arange(8, dtype=np.int32))
    orders = {
        (name, seed): shuffled_words(replace(plain, name=name), seed).ids.tolist()
        for name, seed in product(("test/0", "test/1"), (0, 1))
    }
    assert len(set(map(tuple, orders.values()))) == 4
    assert orders["test/0", 0] == [7, 0, 4, 6, 3, 2, 1, 5]


def test_tables_are_means_over_tokens_and_differences_of_the_same_documents() -> None:
    generator = np.random.default_rng(0)
    counts, methods = np.array([3, 9, 5, 4, 12]), ["attn_w", "attn_n"]
    cells = counts[:, None, None].astype(float)
    ratios = {name: generator.uniform(size=(5, 2, 2)) * cells for name in ("pretrained", "finetuned")}
    # One control is the ratio but for a constant: paired, its excess is that constant in every sample.
    controls = {
        name: {"shuffled_words": generator.uniform(size=(5, 2, 2)) * cells, "text_mean_value": each - 0.25 * cells}
        for name, each in ratios.items()
    }
    controls["random"] = {"random_weights": generator.uniform(size=(5, 2, 2)) * cells}
    blocks: dict[str, Blocks] = {
        name: lambda name=name: [(controls[name] | {"ratios": ratios.get(name)}).__getitem__] for name in controls
    }
    labels = {"layer": [1, 2], "method": methods}

    def mean(name: str, table: str, names: tuple[str, ...] = (), below: Any = no_columns) -> Mean:
        return Mean(table, {"control": [name]} | labels, lambda block: (block(name), cells), names, below)

    with io.BytesIO() as file:
        draws = Draws([5], 300, 7, file)
        true = resample_checkpoints(mean("ratios", "mixing"), blocks, draws)
        declared = [mean(name, "mixing_controls", (), partial(below, true)) for name in controls["pretrained"]]
        declared.append(mean("random_weights", "mixing_controls", ("random",), partial(below, true)))
        table = mean_tables(declared, blocks, draws)["mixing_controls"]
    assert tuple(table) == COLUMNS["mixing_controls"]
    assert len(table) == 7 * 4
    assert set(table["tokens"]) == {33}
    assert set(table["documents"]) == {5}
    table = table.set_index(["checkpoint", "control", "layer", "method"]).sort_index()
    assert table.loc["random", "below"].isna().all()
    for (checkpoint, by_control), (place, layer), (number, method) in product(
        controls.items(), enumerate((1, 2)), enumerate(methods)
    ):
        for control, sums in by_control.items():
            row = table.loc[(checkpoint, control, layer, method)]
            expected = sums[:, place, number].sum() / 33
            assert row["mean"] == pytest.approx(expected)
            assert row["ci_low"] < expected < row["ci_high"]
            if checkpoint != "random":
                assert row["below"] == pytest.approx(ratios[checkpoint][:, place, number].sum() / 33 - expected)
    for checkpoint, expected in (("pretrained", 0.25), ("finetuned", 0.25), ("difference", 0.0)):
        rows = table.loc[(checkpoint, "text_mean_value"), ["below", "below_low", "below_high"]]
        np.testing.assert_allclose(rows.to_numpy(float), expected, atol=1e-12)
    rise = table.loc[("difference", "shuffled_words", 2, "attn_n"), "mean"]
    before, after = (controls[name]["shuffled_words"][:, 1, 1].sum() / 33 for name in ("pretrained", "finetuned"))
    assert rise == pytest.approx(after - before)
