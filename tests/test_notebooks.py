"""The notebooks run, without a warning, and print what they show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def words(output: Mapping[str, Any]) -> list[str]:
    """Return the words of an output without its numbers, which differ in the last digits from machine to machine."""
    text = output.get("text") or output["data"].get("text/plain", "")
    return re.findall(r"[^\W\d]+", "".join(text))


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_what_it_holds(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="the locks have no nbclient yet")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # ipywidgets would draw progress bars
    stored, run = nbformat.read(notebook, 4), nbformat.read(notebook, 4)
    nbclient.NotebookClient(run, timeout=600, resources={"metadata": {"path": str(notebook.parent)}}).execute()
    for before, after in zip(stored.cells, run.cells, strict=True):
        outputs = after.get("outputs", [])
        assert [each for each in outputs if each.get("name") == "stderr"] == []
        # An output that is too large to store, or depends on a run of the pipeline, carries a tag.
        if not before.metadata.get("tags"):
            assert [words(each) for each in outputs] == [words(each) for each in before.get("outputs", [])]
