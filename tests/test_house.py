"""The code's own structure: one-way imports, code that dvc.yaml names, names that are declared once."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY

from attnmix.core.names import (
    CHECKPOINT_NAMES,
    IMPORTANCE_NAMES,
    LAYER_POINTS,
    MATRIX_NAMES,
    POINTS,
    RATIO_NAMES,
    STEP_POINTS,
    TOKEN_CLASSES,
)
from attnmix.faithfulness.attributions import ATTRIBUTIONS
from attnmix.figures.labels import CHECKPOINTS, IMPORTANCE, POINT_MARKS, SPECIAL_LOOKS, STEP_MARKS, WORD_CLASSES
from attnmix.measures.matrices import LAYER_MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.models.families import PROJECTED, Stack
from stages.common.cli import STAGES

PIPELINE = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
CODE = ("attnmix", "stages")
# `show` is no stage; the two packages hold a docstring.
RUN_BY_NO_STAGE = {"stages/show.py", "attnmix/__init__.py", "stages/__init__.py"}
MODULES = sorted(path.relative_to(REPOSITORY) for folder in CODE for path in (REPOSITORY / folder).rglob("*.py"))
PORTABLE_DECOMPOSITIONS = {"eigh", "eigvalsh", "qr", "vector_norm"}
"""Those in `attnmix/arithmetic/kernels.py`, and torch's own; others depend on the processor."""


def parsed(module: Path) -> ast.Module:
    return ast.parse((REPOSITORY / module).read_text(encoding="utf-8"))


@cache
def imported_by(module: Path) -> frozenset[Path]:
    """Return the project's modules that a module imports when it runs, including those that it imports late."""
    names, tree = [], parsed(module)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node))]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            names += [each.name for each in node.names]
    return frozenset({Path(*name.split(".")).with_suffix(".py") for name in names} & set(MODULES))


def reached_from(*modules: Path) -> set[Path]:
    """Return every module that is imported by way of `modules`, themselves among them."""
    reached, remaining = set[Path](), list(modules)
    while remaining:
        module = remaining.pop()
        if module not in reached:
            reached.add(module)
            remaining += imported_by(module)
    return reached


def code_of(stage: str) -> list[str]:
    """Return the folders and files of code that dvc.yaml names for a stage."""
    entry = PIPELINE[stage]
    return [name for name in entry.get("do", entry)["deps"] if name.startswith(CODE)]


def is_in(path: Path, places: list[str]) -> bool:
    return any(path.is_relative_to(place) for place in places)


def test_imports_go_one_way_and_the_library_knows_nothing_of_the_pipeline_and_its_parameters() -> None:
    assert [module for module in MODULES if module in reached_from(*imported_by(module))] == []
    library = [module for module in MODULES if module.parts[0] == "attnmix"]
    assert [each for each in reached_from(*library) if each.parts[0] == "stages"] == []
    assert [
        each for each in library if re.search(r"pydantic|Parameters\b", (REPOSITORY / each).read_text("utf-8"))
    ] == []


@pytest.mark.parametrize("stage", STAGES)
def test_every_module_that_a_stage_runs_is_in_a_folder_that_dvc_watches(stage: str) -> None:
    code = reached_from(*(Path("stages", name) for name in ("__main__.py", f"{stage}.py", "common/cli.py")))
    watched = code_of(stage)
    assert [path for path in code if not is_in(path, watched)] == []
    assert [name for name in watched if not any(is_in(path, [name]) for path in code)] == []


def test_every_file_of_the_code_makes_a_stage_run_again() -> None:
    watched = [name for stage in STAGES for name in code_of(stage)]
    files = [path for folder in CODE for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    paths = [path.relative_to(REPOSITORY) for path in files if "__pycache__" not in path.parts]
    assert {path.as_posix() for path in paths if not is_in(path, watched)} == RUN_BY_NO_STAGE


def test_drawing_imports_nothing_that_computes() -> None:
    program = "import sys, stages.render; print(*(each for each in sys.argv[1:] if each in sys.modules))"
    heavy = ("torch", "transformers", "sklearn", "numba", "umap")
    run = subprocess.run([sys.executable, "-c", program, *heavy], cwd=REPOSITORY, capture_output=True, check=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize("stage", ["finetune", "tokenize", "capture", "measure", "faithfulness", "reduce"])
def test_one_word_names_a_stage_its_section_its_folder_and_its_tables(stage: str) -> None:
    entry = PIPELINE[stage]
    assert {Path(out).parts[1] for out in entry["outs"] if out.startswith("features/")} <= {stage}
    for kind, place in (("metrics", f"reports/metrics/{stage}.json"), ("plots", f"reports/plots/{stage}")):
        assert {name for out in entry.get(kind, []) for name in out} <= {place}
    section = {"reduce": "umap", "tokenize": "capture"}.get(stage, stage)
    assert section in {key.partition(".")[0] for key in entry["params"]}


def test_stages_call_no_decomposition_that_torch_leaves_to_mkl() -> None:
    code = "".join((REPOSITORY / module).read_text(encoding="utf-8") for module in MODULES)
    assert set(re.findall(r"torch\.(?:linalg|fft)\.(\w+)\(", code)) <= PORTABLE_DECOMPOSITIONS


def test_every_name_has_its_declaration_its_words_and_its_place() -> None:
    assert (tuple(RATIOS), tuple(LAYER_MATRICES)) == (RATIO_NAMES, MATRIX_NAMES)
    assert (tuple(CHECKPOINTS), (*SPECIAL_LOOKS, *WORD_CLASSES)) == (CHECKPOINT_NAMES, TOKEN_CLASSES)
    assert tuple(IMPORTANCE) == IMPORTANCE_NAMES
    assert set(IMPORTANCE) <= set(ATTRIBUTIONS)
    assert (tuple(POINT_MARKS), tuple(STEP_MARKS)) == (POINTS, tuple(STEP_POINTS))
    assert all(mark.meaning for mark in POINT_MARKS.values())
    names = {field.name: field.name for field in fields(Stack) if field.name not in ("feed_forward", "parallel")}
    everything = Stack(**names, feed_forward=("feed_forward",))
    assert set(everything.places()) - {PROJECTED} == set(LAYER_POINTS)
