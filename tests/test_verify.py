"""`make verify` lists outputs that depend on date, hash seed or threads; `make accept` requires unchanged results."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from dvc_repository import Repository, repository_of

from tools import accept, compare_runs, verify

PIPELINE = """
stages:
  work:
    cmd: python work.py
    deps: [work.py]
    params: [limit]
    outs: [table.csv, rows.parquet, store.zarr, image.bin]
    metrics: [metrics.json: {cache: false}]
"""
# In `PLANTED`, each output depends on the environment of the run.
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


pytestmark = pytest.mark.long  # each test creates clones and runs DVC in them


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Return a repository with a committed pipeline that always has the same results."""
    files = {"dvc.yaml": PIPELINE, "work.py": STEADY, "params.yaml": "limit: 3\n"}
    made = repository_of(tmp_path_factory.mktemp("steady") / "repository", files)
    made.dvc("repro", "--quiet")
    made.commit("A pipeline")
    return made


@pytest.fixture
def repository(steady: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Return a copy of the steady repository, and make this copy the current folder."""
    made = steady.copy(tmp_path / "repository").enter(monkeypatch)
    monkeypatch.setattr(verify, "SURROUNDINGS", verify.SURROUNDINGS[:2])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return made


def test_planted_differences_between_runs_are_named(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main([]) == 0
    assert "dvc.lock and all outputs of 2 clones are identical" in capsys.readouterr().out

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


def test_uncommitted_results_and_failed_stages_are_named(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository.folder / "metrics.json").write_text("{}", encoding="utf-8")
    repository.commit("A change")
    assert verify.main([]) == 1
    assert "not as committed: metrics.json" in capsys.readouterr().out
    # With a profile, results are not compared with committed results.
    (tmp_path / "profile.txt").write_text("# little\nlimit=4\n", encoding="utf-8")
    assert verify.main(["--profile", str(tmp_path / "profile.txt"), "--folder", str(tmp_path / "kept")]) == 0
    assert (tmp_path / "kept/two threads é/clone/params.yaml").read_text(encoding="utf-8") == "limit: 4\n"

    (repository.folder / "work.py").write_text("raise SystemExit('the stage says why')", encoding="utf-8")
    repository.commit("A fault")
    with pytest.raises(SystemExit, match=r"one thread: .* failed:(.|\n)*the stage says why"):
        verify.main([])


@pytest.fixture
def changed(repository: Repository, tmp_path: Path) -> Repository:
    """Return the repository after an uncommitted change to its code, and write the profile `tiny.txt`."""
    (tmp_path / "tiny.txt").write_text("limit=1\n", encoding="utf-8")
    (repository.folder / "work.py").write_text(f"import helper\n{STEADY}", encoding="utf-8")
    (repository.folder / "helper.py").write_text("", encoding="utf-8")
    return repository


def test_change_without_effect_is_accepted(
    changed: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "work" in changed.dvc("status", "--json")
    assert accept.main(["--profile", "../tiny.txt"]) == 0
    assert "accepted: 5 outputs" in capsys.readouterr().out
    assert changed.dvc("status", "--json").strip() == "{}"
    assert changed.git("diff", "--name-only").split() == ["dvc.lock", "work.py"]
    assert list(tmp_path.glob("accept-*")) == []


def test_changed_results_are_named_and_not_accepted(changed: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    (changed.folder / "work.py").write_text(STEADY.replace("0.25", "0.5"), encoding="utf-8")
    assert accept.main(["--profile", "../tiny.txt"]) == 1
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines == [f"{table}: row 2, column mean: 0.25 and 0.5" for table in ("rows.parquet", "table.csv")]
    assert changed.git("diff", "--name-only").split() == ["work.py"]


def test_changes_beyond_code_are_refused(changed: Repository) -> None:
    changed.commit("A change without its run")
    with pytest.raises(SystemExit, match=r"dvc\.lock of the last commit is already stale(.|\n)*work\.py modified"):
        accept.main(["--profile", "../tiny.txt"])
    (changed.folder / "metrics.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"^error: metrics\.json: modified; .* `dvc checkout metrics\.json`"):
        accept.main(["--profile", "../tiny.txt"])
    (changed.folder / "params.yaml").write_text("limit: 4\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"^error: params\.yaml has changed since the last commit"):
        accept.main(["--profile", "../tiny.txt"])


def test_command_compares_two_runs(repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = repository.copy(tmp_path / "other")
    assert compare_runs.main([".", str(other.folder)]) == 0
    assert capsys.readouterr().out == "5 outputs are identical\n"
    (other.folder / "image.bin").write_bytes(bytes([7, 7, 7]))
    assert compare_runs.main([".", str(other.folder)]) == 1
    assert capsys.readouterr().out == "image.bin: byte 3 of 5 and 3\n"


def test_model_stages_run_on_emulated_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "EMULATOR", "echo")
    folder = verify.emulated_python("Haswell", tmp_path / "emulated")
    for stage, is_emulated in {"finetune": True, "capture": True, "download": False, "tokenize": False}.items():
        command = [str(folder / "python"), "-m", "stages", stage]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)  # without a pipeline
        assert run.stdout.startswith("-cpu Haswell") == is_emulated, stage
        assert (run.returncode == 0) == is_emulated, stage
