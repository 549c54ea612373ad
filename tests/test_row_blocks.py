"""Blocks of rows: the same by either way from the model, whatever is written when; errors come out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnmix.core.errors import InputError
from attnmix.core.points import Site
from attnmix.models.capture_points import widths
from attnmix.models.feature_writer import Batch, Part, RowBlocks
from attnmix.models.loading import load_classifier
from attnmix.store.features import check_fits
from attnmix.store.shard_writer import Block, Piece

POINTS = ["embedding_output", "attention_heads", "layer_output"]
UNITS = 3
LENGTHS = (5, 9, 9, 3)
TOKENS = sum(LENGTHS)


def units(seed: int = 0) -> list[list[Batch]]:
    """Two batches for each unit of rows; their texts are padded and go into the rows in another order."""
    generator = torch.Generator().manual_seed(seed)
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
    rows: dict[Site, list[Any]] = {}
    with torch.no_grad():
        for batches in units():
            of_texts: dict[int, dict[Site, Any]] = {}
            for batch in batches:
                for part in batch.parts:
                    ids = batch.inputs["input_ids"][part.text, part.tokens][None]
                    hidden = base(input_ids=ids, output_hidden_states=True).hidden_states
                    points = ["embedding_output", *["layer_output"] * (len(hidden) - 1)]
                    of_text = {Site(level, point): hidden[level][0] for level, point in enumerate(points)}
                    of_texts[part.row] = of_text
            for start in sorted(of_texts):
                for site, each in of_texts[start].items():
                    rows.setdefault(site, []).append(each)
    return {site: torch.cat(each).numpy() for site, each in rows.items()}


class Written:
    """A block that is handed on once it is whole."""

    def __init__(self, write: Callable[[Any], None], block: Any) -> None:
        self.write, self.block, self.left = write, block, len(block)

    def put(self, pieces: Iterable[Piece]) -> None:
        for start, rows in pieces:
            self.block[start : start + len(rows)] = rows
            self.left -= len(rows)
        if not self.left:
            self.write(self.block)

    def discard(self) -> None:
        self.left = 0


def ran(base: Any, staged: bool, write: Any, dtype: str = "float32", precision: str = "fp32") -> None:
    sites = widths(base, POINTS)

    def opened(site: Site, rows: slice) -> Block:
        return Written(lambda block: write(site, rows, block), np.empty((rows.stop - rows.start, sites[site]), dtype))

    done = []
    with RowBlocks(base, sites, dtype, precision, opened, check_fits, staged) as blocks:
        for unit, batches in enumerate(units()):
            blocks.run(slice(unit * TOKENS, (unit + 1) * TOKENS), batches, partial(done.append, unit))
        blocks.wait()
    assert done == list(range(UNITS))


@pytest.fixture
def base(tiny_bert: Path) -> Any:
    classifier: Any = load_classifier(tiny_bert)
    return classifier.base_model


@pytest.mark.parametrize("staged", [False, True])
def test_blocks_hold_the_models_features(base: Any, staged: bool) -> None:
    found: dict[Site, Any] = {}

    def write(site: Site, rows: slice, block: Any) -> None:
        found.setdefault(site, np.full((UNITS * TOKENS, block.shape[1]), np.nan))[rows] = block

    ran(base, staged, write)
    for site, features in expected(base).items():
        assert np.abs(found[site] - features).max() <= 1e-5, site
    assert {site.point for site in found} == set(POINTS)


@pytest.mark.parametrize("staged", [False, True])
def test_what_is_written_late_is_still_the_units_own(base: Any, staged: bool) -> None:
    """The writer waits until the model has long gone on; what it then sees are still the unit's own rows."""
    found: dict[tuple[Site, int], Any] = {}
    slow = threading.Event()

    def write(site: Site, rows: slice, block: Any) -> None:
        slow.wait(0.01)
        found[site, rows.start] = block.copy()

    ran(base, staged, write)
    for site, features in expected(base).items():
        for unit in range(UNITS):
            start = unit * TOKENS
            assert np.abs(found[site, start] - features[start : start + TOKENS]).max() <= 1e-5


@pytest.mark.parametrize("staged", [False, True])
def test_what_does_not_fit_names_layer_and_point(base: Any, staged: bool) -> None:
    with torch.no_grad():
        base.encoder.layer[1].output.LayerNorm.bias.fill_(1e5)
    with pytest.raises(InputError, match=r"layer_02/layer_output: a feature of 100\d+ does not fit float16"):
        ran(base, staged, lambda *_: None, dtype="float16")


def test_padding_that_does_not_fit_is_no_error(base: Any) -> None:
    heard = []

    def check(features: Any, site: Site, dtype: str) -> None:
        heard.append(site)
        check_fits(features, site, dtype)

    with torch.no_grad():
        base.embeddings.word_embeddings.weight[0] = torch.inf
    sites = widths(base, ["word_embedding"])
    found = []
    with RowBlocks(
        base, sites, "float16", "fp32", lambda *_: Written(found.append, np.empty((TOKENS, 24), "float16")), check
    ) as blocks:
        blocks.run(slice(0, TOKENS), units()[0], lambda: None)
        blocks.wait()
    assert set(heard) == {Site(0, "word_embedding")}
    (block,) = found
    assert np.isfinite(block).all()


def test_rows_that_never_came_are_no_whole_unit(base: Any) -> None:
    block, done = Written(lambda _: None, np.empty((TOKENS, 24), "float16")), []
    with RowBlocks(base, [Site(0, "word_embedding")], "float16", "fp32", lambda *_: block, check_fits) as blocks:
        blocks.run(slice(0, TOKENS), units()[0][:1], lambda: done.append(0))
        with pytest.raises(RuntimeError, match="never computed"):
            blocks.wait()
        assert block.left
    assert not done
    assert not block.left, "it was not discarded"


@pytest.mark.parametrize("staged", [False, True])
def test_what_the_writer_raises_comes_out(base: Any, staged: bool) -> None:
    def write(site: Site, _rows: slice, _block: Any) -> None:
        if site == Site(2, "attention_heads"):
            raise InputError("the disk is full")

    with pytest.raises(InputError, match="the disk is full"):
        ran(base, staged, write)
