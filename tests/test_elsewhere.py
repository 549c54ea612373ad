"""Feature stores outside the run (`capture.store`) equal stores inside it, and arrays of other runs are rejected."""

from __future__ import annotations

import hashlib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from conftest import Workspace, digest, run_capture
from moto.server import ThreadedMotoServer

from attnmix.core.errors import InputError
from attnmix.core.names import ACTIVATIONS, Site
from attnmix.core.store import features as stored
from attnmix.core.store.runs import open_run

POINTS = ["word_embedding", "attention_heads", "layer_output"]
CAPTURED = {"documents": [3, 0, 1, 5], "max_length": 40, "chunk_tokens": 2, "points": POINTS}
KEYS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
SITE = Site(1, "layer_output")


@pytest.fixture(scope="module")
def bucket_server() -> Iterator[str]:
    """Yield the address of one S3 server for all tests, because fsspec keeps its first connection."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def bucket(bucket_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create a bucket, set the environment variables of its server, and return the address of a run in this bucket."""
    name = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]
    urllib.request.urlopen(urllib.request.Request(f"{bucket_server}/{name}", method="PUT")).close()
    for variable, value in (KEYS | {"AWS_ENDPOINT_URL": bucket_server}).items():
        monkeypatch.setenv(variable, value)
    return f"s3://{name}/run"


@pytest.mark.parametrize("kind", [pytest.param("s3", marks=pytest.mark.long), "absolute"])
def test_readers_support_external_stores(
    workspace: Workspace, tiny_bert: Path, small_shards: None, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    address = request.getfixturevalue("bucket") if kind == "s3" else str(tmp_path / "scratch/run")
    here = run_capture(workspace("here", capture=CAPTURED), tiny_bert)
    there = run_capture(workspace("there", capture=CAPTURED | {"store": address}), tiny_bert)
    assert {path.name for path in (there / ACTIVATIONS).iterdir()} == {"manifest.json", "tokens.parquet"}

    one, other = open_run(here), open_run(there)
    assert other.sites == one.sites
    assert other.tokens.equals(one.tokens)
    rows = np.arange(3, len(one.tokens), 7)
    for site in one.sites:
        whole = stored.read_features(one.activations, site)
        assert np.array_equal(stored.read_features(other.activations, site), whole)
        assert np.array_equal(other.read(site, rows), whole[rows])
    lazy = other.features("layer_output", document="test/3").xarray()
    assert np.array_equal(lazy.values, one.features("layer_output", document="test/3").numpy())

    # Any Zarr reader can open the arrays, and their shards are byte-identical to local shards.
    array = zarr.open_array(f"{address}/layer_01/layer_output.zarr", mode="r")
    assert np.array_equal(array[:], stored.read_features(one.activations, SITE))
    files, name = fsspec.core.url_to_fs(f"{address}/layer_01/layer_output.zarr/c/0/0")
    assert files.cat_file(name) == (here / ACTIVATIONS / "layer_01/layer_output.zarr/c/0/0").read_bytes()

    files.rm(name.replace("c/0/0", "c/1/0"))
    with pytest.raises(InputError, match=r"layer_01/layer_output\.zarr is damaged .*c/1/0 is missing or empty"):
        stored.read_features(other.activations, SITE)


def test_arrays_of_another_run_are_refused(workspace: Workspace, tiny_bert: Path, tmp_path: Path) -> None:
    shared = CAPTURED | {"store": str(tmp_path / "scratch")}
    before = run_capture(workspace("before", capture=shared), tiny_bert)
    after = run_capture(workspace("after", capture=shared | {"max_length": 12}), tiny_bert)
    stored.read_features(after / ACTIVATIONS, SITE)
    with pytest.raises(InputError, match=r"layer_output\.zarr was overwritten by another run .*manifest\.json; rerun"):
        stored.read_features(before / ACTIVATIONS, SITE)


def test_unwritable_store_fails_before_forward_pass(
    workspace: Workspace, tiny_bert: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_forward_pass(*_: Any) -> None:
        raise AssertionError("a forward pass was started")

    monkeypatch.setattr("attnmix.runs.capture.fill_rows", no_forward_pass)
    missing = f"s3://no-such-{bucket.removeprefix('s3://')}"
    message = r"cannot write s3://no-such-.* \(The specified bucket does not exist\)"
    for store, expected in ((missing, message), ("/proc/run", "/proc")):
        with pytest.raises(InputError, match=expected):
            run_capture(workspace(capture=CAPTURED | {"store": store}), tiny_bert)
        assert not ACTIVATIONS.exists()


def test_folder_with_other_files_is_refused(workspace: Workspace, tiny_bert: Path, tmp_path: Path) -> None:
    store = tmp_path / "scratch"
    (store / "layer_00").mkdir(parents=True)  # as after an earlier run
    folder = run_capture(workspace(capture=CAPTURED | {"store": str(store)}), tiny_bert)
    (store / "passwd").write_text("kept", encoding="utf-8")
    before = digest(store)
    expected = rf"^capture\.store: {store} contains passwd, .*; choose a folder .* or contains only layer_"
    with pytest.raises(InputError, match=expected):
        run_capture(folder, tiny_bert)
    assert digest(store) == before
    for inside in ("features/capture/sub", "./features/capture"):
        folder = workspace("inside", capture=CAPTURED | {"store": inside})
        with pytest.raises(InputError, match=rf"^capture\.store: {inside} is in features/capture"):
            run_capture(folder, tiny_bert)
    assert not (folder / "features/capture").exists()
