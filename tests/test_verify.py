"""`make verify` finds what depends on the clock, the hash seed or the threads, and names where it shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import zarr

from verify.__main__ import main
from verify.difference import differences
from verify.disturbed import Disturbed

PIPELINE = """
stages:
  work:
    cmd: python work.py
    deps: [work.py]
    params: [limit]
    outs: [results]
    metrics:
      - metrics.json:
          cache: false
"""
OUTPUTS = """
stages:
  measure:
    outs: [features/activations, {features/mixing: {desc: ratios}}, reports/index.html]
    metrics: [{reports/metrics/finetune.json: {cache: false}}]
    plots: [reports/plots/mixing.csv]
"""
STEADY = """
import json, os
from pathlib import Path
Path("results").mkdir(exist_ok=True)
Path("results/words.csv").write_text("word\\n" + "\\n".join(sorted({"alpha", "beta", "gamma"})) + "\\n")
Path("metrics.json").write_text(json.dumps({"test": {"loss": 0.5}}))
"""
PLANTED = """
import datetime
words = {f"word {number}" for number in range(40)}
Path("results/words.csv").write_text("word\\n" + "\\n".join(words) + "\\n")
Path("metrics.json").write_text(json.dumps({"test": {"loss": 0.5, "date": datetime.date.today().isoformat()}}))
import numpy as np
parts = np.array_split(np.random.default_rng(0).random(9999, dtype=np.float32), int(os.environ["OMP_NUM_THREADS"]))
np.save("results/sum.npy", np.float32(sum(np.cumsum(part)[-1] for part in parts)))
"""


def repository(folder: Path, code: str) -> Path:
    folder.mkdir()
    (folder / "dvc.yaml").write_text(PIPELINE, encoding="utf-8")
    (folder / "work.py").write_text(code, encoding="utf-8")
    (folder / "params.yaml").write_text("limit: 3\n", encoding="utf-8")
    who = ["-c", "user.name=tests", "-c", "user.email=tests@example.org"]
    dvc = [sys.executable, "-m", "dvc"]
    environment = os.environ | {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in (
        ["git", "init", "--quiet"],
        [*dvc, "init", "--quiet"],
        [*dvc, "repro", "--quiet"],
        ["git", "add", "--all"],
        ["git", *who, "commit", "--quiet", "--message", "a pipeline"],
    ):
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return folder


def test_equal_clones_pass_and_planted_differences_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--clones", "2", "--folder", str(tmp_path)]
    assert main(["--repository", str(repository(tmp_path / "steady", STEADY)), *arguments]) == 0
    assert "2 clones, the same bytes in dvc.lock and every output" in capsys.readouterr().out

    assert main(["--repository", str(repository(tmp_path / "planted", STEADY + PLANTED)), *arguments]) == 1
    lines = capsys.readouterr().out
    assert "results/sum.npy: byte " in lines
    assert "dvc.lock: stages, work, outs, " in lines
    assert "metrics.json: test, date: " in lines
    assert list(tmp_path.glob("verify-*")) == []


def test_another_result_than_the_committed_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = repository(tmp_path / "steady", STEADY)
    (folder / "metrics.json").write_text("{}", encoding="utf-8")
    who = ["-c", "user.name=tests", "-c", "user.email=tests@example.org"]
    subprocess.run(["git", *who, "commit", "--quiet", "--all", "--message", "by hand"], cwd=folder, check=True)
    assert main(["--repository", str(folder), "--clones", "2", "--folder", str(tmp_path)]) == 1
    assert "not as committed: metrics.json" in capsys.readouterr().out
    # A profile changes the parameters, so nothing that was committed is expected.
    assert main(["--repository", str(folder), "--clones", "2", "--folder", str(tmp_path), "--set", "limit=4"]) == 0
    # Nor where only some of the stages run.
    assert main(["--repository", str(folder), "--clones", "2", "--folder", str(tmp_path), "--until", "work"]) == 0


def test_a_stage_that_fails_is_one_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    folder = repository(tmp_path / "steady", STEADY)
    (folder / "work.py").write_text("raise SystemExit('the stage says why')", encoding="utf-8")
    who = ["-c", "user.name=tests", "-c", "user.email=tests@example.org"]
    subprocess.run(["git", *who, "commit", "--quiet", "--all", "--message", "broken"], cwd=folder, check=True)
    with pytest.raises(SystemExit, match=r"one thread: .* failed:(.|\n)*the stage says why"):
        main(["--repository", str(folder), "--clones", "2", "--folder", str(tmp_path)])


@pytest.fixture
def clones(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "dvc.yaml").write_text(OUTPUTS, encoding="utf-8")
    return tmp_path / "one", tmp_path / "other"


def test_a_difference_is_named_down_to_the_key_row_or_number(clones: tuple[Path, Path]) -> None:
    for folder, value in zip(clones, (1.0, 2.0), strict=True):
        for place in ("reports/metrics", "reports/plots", "features/mixing", "features/activations/layer_01"):
            (folder / place).mkdir(parents=True)
        metrics = {"test": {"accuracy": 0.5, "loss": value}}
        (folder / "reports/metrics/finetune.json").write_text(json.dumps(metrics), encoding="utf-8")
        table = pd.DataFrame({"layer": [1, 2], "mean": [np.nan, value]})
        table.to_csv(folder / "reports/plots/mixing.csv", index=False)
        table.to_parquet(folder / "features/mixing/tokens.parquet")
        store = zarr.create_array(
            str(folder / "features/activations/layer_01/layer_output.zarr"), shape=(3, 4), dtype="f4", compressors=None
        )
        store[...] = np.arange(12).reshape(3, 4)
        store[2, 1] = value
        (folder / "dvc.lock").write_text(f"stages: {{measure: {{outs: [{{path: a, md5: '{value}'}}]}}}}\n", "utf-8")
    (clones[1] / "reports/index.html").write_text("page", encoding="utf-8")
    found = {line.partition(": ")[0]: line.partition(": ")[2] for line in differences(*clones)}
    store = "features/activations/layer_01/layer_output.zarr"
    assert found.pop("reports/index.html") == f"only in {clones[1]}"
    place = next(name for name in found if name.startswith(store))
    assert found.pop(place).startswith("1 of 12 numbers differ, first [2, 1]: ")
    assert found == {
        "features/mixing/tokens.parquet": "row 1, column mean: 1.0 and 2.0",
        "reports/metrics/finetune.json": "test, loss: 1.0 and 2.0",
        "reports/plots/mixing.csv": "row 1, column mean: 1.0 and 2.0",
        "dvc.lock": "stages, measure, outs, a, md5: 1.0 and 2.0",
    }


def test_a_disturbed_clone_is_the_same_where_its_dvc_lock_says_the_same(tmp_path: Path) -> None:
    clone = Disturbed(tmp_path)
    lock, results = clone.folder / "dvc.lock", clone.folder / "results.csv"
    clone.folder.mkdir()
    results.write_text("a\n", encoding="utf-8")
    lock.write_text("stages:\n  first: {md5: a}\n  second: {md5: [b, c]}\n", encoding="utf-8")
    state = clone.state()
    lock.write_text("stages:\n  second: {md5: [b, c]}\n  first: {md5: a}\n", encoding="utf-8")
    assert clone.state() == state
    lock.write_text("stages:\n  second: {md5: [c, b]}\n  first: {md5: a}\n", encoding="utf-8")
    assert {name for name, what in clone.state().items() if state.get(name) != what} == {"dvc.lock"}
    results.write_text("b\n", encoding="utf-8")
    (clone.temporary / "left").touch()
    assert clone.state().keys() - state.keys() == {"temporary file left"}
    assert clone.state()["results.csv"] != state["results.csv"]


def test_torch_has_its_cache_elsewhere_than_among_temporary_files(tmp_path: Path) -> None:
    clone = Disturbed(tmp_path)
    clone.folder.mkdir()
    (clone.folder / "caching.py").write_text("import torch._dynamo\n", encoding="utf-8")
    ended = clone.run("caching")
    assert (ended.status, list(clone.temporary.iterdir())) == (0, []), ended.said
