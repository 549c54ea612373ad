"""Feature stores are plain Zarr arrays of the planned sizes, all readers agree, and any damage raises an error."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pytest
import zarr
from conftest import digest, write_captured_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmix.core.errors import InputError
from attnmix.core.names import Site
from attnmix.core.settings import CaptureParameters
from attnmix.core.store import features as store
from attnmix.core.store import shards
from attnmix.core.store.runs import Run, open_run

SITES = {Site(0, "embedding_output"): 24, Site(1, "layer_output"): 24, Site(2, "attention_heads"): 16}
SITES[Site(2, "layer_output")] = 24
SITE = Site(1, "layer_output")
LENGTHS = {"test/3": 30, "test/5": 53, "text/0": 20}


def write_run(folder: Path, lengths: dict[str, int], chunk_tokens: int = 2) -> dict[Site, np.ndarray]:
    """Write random vectors and the tables of their texts into `folder`, and return the vectors."""
    documents = [name for name, length in lengths.items() for _ in range(length)]
    positions = [position for length in lengths.values() for position in range(length)]
    pieces = [f"piece{number % 5}" for number in range(len(documents))]
    table = {"document": documents, "position": positions, "token_id": range(len(documents)), "token": pieces}
    write_captured_tokens(pd.DataFrame(table), {name: f"The text of {name}." for name in lengths}, folder)
    plan = store.plan_store(len(documents), 24, "float16", chunk_tokens)
    place = Run(folder).activations
    store.create_stores(place, SITES, plan)
    generator = np.random.default_rng(0)
    vectors = {site: generator.normal(size=(plan.tokens, width)).astype("float16") for site, width in SITES.items()}
    vectors[Site(0, "embedding_output")][:] = 0  # a chunk of zeros is not a missing chunk
    for site, features in vectors.items():
        for rows in plan.units:
            store.write_unit(store.open_to_write(place, site), rows, features[rows])
    return vectors


RunAndVectors = tuple[Run, dict[Site, np.ndarray]]


@pytest.fixture
def run_and_vectors(tmp_path: Path, small_shards: None) -> RunAndVectors:
    """Return a run with stores of several shards, and their vectors."""
    vectors = write_run(tmp_path, LENGTHS)
    return open_run(tmp_path), vectors


@pytest.mark.parametrize("document", [None, "test/5", "text/0"])
@pytest.mark.parametrize("layers", [None, [2, 1]])
def test_readers_return_captured_values(
    run_and_vectors: RunAndVectors, document: str | None, layers: list[int] | None
) -> None:
    run, vectors = run_and_vectors
    assert run.sites == list(SITES)
    assert run.texts == {name: f"The text of {name}." for name in LENGTHS}
    assert [run.features(site.point, [site.layer]).shape[2] for site in run.sites] == list(SITES.values())
    rows = run.rows(document)
    start = {None: 0, "test/5": 30, "text/0": 83}[document]
    assert rows == slice(start, start + LENGTHS.get(document or "", 103))
    expected = np.stack([vectors[Site(layer, "layer_output")][rows] for layer in layers or [1, 2]])
    features = run.features("layer_output", layers, document)
    assert (features.shape, features.dtype) == (expected.shape, np.float16)
    assert np.array_equal(features.numpy(), expected)
    assert np.array_equal(features.torch().numpy(), expected)
    labelled = features.xarray()
    assert (labelled.name, labelled.dims, labelled.dtype) == (SITE.point, ("layer", "token", "hidden"), np.float16)
    assert np.array_equal(labelled.values, expected)
    assert labelled["layer"].values.tolist() == (layers or [1, 2])
    assert labelled["token"].values.tolist() == run.tokens["token"][rows].tolist()
    third = labelled.sel(layer=2).isel(token=labelled["position"] == 3)
    assert np.array_equal(third.values, expected[(layers or [1, 2]).index(2)][run.tokens["position"][rows] == 3])


def test_selected_rows_are_read_from_their_shards(run_and_vectors: RunAndVectors) -> None:
    run, vectors = run_and_vectors
    for site, features in vectors.items():
        for rows in ([0, 1, 7, 8, 50, 102], [102], [], list(range(103))):
            assert np.array_equal(run.read(site, np.array(rows, np.int64)), features[rows])


def test_values_are_read_lazily(run_and_vectors: RunAndVectors) -> None:
    run, vectors = run_and_vectors
    last = max((run.activations / f"{SITE}.zarr/c").iterdir(), key=lambda path: int(path.name)) / "0"
    last.write_bytes(last.read_bytes()[:-1] + b"?")
    features = run.features("layer_output")
    labelled = features.xarray()
    assert np.array_equal(labelled.isel(layer=0, token=slice(0, 3)).values, vectors[SITE][:3])
    for read in (features.numpy, lambda: labelled.values):
        with pytest.raises(InputError, match=r"layer_01/layer_output\.zarr is damaged"):
            read()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attention_norm",), "'attention_norm' was not captured in .*; captured: embedding_output, layer_output"),
        (("attention_heads", [1]), r"layers: 1; allowed for attention_heads: 2$"),
        (("layer_output", []), r"layers: none; allowed for layer_output: 1, 2$"),
        (("layer_output", None, "test/4"), "'test/4' was not captured in .*; captured: test/3, test/5, text/0"),
    ],
)
def test_uncaptured_features_are_one_error(
    run_and_vectors: RunAndVectors, arguments: tuple[str, ...], message: str
) -> None:
    run, _ = run_and_vectors
    with pytest.raises(InputError, match=message):
        run.features(*arguments)


def test_missing_stores_name_their_stage(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="features/capture contains no feature store; run the stage capture"):
        open_run(tmp_path)
    with pytest.raises(InputError, match=r"layer_01/layer_output\.zarr is missing; run the stage capture"):
        store.read_features(tmp_path, SITE)


def chunk_files(folder: Path) -> dict[Path, bytes]:
    """Return the contents of a store's shards or chunks by path."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("c/*/*")}


