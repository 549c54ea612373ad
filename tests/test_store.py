"""What a run captured, read by programs: the same numbers by every way in, nothing before it is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import write_captured_tokens

from attnmix.core.errors import InputError
from attnmix.core.points import Site
from attnmix.store import features as stored
from attnmix.store.runs import Run, open_run

SITES = {Site(0, "embedding_output"): 6, Site(1, "layer_output"): 6, Site(2, "attention_heads"): 4}
SITES[Site(2, "layer_output")] = 6
LENGTHS = {"test/3": 70, "test/5": 120, "mine": 40}
TOKENS = sum(LENGTHS.values())


@pytest.fixture
def made(tmp_path: Path, small_shards: None) -> tuple[Run, dict[Site, np.ndarray]]:
    """A clone's folder with stores of several shards, and what went into them."""
    root = Run(tmp_path).activations
    documents = [name for name, length in LENGTHS.items() for _ in range(length)]
    positions = [position for length in LENGTHS.values() for position in range(length)]
    pieces = [f"piece{number % 5}" for number in range(TOKENS)]
    table = {"document": documents, "position": positions, "token_id": range(TOKENS), "token": pieces}
    write_captured_tokens(pd.DataFrame(table), {name: f"The text of {name}." for name in LENGTHS}, tmp_path)
    plan = stored.plan_store(TOKENS, 6, "float16")
    assert plan.units > 1
    stored.create_stores(root, list(SITES), plan, SITES)
    generator = np.random.default_rng(0)
    vectors = {site: generator.normal(size=(TOKENS, width)).astype("float16") for site, width in SITES.items()}
    for site, of_site in vectors.items():
        for unit in range(plan.units):
            rows = plan.rows_of(unit)
            stored.write_block(root, site, rows, of_site[rows])
    return open_run(tmp_path), vectors


def test_a_run_says_what_is_there(made: tuple[Run, dict[Site, np.ndarray]]) -> None:
    run, vectors = made
    assert run.sites == list(SITES)
    assert run.texts == {name: f"The text of {name}." for name in LENGTHS}
    assert [run.width(site) for site in run.sites] == list(SITES.values())
    assert {name: run.rows(name) for name in LENGTHS} == {
        "test/3": slice(0, 70),
        "test/5": slice(70, 190),
        "mine": slice(190, 230),
    }
    rows = np.array([0, 69, 70, 229])
    assert np.array_equal(run.read(run.sites[1], rows), vectors[run.sites[1]][rows])


@pytest.mark.parametrize("document", [None, "test/5", "mine"])
@pytest.mark.parametrize("layers", [None, [2], [2, 1]])
def test_every_way_in_gives_what_was_captured(
    made: tuple[Run, dict[Site, np.ndarray]], document: str | None, layers: list[int] | None
) -> None:
    run, vectors = made
    rows = run.rows(document)
    expected = np.stack([vectors[Site(layer, "layer_output")][rows] for layer in layers or [1, 2]])
    features = run.features("layer_output", layers, document)
    assert (features.shape, features.dtype) == (expected.shape, np.float16)
    assert np.array_equal(features.numpy(), expected)
    assert np.array_equal(features.torch().numpy(), expected)
    named = features.xarray()
    assert (named.name, named.dims, named.dtype) == ("layer_output", ("layer", "token", "hidden"), np.float16)
    assert np.array_equal(named.values, expected)
    assert named["layer"].values.tolist() == (layers or [1, 2])
    assert named["token"].values.tolist() == run.tokens["token"][rows].tolist()
    chosen = named.sel(layer=2).isel(token=named["position"] == 3)
    place = (layers or [1, 2]).index(2)
    assert np.array_equal(chosen.values, expected[place][(run.tokens["position"][rows] == 3).to_numpy()])


def test_nothing_is_read_before_it_is_asked_for(made: tuple[Run, dict[Site, np.ndarray]]) -> None:
    run, vectors = made
    shards = sorted((run.activations / "layer_01/layer_output.zarr/c").rglob("0"))
    last = sorted((run.activations / "layer_01/layer_output.zarr/c").iterdir())[-1] / "0"
    assert len(shards) > 1
    last.write_bytes(last.read_bytes()[:-1] + b"?")
    features = run.features("layer_output")
    named = features.xarray()
    assert np.array_equal(named.isel(layer=0, token=slice(0, 3)).values, vectors[run.sites[1]][:3])
    for whole in (features.numpy, lambda: named.values):
        with pytest.raises(InputError, match=r"layer_01/layer_output\.zarr is damaged"):
            whole()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("attention_norm",), "'attention_norm' was not captured in .*; captured: embedding_output, layer_output"),
        (("attention_heads", [1]), r"layers: 1; attention_heads was captured in 2$"),
        (("layer_output", []), r"layers: none; layer_output was captured in 1, 2$"),
        (("layer_output", None, "test/4"), "'test/4' was not captured in .*; captured: test/3, test/5, mine"),
    ],
)
def test_what_is_not_there_is_one_clear_error(
    made: tuple[Run, dict[Site, np.ndarray]], asked: tuple[str, ...], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        made[0].features(*asked)


def test_a_folder_without_a_run_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="features/capture holds no feature store"):
        open_run(tmp_path)
