"""Class names that look like numbers or missing values survive a round trip through csv files of results."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import REPOSITORY, write_parameters
from pandas.testing import assert_frame_equal

from attnmix.core.errors import InputError
from attnmix.core.store.files import read_results
from attnmix.core.store.runs import Run
from attnmix.core.store.writers import write_plot
from experiments.__main__ import main

NAMES = ["None", "NA", "null", "NaN", "nan", "N/A", "", "True", "False", "1", "01", "1.0", "-inf", "1e3", "<NA>", " a"]


@pytest.mark.parametrize("names", [NAMES, ["True", "False"], ["1", "0"], ["None", "NA"], ["01", "1"], ["nan", ""]])
def test_class_names_survive_round_trip(tmp_path: Path, names: list[str]) -> None:
    count = len(names)
    table = pd.DataFrame(
        {
            "document": [f"test/{number}" for number in range(count)],
            "label": names,
            "predicted": names[::-1],
            "group": names,
            "label_name": names,
            "margin": [0.5, *[float("nan")] * (count - 1)],
            "layer": range(count),
        }
    )
    run = Run(tmp_path)
    write_plot("margins", table, run.tables / "faithfulness")
    read = run.table("faithfulness/margins")
    assert_frame_equal(read, table, check_dtype=False)
    assert [str(read[name].dtype) for name in ("margin", "layer")] == ["float64", "int64"]
    iterator: Any = run.table("faithfulness/margins", chunksize=1)
    parts = pd.concat(part for part in iterator)
    assert parts["predicted"].tolist() == names[::-1]
    assert len(run.table_rows("faithfulness/margins", {"label": names[0]})) == 1


def test_committed_tables_are_read_unchanged() -> None:
    folders = ("reports/plots", "docs/measures", "docs/study")
    files = [file for folder in folders for file in sorted((REPOSITORY / folder).rglob("*.csv"))]
    assert len(files) > 10
    for file in files:
        assert_frame_equal(read_results(file), pd.read_csv(file), obj=str(file))
        assert_frame_equal(read_results(io.StringIO(file.read_text(encoding="utf-8"))), pd.read_csv(file))


def test_results_are_read_by_one_function() -> None:
    folders = ("attnmix", "stages", "experiments", "docs")
    files = [file for folder in folders for file in (REPOSITORY / folder).rglob("*.py")]
    readers = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_reader = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("read_csv")
            if is_reader and "dtype=str" not in ast.unparse(node):
                readers.append(file.relative_to(REPOSITORY).as_posix())
    assert readers == ["attnmix/core/store/files.py"] * 2


MERGED = "<<<<<<< HEAD\na,b\n1,2\n=======\na,b,c\n1,2,3\n>>>>>>> other\n"


@pytest.mark.parametrize("content", ["", MERGED])
def test_damaged_result_file_is_one_error(tmp_path: Path, content: str) -> None:
    run = Run(tmp_path)
    for file in (run.tables / "measure/mixing.csv", run.metrics_folder / "measure.json"):
        file.parent.mkdir(parents=True)
        file.write_text(content)
    for read in (lambda: run.table("measure/mixing"), lambda: run.metrics("measure")):
        with pytest.raises(InputError, match=r"mixing\.csv|measure\.json is damaged .*rerun the stage measure"):
            read()
    (run.metrics_folder / "measure.json").write_text(json.dumps([1]))
    with pytest.raises(InputError, match=r"measure\.json is damaged or cannot be read \(it is not a JSON object\)"):
        run.metrics("measure")


def test_table_without_means_lists_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_parameters(tmp_path)
    for name, columns in (("faithfulness/margins", "document,margin"), ("measure/geometry", "checkpoint,layer,mean")):
        file = tmp_path / f"reports/plots/{name}.csv"
        file.parent.mkdir(parents=True)
        file.write_text(f"{columns}\n")
    expected = (
        r"^--csv: faithfulness/margins has no column checkpoint; it has document, margin; allowed: measure/geometry$"
    )
    with pytest.raises(InputError, match=expected):
        main(["table", ".", "--csv", "faithfulness/margins"])
    with pytest.raises(InputError, match=r"no experiment with reports/plots/no\.csv; .* tables: measure/geometry$"):
        main(["table", ".", "--csv", "no"])
