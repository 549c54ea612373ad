"""Every number in README.md and docs/results.md is that of a file in git, or of the code."""

from __future__ import annotations

import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from conftest import REPOSITORY

from docs.tables import MARKED, read_file, results, tables, with_tables
from stages.page.payload import PAGE_TOKENS
from stages.parameters import Parameters

PROFILE = dict(
    line.split("=", 1)
    for line in (REPOSITORY / "profiles/paper.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)


def committed(path: str) -> Any:
    """A file as it is in git: a run on another machine may have changed the last digits of those in the folder."""
    shown = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=REPOSITORY, capture_output=True, check=False)
    if shown.returncode:
        if not (REPOSITORY / ".git").exists():
            pytest.skip("no git repository, so nothing is committed")
        raise FileNotFoundError(path)
    text = shown.stdout.decode("utf-8")
    if path.endswith(".md"):
        return text
    return json.loads(text) if path.endswith(".json") else pd.read_csv(io.StringIO(text))


@pytest.mark.parametrize("document", ["README.md", "docs/results.md"])
def test_committed_sentences_say_what_the_committed_tables_say(document: str) -> None:
    text = committed(document)
    made = results(committed)
    assert {name for _, name, _ in MARKED.findall(text)} <= set(made | tables())
    assert with_tables(text, made) == text


def test_numbers_of_the_folder_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("x\n0.5\n", encoding="utf-8")
    (tmp_path / "a.json").write_text('{"x": 1}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert read_file("a.csv")["x"].tolist() == [0.5]
    assert read_file("a.json") == {"x": 1}


def points_by_default(layers: int) -> int:
    from stages.sites import EMBEDDING_POINTS

    chosen = Parameters().capture.points
    embedding = [point for point in chosen if point in EMBEDDING_POINTS]
    return len(embedding) + layers * (len(chosen) - len(embedding))


def test_every_other_number_in_the_readme_is_one_that_the_code_has() -> None:
    text = MARKED.sub("", (REPOSITORY / "README.md").read_text(encoding="utf-8"))
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    pyproject = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.11"' in pyproject
    assert (points_by_default(6), points_by_default(12)) == (32, 62)
    assert PAGE_TOKENS == 4096
    own, other = 1.5, 0.5
    assert (other / (own + other), other**2 / (own**2 + other**2)) == (0.25, 0.1)
    assert float(PROFILE["finetune.warmup_fraction"]) == 0.2
    assert (PROFILE["finetune.max_length"], PROFILE["finetune.batch_size"]) == ("512", "64")
    assert float(PROFILE["finetune.learning_rate"]) == 2e-5
    pipeline = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))
    assert len(pipeline["stages"]) == 7
    known = [
        "Python 3.11",
        "2 cores",
        "Brackets are 95 % intervals",
        "(1, -1, 0, 0) and (0, 0, 1, -1)",
        "1.5 of its own vector and 0.5 of the other's: the ratio is 0.5 / (0.5 + 1.5)\n= 25 %",
        "0.25 / (0.25 + 2.25) = 10 %",
        "512 tokens, batch 64,\nAdamW 2e-5, 20 % warm-up",
        "512-token text of a 12-layer model stays under 15 MB",  # tests/test_page.py makes one
        "up to 4,096 tokens",
        "2 + 5 L points",
        "32 for the default model and 62\nfor BERT-base",
        "its ratio is 0",
    ]
    for each in known:
        assert each in text, each
        text = text.replace(each, "")
    left = re.findall(r"[^\n]*(?<![\w-])\d[^\n]*", text)
    assert left == []
