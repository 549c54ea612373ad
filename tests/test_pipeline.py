"""The whole pipeline on tiny input: dvc.yaml names exactly what each stage reads and writes."""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY, toy_reviews, write_parameters, write_tiny_bert

from stages.parameters import Parameters, read_parameters

PIPELINE: dict[str, Any] = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))
STAGES = PIPELINE["stages"]
ONLY_FOR_A_HUB = {"dataset.revision", "model.revision"}


class Recorder:
    """A section of the parameters that notes which keys are read."""

    def __init__(self, section: Any, prefix: str, seen: set[str]) -> None:
        self._section, self._prefix, self._seen = section, prefix, seen

    def __getattr__(self, key: str) -> Any:
        value = getattr(self._section, key)
        if key in type(self._section).model_fields:
            if hasattr(type(value), "model_fields"):
                return Recorder(value, f"{key}.", self._seen)
            self._seen.add(self._prefix + key)
        return value

    def model_dump(self, include: set[str] | None = None) -> Any:
        self._seen |= {self._prefix + key for key in include or type(self._section).model_fields}
        return self._section.model_dump(include=include)


@pytest.fixture(scope="module")
def read_by_stage(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Run every stage on tiny input in one folder; the parameters that each one read."""
    folder = tmp_path_factory.mktemp("pipeline")
    checkpoint = write_tiny_bert(folder / "bert", layers=2)
    toy_reviews(40, 0).to_csv(folder / "reviews.csv", index=False)
    write_parameters(
        folder,
        dataset={"name": "reviews.csv"},
        model={"name": str(checkpoint)},
        finetune={"epochs": 1, "max_length": 40},
        capture={"documents": [0, 1], "max_length": 40},
        mixing={"documents": 3, "max_length": 40, "bootstrap_samples": 100, "gradient_documents": 1},
        umap={"n_epochs": 20},
        figures={"dpi": 50},
    )
    seen: dict[str, set[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in STAGES:
            seen[name] = set()
            recorder: Any = Recorder(read_parameters(), "", seen[name])
            import_module(f"stages.{name}").main(recorder)
        written = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    seen["written"] = written
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_stage_names_exactly_the_parameters_that_it_reads(read_by_stage: dict[str, set[str]], stage: str) -> None:
    assert set(STAGES[stage]["params"]) - ONLY_FOR_A_HUB == read_by_stage[stage] - ONLY_FOR_A_HUB


@pytest.mark.parametrize("stage", STAGES)
def test_stage_writes_every_output_that_it_names(read_by_stage: dict[str, set[str]], stage: str) -> None:
    outputs = [out if isinstance(out, str) else next(iter(out)) for out in STAGES[stage]["outs"]]
    assert set(outputs) <= read_by_stage["written"]


def test_every_parameter_is_read_by_some_stage() -> None:
    keys = {"seed"}
    for section, field in Parameters.model_fields.items():
        if section != "seed":
            keys |= {f"{section}.{key}" for key in getattr(field.annotation, "model_fields", {})}
    # The page lists them all, so what render reads says nothing about the others' work.
    assert {key for name, stage in STAGES.items() if name != "render" for key in stage["params"]} == {
        key for key in keys if not key.startswith("figures.")
    }
    assert set(STAGES["render"]["params"]) == keys


@pytest.mark.parametrize("stage", STAGES)
def test_dependencies_are_files_of_the_repository_or_outputs_of_earlier_stages(stage: str) -> None:
    earlier: set[str] = set()
    for name in STAGES:
        if name == stage:
            break
        earlier |= {out if isinstance(out, str) else next(iter(out)) for out in STAGES[name]["outs"]}
    for path in STAGES[stage]["deps"]:
        made = any(path == out or path.startswith(f"{out}/") for out in earlier)
        assert made or (REPOSITORY / path).exists(), path
    assert STAGES[stage]["cmd"] == f"python -m stages.{stage}"


@pytest.mark.parametrize("stage", STAGES)
def test_code_that_a_stage_imports_is_among_its_dependencies(stage: str) -> None:
    before = set(sys.modules)
    saved = {name: sys.modules.pop(name) for name in before if name.split(".")[0] == "stages"}
    try:
        import_module(f"stages.{stage}")
        imported = [m for name, m in sys.modules.items() if name.startswith("stages.") and hasattr(m, "__file__")]
        files = {Path(str(m.__file__)).relative_to(REPOSITORY).as_posix() for m in imported}
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "stages"]:
            del sys.modules[name]
        sys.modules.update(saved)
    # Reading parameters and reporting errors changes no result.
    entry = {"stages/errors.py", "stages/parameters.py"}
    dependencies = STAGES[stage]["deps"]
    for file in files - entry:
        if file.endswith("__init__.py") or file == "stages/models/capture_points.py":
            continue
        assert any(file == path or file.startswith(f"{path}/") for path in dependencies), file


def test_profile_names_keys_that_exist(tmp_path: Path) -> None:
    values = yaml.safe_load((REPOSITORY / "params.yaml").read_text(encoding="utf-8"))
    lines = (REPOSITORY / "profiles/paper.txt").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            section, name = key.split(".")
            assert name in values[section], key
            values[section][name] = yaml.safe_load(value)
    values["finetune"]["learning_rate"] = float(values["finetune"]["learning_rate"])
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    assert read_parameters(tmp_path / "params.yaml").model.name == "bert-base-uncased"
    shutil.rmtree(tmp_path)
