"""Feature stores: plain Zarr of the promised sizes, the same bytes every time, clear errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import zarr
from conftest import REPOSITORY, tokens_table, write_captured_tokens

from attnmix.core.errors import InputError
from attnmix.core.points import Site
from attnmix.store import features as store
from attnmix.store.files import write_table
from attnmix.store.runs import Run

SITE = Site(7, "attention_output")


def write_store(root: Path, features: np.ndarray) -> store.StorePlan:
    plan = store.plan_store(*features.shape, dtype=str(features.dtype))
    store.create_stores(root, [SITE], plan)
    tokens = pd.DataFrame({"document": "test/3", "position": range(len(features)), "token_id": 7, "token": "film"})
    write_table(store.tokens_file(root), tokens)
    for unit in range(plan.units):
        rows = plan.rows_of(unit)
        store.write_block(root, SITE, rows, features[rows])
    return plan


@pytest.mark.parametrize(("tokens", "hidden", "dtype"), [(256, 768, "float16"), (40_000, 384, "float32")])
def test_features_come_back_from_zarr_and_by_chosen_rows(tmp_path: Path, tokens: int, hidden: int, dtype: str) -> None:
    features = np.random.default_rng(0).normal(size=(tokens, hidden)).astype(dtype)
    write_store(tmp_path, features)
    array = zarr.open_array(tmp_path / "layer_07" / "attention_output.zarr", mode="r")
    assert array.shape == (tokens, hidden)
    assert array.dtype == dtype
    assert np.array_equal(array[:], features)
    rows = np.arange(3, tokens, 7)
    assert np.array_equal(store.read_rows(tmp_path, SITE, rows), features[rows])


@pytest.mark.parametrize("tokens", [10, 16, 96, 100, 103])
def test_files_are_the_bytes_that_zarr_writes(tmp_path: Path, small_shards: None, tokens: int) -> None:
    features = np.random.default_rng(0).normal(size=(tokens, 24)).astype("float16")
    plan = write_store(tmp_path / "ours", features)
    store.create_stores(tmp_path / "zarr", [SITE], plan)
    theirs = zarr.open_array(tmp_path / "zarr" / f"{SITE}.zarr", mode="r+").with_config({"write_empty_chunks": True})
    theirs[:] = features
    written = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("c/*/*")}
        for root in (tmp_path / "ours", tmp_path / "zarr")
    ]
    assert plan.sharded == (tokens > 16)
    assert len(written[0]) == (plan.units if plan.sharded else -(-tokens // plan.chunk_rows))
    assert written[0] == written[1]
    metadata = json.loads((tmp_path / "ours" / f"{SITE}.zarr/zarr.json").read_text())
    codecs = metadata["codecs"][0]["configuration"]["codecs"] if plan.sharded else metadata["codecs"]
    assert [codec["name"] for codec in codecs] == ["bytes", "crc32c"]
    assert not metadata.get("consolidated_metadata")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 64
    path.write_bytes(content)


def replaced(old: str, new: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


@pytest.mark.parametrize("tokens", [10, 103])  # without shards, and with
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("c/0/0", damage) for damage in (cut_short, emptied, flipped, Path.unlink)),
        *(("c/4/0", damage) for damage in (cut_short, emptied, flipped, Path.unlink)),
        *(("zarr.json", damage) for damage in (cut_short, emptied, flipped, Path.unlink)),
        *(("zarr.json", replaced(old, new)) for old, new in (("24", "14"), ('"/"', '"."'), ("10", "11"), ("10", "8"))),
    ],
)
def test_damaged_store_is_one_error_that_names_it(
    tmp_path: Path, small_shards: None, tokens: int, name: str, damage: Callable[[Path], None]
) -> None:
    features = np.random.default_rng(0).normal(size=(tokens, 24)).astype("float16")
    write_store(tmp_path, features)
    everything = np.arange(tokens)
    assert np.array_equal(store.read_rows(tmp_path, SITE, everything), features)
    damage(tmp_path / "layer_07" / "attention_output.zarr" / name)
    with pytest.raises(
        InputError, match=r"layer_07/attention_output\.zarr is damaged .*; force the stage capture, which"
    ):
        store.read_rows(tmp_path, SITE, everything)


def test_any_zarr_reader_sees_a_flipped_byte(tmp_path: Path) -> None:
    write_store(tmp_path, np.ones((256, 768), dtype="float16"))
    path = tmp_path / "layer_07" / "attention_output.zarr"
    flipped(path / "c/0/0")
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_array(path, mode="r")[:]


def test_flipped_byte_of_the_tokens_table_is_one_error(tmp_path: Path) -> None:
    write_captured_tokens(tokens_table(["the", "film"], {}), {"test/0": "the film"}, tmp_path)
    path = Run(tmp_path).tokens_file
    content = path.read_bytes()
    place = content.index(b"film")
    path.write_bytes(content[:place] + b"f1lm" + content[place + 4 :])
    with pytest.raises(InputError, match=r"tokens\.parquet is damaged .*; force the stage tokenize, which"):
        _ = Run(tmp_path).tokens


def test_large_store_is_planned_as_chunks_of_1_mb_in_shards_of_8_mb() -> None:
    plan = store.plan_store(15_000_000, 768, "float16")
    assert plan.sharded
    assert plan.chunk_rows * 768 * 2 == pytest.approx(2**20, rel=0.01)
    assert plan.unit_rows * 768 * 2 == pytest.approx(8 * 2**20, rel=0.01)
    assert plan.unit_rows % plan.chunk_rows == 0
    assert plan.rows_of(plan.units - 1).stop == 15_000_000


@pytest.mark.parametrize(
    ("value", "dtype", "problem"),
    [
        (70_000.0, "float16", r"70000.*float16.*capture\.dtype"),
        (np.nan, "float32", "NaN"),
        (np.inf, "float32", "NaN or"),
    ],
)
def test_value_that_a_store_cannot_hold_names_layer_and_point(value: float, dtype: str, problem: str) -> None:
    store.check_fits(np.array([[65_000.0]], dtype="float32"), SITE, dtype)
    with pytest.raises(InputError, match=rf"layer_07/attention_output.*{problem}"):
        store.check_fits(np.array([[1.0, value]], dtype="float32"), SITE, dtype)


def test_write_that_the_system_refuses_is_one_error_that_names_the_store(tmp_path: Path) -> None:
    # The system itself refuses the write: no file of this process may be larger than 64 kB.
    script = f"""
