"""The benchmarks finish on small inputs and print complete tables."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from conftest import REPOSITORY

from attnmix.core.arithmetic.environment import PORTABLE
from attnmix.core.store.runs import Run
from benchmarks import operations, stages

CASES = ["capture", "capture-corpora"]
has_run = pytest.mark.skipif(not Run(REPOSITORY).test_predictions_file.exists(), reason="needs the run of `make repro`")


def assert_table_is_complete(section: str) -> None:
    assert "| MB |" in section
    assert section.count("\n| ") > 3


@has_run
@pytest.mark.long
def test_stage_benchmark_prints_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IMDB_FOLDER", raising=False)
    command = [sys.executable, "-m", "benchmarks.stages", "--small", "--repeats", "1", "--cases", "measure"]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr
    assert_table_is_complete(printed.stdout)


def run_here(arguments: list[str], folder: Path, _threads: int) -> tuple[float, str]:
    """Run one variant of a benchmark in this process; return a placeholder for the seconds and the printed text.

    This function replaces `stages.fresh_process`, to avoid the time that imports take. The last two elements of
    `arguments` are the case and the variant.
    """
    *_, case, way = arguments
    with chdir(folder), redirect_stdout(StringIO()) as printed:
        stages.in_this_process(case, way)
    return 1.0, printed.getvalue()


@has_run
@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_ways_of_a_stage_benchmark_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IMDB_FOLDER", raising=False)
    monkeypatch.setattr(stages, "fresh_process", run_here)
    options = Namespace(small=True, repeats=1, threads=1, arithmetic=PORTABLE)
    assert_table_is_complete(stages.run_case(name, "", options))


@pytest.mark.long  # three training runs in separate processes, one of them killed
def test_gpu_benchmark_runs_on_cpu_with_documented_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.card", "--small", "--to", str(tmp_path / "card.csv")]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "ATTNMIX_DEVICE": "cpu"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    table = pd.read_csv(tmp_path / "card.csv")
    results = dict(zip(table["row"], table["result"], strict=True))
    assert results["training, repeated and resumed"] == "the same bytes, resumed after SIGKILL too"
    missing = [row for row, result in results.items() if result.startswith("not here")]
    on_a_gpu = {"fine-tuning, fp16", "out of memory in finetune", "out of memory in capture"}
    assert set(missing) == {"numbers of --checkpoint", "capture, third size", *on_a_gpu}
    documented = (REPOSITORY / "benchmarks/RESULTS.md").read_text("utf-8")
    assert [row for row in results if f"| {row} |" not in documented] == []


def test_stage_time_is_split_by_operation(tmp_path: Path) -> None:
    operations.prepare(tmp_path)
    seconds = operations.profiled("sources", tmp_path)  # needs neither torch nor files of other stages
    assert seconds["imports"] > 0
    assert seconds["products"] == seconds["attention"] == seconds["maps"] == 0
    head, _, *rows = operations.table({"sources": seconds}).splitlines()
    assert head.count("|") == rows[0].count("|") == rows[1].count("|")
    assert [row.split(" | ")[0] for row in rows] == ["| sources", "| all"]


@pytest.mark.parametrize(
    ("file", "function", "operation"),
    [
        ("attnmix/core/arithmetic/kernels.py", "<lambda>", "products"),
        ("~", "<built-in method torch._C._nn.linear>", "products"),
        ("attnmix/core/arithmetic/kernels.py", "softmax", "attention"),
        ("numpy/linalg/_linalg.py", "eigvalsh", "eigenvalues"),
        ("~", "<method 'norm' of 'torch._C.TensorBase' objects>", "other operations on tensors"),
        ("umap/layouts.py", "optimize_layout_euclidean", "maps"),
        ("torch/__init__.py", "<module>", "imports"),
        ("attnmix/page/answer.py", "answer", "other"),
    ],
)
def test_functions_belong_to_operations(file: str, function: str, operation: str) -> None:
    assert operations.operation(file, function) == operation
