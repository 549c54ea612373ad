"""Relevance scores find the decisive word that was planted in a text (pointing game); random scores do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from attnmix.core.errors import InputError
from validation import planted_words
from validation.planted_words import FIRST_DECISIVE, draw_text, pointing_table, write_classifier

TEXTS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("planted_words"), 0)


def test_trained_model_reads_the_decisive_word(folder: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    generator = np.random.default_rng(7)
    for _ in range(TEXTS):
        ids, place = draw_text(generator)
        is_decisive = [FIRST_DECISIVE <= token < FIRST_DECISIVE + 2 for token in ids]
        assert np.flatnonzero(is_decisive).tolist() == [place]
        logits_C = model(torch.tensor([ids])).logits[0]
        assert int(logits_C.argmax()) == ids[place] - FIRST_DECISIVE


def test_relevance_finds_decisive_word(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_words, "TEXTS", TEXTS)
    table = pointing_table(folder, 0).set_index("score")
    assert (table["texts"] == TEXTS).all()
    assert table.loc[["decompx", "attnlrp", "leave_one_out"], "hits"].min() > 0.9
    assert table.loc["random", "hits"] < 0.4
    committed = pd.read_csv(Path(__file__).parents[1] / "docs/measures/planted_words.csv").set_index("score")
    assert committed.index.equals(table.index)
    assert committed.loc[["decompx", "attnlrp", "leave_one_out"], "hits"].min() > 0.9


def test_failed_training_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_words, "MAX_STEPS", 1)
    message = r"^seed: the loss is 0\.\d+ after 1 steps, not below 0.01; try a different seed$"
    with pytest.raises(InputError, match=message):
        write_classifier(tmp_path, 0)
