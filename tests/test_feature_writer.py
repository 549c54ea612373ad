"""Units of rows hold the model's own features; errors of the writer are raised, and no unit is half done."""

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
STARTS = np.cumsum([0, *LENGTHS]).tolist()
TOKENS = sum(LENGTHS)


def units() -> list[list[Batch]]:
    """Return two batches for each unit of rows; their padded texts go into the rows in another order."""
    generator = torch.Generator().manual_seed(0)

    def batch(texts: tuple[int, int]) -> Batch:
        ids = torch.randint(5, 20, (2, max(LENGTHS[i] for i in texts)), generator=generator)
        mask = torch.tensor([[int(place < LENGTHS[i]) for place in range(ids.shape[1])] for i in texts])
        parts = [Part(number, slice(0, LENGTHS[i]), STARTS[i]) for number, i in enumerate(texts)]
        return Batch({"input_ids": ids * mask, "attention_mask": mask}, parts)

    return [[batch((0, 3)), batch((2, 1))] for _ in range(UNITS)]


def hidden_states(base: Any) -> dict[Site, Any]:
    """Return the rows by the model's own hidden states, text by text."""
    sites = [Site(0, "embedding_output"), *(Site(layer, "layer_output") for layer in (1, 2, 3))]
    rows = {site: np.empty((UNITS * TOKENS, base.config.hidden_size), "float32") for site in sites}
    for unit, batches in enumerate(units()):
        for inputs, parts in batches:
            for part in parts:
                with torch.no_grad():
                    states = base(
                        input_ids=inputs["input_ids"][part.text, part.tokens][None], output_hidden_states=True
                    )
                start = unit * TOKENS + part.row
                for site, features in zip(sites, states.hidden_states, strict=True):
                    rows[site][start : start + features.shape[1]] = features[0]
    return rows


def write_units(
    base: Any, write: Callable[[Site, slice, Any], None], done: list[int], dtype: str = "float32", batches: int = 2
) -> None:
    with FeatureWriter(base, widths(base, POINTS), dtype, "fp32", write, check_fits) as writer:
        for number, unit in enumerate(units()):
            rows = slice(number * TOKENS, (number + 1) * TOKENS)
            writer.run(rows, unit[:batches], partial(done.append, number))
        writer.wait()


@pytest.fixture
def base(tiny_bert: Path) -> Any:
    """The body of the tiny BERT."""
    classifier: Any = load_classifier(tiny_bert)
    return classifier.base_model


@pytest.mark.parametrize("seconds", [0, 0.01])
def test_units_hold_the_models_features_though_the_model_goes_on_while_they_are_written(
    base: Any, seconds: float
) -> None:
    written: dict[Site, Any] = {}
    never = threading.Event()

    def write(site: Site, rows: slice, features: Any) -> None:
        never.wait(seconds)
        written.setdefault(site, np.full((UNITS * TOKENS, features.shape[1]), np.nan))[rows] = features

    done: list[int] = []
    write_units(base, write, done)
    assert done == list(range(UNITS))
    for site, features in hidden_states(base).items():
        assert np.abs(written[site] - features).max() <= 1e-5, site
    assert {site.point for site in written} == set(POINTS)


def test_features_that_do_not_fit_name_layer_and_point(base: Any) -> None:
    with torch.no_grad():
        base.encoder.layer[1].output.LayerNorm.bias.fill_(1e5)
    with pytest.raises(InputError, match=r"layer_02/layer_output: a feature of 100\d+ does not fit float16"):
        write_units(base, lambda *_: None, [], dtype="float16")


def test_padding_that_does_not_fit_is_no_error(base: Any) -> None:
    with torch.no_grad():
        base.embeddings.word_embeddings.weight[0] = torch.inf
    written: list[Any] = []
    sites = widths(base, ["word_embedding"])
    with FeatureWriter(base, sites, "float16", "fp32", lambda *call: written.append(call[2]), check_fits) as writer:
        writer.run(slice(0, TOKENS), units()[0], lambda: None)
        writer.wait()
    assert np.isfinite(written[0]).all()


def test_rows_without_features_are_an_error(base: Any) -> None:
    with pytest.raises(RuntimeError, match="never computed"):
        write_units(base, lambda *_: None, [], batches=1)


def test_an_error_of_the_writer_is_raised_and_the_unit_is_not_done(base: Any) -> None:
    done: list[int] = []

    def write(site: Site, _rows: slice, _features: Any) -> None:
        if site == Site(2, "attention_heads"):
            raise InputError("the disk is full")

    with pytest.raises(InputError, match="the disk is full"):
        write_units(base, write, done)
    assert not done
