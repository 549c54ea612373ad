"""Units of rows hold the model's own features, whenever they are written; errors come out, and no unit is half done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnmix.core.errors import InputError
from attnmix.core.points import Site
from attnmix.models.capture_points import widths
from attnmix.models.feature_writer import Batch, FeatureWriter, Part
from attnmix.models.loading import load_classifier
from attnmix.store.features import check_fits

POINTS = ["embedding_output", "attention_heads", "layer_output"]
UNITS = 3
LENGTHS = (5, 9, 9, 3)
TOKENS = sum(LENGTHS)


def units() -> list[list[Batch]]:
    """Two batches for each unit of rows; their texts are padded and go into the rows in another order."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(UNITS):
        starts = np.cumsum([0, *LENGTHS])
        batches = []
        for texts in ((0, 3), (2, 1)):
            ids = torch.randint(5, 20, (2, max(LENGTHS[i] for i in texts)), generator=generator)
            mask = torch.tensor([[int(place < LENGTHS[i]) for place in range(ids.shape[1])] for i in texts])
            parts = [Part(number, slice(0, LENGTHS[i]), int(starts[i])) for number, i in enumerate(texts)]
            batches.append(Batch({"input_ids": ids * mask, "attention_mask": mask}, parts))
        made.append(batches)
    return made


def expected(base: Any) -> dict[Site, Any]:
    """By the model's own hidden states, text by text."""
    rows: dict[Site, Any] = {}
    for unit, batches in enumerate(units()):
        for batch in batches:
            for part in batch.parts:
                with torch.no_grad():
                    ids = batch.inputs["input_ids"][part.text, part.tokens][None]
                    hidden = base(input_ids=ids, output_hidden_states=True).hidden_states
                for level, states in enumerate(hidden):
                    site = Site(level, "layer_output" if level else "embedding_output")
                    features = rows.setdefault(site, np.empty((UNITS * TOKENS, states.shape[-1]), "float32"))
                    start = unit * TOKENS + part.row
                    features[start : start + states.shape[1]] = states[0]
    return rows


def ran(
    base: Any, write: Callable[[Site, slice, Any], None], done: list[int], dtype: str = "float32", batches: int = 2
) -> None:
    with FeatureWriter(base, widths(base, POINTS), dtype, "fp32", write, check_fits) as writer:
        for number, unit in enumerate(units()):
            rows = slice(number * TOKENS, (number + 1) * TOKENS)
            writer.run(rows, unit[:batches], partial(done.append, number))
        writer.wait()


@pytest.fixture
def base(tiny_bert: Path) -> Any:
    classifier: Any = load_classifier(tiny_bert)
    return classifier.base_model


@pytest.mark.parametrize("seconds", [0, 0.01])
def test_units_hold_the_models_features_though_the_model_goes_on_while_they_are_written(
    base: Any, seconds: float
) -> None:
    found: dict[Site, Any] = {}
    never = threading.Event()

    def write(site: Site, rows: slice, features: Any) -> None:
        never.wait(seconds)
        found.setdefault(site, np.full((UNITS * TOKENS, features.shape[1]), np.nan))[rows] = features

    done: list[int] = []
    ran(base, write, done)
    assert done == list(range(UNITS))
    for site, features in expected(base).items():
        assert np.abs(found[site] - features).max() <= 1e-5, site
    assert {site.point for site in found} == set(POINTS)


def test_what_does_not_fit_names_layer_and_point(base: Any) -> None:
    with torch.no_grad():
        base.encoder.layer[1].output.LayerNorm.bias.fill_(1e5)
    with pytest.raises(InputError, match=r"layer_02/layer_output: a feature of 100\d+ does not fit float16"):
        ran(base, lambda *_: None, [], dtype="float16")


def test_padding_that_does_not_fit_is_no_error(base: Any) -> None:
    with torch.no_grad():
        base.embeddings.word_embeddings.weight[0] = torch.inf
    found: list[Any] = []
    sites = widths(base, ["word_embedding"])
    with FeatureWriter(base, sites, "float16", "fp32", lambda *given: found.append(given[2]), check_fits) as writer:
        writer.run(slice(0, TOKENS), units()[0], lambda: None)
        writer.wait()
    assert np.isfinite(found[0]).all()


def test_rows_that_never_came_are_no_whole_unit(base: Any) -> None:
    with pytest.raises(RuntimeError, match="never computed"):
        ran(base, lambda *_: None, [], batches=1)


def test_what_the_writer_raises_comes_out_and_the_unit_is_not_done(base: Any) -> None:
    done: list[int] = []

    def write(site: Site, _rows: slice, _features: Any) -> None:
        if site == Site(2, "attention_heads"):
            raise InputError("the disk is full")

    with pytest.raises(InputError, match="the disk is full"):
        ran(base, write, done)
    assert not done
