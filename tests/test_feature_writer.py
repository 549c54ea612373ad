"""Rows of stores hold the model's own features; what their type cannot hold is one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnmix.core.errors import InputError
from attnmix.core.names import Site
from attnmix.models.capture_points import Batch, Part, fill_rows, widths
from attnmix.models.loading import load_classifier

POINTS = ["embedding_output", "attention_heads", "layer_output"]
LENGTHS = (5, 9, 9, 3)
TOKENS = sum(LENGTHS)


def batches() -> list[Batch]:
    """Return two batches whose texts are padded and go into the rows in another order."""
    generator = torch.Generator().manual_seed(0)
    starts, made = np.cumsum([0, *LENGTHS]), []
    for texts in ((0, 3), (2, 1)):
        ids = torch.randint(5, 20, (2, max(LENGTHS[i] for i in texts)), generator=generator)
        mask = torch.tensor([[int(place < LENGTHS[i]) for place in range(ids.shape[1])] for i in texts])
        parts = [Part(number, slice(0, LENGTHS[i]), int(starts[i])) for number, i in enumerate(texts)]
        made.append(Batch({"input_ids": ids * mask, "attention_mask": mask}, parts))
    return made


def filled(base: Any, points: list[str], dtype: str) -> dict[Site, Any]:
    rows = {site: np.full((TOKENS, width), np.nan, dtype) for site, width in widths(base, points).items()}
    fill_rows(base, batches(), rows)
    return rows


@pytest.fixture
def base(tiny_bert: Path) -> Any:
    classifier: Any = load_classifier(tiny_bert)
    return classifier.base_model


def test_rows_hold_the_models_features(base: Any) -> None:
    rows = filled(base, POINTS, "float32")
    assert {site.point for site in rows} == set(POINTS)
    for batch in batches():
        for part in batch.parts:
            with torch.no_grad():
                ids = batch.inputs["input_ids"][part.text, part.tokens][None]
                hidden = base(input_ids=ids, output_hidden_states=True).hidden_states
            for level, states in enumerate(hidden):
                site = Site(level, "layer_output" if level else "embedding_output")
                features = rows[site][part.row : part.row + states.shape[1]]
                assert np.abs(features - states[0].numpy()).max() <= 1e-5, site
    assert all(np.isfinite(features).all() for features in rows.values())


def test_what_does_not_fit_names_layer_and_point(base: Any) -> None:
    with torch.no_grad():
        base.encoder.layer[1].output.LayerNorm.bias.fill_(1e5)
    with pytest.raises(InputError, match=r"layer_02/layer_output: a feature of 100\d+ does not fit float16"):
        filled(base, POINTS, "float16")


def test_padding_that_does_not_fit_is_no_error(base: Any) -> None:
    with torch.no_grad():
        base.embeddings.word_embeddings.weight[0] = torch.inf
    (features,) = filled(base, ["word_embedding"], "float16").values()
    assert np.isfinite(features).all()
