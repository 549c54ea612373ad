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

from docs.tables import DOCUMENTS, tables, with_tables
from stages.models.families import PROJECTED, Stack
from stages.sites import LAYER_POINTS, POINTS, STEP_POINTS
from stages.vocabulary import POINT_MARKS, STEP_MARKS

STAGES = ("sources", "download", "finetune", "capture", "measure", "validate", "reduce", "render")
# They check, report and name; they decide no number (said in dvc.yaml).
NO_DEPENDENCY = frozenset(
    {"errors.py", "command.py", "machine.py", "parameters.py", "resume.py", "vocabulary.py", "workplace.py"}
)


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


def reached_from(module: Path, past: frozenset[str] = frozenset(), types: bool = False) -> set[Path]:
    """Every module that is imported by way of `module`, but not by way of those named in `past`."""
    reached, left = set(), [module]
    while left:
        here = left.pop()
        if here not in reached and here.name not in past:
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


@pytest.mark.parametrize("stage", STAGES)
def test_dvc_knows_the_code_that_a_stage_runs_and_no_other(stage: str) -> None:
    code = {
        path.relative_to(REPOSITORY).as_posix()
        for path in reached_from(REPOSITORY / f"stages/{stage}.py", NO_DEPENDENCY)
    }
    named = declared(stage)
    assert {path for path in code if not any(path == name or path.startswith(f"{name}/") for name in named)} == set()
    idle = [name for name in named if name.endswith(".py") and name not in code]
    idle += [
        name for name in named if not name.endswith(".py") and not any(each.startswith(f"{name}/") for each in code)
    ]
    assert [name for name in idle if not name.endswith(".yaml")] == []


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
    portable = {"eigh", "eigvalsh", "qr", "vector_norm"}  # those of `stages/arithmetic/kernels.py`, and torch's own
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


def test_every_point_has_its_words_and_its_place() -> None:
    assert tuple(POINT_MARKS) == POINTS
    assert all(mark.meaning for mark in POINT_MARKS.values())
    assert tuple(STEP_MARKS) == tuple(STEP_POINTS)
    everything = Stack(
        **{field.name: field.name for field in fields(Stack) if field.name not in ("feed_forward", "parallel")},
        feed_forward=("feed_forward",),
    )
    assert set(everything.places()) - {PROJECTED} == set(LAYER_POINTS)
