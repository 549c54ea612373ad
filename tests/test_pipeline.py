"""On tiny input, dvc.yaml names the parameters that each stage reads and the files that it opens and writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from conftest import REPOSITORY, toy_reviews, write_parameters, write_tiny_bert
from pydantic import BaseModel

from stages.common.parameters import Parameters, read_parameters
from stages.common.resume import UNFINISHED

PIPELINE: dict[str, Any] = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))
STAGES = {name: stage.get("do", stage) for name, stage in PIPELINE["stages"].items()}
# Exempt are: keys that are read only for a hub's source, or only where nothing is trained; keys of later stages that
# `finetune` only checks; numbers of documents in the sections of stages whose texts `tokenize` chooses; and the
# arithmetic of `reduce`, which has no tensor of torch and takes it from the environment.
EXEMPT = {
    "download": {"dataset.revision", "model.revision"},
    "finetune": {"capture.documents", "capture.max_length", "faithfulness.max_length"},
    "measure": {"measure.documents", "model.base"},
    "faithfulness": {"faithfulness.documents"},
    "reduce": {"arithmetic"},
}


def all_keys(section: str) -> set[str]:
    fields = getattr(Parameters.model_fields[section].annotation, "model_fields", None)
    return {f"{section}.{key}" for key in fields} if fields else {section}


SECTIONS = {type(value): f"{name}." for name, value in Parameters() if isinstance(value, BaseModel)}
ALL_KEYS = {key for section in Parameters.model_fields for key in all_keys(section)}


def declared_keys(stage: str) -> set[str]:
    """Return the parameters that dvc.yaml names for a stage; a section stands for its keys, the file for all."""
    names = STAGES[stage]["params"]
    if {"params.yaml": None} in names:
        return ALL_KEYS
    return set().union(*(all_keys(name) if name in Parameters.model_fields else {name} for name in names))


def outputs(stage: str) -> list[str]:
    outs = [out for kind in ("outs", "metrics", "plots") for out in STAGES[stage].get(kind, ())]
    return [out if isinstance(out, str) else next(iter(out)) for out in outs]


def outside(paths: set[str], places: Iterable[str]) -> set[str]:
    """Return the paths that are in none of the places."""
    return {path for path in paths if not any(Path(path).is_relative_to(place) for place in places)}


class Observed(NamedTuple):
    """The keys that a stage read on tiny input, and the files that it opened and wrote."""

    keys: set[str]
    opened: set[str]
    written: set[str]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Observed]:
    """Every stage, run on tiny input in one folder, in turn; its name has spaces, a quote and letters of all kinds."""
    folder = tmp_path_factory.mktemp("Möbius' Ordner 模型 ")
    checkpoint = write_tiny_bert(folder / "bert", layers=2)
    toy_reviews(40, 0).to_csv(folder / "reviews.csv", index=False)
    write_parameters(
        folder,
        dataset={"name": "reviews.csv"},
        model={"name": str(checkpoint)},
        finetune={"epochs": 1, "max_length": 40},
        capture={"documents": [0, 1], "max_length": 40},
        measure={"documents": 3, "gradient_documents": 1},
        faithfulness={"documents": 2, "max_length": 20},
        render={"dpi": 50},
    )
    keys, opened = set[str](), set[str]()

    def record(section: BaseModel, name: str) -> Any:
        value = object.__getattribute__(section, name)
        if name in type(section).model_fields and not isinstance(value, BaseModel):
            keys.add(f"{SECTIONS.get(type(section), '')}{name}")
        return value

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            path = Path(os.path.abspath(arguments[0]))  # noqa: PTH100 (without following links)
            if path.is_relative_to(folder) and path.is_file():
                opened.add(path.relative_to(folder).as_posix())

    def times() -> dict[str, int]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in files}

    sys.addaudithook(look)
    runs = {}
    with pytest.MonkeyPatch.context() as patch:
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
def test_stage_names_exactly_the_parameters_that_it_reads(observed: dict[str, Observed], stage: str) -> None:
    # The page names every parameter that differs from its default.
    exempt = ALL_KEYS if stage == "render" else EXEMPT.get(stage, set())
    assert declared_keys(stage) - exempt == observed[stage].keys - exempt


@pytest.mark.parametrize("stage", STAGES)
def test_stage_opens_and_writes_only_the_files_that_it_names_and_writes_all_of_them(
    observed: dict[str, Observed], stage: str
) -> None:
    _, opened, written = observed[stage]
    assert [out for out in outputs(stage) if outside(written, [out]) == written] == []
    # Until the stage `sources` exists, `download` says what is to be watched.
    assert outside(written, [*outputs(stage), *(["reports/sources.json"] if stage == "download" else [])]) == set()
    sources = ["reviews.csv", "bert"] if stage in ("sources", "download") else []  # named in params.yaml
    assert outside(opened, [*STAGES[stage]["deps"], *outputs(stage), str(UNFINISHED), *sources]) == set()
    assert opened


@pytest.mark.parametrize("profile", sorted((REPOSITORY / "profiles").glob("*.txt")), ids=lambda path: path.stem)
def test_profile_is_a_valid_choice_of_known_parameters(tmp_path: Path, profile: Path) -> None:
    """As `dvc exp run -S` writes it into params.yaml, by DVC's own writer."""
    from dvc.utils.hydra import apply_overrides

    lines = [line for line in profile.read_text(encoding="utf-8").splitlines() if not line.startswith("# ")]
    assert [line for line in lines if len(line.split()) != 1] == []  # a shell separates them
    write_parameters(tmp_path)
    apply_overrides(tmp_path / "params.yaml", lines)
    parameters = read_parameters(tmp_path / "params.yaml")
    for key, value in (line.split("=", 1) for line in lines):
        section, name = key.split(".")
        assert getattr(getattr(parameters, section), name) == yaml.safe_load(value)
    texts = parameters.dataset.test_limit
    assert texts is None or max(parameters.capture.documents) < texts