@pytest.mark.parametrize("tokens", [10, 16, 96, 100, 103])
def test_files_match_zarr_bytes(tmp_path: Path, small_shards: None, tokens: int) -> None:
    features = write_run(tmp_path, {"test/3": tokens})[SITE]
    ours = Run(tmp_path).activations / f"{SITE}.zarr"
    theirs = tmp_path / f"{SITE}.zarr"
    plan = store.plan_store(tokens, 24, "float16", 2)
    store.create_stores(tmp_path, {SITE: 24}, plan)
    zarr.open_array(theirs, mode="r+").with_config({"write_empty_chunks": True})[:] = features
    assert (len(plan.units) > 1) == (tokens > 16)
    assert chunk_files(ours) == chunk_files(theirs)
    metadata = json.loads((ours / "zarr.json").read_text())
    codecs = metadata["codecs"][0]["configuration"]["codecs"]
    assert [codec["name"] for codec in codecs] == ["bytes", "crc32c"]
    assert not metadata.get("consolidated_metadata")


def truncate(path: Path) -> None:
    """Remove the last 30 bytes of a file."""
    path.write_bytes(path.read_bytes()[:-30])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 64
    path.write_bytes(content)


def replacing(old: str, new: str) -> Callable[[Path], None]:
    """Return a function that replaces the first occurrence of a text in a file."""

    def replace(path: Path) -> None:
        path.write_text(path.read_text().replace(old, new, 1))

    return replace


@pytest.mark.parametrize(("tokens", "chunk_tokens"), [(10, 10), (103, 2)])  # without and with shards
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in ("c/0/0", "zarr.json") for damage in (truncate, flip_bit, Path.unlink)),
        *(("zarr.json", replacing(old, new)) for old, new in (("24", "14"), ('"/"', '"."'), ("10", "11"), ("10", "8"))),
    ],
)
def test_damaged_store_is_one_error_that_names_it(
    tmp_path: Path, small_shards: None, tokens: int, chunk_tokens: int, name: str, damage: Callable[[Path], None]
) -> None:
    write_run(tmp_path, {"test/3": tokens}, chunk_tokens)
    damage(Run(tmp_path).activations / f"{SITE}.zarr" / name)
    with pytest.raises(InputError, match=r"layer_01/layer_output\.zarr is damaged .*rerun the stage capture"):
        Run(tmp_path).read(SITE, np.arange(tokens))


