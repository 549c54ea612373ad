"""The code's own structure: one-way imports, code that dvc.yaml names, defaults that are said once."""

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

from attnmix.core.names import CHECKPOINT_NAMES, IMPORTANCE_NAMES, MATRIX_NAMES, RATIO_NAMES, TOKEN_CLASSES
from attnmix.core.points import LAYER_POINTS, POINTS, STEP_POINTS
from attnmix.faithfulness.attributions import ATTRIBUTIONS
from attnmix.figures.labels import CHECKPOINTS, IMPORTANCE, POINT_MARKS, SPECIAL_LOOKS, STEP_MARKS, WORD_CLASSES
from attnmix.measures.matrices import LAYER_MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.models.families import PROJECTED, Stack

STAGES = ("sources", "download", "finetune", "tokenize", "capture", "measure", "faithfulness", "reduce", "render")
CODE = ("attnmix", "stages")
# `show` is no stage; the two packages hold a docstring.
RUN_BY_NO_STAGE = {"stages/show.py", "attnmix/__init__.py", "stages/__init__.py"}


def modules() -> list[Path]:
    return sorted(path for folder in CODE for path in (REPOSITORY / folder).rglob("*.py"))


@cache
def imported_by(module: Path) -> frozenset[Path]:
    """Return the project's modules that a module imports when it runs, those that it imports late among them."""
    found = set()
    tree = ast.parse(module.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        paths = [REPOSITORY / Path(*name.split(".")).with_suffix(".py") for name in names]
        found |= {path for path in paths if path.is_file() and path.relative_to(REPOSITORY).parts[0] in CODE}
    return frozenset(found)


def reached_from(module: Path) -> set[Path]:
    """Return every module that is imported by way of `module`, itself among them."""
    reached, left = set(), [module]
    while left:
        here = left.pop()
        if here not in reached:
            reached.add(here)
            left += imported_by(here)
    return reached


def declared(stage: str) -> list[str]:
    pipeline = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))
    found = pipeline["stages"][stage]
    return [name for name in found.get("do", found)["deps"] if name.startswith(CODE)]


def is_covered(path: Path, dependencies: list[str]) -> bool:
    return any(path.is_relative_to(REPOSITORY / each) for each in dependencies)


def test_no_module_imports_itself_by_way_of_others() -> None:
    circles = [module for module in modules() if any(module in reached_from(each) for each in imported_by(module))]
    assert circles == []


def test_library_knows_nothing_of_the_pipeline() -> None:
    library = [module for module in modules() if module.is_relative_to(REPOSITORY / "attnmix")]
    imported = {each for module in library for each in imported_by(module)}
    assert [each for each in imported if each.is_relative_to(REPOSITORY / "stages")] == []


@pytest.mark.parametrize("stage", STAGES)
def test_every_module_that_a_stage_runs_is_in_a_folder_that_dvc_watches(stage: str) -> None:
    code = {REPOSITORY / "stages/__main__.py"} | reached_from(REPOSITORY / f"stages/{stage}.py")
    code |= reached_from(REPOSITORY / "stages/common/cli.py")
    named = declared(stage)
    assert [path for path in code if not is_covered(path, named)] == []
    assert [name for name in named if not any(is_covered(path, [name]) for path in code)] == []


def test_every_file_of_the_code_makes_a_stage_run_again() -> None:
    named = [name for stage in STAGES for name in declared(stage)]
    files = [path for folder in CODE for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    left = {path for path in files if "__pycache__" not in path.parts and not is_covered(path, named)}
    assert {path.relative_to(REPOSITORY).as_posix() for path in left} == RUN_BY_NO_STAGE


def test_drawing_imports_nothing_that_computes() -> None:
    program = "import sys, stages.render; print(*(each for each in sys.argv[1:] if each in sys.modules))"
    heavy = ("torch", "transformers", "sklearn", "numba", "umap")
    run = subprocess.run([sys.executable, "-c", program, *heavy], cwd=REPOSITORY, capture_output=True, check=True)
    assert run.stdout.split() == []


def test_paths_of_a_run_stand_in_the_module_of_its_layout() -> None:
    outputs = ("features/", "reports/", "data/", "models/")
    elsewhere = []
    for module in modules():
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and text.startswith(outputs) and "\n" not in text and " " not in text:
                elsewhere.append((module.relative_to(REPOSITORY).as_posix(), text))
    names = {name for name, text in elsewhere if text != "data/sample"}  # an input: the default of dataset.name
    assert names == {"attnmix/store/layout.py"}


def test_stages_call_no_decomposition_that_torch_leaves_to_mkl() -> None:
    portable = {"eigh", "eigvalsh", "qr", "vector_norm"}  # those of `attnmix/arithmetic/kernels.py`, and torch's own
    called = {
        name
        for module in modules()
        for name in re.findall(r"torch\.(?:linalg|fft)\.(\w+)\(", module.read_text(encoding="utf-8"))
    }
    assert called - portable == set()


def test_every_name_has_its_declaration_and_its_words() -> None:
    assert (tuple(RATIOS), tuple(LAYER_MATRICES)) == (RATIO_NAMES, MATRIX_NAMES)
    assert (tuple(CHECKPOINTS), (*SPECIAL_LOOKS, *WORD_CLASSES)) == (CHECKPOINT_NAMES, TOKEN_CLASSES)
    assert tuple(IMPORTANCE) == IMPORTANCE_NAMES
    assert set(IMPORTANCE) <= set(ATTRIBUTIONS)


def test_every_point_has_its_words_and_its_place() -> None:
    assert tuple(POINT_MARKS) == POINTS
    assert all(mark.meaning for mark in POINT_MARKS.values())
    assert tuple(STEP_MARKS) == tuple(STEP_POINTS)
    everything = Stack(
        **{field.name: field.name for field in fields(Stack) if field.name not in ("feed_forward", "parallel")},
        feed_forward=("feed_forward",),
    )
    assert set(everything.places()) - {PROJECTED} == set(LAYER_POINTS)
