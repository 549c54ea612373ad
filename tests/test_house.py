"""Imports are acyclic, and dvc.yaml declares the code, inputs, outputs and parameters that each stage uses."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import sys
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from conftest import LITTLE, REPOSITORY, digest, little_work, toy_reviews, write_parameters, write_tiny_bert
from dvc.utils.hydra import apply_overrides
from pydantic import BaseModel
from transformers import AutoConfig

from attnmix.core import names
from attnmix.faithfulness.attributions import ATTRIBUTIONS
from attnmix.figures import labels
from attnmix.measures.controls import CONTROLS, RANDOM
from attnmix.measures.input_parts import RULES
from attnmix.measures.matrices import LAYER_MATRICES, MATRICES
from attnmix.measures.ratios import RATIOS, preferred_ratio
from attnmix.models.families import FAMILIES, HEADS, PROJECTED, Stack, family_of
from stages import tokenize
from stages.common.parameters import Parameters, read_parameters
from stages.common.resume import UNFINISHED

PIPELINE: dict[str, Any] = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))
STAGES = {name: stage.get("do", stage) for name, stage in PIPELINE["stages"].items()}
CODE = ("attnmix", "stages")
MODULES = sorted(path.relative_to(REPOSITORY) for folder in CODE for path in (REPOSITORY / folder).rglob("*.py"))
PORTABLE_DECOMPOSITIONS = {"eigh", "eigvalsh", "qr", "vector_norm"}
"""The allowed functions of `torch.linalg`: results of all others would depend on the processor.

