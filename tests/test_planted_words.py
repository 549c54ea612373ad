"""The pointing game: scores that follow the class find the decisive word, those that do not are near chance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from transformers import AutoModelForSequenceClassification

from attnmix.core.errors import InputError
from validation import planted_words
from validation.planted_words import FIRST_DECISIVE, draw_text, main, write_classifier


def test_a_text_has_one_decisive_word_which_the_trained_model_reads(tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(write_classifier(tmp_path, 0)).eval()
    generator = np.random.default_rng(7)
    for _ in range(20):
        ids, place = draw_text(generator)
        is_decisive = [FIRST_DECISIVE <= token < FIRST_DECISIVE + 2 for token in ids]
        assert np.flatnonzero(is_decisive).tolist() == [place]
        logits_C = model(model.dummy_inputs["input_ids"].new_tensor([ids])).logits[0]
        assert int(logits_C.argmax()) == ids[place] - FIRST_DECISIVE


def test_relevance_finds_the_decisive_word(tmp_path: Path) -> None:
    assert main(["--to", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "planted_words.csv").set_index("score")
    hits = table["hits"]
    assert (table["texts"] == planted_words.TEXTS).all()
    assert hits[["decompx", "attnlrp", "leave_one_out"]].min() > 0.9
    assert hits["random"] < 0.3
    committed = pd.read_csv(Path(__file__).parents[1] / "docs/study/planted_words.csv").set_index("score")
    assert committed.index.equals(table.index)
    np.testing.assert_allclose(committed["hits"], hits, atol=0.1)


def test_a_model_that_does_not_learn_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_words, "MAX_STEPS", 1)
    with pytest.raises(
        InputError, match=r"^seed: the loss is 0\.\d+ after 1 steps; allowed: a seed that reaches 0.01$"
    ):
        write_classifier(tmp_path, 0)