def test_damaged_tokens_table_is_one_error(tmp_path: Path) -> None:
    write_run(tmp_path, LENGTHS)
    path = Run(tmp_path).captured.tokens_file
    path.write_bytes(path.read_bytes().replace(b"piece0", b"piece8", 1))
    with pytest.raises(InputError, match=r"tokens\.parquet is damaged .*rerun the stage tokenize"):
        _ = Run(tmp_path).tokens


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(
    tokens=st.integers(1, 60),
    width=st.integers(1, 9),
    dtype=st.sampled_from(["float16", "float32"]),
    chunk_rows=st.integers(1, 20),
    chunks=st.integers(1, 5),
    min_direct_bytes=st.sampled_from([1, shards.MIN_DIRECT_BYTES]),
)
def test_stores_match_zarr_bytes(
    tokens: int, width: int, dtype: str, chunk_rows: int, chunks: int, min_direct_bytes: int
) -> None:
    vectors = np.random.default_rng(tokens).normal(size=(tokens, width)).astype(dtype)
    plan = store.StorePlan(tokens, dtype, chunk_rows, chunk_rows * chunks)
    writer = shards.ShardWriter()
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "MIN_DIRECT_BYTES", min_direct_bytes)  # with and without direct writes
        ours, theirs = Path(name, "ours"), Path(name, "theirs")
        for folder in (ours, theirs):
            store.create_stores(folder, {SITE: width}, plan)
        for rows in reversed(plan.units):  # the smaller last shard is written first; the others reuse its buffer
            store.write_unit(store.open_to_write(ours, SITE), rows, vectors[rows], writer)
        store.open_to_write(theirs, SITE).array[:] = vectors
        assert np.array_equal(zarr.open_array(ours / f"{SITE}.zarr", mode="r")[:], vectors)
        assert digest(ours) == digest(theirs)


@pytest.mark.parametrize("refused", ["open", "write"])
def test_buffered_writes_match_direct_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    rows = np.arange(2**20, dtype=np.float32).reshape(-1, 16)
    direct, buffered = shards.ShardWriter(), shards.ShardWriter()
    direct.write(tmp_path / "direct", rows, 1000, 70)
    original = getattr(os, refused)
    refusals = []

    def refuse_direct_writes(place: Any, *arguments: Any) -> Any:
        flags = arguments[0] if refused == "open" else fcntl.fcntl(place, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            refusals.append(place)
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(place, *arguments)

    monkeypatch.setattr(os, refused, refuse_direct_writes)
    for name in ("first", "second"):
        buffered.write(tmp_path / name, rows, 1000, 70)
        assert (tmp_path / name).read_bytes() == (tmp_path / "direct").read_bytes()
    assert len(refusals) == 1  # the writer remembers the refusal


def test_refused_write_is_one_error_that_names_the_store(tmp_path: Path) -> None:
    store.create_stores(tmp_path, {SITE: 768}, store.plan_store(256, 768, "float16", 256))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    try:
        with pytest.raises(InputError, match=rf"^cannot write .*/{SITE}\.zarr \(File too large\); free some space"):
            store.write_unit(store.open_to_write(tmp_path, SITE), slice(0, 256), np.ones((256, 768), dtype="float16"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("tokens", "chunk_tokens", "chunk_rows", "unit_rows"),
    [
        (15_000_000, 64, 64, 5440),  # 85 chunks of 98 kB: 8.36 MB
        (15_000_000, 10_000, 10_000, 10_000),  # a chunk larger than a shard
        (196, 64, 64, 256),  # a store smaller than a shard is one file
        (40, 64, 40, 40),  # one chunk without shards
    ],
)
def test_shards_and_chunks_have_planned_sizes(tokens: int, chunk_tokens: int, chunk_rows: int, unit_rows: int) -> None:
    plan = store.plan_store(tokens, 768, "float16", chunk_tokens)
    assert (plan.chunk_rows, plan.unit_rows, plan.units[-1].stop) == (chunk_rows, unit_rows, tokens)


def test_default_chunks_follow_parameter(tmp_path: Path) -> None:
    plan = store.plan_store(196, 384, "float16", CaptureParameters().chunk_tokens)
    store.create_stores(tmp_path, {SITE: 384}, plan)
    array = zarr.open_array(tmp_path / f"{SITE}.zarr", mode="r")
    assert (array.shape, array.chunks, array.shards) == ((196, 384), (64, 384), (256, 384))