import resource, signal, sys
import numpy as np
from pathlib import Path
from attnmix.core.errors import InputError
from attnmix.store import features as store
from attnmix.core.points import Site
site = Site(7, "attention_output")
plan = store.plan_store(256, 768, "float16")
root = Path({str(tmp_path)!r})
store.create_stores(root, [site], plan)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    store.write_block(root, site, slice(0, 256), np.ones((256, 768), dtype="float16"))
except InputError as error:
    sys.exit(f"error: {{error}}")
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "cannot write" in run.stderr
    assert "layer_07/attention_output.zarr" in run.stderr
    assert "Traceback" not in run.stderr


def test_missing_store_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"layer_07/attention_output\.zarr is missing; the stage capture writes it"):
        store.read_features(tmp_path, SITE)
    with pytest.raises(InputError, match="holds no feature store"):
        store.stored_sites(tmp_path)


@pytest.mark.parametrize("zeros", [False, True])  # a chunk of zeros is no missing one
def test_chosen_rows_are_read_from_the_shards_that_hold_them(tmp_path: Path, small_shards: None, zeros: bool) -> None:
    features = np.zeros((103, 24), "float16") if zeros else np.random.default_rng(0).normal(size=(103, 24))
    assert write_store(tmp_path, features.astype("float16")).sharded
    for rows in ([0, 1, 7, 8, 50, 102], [102], [], list(range(103))):
        chosen = np.array(rows, dtype=np.int64)
        assert np.array_equal(store.read_rows(tmp_path, SITE, chosen), features.astype("float16")[chosen])
