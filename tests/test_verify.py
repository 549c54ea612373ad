"""`make verify` finds what depends on the date, the hash seed or the threads, and names where it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from dvc_repository import Repository, repository_of

import verify

PIPELINE = """
stages:
  work:
    cmd: python work.py
    deps: [work.py]
    params: [limit]
    outs: [table.csv, rows.parquet, store.zarr, image.bin]
    metrics: [metrics.json: {cache: false}]
"""
# Each output holds one value that a run takes from its surroundings.
WORK = """
import datetime, json, os
import numpy as np, pandas as pd, zarr
{planted}
table = pd.DataFrame({{"layer": [1, 2, 3], "mean": [np.nan, threads / 2, 0.25]}})
table.to_parquet("rows.parquet")
table["seed"] = [0, 0, seed]
table.to_csv("table.csv", index=False)
store = zarr.create_array("store.zarr", shape=(3, 4), chunks=(2, 4), dtype="f4", overwrite=True)
store[...] = np.arange(12).reshape(3, 4)
store[2, 1] = threads
open("image.bin", "wb").write(bytes([7, 7, 7, threads, 7]))
json.dump({{"test": {{"loss": 0.5, "dates": ["-", date]}}}}, open("metrics.json", "w"))
"""
STEADY = WORK.format(planted="threads, seed, date = 1, 0, '-'")
PLANTED = WORK.format(
    planted="threads, seed = int(os.environ['OMP_NUM_THREADS']), int(os.environ['PYTHONHASHSEED'])\n"
    "date = datetime.date.today().isoformat()"
)


pytestmark = pytest.mark.long  # each makes clones, in which DVC runs


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A repository with the results of the steady pipeline in its only commit; the current folder."""
    files = {"dvc.yaml": PIPELINE, "work.py": STEADY, "params.yaml": "limit: 3\n"}
    made = repository_of(tmp_path / "repository", files, monkeypatch)
    made.dvc("repro", "--quiet")
    made.commit("A pipeline")
    monkeypatch.setattr(verify, "SURROUNDINGS", verify.SURROUNDINGS[:2])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return made


def test_steady_pipeline_gives_the_same_bytes_and_planted_differences_are_named(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main([]) == 0
    assert "2 clones, the same bytes in dvc.lock and every output" in capsys.readouterr().out

    (repository.folder / "work.py").write_text(PLANTED, encoding="utf-8")
    repository.commit("A change")
    assert verify.main(["--until", "work"]) == 1
    pair = "one thread and two threads é: "
    lines = [line.removeprefix(pair) for line in capsys.readouterr().out.splitlines() if line.startswith(pair)]
    named = dict(line.split(": ", 1) for line in lines)
    assert named.pop("metrics.json").startswith("test, dates, 1: '20")
    assert named.pop("dvc.lock").startswith("stages, work, outs, image.bin, md5: ")
    assert named == {
        "table.csv": "row 1, column mean: 0.5 and 1.0",
        "rows.parquet": "row 1, column mean: 0.5 and 1.0",
        "store.zarr/c/1/0": "1 of 12 numbers differ, first [2, 1]: 1.0 and 2.0",
        "image.bin": "byte 3 of 5 and 5",
    }
    assert list(tmp_path.glob("verify-*")) == []


def test_another_result_than_the_committed_one_and_a_stage_that_fails_are_named(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository.folder / "metrics.json").write_text("{}", encoding="utf-8")
    repository.commit("A change")
    assert verify.main([]) == 1
    assert "not as committed: metrics.json" in capsys.readouterr().out
    # With a profile no committed result is expected.
    (tmp_path / "profile.txt").write_text("# little\nlimit=4\n", encoding="utf-8")
    assert verify.main(["--profile", str(tmp_path / "profile.txt"), "--folder", str(tmp_path / "kept")]) == 0
    assert (tmp_path / "kept/two threads é/clone/params.yaml").read_text(encoding="utf-8") == "limit: 4\n"

    (repository.folder / "work.py").write_text("raise SystemExit('the stage says why')", encoding="utf-8")
    repository.commit("A fault")
    with pytest.raises(SystemExit, match=r"one thread: .* failed:(.|\n)*the stage says why"):
        verify.main([])
