"""The benchmarks run to their end: a few cases on little input, as no other test would see them break."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import REPOSITORY

from attnmix.store.runs import Run

CASES = ["capture", "measure", "pages"]


@pytest.mark.long
def test_cases_run_on_little_input_and_print_their_tables() -> None:
    if not Run(REPOSITORY).test_predictions_file.exists():
        pytest.skip("needs what `make repro` writes")
    command = [sys.executable, "-m", "benchmarks.stages", "--small", "--repeats", "1", "--cases", *CASES]
    environment = {name: value for name, value in os.environ.items() if name != "IMDB_FOLDER"}
    printed = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr
    tables = printed.stdout.split("\n## ")
    assert len(tables) == len(CASES)
    for each in tables:
        assert "| peak memory |" in each
        assert each.count("\n| ") > 3
