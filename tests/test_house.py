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
from docs.tables import DOCUMENTS, tables, with_tables

STAGES = ("sources", "download", "finetune", "capture", "measure", "validate", "reduce", "render")
# Commands beside the pipeline: no stage runs them, so a change of theirs changes none of its results.
RUN_BY_NO_STAGE = {"stages/show.py", "attnmix/models/convert.py"}


@cache
def imported_by(module: Path, types: bool = False) -> frozenset[Path]:
    """Modules of `stages` that a module imports when it runs, also those that it imports late, or for its `types`."""
    found = set()
    tree = ast.parse(module.read_text(encoding="utf-8"))
    for node in ast.walk(tree if types else _without_type_checking(tree)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        for name in names:
            path = REPOSITORY / Path(*name.split(".")).with_suffix(".py")
            if name.startswith("stages.") and path.is_file():
                found.add(path)
    return frozenset(found)


def _without_type_checking(tree: ast.Module) -> ast.Module:
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return tree


def reached_from(module: Path, types: bool = False) -> set[Path]:
    """Every module that is imported by way of `module`."""
    reached, left = set(), [module]
    while left:
        here = left.pop()
        if here not in reached:
            reached.add(here)
            left += imported_by(here, types)
    return reached


def modules() -> list[Path]:
    return sorted((REPOSITORY / "stages").rglob("*.py"))


def declared(stage: str) -> list[str]:
    pipeline = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))
    found = pipeline["stages"][stage]
    return [name for name in found.get("do", found)["deps"] if name.startswith("stages")]


def test_no_module_imports_itself_by_way_of_others() -> None:
    circles = [
        module
        for module in modules()
        if any(module in reached_from(each, types=True) for each in imported_by(module, types=True))
    ]
    assert circles == []


def test_no_module_but_show_and_the_tests_imports_a_stage() -> None:
    stages = {REPOSITORY / f"stages/{name}.py" for name in STAGES}
    allowed = {REPOSITORY / "stages/show.py"}  # which runs several of them in one process
    assert {module for module in modules() if imported_by(module) & stages} == allowed


def code_of(stage: str) -> set[str]:
    """The files that a stage runs: its modules, the packages around them, and the files beside them that they name."""
    folder = REPOSITORY / "stages"
    code = reached_from(folder / f"{stage}.py") | reached_from(folder / "__init__.py")
    code |= {parent / "__init__.py" for module in code for parent in module.parents if parent.is_relative_to(folder)}
    for module in list(code):
        text = module.read_text(encoding="utf-8")
        beside = [each for each in files_of_code() if each.suffix != ".py" and each.is_relative_to(module.parent)]
        code |= {each for each in beside if f'"{each.relative_to(module.parent).parts[0]}"' in text}
    return {each.relative_to(REPOSITORY).as_posix() for each in code}


def files_of_code() -> list[Path]:
    tracked = (each for each in (REPOSITORY / "stages").rglob("*") if each.is_file())
    return [each for each in tracked if "__pycache__" not in each.parts]


def is_covered(path: str, dependencies: list[str]) -> bool:
    return any(path == each or path.startswith(f"{each}/") for each in dependencies)


@pytest.mark.parametrize("stage", STAGES)
def test_dvc_knows_the_code_that_a_stage_runs_and_no_other(stage: str) -> None:
    code, named = code_of(stage), declared(stage)
    assert {path for path in code if not is_covered(path, named)} == set()
    assert [name for name in named if not any(is_covered(path, [name]) for path in code)] == []


def test_every_file_of_the_code_makes_a_stage_run_again() -> None:
    named = [name for stage in STAGES for name in declared(stage)]
    files = {each.relative_to(REPOSITORY).as_posix() for each in files_of_code()}
    assert {path for path in files if not is_covered(path, named)} == RUN_BY_NO_STAGE


def test_drawing_imports_nothing_that_computes() -> None:
    program = "import sys, stages.render; print(*(each for each in sys.argv[1:] if each in sys.modules))"
    heavy = ("torch", "transformers", "sklearn", "numba", "umap")
    run = subprocess.run([sys.executable, "-c", program, *heavy], cwd=REPOSITORY, capture_output=True, check=True)
    assert run.stdout.split() == []


def test_no_module_past_350_lines_and_no_function_past_50() -> None:
    long = []
    for module in modules():
        text = module.read_text(encoding="utf-8")
        if text.count("\n") > 350:
            long.append(module.name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 50:
                long.append(f"{module.name}: {node.name}")
    assert long == []


def test_paths_of_outputs_stand_in_one_room() -> None:
    outputs = ("features/", "reports/", "data/reviews", "models/pretrained", "models/finetuned")
    elsewhere = []
    for module in modules():
        if module.parent.name != "outputs":
            for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
                text = node.value if isinstance(node, ast.Constant) else None
                if isinstance(text, str) and text.startswith(outputs) and "\n" not in text and " " not in text:
                    elsewhere.append(f"{module.name}: {text}")
    assert elsewhere == []


def test_stages_call_no_decomposition_that_torch_leaves_to_mkl() -> None:
    portable = {"eigh", "eigvalsh", "qr", "vector_norm"}  # those of `attnmix/arithmetic/kernels.py`, and torch's own
    called = {
        name
        for module in modules()
        for name in re.findall(r"torch\.(?:linalg|fft)\.(\w+)\(", module.read_text(encoding="utf-8"))
    }
    assert called - portable == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_in_the_documents_are_those_of_the_declarations(document: str) -> None:
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    assert "<!-- table:" in text
    assert with_tables(text, tables()) == text


def test_every_name_has_its_declaration_and_its_words() -> None:
    assert (tuple(RATIOS), tuple(LAYER_MATRICES)) == (RATIO_NAMES, MATRIX_NAMES)
    assert (tuple(CHECKPOINTS), (*SPECIAL_LOOKS, *WORD_CLASSES)) == (CHECKPOINT_NAMES, TOKEN_CLASSES)
    assert tuple(IMPORTANCE) == IMPORTANCE_NAMES
    assert {name: ATTRIBUTIONS[name].label for name in IMPORTANCE} == IMPORTANCE


def test_every_point_has_its_words_and_its_place() -> None:
    assert tuple(POINT_MARKS) == POINTS
    assert all(mark.meaning for mark in POINT_MARKS.values())
    assert tuple(STEP_MARKS) == tuple(STEP_POINTS)
    everything = Stack(
        **{field.name: field.name for field in fields(Stack) if field.name not in ("feed_forward", "parallel")},
        feed_forward=("feed_forward",),
    )
    assert set(everything.places()) - {PROJECTED} == set(LAYER_POINTS)