`kernels.py` computes the decompositions with NumPy.
"""


def parsed(module: Path) -> ast.Module:
    return ast.parse((REPOSITORY / module).read_text(encoding="utf-8"))


@cache
def imported_by(module: Path) -> frozenset[Path]:
    """Return the project modules that a module imports, including imports inside functions."""
    names, tree = [], parsed(module)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node))]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            names += [each.name for each in node.names]
    return frozenset({Path(*name.split(".")).with_suffix(".py") for name in names} & set(MODULES))


def reached_from(*modules: Path) -> set[Path]:
    """Return all modules that `modules` import, directly or indirectly, and `modules` themselves."""
    reached, remaining = set[Path](), list(modules)
    while remaining:
        module = remaining.pop()
        if module not in reached:
            reached.add(module)
            remaining += imported_by(module)
    return reached


def code_of(stage: str) -> list[str]:
    """Return the code folders and files that dvc.yaml lists for a stage."""
    return [name for name in STAGES[stage]["deps"] if name.startswith(CODE)]


def is_in(path: Path, parents: Iterable[str]) -> bool:
    return any(path.is_relative_to(parent) for parent in parents)


def test_imports_are_acyclic_and_library_is_independent_of_stages() -> None:
    assert [module for module in MODULES if module in reached_from(*imported_by(module))] == []
    library = [module for module in MODULES if module.parts[0] == "attnmix"]
    assert [each for each in reached_from(*library) if each.parts[0] == "stages"] == []


@pytest.mark.parametrize("stage", STAGES)
def test_dvc_tracks_all_code_of_each_stage(stage: str) -> None:
    code = reached_from(*(Path("stages", name) for name in (f"{stage}.py", "common/cli.py")))
    watched = code_of(stage)
    assert [path for path in code if not is_in(path, watched)] == []
    assert [name for name in watched if not any(is_in(path, [name]) for path in code)] == []


def test_stage_command_only_calls_tracked_code() -> None:
    command = Path("stages/__main__.py")
    docstring, *imports, condition = parsed(command).body
    assert isinstance(docstring, ast.Expr)
    assert imported_by(command) == {Path("stages/common/cli.py")}
    assert all(isinstance(each, ast.Import | ast.ImportFrom) for each in imports)
    assert ast.unparse(condition) == "if __name__ == '__main__':\n    main(sys.argv[1:])"


def test_code_hash_ignores_comments_and_docstrings() -> None:
    code_of = runpy.run_path(str(REPOSITORY / ".ci/code_hash.py"))["code_of"]
    documented = 'NUMBER = 2\n"""A number."""\ndef half(x):\n    """Return half."""\n    return x / NUMBER  # exact\n'
    assert code_of(documented) == code_of("NUMBER = 2\ndef half(x):\n    return x / NUMBER\n")
    assert code_of(documented) != code_of(documented.replace("NUMBER = 2", "NUMBER = 3"))
    assert code_of("name = 'a'") != code_of("name = 'b'")


def test_artifacts_are_cached_outputs() -> None:
    kept = {out for stage in STAGES.values() for out in stage.get("outs", ()) if isinstance(out, str)}
    assert {artifact["path"] for artifact in PIPELINE["artifacts"].values()} <= kept


def test_names_have_declarations_labels_and_settings() -> None:
    assert (tuple(RATIOS), tuple(MATRICES)) == (names.RATIO_NAMES, names.MATRIX_NAMES)
    assert tuple(CONTROLS) == names.RATIO_CONTROL_NAMES
    assert tuple(RULES) == names.PARTS_RULE_NAMES
    settings = Parameters().measure
    assert {*settings.methods, *names.REDUNDANT_RATIO_NAMES} == {*names.RATIO_NAMES}
    assert not {*settings.methods} & {*names.REDUNDANT_RATIO_NAMES}
    assert tuple(settings.matrices) == names.DEFAULT_MATRIX_NAMES
    assert tuple(settings.controls) == names.DEFAULT_CONTROL_NAMES
    assert tuple(labels.RATIO_MARKS) == names.RATIO_NAMES  # figures omit ratios without marks
    assert set(MATRICES) <= set(labels.MATRIX_LABELS)
    known = {*RATIOS, *LAYER_MATRICES, *names.POINTS, HEADS}
    for family in FAMILIES:
        assert set(family_of(AutoConfig.for_model(family)).absent()) <= known, family
    assert set(labels.STEP_MEASURES) == set(names.STEP_MEASURES)
    assert set(labels.CONTROL_LABELS) <= set(CONTROLS)
    assert labels.RANDOM_MODEL == RANDOM
    assert set(labels.CURVE_LOOKS) <= {*names.CHECKPOINT_NAMES, *labels.CONTROL_LABELS}
    assert tuple(labels.CHECKPOINTS) == names.CHECKPOINT_NAMES
    assert (*labels.SPECIAL_MARKERS, *labels.WORD_CLASSES) == names.TOKEN_CLASSES
    assert tuple(labels.IMPORTANCE) == names.IMPORTANCE_NAMES
    assert set(labels.IMPORTANCE) <= set(ATTRIBUTIONS)
    assert (tuple(labels.POINT_MARKS), tuple(labels.STEP_MARKS)) == (names.POINTS, tuple(names.STEP_POINTS))
    assert all(mark.meaning for mark in labels.POINT_MARKS.values())
    others = ("feed_forward", "parallel", "own_attention", "activation", "gated")
    paths = {field.name: field.name for field in fields(Stack) if field.name not in others}
    everything = Stack(**paths, feed_forward=("feed_forward",))
    assert set(everything.places()) - {PROJECTED} == set(names.LAYER_POINTS)


def test_page_explains_every_ratio_and_matrix() -> None:
    source = (REPOSITORY / "attnmix/page/src/shares.ts").read_text(encoding="utf-8")
    explanations = source[source.index("const EXPLANATIONS") : source.index("const ROLLOUT")]
    explained = set(re.findall(r"^  (\w+):", explanations, re.MULTILINE))
    matrices = {name for name in names.MATRIX_NAMES if not name.endswith(names.ROLLOUT)}
    assert explained == {*names.RATIO_NAMES, *matrices, names.INPUT_PARTS}


def test_preferred_ratio_covers_attention_block() -> None:
    assert preferred_ratio(RATIOS) == "attnresln_n"
    assert preferred_ratio(["layer_n", "attn_w", "attnres_n"]) == "attnres_n"
    assert preferred_ratio(["layer_n", "enc_n"]) == "layer_n"
    assert {preferred_ratio([name]) for name in RATIOS} == set(RATIOS)


def test_stages_use_portable_decompositions() -> None:
    code = "".join((REPOSITORY / module).read_text(encoding="utf-8") for module in MODULES)
    assert set(re.findall(r"torch\.(?:linalg|fft)\.(\w+)\(", code)) <= PORTABLE_DECOMPOSITIONS


# Ignored parameters: keys for hub sources, folders and runs without training; keys of later stages that `download` and
# `finetune` only validate; numbers of texts in stages that use the texts of `tokenize`; and the arithmetic of `reduce`,
# which uses no torch tensors and reads the environment.
EXEMPT = {
    "sources": {"dataset.test_split", "dataset.train_split"},
    "download": {"dataset.revision", "dataset.test_split", "model.revision", "finetune.epochs"},
    "finetune": {"capture.documents", "capture.max_length", "faithfulness.max_length"},
    "inspect": {"model.base"},
    "measure": {"measure.documents", "model.base"},
    "faithfulness": {"faithfulness.documents"},
    "reduce": {"arithmetic"},
}


def all_keys(section: str) -> set[str]:
    """Return the keys of a section of params.yaml, or the section itself if it is a single value."""
    fields = getattr(Parameters.model_fields[section].annotation, "model_fields", None)
    return {f"{section}.{key}" for key in fields} if fields else {section}


SECTIONS = {type(value): f"{name}." for name, value in Parameters() if isinstance(value, BaseModel)}
ALL_KEYS = {key for section in Parameters.model_fields for key in all_keys(section)}


def declared_keys(stage: str) -> set[str]:
    """Return the parameters of a stage in dvc.yaml; sections, or the whole file, are replaced by their keys."""
    names = STAGES[stage]["params"]
    if {"params.yaml": None} in names:
        return ALL_KEYS
    return set().union(*(all_keys(name) if name in Parameters.model_fields else {name} for name in names))


def outputs(stage: str) -> list[str]:
    """Return the files and folders that dvc.yaml lists as outputs of a stage."""
    outs = [out for kind in ("outs", "metrics", "plots") for out in STAGES[stage].get(kind, ())]
    return [out if isinstance(out, str) else next(iter(out)) for out in outs]  # a mapping from the name to options


def outside(paths: set[str], parents: Iterable[str]) -> set[str]:
    """Return the paths outside all `parents`."""
    return {path for path in paths if not is_in(Path(path), parents)}


class Observed(NamedTuple):
    """The keys that a stage read on tiny input, and the files that it opened and wrote."""

    keys: set[str]
    opened: set[str]
    written: set[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty folder with spaces, a quote and non-Latin letters in its name."""
    return tmp_path_factory.mktemp("Möbius' Ordner 模型 ")


@pytest.fixture(scope="module")
def observed(folder: Path) -> dict[str, Observed]:
    """Run all stages in order on tiny inputs in one folder, and return what was observed in each stage."""
    checkpoint = write_tiny_bert(folder / "bert", layers=2)
    toy_reviews(40, 0).to_csv(folder / "reviews.csv", index=False)
    capture = {"documents": [0, 1], "max_length": 40}
    write_parameters(folder, **LITTLE | {"model": {"name": str(checkpoint)}, "capture": capture})
    keys, opened = set[str](), set[str]()

    def record(section: BaseModel, name: str) -> Any:
        """Return an attribute of a section, and record the parameters that this access reads."""
        value = object.__getattribute__(section, name)
        prefix = SECTIONS.get(type(section), "")
        if name in type(section).model_fields and not isinstance(value, BaseModel):
            keys.add(f"{prefix}{name}")
        elif name == "model_dump" and prefix:
            keys.update(all_keys(prefix.removesuffix(".")))
        return value

    def record_opened(event: str, arguments: tuple[Any, ...]) -> None:
        """Audit hook that records opened files."""
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            path = Path(os.path.abspath(arguments[0]))  # noqa: PTH100 (without following links)
            if path.is_relative_to(folder) and path.is_file():
                opened.add(path.relative_to(folder).as_posix())
            elif is_in(path, (REPOSITORY / name for name in CODE)) and path.suffix not in (".py", ".pyc"):
                opened.add(path.relative_to(REPOSITORY).as_posix())

    def times() -> dict[str, int]:
        """Return the modification times of all files in the folder."""
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in files}

    sys.addaudithook(record_opened)
    runs = {}
    with little_work(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(BaseModel, "__getattribute__", record, raising=False)
        parameters = read_parameters()
        for name in STAGES:
            module, before = import_module(f"stages.{name}"), times()
            keys.clear()
            opened.clear()
            module.main(parameters)
            runs[name] = Observed(set(keys), set(opened), {path for path, _ in times().items() - before.items()})
            assert before.keys() <= times().keys()
    return runs


@pytest.mark.parametrize("stage", STAGES)
def test_stage_declares_exactly_the_parameters_it_reads(observed: dict[str, Observed], stage: str) -> None:
    exempt = EXEMPT.get(stage, set())
    # `render` reads all keys, because the page lists changed parameters.
    read = ALL_KEYS if stage == "render" else observed[stage].keys
    assert declared_keys(stage) - exempt == read - exempt


@pytest.mark.parametrize("stage", STAGES)
def test_stage_accesses_exactly_its_declared_files(observed: dict[str, Observed], stage: str) -> None:
    _, opened, written = observed[stage]
    assert [out for out in outputs(stage) if outside(written, [out]) == written] == []
    # Before the first run of the stage `sources`, `download` writes the list of watched files.
    assert outside(written, [*outputs(stage), *(["reports/sources.json"] if stage == "download" else [])]) == set()
    sources = ["reviews.csv", "bert"] if stage in ("sources", "download") else []  # see params.yaml
    assert outside(opened, [*STAGES[stage]["deps"], *outputs(stage), str(UNFINISHED), *sources]) == set()
    assert opened


def rerun(key: str, changed_out: str) -> set[str]:
    """Return the stages that DVC reruns if a change to `key` changes the output `changed_out` of `tokenize`."""
    stages = {"tokenize"}
    changed = {changed_out}
    for name, stage in STAGES.items():  # in order of execution
        reads_key = name != "tokenize" and key in declared_keys(name)
        reads_changed = any(is_in(Path(path), changed) for path in stage["deps"])
        if reads_key or reads_changed:
            stages.add(name)
            changed.update(outputs(name))
    return stages


@pytest.mark.parametrize("documents", [[], [1]])
def test_adding_a_text_does_not_change_statistics(
    observed: dict[str, Observed], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: list[int]
) -> None:
    assert observed
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    monkeypatch.chdir(copy)
    written = []
    for texts in ([], ["time flies like an arrow"]):
        parameters = read_parameters()
        capture = parameters.capture.model_copy(update={"documents": documents, "texts": texts})
        tokenize.main(parameters.model_copy(update={"capture": capture}))
        written.append({name: digest(copy / "features" / "tokenize" / name) for name in ("captured", "reviews")})
    before, after = written
    assert [name for name in before if before[name] != after[name]] == ["captured"]
    again = rerun("capture.texts", "features/tokenize/captured")
    assert again == {"tokenize", "capture", "inspect", "reduce", "render"}


@pytest.mark.parametrize("profile", sorted((REPOSITORY / "profiles").glob("*.txt")), ids=lambda path: path.stem)
def test_profile_is_valid(tmp_path: Path, profile: Path) -> None:
    lines = [line for line in profile.read_text(encoding="utf-8").splitlines() if not line.startswith("# ")]
    assert [line for line in lines if len(line.split()) != 1] == []  # the shell separates overrides at spaces
    write_parameters(tmp_path)
    apply_overrides(tmp_path / "params.yaml", lines)  # like `dvc exp run -S`
    parameters = read_parameters(tmp_path / "params.yaml")
    texts = parameters.dataset.test_limit
    assert texts is None or max(parameters.capture.documents, default=0) < texts
